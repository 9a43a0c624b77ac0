// SPDX-License-Identifier: Apache-2.0
// Rows of tokens to the ranks that own the experts which they chose, and back.
#pragma once

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/piecewise.hpp>
#include <cpx/layout/sequential.hpp>
#include <cpx/ops/local/expert_rows.hpp>
#include <cpx/transport/exchange.hpp>

#include <numeric>

namespace cpx {

/// What gives rows of experts to ranks: each to the rank whose token has chosen; each to the rank that owns the expert.
struct by_token {};
struct by_expert {};

/// The rows of tokens, one for each expert that a token chose, between the ranks that have the tokens and those that
/// own the experts: expert parallelism.
///
/// The rows are a batch whose sequences are the experts; to move them is a relayout between two shardings of it, and
/// to move gradients the transposed one. On its owner an expert has its rows in the order of their places in the batch,
/// so that what it adds up of them has the bits of one rank. Takes the place of `expert_rows` in `moe`.
/// Rank r of W owns the experts from r * experts / W on. Members that move rows are collective.
///
/// Rows are in the memory of the transport's ranks. Between devices include `ops/cuda/expert_exchange.hpp`: the host
/// makes the lists, so that the constructor waits for the device, and the rows move in the transport's stream.
template <any_transport Comm>
class expert_exchange {
    using M = rank_memory_of<Comm>;

public:
    /// chosen: (tokens, choices) of this rank, experts from 0, each once a token; any numbers of tokens, none included;
    /// in a device's memory rows side by side.
    /// places: where the rank's tokens stand in the batch, no two ranks' alike: `global_rows(sharding, rank)`; of ranks
    /// with several batches, as under data parallelism, add where theirs begins among all. comm: the ranks that share
    /// the experts.
    ///
    /// Collective: counts of all experts go to every rank, then a place a row to its owner; the host reads both.
    /// Throws `cpx::error` if the experts are no multiple of the ranks, if experts or choices are not equally many on
    /// all, if there are not as many places as tokens or a choice is no expert; on an owner if two rows of an expert
    /// have one place.
    expert_exchange(rows<index_t const> chosen, index_t experts, std::span<index_t const> places, Comm& comm,
                    caller here = caller::here())
        : expert_exchange(checked(chosen, experts, places, comm, here), comm, here) {}
    template <class X = void>
    explicit expert_exchange(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {})
        : expert_exchange(detail::lacking<expert_exchange const&>()) {
        static_assert(detail::never<X>,
                      "cpx: expert_exchange(chosen, experts, places, comm) wants rows of index_t, the number of "
                      "experts, the tokens' global_rows and a cpx::transport; take rows with view() or data()");
    }

    /// Brings together what `at` has in several groups of ranks: all rows of an expert to one of the ranks of `comm`,
    /// of which there may be more than experts. For sums in the order of the batch.
    template <rows_of_experts Experts>
    static expert_exchange of_rows(Experts const& at, Comm& comm, caller here = caller::here()) {
        std::vector<index_t> ids;
        for (std::size_t e = 0; e + 1 < at.begins().size(); ++e)
            ids.resize(static_cast<std::size_t>(at.begins()[e + 1]), at.own().first + static_cast<index_t>(e));
        rows<index_t const> const chosen(ids.data(), std::ssize(ids), 1);
        return {expert_rows_in<M>(rank_memory(comm), chosen, at.experts(), at.places(), here), comm, here};
    }
    template <class X = void>
    static detail::refused of_rows(detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: expert_exchange::of_rows(at, comm) wants expert_rows, or an "
                                        "expert_exchange, and a cpx::transport of its own type");
        return {};
    }

    index_t experts() const { return sent_.experts(); }
    range own() const { return own_of(comm_->rank()); }
    std::span<index_t const> begins() const { return begins_; }
    index_t count() const { return plan_.target_rows; }
    index_t tokens() const { return sent_.tokens(); }
    index_t choices() const { return sent_.choices(); }
    std::span<index_t const> places() const { return places_; }
    /// Returns the exchange from the ranks of the tokens to those of the experts.
    relayout_plan<piecewise<by_token>, piecewise<by_expert>> const& plan() const { return plan_; }

    M const& memory() const { return sent_.memory(); }

