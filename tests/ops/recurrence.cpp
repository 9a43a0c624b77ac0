// SPDX-License-Identifier: Apache-2.0
// Linear attention with decays, and Kimi's delta rule, on every sharding: the papers' recurrences and their gradients.
#include <cpx/ops/local/kimi_delta.hpp>
#include <cpx/ops/local/linear_attention.hpp>
#include <cpx/ops/recurrence.hpp>

#include <doctest/doctest.h>

#include <ops/golden.hpp>
#include <ops/on_ranks.hpp>
#include <ops/reference.hpp>
#include <support/rejects.hpp>

#include <algorithm>
#include <atomic>
#include <bit>
#include <functional>

namespace {

using namespace on_ranks;
using cpx::index_t, cpx::head_decay_attention, cpx::channel_decay_attention, cpx::kimi_delta_attention;
using support::lengths;

template <class R>
constexpr bool is_kimi = std::same_as<R, kimi_delta_attention>;

static_assert(cpx::recurrence<head_decay_attention, float> && cpx::recurrence<kimi_delta_attention, double>);
static_assert(!cpx::recurrence<cpx::delta_rule_options, float>);

/// A recurrence and its inputs, side by side in rows of `sections()`; `initial` is one state a sequence, or empty.
template <class R, class T>
struct problem {
    cpx::thd batch;
    R r;
    std::vector<T> x, initial;

    std::vector<cpx::section> sections() const {
        std::vector<cpx::section> list;
        for (cpx::recurrence_input const& i : r.inputs()) list.push_back({i.heads, i.width});
        return list;
    }
    std::vector<cpx::section> outputs() const { return {{r.states().heads, r.states().values}}; }
    index_t state() const { return r.states().keys * r.states().values; }
    template <class U>
    problem<R, U> as() const {
        return {batch, r, cast<U>(x), cast<U>(initial)};
    }
};

/// A recurrence whose maps are of any kind: all of them are one number.
struct of_kind {
    cpx::map_kind kind;
    static constexpr char const* name = "of_kind";
    cpx::state_shape states() const { return {3, 1, 1, kind}; }
    std::array<cpx::recurrence_input, 1> inputs() const { return {{{"x", 3, 1}}}; }
    template <class X>
    void forward(X const&, index_t, cpx::rows<double>, cpx::rows<double>) const {}
    template <class X>
    void fold(X const&, index_t, cpx::rows<double>, cpx::rows<double>) const {}
    template <class X, class Dx>
    void backward(X const&, index_t, cpx::rows<double const>, cpx::rows<double const>, cpx::rows<double>,
                  Dx const&) const {}
    template <class X>
    void backward_fold(X const&, index_t, cpx::rows<double const>, cpx::rows<double>) const {}
};

/// A transport that counts the bytes of states that its rank receives.
struct counts_received {
    cpx::threads& comm;
    index_t bytes = 0;

