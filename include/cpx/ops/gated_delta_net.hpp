// SPDX-License-Identifier: Apache-2.0
// The gated delta net layer of Qwen3-Next and Qwen3.5 on any sharding.
#pragma once

#include <cpx/layout/head_sharded.hpp>
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
        return {{heads.key_heads, heads.key_dim}, {heads.key_heads, heads.key_dim}, {heads.value_heads, heads.value_dim},
                {heads.value_heads, 1}, {heads.value_heads, 1}};
    }
    /// Returns the sections of the rows that it writes: o.
    std::vector<section> output_sections() const { return {{heads.value_heads, heads.value_dim}}; }
};

/// Weights of a gated delta net layer, whole on every rank, named and shaped as in the checkpoint.
///
/// Projections are (out, in); conv is (q + k + v channels, kernel); A_log, dt_bias (value heads, 1); norm (1, value_dim).
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
    void operator()(gated_delta_net_config const& config, gated_delta_net_weights<T> const& w, rows<T const> x, rows<T> o,
                    Comm& comm) const {
        S const& sharding = states.sharding;
        auto const sections = config.sections();
        auto const& [hidden, heads, kernel, chunk, eps] = config;
        index const keys = sharding.heads(states.rank, heads.key_heads).size();
        index const values = sharding.heads(states.rank, heads.value_heads).size();
        index const q = keys * heads.key_dim, v = values * heads.value_dim, qkv = 2 * q + v;

        auto const qkv_sections = std::span(sections).first(3);
        auto const conv_weight = local_rows(sharding, states.rank, qkv_sections, w.conv);
        std::vector<T> mixed_values(static_cast<std::size_t>(x.count() * qkv));
        sharded<T, S> const mixed{{mixed_values.data(), x.count(), qkv}, sharding};
        causal_conv1d(halo_rows, sharded<T const, S>{x.columns(0, qkv), sharding},
                      rows<T const>(conv_weight.data(), qkv, kernel), std::span<T const>(), activation::silu, mixed, comm);

        auto const value_section = std::span(sections).last(1);
        auto const A_log = local_rows(sharding, states.rank, value_section, w.A_log);
        auto const dt_bias = local_rows(sharding, states.rank, value_section, w.dt_bias);
        std::vector<T> gates(static_cast<std::size_t>(x.count() * 2 * values));
        sharded<T, S> const g_beta{{gates.data(), x.count(), 2 * values}, sharding};
        for (index row = 0; row < x.count(); ++row)
            for (index h = 0; h < values; ++h) {
                auto const head = static_cast<std::size_t>(h);
                g_beta.data()(row, h) = delta_rule_gate(x(row, qkv + values + h), A_log[head], dt_bias[head]);
                g_beta.data()(row, values + h) = sigmoid(x(row, qkv + h));
            }
        delta_rule_tensors<T, S> const tensors{mixed.columns(0, q),       mixed.columns(q, q),
                                               mixed.columns(2 * q, v),   g_beta.columns(0, values),
                                               g_beta.columns(values, values), {o, sharding}};
        gated_delta_rule(How{}, states, tensors, heads, {.chunk = chunk, .qk_l2norm = true}, comm);
    }
};

} // namespace detail

/// A gated delta net layer whose hidden states are sharded by `S` and whose recurrence runs on `Mix`.
///
/// `Mix` is `S` itself (in place: a halo and carried states), or `head_sharded` (one exchange there, one back, no carry).
/// Projections and the gated norm see one token at a time and run on `S`.
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

    /// Computes the layer: x, y (rows, hidden). Collective. Throws what `exchange` and the operators throw.
    template <class A, class T, transport Comm>
        requires std::same_as<std::remove_const_t<A>, T>
    void operator()(gated_delta_net_weights<T> const& w, sharded<A, S> const& x, sharded<T, S> const& y, Comm& comm) const {
        rows<T const> const in = x.data();
        delta_rule_heads const& heads = config_.heads;
        index const qkv = 2 * heads.key_heads * heads.key_dim + heads.value_heads * heads.value_dim;
        index const v = heads.value_heads * heads.value_dim, mixed_width = qkv + 2 * heads.value_heads;

        std::vector<T> projected(static_cast<std::size_t>(in.count() * mixed_width));
        std::vector<T> z(static_cast<std::size_t>(in.count() * v)), o(z.size());
        rows<T> const p(projected.data(), in.count(), mixed_width), gate_rows(z.data(), in.count(), v);
        rows<T> const o_rows(o.data(), in.count(), v);
        linear<T>(in, w.in_proj_qkv, p.columns(0, qkv));
        linear<T>(in, w.in_proj_b, p.columns(qkv, heads.value_heads));
        linear<T>(in, w.in_proj_a, p.columns(qkv + heads.value_heads, heads.value_heads));
        linear<T>(in, w.in_proj_z, gate_rows);
        if constexpr (std::same_as<S, Mix>) {
            mixer_(config_, w, rows<T const>(p), o_rows, comm);
        } else {
            auto const& [there, back] = moves_;
            std::vector<T> local(static_cast<std::size_t>(there.target_rows * there.target_width));
            std::vector<T> mixed(static_cast<std::size_t>(back.source_rows * back.source_width));
            rows<T> const local_rows(local.data(), there.target_rows, there.target_width);
            rows<T> const mixed_rows(mixed.data(), back.source_rows, back.source_width);
            exchange(there, sharded{p, x.sharding()}, sharded{local_rows, there.to}, comm);
            mixer_(config_, w, rows<T const>(local_rows), mixed_rows, comm);
            exchange(back, sharded{mixed_rows, back.from}, sharded{o_rows, x.sharding()}, comm);
        }
        gated_rms_norm<T>(o_rows, gate_rows, {w.norm.data(), static_cast<std::size_t>(w.norm.width())},
                          static_cast<T>(config_.eps), o_rows);
        linear<T>(o_rows, w.out_proj, y.data());
    }

private:
    struct two_moves {
        relayout_plan<S, Mix> there;
        relayout_plan<Mix, S> back;
    };
    struct nothing {};

    gated_delta_net_config config_;
    detail::gated_delta_mixer<How, Mix> mixer_;
    [[no_unique_address]] std::conditional_t<std::same_as<S, Mix>, nothing, two_moves> moves_;
};

} // namespace cpx
