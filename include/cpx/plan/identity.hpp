// SPDX-License-Identifier: Apache-2.0
// What ranks must agree on before they run a plan together.
#pragma once

#include <cpx/core/element_name.hpp>
#include <cpx/core/hash.hpp>
#include <cpx/layout/sharding.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpx {

namespace detail {

/// Lists the values that ranks have, and the ranks that have them: "8 (ranks 0 1 3), 10 (rank 2)".
inline std::string who_has_what(std::vector<std::string> const& values) {
    std::string text;
    for (std::size_t r = 0; r < values.size(); ++r) {
        if (std::find(values.begin(), values.begin() + static_cast<index_t>(r), values[r]) !=
            values.begin() + static_cast<index_t>(r))
            continue; // told already
        std::string who;
        for (std::size_t other = r; other < values.size(); ++other)
            if (values[other] == values[r]) who += ' ' + std::to_string(other);
        bool const several = who.find(' ', 1) != std::string::npos;
        text += (text.empty() ? "" : ", ") + values[r] + (several ? " (ranks" : " (rank") + who + ')';
    }
    return text;
}

} // namespace detail

/// A summary of a plan that is the same on every rank if, and in practice only if, the plans fit each other.
///
/// A fixed number of bytes, so that ranks can show it to one another without knowing anything yet.
struct identity {
    enum number : std::size_t {
        ranks,
        sequences,
        tokens,
        first_offset, ///< the second of cu_seqlens, and those after it, 0 behind the last
        last_offset = first_offset + 7,
        cu_seqlens, ///< all of them, and valid lengths
        source_hash,
        target_hash,
        source_width,
        target_width,
        parameter,
        element_bytes, ///< set when the plan is run
        agreement,     ///< 1: the plan is not run, ranks compare it
        numbers_count
    };
    static constexpr std::array<char const*, numbers_count> number_names{
        "ranks",
        "sequences",
        "tokens",
        "offset 1 of cu_seqlens",
        "offset 2 of cu_seqlens",
        "offset 3 of cu_seqlens",
        "offset 4 of cu_seqlens",
        "offset 5 of cu_seqlens",
        "offset 6 of cu_seqlens",
        "offset 7 of cu_seqlens",
        "offset 8 of cu_seqlens",
        "an offset of cu_seqlens after the eighth, or a valid length",
        "source sharding",
        "target sharding",
        "source width",
        "target width",
        "reach",
        "bytes of an element",
        "agreement"};

    std::array<char, 64> operation{};
    std::array<char, 80> source{}, target{}, source_settings{}, target_settings{};
    std::array<char, 64> element{}; ///< type of what is moved; set when the plan is run
    std::array<std::uint64_t, numbers_count> numbers{};

    friend bool operator==(identity const&, identity const&) = default;

    std::uint64_t& operator[](number n) { return numbers[n]; }

    /// Says of which batch the plan is.
    void set_batch(thd const& batch) {
        numbers[sequences] = static_cast<std::uint64_t>(batch.sequences());
        numbers[tokens] = static_cast<std::uint64_t>(batch.tokens());
        for (index_t s = 0; s <= static_cast<index_t>(last_offset - first_offset); ++s)
            numbers[first_offset + static_cast<std::size_t>(s)] =
                static_cast<std::uint64_t>(s < batch.sequences() ? batch.offset(s + 1) : 0);
        numbers[cu_seqlens] = batch.hash();
    }
    /// Leaves out of which batch and shardings the plan is: its rows are not tokens.
    void forget_batch() {
        std::fill(numbers.begin() + tokens, numbers.begin() + cu_seqlens + 1, 0);
        numbers[source_hash] = numbers[target_hash] = 0;
    }

