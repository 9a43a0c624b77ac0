// SPDX-License-Identifier: Apache-2.0
// Gradients of heads that several other heads read.
#pragma once

#include <cpx/layout/tensor.hpp>
#include <cpx/ops/local/shape.hpp>
#include <cpx/transport/exchange.hpp>

#include <algorithm>
#include <span>
#include <type_traits>

namespace cpx {

namespace detail {

/// Holds the readers that `S` holds, or all readers of the shared heads that it holds.
template <any_sharding S>
class reader_sharding {
public:
    static constexpr bool every_row = S::every_row;
    static constexpr int static_ranks = cpx::static_ranks<S>;

    reader_sharding(S const& base, index_t shared, std::vector<section> sections, bool all)
        : base_(base), shared_(shared), sections_(std::move(sections)), all_(all) {}

    int ranks() const { return base_.ranks(); }
    thd const& batch() const { return base_.batch(); }
    index_t rows(int rank) const { return base_.rows(rank); }
    std::span<section const> sections() const { return sections_; }
    range heads(int rank, index_t readers) const {
        if (!all_) return base_.heads(rank, readers);
        range const held = base_.heads(rank, shared_);
        return {held.first * (readers / shared_), held.last * (readers / shared_)};
    }
    template <class F>
    void for_each_piece(int rank, F&& f) const {
        base_.for_each_piece(rank, std::forward<F>(f));
    }
    template <class F>
    void for_each_holder(range rows, index_t& hint, F&& f) const {
        base_.for_each_holder(rows, hint, std::forward<F>(f));
    }
    friend bool operator==(reader_sharding const& a, reader_sharding const& b) {
        return a.base_ == b.base_ && a.shared_ == b.shared_ && a.sections_ == b.sections_ && a.all_ == b.all_;
    }

private:
    S base_;
    index_t shared_;
    std::vector<section> sections_;
    bool all_;
};

} // namespace detail

namespace detail {

/// Returns whether readers of one shared head are on several ranks.
template <any_sharding S>
bool groups_split(S const& sharding, index_t shared, index_t readers) {
    index_t const group = readers / shared;
    bool split = false;
    for (int rank = 0; S::every_row && rank < sharding.ranks(); ++rank) {
        range const held = sharding.heads(rank, readers);
        split |= held.first % group != 0 || held.last % group != 0;
    }
    return split;
}

} // namespace detail

/// Writes `sum = sum over the readers of a head`, readers ascending: terms: (rows, heads * group * width), sum: (rows,
/// heads * width). Of the host; `cuda::add_readers` takes a device's memory in its place.
template <class T>
void add_readers(host_memory, rows<T const> terms, index_t group, index_t width, rows<T> sum, caller = caller::here()) {
    for (index_t row = 0; row < sum.count(); ++row)
        for (index_t head = 0; head < sum.width() / width; ++head) {
            T const* const from = terms.row(row) + head * group * width;
            T* const to = sum.row(row) + head * width;
            std::copy_n(from, width, to);
            for (index_t reader = 1; reader < group; ++reader)
                for (index_t column = 0; column < width; ++column) to[column] += from[reader * width + column];
        }
}
template <class T = void>
detail::refused add_readers(host_memory, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                            detail::any = {}) {
    static_assert(detail::never<T>, "cpx: add_readers(memory, terms, group, width, sum) wants rows of T const, two "
                                    "numbers and rows of T; take rows with view() or data()");
    return {};
}

/// Adds what the readers of shared heads contribute to them, such as the query heads of a group to the keys.
///
/// `readers` heads of `width` read `shared` heads, readers / shared neighbours each. `terms`: (rows, n * readers held *
/// width), one term a reader for each of n tensors; `sums[i]`: (rows, shared heads held * width), written.
/// Every rank that holds a shared head gets its whole sum, readers ascending: bitwise the same on every sharding.
/// Collective, if a group of readers is split between ranks: one exchange; else nothing moves.
///
/// Throws `cpx::error` on heads or shapes that do not fit, and what `exchange` throws. Errors begin with `where`.
template <class T, any_sharding S, any_transport Comm>
void sum_readers(S const& sharding, index_t shared, index_t readers, index_t width,
                 rows<typename rank_memory_of<Comm>::template sum<T> const> terms,
                 std::type_identity_t<std::span<rows<T> const>> sums, Comm& comm, caller here = caller::here(),
                 char const* where = "sum_readers") {
    using sum = typename rank_memory_of<Comm>::template sum<T>;
    int const rank = detail::rank_in(where, sharding, comm, here);
    detail::require_groups(where, "readers", readers, "shared heads", shared, here);
    index_t const tensors = std::ssize(sums);
    detail::product(where, "readers x width", {tensors, readers, width}, here);
    index_t const group = readers / shared;
    range held = sharding.heads(rank, readers);
    range const own = sharding.heads(rank, shared);
    index_t const count = sharding.rows(rank);
    detail::require_shape(where, "terms", terms, count, tensors * held.size() * width, here);
    for (rows<T> const& to : sums) detail::require_shape(where, "sums", to, count, own.size() * width, here);
    std::vector<detail::operand> written;
    for (rows<T> const& to : sums) written.push_back({"sums", to});
    detail::operand const read("terms", terms);
    detail::require_apart(where, written, std::array{read}, here);
    written.push_back(read);
    auto const memory = rank_memory(comm);
    require_there(memory, where, written, here);
    auto whole = memory.template zeros<sum>(where, {0}, here);
    if (detail::groups_split(sharding, shared, readers)) {
        std::vector<section> const sections(sums.size(), section{readers, width});
        using R = detail::reader_sharding<S>;
        auto const plan =
            relayout(R(sharding, shared, sections, false), R(sharding, shared, sections, true), rank, here);
        whole = memory.template zeros<sum>(where, {plan.target_rows, plan.target_width}, here);
        rows<sum> const all(whole.data(), plan.target_rows, plan.target_width);
        detail::exchange_rows(plan, terms, all, comm, here, where);
        terms = all;
        held = {own.first * group, own.last * group};
    }
    for (std::size_t i = 0; i < sums.size() && width > 0; ++i) {
        index_t const first = static_cast<index_t>(i) * held.size() + own.first * group - held.first;
        add_readers(memory, terms.columns(first * width, own.size() * group * width), group, width, sums[i], here);
    }
}
template <class T = void, class X = detail::any>
detail::refused sum_readers(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                            detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: sum_readers<T>(sharding, shared, readers, width, terms, sums, comm) "
                                    "wants rows of terms, not const, a list of rows of sums and a cpx::transport");
    return {};
}

} // namespace cpx
