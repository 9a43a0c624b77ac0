// SPDX-License-Identifier: Apache-2.0
// A plan as ranks run it that write into each other's memory: messages, cut into chunks that both ends know.
#pragma once

#include <cpx/plan/rectangles.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace cpx::detail {

/// Rows that stand one behind the other on both sides of a message, from its row `first` on: where they begin, bytes.
struct channel_run {
    std::int64_t source, target;
    std::int32_t first, unused;
};

/// Columns that stand side by side on both sides of a message: where they begin in a row of it and of the sides, and
/// how many there are, in bytes. `vector`: the largest power of two up to 16 that divides every place of theirs.
struct channel_column {
    std::int32_t place, source, target, bytes, vector, unused;
};

/// One message. One side of it is packed, rows side by side, unless it stays: then both are a caller's.
///
/// Chunk i is its bytes [i * chunk, (i + 1) * chunk), as far as there are such. `lanes` threads take a row.
struct channel_message {
    std::int64_t source_pitch, target_pitch;
    std::int32_t rows, row_bytes, chunk, lanes, runs, first_run, columns, first_column;

    CPX_HOST_DEVICE std::int64_t bytes() const { return static_cast<std::int64_t>(rows) * row_bytes; }
    /// Returns how many chunks one of `count` channels has.
    CPX_HOST_DEVICE std::int32_t chunks(int channel, int count) const {
        if (rows == 0) return 0;
        return static_cast<std::int32_t>(((bytes() + chunk - 1) / chunk - channel + count - 1) / count);
    }
};

/// How messages are cut: a chunk goes to one of `count` channels, and has `slot` bytes at most.
struct channel_sizes {
    int count;
    std::int32_t slot;

    /// Returns the bytes of a chunk, of which every channel has one if there are as many; a multiple of 16.
    std::int32_t chunk(index_t bytes) const {
        index_t const share = (bytes + count - 1) / count;
        return static_cast<std::int32_t>(std::clamp<index_t>((share + 15) / 16 * 16, std::min(slot, 4096), slot));
    }
};

/// A rank's side of a plan that does not add, of less than 2^31 rows of less than 2^31 bytes: messages to ranks 0, 1,
/// .., then those from them, then what stays.
struct channel_table {
    std::vector<channel_message> messages;
    std::vector<channel_column> columns;
    std::vector<channel_run> runs;

    channel_table(plan const& p, row_shapes const& shape, channel_sizes const& sizes)
        : messages(static_cast<std::size_t>(2 * p.ranks() + 1)) {
        for (bool const out : {true, false})
            for (message const& m : out ? p.sends : p.receives) {
                auto const end = end_of(m, out, shape);
                if (m.peer == p.rank) {
                    if (!out) continue;
                    auto const stays = std::ranges::find(p.receives, p.rank, &message::peer);
                    add(messages.back(), end, end_of(*stays, false, shape), sizes);
                    continue;
                }
                index_t const rows = total(end.rows), width = total(end.columns);
                rectangle_end const packed{{{0, rows}}, {{0, width}}, width, 0, 0};
                auto& slot = messages[static_cast<std::size_t>(m.peer + (out ? 0 : p.ranks()))];
                add(slot, out ? end : packed, out ? packed : end, sizes);
            }
    }
    /// Returns the 64-bit words of all lists.
    index_t words() const {
        return static_cast<index_t>((messages.size() * sizeof(channel_message) +
                                     columns.size() * sizeof(channel_column) + runs.size() * sizeof(channel_run)) /
                                    sizeof(std::int64_t));
    }

private:
    void add(channel_message& m, rectangle_end const& from, rectangle_end const& to, channel_sizes const& sizes) {
        m = {};
        index_t const rows = total(from.rows), row_bytes = total(from.columns);
        if (rows * row_bytes == 0) return;
        m.rows = narrow(rows), m.row_bytes = narrow(row_bytes);
        m.source_pitch = from.pitch, m.target_pitch = to.pitch;
        m.chunk = sizes.chunk(m.bytes());
        m.lanes = 32; // a thread is to hold 4 vectors of a row at a time
        while (m.lanes > 8 && m.lanes / 2 * 4 * 16 >= m.row_bytes) m.lanes /= 2;
        m.first_run = narrow(std::ssize(runs));
        m.first_column = narrow(std::ssize(columns));
        constexpr auto all = std::numeric_limits<index_t>::max();
        index_t next = 0;
        for_each_common_run(from.rows, to.rows, all, [&](index_t source, index_t target, index_t count) {
            runs.push_back({source * from.pitch, target * to.pitch, narrow(next), 0});
            next += count;
        });
        next = 0;
        for_each_common_run(from.columns, to.columns, all, [&](index_t source, index_t target, index_t count) {
            index_t const places = 16 | next | source | target | count | row_bytes | from.pitch | to.pitch;
            columns.push_back(
                {narrow(next), narrow(source), narrow(target), narrow(count), narrow(places & -places), 0});
            next += count;
        });
        m.runs = narrow(std::ssize(runs)) - m.first_run;
        m.columns = narrow(std::ssize(columns)) - m.first_column;
    }
    static std::int32_t narrow(index_t n) { return static_cast<std::int32_t>(n); }
};

} // namespace cpx::detail
