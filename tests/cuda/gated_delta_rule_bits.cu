// SPDX-License-Identifier: Apache-2.0
#include "../../harness/graph.hpp"
#include "delta_rule_call.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

namespace {

using namespace packed_delta_rule;

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("steps of stretches are joined with the same bits by few blocks and by many") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        constexpr index_t each = 450;
        auto p = make<T>(std::vector<index_t>(9, each), 1, 2, 128, 128, kind::mild, 51);
        p.shape.scan = true, p.shape.stretch = 2; // four stretches; blocks of 8, 16 and 32 columns
        auto const all = on_gpu<T>(p, false);
        for (index_t const count : {1, 5}) {
            CAPTURE(count);
            auto some = p;
            some.offsets.resize(static_cast<std::size_t>(count + 1));
            for (auto* const x : {&some.q, &some.k}) *x = slice(*x, p.keys(), 0, count * each);
            for (auto* const x : {&some.v, &some.dout}) *x = slice(*x, p.values(), 0, count * each);
            for (auto* const x : {&some.g, &some.beta}) *x = slice(*x, p.shape.value_heads, 0, count * each);
            for (auto* const x : {&some.state, &some.dlast}) *x = slice(*x, p.state_size(), 0, count);
            auto const got = on_gpu<T>(some, false);
            CHECK(on_ranks::same_bits(got.o, slice(all.o, p.values(), 0, count * each)));
            CHECK(on_ranks::same_bits(got.last, slice(all.last, p.state_size(), 0, count)));
        }
    }

    TEST_CASE("rows of queries, keys and values that lie side by side make the bits of those apart") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        for (head_dims const dim : core_dims) {
            index_t const key = dim.key, value = dim.value;
            CAPTURE(key);
            CAPTURE(value);
            auto const p = make<T>({70, 0, 130, 64}, 2, 2, key, value, kind::mild, 27);
            auto const apart = on_gpu<T>(p, true);
            auto const together = on_gpu<T>(p, true, false, true);
            CHECK(together.path == core_path());
            CHECK(apart.path == core_path());
            CHECK(on_ranks::same_bits(together.o, apart.o));
            CHECK(on_ranks::same_bits(together.last, apart.last));
            CHECK(same_gradients(together, apart));
        }
    }

    TEST_CASE_TEMPLATE("a captured call is replayed with whatever packing is there", T, __nv_bfloat16, float) {
        if (!has_gpus()) return;
        auto p = make<T>({200, 0, 311, 64}, 1, 2, 128, 128, kind::mild, 26);
        for (bool const saves : {false, true})
            for (bool const scan : {false, true}) {
                CAPTURE(saves);
                CAPTURE(scan);
                p.shape.scan = scan, p.shape.stretch = scan ? 2 : 0;
                gpu::stream const stream;
                gpu_call<T> call(p, true, saves);
                harness::graph const graph(stream, [&] { call.run(stream); });
                std::vector<index_t> const elsewhere{0, 1, 128, 129, 575},
                    packings[] = {p.offsets, elsewhere, p.offsets};
                for (std::vector<index_t> const& offsets : packings) {
                    auto other = p;
                    other.offsets = offsets;
                    call.set(offsets);
                    call.poison(stream);
                    graph.launch(stream);
                    auto const got = call.read(), expected = on_gpu<T>(other, true, saves);
                    CHECK(same_gradients(got, expected));
                    CHECK(on_ranks::same_bits(got.o, expected.o));
                    CHECK(on_ranks::same_bits(got.last, expected.last));
                }
            }
    }

    TEST_CASE_TEMPLATE(
        "neither the stretches of a sequence, nor other ones, nor what a forward saves change a bit of it", T,
        __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        for (head_dims const dim : core_dims) {
            index_t const key = dim.key, value = dim.value;
            CAPTURE(key);
            CAPTURE(value);
            auto p = make<T>({1100, 77, 300}, 2, 2, key, value, kind::mild, 11);
            auto const whole = on_gpu<T>(p, true);
            CHECK(whole.path == core_path<T>());
            CHECK(same_gradients(on_gpu<T>(p, true), whole));
            auto const from_saved = on_gpu<T>(p, true, true);
            CHECK(on_ranks::same_bits(from_saved.o, whole.o));
            CHECK(same_gradients(from_saved, whole));
            auto crowd = p; // of so many that the backward walks along both halves of a head's channels in one block
            crowd.offsets.insert(crowd.offsets.end(), 64, p.tokens());
            crowd.state.resize(crowd.state.size() / 3 * 67), crowd.dlast.resize(crowd.state.size());
            auto among = on_gpu<T>(crowd, true);
            among.dstate.resize(whole.dstate.size());
            CHECK(same_gradients(among, whole));
            for (index_t const stretch : {1, 3, 16, 1000}) {
                CAPTURE(stretch);
                p.shape.stretch = stretch;
                auto const cut = on_gpu<T>(p, false);
                CHECK(on_ranks::same_bits(cut.o, whole.o));
                CHECK(on_ranks::same_bits(cut.last, whole.last));
            }
        }
    }

    TEST_CASE_TEMPLATE(
        "a sequence that holds NaN, states among it, changes no bit of others, however they are computed", T,
        __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        struct {
            index_t stretch;
            bool scan, saves;
            delta_rule_path path;
        } const ways[] = {{0, false, false, delta_rule_path::tensor_cores},
                          {3, false, true, delta_rule_path::tensor_cores},
                          {3, true, false, delta_rule_path::tensor_cores},
                          {0, false, false, delta_rule_path::plain}};
        for (head_dims const dim : core_dims)
            for (auto const& way : ways) {
                CAPTURE(dim.key);
                CAPTURE(dim.value);
                CAPTURE(way.stretch);
                CAPTURE(way.scan);
                auto p = make<T>({1100, 77, 300}, 2, 2, dim.key, dim.value, kind::mild, 11);
                p.shape.stretch = way.stretch, p.shape.scan = way.scan, p.shape.path = way.path;
                auto const alone = on_gpu<T>(p, true, way.saves);
                CHECK(alone.path == (way.path == delta_rule_path::plain ? way.path : core_path<T>()));
                auto beside = p;
                make_nan(beside, 1);
                check_others(p, 1, on_gpu<T>(beside, true, way.saves), alone);
            }
    }

    TEST_CASE("outputs by the stretches that are chosen for many heads have the bits of sequences that are not cut") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        using batch = std::pair<std::vector<index_t>, index_t>; // lengths, heads
        for (batch const& of : {batch{{2500}, 32}, {{1500, 0, 1500, 77}, 24}, {{700, 2300}, 40}, {{131072}, 1}}) {
            CAPTURE(of.second);
            auto p = make<T>(of.first, 1, of.second, 128, 128, kind::mild, 23);
            auto const chosen = on_gpu<T>(p, false);
            p.shape.stretch = 4000;
            auto const whole = on_gpu<T>(p, false);
            CHECK(on_ranks::same_bits(chosen.o, whole.o));
            CHECK(on_ranks::same_bits(chosen.last, whole.last));
        }
    }

    TEST_CASE_TEMPLATE("a thousand runs have the bits of the first one, forward and backward", T, __nv_bfloat16,
                       __half) {
        if (!has_gpus()) return;
        auto const p = make<T>({1500, 0, 77, 2300}, 1, 2, 128, 128, kind::no_decay, 31);
        gpu::stream const stream;
        gpu_call<T> call(p, true);
        auto const of_run = [&] {
            call.poison(stream);
            call.run(stream);
            gpu::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
            auto const r = call.read();
            return std::array{r.o, r.last, r.dq, r.dk, r.dv, r.dg, r.dbeta, r.dstate};
        };
        auto const first = of_run();
        int others = 0;
        for (int i = 1; i < 1000; ++i) {
            auto const next = of_run();
            for (std::size_t j = 0; j < first.size(); ++j) others += !on_ranks::same_bits(next[j], first[j]);
        }
        CHECK(others == 0);
    }

    TEST_CASE_TEMPLATE("to cut a sequence at a multiple of 64 tokens and to hand the state on changes no bit", T,
                       __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        for (head_dims const dim : core_dims) {
            index_t const key = dim.key, value = dim.value;
            CAPTURE(key);
            CAPTURE(value);
            auto const p = make<T>({500}, 1, 2, key, value, kind::mild, 13);
            check_cut<T>(p, [](problem const& of) { return on_gpu<T>(of, true); });

            auto odd = segment_of(p, 100, 500); // begins and ends with a part of a chunk
            odd.state = on_gpu<T>(segment_of(p, 0, 100), false).last;
            check_close("o", on_gpu<T>(odd, false).o, slice(on_host(p, false).o, p.values(), 100, 500),
                        finer<T>() * 4.5e-3);
        }
    }
}
