// SPDX-License-Identifier: Apache-2.0
// What operators ask of what they are given: its elements, and that its memory fits and is this device's.
#pragma once

#include <cpx/core/overlap.hpp>
#include <cpx/core/rows.hpp>
#include <cpx/cuda/runtime.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <concepts>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

namespace cpx::cuda {

/// A type with which the GPU's operators calculate; they do so in float.
template <class T>
concept gpu_number = std::same_as<T, float> || std::same_as<T, __nv_bfloat16> || std::same_as<T, __half>;

/// A type of 16 bits, of which tensor cores multiply two a word.
template <class T>
concept tensor_core_number = std::same_as<T, __nv_bfloat16> || std::same_as<T, __half>;

namespace detail {

using cpx::detail::in_place, cpx::detail::in_words, cpx::detail::operand, cpx::detail::require_apart;

/// Returns the largest power of two up to 16 that divides all of `places`: addresses, and distances in bytes.
inline int vector_bytes(std::initializer_list<index_t> places) {
    index_t all = 16;
    for (index_t const place : places) all |= place;
    return static_cast<int>(all & -all);
}
template <class T>
index_t address(T const* place) {
    return reinterpret_cast<index_t>(place);
}
template <class T>
index_t row_bytes(rows<T> r) { // a distance matters from the second row on
    return r.count() > 1 ? r.stride() * static_cast<index_t>(sizeof(T)) : 0;
}

/// Returns the largest power of two up to 16 at whose multiples all these rows begin, in bytes.
template <class... X>
int row_vector(X const&... x) {
    return vector_bytes({address(x.data())..., row_bytes(x)...});
}

/// Whether the copy engine takes all these rows: they begin at multiples of 16 bytes, less than 2^40 bytes from each
/// other, also those that would come after an only one: a rank's path, and so its bits, are not to depend on how many
/// rows it has.
template <class... T>
bool in_panels(rows<T>... x) {
    return ((x.stride() < (index_t{1} << 40) / static_cast<index_t>(sizeof(T))) && ...) &&
           vector_bytes({address(x.data())..., (x.stride() * static_cast<index_t>(sizeof(T)))...}) == 16;
}

/// Calls `f` with how many columns of a head a lane has, as an std::integral_constant.
template <class F>
void with_lane_columns(index_t dim, F&& f) {
    dim <= 128 ? f(std::integral_constant<int, 4>()) : f(std::integral_constant<int, 8>());
}

/// Calls `f` with the columns for which tensor cores' kernels of heads are made, as an std::integral_constant.
template <class F>
void with_core_columns(index_t dim, F&& f) {
    with_least<64, 128, 256>(dim, f);
}

/// Returns whether the device has as much shared memory for a kernel on tensor cores, and code of sm_80 or later.
template <class... P>
bool has_core_memory(void (*kernel)(P...), int bytes, caller here) {
    cudaFuncAttributes code{};
    check(cudaFuncGetAttributes(&code, kernel), "cudaFuncGetAttributes", here);
    int const most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, here);
    return code.ptxVersion >= 80 && bytes + static_cast<int>(code.sharedSizeBytes) <= most;
}

/// An argument of an operator, as its checks see it: rows, perhaps of a shape that is wanted, or a list.
struct argument {
    char const* name;
    rows<char const> data; ///< counts, widths and strides in elements
    index_t count, width;  ///< as they are to be

    template <class T>
    argument(char const* called, rows<T> r, index_t wanted, index_t wide)
        : name(called), data(reinterpret_cast<char const*>(r.data()), r.count(), r.width(), r.stride()), count(wanted),
          width(wide) {}
    template <class T>
    argument(char const* called, rows<T> r) : argument(called, r, r.count(), r.width()) {}
    template <class T>
    argument(char const* called, std::span<T> list) : argument(called, rows<T>(list.data(), 1, std::ssize(list))) {}
};

/// Throws `cpx::error` unless `place` is memory of the current device: at any other address a kernel would fail, and
/// with it all that comes after. Cost: some 0.1 us.
inline void require_memory(char const* where, char const* what, void const* place, caller here) {
    if (!place) throw error(where, what, "memory of the current device", "null", here);
    int const current = current_device(), found = device_of(place);
    if (found == current) return;
    throw error(where, what, "memory of the current device, " + std::to_string(current),
                found < 0 ? "memory of the host" : "memory of device " + std::to_string(found), here);
}
/// The same of everything that has elements.
inline void require_memory(char const* where, std::initializer_list<argument> list, caller here) {
    for (argument const& a : list)
        if (a.data.count() > 0 && a.data.width() > 0) require_memory(where, a.name, a.data.data(), here);
}

/// Throws `cpx::error` if a size is negative or rows overlap each other.
inline void require_sizes(char const* where, argument const& a, caller here) {
    auto const& r = a.data;
    require(r.count() >= 0 && r.width() >= 0, where, a.name, "no negative sizes", std::min(r.count(), r.width()), here);
    if (r.stride() < r.width() && r.count() > 1) // texts are made where they are needed: this runs at every call
        throw error(where, std::string("stride of ") + a.name, "at least the width, " + std::to_string(r.width()),
                    std::to_string(r.stride()), here);
}

/// Throws `cpx::error` unless arguments have their shapes, on the current device. Of no rows the width does not matter.
inline void require_rows(char const* where, std::initializer_list<argument> list, caller here) {
    auto const shape = [](index_t n, index_t w) { return '(' + std::to_string(n) + ", " + std::to_string(w) + ')'; };
    for (argument const& a : list) {
        if (a.count == 0 && a.data.count() == 0) continue;
        if (a.data.count() != a.count || a.data.width() != a.width)
            throw error(where, std::string("shape of ") + a.name, shape(a.count, a.width),
                        shape(a.data.count(), a.data.width()), here);
        require_sizes(where, a, here);
        require_memory(where, {a}, here);
    }
}

} // namespace detail

} // namespace cpx::cuda
