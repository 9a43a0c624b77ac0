// SPDX-License-Identifier: Apache-2.0
#include "numbers.hpp"

namespace binding {

namespace {

index_t integer(char const* where, char const* name, std::size_t place, nb::handle object) {
    auto const refuse = [&](char const* got) -> index_t {
        throw cpx::error(where, std::string(name) + ", number " + std::to_string(place), "an integer below 2^63", got);
    };
    nb::object const number = nb::steal(PyNumber_Index(object.ptr()));
    if (!number.is_valid()) {
        PyErr_Clear();
        return refuse(nb::cast<std::string>(object.type().attr("__name__")).c_str());
    }
    long long const value = PyLong_AsLongLong(number.ptr());
    if (value == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return refuse("one beyond");
    }
    return static_cast<index_t>(value);
}

} // namespace

nb::object items_of(char const* where, char const* name, char const* expected, nb::handle object) {
    nb::object items = nb::steal(PySequence_Fast(object.ptr(), ""));
    if (items.is_valid()) return items;
    PyErr_Clear();
    throw cpx::error(where, name, expected, nb::cast<std::string>(object.type().attr("__name__")));
}

std::vector<index_t> integers(char const* where, char const* name, nb::handle object, index_t dimensions) {
    std::vector<index_t> list;
    if (nb::isinstance<nb::list>(object) || nb::isinstance<nb::tuple>(object) || !nb::hasattr(object, "__dlpack__")) {
        nb::object const items = items_of(where, name, "a list or an array of integers", object);
        for (nb::handle const item : items) list.push_back(integer(where, name, list.size(), item));
        return list;
    }
    array const given = read(where, name, object);
    if (given.dimensions() > dimensions)
        throw cpx::error(where, std::string("dimensions of ") + name, std::to_string(dimensions), shape_of(given));
    with_type<std::int64_t, std::int32_t>(given, [&]<class T>(of_type<T>) {
        for (T const number : list_of<T>(given)) list.push_back(number);
    });
    return list;
}

fill_value number(char const* where, char const* name, nb::handle object) {
    nb::object const index = nb::steal(PyFloat_Check(object.ptr()) ? nullptr : PyNumber_Index(object.ptr()));
    PyErr_Clear();
    fill_value of;
    if (index.is_valid()) of.integer = PyLong_AsLongLong(index.ptr());
    if (index.is_valid() && !PyErr_Occurred()) return of;
    PyErr_Clear(); // an integer beyond 64 bits is read as others are
    of.whole = false, of.real = PyFloat_AsDouble(object.ptr());
    if (!PyErr_Occurred()) return of;
    PyErr_Clear();
    throw cpx::error(where, name, "a number", nb::cast<std::string>(object.type().attr("__name__")));
}

std::vector<index_t> integers_if(char const* where, char const* name, nb::handle object) {
    return object.is_none() ? std::vector<index_t>() : integers(where, name, object);
}

} // namespace binding
