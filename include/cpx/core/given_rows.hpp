// SPDX-License-Identifier: Apache-2.0
// The guess of trainers whether rows are already sharded, for rows whose type does not say it.
#pragma once

#include <cpx/core/thd.hpp>

namespace cpx {

/// Whose rows somebody gives: the batch's, or one rank's share of every sequence.
enum class given_rows { whole, shard };

/// Guesses whose rows these are, from their number and the padded offsets of the batch, as Megatron-Bridge and miles
/// do: a rank's, zigzag over every sequence, if the batch has `ranks` times as many.
///
/// Where a program takes rows from elsewhere: within it, the types of tensors say how they are sharded. padded, valid:
/// cu_seqlens of padded sequences, and of their valid tokens where there is padding.
/// Throws `cpx::error`, where others go on with wrong rows: if a first offset is not 0, if there are no rows, if they
/// are neither the batch's nor one of W equal shares, if offsets are those of valid tokens, and if a sequence of shards
/// is not a multiple of 2 W.
template <integers P, integers V = std::vector<index_t>>
given_rows guess_rows(index_t rows, int ranks, P const& padded, V const& valid = {}, caller here = caller::here()) {
    char const* const where = "guess_rows";
    require(ranks > 0, where, "ranks", "at least 1", ranks, here);
    require(std::ssize(padded) > 0, where, "number of offsets", "at least 1", 0, here);
    require(*std::data(padded) == 0, where, "offset 0", 0, *std::data(padded), here);
    require(rows > 0, where, "rows", "at least 1, for none may be whole or a rank's", rows, here);
    thd const batch(padded, {}, here);
    require(std::ssize(valid) == 0 || std::size(valid) == std::size(padded), where, "number of valid offsets",
            std::size(padded), std::size(valid), here);
    if (std::ssize(valid) > 0) require(*std::data(valid) == 0, where, "valid offset 0", 0, *std::data(valid), here);
    for (std::size_t s = 0; s + 1 < std::size(valid); ++s) {
        index_t const length = batch.length(static_cast<index_t>(s)),
                      count = static_cast<index_t>(std::data(valid)[s + 1] - std::data(valid)[s]);
        if (count < 0 || count > length)
            throw error(where,
                        "valid tokens of sequence " + std::to_string(s) + ", whose offsets may have changed places",
                        "0 to its padded length " + std::to_string(length), std::to_string(count), here);
    }
    index_t const tokens = batch.tokens();
    if (tokens == rows) return given_rows::whole;
    if (tokens % ranks != 0 || tokens / ranks != rows)
        throw error(where, tokens / ranks < rows ? "last offset, which may be that of valid tokens" : "last offset",
                    "the rows " + std::to_string(rows) + ", or " + std::to_string(ranks) + " times as many",
                    std::to_string(tokens), here);
    for (index_t s = 0; s < batch.sequences(); ++s)
        if (batch.length(s) % (2 * index_t{ranks}) != 0)
            throw error(where, "length of sequence " + std::to_string(s) + ", of which every rank has a share",
                        "a multiple of " + std::to_string(2 * index_t{ranks}), std::to_string(batch.length(s)), here);
    return given_rows::shard;
}
template <class X = void>
given_rows guess_rows(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: guess_rows(rows, ranks, padded, valid) wants two numbers and vectors, arrays "
                                    "or spans of integers: the offsets of the padded batch, and perhaps of its tokens");
    return {};
}

} // namespace cpx
