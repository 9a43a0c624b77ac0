// SPDX-License-Identifier: Apache-2.0
// Any recurrence of tensors on devices, on any sharding: all heads of a rank together.
#pragma once

#include <cpx/ops/cuda/recurrence_checks.hpp>
#include <cpx/ops/cuda/recurrence_pass.hpp>
#include <cpx/ops/cuda/recurrence_step.hpp>
#include <cpx/ops/cuda/state_exchange.hpp>
#include <cpx/ops/recurrence.hpp>

#include <algorithm>
#include <concepts>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <vector>

namespace cpx {

/// What a forward on a device leaves to its backward: as on the host and, if `keeps` is set before, what kernels made
/// of the inputs alone, which the backward makes again otherwise, of the same bits. Of the gated delta rule that is
/// some 88 bytes a token and value head; others have nothing of the kind. Blocks that are lent and of the right size
/// are written instead of new ones; `kept` begins at multiples of 256 bytes.
template <class T>
struct recurrence_saved<T, cuda::memory> {
    cuda::block<float> starts, maps;
    std::uint64_t of = 0; ///< as on the host
    bool keeps = false;
    struct made { // by one call; see `run_together`
        std::vector<std::size_t> segments;
        cuda::block<char> memory;
        bool stale = false; ///< lent, and not written by the last forward
    };
    std::vector<made> kept;
};

namespace cuda {

/// What a recurrence of tensors on devices is given and makes on one rank, as in the host's `recurrence_tensors`. x: a
/// tuple of tensors in the order of `inputs()`, each of elements of its own; states are float.
template <class X, class O>
struct recurrence_tensors {
    using state = float;
    X x;
    O o;
    rows<float const> initial = {};
    rows<float> final = {};
    recurrence_saved<element_of<O>, memory>* saved = nullptr;
};
template <class X, class O> // these for clang++ before 17
recurrence_tensors(X, O, rows<float const> = {}, rows<float> = {}, void* = nullptr) -> recurrence_tensors<X, O>;

/// What goes into and comes out of its backward, as in `recurrence_gradients`. dx: a tuple as x.
template <class D, class X>
struct recurrence_gradients {
    D dout;
    X dx;
    rows<float const> dfinal = {};
    rows<float> dinitial = {};
};
template <class D, class X>
recurrence_gradients(D, X, rows<float const> = {}, rows<float> = {}) -> recurrence_gradients<D, X>;

/// A recurrence of tensors on devices: a model of `cpx::recurrence` but for its functions, which are about all heads
/// that the rank holds and as many segments as they are given, and enqueue their work in the stream of `by`.
///
/// States of segments and gradients of these are side by side, (segments, heads * keys * values), from a multiple of
/// 256 bytes on, those after segments perhaps where the caller of `recur` wants them; states before and after do not
/// overlap. Spans may be empty: zeros, or nothing that is wanted. x, o, dout, dx: as they are given to `recur`; they
/// have been checked, but for what `check_rank` knows. State heads that read one head of x are on one rank; in a
/// forward they may be on several, if each of these holds no other head of x.
///
/// - `forward(segments, x, before, o, after, kept, by, here)`
/// - `fold(segments, x, maps, ends, by, here)`; maps: (segments, heads * map's elements)
/// - `backward(segments, x, before, dout, dafter, dx, dbefore, kept, by, here)`
/// - `backward_fold(segments, x, dout, dbefore, by, here)`
/// - `kept_bytes(x, o, segments, tokens)`, if it is there: what a forward of so many segments, and tokens in them, may
///   keep for the backward of the same ones; `kept` is as large, or empty
/// - `step(x, o, slots, states, by, here)`, if it is there: a token of each row's sequence, from state to state in
///   place, where no sequence has more, all go on from states and leave them, and no backward comes; slots: which of
///   the states a row has, below 0 none, which leaves its o alone; empty: row i has state i
/// - `check_rank(where, plan, backward, here)`, if it is there, throws if it cannot run the heads, tokens and segments
///   of a rank
///
/// A model that can make states before outputs, so that these are on their way while outputs are computed, has parts,
/// too, of segments whose states others wait for, or that wait for others:
///
/// - `parts`: a type for what has begun; `has_parts(x, o)`: whether a forward of these has them
/// - `states_first(x, segments, exchanges, by_scan)`: whether that is wanted of so many segments that others wait for,
///   with so many exchanges in all
/// - `begin(segments, x, before, o, known, kept, by, here)` returns it; known: a `states_before`, which says whether
///   `before` is given
/// - `totals(begun, maps, ends, by, here)`: as a fold, of what has begun by steps
/// - `states(begun, before, after, by, here)`, which may make some outputs beside states, and then
///   `outputs(begun, by, here)`; what all were given is there until then
///
/// And one whose backward has three parts: what can be done before the gradients of states after segments have come;
/// the gradients of states before, which go on their way; and the other gradients, meanwhile:
///
/// - `backward_parts`: a type for what has begun; `has_backward_parts(x, dout, dx, segments)`: whether a backward of so
///   many segments is to have them; ranks may answer differently
/// - `begin_backward(segments, x, before, dout, dx, known, folded, kept, by, here)` returns it; known: a
///   `states_before`, of dafter, which comes next if it is `given`. If it comes `by_steps`, this enqueues, too, what
///   `backward_fold` would write to `folded`, which is not there any more when this has returned; else that is empty
/// - `dstates(begun, dafter, dbefore, by, here)`, once, enqueues dbefore, unless that is empty, and perhaps some of dx
/// - `gradients(begun, by, here)`, once, at once or later, enqueues the rest of dx and leaves dbefore alone
///
/// What these were given is there until then, but for `folded`; exchanges, and other segments' folds and backwards,
/// come between.
template <class R, class X, class O>
concept recurrence_model =
    requires(R const r, recurrence_segments const s, X const x, O const o, std::span<float const> in,
             std::span<float> out, std::span<char> kept, state_exchange& by, caller here) {
        { r.name } -> std::convertible_to<char const*>;
        { r.states() } -> std::same_as<state_shape>;
        { r.inputs() } -> std::same_as<std::array<recurrence_input, std::tuple_size_v<X>>>;
        r.forward(s, x, in, o, out, kept, by, here);
        r.fold(s, x, out, out, by, here);
    };

/// One that has a backward, of gradients `dout` of D and `dx` of G.
template <class R, class X, class O, class D, class G>
concept differentiable_recurrence_model =
    recurrence_model<R, X, O> &&
    requires(R const r, recurrence_segments const s, X const x, D const dout, G const dx, std::span<float const> in,
             std::span<float> out, std::span<char> kept, state_exchange& by, caller here) {
        r.backward(s, x, in, dout, in, dx, out, kept, by, here);
        r.backward_fold(s, x, dout, out, by, here);
    };

} // namespace cuda

namespace detail {

/// Calls `f(state_exchange)`; the communicator keeps one that it has made until the stream has come here.
template <carries_states By, class F>
void with_state_exchange(By& by, caller here, F&& f) {
    if constexpr (std::derived_from<By, cuda::state_exchange>)
        f(by);
    else {
        auto made = std::make_unique<cuda::state_exchange>(by);
        f(*made);
        by.keep(std::move(made), here);
    }
}

/// Runs a recurrence of tensors on devices of which all fits, and its backward.
template <carry_kind How, any_sharding S, class R, class Tensors>
void recur_on_device(carry_plan<How, S> const& plan, R const& r, Tensors const& t, cuda::state_exchange& by,
                     caller here) {
    if constexpr (requires(std::span<float> states) { r.step(t.x, t.o, {}, states, by, here); })
        if (decodes(plan, t)) return step_on_device(plan, r, t, by, here);
    run_recurrence<device_forward<R, Tensors>>(plan, r, t, by, here);
}
template <carry_kind How, any_sharding S, class R, class Tensors, class Gradients>
void recur_backward_on_device(carry_plan<How, S> const& plan, R const& r, Tensors const& t, Gradients const& to,
                              cuda::state_exchange& by, caller here) {
    run_recurrence_backward<device_backward<R, Tensors, Gradients>>(plan, r, t, to, by, here);
}

/// Whether all tensors of a tuple are sharded by S.
template <class S, class X>
inline constexpr bool all_sharded_as = false;
template <class S, class... X>
inline constexpr bool all_sharded_as<S, std::tuple<X...>> = sharded_as<S, X...>;

} // namespace detail

/// Runs a recurrence of one's own, or of the library, of tensors on devices in the communicator's stream, as `recur` of
/// tensors on the host.
///
/// `by`: a `cuda::state_exchange`, made once; or a communicator, which prepares itself for this one call.
template <carry_kind How, any_sharding S, class R, class X, class O, detail::carries_states By>
void recur(carry_plan<How, S> const& plan, R const& r, cuda::recurrence_tensors<X, O> const& t, By& by,
           caller here = caller::here()) {
    constexpr bool fits = detail::all_sharded_as<S, X> && detail::sharded_as<S, O>,
                   models = cuda::recurrence_model<R, X, O>;
    static_assert(fits, "cpx: recur of tensors that are not sharded as the plan; make the plan with "
                        "carry(x.sharding(), ...)");
    static_assert(!fits || models, "cpx: recur of what is no cuda::recurrence_model of these tensors, or has another "
                                   "number of inputs");
    if constexpr (fits && models) {
        detail::check_on_device(plan, r, t, by.memory(), here);
        detail::with_state_exchange(
            by, here, [&](cuda::state_exchange& states) { detail::recur_on_device(plan, r, t, states, here); });
    }
}

/// Computes the gradients of `recur` of tensors on devices, in the communicator's stream.
///
/// Arguments, costs and errors as in the forward, which has filled `t.saved`, and for tensors on the host.
template <carry_kind How, any_sharding S, class R, class X, class O, class D, class G, detail::carries_states By>
void recur_backward(carry_plan<How, S> const& plan, R const& r, cuda::recurrence_tensors<X, O> const& t,
                    cuda::recurrence_gradients<D, G> const& to, By& by, caller here = caller::here()) {
    constexpr bool fits = detail::all_sharded_as<S, X> && detail::sharded_as<S, D> && detail::all_sharded_as<S, G>,
                   models = cuda::recurrence_model<R, X, O>;
    constexpr bool counts = std::tuple_size_v<G> == std::tuple_size_v<X>;
    constexpr bool turns_back = [] {
        if constexpr (fits && models && counts) return cuda::differentiable_recurrence_model<R, X, O, D, G>;
        return true;
    }();
    static_assert(fits, "cpx: recur_backward of tensors or gradients that are not sharded as the plan; make the plan "
                        "with carry(x.sharding(), ...) and the gradients of the same sharding");
    static_assert(!fits || models, "cpx: recur_backward of what is no cuda::recurrence_model of these tensors, or has "
                                   "another number of inputs");
    static_assert(!fits || !models || counts, "cpx: recur_backward of another number of gradients than inputs; "
                                              "recurrence_gradients wants a tuple dx as x");
    static_assert(turns_back, "cpx: recur_backward of a cuda::recurrence_model that has no backward and backward_fold "
                              "of these tensors and gradients");
    if constexpr (fits && models && counts && turns_back) {
        detail::check_backward_on_device(plan, r, t, to, by.memory(), here);
        detail::with_state_exchange(by, here, [&](cuda::state_exchange& states) {
            detail::recur_backward_on_device(plan, r, t, to, states, here);
        });
    }
}

} // namespace cpx
