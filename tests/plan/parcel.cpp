// SPDX-License-Identifier: Apache-2.0
// Messages as bytes of buffers: packed, unpacked and copied.
#include <cpx/plan/parcel.hpp>

#include <doctest/doctest.h>

#include <support/random.hpp>

#include <algorithm>
#include <numeric>
#include <vector>

namespace {

using cpx::index_t;
using elements = std::vector<std::uint16_t>;

/// Returns disjoint ascending runs of the given counts among `all` places, at random.
std::vector<cpx::run> spread(support::splitmix& random, std::vector<index_t> const& counts, index_t all) {
    index_t left = all - std::accumulate(counts.begin(), counts.end(), index_t{0}), next = 0;
    std::vector<cpx::run> runs;
    for (index_t const count : counts) {
        index_t const gap = random.between(0, left);
        runs.push_back({next + gap, count});
        next += gap + count;
        left -= gap;
    }
    return runs;
}

std::vector<index_t> counts(support::splitmix& random, index_t most) {
    std::vector<index_t> list;
    for (index_t n = random.between(1, most); n > 0; --n) list.push_back(random.between(0, 4));
    return list;
}

/// The columns of a row of `width` elements that a message names.
std::vector<index_t> places(std::vector<cpx::run> const& runs, index_t width) {
    std::vector<index_t> list;
    for (cpx::run const r : runs.empty() ? std::vector<cpx::run>{{0, width}} : runs)
        for (index_t i = 0; i < r.count; ++i) list.push_back(r.first + i);
    return list;
}

} // namespace

TEST_SUITE("plan") {
    TEST_CASE("what is packed and unpacked, or copied, is each place of one end at the same one of the other") {
        support::splitmix random(41);
        for (int round = 0; round < 500; ++round) {
            auto const row_counts = counts(random, 4), column_counts = counts(random, 3);
            bool const whole = random.between(0, 2) == 0;
            index_t const shared = random.between(1, 9); // width of whole rows
            struct end {
                index_t rows, width, stride;
                elements values;
                std::vector<cpx::message> messages;
            } ends[2];
            for (end& e : ends) {
                auto const total = [](std::vector<index_t> const& list) {
                    return std::accumulate(list.begin(), list.end(), index_t{0});
                };
                e.rows = total(row_counts) + random.between(0, 5);
                e.width = whole ? shared : std::max<index_t>(1, total(column_counts) + random.between(0, 5));
                e.stride = e.width + random.between(0, 1) * random.between(0, 3);
                e.values.resize(static_cast<std::size_t>(e.rows * e.stride));
                auto columns = whole ? std::vector<cpx::run>() : spread(random, column_counts, e.width);
                e.messages = {{1, spread(random, row_counts, e.rows), std::move(columns)}};
            }
            auto& [from, to] = ends;
            for (auto& value : from.values) value = static_cast<std::uint16_t>(random.between(1, 60000));
            elements expected = to.values;
            auto const rows_from = places(from.messages[0].rows, 0), rows_to = places(to.messages[0].rows, 0),
                       columns_from = places(from.messages[0].columns, from.width),
                       columns_to = places(to.messages[0].columns, to.width);
            for (std::size_t r = 0; r < rows_from.size(); ++r)
                for (std::size_t c = 0; c < columns_from.size(); ++c)
                    expected[static_cast<std::size_t>(rows_to[r] * to.stride + columns_to[c])] =
                        from.values[static_cast<std::size_t>(rows_from[r] * from.stride + columns_from[c])];

            auto const view = [](end& e) { return cpx::rows(e.values.data(), e.rows, e.width, e.stride); };
            auto const send = cpx::detail::parcels<std::byte const>(from.messages, view(from)).at(0);
            auto const receive = cpx::detail::parcels<std::byte>(to.messages, view(to)).at(0);
            CHECK(send.peer == 1);
            CHECK(send.bytes() == receive.bytes());
            CHECK(send.bytes() == static_cast<index_t>(rows_from.size() * columns_from.size() * 2));
            elements const untouched = to.values;
            cpx::copy(send, receive);
            CHECK(to.values == expected);
            to.values = untouched;
            std::vector<std::byte> packed(static_cast<std::size_t>(send.bytes()));
            cpx::pack(send, packed.data());
            cpx::unpack(packed.data(), receive);
            CHECK(to.values == expected);
        }
    }

    TEST_CASE("a rank's message to itself is taken out of the others, and runs are laid side by side") {
        elements values(12);
        std::vector<cpx::message> const messages{{0, {{0, 1}}, {}}, {2, {{1, 1}}, {}}, {3, {{2, 1}}, {}}};
        auto list = cpx::detail::parcels<std::byte>(messages, cpx::rows(values.data(), 3, 4));
        CHECK(cpx::detail::take_own(list, 1).bytes() == 0);
        CHECK(list.size() == 3);
        auto const own = cpx::detail::take_own(list, 2);
        CHECK(own.peer == 2);
        CHECK(own.bytes() == 8);
        CHECK(list.size() == 2);
        CHECK(list[1].peer == 3);
        CHECK(cpx::detail::side_by_side({{5, 2}, {9, 1}, {40, 3}}) == std::vector<cpx::run>{{0, 2}, {2, 1}, {3, 3}});
    }
}
