// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/hf_config.hpp>

#include "model/faults.hpp"

#include <doctest/doctest.h>

#include <support/files.hpp>

#include <nlohmann/json.hpp>

#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

using cpx::hf_config;
using cpx::layer_type;
using faults::contains;
using faults::message;
using nlohmann::json;

namespace {

hf_config config_of(json const& settings) {
    return hf_config::parse(cpx::json_value::parse(settings.dump(), "config.json"));
}

/// Returns settings of every family, as its files state them; layers are few.
std::vector<std::pair<std::string, json>> families() {
    json const sizes = {{"hidden_size", 64},        {"vocab_size", 256},      {"num_hidden_layers", 8},
                        {"num_attention_heads", 4}, {"head_dim", 32},         {"num_key_value_heads", 2},
                        {"intermediate_size", 128}, {"rms_norm_eps", 1e-6},   {"tie_word_embeddings", false},
                        {"rope_theta", 1e6},        {"rope_scaling", nullptr}};
    auto const with = [&](json settings) {
        auto all = sizes;
        all.update(settings);
        return all;
    };
    json const experts = {{"num_experts", 8},       {"num_experts_per_tok", 2},         {"moe_intermediate_size", 32},
                          {"norm_topk_prob", true}, {"mlp_only_layers", json::array()}, {"decoder_sparse_step", 1}};
    json const delta = {{"linear_num_key_heads", 4},    {"linear_num_value_heads", 8}, {"linear_key_head_dim", 16},
                        {"linear_value_head_dim", 16},  {"linear_conv_kernel_dim", 4}, {"full_attention_interval", 4},
                        {"partial_rotary_factor", 0.25}};
    auto moe = with(experts), next = with(experts);
    moe["model_type"] = "qwen3_moe";
    next.update(delta);
    next.update({{"model_type", "qwen3_next"}, {"shared_expert_intermediate_size", 32}});
    auto text_35 = with(delta), moe_35 = next, text_vl = with({{"model_type", "qwen3_vl_text"}});
    text_35["model_type"] = "qwen3_5_text";
    moe_35["model_type"] = "qwen3_5_moe_text";
    moe_35.erase("intermediate_size");
    text_vl.erase("tie_word_embeddings");
    return {{"qwen3", with({{"model_type", "qwen3"}})},
            {"qwen3_moe", moe},
            {"qwen3_next", next},
            {"qwen3_vl", {{"model_type", "qwen3_vl"}, {"text_config", text_vl}, {"tie_word_embeddings", true}}},
            {"qwen3_5", text_35},
            {"qwen3_5_moe", {{"model_type", "qwen3_5_moe"}, {"text_config", moe_35}}}};
}

json family(std::string const& name) {
    for (auto const& [each, settings] : families())
        if (each == name) return settings;
    return {};
}

} // namespace

