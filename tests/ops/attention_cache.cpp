// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/attention_cache.hpp>

#include <doctest/doctest.h>

#include <cpx/ops/decode.hpp>

#include <ops/attention.hpp>
#include <ops/reference.hpp>
#include <support/rejects.hpp>

namespace {

using namespace on_ranks;
using cpx::index_t;
using reference::random_attention;
using support::lengths;
using lists = std::vector<index_t>;
using by_heads = cpx::head_sharded<>;

std::size_t at(index_t i) { return static_cast<std::size_t>(i); }

/// Calls `f(row among all, row among these)` for tokens `[first_s, last_s)` of each sequence s.
template <class F>
void each_token(cpx::thd const& batch, lists const& first, lists const& last, F&& f) {
    index_t row = 0;
    for (index_t s = 0; s < batch.sequences(); ++s)
        for (index_t t = first[at(s)]; t < last[at(s)]; ++t) f(batch.offset(s) + t, row++);
}
cpx::thd batch_of(lists const& first, lists const& last) {
    lists counts;
    for (std::size_t s = 0; s < first.size(); ++s) counts.push_back(last[s] - first[s]);
    return lengths(counts);
}
template <class T>
std::vector<T> some(std::vector<T> const& whole, index_t width, cpx::thd const& batch, lists const& first,
                    lists const& last) {
    std::vector<T> rows;
    each_token(batch, first, last, [&](index_t from, index_t) {
        rows.insert(rows.end(), whole.begin() + from * width, whole.begin() + (from + 1) * width);
    });
    return rows;
}
template <class T>
void put(std::vector<T>& whole, index_t width, cpx::thd const& batch, lists const& first, lists const& last,
         std::vector<T> const& rows) {
    each_token(batch, first, last, [&](index_t to, index_t row) {
        std::copy_n(rows.begin() + row * width, width, whole.begin() + to * width);
    });
}
lists all_tokens(cpx::thd const& batch) {
    lists list;
    for (index_t s = 0; s < batch.sequences(); ++s) list.push_back(batch.length(s));
    return list;
}

template <class T>
using caches = std::vector<cpx::attention_cache<T>>;

template <class T, cpx::any_sharding S>
caches<T> empty_caches(cpx::attention_heads const& heads, S const& sharding) {
    caches<T> list;
    cpx::threads::group ranks(sharding.ranks());
    for (int rank = 0; rank < sharding.ranks(); ++rank) list.emplace_back(heads, sharding, ranks.at(rank));
    return list;
}

/// Queries on `sharding`, keys and values, appended before, on `kept`.
template <class T, cpx::any_sharding Q, cpx::any_sharding K>
std::vector<T> step(reference::attention<T> const& p, Q const& sharding, K const& kept, caches<T>& caches) {
    return assemble<T>(sharding, {p.queries()}, [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto& cache = caches[at(rank)];
        cache.append(take(p.k, {p.keys()}, kept, rank), take(p.v, {p.keys()}, kept, rank));
        auto const q = take(p.q, {p.queries()}, sharding, rank);
        auto o = poisoned<T>(sharding, rank, q.width());
        cpx::cached_attention(sharding, comm)(cache, q, p.scale, o, comm);
        return o;
    });
}

/// Returns the problem of tokens `[first_s, last_s)` of each sequence s.
template <class T>
reference::attention<T> tokens(reference::attention<T> const& p, lists const& first, lists const& last) {
    auto const of = [&](auto const& x, cpx::section const& s) {
        return some(x, s.heads * s.width, p.batch, first, last);
    };
    return {batch_of(first, last), p.heads, p.scale, of(p.q, p.queries()), of(p.k, p.keys()), of(p.v, p.keys())};
}

/// Computes the first `prompt_s` tokens of each sequence at once, the others one by one: `run(tokens)` each.
template <class T, class F>
std::vector<T> converse(reference::attention<T> const& p, lists const& prompt, F&& run) {
    std::vector<T> o(p.q.size(), poison<T>());
    lists const all = all_tokens(p.batch);
    lists done(prompt.size()), next = prompt;
    for (bool first = true; first || done != all; first = false) {
        put(o, p.width(), p.batch, done, next, run(tokens(p, done, next), first));
        done = next;
        for (std::size_t s = 0; s < next.size(); ++s) next[s] = std::min(next[s] + 1, all[s]);
    }
    return o;
}

enum class queries_on { owners, one_rank, everywhere };

template <class T>
constexpr double tolerance = 200 * std::numeric_limits<T>::epsilon(); // as of attention itself

/// A gated delta net, and attention of what it gives, each added to what it reads.
template <class T>
struct hybrid {
    reference::layer<T> net;
    cpx::attention_heads heads;
    std::vector<T> in, out; ///< (q, k and v; hidden), (hidden, q)

