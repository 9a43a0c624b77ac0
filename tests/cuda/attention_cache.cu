// SPDX-License-Identifier: Apache-2.0
// Attention over keys and values kept on devices: decoded tokens against whole sequences on the host, and one rank's
// bits.
#include <cpx/ops/cuda/attention_cache.hpp>

#include <doctest/doctest.h>

#include "attention_on_ranks.hpp"
#include "gpus.hpp"
#include "threads_on_gpu.hpp"

#include <support/rejects.hpp>

namespace {

using namespace attention_on_ranks;
namespace cuda = cpx::cuda;
using lists = std::vector<index_t>;

template <class T>
using device_cache = cpx::attention_cache<T, cuda::memory>;

std::size_t at(index_t i) { return static_cast<std::size_t>(i); }

/// Returns the problem of tokens `[first_s, last_s)` of each sequence, and which rows of the whole they are.
std::pair<problem, lists> tokens(problem const& p, lists const& first, lists const& last) {
    lists counts, rows;
    for (index_t s = 0; s < p.batch.sequences(); ++s) {
        counts.push_back(last[at(s)] - first[at(s)]);
        for (index_t t = first[at(s)]; t < last[at(s)]; ++t) rows.push_back(p.batch.offset(s) + t);
    }
    auto const of = [&](numbers const& whole, cpx::section const& s) {
        index_t const width = s.heads * s.width;
        numbers some;
        for (index_t const row : rows)
            some.insert(some.end(), whole.begin() + row * width, whole.begin() + (row + 1) * width);
        return some;
    };
    return {
        {support::lengths(counts), p.heads, p.scale, of(p.q, p.queries()), of(p.k, p.keys()), of(p.v, p.keys()), {}},
        rows};
}

/// Where the queries, and keys and values, of a batch are.
template <class Q, class K>
struct where {
    Q queries;
    K keys;
};
template <class Q, class K>
where(Q, K) -> where<Q, K>;

/// The first `prompt_s` tokens of each sequence at once, the others one by one. `prefill(batch)` and `decode(batch)`
/// return a `where`. Returns whole results, NaN where nobody has written or ranks differ.
template <class T, class Prefill, class Decode>
numbers converse(problem const& p, lists const& prompt, int ranks, Prefill const& prefill, Decode const& decode) {
    results found(p);
    cpx::threads::run(ranks, [&](cpx::threads& threads) {
        cuda::stream const stream;
        threads_on_gpu comm(threads, stream);
        auto const kept = prefill(tokens(p, lists(prompt.size()), prompt).first.batch).keys;
        device_cache<T> cache(p.heads, kept, comm);
        lists all, done(prompt.size()), next = prompt;
        for (index_t s = 0; s < p.batch.sequences(); ++s) all.push_back(p.batch.length(s));
        auto const step = [&](auto const& how) {
            auto const drawn = tokens(p, done, next);
            auto const& now = drawn.first;
            auto const& rows = drawn.second;
            auto const [queries, keys] = how(now.batch);
            auto const k = take<T>(now.k, p.keys(), keys, comm), v = take<T>(now.v, p.keys(), keys, comm);
            auto const q = take<T>(now.q, p.queries(), queries, comm);
            auto o = room<T>(p.queries(), queries, comm);
            cache.append(k, v);
            cpx::cached_attention(queries, comm)(cache, q, p.scale, o, comm);
            results partial(now);
            partial.put(0, o, p.queries());
            auto const held = on_ranks::columns(queries, comm.rank(), {p.queries()});
            std::lock_guard const lock(found.guard);
            index_t const width = p.heads.query_heads * p.heads.dim;
            queries.for_each_piece(comm.rank(), [&](cpx::range piece) {
                for (index_t row = piece.first; row < piece.last; ++row)
                    for (index_t const c : held) {
                        double& to = found.of[0][at(rows[at(row)] * width + c)];
                        double const value = partial.of[0][at(row * width + c)];
                        to = std::isnan(to) || on_ranks::same_bits(to, value) ? value : NAN;
                    }
            });
        };
        step(prefill);
        while (done = next, done != all) {
            for (std::size_t s = 0; s < next.size(); ++s) next[s] = std::min(next[s] + 1, all[s]);
            step(decode);
        }
        CHECK(cache.length(0) == all[0]);
    });
    return found.of[0];
}

/// A device's memory that can be full.
struct limited final : cuda::memory_resource {
    int left = 1000; ///< blocks that may yet be given
    void* allocate(std::size_t bytes, cudaStream_t in) override {
        cpx::require(left > 0, "limited", "blocks", "some", "none left");
        --left;
        return cuda::default_resource().allocate(bytes, in);
    }
    void deallocate(void* memory, std::size_t bytes, cudaStream_t in) noexcept override {
        cuda::default_resource().deallocate(memory, bytes, in);
    }
};

template <class T>
double rounding() {
    return sizeof(T) == 4 ? 2e-6 : std::same_as<T, __half> ? 1e-3 : 6e-3;
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE_TEMPLATE("tokens decoded on devices after any prefill have the host's attention of whole sequences", T,
                       float, __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        std::uint64_t seed = 20;
        for (auto const& [whole, prompt, heads] :
             {std::tuple(lists{33, 0, 6, 1, 49}, lists{1, 0, 6, 0, 17}, cpx::attention_heads{6, 2, 5}),
              std::tuple(lists{530, 3, 257}, lists{527, 0, 255}, cpx::attention_heads{4, 4, 40}),
              std::tuple(lists{1030, 260}, lists{1027, 256}, cpx::attention_heads{8, 2, 128}),
              std::tuple(lists{20, 300}, lists{17, 298}, cpx::attention_heads{16, 1, 256})}) {
            auto const p = random_problem<T>(support::lengths(whole), heads, ++seed);
            CAPTURE(seed);
            results exact(p);
            on_host(p, exact);
            auto const one_place = [](cpx::thd const& batch) {
                return where{cpx::replicated<>(1, batch), cpx::replicated<>(1, batch)};
            };
            auto const one = converse<T>(p, prompt, 1, one_place, one_place);
            CHECK(on_ranks::relative_error(one, exact.of[0]) < rounding<T>());
            for (int const ranks : {2, 3, 4, 5, 8}) {
                if (ranks > 3 && heads.dim > 5) break; // on small heads the ranks are what counts
                CAPTURE(ranks);
                auto const everywhere = [&](cpx::thd const& batch) { return cpx::replicated<>(ranks, batch); };
                auto const split = [&](cpx::thd const& batch) {
                    return cpx::head_sharded<>(ranks, batch, {p.queries(), p.keys(), p.keys()});
                };
                auto const by_heads = [&](cpx::thd const& batch) { return where{split(batch), split(batch)}; };
                CHECK(on_ranks::same_bits(converse<T>(p, prompt, ranks, by_heads, by_heads), one));
                auto const all_keys = [&](cpx::thd const& batch) { return where{split(batch), everywhere(batch)}; };
                CHECK(on_ranks::same_bits(converse<T>(p, prompt, ranks, all_keys, all_keys), one));

                support::splitmix random(seed);
                auto const owners = support::random_owners(random, ranks, static_cast<int>(std::ssize(whole)) + 1);
                auto const owned = [&](cpx::thd const& batch) { return on_ranks::on_owners(batch, ranks, owners); };
                auto const apart = [&](cpx::thd const& batch) { return where{owned(batch), owned(batch)}; };
                auto const read_everywhere = [&](cpx::thd const& batch) {
                    return where{everywhere(batch), owned(batch)};
                };
                auto const zigzag = [&](cpx::thd const& batch) {
                    auto const by_tokens = on_ranks::by_tokens(cpx::shard(batch, cpx::zigzag<>(ranks)));
                    return where{by_tokens, by_tokens};
                };
                for (auto const& found : {converse<T>(p, prompt, ranks, zigzag, apart),
                                          converse<T>(p, prompt, ranks, zigzag, read_everywhere),
                                          converse<T>(p, prompt, ranks, apart, apart)})
                    CHECK(on_ranks::relative_error(found, exact.of[0]) < rounding<T>());
            }
        }
    }

    TEST_CASE_TEMPLATE("another sequence, and what has not come yet, changes no bit of what a device decodes", T, float,
                       __nv_bfloat16) {
        if (!has_gpus()) return;
        lists const whole{300, 9}, prompt{290, 4};
        auto const p = random_problem<T>(support::lengths(whole), {4, 2, 16}, 3);
        auto const zigzag = [](cpx::thd const& batch) {
            auto const by_tokens = on_ranks::by_tokens(cpx::shard(batch, cpx::zigzag<>(2)));
            return where{by_tokens, by_tokens};
        };
        auto const before = converse<T>(p, prompt, 2, zigzag, zigzag);
        for (index_t const row : {0, 260, 289, 295, 305}) {
            CAPTURE(row);
            auto other = p;
            for (auto* const x : {&other.k, &other.v})
                for (index_t d = 0; d < 32; ++d) (*x)[at(row * 32 + d)] = NAN;
            auto const after = converse<T>(other, prompt, 2, zigzag, zigzag);
            index_t const end = p.batch.offset(p.batch.sequence(row) + 1);
            CHECK(on_ranks::same_rows(after, before, 64, 0, row));
            CHECK(on_ranks::same_rows(after, before, 64, end, p.batch.tokens()));
            for (index_t i = row; i < end; ++i) CHECK(std::isnan(after[at(i * 64)]));
        }
    }

    TEST_CASE("a cache on a device refuses what does not fit, before anything is kept") {
        if (!has_gpus()) return;
        cpx::replicated<> const whole(1, support::lengths({6, 5}));
        cuda::stream const stream, other;
        auto const make = [&](cudaStream_t in, index_t width) {
            return cpx::make_tensor<float>(whole, 0, width, cuda::memory(in));
        };
        cpx::threads::run(1, [&](cpx::threads& threads) {
            threads_on_gpu comm(threads, stream);
            device_cache<float> cache({4, 2, 2}, whole, comm), wide({1, 1, 257}, whole, comm);
            auto const k = make(stream, 4), later = make(other, 4), wide_k = make(stream, 257);
            support::rejects(
                {"attention_cache.cu", "attention_cache: memory of k: expected that of this cache, in its stream"},
                [&] { cache.append(later, later); });
            support::rejects({"attention_cache.cu", "attention_cache: memory of v: expected that of k, in its stream"},
                             [&] { cache.append(k, later); });
            support::rejects({"attention_cache.cu", "attention_cache: shape of k: expected (11, 4), got (11, 257)"},
                             [&] { cache.append(wide_k, wide_k); });
            CHECK(cache.length(0) == 0);
            cache.append(k, k);
            wide.append(wide_k, wide_k);
            auto o = make(stream, 8), wide_o = make(stream, 257);
            auto const q = make(stream, 8), wide_q = make(stream, 257), strange = make(other, 8);
            cpx::cached_attention const attend(whole, comm);
            support::rejects({"cached_attention: dim: expected from 1 to 256, of tensors on devices, got 257"},
                             [&] { attend(wide, wide_q, 1., wide_o, comm); });
            support::rejects({"cached_attention: memory of o: expected that of q, in its stream, got another"},
                             [&] { attend(cache, strange, 1., o, comm); });
            attend(cache, q, 1., o, comm);

            auto const tokens = cpx::shard(whole.batch(), cpx::zigzag<>(1));
            device_cache<float> by_tokens({4, 2, 2}, tokens, comm);
            auto const keys = cpx::make_tensor<float>(tokens, 0, 4, cuda::memory(stream)),
                       queries = cpx::make_tensor<float>(tokens, 0, 8, cuda::memory(stream));
            by_tokens.append(keys, keys);
            std::vector<float> list(11 * 8);
            cpx::sharded const on_the_host(cpx::rows(list.data(), 11, 8), tokens, 0, cuda::memory(stream));
            cpx::cached_attention const gathers(tokens, comm);
            support::rejects({"cached_attention: o: expected memory of the current device"},
                             [&] { gathers(by_tokens, queries, 1., on_the_host, comm); });
            CHECK((cache.length(0) == 6 && cache.length(1) == 5));
        });
    }

    TEST_CASE("a batch for which a device has no memory leaves a cache as it was, and can be appended later") {
        if (!has_gpus()) return;
        auto const p = random_problem<float>(support::lengths({70, 9}), {4, 2, 16}, 8);
        auto const decode = [&](bool refused) {
            std::vector<float> o;
            cpx::threads::run(1, [&](cpx::threads& threads) {
                cuda::stream const stream;
                limited resource;
                cuda::memory const memory(stream, resource);
                threads_on_gpu comm(threads, memory);
                auto const sharded_as = [](cpx::thd const& batch) { return cpx::shard(batch, cpx::zigzag<>(1)); };
                auto const tensor = [&](numbers const& values, index_t heads, auto const& sharding) {
                    auto x = cpx::tensor<float, std::remove_cvref_t<decltype(sharding)>, cuda::memory>(
                        sharding, 0, heads * p.heads.dim, memory);
                    x.write(std::vector<float>(values.begin(), values.end()));
                    return x;
                };
                device_cache<float> cache(p.heads, sharded_as(p.batch), comm);
                lists done{0, 0};
                for (lists const& next : {lists{60, 8}, lists{70, 9}}) { // the latter wants larger memory
                    auto const now = tokens(p, done, next).first;
                    auto const sharding = sharded_as(now.batch);
                    auto const k = tensor(now.k, 2, sharding), v = tensor(now.v, 2, sharding),
                               q = tensor(now.q, 4, sharding);
                    auto to = tensor(now.q, 4, sharding);
                    for (int left = 0; refused && left < 3; ++left) { // none for keys, values, the list of rows
                        resource.left = left;
                        support::rejects({"limited: blocks"}, [&] { cache.append(k, v); });
                        CHECK((cache.length(0) == done[0] && cache.length(1) == done[1]));
                    }
                    resource.left = 1000;
                    cache.append(k, v);
                    cpx::cached_attention(sharding, comm)(cache, q, p.scale, to, comm);
                    auto const found = to.read();
                    o.insert(o.end(), found.begin(), found.end());
                    done = next;
                }
            });
            return o;
        };
        CHECK(decode(true) == decode(false));
    }
}
