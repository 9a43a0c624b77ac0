// SPDX-License-Identifier: Apache-2.0
// Batches that cannot be kept.
#include <cpx/ops/cached_keys.hpp>

#include <cpx/ops/attention_cache.hpp>

#include <doctest/doctest.h>

#include <ops/reference.hpp>
#include <support/far_ranks.hpp>
#include <support/rejects.hpp>

/// Keys and values in memory that can be full.
template <>
class cpx::detail::cached_keys<double, support::far_memory> {
public:
    static inline bool full = false;

    cached_keys(index_t sequences, index_t width, support::far_memory in)
        : memory_(in), kept_(sequences, width, host_memory()) {}
    support::far_memory memory() const { return memory_; }
    template <class... X>
    void append(X const&... x) {
        require(!full, "far_memory", "room", "some", "none");
        kept_.append(x...);
    }
    void check(auto const&...) const {}
    template <class... X>
    void attend(X const&... x) const {
        kept_.attend(x...);
    }

private:
    support::far_memory memory_;
    cached_keys<double, host_memory> kept_;
};

TEST_SUITE("ops") {
    TEST_CASE("a batch that cannot be kept leaves a cache as it was, and can be appended later") {
        using kept = cpx::detail::cached_keys<double, support::far_memory>;
        auto const decode = [](bool refused) {
            std::vector<double> o;
            cpx::threads::run(1, [&](cpx::threads& threads) {
                support::far_ranks comm(threads);
                support::splitmix numbers(1);
                auto const prompt = cpx::shard(support::lengths({6, 0, 5}), cpx::zigzag<>(1)),
                           next = cpx::shard(support::lengths({1, 2, 1}), cpx::zigzag<>(1));
                cpx::attention_cache<double, support::far_memory> cache({4, 2, 2}, prompt, comm);
                for (auto const& sharding : {prompt, next}) {
                    auto const some = [&](cpx::index_t width) {
                        auto x = cpx::make_tensor<double>(sharding, comm, width);
                        x.write(on_ranks::uniform<double>(numbers, x.data().count() * width));
                        return x;
                    };
                    auto const k = some(4), v = some(4), q = some(8);
                    auto to = some(8);
                    auto const before = cache.batch();
                    kept::full = refused;
                    for (int i = 0; i < (refused ? 2 : 0); ++i)
                        support::rejects({"far_memory: room: expected some, got none"}, [&] { cache.append(k, v); });
                    kept::full = false;
                    CHECK(cache.batch() == before);
                    cache.append(k, v);
                    cpx::cached_attention(sharding, comm)(cache, q, 0.5, to, comm);
                    auto const found = to.read();
                    o.insert(o.end(), found.begin(), found.end());
                }
                CHECK((cache.length(0) == 7 && cache.length(1) == 2 && cache.length(2) == 6));
            });
            return o;
        };
        CHECK(on_ranks::same_bits(decode(true), decode(false)));
    }

    TEST_CASE("the tensor of another stream is named, before it is kept or attention over a cache runs") {
        cpx::threads::run(1, [](cpx::threads& threads) {
            support::far_ranks comm(threads);
            auto const sharding = cpx::shard(support::lengths({3, 2}), cpx::zigzag<>(1));
            auto const in = [&](support::far_memory memory, cpx::index_t width) {
                return cpx::make_tensor<double>(sharding, 0, width, memory);
            };
            auto const k = in(comm.memory(), 4), q = in(comm.memory(), 8), later = in({8}, 4), later_q = in({8}, 8);
            auto o = in(comm.memory(), 8), later_o = later_q;
            cpx::attention_cache<double, support::far_memory> cache({4, 2, 2}, sharding, comm);
            auto const rejects = [](std::string const& text, auto const& f) {
                support::rejects({"cached_keys.cpp", text + ", in its stream, got another"}, f);
            };
            rejects("attention_cache: memory of k: expected that of this cache", [&] { cache.append(later, later); });
            rejects("attention_cache: memory of v: expected that of k", [&] { cache.append(k, later); });
            CHECK(cache.length(0) == 0);
            cache.append(k, k);
            cpx::cached_attention const attend(sharding, comm);
            rejects("cached_attention: memory of o: expected that of q", [&] { attend(cache, q, 1., later_o, comm); });
            rejects("cached_attention: memory of q: expected that of the cache",
                    [&] { attend(cache, later_q, 1., later_o, comm); });
            attend(cache, q, 1., o, comm);
        });
    }
}
