// SPDX-License-Identifier: Apache-2.0
// Faults between GPUs: each is a named error on every rank, within its deadline.
#include "../../harness/graph.hpp"
#include "member.hpp"

namespace {

using cpx::index_t;
using namespace std::chrono_literals;

/// Expects an error that names one rank as missing and no other, within some seconds.
template <class F>
std::string expect_missing(int rank, double seconds, F&& f) {
    auto const begin = std::chrono::steady_clock::now();
    std::string got = "no error";
    try {
        f();
    } catch (cpx::error const& e) {
        got = e.got().ends_with("nothing from ranks " + std::to_string(rank)) ? "" : e.what();
    }
    double const took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (got.empty() && took > seconds) got = "the error came after " + std::to_string(took) + " s";
    std::fflush(nullptr);
    if (!got.empty()) std::fprintf(stderr, "expected that rank %d is missing, got: %s\n", rank, got.c_str());
    return got;
}

/// Expects an error whose message holds all passages, within some seconds.
template <class F>
std::string expect_error(std::vector<std::string> const& passages, double seconds, F&& f) {
    auto const begin = std::chrono::steady_clock::now();
    std::string message = "nothing";
    try {
        f();
    } catch (cpx::error const& e) {
        message = e.what();
    }
    double const took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    for (auto const& passage : passages)
        if (message.find(passage) == std::string::npos)
            return "expected an error with \"" + passage + "\", got: " + message;
    return took > seconds ? "the error came after " + std::to_string(took) + " s" : "";
}

std::string other_offsets(int rank, bool by_kernel) {
    member me;
    auto const batch = cpx::thd::from_lengths(rank == 1 ? std::vector<index_t>{10, 21} : std::vector<index_t>{11, 20});
    auto const from = cpx::shard(batch, cpx::zigzag<>(me.comm->ranks()));
    auto const to = cpx::shard(batch, cpx::sequential<>(me.comm->ranks()));
    cpx::cuda::shared_communicator comm(*me.window, me.stream);
    return expect_error(
        {"nccl_faults.cu",
         "ranks disagree on offset 1 of cu_seqlens: expected one value on all ranks, got 11 (rank 0), 10 (rank 1)"},
        30, [&] {
            if (by_kernel)
                cpx::make_movement<float>(from, to, 4, {16, 2}, comm);
            else
                cpx::cuda::exchange<float>(cpx::relayout(from, to, rank), 4, *me.comm);
        });
}

using zigzag_rows = cpx::sharding<cpx::zigzag<>>;
using sequential_rows = cpx::sharding<cpx::sequential<>, cpx::scope::batch>;

/// A small relayout into shared memory.
struct small_move {
    cpx::thd batch = cpx::thd::from_lengths(std::vector<index_t>{11, 20});
    zigzag_rows from;
    sequential_rows to;
    cpx::cuda::shared_memory memory;
    cpx::cuda::shared_communicator comm;
    cpx::movement<float, cpx::relayout_plan<zigzag_rows, sequential_rows>, cpx::cuda::shared_communicator> move;
    cpx::tensor<float, zigzag_rows, cpx::cuda::memory> x;
    cpx::tensor<float, sequential_rows, cpx::cuda::memory> y;

