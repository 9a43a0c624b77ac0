// SPDX-License-Identifier: Apache-2.0
// Gated delta rule over sequences on any sharding.
#pragma once

#include <cpx/layout/sharded.hpp>
#include <cpx/ops/eigen.hpp>
#include <cpx/ops/local/delta_rule.hpp>
#include <cpx/plan/carry.hpp>
#include <cpx/transport/exchange.hpp>

namespace cpx {

/// Heads of a gated delta rule, over all ranks. `value_heads` is a multiple of `key_heads`: value head h reads
/// q and k of head h / (value_heads / key_heads).
struct delta_rule_heads {
    index_t key_heads = 1, value_heads = 1;
    index_t key_dim = 1, value_dim = 1;
};

/// What the backward of a gated delta rule needs of its forward: the state before every segment of the rank and, with
/// `scan`, the maps M of the segments that lie between two others (rows as in `carry_plan::maps`).
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
/// alone. `saved`, unless null, takes what the backward needs.
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
    delta_rule_views(carry_plan<S> const& plan, delta_rule_heads const& heads)
        : plan_(plan), heads_(heads), keys_(plan.sharding.heads(plan.rank, heads.key_heads)),
          values_(plan.sharding.heads(plan.rank, heads.value_heads)) {}

    index_t state_width() const { return values_.size() * heads_.key_dim * heads_.value_dim; }
    index_t map_width() const { return values_.size() * heads_.key_dim * heads_.key_dim; }

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

    carry_plan<S> const& plan_;
    delta_rule_heads const& heads_;
    range keys_, values_;
};

/// One rank goes over the segments of a gated delta rule, head by head.
template <class T, any_sharding S>
class delta_rule_pass : public delta_rule_views<T, S> {
public:
    delta_rule_pass(carry_plan<S> const& plan, delta_rule_tensors<T, S> const& tensors, delta_rule_heads const& heads,
                    delta_rule_options const& options, caller here)
        : delta_rule_views<T, S>(plan, heads), t_(tensors), options_(options) {
        if (t_.saved)
            t_.saved->starts = zeros<T>("gated_delta_rule", {std::ssize(plan.segments), this->state_width()}, here);
    }

    /// Writes the outputs of segment `i`. `state`: its start state on entry, its end state on return.
    void forward(std::size_t i, T* state) const {
        segment const& s = this->segment_at(i);
        index_t const width = this->state_width(), dim = this->heads_.value_dim;
        if (t_.saved) std::copy_n(state, width, t_.saved->starts.data() + static_cast<index_t>(i) * width);
        for (index_t h = 0; h < this->values_.size(); ++h)
            delta_rule_forward<T>(this->key_columns(t_.q, s, h), this->key_columns(t_.k, s, h),
                                  this->columns(t_.v, s, h, dim), this->columns(t_.g, s, h, 1),
                                  this->columns(t_.beta, s, h, 1), s.token, options_, this->matrix_at(state, h, dim),
                                  this->columns(t_.o, s, h, dim));
    }

    /// Folds segment `i`: `end` is its end state from a zero start, `map` takes its M.
    void fold(std::size_t i, T* end, T* map) const {
        segment const& s = this->segment_at(i);
        index_t const dim = this->heads_.value_dim;
        for (index_t h = 0; h < this->values_.size(); ++h)
            delta_rule_fold<T>(this->key_columns(t_.k, s, h), this->columns(t_.v, s, h, dim),
                               this->columns(t_.g, s, h, 1), this->columns(t_.beta, s, h, 1), s.token, options_,
                               this->matrix_at(end, h, dim), this->matrix_at(map, h, this->heads_.key_dim));
    }

    void save_maps(std::vector<T> const& maps) const {
        if (t_.saved) t_.saved->maps = maps;
    }

    /// Computes `state = M state + E` for every head.
    void join(T const* map, T const* end, T* state) const {
        matrix<T> next;
        for (index_t h = 0; h < this->values_.size(); ++h) {
            auto const s = cpx::as_matrix(this->matrix_at(state, h, this->heads_.value_dim));
            next = cpx::as_matrix(this->matrix_at(map, h, this->heads_.key_dim)) * s +
                   cpx::as_matrix(this->matrix_at(end, h, this->heads_.value_dim));
            cpx::as_matrix(this->matrix_at(state, h, this->heads_.value_dim)) = next;
        }
    }

private:
    delta_rule_tensors<T, S> const& t_;
    delta_rule_options const& options_;
};

/// Throws unless the heads fit each other and there are sizes of their states.
inline void require_delta_heads(char const* where, delta_rule_heads const& heads, caller here) {
    require_groups(where, "value heads", heads.value_heads, "key heads", heads.key_heads, here);
    for (index_t const dim : {heads.key_dim, heads.value_dim})
        product(where, "value heads x key_dim x dim", {heads.value_heads, heads.key_dim, dim}, here);
}

