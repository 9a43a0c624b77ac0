// SPDX-License-Identifier: Apache-2.0
// A mesh and the split of a model's layers from the command line: "tp=2,pp=4,vpp=2" becomes cpx types.
#pragma once

#include "command_line.hpp"
#include "numbers.hpp"

#include <cpx/mesh/mesh.hpp>
#include <cpx/model/naming.hpp>
#include <cpx/model/pipeline.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

namespace examples {

inline constexpr cpx::index_t most_world_ranks = 1 << 20;

/// Returns the mesh of "tp=2,cp=1,dp=4,ep=4,pp=2,etp=1,vpp=2": a size that is left out is 1, and etp is tp. The world
/// has tp * cp * dp * pp ranks; vpp is the number of a rank's chunks of layers.
inline cpx::mesh_sizes parse_mesh(std::string_view text, char const* where = "--mesh") {
    std::array<std::pair<std::string_view, cpx::index_t>, 7> sizes{
        {{"tp", 0}, {"cp", 0}, {"dp", 0}, {"pp", 0}, {"ep", 0}, {"etp", 0}, {"vpp", 0}}};
    for (std::size_t first = 0; first <= text.size();) {
        std::size_t const comma = std::min(text.find(',', first), text.size());
        std::string_view const entry = text.substr(first, comma - first), name = entry.substr(0, entry.find('='));
        auto const known = std::ranges::find(sizes, name, [](auto const& size) { return size.first; });
        cpx::require(known != sizes.end() && name.size() < entry.size(), where, "entry",
                     "tp, cp, dp, pp, ep, etp or vpp, then = and a number", [&] { return cpx::quote(entry); });
        cpx::require(known->second == 0, where, "size given twice", "each once", [&] { return cpx::quote(entry); });
        known->second = parse_number(entry.substr(name.size() + 1), 1, most_world_ranks, where, std::string(name));
        first = comma + 1;
    }
    auto const size = [&](std::size_t i) { return std::max<cpx::index_t>(sizes[i].second, 1); };
    cpx::index_t world = 1;
    for (std::size_t const i : {0u, 1u, 2u, 3u}) {
        world *= size(i);
        cpx::require(
            world <= most_world_ranks, where, "ranks of the world, tp * cp * dp * pp",
            [] { return "at most " + std::to_string(most_world_ranks); }, world);
    }
    auto const number = [&](std::size_t i) { return static_cast<int>(size(i)); };
    return {.world = static_cast<int>(world),
            .tp = number(0),
            .cp = number(1),
            .pp = number(3),
            .ep = number(4),
            .etp = static_cast<int>(sizes[5].second),
            .chunks = number(6)};
}

/// Options that say which rank has which layers and experts.
class mesh_options {
public:
    explicit mesh_options(command_line& app, bool required = true) {
        char const* const help =
            "Sizes such as tp=2,cp=1,dp=4,ep=4,pp=2,etp=1,vpp=2; what is left out is 1, etp as tp; tp, cp, dp "
            "and pp make the world; vpp is the number of chunks of layers of a rank, a virtual pipeline";
        required ? app.required("--mesh", mesh_, help) : app.option("--mesh", mesh_, help);
        app.option("--first", first_, "Layers of the first pipeline rank, if another number than between");
        app.option("--last", last_, "Layers of the last pipeline rank, if another number than between");
        app.option("--pipeline-layout", layout_,
                   "In place of vpp, --first and --last, Megatron's layout string, such as \"Et*3|(tt|)*29,m|L\"");
    }

    /// Returns the mesh. Throws `cpx::error` that names its option, as the others do.
    cpx::mesh_sizes sizes() const {
        cpx::mesh_sizes const found = parse_mesh(mesh_);
        blame("--mesh", [&] { return cpx::mesh(found); });
        return found;
    }
    /// Returns the split of a model with so many decoder layers; embedding and loss count as one if they are told.
    cpx::pipeline_sizes split(cpx::index_t layers, bool embedding = false, bool loss = false) const {
        cpx::mesh_sizes const of = parse_mesh(mesh_);
        cpx::pipeline_sizes split{.layers = layers, .ranks = of.pp, .chunks = of.chunks};
        split.account_for_embedding = embedding;
        split.account_for_loss = loss;
        auto const number = [&](std::string const& text, char const* option) {
            return parse_number(text, 1, layers, option, "number of layers");
        };
        if (!first_.empty()) split.first = number(first_, "--first");
        if (!last_.empty()) split.last = number(last_, "--last");
        if (!layout_.empty()) split.layout = layout_;
        blame(layout_.empty() ? "layers over --mesh" : "--pipeline-layout", [&] { return cpx::pipeline(split); });
        return split;
    }
    /// Returns the naming of a model with so many decoder layers and experts a layer.
    cpx::naming names(cpx::index_t layers, cpx::index_t experts, bool embedding = false, bool loss = false) const {
        cpx::mesh const ranks(sizes());
        cpx::pipeline const stages(split(layers, embedding, loss));
        return blame("experts over --mesh", [&] { return cpx::naming(ranks, stages, experts); });
    }

private:
    std::string mesh_, first_, last_, layout_;
};

} // namespace examples