    /// As `expert_rows::to_experts`, to the owners.
    template <class T>
    row_buffer<T, M> to_experts(rows<T const> x, index_t width, caller here = caller::here()) const {
        char const* const where = "expert_exchange::to_experts";
        detail::require_choices(where, x, tokens(), choices(), width, here);
        auto const sent = sent_.template to_experts<T>(x, width, here);
        row_buffer<T, M> arrived(memory(), count(), width, here);
        detail::exchange_rows(plan_, sent.view(), arrived.view(), *comm_, here, where);
        if (sorted_) return arrived;
        row_buffer<T, M> sorted(memory(), count(), width, here);
        gather_rows<T>(memory(), arrived.view(), order(), sorted.view(), here);
        return sorted;
    }
    /// As `expert_rows::to_tokens`, from the owners.
    template <class T>
    void to_tokens(rows<T const> x, rows<T> y, caller here = caller::here()) const {
        char const* const where = "expert_exchange::to_tokens";
        detail::require_shape(where, "x", x, count(), x.width(), here);
        detail::require_shape(where, "y", y, tokens(), choices() * x.width(), here);
        row_buffer<T, M> as_arrived(memory(), sorted_ ? 0 : count(), x.width(), here),
            back(memory(), sent_.count(), x.width(), here);
        if (!sorted_) scatter_rows<T>(memory(), x, order(), as_arrived.view(), here);
        detail::exchange_rows(back_, sorted_ ? x : rows<T const>(as_arrived.view()), back.view(), *comm_, here, where);
        sent_.template to_tokens<T>(back.view(), y, here);
    }

    template <class T = void>
    detail::refused to_experts(detail::any = {}, detail::any = {}, detail::any = {}) const {
        static_assert(detail::never<T>, "cpx: expert_exchange::to_experts(x, width) wants rows of T const, or of T as "
                                        "to_experts<T>(x, width), and a number; take rows with view() or data()");
        return {};
    }
    template <class T = detail::refused, class... X>
        requires(!detail::takes<void(rows<T const>, rows<T>), X...>)
    detail::refused to_tokens(X&&...) const {
        static_assert(detail::never<X...>, "cpx: expert_exchange::to_tokens<T>(x, y) wants rows of T, not const where "
                                           "they are written; take rows with view() or data()");
        return {};
    }

private:
    static expert_rows_in<M> checked(rows<index_t const> chosen, index_t experts, std::span<index_t const> places,
                                     Comm const& comm, caller here) {
        char const* const where = "expert_exchange";
        require(
            experts > 0 && experts % comm.ranks() == 0, where, "experts",
            [&] { return "a multiple of the ranks that share them, " + std::to_string(comm.ranks()); }, experts, here);
        require(std::ssize(places) == chosen.count(), where, "places", chosen.count(), places.size(), here);
        M const memory = rank_memory(comm);
        if constexpr (std::same_as<M, host_memory>)
            return {memory, chosen, experts, places, here, where};
        else {
            require(chosen.stride() == chosen.width(), where, "stride of chosen", chosen.width(), chosen.stride(),
                    here);
            auto const size = static_cast<std::size_t>(chosen.count() * chosen.width());
            auto const on_host = memory.read(std::span<index_t const>(chosen.data(), size), here);
            return {memory, rows<index_t const>(on_host.data(), chosen.count(), chosen.width()), experts, places, here,
                    where};
        }
    }

    expert_exchange(expert_rows_in<M> sent, Comm& comm, caller here)
        : sent_(std::move(sent)), comm_(&comm), plan_(make_plan(here)), back_(plan_.transposed()) {
        auto const& batch = plan_.to.batch();
        for (index_t e = own().first; e <= own().last; ++e)
            begins_.push_back(batch.offsets()[static_cast<std::size_t>(e)] -
                              batch.offsets()[static_cast<std::size_t>(own().first)]);
        row_buffer<index_t, M> sent_places(memory(), sent_.count(), 1, here), places(memory(), count(), 1, here);
        memory().write(sent_places.view().data(), sent_.places(), here);
        detail::exchange_rows(plan_, sent_places.view(), places.view(), comm, here, "expert_exchange");
        places_ =
            memory().read(std::span<index_t const>(places.view().data(), static_cast<std::size_t>(count())), here);
        sort(here);
    }

