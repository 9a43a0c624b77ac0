// SPDX-License-Identifier: Apache-2.0
// Gated delta rule over sequences on any sharding.
#pragma once

#include <cpx/layout/sharded.hpp>
#include <cpx/ops/carried_states.hpp>
#include <cpx/ops/local/delta_rule.hpp>

#include <array>
#include <concepts>

namespace cpx {

/// Heads of a gated delta rule, over all ranks. `value_heads` is a multiple of `key_heads`: value head h reads
/// q and k of head h / (value_heads / key_heads).
struct delta_rule_heads {
    index_t key_heads = 1, value_heads = 1;
    index_t key_dim = 1, value_dim = 1;
};

/// What the backward of a gated delta rule needs of its forward: the state before every segment of the rank and, with
/// `scan`, the maps M of the segments that lie between two others (rows `carry_link::map_row`).
template <class T>
struct delta_rule_saved {
    std::vector<T> starts, maps;
};

/// The tensors of a gated delta rule on one rank, all of one sharding; widths are those of the heads that the rank
/// holds.
///
/// q, k: (rows, key heads * key_dim), v, o: (rows, value heads * value_dim), g: log decay, beta: (rows, value heads).
/// States: (sequences, value heads * key_dim * value_dim), or empty rows for none. `initial` is read on the rank where
/// a sequence begins; `final` is written on the rank where it ends (rank 0 if it has no tokens) and elsewhere left
/// alone; they may be the same. `saved`, unless null, takes what the backward needs.
template <class T, any_sharding S>
struct delta_rule_tensors {
    sharded<T const, S> q, k, v, g, beta;
    sharded<T, S> o;
    rows<T const> initial = {};
    rows<T> final = {};
    delta_rule_saved<T>* saved = nullptr;
};

namespace detail {

/// The columns and states of one head, and how wide they are together on this rank.
template <class T, any_sharding S>
class delta_rule_views {
public:
    delta_rule_views(carry_chains<S> const& plan, delta_rule_heads const& heads)
        : plan_(plan), heads_(heads), keys_(plan.sharding.heads(plan.rank, heads.key_heads)),
          values_(plan.sharding.heads(plan.rank, heads.value_heads)) {}

    state_shape shape() const { return {values_.size(), heads_.key_dim, heads_.value_dim}; }

protected:
    segment const& segment_at(std::size_t i) const { return plan_.segments[i]; }

    /// Returns head `head` of states of (key_dim, width) a head.
    template <class A>
    rows<A> matrix_at(A* states, index_t head, index_t width) const {
        return {states + head * heads_.key_dim * width, heads_.key_dim, width};
    }
    template <class A>
    rows<A> columns(sharded<A, S> const& x, segment const& s, index_t head, index_t width) const {
        return x.data().sub(s.row, s.count).columns(head * width, width);
    }
    /// Returns the columns of q or k that value head `value_head` reads.
    template <class A>
    rows<A> key_columns(sharded<A, S> const& x, segment const& s, index_t value_head) const {
        index_t const group = heads_.value_heads / heads_.key_heads;
        return columns(x, s, (values_.first + value_head) / group - keys_.first, heads_.key_dim);
    }

    carry_chains<S> const& plan_;
    delta_rule_heads const& heads_;
    range keys_, values_;
};

/// One rank goes over the segments of a gated delta rule, head by head.
template <class T, any_sharding S>
class delta_rule_pass : public delta_rule_views<T, S> {
public:
    delta_rule_pass(carry_chains<S> const& plan, delta_rule_tensors<T, S> const& tensors, delta_rule_heads const& heads,
                    delta_rule_options const& options, caller here)
        : delta_rule_views<T, S>(plan, heads), t_(tensors), options_(options) {
        if (t_.saved)
            t_.saved->starts =
                zeros<T>("gated_delta_rule", {std::ssize(plan.segments), this->shape().state_width()}, here);
    }

    void first(std::size_t i, T* state) const { start(this->segment_at(i).sequence, state); }
    void last(std::size_t i, T const* state) const {
        if (t_.final.data()) std::copy_n(state, t_.final.width(), t_.final.row(this->segment_at(i).sequence));
    }
    /// Sets the state before the first token of a sequence.
    void start(index_t sequence, T* state) const {
        if (t_.initial.data())
            std::copy_n(t_.initial.row(sequence), t_.initial.width(), state);
        else
            std::fill_n(state, this->shape().state_width(), T{});
    }

    /// Writes the outputs of segment `i`.
    void over(std::size_t i, T* state) const {
        segment const& s = this->segment_at(i);
        index_t const width = this->shape().state_width(), dim = this->heads_.value_dim;
        if (t_.saved) std::copy_n(state, width, t_.saved->starts.data() + static_cast<index_t>(i) * width);
        for (index_t h = 0; h < this->values_.size(); ++h)
            delta_rule_forward<T>(this->key_columns(t_.q, s, h), this->key_columns(t_.k, s, h),
                                  this->columns(t_.v, s, h, dim), this->columns(t_.g, s, h, 1),
                                  this->columns(t_.beta, s, h, 1), s.token, options_, this->matrix_at(state, h, dim),
                                  this->columns(t_.o, s, h, dim));
    }

