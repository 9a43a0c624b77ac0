// SPDX-License-Identifier: Apache-2.0
// Which layers of a model each rank of a pipeline has, under every split that Megatron knows.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/pipeline_layout.hpp>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cpx {

/// How decoder layers are split over a pipeline. Megatron's argument stands behind each.
struct pipeline_sizes {
    index_t layers = 0;                 ///< decoder layers in all: num_layers
    int ranks = 1;                      ///< pipeline_model_parallel_size
    int chunks = 1;                     ///< of a rank: virtual_pipeline_model_parallel_size
    std::optional<index_t> first{};     ///< layers of the first rank: num_layers_in_first_pipeline_stage
    std::optional<index_t> last{};      ///< of the last: num_layers_in_last_pipeline_stage
    bool account_for_embedding = false; ///< the embedding counts as a layer: account_for_embedding_in_pipeline_split
    bool account_for_loss = false;      ///< so does the loss: account_for_loss_in_pipeline_split
    std::optional<index_t> mtp{};       ///< layers of multi-token prediction, in the last stage: mtp_num_layers
    /// In place of first, last and accounts, what stands in which stage: pipeline_model_parallel_layout. It says how
    /// many chunks there are, and where mtp is; see `unroll_pipeline_layout`.
    std::optional<std::string> layout{};
};

/// What one chunk of one pipeline rank has.
struct pipeline_stage {
    range layers{};         ///< of the model's decoder layers
    index_t mtp = 0;        ///< layers of multi-token prediction, all of the model's or none
    bool embedding = false; ///< has the embedding
    bool loss = false;      ///< has the loss, and before it the last norm and the output layer
    friend constexpr bool operator==(pipeline_stage const&, pipeline_stage const&) = default;
};

/// Where a decoder layer of the model is, and its number there.
struct pipeline_place {
    int rank = 0, chunk = 0;
    index_t layer = 0; ///< of the stage
    friend constexpr bool operator==(pipeline_place const&, pipeline_place const&) = default;
};

/// The stages of a pipeline: every decoder layer of the model is in one of them.
///
/// Stages follow one another through all ranks of a chunk before the next chunk begins. A pipeline of one rank has all
/// layers in one stage, whatever its chunks: Megatron does not divide them, and numbers every chunk from 0.
///
/// Source: Megatron-LM, get_transformer_layer_offset and get_num_layers_to_build of megatron/core/transformer.
class pipeline {
public:
    static constexpr index_t most_stages = 65536, most_layers = 1'000'000;
    /// What errors call a layout's m's that are too few, too many, or not where Megatron wants them.
    static constexpr char const* mtp_of_layout = "layers of mtp (m) of the layout";

    /// Throws `cpx::error` where Megatron refuses sizes: those that do not divide, accounts beside first or last, and
    /// layouts that do not have E first and L last, each once, as many stages for every rank, m behind every t and in
    /// one last chunk.
    explicit pipeline(pipeline_sizes const& sizes, caller here = caller::here())
        : ranks_(sizes.ranks), chunks_(sizes.chunks) {
        require(ranks_ >= 1, "pipeline", "ranks", "at least 1", ranks_, here);
        require(chunks_ >= 1, "pipeline", "chunks", "at least 1", chunks_, here);
        require(
            index_t{ranks_} * chunks_ <= most_stages, "pipeline", "ranks times chunks",
            [] { return "at most " + std::to_string(most_stages); }, index_t{ranks_} * chunks_, here);
        require(
            sizes.layers >= 1 && sizes.layers <= most_layers, "pipeline", "layers",
            [] { return "1 to " + std::to_string(most_layers); }, sizes.layers, here);
        require(
            !sizes.mtp || (*sizes.mtp >= 0 && *sizes.mtp <= most_layers), "pipeline", "mtp",
            [] { return "0 to " + std::to_string(most_layers); }, sizes.mtp.value_or(0), here);
        if (sizes.layout)
            read(sizes, here);
        else
            divide(sizes, here);
    }

