// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/local/activation.hpp>

#include <cpx/ops/local/attention_backward.hpp>
#include <cpx/ops/local/causal_conv.hpp>
#include <cpx/ops/local/delta_rule_backward.hpp>
#include <cpx/ops/local/log_probability.hpp>
#include <cpx/ops/local/moe_backward.hpp>
#include <cpx/ops/local/norm.hpp>
#include <cpx/ops/local/rotary.hpp>

#include <doctest/doctest.h>

#include <ops/gradients.hpp>
#include <support/rejects.hpp>

#include <algorithm>
#include <span>
#include <vector>

using bits::rows, bits::scattered, bits::size;
using cpx::index_t;

TEST_SUITE("ops") {
    TEST_CASE("sigmoid and silu stay finite where exp overflows") {
        CHECK(cpx::sigmoid(-1e4) == 0);
        CHECK(cpx::sigmoid(1e4) == 1);
        CHECK(cpx::silu(-1e4f) == 0);
        CHECK(cpx::silu(1e4f) == 1e4f);
        CHECK(cpx::silu(0.5) == doctest::Approx(0.31122966560092729).epsilon(1e-15));
    }

    TEST_CASE("softplus is exact for small, large and huge arguments") {
        CHECK(cpx::softplus(0.0) == doctest::Approx(0.69314718055994531).epsilon(1e-15));
        CHECK(cpx::softplus(-40.0) == doctest::Approx(4.2483542552915889e-18).epsilon(1e-14));
        CHECK(cpx::softplus(1e30f) == 1e30f);
        CHECK(cpx::softplus(-1e30f) == 0);
    }

    TEST_CASE_TEMPLATE("silu_mul does each row as if it were alone, bit for bit", T, float, double) {
        auto const gate = bits::uniform<T>(23, 13, 1, 8), up = bits::uniform<T>(23, 13, 2);
        bits::check_rows_are_independent<T>(gate, 13, [&](size first, rows<T const> some, rows<T> y) {
            cpx::silu_mul<T>(some, up.view().sub(first, some.count()), y);
            for (size j = 0; j < 13; ++j) CHECK(y(0, j) == cpx::silu(some(0, j)) * up.view()(first, j));
        });
    }

    TEST_CASE("the gradients of activations are their differences") {
        auto x = bits::uniform<double>(40, 1, 1, 6);
        auto const dy = bits::uniform<double>(40, 1, 2);
        auto const agrees = [&](auto function, auto backward) {
            scattered<double> dx(40, 1);
            for (size i = 0; i < 40; ++i) dx.view()(i, 0) = backward(x.view()(i, 0), dy.view()(i, 0));
            gradients::check(x.view(), dx, [&] {
                double total = 0;
                for (size i = 0; i < 40; ++i) total += dy.view()(i, 0) * function(x.view()(i, 0));
                return total;
            });
        };
        agrees(cpx::sigmoid<double>, cpx::sigmoid_backward<double>);
        agrees(cpx::silu<double>, cpx::silu_backward<double>);
        agrees(cpx::softplus<double>, cpx::softplus_backward<double>);
    }

    TEST_CASE("the gradients of activations stay finite where exp overflows") {
        for (float const x : {-1e38f, -1e4f, 1e4f, 1e38f}) {
            CHECK(cpx::sigmoid_backward(x, 3.0f) == 0);
            CHECK(cpx::silu_backward(x, 3.0f) == (x > 0 ? 3 : 0));
            CHECK(cpx::softplus_backward(x, 3.0f) == (x > 0 ? 3 : 0));
        }
        CHECK(cpx::sigmoid_backward(40.0, 1.0) == doctest::Approx(4.2483542552915889e-18).epsilon(1e-14));
    }

    TEST_CASE("the gradients of silu_mul are its differences and may replace its inputs") {
        auto gate = bits::uniform<double>(5, 7, 1, 5), up = bits::uniform<double>(5, 7, 2);
        auto const dy = bits::uniform<double>(5, 7, 3);
        scattered<double> y(5, 7), dgate(5, 7, 1, 1), dup(5, 7, 2);
        auto const loss = [&] {
            cpx::silu_mul<double>(gate, up, y.view());
            return gradients::loss(y, dy);
        };
        cpx::silu_mul_backward<double>(gate, up, dy, dgate.view(), dup.view());
        gradients::check(gate.view(), dgate, loss);
        gradients::check(up.view(), dup, loss);
        cpx::silu_mul_backward<double>(gate, up, dy, gate.view(), up.view());
        CHECK(bits::same<double>(gate, dgate));
        CHECK(bits::same<double>(up, dup));
    }

    TEST_CASE_TEMPLATE("silu_mul_backward does each row as if it were alone, bit for bit", T, float, double) {
        auto const gate = bits::uniform<T>(23, 13, 1, 8), up = bits::uniform<T>(23, 13, 2),
                   dy = bits::uniform<T>(23, 13, 3);
        bits::check_rows_are_independent<T>(gate, 26, [&](size first, rows<T const> some, rows<T> both) {
            size const n = some.count();
            cpx::silu_mul_backward<T>(some, up.view().sub(first, n), dy.view().sub(first, n), both.columns(0, 13),
                                      both.columns(13, 13));
        });
    }

    TEST_CASE(
        "results that overlap what is read are errors before anything is written, but for those that may replace it") {
        std::vector<float> memory(64), other(64), more(64);
        std::vector<index_t> numbers(8);
        auto const at = [](std::vector<float>& of, index_t first, index_t count, index_t width) {
            return cpx::rows<float>(of.data() + first, count, width);
        };
        cpx::rows<float> const x = at(memory, 0, 4, 4), y = at(other, 0, 4, 4), shifted = at(memory, 4, 4, 4);
        auto const column = [&](index_t i) { return at(more, 8 * i, 4, 1); };
        auto const four = [](cpx::rows<float> r) { return std::span(r.data(), 4); };
        std::span<float const> const gain = four(at(more, 60, 1, 4));
        std::span<index_t const> const tokens = std::span(numbers).first(4);
        std::vector<index_t> const begins{0, 4};
        auto const rejects = [&](std::string const& where, std::string const& both, auto&& call) {
            support::rejects({"local_activation.cpp", where + ": overlap of " + both + ": expected none"}, call);
            for (auto const* buffer : {&memory, &other, &more}) CHECK(std::ranges::count(*buffer, 0.f) == 64);
        };
        rejects("silu_mul", "y and up", [&] { cpx::silu_mul<float>(y, x, shifted); });
        rejects("silu_mul_backward", "dgate and dup", [&] { cpx::silu_mul_backward<float>(x, x, x, y, y); });
        rejects("linear", "y and x", [&] { cpx::linear<float>(x, y, x); });
        rejects("linear_backward_input", "dx and weight", [&] { cpx::linear_backward_input<float>(y, x, x); });
        rejects("linear_backward_weight", "dweight and dy", [&] { cpx::linear_backward_weight<float>(x, y, x); });
        rejects("rms_norm", "y and x", [&] { cpx::rms_norm<float>(x, gain, 1, 1, shifted); });
        rejects("rms_norm", "y and weight", [&] { cpx::rms_norm<float>(x, four(y), 1, 1, y); });
        rejects("gated_rms_norm", "y and z", [&] { cpx::gated_rms_norm<float>(y, x, gain, 1, shifted); });
        rejects("rms_norm_backward", "dx and dy",
                [&] { cpx::rms_norm_backward<float>(y, gain, 1, 1, x, shifted, {}); });
        rejects("rms_norm_backward", "dweight and x",
                [&] { cpx::rms_norm_backward<float>(x, gain, 1, 1, y, y, four(x)); });
        rejects("gated_rms_norm_backward", "dx and dz",
                [&] { cpx::gated_rms_norm_backward<float>(x, x, gain, 1, x, y, y, {}); });
        rejects("rotary", "y and x", [&] { cpx::rotary<float>(x, 4, tokens, {1, 2}, shifted); });
        rejects("rotary", "y and sin", [&] { cpx::rotary<float>(x, 4, column(0), y.columns(0, 1), y); });
        rejects("log_probabilities", "out and logits", [&] { cpx::log_probabilities<float>(x, tokens, four(x)); });
        rejects("log_probabilities_backward", "dlogits and logits",
                [&] { cpx::log_probabilities_backward<float>(x, tokens, gain, shifted); });
        rejects("log_probabilities_backward", "dlogits and dlogp",
                [&] { cpx::log_probabilities_backward<float>(x, tokens, four(y), y); });
        rejects("convolve_segment", "y and x",
                [&] { cpx::convolve_segment<float>({}, x, column(0), nullptr, cpx::activation::none, x); });
        rejects("convolve_segment_backward_sums", "dz and dy", [&] {
            cpx::convolve_segment_backward_sums<float>({}, x, column(0), nullptr, cpx::activation::silu, y, y);
        });
        rejects("convolve_segment_backward_sums", "dz and weight", [&] { // without an activation nothing reads it
            cpx::convolve_segment_backward_sums<float>({}, x, y.columns(0, 1), nullptr, cpx::activation::none, x, y);
        });
        rejects("convolve_segment_backward_input", "dx and dz",
                [&] { cpx::convolve_segment_backward_input<float>(x, {}, column(0), x); });
        rejects("convolve_segment_backward_weight", "dbias and dz",
                [&] { cpx::convolve_segment_backward_weight<float>({}, x, y, column(0), other.data()); });
        rejects("attend_head", "o and q", [&] { cpx::attend_head<float>(x, tokens, y, y, 1, x); });
        cpx::attended_queries<float> const queries{x, x, tokens, gain, gain};
        rejects("attend_head_delta", "delta and o", [&] { cpx::attend_head_delta<float>(x, y, four(x)); });
        rejects("attend_head_backward_query", "dq and q",
                [&] { cpx::attend_head_backward_query<float>(queries, y, y, 1, x); });
        rejects("attend_head_backward_key", "dk and dv",
                [&] { cpx::attend_head_backward_key<float>(queries, x, x, tokens, 1, y, y); });
        cpx::rows<float> const state = at(other, 16, 4, 4), map = at(other, 32, 4, 4);
        rejects("delta_rule_forward", "o and v",
                [&] { cpx::delta_rule_forward<float>(x, x, y, column(0), column(1), 0, {}, state, y); });
        rejects("delta_rule_fold", "end and map",
                [&] { cpx::delta_rule_fold<float>(x, x, column(0), column(1), 0, {}, state, state); });
        rejects("delta_rule_backward", "dk and dv", [&] {
            cpx::delta_rule_backward<float>(x, x, x, column(0), column(1), 0, {}, x, x, state,
                                            {map, y, y, column(2), column(3)});
        });
        rejects("delta_rule_backward_fold", "dstate and dout",
                [&] { cpx::delta_rule_backward_fold<float>(x, x, column(0), column(1), 0, {}, state, state); });
        rejects("expert_linear", "y and x", [&] { cpx::expert_linear<float>(begins, x, y, x); });
        rejects("expert_linear_backward_input", "dx and dy",
                [&] { cpx::expert_linear_backward_input<float>(begins, x, y, x); });
        rejects("expert_linear_backward_weight", "dweight and x",
                [&] { cpx::expert_linear_backward_weight<float>(begins, y, x, x); });
        rejects("choose_experts", "weights and logits", [&] {
            std::vector<index_t> list(16);
            cpx::choose_experts<float>(x, {list.data(), 4, 4}, x);
        });
        cpx::moe_weights<float> const experts{y.sub(0, 1), y.sub(0, 2),     y.columns(0, 1), y.sub(0, 1),
                                              y.sub(0, 1), y.columns(0, 1), y.sub(0, 1)};
        rejects("moe", "y and x", [&] { cpx::moe<float>(experts, x, 1, shifted); });
        rejects("moe", "y and gate", [&] { cpx::moe<float>(experts, x, 1, y); });
    }
}
