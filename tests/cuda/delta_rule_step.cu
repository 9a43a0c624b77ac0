// SPDX-License-Identifier: Apache-2.0
#include <cpx/cuda/delta_rule_step.hpp>

#include <cpx/ops/local/delta_rule.hpp>
#include <cpx/ops/local/linear_attention.hpp>

#include "../../harness/graph.hpp"
#include "gpus.hpp"
#include "packed_heads.hpp"

#include <support/rejects.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace {

using namespace packed_heads;
namespace gpu = cpx::cuda;

/// Rows of a token each, and more states than rows.
template <class T>
problem tokens(index_t count, gated_delta_rule_shape const& s, kind what, std::uint64_t seed) {
    return make<T>(std::vector<index_t>(static_cast<std::size_t>(count), 1), s.key_heads, s.value_heads / s.key_heads,
                   s.key_dim, s.value_dim, what, seed);
}

/// A step on the host: of row i from state i to state i.
numbers on_host(problem const& p, bool erases, numbers& states) {
    numbers o(p.v.size());
    auto const& s = p.shape;
    cpx::head_decay_attention const decay{{s.key_heads, s.value_heads, s.key_dim, s.value_dim}, {.scale = s.scale}};
    for (index_t i = 0; i < p.tokens(); ++i)
        for (index_t h = 0; h < s.value_heads; ++h) {
            head_of const of(p, i, h);
            rows const state = of.state(states);
            if (erases)
                cpx::delta_rule_forward<double>(of.key(p.q), of.key(p.k), of.value(p.v), of.gate(p.g), of.gate(p.beta),
                                                0, {.qk_l2norm = false, .scale = s.scale}, state, of.value(o));
            else
                decay.forward(std::array<rows<double const>, 4>{of.key(p.q), of.key(p.k), of.value(p.v), of.gate(p.g)},
                              0, state, of.value(o));
        }
    return o;
}

