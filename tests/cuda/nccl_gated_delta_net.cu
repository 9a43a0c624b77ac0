// SPDX-License-Identifier: Apache-2.0
// The gated delta net layer of tensors on devices: the host's results and gradients, in place and by heads.
#include <cpx/ops/gated_delta_net_backward.hpp>

#include <cpx/ops/cuda/causal_conv1d.hpp>
#include <cpx/ops/cuda/gated_delta_rule.hpp>
#include <cpx/ops/cuda/norm.hpp>

#include <cpx/cuda/elements.hpp>
#include <cpx/transport/sum.hpp>

#include <doctest/doctest.h>

#include "group.hpp"

#include <ops/backward.hpp>

#include <functional>
#include <mutex>

namespace {

using cpx::index_t, cpx::rows;
using floats = std::vector<float>;
using on_ranks::by_tokens;
using reference::layer;

/// c = before c + a b^T, an element one sum in float.
struct product {
    rows<float const> a, b;
    bool a_turned, b_turned;
    index_t inner;
    float before;
    rows<float> c;
    __device__ void operator()(index_t i, index_t j) const {
        float sum = before == 0 ? 0 : c(i, j);
        for (index_t k = 0; k < inner; ++k) sum += (a_turned ? a(k, i) : a(i, k)) * (b_turned ? b(k, j) : b(j, k));
        c(i, j) = sum;
    }
};

/// A communicator in whose exchanges all ranks meet: none allocates memory while another one's exchange waits for it.
class meeting : public cpx::cuda::communicator {
public:
    meeting(cpx::nccl& joined, cudaStream_t in, std::function<void()> const& all)
        : communicator(joined, in), all_(all) {}
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

/// What the layer runs on.
struct on_gpu {
    meeting comm;
    cpx::cuda::state_exchange states{comm};

