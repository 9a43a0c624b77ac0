// SPDX-License-Identifier: Apache-2.0
// Gradients of the operators of reference.hpp and attention.hpp on the ranks of any sharding. The gradient of a problem
// is a problem whose inputs are the gradients of the inputs.
#pragma once

#include <ops/attention.hpp>
#include <ops/reference.hpp>

#include <mutex>

namespace reference {

template <class T>
using named_inputs = std::vector<std::pair<std::string, std::vector<T>*>>;

template <class T>
named_inputs<T> inputs(conv<T>& p) {
    return {{"x", &p.x}, {"weight", &p.weight}, {"bias", &p.bias}};
}
template <class T>
named_inputs<T> inputs(delta<T>& p) {
    return {{"q, k, v, g, beta", &p.x}, {"initial", &p.initial}};
}
template <class T>
named_inputs<T> inputs(attention<T>& p) {
    return {{"q", &p.q}, {"k", &p.k}, {"v", &p.v}};
}
template <class T>
named_inputs<T> inputs(layer<T>& p) {
    named_inputs<T> list = {{"x", &p.x}};
    char const* const names[] = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv",
                                 "A_log",       "dt_bias",   "norm",      "out_proj"};
    for (size_t i = 0; i < p.weights.size(); ++i) list.emplace_back(names[i], &p.weights[i]);
    return list;
}

/// Sums that every rank must end with, bit for bit; poison where one has others.
template <class T>
class same_on_ranks {
public:
    void add(std::vector<T> const& sums) {
        std::lock_guard const lock(guard_);
        if (ranks_++ == 0) sums_ = sums;
        if (!on_ranks::same_bits(sums_, sums)) std::ranges::fill(sums_, on_ranks::poison<T>());
    }
    std::vector<T> const& get() const { return sums_; }

private:
    std::mutex guard_;
    int ranks_ = 0;
    std::vector<T> sums_;
};

template <class T, cpx::any_sharding S>
conv<T> gradient(conv<T> const& p, std::vector<T> const& dy, S const& sharding, cpx::sum_order order,
                 std::vector<cpx::section> sections = {}) {
    if (sections.empty()) sections = {{p.channels, 1}};
    same_on_ranks<T> weight, bias;
    conv<T> d = p;
    d.x = on_ranks::assemble<T>(sharding, sections, [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const x = on_ranks::take(p.x, sections, sharding, rank),
                   of_y = on_ranks::take(dy, sections, sharding, rank);
        auto dx = on_ranks::poisoned<T>(sharding, rank, x.width());
        auto const w = local_rows(sharding, rank, sections, cpx::rows<T const>(p.weight, p.taps));
        auto const b = p.bias.empty() ? p.bias : local_rows(sharding, rank, sections, cpx::rows<T const>(p.bias, 1));
        std::vector<T> dw(w.size()), db(b.size()), dweight(p.weight.size()), dbias(p.bias.size());
        cpx::causal_conv1d_backward(
            cpx::halo(sharding, rank, p.taps - 1), cpx::halo(sharding, rank, p.taps - 1, cpx::side::after), x.view(),
            cpx::rows<T const>(w, p.taps), std::span<T const>(b), p.act, of_y.view(),
            cpx::causal_conv1d_gradients<T, S>{dx.view(), cpx::rows<T>(dw, p.taps), std::span<T>(db), order}, comm);
        cpx::add_local_rows(sharding, rank, sections, cpx::rows<T const>(dw, p.taps), cpx::rows<T>(dweight, p.taps));
        if (!b.empty())
            cpx::add_local_rows(sharding, rank, sections, cpx::rows<T const>(db, 1), cpx::rows<T>(dbias, 1));
        cpx::sum_over_ranks(dweight, comm);
        cpx::sum_over_ranks(dbias, comm);
        weight.add(dweight);
        bias.add(dbias);
        return dx;
    });
    d.weight = weight.get();
    d.bias = bias.get();
    return d;
}

