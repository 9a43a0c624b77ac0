// SPDX-License-Identifier: Apache-2.0
// The main job's products of matrices: by cuBLASLt and by the plain kernel, of any sizes, strides and alignments.
#include "../../examples/qwen/cuda/blas.hpp"

#include <doctest/doctest.h>

#include "gpus.hpp"

#include <support/random.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace {

using cpx::index_t, cpx::rows;
using cpx::cuda::buffer;

/// A matrix in device memory that begins `before` elements behind its allocation's beginning, rows `gap` apart, and
/// what it holds; the rest of the memory is `rest`.
template <class T>
struct matrix {
    index_t count, width, stride, before;
    std::vector<T> held;
    buffer<T> there;

    matrix(index_t count_, index_t width_, index_t gap, index_t before_, float rest, support::splitmix& random)
        : count(count_), width(width_), stride(width_ + gap), before(before_),
          held(static_cast<std::size_t>(before_ + count_ * (width_ + gap) + 1), static_cast<T>(rest)) {
        for (index_t i = 0; i < count; ++i)
            for (index_t j = 0; j < width; ++j)
                held[place(i, j)] = static_cast<T>(static_cast<float>(random.between(-1000, 1000)) / 1000);
        there = buffer<T>(std::span<T const>(held));
    }
    std::size_t place(index_t i, index_t j) const { return static_cast<std::size_t>(before + i * stride + j); }
    double at(index_t i, index_t j) const { return static_cast<double>(static_cast<float>(held[place(i, j)])); }
    rows<T> view() const { return {there.data() + before, count, width, stride}; }
};

struct sizes {
    index_t count, width, inner;
};

/// Checks c = before c + a b^T, and that nothing else is written.
template <class T, class Out>
void check(cudaStream_t stream, qwen::gpu::product<T> const& product, sizes const& s, bool a_turned, bool b_turned,
           float before, index_t gap, index_t first, support::splitmix& random) {
    auto const make = [&](index_t count, bool turned) {
        return turned ? matrix<T>(s.inner, count, gap, first, NAN, random)
                      : matrix<T>(count, s.inner, gap, first, NAN, random);
    };
    auto const a = make(s.count, a_turned), b = make(s.width, b_turned);
    matrix<Out> c(s.count, s.width, gap, first, 7, random);
    if (before == 0) { // what is there is not read
        for (index_t i = 0; i < s.count; ++i)
            for (index_t j = 0; j < s.width; ++j) c.held[c.place(i, j)] = static_cast<Out>(NAN);
        c.there.write(c.held);
    }
    product(qwen::gpu::factor<T>{a.view(), a_turned}, qwen::gpu::factor<T>{b.view(), b_turned}, s.inner, before,
            c.view());
    cpx::cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    auto const got = c.there.read();
    auto expected = c.held;
    double worst = 0;
    for (index_t i = 0; i < s.count; ++i)
        for (index_t j = 0; j < s.width; ++j) {
            double product = 0;
            for (index_t k = 0; k < s.inner; ++k)
                product += (a_turned ? a.at(k, i) : a.at(i, k)) * (b_turned ? b.at(k, j) : b.at(j, k));
            double const sum = before == 0 ? product : c.at(i, j) + product;
            double const error = std::abs(static_cast<double>(static_cast<float>(got[c.place(i, j)])) - sum);
            // Before it is added to c it may be rounded to c's elements, too: on an H200 cuBLASLt does so at times.
            double const size = std::abs(sum) + (before == 0 ? 0 : std::abs(product));
            worst = std::max(worst, error / std::max(1.0, size));
            expected[c.place(i, j)] = got[c.place(i, j)];
        }
    CHECK(worst <= (std::is_same_v<Out, float> ? 1e-5 : 0x1p-8));
    bool untouched = true;
    for (std::size_t i = 0; i < got.size(); ++i)
        untouched = untouched && static_cast<float>(got[i]) == static_cast<float>(expected[i]);
    CHECK(untouched);
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE_TEMPLATE("products of any sizes, strides and alignments are sums of products, by cuBLASLt, too", T, float,
                       __nv_bfloat16) {
        if (!has_gpus()) return;
        cpx::cuda::stream const stream;
        support::splitmix random(1);
        for (bool const fixed : {true, false}) {
            CAPTURE(fixed);
            qwen::gpu::product<T> const product(stream, fixed);
            for (sizes const& s :
                 {sizes{1, 1, 1}, {0, 3, 4}, {3, 5, 0}, {33, 17, 70}, {64, 128, 64}, {1, 200, 33}, {130, 1, 5}})
                for (int what = 0; what < 8; ++what)
                    for (index_t const gap : {0, 1, 8})
                        for (index_t const first : {0, 1, 4}) {
                            CAPTURE(s.count);
                            CAPTURE(s.width);
                            CAPTURE(s.inner);
                            CAPTURE(what);
                            CAPTURE(gap);
                            CAPTURE(first);
                            bool const a_turned = what & 1, b_turned = what & 2;
                            float const before = what & 4 ? 1 : 0;
                            check<T, T>(stream, product, s, a_turned, b_turned, before, gap, first, random);
                            if constexpr (!std::is_same_v<T, float>)
                                check<T, float>(stream, product, s, a_turned, b_turned, before, gap, first, random);
                        }
        }
    }
}
