// SPDX-License-Identifier: Apache-2.0
// Where the chunks and stretches of a batch lie for the gated delta rule's kernels, and in which order stretches come.
#include "words.hpp"

#include <cpx/delta_rule_plan.cuh>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace {

namespace kernels = cpx::kernels;

/// What `delta_rule_plan` makes of sequences of so many tokens, in the room that a launch has for it.
struct planned {
    std::vector<kernels::delta_sequence> sequences;
    std::vector<kernels::delta_stretch> stretches;
    std::vector<int> flags;
    std::vector<std::int64_t> offsets{0}, counts, first;
    int totals[4] = {-1, -1, -1, -1};
    kernels::delta_segments segments{};
    kernels::delta_plan plan{};

    /// `missing`: rows that there are less than tokens. `of_counts`, `of_first`: empty, or as in `delta_segments`.
    planned(kernels::delta_cut const& cut, std::vector<std::int64_t> const& tokens, std::int64_t missing = 0,
            std::vector<std::int64_t> of_counts = {}, std::vector<std::int64_t> of_first = {})
        : sequences(tokens.size()), counts(std::move(of_counts)), first(std::move(of_first)) {
        for (std::int64_t const n : tokens) offsets.push_back(offsets.back() + n);
        auto const count = static_cast<std::int64_t>(tokens.size());
        // a launch's room, which knows no lengths: `cuda::detail::delta_plan_space`
        std::int64_t const rows = offsets.back() - missing, chunks = rows / 64 + 2 * count;
        stretches.resize(static_cast<std::size_t>(chunks / cut.chunks + count * (1 + cut.shorts)), {7, 7, {}});
        flags.resize(8, 7);
        plan = {sequences.data(),
                stretches.data(),
                totals,
                flags.data(),
                8,
                static_cast<int>(count),
                cut,
                rows,
                chunks,
                static_cast<std::int64_t>(stretches.size())};
        auto const list = [](auto const& numbers) { return numbers.empty() ? nullptr : numbers.data(); };
        segments = {offsets.data(), list(first), list(counts)};
        gpu::now().launch({1, 1}, {1024, 1}, [&] { kernels::delta_rule_plan(segments, plan); });
    }

    /// Returns the sequence of a chunk, found without the plan.
    kernels::delta_sequence at(int chunk) const {
        kernels::delta_sequence found{};
        gpu::now().launch({1, 1}, {32, 1}, [&] {
            auto const own = kernels::delta_sequence_at(segments, plan, chunk);
            if (threadIdx.x == 31) found = own;
        });
        return found;
    }
};

