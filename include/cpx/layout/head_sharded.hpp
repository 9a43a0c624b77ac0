// SPDX-License-Identifier: Apache-2.0
// Shardings in which every rank holds every token: a share of the heads, or everything.
#pragma once

#include <cpx/layout/sharding.hpp>

#include <concepts>
#include <memory>

namespace cpx {

namespace detail {

/// What `head_sharded` and `replicated` have in common: all rows, in sequence order, on every rank.
template <int W>
class every_row_sharding {
public:
    static constexpr bool every_row = true;
    static constexpr int static_ranks = W;

    every_row_sharding(char const* where, extent<W> ranks, thd batch, caller here)
        : ranks_(ranks), batch_(std::move(batch)) {
        require_ranks(where, "ranks", ranks_.get(), here);
        product(where, "tokens times ranks", {batch_.tokens(), ranks_.get()}, here);
    }
    template <class X>
    static every_row_sharding const& unfit() {
        static_assert(never<X>, "cpx: replicated<W> wants a cpx::thd, and head_sharded<W> its sections, too; before "
                                "them the number of ranks if the type does not tell it; shard() takes neither");
        throw;
    }
    int ranks() const { return ranks_.get(); }
    thd const& batch() const { return batch_; }
    /// Throws `cpx::error` if there is no such rank.
    index_t rows(int rank, caller here = caller::here()) const {
        require_rank("sharding::rows", rank, ranks(), here);
        return batch_.tokens();
    }

    template <class F>
    void for_each_piece(int, F&& f) const {
        if (batch_.tokens() > 0) f(range{0, batch_.tokens()});
    }
    template <class F>
    void for_each_holder(range rows, index_t&, F&& f) const {
        for (int rank = 0; rank < ranks(); ++rank) f(rank, rows);
    }
    friend bool operator==(every_row_sharding const& a, every_row_sharding const& b) {
        return a.ranks() == b.ranks() && a.batch_ == b.batch_;
    }

private:
    [[no_unique_address]] extent<W> ranks_;
    thd batch_;
};

} // namespace detail

/// Every rank holds every token in sequence order and its share of the heads of each section (Ulysses).
///
/// Let G be the largest number of heads of a section; the others must divide it, as grouped heads do (q = 16, k = 2).
/// Rank r holds heads [floor(G r / W), floor(G (r+1) / W)) of the largest sections, and of the others the heads that go
/// with these. Shares may be uneven. A head that several ranks need, because of its group or because W > G, stands on
/// each of them.
///
/// A local row is the rank's share of section 0, then of section 1, and so on.
template <int W = dynamic>
class head_sharded : public detail::every_row_sharding<W> {
public:
    /// Throws `cpx::error` on sections that are empty, have no heads, no width, or do not divide the largest.
    head_sharded(thd batch, std::vector<section> sections, caller here = caller::here())
        requires(W != dynamic)
        : head_sharded(extent<W>{}, std::move(batch), std::move(sections), here) {}
    head_sharded(int ranks, thd batch, std::vector<section> sections, caller here = caller::here())
        requires(W == dynamic)
        : head_sharded(extent<W>(ranks), std::move(batch), std::move(sections), here) {}

    template <class X = detail::any>
        requires(!std::derived_from<X, head_sharded>)
    explicit head_sharded(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {})
        : detail::every_row_sharding<W>(head_sharded::template unfit<detail::whatever<X>>()) {}
    template <class X>
    head_sharded(std::initializer_list<section>, X const&, detail::any = {})
        : detail::every_row_sharding<W>(head_sharded::template unfit<detail::whatever<X>>()) {}

    std::span<section const> sections() const { return *sections_; }

    /// Returns the heads that `rank` holds of a section of `heads` heads.
    range heads(int rank, index_t heads) const {
        index_t const first = groups_ * rank / this->ranks();
        index_t const last = std::max(first + 1, groups_ * (rank + 1) / this->ranks());
        return {first * heads / groups_, (last * heads + groups_ - 1) / groups_};
    }

    friend bool operator==(head_sharded const& a, head_sharded const& b) {
        using base = detail::every_row_sharding<W>;
        return static_cast<base const&>(a) == static_cast<base const&>(b) && *a.sections_ == *b.sections_;
    }

private:
    head_sharded(extent<W> ranks, thd batch, std::vector<section> sections, caller here)
        : detail::every_row_sharding<W>("head_sharded", ranks, std::move(batch), here) {
        char const* const where = "head_sharded";
        require(!sections.empty(), where, "number of sections", "at least 1", 0, here);
        index_t const columns = detail::columns_of(where, sections, here);
        detail::product(where, "tokens x columns", {this->batch().tokens(), columns}, here);
        for (section const& s : sections) groups_ = std::max(groups_, s.heads);
        for (std::size_t i = 0; i < sections.size(); ++i)
            if (groups_ % sections[i].heads != 0)
                throw error(where, "heads of section " + std::to_string(i), "a divisor of " + std::to_string(groups_),
                            std::to_string(sections[i].heads), here);
        sections_ = std::make_shared<std::vector<section> const>(std::move(sections));
    }

    index_t groups_ = 1;
    std::shared_ptr<std::vector<section> const> sections_;
};

/// Every rank holds everything, in sequence order. As a target: an all-gather. Its transpose sums in rank order.
template <int W = dynamic>
class replicated : public detail::every_row_sharding<W> {
public:
    explicit replicated(thd batch, caller here = caller::here())
        requires(W != dynamic)
        : detail::every_row_sharding<W>("replicated", extent<W>{}, std::move(batch), here) {}
    replicated(int ranks, thd batch, caller here = caller::here())
        requires(W == dynamic)
        : detail::every_row_sharding<W>("replicated", extent<W>(ranks), std::move(batch), here) {}

    template <class X = detail::any>
        requires(!std::derived_from<X, replicated>)
    explicit replicated(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {})
        : detail::every_row_sharding<W>(replicated::template unfit<detail::whatever<X>>()) {}

    std::span<section const> sections() const { return {}; }
    range heads(int, index_t heads) const { return {0, heads}; }
};

/// As if one were made of nothing: of one that has been, made for `shard` in its call, no more is said.
template <auto = 0, class B, class P>
    requires std::derived_from<P, detail::every_row_sharding<P::static_ranks>>
detail::refused shard(B const&, P const&, detail::any = {}) {
    P::template unfit<detail::any>();
    return {};
}

} // namespace cpx
