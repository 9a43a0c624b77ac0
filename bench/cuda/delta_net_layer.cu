// SPDX-License-Identifier: Apache-2.0
// Times a gated delta net layer on GPUs, forward and backward, step by step, and counts the device memory that it
// takes: on one rank, and on two whose recurrence runs where rows are, by both carries, or on all rows at every rank;
// put together of `cuda::` calls, and as the operator `gated_delta_net`; plans of either are made once.
#include "../../examples/qwen/cuda/blas.hpp"
#include "../../harness/net_parameters.hpp"
#include "../../harness/processes.hpp"
#include "random.hpp"
#include "timing.hpp"

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/zigzag.hpp>
#include <cpx/ops/cuda/causal_conv1d.hpp>
#include <cpx/ops/cuda/gated_delta_rule.hpp>
#include <cpx/ops/cuda/norm.hpp>
#include <cpx/ops/gated_delta_net_backward.hpp>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using cpx::index_t, cpx::rows;
namespace gpu = cpx::cuda;
namespace product = qwen::gpu;
using element = __nv_bfloat16;
template <class T>
using block = gpu::block<T>;

constexpr index_t hidden = 2048, key_heads = 16, value_heads = 32, dim = 128, taps = 4, tokens = 32768;
constexpr index_t keys = key_heads * dim, values = value_heads * dim, qkv = 2 * keys + values;
constexpr index_t projected = qkv + 2 * value_heads; ///< columns of q, k, v, b and a

/// CUDA's memory of the device, counted: what is held, and the most that was.
class counted final : public gpu::memory_resource {
public:
    void* allocate(std::size_t bytes, cudaStream_t in) override {
        void* const memory = gpu::default_resource().allocate(bytes, in);
        most = std::max(most, held += bytes);
        return memory;
    }
    void deallocate(void* memory, std::size_t bytes, cudaStream_t in) noexcept override {
        gpu::default_resource().deallocate(memory, bytes, in);
        held -= bytes;
    }
    std::size_t held = 0, most = 0;
};

/// What lies between steps of a layer, as they come.
class stopwatch {
public:
    explicit stopwatch(cudaStream_t in) : in_(in) {}
    void begin() { marks_.clear(), mark(""); }
    void mark(char const* step) {
        marks_.emplace_back(step, gpu::event());
        marks_.back().second.record(in_);
    }
    /// Adds what each step took to a list of its own; the stream has come to the end.
    void end() {
        float all = 0;
        for (std::size_t i = 1; i < marks_.size(); ++i) {
            float ms = 0;
            gpu::check(cudaEventElapsedTime(&ms, marks_[i - 1].second, marks_[i].second), "cudaEventElapsedTime");
            add(marks_[i].first, ms);
            all += ms;
        }
        add("all", all);
    }
    std::vector<std::pair<std::string, std::vector<float>>> steps; ///< in the order of the first time

private:
    void add(std::string const& step, float ms) {
        auto found = std::ranges::find(steps, step, [](auto const& p) { return p.first; });
        if (found == steps.end()) found = steps.insert(steps.end(), {step, {}});
        found->second.push_back(ms);
    }
    cudaStream_t in_;
    std::vector<std::pair<std::string, gpu::event>> marks_;
};

/// A rank's layer of rows on S, whose recurrence runs on Mix: the same, or every row on every rank. What the forward
/// leaves to the backward is kept; of the rest every tensor is freed as soon as it is not needed. Rule: the elements of
/// q, k, v and o and of their gradients.
template <class Rule, cpx::carry_kind How, cpx::any_sharding S, cpx::any_sharding Mix>
class layer {
    static constexpr bool moves = !std::same_as<S, Mix>;

public:
    layer(S const& where, Mix const& mix, gpu::communicator& comm, bool keeps)
        : where_(where), mix_(mix), comm_(comm), rank_(comm.rank()), own_(where.rows(rank_)), there_(mix.rows(rank_)),
          carry_(cpx::carry<How>(mix, rank_)), states_(comm),
          conv_(cpx::halo(mix, rank_, taps - 1), cpx::halo(mix, rank_, taps - 1, cpx::side::after), qkv, comm,
                {.x_stride = projected}),
          times_(comm.stream(), false), sums_(comm.stream(), false) {
        saved_.keeps = keeps;
        if constexpr (moves) moves_.emplace(relayout(where, mix, rank_), relayout(mix, where, rank_));
    }

