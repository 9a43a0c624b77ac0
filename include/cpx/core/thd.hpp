// SPDX-License-Identifier: Apache-2.0
// The packed batch: sequences laid end to end in one row of tokens ("thd": tokens, heads, dim).
#pragma once

#include <cpx/core/hash.hpp>
#include <cpx/core/refused.hpp>
#include <cpx/core/search.hpp>
#include <cpx/core/size.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace cpx {

/// A vector, array or span of integers of any width.
template <class R>
concept integers = std::ranges::contiguous_range<R const> && std::integral<std::ranges::range_value_t<R const>> &&
                   !std::same_as<std::ranges::range_value_t<R const>, bool> &&
                   !std::same_as<std::ranges::range_value_t<R const>, char>;

namespace detail {

/// A number of tokens in braces, where one that is not whole is refused before it could be narrowed.
struct listed_tokens {
    listed_tokens(index_t n) : number(n) {}
    template <std::floating_point X>
    listed_tokens(X) {
        static_assert(never<X>, "cpx: thd wants whole numbers, the offsets of its sequences: thd({0, 7, 20}), or their "
                                "lengths: thd::from_lengths({7, 13})");
    }
    operator index_t() const { return number; }
    index_t number = 0;
};

} // namespace detail

/// A packed batch of N sequences, described by their N + 1 offsets (cu_seqlens).
///
/// Sequence `s` holds the global rows `offset(s) .. offset(s + 1)`. Lengths of 0 and 1, odd lengths and repeated
/// offsets at the end are ordinary. Immutable and cheap to copy: copies share the offsets.
///
/// Offsets are physical. When sequences are padded, `valid` gives the tokens that count, at the front of each
/// sequence; layouts, plans and operators see physical tokens, losses and masks see valid ones.
class thd {
public:
    /// An empty batch.
    thd() : data_(none()) {}

    /// Takes offsets and, if there is padding, the valid length of every sequence. Batches without padding are equal,
    /// with valid lengths or without.
    ///
    /// Throws `cpx::error` that names the first bad entry: offsets that are empty, do not start at 0, decrease or end
    /// at 2^62 or beyond, valid lengths that are not one a sequence or exceed its physical length.
    explicit thd(std::vector<index_t> offsets, std::vector<index_t> valid = {}, caller here = caller::here()) {
        require(!offsets.empty(), "thd", "number of offsets", "at least 1", 0, here);
        require(offsets.front() == 0, "thd", "offset 0", 0, offsets.front(), here);
        for (std::size_t s = 1; s < offsets.size(); ++s)
            if (offsets[s] <
                offsets[s - 1]) // the text is made only when it is needed: plans of 4096 sequences count microseconds
                throw error("thd", "offset " + std::to_string(s) + " decreases",
                            "at least " + std::to_string(offsets[s - 1]), std::to_string(offsets[s]), here);
        require(offsets.back() < detail::size_limit, "thd", "last offset", "less than 2^62", offsets.back(), here);
        require(valid.empty() || valid.size() + 1 == offsets.size(), "thd", "number of valid lengths",
                offsets.size() - 1, valid.size(), here);
        for (std::size_t s = 0; s < valid.size(); ++s)
            if (valid[s] < 0 || valid[s] > offsets[s + 1] - offsets[s])
                throw error("thd", "valid length of sequence " + std::to_string(s),
                            "0 to " + std::to_string(offsets[s + 1] - offsets[s]), std::to_string(valid[s]), here);
        bool padded = false;
        for (std::size_t s = 0; s < valid.size(); ++s) padded = padded || valid[s] < offsets[s + 1] - offsets[s];
        if (!padded) valid.clear();
        std::uint64_t const hash = detail::mix_all(detail::mix_all(0, offsets), valid);
        data_ = std::make_shared<lengths const>(lengths{std::move(offsets), std::move(valid), hash});
    }

