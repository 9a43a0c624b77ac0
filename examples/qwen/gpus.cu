// SPDX-License-Identifier: Apache-2.0
// Runs the model over GPUs, a rank each: threads of one process, or processes. In float32; in bfloat16 elsewhere.
#include "cuda/rank.hpp"

namespace qwen {

int gpus() { return cpx::cuda::devices(); }

extern template outcome run_on<__nv_bfloat16>(checkpoint<float> const&, input const&, strategy const&, group const&,
                                              bool, bool);

outcome run_on_gpus(checkpoint<float> const& model, input const& in, strategy const& how, group const& on,
                    bool backward, products by, gpu_element element) {
    auto const& run = element == gpu_element::bfloat16 ? run_on<__nv_bfloat16> : run_on<float>;
    return run(model, in, how, on, backward, by == products::fixed);
}

} // namespace qwen
