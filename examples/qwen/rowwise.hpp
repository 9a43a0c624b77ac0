// SPDX-License-Identifier: Apache-2.0
// What is computed element by element or row by row, written once for the host and for GPUs.
//
// Each is called as f(row, column) for every element of its result, in any order; f(row, 0) for what is one number a
// row or more; f(0, column) for what adds up rows.
#pragma once

#include <cpx/core/rows.hpp>
#include <cpx/ops/local/activation.hpp>
#include <cpx/ops/local/delta_rule.hpp>

#include <cmath>

namespace qwen::rowwise {

using cpx::index_t, cpx::rows;

template <class T>
struct add {
    rows<T const> x;
    rows<T> to;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const { to(row, j) += x(row, j); }
};

/// Copies heads of `dim` columns that begin every so many columns.
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

template <class T>
struct silu_mul {
    rows<T const> gate, up;
    rows<T> y;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const { y(row, j) = cpx::silu(gate(row, j)) * up(row, j); }
};
template <class T>
struct silu_mul_backward {
    rows<T const> gate, up, dy;
    rows<T> dgate, dup;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const {
        dgate(row, j) = cpx::silu_backward(gate(row, j), dy(row, j) * up(row, j));
        dup(row, j) = dy(row, j) * cpx::silu(gate(row, j));
    }
};

/// y = x sigmoid(gate); one gate a row counts for all columns.
template <class T>
struct open {
    rows<T const> x, gate;
    rows<T> y;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const {
        y(row, j) = x(row, j) * cpx::sigmoid(gate(row, gate.width() == 1 ? 0 : j));
    }
};
/// For every gate the columns that it counts for.
template <class T>
struct open_backward {
    rows<T const> x, gate, dy;
    rows<T> dx, dgate;
    CPX_HOST_DEVICE void operator()(index_t row, index_t h) const {
        index_t const each = x.width() / gate.width();
        T const opened = cpx::sigmoid(gate(row, h));
        T sum = 0;
        for (index_t j = h * each; j < (h + 1) * each; ++j) {
            sum += x(row, j) * dy(row, j);
            dx(row, j) = dy(row, j) * opened;
        }
        dgate(row, h) = cpx::sigmoid_backward(gate(row, h), sum);
    }
};

/// A row of `to` for each of a list, or all rows.
template <class T>
struct take_rows {
    rows<T const> from;
    index_t const* list;
    rows<T> to;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const { to(row, j) = from(list ? list[row] : row, j); }
};
/// The rows of a list become those of `from`; they differ.
template <class T>
struct put_rows {
    rows<T const> from;
    index_t const* list;
    rows<T> to;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const { to(list[row], j) = from(row, j); }
};
/// Adds rows to those of a list, without one to the first; a negative number: to none. A column's rows in order.
template <class T>
struct add_rows {
    rows<T const> from;
    index_t const* list;
    rows<T> to;
    CPX_HOST_DEVICE void operator()(index_t, index_t j) const {
        for (index_t row = 0; row < from.count(); ++row)
            if (index_t const place = list ? list[row] : 0; place >= 0) to(place, j) += from(row, j);
    }
};

/// The gates of the delta rule, for every head.
template <class T>
struct delta_gates {
    rows<T const> b, a, A_log, dt_bias;
    rows<T> g, beta;
    CPX_HOST_DEVICE void operator()(index_t row, index_t h) const {
        g(row, h) = cpx::delta_rule_gate(a(row, h), A_log(h, 0), dt_bias(h, 0));
        beta(row, h) = cpx::sigmoid(b(row, h));
    }
};
/// terms: of A_log, then of dt_bias.
template <class T>
struct delta_gates_backward {
    rows<T const> b, a, A_log, dt_bias, dg, dbeta;
    rows<T> db, da, terms;
    CPX_HOST_DEVICE void operator()(index_t row, index_t h) const {
        auto const of = cpx::delta_rule_gate_backward(a(row, h), A_log(h, 0), dt_bias(h, 0), dg(row, h));
        db(row, h) = cpx::sigmoid_backward(b(row, h), dbeta(row, h));
        da(row, h) = of.a;
        terms(row, h) = of.a_log;
        terms(row, dg.width() + h) = of.dt_bias;
    }
};

/// Chooses the largest probabilities of a row, the lower expert first among equals, and divides them by their sum.
template <class T>
struct choose_experts {
    rows<T const> logits;
    rows<index_t> chosen;
    rows<T> weights;
    CPX_HOST_DEVICE void operator()(index_t row, index_t) const {
        index_t const experts = logits.width(), choices = chosen.width();
        T highest = logits(row, 0), total = 0, of_chosen = 0;
        for (index_t e = 1; e < experts; ++e) highest = logits(row, e) > highest ? logits(row, e) : highest;
        for (index_t e = 0; e < experts; ++e) total += std::exp(logits(row, e) - highest);
        for (index_t s = 0; s < choices; ++s) {
            index_t best = -1;
            for (index_t e = 0; e < experts; ++e) {
                bool taken = false;
                for (index_t before = 0; before < s; ++before) taken |= chosen(row, before) == e;
                if (!taken && (best < 0 || logits(row, e) > logits(row, best))) best = e;
            }
            chosen(row, s) = best;
            of_chosen += weights(row, s) = std::exp(logits(row, best) - highest) / total;
        }
        for (index_t s = 0; s < choices; ++s) weights(row, s) /= of_chosen;
    }
};
/// y = sum_s weights_s output_s + shared.
template <class T>
struct combine_experts {
    rows<T const> weights, output, shared;
    rows<T> y;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const {
        T sum = 0;
        for (index_t s = 0; s < weights.width(); ++s) sum += weights(row, s) * output(row, s * y.width() + j);
        y(row, j) = sum + shared(row, j);
    }
};
/// The gradients of the outputs chosen.
template <class T>
struct combine_backward {
    rows<T const> weights, dy;
    rows<T> doutput;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const {
        doutput(row, j) = weights(row, j / dy.width()) * dy(row, j % dy.width());
    }
};
/// Those of their weights.
template <class T>
struct weigh_backward {
    rows<T const> output, dy;
    rows<T> dweights;
    CPX_HOST_DEVICE void operator()(index_t row, index_t s) const {
        T sum = 0;
        for (index_t j = 0; j < dy.width(); ++j) sum += dy(row, j) * output(row, s * dy.width() + j);
        dweights(row, s) = sum;
    }
};
/// Those of the logits of a row; of experts not chosen they are left alone.
template <class T>
struct choose_backward {
    rows<index_t const> chosen;
    rows<T const> weights, dweights;
    rows<T> dlogits;
    CPX_HOST_DEVICE void operator()(index_t row, index_t) const {
        // Divided by their sum, the largest probabilities are the softmax of their own logits: the others cancel.
        T mean = 0;
        for (index_t s = 0; s < weights.width(); ++s) mean += weights(row, s) * dweights(row, s);
        for (index_t s = 0; s < weights.width(); ++s)
            dlogits(row, chosen(row, s)) = weights(row, s) * (dweights(row, s) - mean);
    }
};
/// Adds up what the choices of a row give for their common input.
template <class T>
struct add_choices {
    rows<T const> terms;
    rows<T> to;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const {
        for (index_t first = 0; first < terms.width(); first += to.width()) to(row, j) += terms(row, first + j);
    }
};

/// log softmax(logits)[label] of a row, and 0 where there is no label.
template <class T>
struct log_probability {
    rows<T const> logits;
    index_t const* labels;
    rows<T> logp;
    CPX_HOST_DEVICE T highest(index_t row) const {
        T most = logits(row, 0);
        for (index_t j = 1; j < logits.width(); ++j) most = logits(row, j) > most ? logits(row, j) : most;
        return most;
    }
    CPX_HOST_DEVICE double total(index_t row, T most) const {
        double sum = 0;
        for (index_t j = 0; j < logits.width(); ++j) sum += static_cast<double>(std::exp(logits(row, j) - most));
        return sum;
    }
    CPX_HOST_DEVICE void operator()(index_t row, index_t) const {
        T const most = highest(row);
        logp(row, 0) =
            labels[row] < 0
                ? T(0)
                : static_cast<T>(static_cast<double>(logits(row, labels[row]) - most) - std::log(total(row, most)));
    }
};
template <class T>
struct log_probability_backward {
    rows<T const> logits;
    index_t const* labels;
    rows<T const> dlogp;
    rows<T> dlogits;
    CPX_HOST_DEVICE void operator()(index_t row, index_t) const {
        index_t const label = labels[row];
        log_probability<T> const forward{logits, labels, {}};
        T const most = label < 0 ? T(0) : forward.highest(row);
        T const divisor = label < 0 ? T(1) : static_cast<T>(forward.total(row, most));
        for (index_t j = 0; j < logits.width(); ++j) {
            T const p = std::exp(logits(row, j) - most) / divisor;
            dlogits(row, j) = label < 0 ? T(0) : dlogp(row, 0) * (j == label ? 1 - p : -p);
        }
    }
};

} // namespace qwen::rowwise
