// SPDX-License-Identifier: Apache-2.0
// Runs a plan over a transport.
#pragma once

#include <cpx/core/element.hpp>
#include <cpx/core/overlap.hpp>
#include <cpx/layout/tensor.hpp>
#include <cpx/plan/relayout.hpp>
#include <cpx/transport/agree.hpp>

namespace cpx {

namespace detail {

/// Whether all of `X` are in the memory of the ranks of a transport.
template <class Comm, class... X>
inline constexpr bool in_memory_of = (std::same_as<memory_of<X>, rank_memory_of<Comm>> && ...);

/// Returns whether what is done in two memories is in one order: on devices in one stream, whoever allocates.
template <any_memory M>
bool in_one_order(M const& a, M const& b) {
    if constexpr (requires { a.stream(); })
        return a.stream() == b.stream();
    else
        return a == b;
}

/// Rows at one end of an exchange, and the elements of each; 0: any.
struct end_shape {
    index_t rows, width;
};

template <class T>
void check_buffer(char const* by, char const* which, rows<T> const& buffer, end_shape const& end, caller here) {
    bool const no_rows = end.rows == 0 && buffer.count() == 0;
    bool const fits = no_rows || end.width == 0 || buffer.width() == end.width,
               apart = no_rows || buffer.stride() >= buffer.width();
    if (buffer.count() == end.rows && fits && apart && (buffer.data() || end.rows * buffer.width() == 0)) return;
    std::string const where = std::string(by) + ", " + which; // made where it is needed: this runs at every call
    require(buffer.count() == end.rows, where.c_str(), "rows of the buffer", end.rows, buffer.count(), here);
    require(fits, where.c_str(), "width of the buffer", end.width, buffer.width(), here);
    require(apart, where.c_str(), "stride of the buffer", in_words("at least its width ", buffer.width()),
            buffer.stride(), here);
    throw error(where.c_str(), "buffer", "memory", "null", here);
}

/// Throws `cpx::error` unless the buffers of an exchange, on host or device, are what it wants and do not overlap.
template <class A, class B>
void check_buffers(char const* by, rows<A> const& from, end_shape const& source, rows<B> const& to,
                   end_shape const& target, caller here) {
    check_buffer(by, "source", from, source, here);
    check_buffer(by, "target", to, target, here);
    require_apart(by, {{"target", to}}, {{"source", from}}, here);
}

/// Copies what stays and lets the transport move the rest into `receives`.
template <class A, class Comm>
void exchange_messages(plan const& p, identity const& id, rows<A> const& from, std::vector<incoming> receives,
                       Comm& comm, caller here, char const* by) {
    auto sends = parcels<std::byte const>(p.sends, from);
    auto const own = take_own(sends, p.rank);
    auto const kept = take_own(receives, p.rank);
    require(own.rows.size() == kept.rows.size() && own.bytes() == kept.bytes(), by, "bytes that stay", own.bytes(),
            kept.bytes(), here);
    copy(own, kept);
    transfer(comm, id, sends, receives, here);
}

/// Receives every contribution into a buffer of its own, then adds them in rank order, whatever the order of arrival.
template <class A, class B, class Comm>
void exchange_sum(plan const& p, identity const& id, rows<A> const& from, rows<B> const& to, Comm& comm, caller here,
                  char const* by) {
    std::vector<message> compact;
    std::vector<std::vector<B>> staged;
    std::vector<incoming> receives;
    compact.reserve(p.receives.size()); // parcels point into it
    for (message const& m : p.receives) {
        index_t const width = m.columns.empty() ? to.width() : total(m.columns);
        compact.push_back({m.peer, side_by_side(m.rows), side_by_side(m.columns)});
        staged.push_back(zeros<B>(by, {total(m.rows), width}, here));
        rows<B> const buffer(staged.back(), width);
        receives.push_back(parcels<std::byte>(std::span(&compact.back(), 1), buffer).front());
    }
    exchange_messages(p, id, from, std::move(receives), comm, here, by);
    for (std::size_t i = 0; i < p.receives.size(); ++i) {
        B const* value = staged[i].data();
        run const whole{0, to.width()};
        auto const& columns = p.receives[i].columns;
        for (run const r : p.receives[i].rows)
            for (index_t row = r.first; row < r.first + r.count; ++row)
                for (run const c : columns.empty() ? std::span(&whole, 1) : std::span(columns))
                    for (index_t column = c.first; column < c.first + c.count; ++column) to(row, column) += *value++;
    }
}

/// The function whose exchange it is, which errors name, and other ranks, too; and what that is given beside tensors.
struct run_for {
    char const* by;
    identity::arguments given = {};
    run_for(char const* function = "exchange", identity::arguments const& alike = {}) : by(function), given(alike) {}
};

/// Returns what ranks compare before a function runs a plan for elements T in rows of `width`.
template <class T>
identity identity_of(plan const& p, index_t width, run_for const& of) {
    identity id = p.id.for_elements<T>(width);
    std::string_view const function = of.by, operation = id.operation.data();
    if (function != "exchange" && !operation.starts_with(function.substr(0, function.find("::")))) id.run_by(of.by);
    if (of.given != identity::arguments{}) id.set_arguments(of.given);
    return id;
}

template <class A, class B, transport Comm>
void run_plan(plan const& p, rows<A> from, rows<B> to, Comm& comm, caller here, run_for const& of) {
    char const* const by = of.by;
    identity const id = identity_of<B>(p, from.width(), of);
    if (!p.local) agree(comm, id, p, here, by);

    if (p.kind == flow::sums || !p.covers_target())
        for (index_t i = 0; i < to.count(); ++i) std::fill_n(to.row(i), to.width(), B{});
    if constexpr (requires(B sum, B const term) { sum += term; }) {
        if (p.kind == flow::sums) return exchange_sum(p, id, from, to, comm, here, by);
    }
    exchange_messages(p, id, from, parcels<std::byte>(p.receives, to), comm, here, by);
}
template <class A, class B, device_transport Comm>
void run_plan(plan const& p, rows<A> from, rows<B> to, Comm& comm, caller here, run_for const&) {
    comm.exchange(p, rows<B const>(from), to, here);
}

template <class A, class B, class Comm>
void exchange_rows(plan const& p, rows<A> from, rows<B> to, Comm& comm, caller here, run_for const& of = {}) {
    if constexpr (checked_element<B>::value) {
        char const* const by = of.by;
        require_own(by, "rank of the plan", p.rank, p.ranks(), comm.rank(), comm.ranks(), here);
        check_buffers(by, from, {p.source_rows, p.source_width}, to, {p.target_rows, p.target_width}, here);
        require(p.target_width != 0 || to.width() == from.width(), by, "width of the target", from.width(), to.width(),
                here);
        constexpr bool addable = requires(B sum, B const term) { sum += term; };
        require(addable || p.kind != flow::sums, by, "elements of a plan that sums",
                "a type with +=", std::string(type_name<B>()), here);
        run_plan(p, from, to, comm, here, of);
    }
}

} // namespace detail

/// Runs a plan: moves this rank's rows of `from` to where they belong in everybody's `to`.
///
/// `from` is (plan.source_rows, width), `to` is (plan.target_rows, width); they must not overlap. Every place of `to`
/// is written: with what the plan brings, or with 0 where it brings nothing. Bits are preserved, NaN payloads included;
/// a plan that sums adds in rank order.
/// Collective: every rank calls it with its own side of the same plan. Rows that stay are copied once.
///
/// Throws `cpx::error` before anything moves if a buffer does not fit, or if the ranks' plans differ (see `agree`);
/// later if a rank fails or misses the transport's deadline.
template <std::derived_from<plan> Plan, class A, class B, any_transport Comm>
void exchange(Plan const& p, rows<A> from, rows<B> to, Comm& comm, caller here = caller::here()) {
    constexpr bool fits = elements_of<A, B>;
    static_assert(fits, "cpx: exchange between elements of two types, or into elements that are const; give the target "
                        "the elements of the source");
    if constexpr (fits)
        if constexpr (detail::checked_element<B>::value) detail::exchange_rows(p, from, to, comm, here);
}

/// Runs a relayout between tensors whose types say how they are sharded, and in which memory; otherwise as above.
///
/// A tensor of another sharding than the plan's, or of another memory than the transport's ranks have, does not
/// compile; a sharding of the same type and another value throws, and so does another stream.
template <any_sharding From, any_sharding To, sharded_anywhere X, sharded_anywhere Y, any_transport Comm>
void exchange(relayout_plan<From, To> const& p, X const& from, Y&& to, Comm& comm, caller here = caller::here()) {
    constexpr bool source = detail::sharded_as<From, X>, target = detail::sharded_as<To, Y>;
    constexpr bool writes = detail::writes<Y>, there = detail::in_memory_of<Comm, X, Y>;
    static_assert(source || detail::never<element_of<X>>,
                  "cpx: exchange of a tensor that is not sharded as the plan's source; make the plan with "
                  "relayout(tensor.sharding(), ...)");
    static_assert(!source || target,
                  "cpx: exchange into a tensor that is not sharded as the plan's target; make the plan with "
                  "relayout(..., tensor.sharding(), ...)");
    static_assert(!source || !target || writes,
                  "cpx: exchange into a tensor that is const or ends with the call; give it a name");
    static_assert(!writes || there,
                  "cpx: exchange of tensors in another memory than that of the transport's ranks; make them "
                  "with make_tensor<T>(sharding, comm, width)");
    if constexpr (source && target && writes && there && detail::checked_element<element_of<X>>::value) {
        auto const x = from.view();
        auto const y = to.view();
        detail::require_place("exchange", "the source", x, p.from, p.rank, "the plan's", here);
        detail::require_place("exchange", "the target", y, p.to, p.rank, "the plan's", here);
        auto const& memory = rank_memory(comm);
        bool const there_too = detail::in_one_order(x.memory(), memory) && detail::in_one_order(y.memory(), memory);
        require(there_too, "exchange", "memory of the tensors", "the transport's, in its stream", "another", here);
        exchange(static_cast<plan const&>(p), x.data(), y.data(), comm, here);
    }
}

/// Runs a relayout into a tensor of its own, in the memory of `from`.
template <any_sharding From, any_sharding To, sharded_anywhere X, any_transport Comm>
tensor<element_of<X>, To, memory_of<X>> exchange(relayout_plan<From, To> const& p, X const& from, Comm& comm,
                                                 caller here = caller::here()) {
    index_t const width = p.target_width ? p.target_width : from.view().data().width();
    tensor<element_of<X>, To, memory_of<X>> to(p.to, p.rank, width, from.view().memory(), here);
    if constexpr (element<element_of<X>>) exchange(p, from, to, comm, here);
    return to;
}

/// Moves this rank's rows of `from` to another sharding: a relayout that is made for this one call. Collective.
template <sharded_anywhere X, any_sharding To, any_transport Comm>
tensor<element_of<X>, To, memory_of<X>> exchange(X const& from, To const& to, Comm& comm,
                                                 caller here = caller::here()) {
    auto const x = from.view();
    detail::require_own("exchange", "rank of the tensor", x.rank(), x.sharding().ranks(), comm.rank(), comm.ranks(),
                        here);
    return exchange(relayout(x.sharding(), to, x.rank(), here), x, comm, here);
}

template <class Plan, class X, class Y, class Comm>
detail::refused exchange(Plan const&, X const&, Y&&, Comm&, caller = caller::here()) {
    static_assert(detail::never<Plan, X, std::remove_cvref_t<Y>>,
                  "cpx: exchange(plan, from, to, comm) wants a relayout_plan and two tensors, or any plan and two "
                  "cpx::rows, and a cpx::transport; view memory as sharded, or as rows");
    return {};
}
template <class Plan, class X>
detail::refused exchange(Plan const&, X const&, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<Plan, X>,
                  "cpx: exchange(plan, x, comm) wants a relayout_plan, a tensor and a cpx::transport, and exchange(x, "
                  "sharding, comm) a tensor, a sharding and a cpx::transport; give other plans rows and a target");
    return {};
}
template <class Spelled = detail::any, class Plan = Spelled>
detail::refused exchange(Plan const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                         detail::any = {}) { // alone, with a list in braces or too many, of elements spelled out
    static_assert(detail::never<Plan>,
                  "cpx: exchange(plan, x, comm) wants a relayout_plan, a tensor and a cpx::transport, and exchange(x, "
                  "sharding, comm) a tensor, a sharding and a cpx::transport; give other plans rows and a target");
    return {};
}

} // namespace cpx
