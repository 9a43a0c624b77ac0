// SPDX-License-Identifier: Apache-2.0
// Exchanges between GPUs: by send and receive, and by the one-kernel relayout over NCCL's windows.
#include <support/packings.hpp>
#include <support/random.hpp>

#include "../../harness/graph.hpp"
#include "member.hpp"

#include <cmath>
#include <thread>

namespace {

using cpx::index_t;
using namespace std::chrono_literals;

/// Moves a whole tensor through the memory that peers write, twice, and compares every byte.
template <class T, class From, class To>
void move_in_groups(member& me, cpx::cuda::shared_memory& memory, From const& from, To const& to,
                    std::vector<cpx::section> const& sections, std::string const& what) {
    int const rank = me.comm->rank();
    index_t width = 0;
    for (cpx::section const& s : sections) width += s.heads * s.width;
    cpx::capacity most{0, from.batch().sequences()};
    for (int r = 0; r < me.comm->ranks(); ++r) most.rows = std::max({most.rows, from.rows(r), to.rows(r)});
    auto const source = whole::take<T>(from, rank, sections), target = whole::take<T>(to, rank, sections);
    cpx::cuda::shared_communicator comm(memory, me.stream);
    auto move = cpx::make_movement<T>(from, to, width, most, comm);
    auto x = cpx::make_tensor<T>(from, comm, std::ssize(whole::columns(from, rank, sections)));
    x.write(source);
    auto y = move.make_tensor(to);
    std::vector<T> poison(target.size());
    std::memset(static_cast<void*>(poison.data()), 0xff, poison.size() * sizeof(T));
    for (int again = 0; again < 2; ++again) {
        y.write(poison);
        me.meet(); // nobody stores into memory that is being poisoned
        move(x, y);
        comm.wait();
        me.check(y.read(), target, what);
    }
}

/// Moves a whole tensor both ways by both paths and compares every byte.
template <class T, class From, class To>
void move_whole(member& me, From const& from, To const& to, std::vector<cpx::section> const& sections,
                std::string const& what) {
    int const rank = me.comm->rank();
    index_t width = 0;
    for (cpx::section const& s : sections) width += s.heads * s.width;
    auto const plan = cpx::relayout(from, to, rank);
    auto const source = whole::take<T>(from, rank, sections), target = whole::take<T>(to, rank, sections);
    index_t const in = std::ssize(whole::columns(from, rank, sections)),
                  out = std::ssize(whole::columns(to, rank, sections));
    cpx::cuda::buffer<T> const x{std::span<T const>(source)};
    cpx::cuda::buffer<T> y(std::ssize(target)), z(std::ssize(source));
    auto const poison = [&](void* memory, std::size_t size) {
        cpx::cuda::check(cudaMemset(memory, 0xff, size), "cudaMemset");
        cpx::cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    };
    poison(y.data(), target.size() * sizeof(T));
    cpx::cuda::exchange<T> there(plan, width, *me.comm);
    there(cpx::rows<T const>(x.data(), from.rows(rank), in), cpx::rows<T>(y.data(), to.rows(rank), out), me.stream);
    me.comm->wait(me.stream);
    me.check(y.read(), target, what + ", send and receive,");
    if constexpr (!To::every_row) {
        poison(z.data(), source.size() * sizeof(T));
        cpx::cuda::exchange<T> back(plan.transposed(), width, *me.comm);
        back(cpx::rows<T const>(y.data(), to.rows(rank), out), cpx::rows<T>(z.data(), from.rows(rank), in), me.stream);
        me.comm->wait(me.stream);
        if constexpr (!From::every_row) me.check(z.read(), source, what + ", back,");
    }
    move_in_groups<T>(me, *me.window, from, to, sections, what + ", through the window,");
}

std::string movements(int) {
    member me;
    int const ranks = me.comm->ranks();
    support::splitmix numbers(11);
    std::vector<std::vector<index_t>> packings = {{}, {1}, {2, 0, 1}, {700, 1, 123}, {5000}};
    for (int i = 0; i < 6; ++i) {
        std::vector<index_t> lengths;
        for (index_t k = numbers.between(1, 9); k > 0; --k) lengths.push_back(numbers.between(0, 300));
        packings.push_back(lengths);
    }
    for (auto const& lengths : packings) {
        auto const batch = cpx::thd::from_lengths(lengths);
        auto const text = support::text(batch);
        auto const zigzag = cpx::shard(batch, cpx::zigzag<>(ranks));
        auto const sequential = cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(ranks));
        auto const striped = cpx::shard<cpx::scope::batch>(batch, cpx::striped<>(ranks), cpx::aligned<16>{});
        index_t const width = numbers.between(1, 100);
        std::vector<cpx::section> const plain{{1, width}}, sections{{8, 16}, {4, 16}, {8, 1}, {8, 2}};
        move_whole<float>(me, zigzag, sequential, plain, text + " zigzag to sequential");
        move_whole<std::uint16_t>(me, sequential, striped, plain, text + " sequential to striped");
        move_whole<double>(me, striped, zigzag, plain, text + " striped to zigzag");
        move_whole<float>(me, zigzag, cpx::replicated<>(ranks, batch), plain, text + " zigzag to replicated");
        cpx::head_sharded<> const heads(ranks, batch, sections);
        move_whole<std::uint16_t>(me, zigzag, heads, sections, text + " zigzag to heads");
        move_whole<float>(me, heads, sequential, sections, text + " heads to sequential");
    }
    return me.problem;
}

