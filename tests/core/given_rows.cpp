// SPDX-License-Identifier: Apache-2.0
#include <cpx/core/given_rows.hpp>

#include <doctest/doctest.h>

#include <support/rejects.hpp>

using list = std::vector<int>;
using cpx::given_rows, cpx::guess_rows, support::rejects;

TEST_SUITE("core") {
    // miles, tests/fast/test_qwen3_vl_cp_mrope.py: local length, ranks, offsets of the whole batch.
    TEST_CASE("rows are a rank's where the batch has W times as many") {
        struct packed {
            int rows, ranks;
            list offsets;
        };
        for (packed const& p : std::vector<packed>{{24, 2, {0, 12, 20, 36, 48}},
                                                   {16, 2, {0, 16, 32}},
                                                   {24, 4, {0, 24, 40, 72, 80, 96}},
                                                   {8, 2, {0, 4, 16}},
                                                   {16, 4, {0, 40, 64}},
                                                   {8, 2, {0, 8, 16}}}) {
            CHECK(guess_rows(p.rows, p.ranks, p.offsets) == given_rows::shard);
            CHECK(guess_rows(p.offsets.back(), p.ranks, p.offsets) == given_rows::whole);
            CHECK(guess_rows(p.offsets.back(), 1, p.offsets) == given_rows::whole);
        }
        CHECK(guess_rows(6, 1, list{0, 3, 6}) == given_rows::whole); // one rank needs no multiples of 2
        CHECK(guess_rows(12, 2, list{0, 8, 12}, list{0, 7, 10}) == given_rows::whole);
        CHECK(guess_rows(6, 2, list{0, 8, 12}, list{0, 7, 10}) == given_rows::shard);
    }

    // The last of miles' cases, and those of NeMo Megatron-Bridge's unit tests that it refuses.
    TEST_CASE("where the guess may be wrong, an error says why") {
        rejects({"given_rows.cpp", "guess_rows: length of sequence 0, of which every rank has a share: expected a "
                                   "multiple of 4, got 6"},
                [] {
                    guess_rows(3, 2, list{0, 6});
                });
        rejects({"guess_rows: number of valid offsets: expected 3, got 2"}, [] {
            guess_rows(4, 2, list{0, 2, 4}, list{0, 2});
        });
        rejects({"guess_rows: length of sequence 0, of which", "a multiple of 4, got 5"}, [] {
            guess_rows(4, 2, list{0, 5, 8}, list{0, 3, 5});
        });
        rejects({"guess_rows: offset 0: expected 0, got 2"}, [] { guess_rows(4, 2, list{2, 6}); });
        rejects({"guess_rows: rows: expected at least 1, for none may be whole or a rank's, got 0"}, [] {
            guess_rows(0, 2, list{0, 0});
        });
        rejects({"guess_rows: last offset: expected the rows 5, or 2 times as many, got 16"}, [] {
            guess_rows(5, 2, list{0, 8, 16});
        });
        for (int const rows : {12, 6}) // padded sequences of 8 and 4 rows, by the offsets of their valid tokens
            rejects({"guess_rows: last offset, which may be that of valid tokens: expected the rows", "got 10"}, [&] {
                guess_rows(rows, 2, list{0, 7, 10});
            });
        rejects(
            {"guess_rows: valid tokens of sequence 0, whose offsets may have changed places: expected 0 to its padded "
             "length 7, got 8"},
            [] {
                guess_rows(12, 2, list{0, 7, 10}, list{0, 8, 12});
            });
        rejects({"guess_rows: valid offset 0: expected 0, got 4"}, [] { guess_rows(16, 2, list{0, 16}, list{4, 16}); });
        rejects({"guess_rows: ranks"}, [] { guess_rows(4, 0, list{0, 4}); });
        rejects({"guess_rows: number of offsets"}, [] { guess_rows(4, 2, list{}); });
        rejects({"given_rows.cpp", "thd: offset 2 decreases"}, [] { guess_rows(4, 2, list{0, 4, 3}); });
    }
}
