// SPDX-License-Identifier: Apache-2.0
// Operators on GPUs of one process, a thread a rank: the host's results, and the bits of one GPU.
#include <cpx/ops/cuda/conv_exchange.hpp>
#include <cpx/ops/cuda/rotary.hpp>

#include <cpx/ops/causal_conv1d.hpp>
#include <cpx/ops/rotary.hpp>

#include <doctest/doctest.h>

#include "attention_on_ranks.hpp"
#include "convolution.hpp"
#include "either_way.hpp"
#include "group.hpp"

#include <support/rejects.hpp>

namespace {

using namespace convolution;
using cpx::index_t, cpx::rows;
using cpx::sharded, cpx::side;
using support::lengths;
namespace cuda = cpx::cuda;

template <class T, class W>
results empty_results(problem<T, W> const& p) {
    std::vector<double> const tensor(p.x.size(), NAN);
    return {tensor, tensor, std::vector<double>(p.weight.size()), std::vector<double>(p.bias.size())};
}

/// The convolution and its gradients on all GPUs, rows of all tensors `gap` elements apart; its halos by send and
/// receive or through the window.
template <class T, class W, cpx::any_sharding S>
results run(group& gpus, problem<T, W> const& p, S const& sharding, index_t gap, bool window, form const& wanted = {}) {
    results r = empty_results(p);
    std::vector<rank_sums> sums(static_cast<std::size_t>(gpus.ranks()),
                                {std::vector<float>(p.weight.size(), NAN), std::vector<float>(p.bias.size(), NAN)});
    gpus.run([&](cpx::nccl& comm, auto const& meet) {
        int const rank = comm.rank();
        index_t const width = p.channels, count = sharding.rows(rank);
        placement const at{gap, 0};
        cuda::stream const stream;
        auto const local_dy = take(p.dy, width, sharding, rank);
        device_rows<T> const x(take(p.x, width, sharding, rank), width, at), other_x(local_dy, width, at),
            dx(count, width, at), unwanted(count, width, at);
        device_result<T> const y(count, width, at, wanted), dy(local_dy, width, at, wanted);
        device_rows<W> const weight_rows(p.weight, p.taps, {});
        rows<W const> const weight = weight_rows;
        cuda::buffer<W> const bias_values{std::span<W const>(p.bias)};
        std::span<W const> const bias(bias_values.data(), p.bias.size());
        device_rows<float> const dweight(std::vector<float>(p.weight.size()), p.taps, {});
        cuda::buffer<float> const dbias{std::span<float const>(std::vector<float>(p.bias.size()))};
        auto const of = [&](auto const& tensor) {
            return sharded(tensor.view(), sharding, rank, cuda::memory(stream));
        };
        meet();
        S const first(lengths({3, 1}), sharding.policy(), sharding.cut()); // then comes another batch
        either_way ranks(comm, stream, window);
        cuda::conv_exchange<T, S> by(
            cpx::halo(first, rank, p.taps - 1), cpx::halo(first, rank, p.taps - 1, side::after), width, ranks.comm(),
            {.x_stride = width + gap, .most = {p.batch.tokens() + 4, p.batch.sequences() + 2}});
        meet();
        auto const formed = [&]<class R>(R const& result) {
            if constexpr (requires { result.stride(); })
                return sharded(result, sharding, rank, cuda::memory(stream));
            else
                return result; // parts
        };
        y.template as<T>([&](auto const& out) { cuda::causal_conv1d(by, of(x), weight, bias, p.act, formed(out)); });
        cuda::causal_conv1d(by, of(other_x), weight, bias, p.act, of(unwanted)); // another layer's halo
        dy.template as<T const>([&](auto const& given) {
            cuda::causal_conv1d_backward(by, of(x), weight, bias, p.act, formed(given),
                                         {of(dx), dweight, std::span(dbias.data(), p.bias.size())});
        });
        ranks.wait();
        meet();
        place(y.read(), sharding, rank, width, r.y);
        place(dx.read(), sharding, rank, width, r.dx);
        sums[static_cast<std::size_t>(rank)] = {dweight.read(), dbias.read()};
    });
    for (auto* const whole : {&r.y, &r.dx}) gpus.share(*whole);
    for (auto& [dweight, dbias] : sums) gpus.share(dweight), gpus.share(dbias);
    add_sums(r, sums);
    return r;
}

/// The same on one GPU, without the sums: no halos, no exchange.
template <class T, class W>
results alone(problem<T, W> const& p, form const& wanted = {}) {
    results r = empty_results(p);
    auto const sharding = on_ranks::one_rank(p.batch);
    cuda::conv_plan const plan(cpx::halo(sharding, 0, p.taps - 1), cpx::halo(sharding, 0, p.taps - 1, side::after));
    cuda::stream const stream;
    index_t const width = p.channels;
    device_rows<T> const x(p.x, width, {}), dx(plan.rows(), width, {});
    device_result<T> const dy(p.dy, width, {}, wanted), y(plan.rows(), width, {}, wanted);
    device_rows<W> const weight(p.weight, p.taps, {});
    cuda::buffer<W> const bias_values{std::span<W const>(p.bias)};
    std::span<W const> const bias(bias_values.data(), p.bias.size());
    y.template as<T>(
        [&](auto const& out) { cuda::causal_conv1d(plan, x.view(), {}, weight.view(), bias, p.act, out, stream); });
    dy.template as<T const>([&](auto const& given) {
        cuda::causal_conv1d_backward(plan, x.view(), {}, weight.view(), bias, p.act, given, {}, {}, {dx}, stream);
    });
    place(y.read(), sharding, 0, width, r.y);
    place(dx.read(), sharding, 0, width, r.dx);
    return r;
}

/// The host's operators in double on the same sharding.
template <class T, class W, cpx::any_sharding S>
results on_host(problem<T, W> const& p, S const& sharding) {
    results r = empty_results(p);
    auto const x_all = convert<double>(p.x), dy_all = convert<double>(p.dy), weights = convert<double>(p.weight),
               bias = convert<double>(p.bias);
    std::vector<results> sums(static_cast<std::size_t>(sharding.ranks()), {{}, {}, r.dweight, r.dbias});
    cpx::threads::run(sharding.ranks(), [&](cpx::threads& comm) {
        int const rank = comm.rank();
        index_t const width = p.channels, count = sharding.rows(rank);
        auto const before = cpx::halo(sharding, rank, p.taps - 1),
                   after = cpx::halo(sharding, rank, p.taps - 1, side::after);
        auto const x = take(x_all, width, sharding, rank), dy = take(dy_all, width, sharding, rank);
        std::vector<double> y(x.size(), NAN), dx(x.size(), NAN);
        rows<double const> const weight(weights, p.taps);
        auto const of = [&](auto& values) { return sharded(rows(values.data(), count, width), sharding, rank); };
        auto& [no_y, no_dx, dweight, dbias] = sums[static_cast<std::size_t>(rank)];
        cpx::causal_conv1d(before, of(x), weight, std::span<double const>(bias), p.act, of(y), comm);
        cpx::causal_conv1d_backward(before, after, of(x), weight, std::span<double const>(bias), p.act, of(dy),
                                    {of(dx), rows<double>(dweight, p.taps), dbias}, comm);
        place(y, sharding, rank, width, r.y);
        place(dx, sharding, rank, width, r.dx);
    });
    for (results const& of_rank : sums) {
        std::ranges::transform(r.dweight, of_rank.dweight, r.dweight.begin(), std::plus());
        std::ranges::transform(r.dbias, of_rank.dbias, r.dbias.begin(), std::plus());
    }
    return r;
}

/// Heads to rotate, and the gradient of the result: x and dy of a problem of `heads * head_dim` channels.
constexpr index_t head_dim = 12, heads = 3;
constexpr cpx::rotary_options rotary_options{1e4, 8};

/// Rotates x on all GPUs, and dy back.
template <class T, class W, cpx::any_sharding S>
results rotate(group& gpus, problem<T, W> const& p, S const& sharding) {
    results r = empty_results(p);
    gpus.run([&](cpx::nccl& comm, auto const&) {
        int const rank = comm.rank();
        cuda::stream const stream;
        cuda::rotary_pairs const pairs(cpx::rotary_frequencies<double>(rotary_options));
        cuda::segment_table const positions(cpx::segments(sharding, rank));
        device_rows<T> const x(take(p.x, p.channels, sharding, rank), p.channels, {}),
            y(sharding.rows(rank), p.channels, {}), dy(take(p.dy, p.channels, sharding, rank), p.channels, {});
        auto const of = [&](rows<T> tensor) { return sharded(tensor, sharding, rank, cuda::memory(stream)); };
        cuda::rotary(of(x), head_dim, pairs, positions, of(y));
        cuda::rotary_backward(of(dy), head_dim, pairs, positions, of(dy));
        place(y.read(), sharding, rank, p.channels, r.y);
        place(dy.read(), sharding, rank, p.channels, r.dx);
    });
    for (auto* const whole : {&r.y, &r.dx}) gpus.share(*whole);
    return r;
}

template <class T, class W, cpx::any_sharding S>
results rotate_on_host(problem<T, W> const& p, S const& sharding) {
    results r = empty_results(p);
    auto const x_all = convert<double>(p.x), dy_all = convert<double>(p.dy);
    for (int rank = 0; rank < sharding.ranks(); ++rank) {
        auto x = take(x_all, p.channels, sharding, rank), dy = take(dy_all, p.channels, sharding, rank);
        auto const of = [&](auto& values) {
            return sharded(rows(values.data(), sharding.rows(rank), p.channels), sharding, rank);
        };
        cpx::rotary(of(x), head_dim, rotary_options, of(x));
        cpx::rotary_backward(of(dy), head_dim, rotary_options, of(dy));
        place(x, sharding, rank, p.channels, r.y);
        place(dy, sharding, rank, p.channels, r.dx);
    }
    return r;
}

/// Calls `f(name, sharding)` with layouts over both scopes, and one whose rank 0 has more than half of the rows.
template <class F>
void for_each_sharding(cpx::thd const& batch, int ranks, F&& f) {
    f("sequential over sequence", cpx::shard(batch, cpx::sequential<>(ranks)));
    f("sequential over batch", cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(ranks)));
    f("zigzag over sequence", cpx::shard(batch, cpx::zigzag<>(ranks)));
    f("zigzag over batch", cpx::shard<cpx::scope::batch>(batch, cpx::zigzag<>(ranks)));
    std::vector<int> owners(static_cast<std::size_t>(2 * ranks), 0);
    for (int rank = 1; rank < ranks; ++rank) owners[static_cast<std::size_t>(2 * rank)] = rank;
    f("a table that is uneven", cpx::shard(batch, cpx::table(ranks, owners)));
}

