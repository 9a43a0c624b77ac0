// SPDX-License-Identifier: Apache-2.0
// Rows of a vision tower's features in the rows of text on devices, at their placeholders, and their gradients.
#pragma once

#include <cpx/core/refused.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/cuda/row_gather.hpp>
#include <cpx/ops/local/shape.hpp>
#include <cpx/ops/mrope.hpp>

namespace cpx::cuda {

/// The rows of one rank that hold placeholders, listed in device memory: made once a batch, for the features of all
/// layers. Belongs to the stream of its memory.
template <any_sharding S>
class placeholder_rows {
public:
    using features_sharding = typename sharded_positions<S>::features_sharding;

    /// Copies the lists of `positions`; returns when they are there.
    placeholder_rows(sharded_positions<S> const& positions, cuda::memory const& in, caller here = caller::here())
        : sharding_(positions.sharding()), rank_(positions.rank()),
          images_(positions.features(media_kind::image), in, positions.placeholders(media_kind::image), here),
          videos_(positions.features(media_kind::video), in, positions.placeholders(media_kind::video), here) {}

    template <class X = cpx::detail::any>
    explicit placeholder_rows(X const& = {}, cpx::detail::any = {}, cpx::detail::any = {})
        : placeholder_rows(cpx::detail::lacking<sharded_positions<S> const&>(),
                           cpx::detail::lacking<cuda::memory const&>()) {
        static_assert(cpx::detail::never<X>, "cpx: cuda::placeholder_rows(positions, memory) wants sharded_positions "
                                             "and a cuda::memory, such as that of a communicator, comm.memory()");
    }

    S const& sharding() const { return sharding_; }
    int rank() const { return rank_; }
    /// Returns which ranks want which rows of a kind's features, as `sharded_positions` does.
    features_sharding const& features(media_kind kind) const { return of(kind).features; }
    /// Returns the rank's rows that hold placeholders of a kind, ascending, as its rows of features.
    std::span<index_t const> list(media_kind kind) const {
        return {of(kind).rows.data(), static_cast<std::size_t>(of(kind).rows.size())};
    }

private:
    struct of_kind {
        features_sharding features;
        block<index_t> rows;
        of_kind(features_sharding of, cuda::memory const& in, std::vector<index_t> const& list, caller here)
            : features(std::move(of)), rows(in.template room<index_t>(std::ssize(list))) {
            in.write(rows.data(), std::span<index_t const>(list), here);
        }
    };
    of_kind const& of(media_kind kind) const { return kind == media_kind::image ? images_ : videos_; }