    block<element> forward(rows<element const> x, stopwatch& watch) {
        watch.begin();
        p_ = room(own_ * projected);
        z_ = room(own_ * values);
        times_(product::plain(x), product::plain(of(w_in_, projected, hidden)), hidden, 0, of(p_, own_, projected));
        times_(product::plain(x), product::plain(of(w_z_, values, hidden)), hidden, 0, of(z_, own_, values));
        watch.mark("projections");
        if constexpr (moves) p_ = moved(moves_->first, p_, where_, mix_, projected), watch.mark("rows there");
        q_ = room<Rule>(there_ * keys), k_ = room<Rule>(there_ * keys), v_ = room<Rule>(there_ * values);
        auto const p = of(p_, there_, projected);
        gpu::causal_conv1d(conv_, as_mixed(p.columns(0, qkv)), weight(), {}, cpx::activation::silu,
                           gpu::conv_parts<Rule>{{{{q(), dim}, {k(), dim}, {v(), 0}}}});
        watch.mark("convolution");
        gates_ = comm_.memory().template room<float>(there_ * 2 * value_heads);
        auto const g = gates(gates_);
        gpu::for_each_element(comm_.memory(), there_, value_heads,
                              cpx::rowwise::delta_gates<element>{
                                  of_b(p), of_a(p), of(A_log_, value_heads, 1), of(dt_bias_, value_heads, 1),
                                  g.columns(0, value_heads), g.columns(value_heads, value_heads)});
        watch.mark("gates");
        o_ = room<Rule>(there_ * values);
        gated_delta_rule(carry_, tensors(), heads_, options_, states_);
        watch.mark("delta rule");
        if constexpr (moves) o_ = moved(moves_->second, o_, mix_, where_, values), watch.mark("rows back");
        normed_ = room(own_ * values);
        gpu::normalise_rows(norm(), of(normed_, own_, values), comm_.stream());
        watch.mark("gated norm");
        auto y = room(own_ * hidden);
        times_(product::plain(of(normed_, own_, values)), product::plain(of(w_out_, hidden, values)), values, 0,
               of(y, own_, hidden));
        watch.mark("projection");
        return y;
    }

