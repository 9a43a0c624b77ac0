// SPDX-License-Identifier: Apache-2.0
// Plans run on threads: every element is a tag of its row and column, so that a wrong one tells where it comes from.
#include <cpx/transport/exchange.hpp>

#include <cpx/transport/threads.hpp>

#include <doctest/doctest.h>

#include <law.hpp>
#include <support/rejects.hpp>

#include <cstring>
#include <limits>

namespace {

using namespace support;
using cpx::index_t;
using cpx::scope;

/// An element of a size that no word has, without arithmetic.
struct rgb {
    std::uint8_t r, g, b;
};

/// Returns the element that stands for a global row and column, different for different places if the type has room.
template <class T>
T tag(index_t row, index_t column) {
    std::uint64_t const bits = splitmix(static_cast<std::uint64_t>(row * 1000 + column)).next();
    T value;
    if constexpr (std::is_same_v<T, double>)
        value = static_cast<double>(row * 1000 + column) + 0.25;
    else if constexpr (std::is_same_v<T, std::int32_t>)
        value = static_cast<std::int32_t>(row * 1000 + column);
    else if constexpr (std::is_same_v<T, float>) {
        std::uint32_t const nan = 0x7fc00000u | static_cast<std::uint32_t>(bits & 0x3fffffu); // NaNs tell their payload
        std::memcpy(&value, &nan, sizeof value);
    } else
        std::memcpy(&value, &bits, sizeof value);
    return value;
}

/// Returns an element that no tag is, to find places that nobody writes or that are written beyond the view.
template <class T>
T poison() {
    T value;
    std::memset(static_cast<void*>(&value), 0xff, sizeof value); // a NaN, where T has one
    return value;
}

/// Returns the place whose tag an element is.
template <class T>
std::string whose(T const& value) {
    for (index_t row = 0; row < 1000; ++row)
        for (index_t column = 0; column < 40; ++column) {
            T const candidate = tag<T>(row, column);
            if (std::memcmp(&candidate, &value, sizeof value) == 0)
                return "row " + std::to_string(row) + " column " + std::to_string(column);
        }
    return "nothing";
}

/// A view of (count, width) elements inside wider rows, all of them poisoned.
template <class T>
struct buffer {
    index_t count, width, before, stride;
    std::vector<T> memory;

    buffer(index_t rows, index_t columns, index_t left, index_t right)
        : count(rows), width(columns), before(left), stride(left + columns + right),
          memory(static_cast<std::size_t>(rows * stride) + 1, poison<T>()) {}
    cpx::rows<T> view() { return {memory.data() + before, count, width, stride}; }

