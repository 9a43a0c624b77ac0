// SPDX-License-Identifier: Apache-2.0
// Groups of threads, and what moves rows between ranks.
#include "comm.hpp"
#include "module.hpp"
#include "numbers.hpp"
#include "plan.hpp"

#include <cpx/ops/shift_rows.hpp>
#include <cpx/transport/exchange.hpp>
#include <cpx/transport/sum.hpp>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>

using namespace nanobind::literals;

namespace binding {

namespace {

/// A rank that is a thread of this process.
class thread_rank final : public communicator {
public:
    thread_rank(std::shared_ptr<cpx::threads::group> group, int rank) : group_(std::move(group)), rank_(rank) {}
    ~thread_rank() override { group_->leave(rank_); }

    int rank() const override { return rank_; }
    int ranks() const override { return group_->ranks(); }
    std::string device() const override { return "cpu"; }
    cpx::transport_ref host(char const*) override { return cpx::transport_ref(group_->at(rank_)); }
    void leave() override { group_->leave(rank_); }
    void fail(std::string const& why) override { group_->fail(rank_, why); }

private:
    std::shared_ptr<cpx::threads::group> group_;
    int rank_;
};

std::vector<std::shared_ptr<communicator>> threads(int ranks, double deadline) {
    char const* const where = "threads";
    cpx::require(std::isfinite(deadline) && deadline > 0, where, "deadline, s", "more than 0", deadline);
    cpx::require(ranks <= 1 << 12, where, "ranks", "at most 4096, threads of one process", ranks);
    auto const ms = std::chrono::milliseconds(static_cast<long long>(std::ceil(std::min(deadline, 1e8) * 1000)));
    auto const group = std::make_shared<cpx::threads::group>(ranks, ms);
    std::vector<std::shared_ptr<communicator>> members;
    for (int rank = 0; rank < ranks; ++rank) members.push_back(std::make_shared<thread_rank>(group, rank));
    return members;
}

void exchange(relayout_value const& plan, nb::object source, nb::object target, communicator& comm) {
    if (auto* const there = comm.on_device()) return there->exchange(plan, source, target);
    char const* const where = "exchange";
    array const x = read(where, "x", source), y = written(where, "out", target);
    with_any(x, [&]<class T>(of_type<T>) {
        auto const from = rows_of<T>(x);
        auto const to = rows_to<T>(y);
        call const now(where, comm);
        auto transport = comm.host(where);
        cpx::exchange(plan.whole(), from, to, transport);
    });
}

void sum_over_ranks(nb::object values, communicator& comm) {
    if (auto* const there = comm.on_device()) return there->sum(values);
    char const* const where = "sum_over_ranks";
    array const a = written(where, "values", values);
    with_number(a, [&]<class T>(of_type<T>) {
        auto const list = list_to<T>(a);
        call const now(where, comm);
        auto transport = comm.host(where);
        cpx::sum_over_ranks(list, transport);
    });
}

void shift_rows(halo_value const& plan, nb::object source, nb::object target, communicator& comm, nb::object fill_) {
    char const* const where = "shift_rows";
    fill_value const fill = number(where, "fill", fill_);
    if (auto* const there = comm.on_device()) return there->shift(plan, source, target, fill);
    array const a = read(where, "x", source), b = written(where, "out", target);
    with_type<float, double, Eigen::bfloat16, Eigen::half, std::int64_t, std::int32_t>(a, [&]<class T>(of_type<T>) {
        auto const from = rows_of<T>(a);
        auto const to = rows_to<T>(b);
        T const element = element_of<T>(where, fill);
        call const now(where, comm);
        auto transport = comm.host(where);
        visit_plan(plan, [&](auto const& p, auto const& sharding) {
            cpx::shift_rows(p, cpx::sharded(from, sharding, p.rank), cpx::sharded(to, sharding, p.rank), transport,
                            element);
        });
    });
}

} // namespace

void bind_exchange(nb::module_& m) {
    nb::class_<communicator>(m, "Communicator", nb::is_weak_referenceable(), R"(One rank's end of a group of ranks.

One thread at a time calls with it. Its end, or `leave`, tells the others that this rank calls no more.)")
        .def_prop_ro("rank", &communicator::rank, "This rank, from 0.")
        .def_prop_ro("ranks", &communicator::ranks, "How many ranks the group has.")
        .def_prop_ro("device", &communicator::device, "Where its ranks have their arrays: \"cpu\", \"cuda:0\".")
        .def("leave", &communicator::leave, "Says that this rank calls no more: who waits for it gets cpx.Error.")
        .def(
            "fail", &communicator::fail, "why"_a,
            "Says that this rank's program has failed: the others' next or present call raises cpx.Error that says so.")
        .def("__repr__", [](communicator const& c) {
            return "cpx.Communicator(rank " + std::to_string(c.rank()) + " of " + std::to_string(c.ranks()) + ", " +
                   c.device() + ')';
        });
    m.def("threads", threads, "ranks"_a, "deadline"_a = 600.0,
          R"(Returns the communicators of a group of ranks that are threads of this process, which the caller starts.

deadline: the longest, in seconds, that a rank waits for the others in one exchange. `run` starts the threads, too.)");
    m.def("exchange", exchange, "plan"_a, "x"_a, "out"_a, "comm"_a);
    m.def("sum_over_ranks", sum_over_ranks, "values"_a, "comm"_a,
          R"(Replaces values on every rank by the sums over all ranks, added in rank order. Collective.

values: an array of any shape, its elements side by side; of float32, float64, bfloat16 or float16.)");
    m.def("shift_rows", shift_rows, "plan"_a, "x"_a, "out"_a, "comm"_a, "fill"_a.none());
}

} // namespace binding
