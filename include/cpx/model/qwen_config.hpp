// SPDX-License-Identifier: Apache-2.0
// The sizes of a Qwen3.5 or Qwen3-VL model, read from its Hugging Face config.json and checked against each other.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/core/rotary_axes.hpp>
#include <cpx/model/json.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpx {

/// How a layer mixes tokens: by the gated delta rule or by softmax attention.
enum class layer_type { linear_attention, full_attention };

/// The settings of a language model, under the names that its config.json uses: Qwen3.5, dense or a mixture of experts,
/// or Qwen3-VL; and of its vision tower what the language model must know.
///
/// Only what the file says counts: a setting that it leaves out is an error, never the default of some library version.
struct qwen_config {
    index_t hidden_size = 0;
    index_t intermediate_size = 0; // of a dense model; 0 in a mixture of experts
    index_t vocab_size = 0;
    index_t num_hidden_layers = 0;
    std::vector<layer_type> layer_types; // one a layer
    double rms_norm_eps = 0;
    bool zero_centred_norms = false; // Qwen3.5: a norm multiplies by 1 + weight
    bool tie_word_embeddings = false;

    index_t num_experts = 0; // mixture of experts; all are 0 in a dense model
    index_t num_experts_per_tok = 0;
    index_t moe_intermediate_size = 0;
    index_t shared_expert_intermediate_size = 0;

    index_t num_attention_heads = 0; // full attention
    index_t num_key_value_heads = 0;
    index_t head_dim = 0;
    bool attn_output_gate = false; // Qwen3.5: projections of queries have a gate beside each head

    index_t linear_num_key_heads = 0; // linear attention; all are 0 where no layer has it
    index_t linear_num_value_heads = 0;
    index_t linear_key_head_dim = 0;
    index_t linear_value_head_dim = 0;
    index_t linear_conv_kernel_dim = 0;

    double rope_theta = 0;
    double partial_rotary_factor = 0;
    std::vector<index_t> mrope_section; // rotary pairs of the axes t, h, w, interleaved; empty if the file has none

    index_t image_token_id = -1, video_token_id = -1; // placeholders; of a model without vision_config there are none
    index_t spatial_merge_size = 0;                   // 0 without vision_config
    index_t deepstack_layers = 0;                     // how many layers, from the first, features are added behind

    /// Returns whether the MLPs are mixtures of experts.
    bool moe() const { return num_experts > 0; }
    /// Returns whether there is a vision tower.
    bool multimodal() const { return spatial_merge_size > 0; }
    /// Returns whether there are layers of linear attention.
    bool linear() const { return std::ranges::find(layer_types, layer_type::linear_attention) != layer_types.end(); }
    /// Returns how many of the first channels of a head are rotated: `head_dim * partial_rotary_factor`, rounded down.
    index_t rotary_dim() const { return static_cast<index_t>(static_cast<double>(head_dim) * partial_rotary_factor); }
    /// Returns the axis of every rotary pair; none where the file has no mrope_section.
    std::vector<int> rotary_axes() const {
        if (mrope_section.empty()) return {};
        return cpx::rotary_axes({mrope_section[0], mrope_section[1], mrope_section[2]}, axis_order::interleaved,
                                rotary_dim() / 2);
    }

    /// Reads a config.json. Throws `cpx::error` as `parse` does, and if the file is not readable or not JSON.
    static qwen_config read(std::filesystem::path const& path, caller here = caller::here()) {
        return parse(json_value::read(path, {}, here), here);
    }

    /// Reads the document of a config.json.
    ///
    /// model_type is "qwen3_5_text", or "qwen3_5" with the same in text_config, where tie_word_embeddings may stand
    /// beside text_config, as does vision_config if there is a tower; for a mixture of experts it is
    /// "qwen3_5_moe_text" and "qwen3_5_moe", for Qwen3-VL "qwen3_vl_text" and "qwen3_vl".
    /// Rotary settings in rope_parameters win over those beside it, as in transformers. Those of Qwen3-VL may be in
    /// rope_scaling, as it was published; its heads are rotated whole and all its layers have full attention.
    /// Text gives the three axes of mrope_section equal positions, so that plain rotary embedding is the result.
    ///
    /// Throws one `cpx::error` that names the document and lists the settings, of very many the first 8, that are
    /// missing, of the wrong type, out of range, at odds with another or not supported; or says that the model is not
    /// known.
    static qwen_config parse(json_value const& document, caller here = caller::here());
};

namespace detail {

/// Collects what is wrong with a document, to report it at once: how much, and the first of it.
class config_problems {
public:
    config_problems(std::string where, caller here) : where_(std::move(where)), here_(here) {}