    index_t hidden() const { return net.config.hidden; }
    index_t query_width() const { return heads.query_heads * heads.dim; }
    index_t key_width() const { return heads.key_heads * heads.dim; }
};

/// Both layers over a batch in which sequences go on. `states`, `caches`: one a rank.
template <class T, cpx::any_sharding S>
std::vector<T> step(hybrid<T> const& p, S const& sharding, std::vector<cpx::gated_delta_net_cache<T>>& states,
                    caches<T>& caches) {
    std::vector<cpx::section> const hidden{{1, p.hidden()}};
    return assemble<T>(sharding, hidden, [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto& cache = caches[at(rank)];
        auto h = take(p.net.x, hidden, sharding, rank), y = h;
        cpx::gated_delta_net const net(cpx::carry<cpx::scan>(sharding, rank), p.net.config);
        net(p.net.view(), std::as_const(h).view(), y.view(), comm, {.state = states[at(rank)].view()});
        auto const add = [&] {
            for (index_t i = 0; i < h.data().count() * p.hidden(); ++i) h.data().data()[i] += y.data().data()[i];
        };
        add();
        index_t const q_width = p.query_width(), k_width = p.key_width();
        cpx::tensor<T, S> qkv(sharding, rank, q_width + 2 * k_width), o(sharding, rank, q_width);
        cpx::linear<T>(h.data(), cpx::rows<T const>(p.in, p.hidden()), qkv.data());
        auto const q = qkv.columns(0, q_width), k = qkv.columns(q_width, k_width),
                   v = qkv.columns(q_width + k_width, k_width);
        std::vector<index_t> positions; // go on from those of earlier batches
        for (cpx::segment const& s : cpx::segments(sharding, rank))
            for (index_t i = 0; i < s.count; ++i) positions.push_back(cache.length(s.sequence) + s.token + i);
        for (auto const& x : {q, k})
            cpx::rotary<T>(x.data(), p.heads.dim, positions, {.rotary_dim = p.heads.dim}, x.data());
        cache.append(k, v);
        cpx::cached_attention(sharding, comm)(cache, q, 0.5, o, comm);
        cpx::linear<T>(std::as_const(o).data(), cpx::rows<T const>(p.out, q_width), y.data());
        add();
        return h;
    });
}

} // namespace

