// SPDX-License-Identifier: Apache-2.0
// Whether two operands share memory, and the check of operators that would then write over what they are to read.
#pragma once

#include <cpx/core/memory.hpp>
#include <cpx/core/rows.hpp>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

namespace cpx::detail {

/// Where an operand lies, in bytes, and the name that errors give it.
struct operand {
    char const* name = "";
    std::uintptr_t first = 0;
    index_t count = 0, width = 0, stride = 0;

    operand() = default;
    template <class T>
    operand(char const* called, rows<T> r)
        : name(called), first(reinterpret_cast<std::uintptr_t>(r.data())), count(r.data() ? r.count() : 0),
          width(r.width() * static_cast<index_t>(sizeof(T))), stride(r.stride() * static_cast<index_t>(sizeof(T))) {}
    template <class T>
    operand(char const* called, std::span<T> list) : operand(called, rows<T>(list.data(), 1, std::ssize(list))) {}

    bool empty() const { return count <= 0 || width <= 0; }
    bool holds(std::uintptr_t place) const {
        return place - first < static_cast<std::uintptr_t>((count - 1) * stride + width);
    }
    bool same_rows(operand const& other) const {
        return first == other.first && count == other.count && width == other.width &&
               (stride == other.stride || count < 2);
    }
};

/// Returns whether some byte belongs to both: then one of them must not be written while the other is read.
///
/// Disjoint columns of the same rows do not overlap, nor do disjoint rows. Where the two have different strides and
/// their ranges of addresses meet, they count as overlapping.
inline bool overlap(operand const& a, operand const& b) {
    if (a.first > b.first) return overlap(b, a);
    if (a.empty() || b.empty() || !a.holds(b.first)) return false;
    index_t const stride = a.count > 1 ? a.stride : b.stride;
    if (stride <= 0 || (b.count > 1 && b.stride != stride)) return true;
    index_t const column = static_cast<index_t>(b.first - a.first) % stride; // of a's rows, where those of b begin
    return column < a.width || column + b.width > stride;
}

/// Whether an operand that is written may be the same rows as one that is read.
enum class in_place { no, yes };

/// Throws `cpx::error` that names both if one of `written` overlaps another of them, or one of `read`; and if rows that
/// are written lie over each other. Call it before anything is written. Cost: some nanoseconds a pair.
inline void require_apart(char const* where, std::span<operand const> written, std::span<operand const> read,
                          caller here, in_place allowed = in_place::no) {
    auto const check = [&](operand const& a, operand const& b, bool same) {
        if (!overlap(a, b) || (same && a.same_rows(b))) return;
        throw error(where, std::string("overlap of ") + a.name + " and " + b.name,
                    same ? "none, or the same rows" : "none", "some", here);
    };
    for (std::size_t i = 0; i < written.size(); ++i) {
        operand const& to = written[i];
        for (operand const& other : written.subspan(i + 1)) check(to, other, false);
        for (operand const& other : read) check(to, other, allowed == in_place::yes);
        if (to.count > 1 && to.stride < to.width)
            throw error(where, std::string("stride of ") + to.name + ", bytes",
                        "at least the width " + std::to_string(to.width), std::to_string(to.stride), here);
    }
}
inline void require_apart(char const* where, std::initializer_list<operand> written,
                          std::initializer_list<operand> read, caller here, in_place allowed = in_place::no) {
    require_apart(where, std::span(written.begin(), written.size()), std::span(read.begin(), read.size()), here,
                  allowed);
}

/// Throws unless operands of known shapes lie where a memory can have them, and their rows apart; the host's do. On
/// devices: `ops/cuda/operands.hpp`.
inline void require_there(host_memory const&, char const*, std::span<operand const>, caller) {}

} // namespace cpx::detail
