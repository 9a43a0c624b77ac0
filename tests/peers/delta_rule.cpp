// SPDX-License-Identifier: Apache-2.0
// Gated delta rules that other projects test: o, dq, dk, dv, dg and dbeta against one rank and against the recurrence
// and its gradient, token by token in double.
#include <cpx/ops/gated_delta_rule_backward.hpp>

#include <peers/cases.hpp>

#include <ops/backward.hpp>

#include <numbers>

namespace {

using cpx::index_t;
using on_ranks::same_bits;
using peers::list, peers::ratio;
using reference::delta, reference::result;
using std::size_t;

/// What cpx reaches in float32, by the peer's measure: sums of 32 products, then of 16 tokens, chunk after chunk.
constexpr double usual = 1e-6;

struct recurrence {
    char const *id, *source;
    int ranks;
    cpx::delta_rule_heads heads;
    list lengths;
    double fade = 1, write = 1; ///< factors of g and of beta
    double reached = usual;     ///< cpx's tolerance, in float32
};

/// flash-linear-attention's cases made smaller for one core: tokens and the chunk of 64 divided by 4, so that cuts stay
/// as unaligned as they are there, head dimensions divided by 4, and 2 heads for 4 (G5: by 8, and 1 head); G7 and G8
/// keep theirs. It computes in bfloat16 within 3e-3; the host has float32 only, and the tolerance of that.
std::vector<recurrence> const cases = {
    {"G1", "fla tests/context_parallel/test_cp_gdn.py CP2_SequenceCut", 2, {2, 2, 16, 16}, {750, 1000, 810}},
    {"G2", "fla test_cp_gdn.py CP2_BoundaryAligned", 2, {2, 2, 32, 32}, {1280, 1280}},
    {"G3", "fla test_cp_gdn.py CP4_Complex", 4, {2, 2, 32, 32}, {1750, 810}},
    {"G4", "fla test_cp_gdn.py CP4_SingleSequence", 4, {2, 2, 32, 32}, {2560}},
    {"G5", "fla test_cp_gdn.py CP8_SingleSequence, 65536 tokens", 8, {1, 1, 16, 16}, {16384}},
    {"G6", "fla test_cp_gdn.py CP2_ManyShortSequences", 2, {2, 2, 32, 32}, {250, 375, 500, 625, 310, 250, 250}},
    {"G7", "fla test_cp_gdn.py GVA, 2 key heads for 4", 2, {2, 4, 16, 16}, {750, 1000, 810}},
    {"G8", "fla test_cp_gdn.py GVA, 2 key heads for 8", 2, {2, 8, 16, 16}, {2560}},
    // Where V comes first in fla's states; here states have one order.
    {"G9a", "fla test_cp_gdn.py state with V first, 2 ranks", 2, {2, 2, 32, 32}, {750, 1000, 810}},
    {"G9b", "fla test_cp_gdn.py state with V first, 4 ranks", 4, {2, 2, 32, 32}, {2560}},
    // With that g and beta a segment forgets and overwrites all that came before it and no M counts. Here it does.
    // In G5s the roundings of 1024 chunks add up in a state that forgets little, on one rank as on eight.
    {"G3s", "fla test_cp_gdn.py CP4_Complex, slow decay", 4, {2, 2, 32, 32}, {1750, 810}, 1e-3, 0.05},
    {"G4s", "fla test_cp_gdn.py CP4_SingleSequence, slow decay", 4, {2, 2, 32, 32}, {2560}, 1e-3, 0.05},
    {"G5s", "fla test_cp_gdn.py CP8_SingleSequence, slow decay", 8, {1, 1, 16, 16}, {16384}, 1e-4, 0.01, 1e-5},
    {"G8s", "fla test_cp_gdn.py GVA, 4 ranks, slow decay", 4, {2, 8, 16, 16}, {2560}, 1e-3, 0.02},
};

constexpr index_t chunk = 16; // 64 / 4
constexpr double peers_tolerance = 3e-3;

double normal(support::splitmix& numbers) {
    auto const uniform = [&] { return (static_cast<double>(numbers.next() >> 11) + 0.5) * 0x1p-53; };
    double const radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
}

/// q and k of length 1, v normal, g = log sigmoid(normal), beta = sigmoid(normal).
delta<float> random(recurrence const& c) {
    support::splitmix numbers(42);
    auto const& h = c.heads;
    delta<float> p{support::lengths(c.lengths), h, {.chunk = chunk, .qk_l2norm = false}, {}, {}};
    auto const sigmoid = [&] { return 1 / (1 + std::exp(-normal(numbers))); };
    for (index_t row = 0; row < p.batch.tokens(); ++row) {
        for (index_t head = 0; head < 2 * h.key_heads; ++head) {
            std::vector<double> x;
            double squares = 0;
            for (index_t d = 0; d < h.key_dim; ++d) squares += std::pow(x.emplace_back(normal(numbers)), 2);
            for (double const e : x) p.x.push_back(static_cast<float>(e / std::sqrt(squares)));
        }
        for (index_t d = 0; d < h.value_heads * h.value_dim; ++d) p.x.push_back(static_cast<float>(normal(numbers)));
        for (index_t head = 0; head < h.value_heads; ++head)
            p.x.push_back(static_cast<float>(c.fade * std::log(sigmoid())));
        for (index_t head = 0; head < h.value_heads; ++head) p.x.push_back(static_cast<float>(c.write * sigmoid()));
    }
    return p;
}

/// The gradient of `reference::run(p).o`, token by token, without normalisation or initial states.
///
/// With S' = a S_{t-1}, e = v - S'^T k, G the gradient of S_t, r = G^T k: dq = scale S_t do, dbeta = e . r,
/// dv = beta r, dk = beta G e - S' beta r, dS' = G - k beta r^T, dg = <S', dS'>, and a dS' is the gradient of S_{t-1}.
std::vector<double> gradient(delta<double> const& p, std::vector<double> const& dout) {
    auto const& h = p.heads;
    index_t const width = on_ranks::width(p.sections()), keys = h.key_heads * h.key_dim, K = h.key_dim, V = h.value_dim;
    index_t const g_at = 2 * keys + h.value_heads * V, beta_at = g_at + h.value_heads;
    double const scale = 1 / std::sqrt(static_cast<double>(K));
    std::vector<double> d(p.x.size());
    for (index_t s = 0; s < p.batch.sequences(); ++s)
        for (index_t head = 0; head < h.value_heads; ++head) {
            index_t const first = p.batch.offset(s), count = p.batch.length(s);
            index_t const q_at = head / (h.value_heads / h.key_heads) * K, k_at = keys + q_at,
                          v_at = 2 * keys + head * V;
            std::vector<double> faded(static_cast<size_t>(count * K * V)), after = faded; // S' and S of every token
            std::vector<double> e(static_cast<size_t>(count * V)), S(static_cast<size_t>(K * V)), G = S;
            for (index_t t = 0; t < count; ++t) {
                double const* const x = p.x.data() + (first + t) * width;
                double const a = std::exp(x[g_at + head]), beta = x[beta_at + head];
                for (double& cell : S) cell *= a;
                std::ranges::copy(S, faded.begin() + t * K * V);
                for (index_t c = 0; c < V; ++c) {
                    double& rest = e[static_cast<size_t>(t * V + c)];
                    rest = x[v_at + c];
                    for (index_t i = 0; i < K; ++i) rest -= S[static_cast<size_t>(i * V + c)] * x[k_at + i];
                    for (index_t i = 0; i < K; ++i) S[static_cast<size_t>(i * V + c)] += beta * x[k_at + i] * rest;
                }
                std::ranges::copy(S, after.begin() + t * K * V);
            }
            for (index_t t = count; t-- > 0;) {
                double const* const x = p.x.data() + (first + t) * width;
                double* const dx = d.data() + (first + t) * width;
                double const a = std::exp(x[g_at + head]), beta = x[beta_at + head];
                for (index_t c = 0; c < V; ++c) {
                    double const of_o = dout[static_cast<size_t>(((first + t) * h.value_heads + head) * V + c)];
                    double const rest = e[static_cast<size_t>(t * V + c)];
                    double r = 0;
                    for (index_t i = 0; i < K; ++i) {
                        auto const cell = static_cast<size_t>(i * V + c);
                        G[cell] += scale * x[q_at + i] * of_o;
                        dx[q_at + i] += scale * after[static_cast<size_t>(t * K * V) + cell] * of_o;
                        r += G[cell] * x[k_at + i];
                    }
                    dx[v_at + c] = beta * r;
                    dx[beta_at + head] += rest * r;
                    for (index_t i = 0; i < K; ++i) {
                        auto const cell = static_cast<size_t>(i * V + c);
                        double const before = faded[static_cast<size_t>(t * K * V) + cell];
                        dx[k_at + i] += beta * (G[cell] * rest - before * r);
                        G[cell] -= x[k_at + i] * beta * r;
                        dx[g_at + head] += before * G[cell];
                        G[cell] *= a;
                    }
                }
            }
        }
    return d;
}

/// Returns the columns of one of the five sections.
template <class T>
std::vector<T> section(std::vector<T> const& x, std::vector<cpx::section> const& sections, size_t which) {
    index_t const all = on_ranks::width(sections), own = sections[which].heads * sections[which].width;
    index_t first = 0;
    for (size_t i = 0; i < which; ++i) first += sections[i].heads * sections[i].width;
    std::vector<T> columns;
    for (auto row = x.begin(); row != x.end(); row += all)
        columns.insert(columns.end(), row + first, row + first + own);
    return columns;
}

void check_near(std::vector<float> const& got, std::vector<double> const& expected,
                std::vector<cpx::section> const& sections, double reached) {
    std::string const names[] = {"dq", "dk", "dv", "dg", "dbeta"};
    for (size_t i = 0; i < sections.size(); ++i) {
        CAPTURE(names[i]);
        CHECK(ratio(section(got, sections, i), section(expected, sections, i)) <= reached);
    }
}

} // namespace

