// SPDX-License-Identifier: Apache-2.0
// What ranks must agree on before they run a plan together.
#pragma once

#include <cpx/core/element_name.hpp>
#include <cpx/core/hash.hpp>
#include <cpx/core/thd.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
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
        first_argument, ///< of the operator that runs the plan, see `arguments`
        last_argument = first_argument + 7,
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
        "argument 1",
        "argument 2",
        "argument 3",
        "argument 4",
        "argument 5",
        "argument 6",
        "argument 7",
        "argument 8",
        "source width",
        "target width",
        "reach",
        "bytes of an element",
        "agreement"};

    /// What an operator is given that moves nowhere, and all ranks must have alike: numbers, words, or the bits of real
    /// numbers, in an order of its own; 0 where there is none.
    using arguments = std::array<std::uint64_t, last_argument - first_argument + 1>;
    /// Returns a word of at most eight letters as such a number.
    static constexpr std::uint64_t word(std::string_view text) {
        std::uint64_t letters = 0;
        for (std::size_t i = 0; i < text.size(); ++i)
            letters |= std::uint64_t{static_cast<unsigned char>(text[i])} << (8 * i);
        return letters;
    }

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
        source_settings = target_settings = {};
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
        meaning const* const m = meaning_of(static_cast<number>(n));
        return text_of(numbers[n], m ? m->as : shown::number);
    }

    /// Returns "relayout zigzag<4> over sequence -> sequential<4> over sequence", after "agreement on " if it is one.
    std::string text() const {
        return std::string(numbers[agreement] ? "agreement on " : "") + operation.data() + (source[0] ? " " : "") +
               source.data() + (target[0] ? std::string(" -> ") + target.data() : "");
    }

    /// Says for which operator a plan is run: the operation is then "shift_rows: halo after".
    void run_by(char const* name) { set(operation, name + std::string(": ") + operation.data()); }
    /// Says what that operator is given.
    void set_arguments(arguments const& given) { std::ranges::copy(given, numbers.begin() + first_argument); }

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
    enum class shown { number, word, real };
    /// Different numbers are different texts, by which ranks compare.
    static std::string text_of(std::uint64_t letters, shown as) {
        if (as == shown::number || letters == 0) return std::to_string(letters);
        std::array<char, 32> text{};
        if (as == shown::real) std::snprintf(text.data(), text.size(), "%.17g", std::bit_cast<double>(letters));
        for (std::size_t i = 0; as == shown::word && i < 8; ++i) text[i] = static_cast<char>(letters >> (8 * i) & 255);
        return text.data();
    }
    /// What a number of an operation is; the parameter of a halo is its reach.
    struct meaning {
        std::string_view operation;
        identity::number of;
        char const* name;
        shown as = shown::number;
    };
    meaning const* meaning_of(number n) const {
        static constexpr auto argument = [](std::size_t i) { return static_cast<number>(first_argument + i); };
        static constexpr std::array meanings{
            meaning{"carry", argument(0), "heads of the state"},
            meaning{"carry", argument(1), "key width of the state"},
            meaning{"carry", argument(2), "value width of the state"},
            meaning{"carry", argument(3), "kind of map", shown::word},
            meaning{"carry", argument(4), "chunk"},
            meaning{"carry", argument(5), "scale", shown::real},
            meaning{"carry", argument(6), "norm of q and k", shown::word},
            meaning{"carry", argument(7), "initial states (in the backward dfinal)", shown::word},
            meaning{"carry", parameter, "elements of a map"},
            meaning{"halo", argument(0), "activation", shown::word},
            meaning{"halo", argument(1), "bias", shown::word},
            meaning{"halo", argument(2), "fill (hash)"},
            meaning{"expert_balance", parameter, "over"},
            meaning{"sum_over_ranks", parameter, "number of values"},
            meaning{"cached_attention", argument(0), "scale", shown::real},
            meaning{"cached_attention", source_width, "query heads"},
            meaning{"cached_attention", target_width, "key heads"},
            meaning{"cached_attention", parameter, "width of heads or tokens kept (hash)"},
            meaning{"media counts", parameter, "grids (hash)"},
            meaning{"gather", parameter, "bytes"},
            meaning{"broadcast", parameter, "bytes"}};
        std::string_view run = operation.data();
        run.remove_prefix(run.find(": ") == run.npos ? 0 : run.find(": ") + 2); // for whom
        auto const found =
            std::ranges::find_if(meanings, [&](meaning const& m) { return n == m.of && run.starts_with(m.operation); });
        return found == meanings.end() ? nullptr : &*found;
    }
    char const* name_of(number n) const {
        meaning const* const m = meaning_of(n);
        return m ? m->name : number_names[n];
    }
};

} // namespace cpx
