// SPDX-License-Identifier: Apache-2.0
#include "module.hpp"

#include <cpx/core/error.hpp>

#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace {

/// Raises cpx.Error, which finds the caller's line in Python.
void raise_error(std::exception_ptr const& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (cpx::error const& e) {
        try {
            nb::object const type = nb::module_::import_("cpx._error").attr("Error");
            nb::object const value = type(e.where(), e.problem(), e.expected(), e.got());
            PyErr_SetObject(type.ptr(), value.ptr());
        } catch (nb::python_error& inner) {
            inner.restore();
        }
    }
}

} // namespace

NB_MODULE(_ext, m) {
    m.doc() = "What cpx is in C++, for its Python package.";
    nb::set_leak_warnings(false);
    m.def(
        "set_leak_warnings", [](bool on) { nb::set_leak_warnings(on); }, nb::arg("on"),
        "Tells whether objects that are alive when the interpreter exits are listed; for tests.");
    nb::register_exception_translator(raise_error);
    binding::bind_batch(m);
    binding::bind_layout(m);
    binding::bind_plan(m);
    binding::bind_exchange(m);
    binding::bind_convolution(m);
    binding::bind_recurrence(m);
    binding::bind_net(m);
    binding::bind_attention(m);
    binding::bind_experts(m);
    binding::bind_positions(m);
    binding::bind_local(m);
    binding::bind_tensors(m);
}
