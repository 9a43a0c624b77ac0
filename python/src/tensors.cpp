// SPDX-License-Identifier: Apache-2.0
// What torch's operators ask of their tensors before every call: in Python that takes more than the call itself.
#include "array.hpp"
#include "module.hpp"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace binding {

namespace {

bool describe(nb::handle object, dlpack::tensor& found) {
    auto const* const by = exchange_of(object.type());
    if (by && by->describe(object.ptr(), &found) == 0) return true;
    PyErr_Clear();
    return false;
}

/// Returns a name for `PyObject_GetAttr` and the like, made once.
PyObject* interned(char const* text) { return PyUnicode_InternFromString(text); }

/// Returns whether the type of a tensor is in the set `plain`, and its elements are in memory as they are; `wanted`
/// becomes true if it wants a gradient.
bool is_plain(nb::handle x, nb::handle plain, bool& wanted) {
    static PyObject* const is_neg = interned("is_neg");
    static PyObject* const requires_grad = interned("requires_grad");
    auto const is = [](PyObject* made, PyObject* value) {
        if (!made) PyErr_Clear(); // it is neither
        return nb::steal(made).is(value);
    };
    PyObject* const self = x.ptr();
    int const known = PySet_Contains(plain.ptr(), x.type().ptr());
    if (known < 0) PyErr_Clear();
    if (known != 1) return false;
    wanted = wanted || is(PyObject_GetAttr(self, requires_grad), Py_True);
    return is(PyObject_VectorcallMethod(is_neg, &self, 1, nullptr), Py_False);
}

nb::object gradient_wanted(nb::tuple const& tensors, nb::handle plain) {
    bool wanted = false;
    for (nb::handle const x : tensors)
        if (!x.is_none() && !is_plain(x, plain, wanted)) return nb::none();
    return nb::bool_(wanted);
}

nb::object gradient_wanted_of(nb::dict const& tensors, nb::handle plain, int type, int id, nb::tuple const& sums,
                              nb::tuple const& optional) {
    dlpack::data_type first{};
    auto const is = [](dlpack::data_type const& a, dlpack::data_type const& b) {
        return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
    };
    constexpr dlpack::data_type none{}, sum{static_cast<std::uint8_t>(number_kind::floating), 32, 1};
    bool wanted = false;
    for (auto const& [name, x] : tensors) {
        if (x.is_none()) {
            if (PySequence_Contains(optional.ptr(), name.ptr()) != 1) return nb::none();
            continue;
        }
        dlpack::tensor found{};
        if (!is_plain(x, plain, wanted) || !describe(x, found) || found.where.type != type || found.where.id != id)
            return nb::none();
        bool const is_sum = type == dlpack::cuda_device && PySequence_Contains(sums.ptr(), name.ptr()) == 1;
        if (is(first, none))
            first = found.type;
        else if (!is(found.type, is_sum ? sum : first))
            return nb::none();
    }
    return nb::bool_(wanted);
}

} // namespace

void bind_tensors(nb::module_& m) {
    m.def("gradient_wanted", gradient_wanted, "tensors"_a, "plain"_a,
          R"(Returns whether one of torch's tensors wants a gradient. None is none.

Returns None if one is of no type in the set plain, or is negated lazily.)");
    m.def("gradient_wanted_of", gradient_wanted_of, "tensors"_a, "plain"_a, "type"_a, "id"_a, "sums"_a, "optional"_a,
          R"(The same of a dict's tensors, which are on DLPack's device (type, id) and of one dtype.

sums: names of those which on GPUs are float32, unless they come first; optional: of those that may be None. Returns
None, too, of others, and of what has no exchange of C: then its caller finds out.)");
}

} // namespace binding
