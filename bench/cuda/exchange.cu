// SPDX-License-Identifier: Apache-2.0
// Relayouts between GPUs by one kernel and by send and receive, beside NCCL's own collectives and the three steps of
// trainers. One process a GPU: `bench.cuda.exchange [RANKS [BLOCKS]]`; exit code 1 if a result is wrong.
#include <cpx/cpx.hpp>
#include <cpx/cuda/row_gather.hpp>
#include <cpx/cuda/shared_communicator.hpp>

#include "../../harness/processes.hpp"
#include "../../harness/whole.hpp"
#include "three_steps.hpp"
#include "timing.hpp"

#include <charconv>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace {

using cpx::index_t;
namespace cuda = cpx::cuda;
using element = std::uint16_t; // bf16, as far as movement is concerned

/// One way to move a tensor.
struct way {
    float ms = NAN;    ///< of the slowest rank; NaN if it was not run
    index_t bytes = 0; ///< that leave the busiest rank
    bool right = true; ///< on this rank
    double us() const { return static_cast<double>(ms) * 1e3; }
    double gb() const { return static_cast<double>(bytes) / static_cast<double>(ms) * 1e-6; }
};

struct row {
    way one_kernel, send_receive, all_to_all, gather_slice, three_steps;

    /// Returns how many times as fast as `peer` one kernel is; NaN if one of them was not run.
    double ratio(way const& peer) const { return static_cast<double>(peer.ms) / static_cast<double>(one_kernel.ms); }
};

class rank_bench {
public:
    rank_bench(cpx::nccl& comm, cuda::shared_memory& memory) : comm_(comm), memory_(memory) {}

    /// Times all ways from one sharding to another and prints a line of them. `gathers`: to gather all is one of them.
    template <class From, class To>
    row run(std::string const& name, From const& from, To const& to, std::vector<cpx::section> const& sections,
            bool gathers) {
        int const rank = comm_.rank(), ranks = comm_.ranks();
        index_t width = 0;
        for (cpx::section const& s : sections) width += s.heads * s.width;
        auto const plan = cpx::relayout(from, to, rank);
        index_t const in = std::ssize(whole::columns(from, rank, sections)),
                      out = std::ssize(whole::columns(to, rank, sections));
        index_t most = 0, sent = 0; // rows of a rank; bytes to others
        for (int r = 0; r < ranks; ++r) most = std::max(most, from.rows(r));
        for (cpx::message const& m : plan.sends)
            if (m.peer != rank) sent += cpx::total(m.rows) * (m.columns.empty() ? width : cpx::total(m.columns)) * 2;
        sent = std::ranges::max(everyones(sent));

        auto source = whole::take<element>(from, rank, sections);
        auto const target = whole::take<element>(to, rank, sections);
        source.resize(static_cast<std::size_t>(most * in)); // NCCL gathers equally many rows of every rank
        cuda::buffer<element> const x{std::span<element const>(source)}, y(std::ssize(target));
        cpx::rows<element const> const from_rows(x.data(), from.rows(rank), in);
        cpx::rows<element> const to_rows(y.data(), to.rows(rank), out);

        row ways;
        if (memory_.one_kernel()) {
            cuda::shared_communicator comm(memory_, stream_);
            cpx::capacity largest{0, from.batch().sequences()};
            for (int r = 0; r < ranks; ++r) largest.rows = std::max({largest.rows, from.rows(r), to.rows(r)});
            auto push = cpx::make_movement<element>(from, to, width, largest, comm);
            auto shared = push.make_tensor(to);
            cpx::sharded const given(from_rows, from, rank, comm.memory());
            ways.one_kernel = time(sent, shared.data().data(), target, [&] { push(given, shared); });
        }
        cuda::exchange<element> move(plan, width, comm_);
        ways.send_receive = time(sent, y.data(), target, [&] { move(from_rows, to_rows, stream_); });

        // a shard in equal shares, of whole 16 bytes as NCCL likes them
        index_t const share = from.batch().tokens() * width / ranks / ranks / 8 * 8;
        cuda::buffer<element> const a(share * ranks), b(share * ranks);
        ways.all_to_all = time(share * 2 * (ranks - 1), nullptr, {}, [&] {
            comm_.call("ncclAlltoAll", [&] {
                return ncclAlltoAll(a.data(), b.data(), static_cast<std::size_t>(share), ncclBfloat16, comm_.get(),
                                    stream_);
            });
        });
        if (gathers) { // every rank gathers everything and slices its rows out, as trainers do
            auto const places = gathered_places(from, to, most);
            cuda::buffer<std::int32_t> const list{std::span<std::int32_t const>(places)};
            cuda::buffer<element> const all(most * ranks * width);
            ways.gather_slice = time(most * width * 2 * (ranks - 1), y.data(), target, [&] {
                comm_.call("ncclAllGather", [&] {
                    return ncclAllGather(x.data(), all.data(), static_cast<std::size_t>(most * width), ncclBfloat16,
                                         comm_.get(), stream_);
                });
                cuda::gather_rows(cpx::rows<element const>(all.data(), most * ranks, width),
                                  std::span<std::int32_t const>(list.data(), places.size()), to_rows, stream_);
            });
        }
        if constexpr (From::every_row != To::every_row)
            if (three_steps::possible(heads_of(from, to))) {
                three_steps::relayout<element, From, To> const steps(from, to, comm_);
                ways.three_steps = time(sent, y.data(), target, [&] { steps(from_rows, to_rows, stream_); });
            }
        print(name, ways);
        printed_.emplace_back(name, ways);
        return ways;
    }

