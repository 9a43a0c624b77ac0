// SPDX-License-Identifier: Apache-2.0
// Attention by cuDNN, where the program is built with it. Before the files that include nlohmann's JSON, which cuDNN's
// frontend wants to see first.
#include <cpx/cuda/attention_engine.hpp>
#if __has_include(<cudnn_frontend.h>)
#include <cpx/cuda/cudnn_attention.hpp>
#endif

#include <memory>

namespace qwen {

std::unique_ptr<cpx::cuda::attention_engine> attention_by_cudnn() {
#if __has_include(<cudnn_frontend.h>)
    return std::make_unique<cpx::cuda::cudnn_attention>();
#else
    return nullptr;
#endif
}

} // namespace qwen
