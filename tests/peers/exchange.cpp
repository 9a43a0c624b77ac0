// SPDX-License-Identifier: Apache-2.0
// Movements of rows that other projects test or got wrong, over a transport: every bit arrives, goes back, and is its
// own gradient.
#include <cpx/cpx.hpp>

#include <peers/cases.hpp>

#include <support/rejects.hpp>

namespace {

using cpx::index_t, cpx::scope;
using on_ranks::assemble, on_ranks::take, on_ranks::same_bits, on_ranks::slice;
using peers::list;
using std::size_t;

using sections = std::vector<cpx::section>;

/// Numbers of which no two places have the same, all of them exact.
std::vector<float> distinct(index_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + 1);
    return values;
}

/// Moves a whole tensor from one sharding to another by `plan(rank)`, and puts it together again.
template <class From, class To, class Plan>
std::vector<float> move(std::vector<float> const& whole, sections const& columns, From const& from, To const& to,
                        Plan plan) {
    return assemble<float>(to, columns, [&](cpx::threads& comm) {
        auto const p = plan(comm.rank());
        auto y = on_ranks::poisoned<float>(to, comm.rank(), p.target_width ? p.target_width : on_ranks::width(columns));
        exchange(p, take(whole, columns, from, comm.rank()), y, comm);
        return y;
    });
}

template <class From, class To>
std::vector<float> move(std::vector<float> const& whole, sections const& columns, From const& from, To const& to) {
    return move(whole, columns, from, to, [&](int rank) { return cpx::relayout(from, to, rank); });
}

/// Checks a movement there, its way back, and its gradient: all ones for a sum, and place by place for any other loss.
template <class From, class To>
void check_permutation(sections const& columns, From const& from, To const& to) {
    auto const x = distinct(from.batch().tokens() * on_ranks::width(columns));
    auto const backward = [&](std::vector<float> const& dy) {
        return move(dy, columns, to, from, [&](int rank) { return cpx::relayout(from, to, rank).transposed(); });
    };
    CHECK(same_bits(move(x, columns, from, to), x));
    CHECK(same_bits(move(x, columns, to, from), x));
    CHECK(same_bits(backward(x), x));
    std::vector<float> const ones(x.size(), 1.f);
    CHECK(same_bits(backward(ones), ones));
}

/// miles' rule: zigzag where 2W divides the length, else (its tail pad) sequential.
struct divisible {
    int by;
    bool operator()(index_t n) const { return n % by == 0; }
};
auto miles_rule(cpx::thd const& batch, int w) {
    return cpx::shard(batch, cpx::by_length{cpx::zigzag<>{w}, cpx::sequential<>{w}, divisible{2 * w}});
}

/// Lengths of miles' packs: sequences of `chunks` rows a chunk of zigzag, then `pad` rows of padding on every rank.
list miles_pack(index_t w, list const& chunks, index_t pad) {
    list lengths;
    for (index_t const n : chunks) lengths.push_back(2 * w * n);
    if (pad > 0) lengths.push_back(w * pad);
    return lengths;
}

struct relayout_case {
    char const *id, *source;
    int ranks;
    list lengths;
    index_t width = 3;
};

std::vector<relayout_case> const relayouts = {
    {"M1c", "miles PR 957, packs", 2, {128, 128}},
    {"M1d", "miles PR 957, packs", 4, {64, 192, 256}},
    {"M2g", "miles PR 957, the peer is 1 - rank", 1, {12, 7, 30}},
    {"M2h", "miles PR 957, the peer is 1 - rank", 2, {12, 7, 30}},
    {"M2i", "miles PR 957, the peer is 1 - rank", 3, {12, 7, 30}},
    {"M2j", "miles PR 957, the peer is 1 - rank", 4, {12, 7, 30}},
    {"M2k", "miles PR 957, the peer is 1 - rank", 5, {12, 7, 30}},
    {"M2l", "miles PR 957, the peer is 1 - rank", 8, {12, 7, 30}},
    {"M3a", "miles PR 957, odd local length loses a token", 2, {10, 8}},
    {"M4a", "miles PR 957, cu_seqlens // W", 2, {7, 9}},
    {"M5c", "miles PR 885, W divides the length and 2W does not", 2, {6, 10}},
    {"M5d", "miles PR 885, W divides the length and 2W does not", 4, {12, 20}},
    {"M6a", "miles PR 885, relayout test, chunks of 3 and 5 and a tail pad of 3", 2, miles_pack(2, {3, 5}, 3), 1},
    {"M6b", "miles PR 885, relayout test, chunks of 3 and 5 and a tail pad of 3", 4, miles_pack(4, {3, 5}, 3), 1},
    {"M7b", "miles PR 885, an even tail pad, which the rule takes as zigzag", 2, miles_pack(2, {3, 5}, 4), 1},
    {"M7c", "miles PR 885, an even tail pad, which the rule takes as zigzag", 4, miles_pack(4, {3, 5}, 4), 1},
    {"M8e", "miles, a rank of padding only", 4, {3}},
    {"M8f", "miles, a rank of padding only", 8, {1}},
    {"M8g", "miles, sequences of length 0", 4, {5, 0, 0, 8, 0}},
    {"M9a", "miles, 4W sequences of length 2W", 2, list(8, 4)},
    {"M9b", "miles, 4W sequences of length 2W", 3, list(12, 6)},
    {"M9c", "miles, 4W sequences of length 2W", 8, list(32, 16)},
    {"M13a", "miles, torch.chunk of 6 tokens gives 3 chunks", 2, {6}},
    {"M14a", "Megatron PR 3282, rows by sequence into the batch's", 2, {8, 12}},
    {"T2a",
     "TransformerEngine tests/pytorch/attention/test_cp_utils.py, reorder, 40 tokens of 2 x 4",
     4,
     {8, 16, 16},
     8},
    {"T2b", "TransformerEngine, reorder, cu_seqlens 0 8 16 24 40", 4, {8, 8, 8, 16}, 8},
};

