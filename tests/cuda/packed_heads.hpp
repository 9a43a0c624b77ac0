// SPDX-License-Identifier: Apache-2.0
// What the tests of the gated delta rule and of a decay a head in device memory have in common: data, and its
// comparison.
#pragma once

#include <cpx/cuda/gated_delta_rule.hpp>

#include <doctest/doctest.h>

#include <ops/on_ranks.hpp>
#include <support/random.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace packed_heads {

using cpx::index_t, cpx::rows;
using cpx::cuda::buffer, cpx::cuda::delta_rule_path, cpx::cuda::gated_delta_rule_shape;
using numbers = std::vector<double>;

template <class T>
std::vector<T> convert(numbers const& values) {
    std::vector<T> result;
    for (double const value : values) result.push_back(static_cast<T>(static_cast<float>(value)));
    return result;
}
template <class T>
numbers widen(std::vector<T> const& values) {
    numbers result;
    for (T const value : values) result.push_back(static_cast<double>(static_cast<float>(value)));
    return result;
}

/// Channels of heads that tensor cores take: their whole tiles, half of them, and other multiples of 8.
struct head_dims {
    index_t key, value;
};
inline constexpr head_dims core_dims[] = {{128, 128}, {64, 64}, {96, 64}, {40, 128}};

/// The path of elements T and such heads: tensor cores, where there are kernels for them.
template <class T = __nv_bfloat16>
delta_rule_path core_path() {
    return cpx::cuda::gated_delta_rule_saved<T>({}, 64, 1) > 0 ? delta_rule_path::tensor_cores : delta_rule_path::plain;
}

/// What gates, keys and betas are like.
enum class kind {
    mild,
    no_decay,
    equal_keys,
    same_keys,
    beta_0,
    beta_1,
    beta_2,
    strong,
    spikes,
    never,
    beta_0_or_1,
    slow
};
/// Whether roundings are added up many times over.
constexpr bool is_hard(kind what) {
    return what == kind::equal_keys || what == kind::same_keys || what == kind::beta_2;
}
/// What errors of T may be of those of bfloat16: half has three bits more, but float sums have no more, nor have the
/// operands of inverses, which are half for both and count where keys are alike or beta is near 2.
template <class T>
constexpr double finer(kind what = kind::mild) {
    return !std::is_same_v<T, __half> ? 1 : is_hard(what) ? 1.0 / 4 : 1.0 / 7;
}

/// Tensors of a packed batch; T holds those of rows exactly.
struct problem {
    std::vector<index_t> offsets{0}, first;
    gated_delta_rule_shape shape;
    numbers q, k, v, g, beta, dout, state, dlast;

    index_t tokens() const { return offsets.back(); }
    index_t rows() const { return std::ssize(g) / shape.value_heads; } ///< of the tensors, `tokens` at least
    index_t sequences() const { return std::ssize(offsets) - 1; }
    index_t keys() const { return shape.key_heads * shape.key_dim; }
    index_t values() const { return shape.value_heads * shape.value_dim; }
    index_t state_size() const { return values() * shape.key_dim; } ///< of one sequence
};

