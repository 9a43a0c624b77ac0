// SPDX-License-Identifier: Apache-2.0
// What an exchange between GPUs keeps of its plans, and what its kernels know of them.
#pragma once

#include <cpx/plan/rectangles.hpp>

#include <cpx/push_messages.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace cpx::cuda::detail {

/// One end of a plan, as the caller's buffer is to be, and whether messages fill it.
struct exchange_end {
    index_t rows, width, stride;
    bool covered;
};

/// A plan whose tables are on the device.
struct ready_plan {
    exchange_end source, target;
    bool sums;
    std::size_t first; ///< of its rectangles
    cpx::detail::message_tables tables;

    /// Returns how many rows of an end may get nothing.
    index_t zeros(exchange_end const& at) const { return sums || !at.covered ? at.rows : 0; }
};

/// Returns a plan as kernels know it that store messages in the peers' memory.
inline kernels::message_plan known_to_kernels(ready_plan const& p) {
    kernels::message_plan m{};
    auto next = static_cast<std::int32_t>(p.first);
    auto const part = [&](cpx::detail::launch_size size) {
        return kernels::list_part{std::exchange(next, next + size.rectangles), size.rectangles, size.slices};
    };
    m.pack = part(p.tables.pack), m.keep = part(p.tables.keep), m.unpack = part(p.tables.unpack);
    for (auto const& size : p.tables.add) m.add[size.peer] = part(size);
    m.zeros = static_cast<std::int32_t>(p.zeros(p.target)), m.zeros_back = static_cast<std::int32_t>(p.zeros(p.source));
    auto const in_units = [](cpx::detail::wire const& w) {
        constexpr index_t unit = kernels::message_unit;
        return kernels::packed_message{static_cast<std::int32_t>(w.offset / unit),
                                       static_cast<std::int32_t>((w.bytes + unit - 1) / unit)};
    };
    for (auto const& w : p.tables.sends) m.sends[w.peer] = in_units(w);
    for (auto const& w : p.tables.receives) m.receives[w.peer] = in_units(w);
    return m;
}

/// The plans that an exchange is set for, and their rectangles as the host lists them.
struct exchange_tables {
    std::vector<ready_plan> plans;
    std::vector<cpx::detail::rectangle> list;
    index_t staged = 0; ///< bytes that leave, or come, by one plan

    void add(ready_plan p) {
        staged = std::max({staged, p.tables.packed, p.tables.unpacked});
        plans.push_back(std::move(p));
    }
    std::vector<kernels::message_plan> known_to_kernels() const {
        std::vector<kernels::message_plan> all;
        for (ready_plan const& p : plans) all.push_back(detail::known_to_kernels(p));
        return all;
    }
};

} // namespace cpx::cuda::detail
