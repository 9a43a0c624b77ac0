// SPDX-License-Identifier: Apache-2.0
// The gated delta rule of tensors on devices, on any sharding, in the stream of their communicator.
//
// It is carried by a `cuda::state_exchange`, made once, or a communicator, which prepares itself for one call. q, k, v
// and o may be float, bfloat16 or half; gates, states and sums are float, steps of `scan`, too; the chunk is 64. On
// `head_sharded` a rank holds whole groups of value heads, or some that read one key head and have no backward. Throws
// for memory of another device or stream.
#pragma once

#include <cpx/cuda/delta_rule_fold.hpp>
#include <cpx/cuda/gated_delta_rule.hpp>
#include <cpx/cuda/normalised_heads.hpp>
#include <cpx/ops/cuda/recurrence.hpp>
#include <cpx/ops/gated_delta_rule_backward.hpp>

#include <optional>

namespace cpx {

namespace detail {

/// The gated delta rule as a recurrence on a device, see `device_states`.
template <class T>
struct device_gated_delta : gated_delta, private device_heads {
    using memory = cuda::state_exchange;

    explicit device_gated_delta(gated_delta const& of) : gated_delta(of) {}

    void check(char const* where, caller here) const {
        gated_delta::check(where, here);
        check_sizes(where, heads, options.chunk, here);
    }
    template <any_sharding S>
    void check_heads(char const* where, S const& sharding, bool backward, caller here) const {
        check_whole(where, heads, sharding, backward, here);
    }

    template <class X, class O>
    index_t kept_bytes(X const& x, O const& o, index_t segments, index_t tokens) const {
        auto const in = input<T>({}, x, {});
        bool const tensor_cores = cuda::detail::row_vector(in.q, in.k, in.v, o.data()) == 16;
        return tensor_cores ? cuda::gated_delta_rule_saved<T>(shape_of(in), tokens, segments) : 0;
    }
    template <class X, class O>
    void forward(device_segments const& s, X const& x, std::span<float const> before, O const& o,
                 std::span<float> after, std::span<char> kept, memory& m, caller here) const {
        auto in = input<T>(s, x, before);
        in.saved = kept, in.saved_tokens = s.tokens;
        auto const shape = shape_of(in);
        bool const saves = !kept.empty();
        auto const space = workspace(cuda::gated_delta_rule_workspace<T>(shape, in.k.count(), count(s), saves), m);
        cuda::gated_delta_rule<T>(shape, in, o.data(), after, all(space), m.stream(), here);
    }
    template <class X>
    void fold(device_segments const& s, X const& x, std::span<float> maps, std::span<float> ends, memory& m,
              caller here) const {
        auto const in = input<T>(s, x, {});
        auto const shape = shape_of(in);
        auto const space = workspace(cuda::gated_delta_rule_fold_workspace<T>(shape, in.k.count(), count(s)), m);
        cuda::gated_delta_rule_fold<T>(shape, in, maps, ends, all(space), m.stream(), here);
    }
    template <class X, class D, class G>
    void backward(device_segments const& s, X const& x, std::span<float const> before, D const& dout,
                  std::span<float const> dafter, G const& dx, std::span<float> dbefore, std::span<char> kept, memory& m,
                  caller here) const {
        auto in = input<T>(s, x, before);
        auto const& [dq, dk, dv, dg, dbeta] = dx;
        auto shape = shape_of(in);
        if (cuda::detail::row_vector(in.q, in.k, in.v, dout.data(), dq.data(), dk.data(), dv.data()) != 16)
            shape.path = cuda::delta_rule_path::plain;
        else
            in.saved = kept, in.saved_tokens = s.tokens;
        bool const saved = !in.saved.empty();
        auto const space =
            workspace(cuda::gated_delta_rule_backward_workspace<T>(shape, in.k.count(), count(s), saved), m);
        cuda::gated_delta_rule_backward<T>(shape, in, dout.data(), dafter,
                                           {dq.data(), dk.data(), dv.data(), dg.data(), dbeta.data(), dbefore},
                                           all(space), m.stream(), here);
    }
    template <class X, class D>
    void backward_fold(device_segments const& s, X const& x, D const& dout, std::span<float> dbefore, memory& m,
                       caller here) const {
        auto const in = input<T>(s, x, {});
        auto const shape = shape_of(in);
        auto const space = workspace(cuda::gated_delta_rule_fold_workspace<T>(shape, in.k.count(), count(s)), m);
        cuda::gated_delta_rule_backward_fold<T>(shape, in, dout.data(), dbefore, all(space), m.stream(), here);
    }

private:
    auto shape_of(cuda::gated_delta_rule_input<T> const& in) const {
        return device_heads::shape_of(heads, options.scale, in);
    }
};

/// q and k of a call on a device, divided by their lengths if that is asked for.
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
        cuda::normalise_heads(x, dim_, y, back, m_.stream(), here_);
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
    return device_tensors{std::tuple(q, k, t.v.view(), t.g.view(), t.beta.view()), t.o.view(), t.initial, t.final,
                          t.saved};
}
template <class T, any_sharding S>
auto delta_rule_gradients_given(delta_rule_gradient_tensors<T, S, cuda::memory> const& to) {
    return device_gradients{to.dout.view(),
                            std::tuple(to.dq.view(), to.dk.view(), to.dv.view(), to.dg.view(), to.dbeta.view()),
                            to.dfinal, to.dinitial};
}

template <carries_states By>
inline constexpr bool carries_rule<cuda::memory, By> = true;
template <class T>
inline constexpr bool rules_on<cuda::memory, T> = cuda::gpu_number<T>;

template <any_sharding S>
void check_rule_in(cuda::memory const&, char const* where, gated_delta const& r, S const& sharding, bool backward,
                   std::span<operand const> given, caller here) {
    device_gated_delta<float> const there(r);
    there.check(where, here);
    there.check_heads(where, sharding, backward, here);
    for (operand const& o : given)
        if (!o.empty()) cuda::detail::require_memory(where, o.name, reinterpret_cast<void const*>(o.first), here);
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