    /// Fills the view with tags, or checks it against them and that nothing beside it has changed.
    void fill(std::vector<index_t> const& rows, std::vector<index_t> const& columns) {
        for (std::size_t i = 0; i < rows.size(); ++i)
            for (std::size_t k = 0; k < columns.size(); ++k)
                view()(static_cast<index_t>(i), static_cast<index_t>(k)) = tag<T>(rows[i], columns[k]);
    }
    std::string differs(std::vector<index_t> const& rows, std::vector<index_t> const& columns) const {
        buffer want(count, width, before, stride - before - width);
        want.fill(rows, columns);
        for (std::size_t i = 0; i < memory.size(); ++i)
            if (std::memcmp(&memory[i], &want.memory[i], sizeof(T)) != 0) {
                index_t const row = static_cast<index_t>(i) / stride,
                              column = static_cast<index_t>(i) % stride - before;
                return "local row " + std::to_string(row) + " column " + std::to_string(column) + " holds " +
                       whose(memory[i]) + " instead of " + whose(want.memory[i]);
            }
        return "";
    }
};

std::vector<index_t> iota(index_t count) {
    std::vector<index_t> list;
    for (index_t i = 0; i < count; ++i) list.push_back(i);
    return list;
}

/// Runs the exchange from `a` to `b` on threads, with strided buffers, and returns what is wrong, or "".
template <class T>
std::string problem_of(law::subject const& a, law::subject const& b, index_t width, splitmix& numbers) {
    auto const plans = law::plans(a, b);
    auto const sections = law::sections_of(a, b);
    bool const by_heads = !a.sections.empty() || !b.sections.empty();
    index_t const left = numbers.between(0, 2), right = numbers.between(0, 2);
    std::vector<std::string> problems(plans.size());
    cpx::threads::run(a.ranks, [&](cpx::threads& comm) {
        std::size_t const r = static_cast<std::size_t>(comm.rank());
        auto const from_columns = by_heads ? law::columns(a, comm.rank(), sections) : iota(width);
        auto const to_columns = by_heads ? law::columns(b, comm.rank(), sections) : iota(width);
        buffer<T> from(plans[r].source_rows, static_cast<index_t>(from_columns.size()), left, right);
        buffer<T> to(plans[r].target_rows, static_cast<index_t>(to_columns.size()), right, left);
        from.fill(a.rows[r], from_columns);
        cpx::exchange(plans[r], from.view(), to.view(), comm);
        problems[r] = to.differs(b.rows[r], to_columns);
        if (problems[r].empty() && !from.differs(a.rows[r], from_columns).empty())
            problems[r] = "the source has changed";
    });
    for (std::size_t r = 0; r < problems.size(); ++r)
        if (!problems[r].empty()) return a.name + " -> " + b.name + ", rank " + std::to_string(r) + ": " + problems[r];
    return "";
}

/// Some shardings by tokens, heads and everything.
std::vector<law::subject> subjects(cpx::thd const& batch, int ranks, std::uint64_t seed) {
    std::vector<law::subject> list;
    for (spec const& s : all_specs(ranks, {0, 3}, seed)) list.push_back(law::tokens(batch, s));
    list.push_back(law::heads(batch, ranks, {{8, 2}, {4, 3}}));
    list.push_back(law::heads(batch, ranks, {{5, 1}, {1, 4}}));
    list.push_back(law::replicated(batch, ranks));
    return list;
}

/// Random pairs of shardings of a batch, in random widths.
template <class T>
void check_pairs(cpx::thd const& batch, int ranks, int turns, std::uint64_t seed) {
    splitmix numbers(seed);
    auto const all = subjects(batch, ranks, seed);
    while (turns > 0) {
        law::subject const& a = all[numbers.next() % all.size()];
        law::subject const& b = all[numbers.next() % all.size()];
        if (!a.sections.empty() && !b.sections.empty() && a.sections != b.sections) continue;
        --turns;
        std::string const problem = problem_of<T>(a, b, numbers.between(1, 33), numbers);
        CHECK_MESSAGE(problem.empty(), problem << ", lengths " << text(batch));
    }
}

std::vector<cpx::thd> const batches = {
    lengths({}), lengths({1}), lengths({8, 12}), lengths({7, 0, 1, 23, 2}), lengths({3, 3}), lengths({64, 65, 1, 30})};

template <class T>
void check_type(std::uint64_t seed) {
    for (int ranks = 1; ranks <= 8; ++ranks)
        for (cpx::thd const& batch : batches) check_pairs<T>(batch, ranks, 6, ++seed);
}

void sleep_randomly(splitmix& numbers, int longest_us) {
    std::this_thread::sleep_for(std::chrono::microseconds(numbers.between(0, longest_us)));
}

TEST_SUITE("transport") {
    TEST_CASE("doubles arrive where they belong, in any width and stride, on 1 to 8 ranks") { check_type<double>(100); }
    TEST_CASE("floats keep their bits, payloads of NaNs included") { check_type<float>(200); }
    TEST_CASE("int32 arrive where they belong") { check_type<std::int32_t>(300); }
    TEST_CASE("uint16, as bf16 is stored, keep their bits") { check_type<std::uint16_t>(400); }
    TEST_CASE("bytes keep their bits") { check_type<char>(500); }
    TEST_CASE("elements of three bytes without arithmetic keep their bits") { check_type<rgb>(600); }
    TEST_CASE("sixteen ranks exchange as two do") { check_pairs<double>(lengths({64, 65, 1, 30}), 16, 10, 700); }

    TEST_CASE("ranks without rows belong to an exchange, too") {
        splitmix numbers(1);
        for (auto const& list : std::vector<std::vector<index_t>>{{1}, {3}, {1, 1}, {}, {0, 0}}) {
            auto const batch = lengths(list);
            auto const a = law::tokens(batch, {shape::zigzag, scope::sequence, 0, 8}),
                       b = law::tokens(batch, {shape::sequential, scope::batch, 0, 8});
            CHECK(problem_of<double>(a, b, 3, numbers) == "");
            CHECK(problem_of<double>(b, law::heads(batch, 8, {{4, 1}}), 4, numbers) == "");
            CHECK(problem_of<double>(law::heads(batch, 8, {{4, 1}}), a, 4, numbers) == "");
        }
    }

    TEST_CASE("rows without elements are exchanged without memory") {
        auto const a = cpx::shard(lengths({6, 10}), cpx::zigzag<2>{});
        cpx::replicated<2> const everywhere(a.batch());
        cpx::threads::run(2, [&](cpx::threads& comm) {
            auto const p = cpx::relayout(a, everywhere, comm.rank());
            auto const x = cpx::make_tensor<double>(a, comm.rank(), 0);
            auto const y = cpx::exchange(p, x, comm);
            cpx::require(y.data().count() == 16 && y.data().data() == nullptr, "test", "rows", 16, y.data().count());
            cpx::exchange(p.transposed(), y, comm); // a sum
        });
    }

    TEST_CASE("a hundred exchanges there and back with random delays neither hang nor mix their rows") {
        auto const batch = lengths({17, 40, 0, 6});
        auto const a = law::tokens(batch, {shape::zigzag, scope::sequence, 0, 5}),
                   b = law::tokens(batch, {shape::sequential, scope::batch, 0, 5});
        auto const h = law::heads(batch, 5, {{10, 1}});
        auto const there = law::plans(a, b), back = law::plans(b, a), split = law::plans(a, h), join = law::plans(h, a);
        std::vector<std::string> problems(5);
        cpx::threads::run(5, [&](cpx::threads& comm) {
            std::size_t const r = static_cast<std::size_t>(comm.rank());
            splitmix numbers(r);
            buffer<double> x(there[r].source_rows, 10, 0, 0), y(there[r].target_rows, 10, 1, 0);
            buffer<double> z(split[r].target_rows, 2, 0, 1);
            x.fill(a.rows[r], iota(10));
            for (int turn = 0; turn < 100; ++turn) {
                y = buffer<double>(y.count, 10, 1, 0);
                sleep_randomly(numbers, 300);
                cpx::exchange(there[r], x.view(), y.view(), comm);
                if (!y.differs(b.rows[r], iota(10)).empty()) problems[r] = "there";
                x = buffer<double>(x.count, 10, 0, 0);
                sleep_randomly(numbers, 300);
                cpx::exchange(back[r], y.view(), x.view(), comm);
                if (!x.differs(a.rows[r], iota(10)).empty()) problems[r] = "back";
                cpx::exchange(split[r], x.view(), z.view(), comm);
                x = buffer<double>(x.count, 10, 0, 0);
                cpx::exchange(join[r], z.view(), x.view(), comm);
                if (!x.differs(a.rows[r], iota(10)).empty()) problems[r] = "heads and back";
            }
        });
        for (std::string const& problem : problems) CHECK(problem == "");
    }

    TEST_CASE("sums have the same bits whatever the timing: those of adding in rank order") {
        cpx::thd const batch = lengths({6, 9});
        int const ranks = 6;
        auto const tokens = law::tokens(batch, {shape::zigzag, scope::sequence, 0, ranks});
        for (auto const& target : {law::replicated(batch, ranks), law::heads(batch, ranks, {{3, 1}, {1, 2}})}) {
            auto const forward = law::plans(tokens, target);
            auto const plans = transposed(forward);
            CHECK(plans[0].kind == cpx::flow::sums);
            index_t const width = target.sections.empty() ? 4 : 5;
            std::vector<std::vector<float>> gradients; // of values for which the order of additions matters
            splitmix numbers(21);
            for (cpx::plan const& p : plans) {
                gradients.emplace_back();
                for (index_t i = 0; i < p.source_rows * (p.source_width ? p.source_width : width); ++i)
                    gradients.back().push_back(static_cast<float>(numbers.between(-1000, 1000)) *
                                               (numbers.between(0, 1) ? 1e8f : 1e-3f));
            }
            auto const want = execute(plans, gradients, width, 0.0f);
            for (std::uint64_t turn = 0; turn < 20; ++turn) {
                std::vector<bool> same(static_cast<std::size_t>(ranks));
                std::vector<std::vector<float>> got(same.size());
                cpx::threads::run(ranks, [&](cpx::threads& comm) {
                    std::size_t const r = static_cast<std::size_t>(comm.rank());
                    splitmix delays(turn * 100 + r);
                    got[r].assign(want[r].size(), std::numeric_limits<float>::quiet_NaN());
                    sleep_randomly(delays, 2000);
                    cpx::exchange(
                        plans[r],
                        cpx::rows<float const>(gradients[r], plans[r].source_width ? plans[r].source_width : width),
                        cpx::rows<float>(got[r], width), comm);
                });
                for (std::size_t r = 0; r < got.size(); ++r)
                    CHECK(std::memcmp(got[r].data(), want[r].data(), want[r].size() * sizeof(float)) == 0);
            }
        }
    }

    TEST_CASE("places that a plan does not reach are 0") {
        cpx::thd const batch = lengths({8});
        auto const everywhere = law::replicated(batch, 2);
        auto const a = law::tokens(batch, {shape::zigzag, scope::sequence, 0, 2});
        auto const back = transposed(law::plans(everywhere, a));
        std::vector<std::vector<double>> got(2, std::vector<double>(8, std::numeric_limits<double>::quiet_NaN()));
        cpx::threads::run(2, [&](cpx::threads& comm) {
            std::size_t const r = static_cast<std::size_t>(comm.rank());
            std::vector<double> const ones(4, 1.0);
            cpx::exchange(back[r], cpx::rows<double const>(ones, 1), cpx::rows<double>(got[r], 1), comm);
        });
        CHECK(got[0] == std::vector<double>{1, 1, 0, 0, 0, 0, 1, 1});
        CHECK(got[1] == std::vector<double>{0, 0, 1, 1, 1, 1, 0, 0});
    }

    // Where every rank repeats the whole computation, its gradient is not W times too large: the way back is a
    // selection.
    TEST_CASE("the gradient of a computation that every rank repeats is selected, not summed") {
        auto const a = cpx::shard(lengths({6, 10}), cpx::zigzag<2>{});
        cpx::threads::run(2, [&](cpx::threads& comm) {
            auto gradient = cpx::make_tensor<double>(cpx::replicated<2>(a.batch()), comm.rank(), 1);
            for (index_t row = 0; row < 16; ++row) gradient.data()(row, 0) = static_cast<double>(row);
            auto const own = cpx::exchange(cpx::relayout(gradient.sharding(), a, comm.rank()), gradient, comm);
            auto const summed =
                cpx::exchange(cpx::relayout(a, gradient.sharding(), comm.rank()).transposed(), gradient, comm);
            index_t local = 0;
            a.for_each_piece(comm.rank(), [&](cpx::range piece) {
                for (index_t row = piece.first; row < piece.last; ++row, ++local) {
                    cpx::require(own.data()(local, 0) == static_cast<double>(row), "test", "selected", row,
                                 own.data()(local, 0));
                    cpx::require(summed.data()(local, 0) == 2.0 * static_cast<double>(row), "test", "summed", 2 * row,
                                 summed.data()(local, 0));
                }
            });
        });
    }

    TEST_CASE("tensors that know their sharding are exchanged with one call") {
        cpx::thd const batch = lengths({8, 12});
        auto const a = cpx::shard(batch, cpx::zigzag<2>{});
        auto const b = cpx::shard<scope::batch>(batch, cpx::sequential<2>{});
        std::vector<std::vector<int>> got(2);
        cpx::threads::run(2, [&](cpx::threads& comm) {
            auto x = cpx::make_tensor<int>(a, comm.rank(), 2);
            index_t local = 0;
            a.for_each_piece(comm.rank(), [&](cpx::range piece) {
                for (index_t row = piece.first; row < piece.last; ++row, ++local)
                    for (index_t column : {0, 1}) x.data()(local, column) = static_cast<int>(2 * row + column);
            });
            auto const y = cpx::exchange(x, b, comm);
            cpx::require(y.rank() == comm.rank() && y.sharding() == b, "test", "place", "b, here", "another");
            auto z = cpx::make_tensor<int>(b, comm.rank(), 1); // of one column only
            auto const p = cpx::relayout(a, b, comm.rank());
            cpx::exchange(p, x.view().columns(1, 1), z.view(), comm);
            for (index_t row = 0; row < y.data().count(); ++row) {
                got[static_cast<std::size_t>(comm.rank())].push_back(y.data()(row, 0));
                cpx::require(z.data()(row, 0) == y.data()(row, 1), "test", "column 1", y.data()(row, 1),
                             z.data()(row, 0));
            }
        });
        CHECK(got[0] == std::vector<int>{0, 2, 4, 6, 8, 10, 12, 14, 16, 18});
        CHECK(got[1] == std::vector<int>{20, 22, 24, 26, 28, 30, 32, 34, 36, 38});
    }

    TEST_CASE("a tensor of another rank is not exchanged") {
        auto const a = cpx::shard(lengths({8, 12}), cpx::zigzag<2>{});
        std::vector<int> values(10);
        cpx::threads::run(1, [&](cpx::threads& comm) {
            cpx::sharded const mine(cpx::rows<int>(values, 1), a, 0), of_another(mine.data(), a, 1);
            auto const plan = cpx::relayout(a, a, 0);
            rejects({"exchange.cpp", "exchange: rank of the source: expected the plan's, 0, got 1"},
                    [&] { cpx::exchange(plan, of_another, comm); });
            auto to = cpx::make_tensor<int>(a, 0, 1);
            rejects({"rank of the target: expected the plan's, 0, got 1"},
                    [&] { cpx::exchange(plan, mine, cpx::sharded(to.data(), a, 1), comm); });
        });
    }

    TEST_CASE("halo rows arrive, and their gradients return to their owners") {
        cpx::thd const batch = lengths({1, 9, 14});
        int const ranks = 4;
        auto const a = law::tokens(batch, {shape::zigzag, scope::batch, 0, ranks});
        std::vector<cpx::plan> plans;
        for (int r = 0; r < ranks; ++r) plans.push_back(cpx::halo(std::get<0>(a.sharding), r, 7));
        law::matrix arrived(4), returned(4);
        cpx::threads::run(ranks, [&](cpx::threads& comm) {
            std::size_t const r = static_cast<std::size_t>(comm.rank());
            arrived[r].assign(static_cast<std::size_t>(plans[r].target_rows), -1);
            returned[r].assign(a.rows[r].size(), -1);
            cpx::exchange(plans[r], cpx::rows<index_t const>(a.rows[r], 1), cpx::rows<index_t>(arrived[r], 1), comm);
            cpx::exchange(plans[r].transposed(), cpx::rows<index_t const>(arrived[r], 1),
                          cpx::rows<index_t>(returned[r], 1), comm);
        });
        CHECK(arrived == execute(plans, a.rows, 1, index_t{-1}));
        CHECK(returned == execute(transposed(plans), arrived, 1, index_t{-1}));
    }

    TEST_CASE("a plan that sums needs elements that can be added") {
        auto const a = cpx::shard(lengths({4}), cpx::zigzag<1>{});
        cpx::threads::run(1, [&](cpx::threads& comm) {
            cpx::plan p = cpx::relayout(a, cpx::replicated<1>(a.batch()), 0);
            p.kind = cpx::flow::sums;
            std::vector<rgb> const from(4);
            std::vector<rgb> to(4);
            rejects({"exchange: elements of a plan that sums: expected a type with +=", "rgb"},
                    [&] { cpx::exchange(p, cpx::rows<rgb const>(from, 1), cpx::rows<rgb>(to, 1), comm); });
        });
    }
}

} // namespace
