// SPDX-License-Identifier: Apache-2.0
// The parts of the extension, each in a file of its own.
#pragma once

#include <nanobind/nanobind.h>

namespace binding {

/// Of a class whose objects never change: a copy is the object itself.
struct unchanging : nanobind::def_visitor<unchanging> {
    template <class C, class... Extra>
    void execute(C& c, Extra const&...) {
        c.def("__copy__", [](nanobind::object self) { return self; });
        c.def(
            "__deepcopy__", [](nanobind::object self, nanobind::object) { return self; }, nanobind::arg("memo"));
    }
};

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
