// SPDX-License-Identifier: Apache-2.0
// What Megatron's name of a parameter says: what of a model has it, of which layer and of which expert.
#pragma once

#include <cpx/core/index.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>

namespace cpx {

/// What of a model has a parameter, and so which stages of a pipeline do.
enum class name_family {
    other,      ///< not known
    embedding,  ///< `embedding.`
    decoder,    ///< `decoder.layers.N.`: of one stage
    final_norm, ///< `decoder.final_layernorm.`
    output,     ///< `output_layer.`
    mtp,        ///< `mtp.`, layers of multi-token prediction, which are numbered from 0
    vision      ///< `vision_model.`, whose layers are numbered from 0, too
};

/// How a name tells its expert, if it has one.
enum class expert_form {
    none,       ///< of a dense layer, or the same on all ranks of ep: routers, shared experts, adapters, quantizers
    grouped,    ///< `experts.linear_fc1.weightN`, `biasN`, and of linear_fc2
    sequential, ///< `experts.local_experts.N.`
    buffer      ///< `experts.weight1`, `experts.weight2`: all experts of a rank in one tensor
};

/// A number in a name, and where its digits stand.
struct name_number {
    index_t value = 0;
    std::size_t begin = 0, end = 0;
};

/// What is known of a name.
struct parameter_name {
    name_family family = name_family::other;
    std::size_t root = 0; ///< where it begins behind `module.`, any number of them, and `language_model.`
    std::optional<name_number> layer{};
    expert_form form = expert_form::none;
    std::optional<name_number> expert{}; ///< of grouped and sequential experts
};

namespace detail {

/// Returns the number at the end of `text` behind `before` bytes: digits only, and none that begins with a needless 0.
/// One of more than 18 digits, which no model has, is 10^18. `place` is where the text begins in the name.
inline std::optional<name_number> number_in_name(std::string_view text, std::size_t before, std::size_t place) {
    std::string_view const digits = text.substr(before);
    if (digits.empty() || (digits.size() > 1 && digits[0] == '0')) return {};
    if (digits.find_first_not_of("0123456789") != std::string_view::npos) return {};
    name_number found{0, place + before, place + text.size()};
    for (char const c : digits.substr(0, 18)) found.value = found.value * 10 + (c - '0');
    if (digits.size() > 18) found.value = 1'000'000'000'000'000'000;
    return found;
}

} // namespace detail

/// Returns what a name says. Every text is a name, and of most of them nothing is known.
///
/// Source: Megatron-LM, the modules of megatron/core/models/gpt, megatron/core/transformer/moe/experts.py and
/// multi_token_prediction.py; Megatron-Bridge, the names of its vision models.
inline parameter_name parse_parameter_name(std::string_view text) {
    parameter_name name;
    std::size_t at = 0;
    auto const skip = [&](std::string_view word) {
        bool const here = text.substr(at).starts_with(word);
        at += here ? word.size() : 0;
        return here;
    };
    while (skip("module.")) {
    }
    skip("language_model.");
    name.root = at;
    using enum name_family;
    constexpr std::array<std::pair<std::string_view, name_family>, 6> layers{{{"decoder.final_layernorm.", final_norm},
                                                                              {"decoder.layers.", decoder},
                                                                              {"mtp.layers.", mtp},
                                                                              {"vision_model.decoder.layers.", vision},
                                                                              {"mtp.", mtp},
                                                                              {"vision_model.", vision}}};
    for (auto const& [word, family] : layers) {
        if (!skip(word)) continue;
        name.family = family;
        if (std::size_t const dot = text.find('.', at); word.ends_with("layers.") && dot != std::string_view::npos)
            name.layer = detail::number_in_name(text.substr(at, dot - at), 0, at);
        break;
    }
    if (name.family == decoder && !name.layer) name.family = other;
    if (skip("embedding.")) name.family = embedding;
    if (skip("output_layer.")) name.family = output;

    std::array<std::string_view, 2> before; // the words before one, the nearest last
    for (std::size_t begin = name.root; begin <= text.size();) {
        std::size_t const end = std::min(text.find('.', begin), text.size());
        std::string_view const word = text.substr(begin, end - begin);
        if (word == "shared_experts" || word == "router" || word == "adapter" || word.ends_with("_quantizer")) {
            name.form = expert_form::none;
            name.expert.reset();
            break;
        }
        if (name.form == expert_form::none && before[0] == "experts") {
            if (before[1] == "local_experts") name.expert = detail::number_in_name(word, 0, begin);
            if (name.expert) name.form = expert_form::sequential;
            for (std::string_view const kind : {"weight", "bias"})
                if ((before[1] == "linear_fc1" || before[1] == "linear_fc2") && word.starts_with(kind) &&
                    !name.expert) {
                    name.expert = detail::number_in_name(word, kind.size(), begin);
                    if (name.expert) name.form = expert_form::grouped;
                }
        }
        if (name.form == expert_form::none && before[1] == "experts" && end == text.size() &&
            (word == "weight1" || word == "weight2"))
            name.form = expert_form::buffer;
        before = {before[1], word};
        begin = end + 1;
    }
    return name;
}

} // namespace cpx
