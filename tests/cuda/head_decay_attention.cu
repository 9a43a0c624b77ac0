// SPDX-License-Identifier: Apache-2.0
#include <cpx/cuda/delta_rule_fold.hpp>
#include <cpx/cuda/gated_delta_rule.hpp>

#include <cpx/ops/local/linear_attention.hpp>

#include "gpus.hpp"
#include "packed_heads.hpp"

#include <support/rejects.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace packed_heads;
namespace gpu = cpx::cuda;

/// As `make`, with queries and keys that are not of norm 1; nothing reads beta.
template <class T>
problem unnormalised(std::vector<index_t> const& lengths, index_t key_heads, index_t group, index_t key_dim,
                     index_t value_dim, kind what, std::uint64_t seed) {
    auto p = make<T>(lengths, key_heads, group, key_dim, value_dim, what, seed);
    for (double& x : p.q) x *= 4;
    for (double& x : p.k) x *= 2;
    p.beta.clear();
    return p;
}

results on_host(problem const& p, bool backward) {
    auto const& s = p.shape;
    cpx::head_decay_attention const model{{s.key_heads, s.value_heads, s.key_dim, s.value_dim}, {.scale = s.scale}};
    using in = rows<double const>;
    numbers of_q(p.q.size()), of_k(p.k.size()); // of one head
    return on_host_by_heads(p, backward, [&](head_of const& of, results& r) {
        std::array<in, 4> const x{of.key(p.q), of.key(p.k), of.value(p.v), of.gate(p.g)};
        model.forward(x, 0, of.state(r.last), of.value(r.o));
        if (!backward) return;
        model.backward(x, 0, in(of.state(p.state)), in(of.value(p.dout)), of.state(r.dstate),
                       std::array{of.key(of_q), of.key(of_k), of.value(r.dv), of.gate(r.dg)});
        for (auto const& [to, from] : {std::pair(of.key(r.dq), of.key(of_q)), {of.key(r.dk), of.key(of_k)}})
            for (index_t i = 0; i < to.count(); ++i)
                for (index_t d = 0; d < s.key_dim; ++d) to(i, d) += from(i, d);
    });
}

