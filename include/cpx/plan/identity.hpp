// SPDX-License-Identifier: Apache-2.0
// What ranks must agree on before they run a plan together.
#pragma once

#include <cpx/core/element_name.hpp>
#include <cpx/layout/sharding.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpx {

namespace detail {

/// Mixes one number into a 64-bit hash. Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators",
/// OOPSLA 2014, the finaliser of SplitMix64.
constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
    std::uint64_t z = (hash ^ value) + 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

template <class Numbers>
std::uint64_t mix_all(std::uint64_t hash, Numbers const& numbers) {
    hash = mix(hash, static_cast<std::uint64_t>(std::size(numbers)));
    for (auto const number : numbers) hash = mix(hash, static_cast<std::uint64_t>(number));
    return hash;
}

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
        cu_seqlens,
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
        "ranks",        "sequences",    "tokens",    "cu_seqlens (hash)",   "source sharding", "target sharding",
        "source width", "target width", "parameter", "bytes of an element", "agreement"};

    std::array<char, 24> operation{};
    std::array<char, 80> source{}, target{}, source_settings{}, target_settings{};
    std::array<char, 64> element{}; ///< type of what is moved; set when the plan is run
    std::array<std::uint64_t, numbers_count> numbers{};

    friend bool operator==(identity const&, identity const&) = default;

    std::uint64_t& operator[](number n) { return numbers[n]; }

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
        std::uint64_t hash = detail::mix_all(0, operation);
        hash = detail::mix_all(detail::mix_all(detail::mix_all(hash, source), target), element);
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
    static std::string name(int field) {
        static constexpr std::array<char const*, texts> names{"operation", "source layout", "target layout",
                                                              "element type"};
        return field < texts ? names[static_cast<std::size_t>(field)]
                             : number_names[static_cast<std::size_t>(field - texts)];
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
};

namespace detail {

template <any_sharding S>
std::string sharding_name() {
    if constexpr (requires { typename S::layout_type; })
        return std::string(type_name<typename S::layout_type>()) +
               (S::cuts == scope::sequence ? " over sequence, " : " over batch, ") +
               std::string(type_name<typename S::cut_type>());
    else
        return std::string(type_name<S>());
}

/// Hashes what types do not tell: run-time sizes, owners, cuts, sections.
template <any_sharding S>
std::uint64_t sharding_hash(S const& s) {
    std::uint64_t hash = mix(0, static_cast<std::uint64_t>(s.ranks()));
    for (section const& group : s.sections()) hash = mix_all(hash, std::array{group.heads, group.width});
    if constexpr (!requires { typename S::layout_type; }) { // other shardings are known by their rows
        for (int rank = 0; rank < s.ranks(); ++rank) {
            hash = mix(hash, static_cast<std::uint64_t>(s.rows(rank)));
            if constexpr (!S::every_row)
                s.for_each_piece(rank, [&](range piece) { hash = mix(hash, static_cast<std::uint64_t>(piece.first)); });
        }
    } else {
        index_t const runs = layout<typename S::layout_type> ? 1 : s.runs(); // a length rule is known by its answers
        for (index_t i = 0; i < runs; ++i) {
            auto const l = layout_at(s.policy(), s.runs() > 0 ? s.run(i).size() : 0);
            for (int c = 0; c < l.chunks(); ++c) hash = mix(hash, static_cast<std::uint64_t>(l.owner(c)));
        }
        if constexpr (requires { s.cut().unit(); } && ascends<typename S::cut_type>)
            hash = mix(hash, static_cast<std::uint64_t>(s.cut().unit()));
        else if constexpr (!ascends<typename S::cut_type>) // a user's cut is known by its answers
            for (index_t t = 1; t < index_t{1} << 32; t *= 2)
                hash = mix(hash, static_cast<std::uint64_t>(s.cut().snap(s.cut().begin(1, 3, 3 * t), 3 * t)));
    }
    return hash;
}

/// Tells in at most 79 characters what `hash`, the one above, sums up: all of it, or the first of it and the hash.
template <any_sharding S>
std::string sharding_settings(S const& s, std::uint64_t hash) {
    std::string text;
    bool whole = false;
    auto const add = [&](std::string const& more) { text += (text.empty() ? "" : ", ") + more; };
    for (section const& group : s.sections())
        add(std::to_string(group.heads) + " heads of " + std::to_string(group.width));
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
    thd const& batch = from.batch();
    id.numbers = {static_cast<std::uint64_t>(from.ranks()),
                  static_cast<std::uint64_t>(batch.sequences()),
                  static_cast<std::uint64_t>(batch.tokens()),
                  mix_all(mix_all(0, batch.offsets()), batch.valid_lengths()),
                  source,
                  target,
                  0,
                  0,
                  static_cast<std::uint64_t>(parameter)};
    return id;
}

} // namespace detail

} // namespace cpx
