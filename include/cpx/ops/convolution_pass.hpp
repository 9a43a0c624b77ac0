// SPDX-License-Identifier: Apache-2.0
// The order in which a causal convolution exchanges and computes, in any memory.
#pragma once

#include <cpx/core/error.hpp>

namespace cpx::detail {

/// Runs a convolution of which all fits: rows before segments come, then all is computed. `By` does both for one rank,
/// in the memory of its tensors.
template <class By>
void run_convolution(By&& by, caller here) {
    by.exchange_halo(here);
    by.forward(here);
}

/// Runs its backward: before all others those rows of dz = dy act'(z) are computed that segments elsewhere need. `more`
/// is called when ranks have compared what they run, and nothing but the halo of x has been written.
template <class By, class F>
void run_convolution_backward(By&& by, caller here, F&& more) {
    by.exchange_halo(here);
    more();
    by.edge(here);
    by.exchange_edge(here);
    by.backward(here);
}

} // namespace cpx::detail
