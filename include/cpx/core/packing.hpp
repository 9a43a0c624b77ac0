// SPDX-License-Identifier: Apache-2.0
// Packed batches from what data loaders hold: position ids, padding masks, valid and padded cu_seqlens.
#pragma once

#include <cpx/core/overlap.hpp>
#include <cpx/core/rows.hpp>
#include <cpx/core/thd.hpp>

#include <numeric>
#include <ranges>

namespace cpx {

/// A vector, array or span of one of the types `E`.
template <class R, class... E>
concept list_of = std::ranges::contiguous_range<R const> && (std::same_as<std::ranges::range_value_t<R>, E> || ...);

/// What a token of position -1 is. Trainers use both, so there is no default.
enum class pad {
    joins_last_sequence, ///< one more row, not valid, of the sequence before it: tail padding
    own_sequence,        ///< a sequence of length 1 and valid length 0
};

/// On which side of its sequence the rows of a mask may have padding; `any`: on either or both.
enum class padding { left, right, any };

/// What else must hold of padded offsets: where they end (-1: not known), what divides every padded length.
struct padded_buffer {
    index_t rows = -1;
    index_t multiple = 1;
};

/// Where the rows of a batch without padding lie in a padded buffer: sequence `s` in rows `start(s)` and after.
///
/// The buffer may be a (rows, columns) tensor or another packed batch. `pack` and `unpack` move rows by it.
class packing {
public:
    /// Throws `cpx::error` that names the first sequence that overlaps the one before it or leaves the buffer.
    packing(thd batch, std::vector<index_t> starts, index_t buffer_rows, caller here = caller::here())
        : batch_(std::move(batch)), starts_(std::move(starts)), buffer_rows_(buffer_rows) {
        require(std::ssize(starts_) == batch_.sequences(), "packing", "number of starts", batch_.sequences(),
                starts_.size(), here);
        detail::product("packing", "rows of the buffer", {buffer_rows_}, here);
        index_t end = 0;
        for (index_t s = 0; s < batch_.sequences(); ++s) {
            index_t const last = buffer_rows_ - batch_.length(s);
            if (start(s) < end || start(s) > last)
                throw error("packing", "start of sequence " + std::to_string(s),
                            std::to_string(end) + " to " + std::to_string(last), std::to_string(start(s)), here);
            end = start(s) + batch_.length(s);
        }
    }
    template <class X = void>
    explicit packing(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>,
                      "cpx: packing(batch, starts, buffer_rows) wants a cpx::thd, a vector of index_t "
                      "and a number; packing_from_mask makes one of a mask");
    }

    thd const& batch() const { return batch_; }
    index_t start(index_t s) const { return starts_[static_cast<std::size_t>(s)]; }
    index_t buffer_rows() const { return buffer_rows_; }

    /// Returns the buffer's row of every row of the batch, ascending, as gathers by index want them.
    std::vector<index_t> rows(caller here = caller::here()) const {
        auto list = detail::zeros<index_t>("packing::rows", {batch_.tokens()}, here);
        for (index_t s = 0; s < batch_.sequences(); ++s)
            std::iota(list.begin() + batch_.offset(s), list.begin() + batch_.offset(s + 1), start(s));
        return list;
    }
    /// Returns for every row of the buffer 1 if it is a row of the batch, 0 if it is padding.
    std::vector<std::uint8_t> mask(caller here = caller::here()) const {
        auto valid = detail::zeros<std::uint8_t>("packing::mask", {buffer_rows_}, here);
        for (index_t s = 0; s < batch_.sequences(); ++s)
            std::fill_n(valid.begin() + start(s), batch_.length(s), std::uint8_t{1});
        return valid;
    }

    friend bool operator==(packing const&, packing const&) = default;

private:
    thd batch_;
    std::vector<index_t> starts_;
    index_t buffer_rows_ = 0;
};

