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
            size_t const place = static_cast<size_t>(color * members + at);
            if (seen[place]++) return "groups that are no partition";
            if (all.world_rank(set, color, at) != r) return "a way back to another rank";
            if (at > 0 && !seen[place - 1]) return "coordinates in another order than ranks";
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

    // Source: Megatron-LM, megatron/core/parallel_state.py: the groups that it makes for these sizes.
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

        mesh const wide({.world = 8, .cp = 4, .ep = 4}); // which miles' first check of sizes wanted 16 ranks for
        CHECK(all_groups(wide, axis::cp) == all_groups(wide, axis::ep));
        CHECK(mesh({.world = 8, .tp = 4, .cp = 2}).size(axis::dp) == 1);
        mesh const as_tp({.world = 8, .tp = 2, .ep = 2}); // experts' tensor parallelism is that of dense layers
        CHECK(all_groups(as_tp, axis::etp) == all_groups(as_tp, axis::tp));
        CHECK(all_groups(as_tp, axis::ep) == groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}});
    }

    // Source: Megatron-LM, get_transformer_layer_offset of megatron/core/transformer/transformer_layer.py.
    TEST_CASE("layers of pipelines, virtual ones too, are Megatron's") {
        struct table {
            cpx::index_t layers;
            std::vector<std::vector<cpx::index_t>> first; // by rank, by chunk
        };
        for (table const& t : {table{48, {{0}, {12}, {24}, {36}}},
                               {48, {{0, 24}, {6, 30}, {12, 36}, {18, 42}}},
                               {40, {{0, 20}, {5, 25}, {10, 30}, {15, 35}}},
                               {48, {{0, 12, 24, 36}, {6, 18, 30, 42}}}}) {
            int const pp = static_cast<int>(t.first.size()), chunks = static_cast<int>(t.first[0].size());
            mesh const all({.world = 2 * pp, .tp = 2, .pp = pp, .chunks = chunks});
            std::vector<cpx::index_t> first(static_cast<size_t>(chunks));
            for (int r = 0; r < all.world(); ++r) {
                for (int chunk = 0; chunk < chunks; ++chunk) {
                    auto const own = all.layers(t.layers, r, chunk);
                    first[static_cast<size_t>(chunk)] = own.first;
                    CHECK(own.size() == t.layers / pp / chunks);
                }
                CHECK(first == t.first[static_cast<size_t>(all.coordinate(axis::pp, r))]);
            }
        }
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

    TEST_CASE("any order is a mesh where dense layers and experts have the same pipeline groups, and no other one") {
        std::array<axis, 5> order{axis::tp, axis::cp, axis::ep, axis::dp, axis::pp};
        std::ranges::sort(order);
        int taken = 0, refused = 0;
        do {
            for_each_mesh(12, [&](mesh_sizes sizes) {
                if (sizes.world != 12) return;
                sizes.order = order;
                // The definition: coordinates are the digits of a rank, of dense layers and of experts.
                int const dense[] = {sizes.tp, sizes.cp, 1, 12 / sizes.tp / sizes.cp / sizes.pp, sizes.pp};
                int const experts[] = {sizes.etp, 1, sizes.ep, 12 / sizes.etp / sizes.ep / sizes.pp, sizes.pp};
                auto const digit = [&](int const* of, int r, axis one) {
                    constexpr axis named[] = {axis::tp, axis::cp, axis::ep, axis::dp, axis::pp};
                    for (axis const a : order) {
                        int const size = of[std::ranges::find(named, a) - named];
                        if (a == one) return r % size;
                        r /= size;
                    }
                    return -1;
                };
                bool same = true;
                for (int r = 0; r < 12; ++r) same &= digit(dense, r, axis::pp) == digit(experts, r, axis::pp);
                try {
                    mesh const all(sizes);
                    ++taken;
                    bool right = same;
                    for (int r = 0; r < 12; ++r) {
                        for (axis const set : {axis::tp, axis::cp, axis::dp, axis::pp})
                            right &= all.coordinate(set, r) == digit(dense, r, set);
                        right &= all.coordinate(axis::etp, r) == digit(experts, r, axis::tp) &&
                                 all.coordinate(axis::ep, r) == digit(experts, r, axis::ep) &&
                                 all.coordinate(axis::edp, r) == digit(experts, r, axis::dp);
                        for (axis const set : {axis::cp, axis::cp | axis::dp, axis::ep | axis::edp})
                            right &= all.world_rank(set, all.color(set, r), all.coordinate(set, r)) == r;
                    }
                    if (!right) FAIL_CHECK("another mesh than the definition");
                } catch (cpx::error const& e) {
                    if (same || e.problem() != "order") FAIL_CHECK(e.what());
                    ++refused;
                }
            });
        } while (std::ranges::next_permutation(order).found);
        CHECK(taken > 10'000);
        CHECK(refused > 1'000);
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
        rejects({"mesh: cp: expected at least 1, got 0"}, [] { mesh({.world = 6, .cp = 0}); });
        rejects({"mesh: world: expected at least 1, got -6"}, [] { mesh({.world = -6}); });
        rejects({"mesh: etp: expected at least 1, got -1"}, [] { mesh({.world = 6, .etp = -1}); });
        rejects({"mesh: chunks: expected at least 1, got 0"}, [] { mesh({.world = 6, .chunks = 0}); });
        rejects({"mesh: ranks of the world: expected a multiple of tp, cp, pp = 2147483647 x 2147483647 x 1, got 6"},
                [] { mesh({.world = 6, .tp = 2147483647, .cp = 2147483647}); });
        rejects({"mesh: cp: expected a multiple of ulysses = 4, got 6"},
                [] { mesh({.world = 6, .cp = 6, .ulysses = 4}); });
        rejects({"mesh: order: expected tp, cp, ep, dp and pp, each once, got dp 2 times"}, [] {
            mesh({.world = 6, .order = {axis::tp, axis::cp, axis::ep, axis::dp, axis::dp}});
        });
        rejects({"mesh::color: world rank: expected 0 to 11, got 12"},
                [&] { static_cast<void>(all.color(axis::cp, 12)); });
        rejects({"mesh::coordinate: world rank: expected 0 to 11, got -1"},
                [&] { static_cast<void>(all.coordinate(axis::cp, -1)); });
        rejects({"mesh::group: world rank: expected 0 to 11, got 12"},
                [&] { static_cast<void>(all.group(axis::cp, 12)); });
        rejects({"mesh::color_in_node: ranks of a node: expected at least 1, got 0"},
                [&] { static_cast<void>(all.color_in_node(axis::cp, 0, 0)); });
        rejects({"mesh::within_nodes: ranks of a node: expected at least 1, got -8"},
                [&] { static_cast<void>(all.within_nodes(axis::cp, -8)); });
        rejects({"mesh::world_rank: color: expected 0 to 5, got 6"},
                [&] { static_cast<void>(all.world_rank(axis::cp, 6, 0)); });
        rejects({"mesh::size: axes: expected tp, cp, dp, pp, etp, ep or edp, got bit 256"},
                [&] { static_cast<void>(all.size(axis{256})); });
        rejects({"mesh::size: axes: expected those of dense layers or those of experts, got cp, ep"},
                [&] { static_cast<void>(all.size(axis::cp | axis::ep)); });
        rejects({"mesh::sequences: sequences of a step: expected a multiple of dp = 3, got 8"},
                [&] { static_cast<void>(all.sequences(8, 0)); });
        rejects({"mesh::accumulation_steps: sequences of a micro-batch: expected a divisor of a rank's 3, got 2"},
                [&] { static_cast<void>(all.accumulation_steps(9, 2)); });
        rejects({"mesh::layers: layers: expected a multiple of pipeline stages = 2, got 7"},
                [&] { static_cast<void>(all.layers(7, 0)); });
        rejects({"mesh::experts: experts: expected a multiple of ep = 3, got 8"},
                [&] { static_cast<void>(all.experts(8, 0)); });
        rejects({"mesh::experts: experts: expected not negative, a multiple of ep = 3, got -6"},
                [&] { static_cast<void>(all.experts(-6, 0)); });
        rejects({"mesh::layers: chunk of layers: expected 0 to 0, got 1"},
                [&] { static_cast<void>(all.layers(8, 0, 1)); });
    }
}
