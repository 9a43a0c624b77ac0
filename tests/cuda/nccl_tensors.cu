// SPDX-License-Identifier: Apache-2.0
// Tensors in device memory, and programs that are the same on the host and between GPUs.
#include <cpx/cuda/shared_communicator.hpp>
#include <cpx/ops/cuda/causal_conv1d.hpp>
#include <cpx/ops/cuda/expert_exchange.hpp>
#include <cpx/ops/cuda/mrope.hpp>

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/striped.hpp>
#include <cpx/layout/zigzag.hpp>
#include <cpx/plan/global_rows.hpp>
#include <cpx/transport/subgroup.hpp>
#include <cpx/transport/sum.hpp>
#include <cpx/transport/threads.hpp>

#include <doctest/doctest.h>

#include "../../harness/graph.hpp"
#include "group.hpp"

#include <support/media.hpp>
#include <support/packings.hpp>
#include <support/random.hpp>
#include <support/rejects.hpp>

#include <atomic>
#include <functional>
#include <utility>

namespace {

using cpx::index_t;
using support::lengths, support::rejects;
namespace cuda = cpx::cuda;

/// What a framework might bring: counts what it has given and taken.
struct counting final : cuda::memory_resource {
    std::atomic<int> given = 0, taken = 0;
    void* allocate(std::size_t bytes, cudaStream_t in) override {
        ++given;
        return cuda::default_resource().allocate(bytes, in);
    }
    void deallocate(void* memory, std::size_t bytes, cudaStream_t in) noexcept override {
        ++taken;
        cuda::default_resource().deallocate(memory, bytes, in);
    }
};

/// Whole numbers that tell tokens and columns apart.
template <class S>
std::vector<float> numbers(S const& sharding, int rank, index_t width) {
    std::vector<float> values;
    sharding.for_each_piece(rank, [&](cpx::range piece) {
        for (index_t i = piece.first * width; i < piece.last * width; ++i)
            values.push_back(static_cast<float>(i * i % 37 % 7 - 3));
    });
    return values;
}

/// What a program leaves on every rank.
using results = std::vector<std::vector<std::vector<float>>>;

/// Moves a tensor there and back, to every rank and to heads, convolves it and adds up: one program for all memories.
/// `meet()`: see `group::run`.
template <cpx::any_transport Comm, class From, class To, class Meet>
std::vector<std::vector<float>> program(Comm& comm, From const& from, To const& to, index_t taps, Meet const& meet) {
    index_t const width = 12;
    int const rank = comm.rank();
    cpx::replicated<> const everywhere(comm.ranks(), cpx::thd({0, width})), all_rows(comm.ranks(), from.batch());
    cpx::head_sharded<> const heads(comm.ranks(), from.batch(), {{4, 2}, {2, 2}});
    auto const done = [&](auto tensor) {
        auto values = tensor.read();
        meet();
        return values;
    };
    auto x = cpx::make_tensor<float>(from, comm, width);
    x.write(numbers(from, rank, width));
    auto weight = cpx::make_tensor<float>(everywhere, comm, taps),
         dweight = cpx::make_tensor<float>(everywhere, comm, taps);
    weight.write(numbers(everywhere, rank, taps));
    meet();

    std::vector<std::vector<float>> found;
    auto const there = cpx::relayout(from, to, rank);
    auto moved = cpx::exchange(there, x, comm);
    found.push_back(moved.read());
    meet();
    found.push_back(done(cpx::exchange(there.transposed(), moved, comm)));
    found.push_back(done(cpx::exchange(x, heads, comm)));
    auto const all = cpx::exchange(x, all_rows, comm);
    found.push_back(all.read());
    meet();
    auto const sums = cpx::relayout(from, all_rows, rank).transposed();
    found.push_back(done(cpx::exchange(sums, all, comm))); // as many times x as there are ranks

    auto y = cpx::make_tensor<float>(to, comm, width), dx = cpx::make_tensor<float>(to, comm, width);
    auto const before = cpx::halo(to, rank, taps - 1), after = cpx::halo(to, rank, taps - 1, cpx::side::after);
    cpx::causal_conv1d(before, moved, weight.data(), {}, cpx::activation::none, y, comm);
    found.push_back(y.read());
    meet();
    cpx::causal_conv1d_backward(before, after, moved, weight.data(), {}, cpx::activation::none, y,
                                cpx::causal_conv1d_gradients{dx, dweight.data()}, comm);
    found.push_back(dx.read());
    meet();
    cpx::sum_over_ranks(dweight.elements(), comm);
    found.push_back(dweight.read());
    meet();

    auto in_order = cpx::make_tensor<float>(everywhere, comm, taps),
         dbias = cpx::make_tensor<float>(everywhere, comm, 1);
    cpx::causal_conv1d_gradients to_shares{dx, in_order.data(), dbias.elements()};
    to_shares.order = cpx::sum_order::by_row;
    cpx::causal_conv1d_backward(before, after, moved, weight.data(), {}, cpx::activation::none, y, to_shares, comm);
    found.push_back(done(std::move(in_order))); // of some channels all rows
    found.push_back(done(std::move(dbias)));
    return found;
}

/// Ranks that are threads of one process: none goes on until all have ended an exchange.
struct meeting : cuda::communicator {
    std::function<void()> meet;
    meeting(cpx::nccl& comm, cudaStream_t in, std::function<void()> everyone,
            cuda::memory_resource& from = cuda::default_resource())
        : communicator(comm, in, from), meet(std::move(everyone)) {}
    template <class T>
    void exchange(cpx::plan const& p, cpx::rows<T const> const& from, cpx::rows<T> const& to,
                  cpx::caller here = cpx::caller::here()) {
        communicator::exchange<T>(p, from, to, here);
        wait();
        meet();
    }
};

template <class From, class To>
void check_program(group& gpus, From const& from, To const& to, index_t taps) {
    auto const ranks = static_cast<std::size_t>(gpus.ranks());
    results on_host(ranks), on_gpus(ranks);
    cpx::threads::run(gpus.ranks(), [&](cpx::threads& comm) {
        on_host[static_cast<std::size_t>(comm.rank())] = program(comm, from, to, taps, [] {});
    });
    gpus.run([&](cpx::nccl& joined, auto const& meet) {
        cuda::stream const stream;
        counting resource;
        {
            meeting comm(
                joined, stream, [&] { meet(); }, resource);
            meet();
            auto found = program(comm, from, to, taps, [&] {
                comm.wait();
                meet();
            });
            on_gpus[static_cast<std::size_t>(comm.rank())] = std::move(found);
        }
        cpx::require(resource.given > 0 && resource.given == resource.taken, "test", "blocks freed",
                     resource.given.load(), resource.taken.load());
        meet();
    });
    for (int const rank : gpus.own())
        CHECK(on_host[static_cast<std::size_t>(rank)] == on_gpus[static_cast<std::size_t>(rank)]);
}

/// Tokens of a batch, and the experts that they chose.
struct choosing {
    cpx::thd batch;
    index_t experts, choices;
    std::vector<index_t> chosen;
};

/// Brings rows to the experts that ranks of `group` share, back, there again, and to those that all ranks share: one
/// program for all memories. Returns what arrives, and where.
template <class Group, class All, class S>
std::vector<std::vector<float>> to_experts(choosing const& of, S const& sharding, Group& group, All& all) {
    index_t const width = 6;
    auto const memory = cpx::rank_memory(group);
    using M = std::remove_const_t<decltype(memory)>;
    int const rank = all.rank();
    auto const places = cpx::global_rows(sharding, rank);
    auto const own = take(of.chosen, of.choices, sharding, rank);
    cpx::row_buffer<index_t, M> chosen(memory, std::ssize(places), of.choices);
    memory.write(chosen.view().data(), std::span<index_t const>(own));
    cpx::row_buffer<float, M> x(memory, std::ssize(places), width), wide(memory, x.count(), of.choices * width);
    memory.write(x.view().data(), std::span<float const>(numbers(sharding, rank, width)));

    std::vector<std::vector<float>> found;
    auto const keep = [&](auto const& rows) {
        auto const size = static_cast<std::size_t>(rows.count() * rows.width());
        found.push_back(memory.read(std::span<float const>(rows.data(), size)));
    };
    cpx::row_buffer<index_t, M> const& chosen_before = chosen;
    cpx::row_buffer<float, M> const& x_before = x;
    cpx::expert_exchange<Group> const at(chosen_before.view(), of.experts, places, group);
    auto const there = at.template to_experts<float>(x_before.view(), width);
    keep(there.view());
    found.emplace_back(at.begins().begin(), at.begins().end());
    found.emplace_back(at.places().begin(), at.places().end());
    at.template to_tokens<float>(there.view(), wide.view());
    keep(wide.view());
    cpx::row_buffer<float, M> const& back = wide;
    auto const again = at.template to_experts<float>(back.view(), width);
    keep(again.view());
    auto const of_all = cpx::expert_exchange<All>::of_rows(at, all);
    auto const everywhere = of_all.template to_experts<float>(there.view(), width);
    keep(everywhere.view());
    found.emplace_back(of_all.places().begin(), of_all.places().end());
    if (std::ssize(places) > 1 && of.choices > 1)
        rejects({"nccl_tensors.cu", "expert_rows: stride of x: expected its width"}, [&] {
            cpx::expert_rows_in<M>(memory, cpx::rows<index_t const>(own, of.choices), of.experts, {})
                .template to_experts<float>(back.view().columns(0, of.choices), 1);
        });
    return found;
}

/// Experts that groups of `share` neighbouring ranks share.
void check_experts(group& gpus, choosing const& of, int share) {
    int const ranks = gpus.ranks();
    auto const sharding = cpx::shard(of.batch, cpx::zigzag<>(ranks));
    results on_host(static_cast<std::size_t>(ranks)), on_gpus = on_host;
    cpx::threads::run(ranks, [&](cpx::threads& comm) {
        auto neighbours = cpx::neighbours(comm, share);
        on_host[static_cast<std::size_t>(comm.rank())] = to_experts(of, sharding, neighbours, comm);
    });
    gpus.run([&](cpx::nccl& joined, auto const& meet) {
        cuda::stream const stream;
        auto const shared = joined.split(joined.rank() / share);
        {
            meeting all(joined, stream, meet), neighbours(*shared, stream, meet);
            meet();
            auto found = to_experts(of, sharding, neighbours, all);
            on_gpus[static_cast<std::size_t>(joined.rank())] = std::move(found);
            all.wait();
            meet();
        }
        meet();
    });
    for (int const rank : gpus.own())
        CHECK(on_host[static_cast<std::size_t>(rank)] == on_gpus[static_cast<std::size_t>(rank)]);
}

/// Keeps a stream busy until the host says so, or for five seconds; then says that it has given up.
__global__ void hold(unsigned volatile* go, unsigned volatile* gave_up) {
    long long const begin = clock64();
    while (*go == 0)
        if (clock64() - begin > 9'000'000'000) {
            *gave_up = 1;
            return;
        }
}

/// Two numbers that host and device see.
struct signals {
    unsigned* numbers = nullptr;
    signals() {
        cuda::check(cudaHostAlloc(reinterpret_cast<void**>(&numbers), 8, cudaHostAllocMapped), "cudaHostAlloc");
        numbers[0] = numbers[1] = 0;
    }
    signals(signals const&) = delete;
    signals& operator=(signals const&) = delete;
    ~signals() { static_cast<void>(cudaFreeHost(numbers)); }
};

/// The two kinds of sharding that movements below go between.
struct kinds {
    int ranks;
    auto from(cpx::thd const& batch) const { return cpx::shard(batch, cpx::zigzag<>(ranks)); }
    auto to(cpx::thd const& batch) const { return cpx::shard(batch, cpx::sequential<>(ranks)); }
};

std::string text(std::vector<index_t> const& list) { return support::text(lengths(list)); }

/// Moves batches there and back while the device is busy; `refused`: what a batch that is too large is told.
template <class Comm, class Meet>
void move_many(Comm& comm, std::string const& refused, Meet const& meet) {
    int const rank = comm.rank();
    kinds const of{comm.ranks()};
    signals signal;
    cpx::capacity const most{700, 12};
    auto const first = lengths({5});
    meet();
    auto move = cpx::make_movement<float>(of.from(first), of.to(first), 6, most, comm);
    meet();
    auto z = move.make_tensor(of.from(first));
    auto y = move.make_tensor(of.to(first));
    support::splitmix random(17); // the same on every rank
    for (int round = 0; round < 40; ++round) {
        std::vector<index_t> list;
        for (index_t k = random.between(0, 12); k > 0; --k) list.push_back(random.between(0, 100));
        auto const batch = lengths(list);
        auto x = cpx::make_tensor<float>(of.from(batch), comm, 6);
        x.write(numbers(of.from(batch), rank, 6));
        y.hold(of.to(batch)), z.hold(of.from(batch));
        comm.wait();
        meet();
        signal.numbers[0] = 0;
        hold<<<1, 1, 0, comm.stream()>>>(signal.numbers, signal.numbers + 1);
        move(x, y); // only enqueued: the device is busy until the host says so
        move.transposed(y, z);
        signal.numbers[0] = 1;
        comm.wait();
        cpx::require(signal.numbers[1] == 0, "test", "calls", "no wait for the device", "a wait");
        cpx::require(y.read() == numbers(of.to(batch), rank, 6), "test", "rows there", "those of the batch",
                     text(list));
        cpx::require(z.read() == x.read(), "test", "rows back", "those that went", text(list));
        meet();
    }
    auto const large = lengths(std::vector<index_t>(12, 500));
    auto const x = cpx::make_tensor<float>(of.from(large), comm, 6);
    auto to = cpx::make_tensor<float>(of.to(large), comm, 6);
    rejects({"nccl_tensors.cu", refused}, [&] { move(x, to); });
    rejects({"nccl_tensors.cu", "tensor: elements of the sharding: expected at most 4200"},
            [&] { y.hold(of.to(large)); });
    comm.wait();
    meet();
}

/// Returns whether kernels reach every rank's memory; if not, the test's program counts as skipped.
bool reach_each_other(cuda::shared_memory const& memory) {
    return memory.one_kernel() || support::enough(2, 1, "GPUs that reach each other's memory");
}

/// Gives rank 0 one batch and rank 1 another: `told`, and then a batch that both have moves.
template <class Comm, class Meet>
void differ(Comm& comm, std::vector<std::vector<index_t>> const& lists, std::string const& told, Meet const& meet) {
    int const rank = comm.rank();
    kinds const of{comm.ranks()};
    auto const one = lengths(lists[0]);
    meet();
    auto move = cpx::make_movement<float>(of.from(one), of.to(one), 4, {24, 3}, comm);
    auto y = move.make_tensor(of.to(one));
    meet();
    auto const run = [&](cpx::thd const& batch) {
        auto x = cpx::make_tensor<float>(of.from(batch), comm, 4);
        y.hold(of.to(batch));
        x.write(numbers(of.from(batch), rank, 4));
        move(x, y);
        comm.wait();
        return y.read();
    };
    rejects({"nccl_tensors.cu", told}, [&] { run(lengths(lists[static_cast<std::size_t>(rank)])); });
    meet();
    auto const batch = lengths({3, 20});
    cpx::require(run(batch) == numbers(of.to(batch), rank, 4), "test", "rows after an error", "the batch's", "others");
    meet();
}

/// Throws unless `values` are the halo rows of tensors of `numbers`, six columns wide.
template <class Plan>
void check_beside(Plan const& halo, std::vector<float> const& values, std::string const& batch) {
    for (std::size_t i = 0; i < halo.segments.size(); ++i) {
        cpx::segment const& s = halo.segments[i];
        index_t row = halo.batch.offset(s.sequence) + s.token; // the rows before it end there
        for (std::size_t k = halo.begin[i + 1]; k-- > halo.begin[i];)
            for (index_t n = halo.runs[k].count; n-- > 0;) {
                --row;
                if (!halo.runs[k].halo) continue;
                index_t const at = row * 6, is = (halo.runs[k].first + n) * 6;
                cpx::require(values[static_cast<std::size_t>(is)] == static_cast<float>(at * at % 37 % 7 - 3), "test",
                             "halo row", "that before the segment", batch);
            }
    }
}

/// Brings halos and carries of batches, and gradients home, which are prepared once.
template <class Comm, class Meet>
void bring_many(Comm& comm, Meet const& meet) {
    int const rank = comm.rank();
    kinds const of{comm.ranks()};
    cpx::capacity const most{700, 12};
    auto const first = of.from(lengths({5}));
    meet();
    auto halos = cpx::make_movement<float>(cpx::halo(first, rank, 3), 6, most, comm);
    meet();
    auto carries = cpx::make_movement<float>(cpx::carry<cpx::serial>(first, rank), {6, 0}, most, comm);
    meet();
    support::splitmix random(19); // the same on every rank
    for (int round = 0; round < 20; ++round) {
        std::vector<index_t> list;
        for (index_t k = random.between(0, 12); k > 0; --k) list.push_back(random.between(0, 100));
        auto const sharding = of.from(lengths(list));
        auto x = cpx::make_tensor<float>(sharding, comm, 6), dx = cpx::make_tensor<float>(sharding, comm, 6);
        x.write(numbers(sharding, rank, 6));
        cpx::set_together(comm, [&] {
            halos.set(sharding);
            carries.set(sharding);
        });
        auto const& halo = halos.plan();
        cuda::buffer<float> beside(halo.target_rows * 6), states(std::ssize(halo.segments) * 6),
            got(std::ssize(halo.segments) * 6);
        meet();
        halos(x, cpx::rows<float>(beside.data(), halo.target_rows, 6));
        halos.transposed(cpx::rows<float const>(beside.data(), halo.target_rows, 6), dx);
        comm.wait();
        meet();
        check_beside(halo, beside.read(), text(list));

        auto const& carry = carries.plan();
        for (index_t level = 0; level < carry.steps; ++level) {
            auto const step = carry.step(level, cpx::side::before);
            std::vector<float> given; // each segment's first row, by its number in the batch
            for (index_t const i : carry.level(level))
                for (index_t c = 0; c < 6; ++c)
                    given.push_back(
                        static_cast<float>(carry.segments[static_cast<std::size_t>(i)].sequence * 1000 + level));
            given.resize(static_cast<std::size_t>(states.size()));
            states.write(given);
            meet();
            carries(level, cpx::side::before, cpx::rows<float const>(states.data(), step.source_rows, 6),
                    cpx::rows<float>(got.data(), step.target_rows, 6));
            comm.wait();
            meet();
            auto const found = got.read();
            index_t row = 0;
            for (index_t const i : carry.level(level + 1)) {
                auto const sequence = carry.segments[static_cast<std::size_t>(i)].sequence;
                cpx::require(found[static_cast<std::size_t>(row * 6)] == static_cast<float>(sequence * 1000 + level),
                             "test", "state of the segment before", "its sequence's", text(list));
                ++row;
            }
        }
        meet();
    }
}

/// A halo there and back and carries of both kinds, prepared for 60 rows and 3 sequences of 6 columns.
template <class Comm>
class beside {
public:
    using sharding = decltype(kinds().from(cpx::thd()));

