// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution over sequences on any sharding, with its halos, between GPUs.
#pragma once

#include <cpx/cuda/causal_conv1d.hpp>
#include <cpx/cuda/communicator.hpp>
#include <cpx/layout/piecewise.hpp>
#include <cpx/layout/sharded.hpp>
#include <cpx/ops/convolution_pass.hpp>
#include <cpx/ops/sections.hpp>

#include <array>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace cpx::cuda {

/// What a `conv_exchange` is made for beside its first batch.
struct conv_exchange_options {
    index_t x_stride = 0;           ///< elements from row to row of x, 0 for dense
    capacity most = {};             ///< the largest batch that a call may have later; none: all are the first one
    identity::arguments alike = {}; ///< what all calls have, if that is known now, for ranks to compare
    bool go_on = false;             ///< sequences go on from `states()`; of the first batch alone, without `most`
};

/// What convolutions of elements T on sharding S need of one rank: plans, exchanges and device memory. Made once a
/// batch, used by every layer; or once for every batch that comes.
///
/// Belongs to the communicator, which outlives it, and to its stream. Calls are collective, in the same order on all
/// ranks. No call leaves anything in it for another one: layers may come in any order, and the forward as often as
/// activations are recomputed. Activation and bias are each call's own, and ranks do not compare them.
template <gpu_number T, any_sharding S>
class conv_exchange {
public:
    /// For the forward. `before`: `halo(sharding, rank, taps - 1)`; `channels`: those of this rank.
    ///
    /// Collective, unless every rank holds every row: first of all the ranks compare what they are about to run. Ranks
    /// that are threads of one process meet before and after, so that none allocates while another waits for it.
    /// Throws `cpx::error` if plan and communicator do not fit, if the ranks' plans differ, and what `conv_plan`
    /// throws.
    conv_exchange(halo_plan<S> const& before, index_t channels, communicator& comm,
                  conv_exchange_options const& of = {}, caller here = caller::here())
        : conv_exchange(before, static_cast<halo_plan<S> const*>(nullptr), channels, comm, of, here) {}
    /// Also for the backward. `after`: `halo(sharding, rank, taps - 1, side::after)`.
    conv_exchange(halo_plan<S> const& before, halo_plan<S> const& after, index_t channels, communicator& comm,
                  conv_exchange_options const& of = {}, caller here = caller::here())
        : conv_exchange(before, &after, channels, comm, of, here) {}
    template <class X = cpx::detail::any>
    explicit conv_exchange(X const& = {}, cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {},
                           cpx::detail::any = {}, cpx::detail::any = {})
        : conv_exchange(cpx::detail::lacking<halo_plan<S> const&>(), 0, cpx::detail::lacking<communicator&>()) {
        static_assert(cpx::detail::never<X>,
                      "cpx: cuda::conv_exchange<T, S>(before, after, channels, comm), after for its backward, and T "
                      "and S always written, wants halo_plans of S and a cuda::communicator");
    }

    /// Makes the plans of another batch, in the order of the stream, unless this was made for one: no device memory is
    /// allocated, and nothing waits. Calls do so themselves, and a backward makes what it alone wants. Throws
    /// `cpx::error` if there is no room for it; if ranks have different batches, the wait after the next call says so.
    void set(S const& sharding, caller here = caller::here()) {
        if (later_ && !(sharding == sharding_)) set(cpx::halo(sharding, rank(), reach(), side::before, here), here);
    }
    /// The same by a plan that is there: `halo(sharding, rank, taps - 1)`.
    void set(halo_plan<S> const& before, caller here = caller::here()) {
        if (!later_ || before.sharding == sharding_) return;
        require_own(before, comm_, here);
        comm_.tables().together(
            [&] {
                plan_.set(before, comm_.tables(), here);
                next(halo_exchange_, before, before.sharding, here);
            },
            here);
        sharding_ = before.sharding;
        backward_is_set_ = false;
    }
    /// Makes what the backward alone wants of the batch that was set, unless it is there, in the same way.
    void set_backward(caller here = caller::here()) {
        if (lacks_backward()) set_backward(cpx::halo(sharding_, rank(), reach(), side::after, here), here);
    }
    /// The same by a plan that is there: `halo(sharding, rank, taps - 1, side::after)`.
    void set_backward(halo_plan<S> const& after, caller here = caller::here()) {
        if (!lacks_backward()) return;
        require_own(after, comm_, here);
        require(after.sharding == sharding_, "cuda::conv_exchange", "sharding of the plan of rows after",
                "that of rows before", "another", here);
        comm_.tables().together(
            [&] {
                plan_.set_after(after, comm_.tables(), here);
                next(edge_exchange_, plan_.edge_exchange(), sharding_, here);
            },
            here);
        backward_is_set_ = !captures(stream(), here); // else it is when that graph runs, and no earlier
    }

