// SPDX-License-Identifier: Apache-2.0
// Ranks whose memory is of another kind than the host's: what exchanges, sums and tensors ask of it, without a GPU.
#include <cpx/core/memory.hpp>

#include <cpx/layout/zigzag.hpp>
#include <cpx/testing/transport.hpp>
#include <cpx/transport/movement.hpp>
#include <cpx/transport/sum.hpp>
#include <cpx/transport/threads.hpp>

#include <doctest/doctest.h>

#include <support/far_ranks.hpp>
#include <support/packings.hpp>
#include <support/rejects.hpp>

namespace {

using cpx::index_t;
using support::far_memory, support::far_ranks, support::lengths, support::rejects;

/// Writes one element beside its target.
struct careless : far_ranks {
    using far_ranks::far_ranks;
    template <class T>
    void exchange(cpx::plan const& p, cpx::rows<T const> const& from, cpx::rows<T> const& to, cpx::caller here) {
        far_ranks::exchange<T>(p, from, to, here);
        if (to.count() > 0 && to.stride() > to.width()) *(to.row(0) + to.width()) = T{};
    }
};

static_assert(cpx::any_memory<cpx::host_memory> && cpx::any_memory<far_memory>);
static_assert(cpx::transport<cpx::threads> && !cpx::device_transport<cpx::threads>);
static_assert(cpx::device_transport<far_ranks> && !cpx::transport<far_ranks>);

using zigzag = cpx::sharding<cpx::zigzag<>>;
using near_tensor = cpx::tensor<float, zigzag>;
using far_tensor = cpx::tensor<float, zigzag, far_memory>;
static_assert(cpx::sharded_like<near_tensor> && !cpx::sharded_like<far_tensor>);
static_assert(cpx::sharded_like<far_tensor, far_memory> && !cpx::sharded_like<near_tensor, far_memory>);
static_assert(cpx::sharded_anywhere<near_tensor> && cpx::sharded_anywhere<far_tensor>);
static_assert(std::is_convertible_v<far_tensor&, cpx::sharded<float const, zigzag, far_memory>>);
static_assert(!std::is_convertible_v<far_tensor&, cpx::sharded<float, zigzag>>);
static_assert(sizeof(cpx::sharded<float, cpx::sharding<cpx::zigzag<2>>>) <= sizeof(cpx::rows<float>) +
                                                                                sizeof(cpx::sharding<cpx::zigzag<2>>) +
                                                                                sizeof(index_t)); // the host's is empty

/// Moves numbers there and back and sums them: one program for all memories.
template <cpx::any_transport Comm>
std::vector<std::vector<float>> program(Comm& comm) {
    auto const batch = lengths({9, 0, 4, 1});
    auto const from = cpx::shard(batch, cpx::zigzag<>(comm.ranks()));
    auto const to = cpx::shard(batch, cpx::sequential<>(comm.ranks()));
    auto x = cpx::make_tensor<float>(from, comm, 3);
    std::vector<float> values(x.elements().size());
    for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<float>(100 * comm.rank()) + static_cast<float>(i);
    x.write(values);
    auto const y = cpx::exchange(x, to, comm);
    auto z = cpx::exchange(y, from, comm);
    CHECK(z.read() == values);
    auto sums = cpx::make_tensor<float>(cpx::replicated<>(comm.ranks(), lengths({5})), comm, 1);
    sums.write(std::vector<float>{1, 2, 3, 4, 5});
    cpx::sum_over_ranks(sums.elements(), comm);
    return {y.read(), z.read(), sums.read()};
}

} // namespace