    beside(Comm& comm, sharding const& first)
        : halo_(cpx::make_movement<float>(cpx::halo(first, comm.rank(), 3), 6, most, comm)),
          serial_(cpx::make_movement<float>(cpx::carry<cpx::serial>(first, comm.rank()), {6, 0}, most, comm)),
          scan_(cpx::make_movement<float>(cpx::carry<cpx::scan>(first, comm.rank()), {6, 4}, most, comm)) {}
    void set(sharding const& of) { halo_.set(of), serial_.set(of), scan_.set(of); }

    /// Runs as many exchanges of each carry, as far as there are so many, from rows of numbers into rows of -1.
    template <class X>
    void run(X const& x, X& dx, index_t serial_steps, index_t scan_steps) {
        auto const rows = [](auto& buffer, index_t count, index_t width) {
            return cpx::rows(buffer.data(), count, width);
        };
        halo_(x, rows(rows_, halo_.rows_of().second, 6));
        halo_.transposed(cpx::rows<float const>(rows_.data(), halo_.rows_of().second, 6), dx);
        auto const carry = [&](auto& by, auto& got, index_t steps, index_t width) {
            for (index_t k = 0; k < steps; ++k)
                for (auto const from : {cpx::side::before, cpx::side::after}) {
                    auto const [takes, brings] = rows_of(by.plan(), k, from);
                    float* const to = got.data() + (2 * k + (from == cpx::side::after)) * states;
                    by(k, from, cpx::rows<float const>(given_.data(), takes, width),
                       cpx::rows<float>(to, brings, width));
                }
        };
        carry(serial_, serial_got_, std::min(serial_steps, serial_.plan().steps), 6);
        carry(scan_, scan_got_, std::min(scan_steps, scan_.plan().steps), 2);
    }
    void clear() {
        for (auto* const b : {&rows_, &serial_got_, &scan_got_}) b->write(std::vector<float>(as_many(*b), -1));
        std::vector<float> list(as_many(given_));
        for (std::size_t i = 0; i < list.size(); ++i) list[i] = static_cast<float>(i % 97);
        given_.write(list);
    }
    std::vector<std::vector<float>> read() const { return {rows_.read(), serial_got_.read(), scan_got_.read()}; }
    index_t halo_rows() { return halo_.rows_of().second; }
    std::pair<index_t, index_t> steps() { return {serial_.plan().steps, scan_.plan().steps}; }

private:
    static constexpr cpx::capacity most{60, 3};
    static constexpr index_t states = 400; ///< elements that an exchange takes or brings, at most
    static std::size_t as_many(auto const& buffer) { return static_cast<std::size_t>(buffer.size()); }
    static std::pair<index_t, index_t> rows_of(auto const& plan, index_t k, cpx::side from) {
        auto const rows = [](cpx::plan const& step) { return std::pair(step.source_rows, step.target_rows); };
        if constexpr (requires { plan.step(k, from, 6, 4); })
            return rows(plan.step(k, from, 6, 4));
        else
            return rows(plan.step(k, from));
    }

