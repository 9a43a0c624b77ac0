// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/weight_sums.hpp>

#include <cpx/transport/sum.hpp>

#include <doctest/doctest.h>

#include <ops/backward.hpp>
#include <support/rejects.hpp>

namespace {

using namespace on_ranks;
using cpx::index_t, cpx::sum_order;
using support::lengths;

/// A projection from `in` to `out` columns with whole rows of its input and of the gradient of its output.
template <class T>
struct projection {
    cpx::thd batch;
    index_t in, out;
    std::vector<T> x, dy;
};

template <class T>
projection<T> random_projection(cpx::thd const& batch, index_t in, index_t out, std::uint64_t seed) {
    support::splitmix numbers(seed);
    projection<T> p{batch, in, out, uniform<T>(numbers, batch.tokens() * in),
                    uniform<T>(numbers, batch.tokens() * out)};
    for (index_t row = 0; row < batch.tokens(); ++row) // so that another order gives other bits
        for (index_t j = 0; j < in; ++j)
            p.x[static_cast<std::size_t>(row * in + j)] *= static_cast<T>(1 + row % 7 * row);
    return p;
}

/// Returns dy^T x of the whole rows.
template <class T>
std::vector<T> plain_weight(projection<T> const& p) {
    std::vector<T> sum(static_cast<std::size_t>(p.out * p.in));
    cpx::linear_backward_weight<T>(cpx::rows<T const>(p.dy, p.out), cpx::rows<T const>(p.x, p.in),
                                   cpx::rows<T>(sum, p.in));
    return sum;
}

auto const add_product = []<class T>(cpx::rows<T const> dy, cpx::rows<T const> x, cpx::rows<T> dweight) {
    cpx::linear_backward_weight<T>(dy, x, dweight);
};

template <class T, cpx::any_sharding S>
std::vector<T> weight_gradient(projection<T> const& p, S const& sharding, sum_order order) {
    reference::same_on_ranks<T> sums;
    cpx::threads::run(sharding.ranks(), [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const x = take(p.x, {{1, p.in}}, sharding, rank), dy = take(p.dy, {{1, p.out}}, sharding, rank);
        cpx::weight_sums const of(sharding, order, comm);
        std::vector<T> sum(static_cast<std::size_t>(p.out * p.in));
        auto const whole = of.whole(x.view());
        of.linear(whole, dy.view(), cpx::rows<T>(sum, p.in), add_product);
        cpx::sum_over_ranks(std::span(sum), comm);
        sums.add(sum);
    });
    return sums.get();
}

/// The gradient of a gain that two columns of x share, and of a bias.
template <class T>
void add_terms(T const* x, T const* dy, index_t in, index_t out, std::span<T> sums) {
    for (index_t j = 0; j < in; ++j)
        for (index_t o = 0; o < out; ++o) sums[static_cast<std::size_t>(j / 2)] += x[j] * dy[o];
    for (index_t o = 0; o < out; ++o) sums[static_cast<std::size_t>((in + 1) / 2 + o)] += dy[o];
}

template <class T>
std::vector<T> plain_terms(projection<T> const& p) {
    std::vector<T> sums(static_cast<std::size_t>((p.in + 1) / 2 + p.out));
    for (index_t row = 0; row < p.batch.tokens(); ++row) {
        std::vector<T> of_row(sums.size());
        add_terms<T>(p.x.data() + row * p.in, p.dy.data() + row * p.out, p.in, p.out, of_row);
        for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += of_row[i];
    }
    return sums;
}

template <class T, cpx::any_sharding S>
std::vector<T> terms(projection<T> const& p, S const& sharding, sum_order order) {
    reference::same_on_ranks<T> sums;
    cpx::threads::run(sharding.ranks(), [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const x = take(p.x, {{1, p.in}}, sharding, rank), dy = take(p.dy, {{1, p.out}}, sharding, rank);
        std::vector<T> sum(static_cast<std::size_t>((p.in + 1) / 2 + p.out));
        cpx::tensor<T, S> of_rows(sharding, rank, std::ssize(sum));
        for (index_t row = 0; row < sharding.rows(rank); ++row)
            add_terms<T>(x.data().row(row), dy.data().row(row), p.in, p.out, {of_rows.data().row(row), sum.size()});
        cpx::add_terms(cpx::weight_sums(sharding, order, comm), of_rows, cpx::rows<T>(sum, std::ssize(sum)));
        cpx::sum_over_ranks(std::span(sum), comm);
        sums.add(sum);
    });
    return sums.get();
}

std::vector<std::vector<index_t>> const packings = {{37, 0, 16, 1, 50}, {5, 3, 2}, {1}, {}, {0, 0}, {300, 7}};
std::vector<std::pair<index_t, index_t>> const widths = {{5, 3}, {1, 1}, {3, 11}, {8, 2}};

} // namespace

