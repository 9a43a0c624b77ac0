// SPDX-License-Identifier: Apache-2.0
// Backward of the gated delta net layer.
#pragma once

#include <cpx/core/gradient_scale.hpp>
#include <cpx/ops/gated_delta_net.hpp>

#include <concepts>
#include <utility>

namespace cpx {

/// What the backward of a gated delta net computes.
///
/// dx: (rows, hidden), written. weights: this rank's share, added to what they hold; `sum_over_ranks` completes them.
/// `order`: in which order rows are added up there. `gradient_scale`: 1, or of a rule of half between rows of bfloat16
/// from 2^-126 to 2^126, the same on all ranks: so many times what they stand for are dO and all gradients within the
/// recurrence, to stay within half's range. Good is what makes dO of size 1e-2 to 1e2, such as, where the loss is a
/// mean over tokens, their number.
template <class T, any_sharding S, any_memory M>
struct gated_delta_net_gradients {
    sharded_field<T, S, M> dx;
    gated_delta_net_parameters<typename M::template sum<T>> weights;
    field<sum_order> order = sum_order::by_rank;
    field<double> gradient_scale = 1.0;
    detail::no_more end = {};
};

namespace detail {

/// Reads what a layer keeps to itself.
struct gated_delta_net_backward_pass {
    static constexpr char const* where = "gated_delta_net_backward";

    template <class T, class Net, any_sharding S, any_memory M, class Saved>
    static void check(Net const& net, gated_delta_net_weights<T> const& w, sharded<T const, S, M> const& x,
                      Saved const& saved, sharded<T const, S, M> const& dy,
                      gated_delta_net_gradients<T, S, M> const& to, M const& memory, caller here) {
        S const& sharding = net.sharding();
        auto const check_rows = [&](char const* name, sharded<T const, S, M> const& tensor) {
            net.check_rows(where, name, tensor, memory, here);
        };
        check_rows("x", x), check_rows("dy", dy), check_rows("dx", to.dx);
        net.check(where, w, here);
        net.check(where, to.weights, here);
        bool const ran = saved.z && saved.o && saved.projected && saved.mixed && saved.gates;
        require(ran && saved.o->sharding() == sharding, where, "saved tensors", "those of the forward",
                ran ? "those of another sharding" : "none", here);
        require_gradient_scale(where, !std::same_as<T, typename Net::template rule_of<T>>, to.gradient_scale, here);
        check_saved(where, net.mixer_.states, net.mixer_.template model_of_mixed<T, M>(where), &saved.states, here);
        auto written = net.operands(to.weights), read = net.operands(w);
        written.push_back({"dx", to.dx.data()});
        for (operand const& more : {operand("x", x.data()), operand("dy", dy.data())}) read.push_back(more);
        require_apart(where, written, read, here);
        auto const kept = kept_operands(saved);
        require_apart(where, written, kept, here);
        read.insert(read.end(), written.begin(), written.end());
        read.insert(read.end(), kept.begin(), kept.end());
        net.mixer_.check(where, memory, true, read, here);
    }

