// SPDX-License-Identifier: Apache-2.0
// Results of convolutions in parts, such as q, k and v, some of whose heads are divided by their norm on the way.
#pragma once

#include <cpx/core/gradient_scale.hpp>
#include <cpx/cuda/arguments.hpp>

#include <cpx/conv_parts.cuh>

#include <array>
#include <bit>

namespace cpx::cuda {

/// Some neighbouring channels of a convolution's result, in rows of their own.
template <class T>
struct conv_part {
    rows<T> data;
    index_t head_dim = 0; ///< if not 0: every head of so many channels is divided by its 2-norm (l2norm)
};

/// A convolution's result, or with `T const` its gradient, in up to four parts that follow each other along the
/// channels; those that are not needed are left empty. Of what is convolved in bfloat16 T may be half, which has three
/// bits more for a delta rule, and a range that its gradients may leave: they are `gradient_scale` times what they
/// stand for, 1 where T is that of x.
///
/// A part y with heads becomes `y / sqrt(sum y^2 + epsilon)`, the sum over each head, of y as T holds it. That wants 4
/// taps, rows of everything at multiples of 16 bytes, heads of 16 bytes times a power of two up to 32, and a part that
/// begins at a multiple of its head_dim.
template <class T>
struct conv_parts {
    std::array<conv_part<T>, kernels::conv_most_parts> part;
    float epsilon = 1e-6f;
    float gradient_scale = 1;
};

namespace detail {

/// Whether a result of a convolution of T, or with `T const` its gradient, may be of U: the same or, of bfloat16, half.
template <class U, class T>
constexpr bool may_stand_for = std::same_as<U, T>;
template <>
inline constexpr bool may_stand_for<__half, __nv_bfloat16> = true;
template <>
inline constexpr bool may_stand_for<__half const, __nv_bfloat16 const> = true;
template <class Y, class T>
constexpr bool is_result_of = false;
template <class U, class T>
constexpr bool is_result_of<rows<U>, T> = may_stand_for<std::conditional_t<std::is_const_v<T>, U const, U>, T>;
template <class U, class T>
constexpr bool is_result_of<conv_parts<U>, T> = may_stand_for<U, T>;
template <class Y, class T>
concept result_of = is_result_of<Y, T>;

template <class T>
kernels::conv_rows<T> conv_view(rows<T> view) {
    return {view.data(), view.stride() * static_cast<index_t>(sizeof(T))};
}

/// Returns whether every row begins at a multiple of 16 bytes.
template <class T>
bool in_vectors(rows<T> view) {
    return view.count() == 0 || row_vector(view) == 16;
}
template <class T>
bool in_vectors(conv_parts<T> const& parts) {
    index_t end = 0;
    for (auto const& [data, head_dim] : parts.part) {
        if (data.width() > 0 && (!in_vectors(data) || end * static_cast<index_t>(sizeof(T)) % 16 != 0)) return false;
        end += data.width();
    }
    return true;
}

/// Throws `cpx::error` unless parts of a result of a convolution of T, or its gradient, can have their scale.
template <class T, class Y>
void require_scale_of_parts(char const*, rows<Y> const&, caller) {}
template <class T, class Y>
void require_scale_of_parts(char const* where, conv_parts<Y> const& parts, caller here) {
    cpx::detail::require_gradient_scale(where, !std::same_as<std::remove_const_t<Y>, T>, parts.gradient_scale, here);
}

/// Whether heads of a result are normalised, which is rows or parts.
template <class Y>
bool normalises(Y const& y) {
    if constexpr (requires { y.part; })
        return std::ranges::any_of(y.part, [](auto const& part) { return part.head_dim != 0; });
    else
        return false;
}

/// Returns where a result is, or its gradient.
template <class Y>
std::array<operand, kernels::conv_most_parts> operands(char const* what, Y const& y) {
    std::array<operand, kernels::conv_most_parts> list;
    if constexpr (requires { y.part; })
        for (std::size_t p = 0; p < list.size(); ++p) list[p] = {what, y.part[p].data};
    else
        list[0] = {what, y};
    return list;
}

/// Throws `cpx::error` unless a result, or its gradient, is (count, channels).
template <class T>
void require_result(char const* where, char const* what, rows<T> whole, index_t count, index_t channels, caller here) {
    require_rows(where, {{what, whole, count, channels}}, here);
}
template <class T>
void require_result(char const* where, char const* what, conv_parts<T> const& parts, index_t count, index_t channels,
                    caller here) {
    constexpr index_t vector = 16 / static_cast<index_t>(sizeof(T));
    index_t end = 0;
    for (std::size_t p = 0; p < parts.part.size(); ++p) {
        auto const& [data, head_dim] = parts.part[p];
        if (data.width() == 0 && head_dim == 0) continue;
        std::string const name = "part " + std::to_string(p) + " of " + what;
        require_rows(where, {{name.c_str(), data, count, data.width()}}, here);
        require(head_dim >= 0, where, ("head_dim of " + name).c_str(), "not negative", head_dim, here);
        if (head_dim > 0) {
            index_t const lanes = head_dim / vector;
            require(head_dim % vector == 0 && lanes <= 32 && std::has_single_bit(static_cast<std::size_t>(lanes)),
                    where, ("head_dim of " + name).c_str(), in_words(vector, " times a power of two up to 32"),
                    head_dim, here);
            require(data.width() % head_dim == 0 && end % head_dim == 0, where,
                    ("first channel and width of " + name).c_str(), in_words("multiples of head_dim, ", head_dim),
                    in_words(end, ", ", data.width()), here);
        }
        end += data.width();
    }
    require(end == channels, where, (std::string("channels of all parts of ") + what).c_str(), channels, end, here);
}

/// Returns it as kernels want it.
template <class T>
kernels::conv_rows<T> result_given(rows<T> whole) {
    return conv_view(whole);
}
template <class T>
kernels::conv_parts<T> result_given(conv_parts<T> const& parts) {
    kernels::conv_parts<T> to{};
    to.epsilon = parts.epsilon;
    to.factor = 1 / parts.gradient_scale;
    index_t end = 0;
    for (std::size_t p = 0; p < parts.part.size(); ++p) {
        auto const& [data, head_dim] = parts.part[p];
        to.rows[p] = conv_view(data);
        to.end[p] = end += data.width();
        to.lanes[p] = static_cast<int>(head_dim * static_cast<index_t>(sizeof(T)) / 16);
    }
    return to;
}

} // namespace detail

} // namespace cpx::cuda
