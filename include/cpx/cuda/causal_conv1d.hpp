// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution of rows in device memory, on any sharding.
#pragma once

#include <cpx/core/activation.hpp>
#include <cpx/core/field.hpp>
#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/conv_parts.hpp>
#include <cpx/cuda/conv_plan.hpp>
#include <cpx/cuda/nvtx.hpp>

#include <cpx/causal_conv1d.cuh>
#include <cpx/causal_conv1d_backward.cuh>

#include <concepts>
#include <string>
#include <type_traits>

namespace cpx::cuda {

/// What a convolution may hold. Sums are float.
template <class T>
concept conv_element = std::same_as<T, float> || std::same_as<T, __nv_bfloat16> || std::same_as<T, __half>;

using cpx::activation;

namespace detail {

/// How a convolution is cut: a thread walks `strip` rows, a block has `threads.y` strips.
struct conv_grid {
    dim3 threads;
    int strip = 0;
    index_t strip_blocks = 0, blocks = 0;
    index_t most_strip_blocks = 0; ///< of as many rows, or fewer
};

/// Returns a grid of whole waves of `per_multiprocessor` blocks on every multiprocessor. Strips have about `wanted`
/// rows or, where rows are few, as many as fill one wave. Without channels the grid is that of one channel: nothing is
/// launched then, but the size of the workspace may be asked for.
inline conv_grid cut_convolution(conv_plan const& plan, index_t rows, index_t channels, int vector,
                                 index_t per_multiprocessor, index_t wanted) {
    index_t const in_a_row = std::max<index_t>(1, (channels + vector - 1) / vector);
    index_t const warps = std::min<index_t>(4, (in_a_row + 31) / 32);
    index_t const lanes = 32 * (warps == 3 ? 4 : warps), tiles = (in_a_row + lanes - 1) / lanes;
    index_t const together = 128 / lanes; // strips of a block
    index_t const resident = per_multiprocessor * plan.multiprocessors(), per_wave = resident * together * wanted;
    index_t const waves = std::max<index_t>(1, (rows * tiles + per_wave / 2) / per_wave);
    index_t const most = std::max<index_t>(1, resident * waves / tiles), strips = most * together;
    index_t const strip = std::max<index_t>(16, ((rows + strips - 1) / strips + 3) / 4 * 4);
    index_t const blocks = (rows + strip * together - 1) / (strip * together);
    return {dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(together)), static_cast<int>(strip), blocks,
            blocks * tiles, most};
}

// Fastest on an H200 without spills, for 32768 rows and 8192 channels. A strip is slow at its beginning and end, where
// nothing hides its loads. In the backward that costs more: it has one wave of long strips.
inline conv_grid cut_forward(conv_plan const& plan, index_t channels, int vector) {
    return cut_convolution(plan, plan.rows(), channels, vector, kernels::conv_resident, vector == 4 ? 256 : 128);
}

inline conv_grid cut_backward(conv_plan const& plan, index_t rows, index_t channels, int vector, bool parts) {
    return cut_convolution(plan, rows, channels, vector, kernels::conv_backward_resident(vector, parts),
                           vector > 1 ? 1024 : 512);
}

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

/// Checks what all calls are given and returns it as the kernels want it.
template <class T, class W>
kernels::conv_input<T> conv_given(char const* where, conv_plan const& plan, rows<T const> x, rows<T const> halo,
                                  rows<W> weight, std::type_identity_t<std::span<W const>> bias, caller here) {
    using number = std::remove_const_t<W>;
    static_assert(conv_element<T>, "cpx: causal_conv1d of elements that are not float, __nv_bfloat16 or __half");
    static_assert(std::same_as<number, float> || std::same_as<number, T>,
                  "cpx: causal_conv1d with a weight that is neither float nor of the elements of x");
    index_t const channels = weight.count();
    require(current_device() == plan.device(), where, "current device", plan.device(), current_device(), here);
    require(weight.width() == plan.taps(), where, "width of weight", plan.taps(), weight.width(), here);
    require(bias.empty() || std::ssize(bias) == channels, where, "size of bias", channels, bias.size(), here);
    require_rows(where, "weight", weight, channels, plan.taps(), here);
    require_memory(where, "bias", bias, here);
    require_rows(where, "x", x, plan.rows(), channels, here);
    require_rows(where, "halo", halo, plan.halo_rows(), channels, here);
    kernels::conv_input<T> in{};
    in.rows = plan.rows();
    in.channels = channels;
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
/// bytes: there are 4 taps, the weight is dense, and everything is aligned. Throws `cpx::error` if they cannot, and
/// heads of `y` are to be normalised.
template <class T, class W, class Y>
bool conv_in_vectors(char const* where, rows<T const> x, rows<T const> halo, rows<W> weight, Y const& y, caller here) {
    index_t const row = weight.count() * static_cast<index_t>(sizeof(T));
    bool const vectors = weight.width() == 4 && weight.stride() == 4 &&
                         vector_bytes({address(weight.data()), row}) == 16 && in_vectors(x) && in_vectors(halo) &&
                         in_vectors(y);
    require(vectors || !normalises(y), where, "taps and alignment for heads to be normalised",
            "4, and rows at multiples of 16 bytes", "others", here);
    return vectors;
}

/// Throws `cpx::error` if what a call writes, such as `y`, overlaps what it reads or something else that it writes.
template <class T, class W, class Written>
void require_apart_from_inputs(char const* where, Written const& written, rows<T const> x, rows<T const> halo,
                               rows<W> weight, std::type_identity_t<std::span<W const>> bias, caller here) {
    require_apart(where, written,
                  std::array{operand("x", x), operand("halo", halo), operand("weight", weight), operand("bias", bias)},
                  here);
}

/// Calls `f` with std::true_type for silu.
template <class F>
void with_activation(activation act, F&& f) {
    act == activation::silu ? f(std::true_type{}) : f(std::false_type{});
}

/// Returns a result, or its gradient, as rows if it is not in parts.
template <class T, class Y>
auto in_form(Y const& y) {
    if constexpr (std::same_as<Y, conv_parts<T>>)
        return y;
    else
        return rows<T>(y);
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
    using namespace detail;
    using T = std::remove_const_t<A>;
    char const* const where = "cuda::causal_conv1d";
    cpx::detail::require_activation(where, act, here);
    auto const result = in_form<T>(y);
    auto given = conv_given<T>(where, plan, x, halo, weight, bias, here);
    auto const out = result_given(where, "y", result, plan.rows(), given.channels, here);
    bool const vectors = conv_in_vectors<T>(where, x, halo, weight, result, here);
    require_apart_from_inputs<T>(where, operands("y", result), x, halo, weight, bias, here);
    if (given.rows * given.channels == 0) return;
    auto const range = named_range<"cpx causal_conv1d">();
    with_activation(act, [&](auto silu) {
        auto const launch = [&](auto* kernel, int vector) {
            auto const grid = cut_forward(plan, given.channels, vector);
            given.strip = grid.strip;
            launch_convolution(kernel, grid.blocks, grid.threads, in, here, given, out);
        };
        using out_type = std::remove_const_t<decltype(out)>;
        constexpr int vector = 16 / static_cast<int>(sizeof(T));
        if (vectors)
            launch(kernels::causal_conv1d<T, 4, vector, silu, out_type>, vector);
        else
            launch(kernels::causal_conv1d<T, 0, 1, silu, out_type>, 1);
    });
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
    auto const given = conv_given<T>(where, plan, x, halo, weight, bias, here);
    auto const from = result_given(where, "dy", given_dy, plan.rows(), given.channels, here);
    require_rows(where, "edge", edge, plan.edge_rows(), given.channels, here);
    conv_in_vectors<T>(where, x, halo, weight, given_dy, here); // refused here, not after an exchange
    require_apart_from_inputs<T>(where, std::array{operand("edge", edge)}, x, halo, weight, bias, here);
    require_apart(where, std::array{operand("edge", edge)}, operands("dy", given_dy), here);
    if (edge.count() * given.channels == 0) return;
    auto const range = named_range<"cpx causal_conv1d_backward_edge">();
    with_activation(act, [&](auto silu) {
        launch_convolution(kernels::causal_conv1d_edge<T, silu, std::remove_const_t<decltype(from)>>,
                           (given.channels + 127) / 128 * edge.count(), dim3(128), in, here, given, from,
                           plan.edge_places(), conv_view(edge));
    });
}

/// What the backward of a convolution computes: of bare rows, or of rows with their sharding (see conv_exchange.hpp).
template <conv_element T, class... S>
struct causal_conv1d_gradients;

/// dweight and dbias may be left empty.
///
/// dx: (rows, channels), written. dweight: (channels, K), dbias: (channels), this rank's share, added to what they
/// hold: the gradient is the sum over all ranks. `workspace`, for either of them: at least
/// `causal_conv1d_workspace(plan, channels)` elements at a multiple of 16 bytes.
template <conv_element T>
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
                              detail::cut_backward(plan, plan.most_rows(), channels, vector, parts).most_strip_blocks);
    return blocks * (plan.taps() + 1) * channels;
}

