// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/causal_conv1d.hpp>

#include <cpx/ops/sections.hpp>
#include <cpx/plan/edges.hpp>

#include <doctest/doctest.h>

#include <atomic>

#include <ops/on_ranks.hpp>
#include <ops/reference.hpp>
#include <support/rejects.hpp>

namespace {

using namespace on_ranks;
using cpx::index_t;
using reference::conv, reference::random_conv, reference::run;
using support::lengths;

/// Convolutions whose halos span several ranks, with sequences of every awkward length.
template <class T>
std::vector<conv<T>> problems() {
    std::vector<conv<T>> list;
    std::vector<std::vector<index_t>> const packings{{5, 1, 0, 12, 3}, {37, 8, 21}, {1},         {},
                                                     {0, 0},           {2, 1, 1},   {16, 16, 16}};
    for (index_t const taps : {1, 2, 3, 4, 8})
        for (auto const& packing : packings) {
            bool const odd = list.size() % 2;
            list.push_back(random_conv<T>(lengths(packing), 3 + taps % 3, taps, odd || taps == 3,
                                          odd ? cpx::activation::silu : cpx::activation::none, list.size()));
        }
    return list;
}

/// Returns how many rows of `rows_before` and `newest_rows` are not those of their tokens, and counts sequences that
/// end. A row is told by its sequence and token, also where it stands in the states or comes from another rank.
index_t strange_rows(by_tokens const& sharding, index_t reach, cpx::threads& comm, std::atomic<index_t>& ended) {
    auto const p = cpx::halo(sharding, comm.rank(), reach);
    cpx::thd const& batch = sharding.batch();
    index_t const window = reach + 1;
    auto const tag = [](index_t sequence, index_t token) { return static_cast<double>(1000 * sequence + token); };
    std::vector<double> all(static_cast<std::size_t>(p.source_rows + p.target_rows));
    for (cpx::segment const& s : p.segments)
        for (index_t i = 0; i < s.count; ++i) all[static_cast<std::size_t>(s.row + i)] = tag(s.sequence, s.token + i);
    cpx::detail::exchange_rows(p, cpx::rows<double const>(all.data(), p.source_rows, 1),
                               cpx::rows<double>(all.data() + p.source_rows, p.target_rows, 1), comm,
                               cpx::caller::here(), "test");
    for (index_t s = 0; s < batch.sequences(); ++s)
        for (index_t token = -window; token < 0; ++token) all.push_back(tag(s, token));
    auto const is = [&](index_t row, index_t sequence, index_t token) {
        return row >= 0 && row < std::ssize(all) && all[static_cast<std::size_t>(row)] == tag(sequence, token);
    };
    index_t strange = 0;
    auto const begin = cpx::rows_before(p, false), go_on = cpx::rows_before(p, true);
    for (std::size_t i = 0; i < p.segments.size(); ++i)
        for (index_t back = reach; back > 0; --back) {
            index_t const token = p.segments[i].token - back, s = p.segments[i].sequence;
            std::size_t const place = (i + 1) * static_cast<std::size_t>(reach) - static_cast<std::size_t>(back);
            strange += !is(go_on[place], s, token);
            strange += token < 0 ? begin[place] != -1 : begin[place] != go_on[place];
        }
    auto const newest = cpx::newest_rows(p);
    ended += std::ssize(newest) / (2 * window);
    for (std::size_t i = 0; i < newest.size(); i += 2) {
        index_t const s = newest[i] / window, tap = newest[i] % window;
        strange += !is(newest[i + 1], s, batch.length(s) - window + tap);
    }
    return strange;
}

/// Calls `f(name, sharding)` with layouts of their own types: static ones, a length rule and a layout of this test.
template <class F>
void for_each_typed_sharding(cpx::thd const& batch, F&& f) {
    f("static zigzag", cpx::shard(batch, cpx::zigzag<4>{}, cpx::aligned<16>{}));
    f("sequential<5> over batch", by_tokens(cpx::shard<cpx::scope::batch>(batch, cpx::sequential<5>{})));
    f("miles' rule", by_tokens(cpx::shard(batch, cpx::by_length{cpx::zigzag<4>{}, cpx::sequential<4>{},
                                                                [](index_t n) { return n % 8 == 0; }})));
    struct backwards { // a layout is three functions
        int ranks() const { return 4; }
        int chunks() const { return 7; }
        int owner(int chunk) const { return (7 - chunk) / 2; }
    };
    f("a layout of one's own", by_tokens(cpx::shard(batch, backwards{}, cpx::aligned<3>{})));
}

struct scenario {
    char const* source;
    int ranks;
    index_t taps;
    std::vector<index_t> lengths;
};

std::vector<scenario> const peers = {
    {"fla test_cp_conv.py CP2_SequenceCut", 2, 4, {300, 400, 324}},
    {"fla test_cp_conv.py CP2_BoundaryAligned", 2, 4, {512, 512}},
    {"fla test_cp_conv.py CP4_Complex", 4, 4, {700, 324}},
    {"fla test_cp_conv.py CP4_SingleSequence", 4, 4, {1024}},
    {"fla test_cp_conv.py CP2_ManyShortSequences", 2, 4, {100, 150, 200, 250, 124, 100, 100}},
    {"fla test_cp_conv.py CP2_ShortTail_Len1", 2, 4, {513, 511}},
    {"fla test_cp_conv.py CP2_ShortTail_Len2", 2, 4, {514, 510}},
    {"fla test_cp_conv.py CP4_EveryRankShortTail", 4, 4, {257, 255, 257, 255}},
    {"fla test_cp_conv.py CP2_MultipleShortTails", 2, 4, {200, 313, 511}},
    {"fla test_cp_conv.py CP2_GlobalLen1Sequence", 2, 4, {512, 1, 511}},
    {"fla test_cp_conv.py CP4_MultipleShortTails", 4, 4, {257, 253, 257, 257}},
    {"fla test_cp_conv.py CP4_WorstCaseManyLen1", 4, 4, {257, 1, 253, 257, 1, 253, 2}},
    {"attention-gym 416, packed", 2, 4, {64, 256, 64}},
    {"attention-gym 416, a halo over several ranks", 2, 8, {1, 9}},
    {"attention-gym 416, a halo over several ranks", 5, 8, {1, 9}},
    {"miles 957, odd parts", 2, 4, {10, 8}},
    {"miles 957, lengths that W does not divide", 2, 4, {7, 9}},
    {"miles 957, lengths that 2W does not divide", 4, 4, {12, 20}},
    {"miles slice_with_cp, ranks of nothing but padding", 4, 4, {3}},
    {"miles slice_with_cp, ranks of nothing but padding", 8, 4, {1, 0}},
    {"twinkle test_twinkle_qwen3_5_text_model.py, packed", 2, 4, {3, 5}},
};

/// States of every rank, (sequences, taps * channels held) each.
template <class T>
using rank_states = std::vector<std::vector<T>>;

/// Runs a convolution that goes on from `initial`, if that is not empty, and writes `final`, which may be the same.
template <class T, cpx::any_sharding S>
std::vector<T> run_on(conv<T> const& p, S const& sharding, std::vector<cpx::section> const& sections,
                      rank_states<T> const& initial, rank_states<T>& final) {
    return assemble<T>(sharding, sections, [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const x = take(p.x, sections, sharding, rank);
        auto y = poisoned<T>(sharding, rank, x.width());
        auto const weight = local_rows(sharding, rank, sections, cpx::rows<T const>(p.weight, p.taps));
        auto const bias = p.bias.empty() ? p.bias : local_rows(sharding, rank, sections, cpx::rows<T const>(p.bias, 1));
        auto const at = [&](auto& states) {
            return cpx::rows(states[static_cast<std::size_t>(rank)].data(), p.batch.sequences(), p.taps * x.width());
        };
        cpx::causal_conv1d_states<T> states{.final = at(final)};
        if (!initial.empty()) states.initial = at(initial);
        cpx::causal_conv1d(cpx::halo(sharding, rank, p.taps - 1), x.view(), cpx::rows<T const>(weight, p.taps),
                           std::span<T const>(bias), p.act, y.view(), comm, states);
        return y;
    });
}

/// Returns for every sequence the last K rows of `initial` (zeros if empty) and its own, as whole states.
template <class T>
std::vector<T> newest_rows(conv<T> const& p, std::vector<T> const& initial) {
    std::vector<T> newest;
    index_t const window = p.taps * p.channels;
    for (index_t s = 0; s < p.batch.sequences(); ++s) {
        auto all =
            initial.empty() ? std::vector<T>(static_cast<std::size_t>(window)) : slice(initial, window, s, s + 1);
        auto const own = slice(p.x, p.channels, p.batch.offset(s), p.batch.offset(s + 1));
        all.insert(all.end(), own.begin(), own.end());
        newest.insert(newest.end(), all.end() - window, all.end());
    }
    return newest;
}

/// Returns what every rank holds of whole states: of those for which `held(rank, sequence)`, else poison.
template <class T, cpx::any_sharding S, class F>
rank_states<T> split_states(std::vector<T> const& whole, conv<T> const& p, S const& sharding,
                            std::vector<cpx::section> const& sections, F&& held) {
    rank_states<T> local(static_cast<std::size_t>(sharding.ranks()));
    for (int rank = 0; rank < sharding.ranks(); ++rank)
        for (index_t s = 0; s < p.batch.sequences(); ++s)
            for (index_t tap = 0; tap < p.taps; ++tap)
                for (index_t const c : columns(sharding, rank, sections)) {
                    auto const at = static_cast<std::size_t>((s * p.taps + tap) * p.channels + c);
                    local[static_cast<std::size_t>(rank)].push_back(held(rank, s) ? whole[at] : poison<T>());
                }
    return local;
}

/// Returns whether `rank` must know the state of a sequence: it holds one of its first taps - 1 tokens.
template <class T, cpx::any_sharding S>
bool reads_state(conv<T> const& p, S const& sharding, int rank, index_t s) {
    if (p.batch.length(s) == 0) return reference::holds_end(sharding, rank, s, cpx::side::after);
    index_t const first = p.batch.offset(s), last = std::min(first + p.taps - 1, p.batch.offset(s + 1));
    bool reads = false;
    sharding.for_each_piece(rank, [&](cpx::range piece) { reads |= piece.first < last && first < piece.last; });
    return reads;
}

/// Calls `f(sharding, sections)` by tokens and by heads.
template <class F>
void for_each_states_sharding(cpx::thd const& batch, index_t channels, F&& f) {
    std::vector<cpx::section> const whole{{channels, 1}}, split{{2, 1}, {channels - 2, 1}};
    for (int const ranks : {1, 2, 3, 5}) {
        for_each_sharding(batch, ranks, {1}, [&](std::string const& name, auto const& sharding) {
            CAPTURE(name);
            f(sharding, whole);
        });
        CAPTURE(ranks);
        f(cpx::head_sharded<>(ranks, batch, whole), whole);
        f(cpx::head_sharded<>(ranks, batch, split), split);
    }
}

} // namespace