    block<element> backward(rows<element const> x, rows<element const> dy, stopwatch& watch) {
        watch.begin();
        auto dnormed = room(own_ * values);
        times_(product::plain(dy), product::transposed(of(w_out_, hidden, values)), hidden, 0,
               of(dnormed, own_, values));
        times_(product::transposed(dy), product::transposed(of(normed_, own_, values)), own_, 1,
               of(dw_out_, hidden, values));
        normed_ = {};
        watch.mark("projection");
        auto dz = room(own_ * values);
        auto d_o = room<Rule>(own_ * values);
        {
            auto const terms = comm_.memory().template zeros<float>("layer", {own_, dim});
            gpu::normalise_rows_backward(norm(), of(dnormed, own_, values), of(d_o, own_, values), of(dz, own_, values),
                                         of(terms, own_, dim), comm_.stream());
            add_up(of(terms, own_, dim), dgain_);
        }
        dnormed = {}, o_ = {};
        watch.mark("gated norm");
        if constexpr (moves) d_o = moved(moves_->first, d_o, where_, mix_, values), watch.mark("rows there");
        auto dp = room(there_ * projected);
        {
            auto dq = room<Rule>(there_ * keys), dk = room<Rule>(there_ * keys), dv = room<Rule>(there_ * values);
            auto dgates = comm_.memory().template room<float>(there_ * 2 * value_heads);
            auto const dg = gates(dgates);
            o_ = room<Rule>(moves ? there_ * values : 0); // is not read
            gated_delta_rule_backward(carry_, tensors(&d_o),
                                      cpx::delta_rule_gradient_tensors<Rule, Mix, gpu::memory>{
                                          as_mixed(of(d_o, there_, values)), as_mixed(of(dq, there_, keys)),
                                          as_mixed(of(dk, there_, keys)), as_mixed(of(dv, there_, values)),
                                          as_mixed(dg.columns(0, value_heads)),
                                          as_mixed(dg.columns(value_heads, value_heads))},
                                      heads_, options_, states_);
            d_o = {}, o_ = {};
            watch.mark("delta rule");
            auto const terms = comm_.memory().template room<float>(there_ * 2 * value_heads);
            auto const p = of(p_, there_, projected), d = of(dp, there_, projected);
            gpu::for_each_element(comm_.memory(), there_, value_heads,
                                  cpx::rowwise::delta_gates_backward<element>{
                                      of_b(p), of_a(p), of(A_log_, value_heads, 1), of(dt_bias_, value_heads, 1),
                                      dg.columns(0, value_heads), dg.columns(value_heads, value_heads), of_b(d),
                                      of_a(d), gates(terms)});
            add_up(gates(terms), dgate_weights_);
            watch.mark("gates");
            gpu::causal_conv1d_backward(
                conv_, as_mixed(p.columns(0, qkv)), weight(), {}, cpx::activation::silu,
                gpu::conv_parts<Rule const>{
                    {{{of(dq, there_, keys), dim}, {of(dk, there_, keys), dim}, {of(dv, there_, values), 0}}}},
                {as_mixed(d.columns(0, qkv)), of(dconv_, qkv, taps)});
            q_ = {}, k_ = {}, v_ = {}, p_ = {}, gates_ = {};
        }
        watch.mark("convolution");
        if constexpr (moves) dp = moved(moves_->second, dp, mix_, where_, projected), watch.mark("rows back");
        auto dx = room(own_ * hidden);
        auto const d = of(dp, own_, projected), of_z = of(dz, own_, values);
        times_(product::plain(d), product::transposed(of(w_in_, projected, hidden)), projected, 0,
               of(dx, own_, hidden));
        times_(product::plain(of_z), product::transposed(of(w_z_, values, hidden)), values, 1, of(dx, own_, hidden));
        times_(product::transposed(d), product::transposed(x), own_, 1, of(dw_in_, projected, hidden));
        times_(product::transposed(of_z), product::transposed(x), own_, 1, of(dw_z_, values, hidden));
        z_ = {};
        watch.mark("projections");
        return dx;
    }

private:
    template <class T>
    static rows<T> of(gpu::buffer<T> const& b, index_t count, index_t width) {
        return {const_cast<T*>(b.data()), count, width};
    }
    template <class T>
    static rows<T> of(block<T> const& b, index_t count, index_t width) {
        return {const_cast<T*>(b.data()), count, width};
    }
    static auto of_b(auto const& p) { return p.columns(qkv, value_heads); }
    static auto of_a(auto const& p) { return p.columns(qkv + value_heads, value_heads); }
    template <class T = element>
    block<T> room(index_t count) const {
        return comm_.memory().template room<T>(count);
    }
    rows<float> gates(block<float> const& b) const { return of(b, there_, 2 * value_heads); }
    rows<Rule> q() const { return of(q_, there_, keys); }
    rows<Rule> k() const { return of(k_, there_, keys); }
    rows<Rule> v() const { return of(v_, there_, values); }
    rows<element const> weight() const { return of(w_conv_, qkv, taps); }
    template <class T>
    cpx::sharded<T, Mix, gpu::memory> as_mixed(rows<T> r) const {
        return {r, mix_, rank_, comm_.memory()};
    }
    template <class A = element>
    gpu::buffer<A> weights(index_t count, std::uint64_t seed, float most) const {
        return timing::random<A>(count, seed, -most, most);
    }
    gpu::norm_input<element, Rule> norm() const {
        return {of(o_, own_, values), of(z_, own_, values), of(gain_, 1, dim), 1e-6f, 0};
    }
    cpx::delta_rule_tensors<Rule, Mix, gpu::memory> tensors(block<Rule> const* o = nullptr) {
        auto const g = gates(gates_);
        return {as_mixed(q()),
                as_mixed(k()),
                as_mixed(v()),
                as_mixed(g.columns(0, value_heads)),
                as_mixed(g.columns(value_heads, value_heads)),
                as_mixed(of(o ? *o : o_, there_, values)),
                {},
                {},
                &saved_};
    }
    /// sums += the sum of all rows.
    void add_up(rows<float> terms, gpu::buffer<float> const& sums) const {
        sums_(product::transposed(terms), product::plain(of(ones_, 1, terms.count())), terms.count(), 1,
              of(sums, terms.width(), 1));
    }
    template <class T, class Plan, class From, class To>
    block<T> moved(Plan const& plan, block<T>& x, From const& from, To const& to, index_t width) {
        auto y = room<T>(to.rows(rank_) * width);
        cpx::sharded<T, From, gpu::memory> const of_x(of(x, from.rows(rank_), width), from, rank_, comm_.memory());
        cpx::sharded<T, To, gpu::memory> of_y(of(y, to.rows(rank_), width), to, rank_, comm_.memory());
        exchange(plan, of_x, of_y, comm_);
        return y;
    }

