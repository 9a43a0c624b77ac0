// SPDX-License-Identifier: Apache-2.0
// The causal convolution, forward and backward.
#include "comm.hpp"
#include "module.hpp"
#include "numbers.hpp"
#include "plan.hpp"

#include <cpx/ops/causal_conv1d.hpp>

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

using namespace nanobind::literals;

namespace binding {

namespace {

cpx::activation activation_of(char const* where, nb::object name) {
    if (name.is_none()) return cpx::activation::none;
    if (!nb::isinstance<nb::str>(name)) throw cpx::error(where, "activation", "None or \"silu\"", "another object");
    return word<cpx::activation>(where, "activation", nb::cast<std::string_view>(name),
                                 {{"silu", cpx::activation::silu}, {"none", cpx::activation::none}});
}

cpx::sum_order order_of(char const* where, std::string_view name) {
    return word<cpx::sum_order>(where, "order", name,
                                {{"by_rank", cpx::sum_order::by_rank}, {"by_row", cpx::sum_order::by_row}});
}

void forward(halo_value const& plan, nb::object x_, nb::object weight_, nb::object bias_, nb::object act, nb::object y_,
             communicator& comm, nb::object initial_, nb::object final_) {
    char const* const where = "causal_conv1d";
    if (auto* const there = comm.on_device())
        return there->convolve(
            plan, {.x = x_, .weight = weight_, .bias = bias_, .y = y_, .initial = initial_, .final = final_},
            activation_of(where, act));
    array const x = read(where, "x", x_), weight = read(where, "weight", weight_), bias = read_if(where, "bias", bias_),
                y = written(where, "out", y_), initial = read_if(where, "initial", initial_),
                last = written_if(where, "final", final_);
    auto const activation = activation_of(where, act);
    with_float(x, [&]<class T>(of_type<T>) {
        auto const from = rows_of<T>(x);
        auto const to = rows_to<T>(y);
        auto const w = rows_of<T>(weight);
        auto const b = list_of<T>(bias);
        auto const width = std::max<index_t>(1, from.width()) * w.width();
        cpx::causal_conv1d_states<T> const states{matrix_of<T>(initial, width), matrix_to<T>(last, width)};
        call const now(where, comm);
        auto transport = comm.host(where);
        visit_plan(plan, [&](auto const& p, auto const& sharding) {
            cpx::causal_conv1d(p, cpx::sharded(from, sharding, p.rank), w, b, activation,
                               cpx::sharded(to, sharding, p.rank), transport, states);
        });
    });
}

void backward(halo_value const& before, halo_value const& after, nb::object x_, nb::object weight_, nb::object bias_,
              nb::object act, nb::object dy_, nb::object dx_, nb::object dweight_, nb::object dbias_,
              communicator& comm, std::string_view order_) {
    char const* const where = "causal_conv1d_backward";
    cpx::require(before.real.index() == after.real.index(), where, "sharding of the plans", "one of both", "two");
    if (auto* const there = comm.on_device()) {
        cpx::require(order_of(where, order_) == cpx::sum_order::by_rank, where, "order", "\"by_rank\", on devices",
                     "\"by_row\"");
        return there->convolve_backward(
            before, after,
            {.x = x_, .weight = weight_, .bias = bias_, .dy = dy_, .dx = dx_, .dweight = dweight_, .dbias = dbias_},
            activation_of(where, act));
    }
    array const x = read(where, "x", x_), weight = read(where, "weight", weight_), bias = read_if(where, "bias", bias_),
                dy = read(where, "dy", dy_), dx = written(where, "dx", dx_),
                dweight = written_if(where, "dweight", dweight_), dbias = written_if(where, "dbias", dbias_);
    auto const activation = activation_of(where, act);
    auto const order = order_of(where, order_);
    with_float(x, [&]<class T>(of_type<T>) {
        auto const from = rows_of<T>(x), of_y = rows_of<T>(dy), w = rows_of<T>(weight);
        auto const to = rows_to<T>(dx), to_weight = rows_to<T>(dweight);
        auto const b = list_of<T>(bias);
        auto const to_bias = list_to<T>(dbias);
        call const now(where, comm);
        auto transport = comm.host(where);
        visit_plan(before, [&]<class S>(cpx::halo_plan<S> const& p, S const& sharding) {
            auto const& next = std::get<cpx::halo_plan<S>>(after.real);
            auto const on = [&](auto const& rows) { return cpx::sharded(rows, sharding, p.rank); };
            cpx::causal_conv1d_backward(p, next, on(from), w, b, activation, on(of_y),
                                        cpx::causal_conv1d_gradients<T, S>{on(to), to_weight, to_bias, order},
                                        transport);
        });
    });
}

} // namespace

void bind_convolution(nb::module_& m) {
    m.def("causal_conv1d", forward, "plan"_a, "x"_a, "weight"_a, "bias"_a.none(), "activation"_a.none(), "out"_a,
          "comm"_a, "initial"_a.none(), "final"_a.none());
    m.def("causal_conv1d_backward", backward, "before"_a, "after"_a, "x"_a, "weight"_a, "bias"_a.none(),
          "activation"_a.none(), "dy"_a, "dx"_a, "dweight"_a.none(), "dbias"_a.none(), "comm"_a, "order"_a);
}

} // namespace binding
