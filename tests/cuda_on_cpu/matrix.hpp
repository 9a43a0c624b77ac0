// SPDX-License-Identifier: Apache-2.0
// Rows as kernels take them, in the memory of the CPU.
#pragma once

#include <cpx/core/index.hpp>
#include <cpx/core/rows.hpp>
#include <cpx/pack.cuh>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

/// Rows whose memory begins at a multiple of 16 bytes, NaN until they are written.
template <class T>
class matrix {
public:
    matrix(cpx::index_t count, cpx::index_t width)
        : count_(count), width_(width),
          memory_(static_cast<std::size_t>(count * width) + 16, static_cast<T>(std::nanf(""))) {}
    T* data() {
        auto const address = reinterpret_cast<std::uintptr_t>(memory_.data());
        return memory_.data() + (16 - address % 16) % 16 / sizeof(T);
    }
    cpx::rows<T> rows() { return {data(), count_, width_}; }
    operator cpx::rows<T const>() { return {data(), count_, width_}; }
    cpx::index_t count() const { return count_; }
    cpx::index_t width() const { return width_; }

    /// Returns the rows of a rank, side by side.
    template <class S>
    matrix of(S const& sharding, int rank) {
        matrix mine(sharding.rows(rank), width_);
        cpx::index_t to = 0;
        sharding.for_each_piece(rank, [&](cpx::range piece) {
            for (cpx::index_t i = piece.first; i < piece.last; ++i, ++to)
                std::copy_n(data() + i * width_, width_, mine.data() + to * width_);
        });
        return mine;
    }
    bool has_the_bits_of(matrix& other) {
        return std::memcmp(data(), other.data(), static_cast<std::size_t>(count_ * width_) * sizeof(T)) == 0;
    }

private:
    cpx::index_t count_, width_;
    std::vector<T> memory_;
};

template <class T>
double distance(matrix<T>& got, std::vector<double> const& exact) {
    double apart = 0, all = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
        double const x = cpx::kernels::widen(got.data()[i]) - exact[i];
        apart += x * x;
        all += exact[i] * exact[i];
    }
    return std::sqrt(apart / all);
}
