// SPDX-License-Identifier: Apache-2.0
// Translates names of parameters: from those that a rank gives to the model's, and back.
//
//     names --mesh tp=2,dp=2,ep=2,pp=2,etp=1 --rank 5 --layers 48 --experts 128 < names
//     names --mesh dp=4,ep=4 --rank 1 --layers 4 --experts 8 --to hf --config config.json < names
#include "hf.hpp"

#include "../common/command_line.hpp"
#include "../common/mesh_options.hpp"

#include <cpx/core/error.hpp>
#include <cpx/model/hf_names.hpp>
#include <cpx/model/naming.hpp>
#include <cpx/model/pipeline.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

namespace {

/// Returns what stands in place of a name: one name or several, with spaces between them.
using translation = std::function<std::string(std::string_view)>;

/// A buffer of experts is no parameter of the model: in its place are the experts that are in it.
std::string to_global(cpx::naming const& names, std::string_view name, int rank, int stage) {
    if (cpx::parse_parameter_name(name).form != cpx::expert_form::buffer) return names.global(name, rank, stage);
    std::string all;
    for (auto const& expert : names.split_experts(name, 0, 0, rank, stage))
        all += (all.empty() ? "" : " ") + expert.name;
    return all;
}

/// Nothing stands in place of a name that another rank, or another of the rank's chunks, has.
std::string to_local(cpx::naming const& names, std::string_view name, int rank, int stage) {
    return names.local(name, rank, stage).value_or("");
}

/// Returns a name's names in Hugging Face's files, of the first of these models that has it; of one that is not there,
/// the model's.
std::string to_hf(std::vector<cpx::hf_names> const& models, std::string const& global) {
    std::string all;
    for (std::size_t first = 0; first < global.size();) { // of experts in a buffer there are several
        auto const end = std::min(global.find(' ', first), global.size());
        auto const name = global.substr(first, end - first);
        std::vector<std::string> found;
        for (auto const& hf : models)
            if (found.empty()) found = hf.to_hf(name);
        if (found.empty()) found.push_back(name);
        for (auto const& one : found) all += (all.empty() ? "" : " ") + one;
        first = end + 1;
    }
    return all;
}

/// The directions that --to offers; `hf` is for the last.
translation make_translation(std::string const& to, cpx::naming const& names, std::vector<cpx::hf_names> const& hf,
                             int rank, int stage) {
    if (to == "hf") return [=](std::string_view name) { return to_hf(hf, to_global(names, name, rank, stage)); };
    if (to == "local") return [=](std::string_view name) { return to_local(names, name, rank, stage); };
    return [=](std::string_view name) { return to_global(names, name, rank, stage); };
}

/// Returns a line with every name translated; what is between names stays.
std::string translated(std::string_view line, translation const& translate) {
    constexpr char const* space = " \t\r";
    std::string result;
    while (!line.empty()) {
        auto const gap = line.substr(0, line.find_first_not_of(space));
        auto const name = line.substr(gap.size(), line.find_first_of(space, gap.size()) - gap.size());
        result += gap;
        if (!name.empty()) result += translate(name);
        line.remove_prefix(gap.size() + name.size());
    }
    return result;
}

} // namespace

int main(int argc, char** argv) {
    examples::command_line app(
        "Translates the names of parameters on standard input, a line each: from those that a rank of a "
        "Megatron job gives to the model's, which count all layers and experts, or back. What is no name of a "
        "decoder layer or an expert stays as it is; with --to local, what another rank has is left out, so that "
        "its line is empty.",
        "names");
    examples::mesh_options const mesh(app);
    std::string rank, layers, experts = "0", stage = "0", to = "global", config;
    app.required("--rank", rank, "World rank that has the names");
    app.required("--layers", layers, "Decoder layers of the model");
    app.option("--experts", experts, "Experts of a layer, 0 of dense models");
    app.option("--stage", stage, "Which of the rank's chunks of layers has the names: the virtual pipeline stage");
    app.option("--to", to, "global for the model's names, local for the rank's, hf for Hugging Face's");
    app.option(
        "--config", config,
        "config.json of the model, for --to hf; weights beside it, or their index, say how it is written. Without "
        "it names are those of Qwen3, Qwen3-MoE and Qwen3-Next: \"model.\", a tensor for each expert");
    bool embedding = false, loss = false;
    app.flag("--account-for-embedding", embedding, "The embedding counts as a layer of the first pipeline rank");
    app.flag("--account-for-loss", loss, "The loss counts as a layer of the last pipeline rank");

    return app.run(argc, argv, [&] {
        using cpx::naming, cpx::pipeline, examples::parse_number;
        examples::require_one_of(to, {"global", "local", "hf"}, "--to", "names");
        app.require_effect("--config", to == "hf", "--to hf", to);
        auto const names = mesh.names(parse_number(layers, 1, pipeline::most_layers, "--layers", "number of layers"),
                                      parse_number(experts, 0, naming::most_experts, "--experts", "number of experts"),
                                      embedding, loss);
        std::vector<cpx::hf_names> hf;
        if (to == "hf" && !app.has("--config"))
            hf = names::assumed_hf_names(names.stages().layers(), names.experts());
        else if (to == "hf")
            hf.push_back(names::read_hf_names(config, names.stages().layers(), names.experts()));
        auto const of = [&](std::string const& text, cpx::index_t count, char const* option, char const* what) {
            return static_cast<int>(parse_number(text, 0, count - 1, option, what));
        };
        auto const translate = make_translation(to, names, hf, of(rank, names.ranks().world(), "--rank", "world rank"),
                                                of(stage, names.stages().chunks(), "--stage", "stage"));
        std::string all;
        std::size_t number = 0;
        errno = 0;
        for (std::string line; std::getline(std::cin, line);) {
            auto const place = "line " + std::to_string(++number);
            all += examples::blame(place, [&] { return translated(line, translate); }) + '\n';
        }
        if (std::cin.bad() || std::ferror(stdin)) throw cpx::error("stdin", "cannot be read" + examples::reason());
        std::cout << all;
        examples::flush_output();
    });
}
