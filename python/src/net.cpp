// SPDX-License-Identifier: Apache-2.0
// The gated delta net layer.
#include "net.hpp"

#include "module.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

using namespace nanobind::literals;

namespace binding {

extern template void run_net<float>(net_call const&);
extern template void run_net<double>(net_call const&);

namespace {

using nb::object;
using head_numbers = std::tuple<index_t, index_t, index_t, index_t>;

constexpr std::array<char const*, parameters> names{"in_proj_qkv.weight",
                                                    "in_proj_z.weight",
                                                    "in_proj_b.weight",
                                                    "in_proj_a.weight",
                                                    "conv1d.weight",
                                                    "A_log",
                                                    "dt_bias",
                                                    "norm.weight",
                                                    "out_proj.weight"};

net_value make_net(any_layout const& sharding, int rank, index_t hidden, head_numbers const& heads,
                   std::string_view how, index_t kernel, index_t chunk, double eps) {
    auto const [key_heads, value_heads, key_dim, value_dim] = heads;
    cpx::gated_delta_net_config const config{hidden, {key_heads, value_heads, key_dim, value_dim}, kernel, chunk, eps};
    enum class way { scan, serial, heads };
    auto const run = word<way>("gated_delta_net", "carry", how,
                               {{"scan", way::scan}, {"serial", way::serial}, {"heads", way::heads}});
    if (sharding.every_row()) {
        auto const& rows = std::get<any_rows>(sharding.real);
        return {in_place_whole(cpx::carry<cpx::serial>(rows, rank), config), sharding, rank};
    }
    auto const& tokens = std::get<any_tokens>(sharding.real);
    if (run == way::scan) return {in_place_scan(cpx::carry<cpx::scan>(tokens, rank), config), sharding, rank};
    if (run == way::serial) return {in_place_serial(cpx::carry<cpx::serial>(tokens, rank), config), sharding, rank};
    static_cast<void>(cpx::detail::checked(config, cpx::caller::here())); // before its heads make sections
    auto const of = [&](std::vector<cpx::section> sections) {
        return any_rows(cpx::head_sharded<>(tokens.ranks(), tokens.batch(), std::move(sections)), "head_sharded");
    };
    auto const mix = of(config.sections()), back = of(config.output_sections());
    return {by_heads(cpx::carry<cpx::serial>(mix, rank), cpx::relayout(tokens, mix, rank),
                     cpx::relayout(back, tokens, rank), config),
            sharding, rank};
}

void take_weights(net_call& c, std::vector<object> const& weights, std::array<array, parameters>& to, bool write) {
    cpx::require(weights.size() == parameters, c.where, "weights", parameters, weights.size());
    for (std::size_t i = 0; i < parameters; ++i)
        to[i] = write ? written(c.where, names[i], weights[i]) : read(c.where, names[i], weights[i]);
}

void forward(net_value const& net, std::vector<object> const& weights, object x, object y, communicator& comm,
             object conv, object recurrent, std::shared_ptr<net_saved> saved) {
    net_call c(net, comm, "gated_delta_net");
    take_weights(c, weights, c.weights, false);
    c.x = read(c.where, "x", x);
    c.y = written(c.where, "out", y);
    c.conv = written_if(c.where, "conv state", conv);
    c.recurrent = written_if(c.where, "recurrent state", recurrent);
    c.saved = std::move(saved);
    with_float(c.x, [&]<class T>(of_type<T>) { run_net<T>(c); });
}

void backward(net_value const& net, std::vector<object> const& weights, object x, std::shared_ptr<net_saved> saved,
              object dy, object dx, std::vector<object> const& dweights, communicator& comm, std::string_view order) {
    net_call c(net, comm, "gated_delta_net_backward");
    take_weights(c, weights, c.weights, false);
    take_weights(c, dweights, c.dweights, true);
    c.back = true;
    c.x = read(c.where, "x", x);
    c.y = read(c.where, "dy", dy);
    c.dx = written(c.where, "dx", dx);
    c.saved = std::move(saved);
    c.order = word<cpx::sum_order>(c.where, "order", order,
                                   {{"by_rank", cpx::sum_order::by_rank}, {"by_row", cpx::sum_order::by_row}});
    with_float(c.x, [&]<class T>(of_type<T>) { run_net<T>(c); });
}

} // namespace

void bind_net(nb::module_& m) {
    nb::class_<net_saved>(m, "NetSaved", "What the backward of a gated delta net needs of its forward.")
        .def(nb::init<>());
    nb::class_<net_value>(m, "Net")
        .def(
            "__init__",
            [](net_value* self, any_layout const& sharding, int rank, index_t hidden, head_numbers const& heads,
               std::string_view how, index_t kernel, index_t chunk,
               double eps) { new (self) net_value(make_net(sharding, rank, hidden, heads, how, kernel, chunk, eps)); },
            "sharding"_a, "rank"_a, "hidden"_a, "heads"_a, "carry"_a, "kernel"_a, "chunk"_a, "eps"_a)
        .def("forward", forward, "weights"_a, "x"_a, "out"_a, "comm"_a, "conv"_a.none(), "recurrent"_a.none(),
             "saved"_a.none())
        .def("backward", backward, "weights"_a, "x"_a, "saved"_a, "dy"_a, "dx"_a, "dweights"_a, "comm"_a, "order"_a);
    nb::list list;
    for (char const* const name : names) list.append(name);
    m.attr("net_parameters") = nb::tuple(list);
}

} // namespace binding
