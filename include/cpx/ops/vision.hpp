// SPDX-License-Identifier: Apache-2.0
// Rows of a vision tower's features in the rows of text, at their placeholders, and their gradients.
#pragma once

#include <cpx/ops/mrope.hpp>

namespace cpx {

namespace detail {

/// Calls `f(row of x, row of features, columns)` for every placeholder of a kind, after all checks.
template <class S, class X, class Features, class F>
void at_placeholders(char const* where, sharded_positions<S> const& positions, media_kind kind, X const& x,
                     Features const& features, caller here, F&& f) {
    require(kind == media_kind::image || kind == media_kind::video, where, "kind", "image or video",
            static_cast<int>(kind), here);
    require_place(where, "x", x, positions.sharding(), positions.rank(), "that of the positions", here);
    require_place(where, "the features", features, positions.features(kind), positions.rank(),
                  "that of the placeholders", here);
    auto const& at = positions.placeholders(kind);
    index_t const width = x.data().width();
    require_shape(where, "x", x.data(), positions.axes().width(), width, here);
    require_shape(where, "features", features.data(), std::ssize(at), width, here);
    require_apart(where, {{"x", x.data()}}, {{"features", features.data()}}, here);
    index_t next = 0;
    for (index_t const row : at) f(x.data().row(row), features.data().row(next++), width);
}

template <class S, class X, class Features>
inline constexpr bool at_home =
    sharded_as<S, X> && sharded_as<typename sharded_positions<S>::features_sharding, Features>;

} // namespace detail

/// Replaces the rows of x at the placeholders of a kind by their features.
///
/// x: (rows, width), as the positions are sharded; features: (placeholders of the rank, width), sharded as
/// `positions.features(kind)`, where `relayout` and `exchange` bring them from the rank that has made them. No
/// communication. Throws `cpx::error` if shapes or shardings do not fit.
template <any_sharding S, sharded_like X, sharded_like F>
void put_features(sharded_positions<S> const& positions, media_kind kind, F const& features, X&& x,
                  caller here = caller::here()) {
    constexpr bool fits = detail::at_home<S, X, F>, writes = detail::writes<X, F>;
    static_assert(fits, "cpx: put_features of rows that are not at their placeholders; relayout the features as "
                        "positions.features(kind), and make x of the positions' sharding");
    static_assert(!fits || writes,
                  "cpx: put_features wants features of x's elements, and an x that is not const and has a name");
    if constexpr (fits && writes)
        detail::at_placeholders("put_features", positions, kind, x.view(), features.view(), here,
                                [](auto* row, auto const* feature, index_t n) { std::copy_n(feature, n, row); });
}
template <class X = detail::any, class Y1 = detail::any, class Y2 = detail::any>
detail::refused put_features(X const& = {}, detail::any = {}, Y1 const& = {}, Y2 const& = {}, detail::any = {}) {
    static_assert(detail::never<X, Y1, Y2>,
                  "cpx: put_features(positions, kind, features, x) wants sharded_positions, a "
                  "media_kind, and tensors; view other memory as sharded(rows, sharding, rank)");
    return {};
}

/// Takes the gradients of features out of dx: their rows become 0, because what stood there before does not matter.
template <any_sharding S, sharded_like X, sharded_like F>
void put_features_backward(sharded_positions<S> const& positions, media_kind kind, X&& dx, F&& dfeatures,
                           caller here = caller::here()) {
    constexpr bool fits = detail::at_home<S, X, F>, writes = detail::writes<X, F> && detail::writes<F, X>;
    static_assert(fits, "cpx: put_features_backward of rows that are not at their placeholders; make dfeatures of "
                        "positions.features(kind), and dx of the positions' sharding");
    static_assert(!fits || writes,
                  "cpx: put_features_backward wants dx and dfeatures of the same elements, not const, with "
                  "names");
    if constexpr (fits && writes)
        detail::at_placeholders("put_features_backward", positions, kind, dx.view(), dfeatures.view(), here,
                                [](auto* row, auto* feature, index_t n) {
                                    std::copy_n(row, n, feature);
                                    std::fill_n(row, n, element_of<X>{});
                                });
}
template <class X = detail::any, class Y1 = detail::any, class Y2 = detail::any>
detail::refused put_features_backward(X const& = {}, detail::any = {}, Y1 const& = {}, Y2 const& = {},
                                      detail::any = {}) {
    static_assert(detail::never<X, Y1, Y2>,
                  "cpx: put_features_backward(positions, kind, dx, dfeatures) wants sharded_positions, a media_kind, "
                  "and tensors; view other memory as sharded(rows, sharding, rank)");
    return {};
}

/// Adds features to the rows of x at their placeholders, as deepstack does behind the first layers. All else as in
/// `put_features`; the plan that brings the features of one layer brings those of all.
template <any_sharding S, sharded_like X, sharded_like F>
void add_features(sharded_positions<S> const& positions, media_kind kind, F const& features, X&& x,
                  caller here = caller::here()) {
    constexpr bool fits = detail::at_home<S, X, F>, writes = detail::writes<X, F>;
    static_assert(fits, "cpx: add_features of rows that are not at their placeholders; relayout the features as "
                        "positions.features(kind), and make x of the positions' sharding");
    static_assert(!fits || writes,
                  "cpx: add_features wants features of x's elements, and an x that is not const and has a name");
    if constexpr (fits && writes)
        detail::at_placeholders("add_features", positions, kind, x.view(), features.view(), here,
                                [](auto* row, auto const* feature, index_t n) {
                                    for (index_t c = 0; c < n; ++c) row[c] += feature[c];
                                });
}
template <class X = detail::any, class Y1 = detail::any, class Y2 = detail::any>
detail::refused add_features(X const& = {}, detail::any = {}, Y1 const& = {}, Y2 const& = {}, detail::any = {}) {
    static_assert(detail::never<X, Y1, Y2>,
                  "cpx: add_features(positions, kind, features, x) wants sharded_positions, a "
                  "media_kind, and tensors; view other memory as sharded(rows, sharding, rank)");
    return {};
}

/// Copies the gradients of features that were added; dx stays as it is, the gradient of x.
template <any_sharding S, sharded_like X, sharded_like F>
void add_features_backward(sharded_positions<S> const& positions, media_kind kind, X const& dx, F&& dfeatures,
                           caller here = caller::here()) {
    constexpr bool fits = detail::at_home<S, X, F>, writes = detail::writes<F, X>;
    static_assert(fits, "cpx: add_features_backward of rows that are not at their placeholders; make dfeatures of "
                        "positions.features(kind), and dx of the positions' sharding");
    static_assert(!fits || writes,
                  "cpx: add_features_backward wants dfeatures of dx's elements, not const, with a name");
    if constexpr (fits && writes)
        detail::at_placeholders("add_features_backward", positions, kind, dx.view(), dfeatures.view(), here,
                                [](auto const* row, auto* feature, index_t n) { std::copy_n(row, n, feature); });
}
template <class X = detail::any, class Y1 = detail::any, class Y2 = detail::any>
detail::refused add_features_backward(X const& = {}, detail::any = {}, Y1 const& = {}, Y2 const& = {},
                                      detail::any = {}) {
    static_assert(detail::never<X, Y1, Y2>,
                  "cpx: add_features_backward(positions, kind, dx, dfeatures) wants sharded_positions, a media_kind, "
                  "and tensors; view other memory as sharded(rows, sharding, rank)");
    return {};
}

} // namespace cpx
