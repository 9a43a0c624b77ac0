// SPDX-License-Identifier: Apache-2.0
// Convolutions on GPUs: problems, tensors in device memory with poison around them, and how results are compared.
#pragma once

#include <cpx/cuda/causal_conv1d.hpp>

#include <doctest/doctest.h>

#include <ops/on_ranks.hpp>

#include <cmath>
#include <string>
#include <vector>

namespace convolution {

using cpx::index_t, cpx::rows;
using cpx::cuda::activation;
using on_ranks::relative_error, on_ranks::same_bits;

template <class T>
constexpr char const* name_of() {
    return std::is_same_v<T, float> ? "float" : std::is_same_v<T, __half> ? "half" : "bfloat16";
}

template <class To, class From>
std::vector<To> convert(std::vector<From> const& values) {
    std::vector<To> result;
    for (From const value : values) result.push_back(static_cast<To>(static_cast<float>(value)));
    return result;
}

/// A convolution and the gradient of its result; T and W hold all values exactly.
template <class T, class W>
struct problem {
    cpx::thd batch;
    index_t channels = 1, taps = 4;
    activation act = activation::silu;
    std::vector<T> x, dy;
    std::vector<W> weight, bias;

    problem(cpx::thd const& of, index_t width, index_t k, bool with_bias, activation a, std::uint64_t seed)
        : batch(of), channels(width), taps(k), act(a) {
        support::splitmix numbers(seed);
        x = convert<T>(on_ranks::uniform<float>(numbers, batch.tokens() * width, 2));
        dy = convert<T>(on_ranks::uniform<float>(numbers, batch.tokens() * width));
        weight = convert<W>(on_ranks::uniform<float>(numbers, width * k));
        bias = convert<W>(on_ranks::uniform<float>(numbers, with_bias ? width : 0));
    }
    std::string text() const {
        return std::string(name_of<T>()) + ", weight " + name_of<W>() + ", sequences " + support::text(batch) + ", " +
               std::to_string(channels) + " channels, " + std::to_string(taps) + " taps" +
               (bias.empty() ? "" : ", bias") + (act == activation::silu ? ", silu" : "");
    }
};

/// Whole tensors, (tokens, channels), and the sums over all ranks; double holds all of their values exactly.
struct results {
    std::vector<double> y, dx, dweight, dbias;
};

/// Where the rows of a tensor lie in memory: after `shift` elements, with `gap` elements between them.
struct placement {
    index_t gap = 0, shift = 0;
};

/// Rows in device memory; everything else in it is poison.
template <class T>
class device_rows {
public:
    device_rows(index_t count, index_t width, placement at)
        : count_(count), width_(width), at_(at), host_(size(), static_cast<T>(NAN)),
          memory_(std::span<T const>(host_)) {}
    device_rows(std::vector<T> const& values, index_t width, placement at)
        : device_rows(width > 0 ? std::ssize(values) / width : 0, width, at) {
        write(values);
    }
    /// Writes all rows, which lie side by side in `values`.
    void write(std::vector<T> const& values) {
        for (index_t i = 0; i < count_; ++i) std::copy_n(values.data() + i * width_, width_, host_.data() + offset(i));
        memory_.write(host_);
    }
    rows<T> view() const { return {memory_.data() + at_.shift, count_, width_, width_ + at_.gap}; }
    operator rows<T>() const { return view(); }
    operator rows<T const>() const { return view(); }
    /// Returns the rows, and checks that nothing but them was written.
    std::vector<T> read() const {
        auto const all = memory_.read();
        std::vector<T> values;
        std::vector<bool> mine(all.size());
        for (index_t i = 0; i < count_; ++i)
            for (index_t k = offset(i); k < offset(i) + width_; ++k) {
                values.push_back(all[static_cast<std::size_t>(k)]);
                mine[static_cast<std::size_t>(k)] = true;
            }
        for (std::size_t k = 0; k < all.size(); ++k)
            if (!mine[k]) CHECK(same_bits(all[k], host_[k]));
        return values;
    }

private:
    std::size_t size() const { return static_cast<std::size_t>(at_.shift + count_ * (width_ + at_.gap) + 3); }
    index_t offset(index_t row) const { return at_.shift + row * (width_ + at_.gap); }

