// SPDX-License-Identifier: Apache-2.0
// Messages of any shape between ranks, made of numbers that both ends draw.
#pragma once

#include <cpx/transport/exchange.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace cpx::testing::detail {

using cpx::detail::mix;

/// Numbers that look random, and are the same wherever the seed is.
class dice {
public:
    explicit dice(std::uint64_t seed) : state_(seed) {}
    index_t operator()(index_t first, index_t last) {
        state_ = mix(state_, 1);
        return first + static_cast<index_t>(state_ % static_cast<std::uint64_t>(last - first + 1));
    }

private:
    std::uint64_t state_;
};

/// What both ends of a message have in common.
struct shape {
    std::vector<index_t> rows, columns;
    index_t unit = 0;
    bool dense = false; ///< whole rows, side by side
};

inline shape any_shape(dice& roll) {
    shape s;
    for (index_t i = roll(1, 3); i > 0; --i) s.rows.push_back(roll(1, 4));
    for (index_t i = roll(1, 3); i > 0; --i) s.columns.push_back(roll(1, 5));
    s.unit = roll(1, 9);
    s.dense = s.columns.size() == 1 && roll(0, 1) == 0;
    return s;
}

/// Returns runs of these counts, ascending or descending, with gaps, from `extent` on, which is one past the last place
/// then.
inline std::vector<run> places(std::vector<index_t> const& counts, index_t gap, dice& roll, index_t& extent) {
    std::vector<run> runs;
    for (index_t const count : counts) runs.push_back({0, count});
    bool const descending = roll(0, 1) == 1;
    for (std::size_t i = 0; i < runs.size(); ++i) {
        run& r = runs[descending ? runs.size() - 1 - i : i];
        r.first = extent + roll(0, gap);
        extent = r.first + r.count;
    }
    return runs;
}

/// Writes to the places of a parcel what `seed` tells.
inline void fill(incoming const& to, std::uint64_t seed) {
    for_each_run(to, [&, i = 0ull](std::byte* bytes, std::size_t count) mutable {
        for (std::size_t k = 0; k < count; ++k) bytes[k] = static_cast<std::byte>(mix(seed, i++));
    });
}

/// One end of a message, at places of its own in memory of its own, where all other places hold 0xaa.
class end_of_message {
public:
    end_of_message(shape const& s, std::uint64_t seed) : unit_(s.unit) {
        dice roll(seed);
        index_t width = 0, height = 0;
        rows_ = places(s.rows, s.dense ? 0 : 2, roll, height);
        columns_ = places(s.columns, s.dense ? 0 : 2, roll, width);
        stride_ = width * unit_ + (s.dense ? 0 : roll(0, 7));
        memory_.assign(static_cast<std::size_t>(height * stride_), std::byte{0xaa});
    }

    template <class Byte>
    parcel<Byte> view(int peer) {
        return {peer, memory_.empty() ? nullptr : memory_.data(), stride_, unit_, rows_, columns_};
    }
    void fill(std::uint64_t seed) { detail::fill(view<std::byte>(0), seed); }
    /// Returns whether the message holds what `fill(seed)` makes of it, and every other place what it held.
    bool holds(std::uint64_t seed) const {
        end_of_message wanted = *this;
        std::ranges::fill(wanted.memory_, std::byte{0xaa});
        wanted.fill(seed);
        return memory_ == wanted.memory_;
    }

private:
    std::vector<run> rows_, columns_;
    index_t unit_, stride_;
    std::vector<std::byte> memory_;
};

/// A number for a message of a call, as both ends draw it; `what`: of several.
inline std::uint64_t seed_of(index_t call, int from, int to, std::uint64_t what) {
    return mix(mix(mix(what, static_cast<std::uint64_t>(call)), static_cast<std::uint64_t>(from)),
               static_cast<std::uint64_t>(to));
}

/// Makes one call of `transfer` and returns what is wrong with its outcome. `shape_of(from, to)`: the message from one
/// rank to another, without rows if there is none. All is overwritten and freed as soon as the call returns.
template <class Comm, class ShapeOf>
std::string transfer(Comm& comm, index_t call, ShapeOf&& shape_of) {
    auto const id = std::make_unique<identity>();
    identity::set(id->operation, "test");
    id->numbers[identity::parameter] = static_cast<std::uint64_t>(call);
    auto const seed = [&](int from, int to, std::uint64_t what) { return seed_of(call, from, to, what); };
    int const me = comm.rank();
    std::vector<std::pair<int, end_of_message>> out, in;
    for (int peer = 0; peer < comm.ranks(); ++peer) {
        if (peer == me) continue;
        if (shape const s = shape_of(me, peer); !s.rows.empty()) {
            out.emplace_back(peer, end_of_message(s, seed(me, peer, 1)));
            out.back().second.fill(seed(me, peer, 0));
        }
        if (shape const s = shape_of(peer, me); !s.rows.empty())
            in.emplace_back(peer, end_of_message(s, seed(peer, me, 2)));
    }
    {
        std::vector<outgoing> sends;
        std::vector<incoming> receives;
        for (auto& [peer, end] : out) sends.push_back(end.template view<std::byte const>(peer));
        for (auto& [peer, end] : in) receives.push_back(end.template view<std::byte>(peer));
        comm.transfer(*id, sends, receives);
    }
    *id = {};
    for (auto& [peer, end] : out) {
        if (!end.holds(seed(me, peer, 0)))
            return "the source of a message to rank " + std::to_string(peer) + " differs";
        end.fill(99);
    }
    for (auto const& [peer, end] : in)
        if (!end.holds(seed(peer, me, 0)))
            return "call " + std::to_string(call) + ": the message of rank " + std::to_string(peer) +
                   " is not what it sent, or something beside its places was written";
    return "";
}

