// SPDX-License-Identifier: Apache-2.0
// The tensors of a recurrence, and one rank's way through its segments, head by head.
#pragma once

#include <cpx/layout/sharded.hpp>
#include <cpx/ops/carried_states.hpp>
#include <cpx/ops/shared_heads.hpp>

#include <cstdint>

namespace cpx {

/// What the backward of a recurrence needs of its forward: the state before every segment of the rank and, with `scan`,
/// the maps M of the segments that lie between two others (rows `carry_link::map_row`).
template <class T, any_memory M = host_memory>
struct recurrence_saved {
    typename M::template block<typename M::template sum<T>> starts, maps;
    std::uint64_t of = 0; ///< the forward that saved them; 0: the caller's own arrays, of which sizes alone are checked
};

/// The tensors of a recurrence with N inputs on one rank, all of one sharding; widths are those of the heads that the
/// rank holds.
///
/// x: in the order of `inputs()`; o: (rows, heads * values). States: (sequences, heads * keys * values), or empty rows
/// for none. `initial`, on all ranks or on none, is read on the rank where a sequence begins; `final` is written on the
/// rank where it ends (rank 0 if it has no tokens) and elsewhere left alone; they may be the same. `saved`, unless
/// null, takes what the backward needs.
template <class T, any_sharding S, std::size_t N>
struct recurrence_tensors {
    using state = T;
    sharded_fields<T const, S, N> x;
    sharded_field<T, S> o;
    field<rows<T const>> initial = {};
    field<rows<T>> final = {};
    field<recurrence_saved<T>*> saved = nullptr;
    detail::no_more end = {};
};
template <sharded_like X, sharded_like O, std::size_t N, class F = detail::first_fields<X, O>>
recurrence_tensors(std::array<X, N> const&, O const&, detail::any = {}, detail::any = {}, detail::any = {}, ...)
    -> recurrence_tensors<typename F::element, typename F::sharding, N>;
template <sharded_like X, sharded_like O, std::size_t N, class F = detail::first_fields<X, O>>
recurrence_tensors(X const (&)[N], O const&, detail::any = {}, detail::any = {}, detail::any = {}, ...)
    -> recurrence_tensors<typename F::element, typename F::sharding, N>;
template <class X = void>
recurrence_tensors(detail::any, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, ...)
    -> recurrence_tensors<detail::refused, sharding<sequential<1>>, 0>;
template <class X = void>
recurrence_tensors(...) -> recurrence_tensors<detail::refused, sharding<sequential<1>>, 0>;

/// What goes into and comes out of the backward of a recurrence, shaped and sharded as in `recurrence_tensors`.
///
/// dout: the gradient of o; dfinal: of the final states, on all ranks or empty rows on all, read on the rank where a
/// sequence ends. dx is written; dinitial, unless empty, on the rank where a sequence begins, and may be dfinal. On
/// `head_sharded`, every rank that holds a head gets its whole gradient; dout is whole on every rank that holds its
/// head, too.
template <class T, any_sharding S, std::size_t N>
struct recurrence_gradients {
    sharded_field<T const, S> dout;
    sharded_fields<T, S, N> dx;
    field<rows<T const>> dfinal = {};
    field<rows<T>> dinitial = {};
    detail::no_more end = {};
};
template <sharded_like O, sharded_like X, std::size_t N, class F = detail::first_fields<O, X>>
recurrence_gradients(O const&, std::array<X, N> const&, detail::any = {}, detail::any = {}, ...)
    -> recurrence_gradients<typename F::element, typename F::sharding, N>;
template <sharded_like O, sharded_like X, std::size_t N, class F = detail::first_fields<O, X>>
recurrence_gradients(O const&, X const (&)[N], detail::any = {}, detail::any = {}, ...)
    -> recurrence_gradients<typename F::element, typename F::sharding, N>;
template <class X = void>
recurrence_gradients(detail::any, detail::any = {}, detail::any = {}, detail::any = {}, ...)
    -> recurrence_gradients<detail::refused, sharding<sequential<1>>, 0>;
template <class X = void>
recurrence_gradients(...) -> recurrence_gradients<detail::refused, sharding<sequential<1>>, 0>;

namespace detail {

/// Returns the states of the heads that the plan's rank holds.
template <class R, carry_kind How, any_sharding S>
state_shape held_states(carry_plan<How, S> const& plan, R const& r) {
    state_shape shape = r.states();
    shape.heads = plan.sharding.heads(plan.rank, shape.heads).size();
    return shape;
}

/// One rank's way through its segments, from either side: says where the state that reaches each comes from and where
/// the one that leaves it goes. `Local` runs segments, or folds them.
template <class T, class Local, class Memory>
class recurrence_pass final : public states_pass<T> {
public:
    /// `given`: the states that sequences begin with; `taken` gets those that leave them. `starts`: where those before
    /// segments are kept, or null; `maps`: of a backward, the M that its forward has kept.
    recurrence_pass(carry_steps const& plan, state_shape const& shape, side from, rows<T const> given, rows<T> taken,
                    T* starts, T const* maps, Local& local, Memory& memory)
        : plan_(plan), shape_(shape), from_(from), given_(given), taken_(taken), starts_(starts), maps_(maps),
          local_(local), memory_(memory) {}

