// SPDX-License-Identifier: Apache-2.0
// Names of weights of any bytes, of Megatron and of Hugging Face: the first byte says how both sides write them.
#include <cpx/model/hf_names.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace {

void expect(bool holds) {
    if (!holds) std::abort();
}

/// A hybrid model of 12 layers with 20 experts and multi-token prediction, written in one of 16 ways.
cpx::hf_names const& model(unsigned way) {
    static auto const all = [] {
        cpx::weight_sizes sizes{.hidden_size = 8,
                                .vocab_size = 10,
                                .intermediate_size = 6,
                                .num_experts = 20,
                                .moe_intermediate_size = 4,
                                .shared_expert_intermediate_size = 6,
                                .num_attention_heads = 4,
                                .num_key_value_heads = 2,
                                .head_dim = 4,
                                .attn_output_gate = true,
                                .linear_num_key_heads = 2,
                                .linear_num_value_heads = 4,
                                .linear_key_head_dim = 3,
                                .linear_value_head_dim = 5,
                                .linear_conv_kernel_dim = 4,
                                .mtp = {{.moe = true}}};
        for (int i = 0; i < 12; ++i) sizes.layers.push_back({.linear = i % 2 == 0, .moe = i % 3 != 0});
        std::array<cpx::hf_names*, 16> made{};
        for (unsigned i = 0; i < made.size(); ++i) {
            sizes.by_key_head = (i & 1) != 0;
            made[i] = new cpx::hf_names(sizes, {.inside = (i & 2) != 0,
                                                .stacked_experts = (i & 4) != 0,
                                                .language_model = (i & 2) != 0,
                                                .hf_linear = (i & 8) != 0,
                                                .listed_experts = (i & 8) != 0});
        }
        return made;
    }();
    return *all[way % all.size()];
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    if (size == 0) return 0;
    std::string const text(reinterpret_cast<char const*>(data) + 1, size - 1);
    auto const& names = model(data[0]);
    if (auto const w = names.from_megatron(text)) {
        auto const own = names.megatron(*w); // in this model's way
        expect(names.from_megatron(own) == w);
        expect(names.to_hf(text) == names.hf(*w));
        for (auto const& source : names.hf(*w)) expect(!names.to_megatron(source).empty());
    }
    for (auto const& name : names.to_megatron(text)) {
        auto const back = names.to_hf(name);
        expect(std::ranges::count(back, text) == 1);
    }
    return 0;
}
