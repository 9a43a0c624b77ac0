// SPDX-License-Identifier: Apache-2.0
// Messages as channels cut them: both ends cut alike, and every byte of the target comes from its place of the source.
#include <cpx/plan/channel_table.hpp>

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/sequential.hpp>
#include <cpx/layout/striped.hpp>
#include <cpx/layout/zigzag.hpp>
#include <cpx/plan/relayout.hpp>

#include <doctest/doctest.h>

#include <support/packings.hpp>
#include <support/random.hpp>

#include <algorithm>
#include <numeric>
#include <vector>

namespace {

using cpx::index_t;
using bytes = std::vector<index_t>;
namespace tables = cpx::detail;

/// Returns, for every byte of a message, where it is on a side: the source, or the target.
bytes places(tables::channel_table const& t, tables::channel_message const& m, bool of_target) {
    bytes all(static_cast<std::size_t>(m.bytes()), -1);
    for (index_t row = 0; row < m.rows; ++row) {
        index_t last = 0;
        while (last + 1 < m.runs && t.runs[static_cast<std::size_t>(m.first_run + last + 1)].first <= row) ++last;
        auto const& run = t.runs[static_cast<std::size_t>(m.first_run + last)];
        index_t const begin = of_target ? run.target + (row - run.first) * m.target_pitch
                                        : run.source + (row - run.first) * m.source_pitch;
        for (index_t c = 0; c < m.columns; ++c) {
            auto const& column = t.columns[static_cast<std::size_t>(m.first_column + c)];
            CHECK((16 % column.vector == 0 && (m.row_bytes | column.place | column.bytes) % column.vector == 0));
            index_t const first = begin + (of_target ? column.target : column.source);
            CHECK(first % column.vector == 0);
            for (index_t b = 0; b < column.bytes; ++b)
                all[static_cast<std::size_t>(row * m.row_bytes + column.place + b)] = first + b;
        }
    }
    return all;
}

/// Moves numbers that say whose and which byte they were, and compares them with what the plans' messages bring.
template <class From, class To>
void check(From const& from, To const& to, index_t width, tables::channel_sizes const& sizes) {
    constexpr index_t element = 2;
    int const ranks = from.ranks();
    std::vector<cpx::plan> plans;
    std::vector<tables::channel_table> made;
    for (int r = 0; r < ranks; ++r) {
        cpx::plan const& p = plans.emplace_back(cpx::relayout(from, to, r));
        index_t const source = p.source_width ? p.source_width : width,
                      target = p.target_width ? p.target_width : width;
        made.emplace_back(p, tables::row_shapes{source, target, source, target, element}, sizes);
    }
    for (int to_rank = 0; to_rank < ranks; ++to_rank)
        for (int from_rank = 0; from_rank < ranks; ++from_rank) {
            CAPTURE(from_rank);
            CAPTURE(to_rank);
            auto const &a = made[static_cast<std::size_t>(from_rank)], &b = made[static_cast<std::size_t>(to_rank)];
            bool const stays = from_rank == to_rank;
            auto const& out = stays ? a.messages.back() : a.messages[static_cast<std::size_t>(to_rank)];
            auto const& in = stays ? a.messages.back() : b.messages[static_cast<std::size_t>(ranks + from_rank)];
            REQUIRE((out.rows == in.rows && out.row_bytes == in.row_bytes));
            if (out.rows == 0) continue;
            CHECK((out.chunk == in.chunk && out.chunk % 16 == 0 && out.chunk <= sizes.slot && out.lanes >= 8));
            index_t chunks = 0;
            for (int c = 0; c < sizes.count; ++c) chunks += out.chunks(c, sizes.count);
            CHECK(chunks == (out.bytes() + out.chunk - 1) / out.chunk);
            auto const listed = [&](std::vector<cpx::message> const& all, int peer, index_t row_width) {
                bytes list;
                auto const m = std::ranges::find(all, peer, &cpx::message::peer);
                auto const columns = m->columns.empty() ? std::vector<cpx::run>{{0, row_width}} : m->columns;
                for (cpx::run const row : m->rows)
                    for (index_t y = row.first; y < row.first + row.count; ++y)
                        for (cpx::run const c : columns)
                            for (index_t x = c.first * element; x < (c.first + c.count) * element; ++x)
                                list.push_back(y * row_width * element + x);
                return list;
            };
            cpx::plan const &p = plans[static_cast<std::size_t>(from_rank)],
                            &q = plans[static_cast<std::size_t>(to_rank)];
            CHECK(places(a, out, false) == listed(p.sends, to_rank, p.source_width ? p.source_width : width));
            CHECK(places(stays ? a : b, in, true) ==
                  listed(q.receives, from_rank, q.target_width ? q.target_width : width));
            if (stays) continue; // else it is packed
            bytes side_by_side(static_cast<std::size_t>(out.bytes()));
            std::iota(side_by_side.begin(), side_by_side.end(), index_t{0});
            CHECK((places(a, out, true) == side_by_side && places(b, in, false) == side_by_side));
        }
}

} // namespace

TEST_SUITE("plan") {
    TEST_CASE("channels cut a message alike at both ends, and know where its bytes belong") {
        support::splitmix numbers(3);
        for (auto const& lengths : std::vector<std::vector<index_t>>{{}, {3}, {5, 0, 1, 64, 77}, {211, 89, 1, 8}}) {
            auto const batch = cpx::thd::from_lengths(lengths);
            CAPTURE(support::text(batch));
            for (int const ranks : {2, 3}) {
                auto const zigzag = cpx::shard(batch, cpx::zigzag<>(ranks));
                auto const whole = cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(ranks));
                auto const striped = cpx::shard(batch, cpx::striped<>(ranks));
                for (tables::channel_sizes const sizes : {tables::channel_sizes{3, 256}, {64, 1 << 16}}) {
                    index_t const width = numbers.between(1, 40);
                    CAPTURE(width);
                    check(zigzag, whole, width, sizes);
                    check(striped, zigzag, 8 * width, sizes);
                    check(whole, cpx::replicated<>(ranks, batch), width, sizes);
                    cpx::head_sharded<> const heads(ranks, batch, {{2 * ranks, width}, {4 * ranks, 3}});
                    check(zigzag, heads, 0, sizes);
                    check(heads, striped, 0, sizes);
                    // of replicas one is sent:
                    check(cpx::head_sharded<>(ranks, batch, {{2 * ranks, width}, {1, 3}}), striped, 0, sizes);
                }
            }
        }
    }
}
