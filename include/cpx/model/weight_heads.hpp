// SPDX-License-Identifier: Apache-2.0
// Which share of a weight belongs to the heads that a rank of context parallelism has.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/model/weight_share.hpp>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

namespace cpx {

namespace detail {

/// Makes the share of a weight that belongs to some heads, section by section.
class weight_of_heads {
public:
    weight_of_heads(weight_rule const& rule, weight_sizes const& sizes, group_rank tp, group_rank cp, caller here)
        : rule_(rule), s_(sizes), tp_(rule.form == weight_form::whole ? group_rank{} : tp), cp_(cp) {
        for (auto const& [what, g] : {std::pair{"ranks of tp", tp}, std::pair{"ranks of cp", cp}}) {
            require(g.ranks >= 1, "head_share_of", what, "at least 1", g.ranks, here);
            require(
                g.rank >= 0 && g.rank < g.ranks, "head_share_of", what,
                [ranks = g.ranks] { return "one of rank 0 to " + std::to_string(ranks - 1); }, g.rank, here);
        }
        bool const linear = rule.place == weight_place::linear_attention;
        most_ = linear ? s_.linear_num_value_heads : s_.num_attention_heads;
        fewest_ = linear ? s_.linear_num_key_heads : s_.num_key_value_heads;
        by_heads_ = linear || rule.place == weight_place::full_attention;
        if (by_heads_)
            require(
                fewest_ % tp_.ranks == 0, "head_share_of", "key heads",
                [&] { return "a multiple of the " + std::to_string(tp_.ranks) + " ranks of tp"; }, fewest_, here);
    }

    weight_share find() {
        auto const first_shape = shape_of(rule_.from[0], s_);
        share_.columns = {0, weight_columns(first_shape)};
        share_.replicated = true;
        for (std::size_t i = 0; i < rule_.sources(); ++i) {
            auto const& shape = rule_.from[i].shape;
            if (!by_heads_ || !rows(i, shape[0])) add(i, {0, weight_rows(shape_of(rule_.from[i], s_))});
        }
        weight_extent const last = rule_.from[0].shape[1];
        if (by_heads_ && (last == weight_extent::attention || last == weight_extent::linear_z)) {
            index_t const width = last == weight_extent::attention ? s_.head_dim : s_.linear_value_head_dim;
            range const own = heads(most_);
            share_.columns = {own.first * width, own.last * width};
            share_.replicated = false;
        }
        return std::move(share_);
    }

private:
    /// Returns the rank's heads, of so many in the model: of those that its rank of tp has, the ones that
    /// `head_sharded` gives it.
    range heads(index_t all) const {
        index_t const local = all / tp_.ranks, groups = most_ / tp_.ranks;
        index_t const first = groups * cp_.rank / cp_.ranks,
                      last = std::max(first + 1, groups * (cp_.rank + 1) / cp_.ranks);
        return {tp_.rank * local + first * local / groups, tp_.rank * local + (last * local + groups - 1) / groups};
    }
    void add(std::size_t source, range rows) {
        auto& blocks = share_.blocks;
        if (rows.empty()) return;
        if (!blocks.empty() && blocks.back().source == source && blocks.back().rows.last == rows.first)
            blocks.back().rows.last = rows.last;
        else
            blocks.push_back({source, rows});
    }
    /// Adds the rows of the rank's heads, each `width` rows `stride` apart; of `group` heads there is one stride.
    void add_heads(std::size_t source, index_t all, index_t first, index_t width, index_t stride, index_t group = 1) {
        range const own = heads(all);
        for (index_t h = own.first; h < own.last; ++h) {
            index_t const row = first + h / group * stride + h % group * width;
            add(source, {row, row + width});
        }
        share_.replicated = false;
    }
    /// Adds the rows of one source, if its rows are those of heads.
    bool rows(std::size_t source, weight_extent which) {
        index_t const kd = s_.linear_key_head_dim, vd = s_.linear_value_head_dim;
        if (which == weight_extent::query) {
            index_t const width = s_.head_dim * (s_.attn_output_gate ? 2 : 1);
            add_heads(source, most_, 0, width, width);
        } else if (which == weight_extent::key) {
            add_heads(source, fewest_, 0, s_.head_dim, s_.head_dim);
        } else if (which == weight_extent::linear_qkv) {
            index_t const keys = fewest_ * kd;
            add_heads(source, fewest_, 0, kd, kd);
            add_heads(source, fewest_, keys, kd, kd);
            add_heads(source, most_, 2 * keys, vd, vd);
        } else if (which == weight_extent::linear_z) {
            add_heads(source, most_, 0, vd, vd);
        } else if (which == weight_extent::linear_heads) {
            add_heads(source, most_, 0, 1, 1);
        } else if (which == weight_extent::linear_qkvz) {
            index_t const shared = most_ / fewest_, stride = 2 * kd + 2 * shared * vd;
            add_heads(source, fewest_, 0, kd, stride);
            add_heads(source, fewest_, kd, kd, stride);
            add_heads(source, most_, 2 * kd, vd, stride, shared);
            add_heads(source, most_, 2 * kd + shared * vd, vd, stride, shared);
        } else if (which == weight_extent::linear_ba) {
            index_t const shared = most_ / fewest_;
            add_heads(source, most_, 0, 1, 2 * shared, shared);
            add_heads(source, most_, shared, 1, 2 * shared, shared);
        } else {
            return false;
        }
        return true;
    }

    weight_rule const& rule_;
    weight_sizes const& s_;
    group_rank tp_, cp_;
    index_t most_ = 0, fewest_ = 0; ///< heads in the model, of the largest section and of the others
    bool by_heads_ = false;
    weight_share share_;
};

} // namespace detail

/// Returns the share of a weight that belongs to the heads of a rank of context parallelism under `head_sharded`, among
/// the heads of its rank of tensor parallelism: in the order of the sources and their sections. Every rank holds all of
/// its tensor-parallel share, but works on this one where each head has weights: a convolution, A_log, dt_bias.
///
/// Key heads that ranks have in common are in the share of each. A weight that has no heads is `replicated`. Rows of a
/// module of Hugging Face's, which tensor parallelism does not divide, are those of all its heads.
inline weight_share head_share_of(weight_rule const& rule, weight_sizes const& sizes, group_rank tp, group_rank cp,
                                  caller here = caller::here()) {
    return detail::weight_of_heads(rule, sizes, tp, cp, here).find();
}

} // namespace cpx
