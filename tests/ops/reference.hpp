// SPDX-License-Identifier: Apache-2.0
// Operators with all their inputs, as plain double-precision formulas over tokens, and on the ranks of any sharding.
#pragma once

#include <cpx/ops.hpp>

#include <ops/on_ranks.hpp>

namespace reference {

using cpx::index_t;
using std::size_t;

/// What an operator computes; `final` stays empty where there are no states.
template <class T>
struct result {
    std::vector<T> o, final;
};

/// A causal convolution. `weight` is (channels, taps), `bias` one a channel or empty.
template <class T>
struct conv {
    cpx::thd batch;
    index_t channels = 1, taps = 4;
    cpx::activation act = cpx::activation::silu;
    std::vector<T> x, weight, bias;

    template <class U>
    conv<U> as() const {
        return {batch, channels, taps, act, on_ranks::cast<U>(x), on_ranks::cast<U>(weight), on_ranks::cast<U>(bias)};
    }
};

template <class T>
conv<T> random_conv(cpx::thd const& batch, index_t channels, index_t taps, bool bias, cpx::activation act,
                    std::uint64_t seed) {
    support::splitmix numbers(seed);
    return {batch,
            channels,
            taps,
            act,
            on_ranks::uniform<T>(numbers, batch.tokens() * channels),
            on_ranks::uniform<T>(numbers, channels * taps),
            on_ranks::uniform<T>(numbers, bias ? channels : 0)};
}

/// z_t = bias + sum_j weight_j x_{t-K+1+j}, y = z or z sigmoid(z), with x = 0 before the sequence.
inline std::vector<double> run(conv<double> const& p) {
    std::vector<double> y(p.x.size());
    for (index_t s = 0; s < p.batch.sequences(); ++s)
        for (index_t row = p.batch.offset(s); row < p.batch.offset(s + 1); ++row)
            for (index_t d = 0; d < p.channels; ++d) {
                double z = p.bias.empty() ? 0 : p.bias[static_cast<size_t>(d)];
                for (index_t j = 0; j < p.taps; ++j)
                    if (index_t const from = row - p.taps + 1 + j; from >= p.batch.offset(s))
                        z += p.weight[static_cast<size_t>(d * p.taps + j)] *
                             p.x[static_cast<size_t>(from * p.channels + d)];
                y[static_cast<size_t>(row * p.channels + d)] =
                    p.act == cpx::activation::silu ? z / (1 + std::exp(-z)) : z;
            }
    return y;
}

/// `sections` are the heads of the channels, by which `head_sharded` shares them; empty: every channel is one.
template <class T, cpx::any_sharding S>
std::vector<T> run(conv<T> const& p, S const& sharding, std::vector<cpx::section> sections = {}) {
    if (sections.empty()) sections = {{p.channels, 1}};
    return on_ranks::assemble<T>(sharding, sections, [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const x = on_ranks::take(p.x, sections, sharding, rank);
        auto y = on_ranks::poisoned<T>(sharding, rank, x.width());
        auto const weight = local_rows(sharding, rank, sections, cpx::rows<T const>(p.weight, p.taps));
        auto const bias = p.bias.empty() ? p.bias : local_rows(sharding, rank, sections, cpx::rows<T const>(p.bias, 1));
        cpx::causal_conv1d(cpx::halo(sharding, rank, p.taps - 1), x.view(), cpx::rows<T const>(weight, p.taps),
                           std::span<T const>(bias), p.act, y.view(), comm);
        return y;
    });
}

/// A gated delta rule. `x` has rows of `sections()`: q, k, v, g, beta; `initial` is one state a sequence, or empty.
template <class T>
struct delta {
    cpx::thd batch;
    cpx::delta_rule_heads heads;
    cpx::delta_rule_options options;
    std::vector<T> x, initial;

    std::vector<cpx::section> sections() const {
        return {{heads.key_heads, heads.key_dim},
                {heads.key_heads, heads.key_dim},
                {heads.value_heads, heads.value_dim},
                {heads.value_heads, 1},
                {heads.value_heads, 1}};
    }
    std::vector<cpx::section> output_sections() const { return {{heads.value_heads, heads.value_dim}}; }
    index_t state() const { return heads.key_dim * heads.value_dim; }

