// SPDX-License-Identifier: Apache-2.0
// Any recurrence over sequences on any sharding, and its backward.
#pragma once

#include <cpx/ops/carried_states.hpp>
#include <cpx/ops/recurrence_pass.hpp>

#include <bit>
#include <concepts>
#include <string>
#include <tuple>
#include <utility>

namespace cpx {

namespace detail {

/// Throws unless the parameters of a recurrence are some, and its heads and sizes fit each other.
template <class R>
void check_model(char const* where, R const& r, caller here) {
    if constexpr (requires { r.check(where, here); }) r.check(where, here);
    state_shape const all = r.states();
    require(all.map == map_kind::matrix || all.map == map_kind::vector || all.map == map_kind::number, where, "map",
            "a matrix, a vector or a number", "another kind", here);
    for (recurrence_input const& i : r.inputs()) {
        require_groups(where, "heads", all.heads, (std::string("heads of ") + i.name).c_str(), i.heads, here);
        product(where, "heads x width", {i.heads, i.width}, here);
    }
    product(where, "heads x keys x values", {all.heads, all.keys, all.values}, here);
    product(where, "heads x keys x keys", {all.heads, all.keys, all.keys}, here);
}

/// Calls `f(i, tensor)` for the inputs, or their gradients, of a recurrence: an array, or a tuple.
template <class X, class F>
void each_input(X const& x, F&& f) {
    if constexpr (requires { x[0]; })
        for (std::size_t i = 0; i < x.size(); ++i) f(i, x[i]);
    else
        [&]<std::size_t... I>(std::index_sequence<I...>) {
            (f(I, std::get<I>(x)), ...);
        }(std::make_index_sequence<std::tuple_size_v<X>>());
}

/// Returns how many rows the rank has.
inline index_t rows_of_segments(carry_steps const& plan) {
    return plan.segments.empty() ? 0 : plan.segments.back().row + plan.segments.back().count;
}

/// Throws unless inputs, or their gradients, and an output, or its gradient, fit the plan and the recurrence.
template <class R, class X, class O, carry_kind How, any_sharding S>
void check_tensors(char const* where, carry_plan<How, S> const& plan, R const& r, X const& x, O const& o,
                   std::array<std::string, recurrence_inputs<R>> const& names, char const* output, caller here) {
    state_shape const all = r.states();
    auto const inputs = r.inputs();
    each_input(x, [&](std::size_t i, auto const& input) {
        require_place(where, names[i].c_str(), input, plan.sharding, plan.rank, "the plan's", here);
    });
    require_place(where, output, o, plan.sharding, plan.rank, "the plan's", here);
    index_t const rows_held = rows_of_segments(plan);
    auto const held = [&](index_t heads) { return plan.sharding.heads(plan.rank, heads).size(); };
    each_input(x, [&](std::size_t i, auto const& input) {
        require_shape(where, names[i].c_str(), input.data(), rows_held, held(inputs[i].heads) * inputs[i].width, here);
    });
    require_shape(where, output, o.data(), rows_held, held(all.heads) * all.values, here);
}

template <class R>
std::array<std::string, recurrence_inputs<R>> input_names(R const& r, char const* prefix) {
    std::array<std::string, recurrence_inputs<R>> names;
    for (std::size_t i = 0; i < names.size(); ++i) names[i] = std::string(prefix) + r.inputs()[i].name;
    return names;
}

template <class X, std::size_t N>
std::vector<operand> operands(X const& x, std::array<std::string, N> const& names) {
    std::vector<operand> list;
    each_input(x, [&](std::size_t i, auto const& input) { list.push_back({names[i].c_str(), input.data()}); });
    return list;
}

/// Returns what must be alike on all ranks that hand on the states of a recurrence, and in its forward and backward;
/// and in one of these whether there are states, `given`, that sequences begin with on their way.
template <class R>
identity::arguments recurrence_arguments(R const& r, bool given = false) {
    static constexpr std::array maps{identity::word("matrix"), identity::word("vector"), identity::word("number")};
    state_shape const all = r.states();
    recurrence_settings settings;
    if constexpr (requires { r.settings(); }) settings = r.settings();
    auto const number = [](index_t n) { return static_cast<std::uint64_t>(n); };
    return {number(all.heads),
            number(all.keys),
            number(all.values),
            maps[static_cast<std::size_t>(all.map)],
            number(settings.chunk),
            std::bit_cast<std::uint64_t>(settings.scale),
            settings.normalises ? identity::word("taken") : identity::word("none"),
            identity::word(given ? "given" : "none")};
}

/// Says which forward saved states: on which sharding of which batch, of which rank and by which recurrence; and
/// whether with maps, by scan.
template <class R, carry_kind How, any_sharding S>
std::uint64_t saved_by(carry_plan<How, S> const& plan, R const& r, bool maps) {
    std::uint64_t const place =
        mix_all(1, std::array{plan.id.numbers[identity::ranks], plan.id.numbers[identity::cu_seqlens],
                              plan.id.numbers[identity::source_hash], static_cast<std::uint64_t>(plan.rank),
                              std::uint64_t{maps}});
    return mix_all(place, recurrence_arguments(r));
}

/// Throws unless a forward of this plan and recurrence has saved what its backward reads. The backward of a scan wants
/// maps, that of a serial one takes either.
template <class R, carry_kind How, any_sharding S, class Saved>
void check_saved(char const* where, carry_plan<How, S> const& plan, R const& r, Saved const& saved, caller here) {
    state_shape const shape = held_states(plan, r);
    require(saved != nullptr && std::ssize(saved->starts) == std::ssize(plan.segments) * shape.state_width(), where,
            "saved states", "those of the forward", saved ? "others" : "none", here);
    bool const without_maps = saved->of == saved_by(plan, r, false);
    require(saved->of == 0 || without_maps || saved->of == saved_by(plan, r, true), where, "saved states",
            "those of the forward", "those of another batch, sharding or rank, or of another recurrence", here);
    if constexpr (std::same_as<How, scan>)
        require(!without_maps && std::ssize(saved->maps) == inner_segments(plan.links) * shape.map_width(), where,
                "saved maps", "those of the forward, by scan", "others", here);
}

template <class R>
std::string backward_name(R const& r) {
    return std::string(r.name) + "_backward";
}

/// Returns where all is that a forward has saved, which its next one frees or writes.
template <class Saved>
std::vector<operand> saved_operands(Saved const& saved) {
    std::vector<operand> list;
    auto const add = [&](char const* name, auto const& made) {
        list.push_back({name, rows(made.data(), 1, std::ssize(made))});
    };
    add("saved states", saved.starts);
    add("saved maps", saved.maps);
    if constexpr (requires { saved.kept; }) // on devices
        for (auto const& made : saved.kept) add("what is kept", made.memory);
    return list;
}

/// Throws unless a recurrence and its tensors fit the plan.
template <carry_kind How, any_sharding S, class R, class Tensors>
void check_recurrence(carry_plan<How, S> const& plan, R const& r, Tensors const& t, caller here) {
    char const* const where = r.name;
    check_model(where, r, here);
    auto const names = input_names(r, "");
    check_tensors(where, plan, r, t.x, t.o, names, "o", here);
    index_t const sequences = plan.sharding.batch().sequences(), width = held_states(plan, r).state_width();
    if (t.initial.data()) require_shape(where, "initial", t.initial, sequences, width, here);
    if (t.final.data()) require_shape(where, "final", t.final, sequences, width, here);
    operand const o("o", t.o.data()), initial("initial", t.initial), final("final", t.final);
    require_apart(where, std::array{o, final}, operands(t.x, names), here);
    require_apart(where, {o}, {initial}, here);
    require_apart(where, {final}, {initial}, here, in_place::yes);
    if (!t.saved) return; // which is written, or freed and made anew
    auto others = operands(t.x, names);
    others.insert(others.end(), {o, initial, final});
    require_apart(where, saved_operands(*t.saved), others, here);
}

/// Runs a recurrence of which all fits, whose segments `Local` runs, in `memory`.
template <class Local, carry_kind How, any_sharding S, class R, class Tensors, class Memory>
void run_recurrence(carry_plan<How, S> const& plan, R const& r, Tensors const& t, Memory& memory, caller here) {
    using T = typename Tensors::state;
    char const* const where = r.name;
    state_shape const shape = held_states(plan, r);
    memory.prepare(plan, shape, recurrence_arguments(r, t.initial.data() != nullptr), here);
    Local local(where, plan, r, t, memory, here);
    if (t.saved) {
        memory.renew(t.saved->starts, where, {std::ssize(plan.segments), shape.state_width()}, here);
        t.saved->of = saved_by(plan, r, std::same_as<How, scan>);
    }
    recurrence_pass<T, Local, Memory> pass(plan, shape, side::before, t.initial, t.final,
                                           t.saved ? t.saved->starts.data() : nullptr, nullptr, local, memory);
    carry_states<T>(where, plan, side::before, pass, t.saved ? &t.saved->maps : nullptr, memory, here);
    pass.without_tokens();
}

/// As `check_recurrence`, of what the backward is given.
template <carry_kind How, any_sharding S, class R, class Tensors, class Gradients>
void check_recurrence_backward(carry_plan<How, S> const& plan, R const& r, Tensors const& t, Gradients const& to,
                               caller here) {
    std::string const name = backward_name(r);
    char const* const where = name.c_str();
    check_model(where, r, here);
    auto const names = input_names(r, ""), of_gradients = input_names(r, "d");
    check_tensors(where, plan, r, t.x, to.dout, names, "dout", here);
    check_tensors(where, plan, r, to.dx, to.dout, of_gradients, "dout", here);
    check_saved(where, plan, r, t.saved, here);
    index_t const width = held_states(plan, r).state_width(), sequences = plan.sharding.batch().sequences();
    if (to.dfinal.data()) require_shape(where, "dfinal", to.dfinal, sequences, width, here);
    if (to.dinitial.data()) require_shape(where, "dinitial", to.dinitial, sequences, width, here);
    operand const dout("dout", to.dout.data()), dfinal("dfinal", to.dfinal), dinitial("dinitial", to.dinitial);
    auto gradients = operands(to.dx, of_gradients), read = operands(t.x, names);
    auto const saved = saved_operands(*t.saved);
    require_apart(where, gradients, std::array{dfinal}, here);
    gradients.push_back(dinitial);
    read.push_back(dout);
    read.insert(read.end(), saved.begin(), saved.end());
    require_apart(where, gradients, read, here);
    require_apart(where, {dinitial}, {dfinal}, here, in_place::yes);
}

template <class Local, carry_kind How, any_sharding S, class R, class Tensors, class Gradients, class Memory>
void run_recurrence_backward(carry_plan<How, S> const& plan, R const& r, Tensors const& t, Gradients const& to,
                             Memory& memory, caller here) {
    using T = typename Tensors::state;
    std::string const name = backward_name(r);
    char const* const where = name.c_str();
    state_shape const shape = held_states(plan, r);
    Local local(where, plan, r, t, to, memory, here);
    memory.prepare(plan, shape, recurrence_arguments(r, to.dfinal.data() != nullptr), here);
    recurrence_pass<T, Local, Memory> pass(plan, shape, side::after, to.dfinal, to.dinitial, t.saved->starts.data(),
                                           t.saved->maps.data(), local, memory);
    typename Memory::template buffer<T>* const no_maps = nullptr; // nvcc deduces from a nullptr of no type
    carry_states<T>(where, plan, side::after, pass, no_maps, memory, here);
    local.finish(where, here);
    pass.without_tokens();
}

/// Throws unless the plan is this rank's and all ranks have the same, and one recurrence: before anything is written,
/// or, of what ranks have agreed on before, by the first message. Where no state moves ranks do not meet.
template <class T, carry_kind How, any_sharding S, class R, class Comm>
void agree_on_host(char const* where, carry_plan<How, S> const& plan, side from, R const& r, bool given, Comm& comm,
                   caller here) {
    require_own(where, "rank of the plan", plan.rank, plan.sharding.ranks(), comm.rank(), comm.ranks(), here);
    if (S::every_row || plan.steps == 0) return;
    state_shape const shape = held_states(plan, r);
    index_t const state = shape.state_width(), map = shape.map_width();
    auto const compare_first = [&](cpx::plan const& step, index_t row) {
        agree(comm, identity_of<T>(step, row, {where, recurrence_arguments(r, given)}), step, here, where);
    };
    if constexpr (std::same_as<How, serial>)
        compare_first(plan.step(0, from), state);
    else
        compare_first(plan.step(0, from, state, map), plan.row_width(state, map));
}

/// Runs a recurrence of tensors in the host's memory, of which all fits.
template <carry_kind How, any_sharding S, class R, class T, std::size_t N, class Comm>
void recur_on_host(carry_plan<How, S> const& plan, R const& r, recurrence_tensors<T, S, N> const& t, Comm& comm,
                   caller here) {
    agree_on_host<typename recurrence_tensors<T, S, N>::state>(r.name, plan, side::before, r,
                                                               t.initial.data() != nullptr, comm, here);
    states_on_host<Comm> memory{comm};
    run_recurrence<host_forward<R, T, S, Comm>>(plan, r, t, memory, here);
}
template <carry_kind How, any_sharding S, class R, class T, std::size_t N, class Comm>
void recur_backward_on_host(carry_plan<How, S> const& plan, R const& r, recurrence_tensors<T, S, N> const& t,
                            recurrence_gradients<T, S, N> const& to, Comm& comm, caller here) {
    std::string const name = backward_name(r);
    agree_on_host<typename recurrence_tensors<T, S, N>::state>(name.c_str(), plan, side::after, r,
                                                               to.dfinal.data() != nullptr, comm, here);
    states_on_host<Comm> memory{comm};
    run_recurrence_backward<host_backward<R, T, S, Comm>>(plan, r, t, to, memory, here);
}

template <class R, class T, std::size_t N>
constexpr bool runs_on() {
    if constexpr (recurrence<R, T>) return recurrence_inputs<R> == N;
    return false;
}

} // namespace detail

/// Runs a recurrence in place on any sharding.
///
/// `plan` is `carry<serial>(sharding, rank)` or `carry<scan>(sharding, rank)`, see there and `is_exact`.
/// Collective. Communication: `serial`, one state a cut, one after the other; `scan`, to a segment of level l
/// floor(log2 l) + 1 states and one map fewer.
/// Of tensors on devices: include <cpx/ops/cuda/recurrence.hpp>, which says what a model is there.
///
/// Throws `cpx::error` on shapes or shardings that do not fit and on overlapping memory, and what `exchange` throws.
template <carry_kind How, any_sharding S, class R, class T, any_sharding X, std::size_t N, transport Comm>
void recur(carry_plan<How, S> const& plan, R const& r, recurrence_tensors<T, X, N> const& t, Comm& comm,
           caller here = caller::here()) {
    constexpr bool fits = std::same_as<X, S>, models = detail::runs_on<R, T, N>();
    static_assert(fits || detail::never<T>,
                  "cpx: recur of tensors that are not sharded as the plan; make the plan with "
                  "carry(x.sharding(), ...)");
    static_assert(!fits || models || detail::never<T>,
                  "cpx: recur of what is no model of cpx::recurrence, or has another number of inputs; "
                  "ops/local/recurrence.hpp says what a model has");
    if constexpr (fits && models) {
        detail::check_recurrence(plan, r, t, here);
        detail::recur_on_host(plan, r, t, comm, here);
    }
}
template <class Plan = detail::any, class Y = detail::any>
detail::refused recur(Plan const& = {}, detail::any = {}, Y const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<Plan, Y>,
                  "cpx: recur wants a carry_plan, a recurrence, recurrence_tensors and a cpx::transport; make the "
                  "plan with carry<scan>(sharding, rank)");
    return {};
}