    S const& sharding() const { return sharding_; }
    int rank() const { return comm_.rank(); }
    cudaStream_t stream() const { return comm_.stream(); }
    conv_plan const& plan() const { return plan_; }
    index_t channels() const { return channels_; }

    /// Rows that the local operators read and write beside the caller's tensors: as many as the plan says.
    rows<T> halo() const { return {halo_.data(), plan_.halo_rows(), channels_}; }
    /// The newest rows of every sequence before the batch, (sequences, taps * channels), to be written before a call;
    /// none where sequences begin.
    rows<T> states() const {
        return {halo_.data() + plan_.halo_rows() * channels_, going_on(), plan_.taps() * channels_};
    }
    rows<float> edge() const { return {edge_.data(), plan_.edge_rows(), channels_}; }
    rows<float> dz_halo() const { return {dz_halo_.data(), plan_.dz_halo_rows(), channels_}; }
    std::span<float> workspace() const { return {workspace_.data(), static_cast<std::size_t>(workspace_.size())}; }

    /// Fills `halo()` from everybody's x. Collective.
    void exchange_halo(rows<T const> x, caller here = caller::here()) {
        comm_.tables().write(here); // of `set`, perhaps
        if (halo_exchange_) (*halo_exchange_)(x, halo(), {}, here);
    }
    /// Fills `dz_halo()` from everybody's `edge()`. Collective.
    void exchange_edge(caller here = caller::here()) {
        if (edge_exchange_) (*edge_exchange_)(edge(), dz_halo(), {}, here);
    }

private:
    conv_exchange(halo_plan<S> const& before, halo_plan<S> const* after, index_t channels, communicator& comm,
                  conv_exchange_options const& of, caller here)
        : comm_(comm),
          sharding_(compared(before, channels, comm, after ? "halo before and after" : "halo", of.alike, here)),
          first_(sharding_), later_(of.most.rows > 0), go_on_(of.go_on),
          beside_(later_ && !before.local ? cpx::detail::most_beside(before.sharding, before.reach, of.most, here) : 0),
          plan_(before, after,
                {of.most.rows, later_ ? cpx::detail::most_segments(before.sharding, of.most, here) : 0, go_on_}, here),
          channels_(channels), backward_(after != nullptr) {
        require(!later_ || !go_on_, "cuda::conv_exchange", "sequences that go on", "of one batch", "of others, too",
                here);
        halo_ = buffer<T>((std::max(plan_.halo_rows(), beside_) + going_on() * plan_.taps()) * channels, here);
        make(halo_exchange_, before, cpx::detail::moved<halo_plan<S>>::lanes(before, channels, false), of.x_stride,
             here);
        if (!after) return;
        edge_ = buffer<float>(std::max(plan_.edge_rows(), beside_) * channels, here);
        dz_halo_ = buffer<float>(std::max(plan_.dz_halo_rows(), beside_) * channels, here);
        workspace_ = buffer<float>(causal_conv1d_workspace(plan_, channels), here);
        make(edge_exchange_, plan_.edge_exchange(), edge_lanes(*after), 0, here);
    }

    /// Lets the ranks compare their plans, once for all exchanges: the plan of rows after follows from that of rows
    /// before. Returns the sharding.
    static S const& compared(halo_plan<S> const& before, index_t channels, communicator& comm, char const* operation,
                             identity::arguments const& alike, caller here) {
        char const* const where = "cuda::conv_exchange";
        int const device = comm.nccl_communicator().device();
        require_own(before, comm, here);
        require(channels >= 0, where, "channels", "not negative", channels, here);
        require(current_device() == device, where, "current device", device, current_device(), here);
        if (before.local) return before.sharding;
        identity id = before.id.template for_elements<T>(channels);
        identity::set(id.operation, operation);
        id.set_arguments(alike);
        detail::agree(comm.nccl_communicator(), id, before, here);
        return before.sharding;
    }
    template <class U>
    void make(std::optional<batch_exchange<U>>& to, cpx::plan moved, std::vector<lane_plan> lanes, index_t stride,
              caller here) {
        if (moved.local) return; // then there is nothing to move
        moved.local = true;      // the ranks have compared their plans
        exchange_options of{.from_stride = stride, .through = comm_.through()};
        if (later_) of.room = {2 * beside_, beside_ * channels_};
        to.emplace(std::span<cpx::plan const>(&moved, 1), std::move(lanes), std::vector<lane_plan>(), channels_, comm_,
                   of, here);
    }