    /// Returns the identity of the plan that moves everything back. Unless this plan is `one_to_one`, its operation
    /// makes no such plan from the shardings swapped: then the operation is called transposed.
    identity transposed(bool one_to_one) const {
        static constexpr std::string_view mark = " transposed";
        identity back = *this;
        std::string_view const name = operation.data();
        bool const marked = name.ends_with(mark);
        if (!one_to_one) {
            back.operation = {};
            set(back.operation, marked ? std::string(name.substr(0, name.size() - mark.size()))
                                       : std::string(name) + std::string(mark));
        }
        back.source = target; // a swap of arrays goes byte by byte
        back.target = source;
        back.source_settings = target_settings;
        back.target_settings = source_settings;
        std::swap(back[source_hash], back[target_hash]);
        std::swap(back[source_width], back[target_width]);
        return back;
    }

    /// Returns a 64-bit hash of everything: the plan's fingerprint. Settings are in it as the hashes of them.
    std::uint64_t fingerprint() const {
        std::uint64_t hash = 0;
        for (char const* const text : {operation.data(), source.data(), target.data(), element.data()})
            hash = detail::mix_all(hash, std::string_view(text));
        return detail::mix_all(hash, numbers);
    }

    /// Returns what ranks compare before they run the plan for elements T in rows of `width`, if it moves any.
    template <class T>
    identity for_elements(index_t width) const {
        identity id = *this;
        set(id.element, element_name<T>);
        id[element_bytes] = sizeof(T);
        if (numbers[target_width] == 0) id[source_width] = static_cast<std::uint64_t>(width);
        return id;
    }

    /// Returns whether a rank with this identity and one with `other` are in one exchange; ranks that compare their
    /// plans are, whatever these are.
    bool same_exchange(identity const& other) const {
        return (numbers[agreement] && other.numbers[agreement]) || *this == other;
    }

    /// Returns the number of the first field that differs from `other`, or -1.
    int first_difference(identity const& other) const {
        for (int field = 0; field < fields; ++field)
            if (value(field) != other.value(field)) return field;
        return -1;
    }

    static constexpr int texts = 4, fields = texts + static_cast<int>(numbers_count);
    /// Returns whether a field sums up the batch; who has the batch can say more of it.
    static constexpr bool of_batch(int field) {
        return field >= texts + static_cast<int>(sequences) && field <= texts + static_cast<int>(cu_seqlens);
    }
    /// Returns whether the value of a field ends in a hash; who has the sharding can say more of it.
    static bool cut_short(std::string_view value) { return value.find("hash ") != value.npos; }
    std::string name(int field) const {
        static constexpr std::array<char const*, texts> names{"operation", "source layout", "target layout",
                                                              "element type"};
        if (field < texts) return names[static_cast<std::size_t>(field)];
        return name_of(static_cast<number>(field - texts));
    }
    std::string value(int field) const {
        if (field < texts)
            return std::array{operation.data(), source.data(), target.data(),
                              element.data()}[static_cast<std::size_t>(field)];
        auto const n = static_cast<std::size_t>(field - texts);
        if (n == source_hash) return source_settings.data();
        if (n == target_hash) return target_settings.data();
        return std::to_string(numbers[n]);
    }

    /// Returns "relayout zigzag<4> over sequence -> sequential<4> over sequence", after "agreement on " if it is one.
    std::string text() const {
        return std::string(numbers[agreement] ? "agreement on " : "") + operation.data() + (source[0] ? " " : "") +
               source.data() + (target[0] ? std::string(" -> ") + target.data() : "");
    }

    /// Says for which operator a plan is run: the operation is then "shift_rows: halo after".
    void run_by(char const* name) { set(operation, name + std::string(": ") + operation.data()); }

