// SPDX-License-Identifier: Apache-2.0
// What is done with features of images and videos, wherever rows are.
#pragma once

#include <cpx/plan/media_position.hpp>

namespace binding {

/// One of `cpx::put_features`, `cpx::add_features` and their backwards, which have gradients in the places of both.
enum class feature_step { put, put_backward, add, add_backward };

inline bool goes_back(feature_step step) {
    return step == feature_step::put_backward || step == feature_step::add_backward;
}

} // namespace binding
