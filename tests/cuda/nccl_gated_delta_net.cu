// SPDX-License-Identifier: Apache-2.0
// The gated delta net layer of tensors on devices: the host's results, gradients and decoding, in place and by heads.
#include <cpx/ops/decode.hpp>
#include <cpx/ops/gated_delta_net_backward.hpp>

#include <cpx/ops/cuda/causal_conv1d.hpp>
#include <cpx/ops/cuda/gated_delta_rule.hpp>
#include <cpx/ops/cuda/norm.hpp>

#include <cpx/cuda/elements.hpp>
#include <cpx/transport/sum.hpp>

#include <doctest/doctest.h>

#include "../../harness/graph.hpp"
#include "../../harness/net_parameters.hpp"
#include "group.hpp"
#include "held_stream.hpp"

#include <ops/backward.hpp>
#include <support/rejects.hpp>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <type_traits>
#include <utility>

namespace {

using cpx::index_t, cpx::rows;
using floats = std::vector<float>;
using on_ranks::by_tokens;
using reference::layer;

/// c = before c + a b^T, an element one sum in float.
template <class T, class C>
struct product {
    rows<T const> a, b;
    bool a_turned, b_turned;
    index_t inner;
    float before;
    rows<C> c;
    __device__ void operator()(index_t i, index_t j) const {
        float sum = before == 0 ? 0 : static_cast<float>(c(i, j));
        for (index_t k = 0; k < inner; ++k)
            sum += static_cast<float>(a_turned ? a(k, i) : a(i, k)) * static_cast<float>(b_turned ? b(k, j) : b(j, k));
        c(i, j) = static_cast<C>(sum);
    }
};

/// Device memory full of NaN when it comes: what an operator has not written it must not read.
class poisoned final : public cpx::cuda::memory_resource {
public:
    static poisoned& resource() {
        static poisoned one;
        return one;
    }
    void* allocate(std::size_t bytes, cudaStream_t in) override {
        void* const memory = cpx::cuda::default_resource().allocate(bytes, in);
        cpx::cuda::check(cudaMemsetAsync(memory, 0xff, bytes, in), "cudaMemsetAsync");
        return memory;
    }
    void deallocate(void* memory, std::size_t bytes, cudaStream_t in) noexcept override {
        cpx::cuda::default_resource().deallocate(memory, bytes, in);
    }
};

/// The same out of memory that is there before, and is given once: what a capture allocates is not there yet, and what
/// looks at a pointer takes it for the host's.
class poisoned_once final : public cpx::cuda::memory_resource {
public:
    void* allocate(std::size_t bytes, cudaStream_t in) override {
        auto const taken = static_cast<index_t>((bytes + 255) / 256 * 256);
        cpx::require(taken_ + taken <= all_.size(), "test", "bytes of memory", all_.size(), taken_ + taken);
        void* const memory = all_.data() + std::exchange(taken_, taken_ + taken);
        cpx::cuda::check(cudaMemsetAsync(memory, 0xff, bytes, in), "cudaMemsetAsync");
        return memory;
    }
    void deallocate(void*, std::size_t, cudaStream_t) noexcept override {}

private:
    cpx::cuda::buffer<char> all_{1 << 26};
    index_t taken_ = 0;
};

/// A communicator in whose exchanges all ranks meet: none allocates memory while another one's exchange waits for it.
class meeting : public cpx::cuda::communicator {
public:
    meeting(cpx::nccl& joined, cudaStream_t in, std::function<void()> const& all,
            cpx::cuda::memory_resource& from = poisoned::resource())
        : communicator(joined, in, from), all_(all) {}
    template <class T>
    void exchange(cpx::plan const& p, rows<T const> const& from, rows<T> const& to,
                  cpx::caller here = cpx::caller::here()) {
        communicator::exchange(p, from, to, here);
        meet();
    }
    void meet() {
        wait();
        all_();
    }

private:
    std::function<void()> all_;
};

/// What the layer of elements T runs on.
template <class T>
struct on_gpu {
    meeting comm;
    cpx::cuda::state_exchange states;
    bool meets = true; ///< whether ranks do when an operator has exchanged

