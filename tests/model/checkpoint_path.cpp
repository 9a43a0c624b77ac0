// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/checkpoint_path.hpp>

#include <doctest/doctest.h>

#include <support/rejects.hpp>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <tuple>

using namespace cpx;
using support::rejects;

// Examples: miles, pull request 1088.
TEST_SUITE("model") {
    TEST_CASE(
        "a checkpoint of a mesh's own has the four sizes in its name, and only where experts are divided on policy") {
        auto const path = [](mesh_sizes const& sizes, bool on = true) {
            return checkpoint_path("models", "Qwen3-30B-A3B", sizes, on).string();
        };
        std::string const plain = "models/Qwen3-30B-A3B_torch_dist";
        CHECK(path({.world = 8, .tp = 1, .pp = 2, .ep = 4, .etp = 1}) == plain + "_tp1_pp2_ep4_etp1");
        CHECK(path({.world = 8, .tp = 2, .pp = 2, .ep = 2, .etp = 1}) == plain + "_tp2_pp2_ep2_etp1");
        CHECK(path({.world = 8, .tp = 2, .pp = 1, .ep = 4, .etp = 1}) == plain + "_tp2_pp1_ep4_etp1");
        CHECK(path({.world = 8, .tp = 2, .pp = 2, .ep = 2}) == plain + "_tp2_pp2_ep2_etp1"); // 1 unless it is given
        CHECK(path({.world = 8, .tp = 2, .pp = 1, .ep = 4}) == plain + "_tp2_pp1_ep4_etp1");
        CHECK(path({.world = 8, .tp = 2, .ep = 4, .etp = 2}) == plain + "_tp2_pp1_ep4_etp2");
        CHECK(path({.world = 8, .tp = 2, .pp = 2}) == plain);
        CHECK(path({.world = 8, .tp = 2, .pp = 2, .ep = 2, .etp = 1}, false) == plain);
    }

    TEST_CASE("cp is in no name, and other sizes never have one name") {
        std::map<std::string, std::tuple<int, int, int, int>> seen;
        for (int tp : {1, 2, 12})
            for (int pp : {1, 2, 21})
                for (int ep : {2, 4, 12})
                    for (int etp : {1, 2, 11})
                        for (int cp : {1, 2}) {
                            mesh_sizes const sizes{.world = 1, .tp = tp, .cp = cp, .pp = pp, .ep = ep, .etp = etp};
                            auto const name = checkpoint_path("", "m", sizes, true).string();
                            auto const [at, fresh] = seen.emplace(name, std::tuple(tp, pp, ep, etp));
                            CHECK(fresh == (cp == 1));
                            CHECK(at->second == std::tuple(tp, pp, ep, etp));
                        }
    }

    TEST_CASE("what converts a checkpoint is told all sizes, also a pipeline of one rank") {
        using texts = std::map<std::string, std::string, std::less<>>;
        texts const plain{{"tensor-model-parallel-size", "2"},
                          {"pipeline-model-parallel-size", "1"},
                          {"expert-model-parallel-size", "1"},
                          {"expert-tensor-parallel-size", "1"}};
        CHECK(checkpoint_arguments({.world = 8, .tp = 2}, true) == plain);
        CHECK(checkpoint_arguments({.world = 8, .tp = 2, .etp = 2}, true).at("expert-tensor-parallel-size") == "2");
        auto both = plain;
        both["expert-model-parallel-size"] = "4";
        both["make-vocab-size-divisible-by"] = "1";
        CHECK(checkpoint_arguments({.world = 8, .tp = 2, .ep = 4}, false) == both);
        both["no-gradient-accumulation-fusion"] = "true";
        CHECK(checkpoint_arguments({.world = 8, .tp = 2, .ep = 4}, true) == both);
    }

    TEST_CASE("a model without a name and sizes that are none are refused") {
        rejects({"checkpoint_path.cpp:", "checkpoint_path: model: expected a name without slashes, got \"\""},
                [] { checkpoint_path("d", "", {}, true); });
        rejects({"got \"a/b\""}, [] { checkpoint_path("d", "a/b", {}, true); });
        rejects({"checkpoint_path: pp: expected at least 1, got 0"},
                [] { checkpoint_path("d", "m", {.pp = 0, .ep = 2}, true); });
    }
}