    /// A text that is too long is cut, and ends in a hash of all of it.
    template <std::size_t N>
        requires(N > 9)
    static void set(std::array<char, N>& field, std::string_view text) {
        field = {}; // the last byte stays 0
        std::ranges::copy(text.substr(0, N - 1), field.begin());
        if (text.size() < N) return;
        std::uint64_t hash = detail::mix_all(0, text);
        for (std::size_t i = N - 9; i < N - 1; ++i, hash >>= 4) field[i] = "0123456789abcdef"[hash & 15];
    }

private:
    /// What a number of an operation is; the parameter of a halo is its reach.
    char const* name_of(number n) const {
        struct meaning {
            std::string_view operation;
            number of;
            char const* name;
        };
        std::string_view run = operation.data();
        run.remove_prefix(run.find(": ") == run.npos ? 0 : run.find(": ") + 2); // for whom
        for (meaning const m : {meaning{"carry", parameter, "elements of a map"},
                                {"expert_balance", parameter, "over"},
                                {"sum_over_ranks", parameter, "number of values"},
                                {"cached_attention", source_width, "query heads"},
                                {"cached_attention", target_width, "key heads"},
                                {"cached_attention", parameter, "width of heads or tokens kept (hash)"},
                                {"media counts", parameter, "grids (hash)"},
                                {"gather", parameter, "bytes"},
                                {"broadcast", parameter, "bytes"}})
            if (n == m.of && run.starts_with(m.operation)) return m.name;
        return number_names[n];
    }
};

namespace detail {

template <any_sharding S>
std::string const& sharding_name() {
    static std::string const name = [] {
        if constexpr (requires { typename S::layout_type; })
            return std::string(type_name<typename S::layout_type>()) +
                   (S::cuts == scope::sequence ? " over sequence, " : " over batch, ") +
                   std::string(type_name<typename S::cut_type>());
        else
            return std::string(type_name<S>());
    }();
    return name;
}

/// Is given the settings of a sharding one after the other: hashes them, lists them if there is a list, and says of the
/// setting at `named` what it is.
struct setting_reader {
    std::vector<index_t>* list = nullptr;
    index_t named = -1;
    std::string name = {};
    std::uint64_t hash = 0;

