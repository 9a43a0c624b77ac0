// SPDX-License-Identifier: Apache-2.0
#include <cpx/plan/route.hpp>

#include <cpx/cpx.hpp>

#include <doctest/doctest.h>

#include <support/packings.hpp>

namespace {

using namespace support;
using cpx::index_t;
using cpx::route;
using cpx::sequential;
using cpx::striped;
using cpx::zigzag;

// What one exchange between zigzag and sequential takes, counted by hand from the owners 0 1 2 3 3 2 1 0 and 0 0 1 1
// 2 2 3 3.
static_assert(cpx::cells(zigzag<4>{}, sequential<4>{}) == 8);
static_assert(cpx::routes<zigzag<4>, sequential<4>>().size() == 6);
static_assert(cpx::routes<zigzag<4>, sequential<4>>()[0] == route{1, 0, 1, 2});
static_assert(cpx::routes<zigzag<4>, sequential<4>>()[1] == route{2, 1, 2, 3});
static_assert(cpx::routes<zigzag<4>, sequential<4>>()[2] == route{3, 1, 3, 4});
static_assert(cpx::routes<zigzag<4>, sequential<4>>()[3] == route{3, 2, 4, 5});
static_assert(cpx::routes<zigzag<4>, sequential<4>>()[4] == route{1, 3, 6, 7});
static_assert(cpx::routes<zigzag<4>, sequential<4>>()[5] == route{0, 3, 7, 8});
static_assert(cpx::route_messages<zigzag<4>, sequential<4>>() == 6);
static_assert(cpx::routes<zigzag<2>, sequential<2>>()[0] == route{1, 0, 1, 2});
static_assert(cpx::routes<zigzag<2>, sequential<2>>()[1] == route{0, 1, 3, 4});
static_assert(cpx::route_messages<zigzag<3>, sequential<3>>() == 4); // rank 2 sends both of its halves to rank 1

// Layouts over one rank, and a layout and itself, exchange nothing.
static_assert(cpx::routes<zigzag<1>, sequential<1>>().empty());
static_assert(cpx::routes<zigzag<5>, zigzag<5>>().empty());
static_assert(cpx::route_messages<striped<7>, striped<7>>() == 0);
static_assert(cpx::cells(striped<3, 4>{}, zigzag<3>{}) == 12);
static_assert(cpx::cells(striped<2, 3>{}, zigzag<2>{}) == 12);

/// Half-chunks that change hands between zigzag and sequential: 2W - 1, less 1 where the half of some rank stays in
/// place.
template <int W>
constexpr std::size_t half_chunks = cpx::routes<zigzag<W>, sequential<W>>().size();
template <int... W>
constexpr bool all_move_what_they_must = ((half_chunks<W> == 2 * W - 1 - (W % 3 != 0)) && ...);
static_assert(all_move_what_they_must<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 32>);
static_assert(half_chunks<2> == 2 && half_chunks<3> == 5 && half_chunks<4> == 6 && half_chunks<5> == 8 &&
              half_chunks<8> == 14 && half_chunks<16> == 30);

/// The front half of rank r goes to floor(r / 2), its back half to W - 1 - floor(r / 2).
template <int W>
constexpr bool halves_go_where_they_must() {
    constexpr auto moved = cpx::routes<zigzag<W>, sequential<W>>();
    for (route const& r : moved)
        if (r.to != (r.first < W ? r.from / 2 : W - 1 - r.from / 2)) return false;
    return true;
}
static_assert(halves_go_where_they_must<2>() && halves_go_where_they_must<3>() && halves_go_where_they_must<4>() &&
              halves_go_where_they_must<8>() && halves_go_where_they_must<13>());

/// Nobody sends to more than two ranks, or receives from more than two.
template <int W>
constexpr bool at_most_two_peers() {
    constexpr auto moved = cpx::routes<zigzag<W>, sequential<W>>();
    for (int rank = 0; rank < W; ++rank) {
        int sends = 0, receives = 0;
        for (route const& r : moved) {
            sends += r.from == rank;
            receives += r.to == rank;
        }
        if (sends > 2 || receives > 2) return false;
    }
    return true;
}
static_assert(at_most_two_peers<2>() && at_most_two_peers<3>() && at_most_two_peers<8>() && at_most_two_peers<16>());

/// The way back has the same cells, with the ranks swapped.
template <class A, class B>
constexpr bool reversed() {
    constexpr auto there = cpx::routes<A, B>();
    constexpr auto back = cpx::routes<B, A>();
    if (there.size() != back.size()) return false;
    for (std::size_t i = 0; i < there.size(); ++i)
        if (back[i] != route{there[i].to, there[i].from, there[i].first, there[i].last}) return false;
    return true;
}
static_assert(reversed<zigzag<4>, sequential<4>>() && reversed<striped<3>, zigzag<3>>());
static_assert(reversed<striped<4, 3>, striped<4, 2>>() && reversed<sequential<6>, striped<6>>());

/// Compares the routes, scaled by every length, with the rows that plans move.
template <class A, class B>
void check_scaled(cpx::thd const& batch) {
    constexpr auto moved = cpx::routes<A, B>();
    constexpr index_t cells = cpx::cells(A{}, B{});
    int const ranks = A{}.ranks();
    std::vector<index_t> rows(static_cast<std::size_t>(ranks * ranks));
    for (index_t s = 0; s < batch.sequences(); ++s)
        for (route const& r : moved)
            rows[static_cast<std::size_t>(r.from * ranks + r.to)] +=
                batch.length(s) * r.last / cells - batch.length(s) * r.first / cells;
    auto const a = cpx::shard(batch, A{});
    auto const b = cpx::shard(batch, B{});
    auto planned = cpx::traffic(a, b);
    for (int r = 0; r < ranks; ++r) planned[static_cast<std::size_t>(r * ranks + r)] = 0;
    CHECK(planned == rows);
    index_t messages = 0;
    for (int r = 0; r < ranks; ++r) messages += cpx::relayout(a, b, r).messages();
    CHECK(messages <= cpx::route_messages<A, B>());
    if (batch.sequences() > 0 && batch.length(0) >= cells) CHECK(messages == cpx::route_messages<A, B>());
}

template <int W>
void check_all_scaled(cpx::thd const& batch) {
    check_scaled<zigzag<W>, sequential<W>>(batch);
    check_scaled<sequential<W>, zigzag<W>>(batch);
    check_scaled<zigzag<W>, striped<W>>(batch);
    check_scaled<striped<W, 3>, sequential<W>>(batch);
    check_scaled<striped<W, 2>, striped<W, 3>>(batch);
}

TEST_SUITE("plan") {
    TEST_CASE("lengths only scale the routes") {
        for (auto const& list : std::vector<std::vector<index_t>>{
                 {}, {0}, {1}, {240}, {241}, {7, 13, 0, 999, 2}, {120, 120}, {360, 5}, {3, 3, 3}}) {
            check_all_scaled<1>(lengths(list));
            check_all_scaled<2>(lengths(list));
            check_all_scaled<3>(lengths(list));
            check_all_scaled<4>(lengths(list));
            check_all_scaled<5>(lengths(list));
        }
    }
}

} // namespace
