// SPDX-License-Identifier: Apache-2.0
// Converts a checkpoint of Hugging Face's into the shards of a Megatron job, and back.
//
//     convert HF_DIR OUT --mesh tp=2,dp=4,ep=4,pp=2
//     convert --to hf SHARDS OUT, a folder or all files in it
#include "hf_folder.hpp"
#include "to_hf.hpp"
#include "to_shards.hpp"

#include "../audit/input.hpp"
#include "../audit/report.hpp"
#include "../common/command_line.hpp"
#include "../common/mesh_options.hpp"

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/mesh/mesh.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/hf_names.hpp>
#include <cpx/model/hf_sizes.hpp>
#include <cpx/model/naming.hpp>
#include <cpx/model/pipeline.hpp>
#include <cpx/model/shard.hpp>

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

int main(int argc, char** argv) {
    examples::command_line app(
        "Converts a checkpoint of Hugging Face's into shards, a file for each cell of (pp, ep, tp) ranks of a "
        "Megatron job, in which tensors have Megatron's names of the whole model; or shards back. The folder "
        "OUT appears whole or not at all. Exits with 2 if shards are not those of their config.json, or not "
        "complete: what audit says of them is shown, and nothing is made.",
        "convert");
    std::vector<std::string> from;
    std::string out, to = "shards", linear = "native", unit = "1";
    app.required("FROM", from,
                 "Folder of config.json and model.safetensors, or of several files and their index; or "
                 "of shards, or all shards themselves. And last OUT, the folder to be made");
    app.option("--to", to, "shards, or hf");
    examples::mesh_options const mesh(app, false);
    app.option("--linear-attention", linear,
               "native for Megatron Core's own gated delta net, hf for Hugging Face's modules, whole on every rank");
    app.option("--make-vocab-size-divisible-by", unit, "Rows of the embedding on a rank of tp: a multiple of it");

    bool good = true;
    int const code = app.run(argc, argv, [&] {
        if (from.size() < 2) examples::command_line::missing("OUT");
        out = from.back(); // CLI11 knows no operand behind several
        from.pop_back();
        examples::require_one_of(to, {"shards", "hf"}, "--to", "direction");
        examples::require_one_of(linear, {"native", "hf"}, "--linear-attention", "linear attention");
        if (to == "hf") {
            for (char const* const option : {"--mesh", "--first", "--last", "--pipeline-layout", "--linear-attention",
                                             "--make-vocab-size-divisible-by"})
                app.require_effect(option, false, "--to shards", to);
            auto in = shards::read(from);
            if (in.config.empty()) // whoever opens it says what is wrong
                in.config = (convert::fs::path(in.shards.front().where).parent_path() / convert::config_name).string();
            auto const report = shards::examine(in);
            good = report.good();
            if (good) return convert::to_hf(convert::shard_folder(in), out);
            shards::print(in, report);
            return examples::flush_output();
        }
        cpx::require(from.size() == 1, "FROM", "folders", "1, for --to shards", from.size());
        auto const& checkpoint = from.front();
        cpx::require(app.has("--mesh"), "--mesh", "sizes", "some, for --to shards", "none");
        auto const config = cpx::hf_config::read(convert::fs::path(checkpoint) / convert::config_name);
        auto sizes = cpx::sizes_of(config);
        convert::hf_folder const folder(checkpoint);
        auto style = cpx::style_of(folder.names(), sizes);
        style.hf_linear = linear == "hf";
        cpx::hf_names const names(sizes, style);
        cpx::shard_sizes division{.mesh = mesh.sizes(),
                                  .pipeline = mesh.split(std::ssize(sizes.layers)),
                                  .experts = sizes.num_experts,
                                  .tied = sizes.tie_word_embeddings};
        // As check_config counts them where config.json tells: of weights there may be none.
        division.pipeline.mtp = std::max<cpx::index_t>(
            std::ssize(sizes.mtp), config.family.predicts ? config.mtp_num_hidden_layers.value_or(0) : 0);
        examples::blame(division.pipeline.layout ? "--pipeline-layout" : "layers over --mesh",
                        [&] { return cpx::pipeline(division.pipeline); });
        auto const owners = examples::blame("experts over --mesh", [&] {
            return cpx::naming(cpx::mesh(division.mesh), cpx::pipeline(division.pipeline), division.experts);
        });
        convert::to_shards(folder, names, division, owners,
                           examples::parse_number(unit, 1, 1 << 20, "--make-vocab-size-divisible-by", "rows"), out);
    });
    return code == 0 && !good ? 2 : code;
}