/// The same program wherever ranks do and do not reach each other's memory: all, groups of them, none.
std::string in_groups(int) {
    member me;
    int const ranks = me.comm->ranks(), rank = me.comm->rank();
    std::vector<cpx::section> const sections{{8, 16}, {2, 8}, {8, 1}}, plain{{1, 24}};
    for (int const most : {8, 3, 2, 1}) {
        cpx::cuda::shared_memory memory(*me.comm, (1 << 20) + 7, most);
        index_t const first = rank / most * most, last = std::min<index_t>(ranks, first + most);
        if (memory.group() != cpx::range{first, last}) return "other groups than wished for";
        if (memory.one_kernel() != (most >= ranks) || memory.any_kernel() != (last - first > 1))
            return "one kernel, or not, against the wish";
        for (auto const& lengths :
             {std::vector<index_t>{123, 1, 0, 400}, std::vector<index_t>{7}, std::vector<index_t>{}}) {
            auto const batch = cpx::thd::from_lengths(lengths);
            auto const what = support::text(batch) + " in groups of " + std::to_string(most);
            auto const zigzag = cpx::shard(batch, cpx::zigzag<>(ranks));
            auto const sequential = cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(ranks));
            cpx::head_sharded<> const heads(ranks, batch, sections);
            move_in_groups<std::uint16_t>(me, memory, zigzag, sequential, plain, what + ", zigzag to sequential");
            move_in_groups<std::uint16_t>(me, memory, sequential, zigzag, plain, what + ", sequential to zigzag");
            move_in_groups<std::uint16_t>(me, memory, zigzag, cpx::replicated<>(ranks, batch), plain,
                                          what + ", to replicated");
            move_in_groups<std::uint16_t>(me, memory, zigzag, heads, sections, what + ", zigzag to heads");
            move_in_groups<std::uint16_t>(me, memory, heads, sequential, sections, what + ", heads to sequential");
            // whose addresses no device computes
            auto const owners = cpx::shard(batch, cpx::table(ranks, {ranks - 1, 0, 0, ranks / 2, 0}));
            auto const either = cpx::shard(batch, cpx::by_length{cpx::zigzag<>(ranks), cpx::sequential<>(ranks),
                                                                 [](index_t n) { return n % 2 == 0; }});
            move_in_groups<std::uint16_t>(me, memory, zigzag, owners, plain, what + ", zigzag to a table");
            move_in_groups<std::uint16_t>(me, memory, owners, heads, sections, what + ", a table to heads");
            move_in_groups<std::uint16_t>(me, memory, either, sequential, plain,
                                          what + ", zigzag by length to sequential");
        }
    }
    return me.problem;
}

