// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/local/moe.hpp>
#include <cpx/ops/local/moe_backward.hpp>

#include <doctest/doctest.h>

#include <ops/gradients.hpp>
#include <support/rejects.hpp>

#include <functional>
#include <numeric>

using bits::rows, bits::scattered, bits::size;

namespace {

struct sizes {
    size count, hidden, experts, choices, inner, shared;
};

std::vector<sizes> const many = {{0, 4, 3, 2, 2, 2},   {1, 1, 1, 1, 1, 1},  {2, 3, 2, 1, 5, 1},
                                 {5, 7, 4, 4, 3, 6},   {9, 16, 8, 2, 4, 4}, {3, 5, 300, 8, 2, 3},
                                 {40, 6, 5, 3, 9, 17}, {1, 33, 7, 7, 1, 2}, {11, 12, 6, 1, 17, 40}};

/// The weights of a mixture of experts, in rows of several strides and alignments.
template <class T>
struct model {
    std::vector<scattered<T>> weights; ///< in the order of `moe_weights`

    model(sizes const& n, std::uint64_t seed) {
        size const shapes[7][2] = {{n.experts, n.hidden},
                                   {n.experts * 2 * n.inner, n.hidden},
                                   {n.experts * n.hidden, n.inner},
                                   {n.shared, n.hidden},
                                   {n.shared, n.hidden},
                                   {n.hidden, n.shared},
                                   {1, n.hidden}};
        for (auto const& [count, width] : shapes) {
            auto const all = bits::uniform<T>(count, width, ++seed);
            weights.emplace_back(all.view(), static_cast<size>(seed % 4), static_cast<size>(seed % 3));
        }
    }
    cpx::moe_weights<T> view() const {
        auto const w = [&](std::size_t i) { return weights[i].view(); };
        return {w(0), w(1), w(2), w(3), w(4), w(5), w(6)};
    }
};

/// Returns the gradients of all weights, zero where nothing was added, in the order of `moe_weights`.
template <class T>
std::vector<cpx::row_buffer<T>> weight_gradients(cpx::moe_weights<T> const& w, cpx::moe_saved<T> const& saved,
                                                 cpx::moe_gradients<T> const& g, rows<T const> x) {
    std::vector<cpx::row_buffer<T>> result;
    for (auto const& weight : {w.gate, w.gate_up_proj, w.down_proj, w.shared_gate_proj, w.shared_up_proj,
                               w.shared_down_proj, w.shared_expert_gate})
        result.emplace_back(weight.count(), weight.width());
    auto const begins = saved.at.begins();
    size const shared = w.shared_gate_proj.count();
    cpx::linear_backward_weight<T>(g.dlogits.view(), x, result[0].view());
    cpx::expert_linear_backward_weight<T>(begins, g.dgate_up.view(), saved.input.view(), result[1].view());
    cpx::expert_linear_backward_weight<T>(begins, g.doutput.view(), saved.activation.view(), result[2].view());
    cpx::linear_backward_weight<T>(g.dshared_gate_up.view().columns(0, shared), x, result[3].view());
    cpx::linear_backward_weight<T>(g.dshared_gate_up.view().columns(shared, shared), x, result[4].view());
    cpx::linear_backward_weight<T>(g.dshared_output.view(), saved.shared_activation.view(), result[5].view());
    cpx::linear_backward_weight<T>(g.dshared_gate.view(), x, result[6].view());
    return result;
}

/// The formula in double, one row after the other, every expert computed.
template <class T>
scattered<double> reference(cpx::moe_weights<T> const& w, rows<T const> x, size choices) {
    size const experts = w.gate.count(), hidden = x.width(), inner = w.down_proj.width();
    scattered<double> y(x.count(), hidden);
    using numbers = std::vector<double>;
    auto const product = [](rows<T const> weight, numbers const& in) {
        numbers out(static_cast<std::size_t>(weight.count()));
        for (size j = 0; j < weight.count(); ++j)
            for (size c = 0; c < weight.width(); ++c)
                out[static_cast<std::size_t>(j)] += static_cast<double>(weight(j, c)) * in[static_cast<std::size_t>(c)];
        return out;
    };
    auto const mlp = [&](rows<T const> gate, rows<T const> up, rows<T const> down, numbers const& in) {
        auto const g = product(gate, in), u = product(up, in);
        numbers middle(g.size());
        for (std::size_t i = 0; i < g.size(); ++i) middle[i] = g[i] / (1 + std::exp(-g[i])) * u[i];
        return product(down, middle);
    };
    for (size row = 0; row < x.count(); ++row) {
        numbers const in(x.row(row), x.row(row) + hidden);
        numbers p = product(w.gate, in);
        double total = 0, of_chosen = 0;
        for (double& one : p) total += one = std::exp(one);
        for (double& one : p) one /= total;
        std::vector<std::size_t> order(static_cast<std::size_t>(experts));
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return p[a] > p[b]; });
        order.resize(static_cast<std::size_t>(choices));
        for (std::size_t const e : order) of_chosen += p[e];
        auto const shared = mlp(w.shared_gate_proj, w.shared_up_proj, w.shared_down_proj, in);
        double const gate = 1 / (1 + std::exp(-product(w.shared_expert_gate, in)[0]));
        for (size j = 0; j < hidden; ++j) y.view()(row, j) = gate * shared[static_cast<std::size_t>(j)];
        for (std::size_t const e : order) {
            auto const gate_up = w.gate_up_proj.sub(static_cast<size>(e) * 2 * inner, 2 * inner);
            auto const out = mlp(gate_up.sub(0, inner), gate_up.sub(inner, inner),
                                 w.down_proj.sub(static_cast<size>(e) * hidden, hidden), in);
            for (size j = 0; j < hidden; ++j) y.view()(row, j) += p[e] / of_chosen * out[static_cast<std::size_t>(j)];
        }
    }
    return y;
}