    S where_;
    Mix mix_;
    gpu::communicator& comm_;
    int rank_;
    index_t own_, there_; ///< rows
    cpx::carry_plan<How, Mix> carry_;
    gpu::state_exchange states_;
    gpu::conv_exchange<element, Mix> conv_;
    product::product<element> times_;
    product::product<float> sums_;
    std::optional<std::pair<cpx::relayout_plan<S, Mix>, cpx::relayout_plan<Mix, S>>> moves_;
    cpx::delta_rule_heads const heads_{key_heads, value_heads, dim, dim};
    cpx::delta_rule_options const options_{.qk_l2norm = false}; // the convolution does that
    gpu::buffer<element> const w_in_ = weights(projected * hidden, 1, 0.04f), w_z_ = weights(values * hidden, 2, 0.04f),
                               w_out_ = weights(hidden * values, 3, 0.03f), w_conv_ = weights(qkv * taps, 4, 0.8f),
                               gain_ = weights(dim, 7, 1);
    gpu::buffer<float> const A_log_ = weights<float>(value_heads, 5, 1), dt_bias_ = weights<float>(value_heads, 6, 1);
    gpu::buffer<float> const dw_in_{projected * hidden}, dw_z_{values * hidden}, dw_out_{hidden * values},
        dconv_{qkv * taps}, dgain_{dim}, dgate_weights_{2 * value_heads},
        ones_ = timing::random<float>(tokens, 8, 1, 1);
    block<element> p_, z_, normed_;
    block<Rule> q_, k_, v_, o_;
    block<float> gates_;
    cpx::delta_rule_saved<Rule, gpu::memory> saved_;
};

/// The same layer by the operator `gated_delta_net`, of type Net, which asks this for its products.
template <class Net>
class one_operator {
    using S = typename Net::sharding_type;

public:
    gpu::communicator& comm;

    one_operator(Net const& net, gpu::communicator& by, cpx::capacity const& most)
        : comm(by), where_(net.sharding()), net_(net), states_(by, most), times_(by.stream(), false) {}
    gpu::state_exchange& carrier() { return states_; }
    void ended(auto const&...) const {}
    void ended_states(auto const&...) const {}
    void linear(rows<element const> x, rows<element const> weight, rows<element> y) {
        times_(product::plain(x), product::plain(weight), x.width(), 0, y);
    }
    void linear_backward_input(rows<element const> dy, rows<element const> weight, rows<element> dx, bool adds) {
        times_(product::plain(dy), product::transposed(weight), dy.width(), adds, dx);
    }
    void linear_backward_weight(rows<element const> dy, rows<element const> x, rows<float> dweight) {
        times_(product::transposed(dy), product::transposed(x), x.count(), 1, dweight);
    }

