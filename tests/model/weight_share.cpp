// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/weight_share.hpp>

#include "model/weight_models.hpp"

#include <cpx/layout/head_sharded.hpp>
#include <cpx/model/hf_names.hpp>
#include <cpx/model/weight_bytes.hpp>
#include <cpx/model/weight_heads.hpp>

#include <doctest/doctest.h>

#include <support/random.hpp>
#include <support/rejects.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

using namespace weight_models;
using cpx::group_rank;
using cpx::hf_names;
using cpx::weight_form;
using cpx::weight_share;
using support::rejects;

namespace {

/// Element i of a source has the number of the source and i in its first bytes.
std::vector<std::byte> filled(std::size_t source, index_t elements, index_t element) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(elements * element));
    for (index_t i = 0; i < elements; ++i) {
        auto const text = std::to_string(source) + ',' + std::to_string(i) + std::string(8, ' ');
        std::memcpy(bytes.data() + i * element, text.data(), static_cast<std::size_t>(element));
    }
    return bytes;
}

/// Returns the rows of a share in Megatron's tensor, each as the source and row from which it comes.
std::vector<std::pair<std::size_t, index_t>> rows_of_share(weight_share const& share) {
    std::vector<std::pair<std::size_t, index_t>> rows;
    for (auto const& p : share.blocks)
        for (index_t r = p.rows.first; r < p.rows.last; ++r) rows.emplace_back(p.source, r);
    return rows;
}

std::vector<index_t> counts_up(index_t first, index_t count) {
    std::vector<index_t> all;
    for (index_t i = 0; i < count; ++i) all.push_back(first + i);
    return all;
}

/// Returns rows [first, first + count) of one source after another.
std::vector<std::pair<std::size_t, index_t>> rows(std::vector<std::tuple<std::size_t, index_t, index_t>> const& runs) {
    std::vector<std::pair<std::size_t, index_t>> all;
    for (auto const& [source, first, count] : runs)
        for (index_t const r : counts_up(first, count)) all.emplace_back(source, r);
    return all;
}

} // namespace

TEST_CASE("shares of all ranks have every element once, one below or beside the other the whole, and go back") {
    support::splitmix numbers(2);
    for (int i = 0; i < 60; ++i) {
        auto const sizes = some_sizes(numbers);
        hf_names const names(sizes, some_style(numbers));
        int const ranks = 1 << numbers.between(0, 2);
        index_t const element = std::vector<index_t>{4, 8}[static_cast<std::size_t>(numbers.between(0, 1))];
        index_t const unit = numbers.between(1, 5);
        std::map<std::string, std::vector<std::byte>> sources, rebuilt;
        std::map<std::string, std::vector<int>> times;
        for (auto const& w : names.weights()) {
            CAPTURE(names.megatron(w));
            CAPTURE(ranks);
            index_t const columns = cpx::weight_columns(cpx::shape_of(w.rule->from[0], sizes));
            for (std::size_t s = 0; s < w.rule->sources(); ++s) {
                auto const shape = cpx::shape_of(w.rule->from[s], sizes);
                CHECK(cpx::weight_columns(shape) == columns);
                index_t const elements = cpx::weight_rows(shape) * columns;
                auto const name = names.hf(w, s);
                if (!sources.contains(name)) sources[name] = filled(s, elements, element);
                rebuilt[name].resize(sources[name].size());
                times[name].resize(static_cast<std::size_t>(elements));
            }
            auto const whole = cpx::share_of(*w.rule, sizes, {}, std::max<index_t>(w.expert, 0), unit);
            std::vector<std::pair<std::size_t, index_t>> below;
            index_t beside = 0, rows = 0;
            for (int r = 0; r < ranks; ++r) {
                auto const share = cpx::share_of(*w.rule, sizes, {r, ranks}, std::max<index_t>(w.expert, 0), unit);
                CHECK(share.replicated == (w.rule->form == weight_form::whole));
                auto const shape = cpx::shape_of(*w.rule, share, sizes);
                index_t size = element;
                for (index_t const n : shape) size *= n;
                CHECK(size == share.rows() * share.columns.size() * element);
                if (share.replicated && r > 0) continue;
                std::vector<std::byte> own(static_cast<std::size_t>(size));
                index_t next = 0;
                cpx::for_each_bytes(share, columns, element, [&](std::size_t s, index_t first, index_t at, index_t n) {
                    CHECK(at == next);
                    next += n;
                    std::memcpy(own.data() + at, sources[names.hf(w, s)].data() + first, static_cast<std::size_t>(n));
                });
                CHECK(next == size - share.padding * share.columns.size() * element);
                cpx::for_each_bytes(share, columns, element, [&](std::size_t s, index_t first, index_t at, index_t n) {
                    auto const name = names.hf(w, s);
                    std::memcpy(rebuilt[name].data() + first, own.data() + at, static_cast<std::size_t>(n));
                    for (index_t e = first / element; e < (first + n) / element; ++e)
                        ++times[name][static_cast<std::size_t>(e)];
                });
                for (auto const& row : rows_of_share(share)) below.push_back(row);
                beside += share.columns.size();
                rows += share.rows();
            }
            bool const columns_divided =
                w.rule->form == weight_form::columns || w.rule->form == weight_form::stacked_columns;
            if (columns_divided) CHECK(beside == columns);
            auto expected = rows_of_share(whole);
            if (w.rule->form == weight_form::vocabulary) {
                CHECK(below == expected);
                CHECK(rows % (unit * ranks) == 0);
                CHECK(rows >= sizes.vocab_size);
                CHECK(rows - sizes.vocab_size < unit * ranks);
            } else if (!columns_divided) { // sections are divided each
                std::ranges::sort(below);
                std::ranges::sort(expected);
                CHECK(below == expected);
            }
        }
        for (auto const& [given_name, bytes] : sources) {
            auto const& name = given_name;
            CAPTURE(name);
            CHECK(rebuilt[name] == bytes);
            CHECK(std::ranges::count(times[name], 1) == std::ssize(times[name]));
        }
    }
}