/// All ranks in one process, a thread a GPU.
std::string in_one_process(int) {
    std::vector<int> devices;
    for (int rank = 0, all = usable_gpus(4); rank < all; ++rank) devices.push_back(gpu_of(rank));
    auto comms = cpx::nccl::all(devices);
    int const ranks = static_cast<int>(devices.size());
    auto const batch = cpx::thd::from_lengths(std::vector<index_t>{300, 41, 7});
    auto const from = cpx::shard(batch, cpx::zigzag<>(ranks));
    auto const to = cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(ranks));
    std::vector<cpx::section> const plain{{1, 33}};
    std::vector<std::string> problems(devices.size());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank)
        threads.emplace_back([&, rank] {
            std::string& problem = problems[static_cast<std::size_t>(rank)];
            try {
                cpx::cuda::use_device(devices[static_cast<std::size_t>(rank)]);
                member me(std::move(comms[static_cast<std::size_t>(rank)]));
                auto const source = whole::take<float>(from, rank, plain), target = whole::take<float>(to, rank, plain);
                cpx::cuda::buffer<float> const x{std::span<float const>(source)};
                cpx::cuda::buffer<float> y(std::ssize(target));
                cpx::cuda::exchange<float> move(cpx::relayout(from, to, rank), 33, *me.comm);
                for (int i = 0; i < 100; ++i)
                    move(cpx::rows<float const>(x.data(), from.rows(rank), 33),
                         cpx::rows<float>(y.data(), to.rows(rank), 33), me.stream);
                me.comm->wait(me.stream);
                me.check(y.read(), target, "send and receive");
                if (!me.window->one_kernel()) me.problem = "not one kernel";
                move_in_groups<std::uint16_t>(me, *me.window, from, to, plain, "one kernel");
                move_in_groups<std::uint16_t>(me, *me.window, to, from, plain, "one kernel, back,");
                problem = me.problem;
            } catch (std::exception const& e) {
                problem = e.what();
            }
        });
    for (auto& thread : threads) thread.join();
    for (auto const& problem : problems)
        if (!problem.empty()) return problem;
    auto const begin = std::chrono::steady_clock::now();
    cpx::nccl::all(devices); // and freed by one thread, one after the other
    return std::chrono::steady_clock::now() - begin < 30s ? "" : "communicators wait for each other's end";
}

/// Every second rank of a world is a group of its own, as context-parallel ranks are where tensor-parallel ones are
/// neighbours.
std::string in_every_second(int rank) {
    member world;
    member me(world.comm->split(rank % 2));
    int const ranks = me.comm->ranks();
    if (ranks != (world.comm->ranks() + 1 - rank % 2) / 2) return "a group of another size";
    if (me.comm->number(me.comm->rank()) != rank) return "another number than the world's";
    auto const batch =
        cpx::thd::from_lengths(rank % 2 ? std::vector<index_t>{41, 300, 8} : std::vector<index_t>{77, 5});
    auto const zigzag = cpx::shard(batch, cpx::zigzag<>(ranks));
    auto const sequential = cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(ranks));
    move_whole<float>(me, zigzag, sequential, {{1, 9}}, "some ranks of the world");
    move_in_groups<std::uint16_t>(me, *me.window, sequential, zigzag, {{1, 10}}, "some ranks of the world");
    auto const all = cpx::thd::from_lengths(std::vector<index_t>{19, 90});
    int const everyone = world.comm->ranks();
    move_whole<float>(world, cpx::shard(all, cpx::zigzag<>(everyone)), cpx::shard(all, cpx::sequential<>(everyone)),
                      {{1, 3}}, "the world");
    return me.problem.empty() ? world.problem : me.problem;
}