TEST_SUITE("ops") {
    using cpx::index_t;

    TEST_CASE("where every rank has every row whole, each row counts once") {
        auto const p = random_projection<double>(lengths({5, 0, 3}), 4, 6, 3);
        auto const expected = plain_weight(p);
        for (int const ranks : {1, 2, 5})
            for (sum_order const order : {sum_order::by_rank, sum_order::by_row}) {
                CAPTURE(ranks);
                CHECK(same_bits(weight_gradient(p, cpx::replicated<>(ranks, p.batch), order), expected));
            }
    }

    TEST_CASE_TEMPLATE("sums of weights by row have the bits of one rank on every sharding, by rank they are near", T,
                       float, double) {
        for (std::size_t turn = 0; turn < packings.size() * 2; ++turn) {
            auto const& width = widths[turn % widths.size()];
            auto const p = random_projection<T>(lengths(packings[turn / 2]), width.first, width.second, turn);
            CAPTURE(support::text(p.batch));
            CAPTURE(width.second);
            auto const weight = plain_weight(p), of_terms = plain_terms(p);
            // every row adds a rounding
            double const tolerance = static_cast<double>(p.batch.tokens() + 20) * std::numeric_limits<T>::epsilon();
            bool other_bits = false;
            for (int const ranks : rank_counts) // most of them more than the columns
                for_each_sharding(p.batch, ranks, {1}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    CHECK(same_bits(weight_gradient(p, sharding, sum_order::by_row), weight));
                    CHECK(same_bits(terms(p, sharding, sum_order::by_row), of_terms));
                    auto const by_rank = weight_gradient(p, sharding, sum_order::by_rank);
                    CHECK(relative_error(by_rank, weight) <= tolerance);
                    CHECK(relative_error(terms(p, sharding, sum_order::by_rank), of_terms) <= tolerance);
                    other_bits = other_bits || !same_bits(by_rank, weight);
                });
            if (p.batch.tokens() > 100) CHECK(other_bits); // or by_row would have been no test
        }
    }

    TEST_CASE("ranks share the columns of every section, all rows of them in the order of the batch") {
        for (auto const& packing : packings)
            for (index_t const columns : {1, 2, 5})
                for (int const ranks : {1, 2, 3, 5, 8}) {
                    auto const p = random_projection<double>(lengths(packing), 3 * columns, 1, 9);
                    by_tokens const sharding = cpx::shard<cpx::scope::batch>(p.batch, cpx::zigzag<>(ranks));
                    CAPTURE(ranks);
                    CAPTURE(columns);
                    std::mutex guard;
                    std::vector<int> speakers(static_cast<std::size_t>(columns));
                    cpx::threads::run(ranks, [&](cpx::threads& comm) {
                        int const rank = comm.rank();
                        auto const x = take(p.x, {{1, p.in}}, sharding, rank);
                        cpx::weight_sums const by_row(sharding, sum_order::by_row, comm),
                            by_rank(sharding, sum_order::by_rank, comm);
                        auto const share = by_row.share(x.view(), columns), own = by_rank.share(x.view(), columns),
                                   whole = by_row.whole(x.view()), as_is = by_rank.whole(x.view());
                        std::lock_guard const lock(guard);
                        CHECK(by_row.moves());
                        CHECK_FALSE(by_rank.moves());
                        for (auto const* stays : {&own, &as_is}) {
                            CHECK(stays->data.data() == x.data().data());
                            CHECK(stays->data.count() == x.data().count());
                            CHECK(stays->memory.empty());
                        }
                        CHECK(own.share == cpx::range{0, columns});
                        REQUIRE(whole.data.count() == p.batch.tokens());
                        CHECK(std::equal(p.x.begin(), p.x.end(), whole.data.data()));
                        CHECK(whole.share == cpx::range{0, p.in});
                        index_t const held = share.share.size();
                        for (index_t c = share.share.first; c < share.share.last; ++c)
                            ++speakers[static_cast<std::size_t>(c)];
                        CHECK(share.data.count() == (held > 0 ? p.batch.tokens() : 0));
                        for (index_t row = 0; row < share.data.count(); ++row)
                            for (index_t section = 0; section < 3; ++section)
                                for (index_t c = 0; c < held; ++c)
                                    CHECK(share.data(row, section * held + c) ==
                                          p.x[static_cast<std::size_t>(row * p.in + section * columns +
                                                                       share.share.first + c)]);
                    });
                    CHECK(std::ranges::all_of(speakers, [](int n) { return n == 1; }));
                }
    }

    TEST_CASE("where every rank holds every row nothing moves, whatever the order") {
        auto const p = random_projection<double>(lengths({9, 4}), 4, 6, 2);
        for (int const ranks : {1, 3}) {
            cpx::head_sharded<> const split(ranks, p.batch, {{6, 1}});
            for (sum_order const order : {sum_order::by_rank, sum_order::by_row}) {
                auto const columns = assemble<double>(
                    cpx::head_sharded<>(ranks, cpx::thd({0, 4}), {{6, 1}}), {{6, 1}}, [&](cpx::threads& comm) {
                        int const rank = comm.rank();
                        cpx::weight_sums const sums(split, order, comm);
                        CHECK_FALSE(sums.moves());
                        auto const dy = take(p.dy, {{6, 1}}, split, rank);
                        cpx::sharded const x(cpx::rows<double const>(p.x, 4), split, rank);
                        std::vector<double> own(static_cast<std::size_t>(dy.width() * 4));
                        sums.linear(sums.whole(x), dy.view(), cpx::rows<double>(own, 4), add_product);
                        cpx::tensor<double, cpx::head_sharded<>> turned(
                            cpx::head_sharded<>(ranks, cpx::thd({0, 4}), {{6, 1}}), rank, dy.width());
                        for (index_t i = 0; i < 4; ++i)
                            for (index_t c = 0; c < dy.width(); ++c)
                                turned.data()(i, c) = own[static_cast<std::size_t>(c * 4 + i)];
                        return turned;
                    });
                auto const weight = plain_weight(p);
                for (std::size_t i = 0; i < 4; ++i)
                    for (std::size_t c = 0; c < 6; ++c) CHECK(same_bits(columns[i * 6 + c], weight[c * 4 + i]));
            }
        }
    }

    TEST_CASE("sums add to what they hold, and reject a gradient of another shape before anything moves") {
        auto const p = random_projection<double>(lengths({7}), 3, 2, 4);
        by_tokens const sharding = cpx::shard(p.batch, cpx::zigzag<>(1));
        using S = by_tokens;
        for (sum_order const order : {sum_order::by_rank, sum_order::by_row}) {
            std::vector<double> sum(6, 1.), gains(2, 1.);
            auto const call = [&](cpx::rows<double> to) {
                return [&, to] {
                    cpx::threads::run(1, [&](cpx::threads& comm) {
                        cpx::weight_sums const sums(sharding, order, comm);
                        cpx::sharded const x(cpx::rows<double const>(p.x, 3), sharding, 0),
                            dy(cpx::rows<double const>(p.dy, 2), sharding, 0);
                        sums.linear(sums.whole(x), dy, to, add_product);
                        cpx::tensor<double, S> ones(sharding, 0, 2);
                        for (index_t row = 0; row < 7; ++row) ones.data()(row, 0) = 1;
                        cpx::add_terms(sums, ones, cpx::rows<double>(gains, 2));
                    });
                };
            };
            std::string const where = "weight_sums::linear: shape of dweight: expected (2, 3), got ";
            support::rejects({"weight_sums.cpp", where + "(3, 2)"}, call(cpx::rows<double>(sum, 2)));
            support::rejects({where + "(1, 3)"}, call(cpx::rows<double>(sum, 3).sub(0, 1)));
            auto q = p;
            auto const in_x = [&] {
                cpx::threads::run(1, [&](cpx::threads& comm) {
                    cpx::weight_sums const sums(sharding, order, comm);
                    cpx::sharded const x(cpx::rows<double>(q.x, 3), sharding, 0);
                    sums.linear(sums.whole(x), x.columns(0, 2), x.data().sub(0, 2), add_product);
                });
            };
            support::rejects({"weight_sums.cpp", "weight_sums::linear: overlap of dweight and"}, in_x);
            support::rejects({"weight_sums.cpp", "weight_sums: sharding of a tensor: expected that of the sums"}, [&] {
                cpx::threads::run(1, [&](cpx::threads& comm) {
                    S const other = cpx::shard(lengths({3, 4}), cpx::zigzag<>(1));
                    cpx::weight_sums(other, order, comm).whole(cpx::make_tensor<double>(sharding, 0, 3));
                });
            });
            CHECK(sum == std::vector<double>(6, 1.));
            CHECK(support::message(call(cpx::rows<double>(sum, 3))) == "");
            CHECK(gains == std::vector<double>{8, 1});
            auto const weight = plain_weight(p);
            for (std::size_t i = 0; i < sum.size(); ++i) CHECK(std::abs(sum[i] - 1 - weight[i]) <= 1e-13 * 200);
        }
    }
}
