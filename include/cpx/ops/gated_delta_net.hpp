// SPDX-License-Identifier: Apache-2.0
// The gated delta net layer of Qwen3-Next and Qwen3.5 on any sharding.
#pragma once

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/tensor.hpp>
#include <cpx/ops/causal_conv1d.hpp>
#include <cpx/ops/gated_delta_rule.hpp>
#include <cpx/ops/local/linear.hpp>
#include <cpx/ops/local/norm.hpp>
#include <cpx/ops/sections.hpp>

#include <array>
#include <concepts>
#include <optional>

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

/// Weights of a gated delta net layer, or their gradients, whole on every rank, named and shaped as in the checkpoint.
///
/// Projections are (out, in); conv is (q + k + v channels, kernel); A_log, dt_bias (value heads, 1); norm (1,
/// value_dim).
template <class A>
struct gated_delta_net_parameters {
    field<rows<A>> in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, conv, A_log, dt_bias, norm, out_proj;
    detail::no_more end = {};
};

/// Calls `f(name, rows, count, width)` for each parameter, const or not, with its name in a checkpoint and its shape.
template <class Parameters, class F>
void for_each_parameter(Parameters& p, gated_delta_net_config const& c, F&& f) {
    index_t const heads = c.heads.value_heads, v = heads * c.heads.value_dim;
    index_t const qkv = 2 * c.heads.key_heads * c.heads.key_dim + v, one = 1;
    f("in_proj_qkv.weight", p.in_proj_qkv, qkv, c.hidden);
    f("in_proj_z.weight", p.in_proj_z, v, c.hidden);
    f("in_proj_b.weight", p.in_proj_b, heads, c.hidden);
    f("in_proj_a.weight", p.in_proj_a, heads, c.hidden);
    f("conv1d.weight", p.conv, qkv, c.kernel);
    f("A_log", p.A_log, heads, one);
    f("dt_bias", p.dt_bias, heads, one);
    f("norm.weight", p.norm, one, c.heads.value_dim);
    f("out_proj.weight", p.out_proj, c.hidden, v);
}

template <class T>
using gated_delta_net_weights = gated_delta_net_parameters<T const>;

/// What a gated delta net hands from one batch to the next one of the same sequences, for the heads that a rank holds.
///
/// conv: (sequences, kernel * (q + k + v channels)), see `causal_conv1d_states`; recurrent: (sequences, value heads *
/// key_dim * value_dim). Zeros before the first token. Read where a sequence begins, conv on every rank that holds one
/// of its first kernel - 1 tokens; written in place where it ends. Decoding is a batch of one token a sequence, see
/// `gated_delta_net_relayout`.
template <class T>
struct gated_delta_net_state {
    field<rows<T>> conv = {}, recurrent = {};
    detail::no_more end = {};
};

/// What the backward needs of its forward: the inputs of the gated norm, on the sharding of the layer, and what belongs
/// to the recurrence, on that of the recurrence.
template <class T, any_sharding S, any_sharding Mix>
struct gated_delta_net_saved {
    std::optional<tensor<T, S>> z, o;
    std::optional<tensor<T, Mix>> projected, mixed, gates;
    delta_rule_saved<T> states;
};

template <class T, any_sharding S>
struct gated_delta_net_gradients; // see gated_delta_net_backward.hpp

/// What a forward keeps beside its output: states to go on from, or what the backward needs, or nothing.
template <class T, any_sharding S, any_sharding Mix>
struct gated_delta_net_memory {
    gated_delta_net_state<T> state = {};
    field<gated_delta_net_saved<T, S, Mix>*> saved = nullptr;
    detail::no_more end = {};
};