template <class T>
results on_gpu(problem const& p, bool backward) {
    gpu::stream const stream;
    device_problem<T> const there{p};
    auto const in = there.decaying();
    index_t const tokens = p.tokens();
    auto const o = poisoned<T>(p.v.size());
    auto const last = poisoned<float>(p.state.size());
    auto const space =
        poisoned<char>(gpu::gated_delta_rule_workspace<T, gpu::erases::no>(p.shape, tokens, p.sequences()));
    results r;
    r.path = gpu::gated_delta_rule<T, gpu::erases::no>(p.shape, in, rows<T>(o.data(), tokens, p.values()), all(last),
                                                       all(space), stream);
    r.o = widen(o.read());
    r.last = widen(last.read());
    if (!backward) return r;
    auto const dq = poisoned<T>(p.q.size()), dk = poisoned<T>(p.q.size()), dv = poisoned<T>(p.v.size());
    auto const dg = poisoned<float>(p.g.size()), dstate = poisoned<float>(p.state.size());
    auto const more =
        poisoned<char>(gpu::gated_delta_rule_backward_workspace<T, gpu::erases::no>(p.shape, tokens, p.sequences()));
    auto const path =
        gpu::gated_delta_rule_backward<T, gpu::erases::no>(p.shape, in, there.gradients(), all(there.dlast),
                                                           {{dq.data(), tokens, p.keys()},
                                                            {dk.data(), tokens, p.keys()},
                                                            {dv.data(), tokens, p.values()},
                                                            {dg.data(), tokens, p.shape.value_heads},
                                                            {},
                                                            all(dstate)},
                                                           all(more), stream);
    CHECK(path == r.path);
    r.dq = widen(dq.read());
    r.dk = widen(dk.read());
    r.dv = widen(dv.read());
    r.dg = widen(dg.read());
    r.dstate = widen(dstate.read());
    return r;
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE_TEMPLATE("a decay a head and its gradients are the host's, token by token, of every size", T, float,
                       __nv_bfloat16) {
        if (!has_gpus()) return;
        double const rounding = std::is_same_v<T, float> ? 6e-6 : 2.5e-3;
        struct size {
            index_t key_heads, group, key_dim, value_dim;
        };
        std::uint64_t seed = 0;
        for (size const s : {size{2, 2, 40, 24}, size{1, 3, 128, 128}, size{1, 1, 200, 33}, size{3, 1, 1, 1}})
            for (kind const what : {kind::mild, kind::strong, kind::never, kind::no_decay}) {
                CAPTURE(s.key_dim);
                CAPTURE(static_cast<int>(what));
                auto p =
                    unnormalised<T>({70, 0, 1, 130, 64}, s.key_heads, s.group, s.key_dim, s.value_dim, what, ++seed);
                p.shape.path = delta_rule_path::plain;
                p.shape.scale = seed % 2 ? 0 : 1; // of lightning attention
                check_close(on_gpu<T>(p, true), on_host(p, true), rounding, 6e-6, 6e-6);
            }
    }

    TEST_CASE_TEMPLATE("a decay a head of heads of 16 bits and its gradients are the host's, whatever the gates", T,
                       __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        for (head_dims const dim : core_dims) {
            index_t const key = dim.key, value = dim.value;
            CAPTURE(key);
            CAPTURE(value);
            for (kind const what : {kind::mild, kind::slow, kind::no_decay, kind::strong, kind::spikes, kind::never})
                for (bool const few : {true, false}) {
                    CAPTURE(static_cast<int>(what));
                    auto p = few ? unnormalised<T>({0, 63, 65, 128, 1, 0}, 2, 3, key, value, what, 8)
                                 : unnormalised<T>({200, 311, 0, 64, 513}, 1, 2, key, value, what, 7);
                    if (few) p.first = {0, 100, 1, 63, 64, 5};
                    auto const got = on_gpu<T>(p, true);
                    CHECK(got.path == core_path<T>());
                    check_close(got, on_host(p, true), most_of<T>(what, key));
                }
        }
    }

    TEST_CASE("states that half cannot hold make outputs infinite or NaN, and are float on the plain path") {
        if (!has_gpus()) return;
        using T = __half;
        auto p = unnormalised<T>({300}, 1, 1, 64, 64, kind::no_decay, 5);
        std::ranges::fill(p.k, 1), std::ranges::fill(p.q, 0x1p-6), std::ranges::fill(p.v, 512); // up to 153600
        auto const expected = on_host(p, false);
        auto const got = on_gpu<T>(p, false);
        CHECK(got.path == core_path<T>());
        auto const finite = [](numbers const& x) {
            return std::ranges::all_of(x, [](double e) { return std::isfinite(e); });
        };
        CHECK(finite(got.o) == (got.path == delta_rule_path::plain));
        check_close("o of a chunk", slice(got.o, 64, 0, 64), slice(expected.o, 64, 0, 64), 1e-3);
        p.shape.path = delta_rule_path::plain;
        check_close("o", on_gpu<T>(p, false).o, expected.o, 1e-3);
    }

    TEST_CASE("a decay a head of sequences of every length up to 130") {
        if (!has_gpus()) return;
        std::vector<index_t> lengths;
        for (index_t i = 0; i <= 130; ++i) lengths.push_back(i);
        for (head_dims const dim : core_dims) {
            index_t const key = dim.key, value = dim.value;
            CAPTURE(key);
            CAPTURE(value);
            auto const p = unnormalised<__nv_bfloat16>(lengths, 1, 1, key, value, kind::mild, 3);
            check_close(on_gpu<__nv_bfloat16>(p, true), on_host(p, true), 4.5e-3, 4.5e-3, 4.5e-3);
        }
    }

    TEST_CASE("neither the stretches of a sequence nor another one that holds NaN change a bit of a decay a head") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        for (head_dims const dim : core_dims) {
            index_t const key = dim.key, value = dim.value;
            CAPTURE(key);
            CAPTURE(value);
            auto p = unnormalised<T>({1100, 77, 300}, 2, 2, key, value, kind::mild, 11);
            auto const whole = on_gpu<T>(p, true);
            CHECK(whole.path == core_path());
            CHECK(same_gradients(on_gpu<T>(p, true), whole));
            for (index_t const stretch : {1, 3, 16, 1000}) {
                CAPTURE(stretch);
                p.shape.stretch = stretch;
                auto const cut = on_gpu<T>(p, false);
                CHECK(on_ranks::same_bits(cut.o, whole.o));
                CHECK(on_ranks::same_bits(cut.last, whole.last));
            }
            p.shape.stretch = 3;
            for (bool const scan : {false, true}) {
                CAPTURE(scan);
                p.shape.scan = scan;
                auto const alone = scan ? on_gpu<T>(p, true) : whole;
                auto beside = p;
                make_nan(beside, 1);
                check_others(p, 1, on_gpu<T>(beside, true), alone);
            }
        }
    }

    TEST_CASE_TEMPLATE(
        "stretches of a decay a head that are folded beside each other, and joined, make the host's outputs", T,
        __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        for (head_dims const dim : core_dims) {
            index_t const key = dim.key, value = dim.value;
            CAPTURE(key);
            CAPTURE(value);
            for (kind const what : {kind::mild, kind::no_decay, kind::strong, kind::never}) {
                CAPTURE(static_cast<int>(what));
                auto p = unnormalised<T>({1100, 0, 77, 513}, 2, 2, key, value, what, 17);
                p.shape.scan = true;
                p.shape.stretch = 3;
                auto const got = on_gpu<T>(p, false);
                check_close(got, on_host(p, false), finer<T>() * 4.7e-3, finer<T>() * 4.7e-3, 0);
                CHECK(on_ranks::same_bits(got.o, on_gpu<T>(p, false).o));
            }
        }
    }

    TEST_CASE(
        "to cut a sequence with a decay a head at a multiple of 64 tokens and to hand the state on changes no bit") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        for (head_dims const dim : core_dims) {
            index_t const key = dim.key, value = dim.value;
            CAPTURE(key);
            CAPTURE(value);
            check_cut<T>(unnormalised<T>({500}, 1, 2, key, value, kind::slow, 13),
                         [](problem const& of) { return on_gpu<T>(of, true); });
        }
    }

    TEST_CASE_TEMPLATE("what segments with a decay a head make of states and of their gradients is the host's", T,
                       float, __nv_bfloat16) {
        if (!has_gpus()) return;
        for (head_dims const dim : core_dims)
            for (index_t const stretch : {0, 2}) {
                index_t const key = dim.key, value = dim.value;
                CAPTURE(key);
                CAPTURE(value);
                auto p = unnormalised<T>({500}, 1, 2, key, value, kind::mild, 19);
                auto const expected = on_host(p, true);
                p.offsets = {0, 30, 30, 330, 500}; // of which one is empty
                p.first = {0, 30, 30, 330};
                p.shape.stretch = stretch;
                constexpr index_t heads = 2;
                index_t const size = key * value;
                gpu::stream const stream;
                device_problem<T> const there{p};
                auto const maps = poisoned<float>(4 * heads),
                           ends = poisoned<float>(static_cast<std::size_t>(4 * heads * size)),
                           back = poisoned<float>(static_cast<std::size_t>(4 * heads * size));
                auto const space =
                    poisoned<char>(gpu::gated_delta_rule_fold_workspace<T, gpu::erases::no>(p.shape, 500, 4));
                auto in = there.decaying();
                in.state = {};
                auto const path = gpu::gated_delta_rule_fold<T, gpu::erases::no>(p.shape, in, all(maps), all(ends),
                                                                                 all(space), stream);
                if (std::is_same_v<T, __nv_bfloat16>) CHECK(path == core_path());
                CHECK(gpu::gated_delta_rule_backward_fold<T, gpu::erases::no>(p.shape, in, there.gradients(), all(back),
                                                                              all(space), stream) == path);
                auto const m = widen(maps.read()), e = widen(ends.read()), d = widen(back.read());
                numbers state = p.state, dstate = p.dlast;
                for (index_t step = 0; step < 4 * heads; ++step) {
                    index_t const of_back = 4 * heads - 1 - step;
                    for (index_t i = 0; i < size; ++i) {
                        double& s = state[static_cast<std::size_t>(step % heads * size + i)];
                        s = m[static_cast<std::size_t>(step)] * s + e[static_cast<std::size_t>(step * size + i)];
                        double& ds = dstate[static_cast<std::size_t>(of_back % heads * size + i)];
                        ds =
                            m[static_cast<std::size_t>(of_back)] * ds + d[static_cast<std::size_t>(of_back * size + i)];
                    }
                }
                check_close("last", state, expected.last, 4.7e-3);
                check_close("dstate", dstate, expected.dstate, 4.7e-3);
            }
    }

    TEST_CASE("a decay a head refuses what does not fit before anything is launched") {
        if (!has_gpus()) return;
        auto const p = unnormalised<float>({10}, 1, 1, 8, 8, kind::mild, 1);
        auto const changed = [&](auto&& change) {
            problem other = p;
            change(other);
            return other;
        };
        using support::rejects;
        rejects({"cuda::gated_delta_rule_workspace: value heads", "a multiple of the key heads, 2"},
                [&] { on_gpu<float>(changed([](problem& o) { o.shape.key_heads = 2; }), false); });
        rejects({"key_dim", "from 1 to 256", "512"},
                [&] { on_gpu<float>(changed([](problem& o) { o.shape.key_dim = 512; }), false); });
        rejects({"size of state"}, [&] { on_gpu<float>(changed([](problem& o) { o.state.pop_back(); }), false); });
        device_problem<float> const there{p};
        buffer<float> const o(80), dk(80), dv(80), dg(10);
        rows<float> const to(o.data(), 10, 8);
        auto const space =
            poisoned<char>(gpu::gated_delta_rule_backward_workspace<float, gpu::erases::no>(p.shape, 10, 1));
        rejects({"bytes of workspace", "at least"},
                [&] { gpu::gated_delta_rule<float, gpu::erases::no>(p.shape, there.decaying(), to, {}, {}, nullptr); });
        rejects({"head_decay_attention.cu", "cuda::gated_delta_rule: overlap of o and v"}, [&] {
            gpu::gated_delta_rule<float, gpu::erases::no>(p.shape, there.decaying(), rows<float>(there.v.data(), 10, 8),
                                                          {}, all(space), nullptr);
        });
        rejects({"cuda::gated_delta_rule_backward: overlap of dq and dk"}, [&] {
            gpu::gated_delta_rule_backward<float, gpu::erases::no>(p.shape, there.decaying(), there.gradients(), {},
                                                                   {to, to, {dv.data(), 10, 8}, {dg.data(), 10, 1}},
                                                                   all(space), nullptr);
        });
        auto erasing = there.decaying();
        erasing.beta = erasing.g;
        rejects({"cuda::gated_delta_rule: beta: expected none, for nothing is erased"},
                [&] { gpu::gated_delta_rule<float, gpu::erases::no>(p.shape, erasing, to, {}, all(space), nullptr); });
        rejects({"cuda::gated_delta_rule_fold: size of maps: expected 1"}, [&] {
            gpu::gated_delta_rule_fold<float, gpu::erases::no>(p.shape, there.decaying(), all(dv), all(dk), all(space),
                                                               nullptr);
        });
    }
}