    block<element> forward(rows<element const> x, stopwatch& watch) {
        auto y = comm.memory().template room<element>(x.count() * hidden);
        auto to = tensor(rows<element>(y.data(), x.count(), hidden));
        saved_ = {};
        watch.begin();
        net_(weights(), tensor(x), to, *this, {{}, &saved_});
        watch.mark("the operator");
        return y;
    }
    block<element> backward(rows<element const> x, rows<element const> dy, stopwatch& watch) {
        auto dx = comm.memory().template room<element>(x.count() * hidden);
        cpx::gated_delta_net_gradients<element, S, gpu::memory> const to{
            tensor(rows<element>(dx.data(), x.count(), hidden)),
            harness::net_parameters(sums_.data(), sums_.data(), net_.config())};
        watch.begin();
        gated_delta_net_backward(net_, weights(), tensor(x), saved_, tensor(dy), to, *this);
        saved_ = {};
        watch.mark("the operator");
        return dx;
    }

private:
    template <class T>
    cpx::sharded<T, S, gpu::memory> tensor(rows<T> r) const {
        return {r, where_, comm.rank(), comm.memory()};
    }
    cpx::gated_delta_net_weights<element> weights() const {
        return harness::net_parameters<element const>(weights_.data(), gates_.data(), net_.config());
    }

    static constexpr index_t all = (projected + 2 * values) * hidden + qkv * taps + 2 * value_heads + dim;
    S where_;
    Net net_;
    gpu::state_exchange states_;
    product::product<element> times_;
    typename Net::template saved_of<element, gpu::memory> saved_;
    gpu::buffer<element> const weights_ = timing::random<element>(all, 1, -0.04f, 0.04f);
    gpu::buffer<float> const gates_ = timing::random<float>(all, 5, -1, 1), sums_{all};
};

/// Runs a layer, `make(comm)`, some times and prints, at rank 0, its steps' medians and the memory that it took.
template <class S, class Make>
void time_layer(char const* name, S const& where, cpx::nccl& ranks, Make const& make) {
    counted memory;
    gpu::stream const stream;
    gpu::communicator comm(ranks, stream, memory);
    stopwatch warm(stream), forward(stream), backward(stream);
    index_t const own = where.rows(comm.rank());
    auto const x = timing::random<element>(own * hidden, 11, -1, 1),
               dy = timing::random<element>(own * hidden, 12, -1, 1);
    rows<element const> const of_x(x.data(), own, hidden), of_dy(dy.data(), own, hidden);
    std::size_t kept = 0;
    {
        auto const made = make(comm);
        auto& of = *made;
        for (int round = 0; round < 12; ++round) {
            auto &there = round < 3 ? warm : forward, &back = round < 3 ? warm : backward;
            static_cast<void>(of.forward(of_x, there));
            comm.wait();
            there.end();
            kept = memory.held;
            static_cast<void>(of.backward(of_x, of_dy, back));
            comm.wait();
            back.end();
        }
    }
    if (comm.rank() != 0) return;
    double const mib = 1.0 / (1 << 20);
    std::printf("%-34s %d ranks: peak %8.1f MiB, %8.1f MiB of it kept for the backward\n", name, comm.ranks(),
                static_cast<double>(memory.most) * mib, static_cast<double>(kept) * mib);
    auto const median = [](std::vector<float> times) {
        std::ranges::sort(times);
        return static_cast<double>(times[times.size() / 2]);
    };
    for (auto const& [direction, watch] : {std::pair("forward", &forward), {"backward", &backward}})
        for (auto const& [step, times] : watch->steps)
            std::printf("  %-9s %-12s %8.3f ms\n", direction, step.c_str(), median(times));
    std::fflush(stdout);
}

