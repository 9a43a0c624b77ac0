// SPDX-License-Identifier: Apache-2.0
// The gated delta net layer of Qwen3-Next and Qwen3.5 on any sharding.
#pragma once

#include <cpx/layout/head_sharded.hpp>
#include <cpx/ops/gated_delta_mixer.hpp>
#include <cpx/ops/layer_move.hpp>
#include <cpx/ops/local/linear.hpp>
#include <cpx/ops/local/norm.hpp>

#include <array>
#include <concepts>
#include <optional>
#include <utility>

namespace cpx {

/// Calls `f(name, rows, count, width)` for each parameter, const or not, with its name in a checkpoint and its shape.
/// rows: of elements of two types, see `gated_delta_net_parameters`.
template <class Parameters, class F>
void for_each_parameter(Parameters& p, gated_delta_net_config const& c, F&& f) {
    index_t const heads = c.heads.value_heads, v = heads * c.heads.value_dim;
    index_t const qkv = 2 * c.heads.key_heads * c.heads.key_dim + v, one = 1;
    f("in_proj_qkv.weight", p.in_proj_qkv, qkv, c.hidden);
    f("in_proj_z.weight", p.in_proj_z, v, c.hidden);
    f("in_proj_b.weight", p.in_proj_b, heads, c.hidden);
    f("in_proj_a.weight", p.in_proj_a, heads, c.hidden);
    f("conv1d.weight", p.conv, qkv, c.kernel);
    f("A_log", p.A_log, heads, one);
    f("dt_bias", p.dt_bias, heads, one);
    f("norm.weight", p.norm, one, c.heads.value_dim);
    f("out_proj.weight", p.out_proj, c.hidden, v);
}

/// Products of matrices of the host, as a layer wants them: y = x W^T, dx = dy W or, `adds`, dx += dy W, and
/// dweight += dy^T x. Nothing is to be done when an operator has exchanged.
template <class T>
struct host_products {
    void linear(rows<T const> x, rows<T const> weight, rows<T> y) const { detail::project(x, weight, y); }
    void linear_backward_input(rows<T const> dy, rows<T const> weight, rows<T> dx, bool adds) const {
        if (!adds) return detail::project_backward_input<T>(dy, weight, dx);
        row_buffer<T> own(dx.count(), dx.width());
        detail::project_backward_input<T>(dy, weight, own.view());
        for_each_element(host_memory(), dx.count(), dx.width(), rowwise::add<T>{own.view(), dx});
    }
    void linear_backward_weight(rows<T const> dy, rows<T const> x, rows<T> dweight) const {
        detail::project_backward_weight(dy, x, dweight);
    }
    void ended(auto const&...) const {}
    void ended_states(auto const&...) const {}
};

namespace detail {

/// A transport of the host, for all that a layer runs on.
template <class T, class Comm>
struct host_layers : host_products<T> {
    Comm& comm;
    Comm& carrier() const { return comm; }
};

template <class By, class M>
concept runs_layers = requires(By& by) {
    by.carrier();
    requires std::same_as<rank_memory_of<std::remove_reference_t<decltype(by.comm)>>, M>;
};

/// Returns what a layer runs on.
template <class T, class By>
decltype(auto) layers_of(By& by) {
    if constexpr (!transport<By>)
        return (by);
    else
        return host_layers<T, By>{{}, by};
}

} // namespace detail

/// What the backward needs of its forward: the inputs of the gated norm, on the sharding of the layer, and what belongs
/// to the recurrence, on that of the recurrence. R: the elements of the recurrence.
template <class T, any_sharding S, any_sharding Mix, any_memory M = host_memory, class R = T>
struct gated_delta_net_saved : gated_delta_mixed<R, Mix, M> {
    std::optional<tensor<T, S, M>> z;
    std::optional<tensor<R, S, M>> o;
    std::optional<tensor<T, Mix, M>> projected;
};

template <class T, any_sharding S, any_memory M = host_memory>
struct gated_delta_net_gradients; // see gated_delta_net_backward.hpp

/// What a forward keeps beside its output: states to go on from, or what the backward needs, or nothing.
template <class T, any_sharding S, any_sharding Mix, any_memory M = host_memory, class R = T>
struct gated_delta_net_memory {
    gated_delta_net_state<T, M> state = {};
    field<gated_delta_net_saved<T, S, Mix, M, R>*> saved = nullptr;
    detail::no_more end = {};
};

namespace detail {

/// Returns where a forward has kept what its backward needs: the next forward frees that before it is done.
template <class T, any_sharding S, any_sharding Mix, any_memory M, class R>
std::vector<operand> kept_operands(gated_delta_net_saved<T, S, Mix, M, R> const& saved) {
    auto list = saved_operands(saved.states);
    auto const add = [&](auto const& kept) {
        if (kept) list.push_back({"saved tensors", kept->data()});
    };
    add(saved.z), add(saved.o), add(saved.projected), add(saved.mixed), add(saved.gates);
    return list;
}

struct gated_delta_net_backward_pass; // see gated_delta_net_backward.hpp

} // namespace detail

/// A gated delta net layer whose hidden states are sharded by `S` and whose recurrence runs on `Mix`.
///
/// `Mix` is `S` itself (in place: a halo and carried states), or `head_sharded` (one exchange there, one back, no
/// carry). Projections and the gated norm see one token at a time and run on `S`.
///
///     y = out_proj(norm(delta_rule(silu(conv(q k v)), ...)) silu(z)),    g = -exp(A_log) softplus(a + dt_bias)
///
/// `Rule`: the elements of the recurrence, q, k, v and o. void: those of the weights; on devices, between rows of
/// bfloat16, `__half`, whose three bits more leave about 0.7 of the error of y and of gradients; what is beyond 65504
/// makes results infinite or NaN, and gradients want a scale, see `gated_delta_net_gradients`.
///
/// Made once a batch, used by all layers. Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024,
/// arXiv 2412.06464, section 3.4; shapes as in Hugging Face transformers' Qwen3_5GatedDeltaNet.
template <carry_kind How, any_sharding S, any_sharding Mix = S, class Rule = void>
class gated_delta_net {
public:
    using sharding_type = S;
    /// The elements of the recurrence, between rows of T.
    template <class T>
    using rule_of = std::conditional_t<std::is_void_v<Rule>, T, Rule>;
    template <class T, any_memory M = host_memory>
    using saved_of = gated_delta_net_saved<T, S, Mix, M, rule_of<T>>;