    /// The same of other integers, in a vector, array or span.
    template <integers R, integers V = std::vector<index_t>>
    explicit thd(R const& offsets, V const& valid = {}, caller here = caller::here())
        : thd(numbers("thd", "offset ", offsets, here), numbers("thd", "valid length of sequence ", valid, here),
              here) {}

    /// Of offsets in braces, which might be arguments of other constructors, too.
    explicit thd(std::initializer_list<detail::listed_tokens> offsets, std::vector<index_t> valid = {},
                 caller here = caller::here())
        : thd(std::vector<index_t>(offsets.begin(), offsets.end()), std::move(valid), here) {}
    template <integers V>
    explicit thd(std::initializer_list<detail::listed_tokens> offsets, V const& valid, caller here = caller::here())
        : thd(offsets, numbers("thd", "valid length of sequence ", valid, here), here) {}

    template <class X>
        requires(!integers<X>)
    explicit thd(X const&, detail::any = {}, detail::any = {}) {
        not_integers<X>();
    }
    template <integers R, class X>
        requires(!integers<X> && !std::convertible_to<X const&, std::vector<index_t>>)
    explicit thd(R const&, X const&, detail::any = {}) {
        not_integers<X>();
    }
    template <class X>
        requires(!integers<X> && !std::convertible_to<X const&, std::vector<index_t>>)
    explicit thd(std::initializer_list<detail::listed_tokens>, X const&, detail::any = {}) {
        not_integers<X>();
    }

    /// Takes offsets as frameworks store them, for a buffer of `buffer_rows` rows (-1: not known).
    ///
    /// Throws `cpx::error` as above, and if the last offset exceeds the buffer.
    template <integers R, integers V = std::vector<index_t>>
    static thd from_offsets(R const& offsets, index_t buffer_rows = -1, V const& valid = {},
                            caller here = caller::here()) {
        thd batch(offsets, valid, here);
        require(buffer_rows < 0 || batch.tokens() <= buffer_rows, "thd", "last offset",
                "at most the rows of the buffer, " + std::to_string(buffer_rows), batch.tokens(), here);
        return batch;
    }
    template <class X = detail::any>
        requires(!integers<X>)
    static thd from_offsets(X const& = {}, detail::any = {}, detail::any = {}) {
        not_integers<X>();
        return {};
    }

    /// Returns `count` sequences of `length` tokens each, as unpacked (batch, time) tensors hold them.
    static thd uniform(index_t count, index_t length, caller here = caller::here()) {
        detail::product("thd::uniform", "tokens", {count, length}, here);
        auto offsets = detail::zeros<index_t>("thd::uniform", {count + 1}, here);
        for (index_t s = 0; s <= count; ++s) offsets[static_cast<std::size_t>(s)] = s * length;
        return thd(std::move(offsets), {}, here);
    }
    template <class X = void>
    static thd uniform(detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: thd::uniform(count, length) wants two numbers; of lengths that differ, "
                                        "thd::from_lengths");
        return {};
    }

    /// Returns the batch of sequences with these lengths. Throws `cpx::error` that names the first that is negative or
    /// with which there would be 2^62 tokens.
    static thd from_lengths(std::vector<index_t> const& lengths, caller here = caller::here()) {
        std::vector<index_t> offsets(1, 0);
        for (index_t const length : lengths) {
            index_t const most = detail::size_limit - 1 - offsets.back();
            if (length < 0 || length > most)
                throw error("thd::from_lengths", "length of sequence " + std::to_string(offsets.size() - 1),
                            "0 to " + std::to_string(most), std::to_string(length), here);
            offsets.push_back(offsets.back() + length);
        }
        return thd(std::move(offsets), {}, here);
    }
    template <integers R>
    static thd from_lengths(R const& lengths, caller here = caller::here()) {
        return from_lengths(numbers("thd::from_lengths", "length of sequence ", lengths, here), here);
    }
    static thd from_lengths(std::initializer_list<detail::listed_tokens> lengths, caller here = caller::here()) {
        return from_lengths(std::vector<index_t>(lengths.begin(), lengths.end()), here);
    }
    template <class X = detail::any>
        requires(!integers<X>)
    static thd from_lengths(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
        not_integers<X>();
        return {};
    }

    index_t sequences() const { return static_cast<index_t>(data_->offsets.size()) - 1; }
    /// Returns all tokens, padding included: the global rows of the batch.
    index_t tokens() const { return data_->offsets.back(); }
    index_t offset(index_t s) const { return data_->offsets[static_cast<std::size_t>(s)]; }
    index_t length(index_t s) const { return offset(s + 1) - offset(s); }
    /// Returns the tokens of sequence `s` that are not padding.
    index_t valid(index_t s) const {
        return data_->valid.empty() ? length(s) : data_->valid[static_cast<std::size_t>(s)];
    }
    std::span<index_t const> offsets() const { return data_->offsets; }
    /// Returns the valid length of every sequence, or none if there is no padding.
    std::span<index_t const> valid_lengths() const { return data_->valid; }

    /// Returns a hash of offsets and valid lengths, by which ranks compare batches.
    std::uint64_t hash() const { return data_->hash; }

    /// Returns the sequence that holds global row `row`. Cost: O(log N). Requires `0 <= row < tokens()`.
    index_t sequence(index_t row) const {
        return last_at_or_before(row, sequences(), [this](index_t s) { return offset(s); });
    }

    friend bool operator==(thd const& a, thd const& b) {
        return a.data_ == b.data_ ||
               (a.hash() == b.hash() && a.data_->offsets == b.data_->offsets && a.data_->valid == b.data_->valid);
    }

