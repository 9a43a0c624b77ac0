// SPDX-License-Identifier: Apache-2.0
// Backward of the gated delta net layer.
#pragma once

#include <cpx/ops/gated_delta_net.hpp>
#include <cpx/ops/gated_delta_rule_backward.hpp>

namespace cpx {

/// What the backward of a gated delta net computes.
///
/// dx: (rows, hidden), written. weights: this rank's share, added to what they hold; `sum_over_ranks` completes them.
/// `order`: in which order rows are added up there.
template <class T, any_sharding S>
struct gated_delta_net_gradients {
    sharded_field<T, S> dx;
    gated_delta_net_parameters<T> weights;
    field<sum_order> order = sum_order::by_rank;
    detail::no_more end = {};
};

namespace detail {

/// The backward of `gated_delta_mixer`: from the gradient of o to that of x, and the weights' shares.
template <class T, carry_kind How, any_sharding S, class Saved, class Comm>
void gated_delta_mixer_backward(gated_delta_mixer<How, S> const& mixer, gated_delta_net_config const& config,
                                gated_delta_net_weights<T> const& w, Saved& saved, tensor<T, S> const& dout,
                                tensor<T, S>& dx, gated_delta_net_parameters<T> const& to, sum_order order, Comm& comm,
                                caller here, char const* where) {
    S const& sharding = mixer.states.sharding;
    int const rank = mixer.states.rank;
    gated_delta_widths<S> const n(config, sharding, rank);
    auto const sections = config.sections();
    auto const qkv = std::span(sections).first(3), per_head = std::span(sections).last(1);
    auto const buffer = [](index_t count) { return std::vector<T>(static_cast<std::size_t>(count)); };

    tensor<T, S> dmixed(sharding, rank, n.qkv(), here), dgates(sharding, rank, 2 * n.values, here),
        o(sharding, rank, n.v, here);
    auto t = mixer.delta_rule(n, *saved.mixed, *saved.gates, o.view());
    t.saved = &saved.states;
    auto const dqkv = dmixed.view(), dg_beta = dgates.view();
    delta_rule_options const options{.chunk = config.chunk, .qk_l2norm = true};
    recur_backward_on_host(
        mixer.states, gated_delta{config.heads, options, "gated_delta_net"}, listed(t),
        recurrence_gradients<T, S, 5>{{dout.data(), sharding, rank},
                                      {dqkv.columns(0, n.q), dqkv.columns(n.q, n.q), dqkv.columns(2 * n.q, n.v),
                                       dg_beta.columns(0, n.values), dg_beta.columns(n.values, n.values)}},
        comm, here);

    auto const A_log = local_rows(sharding, rank, per_head, w.A_log, here);
    auto const dt_bias = local_rows(sharding, rank, per_head, w.dt_bias, here);
    auto const b = [&](rows<T> const& of) { return of.columns(n.qkv(), n.values); };
    auto const a = [&](rows<T> const& of) { return of.columns(n.qkv() + n.values, n.values); };
    rows<T> const x = saved.projected->data(), dg = dgates.data();
    row_buffer<T> terms(x.count(), 2 * n.values, here);
    for_each_element(host_memory(), x.count(), n.values,
                     rowwise::delta_gates_backward<T>{b(x), a(x), rows<T const>(A_log, 1), rows<T const>(dt_bias, 1),
                                                      dg.columns(0, n.values), dg.columns(n.values, n.values),
                                                      b(dx.data()), a(dx.data()), terms.view()});
    auto sums = buffer(2 * n.values);
    auto const add = [&](index_t row, std::span<T> into) {
        for (index_t j = 0; j < 2 * n.values; ++j) into[static_cast<std::size_t>(j)] += terms.view()(row, j);
    };
    weight_sums(sharding, order, comm, here, where).terms(std::span(sums), add, here);
    add_local_rows(sharding, rank, per_head, rows<T const>(sums.data(), n.values, 1), to.A_log, here);
    add_local_rows(sharding, rank, per_head, rows<T const>(sums.data() + n.values, n.values, 1), to.dt_bias, here);

    auto const conv = local_rows(sharding, rank, qkv, w.conv, here);
    auto dconv = buffer(std::ssize(conv));
    convolution_backward<T, S> const of_qkv{mixer.before,
                                            mixer.after,
                                            saved.projected->view().columns(0, n.qkv()),
                                            rows<T const>(conv, config.kernel),
                                            {},
                                            activation::silu,
                                            dqkv,
                                            dx.view().columns(0, n.qkv()),
                                            rows<T>(dconv, config.kernel),
                                            {},
                                            order,
                                            where};
    convolve_backward(of_qkv, comm, here); // the layer has checked what it was given
    add_local_rows(sharding, rank, qkv, rows<T const>(dconv, config.kernel), to.conv, here);
}

/// Reads what a layer keeps to itself.
struct gated_delta_net_backward_pass {
    static constexpr char const* where = "gated_delta_net_backward";