/// A framework's communicator moves rows, through the window, too, and is its owner's afterwards.
std::string adopted(int rank, bool blocks) {
    auto const world = cpx::nccl::from_environment(60s);
    int const ranks = world->ranks();
    framework const of(*world, blocks);
    auto const batch = cpx::thd::from_lengths(std::vector<index_t>{300, 41, 7});
    auto const from = cpx::shard(batch, cpx::zigzag<>(ranks));
    auto const to = cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(ranks));
    {
        auto const comm = cpx::nccl::adopt(of.get(), cpx::adopted::is_left, 60s);
        if (comm->rank() != rank || comm->ranks() != ranks || comm->device() != cpx::cuda::current_device())
            return "another rank, number of ranks or device";
        for (int peer = 0; peer < ranks; ++peer)
            if (!comm->on_this_host(peer)) return "ranks of this host have not found each other";
        cpx::cuda::stream const stream;
        cpx::cuda::communicator gpus(*comm, stream);
        auto x = cpx::make_tensor<float>(from, gpus, 9);
        x.write(whole::take<float>(from, rank, {{1, 9}}));
        auto const y = cpx::exchange(x, to, gpus);
        gpus.wait();
        if (y.read() != whole::take<float>(to, rank, {{1, 9}})) return "other rows";
    }
    if (blocks) {
        member me(cpx::nccl::adopt(of.get(), cpx::adopted::is_left, 60s));
        move_whole<float>(me, from, to, {{1, 9}}, "a framework's communicator");
        if (!me.problem.empty()) return me.problem;
    }
    cpx::cuda::stream const stream;
    cpx::cuda::buffer<float> const ones{std::span<float const>(std::vector<float>(1, 1.0f))};
    of.done(ncclAllReduce(ones.data(), ones.data(), 1, ncclFloat, ncclSum, of.get(), stream));
    stream.synchronize();
    return ones.read()[0] == static_cast<float>(ranks) ? "" : "the framework's sum is another";
}

/// What has been captured moves new rows each time.
std::string captured(int) {
    member me;
    int const ranks = me.comm->ranks(), rank = me.comm->rank();
    index_t const width = 24;
    std::vector<cpx::section> const plain{{1, width}};
    auto const batch = cpx::thd::from_lengths(std::vector<index_t>{300, 41, 7});
    auto const from = cpx::shard(batch, cpx::zigzag<>(ranks));
    auto const to = cpx::shard(batch, cpx::sequential<>(ranks));
    auto const plan = cpx::relayout(from, to, rank);
    cpx::cuda::buffer<float> x(plan.source_rows * width), y(plan.target_rows * width);
    cpx::cuda::exchange<float> send(plan, width, *me.comm);
    harness::graph const sent(me.stream, [&] {
        send(cpx::rows<float const>(x.data(), plan.source_rows, width),
             cpx::rows<float>(y.data(), plan.target_rows, width), me.stream);
    });
    for (int again = 0; again < 3; ++again) {
        auto source = whole::take<float>(from, rank, plain), target = whole::take<float>(to, rank, plain);
        for (float& value : source) value += static_cast<float>(again);
        for (float& value : target) value += static_cast<float>(again);
        x.write(source);
        cpx::cuda::check(cudaMemset(y.data(), 0xff, static_cast<std::size_t>(y.size()) * 4), "cudaMemset");
        cpx::cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        sent.launch(me.stream);
        me.comm->wait(me.stream);
        me.check(y.read(), target, "the graph of send and receive");
    }
    return me.problem;
}

