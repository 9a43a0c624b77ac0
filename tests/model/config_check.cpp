// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/config_check.hpp>

#include <cpx/model/config_presets.hpp>

#include "model/faults.hpp"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

using cpx::config_report;
using faults::contains;
using faults::message;
using nlohmann::json;

namespace {

/// A pair of files.
struct pair {
    json hf, train;
};

pair preset(std::string_view name) {
    auto const& p = cpx::find_config_preset(name);
    return {json::parse(p.hf), json::parse(p.train)};
}

config_report check(json const& hf, json const& train) {
    return cpx::check_config(cpx::hf_config::parse(cpx::json_value::parse(hf.dump(), "config.json")),
                             cpx::train_config::parse(cpx::json_value::parse(train.dump(), "train.json")));
}
config_report check(pair const& p) { return check(p.hf, p.train); }

/// Returns a pair with changes: JSON merge patches of both sides.
pair with(pair p, json const& hf, json const& train = json::object()) {
    for (auto& [side, patch] : {std::pair{&p.hf, &hf}, {&p.train, &train}})
        for (auto const& [key, value] : patch->items()) {
            if (value.is_object())
                (*side)[key].update(value);
            else
                (*side)[key] = value;
        }
    return p;
}

/// Returns the fields of all mismatches, as "a/b c/d".
std::string fields(config_report const& report) {
    std::string all;
    for (auto const& m : report.mismatches) all += (all.empty() ? "" : " ") + m.one.field + '/' + m.other.field;
    return all;
}
std::string fields(pair const& p) { return fields(check(p)); }

/// Returns another value of the same type.
json changed(json const& value) {
    if (value.is_boolean()) return !value.get<bool>();
    if (value.is_number_integer()) return value.get<std::int64_t>() + 1;
    if (value.is_number()) return value.get<double>() / 2;
    if (value.is_null()) return 3;
    if (value.is_array() && !value.empty() && value[0].is_number()) {
        auto other = value;
        other[0] = changed(other[0]);
        return other;
    }
    return "other";
}

std::vector<std::string> const names{"Qwen3.5-35B-A3B", "Qwen3-Next-80B-A3B", "Qwen3-30B-A3B", "Qwen3-VL-2B"};

} // namespace