    template <class U>
    delta<U> as() const {
        return {batch, heads, options, on_ranks::cast<U>(x), on_ranks::cast<U>(initial)};
    }
};

/// `decay` is the most that a token forgets: g is in (-decay, 0].
template <class T>
delta<T> random_delta(cpx::thd const& batch, cpx::delta_rule_heads const& heads, cpx::delta_rule_options const& options,
                      double decay, bool initial, std::uint64_t seed) {
    support::splitmix numbers(seed);
    delta<T> p{batch, heads, options, {}, {}};
    index_t const keys = 2 * heads.key_heads * heads.key_dim, values = heads.value_heads * heads.value_dim;
    double const length = options.qk_l2norm ? 1 : 1 / std::sqrt(static_cast<double>(heads.key_dim)); // |k| <= 1
    auto const append = [&](index_t count, double scale, auto change) {
        for (T const value : on_ranks::uniform<T>(numbers, count, scale)) p.x.push_back(change(value));
    };
    for (index_t row = 0; row < batch.tokens(); ++row) {
        append(keys, length, [](T value) { return value; });
        append(values, 1, [](T value) { return value; });
        append(heads.value_heads, decay, [](T value) { return -std::abs(value); });
        append(heads.value_heads, 1, [](T value) { return std::abs(value); });
    }
    if (initial) p.initial = on_ranks::uniform<T>(numbers, batch.sequences() * heads.value_heads * p.state());
    return p;
}

/// Token by token: S = exp(g) S, e = v - S^T k, S = S + beta k e^T, o = scale S^T q.
inline result<double> run(delta<double> const& p) {
    auto const& h = p.heads;
    index_t const width = on_ranks::width(p.sections()), keys = h.key_heads * h.key_dim, dim = h.key_dim,
                  wide = h.value_dim, state = p.state();
    double const scale = p.options.scale ? *p.options.scale : 1 / std::sqrt(static_cast<double>(dim));
    result<double> out{std::vector<double>(static_cast<size_t>(p.batch.tokens() * h.value_heads * wide)), {}};
    for (index_t s = 0; s < p.batch.sequences(); ++s)
        for (index_t head = 0; head < h.value_heads; ++head) {
            std::vector<double> S(static_cast<size_t>(state));
            if (!p.initial.empty())
                std::copy_n(p.initial.begin() + (s * h.value_heads + head) * state, state, S.begin());
            for (index_t row = p.batch.offset(s); row < p.batch.offset(s + 1); ++row) {
                double const* const x = p.x.data() + row * width;
                index_t const key_head = head / (h.value_heads / h.key_heads);
                std::vector<double> q(x + key_head * dim, x + (key_head + 1) * dim);
                std::vector<double> k(x + keys + key_head * dim, x + keys + (key_head + 1) * dim);
                double const* const v = x + 2 * keys + head * wide;
                double const g = x[2 * keys + h.value_heads * wide + head];
                double const beta = x[2 * keys + h.value_heads * (wide + 1) + head];
                for (auto* row_of : {&q, &k}) {
                    double squares = 1e-6;
                    for (double const e : *row_of) squares += e * e;
                    if (p.options.qk_l2norm)
                        for (double& e : *row_of) e /= std::sqrt(squares);
                }
                for (double& e : S) e *= std::exp(g);
                for (index_t c = 0; c < wide; ++c) {
                    double e = v[c], o = 0;
                    for (index_t d = 0; d < dim; ++d)
                        e -= S[static_cast<size_t>(d * wide + c)] * k[static_cast<size_t>(d)];
                    for (index_t d = 0; d < dim; ++d) {
                        double& cell = S[static_cast<size_t>(d * wide + c)];
                        cell += beta * k[static_cast<size_t>(d)] * e;
                        o += cell * q[static_cast<size_t>(d)];
                    }
                    out.o[static_cast<size_t>((row * h.value_heads + head) * wide + c)] = scale * o;
                }
            }
            out.final.insert(out.final.end(), S.begin(), S.end());
        }
    return out;
}

/// Returns whether `rank` holds the first token of a sequence, or the last one; rank 0 speaks for one without tokens.
template <cpx::any_sharding S>
bool holds_end(S const& sharding, int rank, index_t sequence, cpx::side side) {
    cpx::thd const& batch = sharding.batch();
    if (batch.length(sequence) == 0) return S::every_row || rank == 0;
    index_t const row = side == cpx::side::before ? batch.offset(sequence) : batch.offset(sequence + 1) - 1;
    bool held = false;
    sharding.for_each_piece(rank, [&](cpx::range piece) { held |= piece.first <= row && row < piece.last; });
    return held;
}

/// Returns the states, `state` elements a head, of the heads that `rank` holds, poison where it must not read them.
template <class T, cpx::any_sharding S>
std::vector<T> states_on(S const& sharding, int rank, index_t heads, index_t state, std::vector<T> const& whole,
                         cpx::side side) {
    cpx::range const held = sharding.heads(rank, heads);
    std::vector<T> local;
    for (index_t s = 0; !whole.empty() && s < sharding.batch().sequences(); ++s)
        if (holds_end(sharding, rank, s, side))
            local.insert(local.end(), whole.begin() + (s * heads + held.first) * state,
                         whole.begin() + (s * heads + held.last) * state);
        else
            local.insert(local.end(), static_cast<size_t>(held.size() * state), on_ranks::poison<T>());
    return local;
}

/// Puts together what every rank wrote; states that are not written by exactly those ranks that should are poison.
template <class T, cpx::any_sharding S>
std::vector<T> whole_states(S const& sharding, index_t heads, index_t state,
                            std::vector<std::vector<T>> const& of_ranks) {
    index_t const sequences = sharding.batch().sequences();
    std::vector<T> whole(static_cast<size_t>(sequences * heads * state), on_ranks::poison<T>());
    for (index_t s = 0; s < sequences; ++s) {
        int writers = 0;
        for (int rank = 0; rank < sharding.ranks(); ++rank) {
            cpx::range const held = sharding.heads(rank, heads);
            T const* const from = of_ranks[static_cast<size_t>(rank)].data() + s * held.size() * state;
            if (on_ranks::same_bits(*from, on_ranks::poison<T>())) continue;
            ++writers;
            std::copy_n(from, held.size() * state, whole.begin() + (s * heads + held.first) * state);
        }
        if (writers != (S::every_row ? sharding.ranks() : 1))
            std::fill_n(whole.begin() + s * heads * state, heads * state, on_ranks::poison<T>());
    }
    return whole;
}

/// Final states that are not written by exactly those ranks that should are poison.
template <cpx::carry_kind How, class T, cpx::any_sharding S>
result<T> run(delta<T> const& p, S const& sharding) {
    index_t const state = p.state(), sequences = p.batch.sequences(), heads = p.heads.value_heads;
    std::vector<std::vector<T>> finals(static_cast<size_t>(sharding.ranks()));
    result<T> out;
    out.o = on_ranks::assemble<T>(sharding, p.output_sections(), [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const fused = on_ranks::take(p.x, p.sections(), sharding, rank);
        auto const x = fused.view();
        cpx::range const held = sharding.heads(rank, heads);
        index_t const k = sharding.heads(rank, p.heads.key_heads).size() * p.heads.key_dim, n = held.size(),
                      v = n * p.heads.value_dim, local = n * state;
        auto o = on_ranks::poisoned<T>(sharding, rank, v);
        auto& final = finals[static_cast<size_t>(rank)];
        final.assign(static_cast<size_t>(sequences * local), on_ranks::poison<T>());
        auto const initial = states_on(sharding, rank, heads, state, p.initial, cpx::side::before);
        cpx::delta_rule_tensors<T, S> const t{x.columns(0, k),
                                              x.columns(k, k),
                                              x.columns(2 * k, v),
                                              x.columns(2 * k + v, n),
                                              x.columns(2 * k + v + n, n),
                                              o.view(),
                                              {initial.data(), initial.empty() ? 0 : sequences, local},
                                              {final.data(), sequences, local}};
        cpx::gated_delta_rule(cpx::carry<How>(sharding, rank), t, p.heads, p.options, comm);
        return o;
    });
    out.final = whole_states(sharding, heads, state, finals);
    return out;
}

/// A whole gated delta net layer; weights as in `cpx::gated_delta_net_weights`, in its order.
template <class T>
struct layer {
    cpx::thd batch;
    cpx::gated_delta_net_config config;
    std::vector<T> x;
    std::vector<std::vector<T>> weights;

