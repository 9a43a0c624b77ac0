// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/hf_computable.hpp>

#include "model/faults.hpp"

#include <doctest/doctest.h>

#include <support/files.hpp>

#include <nlohmann/json.hpp>

#include <fstream>
#include <functional>
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

std::string const data = std::string(support::source_dir) + "/examples/data/";
std::string const shipped = data + "tiny_qwen3_5/config.json";

json json_file(std::string const& path) { return json::parse(std::ifstream(path)); }

/// Returns the settings of a small model that is right.
json valid() {
    return json::parse(R"({
        "model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 1e-06,
        "hidden_act": "silu", "tie_word_embeddings": false, "attention_bias": false,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.5,
                            "mrope_section": [3, 3, 2]}})");
}

/// Returns the settings of a small mixture of experts that is right.
json valid_moe() {
    auto settings = valid();
    settings.erase("intermediate_size");
    settings.update({{"model_type", "qwen3_5_moe_text"},
                     {"num_experts", 8},
                     {"num_experts_per_tok", 2},
                     {"moe_intermediate_size", 32},
                     {"shared_expert_intermediate_size", 48}});
    return settings;
}

hf_config parse(json const& settings) {
    return cpx::computable_config(cpx::json_value::parse(settings.dump(), "config.json"));
}

/// Returns what is said of the valid settings after `change`.
std::string said(std::function<void(json&)> const& change) {
    auto settings = valid();
    change(settings);
    return message([&] { parse(settings); });
}

} // namespace

