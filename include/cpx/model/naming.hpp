// SPDX-License-Identifier: Apache-2.0
// Names of parameters: the model's, and those that each rank of a job gives to what it has.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/mesh/mesh.hpp>
#include <cpx/model/parameter_name.hpp>
#include <cpx/model/pipeline.hpp>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cpx {

/// One expert in a buffer of all experts of a rank: element (r, c) of its weight stands at `first + c * rows + r`.
///
/// The buffer, whatever its shape says, holds one expert after the other, each transposed.
struct expert_view {
    std::string name; ///< of its weight, in the model
    index_t first = 0, rows = 0, columns = 0;
    index_t place(index_t row, index_t column) const { return first + column * rows + row; }
};

/// Who has a parameter of the model, and under which name. What is not set does not matter or is not known.
struct parameter_owner {
    std::string name;                      ///< there
    std::optional<pipeline_place> stage{}; ///< pipeline rank and chunk; and of a decoder layer its number there
    std::optional<int> ep{};               ///< of an expert, the coordinate of its ranks on ep
};

/// Names of parameters under pipeline and expert parallelism.
///
/// A rank counts the decoder layers of each of its chunks from 0, and the experts of a layer. The model's number of a
/// layer is the rank's and the first layer of the stage; its number of an expert is the rank's and the first expert of
/// the rank, also where there is no pipeline. Nothing else changes in a name. Layers of multi-token prediction and of
/// vision towers have the same numbers everywhere; routers, shared experts, adapters and quantizers are the same on all
/// ranks of ep; names of which nothing is known (see `parse_parameter_name`) stay as they are.
class naming {
public:
    static constexpr index_t most_experts = 1'000'000;

    /// `experts` of a layer, 0 of dense models. Throws `cpx::error` unless ep divides them, and if the pipeline has
    /// other ranks than the mesh.
    naming(mesh const& all, pipeline stages, index_t experts, caller here = caller::here())
        : mesh_(all), pipeline_(std::move(stages)), experts_(experts) {
        require(
            pipeline_.ranks() == mesh_.size(axis::pp), "naming", "ranks of the pipeline",
            [&] { return "the mesh's pp = " + std::to_string(mesh_.size(axis::pp)); }, pipeline_.ranks(), here);
        require(
            experts >= 0 && experts <= most_experts, "naming", "experts",
            [] { return "0 to " + std::to_string(most_experts); }, experts, here);
        of_rank_ = mesh_.experts(experts, 0, here).size();
    }

    cpx::mesh const& ranks() const { return mesh_; }
    cpx::pipeline const& stages() const { return pipeline_; }
    index_t experts() const { return experts_; }
    /// Returns how many experts of a layer a rank has.
    index_t experts_of_rank() const { return of_rank_; }

    /// Returns the model's name of a parameter that a world rank has in one of its chunks.
    ///
    /// Throws `cpx::error` if the stage has no such layer, the rank no such expert, and for a buffer of experts, which
    /// is no parameter of the model: see `split_experts`.
    std::string global(std::string_view name, int world_rank, int chunk = 0, caller here = caller::here()) const {
        parameter_name const known = parse_parameter_name(name);
        require(
            known.form != expert_form::buffer, "naming", "name",
            "one parameter, not a buffer of experts (split_experts)", [&] { return quote(name); }, here);
        return renumbered(name, known, layer_in_model(name, known, world_rank, chunk, here),
                          expert_in_model(name, known, world_rank, here));
    }

