// SPDX-License-Identifier: Apache-2.0
// Attention and its backward on the ranks of any sharding on devices, each way to run them, and on the host.
#pragma once

#include <cpx/ops/cuda/attention.hpp>

#include <doctest/doctest.h>

#include <ops/attention.hpp>

#include <mutex>

namespace attention_on_ranks {

using cpx::index_t;
using numbers = std::vector<double>;

/// Whole tensors, which a T holds exactly.
struct problem {
    cpx::thd batch;
    cpx::attention_heads heads;
    double scale;
    numbers q, k, v, dout;

    cpx::section queries() const { return {heads.query_heads, heads.dim}; }
    cpx::section keys() const { return {heads.key_heads, heads.dim}; }
    cpx::section per_query() const { return {heads.query_heads, 1}; }
};

template <class T>
problem random_problem(cpx::thd const& batch, cpx::attention_heads const& heads, std::uint64_t seed) {
    auto const p = reference::random_attention<float>(batch, heads, seed);
    support::splitmix random(seed + 1000);
    auto const rounded = [](std::vector<float> const& values) {
        numbers list;
        for (float const x : values) list.push_back(static_cast<double>(static_cast<float>(static_cast<T>(x))));
        return list;
    };
    return {batch,
            heads,
            p.scale,
            rounded(p.q),
            rounded(p.k),
            rounded(p.v),
            rounded(on_ranks::uniform<float>(random, std::ssize(p.q), 2))};
}

char const* const names[] = {"o", "lse", "dq", "dk", "dv"};

/// Whole results in the order of `names`; NaN where nobody has written, and where ranks have written other bits.
struct results {
    std::vector<numbers> of;
    std::mutex guard;