/// The messages of one rank at one end of a plan: places in one buffer, those of a peer beneath those of the last one.
class end_of_plan {
public:
    std::vector<message> messages;

    end_of_plan(index_t width, std::uint64_t seed) : roll_(seed), width_(width), stride_(width + roll_(0, 7)) {}
    void add(int peer, shape const& s) {
        index_t const gap = s.dense ? 0 : 2;
        index_t width = 0;
        auto rows = places(s.rows, gap, roll_, count_);
        auto columns = places(s.columns, gap, roll_, width);
        for (run& c : columns) c = {c.first * s.unit, c.count * s.unit};
        messages.push_back({peer, std::move(rows), std::move(columns)});
    }
    index_t count() const { return count_; }
    template <class T>
    rows<T> view(T* data) const {
        return {data, count_, width_, stride_};
    }
    /// Returns a buffer that holds what each message's `seed_of(peer)` tells, and elsewhere what is given.
    template <class F>
    std::vector<unsigned char> filled(unsigned char inside, F&& seed_of) const {
        std::vector<unsigned char> all(static_cast<std::size_t>(count_ * stride_), 0xaa);
        auto const buffer = view(all.data());
        for (index_t i = 0; i < count_; ++i) std::fill_n(buffer.row(i), width_, inside);
        for (incoming const& m : cpx::detail::parcels<std::byte>(std::span(messages), buffer)) fill(m, seed_of(m.peer));
        return all;
    }

private:
    dice roll_;
    index_t count_ = 0, width_, stride_;
};

/// The same between ranks that run plans themselves: by a plan, in which rows stay, too. What it does not fill is 0.
template <device_transport Comm, class ShapeOf>
std::string transfer(Comm& comm, index_t call, ShapeOf&& shape_of) {
    auto const here = caller::here();
    int const me = comm.rank();
    index_t width = 1; // the same on all ranks
    for (int pair = 0; pair < comm.ranks() * comm.ranks(); ++pair) {
        shape const s = shape_of(pair / comm.ranks(), pair % comm.ranks());
        index_t columns = 0;
        for (index_t const count : s.columns) columns += count + (s.dense ? 0 : 2);
        width = std::max(width, columns * s.unit);
    }
    end_of_plan out(width, seed_of(call, me, 0, 1)), in(width, seed_of(call, me, 0, 2));
    for (int peer = 0; peer < comm.ranks(); ++peer) {
        auto const add = [&](end_of_plan& to, shape const& s) {
            if (!s.rows.empty() && (peer != me || s.unit > 0)) to.add(peer, s);
        };
        add(out, shape_of(me, peer));
        add(in, shape_of(peer, me));
    }
    plan p;
    p.rank = me;
    p.source_rows = out.count(), p.sends = out.messages;
    p.target_rows = in.count(), p.receives = in.messages;
    p.source_width = p.target_width = width;
    identity::set(p.id.operation, "test");
    p.id.numbers[identity::ranks] = static_cast<std::uint64_t>(comm.ranks());
    p.id.numbers[identity::parameter] = static_cast<std::uint64_t>(call);
    p.local = true; // both ends know: nothing is to be compared

    auto const source = out.filled(0xaa, [&](int peer) { return seed_of(call, me, peer, 0); }),
               wanted = in.filled(0, [&](int peer) { return seed_of(call, peer, me, 0); });
    auto const memory = comm.memory();
    auto const there = [&](std::vector<unsigned char> const& bytes) {
        auto made = memory.template zeros<unsigned char>("testing", {std::ssize(bytes)}, here);
        memory.write(made.data(), std::span<unsigned char const>(bytes), here);
        return made;
    };
    auto x = there(source), y = there(std::vector<unsigned char>(wanted.size(), 0xaa));
    exchange(p, rows<unsigned char const>(out.view(x.data())), in.view(y.data()), comm, here);
    comm.wait(here);
    auto const read = [&](auto const& block, std::size_t size) {
        return memory.read(std::span<unsigned char const>(block.data(), size), here);
    };
    if (read(x, source.size()) != source) return "the source of a plan differs";
    if (read(y, wanted.size()) == wanted) return "";
    return "call " + std::to_string(call) + ": what has come is not what was sent, or something beside it was written";
}

inline shape bytes(index_t count) { return {{1}, {count}, 1, true}; }

inline void sleep_up_to(index_t us, dice& roll) { std::this_thread::sleep_for(std::chrono::microseconds(roll(0, us))); }

/// Lets rank 0 be many calls ahead of the last rank, with short messages behind long ones: transports that move the two
/// in different ways must keep their order, and those with a place for each message must not run out of places.
template <class Comm>
std::string far_ahead(Comm& comm) {
    int const last = comm.ranks() - 1;
    if (comm.rank() == last) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (index_t call = 0; call < 48; ++call) {
        auto const problem = transfer(comm, call, [&](int from, int to) {
            return from == 0 && to == last ? bytes(call % 3 == 0 ? 1 << 17 : 8 + call) : shape{};
        });
        if (!problem.empty()) return problem;
    }
    return "";
}

} // namespace cpx::testing::detail
