// SPDX-License-Identifier: Apache-2.0
// From a checkpoint of Hugging Face's to one file for each cell of a mesh.
#pragma once

#include "hf_folder.hpp"
#include "model.hpp"
#include "new_folder.hpp"

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/audit_config.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/hf_names.hpp>
#include <cpx/model/hf_sizes.hpp>
#include <cpx/model/naming.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/model/safetensors_writer.hpp>
#include <cpx/model/shard.hpp>
#include <cpx/model/weight_bytes.hpp>
#include <cpx/model/weight_share.hpp>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace convert {

using cpx::index_t;

/// Where the tensors of a shard come from.
class shard_source {
public:
    /// Throws `cpx::error` that names the first tensor in which weights and config.json disagree.
    shard_source(hf_folder const& from, cpx::hf_names const& names, index_t vocabulary_unit)
        : from_(from), names_(names), unit_(vocabulary_unit) {
        std::set<std::string> known;
        for (auto const& w : names.weights()) {
            auto const sources = names.hf(w);
            for (std::size_t i = 0; i < sources.size(); ++i) check(sources[i], w, i);
            known.insert(sources.begin(), sources.end());
            weights_.emplace(names.megatron(w), w);
        }
        for (auto const& name : from.names())
            if (!known.contains(name)) add_other(name);
    }

    /// Returns the names of all tensors in Megatron.
    std::vector<std::string> all() const {
        std::vector<std::string> all;
        for (auto const& [name, w] : weights_) all.push_back(name);
        for (auto const& [name, tensor] : others_) all.push_back(name);
        return all;
    }
    /// Adds the copy of a tied embedding that an output layer on another rank has.
    void add_output_copy() {
        std::string const output =
            (names_.style().language_model ? "language_model." : "") + std::string("output_layer.weight");
        weights_.emplace(output, *names_.from_megatron(output));
    }

    /// Returns what a rank of tensor parallelism has of a tensor, as a shard's header has it. `tp` is the rank of an
    /// expert's own tensor parallelism, if it is an expert's.
    cpx::shard_weight share(std::string const& name, cpx::group_rank tp) const {
        if (auto const other = others_.find(name); other != others_.end()) {
            auto const& t = from_.tensor(other->second);
            return {t.dtype, t.shape, false};
        }
        auto const& w = weights_.at(name);
        auto const share = cpx::share_of(*w.rule, names_.sizes(), tp, std::max<index_t>(w.expert, 0), unit_);
        auto type = from_.tensor(names_.hf(w, 0)).dtype;
        if (w.rule->float32 || w.rule->zero_centred) type = gather(w, share).dtype;
        return {type, cpx::shape_of(*w.rule, share, names_.sizes()), !share.replicated};
    }
    bool expert(std::string const& name) const {
        auto const found = weights_.find(name);
        return found != weights_.end() && found->second.rule->expert;
    }
    /// Writes it.
    void write(std::string const& name, cpx::group_rank tp, cpx::safetensors_writer& to) const {
        if (auto const other = others_.find(name); other != others_.end())
            return copy_tensor(from_.file(other->second), other->second, to, name);
        auto const& w = weights_.at(name);
        auto const share = cpx::share_of(*w.rule, names_.sizes(), tp, std::max<index_t>(w.expert, 0), unit_);
        to.write(name, gather(w, share).bytes);
    }

private:
    void check(std::string const& name, cpx::model_weight const& w, std::size_t source) const {
        auto const& tensor = from_.tensor(name);
        auto const wanted = cpx::shape_of(w.rule->from[source], names_.sizes());
        cpx::require(
            tensor.shape == wanted, from_.file(name).where().c_str(), ("shape of tensor " + cpx::quote(name)).c_str(),
            [&] { return show(wanted) + ", as config.json has it"; }, [&] { return show(tensor.shape); });
        auto const first = from_.tensor(names_.hf(w, 0)).dtype;
        cpx::require(cpx::detail::is_floating(tensor.dtype) || tensor.dtype != first, from_.file(name).where().c_str(),
                     ("dtype of tensor " + cpx::quote(name)).c_str(), "F64, F32, F16 or BF16",
                     [&] { return std::string(cpx::safetensors::name_of(tensor.dtype)); });
        cpx::require(
            tensor.dtype == first, from_.file(name).where().c_str(), ("dtype of tensor " + cpx::quote(name)).c_str(),
            [&] { return std::string(cpx::safetensors::name_of(first)) + ", as of " + names_.hf(w, 0); },
            [&] { return std::string(cpx::safetensors::name_of(tensor.dtype)); });
    }
    /// Adds a tensor that is no weight of the language model.
    void add_other(std::string const& name) {
        std::string const embedding =
            names_.style().inside ? "model.language_model.embed_tokens.weight" : "model.embed_tokens.weight";
        if (name == "lm_head.weight" && names_.sizes().tie_word_embeddings) { // some writers leave it there
            bool const same = from_.tensor(name).shape == from_.tensor(embedding).shape &&
                              from_.tensor(name).dtype == from_.tensor(embedding).dtype &&
                              equal_tensors(from_.file(name), name, from_.file(embedding), embedding);
            cpx::require(same, from_.file(name).where().c_str(), "tensor \"lm_head.weight\"",
                         "the embedding, to which config.json ties it", "another");
            return;
        }
        auto const mapped = names_.to_megatron(name);
        auto const& megatron = mapped.empty() ? name : mapped.front();
        auto const back = names_.to_hf(megatron);
        bool const returns = back.empty() ? megatron == name : back == std::vector{name};
        cpx::require(cpx::beside_model(name) && returns, from_.file(name).where().c_str(),
                     ("tensor " + cpx::quote(name)).c_str(), "one of the model of config.json, or of its tower",
                     "another");
        others_.emplace(megatron, name);
    }
    cpx::weight_bytes gather(cpx::model_weight const& w, cpx::weight_share const& share) const {
        auto const& first = from_.tensor(names_.hf(w, 0));
        auto const element = static_cast<index_t>(cpx::safetensors::size_of(first.dtype));
        std::vector<std::byte> bytes(static_cast<std::size_t>(share.rows() * share.columns.size() * element));
        std::vector<std::string> const sources = names_.hf(w);
        cpx::for_each_bytes(share, cpx::weight_columns(first.shape), element,
                            [&](std::size_t source, index_t at, index_t own, index_t count) {
                                from_.file(sources[source])
                                    .read_bytes(sources[source], at,
                                                std::span(bytes).subspan(static_cast<std::size_t>(own),
                                                                         static_cast<std::size_t>(count)));
                            });
        return cpx::to_megatron(*w.rule, {first.dtype, std::move(bytes)});
    }