    void add(error problem) {
        if (++count_ <= shown) found_.push_back(std::move(problem));
    }
    void add(std::string what, std::string expected, std::string got) {
        add(error(where_, std::move(what), std::move(expected), std::move(got), here_));
    }

    /// Notes a problem with `object`'s `key` unless `holds`.
    void require(bool holds, json_value const& object, std::string_view key, std::string expected, std::string got) {
        if (!holds) add(object.pointer() + '/' + std::string(key), std::move(expected), std::move(got));
    }

    /// Returns the value under `key`, or `T{}` and notes the problem if there is no such T.
    template <class T>
    T get(json_value const& object, std::string_view key) {
        try {
            return object.get<T>(key, here_);
        } catch (error const& problem) {
            add(problem);
            return T{};
        }
    }

    /// Returns the positive number under `key`, or 0 and notes the problem. Integers are those that an int can hold,
    /// other numbers those that a float holds with all its digits, because models run in float, too.
    template <class T>
    T positive(json_value const& object, std::string_view key) {
        auto const before = count();
        static_cast<void>(get<std::conditional_t<std::integral<T>, std::int32_t, float>>(object, key));
        if (count() != before) return T{};
        T const value = object.get<T>(key);
        require(value > 0, object, key, "more than 0", object.at(key).got());
        if constexpr (std::floating_point<T>)
            require(value <= 0 || value >= std::numeric_limits<float>::min(), object, key, "at least 1.2e-38",
                    object.at(key).got());
        return std::max(value, T{});
    }

    /// Notes a problem unless the value under `key` is `value`.
    template <class T>
    void only(json_value const& object, std::string_view key, T const& value, std::string expected) {
        auto const before = count();
        auto const found = get<T>(object, key);
        if (count() == before) require(found == value, object, key, std::move(expected), object.at(key).got());
    }

    std::size_t count() const { return count_; }

    /// Throws if anything was noted: the problem itself, or how many there are and the first of them in one text.
    void report() const {
        if (count_ == 0) return;
        if (count_ == 1) throw found_.front();
        std::string all;
        for (auto const& p : found_) all += "\n  " + p.problem() + ": expected " + p.expected() + ", got " + p.got();
        if (count_ > shown) all += "\n  and " + std::to_string(count_ - shown) + " more";
        throw error(where_, std::to_string(count_) + " settings are wrong" + all, "", "", here_);
    }

private:
    static constexpr std::size_t shown = 8;