namespace detail {

/// Checks the gradients that the backward writes. Returns whether it adds up dweight or dbias.
template <class T>
bool conv_gradients_given(char const* where, conv_plan const& plan, index_t channels,
                          causal_conv1d_gradients<T> const& to, caller here) {
    require(plan.has_backward(), where, "plan of rows after the segments", "one", "none", here);
    require_rows(where, "dx", to.dx, plan.rows(), channels, here);
    if (to.dweight.data()) require_rows(where, "dweight", to.dweight, channels, plan.taps(), here);
    require(to.dbias.empty() || std::ssize(to.dbias) == channels, where, "size of dbias", channels, to.dbias.size(),
            here);
    require_memory(where, "dbias", to.dbias, here);
    bool const sums = to.dweight.data() || !to.dbias.empty();
    index_t const wanted = sums ? causal_conv1d_workspace(plan, channels) : 0;
    require(std::ssize(to.workspace) >= wanted, where, "size of the workspace", wanted, to.workspace.size(), here);
    require(vector_bytes({address(to.workspace.data())}) == 16, where, "address of the workspace",
            "a multiple of 16 bytes", "another", here);
    if (wanted > 0) require_memory(where, "workspace", to.workspace, here);
    return sums;
}

/// Throws `cpx::error` if gradients overlap each other or what the backward reads; `dy` is rows or parts.
template <class T, class W, class Dy>
void require_apart_gradients(char const* where, causal_conv1d_gradients<T> const& to, rows<T const> x,
                             rows<T const> halo, rows<W> weight, std::type_identity_t<std::span<W const>> bias,
                             Dy const& dy, caller here) {
    std::array const written{operand("dx", to.dx), operand("dweight", to.dweight), operand("dbias", to.dbias),
                             operand("workspace", to.workspace)};
    require_apart_from_inputs<T>(where, written, x, halo, weight, bias, here);
    require_apart(where, written, operands("dy", dy), here);
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
    using namespace detail;
    using T = std::remove_const_t<A>;
    char const* const where = "cuda::causal_conv1d_backward";
    auto const given_dy = in_form<T const>(dy);
    auto given = conv_given<T>(where, plan, x, halo, weight, bias, here);
    index_t const channels = given.channels;
    bool const sums = conv_gradients_given(where, plan, channels, to, here);
    auto const from = result_given(where, "dy", given_dy, plan.rows(), channels, here);
    require_rows(where, "edge", edge, plan.edge_rows(), channels, here);
    require_rows(where, "dz_halo", dz_halo, plan.dz_halo_rows(), channels, here);
    bool const vectors = conv_in_vectors<T>(where, x, halo, weight, given_dy, here) && in_vectors(to.dx);
    require(vectors || !normalises(given_dy), where, "alignment of dx", "16 bytes, for heads that were normalised",
            "another", here);
    require_apart_gradients<T>(where, to, x, halo, weight, bias, given_dy, here);
    require_apart(where, {{"dx", to.dx}}, {{"edge", edge}, {"dz_halo", dz_halo}}, here);
    if (given.rows * channels == 0) return;
    auto const range = named_range<"cpx causal_conv1d_backward">();
    using dy_type = std::remove_const_t<decltype(from)>;
    kernels::conv_backward<T, dy_type> out{from,
                                           conv_view(to.dx),
                                           conv_view(edge),
                                           conv_view(dz_halo),
                                           plan.edge_rows(),
                                           plan.after(),
                                           sums ? to.workspace.data() : nullptr};
    with_activation(act, [&](auto silu) {
        auto const launch = [&](auto* kernel, int vector) {
            auto const grid =
                cut_backward(plan, plan.rows(), channels, vector,
                             vector > 1 && !std::same_as<std::remove_const_t<decltype(given_dy)>, rows<T const>>);
            given.strip = grid.strip;
            launch_convolution(kernel, grid.blocks, grid.threads, in, here, given, out);
            if (!sums) return;
            index_t const values = (plan.taps() + 1) * channels;
            launch_convolution(kernels::causal_conv1d_add_sums<>, (values + 127) / 128, dim3(128), in, here, out.sums,
                               grid.strip_blocks, given.taps, channels, conv_view(to.dweight),
                               to.dbias.empty() ? nullptr : to.dbias.data());
        };
        constexpr int vector = 16 / static_cast<int>(sizeof(T));
        if (vectors)
            launch(kernels::causal_conv1d_backward<T, 4, vector, silu, dy_type>, vector);
        else
            launch(kernels::causal_conv1d_backward<T, 0, 1, silu, dy_type>, 1);
    });
}

} // namespace cpx::cuda
