// SPDX-License-Identifier: Apache-2.0
// Shows a sharding, and the plan from it to another: in the terminal, as JSON, or as an SVG picture.
//
//     inspect --cu 0,8,20 --ranks 2 --layout zigzag --to sequential --svg picture.svg
//     inspect --media "t5,i4x6,t3;v2x4x4;t7" --ranks 2 --svg picture.svg
#include "common/command_line.hpp"
#include "svg.hpp"
#include "text.hpp"

#include <nlohmann/json.hpp>

#include <cstdlib>
#include <optional>
#include <unistd.h>

namespace {

nlohmann::ordered_json to_json(inspect::media_batch const& media) {
    auto items = nlohmann::ordered_json::array();
    for (inspect::medium const& m : media.media)
        items.push_back({{"name", name_of(m)},
                         {"sequence", media.batch.sequence(m.rows.first)},
                         {"rows", {m.rows.first, m.rows.last}},
                         {"height", m.height},
                         {"width", m.width}});
    nlohmann::ordered_json json = {{"items", items}};
    auto axis = media.positions.axes.begin();
    for (char const* const name : {"time", "height", "width"}) {
        json["position_ids"][name] = std::vector(axis, axis + media.batch.tokens());
        axis += media.batch.tokens();
    }
    json["rope_deltas"] = media.positions.deltas;
    return json;
}

std::string to_json(inspect::report const& report) {
    nlohmann::ordered_json json = {{"ranks", nlohmann::ordered_json::array()}};
    for (int rank = 0; rank < report.ranks; ++rank) {
        inspect::lane const& held = report.before[static_cast<std::size_t>(rank)];
        auto runs = nlohmann::ordered_json::array();
        for (inspect::block const& block : held.blocks) runs.push_back({block.rows.first, block.rows.last});
        json["ranks"].push_back({{"rank", rank}, {"runs", runs}, {"cu_seqlens", held.cu_seqlens}});
        if (report.by_heads) json["ranks"].back()["heads"] = {held.heads.first, held.heads.last};
        if (report.width > 0) json["ranks"].back()["bytes"] = report.bytes(held);
    }
    if (report.media) json["media"] = to_json(*report.media);
    if (!report.plan) return json.dump() + '\n';
    inspect::movement const& plan = *report.plan;
    json["plan"] = {{"rows", plan.rows},
                    {"messages", plan.messages},
                    {"rows_sent", plan.sent},
                    {"rows_lower_bound", plan.bound.rows}};
    if (report.width > 0)
        json["plan"].update(
            {{"bytes", plan.elements}, {"bytes_sent", plan.sent_elements}, {"bytes_lower_bound", plan.bound.elements}});
    return json.dump() + '\n';
}

} // namespace

int main(int argc, char** argv) {
    examples::command_line app(
        "Shows which rank holds which rows of a packed batch, and what moves between two shardings.", "inspect");
    std::string cu, media, ranks, layout = "zigzag", to, cut = "balanced", heads, width, svg;
    bool json = false;
    app.option("--cu", cu, "Offsets of the sequences, as in cu_seqlens: 0,8,20");
    app.option("--media", media,
               "In place of --cu, sequences of text, images and videos: t5,i4x6,t3;v2x4x4;t7, with heights and "
               "widths in patches, 4 of which make a placeholder; an image has a start and an end, a frame of a "
               "video 3 tokens of text before these, too");
    app.required("--ranks", ranks, "Number of ranks, at most 4096");
    app.option("--layout", layout,
               "sequential, zigzag, striped or table=OWNER,OWNER..., then :sequence or :batch if wanted; "
               "or head_sharded, replicated");
    app.option("--to", to, "The sharding to move to, as in --layout");
    app.option("--cut", cut, "Where chunks begin: balanced, or aligned:64 for multiples of 64 tokens");
    app.option("--heads", heads, "Heads to share out under head_sharded [one a rank]");
    app.option("--width", width, "Bytes of a row; then what is held and moves is told in bytes, too");
    app.flag("--json", json, "Print JSON instead of text");
    app.option("--svg", svg, "Write a picture to this file, too");

    return app.run(argc, argv, [&] {
        cpx::require(app.has("--cu") != app.has("--media"), "--cu", "batch", "either --cu or --media",
                     app.has("--cu") ? "both" : "neither");
        inspect::report known;
        if (app.has("--media")) known.media = inspect::media_parser().parse(media);
        known.batch = known.media ? known.media->batch : examples::parse_batch(cu);
        known.ranks = examples::parse_ranks(ranks, examples::most_ranks);
        auto const parse = [&](std::string const& text, char const* where) {
            auto spec = examples::parse_sharding(text, where);
            known.by_heads = known.by_heads || spec.name == "head_sharded";
            return spec;
        };
        auto from = parse(layout, "--layout");
        auto target = app.has("--to") ? std::optional(parse(to, "--to")) : std::nullopt;
        auto const either = [&](auto const& has) { return has(from) || (target && has(*target)); };
        std::string const named = target ? layout + " and " + to : layout;
        app.require_effect("--heads", known.by_heads, "--layout or --to head_sharded", named);
        app.require_effect("--cut", either([](auto const& spec) { return !spec.every_row(); }),
                           "a --layout or --to that cuts the tokens", named);

        if (known.by_heads)
            known.heads =
                heads.empty() ? known.ranks : examples::parse_number(heads, 1, 4096, "--heads", "number of heads");
        if (!width.empty()) known.width = examples::parse_number(width, 1, 1 << 30, "--width", "bytes of a row");
        cpx::require(known.width % known.heads == 0, "--width", "bytes of a row",
                     "a multiple of the " + inspect::count(known.heads, "head"), known.width);
        std::vector<cpx::section> const sections{{known.heads, known.elements() / known.heads}};
        from.sections = sections;
        if (target) target->sections = sections;
        auto const report = inspect::make_report(std::move(known), examples::parse_cut(cut), from, target);
        bool const colour = isatty(STDOUT_FILENO) && !std::getenv("NO_COLOR");
        std::string const shown = json ? to_json(report) : inspect::text_picture(report, colour).draw();
        std::optional<examples::output_file> picture;
        if (app.has("--svg")) picture.emplace("--svg", svg, inspect::svg_picture(report).draw());
        std::cout << shown;
        examples::flush_output();
        if (picture) picture->commit();
    });
}
