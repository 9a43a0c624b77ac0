// SPDX-License-Identifier: Apache-2.0
// The parts of the extension, each in a file of its own.
#pragma once

#include <nanobind/nanobind.h>

namespace binding {

void bind_batch(nanobind::module_& m);
void bind_layout(nanobind::module_& m);
void bind_plan(nanobind::module_& m);
void bind_exchange(nanobind::module_& m);
void bind_convolution(nanobind::module_& m);
void bind_recurrence(nanobind::module_& m);
void bind_net(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_experts(nanobind::module_& m);
void bind_positions(nanobind::module_& m);
void bind_local(nanobind::module_& m);
void bind_tensors(nanobind::module_& m);

} // namespace binding
