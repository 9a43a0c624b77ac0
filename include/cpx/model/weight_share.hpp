// SPDX-License-Identifier: Apache-2.0
// What one rank has of a weight: which rows and columns of Hugging Face's tensors, in which order.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/weight_rules.hpp>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace cpx {

/// A rank of a group of ranks.
struct group_rank {
    int rank = 0, ranks = 1;
};

/// Rows and columns of a weight's sources, each of which counts as rows of its last axis; a source of one axis has a
/// column.
struct weight_share {
    /// Consecutive rows of one source.
    struct source_rows {
        std::size_t source = 0;
        range rows{};
        friend constexpr bool operator==(source_rows const&, source_rows const&) = default;
    };
    std::vector<source_rows> blocks{}; ///< one below the other
    range columns{};                   ///< of every row
    index_t padding = 0;               ///< rows of zeros below them
    bool replicated = false;           ///< every rank of the group has the same

    index_t rows() const {
        index_t n = padding;
        for (auto const& p : blocks) n += p.rows.size();
        return n;
    }
};

/// Returns the shape of a source.
inline std::vector<index_t> shape_of(weight_source const& source, weight_sizes const& sizes) {
    std::vector<index_t> shape;
    for (weight_extent const e : source.shape)
        if (e != weight_extent::none) shape.push_back(size_of(e, sizes));
    return shape;
}
/// Returns how many columns a tensor of this shape has, as shares count: its last axis, or 1 if there is no other.
inline index_t weight_columns(std::vector<index_t> const& shape) { return shape.size() < 2 ? 1 : shape.back(); }
/// Returns how many rows it has: the product of the other axes.
inline index_t weight_rows(std::vector<index_t> const& shape) {
    index_t rows = 1;
    for (std::size_t i = 0; i < std::max<std::size_t>(shape.size(), 2) - 1 && i < shape.size(); ++i) rows *= shape[i];
    return rows;
}
/// Returns the shape of Megatron's tensor of a share: that of its first source, with other rows and columns; an expert
/// has none of the axis of experts.
inline std::vector<index_t> shape_of(weight_rule const& rule, weight_share const& share, weight_sizes const& sizes) {
    auto shape = shape_of(rule.from[0], sizes);
    if (rule.form == weight_form::stacked_rows || rule.form == weight_form::stacked_columns) shape.erase(shape.begin());
    shape.front() = share.rows();
    if (shape.size() > 1) shape.back() = share.columns.size();
    return shape;
}

namespace detail {

/// Makes the share of a rule: what is divided is divided by heads or evenly.
class weight_division {
public:
    weight_division(weight_rule const& rule, weight_sizes const& sizes, group_rank tp, caller here)
        : rule_(rule), s_(sizes), tp_(tp), here_(here) {
        require(tp.ranks >= 1, "weight_share", "ranks", "at least 1", tp.ranks, here);
        require(
            tp.rank >= 0 && tp.rank < tp.ranks, "weight_share", "rank",
            [&] { return "0 to " + std::to_string(tp.ranks - 1); }, tp.rank, here);
        share_.columns = {0, weight_columns(shape_of(rule.from[0], sizes))};
    }

    weight_share divide(index_t expert, index_t vocabulary_unit) {
        switch (rule_.form) {
        case weight_form::whole:
            share_.replicated = true;
            each_source([&](std::size_t i, index_t rows) { add(i, {0, rows}); });
            break;
        case weight_form::rows: each_source([&](std::size_t i, index_t rows) { add(i, share(rows)); }); break;
        case weight_form::columns:
            each_source([&](std::size_t i, index_t rows) { add(i, {0, rows}); });
            share_.columns = share(share_.columns.last);
            break;
        case weight_form::vocabulary: vocabulary(vocabulary_unit); break;
        case weight_form::groups: groups(); break;
        case weight_form::conv: sections(0, {keys(), keys(), values()}); break;
        case weight_form::linear_flat:
            sections(0, {keys(), keys(), values()});
            sections(1, {values()});
            sections(2, {s_.linear_num_value_heads});
            sections(3, {s_.linear_num_value_heads});
            break;
        case weight_form::linear_by_key_head: by_key_head(); break;
        case weight_form::stacked_rows: {
            check_expert(expert);
            index_t const inner = s_.moe_intermediate_size, first = expert * 2 * inner;
            add(0, share(inner), first);
            add(0, share(inner), first + inner);
            break;
        }
        case weight_form::stacked_columns:
            check_expert(expert);
            add(0, {expert * s_.hidden_size, (expert + 1) * s_.hidden_size});
            share_.columns = share(share_.columns.last);
            break;
        }
        return std::move(share_);
    }

private:
    index_t keys() const { return s_.linear_num_key_heads * s_.linear_key_head_dim; }
    index_t values() const { return s_.linear_num_value_heads * s_.linear_value_head_dim; }