/// `upstream`: the gradients of o and of the final states, or none of these.
template <cpx::carry_kind How, class T, cpx::any_sharding S>
delta<T> gradient(delta<T> const& p, result<T> const& upstream, S const& sharding) {
    index_t const state = p.state(), sequences = p.batch.sequences(), heads = p.heads.value_heads;
    std::vector<std::vector<T>> dinitials(static_cast<size_t>(sharding.ranks()));
    delta<T> d{p.batch, p.heads, p.options, {}, {}};
    d.x = on_ranks::assemble<T>(sharding, p.sections(), [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const fused = on_ranks::take(p.x, p.sections(), sharding, rank);
        auto const dout = on_ranks::take(upstream.o, p.output_sections(), sharding, rank);
        auto dfused = on_ranks::poisoned<T>(sharding, rank, fused.width());
        auto const x = fused.view();
        auto const dx = dfused.view();
        index_t const n = sharding.heads(rank, heads).size(), v = n * p.heads.value_dim, local = n * state,
                      k = sharding.heads(rank, p.heads.key_heads).size() * p.heads.key_dim;
        auto o = on_ranks::poisoned<T>(sharding, rank, v);
        auto const initial = states_on(sharding, rank, heads, state, p.initial, cpx::side::before);
        auto const dfinal = states_on(sharding, rank, heads, state, upstream.final, cpx::side::after);
        auto const states = [&](auto const& values) {
            return cpx::rows<T const>(values.data(), values.empty() ? 0 : sequences, local);
        };
        auto& dinitial = dinitials[static_cast<size_t>(rank)];
        if (!p.initial.empty()) dinitial.assign(static_cast<size_t>(sequences * local), on_ranks::poison<T>());
        cpx::delta_rule_saved<T> saved;
        cpx::delta_rule_tensors<T, S> const t{x.columns(0, k),
                                              x.columns(k, k),
                                              x.columns(2 * k, v),
                                              x.columns(2 * k + v, n),
                                              x.columns(2 * k + v + n, n),
                                              o.view(),
                                              states(initial),
                                              {},
                                              &saved};
        cpx::delta_rule_gradient_tensors<T, S> const to{dout.view(),
                                                        dx.columns(0, k),
                                                        dx.columns(k, k),
                                                        dx.columns(2 * k, v),
                                                        dx.columns(2 * k + v, n),
                                                        dx.columns(2 * k + v + n, n),
                                                        states(dfinal),
                                                        {dinitial.data(), dinitial.empty() ? 0 : sequences, local}};
        auto const plan = cpx::carry<How>(sharding, rank);
        cpx::gated_delta_rule(plan, t, p.heads, p.options, comm);
        cpx::gated_delta_rule_backward(plan, t, to, p.heads, p.options, comm);
        return dfused;
    });
    if (!p.initial.empty()) d.initial = whole_states(sharding, heads, state, dinitials);
    return d;
}

/// Views one vector that holds all parameters of a layer.
template <class T>
cpx::gated_delta_net_parameters<T> parameters(std::vector<T>& all, cpx::gated_delta_net_config const& config) {
    cpx::gated_delta_net_parameters<T> view;
    index_t size = 0, first = 0;
    for_each_parameter(view, config,
                       [&](char const*, cpx::rows<T>&, index_t count, index_t width) { size += count * width; });
    all.resize(static_cast<size_t>(size));
    for_each_parameter(view, config, [&](char const*, cpx::rows<T>& weight, index_t count, index_t width) {
        weight = {all.data() + first, count, width};
        first += count * width;
    });
    return view;
}

/// `make(rank)` returns the layer as `rank` runs it, the recurrence on `Mix`.
template <class Mix, class T, cpx::any_sharding S, class Make>
layer<T> gradient_of(layer<T> const& p, std::vector<T> const& dy, S const& sharding, cpx::sum_order order, Make make) {
    std::vector<cpx::section> const rows{{1, p.config.hidden}};
    same_on_ranks<T> weights;
    layer<T> d{p.batch, p.config, {}, {}};
    d.x = on_ranks::assemble<T>(sharding, rows, [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const x = on_ranks::take(p.x, rows, sharding, rank), of_y = on_ranks::take(dy, rows, sharding, rank);
        auto y = on_ranks::poisoned<T>(sharding, rank, x.width()), dx = y;
        auto const net = make(rank);
        cpx::gated_delta_net_saved<T, S, Mix> saved;
        net(p.view(), x.view(), y.view(), comm, {{}, &saved});
        std::vector<T> all;
        auto const dweights = parameters(all, p.config);
        gated_delta_net_backward(net, p.view(), x.view(), saved, of_y.view(),
                                 cpx::gated_delta_net_gradients<T, S>{dx.view(), dweights, order}, comm);
        cpx::sum_over_ranks(all, comm);
        weights.add(all);
        return dx;
    });
    auto next = weights.get().begin();
    for (auto const& weight : p.weights) {
        d.weights.emplace_back(next, next + std::ssize(weight));
        next += std::ssize(weight);
    }
    return d;
}

template <cpx::carry_kind How, class T, cpx::any_sharding S>
layer<T> gradient(layer<T> const& p, std::vector<T> const& dy, S const& sharding, cpx::sum_order order) {
    return gradient_of<S>(p, dy, sharding, order,
                          [&](int rank) { return cpx::gated_delta_net(cpx::carry<How>(sharding, rank), p.config); });
}