/// miles' multimodal positions: zigzagged with padding to 2W rows a chunk and to `multiple` rows a rank, gathered to
/// the order of the batch, and cut again. Every token has positions on three axes.
struct gather_case {
    char const *id, *source;
    int ranks;
    list valid;
    index_t multiple = 8;
};

std::vector<gather_case> const gathers = {
    {"M-c1", "miles tests/fast/test_qwen3_vl_cp_mrope.py", 2, {10, 7, 13}},
    {"M-c2", "miles test_qwen3_vl_cp_mrope.py", 2, {16, 16}},
    {"M-c3", "miles test_qwen3_vl_cp_mrope.py", 2, {3}},
    {"M-c4", "miles test_qwen3_vl_cp_mrope.py", 4, {20, 9, 30, 5}},
    {"M-c5", "miles test_qwen3_vl_cp_mrope.py", 4, {40, 17}},
    {"M-c6", "miles test_qwen3_vl_cp_mrope.py, cu_seqlens 0 6: None there", 2, {6}, 1},
};

/// Returns the batch whose sequences are padded to 2W rows a chunk, with a tail pad that fills up every rank.
cpx::thd miles_padded(gather_case const& c) {
    index_t const w = c.ranks;
    list lengths, valid = c.valid;
    index_t rows = 0;
    for (index_t const n : c.valid) rows += lengths.emplace_back((n + 2 * w - 1) / (2 * w) * 2 * w) / w;
    lengths.push_back((c.multiple - rows % c.multiple) % c.multiple * w);
    valid.push_back(0);
    auto const batch = support::lengths(lengths);
    return cpx::thd(list(batch.offsets().begin(), batch.offsets().end()), valid);
}

struct heads_case {
    char const *id, *source;
    int ranks;
    list lengths;
};

std::vector<heads_case> const heads = {
    {"N5a", "Megatron tests/unit_tests/ssm/test_gated_delta_net.py, fused THD all-to-all", 2, {32, 32}},
    {"N5b", "Megatron, fused THD all-to-all, cu_seqlens 0 32 64 96 128", 2, {32, 32, 32, 32}},
    {"N5c", "Megatron, fused THD all-to-all, cu_seqlens 0 16 48 80", 2, {16, 32, 32}},
    {"N5d", "Megatron, fused THD all-to-all", 4, {32, 32}},
    {"N5e", "Megatron, fused THD all-to-all, cu_seqlens 0 32 64 96 128", 4, {32, 32, 32, 32}},
    {"N5f", "Megatron, fused THD all-to-all, cu_seqlens 0 16 48 80", 4, {16, 32, 32}},
    {"N5g", "Megatron's permutation wants 2W to divide every length", 2, {6, 2}},
};

/// A cut into chunks of a fixed size, the last one shorter.
struct every {
    index_t size = 1;
    index_t begin(int c, int, index_t n) const { return std::min(c * size, n); }
    index_t snap(index_t t, index_t) const { return t; }
    friend bool operator==(every, every) = default;
};

struct dispatch_case {
    char const *id, *source;
    int ranks;
    index_t tokens, chunk;
};

std::vector<dispatch_case> const dispatches = {
    {"A1a", "MagiAttention tests of dispatch and undispatch, chunks of 4", 4, 32, 4},
    {"A1b", "MagiAttention dispatch, chunks of 16", 4, 256, 16},
    {"A1c", "MagiAttention dispatch, uneven shard, chunks of 4", 3, 30, 4},
    {"A1d", "MagiAttention dispatch, uneven shard, chunks of 16", 4, 250, 16},
    {"A1e", "MagiAttention raises a RuntimeError if a rank is empty", 5, 7, 4},
};

