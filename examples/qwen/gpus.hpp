// SPDX-License-Identifier: Apache-2.0
// The boundary between what the host's compiler sees and what nvcc compiles.
#pragma once

#include "names.hpp"

#include <cpx/core/rows.hpp>
#include <cpx/core/thd.hpp>
#include <cpx/model/qwen_config.hpp>
#include <cpx/transport/counted.hpp>

#include <map>

namespace qwen {

/// What a forward pass on GPUs starts from, all in host memory.
struct gpu_input {
    cpx::qwen_config config;
    std::map<std::string, cpx::rows<float const>> weights; ///< by their names in the file
    cpx::thd batch;
    std::vector<cpx::index_t> ids, labels; ///< by global row
    strategy how;
};

struct gpu_output {
    std::vector<float> log_probabilities; ///< by global row; 0 where the label is `cpx::ignored`
    cpx::tally sent, states;              ///< by all ranks: rows (relayouts and halos), and recurrent states
};

/// Returns how many GPUs there are. Throws `cpx::error` if the program is built without CUDA, cuBLAS or NCCL.
int gpus();

/// Runs the forward pass over `ranks` GPUs, a thread each.
///
/// Throws `std::runtime_error` that names the rank which failed first, and what CUDA, cuBLAS or NCCL reported there.
gpu_output forward_on_gpus(gpu_input const& in, int ranks);

} // namespace qwen
