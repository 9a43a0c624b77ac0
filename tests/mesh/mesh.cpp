// SPDX-License-Identifier: Apache-2.0
// Every mesh of at most 64 ranks, and tables of others.
#include <cpx/layout/zigzag.hpp>
#include <cpx/mesh/mesh.hpp>

#include <doctest/doctest.h>

#include <support/rejects.hpp>

#include <algorithm>
#include <string>
#include <vector>

namespace {

using cpx::axis;
using cpx::mesh;
using cpx::mesh_sizes;
using std::size_t;

using groups = std::vector<std::vector<int>>;

/// Returns the groups of an axis by their colours.
groups all_groups(mesh const& all, axis set) {
    groups found(static_cast<size_t>(all.world() / all.size(set)));
    for (int r = 0; r < all.world(); ++r)
        if (all.coordinate(set, r) == 0) found[static_cast<size_t>(all.color(set, r))] = all.group(set, r);
    return found;
}

template <class F>
void divisors(int n, F&& f) {
    for (int d = 1; d <= n; ++d)
        if (n % d == 0) f(d);
}

/// Calls `f(sizes)` for all ways to divide up to `most` ranks, in Megatron's order.
template <class F>
void for_each_mesh(int most, F&& f) {
    for (int world = 1; world <= most; ++world)
        divisors(world, [&](int pp) {
            divisors(world / pp, [&](int tp) {
                divisors(world / pp / tp, [&](int cp) {
                    divisors(world / pp, [&](int etp) {
                        divisors(world / pp / etp, [&](int ep) {
                            f(mesh_sizes{.world = world, .tp = tp, .cp = cp, .pp = pp, .ep = ep, .etp = etp});
                        });
                    });
                });
            });
        });
}

/// Returns what is wrong with the groups of a mesh, or "".
std::string problem_of(mesh const& all) {
    int const tp = all.size(axis::tp), cp = all.size(axis::cp), dp = all.size(axis::dp);
    int const etp = all.size(axis::etp), ep = all.size(axis::ep), edp = all.size(axis::edp);
    for (axis const set : {axis::tp, axis::ulysses, axis::ring, axis::cp, axis::dp, axis::pp, axis::etp, axis::ep,
                           axis::edp, axis::dp | axis::cp, axis::tp | axis::pp, axis::ep | axis::edp}) {
        int const members = all.size(set);
        std::vector<int> seen(static_cast<size_t>(all.world())); // a place of a group is one rank's
        for (int r = 0; r < all.world(); ++r) {
            int const color = all.color(set, r), at = all.coordinate(set, r);
            if (color < 0 || at < 0 || at >= members || color * members + at >= all.world()) return "numbers with gaps";
            if (seen[static_cast<size_t>(color * members + at)]++) return "groups that are no partition";
            if (all.rank(set, color, at) != r) return "a way back to another rank";
            if (at > 0 && all.rank(set, color, at - 1) >= r) return "coordinates in another order than ranks";
        }
    }
    for (int r = 0; r < all.world(); ++r) {
        int const dense =
            all.coordinate(axis::tp, r) +
            tp * (all.coordinate(axis::cp, r) + cp * (all.coordinate(axis::dp, r) + dp * all.coordinate(axis::pp, r)));
        int const expert = all.coordinate(axis::etp, r) +
                           etp * (all.coordinate(axis::ep, r) +
                                  ep * (all.coordinate(axis::edp, r) + edp * all.coordinate(axis::pp, r)));
        if (dense != r || expert != r) return "another order than Megatron's";
        if (all.coordinate(axis::cp, r) !=
            all.coordinate(axis::ulysses, r) + all.size(axis::ulysses) * all.coordinate(axis::ring, r))
            return "another cp than ulysses x ring";
        if (all.coordinate(axis::pp | axis::ep, r) / ep != all.coordinate(axis::pp, r)) // of the experts' arrangement
            return "other pipeline groups of experts";
    }
    return "";
}

} // namespace

