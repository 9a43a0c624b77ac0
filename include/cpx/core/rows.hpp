// SPDX-License-Identifier: Apache-2.0
// A view of a rank's local rows.
#pragma once

#include <cpx/core/refused.hpp>
#include <cpx/core/size.hpp>

#include <algorithm>
#include <ranges>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpx {

/// A view of (count, width) elements, row-major; row `i` begins at `data + i * stride`.
///
/// Owns nothing. `stride > width` views some columns of wider rows, such as q inside a fused qkv projection.
/// Throws `cpx::error`, on the host, of numbers that are negative or of 2^62 bytes and more.
template <class T>
class rows {
public:
    static_assert(!std::same_as<T, detail::any>,
                  "cpx: rows(list, width) wants a vector and the width of a row; rows<T> may be empty");
    constexpr rows() = default;
    CPX_HOST_DEVICE constexpr rows(T* data, index_t count, index_t width, caller here = caller::here())
        : rows(data, count, width, width, here) {}
    CPX_HOST_DEVICE constexpr rows(T* data, index_t count, index_t width, index_t stride,
                                   [[maybe_unused]] caller here = caller::here())
        : data_(data), count_(count), width_(width), stride_(stride) {
#ifndef __CUDA_ARCH__
        if (((count | width | stride) >> 28) != 0 || sizeof(T) > 64) // few of the views made for every head and segment
            for (index_t const row : {width, stride})
                detail::product("rows", "bytes", {count, row, static_cast<index_t>(sizeof(T))}, here);
#endif
    }

    /// Views a vector, array or span that holds whole rows of `width` elements. Throws `cpx::error` if it does not.
    template <std::ranges::sized_range R>
    rows(R&& list, index_t width, caller here = caller::here())
        : rows(elements<R>(list), width > 0 ? std::ssize(list) / width : 0, std::max<index_t>(width, 0), here) {
        constexpr bool stays = std::ranges::borrowed_range<R>;
        static_assert(stays, "cpx: rows of a vector that ends with the expression; give it a name");
        require(width >= 0 && count_ * width == std::ssize(list), "rows", "size of the list",
                "a multiple of the width " + std::to_string(width), std::ssize(list), here);
    }

    template <class X, class... More>
        requires((sizeof...(More) == 0 || sizeof...(More) > 2 ||
                  (std::is_class_v<X> && !std::is_convertible_v<X const&, void const*>)) &&
                 !(std::same_as<More, caller> || ...) && !std::is_convertible_v<X&, rows>)
    explicit rows(X const&, detail::any = {}, More const&...) {
        static_assert(detail::never<X>,
                      "cpx: rows(list, width) wants a vector and the width of a row, or rows(pointer, count, width); "
                      "of other lists write rows<T>(list, width), of a tensor its data()");
    }
    template <class X>
        requires(!std::is_convertible_v<X*, T*>)
    rows(X*, index_t, index_t, detail::any = {}) {
        static_assert(detail::never<X>,
                      "cpx: rows of a pointer to other elements, or to const; rows<T const> view what is const");
    }

    CPX_HOST_DEVICE constexpr operator rows<T const>() const { return {data_, count_, width_, stride_}; }

    CPX_HOST_DEVICE constexpr T* data() const { return data_; }
    CPX_HOST_DEVICE constexpr index_t count() const { return count_; }
    CPX_HOST_DEVICE constexpr index_t width() const { return width_; }
    /// Returns the elements from the beginning of one row to the beginning of the next.
    CPX_HOST_DEVICE constexpr index_t stride() const { return stride_; }
    CPX_HOST_DEVICE constexpr T* row(index_t i) const { return data_ + i * stride_; }
    CPX_HOST_DEVICE constexpr T& operator()(index_t i, index_t column) const { return data_[i * stride_ + column]; }

    /// Returns rows `[first, first + count)`.
    CPX_HOST_DEVICE constexpr rows sub(index_t first, index_t count, caller here = caller::here()) const {
        return {data_ + first * stride_, count, width_, stride_, here};
    }
    /// Returns columns `[first, first + width)` of every row.
    CPX_HOST_DEVICE constexpr rows columns(index_t first, index_t width, caller here = caller::here()) const {
        return {data_ + first, count_, width, stride_, here};
    }

private:
    template <class R>
    static T* elements(R& list) {
        constexpr bool fits = std::is_convertible_v<R&, std::span<T>>;
        static_assert(fits || !std::ranges::borrowed_range<R>,
                      "cpx: rows of a list of other elements, of one that is const, or of no vector, array or "
                      "span; rows<T const> view what is const");
        if constexpr (fits)
            return std::ranges::data(list);
        else
            return nullptr;
    }

    T* data_ = nullptr;
    index_t count_ = 0, width_ = 0, stride_ = 0;
};

/// What an operator takes that knows the width of the rows: rows, a tensor or row_buffer of them, or their elements in
/// a vector, array or span.
template <class T>
class rows_or_list {
public:
    rows_or_list() = default;
    rows_or_list(rows<T> r) : rows_(r) {}
    rows_or_list(rows<std::remove_const_t<T>> r)
        requires std::is_const_v<T>
        : rows_(r) {}
    template <class X>
        requires requires(X& x) { requires std::convertible_to<decltype(x.data()), rows<T>>; }
    rows_or_list(X& tensor) : rows_(tensor.data()) {}
    template <class X>
        requires(!requires(X& x) { x.data(); }) &&
                requires(X& x) { requires std::convertible_to<decltype(x.view()), rows<T>>; }
    rows_or_list(X& buffer) : rows_(buffer.view()) {}
    template <class R>
        requires std::is_convertible_v<R, std::span<T>>
    rows_or_list(R&& list) : list_(std::forward<R>(list)), is_list_(true) {}

    /// Returns rows of `width` elements; of a list that does not hold whole ones, rows of another width.
    rows<T> of_width(index_t width) const {
        index_t const size = std::ssize(list_);
        if (!is_list_) return rows_;
        return width > 0 && size % width == 0 ? rows<T>(list_.data(), size / width, width)
                                              : rows<T>(list_.data(), size, 1);
    }

private:
    rows<T> rows_;
    std::span<T> list_;
    bool is_list_ = false;
};

template <class T>
rows(std::vector<T>&, index_t) -> rows<T>;
template <class T>
rows(std::vector<T> const&, index_t) -> rows<T const>;
template <class X>
rows(X const&, detail::any = {}, ...) -> rows<detail::refused>;
template <class X = detail::any>
rows() -> rows<X>;

} // namespace cpx