    /// Returns the width of each weight's rows.
    std::vector<index_t> widths() const {
        index_t const v = config.heads.value_heads * config.heads.value_dim;
        return {
            config.hidden, config.hidden, config.hidden, config.hidden, config.kernel, 1, 1, config.heads.value_dim, v};
    }
    cpx::gated_delta_net_weights<T> view() const {
        auto const w = [&](size_t i) { return cpx::rows<T const>(weights[i], widths()[i]); };
        return {w(0), w(1), w(2), w(3), w(4), w(5), w(6), w(7), w(8)};
    }
    template <class U>
    layer<U> as() const {
        layer<U> other{batch, config, on_ranks::cast<U>(x), {}};
        for (auto const& w : weights) other.weights.push_back(on_ranks::cast<U>(w));
        return other;
    }
};

/// `memory` near 1 makes every token forget as little as 1 - memory does.
template <class T>
layer<T> random_layer(cpx::thd const& batch, cpx::gated_delta_net_config const& config, bool slow_decay,
                      std::uint64_t seed) {
    support::splitmix numbers(seed);
    auto const& h = config.heads;
    index_t const v = h.value_heads * h.value_dim, qkv = 2 * h.key_heads * h.key_dim + v, hidden = config.hidden;
    double const by_hidden = 2 / std::sqrt(static_cast<double>(hidden)), by_v = 2 / std::sqrt(static_cast<double>(v));
    layer<T> p{batch, config, on_ranks::uniform<T>(numbers, batch.tokens() * hidden), {}};
    auto const add = [&](index_t count, double scale) {
        p.weights.push_back(on_ranks::uniform<T>(numbers, count, scale));
    };
    add(qkv * hidden, by_hidden);
    add(v * hidden, by_hidden);
    add(h.value_heads * hidden, by_hidden);
    add(h.value_heads * hidden, by_hidden);
    add(qkv * config.kernel, 1);
    add(h.value_heads, 0.5);
    if (slow_decay)
        for (T& a : p.weights.back()) a -= 7; // g is about -exp(-7)
    add(h.value_heads, 1);
    add(h.value_dim, 1);
    add(hidden * v, by_v);
    return p;
}

inline std::vector<double> linear(std::vector<double> const& x, std::vector<double> const& w, index_t in) {
    size_t const n = static_cast<size_t>(in), rows = x.size() / n, out = w.size() / n;
    std::vector<double> y(rows * out);
    for (size_t row = 0; row < rows; ++row)
        for (size_t o = 0; o < out; ++o)
            for (size_t i = 0; i < n; ++i) y[row * out + o] += x[row * n + i] * w[o * n + i];
    return y;
}

inline std::vector<double> run(layer<double> const& p) {
    auto const& h = p.config.heads;
    auto const& w = p.weights;
    size_t const tokens = static_cast<size_t>(p.batch.tokens()), heads = static_cast<size_t>(h.value_heads),
                 dim = static_cast<size_t>(h.value_dim), keys = static_cast<size_t>(h.key_heads * h.key_dim),
                 qkv = 2 * keys + heads * dim;
    auto const mixed = run(conv<double>{p.batch,
                                        static_cast<index_t>(qkv),
                                        p.config.kernel,
                                        cpx::activation::silu,
                                        linear(p.x, w[0], p.config.hidden),
                                        w[4],
                                        {}});
    auto const z = linear(p.x, w[1], p.config.hidden), b = linear(p.x, w[2], p.config.hidden),
               a = linear(p.x, w[3], p.config.hidden);
    delta<double> recurrence{p.batch, h, {.chunk = p.config.chunk, .qk_l2norm = true}, {}, {}};
    for (size_t t = 0; t < tokens; ++t) {
        recurrence.x.insert(recurrence.x.end(), mixed.begin() + static_cast<index_t>(t * qkv),
                            mixed.begin() + static_cast<index_t>((t + 1) * qkv));
        for (size_t i = 0; i < heads; ++i)
            recurrence.x.push_back(-std::exp(w[5][i]) * std::log(1 + std::exp(a[t * heads + i] + w[6][i])));
        for (size_t i = 0; i < heads; ++i) recurrence.x.push_back(1 / (1 + std::exp(-b[t * heads + i])));
    }
    auto o = run(recurrence).o;
    for (size_t i = 0; i < tokens * heads; ++i) {
        double mean = 0;
        for (size_t d = 0; d < dim; ++d) mean += o[i * dim + d] * o[i * dim + d] / static_cast<double>(dim);
        for (size_t d = 0; d < dim; ++d) {
            double const gate = z[i * dim + d];
            o[i * dim + d] *= w[7][d] / std::sqrt(mean + p.config.eps) * gate / (1 + std::exp(-gate));
        }
    }
    return linear(o, w[8], static_cast<index_t>(heads * dim));
}

/// In place.
template <cpx::carry_kind How, class T, cpx::any_sharding S>
std::vector<T> run(layer<T> const& p, S const& sharding) {
    std::vector<cpx::section> const rows{{1, p.config.hidden}};
    return on_ranks::assemble<T>(sharding, rows, [&](cpx::threads& comm) {
        auto const x = on_ranks::take(p.x, rows, sharding, comm.rank());
        auto y = on_ranks::poisoned<T>(sharding, comm.rank(), x.width());
        cpx::gated_delta_net const net(cpx::carry<How>(sharding, comm.rank()), p.config);
        net(p.view(), x.view(), y.view(), comm);
        return y;
    });
}

/// Hidden states sharded by tokens, the recurrence by heads.
template <class T, cpx::any_sharding S>
std::vector<T> run_by_heads(layer<T> const& p, S const& sharding) {
    std::vector<cpx::section> const rows{{1, p.config.hidden}};
    cpx::head_sharded<> const mix(sharding.ranks(), p.batch, p.config.sections()),
        back(sharding.ranks(), p.batch, p.config.output_sections());
    return on_ranks::assemble<T>(sharding, rows, [&](cpx::threads& comm) {
        auto const x = on_ranks::take(p.x, rows, sharding, comm.rank());
        auto y = on_ranks::poisoned<T>(sharding, comm.rank(), x.width());
        int const rank = comm.rank();
        cpx::gated_delta_net const net(cpx::carry<cpx::serial>(mix, rank), relayout(sharding, mix, rank),
                                       relayout(back, sharding, rank), p.config);
        net(p.view(), x.view(), y.view(), comm);
        return y;
    });
}

} // namespace reference