TEST_SUITE("transport") {
    TEST_CASE("one program runs on ranks of any memory and finds the same") {
        for (int const ranks : {1, 2, 3}) {
            cpx::threads::run(ranks, [&](cpx::threads& comm) {
                auto const here = program(comm);
                far_ranks far(comm);
                CHECK(program(far) == here);
                CHECK(far.plans == 4); // there, back, and the two halves of a sum
                for (std::size_t i = 0; i < 5; ++i)
                    CHECK(here[2][i] == static_cast<float>(ranks * (static_cast<int>(i) + 1)));
            });
        }
    }

    TEST_CASE("ranks of any memory do all that a transport of devices owes") {
        for (int const ranks : {1, 3}) {
            auto const run = [&](auto const& program, auto deadline) {
                cpx::threads::run(
                    ranks,
                    [&](cpx::threads& comm) {
                        far_ranks far(comm);
                        program(far);
                    },
                    deadline);
            };
            auto const found = cpx::testing::check_transport(run, std::chrono::milliseconds(200));
            CHECK_MESSAGE((found.all_duties() && found.all_courtesies()), ranks << " ranks\n" << found.text());
            CHECK(found.text().find("agreed") == std::string::npos); // which only transports of the host have
            CHECK(found.findings.size() == 16);
        }
    }

    TEST_CASE("the test of transports finds a device's that writes beside its target") {
        auto const run = [](auto const& program, auto deadline) {
            cpx::threads::run(
                3,
                [&](cpx::threads& comm) {
                    careless far(comm);
                    program(far);
                },
                deadline);
        };
        std::string list;
        for (auto const& f : cpx::testing::check_transport(run, std::chrono::milliseconds(200)).findings)
            if (!f.problem.empty()) list += f.property + "; ";
        CHECK(list.starts_with("messages of any rows, columns and strides arrive, and nothing else is written; "));
        CHECK(list.find("plans") == std::string::npos);
    }

    TEST_CASE("a movement made once moves every batch that comes, there and back, on ranks of any memory") {
        auto const check = [](auto& comm) {
            int const rank = comm.rank(), ranks = comm.ranks();
            auto const from = [&](cpx::thd const& batch) { return cpx::shard(batch, cpx::zigzag<>(ranks)); };
            auto const to = [&](cpx::thd const& batch) { return cpx::shard(batch, cpx::sequential<>(ranks)); };
            cpx::capacity const most{40, 4};
            auto move = cpx::make_movement<float>(from(lengths({5})), to(lengths({5})), 2, most, comm);
            auto halos = cpx::make_movement<float>(cpx::halo(from(lengths({5})), rank, 3), 2, most, comm);
            auto series = cpx::make_movement<float>(cpx::carry<cpx::serial>(from(lengths({5})), rank), {4}, most, comm);
            auto scans = cpx::make_movement<float>(cpx::carry<cpx::scan>(from(lengths({5})), rank), {4, 6}, most, comm);
            auto y = move.make_tensor(to(lengths({5})));
            auto z = move.make_tensor(from(lengths({5})));
            for (auto const& batch : {lengths({5}), lengths({17, 0, 3}), lengths({}), lengths({1, 1, 1, 30})})
                for (int again = 0; again < 2; ++again) {
                    auto x = cpx::make_tensor<float>(from(batch), comm, 2);
                    std::vector<float> values(x.elements().size());
                    for (std::size_t i = 0; i < values.size(); ++i)
                        values[i] = static_cast<float>(rank * 1000 + static_cast<int>(i));
                    x.write(values);
                    y.hold(to(batch)), z.hold(from(batch));
                    move(x, y);
                    CHECK(y.read() == cpx::exchange(x, to(batch), comm).read());
                    move.transposed(y, z);
                    CHECK(z.read() == values);
                    cpx::set_together(comm, [&] { halos.set(from(batch)); });
                    auto const& halo = halos.plan();
                    std::vector<float> given(static_cast<std::size_t>(halo.target_rows * 2)), expected(given);
                    halos(x, {given.data(), std::ssize(given) / 2, 2});
                    cpx::exchange(halo, x.data(), cpx::rows<float>(expected, 2), comm);
                    CHECK(given == expected);
                    halos.transposed(cpx::rows<float const>(expected, 2), z);
                    cpx::exchange(halo.transposed(), cpx::rows<float const>(expected, 2), x.data(), comm);
                    CHECK(z.read() == x.read());
                    auto const hand_on = [&](auto& carries, index_t width, auto&& step) {
                        carries.set(from(batch));
                        for (auto const side : {cpx::side::before, cpx::side::after})
                            for (index_t k = 0; k < carries.plan().steps; ++k) {
                                auto const p = step(k, side);
                                std::vector<float> states(static_cast<std::size_t>(p.source_rows * width),
                                                          static_cast<float>(rank + 1)),
                                    got(static_cast<std::size_t>(p.target_rows * width)), others(got);
                                carries(k, side, cpx::rows<float const>(states, width), cpx::rows<float>(got, width));
                                cpx::exchange(p, cpx::rows<float const>(states, width), cpx::rows<float>(others, width),
                                              comm);
                                CHECK(got == others);
                            }
                    };
                    hand_on(series, 4, [&](index_t k, cpx::side s) { return series.plan().step(k, s); });
                    hand_on(scans, 2, [&](index_t k, cpx::side s) { return scans.plan().step(k, s, 4, 6); });
                }
            if constexpr (cpx::transport<std::remove_cvref_t<decltype(comm)>>) {
                CHECK(halos.rows_of() == std::pair(halos.plan().source_rows, halos.plan().target_rows));
                for (index_t const k : {index_t{-1}, index_t{99}}) {
                    rejects({"memory.cpp", "movement: exchange: expected less than 1, got " + std::to_string(k)},
                            [&] { static_cast<void>(halos.rows_of(k)); });
                    rejects({"memory.cpp", "movement: exchange: expected less than " +
                                               std::to_string(series.plan().steps) + ", got " + std::to_string(k)},
                            [&] { static_cast<void>(series.rows_of(k)); });
                }
            }
            rejects({"memory.cpp", "tensor: elements of the sharding: expected not negative"}, [&] {
                cpx::tensor<float, decltype(to(lengths({5})))>(to(lengths({5})), 0, -2, cpx::host_memory(), 100);
            });
            rejects({"memory.cpp", "tensor: elements of the sharding: expected at most 80, got"},
                    [&] { y.hold(to(lengths({200}))); });
            auto const x = cpx::make_tensor<float>(from(lengths({9})), comm, 2);
            y.hold(to(lengths({4, 5})));
            rejects({"memory.cpp", "relayout"}, [&] { move(x, y); });
            rejects({"memory.cpp", "movement: runs: expected not negative"}, [&] {
                cpx::make_movement<float>(from(lengths({5})), to(lengths({5})), 2, {40, -7}, comm);
            });
            rejects({"memory.cpp", "movement: rows and sequences of the batch: expected at most 40, 4, got "},
                    [&] { move.set(from(lengths({200})), to(lengths({200}))); });
            auto const many = from(lengths({1, 1, 1, 1, 1}));
            rejects({"memory.cpp", "movement: rows and sequences of the batch: expected at most 40, 4, got " +
                                       std::to_string(many.rows(comm.rank())) + ", 5"},
                    [&] { halos.set(many); });
            rejects({"memory.cpp", "movement: rows and sequences of the batch: expected at most 0, 4, got "}, [&] {
                cpx::make_movement<float>(from(lengths({5, 5})), to(lengths({5, 5})), 2, {0, 4}, comm);
            });
            rejects({"memory.cpp", "movement: elements of a tensor: expected not negative, got 2 x -5"}, [&] {
                cpx::make_movement<float>(from(lengths({5})), to(lengths({5})), 2, {-5, 4}, comm);
            });
            rejects({"memory.cpp", "movement: elements of a tensor: expected not negative, got -2 x 40"}, [&] {
                cpx::make_movement<float>(from(lengths({5})), to(lengths({5})), -2, {40, 4}, comm);
            });
            rejects({"memory.cpp", "movement: elements of a tensor: expected less than 2^62"}, [&] {
                cpx::make_movement<float>(from(lengths({5})), to(lengths({5})), index_t{1} << 40, {1 << 30, 4}, comm);
            });
            {
                auto wide = cpx::make_tensor<float>(from(lengths({9})), comm, 5);
                auto also = cpx::make_tensor<float>(to(lengths({9})), comm, 5);
                rejects({"memory.cpp", "movement: width of the rows: expected 2, got 5"}, [&] { move(wide, also); });
            }
        };
        rejects({"memory.cpp", ": movement: ranks disagree on offset 1 of cu_seqlens"}, [] {
            cpx::threads::run(2, [](cpx::threads& comm) {
                auto const from = cpx::shard(lengths({5 + comm.rank()}), cpx::zigzag<>(2));
                auto const to = cpx::shard(from.batch(), cpx::sequential<>(2));
                auto const x = cpx::make_tensor<float>(from, comm, 2);
                auto y = cpx::make_tensor<float>(to, comm, 2);
                cpx::make_movement<float>(from, to, 2, {40, 4}, comm)(x, y);
            });
        });
        cpx::threads::run(3, [&](cpx::threads& comm) {
            check(comm);
            far_ranks far(comm);
            check(far);
        });
    }

    TEST_CASE("a tensor of another stream, or of too few elements, is refused where it is used") {
        cpx::threads::run(1, [](cpx::threads& comm) {
            far_ranks far(comm);
            auto const from = cpx::shard(lengths({4}), cpx::zigzag<>(1)),
                       two = cpx::shard(lengths({4}), cpx::zigzag<>(2));
            auto other = cpx::make_tensor<float>(from, 0, 3, far_memory{8});
            auto own = cpx::make_tensor<float>(from, far, 3);
            rejects({"memory.cpp", "exchange: memory of the tensors: expected the transport's, in its stream"},
                    [&] { cpx::exchange(other, from, far); });
            rejects({"memory.cpp", "exchange: memory of the tensors"},
                    [&] { cpx::exchange(cpx::relayout(from, from, 0), own, other, far); });
            auto relay = cpx::make_movement<float>(from, from, 3, {4, 1}, far);
            rejects({"memory.cpp", "movement: memory of the tensors: expected the transport's, in its stream"},
                    [&] { relay(other, own); });
            rejects({"memory.cpp", "movement: memory of the tensors"}, [&] { relay.transposed(own, other); });
            auto halo = cpx::make_movement<float>(cpx::halo(from, 0, 1), 3, {4, 1}, far);
            std::vector<float> none;
            cpx::rows<float> const beside(none.data(), 0, 3);
            rejects({"memory.cpp", "movement: memory of the tensors"}, [&] { halo(other, beside); });
            rejects({"memory.cpp", "movement: memory of the tensors"}, [&] { halo.transposed(beside, other); });
            rejects({"memory.cpp", "movement: ranks of the sharding: expected 1, got 2"},
                    [&] { relay.set(two, cpx::shard(two.batch(), cpx::zigzag<>(2))); });
            cpx::head_sharded<> const heads(1, from.batch(), {{2, 2}, {2, 2}}), fewer(1, from.batch(), {{2, 4}});
            auto by_heads = cpx::make_movement<float>(heads, from, 8, {4, 1}, far);
            rejects({"memory.cpp", "movement: sections of the sharding: expected those it was made for"},
                    [&] { by_heads.set(fewer, from); });
            rejects({"memory.cpp", "tensor: elements to write: expected 12, got 2"},
                    [&] { own.write(std::vector<float>(2)); });
            rejects({"memory.cpp", "make_tensor: ranks of the sharding: expected 1, got 2"},
                    [&] { cpx::make_tensor<float>(two, far, 3); });
            CHECK(far.plans == 0);
        });
    }
}
