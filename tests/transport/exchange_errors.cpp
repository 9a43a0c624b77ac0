// SPDX-License-Identifier: Apache-2.0
// Mistakes end in an error on every rank that names who and what, before anything moves.
#include <cpx/transport/exchange.hpp>

#include <cpx/cpx.hpp>

#include <doctest/doctest.h>

#include <support/packings.hpp>
#include <support/rejects.hpp>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>

namespace {

using namespace support;
using namespace std::chrono_literals;
using cpx::index_t;
using cpx::scope;

bool holds(std::string const& text, std::string const& passage) { return text.find(passage) != std::string::npos; }

/// What every rank says, and whether anything has been written into its target.
struct outcome {
    std::vector<std::string> errors;
    std::vector<bool> touched;
};

/// Runs `plan_of(rank)` on every rank, with rows of `width_of(rank)` numbers, into targets full of NaN.
outcome run(
    int ranks, std::function<cpx::plan(int)> const& plan_of,
    std::function<index_t(int)> const& width_of = [](int) { return 4; }) {
    using T = double;
    outcome result{std::vector<std::string>(static_cast<std::size_t>(ranks)),
                   std::vector<bool>(static_cast<std::size_t>(ranks))};
    std::vector<char> touched(static_cast<std::size_t>(ranks));
    message([&] {
        cpx::threads::run(
            ranks,
            [&](cpx::threads& comm) {
                std::size_t const r = static_cast<std::size_t>(comm.rank());
                cpx::plan const p = plan_of(comm.rank());
                index_t const width = width_of(comm.rank());
                std::vector<T> const from(
                    static_cast<std::size_t>(p.source_rows * (p.source_width ? p.source_width : width)), T(1));
                std::vector<T> to(static_cast<std::size_t>(p.target_rows * (p.target_width ? p.target_width : width)),
                                  std::numeric_limits<T>::quiet_NaN());
                try {
                    cpx::exchange(p, cpx::rows<T const>(from, p.source_width ? p.source_width : width),
                                  cpx::rows<T>(to, p.target_width ? p.target_width : width), comm);
                } catch (cpx::error const& e) {
                    result.errors[r] = e.what();
                    for (T const value : to) touched[r] = touched[r] || !std::isnan(value);
                    throw;
                }
            },
            10s);
    });
    for (std::size_t r = 0; r < touched.size(); ++r) result.touched[r] = touched[r] != 0;
    return result;
}

/// Checks that every rank reports that rank 1 differs from ranks 0 and 2 in `field`, and that nothing has moved.
void check_outcome(outcome const& o, std::string const& field) {
    for (std::size_t r = 0; r < o.errors.size(); ++r) {
        INFO("rank " << r << ": " << o.errors[r]);
        CHECK(o.errors[r].starts_with("exchange_errors.cpp:")); // the caller's line
        CHECK(holds(o.errors[r], "exchange: ranks disagree on " + field + ':'));
        CHECK(holds(o.errors[r], "(ranks 0 2)"));
        CHECK(holds(o.errors[r], "(rank 1)"));
        CHECK_FALSE(o.touched[r]);
    }
}

cpx::thd const batch = lengths({12, 30, 6});

struct half {
    std::uint16_t bits;
};
struct brain {
    std::uint16_t bits;
};

cpx::plan relayout(cpx::thd const& of, int rank) {
    return cpx::relayout(cpx::shard(of, cpx::zigzag<>{3}), cpx::shard(of, cpx::sequential<>{3}), rank);
}

/// The plan of three ranks from zigzag to sequential, unless `odd` makes another one on rank 1.
template <class Odd>
void rank_1_disagrees(std::string const& field, Odd const& odd) {
    auto const plan_of = [&](int rank) -> cpx::plan { return rank == 1 ? odd(rank) : relayout(batch, rank); };
    check_outcome(run(3, plan_of), field);
}

TEST_SUITE("transport") {
    TEST_CASE("ranks whose plans differ get an error that names the ranks and the first field, and nothing moves") {
        auto const zigzag = cpx::shard(batch, cpx::zigzag<>{3});
        auto const sequential = cpx::shard(batch, cpx::sequential<>{3});
        rank_1_disagrees("source layout",
                         [&](int r) { return cpx::relayout(cpx::shard(batch, cpx::striped<>{3}), sequential, r); });
        rank_1_disagrees("source layout",
                         [&](int r) { return cpx::relayout(cpx::shard(batch, cpx::zigzag<3>{}), sequential, r); });
        rank_1_disagrees("target layout", [&](int r) {
            return cpx::relayout(zigzag, cpx::shard<scope::batch>(batch, cpx::sequential<>{3}), r);
        });
        rank_1_disagrees("target layout", [&](int r) {
            return cpx::relayout(zigzag, cpx::shard(batch, cpx::sequential<>{3}, cpx::aligned<2>{}), r);
        });
        rank_1_disagrees("operation", [&](int r) { return cpx::halo(zigzag, r, 3); });
    }

    TEST_CASE("of batches that differ, the first offset or valid length is named, with who has which") {
        auto const rank_1_has = [](cpx::thd const& other, std::string const& field, std::string const& got) {
            auto const texts = run(3, [&](int r) { return relayout(r == 1 ? other : batch, r); }).errors;
            for (auto const& text : texts)
                CHECK_MESSAGE(
                    holds(text, "ranks disagree on " + field + ": expected one value on all ranks, got " + got), text);
        };
        rank_1_has(lengths({13, 29, 6}), "offset 1 of cu_seqlens", "12 (ranks 0 2), 13 (rank 1)");
        rank_1_has(lengths({12, 30, 7}), "offset 3 of cu_seqlens", "48 (ranks 0 2), 49 (rank 1)");
        rank_1_has(lengths({12, 30}), "offset 3 of cu_seqlens", "48 (ranks 0 2), none (rank 1)");
        rank_1_has(lengths({12, 30, 6, 0}), "offset 4 of cu_seqlens", "none (ranks 0 2), 48 (rank 1)");
        rank_1_has(cpx::thd({0, 12, 42, 48}, {12, 29, 6}), "the valid length of sequence 1",
                   "30 (ranks 0 2), 29 (rank 1)");
        rank_1_has(cpx::thd({0, 12, 42, 48}, {12, 30, 0}), "the valid length of sequence 2",
                   "6 (ranks 0 2), 0 (rank 1)");
        for (auto const& text : run(3, [&](int r) {
                                    return relayout(r == 1 ? cpx::thd({0, 12, 42, 48}, {12, 30, 6}) : batch, r);
                                }).errors)
            CHECK(text == "");

        auto const many = [](int rank,
                             index_t last) { // sequences of 1, and one that all three ranks have in another way
            std::vector<index_t> list(1000, 1);
            list[700] = last + rank;
            list.push_back(10 - rank);
            return lengths(list);
        };
        auto const texts = run(3, [&](int r) { return relayout(many(r, 1), r); }).errors;
        for (auto const& text : texts)
            CHECK_MESSAGE(holds(text, "offset 701 of cu_seqlens: expected one value on all ranks, "
                                      "got 701 (rank 0), 702 (rank 1), 703 (rank 2)"),
                          text);
    }

    TEST_CASE("owners, units and sections that differ are found and told") {
        auto const disagree = [](std::string const& field, auto const& plan_of, std::string const& got = "") {
            auto const result = run(3, plan_of);
            check_outcome(result, field);
            CHECK_MESSAGE(holds(result.errors[0], "expected one value on all ranks, got " + got), result.errors[0]);
        };
        auto const goal = cpx::shard(batch, cpx::sequential<>{3});
        disagree(
            "source sharding",
            [&](int r) -> cpx::plan {
                return cpx::relayout(cpx::shard(batch, cpx::table(3, {0, 1, r == 1 ? 0 : 2, 2})), goal, r);
            },
            "owners 0 1 2 2 (ranks 0 2), owners 0 1 0 2 (rank 1)");
        disagree(
            "source sharding",
            [&](int r) -> cpx::plan {
                return cpx::relayout(cpx::shard(batch, cpx::zigzag<>{3}, cpx::aligned<cpx::dynamic>{r == 1 ? 4 : 2}),
                                     goal, r);
            },
            "unit 2, owners 0 1 2 2 1 0 (ranks 0 2), unit 4, owners 0 1 2 2 1 0 (rank 1)");
        disagree(
            "target sharding",
            [&](int r) -> cpx::plan {
                return cpx::relayout(goal, cpx::head_sharded<>(3, batch, {{3, r == 1 ? 4 : 2}, {6, 2}}), r);
            },
            "3 heads of 2, 6 heads of 2 (ranks 0 2), 3 heads of 4, 6 heads of 2 (rank 1)");
        auto const long_table = [](int r) { // more owners than are told, and than one comparison takes
            std::vector<int> owners(600);
            owners[517] = r == 1 ? 2 : 1;
            return cpx::shard(batch, cpx::table(3, owners));
        };
        disagree(
            "owner of chunk 517 of the source sharding",
            [&](int r) -> cpx::plan { return cpx::relayout(long_table(r), goal, r); }, "1 (ranks 0 2), 2 (rank 1)");
        disagree(
            "owner of chunk 517 of the target sharding",
            [&](int r) -> cpx::plan { return cpx::relayout(long_table(r), goal, r).transposed(); },
            "1 (ranks 0 2), 2 (rank 1)");
        disagree(
            "owner of chunk 517 of the source sharding",
            [&](int r) -> cpx::plan { return cpx::halo(long_table(r), r, 3); }, "1 (ranks 0 2), 2 (rank 1)");
        disagree(
            "chunks of run 1 of the source sharding", // of 30 tokens
            [&](int r) -> cpx::plan {
                auto const rule = [most = r == 1 ? 20 : 40](index_t n) { return n <= most; };
                cpx::by_length const either{cpx::sequential<>(3), cpx::zigzag<>(3), rule};
                return cpx::relayout(cpx::shard(batch, either), goal, r);
            },
            "3 (ranks 0 2), 6 (rank 1)");
        disagree("reach", [&](int r) -> cpx::plan { return cpx::halo(goal, r, r == 1 ? 4 : 3); });
    }

    TEST_CASE("a sum of unequal numbers of values, and a tensor of another rank, are called that") {
        std::vector<std::string> texts(3);
        message([&] {
            cpx::threads::run(3, [&](cpx::threads& comm) {
                std::vector<float> values(comm.rank() == 1 ? 5 : 4);
                texts[static_cast<std::size_t>(comm.rank())] = message([&] { cpx::sum_over_ranks(values, comm); });
            });
        });
        for (auto const& text : texts)
            CHECK_MESSAGE(holds(text, "sum_over_ranks: ranks disagree on number of values: expected one value on all "
                                      "ranks, got 4 (ranks 0 2), 5 (rank 1)"),
                          text);
        cpx::threads::run(1, [](cpx::threads& comm) {
            auto const two = cpx::shard(batch, cpx::zigzag<>{2});
            auto const x = cpx::make_tensor<float>(two, 1, 1);
            rejects({"exchange_errors.cpp", "exchange: rank of the tensor: expected 0 of 1, got 1 of 2"},
                    [&] { cpx::exchange(x, cpx::shard(batch, cpx::sequential<>{2}), comm); });
        });
    }

    TEST_CASE("widths and element types that differ are found") {
        auto const plan_of = [](int r) -> cpx::plan {
            return cpx::relayout(cpx::shard(batch, cpx::zigzag<>{3}), cpx::shard(batch, cpx::sequential<>{3}), r);
        };
        check_outcome(run(3, plan_of, [](int r) { return r == 1 ? 5 : 4; }), "source width");

        std::vector<std::string> texts(3);
        message([&] {
            cpx::threads::run(3, [&](cpx::threads& comm) {
                auto const p = plan_of(comm.rank());
                auto const with = [&](auto zero) {
                    std::vector<decltype(zero)> const from(static_cast<std::size_t>(p.source_rows * 2));
                    std::vector<decltype(zero)> to(static_cast<std::size_t>(p.target_rows * 2));
                    cpx::exchange(p, cpx::rows<decltype(zero) const>(from, 2), cpx::rows<decltype(zero)>(to, 2), comm);
                };
                try {
                    comm.rank() == 1 ? with(brain{}) : with(half{}); // of one size
                } catch (cpx::error const& e) {
                    texts[static_cast<std::size_t>(comm.rank())] = e.what();
                    throw;
                }
            });
        });
        for (std::string const& text : texts) {
            CHECK(holds(text, "ranks disagree on element type"));
            CHECK_MESSAGE(holds(text, "half (ranks 0 2), "), text);
            CHECK_MESSAGE(holds(text, "brain (rank 1)"), text);
        }
    }

    TEST_CASE("a transposed plan on one rank is found") {
        auto const a = cpx::shard(batch, cpx::zigzag<>{3});
        cpx::replicated<> const all(3, batch);
        check_outcome(run(
                          3,
                          [&](int r) -> cpx::plan {
                              if (r == 1) return cpx::relayout(a, all, r).transposed();
                              return cpx::relayout(a, all, r);
                          },
                          [](int) { return 1; }),
                      "operation");
    }

    TEST_CASE("plans on which all ranks have agreed, run in another order on one rank, are found while they run") {
        auto const plan_of = [](bool first, int r) -> cpx::plan {
            cpx::head_sharded<> const heads(3, batch, {{3, 2}});
            if (first) return cpx::relayout(cpx::shard(batch, cpx::zigzag<>{3}), heads, r);
            return cpx::relayout(cpx::shard(batch, cpx::sequential<>{3}), heads, r);
        };
        std::vector<std::string> texts(3);
        message([&] {
            cpx::threads::run(3, [&](cpx::threads& comm) {
                auto const call = [&](bool first) {
                    auto const p = plan_of(first, comm.rank());
                    std::vector<double> const from(static_cast<std::size_t>(p.source_rows * 6));
                    std::vector<double> to(static_cast<std::size_t>(p.target_rows * 2));
                    cpx::exchange(p, cpx::rows<double const>(from, 6), cpx::rows<double>(to, 2), comm);
                };
                try {
                    call(true);
                    call(false);
                    call(comm.rank() != 1);
                    call(comm.rank() == 1);
                } catch (cpx::error const& e) {
                    texts[static_cast<std::size_t>(comm.rank())] = e.what();
                    throw;
                }
            });
        });
        for (std::string const& text : texts) {
            CHECK(holds(text, "ranks are in different exchanges: source layout"));
            CHECK(holds(text, "rank 1"));
            CHECK(holds(text, "zigzag"));
            CHECK(holds(text, "sequential"));
        }
    }

    TEST_CASE("a rank that runs a new plan while the others run one they have agreed on is named at once, by both") {
        auto const new_plan_on_rank_1 = [](cpx::thd const& of) {
            auto const zigzag = cpx::shard(of, cpx::zigzag<>{3});
            auto const sequential = cpx::shard(of, cpx::sequential<>{3});
            auto const striped = cpx::shard(of, cpx::striped<>{3});
            std::vector<std::string> texts(3);
            message([&] {
                cpx::threads::run(3, [&](cpx::threads& comm) {
                    auto const x = cpx::make_tensor<float>(zigzag, comm.rank(), 2);
                    auto const there = cpx::relayout(zigzag, sequential, comm.rank());
                    auto const other = cpx::relayout(zigzag, striped, comm.rank());
                    try {
                        cpx::exchange(there.transposed(), cpx::exchange(there, x, comm), comm);
                        if (comm.rank() == 1) cpx::exchange(other, x, comm);
                        cpx::exchange(there.transposed(), cpx::exchange(there, x, comm), comm);
                    } catch (cpx::error const& e) {
                        texts[static_cast<std::size_t>(comm.rank())] = e.what();
                        throw;
                    }
                });
            });
            for (std::string const& text : texts)
                for (char const* passage :
                     {"ranks are in different exchanges: target layout: expected ",
                      "striped<> over sequence, balanced ",
                      "on rank 1 (agreement on relayout zigzag<> over sequence, balanced -> striped<> ",
                      " (relayout zigzag<> over sequence, balanced -> sequential<> over sequence, balanced)"})
                    CHECK_MESSAGE(holds(text, passage), text);
        };
        new_plan_on_rank_1(batch);
        for (int turn = 0; turn < 20; ++turn) new_plan_on_rank_1(lengths({2})); // 0 waits for 2, 2 for 1, 1 for 0
    }

    TEST_CASE("a rank that takes a batch again, on which all have agreed, is told the first offset that differs") {
        struct {
            cpx::thd first, then;
            char const* problem;
        } const cases[] = {{cpx::thd({0, 17, 30, 40}), cpx::thd({0, 17, 31, 40}), "offset 2 of cu_seqlens: expected 3"},
                           {lengths({1, 1, 1, 1, 1, 1, 1, 1, 1, 5, 3, 4}),
                            lengths({1, 1, 1, 1, 1, 1, 1, 1, 1, 4, 4, 4}), // behind those that an identity has
                            "offset 10 of cu_seqlens: expected 1"},
                           {cpx::thd({0, 17, 30, 40}, {17, 13, 10}), cpx::thd({0, 17, 30, 40}, {17, 12, 10}),
                            "the valid length of sequence 1: expected 1"},
                           {lengths({17, 13, 10}), lengths({17, 13, 11}), "offset 3 of cu_seqlens: expected 4"},
                           {lengths({17, 13}), lengths({17, 13, 10}), "offset 3 of cu_seqlens: expected "}};
        for (auto const& c : cases)
            for (bool const both : {false, true}) { // whether all have taken the other one before, too
                auto const text = message([&] {
                    cpx::threads::run(3, [&](cpx::threads& comm) {
                        auto const step = [&](cpx::thd const& batch) {
                            auto const x = cpx::make_tensor<float>(cpx::shard(batch, cpx::zigzag<>(3)), comm.rank(), 2);
                            static_cast<void>(cpx::exchange(x, cpx::shard(batch, cpx::sequential<>(3)), comm));
                        };
                        step(c.first);
                        if (both) step(c.then);
                        for (int i = 0; i < 130; ++i) step(lengths({1, 1000 + i})); // more than a process remembers
                        step(comm.rank() == 1 ? c.first : c.then);
                    });
                });
                CHECK_MESSAGE(holds(text, "ranks are in different exchanges: " + std::string(c.problem)), text);
                CHECK(holds(text, "rank 1"));
            }
    }

    TEST_CASE("of all batches that come ranks remember so many, and compare again what they have forgotten") {
        auto const text = message([] {
            cpx::threads::run(3, [](cpx::threads& comm) {
                auto const step = [&](index_t length) {
                    cpx::thd const of = lengths({3, length});
                    auto x = cpx::make_tensor<float>(cpx::shard(of, cpx::zigzag<>(3)), comm.rank(), 1);
                    for (float& value : x.elements()) value = static_cast<float>(length);
                    auto const y = cpx::exchange(x, cpx::shard(of, cpx::sequential<>(3)), comm);
                    cpx::require(std::ranges::count(y.elements(), static_cast<float>(length)) == y.data().count(),
                                 "test", "rows", "those of this batch", "others");
                };
                std::size_t most = 0;
                for (index_t length = 1; length <= 1100; ++length) {
                    step(length);
                    most = std::max(most, comm.agreed().size());
                }
                for (index_t const length : {1099, 1, 1100, 2}) step(length);
                cpx::require(most == 1024, "test", "fingerprints", 1024, most);
                step(comm.rank() == 1 ? 3 : 4); // both forgotten
            });
        });
        CHECK_MESSAGE(holds(text, "ranks disagree on offset 2 of cu_seqlens"), text);
        CHECK_MESSAGE(holds(text, "7 (ranks 0 2), 6 (rank 1)"), text);
    }

    TEST_CASE("a buffer that does not fit is rejected on its rank, and the others learn who that is") {
        auto const a = cpx::shard(batch, cpx::zigzag<>{2});
        auto const b = cpx::shard(batch, cpx::sequential<>{2});
        struct {
            index_t from_rows, from_width, to_rows, to_width; // relative to what is right
            std::string passage;
        } const cases[] = {{1, 0, 0, 0, "exchange, source: rows of the buffer: expected 24, got 25"},
                           {0, 0, -1, 0, "exchange, target: rows of the buffer: expected 24, got 23"},
                           {0, 0, 0, 1, "exchange: width of the target: expected 4, got 5"}};
        for (auto const& c : cases) {
            std::vector<std::string> texts(2);
            message([&] {
                cpx::threads::run(2, [&](cpx::threads& comm) {
                    auto const p = cpx::relayout(a, b, comm.rank());
                    index_t const bad = comm.rank() == 1;
                    std::vector<double> memory(1000);
                    cpx::rows<double> const from(memory.data(), p.source_rows + bad * c.from_rows,
                                                 4 + bad * c.from_width);
                    cpx::rows<double> const to(memory.data() + 500, p.target_rows + bad * c.to_rows,
                                               4 + bad * c.to_width);
                    try {
                        cpx::exchange(p, from, to, comm);
                    } catch (cpx::error const& e) {
                        texts[static_cast<std::size_t>(comm.rank())] = e.what();
                        throw;
                    }
                });
            });
            CHECK_MESSAGE(holds(texts[1], c.passage), texts[1]);
            CHECK(holds(texts[1], "exchange_errors.cpp"));
            CHECK_MESSAGE(holds(texts[0], "rank 1 failed"), texts[0]);
        }
    }

    TEST_CASE("null buffers, strides below the width, widths of heads and foreign plans are rejected") {
        auto const a = cpx::shard(batch, cpx::zigzag<>{1});
        auto const p = cpx::relayout(a, cpx::shard(batch, cpx::sequential<>{1}), 0);
        cpx::threads::run(1, [&](cpx::threads& comm) {
            std::vector<float> memory(1000), other(1000);
            cpx::rows<float> const good(memory.data(), 48, 4), target(other.data(), 48, 4);
            rejects({"exchange, source: buffer: expected memory, got null"},
                    [&] { cpx::exchange(p, cpx::rows<float>(nullptr, 48, 4), target, comm); });
            rejects({"exchange, target: buffer: expected memory, got null"},
                    [&] { cpx::exchange(p, good, cpx::rows<float>(nullptr, 48, 4), comm); });
            rejects({"exchange, target: stride of the buffer: expected at least its width 4, got 3"},
                    [&] { cpx::exchange(p, good, cpx::rows<float>(other.data(), 48, 4, 3), comm); });
            CHECK_NOTHROW(cpx::exchange(p, good, target, comm));

            auto const heads = cpx::relayout(a, cpx::head_sharded<>(1, batch, {{2, 3}}), 0);
            rejects({"exchange, source: width of the buffer: expected 6, got 4"},
                    [&] { cpx::exchange(heads, good, target, comm); });

            auto const of_two =
                cpx::relayout(cpx::shard(batch, cpx::zigzag<>{2}), cpx::shard(batch, cpx::sequential<>{2}), 1);
            rejects({"exchange: rank of the plan: expected 0 of 1, got 1 of 2"},
                    [&] { cpx::exchange(of_two, good, target, comm); });
        });
        cpx::threads::run(2, [&](cpx::threads& comm) { // both ranks hold the plan of the other
            auto const other = cpx::relayout(cpx::shard(batch, cpx::zigzag<>{2}),
                                             cpx::shard(batch, cpx::sequential<>{2}), 1 - comm.rank());
            std::vector<float> memory(1000);
            std::string const mine = std::to_string(comm.rank()) + " of 2",
                              theirs = std::to_string(1 - comm.rank()) + " of 2";
            std::string const text = message([&] {
                cpx::exchange(other, cpx::rows<float>(memory.data(), 24, 1),
                              cpx::rows<float>(memory.data() + 500, 24, 1), comm);
            });
            cpx::require(holds(text, "rank of the plan: expected " + mine + ", got " + theirs), "test", "error",
                         "a foreign plan", text);
        });
    }

    TEST_CASE("an exchange in place is rejected before anything moves, one between columns of the same rows is not") {
        auto const sharding = cpx::shard(batch, cpx::zigzag<>{1});
        auto const p = cpx::relayout(sharding, sharding, 0);
        cpx::threads::run(1, [&](cpx::threads& comm) {
            auto x = cpx::make_tensor<float>(sharding, 0, 4);
            x.data()(1, 1) = 5;
            auto const before = x.data()(0, 0);
            auto const here = cpx::caller::here();
            std::string const overlap = "exchange: overlap of target and source: expected none, got some";
            rejects({"exchange_errors.cpp:" + std::to_string(here.line + 3), overlap},
                    [&] { cpx::exchange(p, x, x, comm); });
            rejects({overlap}, [&] { cpx::exchange(p, x.view().columns(0, 2), x.view().columns(1, 2), comm); });
            CHECK(x.data()(0, 0) == before);
            cpx::exchange(p, x.view().columns(0, 2), x.view().columns(2, 2), comm);
            CHECK(x.data()(1, 3) == 5);
            rejects({overlap}, [&] {
                std::vector<float> memory(49);
                cpx::exchange(p, cpx::rows<float>(memory.data(), 48, 1), cpx::rows<float>(memory.data() + 1, 48, 1),
                              comm);
            });
        });
    }

    TEST_CASE("tensors of the plan's type and another value are rejected before anything moves") {
        auto const owners = [](std::vector<int> list) { return cpx::shard(batch, cpx::table(1, std::move(list))); };
        auto const a = owners({0, 0}), b = owners({0, 0, 0});
        auto const p = cpx::relayout(a, a, 0);
        cpx::threads::run(1, [&](cpx::threads& comm) {
            auto x = cpx::make_tensor<float>(a, 0, 2), y = cpx::make_tensor<float>(b, 0, 2);
            rejects({"exchange: sharding of the source: expected the plan's, got another"},
                    [&] { cpx::exchange(p, y, x, comm); });
            rejects({"exchange: sharding of the target: expected the plan's, got another"},
                    [&] { cpx::exchange(p, x.view(), y.view(), comm); });
            index_t const tokens = batch.tokens();
            auto const later = cpx::shard(cpx::thd({0, 1, tokens}), cpx::table(1, {0, 0}));
            auto const z = cpx::make_tensor<float>(later, 0, 2);
            rejects({"exchange: sharding of the source: expected the plan's, got another: offset 1 of the batch is 1, "
                     "not " +
                     std::to_string(batch.offset(1))},
                    [&] { cpx::exchange(p, z, x, comm); });
        });
    }

    TEST_CASE("a rank that does not come to an exchange is named, whether it throws, returns or is late") {
        auto const plan_of = [](int r) {
            return cpx::relayout(cpx::shard(batch, cpx::zigzag<>{3}), cpx::shard(batch, cpx::sequential<>{3}), r);
        };
        auto const without_rank_2 = [&](std::chrono::milliseconds deadline, auto const& instead) {
            std::vector<std::string> texts(3);
            message([&] {
                cpx::threads::run(
                    3,
                    [&](cpx::threads& comm) {
                        if (comm.rank() == 2) return instead();
                        auto const p = plan_of(comm.rank());
                        std::vector<float> const from(static_cast<std::size_t>(p.source_rows));
                        std::vector<float> to(static_cast<std::size_t>(p.target_rows));
                        try {
                            cpx::exchange(p, cpx::rows<float const>(from, 1), cpx::rows<float>(to, 1), comm);
                        } catch (cpx::error const& e) {
                            texts[static_cast<std::size_t>(comm.rank())] = e.what();
                            throw;
                        }
                    },
                    deadline);
            });
            return texts;
        };
        auto const thrown = without_rank_2(10s, [] { throw std::runtime_error("no data left"); });
        auto const returned = without_rank_2(10s, [] {});
        auto const late = without_rank_2(50ms, [] { std::this_thread::sleep_for(300ms); });
        for (std::size_t r : {0u, 1u}) {
            CHECK(holds(thrown[r], "rank 2 failed: no data left"));
            CHECK(holds(returned[r], "rank 2 to take part"));
            CHECK(holds(late[r], "got nothing from rank 2"));
        }
    }

    TEST_CASE("gather refuses memory that is none or overlaps, and more bytes than there are") {
        auto const gathers = [](index_t mine, std::size_t bytes) { // `mine` ints behind the first of all, or null
            cpx::threads::run(3, [&](cpx::threads& comm) {
                std::vector<int> all{7, 8, 9, 10, 11, 12};
                index_t const at = mine == 100 ? 2 * comm.rank() : mine;
                cpx::gather(comm, mine < 0 ? nullptr : all.data() + at, all.data(), bytes);
                CHECK(all == std::vector<int>{7, 8, 9, 10, 11, 12});
            });
        };
        gathers(100, 2 * sizeof(int)); // each in its own place
        gathers(-1, 0);
        rejects({"exchange_errors.cpp", "gather: overlap of all and mine: expected none"}, [&] { gathers(1, 8); });
        rejects({"exchange_errors.cpp", "gather: memory of mine and of all: expected some"}, [&] { gathers(-1, 8); });
        for (std::size_t const bytes : {std::size_t{1} << 62, std::size_t{1} << 63, ~std::size_t{0}})
            rejects({"gather: bytes: expected of all ranks together less than 2^62"}, [&] { gathers(0, bytes); });
    }
}

} // namespace
