// SPDX-License-Identifier: Apache-2.0
#include "../../harness/cudnn_attention.hpp"

#include <cpx/cuda/attention.hpp>

#include <doctest/doctest.h>

#include "attention_on_ranks.hpp"
#include "gpus.hpp"

namespace {
using namespace attention_on_ranks;
namespace cuda = cpx::cuda;

/// Tensors of a rank whose rows have `beside` more columns, NaN like all that nobody has written.
struct rank_tensors {
    int rank;
    index_t beside;
    cuda::memory const& in;

    template <class T, cpx::any_sharding S>
    auto make(S const& s, cpx::section const& x) const {
        auto t = cpx::make_tensor<T>(s, rank, x.heads * x.width + beside, in);
        t.write(std::vector<T>(t.elements().size(), static_cast<T>(NAN)));
        return t;
    }
    template <class T, cpx::any_sharding S>
    auto given(numbers const& whole, S const& s, cpx::section const& x) const {
        auto t = make<T>(s, x);
        std::vector<T> values(t.elements().size(), static_cast<T>(NAN));
        auto const local = on_ranks::take(whole, {x}, s, rank);
        index_t const width = x.heads * x.width;
        index_t i = 0;
        for (double const e : local.elements()) {
            values[static_cast<std::size_t>(i / width * (width + beside) + i % width)] =
                static_cast<T>(static_cast<float>(e));
            ++i;
        }
        t.write(values);
        return t;
    }
    /// Puts what a tensor has where it belongs of all; columns beside it must be as they were.
    template <class X, cpx::any_sharding S>
    void put(X const& t, S const& s, cpx::section const& x, numbers& to) const {
        auto const values = t.read();
        index_t const width = x.heads * x.width;
        index_t local = 0;
        bool untouched = true;
        s.for_each_piece(rank, [&](cpx::range piece) {
            for (index_t row = piece.first; row < piece.last; ++row, ++local)
                for (index_t c = 0; c < width + beside; ++c) {
                    auto const value =
                        static_cast<float>(values[static_cast<std::size_t>(local * (width + beside) + c)]);
                    if (c < width)
                        to[static_cast<std::size_t>(row * width + c)] = static_cast<double>(value);
                    else
                        untouched &= std::isnan(value);
                }
        });
        CHECK(untouched);
    }
};

/// The forward of all ranks of `sharding`, each with all keys. Returns whether `by` has served every one.
template <class T, cpx::any_sharding S>
bool run(cuda::attention_engine& by, problem const& p, S const& sharding, index_t beside, bool sums, results& to) {
    bool served = true;
    for (int rank = 0; rank < sharding.ranks(); ++rank) {
        cuda::stream const stream;
        cuda::memory const in(stream);
        rank_tensors const tensors{rank, beside, in};
        cpx::replicated<> const all(sharding.ranks(), p.batch);
        auto const queries = p.queries(), keys = p.keys(), numbers_of = p.per_query();
        auto const q = tensors.given<T>(p.q, sharding, queries);
        auto const k = tensors.given<T>(p.k, all, keys), v = tensors.given<T>(p.v, all, keys);
        auto o = tensors.make<T>(sharding, queries);
        auto lse = tensors.make<float>(sharding, numbers_of);
        auto const part = [](auto& t, cpx::section const& x) { return t.data().columns(0, x.heads * x.width); };
        index_t const group = p.heads.query_heads / p.heads.key_heads;
        cuda::attention_rows<T, S, cpx::replicated<>> const of{sharding,
                                                               all,
                                                               rank,
                                                               in,
                                                               part(q, queries),
                                                               part(k, keys),
                                                               part(v, keys),
                                                               0,
                                                               p.heads.query_heads,
                                                               0,
                                                               group,
                                                               p.heads.dim,
                                                               p.scale,
                                                               cuda::attention_path::tensor_cores,
                                                               &by};
        auto const path = cuda::attend(of, part(o, queries), sums ? part(lse, numbers_of) : cpx::rows<float>());
        served &= path == cuda::attention_path::engine;
        tensors.put(o, sharding, queries, to.of[0]);
        if (sums) tensors.put(lse, sharding, numbers_of, to.of[1]);
    }
    return served;
}

using packing = std::vector<index_t>;
} // namespace

TEST_SUITE("cuda") {
    TEST_CASE_TEMPLATE("attention by cuDNN is the host's within the elements' precision, on every sharding", T,
                       __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        auto const by = cudnn_attention();
        if (!by) {
            MESSAGE("cpx: skipped, cuDNN not found");
            return;
        }
        std::uint64_t seed = 0;
        for (auto const& [lengths, heads] : {std::pair(packing{37, 0, 1, 70}, cpx::attention_heads{4, 2, 40}),
                                             std::pair(packing{1, 1, 1}, cpx::attention_heads{4, 2, 64}),
                                             std::pair(packing{300, 0, 1, 2, 129}, cpx::attention_heads{4, 2, 64}),
                                             std::pair(packing{131}, cpx::attention_heads{2, 2, 256}),
                                             std::pair(packing{190, 700, 5}, cpx::attention_heads{8, 1, 256}),
                                             std::pair(packing{150, 0, 301}, cpx::attention_heads{4, 2, 128}),
                                             std::pair(packing{0, 0}, cpx::attention_heads{2, 1, 8})}) {
            problem const p = random_problem<T>(support::lengths(lengths), heads, ++seed);
            index_t const dim = heads.dim, first = lengths[0];
            results exact(p);
            on_host(p, exact);
            for (int const ranks : {1, 2, 3, 4, 5})
                for (index_t const beside : {0, 16}) {
                    auto const check = [&](char const* name, auto const& sharding) {
                        CAPTURE(name);
                        CAPTURE(ranks);
                        CAPTURE(dim);
                        CAPTURE(first);
                        CAPTURE(beside);
                        bool const sums = beside == 0 || ranks != 3;
                        results found(p);
                        found.of = exact.of;
                        for (std::size_t const i : {0u, 1u})
                            if (i == 0 || sums) std::ranges::fill(found.of[i], NAN);
                        CHECK(run<T>(*by, p, sharding, beside, sums, found));
                        check_close<T>(found, exact);
                    };
                    check("sequential", on_ranks::by_tokens(cpx::shard(p.batch, cpx::sequential<>(ranks))));
                    check("zigzag", on_ranks::by_tokens(cpx::shard(p.batch, cpx::zigzag<>(ranks))));
                }
        }
    }

    TEST_CASE("where cuDNN does not serve, cpx's kernels compute attention") {
        if (!has_gpus()) return;
        auto const by = cudnn_attention();
        if (!by) return;
        problem const p = random_problem<__nv_bfloat16>(support::lengths(packing{900, 3, 40}), {4, 2, 36}, 7);
        auto const sharding = on_ranks::by_tokens(cpx::shard(p.batch, cpx::striped<>(4)));
        results found(p), exact(p);
        on_host(p, exact);
        for (std::size_t const i : {2u, 3u, 4u}) found.of[i] = exact.of[i];
        CHECK(!run<__nv_bfloat16>(*by, p, sharding, 0, true, found)); // heads of 36 columns
        check_close<__nv_bfloat16>(found, exact);
    }
}
