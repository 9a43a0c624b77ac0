// SPDX-License-Identifier: Apache-2.0
// Whether the parallelism of a training configuration divides its model.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/config_conflict.hpp>
#include <cpx/model/config_report.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/pipeline.hpp>
#include <cpx/model/setting.hpp>
#include <cpx/model/train_config.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cpx::detail {

/// Returns the side with a product of two sizes.
inline config_side product_of(setting<index_t> const& a, config_side const& b) {
    auto const times = " * " + b.field;
    return {a.file(), a.key() + times, a.value_or(1) * b.value.get<index_t>(), a.source() + times};
}

/// Notes a mismatch unless `few` divides `many`.
inline void expect_multiple(config_report& report, setting<index_t> const& many, config_side few) {
    if (!many.has_value()) return;
    auto const expected = "a multiple of " + few.value.dump();
    bool const holds = *many % few.value.get<index_t>() == 0;
    report.expect(holds, side_of(many), std::move(few), expected);
}

/// Returns over how many ranks context parallelism divides heads, which is in `value`; notes what is wrong with it.
inline config_side ranks_of_heads(config_report& report, train_config const& t) {
    index_t const cp = t.context_parallel_size.value_or(1);
    auto const cp_side = side_of(t.context_parallel_size, cp);
    config_side found{t.where, "1", 1, ""};
    if (cp == 1 || !t.cp_comm_type.has_value()) return found;
    auto const& types = *t.cp_comm_type;
    if (types.size() != 1 && t.num_layers.has_value())
        report.expect(std::ssize(types) == *t.num_layers, side_of(t.cp_comm_type, std::ssize(types)),
                      side_of(t.num_layers), "one, or one a layer");
    auto const sizes = t.hierarchical_context_parallel_sizes.value_or({});
    bool two_levels = false;
    for (std::size_t i = 0; i < types.size(); ++i) {
        auto const& type = types[i];
        if (type == "a2a") found = cp_side;
        if (type == "a2a+p2p") two_levels = true;
        if (type == "a2a" || type == "p2p" || type == "allgather" || type == "all_gather" || type == "a2a+p2p")
            continue;
        report.expect(false, side_of(t.cp_comm_type, type), cp_side, "p2p, a2a, allgather or a2a+p2p");
        break;
    }
    if (!two_levels) return found;
    // In double, in which no product of sizes wraps.
    double product = 1;
    for (auto const size : sizes) product *= static_cast<double>(size > 0 ? size : 0);
    bool const fits = sizes.size() == 2 && product == static_cast<double>(cp);
    report.expect(fits, side_of(t.hierarchical_context_parallel_sizes), cp_side,
                  "two sizes with this product, for a2a+p2p");
    if (fits && found.value == 1) {
        found = side_of(t.hierarchical_context_parallel_sizes, sizes[0]);
        found.source += ".0";
    }
    return found;
}

inline void check_division(config_report& report, hf_config const& c, train_config const& t) {
    auto const ulysses = ranks_of_heads(report, t);
    auto const tp = side_of(t.tensor_model_parallel_size, t.tensor_model_parallel_size.value_or(1));
    auto const over = ulysses.value == 1 ? tp : product_of(t.tensor_model_parallel_size, ulysses);
    auto const stated = [](setting<index_t> const& hf, setting<index_t> const& train) {
        return hf.has_value() ? hf : train;
    };
    expect_multiple(report, stated(c.num_attention_heads, t.num_attention_heads), over);
    expect_multiple(report, stated(c.num_key_value_heads, t.num_query_groups), over);
    if (c.family.linear) {
        expect_multiple(report, stated(c.linear_num_key_heads, t.linear_num_key_heads), over);
        expect_multiple(report, stated(c.linear_num_value_heads, t.linear_num_value_heads), over);
    }
    expect_multiple(report, t.padded_vocab_size, tp);
    if (auto const& ep = t.expert_model_parallel_size; c.moe() && ep.has_value())
        expect_multiple(report, stated(c.num_experts, t.num_experts), side_of(ep));
    else if (ep.has_value())
        report.expect(*ep == 1, side_of(ep),
                      {c.where, "num_experts", 0, c.family.experts ? c.num_experts.source() : c.model_type.source()},
                      "1, for a model without experts");
    index_t const cp = t.context_parallel_size.value_or(1);
    if (cp == 1) return;                 // which needs no even number of chunks
    if (!t.allgather_cp.value_or(false)) // zigzag: two chunks a rank
        expect_multiple(report, t.seq_length, product_of(t.context_parallel_size, {t.where, "2", 2, "2"}));
    if (c.multimodal()) { // ranks have different numbers of tokens that count, and features are summed over them
        auto const cause = side_of(t.context_parallel_size);
        report.expect(t.calculate_per_token_loss.value_or(false), side_of(t.calculate_per_token_loss), cause,
                      "true, for a model with a vision tower and context_parallel_size > 1");
    }
}

/// Returns the layers that a pipeline divides, with what counts as one of them.
inline index_t counted_layers(train_config const& t, index_t layers) {
    return layers + t.account_for_embedding_in_pipeline_split.value_or(false) +
           t.account_for_loss_in_pipeline_split.value_or(false);
}