    /// In place, on whole rows: by tokens or replicated. `plan` is `carry<How>(sharding, rank)`. Pure.
    /// Throws `cpx::error` on rows by heads and on sizes that do not fit.
    gated_delta_net(carry_plan<How, S> const& plan, gated_delta_net_config const& config, caller here = caller::here())
        requires std::same_as<S, Mix>
        : mixer_(plan, config, here) {
        require(sharding().sections().empty(), "gated_delta_net", "sharding of a layer that runs in place",
                "whole rows; by heads is what the recurrence runs on", "heads", here);
    }

    /// By heads: of `head_sharded` mix, over `config.sections()`, and o, over `config.output_sections()`, the plans are
    /// `carry<How>(mix, rank)`, `relayout(sharding, mix, rank)` and `relayout(o, sharding, rank)`.
    gated_delta_net(carry_plan<How, Mix> const& plan, relayout_plan<S, Mix> const& there,
                    relayout_plan<Mix, S> const& back, gated_delta_net_config const& config,
                    caller here = caller::here())
        requires(!std::same_as<S, Mix>)
        : mixer_(plan, config, here),
          moves_{there, back,
                 relayout(back.to, back.from, plan.rank, here), // not transposed: several ranks may have a head
                 relayout(there.to, there.from, plan.rank, here)} {
        bool const here_and_back =
            there.to == plan.sharding && back.to == there.from && there.rank == plan.rank && back.rank == plan.rank;
        require(here_and_back && std::ranges::equal(there.to.sections(), config.sections()) &&
                    std::ranges::equal(back.from.sections(), config.output_sections()),
                "gated_delta_net", "relayouts",
                "of the plan's rank, to its sharding, by the config's sections, and back", "others", here);
    }

