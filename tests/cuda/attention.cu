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

/// One rank by the path that is wanted, and which one that was.
template <class T>
cuda::attention_path run_path(problem const& p, cuda::attention_path wanted, results& to) {
    cuda::attention_path taken{};
    on_one_gpu{}.run([&](auto& comm, auto const&) {
        cpx::replicated<> const whole(1, p.batch);
        auto const queries = p.queries(), keys = p.keys();
        auto const q = take<T>(p.q, queries, whole, comm), dout = take<T>(p.dout, queries, whole, comm),
                   k = take<T>(p.k, keys, whole, comm), v = take<T>(p.v, keys, whole, comm);
        auto o = room<T>(queries, whole, comm), dq = room<T>(queries, whole, comm), dk = room<T>(keys, whole, comm),
             dv = room<T>(keys, whole, comm);
        auto lse = room<float>(p.per_query(), whole, comm), delta = room<float>(p.per_query(), whole, comm);
        index_t const group = p.heads.query_heads / p.heads.key_heads;
        cuda::memory const in = comm.memory();
        cuda::attention_rows<T, cpx::replicated<>, cpx::replicated<>> const of{
            whole, whole, 0,           in,      q.data(), k.data(), v.data(), 0, p.heads.query_heads,
            0,     group, p.heads.dim, p.scale, wanted};
        taken = cuda::attend(of, o.data(), lse.data());
        cpx::attention_delta(o, dout, p.heads.dim, delta);
        cpx::kernels::attended_gradients<T> const from{dout.data(), lse.data(), delta.data()};
        CHECK(cuda::attend_backward_queries(of, from, dq.data()) == taken);
        CHECK(cuda::attend_backward_keys(of, from, group, dk.data(), dv.data()) == taken);
        to.put(0, o, queries);
        to.put(1, lse, p.per_query());
        to.put(2, dq, queries);
        to.put(3, dk, keys);
        to.put(4, dv, keys);
    });
    return taken;
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE_TEMPLATE("attention on a device is the host's, with the bits of one rank on every sharding", T, float,
                       __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        using packing = std::vector<index_t>;
        std::uint64_t seed = 0;
        for (bool const on_tensor_cores : {false, true})
            for (auto const& [lengths, heads] : {std::pair(packing{37, 0, 1, 70}, cpx::attention_heads{4, 2, 40}),
                                                 std::pair(packing{5, 3, 33, 64}, cpx::attention_heads{6, 1, 3}),
                                                 std::pair(packing{131}, cpx::attention_heads{2, 2, 256}),
                                                 std::pair(packing{150, 0, 301}, cpx::attention_heads{4, 2, 128}),
                                                 std::pair(packing{0, 0}, cpx::attention_heads{2, 1, 8})}) {
                if (on_tensor_cores && sizeof(T) == 4) continue;
                problem p = random_problem<T>(support::lengths(lengths), heads, ++seed);
                p.heads.on_tensor_cores = on_tensor_cores;
                CAPTURE(on_tensor_cores);
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
                    on_ranks::for_each_sharding(p.batch, ranks, {1},
                                                [&](std::string const& name, auto const& sharding) {
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

    TEST_CASE_TEMPLATE("attention on tensor cores is as near to exact sums as plain kernels, but for rounded weights",
                       T, __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        using packing = std::vector<index_t>;
        bool const half = std::same_as<T, __half>;
        struct hard {
            packing lengths;
            cpx::attention_heads heads;
            double gradients = 1;
        };
        for (hard const& of :
             {hard{{0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 300}, {4, 2, 64}}, hard{{4099}, {1, 1, 64}},
              hard{{257, 1, 96}, {3, 1, 128}}, hard{{257, 1, 96}, {2, 1, 104}, 0x1p-13}, // weights of half underflow
              hard{{190, 71}, {4, 1, 256}}}) {
            problem p = random_problem<T>(support::lengths(of.lengths), of.heads, 11);
            for (double& x : p.dout) x *= of.gradients;
            CAPTURE(of.lengths);
            CAPTURE(of.heads.dim);
            results exact(p), plain(p), on_cores(p);
            on_host(p, exact);
            CHECK(run_path<T>(p, cuda::attention_path::plain, plain) == cuda::attention_path::plain);
            auto const most = cuda::attention_path_of<T>(of.heads.dim);
            CHECK(run_path<T>(p, cuda::attention_path::tensor_cores, on_cores) == most);
            // a rounded weight is off by at most this share of itself, and sums of such terms by less
            double const rounding = half ? 0x1p-11 : 0x1p-8;
            for (std::size_t i = 0; i < exact.of.size(); ++i) {
                CAPTURE(names[i]);
                double const error = on_ranks::relative_error(on_cores.of[i], exact.of[i]);
                if (i == 1)
                    CHECK(error < 2e-6); // of logarithms, whose weights are not rounded
                else
                    CHECK(error < 1.5 * on_ranks::relative_error(plain.of[i], exact.of[i]) + rounding);
            }
        }
    }

    TEST_CASE("rows that do not begin at multiples of 16 bytes, odd heads and floats take plain kernels") {
        if (!has_gpus()) return;
        CHECK(cuda::attention_path_of<float>(128) == cuda::attention_path::plain);
        CHECK(cuda::attention_path_of<__nv_bfloat16>(100) == cuda::attention_path::plain);
        problem p = random_problem<__nv_bfloat16>(support::lengths({70, 33}), {2, 1, 64}, 12);
        p.heads.on_tensor_cores = true;
        results wanted(p), found(p);
        run_path<__nv_bfloat16>(p, cuda::attention_path::plain, wanted);
        on_one_gpu{}.run([&](auto& comm, auto const&) {
            cpx::replicated<> const whole(1, p.batch);
            auto const q = take<__nv_bfloat16>(p.q, p.queries(), whole, comm),
                       k = take<__nv_bfloat16>(p.k, p.keys(), whole, comm),
                       v = take<__nv_bfloat16>(p.v, p.keys(), whole, comm);
            auto o = room<__nv_bfloat16>({1, 129}, whole, comm);
            cpx::attention(q, k, v, p.heads, p.scale, o.columns(0, 128));
            auto const values = o.read();
            for (std::size_t row = 0; row < 103; ++row)
                for (std::size_t c = 0; c < 128; ++c)
                    found.of[0][row * 128 + c] = static_cast<double>(static_cast<float>(values[row * 129 + c]));
        });
        CHECK(on_ranks::same_bits(found.of[0], wanted.of[0]));
    }

    TEST_CASE_TEMPLATE("a token changes no bit of those that do not see it, even if it is NaN", T, float, __nv_bfloat16,
                       __half) {
        if (!has_gpus()) return;
        index_t const dim = 8, length = 200, at = 150; // not the last of a tile
        bool on_tensor_cores = false;
        SUBCASE("by plain kernels") {}
        SUBCASE("on tensor cores") { on_tensor_cores = true; }
        problem p = random_problem<T>(support::lengths({length, 7}), {2, 1, dim}, 9);
        p.heads.on_tensor_cores = on_tensor_cores;
        results before(p);
        run<T>(p, on_ranks::one_rank(p.batch), before);
        auto const same = [&](results const& r, std::size_t i, index_t first, index_t last) {
            return on_ranks::same_rows(r.of[i], before.of[i], i == 0 || i == 2 ? 2 * dim : dim, first, last);
        };
        auto const poison = [&](numbers& x, index_t width) {
            for (index_t c = 0; c < width; ++c) x[static_cast<std::size_t>(at * width + c)] = NAN;
        };
        problem keys = p, queries = p;
        poison(keys.k, dim);
        poison(keys.v, dim);
        results of_keys(p), of_queries(p);
        run<T>(keys, on_ranks::one_rank(p.batch), of_keys);
        for (std::size_t const i : {0, 2}) {
            CHECK(same(of_keys, i, 0, at));
            CHECK(same(of_keys, i, length, length + 7));
            CHECK(std::isnan(of_keys.of[i][static_cast<std::size_t>(at * 2 * dim)]));
            CHECK(std::isnan(of_keys.of[i][static_cast<std::size_t>((length - 1) * 2 * dim)]));
        }
        poison(queries.q, 2 * dim);
        poison(queries.dout, 2 * dim);
        run<T>(queries, on_ranks::one_rank(p.batch), of_queries);
        CHECK(same(of_queries, 0, 0, at));
        CHECK(same(of_queries, 0, at + 1, length + 7));
        for (std::size_t const i : {3, 4}) {
            CHECK(same(of_queries, i, at + 1, length + 7));
            CHECK(std::isnan(of_queries.of[i][static_cast<std::size_t>(at * dim)]));
            CHECK(std::isnan(of_queries.of[i][0]));
        }
        CHECK(same(of_keys, 3, length, length + 7));
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
        cpx::threads::run(1, [&](cpx::threads& threads) {
            threads_on_gpu comm(threads, stream);
            cpx::rows<float> const sums(on_host, 4);
            support::rejects({"sum_readers: sums: expected memory of the current device"},
                             [&] { cpx::sum_readers<float>(k.sharding(), 2, 2, 2, k.data(), std::array{sums}, comm); });
        });
        auto const wide = make(stream, 257);
        auto to = make(stream, 257);
        support::rejects({"attention.cu", "attention: dim: expected from 1 to 256, of tensors on devices, got 257"},
                         [&] {
                             cpx::attention(wide, wide, wide, {1, 1, 257}, 1., to);
                         });
    }
}
