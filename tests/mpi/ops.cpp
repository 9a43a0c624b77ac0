// SPDX-License-Identifier: Apache-2.0
// Operators on processes have the bits that they have on threads: the halo, both carries and sums.
#include <cpx/transport/mpi.hpp>

#include <cpx/ops.hpp>
#include <cpx/transport/sum.hpp>

#include <mpi/job.hpp>
#include <ops/on_ranks.hpp>
#include <ops/reference.hpp>

namespace {

using namespace on_ranks;
using cpx::index_t;

std::vector<cpx::thd> const batches = {support::lengths({}), support::lengths({1}), support::lengths({5, 3, 2}),
                                       support::lengths({37, 0, 16, 1, 50})};

/// Checks that this rank has its share of `whole`.
template <class T, cpx::any_sharding S>
void check_part(cpx::tensor<T, S> const& got, int rank, std::vector<T> const& whole,
                std::vector<cpx::section> const& sections) {
    auto const want = take(whole, sections, got.sharding(), rank);
    bool same = got.data().count() == want.data().count();
    for (index_t row = 0; same && row < want.data().count(); ++row)
        for (index_t c = 0; c < want.data().width(); ++c)
            same = same && same_bits(got.data()(row, c), want.data()(row, c));
    CHECK(same);
}

} // namespace

