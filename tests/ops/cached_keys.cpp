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
}