    static void require_own(halo_plan<S> const& p, communicator const& comm, caller here) {
        cpx::detail::require_own("cuda::conv_exchange", "rank of the plan", p.rank, p.ranks(), comm.rank(),
                                 comm.ranks(), here);
    }
    template <class U>
    void next(std::optional<batch_exchange<U>>& exchange, cpx::plan const& moved, S const& sharding, caller here) {
        if (exchange)
            exchange->set(
                moved.batch, cpx::detail::cut_alike(sharding, first_), [&](auto&& use) { use(std::span(&moved, 1)); },
                here);
    }

    index_t reach() const { return plan_.taps() - 1; }
    bool lacks_backward() const { return backward_ && !backward_is_set_; }
    index_t going_on() const { return go_on_ ? sharding_.batch().sequences() : 0; }

    communicator& comm_;
    S sharding_, first_; ///< for which it has been set, and was made
    bool later_, go_on_; ///< whether other batches may come, and sequences go on
    index_t beside_;     ///< rows of them that are sent, or come, at most
    conv_plan plan_;
    index_t channels_;
    bool backward_, backward_is_set_ = true; ///< whether it is for the backward, too, and what that wants is there
    buffer<T> halo_;
    buffer<float> edge_, dz_halo_, workspace_;
    std::optional<batch_exchange<T>> halo_exchange_; ///< these go first: they wait until nobody needs the memory
    std::optional<batch_exchange<float>> edge_exchange_;
};

/// What the backward of a convolution on sharding S computes. Each but dx may be left empty.
///
/// dx: (rows, channels), written. dweight: (channels, K), dbias: (channels), this rank's share, added to what they
/// hold: the gradient is the sum over all ranks.
template <gpu_number T, any_sharding S>
struct causal_conv1d_gradients<T, S> {
    sharded_field<T, S, memory> dx;
    field<rows<float>> dweight = {};
    field<std::span<float>> dbias = {};
    cpx::detail::no_more end = {};
};
template <class X = cpx::detail::any>
conv_exchange(X const& = {}, cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {},
              cpx::detail::any = {}) -> conv_exchange<float, piecewise<cpx::detail::untold>>; // which no plan is of

namespace detail {

/// Throws `cpx::error` unless a tensor has the sharding, the stream and the width of a convolution. Its rows are
/// checked later.
template <class T, any_sharding S, class A>
void require_of(char const* where, char const* what, conv_exchange<T, S> const& by, sharded<A, S, memory> const& tensor,
                caller here) {
    cpx::detail::require_place(where, what, tensor, by.sharding(), by.rank(), "that of the conv_exchange", here);
    require(tensor.memory().stream() == by.stream(), where, (std::string("stream of ") + what).c_str(),
            "the communicator's", "another", here);
    require(tensor.data().width() == by.channels(), where, (std::string("width of ") + what).c_str(), by.channels(),
            tensor.data().width(), here);
}

/// A convolution of arguments that fit, for `run_convolution`. y: this rank's rows or parts.
template <class T, any_sharding S, class W, class Y>
struct device_convolution {
    conv_exchange<T, S>& by;
    convolved<T, W> const& of;
    Y const& y;

    void exchange_halo(caller here) const { by.exchange_halo(of.x, here); }
    void forward(caller here) const { launch_forward(by.plan(), of, y, by.stream(), here); }
};
/// A backward of arguments that fit, for `run_convolution_backward`. Edge rows alone are computed before the rest.
template <class T, any_sharding S, class W, class Dy>
struct device_convolution_backward {
    conv_exchange<T, S>& by;
    convolved<T, W> const& of;
    Dy const& dy;
    causal_conv1d_gradients<T> to;

