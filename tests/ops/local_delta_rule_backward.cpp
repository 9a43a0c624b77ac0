// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/local/delta_rule_backward.hpp>

#include <cpx/model/safetensors.hpp>

#include <doctest/doctest.h>

#include <support/files.hpp>

#include <ops/gradients.hpp>

#include <utility>

using bits::rows, bits::scattered, bits::size;

namespace {

/// One head's inputs and the gradients of its results.
template <class T>
struct head {
    scattered<T> q, k, v, g, beta, start, dout, dend;

    /// The tokens `[first, first + n)`, elsewhere in memory.
    head sub(size first, size n, size gap = 0, size shift = 0) const {
        auto const copy = [&](scattered<T> const& x, size more) {
            return scattered<T>(x.view().sub(first, n), gap + more, shift + more);
        };
        return {copy(q, 0),    copy(k, 1),
                copy(v, 2),    copy(g, 3),
                copy(beta, 1), scattered<T>(start.view(), gap, shift),
                copy(dout, 2), scattered<T>(dend.view(), shift, gap)};
    }
    template <class U>
    head<U> as() const {
        auto const cast = [](scattered<T> const& x) {
            scattered<U> result(x.view().count(), x.view().width());
            for (size i = 0; i < x.view().count(); ++i)
                for (size j = 0; j < x.view().width(); ++j) result.view()(i, j) = static_cast<U>(x.view()(i, j));
            return result;
        };
        return {cast(q), cast(k), cast(v), cast(g), cast(beta), cast(start), cast(dout), cast(dend)};
    }
};

/// `decay` is the largest -g; keys are as long as the recurrence without normalisation bears.
template <class T>
head<T> random_head(size n, size dk, size dv, double decay, std::uint64_t seed = 1) {
    head<T> h{bits::uniform<T>(n, dk, seed),     bits::uniform<T>(n, dk, seed + 1, 0.4),
              bits::uniform<T>(n, dv, seed + 2), bits::uniform<T>(n, 1, seed + 3),
              bits::uniform<T>(n, 1, seed + 4),  bits::uniform<T>(dk, dv, seed + 5),
              bits::uniform<T>(n, dv, seed + 6), bits::uniform<T>(dk, dv, seed + 7)};
    for (size t = 0; t < n; ++t) {
        h.g.view()(t, 0) = static_cast<T>(-decay) * std::abs(h.g.view()(t, 0));
        h.beta.view()(t, 0) = std::abs(h.beta.view()(t, 0));
    }
    return h;
}

template <class T>
struct outcome {
    scattered<T> dq, dk, dv, dg, dbeta, dstart;