namespace detail {

struct gated_delta_net_backward_pass; // see there, too

/// Returns `config`, or throws: of heads that do not fit, of what is below 1 or has no size.
inline gated_delta_net_config const& checked(gated_delta_net_config const& config, caller here) {
    char const* const where = "gated_delta_net";
    require_delta_heads(where, config.heads, here);
    index_t const columns = columns_of(where, config.sections(), here);
    require(config.kernel >= 1, where, "kernel", "at least 1", config.kernel, here);
    require(config.chunk >= 1, where, "chunk", "at least 1", config.chunk, here);
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

/// The convolution, the gates and the delta rule: what needs neighbours, on the sharding `S`.
template <carry_kind How, any_sharding S>
struct gated_delta_mixer {
    halo_plan<S> before, after;
    carry_plan<How, S> states;

    gated_delta_mixer(S const& sharding, int rank, index_t kernel, caller here)
        : before(halo(sharding, rank, kernel - 1, side::before, here)),
          after(halo(sharding, rank, kernel - 1, side::after, here)), states(carry<How>(sharding, rank, here)) {}

    /// The tensors of the delta rule. mixed: the result of the convolution, q, k and v; gates: g, then beta.
    template <class T>
    delta_rule_tensors<T, S> delta_rule(gated_delta_widths<S> const& n, tensor<T, S> const& mixed,
                                        tensor<T, S> const& gates, sharded<T, S> const& o) const {
        auto const qkv = mixed.view(), g_beta = gates.view();
        return {qkv.columns(0, n.q),
                qkv.columns(n.q, n.q),
                qkv.columns(2 * n.q, n.v),
                g_beta.columns(0, n.values),
                g_beta.columns(n.values, n.values),
                o};
    }

    /// x: rows of `config.sections()`; o: rows of `config.output_sections()`, both for this rank's heads.
    template <class T, class Saved, class Comm>
    void operator()(gated_delta_net_config const& config, gated_delta_net_weights<T> const& w, tensor<T, S> const& x,
                    tensor<T, S>& o, gated_delta_net_state<T> const& state, Saved* saved, Comm& comm, caller here,
                    char const* where) const {
        S const& sharding = states.sharding;
        int const rank = states.rank;
        gated_delta_widths<S> const n(config, sharding, rank);
        auto const sections = config.sections();
        auto const qkv = std::span(sections).first(3), per_head = std::span(sections).last(1);

        auto const conv = local_rows(sharding, rank, qkv, w.conv, here);
        tensor<T, S> mixed(sharding, rank, n.qkv(), here), gates(sharding, rank, 2 * n.values, here);
        convolution<T, S> const of_qkv{before,
                                       x.view().columns(0, n.qkv()),
                                       rows<T const>(conv, config.kernel),
                                       {},
                                       activation::silu,
                                       mixed.view(),
                                       {state.conv, state.conv},
                                       where};
        convolve(of_qkv, comm, here); // the layer has checked what it was given

        auto const A_log = local_rows(sharding, rank, per_head, w.A_log, here);
        auto const dt_bias = local_rows(sharding, rank, per_head, w.dt_bias, here);
        auto const b = x.data().columns(n.qkv(), n.values), a = x.data().columns(n.qkv() + n.values, n.values);
        for_each_element(host_memory(), a.count(), n.values,
                         rowwise::delta_gates<T>{b, a, rows<T const>(A_log, 1), rows<T const>(dt_bias, 1),
                                                 gates.data().columns(0, n.values),
                                                 gates.data().columns(n.values, n.values)});
        auto t = delta_rule(n, mixed, gates, sharded<T, S>(o.data(), sharding, rank));
        t.initial = t.final = state.recurrent;
        if (saved) t.saved = &saved->states;
        delta_rule_options const options{.chunk = config.chunk, .qk_l2norm = true};
        recur_on_host(states, gated_delta{config.heads, options, where}, listed(t), comm, here); // and the states
        if (!saved) return;
        saved->mixed = std::move(mixed);
        saved->gates = std::move(gates);
    }
};

} // namespace detail

/// A gated delta net layer whose hidden states are sharded by `S` and whose recurrence runs on `Mix`.
///
/// `Mix` is `S` itself (in place: a halo and carried states), or `head_sharded` (one exchange there, one back, no
/// carry). Projections and the gated norm see one token at a time and run on `S`.
///
///     y = out_proj(norm(delta_rule(silu(conv(q k v)), ...)) silu(z)),    g = -exp(A_log) softplus(a + dt_bias)
///
/// Made once a batch, used by all layers. Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024,
/// arXiv 2412.06464, section 3.4; shapes as in Hugging Face transformers' Qwen3_5GatedDeltaNet.
template <carry_kind How, any_sharding S, any_sharding Mix = S>
class gated_delta_net {
public:
    template <class T>
    using saved_of = gated_delta_net_saved<T, S, Mix>;