    template <class T, class Net, any_sharding S, class Saved>
    static void check(Net const& net, gated_delta_net_weights<T> const& w, sharded<T const, S> const& x,
                      Saved const& saved, sharded<T const, S> const& dy, gated_delta_net_gradients<T, S> const& to,
                      caller here) {
        S const& sharding = net.sharding();
        sharded<T const, S> const given[] = {x, dy, to.dx};
        for (auto const& tensor : given)
            require_place(where, "x, dy and dx", tensor, sharding, net.mixer_.states.rank, "the layer's", here);
        net.check(where, w, here);
        net.check(where, to.weights, here);
        bool const ran = saved.z && saved.o && saved.projected && saved.mixed && saved.gates;
        require(ran && saved.o->sharding() == sharding, where, "saved tensors", "those of the forward",
                ran ? "those of another sharding" : "none", here);
        delta_rule_options const options{.chunk = net.config().chunk, .qk_l2norm = true};
        check_saved(where, net.mixer_.states, gated_delta{net.config().heads, options, where}, &saved.states, here);
        rows<T const> const hidden[] = {x.data(), dy.data(), to.dx.data()};
        for (rows<T const> const& in : hidden)
            require_shape(where, "x, dy and dx", in, saved.o->data().count(), net.config().hidden, here);
        auto written = net.operands(to.weights), read = net.operands(w);
        written.push_back({"dx", to.dx.data()});
        for (operand const& more : {operand("x", x.data()), operand("dy", dy.data())}) read.push_back(more);
        require_apart(where, written, read, here);
    }

