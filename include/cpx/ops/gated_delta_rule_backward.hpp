// SPDX-License-Identifier: Apache-2.0
// Backward of the gated delta rule over sequences on any sharding.
#pragma once

#include <cpx/ops/gated_delta_rule.hpp>
#include <cpx/ops/local/delta_rule_backward.hpp>
#include <cpx/ops/shared_heads.hpp>

namespace cpx {

/// What goes into and comes out of the backward of a gated delta rule, shaped and sharded as in `delta_rule_tensors`.
///
/// dout: the gradient of o; dfinal: of the final states, read on the rank where a sequence ends, or empty rows.
/// dq, dk, dv, dg, dbeta are written; dinitial, unless empty, on the rank where a sequence begins, and may be dfinal.
/// On `head_sharded`, every rank that holds a head gets its whole gradient; dout is whole on every rank that holds its
/// head, too.
template <class T, any_sharding S>
struct delta_rule_gradient_tensors {
    sharded<T const, S> dout;
    sharded<T, S> dq, dk, dv, dg, dbeta;
    rows<T const> dfinal = {};
    rows<T> dinitial = {};
};

namespace detail {

/// One rank goes over the segments of the backward, each from its end to its start, head by head.
template <class T, any_sharding S>
class delta_rule_backward_pass : public delta_rule_views<T, S> {
public:
    delta_rule_backward_pass(carry_chains<S> const& plan, delta_rule_tensors<T, S> const& t,
                             delta_rule_gradient_tensors<T, S> const& to, delta_rule_heads const& heads,
                             delta_rule_options const& options, caller here)
        : delta_rule_views<T, S>(plan, heads), t_(t), to_(to), options_(options),
          dq_dk_(zeros<T>("gated_delta_rule_backward", {t.q.data().count(), 2, this->values_.size(), heads.key_dim},
                          here)) {}

    void first(std::size_t i, T* dstate) const { start(this->segment_at(i).sequence, dstate); }
    void last(std::size_t i, T const* dstate) const {
        if (to_.dinitial.data())
            std::copy_n(dstate, to_.dinitial.width(), to_.dinitial.row(this->segment_at(i).sequence));
    }
    /// Sets the gradient of the state after the last token of a sequence.
    void start(index_t sequence, T* dstate) const {
        if (to_.dfinal.data())
            std::copy_n(to_.dfinal.row(sequence), to_.dfinal.width(), dstate);
        else
            std::fill_n(dstate, this->shape().state_width(), T{});
    }

    /// Writes the gradients of segment `i`.
    void over(std::size_t i, T* dstate) {
        segment const& s = this->segment_at(i);
        index_t const dim = this->heads_.value_dim;
        T const* const start = t_.saved->starts.data() + static_cast<index_t>(i) * this->shape().state_width();
        index_t const keys = this->heads_.key_dim, values = this->values_.size();
        rows<T> const dq_dk = terms().sub(s.row, s.count);
        for (index_t h = 0; h < values; ++h)
            delta_rule_backward<T>(
                this->key_columns(t_.q, s, h), this->key_columns(t_.k, s, h), this->columns(t_.v, s, h, dim),
                this->columns(t_.g, s, h, 1), this->columns(t_.beta, s, h, 1), s.token, options_,
                this->matrix_at(start, h, dim), this->columns(to_.dout, s, h, dim), this->matrix_at(dstate, h, dim),
                {dq_dk.columns(h * keys, keys), dq_dk.columns((values + h) * keys, keys),
                 this->columns(to_.dv, s, h, dim), this->columns(to_.dg, s, h, 1), this->columns(to_.dbeta, s, h, 1)});
    }

    /// Gives what the outputs of segment `i` alone make the gradient of its start state, and the transpose of its M.
    void fold(std::size_t i, T* dstate, T* map) const {
        segment const& s = this->segment_at(i);
        index_t const keys = this->heads_.key_dim, dim = this->heads_.value_dim;
        T const* const saved = t_.saved->maps.data() + this->plan_.links[i].map_row * this->shape().map_width();
        for (index_t h = 0; h < this->values_.size(); ++h) {
            delta_rule_backward_fold<T>(this->key_columns(t_.q, s, h), this->key_columns(t_.k, s, h),
                                        this->columns(t_.g, s, h, 1), this->columns(t_.beta, s, h, 1), s.token,
                                        options_, this->columns(to_.dout, s, h, dim), this->matrix_at(dstate, h, dim));
            as_matrix(this->matrix_at(map, h, keys)) = as_matrix(this->matrix_at(saved, h, keys)).transpose();
        }
    }

