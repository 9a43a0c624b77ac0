// SPDX-License-Identifier: Apache-2.0
// Multimodal positions of a golden file, and the rotary embedding by them, on a sharding.
#pragma once

#include "kinds.hpp"

#include <array>

namespace verify {

/// Returns the images and videos of the file, as its model counts positions at them.
inline cpx::media read_media(job const& j) {
    auto const number = [&](char const* key) {
        return cpx::json_value::parse(j.file.metadata(key), j.file.where() + ", metadata " + key);
    };
    auto const grids = [&](char const* name) { return cpx::media_grids(j.file.read<cpx::index_t>(name, {-1, 3})); };
    auto const videos = grids("video_grid_thw");
    cpx::media_options options{
        .rule = choose<cpx::mrope_rule>(j, "model",
                                        {{"qwen3_vl", cpx::mrope_rule::qwen3_vl},
                                         {"qwen3_5", cpx::mrope_rule::qwen3_vl},
                                         {"qwen2_vl", cpx::mrope_rule::qwen2_vl},
                                         {"qwen2_5_vl", cpx::mrope_rule::qwen2_5_vl_spatial_advance}}),
        .merge = number("spatial_merge_size").as<cpx::index_t>()};
    if (options.rule == cpx::mrope_rule::qwen2_5_vl_spatial_advance) {
        options.tokens_per_second = number("tokens_per_second").as<cpx::index_t>();
        options.seconds.assign(videos.size(), number("second_per_grid_t").as<double>());
    }
    return examples::blame(j.file.where(), [&] { return cpx::media(grids("image_grid_thw"), videos, options); });
}

/// Returns what turns the pairs of a head.
template <class T>
cpx::rotary_pairs<T> read_pairs(job const& j, cpx::index_t head_dim) {
    auto const rope = cpx::json_value::parse(j.file.metadata("rope"), j.file.where() + ", metadata rope");
    std::vector<cpx::index_t> section{24, 20, 20}; // of Qwen3-VL, whose settings need not say
    if (rope.has("mrope_section")) section = rope.template get<std::vector<cpx::index_t>>("mrope_section");
    cpx::require(section.size() == 3, rope.where().c_str(), "numbers of mrope_section", 3, section.size());
    auto const order = choose<cpx::axis_order>(
        j, "layout", {{"interleaved", cpx::axis_order::interleaved}, {"sectioned", cpx::axis_order::sectioned}});
    return examples::blame(j.file.where(), [&] {
        auto const frequencies = cpx::rotary_frequencies<float>(
            {.theta = rope.template get<double>("rope_theta"), .rotary_dim = head_dim}); // as transformers has them
        return cpx::rotary_pairs<T>{{frequencies.begin(), frequencies.end()},
                                    cpx::rotary_axes({section[0], section[1], section[2]}, order, head_dim / 2)};
    });
}

/// A row has the heads of q and then those of k, which ranks share alike.
template <class T>
outputs<T> mrope_index(job const& j) {
    auto const &q = j.file.tensor("q").shape, &k = j.file.tensor("k").shape;
    cpx::require(q.size() == 3 && k.size() == 3, j.file.where().c_str(), "axes of q and k", "3 and 3",
                 std::to_string(q.size()) + " and " + std::to_string(k.size()));
    check_sizes(j, {{"heads of q", q[1]}, {"heads of k", k[1]}, {"width of a head", q[2]}});
    cpx::index_t const dim = q[2], q_width = q[1] * dim, k_width = k[1] * dim, width = q_width + k_width;
    std::vector<cpx::section> const sections{{q[1], dim}, {k[1], dim}};

    cpx::media const items = read_media(j);
    auto const ids = j.file.read<cpx::index_t>("input_ids", {j.tokens()});
    auto const token = [&](char const* key) {
        return examples::parse_number(j.file.metadata(key), 0, 1LL << 62, j.file.where().c_str(), key);
    };
    cpx::media_tokens const tokens{token("image_token_id"), token("video_token_id")};
    auto const pairs = read_pairs<T>(j, dim);

    struct turn {
        char const *q, *k, *q_result, *k_result;
        std::vector<T> whole = {};
    };
    std::vector<turn> turns{{"q", "k", "q_rot", "k_rot"}};
    if (j.file.contains("dq_rot")) turns.push_back({"dq_rot", "dk_rot", "dq", "dk"});
    for (turn& t : turns) {
        t.whole.resize(static_cast<std::size_t>(j.tokens() * width));
        for (auto const& [name, first, heads] :
             {std::tuple(t.q, cpx::index_t{0}, q[1]), std::tuple(t.k, q_width, k[1])}) {
            auto const values = j.file.read<T>(name, {j.tokens(), heads, dim});
            cpx::as_matrix(cpx::rows<T>(t.whole, width).columns(first, heads * dim)) =
                cpx::as_matrix(cpx::rows<T const>(values, heads * dim));
        }
    }

    outputs<T> result;
    auto& position_ids = result["position_ids"];
    position_ids.resize(static_cast<std::size_t>(3 * j.tokens()));
    std::mutex guard;
    with_sharding(j, sections, sections, [&](auto const& sharding, auto const&) {
        using S = std::remove_cvref_t<decltype(sharding)>;
        cpx::threads::run(j.ranks, [&](cpx::threads& comm) {
            auto const rows = global_rows(sharding, comm.rank());
            cpx::tensor<cpx::index_t, S> own(sharding, comm.rank(), 1);
            for (std::size_t i = 0; i < rows.size(); ++i) own.data().data()[i] = ids[static_cast<std::size_t>(rows[i])];
            auto const positions = cpx::mrope_positions(items, own, tokens, comm);
            {
                std::lock_guard const lock(guard);
                for (cpx::index_t axis = 0; axis < 3; ++axis)
                    for (std::size_t i = 0; i < rows.size(); ++i)
                        position_ids[static_cast<std::size_t>(axis * j.tokens() + rows[i])] =
                            static_cast<T>(positions.axes()(axis, static_cast<cpx::index_t>(i)));
            }
            for (turn const& t : turns) {
                auto x = take(t.whole, width, sharding, comm);
                if (&t == &turns.front())
                    cpx::rotary(positions, x, dim, pairs, x);
                else
                    cpx::rotary_backward(positions, x, dim, pairs, x);
                auto const all = gather<T>(x.data(), width, sharding, comm);
                if (comm.rank() != 0) continue;
                std::lock_guard const lock(guard);
                for (auto const& [name, first, count] :
                     {std::tuple(t.q_result, cpx::index_t{0}, q_width), std::tuple(t.k_result, q_width, k_width)}) {
                    auto& y = result[name];
                    y.resize(static_cast<std::size_t>(j.tokens() * count));
                    cpx::as_matrix(cpx::rows<T>(y, count)) =
                        cpx::as_matrix(cpx::rows<T const>(all, width).columns(first, count));
                }
            }
        });
    });
    return result;
}

} // namespace verify
