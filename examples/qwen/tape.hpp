// SPDX-License-Identifier: Apache-2.0
// The operators of which the model is made: each computes its result and notes its step of the way back.
#pragma once

#include "gradients.hpp"
#include "rowwise.hpp"

#include <cpx/ops/local/norm.hpp>
#include <cpx/ops/weight_sums.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace qwen {

/// A tensor of the pass, and the gradient of the loss by it: zeros until a step back writes or adds to it.
template <class T, cpx::any_sharding S, class M>
struct variable {
    cpx::tensor<T, S, M> value;
    std::optional<cpx::tensor<T, S, M>> gradient = {};
    std::optional<cpx::summed_rows<T, M>> whole = {}; ///< as gradients of weights want the value

    index_t width() const { return value.width(); }
    cpx::rows<T> data() { return value.data(); }
    cpx::sharded<T, S, M> view() { return value.view(); }
    cpx::sharded<T, S, M> grad() {
        if (!gradient) gradient.emplace(value.sharding(), value.rank(), value.width(), value.memory());
        return gradient->view();
    }
};

/// The way of one rank R, a `host_rank` or a `gpu_rank`, through a model, forward and back.
///
/// Steps back run last first, so what several operators read gets their terms in the opposite order. Where a result
/// has one reader, that writes its gradient instead of adding to it.
template <class R>
class tape {
public:
    using T = typename R::element;
    using W = cpx::wide<T>; ///< gates, probabilities and sums, such as gradients of weights
    using M = typename R::memory_type;
    using rows = cpx::rows<T>;
    using const_rows = cpx::rows<T const>;
    using buffer = cpx::row_buffer<T, M>;
    using wide_buffer = cpx::row_buffer<W, M>;
    using list = std::shared_ptr<cpx::row_buffer<index_t, M>>;
    template <class S>
    using tensor = cpx::tensor<T, S, M>;
    template <class S>
    using var = std::shared_ptr<variable<T, S, M>>;
    template <class S>
    using wide_var = std::shared_ptr<variable<W, S, M>>;

    tape(R& of, std::vector<features> const& of_media, cpx::sum_order order)
        : rank(of), grads(of, of_media), order_(order) {}

    template <class F>
    void back(F&& step) {
        steps_.push_back(std::forward<F>(step));
    }
    void run_back() {
        for (; !steps_.empty(); steps_.pop_back()) steps_.back()();
    }

    template <class S>
    var<S> make(S const& sharding, index_t width) const {
        return std::make_shared<variable<T, S, M>>(
            variable<T, S, M>{tensor<S>(sharding, rank.rank(), width, rank.memory())});
    }
    /// Returns one on the sharding of x.
    template <class S>
    var<S> beside(var<S> const& x, index_t width) const {
        return make(x->value.sharding(), width);
    }
    /// The same of sums.
    template <class A, class S>
    wide_var<S> wide_beside(std::shared_ptr<variable<A, S, M>> const& x, index_t width) const {
        return std::make_shared<variable<W, S, M>>(
            variable<W, S, M>{{x->value.sharding(), rank.rank(), width, rank.memory()}});
    }
    /// Returns numbers of rows, in the rank's memory.
    list list_of(std::vector<index_t> const& numbers) const {
        auto const made = std::make_shared<cpx::row_buffer<index_t, M>>(rank.memory(), std::ssize(numbers), 1);
        rank.memory().write(made->view().data(), std::span<index_t const>(numbers));
        return made;
    }
    static std::span<index_t const> numbers(list const& of) {
        return {of->view().data(), static_cast<std::size_t>(of->count())};
    }
    /// Calls `f(row, column)` for all of a result.
    template <class A, class F>
    void each(cpx::rows<A> const& result, F const& f) const {
        for_each_element(rank.memory(), result.count(), result.width(), f);
    }
    /// Calls `f(0, column)` for all columns of a result.
    template <class A, class F>
    void each_column(cpx::rows<A> const& result, F const& f) const {
        for_each_element(rank.memory(), 1, result.width(), f);
    }
    void add(const_rows x, rows to) const { each(to, rowwise::add<T>{x, to}); }
    void copy(const_rows x, rows to) const { each(to, rowwise::copy<T>{x, to}); }