    /// Returns the name that a world rank gives, in one of its chunks, to a parameter of the model; or nothing if its
    /// layer is in another stage, or its expert on another rank.
    ///
    /// Throws `cpx::error` if the model has no such layer or expert. A name without a layer and an expert
    /// is taken for this rank's: whose it is, `owner` says.
    std::optional<std::string> local(std::string_view name, int world_rank, int chunk = 0,
                                     caller here = caller::here()) const {
        int const rank = mesh_.coordinate(axis::pp, world_rank, here),
                  ep = mesh_.coordinate(axis::ep, world_rank, here);
        pipeline_stage const& stage = pipeline_.stage(rank, chunk, here);
        parameter_name const known = parse_parameter_name(name);
        parameter_owner const of = owner(name, known, here);
        if (known.family == name_family::decoder && !in(stage.layers, known.layer->value)) return {};
        if (of.ep && *of.ep != ep) return {};
        return of.name;
    }

    /// Returns who has a parameter of the model.
    ///
    /// Layers of multi-token prediction are where the pipeline says, else in the last stage; with them in the pipeline
    /// the last norm is behind the last layer, else with the loss. Vision towers and embeddings are in the first stage:
    /// where Megatron has other copies of an embedding, this is the first.
    parameter_owner owner(std::string_view name, caller here = caller::here()) const {
        return owner(name, parse_parameter_name(name), here);
    }

    /// Returns the experts in a buffer of a world rank, `experts.weight1` or `experts.weight2`, of so many rows and
    /// columns: names of their weights in the model, `experts.linear_fc1.weightN` or of linear_fc2, and where they are.
    ///
    /// weight1 is [hidden, experts of the rank * outputs] and has experts [hidden, outputs], one after the other;
    /// weight2 is [experts of the rank * inputs, hidden] and has [inputs, hidden]. The model's weights are transposed.
    /// Source: Megatron-LM, GroupedMLP of megatron/core/transformer/moe/experts.py, which later versions do not have.
    std::vector<expert_view> split_experts(std::string_view name, index_t rows, index_t columns, int world_rank,
                                           int chunk = 0, caller here = caller::here()) const {
        parameter_name const known = parse_parameter_name(name);
        require(
            known.form == expert_form::buffer, "naming", "name",
            "a buffer of experts: it ends with experts.weight1 or experts.weight2", [&] { return quote(name); }, here);
        require(of_rank_ > 0, "naming", "experts", "some, for a buffer of them", "a model without", here);
        bool const outer = name.ends_with('1');
        char const* const what = outer ? "columns of a buffer weight1" : "rows of a buffer weight2";
        require(
            rows >= 0 && columns >= 0, "naming", "shape of a buffer of experts", "not negative",
            [&] { return std::to_string(rows) + " x " + std::to_string(columns); }, here);
        index_t const divided = outer ? columns : rows;
        require(
            divided % of_rank_ == 0, "naming", what,
            [&] { return "a multiple of the rank's experts = " + std::to_string(of_rank_); }, divided, here);
        require(
            rows == 0 || columns <= std::numeric_limits<index_t>::max() / rows, "naming",
            "shape of a buffer of experts", "one of at most 2^63 - 1 elements",
            [&] { return std::to_string(rows) + " x " + std::to_string(columns); }, here);
        std::string const stem = renumbered(name, known, layer_in_model(name, known, world_rank, chunk, here), {});
        index_t const first = mesh_.experts(experts_, world_rank, here).first;
        std::vector<expert_view> found;
        for (index_t e = 0; e < of_rank_; ++e)
            found.push_back({stem.substr(0, stem.size() - 7) + (outer ? "linear_fc1" : "linear_fc2") + ".weight" +
                                 std::to_string(first + e),
                             e * (rows * columns / of_rank_), outer ? columns / of_rank_ : columns,
                             outer ? rows : rows / of_rank_});
        return found;
    }

private:
    static constexpr char const* no_experts = " in a model without experts";

    static bool in(range numbers, index_t n) { return numbers.first <= n && n < numbers.last; }
    static std::string numbers(range of) {
        return of.empty() ? "none" : std::to_string(of.first) + " to " + std::to_string(of.last - 1);
    }
    /// Throws unless the number of a layer or an expert is one of those that there are.
    static void require_in(char const* what, std::string_view name, name_number const& number, range all,
                           std::string const& whose, caller here) {
        if (!in(all, number.value))
            throw error("naming", what + (" of " + quote(name)), numbers(all) + whose,
                        std::string(name.substr(number.begin, std::min(number.end - number.begin, std::size_t{20}))),
                        here);
    }

