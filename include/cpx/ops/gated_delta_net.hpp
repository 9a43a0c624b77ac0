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

namespace cpx {

/// Sizes of a gated delta net layer.
struct gated_delta_net_config {
    index hidden = 1;
    delta_rule_heads heads;
    index kernel = 4;  ///< taps of the convolution
    index chunk = 64;  ///< tokens a chunk of the delta rule
    double eps = 1e-6; ///< of the gated norm

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

/// Weights of a gated delta net layer, whole on every rank, named and shaped as in the checkpoint.
///
/// Projections are (out, in); conv is (q + k + v channels, kernel); A_log, dt_bias (value heads, 1); norm (1,
/// value_dim).
template <class T>
struct gated_delta_net_weights {
    rows<T const> in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, conv, A_log, dt_bias, norm, out_proj;
};

namespace detail {

/// The convolution, the gates and the delta rule: what needs neighbours, on the sharding `S`.
template <carry_kind How, any_sharding S>
struct gated_delta_mixer {
    halo_plan<S> halo_rows;
    carry_plan<S> states;

    gated_delta_mixer(S const& sharding, int rank, index kernel)
        : halo_rows(halo(sharding, rank, kernel - 1)), states(carry(sharding, rank)) {}

    /// x: rows of `config.sections()`; o: rows of `config.output_sections()`, both for this rank's heads.
    template <class T, class Comm>
    void operator()(gated_delta_net_config const& config, gated_delta_net_weights<T> const& w, tensor<T, S> const& x,
                    tensor<T, S>& o, Comm& comm) const {
        S const& sharding = states.sharding;
        int const rank = states.rank;
        delta_rule_heads const& heads = config.heads;
        index const keys = sharding.heads(rank, heads.key_heads).size(), q = keys * heads.key_dim;
        index const values = sharding.heads(rank, heads.value_heads).size(), v = values * heads.value_dim;
        auto const sections = config.sections();
        auto const qkv = std::span(sections).first(3), per_head = std::span(sections).last(1);

        auto const conv = local_rows(sharding, rank, qkv, w.conv);
        tensor<T, S> mixed(sharding, rank, 2 * q + v), g_beta(sharding, rank, 2 * values);
        causal_conv1d(halo_rows, x.view().columns(0, 2 * q + v), rows<T const>(conv, config.kernel),
                      std::span<T const>(), activation::silu, mixed.view(), comm);

        auto const A_log = local_rows(sharding, rank, per_head, w.A_log);
        auto const dt_bias = local_rows(sharding, rank, per_head, w.dt_bias);
        auto const b = x.data().columns(2 * q + v, values), a = x.data().columns(2 * q + v + values, values);
        for (index row = 0; row < a.count(); ++row)
            for (index h = 0; h < values; ++h) {
                auto const head = static_cast<std::size_t>(h);
                g_beta.data()(row, h) = delta_rule_gate(a(row, h), A_log[head], dt_bias[head]);
                g_beta.data()(row, values + h) = sigmoid(b(row, h));
            }
        auto const qkv_rows = mixed.view(), gates = g_beta.view();
        delta_rule_tensors<T, S> const t{qkv_rows.columns(0, q),        qkv_rows.columns(q, q),
                                         qkv_rows.columns(2 * q, v),    gates.columns(0, values),
                                         gates.columns(values, values), sharded<T, S>(o.data(), sharding)};
        gated_delta_rule(How{}, states, t, heads, {.chunk = config.chunk, .qk_l2norm = true}, comm);
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
    /// In place. Pure: no communication.
    gated_delta_net(S const& sharding, int rank, gated_delta_net_config const& config)
        requires std::same_as<S, Mix>
        : config_(config), mixer_(sharding, rank, config.kernel) {}

    /// By heads: `mix` and `back` are `head_sharded` over `config.sections()` and `config.output_sections()`.
    gated_delta_net(S const& sharding, Mix const& mix, Mix const& back, int rank, gated_delta_net_config const& config)
        requires(!std::same_as<S, Mix>)
        : config_(config), mixer_(mix, rank, config.kernel),
          moves_{relayout(sharding, mix, rank), relayout(back, sharding, rank)} {}

    /// Computes the layer: x, y (rows, hidden) of the layer's sharding. Collective.
    ///
    /// Throws `cpx::error` on shapes or shardings that do not fit, and what `exchange` and the operators throw.
    template <class T, any_sharding X, any_sharding Y, elements_of<T> A, transport Comm>
    void operator()(gated_delta_net_weights<T> const& w, sharded<A, X> const& x, sharded<T, Y> const& y, Comm& comm,
                    caller here = caller::here()) const {
        static_assert(std::same_as<X, S> && std::same_as<Y, S>,
                      "cpx: gated_delta_net on tensors that are not sharded as the layer; relayout them first, or make "
                      "the layer with x.sharding()");
        char const* const where = "gated_delta_net";
        require(x.sharding() == sharding(), where, "sharding of x", "the layer's", "another", here);
        require(y.sharding() == sharding(), where, "sharding of y", "the layer's", "another", here);
        delta_rule_heads const& heads = config_.heads;
        require(heads.key_heads > 0 && heads.value_heads % heads.key_heads == 0, where, "value heads",
                "a multiple of the key heads " + std::to_string(heads.key_heads), heads.value_heads, here);
        index const v = heads.value_heads * heads.value_dim, qkv = 2 * heads.key_heads * heads.key_dim + v;
        index const hidden = config_.hidden, mixed_width = qkv + 2 * heads.value_heads;
        detail::require_shape(where, "in_proj_qkv", w.in_proj_qkv, qkv, hidden, here);
        detail::require_shape(where, "in_proj_z", w.in_proj_z, v, hidden, here);
        detail::require_shape(where, "in_proj_b", w.in_proj_b, heads.value_heads, hidden, here);
        detail::require_shape(where, "in_proj_a", w.in_proj_a, heads.value_heads, hidden, here);
        detail::require_shape(where, "conv", w.conv, qkv, config_.kernel, here);
        detail::require_shape(where, "A_log", w.A_log, heads.value_heads, 1, here);
        detail::require_shape(where, "dt_bias", w.dt_bias, heads.value_heads, 1, here);
        detail::require_shape(where, "norm", w.norm, 1, heads.value_dim, here);
        detail::require_shape(where, "out_proj", w.out_proj, hidden, v, here);

        rows<T const> const in = x.data();
        int const rank = comm.rank();
        tensor<T, S> projected(x.sharding(), rank, mixed_width), z(x.sharding(), rank, v), o(x.sharding(), rank, v);
        detail::require_shape(where, "x", in, z.data().count(), hidden, here);
        detail::require_shape(where, "y", y.data(), z.data().count(), hidden, here);
        linear<T>(in, w.in_proj_qkv, projected.data().columns(0, qkv));
        linear<T>(in, w.in_proj_b, projected.data().columns(qkv, heads.value_heads));
        linear<T>(in, w.in_proj_a, projected.data().columns(qkv + heads.value_heads, heads.value_heads));
        linear<T>(in, w.in_proj_z, z.data());
        if constexpr (std::same_as<S, Mix>) {
            mixer_(config_, w, projected, o, comm);
        } else {
            auto const& [there, back] = moves_;
            auto const local = exchange(there, projected, comm);
            tensor<T, Mix> mixed(back.from, rank, back.source_width);
            mixer_(config_, w, local, mixed, comm);
            exchange(back, mixed.view(), o.view(), comm);
        }
        gated_rms_norm<T>(o.data(), z.data(), {w.norm.data(), static_cast<std::size_t>(w.norm.width())},
                          static_cast<T>(config_.eps), o.data());
        linear<T>(o.data(), w.out_proj, y.data());
    }

private:
    struct two_moves {
        relayout_plan<S, Mix> there;
        relayout_plan<Mix, S> back;
    };
    struct nothing {};

    S const& sharding() const {
        if constexpr (std::same_as<S, Mix>)
            return mixer_.states.sharding;
        else
            return moves_.there.from;
    }

    gated_delta_net_config config_;
    detail::gated_delta_mixer<How, Mix> mixer_;
    [[no_unique_address]] std::conditional_t<std::same_as<S, Mix>, nothing, two_moves> moves_;
};

} // namespace cpx
