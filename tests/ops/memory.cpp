// SPDX-License-Identifier: Apache-2.0
// Tensors in memory of another stream than what they are given with, without a GPU.
#include <cpx/core/memory.hpp>

#include <cpx/ops/attention_backward.hpp>
#include <cpx/ops/gated_delta_net_backward.hpp>

#include <doctest/doctest.h>

#include <ops/backward.hpp>
#include <support/far_ranks.hpp>
#include <support/rejects.hpp>

template <>
inline constexpr bool cpx::detail::attends<support::far_memory, float> = true;

namespace support {

// What runs of arguments that fit. Here none do.
void attend_rows(auto const&...) { FAIL("attention ran"); }
void attend_rows_backward_queries(auto const&...) { FAIL("the gradient of queries ran"); }
void attend_rows_backward_keys(auto const&...) { FAIL("the gradients of keys ran"); }
void delta_of_rows(auto const&...) { FAIL("delta ran"); }
void add_readers(auto const&...) { FAIL("readers were added"); }
void check_rule_in(auto const&...) {} // of which memory, the layer says
void convolve(auto const&...) { FAIL("the convolution ran"); }
void convolve_backward_by_rank(auto const&...) { FAIL("the backward of the convolution ran"); }
void add_in_order(auto const&...) { FAIL("the weights' sums of the convolution ran"); }
void run_delta_rule(auto const&...) { FAIL("the delta rule ran"); }
void run_delta_rule_backward(auto const&...) { FAIL("the backward of the delta rule ran"); }
void normalise(auto const&...) { FAIL("the norm ran"); }
void normalise_backward(auto const&...) { FAIL("the backward of the norm ran"); }

/// What a layer runs on.
struct far_layers {
    far_ranks& comm;
    far_ranks& carrier() const { return comm; }
    void ended(auto const&...) const {}
    void ended_states(auto const&...) const {}
    void linear(auto const&...) const { FAIL("a projection ran"); }
    void linear_backward_input(auto const&...) const { FAIL("the backward of a projection ran"); }
    void linear_backward_weight(auto const&...) const { FAIL("the backward of a projection ran"); }
};

} // namespace support

TEST_SUITE("ops") {
    using support::far_memory, support::far_ranks;

    TEST_CASE("the tensor of another stream is named, before attention or its backward runs") {
        cpx::replicated<> const whole(1, support::lengths({6, 5}));
        using S = cpx::replicated<>;
        using tensor = cpx::tensor<float, S, far_memory>;
        cpx::attention_heads const heads{4, 2, 2};
        tensor wide(whole, 0, 8, far_memory{7}), narrow(whole, 0, 4, far_memory{7}), written = wide, of_k = narrow,
                                                                                     of_v = narrow;
        tensor later_wide(whole, 0, 8, far_memory{8}), later(whole, 0, 4, far_memory{8});
        auto const rejects = [](std::string const& where, std::string const& what, std::string const& whose,
                                auto const& f) {
            support::rejects({"memory.cpp", where + ": memory of " + what + ": expected that of " + whose +
                                                ", in its stream, got another"},
                             f);
        };
        auto const attends = [&](tensor const& k, tensor const& v, tensor& o) {
            return [&] { cpx::attention(wide, k, v, heads, 1., o); };
        };
        rejects("attention", "k", "q", attends(later, narrow, written));
        rejects("attention", "v", "k", attends(narrow, later, written));
        rejects("attention", "o", "q", attends(narrow, narrow, later_wide));

        auto const sums = [&](tensor const& dout, tensor& delta) {
            return [&] { cpx::attention_delta(wide, dout, 2, delta); };
        };
        rejects("attention_delta", "dout", "o", sums(later_wide, of_k));
        rejects("attention_delta", "delta", "o", sums(wide, later));

        using queries = cpx::attention_queries<float, S, far_memory>;
        queries const good{wide, wide, narrow, narrow};
        cpx::threads::run(1, [&](cpx::threads& threads) {
            far_ranks comm(threads);
            auto const of_queries = [&](queries const& from, tensor const& k, tensor const& v, tensor& dq) {
                return [&, from] { cpx::attention_backward_queries(from, k, v, heads, 1., dq); };
            };
            auto const of_keys = [&](queries const& from, tensor const& k, tensor const& v, tensor& dk, tensor& dv) {
                return [&, from] { cpx::attention_backward_keys(from, k, v, heads, 1., dk, dv, comm); };
            };
            for (auto const& [name, from] : {std::pair("dout", queries{wide, later_wide, narrow, narrow}),
                                             std::pair("lse", queries{wide, wide, later, narrow}),
                                             std::pair("delta", queries{wide, wide, narrow, later})}) {
                rejects("attention_backward_queries", name, "q", of_queries(from, narrow, narrow, written));
                rejects("attention_backward_keys", name, "q", of_keys(from, narrow, narrow, of_k, of_v));
            }
            rejects("attention_backward_queries", "k", "q", of_queries(good, later, narrow, written));
            rejects("attention_backward_queries", "v", "k", of_queries(good, narrow, later, written));
            rejects("attention_backward_queries", "dq", "q", of_queries(good, narrow, narrow, later_wide));
            rejects("attention_backward_keys", "k", "q", of_keys(good, later, narrow, of_k, of_v));
            rejects("attention_backward_keys", "v", "k", of_keys(good, narrow, later, of_k, of_v));
            rejects("attention_backward_keys", "dk", "k", of_keys(good, narrow, narrow, later, of_v));
            rejects("attention_backward_keys", "dv", "k", of_keys(good, narrow, narrow, of_k, later));
        });
    }

    TEST_CASE("the tensor of another stream is named, before a gated delta net or its backward runs") {
        auto const sharding = cpx::shard(support::lengths({3, 2}), cpx::zigzag<1>{});
        using S = std::remove_const_t<decltype(sharding)>;
        using tensor = cpx::tensor<float, S, far_memory>;
        auto const p = reference::random_layer<float>(sharding.batch(), {4, {1, 1, 2, 2}, 2, 4, 1e-6}, false, 1);
        cpx::threads::run(1, [&](cpx::threads& threads) {
            far_ranks comm(threads);
            support::far_layers by{comm};
            tensor x(sharding, 0, 4, comm.memory()), y = x, later(sharding, 0, 4, far_memory{8});
            cpx::gated_delta_net const net(cpx::carry<cpx::scan>(sharding, 0), p.config);
            auto const rejects = [](std::string const& where, std::string const& what, auto const& f) {
                support::rejects({"memory.cpp", where + ": memory of " + what +
                                                    ": expected the communicator's, in its stream, got another"},
                                 f);
            };
            rejects("gated_delta_net", "x", [&] { net(p.view(), later, y, by); });
            rejects("gated_delta_net", "y", [&] { net(p.view(), x, later, by); });

            decltype(net)::saved_of<float, far_memory> none;
            std::vector<float> values;
            auto const weights = reference::parameters(values, p.config);
            auto const backward = [&](tensor const& of_x, tensor const& of_y, tensor& to) {
                return [&] {
                    gated_delta_net_backward(net, p.view(), of_x, none, of_y,
                                             cpx::gated_delta_net_gradients<float, S, far_memory>{to, weights}, by);
                };
            };
            rejects("gated_delta_net_backward", "x", backward(later, x, y));
            rejects("gated_delta_net_backward", "dy", backward(x, later, y));
            rejects("gated_delta_net_backward", "dx", backward(x, x, later));
        });
    }
}