    on_gpu(cpx::nccl& joined, cudaStream_t in, std::function<void()> const& all, cpx::capacity most = {},
           cpx::cuda::memory_resource& from = poisoned::resource())
        : comm(joined, in, all, from), states(comm, most) {}
    cpx::cuda::state_exchange& carrier() { return states; }
    void ended(auto const&...) {
        if (meets) comm.meet();
    }
    void ended_states(auto const&...) { ended(); }
    void linear(rows<T const> x, rows<T const> weight, rows<T> y) const {
        multiply<T>({x, weight, false, false, x.width(), 0, y});
    }
    void linear_backward_input(rows<T const> dy, rows<T const> weight, rows<T> dx, bool adds) const {
        multiply<T>({dy, weight, false, true, dy.width(), adds ? 1.0f : 0.0f, dx});
    }
    void linear_backward_weight(rows<T const> dy, rows<T const> x, rows<float> dweight) const {
        multiply<float>({dy, x, true, true, x.count(), 1, dweight});
    }

private:
    template <class C>
    void multiply(product<T, C> const& p) const {
        for_each_element(comm.memory(), p.c.count(), p.c.width(), p);
    }
};

/// Whole tensors: y, and gradients of x and of all weights, one behind the other.
struct results {
    floats y, dx, dweights;
};

floats joined(std::vector<floats> const& list) {
    floats all;
    for (floats const& one : list) all.insert(all.end(), one.begin(), one.end());
    return all;
}

template <class To, class From>
std::vector<To> convert(std::vector<From> const& values) {
    std::vector<To> list;
    for (From const x : values) list.push_back(static_cast<To>(static_cast<float>(x)));
    return list;
}

results on_host(layer<float> const& p, floats const& dy) {
    auto const d = reference::gradient<cpx::serial>(p, dy, on_ranks::one_rank(p.batch), cpx::sum_order::by_row);
    return {reference::run<cpx::serial>(p, on_ranks::one_rank(p.batch)), d.x, joined(d.weights)};
}

/// Rounds what a layer of elements T has in these, and dy: all but A_log and dt_bias.
template <class T>
void round_to(layer<float>& p, floats& dy) {
    auto const held = [](floats& numbers) { numbers = convert<float>(convert<T>(numbers)); };
    held(p.x), held(dy);
    for (std::size_t i = 0; i < p.weights.size(); ++i)
        if (i != 5 && i != 6) held(p.weights[i]);
}

/// How rows are added up for gradients of weights, how many times what they stand for gradients of a rule are, and
/// whether they are wanted at all.
struct backward_by {
    cpx::sum_order order;
    double gradient_scale = 1;
    bool wanted = true;
};

/// What a layer makes on one rank, of its rows, and the sum over all ranks of weights' gradients.
template <class T>
struct local_results {
    std::vector<T> y, dx;
    floats dweights;