    int rank() const { return comm.rank(); }
    int ranks() const { return comm.ranks(); }
    std::unordered_set<std::uint64_t>& agreed() { return comm.agreed(); }
    void transfer(cpx::identity const& id, std::span<cpx::outgoing const> sends,
                  std::span<cpx::incoming const> receives) {
        if (!id.numbers[cpx::identity::agreement])
            for (cpx::incoming const& parcel : receives) bytes += parcel.bytes();
        comm.transfer(id, sends, receives);
    }
};

/// What a recurrence gives, or what reaches its backward: gradients of o and final.
template <class T>
struct outcome {
    std::vector<T> o, final = {}, dx = {}, dinitial = {};
    std::vector<index_t> received = {}, received_backward = {}; ///< bytes, by rank
};

template <class T>
std::vector<T> some_columns(std::vector<T> const& whole, index_t width, index_t first, index_t count) {
    std::vector<T> some;
    for (auto row = whole.begin(); row != whole.end(); row += width)
        some.insert(some.end(), row + first, row + first + count);
    return some;
}

/// Forward and backward.
template <cpx::carry_kind How, class R, class T, cpx::any_sharding S>
outcome<T> run(problem<R, T> const& p, outcome<T> const& upstream, S const& sharding) {
    constexpr std::size_t N = cpx::recurrence_inputs<R>;
    auto const in = p.sections(), out = p.outputs();
    auto both = out;
    both.insert(both.end(), in.begin(), in.end());
    index_t const heads = p.r.states().heads, sequences = p.batch.sequences();
    std::vector<std::vector<T>> finals(static_cast<std::size_t>(sharding.ranks())), dinitials = finals;
    std::vector<index_t> forth(finals.size()), back = forth;
    auto const fused = assemble<T>(sharding, both, [&](cpx::threads& threads) {
        counts_received comm{threads};
        int const rank = comm.rank();
        auto const x = take(p.x, in, sharding, rank), dout = take(upstream.o, out, sharding, rank);
        auto results = poisoned<T>(sharding, rank, dout.width() + x.width());
        auto const split = [&](auto const& view, index_t first) {
            auto const input = [&](std::size_t i) {
                index_t const width = sharding.heads(rank, in[i].heads).size() * in[i].width;
                first += width;
                return view.columns(first - width, width);
            };
            return [&]<std::size_t... I>(std::index_sequence<I...>) {
                return std::array{input(I)...};
            }(std::make_index_sequence<N>{});
        };
        index_t const width = sharding.heads(rank, heads).size() * p.state();
        auto const view = [&](auto& values) { return cpx::rows(values.data(), values.empty() ? 0 : sequences, width); };
        auto const initial = reference::states_on(sharding, rank, heads, p.state(), p.initial, cpx::side::before),
                   dfinal = reference::states_on(sharding, rank, heads, p.state(), upstream.final, cpx::side::after);
        auto &final = finals[static_cast<std::size_t>(rank)], &dinitial = dinitials[static_cast<std::size_t>(rank)];
        final.assign(static_cast<std::size_t>(sequences * width), poison<T>());
        dinitial = final;
        cpx::recurrence_saved<T> saved;
        cpx::recurrence_tensors<T, S, N> const t{split(x.view(), 0), results.view().columns(0, dout.width()),
                                                 view(initial), view(final), &saved};
        cpx::recurrence_gradients<T, S, N> const to{dout.view(), split(results.view(), dout.width()), view(dfinal),
                                                    view(dinitial)};
        auto const plan = cpx::carry<How>(sharding, rank);
        recur(plan, p.r, t, comm);
        forth[static_cast<std::size_t>(rank)] = std::exchange(comm.bytes, 0);
        recur_backward(plan, p.r, t, to, comm);
        back[static_cast<std::size_t>(rank)] = comm.bytes;
        return results;
    });
    index_t const o = width(out), x = width(in);
    return {some_columns(fused, o + x, 0, o),
            reference::whole_states(sharding, heads, p.state(), finals),
            some_columns(fused, o + x, o, x),
            reference::whole_states(sharding, heads, p.state(), dinitials),
            forth,
            back};
}

/// Token by token: S = Diag(a) S, e = v - S^T k or v, S = S + beta k e^T, o = scale S^T q.
template <class R>
reference::result<double> by_token(problem<R, double> const& p) {
    auto const& h = p.r.heads;
    auto const in = p.sections();
    index_t const wide = width(in), channels = in[3].width, group = h.value_heads / h.key_heads;
    double const scale = p.r.options.scale ? *p.r.options.scale : 1 / std::sqrt(static_cast<double>(h.key_dim));
    reference::result<double> result{
        std::vector<double>(static_cast<std::size_t>(p.batch.tokens() * width(p.outputs()))), {}};
    for (index_t s = 0; s < p.batch.sequences(); ++s)
        for (index_t head = 0; head < h.value_heads; ++head) {
            std::vector<double> state(static_cast<std::size_t>(p.state()));
            if (!p.initial.empty())
                std::copy_n(p.initial.begin() + (s * h.value_heads + head) * p.state(), p.state(), state.begin());
            for (index_t row = p.batch.offset(s); row < p.batch.offset(s + 1); ++row) {
                double const* at = p.x.data() + row * wide;
                auto const next = [&](std::size_t i, index_t of_head) {
                    double const* const from = at + of_head * in[i].width;
                    at += in[i].heads * in[i].width;
                    return std::vector<double>(from, from + in[i].width);
                };
                auto q = next(0, head / group), k = next(1, head / group);
                auto const v = next(2, head), g = next(3, head);
                double beta = 1;
                if constexpr (is_kimi<R>) {
                    beta = next(4, head)[0];
                    for (auto* x : {&q, &k}) {
                        double squares = 1e-6;
                        for (double const e : *x) squares += e * e;
                        for (double& e : *x) e /= p.r.options.qk_l2norm ? std::sqrt(squares) : 1;
                    }
                }
                for (index_t c = 0; c < h.value_dim; ++c) {
                    double e = v[static_cast<std::size_t>(c)], o = 0;
                    auto const cell = [&](index_t d) -> double& {
                        return state[static_cast<std::size_t>(d * h.value_dim + c)];
                    };
                    for (index_t d = 0; d < h.key_dim; ++d) {
                        cell(d) *= std::exp(g[static_cast<std::size_t>(std::min(d, channels - 1))]);
                        if (is_kimi<R>) e -= cell(d) * k[static_cast<std::size_t>(d)];
                    }
                    for (index_t d = 0; d < h.key_dim; ++d) {
                        cell(d) += beta * k[static_cast<std::size_t>(d)] * e;
                        o += scale * cell(d) * q[static_cast<std::size_t>(d)];
                    }
                    result.o[static_cast<std::size_t>((row * h.value_heads + head) * h.value_dim + c)] = o;
                }
            }
            result.final.insert(result.final.end(), state.begin(), state.end());
        }
    return result;
}

/// g is in (-decay, 0].
template <class R, class T>
problem<R, T> random_problem(cpx::thd const& batch, R const& r, double decay, bool initial, std::uint64_t seed) {
    support::splitmix numbers(seed);
    problem<R, T> p{batch, r, {}, {}};
    for (index_t row = 0; row < batch.tokens(); ++row)
        for (cpx::recurrence_input const& i : r.inputs())
            for (T const value : uniform<T>(numbers, i.heads * i.width, i.name[0] == 'g' ? decay : 1))
                p.x.push_back(i.name[0] == 'g' ? -std::abs(value) : i.name[0] == 'b' ? std::abs(value) : value);
    if (initial) p.initial = uniform<T>(numbers, batch.sequences() * r.states().heads * p.state());
    return p;
}

template <class R, class T>
outcome<T> random_upstream(problem<R, T> const& p, bool states, std::uint64_t seed) {
    support::splitmix numbers(seed);
    index_t const all_states = p.batch.sequences() * p.r.states().heads * p.state();
    return {uniform<T>(numbers, p.batch.tokens() * width(p.outputs())), uniform<T>(numbers, states ? all_states : 0)};
}

/// The problem of a golden file, and what it expects.
template <class R>
struct golden_problem {
    explicit golden_problem(char const* name, index_t chunk) : file(golden::open(name)) {
        p.batch = golden::batch_of(file);
        auto const &k = file.tensor("k").shape, &v = file.tensor("v").shape;
        p.r.heads = {k[1], v[1], k[2], v[2]};
        p.r.options.chunk = chunk;
        std::vector<std::vector<double>> inputs;
        for (cpx::recurrence_input const& i : p.r.inputs()) inputs.push_back(file.template read<double>(i.name));
        for (index_t row = 0; row < p.batch.tokens(); ++row)
            for (std::size_t i = 0; i < inputs.size(); ++i) {
                index_t const columns = p.sections()[i].heads * p.sections()[i].width;
                p.x.insert(p.x.end(), inputs[i].begin() + row * columns, inputs[i].begin() + (row + 1) * columns);
            }
    }
    template <class T>
    outcome<T> upstream() const {
        return {file.template read<T>("do"), {}, {}, {}};
    }
    template <class T>
    void check(outcome<T> const& got) const {
        double const bound = sizeof(T) == 8 ? 1e-10 : 5e-6;
        CHECK(relative_error(got.o, file.template read<double>("o")) <= bound);
        CHECK(relative_error(got.final, file.template read<double>("final_state")) <= bound);
        index_t first = 0;
        for (cpx::recurrence_input const& i : p.r.inputs()) {
            CAPTURE(i.name);
            auto const d = some_columns(got.dx, width(p.sections()), first, i.heads * i.width);
            CHECK(relative_error(d, file.template read<double>(std::string("d") + i.name)) <= bound);
            first += i.heads * i.width;
        }
    }

