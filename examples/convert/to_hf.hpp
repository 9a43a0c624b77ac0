// SPDX-License-Identifier: Apache-2.0
// From the shards of a model to a checkpoint of Hugging Face's.
#pragma once

#include "hf_folder.hpp"
#include "model.hpp"
#include "new_folder.hpp"
#include "shard_folder.hpp"

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/audit_config.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/hf_names.hpp>
#include <cpx/model/hf_sizes.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/model/safetensors_writer.hpp>
#include <cpx/model/weight_bytes.hpp>
#include <cpx/model/weight_share.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace convert {

using cpx::index_t;

/// Where the tensors of a checkpoint come from.
class hf_source {
public:
    /// Throws `cpx::error` that names the first tensor in which shards and config.json disagree.
    hf_source(shard_folder const& from, cpx::hf_names const& names) : from_(from), names_(names) {
        for (auto const& [name, w] : from.weights()) add(name);
        for (auto const& w : names.weights())
            for (std::size_t i = 0; i < w.rule->sources(); ++i) {
                auto const found = uses_.find(names.hf(w, i));
                std::size_t const wanted = stacked(*w.rule) ? static_cast<std::size_t>(names.sizes().num_experts) : 1;
                std::size_t const got = found == uses_.end() ? 0 : found->second.size();
                cpx::require(
                    got == wanted, from.path().string().c_str(), "shards",
                    [&] { return cpx::quote(names.megatron(w)) + ", which the model of config.json has, once"; }, got);
            }
    }

    /// Returns the names of all tensors.
    std::vector<std::string> all() const {
        std::vector<std::string> all;
        for (auto const& [name, uses] : uses_) all.push_back(name);
        for (auto const& [name, shard] : others_) all.push_back(name);
        return all;
    }
    /// Adds lm_head, a copy of a tied embedding, which some checkpoints have.
    void add_head() {
        std::string const model = names_.style().inside ? "model.language_model." : "model.";
        uses_.emplace("lm_head.weight", uses_.at(model + "embed_tokens.weight"));
    }
    /// Returns what will be written of a tensor that was of dtype `wanted` before.
    cpx::safetensors_writer::tensor_info info(std::string const& name, std::optional<dtype> wanted) const {
        if (auto const other = others_.find(name); other != others_.end()) {
            auto const& w = from_.weights().find(other->second)->second;
            return {name, w.dtype, w.shape};
        }
        auto const& p = uses_.at(name).front();
        auto type = from_.weights().find(p.shard)->second.dtype;
        if (special(*p.weight.rule)) type = assemble(name, wanted).dtype;
        return {name, type, cpx::shape_of(p.weight.rule->from[p.source], names_.sizes())};
    }
    void write(std::string const& name, std::optional<dtype> wanted, cpx::safetensors_writer& to) const {
        if (auto const other = others_.find(name); other != others_.end())
            return copy_tensor(from_.share(other->second, false, 0), other->second, to, name);
        to.write(name, assemble(name, wanted).bytes);
    }

private:
    /// A weight of which a tensor is a source.
    struct use {
        std::string shard; ///< its name in the shards
        cpx::model_weight weight;
        std::size_t source = 0;
    };

    static bool special(cpx::weight_rule const& rule) { return rule.float32 || rule.zero_centred; }
    static bool stacked(cpx::weight_rule const& rule) {
        return rule.form == cpx::weight_form::stacked_rows || rule.form == cpx::weight_form::stacked_columns;
    }