template <class T>
problem make(std::vector<index_t> const& lengths, index_t key_heads, index_t group, index_t key_dim, index_t value_dim,
             kind what, std::uint64_t seed) {
    problem p;
    for (index_t const length : lengths) p.offsets.push_back(p.offsets.back() + length);
    p.shape = {key_heads, key_heads * group, key_dim, value_dim};
    support::splitmix random(seed);
    auto const uniform = [&](index_t count, double scale) { return on_ranks::uniform<double>(random, count, scale); };
    auto const normalised = [&] {
        numbers x = uniform(p.tokens() * p.keys(), 1);
        for (index_t i = 0; i < p.tokens() * key_heads; ++i) {
            double* const row = x.data() + i * key_dim;
            double squares = 1e-12;
            for (index_t d = 0; d < key_dim; ++d) {
                if (what == kind::equal_keys) row[d] = std::cos(static_cast<double>(d)) + 0.02 * row[d];
                if (what == kind::same_keys) row[d] = std::cos(static_cast<double>(d));
                squares += row[d] * row[d];
            }
            for (index_t d = 0; d < key_dim; ++d) row[d] /= std::sqrt(squares);
        }
        return widen(convert<T>(x));
    };
    p.q = normalised();
    p.k = normalised();
    p.v = widen(convert<T>(uniform(p.tokens() * p.values(), 2)));
    p.dout = widen(convert<T>(uniform(p.tokens() * p.values(), 2)));
    p.g = uniform(p.tokens() * p.shape.value_heads, 1);
    p.beta = uniform(p.tokens() * p.shape.value_heads, 1);
    for (double& g : p.g) switch (what) {
        case kind::no_decay:
        case kind::equal_keys:
        case kind::same_keys:
        case kind::beta_2: g = 0; break;
        case kind::strong: g = 10 * (g - 1); break;
        case kind::slow: g = 1e-5 * (g - 1); break;
        case kind::spikes: g = g > 0.96 ? -100 : 0; break;
        case kind::never: g = g > 0.9 ? -INFINITY : 0.05 * (g - 1); break;
        default: g = static_cast<double>(static_cast<float>(0.05 * (g - 1)));
        }
    for (double& b : p.beta)
        b = what == kind::beta_2        ? static_cast<double>(1.999f)
            : what == kind::beta_0      ? 0
            : what == kind::beta_1      ? 1
            : what == kind::beta_0_or_1 ? b > 0
                                        : static_cast<double>(static_cast<float>(0.5 + 0.5 * b));
    index_t const states = p.sequences() * p.shape.value_heads * key_dim * value_dim;
    p.state = widen(convert<float>(uniform(states, 0.3)));
    p.dlast = widen(convert<float>(uniform(states, 1)));
    p.g = widen(convert<float>(p.g));
    return p;
}

/// Outputs and gradients; of a forward alone the gradients are empty, and dbeta where there is no beta.
struct results {
    numbers o, last, dq, dk, dv, dg, dbeta, dstate;
    delta_rule_path path = delta_rule_path::plain;
};

/// What a value head of a sequence has of a problem's tensors.
class head_of {
public:
    head_of(problem const& p, index_t sequence, index_t head)
        : shape_(p.shape), head_(head), begin_(p.offsets[static_cast<std::size_t>(sequence)]),
          count_(p.offsets[static_cast<std::size_t>(sequence + 1)] - begin_),
          state_((sequence * shape_.value_heads + head) * shape_.key_dim * shape_.value_dim) {}

    auto key(auto& x) const {
        return view(x, shape_.key_heads, head_ * shape_.key_heads / shape_.value_heads, shape_.key_dim);
    }
    auto value(auto& x) const { return view(x, shape_.value_heads, head_, shape_.value_dim); }
    auto gate(auto& x) const { return view(x, shape_.value_heads, head_, 1); }
    auto state(auto& x) const { return rows(x.data() + state_, shape_.key_dim, shape_.value_dim); }

private:
    auto view(auto& x, index_t heads, index_t head, index_t dim) const {
        return rows(x.data() + (begin_ * heads + head) * dim, count_, dim, heads * dim);
    }

    gated_delta_rule_shape const& shape_;
    index_t head_, begin_, count_, state_;
};

/// Returns what `run(head_of, results)` makes for every head of every sequence, one after the other. Before, states and
/// their gradients are those given, all else is zero.
template <class F>
results on_host_by_heads(problem const& p, bool backward, F&& run) {
    results r;
    r.o.resize(p.v.size()), r.last = p.state;
    if (backward) {
        r.dq.resize(p.q.size()), r.dk.resize(p.k.size()), r.dv.resize(p.v.size());
        r.dg.resize(p.g.size()), r.dbeta.resize(p.beta.size());
        r.dstate = p.dlast;
    }
    for (index_t n = 0; n < p.sequences(); ++n)
        for (index_t h = 0; h < p.shape.value_heads; ++h) run(head_of(p, n, h), r);
    return r;
}

template <class T>
buffer<T> upload(numbers const& values) {
    auto const converted = convert<T>(values);
    return buffer<T>(std::span<T const>(converted));
}

template <class T>
std::span<T> all(buffer<T> const& b) {
    return {b.data(), static_cast<std::size_t>(b.size())};
}

/// A problem's inputs on a device.
template <class T>
struct device_problem {
    problem const& p;
    buffer<T> q = upload<T>(p.q), k = upload<T>(p.k), v = upload<T>(p.v), dout = upload<T>(p.dout);
    buffer<float> g = upload<float>(p.g), beta = upload<float>(p.beta), state = upload<float>(p.state),
                  dlast = upload<float>(p.dlast);
    buffer<index_t> offsets{std::span<index_t const>(p.offsets)}, first{std::span<index_t const>(p.first)};

