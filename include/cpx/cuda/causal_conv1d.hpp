// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution of rows in device memory, on any sharding.
#pragma once

#include <cpx/core/activation.hpp>
#include <cpx/core/field.hpp>
#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/conv_parts.hpp>
#include <cpx/cuda/conv_plan.hpp>
#include <cpx/cuda/launch.hpp>
#include <cpx/cuda/nvtx.hpp>

#include <cpx/conv_grid.cuh>
#include <cpx/conv_weight_sums.cuh> // for sums in the order of the batch

#include <algorithm>
#include <array>
#include <concepts>
#include <span>
#include <type_traits>

namespace cpx::cuda {

using cpx::activation;

/// What the backward of a convolution computes: of bare rows, or of rows with their sharding (see conv_exchange.hpp).
template <gpu_number T, class... S>
struct causal_conv1d_gradients;

/// dweight and dbias may be left empty.
///
/// dx: (rows, channels), written. dweight: (channels, K), dbias: (channels), this rank's share, added to what they
/// hold: the gradient is the sum over all ranks. `workspace`, for either of them: at least
/// `causal_conv1d_workspace(plan, channels)` elements at a multiple of 16 bytes.
template <gpu_number T>
struct causal_conv1d_gradients<T> {
    field<rows<T>> dx;
    field<rows<float>> dweight = {};
    field<std::span<float>> dbias = {};
    field<std::span<float>> workspace = {};
    cpx::detail::no_more end = {};
};

/// Returns how many elements the backward of any type needs to add up dweight and dbias.
inline index_t causal_conv1d_workspace(conv_plan const& plan, index_t channels) {
    index_t blocks = 0;
    for (int const vector : {1, 4, 8})
        for (bool const parts : {false, true})
            blocks = std::max(blocks,
                              kernels::cut_backward(plan.multiprocessors(), plan.most_rows(), channels, vector, parts)
                                  .most_strip_blocks);
    return blocks * (plan.taps() + 1) * channels;
}

namespace detail {

template <class... P>
void launch_convolution(void (*kernel)(P...), index_t blocks, dim3 threads, cudaStream_t in, caller here,
                        std::type_identity_t<P> const&... arguments) {
    require(blocks < index_t{1} << 31, "cuda::causal_conv1d", "blocks", "less than 2^31", blocks, here);
    launch(kernel, dims(blocks), threads, 0, in, "cudaLaunchKernelEx", here, arguments...);
}

/// What every call of a convolution reads on a rank. `y`: its result or the gradient of that, rows or parts.
template <class T, class W>
struct convolved {
    static_assert(gpu_number<T>, "cpx: causal_conv1d of elements that are not float, __nv_bfloat16 or __half");
    static_assert(std::same_as<W, float> || std::same_as<W, T>,
                  "cpx: causal_conv1d with a weight that is neither float nor of the elements of x");

    rows<T const> x, halo;
    rows<W const> weight;
    std::span<W const> bias;
    activation act;

