// SPDX-License-Identifier: Apache-2.0
// The rectangles that a device makes of lanes and cu_seqlens, made by the same functions on the host.
#include <cpx/plan/lane_rectangles.hpp>

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/sequential.hpp>
#include <cpx/layout/striped.hpp>
#include <cpx/layout/table.hpp>
#include <cpx/layout/zigzag.hpp>
#include <cpx/plan/capacity.hpp>
#include <cpx/plan/edges.hpp>

#include <doctest/doctest.h>

#include <support/erased.hpp>
#include <support/packings.hpp>
#include <support/random.hpp>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

namespace {

using cpx::index_t;
using support::splitmix, support::random_owners, support::lengths;
namespace tables = cpx::detail;

/// What an exchange does: its messages, and which rows its launches copy, in the order of their targets.
struct described {
    std::vector<std::array<index_t, 5>> messages;              ///< direction, peer, buffer, offset, bytes
    std::vector<std::vector<std::array<index_t, 5>>> launches; ///< buffers, bytes, and bytes of a row
    friend bool operator==(described const&, described const&) = default;
};

described describe(tables::message_tables const& t, std::span<tables::rectangle const> list) {
    described d;
    for (auto const* const wires : {&t.sends, &t.receives})
        for (auto const& w : *wires) d.messages.push_back({wires == &t.sends, w.peer, w.buffer, w.offset, w.bytes});
    auto const launch = [&](tables::launch_size size) {
        auto& rows = d.launches.emplace_back();
        index_t slices = 0;
        for (tables::rectangle const& r : list.first(static_cast<std::size_t>(size.rectangles))) {
            CHECK(r.first == slices);
            CHECK((r.rows == 0 || (r.source | r.target | r.source_pitch | r.target_pitch | r.bytes) % r.vector == 0));
            slices += r.slices();
            for (std::int32_t slice = 0; slice < r.slices(); ++slice) {
                tables::rectangle part = r;
                part.take_slice(slice);
                for (index_t i = 0; i < part.rows; ++i)
                    rows.push_back({part.target_buffer, part.target + i * part.target_pitch, part.source_buffer,
                                    part.source + i * part.source_pitch, part.bytes});
            }
        }
        CHECK(slices == size.slices);
        std::ranges::sort(rows);
        list = list.subspan(static_cast<std::size_t>(size.rectangles));
    };
    launch(t.pack), launch(t.keep), launch(t.unpack);
    for (auto const& size : t.add) launch(size);
    CHECK(list.empty());
    return d;
}

/// Checks that lanes give the tables of a plan. Returns whether they tell what moves of its batch.
bool check(cpx::plan const& p, cpx::lane_plan const& lanes, tables::row_shapes const& shape, bool stored = false) {
    std::vector<tables::rectangle> list;
    auto const expected = tables::tables_of(tables::listed_rectangles(p, shape, list), {}, stored);

    std::vector<tables::rectangle> by_lanes(2 * (lanes.sends.size() + lanes.receives.size() + 8) * 8 *
                                            static_cast<std::size_t>(p.batch.sequences() + 1));
    index_t told = 0;
    tables::lane_tables made(p.batch, by_lanes.data());
    tables::lane_work all_work{.lanes = {{}}, .cells = {{}}, .numbers = {{&told, 7, 1, 0}}}; // of another exchange
    for (int before = 0; before < 2; ++before) { // the second of two plans: what it has does not begin at 0
        if (!made.next(lanes, shape)) return false;
        CHECK(made.rows(true) == p.source_rows);
        CHECK(made.rows(false) == p.target_rows);
        auto const got = tables::tables_of(made, {}, stored);
        if (before == 0) continue;
        all_work.add(made.work());
        auto const numbers = all_work.list(p.batch);
        CHECK(std::ssize(numbers) == all_work.size(p.batch));
        auto const& all = *reinterpret_cast<tables::lane_list const*>(numbers.data());
        CHECK(all.numbers == 1);
        CHECK(all.all_numbers()->number == 7);
        for (int job = 0; job < all.jobs; ++job)
            tables::list_lane(all, all.all_jobs()[job], 0, 1, [](index_t n, index_t& total) {
                total += n;
                return index_t{0};
            });
        for (int i = 0; i < 3; ++i) all.put_listed(i, 3);
        CHECK(got.packed == expected.packed);
        CHECK(got.unpacked == expected.unpacked);
        auto const count = static_cast<std::size_t>(made.rectangles());
        auto const second = std::span<tables::rectangle const>(by_lanes).subspan(count / 2, count / 2);
        CHECK((describe(got, second) == describe(expected, list)));
    }
    return stored || check(p, lanes, shape, true);
}

/// Checks that tables of a plan's exchanges in one direction are no more than what a movement reserves that is made for
/// `first`, with room for their batch.
template <class Plan>
void check_room(Plan const& first, Plan const& p, typename cpx::detail::moved<Plan>::width width,
                std::span<cpx::plan const> plans) {
    using kind = cpx::detail::moved<Plan>;
    auto const of = kind::batch_of(p);
    int const ranks = std::get<0>(of).ranks();
    cpx::capacity most{0, std::get<0>(of).batch().sequences()};
    for (int r = 0; r < ranks; ++r)
        most.rows = std::apply([&](auto const&... s) { return std::max({most.rows, s.rows(r)...}); }, of);
    index_t const w = kind::row_width(width);
    auto const room = kind::room(first, width, most, cpx::caller::here());
    auto const sizes = tables::most_tables(room, ranks, 2, cpx::caller::here());
    std::vector<tables::rectangle> list;
    for (bool const stored : {false, true}) {
        list.clear();
        for (cpx::plan const& one : plans) {
            auto const t = tables::tables_of(tables::listed_rectangles(one, {w, w, w + 8, w + 8, 2}, list), {}, stored);
            CHECK(std::max(t.packed, t.unpacked) <= sizes.staged);
        }
        CHECK(std::ssize(list) <= sizes.rectangles);
    }
    CHECK(std::ssize(plans) <= room.exchanges);
}

/// Checks one kind of plan, there and back, with the lanes of another one, of `first`. Returns how many batches lanes
/// told.
template <class Plan>
int check(Plan const& first, Plan const& p, typename cpx::detail::moved<Plan>::width width) {
    using kind = cpx::detail::moved<Plan>;
    int told = 0;
    for (bool const back : {false, true}) {
        if (back && requires { p.to; } && kind::mirrors(p)) continue; // the same lanes, the other way
        auto const lanes = kind::lanes(first, width, back);
        index_t const w = kind::row_width(width);
        kind::exchanges(p, width, back, [&](std::span<cpx::plan const> plans) {
            check_room(first, p, width, plans);
            for (std::size_t i = 0; i < plans.size(); ++i) {
                REQUIRE(lanes.size() >= plans.size());
                index_t const source = plans[i].source_width ? plans[i].source_width : w,
                              target = plans[i].target_width ? plans[i].target_width : w;
                told += check(plans[i], lanes[i], {source, target, source + 8, target, 2});
                told += check(plans[i], lanes[i], {source, target, source, target, 2});
            }
        });
    }
    return told;
}
template <class Plan>
int check(Plan const& p, typename cpx::detail::moved<Plan>::width width) {
    return check(p, p, width);
}

} // namespace