    cpx::cuda::gated_delta_rule_input<T> decaying() const {
        return {keys(q), keys(k), values(v), gates(g), {}, all(offsets), all(state), all(first)};
    }
    cpx::cuda::gated_delta_rule_input<T> erasing(std::span<char> saved = {}) const {
        return {keys(q), keys(k), values(v), gates(g), gates(beta), all(offsets), all(state), all(first), {}, saved};
    }
    rows<T const> gradients() const { return values(dout); }

private:
    rows<T const> keys(buffer<T> const& x) const { return {x.data(), p.rows(), p.keys()}; }
    rows<T const> values(buffer<T> const& x) const { return {x.data(), p.rows(), p.values()}; }
    rows<float const> gates(buffer<float> const& x) const { return {x.data(), p.rows(), p.shape.value_heads}; }
};
/// Makes NaN of memory, every byte of it 0xff, in stream order.
template <class... B>
void poison(cudaStream_t stream, B const&... memory) {
    auto const fill = [&](void* to, std::size_t bytes) {
        if (bytes > 0) cpx::cuda::check(cudaMemsetAsync(to, 0xff, bytes, stream), "cudaMemsetAsync");
    };
    (fill(memory.data(), static_cast<std::size_t>(memory.size()) * sizeof(*memory.data())), ...);
}

template <class T>
buffer<T> poisoned(std::integral auto count) {
    buffer<T> made(static_cast<index_t>(count));
    poison(nullptr, made);
    cpx::cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return made;
}

inline void check_close(char const* name, numbers const& got, numbers const& expected, double most) {
    double const error = on_ranks::relative_error(got, expected);
    CHECK_MESSAGE(error <= most, std::string(name) << ": " << error << ", at most " << most);
}

/// Checks against the host: `rows_most` for what is rounded to T, `sums_most` for what is float, `gates_most` for the
/// gradients of the gates.
inline void check_close(results const& got, results const& expected, double rows_most, double sums_most,
                        double gates_most) {
    check_close("o", got.o, expected.o, rows_most);
    check_close("last", got.last, expected.last, sums_most);
    if (expected.dq.empty()) return;
    check_close("dq", got.dq, expected.dq, rows_most);
    check_close("dk", got.dk, expected.dk, rows_most);
    check_close("dv", got.dv, expected.dv, rows_most);
    check_close("dg", got.dg, expected.dg, gates_most);
    if (!expected.dbeta.empty()) check_close("dbeta", got.dbeta, expected.dbeta, gates_most);
    check_close("dstate", got.dstate, expected.dstate, sums_most);
}

/// What relative errors are at most: of outputs and states, of gradients, and of those of gates.
struct limits {
    double outputs, gradients, gates;
    friend constexpr limits operator*(double times, limits const& of) {
        return {times * of.outputs, times * of.gradients, times * of.gates};
    }
};
/// Those of roundings to T. Keys of fewer channels than 128 are more alike, those of fewer than 64 much more, where
/// that counts.
template <class T>
constexpr limits most_of(kind what, index_t key_dim) {
    double const by = finer<T>(what), few = by * (key_dim < 64 ? 1.5 : 1);
    bool const whole = key_dim == 128;
    if (is_hard(what)) return {few * 2e-2, by * (whole ? 2e-2 : 2.2e-2), few * 3e-2};
    return {by * 4.5e-3, by * (whole ? 4.7e-3 : 5.5e-3), by * (whole ? 6e-3 : 6.5e-3)};
}
inline void check_close(results const& got, results const& expected, limits const& most) {
    check_close("o", got.o, expected.o, most.outputs);
    check_close("last", got.last, expected.last, most.outputs);
    if (expected.dq.empty()) return;
    for (auto const& [name, tensor] :
         {std::pair("dq", &results::dq), {"dk", &results::dk}, {"dv", &results::dv}, {"dstate", &results::dstate}})
        check_close(name, got.*tensor, expected.*tensor, most.gradients);
    check_close("dg", got.dg, expected.dg, most.gates);
    if (!expected.dbeta.empty()) check_close("dbeta", got.dbeta, expected.dbeta, most.gates);
}
inline bool same_gradients(results const& a, results const& b) {
    return on_ranks::same_bits(a.dq, b.dq) && on_ranks::same_bits(a.dk, b.dk) && on_ranks::same_bits(a.dv, b.dv) &&
           on_ranks::same_bits(a.dg, b.dg) && on_ranks::same_bits(a.dbeta, b.dbeta) &&
           on_ranks::same_bits(a.dstate, b.dstate);
}

