// SPDX-License-Identifier: Apache-2.0
// Rows by the experts that they chose, and the projections of experts.
#pragma once

#include <cpx/core/row_buffer.hpp>
#include <cpx/core/row_list.hpp>
#include <cpx/ops/local/linear.hpp>
#include <cpx/ops/local/shape.hpp>

#include <algorithm>
#include <concepts>
#include <span>
#include <string>
#include <vector>

namespace cpx {

namespace detail {

inline void require_expert(char const* where, index_t expert, index_t experts, caller here) {
    if (expert < 0 || expert >= experts)
        require(false, where, "chosen expert", "0 to " + std::to_string(experts - 1), expert, here);
}

/// Throws `cpx::error` unless `x` has `width` columns of every token, or of every choice of it.
template <class T>
void require_choices(char const* where, rows<T const> x, index_t tokens, index_t choices, index_t width, caller here) {
    require_shape(where, "x", x, tokens, x.width() == width ? width : choices * width, here);
}

} // namespace detail

/// The rows of tokens, one for each expert that a token chose: experts ascending, and of one expert the tokens.
///
/// Where all tokens and all experts are one rank's; `expert_exchange` is the same over ranks. Rows are in the memory M,
/// the lists of them are made on the host.
template <any_memory M>
class expert_rows_in {
public:
    expert_rows_in() = default;

    /// chosen: (tokens, choices), experts from 0. places: where the tokens stand in the batch; none: in this order.
    ///
    /// Throws `cpx::error` if a choice is no expert. Cost: O(choices + experts).
    expert_rows_in(rows<index_t const> chosen, index_t experts, std::span<index_t const> places = {},
                   caller here = caller::here())
        requires std::same_as<M, host_memory>
        : expert_rows_in(M(), chosen, experts, places, here) {}
    /// The same of rows in a memory; `chosen` is on the host.
    expert_rows_in(M const& memory, rows<index_t const> chosen, index_t experts, std::span<index_t const> places,
                   caller here = caller::here(), char const* where = "expert_rows")
        : memory_(memory), tokens_(chosen.count()), width_(chosen.width()) {
        require(experts > 0, where, "experts", "at least 1", experts, here);
        require(places.empty() || std::ssize(places) == tokens_, where, "places", tokens_, places.size(), here);
        begins_ = detail::zeros<index_t>(where, {experts + 1}, here);
        auto const begin = [&](index_t expert) -> index_t& { return begins_[static_cast<std::size_t>(expert)]; };
        for (index_t token = 0; token < tokens_; ++token)
            for (index_t s = 0; s < width_; ++s) {
                index_t const expert = chosen(token, s);
                detail::require_expert(where, expert, experts, here);
                ++begin(expert + 1);
            }
        for (index_t expert = 0; expert < experts; ++expert) begin(expert + 1) += begin(expert);
        auto const count = static_cast<std::size_t>(begins_.back());
        std::vector<index_t> lists(2 * count);
        places_.resize(count);
        auto next = begins_;
        for (index_t token = 0; token < tokens_; ++token)
            for (index_t s = 0; s < width_; ++s) {
                auto const row = static_cast<std::size_t>(next[static_cast<std::size_t>(chosen(token, s))]++);
                lists[row] = token;
                lists[count + row] = token * width_ + s;
                places_[row] = places.empty() ? token : places[static_cast<std::size_t>(token)];
            }
        lists_ = {memory, std::ssize(lists), 1, here};
        memory.write(lists_.view().data(), std::span<index_t const>(lists), here);
    }
    template <class X = void>
    explicit expert_rows_in(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>,
                      "cpx: expert_rows(chosen, experts) wants rows of index_t, the number of experts and perhaps "
                      "places; take the rows of a row_buffer with view(), of a tensor with data()");
    }

    index_t experts() const { return std::ssize(begins_) - 1; }
    /// Returns the experts whose rows these are.
    range own() const { return {0, experts()}; }
    /// Returns where the rows of each own expert begin, and behind the last one's.
    std::span<index_t const> begins() const { return begins_; }
    index_t count() const { return std::ssize(places_); }
    index_t tokens() const { return tokens_; }
    index_t choices() const { return width_; }
    /// Returns the place in the batch of every row's token.
    std::span<index_t const> places() const { return places_; }
    M const& memory() const { return memory_; }