/// Returns how many chunks of layers a rank has by each of the arguments that say it, with the side that does: the
/// first counts, and others must not say otherwise.
inline std::vector<std::pair<index_t, config_side>> stated_chunks(train_config const& t, index_t layers) {
    std::vector<std::pair<index_t, config_side>> all;
    for (auto const* count : {&t.virtual_pipeline_model_parallel_size, &t.num_virtual_stages_per_pipeline_rank})
        if (count->has_value()) all.emplace_back(**count, side_of(*count));
    if (auto const& each = t.num_layers_per_virtual_pipeline_stage; each.has_value())
        all.emplace_back(
            std::max<index_t>(1, counted_layers(t, layers) / t.pipeline_model_parallel_size.value_or(1) / *each),
            side_of(each));
    return all;
}

/// Returns how the configuration splits its layers over a pipeline.
inline pipeline_sizes pipeline_sizes_of(hf_config const& c, train_config const& t) {
    pipeline_sizes sizes;
    sizes.layers = t.num_layers.value_or(c.num_hidden_layers.value_or(0));
    index_t const ranks = t.pipeline_model_parallel_size.value_or(1);
    sizes.ranks = static_cast<int>(ranks);
    auto const chunks = stated_chunks(t, sizes.layers);
    sizes.chunks = chunks.empty() ? 1 : static_cast<int>(chunks.front().first);
    sizes.first = t.decoder_first_pipeline_num_layers.optional();
    sizes.last = t.decoder_last_pipeline_num_layers.optional();
    sizes.account_for_embedding = t.account_for_embedding_in_pipeline_split.value_or(false);
    sizes.account_for_loss = t.account_for_loss_in_pipeline_split.value_or(false);
    if (t.mtp_num_layers.has_value() || !c.family.predicts)
        sizes.mtp = t.mtp_num_layers.value_or(0);
    else
        sizes.mtp = t.mtp_num_layers.null() ? 0 : c.mtp_num_hidden_layers.optional();
    sizes.layout = t.pipeline_model_parallel_layout.optional();
    return sizes;
}

/// Returns what a refused pipeline is at odds with: the side that says what was refused, such as how many chunks there
/// are or layers of multi-token prediction; else the one that says how many layers.
inline config_side side_of_refusal(error const& refused, hf_config const& c, train_config const& t,
                                   setting<index_t> const& layers) {
    auto const chunks = stated_chunks(t, layers.value_or(0));
    if (refused.problem() == "chunks" && !chunks.empty()) return chunks.front().second;
    if (refused.problem() == "stages of the layout") return side_of(t.pipeline_model_parallel_size);
    if (refused.problem() == "first") return side_of(t.decoder_first_pipeline_num_layers);
    if (refused.problem() == "last") return side_of(t.decoder_last_pipeline_num_layers);
    if (refused.problem() != pipeline::mtp_of_layout) return side_of(layers);
    if (t.mtp_num_layers.has_value() || t.mtp_num_layers.null()) return side_of(t.mtp_num_layers);
    if (c.family.predicts) return side_of(c.mtp_num_hidden_layers);
    return {c.where, c.mtp_num_hidden_layers.key(), 0, c.model_type.source()};
}

inline void check_stages(config_report& report, hf_config const& c, train_config const& t) {
    bool const by_layout = t.pipeline_model_parallel_layout.has_value();
    auto const& layers = t.num_layers.has_value() ? t.num_layers : c.num_hidden_layers;
    auto const& each = t.num_layers_per_virtual_pipeline_stage;
    if (auto const chunks = stated_chunks(t, layers.value_or(0)); !chunks.empty())
        for (auto other = chunks.begin() + 1; other != chunks.end(); ++other)
            if (layers.has_value() || other->second.field != each.key())
                report.expect(other->first == chunks.front().first, chunks.front().second, other->second,
                              std::to_string(other->first) +
                                  (other->second.field == each.key() ? " chunks of so many layers of a rank" : ""));
    bool const uneven =
        t.decoder_first_pipeline_num_layers.has_value() || t.decoder_last_pipeline_num_layers.has_value();
    if (t.pipeline_model_parallel_size.value_or(1) == 1 && !by_layout && !uneven) return;
    if (!layers.has_value()) return;
    auto const split = by_layout ? side_of(t.pipeline_model_parallel_layout)
                                 : side_of(t.pipeline_model_parallel_size, t.pipeline_model_parallel_size.value_or(1));
    if (each.has_value()) {
        auto const ranks = side_of(t.pipeline_model_parallel_size, t.pipeline_model_parallel_size.value_or(1));
        auto const all = product_of(each, ranks);
        index_t const count = counted_layers(t, *layers);
        report.expect(count % all.value.get<index_t>() == 0, side_of(layers, count), all,
                      "a multiple of " + all.value.dump());
    }
    try {
        pipeline const stages(pipeline_sizes_of(c, t));
        ++report.compared;
        if (!c.multimodal() || c.deepstack_layers() == 0) return;
        auto const& first = stages.stages().front().layers;
        report.expect(c.deepstack_layers() <= first.size(), side_of(c.deepstack_visual_indexes, c.deepstack_layers()),
                      split, "at most the layers of the first stage, " + std::to_string(first.size()));
    } catch (error const& refused) { // what Megatron refuses, too
        report.expect(false, split, side_of_refusal(refused, c, t, layers),
                      "a pipeline whose " + refused.problem() + " is " + refused.expected() + ", not " + refused.got());
    }
}

inline void check_parallel(config_report& report, hf_config const& c, train_config const& t) {
    check_division(report, c, t);
    check_stages(report, c, t);
}

} // namespace cpx::detail
