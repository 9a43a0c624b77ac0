// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/gated_delta_rule.hpp>

#include <cpx/core/element_name.hpp>
#include <cpx/ops/eigen.hpp>
#include <cpx/testing/counted.hpp>

#include <doctest/doctest.h>

#include <ops/on_ranks.hpp>
#include <ops/reference.hpp>
#include <support/rejects.hpp>

#include <bit>
#include <mutex>

// A rank that has Eigen's type exchanges with one that has a device's; see tests/cuda/runtime.cu.
static_assert(cpx::element_name<Eigen::half> == "float16" && cpx::element_name<Eigen::bfloat16> == "bfloat16");

namespace {

using namespace on_ranks;
using cpx::index_t;
using reference::delta, reference::random_delta, reference::result, reference::run;
using support::lengths;

static_assert(cpx::carry_kind<cpx::serial> && cpx::carry_kind<cpx::scan> && !cpx::carry_kind<int>);

/// Every choice of heads, chunk, normalisation, scale, initial states and decay, on random batches.
template <class T>
std::vector<delta<T>> problems() {
    cpx::delta_rule_heads const heads[] = {{1, 1, 8, 4}, {2, 4, 3, 5}, {1, 3, 16, 16}, {3, 3, 8, 8}, {2, 6, 1, 1}};
    index_t const chunks[] = {1, 5, 16, 64};
    support::splitmix numbers(5);
    std::vector<delta<T>> list;
    for (std::size_t i = 0; i < 20; ++i) {
        cpx::delta_rule_options const options{chunks[i % 4], i % 3 != 0,
                                              i % 7 == 0 ? std::optional(0.5) : std::nullopt};
        double const decay = i % 4 == 0 ? 0 : i % 4 == 1 ? 1e-3 : i % 4 == 2 ? 0.3 : 3;
        list.push_back(random_delta<T>(random_batch(numbers, 6), heads[i % 5], options, decay, i % 2 == 1, i));
    }
    return list;
}

/// The rounding of a step, once for every token of the longest sequence, with room for sums over the head.
template <class T>
double tolerance(cpx::thd const& batch) {
    index_t longest = 8;
    for (index_t s = 0; s < batch.sequences(); ++s) longest = std::max(longest, batch.length(s));
    return 2 * static_cast<double>(longest) * std::numeric_limits<T>::epsilon();
}

template <class T>
void check_close(result<T> const& got, result<double> const& expected, cpx::thd const& batch) {
    CHECK(relative_error(got.o, expected.o) <= tolerance<T>(batch));
    CHECK(relative_error(got.final, expected.final) <= tolerance<T>(batch));
}

template <class T>
void check_same(result<T> const& got, result<T> const& expected) {
    CHECK(same_bits(got.o, expected.o));
    CHECK(same_bits(got.final, expected.final));
}

/// Returns the problem of one sequence of `p`.
template <class T>
delta<T> alone(delta<T> const& p, index_t sequence) {
    return {lengths({p.batch.length(sequence)}), p.heads, p.options,
            slice(p.x, width(p.sections()), p.batch.offset(sequence), p.batch.offset(sequence + 1)),
            p.initial.empty() ? p.initial : slice(p.initial, p.heads.value_heads * p.state(), sequence, sequence + 1)};
}

struct scenario {
    char const* source;
    int ranks;
    std::vector<index_t> lengths;
};

std::vector<scenario> const peers = {
    {"miles 957: states reset at every boundary", 2, {128, 128}},
    {"miles 957: states reset at every boundary", 4, {64, 192, 256}},
    {"miles 957: CP=2 hard-coded", 3, {12, 18, 6}},
    {"miles 957: CP=2 hard-coded", 5, {50, 10}},
    {"miles 957: CP=2 hard-coded", 8, {16, 32, 48}},
    {"miles 957: odd parts", 2, {10, 8}},
    {"miles 957: lengths that W does not divide", 2, {7, 9}},
    {"miles 957: lengths that 2W does not divide", 2, {6, 10}},
    {"miles 957: lengths that 2W does not divide", 4, {12, 20}},
    {"miles slice_with_cp: ranks of nothing but padding", 4, {3}},
    {"miles slice_with_cp: ranks of nothing but padding", 8, {1}},
    {"miles slice_with_cp: a sequence without tokens", 4, {5, 0, 7}},
    {"miles 957: many tiny sequences", 2, std::vector<index_t>(8, 4)},
    {"miles 957: many tiny sequences", 4, std::vector<index_t>(16, 8)},
    {"miles 957: many tiny sequences", 5, std::vector<index_t>(20, 10)},
    {"twinkle test_twinkle_qwen3_5_text_model.py, packed", 2, {3, 5}},
};

} // namespace

