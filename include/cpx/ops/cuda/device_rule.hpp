// SPDX-License-Identifier: Apache-2.0
// The gated delta rule and a decay a head as recurrences on devices.
#pragma once

#include <cpx/cuda/delta_rule_fold.hpp>
#include <cpx/cuda/delta_rule_step.hpp>
#include <cpx/cuda/gated_delta_rule.hpp>
#include <cpx/cuda/nvtx.hpp>
#include <cpx/ops/cuda/recurrence.hpp>

namespace cpx::detail {

/// The member `Of` of the family, as the host's R says: a `cuda::recurrence_model`.
template <class T, cuda::erases Of, class R>
class device_rule {
    using memory = cuda::state_exchange;
    static constexpr bool Erases = Of == cuda::erases::yes;

public:
    char const* name;

    explicit device_rule(R const& of) : name(of.name), of_(of) {}
    auto states() const { return of_.states(); }
    auto inputs() const { return of_.inputs(); }
    auto settings() const { return of_.settings(); }

    void check(char const* where, caller here) const {
        recurrence_heads const& heads = of_.heads;
        of_.check(where, here);
        require(of_.options.chunk == 64, where, "chunk", "64, of tensors on devices", of_.options.chunk, here);
        require(heads.key_dim <= 256, where, "key_dim", "from 1 to 256, of tensors on devices", heads.key_dim, here);
        require(heads.value_dim <= 65536, where, "value_dim", "from 1 to 65536, of tensors on devices", heads.value_dim,
                here);
        require(heads.value_heads <= 65535, where, "value heads", "at most 65535, of tensors on devices",
                heads.value_heads, here);
    }
    template <carry_kind How, any_sharding S>
    void check_rank(char const* where, carry_plan<How, S> const& plan, bool backward, caller here) const {
        cuda::detail::require_delta_tokens(where, rows_of_segments(plan), here);
        for (auto const& together : run_together(plan, backward ? side::after : side::before))
            require(together.size() <= cuda::detail::delta_most_sequences, where, "segments that run together",
                    cuda::detail::in_words("at most ", cuda::detail::delta_most_sequences), together.size(), here);
    }

    template <class X, class O>
    index_t kept_bytes(X const& x, O const& o, index_t segments, index_t tokens) const {
        auto const in = input({}, x, {});
        bool const keeps = Erases && cuda::detail::in_panels(in.q, in.k, in.v, o.data());
        return keeps ? cuda::detail::delta_saved_space<T>(shape_of(in), tokens, segments).bytes : 0;
    }
    // It is given what `check_on_device` has seen, and states and lists that `device_states` has made.
    template <class X, class O>
    void forward(cuda::recurrence_segments const& s, X const& x, std::span<float const> before, O const& o,
                 std::span<float> after, std::span<char> kept, memory& m, caller here) const {
        auto in = input(s, x, before);
        in.saved = kept, in.saved_tokens = s.tokens;
        auto shape = shape_of(in);
        shape.scan = s.by_scan && cuda::detail::delta_by_stretches(count(s), shape.value_heads);
        cuda::detail::require_saved(name, shape, in, here); // it may be lent
        run(cuda::detail::delta_forward_space<Erases, T>(shape, room_of(s), count(s), !kept.empty()), shape, in, m,
            here, [&](auto const& call) { return cuda::detail::run_delta(call, o.data(), after); });
    }