    std::string where_;
    caller here_;
    std::size_t count_ = 0;
    std::vector<error> found_; // the first `shown`
};

/// Returns the object that holds the language model's settings. Throws `cpx::error` if the model is not known.
inline json_value qwen_text(json_value const& document, caller here) {
    auto const type = [](json_value const& object) {
        return object.has("model_type") ? object.at("model_type").got() : std::string("no model_type");
    };
    auto const expected = R"(model_type "qwen3_5_text", "qwen3_5_moe_text" or "qwen3_vl_text", or "qwen3_5", )"
                          R"("qwen3_5_moe" or "qwen3_vl" with it in text_config)";
    for (std::string const name : {"qwen3_5", "qwen3_5_moe", "qwen3_vl"}) {
        auto const wanted = quote(name + "_text");
        if (type(document) == wanted) return document;
        if (type(document) != quote(name) || !document.has("text_config")) continue;
        auto const text = document.at("text_config");
        if (type(text) == wanted) return text;
        throw error(document.where(), "a model this program does not know", expected, type(text) + " in text_config",
                    here);
    }
    throw error(document.where(), "a model this program does not know", expected, type(document), here);
}

inline bool is_qwen3_vl(json_value const& text) { return text.at("model_type").got() == R"("qwen3_vl_text")"; }

inline void read_layers(qwen_config& config, json_value const& text, config_problems& problems) {
    config.num_hidden_layers = problems.positive<index_t>(text, "num_hidden_layers");
    if (is_qwen3_vl(text)) {
        index_t const most = 1 << 20; // for which there is the memory
        problems.require(config.num_hidden_layers <= most, text, "num_hidden_layers", "at most " + std::to_string(most),
                         std::to_string(config.num_hidden_layers));
        config.layer_types.assign(static_cast<std::size_t>(std::min(config.num_hidden_layers, most)),
                                  layer_type::full_attention);
        return;
    }
    auto const before = problems.count();
    auto const names = problems.get<std::vector<std::string>>(text, "layer_types");
    if (problems.count() != before) return;
    for (auto const& name : names) {
        auto const linear = name == "linear_attention";
        auto const place = text.pointer() + "/layer_types/" + std::to_string(config.layer_types.size());
        if (!linear && name != "full_attention")
            problems.add(place, R"("linear_attention" or "full_attention")", quote(name));
        config.layer_types.push_back(linear ? layer_type::linear_attention : layer_type::full_attention);
    }
    auto const layers = config.num_hidden_layers;
    problems.require(layers == 0 || layers == std::ssize(names), text, "layer_types",
                     "as many as num_hidden_layers, " + std::to_string(layers), std::to_string(names.size()));
}

/// Reads the sizes of the MLPs: of a dense model, or of experts.
inline void read_mlp(qwen_config& config, json_value const& text, config_problems& problems) {
    if (text.at("model_type").got() != R"("qwen3_5_moe_text")") {
        config.intermediate_size = problems.positive<index_t>(text, "intermediate_size");
        return;
    }
    config.num_experts = problems.positive<index_t>(text, "num_experts");
    config.num_experts_per_tok = problems.positive<index_t>(text, "num_experts_per_tok");
    config.moe_intermediate_size = problems.positive<index_t>(text, "moe_intermediate_size");
    config.shared_expert_intermediate_size = problems.positive<index_t>(text, "shared_expert_intermediate_size");
    problems.require(config.num_experts == 0 || config.num_experts_per_tok <= config.num_experts, text,
                     "num_experts_per_tok", "at most num_experts, " + std::to_string(config.num_experts),
                     std::to_string(config.num_experts_per_tok));
    // A setting of Qwen3: Qwen3.5 has no choice.
    if (text.has("norm_topk_prob"))
        problems.only(text, "norm_topk_prob", true,
                      "none or true: Qwen3.5 divides the weights of a token's experts by their sum");
}

inline void read_rotary(qwen_config& config, json_value const& text, config_problems& problems) {
    bool const vl = is_qwen3_vl(text);
    problems.require(vl || !text.has("rope_scaling"), text, "rope_scaling", "rope_parameters instead", "a value");
    auto const parameters = text.has("rope_parameters")      ? text.at("rope_parameters")
                            : vl && text.has("rope_scaling") ? text.at("rope_scaling")
                                                             : text;
    if (!parameters.is_object()) return problems.add(parameters.pointer(), "an object", parameters.got());
    auto const holder = [&](char const* key) { return parameters.has(key) ? parameters : text; };
    for (auto const* key : {"rope_type", "type"})
        if (parameters.has(key)) problems.only(parameters, key, std::string("default"), R"("default")");

    config.rope_theta = problems.positive<double>(holder("rope_theta"), "rope_theta");
    auto const factor = holder("partial_rotary_factor");
    config.partial_rotary_factor =
        vl && !factor.has("partial_rotary_factor") ? 1 : problems.positive<double>(factor, "partial_rotary_factor");
    if (config.partial_rotary_factor == 0 || config.head_dim == 0) return;
    if (config.partial_rotary_factor > 1)
        return problems.add(factor.pointer() + "/partial_rotary_factor", "at most 1",
                            factor.at("partial_rotary_factor").got());
    auto const rotary = config.rotary_dim();
    if (rotary == 0 || rotary % 2 != 0)
        return problems.add(factor.pointer() + "/partial_rotary_factor",
                            "an even number of rotated channels, at least 2",
                            std::to_string(rotary) + " of head_dim " + std::to_string(config.head_dim));

    if (parameters.has("mrope_interleaved")) problems.only(parameters, "mrope_interleaved", true, "true");
    if (!parameters.has("mrope_section")) return;
    auto const before = problems.count();
    auto const section = problems.get<std::vector<std::int32_t>>(parameters, "mrope_section");
    if (problems.count() != before) return;
    config.mrope_section.assign(section.begin(), section.end());
    auto const sum = std::accumulate(section.begin(), section.end(), index_t{0});
    problems.require(section.size() == 3 && std::ranges::min(section) >= 0 && sum == rotary / 2, parameters,
                     "mrope_section", "3 sizes of at least 0 with the sum " + std::to_string(rotary / 2),
                     std::to_string(section.size()) + " with the sum " + std::to_string(sum));
}

/// Reads what stands beside text_config where there is a vision tower.
inline void read_vision(qwen_config& config, json_value const& document, config_problems& problems) {
    if (!document.has("vision_config")) return;
    auto const tower = document.at("vision_config");
    if (!tower.is_object()) return problems.add(tower.pointer(), "an object", tower.got());
    for (auto const& [key, member] : {std::pair{"image_token_id", &qwen_config::image_token_id},
                                      {"video_token_id", &qwen_config::video_token_id}}) {
        auto const before = problems.count();
        auto const id = problems.get<std::int32_t>(document, key);
        if (problems.count() != before) continue;
        config.*member = id;
        problems.require(0 <= id && id < config.vocab_size, document, key,
                         "0 to vocab_size - 1, " + std::to_string(config.vocab_size - 1), std::to_string(id));
    }
    problems.require(config.image_token_id != config.video_token_id || config.image_token_id < 0, document,
                     "video_token_id", "another one than image_token_id", std::to_string(config.video_token_id));
    config.spatial_merge_size = problems.positive<index_t>(tower, "spatial_merge_size");
    problems.only(tower, "out_hidden_size", config.hidden_size,
                  "hidden_size of text_config, " + std::to_string(config.hidden_size));
    if (!tower.has("deepstack_visual_indexes")) return;
    config.deepstack_layers = std::ssize(problems.get<std::vector<std::int32_t>>(tower, "deepstack_visual_indexes"));
    problems.require(config.deepstack_layers <= config.num_hidden_layers, tower, "deepstack_visual_indexes",
                     "as many as num_hidden_layers at most, " + std::to_string(config.num_hidden_layers),
                     std::to_string(config.deepstack_layers));
}

} // namespace detail

