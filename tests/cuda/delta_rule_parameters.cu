// SPDX-License-Identifier: Apache-2.0
// Log decays that the gated delta rule and a decay a head make of parameters, against g that is made beforehand.
#include <cpx/cuda/delta_rule_fold.hpp>
#include <cpx/cuda/delta_rule_step.hpp>
#include <cpx/cuda/elements.hpp>
#include <cpx/cuda/gated_delta_rule.hpp>

#include "../../harness/graph.hpp"
#include "gpus.hpp"
#include "packed_heads.hpp"

#include <support/rejects.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using namespace packed_heads;
namespace gpu = cpx::cuda;

/// Elements of a row of a, or of its gradient, before those of the heads and behind them: what else a projection gives.
constexpr index_t others = 3;

/// A problem, parameters of its log decays, and g that `rowwise::delta_gates` makes of them, on a device. `counts`: the
/// rows of sequences, if they have not all up to the next one.
template <class T>
struct parameters {
    device_problem<T> there;
    index_t heads, rows_there;
    numbers a, a_log, dt_bias;
    buffer<T> a_there;
    buffer<float> a_log_there, dt_bias_there, unread; ///< unread: beta of them
    std::vector<index_t> counts;
    buffer<index_t> counts_there{std::span<index_t const>(counts)};

    parameters(problem const& p, std::uint64_t seed, std::vector<index_t> of_sequences = {})
        : there{p}, heads(p.shape.value_heads), rows_there(p.rows()), counts(std::move(of_sequences)) {
        support::splitmix random(seed);
        a = on_ranks::uniform<double>(random, rows_there * heads, 6);
        for (std::size_t i = 0; i < a.size(); i += 29) a[i] = i % 2 == 0 ? -90 : 40; // no decay, and all
        a_log = on_ranks::uniform<double>(random, heads, 2);
        dt_bias = on_ranks::uniform<double>(random, heads, 2);
        numbers wider(static_cast<std::size_t>(rows_there * (heads + 2 * others)), NAN);
        for (index_t row = 0; row < rows_there; ++row)
            std::copy_n(a.begin() + row * heads, heads, wider.begin() + row * (heads + 2 * others) + others);
        a_there = upload<T>(wider), a_log_there = upload<float>(a_log), dt_bias_there = upload<float>(dt_bias);
        unread = buffer<float>(std::ssize(a));
        gpu::for_each_element(gpu::memory(nullptr), rows_there, heads,
                              cpx::rowwise::delta_gates<T>{inner(a_there), inner(a_there), column(a_log_there),
                                                           column(dt_bias_there), of(there.g), of(unread)});
        gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    template <class X>
    rows<X> of(buffer<X> const& x) const {
        return {x.data(), rows_there, heads};
    }
    /// Columns of the heads within rows that are wider.
    rows<T> inner(buffer<T> const& x) const {
        return rows<T>(x.data(), rows_there, heads + 2 * others).columns(others, heads);
    }
    bool in_a_sequence(index_t row) const {
        auto const& offsets = there.p.offsets;
        for (std::size_t s = 0; s + 1 < offsets.size(); ++s)
            if (row >= offsets[s] && row < (counts.empty() ? offsets[s + 1] : offsets[s] + counts[s])) return true;
        return false;
    }
    static rows<float const> column(buffer<float> const& x) { return {x.data(), x.size(), 1}; }
    gpu::log_decay_parameters<T> decays() const { return {inner(a_there), all(a_log_there), all(dt_bias_there)}; }

    /// What calls read: with g, or what it is made of.
    template <gpu::erases Of>
    gpu::gated_delta_rule_input<T> in(bool made, std::span<char> saved = {}) const {
        auto in = Of == gpu::erases::yes ? there.erasing(saved) : there.decaying();
        if (made) in.g = {}, in.g_of = decays();
        in.counts = all(counts_there);
        return in;
    }
};

/// A forward and a backward, of poisoned results; if `made` dg is that of a, and there are sums.
template <class T, gpu::erases Of>
struct results_of {
    results of;
    numbers da_log, ddt_bias;

