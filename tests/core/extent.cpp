// SPDX-License-Identifier: Apache-2.0
#include <cpx/core/extent.hpp>

#include <doctest/doctest.h>

#include <type_traits>

namespace {

static_assert(std::is_empty_v<cpx::extent<4>>);
static_assert(std::is_trivially_copyable_v<cpx::extent<4>> && std::is_trivially_copyable_v<cpx::extent<cpx::dynamic>>);
static_assert(sizeof(cpx::extent<cpx::dynamic>) == sizeof(int));
static_assert(cpx::extent<4>{}.get() == 4);
static_assert(cpx::extent<cpx::dynamic>{7}.get() == 7);
static_assert(cpx::extent<cpx::dynamic>{}.get() == 0);
static_assert(cpx::extent<cpx::dynamic>{3} == cpx::extent<cpx::dynamic>{3});
static_assert(cpx::extent<cpx::dynamic>{3} != cpx::extent<cpx::dynamic>{4});
static_assert(!std::is_convertible_v<int, cpx::extent<cpx::dynamic>>);

struct with_static_size : cpx::extent<3> {
    int other = 0;
};
static_assert(sizeof(with_static_size) == sizeof(int));

TEST_SUITE("core") {
    TEST_CASE("an extent that is known only at run time stores it") {
        int const n = 5;
        CHECK(cpx::extent<cpx::dynamic>{n}.get() == n);
    }
}

} // namespace