    state_shape const& shape() const override { return shape_; }

    void over(std::vector<visit<T>> visits) const override {
        for (visit<T>& v : visits) {
            index_t const sequence = plan_.segments[v.segment].sequence;
            carry_link const& l = plan_.links[v.segment];
            v.stays = l.beside(from_) > 0;
            v.before = v.stays ? v.state : given(sequence);
            v.start = start_of(v);
            v.taken = l.beside(opposite(from_)) == 0 && taken_.data() ? taken_.row(sequence) : nullptr;
        }
        local_.over(visits);
    }
    /// Gives the steps of segments. Those of a backward: what their outputs alone make the gradient of their start
    /// states, and the transpose of their M.
    void fold(std::vector<visit<T>> const& visits) const override {
        local_.fold(with_starts(visits));
        if (from_ == side::before) return;
        index_t const width = shape_.map_width();
        std::vector<copied<T>> list;
        for (visit<T> const& v : visits)
            if (v.map) list.push_back({maps_ + plan_.links[v.segment].map_row * width, v.map, width});
        memory_.transpose(shape_, list);
    }
    void expect(std::vector<visit<T>> const& visits) const override {
        if constexpr (requires { local_.expect(visits); }) local_.expect(with_starts(visits));
    }
    void rest() const override {
        if constexpr (requires { local_.rest(); }) local_.rest();
    }
    /// Hands on the states of sequences that have no segment.
    void without_tokens() const {
        std::vector<copied<T>> list;
        for (index_t s = 0; taken_.data() && s < taken_.count(); ++s)
            if (plan_.batch.length(s) == 0 && (plan_.every_row || plan_.rank == 0))
                list.push_back({given(s), taken_.row(s), taken_.width()});
        memory_.copy(list);
    }

private:
    T const* given(index_t sequence) const { return given_.data() ? given_.row(sequence) : nullptr; }
    T* start_of(visit<T> const& v) const {
        return starts_ ? starts_ + static_cast<index_t>(v.segment) * shape_.state_width() : nullptr;
    }
    std::vector<visit<T>> with_starts(std::vector<visit<T>> visits) const {
        for (visit<T>& v : visits) v.start = start_of(v);
        return visits;
    }

