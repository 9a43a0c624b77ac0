// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/shard.hpp>

#include "model/faults.hpp"

#include <cpx/model/safetensors_writer.hpp>

#include <doctest/doctest.h>

#include <string>
#include <vector>

using cpx::safetensors;
using faults::contains;
using faults::message;

namespace {

cpx::shard_sizes sizes_of(int world, int tp, int pp, int ep, int etp) {
    return {{.world = world, .tp = tp, .pp = pp, .ep = ep, .etp = etp}, {.layers = pp, .ranks = pp}, ep, false};
}

/// Returns a file without tensors that has these metadata.
safetensors with(cpx::safetensors_writer::texts const& texts) {
    faults::directory const place;
    cpx::safetensors_writer(place.path() / "x", {}, texts).finish();
    return safetensors(place.path() / "x");
}

} // namespace

TEST_SUITE("model") {
    TEST_CASE("a shard's metadata say again how the model is divided, which cell it is and what all have") {
        cpx::shard_sizes all = sizes_of(32, 2, 4, 2, 1);
        all.pipeline = {.layers = 22, .ranks = 4, .chunks = 2, .first = 4, .last = 6, .mtp = 1};
        all.tied = true;
        cpx::shard_weights const weights{{"decoder.layers.0.\"\xc3\xa9", {safetensors::dtype::bf16, {2, 3}, true}},
                                         {"a", {safetensors::dtype::f32, {}, false}}};
        auto const back = cpx::read_shard_header(with(cpx::shard_metadata(all, {3, 1, 0, 0}, weights)));
        CHECK(back.cell == cpx::shard_cell{3, 1, 0, 0});
        CHECK(back.weights == weights);
        CHECK(back.sizes.mesh.world == 32);
        CHECK(back.sizes.mesh.tp == 2);
        CHECK(back.sizes.mesh.pp == 4);
        CHECK(back.sizes.mesh.ep == 2);
        CHECK(back.sizes.mesh.etp == 1);
        CHECK(back.sizes.experts == 2);
        CHECK(back.sizes.tied);
        auto const& p = back.sizes.pipeline;
        CHECK(p.layers == 22);
        CHECK(p.ranks == 4);
        CHECK(p.chunks == 2);
        CHECK(p.first == 4);
        CHECK(p.last == 6);
        CHECK(p.mtp == 1);
        CHECK(!p.layout);
        CHECK(!p.account_for_embedding);

        all.pipeline = {.layers = 4, .ranks = 4, .account_for_loss = true, .layout = "Et|t|t|tL"};
        auto const other = cpx::read_shard_header(with(cpx::shard_metadata(all, {}, {}))).sizes.pipeline;
        CHECK(other.layout == "Et|t|t|tL");
        CHECK(other.account_for_loss);
        CHECK(!other.first);
        CHECK(!other.mtp);
    }

    TEST_CASE("cells are what world ranks have, each once: as many as there are ranks but for copies along dp and cp") {
        CHECK(cpx::shard_cells(sizes_of(8, 1, 1, 1, 1)).size() == 1);
        CHECK(cpx::shard_cells(sizes_of(8, 2, 1, 1, 2)).size() == 2);
        CHECK(cpx::shard_cells(sizes_of(8, 1, 1, 4, 1)).size() == 4);
        CHECK(cpx::shard_cells(sizes_of(8, 2, 2, 2, 2)).size() == 8);
        // Megatron's ranks of 8, tp 2, pp 2, ep 2, etp 1: tp and ep have the same groups
        CHECK(cpx::shard_cells(sizes_of(8, 2, 2, 2, 1)) ==
              std::vector<cpx::shard_cell>{{0, 0, 0, 0}, {0, 1, 1, 0}, {1, 0, 0, 0}, {1, 1, 1, 0}});
        CHECK(cpx::shard_cells(sizes_of(6, 2, 1, 3, 1)).size() == 6);
        CHECK(contains(message([] { cpx::shard_cells(sizes_of(6, 4, 1, 1, 1)); }), "multiple of tp, cp, pp"));
        CHECK(
            contains(message([] { cpx::shard_cells(sizes_of(65537, 1, 1, 1, 1)); }), "world: expected at most 65536"));
        auto wrong = sizes_of(8, 1, 2, 1, 1);
        wrong.pipeline.ranks = 4;
        CHECK(contains(message([&] { cpx::shard_cells(wrong); }), "expected the mesh's pp = 2, got 4"));
    }

    TEST_CASE("metadata that say nothing or no sense are refused with what is wrong") {
        auto const good = cpx::shard_metadata(sizes_of(8, 1, 1, 1, 1), {}, {{"a", {}}});
        auto const said = [&](std::string const& key, std::string const& from, std::string const& to) {
            auto texts = good;
            auto& text = texts[key];
            text.replace(text.find(from), from.size(), to);
            return message([&] { cpx::read_shard_header(with(texts)); });
        };
        CHECK(
            contains(message([] { cpx::read_shard_header(with({})); }), R"(x: metadata "cpx.shard": expected one of)"));
        CHECK(contains(said("cpx.shard", "{", "["), "x: cpx.shard: not JSON"));
        CHECK(contains(said("cpx.shard", "\"tp\":1,\"vpp\"", "\"vpp\""),
                       "x: cpx.shard: /tp: expected a value, got none"));
        CHECK(contains(said("cpx.shard", "\"pp\":1", "\"pp\":-7777777777"), "/pp: expected an integer"));
        CHECK(contains(said("cpx.shard", "\"etp\":1", "\"etp\":0"), "/etp: expected at least 1, got 0"));
        CHECK(contains(said("cpx.shard", "\"tied\":false", "\"tied\":1"), "/tied: expected true or false, got 1"));
        CHECK(contains(said("cpx.shard", "\"cell\":{", "\"cell\":{\"x\":"), "not JSON"));
        CHECK(
            contains(said("cpx.weights", "\"F32\"", "\"F31\""), R"(/a/0: expected a dtype of safetensors, got "F31")"));
        CHECK(contains(said("cpx.weights", "[\"F32\",[],false]", "[]"), "/a: expected [dtype, shape, divided]"));
        CHECK(contains(said("cpx.weights", "[\"F32\",[],false]", "7"), "/a: expected an array, got 7"));
    }
}