    cpx::movement<float, cpx::halo_plan<sharding>, Comm> halo_;
    cpx::movement<float, cpx::carry_plan<cpx::serial, sharding>, Comm> serial_;
    cpx::movement<float, cpx::carry_plan<cpx::scan, sharding>, Comm> scan_;
    cuda::buffer<float> rows_{60 * 6}, given_{states}, serial_got_{8 * states}, scan_got_{8 * states};
};

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("rows of experts between GPUs are those of the host, in its order") {
        if (!has_gpus()) return;
        for (int const ranks : {1, 2, 4}) {
            if (usable_ranks(ranks) < ranks) break;
            CAPTURE(ranks);
            group gpus(ranks);
            for (int share = 1; share <= ranks; share *= 2)
                for (auto const& list : {std::vector<index_t>{9, 0, 1, 30}, {1}, {}}) {
                    choosing random{lengths(list), 8, 3, {}}, one{lengths(list), 4, 1, {}};
                    support::splitmix numbers(static_cast<std::uint64_t>(ranks + share));
                    for (index_t token = 0; token < random.batch.tokens(); ++token) {
                        index_t const first = numbers.between(0, 5); // of 8: 0 and 7 are chosen by few
                        random.chosen.insert(random.chosen.end(), {first + 1, first, first + 2});
                        one.chosen.push_back(2);
                    }
                    check_experts(gpus, random, share);
                    check_experts(gpus, one, share);
                }
        }
    }

