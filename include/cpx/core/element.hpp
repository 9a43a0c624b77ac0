// SPDX-License-Identifier: Apache-2.0
// What tensors are made of.
#pragma once

#include <cpx/core/refused.hpp>

#include <concepts>
#include <type_traits>

namespace cpx {

/// An element of a tensor, which ranks send each other as bytes: a number, or a struct of numbers.
///
/// Not bool: a vector of them has no address to send from, and other bytes than 0 and 1 are none. CUDA's `__half2` has
/// copies of its own; its numbers, `__half`, are elements.
template <class T>
concept element = std::is_object_v<T> && !std::is_array_v<T> && std::same_as<T, std::remove_cv_t<T>> &&
                  !std::same_as<T, bool> && std::is_trivially_copyable_v<T> && std::is_default_constructible_v<T>;

namespace detail {

/// Stands for elements that are not told.
struct untold {
    untold() = delete;
};

/// Whether T is an element. Says what one is, unless it is.
template <class T>
struct checked_element {
    static constexpr bool value = element<T>, told = !std::same_as<T, untold>;
    static_assert(
        value || !told,
        "cpx: an element of a tensor is sent as bytes: a number or a struct of numbers, trivially copyable and "
        "default constructible, not const; instead of bool take unsigned char");
    static_assert(told, "cpx: a tensor cannot tell its elements; write make_tensor<float>(sharding, rank, width)");
};

/// The elements of what stands in place of a class that has refused T, so that nothing more is said of it.
template <class T>
struct stand_in {
    using type = std::conditional_t<std::same_as<std::remove_cv_t<T>, bool>, unsigned char, refused>;
};
template <class T>
    requires element<std::remove_cvref_t<T>>
struct stand_in<T> {
    using type = std::remove_cvref_t<T>;
};

} // namespace detail

} // namespace cpx