namespace detail {

/// Makes a batch whose valid lengths are left out where there is no padding: equal batches then compare equal.
inline thd padded_thd(std::vector<index_t> const& lengths, std::vector<index_t> valid, caller here) {
    thd const batch = thd::from_lengths(lengths, here);
    if (valid == lengths) return batch;
    return thd(std::vector<index_t>(batch.offsets().begin(), batch.offsets().end()), std::move(valid), here);
}

inline void require_columns(char const* where, index_t count, index_t columns, caller here) {
    require(columns > 0 || (columns == 0 && count == 0), where, "columns", "at least 1", columns, here);
    require(columns == 0 || count % columns == 0, where, "size of the list",
            "a multiple of the columns, " + std::to_string(columns), count, here);
}

template <class T>
void copy_rows(rows<T const> from, rows<T> to) {
    if (from.stride() == from.width() && to.stride() == to.width())
        std::copy_n(from.data(), from.count() * from.width(), to.data());
    else
        for (index_t i = 0; i < from.count(); ++i) std::copy_n(from.row(i), from.width(), to.row(i));
}

template <class T>
void require_fits(char const* where, packing const& p, rows<T const> packed, rows<T const> buffer, caller here) {
    require(packed.count() == p.batch().tokens(), where, "packed rows", p.batch().tokens(), packed.count(), here);
    require(buffer.count() == p.buffer_rows(), where, "rows of the buffer", p.buffer_rows(), buffer.count(), here);
    require(packed.width() == buffer.width(), where, "width of the packed rows", buffer.width(), packed.width(), here);
}

} // namespace detail

/// Makes a batch of position ids: a sequence begins at every 0 and goes on 1, 2, ...; -1 is padding behind it.
///
/// `positions`: (B, columns), -1 columns: one row. Every row begins a sequence; the batch has B * columns tokens.
/// There are no sequences of length 0: positions cannot show them.
///
/// Throws `cpx::error` that names the first wrong row of the batch. A position must be 0, or -1, or go on in its
/// sequence. A row of `positions` must not begin within a sequence: the earlier tokens are not there, and operators
/// would count positions from 0. Padding that joins the sequence before it must come after one.
/// Source: twinkle's sequence parallelism, whose revisions differ in `pad`: the later one joins.
template <list_of<std::int32_t, std::int64_t> R>
thd thd_from_positions(R const& positions, pad pads, index_t columns = -1, caller here = caller::here()) {
    index_t const count = std::ssize(positions);
    if (columns == -1) columns = count;
    detail::require_columns("thd_from_positions", count, columns, here);
    require(pads == pad::joins_last_sequence || pads == pad::own_sequence, "thd_from_positions", "pad",
            "joins_last_sequence or own_sequence", static_cast<int>(pads), here);
    std::vector<index_t> lengths, valid;
    index_t previous = -1;
    for (index_t row = 0; row < count; ++row) {
        index_t const position = std::data(positions)[row];
        bool const first = row % columns == 0, joins = pads == pad::joins_last_sequence;
        if (first) previous = -1;
        if (position == 0 || (position == -1 && !joins)) {
            lengths.push_back(1);
            valid.push_back(position == 0);
        } else if (position == -1 ? !first : position == previous + 1) {
            ++lengths.back();
            valid.back() += position != -1;
        } else
            throw error("thd_from_positions", "position of row " + std::to_string(row),
                        first && joins   ? "0, where a sequence begins"
                        : previous == -1 ? "0 or -1"
                                         : "0, -1 or " + std::to_string(previous + 1),
                        std::to_string(position), here);
        previous = position;
    }
    return detail::padded_thd(lengths, std::move(valid), here);
}
template <class X = detail::any>
thd thd_from_positions(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: thd_from_positions(positions, pad) wants a vector, array or span of int32 or "
                                    "int64, and what padding is, pad::joins_last_sequence or pad::own_sequence");
    return {};
}