    template <class X = detail::any>
    explicit gated_delta_net(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {})
        : gated_delta_net(unfit<X>()) {}
    template <class X, class A = gated_delta_net_config, class B = gated_delta_net_config>
        requires std::same_as<A, gated_delta_net_config> || std::same_as<B, gated_delta_net_config>
    explicit gated_delta_net(X const&, A const&, B const& = {}, detail::any = {}) : gated_delta_net(unfit<X>()) {}

    gated_delta_net_config const& config() const { return mixer_.config; }
    int rank() const { return mixer_.rank(); }
    /// Calls `f(plan, width)` for the relayouts of a forward, none where the recurrence runs in place.
    template <class F>
    void each_move(F&& f) const {
        if constexpr (!std::same_as<S, Mix>)
            f(moves_.there, moves_.there.source_width), f(moves_.back, moves_.back.target_width);
    }
    /// Returns by what the recurrence carries its states, see `gated_delta_net_cache`.
    carry_plan<How, Mix> const& states() const { return mixer_.states; }
    /// Returns what the convolution brings, and how wide this rank's columns of the recurrence's tensors are.
    halo_plan<Mix> const& halo() const { return mixer_.before; }
    detail::gated_delta_widths<Mix> const& widths() const { return mixer_.widths; }
    S const& sharding() const {
        if constexpr (std::same_as<S, Mix>)
            return mixer_.sharding();
        else
            return moves_.there.from;
    }

    /// Computes the layer: x, y (rows, hidden) of the layer's sharding, y may be x. Collective.
    ///
    /// `by`: a transport of the host; or, of tensors in any memory, what the layer runs on: `comm`, their communicator,
    /// `carrier()`, by which states are carried, and what `host_products` has; its `ended` are called when an operator
    /// has exchanged, with what a forward's has sent. On devices `carrier()` is the communicator, or a
    /// `cuda::state_exchange`: with one, calls but the first, or without its capacity the first of a batch, only
    /// enqueue work, unless they go on from states or add up in the order of the batch; and relayouts by heads, there
    /// and back, are not `comm`'s but end with `ended(plan, width)`.
    /// `memory`: states to go on from, for decoding, and what the backward needs, see `gated_delta_net_backward`.
    /// Throws `cpx::error` on shapes or shardings that do not fit and on memory that overlaps in another way, and what
    /// `exchange` and the operators throw.
    template <class T, sharded_anywhere X, sharded_like<memory_of<X>> Y, class By>
        requires detail::runs_layers<By, memory_of<X>> || (transport<By> && sharded_like<X>)
    void
    operator()(gated_delta_net_weights<T> const& w, X const& x, Y&& y, By& by,
               std::type_identity_t<gated_delta_net_memory<T, S, Mix, memory_of<X>, rule_of<T>>> const& memory = {},
               caller here = caller::here()) const {
        constexpr bool fits = detail::sharded_as<S, X, Y>;
        constexpr bool between = detail::rule_between<memory_of<X>, rule_of<T>, T>;
        constexpr bool writes = detail::writes<Y, X> && std::same_as<element_of<Y>, T>;
        static_assert(fits,
                      "cpx: gated_delta_net on tensors that are not sharded as the layer; relayout them first, or "
                      "make the layer with x.sharding()");
        static_assert(!fits || writes,
                      "cpx: gated_delta_net wants x and y of the weights' elements, and a y that is not const "
                      "and has a name");
        static_assert(!fits || !writes || between,
                      "cpx: gated_delta_net whose rule has other elements than its weights; that is for tensors on "
                      "devices, __half between __nv_bfloat16: include <cpx/ops/cuda/gated_delta_rule.hpp>");
        if constexpr (fits && writes && between)
            forward<T, memory_of<X>>(w, x.view(), y.view(), detail::layers_of<T>(by), memory, here);
    }
    template <class X>
    detail::refused operator()(X const&, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                               detail::any = {}) const {
        static_assert(detail::never<X>,
                      "cpx: a gated_delta_net takes its weights, tensors x and y and a cpx::transport, then perhaps "
                      "its memory; view other memory as sharded(rows, sharding, rank)");
        return {};
    }

private:
    friend struct detail::gated_delta_net_backward_pass;

