// SPDX-License-Identifier: Apache-2.0
// What every block of the model needs of the place where its tokens are: norms and projections, forward and backward.
#pragma once

#include "outcome.hpp"
#include "rowwise.hpp"

#include <cpx/core/row_buffer.hpp>
#include <cpx/ops/weight_sums.hpp>
#include <cpx/transport/sum.hpp>

#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace qwen {

using cpx::index_t;

/// Returns numbers of rows in a rank's memory.
template <class M>
cpx::row_buffer<index_t, M> list_of(M const& memory, std::vector<index_t> const& numbers) {
    cpx::row_buffer<index_t, M> list(memory, std::ssize(numbers), 1);
    memory.write(list.view().data(), std::span<index_t const>(numbers));
    return list;
}

/// The gradients of all weights and features: one rank's shares, until they are summed.
template <class R>
class gradients {
    using T = typename R::element;

public:
    gradients(R& rank, std::vector<features> const& of_media)
        : rank_(rank), tied_(rank.model.config.tie_word_embeddings), values_(rank.memory(), 0, 1) {
        index_t first = 0;
        auto const add = [&](std::string const& name, index_t rows, index_t columns) {
            places_[name] = {first, rows, columns};
            first += (rows * columns + 3) / 4 * 4; // each as aligned as the first
        };
        auto const add_weight = [&](std::string const& name, cpx::rows<T const> weight) {
            add(name, weight.count(), weight.width());
        };
        rank.model.each(add_weight);
        // What head and embedding add to a weight that they share lies on different ranks: two sums, added at the end.
        if (tied_) add_weight(head, rank.model.weight(head));
        index_t const hidden = rank.model.config.hidden_size;
        for (features const& f : of_media) add(f.name, std::ssize(f.values) / hidden, hidden);
        values_ = {rank.memory(), first, 1};
    }

    cpx::rows<T> of(std::string const& name) {
        auto const& p = places_.at(name);
        return {values_.view().data() + p.first, p.count, p.width};
    }
    /// Completes all of them in one call and returns them by name. Collective.
    std::map<std::string, gradient<T>> sum() {
        std::span<T> const all(values_.view().data(), static_cast<std::size_t>(values_.count()));
        cpx::sum_over_ranks(all, rank_.comm);
        auto const values = rank_.memory().read(std::span<T const>(all));
        std::map<std::string, gradient<T>> result;
        for (auto const& [name, p] : places_) {
            auto const begin = values.begin() + p.first;
            result[name] = {p.width, {begin, begin + p.count * p.width}};
        }
        if (!tied_) return result;
        auto& embedding = result.at("model.embed_tokens.weight").values;
        for (std::size_t i = 0; i < embedding.size(); ++i) embedding[i] += result.at(head).values[i];
        result.erase(head);
        return result;
    }

private:
    static constexpr char const* head = "lm_head.weight";
    struct place {
        index_t first, count, width;
    };
    R& rank_;
    bool tied_;
    std::map<std::string, place> places_;
    cpx::row_buffer<T, typename R::memory_type> values_;
};

/// One rank's rows of a tensor sharded by `S`, in the memory of the rank R, a `host_rank` or a `gpu_rank`.
///
/// A block is a function of a site and hidden states h; it adds to h and returns its backward, which adds to dh.
template <class R, cpx::any_sharding S>
class site {
public:
    using rank_type = R;
    using element = typename R::element;
    using memory = typename R::memory_type;
    using tensor = cpx::tensor<element, S, memory>;
    using view = cpx::sharded<element, S, memory>;
    using const_view = cpx::sharded<element const, S, memory>;
    using summed = cpx::summed_rows<element, memory>;
    using backward = std::function<void(tensor& dh)>;

    site(R& of, gradients<R>& of_weights, S const& where, cpx::sum_order order)
        : rank(of), grads(of_weights), sharding(where), sums(where, of.rank(), order) {}

    tensor make(index_t width) const { return {sharding, rank.rank(), width, rank.memory()}; }
    tensor copy(tensor const& x) const {
        auto made = make(x.width());
        each(rowwise::take_rows<element>{x.data(), nullptr, made.data()}, made);
        return made;
    }
    /// Calls `f(row, column)` for all of a result, or for so many columns.
    template <class F>
    void each(F const& f, tensor const& result) const {
        rank.each(result.data().count(), result.width(), f);
    }
    template <class F>
    void each(F const& f, index_t columns) const {
        rank.each(sharding.rows(rank.rank()), columns, f);
    }
    void add(tensor const& x, tensor& h) const { each(rowwise::add<element>{x.data(), h.data()}, h); }

    /// Moves a tensor, and ends the exchange.
    template <class Plan, class X>
    auto move(Plan const& plan, X const& from) const {
        auto to = exchange(plan, from, rank.comm);
        rank.ended(plan, to.width());
        return to;
    }
    template <class Plan, class X, class Y>
    void move(Plan const& plan, X const& from, Y&& to) const {
        exchange(plan, from, to, rank.comm);
        rank.ended(plan, to.view().data().width());
    }

    void norm(std::string const& weight, const_view x, view y) const {
        rank.norm(x.data(), {}, rank.weight(weight), y.data());
    }
    /// Writes dx, which may be dy.
    void norm_backward(std::string const& weight, const_view x, const_view dy, view dx) const {
        auto const gain = rank.weight(weight);
        auto terms = make(gain.width());
        rank.norm_backward(x.data(), {}, gain, dy.data(), dx.data(), {}, terms.data());
        add_terms(terms, grads.of(weight));
    }
    /// Adds the terms of all rows to a gradient of as many elements.
    void add_terms(tensor const& terms, cpx::rows<element> to) const {
        auto const own = share(terms, terms.width());
        cpx::rows<element> const all(to.data(), 1, terms.width());
        rowwise::add_rows<element> const add{own.data, nullptr, all.columns(own.share.first, own.share.size())};
        rank.each(1, own.share.size(), add);
    }

    void linear(std::string const& weight, const_view x, view y) const {
        rank.linear(x.data(), rank.weight(weight), y.data());
    }
    /// Returns the input of linear layers as their weights' gradients want it.
    summed whole(const_view x) const {
        auto all = sums.whole(x, rank.comm);
        rank.ended();
        return all;
    }
    /// Returns the rows of the gradient of which this rank adds up its share.
    template <class X>
    auto share(X const& x, index_t columns) const {
        auto all = sums.share(x, columns, rank.comm);
        rank.ended();
        return all;
    }
    /// Adds to dx; `x` is from `whole`.
    void linear_backward(std::string const& weight, summed const& x, const_view dy, view dx) const {
        auto const own = share(dy, dy.data().width());
        if (!own.share.empty())
            rank.linear_backward_weight(own.data, x.data, grads.of(weight).sub(own.share.first, own.share.size()));
        rank.linear_backward_input(dy.data(), rank.weight(weight), dx.data());
    }

    R& rank;
    gradients<R>& grads;
    S sharding;
    cpx::weight_sums<S> sums;
};

} // namespace qwen