/// Moves packings, one after the other, by one movement of send and receive, there and back, some of them captured. The
/// movement is made for one that has too few tokens for most ranks. `from`, `to`: return shardings of a batch.
template <class From, class To>
void move_packings(member& me, From const& from, To const& to, std::vector<cpx::section> const& sections,
                   std::string const& what) {
    using T = std::uint16_t;
    int const rank = me.comm->rank();
    cpx::cuda::communicator comm(*me.comm, me.stream);
    auto const first = cpx::thd::from_lengths(std::vector<index_t>{1});
    index_t width = 0;
    for (cpx::section const& s : sections) width += s.heads * s.width;
    auto move = cpx::make_movement<T>(from(first), to(first), width, {700, 9}, comm);
    auto const columns = [&](auto const& s) { return std::ssize(whole::columns(s, rank, sections)); };
    support::splitmix numbers(23);
    for (int round = 0; round < 12; ++round) {
        std::vector<index_t> lengths; // unequal, odd, empty
        for (index_t k = numbers.between(0, 9); k > 0; --k)
            lengths.push_back(numbers.between(0, 3) ? 2 * numbers.between(0, 37) + 1 : 0);
        auto const batch = cpx::thd::from_lengths(lengths);
        auto const a = from(batch);
        auto const b = to(batch);
        auto const source = whole::take<T>(a, rank, sections), target = whole::take<T>(b, rank, sections);
        auto x = cpx::make_tensor<T>(a, comm, columns(a)), z = cpx::make_tensor<T>(a, comm, columns(a));
        auto y = cpx::make_tensor<T>(b, comm, columns(b));
        x.write(source);
        me.meet();
        auto const text = what + " of " + support::text(batch);
        auto const both = [&] {
            move(x, y);
            move.transposed(y, z);
        };
        auto const check = [&](std::string const& how) {
            comm.wait();
            me.check(y.read(), target, text + how);
            if (move.plan().kind == cpx::flow::moves) me.check(z.read(), source, text + ", back," + how);
        };
        if (round % 4 == 0) { // the packing is set as it is captured
            harness::graph const graph(me.stream, both);
            for (int again = 0; again < 2; ++again) {
                y.write(std::vector<T>(target.size())), z.write(std::vector<T>(source.size()));
                me.meet();
                graph.launch(me.stream);
                check(", replayed,");
            }
        }
        both();
        check("");
    }
}

/// New packings between tokens and heads, to every rank, and of batches that are cut as one.
std::string every_packing(int) {
    member me;
    int const ranks = me.comm->ranks();
    std::vector<cpx::section> const plain{{1, 24}}, sections{{8, 16}, {2, 8}, {8, 1}};
    auto const zigzag = [&](cpx::thd const& b) { return cpx::shard(b, cpx::zigzag<>(ranks)); };
    auto const sequential = [&](cpx::thd const& b) {
        return cpx::shard(b, cpx::sequential<>(ranks), cpx::aligned<8>{});
    };
    auto const striped = [&](cpx::thd const& b) { return cpx::shard<cpx::scope::batch>(b, cpx::striped<>(ranks)); };
    auto const whole_row = [&](cpx::thd const& b) { return cpx::shard<cpx::scope::batch>(b, cpx::zigzag<>(ranks)); };
    auto const heads = [&](cpx::thd const& b) { return cpx::head_sharded<>(ranks, b, sections); };
    auto const everywhere = [&](cpx::thd const& b) { return cpx::replicated<>(ranks, b); };
    move_packings(me, zigzag, heads, sections, "zigzag to heads");
    move_packings(me, heads, sequential, sections, "heads to sequential");
    move_packings(me, striped, heads, sections, "striped batches to heads");
    move_packings(me, whole_row, striped, plain, "zigzag batches to striped batches");
    move_packings(me, whole_row, everywhere, plain, "zigzag batches to all");
    move_packings(me, zigzag, striped, plain, "zigzag to striped batches"); // of which the host lists the plan
    return me.problem;
}