template <class T, cpx::any_sharding S>
layer<T> gradient_by_heads(layer<T> const& p, std::vector<T> const& dy, S const& sharding, cpx::sum_order order) {
    cpx::head_sharded<> const mix(sharding.ranks(), p.batch, p.config.sections()),
        back(sharding.ranks(), p.batch, p.config.output_sections());
    return gradient_of<cpx::head_sharded<>>(p, dy, sharding, order, [&](int rank) {
        return cpx::gated_delta_net(cpx::carry<cpx::serial>(mix, rank), relayout(sharding, mix, rank),
                                    relayout(back, sharding, rank), p.config);
    });
}

/// Which side of an attention goes to the other one's ranks for the gradients of keys and values.
enum class gathered { queries, keys };

/// Queries on `sharding`, keys and values on `everywhere`: `replicated` or the same by heads.
template <class T, cpx::any_sharding Q, cpx::any_sharding K>
attention<T> gradient(attention<T> const& p, std::vector<T> const& dout, Q const& sharding, K const& everywhere,
                      gathered what) {
    std::vector<cpx::section> const queries{p.queries()}, keys{p.keys()}, all{p.queries(), p.keys(), p.keys()};
    auto const fused = on_ranks::assemble<T>(sharding, all, [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const q = on_ranks::take(p.q, queries, sharding, rank),
                   of_o = on_ranks::take(dout, queries, sharding, rank);
        auto const k = on_ranks::take(p.k, keys, everywhere, rank), v = on_ranks::take(p.v, keys, everywhere, rank);
        index_t const width = q.width(), heads = width / p.heads.dim,
                      own_keys = sharding.heads(rank, p.heads.key_heads).size() * p.heads.dim;
        auto o = on_ranks::poisoned<T>(sharding, rank, width);
        auto lse = on_ranks::poisoned<T>(sharding, rank, heads), delta = lse;
        cpx::attention(q.view(), k.view(), v.view(), p.heads, p.scale, o.view(), lse.data());
        cpx::attention_delta(o.view(), of_o.view(), p.heads.dim, delta.view());
        auto dfused = on_ranks::poisoned<T>(sharding, rank, width + 2 * own_keys);
        auto const dq = dfused.view().columns(0, width), dk = dfused.view().columns(width, own_keys),
                   dv = dfused.view().columns(width + own_keys, own_keys);
        auto const views = [](auto const& a, auto const& b, auto const& c, auto const& d) {
            using S = std::remove_cvref_t<decltype(a.sharding())>;
            return cpx::attention_queries<T, S>{a.view(), b.view(), c.view(), d.view()};
        };
        auto const own = views(q, of_o, lse, delta);
        cpx::attention_backward_queries(own, k.view(), v.view(), p.heads, p.scale, dq);
        if constexpr (std::same_as<Q, K>) {
            cpx::attention_backward_keys(own, k.view(), v.view(), p.heads, p.scale, dk, dv, comm);
        } else if (what == gathered::queries) {
            auto const plan = cpx::relayout(sharding, everywhere, rank);
            auto const own_k = on_ranks::take(p.k, keys, sharding, rank),
                       own_v = on_ranks::take(p.v, keys, sharding, rank);
            cpx::attention_backward_keys(views(cpx::exchange(plan, q, comm), cpx::exchange(plan, of_o, comm),
                                               cpx::exchange(plan, lse, comm), cpx::exchange(plan, delta, comm)),
                                         own_k.view(), own_v.view(), p.heads, p.scale, dk, dv, comm);
        } else {
            auto all_dk = on_ranks::poisoned<T>(everywhere, rank, own_keys), all_dv = all_dk;
            cpx::attention_backward_keys(own, k.view(), v.view(), p.heads, p.scale, all_dk.view(), all_dv.view(), comm);
            auto const back = cpx::relayout(sharding, everywhere, rank).transposed();
            cpx::exchange(back, all_dk.view(), dk, comm);
            cpx::exchange(back, all_dv.view(), dv, comm);
        }
        return dfused;
    });
    attention<T> d{p.batch, p.heads, p.scale, {}, {}, {}};
    index_t const width = on_ranks::width(all), q = p.width(), k = p.heads.key_heads * p.heads.dim;
    for (auto row = fused.begin(); row != fused.end(); row += width) {
        d.q.insert(d.q.end(), row, row + q);
        d.k.insert(d.k.end(), row + q, row + q + k);
        d.v.insert(d.v.end(), row + q + k, row + width);
    }
    return d;
}

template <class T, cpx::any_sharding Q>
attention<T> gradient_gathered(attention<T> const& p, std::vector<T> const& dout, Q const& sharding, gathered what) {
    return gradient(p, dout, sharding, cpx::replicated<>(sharding.ranks(), p.batch), what);
}

template <class T>
attention<T> gradient_by_heads(attention<T> const& p, std::vector<T> const& dout, int ranks) {
    cpx::head_sharded<> const split(ranks, p.batch, {p.queries(), p.keys(), p.keys()});
    return gradient(p, dout, split, split, gathered::queries);
}

} // namespace reference
