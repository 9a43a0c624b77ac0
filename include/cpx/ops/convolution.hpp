// SPDX-License-Identifier: Apache-2.0
// What a causal convolution is given on one rank, and what it does there in the host's memory.
#pragma once

#include <cpx/core/row_buffer.hpp>
#include <cpx/layout/sharded.hpp>
#include <cpx/ops/convolution_pass.hpp>
#include <cpx/ops/local/causal_conv.hpp>
#include <cpx/ops/weight_sums.hpp>
#include <cpx/plan/halo.hpp>
#include <cpx/transport/exchange.hpp>

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

namespace cpx {

/// The K newest rows of every sequence, before the convolution: what a convolution that goes on from here must know.
///
/// Each is (sequences, K * channels), the newest row last, or empty for none. `initial` stands for tokens before the
/// batch, zeros for none; it is read on every rank that holds one of the first K - 1 tokens of a sequence. `final` is
/// written on the rank where a sequence ends (rank 0 if it has no tokens) and elsewhere left alone. They may be the
/// same.
template <class T>
struct causal_conv1d_states {
    field<rows<T const>> initial = {};
    field<rows<T>> final = {};
    detail::no_more end = {};
};

namespace detail {

/// Heads of `dim` channels, the first `channels` of a convolution's result, that are divided by their lengths; none: 0.
struct normalised_heads {
    index_t channels = 0, dim = 0;
};
/// Whether convolutions in memory M can do that; on devices some, see `ops/cuda/causal_conv1d.hpp`.
template <any_memory M>
struct normalising_convolution {
    static constexpr bool ever = false;
    template <class T>
    static constexpr bool fits(index_t /*taps*/, index_t /*dim*/, index_t /*others*/) {
        return false;
    }
};

/// What a convolution is given, on one rank. Y: the elements of its result, on devices perhaps others than those of x.
template <class T, any_sharding S, any_memory M = host_memory, class Y = T>
struct convolution {
    halo_plan<S> const& plan;
    sharded<T const, S, M> x;
    rows<T const> weight;
    std::span<T const> bias;
    activation act;
    sharded<Y, S, M> y;
    causal_conv1d_states<T> states = {};
    char const* where = "causal_conv1d";
    normalised_heads heads = {};
};

/// What the backward of a convolution is given, on one rank.
template <class T, any_sharding S, any_memory M = host_memory, class Y = T>
struct convolution_backward {
    using sum = typename M::template sum<T>;
    halo_plan<S> const &before, &after;
    sharded<T const, S, M> x;
    rows<T const> weight;
    std::span<T const> bias;
    activation act;
    sharded<Y const, S, M> dy;
    sharded<T, S, M> dx;
    rows<sum> dweight;
    std::span<sum> dbias;
    sum_order order;
    char const* where = "causal_conv1d_backward";
    normalised_heads heads = {};
    /// The gradient of the result before heads are normalised, if they are: sums in the order of the batch want it, for
    /// they take a channel at a time.
    std::optional<sharded<Y const, S, M>> dy_of_channels = {};
    float gradient_scale = 1; ///< so many times the gradient is dy, of other elements than x

    bool sums() const { return dweight.data() || !dbias.empty(); }
    /// Returns it without sums, or with some channels of what is a channel's.
    convolution_backward without_sums() const { return of_weights(weight, bias, {}, {}); }
    convolution_backward channels(range own) const {
        auto const some = [&](auto list) {
            return list.empty()
                       ? list
                       : list.subspan(static_cast<std::size_t>(own.first), static_cast<std::size_t>(own.size()));
        };
        return of_weights(weight.sub(own.first, own.size()), some(bias),
                          dweight.data() ? dweight.sub(own.first, own.size()) : dweight, some(dbias));
    }

private:
    convolution_backward of_weights(rows<T const> w, std::span<T const> b, rows<sum> dw, std::span<sum> db) const {
        return {before, after, x, w, b, act, dy, dx, dw, db, order, where, heads, dy_of_channels, gradient_scale};
    }
};

/// Copies the rows beside segment `i`, after those that precede them all, into `buffer` and returns them, in token
/// order.
template <class T, any_sharding S>
rows<T const> rows_beside(halo_plan<S> const& plan, std::size_t i, rows<T const> own, rows<T const> halo,
                          std::vector<T>& buffer, std::span<T const> preceding = {}) {
    buffer.assign(preceding.begin(), preceding.end());
    index_t count = own.width() > 0 ? std::ssize(preceding) / own.width() : 0;
    for (std::size_t k = plan.begin[i]; k < plan.begin[i + 1]; ++k) {
        halo_run const& beside = plan.runs[k];
        rows<T const> const from = (beside.halo ? halo : own).sub(beside.first, beside.count);
        for (index_t row = 0; row < beside.count; ++row)
            buffer.insert(buffer.end(), from.row(row), from.row(row) + own.width());
        count += beside.count;
    }
    return {buffer.data(), count, own.width()};
}

/// Returns what must be alike on all ranks of a convolution.
template <class T>
identity::arguments convolution_arguments(activation act, std::span<T const> bias) {
    return {identity::word(act == activation::silu ? "silu" : "none"), identity::word(bias.empty() ? "none" : "given")};
}

/// A convolution in the host's memory, of which all fits, for `run_convolution`.
template <class T, any_sharding S, class Comm>
class host_convolution {
public:
    host_convolution(convolution<T, S> const& of, Comm& comm, caller here)
        : of_(of), comm_(comm), channels_(of.x.data().width()), halo_(of.plan.target_rows, channels_, here) {}