inline qwen_config qwen_config::parse(json_value const& document, caller here) {
    auto const text = detail::qwen_text(document, here);
    detail::config_problems problems(document.where(), here);
    qwen_config config;
    detail::read_layers(config, text, problems);
    for (auto const& [key, member] : {std::pair{"hidden_size", &qwen_config::hidden_size},
                                      {"vocab_size", &qwen_config::vocab_size},
                                      {"num_attention_heads", &qwen_config::num_attention_heads},
                                      {"num_key_value_heads", &qwen_config::num_key_value_heads},
                                      {"head_dim", &qwen_config::head_dim}})
        config.*member = problems.positive<index_t>(text, key);
    bool const vl = detail::is_qwen3_vl(text);
    if (!vl)
        for (auto const& [key, member] : {std::pair{"linear_num_key_heads", &qwen_config::linear_num_key_heads},
                                          {"linear_num_value_heads", &qwen_config::linear_num_value_heads},
                                          {"linear_key_head_dim", &qwen_config::linear_key_head_dim},
                                          {"linear_value_head_dim", &qwen_config::linear_value_head_dim},
                                          {"linear_conv_kernel_dim", &qwen_config::linear_conv_kernel_dim}})
            config.*member = problems.positive<index_t>(text, key);
    config.attn_output_gate = config.zero_centred_norms = !vl;
    config.rms_norm_eps = problems.positive<double>(text, "rms_norm_eps");
    auto const& outer = document.has("tie_word_embeddings") ? document : text;
    config.tie_word_embeddings = problems.get<bool>(outer, "tie_word_embeddings");
    detail::read_mlp(config, text, problems);
    detail::read_rotary(config, text, problems);
    detail::read_vision(config, document, problems);

    problems.only(text, "hidden_act", std::string("silu"), R"("silu")");
    if (text.has("attention_bias")) problems.only(text, "attention_bias", false, "false");
    if (text.has("attn_output_gate")) problems.only(text, "attn_output_gate", !vl, vl ? "false" : "true");
    auto const multiple = [&](char const* key, index_t many, char const* of, index_t few) {
        problems.require(many == 0 || few == 0 || many % few == 0, text, key,
                         "a multiple of " + std::string(of) + ", " + std::to_string(few), std::to_string(many));
    };
    multiple("num_attention_heads", config.num_attention_heads, "num_key_value_heads", config.num_key_value_heads);
    multiple("linear_num_value_heads", config.linear_num_value_heads, "linear_num_key_heads",
             config.linear_num_key_heads);
    // The sides of weights are sums of a few of these, which do not wrap then.
    auto const product = [&](char const* key, index_t size, char const* of, index_t many) {
        index_t const most = std::numeric_limits<std::int32_t>::max();
        problems.require(size * many <= most, text, key,
                         std::to_string(most) + " at most when multiplied by " + of + ", " + std::to_string(many),
                         std::to_string(size));
    };
    product("head_dim", config.head_dim, "num_attention_heads", config.num_attention_heads);
    product("linear_key_head_dim", config.linear_key_head_dim, "linear_num_key_heads", config.linear_num_key_heads);
    product("linear_value_head_dim", config.linear_value_head_dim, "linear_num_value_heads",
            config.linear_num_value_heads);
    product("moe_intermediate_size", config.moe_intermediate_size, "num_experts", config.num_experts);
    problems.report();
    return config;
}

} // namespace cpx
