// SPDX-License-Identifier: Apache-2.0
// The families of models whose config.json cpx reads, and what a model's family alone says of it.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/json.hpp>

#include <array>
#include <string>
#include <string_view>

namespace cpx {

/// What all models of one model_type have in common, as their code in transformers has it: no file need state it.
struct hf_family {
    std::string_view name; ///< model_type, without "_text"
    bool nested = false;   ///< NAME_text, in text_config or as the whole file; else the settings are the whole file
    bool experts = false;  ///< MLPs are mixtures of experts
    bool linear = false;   ///< some layers have linear attention (gated delta net)
    bool gated = false;    ///< queries have an output gate beside each head, and norms multiply by 1 + weight
    bool shared_expert = false; ///< beside the experts chosen there is one for every token, with a gate of its own
    bool sums_to_one = false; ///< weights of the experts chosen are divided by their sum, whatever norm_topk_prob says
    bool whole_heads = false; ///< all channels of a head are rotated unless the file says otherwise
    bool pictures = false;    ///< there may be a vision tower
    bool predicts = false;    ///< there may be layers of multi-token prediction
};

/// The families that are read.
inline constexpr std::array<hf_family, 6> hf_families{{
    {.name = "qwen3", .whole_heads = true},
    {.name = "qwen3_moe", .experts = true, .whole_heads = true},
    {.name = "qwen3_next", .experts = true, .linear = true, .gated = true, .shared_expert = true, .predicts = true},
    {.name = "qwen3_vl", .nested = true, .whole_heads = true, .pictures = true},
    {.name = "qwen3_5", .nested = true, .linear = true, .gated = true, .pictures = true, .predicts = true},
    {.name = "qwen3_5_moe",
     .nested = true,
     .experts = true,
     .linear = true,
     .gated = true,
     .shared_expert = true,
     .sums_to_one = true,
     .pictures = true,
     .predicts = true},
}};

namespace detail {

struct hf_text {
    hf_family family;
    json_value settings; ///< of the language model
    bool inside;         ///< they are text_config's
};

/// Returns where the settings of the language model are. Throws `cpx::error` if the model is not known.
inline hf_text find_hf_text(json_value const& document, caller here) {
    auto const type = [](json_value const& object) {
        return object.has("model_type") ? object.at("model_type").got() : std::string("no model_type");
    };
    auto const expected = R"(model_type "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text" or )"
                          R"("qwen3_vl_text", or "qwen3_5", "qwen3_5_moe" or "qwen3_vl" with it in text_config)";
    for (auto const& family : hf_families) {
        auto const whole = quote(family.name);
        if (!family.nested && type(document) == whole) return {family, document, false};
        if (!family.nested) continue;
        auto const wanted = quote(std::string(family.name) + "_text");
        if (type(document) == wanted) return {family, document, false};
        if (type(document) != whole || !document.has("text_config")) continue;
        auto const text = document.at("text_config");
        if (type(text) == wanted) return {family, text, true};
        throw error(document.where(), "a model this program does not know", expected, type(text) + " in text_config",
                    here);
    }
    throw error(document.where(), "a model this program does not know", expected, type(document), here);
}

} // namespace detail

} // namespace cpx
