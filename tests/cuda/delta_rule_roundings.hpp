// SPDX-License-Identifier: Apache-2.0
// What roundings alone make results of the gated delta rule be off by, and how much more kernels' may be.
#pragma once

#include <doctest/doctest.h>

#include "delta_rule_emulator.hpp"
#include "packed_heads.hpp"

#include <ops/on_ranks.hpp>
#include <support/random.hpp>

#include <cmath>
#include <cstddef>
#include <future>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace delta_rule_roundings {

using namespace packed_heads;

/// What operands of T are to the emulator.
template <class T>
inline constexpr emulator::format format_of = std::is_same_v<T, __half> ? emulator::half : emulator::bfloat16;

/// How sequences are cut, and how states before the pieces are made: walked along; of steps of stretches, of a forward
/// on one GPU, whose final states are walked, as all of its backward is; or of steps of segments, also on the way back.
/// Stretches of segments, whose steps are rounded like these, are left out.
struct cuts {
    std::vector<std::vector<emulator::Index>> of = {}; ///< where pieces begin, but first ones, as rows of sequences
    enum { walked, stretches, segments } states = walked;
};

/// What tensor cores compute, but with exact sums; gradients of q and k are rounded after heads are added up.
template <class T>
results emulated(problem const& p, cuts const& at = {}) {
    auto const& s = p.shape;
    results r{.o = numbers(p.v.size()),
              .last = p.state,
              .dq = numbers(p.q.size()),
              .dk = numbers(p.q.size()),
              .dv = numbers(p.v.size()),
              .dg = numbers(p.g.size()),
              .dbeta = numbers(p.g.size()),
              .dstate = p.dlast};
    using strides = Eigen::OuterStride<>;
    struct of_head {
        index_t sequence, head;
        std::future<emulator::results> made;
    };
    std::vector<of_head> heads;
    // Calls `f(key, value, gate, state)` with views of a head's part of such a tensor, or of one of p.
    auto const with_views = [&](index_t n, index_t h, auto&& f) {
        auto const number = static_cast<std::size_t>(n);
        index_t const begin = p.offsets[number], count = p.offsets[number + 1] - begin;
        index_t const state = (n * s.value_heads + h) * s.key_dim * s.value_dim;
        auto const view = [&](auto& x, index_t of, index_t head, index_t dim) {
            using element = std::conditional_t<std::is_const_v<std::remove_reference_t<decltype(x)>>,
                                               emulator::matrix const, emulator::matrix>;
            return Eigen::Map<element, 0, strides>(x.data() + (begin * of + head) * dim, count, dim, strides(of * dim));
        };
        f([&](auto& x) { return view(x, s.key_heads, h * s.key_heads / s.value_heads, s.key_dim); },
          [&](auto& x) { return view(x, s.value_heads, h, s.value_dim); },
          [&](auto& x) { return view(x, s.value_heads, h, 1); },
          [&](auto& x) { return Eigen::Map<emulator::matrix>(x.data() + state, s.key_dim, s.value_dim); });
    };
    for (index_t n = 0; n < p.sequences(); ++n)
        for (index_t h = 0; h < s.value_heads; ++h)
            with_views(n, h, [&](auto const& key, auto const& value, auto const& gate, auto const& state) {
                emulator::head in{
                    key(p.q),      key(p.k),      value(p.v),
                    value(p.dout), state(r.last), state(r.dstate),
                    gate(p.g),     gate(p.beta),  s.scale.value_or(1 / std::sqrt(static_cast<double>(s.key_dim)))};
                auto const number = static_cast<std::size_t>(n);
                in.first = p.first.empty() ? 0 : p.first[number];
                in.round = format_of<T>;
                if (!at.of.empty()) in.cuts = at.of[number];
                in.scan = at.states != cuts::walked;
                heads.push_back({n, h, std::async(std::launch::async, [in] { return emulator::run(in); })});
            });
    for (of_head& of : heads)
        with_views(of.sequence, of.head, [&](auto const& key, auto const& value, auto const& gate, auto const& state) {
            auto const got = of.made.get();
            value(r.o) = got.o;
            state(r.last) = got.last;
            key(r.dq) += got.dq;
            key(r.dk) += got.dk;
            value(r.dv) = got.dv;
            gate(r.dg) = got.dg;
            gate(r.dbeta) = got.dbeta;
            state(r.dstate) = got.dstate;
        });
    r.dq = widen(convert<T>(r.dq));
    r.dk = widen(convert<T>(r.dk));
    return r;
}

/// Returns the root mean square of what roundings alone make dg be off by, of 8 problems that are this one but for a
/// seventh digit: dg is a running sum of few terms that count, and in one of these it may be off by 0.8 or 1.3 times so
/// much.
template <class T>
double usual_error_of_gates(problem const& p, results const& exact, cuts const& at = {}) {
    support::splitmix random(11);
    double squares = 0;
    for (int turn = 0; turn < 8; ++turn) {
        auto other = p;
        for (numbers* const x : {&other.q, &other.k, &other.v, &other.dout})
            for (double& e : *x) e *= 1 + 2e-7 * on_ranks::uniform<double>(random, 1, 1)[0];
        double const error = on_ranks::relative_error(emulated<T>(other, at).dg, exact.dg);
        squares += error * error / 8;
    }
    return std::sqrt(squares);
}

/// Checks that errors are at most 1.15 times those of the roundings alone, and what float sums add: where beta is 0
/// nothing that makes states is rounded. Of a forward alone, those of outputs and states. Returns how many times as
/// large dg's is.
template <class T>
double check_roundings(problem const& p, results const& got, results const& exact, cuts const& at = {}) {
    bool const of_outputs = at.states == cuts::stretches; // these cut nothing else
    cuts const of_others = of_outputs ? cuts{} : at;
    results rounded = emulated<T>(p, of_others);
    if (of_outputs) rounded.o = emulated<T>(p, at).o;
    double times = 0;
    auto const compare = [&](char const* name, numbers results::*tensor) {
        if ((got.*tensor).empty() && (exact.*tensor).empty()) return;
        double const error = on_ranks::relative_error(got.*tensor, exact.*tensor);
        double least = on_ranks::relative_error(rounded.*tensor, exact.*tensor);
        times = error / least;
        if (times > 1.15 && tensor == &results::dg) least = usual_error_of_gates<T>(p, exact, of_others);
        REQUIRE(std::isfinite(least));
        CHECK_MESSAGE(error <= 1.15 * least + 1e-7, std::string(name)
                                                        << ": " << error << ", by its roundings " << least);
    };
    for (auto const& [name, tensor] : {std::pair("o", &results::o),
                                       {"last", &results::last},
                                       {"dq", &results::dq},
                                       {"dk", &results::dk},
                                       {"dv", &results::dv},
                                       {"dstate", &results::dstate},
                                       {"dbeta", &results::dbeta},
                                       {"dg", &results::dg}})
        compare(name, tensor);
    return times;
}

} // namespace delta_rule_roundings