/// Throws unless the tensors fit the plan and the heads.
template <class T, any_sharding S>
void check_delta_rule(char const* where, carry_plan<S> const& plan, delta_rule_tensors<T, S> const& t,
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

/// Goes over the segments level by level and hands each end state to the next segment's rank.
template <class T, any_sharding S, class Comm, class Start, class Finish>
void carry_states(serial, delta_rule_pass<T, S> const& pass, carry_plan<S> const& plan, Start start, Finish finish,
                  Comm& comm, caller here) {
    auto const width = pass.state_width();
    std::vector<T> states;
    for (std::size_t level = 0; level < plan.levels.size(); ++level) {
        auto const& members = plan.levels[level];
        if (level == 0) states = zeros<T>("gated_delta_rule", {std::ssize(members), width}, here);
        for (std::size_t i = 0; i < members.size(); ++i) {
            auto const member = static_cast<std::size_t>(members[i]);
            T* const state = states.data() + static_cast<index_t>(i) * width;
            if (level == 0) start(plan.segments[member], state);
            pass.forward(member, state);
            if (!plan.links[member].has_successor) finish(plan.segments[member], state);
        }
        if (level == plan.steps.size()) break;
        cpx::plan const& step = plan.steps[level];
        auto next = zeros<T>("gated_delta_rule", {step.target_rows, width}, here);
        exchange(step, rows<T const>(states.data(), step.source_rows, width),
                 rows<T>(next.data(), step.target_rows, width), comm, here);
        states = std::move(next);
    }
}

/// Folds the segments, gathers what comes before each of them, then goes over them all.
template <class T, any_sharding S, class Comm, class Start, class Finish>
void carry_states(scan, delta_rule_pass<T, S> const& pass, carry_plan<S> const& plan, Start start, Finish finish,
                  Comm& comm, caller here) {
    index_t const width = pass.state_width(), map_width = pass.map_width();
    auto const buffer = [&](index_t count, index_t columns) {
        return zeros<T>("gated_delta_rule", {count, columns}, here);
    };
    auto ends = buffer(plan.ends.source_rows, width), all_ends = buffer(plan.ends.target_rows, width);
    auto maps = buffer(plan.maps.source_rows, map_width), all_maps = buffer(plan.maps.target_rows, map_width);
    for (std::size_t i = 0; i < plan.segments.size(); ++i) {
        carry_link const& place = plan.links[i];
        T* const end = ends.data() + static_cast<index_t>(i) * width;
        if (place.level == 0) { // its start is known: no need to fold it
            start(plan.segments[i], end);
            pass.forward(i, end);
            if (!place.has_successor) finish(plan.segments[i], end);
        } else if (place.has_successor) {
            pass.fold(i, end, maps.data() + place.map_row * map_width);
        }
    }
    exchange(plan.ends, rows<T const>(ends.data(), plan.ends.source_rows, width),
             rows<T>(all_ends.data(), plan.ends.target_rows, width), comm, here);
    exchange(plan.maps, rows<T const>(maps.data(), plan.maps.source_rows, map_width),
             rows<T>(all_maps.data(), plan.maps.target_rows, map_width), comm, here);
    pass.save_maps(maps);
    auto state = buffer(1, width);
    for (std::size_t i = 0; i < plan.segments.size(); ++i) {
        carry_link const& place = plan.links[i];
        if (place.level == 0) continue;
        T const* end = all_ends.data() + place.ends * width;
        T const* map = all_maps.data() + place.maps * map_width;
        std::copy_n(end, width, state.data());
        for (index_t level = 1; level < place.level; ++level, map += map_width)
            pass.join(map, end += width, state.data());
        pass.forward(i, state.data());
        if (!place.has_successor) finish(plan.segments[i], state.data());
    }
}

} // namespace detail

/// Computes the gated delta rule in place on any sharding,
///
///     S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = scale S_t^T q_t,    a_t = exp(g_t).
///
/// `plan` is `carry(sharding, rank)`; `How` is `serial` or `scan`, see there and `is_exact`.
/// Collective. Communication: `serial`, one state (value heads * key_dim * value_dim) a cut; `scan`, for each segment
/// one state, and a map (value heads * key_dim^2) if it lies between two others, to each rank with a later segment.
/// Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, arXiv 2412.06464, eq. 10.
///
/// Throws `cpx::error` on shapes or shardings that do not fit, and what `exchange` throws.
template <carry_kind How, class T, any_sharding S, transport Comm>
void gated_delta_rule(How how, carry_plan<S> const& plan, delta_rule_tensors<T, S> const& t,
                      delta_rule_heads const& heads, delta_rule_options const& options, Comm& comm,
                      caller here = caller::here()) {
    char const* const where = "gated_delta_rule";
    detail::check_delta_rule(where, plan, t, heads, options, here);
    detail::delta_rule_pass<T, S> const pass(plan, t, heads, options, here);
    index_t const sequences = plan.sharding.batch().sequences(), width = pass.state_width();
    if (t.initial.data()) detail::require_shape(where, "initial", t.initial, sequences, width, here);
    if (t.final.data()) detail::require_shape(where, "final", t.final, sequences, width, here);
    auto const start_of = [&](index_t sequence, T* state) {
        if (t.initial.data())
            std::copy_n(t.initial.row(sequence), width, state);
        else
            std::fill_n(state, width, T{});
    };
    auto const start = [&](segment const& s, T* state) { start_of(s.sequence, state); };
    auto const finish = [&](segment const& s, T const* state) {
        if (t.final.data()) std::copy_n(state, width, t.final.row(s.sequence));
    };
    detail::carry_states(how, pass, plan, start, finish, comm, here);
    for (index_t s = 0; t.final.data() && s < sequences; ++s)
        if (plan.sharding.batch().length(s) == 0 && (S::every_row || plan.rank == 0)) start_of(s, t.final.row(s));
}

} // namespace cpx
