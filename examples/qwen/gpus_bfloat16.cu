// SPDX-License-Identifier: Apache-2.0
// The model on GPUs, in bfloat16.
#include "cuda/rank.hpp"

namespace qwen {

template outcome run_on<__nv_bfloat16>(checkpoint<float> const&, input const&, strategy const&, group const&, bool,
                                       bool);

} // namespace qwen