    namespace cuda = cpx::cuda; // not ::cuda, of the toolkit

    TEST_CASE(
        "a tensor on a device begins with zeros, takes and gives what the host writes, and is freed in its stream") {
        if (!has_gpus(1)) return;
        cuda::stream const stream;
        counting resource;
        cuda::memory const memory(stream, resource);
        auto const sharding = cpx::shard(lengths({5, 0, 9}), cpx::zigzag<2>{});
        for (int rank : {0, 1}) {
            auto x = cpx::make_tensor<float>(sharding, rank, 3, memory);
            static_assert(
                std::same_as<decltype(x),
                             cpx::tensor<float, decltype(cpx::shard(cpx::thd(), cpx::zigzag<2>{})), cuda::memory>>);
            std::vector<float> const zeros(static_cast<std::size_t>(sharding.rows(rank) * 3));
            CHECK(x.read() == zeros);
            auto const values = numbers(sharding, rank, 3);
            x.write(values);
            CHECK(x.read() == values);
            CHECK(cuda::device_of(x.data().data()) == cuda::current_device());
            CHECK(x.view().memory() == memory);
            auto const y = std::move(x);
            CHECK(y.read() == values);
            rejects({"nccl_tensors.cu", "tensor: elements to write"}, [&] {
                auto z = cpx::make_tensor<float>(sharding, rank, 3, memory);
                z.write(std::vector<float>(1));
            });
        }
        CHECK(resource.given == 4);
        CHECK(resource.taken == resource.given);
        auto const nothing = cpx::make_tensor<double>(cpx::shard(lengths({}), cpx::zigzag<2>{}), 0, 3, memory);
        CHECK(nothing.read().empty());
        rejects({"nccl_tensors.cu", "elements: expected less than 2^62"},
                [&] { cpx::make_tensor<float>(sharding, 0, index_t{1} << 60, memory); });
    }

