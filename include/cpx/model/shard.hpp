// SPDX-License-Identifier: Apache-2.0
// What a file of one rank's weights says of itself: how the model is divided, which share this is, and what all have.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/mesh/mesh.hpp>
#include <cpx/model/json.hpp>
#include <cpx/model/pipeline.hpp>
#include <cpx/model/safetensors.hpp>

#include <nlohmann/json.hpp>

#include <compare>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace cpx {

/// Who has the same weights: world ranks with these coordinates. They are each other's copies along dp and cp.
struct shard_cell {
    int pp = 0, ep = 0, tp = 0, etp = 0;
    friend constexpr auto operator<=>(shard_cell const&, shard_cell const&) = default;
};

/// How a model's weights are divided.
struct shard_sizes {
    mesh_sizes mesh{};         ///< in Megatron's order; cp, ulysses and chunks do not matter
    pipeline_sizes pipeline{}; ///< with as many ranks as the mesh's pp
    index_t experts = 0;       ///< of a layer
    bool tied = false;         ///< `output_layer.weight`, where it is, is a copy of `embedding.word_embeddings.weight`
};

/// A weight of the model as each of its owners has it.
struct shard_weight {
    safetensors::dtype dtype = safetensors::dtype::f32;
    std::vector<index_t> shape; ///< of one share: all are of one shape
    bool divided = false;       ///< over tp, an expert's over etp; else they are the same on all ranks of it
    friend bool operator==(shard_weight const&, shard_weight const&) = default;
};
using shard_weights = std::map<std::string, shard_weight, std::less<>>; ///< by their names in the model

/// What a file says of itself.
struct shard_header {
    shard_sizes sizes;
    shard_cell cell;
    shard_weights weights; ///< of all shards together
};

/// Returns the cells that the world ranks of a mesh have, each once. Throws `cpx::error` for sizes that make no mesh or
/// no pipeline, or more than 65536 ranks.
inline std::vector<shard_cell> shard_cells(shard_sizes const& sizes, caller here = caller::here()) {
    constexpr int most = 65536;
    require(sizes.mesh.world <= most, "shard_cells", "world", "at most 65536", sizes.mesh.world, here);
    require(
        sizes.pipeline.ranks == sizes.mesh.pp, "shard_cells", "ranks of the pipeline",
        [&] { return "the mesh's pp = " + std::to_string(sizes.mesh.pp); }, sizes.pipeline.ranks, here);
    mesh const ranks(sizes.mesh, here);
    std::set<shard_cell> cells;
    for (int r = 0; r < ranks.world(); ++r)
        cells.insert({ranks.coordinate(axis::pp, r), ranks.coordinate(axis::ep, r), ranks.coordinate(axis::tp, r),
                      ranks.coordinate(axis::etp, r)});
    return {cells.begin(), cells.end()};
}

/// Returns the metadata of a shard's file, in which tensors have the model's names, not the rank's.
///
/// `cpx.shard` is an object of sizes: world, tp, pp, ep, etp, vpp, layers, experts, tied; first, last, layout,
/// account_for_embedding, account_for_loss and mtp where they are set; and `cell` with pp, ep, tp, etp.
/// `cpx.weights` has for every weight of the model [dtype, shape, divided]. Both are JSON.
inline std::map<std::string, std::string, std::less<>> shard_metadata(shard_sizes const& sizes, shard_cell const& cell,
                                                                      shard_weights const& weights) {
    auto const& m = sizes.mesh;
    auto const& p = sizes.pipeline;
    nlohmann::json shard{
        {"world", m.world},   {"tp", m.tp},
        {"pp", m.pp},         {"ep", m.ep},
        {"etp", etp_of(m)},   {"vpp", p.chunks},
        {"layers", p.layers}, {"experts", sizes.experts},
        {"tied", sizes.tied}, {"cell", {{"pp", cell.pp}, {"ep", cell.ep}, {"tp", cell.tp}, {"etp", cell.etp}}}};
    if (p.first) shard["first"] = *p.first;
    if (p.last) shard["last"] = *p.last;
    if (p.layout) shard["layout"] = *p.layout;
    if (p.mtp) shard["mtp"] = *p.mtp;
    if (p.account_for_embedding) shard["account_for_embedding"] = true;
    if (p.account_for_loss) shard["account_for_loss"] = true;
    auto all = nlohmann::json::object();
    for (auto const& [name, w] : weights) all[name] = {safetensors::name_of(w.dtype), w.shape, w.divided};
    return {{"cpx.shard", shard.dump()}, {"cpx.weights", all.dump()}};
}

namespace detail {

inline shard_sizes read_shard_sizes(json_value const& from, caller here) {
    shard_sizes sizes;
    auto& m = sizes.mesh;
    auto& p = sizes.pipeline;
    m.world = from.get<int>("world", here);
    m.tp = from.get<int>("tp", here);
    m.pp = p.ranks = from.get<int>("pp", here);
    m.ep = from.get<int>("ep", here);
    m.etp = from.get<int>("etp", here);
    p.chunks = from.get<int>("vpp", here);
    p.layers = from.get<index_t>("layers", here);
    sizes.experts = from.get<index_t>("experts", here);
    sizes.tied = from.get<bool>("tied", here);
    if (from.has("first")) p.first = from.get<index_t>("first", here);
    if (from.has("last")) p.last = from.get<index_t>("last", here);
    if (from.has("layout")) p.layout = from.get<std::string>("layout", here);
    if (from.has("mtp")) p.mtp = from.get<index_t>("mtp", here);
    if (from.has("account_for_embedding")) p.account_for_embedding = from.get<bool>("account_for_embedding", here);
    if (from.has("account_for_loss")) p.account_for_loss = from.get<bool>("account_for_loss", here);
    if (m.etp < 1) from.at("etp", here).fail("at least 1", here);
    return sizes;
}

} // namespace detail

namespace detail {

inline json_value parse_metadata(safetensors const& file, std::string_view key, caller here) {
    return json_value::parse(file.metadata(key, here), file.where() + ": " + std::string(key),
                             {.bytes = std::size_t{safetensors::longest_header}}, here);
}

} // namespace detail

/// Returns the sizes and the cell that a shard's file says it has, without the model's weights. Throws `cpx::error`
/// that names the file if it says nothing or no sense.
inline shard_header read_shard_cell(safetensors const& file, caller here = caller::here()) {
    auto const shard = detail::parse_metadata(file, "cpx.shard", here);
    auto const cell = shard.at("cell", here);
    return {
        detail::read_shard_sizes(shard, here),
        {cell.get<int>("pp", here), cell.get<int>("ep", here), cell.get<int>("tp", here), cell.get<int>("etp", here)},
        {}};
}
/// Returns what a shard's file says of itself. Throws as `read_shard_cell`.
inline shard_header read_shard_header(safetensors const& file, caller here = caller::here()) {
    auto header = read_shard_cell(file, here);
    auto const weights = detail::parse_metadata(file, "cpx.weights", here);
    for (auto const& name : weights.keys(here)) {
        auto const fields = weights.at(name, here).items(here);
        if (fields.size() != 3) weights.at(name, here).fail("[dtype, shape, divided]", here);
        auto const dtype = safetensors::dtype_of(fields[0].as<std::string>(here));
        if (!dtype) fields[0].fail("a dtype of safetensors", here);
        header.weights.emplace(
            name, shard_weight{*dtype, fields[1].as<std::vector<index_t>>(here), fields[2].as<bool>(here)});
    }
    return header;
}

} // namespace cpx