    explicit results(problem const& p)
        : of{p.q, numbers(static_cast<std::size_t>(p.batch.tokens() * p.heads.query_heads)), p.q, p.k, p.k} {
        for (numbers& values : of) std::ranges::fill(values, NAN);
    }
    template <class X>
    void put(std::size_t which, X const& local, cpx::section const& s) {
        auto const values = local.read();
        auto const held = on_ranks::columns(local.sharding(), local.rank(), {s});
        std::lock_guard const lock(guard);
        auto from = values.begin();
        local.sharding().for_each_piece(local.rank(), [&](cpx::range piece) {
            for (index_t row = piece.first; row < piece.last; ++row)
                for (index_t const c : held) {
                    double& to = of[which][static_cast<std::size_t>(row * s.heads * s.width + c)];
                    auto const value = static_cast<double>(static_cast<float>(*from++));
                    to = std::isnan(to) || on_ranks::same_bits(to, value) ? value : NAN;
                }
        });
    }
};
inline void check_same(results const& a, results const& b) {
    for (std::size_t i = 0; i < a.of.size(); ++i) {
        CAPTURE(names[i]);
        CHECK(on_ranks::same_bits(a.of[i], b.of[i]));
    }
}
template <class T>
void check_close(results const& found, results const& exact) {
    double const rounding = sizeof(T) == 4 ? 2e-6 : std::same_as<T, __half> ? 1e-3 : 6e-3;
    for (std::size_t i = 0; i < found.of.size(); ++i) {
        CAPTURE(names[i]);
        CHECK(on_ranks::relative_error(found.of[i], exact.of[i]) < (i == 1 ? 2e-6 : rounding));
    }
}

/// Tensors of a rank on a device: cut from whole ones, or full of NaN.
template <class T, class Comm, cpx::any_sharding S>
auto take(numbers const& whole, cpx::section const& s, S const& sharding, Comm const& comm) {
    auto const local = on_ranks::take(whole, {s}, sharding, comm.rank());
    auto there = cpx::make_tensor<T>(sharding, comm, local.width());
    std::vector<T> values;
    for (double const x : local.elements()) values.push_back(static_cast<T>(static_cast<float>(x)));
    there.write(values);
    return there;
}
template <class T, class Comm, cpx::any_sharding S>
auto room(cpx::section const& s, S const& sharding, Comm const& comm) {
    auto there = cpx::make_tensor<T>(sharding, comm, sharding.heads(comm.rank(), s.heads).size() * s.width);
    there.write(std::vector<T>(there.elements().size(), static_cast<T>(NAN)));
    return there;
}

/// How gradients of keys are computed where tokens are sharded: from all queries, or from this rank's for all keys.
enum class keys_from { all_queries, own_queries };

/// `group.run(program)` calls `program(comm, ended)` on every rank; `ended()` ends an exchange. Queries where
/// `sharding` has them, keys and values gathered.
template <class T, class Group, cpx::any_sharding S>
void gathered(Group&& group, problem const& p, S const& sharding, results& to, keys_from way = keys_from::all_queries) {
    group.run([&](auto& comm, auto const& ended) {
        auto const queries = p.queries(), keys = p.keys();
        auto const moved = [&](auto const& x, auto const& where) {
            auto there = exchange(x, where, comm);
            ended();
            return there;
        };
        cpx::replicated<> const everywhere(sharding.ranks(), p.batch);
        auto const q = take<T>(p.q, queries, sharding, comm), dout = take<T>(p.dout, queries, sharding, comm),
                   own_k = take<T>(p.k, keys, sharding, comm), own_v = take<T>(p.v, keys, sharding, comm);
        auto o = room<T>(queries, sharding, comm), dq = room<T>(queries, sharding, comm),
             dk = room<T>(keys, sharding, comm), dv = room<T>(keys, sharding, comm);
        auto lse = room<float>(p.per_query(), sharding, comm), delta = room<float>(p.per_query(), sharding, comm);
        auto const k = moved(own_k, everywhere), v = moved(own_v, everywhere);
        cpx::attention(q, k, v, p.heads, p.scale, o, lse);
        cpx::attention_delta(o, dout, p.heads.dim, delta);
        cpx::attention_queries const own{q, dout, lse, delta};
        cpx::attention_backward_queries(own, k, v, p.heads, p.scale, dq);
        if (way == keys_from::all_queries) {
            auto const all_q = moved(q, everywhere), all_dout = moved(dout, everywhere);
            auto const all_lse = moved(lse, everywhere), all_delta = moved(delta, everywhere);
            cpx::attention_queries const all{all_q, all_dout, all_lse, all_delta};
            cpx::attention_backward_keys(all, own_k, own_v, p.heads, p.scale, dk, dv, comm);
        } else {
            auto all_dk = room<T>(keys, everywhere, comm), all_dv = room<T>(keys, everywhere, comm);
            cpx::attention_backward_keys(own, k, v, p.heads, p.scale, all_dk, all_dv, comm);
            auto const home = relayout(sharding, everywhere, comm.rank()).transposed();
            exchange(home, all_dk, dk, comm);
            ended();
            exchange(home, all_dv, dv, comm);
            ended();
        }
        to.put(0, o, queries);
        to.put(1, lse, p.per_query());
        to.put(2, dq, queries);
        to.put(3, dk, keys);
        to.put(4, dv, keys);
    });
}

/// All tokens of some heads on every rank.
template <class T, class Group>
void by_heads(Group&& group, problem const& p, int ranks, results& to) {
    group.run([&](auto& comm, auto const& ended) {
        auto const queries = p.queries(), keys = p.keys();
        cpx::head_sharded<> const split(ranks, p.batch, {queries, keys, keys});
        auto const q = take<T>(p.q, queries, split, comm), dout = take<T>(p.dout, queries, split, comm),
                   k = take<T>(p.k, keys, split, comm), v = take<T>(p.v, keys, split, comm);
        auto o = room<T>(queries, split, comm), dq = room<T>(queries, split, comm), dk = room<T>(keys, split, comm),
             dv = room<T>(keys, split, comm);
        auto lse = room<float>(p.per_query(), split, comm), delta = room<float>(p.per_query(), split, comm);
        cpx::attention(q, k, v, p.heads, p.scale, o, lse);
        cpx::attention_delta(o, dout, p.heads.dim, delta);
        cpx::attention_queries const own{q, dout, lse, delta};
        cpx::attention_backward_queries(own, k, v, p.heads, p.scale, dq);
        cpx::attention_backward_keys(own, k, v, p.heads, p.scale, dk, dv, comm);
        ended();
        to.put(0, o, queries);
        to.put(1, lse, p.per_query());
        to.put(2, dq, queries);
        to.put(3, dk, keys);
        to.put(4, dv, keys);
    });
}

/// One rank of the host, in double.
inline void on_host(problem const& p, results& to) {
    cpx::replicated<> const whole(1, p.batch);
    auto const on = [&](numbers& x, cpx::section const& s) {
        return cpx::sharded<double, cpx::replicated<>>({x.data(), p.batch.tokens(), s.heads * s.width}, whole, 0);
    };
    auto of = p;
    numbers of_delta(to.of[1].size());
    auto const q = on(of.q, p.queries()), dout = on(of.dout, p.queries()), k = on(of.k, p.keys()),
               v = on(of.v, p.keys()), o = on(to.of[0], p.queries()), lse = on(to.of[1], p.per_query()),
               dq = on(to.of[2], p.queries()), dk = on(to.of[3], p.keys()), dv = on(to.of[4], p.keys()),
               delta = on(of_delta, p.per_query());
    cpx::attention(q, k, v, p.heads, p.scale, o, lse);
    cpx::attention_delta(o, dout, p.heads.dim, delta);
    cpx::attention_queries const from{q, dout, lse, delta};
    cpx::attention_backward_queries(from, k, v, p.heads, p.scale, dq);
    cpx::threads::run(
        1, [&](cpx::threads& comm) { cpx::attention_backward_keys(from, k, v, p.heads, p.scale, dk, dv, comm); });
}

} // namespace attention_on_ranks
