// SPDX-License-Identifier: Apache-2.0
// Stands in for kernels/cpx/tensor_cores.cuh: what a warp does together, for the machine of gpu.hpp. Products are
// summed up in double and rounded once.
#pragma once

#include <cpx/pack.cuh>

#include "../gpu.hpp"

#include <cstdint>
#include <cstring>

namespace cpx::kernels {

template <class T>
std::uint32_t two_elements(float first, float second) {
    return narrow<T, 8>({first, second, 0, 0, 0, 0, 0, 0}).element[0];
}
inline std::uint32_t shared_address(void const* place) { return gpu::now().shared_offset(place); }
inline void copy_later(std::uint32_t to, void const* from, bool there) { gpu::now().copy_later(to, from, there); }
inline void wait_for_copies() { gpu::now().wait_for_copies(); }
inline void end_of_copies() { gpu::now().end_of_copies(); }
template <int N>
void wait_for_copies_but() {
    gpu::now().wait_for_copies(N);
}

namespace detail {

/// Lane l has of matrix i, whose row r is where lane 8i + r says, elements (l / 4, 2 (l % 4)) and the next.
struct four_matrices {
    std::uint32_t* to;
    char const* row;
};
template <bool Transposed>
void load(std::uint32_t (&to)[4], std::uint32_t row) {
    four_matrices mine{to, gpu::now().sixteen_bytes(row)};
    gpu::now().meet_in_warp(
        [](void* const* lanes) {
            for (int i = 0; i < 4; ++i) {
                std::uint16_t of[8][8];
                for (int r = 0; r < 8; ++r) std::memcpy(of[r], static_cast<four_matrices*>(lanes[8 * i + r])->row, 16);
                for (int l = 0; l < 32; ++l) {
                    int const r = l / 4, c = l % 4 * 2;
                    std::uint32_t const first = Transposed ? of[c][r] : of[r][c],
                                        second = Transposed ? of[c + 1][r] : of[r][c + 1];
                    static_cast<four_matrices*>(lanes[l])->to[i] = first | second << 16;
                }
            }
        },
        &mine);
}

/// What a lane has of a sum of 16 x 8 numbers, of a and of b.
struct product {
    float* sum;
    std::uint32_t a[4], b[2];
};
/// Adds the product of 16 x K and K x 8 numbers, which `put(product, lane, a, b)` has put into place for each lane.
template <int K, class Put>
void add(product mine) {
    gpu::now().meet_in_warp(
        [](void* const* lanes) {
            float a[16][K], b[K][8];
            for (int l = 0; l < 32; ++l) Put()(*static_cast<product*>(lanes[l]), l, a, b);
            for (int l = 0; l < 32; ++l)
                for (int e = 0; e < 4; ++e) {
                    float& sum = static_cast<product*>(lanes[l])->sum[e];
                    double exact = double{sum};
                    for (int k = 0; k < K; ++k) exact += double{a[l / 4 + e / 2 * 8][k]} * b[k][l % 4 * 2 + e % 2];
                    sum = static_cast<float>(exact);
                }
        },
        &mine);
}
template <class T>
struct put_elements {
    static float element(std::uint32_t word, int i) {
        auto const bits = static_cast<std::uint16_t>(word >> 16 * i);
        T x;
        std::memcpy(&x, &bits, 2);
        return widen(x);
    }
    void operator()(product const& of, int l, float (&a)[16][16], float (&b)[16][8]) const {
        for (int e = 0; e < 2; ++e)
            for (int further = 0; further < 2; ++further) {
                int const k = l % 4 * 2 + e + 8 * further;
                for (int below = 0; below < 2; ++below) a[l / 4 + 8 * below][k] = element(of.a[2 * further + below], e);
                b[k][l / 4] = element(of.b[further], e);
            }
    }
};
struct put_tf32 {
    static float number(std::uint32_t bits) { return __uint_as_float(bits & 0xffffe000u); }
    void operator()(product const& of, int l, float (&a)[16][8], float (&b)[8][8]) const {
        for (int further = 0; further < 2; ++further) {
            int const k = l % 4 + 4 * further;
            for (int below = 0; below < 2; ++below) a[l / 4 + 8 * below][k] = number(of.a[2 * further + below]);
            b[k][l / 4] = number(of.b[further]);
        }
    }
};

} // namespace detail

inline void load_matrices(std::uint32_t (&to)[4], std::uint32_t row) { detail::load<false>(to, row); }
inline void load_transposed(std::uint32_t (&to)[4], std::uint32_t row) { detail::load<true>(to, row); }
inline std::uint32_t transpose(std::uint32_t two) {
    gpu::now().meet_in_warp(
        [](void* const* lanes) {
            std::uint16_t of[8][8], to[2];
            for (int l = 0; l < 32; ++l) std::memcpy(&of[l / 4][l % 4 * 2], lanes[l], 4);
            for (int l = 0; l < 32; ++l) {
                for (int e = 0; e < 2; ++e) to[e] = of[l % 4 * 2 + e][l / 4];
                std::memcpy(lanes[l], to, 4);
            }
        },
        &two);
    return two;
}

template <class T>
void multiply(float (&sum)[4], std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    detail::add<16, detail::put_elements<T>>({sum, {a[0], a[1], a[2], a[3]}, {b0, b1}});
}
inline std::uint32_t to_tf32(float x) {
    std::uint32_t const bits = __float_as_uint(x);
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u; // halves away from zero
}
inline void multiply_tf32(float (&sum)[4], std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    detail::add<8, detail::put_tf32>({sum, {a[0], a[1], a[2], a[3]}, {b0, b1}});
}

} // namespace cpx::kernels