TEST_SUITE("model") {
    TEST_CASE(
        "every family is read, and its layers follow layer_types, or the interval, or are all of full attention") {
        for (auto const& [given_name, settings] : families()) {
            auto const& name = given_name;
            CAPTURE(name);
            auto const c = config_of(settings);
            CHECK(c.family.name == name);
            CHECK(*c.hidden_size == 64);
            bool const experts = name == "qwen3_moe" || name == "qwen3_next" || name == "qwen3_5_moe";
            CHECK(c.moe() == experts);
            CHECK(c.num_experts.has_value() == experts);
            bool const linear = name == "qwen3_next" || name.starts_with("qwen3_5");
            CHECK(c.linear() == linear);
            CHECK(c.gated() == linear);
            CHECK(c.rotary_dim() == (linear ? 8 : 32));
            auto const types = c.layers();
            REQUIRE(types.size() == 8);
            for (std::size_t i = 0; i < 8; ++i)
                CHECK((types[i] == layer_type::full_attention) == (!linear || i == 3 || i == 7));
            CHECK(*c.tie_word_embeddings == (name == "qwen3_vl"));
            CHECK(c.model_type.source() == (c.inside.empty() ? "model_type" : "text_config.model_type"));
        }
        auto stated = family("qwen3_next"); // transformers 5.5 and later: layer_types alone; before, both
        stated["layer_types"] = {"linear_attention", "full_attention"};
        CHECK(config_of(stated).layers() == std::vector{layer_type::linear_attention, layer_type::full_attention});
    }

    TEST_CASE("a key that is absent is absent, and whoever needs it is told its name and place") {
        auto next = family("qwen3_next");
        next.erase("full_attention_interval");
        next.erase("partial_rotary_factor");
        auto const c = config_of(next);
        CHECK(!c.layer_types.has_value());
        CHECK(contains(message([&] { c.layers(); }),
                       "config.json: /layer_types: expected a value, or full_attention_interval, got none"));
        CHECK(contains(message([&] { c.rotary_dim(); }), "/partial_rotary_factor: expected a value, got none"));
        int const line = __LINE__ + 1;
        auto const said = message([&] { c.attn_output_gate.value(); });
        CHECK(said ==
              "hf_config.cpp:" + std::to_string(line) + ": config.json: /attn_output_gate: expected a value, got none");
        auto const vl = config_of(family("qwen3_vl"));
        CHECK(contains(message([&] { vl.num_experts.value(); }), ": /text_config/num_experts: expected a value"));
        CHECK(vl.num_experts.value_or(7) == 7);
        for (auto const& [name, settings] : families())
            for (auto const& item :
                 settings.contains("text_config") ? settings["text_config"].items() : settings.items()) {
                if (item.key() == "model_type") continue;
                auto less = settings;
                (less.contains("text_config") ? less["text_config"] : less).erase(item.key());
                CHECK(message([&] { config_of(less); }) == "nothing thrown");
                (less.contains("text_config") ? less["text_config"] : less)[item.key()] = nullptr; // as good as none
                CHECK(message([&] { config_of(less); }) == "nothing thrown");
                CHECK(!config_of(less).states((less.contains("text_config") ? "text_config." : "") + item.key()));
            }
    }

    TEST_CASE("a config says which keys its file states, and where those stood that it read") {
        auto const c = hf_config::read(std::string(support::source_dir) + "/examples/data/tiny_qwen3_vl/config.json");
        for (auto const* key : {"text_config", "text_config.head_dim", "text_config.rope_parameters.rope_theta",
                                "vision_config.deepstack_visual_indexes", "tie_word_embeddings", "image_token_id"})
            CHECK(c.states(key));
        for (auto const* key : {"head_dim", "text_config.num_experts", "text_config.pad_token_id", "text_config.", ""})
            CHECK(!c.states(key)); // pad_token_id is null there
        CHECK(c.rope_theta.source() == "text_config.rope_parameters.rope_theta");
        CHECK(c.head_dim.source() == "text_config.head_dim");
        CHECK(c.tie_word_embeddings.source() == "tie_word_embeddings");
        CHECK(c.deepstack_layers() == 3);
        CHECK(*c.out_hidden_size == 64);
        CHECK(c.head_dim.key() == "head_dim");
        CHECK(c.head_dim.place() == "/text_config/head_dim");
    }

    TEST_CASE("rope_theta is that of rope_parameters, else the one beside it, else of what is inside") {
        auto const theta = [](json const& settings) {
            auto const c = config_of(settings);
            return std::pair{c.rope_theta.optional(), c.rope_theta.source()};
        };
        auto settings = family("qwen3");
        using found = std::pair<std::optional<double>, std::string>;
        CHECK(theta(settings) == found{1e6, "rope_theta"});
        settings["rope_parameters"] = {{"rope_theta", 1e7}};
        CHECK(theta(settings) == found{1e7, "rope_parameters.rope_theta"});
        CHECK(*config_of(settings).second_rope_theta == 1e6);
        settings.erase("rope_theta");
        CHECK(theta(settings) == found{1e7, "rope_parameters.rope_theta"});
        CHECK(!config_of(settings).second_rope_theta.has_value());
        settings["rope_parameters"] = {{"global", {{"base", 5e5}}}};
        CHECK(theta(settings) == found{5e5, "rope_parameters.global.base"});
        settings["rope_parameters"] = {{"full_attention", {{"rope_theta", 2e5}}},
                                       {"sliding_attention", {{"rope_theta", 1e4}}}};
        CHECK(theta(settings) == found{2e5, "rope_parameters.full_attention.rope_theta"});
        settings["rope_parameters"] = json::object();
        CHECK(!theta(settings).first);
        settings.erase("rope_parameters");
        settings["rope_scaling"] = {{"rope_theta", 3}};
        CHECK(theta(settings) == found{3, "rope_scaling.rope_theta"});
    }

    TEST_CASE("the layers of a mixture of experts that have none are known") {
        auto settings = family("qwen3_moe");
        settings["decoder_sparse_step"] = 2;
        settings["mlp_only_layers"] = {3};
        auto const c = config_of(settings);
        for (cpx::index_t i = 0; i < 8; ++i) CHECK(c.moe(i) == (i == 1 || i == 5 || i == 7));
        settings["num_experts"] = 0;
        CHECK(!config_of(settings).moe());
        settings["num_experts"] = nullptr;
        CHECK(!config_of(settings).moe());
        CHECK(!config_of(settings).moe(1));
        auto const dense = config_of(family("qwen3"));
        for (cpx::index_t i = 0; i < 8; ++i) CHECK(!dense.moe(i));
    }

    TEST_CASE("a value of another type or out of range is refused by its place") {
        std::vector<std::pair<json, std::string>> const wrong = {
            {{{"hidden_size", 64.0}}, "/hidden_size: expected an integer from -2147483648 to 2147483647, got 64.0"},
            {{{"hidden_size", "64"}}, R"(/hidden_size: expected an integer from -2147483648 to 2147483647, got "64")"},
            {{{"num_experts", -1}}, "/num_experts: expected 0 or more, got -1"},
            {{{"full_attention_interval", 0}}, "/full_attention_interval: expected more than 0, got 0"},
            {{{"layer_types", {"full_attention", "chunked"}}}, R"(/layer_types/1: expected "linear_attention" or)"},
            {{{"layer_types", "full_attention"}}, R"(/layer_types: expected an array, got "full_attention")"},
            {{{"num_hidden_layers", 2000000}}, "/num_hidden_layers: expected at most 1048576, got 2000000"},
            {{{"rope_theta", "1e6"}}, R"(/rope_theta: expected a number, got "1e6")"},
            {{{"rope_theta", -1}}, "/rope_theta: expected more than 0, got -1"},
            {{{"partial_rotary_factor", 2}}, "/partial_rotary_factor: expected at most 1, got 2"},
            {{{"rope_parameters", "yarn"}}, R"(/rope_parameters: expected an object, got "yarn")"},
            {{{"norm_topk_prob", 1}}, "/norm_topk_prob: expected true or false, got 1"},
            {{{"mlp_only_layers", {0, 1.5}}}, "/mlp_only_layers/1: expected an integer"},
            {{{"mtp_num_hidden_layers", -1}}, "/mtp_num_hidden_layers: expected 0 or more"},
            {{{"num_nextn_predict_layers", true}}, "/num_nextn_predict_layers: expected an integer"}};
        for (auto const& [change, passage] : wrong) {
            auto settings = family("qwen3_next");
            settings.update(change);
            auto const text = message([&] { config_of(settings); });
            CAPTURE(text);
            CHECK(contains(text, "config.json: " + passage));
        }
    }

    TEST_CASE("of 200,000 wrong layers and a long model_type few words are made") {
        auto settings = family("qwen3_next");
        settings["layer_types"] = json(200'000, "sliding_attention");
        auto const text = message([&] { config_of(settings); });
        CHECK(contains(text, "config.json: 200000 settings are wrong\n  /layer_types/0: expected"));
        CHECK(contains(text, "\n  and 199992 more"));
        CHECK(text.size() < 2000);
        settings["model_type"] = std::string(200'000, 'q');
        CHECK(message([&] { config_of(settings); }).size() < 1000);
    }

    TEST_CASE("a damaged file of any family is read or refused with cpx::error") {
        std::mt19937_64 random(4);
        for (auto const& [given_name, settings] : families()) {
            auto const& name = given_name;
            CAPTURE(name);
            auto const original = settings.dump();
            int refused = 0;
            for (int i = 0; i < 1'000; ++i) {
                auto const text = faults::damaged(original, random);
                CAPTURE(text);
                auto const read = [&] {
                    auto const c = hf_config::parse(cpx::json_value::parse(text, "x"));
                    if (c.num_hidden_layers.has_value() && c.full_attention_interval.has_value()) c.layers();
                };
                bool other = false;
                try {
                    refused += message(read) != "nothing thrown";
                } catch (...) {
                    other = true;
                }
                REQUIRE(!other);
            }
            CHECK(refused > 300);
            CHECK(refused < 1'000);
        }
    }
}
