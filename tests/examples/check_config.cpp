// SPDX-License-Identifier: Apache-2.0
// Settings of models as files, through the program that holds one side against the other.
#include <examples/program.hpp>

#include <cpx/model/config_presets.hpp>

#include <string>
#include <vector>

namespace {

using namespace program;
using arguments = std::vector<std::string>;

/// Writes both sides and returns their paths.
arguments save(folder const& home, json const& hf, json const& train) {
    arguments const files{(home / "config.json").string(), (home / "train.json").string()};
    write(files[0], hf.dump());
    write(files[1], train.dump());
    return files;
}

} // namespace

TEST_CASE("both sides of every preset agree, with exit code 0") {
    folder const home;
    for (auto const& preset : cpx::config_presets) {
        CAPTURE(preset.name);
        auto const files = save(home, json::parse(preset.hf), json::parse(preset.train));
        auto const report = run_json(files);
        CHECK(report.at("agrees") == true);
        CHECK(report.at("mismatches").empty());
        for (auto const& gap : report.at("not_compared")) CHECK(gap.at("source") == "ffn_hidden_size"); // of Qwen3.5
        auto const text = run(files);
        CHECK(text.code == 0);
        CHECK(text.out.starts_with(files[1] + " agrees with " + files[0] + ": "));
    }
}

TEST_CASE("mismatches are all told, as text and as JSON, with exit code 2") {
    folder const home;
    auto const& preset = cpx::find_config_preset("Qwen3.5-35B-A3B");
    auto train = json::parse(preset.train);
    train["num_layers"] = 48;
    train["norm_epsilon"] = 1e-5;
    train.erase("kv_channels");
    auto const files = save(home, json::parse(preset.hf), train);
    auto const text = run(files);
    CHECK(text.code == 2);
    CHECK(text.err == "");
    CHECK(text.out == files[1] + " does not agree with " + files[0] +
                          ": 2 mismatches\n"
                          "  num_hidden_layers = 40 (" +
                          files[0] + ": text_config.num_hidden_layers) against num_layers = 48 (" + files[1] +
                          ": num_layers): expected the same\n"
                          "  rms_norm_eps = 1e-06 (" +
                          files[0] + ": text_config.rms_norm_eps) against norm_epsilon = 1e-05 (" + files[1] +
                          ": norm_epsilon): expected the same\n"
                          "not compared:\n  ffn_hidden_size (" +
                          files[1] + "): of a qwen3_5_moe it is nobody's\n  text_config.head_dim (" + files[0] +
                          "): " + files[1] + " does not state kv_channels\n");
    auto const shown = run(files + arguments{"--json"});
    CHECK(shown.code == 2);
    auto const report = json::parse(shown.out, nullptr, false);
    REQUIRE_FALSE(report.is_discarded());
    CHECK(report.at("agrees") == false);
    REQUIRE(report.at("mismatches").size() == 2);
    json const hf = {{"field", "num_hidden_layers"}, {"value", 40}, {"source", "text_config.num_hidden_layers"}};
    json const trained = {{"field", "num_layers"}, {"value", 48}, {"source", "num_layers"}};
    CHECK(report.at("mismatches").at(0) == json{{"expected", "the same"}, {"hf", hf}, {"train", trained}});
    CHECK(report.at("not_compared").at(1).at("field") == "kv_channels");
}

TEST_CASE("files that cannot be read are refused in one line, with exit code 1") {
    folder const home;
    auto const& preset = cpx::find_config_preset("Qwen3-30B-A3B");
    auto const hf = json::parse(preset.hf), train = json::parse(preset.train);
    auto const files = save(home, hf, train);
    check_refusal({files[0], (home / "none.json").string()}, {"none.json", "No such file"});
    check_refusal({files[1], files[0]}, {"no model_type"});
    check_refusal({files[0], files[0]}, {"which a config.json of Hugging Face has"});
    write(files[1], R"({"num_layers": 48, "num_layers": 40})");
    check_refusal(files, {"train.json"});
    write(files[1], R"({"num_layers": 48)");
    check_refusal(files, {"train.json: not JSON"});
    write(files[1], R"({"num_layers": "48", "add_qkv_bias": 0})");
    check_refusal(
        files, {"2 settings are wrong; /num_layers: expected an integer", "; /add_qkv_bias: expected true or false"});
    write(files[1], "{}");
    check_refusal(files, {"train.json: nothing to compare"});
    check_refusal({files[0]}, {"TRAIN.json is required"});
}
