// SPDX-License-Identifier: Apache-2.0
// Whether the shards of a model have every weight, each where it belongs, and copies that are equal.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/mesh/mesh.hpp>
#include <cpx/model/checksum.hpp>
#include <cpx/model/naming.hpp>
#include <cpx/model/parameter_name.hpp>
#include <cpx/model/pipeline.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/model/shard.hpp>

#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cpx {

/// A tensor of one shard.
struct audit_record {
    std::string name; ///< in the model
    safetensors::dtype dtype = safetensors::dtype::f32;
    std::vector<index_t> shape;
    std::uint64_t checksum = 0; ///< `checksum64` of its bytes
};

/// What one rank of a cell has.
struct audit_shard {
    std::string where; ///< as problems name it
    shard_cell cell;
    std::vector<audit_record> records;
};

/// What can be wrong.
enum class audit_fault {
    disagree,     ///< shards tell of other models
    no_shard,     ///< of a cell of the mesh there is none
    cell_twice,   ///< of a cell there are several
    no_cell,      ///< a shard is of a cell that the mesh does not have
    unknown_name, ///< the model has no such layer or expert, or a name is a rank's buffer of experts
    no_weight,    ///< a layer has none, or of its experts some are not among the model's weights
    missing,      ///< a cell that owns a weight does not have it
    tensor_twice, ///< a shard has a tensor twice, or the list of weights one under two names
    unexpected,   ///< a tensor is none of the model's weights
    misplaced,    ///< a cell has a weight that it does not own, so that it is there twice
    other_shape,  ///< or another dtype, than the model's weight has
    different     ///< copies are not equal
};

/// Returns the name of a fault, as it stands above.
constexpr std::string_view name_of(audit_fault fault) {
    constexpr std::array<std::string_view, 12> names{"disagree",     "no_shard",  "cell_twice",  "no_cell",
                                                     "unknown_name", "no_weight", "missing",     "tensor_twice",
                                                     "unexpected",   "misplaced", "other_shape", "different"};
    return names[static_cast<std::size_t>(fault)];
}

struct audit_problem {
    audit_fault fault;
    std::string name;   ///< of a weight, a layer, or empty
    std::string detail; ///< in words
    friend bool operator==(audit_problem const&, audit_problem const&) = default;
};

/// A cell that has a weight, and the chunk of its pipeline rank that does.
struct audit_owner {
    shard_cell cell;
    int vp = 0;
    friend constexpr auto operator<=>(audit_owner const&, audit_owner const&) = default;
};

/// A share of a weight of which several cells have a copy: routers, shared experts, norms, embeddings; and all dense
/// weights of cells that differ in their experts alone.
struct audit_replica {
    std::string name;
    std::string copy_of; ///< another name, of a tied embedding
    int share = 0;       ///< the coordinate on tp, of an expert on etp, of those that divide the weight; else 0
    bool equal = true;
    std::vector<std::pair<audit_owner, std::uint64_t>> copies; ///< with checksums, the first owner's first
};

/// What a layer has, or what else of the model. Copies count once.
struct audit_layer {
    std::string name; ///< such as `decoder.layers.3`, `embedding`
    index_t weights = 0, elements = 0, bytes = 0;
    std::uint64_t checksum = 0; ///< of names, shares and checksums in the order of names
};

struct audit_report {
    std::vector<audit_problem> problems;
    std::vector<audit_replica> replicas;
    std::vector<audit_layer> layers; ///< in the order of the model
    bool good() const { return problems.empty(); }
};

/// Returns the words of a cell: `pp 0, ep 1, tp 0, etp 0`.
inline std::string text_of(shard_cell const& c) {
    return "pp " + std::to_string(c.pp) + ", ep " + std::to_string(c.ep) + ", tp " + std::to_string(c.tp) + ", etp " +
           std::to_string(c.etp);
}
inline std::string text_of(audit_owner const& o) { return text_of(o.cell) + ", vp " + std::to_string(o.vp); }