/// Makes a batch of a padding mask, 1 where a token counts: one sequence a row, without its padding, and where its
/// rows lie in the (rows * columns) rows of the padded tensor. A row that is padding only is a sequence of length 0.
///
/// Throws `cpx::error` that names row and column of the first element that is neither 0 nor 1, that begins a second run
/// of ones in its row, or that is padding on the other side.
template <list_of<std::int32_t, std::int64_t, std::uint8_t, bool> R>
packing packing_from_mask(R const& mask, index_t columns, padding side, caller here = caller::here()) {
    index_t const count = std::ssize(mask);
    detail::require_columns("packing_from_mask", count, columns, here);
    require(side == padding::left || side == padding::right || side == padding::any, "packing_from_mask", "padding",
            "left, right or any", static_cast<int>(side), here);
    std::vector<index_t> lengths, starts;
    for (index_t row = 0; row < count; row += columns) {
        index_t start = row, length = 0;
        for (index_t column = 0; column < columns; ++column) {
            index_t const value = static_cast<index_t>(std::data(mask)[row + column]);
            index_t const end = start - row + length;
            char const* expected = nullptr;
            if (value != 0 && value != 1)
                expected = "0 or 1";
            else if (value == 1 && length == 0 && column > 0 && side == padding::right)
                expected = "0, the padding being on the right";
            else if (value == 1 && length > 0 && end < column)
                expected = "0, the sequence having ended before";
            else if (value == 0 && length > 0 && side == padding::left)
                expected = "1, the padding being on the left";
            if (expected != nullptr)
                throw error("packing_from_mask",
                            "row " + std::to_string(row / columns) + ", column " + std::to_string(column), expected,
                            std::to_string(value), here);
            if (value == 1 && length++ == 0) start = row + column;
        }
        lengths.push_back(length);
        starts.push_back(start);
    }
    return packing(thd::from_lengths(lengths, here), std::move(starts), count, here);
}

/// Makes a batch of a padding mask, 1 where a token counts, and of position ids: a sequence begins at every 0 and goes
/// on 1, 2, ... in its row; padding stands before, between and behind sequences. What the positions of padding are does
/// not matter. The batch has no padding; the packing says where its sequences lie in the padded tensor.
///
/// mask, positions: (rows, columns). There are no sequences of length 0: positions cannot show them.
/// Throws `cpx::error` that names row and column of the first contradiction: a token without a position, a position
/// that neither begins a sequence nor follows the one before it, a sequence that goes on behind padding or in another
/// row.
template <list_of<std::int32_t, std::int64_t, std::uint8_t, bool> M, list_of<std::int32_t, std::int64_t> P>
packing packing_from_mask(M const& mask, P const& positions, index_t columns, caller here = caller::here()) {
    char const* const where = "packing_from_mask";
    index_t const count = std::ssize(mask);
    require(std::ssize(positions) == count, where, "number of positions", count, std::ssize(positions), here);
    detail::require_columns(where, count, columns, here);
    std::vector<index_t> lengths, starts;
    index_t next = -1; // the position with which the sequence before goes on; -1: a row begins, or padding was before
    for (index_t place = 0; place < count; ++place) {
        index_t const value = static_cast<index_t>(std::data(mask)[place]), position = std::data(positions)[place];
        bool const row_begins = place % columns == 0, is_token = value != 0;
        if (row_begins) next = -1;
        bool const follows = is_token && position > 0 && position == next;
        if ((value != 0 && value != 1) || (is_token && position != 0 && !follows)) {
            std::string const at =
                " in row " + std::to_string(place / columns) + ", column " + std::to_string(place % columns);
            if (value != 0 && value != 1) throw error(where, "mask" + at, "0 or 1", std::to_string(value), here);
            throw error(where, "position" + at,
                        position < 0 ? "0 or more, for the mask says that this is a token"
                        : row_begins ? "0, for a row begins with a sequence"
                        : next == -1 ? "0, for the mask says that padding was before"
                                     : "0 or " + std::to_string(next),
                        std::to_string(position), here);
        }
        if (is_token && !follows) {
            starts.push_back(place);
            lengths.push_back(0);
        }
        if (is_token) ++lengths.back();
        next = is_token ? position + 1 : -1;
    }
    return packing(thd::from_lengths(lengths, here), std::move(starts), count, here);
}
template <class X = detail::any>
packing packing_from_mask(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: packing_from_mask(mask, columns, padding), or (mask, positions, columns), "
                                    "wants a vector, array or span of bool, uint8, int32 or int64, positions of the "
                                    "latter two; std::vector<bool> is none: take std::vector<std::uint8_t>");
    throw;
}