/// The same of `layer`. `keeps`: what the delta rule's backward could make again is kept.
template <class Rule, cpx::carry_kind How, class S, class Mix>
void run(char const* name, S const& where, Mix const& mix, cpx::nccl& ranks, bool keeps = false) {
    time_layer(name, where, ranks, [&](gpu::communicator& comm) {
        return std::make_unique<layer<Rule, How, S, Mix>>(where, mix, comm, keeps);
    });
}

/// The same of an operator, which `make(rank)` returns. `most`: of the batches that it is prepared for.
template <class S, class Make>
void run_operator(char const* name, S const& where, cpx::nccl& ranks, Make const& make,
                  cpx::capacity const& most = {}) {
    time_layer(name, where, ranks, [&](gpu::communicator& comm) {
        auto const net = make(comm.rank());
        return std::make_unique<one_operator<std::remove_const_t<decltype(net)>>>(net, comm, most);
    });
}

std::string measure(int rank, int count) {
    auto const ranks = cpx::nccl::from_environment(std::chrono::minutes(1));
    if (rank == 0 && count == 1)
        std::printf(
            "%s; a gated delta net layer, %td tokens in one sequence, hidden %td, %td/%td heads of %td, bfloat16"
            "\nmedians of 9 runs; memory without weights, their gradients, x, dy and what NCCL and cuBLASLt have\n",
            timing::device_name().c_str(), static_cast<std::ptrdiff_t>(tokens), static_cast<std::ptrdiff_t>(hidden),
            static_cast<std::ptrdiff_t>(key_heads), static_cast<std::ptrdiff_t>(value_heads),
            static_cast<std::ptrdiff_t>(dim));
    std::vector<index_t> const offsets{0, tokens};
    auto const batch = cpx::thd::from_offsets(offsets);
    auto const where = cpx::shard(batch, cpx::zigzag<>(count), cpx::aligned<64>());
    cpx::replicated<> const everywhere(count, batch);
    run<element, cpx::serial>("in place, serial", where, where, *ranks);
    run<element, cpx::serial>("the same, inverses kept", where, where, *ranks, true);
    run<__half, cpx::serial>("in place, serial, the rule in half", where, where, *ranks);
    using S = std::remove_const_t<decltype(where)>;
    cpx::gated_delta_net_config const config{hidden, {key_heads, value_heads, dim, dim}, taps};
    run_operator("gated_delta_net, serial", where, *ranks,
                 [&](int own) { return cpx::gated_delta_net(cpx::carry<cpx::serial>(where, own), config); });
    run_operator("gated_delta_net, the rule in half", where, *ranks, [&](int own) {
        return cpx::gated_delta_net<cpx::serial, S, S, __half>(cpx::carry<cpx::serial>(where, own), config);
    });
    if (count == 1) return "";
    using by_heads = cpx::head_sharded<>;
    by_heads const mix(count, batch, config.sections()), output(count, batch, config.output_sections());
    auto const make = [&](int own) {
        return cpx::gated_delta_net(cpx::carry<cpx::serial>(mix, own), relayout(where, mix, own),
                                    relayout(output, where, own), config);
    };
    run_operator("gated_delta_net, by heads", where, *ranks, make);
    run_operator("the same, prepared for any batch", where, *ranks, make, {tokens, 16});
    run<element, cpx::scan>("in place, scan", where, where, *ranks);
    run<element, cpx::serial>("every row on every rank", where, everywhere, *ranks);
    return "";
}

} // namespace

int main(int argc, char**) try {
    if (argc > 1) return std::fprintf(stderr, "usage: bench.cuda.delta_net_layer (no arguments)\n"), 2;
    int const gpus = processes::gpus();
    for (int const ranks : {1, 2}) {
        if (gpus < ranks) {
            std::printf("cpx: skipped, %d GPUs wanted, %d found\n", ranks, gpus);
            continue;
        }
        for (int const code : processes::run(ranks, [&](int rank) { return measure(rank, ranks); }))
            if (code != 0) return 1;
    }
    return 0;
} catch (std::exception const& error) {
    std::fprintf(stderr, "bench.cuda.delta_net_layer: %s\n", error.what());
    return 1;
}
