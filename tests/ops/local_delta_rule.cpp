// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/local/delta_rule.hpp>

#include <cpx/model/safetensors.hpp>
#include <cpx/ops/eigen.hpp>

#include <doctest/doctest.h>

#include <support/files.hpp>

#include <ops/bits.hpp>

using bits::rows, bits::scattered, bits::size;

namespace {

/// One head's inputs: q, k (n, Dk), v (n, Dv), g, beta (n, 1).
template <class T>
struct head {
    scattered<T> q, k, v, g, beta;

    head sub(size first, size n, size gap = 0, size shift = 0) const {
        auto const copy = [&](scattered<T> const& x, size more) {
            return scattered<T>(x.view().sub(first, n), gap + more, shift + more);
        };
        return {copy(q, 0), copy(k, 1), copy(v, 2), copy(g, 3), copy(beta, 1)};
    }
};

/// `decay` is the largest -g.
template <class T>
head<T> random_head(size n, size dk, size dv, double decay, std::uint64_t seed = 1) {
    head<T> h{bits::uniform<T>(n, dk, seed), bits::uniform<T>(n, dk, seed + 1), bits::uniform<T>(n, dv, seed + 2),
              bits::uniform<T>(n, 1, seed + 3), bits::uniform<T>(n, 1, seed + 4)};
    for (size t = 0; t < n; ++t) {
        h.g.view()(t, 0) = static_cast<T>(-decay) * std::abs(h.g.view()(t, 0));
        h.beta.view()(t, 0) = std::abs(h.beta.view()(t, 0));
    }
    return h;
}

template <class T>
struct outcome {
    scattered<T> o, state;
};

template <class T>
outcome<T> forward(head<T> const& h, size first, cpx::delta_rule_options const& options, scattered<T> state) {
    outcome<T> result{{h.v.view().count(), h.v.view().width(), 1, 3}, std::move(state)};
    cpx::delta_rule_forward<T>(h.q, h.k, h.v, h.g, h.beta, first, options, result.state.view(), result.o.view());
    return result;
}

template <class T>
scattered<T> zeros(size dk, size dv) {
    return bits::uniform<T>(dk, dv, 1, 0);
}

template <class T>
outcome<T> forward(head<T> const& h, size first = 0, cpx::delta_rule_options const& options = {}) {
    return forward(h, first, options, zeros<T>(h.k.view().width(), h.v.view().width()));
}

/// The recurrence, token by token, in double.
template <class T>
outcome<double> recurrence(head<T> const& h, cpx::delta_rule_options const& options, scattered<T> const& start) {
    size const n = h.k.view().count(), dk = h.k.view().width(), dv = h.v.view().width();
    outcome<double> result{{n, dv}, {dk, dv}};
    auto const s = result.state.view();
    for (size d = 0; d < dk; ++d)
        for (size e = 0; e < dv; ++e) s(d, e) = static_cast<double>(start.view()(d, e));
    auto const row = [&](scattered<T> const& x, size t) {
        std::vector<double> values(x.view().row(t), x.view().row(t) + dk);
        double squares = 1e-6;
        for (double const value : values) squares += value * value;
        if (options.qk_l2norm)
            for (double& value : values) value /= std::sqrt(squares);
        return values;
    };
    for (size t = 0; t < n; ++t) {
        auto const q = row(h.q, t), k = row(h.k, t);
        double const decay = std::exp(static_cast<double>(h.g.view()(t, 0))),
                     beta = static_cast<double>(h.beta.view()(t, 0));
        double const scale = options.scale ? *options.scale : 1 / std::sqrt(static_cast<double>(dk));
        for (size e = 0; e < dv; ++e) {
            double stored = 0, read = 0;
            for (size d = 0; d < dk; ++d) stored += (s(d, e) *= decay) * k[static_cast<std::size_t>(d)];
            for (size d = 0; d < dk; ++d) {
                s(d, e) += beta * k[static_cast<std::size_t>(d)] * (static_cast<double>(h.v.view()(t, e)) - stored);
                read += s(d, e) * q[static_cast<std::size_t>(d)];
            }
            result.o.view()(t, e) = scale * read;
        }
    }
    return result;
}

/// Returns `map start + end`.
template <class T>
scattered<T> apply(scattered<T> const& map, scattered<T> const& start, scattered<T> end) {
    for (size d = 0; d < start.view().count(); ++d)
        for (size c = 0; c < start.view().count(); ++c)
            for (size e = 0; e < start.view().width(); ++e) end.view()(d, e) += map.view()(d, c) * start.view()(c, e);
    return end;
}

/// Runs a sequence segment by segment: each is folded without its predecessors, and starts from the states joined.
template <class T>
outcome<T> joined(head<T> const& h, cpx::delta_rule_options const& options, std::vector<size> cuts) {
    size const n = h.k.view().count(), dk = h.k.view().width(), dv = h.v.view().width();
    outcome<T> result{{n, dv}, zeros<T>(dk, dv)};
    cuts.push_back(n);
    size begin = 0;
    for (size const end : cuts) {
        auto const segment = h.sub(begin, end - begin, begin % 3, end % 4);
        scattered<T> map(dk, dk, 1, 1), folded(zeros<T>(dk, dv).view(), 3, 2);
        cpx::delta_rule_fold<T>(segment.k, segment.v, segment.g, segment.beta, begin, options, folded.view(),
                                map.view());
        auto const own = forward(segment, begin, options, result.state);
        for (size t = begin; t < end; ++t) std::copy_n(own.o.view().row(t - begin), dv, result.o.view().row(t));
        result.state = apply(map, result.state, folded);
        begin = end;
    }
    return result;
}

template <class T>
double const bound = std::is_same_v<T, double> ? 1e-13 : 3e-6;

template <class T>
void check_agree(outcome<T> const& got, outcome<double> const& expected) {
    CHECK(bits::relative_error<T, double>(got.o, expected.o) <= bound<T>);
    CHECK(bits::relative_error<T, double>(got.state, expected.state) <= bound<T>);
}

template <class T>
void check_same(outcome<T> const& a, outcome<T> const& b) {
    CHECK(bits::same<T>(a.o, b.o));
    CHECK(bits::same<T>(a.state, b.state));
}

} // namespace

