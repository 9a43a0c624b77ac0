// SPDX-License-Identifier: Apache-2.0
// How far results are from those of a reference file.
#pragma once

#include <cpx/core/error.hpp>

#include <cmath>
#include <string>
#include <vector>

namespace examples {

/// Returns |x - reference| / |reference| in the 2-norm, or |x - reference| if the reference is zero; NaN if x has one.
template <class T>
double relative_error(std::vector<T> const& x, std::vector<double> const& reference) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < reference.size(); ++i) {
        double const d = static_cast<double>(x[i]) - reference[i];
        difference += d * d;
        norm += reference[i] * reference[i];
    }
    return std::sqrt(norm > 0 ? difference / norm : difference);
}

/// Throws `cpx::error` that names the file unless `figure` is a number: a NaN is no agreement.
inline double number(double figure, std::string const& file, std::string const& what) {
    cpx::require(std::isfinite(figure), file.c_str(), what.c_str(), "a number",
                 "nan or infinity: the file, the model or the result has one");
    return figure;
}

} // namespace examples