    small_move(member& me, int most)
        : from(batch, cpx::zigzag<>(me.comm->ranks())), to(batch, cpx::sequential<>(me.comm->ranks())),
          memory(*me.comm, 1 << 13, most), comm(memory, me.stream),
          move(cpx::relayout(from, to, me.comm->rank()), 16, {16, 2}, comm), x(cpx::make_tensor<float>(from, comm, 16)),
          y(move.make_tensor(to)) {}
    void run(int calls = 1) {
        for (int i = 0; i < calls; ++i) move(x, y);
        comm.wait();
    }
};

/// A target that is elsewhere on one rank gets its rows there.
std::string other_places(int rank) {
    member me;
    small_move small(me, 8);
    std::vector<float> const ones(small.x.elements().size(), 1.0f);
    small.x.write(ones);
    std::optional<decltype(small.move.make_tensor(small.to))> before;
    if (rank == 1) before.emplace(small.move.make_tensor(small.to));
    auto& target = before ? *before : small.y;
    small.move(small.x, target);
    small.comm.wait();
    if (target.read() != std::vector<float>(target.elements().size(), 1.0f)) me.problem = "other rows have come";
    if (before)
        for (float const value : small.y.read())
            if (value != 0) me.problem = "something else was written";
    small.run();
    if (small.y.read() != std::vector<float>(small.y.elements().size(), 1.0f))
        me.problem = "the next call moved something else";
    auto elsewhere = cpx::make_tensor<float>(small.to, small.comm, 16);
    if (me.problem.empty())
        me.problem =
            expect_error({"target: expected a tensor in this memory"}, 5, [&] { small.move(small.x, elsewhere); });
    return me.problem;
}

/// Arguments of the kernel are refused as those of a message are.
std::string bad_arguments(int) {
    member me;
    small_move small(me, 8);
    std::vector<float> host(16 * 16);
    index_t const rows = small.from.rows(me.comm->rank());
    auto const rejects = [&](std::string const& passage, float* x, index_t width) {
        cpx::sharded const from(cpx::rows<float>(x, rows, width), small.from, me.comm->rank(), small.comm.memory());
        if (me.problem.empty()) me.problem = expect_error({passage}, 5, [&] { small.move(from, small.y); });
    };
    rejects("source: expected memory of the current device", host.data(), 16);
    rejects("width of the rows", small.x.data().data(), 15);
    int const other = (me.comm->device() + 1) % cpx::cuda::devices();
    if (other != me.comm->device()) { // else the ranks share a GPU
        cpx::cuda::use_device(other);
        rejects("current device", small.x.data().data(), 16);
        cpx::cuda::buffer<float> elsewhere(16 * 16);
        cpx::cuda::use_device(me.comm->device());
        rejects("source: expected memory of the current device", elsewhere.data(), 16);
    }
    small.run(); // and the memory still works
    return me.problem;
}

std::string bad_buffers(int rank) {
    member me;
    auto const batch = cpx::thd::from_lengths(std::vector<index_t>{11, 20});
    auto const plan = cpx::relayout(cpx::shard(batch, cpx::zigzag<>(me.comm->ranks())),
                                    cpx::shard(batch, cpx::sequential<>(me.comm->ranks())), rank);
    cpx::cuda::exchange<float> move(plan, 4, *me.comm);
    cpx::cuda::buffer<float> memory(1000);
    std::vector<float> host(1000);
    cpx::rows<float> const from(memory.data(), plan.source_rows, 4), to(memory.data() + 500, plan.target_rows, 4);
    auto const rejects = [&](std::string const& passage, cpx::rows<float> x, cpx::rows<float> y) {
        if (me.problem.empty()) me.problem = expect_error({passage}, 5, [&] { move(x, y, me.stream); });
    };
    rejects("memory of the current device", {host.data(), plan.source_rows, 4}, to);
    rejects("alignment of the buffer", {memory.data() + 1, plan.source_rows, 4}, to);
    rejects("cuda::exchange, target: rows of the buffer", from, {memory.data() + 500, plan.target_rows + 1, 4});
    rejects("cuda::exchange, source: width of the buffer: expected 4, got 3", {memory.data(), plan.source_rows, 3}, to);
    int const other = (me.comm->device() + 1) % cpx::cuda::devices();
    if (other != me.comm->device()) { // else the ranks share a GPU
        cpx::cuda::use_device(other);
        cpx::cuda::buffer<float> elsewhere(1000);
        cpx::cuda::use_device(me.comm->device());
        rejects("memory of the current device", {elsewhere.data(), plan.source_rows, 4}, to);
    }
    move(from, to, me.stream); // and the communicator still works
    me.comm->wait(me.stream);
    return me.problem;
}

/// A mistake of this rank alone is not blamed on others, even if they come later, and breaks nothing that could go on.
std::string own_faults(int rank) {
    char const mine = static_cast<char>(rank);
    char all[8] = {};
    cpx::nccl::from_environment(std::chrono::milliseconds::max())->gather(&mine, all, 1);
    if (all[1] != 1) return "other bytes";
    std::string problem =
        expect_error({"deadline, ms: expected more than 0, got -5"}, 5, [] { cpx::nccl::from_environment(-5ms); });
    auto const comm = cpx::nccl::from_environment(10s);
    auto const expect = [&](std::string const& passage, auto&& f) {
        if (problem.empty()) problem = expect_error({passage}, 5, f);
    };
    cpx::cuda::stream const stream;
    expect("stream: expected one that does not capture", [&] { harness::graph(stream, [&] { comm->wait(stream); }); });
    try {
        comm->call("a call", []() -> ncclResult_t { throw std::runtime_error("of the caller's"); });
    } catch (std::runtime_error const&) {
    }
    all[1] = 0;
    comm->gather(&mine, all, 1);
    if (problem.empty() && all[1] != 1) problem = "other bytes";
    if (rank == 0)
        expect("cudaMalloc: expected success, got out of memory",
               [&] { comm->gather(all, all, std::size_t{1} << 50); });
    if (rank == 0) expect("communicator: expected one that has not failed", [&] { comm->gather(&mine, all, 1); });
    return problem;
}

/// An abort ends kernels that wait, and those behind them, before it takes away what they reach; also where the device
/// was given one queue, as trainers do.
std::string gives_up_under_kernels(int rank, bool one_queue) {
    if (one_queue) ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
    member me(20s);
    small_move small(me, 8);
    small.run();
    if (rank == 0) {
        for (int i = 0; i < 3; ++i) small.move(small.x, small.y);
        ::usleep(100'000);
        auto const begin = std::chrono::steady_clock::now();
        me.comm->give_up("a test");
        if (cudaDeviceSynchronize() != cudaSuccess) return "the device is broken";
        if (std::chrono::steady_clock::now() - begin > 5s) return "kernels went on";
    } else {
        ::usleep(2'000'000);
        me.comm->give_up("a test");
    }
    return "";
}

/// Rank 1 never joins.
std::string never_joins(int rank) {
    if (rank == 1) {
        ::usleep(6'000'000);
        return "";
    }
    return expect_error({"ncclCommInitRankConfig", "nothing from ranks 1"}, 4, [] { cpx::nccl::from_environment(2s); });
}

/// Rank 1 dies before a relayout in groups of two: its neighbour, which runs ahead, misses it in the kernel, the others
/// in NCCL.
std::string dies_in_a_group(int rank) {
    member me(3s);
    small_move small(me, 2);
    small.run();
    if (rank == 1) ::raise(SIGKILL);
    auto const problem = expect_missing(1, 6, [&] {
        if (rank == 0) small.run(3);
        for (int i = 0; i < 3; ++i) small.run();
    });
    return problem;
}

/// Rank 3 dies in a group of two, itself and rank 1; the other group goes on.
std::string dies_in_a_split(int rank) {
    auto const world = cpx::nccl::from_environment(3s);
    member me(world->split(rank % 2));
    small_move small(me, 8);
    small.run();
    if (rank == 3) ::raise(SIGKILL);
    auto const runs = [&] {
        for (int i = 0; i < 3; ++i) small.run();
    };
    if (rank == 1) return expect_missing(3, 6, runs);
    runs();
    return "";
}

/// Sends a byte, and waits until it has gone.
void send_to(cpx::nccl& comm, int rank) {
    cpx::cuda::buffer<char> const byte(1);
    cpx::cuda::stream const stream;
    comm.begin_call();
    comm.call("ncclSend", [&] {
        static_cast<void>(ncclGroupStart());
        static_cast<void>(ncclSend(byte.data(), 1, ncclInt8, rank, comm.get(), stream));
        return ncclGroupEnd();
    });
    comm.wait(stream);
}

/// Rank 1 dies before it has met any other: what waits for it is a call of NCCL's on the host.
std::string dies_unmet(int rank) {
    auto const comm = cpx::nccl::from_environment(3s);
    if (rank == 1) ::raise(SIGKILL);
    ::usleep(300'000);
    return expect_missing(1, 6, [&] { send_to(*comm, 1); });
}

/// Rank 1 lives but does not come to a message. Rank 0 comes late, so that rank 2 has given up, and left, before rank 0
/// looks: it is not named.
std::string stays_away(int rank) {
    auto const comm = cpx::nccl::from_environment(3s);
    if (rank == 1) {
        ::usleep(15'000'000);
        return "";
    }
    if (rank == 0) ::usleep(1'000'000);
    return expect_missing(1, 6, [&] { send_to(*comm, 1); });
}

/// Rank 1 dies, in a communicator that is a framework's: the others are told, and what waits ends with an abort.
std::string dies_in_a_framework(int rank, cpx::adopted then) {
    auto const world = cpx::nccl::from_environment(20s);
    framework of(*world);
    auto const comm = cpx::nccl::adopt(of.get(), then, 3s);
    cpx::cuda::buffer<char> const bytes(2);
    cpx::cuda::stream const stream;
    auto const meet = [&] {
        comm->begin_call();
        comm->call("ncclSend and ncclRecv", [&] {
            static_cast<void>(ncclGroupStart());
            static_cast<void>(ncclSend(bytes.data(), 1, ncclInt8, 1 - rank, comm->get(), stream));
            static_cast<void>(ncclRecv(bytes.data() + 1, 1, ncclInt8, 1 - rank, comm->get(), stream));
            return ncclGroupEnd();
        });
        comm->wait(stream);
    };
    meet(); // from now on no call of NCCL's blocks
    if (rank == 1) ::raise(SIGKILL);
    auto problem = expect_missing(1, 6, meet);
    if (problem.empty()) problem = expect_error({"communicator: expected one that has not failed"}, 1, meet);
    if (comm->get()) problem = "a communicator that has failed is given out";
    then == cpx::adopted::is_left ? of.abort() : of.forget();
    if (cudaStreamSynchronize(stream) != cudaSuccess) return "the device is broken";
    return problem;
}

enum class dies_at { rest, work };

/// Rank 1 dies before an exchange or in the middle of many: by send and receive, or by the kernel.
std::string dies(int rank, bool by_kernel, dies_at when) {
    member me(3s, index_t{1} << 26);
    int const ranks = me.comm->ranks();
    index_t const width = 8192;
    auto const batch = cpx::thd::from_lengths(std::vector<index_t>{1400, 600});
    auto const from = cpx::shard(batch, cpx::zigzag<>(ranks));
    auto const to = cpx::shard(batch, cpx::sequential<>(ranks));
    auto const plan = cpx::relayout(from, to, rank);
    cpx::cuda::exchange<float> move(plan, width, *me.comm);
    cpx::cuda::shared_communicator comm(*me.window, me.stream);
    cpx::capacity const most{std::max(plan.source_rows, plan.target_rows), 2};
    auto push = cpx::make_movement<float>(from, to, width, most, comm);
    auto z = push.make_tensor(to);
    cpx::cuda::buffer<float> const x(plan.source_rows * width), y(plan.target_rows * width);
    auto const enqueue = [&] {
        cpx::rows<float const> const source(x.data(), plan.source_rows, width);
        if (by_kernel)
            push(cpx::sharded(source, from, rank, comm.memory()), z);
        else
            move(source, cpx::rows<float>(y.data(), plan.target_rows, width), me.stream);
    };
    auto const wait = [&] { by_kernel ? comm.wait() : me.comm->wait(me.stream); };
    enqueue();
    wait();
    if (when == dies_at::work) {
        for (int i = 0; i < 50; ++i) enqueue();
        ::usleep(1000);
    }
    if (rank == 1) ::raise(SIGKILL);
    auto const problem = expect_missing(1, 6, [&] {
        for (int i = 0; i < 3; ++i) {
            enqueue();
            // behind the kernel something that nobody will ever end but an abort
            if (by_kernel && i == 0)
                move({x.data(), plan.source_rows, width}, {y.data(), plan.target_rows, width}, me.stream);
            wait();
        }
    });
    return problem;
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("ranks that disagree are all told so") {
        if (!enough_gpus(2)) return;
        for (bool const by_kernel : {false, true})
            check_codes(processes::run(2, [=](int rank) { return other_offsets(rank, by_kernel); }));
    }
    TEST_CASE("a target that is elsewhere on one rank is found before anything is written") {
        if (!enough_gpus(2)) return;
        check_codes(processes::run(2, other_places));
    }
    TEST_CASE("buffers that do not fit, of the host, of another GPU or misaligned are refused") {
        if (!enough_gpus(2)) return;
        check_codes(processes::run(2, bad_buffers));
        check_codes(processes::run(2, bad_arguments));
    }
    TEST_CASE("a rank's own fault is nobody else's") {
        if (!enough_gpus(2)) return;
        check_codes(processes::run(2, own_faults));
    }
    TEST_CASE("an abort ends kernels before it takes away what they reach") {
        if (!enough_gpus(2)) return;
        for (bool const one_queue : {false, true})
            check_codes(processes::run(2, [=](int rank) { return gives_up_under_kernels(rank, one_queue); }));
    }
    TEST_CASE("a rank that never joins is named within the deadline") {
        if (!enough_gpus(2)) return;
        check_codes(processes::run(2, never_joins));
    }
    TEST_CASE("a rank that lives but does not come is named, and not those that gave up because of it") {
        if (!enough_gpus(2)) return;
        check_codes(processes::run(std::min(processes::gpus(), 3), stays_away)); // of 2, nobody gives up before rank 0
    }
    TEST_CASE("a rank that dies is named within the deadline") {
        if (!enough_gpus(2)) return;
        int const all = std::min(processes::gpus(), 8);
        std::vector<int> counts = {2};
        if (all > 2) counts.push_back(all);
        for (int const ranks : counts) {
            check_codes(processes::run(ranks, dies_unmet), 1);
            for (auto const when : {dies_at::rest, dies_at::work})
                for (bool const by_kernel : {true, false})
                    check_codes(processes::run(ranks, [=](int rank) { return dies(rank, by_kernel, when); }), 1);
        }
    }
    TEST_CASE("a rank that dies is named in a framework's communicator, too") {
        if (!enough_gpus(2)) return;
        for (auto const then : {cpx::adopted::is_left, cpx::adopted::is_aborted})
            check_codes(processes::run(2, [=](int rank) { return dies_in_a_framework(rank, then); }), 1);
    }
    TEST_CASE("a rank that dies is named in groups, too") {
        if (!enough_gpus(4)) return;
        check_codes(processes::run(4, dies_in_a_group), 1);
        check_codes(processes::run(4, dies_in_a_split), 3);
    }
}
