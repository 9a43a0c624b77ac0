// SPDX-License-Identifier: Apache-2.0
// Features of images and videos in one rank's pass: from the tower's rows to their placeholders, their gradients home.
#pragma once

#include "needs.hpp"
#include "site.hpp"

#include <cpx/ops/mrope.hpp>

#include <variant>

namespace qwen {

/// Moves each row of features to the rank of its placeholder, and its gradient back, by one plan a kind for all layers.
template <class R>
class vision {
    using T = typename R::element;
    using place = site<R, entry_sharding>;
    using positions = cpx::sharded_positions<entry_sharding>;

public:
    vision(input const& in, positions const& where, place& at)
        : in_(in), positions_(where), at_(at), images_(plan(cpx::media_kind::image)),
          videos_(plan(cpx::media_kind::video)) {}

    /// Puts the features in the rows of h that are for the embedding, or for behind a layer.
    void operator()(index_t layer, typename place::tensor& h) const {
        each(layer, [&](features const& f, auto const& plan) {
            auto x = cpx::make_tensor<T>(plan.from, rank(), h.width(), at_.rank.memory());
            std::vector<T> made;
            for (index_t const row : rows_of(plan.from)) {
                auto const first = f.values.begin() + row * h.width();
                made.insert(made.end(), first, first + h.width());
            }
            x.write(made);
            auto const here = at_.move(plan, x);
            auto const list = list_of(at_.rank.memory(), positions_.placeholders(f.kind));
            auto const to = list.view().data();
            if (layer == features::embedding)
                at_.rank.each(list.count(), h.width(), rowwise::put_rows<T>{here.data(), to, h.data()});
            else
                at_.rank.each(1, h.width(), rowwise::add_rows<T>{here.data(), to, h.data()});
        });
    }

    /// Takes their gradients out of dh, the gradient of what the call left in h.
    void backward(index_t layer, typename place::tensor& dh) const {
        each(layer, [&](features const& f, auto const& plan) {
            auto here = cpx::make_tensor<T>(plan.to, rank(), dh.width(), at_.rank.memory());
            auto const list = list_of(at_.rank.memory(), positions_.placeholders(f.kind));
            auto const from = list.view().data();
            auto const each_row = [&](auto const& of_row) { at_.rank.each(list.count(), dh.width(), of_row); };
            each_row(rowwise::take_rows<T>{dh.data(), from, here.data()});
            if (layer == features::embedding) { // what stood there before the features does not matter
                cpx::row_buffer<T, typename R::memory_type> const zeros(at_.rank.memory(), list.count(), dh.width());
                each_row(rowwise::put_rows<T>{zeros.view(), from, dh.data()});
            }
            auto const home = at_.move(plan.transposed(), here);
            auto const rows = list_of(at_.rank.memory(), rows_of(plan.from));
            rowwise::put_rows<T> const put{home.data(), rows.view().data(), at_.grads.of(f.name)};
            at_.rank.each(rows.count(), dh.width(), put);
        });
    }

    /// Adds what bringing all features takes.
    void count_moves(index_t width, needs& n) const {
        for (features const& f : in_.of_media)
            std::visit([&](auto const& plan) { count(plan.from, plan.to, width, n); }, of(f.kind));
    }

private:
    using at_placeholders = typename positions::features_sharding;
    using any_plan = std::variant<cpx::relayout_plan<cpx::piecewise<cpx::by_item>, at_placeholders>,
                                  cpx::relayout_plan<cpx::replicated<>, at_placeholders>>;

    int rank() const { return at_.rank.rank(); }
    any_plan plan(cpx::media_kind kind) const {
        int const ranks = at_.sharding.ranks();
        auto const& to = positions_.features(kind);
        if (in_.made == tower::by_item) return relayout(features_by_item(in_.media, kind, ranks), to, rank());
        return relayout(cpx::replicated<>(ranks, in_.media.batch(kind)), to, rank());
    }
    any_plan const& of(cpx::media_kind kind) const { return kind == cpx::media_kind::image ? images_ : videos_; }

    template <class F>
    void each(index_t layer, F&& f) const {
        for (features const& some : in_.of_media)
            if (some.layer == layer) std::visit([&](auto const& plan) { f(some, plan); }, of(some.kind));
    }
    /// Returns the rows of the features that this rank has.
    template <class Source>
    std::vector<index_t> rows_of(Source const& source) const {
        std::vector<index_t> list;
        source.for_each_piece(rank(), [&](cpx::range rows) {
            for (index_t row = rows.first; row < rows.last; ++row) list.push_back(row);
        });
        return list;
    }

    input const& in_;
    positions const& positions_;
    place& at_;
    any_plan images_, videos_;
};

} // namespace qwen