/// Makes NaN of all that a sequence has, its states among it.
inline void make_nan(problem& p, index_t sequence) {
    auto const fill = [&](numbers& x, index_t width, index_t first, index_t last) {
        if (!x.empty()) std::fill(x.begin() + width * first, x.begin() + width * last, NAN);
    };
    auto const first = p.offsets[static_cast<std::size_t>(sequence)],
               last = p.offsets[static_cast<std::size_t>(sequence + 1)];
    for (auto* const x : {&p.q, &p.k}) fill(*x, p.keys(), first, last);
    for (auto* const x : {&p.v, &p.dout}) fill(*x, p.values(), first, last);
    for (auto* const x : {&p.g, &p.beta}) fill(*x, p.shape.value_heads, first, last);
    for (auto* const x : {&p.state, &p.dlast}) fill(*x, p.state_size(), sequence, sequence + 1);
}
/// Checks that all sequences but one, which holds NaN, have the same bits; of a forward alone, those of outputs and
/// states.
inline void check_others(problem const& p, index_t sequence, results const& got, results const& expected) {
    CHECK(got.path == expected.path);
    CHECK(std::ranges::any_of(got.o.empty() ? got.dv : got.o, [](double e) { return std::isnan(e); }));
    auto const same = [&](char const* name, numbers results::*of, index_t width, index_t first, index_t last) {
        auto const &a = got.*of, &b = expected.*of;
        bool const none = a.empty() && b.empty();
        bool const alike = a.size() == b.size() && (none || on_ranks::same_rows(a, b, width, first, last));
        CHECK_MESSAGE(alike, std::string(name));
    };
    for (index_t n = 0; n < p.sequences(); ++n) {
        if (n == sequence) continue;
        index_t const first = p.offsets[static_cast<std::size_t>(n)], last = p.offsets[static_cast<std::size_t>(n + 1)];
        same("o", &results::o, p.values(), first, last), same("last", &results::last, p.state_size(), n, n + 1);
        same("dq", &results::dq, p.keys(), first, last), same("dk", &results::dk, p.keys(), first, last);
        same("dv", &results::dv, p.values(), first, last), same("dg", &results::dg, p.shape.value_heads, first, last);
        same("dbeta", &results::dbeta, p.shape.value_heads, first, last);
        same("dstate", &results::dstate, p.state_size(), n, n + 1);
    }
}

/// The rows of a tensor of `width`.
inline numbers slice(numbers const& whole, index_t width, index_t first, index_t last) {
    return on_ranks::slice(whole, width, first, last);
}
/// Rows of a problem of one sequence, as a segment of that.
inline problem segment_of(problem p, index_t first, index_t last) {
    p.offsets = {0, last - first};
    p.first = {first};
    for (auto* const x : {&p.q, &p.k}) *x = slice(*x, p.keys(), first, last);
    for (auto* const x : {&p.v, &p.dout}) *x = slice(*x, p.values(), first, last);
    for (auto* const x : {&p.g, &p.beta})
        if (!x->empty()) *x = slice(*x, p.shape.value_heads, first, last);
    return p;
}

/// Checks that a sequence of 500 tokens, cut after 192 of them, has the bits of the whole where the state, and the
/// gradient of it, are handed on. `run(problem)`: the results of a forward and a backward.
template <class T, class F>
void check_cut(problem const& p, F&& run) {
    REQUIRE(p.offsets == std::vector<index_t>{0, 500});
    results const whole = run(p);
    CHECK(whole.path == core_path<T>());
    auto start = segment_of(p, 0, 192), rest = segment_of(p, 192, 500);
    rest.state = run(start).last;
    results const after = run(rest);
    start.dlast = after.dstate;
    results const before = run(start);
    CHECK(on_ranks::same_bits(after.last, whole.last));
    CHECK(on_ranks::same_bits(before.dstate, whole.dstate));
    auto const same = [&](numbers results::*of, index_t width) {
        CHECK(on_ranks::same_bits(before.*of, slice(whole.*of, width, 0, 192)));
        CHECK(on_ranks::same_bits(after.*of, slice(whole.*of, width, 192, 500)));
    };
    same(&results::o, p.values()), same(&results::dv, p.values());
    same(&results::dq, p.keys()), same(&results::dk, p.keys());
    same(&results::dg, p.shape.value_heads);
    if (!whole.dbeta.empty()) same(&results::dbeta, p.shape.value_heads);
}

} // namespace packed_heads
