// SPDX-License-Identifier: Apache-2.0
#include <cpx/testing/counted.hpp>

#include <cpx/cpx.hpp>

#include <doctest/doctest.h>

#include <support/packings.hpp>

namespace {

using cpx::index_t;
using support::lengths;

static_assert(cpx::transport<cpx::threads> && cpx::transport<cpx::counted<cpx::threads>>);

TEST_SUITE("transport") {
    TEST_CASE("what leaves the ranks is what the plans say, and the lower bound") {
        auto const a = cpx::shard(lengths({16, 24, 7}), cpx::zigzag<4>{});
        cpx::head_sharded<4> const heads(a.batch(), {{4, 3}, {2, 1}});
        std::vector<cpx::tally> sent(4);
        std::vector<cpx::volume> planned(4);
        cpx::threads::run(4, [&](cpx::threads& comm) {
            std::size_t const r = static_cast<std::size_t>(comm.rank());
            cpx::counted counter(comm);
            auto const p = cpx::relayout(a, heads, comm.rank());
            auto const x = cpx::make_tensor<float>(a, comm.rank(), 14);
            cpx::exchange(p, x, counter);
            sent[r] = counter.sent("relayout");
            planned[r] = {p.sent_rows(), p.sent_elements(14)};
            cpx::require(sent[r].messages == p.messages(), "test", "messages", p.messages(), sent[r].messages);
            cpx::require(counter.sent("agreement").messages == 3, "test", "agreements", 3,
                         counter.sent("agreement").messages);
            cpx::exchange(p, x, counter); // ranks agree once
            cpx::require(counter.sent("agreement").messages == 3, "test", "agreements", 3,
                         counter.sent("agreement").messages);
            cpx::require(counter.sent("halo").bytes == 0, "test", "halos", 0, counter.sent("halo").bytes);
        });
        cpx::tally total;
        for (std::size_t r = 0; r < 4; ++r) {
            CHECK(sent[r].rows == planned[r].rows);
            CHECK(sent[r].bytes == planned[r].elements * 4);
            total += sent[r];
        }
        auto const bound = cpx::lower_bound(a, heads);
        CHECK(total.rows == bound.rows);
        CHECK(total.bytes == bound.elements * 4);
        CHECK(total.messages == 12);
    }
}

} // namespace
