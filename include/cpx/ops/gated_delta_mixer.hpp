// SPDX-License-Identifier: Apache-2.0
// What needs neighbours in a gated delta net: the convolution, the gates and the delta rule, there and back.
#pragma once

#include <cpx/layout/tensor.hpp>
#include <cpx/ops/causal_conv1d.hpp>
#include <cpx/ops/gated_delta_rule_backward.hpp>
#include <cpx/ops/sections.hpp>

#include <cmath>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpx {

/// Sizes of a gated delta net layer.
struct gated_delta_net_config {
    index_t hidden = 1;
    delta_rule_heads heads;
    index_t kernel = 4; ///< taps of the convolution
    index_t chunk = 64; ///< tokens a chunk of the delta rule
    double eps = 1e-6;  ///< of the gated norm

    /// Returns the sections of the rows that the recurrence reads: q, k, v, b, a.
    std::vector<section> sections() const {
        return {{heads.key_heads, heads.key_dim},
                {heads.key_heads, heads.key_dim},
                {heads.value_heads, heads.value_dim},
                {heads.value_heads, 1},
                {heads.value_heads, 1}};
    }
    /// Returns the sections of the rows that it writes: o.
    std::vector<section> output_sections() const { return {{heads.value_heads, heads.value_dim}}; }
};

/// What a gated delta net hands from one batch to the next one of the same sequences, for the heads that a rank holds.
///
/// conv: (sequences, kernel * (q + k + v channels)), see `causal_conv1d_states`; recurrent: (sequences, value heads *
/// key_dim * value_dim), of what memory M has for sums. Zeros before the first token. Read where a sequence begins,
/// conv on every rank that holds one of its first kernel - 1 tokens; written in place where it ends. Decoding is a
/// batch of one token a sequence, on devices a step of the states where they are; see `gated_delta_net_relayout`.
template <class T, any_memory M = host_memory>
struct gated_delta_net_state {
    field<rows<T>> conv = {};
    field<rows<typename M::template sum<T>>> recurrent = {};
    detail::no_more end = {};
};

/// Weights of a gated delta net layer, or their gradients, whole on every rank, named and shaped as in the checkpoint.
///
/// Projections are (out, in); conv is (q + k + v channels, kernel); A_log, dt_bias (value heads, 1); norm (1,
/// value_dim). Of a vector: `.A_log = {list, 1}`. A_log and dt_bias are float where the others have 16 bits, for g is
/// an exponential of the one; checkpoints that store fewer bits of them are widened.
template <class A>
struct gated_delta_net_parameters {
    using of_gates = std::conditional_t<std::is_const_v<A>, wide<A> const, wide<A>>;
    field<rows<A>> in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, conv;
    field<rows<of_gates>> A_log, dt_bias;
    field<rows<A>> norm, out_proj;
    detail::no_more end = {};
};
template <class T>
using gated_delta_net_weights = gated_delta_net_parameters<T const>;

/// What the backward of the mixer wants of its forward: q, k and v after the convolution, of elements R, which on
/// devices may have divided q and k by their lengths; g and beta; states.
template <class R, any_sharding S, any_memory M = host_memory>
struct gated_delta_mixed {
    std::optional<tensor<R, S, M>> mixed = {};
    std::optional<tensor<typename M::template sum<R>, S, M>> gates = {};
    delta_rule_saved<R, M> states = {};
};

namespace detail {

/// Returns `config`, or throws: of heads that do not fit, of what is below 1 or has no size.
inline gated_delta_net_config const& checked(gated_delta_net_config const& config, caller here) {
    char const* const where = "gated_delta_net";
    require_delta_heads(where, config.heads, here);
    require_sizes(where, {{"hidden", config.hidden}, {"kernel", config.kernel}, {"chunk", config.chunk}}, here);
    index_t const columns = columns_of(where, config.sections(), here);
    require(config.eps >= 0 && std::isfinite(config.eps), where, "eps", "0 or above", config.eps, here);
    product(where, "columns x kernel", {columns, config.kernel}, here);
    product(where, "columns x hidden", {columns, config.hidden}, here);
    return config;
}

/// How wide this rank's columns of q (and of k), v, of the gates and of the states are.
template <any_sharding S>
struct gated_delta_widths {
    index_t q, v, values, conv, recurrent;

