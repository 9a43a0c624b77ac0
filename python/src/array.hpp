// SPDX-License-Identifier: Apache-2.0
// Arrays of whatever framework, by DLPack, as rows of cpx.
#pragma once

#include "dlpack.hpp"
#include "strided.hpp"

#include <cpx/core/rows.hpp>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <Eigen/Core>

#include <cstdint>
#include <string>

namespace binding {

namespace nb = nanobind;

/// An argument that is an array, or none. Its caller keeps the object alive; destroyed with the GIL held.
struct array {
    char const* where = ""; ///< the function, in errors
    char const* name = "";  ///< the argument
    bool given = false;
    void const* data = nullptr;
    dlpack::device place = {};
    nb::dlpack::dtype type = {};
    index_t count = 0; ///< of dimensions
    std::int64_t const *sizes = nullptr, *strides = nullptr;
    nb::ndarray<nb::ro> held = {}; ///< what was made to read it, if anything was

    explicit operator bool() const { return given; }
    index_t dimensions() const { return count; }
    index_t size(index_t i) const { return sizes[i]; }
    index_t stride(index_t i) const { return strides[i]; }
    index_t elements() const {
        index_t all = 1;
        for (index_t i = 0; i < count; ++i) all *= size(i);
        return all;
    }
    bool on_host() const; ///< in memory that the host reads
};

/// Returns by what a type of tensors tells of them, DLPack's exchange of C, or null. With the GIL held.
dlpack::exchange const* exchange_of(nb::handle type);

/// Returns the array that `object` is: of NumPy, torch, JAX or whatever speaks DLPack. Throws `cpx::error` that names
/// the argument if it is none, or if it is to be written and must not be.
array read(char const* where, char const* name, nb::handle object);
array written(char const* where, char const* name, nb::handle object);
/// The same, but None is no array.
array read_if(char const* where, char const* name, nb::handle object);
array written_if(char const* where, char const* name, nb::handle object);

/// Returns "float32", "bfloat16", "int64".
std::string name_of(nb::dlpack::dtype type);
/// Returns "(5, 3)".
std::string shape_of(array const& a);

template <class T>
constexpr nb::dlpack::dtype type_of() {
    if constexpr (std::same_as<T, Eigen::bfloat16>)
        return {static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
    else if constexpr (std::same_as<T, Eigen::half>)
        return {static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
    else if constexpr (std::same_as<T, boolean>)
        return nb::dtype<bool>();
    else
        return nb::dtype<T>();
}

/// Throws `cpx::error` unless the array is on the host, has that type and begins where its elements may.
void require_elements(array const& a, nb::dlpack::dtype type);
/// Returns the rows of an array of T; of one that is none, no rows.
template <class T>
cpx::rows<T const> rows_of(array const& a) {
    if (!a) return {};
    require_elements(a, type_of<T>());
    auto const [count, width, stride] = rows_in(a);
    return {static_cast<T const*>(a.data), count, width, stride};
}
template <class T>
cpx::rows<T> rows_to(array const& a) {
    auto const r = rows_of<T>(a);
    return {const_cast<T*>(r.data()), r.count(), r.width(), r.stride()};
}
/// Returns the elements of an array of T in a row, of any shape.
template <class T>
std::span<T const> list_of(array const& a, index_t size = -1) {
    if (!a) return {};
    require_elements(a, type_of<T>());
    require_list(a, size);
    return {static_cast<T const*>(a.data), static_cast<std::size_t>(a.elements())};
}
template <class T>
std::span<T> list_to(array const& a, index_t size = -1) {
    auto const list = list_of<T>(a, size);
    return {const_cast<T*>(list.data()), list.size()};
}
/// Returns the elements of an array as rows of `width`, whatever its dimensions; of a wrong number, rows of another.
template <class T>
cpx::rows<T const> matrix_of(array const& a, index_t width) {
    auto const list = list_of<T>(a);
    if (!a) return {};
    index_t const size = std::ssize(list);
    return width > 0 && size % width == 0 ? cpx::rows<T const>(list.data(), size / width, width)
                                          : cpx::rows<T const>(list.data(), 1, size);
}
template <class T>
cpx::rows<T> matrix_to(array const& a, index_t width) {
    auto const r = matrix_of<T>(a, width);
    return {const_cast<T*>(r.data()), r.count(), r.width()};
}

template <class T>
struct of_type {
    using type = T;
};

/// Calls `f(of_type<T>())` for the type of an array, one of `T`. Throws `cpx::error` if it is another.
template <class... T, class F>
void with_type(array const& a, F&& f) {
    bool done = false;
    auto const attempt = [&]<class U>(of_type<U> type) {
        if (done || a.type != type_of<U>()) return;
        done = true;
        f(type);
    };
    (attempt(of_type<T>()), ...);
    if (done) return;
    std::string expected;
    ((expected += (expected.empty() ? "" : ", ") + name_of(type_of<T>())), ...);
    throw cpx::error(a.where, std::string("dtype of ") + a.name, expected, name_of(a.type));
}
/// For operators that compute as the host does.
template <class F>
void with_float(array const& a, F&& f) {
    with_type<float, double>(a, std::forward<F>(f));
}
/// For what moves elements, adds them, or computes in float what has 16 bits.
template <class F>
void with_number(array const& a, F&& f) {
    with_type<float, double, Eigen::bfloat16, Eigen::half>(a, std::forward<F>(f));
}
template <class F>
void with_any(array const& a, F&& f) {
    with_type<float, double, Eigen::bfloat16, Eigen::half, std::int64_t, std::int32_t, std::int16_t, std::int8_t,
              std::uint8_t, std::uint16_t, boolean>(a, std::forward<F>(f));
}

} // namespace binding