    /// `what` has a # where each of the numbers belongs: "owner of chunk #".
    void operator()(index_t number, char const* what, std::initializer_list<index_t> of = {}) {
        hash = mix(hash, static_cast<std::uint64_t>(number));
        if (!list) return;
        if (std::ssize(*list) == named) {
            name.clear();
            for (auto next = of.begin(); *what; ++what)
                name += *what == '#' ? std::to_string(*next++) : std::string(1, *what);
        }
        list->push_back(number);
    }
};

/// Lets `read` read all that types do not tell: run-time sizes, owners, cuts, sections.
template <any_sharding S>
setting_reader read_settings(S const& s, setting_reader read = {}) {
    read(s.ranks(), "ranks");
    for (index_t i = 0; section const& group : s.sections()) {
        read(group.heads, "heads of section #", {i});
        read(group.width, "width of section #", {i});
        ++i;
    }
    if constexpr (!requires { typename S::layout_type; }) { // other shardings are known by their rows
        for (int rank = 0; rank < s.ranks(); ++rank) {
            read(s.rows(rank), "rows of rank #", {rank});
            if constexpr (!S::every_row)
                s.for_each_piece(rank, [&, i = index_t{0}](range piece) mutable {
                    read(piece.first, "first row of piece # of rank #", {i++, rank});
                });
        }
    } else {
        constexpr bool one_layout = layout<typename S::layout_type>; // a length rule is known by its answers
        for (index_t i = 0; i < (one_layout ? 1 : s.runs()); ++i) {
            auto const l = layout_at(s.policy(), s.runs() > 0 ? s.run(i).size() : 0);
            read(l.chunks(), one_layout ? "chunks" : "chunks of run #", {i});
            for (int c = 0; c < l.chunks(); ++c)
                read(l.owner(c), one_layout ? "owner of chunk #" : "owner of chunk # of run #", {c, i});
        }
        if constexpr (requires { s.cut().unit(); } && ascends<typename S::cut_type>)
            read(s.cut().unit(), "unit");
        else if constexpr (!ascends<typename S::cut_type>) // a user's cut is known by its answers
            for (index_t t = 1; t < index_t{1} << 32; t *= 2)
                read(s.cut().snap(s.cut().begin(1, 3, 3 * t), 3 * t), "begin of chunk 1 of 3 in # tokens", {3 * t});
    }
    return read;
}

/// Whether the numbers above follow from the type alone.
template <class S>
inline constexpr bool settled = false;
template <static_layout L, scope Scope, cut Cut>
inline constexpr bool settled<sharding<L, Scope, Cut>> = std::is_empty_v<Cut>;

/// Hashes the numbers above; those of a type once.
template <any_sharding S>
std::uint64_t sharding_hash(S const& s) {
    if constexpr (settled<S>) {
        static std::uint64_t const hash = read_settings(s).hash;
        return hash;
    } else {
        return read_settings(s).hash;
    }
}

/// Tells in at most 79 characters what `hash` sums up: `text`, if that is `whole`, or its beginning and the hash.
inline std::string cut_settings(std::string text, bool whole, std::uint64_t hash) {
    if (whole && text.size() < 80) return text;
    if (text.size() > 40) text = text.substr(0, text.rfind(' ', 40)) + " ...";
    return text + (text.empty() ? "" : ", ") + "hash " + std::to_string(hash);
}

inline std::string section_settings(std::span<section const> sections) {
    std::string text;
    for (section const& group : sections)
        text += (text.empty() ? "" : ", ") + std::to_string(group.heads) + " heads of " + std::to_string(group.width);
    return text;
}

/// Tells the settings of a sharding, whose hash is the one above.
template <any_sharding S>
std::string sharding_settings(S const& s, std::uint64_t hash) {
    std::string text = section_settings(s.sections());
    if constexpr (requires { typename S::layout_type; }) {
        using L = typename S::layout_type;
        if constexpr (requires { s.cut().unit(); } && ascends<typename S::cut_type>)
            text += (text.empty() ? "unit " : ", unit ") + std::to_string(s.cut().unit());
        if constexpr (layout<L> && !std::is_empty_v<L>) { // an empty type has its owners in its name
            text += text.empty() ? "owners" : ", owners";
            for (int c = 0; c < s.policy().chunks() && text.size() < 80; ++c)
                text += ' ' + std::to_string(s.policy().owner(c));
        }
        return cut_settings(text, layout<L> && ascends<typename S::cut_type>, hash);
    } else {
        return cut_settings(text, S::every_row, hash); // its sections are all of a sharding by heads
    }
}

/// Where settings that an identity cuts short can be read. A plan is the same with it and without.
struct settings {
    struct source {
        virtual ~source() = default;
        virtual setting_reader read(setting_reader reader) const = 0;
    };
    std::shared_ptr<source const> from = {};
    friend bool operator==(settings const&, settings const&) { return true; }
};

/// What an identity says of one sharding; `all`: its settings, but none if the text is all of them.
struct identity_end {
    std::string const& name;
    std::uint64_t hash;
    std::string text;
    settings all = {};
};
template <any_sharding S>
identity_end end_of(S const& s) {
    struct source final : settings::source {
        explicit source(S const& of) : sharding(of) {}
        setting_reader read(setting_reader reader) const override { return read_settings(sharding, std::move(reader)); }
        S sharding;
    };
    std::uint64_t const hash = sharding_hash(s);
    identity_end end{sharding_name<S>(), hash, sharding_settings(s, hash)};
    if (identity::cut_short(end.text)) end.all.from.reset(static_cast<settings::source const*>(new source(s)));
    return end;
}

/// Returns the identity of a plan of a batch from one sharding to another.
inline identity identify(std::string_view operation, identity_end const& from, identity_end const& to, int ranks,
                         thd const& batch, index_t parameter = 0) {
    identity id;
    identity::set(id.operation, operation);
    identity::set(id.source, from.name);
    identity::set(id.target, to.name);
    identity::set(id.source_settings, from.text);
    identity::set(id.target_settings, to.text);
    id[identity::ranks] = static_cast<std::uint64_t>(ranks);
    id[identity::source_hash] = from.hash;
    id[identity::target_hash] = to.hash;
    id[identity::parameter] = static_cast<std::uint64_t>(parameter);
    id.set_batch(batch);
    return id;
}
template <any_sharding A, any_sharding B>
identity identify(std::string_view operation, A const& from, B const& to, index_t parameter = 0) {
    return identify(operation, end_of(from), end_of(to), from.ranks(), from.batch(), parameter);
}

} // namespace detail

} // namespace cpx
