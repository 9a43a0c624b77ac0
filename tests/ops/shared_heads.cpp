// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/shared_heads.hpp>

#include <cpx/ops/sections.hpp>

#include <doctest/doctest.h>

#include <ops/on_ranks.hpp>
#include <support/rejects.hpp>

namespace {

using namespace on_ranks;
using cpx::index_t;
using support::lengths;

/// Readers that share heads evenly, in groups, and all of them one.
struct heads_case {
    index_t shared, readers, width;
};
std::vector<heads_case> const cases = {{1, 1, 3}, {2, 2, 1}, {2, 4, 3}, {2, 6, 2}, {3, 9, 1}, {1, 5, 2}, {4, 8, 1}};
std::vector<int> const many_ranks = {1, 2, 3, 4, 5, 8, 11};

/// Returns whole sums: the readers of each shared head, ascending.
template <class T>
std::vector<T> plain_sums(std::vector<T> const& terms, heads_case const& c) {
    index_t const group = c.readers / c.shared, rows = std::ssize(terms) / (c.readers * c.width);
    std::vector<T> sums;
    for (index_t row = 0; row < rows; ++row)
        for (index_t head = 0; head < c.shared; ++head)
            for (index_t column = 0; column < c.width; ++column) {
                auto const at = [&](index_t reader) {
                    return terms[static_cast<std::size_t>((row * c.readers + reader) * c.width + column)];
                };
                T sum = at(head * group);
                for (index_t reader = head * group + 1; reader < (head + 1) * group; ++reader) sum += at(reader);
                sums.push_back(sum);
            }
    return sums;
}

/// Runs `sum_readers` for N tensors side by side and returns the sums side by side; disagreeing ranks give poison.
template <std::size_t N, class T, cpx::any_sharding S>
std::array<std::vector<T>, N> run(std::array<std::vector<T>, N> const& terms, heads_case const& c, S const& sharding) {
    std::array<std::vector<T>, N> result;
    for (std::size_t which = 0; which < N; ++which)
        result[which] = assemble<T>(sharding, {{c.shared, c.width}}, [&](cpx::threads& comm) {
            int const rank = comm.rank();
            index_t const held = sharding.heads(rank, c.readers).size() * c.width,
                          own = sharding.heads(rank, c.shared).size() * c.width;
            auto together = poisoned<T>(sharding, rank, static_cast<index_t>(N) * held);
            std::vector<cpx::tensor<T, S>> sums(N, poisoned<T>(sharding, rank, own));
            std::array<cpx::rows<T>, N> views;
            for (std::size_t i = 0; i < N; ++i) {
                auto const local = take(terms[i], {{c.readers, c.width}}, sharding, rank);
                for (index_t row = 0; row < local.data().count(); ++row)
                    std::copy_n(local.data().row(row), held, together.data().row(row) + static_cast<index_t>(i) * held);
                views[i] = sums[i].data();
            }
            cpx::sum_readers<T>(sharding, c.shared, c.readers, c.width, together.data(), views, comm);
            return sums[which];
        });
    return result;
}

} // namespace