    void add(std::string const& name) {
        auto const w = names_.from_megatron(name);
        auto const where = from_.path().string();
        if (!w) {
            auto const mapped = names_.to_hf(name);
            cpx::require(!mapped.empty() || cpx::beside_model(name), where.c_str(), "shards",
                         "weights that the model of config.json has", [&] { return cpx::quote(name); });
            others_.emplace(mapped.empty() ? name : mapped.front(), name);
            return;
        }
        if (has(w->rule->needs, cpx::weight_trait::tied)) return; // a copy of the embedding
        for (std::size_t i = 0; i < w->rule->sources(); ++i) uses_[names_.hf(*w, i)].push_back({name, *w, i});
    }
    /// Returns what a rank has, the vocabulary padded as the shards have it.
    cpx::weight_share share_of(std::string const& name, cpx::model_weight const& w, int rank) const {
        auto const& shape = from_.weights().find(name)->second.shape;
        index_t const unit = w.rule->form == cpx::weight_form::vocabulary && !shape.empty() ? shape[0] : 1;
        return cpx::share_of(*w.rule, names_.sizes(), {rank, from_.ranks(w.rule->expert)},
                             std::max<index_t>(w.expert, 0), std::max<index_t>(unit, 1));
    }
    static std::string text_of(dtype type) { return std::string(cpx::safetensors::name_of(type)); }
    /// Puts a tensor together from the shares that have some of it.
    cpx::weight_bytes assemble(std::string const& name, std::optional<dtype> wanted) const {
        auto const& uses = uses_.at(name);
        auto const& first = uses.front();
        auto const shape = cpx::shape_of(first.weight.rule->from[first.source], names_.sizes());
        index_t const columns = cpx::weight_columns(shape);
        auto const type = from_.weights().find(first.shard)->second.dtype;
        auto const element = static_cast<index_t>(cpx::safetensors::size_of(type));
        cpx::weight_bytes whole{type, {}};
        whole.bytes.resize(static_cast<std::size_t>(cpx::weight_rows(shape) * columns * element));
        for (auto const& p : uses) {
            auto const same = from_.weights().find(p.shard)->second.dtype; // audit has seen to it
            cpx::require(
                same == type, p.shard.c_str(), "dtype", [&] { return text_of(type) + ", as of " + first.shard; },
                [&] { return text_of(same); });
            for (int rank = 0; rank < from_.ranks(p.weight.rule->expert); ++rank) {
                auto const share = share_of(p.shard, p.weight, rank);
                auto const& file = from_.share(p.shard, p.weight.rule->expert, rank);
                auto const own = file.read_bytes(p.shard);
                cpx::for_each_bytes(
                    share, columns, element, [&](std::size_t source, index_t to, index_t from, index_t count) {
                        if (source == p.source)
                            std::memcpy(whole.bytes.data() + to, own.data() + from, static_cast<std::size_t>(count));
                    });
                if (share.replicated) break;
            }
        }
        return cpx::to_hf(*first.weight.rule, std::move(whole), wanted);
    }

    shard_folder const& from_;
    cpx::hf_names const& names_;
    std::map<std::string, std::vector<use>> uses_;
    std::map<std::string, std::string> others_; ///< what is copied whole: its name in the shards
};

/// Writes a checkpoint into a new folder, of shards that are those of the config.json beside them: if they were made of
/// a checkpoint, with the same files, dtypes and texts.
inline void to_hf(shard_folder const& from, std::string const& out) {
    auto const config = from.path() / config_name, record = from.path() / examples::record_name;
    auto const settings = cpx::hf_config::read(config);
    auto sizes = cpx::sizes_of(settings);
    hf_files files;
    if (fs::exists(record)) files = examples::read_files(record);
    auto const names = examples::tensors_of(files); // which tell how Hugging Face's side is written
    auto style = cpx::style_of(names, sizes);
    if (files.empty()) style = cpx::style_of(from.weights(), settings, sizes);
    cpx::hf_names const model(sizes, style);
    hf_source source(from, model);
    if (sizes.tie_word_embeddings && std::ranges::find(names, "lm_head.weight") != names.end()) source.add_head();

    auto const all = source.all();
    if (files.empty()) {
        files[weights_name].metadata["format"] = "pt";
        for (auto const& name : all) files[weights_name].tensors[name] = source.info(name, {}).dtype;
    }
    std::map<std::string, int> times;
    for (auto const& name : all) times[name] = 0;
    for (auto const& [file, held] : files)
        for (auto const& [name, type] : held.tensors) {
            auto const found = times.find(name);
            cpx::require(found != times.end() && found->second++ == 0, record.string().c_str(), "tensors",
                         "those of the shards, each once", cpx::quote(name));
        }
    for (auto const& [name, count] : times)
        cpx::require(count == 1, record.string().c_str(), "tensors", "all of the shards",
                     "none called " + cpx::quote(name));

    new_folder folder(out);
    for (auto const& [file, held] : files) {
        std::vector<cpx::safetensors_writer::tensor_info> declared;
        for (auto const& [name, type] : held.tensors) declared.push_back(source.info(name, type));
        cpx::safetensors_writer to(folder / file, declared, held.metadata);
        for (auto const& [name, type] : held.tensors) {
            folder.go_on();
            source.write(name, type, to);
        }
        to.finish();
    }
    copy_whole(config, folder / config_name);
    if (fs::exists(from.path() / index_name)) copy_whole(from.path() / index_name, folder / index_name);
    folder.commit();
}

} // namespace convert