    results_of(parameters<T> const& p, bool made, bool saves = false) {
        gpu::stream const stream;
        problem const& x = p.there.p;
        index_t const n = x.rows(), count = x.sequences();
        auto const o = poisoned<T>(x.v.size()), dq = poisoned<T>(x.q.size()), dk = poisoned<T>(x.q.size()),
                   dv = poisoned<T>(x.v.size()), da = poisoned<T>(n * (p.heads + 2 * others));
        auto const last = poisoned<float>(x.state.size()), dg = poisoned<float>(x.g.size()),
                   dbeta = poisoned<float>(x.g.size()), dstate = poisoned<float>(x.state.size()),
                   sums = poisoned<float>(2 * p.heads);
        auto const saved = poisoned<char>(saves ? gpu::gated_delta_rule_saved<T>(x.shape, n, count) : 0);
        auto const space = poisoned<char>(gpu::gated_delta_rule_workspace<T, Of>(x.shape, n, count, saves)),
                   more = poisoned<char>(gpu::gated_delta_rule_backward_workspace<T, Of>(x.shape, n, count, saves));
        auto const in = p.template in<Of>(made, all(saved));
        of.path = gpu::gated_delta_rule<T, Of>(x.shape, in, {o.data(), n, x.values()}, all(last), all(space), stream);
        gpu::gated_delta_rule_gradients<T> to{{dq.data(), n, x.keys()},
                                              {dk.data(), n, x.keys()},
                                              {dv.data(), n, x.values()},
                                              rows<float>(),
                                              rows<float>(),
                                              all(dstate)};
        if (made)
            to.dg_of = {p.inner(da), all(sums).first(static_cast<std::size_t>(p.heads)),
                        all(sums).last(static_cast<std::size_t>(p.heads))};
        else
            to.dg = p.of(dg);
        if (Of == gpu::erases::yes) to.dbeta = p.of(dbeta);
        CHECK(gpu::gated_delta_rule_backward<T, Of>(x.shape, in, p.there.gradients(), all(p.there.dlast), to, all(more),
                                                    stream) == of.path);
        of.o = widen(o.read()), of.last = widen(last.read());
        of.dq = widen(dq.read()), of.dk = widen(dk.read()), of.dv = widen(dv.read());
        of.dg = widen(dg.read()), of.dstate = widen(dstate.read());
        if (Of == gpu::erases::yes) of.dbeta = widen(dbeta.read());
        if (!made) return;
        of.dg.clear();
        auto const wider = widen(da.read());
        bool untouched = true;
        for (index_t row = 0, i = 0; row < n; ++row)
            for (index_t column = 0; column < p.heads + 2 * others; ++column, ++i)
                if (column >= others && column < others + p.heads)
                    of.dg.push_back(wider[static_cast<std::size_t>(i)]);
                else
                    untouched = untouched && std::isnan(wider[static_cast<std::size_t>(i)]);
        CHECK(untouched);
        auto const both = widen(sums.read());
        da_log.assign(both.begin(), both.begin() + p.heads), ddt_bias.assign(both.begin() + p.heads, both.end());
    }
};

/// Checks that all is as with g that is made beforehand, whose gradient makes those of the parameters.
template <class T, gpu::erases Of>
void check(parameters<T> const& p, bool saves = false) {
    results_of<T, Of> const made(p, true, saves), given(p, false, saves);
    CHECK(made.of.path == given.of.path);
    CHECK((on_ranks::same_bits(made.of.o, given.of.o) && on_ranks::same_bits(made.of.last, given.of.last)));
    results expected = given.of;
    numbers da_log(static_cast<std::size_t>(p.heads)), ddt_bias(da_log), sizes_a(da_log), sizes_dt(da_log);
    auto const rounded_a = widen(convert<T>(p.a)), a_log = widen(convert<float>(p.a_log)),
               dt_bias = widen(convert<float>(p.dt_bias));
    bool same_da = true;
    for (std::size_t i = 0; i < given.of.dg.size(); ++i) {
        std::size_t const h = i % static_cast<std::size_t>(p.heads);
        if (!p.in_a_sequence(static_cast<index_t>(i) / p.heads)) {
            same_da = same_da && std::isnan(made.of.dg[i]); // as it was
            continue;
        }
        auto const by = cpx::delta_rule_gate_backward<double>(rounded_a[i], a_log[h], dt_bias[h], given.of.dg[i]);
        da_log[h] += by.a_log, ddt_bias[h] += by.dt_bias;
        sizes_a[h] += std::abs(by.a_log), sizes_dt[h] += std::abs(by.dt_bias);
        double const ulp = std::is_same_v<T, float> ? 1e-6 : std::is_same_v<T, __half> ? 0x1p-10 : 0x1p-7;
        same_da = same_da && std::abs(made.of.dg[i] - by.a) <= ulp * std::abs(by.a) + 0x1p-24;
    }
    CHECK(same_da);
    for (std::size_t h = 0; h < da_log.size(); ++h) {
        CHECK(std::abs(made.da_log[h] - da_log[h]) <= 1e-5 * sizes_a[h]);
        CHECK(std::abs(made.ddt_bias[h] - ddt_bias[h]) <= 1e-5 * sizes_dt[h]);
    }
    expected.dg = made.of.dg;
    CHECK(same_gradients(made.of, expected));
    CHECK(on_ranks::same_bits(results_of<T, Of>(p, true, saves).da_log, made.da_log));
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE_TEMPLATE("log decays made of parameters where they are read have the bits of those made beforehand", T,
                       float, __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        struct size {
            index_t key_heads, group, key_dim, value_dim;
        };
        std::uint64_t seed = 0;
        for (size const s : {size{2, 2, 128, 128}, {1, 3, 96, 64}, {3, 1, 20, 33}, {5, 7, 8, 8}})
            for (auto const path : {delta_rule_path::tensor_cores, delta_rule_path::plain}) {
                CAPTURE(s.key_dim);
                CAPTURE(static_cast<int>(path));
                auto p = make<T>({70, 0, 1, 200, 64}, s.key_heads, s.group, s.key_dim, s.value_dim, kind::mild, ++seed);
                p.shape.path = path;
                parameters<T> const of(p, seed);
                check<T, gpu::erases::yes>(of);
                check<T, gpu::erases::yes>(of, true);
                p.beta.clear();
                check<T, gpu::erases::no>(of);
            }
    }

    TEST_CASE("parameters of many chunks, of rows of no sequence, and of no sequences at all") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        check<T, gpu::erases::yes>({make<T>({3000, 1, 2500}, 1, 2, 128, 128, kind::mild, 1), 1});
        auto p = make<T>({70, 130, 64}, 1, 2, 64, 64, kind::mild, 2);
        p.offsets.pop_back();
        for (numbers* const states : {&p.state, &p.dlast}) states->resize(states->size() / 3 * 2);
        for (auto const path : {delta_rule_path::tensor_cores, delta_rule_path::plain}) {
            p.shape.path = path;
            check<T, gpu::erases::yes>({p, 2});
        }
        auto q = make<T>({70, 130, 64}, 1, 2, 128, 128, kind::mild, 3);
        q.first = {100, 0, 63};
        for (auto const path : {delta_rule_path::tensor_cores, delta_rule_path::plain}) {
            q.shape.path = path;
            check<T, gpu::erases::yes>({q, 3, {50, 130, 0}});
        }
        p.offsets = {0}, p.state.clear(), p.dlast.clear();
        results_of<T, gpu::erases::yes> const none({p, 3}, true);
        CHECK((none.da_log == numbers(2) && none.ddt_bias == numbers(2)));
    }

