// SPDX-License-Identifier: Apache-2.0
// Linear attention with a decay a head of tensors on devices, on any sharding, by `recur` as on the host.
#pragma once

#include <cpx/cuda/head_decay_attention.hpp>
#include <cpx/ops/cuda/recurrence.hpp>
#include <cpx/ops/local/linear_attention.hpp>

namespace cpx {

/// The tensors of a `head_decay_attention` on one rank's device, as in `recurrence_tensors`; g and states are float.
///
/// q, k: (rows, key heads * key_dim), v, o: (rows, value heads * value_dim), g: (rows, value heads), never positive.
/// States: (sequences, value heads * key_dim * value_dim).
template <class T, any_sharding S>
struct head_decay_tensors {
    sharded_field<T const, S, cuda::memory> q, k, v;
    sharded_field<float const, S, cuda::memory> g;
    sharded_field<T, S, cuda::memory> o;
    field<rows<float const>> initial = {};
    field<rows<float>> final = {};
    field<recurrence_saved<T, cuda::memory>*> saved = nullptr;
    detail::no_more end = {};
};

/// What goes into and comes out of its backward, as in `recurrence_gradients`.
template <class T, any_sharding S>
struct head_decay_gradient_tensors {
    sharded_field<T const, S, cuda::memory> dout;
    sharded_field<T, S, cuda::memory> dq, dk, dv;
    sharded_field<float, S, cuda::memory> dg;
    field<rows<float const>> dfinal = {};
    field<rows<float>> dinitial = {};
    detail::no_more end = {};
};

namespace detail {

/// A decay a head as a recurrence on a device, see `device_states`.
template <class T>
class device_head_decay : device_heads {
    using memory = cuda::state_exchange;

public:
    static constexpr char const* name = head_decay_attention::name;

    explicit device_head_decay(head_decay_attention const& of) : of_(of) {}
    auto states() const { return of_.states(); }
    auto inputs() const { return of_.inputs(); }
    auto settings() const { return of_.settings(); }
    void check(char const* where, caller here) const { check_sizes(where, of_.heads, of_.options.chunk, here); }
    template <any_sharding S>
    void check_heads(char const* where, S const& sharding, bool backward, caller here) const {
        check_whole(where, of_.heads, sharding, backward, here);
    }

    template <class X, class O>
    static index_t kept_bytes(X const&, O const&, index_t, index_t) {
        return 0;
    }
    template <class X, class O>
    void forward(device_segments const& s, X const& x, std::span<float const> before, O const& o,
                 std::span<float> after, std::span<char>, memory& m, caller here) const {
        auto const in = input<T>(s, x, before);
        auto const shape = shape_of(in);
        auto const space = workspace(cuda::head_decay_attention_workspace<T>(shape, in.k.count(), count(s)), m);
        cuda::head_decay_attention<T>(shape, in, o.data(), after, all(space), m.stream(), here);
    }
    template <class X>
    void fold(device_segments const& s, X const& x, std::span<float> maps, std::span<float> ends, memory& m,
              caller here) const {
        auto const in = input<T>(s, x, {});
        auto const shape = shape_of(in);
        auto const space = workspace(cuda::head_decay_attention_fold_workspace<T>(shape, in.k.count(), count(s)), m);
        cuda::head_decay_attention_fold<T>(shape, in, maps, ends, all(space), m.stream(), here);
    }
    template <class X, class D, class G>
    void backward(device_segments const& s, X const& x, std::span<float const> before, D const& dout,
                  std::span<float const> dafter, G const& dx, std::span<float> dbefore, std::span<char>, memory& m,
                  caller here) const {
        auto const in = input<T>(s, x, before);
        auto const& [dq, dk, dv, dg] = dx;
        auto shape = shape_of(in);
        if (cuda::detail::row_vector(in.q, in.k, in.v, dout.data(), dq.data(), dk.data(), dv.data()) != 16)
            shape.path = cuda::delta_rule_path::plain;
        auto const space =
            workspace(cuda::head_decay_attention_backward_workspace<T>(shape, in.k.count(), count(s)), m);
        cuda::head_decay_attention_backward<T>(shape, in, dout.data(), dafter,
                                               {dq.data(), dk.data(), dv.data(), dg.data(), {}, dbefore}, all(space),
                                               m.stream(), here);
    }
    template <class X, class D>
    void backward_fold(device_segments const& s, X const& x, D const& dout, std::span<float> dbefore, memory& m,
                       caller here) const {
        auto const in = input<T>(s, x, {});
        auto const shape = shape_of(in);
        auto const space = workspace(cuda::head_decay_attention_fold_workspace<T>(shape, in.k.count(), count(s)), m);
        cuda::head_decay_attention_backward_fold<T>(shape, in, dout.data(), dbefore, all(space), m.stream(), here);
    }

private:
    auto shape_of(cuda::gated_delta_rule_input<T> const& in) const {
        return device_heads::shape_of(of_.heads, of_.options.scale, in);
    }