    explicit outcome(head<T> const& h, size gap = 0, size shift = 0)
        : dq(like(h.q, gap, shift)), dk(like(h.k, gap + 1, shift)), dv(h.v.view().count(), h.v.view().width(), gap + 1),
          dg(h.g.view().count(), 1, gap, shift + 1), dbeta(h.g.view().count(), 1, 2, shift), dstart(h.dend) {}

private:
    static scattered<T> like(scattered<T> const& x, size gap, size shift) {
        return {bits::uniform<T>(x.view().count(), x.view().width(), 1, 0).view(), gap, shift};
    }
};

template <class T>
outcome<T> backward(head<T> const& h, size first = 0, cpx::delta_rule_options const& options = {}, size gap = 0,
                    size shift = 0) {
    outcome<T> r(h, gap, shift);
    cpx::delta_rule_backward<T>(h.q, h.k, h.v, h.g, h.beta, first, options, h.start, h.dout, r.dstart.view(),
                                {r.dq.view(), r.dk.view(), r.dv.view(), r.dg.view(), r.dbeta.view()});
    return r;
}

template <class T>
scattered<T> fold(head<T> const& h, size first, cpx::delta_rule_options const& options) {
    auto dstate = h.dend;
    cpx::delta_rule_backward_fold<T>(h.q, h.k, h.g, h.beta, first, options, h.dout, dstate.view());
    return dstate;
}

/// Returns the state after the segment.
template <class T>
scattered<T> end_of(head<T> const& h, size first, cpx::delta_rule_options const& options) {
    auto state = h.start;
    scattered<T> o(h.v.view().count(), h.v.view().width());
    cpx::delta_rule_forward<T>(h.q, h.k, h.v, h.g, h.beta, first, options, state.view(), o.view());
    return state;
}

/// The backward of the recurrence, token by token, in double.
outcome<double> recurrence(head<double> const& h, cpx::delta_rule_options const& options) {
    size const n = h.k.view().count(), dk = h.k.view().width(), dv = h.v.view().width();
    double const scale = options.scale ? *options.scale : 1 / std::sqrt(static_cast<double>(dk));
    auto const normalised = [&](scattered<double> const& x, size t, double& factor) {
        std::vector<double> y(x.view().row(t), x.view().row(t) + dk);
        double squares = 1e-6;
        for (double const value : y) squares += value * value;
        factor = options.qk_l2norm ? 1 / std::sqrt(squares) : 1;
        for (double& value : y) value *= factor;
        return y;
    };
    auto const back = [&](std::vector<double> const& y, std::vector<double> const& dy, double factor, double* dx) {
        double inner = 0;
        for (std::size_t d = 0; d < y.size(); ++d) inner += options.qk_l2norm ? y[d] * dy[d] : 0;
        for (std::size_t d = 0; d < y.size(); ++d) dx[d] = factor * (dy[d] - y[d] * inner);
    };
    auto const at = [](size i) { return static_cast<std::size_t>(i); };
    outcome<double> r(h);
    std::vector<scattered<double>> states = {h.start};
    double unused = 0;
    for (size t = 0; t < n; ++t) {
        auto s = states.back();
        auto const k = normalised(h.k, t, unused);
        for (size e = 0; e < dv; ++e) {
            double error = h.v.view()(t, e);
            for (size d = 0; d < dk; ++d) error -= (s.view()(d, e) *= std::exp(h.g.view()(t, 0))) * k[at(d)];
            for (size d = 0; d < dk; ++d) s.view()(d, e) += h.beta.view()(t, 0) * k[at(d)] * error;
        }
        states.push_back(s);
    }
    auto const G = r.dstart.view();
    for (size t = n - 1; t >= 0; --t) {
        double of_q = 1, of_k = 1;
        double const a = std::exp(h.g.view()(t, 0)), b = h.beta.view()(t, 0);
        auto const q = normalised(h.q, t, of_q), k = normalised(h.k, t, of_k);
        std::vector<double> dq(q.size()), dkeys(q.size()), error(at(dv)), pull(at(dv));
        double dg = 0, dbeta = 0;
        for (size e = 0; e < dv; ++e) {
            error[at(e)] = h.v.view()(t, e);
            for (size d = 0; d < dk; ++d) {
                dq[at(d)] += scale * states[at(t + 1)].view()(d, e) * h.dout.view()(t, e);
                G(d, e) += scale * q[at(d)] * h.dout.view()(t, e);
                error[at(e)] -= a * states[at(t)].view()(d, e) * k[at(d)];
                pull[at(e)] += G(d, e) * k[at(d)];
            }
            dbeta += error[at(e)] * pull[at(e)];
            r.dv.view()(t, e) = b * pull[at(e)];
        }
        for (size e = 0; e < dv; ++e)
            for (size d = 0; d < dk; ++d) {
                double const faded = a * states[at(t)].view()(d, e);
                dkeys[at(d)] += b * (G(d, e) * error[at(e)] - faded * pull[at(e)]);
                double const dfaded = G(d, e) - b * k[at(d)] * pull[at(e)];
                dg += faded * dfaded;
                G(d, e) = a * dfaded;
            }
        r.dg.view()(t, 0) = dg;
        r.dbeta.view()(t, 0) = dbeta;
        back(q, dq, of_q, r.dq.view().row(t));
        back(k, dkeys, of_k, r.dk.view().row(t));
    }
    return r;
}

template <class T>
double const bound = std::is_same_v<T, double> ? 1e-12 : 1e-5;

template <class T>
void check_agree(outcome<T> const& got, outcome<double> const& expected, double most = bound<T>) {
    CHECK(bits::relative_error<T, double>(got.dq, expected.dq) <= most);
    CHECK(bits::relative_error<T, double>(got.dk, expected.dk) <= most);
    CHECK(bits::relative_error<T, double>(got.dv, expected.dv) <= most);
    CHECK(bits::relative_error<T, double>(got.dg, expected.dg) <= most);
    CHECK(bits::relative_error<T, double>(got.dbeta, expected.dbeta) <= most);
    CHECK(bits::relative_error<T, double>(got.dstart, expected.dstart) <= most);
}

/// Whether the gradients of tokens agree bit for bit, those of `some` being those from `first` on of `whole`.
template <class T>
bool same_tokens(outcome<T> const& some, outcome<T> const& whole, size first = 0) {
    size const n = some.dg.view().count();
    return bits::same<T>(some.dq, whole.dq.view().sub(first, n)) &&
           bits::same<T>(some.dk, whole.dk.view().sub(first, n)) &&
           bits::same<T>(some.dv, whole.dv.view().sub(first, n)) &&
           bits::same<T>(some.dg, whole.dg.view().sub(first, n)) &&
           bits::same<T>(some.dbeta, whole.dbeta.view().sub(first, n));
}

} // namespace

