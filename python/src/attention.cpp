// SPDX-License-Identifier: Apache-2.0
// Causal softmax attention and labels and loss of tokens, on any sharding.
#include "comm.hpp"
#include "module.hpp"
#include "numbers.hpp"
#include "plan.hpp"

#include <cpx/ops/attention_backward.hpp>
#include <cpx/ops/token_loss.hpp>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <tuple>
#include <vector>

using namespace nanobind::literals;

namespace binding {

namespace {

using nb::object;
using head_numbers = std::tuple<index_t, index_t, index_t>;

cpx::attention_heads heads_of(head_numbers const& n) { return {std::get<0>(n), std::get<1>(n), std::get<2>(n)}; }
std::array<index_t, 3> numbers_of(head_numbers const& n) { return {std::get<0>(n), std::get<1>(n), std::get<2>(n)}; }

/// Returns a sharding of keys in which every rank holds every row.
any_rows const& whole_keys(char const* where, any_layout const& keys) {
    cpx::require(keys.every_row(), where, "sharding of keys and values",
                 "replicated or head_sharded, of which every rank holds every row", keys.text());
    return std::get<any_rows>(keys.real);
}

void attention(any_layout const& queries, any_layout const& keys, int rank, object q_, object k_, object v_,
               head_numbers const& heads, double scale, object o_, object lse_, communicator* comm) {
    char const* const where = "attention";
    auto const& all = whole_keys(where, keys);
    if (auto* const there = comm ? comm->on_device() : nullptr)
        return there->attend({queries, keys, numbers_of(heads), scale, q_, k_, v_, o_, lse_}, false);
    array const q = read(where, "q", q_), k = read(where, "k", k_), v = read(where, "v", v_),
                o = written(where, "out", o_), lse = written_if(where, "lse", lse_);
    with_float(q, [&]<class T>(of_type<T>) {
        auto const a = rows_of<T>(q), b = rows_of<T>(k), c = rows_of<T>(v);
        auto const to = rows_to<T>(o), numbers = rows_to<T>(lse);
        nb::gil_scoped_release const free;
        queries.visit([&](auto const& s) {
            cpx::sharded const on_k(b, all, rank), on_v(c, all, rank);
            cpx::attention(cpx::sharded(a, s, rank), on_k, on_v, heads_of(heads), scale, cpx::sharded(to, s, rank),
                           numbers);
        });
    });
}

void attention_backward(any_layout const& queries, any_layout const& keys, object q_, object k_, object v_, object o_,
                        object lse_, object dout_, head_numbers const& heads, double scale, object dq_, object dk_,
                        object dv_, communicator& comm) {
    char const* const where = "attention_backward";
    auto const& all = whole_keys(where, keys);
    if (auto* const there = comm.on_device())
        return there->attend({queries, keys, numbers_of(heads), scale, q_, k_, v_, o_, lse_, dout_, dq_, dk_, dv_},
                             true);
    array const q = read(where, "q", q_), k = read(where, "k", k_), v = read(where, "v", v_), o = read(where, "o", o_),
                lse = read(where, "lse", lse_), dout = read(where, "dout", dout_), dq = written(where, "dq", dq_),
                dk = written(where, "dk", dk_), dv = written(where, "dv", dv_);
    int const rank = comm.rank();
    with_float(q, [&]<class T>(of_type<T>) {
        auto const a = rows_of<T>(q), b = rows_of<T>(k), c = rows_of<T>(v), d = rows_of<T>(dout), n = rows_of<T>(lse),
                   from_o = rows_of<T>(o);
        auto const to_q = rows_to<T>(dq), to_k = rows_to<T>(dk), to_v = rows_to<T>(dv);
        call const now(where, comm);
        auto transport = comm.host(where);
        std::vector<T> sums(static_cast<std::size_t>(n.count() * n.width()));
        cpx::rows<T> const delta(sums.data(), n.count(), n.width());
        queries.visit([&]<class S>(S const& s) {
            auto const on = [&](auto const& rows) { return cpx::sharded(rows, s, rank); };
            auto const by_key = [&](auto const& rows) { return cpx::sharded(rows, all, rank); };
            cpx::attention_delta(on(from_o), on(d), heads_of(heads).dim, on(delta));
            cpx::attention_queries<T, S> const from{on(a), on(d), on(n), on(cpx::rows<T const>(delta))};
            cpx::attention_backward_queries(from, by_key(b), by_key(c), heads_of(heads), scale, on(to_q));
            cpx::attention_backward_keys(from, by_key(b), by_key(c), heads_of(heads), scale, by_key(to_k), by_key(to_v),
                                         transport);
        });
    });
}

void next_token_labels(halo_value const& plan, object tokens_, object labels_, communicator& comm) {
    char const* const where = "next_token_labels";
    array const tokens = read(where, "tokens", tokens_), labels = written(where, "labels", labels_);
    auto const from = rows_of<index_t>(tokens);
    auto const to = rows_to<index_t>(labels);
    call const now(where, comm);
    auto transport = comm.host(where);
    visit_plan(plan, [&](auto const& p, auto const& s) {
        cpx::next_token_labels(p, cpx::sharded(from, s, p.rank), cpx::sharded(to, s, p.rank), transport);
    });
}

std::pair<double, double> mean_token_loss(any_layout const& sharding, object logp_, object labels_, communicator& comm,
                                          object weights_) {
    char const* const where = "mean_token_loss";
    array const logp = read(where, "logp", logp_), labels = read(where, "labels", labels_),
                weights = read_if(where, "weights", weights_);
    cpx::token_loss loss;
    with_float(logp, [&]<class T>(of_type<T>) {
        auto const a = rows_of<T>(logp);
        auto const at = rows_of<index_t>(labels);
        auto const w = list_of<T>(weights);
        int const rank = comm.rank();
        call const now(where, comm);
        auto transport = comm.host(where);
        sharding.visit([&](auto const& s) {
            loss = cpx::mean_token_loss(cpx::sharded(a, s, rank), cpx::sharded(at, s, rank), transport, w);
        });
    });
    return {loss.mean, loss.weight};
}

void mean_token_loss_backward(any_layout const& sharding, int rank, std::pair<double, double> loss, object labels_,
                              double upstream, object dlogp_, object weights_) {
    char const* const where = "mean_token_loss_backward";
    array const labels = read(where, "labels", labels_), dlogp = written(where, "dlogp", dlogp_),
                weights = read_if(where, "weights", weights_);
    with_float(dlogp, [&]<class T>(of_type<T>) {
        auto const to = rows_to<T>(dlogp);
        auto const at = rows_of<index_t>(labels);
        auto const w = list_of<T>(weights);
        sharding.visit([&](auto const& s) {
            cpx::mean_token_loss_backward({loss.first, loss.second}, cpx::sharded(at, s, rank), upstream,
                                          cpx::sharded(to, s, rank), w);
        });
    });
}

} // namespace

void bind_attention(nb::module_& m) {
    m.def("attention", attention, "queries"_a, "keys"_a, "rank"_a, "q"_a, "k"_a, "v"_a, "heads"_a, "scale"_a, "out"_a,
          "lse"_a.none(), "comm"_a.none() = nb::none());
    m.def("attention_backward", attention_backward, "queries"_a, "keys"_a, "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a,
          "dout"_a, "heads"_a, "scale"_a, "dq"_a, "dk"_a, "dv"_a, "comm"_a);
    m.def("next_token_labels", next_token_labels, "plan"_a, "tokens"_a, "labels"_a, "comm"_a);
    m.def("mean_token_loss", mean_token_loss, "sharding"_a, "logp"_a, "labels"_a, "comm"_a, "weights"_a.none());
    m.def("mean_token_loss_backward", mean_token_loss_backward, "sharding"_a, "rank"_a, "loss"_a, "labels"_a,
          "upstream"_a, "dlogp"_a, "weights"_a.none());
}

} // namespace binding