/// Checks that every stretch is in the list once, and that those of a sequence are all of it, as long as the cut says,
/// and but for the last in order.
void check(kernels::delta_cut const& cut, std::vector<std::int64_t> const& tokens) {
    CAPTURE(cut.chunks);
    CAPTURE(cut.shorts);
    CAPTURE(cut.multiprocessors);
    CAPTURE(cut.heads);
    planned const p(cut, tokens);
    CHECK(p.flags == std::vector<int>(8, 0));
    REQUIRE(p.totals[1] <= static_cast<int>(p.stretches.size()));
    int chunks = 0, stretches = 0;
    for (std::size_t s = 0; s < tokens.size(); ++s) {
        auto const& sequence = p.sequences[s];
        CAPTURE(tokens[s]);
        CHECK(sequence.chunks == (tokens[s] + 63) / 64);
        CHECK(sequence.first_chunk == chunks);
        CHECK(sequence.first_stretch == stretches);
        for (int const chunk : {chunks, chunks + sequence.chunks - 1})
            if (sequence.chunks > 0) {
                auto found = p.at(chunk);
                found.stretches = sequence.stretches, found.first_stretch = sequence.first_stretch;
                CHECK((found == sequence));
            }
        chunks += sequence.chunks, stretches += sequence.stretches;
        std::vector<int> numbers;
        bool has_last = false;
        for (int i = 0; i < p.totals[1]; ++i) {
            auto const& found = p.stretches[static_cast<std::size_t>(i)];
            if (found.sequence != static_cast<int>(s)) continue;
            CHECK((found.of == sequence));
            if (found.number + 1 == sequence.stretches)
                CHECK(!std::exchange(has_last, true));
            else
                numbers.push_back(found.number);
        }
        CHECK(has_last);
        REQUIRE(static_cast<int>(numbers.size()) == sequence.stretches - 1);
        int begin = 0;
        for (int k = 0; k + 1 < sequence.stretches; ++k) {
            CHECK(numbers[static_cast<std::size_t>(k)] == k);
            CHECK(cut.begin(k, sequence.stretches) == begin);
            int const length = sequence.stretches - 1 - k > cut.shorts ? cut.chunks : kernels::delta_cut::short_chunks;
            CHECK(cut.length(k, sequence.stretches) == length);
            begin += length;
            CHECK(p.plan.end_of(sequence, k) == begin);
            for (int const chunk : {begin - length, begin - 1}) // it begins before what follows its first chunk
                CHECK(cut.begun(chunk + 1, sequence.stretches) == k + 1);
        }
        CHECK(cut.begin(sequence.stretches - 1, sequence.stretches) == begin);
        CHECK(cut.length(sequence.stretches - 1, sequence.stretches) >= sequence.chunks - begin); // a walk's end
        CHECK(p.plan.end_of(sequence, sequence.stretches - 1) == sequence.chunks);
        if (sequence.chunks > 0) CHECK(begin < sequence.chunks);
    }
    CHECK(p.totals[0] == chunks);
    CHECK(p.totals[1] == stretches);
    CHECK(p.totals[2] == 0);
    CHECK(p.totals[3] == 0);
    CHECK(p.at(chunks).chunks == 0);
    for (std::size_t i = static_cast<std::size_t>(stretches); i < p.stretches.size(); ++i)
        CHECK(p.stretches[i].sequence == -1);
}

} // namespace