/// Makes a batch of the offsets of valid tokens and those of padded sequences (cu_seqlens and cu_seqlens_padded of
/// TransformerEngine and Megatron-LM). The padding is at the end of each sequence.
///
/// Throws `cpx::error` if either list is not one of offsets, if they differ in number, if a sequence has more valid
/// tokens than rows, or if the padded offsets are not what `buffer` says. Rows before the first sequence, as in padded
/// offsets 2, 6, 12, are an error: make them a sequence of no valid tokens (0, 2, 6, 12), or a `packing`.
template <list_of<std::int32_t, std::int64_t> V, list_of<std::int32_t, std::int64_t> P>
thd thd_from_cu_seqlens(V const& valid, P const& padded, padded_buffer buffer = {}, caller here = caller::here()) {
    char const* const where = "thd_from_cu_seqlens";
    require(std::ssize(valid) == std::ssize(padded), where, "number of valid offsets", std::ssize(padded),
            std::ssize(valid), here);
    require(buffer.multiple >= 1, where, "multiple", "at least 1", buffer.multiple, here);
    require(std::size(padded) == 0 || *std::data(padded) <= 0, where, "rows before the first sequence",
            "none (make them a sequence without valid tokens)", std::size(padded) == 0 ? 0 : *std::data(padded), here);
    auto const read = [&](char const* list, auto const& offsets) {
        try {
            return thd(std::vector<index_t>(std::begin(offsets), std::end(offsets)));
        } catch (error const& e) {
            throw error(where, std::string(list) + " offsets: " + e.problem(), e.expected(), e.got(), here);
        }
    };
    thd const tokens = read("valid", valid), physical = read("padded", padded);
    require(buffer.rows < 0 || physical.tokens() == buffer.rows, where, "last padded offset",
            "the rows of the buffer, " + std::to_string(buffer.rows), physical.tokens(), here);
    std::vector<index_t> lengths, counts;
    for (index_t s = 0; s < physical.sequences(); ++s) {
        lengths.push_back(physical.length(s));
        counts.push_back(tokens.length(s));
        if (counts.back() > lengths.back())
            throw error(where, "valid length of sequence " + std::to_string(s),
                        "0 to " + std::to_string(lengths.back()), std::to_string(counts.back()), here);
        if (lengths.back() % buffer.multiple != 0)
            throw error(where, "padded length of sequence " + std::to_string(s),
                        "a multiple of " + std::to_string(buffer.multiple), std::to_string(lengths.back()), here);
    }
    return detail::padded_thd(lengths, std::move(counts), here);
}
template <class X = detail::any>
thd thd_from_cu_seqlens(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: thd_from_cu_seqlens(valid, padded) wants two vectors, arrays or spans of int32 "
                  "or int64; offsets without padding go to thd(offsets)");
    return {};
}

