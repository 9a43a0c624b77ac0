// SPDX-License-Identifier: Apache-2.0
#if __has_include(<cudnn_frontend.h>)
#include <cpx/cuda/cudnn_attention.hpp>
#endif

#include "cudnn_attention.hpp"

std::unique_ptr<cpx::cuda::attention_engine> cudnn_attention() {
#if __has_include(<cudnn_frontend.h>)
    if (auto made = std::make_unique<cpx::cuda::cudnn_attention>(); *made) return made;
#endif
    return nullptr;
}
