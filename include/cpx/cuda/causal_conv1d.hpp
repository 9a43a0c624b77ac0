// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution of rows in device memory, on any sharding.
#pragma once

#include <cpx/core/activation.hpp>
#include <cpx/core/field.hpp>
#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/conv_parts.hpp>
#include <cpx/cuda/conv_plan.hpp>
#include <cpx/cuda/nvtx.hpp>

#include <cpx/conv_grid.cuh>

#include <concepts>
#include <string>
#include <type_traits>

namespace cpx::cuda {

using cpx::activation;

namespace detail {

template <class... P>
void launch_convolution(void (*kernel)(P...), index_t blocks, dim3 threads, cudaStream_t in, caller here,
                        std::type_identity_t<P>... arguments) {
    require(blocks < index_t{1} << 31, "cuda::causal_conv1d", "blocks", "less than 2^31", blocks, here);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = threads;
    config.stream = in;
    check(cudaLaunchKernelEx(&config, kernel, arguments...), "cudaLaunchKernelEx", here);
}

/// What the rows of a convolution have to fit.
struct conv_sizes {
    index_t rows, taps, halo_rows;
    int device;
    bool has_backward;
};
inline conv_sizes sizes_of(conv_plan const& plan) {
    return {plan.rows(), plan.taps(), plan.halo_rows(), plan.device(), plan.has_backward()};
}

/// Throws `cpx::error` unless what all calls are given fits.
template <class T, class W>
void require_conv_input(char const* where, conv_sizes const& fit, rows<T const> x, rows<T const> halo, rows<W> weight,
                        std::type_identity_t<std::span<W const>> bias, caller here) {
    index_t const channels = weight.count();
    require(current_device() == fit.device, where, "current device", fit.device, current_device(), here);
    require(weight.width() == fit.taps, where, "width of weight", fit.taps, weight.width(), here);
    require(bias.empty() || std::ssize(bias) == channels, where, "size of bias", channels, bias.size(), here);
    require_rows(where, "weight", weight, channels, fit.taps, here);
    require_memory(where, "bias", bias, here);
    require_rows(where, "x", x, fit.rows, channels, here);
    require_rows(where, "halo", halo, fit.halo_rows, channels, here);
}

/// Returns what all calls are given, which fits, as the kernels want it.
template <class T, class W>
kernels::conv_input<T> conv_given(conv_plan const& plan, rows<T const> x, rows<T const> halo, rows<W> weight,
                                  std::type_identity_t<std::span<W const>> bias) {
    using number = std::remove_const_t<W>;
    static_assert(gpu_number<T>, "cpx: causal_conv1d of elements that are not float, __nv_bfloat16 or __half");
    static_assert(std::same_as<number, float> || std::same_as<number, T>,
                  "cpx: causal_conv1d with a weight that is neither float nor of the elements of x");
    kernels::conv_input<T> in{};
    in.rows = plan.rows();
    in.channels = weight.count();
    in.segments = static_cast<int>(plan.segments());
    in.x = conv_view(x);
    in.halo = conv_view(halo);
    in.weight = weight.data();
    in.bias = bias.empty() ? nullptr : bias.data();
    in.weight_stride = weight.stride();
    in.first = plan.first();
    in.before = plan.before();
    in.taps = static_cast<int>(plan.taps());
    in.float_weight = std::same_as<number, float>;
    return in;
}

/// Returns whether x, its halo, the weight, and `y`, a result or its gradient, can be read and written in vectors of 16
/// bytes: there are 4 taps, the weight is dense, and everything is aligned.
template <class T, class W, class Y>
bool conv_in_vectors(rows<T const> x, rows<T const> halo, rows<W> weight, Y const& y) {
    index_t const row = weight.count() * static_cast<index_t>(sizeof(T));
    return weight.width() == 4 && weight.stride() == 4 && vector_bytes({address(weight.data()), row}) == 16 &&
           in_vectors(x) && in_vectors(halo) && in_vectors(y);
}
/// Throws `cpx::error` if they cannot, and heads of `y` are to be normalised.
template <class T, class W, class Y>
void require_vectors(char const* where, rows<T const> x, rows<T const> halo, rows<W> weight, Y const& y, caller here) {
    require(!normalises(y) || conv_in_vectors<T>(x, halo, weight, y), where,
            "taps and alignment for heads to be normalised", "4, and rows at multiples of 16 bytes", "others", here);
}

/// Throws `cpx::error` if what a call writes, such as `y`, overlaps what it reads or something else that it writes.
template <class T, class W, class Written>
void require_apart_from_inputs(char const* where, Written const& written, rows<T const> x, rows<T const> halo,
                               rows<W> weight, std::type_identity_t<std::span<W const>> bias, caller here) {
    require_apart(where, written,
                  std::array{operand("x", x), operand("halo", halo), operand("weight", weight), operand("bias", bias)},
                  here);
}

/// What kernels are given, of arguments that fit. `vectors`: whether they may read and write 16 bytes at once.
template <class T, class Out>
struct convolution_call {
    kernels::conv_input<T> given;
    Out out;
    bool vectors;
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

/// Returns a result, or its gradient, as rows if it is not in parts.
template <class T, class Y>
auto in_form(Y const& y) {
    if constexpr (std::same_as<Y, conv_parts<T>>)
        return y;
    else
        return rows<T>(y);
}

/// Throws `cpx::error` unless a convolution fits, whose `y` is rows or parts.
template <class T, class W, class Y>
void check_convolution(conv_sizes const& fit, rows<T const> x, rows<T const> halo, rows<W> weight,
                       std::type_identity_t<std::span<W const>> bias, activation act, Y const& y, caller here) {
    char const* const where = "cuda::causal_conv1d";
    cpx::detail::require_activation(where, act, here);
    require_conv_input<T>(where, fit, x, halo, weight, bias, here);
    require_result(where, "y", y, fit.rows, weight.count(), here);
    require_vectors<T>(where, x, halo, weight, y, here);
    require_apart_from_inputs<T>(where, operands("y", y), x, halo, weight, bias, here);
}
template <class T, class W, class Y>
auto convolution_of(conv_plan const& plan, rows<T const> x, rows<T const> halo, rows<W> weight,
                    std::type_identity_t<std::span<W const>> bias, Y const& y) {
    auto const out = result_given(y);
    return convolution_call<T, std::remove_const_t<decltype(out)>>{conv_given<T>(plan, x, halo, weight, bias), out,
                                                                   conv_in_vectors<T>(x, halo, weight, y)};
}

template <class T, class Out>
void launch_forward(conv_plan const& plan, convolution_call<T, Out> call, activation act, cudaStream_t in,
                    caller here) {
    auto& given = call.given;
    if (given.rows * given.channels == 0) return;
    auto const range = named_range<"cpx causal_conv1d">();
    with_variant<T>(call.vectors, act, [&](auto taps, auto vector, auto silu) {
        auto const grid = kernels::cut_forward(plan.multiprocessors(), given.rows, given.channels, vector);
        given.strip = grid.strip;
        launch_convolution(kernels::causal_conv1d<T, taps, vector, silu, Out>, grid.blocks, grid.threads, in, here,
                           given, call.out);
    });
}

template <class T, class Dy>
void launch_edge(conv_plan const& plan, kernels::conv_input<T> const& given, Dy const& dy, activation act,
                 rows<float> edge, cudaStream_t in, caller here) {
    if (edge.count() * given.channels == 0) return;
    auto const range = named_range<"cpx causal_conv1d_backward_edge">();
    with_variant<T>(false, act, [&](auto, auto, auto silu) {
        launch_convolution(kernels::causal_conv1d_edge<T, silu, Dy>, (given.channels + 127) / 128 * edge.count(),
                           dim3(128), in, here, given, dy, plan.edge_places(), conv_view(edge));
    });
}

} // namespace detail

/// Where the result of a convolution goes, or its gradient comes from: rows, or `conv_parts` of which some may be
/// normalised by heads, as a gated delta net does with q, k and v, in one pass.
template <class Y, class T>
concept conv_result = std::same_as<Y, conv_parts<T>> || std::convertible_to<Y const&, rows<T>>;

/// Computes `y_t = activation(bias + sum_j weight_j x_{t-K+1+j})` for every channel, with zeros before a sequence
/// begins. For K from 1 to 8, 4 being fastest; sums are float.
///
/// All is in device memory. x, y: (rows, channels) of the plan's rank, not overlapping; halo: what an exchange with the
/// plan of rows before brought, (plan.halo_rows(), channels), or empty if that is none; weight: (channels, K), bias:
/// (channels) or empty, both float or of the elements of x. Any strides and alignment; 16 bytes are loaded at once if
/// K is 4 and all rows begin at multiples of 16 bytes.
/// Enqueues one kernel. The same bits on every sharding, whatever the strides. Cost: x and y through memory once.
///
/// Throws `cpx::error` on shapes that do not fit and memory or a plan of another device, before anything is launched.
template <class A, class W, conv_result<std::remove_const_t<A>> Y>
void causal_conv1d(conv_plan const& plan, rows<A> x, std::type_identity_t<rows<A const>> halo, rows<W> weight,
                   std::type_identity_t<std::span<W const>> bias, activation act, Y const& y, cudaStream_t in,
                   caller here = caller::here()) {
    using T = std::remove_const_t<A>;
    auto const result = detail::in_form<T>(y);
    detail::check_convolution<T>(detail::sizes_of(plan), x, halo, weight, bias, act, result, here);
    detail::launch_forward(plan, detail::convolution_of<T>(plan, x, halo, weight, bias, result), act, in, here);
}

/// Computes the edge rows of dz = dy act'(z), which an exchange with `plan.edge_exchange()` then brings to other ranks:
/// the first half of the backward.
///
/// dy: (rows, channels), the gradient of y; edge: (plan.edge_rows(), channels), written, float so that dx has the same
/// bits on every sharding; the rest as in `causal_conv1d`. Enqueues one kernel, or none if there are no such rows.
///
/// Throws `cpx::error` as the forward does, and if the plan has no rows after.
template <class A, class W, conv_result<A const> Dy>
void causal_conv1d_backward_edge(conv_plan const& plan, rows<A> x, std::type_identity_t<rows<A const>> halo,
                                 rows<W> weight, std::type_identity_t<std::span<W const>> bias, activation act,
                                 Dy const& dy, rows<float> edge, cudaStream_t in, caller here = caller::here()) {
    using namespace detail;
    using T = std::remove_const_t<A>;
    char const* const where = "cuda::causal_conv1d_backward_edge";
    cpx::detail::require_activation(where, act, here);
    require(plan.has_backward(), where, "plan of rows after the segments", "one", "none", here);
    auto const given_dy = in_form<T const>(dy);
    require_conv_input<T>(where, sizes_of(plan), x, halo, weight, bias, here);
    require_result(where, "dy", given_dy, plan.rows(), weight.count(), here);
    require_rows(where, "edge", edge, plan.edge_rows(), weight.count(), here);
    require_vectors<T>(where, x, halo, weight, given_dy, here); // refused here, not after an exchange
    require_apart_from_inputs<T>(where, std::array{operand("edge", edge)}, x, halo, weight, bias, here);
    require_apart(where, std::array{operand("edge", edge)}, operands("dy", given_dy), here);
    launch_edge(plan, conv_given<T>(plan, x, halo, weight, bias), result_given(given_dy), act, edge, in, here);
}

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

/// Throws `cpx::error` unless a backward fits, whose `dy` is rows or parts.
template <class T, class W, class Dy>
void check_backward(conv_sizes const& fit, rows<T const> x, rows<T const> halo, rows<W> weight,
                    std::type_identity_t<std::span<W const>> bias, activation act, Dy const& dy,
                    causal_conv1d_gradients<T> const& to, caller here) {
    char const* const where = "cuda::causal_conv1d_backward";
    index_t const channels = weight.count();
    cpx::detail::require_activation(where, act, here);
    require_conv_input<T>(where, fit, x, halo, weight, bias, here);
    require(fit.has_backward, where, "plan of rows after the segments", "one", "none", here);
    require_rows(where, "dx", to.dx, fit.rows, channels, here);
    if (to.dweight.data()) require_rows(where, "dweight", to.dweight, channels, fit.taps, here);
    require(to.dbias.empty() || std::ssize(to.dbias) == channels, where, "size of dbias", channels, to.dbias.size(),
            here);
    require_memory(where, "dbias", to.dbias, here);
    require_result(where, "dy", dy, fit.rows, channels, here);
    require_vectors<T>(where, x, halo, weight, dy, here);
    require(!normalises(dy) || in_vectors(to.dx), where, "alignment of dx", "16 bytes, for heads that were normalised",
            "another", here);
    std::array const written{operand("dx", to.dx), operand("dweight", to.dweight), operand("dbias", to.dbias),
                             operand("workspace", to.workspace)};
    require_apart_from_inputs<T>(where, written, x, halo, weight, bias, here);
    require_apart(where, written, operands("dy", dy), here);
}
template <class T, class W, class Dy>
auto backward_of(conv_plan const& plan, rows<T const> x, rows<T const> halo, rows<W> weight,
                 std::type_identity_t<std::span<W const>> bias, Dy const& dy, rows<float const> edge,
                 rows<float const> dz_halo, causal_conv1d_gradients<T> const& to) {
    auto const from = result_given(dy);
    bool const sums = to.dweight.data() || !to.dbias.empty();
    return convolution_call<T, kernels::conv_backward<T, std::remove_const_t<decltype(from)>>>{
        conv_given<T>(plan, x, halo, weight, bias),
        {from, conv_view(to.dx), conv_view(edge), conv_view(dz_halo), plan.edge_rows(), plan.after(),
         sums ? to.workspace.data() : nullptr},
        conv_in_vectors<T>(x, halo, weight, dy) && in_vectors(to.dx)};
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
    if (wanted > 0) require_memory(where, "workspace", to.workspace, here);
    require_rows(where, "edge", edge, plan.edge_rows(), channels, here);
    require_rows(where, "dz_halo", dz_halo, plan.dz_halo_rows(), channels, here);
    require_apart(where, {{"dx", to.dx}}, {{"edge", edge}, {"dz_halo", dz_halo}}, here);
}

template <class T, class Dy>
void launch_backward(conv_plan const& plan, convolution_call<T, kernels::conv_backward<T, Dy>> call, activation act,
                     causal_conv1d_gradients<T> const& to, cudaStream_t in, caller here) {
    auto& given = call.given;
    index_t const channels = given.channels;
    if (given.rows * channels == 0) return;
    auto const range = named_range<"cpx causal_conv1d_backward">();
    with_variant<T>(call.vectors, act, [&](auto taps, auto vector, auto silu) {
        bool const parts = vector > 1 && !std::same_as<Dy, kernels::conv_rows<T const>>;
        auto const grid = kernels::cut_backward(plan.multiprocessors(), given.rows, channels, vector, parts);
        given.strip = grid.strip;
        launch_convolution(kernels::causal_conv1d_backward<T, taps, vector, silu, Dy>, grid.blocks, grid.threads, in,
                           here, given, call.out);
        if (!call.out.sums) return;
        index_t const values = (plan.taps() + 1) * channels;
        launch_convolution(kernels::causal_conv1d_add_sums<>, (values + 127) / 128, dim3(128), in, here, call.out.sums,
                           grid.strip_blocks, given.taps, channels, conv_view(to.dweight),
                           to.dbias.empty() ? nullptr : to.dbias.data());
    });
}

} // namespace detail

/// Computes the gradients of `causal_conv1d`: the second half of the backward.
///
/// edge: what `causal_conv1d_backward_edge` computed; dz_halo: (plan.dz_halo_rows(), channels), what an exchange with
/// `plan.edge_exchange()` brought, or empty if that is none; the rest as there. dx overlaps nothing.
/// Enqueues one kernel, two with dweight or dbias. dx has the same bits on every sharding; dweight and dbias always the
/// same on one kind of device, added in a fixed order. Cost: x, dy and dx through memory once.
///
/// Throws `cpx::error` as the first half does, and on a workspace that is too small.
template <class A, class W, conv_result<A const> Dy>
void causal_conv1d_backward(conv_plan const& plan, rows<A> x, std::type_identity_t<rows<A const>> halo, rows<W> weight,
                            std::type_identity_t<std::span<W const>> bias, activation act, Dy const& dy,
                            rows<float const> edge, rows<float const> dz_halo,
                            std::type_identity_t<causal_conv1d_gradients<std::remove_const_t<A>>> const& to,
                            cudaStream_t in, caller here = caller::here()) {
    using T = std::remove_const_t<A>;
    auto const given_dy = detail::in_form<T const>(dy);
    detail::check_backward<T>(detail::sizes_of(plan), x, halo, weight, bias, act, given_dy, to, here);
    detail::require_brought<T>(plan, weight.count(), edge, dz_halo, to, here);
    auto const call = detail::backward_of<T>(plan, x, halo, weight, bias, given_dy, edge, dz_halo, to);
    detail::launch_backward(plan, call, act, to, in, here);
}

} // namespace cpx::cuda
