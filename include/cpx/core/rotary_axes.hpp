// SPDX-License-Identifier: Apache-2.0
// What rotary embedding is on host and device: which pair of channels turns by which axis, and what is rounded.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/refused.hpp>

#include <algorithm>
#include <array>
#include <vector>

namespace cpx {

/// How the pairs of a head are given to the axes of multimodal positions: time, height, width.
enum class axis_order {
    sectioned,   ///< the pairs of an axis stand side by side: Qwen2-VL, Qwen2.5-VL
    interleaved, ///< pair i belongs to axis i % 3 while i < 3 * section[i % 3], then to time: Qwen3-VL, Qwen3.5
};

/// What is rounded to the elements of a tensor that has fewer bits than float.
enum class rounding {
    fp32_inside,   ///< the result, once: Transformer Engine's fused kernel
    round_each_op, ///< cosine and sine, each product and their sum: transformers, Megatron-LM without fusion
};

/// Returns the axis of every pair, 0 to 2, for `mrope_section` of a model's settings.
///
/// pairs: half the rotary size, which the sections make together; -1: not known.
/// Throws `cpx::error` if a section is negative, or if there are more or fewer pairs. Source: Hugging Face
/// transformers, apply_multimodal_rotary_pos_emb of Qwen2-VL and apply_interleaved_mrope of Qwen3-VL, which do not ask.
inline std::vector<int> rotary_axes(std::array<index_t, 3> section, axis_order order, index_t pairs = -1,
                                    caller here = caller::here()) {
    index_t const least = std::min({section[0], section[1], section[2]}),
                  most = std::max({section[0], section[1], section[2]});
    require(order == axis_order::sectioned || order == axis_order::interleaved, "rotary_axes", "order",
            "sectioned or interleaved", static_cast<int>(order), here);
    require(least >= 0, "rotary_axes", "section", "not negative", least, here);
    require(most <= 1 << 20, "rotary_axes", "section", "at most 2^20", most, here);
    index_t const sum = section[0] + section[1] + section[2];
    require(pairs < 0 || sum == pairs, "rotary_axes", "sum of the sections",
            "half the rotary size, " + std::to_string(pairs), sum, here);
    std::vector<int> axes;
    for (index_t i = 0; i < sum; ++i)
        if (order == axis_order::sectioned)
            axes.push_back((i >= section[0]) + (i >= section[0] + section[1]));
        else
            axes.push_back(i < 3 * section[static_cast<std::size_t>(i % 3)] ? static_cast<int>(i % 3) : 0);
    return axes;
}
template <class X = detail::any>
std::vector<int> rotary_axes(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: rotary_axes(section, order, pairs) wants mrope_section, three index_t in "
                                    "braces or an array, and an axis_order");
    return {};
}

} // namespace cpx
