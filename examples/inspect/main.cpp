// SPDX-License-Identifier: Apache-2.0
// Shows a sharding, and the plan from it to another: in the terminal, as JSON, or as an SVG picture.
//
//     inspect --cu 0,8,20 --ranks 2 --layout zigzag --to sequential --svg picture.svg
#include "common/run.hpp"
#include "svg.hpp"
#include "text.hpp"

#include <nlohmann/json.hpp>

#include <cstdlib>
#include <optional>
#include <unistd.h>

namespace {

std::string to_json(inspect::report const& report) {
    nlohmann::ordered_json json = {{"ranks", nlohmann::ordered_json::array()}};
    for (int rank = 0; rank < report.ranks; ++rank) {
        inspect::lane const& held = report.before[static_cast<std::size_t>(rank)];
        auto runs = nlohmann::ordered_json::array();
        for (inspect::run const& run : held.runs) runs.push_back({run.rows.first, run.rows.last});
        json["ranks"].push_back({{"rank", rank}, {"runs", runs}, {"cu_seqlens", held.cu_seqlens}});
    }
    if (report.plan)
        json["plan"] = {{"rows", report.plan->rows},
                        {"messages", report.plan->messages},
                        {"rows_sent", report.plan->sent},
                        {"rows_lower_bound", report.plan->bound}};
    return json.dump() + '\n';
}

} // namespace

int main(int argc, char** argv) {
    CLI::App app("Shows which rank holds which rows of a packed batch, and what moves between two shardings.",
                 "inspect");
    std::string cu, ranks, layout = "zigzag", to, cut = "balanced", heads, svg;
    bool json = false;
    app.add_option("--cu", cu, "Offsets of the sequences, as in cu_seqlens: 0,8,20")->required();
    app.add_option("--ranks", ranks, "Number of ranks, at most 4096")->required();
    app.add_option("--layout", layout,
                   "sequential, zigzag, striped or table=OWNER,OWNER..., then :sequence or :batch if wanted; "
                   "or head_sharded, replicated")
        ->capture_default_str();
    app.add_option("--to", to, "The sharding to move to, as in --layout");
    app.add_option("--cut", cut, "Where chunks begin: balanced, or aligned:64 for multiples of 64 tokens")
        ->capture_default_str();
    app.add_option("--heads", heads, "Heads to share out under head_sharded [one a rank]");
    app.add_flag("--json", json, "Print JSON instead of text");
    app.add_option("--svg", svg, "Write a picture to this file, too");

    return examples::run_example(argc, argv, app, [&] {
        cpx::thd const batch = examples::parse_batch(cu);
        int const world = examples::parse_ranks(ranks, examples::most_ranks);
        auto const parse = [&](std::string const& text, char const* where) {
            examples::sharding_spec spec = examples::parse_sharding(text, where);
            if (!heads.empty())
                spec.sections = {{examples::parse_number(heads, 1, 4096, "--heads", "number of heads"), 1}};
            return spec;
        };
        auto const from = parse(layout, "--layout");
        auto const target = app.count("--to") ? std::optional(parse(to, "--to")) : std::nullopt;
        auto const either = [&](auto const& has) { return has(from) || (target && has(*target)); };
        std::string const named = target ? layout + " and " + to : layout;
        examples::require_effect(app, "--heads", either([](auto const& spec) { return spec.name == "head_sharded"; }),
                                 "--layout or --to head_sharded", named);
        examples::require_effect(app, "--cut", either([](auto const& spec) { return !spec.every_row(); }),
                                 "a --layout or --to that cuts the tokens", named);

        auto const report = inspect::make_report(batch, world, examples::parse_cut(cut), from, target);
        bool const colour = isatty(STDOUT_FILENO) && !std::getenv("NO_COLOR");
        std::string const shown = json ? to_json(report) : inspect::text_picture(report, colour).draw();
        std::optional<examples::output_file> picture;
        if (app.count("--svg")) picture.emplace("--svg", svg, inspect::svg_picture(report).draw());
        std::cout << shown;
        examples::flush_output();
        if (picture) picture->commit();
    });
}