TEST_SUITE("ops") {
    using cpx::index_t;

    TEST_CASE_TEMPLATE("shared heads get the sums of their readers, ascending, on every rank that holds them", T, float,
                       double) {
        for (auto const& packing : std::vector<std::vector<index_t>>{{5, 0, 1, 9}, {1}, {}, {0}})
            for (heads_case const& c : cases) {
                auto const batch = lengths(packing);
                CAPTURE(support::text(batch));
                CAPTURE(c.shared);
                CAPTURE(c.readers);
                support::splitmix numbers(static_cast<std::uint64_t>(c.readers));
                std::array<std::vector<T>, 3> terms;
                for (auto& one : terms) one = uniform<T>(numbers, batch.tokens() * c.readers * c.width, 1e3);
                auto const check = [&](auto const& sharding) {
                    auto const two = run<2, T>({terms[0], terms[1]}, c, sharding);
                    auto const three = run<3, T>(terms, c, sharding);
                    for (std::size_t i = 0; i < 2; ++i) CHECK(same_bits(two[i], plain_sums(terms[i], c)));
                    for (std::size_t i = 0; i < 3; ++i) CHECK(same_bits(three[i], plain_sums(terms[i], c)));
                };
                for (int const ranks : many_ranks) {
                    CAPTURE(ranks);
                    check(cpx::head_sharded<>(ranks, batch, {{c.shared, c.width}, {c.readers, 1}}));
                    check(cpx::replicated<>(ranks, batch));
                    check(by_tokens(cpx::shard(batch, cpx::zigzag<>(ranks))));
                }
            }
    }

    TEST_CASE("every head has one rank that speaks for it, where tokens are sharded all of them") {
        auto const batch = lengths({3, 1});
        for (heads_case const& c : cases)
            for (int const ranks : many_ranks) {
                CAPTURE(ranks);
                cpx::head_sharded<> const split(ranks, batch, {{c.shared, c.width}, {c.readers, 1}});
                for (index_t const heads : {c.shared, c.readers}) {
                    index_t next = 0;
                    for (int rank = 0; rank < ranks; ++rank) {
                        cpx::range const owned = cpx::owned_heads(split, rank, heads), held = split.heads(rank, heads);
                        CHECK(owned.last <= held.last);
                        if (owned.empty()) continue;
                        CHECK(owned.first == next);
                        CHECK(owned.first >= held.first);
                        next = owned.last;
                    }
                    CHECK(next == heads);
                    for (int rank = 0; rank < ranks; ++rank) {
                        cpx::range const all{0, heads},
                            none = cpx::owned_heads(cpx::replicated<>(ranks, batch), rank, heads);
                        CHECK(cpx::owned_heads(by_tokens(cpx::shard(batch, cpx::zigzag<>(ranks))), rank, heads) == all);
                        CHECK(none.size() == (rank == 0 ? heads : 0));
                    }
                }
            }
    }

    TEST_CASE("sums of readers reject what does not fit, before anything is written") {
        cpx::head_sharded<> const split(1, lengths({4, 1}), {{2, 3}, {4, 3}});
        std::vector<float> terms(2 * 5 * 12), sums(2 * 5 * 6);
        cpx::rows<float> const second(sums.data() + 30, 5, 6);
        auto const call = [&](index_t shared, cpx::rows<float const> from, cpx::rows<float> to) {
            return [=, &split] {
                cpx::threads::run(1, [&](cpx::threads& comm) {
                    cpx::sum_readers<float>(split, shared, 4, 3, from, std::array{to, second}, comm);
                });
            };
        };
        std::ranges::fill(terms, 1.f);
        cpx::rows<float const> const from(terms, 24);
        cpx::rows<float> const to(sums.data(), 5, 6);
        auto const rejects = [&](std::string const& passage, auto const& f) {
            support::rejects({"shared_heads.cpp", "sum_readers: " + passage}, f);
            CHECK(std::ranges::all_of(sums, [](float x) { return x == 0; }));
        };
        rejects("readers: expected a multiple of the shared heads 3, got 4", call(3, from, to));
        rejects("shared heads: expected at least 1, got 0", call(0, from, to));
        rejects("shape of terms: expected (5, 24), got (4, 24)", call(2, from.sub(0, 4), to));
        rejects("shape of terms: expected (5, 24), got (5, 12)", call(2, from.columns(0, 12), to));
        rejects("shape of sums: expected (5, 6), got (5, 5)", call(2, from, to.columns(0, 5)));
        rejects("shape of sums: expected (5, 6), got (3, 6)", call(2, from, to.sub(0, 3)));
        rejects("overlap of sums and sums: expected none, got some", call(2, from, second));
        rejects("overlap of sums and terms", call(2, {sums.data(), 5, 24, 6}, to));
        CHECK(support::message(call(2, from, to)) == "");
        CHECK(std::ranges::all_of(sums, [](float x) { return x == 2; }));
    }
}