    void exchange_halo(caller here) const { by.exchange_halo(of.x, here); }
    void edge(caller here) const { launch_edge(by.plan(), of, dy, by.edge(), by.stream(), here); }
    void exchange_edge(caller here) const { by.exchange_edge(here); }
    void backward(caller here) const {
        launch_backward(by.plan(), of, dy, by.edge(), by.dz_halo(), to, by.stream(), here);
    }
};

/// Checks a convolution and computes it.
template <class T, any_sharding S, class W, class Y>
void check_and_convolve(conv_exchange<T, S>& by, sharded<T const, S, memory> const& x, rows<W> weight,
                        std::type_identity_t<std::span<W const>> bias, activation act, Y const& y, caller here) {
    using weight_element = std::remove_const_t<W>;
    require_of("cuda::causal_conv1d", "x", by, x, here);
    convolved<T, weight_element> const of{x.data(), by.halo(), weight, bias, act};
    check_convolution(of, by.plan(), y, here);
    cpx::detail::run_convolution(device_convolution<T, S, weight_element, Y>{by, of, y}, here);
}
/// Checks a backward and computes it.
template <class T, any_sharding S, class W, class Dy>
void check_and_convolve_backward(conv_exchange<T, S>& by, sharded<T const, S, memory> const& x, rows<W> weight,
                                 std::type_identity_t<std::span<W const>> bias, activation act, Dy const& dy,
                                 causal_conv1d_gradients<T, S> const& to, caller here) {
    using weight_element = std::remove_const_t<W>;
    char const* const where = "cuda::causal_conv1d_backward";
    require_of(where, "x", by, x, here);
    require_of(where, "dx", by, to.dx, here);
    convolved<T, weight_element> const of{x.data(), by.halo(), weight, bias, act};
    causal_conv1d_gradients<T> sums{to.dx.data(), to.dweight, to.dbias, by.workspace()};
    check_backward(of, by.plan(), dy, sums, here);
    if (!cpx::detail::adds_rows(by.sharding(), by.rank())) sums.dweight = {}, sums.dbias = {};
    cpx::detail::run_convolution_backward(device_convolution_backward<T, S, weight_element, Dy>{by, of, dy, sums}, here,
                                          [] {});
}

} // namespace detail

/// Computes `y_t = activation(bias + sum_j weight_j x_{t-K+1+j})` for every channel, with zeros before a sequence
/// begins, as the host's `causal_conv1d` does, and the local one here, which says what weight and bias may be.
///
/// x, y: (rows, channels) of this rank, not overlapping; x begins at a multiple of 16 bytes, its rows as far apart as
/// the constructor was told. Collective: one exchange of the halo of x, then one kernel, in the stream of x, without
/// host synchronisation or allocation. Can be captured, as `exchange` can. Bitwise the same on every sharding.
/// Sequences begin here, or go on from `by.states()`.
///
/// Throws `cpx::error` on shapes, shardings and memory that do not fit, before anything moves, and what `exchange`
/// throws.
template <class T, any_sharding S, sharded_like<memory> X, class W, sharded_like<memory> Y>
void causal_conv1d(conv_exchange<T, S>& by, X const& x, rows<W> weight, std::type_identity_t<std::span<W const>> bias,
                   activation act, Y&& y, caller here = caller::here()) {
    constexpr bool fits = cpx::detail::sharded_as<S, X, Y>;
    constexpr bool writes = cpx::detail::writes<Y, X> && std::same_as<element_of<Y>, T>;
    static_assert(fits, "cpx: cuda::causal_conv1d of tensors that are not sharded as the conv_exchange; make that with "
                        "halo(x.sharding(), ...) and y of the same sharding");
    static_assert(!fits || writes,
                  "cpx: cuda::causal_conv1d wants x and y of the conv_exchange's elements, and a y that is not "
                  "const and has a name");
    if constexpr (fits && writes) {
        sharded<T const, S, memory> const from = x.view();
        sharded<T, S, memory> const to = y.view();
        by.set(from.sharding(), here);
        detail::require_of("cuda::causal_conv1d", "y", by, to, here);
        detail::check_and_convolve(by, from, weight, bias, act, to.data(), here);
    }
}

