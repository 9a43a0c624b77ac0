// SPDX-License-Identifier: Apache-2.0
#include "array.hpp"

namespace binding {

namespace {

constexpr int cpu = 1, cuda_host = 3;

std::string device_of(array const& a) {
    int const type = a.held.device_type();
    std::string const name = type == cpu || type == cuda_host ? "cpu"
                             : type == 2                      ? "cuda"
                             : type == 10                     ? "rocm"
                                                              : "device type " + std::to_string(type);
    return type == cpu ? name : name + ':' + std::to_string(a.held.device_id());
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

array take(char const* where, char const* name, nb::handle object, bool write) {
    array a{where, name};
    auto const import = [&](nb::handle from) {
        nb::ndarray<> both;
        if (!write) return nb::try_cast<nb::ndarray<nb::ro>>(from, a.held);
        if (!nb::try_cast<nb::ndarray<>>(from, both)) return false;
        a.held = nb::ndarray<nb::ro>(both);
        return true;
    };
    if (import(object)) {
        a.type = a.held.dtype();
        return a;
    }
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

bool array::on_host() const { return held.device_type() == cpu || held.device_type() == cuda_host; }

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