    TEST_CASE("one program gives the same on host threads and between GPUs, whole numbers bit for bit") {
        if (!has_gpus(2)) return;
        group gpus(2);
        support::splitmix numbers(3);
        for (auto const& batch : {lengths({37, 0, 8, 21}), lengths({1}), lengths({300, 3})}) {
            CAPTURE(support::text(batch));
            auto const zigzag = cpx::shard(batch, cpx::zigzag<>(2));
            auto const sequential = cpx::shard(batch, cpx::sequential<>(2));
            auto const striped = cpx::shard<cpx::scope::batch>(batch, cpx::striped<>(2), cpx::aligned<4>{});
            check_program(gpus, zigzag, sequential, 4);
            check_program(gpus, sequential, striped, 2);
        }
    }

    TEST_CASE(
        "a backward of a convolution that is refused leaves all gradients as they were, whatever the order of sums") {
        if (!has_gpus(2)) return;
        group(2).run([](cpx::nccl& joined, auto const& meet) {
            cuda::stream const stream;
            meeting comm(joined, stream, [&] { meet(); });
            int const rank = comm.rank();
            index_t const width = 8, taps = 4;
            auto const of = [](cpx::thd const& batch) { return cpx::shard(batch, cpx::zigzag<>(2)); };
            auto const sharding = of(lengths({9, 14})), other = of(lengths({14, 9}));
            cpx::replicated<> const everywhere(2, cpx::thd({0, width}));
            auto const before = cpx::halo(sharding, rank, taps - 1),
                       after = cpx::halo(sharding, rank, taps - 1, cpx::side::after);
            auto const some = [&](auto const& on, index_t columns) {
                auto tensor = cpx::make_tensor<float>(on, comm, columns);
                tensor.write(numbers(on, rank, columns));
                return tensor;
            };
            auto const x = some(sharding, width), dy = some(sharding, width), narrow = some(sharding, width - 1),
                       strange = some(other, width);
            auto const weight = some(everywhere, taps), wide_weight = some(everywhere, taps + 1);
            auto dx = some(sharding, width), strange_dx = some(other, width);
            auto dweight = some(everywhere, taps), dbias = some(everywhere, 1);
            auto const held = [&] { return std::vector{dx.read(), strange_dx.read(), dweight.read(), dbias.read()}; };
            auto const first = held();
            for (auto const order : {cpx::sum_order::by_rank, cpx::sum_order::by_row}) {
                auto const run = [&](auto const& of_y, auto const& taps_of, auto& to_x, auto& to_weight) {
                    cpx::causal_conv1d_gradients to{to_x, to_weight.data(), dbias.elements()};
                    to.order = order;
                    cpx::causal_conv1d_backward(before, after, x, taps_of.data(), {}, cpx::activation::none, of_y, to,
                                                comm);
                };
                auto const refused = [&](std::string const& passage, auto const& of_y, auto const& taps_of, auto& to_x,
                                         auto& to_weight) {
                    meet();
                    rejects({"nccl_tensors.cu", "causal_conv1d_backward: " + passage},
                            [&] { run(of_y, taps_of, to_x, to_weight); });
                    meet();
                    CHECK(held() == first);
                };
                refused("sharding of dy", strange, weight, dx, dweight);
                refused("shape of dy", narrow, weight, dx, dweight);
                refused("shape of weight: expected (8, 4), the plan bringing 3 rows, got (8, 5)", dy, wide_weight, dx,
                        dweight);
                refused("sharding of dx", dy, weight, strange_dx, dweight);
                refused("overlap of dx and dy", dx, weight, dx, dweight);
                refused("shape of dweight", dy, weight, dx, dx);
            }
            meet();
            rejects({"nccl_tensors.cu", "ranks disagree on activation", "silu (rank 0), none (rank 1)"}, [&] {
                cpx::causal_conv1d(before, x, weight.data(), {},
                                   rank == 0 ? cpx::activation::silu : cpx::activation::none, dx, comm);
            });
            meet();
            CHECK(held() == first);
            comm.wait();
            meet();
        });
    }

