// SPDX-License-Identifier: Apache-2.0
// The smallest program that uses cpx: something computed when it is compiled, something thrown when it runs.
#include <cpx/cpx.hpp>

#include <cstdio>

static_assert(cpx::extent<4>().get() == 4);

int main() {
    try {
        cpx::require(false, "consumer", "an expected error", 1, 2);
    } catch (cpx::error const& error) {
        std::puts(error.what());
        return 0;
    }
    return 1;
}