    /// Prints for all relayouts how one kernel compares.
    void print_ratios() const {
        if (comm_.rank() != 0) return;
        std::printf("\n%-54s %14s %14s %14s %14s\n", "one kernel, so many times as fast as", "send/receive",
                    "all to all", "gather, slice", "three steps");
        for (auto const& [name, ways] : printed_) {
            std::printf("%-54s", name.c_str());
            for (way const& peer : {ways.send_receive, ways.all_to_all, ways.gather_slice, ways.three_steps})
                if (double const ratio = ways.ratio(peer); std::isnan(ratio))
                    std::printf(" %14s", "-");
                else
                    std::printf(" %14.2f", ratio);
            std::printf("\n");
        }
    }

    cudaStream_t stream() const { return stream_; }
    bool all_right() const { return all_right_; }

private:
    /// Returns every rank's `mine`, when all ranks have come.
    template <class T>
    std::vector<T> everyones(T mine) {
        std::vector<T> all(static_cast<std::size_t>(comm_.ranks()));
        comm_.gather(&mine, all.data(), sizeof mine);
        return all;
    }

    /// Times `f`; then, unless there is no target, poisons it, runs `f` once more and compares what came.
    template <class F>
    way time(index_t bytes, element* target, std::vector<element> const& expected, F&& f) {
        way w;
        w.bytes = bytes;
        w.ms = std::ranges::max(everyones(timing::median_ms(stream_, f, [&] { everyones('\0'); })));
        if (!target) return w;
        std::size_t const size = expected.size() * sizeof(element);
        cuda::check(cudaMemset(target, 0xff, size), "cudaMemset");
        cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        everyones('\0'); // no rank stores into a target that is yet to be poisoned
        f();
        memory_.wait(stream_);
        std::vector<element> got(expected.size());
        cuda::check(cudaMemcpy(got.data(), target, size, cudaMemcpyDeviceToHost), "cudaMemcpy");
        w.right = got == expected;
        return w;
    }

