// SPDX-License-Identifier: Apache-2.0
// The partitions that other libraries document, test or get wrong. Rows that are padding are written -1.
#include <cpx/layout/sharding.hpp>

#include <cpx/cpx.hpp>

#include <doctest/doctest.h>

#include <support/erased.hpp>
#include <support/packings.hpp>
#include <support/rejects.hpp>

namespace {

using namespace support;
using cpx::index_t;
using cpx::scope;
using list = std::vector<index_t>;

list rows(any_tokens const& sharding, int rank) {
    list result;
    sharding.for_each_piece(rank, [&](cpx::range piece) {
        for (index_t row = piece.first; row < piece.last; ++row) result.push_back(row);
    });
    return result;
}

std::vector<list> all_rows(any_tokens const& sharding) {
    std::vector<list> result;
    for (int r = 0; r < sharding.ranks(); ++r) result.push_back(rows(sharding, r));
    return result;
}

/// Returns "0-4 15-19" as numbers.
list numbers(std::string const& text) {
    list result;
    std::size_t at = 0;
    while (at < text.size()) {
        std::size_t used = 0;
        index_t const first = std::stoll(text.substr(at), &used);
        at += used;
        index_t last = first;
        if (at < text.size() && text[at] == '-') {
            last = std::stoll(text.substr(at + 1), &used);
            at += used + 1;
        }
        for (index_t n = first; n <= last; ++n) result.push_back(n);
        ++at; // the blank
    }
    return result;
}

/// How a peer shards, in the words of cpx.
enum class peer { row_zigzag, thd_zigzag, per_sequence, packed };

any_tokens shard(peer how, list const& sequence_lengths, int w) {
    cpx::thd const batch = lengths(sequence_lengths);
    switch (how) {
    case peer::row_zigzag: return cpx::shard<scope::batch>(batch, cpx::zigzag<>{w});
    case peer::thd_zigzag: return cpx::shard(batch, cpx::zigzag<>{w});
    case peer::per_sequence: return cpx::shard(batch, cpx::sequential<>{w});
    default: return cpx::shard<scope::batch>(batch, cpx::sequential<>{w});
    }
}

struct partition {
    char const* source;
    peer how;
    list lengths;
    std::vector<std::string> ranks;
};

std::vector<partition> const partitions = {
    {"Megatron, dense rows", peer::row_zigzag, {8, 12}, {"0-4 15-19", "5-14"}},
    {"Transformer Engine THD, Megatron packed, miles", peer::thd_zigzag, {8, 12}, {"0 1 6 7 8-10 17-19", "2-5 11-16"}},
    {"miles PR 957, Megatron PR 3282", peer::per_sequence, {8, 12}, {"0-3 8-13", "4-7 14-19"}},
    {"flash-linear-attention, miles allgather_cp", peer::packed, {8, 12}, {"0-9", "10-19"}},
    {"Megatron, dense rows", peer::row_zigzag, {16, 24}, {"0-4 35-39", "5-9 30-34", "10-14 25-29", "15-24"}},
    {"Transformer Engine THD",
     peer::thd_zigzag,
     {16, 24},
     {"0 1 14 15 16-18 37-39", "2 3 12 13 19-21 34-36", "4 5 10 11 22-24 31-33", "6-9 25-30"}},
    {"miles PR 957", peer::per_sequence, {16, 24}, {"0-3 16-21", "4-7 22-27", "8-11 28-33", "12-15 34-39"}},
    {"flash-linear-attention", peer::packed, {16, 24}, {"0-9", "10-19", "20-29", "30-39"}},
    {"Transformer Engine THD",
     peer::thd_zigzag,
     {8, 8, 16},
     {"0 7 8 15 16 17 30 31", "1 6 9 14 18 19 28 29", "2 5 10 13 20 21 26 27", "3 4 11 12 22-25"}},
    {"Megatron, dense rows", peer::row_zigzag, {8, 8, 16}, {"0-3 28-31", "4-7 24-27", "8-11 20-23", "12-19"}},
    {"miles PR 957",
     peer::per_sequence,
     {8, 8, 16},
     {"0 1 8 9 16-19", "2 3 10 11 20-23", "4 5 12 13 24-27", "6 7 14 15 28-31"}},
    {"Megatron all-gather order 162534 of 6 chunks over 3 ranks", peer::row_zigzag, {6}, {"0 5", "1 4", "2 3"}},
    {"Transformer Engine, test of the THD partition", peer::thd_zigzag, {8, 8}, {"0 1 6 7 8 9 14 15", "2-5 10-13"}},
    {"Transformer Engine, thd_read_half_tensor of cu_seqlens 0 8 16",
     peer::per_sequence,
     {8, 8},
     {"0-3 8-11", "4-7 12-15"}},
    {"Transformer Engine, one rank", peer::thd_zigzag, {3, 2, 4}, {"0-8"}},
    {"flash-linear-attention rejects 10 tokens on 3 ranks", peer::packed, {10}, {"0-2", "3-5", "6-9"}},
    {"flash-linear-attention rejects 14 tokens on 4 ranks", peer::packed, {14}, {"0-2", "3-6", "7-9", "10-13"}},
    {"flash-linear-attention rejects 2 tokens on 3 ranks", peer::packed, {2}, {"", "0", "1"}},
    {"flash-linear-attention, cu_seqlens 0 5 12", peer::packed, {5, 7}, {"0-3", "4-7", "8-11"}},
    {"twinkle, lengths 3 and 5 cut at 4, inside a sequence", peer::packed, {3, 5}, {"0-3", "4-7"}},
    // Lengths with which peers lose, repeat or shift tokens (TE's slices of 6, 10 repeat 3 and 12 and lose 5 and 15).
    {"Transformer Engine with checks off", peer::thd_zigzag, {6, 10}, {"0 4 5 6 7 13-15", "1-3 8-12"}},
    {"miles before PR 885, odd local length", peer::per_sequence, {10, 8}, {"0-4 10-13", "5-9 14-17"}},
    {"cu_seqlens // W, lengths not multiples of W", peer::per_sequence, {7, 9}, {"0-2 7-10", "3-6 11-15"}},
    {"torch.chunk gives 3 chunks of 6 tokens, not 4", peer::thd_zigzag, {6}, {"0 4 5", "1-3"}},
    {"miles, ranks without tokens", peer::thd_zigzag, {3}, {"2", "", "0 1", ""}},
    {"one token for eight ranks", peer::thd_zigzag, {1}, {"0", "", "", "", "", "", "", ""}},
    {"a sequence without tokens inside cu_seqlens", peer::thd_zigzag, {4, 0, 4}, {"0 3 4 7", "1 2 5 6"}},
};

/// A batch whose sequences are padded at their ends to a multiple of `factor`, as trainers pad it.
cpx::thd padded(list const& valid, index_t factor) {
    list offsets{0};
    for (index_t const n : valid) offsets.push_back(offsets.back() + (n + factor - 1) / factor * factor);
    return cpx::thd(offsets, valid);
}

/// Returns the number of every row's token among the tokens that count, -1 for padding.
list tokens_that_count(cpx::thd const& batch, list const& global_rows) {
    list result;
    for (index_t const row : global_rows) {
        index_t const s = batch.sequence(row), token = row - batch.offset(s);
        index_t before = 0;
        for (index_t i = 0; i < s; ++i) before += batch.valid(i);
        result.push_back(token < batch.valid(s) ? before + token : -1);
    }
    return result;
}

struct padded_partition {
    char const* source;
    list valid;
    index_t factor;
    std::vector<list> ranks;
};

std::vector<padded_partition> const padded_partitions = {
    {"miles slice_with_cp", {5, 7}, 4, {{0, 1, -1, -1, 5, 6, 11, -1}, {2, 3, 4, -1, 7, 8, 9, 10}}},
    {"miles slice_with_cp", {11}, 8, {{0, 1, -1, -1}, {2, 3, -1, -1}, {4, 5, 10, -1}, {6, 7, 8, 9}}},
    {"miles slice_with_cp, a rank of padding", {3}, 8, {{0, -1}, {1, -1}, {2, -1}, {-1, -1}}},
    {"Transformer Engine, pad then slice", {2, 3}, 4, {{0, -1, 2, -1}, {1, -1, 3, 4}}},
};

/// A cut into chunks of a fixed size, the last one shorter, as MagiAttention cuts a row.
struct every {
    index_t size = 1;
    index_t begin(int c, int, index_t n) const { return std::min(c * size, n); }
    index_t snap(index_t t, index_t) const { return t; }
};
static_assert(cpx::cut<every>);

TEST_SUITE("layout") {
    TEST_CASE("partitions are those of the peers") {
        for (partition const& p : partitions) {
            CAPTURE(std::string(p.source));
            CAPTURE(text(lengths(p.lengths)));
            auto const got = all_rows(shard(p.how, p.lengths, static_cast<int>(p.ranks.size())));
            for (std::size_t r = 0; r < p.ranks.size(); ++r) {
                CAPTURE(r);
                CHECK(got[r] == numbers(p.ranks[r]));
            }
        }
    }

    TEST_CASE("partitions of padded sequences are those of the peers, and padding stands where they put it") {
        for (padded_partition const& p : padded_partitions) {
            CAPTURE(std::string(p.source));
            auto const batch = padded(p.valid, p.factor);
            auto const sharding = cpx::shard(batch, cpx::zigzag<>{static_cast<int>(p.ranks.size())});
            for (std::size_t r = 0; r < p.ranks.size(); ++r)
                CHECK(tokens_that_count(batch, rows(sharding, static_cast<int>(r))) == p.ranks[r]);
        }
    }

    // Transformer Engine's tests of padding to factors 8, 6 and 4.
    TEST_CASE("physical offsets are those of the peers' padding, and valid lengths are kept") {
        struct {
            list valid;
            index_t factor;
            list offsets;
        } const cases[] = {
            {{3, 2, 4}, 8, {0, 8, 16, 24}}, {{2, 7, 4, 10}, 6, {0, 6, 18, 24, 36}}, {{7, 11, 5}, 4, {0, 8, 20, 28}}};
        for (auto const& c : cases) {
            auto const batch = padded(c.valid, c.factor);
            CHECK(list(batch.offsets().begin(), batch.offsets().end()) == c.offsets);
            for (std::size_t s = 0; s < c.valid.size(); ++s) CHECK(batch.valid(static_cast<index_t>(s)) == c.valid[s]);
        }
    }

    // Transformer Engine's test of copying valid rows: the first sequence of cu_seqlens_padded begins at row 2.
    TEST_CASE("rows before the first sequence are a sequence of padding") {
        rejects({"thd: offset 0: expected 0, got 2"}, [] { cpx::thd({2, 6, 12}); });
        cpx::thd const batch({0, 2, 6, 12}, {0, 3, 4});
        list all(12);
        for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<index_t>(i);
        CHECK(tokens_that_count(batch, all) == list{-1, -1, 0, 1, 2, -1, 3, 4, 5, 6, -1, -1});
    }

    // Transformer Engine, thd_get_partitioned_indices in its inverse form: row j of rank r in sequence i is token
    // k + (l / 2) * (k < l / 2 ? r : 2 (W - 1) - r) of it, where k = j - cu[i] / W and l = L[i] / W.
    TEST_CASE("rows are those of Transformer Engine's formula where 2W divides every length") {
        for (auto const& [w, all] : std::vector<std::pair<int, list>>{
                 {4, {8, 16, 16}}, {4, {8, 8, 8, 16}}, {2, {8, 12}}, {3, {6, 12, 60}}, {8, {16, 160, 32}}}) {
            cpx::thd const batch = lengths(all);
            for (int r = 0; r < w; ++r) {
                list want;
                for (index_t i = 0; i < batch.sequences(); ++i) {
                    index_t const l = batch.length(i) / w;
                    for (index_t k = 0; k < l; ++k)
                        want.push_back(batch.offset(i) + k + l / 2 * (k < l / 2 ? r : 2 * (w - 1) - r));
                }
                CHECK(rows(shard(peer::thd_zigzag, all, w), r) == want);
            }
        }
    }

    // Megatron's undoing of zigzag after its all-to-all, where 2W divides every length: token p of sequence i is at
    // rank * T/W + cu[i] / W + (block % 2) * half + p % half, for half = L / 2W, n = p / half, block = n < W ? 2n :
    // 4W - 2n - 1.
    TEST_CASE("slots are those of Megatron's permutation where 2W divides every length") {
        for (int const w : {2, 3, 4}) {
            index_t const n = 2 * w * 5, half = 5;
            for (index_t p = 0; p < n; ++p) {
                index_t const chunk = p / half, block = chunk < w ? 2 * chunk : 4 * w - 2 * chunk - 1;
                cpx::slot const place = cpx::locate(cpx::zigzag<>{w}, p, n);
                CHECK(place.rank == block / 2);
                CHECK(place.row == block % 2 * half + p % half);
            }
        }
    }

    // Lengths for which that formula yields negative places or divides by zero.
    TEST_CASE("lengths that 2W does not divide have every token on exactly one rank") {
        for (auto const& [w, n] :
             std::vector<std::pair<int, index_t>>{{2, 6}, {2, 2}, {2, 10}, {4, 12}, {4, 20}, {3, 10}, {8, 1}, {5, 3}}) {
            CHECK(cpx::is_partition(cpx::zigzag<>{w}, n));
            CHECK(cpx::is_partition(cpx::sequential<>{w}, n));
        }
    }

    TEST_CASE("many tiny sequences spread over all ranks") {
        for (int const w : {2, 4, 8}) { // 4W sequences of 2W tokens: two tokens of each on every rank
            auto const sharding = cpx::shard(cpx::thd::uniform(4 * w, 2 * w), cpx::zigzag<>{w});
            for (int r = 0; r < w; ++r) {
                CHECK(sharding.rows(r) == 8 * w);
                CHECK(rows(sharding, r)[2] == 2 * w + r);
                CHECK(rows(sharding, r)[3] == 4 * w - 1 - r);
            }
        }
    }

    // miles: responses end a sequence; the logits of response token i stand at the token before it.
    TEST_CASE("the response tokens whose logits a rank holds are those of miles' log-prob slices") {
        auto const slice = [](index_t total, index_t response, int w, int rank) {
            cpx::thd const batch = padded({total}, 2 * w);
            list result;
            for (index_t const row : rows(cpx::shard(batch, cpx::zigzag<>{w}), rank)) {
                index_t const i = row + 1 - (total - response);
                if (i >= 0 && i < response) result.push_back(i);
            }
            return result;
        };
        CHECK(slice(11, 7, 4, 2) == list{1, 2});
        CHECK(slice(11, 7, 2, 1) == list{0, 1, 2, 3, 4, 5});
        CHECK(slice(11, 7, 4, 0).empty());
    }

    // MagiAttention: the row is cut into chunks of a fixed size, and a table says who computes which. The case with
    // lengths 8 and 12 and chunks of 5: causal areas 15, 24, 25, 50 give rank 0 chunks 0 and 3.
    TEST_CASE("a table over the batch is MagiAttention's dispatch, with a shorter last chunk if need be") {
        auto const even = cpx::shard<scope::batch>(lengths({8, 12}), cpx::table(2, {0, 1, 1, 0}));
        CHECK(all_rows(even) == std::vector<list>{numbers("0-4 15-19"), numbers("5-14")});
        auto const uneven =
            cpx::shard<scope::batch>(lengths({11, 19}), cpx::table(2, {0, 1, 1, 0, 1, 0, 0, 1}), every{4});
        CHECK(all_rows(uneven) == std::vector<list>{numbers("0-3 12-15 20-27"), numbers("4-11 16-19 28-29")});
        auto const none =
            cpx::shard<scope::batch>(lengths({8}), cpx::table(3, {0, 2, 2, 0})); // an error there, ordinary here
        CHECK(rows(none, 1).empty());
        auto const longer = cpx::shard<scope::batch>(
            cpx::thd::uniform(1, 250), cpx::table(4, {0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0}), every{16});
        index_t held = 0;
        for (int r = 0; r < 4; ++r) held += longer.rows(r);
        CHECK(held == 250);
        CHECK(longer.rows(0) == 58); // its last chunk has 10 of 16 tokens
    }

    // miles pads every rank's local rows; the pad is one more sequence, which is sequential if 2W does not divide it.
    TEST_CASE("miles' tail pad is a sequence of its own that the rule takes as sequential") {
        for (int const w : {2, 4}) {
            auto const rule = [w](index_t n) { return n % (2 * w) == 0; };
            auto const sharding = cpx::shard(lengths({6 * w, 10 * w, 3 * w}),
                                             cpx::by_length{cpx::zigzag<>{w}, cpx::sequential<>{w}, rule});
            for (int r = 0; r < w; ++r) {
                list const got = rows(sharding, r);
                REQUIRE(got.size() == 6 + 10 + 3);
                CHECK(got[0] == 3 * r);
                CHECK(got[3] == 6 * w - 3 * (r + 1));
                CHECK(got[6] == 6 * w + 5 * r);
                CHECK(list(got.end() - 3, got.end()) == list{16 * w + 3 * r, 16 * w + 3 * r + 1, 16 * w + 3 * r + 2});
            }
        }
    }
}

} // namespace