/// Copies tensors side by side into rows of `to`. Returns their width together.
template <class T>
size side_by_side(std::vector<rows<T const>> const& tensors, rows<T> to) {
    size width = 0;
    for (auto const& tensor : tensors) {
        for (size i = 0; i < to.count(); ++i) std::copy_n(tensor.row(i), tensor.width(), to.row(i) + width);
        width += tensor.width();
    }
    return width;
}

/// Returns `count` rows of `choices` different experts each.
scattered<size> random_choices(size count, size choices, size experts, std::uint64_t seed) {
    bits::random numbers{seed};
    scattered<size> chosen(count, choices, 2, 1);
    std::vector<size> all(static_cast<std::size_t>(experts));
    for (size row = 0; row < count; ++row) {
        std::iota(all.begin(), all.end(), size{0});
        for (std::size_t s = 0; s < static_cast<std::size_t>(choices); ++s) {
            std::swap(all[s], all[s + numbers.next() % (all.size() - s)]);
            chosen.view()(row, static_cast<size>(s)) = all[s];
        }
    }
    return chosen;
}

} // namespace

TEST_SUITE("ops") {
    TEST_CASE_TEMPLATE("a mixture of experts is the formula", T, float, double) {
        for (sizes const& n : many) {
            CAPTURE(n.experts);
            model<T> const m(n, 10);
            auto const all = bits::uniform<T>(n.count, n.hidden, 1, 2);
            scattered<T> x(all.view(), 3, 1), y(n.count, n.hidden, 1, 2);
            auto const saved = cpx::moe<T>(m.view(), x.view(), n.choices, y.view());
            auto const expected = reference<T>(m.view(), x.view(), n.choices);
            CHECK(bits::relative_error<T, double>(y.view(), expected) <= 40 * std::numeric_limits<T>::epsilon());
            CHECK(saved.gate_up.width() == 2 * n.inner);
            CHECK(saved.gate_up.count() == n.count * n.choices);
            auto const y_again = y;
            cpx::moe<T>(m.view(), x.view(), n.choices, x.view()); // in place
            CHECK(bits::same<T>(x.view(), y_again.view()));
        }
    }

    TEST_CASE_TEMPLATE("choices are by descending probability, the lower expert first among equals", T, float, double) {
        T const inf = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
        struct {
            std::vector<T> logits;
            std::vector<size> chosen;
        } const cases[] = {
            {{5}, {0}},
            {{1, 1, 1, 1}, {0, 1}},
            {{0, 2, 2, 1}, {1, 2, 3}},
            {{3, 1, 2, 3}, {0, 3, 2, 1}},
            {{-inf, 7, -inf, -inf}, {1, 0, 2}},
            {{T(-1e6), T(1e6), 0}, {1, 0, 2}}, // the others' probabilities are 0
            {{1, 2, 3}, {2}},
        };
        for (auto const& c : cases) {
            auto const choices = std::ssize(c.chosen);
            scattered<size> chosen(1, choices);
            scattered<T> weights(1, choices);
            cpx::choose_experts<T>(rows<T const>(c.logits, std::ssize(c.logits)), chosen.view(), weights.view());
            T total = 0;
            for (size s = 0; s < choices; ++s) {
                CHECK(chosen.view()(0, s) == c.chosen[static_cast<std::size_t>(s)]);
                total += weights.view()(0, s);
                if (s > 0) CHECK(weights.view()(0, s) <= weights.view()(0, s - 1));
            }
            CHECK(std::abs(total - 1) <= 4 * std::numeric_limits<T>::epsilon());
            if (choices == 1) CHECK(weights.view()(0, 0) == 1);
        }
        for (auto const& logits : {std::vector<T>{nan, nan, nan}, {1, nan, 0}, {-inf, -inf, -inf}, {inf, 0, inf}}) {
            scattered<size> chosen(1, 3);
            scattered<T> weights(1, 3);
            cpx::choose_experts<T>(rows<T const>(logits, 3), chosen.view(), weights.view());
            std::sort(chosen.view().row(0), chosen.view().row(0) + 3);
            for (size s = 0; s < 3; ++s) CHECK(chosen.view()(0, s) == s); // experts still, and each once
        }
    }

    TEST_CASE_TEMPLATE("a row of a mixture of experts and of its gradients does not depend on other rows, bit for bit",
                       T, float, double) {
        for (sizes const& n : std::vector<sizes>{{23, 21, 5, 2, 7, 9}, {23, 8, 3, 3, 4, 4}, {23, 5, 9, 1, 11, 3}}) {
            model<T> const m(n, 20);
            auto const x = bits::uniform<T>(n.count, n.hidden, 2, 2), dy = bits::uniform<T>(n.count, n.hidden, 3);
            size const of_choice = 3 * n.inner + n.hidden + 1, back_of_choice = 2 * n.inner + n.hidden;
            size const width = 2 * n.hidden + n.choices * (of_choice + back_of_choice) + n.experts + 5 * n.shared +
                               2 * n.hidden + 2 + n.choices;
            bits::check_rows_are_independent<T>(x, width, [&](size first, rows<T const> some, rows<T> all) {
                scattered<T> y(some.count(), n.hidden), dx(some.count(), n.hidden, 1);
                auto const saved = cpx::moe<T>(m.view(), some, n.choices, y.view());
                auto const g = cpx::moe_backward<T>(m.view(), saved, dy.view().sub(first, some.count()), dx.view());
                scattered<T> chosen(some.count(), n.choices);
                for (size i = 0; i < some.count(); ++i)
                    for (size s = 0; s < n.choices; ++s)
                        chosen.view()(i, s) = static_cast<T>(saved.of_router.chosen.view()(i, s));
                auto const of_tokens = [&](cpx::row_buffer<T> const& of_experts) {
                    scattered<T> back(some.count(), n.choices * of_experts.width());
                    saved.at.template to_tokens<T>(of_experts.view(), back.view());
                    return back;
                };
                auto const gate_up = of_tokens(saved.gate_up), activation = of_tokens(saved.activation),
                           dgate_up = of_tokens(g.dgate_up), doutput = of_tokens(g.doutput);
                CHECK(
                    side_by_side<T>({y, dx, chosen, saved.of_router.weights.view(), gate_up, activation,
                                     saved.output.view(), saved.shared_gate_up.view(), saved.shared_activation.view(),
                                     saved.shared_output.view(), saved.shared_gate.view(), g.dlogits.view(), dgate_up,
                                     doutput, g.dshared_gate_up.view(), g.dshared_output.view(), g.dshared_gate.view()},
                                    all) == width);
            });
        }
    }

    TEST_CASE(
        "the gradients of a mixture of experts are its differences, with a loss of the logits and replayed, too") {
        for (sizes const& n : many)
            for (bool const replayed : {false, true}) {
                if (n.experts > 100) continue; // too many weights
                CAPTURE(n.experts);
                CAPTURE(replayed);
                model<double> m(n, 30);
                auto x = bits::uniform<double>(n.count, n.hidden, 4, 2);
                auto const dy = bits::uniform<double>(n.count, n.hidden, 5),
                           dlogits = bits::uniform<double>(n.count, n.experts, 6);
                auto const given = random_choices(n.count, n.choices, n.experts, 7);
                scattered<double> y(n.count, n.hidden), dx(n.count, n.hidden, 2, 1);
                auto const run = [&] {
                    auto const gate = m.view().gate;
                    auto choices = replayed ? cpx::replay_experts<double>(gate, x, given.view())
                                            : cpx::choose_experts<double>(gate, x, n.choices);
                    cpx::expert_rows at(choices.chosen.view(), n.experts);
                    return cpx::moe<double>(m.view(), x, std::move(choices), std::move(at), y.view());
                };
                auto const saved = run();
                auto const loss = [&] {
                    auto const again = run();
                    REQUIRE(bits::same<size>(again.of_router.chosen.view(),
                                             saved.of_router.chosen.view())); // else there is no difference
                    return gradients::loss(y, dy) + gradients::loss(again.of_router.logits.view(), dlogits);
                };
                auto const g = cpx::moe_backward<double>(m.view(), saved, dy, dx.view(), dlogits);
                auto const of_weights = weight_gradients<double>(m.view(), saved, g, x);
                gradients::check(x.view(), dx, loss);
                for (std::size_t i = 0; i < of_weights.size(); ++i) {
                    CAPTURE(i);
                    gradients::check(m.weights[i].view(), of_weights[i].view(), loss);
                }
                scattered<double> in_place(dy.view(), 1, 1);
                cpx::moe_backward<double>(m.view(), saved, in_place.view(), in_place.view(), dlogits);
                CHECK(bits::same<double>(in_place, dx));
            }
    }

    TEST_CASE("experts that no row chose are not read, have no gradient and no logit's gradient") {
        sizes const n{3, 6, 9, 2, 4, 3};
        model<double> m(n, 40);
        auto const x = bits::uniform<double>(n.count, n.hidden, 6), dy = bits::uniform<double>(n.count, n.hidden, 7);
        scattered<double> y(n.count, n.hidden), poisoned(n.count, n.hidden), dx(n.count, n.hidden);
        auto const first = cpx::moe<double>(m.view(), x, n.choices, y.view());
        std::vector<bool> is_chosen(static_cast<std::size_t>(n.experts));
        for (size row = 0; row < n.count; ++row)
            for (size s = 0; s < n.choices; ++s)
                is_chosen[static_cast<std::size_t>(first.of_router.chosen.view()(row, s))] = true;
        REQUIRE(std::count(is_chosen.begin(), is_chosen.end(), false) > 0);
        for (size e = 0; e < n.experts; ++e)
            for (std::size_t const i : {std::size_t{1}, std::size_t{2}}) {
                auto const of_all = m.weights[i].view();
                size const out = of_all.count() / n.experts;
                for (size j = 0; j < out && !is_chosen[static_cast<std::size_t>(e)]; ++j)
                    std::fill_n(of_all.row(e * out + j), of_all.width(), std::numeric_limits<double>::quiet_NaN());
            }
        auto const saved = cpx::moe<double>(m.view(), x, n.choices, poisoned.view());
        CHECK(bits::same<double>(poisoned, y));
        auto const g = cpx::moe_backward<double>(m.view(), saved, dy, dx.view());
        auto const of_weights = weight_gradients<double>(m.view(), saved, g, x);
        for (size e = 0; e < n.experts; ++e)
            for (std::size_t const i : {std::size_t{1}, std::size_t{2}}) {
                size const out = of_weights[i].count() / n.experts;
                double sum = 0;
                for (size j = 0; j < out * of_weights[i].width(); ++j)
                    sum += std::abs(of_weights[i].view().row(e * out)[j]);
                CHECK((sum != 0) == is_chosen[static_cast<std::size_t>(e)]);
                CHECK(std::isfinite(sum));
            }
        for (size row = 0; row < n.count; ++row)
            for (size e = 0; e < n.experts; ++e) {
                auto const* const own = first.of_router.chosen.view().row(row);
                CHECK((g.dlogits.view()(row, e) != 0) == (std::find(own, own + n.choices, e) != own + n.choices));
            }
    }

    TEST_CASE_TEMPLATE("a gradient of experts' weights is the sum of their rows in turn, bit for bit", T, float,
                       double) {
        for (size const choices : {1, 2, 5})
            for (size const experts : {5, 8}) {
                size const n = 300, out = 7, in = 11;
                auto const chosen = random_choices(n, choices, experts, 1);
                auto const dy = bits::uniform<T>(n, choices * out, 2), x = bits::uniform<T>(n, in, 3);
                auto const start = bits::uniform<T>(experts * out, in, 4);
                auto const add = [&](size first, size count, rows<T> dweight) {
                    cpx::expert_rows const at(chosen.view().sub(first, count), experts);
                    auto const of_dy = at.to_experts<T>(dy.view().sub(first, count), out);
                    auto const of_x = at.to_experts<T>(x.view().sub(first, count), in);
                    cpx::expert_linear_backward_weight<T>(at.begins(), of_dy.view(), of_x.view(), dweight);
                };
                auto all = start, in_turn = start, plain = start;
                add(0, n, all.view());
                for (size row = 0; row < n; ++row) add(row, 1, in_turn.view());
                CHECK(bits::same<T>(in_turn, all));
                for (size row = 0; row < n; ++row)
                    for (size s = 0; s < choices; ++s)
                        cpx::linear_backward_weight<T>(dy.view().sub(row, 1).columns(s * out, out),
                                                       x.view().sub(row, 1),
                                                       plain.view().sub(chosen.view()(row, s) * out, out));
                CHECK(bits::same<T>(plain, all));
                for (size const cut : {0, 1, 255, 256, 299}) {
                    scattered<T> some(start.view(), 1, 2);
                    add(0, cut, some.view());
                    add(cut, n - cut, some.view());
                    CHECK(bits::same<T>(some, all));
                }
            }
    }

    TEST_CASE_TEMPLATE("choices that are replayed have the weights that they had", T, float, double) {
        size const n = 30, hidden = 6, experts = 5, choices = 3;
        auto const gate = bits::uniform<T>(experts, hidden, 1), x = bits::uniform<T>(n, hidden, 2);
        auto const first = cpx::choose_experts<T>(gate, x, choices);
        auto const again = cpx::replay_experts<T>(gate, x, first.chosen.view());
        CHECK(bits::same<size>(again.chosen.view(), first.chosen.view()));
        CHECK(bits::same<T>(again.weights.view(), first.weights.view()));
        CHECK(bits::same<T>(again.logits.view(), first.logits.view()));
        auto const other = random_choices(n, choices, experts, 3); // not the largest: each by its own probability
        auto const replayed = cpx::replay_experts<T>(gate, x, other.view());
        for (size row = 0; row < n; ++row)
            for (size s = 1; s < choices; ++s) {
                auto const logit = [&](size number) {
                    return static_cast<double>(replayed.logits.view()(row, other.view()(row, number)));
                };
                auto const weight = [&](size number) {
                    return static_cast<double>(replayed.weights.view()(row, number));
                };
                double const expected = std::exp(logit(s) - logit(0)) * weight(0);
                CHECK(std::abs(weight(s) - expected) <= 8 * std::numeric_limits<T>::epsilon() * expected);
            }
        for (T const far : {T(1), T(95), T(800)}) { // that another expert has so much of the logit leaves no trace
            std::vector<T> const steep{far, 0, -1}, one{1};
            std::vector<size> const low{1, 2};
            auto const of_low =
                cpx::replay_experts<T>(rows<T const>(steep, 1), rows<T const>(one, 1), rows<size const>(low, 2));
            double const expected = 1 / (1 + std::exp(-1.0));
            CHECK(std::abs(static_cast<double>(of_low.weights.view()(0, 0)) - expected) <=
                  4 * std::numeric_limits<T>::epsilon());
            CHECK(std::abs(static_cast<double>(of_low.weights.view()(0, 1)) - (1 - expected)) <=
                  4 * std::numeric_limits<T>::epsilon());
        }
        using support::rejects;
        auto wrong = other;
        wrong.view()(4, 2) = wrong.view()(4, 0);
        rejects({"replay_experts: chosen expert: expected one of 0 to 4, each once in row 4, got"},
                [&] { cpx::replay_experts<T>(gate, x, wrong.view()); });
        wrong.view()(4, 2) = experts;
        rejects({"replay_experts: chosen expert: expected one of 0 to 4, each once in row 4, got 5"},
                [&] { cpx::replay_experts<T>(gate, x, wrong.view()); });
        rejects({"choose_experts: width of gate: expected that of x, 6, got 5", "local_moe.cpp"},
                [&] { cpx::choose_experts<T>(gate.view().columns(0, 5), x, 2); });
        rejects({"replay_experts: shape of chosen: expected (30, 3), got (29, 3)"},
                [&] { cpx::replay_experts<T>(gate, x, other.view().sub(0, 29)); });
    }

    TEST_CASE("what does not fit a mixture of experts is an error that names it") {
        using support::rejects;
        sizes const n{4, 6, 5, 2, 3, 7};
        model<float> const m(n, 50);
        auto const x = bits::uniform<float>(4, 6, 1);
        scattered<float> y(4, 6), narrow(4, 5), few(3, 6);
        auto const run = [&](cpx::moe_weights<float> const& w, size choices) {
            cpx::moe<float>(w, x, choices, y.view());
        };
        for (size const choices : {-1, 0, 6})
            rejects({"moe: choices: expected 1 to the experts, 5, got " + std::to_string(choices)},
                    [&] { run(m.view(), choices); });
        rejects({"moe: choices: expected 1 to the experts, 0, got 1"}, [&] {
            auto w = m.view();
            w.gate = w.gate.sub(0, 0);
            run(w, 1);
        });
        rejects({"expert_rows: chosen expert: expected 0 to 4, got 5"}, [&] {
            auto choices = cpx::choose_experts<float>(m.view().gate, x, 2);
            choices.chosen.view()(3, 1) = 5;
            cpx::expert_rows(choices.chosen.view(), 5);
        });
        rejects({"expert_rows: places: expected 4, got 3"}, [&] {
            auto const choices = cpx::choose_experts<float>(m.view().gate, x, 2);
            cpx::expert_rows(choices.chosen.view(), 5, std::vector<size>{0, 1, 2});
        });
        rejects({"moe: shape of tokens that chose: expected (3, 6), got (4, 6)"}, [&] {
            auto choices = cpx::choose_experts<float>(m.view().gate, x, 2);
            cpx::expert_rows const at(choices.chosen.view().sub(0, 3), 5);
            cpx::moe<float>(m.view(), x, std::move(choices), at, y.view());
        });
        using weights = cpx::moe_weights<float>;
        std::vector<std::pair<cpx::field<rows<float const>> weights::*, std::string>> const members = {
            {&weights::gate_up_proj, "gate_up_proj: expected (30, 6), got (29, 6)"},
            {&weights::shared_up_proj, "shared_up_proj: expected (7, 6), got (6, 6)"},
            {&weights::shared_down_proj, "shared_down_proj: expected (6, 7), got (5, 7)"},
            {&weights::shared_expert_gate, "shared_expert_gate: expected (1, 6), got (0, 6)"},
            {&weights::down_proj, "down_proj: expected (30, 3), got (29, 3)"},
        };
        auto const saved = cpx::moe<float>(m.view(), x, 2, y.view());
        for (auto const& item : members) {
            auto w = m.view();
            auto& weight = w.*item.first;
            weight = weight.sub(0, weight.count() - 1);
            rejects({"moe: shape of " + item.second}, [&] { run(w, 2); });
            rejects({"moe_backward: shape of " + item.second},
                    [&] { cpx::moe_backward<float>(w, saved, y, y.view()); });
        }
        {
            auto w = m.view();
            w.gate = w.gate.columns(0, 5);
            rejects({"moe: shape of gate: expected (5, 6), got (5, 5)"}, [&] { run(w, 2); });
            w = m.view();
            w.shared_gate_proj = w.shared_gate_proj.columns(0, 5);
            rejects({"moe: shape of shared_gate_proj: expected (7, 6), got (7, 5)"}, [&] { run(w, 2); });
        }
        rejects({"moe: shape of y: expected (4, 6), got (4, 5)"},
                [&] { cpx::moe<float>(m.view(), x, 2, narrow.view()); });
        rejects({"moe_backward: shape of dy: expected (4, 6), got (3, 6)"},
                [&] { cpx::moe_backward<float>(m.view(), saved, few, few.view()); });
        rejects({"moe_backward: shape of dx: expected (4, 6), got (4, 5)"},
                [&] { cpx::moe_backward<float>(m.view(), saved, y, narrow.view()); });

        using kept = cpx::moe_saved<float>;
        std::vector<std::pair<std::function<void(kept&)>, std::string>> const damages = {
            {[](kept& s) {
                 s.of_router.weights = {4, 3};
             },
             "shape of saved weights: expected (4, 2), got (4, 3)"},
            {[](kept& s) {
                 s.gate_up = {8, 5};
             },
             "shape of saved gate_up: expected (8, 6), got (8, 5)"},
            {[](kept& s) { s.output = {}; }, "shape of saved output: expected (4, 12), got (0, 0)"},
            {[](kept& s) {
                 s.shared_gate_up = {4, 7};
             },
             "shape of saved shared_gate_up: expected (4, 14)"},
            {[](kept& s) {
                 s.shared_output = {4, 7};
             },
             "shape of saved shared_output: expected (4, 6)"},
            {[](kept& s) {
                 s.shared_gate = {4, 2};
             },
             "shape of saved shared_gate: expected (4, 1)"},
            {[](kept& s) {
                 s.of_router.chosen = {4, 6};
             },
             "shape of saved choices: expected (4, 2), got (4, 6)"},
            {[](kept& s) { s.of_router.chosen.view()(3, 1) = 5; }, "chosen expert: expected 0 to 4, got 5"},
            {[](kept& s) { s.of_router.chosen.view()(3, 1) = -1; }, "chosen expert: expected 0 to 4, got -1"},
        };
        for (auto const& damage : damages) {
            auto other = saved;
            damage.first(other);
            rejects({"moe_backward: " + damage.second},
                    [&] { cpx::moe_backward<float>(m.view(), other, y, y.view()); });
        }
    }

    TEST_CASE("what does not fit experts' projections is an error that names it") {
        using support::rejects;
        cpx::expert_rows const at(random_choices(4, 2, 3, 1).view(), 3);
        auto const weight = bits::uniform<float>(12, 5, 1), x = bits::uniform<float>(8, 5, 2),
                   wide = bits::uniform<float>(8, 6, 4), dy = bits::uniform<float>(8, 4, 5);
        scattered<float> y(8, 4), dx(8, 5), narrow(8, 3), dweight(12, 5);
        auto const forward = [&](rows<float const> in, rows<float> out) {
            cpx::expert_linear<float>(at.begins(), in, weight, out);
        };
        CHECK(support::message([&] { forward(x, y.view()); }) == "");
        rejects({"expert_linear: shape of x: expected (8, 5), got (8, 6)"}, [&] { forward(wide, y.view()); });
        rejects({"expert_linear: shape of y: expected (7, 4), got (8, 4)"},
                [&] { forward(x.view().sub(0, 7), y.view()); });
        rejects({"expert_linear: shape of weight: expected (9, 5), got (12, 5)"}, [&] { forward(x, narrow.view()); });
        rejects({"expert_linear: rows: expected 8, got 7"}, [&] { forward(x.view().sub(0, 7), y.view().sub(0, 7)); });
        for (auto const& begins : {std::vector<size>{1, 2, 3, 8}, {0, 5, 4, 8}})
            rejects({"expert_linear: begins: expected ascending numbers from 0"},
                    [&] { cpx::expert_linear<float>(begins, x, weight, y.view()); });

        auto const input = [&](rows<float const> out, rows<float> in) {
            cpx::expert_linear_backward_input<float>(at.begins(), out, weight, in);
        };
        std::string const of_input = "expert_linear_backward_input: ";
        CHECK(support::message([&] { input(dy, dx.view()); }) == "");
        rejects({of_input + "shape of weight: expected (18, 5), got (12, 5)"}, [&] { input(wide, dx.view()); });
        rejects({of_input + "shape of dx: expected (8, 5), got (8, 3)"}, [&] { input(dy, narrow.view()); });

        std::string const of_weight = "expert_linear_backward_weight: ";
        auto const add = [&](rows<float const> out, rows<float const> in, rows<float> to) {
            cpx::expert_linear_backward_weight<float>(at.begins(), out, in, to);
        };
        std::fill_n(dweight.view().data(), 60, 0.f);
        CHECK(support::message([&] { add(dy, x, dweight.view()); }) == "");
        rejects({of_weight + "shape of dweight: expected (12, 5), got (11, 5)"},
                [&] { add(dy, x, dweight.view().sub(0, 11)); });
        rejects({of_weight + "shape of x: expected (8, 5), got (8, 6)"}, [&] { add(dy, wide, dweight.view()); });
        rejects({of_weight + "shape of x: expected (7, 5), got (8, 5)"},
                [&] { add(dy.view().sub(0, 7), x, dweight.view()); });

        auto const logits = bits::uniform<float>(4, 5, 7);
        scattered<size> some(4, 2);
        scattered<float> weights(4, 2);
        rejects({"choose_experts: shape of chosen: expected (4, 2), got (3, 2)"},
                [&] { cpx::choose_experts<float>(logits, some.view().sub(0, 3), weights.view()); });
        rejects({"choose_experts: shape of weights: expected (4, 2), got (4, 1)"},
                [&] { cpx::choose_experts<float>(logits, some.view(), weights.view().columns(0, 1)); });
        rejects({"choose_experts: choices: expected 1 to the experts, 1, got 2"},
                [&] { cpx::choose_experts<float>(logits.view().columns(0, 1), some.view(), weights.view()); });
    }
}
