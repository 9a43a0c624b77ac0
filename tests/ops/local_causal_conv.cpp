// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/local/causal_conv.hpp>

#include <cpx/model/safetensors.hpp>

#include <doctest/doctest.h>

#include <support/files.hpp>

#include <ops/gradients.hpp>

using bits::rows, bits::scattered, bits::size;

namespace {

/// Convolves a sequence cut at `cuts`, each segment with as much history as there is.
template <class T>
scattered<T> in_segments(rows<T const> x, rows<T const> weight, T const* bias, cpx::activation act,
                         std::vector<size> cuts) {
    scattered<T> y(x.count(), x.width(), 3, 1);
    cuts.push_back(x.count());
    size begin = 0;
    for (size const end : cuts) {
        size const known = std::min(begin, weight.width() - 1);
        scattered<T> const history(x.sub(begin - known, known), begin % 3, begin % 4);
        scattered<T> const segment(x.sub(begin, end - begin), end % 4, end % 3);
        cpx::convolve_segment<T>(history, segment, weight, bias, act, y.view().sub(begin, end - begin));
        begin = end;
    }
    return y;
}

template <class T>
struct conv_gradients {
    scattered<T> dx, dweight, dbias;
};

/// The backward of a sequence cut at `cuts`, added to weight gradients of `start`.
template <class T>
conv_gradients<T> backward(rows<T const> x, rows<T const> weight, T const* bias, cpx::activation act, rows<T const> dy,
                           std::vector<size> cuts, double start = 0) {
    conv_gradients<T> result{{x.count(), x.width(), 1, 2},
                             bits::uniform<T>(x.width(), weight.width(), 8, start),
                             bits::uniform<T>(1, x.width(), 9, start)};
    scattered<T> dz(x.count(), x.width(), 3, 1);
    cuts.insert(cuts.begin(), 0);
    cuts.push_back(x.count());
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        size const begin = cuts[i], n = cuts[i + 1] - begin, known = std::min(begin, weight.width() - 1);
        scattered<T> const history(x.sub(begin - known, known), begin % 3, begin % 4), segment(x.sub(begin, n), 2, 1);
        cpx::convolve_segment_backward_sums<T>(history, segment, weight, bias, act, dy.sub(begin, n),
                                               dz.view().sub(begin, n));
        cpx::convolve_segment_backward_weight<T>(history, segment, dz.view().sub(begin, n), result.dweight.view(),
                                                 bias == nullptr ? nullptr : result.dbias.view().data());
    }
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        size const end = cuts[i + 1], n = end - cuts[i], follow = std::min(x.count() - end, weight.width() - 1);
        scattered<T> const future(dz.view().sub(end, follow), end % 3, end % 4),
            segment(dz.view().sub(cuts[i], n), 1, 2);
        cpx::convolve_segment_backward_input<T>(segment, future, weight, result.dx.view().sub(cuts[i], n));
    }
    return result;
}

template <class T>
void check_same(conv_gradients<T> const& a, conv_gradients<T> const& b) {
    CHECK(bits::same<T>(a.dx, b.dx));
    CHECK(bits::same<T>(a.dweight, b.dweight));
    CHECK(bits::same<T>(a.dbias, b.dbias));
}

} // namespace