TEST_CASE("slices of a rectangle have each of its bytes once, and no more than 32 KiB or whole elements") {
    splitmix numbers(41);
    for (int round = 0; round < 300; ++round) {
        tables::rectangle r{};
        index_t const element = numbers.between(1, 20);
        bool const adds = round % 2 == 0; // whole elements
        r.rows = static_cast<std::int32_t>(numbers.between(0, 5));
        r.bytes = static_cast<std::int32_t>(element * numbers.between(0, numbers.between(0, 1) ? 9 : 9000));
        r.source_pitch = r.bytes + numbers.between(0, 3) * 64, r.target_pitch = r.bytes + numbers.between(0, 3) * 64;
        r.source = numbers.between(0, 9), r.target = numbers.between(0, 9);
        r.set_vector();
        std::vector<std::array<index_t, 2>> found; // row, byte
        for (std::int32_t i = 0; i < r.slices(); ++i) {
            tables::rectangle part = r;
            part.take_slice(i, static_cast<std::int32_t>(adds ? element : 1));
            CHECK(part.rows * part.bytes < tables::rectangle::slice_bytes + (adds ? element : 1));
            CHECK(part.source - r.source - (part.target - r.target) ==
                  (part.source - r.source) / std::max<index_t>(r.source_pitch, 1) * (r.source_pitch - r.target_pitch));
            if (adds)
                CHECK(part.bytes % element == 0);
            else
                CHECK((part.bytes % r.vector == 0 && (part.source | part.target) % r.vector == 0));
            for (index_t row = 0; row < part.rows; ++row) {
                index_t const at = part.source - r.source + row * r.source_pitch;
                for (index_t byte = 0; byte < part.bytes; ++byte)
                    found.push_back({at / r.source_pitch, at % r.source_pitch + byte});
            }
        }
        bool whole = std::ssize(found) == index_t{r.rows} * r.bytes;
        for (std::size_t i = 0; whole && i < found.size(); ++i) {
            auto const at = static_cast<index_t>(i);
            whole = found[i] == std::array<index_t, 2>{at / r.bytes, at % r.bytes};
        }
        CHECK(whole);
    }
}

