// SPDX-License-Identifier: Apache-2.0
// Features of images and videos in one rank's pass: from the tower's rows to their placeholders, their gradients home.
#pragma once

#include "tape.hpp"

#include <cpx/ops/mrope.hpp>

#include <variant>

namespace qwen {

/// Moves each row of features to the rank of its placeholder, and its gradient back, by one plan a kind for all layers.
template <class R>
class vision {
    using T = typename R::element;
    using var = typename tape<R>::template var<entry_sharding>;
    using positions = cpx::sharded_positions<entry_sharding>;
    using at_placeholders = typename positions::features_sharding;
    using any_plan = std::variant<cpx::relayout_plan<cpx::piecewise<cpx::by_item>, at_placeholders>,
                                  cpx::relayout_plan<cpx::replicated<>, at_placeholders>>;

public:
    vision(input const& in, positions const& where, tape<R>& at)
        : in_(in), at_(at), images_(plan(cpx::media_kind::image, where)), videos_(plan(cpx::media_kind::video, where)),
          of_images_(at.list_of(where.placeholders(cpx::media_kind::image))),
          of_videos_(at.list_of(where.placeholders(cpx::media_kind::video))) {}

    /// Puts the features in the rows of h that are for the embedding, or adds them to those for behind a layer.
    void operator()(index_t layer, var const& h) {
        for (features const& f : in_.of_media) {
            bool const image = f.kind == cpx::media_kind::image;
            if (f.layer == layer)
                std::visit([&](auto const& plan) { add(f, plan, image ? of_images_ : of_videos_, h); },
                           image ? images_ : videos_);
        }
    }

private:
    template <class Plan>
    void add(features const& f, Plan const& plan, typename tape<R>::list const& list, var const& h) {
        std::vector<T> own;
        std::vector<index_t> own_rows;
        plan.from.for_each_piece(at_.rank.rank(), [&](cpx::range rows) {
            for (index_t row = rows.first; row < rows.last; ++row) own_rows.push_back(row);
            own.insert(own.end(), f.values.begin() + rows.first * h->width(),
                       f.values.begin() + rows.last * h->width());
        });
        auto const x = at_.make(plan.from, h->width());
        x->value.write(own);
        auto const list_of_own = at_.list_of(own_rows);
        at_.back([=, this, &f] {
            auto const to = at_.grads.of(f.name);
            at_.each_column(to,
                            rowwise::add_rows<T, cpx::wide<T>>{x->grad().data(), at_.numbers(list_of_own).data(), to});
        });
        auto const here = at_.move(plan, plan.transposed(), x);
        auto const rows = at_.numbers(list);
        bool const replace = f.layer == features::embedding;
        if (replace)
            scatter_rows<T>(at_.rank.memory(), here->data(), rows, h->data());
        else
            at_.each_column(h->data(), rowwise::add_rows<T>{here->data(), rows.data(), h->data()});
        at_.back([=, this] {
            auto const d = here->grad().data(), dh = h->grad().data();
            gather_rows<T>(at_.rank.memory(), dh, rows, d);
            if (!replace) return; // what stood there before the features does not matter
            auto const zeros = at_.beside(here, h->width());
            scatter_rows<T>(at_.rank.memory(), zeros->data(), rows, dh);
        });
    }

    any_plan plan(cpx::media_kind kind, positions const& where) const {
        auto const& to = where.features(kind);
        if (in_.made == tower::by_item)
            return relayout(features_by_item(in_.media, kind, to.ranks()), to, at_.rank.rank());
        return relayout(cpx::replicated<>(to.ranks(), in_.media.batch(kind)), to, at_.rank.rank());
    }

    input const& in_;
    tape<R>& at_;
    any_plan images_, videos_;
    typename tape<R>::list of_images_, of_videos_; ///< the rows of their placeholders
};

} // namespace qwen
