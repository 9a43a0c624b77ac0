// SPDX-License-Identifier: Apache-2.0
// Features of images and videos in one rank's pass: from the tower's rows to their placeholders, their gradients home.
#pragma once

#include "needs.hpp"
#include "site.hpp"

#include <variant>

namespace qwen {

/// Moves each row of features to the rank of its placeholder, and its gradient back, by one plan a kind for all layers.
template <class T>
class vision {
public:
    using positions = cpx::sharded_positions<entry_sharding>;
    using tensor = cpx::tensor<T, entry_sharding>;

    vision(input const& in, positions const& where, gradients<T>& grads, host_ranks& comm)
        : in_(in), positions_(where), grads_(grads), comm_(comm), images_(plan(cpx::media_kind::image)),
          videos_(plan(cpx::media_kind::video)) {}

    /// Puts the features in the rows of h that are for the embedding, or for behind a layer.
    void operator()(cpx::index_t layer, tensor& h) const {
        each(layer, [&](features const& f, auto const& plan) {
            auto x = cpx::make_tensor<T>(plan.from, comm_.rank(), h.width());
            each_row(plan.from, [&](cpx::index_t row, cpx::index_t local) {
                std::copy_n(f.values.begin() + row * x.width(), x.width(), x.data().row(local));
            });
            auto const here = exchange(plan, x, comm_);
            if (layer == features::embedding)
                put_features(positions_, f.kind, here, h);
            else
                add_features(positions_, f.kind, here, h);
        });
    }

    /// Takes their gradients out of dh, the gradient of what the call left in h.
    void backward(cpx::index_t layer, tensor& dh) const {
        each(layer, [&](features const& f, auto const& plan) {
            auto here = cpx::make_tensor<T>(plan.to, comm_.rank(), dh.width());
            if (layer == features::embedding)
                put_features_backward(positions_, f.kind, dh, here);
            else
                add_features_backward(positions_, f.kind, dh, here);
            auto const home = exchange(plan.transposed(), here, comm_);
            auto const to = grads_.of(f.name);
            each_row(plan.from, [&](cpx::index_t row, cpx::index_t local) {
                std::copy_n(home.data().row(local), home.width(), to.row(row));
            });
        });
    }

    /// Adds what bringing all features takes.
    void count_moves(cpx::index_t width, needs& n) const {
        for (features const& f : in_.of_media)
            std::visit([&](auto const& plan) { count(plan.from, plan.to, width, n); }, of(f.kind));
    }

private:
    using at_placeholders = typename positions::features_sharding;
    using any_plan = std::variant<cpx::relayout_plan<cpx::piecewise<cpx::by_item>, at_placeholders>,
                                  cpx::relayout_plan<cpx::replicated<>, at_placeholders>>;

    any_plan plan(cpx::media_kind kind) const {
        int const ranks = comm_.ranks(), rank = comm_.rank();
        auto const& to = positions_.features(kind);
        if (in_.made == tower::by_item) return relayout(features_by_item(in_.media, kind, ranks), to, rank);
        return relayout(cpx::replicated<>(ranks, in_.media.batch(kind)), to, rank);
    }
    any_plan const& of(cpx::media_kind kind) const { return kind == cpx::media_kind::image ? images_ : videos_; }

    template <class F>
    void each(cpx::index_t layer, F&& f) const {
        for (features const& some : in_.of_media)
            if (some.layer == layer) std::visit([&](auto const& plan) { f(some, plan); }, of(some.kind));
    }
    /// Calls `f(row of the features, row of this rank)`.
    template <class Source, class F>
    void each_row(Source const& source, F&& f) const {
        cpx::index_t local = 0;
        source.for_each_piece(comm_.rank(), [&](cpx::range rows) {
            for (cpx::index_t row = rows.first; row < rows.last; ++row) f(row, local++);
        });
    }

    input const& in_;
    positions const& positions_;
    gradients<T>& grads_;
    host_ranks& comm_;
    any_plan images_, videos_;
};

} // namespace qwen
