// SPDX-License-Identifier: Apache-2.0
// A checkpoint of Qwen3.5 or Qwen3-VL in memory: its settings and its weights in the type of the computation.
#pragma once

#include <cpx/core/rows.hpp>
#include <cpx/model/hf_computable.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/safetensors.hpp>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace cpx {

/// The weights of one model, whole; every rank reads the same copy.
template <class T>
class qwen_checkpoint {
public:
    /// Reads DIRECTORY/config.json and DIRECTORY/model.safetensors.
    ///
    /// Throws `cpx::error` if they are not those of a known model, or if a weight is missing or misshapen.
    explicit qwen_checkpoint(std::string const& directory) : config(computable_config(directory + "/config.json")) {
        safetensors const file(directory + "/model.safetensors");
        if (file.contains("model.language_model.embed_tokens.weight")) prefix_ = "model.language_model.";
        auto const& c = config;
        auto const types = c.layers();
        index_t const hidden = *c.hidden_size, vocab = *c.vocab_size;
        load(file, "model.embed_tokens.weight", vocab, hidden);
        load(file, "model.norm.weight", 1, hidden);
        if (!*c.tie_word_embeddings) load(file, "lm_head.weight", vocab, hidden);
        for (index_t i = 0; i < *c.num_hidden_layers; ++i) {
            std::string const layer = "model.layers." + std::to_string(i) + '.';
            load(file, layer + "input_layernorm.weight", 1, hidden);
            load(file, layer + "post_attention_layernorm.weight", 1, hidden);
            if (c.moe()) {
                load(file, layer + "mlp.gate.weight", *c.num_experts, hidden);
                load_experts(file, layer + "mlp.experts.");
                load_mlp(file, layer + "mlp.shared_expert.", *c.shared_expert_intermediate_size);
                load(file, layer + "mlp.shared_expert_gate.weight", 1, hidden);
            } else {
                load_mlp(file, layer + "mlp.", *c.intermediate_size);
            }
            if (types[static_cast<std::size_t>(i)] == layer_type::linear_attention) {
                index_t const k = *c.linear_num_key_heads * *c.linear_key_head_dim;
                index_t const heads = *c.linear_num_value_heads, v = heads * *c.linear_value_head_dim;
                load(file, layer + "linear_attn.in_proj_qkv.weight", 2 * k + v, hidden);
                load(file, layer + "linear_attn.in_proj_z.weight", v, hidden);
                load(file, layer + "linear_attn.in_proj_b.weight", heads, hidden);
                load(file, layer + "linear_attn.in_proj_a.weight", heads, hidden);
                load(file, layer + "linear_attn.conv1d.weight", 2 * k + v, *c.linear_conv_kernel_dim);
                load(file, layer + "linear_attn.A_log", heads, 1);
                load(file, layer + "linear_attn.dt_bias", heads, 1);
                load(file, layer + "linear_attn.norm.weight", 1, *c.linear_value_head_dim);
                load(file, layer + "linear_attn.out_proj.weight", hidden, v);
            } else {
                index_t const q = *c.num_attention_heads * *c.head_dim, kv = *c.num_key_value_heads * *c.head_dim;
                index_t const of_q = c.gated() ? 2 * q : q; // each head: query, then output gate
                load(file, layer + "self_attn.q_proj.weight", of_q, hidden);
                load(file, layer + "self_attn.k_proj.weight", kv, hidden);
                load(file, layer + "self_attn.v_proj.weight", kv, hidden);
                load(file, layer + "self_attn.o_proj.weight", hidden, q);
                load(file, layer + "self_attn.q_norm.weight", 1, *c.head_dim);
                load(file, layer + "self_attn.k_norm.weight", 1, *c.head_dim);
            }
        }
    }

