// SPDX-License-Identifier: Apache-2.0
// A test of transports: what the concept asks of them, and which courtesies they offer.
#pragma once

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/sequential.hpp>
#include <cpx/layout/striped.hpp>
#include <cpx/layout/zigzag.hpp>
#include <cpx/testing/board.hpp>
#include <cpx/testing/messages.hpp>
#include <cpx/transport/movement.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

namespace cpx::testing {

/// One thing that has been tested of a transport, and what is wrong with it, or "".
struct finding {
    std::string property;
    bool duty = true; ///< else a courtesy, see `transport`
    std::string problem;
};

/// What a test has found, as far as the ranks of this process, of its threads and of its children know.
struct report {
    std::vector<finding> findings;

    /// Returns whether the transport can be used.
    bool all_duties() const {
        return std::ranges::none_of(findings, [](finding const& f) { return f.duty && !f.problem.empty(); });
    }
    bool all_courtesies() const {
        return std::ranges::none_of(findings, [](finding const& f) { return !f.duty && !f.problem.empty(); });
    }
    /// Returns a line for everything that has been tested.
    std::string text() const {
        std::string lines;
        for (finding const& f : findings)
            lines += std::string(f.duty ? "duty      " : "courtesy  ") + (f.problem.empty() ? "yes  " : "NO   ") +
                     f.property + (f.problem.empty() ? "" : ": " + f.problem) + '\n';
        return lines;
    }
};

namespace detail {

using std::chrono::milliseconds;

inline constexpr index_t width = 6; // of rows that plans move

/// Makes some calls in which any rank may have a message of any shape for another.
template <class Comm>
verdict any_rectangles(Comm& comm, index_t smallest_unit) {
    dice delay(static_cast<std::uint64_t>(comm.rank()));
    for (index_t call = 0; call < 30; ++call) {
        sleep_up_to(500, delay);
        auto const problem = transfer(comm, call, [&](int from, int to) -> shape {
            dice roll(mix(static_cast<std::uint64_t>(call), static_cast<std::uint64_t>(from * comm.ranks() + to)));
            if (roll(0, 3) == 0) return {};
            shape s = any_shape(roll);
            if (smallest_unit == 0 && roll(0, 1) == 0) s.unit = 0, s.dense = true;
            return s;
        });
        if (!problem.empty()) return {problem, ""};
    }
    return {};
}

/// Makes calls of two ranks each, which the others make without messages or, if they may, leave out.
template <class Comm>
verdict without_barrier(Comm& comm) {
    dice delay(static_cast<std::uint64_t>(comm.rank()));
    int const ranks = comm.ranks();
    for (int call = 0; call < 8 * ranks; ++call) {
        int const sender = call % ranks, receiver = (sender + 1 + call / ranks) % ranks;
        if (transport<Comm> && comm.rank() != sender && comm.rank() != receiver && call % 2 == 0) continue;
        sleep_up_to(1000, delay);
        auto const problem = transfer(comm, call, [&](int from, int to) {
            return from == sender && to == receiver ? bytes(100 + call) : shape{};
        });
        if (!problem.empty()) return {problem, ""};
    }
    return {};
}

/// Leaves a number of its own in `agreed()`, which must be there alone before a call and after it.
template <class Comm>
verdict keeps_agreed(Comm& comm) {
    bool const fresh = comm.agreed().empty();
    auto const own = static_cast<std::uint64_t>(comm.rank());
    comm.agreed().insert(own);
    auto const problem = transfer(comm, 0, [](int, int) { return bytes(8); });
    if (!problem.empty()) return {problem, ""};
    if (!fresh) return {"it is not empty in a new group", ""};
    if (!comm.agreed().contains(own)) return {"it has lost in a call what was put there before", ""};
    return {comm.agreed().size() == 1 ? "" : "it has what this rank has not put there", ""};
}

/// Waits for what has been asked of ranks whose memory is not the host's.
template <class Comm>
void settle(Comm& comm) {
    if constexpr (device_transport<Comm>) comm.wait();
}

/// The rows of `rank`, of which every element tells its place in the batch, `factor` times.
template <any_sharding S>
std::vector<std::int64_t> numbers_of(S const& sharding, int rank, std::int64_t factor = 1) {
    std::vector<std::int64_t> list;
    sharding.for_each_piece(rank, [&](range piece) {
        for (index_t i = piece.first * width; i < piece.last * width; ++i) list.push_back(factor * (i + 1));
    });
    return list;
}
template <any_sharding S, class Comm>
auto tensor_of(S const& sharding, Comm& comm) {
    auto made = make_tensor<std::int64_t>(sharding, comm, width);
    made.write(numbers_of(sharding, comm.rank()));
    return made;
}

inline verdict moves(bool well) { return {well ? "" : "rows are not where they belong", ""}; }

/// Runs plans there and back, some of which add.
template <class Comm>
verdict plans(Comm& comm) {
    thd const batch({0, 7, 7, 20, 61});
    auto const a = shard(batch, zigzag<>(comm.ranks()));
    auto const x = tensor_of(a, comm);
    auto const returns = [&](auto const& b, std::int64_t factor) {
        auto const there = relayout(a, b, comm.rank());
        for (int turn = 0; turn < 2; ++turn) { // what ranks have agreed on is not compared again
            auto const y = exchange(there, x, comm);
            auto const z = exchange(there.transposed(), y, comm);
            settle(comm);
            if (y.read() != numbers_of(b, comm.rank()) || z.read() != numbers_of(a, comm.rank(), factor)) return false;
        }
        return true;
    };
    return moves(returns(shard(batch, sequential<>(comm.ranks())), 1) &&
                 returns(shard<scope::batch>(batch, striped<>(comm.ranks())), 1) &&
                 returns(replicated<>(comm.ranks(), batch), comm.ranks()));
}

/// Runs one movement there and back for several batches.
template <class Comm>
verdict movements(Comm& comm) {
    auto const a = [&](thd const& batch) { return shard(batch, zigzag<>(comm.ranks())); };
    auto const b = [&](thd const& batch) { return shard(batch, sequential<>(comm.ranks())); };
    thd const first({0, 7, 7, 20, 61});
    auto move = make_movement<std::int64_t>(a(first), b(first), width, {61, 4}, comm);
    auto y = move.make_tensor(b(first));
    auto z = move.make_tensor(a(first));
    for (thd const& batch : {first, thd({0, 33, 50}), thd({0, 61}), first}) {
        auto const x = tensor_of(a(batch), comm);
        y.hold(b(batch)), z.hold(a(batch));
        move(x, y);
        move.transposed(y, z);
        settle(comm);
        if (y.read() != numbers_of(b(batch), comm.rank()) || z.read() != x.read()) return moves(false);
    }
    return {};
}

/// Lets rank 0 have another batch than the others: their identities differ, and the transport carries them.
template <class Comm>
verdict disagreement(Comm& comm) {
    thd const batch({0, comm.rank() == 0 ? 9 : 8, 20});
    auto const a = shard(batch, zigzag<>(comm.ranks()));
    try {
        exchange(relayout(a, shard(batch, sequential<>(comm.ranks())), comm.rank()), tensor_of(a, comm), comm);
    } catch (error const& e) {
        bool const told = e.problem().find("ranks disagree on offset 1 of cu_seqlens") != std::string::npos;
        return {told ? "" : "not that ranks disagree, but " + std::string(e.what()), ""};
    }
    return {"no error", ""};
}

/// Returns whether a text has the number `rank` in it.
inline bool names(std::string_view text, int rank) {
    std::string const number = std::to_string(rank);
    auto const digit = [&](std::size_t i) { return i < text.size() && text[i] >= '0' && text[i] <= '9'; };
    for (auto at = text.find(number); at != std::string_view::npos; at = text.find(number, at + 1))
        if (!digit(at - 1) && !digit(at + number.size())) return true;
    return false;
}

/// Lets rank 0 move rows of another batch than the others, of messages as long as theirs.
template <class Comm>
verdict other_batches(Comm& comm) {
    int const rank = comm.rank();
    index_t const n = index_t{comm.ranks()} * comm.ranks();
    auto const a = [&](thd const& batch) { return shard(batch, striped<>(comm.ranks())); }; // from all ranks to all
    auto const b = [&](thd const& batch) { return shard(batch, sequential<>(comm.ranks())); };
    thd const first({0, 3 * n}), batch({0, rank == 0 ? 2 * n : n, 3 * n});
    auto move = make_movement<std::int64_t>(a(first), b(first), width, {3 * n, 2}, comm);
    auto const x = tensor_of(a(batch), comm);
    auto y = move.make_tensor(b(first));
    y.hold(b(batch));
    try {
        move(x, y);
        settle(comm);
    } catch (error const& e) {
        bool const told = rank == 0 || names(e.what(), 0);
        return {told ? "" : std::string("another one is named: ") + e.what(), ""};
    }
    return {"no error", ""};
}

/// All ranks but the last wait for messages of all others. Says how that ends.
template <class Comm>
verdict without_last(Comm& comm, milliseconds duty, milliseconds courtesy) {
    auto const start = std::chrono::steady_clock::now();
    try {
        transfer(comm, 0, [](int, int) { return bytes(8); });
    } catch (error const& e) {
        auto const took = std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start);
        verdict v;
        std::string const late = "an error after " + std::to_string(took.count()) + " ms only";
        if (took > duty) v.duty = late;
        if (took > courtesy) v.courtesy = late;
        if (!names(e.what(), comm.ranks() - 1)) v.courtesy = std::string("another one is named: ") + e.what();
        return v;
    }
    return {"no error", "no error"};
}

/// Returns what a rank says that should get an error: nothing if it does.
template <class F>
verdict courtesy_of(F&& call) {
    try {
        call();
    } catch (error const&) {
        return {};
    }
    return {"", "it is not noticed"};
}

enum class property {
    numbers,
    agreed,
    agreed_anew,
    rectangles,
    no_bytes,
    no_barrier,
    order,
    large,
    plans,
    movements,
    disagreement,
    batches,
    throws,
    returns,
    stays_away,
    exchanges,
    lengths
};

struct description {
    property tested;
    char const *duty, *courtesy; ///< null: nothing is tested as one
};
inline constexpr std::array<description, 17> descriptions{{
    {property::numbers, "ranks are numbered from 0", nullptr},
    {property::agreed, "agreed() is empty at first, is this rank's own, and keeps what is put there", nullptr},
    {property::agreed_anew, "agreed() is empty again in the next group", nullptr},
    {property::rectangles, "messages of any rows, columns and strides arrive, and nothing else is written", nullptr},
    {property::no_bytes, "messages without bytes and calls without messages come to an end", nullptr},
    {property::no_barrier, "calls of some ranks do not wait for the others", nullptr},
    {property::order, "messages arrive in the order of the calls, short ones behind long ones", nullptr},
    {property::large, "messages of 2 MiB pass each other", nullptr},
    {property::plans, "plans run there and back, and once more", nullptr},
    {property::movements, "a movement runs there and back, for one batch after the other", nullptr},
    {property::disagreement, "ranks whose plans differ can compare them", nullptr},
    {property::batches, "ranks that move rows of another batch are named", nullptr},
    {property::throws, "a rank that throws ends the others", "they are told at once, and which rank it was"},
    {property::returns, "a rank that returns early ends the others", "they are told at once, and which rank it was"},
    {property::stays_away, "a rank that does not come is an error within the deadline", "which names it"},
    {property::exchanges, nullptr, "ranks in different exchanges are told so"},
    {property::lengths, nullptr, "a message of another length is an error"},
}};

/// Returns the deadline of the group that shows a property: `shortest` where that is what ends it. One that ranks need
/// not wait for is longer, but no hour: some transports tell no sooner.
inline milliseconds deadline_for(property tested, milliseconds shortest) {
    switch (tested) {
    case property::stays_away: return shortest;
    case property::throws:
    case property::returns: return std::clamp<milliseconds>(std::chrono::seconds(10), 4 * shortest, 20 * shortest);
    default: return std::chrono::minutes(1);
    }
}

/// Tests what only those do that move messages between ranks of the host.
template <class Comm>
verdict test_messages(property tested, Comm& comm) {
    int const rank = comm.rank();
    if (tested == property::agreed || tested == property::agreed_anew) return keeps_agreed(comm);
    if (comm.ranks() == 1) return {};
    if (tested == property::exchanges)
        return courtesy_of(
            [&] { static_cast<void>(transfer(comm, rank == 0 ? 0 : 1, [](int, int) { return bytes(8); })); });
    auto const message = [&](int from, int to) { return from == 0 && to == 1 ? bytes(rank == 0 ? 8 : 4) : shape{}; };
    verdict const v = courtesy_of([&] { static_cast<void>(transfer(comm, 0, message)); });
    return rank == 1 ? v : verdict{}; // only the receiver must see it
}

/// Returns nothing where transports of this kind do not owe or offer that.
template <class Comm>
std::optional<verdict> test(property tested, Comm& comm, milliseconds deadline) {
    int const rank = comm.rank(), ranks = comm.ranks();
    bool const last = rank == ranks - 1, alone = ranks == 1;
    switch (tested) {
    case property::numbers: {
        bool const good = rank >= 0 && rank < ranks;
        return verdict{good ? "" : "rank " + std::to_string(rank) + " of " + std::to_string(ranks), ""};
    }
    case property::rectangles: return any_rectangles(comm, 1);
    case property::no_bytes: return any_rectangles(comm, 0);
    case property::no_barrier: return alone ? verdict{} : without_barrier(comm);
    case property::order: return verdict{far_ahead(comm), ""};
    case property::large: return verdict{transfer(comm, 0, [](int, int) { return bytes(1 << 21); }), ""};
    case property::plans: return plans(comm);
    case property::movements: return movements(comm);
    case property::disagreement: return alone ? verdict{} : disagreement(comm);
    case property::batches: return alone ? verdict{} : other_batches(comm);
    case property::throws:
        if (last) throw error("testing", "thrown on purpose");
        return without_last(comm, 2 * deadline, deadline / 2);
    case property::returns: return last ? verdict{} : without_last(comm, 2 * deadline, deadline / 2);
    case property::stays_away:
        if (!last) return without_last(comm, 2 * deadline, 2 * deadline);
        if (!alone) std::this_thread::sleep_for(3 * deadline);
        return verdict{};
    default: break;
    }
    if constexpr (transport<Comm>) return test_messages(tested, comm);
    return {};
}

} // namespace detail