/// More elements than 2^31 on every rank.
std::string large(int rank) {
    member me(60s, index_t{9} << 28);
    int const ranks = me.comm->ranks();
    index_t const width = 4099,
                  tokens = ranks * ((index_t{1} << 31) / width + 3); // on each rank more than 2^31 elements
    auto const batch = cpx::thd::from_lengths(std::vector<index_t>{tokens / 2 - 5, tokens / 2 + 5});
    auto const from = cpx::shard(batch, cpx::zigzag<>(ranks));
    auto const to = cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(ranks));
    auto const plan = cpx::relayout(from, to, rank);
    std::vector<unsigned char> source(static_cast<std::size_t>(plan.source_rows * width));
    index_t row = 0;
    from.for_each_piece(rank, [&](cpx::range piece) {
        for (index_t g = piece.first; g < piece.last; ++g, ++row)
            for (index_t c = 0; c < width; ++c)
                source[static_cast<std::size_t>(row * width + c)] =
                    static_cast<unsigned char>(g * 7 + c * 3 + (g >> 8));
    });
    cpx::cuda::buffer<unsigned char> const x{std::span<unsigned char const>(source)};
    cpx::cuda::buffer<unsigned char> y(plan.target_rows * width);
    cpx::rows<unsigned char const> const rows(x.data(), plan.source_rows, width);
    cpx::cuda::exchange<unsigned char> move(plan, width, *me.comm);
    move(rows, cpx::rows<unsigned char>(y.data(), plan.target_rows, width), me.stream);
    me.comm->wait(me.stream);
    cpx::cuda::shared_communicator comm(*me.window, me.stream);
    cpx::capacity const most{std::max(plan.source_rows, plan.target_rows), 2};
    auto push = cpx::make_movement<unsigned char>(from, to, width, most, comm);
    auto z = push.make_tensor(to);
    push(cpx::sharded(rows, from, rank, comm.memory()), z);
    comm.wait();
    std::vector<unsigned char> got(static_cast<std::size_t>(y.size()));
    for (bool const kernel : {false, true}) {
        cpx::cuda::check(
            cudaMemcpy(got.data(), kernel ? z.data().data() : y.data(), got.size(), cudaMemcpyDeviceToHost),
            "cudaMemcpy");
        row = 0;
        to.for_each_piece(rank, [&](cpx::range piece) {
            for (index_t g = piece.first; g < piece.last; ++g, ++row)
                for (index_t c = 0; c < width; ++c)
                    if (me.problem.empty() && got[static_cast<std::size_t>(row * width + c)] !=
                                                  static_cast<unsigned char>(g * 7 + c * 3 + (g >> 8)))
                        me.problem = "row " + std::to_string(g) + " has another byte " + std::to_string(c);
        });
    }
    return me.problem;
}

/// Sums in rank order: every rank's share of every token, by the transposed plan of a gather.
std::string sums(int) {
    member me;
    int const ranks = me.comm->ranks(), rank = me.comm->rank();
    auto const batch = cpx::thd::from_lengths(std::vector<index_t>{37, 5, 90});
    auto const zigzag = cpx::shard(batch, cpx::zigzag<>(ranks));
    auto const plan = cpx::relayout(zigzag, cpx::replicated<>(ranks, batch), rank).transposed();
    index_t const width = 7;
    auto const share = [&](int r, index_t row, index_t column) {
        return std::sin(static_cast<float>(r * 77 + row * 13 + column)) * std::pow(10.f, static_cast<float>(r % 5));
    };
    std::vector<float> mine(static_cast<std::size_t>(batch.tokens() * width));
    for (index_t i = 0; i < std::ssize(mine); ++i)
        mine[static_cast<std::size_t>(i)] = share(rank, i / width, i % width);
    std::vector<float> expected;
    zigzag.for_each_piece(rank, [&](cpx::range piece) {
        for (index_t g = piece.first; g < piece.last; ++g)
            for (index_t c = 0; c < width; ++c) {
                float sum = 0;
                for (int r = 0; r < ranks; ++r) sum += share(r, g, c);
                expected.push_back(sum);
            }
    });
    cpx::cuda::buffer<float> const x{std::span<float const>(mine)};
    cpx::cuda::buffer<float> y(std::ssize(expected));
    cpx::cuda::exchange<float> add(plan, width, *me.comm);
    add(cpx::rows<float const>(x.data(), batch.tokens(), width), cpx::rows<float>(y.data(), zigzag.rows(rank), width),
        me.stream);
    me.comm->wait(me.stream);
    me.check(y.read(), expected, "the sum");
    return me.problem;
}

