// SPDX-License-Identifier: Apache-2.0
// Attention of tensors on devices: the host's results, and the bits of one rank.
#include <cpx/ops/cuda/attention.hpp>

#include <doctest/doctest.h>

#include "attention_on_ranks.hpp"
#include "gpus.hpp"
#include "threads_on_gpu.hpp"

#include <support/rejects.hpp>

namespace {

using namespace attention_on_ranks;
namespace cuda = cpx::cuda;

/// Ranks that are threads of one GPU.
struct on_one_gpu {
    int ranks = 1;

    template <class F>
    void run(F&& program) const {
        cpx::threads::run(ranks, [&](cpx::threads& threads) {
            cuda::stream const stream;
            threads_on_gpu comm(threads, stream);
            program(comm, [] {});
        });
    }
};

template <class T, cpx::any_sharding S>
void run(problem const& p, S const& sharding, results& to) {
    gathered<T>(on_one_gpu{sharding.ranks()}, p, sharding, to);
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE_TEMPLATE("attention on a device is the host's, with the bits of one rank on every sharding", T, float,
                       __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        using packing = std::vector<index_t>;
        std::uint64_t seed = 0;
        for (auto const& [lengths, heads] : {std::pair(packing{37, 0, 1, 70}, cpx::attention_heads{4, 2, 40}),
                                             std::pair(packing{5, 3, 33, 64}, cpx::attention_heads{6, 1, 3}),
                                             std::pair(packing{131}, cpx::attention_heads{2, 2, 256}),
                                             std::pair(packing{0, 0}, cpx::attention_heads{2, 1, 8})}) {
            problem const p = random_problem<T>(support::lengths(lengths), heads, ++seed);
            CAPTURE(seed);
            results exact(p), one(p);
            on_host(p, exact);
            run<T>(p, on_ranks::one_rank(p.batch), one);
            check_close<T>(one, exact);
            for (int const ranks : {1, 2, 3, 4}) {
                CAPTURE(ranks);
                results split(p); // on 4 ranks query heads of one key head are apart
                by_heads<T>(on_one_gpu{ranks}, p, ranks, split);
                check_same(split, one);
                if (ranks != 3) continue;
                on_ranks::for_each_sharding(p.batch, ranks, {1}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    results by_tokens(p);
                    run<T>(p, sharding, by_tokens);
                    check_same(by_tokens, one);
                });
                results shares(p);
                gathered<T>(on_one_gpu{ranks}, p, on_ranks::by_tokens(cpx::shard(p.batch, cpx::zigzag<>(ranks))),
                            shares, keys_from::own_queries);
                check_close<T>(shares, exact);
            }
        }
    }

    TEST_CASE("a token changes no bit of those that do not see it, even if it is NaN") {
        if (!has_gpus()) return;
        problem p = random_problem<float>(support::lengths({40, 7}), {2, 1, 8}, 9);
        results before(p), after(p);
        run<float>(p, on_ranks::one_rank(p.batch), before);
        for (std::size_t column = 0; column < 8; ++column) p.k[39 * 8 + column] = p.v[39 * 8 + column] = NAN;
        run<float>(p, on_ranks::one_rank(p.batch), after);
        for (std::size_t const of_queries : {0, 2}) {
            numbers const &a = after.of[of_queries], &b = before.of[of_queries];
            CHECK(on_ranks::same_rows(a, b, 16, 0, 39));
            CHECK(on_ranks::same_rows(a, b, 16, 40, 47));
            CHECK(std::isnan(a[39 * 16]));
        }
        CHECK(on_ranks::same_rows(after.of[3], before.of[3], 8, 40, 47));
    }

    TEST_CASE("attention on a device refuses what does not fit, before anything is written") {
        if (!has_gpus()) return;
        auto const batch = support::lengths({6, 5});
        cpx::replicated<> const whole(1, batch);
        cuda::stream const stream, other;
        auto const make = [&](cudaStream_t in, index_t width) {
            return cpx::make_tensor<float>(whole, 0, width, cuda::memory(in));
        };
        auto const q = make(stream, 8), k = make(stream, 4), later = make(other, 4);
        auto o = make(stream, 8);
        auto const call = [&](auto const& keys, index_t dim, auto&& lse) {
            return [&, dim] { cpx::attention(q, keys, k, {8 / dim, 4 / dim, dim}, 1., o, lse); };
        };
        cpx::rows<float> const none;
        CHECK(support::message(call(k, 2, none)) == "");
        support::rejects({"attention.cu", "attention: memory of k: expected that of q, in its stream, got another"},
                         call(later, 2, none));
        std::vector<float> on_host(11 * 4);
        support::rejects({"attention.cu", "attention: lse: expected memory of the current device", "the host"},
                         call(k, 2, cpx::rows<float>(on_host, 4)));
        auto const wide = make(stream, 257);
        auto to = make(stream, 257);
        support::rejects({"attention.cu", "attention: dim: expected from 1 to 256, of tensors on devices, got 257"},
                         [&] {
                             cpx::attention(wide, wide, wide, {1, 1, 257}, 1., to);
                         });
    }
}
