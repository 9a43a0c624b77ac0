// SPDX-License-Identifier: Apache-2.0
#include <cpx/core/thd.hpp>

#include <doctest/doctest.h>

#include <support/rejects.hpp>

#include <array>
#include <limits>
#include <type_traits>

namespace {

using cpx::index_t;
using cpx::thd;
using support::rejects;

using list = std::vector<index_t>;
list copy(std::span<index_t const> values) { return {values.begin(), values.end()}; }

TEST_SUITE("core") {
    TEST_CASE("a batch is described by its offsets") {
        thd const batch(list{0, 8, 20, 20, 21});
        CHECK(batch.sequences() == 4);
        CHECK(batch.tokens() == 21);
        CHECK(batch.offset(1) == 8);
        CHECK(batch.length(1) == 12);
        CHECK(batch.length(2) == 0);
        CHECK(batch.length(3) == 1);
        CHECK(batch.valid(1) == 12);
        CHECK(batch.valid_lengths().empty());
        CHECK(copy(batch.offsets()) == list{0, 8, 20, 20, 21});
    }

    TEST_CASE("an empty batch has no sequences and no tokens") {
        CHECK(thd().sequences() == 0);
        CHECK(thd().tokens() == 0);
        CHECK(thd() == thd(list{0}));
        CHECK(thd(list{0, 0}).sequences() == 1);
        CHECK(thd(list{0, 0}).tokens() == 0);
    }

    TEST_CASE("offsets and lengths come in vectors, arrays and spans of any integers") {
        std::vector<int> const narrow = {0, 5, 12}, valid = {3, 7};
        thd const batch(list{0, 5, 12}), padded(list{0, 5, 12}, list{3, 7});
        CHECK(thd({0, 5, 12}) == batch);
        CHECK(thd({0, 5, 12}, {3, 7}) == padded);
        CHECK(thd({0, 5, 12}, valid) == padded);
        CHECK(thd({0, 5, 12}, std::span(valid)) == padded);
        CHECK(thd({0, 5, 12}, std::array<std::int64_t, 2>{3, 7}) == padded);
        CHECK(thd(narrow) == batch);
        CHECK(thd(narrow, valid) == padded);
        CHECK(thd(std::vector<std::int64_t>{0, 5, 12}) == batch);
        CHECK(thd(std::vector<std::uint32_t>{0, 5, 12}, list{3, 7}) == padded);
        CHECK(thd(std::span(narrow)) == batch);
        CHECK(thd(std::array<short, 3>{0, 5, 12}) == batch);
        CHECK(thd::from_lengths({5, 7}) == batch);
        CHECK(thd::from_lengths(std::vector<int>{5, 7}) == batch);
        CHECK(thd::from_lengths(std::span(narrow).subspan(1)) == thd({0, 5, 17}));
        static_assert(!std::is_convertible_v<std::vector<int>, thd>);
    }

    TEST_CASE("offsets come as int32 or int64, with the rows of the buffer") {
        std::vector<std::int32_t> const narrow = {0, 5, 12};
        std::vector<std::int64_t> const wide = {0, 5, 12}, valid = {3, 7};
        CHECK(thd::from_offsets(narrow) == thd(list{0, 5, 12}));
        CHECK(thd::from_offsets(wide, 12) == thd(list{0, 5, 12}));
        CHECK(thd::from_offsets(std::span<std::int32_t const>(narrow), 100) == thd(list{0, 5, 12}));
        CHECK(thd::from_offsets(wide, -1, valid) == thd(list{0, 5, 12}, list{3, 7}));
        std::array<std::int32_t, 1> const empty = {0};
        CHECK(thd::from_offsets(empty, 0).sequences() == 0);
    }

    TEST_CASE("repeated offsets at the end are sequences without tokens") {
        std::vector<std::int32_t> const padded = {0, 5, 12, 12, 12};
        thd const batch = thd::from_offsets(padded, 16);
        CHECK(batch.sequences() == 4);
        CHECK(batch.length(3) == 0);
        CHECK(batch.tokens() == 12);
    }

    TEST_CASE("batches are made from lengths and from equal lengths") {
        CHECK(thd::from_lengths(list{8, 0, 12}) == thd(list{0, 8, 8, 20}));
        CHECK(thd::from_lengths({}) == thd());
        CHECK(thd::uniform(3, 5) == thd(list{0, 5, 10, 15}));
        CHECK(thd::uniform(0, 5) == thd());
        CHECK(thd::uniform(2, 0) == thd(list{0, 0, 0}));
    }

    TEST_CASE("valid lengths count the tokens that are not padding") {
        thd const batch(list{0, 8, 16, 16}, list{3, 8, 0});
        CHECK(batch.valid(0) == 3);
        CHECK(batch.valid(1) == 8);
        CHECK(batch.length(0) == 8);
        CHECK(copy(batch.valid_lengths()) == list{3, 8, 0});
        CHECK(batch != thd(list{0, 8, 16, 16}));
        CHECK(batch != thd(list{0, 8, 16, 16}, list{3, 7, 0}));
        CHECK(batch == thd(list{0, 8, 16, 16}, list{3, 8, 0}));
        CHECK(thd(list{0, 4}, list{0}).valid(0) == 0); // a sequence that is padding and nothing else
    }

    TEST_CASE("valid lengths that leave no padding are none") {
        CHECK(thd({0, 7, 20}, {7, 13}) == thd({0, 7, 20}));
        CHECK(thd({0, 7, 20}, {7, 13}).valid_lengths().empty());
        CHECK(thd({0, 0}, {0}) == thd({0, 0}));
    }

    TEST_CASE("the sequence of a row is found, also among sequences without tokens") {
        thd const batch(list{0, 0, 3, 3, 3, 7, 7});
        list found;
        for (index_t row = 0; row < batch.tokens(); ++row) found.push_back(batch.sequence(row));
        CHECK(found == list{1, 1, 1, 4, 4, 4, 4});
    }

    TEST_CASE("copies are equal and share their offsets") {
        thd const batch(list{0, 8, 20});
        thd const copied = batch;
        CHECK(copied == batch);
        CHECK(copied.offsets().data() == batch.offsets().data());
        CHECK(batch != thd(list{0, 9, 20}));
    }

    TEST_CASE("a batch of more than 2^33 tokens keeps its numbers") {
        index_t const big = index_t{1} << 40;
        CHECK(thd(list{0, big, big + 3}).length(1) == 3);
        CHECK(thd::uniform(4, big).tokens() == 4 * big);
        CHECK(thd(list{0, big, big + 3}).sequence(big) == 1);
    }

    TEST_CASE("bad offsets are rejected, naming the first bad entry") {
        rejects({"thd: number of offsets: expected at least 1, got 0"}, [] { thd(list{}); });
        rejects({"thd: offset 0: expected 0, got 2"}, [] { thd(list{2, 6}); });
        rejects({"thd: offset 0: expected 0, got -1"}, [] { thd(list{-1, 6}); });
        rejects({"thd: offset 2 decreases: expected at least 8, got 7"}, [] { thd(list{0, 8, 7, 6}); });
        rejects({"thd: offset 1 decreases", "got -4"}, [] { thd(list{0, -4}); });
    }

    TEST_CASE("an error points at the line that makes the batch, whichever way") {
        std::vector<std::int32_t> const narrow = {0, 5, 4};
        auto const at = [](int line) { return "thd.cpp:" + std::to_string(line) + ": thd"; };
        int const line = __LINE__ + 1;
        rejects({at(line + 0)}, [] { thd(list{1}); });
        rejects({at(line + 1)}, [] { thd(list{0, 4}, list{5}); });
        rejects({at(line + 2)}, [&] { thd::from_offsets(narrow); });
        rejects({at(line + 3)}, [] { thd::from_lengths(list{-1}); });
        rejects({at(line + 4)}, [] { thd::uniform(-1, 3); });
        rejects({at(line + 5)}, [] { thd(std::vector{0, ~0ull}); });
    }

    TEST_CASE("numbers of tokens that are no size are rejected") {
        index_t const huge = std::numeric_limits<index_t>::max(), limit = index_t{1} << 62;
        rejects({"thd: last offset: expected less than 2^62, got 4611686018427387904"}, [=] { thd(list{0, limit}); });
        rejects({"thd::from_lengths: length of sequence 1: expected 0 to 4611686018427387900, got -2"}, [] {
            thd::from_lengths(list{3, -2});
        });
        rejects({"thd::from_lengths: length of sequence 1", "got 9223372036854775807"}, [=] {
            thd::from_lengths(list{3, huge});
        });
        rejects({"thd::from_lengths: length of sequence 1"}, [=] { thd::from_lengths(list{limit - 1, 1}); });
        CHECK(thd::from_lengths(list{limit - 2, 1}).tokens() == limit - 1);
        rejects({"thd::uniform: tokens: expected not negative, got -1 x 3"}, [] { thd::uniform(-1, 3); });
        rejects({"thd::uniform: tokens: expected not negative, got 1 x -3"}, [] { thd::uniform(1, -3); });
        rejects({"thd::uniform: tokens: expected less than 2^62"}, [=] { thd::uniform(huge, 0); });
        rejects({"thd::uniform: tokens: expected less than 2^62"}, [=] { thd::uniform(1 << 30, index_t{1} << 32); });
        using unsigned_list = std::vector<std::uint64_t>;
        rejects({"thd: offset 1: expected less than 2^62, got 18446744073709551615"}, [] {
            thd(unsigned_list{0, ~std::uint64_t{0}});
        });
        rejects({"thd: valid length of sequence 0: expected less than 2^62, got 9223372036854775808"}, [] {
            thd(list{0, 4}, unsigned_list{std::uint64_t{1} << 63});
        });
        rejects({"thd::from_lengths: length of sequence 1: expected less than 2^62, got 18446744073709551615"}, [] {
            thd::from_lengths(unsigned_list{0, ~std::uint64_t{0}});
        });
        if (support::memory_ends)
            rejects({"thd.cpp", "thd::uniform: memory: expected 9007199254741000 bytes"},
                    [] { thd::uniform(index_t{1} << 50, 0); });
    }

    TEST_CASE("a last offset beyond the buffer is rejected") {
        std::vector<std::int32_t> const offsets = {0, 5, 12};
        rejects({"thd: last offset: expected at most the rows of the buffer, 11, got 12"},
                [&] { thd::from_offsets(offsets, 11); });
        rejects({"thd: last offset", "got 12"}, [&] { thd::from_offsets(offsets, 0); });
    }

    TEST_CASE("bad valid lengths are rejected, naming the sequence") {
        rejects({"thd: number of valid lengths: expected 2, got 1"}, [] { thd(list{0, 8, 16}, list{3}); });
        rejects({"thd: number of valid lengths: expected 0, got 1"}, [] { thd(list{0}, list{3}); });
        rejects({"thd: valid length of sequence 1: expected 0 to 8, got 9"}, [] { thd(list{0, 8, 16}, list{8, 9}); });
        rejects({"thd: valid length of sequence 0", "got -1"}, [] { thd(list{0, 8}, list{-1}); });
    }
}

} // namespace
