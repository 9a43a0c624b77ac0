// SPDX-License-Identifier: Apache-2.0
// Says whether a training configuration is of the model that a config.json describes, and can be run as it says.
//
//     check_config config.json train.json
#include "../common/command_line.hpp"

#include <cpx/model/config_check.hpp>

#include <nlohmann/json.hpp>

#include <iostream>
#include <string>

int main(int argc, char** argv) {
    examples::command_line app(
        "Holds a training configuration against the config.json of its model. Exits with 0 if they agree, with "
        "2 if not: all mismatches are shown, with field, value and source of both sides. What one of the files "
        "leaves out is not compared, and told; if nothing can be compared, that is an error.",
        "check_config");
    std::string hf, train;
    bool json = false;
    app.required("HF.json", hf, "config.json of a Hugging Face model: Qwen3, Qwen3-MoE, Qwen3-Next, Qwen3-VL, Qwen3.5");
    app.required("TRAIN.json", train,
                 "one object, whose keys are the names of Megatron's arguments: num_layers or num-layers");
    app.flag("--json", json, "print JSON");
    bool agrees = true;
    int const code = app.run(argc, argv, [&] {
        auto const model = cpx::hf_config::read(hf);
        auto const report = cpx::check_config(model, cpx::train_config::read(train));
        if (json) // names of files need not be UTF-8
            std::cout << cpx::to_json(report).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
        else
            std::cout << cpx::to_text(report);
        examples::flush_output();
        agrees = report.agrees();
    });
    return code == 0 && !agrees ? 2 : code;
}
