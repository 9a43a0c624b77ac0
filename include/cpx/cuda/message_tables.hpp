// SPDX-License-Identifier: Apache-2.0
// What a plan's messages are to a device: rectangles to copy and add, and bytes to send and receive.
#pragma once

#include <cpx/cuda/arguments.hpp>
#include <cpx/plan/plan.hpp>

#include <cpx/rectangles.cuh>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace cpx::cuda::detail {

/// What is sent to a peer or received from it: bytes of one of a launch's buffers.
struct wire {
    int peer, buffer;
    index_t offset, bytes;
};

/// Rows and columns of one end of a message, as places in a buffer of `pitch` bytes a row.
struct rectangle_end {
    std::vector<run> rows, columns; ///< columns in bytes
    index_t pitch = 0;
    int buffer = 0;
    index_t base = 0; ///< bytes from the buffer's beginning
};

/// Lists the rectangles that take `from` to `to`, which name equally many rows and columns.
inline void list_rectangles(rectangle_end const& from, rectangle_end const& to, std::vector<kernels::rectangle>& list) {
    constexpr index_t most = index_t{1} << 30; // rows, and bytes of them, as a kernel counts them
    auto const zip = [](std::vector<run> const& a, std::vector<run> const& b, auto&& each) {
        std::size_t i = 0, j = 0;
        for (index_t used_a = 0, used_b = 0; i < a.size() && j < b.size();) {
            index_t const count = std::min({a[i].count - used_a, b[j].count - used_b, most});
            if (count > 0) each(a[i].first + used_a, b[j].first + used_b, count);
            used_a += count, used_b += count;
            if (used_a == a[i].count) ++i, used_a = 0;
            if (used_b == b[j].count) ++j, used_b = 0;
        }
    };
    zip(from.rows, to.rows, [&](index_t from_row, index_t to_row, index_t rows) {
        zip(from.columns, to.columns, [&](index_t from_byte, index_t to_byte, index_t bytes) {
            kernels::rectangle r{};
            r.source = from.base + from_row * from.pitch + from_byte;
            r.target = to.base + to_row * to.pitch + to_byte;
            r.source_pitch = from.pitch;
            r.target_pitch = to.pitch;
            r.rows = static_cast<std::int32_t>(rows);
            r.bytes = static_cast<std::int32_t>(bytes);
            r.source_buffer = static_cast<std::int16_t>(from.buffer);
            r.target_buffer = static_cast<std::int16_t>(to.buffer);
            r.vector =
                static_cast<std::int16_t>(vector_bytes({r.source, r.target, r.source_pitch, r.target_pitch, r.bytes}));
            list.push_back(r);
        });
    });
}

/// Rectangles of one launch, and into how many slices they are cut.
struct launch_size {
    int rectangles = 0, slices = 0;
};

/// A rank's side of a plan. Buffers: 0 the source, 1 the target, 2 what is packed, 3 what is to be unpacked.
struct message_tables {
    launch_size pack, unpack;     ///< of the plan's rectangles: those to pack come first, then those to unpack
    std::vector<launch_size> add; ///< then those to add, one launch after the other, in the order of ranks
    std::vector<wire> sends, receives;
    index_t packed = 0, unpacked = 0; ///< bytes of buffers 2 and 3
};

/// Rows of the source and of the target: elements of a row, elements from row to row, bytes of an element.
struct row_shapes {
    index_t source_width, target_width, source_stride, target_stride, element;
};

/// Returns the tables of a plan, without the rows from and to `others`, and adds its rectangles to `list`. A message
/// that is one run of whole rows is sent from, or received into, its place.
inline message_tables tables_of(plan const& p, row_shapes const& shape, range others,
                                std::vector<kernels::rectangle>& list) {
    message_tables t;
    auto const end_of = [&](message const& m, bool out) { // of a message, in one of the caller's buffers
        rectangle_end end{m.rows, m.columns, (out ? shape.source_stride : shape.target_stride) * shape.element,
                          out ? 0 : 1, 0};
        if (end.columns.empty()) end.columns.push_back({0, out ? shape.source_width : shape.target_width});
        for (run& c : end.columns) c = {c.first * shape.element, c.count * shape.element};
        return end;
    };
    // Lists what takes a message to where its bytes stand side by side, or from there.
    auto const stage = [&](rectangle_end const& end, index_t base, bool out) {
        index_t const width = total(end.columns);
        rectangle_end const packed{{{0, total(end.rows)}}, {{0, width}}, width, out ? 2 : 3, base};
        out ? list_rectangles(end, packed, list) : list_rectangles(packed, end, list);
    };
    auto const numbered = [&](std::size_t first) { // the rectangles of a launch, which are listed from there on
        launch_size size{static_cast<int>(list.size() - first)};
        for (; first < list.size(); ++first) {
            list[first].first = size.slices;
            size.slices += list[first].slices();
        }
        return size;
    };
    auto const elsewhere = [&](int peer) { return peer >= others.first && peer < others.last; };
    auto const own = [&](std::vector<message> const& all) { return std::ranges::find(all, p.rank, &message::peer); };
    bool const sums = p.kind == flow::sums, stays = own(p.sends) != p.sends.end() && !elsewhere(p.rank);
    auto const keep = [&] { list_rectangles(end_of(*own(p.sends), true), end_of(*own(p.receives), false), list); };
    auto const walk = [&](std::vector<message> const& messages, bool out, auto&& each) {
        for (message const& m : messages) {
            if (m.peer == p.rank || elsewhere(m.peer)) continue;
            auto const end = end_of(m, out);
            index_t const size = total(end.rows) * total(end.columns);
            if (size == 0) continue;
            auto& wires = out ? t.sends : t.receives;
            if (end.rows.size() == 1 && total(end.columns) == end.pitch && (out || !sums)) {
                wires.push_back({m.peer, end.buffer, end.rows[0].first * end.pitch, size});
                continue;
            }
            index_t& staged = out ? t.packed : t.unpacked;
            wires.push_back({m.peer, out ? 2 : 3, staged, size});
            each(m, end, staged);
            staged += (size + 255) / 256 * 256;
        }
    };
    std::size_t first = list.size();
    list.reserve(list.size() + 256);
    walk(p.sends, true, [&](message const&, rectangle_end const& end, index_t at) { stage(end, at, true); });
    if (stays && !sums) keep();
    t.pack = numbered(first);
    first = list.size();
    auto const add = [&] {
        t.add.push_back(numbered(first));
        first = list.size();
    };
    bool kept = !stays || !sums;
    walk(p.receives, false, [&](message const& m, rectangle_end const& end, index_t at) {
        if (!kept && m.peer > p.rank) keep(), add(), kept = true;
        stage(end, at, false);
        if (sums) add();
    });
    if (!kept) keep(), add();
    if (!sums) t.unpack = numbered(first);
    return t;
}

} // namespace cpx::cuda::detail
