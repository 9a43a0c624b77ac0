// SPDX-License-Identifier: Apache-2.0
// What a transport is: it knows its rank and moves rectangles of bytes between ranks.
#pragma once

#include <cpx/plan/plan.hpp>

#include <concepts>
#include <cstddef>
#include <cstring>
#include <span>
#include <unordered_set>

namespace cpx {

/// One end of a message: the bytes of some rows and columns of a buffer, in row-major order.
///
/// Row i begins at `base + i * stride` bytes, column k of it `k * unit` bytes later. Both ends of a message list the
/// same counts of rows and columns with the same unit. `columns` is never empty.
template <class Byte>
struct parcel {
    int peer = 0;
    Byte* base = nullptr;
    index_t stride = 0;
    index_t unit = 0;
    std::span<run const> rows, columns;

    index_t bytes() const {
        index_t row_count = 0, column_count = 0;
        for (run const r : rows) row_count += r.count;
        for (run const c : columns) column_count += c.count;
        return row_count * column_count * unit;
    }
};

using outgoing = parcel<std::byte const>;
using incoming = parcel<std::byte>;

/// Copies one end of a message to the other, without a buffer between them.
inline void copy(outgoing const& from, incoming const& to) {
    bool const dense = from.columns.size() == 1 && from.columns[0].count * from.unit == from.stride &&
                       from.stride == to.stride; // whole rows, side by side at both ends
    for (std::size_t i = 0; i < from.rows.size(); ++i) {
        std::byte const* source = from.base + from.rows[i].first * from.stride;
        std::byte* target = to.base + to.rows[i].first * to.stride;
        if (dense) {
            std::memcpy(target, source, static_cast<std::size_t>(from.rows[i].count * from.stride));
            continue;
        }
        for (index_t row = 0; row < from.rows[i].count; ++row, source += from.stride, target += to.stride)
            for (std::size_t k = 0; k < from.columns.size(); ++k)
                std::memcpy(target + to.columns[k].first * to.unit, source + from.columns[k].first * from.unit,
                            static_cast<std::size_t>(from.columns[k].count * from.unit));
    }
}

/// Moves messages between the ranks of a group. Ranks are group-local, 0 .. ranks() - 1.
///
/// `transfer(id, sends, receives)` carries one rank's messages of an exchange and returns when its sends have been
/// taken and its receives have arrived (on a device: when that is enqueued). A message to itself is not passed to the
/// transport. It throws `cpx::error` when a peer fails, executes another plan (as far as the transport can see) or
/// misses the deadline. `agreed()` remembers the fingerprints of plans that all ranks have compared.
template <class T>
concept transport =
    requires(T& t, identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives) {
        { t.rank() } -> std::same_as<int>;
        { t.ranks() } -> std::same_as<int>;
        { t.agreed() } -> std::same_as<std::unordered_set<std::uint64_t>&>;
        t.transfer(id, sends, receives);
    };

} // namespace cpx
