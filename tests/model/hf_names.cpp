// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/hf_names.hpp>

#include "model/weight_models.hpp"

#include <cpx/model/hf_config.hpp>
#include <cpx/model/hf_sizes.hpp>
#include <cpx/model/json.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/model/weight_share.hpp>

#include <doctest/doctest.h>

#include <support/files.hpp>
#include <support/random.hpp>
#include <support/rejects.hpp>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

using namespace weight_models;
using cpx::hf_names;
using cpx::weight_form;
using support::rejects;
namespace fs = std::filesystem;
using strings = std::vector<std::string>;

namespace {

/// What the modules of transformers call their weights, written down from their code, without cpx's table.
std::multiset<std::string> names_in_transformers(weight_sizes const& s, weight_style const& style) {
    std::string const model = style.inside ? "model.language_model." : "model.";
    std::multiset<std::string> all{model + "embed_tokens.weight", model + "norm.weight"};
    if (!s.tie_word_embeddings) all.insert("lm_head.weight");
    auto const layer = [&](std::string const& at, weight_sizes::layer l, bool stacked) {
        auto const add = [&](std::string const& module, strings const& inner) {
            for (auto const& name : inner) all.insert(at + module + name);
        };
        add("", {"input_layernorm.weight", "post_attention_layernorm.weight"});
        if (!l.linear)
            add("self_attn.",
                {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "q_norm.weight", "k_norm.weight"});
        if (!l.linear && s.attention_bias)
            add("self_attn.", {"q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"});
        if (l.linear) add("linear_attn.", {"A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight"});
        if (l.linear && s.by_key_head) add("linear_attn.", {"in_proj_qkvz.weight", "in_proj_ba.weight"});
        if (l.linear && !s.by_key_head)
            add("linear_attn.", {"in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"});
        strings const mlp{"gate_proj.weight", "up_proj.weight", "down_proj.weight"};
        if (!l.moe) return add("mlp.", mlp);
        add("mlp.", {"gate.weight"});
        if (style.expert_bias) add("mlp.", {"gate.e_score_correction_bias"});
        if (s.shared_expert_intermediate_size > 0) {
            add("mlp.shared_expert.", mlp);
            add("mlp.", {"shared_expert_gate.weight"});
        }
        if (stacked) return add("mlp.experts.", {"gate_up_proj", "down_proj"});
        for (index_t e = 0; e < s.num_experts; ++e) add("mlp.experts." + std::to_string(e) + '.', mlp);
    };
    for (std::size_t i = 0; i < s.layers.size(); ++i)
        layer(model + "layers." + std::to_string(i) + '.', s.layers[i], style.stacked_experts);
    for (auto const& l : s.mtp) {
        for (char const* name : {"fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"})
            all.insert("mtp." + std::string(name) + ".weight");
        layer("mtp.layers.0.", l, style.stacked_mtp_experts);
    }
    return all;
}

} // namespace