    template <class X>
    static gated_delta_net const& unfit() {
        static_assert(detail::never<X>,
                      "cpx: gated_delta_net wants carry<How>(sharding, rank) and a config; by heads that of the "
                      "recurrence's sharding, the relayouts there and back, and a config");
        throw;
    }

    struct four_moves {
        relayout_plan<S, Mix> there;
        relayout_plan<Mix, S> back;
        relayout_plan<S, Mix> gradient_there;
        relayout_plan<Mix, S> gradient_back;
    };
    struct nothing {};

    /// Throws unless a tensor of hidden states is where the layer runs, in `memory`.
    template <class T, any_memory M>
    void check_rows(char const* where, char const* name, sharded<T const, S, M> const& x, M const& memory,
                    caller here) const {
        detail::require_place(where, name, x, sharding(), rank(), "the layer's", here);
        detail::require_in_memory(where, name, x, memory, "the communicator's", here);
        detail::require_shape(where, name, x.data(), sharding().rows(rank()), config().hidden, here);
    }

    template <class T, class M, class By>
    void forward(gated_delta_net_weights<T> const& w, sharded<T const, S, M> const& x, sharded<T, S, M> const& y,
                 By&& by, gated_delta_net_memory<T, S, Mix, M, rule_of<T>> const& memory, caller here) const {
        using R = rule_of<T>;
        char const* const where = "gated_delta_net";
        check_rows<T, M>(where, "x", x, rank_memory(by.comm), here);
        check_rows<T, M>(where, "y", y, rank_memory(by.comm), here);
        check(where, w, here);
        check(where, memory.state, here);
        index_t const heads = config().heads.value_heads, v = heads * config().heads.value_dim;
        index_t const qkv = 2 * config().heads.key_heads * config().heads.key_dim + v;
        rows<T const> const in = x.data();
        auto const made = [&](index_t width) {
            return tensor<T, S, M>::unwritten(sharding(), rank(), width, x.memory(), here);
        };
        auto projected = made(qkv + 2 * heads), z = made(v);
        auto o = tensor<R, S, M>::unwritten(sharding(), rank(), v, x.memory(), here);
        detail::operand const conv("conv state", memory.state.conv),
            recurrent("recurrent state", memory.state.recurrent);
        detail::require_apart(where, std::array{detail::operand("y", y.data()), conv, recurrent}, operands(w), here);
        detail::require_apart(where, {conv, recurrent}, {{"x", in}}, here);
        detail::require_apart(where, {{"y", y.data()}}, {{"x", in}}, here, detail::in_place::yes);
        saved_of<T, M>* const saved = memory.saved;
        bool const goes_on = memory.state.conv.data() || memory.state.recurrent.data();
        require(!saved || !goes_on, where, "memory",
                "states to go on from, or tensors to be saved: there is no backward of a batch that goes on", "both",
                here);
        auto given = operands(w);
        given.insert(given.end(), {{"x", in}, {"y", y.data()}, conv, recurrent});
        if (saved) {
            auto const kept = detail::kept_operands(*saved);
            detail::require_apart(where, kept, given, here);
            given.insert(given.end(), kept.begin(), kept.end());
        }
        mixer_.check(where, x.memory(), false, given, here);
        by.linear(in, w.in_proj_qkv, projected.data().columns(0, qkv));
        auto const of_gates = projection_of_gates(w, x.memory(), here);
        by.linear(in, of_gates.view(), projected.data().columns(qkv, 2 * heads));
        by.linear(in, w.in_proj_z, z.data());
        auto const mix = [&](tensor<T, Mix, M>& local, rows<R> of_o) {
            mixer_.template operator()<T, R>(w, std::as_const(local).view(),
                                             sharded<R, Mix, M>(of_o, mixer_.sharding(), rank(), x.memory()),
                                             memory.state, saved, by, here, where);
            if (saved) saved->projected = std::move(local);
        };
        if constexpr (std::same_as<S, Mix>)
            mix(projected, o.data());
        else {
            auto const& there = moves_.there;
            auto const& back = moves_.back;
            auto local = tensor<T, Mix, M>::unwritten(there.to, rank(), there.target_width, x.memory(), here);
            auto mixed = tensor<R, Mix, M>::unwritten(back.from, rank(), back.source_width, x.memory(), here);
            run_move(detail::layer_move<T, S, Mix, M>{there, projected.view(), local.view(), where}, by, here);
            mix(local, mixed.data());
            run_move(detail::layer_move<R, Mix, S, M>{back, mixed.view(), o.view(), where}, by, here);
        }
        auto normed = made(v);
        normalise(x.memory(), norm(w, o, z), normed.data(), here);
        by.linear(rows<T const>(normed.data()), w.out_proj, y.data());
        if (!saved) return;
        saved->z = std::move(z);
        saved->o = std::move(o);
    }
    /// Returns the projections of b and a below each other: columns of the rows that the recurrence reads.
    template <class T, class M>
    row_buffer<T, M> projection_of_gates(gated_delta_net_weights<T> const& w, M const& memory, caller here) const {
        row_buffer<T, M> both(memory, 2 * config().heads.value_heads, config().hidden, here);
        index_t first = 0;
        for (rows<T const> const of : std::array<rows<T const>, 2>{w.in_proj_b, w.in_proj_a}) {
            rows<T> const to = both.view().sub(std::exchange(first, of.count()), of.count());
            for_each_element(memory, to.count(), to.width(), rowwise::copy<T>{of, to}, here);
        }
        return both;
    }
    template <class T, class R, class M>
    head_norm<T, R> norm(gated_delta_net_weights<T> const& w, tensor<R, S, M> const& o,
                         tensor<T, S, M> const& z) const {
        return {o.data(), z.data(), w.norm, static_cast<wide<T>>(config().eps), 0};
    }