TEST_SUITE("peers") {
    using cpx::index_t;

    TEST_CASE("delta rules of peers have their results and gradients on every carry, exact ones the bits of one rank") {
        peers::each(cases, [](recurrence const& c) {
            CHECK(c.reached < peers_tolerance);
            auto const p = random(c);
            support::splitmix numbers(7);
            result<float> upstream;
            for (index_t i = 0; i < p.batch.tokens() * c.heads.value_heads * c.heads.value_dim; ++i)
                upstream.o.push_back(static_cast<float>(normal(numbers)));
            auto const formula = run(p.as<double>()).o;
            auto const formula_gradient = gradient(p.as<double>(), on_ranks::cast<double>(upstream.o));
            auto const alone = on_ranks::one_rank(p.batch);
            auto const one = reference::run<cpx::serial>(p, alone).o;
            auto const one_gradient = reference::gradient<cpx::serial>(p, upstream, alone).x;
            CHECK(ratio(one, formula) <= c.reached);
            check_near(one_gradient, formula_gradient, p.sections(), c.reached);
            peers::shardings(p.batch, c.ranks, chunk, [&](std::string const& name, auto const& sharding) {
                CAPTURE(name);
                auto const check = [&]<class How>(How) {
                    auto const o = reference::run<How>(p, sharding).o;
                    auto const d = reference::gradient<How>(p, upstream, sharding).x;
                    CHECK(ratio(o, formula) <= c.reached);
                    check_near(d, formula_gradient, p.sections(), c.reached);
                    if (!cpx::is_exact<How>(sharding, chunk)) return;
                    CHECK(same_bits(o, one));
                    CHECK(same_bits(d, one_gradient));
                };
                check(cpx::scan{});
                check(cpx::serial{});
            });
        });
    }
}
