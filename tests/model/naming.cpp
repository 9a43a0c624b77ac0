// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/naming.hpp>

#include "model/faults.hpp"

#include <doctest/doctest.h>

#include <support/rejects.hpp>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

using cpx::axis;
using cpx::index_t;
using cpx::mesh;
using cpx::mesh_sizes;
using cpx::naming;
using cpx::pipeline;
using cpx::pipeline_sizes;
using support::rejects;

namespace {

/// What a decoder layer has: without an expert, and of an expert, whose number stands for #.
struct layer_names {
    std::vector<std::string> dense, expert;
};
layer_names const few = {{"mlp.router.weight"}, {"mlp.experts.linear_fc1.weight#"}};
layer_names const every = {{"self_attention.linear_qkv.weight", "mlp.linear_fc1.layer_norm_weight",
                            "mlp.router.expert_bias", "mlp.shared_experts.linear_fc1.weight",
                            "mlp.experts.linear_fc1.weight_quantizer._amax",
                            "mlp.experts.local_experts.1.linear_fc1.adapter.linear_in.weight"},
                           {"mlp.experts.linear_fc2.weight#", "mlp.experts.linear_fc1.bias#",
                            "mlp.experts.local_experts.#.linear_fc2.weight"}};

std::string numbered(std::string pattern, index_t n) {
    auto const at = pattern.find('#');
    return at == pattern.npos ? pattern : pattern.replace(at, 1, std::to_string(n));
}

/// Calls `f(name, expert)` for the names of so many layers with so many experts.
template <class F>
void for_each_name(layer_names const& of, index_t layers, index_t experts, F&& f) {
    for (index_t layer = 0; layer < layers; ++layer) {
        std::string const stem = "module.decoder.layers." + std::to_string(layer) + '.';
        for (std::string const& name : of.dense) f(stem + name, -1);
        for (index_t e = 0; e < experts; ++e)
            for (std::string const& name : of.expert) f(stem + numbered(name, e), e);
    }
}

/// Returns what is wrong with the names that ranks give, one rank of each (pp, chunk, ep), or "": those of experts must
/// be the model's, each on one rank, all others on one rank of each coordinate on ep; and lead back.
std::string problem_of(naming const& names, layer_names const& of) {
    auto const& stages = names.stages();
    auto const& ranks = names.ranks();
    int const ep = ranks.size(axis::ep);
    std::unordered_map<std::string, int> missing;
    for_each_name(of, stages.layers(), names.experts(),
                  [&](std::string const& name, index_t expert) { missing[name] = expert < 0 ? ep : 1; });
    std::map<std::pair<int, int>, int> rank_of;
    for (int r = 0; r < ranks.world(); ++r) rank_of[{ranks.coordinate(axis::pp, r), ranks.coordinate(axis::ep, r)}] = r;
    std::string problem;
    for (std::size_t i = 0; i < stages.stages().size(); ++i)
        for (int e = 0; e < ep; ++e) {
            int const pp = static_cast<int>(i) % stages.ranks(), chunk = static_cast<int>(i) / stages.ranks();
            if (!rank_of.contains({pp, e})) return "no rank";
            int const r = rank_of[{pp, e}];
            auto const check = [&](std::string const& name, index_t expert) {
                std::string const global = names.global(name, r, chunk);
                if (auto const at = missing.find(global); at == missing.end() || at->second-- == 0)
                    problem = "none of the model, or once too often";
                if (names.local(global, r, chunk) != name) problem = "a way back to another name";
                auto const owner = names.owner(global);
                if (owner.name != name || owner.stage->rank != pp || owner.stage->chunk != chunk ||
                    owner.ep != (expert < 0 ? std::nullopt : std::optional(e)))
                    problem = "another owner";
                if (!problem.empty()) problem += ": " + name + " is " + global;
            };
            for_each_name(of, stages.stages()[i].layers.size(), names.experts_of_rank(), check);
            if (!problem.empty()) return problem;
        }
    for (auto const& [name, times] : missing)
        if (times != 0) return "nowhere: " + name;
    return "";
}

template <class F>
void divisors(int n, F&& f) {
    for (int d = 1; d <= n; ++d)
        if (n % d == 0) f(d);
}

/// Calls `f(sizes)` for all ways to divide up to 64 ranks.
template <class F>
void for_each_mesh(F&& f) {
    for (int world = 1; world <= 64; ++world)
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

/// Returns what every admissible split of so many layers over `ranks`, in up to 3 chunks, and a few layout strings come
/// to: many say the same in other words.
std::vector<pipeline> splits(index_t layers, int ranks) {
    std::vector<pipeline_sizes> all;
    for (int chunks = 1; chunks <= 3; ++chunks) {
        for (int accounts = 0; accounts < 4; ++accounts)
            all.push_back({.layers = layers,
                           .ranks = ranks,
                           .chunks = chunks,
                           .account_for_embedding = accounts % 2 == 1,
                           .account_for_loss = accounts / 2 == 1});
        for (index_t first = 0; first <= layers; ++first)
            for (index_t last = 0; last <= layers - first; ++last) {
                all.push_back({.layers = layers, .ranks = ranks, .chunks = chunks});
                if (first > 0) all.back().first = first;
                if (last > 0) all.back().last = last;
                if (first + last == 0) all.pop_back();
            }
    }
    std::string const stages = std::to_string(ranks - 1), count = std::to_string(layers - 1);
    for (std::string const& text : {"E(|)*" + stages + "t*" + count + "tL", "Et*" + count + "(|)*" + stages + "tL",
                                    "E(|)*" + stages + "|t*" + count + "(|)*" + stages + "tL"})
        all.push_back({.layers = layers, .ranks = ranks, .layout = text});
    std::vector<pipeline> found;
    for (pipeline_sizes const& sizes : all) try {
            pipeline const p(sizes);
            auto const same = [&](pipeline const& q) { return q.stages() == p.stages() && q.chunks() == p.chunks(); };
            if (std::ranges::none_of(found, same)) found.push_back(p);
        } catch (cpx::error const&) { // does not divide
        }
    return found;
}

naming one(mesh_sizes const& sizes, pipeline_sizes stages, index_t experts) {
    stages.ranks = sizes.pp;
    return naming(mesh(sizes), pipeline(stages), experts);
}

} // namespace

TEST_SUITE("model") {
    // Source: Megatron-Bridge, tests/unit_tests/models/test_model_bridge.py.
    TEST_CASE("experts are renumbered where names have one, also without a pipeline") {
        auto const four = one({.world = 4, .ep = 4}, {.layers = 1}, 8);
        auto const two = one({.world = 2, .ep = 2}, {.layers = 1}, 4);
        std::string const layer = "decoder.layers.0.mlp.experts.";
        CHECK(four.global(layer + "local_experts.1.linear_fc1.weight", 2) ==
              layer + "local_experts.5.linear_fc1.weight");
        CHECK(four.global(layer + "local_experts.1", 2) == layer + "local_experts.5");
        CHECK(four.global(layer + "linear_fc1.weight1", 2) == layer + "linear_fc1.weight5");
        CHECK(four.global(layer + "linear_fc1.bias1", 2) == layer + "linear_fc1.bias5");
        CHECK(four.global(layer + "linear_fc2.weight1._extra_state", 2) == layer + "linear_fc2.weight5._extra_state");
        CHECK(two.global(layer + "linear_fc1.weight0", 1) == layer + "linear_fc1.weight2");
        CHECK(two.global(layer + "linear_fc2.bias1", 1) == layer + "linear_fc2.bias3");
        CHECK(two.global("decoder.layers.0.mlp.vision_moe_layer.experts.local_experts.1.linear_fc1.weight", 1) ==
              "decoder.layers.0.mlp.vision_moe_layer.experts.local_experts.3.linear_fc1.weight");
        for (char const* const name :
             {"decoder.layers.0.mlp.experts.linear_fc1.weight_quantizer._amax",
              "decoder.layers.0.mlp.experts.linear_fc1.input_quantizer._amax",
              "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.adapter.linear_in.weight",
              "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight_quantizer._amax",
              "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
              "decoder.layers.0.mlp.shared_experts.experts.local_experts.1.linear_fc1.weight",
              "decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.router.expert_bias"}) {
            CHECK(four.global(name, 2) == name);
            CHECK(four.local(name, 2) == name);
        }
    }

    // Source: review of miles PR 1088, second finding: a return where pp is 1 left out the experts.
    TEST_CASE("experts are renumbered without a pipeline, layers without experts, and both together") {
        std::string const name = "decoder.layers.0.mlp.experts.linear_fc1.weight1";
        CHECK(one({.world = 4, .ep = 4}, {.layers = 48}, 8).global(name, 2) ==
              "decoder.layers.0.mlp.experts.linear_fc1.weight5");
        auto const both = one({.world = 8, .pp = 2, .ep = 4}, {.layers = 48}, 8);
        CHECK(both.global(name, 6) == "decoder.layers.24.mlp.experts.linear_fc1.weight5");
        CHECK(both.local("decoder.layers.24.mlp.experts.linear_fc1.weight5", 6) == name);
        CHECK(one({.world = 2, .pp = 2}, {.layers = 48}, 8).global(name, 1) ==
              "decoder.layers.24.mlp.experts.linear_fc1.weight1");
        CHECK(both.global("mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight1", 6) ==
              "mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight5");
    }

    // Source: review of miles PR 1088, first finding: a dense model has no group of ep. A mesh has one of one rank.
    TEST_CASE("a model without experts has names under any mesh") {
        auto const dense = one({.world = 8, .tp = 2, .pp = 2}, {.layers = 8}, 0);
        CHECK(dense.global("decoder.layers.0.mlp.linear_fc1.weight", 5) == "decoder.layers.4.mlp.linear_fc1.weight");
        CHECK(one({.world = 8, .ep = 8}, {.layers = 8}, 0).experts_of_rank() == 0);
    }

    // Source: Megatron-LM, megatron/core/parallel_state.py: the expert groups of 8 ranks, tp 2, pp 2, ep 2, etp 1.
    TEST_CASE("the coordinate on ep is that of the experts' mesh") {
        auto const all = one({.world = 8, .tp = 2, .pp = 2, .ep = 2, .etp = 1}, {.layers = 48}, 128);
        CHECK(all.global("decoder.layers.3.mlp.experts.linear_fc1.weight7", 5) ==
              "decoder.layers.27.mlp.experts.linear_fc1.weight71");
        CHECK(all.global("decoder.layers.3.mlp.experts.linear_fc1.weight7", 2) ==
              "decoder.layers.3.mlp.experts.linear_fc1.weight7");
        auto const wide = one({.world = 8, .cp = 2, .ep = 8, .etp = 1}, {.layers = 2}, 64); // over cp and dp
        CHECK(wide.global("decoder.layers.1.mlp.experts.linear_fc2.weight7", 7) ==
              "decoder.layers.1.mlp.experts.linear_fc2.weight63");
    }

    // Source: Megatron-LM, the modules of megatron/core; miles and Megatron-Bridge for what stands before them.
    TEST_CASE("decoder layers are renumbered, whatever stands before them, and layers of other parts are not") {
        auto const deep = one({.world = 2, .pp = 2}, {.layers = 48}, 4);
        for (std::string const before : {"", "module.", "module.module.module.", "language_model.",
                                         "module.language_model.", "module.module.language_model."}) {
            CHECK(deep.global(before + "decoder.layers.3.mlp.linear_fc1.weight", 1) ==
                  before + "decoder.layers.27.mlp.linear_fc1.weight");
            CHECK(deep.local(before + "decoder.layers.27.mlp.linear_fc1.weight", 1) ==
                  before + "decoder.layers.3.mlp.linear_fc1.weight");
            for (std::string const same :
                 {"mtp.layers.0.transformer_layer.mlp.linear_fc1.weight",
                  "mtp.layers.0.mtp_model_layer.mlp.linear_fc1.weight", "mtp.layers.0.eh_proj.weight",
                  "vision_model.decoder.layers.3.mlp.linear_fc1.weight", "vision_model.merger.linear_fc1.weight",
                  "embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight",
                  "encoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.03.weight", "decoder.layers.3",
                  "decoder.layers.-3.weight", "decoder.layers..weight", "other.decoder.layers.3.weight", "module.", "",
                  ".", "decoder.layers.3x.weight", "Decoder.layers.3.weight"}) {
                CHECK(deep.global(before + same, 1) == before + same);
                CHECK(deep.local(before + same, 1) == before + same);
            }
        }
        std::string const inner = "decoder.layers.1.self_attention.decoder.layers.1.weight"; // the first alone
        CHECK(deep.global(inner, 1) == "decoder.layers.25.self_attention.decoder.layers.1.weight");
    }

    TEST_CASE("what resembles the name of an expert and is none stays as it is") {
        auto const two = one({.world = 2, .ep = 2}, {.layers = 1}, 4);
        for (std::string const end :
             {"experts.linear_fc1.weight", "experts.linear_fc1.weight01", "experts.linear_fc1.weight1x",
              "experts.linear_fc1.weights1", "experts.linear_fc3.weight1", "expert.linear_fc1.weight1",
              "experts.linear_fc1.layer_norm.weight1", "experts.local_experts.x1.weight", "experts.local_experts",
              "linear_fc1.weight1", "experts.weight10", "experts.weight1.x", "experts.weight3",
              "experts.linear_fc1.bias_1"})
            CHECK(two.global("decoder.layers.0.mlp." + end, 1) == "decoder.layers.0.mlp." + end);
        CHECK(two.global("mlp.experts.linear_fc1.weight1", 1) == "mlp.experts.linear_fc1.weight3"); // of any part
    }

    TEST_CASE("every parameter has one owner in every chunk of a pipeline") {
        auto const names = one({.world = 8, .pp = 2, .ep = 2}, {.layers = 8, .chunks = 2}, 8);
        auto const owner = names.owner("module.decoder.layers.7.mlp.experts.linear_fc1.weight6");
        CHECK(owner.name == "module.decoder.layers.1.mlp.experts.linear_fc1.weight2");
        CHECK(owner.stage == cpx::pipeline_place{1, 1, 1});
        CHECK(owner.ep == 1);
        CHECK(names.local("decoder.layers.7.mlp.router.weight", 4, 1) == "decoder.layers.1.mlp.router.weight");
        CHECK(!names.local("decoder.layers.7.mlp.router.weight", 4, 0));
        CHECK(!names.local("decoder.layers.7.mlp.router.weight", 0, 1));
        CHECK(!names.local("decoder.layers.7.mlp.experts.linear_fc1.weight6", 4, 1)); // of ep 0
        auto const stage = [&](char const* name) { return names.owner(name).stage; };
        CHECK(stage("embedding.word_embeddings.weight") == cpx::pipeline_place{0, 0, 0});
        CHECK(stage("vision_model.decoder.layers.3.x") == cpx::pipeline_place{0, 0, 0});
        CHECK(stage("output_layer.weight") == cpx::pipeline_place{1, 1, 0});
        CHECK(stage("decoder.final_layernorm.weight") == cpx::pipeline_place{1, 1, 0});
        CHECK(stage("mtp.layers.0.eh_proj.weight") == cpx::pipeline_place{1, 1, 0});
        CHECK(!stage("something.else"));
        CHECK(!names.owner("decoder.layers.0.mlp.router.weight").ep);
        auto const apart = one({.world = 4, .pp = 4}, {.layers = 2, .layout = "Et|t|m|L"}, 0);
        CHECK(apart.owner("mtp.layers.0.eh_proj.weight").stage->rank == 2);
        CHECK(apart.owner("output_layer.weight").stage->rank == 3);
        CHECK(apart.owner("decoder.final_layernorm.weight").stage ==
              cpx::pipeline_place{1, 0, 0}); // with the last layer
    }

    TEST_CASE(
        "in every mesh of 64 ranks or less, with every split of layers, names of all ranks are the model's, once") {
        std::map<std::pair<int, int>, std::pair<std::string, int>> law; // of a pp and an ep, over all splits
        int meshes = 0, pipelines = 0;
        for_each_mesh([&](mesh_sizes const& sizes) {
            mesh const all(sizes);
            ++meshes;
            // A name depends on the coordinates on pp and ep alone: so does the law, where every pair of them is a
            // rank's, with every tp and etp, and both arrangements have the same pipelines.
            std::set<std::vector<int>> dense, experts;
            for (int r = 0; r < all.world(); ++r) {
                int const pp = all.coordinate(axis::pp, r), ep = all.coordinate(axis::ep, r);
                dense.insert({pp, all.coordinate(axis::tp, r)});
                experts.insert({pp, ep, all.coordinate(axis::etp, r)});
                if (all.coordinate(axis::ep | axis::pp, r) != ep + all.size(axis::ep) * pp)
                    FAIL_CHECK("experts of another pipeline, of world " << sizes.world);
            }
            if (dense.size() != static_cast<std::size_t>(sizes.pp * sizes.tp) ||
                experts.size() != static_cast<std::size_t>(sizes.pp * sizes.ep * sizes.etp))
                FAIL_CHECK("a cell without a rank, of world " << sizes.world);
            auto const [at, fresh] = law.insert({{sizes.pp, sizes.ep}, {}});
            if (fresh) {
                auto& [problem, count] = at->second;
                for (index_t const layers : {6, 8})
                    for (pipeline const& stages : splits(layers, sizes.pp)) {
                        ++count;
                        if (problem.empty())
                            problem = problem_of(naming(all, stages, sizes.ep < 4 ? 2 * sizes.ep : sizes.ep), few);
                    }
                pipelines += count;
            }
            if (!at->second.first.empty()) FAIL_CHECK(at->second.first << ": pp " << sizes.pp << " ep " << sizes.ep);
            // And it is these coordinates of every rank that a name depends on.
            auto const even = one(sizes, {.layers = 2 * sizes.pp}, 3 * sizes.ep);
            for (int r = 0; r < all.world(); ++r) {
                index_t const layer = 1 + 2 * all.coordinate(axis::pp, r), expert = 2 + 3 * all.coordinate(axis::ep, r);
                std::string const global = "decoder.layers." + std::to_string(layer) +
                                           ".mlp.experts.linear_fc1.weight" + std::to_string(expert);
                if (even.global("decoder.layers.1.mlp.experts.linear_fc1.weight2", r) != global)
                    FAIL_CHECK("another name than " << global << " of rank " << r << " of world " << sizes.world);
            }
        });
        CHECK(meshes > 20'000);
        CHECK(pipelines > 5'000);
    }

    TEST_CASE("the law holds for long pipelines, whose layers are even or in virtual stages") {
        int pipelines = 0;
        for (int const pp : {12, 16, 24, 32, 64})
            for (int const ep : {1, 2})
                for (int const chunks : {1, 2, 3})
                    for (index_t const each : {1, 2})
                        for (int const accounts : {0, 1, 2, 3}) {
                            bool const embedding = accounts % 2 == 1, loss = accounts / 2 == 1;
                            naming const names(mesh({.world = 2 * pp * ep, .tp = 2, .pp = pp, .ep = ep}),
                                               pipeline({.layers = each * chunks * pp - embedding - loss,
                                                         .ranks = pp,
                                                         .chunks = chunks,
                                                         .account_for_embedding = embedding,
                                                         .account_for_loss = loss}),
                                               2 * ep);
                            if (auto const problem = problem_of(names, few); !problem.empty())
                                FAIL_CHECK(problem << ": pp " << pp << " chunks " << chunks << " ep " << ep);
                            ++pipelines;
                        }
        CHECK(pipelines == 5 * 2 * 3 * 2 * 4);
    }

    TEST_CASE("the law holds for names of every family") {
        for (int const pp : {1, 2, 4})
            for (int const ep : {1, 2, 3})
                for (pipeline const& stages : splits(12, pp)) {
                    naming const names(mesh({.world = 6 * pp * ep, .tp = 2, .cp = 3, .pp = pp, .ep = ep, .etp = 1}),
                                       stages, 6);
                    if (auto const problem = problem_of(names, every); !problem.empty())
                        FAIL(problem << ": pp " << pp << " ep " << ep);
                }
    }

    // Source: Megatron-LM, GroupedMLP of megatron/core/transformer/moe/experts.py, which later versions do not have.
    TEST_CASE("a buffer of experts is a view of one expert after the other, each transposed") {
        auto const four = one({.world = 4, .ep = 4}, {.layers = 4}, 8); // of rank 2: experts 4 and 5
        auto const shown = [](cpx::expert_view const& view) {
            std::vector<std::vector<index_t>> rows(static_cast<std::size_t>(view.rows));
            for (index_t r = 0; r < view.rows; ++r)
                for (index_t c = 0; c < view.columns; ++c)
                    rows[static_cast<std::size_t>(r)].push_back(view.place(r, c));
            return rows;
        };
        using matrix = std::vector<std::vector<index_t>>;
        auto const one_ = four.split_experts("decoder.layers.3.mlp.experts.weight1", 2, 12, 2); // elements are places
        REQUIRE(one_.size() == 2);
        CHECK(one_[0].name == "decoder.layers.3.mlp.experts.linear_fc1.weight4");
        CHECK(one_[1].name == "decoder.layers.3.mlp.experts.linear_fc1.weight5");
        CHECK(shown(one_[0]) == matrix{{0, 6}, {1, 7}, {2, 8}, {3, 9}, {4, 10}, {5, 11}}); // [[0..5],[6..11]]^T
        CHECK(shown(one_[1]) == matrix{{12, 18}, {13, 19}, {14, 20}, {15, 21}, {16, 22}, {17, 23}});
        auto const two = four.split_experts("decoder.layers.3.mlp.experts.weight2", 6, 2, 2);
        REQUIRE(two.size() == 2);
        CHECK(two[0].name == "decoder.layers.3.mlp.experts.linear_fc2.weight4");
        CHECK(shown(two[0]) == matrix{{0, 2, 4}, {1, 3, 5}}); // [[0,1],[2,3],[4,5]]^T
        auto const deep = one({.world = 4, .pp = 2, .ep = 2}, {.layers = 8}, 4);
        CHECK(deep.split_experts("module.decoder.layers.3.mlp.experts.weight2", 2, 1, 3)[1].name ==
              "module.decoder.layers.7.mlp.experts.linear_fc2.weight3");
    }

    TEST_CASE("views of a buffer have each of its elements once") {
        for (char const* const end : {"weight1", "weight2"})
            for (int const experts : {1, 2, 3, 5})
                for (index_t const inner : {0, 1, 4})
                    for (index_t const hidden : {0, 1, 3}) {
                        bool const outer = std::string(end) == "weight1";
                        auto const views =
                            one({}, {.layers = 1}, experts)
                                .split_experts(std::string("decoder.layers.0.mlp.experts.") + end,
                                               outer ? hidden : experts * inner, outer ? experts * inner : hidden, 0);
                        std::vector<int> times(static_cast<std::size_t>(experts * inner * hidden));
                        for (auto const& view : views) {
                            CHECK(view.rows == (outer ? inner : hidden));
                            for (index_t r = 0; r < view.rows; ++r)
                                for (index_t c = 0; c < view.columns; ++c)
                                    ++times.at(static_cast<std::size_t>(view.place(r, c)));
                        }
                        CHECK(static_cast<int>(views.size()) == experts);
                        CHECK(std::ranges::count(times, 1) == std::ssize(times));
                    }
    }

    TEST_CASE("numbers that a rank or the model does not have are errors that name them") {
        auto const names = one({.world = 8, .pp = 2, .ep = 2}, {.layers = 8, .chunks = 2}, 8);
        auto const refused = [&](char const* what, auto const& call) {
            rejects({what}, [&] { static_cast<void>(call()); });
        };
        refused(R"(naming: layer of "decoder.layers.2.x": expected 0 to 1 of pipeline rank 1, chunk 1, got 2)",
                [&] { return names.global("decoder.layers.2.x", 4, 1); });
        refused(R"(naming: expert of "mlp.experts.linear_fc1.weight4": expected 0 to 3 of a rank, got 4)",
                [&] { return names.global("mlp.experts.linear_fc1.weight4", 0); });
        refused(R"(naming: layer of "decoder.layers.8.x": expected 0 to 7 of the model, got 8)",
                [&] { return names.local("decoder.layers.8.x", 0); });
        refused(R"(naming: expert of "mlp.experts.linear_fc1.weight8": expected 0 to 7 of the model, got 8)",
                [&] { return names.owner("mlp.experts.linear_fc1.weight8"); });
        refused("expected 0 to 7 of the model, got 99999999999999999999",
                [&] { return names.owner("decoder.layers.99999999999999999999999999.x"); });
        refused("expected none in a model without experts, got 0",
                [&] { return one({}, {.layers = 1}, 0).global("mlp.experts.linear_fc1.weight0", 0); });
        refused("expected none in a model without experts, got 0",
                [&] { return one({}, {.layers = 1}, 0).owner("mlp.experts.linear_fc1.weight0"); });
        refused("expected none of pipeline rank 1, got 0", [&] {
            return one({.world = 2, .pp = 2}, {.layers = 1, .layout = "Et|L"}, 0).global("decoder.layers.0.x", 1);
        });
        refused("expected one parameter, not a buffer of experts (split_experts), got \"mlp.experts.weight1\"",
                [&] { return names.global("mlp.experts.weight1", 0); });
        refused("expected a parameter of the model, not a rank's buffer of experts",
                [&] { return names.local("mlp.experts.weight1", 0); });
        refused("expected a buffer of experts: it ends with experts.weight1 or experts.weight2, got \"mlp.x\"",
                [&] { return names.split_experts("mlp.x", 1, 1, 0); });
        refused("naming: columns of a buffer weight1: expected a multiple of the rank's experts = 4, got 6",
                [&] { return names.split_experts("mlp.experts.weight1", 4, 6, 0); });
        refused("naming: rows of a buffer weight2: expected a multiple of the rank's experts = 4, got 6",
                [&] { return names.split_experts("mlp.experts.weight2", 6, 4, 0); });
        refused("naming: shape of a buffer of experts: expected not negative, got -1 x 4",
                [&] { return names.split_experts("mlp.experts.weight1", -1, 4, 0); });
        refused("expected one of at most 2^63 - 1 elements, got 4611686018427387904 x 4",
                [&] { return names.split_experts("mlp.experts.weight1", index_t{1} << 62, 4, 0); });
        refused("expected some, for a buffer of them, got a model without",
                [&] { return one({}, {.layers = 1}, 0).split_experts("mlp.experts.weight1", 1, 1, 0); });
        refused("world rank: expected 0 to 7, got 8", [&] { return names.global("x", 8); });
        refused("pipeline: chunk: expected 0 to 1, got 2", [&] { return names.local("x", 0, 2); });
        refused("naming: ranks of the pipeline: expected the mesh's pp = 1, got 2",
                [&] { return naming(mesh({.world = 1}), pipeline({.layers = 2, .ranks = 2}), 0); });
        refused("mesh::experts: experts: expected a multiple of ep = 4, got 6",
                [&] { return one({.world = 4, .ep = 4}, {.layers = 1}, 6); });
        refused("naming: experts: expected 0 to 1000000, got -4", [&] { return one({}, {.layers = 1}, -4); });
    }

    TEST_CASE("a damaged name is a name whose way there and back is itself, or a cpx::error") {
        std::mt19937_64 random(20260719);
        auto const names = one({.world = 8, .pp = 2, .ep = 2}, {.layers = 32, .chunks = 2}, 64);
        char const* const valid[] = {"module.language_model.decoder.layers.7.mlp.experts.linear_fc1.weight12",
                                     "decoder.layers.0.mlp.experts.local_experts.31.linear_fc2.bias",
                                     "mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.bias7",
                                     "module.decoder.layers.5.mlp.shared_experts.linear_fc1.weight",
                                     "decoder.layers.3.mlp.experts.weight1"};
        int there = 0;
        for (int i = 0; i < 100'000; ++i) {
            std::string const text = faults::damaged(valid[random() % 5], random);
            int const rank = int(random() % 8), chunk = int(random() % 2);
            try {
                std::string const global = names.global(text, rank, chunk);
                if (names.local(global, rank, chunk) != text) FAIL(text);
                there += global != text;
            } catch (cpx::error const&) {
            }
        }
        CHECK(there > 10'000);
    }
}