    /// A forward on tensor cores whose states come first.
    struct parts {
        cuda::gated_delta_rule_shape shape = {};
        cuda::gated_delta_rule_input<T> in = {};
        cuda::detail::delta_space space = {};
        cuda::block<char> workspace = {};
        rows<T> o = {};
        cuda::states_before known = {};
        bool is_done = false; ///< whether outputs have been computed beside states, for which nobody waited
    };
    template <class X, class O>
    bool has_parts(X const& x, O const& o) const {
        auto const in = input({}, x, {});
        return cuda::detail::has_delta_hopper<Erases, T>(shape_of(in), in.k.count()) &&
               cuda::detail::in_panels(in.q, in.k, in.v, o.data());
    }
    /// All outputs beside states take less time than some after them. So by serial states come first only where more
    /// wait for them than one exchange brings them to. By scan they always do, made of the steps of stretches: others
    /// wait less for them than for a walk's, though it takes a tenth more time in all.
    template <class X>
    bool states_first(X const&, index_t /*segments*/, index_t exchanges, bool by_scan) const {
        return by_scan || exchanges > 1;
    }
    template <class X, class O>
    parts begin(cuda::recurrence_segments const& s, X const& x, std::span<float const> before, O const& o,
                cuda::states_before known, std::span<char> kept, memory& m, caller here) const {
        parts p{.in = input(s, x, before), .o = o.data(), .known = known};
        p.in.saved = kept, p.in.saved_tokens = s.tokens;
        p.shape = shape_of(p.in);
        p.shape.scan = s.by_scan;
        if (s.by_scan) p.shape.stretch = cuda::detail::delta_stretch_of_steps(s.tokens, count(s), p.shape.value_heads);
        cuda::detail::require_saved(name, p.shape, p.in, here);
        p.space =
            cuda::detail::delta_forward_space<Erases, T>(p.shape, room_of(s), count(s), !kept.empty(), order_of(p));
        p.workspace = m.memory().template room<char>(p.space.bytes);
        with_call(p, m, here, [&](auto const& call) {
            cuda::detail::launch_delta_hopper_begin(call, order_of(p), given(p), s.to_ends);
        });
        ++m.calls.on_tensor_cores;
        return p;
    }
    void totals(parts& p, std::span<float> maps, std::span<float> ends, memory& m, caller here) const {
        with_call(p, m, here, [&](auto const& call) { cuda::detail::launch_delta_hopper_totals(call, maps, ends); });
    }
    void states(parts& p, std::span<float const> before, std::span<float> after, memory& m, caller here) const {
        p.in.state = before;
        p.is_done = order_of(p) == cuda::detail::delta_order::together;
        with_call(p, m, here, [&](auto const& call) {
            if (p.is_done)
                cuda::detail::launch_delta_hopper_together(call, p.o, after);
            else
                cuda::detail::launch_delta_hopper_states(call, order_of(p), after, p.o);
        });
    }
    void outputs(parts& p, memory& m, caller here) const {
        if (p.is_done) return;
        with_call(p, m, here,
                  [&](auto const& call) { cuda::detail::launch_delta_hopper_outputs(call, order_of(p), p.o); });
    }

    template <class X, class O>
    void step(X const& x, O const& o, std::span<index_t const> slots, std::span<float> states, memory& m,
              caller here) const {
        auto const in = input({}, x, {});
        cuda::detail::run_delta_step<Erases, T>(shape_of(in), {in.q, in.k, in.v, in.g, in.beta, slots}, o.data(),
                                                states, m.stream(), here);
        ++m.calls.steps;
    }
    template <class X>
    void fold(cuda::recurrence_segments const& s, X const& x, std::span<float> maps, std::span<float> ends, memory& m,
              caller here) const {
        auto const in = input(s, x, {});
        auto const shape = shape_of(in);
        run(cuda::detail::delta_fold_space<Erases, T>(shape, room_of(s), count(s)), shape, in, m, here,
            [&](auto const& call) { return cuda::detail::run_delta_fold(call, maps, ends); });
    }
    template <class X, class D, class G>
    void backward(cuda::recurrence_segments const& s, X const& x, std::span<float const> before, D const& dout,
                  std::span<float const> dafter, G const& dx, std::span<float> dbefore, std::span<char> kept, memory& m,
                  caller here) const {
        auto const p = backward_of(s, x, before, dout, dx, dbefore, kept, here);
        run(p.space, p.shape, p.in, m, here,
            [&](auto const& call) { return cuda::detail::run_delta_backward(call, p.dout, dafter, p.to); });
    }

