// SPDX-License-Identifier: Apache-2.0
// A plan's messages as bytes of a buffer: what a transport takes from one rank's memory and leaves in another's.
#pragma once

#include <cpx/core/rows.hpp>
#include <cpx/plan/plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

namespace cpx {

/// One end of a message: the bytes of some rows and columns of a buffer, in row-major order.
///
/// Row i begins at `base + i * stride` bytes, column k of it `k * unit` bytes later. Both ends of a message list runs
/// of the same counts with the same unit, each at its own places. `columns` is never empty; `base` may be null where
/// there are no bytes.
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

namespace detail {

inline constexpr run one{0, 1};

} // namespace detail

/// Returns one end of a message of `bytes` consecutive bytes.
template <class Byte>
parcel<Byte> consecutive(int peer, Byte* data, index_t bytes) {
    return {peer, data, bytes, bytes, {&detail::one, 1}, {&detail::one, 1}};
}

/// Calls `f(bytes, count)` for the runs of consecutive bytes of a parcel, in the order in which both ends have them.
template <class Byte, class F>
void for_each_run(parcel<Byte> const& p, F&& f) {
    if (p.unit == 0) return;
    bool const dense = p.columns.size() == 1 && p.columns[0].count * p.unit == p.stride;
    for (run const r : p.rows) {
        Byte* row = p.base + r.first * p.stride;
        if (dense)
            f(row, static_cast<std::size_t>(r.count * p.stride));
        else
            for (index_t i = 0; i < r.count; ++i, row += p.stride)
                for (run const c : p.columns) f(row + c.first * p.unit, static_cast<std::size_t>(c.count * p.unit));
    }
}

/// Copies the bytes of a parcel to `to`, side by side.
inline void pack(outgoing const& from, std::byte* to) {
    for_each_run(from, [&](std::byte const* bytes, std::size_t count) {
        std::memcpy(to, bytes, count);
        to += count;
    });
}

/// Copies what `pack` has left at `from` to the places of a parcel.
inline void unpack(std::byte const* from, incoming const& to) {
    for_each_run(to, [&](std::byte* bytes, std::size_t count) {
        std::memcpy(bytes, from, count);
        from += count;
    });
}

/// Copies one end of a message to the other, without a buffer between them.
inline void copy(outgoing const& from, incoming const& to) {
    if (from.unit == 0) return;
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

namespace detail {

/// Returns one end of messages, in a buffer of that rank's rows.
template <class Byte, class T>
std::vector<parcel<Byte>> parcels(std::span<message const> messages, rows<T> const& buffer) {
    std::vector<parcel<Byte>> list;
    list.reserve(messages.size());
    index_t const element = static_cast<index_t>(sizeof(T));
    for (message const& m : messages) {
        bool const whole = m.columns.empty();
        list.push_back({m.peer, reinterpret_cast<Byte*>(buffer.data()), buffer.stride() * element,
                        whole ? buffer.width() * element : element, m.rows,
                        whole ? std::span(&one, 1) : std::span(m.columns)});
    }
    return list;
}

/// Moves out of `list` the message to `rank` itself, if there is one.
template <class Byte>
parcel<Byte> take_own(std::vector<parcel<Byte>>& list, int rank) {
    auto const own = std::ranges::find(list, rank, &parcel<Byte>::peer);
    if (own == list.end()) return {};
    parcel<Byte> const taken = *own;
    list.erase(own);
    return taken;
}

/// Returns runs of the same counts, side by side from 0 on.
inline std::vector<run> side_by_side(std::vector<run> runs) {
    index_t first = 0;
    for (run& r : runs) {
        r.first = first;
        first += r.count;
    }
    return runs;
}

} // namespace detail

} // namespace cpx
