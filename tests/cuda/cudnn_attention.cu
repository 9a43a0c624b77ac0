// SPDX-License-Identifier: Apache-2.0
#include <cpx/cuda/attention_calls.hpp>
#include <cpx/cuda/cudnn_attention.hpp>

#include <doctest/doctest.h>

#include "attention_on_ranks.hpp"
#include "gpus.hpp"

namespace {
using namespace attention_on_ranks;
namespace cuda = cpx::cuda;

/// A rank of `sharding` with all keys: o, lse, dq and its share of dk and dv.
template <class T, cpx::any_sharding S>
bool run_rank(cuda::cudnn_attention* by, problem const& p, S const& sharding, int rank, results& to, numbers& dk_sum,
              numbers& dv_sum, index_t wider) {
    cuda::stream const stream;
    cuda::memory const in(stream);
    cpx::replicated<> const all(sharding.ranks(), p.batch);
    auto const make = [&]<class U>(U, auto const& s, cpx::section const& x) {
        auto t = cpx::make_tensor<U>(s, rank, x.heads * x.width + wider, in);
        t.write(std::vector<U>(t.elements().size(), static_cast<U>(NAN)));
        return t;
    };
    auto const given = [&](numbers const& whole, auto const& s, cpx::section const& x) {
        auto const local = on_ranks::take(whole, {x}, s, rank);
        auto t = make(T{}, s, x);
        std::vector<T> values(t.elements().size(), static_cast<T>(NAN));
        index_t const w = x.heads * x.width;
        std::size_t i = 0;
        for (double const e : local.elements()) {
            auto const row = static_cast<index_t>(i) / w, c = static_cast<index_t>(i) % w;
            values[static_cast<std::size_t>(row * (w + wider) + c)] = static_cast<T>(static_cast<float>(e));
            ++i;
        }
        t.write(values);
        return t;
    };
    auto const qs = p.queries(), ks = p.keys(), ls = p.per_query();
    auto const q = given(p.q, sharding, qs), dout = given(p.dout, sharding, qs);
    auto const k = given(p.k, all, ks), v = given(p.v, all, ks);
    auto o = make(T{}, sharding, qs), dq = make(T{}, sharding, qs);
    auto dk = make(T{}, all, ks), dv = make(T{}, all, ks);
    auto lse = make(float{}, sharding, ls), delta = make(float{}, sharding, ls);
    auto const part = [&](auto& t, cpx::section const& x) { return t.data().columns(0, x.heads * x.width); };
    index_t const group = p.heads.query_heads / p.heads.key_heads;
    cuda::attention_rows<T, S, cpx::replicated<>> const of{
        sharding, all, rank, in, part(q, qs), part(k, ks), part(v, ks), 0, p.heads.query_heads, 0, group, p.heads.dim,
        p.scale, cuda::attention_path::tensor_cores};
    if (by) {
        if (!by->attend(of, part(o, qs), part(lse, ls))) return false;
        if (!by->attend_backward(of, part(o, qs), part(dout, qs), part(lse, ls), part(dq, qs), part(dk, ks),
                                 part(dv, ks)))
            return false;
    } else {
        cuda::attend(of, part(o, qs), part(lse, ls));
        cuda::delta_of_rows<T>(in, part(o, qs), part(dout, qs), p.heads.dim, part(delta, ls));
        cpx::kernels::attended_gradients<T> const from{part(dout, qs), part(lse, ls), part(delta, ls)};
        cuda::attend_backward_queries(of, from, part(dq, qs));
        cuda::attend_backward_keys(of, from, group, part(dk, ks), part(dv, ks));
    }
    auto const put = [&](std::size_t which, auto const& local, cpx::section const& x) {
        auto const values = local.read();
        index_t const w = x.heads * x.width;
        index_t r = 0;
        bool untouched = true;
        sharding.for_each_piece(rank, [&](cpx::range piece) {
            for (index_t row = piece.first; row < piece.last; ++row, ++r) {
                for (index_t c = 0; c < w; ++c)
                    to.of[which][static_cast<std::size_t>(row * w + c)] =
                        static_cast<double>(static_cast<float>(values[static_cast<std::size_t>(r * (w + wider) + c)]));
                for (index_t c = w; c < w + wider; ++c)
                    untouched &= std::isnan(static_cast<float>(values[static_cast<std::size_t>(r * (w + wider) + c)]));
            }
        });
        CHECK(untouched);
    };
    put(0, o, qs);
    put(1, lse, ls);
    put(2, dq, qs);
    for (auto const& [from, sum] : {std::pair(&dk, &dk_sum), std::pair(&dv, &dv_sum)}) {
        auto const values = from->read();
        index_t const w = ks.heads * ks.width;
        for (index_t row = 0; row < p.batch.tokens(); ++row)
            for (index_t c = 0; c < w; ++c)
                (*sum)[static_cast<std::size_t>(row * w + c)] +=
                    static_cast<double>(static_cast<float>(values[static_cast<std::size_t>(row * (w + wider) + c)]));
    }
    return true;
}
template <class T, cpx::any_sharding S>
bool run(cuda::cudnn_attention* by, problem const& p, S const& sharding, results& to, index_t wider) {
    std::ranges::fill(to.of[3], 0.);
    std::ranges::fill(to.of[4], 0.);
    for (int rank = 0; rank < sharding.ranks(); ++rank)
        if (!run_rank<T>(by, p, sharding, rank, to, to.of[3], to.of[4], wider)) return false;
    return true;
}
} // namespace

