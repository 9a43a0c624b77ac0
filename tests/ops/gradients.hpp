// SPDX-License-Identifier: Apache-2.0
// Gradients against central differences.
#pragma once

#include <ops/bits.hpp>

namespace gradients {

using bits::rows, bits::scattered, bits::size;

/// Returns the sum of the products of all elements, the loss whose gradient with respect to y is `dy`.
inline double loss(rows<double const> y, rows<double const> dy) {
    double total = 0;
    for (size i = 0; i < y.count(); ++i)
        for (size j = 0; j < y.width(); ++j) total += y(i, j) * dy(i, j);
    return total;
}

/// Checks `gradient` against differences of `f()`, whose input `x` is; x is left as it was.
template <class F>
void check(rows<double> x, rows<double const> gradient, F f, double step = 1e-5) {
    scattered<double> differences(x.count(), x.width());
    for (size i = 0; i < x.count(); ++i)
        for (size j = 0; j < x.width(); ++j) {
            double const value = x(i, j);
            x(i, j) = value + step;
            double const above = f();
            x(i, j) = value - step;
            double const below = f();
            x(i, j) = value;
            differences.view()(i, j) = (above - below) / (2 * step);
        }
    CHECK(bits::relative_error<double, double>(gradient, differences) <= 1e-6);
}

} // namespace gradients
