// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/local/log_probability.hpp>

#include <doctest/doctest.h>

#include <ops/gradients.hpp>
#include <support/rejects.hpp>

using bits::rows, bits::scattered, bits::size;

namespace {

double const infinity = std::numeric_limits<double>::infinity();

/// Every third row has no label; the others go through the vocabulary, its ends included.
std::vector<size> labels_of(size count, size vocabulary) {
    std::vector<size> labels;
    for (size i = 0; i < count; ++i)
        labels.push_back(i % 3 == 1 || vocabulary == 0 ? cpx::ignored : (vocabulary - 1 + 5 * (i / 3)) % vocabulary);
    return labels;
}

template <class T>
std::vector<T> forward(rows<T const> logits, std::span<size const> labels) {
    std::vector<T> logp(labels.size(), std::numeric_limits<T>::quiet_NaN());
    cpx::log_probabilities<T>(logits, labels, logp);
    return logp;
}

/// Returns p_j of one row, in long double.
template <class T>
std::vector<long double> softmax(T const* logits, size width) {
    std::vector<long double> p;
    long double sum = 0;
    T const highest = *std::max_element(logits, logits + width);
    for (size j = 0; j < width; ++j) p.push_back(std::exp(static_cast<long double>(logits[j]) - highest));
    for (long double const x : p) sum += x;
    for (long double& x : p) x /= sum;
    return p;
}

} // namespace