    S sharding_;
    int rank_;
    of_kind images_, videos_;
};
template <class X = cpx::detail::any>
placeholder_rows(X const& = {}, cpx::detail::any = {}, cpx::detail::any = {})
    -> placeholder_rows<cpx::sharding<cpx::sequential<1>>>;

namespace detail {

template <class S, class X, class Features>
inline constexpr bool at_home =
    cpx::detail::sharded_as<S, X> && cpx::detail::sharded_as<typename placeholder_rows<S>::features_sharding, Features>;

/// Throws `cpx::error` unless x and features are the batch's, of its shapes, and in one stream.
template <class S, class X, class Features>
void require_features(char const* where, placeholder_rows<S> const& at, media_kind kind, X const& x,
                      Features const& features, caller here) {
    cpx::detail::require_place(where, "x", x, at.sharding(), at.rank(), "that of the placeholders", here);
    require(features.sharding() == at.features(kind), where, "sharding of the features", "that of the placeholders",
            "another", here);
    require(features.memory().stream() == x.memory().stream(), where, "stream of the features", "that of x", "another",
            here);
    index_t const width = x.data().width();
    cpx::detail::require_shape(where, "x", x.data(), at.sharding().rows(at.rank()), width, here);
    cpx::detail::require_shape(where, "features", features.data(), std::ssize(at.list(kind)), width, here);
}

} // namespace detail

/// Replaces the rows of x at the placeholders of a kind by their features, as the host's `put_features` does.
///
/// x: (rows, width), as the placeholders' sharding; features: (placeholders of the rank, width), sharded as
/// `at.features(kind)`, where `relayout` and `exchange` bring them. In the stream of x. No communication. Throws
/// `cpx::error` if shapes or shardings do not fit, before anything is launched. Can be captured.
template <any_sharding S, sharded_like<memory> X, sharded_like<memory> F>
void put_features(placeholder_rows<S> const& at, media_kind kind, F const& features, X&& x,
                  caller here = caller::here()) {
    constexpr bool fits = detail::at_home<S, X, F>, writes = cpx::detail::writes<X, F>;
    static_assert(fits, "cpx: cuda::put_features of rows that are not at their placeholders; relayout the features as "
                        "at.features(kind), and make x of the placeholders' sharding");
    static_assert(!fits || writes,
                  "cpx: cuda::put_features wants features of x's elements, and an x that is not const and has a name");
    if constexpr (fits && writes) {
        auto const from = features.view();
        auto const to = x.view();
        detail::require_features("cuda::put_features", at, kind, to, from, here);
        scatter_rows(from.data(), at.list(kind), to.data(), other_rows::stay, to.memory().stream(), here);
    }
}
template <class X = cpx::detail::any>
cpx::detail::refused put_features(X const& = {}, cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {},
                                  cpx::detail::any = {}) {
    static_assert(cpx::detail::never<X>,
                  "cpx: cuda::put_features(at, kind, features, x) wants placeholder_rows, a media_kind, and tensors of "
                  "cuda::memory; of the host's, call cpx::put_features");
    return {};
}

/// Takes the gradients of features out of dx: their rows become 0, because what stood there before does not matter.
template <any_sharding S, sharded_like<memory> X, sharded_like<memory> F>
void put_features_backward(placeholder_rows<S> const& at, media_kind kind, X&& dx, F&& dfeatures,
                           caller here = caller::here()) {
    constexpr bool fits = detail::at_home<S, X, F>, writes = cpx::detail::writes<X, F> && cpx::detail::writes<F, X>;
    static_assert(fits, "cpx: cuda::put_features_backward of rows that are not at their placeholders; make dfeatures "
                        "of at.features(kind), and dx of the placeholders' sharding");
    static_assert(!fits || writes,
                  "cpx: cuda::put_features_backward wants dx and dfeatures of the same elements, not const, "
                  "with names");
    if constexpr (fits && writes) {
        using T = element_of<X>;
        auto const from = dx.view();
        auto const to = dfeatures.view();
        char const* const where = "cuda::put_features_backward";
        detail::require_features(where, at, kind, from, to, here);
        cudaStream_t const stream = from.memory().stream();
        gather_rows(from.data(), at.list(kind), to.data(), stream, here);
        index_t const width = from.data().width();
        auto const zeros = from.memory().template zeros<T>(where, {width}, here); // a row, as often as it is wanted
        detail::move_rows<true, T>(rows<T const>(zeros.data(), std::ssize(at.list(kind)), width, 0),
                                   at.list(kind).data(), std::ssize(at.list(kind)), from.data(), stream, here);
    }
}
template <class X = cpx::detail::any>
cpx::detail::refused put_features_backward(X const& = {}, cpx::detail::any = {}, cpx::detail::any = {},
                                           cpx::detail::any = {}, cpx::detail::any = {}) {
    static_assert(cpx::detail::never<X>,
                  "cpx: cuda::put_features_backward(at, kind, dx, dfeatures) wants placeholder_rows, a media_kind, and "
                  "tensors of cuda::memory; of the host's, call cpx::put_features_backward");
    return {};
}

/// Adds features to the rows of x at their placeholders, as deepstack does behind the first layers: in float, rounded
/// once. All else as in `put_features`; the plan that brings the features of one layer brings those of all.
template <any_sharding S, sharded_like<memory> X, sharded_like<memory> F>
void add_features(placeholder_rows<S> const& at, media_kind kind, F const& features, X&& x,
                  caller here = caller::here()) {
    constexpr bool fits = detail::at_home<S, X, F>, writes = cpx::detail::writes<X, F>;
    static_assert(fits, "cpx: cuda::add_features of rows that are not at their placeholders; relayout the features as "
                        "at.features(kind), and make x of the placeholders' sharding");
    static_assert(!fits || writes,
                  "cpx: cuda::add_features wants features of x's elements, and an x that is not const and has a name");
    if constexpr (fits && writes) {
        auto const from = features.view();
        auto const to = x.view();
        detail::require_features("cuda::add_features", at, kind, to, from, here);
        scatter_add_rows<element_of<X>, index_t>(from.data(), at.list(kind), {}, to.data(), to.memory().stream(), here);
    }
}
template <class X = cpx::detail::any>
cpx::detail::refused add_features(X const& = {}, cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {},
                                  cpx::detail::any = {}) {
    static_assert(cpx::detail::never<X>,
                  "cpx: cuda::add_features(at, kind, features, x) wants placeholder_rows, a media_kind, and tensors of "
                  "cuda::memory; of the host's, call cpx::add_features");
    return {};
}

/// Copies the gradients of features that were added; dx stays as it is, the gradient of x.
template <any_sharding S, sharded_like<memory> X, sharded_like<memory> F>
void add_features_backward(placeholder_rows<S> const& at, media_kind kind, X const& dx, F&& dfeatures,
                           caller here = caller::here()) {
    constexpr bool fits = detail::at_home<S, X, F>, writes = cpx::detail::writes<F, X>;
    static_assert(fits, "cpx: cuda::add_features_backward of rows that are not at their placeholders; make dfeatures "
                        "of at.features(kind), and dx of the placeholders' sharding");
    static_assert(!fits || writes,
                  "cpx: cuda::add_features_backward wants dfeatures of dx's elements, not const, with a name");
    if constexpr (fits && writes) {
        auto const from = dx.view();
        auto const to = dfeatures.view();
        detail::require_features("cuda::add_features_backward", at, kind, from, to, here);
        gather_rows(from.data(), at.list(kind), to.data(), from.memory().stream(), here);
    }
}
template <class X = cpx::detail::any>
cpx::detail::refused add_features_backward(X const& = {}, cpx::detail::any = {}, cpx::detail::any = {},
                                           cpx::detail::any = {}, cpx::detail::any = {}) {
    static_assert(cpx::detail::never<X>,
                  "cpx: cuda::add_features_backward(at, kind, dx, dfeatures) wants placeholder_rows, a media_kind, and "
                  "tensors of cuda::memory; of the host's, call cpx::add_features_backward");
    return {};
}

} // namespace cpx::cuda
