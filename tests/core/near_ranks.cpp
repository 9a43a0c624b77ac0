// SPDX-License-Identifier: Apache-2.0
#include <cpx/core/near_ranks.hpp>

#include <doctest/doctest.h>

#include <support/random.hpp>

#include <cstddef>
#include <vector>

namespace {

using cpx::index_t, cpx::range;

std::vector<range> groups_of(std::vector<int> const& hosts, index_t most) {
    std::vector<range> found;
    int const ranks = static_cast<int>(hosts.size());
    for (int r = 0; r < ranks; ++r)
        found.push_back(cpx::detail::near_ranks(r, ranks, most, [&](int other) {
            return hosts[static_cast<std::size_t>(other)] == hosts[static_cast<std::size_t>(r)];
        }));
    return cpx::detail::agreed_groups(found);
}

TEST_SUITE("core") {
    TEST_CASE("neighbouring ranks of a host are groups, cut where they are too many") {
        CHECK(groups_of({0, 0, 0, 0}, 32) == std::vector<range>(4, range{0, 4}));
        CHECK(groups_of({0, 0, 0, 1, 1}, 2) == std::vector<range>{{0, 2}, {0, 2}, {2, 3}, {3, 5}, {3, 5}});
        CHECK(groups_of({0, 1, 0, 1}, 8) == std::vector<range>{{0, 1}, {1, 2}, {2, 3}, {3, 4}}); // dealt in turn
        CHECK(groups_of({0, 0}, 1) == std::vector<range>{{0, 1}, {1, 2}});
        CHECK(groups_of({}, 3).empty());
    }
    TEST_CASE("every rank is in one group, of ranks of its host that have the same") {
        support::splitmix random(3);
        for (int round = 0; round < 500; ++round) {
            std::vector<int> hosts;
            for (index_t n = random.between(1, 20); n > 0; --n)
                hosts.push_back(hosts.empty() || random.between(0, 3) == 0 ? static_cast<int>(random.between(0, 3))
                                                                           : hosts.back());
            index_t const most = random.between(1, 6);
            auto const groups = groups_of(hosts, most);
            for (index_t r = 0; r < std::ssize(hosts); ++r) {
                range const own = groups[static_cast<std::size_t>(r)];
                CHECK((own.first <= r && r < own.last && own.size() <= most));
                for (index_t member = own.first; member < own.last; ++member) {
                    CHECK(groups[static_cast<std::size_t>(member)] == own);
                    CHECK(hosts[static_cast<std::size_t>(member)] == hosts[static_cast<std::size_t>(r)]);
                }
                // the next rank of this host begins a group only where this one is full
                bool const next = own.last < std::ssize(hosts) &&
                                  hosts[static_cast<std::size_t>(own.last)] == hosts[static_cast<std::size_t>(r)];
                CHECK((!next || own.size() == most));
            }
        }
    }
    TEST_CASE("where ranks see different groups, each of these is alone") {
        std::vector<range> const found{{0, 3}, {0, 3}, {2, 4}, {2, 4}, {4, 5}};
        CHECK(cpx::detail::agreed_groups(found) == std::vector<range>{{0, 1}, {1, 2}, {2, 4}, {2, 4}, {4, 5}});
    }
}

} // namespace