    hf_folder const& from_;
    cpx::hf_names const& names_;
    index_t unit_;
    std::map<std::string, cpx::model_weight> weights_; ///< by their names in Megatron
    std::map<std::string, std::string> others_;        ///< what is copied whole, by its name in Megatron
};

/// Writes a file for each cell of the mesh into a new folder, and beside them what the way back wants.
inline void to_shards(hf_folder const& from, cpx::hf_names const& names, cpx::shard_sizes const& sizes,
                      cpx::naming const& owners, index_t vocabulary_unit, std::string const& out) {
    shard_source source(from, names, vocabulary_unit);
    if (names.sizes().tie_word_embeddings && sizes.mesh.pp > 1) source.add_output_copy();
    auto const rank_of = [&](std::string const& name, cpx::shard_cell const& cell) {
        return source.expert(name) ? cpx::group_rank{cell.etp, cpx::etp_of(sizes.mesh)}
                                   : cpx::group_rank{cell.tp, sizes.mesh.tp};
    };
    auto const all = source.all();
    cpx::shard_weights weights;
    for (auto const& name : all) weights.emplace(name, source.share(name, rank_of(name, {})));

    auto texts = cpx::shard_metadata(sizes, {}, weights);
    new_folder folder(out);
    for (auto const& cell : cpx::shard_cells(sizes)) {
        std::vector<std::string> own;
        std::vector<cpx::safetensors_writer::tensor_info> declared;
        for (auto const& name : all) {
            if (!owns(owners, name, cell)) continue;
            own.push_back(name);
            auto const& w = weights.at(name);
            declared.push_back({name, w.dtype, w.shape});
        }
        texts["cpx.shard"] = cpx::shard_metadata(sizes, cell, {}).at("cpx.shard");
        cpx::safetensors_writer file(folder / shard_name(sizes, cell), declared, texts);
        for (auto const& name : own) {
            folder.go_on();
            source.write(name, rank_of(name, cell), file);
        }
        file.finish();
    }
    copy_whole(from.path() / config_name, folder / config_name);
    if (fs::exists(from.path() / index_name)) copy_whole(from.path() / index_name, folder / index_name);
    write_file(folder / examples::record_name, examples::to_json(from.record()));
    folder.commit();
}

} // namespace convert