    /// Returns which rows of all ranks' rows of `from`, which lie `most` rows apart, are this rank's rows of `to`.
    template <class From, class To>
    std::vector<std::int32_t> gathered_places(From const& from, To const& to, index_t most) const {
        std::vector<std::int32_t> place(static_cast<std::size_t>(from.batch().tokens())), mine;
        for (int r = 0; r < comm_.ranks(); ++r)
            from.for_each_piece(r, [&, at = r * most](cpx::range piece) mutable {
                for (index_t g = piece.first; g < piece.last; ++g)
                    place[static_cast<std::size_t>(g)] = static_cast<std::int32_t>(at++);
            });
        to.for_each_piece(comm_.rank(), [&](cpx::range piece) {
            mine.insert(mine.end(), place.begin() + piece.first, place.begin() + piece.last);
        });
        return mine;
    }

    /// Returns the one of two shardings that is of heads.
    template <class From, class To>
    static auto const& heads_of(From const& from, To const& to) {
        if constexpr (To::every_row)
            return to;
        else
            return from;
    }

    void print(std::string const& name, row const& ways) {
        std::string wrong, cells;
        auto const add = [&](char const* what, way const& w) {
            auto const oks = everyones(char(w.right));
            if (std::ranges::find(oks, 0) != oks.end()) wrong += std::string(wrong.empty() ? "WRONG: " : "; ") + what;
            char cell[64];
            if (std::isnan(w.ms))
                std::snprintf(cell, sizeof cell, " %13s %5s", "-", "-");
            else
                std::snprintf(cell, sizeof cell, " %13.1f %5.0f", w.us(), w.gb());
            cells += cell;
        };
        add("one kernel", ways.one_kernel);
        add("send/receive", ways.send_receive);
        add("all to all", ways.all_to_all);
        add("gather, slice", ways.gather_slice);
        add("three steps", ways.three_steps);
        all_right_ = all_right_ && wrong.empty();
        if (comm_.rank() != 0) return;
        std::printf("%-54s%s  %s\n", name.c_str(), cells.c_str(), wrong.empty() ? "correct" : wrong.c_str());
        std::fflush(stdout);
    }

    cpx::nccl& comm_;
    cuda::shared_memory& memory_;
    cuda::stream stream_;
    std::vector<std::pair<std::string, row>> printed_;
    bool all_right_ = true;
};

