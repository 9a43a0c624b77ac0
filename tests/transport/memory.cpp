// SPDX-License-Identifier: Apache-2.0
// Ranks whose memory is of another kind than the host's: what exchanges, sums and tensors ask of it, without a GPU.
#include <cpx/core/memory.hpp>

#include <cpx/layout/zigzag.hpp>
#include <cpx/transport/movement.hpp>
#include <cpx/transport/sum.hpp>
#include <cpx/transport/threads.hpp>

#include <doctest/doctest.h>

#include <support/packings.hpp>
#include <support/rejects.hpp>

namespace {

using cpx::index_t;
using support::lengths, support::rejects;

/// Memory that plays to be elsewhere, with a stream that tells two of them apart.
struct far_memory {
    template <class T>
    using block = std::vector<T>;
    template <class T>
    using sum = T;
    int stream = 0;

    template <class T>
    block<T> zeros(char const* where, std::initializer_list<index_t> counts, cpx::caller here) const {
        return cpx::host_memory().zeros<T>(where, counts, here);
    }
    template <class T>
    void write(T* to, std::span<T const> from, cpx::caller here) const {
        cpx::host_memory().write(to, from, here);
    }
    template <class T>
    std::vector<T> read(std::span<T const> from, cpx::caller here) const {
        return cpx::host_memory().read(from, here);
    }
    friend bool operator==(far_memory, far_memory) = default;
};

/// Ranks with such memory, which run plans themselves: in truth on threads.
class far_ranks {
public:
    using memory_type = far_memory;
    explicit far_ranks(cpx::threads& comm) : comm_(comm) {}
    int rank() const { return comm_.rank(); }
    int ranks() const { return comm_.ranks(); }
    far_memory memory() const { return {7}; }
    template <class T>
    void exchange(cpx::plan const& p, cpx::rows<T const> const& from, cpx::rows<T> const& to, cpx::caller here) {
        ++plans;
        cpx::exchange(p, from, to, comm_, here);
    }
    int plans = 0;

    /// What a movement prepares: one plan at a time, of at most some runs.
    template <class T>
    struct prepared {
        far_ranks& comm;
        cpx::plan now;
        index_t most;
        void set(cpx::plan const& p, cpx::caller here) {
            for (auto const& m : p.sends)
                cpx::require(std::ssize(m.rows) <= most, "far_ranks", "runs", most, m.rows.size(), here);
            now = p;
        }
        void operator()(cpx::rows<T const> const& from, cpx::rows<T> const& to, cpx::caller here) {
            comm.exchange(now, from, to, here);
        }
    };
    template <class T>
    prepared<T> prepare(cpx::plan const& p, index_t, index_t runs, cpx::capacity const&, cpx::caller) {
        return {*this, p, runs};
    }

private:
    cpx::threads& comm_;
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
static_assert(!std::is_default_constructible_v<cpx::sharded<float, zigzag>>);
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

    TEST_CASE("a movement made once moves every batch that comes, there and back, on ranks of any memory") {
        auto const check = [](auto& comm) {
            int const rank = comm.rank(), ranks = comm.ranks();
            auto const from = [&](cpx::thd const& batch) { return cpx::shard(batch, cpx::zigzag<>(ranks)); };
            auto const to = [&](cpx::thd const& batch) { return cpx::shard(batch, cpx::sequential<>(ranks)); };
            cpx::capacity const most{40, 4};
            auto there = cpx::make_movement<float>(from(lengths({5})), to(lengths({5})), 2, most, comm);
            auto back = cpx::make_movement<float>(to(lengths({5})), from(lengths({5})), 2, most, comm);
            for (auto const& batch : {lengths({5}), lengths({17, 0, 3}), lengths({}), lengths({1, 1, 1, 30})})
                for (int again = 0; again < 2; ++again) {
                    auto x = cpx::make_tensor<float>(from(batch), comm, 2),
                         z = cpx::make_tensor<float>(from(batch), comm, 2);
                    std::vector<float> values(x.elements().size());
                    for (std::size_t i = 0; i < values.size(); ++i)
                        values[i] = static_cast<float>(rank * 1000 + static_cast<int>(i));
                    x.write(values);
                    auto y = cpx::make_tensor<float>(to(batch), comm, 2);
                    there(x, y);
                    CHECK(y.read() == cpx::exchange(x, to(batch), comm).read());
                    back(y, z);
                    CHECK(z.read() == values);
                }
            auto const x = cpx::make_tensor<float>(from(lengths({9})), comm, 2);
            auto y = cpx::make_tensor<float>(to(lengths({4, 5})), comm, 2);
            rejects({"memory.cpp", "relayout"}, [&] { there(x, y); });
            rejects({"memory.cpp", "movement: runs: expected not negative"}, [&] {
                cpx::make_movement<float>(from(lengths({5})), to(lengths({5})), 2, {40, -7}, comm);
            });
        };
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
            rejects({"memory.cpp", "tensor: elements to write: expected 12, got 2"},
                    [&] { own.write(std::vector<float>(2)); });
            rejects({"memory.cpp", "make_tensor: ranks of the sharding: expected 1, got 2"},
                    [&] { cpx::make_tensor<float>(two, far, 3); });
            CHECK(far.plans == 0);
        });
    }
}