TEST_SUITE("model") {
    TEST_CASE("the training configuration of every preset agrees with its config.json, and everything was compared") {
        for (auto const& name : names) {
            auto const report = check(preset(name));
            CAPTURE(cpx::to_text(report));
            CHECK(report.agrees());
            CHECK(report.compared >= 20);
            CHECK(std::ranges::all_of(report.gaps, [](auto const& gap) { return gap.source == "ffn_hidden_size"; }));
            CHECK(report.gaps.size() == (name == "Qwen3.5-35B-A3B" ? 1 : 0)); // nobody's
        }
        CHECK(contains(message([] { cpx::find_config_preset("Qwen9"); }), "one of Qwen3.5-35B-A3B, Qwen3-Next-80B"));
    }

    // vision_and_names 4.3
    TEST_CASE("presets have the shapes of their models") {
        struct row {
            std::string name;
            int layers, heads, groups, head_dim, vocabulary, full;
        };
        for (auto const& r : {row{"Qwen3.5-35B-A3B", 40, 16, 2, 256, 248320, 10},
                              {"Qwen3-Next-80B-A3B", 48, 16, 2, 256, 151936, 12},
                              {"Qwen3-30B-A3B", 48, 32, 4, 128, 151936, 48},
                              {"Qwen3-VL-2B", 28, 16, 8, 128, 151936, 28}}) {
            CAPTURE(r.name);
            auto const c = cpx::find_config_preset(r.name).hf_settings();
            CHECK(*c.num_hidden_layers == r.layers);
            CHECK(*c.num_attention_heads == r.heads);
            CHECK(*c.num_key_value_heads == r.groups);
            CHECK(*c.head_dim == r.head_dim);
            CHECK(*c.vocab_size == r.vocabulary);
            auto const layers = c.layers();
            CHECK(std::ranges::count(layers, cpx::layer_type::full_attention) == r.full);
            CHECK(layers.back() == cpx::layer_type::full_attention);
        }
    }

    TEST_CASE("every change of one setting of a training configuration is found, and named") {
        for (auto const& name : names) {
            auto const p = preset(name);
            for (auto const& [given_key, value] : p.train.items()) {
                auto const& key = given_key;
                CAPTURE(name);
                CAPTURE(key);
                auto other = p;
                other.train[key] = key == "padded_vocab_size" ? json(value.get<int>() - 1) : changed(value);
                auto const report = check(other);
                if (key == "ffn_hidden_size" && name == "Qwen3.5-35B-A3B") {
                    CHECK(report.agrees());
                    continue;
                }
                CHECK(!report.agrees());
                auto const wanted = key == "group_query_attention" ? "num_attention_heads" : key;
                CHECK(std::ranges::any_of(report.mismatches, [&](auto const& m) {
                    return m.one.field == wanted || m.other.field == wanted;
                }));
            }
        }
    }

    TEST_CASE("every change of one setting of a config.json that training has is found, or refused") {
        std::vector<std::string> const apart{"image_token_id",
                                             "video_token_id",
                                             "depth",
                                             "patch_size",
                                             "hidden_act",
                                             "temporal_patch_size",
                                             "spatial_merge_size",
                                             "num_position_embeddings",
                                             "mrope_interleaved",
                                             "rope_type",
                                             "rope_scaling",
                                             "mlp_only_layers",
                                             "deepstack_visual_indexes"};
        for (auto const& name : names) {
            auto const p = preset(name);
            auto const flat = p.hf.flatten();
            for (auto const& [given_pointer, value] : flat.items()) {
                auto const& pointer = given_pointer;
                auto const key = pointer.substr(pointer.find_last_of('/') + 1);
                if (std::ranges::find(apart, key) != apart.end() || contains(pointer, "deepstack")) continue;
                if (pointer == "/vision_config/hidden_size") continue;
                CAPTURE(name);
                CAPTURE(pointer);
                auto other = p;
                other.hf[json::json_pointer(pointer)] = changed(value);
                bool agrees = false;
                auto const refused = message([&] { agrees = check(other).agrees(); });
                CHECK(!agrees);
                CHECK((key == "model_type") == contains(refused, "does not know"));
            }
        }
    }

    // vision_and_names 4.1, "MoE rule history"
    TEST_CASE("intermediate_size is compared where a file states it, but of mixtures of Qwen3.5, and no default") {
        auto const p = preset("Qwen3.5-35B-A3B");
        json text = p.hf["text_config"];
        text["tie_word_embeddings"] = false;
        text["intermediate_size"] = 5632; // a default of transformers 4.57
        auto const inherited = check(text, p.train);
        CHECK(inherited.agrees());
        REQUIRE(inherited.gaps.size() == 2);
        CHECK(inherited.gaps[0].source == "intermediate_size");
        CHECK(contains(cpx::to_text(inherited), "ffn_hidden_size (train.json): of a qwen3_5_moe it is nobody's\n"));
        CHECK(fields(with(preset("Qwen3-30B-A3B"), {}, {{"ffn_hidden_size", 12288}})) ==
              "intermediate_size/ffn_hidden_size");
        auto const next = preset("Qwen3-Next-80B-A3B");
        CHECK(fields(with(next, {}, {{"ffn_hidden_size", 512}})) == "intermediate_size/ffn_hidden_size");
        CHECK(fields(with(next, {{"moe_intermediate_size", 768}})) == "moe_intermediate_size/moe_ffn_hidden_size");
        for (auto const* const family : {"Qwen3-Next-80B-A3B", "Qwen3-30B-A3B"})
            for (int const size : {512, 5120}) {
                auto const defaults =
                    with(preset(family), {{"intermediate_size", 5632}, {"moe_intermediate_size", 512}},
                         {{"ffn_hidden_size", size}, {"moe_ffn_hidden_size", 512}});
                auto const report = check(defaults);
                CHECK(report.agrees());
                CHECK(contains(cpx::to_text(report), "ffn_hidden_size (train.json): 5632 beside experts of 512 is"));
                CHECK(fields(with(defaults, {{"intermediate_size", 5631}})) == "intermediate_size/ffn_hidden_size");
                CHECK(contains(fields(with(defaults, {{"mlp_only_layers", {1}}})), "intermediate_size/ffn_hidden"));
                CHECK(fields(with(defaults, {}, {{"moe_ffn_hidden_size", 768}})) ==
                      "moe_intermediate_size/moe_ffn_hidden_size");
            }
        auto const dense = with(next, {{"mlp_only_layers", {1}}}, {{"ffn_hidden_size", 512}});
        CHECK(contains(fields(dense), "intermediate_size/ffn_hidden_size"));
        CHECK(contains(fields(dense), "moe_layer_freq/experts"));
        // Without an own size, Megatron's experts have ffn_hidden_size.
        CHECK(check(with(next, {}, {{"ffn_hidden_size", 512}, {"moe_ffn_hidden_size", nullptr}})).agrees());
        CHECK(fields(with(next, {}, {{"moe_ffn_hidden_size", nullptr}})) == "moe_intermediate_size/ffn_hidden_size");
    }

    // vision_and_names 4.1, "More traps"
    TEST_CASE("a dense model may have settings of experts that it has none of") {
        auto p = preset("Qwen3-VL-2B");
        p.hf["text_config"].update({{"num_experts", 512}, {"moe_intermediate_size", 512}, {"num_experts_per_tok", 10}});
        CHECK(check(p).agrees());
        p.train["num_experts"] = 512;
        CHECK(fields(p) == "num_experts/num_experts");
        p.train["num_experts"] = 0;
        CHECK(check(p).agrees());
    }

    // vision_and_names 4.1, "More traps"
    TEST_CASE("tie_word_embeddings is that of the whole model, and the opposite of Megatron's") {
        auto p = preset("Qwen3-VL-2B");
        p.hf["text_config"]["tie_word_embeddings"] = false;
        CHECK(check(p).agrees());
        p.train["untie_embeddings_and_output_weights"] = true;
        auto const report = check(p);
        REQUIRE(report.mismatches.size() == 1);
        auto const& m = report.mismatches.front();
        CHECK(m.one.field == "tie_word_embeddings");
        CHECK(m.one.value == true);
        CHECK(m.one.source == "tie_word_embeddings");
        CHECK(m.other.field == "untie_embeddings_and_output_weights");
        CHECK(m.other.value == true);
    }

    TEST_CASE("numbers are compared as numbers") {
        auto p = preset("Qwen3-30B-A3B");
        auto const read = [&](std::string const& epsilon, std::string const& base) {
            auto text = p.train.dump();
            for (auto const& [key, now, value] : {std::tuple{"norm_epsilon", p.train["norm_epsilon"].dump(), epsilon},
                                                  {"rotary_base", p.train["rotary_base"].dump(), base}}) {
                auto const before = '"' + std::string(key) + "\":" + now;
                REQUIRE(contains(text, before));
                text.replace(text.find(before), before.size(), '"' + std::string(key) + "\":" + value);
            }
            return check(p.hf, json::parse(text)).agrees();
        };
        CHECK(read("0.000001", "1e6"));
        CHECK(read("1.0E-6", "1000000.0"));
        CHECK(!read("0.0000010000001", "1e6"));
        CHECK(!read("1e-6", "1000000.5"));
        p.hf["rope_theta"] = 1e7;
        p.train["rotary_base"] = 10000000;
        CHECK(check(p).agrees());
    }

    TEST_CASE("norm_epsilon has two names, of which both count") {
        auto p = preset("Qwen3-30B-A3B");
        p.train["layernorm_epsilon"] = 1e-5;
        CHECK(fields(p) == "rms_norm_eps/layernorm_epsilon");
        p.train.erase("norm_epsilon");
        CHECK(fields(p) == "rms_norm_eps/layernorm_epsilon");
        p.train.erase("layernorm_epsilon");
        CHECK(check(p).agrees());
        REQUIRE(check(p).gaps.size() == 1);
        CHECK(check(p).gaps.front().field == "layernorm_epsilon");
    }

    TEST_CASE("all mismatches are in one report, with field, value and source of both sides") {
        auto const p = with(preset("Qwen3.5-35B-A3B"), {},
                            {{"num_layers", 24}, {"rotary_base", 1000000}, {"moe_router_topk", 10}});
        auto const report = check(p);
        CHECK(fields(report) ==
              "num_hidden_layers/num_layers num_experts_per_tok/moe_router_topk rope_theta/rotary_base");
        auto const text = cpx::to_text(report);
        CHECK(contains(text, "train.json does not agree with config.json: 3 mismatches\n"));
        CHECK(contains(text, "rope_theta = 10000000.0 (config.json: text_config.rope_parameters.rope_theta) against "
                             "rotary_base = 1000000.0 (train.json: rotary_base): expected the same\n"));
        auto const j = cpx::to_json(report);
        CHECK(j["agrees"] == false);
        CHECK(j["mismatches"].size() == 3);
        json const hf = {{"field", "num_hidden_layers"}, {"value", 40}, {"source", "text_config.num_hidden_layers"}};
        json const train = {{"field", "num_layers"}, {"value", 24}, {"source", "num_layers"}};
        CHECK(json(j["mismatches"][0]) == json{{"expected", "the same"}, {"hf", hf}, {"train", train}});
    }

    TEST_CASE(
        "a mismatch in JSON names both sides by their files' roles, whichever comes first, and both in one file") {
        auto const shown = [](std::string_view name, json const& hf, json const& train) {
            auto const all = cpx::to_json(check(with(preset(name), hf, train)))["mismatches"];
            REQUIRE(all.size() == 1);
            return all[0];
        };
        auto const padded = shown("Qwen3-30B-A3B", {}, {{"padded_vocab_size", 128}});
        CHECK(padded["hf"]["field"] == "vocab_size");
        CHECK(padded["train"]["value"] == 128);
        auto const two = shown("Qwen3.5-35B-A3B", {{"text_config", {{"rope_theta", 1000000}}}}, {});
        CHECK(two["hf"]["source"] == "text_config.rope_parameters.rope_theta");
        CHECK(two["hf_other"]["source"] == "text_config.rope_theta");
        CHECK(!two.contains("train"));
        auto const split = shown("Qwen3-30B-A3B", {}, {{"context_parallel_size", 3}, {"seq_length", 15}});
        CHECK(split["train"]["field"] == "seq_length");
        CHECK(split["train_other"]["field"] == "context_parallel_size * 2");
    }

    TEST_CASE("a line of a report stays one, whatever is in the names of files and keys") {
        auto p = with(preset("Qwen3.5-35B-A3B"), {}, {{"num_layers", 24}, {"moe_shared_expert_gate", nullptr}});
        p.hf["text_config"]["rope_parameters"].erase("rope_theta");
        p.hf["text_config"]["rope_parameters"]["a\nb"] = {{"rope_theta", 5}};
        auto const report = cpx::check_config(cpx::hf_config::parse(cpx::json_value::parse(p.hf.dump(), "c\nd")),
                                              cpx::train_config::parse(cpx::json_value::parse(p.train.dump(), "e\nf")));
        auto const text = cpx::to_text(report);
        CHECK(std::ranges::count(text, '\n') ==
              2 + std::ssize(report.mismatches) + std::ssize(report.gaps)); // with the verdict, and a title
        CHECK(contains(text, "e\\x0af does not agree with c\\x0ad: "));
        CHECK(contains(text, "rope_parameters.a\\x0ab.rope_theta"));
    }

    // vision_and_names 4.1, the steps before
    TEST_CASE("rope_theta is that of the first object in rope_parameters that has one, where there is none beside it") {
        auto p = preset("Qwen3.5-35B-A3B");
        p.hf["text_config"]["rope_parameters"].erase("rope_theta");
        CHECK(check(p).agrees());
        CHECK(check(p).gaps.size() == 2);
        p.hf["text_config"]["rope_parameters"].update(
            {{"layers_a", {{"factor", 2}}}, {"layers_b", {{"rope_theta", 10000}}}, {"layers_c", {{"rope_theta", 5}}}});
        auto const report = check(p);
        REQUIRE(fields(report) == "rope_theta/rotary_base");
        CHECK(report.mismatches[0].one.source == "text_config.rope_parameters.layers_b.rope_theta");
        p.train["rotary_base"] = 10000;
        CHECK(check(p).agrees());
    }

    TEST_CASE("arguments may be spelled as on a command line, with one value") {
        auto const p = preset("Qwen3-Next-80B-A3B");
        for (std::string const before : {"", "--"}) {
            json dashed;
            for (auto const& [key, value] : p.train.items()) {
                auto name = before + key;
                std::ranges::replace(name, '_', '-');
                dashed[name] = value;
            }
            CHECK(check(p.hf, dashed).agrees());
            CHECK(check(p.hf, dashed).compared == check(p).compared);
            dashed[before + "num-layers"] = 24;
            CHECK(fields(check(p.hf, dashed)) == "num_hidden_layers/" + before + "num-layers");
            CHECK(contains(message([&] {
                               check(with({p.hf, dashed}, {}, {{"num_layers", 48}}));
                           }),
                           "num_layers\", got two"));
            CHECK(fields(check(with({p.hf, dashed}, {}, {{"num_layers", 24}}))) ==
                  "num_hidden_layers/" + before + "num-layers");
        }
    }

    TEST_CASE("a training configuration in which nothing can be compared is refused") {
        for (auto const& name : names)
            for (auto const& train : {json::object(), json{{"lr", 0.1}}, json{{"tensor_model_parallel_size", 1}},
                                      json{{"hidden_size", nullptr}}})
                CHECK(contains(message([&] { check(preset(name).hf, train); }), "train.json: nothing to compare"));
        CHECK(check(preset(names[0]).hf, {{"hidden_size", 2048}}).agrees());
    }

    // Megatron-LM takes these texts for moe_layer_freq and linear_attention_freq.
    TEST_CASE("which layers are of a kind is read from a sum of lists, and what is none is refused") {
        auto const read = [](std::string const& text) {
            return cpx::train_config::parse(cpx::json_value::parse(json{{"moe_layer_freq", text}}.dump(), "train"))
                .moe_layer_freq.value();
        };
        auto const list = [&](std::string const& text) { return read(text).list; };
        using numbers = std::vector<cpx::index_t>;
        CHECK(read("3").every == 3);
        CHECK(read(" (1+1)*2 ").every == 4);
        CHECK(list("[0,1, 1]") == numbers{0, 1, 1});
        CHECK(list("[0]*1+[1]*3") == numbers{0, 1, 1, 1});
        CHECK(list("2*([0]+[1]*2)") == numbers{0, 1, 1, 0, 1, 1});
        CHECK(list("([1]*2+[0]*1)*2+[1,]") == numbers{1, 1, 0, 1, 1, 0, 1});
        CHECK(list("[1]*0").empty());
        CHECK(list("([0]*1+[1]*47)").size() == 48);
        for (std::string const bad : {"",
                                      " ",
                                      "0",
                                      "x",
                                      "-1",
                                      "1.5",
                                      "[",
                                      "]",
                                      "(",
                                      "()",
                                      "(1",
                                      "1)",
                                      "[1",
                                      "[1]]",
                                      "[1]+",
                                      "+[1]",
                                      "[1]+1",
                                      "1+[1]",
                                      "[1]*[1]",
                                      "[[1]]",
                                      "[2]",
                                      "[1]*",
                                      "[,]",
                                      "[1,,1]",
                                      "[1]1",
                                      "1 1",
                                      "2147483648",
                                      "65536*65536",
                                      "[1]*2147483647",
                                      "[1]*2000000",
                                      "[1]**2",
                                      "__import__('os')"})
            CHECK_MESSAGE(contains(message([&] { read(bad); }), "/moe_layer_freq"), bad);
        CHECK(contains(message([&] { read(std::string(60000, '(')); }), "a number, or a list"));
        CHECK(contains(message([&] { read(std::string(60000, '[')); }), "a number, or a list"));
        std::mt19937_64 random(4);
        for (int i = 0; i < 3000; ++i) {
            auto const text = faults::damaged("([0]*1+[1]*47)+2*[1, 0]", random);
            auto const found = cpx::detail::layer_choice_reader(text).read();
            CHECK((!found || !found->list || found->list->size() <= std::size_t{1} << 20));
        }
        auto const p = preset("Qwen3-30B-A3B");
        CHECK(check(with(p, {}, {{"moe_layer_freq", "([1]*48)"}})).agrees());
        CHECK(fields(with(p, {}, {{"moe_layer_freq", "([0]*1+[1]*47)"}})) == "moe_layer_freq/experts");
        CHECK(check(with(p, {{"mlp_only_layers", {0}}}, {{"moe_layer_freq", "([0]*1+[1]*47)"}})).agrees());
        auto const next = preset("Qwen3-Next-80B-A3B");
        CHECK(check(with(next, {}, {{"linear_attention_freq", "([1]*3+[0]*1)*12"}})).agrees());
        CHECK(!check(with(next, {}, {{"linear_attention_freq", "([0]*1+[1]*3)*12"}})).agrees());
    }

    TEST_CASE("what one file leaves out is no mismatch, and is told") {
        auto p = preset("Qwen3-30B-A3B");
        p.train.erase("kv_channels");
        p.hf.erase("vocab_size");
        auto const report = check(p);
        CHECK(report.agrees());
        REQUIRE(report.gaps.size() == 2);
        CHECK(report.gaps[0].field == "vocab_size");
        CHECK(report.gaps[0].file == "config.json");
        CHECK(report.gaps[1].field == "kv_channels");
        CHECK(contains(cpx::to_text(report), "not compared:\n  vocab_size (train.json): config.json does not state"));
        // What every file of a family leaves out and Megatron has by default needs no word.
        auto dense = preset("Qwen3-VL-2B");
        for (auto const* key : {"num_experts", "attention_output_gate", "rotary_percent", "qk_layernorm",
                                "apply_layernorm_1p", "mtp_num_layers"})
            dense.train.erase(key);
        CHECK(check(dense).agrees());
        CHECK(check(dense).gaps.empty());
    }

    TEST_CASE("null is what Megatron has where an argument is not given") {
        auto const p = preset("Qwen3-VL-2B");
        CHECK(check(with(p, {}, {{"kv_channels", nullptr}})).agrees()); // hidden_size / num_attention_heads
        CHECK(fields(with(preset("Qwen3-30B-A3B"), {}, {{"kv_channels", nullptr}})) == "head_dim/kv_channels");
        CHECK(fields(with(p, {}, {{"num_query_groups", nullptr}})) == "num_key_value_heads/num_attention_heads");
        CHECK(fields(with(preset("Qwen3-30B-A3B"), {}, {{"num_experts", nullptr}})) == "num_experts/num_experts");
    }

    TEST_CASE("no shared expert is 0 or null or not there, and a shared expert has a gate") {
        auto p = preset("Qwen3-30B-A3B");
        for (json const& none : {json(0), json(nullptr)})
            CHECK(check(with(p, {}, {{"moe_shared_expert_intermediate_size", none}})).agrees());
        p.train.erase("moe_shared_expert_intermediate_size");
        CHECK(check(p).agrees());
        auto const next = preset("Qwen3-Next-80B-A3B");
        CHECK(fields(with(next, {}, {{"moe_shared_expert_intermediate_size", nullptr}})) ==
              "shared_expert_intermediate_size/moe_shared_expert_intermediate_size");
        auto const gate = check(with(next, {}, {{"moe_shared_expert_gate", false}}));
        REQUIRE(fields(gate) == "shared_expert_gate/moe_shared_expert_gate");
        CHECK(gate.mismatches[0].one.source == "shared_expert_intermediate_size");
        CHECK(check(with(next, {{"shared_expert_intermediate_size", 0}},
                         {{"moe_shared_expert_intermediate_size", nullptr}, {"moe_shared_expert_gate", false}}))
                  .agrees());
    }

    TEST_CASE("weights of experts sum to one where softmax comes after the choice") {
        auto const p = preset("Qwen3-30B-A3B");
        CHECK(fields(with(p, {{"norm_topk_prob", false}})) == "norm_topk_prob/moe_router_pre_softmax");
        CHECK(check(with(p, {{"norm_topk_prob", false}}, {{"moe_router_pre_softmax", true}})).agrees());
        // Qwen3.5 always divides by the sum.
        CHECK(fields(with(preset("Qwen3.5-35B-A3B"), {{"text_config", {{"norm_topk_prob", false}}}},
                          {{"moe_router_pre_softmax", true}})) == "norm_topk_prob/moe_router_pre_softmax");
    }

    TEST_CASE("layers are of the same kinds on both sides, by number or by list") {
        auto p = preset("Qwen3-Next-80B-A3B");
        json list = json::array(), types = list;
        for (int i = 0; i < 48; ++i) {
            list.push_back((i + 1) % 4 != 0);
            types.push_back((i + 1) % 4 != 0 ? "linear_attention" : "full_attention");
        }
        for (auto& one : list) one = one.get<bool>() ? 1 : 0;
        CHECK(check(with(p, {}, {{"linear_attention_freq", list}})).agrees());
        CHECK(check(with(p, {}, {{"linear_attention_freq", list.dump()}})).agrees());
        CHECK(check(with(p, {{"layer_types", types}})).agrees());
        CHECK(check(with(p, {{"layer_types", types}, {"full_attention_interval", nullptr}})).agrees());
        auto const two = check(with(p, {{"layer_types", types}, {"full_attention_interval", 2}}));
        REQUIRE(fields(two) == "layer_types/full_attention_interval");
        CHECK(two.mismatches[0].one.source == "layer_types.1");
        types[5] = "full_attention";
        auto const report = check(with(p, {{"layer_types", types}, {"full_attention_interval", nullptr}}));
        REQUIRE(fields(report) == "linear_attention_freq/linear_attention");
        CHECK(report.mismatches[0].other.source == "layer_types");
        CHECK(contains(report.mismatches[0].expected, "layer 5 to be none"));
        list.erase(0);
        CHECK(fields(with(p, {}, {{"linear_attention_freq", list}})) == "linear_attention_freq/num_hidden_layers");
        types.erase(0);
        CHECK(contains(fields(with(p, {{"layer_types", types}, {"full_attention_interval", nullptr}})),
                       "layer_types/num_hidden_layers"));
        auto const dense = preset("Qwen3-30B-A3B");
        CHECK(fields(with(dense, {}, {{"linear_attention_freq", 4}})) == "linear_attention_freq/linear_attention");
        CHECK(check(with(dense, {}, {{"linear_attention_freq", 1}})).agrees());
        CHECK(fields(with(dense, {}, {{"moe_layer_freq", 2}})) == "moe_layer_freq/experts");
    }

    TEST_CASE("what one file says of parts that the model or the other file does not have is told") {
        struct row {
            std::string name;
            json hf, train;
            std::string source, reason;
        };
        for (auto const& r : std::vector<row>{
                 {"Qwen3-30B-A3B", {}, {{"mrope_section", {24, 20, 20}}}, "mrope_section", ""},
                 {"Qwen3-Next-80B-A3B", {}, {{"mrope_section", {11, 11, 10}}}, "mrope_section", ""},
                 {"Qwen3-30B-A3B", {}, {{"linear_num_key_heads", 16}}, "linear_num_key_heads", "no linear attention"},
                 {"Qwen3-30B-A3B",
                  {{"linear_conv_kernel_dim", 4}},
                  {},
                  "linear_conv_kernel_dim",
                  "no linear attention"},
                 {"Qwen3-30B-A3B",
                  {{"full_attention_interval", 4}},
                  {},
                  "full_attention_interval",
                  "no linear attention"},
                 {"Qwen3-VL-2B", {}, {{"moe_router_topk", 8}}, "moe_router_topk", "no experts"},
                 {"Qwen3-VL-2B", {}, {{"moe_ffn_hidden_size", 512}}, "moe_ffn_hidden_size", "no experts"},
                 {"Qwen3-VL-2B", {}, {{"moe_router_pre_softmax", true}}, "moe_router_pre_softmax", "no experts"},
                 {"Qwen3-VL-2B", {}, {{"moe_layer_freq", 2}}, "moe_layer_freq", "no experts"},
                 {"Qwen3-VL-2B", {{"text_config", {{"num_experts", 8}}}}, {}, "text_config.num_experts", "no experts"},
                 {"Qwen3-VL-2B",
                  {{"text_config", {{"mtp_num_hidden_layers", 1}}}},
                  {},
                  "text_config.mtp_num_hidden_layers",
                  "no multi-token prediction"},
                 {"Qwen3-30B-A3B",
                  {{"shared_expert_intermediate_size", 512}},
                  {},
                  "shared_expert_intermediate_size",
                  "no shared expert"},
                 {"Qwen3-Next-80B-A3B", {{"full_attention_interval", nullptr}}, {}, "linear_attention_freq", ""},
             }) {
            CAPTURE(r.name);
            CAPTURE(r.source);
            auto const report = check(with(preset(r.name), r.hf, r.train));
            CHECK(report.agrees());
            REQUIRE(report.gaps.size() == 1);
            CHECK(report.gaps[0].source == r.source);
            CHECK(contains(report.gaps[0].reason, r.reason));
            CHECK(report.gaps[0].reason.empty() == r.reason.empty());
            CHECK(!report.gaps[0].field.empty());
        }
        // A file that says of linear attention only how many layers there are leaves nothing to tell of it.
        auto next = preset("Qwen3-Next-80B-A3B");
        next.hf.erase("full_attention_interval");
        next.train.erase("linear_attention_freq");
        CHECK(check(next).gaps.empty());
    }

    TEST_CASE("arguments of a virtual pipeline that say different numbers of chunks are a mismatch") {
        std::string const pp = "pipeline_model_parallel_size", vpp = "virtual_" + pp;
        std::string const each = "num_layers_per_virtual_pipeline_stage",
                          stages = "num_virtual_stages_per_pipeline_rank";
        auto const p = preset("Qwen3-30B-A3B");
        CHECK(fields(with(p, {}, {{pp, 2}, {vpp, 4}, {each, 6}})).empty());
        CHECK(fields(with(p, {}, {{pp, 2}, {vpp, 4}, {each, 12}})) == vpp + '/' + each);
        CHECK(fields(with(p, {}, {{pp, 2}, {vpp, 4}, {stages, 2}})) == vpp + '/' + stages);
        CHECK(fields(with(p, {}, {{pp, 2}, {stages, 4}, {each, 12}})) == stages + '/' + each);
        CHECK(fields(with(p, {}, {{vpp, 2}, {stages, 3}})) == vpp + '/' + stages);
        auto const accounted = with(p, {},
                                    {{"account_for_loss_in_pipeline_split", true},
                                     {"account_for_embedding_in_pipeline_split", true},
                                     {pp, 2},
                                     {each, 5}});
        CHECK(fields(accounted).empty());
    }

    // vision_and_names 4.2; what the parallelism of a row must divide
    TEST_CASE("parallelism divides heads, experts, vocabulary, layers and sequences") {
        struct row {
            std::string name;
            json train;
            std::string fields;
        };
        std::string const tp = "tensor_model_parallel_size", cp = "context_parallel_size";
        std::string const both = tp + " * " + cp;
        json const loss = {{"calculate_per_token_loss", true}};
        auto const a2a = [&](int t, int c, json more = json::object()) {
            more.update({{tp, t}, {cp, c}, {"calculate_per_token_loss", true}});
            if (!more.contains("cp_comm_type")) more["cp_comm_type"] = "a2a";
            return more;
        };
        for (auto const& r : std::vector<row>{
                 {"Qwen3-30B-A3B", {{tp, 4}}, ""},
                 {"Qwen3-30B-A3B", {{tp, 8}}, "num_key_value_heads/" + tp},
                 {"Qwen3-30B-A3B",
                  {{tp, 3}},
                  "num_attention_heads/" + tp + " num_key_value_heads/" + tp + " padded_vocab_size/" + tp},
                 {"Qwen3-30B-A3B", {{"expert_model_parallel_size", 8}}, ""},
                 {"Qwen3-30B-A3B", {{"expert_model_parallel_size", 3}}, "num_experts/expert_model_parallel_size"},
                 {"Qwen3-VL-2B", {{"expert_model_parallel_size", 1}}, ""},
                 {"Qwen3-VL-2B", {{"expert_model_parallel_size", 2}}, "expert_model_parallel_size/num_experts"},
                 {"Qwen3-30B-A3B", {{cp, 16}}, ""}, // no heads are divided
                 {"Qwen3-30B-A3B", a2a(2, 2), ""},
                 {"Qwen3-30B-A3B", a2a(2, 4), "num_key_value_heads/" + both},
                 {"Qwen3-Next-80B-A3B", a2a(1, 2), ""},
                 {"Qwen3-Next-80B-A3B", a2a(1, 32),
                  "num_attention_heads/" + both + " num_key_value_heads/" + both + " linear_num_key_heads/" + both},
                 {"Qwen3-30B-A3B",
                  a2a(1, 8, {{"cp_comm_type", "a2a+p2p"}, {"hierarchical_context_parallel_sizes", {4, 2}}}), ""},
                 {"Qwen3-30B-A3B",
                  a2a(1, 8, {{"cp_comm_type", "a2a+p2p"}, {"hierarchical_context_parallel_sizes", {4, 4}}}),
                  "hierarchical_context_parallel_sizes/" + cp},
                 {"Qwen3-30B-A3B", a2a(1, 8, {{"cp_comm_type", "a2a+p2p"}}),
                  "hierarchical_context_parallel_sizes/" + cp},
                 {"Qwen3-30B-A3B", a2a(1, 2, {{"cp_comm_type", "ring"}}), "cp_comm_type/" + cp},
                 {"Qwen3-30B-A3B", {{cp, 3}, {"seq_length", 12}}, ""},
                 {"Qwen3-30B-A3B", {{cp, 3}, {"seq_length", 15}}, "seq_length/" + cp + " * 2"},
                 {"Qwen3-30B-A3B", {{cp, 3}, {"seq_length", 15}, {"allgather_cp", true}}, ""},
                 {"Qwen3-30B-A3B", {{cp, 1}, {"seq_length", 15}}, ""},
                 {"Qwen3-30B-A3B", {{"pipeline_model_parallel_size", 4}}, ""},
                 {"Qwen3-30B-A3B", {{"pipeline_model_parallel_size", 5}}, "pipeline_model_parallel_size/num_layers"},
                 {"Qwen3-VL-2B", {{cp, 2}, {"calculate_per_token_loss", true}}, ""},
                 {"Qwen3-VL-2B", {{cp, 2}}, "calculate_per_token_loss/" + cp},
                 {"Qwen3-VL-2B", {{cp, 1}}, ""},
                 {"Qwen3-VL-2B", {{"pipeline_model_parallel_size", 7}}, ""},
                 {"Qwen3-VL-2B",
                  {{"pipeline_model_parallel_size", 14}},
                  "deepstack_visual_indexes/pipeline_model_parallel_size"},
                 {"Qwen3-VL-2B",
                  {{"pipeline_model_parallel_size", 2}, {"virtual_pipeline_model_parallel_size", 7}},
                  "deepstack_visual_indexes/pipeline_model_parallel_size"},
                 {"Qwen3-VL-2B",
                  {{"pipeline_model_parallel_size", 4}, {"num_layers_per_virtual_pipeline_stage", 2}},
                  "num_layers/num_layers_per_virtual_pipeline_stage * pipeline_model_parallel_size "
                  "pipeline_model_parallel_size/num_layers"},
                 {"Qwen3-VL-2B",
                  {{"pipeline_model_parallel_size", 4}, {"decoder_first_pipeline_num_layers", 1}},
                  "deepstack_visual_indexes/pipeline_model_parallel_size"},
                 {"Qwen3-VL-2B",
                  {{"pipeline_model_parallel_size", 2}, {"pipeline_model_parallel_layout", "Ett|t*26L"}},
                  "deepstack_visual_indexes/pipeline_model_parallel_layout"},
                 {"Qwen3-VL-2B",
                  {{"pipeline_model_parallel_size", 2}, {"pipeline_model_parallel_layout", "Et*4|t*24L"}},
                  ""},
                 {"Qwen3-VL-2B",
                  {{"pipeline_model_parallel_size", 2}, {"pipeline_model_parallel_layout", "Et*4|t*24mL"}},
                  "pipeline_model_parallel_layout/mtp_num_layers"},
                 {"Qwen3-Next-80B-A3B",
                  {{"pipeline_model_parallel_size", 2}, {"pipeline_model_parallel_layout", "Et*24|t*24L"}},
                  "pipeline_model_parallel_layout/mtp_num_layers"},
                 {"Qwen3-VL-2B",
                  {{"pipeline_model_parallel_size", 2},
                   {"virtual_pipeline_model_parallel_size", 3},
                   {"pipeline_model_parallel_layout", "Et*4|t*24L"}},
                  "pipeline_model_parallel_layout/virtual_pipeline_model_parallel_size"},
                 {"Qwen3-VL-2B",
                  {{"pipeline_model_parallel_size", 2}, {"pipeline_model_parallel_layout", "Et*4|t*23|tL"}},
                  "pipeline_model_parallel_layout/pipeline_model_parallel_size"},
                 {"Qwen3-VL-2B",
                  {{"pipeline_model_parallel_size", 2}, {"pipeline_model_parallel_layout", "Et*4|t*23L"}},
                  "pipeline_model_parallel_layout/num_layers"},
                 {"Qwen3-VL-2B",
                  {{"pipeline_model_parallel_size", 1}, {"decoder_first_pipeline_num_layers", 99}},
                  "pipeline_model_parallel_size/decoder_first_pipeline_num_layers"},
                 {"Qwen3-VL-2B",
                  {{"pipeline_model_parallel_size", 1}, {"decoder_last_pipeline_num_layers", 27}},
                  "pipeline_model_parallel_size/num_layers"},
                 {"Qwen3-VL-2B", {{"pipeline_model_parallel_size", 1}, {"decoder_first_pipeline_num_layers", 28}}, ""},
             }) {
            CAPTURE(r.name);
            CAPTURE(r.train.dump());
            CHECK(fields(with(preset(r.name), {}, r.train)) == r.fields);
        }
        // Where training does not say how many layers of multi-token prediction there are, config.json does.
        auto silent = with(preset("Qwen3.5-35B-A3B"), {},
                           {{"pipeline_model_parallel_size", 2}, {"pipeline_model_parallel_layout", "Et*20|t*20L"}});
        silent.train.erase("mtp_num_layers");
        auto const report = check(silent);
        CHECK(fields(report) == "pipeline_model_parallel_layout/mtp_num_hidden_layers");
        CHECK(report.mismatches.at(0).other.file == "config.json");
        CHECK(report.mismatches.at(0).other.value == 1);
    }

    TEST_CASE("a config.json that is at odds with itself agrees with nothing") {
        auto const vl = preset("Qwen3-VL-2B");
        CHECK(contains(fields(with(vl, {{"text_config", {{"rope_scaling", {{"mrope_section", {24, 20, 21}}}}}}})),
                       "mrope_section/head_dim"));
        CHECK(contains(fields(with(preset("Qwen3-Next-80B-A3B"), {{"linear_num_value_heads", 33}},
                                   {{"linear_num_value_heads", 33}})),
                       "linear_num_value_heads/linear_num_key_heads"));
        auto two = preset("Qwen3.5-35B-A3B");
        two.hf["text_config"]["rope_theta"] = 1000000;
        CHECK(fields(two) == "rope_theta/rope_theta");
    }

    TEST_CASE("layers of multi-token prediction are as many, and none where a family has none") {
        auto const p = preset("Qwen3-Next-80B-A3B");
        CHECK(fields(with(p, {}, {{"mtp_num_layers", nullptr}})) == "num_nextn_predict_layers/mtp_num_layers");
        CHECK(check(with(p, {{"num_nextn_predict_layers", 0}}, {{"mtp_num_layers", nullptr}})).agrees());
        CHECK(fields(with(preset("Qwen3-30B-A3B"), {}, {{"mtp_num_layers", 1}})) ==
              "mtp_num_hidden_layers/mtp_num_layers");
    }

    TEST_CASE("a training configuration of wrong types, or of another kind of file, is refused with every place") {
        auto const refused = [](json const& train) {
            return message([&] { check(preset("Qwen3-30B-A3B").hf, train); });
        };
        auto const two = refused({{"num_layers", "48"}, {"rotary_base", true}, {"hidden_size", 2048}});
        CHECK(contains(two, "2 settings are wrong"));
        CHECK(contains(two, "/num_layers: expected an integer"));
        CHECK(contains(two, "/rotary_base: expected a number, got true"));
        CHECK(contains(refused({{"num_layers", 0}}), "/num_layers: expected more than 0, got 0"));
        CHECK(contains(refused({{"moe_layer_freq", {1, 2}}}), "/moe_layer_freq/1: expected 0 or 1, got 2"));
        CHECK(contains(refused({{"add_qkv_bias", 1}}), "/add_qkv_bias: expected true or false"));
        CHECK(contains(refused(preset("Qwen3-VL-2B").hf), "which a config.json of Hugging Face has"));
        CHECK(contains(refused(json::array()), "expected an object, got an array of 0"));
    }

    TEST_CASE("damaged texts are read and checked, or refused by cpx::error") {
        std::mt19937_64 random(18);
        for (int i = 0; i < 600; ++i) {
            auto const& p = cpx::config_presets[random() % cpx::config_presets.size()];
            auto const hf = faults::damaged(std::string(p.hf), random);
            auto const train = faults::damaged(std::string(p.train), random);
            static_cast<void>(message([&] {
                auto const c = cpx::hf_config::parse(cpx::json_value::parse(hf, "hf"));
                CHECK(!cpx::to_text(cpx::check_config(c, p.train_settings())).empty());
            }));
            static_cast<void>(message([&] {
                auto const t = cpx::train_config::parse(cpx::json_value::parse(train, "train"));
                CHECK(!cpx::to_json(cpx::check_config(p.hf_settings(), t)).dump().empty());
            }));
        }
    }
}