TEST_SUITE("cuda_on_cpu") {
    TEST_CASE("every stretch of a batch has its place in the order of the delta rule's kernels, however it is cut") {
        for (int const multiprocessors : {0, 13, 132})
            for (int const heads : {1, 32, 48})
                for (auto const& [chunks, shorts] : {std::pair(1, 0), {16, 0}, {20, 3}, {36, 1}, {64, 8}}) {
                    kernels::delta_cut const cut{chunks, shorts, multiprocessors, heads, 2};
                    check(cut, {64 * 300 + 1});
                    check(cut, {64 * 100, 0, 1, 64 * 170, 64 * 16, 64 * 17});
                }
    }

    TEST_CASE("stretches of many sequences come one sequence after the other") {
        constexpr auto most = static_cast<std::size_t>(kernels::delta_plan::most_ordered);
        for (std::size_t const count : {most, most + 1, 3 * most}) {
            std::vector<std::int64_t> tokens;
            for (std::size_t s = 0; s < count; ++s)
                tokens.push_back(s % 7 == 3 ? 64 * 40 : static_cast<std::int64_t>(s));
            planned const p({16}, tokens);
            std::vector<int> seen;
            for (int i = 0, in_order = 0; i < p.totals[1]; ++i) {
                auto const& found = p.stretches[static_cast<std::size_t>(i)];
                REQUIRE(found.sequence >= 0);
                auto const& sequence = p.sequences[static_cast<std::size_t>(found.sequence)];
                CHECK((found.of == sequence));
                seen.push_back(sequence.first_stretch + found.number);
                in_order += seen.back() == i;
                if (i + 1 == p.totals[1]) CHECK((in_order == p.totals[1]) == (count > most));
            }
            std::sort(seen.begin(), seen.end());
            for (std::size_t i = 0; i < seen.size(); ++i) CHECK(seen[i] == static_cast<int>(i)); // each one once
        }
    }

    TEST_CASE("a batch for which there is no room traps before it is written elsewhere") {
        kernels::delta_cut const cut{16, 0, 132, 32, 2};
        std::vector<std::int64_t> const tokens{64 * 100, 0, 1, 64 * 16};
        planned const fits(cut, tokens, 0, tokens);
        CHECK(fits.totals[0] == 117);
        CHECK_THROWS_WITH_AS(planned(cut, tokens, 1), "thread 3: trap", std::logic_error); // a row too many
        CHECK_THROWS_AS(planned(cut, {64, -65}), std::logic_error);                        // before the first
        CHECK_THROWS_AS(planned(cut, {100, -50, 150}), std::logic_error);                  // back
        CHECK_THROWS_AS(planned(cut, {100, 0, 0}, 0, {100, -1, 0}), std::logic_error);     // fewer than none
        CHECK_THROWS_AS(planned(cut, {(std::int64_t{1} << 32) + 10, 10 - (std::int64_t{1} << 32)}), std::logic_error);
        CHECK_THROWS_AS(planned(cut, {0, 0, 200}, 0, {200, 1, 0}), std::logic_error); // overlap by one, with room
        CHECK(planned(cut, {0, 0, 200}, 0, {100, 0, 100}).totals[0] == 4);            // as many as there are
        std::vector<std::int64_t> const all(4, 64 * 100);                             // that overlap
        CHECK_THROWS_AS(planned(cut, {0, 0, 0, 64 * 100}, 0, all), std::logic_error);
    }

    TEST_CASE("what has no rows, or no room, is not found without the plan") {
        planned p({16}, {64 * 3, 64 * 2});
        CHECK(p.at(4).chunks == 2);
        p.plan.most_chunks = 4;
        CHECK(p.at(3).chunks == 2);
        CHECK(p.at(4).chunks == 0);
        p.plan.rows -= 1;
        CHECK(p.at(2).chunks == 3);
        CHECK(p.at(3).chunks == 0);
        p.offsets[0] = -1;
        CHECK(p.at(0).chunks == 0);
    }

    TEST_CASE("segments that begin within a chunk, and leave rows between them, are found without the plan") {
        planned const p({16}, {64 * 3, 0, 70, 64}, 0, {100, 0, 64, 64}, {60, 5, 0, 64 * 7 + 1});
        REQUIRE(p.totals[0] == 3 + 1 + 2);
        for (int chunk = 0, s = 0; chunk < p.totals[0]; ++chunk) {
            while (chunk >= p.sequences[static_cast<std::size_t>(s)].first_chunk +
                                p.sequences[static_cast<std::size_t>(s)].chunks)
                ++s;
            auto const& expected = p.sequences[static_cast<std::size_t>(s)];
            auto found = p.at(chunk);
            found.stretches = expected.stretches, found.first_stretch = expected.first_stretch;
            CHECK((found == expected));
        }
    }

    TEST_CASE("as many sequences as a warp looks at together, some of them empty, are found without the plan") {
        std::vector<std::int64_t> tokens;
        for (int s = 0; s < kernels::delta_segments::few; ++s) tokens.push_back(s % 3 == 0 ? 0 : 37 * s + 1);
        check({16}, tokens);
    }

    TEST_CASE("the last stretch of a sequence is as long as it can be, and comes shortly before the state does") {
        planned const one({36, 4, 132, 32, 2}, {64 * 512}), two({36, 2, 132, 32, 2}, {64 * 256, 64 * 256});
        CHECK(one.sequences[0].stretches == 16); // 11 of 36, 4 of 16, and one of 52
        CHECK(one.plan.cut.begin(15, 16) == 460);
        CHECK(one.stretches[10].number == 15);
        for (auto const& sequence : two.sequences) CHECK(sequence.stretches == 6);      // 116
        for (std::size_t const place : {2, 3}) CHECK(two.stretches[place].number == 5); // after the first ones
        planned const few({16, 0, 132, 8, 2}, {64 * 512}); // whose states take longest: none is longer
        CHECK(few.sequences[0].stretches == 32);
        CHECK(few.stretches[31].number == 31);
    }
}