/// Reads the tensors of a shard. Throws `cpx::error` if the file cannot be read.
inline std::vector<audit_record> audit_records(safetensors const& file, caller here = caller::here()) {
    std::vector<audit_record> records;
    std::vector<std::byte> block(1 << 20);
    for (auto const& name : file.names()) {
        auto const& info = file.tensor(name, here);
        checksum64 sum;
        for (index_t first = 0; first < info.bytes.size(); first += std::ssize(block)) {
            auto const some = std::span(block).first(
                static_cast<std::size_t>(std::min<index_t>(std::ssize(block), info.bytes.size() - first)));
            file.read_bytes(name, first, some, here);
            sum.add(some);
        }
        records.push_back({name, info.dtype, info.shape, sum.value()});
    }
    return records;
}

namespace detail {

/// Holds shards against what a model has.
class auditor {
public:
    auditor(shard_sizes const& sizes, shard_weights const& weights, std::vector<audit_shard> const& shards, caller here)
        : sizes_(sizes), weights_(weights),
          names_(mesh(sizes.mesh, here), pipeline(sizes.pipeline, here), sizes.experts, here),
          cells_(shard_cells(sizes, here)) {
        take(shards);
        for (auto const& [name, weight] : weights_) check(name, weight);
        check_names();
        check_tied();
        for (auto& [place, layer] : layers_) {
            layer.checksum = sums_[place].value();
            report_.layers.push_back(std::move(layer));
        }
    }

    audit_report report() && { return std::move(report_); }

private:
    using tensors = std::map<std::string_view, audit_record const*>;
    using layer_place = std::pair<int, index_t>; // vision before language and so on, and layer

    void add(audit_fault fault, std::string_view name, std::string detail) {
        report_.problems.push_back({fault, std::string(name), std::move(detail)});
    }

    void take(std::vector<audit_shard> const& shards) {
        std::map<shard_cell, std::string> files;
        for (auto const& s : shards) {
            if (!std::ranges::binary_search(cells_, s.cell)) {
                add(audit_fault::no_cell, "", s.where + ": no rank of the mesh is " + text_of(s.cell));
                continue;
            }
            auto const [at, fresh] = files.emplace(s.cell, s.where);
            if (!fresh) {
                add(audit_fault::cell_twice, "", text_of(s.cell) + ": " + at->second + " and " + s.where);
                continue;
            }
            for (auto const& r : s.records) {
                if (!held_[s.cell].emplace(r.name, &r).second) add(audit_fault::tensor_twice, r.name, "in " + s.where);
                if (!weights_.contains(r.name)) add(audit_fault::unexpected, r.name, "in " + s.where);
            }
            held_[s.cell]; // also of a shard without tensors
        }
        for (auto const& c : cells_)
            if (!files.contains(c)) add(audit_fault::no_shard, "", "none of " + text_of(c));
    }

    audit_record const* find(shard_cell const& cell, std::string_view name) const {
        auto const shard = held_.find(cell);
        if (shard == held_.end()) return nullptr;
        auto const at = shard->second.find(name);
        return at == shard->second.end() ? nullptr : at->second;
    }

    /// Returns the pipeline ranks that have a weight, with the chunk of each: its owner, and of an embedding those that
    /// compute losses or predict several tokens, if they have a copy; of a name that tells nothing those that have it.
    std::map<int, int> stages_of(std::string_view name, parameter_name const& known,
                                 parameter_owner const& owner) const {
        std::map<int, int> stages;
        if (owner.stage) stages.emplace(owner.stage->rank, owner.stage->chunk);
        auto const has_copy = [&](int rank) {
            return std::ranges::any_of(cells_, [&](auto const& c) { return c.pp == rank && find(c, name); });
        };
        auto const& all = names_.stages();
        for (int i = 0; std::cmp_less(i, all.stages().size()); ++i) {
            auto const& stage = all.stages()[static_cast<std::size_t>(i)];
            bool const may = !owner.stage || (known.family == name_family::embedding && (stage.loss || stage.mtp > 0));
            if (may && !stages.contains(i % all.ranks()) && has_copy(i % all.ranks()))
                stages.emplace(i % all.ranks(), i / all.ranks());
        }
        return stages;
    }

