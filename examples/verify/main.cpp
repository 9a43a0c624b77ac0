// SPDX-License-Identifier: Apache-2.0
// Runs the operator of a golden file on any sharding and prints how far its outputs are from the file's.

#include "mrope.hpp"

#include "../common/command_line.hpp"
#include "../common/figures.hpp"

#include <nlohmann/json.hpp>

#include <cstdio>

namespace {

template <class T>
verify::outputs<T> run(verify::job const& j, std::string const& kind) {
    if (kind == "causal_conv1d") return verify::causal_conv1d<T>(j);
    if (kind == "gated_delta_rule") return verify::gated_delta_rule<T>(j);
    if (kind == "gdn_layer") return verify::gdn_layer<T>(j);
    if (kind == "mrope_index") return verify::mrope_index<T>(j);
    throw cpx::error(j.file.where(), "kind in the metadata",
                     "gated_delta_rule, causal_conv1d, gdn_layer or mrope_index", cpx::quote(kind));
}

template <class T>
void report(verify::job const& j, std::string const& kind, bool json) {
    nlohmann::json errors = nlohmann::json::object();
    for (auto const& [name, values] : run<T>(j, kind)) {
        verify::check_output_shape(j, name);
        auto const reference = j.file.read<double>(name);
        errors[name] =
            examples::number(examples::relative_error(values, reference), j.file.where(), "relative error of " + name);
    }
    if (json) {
        std::printf("%s\n", nlohmann::json{{"kind", kind}, {"errors", errors}}.dump(2).c_str());
        return;
    }
    std::printf("%s on %d ranks, %s\n", kind.c_str(), j.ranks, examples::describe(j.layout).c_str());
    for (auto const& [name, error] : errors.items())
        std::printf("  %-23s relative error %.2e\n", name.c_str(), error.template get<double>());
}

} // namespace

int main(int argc, char** argv) {
    examples::command_line app(
        "Runs the operator of a golden file on a sharding and compares it with the file's outputs.", "verify");
    std::string file, ranks = "2", layout = "zigzag", dtype = "float64", carry = "scan", cut = "balanced", chunk = "64";
    bool json = false;
    app.required("FILE", file, "safetensors file of kind gated_delta_rule, causal_conv1d, gdn_layer or mrope_index");
    app.option("--ranks", ranks, "ranks, as threads of this process, at most 256");
    app.option("--layout", layout, "sequential, zigzag, striped or table=OWNERS[:sequence|:batch]; head_sharded");
    app.option("--dtype", dtype, "float64 or float32");
    app.option("--carry", carry, "scan or serial");
    app.option("--cut", cut, "balanced or aligned:UNIT");
    app.option("--chunk", chunk, "tokens a chunk of the gated delta rule");
    app.flag("--json", json, "print JSON");
    return app.run(argc, argv, [&] {
        examples::require_one_of(dtype, {"float64", "float32"}, "--dtype", "type");
        examples::require_one_of(carry, {"scan", "serial"}, "--carry", "carry");
        cpx::safetensors const golden(file);
        auto const offsets = golden.read<cpx::index_t>("cu_seqlens", {-1});
        verify::job const j{golden,
                            examples::blame(file, [&] { return cpx::thd(offsets); }),
                            examples::parse_sharding(layout),
                            examples::parse_cut(cut),
                            examples::parse_ranks(ranks, examples::most_threads),
                            examples::parse_number(chunk, 1, 1 << 20, "--chunk", "tokens"),
                            carry == "serial"};
        cpx::require(j.layout.name != "replicated", "--layout", "sharding", "one that shares the work",
                     "\"replicated\"");
        std::string const kind = golden.metadata("kind");
        bool const by_heads = j.by_heads(), layer = kind == "gdn_layer";
        for (char const* const option : {"--carry", "--chunk"})
            app.require_effect(option, kind == "gated_delta_rule" || layer, "a file with a recurrence", kind);
        app.require_effect("--carry", !by_heads, "a --layout by tokens", layout);
        app.require_effect("--cut", !by_heads || layer, "a --layout by tokens", layout);
        if (dtype == "float64")
            report<double>(j, kind, json);
        else
            report<float>(j, kind, json);
    });
}
