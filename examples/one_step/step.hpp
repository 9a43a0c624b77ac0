// SPDX-License-Identifier: Apache-2.0
// One step on any ranks, whatever their memory: the same function on the host and between GPUs.
#pragma once

#include <cpx/cpx.hpp>
#include <cpx/ops/causal_conv1d.hpp>

#include <numeric>
#include <vector>

namespace one_step {

inline constexpr cpx::index_t channels = 8, taps = 4;
inline cpx::thd const batch({0, 7, 20, 20, 57, 58}); // one sequence is empty, one has a single token

/// Writes whole numbers from -2 to 2 to this rank's rows, the same for a token on whichever rank.
template <class S, class M>
void write_numbers(cpx::tensor<float, S, M>& x) {
    std::vector<float> values;
    x.sharding().for_each_piece(x.rank(), [&](cpx::range piece) {
        for (cpx::index_t i = piece.first * x.width(); i < piece.last * x.width(); ++i)
            values.push_back(static_cast<float>(i * i % 11 % 5 - 2));
    });
    x.write(values);
}

/// Returns the sum of the products of all elements of two tensors, on all ranks. Whole numbers: it is exact.
template <class S, class M, cpx::any_transport Comm>
double dot(cpx::tensor<float, S, M> const& a, cpx::tensor<float, S, M> const& b, Comm& comm) {
    auto const x = a.read(), y = b.read();
    bool const counts = !S::every_row || comm.rank() == 0; // what all ranks have counts once
    auto sum = cpx::make_tensor<double>(cpx::replicated<>(comm.ranks(), cpx::thd({0, 1})), comm, 1);
    if (counts) sum.write(std::vector{std::inner_product(x.begin(), x.end(), y.begin(), 0.0)});
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
    cpx::replicated<> const everywhere(comm.ranks(), cpx::thd({0, channels}));
    auto const make = [&](auto const& sharding, cpx::index_t width) { // in this rank's memory, host or device
        return cpx::make_tensor<float>(sharding, comm, width);
    };
    auto x = make(zigzag, channels);
    auto weight = make(everywhere, taps), dweight = make(everywhere, taps);
    auto y = make(sequential, channels), dlocal = make(sequential, channels);
    write_numbers(x);
    write_numbers(weight);

    auto const local = cpx::exchange(x, sequential, comm); // moves the rows whose owner changes, and only those
    cpx::causal_conv1d(before, local, weight.data(), {}, cpx::activation::none, y, comm);
    auto const& dy = y; // the gradient of y^2 / 2
    cpx::causal_conv1d_backward(before, after, local, weight.data(), {}, cpx::activation::none, dy,
                                cpx::causal_conv1d_gradients{dlocal, dweight.data()}, comm);
    auto const dx = cpx::exchange(dlocal, zigzag, comm); // the backward of a relayout is the one back
    cpx::sum_over_ranks(dweight.elements(), comm);
    return dot(dx, x, comm) + dot(dweight, weight, comm);
}

} // namespace one_step