    void exchange_halo(caller here) {
        run_for const by(of_.where, convolution_arguments(of_.act, of_.bias));
        exchange_rows(of_.plan, of_.x.data(), halo_.view(), comm_, here, by);
    }
    void forward(caller) {
        auto const& [plan, x, weight, bias, act, y, states, where, none] = of_;
        thd const& batch = plan.sharding.batch();
        conv_weights<T> const by{by_tap(weight), bias.empty() ? nullptr : bias.data(), act};
        std::vector<T> history;
        for (std::size_t i = 0; i < plan.segments.size(); ++i) {
            segment const& s = plan.segments[i];
            std::span<T const> preceding; // of the initial rows those within reach
            if (states.initial.data() && s.token < plan.reach)
                preceding = {states.initial.row(s.sequence) + (s.token + 1) * channels_,
                             static_cast<std::size_t>((plan.reach - s.token) * channels_)};
            auto const before = rows_beside<T, S>(plan, i, x.data(), halo_.view(), history, preceding);
            auto const own = rows<T const>(x.data()).sub(s.row, s.count);
            by.forward(before, own, y.data().sub(s.row, s.count));
            index_t const skip = std::ssize(preceding) / std::max<index_t>(1, channels_);
            if (s.token + s.count == batch.length(s.sequence))
                finish(s.sequence, before.sub(skip, before.count() - skip), own);
        }
        for (index_t s = 0; s < batch.sequences(); ++s)
            if (batch.length(s) == 0 && (S::every_row || plan.rank == 0)) finish(s, {}, {});
    }

private:
    /// Leaves the newest rows of a sequence, which ends with those before a segment and its own.
    void finish(index_t sequence, rows<T const> before, rows<T const> own) const {
        auto const& [initial, final, end] = of_.states;
        if (!final.data()) return;
        index_t const taps = of_.plan.reach + 1, window = taps * channels_;
        std::vector<T> newest(static_cast<std::size_t>(window));
        if (initial.data()) std::copy_n(initial.row(sequence), window, newest.data());
        rows<T const> const all[] = {before, own};
        for (rows<T const> const& some : all) // the last K rows of all these
            for (index_t row = std::max<index_t>(0, some.count() - taps); row < some.count(); ++row)
                newest.insert(newest.end(), some.row(row), some.row(row) + channels_);
        std::copy_n(newest.end() - window, window, final.row(sequence));
    }

    convolution<T, S> const& of_;
    Comm& comm_;
    index_t channels_;
    row_buffer<T> halo_;
};

/// The gradients of weights and bias on the host, to which terms are added; one that is not wanted has a place, too.
template <class T>
class sums_of_weights {
public:
    sums_of_weights(rows<T> dweight, std::span<T> dbias, index_t channels, index_t taps)
        : spare_(dweight.data() ? 0 : channels, taps), dweight_(dweight.data() ? dweight : spare_.view()),
          dbias_(dbias.empty() ? nullptr : dbias.data()) {}
    void add(rows<T const> history, rows<T const> x, rows<T const> dz) const {
        add_weight_terms<T>(history, x, dz, dweight_, dbias_);
    }

private:
    row_buffer<T> spare_;
    rows<T> dweight_;
    T* dbias_;
};

/// A backward in the host's memory, of which all fits, for `run_convolution_backward`.
template <class T, any_sharding S, class Comm>
class host_convolution_backward {
public:
    host_convolution_backward(convolution_backward<T, S> const& to, Comm& comm, caller here)
        : to_(to), comm_(comm), channels_(to.x.data().width()),
          by_{by_tap(to.weight), to.bias.empty() ? nullptr : to.bias.data(), to.act},
          run_for_(to.where, convolution_arguments(to.act, to.bias)), halo_(to.before.target_rows, channels_, here),
          dz_(to.before.source_rows, channels_, here), dz_halo_(to.after.target_rows, channels_, here) {}

    void exchange_halo(caller here) { exchange_rows(to_.before, to_.x.data(), halo_.view(), comm_, here, run_for_); }
    /// Computes dz of all rows, and adds its terms to dweight and dbias.
    void edge(caller) {
        sums_of_weights<T> sums(to_.dweight, to_.dbias, channels_, to_.weight.width());
        for (std::size_t i = 0; i < to_.before.segments.size(); ++i) {
            segment const& s = to_.before.segments[i];
            auto const history = rows_beside<T, S>(to_.before, i, to_.x.data(), halo_.view(), beside_);
            rows<T const> const own = to_.x.data().sub(s.row, s.count), of_y = to_.dy.data().sub(s.row, s.count);
            rows<T> const dz = dz_.view().sub(s.row, s.count);
            by_.backward_sums(history, own, of_y, dz);
            if (to_.sums()) sums.add(history, own, dz);
        }
    }
    void exchange_edge(caller here) { exchange_rows(to_.after, dz_.view(), dz_halo_.view(), comm_, here, run_for_); }
    void backward(caller) {
        for (std::size_t i = 0; i < to_.after.segments.size(); ++i) {
            segment const& s = to_.after.segments[i];
            rows<T const> const dz = dz_.view();
            by_.backward_input(dz.sub(s.row, s.count), rows_beside<T, S>(to_.after, i, dz, dz_halo_.view(), beside_),
                               to_.dx.data().sub(s.row, s.count));
        }
    }

private:
    convolution_backward<T, S> const& to_;
    Comm& comm_;
    index_t channels_;
    conv_weights<T> by_;
    run_for run_for_;
    row_buffer<T> halo_, dz_, dz_halo_;
    std::vector<T> beside_;
};

} // namespace detail

} // namespace cpx