    void check(std::string const& name, shard_weight const& weight) {
        auto const known = parse_parameter_name(name);
        parameter_owner owner;
        try {
            owner = names_.owner(name);
        } catch (error const& e) {
            return add(audit_fault::unknown_name, name, e.message());
        }
        auto const stages = stages_of(name, known, owner);
        std::map<int, std::vector<std::pair<audit_owner, audit_record const*>>> shares;
        bool anywhere = false;
        for (auto const& c : cells_) {
            auto const stage = stages.find(c.pp);
            bool const owns = stage != stages.end() && (!owner.ep || c.ep == *owner.ep);
            auto const* const record = find(c, name);
            anywhere = anywhere || record;
            if (owns && !record && held_.contains(c)) add(audit_fault::missing, name, "at " + text_of(c));
            if (!record) continue;
            if (!owns) {
                add(audit_fault::misplaced, name, "at " + text_of(c) + ", which does not own it");
                continue;
            }
            if (record->dtype != weight.dtype || record->shape != weight.shape)
                add(audit_fault::other_shape, name,
                    "at " + text_of(c) + ": expected " + form(weight.dtype, weight.shape) + ", got " +
                        form(record->dtype, record->shape));
            int const share = !weight.divided ? 0 : owner.ep ? c.etp : c.tp;
            shares[share].push_back({{c, stage->second}, record});
        }
        if (!anywhere && stages.empty()) add(audit_fault::missing, name, "on every rank");
        sum(name, known, weight, shares);
        for (auto const& [share, copies] : shares)
            if (copies.size() > 1) compare(name, share, copies);
    }

    void compare(std::string const& name, int share,
                 std::vector<std::pair<audit_owner, audit_record const*>> const& copies,
                 std::string const& copy_of = "") {
        audit_replica replica{name, copy_of, share, true, {}};
        for (auto const& [owner, record] : copies) {
            replica.copies.emplace_back(owner, record->checksum);
            if (record->checksum == copies.front().second->checksum) continue;
            replica.equal = false;
            add(audit_fault::different, name,
                hex_of(copies.front().second->checksum) + " at " + text_of(copies.front().first) +
                    (copy_of.empty() ? "" : " as " + copy_of) + ", " + hex_of(record->checksum) + " at " +
                    text_of(owner));
        }
        report_.replicas.push_back(std::move(replica));
    }

    /// Adds a weight to the summary of its layer.
    template <class Shares>
    void sum(std::string_view name, parameter_name const& known, shard_weight const& weight, Shares const& shares) {
        using enum name_family;
        static std::map<name_family, std::pair<int, char const*>> const titles{{vision, {0, "vision_model"}},
                                                                               {embedding, {1, "embedding"}},
                                                                               {decoder, {2, "decoder.layers."}},
                                                                               {final_norm, {3, "final_layernorm"}},
                                                                               {output, {4, "output_layer"}},
                                                                               {mtp, {5, "mtp"}},
                                                                               {other, {6, "other"}}};
        auto const& [order, title] = titles.at(known.family);
        bool const layer = known.family == decoder;
        layer_place const place{order, layer ? known.layer->value : 0};
        auto& summary = layers_[place];
        summary.name = title + (layer ? std::to_string(known.layer->value) : std::string());
        summary.weights += !shares.empty();
        for (auto const& [share, copies] : shares) {
            auto const bytes = safetensors::bytes_of(weight.dtype, weight.shape).value_or(0);
            summary.bytes += bytes;
            summary.elements += bytes / static_cast<index_t>(safetensors::size_of(weight.dtype));
            auto& checksum = sums_[place];
            checksum.add(name);
            checksum.add(static_cast<std::uint64_t>(share));
            checksum.add(copies.front().second->checksum);
        }
    }