    TEST_CASE("where all ranks have all rows a convolution's weight and bias have each row's gradient once") {
        if (!has_gpus(2)) return;
        group(2).run([](cpx::nccl& joined, auto const& meet) {
            cuda::stream const stream;
            meeting comm(joined, stream, [&] { meet(); });
            int const rank = comm.rank();
            cpx::replicated<> const sharding(2, lengths({9, 14})), everywhere(2, cpx::thd({0, 2}));
            auto const before = cpx::halo(sharding, rank, 0), after = cpx::halo(sharding, rank, 0, cpx::side::after);
            auto const ones = [&](auto const& on, index_t columns) {
                auto tensor = cpx::make_tensor<float>(on, comm, columns);
                tensor.write(std::vector<float>(tensor.elements().size(), 1));
                return tensor;
            };
            auto const x = ones(sharding, 2), dy = ones(sharding, 2), weight = ones(everywhere, 1);
            auto dx = ones(sharding, 2), dbias = ones(everywhere, 1);
            auto const summed = [&](auto const& backward) {
                dbias.write(std::vector<float>(2));
                backward();
                cpx::sum_over_ranks(dbias.elements(), comm);
                comm.wait();
                meet();
                return dbias.read();
            };
            for (auto const order : {cpx::sum_order::by_rank, cpx::sum_order::by_row})
                CHECK(summed([&] {
                          cpx::causal_conv1d_gradients to{dx, {}, dbias.elements()};
                          to.order = order;
                          cpx::causal_conv1d_backward(before, after, x, weight.data(), {}, cpx::activation::none, dy,
                                                      to, comm);
                      }) == std::vector<float>(2, 23));
            cuda::conv_exchange<float, cpx::replicated<>> by(before, after, 2, comm);
            CHECK(summed([&] {
                      cuda::causal_conv1d_backward(by, x, weight.data(), {}, cpx::activation::none, dy,
                                                   {dx, {}, dbias.elements()});
                  }) == std::vector<float>(2, 23));
        });
    }

    TEST_CASE("tensors of another stream than the communicator's are refused, and those that are of it from now on") {
        if (!has_gpus(1)) return;
        group one(1);
        one.run([](cpx::nccl& joined, auto const&) {
            cuda::stream const stream, another;
            cuda::communicator comm(joined, stream);
            auto const from = cpx::shard(lengths({6, 7}), cpx::zigzag<>(1)),
                       to = cpx::shard(lengths({6, 7}), cpx::zigzag<>(1));
            auto const x = cpx::make_tensor<float>(from, 0, 4, cuda::memory(another));
            rejects({"nccl_tensors.cu", "exchange: memory of the tensors: expected the transport's"},
                    [&] { cpx::exchange(x, to, comm); });
            auto y = cpx::make_tensor<float>(from, comm, 4);
            rejects({"nccl_tensors.cu", "causal_conv1d: memory of x"}, [&] {
                cpx::causal_conv1d(cpx::halo(from, 0, 3), x, y.data().sub(0, 4), {}, cpx::activation::none, y, comm);
            });
            rejects({"nccl_tensors.cu", "causal_conv1d_backward: memory of x: expected the communicator's"}, [&] {
                cpx::causal_conv1d_backward(
                    cpx::halo(from, 0, 3), cpx::halo(from, 0, 3, cpx::side::after), x, y.data().sub(0, 4), {},
                    cpx::activation::none, y,
                    cpx::causal_conv1d_gradients<float, std::remove_const_t<decltype(from)>, cuda::memory>{y}, comm);
            });
            comm.wait();
            comm.work_in(another);
            CHECK(cpx::exchange(x, to, comm).read() == x.read());
            rejects({"nccl_tensors.cu", "exchange: memory of the tensors: expected the transport's"},
                    [&] { cpx::exchange(y, to, comm); });
            comm.wait();
        });
    }

    TEST_CASE("movements made once move every batch that comes, without a wait, by send and receive or through memory "
              "that peers write") {
        if (!has_gpus(2)) return;
        group gpus(2);
        gpus.run([&](cpx::nccl& joined, auto const& meet) {
            {
                cuda::stream const stream;
                cuda::communicator comm(joined, stream);
                move_many(comm, "rows and sequences of the batch: expected at most 700, 12", meet);
            }
            meet();
            cuda::shared_memory memory(joined, 1 << 20);
            meet();
            cuda::stream const stream;
            cuda::shared_communicator comm(memory, stream);
            move_many(comm, "rows and sequences of the batch: expected at most 700, 12", meet);
        });
    }