TEST_SUITE("ops") {
    using cpx::index_t;

    TEST_CASE_TEMPLATE("the delta rule is the recurrence over tokens, whatever the sharding and the carry", T, float,
                       double) {
        auto const list = problems<T>();
        std::vector<result<double>> expected;
        for (auto const& p : list) expected.push_back(run(p.template as<double>()));
        std::size_t turn = 0;
        for (int const ranks : rank_counts)
            for (std::size_t repeat = 0; repeat < 5; ++repeat) {
                std::size_t const i = turn++ % list.size();
                CAPTURE(i);
                CAPTURE(support::text(list[i].batch));
                for_each_sharding(list[i].batch, ranks, {1, 16}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    check_close(run<cpx::scan>(list[i], sharding), expected[i], list[i].batch);
                    check_close(run<cpx::serial>(list[i], sharding), expected[i], list[i].batch);
                });
            }
    }

    TEST_CASE("the delta rule runs on layouts of every type") {
        struct backwards { // a layout is three functions
            int ranks() const { return 4; }
            int chunks() const { return 7; }
            int owner(int chunk) const { return (7 - chunk) / 2; }
        };
        auto const p = random_delta<double>(lengths({40, 24, 0, 7, 1}), {2, 4, 8, 8}, {.chunk = 16}, 1e-2, true, 1);
        auto const expected = run(p.as<double>());
        auto const check = [&](auto const& sharding) {
            check_close(run<cpx::scan>(p, sharding), expected, p.batch);
            check_close(run<cpx::serial>(p, sharding), expected, p.batch);
        };
        check(cpx::shard(p.batch, cpx::zigzag<4>{}, cpx::aligned<16>{}));
        check(by_tokens(cpx::shard<cpx::scope::batch>(p.batch, cpx::striped<4, 2>{}, cpx::aligned<16>{})));
        check(by_tokens(cpx::shard(p.batch, backwards{})));
        check(by_tokens(
            cpx::shard(p.batch, // miles' rule
                       cpx::by_length{cpx::zigzag<4>{}, cpx::sequential<4>{}, [](index_t n) { return n % 8 == 0; }})));
    }

    TEST_CASE_TEMPLATE("serial with cuts at multiples of the chunk gives the bits of one rank", T, float, double) {
        for (index_t const chunk : {1, 16, 64}) {
            auto const p =
                random_delta<T>(lengths({150, 64, 1, 0, 97, 16}), {1, 2, 8, 8}, {.chunk = chunk}, 1e-2, true, 3);
            auto const one = run<cpx::serial>(p, one_rank(p.batch));
            check_same(run<cpx::scan>(p, one_rank(p.batch)), one);
            CHECK(cpx::is_exact<cpx::scan>(one_rank(p.batch), chunk));
            CHECK(cpx::is_exact<cpx::serial>(one_rank(p.batch), chunk));
            int const unit = static_cast<int>(chunk);
            for (int const ranks : {2, 3, 4, 5, 8})
                for_each_sharding(p.batch, ranks, {unit, 2 * unit}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    CHECK(cpx::is_exact<cpx::serial>(sharding, chunk));
                    CHECK_FALSE(cpx::is_exact<cpx::scan>(sharding, chunk));
                    check_same(run<cpx::serial>(p, sharding), one);
                });
        }
        auto const batch = lengths({100, 3});
        CHECK(cpx::is_exact<cpx::serial>(cpx::shard(batch, cpx::zigzag<4>{}, cpx::aligned<>{}), 64));
        CHECK(
            cpx::is_exact<cpx::serial>(cpx::shard<cpx::scope::batch>(batch, cpx::zigzag<4>{}, cpx::aligned<32>{}), 16));
        CHECK_FALSE(cpx::is_exact<cpx::serial>(cpx::shard(batch, cpx::zigzag<4>{}, cpx::aligned<32>{}), 64));
        CHECK_FALSE(cpx::is_exact<cpx::serial>(cpx::shard(batch, cpx::zigzag<4>{}), 1 + 63));
    }

    TEST_CASE_TEMPLATE("by heads the delta rule gives the bits of one rank, uneven or few as the heads may be", T,
                       float, double) {
        for (cpx::delta_rule_heads const& heads :
             {cpx::delta_rule_heads{1, 1, 8, 4}, {2, 6, 4, 8}, {5, 5, 8, 8}, {1, 7, 4, 4}, {4, 16, 2, 2}}) {
            auto const p = random_delta<T>(lengths({37, 0, 65, 1}), heads, {.chunk = 16}, 1e-2, heads.key_heads > 1, 9);
            auto const one = run<cpx::serial>(p, one_rank(p.batch));
            for (int const ranks : rank_counts) {
                cpx::head_sharded<> const sharding(ranks, p.batch, p.sections());
                CAPTURE(ranks);
                CAPTURE(heads.value_heads);
                CHECK(cpx::is_exact<cpx::scan>(sharding, 16));
                CHECK(cpx::is_exact<cpx::serial>(sharding, 16));
                check_same(run<cpx::serial>(p, sharding), one);
                check_same(run<cpx::scan>(p, sharding), one);
            }
            check_same(run<cpx::scan>(p, cpx::head_sharded<>(3, p.batch, p.sections())), one);
        }
    }

    TEST_CASE("the delta rule passes the forward scenarios of peers") {
        for (scenario const& s : peers) {
            CAPTURE(s.source);
            CAPTURE(s.ranks);
            auto const p = random_delta<double>(lengths(s.lengths), {2, 4, 8, 8}, {.chunk = 16}, 1e-3, false, 4);
            auto const expected = run(p.as<double>());
            auto const one = run<cpx::serial>(p, one_rank(p.batch));
            for_each_sharding(p.batch, s.ranks, {1, 16}, [&](std::string const& name, auto const& sharding) {
                CAPTURE(name);
                check_close(run<cpx::scan>(p, sharding), expected, p.batch);
                auto const serial = run<cpx::serial>(p, sharding);
                check_close(serial, expected, p.batch);
                if (cpx::is_exact<cpx::serial>(sharding, 16)) check_same(serial, one);
            });
        }
    }

    TEST_CASE_TEMPLATE("a token changes no bit of another sequence and of no token before it, not even by NaN", How,
                       cpx::scan, cpx::serial) {
        // without decay: what leaks stays
        auto const p = random_delta<double>(lengths({19, 1, 24, 0, 6}), {1, 2, 4, 4}, {.chunk = 5}, 0, true, 6);
        index_t const columns = width(p.sections()), out = width(p.output_sections()), states = 2 * p.state();
        for (double const change : {1e-3, std::numeric_limits<double>::quiet_NaN()})
            for (int const ranks : {1, 3, 4})
                for_each_sharding(p.batch, ranks, {1, 5}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    auto const before = run<How>(p, sharding);
                    for (index_t const row : {0, 11, 18, 19, 20, 33, 49}) {
                        CAPTURE(row);
                        auto other = p;
                        for (index_t c = 0; c < columns; ++c)
                            other.x[static_cast<std::size_t>(row * columns + c)] += change;
                        auto const after = run<How>(other, sharding);
                        index_t const s = p.batch.sequence(row), end = p.batch.offset(s + 1);
                        CHECK(same_rows(after.o, before.o, out, 0, row));
                        CHECK(same_rows(after.o, before.o, out, end, p.batch.tokens()));
                        CHECK(same_rows(after.final, before.final, states, 0, s));
                        CHECK(same_rows(after.final, before.final, states, s + 1, p.batch.sequences()));
                        CHECK_FALSE(same_rows(after.o, before.o, out, row, row + 1));
                        CHECK_FALSE(same_rows(after.o, before.o, out, end - 1, end));
                        CHECK_FALSE(same_rows(after.final, before.final, states, s, s + 1));
                    }
                });
    }

    TEST_CASE_TEMPLATE("a sequence has the bits that it has alone, whatever it is packed with", T, float, double) {
        for (auto order : std::vector<std::vector<index_t>>{{33, 1, 70, 16}, {70, 16, 33, 1}, {16, 0, 1, 70, 33}}) {
            auto const p = random_delta<T>(lengths(order), {2, 4, 8, 4}, {.chunk = 16}, 1e-2, true, 8);
            index_t const out = width(p.output_sections()), states = p.heads.value_heads * p.state();
            auto const check = [&](result<T> const& all) {
                for (index_t s = 0; s < p.batch.sequences(); ++s) {
                    auto const own = alone(p, s);
                    auto const one = run<cpx::scan>(own, one_rank(own.batch));
                    CHECK(same_bits(slice(all.o, out, p.batch.offset(s), p.batch.offset(s + 1)), one.o));
                    CHECK(same_bits(slice(all.final, states, s, s + 1), one.final));
                }
            };
            check(run<cpx::serial>(p, one_rank(p.batch)));
            check(run<cpx::serial>(
                p, by_tokens(cpx::shard<cpx::scope::batch>(p.batch, cpx::zigzag<3>{}, cpx::aligned<16>{}))));
            check(run<cpx::scan>(p, cpx::head_sharded<>(3, p.batch, p.sections())));
        }
    }

    TEST_CASE("a scan sends each segment one state for each binary digit of its level, and one map fewer") {
        for (int const ranks : {1, 2, 3, 6, 8, 33, 64}) {
            CAPTURE(ranks);
            auto const p = random_delta<double>(lengths({130, 3}), {1, 2, 3, 5}, {.chunk = 4}, 1e-2, false, 11);
            by_tokens const sharding = cpx::shard(p.batch, cpx::sequential<>{ranks});
            index_t numbers = 0, bytes = 0;
            for (index_t const length : {130, 3})
                for (index_t level = 1; level < std::min<index_t>(ranks, length); ++level) {
                    index_t const digits = std::bit_width(static_cast<unsigned>(level));
                    numbers += 2 * (digits * 3 * 5 + (digits - 1) * 3 * 3);
                }
            std::mutex guard;
            cpx::threads::run(ranks, [&](cpx::threads& comm) {
                cpx::counted counter(comm);
                auto const x = take(p.x, p.sections(), sharding, comm.rank());
                auto o = poisoned<double>(sharding, comm.rank(), 10);
                auto const c = x.view();
                cpx::gated_delta_rule(cpx::carry<cpx::scan>(sharding, comm.rank()),
                                      cpx::delta_rule_tensors<double, by_tokens>{c.columns(0, 3), c.columns(3, 3),
                                                                                 c.columns(6, 10), c.columns(16, 2),
                                                                                 c.columns(18, 2), o.view()},
                                      p.heads, p.options, counter);
                std::lock_guard const lock(guard);
                bytes += counter.sent("carry, scan").bytes;
            });
            CHECK(bytes == numbers * 8);
        }
    }

    TEST_CASE("the delta rule rejects what does not fit") {
        using S = by_tokens;
        auto const batch = lengths({6, 5});
        S const sharding = cpx::shard(batch, cpx::zigzag<>(1)), other = cpx::shard(lengths({5, 6}), cpx::zigzag<>(1));
        std::vector<float> values(11 * 16), states(2 * 32);
        cpx::sharded<float, S> const four({values.data(), 11, 4, 16}, sharding, 0),
            eight({values.data(), 11, 8, 16}, sharding, 0), two = four.columns(0, 2),
                                                            o({values.data() + 8, 11, 8, 16}, sharding, 0);
        cpx::delta_rule_heads const heads{1, 2, 4, 4};
        cpx::delta_rule_tensors<float, S> const good{four, four, eight, two, two, o, {}, {}};
        auto const call = [&](auto change, cpx::delta_rule_heads const& h, cpx::delta_rule_options const& options) {
            return [&, change] {
                auto t = good;
                change(t);
                cpx::threads::run(1, [&](cpx::threads& comm) {
                    cpx::gated_delta_rule(cpx::carry<cpx::scan>(sharding, 0), t, h, options, comm);
                });
            };
        };
        auto const rejects = [&](std::string const& passage, auto change) {
            support::rejects({"gated_delta_rule.cpp", "gated_delta_rule: " + passage}, call(change, heads, {}));
        };
        auto const nothing = [](auto&) {};
        CHECK(support::message(call(nothing, heads, {})) == "");
        support::rejects({"value heads: expected a multiple of the key heads 2, got 3"},
                         call(nothing, {2, 3, 4, 4}, {}));
        support::rejects({"key heads: expected at least 1, got 0"}, call(nothing, {0, 1, 4, 4}, {}));
        index_t const big = index_t{1} << 32;
        support::rejects({"gated_delta_rule.cpp", "value heads: expected 0 to 2147483647, got 4294967296"},
                         call(nothing, {1, big, 2, 4}, {}));
        support::rejects({"value heads x key_dim x dim: expected less than 2^62"}, call(nothing, {2, 2, big, big}, {}));
        support::rejects({"gated_delta_rule: value_dim: expected at least 1, got -4"},
                         call(nothing, {2, 2, 2, -4}, {}));
        support::rejects({"gated_delta_rule: value heads: expected at least 1, got 0"},
                         call(nothing, {2, 0, 4, 4}, {}));
        support::rejects({"gated_delta_rule: chunk: expected at least 1, got 0"}, call(nothing, heads, {.chunk = 0}));
        rejects("shape of q: expected (11, 4), got (11, 8)", [&](auto& t) { t.q = eight; });
        rejects("shape of k: expected (11, 4), got (11, 2)", [&](auto& t) { t.k = two; });
        rejects("shape of v: expected (11, 8), got (11, 4)", [&](auto& t) { t.v = four; });
        rejects("shape of g: expected (11, 2), got (11, 4)", [&](auto& t) { t.g = four; });
        rejects("shape of beta: expected (11, 2), got (11, 4)", [&](auto& t) { t.beta = four; });
        rejects("shape of o: expected (11, 8), got (11, 4)", [&](auto& t) { t.o = four; });
        rejects("shape of o: expected (11, 8), got (10, 8)", [&](auto& t) {
            t.o = {o.data().sub(0, 10), sharding, 0};
        });
        rejects("shape of initial: expected (2, 32), got (1, 64)", [&](auto& t) {
            t.initial = {states.data(), 1, 64};
        });
        rejects("shape of final: expected (2, 32), got (2, 16)", [&](auto& t) { t.final = {states.data(), 2, 16}; });
        rejects("sharding of k: expected the plan's", [&](auto& t) { t.k = {four.data(), other, 0}; });
        rejects("sharding of o: expected the plan's", [&](auto& t) { t.o = {eight.data(), other, 0}; });
        rejects("overlap of o and v: expected none, got some", [&](auto& t) { t.v = o; });
        rejects("overlap of o and beta", [&](auto& t) { t.beta = o.columns(6, 2); });
        cpx::rows<float> const all(states, 32);
        rejects("overlap of o and final", [&](auto& t) { t.final = {values.data(), 2, 32}; });
        rejects("overlap of o and initial", [&](auto& t) { t.initial = {values.data() + 8, 2, 32}; });
        rejects("overlap of final and initial: expected none, or the same rows", [&](auto& t) {
            t.initial = all, t.final = {states.data() + 16, 2, 32};
        });
        rejects("stride of final, bytes: expected at least the width 128, got 124", [&](auto& t) {
            t.final = {states.data(), 2, 32, 31};
        });
        CHECK(support::message(call([&](auto& t) { t.initial = t.final = all; }, heads, {})) == "");
    }
}