    cpx::safetensors file;
    problem<R, double> p;
};

template <class T>
void check_same(outcome<T> const& a, outcome<T> const& b) {
    CHECK(same_bits(a.o, b.o));
    CHECK(same_bits(a.final, b.final));
    CHECK(same_bits(a.dx, b.dx));
    CHECK(same_bits(a.dinitial, b.dinitial));
}

template <class R, class T>
cpx::head_sharded<> by_heads(problem<R, T> const& p, int ranks) {
    return {ranks, p.batch, p.sections()};
}

template <class R>
constexpr char const* file_of = is_kimi<R>                              ? "kimi_delta"
                                : std::same_as<R, head_decay_attention> ? "head_decay"
                                                                        : "channel_decay";

/// Calls `f(sharding, exact)` with every sharding by tokens, cut at multiples of 1 and of 16; `exact`: whether `serial`
/// gives the bits of one rank.
template <class F>
void everywhere(cpx::thd const& batch, std::vector<int> const& ranks, F&& f) {
    for (int const count : ranks)
        for_each_sharding(batch, count, {1, 16}, [&](std::string const& name, auto const& sharding) {
            CAPTURE(name);
            f(sharding, cpx::is_exact<cpx::serial>(sharding, 16));
        });
}

template <class R, class T>
void check_golden() {
    for (index_t const chunk : {1, 5, 64}) {
        golden_problem<R> const g(file_of<R>, chunk);
        g.check(run<cpx::serial>(g.p.template as<T>(), g.template upstream<T>(), one_rank(g.p.batch)));
    }
    golden_problem<R> const g(file_of<R>, 16);
    auto const p = g.p.template as<T>();
    auto const upstream = g.template upstream<T>();
    auto const one = run<cpx::serial>(p, upstream, one_rank(p.batch));
    g.check(one);
    everywhere(p.batch, {2, 3, 4, 5, 8}, [&](by_tokens const& sharding, bool exact) {
        g.check(run<cpx::scan>(p, upstream, sharding));
        auto const serial = run<cpx::serial>(p, upstream, sharding);
        if (exact)
            check_same(serial, one);
        else
            g.check(serial);
    });
    for (int const ranks : rank_counts) check_same(run<cpx::serial>(p, upstream, by_heads(p, ranks)), one);
}

template <class R, class T>
void check_tokens() {
    cpx::recurrence_heads const heads[] = {{1, 1, 8, 4}, {2, 4, 3, 5}, {1, 3, 16, 16}, {3, 3, 9, 2}, {2, 6, 1, 1}};
    double const decays[] = {0, 0.05, 2, 40, 1e4};
    support::splitmix numbers(3);
    for (std::size_t i = 0; i < 15; ++i) {
        CAPTURE(i);
        index_t const chunks[] = {1, 7, 64};
        R const r{heads[i % 5], {.chunk = chunks[i % 3], .scale = i % 2 ? std::optional(0.7) : std::nullopt}};
        auto const p = random_problem<R, T>(random_batch(numbers, 4), r, decays[i / 3], i % 4 > 0, i);
        auto const expected = by_token(p.template as<double>());
        auto const got = run<cpx::scan>(p, random_upstream(p, true, i), one_rank(p.batch));
        CHECK(relative_error(got.o, expected.o) <= 2000 * std::numeric_limits<T>::epsilon());
        CHECK(relative_error(got.final, expected.final) <= 2000 * std::numeric_limits<T>::epsilon());
    }
}

/// Of equal decays, which are rounded alike.
template <class R>
void check_slow_decays() {
    R const r{{1, 1, 8, 8}, {.chunk = 64}};
    auto p = random_problem<R, float>(lengths({4097}), r, 1, true, 1);
    std::size_t at = 0;
    for (index_t row = 0; row < p.batch.tokens(); ++row)
        for (cpx::recurrence_input const& i : r.inputs())
            for (index_t c = 0; c < i.heads * i.width; ++c, ++at) {
                if (i.name[0] == 'g') p.x[at] = -1e-4f;
                if (i.name[0] == 'b') p.x[at] /= 1000; // else what is erased hides errors of decays
            }
    auto const upstream = random_upstream(p, true, 2);
    auto const got = run<cpx::serial>(p, upstream, one_rank(p.batch));
    outcome<double> const same{cast<double>(upstream.o), cast<double>(upstream.final)};
    auto const expected = run<cpx::serial>(p.template as<double>(), same, one_rank(p.batch));
    CHECK(relative_error(got.o, expected.o) <= 5e-6);
    CHECK(relative_error(got.final, expected.final) <= 5e-6);
    CHECK(relative_error(got.dinitial, expected.dinitial) <= 5e-6);
    auto const sections = p.sections();
    index_t first = 0;
    for (cpx::section const& s : sections) {
        index_t const columns = s.heads * s.width;
        CAPTURE(first);
        CHECK(relative_error(some_columns(got.dx, width(sections), first, columns),
                             some_columns(expected.dx, width(sections), first, columns)) <= 5e-6);
        first += columns;
    }
}

double dot(std::vector<double> const& a, std::vector<double> const& b) {
    REQUIRE(a.size() == b.size());
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
}

/// Checks the derivatives along two directions of every input and of the states, on three ranks.
template <class R>
void check_differences(std::size_t turn) {
    cpx::recurrence_heads const heads[] = {{2, 6, 2, 3}, {2, 4, 3, 2}, {1, 3, 1, 2}, {2, 2, 3, 1}};
    std::vector<index_t> const packings[] = {{5, 1, 0, 9, 14}, {2, 7, 1}, {40}};
    R r{heads[turn], {.chunk = turn == 1 ? 3 : 64}};
    if constexpr (is_kimi<R>) r.options.qk_l2norm = turn < 2;
    double const decays[] = {1e-3, 2, 30, 0.1};
    auto p = random_problem<R, double>(lengths(packings[turn % 3]), r, decays[turn], true, turn);
    auto const upstream = random_upstream(p, true, turn + 50);
    auto const expected = run<cpx::serial>(p, upstream, one_rank(p.batch));
    support::splitmix numbers(turn + 7);
    auto const check = [&](std::vector<double>& x, std::vector<double> const& slopes, std::vector<double> direction) {
        auto const value = x;
        double const length = std::sqrt(dot(direction, direction)), step = 3e-5 / length;
        auto const move = [&](double by) {
            for (std::size_t j = 0; j < x.size(); ++j) x[j] = value[j] + by * direction[j];
            auto const at = by_token(p);
            return dot(at.o, upstream.o) + dot(at.final, upstream.final);
        };
        double const slope = (move(step) - move(-step)) / (2 * step);
        CHECK(std::abs(slope - dot(slopes, direction)) <= 1e-6 * std::sqrt(dot(slopes, slopes)) * length);
        x = value;
    };
    index_t const all = width(p.sections());
    index_t first = 0;
    for (int repeat = 0; repeat < 2; ++repeat, first = 0) {
        for (cpx::section const& s : p.sections()) {
            CAPTURE(first);
            auto direction = uniform<double>(numbers, std::ssize(p.x));
            for (index_t i = 0; i < std::ssize(p.x); ++i)
                if (i % all < first || i % all >= first + s.heads * s.width) direction[static_cast<std::size_t>(i)] = 0;
            check(p.x, expected.dx, direction);
            first += s.heads * s.width;
        }
        check(p.initial, expected.dinitial, uniform<double>(numbers, std::ssize(p.initial)));
    }
    auto const check_near = [&](outcome<double> const& got) {
        CHECK(relative_error(got.dx, expected.dx) <= 1e-12);
        CHECK(relative_error(got.dinitial, expected.dinitial) <= 1e-12);
    };
    everywhere(p.batch, {3}, [&](by_tokens const& sharding, bool) {
        check_near(run<cpx::scan>(p, upstream, sharding));
        check_near(run<cpx::serial>(p, upstream, sharding));
    });
    check_near(run<cpx::serial>(p, upstream, by_heads(p, 3)));
}

/// Checks that a token, with its gradient, leaves other sequences and the outputs before it alone.
template <class R>
void check_leaks() {
    auto const p = random_problem<R, double>(lengths({19, 1, 24, 0, 6}), R{{1, 2, 4, 4}, {.chunk = 5}}, 0, true, 6);
    auto const upstream = random_upstream(p, true, 3);
    index_t const columns = width(p.sections()), out = width(p.outputs()), states = 2 * p.state();
    for (double const change : {1e-3, std::numeric_limits<double>::quiet_NaN()})
        everywhere(p.batch, {1, 3}, [&](by_tokens const& sharding, bool) {
            auto const check = [&]<class How>(How) {
                auto const before = run<How>(p, upstream, sharding);
                for (index_t const row : {0, 11, 19, 20, 33, 49}) {
                    CAPTURE(row);
                    auto other = p;
                    auto of_other = upstream;
                    for (index_t c = 0; c < columns; ++c)
                        other.x[static_cast<std::size_t>(row * columns + c)] += change;
                    for (index_t c = 0; c < out; ++c) of_other.o[static_cast<std::size_t>(row * out + c)] += change;
                    auto const after = run<How>(other, of_other, sharding);
                    index_t const s = p.batch.sequence(row), begin = p.batch.offset(s), end = p.batch.offset(s + 1);
                    auto const outside = [&](auto const& a, auto const& b, index_t wide, index_t from, index_t to) {
                        index_t const count = std::ssize(a) / wide;
                        return same_rows(a, b, wide, 0, from) && same_rows(a, b, wide, to, count) &&
                               !same_rows(a, b, wide, from, to);
                    };
                    CHECK(outside(after.o, before.o, out, row, end));
                    CHECK(outside(after.dx, before.dx, columns, begin, end));
                    CHECK(outside(after.final, before.final, states, s, s + 1));
                    CHECK(outside(after.dinitial, before.dinitial, states, s, s + 1));
                }
            };
            check(cpx::scan{});
            check(cpx::serial{});
        });
}

/// Checks what the ranks of a scan over one sequence receive, in the forward and again in the backward.
template <class R>
void check_received(int ranks) {
    auto const p = random_problem<R, double>(lengths({64}), R{{1, 2, 3, 5}, {.chunk = 4}}, 1e-2, false, 11);
    auto const upstream = random_upstream(p, false, 1);
    auto const got = run<cpx::scan>(p, upstream, by_tokens(cpx::shard(p.batch, cpx::sequential<>(ranks))));
    for (int rank = 0; rank < ranks; ++rank) {
        auto const bytes = [&](int level) -> index_t {
            index_t const digits = std::bit_width(static_cast<unsigned>(level)); // at most log2 W, rounded up
            auto const shape = p.r.states();
            return level == 0 ? 0 : 8 * (digits * shape.state_width() + (digits - 1) * shape.map_width());
        };
        CHECK(got.received[static_cast<std::size_t>(rank)] == bytes(rank));
        CHECK(got.received_backward[static_cast<std::size_t>(rank)] == bytes(ranks - 1 - rank));
    }
}

} // namespace

