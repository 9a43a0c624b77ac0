// SPDX-License-Identifier: Apache-2.0
// Sizes that a caller names: products that do not wrap, and memory that may not be there.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>

#include <initializer_list>
#include <new>
#include <vector>

namespace cpx::detail {

/// What every count of tokens, elements and bytes is less than, so that the sum of two does not wrap.
inline constexpr index_t size_limit = index_t{1} << 62;

/// Throws the error of `product`; apart, because a constant expression builds no text.
[[noreturn]] inline void bad_product(char const* where, char const* what, std::initializer_list<index_t> factors,
                                     caller here) {
    std::string text;
    bool negative = false;
    for (index_t const factor : factors) {
        text += (text.empty() ? "" : " x ") + std::to_string(factor);
        negative = negative || factor < 0;
    }
    throw error(where, what, negative ? "not negative" : "less than 2^62", text, here);
}

/// Returns the product of counts. Throws `cpx::error` that shows them if one is negative, or it or the product is not
/// below `size_limit`. `what` names the product.
constexpr index_t product(char const* where, char const* what, std::initializer_list<index_t> factors,
                          caller here = caller::here()) {
    index_t result = 1;
    bool zero = false, fits = true;
    for (index_t const factor : factors) {
        fits = fits && factor >= 0 && factor < size_limit;
        zero = zero || factor == 0;
    }
    if (zero && fits) return 0;
    for (index_t const factor : factors) {
        fits = fits && result <= (size_limit - 1) / factor;
        if (!fits) bad_product(where, what, factors, here);
        result *= factor;
    }
    return result;
}

/// Returns as many zeros as the product of `counts`, such as rows and their width.
///
/// Throws `cpx::error` that shows them and the bytes if they are no size, or more than the system gives.
template <class T>
std::vector<T> zeros(char const* where, std::initializer_list<index_t> counts, caller here = caller::here()) {
    index_t const count = product(where, "elements", counts, here);
    index_t const bytes = product(where, "bytes", {count, static_cast<index_t>(sizeof(T))}, here);
    try {
        return std::vector<T>(static_cast<std::size_t>(count));
    } catch (std::bad_alloc const&) {
        throw error(where, "memory", std::to_string(bytes) + " bytes", "less than that", here);
    }
}

} // namespace cpx::detail