    template <class F>
    void each_source(F f) {
        for (std::size_t i = 0; i < rule_.sources(); ++i) f(i, weight_rows(shape_of(rule_.from[i], s_)));
    }
    void add(std::size_t source, range rows, index_t first = 0) {
        share_.blocks.push_back({source, {first + rows.first, first + rows.last}});
    }
    /// Returns what the rank has of so many, which must be as many for each.
    range share(index_t all, char const* what = "rows or columns") const {
        require(
            all % tp_.ranks == 0, "weight_share", what,
            [&] {
                return "a multiple of the " + std::to_string(tp_.ranks) + " ranks, for " +
                       quote(std::string(rule_.megatron));
            },
            all, here_);
        index_t const each = all / tp_.ranks;
        return {tp_.rank * each, (tp_.rank + 1) * each};
    }
    void check_expert(index_t expert) const {
        require(
            expert >= 0 && expert < s_.num_experts, "weight_share", "expert",
            [&] { return "0 to " + std::to_string(s_.num_experts - 1); }, expert, here_);
    }
    void vocabulary(index_t unit) {
        require(unit >= 1 && unit <= 1 << 20, "weight_share", "unit of the vocabulary", "1 to 1048576", unit, here_);
        index_t const multiple = unit * tp_.ranks, all = s_.vocab_size;
        index_t const each = (all + multiple - 1) / multiple * unit;
        range const own{std::min(all, tp_.rank * each), std::min(all, (tp_.rank + 1) * each)};
        add(0, own);
        share_.padding = each - own.size();
    }
    /// Divides sections of a source, whole heads of each.
    void sections(std::size_t source, std::vector<index_t> const& rows) {
        static_cast<void>(share(s_.linear_num_key_heads, "linear_num_key_heads"));
        index_t first = 0;
        for (index_t const n : rows) {
            add(source, share(n), first);
            first += n;
        }
    }
    void groups() {
        index_t const heads = s_.num_attention_heads / s_.num_key_value_heads, width = s_.head_dim;
        bool const gate = s_.attn_output_gate;
        range const own = share(s_.num_key_value_heads, "num_key_value_heads");
        for (index_t g = own.first; g < own.last; ++g) {
            for (index_t half = 0; half < (gate ? 2 : 1); ++half)
                for (index_t h = g * heads; h < (g + 1) * heads; ++h)
                    add(0, {0, width}, (gate ? 2 * h + half : h) * width);
            add(1, {0, width}, g * width);
            add(2, {0, width}, g * width);
        }
    }
    void by_key_head() {
        index_t const k = s_.linear_key_head_dim, shared = s_.linear_num_value_heads / s_.linear_num_key_heads;
        index_t const v = shared * s_.linear_value_head_dim;
        range const own = share(s_.linear_num_key_heads, "linear_num_key_heads");
        auto const section = [&](std::size_t source, index_t head_rows, index_t first, index_t rows) {
            for (index_t j = own.first; j < own.last; ++j) add(source, {0, rows}, j * head_rows + first);
        };
        index_t const qkvz = 2 * k + 2 * v;
        section(0, qkvz, 0, k);
        section(0, qkvz, k, k);
        section(0, qkvz, 2 * k, v);
        section(0, qkvz, 2 * k + v, v);
        section(1, 2 * shared, 0, shared);
        section(1, 2 * shared, shared, shared);
    }

    weight_rule const& rule_;
    weight_sizes const& s_;
    group_rank tp_;
    caller here_;
    weight_share share_;
};

} // namespace detail

/// Returns what a rank of tensor parallelism has of a weight: of an expert's, a rank of the experts' (etp), and only if
/// `expert` is one of its own (ep).
///
/// The shares of all ranks have every element of the sources of a rule that is not `whole` once, but for experts'
/// stacked sources, of which those of all experts do. The vocabulary is first padded with rows of zeros to a multiple
/// of `vocabulary_unit` for each rank, Megatron's make_vocab_size_divisible_by.
///
/// Throws `cpx::error` that names the weight if the ranks do not divide its rows, columns or heads: linear_qkv is
/// divided by key heads, sections of linear attention by theirs.
inline weight_share share_of(weight_rule const& rule, weight_sizes const& sizes, group_rank tp, index_t expert = 0,
                             index_t vocabulary_unit = 1, caller here = caller::here()) {
    return detail::weight_division(rule, sizes, tp, here).divide(expert, vocabulary_unit);
}

} // namespace cpx