TEST_SUITE("ops") {
    using cpx::index_t;

    TEST_CASE_TEMPLATE("32 tokens decoded after any prefill have the attention of whole sequences", T, float, double) {
        std::size_t turn = 0;
        for (auto const& [whole, given_prompt] : {std::pair(lists{49, 0, 38, 1, 33, 32}, lists{17, 0, 6, 1, 1, 0}),
                                                  std::pair(lists{3, 5}, lists{0, 0}), std::pair(lists{}, lists{})}) {
            auto const& prompt = given_prompt;
            auto const p = random_attention<T>(lengths(whole), {6, 2, 5}, turn + 1);
            auto const want = reference::run(p);
            auto const one = reference::run_gathered(p, one_rank(p.batch));
            for (int const ranks : rank_counts) {
                CAPTURE(ranks);
                auto const split = [&](cpx::thd const& batch) {
                    return by_heads(ranks, batch, {p.queries(), p.keys(), p.keys()});
                };
                auto const everywhere = [&](cpx::thd const& batch) { return cpx::replicated<>(ranks, batch); };
                support::splitmix numbers(turn);
                auto const owners = support::random_owners(numbers, ranks, static_cast<int>(std::ssize(whole) + 1));
                auto by_head = empty_caches<T>(p.heads, split(p.batch)),
                     replicated = empty_caches<T>(p.heads, everywhere(p.batch)), read_by_head = replicated,
                     read_by_owner = replicated;
                CHECK(same_bits(
                    converse(p, prompt,
                             [&](auto const& q, bool) { return step(q, split(q.batch), split(q.batch), by_head); }),
                    one));
                CHECK(same_bits(converse(p, prompt,
                                         [&](auto const& q, bool) {
                                             return step(q, split(q.batch), everywhere(q.batch), read_by_head);
                                         }),
                                one));
                CHECK(same_bits(converse(p, prompt,
                                         [&](auto const& q, bool) {
                                             auto const all = everywhere(q.batch);
                                             return step(q, all, all, replicated);
                                         }),
                                one));
                for_each_sharding(lengths(prompt), ranks, {1}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    auto const how = static_cast<queries_on>(turn++ % 3);
                    CAPTURE(static_cast<int>(how));
                    auto caches = empty_caches<T>(p.heads, sharding);
                    auto const got = converse(p, prompt, [&](auto const& q, bool first) {
                        if (first) return step(q, sharding, sharding, caches);
                        auto const kept = on_owners(q.batch, ranks, owners);
                        if (how == queries_on::owners) return step(q, kept, kept, caches);
                        if (how == queries_on::everywhere) return step(q, everywhere(q.batch), kept, caches);
                        return step(q, on_owners(q.batch, ranks, std::vector<int>(owners.size(), ranks / 2)), kept,
                                    caches);
                    });
                    CHECK(relative_error(got, want) <= tolerance<T>);
                });
                CHECK(same_bits(converse(p, prompt,
                                         [&](auto const& q, bool first) {
                                             auto const all = everywhere(q.batch);
                                             return first ? step(q, all, all, read_by_owner)
                                                          : step(q, on_owners(q.batch, ranks, owners), all,
                                                                 read_by_owner);
                                         }),
                                one));
            }
        }
    }

    TEST_CASE_TEMPLATE("a hybrid of a gated delta net and attention decodes as it runs over whole sequences", T, float,
                       double) {
        lists const whole{45, 33, 38}, prompt{13, 1, 6};
        hybrid<T> p{
            reference::random_layer<T>(lengths(whole), {12, {2, 4, 4, 6}, 4, 16, 1e-6}, true, 5), {4, 2, 8}, {}, {}};
        support::splitmix numbers(6);
        p.in = uniform<T>(numbers, (p.query_width() + 2 * p.key_width()) * p.hidden(), 0.3);
        p.out = uniform<T>(numbers, p.hidden() * p.query_width(), 0.3);
        auto const start = [&](auto const& sharding) {
            std::vector<cpx::gated_delta_net_cache<T>> states;
            for (int rank = 0; rank < sharding.ranks(); ++rank)
                states.emplace_back(p.net.config, cpx::carry<cpx::scan>(sharding, rank));
            return std::pair(states, empty_caches<T>(p.heads, sharding));
        };
        auto alone = start(one_rank(p.net.batch));
        auto const want = step(p, one_rank(p.net.batch), alone.first, alone.second);
        auto const tokens = [&](lists const& first, lists const& last) {
            hybrid<T> q = p;
            q.net.x = some(p.net.x, p.hidden(), p.net.batch, first, last);
            q.net.batch = batch_of(first, last);
            return q;
        };
        for (int const ranks : rank_counts)
            for_each_sharding(lengths(prompt), ranks, {1}, [&](std::string const& name, auto const& sharding) {
                CAPTURE(name);
                auto now = start(sharding);
                std::vector<T> got(p.net.x.size(), poison<T>());
                put(got, p.hidden(), p.net.batch, {0, 0, 0}, prompt,
                    step(tokens({0, 0, 0}, prompt), sharding, now.first, now.second));
                auto const owners = support::random_owners(numbers, ranks, 3);
                auto const later = on_owners(lengths({1, 1, 1}), ranks, owners);
                auto states = start(later).first;
                cpx::threads::run(ranks, [&](cpx::threads& comm) {
                    cpx::gated_delta_net_relayout const hand_over(cpx::carry<cpx::scan>(sharding, comm.rank()),
                                                                  cpx::carry<cpx::scan>(later, comm.rank()),
                                                                  p.net.config);
                    hand_over(now.first[at(comm.rank())].view(), states[at(comm.rank())].view(), comm);
                });
                for (lists done = prompt, next; done[0] < whole[0]; done = next) {
                    next = {done[0] + 1, done[1] + 1, done[2] + 1};
                    put(got, p.hidden(), p.net.batch, done, next, step(tokens(done, next), later, states, now.second));
                }
                CHECK(relative_error(got, want) <= 10 * tolerance<T>); // a product of both layers' roundings
            });
    }

    TEST_CASE("another sequence, and what has not come yet, changes no bit of what is decoded, not even by NaN") {
        lists const whole{9, 6}, prompt{5, 4};
        auto const p = random_attention<double>(lengths(whole), {4, 2, 4}, 3);
        auto const run = [&](auto const& q) {
            auto const sharding = by_tokens(cpx::shard(lengths(prompt), cpx::zigzag<>(3)));
            auto caches = empty_caches<double>(q.heads, sharding);
            return converse(q, prompt, [&](auto const& now, bool first) {
                auto const on = first ? sharding : on_owners(now.batch, 3, {2, 0});
                return step(now, on, on, caches);
            });
        };
        auto const before = run(p);
        for (index_t const row : {0, 4, 7, 9, 14}) { // of the prompt, its last, decoded; of the other sequence
            CAPTURE(row);
            auto other = p;
            for (auto* x : {&other.k, &other.v})
                for (index_t d = 0; d < 8; ++d) (*x)[at(row * 8 + d)] = std::numeric_limits<double>::quiet_NaN();
            auto const after = run(other);
            index_t const end = p.batch.offset(p.batch.sequence(row) + 1);
            CHECK(same_rows(after, before, p.width(), 0, row));
            CHECK(same_rows(after, before, p.width(), end, p.batch.tokens()));
            for (index_t i = row; i < end; ++i) CHECK(std::isnan(after[at(i * p.width())]));
        }
    }

    TEST_CASE("rows behind the valid length of a sequence are not kept") {
        auto const p = random_attention<double>(lengths({7, 4}), {2, 1, 4}, 4);
        cpx::thd const padded({0, 6, 9}, {4, 0}); // 4 of 6 rows count, none of 3
        reference::attention<double> prompt = tokens(p, {0, 0}, {6, 3});
        prompt.batch = padded;
        for (auto* x : {&prompt.k, &prompt.v})
            for (index_t row = 4; row < 9; ++row)
                for (index_t d = 0; d < 4; ++d) (*x)[at(row * 4 + d)] = std::numeric_limits<double>::quiet_NaN();
        auto const sharding = by_tokens(cpx::shard(padded, cpx::zigzag<>(2)));
        auto caches = empty_caches<double>(p.heads, sharding);
        auto const first = step(prompt, sharding, sharding, caches);
        for (auto const& cache : caches) CHECK((cache.length(0) == 4 && cache.length(1) == 0));
        auto const next = tokens(p, {4, 0}, {5, 1});
        auto const owners = on_owners(next.batch, 2, {1, 0});
        auto const second = step(next, owners, owners, caches);
        auto const want = reference::run(p);
        CHECK(relative_error(slice(first, 8, 0, 4), slice(want, 8, 0, 4)) <= tolerance<double>);
        CHECK(slice(first, 8, 6, 9) == std::vector<double>(24)); // nobody keeps what they see
        CHECK(relative_error(slice(second, 8, 0, 1), slice(want, 8, 4, 5)) <= tolerance<double>);
        CHECK(relative_error(slice(second, 8, 1, 2), slice(want, 8, 7, 8)) <= tolerance<double>);
    }

    TEST_CASE("caches and attention over them reject what does not fit, before anything is kept or written") {
        auto const batch = lengths({6, 5});
        cpx::attention_heads const heads{4, 2, 2};
        by_tokens const zigzag = cpx::shard(batch, cpx::zigzag<>(2));
        auto const rejects = [](char const* where, std::string const& passage, auto const& f) {
            support::rejects({"attention_cache.cpp", std::string(where) + ": " + passage}, f);
        };
        char const *const cache_name = "attention_cache", *const name = "cached_attention";
        cpx::threads::group ranks(2), more(3);
        auto const empty = [&](cpx::attention_heads const& of, auto const& sharding, int rank) {
            return cpx::attention_cache<double>(of, sharding, ranks.at(rank));
        };
        rejects(cache_name, "query heads: expected a multiple of the key heads 3, got 4", [&] {
            empty({4, 3, 2}, zigzag, 0);
        });
        rejects(cache_name, "ranks of the sharding: expected 3, got 2",
                [&] { cpx::attention_cache<double>(heads, zigzag, more.at(0)); });
        rejects(name, "ranks of the sharding: expected 3, got 2", [&] { cpx::cached_attention(zigzag, more.at(0)); });
        auto cache = empty(heads, zigzag, 1);
        rejects(cache_name, "sequence: expected 0 to 1, got 2", [&] { cache.length(2); });
        auto const tensor = [](auto const& sharding, int rank, index_t width) {
            return cpx::make_tensor<double>(sharding, rank, width);
        };
        auto const append = [&](auto const& k, auto const& v) { return [&cache, k, v] { cache.append(k, v); }; };
        auto const k = tensor(zigzag, 1, 4);
        by_tokens const three = cpx::shard(lengths({6, 5, 1}), cpx::zigzag<>(2));
        rejects(cache_name, "sequences: expected 2, got 3", append(tensor(three, 1, 4), tensor(three, 1, 4)));
        rejects(cache_name, "rank of k: expected 1 of 2, got 0 of 2", append(tensor(zigzag, 0, 4), k));
        cpx::replicated<> const everywhere(2, batch);
        rejects(cache_name, "sharding of k: expected one by tokens, got another",
                append(tensor(everywhere, 1, 4), tensor(everywhere, 1, 4)));
        rejects(cache_name, "shape of k: expected (5, 4), got (5, 8)", append(tensor(zigzag, 1, 8), k));
        rejects(cache_name, "shape of v: expected (5, 4), got (5, 2)", append(k, tensor(zigzag, 1, 2)));
        by_tokens const other = cpx::shard(lengths({5, 6}), cpx::zigzag<>(2));
        rejects(cache_name, "sharding of v: expected that of k, got another", append(k, tensor(other, 1, 4)));
        by_heads const split(2, batch, {{4, 2}, {2, 2}, {2, 2}});
        auto of_heads = empty(heads, split, 1);
        rejects(cache_name, "sharding of k: expected every token, of the heads of this cache, got another",
                [&] { of_heads.append(tensor(everywhere, 1, 4), tensor(everywhere, 1, 4)); });
        CHECK((cache.length(0) == 0 && cache.length(1) == 0));

        auto const attend = [&](auto const& sharding, auto const& of, int rank, index_t width, index_t o_width) {
            return [=, &ranks] {
                cpx::threads::run(1, [&](cpx::threads& comm) { // refused before it is asked
                    auto o = tensor(sharding, rank, o_width);
                    cpx::cached_attention const plan(sharding, ranks.at(1));
                    plan(of, tensor(sharding, rank, width), 1., o, comm);
                });
            };
        };
        rejects(name, "batch of q: expected that appended last, offset 1: 0, got 6", attend(zigzag, cache, 1, 8, 8));
        cache.append(k, k);
        rejects(name, "batch of q: expected that appended last, offset 1: 6, got 5", attend(other, cache, 1, 8, 8));
        rejects(name, "rank of q: expected that of this plan, 1, got 0", attend(zigzag, cache, 0, 8, 8));
        rejects(name, "shape of q: expected (5, 8), got (5, 4)", attend(zigzag, cache, 1, 4, 8));
        rejects(name, "shape of o: expected (5, 8), got (5, 4)", attend(zigzag, cache, 1, 8, 4));
        rejects(name, "rank of the cache: expected 1 of 2, got 0 of 2",
                attend(zigzag, empty(heads, zigzag, 0), 1, 8, 8));
        rejects(name, "cache: expected one of every token, for queries by heads, got one by tokens",
                attend(split, cache, 1, 4, 4));
        of_heads.append(tensor(split, 1, 2), tensor(split, 1, 2));
        rejects(name, "key heads on this rank: expected those that its query heads read, got others",
                attend(zigzag, of_heads, 1, 8, 8));
        CHECK((cache.length(0) == 6 && cache.length(1) == 5));
    }

    TEST_CASE("every rank is told that caches are not alike, before anything is written") {
        auto const batch = lengths({6, 5});
        by_tokens const zigzag = cpx::shard(batch, cpx::zigzag<>(3));
        cpx::attention_heads const heads{4, 2, 2};
        /// All append and attend `alike` times; then rank 1 has these heads and this scale and appends so often, the
        /// others once.
        struct rank_1 {
            cpx::attention_heads heads;
            int times, alike = 0;
            double scale = 1;
        };
        auto const told = [&](auto const& queries, rank_1 const& odd, std::vector<std::string> const& passages) {
            std::vector<std::string> texts(3);
            std::vector<char> untouched(3);
            static_cast<void>(support::message([&] {
                cpx::threads::run(3, [&](cpx::threads& comm) {
                    int const rank = comm.rank();
                    auto const [own, times, alike, scale] = rank == 1 ? odd : rank_1{heads, 1, odd.alike};
                    cpx::attention_cache<double> cache(own, zigzag, comm);
                    auto const k = cpx::make_tensor<double>(zigzag, rank, own.key_heads * own.dim);
                    auto const q = cpx::make_tensor<double>(queries, rank, own.query_heads * own.dim);
                    cpx::cached_attention const attend(queries, comm);
                    for (int i = 0; i < alike; ++i) {
                        auto o = q;
                        cache.append(k, k);
                        attend(cache, q, 1., o, comm);
                    }
                    for (int i = 0; i < times; ++i) cache.append(k, k);
                    auto o = poisoned<double>(queries, rank, own.query_heads * own.dim);
                    auto const before = o.read();
                    try {
                        attend(cache, q, scale, o, comm);
                    } catch (cpx::error const& e) {
                        texts[at(rank)] = e.what();
                        untouched[at(rank)] = same_bits(o.read(), before);
                        throw;
                    }
                });
            }));
            for (std::size_t rank = 0; rank < 3; ++rank) {
                CAPTURE(rank);
                CHECK(untouched[rank]);
                support::holds({"attention_cache.cpp:"}, texts[rank], cpx::caller::here());
                support::holds(passages, texts[rank], cpx::caller::here());
            }
        };
        auto const each = [&](auto const& queries) {
            std::string const differ = "cached_attention: ranks disagree on ",
                              kept = "width of heads or tokens kept (hash)";
            auto const both = [&](char const* ours, char const* theirs) {
                return std::string(": expected one value on all ranks, got ") + ours + " (ranks 0 2), " + theirs +
                       " (rank 1)";
            };
            told(queries, {{4, 4, 2}, 1}, {differ + "key heads" + both("2", "4")});
            told(queries, {{8, 2, 2}, 1}, {differ + "query heads" + both("4", "8")});
            told(queries, {{4, 2, 3}, 1}, {differ + kept, "(ranks 0 2)", "(rank 1)"});
            told(queries, {heads, 2}, {differ + kept, "(ranks 0 2)", "(rank 1)"});
            told(queries, {heads, 2, 1}, {differ + kept, "(ranks 0 2)", "(rank 1)"});
            told(queries, {heads, 1, 0, 0.5}, {differ + "scale" + both("1", "0.5")});
            // The other ranks compare what is new to them alone; rank 1 is in an exchange that all have compared.
            told(queries, {heads, 0, 1}, {"ranks are in different exchanges: " + kept, "rank 1"});
        };
        each(zigzag);
        each(on_owners(batch, 3, {2, 0}));
        each(cpx::replicated<>(3, batch));
    }
}