    /// Returns whether all can be read and written by 16 bytes: there are 4 taps, the weight is dense, all is aligned.
    template <class Y>
    bool in_vectors(Y const& y) const {
        index_t const row = weight.count() * static_cast<index_t>(sizeof(T));
        return weight.width() == 4 && weight.stride() == 4 && vector_bytes({address(weight.data()), row}) == 16 &&
               detail::in_vectors(x) && detail::in_vectors(halo) && detail::in_vectors(y);
    }
    /// Throws `cpx::error` unless it fits, and `y`, which is called `what`.
    template <class Y>
    void check(char const* where, conv_plan const& fit, char const* what, Y const& y, caller here) const {
        index_t const channels = weight.count();
        cpx::detail::require_activation(where, act, here);
        require(current_device() == fit.device(), where, "current device", fit.device(), current_device(), here);
        require(weight.width() == fit.taps(), where, "width of weight", fit.taps(), weight.width(), here);
        require(bias.empty() || std::ssize(bias) == channels, where, "size of bias", channels, bias.size(), here);
        require_rows(where, {{"weight", weight}, {"bias", bias}, {"x", x, fit.rows(), channels}}, here);
        require_rows(where, {{"halo", halo, fit.halo_rows(), channels}}, here);
        require_result(where, what, y, fit.rows(), channels, here);
        require_scale_of_parts<T>(where, y, here);
        require(!normalises(y) || in_vectors(y), where, "taps and alignment for heads to be normalised",
                "4, and rows at multiples of 16 bytes", "others", here);
    }
    /// Throws `cpx::error` if what a call writes overlaps this or something else that it writes.
    template <class Written>
    void require_apart(char const* where, Written const& written, caller here) const {
        std::array const read{operand("x", x), operand("halo", halo), operand("weight", weight), operand("bias", bias)};
        detail::require_apart(where, written, read, here);
    }
    /// Returns it as the kernels want it.
    kernels::conv_input<T> given(conv_plan const& plan) const {
        kernels::conv_input<T> in{};
        in.rows = plan.rows(), in.channels = weight.count();
        in.segments = static_cast<int>(plan.segments()), in.taps = static_cast<int>(plan.taps());
        in.x = conv_view(x), in.halo = conv_view(halo);
        in.weight = weight.data(), in.weight_stride = weight.stride();
        in.bias = bias.empty() ? nullptr : bias.data();
        in.first = plan.first(), in.before = plan.before();
        in.float_weight = std::same_as<W, float>;
        return in;
    }
};

/// Calls `f` with the taps of a kernel, 0 for any, the elements that it reads at once, and std::true_type for silu.
template <class T, class F>
void with_variant(bool vectors, activation act, F&& f) {
    auto const with = [&](auto... of) {
        act == activation::silu ? f(of..., std::true_type{}) : f(of..., std::false_type{});
    };
    using std::integral_constant;
    vectors ? with(integral_constant<int, 4>(), integral_constant<int, 16 / static_cast<int>(sizeof(T))>())
            : with(integral_constant<int, 0>(), integral_constant<int, 1>());
}

template <class U>
rows<U const> to_read(rows<U> const& dy) {
    return dy;
}
template <class U>
conv_parts<U> to_read(conv_parts<U> const& dy) {
    return dy;
}

/// Returns a result or, of `T const`, its gradient, as rows if it is neither rows nor parts.
template <class T, class Y>
auto in_form(Y const& y) {
    constexpr bool fits = result_of<Y, T> || std::convertible_to<Y const&, rows<T>>;
    static_assert(fits,
                  "cpx: causal_conv1d wants a result y, and in the backward dy, of x's elements or, of bfloat16, of "
                  "half: rows, or conv_parts<T>, of a gradient conv_parts<T const>");
    if constexpr (!fits)
        return rows<T>();
    else if constexpr (!result_of<Y, T>)
        return rows<T>(y);
    else if constexpr (std::is_const_v<T>)
        return to_read(y);
    else
        return y;
}

/// Throws `cpx::error` unless a convolution fits.
template <class T, class W, class Y>
void check_convolution(convolved<T, W> const& of, conv_plan const& fit, Y const& y, caller here) {
    char const* const where = "cuda::causal_conv1d";
    of.check(where, fit, "y", y, here);
    of.require_apart(where, operands("y", y), here);
}

template <class T, class W, class Y>
void launch_forward(conv_plan const& plan, convolved<T, W> const& of, Y const& y, cudaStream_t in, caller here) {
    auto given = of.given(plan);
    if (given.rows * given.channels == 0) return;
    auto const range = named_range<"cpx causal_conv1d">();
    with_variant<T>(of.in_vectors(y), of.act, [&](auto taps, auto vector, auto silu) {
        auto const out = result_given(y);
        auto const grid = kernels::cut_forward(plan.multiprocessors(), given.rows, given.channels, vector);
        given.strip = grid.strip;
        launch_convolution(kernels::causal_conv1d<T, taps, vector, silu, std::remove_const_t<decltype(out)>>,
                           grid.blocks, grid.threads, in, here, given, out);
    });
}

template <class T, class W, class Dy>
void launch_edge(conv_plan const& plan, convolved<T, W> const& of, Dy const& dy, rows<float> edge, cudaStream_t in,
                 caller here) {
    index_t const channels = of.weight.count();
    if (edge.count() * channels == 0) return;
    auto const range = named_range<"cpx causal_conv1d_backward_edge">();
    with_variant<T>(false, of.act, [&](auto, auto, auto silu) {
        auto const from = result_given(dy);
        launch_convolution(kernels::causal_conv1d_edge<T, silu, std::remove_const_t<decltype(from)>>,
                           (channels + 127) / 128 * edge.count(), dim3(128), in, here, of.given(plan), from,
                           plan.edge_places(), conv_view(edge));
    });
}

/// Throws `cpx::error` unless a backward fits.
template <class T, class W, class Dy>
void check_backward(convolved<T, W> const& of, conv_plan const& fit, Dy const& dy, causal_conv1d_gradients<T> const& to,
                    caller here) {
    char const* const where = "cuda::causal_conv1d_backward";
    index_t const channels = of.weight.count();
    require(fit.has_backward(), where, "plan of rows after the segments", "one", "none", here);
    of.check(where, fit, "dy", dy, here);
    require_rows(where, {{"dx", to.dx, fit.rows(), channels}}, here);
    if (to.dweight.data()) require_rows(where, {{"dweight", to.dweight, channels, fit.taps()}}, here);
    require(to.dbias.empty() || std::ssize(to.dbias) == channels, where, "size of dbias", channels, to.dbias.size(),
            here);
    require_memory(where, {{"dbias", to.dbias}}, here);
    require(!normalises(dy) || in_vectors(to.dx), where, "alignment of dx", "16 bytes, for heads that were normalised",
            "another", here);
    std::array const written{operand("dx", to.dx), operand("dweight", to.dweight), operand("dbias", to.dbias),
                             operand("workspace", to.workspace)};
    of.require_apart(where, written, here);
    require_apart(where, written, operands("dy", dy), here);
}

/// Throws `cpx::error` unless what a backward is given by exchanges, and its workspace, fit.
template <class T>
void require_brought(conv_plan const& plan, index_t channels, rows<float const> edge, rows<float const> dz_halo,
                     causal_conv1d_gradients<T> const& to, caller here) {
    char const* const where = "cuda::causal_conv1d_backward";
    bool const sums = to.dweight.data() || !to.dbias.empty();
    index_t const wanted = sums ? causal_conv1d_workspace(plan, channels) : 0;
    require(std::ssize(to.workspace) >= wanted, where, "size of the workspace", wanted, to.workspace.size(), here);
    require(vector_bytes({address(to.workspace.data())}) == 16, where, "address of the workspace",
            "a multiple of 16 bytes", "another", here);
    if (wanted > 0) require_memory(where, {{"workspace", to.workspace}}, here);
    require_rows(
        where, {{"edge", edge, plan.edge_rows(), channels}, {"dz_halo", dz_halo, plan.dz_halo_rows(), channels}}, here);
    require_apart(where, {{"dx", to.dx}}, {{"edge", edge}, {"dz_halo", dz_halo}}, here);
}

template <class T, class W, class Dy>
void launch_backward(conv_plan const& plan, convolved<T, W> const& of, Dy const& dy, rows<float const> edge,
                     rows<float const> dz_halo, causal_conv1d_gradients<T> const& to, cudaStream_t in, caller here) {
    auto given = of.given(plan);
    index_t const channels = given.channels;
    if (given.rows * channels == 0) return;
    auto const range = named_range<"cpx causal_conv1d_backward">();
    auto const from = result_given(dy);
    using form = std::remove_const_t<decltype(from)>;
    float* const sums = to.dweight.data() || !to.dbias.empty() ? to.workspace.data() : nullptr;
    kernels::conv_backward<T, form> const out{
        from, conv_view(to.dx), conv_view(edge), conv_view(dz_halo), plan.edge_rows(), plan.after(), sums};
    with_variant<T>(of.in_vectors(dy) && in_vectors(to.dx), of.act, [&](auto taps, auto vector, auto silu) {
        bool const parts = vector > 1 && kernels::conv::may_normalise<form, vector>;
        auto const grid = kernels::cut_backward(plan.multiprocessors(), given.rows, channels, vector, parts);
        given.strip = grid.strip;
        launch_convolution(kernels::causal_conv1d_backward<T, taps, vector, silu, form>, grid.blocks, grid.threads, in,
                           here, given, out);
        if (!sums) return;
        index_t const values = (plan.taps() + 1) * channels;
        launch_convolution(kernels::causal_conv1d_add_sums<>, (values + 127) / 128, dim3(128), in, here, sums,
                           grid.strip_blocks, given.taps, channels, conv_view(to.dweight),
                           to.dbias.empty() ? nullptr : to.dbias.data());
    });
}

} // namespace detail

/// Computes `y_t = activation(bias + sum_j weight_j x_{t-K+1+j})` for every channel, with zeros before a sequence
/// begins. For K from 1 to 8, 4 being fastest; sums are float.
///
/// All is in device memory. x, y: (rows, channels) of the plan's rank, not overlapping. y, as dy in the backward, is
/// rows or `conv_parts`, of which some may be normalised by heads, as a gated delta net does with q, k and v, in one
/// pass; of the elements of x or, where these are bfloat16, of half. halo: what an exchange with the plan of rows
/// before has brought, (plan.halo_rows(), channels), or empty if that is none; weight: (channels, K), bias: (channels)
/// or empty, both float or of the elements of x. Any strides and alignment; 16 bytes are loaded at once if K is 4 and
/// all rows begin at multiples of 16 bytes.
/// Enqueues one kernel. The same bits on every sharding, whatever the strides. Cost: x and y through memory once.
///
/// Throws `cpx::error` on shapes that do not fit and memory or a plan of another device, before anything is launched.
template <class A, class W, class Y>
void causal_conv1d(conv_plan const& plan, rows<A> x, std::type_identity_t<rows<A const>> halo, rows<W> weight,
                   std::type_identity_t<std::span<W const>> bias, activation act, Y const& y, cudaStream_t in,
                   caller here = caller::here()) {
    using T = std::remove_const_t<A>;
    auto const result = detail::in_form<T>(y);
    detail::convolved<T, std::remove_const_t<W>> const of{x, halo, weight, bias, act};
    detail::check_convolution(of, plan, result, here);
    detail::launch_forward(plan, of, result, in, here);
}

/// The first half of the backward: the edge rows of dz = dy act'(z), for an exchange by `plan.edge_exchange()`.
///
/// dy: (rows, channels), the gradient of y; edge: (plan.edge_rows(), channels), written, float so that dx has the same
/// bits on every sharding; the rest as in `causal_conv1d`. Enqueues one kernel, or none if there are no such rows.
///
/// Throws `cpx::error` as the forward does, and if the plan has no rows after.
template <class A, class W, class Dy>
void causal_conv1d_backward_edge(conv_plan const& plan, rows<A> x, std::type_identity_t<rows<A const>> halo,
                                 rows<W> weight, std::type_identity_t<std::span<W const>> bias, activation act,
                                 Dy const& dy, rows<float> edge, cudaStream_t in, caller here = caller::here()) {
    using namespace detail;
    using T = std::remove_const_t<A>;
    char const* const where = "cuda::causal_conv1d_backward_edge";
    convolved<T, std::remove_const_t<W>> const of{x, halo, weight, bias, act};
    auto const given_dy = in_form<T const>(dy);
    require(plan.has_backward(), where, "plan of rows after the segments", "one", "none", here);
    of.check(where, plan, "dy", given_dy, here); // vectors, too: refused here, not after an exchange
    require_rows(where, {{"edge", edge, plan.edge_rows(), weight.count()}}, here);
    std::array const written{operand("edge", edge)};
    of.require_apart(where, written, here);
    require_apart(where, written, operands("dy", given_dy), here);
    launch_edge(plan, of, given_dy, edge, in, here);
}

/// Computes the gradients of `causal_conv1d`: the second half of the backward.
///
/// edge: what `causal_conv1d_backward_edge` computed; dz_halo: (plan.dz_halo_rows(), channels), what an exchange with
/// `plan.edge_exchange()` brought, or empty if that is none; the rest as there. dx overlaps nothing.
/// Enqueues one kernel, two with dweight or dbias. dx has the same bits on every sharding; dweight and dbias always the
/// same on one kind of device, added in a fixed order. Cost: x, dy and dx through memory once.
///
/// Throws `cpx::error` as the first half does, and on a workspace that is too small.
template <class A, class W, class Dy>
void causal_conv1d_backward(conv_plan const& plan, rows<A> x, std::type_identity_t<rows<A const>> halo, rows<W> weight,
                            std::type_identity_t<std::span<W const>> bias, activation act, Dy const& dy,
                            rows<float const> edge, rows<float const> dz_halo,
                            std::type_identity_t<causal_conv1d_gradients<std::remove_const_t<A>>> const& to,
                            cudaStream_t in, caller here = caller::here()) {
    using T = std::remove_const_t<A>;
    auto const given_dy = detail::in_form<T const>(dy);
    detail::convolved<T, std::remove_const_t<W>> const of{x, halo, weight, bias, act};
    detail::check_backward(of, plan, given_dy, to, here);
    detail::require_brought(plan, weight.count(), edge, dz_halo, to, here);
    detail::launch_backward(plan, of, given_dy, edge, dz_halo, to, in, here);
}

} // namespace cpx::cuda