    index_t count_, width_;
    placement at_;
    std::vector<T> host_;
    cpx::cuda::buffer<T> memory_;
};

/// Channels of a part, and of its heads if they are normalised.
struct width_and_heads {
    index_t width, head_dim = 0;
};

/// What a convolution writes: one tensor or, if they are listed, parts.
struct form {
    std::vector<width_and_heads> parts;
    float epsilon = 1e-6f;
};

/// A result, or its gradient, in device memory: every part has memory and a stride of its own.
template <class T>
class device_result {
public:
    device_result(index_t count, index_t channels, placement at, form const& of)
        : form_(of), count_(count), channels_(channels) {
        std::vector<width_and_heads> const list =
            of.parts.empty() ? std::vector<width_and_heads>{{channels}} : of.parts;
        for (auto const& part : list)
            parts_.emplace_back(count, part.width, placement{at.gap + 8 * std::ssize(parts_), at.shift});
    }
    device_result(std::vector<T> const& values, index_t channels, placement at, form const& of)
        : device_result(channels > 0 ? std::ssize(values) / channels : 0, channels, at, of) {
        index_t first = 0;
        for (auto& part : parts_) {
            index_t const width = part.view().width();
            std::vector<T> own;
            for (index_t i = 0; i < count_ && first + width <= channels; ++i) {
                auto const from = values.begin() + i * channels + first;
                own.insert(own.end(), from, from + width);
            }
            if (!own.empty()) part.write(own);
            first += width;
        }
    }
    /// Calls `f` with rows of U, which is T or T const, or with parts of them.
    template <class U, class F>
    void as(F&& f) const {
        auto const view = [&](std::size_t p) {
            rows<T> const all = parts_[p].view();
            return rows<U>(all.data(), all.count(), all.width(), all.stride());
        };
        if (form_.parts.empty()) return f(view(0));
        cpx::cuda::conv_parts<U> to{{}, form_.epsilon};
        for (std::size_t p = 0; p < parts_.size(); ++p)
            to.part[p] = {form_.parts[p].width > 0 ? view(p) : rows<U>(), form_.parts[p].head_dim};
        f(to);
    }
    /// Returns all channels side by side, and checks that nothing but them was written.
    std::vector<T> read() const {
        std::vector<T> all(static_cast<std::size_t>(count_ * channels_), static_cast<T>(NAN));
        index_t first = 0;
        for (auto const& part : parts_) {
            auto const own = part.read();
            index_t const width = part.view().width();
            REQUIRE(first + width <= channels_);
            for (index_t i = 0; i < count_; ++i)
                std::copy_n(own.begin() + i * width, width, all.begin() + i * channels_ + first);
            first += width;
        }
        return all;
    }

private:
    form form_;
    index_t count_, channels_;
    std::vector<device_rows<T>> parts_;
};

/// Writes what `rank` holds of a tensor, its rows side by side, to their places in the whole one.
template <class T, cpx::any_sharding S>
void place(std::vector<T> const& local, S const& sharding, int rank, index_t width, std::vector<double>& whole) {
    auto next = local.begin();
    sharding.for_each_piece(rank, [&](cpx::range piece) {
        for (index_t i = piece.first * width; i < piece.last * width; ++i) {
            if constexpr (std::is_same_v<T, double>)
                whole[static_cast<std::size_t>(i)] = *next++;
            else
                whole[static_cast<std::size_t>(i)] = static_cast<double>(static_cast<float>(*next++));
        }
    });
}

/// What a rank adds to dweight and dbias.
struct rank_sums {
    std::vector<float> dweight, dbias;
};

inline void add_sums(results& to, std::vector<rank_sums> const& of_ranks) {
    auto const add = [](std::vector<double>& sums, std::vector<float> const& values) {
        for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += static_cast<double>(values[i]);
    };
    for (auto const& [dweight, dbias] : of_ranks) {
        add(to.dweight, dweight);
        add(to.dbias, dbias);
    }
}

/// How far numbers may be from what they are rounded from.
template <class T>
constexpr double rounding_of = std::is_same_v<T, float>    ? 1e-6
                               : std::is_same_v<T, __half> ? 5e-4
                                                           : 4e-3;

/// Checks results against the reference: to a rounding of T, or of Y what is of Y, sums to some of float, gradients to
/// `times` as much.
template <class T, class Y = T>
void check_close(results const& got, results const& expected, double times = 1) {
    double const sums = times * (std::is_same_v<T, float> ? 3e-6 : 1e-5);
    auto const check = [](char const* name, std::vector<double> const& a, std::vector<double> const& b, double most) {
        double const error = relative_error(a, b);
        std::size_t i = 0;
        while (i < a.size() && std::abs(a[i] - b[i]) <= 4 * most * (std::abs(b[i]) + 1)) ++i;
        if (i == a.size()) i = 0;
        CHECK_MESSAGE(error <= most, name << ", first at " << i << ": " << (a.empty() ? 0 : a[i]) << " for "
                                          << (b.empty() ? 0 : b[i]));
    };
    check("y", got.y, expected.y, rounding_of<Y>);
    check("dx", got.dx, expected.dx, times * rounding_of<T>);
    check("dweight", got.dweight, expected.dweight, sums);
    check("dbias", got.dbias, expected.dbias, sums);
}

/// Checks that the tensors are the same bit for bit.
inline void check_same(char const* name, std::vector<double> const& a, std::vector<double> const& b) {
    std::size_t i = 0;
    while (i < a.size() && i < b.size() && same_bits(a[i], b[i])) ++i;
    CHECK_MESSAGE((i == a.size() && i == b.size()),
                  name << " of " << a.size() << " and " << b.size() << " elements differ first at " << i << ": "
                       << (i < a.size() ? a[i] : 0) << ", " << (i < b.size() ? b[i] : 0));
}

} // namespace convolution
