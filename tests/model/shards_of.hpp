// SPDX-License-Identifier: Apache-2.0
// A small model's shards on any mesh, made without the code that audits them.
#pragma once

#include <cpx/core/index.hpp>
#include <cpx/mesh/mesh.hpp>
#include <cpx/model/audit.hpp>
#include <cpx/model/pipeline.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/model/shard.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace shards_of {

using cpx::index_t;

struct model {
    cpx::shard_sizes sizes;
    cpx::shard_weights weights;
    std::vector<cpx::audit_shard> shards;
};

/// Calls `f(name, divided, expert)` for the weights of a decoder layer, -1 where there is no expert.
template <class F>
void for_each_weight(index_t layer, index_t experts, F const& f) {
    std::string const of = "decoder.layers." + std::to_string(layer) + '.';
    f(of + "input_layernorm.weight", false, -1);
    f(of + "self_attention.linear_qkv.weight", true, -1);
    f(of + "mlp.router.weight", false, -1);
    f(of + "mlp.shared_experts.linear_fc1.weight", true, -1);
    for (index_t e = 0; e < experts; ++e) f(of + "mlp.experts.linear_fc1.weight" + std::to_string(e), true, e);
}

/// Returns the shards of a mesh: of every cell what its first world rank has, by the mesh's own numbers.
inline model make(cpx::shard_sizes const& sizes) {
    using cpx::axis;
    model m{sizes, {}, {}};
    auto const type = cpx::safetensors::dtype::bf16;
    for (index_t l = 0; l < sizes.pipeline.layers; ++l)
        for_each_weight(l, sizes.experts, [&](std::string const& name, bool divided, index_t) {
            m.weights[name] = {type, {2, 3}, divided};
        });
    m.weights["embedding.word_embeddings.weight"] = {type, {4}, true};
    m.weights["decoder.final_layernorm.weight"] = {cpx::safetensors::dtype::f32, {3}, false};
    if (!sizes.tied || sizes.mesh.pp > 1) m.weights["output_layer.weight"] = {type, {4}, true};

    cpx::mesh const ranks(sizes.mesh);
    cpx::pipeline const stages(sizes.pipeline);
    std::map<cpx::shard_cell, bool> seen;
    for (int r = 0; r < ranks.world(); ++r) {
        cpx::shard_cell const cell{ranks.coordinate(axis::pp, r), ranks.coordinate(axis::ep, r),
                                   ranks.coordinate(axis::tp, r), ranks.coordinate(axis::etp, r)};
        if (seen[cell]) continue;
        seen[cell] = true;
        cpx::audit_shard shard{"shard " + std::to_string(r), cell, {}};
        auto const add = [&](std::string const& name, std::string const& content, int part) {
            auto const& w = m.weights.at(name);
            cpx::checksum64 sum;
            sum.add(content + std::to_string(w.divided ? part : 0));
            shard.records.push_back({name, w.dtype, w.shape, sum.value()});
        };
        for (int chunk = 0; chunk < (sizes.mesh.pp > 1 ? stages.chunks() : 1); ++chunk) {
            auto const& stage = stages.stage(cell.pp, chunk);
            for (index_t l = stage.layers.first; l < stage.layers.last; ++l)
                for_each_weight(l, sizes.experts, [&](std::string const& name, bool, index_t expert) {
                    auto const own = ranks.experts(sizes.experts, r);
                    if (expert < 0 || (own.first <= expert && expert < own.last))
                        add(name, name, expert < 0 ? cell.tp : cell.etp);
                });
            if (stage.embedding) add("embedding.word_embeddings.weight", "words", cell.tp);
            if (stage.loss) add("decoder.final_layernorm.weight", "norm", 0);
            if (stage.loss && m.weights.contains("output_layer.weight"))
                add("output_layer.weight", sizes.tied ? "words" : "output", cell.tp);
        }
        m.shards.push_back(std::move(shard));
    }
    return m;
}

/// Returns sizes with a layer for every stage.
inline cpx::shard_sizes sizes(int world, int tp, int pp, int ep, int etp, int chunks = 1, bool tied = false) {
    return {{.world = world, .tp = tp, .pp = pp, .ep = ep, .etp = etp},
            {.layers = index_t{pp} * chunks, .ranks = pp, .chunks = chunks},
            ep,
            tied};
}

} // namespace shards_of
