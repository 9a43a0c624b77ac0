// SPDX-License-Identifier: Apache-2.0
// Names of parameters on standard input, through the program that translates them.
#include <examples/program.hpp>

#include <cpx/model/config_presets.hpp>

#include <string>
#include <vector>

namespace {

using namespace program;
using arguments = std::vector<std::string>;

/// One rank with all of a model's layers and experts.
arguments one_rank(std::string const& layers, std::string const& experts) {
    return {"--mesh", "tp=1", "--rank", "0", "--layers", layers, "--experts", experts};
}

} // namespace

// Without weights beside it, config.json is all that says how names begin.
TEST_CASE(
    "names of a model with its settings in text_config begin with model.language_model, with a tower or without") {
    folder const home;
    auto hf = json::parse(cpx::find_config_preset("Qwen3.5-35B-A3B").hf);
    auto const file = (home / "config.json").string();
    auto const translated = [&](json const& config) {
        write(file, config.dump());
        return run(one_rank("40", "256") + arguments{"--to", "hf", "--config", file},
                   "decoder.layers.3.mlp.router.weight\n")
            .out;
    };
    CHECK(translated(hf) == "model.language_model.layers.3.mlp.gate.weight\n");
    hf.erase("vision_config");
    CHECK(translated(hf) == "model.language_model.layers.3.mlp.gate.weight\n");
    auto text = hf["text_config"];
    text["tie_word_embeddings"] = false;
    CHECK(translated(text) == "model.layers.3.mlp.gate.weight\n");
}
