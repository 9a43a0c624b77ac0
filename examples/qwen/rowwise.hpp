// SPDX-License-Identifier: Apache-2.0
// What is computed element by element or row by row, for the host and for GPUs, and is not the library's.
//
// Each is called as f(row, column) for every element of its result, in any order; f(row, 0) for what is one number a
// row or more; f(0, column) for what adds up rows.
#pragma once

#include <cpx/core/rows.hpp>
#include <cpx/ops/local/delta_rule.hpp>
#include <cpx/ops/local/log_probability.hpp>
#include <cpx/ops/local/moe_backward.hpp>

namespace qwen::rowwise {

using namespace cpx::rowwise;
using cpx::index_t, cpx::rows, cpx::widen;

/// Copies heads of `dim` columns that begin every so many columns; rows are one head.
template <class T>
struct copy_heads {
    rows<T const> from;
    index_t from_each;
    rows<T> to;
    index_t to_each, dim;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const {
        to(row, j / dim * to_each + j % dim) = from(row, j / dim * from_each + j % dim);
    }
};

/// y = x sigmoid(gate); one gate a row counts for all columns.
template <class T>
struct open {
    rows<T const> x, gate;
    rows<T> y;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const {
        y(row, j) = static_cast<T>(widen(x(row, j)) * cpx::sigmoid(widen(gate(row, gate.width() == 1 ? 0 : j))));
    }
};
/// For every gate the columns that it counts for.
template <class T>
struct open_backward {
    rows<T const> x, gate, dy;
    rows<T> dx, dgate;
    CPX_HOST_DEVICE void operator()(index_t row, index_t h) const {
        index_t const each = x.width() / gate.width();
        cpx::wide<T> const closed = widen(gate(row, h)), opened = cpx::sigmoid(closed);
        cpx::wide<T> sum = 0;
        for (index_t j = h * each; j < (h + 1) * each; ++j) {
            cpx::wide<T> const d = widen(dy(row, j));
            sum += widen(x(row, j)) * d;
            dx(row, j) = static_cast<T>(d * opened);
        }
        dgate(row, h) = static_cast<T>(cpx::sigmoid_backward(closed, sum));
    }
};

/// y = sum_s weights_s output_s + shared.
template <class T>
struct combine_experts {
    rows<cpx::wide<T> const> weights;
    rows<T const> output, shared;
    rows<T> y;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const {
        cpx::wide<T> sum = 0;
        for (index_t s = 0; s < weights.width(); ++s) sum += weights(row, s) * widen(output(row, s * y.width() + j));
        y(row, j) = static_cast<T>(sum + widen(shared(row, j)));
    }
};
/// The gradients of the weights.
template <class T>
struct weigh_backward {
    rows<T const> output, dy;
    rows<cpx::wide<T>> dweights;
    CPX_HOST_DEVICE void operator()(index_t row, index_t s) const {
        cpx::wide<T> sum = 0;
        for (index_t j = 0; j < dy.width(); ++j) sum += widen(dy(row, j)) * widen(output(row, s * dy.width() + j));
        dweights(row, s) = sum;
    }
};

} // namespace qwen::rowwise