    /// Copies `width` columns to the rows of each choice. x: (tokens, width), the same for all choices of a token, or
    /// (tokens, choices * width), choice after choice and token after token.
    template <class T>
    row_buffer<T, M> to_experts(rows<T const> x, index_t width, caller here = caller::here()) const {
        bool const shared = x.width() == width;
        detail::require_choices("expert_rows::to_experts", x, tokens_, width_, width, here);
        row_buffer<T, M> to(memory_, count(), width, here);
        gather_rows<T>(memory_, shared ? x : of_choices("x", x, width, here), list(!shared), to.view(), here);
        return to;
    }
    /// Copies the rows of each choice to its columns. x: (count(), width), y: (tokens, choices * width), token after
    /// token.
    template <class T>
    void to_tokens(rows<T const> x, rows<T> y, caller here = caller::here()) const {
        char const* const where = "expert_rows::to_tokens";
        detail::require_shape(where, "x", x, count(), x.width(), here);
        detail::require_shape(where, "y", y, tokens_, width_ * x.width(), here);
        detail::require_apart(where, {{"y", y}}, {{"x", x}}, here);
        scatter_rows<T>(memory_, x, list(true), of_choices("y", y, x.width(), here), here);
    }

    template <class T = void>
    detail::refused to_experts(detail::any = {}, detail::any = {}, detail::any = {}) const {
        static_assert(detail::never<T>, "cpx: expert_rows::to_experts(x, width) wants rows of T const, or of T as "
                                        "to_experts<T>(x, width), and a number; take rows with view() or data()");
        return {};
    }
    template <class T = detail::refused, class... X>
        requires(!detail::takes<void(rows<T const>, rows<T>), X...>)
    detail::refused to_tokens(X&&...) const {
        static_assert(detail::never<X...>, "cpx: expert_rows::to_tokens<T>(x, y) wants rows of T, not const where they "
                                           "are written; take rows with view() or data()");
        return {};
    }

private:
    /// Returns a row for each choice of each token.
    template <class T>
    rows<T> of_choices(char const* name, rows<T> x, index_t width, caller here) const {
        require(
            x.count() < 2 || x.stride() == x.width(), "expert_rows", (std::string("stride of ") + name).c_str(),
            [&] { return "its width, " + std::to_string(x.width()); }, x.stride(), here);
        return {x.data(), tokens_ * width_, width};
    }
    /// Returns of every row the token, or the choice, numbered through all tokens.
    std::span<index_t const> list(bool of_choice) const {
        auto const size = places_.size();
        return {lists_.view().data() + (of_choice ? count() : 0), size};
    }

    M memory_{};
    index_t tokens_ = 0, width_ = 0;
    std::vector<index_t> begins_{0}, places_;
    row_buffer<index_t, M> lists_; ///< see `list`
};

/// What tells which rows are an expert's: `expert_rows`, or an `expert_exchange`.
template <class X>
concept rows_of_experts = requires(X const& at) {
    { at.experts() } -> std::same_as<index_t>;
    { at.own() } -> std::same_as<range>;
    { at.begins() } -> std::same_as<std::span<index_t const>>;
    { at.places() } -> std::same_as<std::span<index_t const>>;
};

/// The rows of experts on the host.
using expert_rows = expert_rows_in<host_memory>;

namespace detail {

/// Throws `cpx::error` unless `begins` are those of experts that have `count` rows.
inline void require_begins(char const* where, std::span<index_t const> begins, index_t count, caller here) {
    bool const ascend = !begins.empty() && begins.front() == 0 && std::ranges::is_sorted(begins);
    require(ascend, where, "begins", "ascending numbers from 0", "others", here);
    require(begins.back() == count, where, "rows", begins.back(), count, here);
}

/// Calls `f(expert, first row, rows)` for every expert that has rows.
template <class F>
void for_each_expert(std::span<index_t const> begins, F f) {
    for (std::size_t e = 0; e + 1 < begins.size(); ++e)
        if (begins[e] < begins[e + 1]) f(static_cast<index_t>(e), begins[e], begins[e + 1] - begins[e]);
}

/// As `expert_linear`, `expert_linear_backward_input` and `expert_linear_backward_weight`, of arguments that fit.
template <class T>
void project_experts(std::span<index_t const> begins, rows<T const> x, rows<T const> weight, rows<T> y) {
    for_each_expert(begins, [&](index_t expert, index_t row, index_t count) {
        project<T>(x.sub(row, count), weight.sub(expert * y.width(), y.width()), y.sub(row, count));
    });
}
template <class T>
void project_experts_backward_input(std::span<index_t const> begins, rows<T const> dy, rows<T const> weight,
                                    rows<T> dx) {
    for_each_expert(begins, [&](index_t expert, index_t row, index_t count) {
        project_backward_input<T>(dy.sub(row, count), weight.sub(expert * dy.width(), dy.width()), dx.sub(row, count));
    });
}
template <class T>
void project_experts_backward_weight(std::span<index_t const> begins, rows<T const> dy, rows<T const> x,
                                     rows<T> dweight) {
    for_each_expert(begins, [&](index_t expert, index_t row, index_t count) {
        project_backward_weight<T>(dy.sub(row, count), x.sub(row, count), dweight.sub(expert * dy.width(), dy.width()));
    });
}

} // namespace detail