    template <class A>
    void check(char const* where, gated_delta_net_parameters<A> const& w, caller here) const {
        for_each_parameter(w, config(), [&](char const* name, auto const& weight, index_t count, index_t width) {
            detail::require_shape(where, name, weight, count, width, here);
        });
    }

    template <class A>
    std::vector<detail::operand> operands(gated_delta_net_parameters<A> const& w) const {
        std::vector<detail::operand> list;
        for_each_parameter(w, config(), [&](char const* name, auto const& weight, index_t, index_t) {
            list.push_back({name, weight});
        });
        return list;
    }

    /// Here, for the operators that read the states would find out one after the other, with an exchange between.
    template <class T, class M>
    void check(char const* where, gated_delta_net_state<T, M> const& state, caller here) const {
        index_t const sequences = mixer_.sharding().batch().sequences();
        auto const& n = mixer_.widths;
        if (state.conv.data()) detail::require_shape(where, "conv state", state.conv, sequences, n.conv, here);
        if (state.recurrent.data())
            detail::require_shape(where, "recurrent state", state.recurrent, sequences, n.recurrent, here);
    }

    detail::gated_delta_mixer<How, Mix> mixer_;
    [[no_unique_address]] std::conditional_t<std::same_as<S, Mix>, nothing, four_moves> moves_;
};
// `A const&` is less special than what the constructors want, and so is no choice where that is in braces.
template <class X = detail::any, class A = detail::any>
gated_delta_net(X const& = {}, A const& = {}, detail::any = {}, detail::any = {}, detail::any = {})
    -> gated_delta_net<scan, sharding<sequential<1>>, replicated<1>>;
template <class X>
gated_delta_net(X const&, gated_delta_net_config const&)
    -> gated_delta_net<scan, sharding<sequential<1>>, replicated<1>>;
template <class X, class A, class O = gated_delta_net_config>
    requires std::same_as<O, gated_delta_net_config>
gated_delta_net(X const&, A const&, O const&, detail::any = {})
    -> gated_delta_net<scan, sharding<sequential<1>>, replicated<1>>;

} // namespace cpx