TEST_SUITE("ops") {
    using cpx::index_t;

    TEST_CASE_TEMPLATE("recurrences have the outputs and gradients of their papers on every sharding", R,
                       head_decay_attention, channel_decay_attention, kimi_delta_attention) {
        check_golden<R, double>();
        check_golden<R, float>();
    }

    TEST_CASE_TEMPLATE("in chunks they are the recurrences of tokens, decays to nothing included", R,
                       head_decay_attention, channel_decay_attention, kimi_delta_attention) {
        check_tokens<R, double>();
        check_tokens<R, float>();
    }

    TEST_CASE_TEMPLATE("thousands of equal slow decays cost no precision in float", R, head_decay_attention,
                       channel_decay_attention, kimi_delta_attention) {
        check_slow_decays<R>();
    }

    TEST_CASE_TEMPLATE("their gradients are their differences, with those of states", R, head_decay_attention,
                       channel_decay_attention, kimi_delta_attention) {
        for (std::size_t turn = 0; turn < 4; ++turn) check_differences<R>(turn);
    }

    TEST_CASE_TEMPLATE("a token of theirs changes no bit of another sequence and of no output before it", R,
                       head_decay_attention, channel_decay_attention, kimi_delta_attention) {
        check_leaks<R>();
    }

    TEST_CASE_TEMPLATE("a scan gives a rank one state for each binary digit of its level, and one map fewer, of the "
                       "map's kind",
                       R, head_decay_attention, channel_decay_attention, kimi_delta_attention) {
        for (int const ranks : {1, 2, 3, 8, 33, 64}) {
            CAPTURE(ranks);
            check_received<R>(ranks);
        }
    }

    TEST_CASE("a sequence has the bits that it has alone, whatever it is packed with") {
        auto const r = kimi_delta_attention{{2, 4, 8, 4}, {.chunk = 16}};
        auto const p = random_problem<kimi_delta_attention, double>(lengths({33, 1, 70, 0, 16}), r, 0.1, true, 8);
        auto const upstream = random_upstream(p, true, 9);
        auto const all = run<cpx::serial>(p, upstream, one_rank(p.batch));
        index_t const columns = width(p.sections()), out = width(p.outputs()), states = 4 * p.state();
        for (index_t s = 0; s < p.batch.sequences(); ++s) {
            index_t const first = p.batch.offset(s), last = p.batch.offset(s + 1);
            problem<kimi_delta_attention, double> const own{
                lengths({last - first}), r, slice(p.x, columns, first, last), slice(p.initial, states, s, s + 1)};
            outcome<double> const of_own{slice(upstream.o, out, first, last), slice(upstream.final, states, s, s + 1)};
            check_same(run<cpx::scan>(own, of_own, one_rank(own.batch)),
                       {slice(all.o, out, first, last), slice(all.final, states, s, s + 1),
                        slice(all.dx, columns, first, last), slice(all.dinitial, states, s, s + 1)});
        }
    }

    TEST_CASE("where the channels of a head decay alike, Kimi's delta rule is the gated delta rule") {
        cpx::recurrence_heads const heads{2, 4, 3, 5};
        auto const p = reference::random_delta<double>(lengths({30, 0, 81}), heads, {.chunk = 16}, 0.3, true, 2);
        problem<kimi_delta_attention, double> other{p.batch, {heads, p.options}, {}, p.initial};
        index_t const before_g = 2 * 2 * 3 + 4 * 5;
        for (auto row = p.x.begin(); row != p.x.end(); row += before_g + 8) {
            other.x.insert(other.x.end(), row, row + before_g);
            for (index_t h = 0; h < 4; ++h) other.x.insert(other.x.end(), 3, row[before_g + h]);
            other.x.insert(other.x.end(), row + before_g + 4, row + before_g + 8);
        }
        auto const expected = reference::run<cpx::serial>(p, one_rank(p.batch));
        auto const got = run<cpx::serial>(other, random_upstream(other, true, 1), one_rank(p.batch));
        CHECK(relative_error(got.o, expected.o) <= 1e-14);
        CHECK(relative_error(got.final, expected.final) <= 1e-14);
    }

    TEST_CASE("a recurrence rejects what does not fit, before anything is written") {
        using S = by_tokens;
        auto const batch = lengths({6, 5});
        S const sharding = one_rank(batch), other = one_rank(lengths({5, 6}));
        std::vector<double> values(11 * 16), states(4 * 32), outputs(11 * 8 * 2, 7);
        cpx::sharded<double, S> const q({values.data(), 11, 4, 16}, sharding, 0),
            v({values.data() + 4, 11, 8, 16}, sharding, 0),
            g = q.columns(0, 2), o({outputs.data(), 11, 8}, sharding, 0), dv({outputs.data() + 88, 11, 8}, sharding, 0);
        std::vector<double> gradients(11 * 10);
        cpx::sharded<double, S> const dq({gradients.data(), 11, 4, 10}, sharding, 0),
            dk({gradients.data() + 4, 11, 4, 10}, sharding, 0), dg({gradients.data() + 8, 11, 2, 10}, sharding, 0);
        head_decay_attention const good{{1, 2, 4, 4}, {}};
        using tensors = cpx::recurrence_tensors<double, S, 4>;
        using gradient = cpx::recurrence_gradients<double, S, 4>;
        auto const rejects = [&](std::string const& passage,
                                 std::function<void(head_decay_attention&, tensors&, gradient&)> const& change,
                                 cpx::caller from = cpx::caller::here()) {
            cpx::recurrence_saved<double> saved;
            auto r = good;
            tensors t{{q, q, v, g}, o, {}, {}, &saved};
            gradient to{o, {dq, dk, dv, dg}};
            change(r, t, to);
            auto const call = [&] {
                cpx::threads::run(1, [&](cpx::threads& threads) {
                    counts_received comm{threads};
                    auto const plan = cpx::carry<cpx::scan>(sharding, 0);
                    recur(plan, r, t, comm);
                    std::ranges::fill(outputs, 7);
                    recur_backward(plan, r, t, to, comm);
                });
            };
            support::rejects({"recurrence.cpp", passage}, call, from);
            CHECK(std::ranges::all_of(outputs, [](double x) { return x == 7; }));
            CHECK(std::ranges::all_of(gradients, [](double x) { return x == 0; }));
            if (passage.find("_backward") == std::string::npos) CHECK(saved.starts.empty());
        };
        using R = head_decay_attention;
        rejects("head_decay_attention: chunk: expected at least 1, got 0",
                [](R& r, tensors&, gradient&) { r.options.chunk = 0; });
        rejects("heads: expected a multiple of the heads of q 3, got 2",
                [](R& r, tensors&, gradient&) { r.heads.key_heads = 3; });
        rejects("key_dim: expected at least 1, got -1", [](R& r, tensors&, gradient&) { r.heads.key_dim = -1; });
        rejects("key_dim: expected at least 1, got 0", [](R& r, tensors&, gradient&) { r.heads.key_dim = 0; });
        rejects("value_dim: expected at least 1, got 0", [](R& r, tensors&, gradient&) { r.heads.value_dim = 0; });
        rejects("key heads: expected at least 1, got 0", [](R& r, tensors&, gradient&) { r.heads.key_heads = 0; });
        rejects("shape of q: expected (11, 8), got (11, 4)", [](R& r, tensors&, gradient&) { r.heads.key_dim = 8; });
        rejects("shape of k: expected (11, 4), got (11, 8)", [&](R&, tensors& t, gradient&) { t.x[1] = v; });
        rejects("shape of g: expected (11, 2), got (11, 4)", [&](R&, tensors& t, gradient&) { t.x[3] = q; });
        rejects("shape of o: expected (11, 8), got (11, 4)", [&](R&, tensors& t, gradient&) { t.o = dq; });
        rejects("sharding of v: expected the plan's", [&](R&, tensors& t, gradient&) {
            t.x[2] = {v.data(), other, 0};
        });
        rejects("sharding of o: expected the plan's", [&](R&, tensors& t, gradient&) { t.o = {o.data(), other, 0}; });
        rejects("shape of initial: expected (2, 32), got (1, 32)", [&](R&, tensors& t, gradient&) {
            t.initial = {states.data(), 1, 32};
        });
        rejects("shape of final: expected (2, 32), got (2, 16)", [&](R&, tensors& t, gradient&) {
            t.final = {states.data(), 2, 16};
        });
        rejects("overlap of o and v: expected none, got some", [&](R&, tensors& t, gradient&) { t.o = v; });
        rejects("overlap of final and initial", [&](R&, tensors& t, gradient&) {
            t.initial = {states.data(), 2, 32}, t.final = {states.data() + 16, 2, 32};
        });
        std::string const back = "head_decay_attention_backward: ";
        rejects(back + "saved states: expected those of the forward, got none",
                [](R&, tensors& t, gradient&) { t.saved = nullptr; });
        rejects(back + "overlap of dq and dfinal", [&](R&, tensors&, gradient& to) {
            to.dfinal = {gradients.data(), 2, 32};
        });
        rejects(back + "shape of dq: expected (11, 4), got (11, 2)",
                [&](R&, tensors&, gradient& to) { to.dx[0] = dg; });
        rejects(back + "shape of dout: expected (11, 8), got (11, 4)",
                [&](R&, tensors&, gradient& to) { to.dout = q; });
        rejects(back + "sharding of dout: expected the plan's", [&](R&, tensors&, gradient& to) {
            to.dout = {o.data(), other, 0};
        });
        rejects(back + "sharding of dk: expected the plan's", [&](R&, tensors&, gradient& to) {
            to.dx[1] = {dq.data(), other, 0};
        });
        rejects(back + "overlap of dq and dk", [&](R&, tensors&, gradient& to) { to.dx[1] = dq; });
        rejects(back + "overlap of dv and v", [&](R&, tensors&, gradient& to) { to.dx[2] = v; });
        rejects(back + "overlap of dv and dout", [&](R&, tensors&, gradient& to) { to.dx[2] = o; });
        rejects(back + "shape of dinitial: expected (2, 32), got (2, 16)", [&](R&, tensors&, gradient& to) {
            to.dinitial = {states.data(), 2, 16};
        });

        cpx::recurrence_saved<double> saved; // by one forward, then read for another batch, rank or recurrence
        auto const call = [&](R const& r, S const& where, bool backward, tensors t, gradient to) {
            auto const on = [&](auto const& x) { return cpx::sharded(x.data(), where, 0); };
            t.x = {on(q), on(q), on(v), on(g)}, t.o = on(o), t.saved = &saved;
            to.dout = on(o), to.dx = {on(dq), on(dk), on(dv), on(dg)};
            cpx::threads::run(1, [&](cpx::threads& comm) {
                auto const plan = cpx::carry<cpx::scan>(where, 0);
                backward ? recur_backward(plan, r, t, to, comm) : recur(plan, r, t, comm);
            });
        };
        tensors const t{{q, q, v, g}, o};
        gradient const to{o, {dq, dk, dv, dg}};
        call(good, sharding, false, t, to);
        std::ranges::fill(outputs, 7);
        auto const kept = saved.starts;
        auto const keeps = [&](std::string const& passage, auto const& f) {
            support::rejects({"recurrence.cpp", passage}, f);
            CHECK(std::ranges::all_of(outputs, [](double x) { return x == 7; }));
            CHECK(std::ranges::all_of(gradients, [](double x) { return x == 0; }));
            CHECK(saved.starts == kept);
        };
        keeps(back + "saved states: expected those of the forward, got those of another batch, sharding or rank",
              [&] { call(good, other, true, t, to); });
        tensors from_saved = t;
        from_saved.initial = {saved.starts.data(), 2, 32};
        keeps("head_decay_attention: overlap of saved states and initial",
              [&] { call(good, sharding, false, from_saved, to); });
        gradient to_saved = to;
        to_saved.dinitial = {saved.starts.data(), 2, 32};
        keeps(back + "overlap of dinitial and saved states", [&] { call(good, sharding, true, t, to_saved); });
        for (bool const backward : {false, true}) // also where no state has to move
            keeps((backward ? back : "head_decay_attention: ") + "rank of the plan: expected ", [&] {
                cpx::threads::run(2, [&](cpx::threads& comm) {
                    if (comm.rank() == 0) return;
                    auto const plan = cpx::carry<cpx::scan>(sharding, 0); // of one rank
                    tensors of_saved = t;
                    of_saved.saved = &saved;
                    backward ? recur_backward(plan, good, of_saved, to, comm) : recur(plan, good, of_saved, comm);
                });
            });
        cpx::threads::run(1, [&](cpx::threads& comm) { // without maps, which a scan's backward reads
            tensors by_serial = t;
            by_serial.saved = &saved;
            recur(cpx::carry<cpx::serial>(sharding, 0), good, by_serial, comm);
        });
        std::ranges::fill(outputs, 7);
        keeps(back + "saved maps: expected those of the forward, by scan, got others",
              [&] { call(good, sharding, true, t, to); });
    }

    TEST_CASE("ranks that run two recurrences, or one on two batches, are told") {
        cpx::recurrence_heads const heads{1, 1, 2, 2};
        auto const run_on = [&](auto const& r, cpx::thd const& batch, cpx::threads& threads) {
            by_tokens const sharding = cpx::shard(batch, cpx::sequential<>(2));
            counts_received comm{threads};
            auto const input = [&](std::size_t i) {
                return cpx::make_tensor<double>(sharding, comm.rank(), r.inputs()[i].heads * r.inputs()[i].width);
            };
            auto const q = input(0), k = q, v = input(2), g = input(3);
            auto o = v;
            cpx::recurrence_tensors const t{std::array{q.view(), k.view(), v.view(), g.view()}, o.view()};
            recur(cpx::carry<cpx::scan>(sharding, comm.rank()), r, t, comm);
        };
        support::rejects({"recurrence.cpp", "_decay_attention: ranks disagree on operation",
                          "got head_decay_attention: carry, scan (rank 0), channel_decay_attention: carry, scan"},
                         [&] {
                             cpx::threads::run(2, [&](cpx::threads& comm) {
                                 if (comm.rank() == 0)
                                     run_on(head_decay_attention{heads}, lengths({12}), comm);
                                 else
                                     run_on(channel_decay_attention{heads}, lengths({12}), comm);
                             });
                         });
        support::rejects({"recurrence.cpp", ": head_decay_attention: ranks disagree on offset 1 of cu_seqlens"}, [&] {
            cpx::threads::run(
                2, [&](cpx::threads& comm) { run_on(head_decay_attention{heads}, lengths({11 + comm.rank()}), comm); });
        });
    }

    TEST_CASE_TEMPLATE(
        "ranks whose recurrences differ are told in what, though as much is handed on, before they write", How,
        cpx::serial, cpx::scan) {
        std::atomic<int> written = 0;
        for (int const ranks : {2, 3}) {
            auto const told = [&](std::string const& field, std::string const& first, std::string const& last,
                                  auto const& r, auto const& odd, bool backward = false, bool odd_has_states = false) {
                auto const run = [&](auto const& of, cpx::threads& comm, bool has_states) {
                    using R = std::remove_cvref_t<decltype(of)>;
                    static constexpr std::size_t N = cpx::recurrence_inputs<R>;
                    by_tokens const sharding = cpx::shard(lengths({12}), cpx::sequential<>(ranks));
                    auto const tensor = [&](index_t width) {
                        return cpx::make_tensor<double>(sharding, comm.rank(), width);
                    };
                    std::vector<cpx::tensor<double, by_tokens>> inputs, gradients;
                    for (auto const& i : of.inputs()) inputs.push_back(tensor(i.heads * i.width));
                    gradients = inputs;
                    auto o = tensor(of.states().heads * of.states().values), dout = o;
                    std::vector<double> final(static_cast<std::size_t>(of.states().state_width()), 7), dinitial = final;
                    std::ranges::fill(o.elements(), 7);
                    for (auto& x : gradients) std::ranges::fill(x.elements(), 7);
                    cpx::recurrence_saved<double> saved;
                    auto const views = [](auto& list) {
                        return [&]<std::size_t... I>(std::index_sequence<I...>) {
                            return std::array{list[I].view()...};
                        }(std::make_index_sequence<N>());
                    };
                    index_t const width = of.states().state_width();
                    auto const before = final;
                    auto const given = has_states ? cpx::rows<double const>(before, width) : cpx::rows<double const>();
                    cpx::recurrence_tensors const t{views(inputs), o.view(), given, cpx::rows<double>(final, width),
                                                    &saved};
                    cpx::recurrence_gradients const to{dout.view(), views(gradients), given,
                                                       cpx::rows<double>(dinitial, width)};
                    auto const plan = cpx::carry<How>(sharding, comm.rank());
                    auto const maps = cpx::detail::inner_segments(plan.links) * of.states().map_width();
                    if (backward) {
                        saved.starts.resize(static_cast<std::size_t>(std::ssize(plan.segments) * width));
                        saved.maps.resize(static_cast<std::size_t>(maps));
                    }
                    try {
                        backward ? recur_backward(plan, of, t, to, comm) : recur(plan, of, t, comm);
                    } catch (cpx::error const&) {
                        auto const changed = [](auto const& x) {
                            return std::ranges::any_of(x, [](double y) { return y != 7; });
                        };
                        written += changed(o.elements()) || changed(final) || changed(dinitial);
                        for (auto const& x : gradients) written += changed(x.elements());
                        written += !backward && !saved.starts.empty();
                        throw;
                    }
                };
                std::string const others = ranks == 2 ? " (rank 0), " : " (ranks 0 1), ";
                support::rejects({"recurrence.cpp", "ranks disagree on " + field + ':',
                                  "got " + first + others + last + " (rank " + std::to_string(ranks - 1) + ')'},
                                 [&] {
                                     cpx::threads::run(ranks, [&](cpx::threads& comm) {
                                         comm.rank() == ranks - 1 ? run(odd, comm, odd_has_states)
                                                                  : run(r, comm, false);
                                     });
                                 });
            };
            using cpx::map_kind;
            for (bool const backward : {false, true}) {
                told("key width of the state", "2", "4", head_decay_attention{{1, 1, 2, 4}},
                     head_decay_attention{{1, 1, 4, 2}}, backward);
                told("heads of the state", "1", "2", head_decay_attention{{1, 1, 2, 4}},
                     head_decay_attention{{2, 2, 2, 2}}, backward);
                told("value width of the state", "4", "2", head_decay_attention{{1, 1, 2, 4}},
                     head_decay_attention{{1, 1, 2, 2}}, backward);
                told("kind of map", "matrix", "vector", of_kind{map_kind::matrix}, of_kind{map_kind::vector}, backward);
                told("kind of map", "vector", "number", of_kind{map_kind::vector}, of_kind{map_kind::number}, backward);
                told("chunk", "64", "32", head_decay_attention{{1, 1, 2, 4}},
                     head_decay_attention{{1, 1, 2, 4}, {.chunk = 32}}, backward);
                told("scale", "0.5", "0.10000000000000001", kimi_delta_attention{{1, 1, 4, 4}},
                     kimi_delta_attention{{1, 1, 4, 4}, {.scale = 0.1}}, backward);
                told("norm of q and k", "taken", "none", kimi_delta_attention{{1, 1, 4, 4}},
                     kimi_delta_attention{{1, 1, 4, 4}, {.qk_l2norm = false}}, backward);
                told("initial states (in the backward dfinal)", "none", "given", head_decay_attention{{1, 1, 2, 4}},
                     head_decay_attention{{1, 1, 2, 4}}, backward, true);
                told("scale", "0.5", "0", kimi_delta_attention{{1, 1, 4, 4}},
                     kimi_delta_attention{{1, 1, 4, 4}, {.scale = 0}}, backward);
            }
        }
        CHECK(written == 0);
    }
}
