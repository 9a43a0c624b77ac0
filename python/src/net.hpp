// SPDX-License-Identifier: Apache-2.0
// The gated delta net layer on elements of one type.
#pragma once

#include "comm.hpp"
#include "numbers.hpp"
#include "plan.hpp"

#include <cpx/ops/gated_delta_net_backward.hpp>

#include <array>
#include <atomic>
#include <memory>
#include <variant>

namespace binding {

/// The layer in place, with either carry or where every rank holds every row, and with the recurrence by heads.
using in_place_scan = cpx::gated_delta_net<cpx::scan, any_tokens>;
using in_place_serial = cpx::gated_delta_net<cpx::serial, any_tokens>;
using in_place_whole = cpx::gated_delta_net<cpx::serial, any_rows>;
using by_heads = cpx::gated_delta_net<cpx::serial, any_tokens, any_rows>;

/// What a forward keeps for its backward.
struct net_saved {
    template <class T>
    using on_tokens = cpx::gated_delta_net_saved<T, any_tokens, any_tokens>;
    template <class T>
    using on_rows = cpx::gated_delta_net_saved<T, any_rows, any_rows>;
    template <class T>
    using on_heads = cpx::gated_delta_net_saved<T, any_tokens, any_rows>;
    std::variant<std::monostate, on_tokens<float>, on_rows<float>, on_heads<float>, on_tokens<double>, on_rows<double>,
                 on_heads<double>>
        real;
    std::atomic<bool> busy = false; ///< a call reads or writes it
};

struct net_value {
    std::variant<in_place_scan, in_place_serial, in_place_whole, by_heads> real;
    any_layout sharding;
    int rank = 0;
};

inline constexpr std::size_t parameters = 9;

struct net_call {
    net_call(net_value const& n, communicator& c, char const* name) : net(n), comm(c), where(name) {}

    net_value const& net;
    communicator& comm;
    char const* where;
    std::array<array, parameters> weights = {}, dweights = {};
    array x = {}, y = {}, conv = {}, recurrent = {}; ///< y: of a backward, dy
    std::shared_ptr<net_saved> saved = {};
    bool back = false;
    array dx = {};
    cpx::sum_order order = cpx::sum_order::by_rank;
};

template <class T, class A>
cpx::gated_delta_net_parameters<A> parameters_of(std::array<array, parameters> const& list) {
    auto const rows = [&](std::size_t i) -> cpx::rows<A> {
        if (list[i].dimensions() != 1) return rows_to<T>(list[i]);
        return matrix_to<T>(list[i], i == 7 ? list[i].elements() : 1); // the norm's gain is a row, others a column
    };
    return {rows(0), rows(1), rows(2), rows(3), rows(4), rows(5), rows(6), rows(7), rows(8)};
}

/// A call's hold of what is saved. Throws `cpx::error` if another thread's call has it.
class holds_saved {
public:
    holds_saved(net_saved* saved, char const* where) : saved_(saved) {
        cpx::require(!saved || !saved->busy.exchange(true), where, "saved tensors", "those of one rank",
                     "some that another call is at");
    }
    ~holds_saved() {
        if (saved_) saved_->busy = false;
    }
    holds_saved(holds_saved const&) = delete;
    holds_saved& operator=(holds_saved const&) = delete;

private:
    net_saved* saved_;
};

template <class T>
void run_net(net_call const& c) {
    holds_saved const hold(c.saved.get(), c.where);
    auto const w = parameters_of<T, T const>(c.weights);
    auto const x = rows_of<T>(c.x);
    auto const state = [](array const& a) {
        return matrix_to<T>(a, a && a.dimensions() > 0 && a.size(0) > 0 ? a.elements() / a.size(0) : 0);
    };
    cpx::gated_delta_net_state<T> const states{state(c.conv), state(c.recurrent)};
    auto const y = rows_to<T>(c.y), dx = rows_to<T>(c.dx);
    cpx::gated_delta_net_parameters<T> dw;
    if (c.back) dw = parameters_of<T, T>(c.dweights);
    call const now(c.where, c.comm);
    auto transport = c.comm.host(c.where);
    std::visit(
        [&]<class Net>(Net const& net) {
            using S = std::remove_cvref_t<decltype(net.sharding())>;
            using saved_type = typename Net::template saved_of<T>;
            auto const on = [&](auto const& rows) { return cpx::sharded(rows, net.sharding(), c.net.rank); };
            if (c.back) {
                auto* const saved = std::get_if<saved_type>(&c.saved->real);
                cpx::require(saved != nullptr, c.where, "saved tensors", "those of the forward", "none, or others");
                cpx::gated_delta_net_backward<T>(net, w, on(x), *saved, on(cpx::rows<T const>(y)),
                                                 cpx::gated_delta_net_gradients<T, S>{on(dx), dw, c.order}, transport);
                return;
            }
            saved_type* const saved = c.saved ? &c.saved->real.template emplace<saved_type>() : nullptr;
            net.template operator()<T>(w, on(x), on(y), transport, {states, saved});
        },
        c.net.real);
}

} // namespace binding