    gated_delta_widths(gated_delta_net_config const& config, S const& sharding, int rank)
        : q(sharding.heads(rank, config.heads.key_heads).size() * config.heads.key_dim),
          values(sharding.heads(rank, config.heads.value_heads).size()) {
        v = values * config.heads.value_dim;
        conv = config.kernel * qkv();
        recurrent = v * config.heads.key_dim;
    }
    index_t qkv() const { return 2 * q + v; }
};

/// What needs neighbours, on the sharding `S`, in any memory; of arguments that fit.
template <carry_kind How, any_sharding S>
struct gated_delta_mixer {
    gated_delta_net_config config;
    carry_plan<How, S> states;
    halo_plan<S> before, after;
    gated_delta_widths<S> widths;
    std::vector<section> sections = config.sections();
    delta_rule_options options{.chunk = config.chunk, .qk_l2norm = true}; ///< the rule divides q and k by their lengths
    delta_rule_options of_normalised{.chunk = config.chunk, .qk_l2norm = false}; ///< the convolution has

    gated_delta_mixer(carry_plan<How, S> const& plan, gated_delta_net_config const& of, caller here)
        : config(checked(of, here)), states(plan), before(halo(sharding(), rank(), of.kernel - 1, side::before, here)),
          after(halo(sharding(), rank(), of.kernel - 1, side::after, here)), widths(of, sharding(), rank()) {}

    S const& sharding() const { return states.sharding; }
    int rank() const { return states.rank; }
    gated_delta model(char const* where) const { return {config.heads, options, where}; }
    /// Of q and k as the convolution leaves them.
    template <class T, any_memory M>
    gated_delta model_of_mixed(char const* where) const {
        return {config.heads, convolution_normalises<T, M>() ? of_normalised : options, where};
    }
    /// Throws unless the layer may run in this memory, and all that it is given is there.
    template <any_memory M>
    void check(char const* where, M const& memory, bool backward, std::span<operand const> given, caller here) const {
        check_rule_in(memory, where, model(where), states, backward, given, here);
    }

    /// x: rows of `config.sections()`; o: rows of `config.output_sections()`, both for this rank's heads. R: the
    /// elements of the delta rule, and of o.
    template <class T, class R, any_memory M, class By>
    void operator()(gated_delta_net_weights<T> const& w, sharded<T const, S, M> const& x, sharded<R, S, M> const& o,
                    gated_delta_net_state<T, M> const& state, gated_delta_mixed<R, S, M>* saved, By& by, caller here,
                    char const* where) const {
        auto const conv = held<T>(true, w.conv, x.memory(), here);
        auto const A_log = held<wide<T>>(false, w.A_log, x.memory(), here),
                   dt_bias = held<wide<T>>(false, w.dt_bias, x.memory(), here);
        auto mixed = made<R>(x.memory(), widths.qkv(), here);
        std::span<T const> const bias;
        row_buffer<T, M> newest; // where ranks meet, for the state stays if they do not agree on what comes
        auto const copy = [&](rows<T const> from, rows<T> to) {
            for_each_element(x.memory(), to.count(), to.width(), rowwise::copy<T>{from, to}, here);
        };
        rows<T> ends = state.conv;
        bool const meet = ends.data() && !S::every_row && states.steps > 0;
        if (meet) {
            newest = row_buffer<T, M>(x.memory(), ends.count(), ends.width(), here);
            copy(ends, newest.view());
            ends = newest.view();
        }
        causal_conv1d_states<T> const states_of{state.conv, ends};
        convolution<T, S, M, R> const of_qkv{
            before, x.columns(0, widths.qkv()), conv.view(), bias, activation::silu, mixed.view(), states_of,
            where,  normalised<T, M>()};
        convolve(of_qkv, by.carrier(), here);
        by.ended(before, widths.qkv());

        auto gates = made<typename M::template sum<T>>(x.memory(), 2 * widths.values, here);
        for_each_element(x.memory(), x.data().count(), widths.values,
                         rowwise::delta_gates<T>{first(x.data(), widths.qkv()), second(x.data(), widths.qkv()),
                                                 A_log.view(), dt_bias.view(), first(gates.data()),
                                                 second(gates.data())},
                         here);
        auto t = tensors(mixed.view(), gates.view(), o, saved ? &saved->states : nullptr);
        t.initial = t.final = state.recurrent;
        run_delta_rule(states, model_of_mixed<T, M>(where), t, by.carrier(), here);
        if (meet) copy(newest.view(), state.conv);
        by.ended_states(states, state_shape{widths.values, config.heads.key_dim, config.heads.value_dim});
        if (!saved) return;
        saved->mixed = std::move(mixed);
        saved->gates = std::move(gates);
    }