/// Computes the gradients of `recur`.
///
/// `plan`, `r` and `t` as in the forward, which has filled `t.saved`; t.o is not read.
/// The gradient of the state goes back along each sequence's segments with the exchanges of the forward, from the last
/// segment: with `serial` as it is, with `scan` by the steps `dS_start = M^T dS_end + E`, the M saved by the forward.
/// Where a rank holds some of the state heads that read a head of an input only, their shares of its gradient meet in
/// one more exchange for all inputs of one size. With `serial` and cuts at multiples of the chunk bitwise the same as
/// on one rank.
/// Collective. Throws as `recur` does.
template <carry_kind How, any_sharding S, class R, class T, any_sharding X, std::size_t N, class D = T,
          any_sharding G = X, std::size_t K = N, transport Comm>
void recur_backward(carry_plan<How, S> const& plan, R const& r, recurrence_tensors<T, X, N> const& t,
                    recurrence_gradients<D, G, K> const& to, Comm& comm, caller here = caller::here()) {
    constexpr bool made = !detail::never<T> && !detail::never<D>;
    constexpr bool fits = std::same_as<X, S> && std::same_as<G, S>, same = std::same_as<D, T>,
                   models = detail::runs_on<R, T, N>() && K == N;
    static_assert(fits || !made,
                  "cpx: recur_backward of tensors or gradients that are not sharded as the plan; make the plan "
                  "with carry(x.sharding(), ...) and the gradients of the same sharding");
    static_assert(!fits || same || !made, "cpx: recur_backward wants gradients of the tensors' elements");
    static_assert(!fits || !same || models || !made,
                  "cpx: recur_backward of what is no model of cpx::recurrence, or has another number of "
                  "inputs; ops/local/recurrence.hpp says what a model has");
    if constexpr (fits && same && models) {
        detail::check_recurrence_backward(plan, r, t, to, here);
        detail::recur_backward_on_host(plan, r, t, to, comm, here);
    }
}
template <class Plan = detail::any, class Y1 = detail::any, class Y2 = detail::any>
detail::refused recur_backward(Plan const& = {}, detail::any = {}, Y1 const& = {}, Y2 const& = {}, detail::any = {},
                               detail::any = {}) {
    static_assert(detail::never<Plan, Y1, Y2>,
                  "cpx: recur_backward wants a carry_plan, a recurrence, recurrence_tensors, "
                  "recurrence_gradients and a cpx::transport; make the plan with carry<scan>(sharding, rank)");
    return {};
}

} // namespace cpx
