// SPDX-License-Identifier: Apache-2.0
// A plan as what launches copy and transports send: rectangles of rows and columns, and bytes.
#pragma once

#include <cpx/plan/plan.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace cpx::detail {

/// Some rows of `bytes` bytes each, from one of a launch's buffers to another; `vector` is the largest power of two up
/// to 16 that divides both places, both pitches and `bytes`. A block takes a slice of it at a time.
struct rectangle {
    std::int64_t source, target;             ///< bytes from the buffers' beginnings
    std::int64_t source_pitch, target_pitch; ///< bytes from row to row
    std::int32_t rows, bytes;
    std::int16_t source_buffer, target_buffer, vector, unused;
    std::int32_t first; ///< slices of the launch before this one's

    CPX_HOST_DEVICE void set_vector() {
        std::int64_t const places = 16 | source | target | source_pitch | target_pitch | bytes;
        vector = static_cast<std::int16_t>(places & -places);
    }
    static constexpr std::int32_t slice_bytes = 1 << 15; ///< at most, and those of a part of an element
    /// Returns the rows of a slice: as many as are not more than that, or one.
    CPX_HOST_DEVICE std::int32_t slice() const {
        return bytes < slice_bytes ? slice_bytes / (bytes > 0 ? bytes : 1) : 1;
    }
    /// Returns into how many slices a row is cut that is longer, as states are.
    CPX_HOST_DEVICE std::int32_t pieces() const {
        return bytes > slice_bytes ? (bytes + slice_bytes - 1) / slice_bytes : 1;
    }
    CPX_HOST_DEVICE std::int32_t slices() const { return (rows + slice() - 1) / slice() * pieces(); }
    /// Makes it slice number `i` of itself, of whole elements of so many bytes; a copy moves bytes.
    CPX_HOST_DEVICE void take_slice(std::int32_t i, std::int32_t element = 1) {
        std::int32_t const each = slice(), cut = pieces(), row = i / cut * each;
        auto const begin_of = [&](std::int32_t piece) {
            std::int32_t const begin = (piece * slice_bytes + element - 1) / element * element;
            return begin < bytes ? begin : bytes;
        };
        std::int32_t const begin = begin_of(i % cut);
        source += row * source_pitch + begin;
        target += row * target_pitch + begin;
        rows = each < rows - row ? each : rows - row;
        if (cut > 1) bytes = begin_of(i % cut + 1) - begin;
    }
};

/// What is sent to a peer or received from it: bytes of one of a launch's buffers.
struct wire {
    int peer = 0, buffer = 0;
    index_t offset = 0, bytes = 0;
};

/// Adds a run to those that it may go on from.
inline void join(std::vector<run>& runs, run r) {
    if (!runs.empty() && runs.back().first + runs.back().count == r.first)
        runs.back().count += r.count;
    else
        runs.push_back(r);
}
/// Returns columns of rows of `width` elements, none: all, in bytes.
inline std::vector<run> columns_in_bytes(std::vector<run> const& columns, index_t width, index_t element) {
    std::vector<run> list;
    if (columns.empty()) list.push_back({0, width * element});
    for (run const c : columns) join(list, {c.first * element, c.count * element});
    return list;
}

/// Rows and columns of one end of a message, as places in a buffer of `pitch` bytes a row.
struct rectangle_end {
    std::vector<run> rows, columns; ///< columns in bytes
    index_t pitch = 0;
    int buffer = 0;
    index_t base = 0; ///< bytes from the buffer's beginning
};

inline constexpr index_t most_in_rectangle = index_t{1} << 30; // rows, and bytes of them, as a kernel counts them

/// Calls `each(place in a, place in b, count)` with runs of at most `most` that stand side by side in both lists, which
/// name equally many places.
template <class F>
void for_each_common_run(std::vector<run> const& a, std::vector<run> const& b, index_t most, F&& each) {
    std::size_t i = 0, j = 0;
    for (index_t used_a = 0, used_b = 0; i < a.size() && j < b.size();) {
        index_t const count = std::min({a[i].count - used_a, b[j].count - used_b, most});
        if (count > 0) each(a[i].first + used_a, b[j].first + used_b, count);
        used_a += count, used_b += count;
        if (used_a == a[i].count) ++i, used_a = 0;
        if (used_b == b[j].count) ++j, used_b = 0;
    }
}

/// Lists the rectangles that take `from` to `to`, which name equally many rows and columns.
inline void list_rectangles(rectangle_end const& from, rectangle_end const& to, std::vector<rectangle>& list) {
    for_each_common_run(from.rows, to.rows, most_in_rectangle, [&](index_t from_row, index_t to_row, index_t rows) {
        for_each_common_run(from.columns, to.columns, most_in_rectangle,
                            [&](index_t from_byte, index_t to_byte, index_t bytes) {
                                rectangle r{};
                                r.source = from.base + from_row * from.pitch + from_byte;
                                r.target = to.base + to_row * to.pitch + to_byte;
                                r.source_pitch = from.pitch;
                                r.target_pitch = to.pitch;
                                r.rows = static_cast<std::int32_t>(rows);
                                r.bytes = static_cast<std::int32_t>(bytes);
                                r.source_buffer = static_cast<std::int16_t>(from.buffer);
                                r.target_buffer = static_cast<std::int16_t>(to.buffer);
                                r.set_vector();
                                list.push_back(r);
                            });
    });
}

/// Rectangles of one launch, and into how many slices they are cut; `peer`: whose rows it adds.
struct launch_size {
    int rectangles = 0, slices = 0, peer = -1;
};

