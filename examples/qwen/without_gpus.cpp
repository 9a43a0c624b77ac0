// SPDX-License-Identifier: Apache-2.0
// Stands for gpus.cu where that cannot be compiled.
#include "outcome.hpp"

namespace qwen {

int gpus() {
    throw cpx::error("--device", "cuda", "a program built for GPUs: nvcc, cuBLAS and NCCL found, CPX_CUDA=ON",
                     "one built without");
}

outcome run_on_gpus(checkpoint<float> const&, input const&, strategy const&, group const&, bool, products,
                    gpu_element) {
    static_cast<void>(gpus());
    return {};
}

} // namespace qwen