    /// What the weights alone show: layers that have none, experts that a layer lacks.
    void check_names() {
        std::set<index_t> layers;
        std::map<std::string, std::set<index_t>> experts; // by name without their number
        for (auto const& item : weights_) {
            auto const known = parse_parameter_name(item.first);
            if (known.family == name_family::decoder) layers.insert(known.layer->value);
            if (!known.expert) continue;
            auto const [number, begin, end] = *known.expert;
            experts[item.first.substr(0, begin) + '#' + item.first.substr(end)].insert(number);
        }
        for (range const gap : gaps(layers, names_.stages().layers()))
            add(audit_fault::no_weight, "decoder.layers." + numbers_of(gap), "no weight");
        for (auto const& [name, found] : experts)
            for (range const gap : gaps(found, sizes_.experts))
                add(audit_fault::no_weight, name, "no expert " + numbers_of(gap));
    }

    /// Returns what of 0 to `all` - 1 is not among some numbers.
    static std::vector<range> gaps(std::set<index_t> const& numbers, index_t all) {
        std::vector<range> between;
        index_t next = 0;
        for (index_t const n : numbers) {
            if (n >= all) break;
            if (n > next) between.push_back({next, n});
            next = n + 1;
        }
        if (next < all) between.push_back({next, all});
        return between;
    }
    static std::string numbers_of(range numbers) {
        return std::to_string(numbers.first) + (numbers.size() > 1 ? " to " + std::to_string(numbers.last - 1) : "");
    }

    /// Compares output layers that are copies of embeddings with these, where other ranks have them.
    void check_tied() {
        if (!sizes_.tied) return;
        for (auto const& [name, weight] : weights_) {
            auto const root = parse_parameter_name(name).root;
            if (std::string_view(name).substr(root) != "output_layer.weight") continue;
            auto const source = name.substr(0, root) + "embedding.word_embeddings.weight";
            std::map<int, std::vector<std::pair<audit_owner, audit_record const*>>> shares;
            for (auto const& from : {source, name}) {
                auto const stages = stages_of(from, parse_parameter_name(from), names_.owner(from));
                for (auto const& c : cells_)
                    if (auto const* const record = find(c, from); record && stages.contains(c.pp))
                        shares[weight.divided ? c.tp : 0].push_back({{c, stages.at(c.pp)}, record});
            }
            for (auto const& [share, copies] : shares) compare(name, share, copies, source);
        }
    }

    static std::string form(safetensors::dtype dtype, std::vector<index_t> const& shape) {
        std::string text(safetensors::name_of(dtype));
        for (auto const& n : shape) text += (&n == shape.data() ? " " : "x") + std::to_string(n);
        return text;
    }

    shard_sizes const& sizes_;
    shard_weights const& weights_;
    naming names_;
    std::vector<shard_cell> cells_;
    std::map<shard_cell, tensors> held_;
    std::map<layer_place, audit_layer> layers_;
    std::map<layer_place, checksum64> sums_;
    audit_report report_;
};

} // namespace detail

/// Holds shards, one of each cell of the mesh, against the model's weights. The shards may come in any order.
///
/// The union is complete where every cell has the weights that it owns: those of its stage, of experts those of its ep.
/// It is disjoint where no cell has any others, so that every share of a weight is at its owners only. What several own
/// is equal, by its checksum.
///
/// Throws `cpx::error` for sizes that make no mesh, no pipeline or no shares of the experts.
inline audit_report audit(shard_sizes const& sizes, shard_weights const& weights,
                          std::vector<audit_shard> const& shards, caller here = caller::here()) {
    return detail::auditor(sizes, weights, shards, here).report();
}

} // namespace cpx