    template <class T, carry_kind How, any_sharding S, any_sharding Mix, class Comm>
    static void run(gated_delta_net<How, S, Mix> const& net, gated_delta_net_weights<T> const& w,
                    sharded<T const, S> const& x, gated_delta_net_saved<T, S, Mix>& saved,
                    sharded<T const, S> const& dy, gated_delta_net_gradients<T, S> const& to, Comm& comm, caller here) {
        check<T>(net, w, x, saved, dy, to, here);
        auto const& config = net.config();
        S const& sharding = net.sharding();
        int const rank = net.mixer_.states.rank;
        index_t const heads = config.heads.value_heads, v = heads * config.heads.value_dim;
        index_t const qkv = 2 * config.heads.key_heads * config.heads.key_dim + v, count = saved.o->data().count();
        weight_sums const sums(sharding, to.order, comm, here, where);

        std::span<T const> const gain(w.norm.data(), static_cast<std::size_t>(w.norm.width()));
        T const eps = static_cast<T>(config.eps);
        auto const &o = *saved.o, &z = *saved.z;
        auto normed = o, dnormed = o, dout = o, dz = z;
        gated_rms_norm<T>(o.data(), z.data(), gain, eps, normed.data());
        sums.linear(sums.whole(normed, here), dy, to.weights.out_proj, here);
        project_backward_input<T>(dy.data(), w.out_proj, dnormed.data());
        auto const row_of = [](auto& of, index_t row) { return of.data().sub(row, 1); };
        auto const add = [&](index_t row, std::span<T> dgain) {
            differentiate_gated_norm<T>(row_of(o, row), row_of(z, row), gain, eps, row_of(dnormed, row),
                                        row_of(dout, row), row_of(dz, row), dgain);
        };
        sums.terms(std::span(to.weights.norm.data(), gain.size()), add, here);

        tensor<T, S> dprojected(sharding, rank, qkv + 2 * heads, here);
        if constexpr (std::same_as<S, Mix>) {
            gated_delta_mixer_backward(net.mixer_, config, w, saved, dout, dprojected, to.weights, to.order, comm, here,
                                       where);
        } else {
            auto const& moves = net.moves_;
            tensor<T, Mix> local(moves.gradient_there.to, rank, moves.gradient_there.target_width, here),
                dlocal(moves.there.to, rank, saved.projected->width(), here);
            exchange_rows(moves.gradient_there, dout.data(), local.data(), comm, here, where);
            gated_delta_mixer_backward(net.mixer_, config, w, saved, local, dlocal, to.weights, to.order, comm, here,
                                       where);
            exchange_rows(moves.gradient_back, dlocal.data(), dprojected.data(), comm, here, where);
        }

        auto const in = sums.whole(x, here);
        tensor<T, S> dx(sharding, rank, config.hidden, here);
        project_backward_input<T>(dz.data(), w.in_proj_z, to.dx.data());
        sums.linear(in, dz, to.weights.in_proj_z, here);
        auto const projection = [&](index_t first, rows<T const> weight, rows<T> dweight) {
            auto const d = dprojected.view().columns(first, weight.count());
            sums.linear(in, d, dweight, here);
            project_backward_input<T>(d.data(), weight, dx.data());
            for (index_t row = 0; row < count; ++row)
                for (index_t j = 0; j < config.hidden; ++j) to.dx.data()(row, j) += dx.data()(row, j);
        };
        projection(0, w.in_proj_qkv, to.weights.in_proj_qkv);
        projection(qkv, w.in_proj_b, to.weights.in_proj_b);
        projection(qkv + heads, w.in_proj_a, to.weights.in_proj_a);
    }
};

} // namespace detail

/// Computes the gradients of a gated delta net layer.
///
/// `net`, `w` and x as in the forward, which has filled `saved`; dy: (rows, hidden), the gradient of y.
/// Collective: the exchanges of the forward backwards, and those that `order` asks for.
/// By heads, or with `serial` and cuts at multiples of the chunk, dx is bitwise that of one rank; the weights' are,
/// too, with `sum_order::by_row`.
///
/// Throws `cpx::error` on shapes or shardings that do not fit, if `saved` is empty, and what the operators throw.
template <class T, carry_kind How, any_sharding S, any_sharding Mix, sharded_like X, class Saved, sharded_like Dy,
          any_sharding G = S, transport Comm>
void gated_delta_net_backward(gated_delta_net<How, S, Mix> const& net, gated_delta_net_weights<T> const& w, X const& x,
                              Saved& saved, Dy const& dy, gated_delta_net_gradients<T, G> const& to, Comm& comm,
                              caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<S, X, Dy> && std::same_as<G, S>;
    constexpr bool own = std::same_as<Saved, gated_delta_net_saved<T, S, Mix>>;
    constexpr bool same = std::same_as<element_of<X>, T> && std::same_as<element_of<Dy>, T>;
    static_assert(fits, "cpx: gated_delta_net_backward of tensors or gradients that are not sharded as the layer; "
                        "relayout them first, or make the layer with x.sharding()");
    static_assert(own, "cpx: gated_delta_net_backward of what another layer saved; give it the layer's saved_of<T>");
    static_assert(same, "cpx: gated_delta_net_backward wants x and dy of the weights' elements");
    if constexpr (fits && own && same)
        detail::gated_delta_net_backward_pass::run<T, How, S, Mix>(net, w, x.view(), saved, dy.view(), to, comm, here);
}
template <class X = detail::any>
void gated_delta_net_backward(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                              detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: gated_delta_net_backward(net, weights, x, saved, dy, gradients, comm) wants "
                                    "the layer, its weights, tensors x and dy, what its forward saved, gradients and a "
                                    "cpx::transport; view other memory as sharded(rows, sharding, rank)");
}

} // namespace cpx