    carry_steps const& plan_;
    state_shape shape_;
    side from_;
    rows<T const> given_;
    rows<T> taken_;
    T* starts_;
    T const* maps_;
    Local& local_;
    Memory& memory_;
};

/// Runs segments on the host, head by head, one after the other.
template <class R, class T, any_sharding S>
class host_heads {
public:
    template <carry_kind How>
    host_heads(char const* where, carry_plan<How, S> const& plan, R const& r, caller here)
        : plan_(plan), sharding_(plan.sharding), r_(r), inputs_(r.inputs()),
          heads_(plan.sharding.heads(plan.rank, r.states().heads)),
          alone_(zeros<T>(where, {held_states(plan, r).state_width()}, here)) {}

protected:
    /// Calls `f(visit, segment, state)` for every visit, the state being the one before it and then after it.
    template <class F>
    void each(std::vector<visit<T>> const& visits, F&& f) {
        index_t const width = std::ssize(alone_);
        for (visit<T> const& v : visits) {
            T* const state = v.state ? v.state : alone_.data();
            if (v.before)
                std::copy_n(v.before, width, state);
            else
                std::fill_n(state, width, T{});
            f(v, plan_.segments[v.segment], state);
            if (v.taken) std::copy_n(state, width, v.taken);
        }
    }
    /// Returns the columns of input `i` that state head `head` reads.
    template <class A>
    rows<A> input(rows<A> x, std::size_t i, index_t head) const {
        index_t const readers = r_.states().heads / inputs_[i].heads, width = inputs_[i].width;
        index_t const first = sharding_.heads(plan_.rank, inputs_[i].heads).first;
        return x.columns(((heads_.first + head) / readers - first) * width, width);
    }
    /// Returns those of all inputs, of the rows of a segment.
    template <class A>
    head_inputs<R, A> inputs(std::array<sharded<A, S>, recurrence_inputs<R>> const& x, segment const& s,
                             index_t head) const {
        head_inputs<R, A> of_head;
        for (std::size_t i = 0; i < x.size(); ++i) of_head[i] = input(x[i].data().sub(s.row, s.count), i, head);
        return of_head;
    }
    template <class A>
    rows<A> output(sharded<A, S> const& o, segment const& s, index_t head) const {
        index_t const values = r_.states().values;
        return o.data().sub(s.row, s.count).columns(head * values, values);
    }
    template <class A>
    rows<A> state(A* states, index_t head) const {
        state_shape const all = r_.states();
        return {states + head * all.keys * all.values, all.keys, all.values};
    }
    template <class A>
    rows<A> map(A* maps, index_t head) const {
        state_shape const all = r_.states();
        return {maps + head * all.map_rows() * all.map_columns(), all.map_rows(), all.map_columns()};
    }

    index_t state_width() const { return std::ssize(alone_); }

    carry_steps const& plan_;
    S const& sharding_;
    R const& r_;
    std::array<recurrence_input, recurrence_inputs<R>> inputs_;
    range heads_;

private:
    std::vector<T> alone_; // the state of a segment whose state nobody else wants to know
};

template <class R, class T, any_sharding S, class Comm>
class host_forward : host_heads<R, T, S> {
public:
    template <carry_kind How>
    host_forward(char const* where, carry_plan<How, S> const& plan, R const& r,
                 recurrence_tensors<T, S, recurrence_inputs<R>> const& t, states_on_host<Comm>&, caller here)
        : host_heads<R, T, S>(where, plan, r, here), t_(t) {}

    void over(std::vector<visit<T>> const& visits) {
        this->each(visits, [&](visit<T> const& v, segment const& s, T* state) {
            if (v.start) std::copy_n(state, this->state_width(), v.start);
            for (index_t h = 0; h < this->heads_.size(); ++h)
                this->r_.forward(this->inputs(t_.x, s, h), s.token, this->state(state, h), this->output(t_.o, s, h));
        });
    }
    void fold(std::vector<visit<T>> const& visits) const {
        for (visit<T> const& v : visits) {
            if (!v.state) continue;
            segment const& s = this->plan_.segments[v.segment];
            for (index_t h = 0; h < this->heads_.size(); ++h)
                this->r_.fold(this->inputs(t_.x, s, h), s.token, this->state(v.state, h), this->map(v.map, h));
        }
    }

private:
    recurrence_tensors<T, S, recurrence_inputs<R>> const& t_;
};

/// Goes over each segment from its end to its start. Gradients of inputs that several state heads read are `terms`, one
/// a state head, until they are summed.
template <class R, class T, any_sharding S, class Comm>
class host_backward : host_heads<R, T, S> {
public:
    static constexpr std::size_t N = recurrence_inputs<R>;