    TEST_CASE("folds and steps of decoding make log decays of parameters, too") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        auto const both = [](auto of, delta_rule_path path, index_t dim) {
            constexpr gpu::erases Of = decltype(of)::value;
            constexpr bool erases = Of == gpu::erases::yes;
            auto p = make<T>({70, 0, 200}, 1, 2, dim, dim, kind::mild, 5);
            p.shape.path = path;
            parameters<T> const x(p, 5);
            gpu::stream const stream;
            auto const run = [&](bool made) {
                auto const maps = poisoned<float>(erases ? 3 * 2 * dim * dim : 3 * 2);
                auto const ends = poisoned<float>(3 * 2 * dim * dim), back = poisoned<float>(3 * 2 * dim * dim),
                           states = upload<float>(numbers(p.v.size() * static_cast<std::size_t>(dim), 0.5));
                auto const o = poisoned<T>(p.v.size());
                auto const space =
                    poisoned<char>(gpu::gated_delta_rule_fold_workspace<T, Of>(p.shape, p.rows(), p.sequences()));
                auto const in = x.template in<Of>(made);
                CHECK(gpu::gated_delta_rule_fold<T, Of>(p.shape, in, all(maps), all(ends), all(space), stream) ==
                      (path == delta_rule_path::plain ? path : core_path()));
                gpu::gated_delta_rule_backward_fold<T, Of>(p.shape, in, x.there.gradients(), all(back), all(space),
                                                           stream);
                gpu::gated_delta_rule_step<T, Of>(p.shape, {in.q, in.k, in.v, in.g, in.beta, {}, in.g_of},
                                                  {o.data(), p.rows(), p.values()}, all(states), stream);
                stream.synchronize();
                return std::vector{widen(maps.read()), widen(ends.read()), widen(back.read()), widen(states.read()),
                                   widen(o.read())};
            };
            auto const made = run(true), given = run(false);
            for (std::size_t i = 0; i < made.size(); ++i) {
                CAPTURE(i);
                CHECK(std::ranges::none_of(made[i], [](double e) { return std::isnan(e); }));
                CHECK(on_ranks::same_bits(made[i], given[i]));
            }
        };
        for (index_t const dim : {128, 20})
            for (auto const path : {delta_rule_path::tensor_cores, delta_rule_path::plain}) {
                if (dim == 20 && path == delta_rule_path::tensor_cores) continue;
                CAPTURE(dim);
                both(std::integral_constant<gpu::erases, gpu::erases::yes>(), path, dim);
                both(std::integral_constant<gpu::erases, gpu::erases::no>(), path, dim);
            }
    }

    TEST_CASE("a captured backward of parameters is replayed with another packing") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        auto p = make<T>({130, 70, 100}, 1, 2, 128, 128, kind::mild, 6);
        parameters<T> x(p, 6);
        gpu::stream const stream;
        index_t const n = p.rows();
        auto const dq = poisoned<T>(p.q.size()), dk = poisoned<T>(p.q.size()), dv = poisoned<T>(p.v.size()),
                   da = poisoned<T>(n * (2 + 2 * others));
        auto const dbeta = poisoned<float>(p.g.size()), sums = poisoned<float>(4);
        auto const space = poisoned<char>(gpu::gated_delta_rule_backward_workspace<T>(p.shape, n, 3));
        harness::graph const graph(stream, [&] {
            gpu::gated_delta_rule_gradients<T> to{{dq.data(), n, p.keys()},
                                                  {dk.data(), n, p.keys()},
                                                  {dv.data(), n, p.values()},
                                                  rows<float>(),
                                                  x.of(dbeta),
                                                  std::span<float>()};
            to.dg_of = {x.inner(da), all(sums).first(2), all(sums).last(2)};
            gpu::gated_delta_rule_backward<T>(p.shape, x.template in<gpu::erases::yes>(true), x.there.gradients(),
                                              all(x.there.dlast), to, all(space), stream);
        });
        for (std::vector<index_t> const& offsets : {std::vector<index_t>{0, 1, 299, 300}, {0, 0, 150, 300}}) {
            p.offsets = offsets;
            x.there.offsets.write(offsets);
            poison(stream, dq, dk, dv, da, dbeta, sums, space);
            graph.launch(stream);
            stream.synchronize();
            results_of<T, gpu::erases::yes> const direct(x, true);
            auto const wider = widen(da.read());
            numbers found;
            for (index_t row = 0; row < n; ++row)
                for (index_t h = 0; h < 2; ++h)
                    found.push_back(wider[static_cast<std::size_t>(row * (2 + 2 * others) + others + h)]);
            CHECK(on_ranks::same_bits(found, direct.of.dg));
            auto expected = direct.da_log;
            expected.insert(expected.end(), direct.ddt_bias.begin(), direct.ddt_bias.end());
            CHECK(on_ranks::same_bits(widen(sums.read()), expected));
        }
    }

    TEST_CASE("parameters of log decays that do not fit are refused before anything is launched") {
        if (!has_gpus()) return;
        auto const p = make<float>({10}, 1, 2, 8, 8, kind::mild, 1);
        parameters<float> const x(p, 1);
        buffer<float> const o(160), dq(80), dk(80), dv(160), da(20), dg(20), dbeta(20), sums(4);
        buffer<char> const space(std::max(gpu::gated_delta_rule_backward_workspace<float>(p.shape, 10, 1),
                                          gpu::gated_delta_rule_workspace<float>(p.shape, 10, 1)));
        auto const forward = [&](auto&& change) {
            auto in = x.in<gpu::erases::yes>(true);
            change(in);
            gpu::gated_delta_rule<float>(p.shape, in, {o.data(), 10, 16}, {}, all(space), nullptr);
        };
        using input = gpu::gated_delta_rule_input<float>;
        auto const rejects = [](std::string const& words, auto&& f) {
            support::rejects({"delta_rule_parameters.cu", words}, f);
        };
        rejects("cuda::gated_delta_rule: g: expected none, for it is made of parameters, got some",
                [&] { forward([&](input& in) { in.g = x.of(x.there.g); }); });
        rejects("gated_delta_rule: size of a_log: expected 2, got 1",
                [&] { forward([](input& in) { in.g_of.a_log = in.g_of.a_log.first(1); }); });
        rejects("gated_delta_rule: size of dt_bias: expected 2, got 0",
                [&] { forward([](input& in) { in.g_of.dt_bias = {}; }); });
        rejects("gated_delta_rule: size of a_log: expected 2, got 0",
                [&] { forward([](input& in) { in.g_of.a_log = {}; }); });
        rejects("gated_delta_rule: shape of a",
                [&] { forward([](input& in) { in.g_of.a = in.g_of.a.columns(0, 1); }); });
        rejects("gated_delta_rule: overlap of o and a: expected none",
                [&] { forward([&](input& in) { in.g_of.a = rows<float const>(o.data(), 10, 2); }); });
        auto const backward = [&](bool made, auto&& change) {
            gpu::gated_delta_rule_gradients<float> to{{dq.data(), 10, 8}, {dk.data(), 10, 8},    {dv.data(), 10, 16},
                                                      rows<float>(),      {dbeta.data(), 10, 2}, std::span<float>()};
            to.dg_of = {{da.data(), 10, 2}, all(sums).first(2), all(sums).last(2)};
            change(to);
            gpu::gated_delta_rule_backward<float>(p.shape, x.in<gpu::erases::yes>(made), x.there.gradients(), {}, to,
                                                  all(space), nullptr);
        };
        using gradients = gpu::gated_delta_rule_gradients<float>;
        rejects("gated_delta_rule_backward: dg: expected none, for g is made of parameters, got some",
                [&] { backward(true, [&](gradients& to) { to.dg = rows<float>(dg.data(), 10, 2); }); });
        rejects("gated_delta_rule_backward: dg_of: expected none, for g is given, got some",
                [&] { backward(false, [&](gradients& to) { to.dg = rows<float>(dg.data(), 10, 2); }); });
        rejects("gated_delta_rule_backward: size of ddt_bias: expected 2, got 0",
                [&] { backward(true, [](gradients& to) { to.dg_of.ddt_bias = {}; }); });
        rejects("gated_delta_rule_backward: overlap of da_log and ddt_bias: expected none",
                [&] { backward(true, [](gradients& to) { to.dg_of.ddt_bias = to.dg_of.da_log; }); });
        rejects("cuda::gated_delta_rule_step: g: expected none, for it is made of parameters, got some", [&] {
            auto const in = x.in<gpu::erases::yes>(false);
            gpu::gated_delta_rule_step<float>(p.shape, {in.q, in.k, in.v, in.g, in.beta, {}, x.decays()},
                                              {o.data(), 10, 16}, all(o), nullptr);
        });
    }
}