TEST_CASE("linear_qkv has a key head's queries, their gates, its keys and its values") {
    auto const share = [](weight_sizes const& sizes, group_rank tp) {
        hf_names const names(sizes);
        return rows_of_share(
            cpx::share_of(*weight(names, "decoder.layers.1.self_attention.linear_qkv.weight").rule, sizes, tp));
    };
    // 4 heads of 4 in 2 groups
    CHECK(share(qwen3, {}) == rows({{0, 0, 8}, {1, 0, 4}, {2, 0, 4}, {0, 8, 8}, {1, 4, 4}, {2, 4, 4}}));
    CHECK(share(qwen3, {1, 2}) == rows({{0, 8, 8}, {1, 4, 4}, {2, 4, 4}}));
    // q_proj has [query, gate] a head
    CHECK(share(qwen3_next, {1, 2}) == rows({{0, 16, 4}, {0, 24, 4}, {0, 20, 4}, {0, 28, 4}, {1, 4, 4}, {2, 4, 4}}));
    CHECK_THROWS_WITH_AS(share(qwen3, {0, 4}), doctest::Contains("num_key_value_heads"), cpx::error);
}

TEST_CASE("each section is divided by itself") {
    auto const share = [](hf_names const& names, std::string const& name, group_rank tp) {
        auto const w = weight(names, "decoder.layers.0." + name);
        return rows_of_share(cpx::share_of(*w.rule, names.sizes(), tp, std::max<index_t>(w.expert, 0)));
    };
    hf_names const next(qwen3_next), stacked(qwen3_next, {.stacked_experts = true});
    // [q 6; k 6; v 20] of 2 key heads
    CHECK(share(next, "self_attention.conv1d.weight", {1, 2}) == rows({{0, 3, 3}, {0, 9, 3}, {0, 22, 10}}));
    // [gate; up]: 6 rows each of the shared expert, 4 of others
    CHECK(share(next, "mlp.shared_experts.linear_fc1.weight", {1, 2}) == rows({{0, 3, 3}, {1, 3, 3}}));
    CHECK(share(next, "mlp.experts.linear_fc1.weight7", {1, 2}) == rows({{0, 2, 2}, {1, 2, 2}}));
    CHECK(share(stacked, "mlp.experts.linear_fc1.weight7", {1, 2}) == rows({{0, 58, 2}, {0, 62, 2}}));
    CHECK(share(stacked, "mlp.experts.linear_fc2.weight7", {1, 2}) == rows({{0, 56, 8}}));
    CHECK(share(next, "self_attention.A_log", {1, 2}) == rows({{0, 2, 2}}));
}