    /// A backward on tensor cores in parts: walks along, and back, whose gradients of states come first.
    struct backward_parts {
        cuda::gated_delta_rule_shape shape = {};
        cuda::gated_delta_rule_input<T> in = {};
        rows<T const> dout = {};
        cuda::gated_delta_rule_gradients<T> to;
        cuda::detail::delta_space space = {};
        cuda::block<char> workspace = {};
        cuda::detail::delta_begun begun = {};
    };
    /// Where walks leave multiprocessors, the other gradients are made beside them. Walks are along and back, of two
    /// halves; where nothing is erased a multiprocessor has two of them.
    template <class X, class D, class G>
    bool has_backward_parts(X const& x, D const& dout, G const& dx, index_t segments) const {
        index_t const chains = segments * shape_of(input({}, x, {})).value_heads;
        return on_tensor_cores(x, dout, dx) && cuda::detail::fills_multiprocessors((Erases ? 4 : 2) * chains);
    }
    template <class X, class D, class G>
    backward_parts begin_backward(cuda::recurrence_segments const& s, X const& x, std::span<float const> before,
                                  D const& dout, G const& dx, cuda::states_before known, std::span<float> folded,
                                  std::span<char> kept, memory& m, caller here) const {
        using cuda::states_before;
        bool const alone = !Erases && known == states_before::by_steps; // no kernel folds and walks along
        if (alone) backward_fold(s, x, dout, folded, m, here);
        auto p = backward_of(s, x, before, dout, dx, {}, kept, here);
        p.workspace = m.memory().template room<char>(p.space.bytes);
        p.begun.along = known != states_before::given && !alone;
        if (known == states_before::carried)
            p.begun.share = cuda::detail::delta_share_beside_back<Erases>(p.shape, count(s), s.tokens);
        if (p.begun.along)
            with_call(p, m, here, [&](auto const& call) {
                cuda::detail::launch_delta_hopper_backward_begin(call, p.dout, p.to, folded);
            });
        ++m.calls.on_tensor_cores, ++m.calls.in_parts;
        return p;
    }
    void dstates(backward_parts& p, std::span<float const> dafter, std::span<float> dbefore, memory& m,
                 caller here) const {
        p.to.dstate = dbefore;
        with_call(p, m, here, [&](auto const& call) {
            cuda::detail::launch_delta_hopper_walks(call, p.dout, dafter, p.to, p.begun);
        });
    }
    void gradients(backward_parts& p, memory& m, caller here) const {
        with_call(p, m, here,
                  [&](auto const& call) { cuda::detail::launch_delta_hopper_gradients(call, p.dout, p.to, p.begun); });
    }
    template <class X, class D>
    void backward_fold(cuda::recurrence_segments const& s, X const& x, D const& dout, std::span<float> dbefore,
                       memory& m, caller here) const {
        auto const in = input(s, x, {});
        auto const shape = shape_of(in);
        run(cuda::detail::delta_fold_space<Erases, T>(shape, room_of(s), count(s), true), shape, in, m, here,
            [&](auto const& call) { return cuda::detail::run_delta_fold_back(call, dout.data(), dbefore); });
    }

private:
    static index_t count(cuda::recurrence_segments const& s) { return std::ssize(s.first); }
    /// Returns for how many tokens a call has room: those of its segments, of which there is one at least. The path
    /// does not depend on how many.
    static index_t room_of(cuda::recurrence_segments const& s) { return std::max(s.tokens, index_t{1}); }
    /// Returns what kernels read: q, k, v, g and, if there is a fifth of x, beta.
    template <class X>
    static cuda::gated_delta_rule_input<T> input(cuda::recurrence_segments const& s, X const& x,
                                                 std::span<float const> before) {
        cuda::gated_delta_rule_input<T> in{std::get<0>(x).data(),
                                           std::get<1>(x).data(),
                                           std::get<2>(x).data(),
                                           std::get<3>(x).data(),
                                           {},
                                           s.offsets,
                                           before,
                                           s.first,
                                           s.counts};
        if constexpr (std::tuple_size_v<X> > 4) in.beta = std::get<4>(x).data();
        return in;
    }
    /// Returns the sizes of the heads that the rank holds.
    cuda::gated_delta_rule_shape shape_of(cuda::gated_delta_rule_input<T> const& in) const {
        recurrence_heads const& heads = of_.heads;
        return {in.k.width() / heads.key_dim, in.v.width() / heads.value_dim, heads.key_dim, heads.value_dim,
                of_.options.scale};
    }
    static bool given(parts const& p) { return p.known == cuda::states_before::given; }
    static cuda::detail::delta_order order_of(parts const& p) {
        using order = cuda::detail::delta_order;
        if (given(p) || p.known == cuda::states_before::carried) return order::states_first;
        return p.shape.scan ? order::steps_first : order::together;
    }
    template <class X, class D, class G>
    bool on_tensor_cores(X const& x, D const& dout, G const& dx) const {
        return has_parts(x, dout) &&
               cuda::detail::in_panels(std::get<0>(dx).data(), std::get<1>(dx).data(), std::get<2>(dx).data());
    }
    /// Returns what a backward is given, of kernels on tensor cores with room for the segments' own tokens alone.
    template <class X, class D, class G>
    backward_parts backward_of(cuda::recurrence_segments const& s, X const& x, std::span<float const> before,
                               D const& dout, G const& dx, std::span<float> dbefore, std::span<char> kept,
                               caller here) const {
        auto const in = input(s, x, before);
        backward_parts p{shape_of(in),
                         in,
                         dout.data(),
                         {std::get<0>(dx).data(),
                          std::get<1>(dx).data(),
                          std::get<2>(dx).data(),
                          std::get<3>(dx).data(),
                          {},
                          dbefore}};
        if constexpr (Erases) p.to.dbeta = std::get<4>(dx).data();
        index_t tokens = in.k.count();
        if (on_tensor_cores(x, dout, dx))
            p.in.saved = kept, p.in.saved_tokens = tokens = s.tokens;
        else
            p.shape.path = cuda::delta_rule_path::plain;
        cuda::detail::require_saved(name, p.shape, p.in, here); // it may be lent
        p.space = cuda::detail::delta_backward_space<Erases, T>(p.shape, tokens, count(s), !p.in.saved.empty());
        return p;
    }
    template <class P, class F>
    void with_call(P& p, memory& m, caller here, F&& f) const {
        auto const range = std::same_as<P, backward_parts>
                               ? (Erases ? cuda::named_range<"cpx gated_delta_rule_backward">()
                                         : cuda::named_range<"cpx head_decay_attention_backward">())
                               : (Erases ? cuda::named_range<"cpx gated_delta_rule">()
                                         : cuda::named_range<"cpx head_decay_attention">());
        if constexpr (cuda::tensor_core_number<T>)
            f(cuda::detail::delta_call<Erases, T>{p.shape, p.in, p.space, p.workspace.data(), m.stream(), here});
    }
    /// Calls `f(call)` with a call of arguments that `check_on_device` has seen, or its caller has made.
    template <class F>
    void run(cuda::detail::delta_space const& space, cuda::gated_delta_rule_shape const& shape,
             cuda::gated_delta_rule_input<T> const& in, memory& m, caller here, F&& f) const {
        auto room = m.memory().template room<char>(space.bytes);
        std::span<char> const workspace(room.data(), static_cast<std::size_t>(room.size()));
        auto const path = f(cuda::detail::delta_call<Erases, T>{shape, in, space, workspace.data(), m.stream(), here});
        ++(path == cuda::delta_rule_path::plain ? m.calls.plain : m.calls.on_tensor_cores);
    }

    R of_;
};

} // namespace cpx::detail