/// The same into parts of this rank's rows, of which some may be normalised by heads; see `conv_parts`.
template <class T, any_sharding S, sharded_like<memory> X, class W, gpu_number U = T>
void causal_conv1d(conv_exchange<T, S>& by, X const& x, rows<W> weight, std::type_identity_t<std::span<W const>> bias,
                   activation act, conv_parts<U> const& y, caller here = caller::here()) {
    constexpr bool fits =
        cpx::detail::sharded_as<S, X> && std::same_as<element_of<X>, T> && detail::may_stand_for<U, T>;
    static_assert(fits, "cpx: cuda::causal_conv1d of a tensor that is not sharded as the conv_exchange, or has other "
                        "elements, or into parts of neither these nor, of bfloat16, half; make it with x.sharding()");
    if constexpr (fits) {
        sharded<T const, S, memory> const from = x.view();
        by.set(from.sharding(), here);
        detail::check_and_convolve(by, from, weight, bias, act, y, here);
    }
}
template <class By = cpx::detail::any>
cpx::detail::refused causal_conv1d(By const& = {}, cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {},
                                   cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {},
                                   cpx::detail::any = {}) {
    static_assert(cpx::detail::never<By>,
                  "cpx: cuda::causal_conv1d(by, x, weight, bias, activation, y) wants a conv_exchange, "
                  "tensors of cuda::memory, a weight as rows and a bias in their memory, and no communicator, which "
                  "the conv_exchange has; or a conv_plan, rows and a stream");
    return {};
}

/// Computes the gradients of `causal_conv1d`. dy: (rows, channels), the gradient of y; the rest as there.
///
/// Collective: exchanges the halo of x again, as the host's does, for other layers have used its memory since the
/// forward, and then the edge rows of dz = dy act'(z), in float; three kernels beside these exchanges. dx is bitwise
/// the same on every sharding; a gradient never reaches another sequence.
///
/// Throws as the forward does, and if `by` was made for the forward alone.
template <class T, any_sharding S, sharded_like<memory> X, sharded_like<memory> Dy, class W>
void causal_conv1d_backward(conv_exchange<T, S>& by, X const& x, rows<W> weight,
                            std::type_identity_t<std::span<W const>> bias, activation act, Dy const& dy,
                            std::type_identity_t<causal_conv1d_gradients<T, S>> const& to,
                            caller here = caller::here()) {
    constexpr bool fits = cpx::detail::sharded_as<S, X, Dy>;
    constexpr bool same = std::same_as<element_of<X>, T> && std::same_as<element_of<Dy>, T>;
    static_assert(fits, "cpx: cuda::causal_conv1d_backward of tensors that are not sharded as the conv_exchange; make "
                        "that with halo(x.sharding(), ...) and dy of the same sharding");
    static_assert(!fits || same, "cpx: cuda::causal_conv1d_backward wants x and dy of the conv_exchange's elements");
    if constexpr (fits && same) {
        sharded<T const, S, memory> const from = x.view(), of_y = dy.view();
        by.set(from.sharding(), here);
        by.set_backward(here);
        detail::require_of("cuda::causal_conv1d_backward", "dy", by, of_y, here);
        detail::check_and_convolve_backward(by, from, weight, bias, act, of_y.data(), to, here);
    }
}

/// The same of a result in parts: dy holds the gradients of the parts, those of normalised heads included.
template <class T, any_sharding S, sharded_like<memory> X, class W, gpu_number U = T>
void causal_conv1d_backward(conv_exchange<T, S>& by, X const& x, rows<W> weight,
                            std::type_identity_t<std::span<W const>> bias, activation act,
                            conv_parts<U const> const& dy,
                            std::type_identity_t<causal_conv1d_gradients<T, S>> const& to,
                            caller here = caller::here()) {
    constexpr bool fits =
        cpx::detail::sharded_as<S, X> && std::same_as<element_of<X>, T> && detail::may_stand_for<U, T>;
    static_assert(
        fits, "cpx: cuda::causal_conv1d_backward of a tensor that is not sharded as the conv_exchange, or has other "
              "elements, or of parts of neither these nor, of bfloat16, half; make it with x.sharding()");
    if constexpr (fits) {
        sharded<T const, S, memory> const from = x.view();
        by.set(from.sharding(), here);
        by.set_backward(here);
        detail::check_and_convolve_backward(by, from, weight, bias, act, dy, to, here);
    }
}
template <class By = cpx::detail::any>
cpx::detail::refused causal_conv1d_backward(By const& = {}, cpx::detail::any = {}, cpx::detail::any = {},
                                            cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {},
                                            cpx::detail::any = {}, cpx::detail::any = {}) {
    static_assert(
        cpx::detail::never<By>,
        "cpx: cuda::causal_conv1d_backward(by, x, weight, bias, activation, dy, gradients) wants a conv_exchange, "
        "tensors of cuda::memory, a weight as rows and a bias in their memory, and no communicator, which the "
        "conv_exchange has; or a conv_plan, rows and a stream");
    return {};
}

} // namespace cpx::cuda