    template <class T, carry_kind How, any_sharding S, any_sharding Mix, class Rule, any_memory M, class By>
    static void
    run(gated_delta_net<How, S, Mix, Rule> const& net, gated_delta_net_weights<T> const& w,
        sharded<T const, S, M> const& x, typename gated_delta_net<How, S, Mix, Rule>::template saved_of<T, M>& saved,
        sharded<T const, S, M> const& dy, gated_delta_net_gradients<T, S, M> const& to, By&& by, caller here) {
        using R = typename gated_delta_net<How, S, Mix, Rule>::template rule_of<T>;
        check<T>(net, w, x, saved, dy, to, cpx::rank_memory(by.comm), here);
        auto const& config = net.config();
        S const& sharding = net.sharding();
        int const rank = net.rank();
        M const& memory = x.memory();
        index_t const heads = config.heads.value_heads, v = heads * config.heads.value_dim;
        index_t const qkv = 2 * config.heads.key_heads * config.heads.key_dim + v;
        weight_sums const sums(sharding, to.order, by.comm, here, where);
        auto const made = [&](index_t width) {
            return tensor<T, S, M>::unwritten(sharding, rank, width, memory, here);
        };
        auto const weight = [&](auto const& in, auto const& d, auto const& dweight) { // += d^T in
            sums.linear(
                in, d, dweight, [&](auto const&... given) { by.linear_backward_weight(given...); }, here);
        };

        auto dnormed = made(v), dz = made(v);
        auto const norm = net.norm(w, *saved.o, *saved.z);
        {
            auto normed = made(v);
            normalise(memory, norm, normed.data(), here);
            weight(sums.whole(normed, here), dy, to.weights.out_proj);
        }
        by.linear_backward_input(dy.data(), w.out_proj, dnormed.data(), false);
        tensor<typename M::template sum<T>, S, M> terms(sharding, rank, config.heads.value_dim, memory, here);
        auto dout = [&] { // in dnormed's place, if that has its elements
            if constexpr (std::same_as<R, T>) {
                normalise_backward(memory, norm, dnormed.data(), dnormed.data(), dz.data(), terms.data(), here);
                return std::move(dnormed);
            } else {
                auto const given = std::move(dnormed); // no longer than here
                auto own = tensor<R, S, M>::unwritten(sharding, rank, v, memory, here);
                normalise_backward(memory, norm, given.data(), own.data(), dz.data(), terms.data(),
                                   static_cast<float>(to.gradient_scale), here);
                return own;
            }
        }();
        add_terms(sums, terms, to.weights.norm, here);

        auto dprojected = made(qkv + 2 * heads);
        auto const mix = [&](rows<R> of_o, rows<T> of_x) {
            Mix const& there = net.mixer_.sharding();
            net.mixer_.template backward<T, R>(w, std::as_const(*saved.projected).view(), saved,
                                               sharded<R const, Mix, M>(of_o, there, rank, memory), to.gradient_scale,
                                               sharded<T, Mix, M>(of_x, there, rank, memory), to.weights, to.order, by,
                                               here, "gated_delta_net", where);
        };
        if constexpr (std::same_as<S, Mix>)
            mix(dout.data(), dprojected.data());
        else {
            auto const& moves = net.moves_;
            index_t const width = moves.gradient_there.target_width;
            auto local = tensor<R, Mix, M>::unwritten(moves.gradient_there.to, rank, width, memory, here);
            auto dlocal = tensor<T, Mix, M>::unwritten(moves.there.to, rank, saved.projected->width(), memory, here);
            run_move(layer_move<R, S, Mix, M>{moves.gradient_there, dout.view(), local.view(), where}, by, here);
            mix(local.data(), dlocal.data());
            run_move(layer_move<T, Mix, S, M>{moves.gradient_back, dlocal.view(), dprojected.view(), where}, by, here);
        }

        rows<T const> const d = dprojected.data(), of_z = dz.data();
        by.linear_backward_input(d.columns(0, qkv), w.in_proj_qkv, to.dx.data(), false);
        by.linear_backward_input(of_z, w.in_proj_z, to.dx.data(), true);
        auto const of_gates = net.projection_of_gates(w, memory, here);
        by.linear_backward_input(d.columns(qkv, 2 * heads), of_gates.view(), to.dx.data(), true);
        auto const in = sums.whole(x, here);
        weight(in, dz, to.weights.in_proj_z);
        weight(in, dprojected.columns(0, qkv), to.weights.in_proj_qkv);
        weight(in, dprojected.columns(qkv, heads), to.weights.in_proj_b);
        weight(in, dprojected.columns(qkv + heads, heads), to.weights.in_proj_a);
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
template <class T, carry_kind How, any_sharding S, any_sharding Mix, class Rule, sharded_anywhere X, class Saved,
          sharded_like<memory_of<X>> Dy, any_sharding G, class By>
    requires detail::runs_layers<By, memory_of<X>> || (transport<By> && sharded_like<X>)
void gated_delta_net_backward(gated_delta_net<How, S, Mix, Rule> const& net, gated_delta_net_weights<T> const& w,
                              X const& x, Saved& saved, Dy const& dy,
                              gated_delta_net_gradients<T, G, memory_of<X>> const& to, By& by,
                              caller here = caller::here()) {
    using M = memory_of<X>;
    constexpr bool fits = detail::sharded_as<S, X, Dy> && std::same_as<G, S>;
    constexpr bool own = std::same_as<Saved, typename gated_delta_net<How, S, Mix, Rule>::template saved_of<T, M>>;
    constexpr bool same = std::same_as<element_of<X>, T> && std::same_as<element_of<Dy>, T>;
    static_assert(fits, "cpx: gated_delta_net_backward of tensors or gradients that are not sharded as the layer; "
                        "relayout them first, or make the layer with x.sharding()");
    static_assert(!fits || own,
                  "cpx: gated_delta_net_backward of what another layer saved; give it the layer's saved_of<T>");
    constexpr bool between =
        detail::rule_between<M, typename gated_delta_net<How, S, Mix, Rule>::template rule_of<T>, T>;
    static_assert(!fits || !own || same, "cpx: gated_delta_net_backward wants x and dy of the weights' elements");
    static_assert(!fits || !own || !same || between,
                  "cpx: gated_delta_net_backward whose rule has other elements than its weights, see gated_delta_net");
    if constexpr (fits && own && same && between)
        detail::gated_delta_net_backward_pass::run<T, How, S, Mix, Rule, M>(net, w, x.view(), saved, dy.view(), to,
                                                                            detail::layers_of<T>(by), here);
}
template <class X = detail::any>
detail::refused gated_delta_net_backward(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {},
                                         detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: gated_delta_net_backward(net, weights, x, saved, dy, gradients, comm) wants "
                                    "the layer, its weights, tensors x and dy, what its forward saved, gradients and a "
                                    "cpx::transport; view other memory as sharded(rows, sharding, rank)");
    return {};
}

} // namespace cpx