TEST_SUITE("ops") {
    TEST_CASE_TEMPLATE("log_probabilities is the logarithm of softmax and its gradient is onehot - softmax", T, float,
                       double) {
        for (size const vocabulary : {1, 2, 3, 7, 16, 33, 20000})
            for (size const count : {0, 1, 2, 7}) {
                CAPTURE(vocabulary);
                CAPTURE(count);
                auto const tight = bits::uniform<T>(count, vocabulary, 1, 5);
                scattered<T> const logits(tight.view(), 3, 1);
                auto const dy = bits::uniform<T>(1, count, 2);
                std::span<T const> const dlogp(dy.view().data(), static_cast<std::size_t>(count));
                auto const labels = labels_of(count, vocabulary);
                auto const logp = forward<T>(logits, labels);
                scattered<T> dlogits(count, vocabulary, 2, 3);
                cpx::log_probabilities_backward<T>(logits, labels, dlogp, dlogits.view());
                // differences of up to 10 are rounded once, and exp makes that a relative error; the sum is a double
                long double const within = 16 * static_cast<long double>(std::numeric_limits<T>::epsilon()) +
                                           std::sqrt(static_cast<long double>(vocabulary)) * 0x1p-52L;
                for (size i = 0; i < count; ++i) {
                    auto const at = static_cast<std::size_t>(i);
                    size const label = labels[at];
                    auto const p = softmax(logits.view().row(i), vocabulary);
                    if (label == cpx::ignored)
                        CHECK(logp[at] == 0);
                    else
                        CHECK(std::abs(logp[at] - std::log(p[static_cast<std::size_t>(label)])) <= within);
                    for (size j = 0; j < vocabulary; ++j) {
                        long double const d = label == cpx::ignored ? 0 : dlogp[at];
                        long double const wanted = d * ((j == label) - p[static_cast<std::size_t>(j)]);
                        REQUIRE(std::abs(dlogits.view()(i, j) - wanted) <= within * std::abs(d));
                    }
                }
            }
    }

    TEST_CASE_TEMPLATE("a row's log-probability and gradient do not depend on the rows beside it, bit for bit", T,
                       float, double) {
        size const vocabulary = 37;
        auto const logits = bits::uniform<T>(23, vocabulary, 3, 4), dy = bits::uniform<T>(1, 23, 4);
        auto const labels = labels_of(23, vocabulary);
        auto const subspan = [](auto const* data, size first, size count) {
            return std::span(data + first, static_cast<std::size_t>(count));
        };
        bits::check_rows_are_independent<T>(logits, 1, [&](size first, rows<T const> some, rows<T> y) {
            auto const logp = forward<T>(some, subspan(labels.data(), first, some.count()));
            for (size i = 0; i < y.count(); ++i) y(i, 0) = logp[static_cast<std::size_t>(i)];
        });
        bits::check_rows_are_independent<T>(logits, vocabulary, [&](size first, rows<T const> some, rows<T> dlogits) {
            auto const of_rows = subspan(labels.data(), first, some.count());
            std::span<T const> const dlogp = subspan(dy.view().data(), first, some.count());
            cpx::log_probabilities_backward<T>(some, of_rows, dlogp, dlogits);
            scattered<T> in_place(some, 1, 2);
            cpx::log_probabilities_backward<T>(in_place, of_rows, dlogp, in_place.view());
            CHECK(bits::same<T>(in_place, dlogits));
        });
    }

    TEST_CASE("the gradient of log-probabilities is their difference") {
        for (size const vocabulary : {2, 3, 20}) {
            auto logits = bits::uniform<double>(5, vocabulary, 1, 3);
            auto const dy = bits::uniform<double>(1, 5, 2);
            auto const labels = labels_of(5, vocabulary);
            scattered<double> dlogits(5, vocabulary, 1);
            cpx::log_probabilities_backward<double>(logits, labels, std::span(dy.view().data(), 5), dlogits.view());
            gradients::check(logits.view(), dlogits, [&] {
                auto const logp = forward<double>(logits, labels);
                return gradients::loss(rows<double const>(logp, 5), dy);
            });
        }
    }

    TEST_CASE_TEMPLATE("a constant that all logits of a row gain changes no bit and does not overflow", T, float,
                       double) {
        auto logits = bits::uniform<T>(6, 11, 7);
        for (size i = 0; i < 6; ++i)
            for (size j = 0; j < 11; ++j) logits.view()(i, j) = std::round(64 * logits.view()(i, j)) / 16;
        auto const labels = labels_of(6, 11);
        auto const before = forward<T>(logits, labels);
        for (T const gain : {T(4096), T(-4096)}) { // exact: the logits are multiples of 1/16
            auto shifted = logits;
            for (size i = 0; i < 6; ++i)
                for (size j = 0; j < 11; ++j) shifted.view()(i, j) += gain;
            CHECK(forward<T>(shifted, labels) == before);
        }
    }

    TEST_CASE_TEMPLATE("impossible tokens have no probability, and NaN stays in labelled rows", T, float, double) {
        T const never = static_cast<T>(-infinity), nan = std::numeric_limits<T>::quiet_NaN();
        std::vector<T> const one(1, T(2));
        std::vector<T> dlogits(4, nan);
        auto const backward = [&](std::vector<T> const& logits, size label) {
            cpx::log_probabilities_backward<T>(rows<T const>(logits, 4), std::span(&label, 1), one,
                                               rows<T>(dlogits, 4));
            return dlogits;
        };
        auto const logp = [](std::vector<T> const& logits, size label) {
            return forward<T>(rows<T const>(logits, 4), std::span(&label, 1)).front();
        };
        std::vector<T> const masked = {never, 1, never, 1};
        CHECK(logp(masked, 1) == doctest::Approx(-std::log(2.0)));
        CHECK(logp(masked, 0) == never);
        CHECK(backward(masked, 1) == std::vector<T>{0, 1, 0, -1});
        CHECK(backward(masked, 0) == std::vector<T>{2, -1, 0, -1});
        for (std::size_t at = 0; at < 4; ++at) {
            std::vector<T> broken = {1, 2, 3, 4};
            broken[at] = nan;
            for (size label = 0; label < 4; ++label) {
                CHECK(std::isnan(logp(broken, label)));
                for (T const d : backward(broken, label)) CHECK(std::isnan(d));
            }
            CHECK(logp(broken, cpx::ignored) == 0);
            CHECK(backward(broken, cpx::ignored) == std::vector<T>(4));
        }
    }

    TEST_CASE("log_probabilities rejects what does not fit and names the row, before it writes") {
        auto const logits = bits::uniform<double>(3, 5, 1);
        double const untouched = 42;
        std::vector<double> out(3, untouched), d(15, untouched);
        rows<double> const dlogits(d, 5);
        auto const call = [&](std::vector<size> const& labels, std::span<double> to) {
            return [&, labels, to] { cpx::log_probabilities<double>(logits, labels, to); };
        };
        auto const back = [&](std::vector<size> const& labels, std::span<double const> dlogp, rows<double> to) {
            return [&, labels, dlogp, to] { cpx::log_probabilities_backward<double>(logits, labels, dlogp, to); };
        };
        support::rejects({"local_log_probability.cpp", "log_probabilities: label of row 2: expected -1 to 4, got 5"},
                         call({0, -1, 5}, out));
        support::rejects({"log_probabilities: label of row 1: expected -1 to 4, got -2"}, call({0, -2, 5}, out));
        support::rejects({"log_probabilities: number of labels: expected 3, got 2"}, call({0, 1}, out));
        support::rejects({"log_probabilities: size of out: expected 3, got 2"},
                         call({0, 1, 2}, std::span(out).first(2)));
        support::rejects({"local_log_probability.cpp", "log_probabilities_backward: label of row 0", "got 7"},
                         back({7, 0, 0}, out, dlogits));
        support::rejects({"log_probabilities_backward: number of labels: expected 3, got 4"},
                         back({0, 0, 0, 0}, out, dlogits));
        support::rejects({"log_probabilities_backward: size of dlogp: expected 3, got 1"},
                         back({0, 0, 0}, std::span(out).first(1), dlogits));
        support::rejects({"log_probabilities_backward: shape of dlogits: expected (3, 5), got (3, 4)"},
                         back({0, 0, 0}, out, dlogits.columns(0, 4)));
        CHECK(out == std::vector<double>(3, untouched));
        CHECK(d == std::vector<double>(15, untouched));
        CHECK(support::message(call({0, -1, 4}, out)) == "");
        CHECK(support::message(back({0, -1, 4}, out, dlogits)) == "");
    }
}