TEST_SUITE("cuda") {
    TEST_CASE_TEMPLATE("attention by cuDNN is the host's within the elements' precision, on every sharding", T,
                       __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        cuda::cudnn_attention by;
        using packing = std::vector<index_t>;
        std::uint64_t seed = 0;
        for (auto const& [lengths, heads] : {std::pair(packing{37, 0, 1, 70}, cpx::attention_heads{4, 2, 40}),
                                             std::pair(packing{1, 1, 1}, cpx::attention_heads{4, 2, 64}),
                                             std::pair(packing{300, 0, 1, 2, 129}, cpx::attention_heads{4, 2, 64}),
                                             std::pair(packing{131}, cpx::attention_heads{2, 2, 256}),
                                             std::pair(packing{190, 700, 5}, cpx::attention_heads{8, 1, 256}),
                                             std::pair(packing{150, 0, 301}, cpx::attention_heads{4, 2, 128}),
                                             std::pair(packing{0, 0}, cpx::attention_heads{2, 1, 8})}) {
            problem const p = random_problem<T>(support::lengths(lengths), heads, ++seed);
            results exact(p);
            on_host(p, exact);
            for (int const ranks : {1, 2, 3, 5})
                for (index_t const wider : {0, 16}) {
                    auto const check = [&](char const* name, auto const& sharding) {
                        results found(p);
                        bool const ran = run<T>(&by, p, sharding, found, wider);
                        std::string line = std::string(ran ? "ran " : "REFUSED ") + name + " ranks " +
                                           std::to_string(ranks) + " dim " + std::to_string(heads.dim) + " lengths " +
                                           std::to_string(lengths[0]) + " wider " + std::to_string(wider);
                        CAPTURE(line);
                        if (!ran) std::printf("%s\n", line.c_str());
                        CHECK(ran);
                        if (ran) check_close<T>(found, exact);
                    };
                    check("sequential", on_ranks::by_tokens(cpx::shard(p.batch, cpx::sequential<>(ranks))));
                    check("zigzag", on_ranks::by_tokens(cpx::shard(p.batch, cpx::zigzag<>(ranks))));
                }
        }
    }

    TEST_CASE("times") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        cuda::cudnn_attention by;
        for (auto const& lengths :
             {std::vector<index_t>{8192}, std::vector<index_t>{8192, 8192, 8192, 8192}, std::vector<index_t>{32768},
              std::vector<index_t>{12288, 7001, 5120, 3333, 2500, 1536, 987, 3}})
            for (auto const& heads : {cpx::attention_heads{16, 2, 256}, cpx::attention_heads{32, 8, 128}})
                for (int const ranks : {1, 4}) {
                    auto const batch = support::lengths(lengths);
                    auto const sharding = cpx::shard(batch, cpx::zigzag<>(ranks));
                    cpx::replicated<> const all(ranks, batch);
                    cuda::stream const stream;
                    cuda::memory const in(stream);
                    index_t const w = heads.query_heads * heads.dim, kw = heads.key_heads * heads.dim;
                    auto const make = [&](auto const& s, index_t width, auto u) {
                        auto t = cpx::make_tensor<decltype(u)>(s, 0, width, in);
                        std::vector<decltype(u)> x(t.elements().size());
                        std::uint32_t z = static_cast<std::uint32_t>(width);
                        for (auto& e : x) e = static_cast<decltype(u)>(static_cast<float>((z = z * 1664525u + 1013904223u) >> 8) * 0x1p-23f - 1);
                        t.write(x);
                        return t;
                    };
                    auto const q = make(sharding, w, T{}), dout = make(sharding, w, T{});
 auto const k = make(all, kw, T{}), v = make(all, kw, T{});
                    auto o = make(sharding, w, T{}), dq = make(sharding, w, T{});
 auto dk = make(all, kw, T{}), dv = make(all, kw, T{});
                    auto lse = make(sharding, heads.query_heads, 0.f), delta = make(sharding, heads.query_heads, 0.f);
                    index_t const group = heads.query_heads / heads.key_heads;
                    cuda::attention_rows<T, std::remove_cvref_t<decltype(sharding)>, cpx::replicated<>> const of{
                        sharding, all, 0, in, q.data(), k.data(), v.data(), 0, heads.query_heads, 0, group, heads.dim,
                        1 / std::sqrt(static_cast<double>(heads.dim)), cuda::attention_path::tensor_cores};
                    auto const ms = [&](auto&& f) {
                        f();
                        float best = 1e9f;
                        for (int i = 0; i < 5; ++i) {
                            cuda::event a, b;
                            a.record(stream);
                            f();
                            b.record(stream);
                            cuda::check(cudaEventSynchronize(b), "sync");
                            float t = 0;
                            cuda::check(cudaEventElapsedTime(&t, a, b), "time");
                            best = std::min(best, t);
                        }
                        return static_cast<double>(best);
                    };
                    cpx::kernels::attended_gradients<T> const from{dout.data(), lse.data(), delta.data()};
                    double const f0 = ms([&] { cuda::attend(of, o.data(), lse.data()); });
                    double const b0 = ms([&] {
                        cuda::delta_of_rows<T>(in, o.data(), dout.data(), heads.dim, delta.data());
                        cuda::attend_backward_queries(of, from, dq.data());
                        cuda::attend_backward_keys(of, from, group, dk.data(), dv.data());
                    });
                    bool good = true;
                    double const f1 = ms([&] { good &= by.attend(of, o.data(), lse.data()); });
                    auto const back = [&] {
                        good &= by.attend_backward(of, o.data(), dout.data(), cpx::rows<float const>(lse.data()), dq.data(), dk.data(), dv.data());
                    };
                    double const b1 = ms(back);
                    auto const dq1 = dq.read(), dk1 = dk.read();
                    int same = 0, same_k = 0;
                    for (int i = 0; i < 3; ++i) {
                        back();
                        auto const d = dq.read(), e = dk.read();
                        same += std::memcmp(d.data(), dq1.data(), d.size() * 2) == 0;
                        same_k += std::memcmp(e.data(), dk1.data(), e.size() * 2) == 0;
                    }
                    std::printf("TIME %zu x %lld heads %lld/%lld/%lld ranks %d good %d: ours %.3f %.3f cudnn %.3f %.3f ms; "
                                "x %.2f %.2f; dq same %d/3 dk %d/3\n",
                                lengths.size(), static_cast<long long>(lengths[0]), static_cast<long long>(heads.query_heads),
                                static_cast<long long>(heads.key_heads), static_cast<long long>(heads.dim), ranks, good, f0, b0, f1, b1,
                                f0 / f1, b0 / b1, same, same_k);
                    std::fflush(stdout);
                }
    }
}
