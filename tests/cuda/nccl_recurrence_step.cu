// SPDX-License-Identifier: Apache-2.0
// Recurrences of tensors on devices where every sequence has a token at most, which are steps from state to state.
#include <cpx/ops/cuda/gated_delta_rule.hpp>
#include <cpx/ops/cuda/head_decay_attention.hpp>

#include <cpx/cuda/elements.hpp>

#include <doctest/doctest.h>

#include "group.hpp"

#include <ops/reference.hpp>

#include <mutex>
#include <type_traits>

namespace {

using cpx::index_t, cpx::rows;
using on_ranks::by_tokens;
using numbers = std::vector<double>;

template <class To, class From>
std::vector<To> convert(std::vector<From> const& values) {
    std::vector<To> list;
    for (From const x : values) list.push_back(static_cast<To>(static_cast<float>(x)));
    return list;
}

enum class rule { gated_delta, head_decay };
/// What a call wants: the next states where the given ones are, or beside them, or a backward, too.
enum class wanted { in_place, beside, saved };

/// Returns outputs and states, token by token.
reference::result<double> expected(reference::delta<double> p, rule of) {
    if (of == rule::gated_delta) return run(p);
    auto const& h = p.heads;
    reference::result<double> r{numbers(static_cast<std::size_t>(p.batch.tokens() * h.value_heads * h.value_dim)),
                                p.initial};
    index_t const width = on_ranks::width(p.sections()), keys = h.key_heads * h.key_dim,
                  values = h.value_heads * h.value_dim;
    for (index_t s = 0; s < p.batch.sequences(); ++s)
        for (index_t row = p.batch.offset(s); row < p.batch.offset(s + 1); ++row)
            for (index_t head = 0; head < h.value_heads; ++head) {
                double const* const x = p.x.data() + row * width;
                double const* const q = x + head / (h.value_heads / h.key_heads) * h.key_dim;
                double const decay = std::exp(x[2 * keys + values + head]);
                double* const state = r.final.data() + (s * h.value_heads + head) * p.state();
                for (index_t c = 0; c < h.value_dim; ++c) {
                    double o = 0;
                    for (index_t d = 0; d < h.key_dim; ++d) {
                        double& cell = state[d * h.value_dim + c];
                        cell = decay * cell + q[keys + d] * x[2 * keys + head * h.value_dim + c];
                        o += cell * q[d];
                    }
                    r.o[static_cast<std::size_t>((row * h.value_heads + head) * h.value_dim + c)] =
                        o / std::sqrt(static_cast<double>(h.key_dim));
                }
            }
    return r;
}

/// Runs a problem on GPUs; of states that a rank must not write it has poison, and poison stays.
template <class T, class S>
reference::result<double> on_gpus(group& gpus, reference::delta<double> const& p, rule of, S const& sharding,
                                  wanted what) {
    index_t const heads = p.heads.value_heads, sequences = p.batch.sequences(), state = p.state();
    numbers o(static_cast<std::size_t>(p.batch.tokens() * heads * p.heads.value_dim), NAN);
    numbers final(p.initial.size(), NAN);
    std::mutex guard;
    gpus.run([&](cpx::nccl& joined, auto const& meet) {
        cpx::cuda::stream const stream;
        {
            cpx::cuda::communicator comm(joined, stream);
            cpx::cuda::state_exchange by(comm);
            int const rank = comm.rank();
            auto const memory = comm.memory();
            cpx::range const held = sharding.heads(rank, heads);
            index_t const local = held.size() * state;
            auto const whole = on_ranks::take(p.x, p.sections(), sharding, rank);
            auto const tensor = [&]<class E>(E, index_t first, index_t width) {
                auto made = cpx::make_tensor<E>(sharding, rank, width, memory);
                std::vector<E> values;
                for (index_t row = 0; row < whole.data().count(); ++row)
                    for (index_t c = first; c < first + width; ++c)
                        values.push_back(static_cast<E>(static_cast<float>(whole.data()(row, c))));
                made.write(values);
                return made;
            };
            index_t const n = held.size(), k = sharding.heads(rank, p.heads.key_heads).size() * p.heads.key_dim,
                          v = n * p.heads.value_dim;
            auto const q = tensor(T(), 0, k), keys = tensor(T(), k, k), values = tensor(T(), 2 * k, v);
            auto const g = tensor(float(), 2 * k + v, n), beta = tensor(float(), 2 * k + v + n, n);
            auto out = cpx::make_tensor<T>(sharding, rank, v, memory);
            auto const given =
                convert<float>(reference::states_on(sharding, rank, heads, state, p.initial, cpx::side::before));
            auto before = memory.template zeros<float>("test", {sequences, local});
            auto after = memory.template zeros<float>("test", {sequences, local});
            memory.write(before.data(), std::span<float const>(given));
            memory.write(after.data(), std::span<float const>(std::vector<float>(given.size(), NAN)));
            rows<float> const of_before(before.data(), sequences, local), of_after(after.data(), sequences, local);
            rows<float> const to = what == wanted::in_place ? of_before : of_after;
            cpx::recurrence_saved<T, cpx::cuda::memory> saved;
            auto* const keep = what == wanted::saved ? &saved : nullptr;
            auto const plan = cpx::carry<cpx::scan>(sharding, rank);
            meet();
            if (of == rule::gated_delta) {
                cpx::delta_rule_tensors<T, S, cpx::cuda::memory> const t{q,   keys,      values, g,   beta,
                                                                         out, of_before, to,     keep};
                cpx::gated_delta_rule(plan, t, p.heads, p.options, by);
            } else {
                cpx::head_decay_tensors<T, S> const t{q, keys, values, g, out, of_before, to, keep};
                cpx::recur(plan, cpx::head_decay_attention{p.heads}, t, by);
            }
            comm.wait();
            bool const steps = what != wanted::saved, some = sharding.rows(rank) > 0;
            index_t const others = by.calls.plain + by.calls.on_tensor_cores;
            cpx::require(by.calls.steps == (steps && some ? 1 : 0), "test", "steps", steps && some ? 1 : 0,
                         by.calls.steps);
            cpx::require((others > 0) == (!steps && some), "test", "other calls", steps ? "none" : "some", others);

            auto const written = memory.read(std::span<float const>(to.data(), given.size()));
            auto const rows_written = out.read();
            std::lock_guard const lock(guard);
            for (index_t s = 0; s < sequences; ++s)
                for (index_t i = 0; i < local; ++i)
                    if (float const x = written[static_cast<std::size_t>(s * local + i)]; !std::isnan(x))
                        final[static_cast<std::size_t>((s * heads + held.first) * state + i)] = x;
            auto from = rows_written.begin();
            sharding.for_each_piece(rank, [&](cpx::range piece) {
                for (index_t row = piece.first; row < piece.last; ++row)
                    for (index_t c = 0; c < v; ++c)
                        o[static_cast<std::size_t>(row * heads * p.heads.value_dim + held.first * p.heads.value_dim +
                                                   c)] = static_cast<float>(*from++);
            });
        }
        meet();
    });
    gpus.share(o);
    gpus.share(final);
    return {o, final};
}

template <class T>
void check(rule of, cpx::delta_rule_heads const& heads, double most) {
    auto const batch = support::lengths({1, 0, 1, 1, 0, 1, 1, 1});
    auto p = reference::random_delta<double>(batch, heads, {.qk_l2norm = of == rule::gated_delta}, 0.3, true, 21);
    for (double& x : p.x) x = static_cast<float>(static_cast<T>(static_cast<float>(x)));
    auto const exact = expected(p, of);
    group one(1), gpus(2);
    for (wanted const what : {wanted::in_place, wanted::beside, wanted::saved}) {
        CAPTURE(static_cast<int>(what));
        auto const alone = on_gpus<T>(one, p, of, on_ranks::one_rank(batch), what);
        CHECK(on_ranks::relative_error(alone.o, exact.o) <= most);
        CHECK(on_ranks::relative_error(alone.final, exact.final) <= most);
        auto const check_same = [&](auto const& sharding) {
            auto const got = on_gpus<T>(gpus, p, of, sharding, what);
            CHECK(on_ranks::same_bits(got.o, alone.o));
            CHECK(on_ranks::same_bits(got.final, alone.final));
        };
        check_same(by_tokens(cpx::shard(batch, cpx::zigzag<>(2))));
        check_same(by_tokens(cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(2))));
        check_same(cpx::head_sharded<>(2, batch, p.sections()));
    }
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("a token of each sequence that goes on is a step between states, in place or beside them, on any ranks") {
        if (!has_gpus(2)) return;
        for (rule const of : {rule::gated_delta, rule::head_decay}) {
            CAPTURE(static_cast<int>(of));
            check<float>(of, {2, 4, 40, 24}, 6e-6); // as of kernels that no step is, where a backward is wanted
            check<__nv_bfloat16>(of, {2, 4, 128, 128}, 4.7e-3);
        }
    }
}
