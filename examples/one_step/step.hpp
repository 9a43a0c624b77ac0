// SPDX-License-Identifier: Apache-2.0
// One step on any ranks, whatever their memory: the same function on the host and between GPUs.
#pragma once

#include <cpx/cpx.hpp>
#include <cpx/ops/causal_conv1d.hpp>

#include <array>
#include <numeric>
#include <vector>

namespace one_step {

inline constexpr cpx::index_t channels = 8, taps = 4;
inline cpx::thd const batch({0, 7, 20, 20, 57, 58}); // one sequence is empty, one has a single token

/// Appends whole numbers from -2 to 2: those of elements [first, last) of the whole.
inline void append_numbers(cpx::index_t first, cpx::index_t last, std::vector<float>& to) {
    for (cpx::index_t i = first; i < last; ++i) to.push_back(static_cast<float>(i * i % 11 % 5 - 2));
}
/// Writes them to this rank's rows, the same for a token on whichever rank.
template <class S, class M>
void write_numbers(cpx::tensor<float, S, M>& x) {
    std::vector<float> values;
    x.sharding().for_each_piece(
        x.rank(), [&](cpx::range piece) { append_numbers(piece.first * x.width(), piece.last * x.width(), values); });
    x.write(values);
}
/// Writes them to a weight, which all ranks have alike.
template <class M>
void write_numbers(cpx::row_buffer<float, M>& weight) {
    std::vector<float> values;
    append_numbers(0, weight.count() * weight.width(), values);
    weight.write(values);
}

/// Returns the sum of the products of the elements that this rank has. Whole numbers: it is exact.
double dot(auto const& a, auto const& b) {
    auto const x = a.read(), y = b.read();
    return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
}
/// Returns the sum of a number over all ranks.
double total(double own, cpx::any_transport auto& comm) {
    auto sum = cpx::make_rows<double>(comm, 1, 1);
    sum.write(std::array{own});
    cpx::sum_over_ranks(sum.elements(), comm);
    return sum.read().front();
}

/// A relayout, a convolution and the backward of both. Returns a checksum of the gradients.
template <cpx::any_transport Comm>
double step(Comm& comm) {
    auto const zigzag = cpx::shard(batch, cpx::zigzag<>(comm.ranks()));         // where attention has left its rows
    auto const sequential = cpx::shard(batch, cpx::sequential<>(comm.ranks())); // where the convolution wants them
    auto const before = cpx::halo(sequential, comm.rank(), taps - 1);
    auto const after = cpx::halo(sequential, comm.rank(), taps - 1, cpx::side::after);
    auto x = cpx::make_tensor<float>(zigzag, comm, channels); // in this rank's memory, host or device
    auto y = cpx::make_tensor<float>(sequential, comm, channels);
    auto dlocal = cpx::make_tensor<float>(sequential, comm, channels);
    auto weight = cpx::make_rows<float>(comm, channels, taps), dweight = cpx::make_rows<float>(comm, channels, taps);
    write_numbers(x);
    write_numbers(weight);

    auto const local = cpx::exchange(x, sequential, comm); // moves the rows whose owner changes, and only those
    cpx::causal_conv1d(before, local, weight.view(), {}, cpx::activation::none, y, comm);
    auto const& dy = y; // the gradient of y^2 / 2
    cpx::causal_conv1d_backward(before, after, local, weight.view(), {}, cpx::activation::none, dy,
                                cpx::causal_conv1d_gradients{dlocal, dweight.view()}, comm);
    auto const dx = cpx::exchange(dlocal, zigzag, comm); // the backward of a relayout is the one back
    cpx::sum_over_ranks(dweight.elements(), comm);
    return total(dot(dx, x), comm) + dot(dweight, weight);
}

} // namespace one_step