/// Computes `y = W_e x` for the rows of every expert e.
///
/// begins: where the rows of each expert begin, and behind the last one's; x: (rows, in); weight: (experts * out, in),
/// expert after expert; y: (rows, out), not overlapping x. A row of y is a function of its row of x and its expert's
/// weight alone, bit for bit. Cost: rows * out * in multiplications; weights of experts without rows are not read.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void expert_linear(std::span<index_t const> begins, rows<T const> x, rows<T const> weight, rows<T> y,
                   caller here = caller::here()) {
    char const* const where = "expert_linear";
    index_t const out = y.width();
    detail::require_shape(where, "x", x, x.count(), weight.width(), here);
    detail::require_shape(where, "y", y, x.count(), out, here);
    detail::require_shape(where, "weight", weight, (std::ssize(begins) - 1) * out, weight.width(), here);
    detail::require_apart(where, {{"y", y}}, {{"x", x}, {"weight", weight}}, here);
    detail::require_begins(where, begins, x.count(), here);
    detail::project_experts(begins, x, weight, y);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(std::span<index_t const>, rows<T const>, rows<T const>, rows<T>), X...>)
detail::refused expert_linear(X&&...) {
    static_assert(detail::never<X...>, "cpx: expert_linear<T>(begins, x, weight, y) wants begins() and rows of "
                                       "T, not const where they are written; take rows with view() or data()");
    return {};
}

/// Computes `dx = dy W_e` for the rows of every expert, the gradient of the input of `expert_linear`.
///
/// begins, weight: as there; dy: (rows, out), dx: (rows, in), not overlapping dy. A row of dx is a function of its row
/// of dy and its expert's weight alone, bit for bit.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void expert_linear_backward_input(std::span<index_t const> begins, rows<T const> dy, rows<T const> weight, rows<T> dx,
                                  caller here = caller::here()) {
    char const* const where = "expert_linear_backward_input";
    index_t const out = dy.width();
    detail::require_shape(where, "dy", dy, dy.count(), out, here);
    detail::require_shape(where, "dx", dx, dy.count(), weight.width(), here);
    detail::require_shape(where, "weight", weight, (std::ssize(begins) - 1) * out, weight.width(), here);
    detail::require_apart(where, {{"dx", dx}}, {{"dy", dy}, {"weight", weight}}, here);
    detail::require_begins(where, begins, dy.count(), here);
    detail::project_experts_backward_input(begins, dy, weight, dx);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(std::span<index_t const>, rows<T const>, rows<T const>, rows<T>), X...>)
detail::refused expert_linear_backward_input(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: expert_linear_backward_input<T>(begins, dy, weight, dx) wants begins() and rows of T, not "
                  "const where they are written; take rows with view() or data()");
    return {};
}

/// Computes `dW_e += dy^T x` over the rows of every expert, the gradient of the weight of `expert_linear`.
///
/// begins: as there; dy: (rows, out), x: (rows, in), dweight: (experts * out, in). The rows of an expert are added one
/// after the other, so they may be split between calls, in order, without changing a bit.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void expert_linear_backward_weight(std::span<index_t const> begins, rows<T const> dy, rows<T const> x, rows<T> dweight,
                                   caller here = caller::here()) {
    char const* const where = "expert_linear_backward_weight";
    index_t const out = dy.width();
    detail::require_shape(where, "dy", dy, dy.count(), out, here);
    detail::require_shape(where, "x", x, dy.count(), dweight.width(), here);
    detail::require_shape(where, "dweight", dweight, (std::ssize(begins) - 1) * out, dweight.width(), here);
    detail::require_apart(where, {{"dweight", dweight}}, {{"dy", dy}, {"x", x}}, here);
    detail::require_begins(where, begins, dy.count(), here);
    detail::project_experts_backward_weight(begins, dy, x, dweight);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(std::span<index_t const>, rows<T const>, rows<T const>, rows<T>), X...>)
detail::refused expert_linear_backward_weight(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: expert_linear_backward_weight<T>(begins, dy, x, dweight) wants begins() and rows of T, not "
                  "const where they are written; take rows with view() or data()");
    return {};
}

} // namespace cpx