    on_gpu(cpx::nccl& joined, cudaStream_t in, std::function<void()> const& all) : comm(joined, in, all) {}
    cpx::cuda::state_exchange& carrier() { return states; }
    void ended(auto const&...) { comm.meet(); }
    void ended_states(auto const&...) { comm.meet(); }
    void linear(rows<float const> x, rows<float const> weight, rows<float> y) const {
        multiply({x, weight, false, false, x.width(), 0, y});
    }
    void linear_backward_input(rows<float const> dy, rows<float const> weight, rows<float> dx) const {
        multiply({dy, weight, false, true, dy.width(), 1, dx});
    }
    void linear_backward_weight(rows<float const> dy, rows<float const> x, rows<float> dweight) const {
        multiply({dy, x, true, true, x.count(), 1, dweight});
    }

private:
    void multiply(product const& p) const { for_each_element(comm.memory(), p.c.count(), p.c.width(), p); }
};

/// Whole tensors: y, and gradients of x and of all weights, one behind the other.
struct results {
    floats y, dx, dweights;
};

/// Views all parameters of a layer in one array.
template <class A>
cpx::gated_delta_net_parameters<A> parameters(A* values, cpx::gated_delta_net_config const& config) {
    cpx::gated_delta_net_parameters<A> view;
    for_each_parameter(view, config, [&](char const*, auto& weight, index_t count, index_t width) {
        weight = rows<A>(values, count, width);
        values += count * width;
    });
    return view;
}
floats joined(std::vector<floats> const& list) {
    floats all;
    for (floats const& one : list) all.insert(all.end(), one.begin(), one.end());
    return all;
}

results on_host(layer<float> const& p, floats const& dy) {
    auto const d = reference::gradient<cpx::serial>(p, dy, on_ranks::one_rank(p.batch), cpx::sum_order::by_row);
    return {reference::run<cpx::serial>(p, on_ranks::one_rank(p.batch)), d.x, joined(d.weights)};
}

/// `make(rank)` returns the layer as `rank` runs it.
template <class S, class Make>
results on_gpus(group& gpus, layer<float> const& p, floats const& dy, S const& sharding, cpx::sum_order order,
                Make const& make) {
    std::vector<cpx::section> const hidden{{1, p.config.hidden}};
    results r{floats(p.x.size(), NAN), floats(p.x.size(), NAN), {}};
    floats const weights = joined(p.weights);
    std::mutex guard;
    gpus.run([&](cpx::nccl& comm, auto const& meet) {
        cpx::cuda::stream const stream;
        {
            on_gpu by(comm, stream, meet);
            int const rank = comm.rank();
            auto const memory = by.comm.memory();
            auto const net = make(rank);
            auto const there = [&](floats const& whole) {
                auto made = cpx::make_tensor<float>(sharding, rank, p.config.hidden, memory);
                auto const local = on_ranks::take(whole, hidden, sharding, rank);
                made.write(local.elements());
                return made;
            };
            auto const x = there(p.x), of_y = there(dy);
            auto y = there(p.x), dx = there(p.x);
            auto w = memory.template zeros<float>("test", {std::ssize(weights)});
            auto dw = memory.template zeros<float>("test", {std::ssize(weights)});
            memory.write(w.data(), std::span<float const>(weights));
            auto const of_w = parameters<float const>(w.data(), p.config);
            typename std::remove_cvref_t<decltype(net)>::template saved_of<float, cpx::cuda::memory> saved;
            by.comm.meet();

            net(of_w, x, y, by, {{}, &saved});
            cpx::gated_delta_net_gradients<float, S, cpx::cuda::memory> const to{
                dx, parameters<float>(dw.data(), p.config), order};
            gated_delta_net_backward(net, of_w, x, saved, of_y, to, by);
            cpx::sum_over_ranks(std::span<float>(dw.data(), weights.size()), by.comm);
            by.comm.meet();

            std::lock_guard const lock(guard);
            auto const put = [&](floats const& local, floats& whole) {
                auto from = local.begin();
                sharding.for_each_piece(rank, [&](cpx::range piece) {
                    auto const count = piece.size() * p.config.hidden;
                    std::copy_n(from, count, whole.begin() + piece.first * p.config.hidden);
                    from += count;
                });
            };
            put(y.read(), r.y);
            put(dx.read(), r.dx);
            r.dweights = memory.read(std::span<float const>(dw.data(), weights.size()));
        }
        meet();
    });
    gpus.share(r.y);
    gpus.share(r.dx);
    return r;
}

void check_close(results const& got, results const& expected) {
    CHECK(on_ranks::relative_error(got.y, expected.y) <= 1e-5);
    CHECK(on_ranks::relative_error(got.dx, expected.dx) <= 1e-5);
    CHECK(on_ranks::relative_error(got.dweights, expected.dweights) <= 1e-5);
}
void check_same(results const& got, results const& expected) {
    CHECK(on_ranks::same_bits(got.y, expected.y));
    CHECK(on_ranks::same_bits(got.dx, expected.dx));
    CHECK(on_ranks::same_bits(got.dweights, expected.dweights));
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE(
        "a gated delta net on GPUs is the host's with its gradients, by serial and by heads with the bits of one") {
        if (!has_gpus(2)) return;
        cpx::gated_delta_net_config const config{48, {2, 4, 24, 40}, 4, 64, 1e-6};
        auto const p = reference::random_layer<float>(support::lengths({70, 0, 1, 130, 64, 3, 211}), config, true, 4);
        support::splitmix numbers(9);
        auto const dy = on_ranks::uniform<float>(numbers, std::ssize(p.x), 1);
        auto const expected = on_host(p, dy);
        group one(1), gpus(2);
        auto const in_place = [&]<class How>(How, group& on, by_tokens const& sharding, cpx::sum_order order) {
            return on_gpus(on, p, dy, sharding, order,
                           [&](int rank) { return cpx::gated_delta_net(cpx::carry<How>(sharding, rank), config); });
        };
        auto const alone = in_place(cpx::serial{}, one, on_ranks::one_rank(p.batch), cpx::sum_order::by_row);
        check_close(alone, expected);
        by_tokens const aligned = cpx::shard(p.batch, cpx::zigzag<>(2), cpx::aligned<64>{}),
                        any = cpx::shard(p.batch, cpx::striped<>(2));
        check_same(in_place(cpx::serial{}, gpus, aligned, cpx::sum_order::by_row), alone);
        check_close(in_place(cpx::scan{}, gpus, any, cpx::sum_order::by_rank), expected);

        using by_heads = cpx::head_sharded<>;
        by_heads const mix(2, p.batch, config.sections()), back(2, p.batch, config.output_sections());
        check_same(on_gpus(gpus, p, dy, any, cpx::sum_order::by_row,
                           [&](int rank) {
                               return cpx::gated_delta_net(cpx::carry<cpx::serial>(mix, rank), relayout(any, mix, rank),
                                                           relayout(back, any, rank), config);
                           }),
                   alone);
    }
}
