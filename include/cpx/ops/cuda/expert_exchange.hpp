// SPDX-License-Identifier: Apache-2.0
// Rows of tokens on devices to the ranks that own the experts which they chose, and back: all that `expert_exchange` of
// a `cuda::communicator` needs. A group of fewer ranks has a communicator of its own, by `nccl::split`.
#pragma once

#include <cpx/cuda/communicator.hpp>
#include <cpx/cuda/row_gather.hpp>
#include <cpx/ops/expert_exchange.hpp>
