// SPDX-License-Identifier: Apache-2.0
// The recurrences, each compiled in files of its own.
#include "recurrence.hpp"

#include "module.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

using namespace nanobind::literals;

namespace binding {

extern template void run_recurrence<delta_rule, float>(recurrence_call const&);
extern template void run_recurrence<delta_rule, double>(recurrence_call const&);
extern template void run_recurrence<cpx::head_decay_attention, float>(recurrence_call const&);
extern template void run_recurrence<cpx::head_decay_attention, double>(recurrence_call const&);
extern template void run_recurrence<cpx::channel_decay_attention, float>(recurrence_call const&);
extern template void run_recurrence<cpx::channel_decay_attention, double>(recurrence_call const&);
extern template void run_recurrence<cpx::kimi_delta_attention, float>(recurrence_call const&);
extern template void run_recurrence<cpx::kimi_delta_attention, double>(recurrence_call const&);

namespace {

enum class kind { gated_delta, head_decay, channel_decay, kimi_delta };

kind kind_of(std::string_view name) {
    return word<kind>("recurrence", "name", name,
                      {{"gated_delta_rule", kind::gated_delta},
                       {"head_decay_attention", kind::head_decay},
                       {"channel_decay_attention", kind::channel_decay},
                       {"kimi_delta_attention", kind::kimi_delta}});
}

template <class T>
void run(kind which, recurrence_call const& c) {
    switch (which) {
    case kind::gated_delta: return run_recurrence<delta_rule, T>(c);
    case kind::head_decay: return run_recurrence<cpx::head_decay_attention, T>(c);
    case kind::channel_decay: return run_recurrence<cpx::channel_decay_attention, T>(c);
    case kind::kimi_delta: return run_recurrence<cpx::kimi_delta_attention, T>(c);
    }
}

constexpr std::array names{"q", "k", "v", "g", "beta"}, gradient_names{"dq", "dk", "dv", "dg", "dbeta"};

using sizes = std::tuple<index_t, index_t, index_t, index_t>;
using parameters = std::tuple<index_t, bool, std::optional<double>>;

recurrence_objects objects_of(std::vector<nb::object> const& x, std::vector<nb::object> const& dx, sizes const& heads,
                              parameters const& p, nb::handle o, nb::handle initial, nb::handle last, nb::handle starts,
                              nb::handle maps) {
    auto const [key_heads, value_heads, key_dim, value_dim] = heads;
    auto const [chunk, norm, scale] = p;
    return {x, dx, {key_heads, value_heads, key_dim, value_dim}, chunk, norm, scale, o, initial, last, starts, maps};
}

recurrence_call prepare(std::string_view name, carry_value const& plan, communicator& comm, sizes const& heads,
                        parameters const& p, std::vector<nb::object> const& x) {
    auto const [key_heads, value_heads, key_dim, value_dim] = heads;
    auto const [chunk, norm, scale] = p;
    recurrence_call c(plan, comm);
    c.heads = {key_heads, value_heads, key_dim, value_dim};
    c.chunk = chunk, c.qk_l2norm = norm, c.scale = scale, c.where = name;
    auto const which = kind_of(name);
    std::size_t const inputs = which == kind::gated_delta || which == kind::kimi_delta ? 5 : 4;
    cpx::require(x.size() == inputs, "recurrence", "inputs", inputs, x.size());
    for (std::size_t i = 0; i < inputs; ++i) c.x.push_back(read(c.where.c_str(), names[i], x[i]));
    return c;
}

void forward(std::string_view name, carry_value const& plan, std::vector<nb::object> const& x, nb::object o,
             sizes const& heads, parameters const& p, communicator& comm, nb::object initial, nb::object last,
             nb::object starts, nb::object maps) {
    if (auto* const there = comm.on_device())
        return there->recur(name, false, plan, objects_of(x, {}, heads, p, o, initial, last, starts, maps));
    auto c = prepare(name, plan, comm, heads, p, x);
    char const* const where = c.where.c_str();
    c.o = written(where, "out", o);
    c.initial = read_if(where, "initial", initial);
    c.last = written_if(where, "final", last);
    c.starts = written_if(where, "saved states", starts);
    c.maps = written_if(where, "saved maps", maps);
    with_float(c.x[0], [&]<class T>(of_type<T>) { run<T>(kind_of(name), c); });
}

void backward(std::string_view name, carry_value const& plan, std::vector<nb::object> const& x, nb::object dout,
              std::vector<nb::object> const& dx, sizes const& heads, parameters const& p, communicator& comm,
              nb::object starts, nb::object maps, nb::object dlast, nb::object dinitial) {
    if (auto* const there = comm.on_device())
        return there->recur(name, true, plan, objects_of(x, dx, heads, p, dout, dinitial, dlast, starts, maps));
    auto c = prepare(name, plan, comm, heads, p, x);
    c.where += "_backward";
    char const* const where = c.where.c_str();
    for (array& a : c.x) a.where = where;
    cpx::require(dx.size() == x.size(), where, "gradients of inputs", x.size(), dx.size());
    for (std::size_t i = 0; i < dx.size(); ++i) c.dx.push_back(written(where, gradient_names[i], dx[i]));
    c.back = true;
    c.dout = read(where, "dout", dout);
    c.starts = read(where, "saved states", starts);
    c.maps = read(where, "saved maps", maps);
    c.dlast = read_if(where, "dfinal", dlast);
    c.dinitial = written_if(where, "dinitial", dinitial);
    with_float(c.x[0], [&]<class T>(of_type<T>) { run<T>(kind_of(name), c); });
}

} // namespace

void bind_recurrence(nb::module_& m) {
    m.def("recur", forward, "name"_a, "plan"_a, "x"_a, "out"_a, "heads"_a, "parameters"_a, "comm"_a, "initial"_a.none(),
          "final"_a.none(), "starts"_a.none(), "maps"_a.none());
    m.def("recur_backward", backward, "name"_a, "plan"_a, "x"_a, "dout"_a, "dx"_a, "heads"_a, "parameters"_a, "comm"_a,
          "starts"_a.none(), "maps"_a.none(), "dfinal"_a.none(), "dinitial"_a.none());
}

} // namespace binding