TEST_SUITE("ops") {
    using cpx::index_t;

    TEST_CASE_TEMPLATE("the convolution is the same formula on every sharding, and the same bits", T, float, double) {
        for (auto const& p : problems<T>()) {
            CAPTURE(support::text(p.batch));
            CAPTURE(p.taps);
            auto const alone = run(p, one_rank(p.batch));
            // K products and one activation, each within a rounding
            CHECK(relative_error(alone, run(p.template as<double>())) <=
                  2 * static_cast<double>(p.taps + 2) * std::numeric_limits<T>::epsilon());
            for (int const ranks : rank_counts)
                for_each_sharding(p.batch, ranks, {1, 5}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    CHECK(same_bits(run(p, sharding), alone));
                });
            for_each_typed_sharding(p.batch, [&](std::string const& name, auto const& sharding) {
                CAPTURE(name);
                CHECK(same_bits(run(p, sharding), alone));
            });
        }
    }

    TEST_CASE_TEMPLATE("the convolution by heads gives the bits of one rank, uneven or few as the heads may be", T,
                       float, double) {
        std::vector<cpx::section> const qkv{{2, 3}, {2, 3}, {6, 2}};
        for (auto const& packing : std::vector<std::vector<index_t>>{{5, 1, 0, 12}, {}, {1, 2}}) {
            auto const p = random_conv<T>(lengths(packing), width(qkv), 4, true, cpx::activation::silu, 7);
            auto const alone = run(p, one_rank(p.batch));
            for (int const ranks : rank_counts) {
                CAPTURE(ranks);
                CHECK(same_bits(run(p, cpx::head_sharded<>(ranks, p.batch, qkv), qkv), alone));
                CHECK(same_bits(run(p, cpx::head_sharded<>(ranks, p.batch, {{width(qkv), 1}})), alone));
            }
        }
    }

    TEST_CASE("the convolution passes the forward scenarios of peers") {
        for (scenario const& s : peers) {
            CAPTURE(s.source);
            auto const p = random_conv<float>(lengths(s.lengths), 128, s.taps, true, cpx::activation::silu, 11);
            auto const alone = run(p, one_rank(p.batch));
            CHECK(relative_error(alone, run(p.as<double>())) <= 1e-6);
            CHECK(same_bits(run(p, by_tokens(cpx::shard<cpx::scope::batch>(p.batch, cpx::sequential<>(s.ranks)))),
                            alone));
            CHECK(same_bits(run(p, by_tokens(cpx::shard(p.batch, cpx::zigzag<>(s.ranks)))), alone));
        }
    }

    TEST_CASE("a token changes no bit of another sequence and of no token before it, not even by NaN") {
        for (index_t const taps : {2, 4, 8}) {
            auto const p = random_conv<float>(lengths({9, 1, 14, 0, 3}), 4, taps, true, cpx::activation::silu, 3);
            for (float const change : {0.5f, std::numeric_limits<float>::quiet_NaN()})
                for (int const ranks : {1, 3, 5})
                    for_each_sharding(p.batch, ranks, {1}, [&](std::string const& name, auto const& sharding) {
                        CAPTURE(name);
                        auto const before = run(p, sharding);
                        for (index_t const row : {0, 8, 9, 10, 17, 23, 24}) {
                            CAPTURE(row);
                            auto other = p;
                            for (index_t d = 0; d < 4; ++d) other.x[static_cast<std::size_t>(row * 4 + d)] += change;
                            auto const after = run(other, sharding);
                            index_t const end = std::min(p.batch.offset(p.batch.sequence(row) + 1), row + taps);
                            CHECK(same_rows(after, before, 4, 0, row));
                            CHECK(same_rows(after, before, 4, end, p.batch.tokens()));
                            for (index_t changed = row; changed < end; ++changed)
                                CHECK_FALSE(same_rows(after, before, 4, changed, changed + 1));
                        }
                    });
        }
    }

    TEST_CASE_TEMPLATE("final states are the newest rows of the initial ones and the sequence, where it ends", T, float,
                       double) {
        for (index_t const taps : {1, 2, 4, 8}) {
            auto const p = random_conv<T>(lengths({0, 1, taps - 1, taps, taps + 3, 0, 20}), 6, taps, true,
                                          cpx::activation::silu, static_cast<std::uint64_t>(taps));
            CAPTURE(taps);
            support::splitmix numbers(8);
            auto const random = uniform<T>(numbers, p.batch.sequences() * taps * p.channels);
            for (auto const& initial : {std::vector<T>(), random}) {
                auto const newest = newest_rows(p, initial);
                for_each_states_sharding(p.batch, p.channels, [&](auto const& sharding, auto const& sections) {
                    auto const given = initial.empty()
                                           ? rank_states<T>()
                                           : split_states(initial, p, sharding, sections, [&](int r, index_t s) {
                                                 return reads_state(p, sharding, r, s);
                                             });
                    auto const expected = split_states(newest, p, sharding, sections, [&](int r, index_t s) {
                        return reference::holds_end(sharding, r, s, cpx::side::after);
                    });
                    auto final = split_states(newest, p, sharding, sections, [](int, index_t) { return false; });
                    auto const y = run_on(p, sharding, sections, given, final);
                    for (std::size_t rank = 0; rank < final.size(); ++rank)
                        CHECK(same_bits(final[rank], expected[rank]));
                    for (T const value : y) CHECK(std::isfinite(value));
                    if (initial.empty()) CHECK(same_bits(y, run(p, sharding, sections)));
                });
            }
        }
    }

    TEST_CASE_TEMPLATE("sequences that go on in the next batch give the bits of one call", T, float, double) {
        for (index_t const taps : {1, 2, 4, 8}) {
            // cut before, after and around the reach of the convolution, and between tokens
            std::vector<std::array<index_t, 3>> const counts = {
                {0, 3, 0}, {1, 0, 1}, {taps - 1, 1, 9}, {taps, taps, 1}, {5, 11, taps - 1}, {0, 0, 0}, {1, 1, 1}};
            std::vector<index_t> all;
            for (auto const& [a, b, c] : counts) all.push_back(a + b + c);
            auto const p = random_conv<T>(lengths(all), 5, taps, taps % 2 == 0, cpx::activation::silu, 31);
            CAPTURE(taps);
            auto const whole = run(p, one_rank(p.batch));
            for (int const ranks : {1, 2, 3, 5})
                for (std::size_t layout = 0; layout < 4; ++layout) { // the ranks of a sequence change with its length
                    rank_states<T> states;
                    std::vector<T> known;
                    std::vector<index_t> done(counts.size());
                    for (std::size_t turn = 0; turn < 3; ++turn) {
                        auto batch = p;
                        std::vector<index_t> now;
                        batch.x.clear();
                        std::vector<T> expected;
                        for (std::size_t s = 0; s < counts.size(); ++s) {
                            index_t const first = p.batch.offset(static_cast<index_t>(s)) + done[s];
                            now.push_back(counts[s][turn]);
                            done[s] += now.back();
                            for (auto const& [from, to] : {std::pair(&p.x, &batch.x), std::pair(&whole, &expected)}) {
                                auto const rows = slice(*from, p.channels, first, first + now.back());
                                to->insert(to->end(), rows.begin(), rows.end());
                            }
                        }
                        batch.batch = lengths(now);
                        CAPTURE(turn);
                        auto const check = [&](auto const& sharding, std::vector<cpx::section> const& sections) {
                            // in place, on every rank: what no rank wrote stays
                            if (turn == 0)
                                states = split_states(newest_rows(batch, {}), batch, sharding, sections,
                                                      [](int, index_t) { return false; });
                            auto const y = run_on(batch, sharding, sections, turn ? states : rank_states<T>(), states);
                            CHECK(same_bits(y, expected));
                        };
                        std::vector<cpx::section> const sections{{p.channels, 1}};
                        if (layout == 3) {
                            check(cpx::head_sharded<>(ranks, batch.batch, sections), sections);
                            continue;
                        }
                        cpx::table const layouts[] = {cpx::table(cpx::sequential<>(ranks)),
                                                      cpx::table(cpx::zigzag<>(ranks)),
                                                      cpx::table(cpx::striped<>(ranks))};
                        by_tokens const sharding = cpx::shard<cpx::scope::batch>(batch.batch, layouts[layout]);
                        check(sharding, sections);
                        known = newest_rows(batch, known); // handed to all ranks
                        states = split_states(known, batch, sharding, sections, [](int, index_t) { return true; });
                    }
                }
        }
    }

    TEST_CASE("rows before segments and newest rows of sequences that go on are those of their tokens") {
        for (auto const& list : std::vector<std::vector<index_t>>{{5, 1, 0, 12, 3}, {37, 8, 21}, {0, 2}, {}})
            for (int const ranks : {1, 3, 5})
                for_each_sharding(lengths(list), ranks, {1, 4}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    for (index_t const reach : {0, 3, 7}) {
                        CAPTURE(reach);
                        std::atomic<index_t> strange = 0, ended = 0;
                        cpx::threads::run(
                            ranks, [&](cpx::threads& comm) { strange += strange_rows(sharding, reach, comm, ended); });
                        CHECK(strange == 0);
                        CHECK(ended == sharding.batch().sequences());
                    }
                });
    }

    TEST_CASE("the convolution rejects what does not fit, before anything moves") {
        auto const batch = lengths({6, 5}), other = lengths({5, 6});
        using S = by_tokens;
        S const sharding = cpx::shard(batch, cpx::zigzag<>(1));
        std::vector<float> const weight(12), bias(3);
        std::vector<float> values(33), written(33);
        cpx::rows<float const> const w(weight, 4);
        cpx::sharded<float, S> const x({values, 3}, sharding, 0), y({written, 3}, sharding, 0),
            foreign({values, 3}, cpx::shard(other, cpx::zigzag<>(1)), 0);
        cpx::sharded<float, S> const narrow = x.columns(0, 2), low(x.data().sub(0, 10), sharding, 0);
        auto const plan = cpx::halo(sharding, 0, 3);
        auto const call = [](auto const& p, auto const& from, auto const& taps, std::span<float const> b,
                             auto const& to) {
            return [=] {
                cpx::threads::run(1, [&](cpx::threads& comm) {
                    cpx::causal_conv1d(p, from, taps, b, cpx::activation::none, to, comm);
                });
            };
        };
        std::string const conv = "causal_conv1d: ", taps = "shape of weight: expected ";
        support::rejects({"causal_conv1d.cpp", conv + taps + "(3, 3), the plan bringing 2 rows, got (3, 4)"},
                         call(cpx::halo(sharding, 0, 2), x, w, {}, y));
        support::rejects({conv + taps + "(3, 4), the plan bringing 3 rows, got (4, 3)"},
                         call(plan, x, cpx::rows<float const>(weight, 3), {}, y));
        support::rejects({conv + "rows that the plan brings: expected those before a segment, got those after"},
                         call(cpx::halo(sharding, 0, 3, cpx::side::after), x, w, {}, y));
        support::rejects({"causal_conv1d.cpp", "causal_conv1d: activation: expected none or silu, got 7"}, [&] {
            cpx::threads::run(1, [&](cpx::threads& comm) {
                cpx::causal_conv1d(plan, x, w, {}, static_cast<cpx::activation>(7), y, comm);
            });
        });
        support::rejects({"causal_conv1d: sharding of x: expected the plan's"}, call(plan, foreign, w, {}, y));
        support::rejects({"causal_conv1d: sharding of y: expected the plan's"}, call(plan, x, w, {}, foreign));
        support::rejects({"size of bias: expected 3, got 2"}, call(plan, x, w, std::span(bias).first(2), y));
        support::rejects({taps + "(3, 4)", "got (2, 4)"}, call(plan, x, w.sub(0, 2), {}, y));
        support::rejects({"causal_conv1d: weight: expected memory, got null"},
                         call(plan, x, cpx::rows<float const>(static_cast<float const*>(nullptr), 3, 4), {}, y));
        support::rejects({"shape of y: expected (11, 3), got (11, 2)"}, call(plan, x, w, {}, narrow));
        support::rejects({"shape of x: expected (11, 3), got (10, 3)"}, call(plan, low, w, {}, y));
        support::rejects({"shape of y: expected (11, 3), got (10, 3)"}, call(plan, x, w, {}, low));
        support::rejects({conv + taps + "(3, 4), the plan bringing 3 rows, got (11, 1)"},
                         call(plan, x, std::span(weight).first(11), {}, y));
        CHECK(support::message(call(plan, x, w, bias, y)) == "");
        CHECK(support::message(call(plan, x, weight, bias, y)) == "");
        cpx::row_buffer<float> const own_weight(3, 4), turned(4, 3), own_bias(1, 3);
        CHECK(support::message(call(plan, x, own_weight, own_bias, y)) == "");
        support::rejects({taps + "(3, 4), the plan bringing 3 rows, got (4, 3)"}, call(plan, x, turned, {}, y));

        // In place it would read what it has written.
        support::rejects({"causal_conv1d.cpp", "causal_conv1d: overlap of y and x: expected none, got some"},
                         call(plan, x, w, {}, x));
        cpx::rows<float> const in_y(written.data(), 3, 4);
        support::rejects({"overlap of y and weight"}, call(plan, x, in_y, {}, y));
        support::rejects({"overlap of y and bias"}, call(plan, x, w, std::span(written).last(3), y));
        CHECK(std::ranges::count(values, 0.f) == 33);

        std::vector<float> states(2 * 12 + 12);
        cpx::sharded<float, S> const to = y;
        auto const with = [&](cpx::causal_conv1d_states<float> const& given) {
            return [=, &given] {
                cpx::threads::run(1, [&](cpx::threads& comm) {
                    cpx::causal_conv1d(plan, x, w, {}, cpx::activation::none, to, comm, given);
                });
            };
        };
        std::ranges::fill(values, 1.f);
        cpx::rows<float> const good(states.data(), 2, 12), three(states.data(), 3, 12),
            narrow_states(states.data(), 2, 9);
        std::string const shape = "shape of states: expected (2, 12), got ";
        for (auto const& bad : {three, narrow_states}) {
            auto const size = '(' + std::to_string(bad.count()) + ", " + std::to_string(bad.width()) + ')';
            support::rejects({"causal_conv1d.cpp", shape + size}, with({bad, good}));
            support::rejects({"causal_conv1d.cpp", shape + size}, with({good, bad}));
        }
        for (float const value : states) CHECK(value == 0);
        cpx::rows<float> const in_x(values.data(), 2, 12), later(states.data() + 12, 2, 12);
        support::rejects({"overlap of final and x: expected none"}, with({good, in_x}));
        support::rejects({"overlap of final and initial: expected none, or the same rows"}, with({good, later}));
        CHECK(support::message(with({good, good})) == "");
        CHECK(std::count(states.begin(), states.end(), 1.f) == 24);
    }

    TEST_CASE("ranks that convolve with another activation, or with a bias, are told, forward and backward") {
        for (int const ranks : {2, 3})
            for (bool const backward : {false, true}) {
                by_tokens const sharding = cpx::shard(lengths({12}), cpx::zigzag<>(ranks));
                std::vector<double> const weight(12), bias(3);
                std::string const others = ranks == 2 ? " (rank 0), " : " (ranks 0 1), ",
                                  odd = " (rank " + std::to_string(ranks - 1) + ')';
                auto const told = [&](std::string const& passage, cpx::activation act, std::span<double const> added) {
                    support::rejects({"causal_conv1d.cpp", "ranks disagree on " + passage}, [&] {
                        cpx::threads::run(ranks, [&](cpx::threads& comm) {
                            int const rank = comm.rank();
                            bool const last = rank == ranks - 1;
                            auto const x = cpx::make_tensor<double>(sharding, rank, 3);
                            auto y = x;
                            auto const before = cpx::halo(sharding, rank, 3);
                            auto const with = last ? act : cpx::activation::silu;
                            auto const of = last ? added : std::span<double const>(bias);
                            if (backward)
                                cpx::causal_conv1d_backward(before, cpx::halo(sharding, rank, 3, cpx::side::after), x,
                                                            weight, of, with, x, cpx::causal_conv1d_gradients{y}, comm);
                            else
                                cpx::causal_conv1d(before, x, weight, of, with, y, comm);
                        });
                    });
                };
                told("activation: expected one value on all ranks, got silu" + others + "none" + odd,
                     cpx::activation::none, bias);
                told("bias: expected one value on all ranks, got given" + others + "none" + odd, cpx::activation::silu,
                     {});
            }
    }

    TEST_CASE("the backward of the convolution leaves out what is not wanted, and rejects what does not fit") {
        auto const p = random_conv<double>(lengths({6, 5}), 3, 4, true, cpx::activation::silu, 4);
        using S = by_tokens;
        S const sharding = cpx::shard(p.batch, cpx::zigzag<>(1)), other = cpx::shard(lengths({5, 6}), cpx::zigzag<>(1));
        auto const before = cpx::halo(sharding, 0, 3), after = cpx::halo(sharding, 0, 3, cpx::side::after);
        std::vector<double> values = p.x, written(values.size()), sums(12), biases(3);
        cpx::rows<double const> const w(p.weight, 4);
        cpx::sharded<double, S> const x({values, 3}, sharding, 0), dx({written, 3}, sharding, 0);
        cpx::sharded<double, S> const foreign(x.data(), other, 0), foreign_dx(dx.data(), other, 0);
        cpx::sharded<double, S> const low(x.data().sub(0, 10), sharding, 0), low_dx(dx.data().sub(0, 10), sharding, 0);
        cpx::rows<double> const dweight(sums, 4);
        std::span<double> const dbias(biases);
        std::span<double const> const bias(p.bias);
        struct arguments {
            cpx::halo_plan<S> before, after;
            cpx::sharded<double, S> x, dy;
            cpx::rows<double const> weight;
            std::span<double const> bias;
            cpx::causal_conv1d_gradients<double, S> to;
        };
        arguments const good{before, after, x, x, w, bias, {dx, dweight, dbias}};
        auto const call = [&](auto&& change) {
            arguments a = good;
            change(a);
            return [a] {
                cpx::threads::run(1, [&](cpx::threads& comm) {
                    cpx::causal_conv1d_backward(a.before, a.after, a.x, a.weight, a.bias, cpx::activation::silu, a.dy,
                                                a.to, comm);
                });
            };
        };
        auto const rejects = [&](std::string const& passage, auto&& change) {
            support::rejects({"causal_conv1d.cpp", "causal_conv1d_backward: " + passage}, call(change));
            for (auto const* touched : {&written, &sums, &biases})
                CHECK(std::ranges::all_of(*touched, [](double v) { return v == 0; }));
        };
        rejects("sharding of x: expected that of the plans", [&](arguments& a) { a.x = foreign; });
        rejects("sharding of x: expected that of the plans", [&](arguments& a) { a.before = cpx::halo(other, 0, 3); });
        rejects("sharding of dy: expected that of x", [&](arguments& a) { a.dy = foreign; });
        rejects("sharding of dx: expected that of x", [&](arguments& a) { a.to.dx = foreign_dx; });
        std::string const shorter = "shape of weight: expected (3, 3), the plan bringing 2 rows, got (3, 4)";
        rejects(shorter, [&](arguments& a) { a.before = cpx::halo(sharding, 0, 2); });
        rejects("rows that the plan brings: expected those before a segment, got those after",
                [&](arguments& a) { std::swap(a.before, a.after); });
        rejects(shorter, [&](arguments& a) { a.after = cpx::halo(sharding, 0, 2, cpx::side::after); });
        rejects("size of bias: expected 3, got 2", [&](arguments& a) { a.bias = a.bias.first(2); });
        rejects("shape of x: expected (11, 3), got (10, 3)", [&](arguments& a) { a.x = low; });
        rejects("shape of dy: expected (11, 3), got (10, 3)", [&](arguments& a) { a.dy = low; });
        rejects("shape of dx: expected (11, 3), got (10, 3)", [&](arguments& a) { a.to.dx = low_dx; });
        rejects("shape of weight: expected (3, 4), the plan bringing 3 rows, got (2, 4)",
                [&](arguments& a) { a.weight = w.sub(0, 2); });
        rejects("shape of dweight: expected (3, 4), got (3, 3)",
                [&](arguments& a) { a.to.dweight = dweight.columns(0, 3); });
        rejects("size of dbias: expected 3, got 2", [&](arguments& a) { a.to.dbias = dbias.first(2); });
        rejects("overlap of dx and dy: expected none, got some", [&](arguments& a) { a.dy = dx; });
        rejects("overlap of dx and x: expected none, got some", [&](arguments& a) { a.x = dx; });
        rejects("overlap of dbias and bias", [&](arguments& a) { a.bias = dbias; });
        rejects("overlap of dx and dweight", [&](arguments& a) { a.to.dweight = std::span(written).first(12); });

        CHECK(support::message(call([](arguments&) {})) == "");
        auto const all = std::array{written, sums, biases};
        for (cpx::sum_order const order : {cpx::sum_order::by_rank, cpx::sum_order::by_row})
            for (bool const of_weight : {false, true})
                for (bool const of_bias : {false, true}) {
                    for (auto* reset : {&written, &sums, &biases}) std::ranges::fill(*reset, 0.);
                    CHECK(support::message(call([&](arguments& a) {
                              if (!of_weight) a.to.dweight = {};
                              if (!of_bias) a.to.dbias = {};
                              a.to.order = order;
                          })) == "");
                    CHECK(same_bits(written, all[0]));
                    CHECK(same_bits(sums, of_weight ? all[1] : std::vector<double>(12)));
                    CHECK(same_bits(biases, of_bias ? all[2] : std::vector<double>(3)));
                }
    }
}
