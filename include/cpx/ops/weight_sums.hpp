// SPDX-License-Identifier: Apache-2.0
// Gradients of weights: sums over all rows of a batch whose rows are sharded.
#pragma once

#include <cpx/core/row_buffer.hpp>
#include <cpx/layout/head_sharded.hpp>
#include <cpx/ops/expert_exchange.hpp>
#include <cpx/ops/local/linear.hpp>
#include <cpx/ops/local/sums.hpp>
#include <cpx/ops/sections.hpp>
#include <cpx/transport/exchange.hpp>

namespace cpx {

/// In which order the rows' contributions to the gradient of a weight are added.
///
/// `by_rank`: every rank adds its own rows; nothing moves but the sums. Equal to one rank within rounding.
/// `by_row`: in the order of the batch, bitwise the same on every sharding and number of ranks, one rank that adds by
/// row included. Every rank adds all rows for its share of the weight: inputs go to every rank, output gradients by
/// columns, so that a linear layer moves tokens * ((W - 1) in + out) elements. For training that must be reproduced on
/// another number of ranks.
enum class sum_order { by_rank, by_row };

/// All the rows, and some of the columns, of which a rank adds up its share of a weight's gradient.
template <class T, any_memory M = host_memory>
struct summed_rows {
    rows<T const> data;
    range share;                          ///< the columns that `data` has of each section
    typename M::template block<T> memory; ///< what `data` views, unless that is the tensor itself
};

/// Adds up gradients of weights of operators whose rows are sharded by `S`, in the order that was asked for.
///
/// Every rank ends with its share of each sum, and `sum_over_ranks` of all gradients in one call completes them. Where
/// every rank holds every row, by heads, sums need no other rank's rows, over the rank's own columns; then
/// `add_local_rows` puts them in their places.
/// What adds rows up is collective, and for tensors in any memory.
template <any_sharding S, any_transport Comm>
class weight_sums {
public:
    /// comm, which must outlive this: the ranks of the sharding. Errors of its exchanges begin with `by`: the operator
    /// whose gradients these are.
    weight_sums(S const& sharding, sum_order order, Comm& comm, caller here = caller::here(),
                char const* by = "weight_sums")
        : sharding_(sharding), order_(order), comm_(&comm), by_(by) {
        static_cast<void>(detail::rank_in(by, sharding, comm, here));
        require(order == sum_order::by_rank || order == sum_order::by_row, by, "order", "by_rank or by_row",
                static_cast<int>(order), here);
    }
    template <class X = detail::any>
    explicit weight_sums(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {})
        : weight_sums(of_nothing<X>()) {}

    S const& sharding() const { return sharding_; }
    sum_order order() const { return order_; }
    /// Returns whether this rank has something to add. On `replicated`, where all ranks have the same, only rank 0 has.
    bool speaks() const { return detail::adds_rows(sharding_, comm_->rank()); }
    /// Returns whether rows must move first.
    bool moves() const { return order_ == sum_order::by_row && !S::every_row; }

    /// Returns the rows to add up, whole.
    template <sharded_anywhere X>
    summed_rows<element_of<X>, memory_of<X>> whole(X const& x, caller here = caller::here()) const {
        rows<element_of<X> const> const own = rows_of(x, here);
        if (!moves()) return {own, {0, own.width()}, {}};
        return gather(own, replicated<>(sharding_.ranks(), sharding_.batch()), own.width(), here);
    }

