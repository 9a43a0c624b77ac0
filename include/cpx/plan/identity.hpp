// SPDX-License-Identifier: Apache-2.0
// What ranks must agree on before they run a plan together.
#pragma once

#include <cpx/core/element_name.hpp>
#include <cpx/core/hash.hpp>
#include <cpx/layout/sharding.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
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
        std::swap(back.source, back.target);
        std::swap(back.source_settings, back.target_settings);
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
        if (field == texts + static_cast<int>(parameter)) return parameter_name();
        return number_names[static_cast<std::size_t>(field - texts)];
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
    /// What the parameter of an operation is; of a halo, its reach.
    char const* parameter_name() const {
        struct meaning {
            std::string_view operation;
            char const* name;
        };
        std::string_view of = operation.data();
        of.remove_prefix(of.find(": ") == of.npos ? 0 : of.find(": ") + 2); // for whom
        for (meaning const m : {meaning{"carry", "elements of a map"},
                                {"expert_balance", "over"},
                                {"sum_over_ranks", "number of values"},
                                {"media counts", "grids (hash)"},
                                {"gather", "bytes"},
                                {"broadcast", "bytes"}})
            if (of.starts_with(m.operation)) return m.name;
        return number_names[parameter];
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

/// Calls `f(number, name)` for all that types do not tell: run-time sizes, owners, cuts, sections. `name()` says what a
/// number is.
template <any_sharding S, class F>
void for_each_setting(S const& s, F&& f) {
    auto const text = [](auto const& number) { return std::to_string(number); };
    f(s.ranks(), [] { return std::string("ranks"); });
    for (index_t i = 0; section const& group : s.sections()) {
        f(group.heads, [&] { return "heads of section " + text(i); });
        f(group.width, [&] { return "width of section " + text(i); });
        ++i;
    }
    if constexpr (!requires { typename S::layout_type; }) { // other shardings are known by their rows
        for (int rank = 0; rank < s.ranks(); ++rank) {
            f(s.rows(rank), [&] { return "rows of rank " + text(rank); });
            if constexpr (!S::every_row)
                s.for_each_piece(rank, [&, i = 0](range piece) mutable {
                    f(piece.first, [&] { return "first row of piece " + text(i) + " of rank " + text(rank); });
                    ++i;
                });
        }
    } else {
        constexpr bool one_layout = layout<typename S::layout_type>; // a length rule is known by its answers
        for (index_t i = 0; i < (one_layout ? 1 : s.runs()); ++i) {
            auto const l = layout_at(s.policy(), s.runs() > 0 ? s.run(i).size() : 0);
            auto const of = [&] { return one_layout ? std::string() : " of run " + text(i); };
            f(l.chunks(), [&] { return "chunks" + of(); });
            for (int c = 0; c < l.chunks(); ++c) f(l.owner(c), [&] { return "owner of chunk " + text(c) + of(); });
        }
        if constexpr (requires { s.cut().unit(); } && ascends<typename S::cut_type>)
            f(s.cut().unit(), [] { return std::string("unit"); });
        else if constexpr (!ascends<typename S::cut_type>) // a user's cut is known by its answers
            for (index_t t = 1; t < index_t{1} << 32; t *= 2)
                f(s.cut().snap(s.cut().begin(1, 3, 3 * t), 3 * t),
                  [&] { return "begin of chunk 1 of 3 in " + text(3 * t) + " tokens"; });
    }
}

/// Whether the numbers above follow from the type alone.
template <class S>
inline constexpr bool settled = false;
template <static_layout L, scope Scope, cut Cut>
inline constexpr bool settled<sharding<L, Scope, Cut>> = std::is_empty_v<Cut>;

/// Hashes the numbers above; those of a type once.
template <any_sharding S>
std::uint64_t sharding_hash(S const& s) {
    auto const find = [](S const& of) {
        std::uint64_t hash = 0;
        for_each_setting(of, [&](auto number, auto const&) { hash = mix(hash, static_cast<std::uint64_t>(number)); });
        return hash;
    };
    if constexpr (settled<S>) {
        static std::uint64_t const hash = find(s);
        return hash;
    } else {
        return find(s);
    }
}

/// Tells in at most 79 characters what `hash`, the one above, sums up: all of it, or the first of it and the hash.
template <any_sharding S>
std::string sharding_settings(S const& s, std::uint64_t hash) {
    std::string text;
    bool whole = false;
    auto const add = [&](std::string const& more) { text += (text.empty() ? "" : ", ") + more; };
    for (section const& group : s.sections())
        add(std::to_string(group.heads) + " heads of " + std::to_string(group.width));
    whole = S::every_row && text.size() < 80; // all of a sharding by heads
    if constexpr (requires { typename S::layout_type; }) {
        using L = typename S::layout_type;
        if constexpr (requires { s.cut().unit(); } && ascends<typename S::cut_type>)
            add("unit " + std::to_string(s.cut().unit()));
        if constexpr (layout<L> && !std::is_empty_v<L>) { // an empty type has its owners in its name
            add("owners");
            for (int c = 0; c < s.policy().chunks() && text.size() < 80; ++c)
                text += ' ' + std::to_string(s.policy().owner(c));
        }
        whole = layout<L> && ascends<typename S::cut_type> && text.size() < 80;
    }
    if (whole) return text;
    if (text.size() > 40) text = text.substr(0, text.rfind(' ', 40)) + " ...";
    add("hash " + std::to_string(hash));
    return text;
}

template <any_sharding A, any_sharding B>
identity identify(std::string_view operation, A const& from, B const& to, index_t parameter = 0) {
    identity id;
    identity::set(id.operation, operation);
    identity::set(id.source, sharding_name<A>());
    identity::set(id.target, sharding_name<B>());
    std::uint64_t const source = sharding_hash(from), target = sharding_hash(to);
    identity::set(id.source_settings, sharding_settings(from, source));
    identity::set(id.target_settings, sharding_settings(to, target));
    id[identity::ranks] = static_cast<std::uint64_t>(from.ranks());
    id[identity::source_hash] = source;
    id[identity::target_hash] = target;
    id[identity::parameter] = static_cast<std::uint64_t>(parameter);
    id.set_batch(from.batch());
    return id;
}

/// Where settings that an identity cuts short can be read: `list(named, name)` returns all the numbers and calls one of
/// them by its name. A plan is the same with it and without.
struct settings {
    std::shared_ptr<std::function<std::vector<index_t>(index_t named, std::string& name)> const> list = {};
    friend bool operator==(settings const&, settings const&) { return true; }
};

/// Returns the settings of a sharding, but none if `told`, its text in an identity, is all of them.
template <any_sharding S>
settings settings_of(S const& s, std::string_view told) {
    if (!identity::cut_short(told)) return {};
    auto const list = [s](index_t named, std::string& name) {
        std::vector<index_t> numbers;
        for_each_setting(s, [&](index_t number, auto const& its_name) {
            if (std::ssize(numbers) == named) name = its_name();
            numbers.push_back(number);
        });
        return numbers;
    };
    return {std::make_shared<typename decltype(settings::list)::element_type>(list)};
}

} // namespace detail

} // namespace cpx