    /// Returns what every value head contributes to dq, then to dk, of the key head that it reads.
    rows<T> terms() { return {dq_dk_.data(), t_.q.data().count(), 2 * this->values_.size() * this->heads_.key_dim}; }

private:
    delta_rule_tensors<T, S> const& t_;
    delta_rule_gradient_tensors<T, S> const& to_;
    delta_rule_options const& options_;
    std::vector<T> dq_dk_;
};

template <carry_kind How, class T, any_sharding S, class Comm>
void run_delta_rule_backward(carry_plan<How, S> const& plan, delta_rule_tensors<T, S> const& t,
                             delta_rule_gradient_tensors<T, S> const& to, delta_rule_heads const& heads,
                             delta_rule_options const& options, Comm& comm, caller here) {
    char const* const where = "gated_delta_rule_backward";
    check_delta_rule(where, plan, t, heads, options, here);
    // the gradients have the shapes of what they are gradients of
    check_delta_rule(where, plan, delta_rule_tensors<T, S>{to.dq, to.dk, to.dv, to.dg, to.dbeta, t.o}, heads, options,
                     here);
    require(to.dout.sharding() == plan.sharding, where, "sharding of dout", "the plan's", "another", here);
    require_shape(where, "dout", to.dout.data(), t.v.data().count(), t.v.data().width(), here);
    delta_rule_backward_pass<T, S> pass(plan, t, to, heads, options, here);
    index_t const width = pass.shape().state_width(), sequences = plan.sharding.batch().sequences();
    require(t.saved != nullptr && std::ssize(t.saved->starts) == std::ssize(plan.segments) * width, where,
            "saved states", "those of the forward", t.saved ? "others" : "none", here);
    if constexpr (std::same_as<How, scan>)
        require(std::ssize(t.saved->maps) == inner_segments(plan.links) * pass.shape().map_width(), where, "saved maps",
                "those of the forward, by scan", "others", here);
    if (to.dfinal.data()) require_shape(where, "dfinal", to.dfinal, sequences, width, here);
    if (to.dinitial.data()) require_shape(where, "dinitial", to.dinitial, sequences, width, here);
    operand const dout("dout", to.dout.data()), dfinal("dfinal", to.dfinal), dinitial("dinitial", to.dinitial);
    std::array const gradients{operand("dq", to.dq.data()),       operand("dk", to.dk.data()),
                               operand("dv", to.dv.data()),       operand("dg", to.dg.data()),
                               operand("dbeta", to.dbeta.data()), dinitial};
    require_apart(where, gradients, delta_rule_operands(t), here);
    require_apart(where, gradients, std::array{dout}, here);
    require_apart(where, {dinitial}, {dfinal}, here, in_place::yes);

    std::vector<T> maps;
    carry_states(where, plan, side::after, pass, maps, comm, here);
    sum_readers<T>(plan.sharding, plan.rank, heads.key_heads, heads.value_heads, heads.key_dim, pass.terms(),
                   std::array{to.dq.data(), to.dk.data()}, comm, here);
    for (index_t s = 0; to.dinitial.data() && s < sequences; ++s)
        if (plan.sharding.batch().length(s) == 0 && (S::every_row || plan.rank == 0)) pass.start(s, to.dinitial.row(s));
}

} // namespace detail

/// Computes the gradients of `gated_delta_rule`.
///
/// `plan`, `t`, `heads` and `options` as in the forward, which has filled `t.saved`; t.o is not read.
/// The gradient of the state goes back along each sequence's segments with the exchanges of the forward, from the last
/// segment: with `serial` as it is, with `scan` by the steps `dS_start = M^T dS_end + E`, the M saved by the forward.
/// Where a rank holds some of the value heads of a key head only, their shares of dq and dk meet in one more exchange.
/// With `serial` and cuts at multiples of the chunk bitwise the same as on one rank.
/// Collective. Throws `cpx::error` on shapes or shardings that do not fit and on overlapping memory, and what
/// `exchange` throws.
template <carry_kind How, any_sharding S, class T, any_sharding X, class D = T, any_sharding G = S, transport Comm>
void gated_delta_rule_backward(carry_plan<How, S> const& plan, delta_rule_tensors<T, X> const& t,
                               delta_rule_gradient_tensors<D, G> const& to, delta_rule_heads const& heads,
                               delta_rule_options const& options, Comm& comm, caller here = caller::here()) {
    constexpr bool fits = std::same_as<X, S> && std::same_as<G, S>, same = std::same_as<D, T>;
    static_assert(fits, "cpx: gated_delta_rule_backward of tensors or gradients that are not sharded as the plan; make "
                        "the plan with carry(q.sharding(), ...) and the gradients of the same sharding");
    static_assert(same, "cpx: gated_delta_rule_backward wants gradients of the tensors' elements");
    if constexpr (fits && same) detail::run_delta_rule_backward(plan, t, to, heads, options, comm, here);
}

} // namespace cpx
