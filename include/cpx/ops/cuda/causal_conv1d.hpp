// SPDX-License-Identifier: Apache-2.0
// The causal convolution of tensors on devices, in the stream of their communicator.
//
// A call prepares itself, which is collective on the host and waits for the device; `cuda::conv_exchange` is prepared
// once for every layer, and may have weights of other elements. Sums are in float. In the order of the batch a thread
// adds up a tap of a channel, over all tokens: for training that must be reproduced, not for speed.
#pragma once

#include <cpx/cuda/communicator.hpp>
#include <cpx/cuda/elements.hpp>
#include <cpx/cuda/head_norm.hpp>
#include <cpx/cuda/write_numbers.hpp>
#include <cpx/ops/causal_conv1d.hpp>
#include <cpx/ops/cuda/conv_exchange.hpp>
#include <cpx/ops/cuda/operands.hpp>
#include <cpx/ops/cuda/state_exchange.hpp>

#include <bit>
#include <concepts>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

namespace cpx {

namespace detail {

/// Returns what is known of a convolution that prepares itself for one call.
template <class T>
cuda::conv_exchange_options options_of_call(rows<T const> x, activation act, std::span<T const> bias) {
    return {.x_stride = x.stride(), .alike = convolution_arguments(act, bias)};
}

template <std::derived_from<cuda::communicator> Comm>
inline constexpr bool convolves_by<cuda::memory, Comm> = true;

/// On devices heads are normalised by vectors of 16 bytes, whatever a rank holds and wherever its rows begin.
template <>
struct normalising_convolution<cuda::memory> {
    static constexpr bool ever = true;
    /// Whether heads of `dim` channels are, before heads of `others`.
    template <class T>
    static constexpr bool fits(index_t taps, index_t dim, index_t others) {
        index_t const element = static_cast<index_t>(sizeof(T)), vectors = dim * element / 16;
        return taps == 4 && dim * element % 16 == 0 && others * element % 16 == 0 && vectors <= 32 &&
               std::has_single_bit(static_cast<std::size_t>(vectors));
    }
    /// Turns gradients of normalised heads into those of `y`, for what takes a channel at a time.
    template <class T>
    static void backward(cuda::memory const& memory, rows<T const> y, index_t dim, rows<T> gradient, caller here) {
        cuda::normalise_heads(y, dim, gradient, true, memory.stream(), here);
    }
};

/// Rows that begin at multiples of 16 bytes, if that is wanted: those given or, if they do not, others. How many rows
/// there are does not matter, for what is prepared for some batches is kept for others.
template <class T>
class rows_in_vectors {
    using element = std::remove_const_t<T>;

public:
    rows_in_vectors(rows<T> given, bool wanted, cuda::memory const& memory, caller here)
        : given_(given), memory_(memory), here_(here), own_(wanted && !cuda::detail::in_panels(given)) {
        if (!own_) return;
        constexpr index_t vector = 16 / static_cast<index_t>(sizeof(T));
        index_t const stride = (given.width() + vector - 1) / vector * vector;
        block_ = memory.template room<element>(given.count() * stride);
        aligned_ = {block_.data(), given.count(), given.width(), stride};
        if constexpr (std::is_const_v<T>) copy(given, aligned_);
    }
    rows<T> view() const { return own_ ? rows<T>(aligned_) : given_; }
    /// Copies what has been written to where it was wanted.
    void put() const {
        if (own_) copy(aligned_, given_);
    }

private:
    void copy(rows<element const> from, rows<element> to) const {
        for_each_element(memory_, to.count(), to.width(), rowwise::copy<element>{from, to}, here_);
    }
    rows<T> given_;
    cuda::memory const& memory_;
    caller here_;
    bool own_;
    cuda::block<element> block_;
    rows<element> aligned_;
};

/// Returns a result, or its gradient, in parts: heads that are normalised, and the rest.
template <class T>
cuda::conv_parts<T> in_parts(rows<T> whole, normalised_heads heads) {
    index_t const rest = whole.width() - heads.channels;
    return {{{{heads.channels > 0 ? whole.columns(0, heads.channels) : rows<T>(), heads.dim},
              {rest > 0 ? whole.columns(heads.channels, rest) : rows<T>(), 0}}}};
}

/// Copies newest rows of sequences to their states; `list`: see `newest_rows`.
template <class T>
struct keep_newest {
    rows<T const> x, halo; ///< the halo's rows, and those of the states before
    index_t const* list;
    rows<T> to;
    __device__ void operator()(index_t i, index_t channel) const {
        index_t const row = list[2 * i], from = list[2 * i + 1], taps = to.width() / x.width();
        to(row / taps, row % taps * x.width() + channel) =
            from < x.count() ? x(from, channel) : halo(from - x.count(), channel);
    }
};

/// What a convolution on one rank is prepared for: its plans, that of rows after only for a backward, and x; and
/// whether heads are normalised, for which x may be a copy on some ranks.
template <class T, any_sharding S>
struct call_of_exchange {
    halo_plan<S> const& before;
    halo_plan<S> const* after;
    rows<T const> x;
    bool heads;
    cuda::conv_exchange_options of;