TEST_CASE("in_proj is the same from sections in wholes and from sections key head by key head") {
    support::splitmix numbers(3);
    for (int i = 0; i < 50; ++i) {
        auto next = some_sizes(numbers);
        next.layers = {{.linear = true}};
        next.by_key_head = true;
        auto flat = next;
        flat.by_key_head = false;
        index_t const keys = next.linear_num_key_heads, kd = next.linear_key_head_dim, vd = next.linear_value_head_dim;
        index_t const values = next.linear_num_value_heads, shared = values / keys;
        using row = std::tuple<char, index_t, index_t>; // section, head, row of the head
        auto const head = [](std::vector<row>& to, char section, index_t h, index_t count) {
            for (index_t const r : counts_up(0, count)) to.emplace_back(section, h, r);
        };
        std::vector<row> qkv, z, b, a, qkvz, ba;
        for (char const section : {'q', 'k'})
            for (index_t const j : counts_up(0, keys)) head(qkv, section, j, kd);
        for (index_t const h : counts_up(0, values)) {
            head(qkv, 'v', h, vd);
            head(z, 'z', h, vd);
            head(b, 'b', h, 1);
            head(a, 'a', h, 1);
        }
        for (index_t const j : counts_up(0, keys)) { // value heads of key head j are those from shared j on
            head(qkvz, 'q', j, kd);
            head(qkvz, 'k', j, kd);
            for (char const section : {'v', 'z'})
                for (index_t const h : counts_up(j * shared, shared)) head(qkvz, section, h, vd);
            for (char const section : {'b', 'a'})
                for (index_t const h : counts_up(j * shared, shared)) head(ba, section, h, 1);
        }
        for (int const ranks : {1, 2, 4})
            for (int r = 0; r < ranks; ++r) {
                auto const gathered = [&](weight_sizes const& sizes, std::vector<std::vector<row>> const& sources) {
                    hf_names const names(sizes);
                    auto const w = weight(names, "decoder.layers.0.self_attention.in_proj.weight");
                    std::vector<row> all;
                    for (auto const& [source, at] : rows_of_share(cpx::share_of(*w.rule, sizes, {r, ranks})))
                        all.push_back(sources.at(source).at(static_cast<std::size_t>(at)));
                    return all;
                };
                auto const from_flat = gathered(flat, {qkv, z, b, a});
                CHECK(from_flat == gathered(next, {qkvz, ba}));
                std::vector<row> expected; // Q_r, K_r, V_r, Z_r, B_r, A_r
                for (char const section : {'q', 'k', 'v', 'z', 'b', 'a'}) {
                    bool const of_keys = section == 'q' || section == 'k';
                    index_t const heads = (of_keys ? keys : values) / ranks;
                    for (index_t const h : counts_up(r * heads, heads))
                        head(expected, section, h, of_keys ? kd : section == 'v' || section == 'z' ? vd : 1);
                }
                CHECK(from_flat == expected);
            }
    }
}

TEST_CASE("shapes are those of the published models") {
    auto sizes = qwen3_5(true); // 35B-A3B and 80B-A3B
    sizes.hidden_size = 2048;
    sizes.head_dim = 256;
    sizes.num_attention_heads = 16;
    sizes.linear_num_key_heads = 16;
    sizes.linear_num_value_heads = 32;
    sizes.linear_key_head_dim = sizes.linear_value_head_dim = 128;
    auto const shape = [&](std::string const& name, group_rank tp = {}) {
        auto const w = weight(hf_names(sizes), name);
        return cpx::shape_of(*w.rule, cpx::share_of(*w.rule, sizes, tp, std::max<index_t>(w.expert, 0)), sizes);
    };
    using sides = std::vector<index_t>;
    std::string const linear = "decoder.layers.0.self_attention.", full = "decoder.layers.1.self_attention.";
    CHECK(shape(linear + "in_proj.weight") == sides{12352, 2048});
    CHECK(shape(linear + "in_proj.weight", {1, 2}) == sides{6176, 2048});
    CHECK(shape(linear + "conv1d.weight") == sides{8192, 1, 4});
    CHECK(shape(linear + "conv1d.weight", {3, 4}) == sides{2048, 1, 4});
    CHECK(shape(linear + "A_log") == sides{32});
    CHECK(shape(linear + "dt_bias", {0, 8}) == sides{4});
    CHECK(shape(linear + "out_norm.weight", {0, 8}) == sides{128});
    CHECK(shape(linear + "out_proj.weight") == sides{2048, 4096});
    CHECK(shape(linear + "out_proj.weight", {1, 2}) == sides{2048, 2048});
    CHECK(shape(full + "linear_qkv.weight", {1, 2}) == sides{(2 * 8 + 2) * 256, 2048});
    CHECK(shape("decoder.layers.0.mlp.shared_experts.gate_weight", {1, 2}) == sides{1, 2048});
    sizes.by_key_head = true;
    CHECK(cpx::size_of(cpx::weight_extent::linear_qkvz, sizes) == 12288);
    CHECK(cpx::size_of(cpx::weight_extent::linear_ba, sizes) == 64);
    CHECK(shape(linear + "in_proj.weight") == sides{12352, 2048});
}