TEST_CASE("tables made of lanes and cu_seqlens are those of the host's plans, of any packing") {
    splitmix numbers(29);
    int relayouts = 0, halos = 0, edges = 0, carries = 0, scans = 0;
    for (int round = 0; round < 120; ++round) {
        int const ranks = static_cast<int>(numbers.between(1, 5));
        std::vector<index_t> list;
        index_t const least = numbers.between(0, 1) * 90;
        for (index_t s = numbers.between(0, 9); s > 0; --s)
            list.push_back(numbers.between(0, 4) == 0 ? 0 : least + numbers.between(0, 150));
        auto const batch = lengths(list);
        index_t const width = numbers.between(1, 40), reach = numbers.between(0, 4);
        int const rank = static_cast<int>(numbers.between(0, ranks - 1));
        cpx::table const owners(ranks, random_owners(numbers, ranks, 2 * ranks + 1));
        CAPTURE(ranks);
        CAPTURE(rank);
        CAPTURE(reach);
        auto const each = [&](auto const& from, auto const& to) {
            relayouts += check(cpx::relayout(from, to, rank), width);
            for (auto const where : {cpx::side::before, cpx::side::after})
                halos += check(cpx::halo(from, rank, reach, where), width);
            auto const after = cpx::halo(from, rank, reach, cpx::side::after);
            edges +=
                check(cpx::edges_of(after).exchange, cpx::edge_lanes(after).at(0), {width, width, width, width, 4});
            index_t const state = width + (round % 3 == 0 ? 20000 : 0); // and rows of several slices
            carries += check(cpx::carry<cpx::serial>(from, rank), {state, 0});
            scans += check(cpx::carry<cpx::scan>(from, rank), {width, numbers.between(0, 3) * width / 2});
        };
        each(cpx::shard(batch, cpx::zigzag<>(ranks)), cpx::shard(batch, cpx::sequential<>(ranks)));
        each(cpx::shard(batch, cpx::sequential<>(ranks)), cpx::shard(batch, owners));
        each(cpx::shard(batch, owners), cpx::shard(batch, cpx::striped<cpx::dynamic, 2>(ranks)));
        each(cpx::shard(batch, cpx::zigzag<>(ranks), cpx::aligned<8>{}),
             cpx::shard(batch, cpx::striped<cpx::dynamic, 3>(ranks), cpx::aligned<8>{}));
    }
    CHECK(relayouts == 120 * 4 * 2);
    CHECK(halos > 500);
    CHECK(edges > 200);
    CHECK(carries > 500);
    CHECK(scans > 500);
}

