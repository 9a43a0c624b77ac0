// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/qwen_checkpoint.hpp>

#include "model/faults.hpp"

#include <doctest/doctest.h>

#include <support/files.hpp>

#include <string>

using faults::contains;
using faults::message;

namespace {

std::string const shipped_models = std::string(support::source_dir) + "/examples/data/";

} // namespace

TEST_SUITE("model") {
    TEST_CASE("a checkpoint has every weight of its model, shaped as the settings say, under the names of text alone") {
        cpx::qwen_checkpoint<float> const dense(shipped_models + "tiny_qwen3_5");
        auto const& c = dense.config;
        CHECK(dense.weight("model.embed_tokens.weight").count() == *c.vocab_size);
        CHECK(dense.weight("model.layers.0.mlp.down_proj.weight").count() == *c.hidden_size);
        CHECK(dense.weight("model.layers.0.mlp.down_proj.weight").width() == *c.intermediate_size);

        cpx::qwen_checkpoint<double> const mixture(shipped_models + "tiny_qwen3_5_moe");
        auto const experts = mixture.weight("model.layers.0.mlp.experts.gate_up_proj");
        CHECK(experts.count() == *mixture.config.num_experts * 2 * *mixture.config.moe_intermediate_size);
        CHECK(experts.width() == *mixture.config.hidden_size);

        cpx::qwen_checkpoint<double> const with_tower(shipped_models + "tiny_qwen3_vl");
        CHECK(with_tower.file_name("model.norm.weight") == "model.language_model.norm.weight");
        CHECK(with_tower.file_name("lm_head.weight") == "lm_head.weight");
        cpx::safetensors const file(shipped_models + "tiny_qwen3_vl/model.safetensors");
        with_tower.each([&](std::string const& name, cpx::rows<double const> weight) {
            CAPTURE(name);
            auto const values = file.read<double>(with_tower.file_name(name));
            CHECK(std::ssize(values) == weight.count() * weight.width());
            CHECK(std::equal(values.begin(), values.end(), weight.data()));
        });
        if (*with_tower.config.tie_word_embeddings)
            CHECK(with_tower.weight("lm_head.weight").data() == with_tower.weight("model.embed_tokens.weight").data());
        CHECK(contains(message([&] { dense.weight("model.layers.9999.mlp"); }),
                       "name of a weight: expected one of the model's, got \"model.layers.9999.mlp\""));
    }
}
