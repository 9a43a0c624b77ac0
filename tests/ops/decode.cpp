// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/decode.hpp>

#include <doctest/doctest.h>

#include <functional>
#include <type_traits>

#include <ops/on_ranks.hpp>
#include <ops/reference.hpp>
#include <support/rejects.hpp>

namespace {

using namespace on_ranks;
using cpx::index_t;
using reference::layer, reference::random_layer;
using support::lengths;
using config_type = cpx::gated_delta_net_config;
using lists = std::vector<index_t>;

config_type const grouped{12, {2, 4, 4, 6}, 4, 16, 1e-6};
config_type const uneven{10, {3, 9, 5, 3}, 8, 5, 1e-6};
config_type const pointwise{4, {1, 1, 2, 2}, 1, 1, 1e-5};

/// The states of one layer on every rank, one cache a rank.
template <class T>
using caches = std::vector<cpx::gated_delta_net_cache<T>>;
using spread = by_tokens;
using by_heads = cpx::head_sharded<>;

std::size_t at(index_t i) { return static_cast<std::size_t>(i); }

/// Returns whether `rank` holds one of the first `count` tokens of sequence `s`. An empty sequence counts as rank 0's.
template <cpx::any_sharding S>
bool holds_first(S const& sharding, int rank, index_t s, index_t count) {
    cpx::thd const& batch = sharding.batch();
    if (batch.length(s) == 0) return S::every_row || rank == 0;
    cpx::range const wanted{batch.offset(s), std::min(batch.offset(s) + count, batch.offset(s + 1))};
    bool held = false;
    sharding.for_each_piece(rank, [&](cpx::range piece) { held = held || !intersect(piece, wanted).empty(); });
    return held;
}

/// Returns whether `rank` holds the last token of sequence `s`, rank 0 for an empty one.
template <cpx::any_sharding S>
bool holds_last(S const& sharding, int rank, index_t s) {
    cpx::thd const& batch = sharding.batch();
    if (batch.length(s) == 0) return S::every_row || rank == 0;
    index_t const last = batch.offset(s + 1) - 1;
    bool held = false;
    sharding.for_each_piece(rank, [&](cpx::range p) { held = held || (p.first <= last && last < p.last); });
    return held;
}

/// Returns by what a recurrence carries its states on a rank of a sharding; which carry does not matter to states.
template <cpx::any_sharding S>
auto on(S const& sharding, int rank) {
    return cpx::carry<cpx::serial>(sharding, rank);
}

template <class T, cpx::any_sharding S>
caches<T> zeros(config_type const& config, S const& sharding) {
    caches<T> states;
    for (int rank = 0; rank < sharding.ranks(); ++rank) states.emplace_back(config, on(sharding, rank));
    return states;
}

/// Fills with poison the rows of sequences that `keep(sequence)` does not want.
template <class T, class Keep>
void poison_rows(cpx::rows<T> of, Keep&& keep) {
    for (index_t s = 0; s < of.count(); ++s)
        if (!keep(s)) std::fill_n(of.row(s), of.width(), poison<T>());
}
template <class T, class Keep>
void poison_states(caches<T>& states, Keep&& keep) {
    for (int rank = 0; rank < static_cast<int>(states.size()); ++rank) {
        auto const state = states[at(rank)].view();
        poison_rows(state.conv, [&](index_t s) { return keep(rank, s); });
        poison_rows(state.recurrent, [&](index_t s) { return keep(rank, s); });
    }
}
/// Leaves what the layer on `sharding` may read.
template <class T, cpx::any_sharding S>
void poison_unread(caches<T>& states, config_type const& config, S const& sharding) {
    for (int rank = 0; rank < sharding.ranks(); ++rank) {
        auto const state = states[at(rank)].view();
        poison_rows(state.conv, [&](index_t s) { return holds_first(sharding, rank, s, config.kernel - 1); });
        poison_rows(state.recurrent, [&](index_t s) { return holds_first(sharding, rank, s, 1); });
    }
}

std::vector<cpx::section> conv_sections(config_type const& config) {
    std::vector<cpx::section> sections;
    for (index_t tap = 0; tap < config.kernel; ++tap)
        for (std::size_t i = 0; i < 3; ++i) sections.push_back(config.sections()[i]);
    return sections;
}
std::vector<cpx::section> recurrent_sections(config_type const& config) {
    return {{config.heads.value_heads, config.heads.key_dim * config.heads.value_dim}};
}
index_t state_width(config_type const& config) {
    return width(conv_sections(config)) + width(recurrent_sections(config));
}

/// Calls `f(local, whole)` for each place of the states of sequence `s` on `rank`: an element there, an index of whole
/// states, (sequences, conv then recurrent).
template <class T, cpx::any_sharding S>
void for_each_place(config_type const& config, S const& sharding, int rank, index_t s,
                    cpx::gated_delta_net_state<T> const& state,
                    std::type_identity_t<std::function<void(T&, std::size_t)>> const& f) {
    auto const conv = columns(sharding, rank, conv_sections(config)),
               recurrent = columns(sharding, rank, recurrent_sections(config));
    REQUIRE(state.conv.width() == std::ssize(conv));
    REQUIRE(state.recurrent.width() == std::ssize(recurrent));
    index_t const first = s * state_width(config), second = first + width(conv_sections(config));
    for (index_t c = 0; c < std::ssize(conv); ++c) f(state.conv(s, c), at(first + conv[at(c)]));
    for (index_t c = 0; c < std::ssize(recurrent); ++c) f(state.recurrent(s, c), at(second + recurrent[at(c)]));
}

/// Puts states together from the ranks for which `held(rank, sequence)`. Where ranks differ, it is poison.
template <class T, cpx::any_sharding S, class Held>
std::vector<T> whole_states(config_type const& config, S const& sharding, caches<T>& states, Held&& held) {
    index_t const sequences = sharding.batch().sequences();
    std::vector<T> whole(at(sequences * state_width(config)), poison<T>());
    std::vector<char> seen(whole.size());
    for (int rank = 0; rank < sharding.ranks(); ++rank)
        for (index_t s = 0; s < sequences; ++s)
            if (held(rank, s))
                for_each_place(config, sharding, rank, s, states[at(rank)].view(), [&](T value, std::size_t i) {
                    whole[i] = seen[i] && !same_bits(whole[i], value) ? poison<T>() : value;
                    seen[i] = true;
                });
    return whole;
}

/// Goes on from `states` and leaves what comes after there.
template <cpx::carry_kind How, class T, cpx::any_sharding S>
std::vector<T> run_in_place(layer<T> const& p, S const& sharding, caches<T>& states) {
    std::vector<cpx::section> const hidden{{1, p.config.hidden}};
    return assemble<T>(sharding, hidden, [&](cpx::threads& comm) {
        auto const x = take(p.x, hidden, sharding, comm.rank());
        auto y = poisoned<T>(sharding, comm.rank(), x.width());
        cpx::gated_delta_net const net(cpx::carry<How>(sharding, comm.rank()), p.config);
        net(p.view(), x.view(), y.view(), comm, {.state = states[at(comm.rank())].view()});
        return y;
    });
}
template <class T, cpx::any_sharding S>
std::vector<T> run_by_heads(layer<T> const& p, S const& sharding, caches<T>& states) {
    std::vector<cpx::section> const hidden{{1, p.config.hidden}};
    by_heads const mix(sharding.ranks(), p.batch, p.config.sections()),
        back(sharding.ranks(), p.batch, p.config.output_sections());
    return assemble<T>(sharding, hidden, [&](cpx::threads& comm) {
        auto const x = take(p.x, hidden, sharding, comm.rank());
        auto y = poisoned<T>(sharding, comm.rank(), x.width());
        int const rank = comm.rank();
        cpx::gated_delta_net const net(cpx::carry<cpx::serial>(mix, rank), relayout(sharding, mix, rank),
                                       relayout(back, sharding, rank), p.config);
        net(p.view(), x.view(), y.view(), comm, {.state = states[at(comm.rank())].view()});
        return y;
    });
}

/// Hands states over into poisoned ones. Before that, all states that `from` did not write are poisoned, too.
template <class T, cpx::any_sharding From, cpx::any_sharding To>
caches<T> hand_over(config_type const& config, From const& from, To const& to, caches<T>& states) {
    poison_states(states, [&](int rank, index_t s) { return holds_last(from, rank, s); });
    auto next = zeros<T>(config, to);
    poison_states(next, [](int, index_t) { return false; });
    cpx::threads::run(from.ranks(), [&](cpx::threads& comm) {
        cpx::gated_delta_net_relayout const relayout(on(from, comm.rank()), on(to, comm.rank()), config);
        relayout(states[at(comm.rank())].view(), next[at(comm.rank())].view(), comm);
    });
    return next;
}

/// Returns the layer over tokens `[first_s, last_s)` of each sequence s.
template <class T>
layer<T> tokens(layer<T> const& p, lists const& first, lists const& last) {
    lists counts;
    layer<T> some = p;
    some.x.clear();
    for (index_t s = 0; s < p.batch.sequences(); ++s) {
        index_t const from = p.batch.offset(s);
        auto const x = slice(p.x, p.config.hidden, from + first[at(s)], from + last[at(s)]);
        some.x.insert(some.x.end(), x.begin(), x.end());
        counts.push_back(last[at(s)] - first[at(s)]);
    }
    some.batch = lengths(counts);
    return some;
}
/// Puts rows of tokens `[first_s, last_s)` to their places among those of whole sequences.
template <class T>
void put(std::vector<T>& whole, layer<T> const& p, lists const& first, lists const& last, std::vector<T> const& y) {
    auto next = y.begin();
    for (index_t s = 0; s < p.batch.sequences(); ++s) {
        index_t const count = (last[at(s)] - first[at(s)]) * p.config.hidden;
        std::copy_n(next, count, whole.begin() + (p.batch.offset(s) + first[at(s)]) * p.config.hidden);
        next += count;
    }
}
template <class T>
lists all_tokens(layer<T> const& p) {
    lists list;
    for (index_t s = 0; s < p.batch.sequences(); ++s) list.push_back(p.batch.length(s));
    return list;
}

template <class T>
struct outcome {
    std::vector<T> y, states; ///< of all tokens; after the last one
};

enum class prefill { in_place_scan, in_place_serial, heads };
enum class decoding { heads, heads_of_a_table, on_one_rank, on_a_table, everywhere };
constexpr prefill prefills[] = {prefill::in_place_scan, prefill::in_place_serial, prefill::heads};
constexpr decoding decodings[] = {decoding::heads, decoding::heads_of_a_table, decoding::on_one_rank,
                                  decoding::on_a_table, decoding::everywhere};

/// Decodes from tokens `done` on until no sequence has one left; those without are of length 0 in later steps.
template <class T, cpx::any_sharding To, class Step>
outcome<T> decode(layer<T> const& p, lists done, std::vector<T> y, To const& to, caches<T> states, Step&& step) {
    lists const all = all_tokens(p);
    while (done != all) {
        lists next = done;
        for (std::size_t s = 0; s < next.size(); ++s) next[s] = std::min(next[s] + 1, all[s]);
        put(y, p, done, next, step(tokens(p, done, next), states));
        done = next;
    }
    return {y, whole_states(p.config, to, states, [&](int rank, index_t s) { return holds_last(to, rank, s); })};
}

/// Decodes from the states that `from` left.
template <class T, cpx::any_sharding From>
outcome<T> go_on(layer<T> const& p, lists const& done, std::vector<T> const& y, From const& from, caches<T>& states,
                 decoding how) {
    int const ranks = from.ranks();
    cpx::thd const one = cpx::thd::uniform(p.batch.sequences(), 1);
    support::splitmix numbers(at(p.batch.tokens() + ranks));
    auto owners = support::random_owners(numbers, ranks, static_cast<int>(one.sequences()));
    if (how == decoding::on_one_rank) std::fill(owners.begin(), owners.end(), ranks / 2);
    auto const run = [&](auto const& to, auto&& step) {
        return decode(p, done, y, to, hand_over(p.config, from, to, states), step);
    };
    auto const everywhere = [&](cpx::thd const& batch) { return cpx::replicated<>(ranks, batch); };
    by_heads const heads(ranks, one, p.config.sections());
    switch (how) {
    case decoding::heads:
        return run(heads, [&](auto const& q, auto& now) { return run_by_heads(q, everywhere(q.batch), now); });
    case decoding::heads_of_a_table:
        return run(heads,
                   [&](auto const& q, auto& now) { return run_by_heads(q, on_owners(q.batch, ranks, owners), now); });
    case decoding::everywhere:
        return run(everywhere(one),
                   [&](auto const& q, auto& now) { return run_in_place<cpx::scan>(q, everywhere(q.batch), now); });
    default:
        return run(on_owners(one, ranks, owners), [&](auto const& q, auto& now) {
            return run_in_place<cpx::scan>(q, on_owners(q.batch, ranks, owners), now);
        });
    }
}

/// Computes the first `prompt_s` tokens of each sequence on `sharding` at once, the others one by one.
template <class T, cpx::any_sharding S>
outcome<T> generate(layer<T> const& p, lists const& prompt, S const& sharding, prefill first, decoding then) {
    lists const none(prompt.size());
    auto const q = tokens(p, none, prompt);
    std::vector<T> y(at(p.batch.tokens() * p.config.hidden), poison<T>());
    if (first == prefill::heads) {
        by_heads const mix(sharding.ranks(), q.batch, p.config.sections());
        auto states = zeros<T>(p.config, mix);
        put(y, p, none, prompt, run_by_heads(q, sharding, states));
        return go_on(p, prompt, y, mix, states, then);
    }
    auto states = zeros<T>(p.config, sharding);
    poison_unread(states, p.config, sharding);
    put(y, p, none, prompt,
        first == prefill::in_place_scan ? run_in_place<cpx::scan>(q, sharding, states)
                                        : run_in_place<cpx::serial>(q, sharding, states));
    return go_on(p, prompt, y, sharding, states, then);
}

/// Everything at once on one rank; what comes before the convolution and the outputs are those of plain formulas.
outcome<double> expected(layer<double> const& p) {
    auto const one = one_rank(p.batch);
    auto states = zeros<double>(p.config, one);
    run_in_place<cpx::serial>(p, one, states);
    outcome<double> result{reference::run(p), whole_states(p.config, one, states, [](int, index_t) { return true; })};
    auto const qkv = reference::linear(p.x, p.weights[0], p.config.hidden);
    index_t const taps = p.config.kernel, channels = width(conv_sections(p.config)) / taps;
    for (index_t s = 0; s < p.batch.sequences(); ++s)
        for (index_t tap = 0; tap < taps; ++tap)
            for (index_t c = 0; c < channels; ++c) {
                index_t const row = p.batch.offset(s + 1) - taps + tap;
                double const newest = row >= p.batch.offset(s) ? qkv[at(row * channels + c)] : 0;
                double& state = result.states[at(s * state_width(p.config) + tap * channels + c)];
                CHECK(std::abs(state - newest) <= 1e-14 * static_cast<double>(p.config.hidden));
                state = newest;
            }
    return result;
}

template <class T>
constexpr double tolerance = sizeof(T) == 8 ? 1e-12 : 1e-5;

/// Whole lengths and how many tokens of each are there at first.
struct conversation {
    lists whole, prompt;
};
std::vector<conversation> const conversations = {
    {{21, 6, 13, 8}, {16, 1, 8, 3}},                         // five tokens more of each
    {{9, 0, 1, 1, 17, 2, 5, 33}, {8, 0, 0, 1, 5, 0, 5, 31}}, // nothing before, nothing after, one token
    {{4, 3, 6}, {0, 0, 0}},                                  // no prefill
    {{7}, {3}},
    {{}, {}},
    {{0, 0}, {0, 0}},
    {{3, 18}, {3, 18}} // no decoding
};

conversation random_conversation(support::splitmix& numbers) {
    conversation c;
    auto const batch = random_batch(numbers, 6);
    for (index_t s = 0; s < batch.sequences(); ++s) {
        index_t const n = batch.length(s) % 40, places[] = {0, n, n - (n > 0), std::max<index_t>(0, n - 4), n / 2};
        c.whole.push_back(n);
        c.prompt.push_back(places[numbers.next() % std::size(places)]);
    }
    return c;
}

} // namespace

