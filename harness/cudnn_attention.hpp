// SPDX-License-Identifier: Apache-2.0
// Attention by cuDNN, for programs that are built with or without it.
#pragma once

#include <cpx/cuda/attention_engine.hpp>

#include <memory>

/// Returns what computes attention by cuDNN on the current device; null where the build has no headers of it, or the
/// machine no library. All programs of a build share its source, which takes long to compile.
std::unique_ptr<cpx::cuda::attention_engine> cudnn_attention();
