// SPDX-License-Identifier: Apache-2.0
// Says whether the shards of a model have every weight, each where it belongs, with copies that are equal.
//
//     audit SHARDS, a folder or all files in it
#include "input.hpp"
#include "report.hpp"

#include "../common/command_line.hpp"

#include <iostream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
    examples::command_line app(
        "Holds the shards of a model, one of each cell of a mesh, against the weights that it has. Exits with 0 "
        "if they are complete, each weight at its owners and nowhere else, and copies equal; with 2 if not.",
        "audit");
    std::vector<std::string> files;
    std::string config;
    bool json = false;
    app.required("SHARDS", files,
                 "safetensors files that say what they are, as convert writes them, or the folder of them");
    app.option("--config", config,
               "the model's config.json, which tells what weights there are; else the one beside the shards");
    app.flag("--json", json, "print JSON, with every tensor");
    bool good = true;
    int const code = app.run(argc, argv, [&] {
        auto in = shards::read(files);
        if (!config.empty()) in.config = config;
        auto const report = shards::examine(in);
        if (json)
            std::cout << shards::json_of(in, report).dump(2) << '\n';
        else
            shards::print(in, report);
        examples::flush_output();
        good = report.good();
    });
    return code == 0 && !good ? 2 : code;
}