TEST_SUITE("mesh") {
    TEST_CASE(
        "coordinates lead back, groups are partitions and pipelines coincide, in every mesh of 64 ranks or less") {
        int count = 0;
        for_each_mesh(64, [&](mesh_sizes sizes) {
            divisors(sizes.cp, [&](int ulysses) {
                sizes.ulysses = ulysses;
                std::string const problem = problem_of(mesh(sizes));
                if (!problem.empty())
                    FAIL_CHECK(problem << ": world " << sizes.world << " tp " << sizes.tp << " cp " << sizes.cp
                                       << " pp " << sizes.pp << " ep " << sizes.ep << " etp " << sizes.etp);
                ++count;
            });
        });
        CHECK(count > 10'000);
    }

    // Source: Megatron-LM's groups, as its parallel_state prints them for these sizes.
    TEST_CASE("groups are Megatron's") {
        mesh const eight({.world = 8, .cp = 2, .ep = 4});
        CHECK(all_groups(eight, axis::cp) == groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}});
        CHECK(all_groups(eight, axis::dp) == groups{{0, 2, 4, 6}, {1, 3, 5, 7}});
        CHECK(all_groups(eight, axis::ep) == groups{{0, 1, 2, 3}, {4, 5, 6, 7}});
        CHECK(all_groups(eight, axis::edp) == groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}});

        mesh const deep({.world = 8, .tp = 2, .pp = 2, .ep = 2, .etp = 1});
        CHECK(all_groups(deep, axis::tp) == groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}});
        CHECK(all_groups(deep, axis::ep) == all_groups(deep, axis::tp));
        CHECK(all_groups(deep, axis::dp) == groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}});
        CHECK(all_groups(deep, axis::edp) == all_groups(deep, axis::dp));
        CHECK(all_groups(deep, axis::pp) == groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}});
        CHECK(deep.layers(48, 5) == cpx::range{24, 48});
        CHECK(deep.experts(128, 5) == cpx::range{64, 128});
    }

    TEST_CASE("experts may lie over all ranks of a context-parallel job") {
        constexpr mesh all({.world = 8, .cp = 2, .ep = 8, .etp = 1});
        static_assert(all.size(axis::dp) == 4 && all.size(axis::edp) == 1);
        static_assert(all.experts(64, 3) == cpx::range{24, 32});
        static_assert(cpx::zigzag<all.size(axis::cp)>{}.ranks() == 2);
        CHECK(all_groups(all, axis::ep) == groups{{0, 1, 2, 3, 4, 5, 6, 7}});
    }

    TEST_CASE("context parallelism may be Ulysses within a ring, and groups end at nodes") {
        mesh const all({.world = 16, .tp = 2, .cp = 4, .ulysses = 2});
        CHECK(all_groups(all, axis::ulysses) ==
              groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}});
        CHECK(all.group(axis::ring, 0) == std::vector<int>{0, 4});
        CHECK(all.group(axis::cp, 1) == std::vector<int>{1, 3, 5, 7});
        CHECK(all.within_nodes(axis::ulysses, 4));
        CHECK(!all.within_nodes(axis::ring, 4));
        CHECK(all.within_nodes(axis::cp, 8));
        CHECK(all.color_in_node(axis::dp, 8, 8) == 8); // alone there
        CHECK(all.color_in_node(axis::cp, 5, 4) == 5);
        CHECK(all.color_in_node(axis::cp, 7, 4) == 5);
        CHECK(all.color_in_node(axis::cp | axis::tp, 7, 8) == 0);
    }

    TEST_CASE("any order that keeps pipelines together is a mesh") {
        std::array<axis, 5> order{axis::tp, axis::cp, axis::ep, axis::dp, axis::pp};
        std::ranges::sort(order);
        int taken = 0, refused = 0;
        do {
            try {
                mesh const all({.world = 48, .tp = 2, .cp = 4, .pp = 2, .ep = 3, .etp = 1, .order = order});
                ++taken;
                for (axis const set : {axis::tp, axis::cp, axis::dp, axis::pp, axis::ep, axis::edp})
                    for (int r = 0; r < 48; ++r)
                        if (all.rank(set, all.color(set, r), all.coordinate(set, r)) != r) FAIL_CHECK("another rank");
                for (int r = 0; r < 48; ++r)
                    if (all.group(axis::pp, r).back() - all.group(axis::pp, r).front() !=
                        all.rank(axis::ep | axis::edp | axis::etp, 1, 0) -
                            all.rank(axis::ep | axis::edp | axis::etp, 0, 0))
                        FAIL_CHECK("other pipeline groups of experts");
            } catch (cpx::error const& e) {
                CHECK(e.problem() == "order");
                ++refused;
            }
        } while (std::ranges::next_permutation(order).found);
        CHECK(taken == 48); // pp last or first
        CHECK(refused == 72);
    }

    TEST_CASE("only data parallelism multiplies a batch") {
        mesh const all({.world = 24, .tp = 2, .cp = 3, .pp = 2, .chunks = 3});
        CHECK(all.sequences(16, 0) == cpx::range{0, 8});
        CHECK(all.sequences(16, 5) == all.sequences(16, 0));  // another of tp and cp
        CHECK(all.sequences(16, 12) == all.sequences(16, 0)); // another of pp
        CHECK(all.sequences(16, 6) == cpx::range{8, 16});
        CHECK(all.accumulation_steps(16, 2) == 4);
        CHECK(all.layers(12, 0, 0) == cpx::range{0, 2}); // 6 stages: ranks of stage 0, of stage 1, again
        CHECK(all.layers(12, 12, 0) == cpx::range{2, 4});
        CHECK(all.layers(12, 12, 2) == cpx::range{10, 12});
    }

    TEST_CASE("sizes that do not fit each other are errors that name them") {
        using support::rejects;
        mesh const all({.world = 12, .cp = 2, .pp = 2, .ep = 3});
        rejects({"mesh: ranks of the world: expected a multiple of tp, cp, pp = 2 x 2 x 1, got 6"},
                [] { mesh({.world = 6, .tp = 2, .cp = 2}); });
        rejects({"mesh: ranks of the world: expected a multiple of etp, ep, pp = 1 x 4 x 1, got 6"},
                [] { mesh({.world = 6, .ep = 4}); });
        rejects({"mesh: sizes: expected at least 1, got 0"}, [] { mesh({.world = 6, .cp = 0}); });
        rejects({"mesh: ranks of the world: expected a multiple of tp, cp, pp = 2147483647 x 2147483647 x 1, got 6"},
                [] { mesh({.world = 6, .tp = 2147483647, .cp = 2147483647}); });
        rejects({"mesh: cp: expected a multiple of ulysses = 4, got 6"},
                [] { mesh({.world = 6, .cp = 6, .ulysses = 4}); });
        rejects({"mesh: order: expected tp, cp, ep, dp and pp, each once"}, [] {
            mesh({.world = 6, .order = {axis::tp, axis::cp, axis::ep, axis::dp, axis::dp}});
        });
        rejects({"mesh: world rank: expected 0 to 11, got 12"}, [&] { static_cast<void>(all.color(axis::cp, 12)); });
        rejects({"mesh: color: expected 0 to 5, got 6"}, [&] { static_cast<void>(all.rank(axis::cp, 6, 0)); });
        rejects({"mesh: axes: expected tp, cp, dp, pp, etp, ep or edp, got bit 256"},
                [&] { static_cast<void>(all.size(axis{256})); });
        rejects({"mesh: axes: expected those of dense layers or those of experts, got some of both"},
                [&] { static_cast<void>(all.size(axis::cp | axis::ep)); });
        rejects({"mesh: sequences of a step: expected a multiple of dp = 3, got 8"},
                [&] { static_cast<void>(all.sequences(8, 0)); });
        rejects({"mesh: sequences of a micro-batch: expected a divisor of a rank's 3, got 2"},
                [&] { static_cast<void>(all.accumulation_steps(9, 2)); });
        rejects({"mesh: layers: expected a multiple of pipeline stages = 2, got 7"},
                [&] { static_cast<void>(all.layers(7, 0)); });
        rejects({"mesh: experts: expected a multiple of ep = 3, got 8"}, [&] { static_cast<void>(all.experts(8, 0)); });
        rejects({"mesh: chunk of layers: expected 0 to 0, got 1"}, [&] { static_cast<void>(all.layers(8, 0, 1)); });
    }
}