    /// Returns the rows to add up, with this rank's columns of every section. The columns of `x` are sections of
    /// `columns` columns, of each of which the rank has the same columns.
    template <sharded_anywhere X>
    summed_rows<element_of<X>, memory_of<X>> share(X const& x, index_t columns, caller here = caller::here()) const {
        rows<element_of<X> const> const own = rows_of(x, here);
        require(
            columns > 0 ? own.width() % columns == 0 : own.width() == 0, "weight_sums::share", "columns of a section",
            [&] { return "a divisor of the width, " + std::to_string(own.width()); }, columns, here);
        if (columns == 0) return {own, {0, 0}, {}};
        if (!speaks()) return {own.sub(0, 0), {0, 0}, {}};
        if (!moves()) return {own, {0, columns}, {}};
        std::vector<section> const sections(static_cast<std::size_t>(own.width() / columns), {columns, 1});
        head_sharded<> const split(sharding_.ranks(), sharding_.batch(), sections, here);
        int const rank = comm_->rank();
        range const held = split.heads(rank, columns), owned = owned_heads(split, rank, columns);
        auto all = gather(own, split, held.size() * std::ssize(sections), here);
        if (owned.empty()) all.data = all.data.sub(0, 0); // a lower rank speaks for these columns
        all.share = owned;
        return all;
    }

    /// Adds `dy^T x`, the gradient of a projection, to `dweight`: (columns of dy, columns of x), in any memory. `x` is
    /// from `whole`. `add(dy, x, dweight)` adds the product of the rows and columns that are this rank's, as
    /// `linear_backward_weight` does; it is not called where there are none.
    template <class T, any_memory M, sharded_like<M> Dy, class W, class Add>
        requires std::invocable<Add&, rows<T const>, rows<T const>, rows<W>>
    void linear(summed_rows<T, M> const& x, Dy const& dy, rows<W> dweight, Add&& add,
                caller here = caller::here()) const {
        auto const of_y = rows_of(dy, here);
        detail::require_shape("weight_sums::linear", "dweight", dweight, of_y.width(), x.data.width(), here);
        detail::require_apart("weight_sums::linear", {{"dweight", dweight}}, {{"x", x.data}, {"dy", of_y}}, here);
        auto const own = share(dy, of_y.width(), here);
        if (!own.share.empty()) add(own.data, x.data, dweight.sub(own.share.first, own.share.size()));
    }

    /// Adds the gradient of an `expert_linear` whose rows are those of `at`, `expert_rows` or an `expert_exchange`, to
    /// `dweight`: (all experts * out, in). x: (rows of at, in), dy: (rows of at, out). all: the ranks that have tokens
    /// or experts, of several batches, too.
    template <class T, rows_of_experts Experts, transport All>
    void experts(Experts const& at, std::type_identity_t<rows<T const>> x, std::type_identity_t<rows<T const>> dy,
                 rows<T> dweight, All& all, caller here = caller::here()) const {
        detail::require_shape("weight_sums::experts", "dweight", dweight, at.experts() * dy.width(), x.width(), here);
        experts<T>(
            at, x, dy, all,
            [&](auto const& of, rows<T const> of_x, rows<T const> of_y) {
                index_t const out = of_y.width();
                expert_linear_backward_weight<T>(of.begins(), of_y, of_x,
                                                 dweight.sub(of.own().first * out, of.own().size() * out), here);
            },
            here);
    }
    /// The same in any memory: calls `add(experts, x, dy)` with the rows of `experts.own()` that this rank is to add
    /// up, from `experts.begins()` on; not at all where it has none.
    template <class T, rows_of_experts Experts, any_transport All, class Add>
        requires std::invocable<Add&, Experts const&, rows<T const>, rows<T const>>
    void experts(Experts const& at, std::type_identity_t<rows<T const>> x, std::type_identity_t<rows<T const>> dy,
                 All& all, Add&& add, caller here = caller::here()) const {
        if (moves()) {
            auto const together = expert_exchange<All>::of_rows(at, all, here);
            auto const all_x = together.template to_experts<T>(x, x.width(), here);
            auto const all_y = together.template to_experts<T>(dy, dy.width(), here);
            add(together, all_x.view(), all_y.view());
        } else if (speaks())
            add(at, x, dy);
    }

