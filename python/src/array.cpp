// SPDX-License-Identifier: Apache-2.0
#include "array.hpp"

#include <unordered_map>

namespace binding {

namespace {

constexpr int cpu = 1, cuda_host = 3;

std::string device_of(array const& a) {
    int const type = a.place.type;
    std::string const name = type == cpu || type == cuda_host ? "cpu"
                             : type == 2                      ? "cuda"
                             : type == 10                     ? "rocm"
                                                              : "device type " + std::to_string(type);
    return type == cpu ? name : name + ':' + std::to_string(a.place.id);
}

std::string class_of(nb::handle object) { return nb::cast<std::string>(object.type().attr("__name__")); }

/// Returns what the array's own framework says against handing it over, if it does.
std::string refusal(nb::handle object) {
    if (!nb::hasattr(object, "__dlpack__")) return {};
    try {
        object.attr("__dlpack__")();
    } catch (nb::python_error const& e) {
        return ": " + nb::cast<std::string>(nb::str(e.value()));
    }
    return {};
}

/// Whether it is an array of NumPy whose elements NumPy itself does not know: ml_dtypes' bfloat16.
bool is_foreign_bfloat16(nb::handle object) {
    if (!nb::hasattr(object, "dtype") || !nb::hasattr(object, "view")) return false;
    return nb::cast<std::string>(nb::str(nb::object(object.attr("dtype")))) == "bfloat16";
}

/// Lets `a` be what a framework hands over.
void hold(array& a, nb::ndarray<nb::ro> made) {
    a.held = std::move(made);
    a.given = true;
    a.data = a.held.data();
    a.place = {a.held.device_type(), a.held.device_id()};
    a.type = a.held.dtype();
    a.count = static_cast<index_t>(a.held.ndim());
    a.sizes = a.held.shape_ptr(), a.strides = a.held.stride_ptr();
}

/// The same of a tensor that its framework only describes: nothing is made, and it may be one that wants a gradient.
bool describe(array& a, nb::handle object) {
    auto const* const by = exchange_of(object.type());
    dlpack::tensor found{};
    if (!by) return false;
    if (by->describe(object.ptr(), &found) != 0) {
        PyErr_Clear();
        return false;
    }
    if (!found.strides) return false;
    a.given = true;
    a.data = static_cast<char const*>(found.data) + found.byte_offset;
    a.place = found.where;
    a.type = {found.type.code, found.type.bits, found.type.lanes};
    a.count = found.dimensions;
    a.sizes = found.shape, a.strides = found.strides;
    return true;
}

array take(char const* where, char const* name, nb::handle object, bool write) {
    array a{where, name};
    if (describe(a, object)) return a;
    auto const import = [&](nb::handle from) {
        nb::ndarray<nb::ro> one;
        nb::ndarray<> both;
        if (write ? !nb::try_cast<nb::ndarray<>>(from, both) : !nb::try_cast<nb::ndarray<nb::ro>>(from, one))
            return false;
        hold(a, write ? nb::ndarray<nb::ro>(both) : std::move(one));
        return true;
    };
    if (import(object)) return a;
    if (is_foreign_bfloat16(object) && import(nb::object(object.attr("view")("uint16")))) {
        a.type = type_of<Eigen::bfloat16>();
        return a;
    }
    nb::ndarray<nb::ro> some;
    bool const locked = write && nb::try_cast<nb::ndarray<nb::ro>>(object, some);
    throw cpx::error(where, name, locked ? "an array that may be written" : "an array that speaks DLPack",
                     (locked ? "one that is read-only" : class_of(object) + refusal(object)));
}

} // namespace

dlpack::exchange const* exchange_of(nb::handle type) {
    static auto& known = *new std::unordered_map<PyObject*, dlpack::exchange const*>;
    auto const found = known.find(type.ptr());
    if (found != known.end()) return found->second;
    // A class derived from torch.Tensor may have no memory; torch's own parameters are tensors like others.
    bool const own = nb::cast<bool>(type.attr("__dict__").attr("__contains__")(dlpack::attribute));
    auto const module = nb::cast<std::string>(nb::str(nb::object(type.attr("__module__"))));
    nb::object const capsule = nb::getattr(type, dlpack::attribute, nb::none());
    if (!PyCapsule_IsValid(capsule.ptr(), dlpack::capsule_name) || !(own || module == "torch.nn.parameter")) {
        if (module == "numpy") known[type.inc_ref().ptr()] = nullptr; // asked for most often
        return nullptr;
    }
    auto const* by = static_cast<dlpack::exchange const*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::capsule_name));
    while (by && by->of.major != 1) by = by->before;
    if (by && !by->describe) by = nullptr;
    type.inc_ref(); // its address stands for it
    return known[type.ptr()] = by;
}

bool array::on_host() const { return place.type == cpu || place.type == cuda_host; }

array read(char const* where, char const* name, nb::handle object) { return take(where, name, object, false); }
array written(char const* where, char const* name, nb::handle object) { return take(where, name, object, true); }
array read_if(char const* where, char const* name, nb::handle object) {
    return object.is_none() ? array{where, name} : take(where, name, object, false);
}
array written_if(char const* where, char const* name, nb::handle object) {
    return object.is_none() ? array{where, name} : take(where, name, object, true);
}

std::string name_of(nb::dlpack::dtype type) { return number_name(type.code, type.bits); }

std::string shape_of(array const& a) {
    std::string text = "(";
    for (index_t i = 0; i < a.dimensions(); ++i) text += (i > 0 ? ", " : "") + std::to_string(a.size(i));
    return text + (a.dimensions() == 1 ? ",)" : ")");
}

void require_elements(array const& a, nb::dlpack::dtype type) {
    if (!a.on_host())
        throw cpx::error(a.where, std::string("memory of ") + a.name, "the host's, where the ranks of this call are",
                         device_of(a));
    if (a.type != type) throw cpx::error(a.where, std::string("dtype of ") + a.name, name_of(type), name_of(a.type));
}

} // namespace binding
