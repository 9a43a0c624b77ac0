// SPDX-License-Identifier: Apache-2.0
// Results of convolutions in parts, with and without heads that are normalised.
#include "conv_on_ranks.hpp"
#include "gpus.hpp"

#include <support/rejects.hpp>

namespace {

using namespace convolution;
using cpx::index_t, cpx::rows;
using support::lengths;

/// Calls `f(first element, head_dim)` for every head of every row that is normalised.
template <class F>
void for_each_head(std::vector<width_and_heads> const& list, index_t tokens, index_t channels, F&& f) {
    index_t first = 0;
    for (auto const [width, head_dim] : list) {
        if (head_dim > 0)
            for (index_t row = 0; row < tokens; ++row)
                for (index_t head = first; head < first + width; head += head_dim)
                    f(static_cast<std::size_t>(row * channels + head), static_cast<std::size_t>(head_dim));
        first += width;
    }
}

/// What normalised parts are to give, computed in double from `y`, the result of the convolution alone.
template <class T, class W>
results normalised(problem<T, W> const& p, std::vector<double> const& y, std::vector<width_and_heads> const& list,
                   double epsilon) {
    auto n = y, dy = convert<double>(p.dy);
    for_each_head(list, p.batch.tokens(), p.channels, [&](std::size_t first, std::size_t head_dim) {
        double squares = epsilon, along = 0;
        for (std::size_t i = first; i < first + head_dim; ++i) squares += y[i] * y[i];
        for (std::size_t i = first; i < first + head_dim; ++i) {
            n[i] = y[i] / std::sqrt(squares);
            along += n[i] * dy[i];
        }
        for (std::size_t i = first; i < first + head_dim; ++i) dy[i] = (dy[i] - n[i] * along) / std::sqrt(squares);
    });
    auto r = on_host(p, dy);
    r.y = n;
    return r;
}

std::vector<index_t> const packings[] = {{}, {1}, {5, 1, 0, 12, 3}, {37, 8, 21}, {100, 3, 257}};

} // namespace