    /// From the gradient of o, which is dout / scale, to that of x, which is written, and the weights' shares, which
    /// are added. `forward`: its name in errors.
    template <class T, class R, any_memory M, class By>
    void backward(gated_delta_net_weights<T> const& w, sharded<T const, S, M> const& x,
                  gated_delta_mixed<R, S, M>& saved, sharded<R const, S, M> const& dout, double scale,
                  sharded<T, S, M> const& dx, gated_delta_net_parameters<typename M::template sum<T>> const& to,
                  sum_order order, By& by, caller here, char const* forward, char const* where) const {
        using sum = typename M::template sum<T>;
        M const& memory = x.memory();
        auto const conv = held<T>(true, w.conv, memory, here);
        auto const A_log = held<wide<T>>(false, w.A_log, memory, here),
                   dt_bias = held<wide<T>>(false, w.dt_bias, memory, here);
        auto dmixed = made<R>(memory, widths.qkv(), here);
        auto dgates = made<sum>(memory, 2 * widths.values, here), terms = made<sum>(memory, 2 * widths.values, here);
        sharded<R, S, M> const no_o(rows<R>(), sharding(), rank(), memory); // it is not read
        auto const dq = dmixed.columns(0, widths.q), dk = dmixed.columns(widths.q, widths.q),
                   dv = dmixed.columns(2 * widths.q, widths.v);
        auto const dg = dgates.columns(0, widths.values), dbeta = dgates.columns(widths.values, widths.values);
        delta_rule_gradient_tensors<R, S, M> const of_rule{dout, dq, dk, dv, dg, dbeta};
        run_delta_rule_backward(states, model_of_mixed<T, M>(forward),
                                tensors(saved.mixed->view(), saved.gates->view(), no_o, &saved.states), of_rule,
                                by.carrier(), here);
        by.ended();

        for_each_element(memory, x.data().count(), widths.values,
                         rowwise::delta_gates_backward<T>{first(x.data(), widths.qkv()), second(x.data(), widths.qkv()),
                                                          A_log.view(), dt_bias.view(), first(dgates.data()),
                                                          second(dgates.data()), first(dx.data(), widths.qkv()),
                                                          second(dx.data(), widths.qkv()), terms.data(),
                                                          static_cast<wide<T>>(scale)},
                         here);
        row_buffer<sum, M> sums(memory, 2 * widths.values, 1, here), dconv(memory, widths.qkv(), config.kernel, here);
        add_terms(weight_sums(sharding(), order, by.comm, here, where), terms, sums.view(), here);
        std::span<T const> const bias;
        std::span<sum> const dbias;
        auto const heads = normalised<T, M>();
        std::optional<tensor<R, S, M>> dmixed_of_channels;
        std::optional<sharded<R const, S, M>> of_channels;
        if constexpr (normalising_convolution<M>::ever)
            if (heads.channels > 0 && order == sum_order::by_row) {
                auto again = made<R>(memory, widths.qkv(), here);
                convolution<T, S, M, R> const plain{
                    before, x.columns(0, widths.qkv()), conv.view(), bias, activation::silu, again.view(), {}, where};
                convolve(plain, by.carrier(), here);
                by.ended();
                auto& turned = dmixed_of_channels.emplace(made<R>(memory, widths.qkv(), here));
                for_each_element(memory, x.data().count(), widths.qkv(), rowwise::copy<R>{dmixed.data(), turned.data()},
                                 here);
                normalising_convolution<M>::template backward<R>(memory, again.data().columns(0, heads.channels),
                                                                 heads.dim, turned.data().columns(0, heads.channels),
                                                                 here);
                of_channels.emplace(std::as_const(turned).view());
            }
        convolution_backward<T, S, M, R> const of_qkv{before,
                                                      after,
                                                      x.columns(0, widths.qkv()),
                                                      conv.view(),
                                                      bias,
                                                      activation::silu,
                                                      dmixed.view(),
                                                      dx.columns(0, widths.qkv()),
                                                      dconv.view(),
                                                      dbias,
                                                      order,
                                                      where,
                                                      heads,
                                                      of_channels,
                                                      static_cast<float>(scale)};
        convolve_backward(of_qkv, by.comm, by.carrier(), here);
        by.ended();
        auto const add = [&](bool channels, rows<sum const> from, rows<sum> whole) {
            add_held_rows(memory, sharding(), rank(), of(channels), from, whole, here);
        };
        add(true, dconv.view(), to.conv);
        add(false, sums.view().sub(0, widths.values), to.A_log);
        add(false, sums.view().sub(widths.values, widths.values), to.dt_bias);
    }

private:
    /// Whether the convolution divides q and k by their lengths: by sizes of the whole layer, whatever heads a rank
    /// has.
    template <class T, any_memory M>
    bool convolution_normalises() const {
        return normalising_convolution<M>::template fits<T>(config.kernel, config.heads.key_dim,
                                                            config.heads.value_dim);
    }
    template <class T, any_memory M>
    normalised_heads normalised() const {
        if (!convolution_normalises<T, M>()) return {};
        return {2 * widths.q, config.heads.key_dim};
    }
    /// Returns this rank's rows of a weight of channels, or of heads.
    template <class T, any_memory M>
    row_buffer<T, M> held(bool channels, rows<T const> weight, M const& memory, caller here) const {
        return held_rows<T>(memory, sharding(), rank(), of(channels), weight, here);
    }
    std::span<section const> of(bool channels) const {
        return channels ? std::span(sections).first(3) : std::span(sections).last(1);
    }
    template <class T, any_memory M>
    tensor<T, S, M> made(M const& memory, index_t width, caller here) const {
        return tensor<T, S, M>::unwritten(sharding(), rank(), width, memory, here);
    }
    /// Of values a head: b or g, and a or beta, which stand behind them.
    template <class A>
    rows<A> first(rows<A> const& of, index_t from = 0) const {
        return of.columns(from, widths.values);
    }
    template <class A>
    rows<A> second(rows<A> const& of, index_t from = 0) const {
        return of.columns(from + widths.values, widths.values);
    }
    /// mixed: q, k and v; gates: g, then beta.
    template <class R, class G, any_memory M>
    delta_rule_tensors<R, S, M> tensors(sharded<R, S, M> const& mixed, sharded<G, S, M> const& gates,
                                        sharded<R, S, M> const& o, delta_rule_saved<R, M>* saved) const {
        auto const q = mixed.columns(0, widths.q), k = mixed.columns(widths.q, widths.q);
        auto const g = gates.columns(0, widths.values), beta = gates.columns(widths.values, widths.values);
        return {q, k, mixed.columns(2 * widths.q, widths.v), g, beta, o, rows<G const>(), rows<G>(), saved};
    }
};

} // namespace detail

} // namespace cpx