    /// In place, on whole rows: by tokens or replicated. Pure: no communication. Throws `cpx::error` on rows by heads.
    gated_delta_net(S const& sharding, int rank, gated_delta_net_config const& config, caller here = caller::here())
        requires std::same_as<S, Mix>
        : config_(detail::checked(config, here)), mixer_(sharding, rank, config.kernel, here) {
        require(sharding.sections().empty(), "gated_delta_net", "sharding of a layer that runs in place",
                "whole rows; by heads is what the recurrence runs on", "heads", here);
    }

    /// By heads: `mix` and `back` are `head_sharded` over `config.sections()` and `config.output_sections()`.
    gated_delta_net(S const& sharding, Mix const& mix, Mix const& back, int rank, gated_delta_net_config const& config,
                    caller here = caller::here())
        requires(!std::same_as<S, Mix>)
        : config_(detail::checked(config, here)), mixer_(mix, rank, config.kernel, here),
          moves_{relayout(sharding, mix, rank, here), relayout(back, sharding, rank, here),
                 relayout(sharding, back, rank, here), relayout(mix, sharding, rank, here)} {}

    template <class X = detail::any>
    explicit gated_delta_net(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                             detail::any = {})
        : gated_delta_net(unfit<X>()) {}

    gated_delta_net_config const& config() const { return config_; }
    S const& sharding() const {
        if constexpr (std::same_as<S, Mix>)
            return mixer_.states.sharding;
        else
            return moves_.there.from;
    }

    /// Computes the layer: x, y (rows, hidden) of the layer's sharding, y may be x. Collective.
    ///
    /// `memory`: states to go on from, for decoding, and what the backward needs, see `gated_delta_net_backward`.
    /// Throws `cpx::error` on shapes or shardings that do not fit and on memory that overlaps in another way, and what
    /// `exchange` and the operators throw.
    template <class T, sharded_like X, sharded_like Y, transport Comm>
    void operator()(gated_delta_net_weights<T> const& w, X const& x, Y&& y, Comm& comm,
                    std::type_identity_t<gated_delta_net_memory<T, S, Mix>> const& memory = {},
                    caller here = caller::here()) const {
        constexpr bool fits = detail::sharded_as<S, X, Y>;
        constexpr bool writes = detail::writes<Y, X> && std::same_as<element_of<Y>, T>;
        static_assert(fits,
                      "cpx: gated_delta_net on tensors that are not sharded as the layer; relayout them first, or "
                      "make the layer with x.sharding()");
        static_assert(writes, "cpx: gated_delta_net wants x and y of the weights' elements, and a y that is not const "
                              "and has a name");
        if constexpr (fits && writes) forward<T>(w, x.view(), y.view(), comm, memory, here);
    }
    template <class X>
    void operator()(X const&, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                    detail::any = {}) const {
        static_assert(detail::never<X>,
                      "cpx: a gated_delta_net takes its weights, tensors x and y and a cpx::transport, then perhaps "
                      "its memory; view other memory as sharded(rows, sharding, rank)");
    }

private:
    friend struct detail::gated_delta_net_backward_pass;

    template <class X>
    static gated_delta_net const& unfit() {
        static_assert(detail::never<X>,
                      "cpx: gated_delta_net wants its sharding, the rank and a config; by heads its sharding, that of "
                      "the recurrence and that of its result, the rank and a config; the carry is spelled: "
                      "gated_delta_net<scan, S>");
        throw;
    }

    struct four_moves {
        relayout_plan<S, Mix> there;
        relayout_plan<Mix, S> back;
        relayout_plan<S, Mix> gradient_there;
        relayout_plan<Mix, S> gradient_back;
    };
    struct nothing {};

