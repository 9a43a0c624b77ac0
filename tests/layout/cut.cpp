// SPDX-License-Identifier: Apache-2.0
#include <cpx/layout/cut.hpp>

#include <doctest/doctest.h>

#include <initializer_list>
#include <type_traits>

namespace {

using cpx::aligned;
using cpx::balanced;
using cpx::index_t;

static_assert(cpx::cut<balanced> && cpx::cut<aligned<>> && cpx::cut<aligned<1>> && cpx::cut<aligned<cpx::dynamic>>);
static_assert(std::is_empty_v<balanced> && std::is_empty_v<aligned<64>> &&
              sizeof(aligned<cpx::dynamic>) == sizeof(int));
static_assert(std::is_same_v<aligned<>, aligned<64>>);
static_assert(!cpx::cut<int>);

static_assert(balanced{}.begin(0, 4, 10) == 0 && balanced{}.begin(1, 4, 10) == 2 && balanced{}.begin(2, 4, 10) == 5 &&
              balanced{}.begin(3, 4, 10) == 7);
static_assert(balanced{}.begin(7, 8, (index_t{1} << 40)) == (index_t{7} << 37));
static_assert(balanced{}.snap(5, 10) == 5);
static_assert(balanced{}.fills(8, 8) && !balanced{}.fills(8, 7) && aligned<64>{}.fills(8, 512) &&
              !aligned<64>{}.fills(8, 511));

// To the nearest multiple, up if two are as near, never beyond the end of the sequence.
static_assert(aligned<64>{}.snap(0, 1000) == 0 && aligned<64>{}.snap(31, 1000) == 0 &&
              aligned<64>{}.snap(32, 1000) == 64);
static_assert(aligned<64>{}.snap(95, 1000) == 64 && aligned<64>{}.snap(96, 1000) == 128);
static_assert(aligned<64>{}.snap(990, 1000) == 960 && aligned<64>{}.snap(995, 1000) == 1000);
static_assert(aligned<64>{}.snap(40, 50) == 50);
static_assert(aligned<3>{}.snap(1, 9) == 0 && aligned<3>{}.snap(2, 9) == 3);
static_assert(aligned<1>{}.snap(17, 100) == 17);
static_assert(aligned<cpx::dynamic>{64}.snap(96, 1000) == 128 && aligned<cpx::dynamic>{64}.unit() == 64);
static_assert(aligned<64>{}.begin(1, 4, 1000) == 250);
static_assert(aligned<cpx::dynamic>{2} != aligned<cpx::dynamic>{3} && aligned<2>{} == aligned<2>{});

/// Cuts ascend from the first token to the last, and chunks differ by one token at most if the cut is balanced.
template <class Cut>
void check_ascent(Cut const& cut, bool even) {
    for (int chunks = 1; chunks <= 16; ++chunks)
        for (index_t n = 0; n <= 40; ++n) {
            index_t previous = 0;
            CHECK(cut.snap(cut.begin(0, chunks, n), n) == 0);
            for (int c = 1; c <= chunks; ++c) {
                index_t const at = c == chunks ? n : cut.snap(cut.begin(c, chunks, n), n);
                if (cut.fills(chunks, n) && at == previous) FAIL("chunk " << c << " of " << chunks << " is empty");
                if (at < previous || at > n) FAIL("chunk " << c << " of " << chunks << ", " << n << " tokens");
                if (even && (at - previous < n / chunks || at - previous > (n + chunks - 1) / chunks))
                    FAIL("chunk " << c << " of " << chunks << " of " << n << " tokens is " << at - previous << " long");
                previous = at;
            }
        }
}

TEST_SUITE("layout") {
    TEST_CASE("chunks of many runs begin where those of one do") {
        for (int const chunks : {1, 2, 3, 7, 64, 1000, 8192, 65535, 65536, 100000}) {
            cpx::detail::balanced_begins const begins(chunks);
            for (index_t const n : {index_t{0}, index_t{1}, index_t{chunks} - 1, index_t{chunks}, index_t{chunks} + 1,
                                    index_t{8 * chunks} - 1, index_t{12345678}, (index_t{1} << 44) - 1}) {
                auto const at = begins.of(n);
                index_t wrong = -1;
                for (int c = 0; c <= chunks; ++c)
                    if (at(c) != balanced{}.begin(c, chunks, n)) wrong = c;
                CHECK_MESSAGE(wrong == -1, chunks << " chunks of " << n);
            }
        }
    }

    TEST_CASE("cuts ascend") {
        check_ascent(balanced{}, true);
        check_ascent(aligned<1>{}, true);
        check_ascent(aligned<2>{}, false);
        check_ascent(aligned<3>{}, false);
        check_ascent(aligned<64>{}, false);
        check_ascent(aligned<cpx::dynamic>{7}, false);
    }
}

} // namespace