/// A rank's side of a plan. Buffers: 0 the source, 1 the target, 2 what is packed, 3 what is to be unpacked.
struct message_tables {
    launch_size pack, keep, unpack; ///< of the plan's rectangles, in this order; `keep`: those that stay, if apart
    std::vector<launch_size> add;   ///< then those to add, one launch after the other, in the order of ranks
    std::vector<wire> sends, receives;
    index_t packed = 0, unpacked = 0; ///< bytes of buffers 2 and 3
};

/// Rows of the source and of the target: elements of a row, elements from row to row, bytes of an element.
struct row_shapes {
    index_t source_width, target_width, source_stride, target_stride, element;
};

/// Returns one end of a message, in one of the caller's buffers: the source's where it goes `out`.
inline rectangle_end end_of(message const& m, bool out, row_shapes const& shape) {
    rectangle_end end{{},
                      columns_in_bytes(m.columns, out ? shape.source_width : shape.target_width, shape.element),
                      (out ? shape.source_stride : shape.target_stride) * shape.element,
                      !out,
                      0};
    for (run const r : m.rows) join(end.rows, r);
    return end;
}

/// What a message is at one end: `rows` rows of `bytes` bytes, `pitch` bytes apart, in one run from `first` on, or in
/// several: -1.
struct message_rows {
    int peer;
    index_t rows, bytes, pitch, first;
};

/// The rectangles of a plan, as the host lists them.
class listed_rectangles {
public:
    listed_rectangles(plan const& p, row_shapes const& shape, std::vector<rectangle>& list)
        : p_(p), shape_(shape), list_(list), first_(list.size()) {
        list.reserve(list.size() + 256);
    }
    bool sums() const { return p_.kind == flow::sums; }
    int rank() const { return p_.rank; }
    /// Calls `f(message_rows, stage)` with this rank's messages; `stage(base)` lists what takes one to where its bytes
    /// stand side by side, or from there.
    template <class F>
    void each(bool out, F&& f) {
        for (message const& m : out ? p_.sends : p_.receives) {
            auto const end = end_of(m, out);
            index_t const rows = total(end.rows), width = total(end.columns);
            f(message_rows{m.peer, rows, width, end.pitch, end.rows.size() == 1 ? end.rows[0].first : -1},
              [&](index_t base) {
                  rectangle_end const packed{{{0, rows}}, {{0, width}}, width, out ? 2 : 3, base};
                  out ? list_rectangles(end, packed, list_) : list_rectangles(packed, end, list_);
              });
        }
    }
    /// Lists what stays.
    void keep() {
        auto const own = [&](std::vector<message> const& all) {
            return std::ranges::find(all, p_.rank, &message::peer);
        };
        if (own(p_.sends) != p_.sends.end())
            list_rectangles(end_of(*own(p_.sends), true), end_of(*own(p_.receives), false), list_);
    }
    /// Returns the size of a launch: of what has been listed since the last one.
    launch_size launch() {
        launch_size size{static_cast<int>(list_.size() - first_)};
        for (; first_ < list_.size(); ++first_) {
            list_[first_].first = size.slices;
            size.slices += list_[first_].slices();
        }
        return size;
    }

private:
    rectangle_end end_of(message const& m, bool out) const { return detail::end_of(m, out, shape_); }
    plan const& p_;
    row_shapes shape_;
    std::vector<rectangle>& list_;
    std::size_t first_;
};

/// Returns the tables of what `all` lists, without the rows from and to `others`. A message that is one run of whole
/// rows is sent from, or received into, its place. `stored`: packed by kernels that store where peers unpack: then all
/// messages are packed and unpacked, and what stays is apart from what is packed.
template <class Rectangles>
message_tables tables_of(Rectangles&& all, range others, bool stored = false) {
    message_tables t;
    auto const elsewhere = [&](int peer) { return peer >= others.first && peer < others.last; };
    int const rank = all.rank();
    bool const sums = all.sums();
    bool kept = elsewhere(rank);
    auto const walk = [&](bool out, auto&& before, auto&& after) {
        all.each(out, [&](message_rows const& m, auto&& stage) {
            index_t const size = m.rows * m.bytes;
            if (m.peer == rank || elsewhere(m.peer) || size == 0) return;
            before(m.peer);
            auto& wires = out ? t.sends : t.receives;
            if (!stored && m.first >= 0 && m.bytes == m.pitch && (out || !sums)) {
                wires.push_back({m.peer, out ? 0 : 1, m.first * m.pitch, size});
                return;
            }
            index_t& staged = out ? t.packed : t.unpacked;
            wires.push_back({m.peer, out ? 2 : 3, staged, size});
            stage(staged);
            after(m.peer);
            staged += (size + 255) / 256 * 256;
        });
    };
    auto const keep = [&] {
        if (!std::exchange(kept, true)) all.keep();
    };
    auto const nothing = [](auto...) {};
    walk(true, nothing, nothing);
    if (stored) t.pack = all.launch();
    if (!sums) keep();
    (stored ? t.keep : t.pack) = all.launch();
    if (!sums) {
        walk(false, nothing, nothing);
        t.unpack = all.launch();
        return t;
    }
    auto const add = [&](int peer) {
        t.add.push_back(all.launch());
        t.add.back().peer = peer;
    };
    auto const own = [&](int peer) {
        if (peer > rank && !kept) keep(), add(rank);
    };
    walk(false, own, add);
    own(std::numeric_limits<int>::max());
    return t;
}

} // namespace cpx::detail