TEST_CASE(
    "tables of relayouts to heads and back, to all ranks, and of batches cut as one, are the host's of any packing") {
    splitmix numbers(31);
    int told = 0, expected = 0;
    for (int round = 0; round < 150; ++round) {
        int const ranks = static_cast<int>(numbers.between(1, 5)),
                  rank = static_cast<int>(numbers.between(0, ranks - 1));
        auto const packing = [&] {
            std::vector<index_t> list;
            for (index_t s = numbers.between(0, 9); s > 0; --s)
                list.push_back(numbers.between(0, 4) == 0 ? 0 : numbers.between(1, 150));
            return lengths(list);
        };
        auto const first = packing(), batch = packing();
        index_t const groups = numbers.between(1, 8), width = numbers.between(1, 40);
        std::vector<cpx::section> sections{{groups, 16}, {1, numbers.between(1, 8)}, {groups, 2}}; // some on every rank
        if (round % 3 == 0) sections = {{2 * groups, 3}};
        cpx::table const owners(ranks, random_owners(numbers, ranks, 2 * ranks + 1));
        CAPTURE(ranks);
        CAPTURE(rank);
        CAPTURE(groups);
        CAPTURE(support::text(batch));
        auto const each = [&](auto const& from, auto const& to) {
            bool const adds = !cpx::detail::moved<decltype(cpx::relayout(from(batch), to(batch), rank))>::mirrors(
                cpx::relayout(from(batch), to(batch), rank));
            told +=
                check(cpx::relayout(from(first), to(first), rank), cpx::relayout(from(batch), to(batch), rank), width);
            expected += adds ? 4 : 2;
        };
        auto const heads = [&](cpx::thd const& b) { return cpx::head_sharded<>(ranks, b, sections); };
        auto const all = [&](cpx::thd const& b) { return cpx::replicated<>(ranks, b); };
        auto const zigzag = [&](cpx::thd const& b) { return cpx::shard(b, cpx::zigzag<>(ranks)); };
        auto const aligned = [&](cpx::thd const& b) {
            return cpx::shard(b, cpx::sequential<>(ranks), cpx::aligned<8>{});
        };
        auto const striped = [&](cpx::thd const& b) {
            return cpx::shard<cpx::scope::batch>(b, cpx::striped<cpx::dynamic, 3>(ranks));
        };
        auto const dealt = [&](cpx::thd const& b) { return cpx::shard<cpx::scope::batch>(b, owners); };
        each(zigzag, heads), each(heads, zigzag);
        each(heads, aligned), each(dealt, heads), each(heads, striped);
        each(zigzag, all), each(all, striped), each(all, zigzag);
        each(striped, dealt);
    }
    CHECK(told == expected);
}

TEST_CASE("plans of batches that are cut as one are those of shardings that say nothing of their layout") {
    splitmix numbers(37);
    for (int round = 0; round < 100; ++round) {
        int const ranks = static_cast<int>(numbers.between(1, 5));
        std::vector<index_t> list;
        for (index_t s = numbers.between(0, 9); s > 0; --s) list.push_back(numbers.between(0, 40));
        auto const batch = lengths(list);
        cpx::table const owners(ranks, random_owners(numbers, ranks, 2 * ranks + 1));
        CAPTURE(support::text(batch));
        auto const each = [&](auto const& cut) {
            auto const from = cpx::shard<cpx::scope::batch>(batch, cpx::zigzag<>(ranks), cut);
            auto const to = cpx::shard<cpx::scope::batch>(batch, owners, cut);
            for (int rank = 0; rank < ranks; ++rank) {
                auto const got = cpx::relayout(from, to, rank);
                auto const walked = cpx::relayout(support::any_tokens(from), support::any_tokens(to), rank);
                CHECK(got.source_rows == walked.source_rows);
                CHECK(got.target_rows == walked.target_rows);
                CHECK(got.sends == walked.sends);
                CHECK(got.receives == walked.receives);
            }
        };
        each(cpx::balanced{});
        each(cpx::aligned<8>{}); // from the beginning of the sequence that is cut, not of the batch
    }
}

TEST_CASE("what is listed and what is one number many times is written where it belongs") {
    std::vector<index_t> place(9);
    std::array<index_t, 3> const listed{5, 6, 7};
    tables::lane_work work{.numbers = {{place.data() + 1, 4, 2, 0}, {place.data() + 8, 0, 0, 0}}};
    work.put(place.data() + 4, std::span<index_t const>(listed));
    work.put(place.data() + 3, std::span<index_t const>(listed).first(1));
    CHECK(work.written(place.data(), 8) == std::vector<index_t>{0, 4, 4, 5, 5, 6, 7, 0});
}

TEST_CASE("a movement to heads reserves what leaves and comes, not all columns of all rows") {
    int const ranks = 8;
    index_t const tokens = 32768, width = 8192; // 64 heads of 128
    cpx::thd const batch({0, tokens});
    auto const plan =
        cpx::relayout(cpx::shard(batch, cpx::zigzag<>(ranks)), cpx::head_sharded<>(ranks, batch, {{64, 128}}), 3);
    auto const room =
        cpx::detail::moved<std::remove_const_t<decltype(plan)>>::room(plan, width, {tokens, 64}, cpx::caller::here());
    CHECK(room.elements >= plan.sent_elements(0));
    CHECK(room.elements <= tokens / ranks * width * 8 / 7); // of its own rows all columns, or of all rows its own
}