    TEST_CASE("halos and carries are prepared once, too, by send and receive or through memory that peers write") {
        if (!has_gpus(2)) return;
        group gpus(2);
        gpus.run([&](cpx::nccl& joined, auto const& meet) {
            {
                cuda::stream const stream;
                cuda::communicator comm(joined, stream);
                bring_many(comm, meet);
            }
            meet();
            cuda::shared_memory memory(joined, 1 << 20);
            meet();
            if (!reach_each_other(memory)) return;
            cuda::stream const stream;
            cuda::shared_communicator comm(memory, stream);
            bring_many(comm, meet);
            meet();
        });
    }

    TEST_CASE("captured halos and carries move, when they are replayed, the batch that was set last") {
        if (!has_gpus(2)) return;
        group gpus(2);
        gpus.run([&](cpx::nccl& joined, auto const& meet) {
            int const rank = joined.rank();
            kinds const of{joined.ranks()};
            cuda::shared_memory memory(joined, 1 << 21);
            meet();
            if (!reach_each_other(memory)) return;
            cuda::stream const stream;
            cuda::shared_communicator stores(memory, stream);
            cuda::communicator sends(joined, stream);
            auto const first = of.from(lengths({50, 8}));
            meet();
            auto move = cpx::make_movement<float>(first, of.to(first.batch()), 6, {60, 3}, stores);
            meet();
            beside stored(stores, first);
            meet();
            beside sent(sends, first);
            auto x = move.make_tensor(first), dx = move.make_tensor(first), other = move.make_tensor(first);
            auto const [serial, scan] = stored.steps();
            cpx::require(sent.steps() == std::pair(serial, scan), "test", "steps", "as many", "others");
            stored.clear(), sent.clear();
            x.write(numbers(first, rank, 6));
            meet();
            stored.run(x, dx, serial, scan);
            sent.run(x, other, serial, scan);
            stores.wait();
            meet();
            cpx::require(stored.read() == sent.read() && dx.read() == other.read(), "test", "rows through the window",
                         "those that are sent", "others");
            auto const captured = [&, serial = serial, scan = scan] { stored.run(x, dx, serial, scan); };
            harness::graph const graph(stream, captured);
            rejects({"stream of the first call back of a batch: expected one that does not capture"},
                    [&] { harness::graph(stream, [&] { stored.set(of.from(lengths({60}))); }); });
            cpx::require(stored.halo_rows() == sent.halo_rows(), "test", "rows after a batch that was refused",
                         sent.halo_rows(), stored.halo_rows());
            meet();
            for (auto const& list :
                 {std::vector<index_t>{50, 8}, {8, 16}, {60}, {1, 30, 29}, {2, 0, 3}, {}, {41, 19}}) {
                auto const next = of.from(lengths(list));
                x.hold(next), dx.hold(next), other.hold(next);
                x.write(numbers(next, rank, 6));
                stored.clear(), sent.clear();
                meet();
                cpx::set_together(stores, [&] { stored.set(next); });
                graph.launch(stream);
                stores.wait();
                meet();
                sent.set(next);
                sent.run(x, other, serial, scan);
                sends.wait();
                meet();
                cpx::require(stored.read() == sent.read(), "test", "rows of a replay", "those that are sent",
                             text(list));
                cpx::require(dx.read() == other.read(), "test", "gradients of a replay", "those that are sent",
                             text(list));
                meet();
            }
        });
    }

    TEST_CASE("ranks whose halos differ are named through the window at the next wait, and the next batch moves") {
        if (!has_gpus(2)) return;
        group gpus(2);
        gpus.run([&](cpx::nccl& joined, auto const& meet) {
            int const rank = joined.rank();
            kinds const of{joined.ranks()};
            cuda::shared_memory memory(joined, 1 << 20);
            meet();
            if (!reach_each_other(memory)) return;
            cuda::stream const stream;
            cuda::shared_communicator comm(memory, stream);
            auto const one = lengths({8, 16}), other = lengths({400, 90});
            meet();
            auto halos = cpx::make_movement<float>(cpx::halo(of.from(one), rank, 3), 6, {600, 2}, comm);
            meet();
            auto const run = [&](cpx::thd const& batch) {
                auto x = cpx::make_tensor<float>(of.from(batch), comm, 6);
                x.write(numbers(of.from(batch), rank, 6));
                halos.set(of.from(batch));
                auto const count = halos.rows_of().second;
                cuda::buffer<float> rows(count * 6);
                meet();
                halos(x, cpx::rows<float>(rows.data(), count, 6));
                comm.wait();
                check_beside(halos.plan(), rows.read(), "after an error");
            };
            rejects({"nccl_tensors.cu", "plan by which rows move: expected that of this rank, got another on ranks " +
                                            std::to_string(1 - rank) + ": tokens 24 on rank 0, 490 on rank 1"},
                    [&] { run(rank == 0 ? one : other); });
            meet();
            run(other);
            meet();
        });
    }

    TEST_CASE("ranks whose batches differ are named at the next wait, and the next batch moves") {
        if (!has_gpus(2)) return;
        group gpus(2);
        gpus.run([&](cpx::nccl& joined, auto const& meet) {
            std::string const other = std::to_string(1 - joined.rank());
            {
                cuda::stream const stream;
                cuda::communicator comm(joined, stream);
                differ(comm, {{8, 16}, {16, 8}}, // as many rows go from rank to rank
                       "plan by which rows move: expected that of this rank, got another on ranks " + other, meet);
            }
            meet();
            cuda::shared_memory memory(joined, 1 << 20);
            meet();
            if (!reach_each_other(memory)) return;
            cuda::stream const stream;
            cuda::shared_communicator comm(memory, stream);
            differ(comm, {{8, 16}, {3, 7, 9}},
                   "cu_seqlens of a relayout: expected those of this rank, got others on ranks " + other, meet);
        });
    }