/// Calls `f(gpus)` with two ranks, and with four or three if there are GPUs for them.
template <class F>
void on_groups(F&& f) {
    int const all = usable_ranks(4);
    for (int const ranks : {2, 3, 4})
        if (ranks == 2 || ranks == all) {
            group gpus(ranks);
            CAPTURE(ranks);
            f(gpus);
        }
}

/// A communicator for each rank of a group; its exchanges are ended before others allocate memory.
struct communicators {
    group& gpus;

    template <class F>
    void run(F&& program) {
        gpus.run([&](cpx::nccl& nccl, auto const& meet) {
            cuda::stream const stream;
            cuda::communicator comm(nccl, stream);
            auto const ended = [&] {
                comm.wait();
                meet();
            };
            program(comm, ended);
            ended();
        });
    }
};

// of {64, 0, 40} lanes tell what moves, also of 8 taps between 2 ranks
std::vector<index_t> const packings[] = {{37, 0, 8, 21}, {100, 3, 257}, {64, 0, 40}, {5, 1, 0, 12, 3}, {1}, {0, 0}, {}};

template <class T, class W>
struct kind {
    using element = T;
    using weight = W;
};

} // namespace

TEST_SUITE("cuda") {
    namespace cuda = cpx::cuda; // not ::cuda, of the toolkit
    using cpx::index_t;

    TEST_CASE_TEMPLATE("the convolution between GPUs is the host's, with the bits of one GPU", K, kind<float, float>,
                       kind<__nv_bfloat16, float>) {
        if (!has_gpus(2)) return;
        using T = typename K::element;
        on_groups([](group& gpus) {
            std::uint64_t seed = 0;
            int count = 0;
            for (index_t const taps : {4, 8, 1})
                for (auto const& packing : packings) {
                    ++seed;
                    problem<T, typename K::weight> const p(lengths(packing), seed % 2 ? 8 : 5, taps, seed % 3 != 0,
                                                           seed % 5 ? activation::silu : activation::none, seed);
                    CAPTURE(p.text());
                    auto const expected = alone(p);
                    for_each_sharding(p.batch, gpus.ranks(), [&](char const* name, auto const& sharding) {
                        CAPTURE(name);
                        auto const r = run(gpus, p, sharding, seed % 4 ? 0 : 8, ++count % 2 == 0);
                        check_same("y", r.y, expected.y);
                        check_same("dx", r.dx, expected.dx);
                        check_close<T>(r, on_host(p, sharding));
                    });
                }
        });
    }

    TEST_CASE("parts with normalised heads have the bits of one GPU") {
        if (!has_gpus(2)) return;
        on_groups([](group& gpus) {
            int count = 0;
            for (auto const& packing : packings) {
                problem<__nv_bfloat16, float> const p(lengths(packing), 88, 4, true, activation::silu, 31);
                CAPTURE(p.text());
                form const wanted{{{32, 16}, {32, 32}, {24}}};
                auto const expected = alone(p, wanted);
                for_each_sharding(p.batch, gpus.ranks(), [&](char const* name, auto const& sharding) {
                    CAPTURE(name);
                    auto const r = run(gpus, p, sharding, 0, ++count % 2 == 0, wanted);
                    check_same("y", r.y, expected.y);
                    check_same("dx", r.dx, expected.dx);
                });
            }
        });
    }

    TEST_CASE_TEMPLATE("the rotation between GPUs is the host's, with the bits of one GPU", T, float, __nv_bfloat16) {
        if (!has_gpus(2)) return;
        on_groups([](group& gpus) {
            group one(1);
            for (auto const& packing : packings) {
                problem<T, float> const p(lengths(packing), heads * head_dim, 0, false, activation::none, 7);
                CAPTURE(p.text());
                auto const expected = rotate(one, p, on_ranks::one_rank(p.batch));
                for_each_sharding(p.batch, gpus.ranks(), [&](char const* name, auto const& sharding) {
                    CAPTURE(name);
                    auto const r = rotate(gpus, p, sharding);
                    check_same("y", r.y, expected.y);
                    check_same("dx", r.dx, expected.dx);
                    check_close<T>(r, rotate_on_host(p, sharding));
                });
            }
        });
    }

    TEST_CASE("attention between GPUs has the bits of one GPU") {
        if (!has_gpus(2)) return;
        using attention_on_ranks::results;
        auto const p = attention_on_ranks::random_problem<float>(lengths({70, 1, 0, 33}), {24, 12, 8}, 5);
        auto const zigzag = [&](int ranks) { return cpx::shard(p.batch, cpx::zigzag<>(ranks)); };
        group one(1);
        results alone(p);
        attention_on_ranks::gathered<float>(communicators{one}, p, zigzag(1), alone);
        on_groups([&](group& gpus) {
            results by_tokens(p), by_heads(p);
            attention_on_ranks::gathered<float>(communicators{gpus}, p, zigzag(gpus.ranks()), by_tokens);
            for (auto& whole : by_tokens.of) gpus.share(whole);
            attention_on_ranks::check_same(by_tokens, alone);
            attention_on_ranks::by_heads<float>(communicators{gpus}, p, gpus.ranks(), by_heads);
            for (auto& whole : by_heads.of) gpus.share(whole);
            attention_on_ranks::check_same(by_heads, alone);
        });
    }

    TEST_CASE("every rank refuses what does not fit, and goes on") {
        if (!has_gpus_apart(2)) return; // one has memory on the other's
        group gpus(2);
        auto const sharding = cpx::shard(lengths({7, 6}), cpx::zigzag<>(2)),
                   other = cpx::shard(lengths({6, 7}), cpx::zigzag<>(2));
        using S = std::remove_const_t<decltype(sharding)>;
        using convolver = cuda::conv_exchange<float, S>;
        gpus.run([&](cpx::nccl& comm, auto const& meet) {
            int const rank = comm.rank(), neighbour = 1 - rank;
            auto const before = cpx::halo(sharding, rank, 3), after = cpx::halo(sharding, rank, 3, side::after);
            index_t const count = sharding.rows(rank);
            cuda::stream const stream, another_stream;
            cuda::communicator ranks(comm, stream);
            cuda::memory const& device = ranks.memory();
            using view = sharded<float, S, cuda::memory>;
            cuda::buffer<float> const memory{std::span<float const>(std::vector<float>(1000))};
            cuda::use_device(neighbour);
            cuda::buffer<float> const far(1000);
            cuda::use_device(rank);
            rows<float> const tensor(memory.data(), count, 5), result(memory.data() + 200, count, 5);
            rows<float const> const weight(memory.data() + 400, 5, 4);
            using support::rejects;
            meet();
            rejects({"nccl_operators.cu", "cuda::conv_exchange: rank of the plan"},
                    [&] { convolver(cpx::halo(sharding, neighbour, 3), 5, ranks); });
            rejects({"nccl_operators.cu", "ranks disagree on source width"},
                    [&] { convolver(before, 5 + rank, ranks); });
            meet();
            rejects({"nccl_operators.cu", "ranks disagree on operation"}, [&] {
                if (rank == 0)
                    convolver(before, 5, ranks);
                else
                    convolver(before, after, 5, ranks);
            });
            meet();
            convolver forward(before, 5, ranks);
            meet();
            convolver by(before, after, 5, ranks);
            meet();
            auto const forwards = [&](view const& x, view const& y) {
                return [&, x, y] { cuda::causal_conv1d(by, x, weight, {}, activation::silu, y); };
            };
            auto const backwards = [&](convolver& with, view const& dy, view const& dx) {
                return [&, dy, dx] {
                    cuda::causal_conv1d_backward(with, sharded(tensor, sharding, rank, device), weight, {},
                                                 activation::silu, dy, {dx});
                };
            };
            sharded const in(tensor, sharding, rank, device), out(result, sharding, rank, device),
                elsewhere(tensor, other, rank, device), later(result, sharding, rank, cuda::memory(another_stream)),
                narrow(rows<float>(memory.data(), count, 4), sharding, rank, device),
                of_neighbour(rows<float>(far.data(), count, 5), sharding, rank, device);
            std::string const text = "cuda::causal_conv1d: ", back = "cuda::causal_conv1d_backward: ";
            rejects({"nccl_operators.cu", text + "sharding of x: expected that of the conv_exchange"},
                    forwards(elsewhere, out));
            rejects({text + "sharding of y"}, forwards(in, elsewhere));
            rejects({text + "stream of y"}, forwards(in, later));
            rejects({text + "width of x: expected 5, got 4"}, forwards(narrow, out));
            rejects({text + "width of y: expected 5, got 4"}, forwards(in, narrow));
            rejects({text + "x: expected memory of the current device, " + std::to_string(rank) +
                     ", got memory of device " + std::to_string(neighbour)},
                    forwards(of_neighbour, out));
            rejects({text + "y: expected memory of the current device"}, forwards(in, of_neighbour));
            rejects({"nccl_operators.cu", text + "overlap of y and x: expected none, got some"}, forwards(in, in));
            rejects({"nccl_operators.cu", back + "overlap of dx and x: expected none, got some"},
                    backwards(by, in, in));
            rejects({"nccl_operators.cu", back + "plan of rows after"}, backwards(forward, in, out));
            rejects({back + "sharding of dy"}, backwards(by, elsewhere, out));
            rejects({back + "sharding of dx"}, backwards(by, in, elsewhere));
            rejects({back + "dx: expected memory of the current device"}, backwards(by, in, of_neighbour));
            cuda::use_device(neighbour);
            rejects({text + "current device: expected " + std::to_string(rank)}, forwards(in, out));
            cuda::use_device(rank);
            forwards(in, out)();
            backwards(by, in, out)();
            comm.wait(stream);
            meet();
        });
    }
}