    auto made(cuda::communicator& comm, caller here) const {
        using exchange = cuda::conv_exchange<T, S>;
        return after ? std::make_unique<exchange>(before, *after, x.width(), comm, of, here)
                     : std::make_unique<exchange>(before, x.width(), comm, of, here);
    }
};
/// Calls `f(exchange)` with one that is made for this call; what carries states keeps one for others. Ranks always
/// compare calls of sequences that go on, whose states nothing must spoil.
template <class T, any_sharding S, class F>
void with_exchange(call_of_exchange<T, S> const& call, cuda::communicator& comm, caller here, F&& f) {
    auto made = call.made(comm, here);
    f(*made);
    comm.keep(std::move(made), here);
}
template <class T, any_sharding S, class F>
void with_exchange(call_of_exchange<T, S> call, cuda::state_exchange& layers, caller here, F&& f) {
    if (call.of.go_on) return with_exchange(call, layers.ranks(), here, f);
    call.of.most = layers.most();
    bool const later = call.of.most.rows > 0;
    auto& by = layers.template kept<cuda::conv_exchange<T, S>>(
        {2 * call.heads + (call.after != nullptr), call.before.reach, call.x.width(), call.x.stride()},
        [&](auto const& there) { return later || there.sharding() == call.before.sharding; },
        [&] { return call.made(layers.ranks(), here); }, here);
    by.set(call.before, here);
    if (call.after) by.set_backward(*call.after, here);
    f(by);
}

/// Runs a convolution of tensors on devices of which all fits. by: a communicator, or a `cuda::state_exchange`.
template <class T, any_sharding S, class Y, carries_states By>
void convolve(convolution<T, S, cuda::memory, Y> const& of, By& prepared, caller here) {
    cuda::memory const memory = prepared.memory();
    rows<T const> const initial = of.states.initial;
    rows<T> const final = of.states.final;
    bool const heads = of.heads.channels > 0;
    rows_in_vectors<T const> const aligned(of.x.data(), heads, memory, here);
    rows<T const> const x = aligned.view();
    auto options = options_of_call(x, of.act, of.bias);
    options.go_on = initial.data() || final.data();
    call_of_exchange<T, S> const call{of.plan, nullptr, x, heads, options};
    with_exchange(call, prepared, here, [&](cuda::conv_exchange<T, S>& by) {
        auto const states = by.states();
        if (initial.data())
            for_each_element(memory, states.count(), states.width(), rowwise::copy<T>{initial, states}, here);
        else
            for_each_element(memory, states.count(), states.width(), rowwise::clear<T>{states}, here);
        cuda::detail::convolved<T, T> const given{x, by.halo(), of.weight, of.bias, of.act};
        auto const run = [&](auto const& y) {
            run_convolution(cuda::detail::device_convolution<T, S, T, std::remove_cvref_t<decltype(y)>>{by, given, y},
                            here);
        };
        if (heads || !std::same_as<Y, T>) {
            auto const parts = in_parts<Y>(of.y.data(), of.heads);
            cuda::detail::check_convolution(given, by.plan(), parts, here);
            run(parts);
        } else if constexpr (std::same_as<Y, T>) {
            run(of.y.data());
        }
        auto const list = final.data() && x.width() > 0 ? newest_rows(of.plan) : std::vector<index_t>();
        if (list.empty()) return;
        auto const there = cuda::numbers_on_device(memory, list, here);
        rows<T const> const beside(by.halo().data(), by.halo().count() + states.count() * of.weight.width(), x.width());
        for_each_element(memory, std::ssize(list) / 2, x.width(), keep_newest<T>{x, beside, there.data(), final}, here);
    });
}

/// Adds the terms of whole sequences, of which x and dy have some channels, in their order.
template <class T, any_sharding S, class Y>
void add_in_order(convolution_backward<T, S, cuda::memory, Y> const& to, rows<T const> x, rows<Y const> dy,
                  caller here) {
    thd const& batch = to.x.sharding().batch();
    auto const offsets = cuda::numbers_on_device(to.x.memory(), batch.offsets(), here);
    kernels::conv_weight_sums<T, Y> const sum{x,
                                              dy,
                                              to.weight,
                                              to.bias.empty() ? nullptr : to.bias.data(),
                                              to.act == activation::silu,
                                              offsets.data(),
                                              batch.sequences(),
                                              to.dweight,
                                              to.dbias.empty() ? nullptr : to.dbias.data(),
                                              1 / to.gradient_scale};
    for_each_element(to.x.memory(), x.width(), to.weight.width() + (to.dbias.empty() ? 0 : 1), sum, here);
}

/// Runs the rest of a backward of tensors on devices of which all fits.
template <class T, any_sharding S, class Y, carries_states By, class F>
void convolve_backward_by_rank(convolution_backward<T, S, cuda::memory, Y> const& to, By& prepared, caller here,
                               F&& more) {
    cuda::memory const memory = prepared.memory();
    bool const heads = to.heads.channels > 0;
    rows_in_vectors<T const> const aligned(to.x.data(), heads, memory, here);
    rows_in_vectors<T> const dx(to.dx.data(), heads, memory, here);
    rows<T const> const x = aligned.view();
    call_of_exchange<T, S> const call{to.before, &to.after, x, heads, options_of_call(x, to.act, to.bias)};
    with_exchange(call, prepared, here, [&](cuda::conv_exchange<T, S>& by) {
        cuda::detail::convolved<T, T> const given{x, by.halo(), to.weight, to.bias, to.act};
        more(); // ranks have compared what they run, and no exchange of the halo is pending yet
        cuda::causal_conv1d_gradients<T> const sums{dx.view(), to.dweight, to.dbias, by.workspace()};
        auto const run = [&](auto const& dy) {
            using convolution = cuda::detail::device_convolution_backward<T, S, T, std::remove_cvref_t<decltype(dy)>>;
            run_convolution_backward(convolution{by, given, dy, sums}, here, [] {});
        };
        if (heads || !std::same_as<Y, T>) {
            auto parts = in_parts<Y const>(to.dy.data(), to.heads);
            parts.gradient_scale = to.gradient_scale;
            cuda::detail::check_backward(given, by.plan(), parts, sums, here);
            run(parts);
            dx.put();
        } else if constexpr (std::same_as<Y, T>) {
            run(rows<T const>(to.dy.data()));
        }
    });
}

} // namespace detail

} // namespace cpx