std::string run(int rank, int blocks) {
    auto const comm = cpx::nccl::from_environment();
    int const ranks = comm->ranks();
    // the largest target, half of 32768 x 12352 on two ranks, takes 386 MiB
    cuda::shared_memory memory(*comm, index_t{420} << 20, cpx::kernels::most_ranks, blocks);
    rank_bench bench(*comm, memory);
    if (rank == 0) {
        int version = 0;
        static_cast<void>(ncclGetVersion(&version));
        std::printf("%d x %s, device copy %.2f TB/s, NCCL %d.%d.%d; bf16; us of the slowest rank, GB/s that leave the "
                    "busiest, -: not run\n",
                    ranks, timing::device_name().c_str(), timing::copy_bandwidth(bench.stream()) * 1e-12,
                    version / 10000, version / 100 % 100, version % 100);
        if (!memory.one_kernel()) std::printf("no one kernel: the GPUs do not all reach each other's memory\n");
        std::printf("%-54s %13s %5s %13s %5s %13s %5s %13s %5s %13s %5s  result\n", "relayout", "one kernel", "GB/s",
                    "send/receive", "GB/s", "all to all", "GB/s", "gather, slice", "GB/s", "three steps", "GB/s");
    }
    timing::limits limits; // of 4 ranks
    for (auto const& [what, tokens, sequences, most_kernel, most_send] :
         {std::tuple("131072 x 2048, 8 sequences", 131072, 8, 360, 600),
          std::tuple("131072 x 2048, 1 sequence", 131072, 1, 0, 0),
          std::tuple("32768 x 2048, 8 sequences", 32768, 8, 110, 0),
          std::tuple("1 MiB a rank, 8 sequences", 256 * ranks, 8, 25, 0)}) {
        index_t const mean = tokens / sequences, apart = sequences > 1 && mean >= 100 ? 37 : 0;
        std::vector<index_t> lengths;
        for (int s = 0; s < sequences; ++s) lengths.push_back(mean + (s % 2 ? apart : -apart));
        auto const batch = cpx::thd::from_lengths(lengths);
        std::string const name = std::string("zigzag -> sequential:batch, ") + what;
        auto const ways = bench.run(name, cpx::shard(batch, cpx::zigzag<>(ranks)),
                                    cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(ranks)), {{1, 2048}}, true);
        if (ranks == 4 && most_kernel) limits.at_most(name + ": one kernel", ways.one_kernel.us(), most_kernel, "us");
        if (ranks == 4 && most_send) limits.at_most(name + ": send/receive", ways.send_receive.us(), most_send, "us");
    }
    auto const batch = cpx::thd::from_lengths(std::vector<index_t>{12000, 9000, 11768});
    std::vector<cpx::section> const sections{{16, 128}, {16, 128}, {32, 128}, {32, 128}, {32, 1}, {32, 1}};
    cpx::head_sharded<> const heads(ranks, batch, sections);
    auto const zigzag = cpx::shard(batch, cpx::zigzag<>(ranks));
    std::string const name = "zigzag -> heads, q k v z b a, 32768 x 12352";
    auto const ways = bench.run(name, zigzag, heads, sections, false);
    if (ranks == 4)
        limits.at_least(name + ": one kernel; limit: all to all", ways.one_kernel.gb(), ways.all_to_all.gb(), "GB/s");
    std::vector<cpx::section> const o{{32, 128}};
    bench.run("heads -> zigzag, o, 32768 x 4096", cpx::head_sharded<>(ranks, batch, o), zigzag, o, false);
    auto const compare = [&]<int W>(std::integral_constant<int, W>) { // ranks in the type beside ranks as a value
        auto const run = [&](char const* kind, auto zigzag_layout, auto sequential_layout) {
            bench.run(std::string("zigzag -> sequential, 32768 x 2048, ") + kind, cpx::shard(batch, zigzag_layout),
                      cpx::shard(batch, sequential_layout), {{1, 2048}}, false);
        };
        run("static", cpx::zigzag<W>(), cpx::sequential<W>());
        run("dynamic", cpx::zigzag<>(W), cpx::sequential<>(W));
    };
    if (ranks == 2) compare(std::integral_constant<int, 2>());
    if (ranks == 4) compare(std::integral_constant<int, 4>());
    bench.print_ratios();
    if (rank == 0) limits.print();
    return rank != 0 || bench.all_right() ? "" : "results are wrong";
}

/// Returns the whole number, at least `lowest`, that is all of `text`.
std::optional<int> number(std::string_view text, int lowest) {
    int value = 0;
    auto const [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
    bool const all = fault == std::errc() && end == text.data() + text.size();
    return all && value >= lowest ? std::optional(value) : std::nullopt;
}

} // namespace

int main(int argc, char** argv) try {
    int const gpus = processes::gpus();
    auto const ranks = argc > 1 ? number(argv[1], 2) : std::max(gpus, 2);
    auto const blocks = argc > 2 ? number(argv[2], 1) : 0;
    if (!ranks || !blocks || argc > 3) {
        std::fprintf(stderr,
                     "usage: bench.cuda.exchange [RANKS [BLOCKS]]\n"
                     "  RANKS   processes, each with a GPU, at least 2; all GPUs if not given\n"
                     "  BLOCKS  of the one kernel, 1 to the multiprocessors of a GPU; up to 128 if not given\n");
        return 2;
    }
    if (gpus < *ranks) {
        std::printf("cpx: skipped, %d GPUs wanted, %d found\n", *ranks, gpus);
        return 0;
    }
    for (int const code : processes::run(*ranks, [&](int rank) { return run(rank, *blocks); }))
        if (code != 0) return 1;
    return 0;
} catch (std::exception const& error) {
    std::fprintf(stderr, "bench.cuda.exchange: %s\n", error.what());
    return 1;
}
