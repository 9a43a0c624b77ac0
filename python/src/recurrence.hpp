// SPDX-License-Identifier: Apache-2.0
// One recurrence on elements of one type, forward and backward, with whatever carry.
#pragma once

#include "comm.hpp"
#include "numbers.hpp"
#include "plan.hpp"

#include <cpx/ops/gated_delta_rule_backward.hpp>
#include <cpx/ops/local/kimi_delta.hpp>
#include <cpx/ops/local/linear_attention.hpp>

#include <array>
#include <optional>
#include <vector>

namespace binding {

/// What Python hands to a recurrence: of a backward, its gradients, too.
struct recurrence_call {
    recurrence_call(carry_value const& p, communicator& c) : plan(p), comm(c) {}

    carry_value const& plan;
    communicator& comm;
    cpx::recurrence_heads heads = {};
    index_t chunk = 64;
    bool qk_l2norm = true;
    std::optional<double> scale = {};
    std::string where = {};
    std::vector<array> x = {};
    array o = {}, initial = {}, last = {}, starts = {}, maps = {};
    bool back = false;
    array dout = {}, dlast = {}, dinitial = {};
    std::vector<array> dx = {};
};

/// The gated delta rule with parameters of its own.
struct delta_rule {
    cpx::recurrence_heads heads;
    cpx::delta_rule_options options;
    cpx::detail::gated_delta model() const { return {heads, options}; }
};

template <class R>
struct modelled {
    R of;
    explicit modelled(recurrence_call const& c) : of{c.heads, {}} {
        of.options.chunk = c.chunk;
        of.options.scale = c.scale;
        if constexpr (requires { of.options.qk_l2norm; }) of.options.qk_l2norm = c.qk_l2norm;
    }
    decltype(auto) get() const {
        if constexpr (requires { of.model(); })
            return of.model();
        else
            return (of);
    }
};

/// Takes the states that a forward has kept, or gives them.
template <class T>
std::vector<T> kept(array const& a) {
    auto const list = list_of<T>(a);
    return {list.begin(), list.end()};
}
template <class T>
void keep(array const& a, std::vector<T> const& values) {
    std::ranges::copy(values, list_to<T>(a, std::ssize(values)).begin());
}

template <class R, class T>
void run_recurrence(recurrence_call const& c) {
    modelled<R> const made(c);
    auto const& r = made.get();
    constexpr std::size_t n = cpx::recurrence_inputs<std::remove_cvref_t<decltype(r)>>;
    std::array<cpx::rows<T const>, n> x;
    std::array<cpx::rows<T>, n> dx;
    for (std::size_t i = 0; i < n; ++i) {
        x[i] = rows_of<T>(c.x[i]);
        if (c.back) dx[i] = rows_to<T>(c.dx[i]);
    }
    auto const states = [&](array const& a) {
        return matrix_to<T>(a, a && a.dimensions() > 0 && a.size(0) > 0 ? a.elements() / a.size(0) : 0);
    };
    auto const o = rows_to<T>(c.o), initial = states(c.initial), last = states(c.last), dlast = states(c.dlast),
               dinitial = states(c.dinitial);
    auto const dout = rows_of<T>(c.dout);
    cpx::recurrence_saved<T> saved;
    if (c.back) saved = {kept<T>(c.starts), kept<T>(c.maps)};
    for (array const* const a : {&c.starts, &c.maps})
        if (*a) static_cast<void>(list_of<T>(*a)); // refused before anything moves
    {
        call const now(c.where.c_str(), c.comm);
        auto transport = c.comm.host(c.where.c_str());
        visit_plan(c.plan, [&]<class P, class S>(P const& plan, S const& sharding) {
            auto const on = [&]<class A>(cpx::rows<A> const& rows) { return cpx::sharded(rows, sharding, plan.rank); };
            std::array<cpx::sharded<T const, S>, n> const inputs = [&]<std::size_t... I>(std::index_sequence<I...>) {
                return std::array{on(x[I])...};
            }(std::make_index_sequence<n>());
            std::array<cpx::sharded<T, S>, n> const gradients = [&]<std::size_t... I>(std::index_sequence<I...>) {
                return std::array{on(dx[I])...};
            }(std::make_index_sequence<n>());
            cpx::recurrence_saved<T>* const to = c.back || c.starts ? &saved : nullptr;
            cpx::recurrence_tensors<T, S, n> const t{inputs, on(o), cpx::rows<T const>(initial), last, to};
            if (c.back)
                cpx::recur_backward(
                    plan, r, t,
                    cpx::recurrence_gradients<T, S, n>{on(dout), gradients, cpx::rows<T const>(dlast), dinitial},
                    transport);
            else
                cpx::recur(plan, r, t, transport);
        });
    }
    if (c.back) return;
    if (c.starts) keep<T>(c.starts, saved.starts);
    if (c.maps) keep<T>(c.maps, saved.maps);
}

} // namespace binding