    head_decay_attention const& of_;
};

template <class T, any_sharding S>
auto head_decay_given(head_decay_tensors<T, S> const& t) {
    return device_tensors{std::tuple(t.q.view(), t.k.view(), t.v.view(), t.g.view()), t.o.view(), t.initial, t.final,
                          t.saved};
}

} // namespace detail

/// Runs a decay a head of tensors on devices in the communicator's stream, as `recur` of tensors on the host.
///
/// `by`: a `cuda::state_exchange`, made once; or a communicator, which prepares itself for this one call. Elements,
/// heads and errors as of `gated_delta_rule` of tensors on devices.
template <carry_kind How, any_sharding S, class T, any_sharding X, detail::carries_states By>
void recur(carry_plan<How, S> const& plan, head_decay_attention const& r, head_decay_tensors<T, X> const& t, By& by,
           caller here = caller::here()) {
    constexpr bool fits = std::same_as<X, S>, element = cuda::gpu_number<T>;
    static_assert(fits, "cpx: recur of tensors that are not sharded as the plan; make the plan with "
                        "carry(q.sharding(), ...)");
    static_assert(!fits || element, "cpx: recur of elements that a decay a head does not have on devices; use float, "
                                    "__nv_bfloat16 or __half");
    if constexpr (fits && element) {
        detail::device_head_decay<T> const there(r);
        auto const given = detail::head_decay_given(t);
        detail::check_on_device(plan, there, given, by.memory(), here);
        detail::with_state_exchange(
            by, here, [&](cuda::state_exchange& states) { detail::recur_on_device(plan, there, given, states, here); });
    }
}

/// Computes the gradients of `recur` of a decay a head, in the communicator's stream.
///
/// Arguments, costs and errors as in the forward, which has filled `t.saved`, and for tensors on the host.
template <carry_kind How, any_sharding S, class T, any_sharding X, class D, any_sharding G, detail::carries_states By>
void recur_backward(carry_plan<How, S> const& plan, head_decay_attention const& r, head_decay_tensors<T, X> const& t,
                    head_decay_gradient_tensors<D, G> const& to, By& by, caller here = caller::here()) {
    constexpr bool fits = std::same_as<X, S> && std::same_as<G, S>, same = std::same_as<D, T>;
    constexpr bool element = cuda::gpu_number<T>;
    static_assert(fits, "cpx: recur_backward of tensors or gradients that are not sharded as the plan; make the plan "
                        "with carry(q.sharding(), ...) and the gradients of the same sharding");
    static_assert(!fits || same, "cpx: recur_backward wants gradients of the tensors' elements");
    static_assert(!fits || !same || element,
                  "cpx: recur_backward of elements that a decay a head does not have on devices; use float, "
                  "__nv_bfloat16 or __half");
    if constexpr (fits && same && element) {
        detail::device_head_decay<T> const there(r);
        auto const given = detail::head_decay_given(t);
        detail::device_gradients const gradients{
            to.dout.view(), std::tuple(to.dq.view(), to.dk.view(), to.dv.view(), to.dg.view()), to.dfinal, to.dinitial};
        detail::check_backward_on_device(plan, there, given, gradients, by.memory(), here);
        detail::with_state_exchange(by, here, [&](cuda::state_exchange& states) {
            detail::recur_backward_on_device(plan, there, given, gradients, states, here);
        });
    }
}

} // namespace cpx