    TEST_CASE("a captured movement moves, when it is replayed, the batch that was set last") {
        if (!has_gpus(2)) return;
        group gpus(2);
        gpus.run([&](cpx::nccl& joined, auto const& meet) {
            int const rank = joined.rank();
            kinds const of{joined.ranks()};
            cuda::shared_memory memory(joined, 1 << 20);
            meet();
            if (!reach_each_other(memory)) return;
            cuda::stream const stream;
            cuda::shared_communicator comm(memory, stream);
            auto const first = lengths({8, 16});
            meet();
            auto move = cpx::make_movement<float>(of.from(first), of.to(first), 4, {60, 3}, comm);
            auto x = move.make_tensor(of.from(first)), z = move.make_tensor(of.from(first));
            auto y = move.make_tensor(of.to(first));
            comm.wait();
            meet();
            harness::graph const moves(stream, [&] {
                move(x, y);
                move.transposed(y, z);
            });
            for (auto const& list : {std::vector<index_t>{8, 16}, {50}, {1, 30, 29}, {}}) {
                auto const batch = lengths(list);
                x.hold(of.from(batch)), y.hold(of.to(batch)), z.hold(of.from(batch));
                x.write(numbers(of.from(batch), rank, 4));
                cpx::set_together(comm, [&] { move.set(of.from(batch), of.to(batch)); });
                moves.launch(stream);
                comm.wait();
                meet();
                cpx::require(y.read() == numbers(of.to(batch), rank, 4) && z.read() == x.read(), "test", "replay",
                             "rows of the batch", text(list));
                meet();
            }
        });
    }

    TEST_CASE("ranks whose batches differ in what is sent are named, and how, once the deadline has passed") {
        if (!has_gpus(2)) return;
        group gpus(2, std::chrono::seconds(3));
        gpus.run([&](cpx::nccl& joined, auto const& meet) {
            int const rank = joined.rank();
            kinds const of{joined.ranks()};
            cuda::stream const stream;
            cuda::communicator comm(joined, stream);
            auto const one = lengths({8, 16}), other = lengths({400, 90});
            meet();
            auto move = cpx::make_movement<float>(of.from(one), of.to(one), 4, {600, 2}, comm);
            meet();
            auto const batch = rank == 0 ? one : other;
            auto const x = cpx::make_tensor<float>(of.from(batch), comm, 4);
            auto y = cpx::make_tensor<float>(of.to(batch), comm, 4);
            rejects({"plan", ": tokens 24 on rank 0, 490 on rank 1"}, [&] {
                move(x, y);
                comm.wait();
            });
            meet();
        });
    }

    TEST_CASE("positions between GPUs are those of the whole batch, also where a graph works on another packing") {
        if (!has_gpus(2)) return;
        using support::placeholders;
        group(2).run([&](cpx::nccl& joined, auto const& meet) {
            cuda::stream const stream;
            cuda::communicator comm(joined, stream);
            auto const first = support::media_writer().text(5).image(8, 12).text(11).end().text(24).end().done();
            auto const other =
                support::media_writer().text(16).end().text(10).image(4, 8).text(7).image(8, 8).text(7).end().done();
            auto const sharding_of = [](auto const& b) { return cpx::shard(b.batch, cpx::zigzag<2>()); };
            auto const own_of = [&](auto const& b, index_t const* from) {
                std::vector<index_t> list;
                sharding_of(b).for_each_piece(comm.rank(), [&](cpx::range piece) {
                    list.insert(list.end(), from + piece.first, from + piece.last);
                });
                return list;
            };
            cuda::buffer<index_t> ids(32), offsets(3), images(6);
            auto const view = [](auto const& b) {
                return std::span<index_t const>(b.data(), static_cast<std::size_t>(b.size()));
            };
            cuda::mrope_positions<cuda::communicator> p(comm, {32, 4, 2, 2, 0});
            auto const run = [&] {
                p.set(sharding_of(first), view(offsets));
                p(view(ids), placeholders, {view(images), {}, {}});
            };
            auto const write = [&](auto const& b, std::vector<index_t> const& grids) {
                ids.write(own_of(b, b.ids.data()));
                offsets.write(b.batch.offsets());
                images.write(grids);
                meet();
            };
            auto const check = [&](auto const& b) {
                comm.wait();
                p.check();
                auto const whole = cpx::mrope_positions(b.items, b.batch, b.ids, placeholders);
                std::vector<std::int32_t> got(96);
                cuda::check(cudaMemcpy(got.data(), p.axes().data(), got.size() * 4, cudaMemcpyDeviceToHost), "read");
                for (std::size_t a = 0; a < 3; ++a) {
                    auto const expected = own_of(b, whole.axes.data() + 64 * a);
                    for (std::size_t row = 0; row < 32; ++row) CHECK(got[32 * a + row] == expected[row]);
                }
                meet();
            };
            std::vector<index_t> const of_first{0, 0, 0, 1, 8, 12}, of_other{1, 4, 8, 1, 8, 8};
            write(first, of_first);
            run();
            check(first);
            {
                harness::graph const graph(stream, run);
                meet();
                for (bool const again : {false, true}) {
                    auto const& b = again ? first : other;
                    write(b, again ? of_first : of_other);
                    graph.launch(stream);
                    check(b);
                }
            }
            meet();
        });
    }
}