    template <class T, class Comm>
    void forward(gated_delta_net_weights<T> const& w, sharded<T const, S> const& x, sharded<T, S> const& y, Comm& comm,
                 gated_delta_net_memory<T, S, Mix> const& memory, caller here) const {
        char const* const where = "gated_delta_net";
        detail::require_place(where, "x", x, sharding(), mixer_.states.rank, "the layer's", here);
        detail::require_place(where, "y", y, sharding(), mixer_.states.rank, "the layer's", here);
        check(where, w, here);
        check(where, memory.state, here);
        index_t const heads = config_.heads.value_heads, v = heads * config_.heads.value_dim;
        index_t const qkv = 2 * config_.heads.key_heads * config_.heads.key_dim + v;
        rows<T const> const in = x.data();
        int const rank = x.rank();
        tensor<T, S> projected(sharding(), rank, qkv + 2 * heads, here), z(sharding(), rank, v, here),
            o(sharding(), rank, v, here);
        detail::require_shape(where, "x", in, z.data().count(), config_.hidden, here);
        detail::require_shape(where, "y", y.data(), z.data().count(), config_.hidden, here);
        detail::operand const conv("conv state", memory.state.conv),
            recurrent("recurrent state", memory.state.recurrent);
        detail::require_apart(where, std::array{detail::operand("y", y.data()), conv, recurrent}, operands(w), here);
        detail::require_apart(where, {conv, recurrent}, {{"x", in}}, here);
        detail::require_apart(where, {{"y", y.data()}}, {{"x", in}}, here, detail::in_place::yes);
        gated_delta_net_saved<T, S, Mix>* const saved = memory.saved;
        require(!saved || (!memory.state.conv.data() && !memory.state.recurrent.data()), where, "memory",
                "states to go on from, or tensors to be saved: there is no backward of a batch that goes on", "both",
                here);
        detail::project<T>(in, w.in_proj_qkv, projected.data().columns(0, qkv));
        detail::project<T>(in, w.in_proj_b, projected.data().columns(qkv, heads));
        detail::project<T>(in, w.in_proj_a, projected.data().columns(qkv + heads, heads));
        detail::project<T>(in, w.in_proj_z, z.data());
        if constexpr (std::same_as<S, Mix>) {
            mixer_(config_, w, projected, o, memory.state, saved, comm, here, where);
            if (saved) saved->projected = std::move(projected);
        } else {
            tensor<T, Mix> local(moves_.there.to, rank, moves_.there.target_width, here),
                mixed(moves_.back.from, rank, moves_.back.source_width, here);
            detail::exchange_rows(moves_.there, projected.data(), local.data(), comm, here, where);
            mixer_(config_, w, local, mixed, memory.state, saved, comm, here, where);
            detail::exchange_rows(moves_.back, mixed.data(), o.data(), comm, here, where);
            if (saved) saved->projected = std::move(local);
        }
        auto normed = o;
        gated_rms_norm<T>(o.data(), z.data(), {w.norm.data(), static_cast<std::size_t>(w.norm.width())},
                          static_cast<T>(config_.eps), normed.data());
        detail::project<T>(normed.data(), w.out_proj, y.data());
        if (!saved) return;
        saved->z = std::move(z);
        saved->o = std::move(o);
    }

    template <class A>
    void check(char const* where, gated_delta_net_parameters<A> const& w, caller here) const {
        for_each_parameter(w, config_, [&](char const* name, rows<A> const& weight, index_t count, index_t width) {
            detail::require_shape(where, name, weight, count, width, here);
        });
    }

    template <class A>
    std::vector<detail::operand> operands(gated_delta_net_parameters<A> const& w) const {
        std::vector<detail::operand> list;
        for_each_parameter(w, config_, [&](char const* name, rows<A> const& weight, index_t, index_t) {
            list.push_back({name, weight});
        });
        return list;
    }

    /// Here, for the operators that read the states would find out one after the other, with an exchange between.
    template <class T>
    void check(char const* where, gated_delta_net_state<T> const& state, caller here) const {
        Mix const& mix = mixer_.states.sharding;
        detail::gated_delta_widths<Mix> const n(config_, mix, mixer_.states.rank);
        index_t const sequences = mix.batch().sequences();
        if (state.conv.data()) detail::require_shape(where, "conv state", state.conv, sequences, n.conv, here);
        if (state.recurrent.data())
            detail::require_shape(where, "recurrent state", state.recurrent, sequences, n.recurrent, here);
    }

    gated_delta_net_config config_;
    detail::gated_delta_mixer<How, Mix> mixer_;
    [[no_unique_address]] std::conditional_t<std::same_as<S, Mix>, nothing, four_moves> moves_;
};
template <class X> // which says that a carry must be chosen
gated_delta_net(X const&, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {})
    -> gated_delta_net<scan, sharding<sequential<1>>, replicated<1>>;

} // namespace cpx
