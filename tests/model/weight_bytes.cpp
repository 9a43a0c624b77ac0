// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/weight_bytes.hpp>

#include "model/weight_models.hpp"

#include <cpx/model/hf_names.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

using namespace weight_models;
using cpx::hf_names;
using dtype = cpx::safetensors::dtype;

namespace {

std::vector<std::byte> of_floats(dtype type, std::vector<double> const& numbers) {
    std::vector<std::byte> bytes;
    for (double const n : numbers) {
        std::vector<std::byte> const one(reinterpret_cast<std::byte const*>(&n),
                                         reinterpret_cast<std::byte const*>(&n + 1));
        auto const cast = cpx::detail::recast(one, dtype::f64, type, 0);
        bytes.insert(bytes.end(), cast.begin(), cast.end());
    }
    return bytes;
}

std::vector<double> numbers_in(cpx::weight_bytes const& w) {
    auto const wide = cpx::detail::recast(w.bytes, w.dtype, dtype::f64, 0);
    std::vector<double> all(wide.size() / 8);
    std::memcpy(all.data(), wide.data(), wide.size());
    return all;
}

} // namespace

TEST_CASE("a norm's weight minus 1 comes back bit for bit, in a wider dtype where it must, or is refused") {
    auto const& norm = *weight(hf_names(qwen3_next), "decoder.layers.0.self_attention.out_norm.weight").rule;
    for (auto const type : {dtype::bf16, dtype::f16, dtype::f32, dtype::f64}) {
        auto const bytes = of_floats(type, {0.5, 0.75, 1, 1.25, 2});
        auto const kept = cpx::to_megatron(norm, {type, bytes});
        CHECK(kept.dtype == type);
        CHECK(numbers_in(kept) == std::vector<double>{-0.5, -0.25, 0, 0.25, 1});
        CHECK(cpx::to_hf(norm, kept, type).bytes == bytes);
        CHECK(cpx::to_hf(norm, kept, {}).bytes == bytes);
    }
    // every bfloat16 and half either comes back or is refused; those from 2^-15 on come back
    for (auto const type : {dtype::bf16, dtype::f16}) {
        std::size_t back = 0;
        for (unsigned bits = 0; bits < 65536; ++bits) {
            std::vector<std::byte> const bytes{std::byte(bits & 255), std::byte(bits >> 8)};
            auto const value = numbers_in({type, bytes})[0];
            try {
                auto const kept = cpx::to_megatron(norm, {type, bytes});
                if (cpx::to_hf(norm, kept, type).bytes != bytes) FAIL("another number came back");
                ++back;
            } catch (cpx::error const&) {
                if (std::abs(value) >= 0x1p-15 && std::abs(value) <= 65504) FAIL("refused " << value);
            }
        }
        CHECK(back > 40000);
    }
    auto const odd = of_floats(dtype::bf16, {171.0 / 512});
    CHECK(cpx::to_megatron(norm, {dtype::bf16, odd}).dtype == dtype::f32);
    CHECK(cpx::to_megatron(norm, {dtype::f32, of_floats(dtype::f32, {0.25 - 0x1p-26})}).dtype == dtype::f64);
    CHECK_THROWS_WITH_AS(static_cast<void>(cpx::to_megatron(norm, {dtype::f32, of_floats(dtype::f32, {-0.0})})),
                         doctest::Contains("out_norm.weight: expected numbers that come back bit for bit"), cpx::error);
    CHECK_THROWS_WITH_AS(static_cast<void>(cpx::to_megatron(norm, {dtype::i32, of_floats(dtype::f32, {1})})),
                         doctest::Contains("got I32 of self_attention.out_norm.weight"), cpx::error);
}

TEST_CASE("A_log and expert_bias are float32 in Megatron, and what float32 learnt stays") {
    hf_names const next(qwen3_next);
    for (char const* name : {"self_attention.A_log", "self_attention.linear_attn.A_log", "mlp.router.expert_bias"}) {
        auto const& rule = *weight(next, std::string("decoder.layers.0.") + name).rule;
        for (auto const type : {dtype::bf16, dtype::f16, dtype::f32, dtype::f64}) {
            auto const bytes = of_floats(type, {0.1, -0.0, -3, 0x1p-14});
            auto const kept = cpx::to_megatron(rule, {type, bytes});
            CHECK(kept.dtype == (type == dtype::f64 ? dtype::f64 : dtype::f32));
            CHECK(cpx::to_hf(rule, kept, type).bytes == bytes);
        }
        for (unsigned const signalling : {0x7f81u, 0xffbfu}) { // NaNs that no conversion keeps
            std::vector<std::byte> const bytes{std::byte(signalling & 255), std::byte(signalling >> 8)};
            CHECK_THROWS_WITH_AS(static_cast<void>(cpx::to_megatron(rule, {dtype::bf16, bytes})),
                                 doctest::Contains("expected numbers that come back bit for bit from float32, as"),
                                 cpx::error);
        }
        auto const learnt = of_floats(dtype::f32, {0.1});
        auto const written = cpx::to_hf(rule, {dtype::f32, learnt}, dtype::bf16);
        CHECK(written.dtype == dtype::f32);
        CHECK(written.bytes == learnt);
    }
    for (auto const& rule : cpx::weight_rules)
        CHECK(rule.float32 == (rule.megatron.ends_with("A_log") || rule.megatron.ends_with("expert_bias")));
}
