// SPDX-License-Identifier: Apache-2.0
// What a pass gives, and how to run one on the host.
#pragma once

#include "input.hpp"
#include "names.hpp"
#include "needs.hpp"
#include "ranks.hpp"

#include <cpx/model/qwen_checkpoint.hpp>
#include <cpx/ops/token_loss.hpp>
#include <cpx/testing/counted.hpp>

#include <map>

namespace qwen {

template <class T>
using checkpoint = cpx::qwen_checkpoint<T>;

/// The gradient of a weight or of features, whole.
template <class T>
struct gradient {
    cpx::index_t columns = 0;
    std::vector<T> values = {};
};

/// How often kernels have run on GPUs: of full attention, forward, by an engine (cuDNN) or by cpx where one was asked,
/// and of the delta rule, forward and backward.
struct kernel_calls {
    cpx::index_t by_engine = 0, refused_by_engine = 0, on_tensor_cores = 0, plain = 0;

    kernel_calls& operator+=(kernel_calls const& more) {
        by_engine += more.by_engine, refused_by_engine += more.refused_by_engine;
        on_tensor_cores += more.on_tensor_cores, plain += more.plain;
        return *this;
    }
    /// Whose kernels computed full attention, forward.
    std::string attention() const {
        return by_engine == 0 ? "cpx" : refused_by_engine == 0 ? "cudnn" : "cudnn and cpx";
    }
    /// On what linear attention ran.
    std::string delta_rule() const {
        if (on_tensor_cores == 0) return plain == 0 ? "none" : "plain";
        return plain == 0 ? "tensor cores" : "tensor cores and plain";
    }
};

struct outcome {
    std::vector<double> log_probabilities; ///< by global row
    cpx::token_loss loss;
    std::map<std::string, gradient<double>> gradients = {}; ///< of the loss, by name in files; none unless asked for
    bool exact = false;                                     ///< bitwise those of one rank, by construction
    bool positions_equal = true;                            ///< to those of the input, on all ranks
    cpx::tally rows, states; ///< what all ranks sent: rows (relayouts and halos) and recurrent states
    needs counted;
    kernel_calls kernels = {}; ///< of all ranks
};

/// Runs the model, forward and, if asked for, backward; what comes of it is rank 0's. Throws `cpx::error` on bad input.
///
/// Compiled for float and for double.
template <class T>
outcome run(checkpoint<T> const& model, input const& in, strategy const& how, group const& on, cpx::index_t chunk,
            bool backward);

/// Returns how many GPUs there are. Throws `cpx::error` if the program is built without CUDA, cuBLASLt or NCCL.
int gpus();

/// How GPUs multiply matrices: by cuBLASLt, or so that a row's result has the same bits beside any other rows.
enum class products { cublas, fixed };

/// What GPUs hold and round to; gates, sums and states are float32.
enum class gpu_element { float32, bfloat16 };

/// The same on GPUs, one a rank. Throws what they report.
outcome run_on_gpus(checkpoint<float> const& model, input const& in, strategy const& how, group const& on,
                    bool backward, products by, gpu_element element);

} // namespace qwen
