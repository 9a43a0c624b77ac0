// SPDX-License-Identifier: Apache-2.0
// Operators on any sharding: whole tensors are cut to ranks and put together again here, without cpx's exchange.
#pragma once

#include <cpx/cpx.hpp>

#include <ops/kernels.hpp>
#include <support/erased.hpp>
#include <support/packings.hpp>
#include <support/random.hpp>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

namespace on_ranks {

using cpx::index_t;

/// A NaN that no computation gives: what a buffer holds before a call.
template <class T>
T poison() {
    if constexpr (sizeof(T) == 8)
        return std::bit_cast<T>(std::uint64_t{0x7ff8'0000'dead'beef});
    else
        return std::bit_cast<T>(std::uint32_t{0x7fc0'beef});
}

template <class T>
bool same_bits(T a, T b) {
    return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <class T>
bool same_bits(std::vector<T> const& a, std::vector<T> const& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// Returns rows `[first, last)` of a whole tensor of `width`.
template <class T>
std::vector<T> slice(std::vector<T> const& whole, index_t width, index_t first, index_t last) {
    return {whole.begin() + first * width, whole.begin() + last * width};
}

/// Returns whether rows `[first, last)` of two whole tensors of `width` have the same bits.
template <class T>
bool same_rows(std::vector<T> const& a, std::vector<T> const& b, index_t width, index_t first, index_t last) {
    auto const at = static_cast<std::size_t>(first * width), count = static_cast<std::size_t>((last - first) * width);
    return count == 0 || std::memcmp(a.data() + at, b.data() + at, count * sizeof(T)) == 0;
}

/// Returns |a - b| / |b| in the 2-norm, NaN if there is one; a tensor of another size is infinitely far.
template <class A, class B>
double relative_error(std::vector<A> const& a, std::vector<B> const& b) {
    if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        double const expected = static_cast<double>(b[i]), d = static_cast<double>(a[i]) - expected;
        difference += d * d;
        norm += expected * expected;
    }
    return std::sqrt(norm > 0 ? difference / norm : difference);
}

template <class To, class From>
std::vector<To> cast(std::vector<From> const& values) {
    return std::vector<To>(values.begin(), values.end());
}

/// Returns numbers in [-scale, scale) that a float holds exactly.
template <class T>
std::vector<T> uniform(support::splitmix& numbers, index_t count, double scale = 1) {
    std::vector<T> values(static_cast<std::size_t>(count));
    for (T& x : values)
        x = static_cast<T>(static_cast<float>(scale * (static_cast<double>(numbers.next() >> 11) * 0x1p-52 - 1)));
    return values;
}

/// Returns the columns of whole rows made of `sections` that `rank` holds, in local order.
template <cpx::any_sharding S>
std::vector<index_t> columns(S const& sharding, int rank, std::vector<cpx::section> const& sections) {
    std::vector<index_t> held;
    index_t first = 0;
    for (cpx::section const& s : sections) {
        cpx::range const heads = sharding.heads(rank, s.heads);
        for (index_t c = heads.first * s.width; c < heads.last * s.width; ++c) held.push_back(first + c);
        first += s.heads * s.width;
    }
    return held;
}

inline index_t width(std::vector<cpx::section> const& sections) {
    index_t sum = 0;
    for (cpx::section const& s : sections) sum += s.heads * s.width;
    return sum;
}

/// Returns the rows and columns of a whole tensor that `rank` holds.
template <class T, cpx::any_sharding S>
cpx::tensor<T, S> take(std::vector<T> const& whole, std::vector<cpx::section> const& sections, S const& sharding,
                       int rank) {
    auto const held = columns(sharding, rank, sections);
    index_t const all = width(sections);
    cpx::tensor<T, S> local(sharding, rank, static_cast<index_t>(held.size()));
    index_t row = 0;
    sharding.for_each_piece(rank, [&](cpx::range piece) {
        for (index_t global = piece.first; global < piece.last; ++global, ++row)
            for (std::size_t c = 0; c < held.size(); ++c)
                local.data()(row, static_cast<index_t>(c)) = whole[static_cast<std::size_t>(global * all + held[c])];
    });
    return local;
}

/// Returns a tensor that an operator is to write, full of poison.
template <class T, cpx::any_sharding S>
cpx::tensor<T, S> poisoned(S const& sharding, int rank, index_t columns) {
    cpx::tensor<T, S> local(sharding, rank, columns);
    std::fill_n(local.data().data(), local.data().count() * columns, poison<T>());
    return local;
}

/// Runs `program(comm)` on every rank and puts the tensors that it returns together to the whole tensor of `sections`.
///
/// A place that nobody holds, and one of which two ranks hold different bits, is poison.
template <class T, cpx::any_sharding S>
std::vector<T> assemble(S const& sharding, std::vector<cpx::section> const& sections,
                        std::type_identity_t<cpx::detail::function_ref<cpx::tensor<T, S>(cpx::threads&)>> program) {
    std::vector<cpx::tensor<T, S>> locals(static_cast<std::size_t>(sharding.ranks()), {sharding, 0, 0});
    cpx::threads::run(sharding.ranks(),
                      [&](cpx::threads& comm) { locals[static_cast<std::size_t>(comm.rank())] = program(comm); });
    index_t const all = width(sections);
    std::vector<T> whole(static_cast<std::size_t>(sharding.batch().tokens() * all), poison<T>());
    std::vector<char> held(whole.size()); // not of bool: builds of tests inline nothing
    for (int rank = 0; rank < sharding.ranks(); ++rank) {
        auto const& local = locals[static_cast<std::size_t>(rank)];
        auto const own = columns(sharding, rank, sections);
        index_t row = 0;
        sharding.for_each_piece(rank, [&](cpx::range piece) {
            for (index_t global = piece.first; global < piece.last; ++global, ++row)
                for (std::size_t c = 0; c < own.size(); ++c) {
                    auto const i = static_cast<std::size_t>(global * all + own[c]);
                    T const value = local.data()(row, static_cast<index_t>(c));
                    whole[i] = held[i] && !same_bits(whole[i], value) ? poison<T>() : value;
                    held[i] = true;
                }
        });
    }
    return whole;
}

/// Any layout over either scope with any cut behind one type, so that an operator is compiled for it once: of the
/// sharding it sees what `cpx::any_sharding` promises, and the unit of its cut. Each operator runs on some types, too.
class by_tokens : public support::any_tokens {
public:
    template <class P, cpx::scope Scope, class Cut>
    by_tokens(cpx::sharding<P, Scope, Cut> const& sharding) : support::any_tokens(sharding), cut_(1) {
        if constexpr (requires { sharding.cut().unit(); }) cut_ = cpx::aligned<cpx::dynamic>(sharding.cut().unit());
    }

    cpx::aligned<cpx::dynamic> cut() const { return cut_; }

private:
    cpx::aligned<cpx::dynamic> cut_;
};

/// A batch of at most one token a sequence, sequence s on rank `owners[s]`, which decodes it.
inline by_tokens on_owners(cpx::thd const& batch, int ranks, std::vector<int> const& owners) {
    std::vector<int> present;
    for (index_t s = 0; s < batch.sequences(); ++s)
        if (batch.length(s) > 0) present.push_back(owners[static_cast<std::size_t>(s)]);
    if (present.empty()) present.push_back(0);
    return cpx::shard<cpx::scope::batch>(batch, cpx::table(ranks, present));
}

/// Calls `f(name, sharding)` with four layouts over both scopes with each of the cuts. A unit of 1 is balanced.
inline void for_each_sharding(cpx::thd const& batch, int ranks, std::vector<int> const& units,
                              cpx::detail::function_ref<void(std::string const&, by_tokens const&)> f) {
    using cpx::scope;
    support::splitmix numbers(static_cast<std::uint64_t>(ranks));
    std::pair<char const*, cpx::table> const layouts[] = {
        {"sequential", cpx::table(cpx::sequential<>(ranks))},
        {"zigzag", cpx::table(cpx::zigzag<>(ranks))},
        {"striped", cpx::table(cpx::striped<>(ranks))},
        {"table", cpx::table(ranks, support::random_owners(numbers, ranks, 2 * ranks + 1))}};
    for (auto const& [layout, owners] : layouts)
        for (int const unit : units) {
            std::string const name = std::string(layout) + " on " + std::to_string(ranks) +
                                     " ranks, cut at multiples of " + std::to_string(unit) + ", over ";
            cpx::aligned<cpx::dynamic> const cut(unit);
            f(name + "sequence", by_tokens(cpx::shard<scope::sequence>(batch, owners, cut)));
            f(name + "batch", by_tokens(cpx::shard<scope::batch>(batch, owners, cut)));
        }
}

inline constexpr int rank_counts[] = {1, 2, 3, 4, 5, 8};

/// The batch as one rank has it.
inline by_tokens one_rank(cpx::thd const& batch) {
    return by_tokens(cpx::shard(batch, cpx::table(cpx::sequential<>(1)), cpx::aligned<cpx::dynamic>(1)));
}

/// Returns up to `most_sequences` sequences: empty, of one token, odd, around the chunk, and any up to 40 tokens.
inline cpx::thd random_batch(support::splitmix& numbers, index_t most_sequences) {
    index_t const usual[] = {0, 1, 2, 3, 5, 15, 16, 17, 33, 64, 65};
    std::vector<index_t> lengths;
    for (index_t n = numbers.between(1, most_sequences); n > 0; --n)
        lengths.push_back(numbers.next() % 2 ? usual[numbers.next() % std::size(usual)] : numbers.between(0, 40));
    return support::lengths(lengths);
}

} // namespace on_ranks