private:
    template <class X>
    static void not_integers() {
        static_assert(detail::never<X>, "cpx: thd wants a vector, array or span of integers, the offsets of its "
                                        "sequences: thd({0, 7, 20}), and of their valid lengths; of lengths, "
                                        "thd::from_lengths");
    }

    struct lengths {
        std::vector<index_t> offsets, valid;
        std::uint64_t hash;
    };
    /// Returns the data of empty batches, of which plans are made that get another: one for all.
    static std::shared_ptr<lengths const> const& none() {
        static auto const data = thd(std::vector<index_t>{0}).data_;
        return data;
    }
    static std::vector<index_t> numbers(char const* where, char const* what, integers auto const& list, caller here) {
        std::vector<index_t> result;
        for (auto const number : list) {
            result.push_back(static_cast<index_t>(number));
            if (number > 0 && result.back() < 0)
                throw error(where, what + std::to_string(result.size() - 1), "less than 2^62", std::to_string(number),
                            here);
        }
        return result;
    }
    std::shared_ptr<lengths const> data_;
};

namespace detail {

/// Where two batches differ first, and what each has there.
struct batch_difference {
    std::string place, expected, got;
};

/// Returns the first offset, or else valid length, in which two batches differ.
inline std::optional<batch_difference> first_difference(thd const& expected, thd const& got) {
    if (expected == got) return {};
    for (bool const valid : {false, true}) {
        auto const number = [&](thd const& batch, index_t i) {
            if (i >= batch.sequences() + !valid) return std::string("none");
            return std::to_string(valid ? batch.valid(i) : batch.offset(i));
        };
        for (index_t i = 0; i <= std::max(expected.sequences(), got.sequences()); ++i)
            if (auto const is = number(got, i), should = number(expected, i); is != should)
                return batch_difference{(valid ? "valid length " : "offset ") + std::to_string(i), should, is};
    }
    return {};
}

/// Throws `cpx::error` that names where a batch is not `expected`, that of `whose`.
inline void require_batch(char const* where, char const* what, char const* whose, thd const& expected, thd const& got,
                          caller here) {
    if (auto const d = first_difference(expected, got))
        throw error(where, what, whose + (", " + d->place) + ": " + d->expected, d->got, here);
}

} // namespace detail

} // namespace cpx