TEST_CASE("names in Megatron become those of Hugging Face") {
    struct example {
        std::string megatron, hf;
    };
    auto const check = [](hf_names const& names, std::vector<example> const& examples) {
        for (auto const& [given_megatron, hf] : examples) {
            auto const& megatron = given_megatron;
            CAPTURE(megatron);
            std::string all;
            for (auto const& name : names.to_hf(megatron)) all += (all.empty() ? "" : " ") + name;
            CHECK(all == hf);
            if (all.empty() || megatron.starts_with("vision_model.")) continue;
            for (char const* before : {"module.", "module.module.", "language_model.", "module.language_model."})
                CHECK(names.to_hf(before + megatron) == names.to_hf(megatron));
        }
    };
    std::string const layer = "decoder.layers.0.", hf = "model.layers.0.";
    std::string const experts = layer + "mlp.experts.", of = hf + "mlp.experts.42.";
    // Megatron-Bridge's table of Qwen3-MoE
    check(hf_names(qwen3_moe),
          {{"embedding.word_embeddings.weight", "model.embed_tokens.weight"},
           {"output_layer.weight", "lm_head.weight"},
           {"decoder.final_layernorm.weight", "model.norm.weight"},
           {layer + "self_attention.linear_qkv.layer_norm_weight", hf + "input_layernorm.weight"},
           {layer + "self_attention.linear_qkv.weight",
            hf + "self_attn.q_proj.weight " + hf + "self_attn.k_proj.weight " + hf + "self_attn.v_proj.weight"},
           {layer + "self_attention.linear_proj.weight", hf + "self_attn.o_proj.weight"},
           {layer + "self_attention.q_layernorm.weight", hf + "self_attn.q_norm.weight"},
           {layer + "self_attention.k_layernorm.weight", hf + "self_attn.k_norm.weight"},
           {layer + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight"},
           {"decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "model.layers.1.post_attention_layernorm.weight"},
           {layer + "mlp.router.weight", hf + "mlp.gate.weight"},
           {layer + "mlp.router.expert_bias", hf + "mlp.gate.e_score_correction_bias"},
           {experts + "linear_fc1.weight42", of + "gate_proj.weight " + of + "up_proj.weight"},
           {experts + "linear_fc2.weight42", of + "down_proj.weight"},
           {experts + "local_experts.42.linear_fc1.weight", of + "gate_proj.weight " + of + "up_proj.weight"},
           {experts + "local_experts.42.linear_fc2.weight", of + "down_proj.weight"},
           {"decoder.layers.1.mlp.linear_fc1.weight",
            "model.layers.1.mlp.gate_proj.weight model.layers.1.mlp.up_proj.weight"},
           {"decoder.layers.1.mlp.linear_fc2.weight", "model.layers.1.mlp.down_proj.weight"},
           // local layers, which have norms of their own
           {layer + "input_layernorm.weight", hf + "input_layernorm.weight"},
           {"decoder.layers.1.pre_mlp_layernorm.weight", "model.layers.1.post_attention_layernorm.weight"},
           // what is no weight of the model
           {experts + "linear_fc1.weight64", ""},
           {experts + "linear_fc1.weight042", ""},
           {experts + "linear_fc1.weight-1", ""},
           {experts + "linear_fc1.weight", ""},
           {experts + "local_experts.1.linear_fc1.adapter.linear_in.weight", ""},
           {layer + "mlp.linear_fc1.weight", ""},
           {layer + "self_attention.linear_qkv.weight_quantizer._amax", ""},
           {layer + "self_attention.in_proj.weight", ""},
           {"decoder.layers.3.pre_mlp_layernorm.weight", ""},
           {"decoder.layers.01.pre_mlp_layernorm.weight", ""},
           {"decoder.layers.99999999999999999999.pre_mlp_layernorm.weight", ""},
           {"decoder.layers..pre_mlp_layernorm.weight", ""},
           {"mtp.layers.0.enorm.weight", ""},
           {"", ""}});
    // Megatron-Bridge's of Qwen3-Next, and what miles has of its own
    check(hf_names(qwen3_next),
          {{layer + "self_attention.in_proj.layer_norm_weight", hf + "input_layernorm.weight"},
           {layer + "self_attention.in_proj.weight",
            hf + "linear_attn.in_proj_qkvz.weight " + hf + "linear_attn.in_proj_ba.weight"},
           {layer + "self_attention.conv1d.weight", hf + "linear_attn.conv1d.weight"},
           {layer + "self_attention.A_log", hf + "linear_attn.A_log"},
           {layer + "self_attention.dt_bias", hf + "linear_attn.dt_bias"},
           {layer + "self_attention.out_norm.weight", hf + "linear_attn.norm.weight"},
           {layer + "self_attention.out_proj.weight", hf + "linear_attn.out_proj.weight"},
           {layer + "self_attention.input_layernorm.weight", hf + "input_layernorm.weight"},
           {layer + "self_attention.linear_attn.in_proj_qkvz.weight", hf + "linear_attn.in_proj_qkvz.weight"},
           {layer + "self_attention.linear_attn.in_proj_ba.weight", hf + "linear_attn.in_proj_ba.weight"},
           {layer + "self_attention.linear_attn.in_proj_qkv.weight", ""},
           {layer + "mlp.shared_experts.linear_fc1.weight",
            hf + "mlp.shared_expert.gate_proj.weight " + hf + "mlp.shared_expert.up_proj.weight"},
           {layer + "mlp.shared_experts.linear_fc2.weight", hf + "mlp.shared_expert.down_proj.weight"},
           {layer + "mlp.shared_experts.gate_weight", hf + "mlp.shared_expert_gate.weight"}});
    // Multi-token prediction, as miles and Megatron-Bridge have it
    auto const predicted = std::vector<example>{
        {"mtp.layers.0.eh_proj.weight", "mtp.fc.weight"},
        {"mtp.layers.0.enorm.weight", "mtp.pre_fc_norm_embedding.weight"},
        {"mtp.layers.0.hnorm.weight", "mtp.pre_fc_norm_hidden.weight"},
        {"mtp.layers.0.final_layernorm.weight", "mtp.norm.weight"},
        {"mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight42",
         "mtp.layers.0.mlp.experts.42.gate_proj.weight mtp.layers.0.mlp.experts.42.up_proj.weight"},
        {"mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc2.weight42",
         "mtp.layers.0.mlp.experts.42.down_proj.weight"},
        {"mtp.layers.0.mlp.experts.linear_fc2.weight42", ""},
        {"mtp.layers.1.enorm.weight", ""}};
    for (bool const inside : {false, true}) check(hf_names(qwen3_5(true), {.inside = inside}), predicted);
    // Qwen3.5, where there is a tower
    std::string const deep = "model.language_model.layers.0.linear_attn.";
    check(hf_names(qwen3_5(true), {.inside = true, .stacked_experts = true}),
          {{layer + "self_attention.in_proj.weight", deep + "in_proj_qkv.weight " + deep + "in_proj_z.weight " + deep +
                                                         "in_proj_b.weight " + deep + "in_proj_a.weight"},
           {layer + "self_attention.linear_attn.in_proj_z.weight", deep + "in_proj_z.weight"},
           {experts + "linear_fc1.weight42", "model.language_model.layers.0.mlp.experts.gate_up_proj"},
           {experts + "linear_fc2.weight42", "model.language_model.layers.0.mlp.experts.down_proj"},
           {"output_layer.weight", "lm_head.weight"},
           {"vision_model.blocks.0.attn.qkv.weight", "model.visual.blocks.0.attn.qkv.weight"},
           {"vision_model.decoder.layers.0.mlp.linear_fc1.weight", ""},
           {"vision_model.", ""}});
    check(hf_names(qwen3), {{"output_layer.weight", "model.embed_tokens.weight"}}); // tied
}

TEST_CASE("every tensor that transformers has is one source of the weights, and names lead back") {
    support::splitmix numbers(1);
    std::vector<weight_sizes> families{qwen3, qwen3_moe, qwen3_next, qwen3_5(false), qwen3_5(true)};
    for (int i = 0; i < 100; ++i) families.push_back(some_sizes(numbers));
    for (auto const& sizes : families) {
        auto const style = some_style(numbers);
        hf_names const names(sizes, style);
        std::set<std::string> megatron, stacked;
        std::multiset<std::string> hf;
        for (auto const& w : names.weights()) {
            auto const name = names.megatron(w);
            CAPTURE(name);
            CHECK(megatron.insert(name).second);
            CHECK(names.from_megatron(name) == w);
            CHECK(names.to_hf(name) == names.hf(w));
            bool const shared =
                w.rule->form == weight_form::stacked_rows || w.rule->form == weight_form::stacked_columns;
            for (auto const& source : names.hf(w)) {
                auto const back = names.to_megatron(source);
                CHECK(std::ranges::count(back, name) == 1);
                CHECK(back.size() == static_cast<std::size_t>(shared ? sizes.num_experts : 1));
                if (!shared || stacked.insert(source).second) hf.insert(source);
            }
        }
        auto const expected = names_in_transformers(sizes, style);
        CHECK(hf == expected);
        auto detected = sizes;
        auto const found = cpx::style_of(expected, detected);
        CHECK(detected.mtp == sizes.mtp);
        CHECK(found.inside == style.inside);
        auto const has_moe = [](auto const& layers) {
            return std::ranges::count(layers, true, &weight_sizes::layer::moe) > 0;
        };
        CHECK(found.stacked_experts == (style.stacked_experts && has_moe(sizes.layers)));
        CHECK(found.stacked_mtp_experts == (style.stacked_mtp_experts && has_moe(sizes.mtp)));
        for (char const* unknown : {"model.layers.9.input_layernorm.weight", "mtp.layers.1.input_layernorm.weight",
                                    "model.layers.0.mlp.experts.99.up_proj.weight", "lm_head.bias", ""})
            CHECK(names.to_megatron(unknown).empty());
    }
    // biases, which no setting tells of, are known by their names
    CHECK(hf_names(qwen3_moe).to_megatron("model.layers.2.mlp.gate.e_score_correction_bias") ==
          strings{"decoder.layers.2.mlp.router.expert_bias"});
    CHECK(hf_names(qwen3).to_megatron("model.visual.pos_embed.weight") == strings{"vision_model.pos_embed.weight"});
}

TEST_CASE("sizes and ranks that cannot be are refused") {
    auto const refuses = [](auto change, char const* what) {
        auto sizes = qwen3_next;
        change(sizes);
        rejects({what}, [&] { static_cast<void>(hf_names(sizes)); });
    };
    refuses([](auto& s) { s.hidden_size = 0; }, "hidden_size");
    refuses([](auto& s) { s.vocab_size = index_t{1} << 40; }, "vocab_size");
    refuses([](auto& s) { s.num_attention_heads = 3; }, "num_attention_heads");
    refuses([](auto& s) { s.linear_num_value_heads = 3; }, "linear_num_value_heads");
    refuses([](auto& s) { s.linear_conv_kernel_dim = 0; }, "linear_conv_kernel_dim");
    refuses([](auto& s) { s.num_experts = 0; }, "num_experts");
    refuses([](auto& s) { s.shared_expert_intermediate_size = -1; }, "shared_expert_intermediate_size");
    refuses([](auto& s) { s.layers[0].moe = false; }, "intermediate_size");
    refuses([](auto& s) { s.mtp.push_back({}); }, "layers of multi-token prediction");
}

TEST_CASE("sizes of weights are those that a config.json states") {
    fs::path const models = fs::path(support::source_dir) / "examples/data";
    for (char const* const name : {"tiny_qwen3_5", "tiny_qwen3_5_moe", "tiny_qwen3_5_vl", "tiny_qwen3_vl"}) {
        CAPTURE(name);
        auto sizes = cpx::sizes_of(cpx::hf_config::read(models / name / "config.json"));
        cpx::safetensors const file(models / name / "model.safetensors");
        hf_names const names(sizes, cpx::style_of(file.names(), sizes));
        std::set<std::string> language;
        for (auto const& w : names.weights())
            for (std::size_t i = 0; i < w.rule->sources(); ++i) {
                language.insert(names.hf(w, i));
                CHECK(file.tensor(names.hf(w, i)).shape == cpx::shape_of(w.rule->from[i], sizes));
            }
        for (auto const& tensor : file.names()) CHECK(language.contains(tensor) != tensor.starts_with("model.visual."));
    }
    auto const parse = [](std::string const& family, std::string const& more) {
        return cpx::hf_config::parse(cpx::json_value::parse(
            R"({"model_type": ")" + family + R"(", "num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 9,)" +
                R"("num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": false,)" +
                R"("num_experts": 4, "moe_intermediate_size": 3, "shared_expert_intermediate_size": 5)" + more + "}",
            "config.json"));
    };
    auto const moe = cpx::sizes_of(
        parse("qwen3_moe", R"(, "intermediate_size": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3])"));
    CHECK(moe.layers == std::vector<weight_sizes::layer>{{}, {.moe = true}, {}, {}});
    CHECK(moe.shared_expert_intermediate_size == 0);
    CHECK(!moe.attn_output_gate);
    std::string const linear = R"(, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 3,)"
                               R"("linear_value_head_dim": 4, "linear_conv_kernel_dim": 4)";
    auto const next = cpx::sizes_of(parse("qwen3_next", linear + R"(, "full_attention_interval": 2)"));
    CHECK(next.layers == std::vector<weight_sizes::layer>{{true, true}, {false, true}, {true, true}, {false, true}});
    CHECK(next.by_key_head);
    CHECK(next.attn_output_gate);
    CHECK(next.shared_expert_intermediate_size == 5);
    rejects({"config.json", "/intermediate_size", "expected a value, got none"},
            [&] { static_cast<void>(cpx::sizes_of(parse("qwen3_moe", R"(, "mlp_only_layers": [3])"))); });
    rejects({"config.json: linear_num_value_heads: expected a multiple of linear_num_key_heads, 3, got 2"}, [&] {
        auto config = parse("qwen3_next", linear + R"(, "full_attention_interval": 2)");
        config.linear_num_key_heads = 3;
        static_cast<void>(cpx::sizes_of(config));
    });
}