/// A step on a device, of outputs that hold NaN; slots: none if empty.
template <class T>
numbers on_gpu(problem const& p, bool erases, buffer<float> const& states, std::vector<index_t> const& slots) {
    gpu::stream const stream;
    buffer<T> const q = upload<T>(p.q), k = upload<T>(p.k), v = upload<T>(p.v), o = poisoned<T>(p.v.size());
    buffer<float> const g = upload<float>(p.g), beta = upload<float>(p.beta);
    buffer<index_t> const there{std::span<index_t const>(slots)};
    index_t const n = p.tokens(), heads = p.shape.value_heads;
    gpu::gated_delta_rule_step_input<T> const in{{q.data(), n, p.keys()},   {k.data(), n, p.keys()},
                                                 {v.data(), n, p.values()}, {g.data(), n, heads},
                                                 {beta.data(), n, heads},   all(there)};
    rows<T> const out(o.data(), n, p.values());
    if (erases)
        gpu::gated_delta_rule_step<T>(p.shape, in, out, all(states), stream);
    else
        gpu::gated_delta_rule_step<T, gpu::erases::no>(p.shape, {in.q, in.k, in.v, in.g, {}, in.slots}, out,
                                                       all(states), stream);
    return widen(o.read());
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE_TEMPLATE("steps of decoding are the host's, one after the other, of every size", T, float, __nv_bfloat16,
                       __half) {
        if (!has_gpus()) return;
        double const rounding = std::is_same_v<T, float> ? 3e-6 : std::is_same_v<T, __half> ? 4e-4 : 2.5e-3;
        std::uint64_t seed = 0;
        for (auto const& s : {gated_delta_rule_shape{2, 4, 40, 24},
                              {1, 3, 128, 128},
                              {1, 1, 200, 33},
                              {3, 3, 1, 1},
                              {1, 2, 256, 132},
                              {2, 2, 130, 5, 1.0}})
            for (bool const erases : {true, false})
                for (kind const what : {kind::mild, kind::never, kind::beta_2}) {
                    CAPTURE(s.key_dim);
                    CAPTURE(erases);
                    auto p = tokens<T>(11, s, what, ++seed);
                    auto states = p.state;
                    buffer<float> const there = upload<float>(states);
                    for (int step = 0; step < 3; ++step) {
                        p = tokens<T>(11, s, what, ++seed);
                        p.shape.scale = s.scale;
                        auto const expected = on_host(p, erases, states);
                        check_close("o", on_gpu<T>(p, erases, there, {}), expected, rounding);
                        check_close("states", widen(there.read()), states, 3e-6);
                    }
                }
    }

    TEST_CASE("a row's state is where its slot says, one without a slot is left alone, and neighbours change no bit") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        gated_delta_rule_shape const shape{2, 4, 128, 128};
        auto p = tokens<T>(6, shape, kind::mild, 5);
        constexpr index_t width = 4 * 128 * 128, values = 4 * 128;
        buffer<float> const dense = upload<float>(p.state);
        auto const expected = on_gpu<T>(p, true, dense, {});
        auto const stepped = widen(dense.read());
        std::vector<index_t> const slots{7, 0, -1, 3, 9, 4};
        numbers pool(10 * width, 0.25);
        for (std::size_t i = 0; i < slots.size(); ++i)
            if (slots[i] >= 0)
                std::copy_n(p.state.begin() + static_cast<index_t>(i) * width, width, pool.begin() + slots[i] * width);
        buffer<float> const there = upload<float>(pool);
        std::fill_n(p.v.begin() + 4 * values, values, NAN); // of the fifth row, which then has no other's bits
        auto const o = on_gpu<T>(p, true, there, slots);
        auto const after = widen(there.read());
        for (index_t i : {0, 1, 3, 5}) {
            CHECK(on_ranks::same_rows(o, expected, values, i, i + 1));
            index_t const slot = slots[static_cast<std::size_t>(i)];
            CHECK(on_ranks::same_bits(slice(after, width, slot, slot + 1), slice(stepped, width, i, i + 1)));
        }
        CHECK(std::isnan(o[2 * values])); // as it was
        for (index_t const slot : {1, 2, 5, 6, 8})
            CHECK(on_ranks::same_bits(slice(after, width, slot, slot + 1), slice(pool, width, slot, slot + 1)));
    }

    TEST_CASE("a captured step of decoding is replayed with other rows and slots") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        gated_delta_rule_shape const shape{2, 4, 128, 128};
        auto p = tokens<T>(5, shape, kind::mild, 6);
        numbers const pool = tokens<T>(8, shape, kind::mild, 7).state;
        buffer<float> const states = upload<float>(pool), direct = upload<float>(pool);
        device_problem<T> there{p};
        buffer<T> const o = poisoned<T>(p.v.size());
        std::vector<index_t> slots{0, 1, 2, 3, 4};
        buffer<index_t> slots_there{std::span<index_t const>(slots)};
        auto const in = there.erasing();
        gpu::stream const stream;
        harness::graph const graph(stream, [&] {
            gpu::gated_delta_rule_step<T>(p.shape, {in.q, in.k, in.v, in.g, in.beta, all(slots_there)},
                                          rows<T>(o.data(), 5, p.values()), all(states), stream);
        });
        for (auto const& next : {std::vector<index_t>{7, 0, -1, 3, 5}, {6, 7, 1, -1, 0}, {0, 1, 2, 3, 4}}) {
            p = tokens<T>(5, shape, kind::mild, static_cast<std::uint64_t>(8 + next[0]));
            there.q.write(convert<T>(p.q)), there.k.write(convert<T>(p.k)), there.v.write(convert<T>(p.v));
            there.g.write(convert<float>(p.g)), there.beta.write(convert<float>(p.beta)), slots_there.write(next);
            poison(stream, o);
            graph.launch(stream);
            stream.synchronize();
            auto const expected = on_gpu<T>(p, true, direct, next), got = widen(o.read());
            for (index_t row = 0; row < 5; ++row)
                if (next[static_cast<std::size_t>(row)] >= 0)
                    CHECK(on_ranks::same_rows(got, expected, p.values(), row, row + 1));
                else
                    CHECK(std::ranges::all_of(slice(got, p.values(), row, row + 1),
                                              [](double e) { return std::isnan(e); })); // as it was
            CHECK(on_ranks::same_bits(widen(states.read()), widen(direct.read())));
        }
    }

    TEST_CASE("a step of decoding refuses what does not fit before anything is launched") {
        if (!has_gpus()) return;
        using support::rejects;
        auto const p = tokens<float>(3, {1, 2, 8, 8}, kind::mild, 1);
        buffer<float> const states = upload<float>(p.state), few = upload<float>(numbers(5));
        rejects({"delta_rule_step.cu", "cuda::gated_delta_rule_step: size of states: expected 384, got 5"},
                [&] { on_gpu<float>(p, true, few, {}); });
        rejects({"cuda::gated_delta_rule_step: size of states"}, [&] { on_gpu<float>(p, false, few, {0, 0, 0}); });
        rejects({"size of slots: expected 3, got 2"}, [&] { on_gpu<float>(p, true, states, {0, 1}); });
        auto other = p;
        other.shape.key_dim = 7;
        rejects({"gated_delta_rule_step: shape of q"}, [&] {
            gpu::gated_delta_rule_step<float>(other.shape, {{states.data(), 3, 8}, {states.data(), 3, 8}, {}, {}, {}},
                                              {}, all(states), nullptr);
        });
        buffer<float> const x(48);
        rows<float> const keys(x.data(), 3, 8), values(x.data(), 3, 16), gates(x.data(), 3, 2);
        rejects({"overlap of o and q"}, [&] {
            gpu::gated_delta_rule_step<float>(p.shape, {keys, keys, values, gates, gates}, values, all(states),
                                              nullptr);
        });
    }
}