    void fold(std::size_t i, T* end, T* map) const {
        segment const& s = this->segment_at(i);
        index_t const dim = this->heads_.value_dim;
        for (index_t h = 0; h < this->values_.size(); ++h)
            delta_rule_fold<T>(this->key_columns(t_.k, s, h), this->columns(t_.v, s, h, dim),
                               this->columns(t_.g, s, h, 1), this->columns(t_.beta, s, h, 1), s.token, options_,
                               this->matrix_at(end, h, dim), this->matrix_at(map, h, this->heads_.key_dim));
    }

private:
    delta_rule_tensors<T, S> const& t_;
    delta_rule_options const& options_;
};

template <class T, any_sharding S>
std::array<operand, 5> delta_rule_operands(delta_rule_tensors<T, S> const& t) {
    return {{{"q", t.q.data()}, {"k", t.k.data()}, {"v", t.v.data()}, {"g", t.g.data()}, {"beta", t.beta.data()}}};
}

/// Throws unless the heads fit each other and there are sizes of their states.
inline void require_delta_heads(char const* where, delta_rule_heads const& heads, caller here) {
    require_groups(where, "value heads", heads.value_heads, "key heads", heads.key_heads, here);
    for (index_t const dim : {heads.key_dim, heads.value_dim})
        product(where, "value heads x key_dim x dim", {heads.value_heads, heads.key_dim, dim}, here);
}

/// Throws unless the tensors fit the plan and the heads.
template <class T, any_sharding S>
void check_delta_rule(char const* where, carry_chains<S> const& plan, delta_rule_tensors<T, S> const& t,
                      delta_rule_heads const& heads, delta_rule_options const& options, caller here) {
    require_delta_heads(where, heads, here);
    require(options.chunk >= 1, where, "chunk", "at least 1", options.chunk, here);
    for (auto const* x : {&t.q, &t.k, &t.v, &t.g, &t.beta})
        require(x->sharding() == plan.sharding, where, "sharding of an input", "the plan's", "another", here);
    require(t.o.sharding() == plan.sharding, where, "sharding of o", "the plan's", "another", here);
    index_t const rows_held = plan.segments.empty() ? 0 : plan.segments.back().row + plan.segments.back().count;
    index_t const keys = plan.sharding.heads(plan.rank, heads.key_heads).size();
    index_t const values = plan.sharding.heads(plan.rank, heads.value_heads).size();
    require_shape(where, "q", t.q.data(), rows_held, keys * heads.key_dim, here);
    require_shape(where, "k", t.k.data(), rows_held, keys * heads.key_dim, here);
    require_shape(where, "v", t.v.data(), rows_held, values * heads.value_dim, here);
    require_shape(where, "g", t.g.data(), rows_held, values, here);
    require_shape(where, "beta", t.beta.data(), rows_held, values, here);
    require_shape(where, "o", t.o.data(), rows_held, values * heads.value_dim, here);
}

template <carry_kind How, class T, any_sharding S, class Comm>
void run_delta_rule(carry_plan<How, S> const& plan, delta_rule_tensors<T, S> const& t, delta_rule_heads const& heads,
                    delta_rule_options const& options, Comm& comm, caller here) {
    char const* const where = "gated_delta_rule";
    check_delta_rule(where, plan, t, heads, options, here);
    delta_rule_pass<T, S> const pass(plan, t, heads, options, here);
    index_t const sequences = plan.sharding.batch().sequences(), width = pass.shape().state_width();
    if (t.initial.data()) require_shape(where, "initial", t.initial, sequences, width, here);
    if (t.final.data()) require_shape(where, "final", t.final, sequences, width, here);
    operand const o("o", t.o.data()), initial("initial", t.initial), final("final", t.final);
    require_apart(where, std::array{o, final}, delta_rule_operands(t), here);
    require_apart(where, {o}, {initial}, here);
    require_apart(where, {final}, {initial}, here, in_place::yes);
    std::vector<T> maps;
    carry_states(where, plan, side::before, pass, t.saved ? t.saved->maps : maps, comm, here);
    for (index_t s = 0; t.final.data() && s < sequences; ++s)
        if (plan.sharding.batch().length(s) == 0 && (S::every_row || plan.rank == 0)) pass.start(s, t.final.row(s));
}

} // namespace detail

/// Computes the gated delta rule in place on any sharding,
///
///     S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = scale S_t^T q_t,    a_t = exp(g_t).
///
/// `plan` is `carry<serial>(sharding, rank)` or `carry<scan>(sharding, rank)`, see there and `is_exact`.
/// Collective. Communication: `serial`, one state (value heads * key_dim * value_dim) a cut, one after the other;
/// `scan`, to a segment of level l floor(log2 l) + 1 states and one map (value heads * key_dim^2) fewer.
/// Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, arXiv 2412.06464, eq. 10.
///
/// Throws `cpx::error` on shapes or shardings that do not fit and on overlapping memory, and what `exchange`
/// throws.
template <carry_kind How, any_sharding S, class T, any_sharding X, transport Comm>
void gated_delta_rule(carry_plan<How, S> const& plan, delta_rule_tensors<T, X> const& t, delta_rule_heads const& heads,
                      delta_rule_options const& options, Comm& comm, caller here = caller::here()) {
    constexpr bool fits = std::same_as<X, S>;
    static_assert(fits, "cpx: gated_delta_rule of tensors that are not sharded as the plan; make the plan with "
                        "carry(q.sharding(), ...)");
    if constexpr (fits) detail::run_delta_rule(plan, t, heads, options, comm, here);
}

} // namespace cpx