    int ranks() const { return ranks_; }
    /// Returns how many chunks of layers a rank has, also where there is one rank and they are one stage.
    int chunks() const { return chunks_; }
    /// Returns the model's decoder layers.
    index_t layers() const { return stages_.back().layers.last; }
    /// Returns the stages in the order of their layers: stage i is chunk i / ranks of rank i % ranks.
    std::vector<pipeline_stage> const& stages() const { return stages_; }

    /// Returns what a chunk of a rank has.
    pipeline_stage const& stage(int rank, int chunk = 0, caller here = caller::here()) const {
        require(
            rank >= 0 && rank < ranks_, "pipeline", "rank", [&] { return "0 to " + std::to_string(ranks_ - 1); }, rank,
            here);
        require(
            chunk >= 0 && chunk < chunks_, "pipeline", "chunk", [&] { return "0 to " + std::to_string(chunks_ - 1); },
            chunk, here);
        return stages_[static_cast<std::size_t>(chunks_of_rank() == 1 ? rank : index_t{chunk} * ranks_ + rank)];
    }
    /// Returns what is added to the number of a layer there.
    index_t offset(int rank, int chunk = 0, caller here = caller::here()) const {
        return stage(rank, chunk, here).layers.first;
    }
    /// Returns where a layer of the model is.
    pipeline_place find(index_t layer, caller here = caller::here()) const {
        require(
            layer >= 0 && layer < layers(), "pipeline", "layer", [&] { return "0 to " + std::to_string(layers() - 1); },
            layer, here);
        auto const at = std::ranges::upper_bound(stages_, layer, {}, [](auto const& s) { return s.layers.last; });
        int const i = static_cast<int>(at - stages_.begin());
        return {i % ranks_, i / ranks_, layer - at->layers.first};
    }

private:
    /// Layers of one chunk of the first rank, of the last, and of each between them.
    struct split {
        index_t first = 0, middle = 0, last = 0;
    };

    int chunks_of_rank() const { return ranks_ == 1 ? 1 : chunks_; }