/// Tests all that `transport` asks for, or `device_transport`. `run(program, deadline)` calls `program(comm)` on every
/// rank of a new group, whose ranks wait for each other for `deadline`, and returns when all have ended; it may throw
/// if they fail.
///
/// Ranks may be threads, processes that `run` forks, or processes that all call this function and get a report each
/// (MPI). Of fewer than 3 ranks it says less. `shortest`: the deadline of a group in which one rank does not come.
/// Told at once is what is told before half of a deadline has passed.
/// Hangs where a transport waits without end.
///
///     auto const found = cpx::testing::check_transport(
///         [](auto const& program, auto deadline) { cpx::threads::run(3, program, deadline); });
template <class Run>
report check_transport(Run&& run, std::chrono::milliseconds shortest = std::chrono::milliseconds(500)) {
    report found;
    detail::board verdicts;
    for (detail::description const& d : detail::descriptions) {
        verdicts.clear();
        std::string thrown;
        auto const deadline = detail::deadline_for(d.tested, shortest);
        auto const program = [&](auto& comm) {
            verdicts.begin(comm.rank());
            try {
                auto const v = detail::test(d.tested, comm, deadline);
                v ? verdicts.end(comm.rank(), *v) : verdicts.leave_out(comm.rank());
            } catch (std::exception const& e) {
                bool const meant = d.tested == detail::property::throws && comm.rank() == comm.ranks() - 1;
                std::string const what = meant ? "" : e.what();
                verdicts.end(comm.rank(), {what, what}); // nor has a courtesy been seen
                throw;
            }
        };
        try {
            constexpr bool runs = std::is_invocable_v<Run&, decltype((program)), decltype((deadline))>;
            static_assert(runs, "cpx: check_transport(run) wants what runs a program on a new group within a deadline: "
                                "[](auto const& program, auto deadline) { ... }");
            if constexpr (runs) run(program, deadline);
        } catch (std::exception const& e) {
            thrown = e.what();
        }
        if (verdicts.left_out()) continue;
        detail::verdict const v = verdicts.read(thrown);
        if (d.duty) found.findings.push_back({d.duty, true, v.duty});
        if (d.courtesy) found.findings.push_back({d.courtesy, false, v.courtesy});
    }
    return found;
}

} // namespace cpx::testing