TEST_SUITE("mpi") {
    using cpx::index_t;

    TEST_CASE("a convolution has the bits of threads on every sharding") {
        int const ranks = job::ranks();
        cpx::mpi comm(MPI_COMM_WORLD, std::chrono::seconds(60));
        for (auto const& batch : batches) {
            auto const p = reference::random_conv<float>(batch, 3, 7, true, cpx::activation::silu, 1);
            for_each_sharding(batch, ranks, {1, 16}, [&](std::string const& name, auto const& sharding) {
                CAPTURE(name);
                std::vector<cpx::section> const sections{{p.channels, 1}};
                auto const halo = cpx::halo(sharding, comm.rank(), p.taps - 1);
                auto const x = take(p.x, sections, sharding, comm.rank());
                auto y = poisoned<float>(sharding, comm.rank(), p.channels);
                cpx::causal_conv1d(halo, x.view(), cpx::rows<float const>(p.weight, p.taps),
                                   std::span<float const>(p.bias), p.act, y.view(), comm);
                check_part(y, comm.rank(), run(p, sharding), sections);
            });
        }
    }

    TEST_CASE_TEMPLATE("a gated delta net has the bits of threads, whatever the carry", How, cpx::serial, cpx::scan) {
        int const ranks = job::ranks();
        cpx::mpi comm(MPI_COMM_WORLD, std::chrono::seconds(60));
        cpx::gated_delta_net_config const config{12, {2, 4, 4, 6}, 4, 16, 1e-6};
        for (auto const& batch : batches) {
            auto const p = reference::random_layer<float>(batch, config, true, 2);
            std::vector<cpx::section> const sections{{1, config.hidden}};
            for_each_sharding(batch, ranks, {1, 16}, [&](std::string const& name, auto const& sharding) {
                CAPTURE(name);
                auto const x = take(p.x, sections, sharding, comm.rank());
                auto y = poisoned<float>(sharding, comm.rank(), config.hidden);
                cpx::gated_delta_net const net(cpx::carry<How>(sharding, comm.rank()), config);
                net(p.view(), x.view(), y.view(), comm);
                check_part(y, comm.rank(), reference::run<How>(p, sharding), sections);
            });
        }
    }

    TEST_CASE("rows of tokens come to the owners of their experts and back, and ranks that count others are told") {
        int const ranks = job::ranks();
        auto const share = [&](cpx::mpi& comm, index_t experts, index_t choices) {
            auto const sharding = cpx::shard(batches[3], cpx::zigzag<>(ranks));
            auto const places = cpx::global_rows(sharding, comm.rank());
            cpx::row_buffer<index_t> chosen(std::ssize(places), choices);
            std::vector<double> x(places.begin(), places.end()), y(x.size() * static_cast<std::size_t>(choices), -1);
            for (index_t row = 0; row < chosen.count(); ++row)
                for (index_t s = 0; s < choices; ++s)
                    chosen.view()(row, s) = (places[static_cast<std::size_t>(row)] * 7 + s) % experts;
            cpx::expert_exchange const at(chosen.view(), experts, places, comm);
            auto const there = at.to_experts(cpx::rows<double const>(x, 1), 1);
            for (std::size_t row = 0; row < at.places().size(); ++row)
                CHECK(there.view()(static_cast<index_t>(row), 0) == static_cast<double>(at.places()[row]));
            at.to_tokens(there.view(), cpx::rows<double>(y, choices));
            for (std::size_t i = 0; i < y.size(); ++i) CHECK(y[i] == x[i / static_cast<std::size_t>(choices)]);
        };
        auto const told = [&](index_t odd_experts, index_t odd_choices) {
            return job::error(std::chrono::seconds(20), [&](cpx::mpi& comm) {
                bool const odd = comm.rank() == 1;
                share(comm, ranks * (odd ? odd_experts : 4), odd ? odd_choices : 2);
            });
        };
        CHECK(told(4, 2) == "");
        if (ranks == 1) return;
        std::string const all = std::to_string(4 * ranks), half = std::to_string(2 * ranks);
        support::holds({"expert_exchange: ranks disagree on ", all + " experts and 2 choices a token (rank",
                        half + " experts and 2 choices a token (rank 1)"},
                       told(2, 2), cpx::caller::here());
        support::holds({"expert_exchange: ranks disagree on ", all + " experts and 3 choices a token (rank 1)"},
                       told(4, 3), cpx::caller::here());
    }

    TEST_CASE("ranks that convolve, shift or carry states in another way are told in what they differ") {
        int const ranks = job::ranks();
        if (ranks == 1) return;
        std::string const odd = " (rank " + std::to_string(ranks - 1) + ')';
        auto const told = [&](std::string const& field, std::string const& value, auto&& run) {
            support::holds({"ops.cpp", "ranks disagree on " + field + ": expected one value on all ranks", value + odd},
                           job::error(std::chrono::seconds(20),
                                      [&](cpx::mpi& comm) {
                                          auto const sharding = cpx::shard(batches[3], cpx::zigzag<>(ranks));
                                          auto const tensor = [&](index_t width) {
                                              return cpx::make_tensor<double>(sharding, comm.rank(), width);
                                          };
                                          run(sharding, tensor, comm, comm.rank() == ranks - 1);
                                      }),
                           cpx::caller::here());
        };
        std::vector<double> const weight(12), bias(3);
        told("activation", "none", [&](auto const& sharding, auto const& tensor, cpx::mpi& comm, bool last) {
            auto const x = tensor(3);
            auto y = x;
            cpx::causal_conv1d(cpx::halo(sharding, comm.rank(), 3), x, weight, bias,
                               last ? cpx::activation::none : cpx::activation::silu, y, comm);
        });
        told("fill (hash)", "", [&](auto const& sharding, auto const& tensor, cpx::mpi& comm, bool last) {
            auto const x = tensor(3);
            auto y = x;
            cpx::shift_rows(cpx::halo(sharding, comm.rank(), 1, cpx::side::after), x, y, comm, last ? -1.0 : 0.0);
        });
        told("key width of the state", "4", [&](auto const& sharding, auto const& tensor, cpx::mpi& comm, bool last) {
            index_t const keys = last ? 4 : 2, values = 8 / keys; // as many elements of states and of maps
            auto const q = tensor(keys), k = q, v = tensor(values), g = tensor(1);
            auto o = v;
            cpx::recurrence_tensors const t{std::array{q.view(), k.view(), v.view(), g.view()}, o.view()};
            recur(cpx::carry<cpx::scan>(sharding, comm.rank()), cpx::head_decay_attention{{1, 1, keys, values}}, t,
                  comm);
        });
    }

    TEST_CASE("every rank gets the bits of the sum in rank order") {
        int const ranks = job::ranks();
        cpx::mpi comm;
        for (index_t const count : {0, 1, 2, 7, 1000, 50000}) {
            std::vector<float> want(static_cast<std::size_t>(count)), mine;
            for (int rank = 0; rank < ranks; ++rank) {
                support::splitmix numbers(static_cast<std::uint64_t>(rank));
                auto const values = uniform<float>(numbers, count, rank % 2 ? 1e8 : 1e-3);
                for (std::size_t i = 0; i < want.size(); ++i) want[i] += values[i];
                if (rank == comm.rank()) mine = values;
            }
            cpx::sum_over_ranks(std::span(mine), comm);
            CHECK(same_bits(mine, want));
        }
    }
}