    void divide(pipeline_sizes const& sizes, caller here) {
        split const found = sizes.first || sizes.last ? uneven(sizes, here) : even(sizes, here);
        index_t next = 0;
        for (int chunk = 0; chunk < chunks_of_rank(); ++chunk)
            for (int rank = 0; rank < ranks_; ++rank) {
                bool const begins = chunk == 0 && rank == 0, ends = chunk == chunks_of_rank() - 1 && rank == ranks_ - 1;
                index_t count = rank == 0 ? found.first : rank == ranks_ - 1 ? found.last : found.middle;
                count -= (begins && sizes.account_for_embedding) + (ends && sizes.account_for_loss);
                stages_.push_back({{next, next + count}, ends ? sizes.mtp.value_or(0) : 0, begins, ends});
                next += count;
            }
    }
    void read(pipeline_sizes const& sizes, caller here) {
        require(!sizes.first && !sizes.last && !sizes.account_for_embedding && !sizes.account_for_loss, "pipeline",
                "layout", "none beside first, last, or accounts for embedding and loss", "both", here);
        std::string const signs = unroll_pipeline_layout(*sizes.layout, here);
        auto const count = [&](char sign) { return static_cast<index_t>(std::ranges::count(signs, sign)); };
        auto const all = [&](char const* what, char sign, index_t wanted) {
            require(count(sign) == wanted, "pipeline", what, wanted, count(sign), here);
        };
        index_t const stages = count('|') + 1;
        require(
            stages % ranks_ == 0, "pipeline", "stages of the layout",
            [&] { return "a multiple of the ranks = " + std::to_string(ranks_); }, stages, here);
        index_t const chunks = stages / ranks_;
        require(
            chunks_ == 1 || chunks_ == chunks, "pipeline", "chunks",
            [&] { return "as in the layout, " + std::to_string(chunks); }, chunks_, here);
        require(ranks_ > 1 || chunks == 1, "pipeline", "stages of the layout",
                "1 on one rank, where Megatron numbers the layers of every chunk from 0", stages, here);
        chunks_ = static_cast<int>(chunks);
        auto const sign = [&](std::size_t at) { return signs.empty() ? "nothing" : quote(signs.substr(at, 1)); };
        require(
            signs.starts_with('E'), "pipeline", "first sign of the layout", "E", [&] { return sign(0); }, here);
        require(
            signs.ends_with('L'), "pipeline", "last sign of the layout", "L", [&] { return sign(signs.size() - 1); },
            here);
        all("embeddings (E) of the layout", 'E', 1);
        all("losses (L) of the layout", 'L', 1);
        all("layers (t) of the layout", 't', sizes.layers);
        if (sizes.mtp) all(mtp_of_layout, 'm', *sizes.mtp);
        std::size_t const mtp = signs.find('m');
        require(mtp == std::string::npos || mtp > signs.rfind('t'), "pipeline", mtp_of_layout, "behind every t",
                "one before", here);
        pipeline_stage stage;
        for (char const c : signs + '|') {
            stage.layers.last += c == 't';
            stage.mtp += c == 'm';
            stage.embedding = stage.embedding || c == 'E';
            stage.loss = stage.loss || c == 'L';
            if (c != '|') continue;
            require(stage.mtp == 0 || stage.mtp == count('m'), "pipeline", mtp_of_layout, "all in one stage", "several",
                    here);
            require(
                stage.mtp == 0 || static_cast<index_t>(stages_.size()) >= stages - ranks_, "pipeline",
                "layers of mtp (m) of the layout", "in the last chunk of a rank",
                [&] { return "chunk " + std::to_string(static_cast<index_t>(stages_.size()) / ranks_); }, here);
            stages_.push_back(stage);
            stage = {{stage.layers.last, stage.layers.last}};
        }
    }
    /// Returns `all` / `by`, which must be whole.
    static index_t share(char const* what, index_t all, char const* by, index_t count, caller here) {
        require(
            all >= 0 && all % count == 0, "pipeline", what,
            [&] {
                return std::string(all < 0 ? "not negative, " : "") + "a multiple of " + by + " = " +
                       std::to_string(count);
            },
            all, here);
        return all / count;
    }
    split even(pipeline_sizes const& sizes, caller here) const {
        bool const accounts = sizes.account_for_embedding || sizes.account_for_loss;
        index_t const all = sizes.layers + sizes.account_for_embedding + sizes.account_for_loss;
        index_t const of_rank =
            share(accounts ? "layers, with what counts as one" : "layers", all, "ranks", ranks_, here);
        index_t const each = share("layers of a rank", of_rank, "chunks", chunks_of_rank(), here);
        return {each, each, each};
    }
    split uneven(pipeline_sizes const& sizes, caller here) const {
        require(!sizes.account_for_embedding && !sizes.account_for_loss, "pipeline", "accounts for embedding and loss",
                "none beside first or last", "one", here);
        auto const chunk = [&](char const* what, index_t all) {
            return share(what, all, "chunks", chunks_of_rank(), here);
        };
        for (auto const& [given, name] : {std::pair{sizes.first, "first"}, std::pair{sizes.last, "last"}}) {
            if (!given) continue;
            require(
                *given >= 1 && *given <= sizes.layers, "pipeline", name,
                [&] { return "1 to the " + std::to_string(sizes.layers) + " layers"; }, *given, here);
            chunk(name, *given);
        }
        int const others = ranks_ - sizes.first.has_value() - sizes.last.has_value();
        require(others >= 0, "pipeline", "ranks", "2 for first and last", ranks_, here);
        index_t const left = sizes.layers - sizes.first.value_or(0) - sizes.last.value_or(0);
        require(left >= 0 && (left == 0 || others > 0), "pipeline", "layers besides first and last",
                others > 0 ? "not negative" : "0, for no rank is left", left, here);
        if (ranks_ == 1) return {sizes.layers, 0, 0};
        index_t const of_rank =
            others == 0 ? 0 : share("layers besides first and last", left, "ranks left", others, here);
        index_t const middle = chunk("layers of a rank between first and last", of_rank);
        return {sizes.first ? *sizes.first / chunks_of_rank() : middle, middle,
                sizes.last ? *sizes.last / chunks_of_rank() : middle};
    }

    int ranks_ = 1, chunks_ = 1;
    std::vector<pipeline_stage> stages_;
};

} // namespace cpx
