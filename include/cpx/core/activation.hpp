// SPDX-License-Identifier: Apache-2.0
// The names of activations, for operators of the host and of GPUs.
#pragma once

namespace cpx {

/// Which function follows a linear operator.
enum class activation { none, silu };

} // namespace cpx