/// Returns the batch whose sequences have the valid lengths of `batch`, each padded at its end to a multiple of
/// `multiple` rows; padding that `batch` has is dropped, and 1 drops it all.
///
/// cpx needs no padding. Peers do: zigzag wants 2 W, with sequence parallelism over TP ranks lcm(2 W, W TP).
/// Throws `cpx::error` if `multiple` is below 1, or there would be 2^62 rows.
inline thd pad_to_multiple(thd const& batch, index_t multiple, caller here = caller::here()) {
    index_t const most = detail::size_limit - 1;
    require(multiple >= 1 && multiple <= most, "pad_to_multiple", "multiple", "1 to " + std::to_string(most), multiple,
            here);
    std::vector<index_t> lengths, valid;
    index_t rows = 0;
    for (index_t s = 0; s < batch.sequences(); ++s) {
        valid.push_back(batch.valid(s));
        lengths.push_back((valid.back() + multiple - 1) / multiple * multiple);
        if (lengths.back() > most - rows)
            throw error("pad_to_multiple", "length of sequence " + std::to_string(s),
                        "less than 2^62 with those before it, " + std::to_string(rows), std::to_string(lengths.back()),
                        here);
        rows += lengths.back();
    }
    return detail::padded_thd(lengths, std::move(valid), here);
}

template <class X = detail::any>
thd pad_to_multiple(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: pad_to_multiple(batch, multiple) wants a cpx::thd, such as thd({0, 7, 20}), "
                                    "and a number");
    return {};
}

/// Returns the valid rows of `padded` as a batch without padding, and where they lie in `padded`.
inline packing unpadded(thd const& padded, caller here = caller::here()) {
    std::vector<index_t> const offsets(padded.offsets().begin(), padded.offsets().end() - 1);
    return packing(pad_to_multiple(padded, 1, here), offsets, padded.tokens(), here);
}

template <class X = detail::any>
packing unpadded(X const& = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: unpadded(padded) wants a cpx::thd with valid lengths, such as "
                                    "thd_from_cu_seqlens returns");
    throw;
}

/// Copies the rows of the batch out of a padded buffer, without the padding, which is not read.
///
/// `buffer`: (p.buffer_rows(), width); `packed`: (p.batch().tokens(), width), elsewhere. Cost: one copy a sequence
/// where rows are contiguous. Throws `cpx::error` if the shapes do not fit, and on overlapping memory.
template <class T>
void pack(packing const& p, std::type_identity_t<rows<T const>> buffer, rows<T> packed, caller here = caller::here()) {
    detail::require_fits<T>("pack", p, packed, buffer, here);
    detail::require_apart("pack", {{"packed", packed}}, {{"buffer", buffer}}, here);
    for (index_t s = 0; s < p.batch().sequences(); ++s)
        detail::copy_rows<T>(buffer.sub(p.start(s), p.batch().length(s)),
                             packed.sub(p.batch().offset(s), p.batch().length(s)));
}
template <class T = void>
detail::refused pack(detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<T>, "cpx: pack(packing, buffer, packed) wants a packing and rows, those written not "
                                    "const; of a tensor data(), of a vector rows(list, width)");
    return {};
}

/// Copies the rows of the batch into a padded buffer and zeros into the padding: writes every row of `buffer`.
///
/// The inverse of `pack` on the rows of the batch, and its transpose: the gradient of one is the other.
/// Shapes, cost and errors as there.
template <class T>
void unpack(packing const& p, std::type_identity_t<rows<T const>> packed, rows<T> buffer,
            caller here = caller::here()) {
    detail::require_fits<T>("unpack", p, packed, buffer, here);
    detail::require_apart("unpack", {{"buffer", buffer}}, {{"packed", packed}}, here);
    index_t row = 0;
    auto const zero_until = [&](index_t end) {
        for (; row < end; ++row) std::fill_n(buffer.row(row), buffer.width(), T{});
    };
    for (index_t s = 0; s < p.batch().sequences(); ++s) {
        index_t const count = p.batch().length(s);
        zero_until(p.start(s));
        detail::copy_rows<T>(packed.sub(p.batch().offset(s), count), buffer.sub(row, count));
        row += count;
    }
    zero_until(p.buffer_rows());
}
template <class T = void>
detail::refused unpack(detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<T>, "cpx: unpack(packing, packed, buffer) wants a packing and rows, those written not "
                                    "const; of a tensor data(), of a vector rows(list, width)");
    return {};
}

} // namespace cpx