    bool operator==(local_results const& other) const {
        auto const same = [](auto const& a, auto const& b) {
            return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
        };
        return same(y, other.y) && same(dx, other.dx) && same(dweights, other.dweights);
    }
};

/// Runs a layer of elements T, which hold the numbers of `p`, forward and backward.
template <class T, class Net, class S>
local_results<T> run_layer(on_gpu<T>& by, Net const& net, layer<float> const& p, floats const& dy, S const& sharding,
                           backward_by how) {
    std::vector<cpx::section> const hidden{{1, p.config.hidden}};
    int const rank = by.comm.rank();
    auto const memory = by.comm.memory();
    auto const exact = joined(p.weights);
    auto const weights = convert<T>(exact);
    auto const there = [&](floats const& whole) {
        auto made = cpx::make_tensor<T>(sharding, rank, p.config.hidden, memory);
        auto const local = on_ranks::take(convert<T>(whole), hidden, sharding, rank);
        made.write(local.elements());
        return made;
    };
    auto const x = there(p.x), of_y = there(dy);
    auto y = there(p.x), dx = there(p.x);
    auto w = memory.template zeros<T>("test", {std::ssize(weights)});
    auto wide = memory.template zeros<float>("test", {std::ssize(weights)});
    auto dw = memory.template zeros<float>("test", {std::ssize(weights)});
    memory.write(w.data(), std::span<T const>(weights));
    memory.write(wide.data(), std::span<float const>(exact));
    auto const of_w = harness::net_parameters<T const>(w.data(), wide.data(), p.config);
    typename Net::template saved_of<T, cpx::cuda::memory> saved;
    by.comm.meet();

    net(of_w, x, y, by, {{}, &saved});
    cpx::gated_delta_net_gradients<T, S, cpx::cuda::memory> const to{
        dx, harness::net_parameters(dw.data(), dw.data(), p.config), how.order, how.gradient_scale};
    if (how.wanted) gated_delta_net_backward(net, of_w, x, saved, of_y, to, by);
    cpx::sum_over_ranks(std::span<float>(dw.data(), weights.size()), by.comm);
    by.comm.meet();
    return {y.read(), dx.read(), memory.read(std::span<float const>(dw.data(), weights.size()))};
}

/// `make(rank)` returns the layer as `rank` runs it, twice. `check(calls)` looks at the calls of the delta rule's
/// kernels on a rank.
template <class T, class S, class Make, class Check>
results on_gpus(group& gpus, layer<float> const& p, floats const& dy, S const& sharding, backward_by how,
                Make const& make, Check const& check) {
    results r{floats(p.x.size(), NAN), floats(p.x.size(), NAN), {}};
    std::mutex guard;
    gpus.run([&](cpx::nccl& comm, auto const& meet) {
        cpx::cuda::stream const stream;
        {
            on_gpu<T> by(comm, stream, meet);
            int const rank = comm.rank();
            auto const net = make(rank);
            auto const first = run_layer(by, net, p, dy, sharding, how),
                       local = run_layer(by, net, p, dy, sharding, how);
            cpx::require(first == local, "test", "results of a second call", "those of the first", "others");
            check(by.states.calls);

            std::lock_guard const lock(guard);
            auto const put = [&](std::vector<T> const& rows, floats& whole) {
                auto from = rows.begin();
                sharding.for_each_piece(rank, [&](cpx::range piece) {
                    auto const count = piece.size() * p.config.hidden;
                    std::copy_n(from, count, whole.begin() + piece.first * p.config.hidden);
                    from += count;
                });
            };
            put(local.y, r.y);
            put(local.dx, r.dx);
            r.dweights = local.dweights;
        }
        meet();
    });
    gpus.share(r.y);
    gpus.share(r.dx);
    return r;
}

/// Whole lengths are those of a prompt and as many tokens more.
constexpr index_t decoded_tokens = 6;

/// Computes y of whole sequences: of the prompts at once, on `sharding`, then of a token of each at a time, on the
/// ranks where the prompts end. `make(sharding, rank)` returns the layer of elements T, whose states stay where they
/// are.
template <class T = float, class S, class Make>
floats decode_on_gpus(group& gpus, layer<float> const& p, S const& sharding, Make const& make) {
    floats whole(p.x.size(), NAN);
    floats const exact = joined(p.weights);
    auto const weights = convert<T>(exact);
    std::mutex guard;
    gpus.run([&](cpx::nccl& comm, auto const& meet) {
        cpx::cuda::stream const stream;
        {
            on_gpu<T> by(comm, stream, meet);
            int const rank = comm.rank();
            index_t const hidden = p.config.hidden;
            auto const memory = by.comm.memory();
            auto w = memory.template zeros<T>("test", {std::ssize(weights)});
            auto of_gates = memory.template zeros<float>("test", {std::ssize(weights)});
            memory.write(w.data(), std::span<T const>(weights));
            memory.write(of_gates.data(), std::span<float const>(exact));
            auto const of_w = harness::net_parameters<T const>(w.data(), of_gates.data(), p.config);
            cpx::gated_delta_net_cache<T, cpx::cuda::memory> cache(p.config, make(sharding, rank).states(), memory);
            auto const step = [&](auto const& of, auto const& first) { // first(s): how many tokens of s have been
                std::vector<index_t> rows;
                of.for_each_piece(rank, [&](cpx::range piece) {
                    for (index_t row = piece.first, s = 0; row < piece.last; ++row) {
                        while (row >= of.batch().offset(s + 1)) ++s;
                        rows.push_back(p.batch.offset(s) + first(s) + row - of.batch().offset(s));
                    }
                });
                floats values;
                for (index_t const row : rows)
                    values.insert(values.end(), p.x.begin() + row * hidden, p.x.begin() + (row + 1) * hidden);
                auto x = cpx::make_tensor<T>(of, rank, hidden, memory),
                     y = cpx::make_tensor<T>(of, rank, hidden, memory);
                x.write(convert<T>(values));
                auto const net = make(of, rank);
                index_t const before = by.states.calls.steps;
                net(of_w, x, y, by, {.state = cache.view()});
                by.comm.meet();
                bool const one_each = of.batch().tokens() == of.batch().sequences();
                index_t const steps = one_each && net.states().sharding.rows(rank) > 0 ? 1 : 0;
                cpx::require(by.states.calls.steps - before == steps, "test", "steps of decoding", steps,
                             by.states.calls.steps - before);
                values = convert<float>(y.read());
                std::lock_guard const lock(guard);
                for (std::size_t i = 0; i < rows.size(); ++i)
                    std::copy_n(values.begin() + static_cast<index_t>(i) * hidden, hidden,
                                whole.begin() + rows[i] * hidden);
            };
            step(sharding, [](index_t) { return index_t{0}; });
            auto const ends = cpx::sequence_ends(sharding);
            for (index_t t = 0; t < decoded_tokens; ++t)
                step(ends, [&](index_t s) { return sharding.batch().length(s) + t; });
        }
        meet();
    });
    gpus.share(whole);
    return whole;
}

/// Whole numbers, from 0 to 8.
floats whole_numbers(std::size_t count, std::size_t seed) {
    support::splitmix numbers(seed);
    floats list(count);
    for (float& x : list) x = static_cast<float>(numbers.between(0, 8));
    return list;
}

/// How a convolution of sequences goes on.
struct going_on {
    bool initial, final, in_place;
};

/// Returns a rank's y, and both lists of states after the call.
template <class Comm>
std::vector<floats> convolved(by_tokens const& sharding, index_t channels, index_t taps, going_on how, Comm& comm) {
    auto const rank = static_cast<std::size_t>(comm.rank());
    index_t const sequences = sharding.batch().sequences();
    auto x = cpx::make_tensor<float>(sharding, comm, channels), y = cpx::make_tensor<float>(sharding, comm, channels);
    auto weight = cpx::make_rows<float>(comm, channels, taps);
    auto before = cpx::make_rows<float>(comm, sequences, taps * channels),
         after = cpx::make_rows<float>(comm, sequences, taps * channels);
    x.write(whole_numbers(x.elements().size(), rank + 1));
    weight.write(whole_numbers(weight.elements().size(), 7));
    before.write(whole_numbers(before.elements().size(), 8));
    after.write(floats(after.elements().size(), 99));
    cpx::causal_conv1d_states<float> states;
    if (how.initial) states.initial = before.view();
    if (how.final) states.final = how.in_place ? before.view() : after.view();
    cpx::causal_conv1d(cpx::halo(sharding, comm.rank(), taps - 1), x, rows<float const>(weight.view()), {},
                       cpx::activation::none, y, comm, states);
    return {y.read(), before.read(), after.read()};
}

/// How far a layer of elements T may be from that of float on the same numbers. Of bfloat16 twice what rounding alone
/// does: a layer in double of this size, of which every tensor that is bfloat16 here, and its gradient, was rounded to
/// that, was off by up to 6.0e-3, 1.08e-2 and 9.0e-3 (six drawings of its numbers).
struct limits {
    double y, dx, dweights;
};
template <class T>
constexpr limits most = std::is_same_v<T, float> ? limits{1e-5, 1e-5, 1e-5} : limits{1.2e-2, 2.2e-2, 1.8e-2};
/// Of heads of 128 rounding alone does 5.4e-3, 6.2e-3 and 5.4e-3; kernels on tensor cores, whose results may be 4.7e-3
/// off, round more.
constexpr limits of_128{1.1e-2, 1.3e-2, 1.1e-2};
/// With a rule of half it was up to 4.4e-3, 5.4e-3 and 4.4e-3, of all sizes of heads; what else is rounded makes most.
constexpr limits of_half{6e-3, 7.5e-3, 6e-3};

void check_close(results const& got, results const& expected, limits const& within) {
    CHECK(on_ranks::relative_error(got.y, expected.y) <= within.y);
    CHECK(on_ranks::relative_error(got.dx, expected.dx) <= within.dx);
    CHECK(on_ranks::relative_error(got.dweights, expected.dweights) <= within.dweights);
}
void check_same(results const& got, results const& expected) {
    CHECK(on_ranks::same_bits(got.y, expected.y));
    CHECK(on_ranks::same_bits(got.dx, expected.dx));
    CHECK(on_ranks::same_bits(got.dweights, expected.dweights));
}

/// Runs a layer and its backward on one GPU and, in place by both carries and by heads, on two. `on_tensor_cores`:
/// where its delta rule, of elements Rule, has to run. Returns what one GPU makes, and the host.
template <class T, class Rule = void>
std::array<results, 2> check_layer(cpx::gated_delta_net_config const& config, std::vector<index_t> const& lengths,
                                   std::uint64_t seed, limits const& within, bool on_tensor_cores, double scale = 1) {
    auto p = reference::random_layer<float>(support::lengths(lengths), config, true, seed);
    support::splitmix numbers(9);
    auto dy = on_ranks::uniform<float>(numbers, std::ssize(p.x), 1);
    round_to<T>(p, dy);
    auto const expected = on_host(p, dy);
    group one(1), gpus(2);
    auto const run = [&](group& on, auto const& sharding, cpx::sum_order order, auto const& make) {
        return on_gpus<T>(on, p, dy, sharding, {order, scale}, make, [&](cpx::cuda::rule_calls const& calls) {
            bool const as_told = on_tensor_cores ? calls.on_tensor_cores > 0 && calls.plain == 0
                                                 : calls.on_tensor_cores == 0 && calls.plain > 0;
            cpx::require(as_told && calls.steps == 0, "test", "calls of kernels",
                         on_tensor_cores ? "on tensor cores alone" : "plain ones alone", "others");
        });
    };
    auto const in_place = [&]<class How>(How, group& on, by_tokens const& sharding, cpx::sum_order order) {
        using net = cpx::gated_delta_net<How, by_tokens, by_tokens, Rule>;
        return run(on, sharding, order, [&](int rank) { return net(cpx::carry<How>(sharding, rank), config); });
    };
    auto const alone = in_place(cpx::serial{}, one, on_ranks::one_rank(p.batch), cpx::sum_order::by_row);
    check_close(alone, expected, within);
    by_tokens const aligned = cpx::shard(p.batch, cpx::zigzag<>(2), cpx::aligned<64>{}),
                    any = cpx::shard(p.batch, cpx::striped<>(2));
    check_same(in_place(cpx::serial{}, gpus, aligned, cpx::sum_order::by_row), alone);
    check_close(in_place(cpx::scan{}, gpus, any, cpx::sum_order::by_rank), expected, within);
    auto const by_rank = in_place(cpx::serial{}, gpus, aligned, cpx::sum_order::by_rank); // adds weights otherwise
    CHECK(on_ranks::same_bits(by_rank.y, alone.y));
    CHECK(on_ranks::same_bits(by_rank.dx, alone.dx));
    check_close(by_rank, expected, within);

    using by_heads = cpx::head_sharded<>;
    by_heads const mix(2, p.batch, config.sections()), back(2, p.batch, config.output_sections());
    auto const make = [&](int rank) {
        return cpx::gated_delta_net<cpx::serial, by_tokens, by_heads, Rule>(
            cpx::carry<cpx::serial>(mix, rank), relayout(any, mix, rank), relayout(back, any, rank), config);
    };
    if (config.heads.key_heads % 2 == 0) // else both ranks would want the gradient of one head
        check_same(run(gpus, any, cpx::sum_order::by_row, make), alone);
    return {alone, expected};
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE_TEMPLATE(
        "a gated delta net on GPUs is the host's with its gradients, by serial and by heads with the bits of one", T,
        float, __nv_bfloat16) {
        if (!has_gpus(2)) return;
        for (cpx::delta_rule_heads const& heads :
             {cpx::delta_rule_heads{2, 4, 24, 40}, {2, 4, 32, 16}}) // these the convolution normalises, not the rule
            check_layer<T>({48, heads, 4, 64, 1e-6}, {70, 0, 1, 130, 64, 3, 211}, 4, most<T>,
                           sizeof(T) == 2 && cpx::cuda::detail::has_delta_hopper<true, T>());
    }

    TEST_CASE(
        "a gated delta net of heads of 128 in bfloat16 on GPUs is the host's with its gradients, on tensor cores") {
        if (!has_gpus(2)) return;
        using T = __nv_bfloat16;
        bool const can = cpx::cuda::detail::has_delta_hopper<true, T>();
        std::vector<index_t> const lengths{70, 0, 1, 129, 333, 65, 203};
        check_layer<T>({32, {1, 2, 128, 128}, 4, 64, 1e-6}, lengths, 11, of_128, can);
        check_layer<T>({32, {2, 4, 128, 128}, 4, 64, 1e-6}, lengths, 12, of_128, can);
    }

    TEST_CASE("a gated delta net of bfloat16 on GPUs whose rule is of half is nearer to the host's") {
        if (!has_gpus(2)) return;
        using T = __nv_bfloat16;
        bool const can = cpx::cuda::detail::has_delta_hopper<true, T>();
        std::vector<index_t> const lengths{70, 0, 1, 129, 333, 65, 203};
        for (auto const& [heads, taps] : std::vector<std::pair<cpx::delta_rule_heads, index_t>>{
                 {{2, 4, 128, 128}, 4}, // the convolution divides q and k by their lengths, of the others the rule
                 {{1, 2, 128, 128}, 2},
                 {{2, 4, 24, 40}, 4}}) {
            cpx::gated_delta_net_config const config{32, heads, taps, 64, 1e-6};
            auto const finer = check_layer<T, __half>(config, lengths, 13, of_half, can, 16),
                       plain = check_layer<T>(config, lengths, 13, heads.key_dim == 128 ? of_128 : most<T>, can);
            auto const nearer = [&](char const* name, floats results::*of) {
                floats const& exact = finer[1].*of;
                double const error = on_ranks::relative_error(finer[0].*of, exact),
                             before = on_ranks::relative_error(plain[0].*of, exact);
                CHECK_MESSAGE(error <= 0.8 * before, std::string(name) << ": " << error << ", of bfloat16 " << before);
            };
            nearer("y", &results::y), nearer("dx", &results::dx), nearer("dweights", &results::dweights);
        }
    }

    TEST_CASE("gradients of a rule of half are as exact however small they are, by their scale") {
        if (!has_gpus(1)) return;
        using T = __nv_bfloat16;
        cpx::gated_delta_net_config const config{32, {2, 4, 128, 128}, 4, 64, 1e-6};
        auto p = reference::random_layer<float>(support::lengths({70, 0, 1, 129, 33}), config, true, 14);
        support::splitmix numbers(15);
        auto dy = on_ranks::uniform<float>(numbers, std::ssize(p.x), 1);
        round_to<T>(p, dy);
        auto const sharding = on_ranks::one_rank(p.batch);
        group one(1);
        auto const run = [&](float times, double scale) {
            auto given = dy;
            for (float& x : given) x *= times;
            auto const make = [&](int rank) {
                return cpx::gated_delta_net<cpx::serial, by_tokens, by_tokens, __half>(
                    cpx::carry<cpx::serial>(sharding, rank), config);
            };
            auto r = on_gpus<T>(one, p, given, sharding, {cpx::sum_order::by_row, scale}, make, [](auto const&) {});
            for (floats* const all : {&r.dx, &r.dweights})
                for (float& x : *all) x /= times;
            return r;
        };
        auto const of_ones = run(1, 4);
        check_same(run(0x1p-40f, 0x1p42), of_ones);
        check_same(run(0x1p20f, 0x1p-18), of_ones);
        auto const lost = run(0x1p-40f, 1); // all of it is below the least number of half
        CHECK(on_ranks::relative_error(lost.dx, of_ones.dx) > 0.1);
        one.run([&](cpx::nccl& comm, auto const& meet) {
            cpx::cuda::stream const stream;
            on_gpu<T> by(comm, stream, meet);
            auto const refused = [&](auto const& net, double scale, std::string const& text) {
                support::rejects(
                    {"nccl_gated_delta_net.cu", "gated_delta_net_backward: gradient_scale: expected " + text}, [&] {
                        run_layer(by, net, p, dy, sharding, {cpx::sum_order::by_rank, scale});
                    });
            };
            auto const plan = cpx::carry<cpx::serial>(sharding, 0);
            cpx::gated_delta_net<cpx::serial, by_tokens, by_tokens, __half> const of_half(plan, config);
            for (double const scale : {0., -1., 1e-300, 1e-40, 1e38, 1e300, static_cast<double>(NAN)})
                refused(of_half, scale, "2^-126 to 2^126, got ");
            refused(cpx::gated_delta_net(plan, config), 2, "1, for gradients have the elements of all else, got 2");
        });
    }

    TEST_CASE("layers of one batch after the other, by what was prepared once, have the bits of layers of their own") {
        if (!has_gpus(2)) return;
        group gpus(2);
        gpus.run([&](cpx::nccl& comm, auto const& meet) {
            cpx::cuda::stream const stream;
            std::uint64_t seed = 20;
            // `make(sharding, config)` returns a layer.
            auto const check = [&](on_gpu<float>& by, std::vector<index_t> const& list,
                                   cpx::gated_delta_net_config const& config, auto const& make) {
                auto const p = reference::random_layer<float>(support::lengths(list), config, true, ++seed);
                support::splitmix numbers(seed);
                auto const dy = on_ranks::uniform<float>(numbers, std::ssize(p.x), 1);
                by_tokens const sharding = cpx::shard(p.batch, cpx::zigzag<>(2));
                auto const net = make(sharding, config);
                for (cpx::sum_order const order : {cpx::sum_order::by_rank, cpx::sum_order::by_row}) {
                    // where ranks share a key head GPUs have no backward
                    bool const by_heads = !std::same_as<decltype(net.states().sharding), by_tokens>;
                    backward_by const how{order, 1, !by_heads || config.heads.key_heads > 1};
                    auto const got = run_layer(by, net, p, dy, sharding, how);
                    {
                        on_gpu<float> alone(comm, stream, meet);
                        cpx::require(got == run_layer(alone, net, p, dy, sharding, how), "test", "results",
                                     "those of a layer of its own", "others");
                    }
                    meet();
                }
            };
            std::vector<std::vector<index_t>> const batches{{3}, {40, 24, 9},      {30, 7},    {30, 7},
                                                            {},  {1, 0, 3, 2, 66}, {40, 24, 9}};
            for (cpx::delta_rule_heads const& heads :
                 {cpx::delta_rule_heads{2, 4, 32, 16}, {1, 1, 32, 16}}) { // of these a row of q to a is 328 bytes
                on_gpu<float> by(comm, stream, meet, {80, 5});
                for (auto const& list : batches)
                    for (index_t const taps : {4, 2})
                        check(by, list, {24, heads, taps, 64, 1e-6},
                              [&](by_tokens const& sharding, auto const& config) {
                                  return cpx::gated_delta_net(cpx::carry<cpx::scan>(sharding, comm.rank()), config);
                              });
            }
            using by_heads = cpx::head_sharded<>;
            for (cpx::capacity const most : {cpx::capacity{}, {80, 5}}) {
                on_gpu<float> by(comm, stream, meet, most);
                auto const layer_of = [&](by_tokens const& sharding, auto const& config) {
                    by_heads const mix(2, sharding.batch(), config.sections()),
                        back(2, sharding.batch(), config.output_sections());
                    return cpx::gated_delta_net(cpx::carry<cpx::serial>(mix, comm.rank()),
                                                relayout(sharding, mix, comm.rank()),
                                                relayout(back, sharding, comm.rank()), config);
                };
                cpx::delta_rule_heads const of_both_ranks{1, 2, 32, 16}; // a key head
                for (auto const& list : batches)
                    for (cpx::delta_rule_heads const& heads :
                         {cpx::delta_rule_heads{2, 4, 32, 16}, {2, 2, 32, 32}, {4, 4, 16, 16}, of_both_ranks})
                        check(by, list, {24, heads, 4, 64, 1e-6}, layer_of);
                if (most.rows > 0)
                    for (auto const& list : {std::vector<index_t>{81}, {1, 1, 1, 1, 1, 1}})
                        support::rejects({"nccl_gated_delta_net.cu", "gated_delta_net: tokens and sequences of the",
                                          "expected at most 80, 5, got"},
                                         [&] {
                                             check(by, list, {24, of_both_ranks, 4, 64, 1e-6}, layer_of);
                                         });
            }
            meet();
        });
    }

    TEST_CASE("layers that are prepared for any batch only enqueue, in place and by heads, also another one, and are "
              "captured") {
        if (!has_gpus(2)) return;
        cpx::gated_delta_net_config const config{24, {2, 4, 32, 16}, 4, 64, 1e-6};
        auto const first = support::lengths({40, 24, 9}), second = support::lengths({1, 0, 3, 2, 66});
        group gpus(2);
        gpus.run([&](cpx::nccl& joined, auto const& meet) {
            cpx::cuda::stream const stream;
            int const rank = joined.rank();
            auto const check = [&](auto const& make) { // make(sharding) returns a layer
                poisoned_once from;
                on_gpu<float> by(joined, stream, meet, {80, 5}, from);
                auto const memory = by.comm.memory();
                support::splitmix numbers(31);
                auto const random = [&](std::ptrdiff_t count) { return on_ranks::uniform<float>(numbers, count, 1); };
                cpx::cuda::buffer<float> const of{std::span<float const>(random(1 << 14))};
                cpx::cuda::buffer<float> sums(of.size());
                auto const w = harness::net_parameters<float const>(of.data(), of.data(), config);
                // Writes y, dx and sums, of which y is the gradient of y, too.
                auto const run = [&](by_tokens const& sharding, auto const& x, auto& y, auto& dx) {
                    auto const net = make(sharding);
                    typename decltype(make(sharding))::template saved_of<float, cpx::cuda::memory> saved;
                    cpx::cuda::check(cudaMemsetAsync(sums.data(), 0, (1 << 14) * sizeof(float), stream), "memset");
                    net(w, x, y, by, {{}, &saved});
                    cpx::gated_delta_net_gradients<float, by_tokens, cpx::cuda::memory> const to{
                        dx, harness::net_parameters(sums.data(), sums.data(), config), cpx::sum_order::by_rank};
                    gated_delta_net_backward(net, w, x, saved, y, to, by);
                };
                auto const tensor = [&](by_tokens const& sharding) {
                    return cpx::make_tensor<float>(sharding, rank, config.hidden, memory);
                };
                auto const run_apart = [&](cpx::thd const& batch) {
                    by_tokens const sharding = cpx::shard(batch, cpx::zigzag<>(2));
                    auto const x = tensor(sharding);
                    auto y = tensor(sharding), dx = tensor(sharding);
                    run(sharding, x, y, dx);
                };
                meet();
                run_apart(first);
                by.comm.meet();
                by.meets = false;
                {
                    held_stream held(stream);
                    run_apart(first), run_apart(second), run_apart(first);
                    bool const enqueued = held.let_go();
                    by.comm.meet();
                    cpx::require(enqueued, "test", "calls of layers", "no wait for the device", "a wait");
                }
                by_tokens const sharding = cpx::shard(first, cpx::zigzag<>(2));
                auto x = tensor(sharding), y = tensor(sharding), dx = tensor(sharding);
                auto const got = [&] {
                    by.comm.meet();
                    return std::array{y.read(), dx.read(), sums.read()};
                };
                harness::graph const graph(stream, [&] { run(sharding, x, y, dx); });
                for (int round = 0; round < 3; ++round) {
                    x.write(random(std::ssize(x.elements())));
                    graph.launch(stream);
                    auto const replayed = got();
                    run(sharding, x, y, dx);
                    cpx::require(got() == replayed, "test", "results of a graph", "those of a call", "others");
                    cpx::require(replayed[0] != floats(replayed[0].size()), "test", "results", "some", "zeros");
                }
            };
            check([&](by_tokens const& sharding) {
                return cpx::gated_delta_net(cpx::carry<cpx::scan>(sharding, rank), config);
            });
            check([&](by_tokens const& sharding) {
                cpx::head_sharded<> const mix(2, sharding.batch(), config.sections()),
                    back(2, sharding.batch(), config.output_sections());
                return cpx::gated_delta_net(cpx::carry<cpx::serial>(mix, rank), relayout(sharding, mix, rank),
                                            relayout(back, sharding, rank), config);
            });
            meet();
        });
    }

    TEST_CASE("a convolution on GPUs goes on from states and leaves those of the host, each where its sequence ends") {
        if (!has_gpus(2)) return;
        group gpus(2);
        auto const batch = support::lengths({5, 1, 0, 130, 2, 33, 3});
        for (by_tokens const& sharding :
             {by_tokens(cpx::shard(batch, cpx::zigzag<>(2))), by_tokens(cpx::shard(batch, cpx::striped<>(2)))})
            for (index_t const channels : {6, 8}) // these in vectors, of 4 taps
                for (index_t const taps : {1, 4, 5})
                    for (going_on const how : {going_on{true, true, false}, going_on{true, true, true},
                                               going_on{false, true, false}, going_on{true, false, false}}) {
                        std::vector<std::vector<floats>> expected(2);
                        cpx::threads::run(2, [&](cpx::threads& comm) {
                            expected[static_cast<std::size_t>(comm.rank())] =
                                convolved(sharding, channels, taps, how, comm);
                        });
                        gpus.run([&](cpx::nccl& joined, auto const& meet) {
                            cpx::cuda::stream const stream;
                            meeting comm(joined, stream, meet);
                            auto const got = convolved(sharding, channels, taps, how, comm);
                            cpx::require(got == expected[static_cast<std::size_t>(comm.rank())], "test",
                                         "results and states", "those of the host", "others");
                            comm.meet();
                        });
                    }
    }

    TEST_CASE("decoding on GPUs after prompts of any length is the host's layer over whole sequences") {
        if (!has_gpus(2)) return;
        cpx::gated_delta_net_config const config{48, {2, 4, 32, 40}, 4, 64, 1e-6};
        std::vector<index_t> const prompt{37, 0, 1, 130, 3, 2, 71};
        auto whole = prompt;
        for (index_t& n : whole) n += decoded_tokens;
        auto const p = reference::random_layer<float>(support::lengths(whole), config, true, 5);
        auto const expected = reference::run<cpx::serial>(p, on_ranks::one_rank(p.batch));
        auto const of_prompt = support::lengths(prompt);
        auto const check = [&](floats const& got) { CHECK(on_ranks::relative_error(got, expected) <= 1e-5); };
        auto const in_place = [&]<class How>(How, group& on, auto const& sharding) {
            check(decode_on_gpus(on, p, sharding, [&](auto const& of, int rank) {
                return cpx::gated_delta_net(cpx::carry<How>(of, rank), config);
            }));
        };
        group one(1), gpus(2);
        in_place(cpx::serial{}, one, cpx::shard(of_prompt, cpx::zigzag<>(1)));
        in_place(cpx::serial{}, gpus, cpx::shard(of_prompt, cpx::zigzag<>(2)));
        in_place(cpx::scan{}, gpus, cpx::shard(of_prompt, cpx::striped<>(2)));

        auto rounded = p;
        floats none;
        round_to<__nv_bfloat16>(rounded, none);
        by_tokens const striped = cpx::shard(of_prompt, cpx::striped<>(2));
        auto const in_half = decode_on_gpus<__nv_bfloat16>(gpus, rounded, striped, [&]<class S>(S const& of, int rank) {
            return cpx::gated_delta_net<cpx::serial, S, S, __half>(cpx::carry<cpx::serial>(of, rank), config);
        });
        auto const of_rounded = reference::run<cpx::serial>(rounded, on_ranks::one_rank(p.batch));
        CHECK(on_ranks::relative_error(in_half, of_rounded) <= of_half.y);

        using by_heads = cpx::head_sharded<>;
        check(decode_on_gpus(gpus, p, cpx::shard(of_prompt, cpx::striped<>(2)), [&](auto const& of, int rank) {
            by_heads const mix(2, of.batch(), config.sections()), back(2, of.batch(), config.output_sections());
            return cpx::gated_delta_net(cpx::carry<cpx::serial>(mix, rank), relayout(of, mix, rank),
                                        relayout(back, of, rank), config);
        }));
    }

    TEST_CASE(
        "a gated delta net on GPUs refuses sizes that they do not have and memory of the host, before it begins") {
        if (!has_gpus(1)) return;
        group one(1);
        one.run([](cpx::nccl& joined, auto const& meet) {
            cpx::cuda::stream const stream;
            on_gpu<float> by(joined, stream, meet);
            auto const sharding = on_ranks::one_rank(support::lengths({5}));
            auto const memory = by.comm.memory();
            auto x = cpx::make_tensor<float>(sharding, 0, 8, memory);
            auto y = cpx::make_tensor<float>(sharding, 0, 8, memory);
            cpx::gated_delta_net_config const right{8, {1, 2, 4, 6}, 4, 64, 1e-6};
            floats const ones(4096, 1.0f);
            memory.write(x.data().data(), std::span(ones).first(40));
            auto w = memory.template zeros<float>("test", {4096});
            memory.write(w.data(), std::span<float const>(ones));
            auto const call = [&](auto change, bool on_device, float* state) {
                auto config = right;
                change(config);
                cpx::gated_delta_net const net(cpx::carry<cpx::serial>(sharding, 0), config);
                auto const widths = net.widths();
                cpx::gated_delta_net_state<float, cpx::cuda::memory> states;
                if (state) states.recurrent = rows<float>(state, 1, widths.recurrent);
                float const* const all = on_device ? w.data() : ones.data();
                net(harness::net_parameters<float const>(all, all, config), x, y, by, {.state = states});
            };
            auto const refused = [&](std::string const& text, auto change, bool on_device, float* state) {
                support::rejects({"nccl_gated_delta_net.cu", "gated_delta_net: " + text},
                                 [&] { call(change, on_device, state); });
            };
            floats state(4096);
            auto const nothing = [](auto&) {};
            refused(
                "chunk: expected 64, of tensors on devices, got 32", [](auto& c) { c.chunk = 32; }, true, nullptr);
            refused(
                "key_dim: expected from 1 to 256, of tensors on devices, got 257",
                [](auto& c) { c.heads.key_dim = 257; }, true, nullptr);
            refused("in_proj_qkv.weight: expected memory of the current device", nothing, false, nullptr);
            refused("recurrent state: expected memory of the current device", nothing, true, state.data());
            CHECK(y.read() == floats(40));
            call(nothing, true, nullptr);
            by.comm.wait();
            CHECK(y.read() != floats(40));
        });
    }
}