/// Many exchanges with ranks out of step: what arrives is always the same.
std::string delays(int) {
    member me;
    int const ranks = me.comm->ranks(), rank = me.comm->rank();
    auto const batch = cpx::thd::from_lengths(std::vector<index_t>{64, 31, 200});
    auto const from = cpx::shard(batch, cpx::zigzag<>(ranks));
    auto const to = cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(ranks));
    std::vector<cpx::section> const plain{{1, 64}};
    cpx::cuda::shared_communicator comm(*me.window, me.stream);
    auto move = cpx::make_movement<float>(from, to, 64, {batch.tokens(), 3}, comm);
    auto const source = whole::take<float>(from, rank, plain);
    auto x = cpx::make_tensor<float>(from, comm, 64), z = move.make_tensor(from);
    auto y = move.make_tensor(to);
    x.write(source);
    support::splitmix numbers(static_cast<std::uint64_t>(rank) + 1);
    for (int i = 0; i < 5000; ++i) {
        if (numbers.between(0, 9) == 0) ::usleep(static_cast<unsigned>(numbers.between(0, 300)));
        move(x, y);
        move.transposed(y, z);
        cpx::cuda::check(cudaMemcpyAsync(x.data().data(), z.data().data(), source.size() * sizeof(float),
                                         cudaMemcpyDeviceToDevice, me.stream),
                         "cudaMemcpyAsync");
    }
    comm.wait();
    me.check(x.read(), source, "the tensor after 10000 exchanges");
    return me.problem;
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("both paths move every byte to its place, on two GPUs and on all") {
        if (!enough_gpus(2)) return;
        check_codes(processes::run(2, movements));
        if (int const all = std::min(processes::gpus(), 8); all > 2) check_codes(processes::run(all, movements));
    }
    TEST_CASE("one program moves by one kernel, by kernels in groups, or by send and receive") {
        if (!enough_gpus(2)) return;
        check_codes(processes::run(std::min(processes::gpus(), 4), in_groups));
    }
    TEST_CASE("ranks may be threads of one process") {
        if (!enough_gpus(2)) return;
        check_codes(processes::run(1, in_one_process));
    }
    TEST_CASE("ranks may be some of a world's") {
        if (!enough_gpus(2)) return;
        check_codes(processes::run(std::min(processes::gpus(), 4), in_every_second));
    }
    TEST_CASE("a framework's communicator is adopted, and stays the framework's") {
        if (!enough_gpus(2)) return;
        for (bool const blocks : {true, false})
            check_codes(
                processes::run(std::min(processes::gpus(), 4), [=](int rank) { return adopted(rank, blocks); }));
    }
    TEST_CASE("exchanges are captured, and replayed with other rows") {
        if (!enough_gpus(2)) return;
        check_codes(processes::run(std::min(processes::gpus(), 4), captured));
    }
    TEST_CASE("movements made once move every packing to heads and back, and of batches that are cut as one, also "
              "captured") {
        if (!enough_gpus(2)) return;
        check_codes(processes::run(2, every_packing));
        if (int const all = std::min(processes::gpus(), 4); all > 2)
            check_codes(processes::run(all == 4 ? 3 : all, every_packing));
    }
    TEST_CASE("an exchange may have more than 2^31 elements") {
        if (!enough_gpus(2)) return;
        check_codes(processes::run(2, large));
    }
    TEST_CASE("a transposed gather adds in rank order") {
        if (!enough_gpus(2)) return;
        check_codes(processes::run(std::min(processes::gpus(), 4), sums));
    }
    TEST_CASE("ten thousand exchanges with ranks out of step give one result") {
        if (!enough_gpus(2)) return;
        check_codes(processes::run(std::min(processes::gpus(), 4), delays));
    }
}