TEST_SUITE("ops") {
    TEST_CASE_TEMPLATE("the chunked delta rule is the recurrence of tokens", T, float, double) {
        for (double const decay : {0.0, 0.05, 2.0, 30.0})
            for (bool const l2norm : {true, false})
                for (size const chunk : {1, 2, 7, 64, 500}) {
                    size const n = 150, dk = 9, dv = 5;
                    auto h = random_head<T>(n, dk, dv, decay);
                    if (!l2norm) // keys longer than sqrt(2 / beta) make the recurrence itself explode
                        for (size t = 0; t < n; ++t)
                            for (size d = 0; d < dk; ++d) h.k.view()(t, d) /= 3;
                    auto const start = bits::uniform<T>(dk, dv, 9);
                    cpx::delta_rule_options const options = {chunk, l2norm, l2norm ? std::optional<double>() : 0.7};
                    CAPTURE(decay);
                    CAPTURE(chunk);
                    check_agree(forward(h, 3, options, start), recurrence(h, options, start));
                }
    }

    TEST_CASE_TEMPLATE("one abrupt decay among slow ones costs no precision", T, float, double) {
        auto h = random_head<T>(128, 16, 16, 0.01);
        for (size t = 5; t < 128; t += 6) h.g.view()(t, 0) = -60;
        check_agree(forward(h), recurrence(h, {}, zeros<T>(16, 16)));
    }

    TEST_CASE_TEMPLATE("thousands of equal slow decays cost no precision", T, float, double) {
        auto h = random_head<T>(4097, 8, 8, 1);
        for (size t = 0; t < 4097; ++t) {
            h.g.view()(t, 0) = static_cast<T>(-1e-4f); // rounded alike, so that errors of all would add up
            h.beta.view()(t, 0) /= 1000;               // else what is erased hides them
        }
        check_agree(forward(h), recurrence(h, {}, zeros<T>(8, 8)));
    }

    TEST_CASE_TEMPLATE("decays that underflow give numbers, and beta 0 writes nothing", T, float, double) {
        auto h = random_head<T>(100, 8, 8, 1e5);
        h.g.view()(7, 0) = -std::numeric_limits<T>::infinity();
        check_agree(forward(h), recurrence(h, {}, zeros<T>(8, 8)));
        for (size t = 0; t < 100; ++t) {
            h.beta.view()(t, 0) = 0;
            h.g.view()(t, 0) = 0;
        }
        auto const start = bits::uniform<T>(8, 8, 9);
        CHECK(bits::same<T>(forward(h, 0, {}, start).state, start.view()));
    }

    TEST_CASE_TEMPLATE("no tokens leave the state as it is", T, float, double) {
        auto const h = random_head<T>(0, 8, 6, 1);
        auto const start = bits::uniform<T>(8, 6, 9);
        CHECK(bits::same<T>(forward(h, 5, {}, start).state, start.view()));
        scattered<T> map(8, 8), end = start;
        cpx::delta_rule_fold<T>(h.k, h.v, h.g, h.beta, 5, {}, end.view(), map.view());
        CHECK(bits::same<T>(end, start.view()));
        for (size i = 0; i < 8; ++i)
            for (size j = 0; j < 8; ++j) CHECK(map.view()(i, j) == (i == j ? 1 : 0));
    }

    TEST_CASE_TEMPLATE("a cut at a multiple of the chunk changes no bit", T, float, double) {
        for (size const chunk : {1, 8, 64})
            for (size const first : {0, 5, 8}) {
                size const n = 140, dk = 17, dv = 11;
                auto const h = random_head<T>(n, dk, dv, 0.3);
                auto const start = bits::uniform<T>(dk, dv, 9);
                cpx::delta_rule_options const options = {.chunk = chunk};
                auto const whole = forward(h, first, options, start);
                for (size cut = 0; cut <= n; ++cut) {
                    if ((first + cut) % chunk != 0) continue;
                    CAPTURE(cut);
                    auto const front = forward(h.sub(0, cut, 3, 1), first, options, start);
                    auto const back = forward(h.sub(cut, n - cut, 1, 2), first + cut, options, front.state);
                    CHECK(bits::same<T>(front.o, whole.o.view().sub(0, cut)));
                    CHECK(bits::same<T>(back.o, whole.o.view().sub(cut, n - cut)));
                    CHECK(bits::same<T>(back.state, whole.state));
                }
            }
    }

    TEST_CASE_TEMPLATE("an output does not depend on later tokens, bit for bit", T, float, double) {
        size const n = 90;
        auto const h = random_head<T>(n, 12, 12, 0.2);
        cpx::delta_rule_options const options = {.chunk = 32};
        auto const whole = forward(h, 3, options);
        for (size t = 0; t <= n; ++t)
            CHECK(bits::same<T>(forward(h.sub(0, t), 3, options).o, whole.o.view().sub(0, t)));
        auto poisoned = h;
        for (scattered<T>* x : {&poisoned.q, &poisoned.k, &poisoned.v, &poisoned.g, &poisoned.beta})
            x->view()(50, 0) = std::numeric_limits<T>::quiet_NaN();
        CHECK(bits::same<T>(forward(poisoned, 3, options).o.view().sub(0, 50), whole.o.view().sub(0, 50)));
    }

    TEST_CASE_TEMPLATE("the delta rule does not depend on strides and alignment, bit for bit", T, float, double) {
        auto const h = random_head<T>(70, 13, 7, 0.5);
        auto const whole = forward(h, 1);
        for (size gap = 0; gap < 5; ++gap)
            for (size shift = 0; shift < 5; ++shift)
                check_same(forward(h.sub(0, 70, gap, shift), 1, {}, scattered<T>(zeros<T>(13, 7).view(), shift, gap)),
                           whole);
    }

    TEST_CASE_TEMPLATE("value columns do not depend on each other, bit for bit", T, float, double) {
        auto const h = random_head<T>(70, 13, 21, 0.5);
        auto const whole = forward(h, 1);
        for (size first = 0; first + 4 <= 21; ++first) {
            auto some = h;
            some.v = scattered<T>(h.v.view().columns(first, 4), 1, 1);
            auto const own = forward(some, 1);
            CHECK(bits::same<T>(own.o, whole.o.view().columns(first, 4)));
            CHECK(bits::same<T>(own.state, whole.state.view().columns(first, 4)));
        }
    }

    TEST_CASE_TEMPLATE("a fold from a known state ends in the state of forward, bit for bit", T, float, double) {
        for (size const first : {0, 40}) {
            auto const h = random_head<T>(150, 10, 18, 0.2);
            auto const start = bits::uniform<T>(10, 18, 9);
            scattered<T> with_map = start, without = start, map(10, 10);
            cpx::delta_rule_fold<T>(h.k, h.v, h.g, h.beta, first, {}, with_map.view(), map.view());
            cpx::delta_rule_fold<T>(h.k, h.v, h.g, h.beta, first, {}, without.view(), {});
            auto const expected = forward(h, first, {}, start);
            CHECK(bits::same<T>(with_map, expected.state));
            CHECK(bits::same<T>(without, expected.state));

            scattered<T> end = zeros<T>(10, 18);
            cpx::delta_rule_fold<T>(h.k, h.v, h.g, h.beta, first, {}, end.view(), {});
            CHECK(bits::relative_error<T, T>(apply(map, start, end), expected.state.view()) <= bound<T>);
        }
    }

    TEST_CASE_TEMPLATE("segments joined by their folds give the unsharded result", T, float, double) {
        bits::random source{7};
        for (double const decay : {0.0, 0.01, 1.0, 20.0})
            for (int repeat = 0; repeat < 10; ++repeat) {
                size const n = 200;
                auto const h = random_head<T>(n, 16, 12, decay, source.next());
                std::vector<size> cuts;
                for (int i = 0; i < 6; ++i) cuts.push_back(static_cast<size>(source.next() % 201));
                std::sort(cuts.begin(), cuts.end()); // equal cuts make empty segments
                check_agree(joined(h, {}, cuts), recurrence(h, {}, zeros<T>(16, 12)));
            }
    }

    TEST_CASE_TEMPLATE("the delta rule agrees with transformers, however sequences are cut", T, float, double) {
        double const most = std::is_same_v<T, double> ? 2e-7 : 5e-6;
        double worst = 0;
        for (std::string const name : {"gdr_small", "gdr_odd", "gdr_fast_decay"}) {
            CAPTURE(name);
            cpx::safetensors const file(std::string(support::golden_dir) + "/" + name + ".safetensors");
            auto const q = file.read<T>("q"), k = file.read<T>("k"), v = file.read<T>("v"), g = file.read<T>("g"),
                       beta = file.read<T>("beta");
            auto const o = file.read<double>("o"), states = file.read<double>("final_state");
            auto const offsets = file.read<cpx::index_t>("cu_seqlens");
            size const hk = file.tensor("q").shape.at(1), dk = file.tensor("q").shape.at(2),
                       hv = file.tensor("v").shape.at(1), dv = file.tensor("v").shape.at(2);
            cpx::delta_rule_options const options = {.qk_l2norm = file.metadata("qk_l2norm") == "True"};
            bits::random source{11};
            for (std::size_t s = 0; s + 1 < offsets.size(); ++s)
                for (size i = 0; i < hv; ++i) {
                    size const begin = offsets[s], n = offsets[s + 1] - begin, shared = i / (hv / hk);
                    auto const copy = [&](std::vector<T> const& x, size heads, size which, size width) {
                        return scattered<T>(rows<T const>(x, heads * width).columns(which * width, width).sub(begin, n),
                                            0, 0);
                    };
                    head<T> const h{copy(q, hk, shared, dk), copy(k, hk, shared, dk), copy(v, hv, i, dv),
                                    copy(g, hv, i, 1), copy(beta, hv, i, 1)};
                    auto const expected = rows<double const>(o, hv * dv).columns(i * dv, dv).sub(begin, n);
                    auto const state = rows<double const>(states, dv).sub((static_cast<size>(s) * hv + i) * dk, dk);
                    for (int repeat = 0; repeat < 8; ++repeat) {
                        std::vector<size> cuts;
                        for (int cut = 0; cut < repeat; ++cut)
                            cuts.push_back(static_cast<size>(source.next() % static_cast<std::uint64_t>(n + 1)));
                        std::sort(cuts.begin(), cuts.end());
                        auto const got = repeat == 0 ? forward(h, 0, options) : joined(h, options, cuts);
                        double const of_o = bits::relative_error<T, double>(got.o, expected),
                                     of_state = bits::relative_error<T, double>(got.state, state);
                        CHECK(of_o <= most);
                        CHECK(of_state <= most);
                        worst = std::max({worst, of_o, of_state});
                    }
                }
        }
        MESSAGE("largest relative error " << worst);
    }

    TEST_CASE("the gate is minus a softplus times exp of A_log") {
        CHECK(cpx::delta_rule_gate(0.5, 1.0, -0.25) ==
              doctest::Approx(-std::exp(1.0) * std::log1p(std::exp(0.25))).epsilon(1e-15));
        CHECK(cpx::delta_rule_gate(-1e4, 1.0, 0.0) == 0);
        CHECK(cpx::delta_rule_gate(1e4, 0.0, 0.0) == -1e4);
    }

    TEST_CASE("gates of 16 bits take A_log and dt_bias in float, which 16 bits would not hold") {
        using brain = Eigen::bfloat16;
        brain const b(0.5f), a(-0.75f);
        float const A_log = 2.0078f, dt_bias = -7.0117f; // between two of 16 bits
        REQUIRE(static_cast<float>(brain(A_log)) != A_log);
        REQUIRE(static_cast<float>(brain(dt_bias)) != dt_bias);
        auto const one = [](auto const& x) { return cpx::rows(&x, 1, 1); };
        float g = 0, beta = 0;
        cpx::rowwise::delta_gates<brain>{one(b), one(a), one(A_log), one(dt_bias), {&g, 1, 1}, {&beta, 1, 1}}(0, 0);
        CHECK(g == cpx::delta_rule_gate(-0.75f, A_log, dt_bias));
        CHECK(beta == cpx::sigmoid(0.5f));
        brain db(0), da(0);
        std::vector<float> terms(2);
        cpx::rowwise::delta_gates_backward<brain>{one(b),    one(a),      one(A_log),  one(dt_bias), one(g),
                                                  one(beta), {&db, 1, 1}, {&da, 1, 1}, {terms, 2}}(0, 0);
        auto const expected = cpx::delta_rule_gate_backward(-0.75f, A_log, dt_bias, g);
        CHECK(terms == std::vector<float>{expected.a_log, expected.dt_bias});
        CHECK(da == brain(expected.a));
    }

    TEST_CASE("a chunk of no tokens and a state of another shape are errors") {
        auto const h = random_head<float>(4, 3, 2, 1);
        CHECK_THROWS_WITH_AS(forward(h, 0, {.chunk = 0}), doctest::Contains("chunk: expected at least 1, got 0"),
                             cpx::error);
        CHECK_THROWS_WITH_AS(forward(h, 0, {}, zeros<float>(2, 3)),
                             doctest::Contains("shape of state: expected (3, 2), got (2, 3)"), cpx::error);
        CHECK_THROWS_AS(forward(h, -1), cpx::error);
    }
}