    std::optional<index_t> layer_in_model(std::string_view name, parameter_name const& known, int world_rank, int chunk,
                                          caller here) const {
        int const rank = mesh_.coordinate(axis::pp, world_rank, here);
        range const own = pipeline_.stage(rank, chunk, here).layers;
        if (known.family != name_family::decoder) return {};
        require_in("layer", name, *known.layer, {0, own.size()},
                   " of pipeline rank " + std::to_string(rank) +
                       (pipeline_.chunks() > 1 ? ", chunk " + std::to_string(chunk) : ""),
                   here);
        return known.layer->value + own.first;
    }
    std::optional<index_t> expert_in_model(std::string_view name, parameter_name const& known, int world_rank,
                                           caller here) const {
        range const own = mesh_.experts(experts_, world_rank, here);
        if (!known.expert) return {};
        require_in("expert", name, *known.expert, {0, own.size()}, experts_ == 0 ? no_experts : " of a rank", here);
        return known.expert->value + own.first;
    }
    /// Returns a name with other numbers, where they are given.
    static std::string renumbered(std::string_view name, parameter_name const& known, std::optional<index_t> layer,
                                  std::optional<index_t> expert) {
        std::string text(name);
        auto const put = [&](std::optional<index_t> value, name_number const& at) {
            if (value) text.replace(at.begin, at.end - at.begin, std::to_string(*value));
        };
        if (known.expert) put(expert, *known.expert); // behind the layer, whose place stays
        if (known.layer) put(layer, *known.layer);
        return text;
    }
    parameter_owner owner(std::string_view name, parameter_name const& known, caller here) const {
        require(
            known.form != expert_form::buffer, "naming", "name",
            "a parameter of the model, not a rank's buffer of experts", [&] { return quote(name); }, here);
        parameter_owner found;
        std::optional<index_t> layer, expert;
        if (known.family == name_family::decoder) {
            require_in("layer", name, *known.layer, {0, pipeline_.layers()}, " of the model", here);
            found.stage = pipeline_.find(known.layer->value, here);
            layer = found.stage->layer;
        } else {
            found.stage = stage_of(known.family);
        }
        if (known.expert) {
            require_in("expert", name, *known.expert, {0, experts_}, experts_ == 0 ? no_experts : " of the model",
                       here);
            found.ep = static_cast<int>(known.expert->value / of_rank_);
            expert = known.expert->value % of_rank_;
        }
        found.name = renumbered(name, known, layer, expert);
        return found;
    }
    std::optional<pipeline_place> stage_of(name_family family) const {
        auto const& stages = pipeline_.stages();
        auto const place = [&](auto const& holds) -> std::optional<pipeline_place> {
            auto const at = std::ranges::find_if(stages, holds) - stages.begin();
            return pipeline_place{static_cast<int>(at % pipeline_.ranks()), static_cast<int>(at / pipeline_.ranks()),
                                  0};
        };
        auto const mtp = [](auto const& stage) { return stage.mtp > 0; };
        auto const loss = [](auto const& stage) { return stage.loss; };
        bool const known = std::ranges::any_of(stages, mtp);
        switch (family) {
        case name_family::embedding:
        case name_family::vision: return place([](auto const& stage) { return stage.embedding; });
        case name_family::mtp: return known ? place(mtp) : place(loss);
        case name_family::final_norm:
            return known ? place([&](auto const& stage) { return stage.layers.last == pipeline_.layers(); })
                         : place(loss);
        case name_family::output: return place(loss);
        default: return {};
        }
    }

    mesh mesh_;
    pipeline pipeline_;
    index_t experts_ = 0, of_rank_ = 0;
};

} // namespace cpx