    template <carry_kind How>
    host_backward(char const* where, carry_plan<How, S> const& plan, R const& r, recurrence_tensors<T, S, N> const& t,
                  recurrence_gradients<T, S, N> const& to, states_on_host<Comm>& memory, caller here)
        : host_heads<R, T, S>(where, plan, r, here), t_(t), to_(to), comm_(memory.comm) {
        for (std::size_t i = 0; i < N; ++i) {
            if (!shared(i)) continue;
            auto const [name, heads, width] = this->inputs_[i];
            std::size_t g = 0;
            while (g < groups_.size() && (groups_[g].heads != heads || groups_[g].width != width)) ++g;
            if (g == groups_.size()) groups_.push_back({heads, width});
            place_[i] = {g, std::ssize(groups_[g].members)};
            groups_[g].members.push_back(to.dx[i].data());
        }
        for (group& g : groups_)
            g.terms =
                zeros<T>(where, {to.dout.data().count(), std::ssize(g.members), this->heads_.size(), g.width}, here);
    }

    void over(std::vector<visit<T>> const& visits) {
        this->each(visits, [&](visit<T> const& v, segment const& s, T* dstate) {
            for (index_t h = 0; h < this->heads_.size(); ++h)
                this->r_.backward(this->inputs(t_.x, s, h), s.token, this->template state<T const>(v.start, h),
                                  this->output(to_.dout, s, h), this->state(dstate, h), gradients(s, h));
        });
    }
    void fold(std::vector<visit<T>> const& visits) const {
        for (visit<T> const& v : visits) {
            if (!v.state) continue;
            segment const& s = this->plan_.segments[v.segment];
            for (index_t h = 0; h < this->heads_.size(); ++h)
                this->r_.backward_fold(this->inputs(t_.x, s, h), s.token, this->output(to_.dout, s, h),
                                       this->state(v.state, h));
        }
    }
    /// Sums the terms. Collective.
    void finish(char const* where, caller here) const {
        for (group const& g : groups_)
            sum_readers<T>(this->sharding_, g.heads, this->r_.states().heads, g.width, terms(g),
                           std::span<rows<T> const>(g.members), comm_, here, where);
    }

private:
    /// Inputs of the same heads and width, whose terms stand side by side.
    struct group {
        index_t heads, width;
        std::vector<rows<T>> members = {};
        std::vector<T> terms = {};
    };
    bool shared(std::size_t i) const { return this->inputs_[i].heads != this->r_.states().heads; }
    rows<T> terms(group const& g) const {
        index_t const width = std::ssize(g.members) * this->heads_.size() * g.width;
        return {const_cast<T*>(g.terms.data()), to_.dout.data().count(), width};
    }
    head_inputs<R, T> gradients(segment const& s, index_t head) const {
        head_inputs<R, T> list;
        for (std::size_t i = 0; i < N; ++i)
            if (shared(i)) {
                group const& g = groups_[place_[i].first];
                index_t const column = (place_[i].second * this->heads_.size() + head) * g.width;
                list[i] = terms(g).sub(s.row, s.count).columns(column, g.width);
            } else {
                list[i] = this->input(to_.dx[i].data().sub(s.row, s.count), i, head);
            }
        return list;
    }

    recurrence_tensors<T, S, N> const& t_;
    recurrence_gradients<T, S, N> const& to_;
    Comm& comm_;
    std::vector<group> groups_;
    std::array<std::pair<std::size_t, index_t>, N> place_ = {};
};

} // namespace detail

} // namespace cpx