TEST_SUITE("model") {
    TEST_CASE("the shipped config is read, with the rotary settings of rope_parameters") {
        auto const config = cpx::computable_config(shipped);
        CHECK(*config.hidden_size == 64);
        CHECK(*config.intermediate_size == 128);
        CHECK(*config.vocab_size == 256);
        CHECK(*config.num_hidden_layers == 4);
        CHECK(config.layers() == std::vector{layer_type::linear_attention, layer_type::linear_attention,
                                             layer_type::linear_attention, layer_type::full_attention});
        CHECK(*config.rms_norm_eps == 1e-6);
        CHECK(!*config.tie_word_embeddings);
        CHECK(*config.num_attention_heads == 4);
        CHECK(*config.num_key_value_heads == 2);
        CHECK(*config.head_dim == 32);
        CHECK(*config.linear_num_key_heads == 4);
        CHECK(*config.linear_num_value_heads == 8);
        CHECK(*config.linear_key_head_dim == 16);
        CHECK(*config.linear_value_head_dim == 16);
        CHECK(*config.linear_conv_kernel_dim == 4);
        CHECK(*config.rope_theta == 1e7);
        CHECK(config.partial_rotary_factor == 0.5);
        CHECK(config.rotary_dim() == 16);
        CHECK(*config.mrope_section == std::vector<cpx::index_t>{3, 3, 2});
    }

    TEST_CASE("the shipped mixture of experts is read, and has no intermediate_size") {
        auto const config = cpx::computable_config(data + "tiny_qwen3_5_moe/config.json");
        CHECK(config.moe());
        CHECK(*config.num_experts == 8);
        CHECK(*config.num_experts_per_tok == 2);
        CHECK(*config.moe_intermediate_size == 32);
        CHECK(*config.shared_expert_intermediate_size == 32);
        CHECK(!config.intermediate_size.has_value());
        CHECK(!config.states("intermediate_size"));
        CHECK(config.rotary_dim() == 16); // not of the partial_rotary_factor beside rope_parameters
        CHECK(config.layers().back() == layer_type::full_attention);
    }

    TEST_CASE("the shipped multimodal models are read, each as its model_type says") {
        auto const deepstack = cpx::computable_config(data + "tiny_qwen3_vl/config.json");
        CHECK(deepstack.layers() == std::vector(4, layer_type::full_attention));
        CHECK(!deepstack.linear());
        CHECK(!deepstack.linear_conv_kernel_dim.has_value());
        CHECK(!deepstack.gated());
        CHECK(!deepstack.zero_centred_norms());
        CHECK(*deepstack.tie_word_embeddings);
        CHECK(deepstack.rotary_dim() == 32);
        CHECK(*deepstack.mrope_section == std::vector<cpx::index_t>{6, 5, 5});
        CHECK(deepstack.multimodal());
        CHECK(*deepstack.image_token_id == 250);
        CHECK(*deepstack.video_token_id == 251);
        CHECK(*deepstack.spatial_merge_size == 2);
        CHECK(deepstack.deepstack_layers() == 3);
        auto const hybrid = cpx::computable_config(data + "tiny_qwen3_5_vl/config.json");
        CHECK(hybrid.linear());
        CHECK(hybrid.gated());
        CHECK(hybrid.zero_centred_norms());
        CHECK(hybrid.multimodal());
        CHECK(hybrid.deepstack_layers() == 0);
        CHECK(!cpx::computable_config(shipped).multimodal());
    }

    TEST_CASE("a setting of a multimodal model that is wrong is named, and Qwen3-VL is read as it was published") {
        json const good = json_file(data + "tiny_qwen3_vl/config.json");
        auto const said_of = [&](std::function<void(json&)> const& change) {
            auto settings = good;
            change(settings);
            return message([&] { parse(settings); });
        };
        using change = std::function<void(json&)>;
        for (auto const& [how, passage] : std::vector<std::pair<change, std::string>>{
                 {[](json& c) { c["image_token_id"] = 256; },
                  "/image_token_id: expected 0 to vocab_size - 1, 255, got 256"},
                 {[](json& c) { c.erase("video_token_id"); }, "/video_token_id: expected a value, got none"},
                 {[](json& c) { c["video_token_id"] = 250; },
                  "/video_token_id: expected another one than image_token_id"},
                 {[](json& c) { c["vision_config"] = 1; }, "/vision_config: expected an object, got 1"},
                 {[](json& c) { c["vision_config"]["spatial_merge_size"] = 0; },
                  "/spatial_merge_size: expected more than 0"},
                 {[](json& c) { c["vision_config"]["out_hidden_size"] = 32; },
                  "/out_hidden_size: expected hidden_size"},
                 {[](json& c) {
                      c["vision_config"]["deepstack_visual_indexes"] = {0, 1, 2, 3, 4};
                  },
                  "/deepstack_visual_indexes: expected as many as num_hidden_layers at most, 4, got 5"},
                 {[](json& c) { c["text_config"]["rope_parameters"]["mrope_interleaved"] = false; },
                  "/mrope_interleaved: expected true, got false"},
                 {[](json& c) { c["text_config"]["attn_output_gate"] = true; }, "/attn_output_gate: expected false"},
                 {[](json& c) { c["text_config"]["num_hidden_layers"] = 2147483647; },
                  "/num_hidden_layers: expected at most 1048576"}}) {
            auto const text = said_of(how);
            CAPTURE(text);
            CHECK(contains(text, "config.json: /"));
            CHECK(contains(text, passage));
        }
        auto published = good;
        auto& text = published["text_config"];
        text["rope_scaling"] = text["rope_parameters"];
        text["rope_theta"] = text["rope_scaling"]["rope_theta"];
        text["rope_scaling"].erase("rope_theta");
        text.erase("rope_parameters");
        CHECK(*parse(published).rope_theta == 5e6);
        CHECK(*parse(published).mrope_section == std::vector<cpx::index_t>{6, 5, 5});
        published.erase("vision_config");
        CHECK(!parse(published).multimodal());
    }

    TEST_CASE("a dense model has no experts, and experts no intermediate_size, whatever else the file says") {
        auto dense = valid();
        dense.update({{"num_experts", 8}, {"num_experts_per_tok", 9}, {"norm_topk_prob", false}});
        CHECK(!parse(dense).moe());
        CHECK(!parse(dense).moe(0));
        auto moe = valid_moe();
        CHECK(*parse(moe).shared_expert_intermediate_size == 48);
        moe.update({{"intermediate_size", 5632}, {"norm_topk_prob", true}, {"num_experts_per_tok", 8}});
        CHECK(parse(moe).moe(0));
        CHECK(*parse(moe).num_experts_per_tok == 8);
    }

    TEST_CASE("a setting of a mixture of experts that is wrong is named") {
        std::vector<std::pair<json, std::string>> const wrong = {
            {{{"num_experts", 0}}, "/num_experts: expected more than 0, got 0"},
            {{{"num_experts", nullptr}}, "/num_experts: expected a value, got none"},
            {{{"num_experts_per_tok", -1}}, "/num_experts_per_tok: expected more than 0, got -1"},
            {{{"num_experts_per_tok", 9}}, "/num_experts_per_tok: expected at most num_experts, 8, got 9"},
            {{{"moe_intermediate_size", 32.5}}, "/moe_intermediate_size: expected an integer"},
            {{{"shared_expert_intermediate_size", 0}}, "/shared_expert_intermediate_size: expected more than 0, got 0"},
            {{{"norm_topk_prob", false}},
             "/norm_topk_prob: expected none or true: Qwen3.5 divides the weights of a token's experts by their sum, "
             "got "
             "false"},
            {{{"norm_topk_prob", 1}}, "/norm_topk_prob: expected true or false, got 1"},
        };
        for (auto const& item : wrong) {
            auto settings = valid_moe();
            settings.update(item.first);
            auto const text = message([&] { parse(settings); });
            CAPTURE(text);
            CHECK(contains(text, "config.json: " + item.second));
            CHECK(!contains(text, "settings are wrong"));
        }
        for (auto const* key :
             {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"}) {
            auto settings = valid_moe();
            settings.erase(key);
            CHECK(contains(message([&] { parse(settings); }),
                           "config.json: /" + std::string(key) + ": expected a value, got none"));
        }
    }

    TEST_CASE("rotary settings stand beside the others where rope_parameters lacks them") {
        auto settings = valid();
        settings["rope_theta"] = 5e6;
        settings["partial_rotary_factor"] = 0.25;
        settings["rope_parameters"] = nullptr;
        CHECK(*parse(settings).rope_theta == 5e6);
        CHECK(parse(settings).rotary_dim() == 8);
        CHECK(!parse(settings).mrope_section.has_value());
        settings["rope_parameters"] = {{"rope_theta", 1e4}};
        CHECK(*parse(settings).rope_theta == 1e4);
        CHECK(parse(settings).rotary_dim() == 8);
    }

    TEST_CASE("a multimodal config is read through its text_config") {
        json outer = {{"model_type", "qwen3_5"}, {"text_config", valid()}, {"hidden_size", 1}};
        CHECK(*parse(outer).hidden_size == 64);
        CHECK(!*parse(outer).tie_word_embeddings);
        outer["tie_word_embeddings"] = true;
        CHECK(*parse(outer).tie_word_embeddings);
        outer["text_config"]["head_dim"] = -1;
        CHECK(contains(message([&] { parse(outer); }), "config.json: /text_config/head_dim: expected more than 0"));
        CHECK(*parse({{"model_type", "qwen3_5_moe"}, {"text_config", valid_moe()}}).num_experts == 8);
    }

    TEST_CASE("a model that is not Qwen3.5 is not known") {
        auto const unknown = std::string("config.json: a model this program does not know: expected model_type ");
        auto const got = [&](json const& settings, std::string const& what) {
            auto const text = message([&] { parse(settings); });
            CAPTURE(text);
            CHECK(contains(text, unknown));
            CHECK(contains(text, ", got " + what));
        };
        got({{"model_type", "qwen3_5_moe"}}, R"("qwen3_5_moe")");
        got({{"model_type", "qwen3_5_moe"}, {"text_config", valid()}}, R"("qwen3_5_text" in text_config)");
        got({{"model_type", "llama"}}, R"("llama")");
        got({{"model_type", 5}}, "5");
        got({{"model_type", nullptr}}, "no model_type");
        got(json::object(), "no model_type");
        got(json::array(), "no model_type");
        got({{"model_type", "qwen3_5"}}, R"("qwen3_5")");
        got({{"model_type", "qwen3_5"}, {"text_config", {{"model_type", "qwen3_5_moe_text"}}}},
            R"("qwen3_5_moe_text" in text_config)");
        got({{"model_type", "qwen3_5"}, {"text_config", 1}}, "no model_type in text_config");
    }

    TEST_CASE("a setting that is wrong is named with what was expected and what is there") {
        REQUIRE(said([](json&) {}) == "nothing thrown");
        std::vector<std::pair<json, std::string>> const wrong = {
            {{{"hidden_size", 0}}, "/hidden_size: expected more than 0, got 0"},
            {{{"hidden_size", -4}}, "/hidden_size: expected more than 0, got -4"},
            {{{"hidden_size", 4.5}}, "/hidden_size: expected an integer from"},
            {{{"hidden_size", "64"}}, R"(/hidden_size: expected an integer from -2147483648 to 2147483647, got "64")"},
            {{{"vocab_size", 1e30}}, "/vocab_size: expected an integer"},
            {{{"vocab_size", 3'000'000'000}}, "/vocab_size: expected an integer"},
            {{{"intermediate_size", nullptr}}, "/intermediate_size: expected a value, got none"},
            {{{"rms_norm_eps", 0}}, "/rms_norm_eps: expected more than 0, got 0"},
            {{{"rms_norm_eps", 1e300}}, "/rms_norm_eps: expected a number of at most 3.40"},
            {{{"rms_norm_eps", 1e-300}}, "/rms_norm_eps: expected at least 1.2e-38, got 1e-300"},
            {{{"rms_norm_eps", "1e-6"}}, "/rms_norm_eps: expected a number"},
            {{{"hidden_act", "gelu"}}, R"(/hidden_act: expected "silu", got "gelu")"},
            {{{"hidden_act", "\x1b[31m\n"}}, R"(/hidden_act: expected "silu", got "\x1b[31m\x0a")"},
            {{{"attention_bias", true}}, "/attention_bias: expected false, got true"},
            {{{"attn_output_gate", false}}, "/attn_output_gate: expected true, got false"},
            {{{"tie_word_embeddings", 1}}, "/tie_word_embeddings: expected true or false, got 1"},
            {{{"num_hidden_layers", 3}}, "/layer_types: expected as many as num_hidden_layers, 3, got 2"},
            {{{"num_hidden_layers", 2147483647}}, "/num_hidden_layers: expected at most 1048576, got 2147483647"},
            {{{"layer_types", {"linear_attention", "sliding"}}}, R"(/layer_types/1: expected "linear_attention" or)"},
            {{{"layer_types", {"linear_attention", 1}}}, "/layer_types/1: expected a string, got 1"},
            {{{"layer_types", nullptr}}, "/layer_types: expected a value, or full_attention_interval, got none"},
            {{{"num_key_value_heads", 3}},
             "/num_attention_heads: expected a multiple of num_key_value_heads, 3, got 4"},
            {{{"linear_num_key_heads", 3}},
             "/linear_num_value_heads: expected a multiple of linear_num_key_heads, 3, got 8"},
            {{{"rope_scaling", {{"type", "yarn"}}}}, "/rope_scaling: expected rope_parameters instead, got a value"},
            {{{"rope_parameters", 1}}, "/rope_parameters: expected an object, got 1"},
            {{{"rope_parameters", {{"rope_type", "yarn"}}}},
             R"(/rope_parameters/rope_type: expected "default", got "yarn")"},
            {{{"rope_parameters", {{"type", "mrope"}}}}, R"(/rope_parameters/type: expected "default", got "mrope")"},
            {{{"rope_parameters", {{"rope_theta", 0}}}}, "/rope_parameters/rope_theta: expected more than 0, got 0"},
            {{{"rope_parameters", {{"rope_theta", nullptr}}}}, "/rope_theta: expected a value, got none"},
            {{{"rope_parameters", {{"partial_rotary_factor", nullptr}}}},
             "/partial_rotary_factor: expected a value, got none"},
            {{{"rope_parameters", {{"partial_rotary_factor", 1.5}}}},
             "/rope_parameters/partial_rotary_factor: expected at most 1, got 1.5"},
            {{{"rope_parameters", {{"partial_rotary_factor", 1e30}}}}, "expected at most 1, got 1e+30"},
            {{{"rope_parameters", {{"rope_theta", 1e39}}}}, "/rope_theta: expected a number of at most 3.40"},
            {{{"num_attention_heads", 1 << 30}},
             "/head_dim: expected 2147483647 at most when multiplied by num_attention_heads, 1073741824, got 32"},
            {{{"linear_value_head_dim", 2147483647}}, "/linear_value_head_dim: expected 2147483647 at most when"},
            {{{"rope_parameters", {{"partial_rotary_factor", 0.1}}}}, "at least 2, got 3 of head_dim 32"},
            {{{"rope_parameters", {{"partial_rotary_factor", 0.01}}}}, "at least 2, got 0 of head_dim 32"},
            {{{"rope_parameters", {{"mrope_section", {3, 3, 3}}}}},
             "/rope_parameters/mrope_section: expected 3 sizes of at least 0 with the sum 8, got 3 with the sum 9"},
            {{{"rope_parameters", {{"mrope_section", {4, 4}}}}}, "got 2 with the sum 8"},
            {{{"rope_parameters", {{"mrope_section", {9, -2, 1}}}}}, "expected 3 sizes of at least 0 with the sum 8"},
            {{{"rope_parameters", {{"mrope_section", json::array()}}}}, "got 0 with the sum 0"},
            {{{"rope_parameters", {{"mrope_section", {3, 3, 2.0}}}}}, "/mrope_section/2: expected an integer"},
        };
        for (auto const& item : wrong) {
            auto const& passage = item.second;
            auto settings = valid();
            for (auto const& [key, value] : item.first.items())
                if (key == "rope_parameters" && value.is_object())
                    settings[key].update(value);
                else
                    settings[key] = value;
            auto const text = message([&] { parse(settings); });
            CAPTURE(text);
            CAPTURE(passage);
            CHECK(contains(text, "config.json: "));
            CHECK(contains(text, passage));
            CHECK(!contains(text, "settings are wrong"));
        }
    }

    TEST_CASE("a setting that is left out is missed, and has no default") {
        auto const complete = valid();
        for (auto const& item : complete.items()) {
            auto const key = item.key();
            if (key == "model_type" || key == "attention_bias" || key == "rope_parameters") continue;
            CAPTURE(key);
            CHECK(contains(said([&](json& settings) { settings.erase(key); }),
                           "config.json: /" + key + ": expected a value, " +
                               (key == "layer_types" ? "or full_attention_interval, " : "") + "got none"));
        }
        CHECK(said([](json& settings) { settings.erase("attention_bias"); }) == "nothing thrown");
        CHECK(contains(said([](json& settings) { settings.erase("rope_parameters"); }), "2 settings are wrong"));
    }

    TEST_CASE("all that is wrong is reported at once") {
        auto const text = said([](json& settings) {
            settings["hidden_size"] = 0;
            settings["hidden_act"] = "relu";
            settings["num_key_value_heads"] = 3;
            settings["rope_parameters"]["rope_type"] = "linear";
            settings.erase("head_dim");
        });
        CHECK(contains(text, "config.json: 5 settings are wrong"));
        CHECK(contains(text, "\n  /hidden_size: expected more than 0, got 0"));
        CHECK(contains(text, "\n  /hidden_act: expected \"silu\", got \"relu\""));
        CHECK(contains(text, "\n  /num_attention_heads: expected a multiple of num_key_value_heads, 3, got 4"));
        CHECK(contains(text, "\n  /rope_parameters/rope_type: expected \"default\", got \"linear\""));
        CHECK(contains(text, "\n  /head_dim: expected a value, got none"));
    }

    TEST_CASE("of very many settings that are wrong some are told, and how many more there are") {
        auto const text = said([](json& settings) { settings["layer_types"] = json(200'000, "sliding_attention"); });
        CHECK(contains(text, "config.json: 200000 settings are wrong\n  /layer_types/0: expected"));
        CHECK(contains(text, "/layer_types/7: expected"));
        CHECK(contains(text, "\n  and 199992 more"));
        CHECK(text.size() < 2000);
    }

    TEST_CASE("a file that is not there, not JSON, or says a thing twice is refused by name") {
        faults::directory const place;
        auto const read = [&](std::string const& text) {
            return message([&] { cpx::computable_config(place.write("c.json", text)); });
        };
        CHECK(contains(message([&] { cpx::computable_config(place.path() / "none.json"); }), "none.json: cannot open"));
        CHECK(contains(read("{"), "c.json: not JSON"));
        CHECK(contains(read(R"({"model_type":"qwen3_5_text","model_type":"llama"})"), "duplicate key"));
        CHECK(read(valid().dump()) == "nothing thrown");
    }

    TEST_CASE("an error points at the line that reads") {
        faults::directory const place;
        auto const empty = place.write("e.json", ""), cut = place.write("c.json", "{"),
                   dup = place.write("d.json", R"({"a":1,"a":2})");
        auto const other = cpx::json_value::parse("{}", "other");
        auto bare = valid(), one = valid();
        bare.erase("layer_types"), bare.erase("hidden_size"), one["hidden_size"] = -1;
        auto const wrong = cpx::json_value::parse(bare.dump(), "x"), less = cpx::json_value::parse(one.dump(), "x");
        auto const at = [](int line) { return "hf_computable.cpp:" + std::to_string(line) + ": "; };
        int const line = __LINE__ + 1;
        CHECK(message([&] { cpx::computable_config("/none"); }).starts_with(at(line + 0)));
        CHECK(message([&] { cpx::computable_config(empty); }).starts_with(at(line + 1)));
        CHECK(message([&] { cpx::computable_config(cut); }).starts_with(at(line + 2)));
        CHECK(message([&] { cpx::computable_config(dup); }).starts_with(at(line + 3)));
        CHECK(message([&] { cpx::computable_config(other); }).starts_with(at(line + 4)));
        CHECK(message([&] { cpx::computable_config(wrong); }).starts_with(at(line + 5)));
        CHECK(message([&] { cpx::computable_config(less); }).starts_with(at(line + 6)));
    }

    TEST_CASE("a damaged config is read or refused with cpx::error") {
        std::mt19937_64 random(3);
        auto const original = valid().dump();
        int refused = 0;
        for (int i = 0; i < 10'000; ++i) {
            auto const text = faults::damaged(original, random);
            CAPTURE(text);
            bool other = false;
            try {
                auto const read = [&] { cpx::computable_config(cpx::json_value::parse(text, "x")); };
                refused += message(read) != "nothing thrown";
            } catch (...) {
                other = true;
            }
            REQUIRE(!other);
        }
        CHECK(refused > 5'000);
        CHECK(refused < 10'000);
    }
}