TEST_SUITE("ops") {
    TEST_CASE_TEMPLATE("the chunked backward is that of the recurrence of tokens", T, float, double) {
        for (double const decay : {0.0, 0.05, 2.0, 30.0})
            for (bool const l2norm : {true, false})
                for (size const chunk : {1, 2, 7, 64, 500})
                    for (size const n : {1, 150}) {
                        auto const h = random_head<T>(n, 9, 5, decay);
                        cpx::delta_rule_options const options = {chunk, l2norm, l2norm ? std::optional<double>() : 0.7};
                        CAPTURE(decay);
                        CAPTURE(l2norm);
                        CAPTURE(chunk);
                        CAPTURE(n);
                        check_agree(backward(h, 3, options), recurrence(h.template as<double>(), options));
                    }
    }

    TEST_CASE("the gradients of the delta rule are its differences") {
        for (bool const l2norm : {true, false})
            for (size const chunk : {1, 4, 64}) {
                auto h = random_head<double>(10, 4, 3, 0.5);
                h.beta.view()(6, 0) = 0;
                cpx::delta_rule_options const options = {.chunk = chunk, .qk_l2norm = l2norm};
                auto const got = backward(h, 1, options);
                auto const loss = [&] {
                    auto state = h.start;
                    scattered<double> o(10, 3);
                    cpx::delta_rule_forward<double>(h.q, h.k, h.v, h.g, h.beta, 1, options, state.view(), o.view());
                    return gradients::loss(o, h.dout) + gradients::loss(state, h.dend);
                };
                gradients::check(h.q.view(), got.dq, loss);
                gradients::check(h.k.view(), got.dk, loss);
                gradients::check(h.v.view(), got.dv, loss);
                gradients::check(h.g.view(), got.dg, loss);
                gradients::check(h.beta.view(), got.dbeta, loss);
                gradients::check(h.start.view(), got.dstart, loss);
            }
    }

    TEST_CASE_TEMPLATE("every gradient of a decay is precise, also of one abrupt decay among slow ones", T, float,
                       double) {
        auto h = random_head<T>(128, 16, 16, 0.01);
        for (size t = 5; t < 128; t += 6) h.g.view()(t, 0) = -30;
        auto const got = backward(h);
        auto const expected = recurrence(h.template as<double>(), {});
        check_agree(got, expected);
        for (size t = 5; t < 128; t += 6) {
            double const exact = expected.dg.view()(t, 0);
            CHECK(std::abs(static_cast<double>(got.dg.view()(t, 0)) - exact) <= 100 * bound<T> * std::abs(exact));
        }
    }

    TEST_CASE_TEMPLATE("decays that underflow, beta 0 and rows of zeros give finite gradients", T, float, double) {
        auto h = random_head<T>(100, 8, 8, 1e5);
        h.g.view()(7, 0) = -std::numeric_limits<T>::infinity();
        for (size const t : {3, 4, 90}) h.beta.view()(t, 0) = 0;
        for (size d = 0; d < 8; ++d) h.q.view()(20, d) = h.k.view()(21, d) = h.v.view()(22, d) = 0;
        auto as_double = h.template as<double>();
        check_agree(backward(h), recurrence(as_double, {}));

        for (size t = 0; t < 100; ++t) h.g.view()(t, 0) = h.beta.view()(t, 0) = 0;
        check_agree(backward(h), recurrence(h.template as<double>(), {}));
    }

    TEST_CASE_TEMPLATE("no tokens leave the state's gradient as it is", T, float, double) {
        auto const h = random_head<T>(0, 8, 6, 1);
        CHECK(bits::same<T>(backward(h, 5).dstart, h.dend));
        CHECK(bits::same<T>(fold(h, 5, {}), h.dend));
    }

    TEST_CASE_TEMPLATE("a cut at a multiple of the chunk changes no bit of a gradient", T, float, double) {
        for (size const chunk : {1, 8, 64})
            for (size const first : {0, 5, 8}) {
                size const n = 140;
                cpx::delta_rule_options const options = {.chunk = chunk};
                auto const h = random_head<T>(n, 17, 11, 0.3);
                auto const whole = backward(h, first, options);
                for (size cut = 0; cut <= n; cut += chunk == 1 ? 9 : 1) {
                    if ((first + cut) % chunk != 0) continue;
                    CAPTURE(cut);
                    auto front = h.sub(0, cut, 3, 1), back = h.sub(cut, n - cut, 1, 2);
                    back.start = end_of(front, first, options);
                    auto const of_back = backward(back, first + cut, options, 1, 2);
                    front.dend = of_back.dstart;
                    auto const of_front = backward(front, first, options, 2, 1);
                    CHECK(same_tokens(of_back, whole, cut));
                    CHECK(same_tokens(of_front, whole));
                    CHECK(bits::same<T>(of_front.dstart, whole.dstart));
                }
            }
    }

    TEST_CASE_TEMPLATE("the delta rule's gradients do not depend on strides and alignment, bit for bit", T, float,
                       double) {
        auto const h = random_head<T>(70, 13, 7, 0.5);
        auto const whole = backward(h, 1);
        for (size gap = 0; gap < 5; ++gap)
            for (size shift = 0; shift < 5; ++shift) {
                auto const got = backward(h.sub(0, 70, gap, shift), 1, {}, shift, gap);
                CHECK(same_tokens(got, whole));
                CHECK(bits::same<T>(got.dstart, whole.dstart));
            }
    }

    TEST_CASE_TEMPLATE("gradients of queries depend on earlier tokens alone, those of values on later ones", T, float,
                       double) {
        size const n = 90;
        auto const h = random_head<T>(n, 12, 12, 0.2);
        cpx::delta_rule_options const options = {.chunk = 32};
        auto const whole = backward(h, 3, options);
        for (size t = 0; t <= n; ++t) {
            CHECK(bits::same<T>(backward(h.sub(0, t), 3, options).dq, whole.dq.view().sub(0, t)));
            auto late = h.sub(t, n - t);
            late.v = bits::uniform<T>(n - t, 12, 99);
            late.start = bits::uniform<T>(12, 12, 98);
            CHECK(bits::same<T>(backward(late, 3 + t, options).dv, whole.dv.view().sub(t, n - t)));
        }
        auto poisoned = h;
        for (scattered<T>* x : {&poisoned.q, &poisoned.k, &poisoned.v, &poisoned.g, &poisoned.beta, &poisoned.dout})
            x->view()(50, 0) = std::numeric_limits<T>::quiet_NaN();
        auto const got = backward(poisoned, 3, options);
        CHECK(bits::same<T>(got.dq.view().sub(0, 50), whole.dq.view().sub(0, 50)));
        CHECK(bits::same<T>(got.dv.view().sub(51, 39), whole.dv.view().sub(51, 39)));
    }

    TEST_CASE_TEMPLATE("a value column's gradients do not depend on the columns beside it, bit for bit", T, float,
                       double) {
        auto const h = random_head<T>(70, 13, 21, 0.5);
        auto const whole = backward(h, 1);
        for (size first = 0; first + 4 <= 21; ++first) {
            auto some = h;
            for (scattered<T> head<T>::*x : {&head<T>::v, &head<T>::start, &head<T>::dout, &head<T>::dend})
                some.*x = scattered<T>((h.*x).view().columns(first, 4), 1, 1);
            auto const own = backward(some, 1);
            CHECK(bits::same<T>(own.dv, whole.dv.view().columns(first, 4)));
            CHECK(bits::same<T>(own.dstart, whole.dstart.view().columns(first, 4)));
        }
    }

    TEST_CASE_TEMPLATE("gradients of queries and keys are added to what is there", T, float, double) {
        auto const h = random_head<T>(20, 8, 8, 0.5);
        auto const once = backward(h);
        auto twice = once;
        twice.dstart = h.dend;
        cpx::delta_rule_backward<T>(
            h.q, h.k, h.v, h.g, h.beta, 0, {}, h.start, h.dout, twice.dstart.view(),
            {twice.dq.view(), twice.dk.view(), twice.dv.view(), twice.dg.view(), twice.dbeta.view()});
        auto const doubled = [](scattered<T> x) {
            for (size i = 0; i < x.view().count(); ++i)
                for (size j = 0; j < x.view().width(); ++j) x.view()(i, j) *= 2;
            return x;
        };
        CHECK(bits::relative_error<T, T>(twice.dq, doubled(once.dq).view()) <= bound<T>);
        CHECK(bits::relative_error<T, T>(twice.dk, doubled(once.dk).view()) <= bound<T>);
        CHECK(bits::same<T>(twice.dv, once.dv));
        CHECK(bits::same<T>(twice.dg, once.dg));
        CHECK(bits::same<T>(twice.dbeta, once.dbeta));
    }

    TEST_CASE_TEMPLATE(
        "the fold's state gradient is that of the backward, bit for bit, and affine by the map's transpose", T, float,
        double) {
        for (size const first : {0, 40})
            for (double const decay : {0.05, 1.0}) {
                auto h = random_head<T>(150, 10, 18, decay);
                auto const expected = backward(h, first).dstart;
                CHECK(bits::same<T>(fold(h, first, {}), expected));

                scattered<T> map(10, 10), end = h.start;
                cpx::delta_rule_fold<T>(h.k, h.v, h.g, h.beta, first, {}, end.view(), map.view());
                auto const later = h.dend;
                h.dend = bits::uniform<T>(10, 18, 1, 0);
                auto joined = fold(h, first, {});
                for (size d = 0; d < 10; ++d)
                    for (size c = 0; c < 10; ++c)
                        for (size e = 0; e < 18; ++e) joined.view()(d, e) += map.view()(c, d) * later.view()(c, e);
                CHECK(bits::relative_error<T, T>(joined, expected.view()) <= bound<T>);
            }
    }

    TEST_CASE_TEMPLATE("segments joined by their folds have the gradients of the whole", T, float, double) {
        bits::random source{7};
        for (double const decay : {0.0, 0.01, 1.0, 20.0})
            for (int repeat = 0; repeat < 6; ++repeat) {
                size const n = 200;
                auto const h = random_head<T>(n, 16, 12, decay, source.next());
                std::vector<size> cuts = {0, n};
                for (int i = 0; i < 6; ++i) cuts.push_back(static_cast<size>(source.next() % 201));
                std::sort(cuts.begin(), cuts.end()); // equal cuts make empty segments
                auto state = h.start;
                std::vector<head<T>> segments;
                for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
                    segments.push_back(h.sub(cuts[i], cuts[i + 1] - cuts[i], i % 3, i % 4));
                    segments.back().start = state;
                    state = end_of(segments.back(), cuts[i], {});
                }
                outcome<T> whole(h);
                auto dstate = h.dend;
                for (std::size_t i = segments.size(); i-- > 0;) {
                    segments[i].dend = dstate;
                    auto const own = backward(segments[i], cuts[i]);
                    auto const put = [&](scattered<T> const& from, scattered<T>& to) {
                        for (size t = 0; t < from.view().count(); ++t)
                            std::copy_n(from.view().row(t), from.view().width(), to.view().row(cuts[i] + t));
                    };
                    put(own.dq, whole.dq);
                    put(own.dk, whole.dk);
                    put(own.dv, whole.dv);
                    put(own.dg, whole.dg);
                    put(own.dbeta, whole.dbeta);
                    dstate = fold(segments[i], cuts[i], {});
                }
                whole.dstart = dstate;
                check_agree(whole, recurrence(h.template as<double>(), {}));
            }
    }

    TEST_CASE_TEMPLATE("the delta rule's gradients agree with transformers", T, float, double) {
        double const most = std::is_same_v<T, double> ? 1e-6 : 1e-5;
        double worst = 0;
        for (std::string const name : {"gdr_small", "gdr_odd", "gdr_fast_decay"}) {
            CAPTURE(name);
            cpx::safetensors const file(std::string(support::golden_dir) + "/" + name + ".safetensors");
            auto const offsets = file.read<cpx::index_t>("cu_seqlens");
            size const hk = file.tensor("q").shape.at(1), dk = file.tensor("q").shape.at(2),
                       hv = file.tensor("v").shape.at(1), dv = file.tensor("v").shape.at(2), n = offsets.back();
            cpx::delta_rule_options const options = {.qk_l2norm = file.metadata("qk_l2norm") == "True"};
            auto const q = file.read<T>("q"), k = file.read<T>("k"), v = file.read<T>("v"), g = file.read<T>("g"),
                       beta = file.read<T>("beta"), dout = file.read<T>("do");
            auto dq = bits::uniform<T>(n, hk * dk, 1, 0), dkeys = dq;
            scattered<T> dvalues(n, hv * dv), dg(n, hv), dbeta(n, hv);
            for (std::size_t s = 0; s + 1 < offsets.size(); ++s)
                for (size i = 0; i < hv; ++i) { // value heads of a group in ascending order
                    size const begin = offsets[s], count = offsets[s + 1] - begin, shared = i / (hv / hk);
                    auto const head_of = [&](auto const& x, size which, size width) {
                        return x.columns(which * width, width).sub(begin, count);
                    };
                    scattered<T> const start = bits::uniform<T>(dk, dv, 1, 0);
                    auto dstate = start;
                    cpx::delta_rule_backward<T>(
                        head_of(rows<T const>(q, hk * dk), shared, dk), head_of(rows<T const>(k, hk * dk), shared, dk),
                        head_of(rows<T const>(v, hv * dv), i, dv), head_of(rows<T const>(g, hv), i, 1),
                        head_of(rows<T const>(beta, hv), i, 1), 0, options, start,
                        head_of(rows<T const>(dout, hv * dv), i, dv), dstate.view(),
                        {head_of(dq.view(), shared, dk), head_of(dkeys.view(), shared, dk),
                         head_of(dvalues.view(), i, dv), head_of(dg.view(), i, 1), head_of(dbeta.view(), i, 1)});
                }
            auto const agrees = [&](scattered<T> const& got, std::string const& tensor) {
                CAPTURE(tensor);
                auto const expected = file.read<double>(tensor);
                double const error =
                    bits::relative_error<T, double>(got, rows<double const>(expected, got.view().width()));
                CHECK(error <= most);
                worst = std::max(worst, error);
            };
            agrees(dq, "dq");
            agrees(dkeys, "dk");
            agrees(dvalues, "dv");
            agrees(dg, "dg");
            agrees(dbeta, "dbeta");
        }
        MESSAGE("largest relative error " << worst);
    }

    TEST_CASE("the gradients of the gate are its differences") {
        for (double const a : {-3.0, 0.5, 30.0})
            for (double const a_log : {-2.0, 1.0}) {
                std::vector<double> x = {a, a_log, -0.25};
                auto const got = cpx::delta_rule_gate_backward(a, a_log, -0.25, 0.7);
                std::vector<double> const dx = {got.a, got.a_log, got.dt_bias};
                gradients::check(rows<double>(x, 3), rows<double const>(dx, 3),
                                 [&] { return 0.7 * cpx::delta_rule_gate(x[0], x[1], x[2]); });
            }
        CHECK(cpx::delta_rule_gate_backward(-1e4, 1.0, 0.0, 1.0).a == 0);
        CHECK(cpx::delta_rule_gate_backward(1e4, 0.0, 0.0, 2.0).a == -2);
    }

    TEST_CASE("gradients of other shapes and a chunk of no tokens are errors that name them") {
        auto h = random_head<float>(4, 3, 2, 1);
        CHECK_THROWS_WITH_AS(backward(h, 0, {.chunk = 0}), doctest::Contains("chunk: expected at least 1, got 0"),
                             cpx::error);
        CHECK_THROWS_WITH_AS(fold(h, 0, {.chunk = 0}), doctest::Contains("chunk: expected at least 1, got 0"),
                             cpx::error);
        h.dend = scattered<float>(2, 3);
        CHECK_THROWS_WITH_AS(backward(h), doctest::Contains("shape of dstate: expected (3, 2), got (2, 3)"),
                             cpx::error);
        CHECK_THROWS_WITH_AS(fold(h, 0, {}), doctest::Contains("shape of dstate: expected (3, 2), got (2, 3)"),
                             cpx::error);
    }
}