struct log_probability_case {
    char const *id, *source;
    index_t total, response, rows; ///< rows: of one padded row (bshd), 0: padded to 2W (thd)
};

std::vector<log_probability_case> const log_probabilities = {
    {"M-e1", "miles tests/fast test_cp_log_prob_assembly.py", 34017, 33789, 0},
    {"M-e2", "miles test_cp_log_prob_assembly.py", 2630, 2402, 0},
    {"M-e3", "miles test_cp_log_prob_assembly.py", 1024, 512, 0},
    {"M-e4", "miles test_cp_log_prob_assembly.py", 97, 96, 0},
    {"M-e5", "miles test_cp_log_prob_assembly.py, bshd", 1024, 512, 2048},
    {"M-e6", "miles test_cp_log_prob_assembly.py, bshd", 700, 640, 1024},
    {"M-d1", "miles slice_with_cp, total 11", 11, 7, 0},
};

} // namespace

TEST_SUITE("peers") {
    using cpx::index_t;

    // Places have values of their own: M11, for miles' gradient of a sum is all ones even if the inverse is wrong.
    TEST_CASE("relayouts of peers bring every row, back too, and gradients are in their places") {
        peers::each(relayouts, [](relayout_case const& c) {
            auto const batch = support::lengths(c.lengths);
            sections const columns{{1, c.width}};
            auto const packed = cpx::shard<scope::batch>(batch, cpx::sequential<>(c.ranks));
            check_permutation(columns, miles_rule(batch, c.ranks), packed);
            check_permutation(columns, cpx::shard(batch, cpx::zigzag<>(c.ranks)), packed);
            check_permutation(columns, cpx::shard(batch, cpx::sequential<>(c.ranks)), packed);
            check_permutation(columns, cpx::shard<scope::batch>(batch, cpx::zigzag<>(c.ranks)), packed);
        });
    }

    TEST_CASE("M10: a hundred relayouts one after the other, empty messages among them, end and change nothing") {
        for (int const ranks : {3, 4, 5, 8})
            for (auto const& lengths : {list{1}, list{0, 3, 0}, list{12, 7, 30}, list{64, 192}}) {
                CAPTURE(ranks);
                auto const batch = support::lengths(lengths);
                auto const zigzag = cpx::shard(batch, cpx::zigzag<>(ranks));
                auto const packed = cpx::shard<scope::batch>(batch, cpx::sequential<>(ranks));
                sections const columns{{1, 2}};
                auto const x = distinct(batch.tokens() * 2);
                std::vector<float> got;
                CHECK(support::message([&] {
                          got = assemble<float>(zigzag, columns, [&](cpx::threads& comm) {
                              auto const there = cpx::relayout(zigzag, packed, comm.rank());
                              auto const back = there.transposed();
                              auto y = take(x, columns, zigzag, comm.rank());
                              for (int round = 0; round < 100; ++round) {
                                  auto const z = exchange(there, y, comm);
                                  y = exchange(back, z, comm);
                              }
                              return y;
                          });
                      }) == "");
                CHECK(same_bits(got, x));
            }
    }

    // miles' custom all-gather: every rank repeats the whole computation, so that every rank has the whole gradient.
    TEST_CASE("M12: a gradient that every rank has whole is taken once, one of which each has a share is summed") {
        for (int const ranks : {1, 2, 3, 8}) {
            CAPTURE(ranks);
            auto const batch = support::lengths({8, 12, 5});
            auto const zigzag = cpx::shard(batch, cpx::zigzag<>(ranks));
            cpx::replicated<> const everywhere(ranks, batch);
            sections const columns{{1, 4}};
            auto const dy = distinct(batch.tokens() * 4);
            CHECK(same_bits(move(dy, columns, everywhere, zigzag), dy));
            auto const summed = move(dy, columns, everywhere, zigzag,
                                     [&](int rank) { return cpx::relayout(zigzag, everywhere, rank).transposed(); });
            for (std::size_t i = 0; i < dy.size(); ++i) CHECK(summed[i] == static_cast<float>(ranks) * dy[i]);
        }
    }

    TEST_CASE("positions of peers are gathered in the order of the batch and cut again, padding and all") {
        peers::each(gathers, [](gather_case const& c) {
            auto const batch = miles_padded(c);
            auto const cut = miles_rule(batch, c.ranks);
            cpx::replicated<> const everywhere(c.ranks, batch);
            sections const axes{{3, 1}};
            for (int rank = 0; rank < c.ranks; ++rank) CHECK(cut.rows(rank) % c.multiple == 0);
            std::vector<float> positions;
            for (index_t row = 0; row < batch.tokens(); ++row)
                for (float const axis : {0.f, 1000.f, 2000.f})
                    positions.push_back(axis + static_cast<float>(row - batch.offset(batch.sequence(row))));
            CHECK(same_bits(move(positions, axes, cut, everywhere), positions));
            CHECK(same_bits(move(positions, axes, everywhere, cut), positions));
        });
    }

    TEST_CASE("by heads, a batch moves as each of its sequences does, there and back") {
        peers::each(heads, [](heads_case const& c) {
            sections const columns{{8, 1}, {8, 1}, {4, 1}, {16, 1}, {32, 1}, {4, 1}};
            auto const batch = support::lengths(c.lengths);
            index_t const width = on_ranks::width(columns);
            auto const x = distinct(batch.tokens() * width);
            auto const zigzag = cpx::shard(batch, cpx::zigzag<>(c.ranks));
            cpx::head_sharded<> const by_heads(c.ranks, batch, columns);
            auto const fused = move(x, columns, zigzag, by_heads);
            for (index_t s = 0; s < batch.sequences(); ++s) {
                auto const own = support::lengths({batch.length(s)});
                auto const alone = slice(x, width, batch.offset(s), batch.offset(s + 1));
                CHECK(same_bits(move(alone, columns, cpx::shard(own, cpx::zigzag<>(c.ranks)),
                                     cpx::head_sharded<>(c.ranks, own, columns)),
                                slice(fused, width, batch.offset(s), batch.offset(s + 1))));
            }
            CHECK(same_bits(fused, x));
            CHECK(same_bits(move(fused, columns, by_heads, zigzag), x));
        });
    }

    TEST_CASE("dispatch by a table, its way back and both backwards are exact") {
        peers::each(dispatches, [](dispatch_case const& c) {
            support::splitmix numbers(3);
            int const chunks = static_cast<int>((c.tokens + c.chunk - 1) / c.chunk);
            auto const batch = cpx::thd::uniform(1, c.tokens);
            auto const dispatched = cpx::shard<scope::batch>(
                batch, cpx::table(c.ranks, support::random_owners(numbers, c.ranks, chunks)), every{c.chunk});
            cpx::replicated<> const everywhere(c.ranks, batch);
            sections const columns{{1, 2}};
            auto const x = distinct(c.tokens * 2);
            CHECK(same_bits(move(x, columns, everywhere, dispatched), x));
            CHECK(same_bits(move(x, columns, dispatched, everywhere), x));
            // Backward of undispatch: every rank has the whole gradient, or a share of it, here rank + 1 times x.
            CHECK(same_bits(move(x, columns, everywhere, dispatched), x));
            auto const summed = assemble<float>(dispatched, columns, [&](cpx::threads& comm) {
                auto share = x;
                for (float& e : share) e *= static_cast<float>(comm.rank() + 1);
                auto const plan = cpx::relayout(dispatched, everywhere, comm.rank()).transposed();
                return exchange(plan, take(share, columns, everywhere, comm.rank()), comm);
            });
            for (std::size_t i = 0; i < x.size(); ++i)
                CHECK(summed[i] == static_cast<float>(c.ranks * (c.ranks + 1) / 2) * x[i]);
        });
    }

    TEST_CASE("log-probabilities of responses are put together, and not without a rank") {
        peers::each(log_probabilities, [](log_probability_case const& c) {
            for (int const ranks : {2, 4, 8}) {
                CAPTURE(ranks);
                index_t const unit = 2 * ranks, length = c.rows ? c.rows : (c.total + unit - 1) / unit * unit;
                cpx::thd const batch({0, length}, {c.total});
                auto const zigzag = cpx::shard(batch, cpx::zigzag<>(ranks));
                cpx::replicated<> const everywhere(ranks, batch);
                std::vector<float> logits(static_cast<std::size_t>(length), 0.f); // at the token before the response's
                for (index_t i = 0; i < c.response; ++i)
                    logits[static_cast<std::size_t>(c.total - c.response - 1 + i)] = static_cast<float>(i + 1);
                auto const all = move(logits, {{1, 1}}, zigzag, everywhere);
                CHECK(slice(all, 1, c.total - c.response - 1, c.total - 1) == distinct(c.response));
                support::rejects({"rank " + std::to_string(ranks - 1), "to take part"}, [&] {
                    cpx::threads::run(ranks, [&](cpx::threads& comm) {
                        if (comm.rank() == ranks - 1) return;
                        exchange(cpx::relayout(zigzag, everywhere, comm.rank()),
                                 take(logits, {{1, 1}}, zigzag, comm.rank()), comm);
                    });
                });
            }
        });
    }
}
