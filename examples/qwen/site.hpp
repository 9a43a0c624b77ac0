// SPDX-License-Identifier: Apache-2.0
// What every block of the model needs of the place where its tokens are: norms and projections, forward and backward.
#pragma once

#include "outcome.hpp"

#include <cpx/cpx.hpp>
#include <cpx/ops.hpp>

#include <functional>
#include <map>
#include <vector>

namespace qwen {

/// The gradients of all weights and features: one rank's shares, until they are summed.
template <class T>
class gradients {
public:
    gradients(checkpoint<T> const& model, std::vector<features> const& of_media)
        : tied_(model.config.tie_word_embeddings) {
        cpx::index_t first = 0;
        auto const add = [&](std::string const& name, cpx::index_t rows, cpx::index_t columns) {
            places_[name] = {first, rows, columns};
            first += rows * columns;
        };
        auto const add_weight = [&](std::string const& name, cpx::rows<T const> weight) {
            add(name, weight.count(), weight.width());
        };
        model.each(add_weight);
        // What head and embedding add to a weight that they share lies on different ranks: two sums, added at the end.
        if (tied_) add_weight(head, model.weight(head));
        cpx::index_t const hidden = model.config.hidden_size;
        for (features const& f : of_media) add(f.name, std::ssize(f.values) / hidden, hidden);
        values_.resize(static_cast<std::size_t>(first));
    }

    cpx::rows<T> of(std::string const& name) {
        auto const& p = places_.at(name);
        return {values_.data() + p.first, p.count, p.width};
    }
    std::span<T> gain(std::string const& name) {
        cpx::rows<T> const all = of(name);
        return {all.data(), static_cast<std::size_t>(all.count() * all.width())};
    }
    /// Completes all of them in one call and returns them by name. Collective.
    template <class Comm>
    std::map<std::string, gradient<T>> sum(Comm& comm) {
        cpx::sum_over_ranks(std::span(values_), comm);
        std::map<std::string, gradient<T>> result;
        for (auto const& item : places_) {
            auto const values = gain(item.first);
            result[item.first] = {item.second.width, {values.begin(), values.end()}};
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
        cpx::index_t first, count, width;
    };
    bool tied_;
    std::map<std::string, place> places_;
    std::vector<T> values_;
};

/// The ranks on the host, and what they have sent.
using host_ranks = cpx::counted<cpx::threads>;

/// One rank's rows of the residual stream on the sharding `S`.
///
/// A block is a function of a site and hidden states h; it adds to h and returns its backward, which adds to dh.
template <class T, cpx::any_sharding S, cpx::transport Comm>
class site {
public:
    using element = T;
    using sharding_type = S;
    using tensor = cpx::tensor<T, S>;
    using view = cpx::sharded<T, S>;
    using const_view = cpx::sharded<T const, S>;
    using backward = std::function<void(tensor& dh)>;

    site(checkpoint<T> const& weights, gradients<T>& of_weights, S const& where, cpx::sum_order order, Comm& transport)
        : model(weights), grads(of_weights), sharding(where), sums(where, transport.rank(), order), comm(transport) {}

    int rank() const { return comm.rank(); }
    tensor make(cpx::index_t width) const { return {sharding, rank(), width}; }

    void norm(std::string const& weight, const_view x, view y) const {
        cpx::rms_norm<T>(x.data(), model.gain(weight), eps(), centre(), y.data());
    }
    /// Writes dx, which may be dy.
    void norm_backward(std::string const& weight, const_view x, const_view dy, view dx) const {
        auto const gain = model.gain(weight);
        sums.terms(
            grads.gain(weight),
            [&](cpx::index_t row, std::span<T> dgain) {
                cpx::rms_norm_backward<T>(x.data().sub(row, 1), gain, eps(), centre(), dy.data().sub(row, 1),
                                          dx.data().sub(row, 1), dgain);
            },
            comm);
    }

    void linear(std::string const& weight, const_view x, view y) const {
        cpx::linear<T>(x.data(), model.weight(weight), y.data());
    }
    /// Returns the input of linear layers as their weights' gradients want it.
    cpx::summed_rows<T> whole(const_view x) const { return sums.whole(x, comm); }
    /// Adds to dx; `x` is from `whole`.
    void linear_backward(std::string const& weight, cpx::summed_rows<T> const& x, const_view dy, view dx) const {
        sums.linear(x, dy, grads.of(weight), comm);
        auto own = make(dx.data().width());
        cpx::linear_backward_input<T>(dy.data(), model.weight(weight), own.data());
        add(own.data(), dx.data());
    }

    static void add(cpx::rows<T const> x, cpx::rows<T> h) { cpx::as_matrix(h) += cpx::as_matrix(x); }

    checkpoint<T> const& model;
    gradients<T>& grads;
    S sharding;
    cpx::weight_sums<S> sums;
    Comm& comm;

private:
    T eps() const { return static_cast<T>(model.config.rms_norm_eps); }
    T centre() const { return static_cast<T>(model.config.zero_centred_norms); }
};

} // namespace qwen