TEST_CASE("what a rank of head_sharded works on is what that layout gives it") {
    support::splitmix numbers(4);
    for (int i = 0; i < 30; ++i) {
        auto sizes = some_sizes(numbers);
        sizes.layers = {{.linear = true}, {}};
        int const tp = 1 << numbers.between(0, 2), cp = static_cast<int>(numbers.between(1, 9));
        auto style = some_style(numbers);
        hf_names const names(sizes, style);
        auto const part = [&](std::string const& name, group_rank t, group_rank c) {
            return cpx::head_share_of(*weight(names, name).rule, sizes, t, c);
        };
        index_t const keys = sizes.linear_num_key_heads / tp, values = sizes.linear_num_value_heads / tp;
        index_t const kd = sizes.linear_key_head_dim, vd = sizes.linear_value_head_dim;
        cpx::head_sharded<> const linear(cp, cpx::thd({0}), {{keys, 1}, {keys, 1}, {values, 1}});
        cpx::head_sharded<> const full(cp, cpx::thd({0}),
                                       {{sizes.num_attention_heads / tp, 1}, {sizes.num_key_value_heads / tp, 1}});
        for (int t = 0; t < tp; ++t)
            for (int c = 0; c < cp; ++c) {
                auto const heads = [&](auto const& layout, index_t all, index_t width, index_t first = 0) {
                    auto const own = layout.heads(c, all);
                    return rows({{0, first + (t * all + own.first) * width, own.size() * width}});
                };
                std::string const at = "decoder.layers.0.self_attention.";
                CHECK(rows_of_share(part(at + "A_log", {t, tp}, {c, cp})) == heads(linear, values, 1));
                auto expected = heads(linear, keys, kd);
                for (auto const& more :
                     {heads(linear, keys, kd, keys * tp * kd), heads(linear, values, vd, 2 * keys * tp * kd)})
                    expected.insert(expected.end(), more.begin(), more.end());
                CHECK(rows_of_share(part(at + "conv1d.weight", {t, tp}, {c, cp})) == expected);
                auto const out = part(at + "out_proj.weight", {t, tp}, {c, cp});
                auto const own = linear.heads(c, values);
                CHECK(out.columns == cpx::range{(t * values + own.first) * vd, (t * values + own.last) * vd});
                CHECK(part(at + "out_norm.weight", {t, tp}, {c, cp}).replicated);
                CHECK(part("decoder.final_layernorm.weight", {t, tp}, {c, cp}).replicated);
                auto const qkv = part("decoder.layers.1.self_attention.linear_qkv.weight", {t, tp}, {c, cp});
                index_t const gates = sizes.attn_output_gate ? 2 : 1, d = sizes.head_dim;
                auto of_key = heads(full, sizes.num_key_value_heads / tp, d), qkv_rows = rows_of_share(qkv);
                auto wanted = heads(full, sizes.num_attention_heads / tp, gates * d);
                for (std::size_t const s : {1u, 2u})
                    for (auto const& row : of_key) wanted.emplace_back(s, row.second);
                CHECK(qkv_rows == wanted);
                // as many heads in both orders of the projection, and in a module of Hugging Face's all tp's
                auto const rows_in = [&](bool by_key_head) {
                    auto other = sizes;
                    other.by_key_head = by_key_head;
                    auto const& rule = *weight(hf_names(other), at + "in_proj.weight").rule;
                    return cpx::head_share_of(rule, other, {t, tp}, {c, cp}).rows();
                };
                CHECK(rows_in(true) == rows_in(false));
                CHECK(rows_of_share(part(at + "linear_attn.A_log", {t, tp}, {0, 1})) ==
                      rows({{0, 0, sizes.linear_num_value_heads}}));
            }
    }
    CHECK_THROWS_AS(cpx::head_share_of(cpx::weight_rules[0], qwen3, {}, {1, 1}), cpx::error);
}

TEST_CASE("ranks that do not divide a weight are refused") {
    auto const& embedding = cpx::weight_rules[0];
    rejects({"rank"}, [&] { static_cast<void>(cpx::share_of(embedding, qwen3, {2, 2})); });
    rejects({"ranks"}, [&] { static_cast<void>(cpx::share_of(embedding, qwen3, {0, 0})); });
    rejects({"unit of the vocabulary"}, [&] { static_cast<void>(cpx::share_of(embedding, qwen3, {}, 0, 0)); });
    hf_names const next(qwen3_next, {.stacked_experts = true});
    auto const& stacked = *weight(next, "decoder.layers.0.mlp.experts.linear_fc1.weight0").rule;
    rejects({"expert"}, [&] { static_cast<void>(cpx::share_of(stacked, qwen3_next, {}, 64)); });
    rejects({"rows or columns"}, [&] { static_cast<void>(cpx::share_of(stacked, qwen3_next, {0, 3}, 1)); });
}
