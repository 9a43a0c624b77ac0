// SPDX-License-Identifier: Apache-2.0
// The gated delta rule of tensors on devices, on any sharding, in the stream of their communicator.
//
// It is carried by a `cuda::state_exchange`, made once, or a communicator, which prepares itself for one call. q, k, v
// and o may be float, bfloat16 or half; gates, states and sums are float, steps of `scan`, too; the chunk is 64. On
// tensor cores states and gradients are operands of the elements' type, too, see `cuda::gated_delta_rule`: of half
// those beyond 65504 make results infinite or NaN, and those below 6e-5 lose bits. Where sequences have a token at most
// and states before and after, but no backward, it is `cuda::gated_delta_rule_step`. On `head_sharded` a rank holds
// whole groups of value heads, or some that read one key head and have no backward. Throws for memory of another device
// or stream, key_dim above 256, value_dim above 65536, a chunk that is not 64, and more than 65535 value heads, or
// segments of a rank that run together. By `scan` the bits of a sequence that ranks share depend on what else a rank
// runs with it. g is given: `rowwise::delta_gates` makes it of parameters, and the terms of their gradients, rows that
// ranks add in a fixed order.
#pragma once

#include <cpx/cuda/head_norm.hpp>
#include <cpx/ops/cuda/device_rule.hpp>
#include <cpx/ops/cuda/layer_move.hpp>
#include <cpx/ops/gated_delta_rule_backward.hpp>

#include <optional>

namespace cpx {

namespace detail {

template <class T>
using device_gated_delta = device_rule<T, cuda::erases::yes, gated_delta>;

/// q and k of a call on a device, divided by their lengths if that is asked for: a copy, which reads and writes them
/// once; a backward makes it again, then reads what was given and the gradients and writes these.
template <class T, any_sharding S>
class device_keys {
    using tensor = sharded<T const, S, cuda::memory>;

public:
    device_keys(tensor const& q, tensor const& k, index_t dim, bool normalise, cuda::state_exchange& m, caller here)
        : q_(q), k_(k), dim_(dim), m_(m), here_(here) {
        if (!normalise) return;
        of_q_ = copy(q);
        of_k_ = copy(k);
    }
    tensor q() const { return of_q_ ? view(*of_q_, q_) : q_; }
    tensor k() const { return of_k_ ? view(*of_k_, k_) : k_; }
    /// Makes gradients of what was normalised those of what was given.
    void back(rows<T> dq, rows<T> dk) const {
        if (!of_q_) return;
        run(q_.data(), dq, true);
        run(k_.data(), dk, true);
    }

private:
    cuda::block<T> copy(tensor const& x) const {
        rows<T const> const from = x.data();
        auto made = m_.memory().template room<T>(from.count() * from.width());
        run(from, {made.data(), from.count(), from.width()}, false);
        return made;
    }
    static tensor view(cuda::block<T> const& b, tensor const& x) {
        return {rows<T const>(b.data(), x.data().count(), x.data().width()), x.sharding(), x.rank(), x.memory()};
    }
    void run(rows<T const> x, rows<T> y, bool back) const {
        cuda::detail::run_normalise_heads(x, dim_, y, back, m_.stream(), here_);
    }

    tensor q_, k_;
    index_t dim_;
    cuda::state_exchange& m_;
    caller here_;
    std::optional<cuda::block<T>> of_q_, of_k_;
};

template <class T, any_sharding S>
auto delta_rule_given(delta_rule_tensors<T, S, cuda::memory> const& t, sharded<T const, S, cuda::memory> const& q,
                      sharded<T const, S, cuda::memory> const& k) {
    return cuda::recurrence_tensors{std::tuple(q, k, t.v.view(), t.g.view(), t.beta.view()), t.o.view(), t.initial,
                                    t.final, t.saved};
}
template <class T, any_sharding S>
auto delta_rule_gradients_given(delta_rule_gradient_tensors<T, S, cuda::memory> const& to) {
    return cuda::recurrence_gradients{
        to.dout.view(), std::tuple(to.dq.view(), to.dk.view(), to.dv.view(), to.dg.view(), to.dbeta.view()), to.dfinal,
        to.dinitial};
}

template <carries_states By>
inline constexpr bool carries_rule<cuda::memory, By> = true;
template <class T>
inline constexpr bool rules_on<cuda::memory, T> = cuda::gpu_number<T>;
template <class R, class T>
inline constexpr bool rule_between<cuda::memory, R, T> =
    cuda::gpu_number<T> && (std::same_as<R, T> || (std::same_as<T, __nv_bfloat16> && std::same_as<R, __half>));

template <carry_kind How, any_sharding S>
void check_rule_in(cuda::memory const& memory, char const* where, gated_delta const& r, carry_plan<How, S> const& plan,
                   bool backward, std::span<operand const> given, caller here) {
    device_gated_delta<float> const there(r);
    there.check(where, here);
    check_rank_on_device(where, plan, there, backward, here);
    require_there(memory, where, given, here);
}

template <carry_kind How, any_sharding S, class T, class By>
void check_delta_rule(carry_plan<How, S> const& plan, gated_delta const& r,
                      delta_rule_tensors<T, S, cuda::memory> const& t, By const& by, caller here) {
    check_on_device(plan, device_gated_delta<T>(r), delta_rule_given<T, S>(t, t.q, t.k), by.memory(), here);
}
template <carry_kind How, any_sharding S, class T, class By>
void check_delta_rule_backward(carry_plan<How, S> const& plan, gated_delta const& r,
                               delta_rule_tensors<T, S, cuda::memory> const& t,
                               delta_rule_gradient_tensors<T, S, cuda::memory> const& to, By const& by, caller here) {
    check_backward_on_device(plan, device_gated_delta<T>(r), delta_rule_given<T, S>(t, t.q, t.k),
                             delta_rule_gradients_given(to), by.memory(), here);
}

template <carry_kind How, any_sharding S, class T, class By>
void run_delta_rule(carry_plan<How, S> const& plan, gated_delta const& r,
                    delta_rule_tensors<T, S, cuda::memory> const& t, By& by, caller here) {
    with_state_exchange(by, here, [&](cuda::state_exchange& states) {
        device_keys<T, S> const keys(t.q, t.k, r.heads.key_dim, r.options.qk_l2norm, states, here);
        recur_on_device(plan, device_gated_delta<T>(r), delta_rule_given<T, S>(t, keys.q(), keys.k()), states, here);
    });
}
template <carry_kind How, any_sharding S, class T, class By>
void run_delta_rule_backward(carry_plan<How, S> const& plan, gated_delta const& r,
                             delta_rule_tensors<T, S, cuda::memory> const& t,
                             delta_rule_gradient_tensors<T, S, cuda::memory> const& to, By& by, caller here) {
    with_state_exchange(by, here, [&](cuda::state_exchange& states) {
        device_keys<T, S> const keys(t.q, t.k, r.heads.key_dim, r.options.qk_l2norm, states, here);
        recur_backward_on_device(plan, device_gated_delta<T>(r), delta_rule_given<T, S>(t, keys.q(), keys.k()),
                                 delta_rule_gradients_given(to), states, here);
        keys.back(to.dq.data(), to.dk.data());
    });
}

} // namespace detail

} // namespace cpx