TEST_SUITE("ops") {
    using cpx::index_t;

    TEST_CASE_TEMPLATE("decoding a token at a time after any prefill is the layer over whole sequences", T, float,
                       double) {
        support::splitmix numbers(11);
        auto all = conversations;
        for (int i = 0; i < 6; ++i) all.push_back(random_conversation(numbers));
        std::size_t turn = 0, round = 0;
        for (auto const& config : {grouped, uneven, pointwise})
            for (auto const& [whole, given_prompt] : all) {
                auto const& prompt = given_prompt;
                auto const p = random_layer<T>(lengths(whole), config, round % 2 == 0, round + 1);
                auto const want = expected(p.template as<double>());
                CAPTURE(support::text(p.batch));
                CAPTURE(support::text(lengths(prompt)));
                for_each_sharding(lengths(prompt), rank_counts[round++ % std::size(rank_counts)], {1},
                                  [&](std::string const& name, auto const& sharding) {
                                      CAPTURE(name);
                                      auto const first = prefills[turn % std::size(prefills)];
                                      auto const then = decodings[turn++ % std::size(decodings)];
                                      CAPTURE(static_cast<int>(first));
                                      CAPTURE(static_cast<int>(then));
                                      auto const got = generate(p, prompt, sharding, first, then);
                                      CHECK(relative_error(got.y, want.y) <= tolerance<T>);
                                      CHECK(relative_error(got.states, want.states) <= tolerance<T>);
                                  });
            }
    }

    TEST_CASE_TEMPLATE("32 tokens decoded after any prefill are the layer over whole sequences, on every sharding", T,
                       float, double) {
        lists const whole{49, 0, 38, 1, 33, 32}, prompt{17, 0, 6, 1, 1, 0};
        auto const p = random_layer<T>(lengths(whole), grouped, true, 7);
        auto const want = expected(p.template as<double>());
        std::size_t turn = 0;
        for (int const ranks : rank_counts)
            for_each_sharding(lengths(prompt), ranks, {1}, [&](std::string const& name, auto const& sharding) {
                CAPTURE(name);
                auto const first = prefills[turn % std::size(prefills)];
                auto const then = decodings[turn++ % std::size(decodings)];
                CAPTURE(static_cast<int>(first));
                CAPTURE(static_cast<int>(then));
                auto const got = generate(p, prompt, sharding, first, then);
                CHECK(relative_error(got.y, want.y) <= tolerance<T>);
                CHECK(relative_error(got.states, want.states) <= tolerance<T>);
            });
    }

    TEST_CASE_TEMPLATE("every prefill goes with every decoding", T, float, double) {
        auto const& [whole, prompt] = conversations[1];
        auto const p = random_layer<T>(lengths(whole), uneven, true, 3);
        auto const want = expected(p.template as<double>());
        by_tokens const zigzag = cpx::shard(lengths(prompt), cpx::zigzag<3>{}, cpx::aligned<2>{});
        for (auto const first : prefills)
            for (auto const then : decodings) {
                CAPTURE(static_cast<int>(first));
                CAPTURE(static_cast<int>(then));
                auto const got = generate(p, prompt, zigzag, first, then);
                CHECK(relative_error(got.y, want.y) <= tolerance<T>);
                CHECK(relative_error(got.states, want.states) <= tolerance<T>);
            }
    }

    TEST_CASE_TEMPLATE("a prefill in several calls is the prefill in one, on any shardings", T, float, double) {
        support::splitmix numbers(5);
        std::size_t turn = 0;
        for (auto const& config : {grouped, uneven, pointwise})
            for (int i = 0; i < 4; ++i) {
                auto const p = random_layer<T>(random_batch(numbers, 5), config, true, turn);
                auto const want = expected(p.template as<double>());
                lists const none(at(p.batch.sequences())), all = all_tokens(p);
                lists some;
                for (index_t const n : all) some.push_back(numbers.between(0, n));
                auto const head = tokens(p, none, some), tail = tokens(p, some, all);
                CAPTURE(support::text(head.batch));
                CAPTURE(support::text(tail.batch));
                auto const check = [&](std::vector<T> const& first, std::vector<T> const& then, auto const& last,
                                       caches<T>& states) {
                    std::vector<T> y(at(p.batch.tokens() * config.hidden), poison<T>());
                    put(y, p, none, some, first);
                    put(y, p, some, all, then);
                    auto const end = whole_states(config, last, states,
                                                  [&](int rank, index_t s) { return holds_last(last, rank, s); });
                    CHECK(relative_error(y, want.y) <= tolerance<T>);
                    CHECK(relative_error(end, want.states) <= tolerance<T>);
                };
                auto const one = one_rank(head.batch), then_one = one_rank(tail.batch); // nothing to hand over
                auto states = zeros<T>(config, one);
                auto const first = run_in_place<cpx::scan>(head, one, states);
                auto const second = run_in_place<cpx::serial>(tail, then_one, states);
                check(first, second, then_one, states);

                int const ranks = rank_counts[turn++ % std::size(rank_counts)];
                by_tokens const before = cpx::shard(head.batch, cpx::zigzag<>(ranks));
                for_each_sharding(tail.batch, ranks, {1}, [&](std::string const& name, auto const& after) {
                    CAPTURE(name);
                    auto from = zeros<T>(config, before);
                    auto const y = run_in_place<cpx::scan>(head, before, from);
                    auto to = hand_over(config, before, cpx::replicated<>(ranks, tail.batch), from);
                    poison_unread(to, config, after);
                    auto const in_place = run_in_place<cpx::scan>(tail, after, to);
                    check(y, in_place, after, to);
                    by_heads const mix(ranks, tail.batch, config.sections());
                    auto heads = hand_over(config, before, mix, from);
                    auto const on_heads = run_by_heads(tail, after, heads);
                    check(y, on_heads, mix, heads);
                });
            }
    }

    TEST_CASE_TEMPLATE("states arrive bit for bit and nobody else's are read or written", T, float, double) {
        support::splitmix numbers(2);
        std::size_t turn = 0;
        for (auto const& config : {grouped, uneven, pointwise})
            for (int i = 0; i < 6; ++i, ++turn) {
                cpx::thd const batch = i ? random_batch(numbers, 9) : cpx::thd();
                index_t const n = batch.sequences(), wide = state_width(config);
                int const ranks = rank_counts[turn % std::size(rank_counts)];
                auto whole = uniform<T>(numbers, n * wide);
                if (!whole.empty()) whole[whole.size() / 2] = std::copysign(poison<T>(), T{-1});
                auto const owners = support::random_owners(numbers, ranks, static_cast<int>(n));
                cpx::thd const one = cpx::thd::uniform(n, 1);

                auto const check = [&](auto const& from, auto const& to) {
                    auto states = zeros<T>(config, from);
                    for (int rank = 0; rank < ranks; ++rank)
                        for (index_t s = 0; s < n; ++s)
                            for_each_place(config, from, rank, s, states[at(rank)].view(),
                                           [&](T& value, std::size_t at_whole) { value = whole[at_whole]; });
                    auto next = hand_over(config, from, to, states);
                    for (int rank = 0; rank < ranks; ++rank)
                        for (index_t s = 0; s < n; ++s) {
                            bool const held = holds_last(to, rank, s), every = to.every_row;
                            index_t wrong = 0;
                            for_each_place(config, to, rank, s, next[at(rank)].view(), [&](T value, std::size_t w) {
                                wrong += !same_bits(value, held || every ? whole[w] : poison<T>());
                            });
                            CHECK(wrong == 0);
                        }
                };
                auto const from_anywhere = [&](auto const& from) {
                    check(from, on_owners(one, ranks, owners));
                    check(from, by_heads(ranks, one, config.sections()));
                    check(from, cpx::replicated<>(ranks, one));
                };
                for_each_sharding(batch, ranks, {1, 3}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    from_anywhere(sharding);
                });
                from_anywhere(by_heads(ranks, batch, config.sections()));
                from_anywhere(cpx::replicated<>(ranks, batch));
            }
    }

    TEST_CASE("a sequence ends where its last token lies, and what stays or nobody lacks is not sent") {
        support::splitmix numbers(3);
        for (int const ranks : rank_counts)
            for (int i = 0; i < 12; ++i) {
                cpx::thd const batch = i ? random_batch(numbers, 12) : cpx::thd();
                index_t const n = batch.sequences();
                auto const owners = support::random_owners(numbers, ranks, static_cast<int>(n));
                auto const table = on_owners(cpx::thd::uniform(n, 1), ranks, owners);
                for_each_sharding(batch, ranks, {1, 4}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    auto const ends = cpx::sequence_ends(sharding);
                    CHECK(ends.batch() == cpx::thd::uniform(n, 1));
                    CHECK(ends.ranks() == ranks);
                    index_t sent = 0, moved = 0;
                    for (int rank = 0; rank < ranks; ++rank) {
                        lists want, got;
                        for (index_t s = 0; s < n; ++s) {
                            bool const here = holds_last(sharding, rank, s);
                            if (here) want.push_back(s);
                            moved += here && owners[at(s)] != rank;
                        }
                        ends.for_each_piece(rank, [&](cpx::range piece) {
                            for (index_t s = piece.first; s < piece.last; ++s) got.push_back(s);
                        });
                        CHECK(got == want);
                        CHECK(cpx::gated_delta_net_relayout(on(sharding, rank), on(ends, rank), grouped)
                                  .moves()
                                  .messages() == 0);
                        sent += cpx::gated_delta_net_relayout(on(sharding, rank), on(table, rank), grouped)
                                    .moves()
                                    .sent_elements(state_width(grouped));
                    }
                    CHECK(sent == moved * state_width(grouped));
                });
                index_t heads = 0, shares = 0;
                for (int rank = 0; rank < ranks; ++rank) {
                    by_heads const mix(ranks, batch, uneven.sections());
                    by_heads const next(ranks, cpx::thd::uniform(n, 1), uneven.sections());
                    cpx::gated_delta_net_relayout const there(on(table, rank), on(mix, rank), uneven);
                    cpx::gated_delta_net_relayout const same(on(mix, rank), on(next, rank), uneven);
                    heads += there.moves().sent_elements(0);
                    CHECK(same.moves().messages() == 0);
                    auto const held = std::ssize(columns(mix, rank, conv_sections(uneven))) +
                                      std::ssize(columns(mix, rank, recurrent_sections(uneven)));
                    for (int const owner : owners) shares += owner != rank ? held : 0;
                }
                CHECK(heads == shares);
            }
    }

    TEST_CASE("states may be handed over in place, and those that a rank does not take stay") {
        auto const batch = lengths({5, 0, 3, 1});
        auto const from = cpx::shard(batch, cpx::sequential<3>{});
        auto const to = on_owners(cpx::thd::uniform(4, 1), 3, {1, 1, 2, 2});
        auto states = zeros<double>(grouped, from);
        auto const value = [](int rank, index_t s) { return 10.0 * rank + static_cast<double>(s); };
        for (int rank = 0; rank < 3; ++rank) {
            auto const state = states[at(rank)].view();
            for (index_t s = 0; s < 4; ++s) {
                std::fill_n(state.conv.row(s), state.conv.width(), value(rank, s));
                std::fill_n(state.recurrent.row(s), state.recurrent.width(), value(rank, s));
            }
        }
        cpx::threads::run(3, [&](cpx::threads& comm) {
            auto const own = states[at(comm.rank())].view();
            int const rank = comm.rank();
            cpx::gated_delta_net_relayout(on(from, rank), on(to, rank), grouped)(own, own, comm);
        });
        for (int rank = 0; rank < 3; ++rank)
            for (index_t s = 0; s < 4; ++s) {
                int home = rank;
                for (int other = 0; other < 3 && holds_last(to, rank, s); ++other)
                    if (holds_last(from, other, s)) home = other;
                auto const state = states[at(rank)].view();
                CHECK(state.conv(s, 0) == value(home, s));
                CHECK(state.recurrent(s, state.recurrent.width() - 1) == value(home, s));
            }
    }

    TEST_CASE("another sequence changes no bit of what is decoded, not even by NaN") {
        lists const whole{12, 9, 1, 7}, prompt{7, 5, 0, 4};
        auto const p = random_layer<double>(lengths(whole), grouped, true, 4);
        index_t const hidden = grouped.hidden, wide = state_width(grouped);
        by_tokens const zigzag = cpx::shard<cpx::scope::batch>(lengths(prompt), cpx::zigzag<3>{});
        for (auto const first : prefills)
            for (auto const then : decodings) {
                CAPTURE(static_cast<int>(first));
                CAPTURE(static_cast<int>(then));
                auto const before = generate(p, prompt, zigzag, first, then);
                for (double const change : {1e-3, std::numeric_limits<double>::quiet_NaN()})
                    for (index_t const s : {0, 1}) {
                        auto other = p;
                        for (index_t i = p.batch.offset(s) * hidden; i < p.batch.offset(s + 1) * hidden; ++i)
                            other.x[at(i)] += change;
                        auto const after = generate(other, prompt, zigzag, first, then);
                        index_t const begin = p.batch.offset(s), end = p.batch.offset(s + 1);
                        CHECK(same_rows(after.y, before.y, hidden, 0, begin));
                        CHECK_FALSE(same_rows(after.y, before.y, hidden, end - 1, end));
                        CHECK(same_rows(after.y, before.y, hidden, end, p.batch.tokens()));
                        CHECK(same_rows(after.states, before.states, wide, 0, s));
                        CHECK_FALSE(same_rows(after.states, before.states, wide, s, s + 1));
                        CHECK(same_rows(after.states, before.states, wide, s + 1, 4));
                    }
            }
    }

    TEST_CASE("decoding rejects what does not fit") {
        auto const batch = lengths({3, 5});
        by_tokens const from = cpx::shard(batch, cpx::zigzag<>(1));
        auto const one = cpx::thd::uniform(2, 1);
        by_heads const to(1, one, grouped.sections());
        std::string const name = "gated_delta_net_relayout: ";
        using support::rejects;
        auto const make = [&](auto const& a, auto const& b, int rank) {
            return [=] { cpx::gated_delta_net_relayout(on(a, rank), on(b, rank), grouped); };
        };
        CHECK(support::message(make(from, to, 0)) == "");
        rejects({"decode.cpp", name + "sequences of the target: expected 2, got 3"},
                make(from, by_heads(1, cpx::thd::uniform(3, 1), grouped.sections()), 0));
        rejects({"decode.cpp", name + "sections of a sharding by heads: expected those of the layer, got others"},
                make(from, by_heads(1, one, uneven.sections()), 0));
        rejects({"decode.cpp", name + "sections of a sharding by heads: expected those of the layer, got others"},
                make(by_heads(1, batch, uneven.sections()), to, 0));
        rejects({"decode.cpp", name + "tokens of sequence 1 in the target: expected at most 1, or a sharding of whole "
                                      "sequences, such as replicated, got 2"},
                make(from, by_tokens(cpx::shard(lengths({1, 2}), cpx::zigzag<>(1))), 0));
        rejects({"decode.cpp", "relayout: ranks of the target: expected 1, got 2"},
                make(from, by_heads(2, one, grouped.sections()), 0));
        by_tokens const two = cpx::shard(batch, cpx::zigzag<>(2));
        rejects({"decode.cpp", name + "rank of the target: expected 0, got 1"}, [&] {
            cpx::gated_delta_net_relayout(on(two, 0), on(by_heads(2, one, grouped.sections()), 1), grouped);
        });
        for (int const rank : {-1, 1})
            rejects({"decode.cpp", "rank: expected 0 to 0, got " + std::to_string(rank)}, make(from, to, rank));

        std::vector<float> values(2 * 160 + 2 * 96);
        cpx::gated_delta_net_state<float> const right{{values.data(), 2, 160}, {values.data() + 320, 2, 96}};
        auto const call = [&](cpx::gated_delta_net_state<float> const& a, cpx::gated_delta_net_state<float> const& b,
                              int ranks) {
            return [=] {
                cpx::threads::run(ranks, [&](cpx::threads& comm) {
                    cpx::gated_delta_net_relayout(on(from, 0), on(to, 0), grouped)(a, b, comm);
                });
            };
        };
        CHECK(support::message(call(right, right, 1)) == "");
        auto const with = [&](cpx::rows<float> conv, cpx::rows<float> recurrent) {
            cpx::gated_delta_net_state<float> state = right;
            if (conv.data()) state.conv = conv;
            if (recurrent.data()) state.recurrent = recurrent;
            return state;
        };
        auto const bad_conv = with({values.data(), 2, 159}, {}), bad_recurrent = with({}, {values.data() + 320, 1, 96});
        rejects({"decode.cpp", name + "shape of states of the source, conv: expected (2, 160), got (2, 159)"},
                call(bad_conv, right, 1));
        rejects({"decode.cpp", name + "shape of states of the source, recurrent: expected (2, 96), got (1, 96)"},
                call(bad_recurrent, right, 1));
        rejects({"decode.cpp", name + "shape of states of the target, conv: expected (2, 160), got (2, 159)"},
                call(right, bad_conv, 1));
        rejects({"decode.cpp", name + "shape of states of the target, recurrent: expected (2, 96), got (1, 96)"},
                call(right, bad_recurrent, 1));
        rejects({"decode.cpp", name + "shape of states of the source, conv: expected (2, 160), got (0, 0)"},
                call({{}, right.recurrent}, right, 1));
        rejects({"decode.cpp", name + "overlap of conv and recurrent: expected none, got some"},
                call(right, with({}, {values.data() + 300, 2, 96}), 1));
        rejects({"decode.cpp", "gated_delta_net_relayout: rank of the plan: expected ",
                 " of 2, got 0 of 1"}, // of the rank that is first
                call(right, right, 2));

        auto const p = random_layer<float>(one, grouped, false, 1);
        by_tokens const tokens_of = cpx::shard(one, cpx::zigzag<>(1));
        std::vector<float> rows(2 * 12);
        auto const step = [&](cpx::gated_delta_net_state<float> const& state) {
            return [=, &rows] {
                cpx::sharded const x(cpx::rows<float>(rows, 12), tokens_of, 0);
                cpx::threads::run(1, [&](cpx::threads& comm) {
                    cpx::gated_delta_net const net(cpx::carry<cpx::scan>(tokens_of, 0), grouped);
                    net(p.view(), x, x, comm, {.state = state});
                });
            };
        };
        CHECK(support::message(step(right)) == "");
        rejects({"decode.cpp", "gated_delta_net: shape of conv state: expected (2, 160), got (2, 159)"},
                step(bad_conv));
        rejects({"decode.cpp", "gated_delta_net: shape of recurrent state: expected (2, 96), got (1, 96)"},
                step(bad_recurrent));
        rejects({"gated_delta_net: sharding of a layer that runs in place: expected whole rows; by heads is what the "
                 "recurrence runs on, got heads"},
                [&] { cpx::gated_delta_net(cpx::carry<cpx::scan>(to, 0), grouped); });
    }
}
