// SPDX-License-Identifier: Apache-2.0
// What a new packing costs the host: a relayout there and back, a halo and a carry, while the device is busy; a
// thousand of them in turn. What one costs to heads and back, and under shardings of which the host lists plans. What
// one costs the operators that python/bench/overhead_cuda.py calls, with their plans.
// One process a GPU: `bench.cuda.new_packing`.
#include <cpx/cpx.hpp>
#include <cpx/cuda/shared_communicator.hpp>
#include <cpx/ops/cuda/conv_exchange.hpp>
#include <cpx/ops/cuda/gated_delta_rule.hpp>

#include "../../harness/processes.hpp"
#include "random.hpp"
#include "spin.hpp"
#include "timing.hpp"

#include <chrono>
#include <fstream>
#include <optional>
#include <vector>

namespace {

using cpx::index_t;
using clock = std::chrono::steady_clock;
namespace cuda = cpx::cuda;

/// Counts the vectors in which two lists differ.
__global__ void differences(uint4 const* a, uint4 const* b, index_t count, int* found) {
    for (index_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        if (a[i].x != b[i].x || a[i].y != b[i].y || a[i].z != b[i].z || a[i].w != b[i].w) atomicAdd(found, 1);
}

double median(std::vector<double>& times) {
    std::ranges::sort(times);
    return times[times.size() / 2];
}

/// The bytes that this process and its device hold.
struct held {
    index_t device = 0, host = 0;
    static held now() {
        std::size_t unused = 0, all = 0;
        cuda::check(cudaMemGetInfo(&unused, &all), "cudaMemGetInfo");
        index_t pages = 0, resident = 0;
        std::ifstream("/proc/self/statm") >> pages >> resident;
        return {static_cast<index_t>(all - unused), resident * 4096};
    }
};

using element = std::uint16_t; // bf16, as far as movement is concerned
constexpr index_t tokens = 32768, sequences = 64, width = 2048, state = 16384, busy_rounds = 240;

/// Returns packing i: every one another, as many tokens in as many sequences.
cpx::thd packing(index_t i) {
    std::vector<index_t> lengths(static_cast<std::size_t>(sequences), tokens / sequences);
    lengths.front() += 100, lengths.back() -= 100; // the middle of the batch is not the end of a sequence
    auto const s = static_cast<std::size_t>(i / 500);
    lengths[s] += i % 500, lengths[s + 1] -= i % 500;
    return cpx::thd::from_lengths(lengths);
}

/// Moves packings to heads and back, and prints what new ones cost the host.
std::string heads_on(cuda::communicator& comm, timing::limits& limits) {
    std::vector<cpx::section> const sections{{16, 128}, {16, 128}, {32, 128}, {32, 128}, {32, 1}, {32, 1}};
    auto const zigzag = [&](cpx::thd const& batch) { return cpx::shard(batch, cpx::zigzag<>(comm.ranks())); };
    auto const heads = [&](cpx::thd const& batch) { return cpx::head_sharded<>(comm.ranks(), batch, sections); };
    auto const first = packing(0);
    index_t columns = 0;
    for (cpx::section const& s : sections) columns += s.heads * s.width;
    auto move = cpx::make_movement<element>(zigzag(first), heads(first), columns, {tokens, sequences}, comm);
    index_t const share = move.plan().target_width, most_rows = tokens / comm.ranks() + 8 * sequences;
    std::vector<element> values(static_cast<std::size_t>(most_rows * columns));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<element>(i * 40503 >> 3);
    cuda::buffer<element> const from{std::span<element const>(values)}, back(std::ssize(values)), there(tokens * share);
    cuda::buffer<int> wrong{std::span<int const>(std::vector<int>(1))};
    std::vector<double> known, fresh;
    for (index_t round = 0; round < busy_rounds; ++round) {
        auto const batch = packing(round);
        std::optional<decltype(zigzag(batch))> a;
        std::optional<decltype(heads(batch))> b;
        for (auto* const took : {&fresh, &known}) {
            timing::spin<<<1, 1, 0, comm.stream()>>>(10'000'000);
            auto const begin = clock::now();
            if (took == &fresh) a.emplace(zigzag(batch)), b.emplace(heads(batch));
            index_t const own = a->rows(comm.rank());
            cpx::sharded const x(cpx::rows<element const>(from.data(), own, columns), *a, comm.rank(), comm.memory());
            cpx::sharded const z(cpx::rows<element>(back.data(), own, columns), *a, comm.rank(), comm.memory());
            cpx::sharded const y(cpx::rows<element>(there.data(), tokens, share), *b, comm.rank(), comm.memory());
            move(x, y);
            move.transposed(y, z);
            double const us = std::chrono::duration<double>(clock::now() - begin).count() * 1e6;
            if (round >= 40) took->push_back(us);
            differences<<<64, 256, 0, comm.stream()>>>(
                reinterpret_cast<uint4 const*>(from.data()), reinterpret_cast<uint4 const*>(back.data()),
                own * columns * static_cast<index_t>(sizeof(element)) / 16, wrong.data());
            comm.wait();
        }
    }
    if (wrong.read()[0]) return "rows that went to heads and back are others";
    if (comm.rank() == 0) {
        double const before = median(known), after = median(fresh);
        std::printf("%-28s known %6.1f us, new %6.1f us: %5.1f more\n", "to heads and back, q k v z b a", before, after,
                    after - before);
        limits.at_most("a new packing to heads and back, by send and receive", after - before, 60, "us");
    }
    return "";
}

/// Moves packings from `zigzag(batch)` to `sequential(batch)` and back, with halos and carries of the latter, and
/// prints what new ones cost the host.
template <class Comm, class From, class To>
std::string run_on(Comm& comm, char const* how, timing::limits& limits, From const& zigzag, To const& sequential,
                   index_t rounds = busy_rounds) {
    int const rank = comm.rank(), ranks = comm.ranks();
    auto const first = packing(0);
    cpx::capacity const most{tokens / ranks + 128 * sequences, sequences};
    auto move = cpx::make_movement<element>(zigzag(first), sequential(first), width, most, comm);
    auto halos = cpx::make_movement<element>(cpx::halo(sequential(first), rank, 3), width, most, comm);
    auto carries =
        cpx::make_movement<element>(cpx::carry<cpx::serial>(sequential(first), rank), {state, 0}, most, comm);
    index_t const steps = carries.plan().steps; // the same of all packings here
    auto x = move.make_tensor(zigzag(first)), z = move.make_tensor(zigzag(first));
    auto y = move.make_tensor(sequential(first));
    std::vector<element> values(static_cast<std::size_t>(most.rows * width));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<element>(i * 40503 >> 3);
    cuda::check(cudaMemcpy(x.data().data(), values.data(), x.elements().size_bytes(), cudaMemcpyHostToDevice),
                "cudaMemcpy");
    cuda::buffer<element> const beside(4 * sequences * width), given(sequences * state), got(sequences * state);
    cuda::buffer<int> wrong{std::span<int const>(std::vector<int>(1))};

    enum { shardings, relayouts, with_halo, with_carry, tables, calls, all, times };
    std::vector<double> known[times], fresh[times];
    held before;
    for (index_t round = 0; round < rounds; ++round) {
        auto const batch = packing(round);
        std::optional<std::invoke_result_t<From const&, cpx::thd const&>> from;
        std::optional<std::invoke_result_t<To const&, cpx::thd const&>> to;
        if (round == 40) before = held::now();
        for (auto* const took : {fresh, known}) {
            if (round < busy_rounds)
                timing::spin<<<1, 1, 0, comm.stream()>>>(10'000'000); // of which the host sees nothing
            auto const begin = clock::now();                          // after its thd ...
            auto last = begin;
            auto const lap = [&](int what) {
                auto const now = clock::now();
                if (round >= 40 && round < busy_rounds)
                    took[what].push_back(std::chrono::duration<double>(now - last).count() * 1e6);
                last = now;
            };
            if (took == fresh) {
                from.emplace(zigzag(batch)), to.emplace(sequential(batch));
                x.hold(*from), y.hold(*to), z.hold(*from);
            }
            lap(shardings);
            cpx::set_together(comm, [&] {
                move.set(*from, *to);
                lap(relayouts);
                halos.set(*to);
                lap(with_halo);
                carries.set(*to);
                lap(with_carry);
            });
            lap(tables);
            move(x, y);
            move.transposed(y, z);
            halos(y, cpx::rows<element>(beside.data(), halos.rows_of().second, width));
            for (index_t level = 0; level < steps; ++level) {
                auto const [taken, brought] = carries.rows_of(level);
                carries(level, cpx::side::before, {given.data(), taken, state}, {got.data(), brought, state});
            }
            lap(calls);
            last = begin;
            lap(all);
            index_t const count = std::ssize(x.elements()) * static_cast<index_t>(sizeof(element)) / 16;
            differences<<<64, 256, 0, comm.stream()>>>(reinterpret_cast<uint4 const*>(x.elements().data()),
                                                       reinterpret_cast<uint4 const*>(z.elements().data()), count,
                                                       wrong.data());
            comm.wait();
        }
    }
    held const after = held::now();
    if (wrong.read()[0]) return "rows that went there and back are others";
    // what a device gives at once; of 1000 packings, each of which may keep 2 KiB there and 10 on the host
    if (index_t const d = after.device - before.device, h = after.host - before.host; d > 2 << 20 || h > 10'000'000)
        return "memory has grown by " + std::to_string(d) + " bytes on the device and " + std::to_string(h) +
               " on the host";
    if (rank == 0) {
        auto const more = [&](int what) { return median(fresh[what]) - median(known[what]); };
        std::printf("%-28s known %6.1f us, new %6.1f us: %5.1f more, of which shardings %.1f, relayouts %.1f, halo "
                    "%.1f, carry %.1f, their tables %.1f, calls %.1f\n",
                    how, median(known[all]), median(fresh[all]), more(all), more(shardings), more(relayouts),
                    more(with_halo), more(with_carry), more(tables), more(calls));
        limits.at_most(std::string("a new packing, ") + how, more(all), 60, "us");
    }
    return "";
}

/// Runs a relayout, a convolution and a delta rule on `sequential(batch)` and a relayout back, and prints what new
/// packings cost the host.
template <class From, class To>
std::string operators_on(cuda::shared_communicator& comm, From const& zigzag, To const& sequential) {
    using real = __nv_bfloat16;
    using S = std::invoke_result_t<To const&, cpx::thd const&>;
    int const rank = comm.rank();
    auto const first = packing(0);
    auto const there = sequential(first);
    cpx::capacity const most{tokens / comm.ranks() + 128 * sequences, sequences};
    cpx::delta_rule_heads const heads{16, 32, 128, 128};
    index_t const keys = 16 * 128, values = 32 * 128;
    auto move = cpx::make_movement<real>(zigzag(first), there, width, most, comm);
    cuda::conv_exchange<real, S> convolution(cpx::halo(there, rank, 3), cpx::halo(there, rank, 3, cpx::side::after),
                                             width, comm, {.most = most});
    cuda::state_exchange states(comm, most, comm.through());
    auto x = move.make_tensor(zigzag(first)), z = move.make_tensor(zigzag(first));
    auto y = move.make_tensor(there);
    auto const weight = timing::random<real>(width * 4, 1, -0.5f, 0.5f);
    auto const q = timing::random<real>(most.rows * keys, 2, -0.15f, 0.15f),
               k = timing::random<real>(most.rows * keys, 3, -0.15f, 0.15f),
               v = timing::random<real>(most.rows * values, 4, -1, 1);
    auto const g = timing::random<float>(most.rows * 32, 5, -1, 0),
               beta = timing::random<float>(most.rows * 32, 6, 0, 1);
    cuda::buffer<real> const convolved(most.rows * width), o(most.rows * values);

    enum { there_of, convolutions, carries, delta_rules, back_of, all, times };
    std::vector<double> known[times], fresh[times];
    for (index_t round = 0; round < busy_rounds; ++round) {
        auto const batch = packing(round);
        auto const from = zigzag(batch);
        auto const to = sequential(batch);
        x.hold(from), y.hold(to), z.hold(from);
        index_t const own = to.rows(rank);
        auto const on = [&]<class T>(cuda::buffer<T> const& b, index_t columns) {
            return cpx::sharded(cpx::rows<T>(b.data(), own, columns), to, rank, comm.memory());
        };
        std::optional<cpx::carry_plan<cpx::serial, S>> carry;
        for (auto* const took : {fresh, known}) {
            timing::spin<<<1, 1, 0, comm.stream()>>>(10'000'000);
            auto const begin = clock::now();
            auto last = begin;
            auto const lap = [&](int what) {
                auto const now = clock::now();
                if (round >= 40) took[what].push_back(std::chrono::duration<double>(now - last).count() * 1e6);
                last = now;
            };
            move(x, y);
            lap(there_of);
            auto const out = on(convolved, width);
            cuda::causal_conv1d(convolution, y, cpx::rows<real const>(weight.data(), width, 4), {},
                                cpx::activation::silu, out);
            lap(convolutions);
            if (!carry) carry = cpx::carry<cpx::serial>(to, rank);
            lap(carries);
            cpx::gated_delta_rule(*carry,
                                  cpx::delta_rule_tensors<real, S, cuda::memory>{
                                      on(q, keys), on(k, keys), on(v, values), on(g, 32), on(beta, 32), on(o, values)},
                                  heads, cpx::delta_rule_options(), states);
            lap(delta_rules);
            move.transposed(y, z);
            lap(back_of);
            last = begin;
            lap(all);
            comm.wait();
        }
    }
    if (rank == 0) {
        std::printf("operators, window:");
        constexpr char const* names[] = {"relayout",         "causal_conv1d", "carry",
                                         "gated_delta_rule", "relayout back", "all"};
        for (int what = 0; what < times; ++what) {
            double const before = median(known[what]), after = median(fresh[what]);
            std::printf(" %s known %.1f us, new %.1f us: %.1f more%s", names[what], before, after, after - before,
                        what < all ? ";" : "\n");
        }
    }
    return "";
}

std::string run(int rank) {
    auto const joined = cpx::nccl::from_environment(std::chrono::seconds(60));
    cuda::stream const stream;
    timing::limits limits;
    if (rank == 0)
        std::printf("%s, %d ranks, %ld tokens in %ld sequences x %ld bf16: zigzag to sequential and back, halo of 3 "
                    "rows, carry of %ld states, the device busy for 10 ms; host time of all, medians of %ld\n",
                    timing::device_name().c_str(), joined->ranks(), long(tokens), long(sequences), long(width),
                    long(sequences), long(busy_rounds - 40));
    cuda::communicator sends(*joined, stream);
    auto const of = [&](auto layout, auto cut) {
        return [=](cpx::thd const& batch) { return cpx::shard(batch, layout, cut); };
    };
    auto const over_batch = [&](auto layout, auto cut) {
        return [=](cpx::thd const& batch) { return cpx::shard<cpx::scope::batch>(batch, layout, cut); };
    };
    cpx::zigzag<> const zigzag(joined->ranks());
    cpx::sequential<> const sequential(joined->ranks());
    cpx::balanced const balanced;
    cpx::aligned<64> const aligned;
    auto const by_length = [](index_t n) { return n % 4 == 0; };
    auto const from = of(zigzag, balanced);
    auto const to = of(sequential, balanced);
    auto problem = run_on(sends, "by send and receive", limits, from, to, 1000);
    if (problem.empty()) problem = heads_on(sends, limits);
    auto const listed = [&](char const* what, auto const& x, auto const& y) {
        if (problem.empty()) problem = run_on(sends, what, limits, x, y);
    };
    listed("each sequence, aligned", of(zigzag, aligned), of(sequential, aligned));
    listed("the batch", over_batch(zigzag, balanced), over_batch(sequential, balanced));
    listed("the batch, aligned", over_batch(zigzag, aligned), over_batch(sequential, aligned));
    listed("each sequence to the batch", from, over_batch(sequential, balanced));
    listed("by_length to each sequence", of(cpx::by_length{zigzag, sequential, by_length}, balanced), to);
    listed("each sequence to by_length", to, of(cpx::by_length{zigzag, sequential, by_length}, balanced));
    cuda::shared_memory memory(*joined, index_t{1} << 30); // results of relayouts, and messages of halos and carries
    cuda::shared_communicator shares(memory, stream);
    if (problem.empty()) problem = run_on(shares, "through the window", limits, from, to, 1000);
    if (problem.empty()) problem = operators_on(shares, from, to);
    if (rank == 0) limits.print();
    return problem;
}

} // namespace

int main() try {
    int const gpus = processes::gpus();
    if (gpus < 2) {
        std::printf("cpx: skipped, 2 GPUs wanted, %d found\n", gpus);
        return 0;
    }
    for (int const code : processes::run(gpus, run))
        if (code != 0) return 1;
    return 0;
} catch (std::exception const& error) {
    std::fprintf(stderr, "bench.cuda.new_packing: %s\n", error.what());
    return 1;
}