    /// Sorts the rows of every expert by their places, which differ.
    void sort(caller here) {
        std::vector<index_t> order(places_.size());
        std::iota(order.begin(), order.end(), index_t{0});
        auto const arrived = places_;
        auto const place = [&](index_t row) { return arrived[static_cast<std::size_t>(row)]; };
        for (std::size_t e = 0; e + 1 < begins_.size(); ++e)
            std::ranges::sort(order.begin() + begins_[e], order.begin() + begins_[e + 1], {}, place);
        std::ranges::transform(order, places_.begin(), place);
        for (std::size_t e = 0; e + 1 < begins_.size(); ++e)
            for (auto row = static_cast<std::size_t>(begins_[e]); row < static_cast<std::size_t>(begins_[e + 1]); ++row)
                if (places_[row] < 0 ||
                    (row > static_cast<std::size_t>(begins_[e]) && places_[row] == places_[row - 1]))
                    require(false, "expert_exchange", "place of a token",
                            "one of its own in the batch, as global_rows(sharding, rank) tells, and an expert once",
                            places_[row], here);
        sorted_ = std::ranges::is_sorted(order);
        if (sorted_) return;
        order_ = {memory(), count(), 1, here};
        memory().write(order_.view().data(), std::span<index_t const>(order), here);
    }

    /// Lets all ranks know how many rows of every expert each of them has.
    relayout_plan<piecewise<by_token>, piecewise<by_expert>> make_plan(caller here) const {
        int const ranks = comm_->ranks();
        auto const all = gather_counts(here);
        std::vector<index_t> offsets{0};
        std::vector<owned_piece> of_tokens, of_experts;
        for (index_t e = 0, owner = 0; e < experts(); ++e) {
            while (e >= own_of(static_cast<int>(owner)).last) ++owner;
            index_t const begin = offsets.back();
            for (int rank = 0; rank < ranks; ++rank) {
                index_t const first = of_tokens.empty() ? 0 : of_tokens.back().rows.last;
                index_t const rows = all[static_cast<std::size_t>(rank * experts() + e)];
                of_tokens.push_back({{first, first + rows}, rank});
            }
            offsets.push_back(of_tokens.back().rows.last);
            of_experts.push_back({{begin, offsets.back()}, static_cast<int>(owner)});
        }
        thd const batch(std::move(offsets), {}, here);
        auto plan = relayout(piecewise<by_token>(ranks, batch, of_tokens, here),
                             piecewise<by_expert>(ranks, batch, of_experts, here), comm_->rank(), here);
        identity::set(plan.id.operation, "expert_exchange");
        return plan;
    }
    /// Returns of every rank in turn the rows of every expert.
    std::vector<index_t> gather_counts(caller here) const {
        std::vector<index_t> own;
        for (std::size_t e = 0; e + 1 < sent_.begins().size(); ++e)
            own.push_back(sent_.begins()[e + 1] - sent_.begins()[e]);
        thd const numbers({0, comm_->ranks() * experts()}); // as many on every rank
        auto counts = make_tensor<index_t>(shard(numbers, sequential<>(comm_->ranks())), *comm_, 1, here);
        counts.write(own, here);
        auto plan = relayout(counts.sharding(), replicated<>(comm_->ranks(), numbers), comm_->rank(), here);
        identity::set(plan.id.operation, "expert_exchange");
        identity::set(plan.id.source,
                      std::to_string(experts()) + " experts and " + std::to_string(choices()) + " choices a token");
        plan.id.forget_batch();
        auto all = make_tensor<index_t>(plan.to, *comm_, 1, here);
        detail::exchange_rows(plan, rows<index_t const>(counts.data()), all.data(), *comm_, here, "expert_exchange");
        return all.read(here);
    }

    range own_of(int rank) const {
        index_t const ranks = comm_->ranks();
        return {rank * experts() / ranks, (rank + 1) * experts() / ranks};
    }
    /// Returns of every row the one that arrived.
    std::span<index_t const> order() const { return {order_.view().data(), places_.size()}; }

    expert_rows_in<M> sent_;
    Comm* comm_;
    relayout_plan<piecewise<by_token>, piecewise<by_expert>> plan_;
    cpx::plan back_;
    std::vector<index_t> begins_, places_;
    bool sorted_ = true; ///< whether rows arrive in their order; else there is a list of them
    row_buffer<index_t, M> order_;
};
template <class X = void>
expert_exchange(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {})
    -> expert_exchange<detail::no_transport>;

} // namespace cpx
