// SPDX-License-Identifier: Apache-2.0
// Says whether the shards of a model have every weight, each where it belongs, with copies that are equal.
//
//     audit SHARDS, a folder or all files in it
#include "report.hpp"

#include "../common/numbers.hpp"
#include "../common/run.hpp"
#include "../common/shard_files.hpp"

#include <cpx/model/audit_config.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/model/shard.hpp>

#include <filesystem>
#include <iostream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace {

/// Reads shards. What they say differently of their model is a problem; the first one is believed.
shards::input read(std::vector<std::string> const& files, std::vector<cpx::audit_problem>& problems) {
    shards::input in;
    std::string sizes;
    for (auto const& place : examples::shard_files(files)) {
        auto const path = place.string();
        cpx::safetensors const file(path);
        auto header = cpx::read_shard_header(file);
        auto const said = cpx::shard_metadata(header.sizes, {}, {}).at("cpx.shard");
        if (in.shards.empty()) {
            examples::blame(file.where() + ": cpx.shard", [&] { return cpx::audit(header.sizes, {}, {}); });
            in.sizes = header.sizes;
            in.weights = std::move(header.weights);
            sizes = said;
        } else {
            auto const disagree = [&](char const* what) {
                problems.push_back({cpx::audit_fault::disagree, "",
                                    path + " and " + in.shards.front().where + " tell of other " + what});
            };
            if (said != sizes) disagree("sizes");
            if (header.weights != in.weights) disagree("weights");
        }
        in.shards.push_back({path, header.cell, cpx::audit_records(file)});
    }
    return in;
}

/// Returns the config.json beside the first of the shards, or nothing where there is none.
std::string config_beside(shards::input const& in) {
    auto const place = std::filesystem::path(in.shards.front().where).parent_path() / "config.json";
    std::error_code failure;
    return std::filesystem::exists(place, failure) ? place.string() : std::string();
}

} // namespace

int main(int argc, char** argv) {
    CLI::App app(
        "Holds the shards of a model, one of each cell of a mesh, against the weights that it has. Exits with 0 "
        "if they are complete, each weight at its owners and nowhere else, and copies equal; with 2 if not.",
        "audit");
    std::vector<std::string> files;
    std::string config;
    bool json = false;
    app.add_option("SHARDS", files,
                   "safetensors files that say what they are, as convert writes them, or the folder of them")
        ->required();
    app.add_option("--config", config,
                   "the model's config.json, which tells what weights there are; else the one beside the shards");
    app.add_flag("--json", json, "print JSON, with every tensor");
    bool good = true;
    int const code = examples::run_example(argc, argv, app, [&] {
        std::vector<cpx::audit_problem> problems;
        auto in = read(files, problems);
        in.config = config.empty() ? config_beside(in) : config;
        if (!in.config.empty()) {
            auto const found = cpx::audit_weights(cpx::hf_config::read(in.config), in.weights);
            problems.insert(problems.end(), found.begin(), found.end());
        }
        auto report = cpx::audit(in.sizes, in.weights, in.shards);
        report.problems.insert(report.problems.begin(), problems.begin(), problems.end());
        if (json)
            std::cout << shards::json_of(in, report).dump(2) << '\n';
        else
            shards::print(in, report);
        examples::flush_output();
        good = report.good();
    });
    return code == 0 && !good ? 2 : code;
}