TEST_SUITE("ops") {
    TEST_CASE_TEMPLATE("the convolution weighs the last K tokens, zeros before the sequence", T, float, double) {
        for (size const taps : {1, 2, 4, 9})
            for (size const n : {0, 1, 3, 20}) {
                size const channels = 7;
                auto const x = bits::uniform<T>(n, channels, 1), weight = bits::uniform<T>(channels, taps, 2);
                auto const bias = bits::uniform<T>(1, channels, 3);
                auto const y = in_segments<T>(x, weight, bias.view().data(), cpx::activation::none, {});
                for (size t = 0; t < n; ++t)
                    for (size d = 0; d < channels; ++d) {
                        auto expected = static_cast<double>(bias.view()(0, d));
                        for (size back = 0; back < taps && back <= t; ++back)
                            expected += static_cast<double>(weight.view()(d, taps - 1 - back)) *
                                        static_cast<double>(x.view()(t - back, d));
                        CHECK(std::abs(static_cast<double>(y.view()(t, d)) - expected) <=
                              10 * std::numeric_limits<T>::epsilon());
                    }
            }
    }

    TEST_CASE_TEMPLATE("the convolution does not depend on where a sequence is cut, bit for bit", T, float, double) {
        for (size const taps : {1, 2, 4, 6}) {
            auto const x = bits::uniform<T>(12, 19, 1), weight = bits::uniform<T>(19, taps, 2);
            auto const whole = in_segments<T>(x, weight, nullptr, cpx::activation::silu, {});
            for (size a = 0; a <= 12; ++a)
                for (size b = a; b <= 12; ++b) {
                    CAPTURE(a);
                    CAPTURE(b);
                    auto const y = in_segments<T>(x, weight, nullptr, cpx::activation::silu, {a, b});
                    CHECK(bits::same<T>(y, whole));
                }
        }
    }

    TEST_CASE_TEMPLATE("a channel does not depend on the channels beside it, bit for bit", T, float, double) {
        auto const x = bits::uniform<T>(6, 29, 1), weight = bits::uniform<T>(29, 4, 2),
                   bias = bits::uniform<T>(1, 29, 3);
        auto const all = in_segments<T>(x, weight, bias.view().data(), cpx::activation::silu, {});
        for (size const count : {1, 5, 16})
            for (size first = 0; first + count <= 29; ++first) {
                scattered<T> const some(x.view().columns(first, count), 2, first % 5);
                auto const y = in_segments<T>(some, weight.view().sub(first, count), bias.view().data() + first,
                                              cpx::activation::silu, {});
                CHECK(bits::same<T>(y, all.view().columns(first, count)));
            }
    }

    TEST_CASE_TEMPLATE("the convolution agrees with torch", T, float, double) {
        for (std::string const name : {"conv_linear", "conv_silu", "conv_bias"}) {
            CAPTURE(name);
            cpx::safetensors const file(std::string(support::golden_dir) + "/" + name + ".safetensors");
            size const channels = file.tensor("weight").shape.at(0), taps = file.tensor("weight").shape.at(1);
            auto const x = file.read<T>("x"), weight = file.read<T>("weight");
            auto const expected = file.read<double>("y");
            auto const bias = file.contains("bias") ? file.read<T>("bias") : std::vector<T>();
            auto const offsets = file.read<cpx::index_t>("cu_seqlens");
            auto const act = file.metadata("activation") == "silu" ? cpx::activation::silu : cpx::activation::none;
            for (size const step : {1, 3, 1000})
                for (std::size_t s = 0; s + 1 < offsets.size(); ++s) {
                    size const begin = offsets[s], n = offsets[s + 1] - begin;
                    std::vector<size> cuts;
                    for (size cut = step; cut < n; cut += step) cuts.push_back(cut);
                    auto const y = in_segments<T>(rows<T const>(x, channels).sub(begin, n), rows<T const>(weight, taps),
                                                  bias.empty() ? nullptr : bias.data(), act, cuts);
                    double const error =
                        bits::relative_error<T, double>(y, rows<double const>(expected, channels).sub(begin, n));
                    CHECK(error <= 1e-6);
                }
        }
    }

    TEST_CASE("the gradients of the convolution are its differences") {
        for (auto const act : {cpx::activation::none, cpx::activation::silu})
            for (size const taps : {1, 2, 5})
                for (size const n : {0, 1, 3, 9}) {
                    size const channels = 3;
                    auto x = bits::uniform<double>(n, channels, 1, 2),
                         weight = bits::uniform<double>(channels, taps, 2),
                         bias = bits::uniform<double>(1, channels, 3);
                    auto const dy = bits::uniform<double>(n, channels, 4);
                    auto const loss = [&] {
                        return gradients::loss(in_segments<double>(x, weight, bias.view().data(), act, {}), dy);
                    };
                    auto const got = backward<double>(x, weight, bias.view().data(), act, dy, {});
                    gradients::check(x.view(), got.dx, loss);
                    gradients::check(weight.view(), got.dweight, loss);
                    gradients::check(bias.view(), got.dbias, loss);
                }
    }

    TEST_CASE_TEMPLATE("the gradients of the convolution do not depend on where a sequence is cut, bit for bit", T,
                       float, double) {
        for (size const taps : {1, 2, 4, 6}) {
            auto const x = bits::uniform<T>(12, 19, 1), weight = bits::uniform<T>(19, taps, 2),
                       dy = bits::uniform<T>(12, 19, 3), bias = bits::uniform<T>(1, 19, 4);
            auto const run = [&](std::vector<size> cuts) {
                return backward<T>(x, weight, bias.view().data(), cpx::activation::silu, dy, cuts, 1);
            };
            auto const whole = run({});
            for (size a = 0; a <= 12; ++a)
                for (size b = a; b <= 12; ++b) {
                    CAPTURE(a);
                    CAPTURE(b);
                    check_same(run({a, b}), whole);
                }
            check_same(run({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}), whole);
        }
    }

    TEST_CASE_TEMPLATE("a channel's gradients do not depend on the channels beside it, bit for bit", T, float, double) {
        auto const x = bits::uniform<T>(6, 29, 1), weight = bits::uniform<T>(29, 4, 2),
                   bias = bits::uniform<T>(1, 29, 3), dy = bits::uniform<T>(6, 29, 4);
        auto const all = backward<T>(x, weight, bias.view().data(), cpx::activation::silu, dy, {});
        for (size const count : {1, 5, 16})
            for (size first = 0; first + count <= 29; ++first) {
                auto const got =
                    backward<T>(x.view().columns(first, count), weight.view().sub(first, count),
                                bias.view().data() + first, cpx::activation::silu, dy.view().columns(first, count), {});
                CHECK(bits::same<T>(got.dx, all.dx.view().columns(first, count)));
                CHECK(bits::same<T>(got.dweight, all.dweight.view().sub(first, count)));
                CHECK(bits::same<T>(got.dbias, all.dbias.view().columns(first, count)));
            }
    }

    TEST_CASE_TEMPLATE("the gradients of the convolution agree with torch", T, float, double) {
        for (std::string const name : {"conv_linear", "conv_silu", "conv_bias"}) {
            CAPTURE(name);
            cpx::safetensors const file(std::string(support::golden_dir) + "/" + name + ".safetensors");
            size const channels = file.tensor("weight").shape.at(0), taps = file.tensor("weight").shape.at(1);
            auto const x = file.read<T>("x"), weight = file.read<T>("weight"), dy = file.read<T>("dy");
            auto const dx = file.read<double>("dx"), dweight = file.read<double>("dweight");
            auto const bias = file.contains("bias") ? file.read<T>("bias") : std::vector<T>();
            auto const offsets = file.read<cpx::index_t>("cu_seqlens");
            auto const act = file.metadata("activation") == "silu" ? cpx::activation::silu : cpx::activation::none;
            auto total_weight = bits::uniform<T>(channels, taps, 1, 0),
                 total_bias = bits::uniform<T>(1, channels, 1, 0);
            for (std::size_t s = 0; s + 1 < offsets.size(); ++s) {
                size const begin = offsets[s], n = offsets[s + 1] - begin;
                auto const got = backward<T>(rows<T const>(x, channels).sub(begin, n), rows<T const>(weight, taps),
                                             bias.empty() ? nullptr : bias.data(), act,
                                             rows<T const>(dy, channels).sub(begin, n), {});
                CHECK(bits::relative_error<T, double>(got.dx, rows<double const>(dx, channels).sub(begin, n)) <= 1e-6);
                for (size channel = 0; channel < channels; ++channel) {
                    for (size j = 0; j < taps; ++j) total_weight.view()(channel, j) += got.dweight.view()(channel, j);
                    total_bias.view()(0, channel) += got.dbias.view()(0, channel);
                }
            }
            CHECK(bits::relative_error<T, double>(total_weight, rows<double const>(dweight, taps)) <= 1e-6);
            if (bias.empty()) continue;
            auto const dbias = file.read<double>("dbias");
            CHECK(bits::relative_error<T, double>(total_bias, rows<double const>(dbias, channels)) <= 1e-6);
        }
    }

    TEST_CASE("more history than the weight reaches is an error") {
        auto const x = bits::uniform<float>(4, 2, 1), weight = bits::uniform<float>(2, 4, 2);
        scattered<float> y(4, 2);
        CHECK_THROWS_WITH_AS(cpx::convolve_segment<float>(x, x, weight, nullptr, cpx::activation::none, y.view()),
                             doctest::Contains("rows of history: expected at most 3, got 4"), cpx::error);
        CHECK_THROWS_WITH_AS(cpx::convolve_segment_backward_input<float>(x, x, weight, y.view()),
                             doctest::Contains("rows of future: expected at most 3, got 4"), cpx::error);
    }
}