    template <class X = detail::any>
        requires(!sharded_anywhere<X>)
    detail::refused whole(X const& = {}) const {
        return unfit<X>();
    }
    template <class X>
    detail::refused whole(X const&, detail::any, detail::any = {}) const {
        return unfit<X>();
    }
    template <class X = detail::any>
    detail::refused share(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) const {
        return unfit<X>();
    }
    template <class X = detail::any>
    detail::refused linear(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                           detail::any = {}) const {
        return unfit<X>();
    }
    template <class X = void>
    detail::refused experts(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                            detail::any = {}) const {
        static_assert(detail::never<X>,
                      "cpx: weight_sums::experts(at, x, dy, dweight, all) wants expert_rows or an expert_exchange, "
                      "rows of dweight's elements and a cpx::transport; take rows with view() or data()");
        return {};
    }

private:
    template <class X>
    static weight_sums const& of_nothing() {
        static_assert(detail::never<X>,
                      "cpx: weight_sums(sharding, order, comm) wants the rows' sharding, a sum_order and "
                      "the transport of its ranks");
        throw;
    }
    template <class X>
    static detail::refused unfit() {
        static_assert(detail::never<X>,
                      "cpx: weight_sums take tensors: whole(x), share(x, columns), linear(whole(x), dy, dweight, add); "
                      "view other memory as sharded(rows, sharding, rank)");
        return {};
    }
    /// Returns the rows of a tensor that these sums are of.
    template <class X>
    rows<element_of<X> const> rows_of(X const& x, caller here) const {
        constexpr bool fits = detail::sharded_as<S, X>;
        static_assert(fits, "cpx: weight_sums of a tensor that is not sharded as these sums; make them with "
                            "weight_sums(x.sharding(), ...)");
        if constexpr (!fits)
            return {};
        else {
            detail::require_place("weight_sums", "a tensor", x.view(), sharding_, comm_->rank(), "that of the sums",
                                  here);
            return x.view().data();
        }
    }

    template <class T, class To>
    summed_rows<T, rank_memory_of<Comm>> gather(rows<T const> x, To const& to, index_t width, caller here) const {
        auto const plan = relayout(sharding_, to, comm_->rank(), here);
        auto const memory = rank_memory(*comm_);
        summed_rows<T, rank_memory_of<Comm>> all{
            {}, {0, width}, detail::unwritten<T>(memory, by_, {plan.target_rows, width}, here)};
        rows<T> const target(all.memory.data(), plan.target_rows, width);
        detail::exchange_rows(plan, x, target, *comm_, here, by_);
        all.data = target;
        return all;
    }

    S sharding_;
    sum_order order_;
    Comm* comm_;
    char const* by_;
};
template <class X = detail::any>
weight_sums(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {})
    -> weight_sums<cpx::sharding<sequential<1>>, detail::no_transport>;

/// Adds the terms of all rows to a gradient of as many elements. Collective where rows must move.
template <class T, any_sharding S, any_memory M, class Comm>
void add_terms(weight_sums<S, Comm> const& sums, tensor<T, S, M> const& terms, rows<T> to,
               caller here = caller::here()) {
    auto const own = sums.share(terms, terms.width(), here);
    rows<T> const share(to.data() + own.share.first, 1, own.share.size());
    auto const add = [&](rows<T const> from, index_t block, rows<T> sums_of) {
        for_each_element(terms.memory(), sums_of.count(), sums_of.width(), rowwise::add_blocks<T>{from, block, sums_of},
                         here);
    };
    // A device adds up many blocks at a time, but not in the order of the batch: there a sum waits for the one before.
    constexpr index_t block = 256;
    index_t const count = own.data.count();
    if (std::same_as<M, host_memory> || sums.order() == sum_order::by_row || count <= block)
        return add(own.data, std::max<index_t>(count, 1), share);
    row_buffer<T, M> of_blocks(terms.memory(), (count + block - 1) / block, share.width(), here);
    add(own.data, block, of_blocks.view());
    add(of_blocks.view(), of_blocks.count(), share);
}
template <class X = detail::any, class Y = detail::any>
detail::refused add_terms(X const& = {}, Y const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X, Y>,
                  "cpx: add_terms(sums, terms, to) wants weight_sums, a tensor that is sharded as these and rows of "
                  "its elements; make the sums with weight_sums(terms.sharding(), ...)");
    return {};
}

} // namespace cpx