    /// Returns a weight's name in the file: beside a tower, the language model's weights have a prefix of their own.
    std::string file_name(std::string const& name) const {
        return name.starts_with("model.") ? prefix_ + name.substr(6) : name;
    }
    /// Returns a weight by its name in a file without a tower, experts stacked as `mlp.experts.gate_up_proj` and
    /// `mlp.experts.down_proj`. If the embedding is tied, `lm_head.weight` is that one. Throws `cpx::error` if the
    /// model has no such weight.
    rows<T const> weight(std::string const& name, caller here = caller::here()) const {
        bool const tied = *config.tie_word_embeddings && name == "lm_head.weight";
        auto const found = weights_.find(tied ? "model.embed_tokens.weight" : name);
        require(found != weights_.end(), "qwen_checkpoint", "name of a weight", "one of the model's", quote(name),
                here);
        stored const& w = found->second;
        return {w.values.data(), w.rows, w.columns};
    }
    /// Calls `f(name, weight)` for every weight, in the order of their names.
    template <class F>
    void each(F f) const {
        for (auto const& item : weights_) f(item.first, weight(item.first));
    }

    hf_config config;

private:
    struct stored {
        index_t rows = 0, columns = 0;
        std::vector<T> values;
    };

    void load(safetensors const& file, std::string const& name, index_t rows, index_t columns) {
        weights_[name] = {rows, columns, read(file, file_name(name), {rows, columns})};
    }

    void load_mlp(safetensors const& file, std::string const& mlp, index_t inner) {
        load(file, mlp + "gate_proj.weight", inner, *config.hidden_size);
        load(file, mlp + "up_proj.weight", inner, *config.hidden_size);
        load(file, mlp + "down_proj.weight", *config.hidden_size, inner);
    }

    /// Stacks the weights of the experts, whether the file has them expert by expert or stacked.
    void load_experts(safetensors const& file, std::string const& stacked) {
        std::string const experts = file_name(stacked);
        index_t const count = *config.num_experts, hidden = *config.hidden_size, inner = *config.moe_intermediate_size;
        stored gate_up{count * 2 * inner, hidden, {}}, down{count * hidden, inner, {}};
        if (file.contains(experts + "gate_up_proj") || file.contains(experts + "down_proj")) {
            gate_up.values = read(file, experts + "gate_up_proj", {count, 2 * inner, hidden});
            down.values = read(file, experts + "down_proj", {count, hidden, inner});
        } else {
            auto const append = [](std::vector<T>& to, std::vector<T> const& values) {
                to.insert(to.end(), values.begin(), values.end());
            };
            for (index_t e = 0; e < count; ++e) {
                std::string const expert = experts + std::to_string(e) + '.';
                append(gate_up.values, read(file, expert + "gate_proj.weight", {inner, hidden}));
                append(gate_up.values, read(file, expert + "up_proj.weight", {inner, hidden}));
                append(down.values, read(file, expert + "down_proj.weight", {hidden, inner}));
            }
        }
        weights_[stacked + "gate_up_proj"] = std::move(gate_up);
        weights_[stacked + "down_proj"] = std::move(down);
    }

    /// Returns the elements of a weight; the file may shape it with axes of size 1.
    static std::vector<T> read(safetensors const& file, std::string const& name, std::vector<index_t> wanted) {
        std::vector<index_t> shape = file.tensor(name).shape;
        std::erase(shape, 1);
        std::erase(wanted, 1);
        auto const show = [](std::vector<index_t> const& sizes) {
            std::string text;
            for (index_t const n : sizes) text += (text.empty() ? "" : " x ") + std::to_string(n);
            return text;
        };
        require(shape == wanted, file.where().c_str(), ("shape of " + name).c_str(), show(wanted), show(shape));
        using dtype = safetensors::dtype;
        dtype const type = file.tensor(name).dtype;
        bool const floating = type == dtype::f64 || type == dtype::f32 || type == dtype::f16 || type == dtype::bf16;
        require(floating, file.where().c_str(), ("type of " + name).c_str(), "F64, F32, F16 or BF16",
                "integers, as of a quantised model");
        return file.read<T>(name);
    }

    std::string prefix_ = "model.";
    std::map<std::string, stored> weights_;
};

} // namespace cpx