TEST_SUITE("cuda") {
    using cpx::index_t;

    TEST_CASE_TEMPLATE("parts hold the channels of the whole, to the bit", T, float, __nv_bfloat16) {
        if (!has_gpus()) return;
        std::uint64_t seed = 50;
        for (auto const& list : std::vector<std::vector<width_and_heads>>{
                 {{16}, {8}, {16}}, {{40}}, {{0}, {24}, {16}}, {{3}, {9}, {1}, {27}}, {{39}, {0}, {0}, {1}}})
            for (auto const& packing : packings)
                for (index_t const taps : {4, 3}) {
                    ++seed;
                    problem<T, float> const p(lengths(packing), 40, taps, seed % 2 != 0, activation::silu, seed);
                    CAPTURE(p.text());
                    placement const at{seed % 3 ? 0 : 8, 0};
                    auto const in_parts = run(p, on_ranks::one_rank(p.batch), at, form{list}),
                               alone = run(p, on_ranks::one_rank(p.batch), at);
                    check_same("y", in_parts.y, alone.y);
                    check_same("dx", in_parts.dx, alone.dx);
                    check_close<T>(in_parts, alone); // sums are added otherwise where parts are not in vectors
                }
    }

    TEST_CASE_TEMPLATE("heads are divided by their norms, and so are their gradients", T, float, __nv_bfloat16,
                       __half) {
        if (!has_gpus()) return;
        index_t const vector = 16 / static_cast<index_t>(sizeof(T));
        std::uint64_t seed = 70;
        for (index_t const head_dim : {vector, 2 * vector, 8 * vector, 16 * vector, 32 * vector})
            for (auto const& list : std::vector<std::vector<width_and_heads>>{
                     {{2 * head_dim, head_dim}, {head_dim, head_dim}, {3 * vector}},
                     {{head_dim}, {5 * head_dim, head_dim}, {vector}},
                     {{head_dim, head_dim}}})
                for (auto const& packing : packings) {
                    index_t channels = 0;
                    for (auto const& part : list) channels += part.width;
                    ++seed;
                    problem<T, float> const p(lengths(packing), channels, 4, seed % 2 != 0,
                                              seed % 3 ? activation::silu : activation::none, seed);
                    CAPTURE(p.text());
                    CAPTURE(head_dim);
                    auto const got = run(p, on_ranks::one_rank(p.batch), {}, form{list, 1e-5f});
                    auto const plain = run(p, on_ranks::one_rank(p.batch)).y;
                    auto const expected = normalised(p, plain, list, 1e-5);
                    check_close<T>(got, expected, 4); // nearly all of a gradient may lie along few heads, and cancel
                    int const ranks = 2 + static_cast<int>(seed % 3);
                    on_ranks::for_each_sharding(p.batch, ranks, {1}, [&](std::string const& name, auto const& s) {
                        CAPTURE(name);
                        auto const r = run(p, s, {}, form{list, 1e-5f});
                        check_same("y", r.y, got.y);
                        check_same("dx", r.dx, got.dx);
                        check_close<T>(r, expected, 4);
                    });
                }
    }

    TEST_CASE("results of another type of 16 bits have its roundings alone") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        using Y = __half;
        std::uint64_t seed = 170;
        for (auto const& list : std::vector<std::vector<width_and_heads>>{
                 {{256, 128}, {128, 128}, {24}}, {{64, 32}, {16, 8}}, {{3}, {9}, {1}, {27}}})
            for (auto const& packing : packings) {
                index_t channels = 0;
                for (auto const& part : list) channels += part.width;
                ++seed;
                problem<T, float> p(lengths(packing), channels, 4, seed % 2 != 0,
                                    seed % 3 ? activation::silu : activation::none, seed);
                p.dy = convert<T>(convert<Y>(p.dy)); // which either type holds
                CAPTURE(p.text());
                auto const got = run_to<Y>(p, on_ranks::one_rank(p.batch), {}, form{list, 1e-5f});
                auto const plain = run_to<Y>(p, on_ranks::one_rank(p.batch));
                check_close<T, Y>(plain, on_host(p));
                auto const expected = normalised(p, plain.y, list, 1e-5);
                check_close<T, Y>(got, expected, 4);
                int const ranks = 2 + static_cast<int>(seed % 3);
                on_ranks::for_each_sharding(p.batch, ranks, {1}, [&](std::string const& name, auto const& s) {
                    CAPTURE(name);
                    auto const r = run_to<Y>(p, s, {}, form{list, 1e-5f});
                    check_same("y", r.y, got.y);
                    check_same("dx", r.dx, got.dx);
                    check_close<T, Y>(r, expected, 4);
                });
            }
    }

    TEST_CASE("parts and heads that do not fit are refused, by name") {
        if (!has_gpus()) return;
        auto const rejects = [](std::string const& passage, index_t taps, std::vector<width_and_heads> const& list,
                                placement at = {}) {
            CAPTURE(passage);
            problem<float, float> const p(lengths({7, 6}), 64, taps, true, activation::silu, 1);
            support::rejects({passage}, [&] { run(p, on_ranks::one_rank(p.batch), at, form{list}); });
        };
        rejects("channels of all parts of y: expected 64, got 60", 4, {{32}, {28}});
        rejects("head_dim of part 1 of y: expected 4 times a power of two up to 32, got 24", 4, {{16}, {48, 24}});
        rejects("head_dim of part 0 of y: expected 4 times a power of two up to 32, got 2", 4, {{64, 2}});
        rejects("first channel and width of part 1 of y: expected multiples of head_dim, 32, got 16, 32", 4,
                {{16}, {32, 32}, {16}});
        rejects("first channel and width of part 0 of y: expected multiples of head_dim, 32, got 0, 48", 4,
                {{48, 32}, {16}});
        rejects("head_dim of part 0 of y: expected not negative, got -4", 4, {{64, -4}});
        rejects("taps and alignment for heads to be normalised", 3, {{64, 16}});
        rejects("taps and alignment for heads to be normalised", 4, {{64, 16}}, {1, 0});
        rejects("taps and alignment for heads to be normalised", 4, {{64, 16}}, {0, 1});
    }

    TEST_CASE("gradients of parts and heads that do not fit are refused, by name") {
        if (!has_gpus()) return;
        auto const sharding = on_ranks::one_rank(lengths({7, 6}));
        cpx::cuda::stream const stream;
        auto const rejects = [&](std::string const& passage, index_t taps, std::vector<width_and_heads> const& list,
                                 placement of_dy = {}, placement of_dx = {}) {
            CAPTURE(passage);
            cpx::cuda::conv_plan const plan(cpx::halo(sharding, 0, taps - 1),
                                            cpx::halo(sharding, 0, taps - 1, cpx::side::after));
            std::vector<float> const tensor(13 * 64, 1.0f);
            device_rows<float> const x(tensor, 64, {}), dx(13, 64, of_dx);
            device_rows<float> const weight(std::vector<float>(static_cast<std::size_t>(64 * taps)), taps, {});
            device_result<float> const dy(tensor, 64, of_dy, form{list});
            auto const rejects_by = [&](std::string const& where, auto&& backward) {
                support::rejects({where, passage}, [&] {
                    dy.as<float const>(
                        [&](auto const& given) { backward(rows<float const>(x), rows<float const>(weight), given); });
                });
            };
            if (of_dx.shift == 0)
                rejects_by("cuda::causal_conv1d_backward_edge", [&](auto x, auto w, auto const& given) {
                    cpx::cuda::causal_conv1d_backward_edge(plan, x, {}, w, {}, activation::silu, given, {}, stream);
                });
            rejects_by("cuda::causal_conv1d_backward", [&](auto x, auto w, auto const& given) {
                cpx::cuda::causal_conv1d_backward(plan, x, {}, w, {}, activation::silu, given, {}, {}, {dx.view()},
                                                  stream);
            });
            check_same("dx", convert<double>(dx.read()), std::vector<double>(13 * 64, NAN)); // not written
        };
        rejects("channels of all parts of dy: expected 64, got 60", 4, {{32}, {28}});
        rejects("head_dim of part 1 of dy: expected 4 times a power of two up to 32, got 24", 4, {{16}, {48, 24}});
        rejects("taps and alignment for heads to be normalised", 3, {{64, 16}});
        rejects("taps and alignment for heads to be normalised", 4, {{64, 16}}, {1, 0});
        rejects("alignment of dx: expected 16 bytes, for heads that were normalised", 4, {{64, 16}}, {}, {0, 1});
    }
}