    template <class S>
    var<S> sum(var<S> const& a, var<S> const& b) {
        auto const y = beside(a, a->width());
        copy(a->data(), y->data());
        add(b->data(), y->data());
        back([=, this] {
            add(y->grad().data(), a->grad().data());
            add(y->grad().data(), b->grad().data());
        });
        return y;
    }
    /// Returns their columns side by side; reads each alone.
    template <class S>
    var<S> join(std::initializer_list<var<S>> of) {
        std::vector<var<S>> const all(of);
        index_t width = 0;
        for (auto const& x : all) width += x->width();
        auto const y = beside(all.front(), width);
        auto const each_of = [all](auto const& f) {
            index_t first = 0;
            for (auto const& x : all) f(x, std::exchange(first, first + x->width()));
        };
        each_of([&](auto const& x, index_t first) { copy(x->data(), y->data().columns(first, x->width())); });
        back([=, this] {
            each_of([&](auto const& x, index_t first) {
                copy(y->grad().columns(first, x->width()).data(), x->grad().data());
            });
        });
        return y;
    }
    /// Returns every head's `dim` columns from `first`, of heads of `each_head` columns; with others, their one reader.
    template <class S>
    var<S> take_heads(var<S> const& x, index_t first, index_t each_head, index_t dim) {
        auto const y = beside(x, x->width() / each_head * dim);
        index_t const behind = x->width() - first;
        each(y->data(), rowwise::copy_heads<T>{x->data().columns(first, behind), each_head, y->data(), dim, dim});
        back([=, this] {
            auto const from = y->grad().data(), to = x->grad().data().columns(first, behind);
            each(from, rowwise::copy_heads<T>{from, dim, to, each_head, dim});
        });
        return y;
    }
    /// Returns `x sigmoid(gate)`, of one gate for all columns or for each; their one reader.
    template <class S>
    var<S> open(var<S> const& x, var<S> const& gate) {
        auto const y = beside(x, x->width());
        each(y->data(), rowwise::open<T>{x->data(), gate->data(), y->data()});
        back([=, this] {
            each(gate->data(), rowwise::open_backward<T>{x->data(), gate->data(), y->grad().data(), x->grad().data(),
                                                         gate->grad().data()});
        });
        return y;
    }
    /// Returns `silu(gate) up`; their one reader.
    template <class S>
    var<S> silu_mul(var<S> const& gate, var<S> const& up) {
        auto const y = beside(gate, gate->width());
        each(y->data(), rowwise::silu_mul<T>{gate->data(), up->data(), y->data()});
        back([=, this] {
            each(y->data(), rowwise::silu_mul_backward<T>{gate->data(), up->data(), y->grad().data(),
                                                          gate->grad().data(), up->grad().data()});
        });
        return y;
    }
    /// Norms heads as wide as the weight.
    template <class S>
    var<S> norm(std::string const& weight, var<S> const& x) {
        auto const y = beside(x, x->width());
        auto const& config = rank.model.config;
        auto const norm = [x, gain = rank.weight(weight), eps = static_cast<W>(*config.rms_norm_eps),
                           shift = static_cast<W>(config.zero_centred_norms())]() -> cpx::head_norm<T> {
            return {x->data(), rows(), gain, eps, shift};
        };
        normalise(rank.memory(), norm(), y->data());
        back([=, this] {
            auto const terms = wide_beside(x, norm().weight.width());
            auto const d = y->grad().data();
            normalise_backward(rank.memory(), norm(), d, d, rows(), terms->data());
            add(d, x->grad().data());
            add_terms(terms->value, grads.of(weight));
        });
        return y;
    }
    /// Returns `x W^T` of a weight W.
    template <class S>
    var<S> linear(std::string const& weight, var<S> const& x) {
        auto const w = rank.weight(weight);
        auto const y = beside(x, w.count());
        rank.linear(x->data(), w, y->data());
        back([=, this] {
            if (!x->whole) x->whole = sums(x->value.sharding()).whole(x->value);
            sums(x->value.sharding()).linear(*x->whole, y->grad(), grads.of(weight), [&](auto const&... given) {
                rank.linear_backward_weight(given...);
            });
            rank.linear_backward_input(y->grad().data(), w, x->grad().data(), true);
        });
        return y;
    }

    /// Moves a tensor; counts what that takes.
    template <class Plan, class X>
    auto moved(Plan const& plan, X const& x) {
        auto y = exchange(plan, x, rank.comm);
        if (rank.rank() == 0) counted.move(plan.from, plan.to, std::max(x.width(), y.width()));
        return y;
    }
    /// Moves x, of which it is the one reader, and its gradient by the plan `home`.
    template <class From, class To, class Home>
    var<To> move(cpx::relayout_plan<From, To> const& plan, Home const& home, var<From> const& x) {
        if constexpr (std::same_as<From, To>) {
            if (plan.from == plan.to) return x;
        }
        auto const y = std::make_shared<variable<T, To, M>>(variable<T, To, M>{moved(plan, x->value)});
        back([=, this] { exchange(home, y->grad(), x->grad(), rank.comm); });
        return y;
    }

    auto sums(cpx::any_sharding auto const& sharding) const { return cpx::weight_sums(sharding, order_, rank.comm); }
    /// Returns the rows of a gradient of which this rank adds up its share.
    template <class X>
    auto share(X const& x, index_t columns) const {
        return sums(x.sharding()).share(x, columns);
    }
    /// Adds the terms of all rows to a gradient of as many elements.
    template <class X>
    void add_terms(X const& terms, cpx::rows<W> to) const {
        cpx::add_terms(sums(terms.sharding()), terms, to);
    }

    R& rank;
    gradients<R> grads;
    needs counted; ///< of the whole group, on rank 0

private:
    cpx::sum_order order_;
    std::vector<std::function<void()>> steps_;
};

} // namespace qwen
