// SPDX-License-Identifier: Apache-2.0
// Segments of a recurrence on a device: as many as a pass visits at once, all heads together.
#pragma once

#include <cpx/ops/cuda/recurrence_checks.hpp>
#include <cpx/ops/cuda/recurrence_step.hpp>
#include <cpx/ops/cuda/state_exchange.hpp>
#include <cpx/ops/recurrence.hpp>

#include <algorithm>
#include <concepts>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <vector>

namespace cpx {

/// What a forward on a device leaves to its backward: as on the host and, if `keeps` is set before, what kernels made
/// of the inputs alone, which the backward makes again otherwise, of the same bits. Of the gated delta rule that is
/// some 125 bytes a token and value head; others have nothing of the kind. Blocks that are lent and of the right size
/// are written instead of new ones; `kept` begins at multiples of 256 bytes.
template <class T>
struct recurrence_saved<T, cuda::memory> {
    cuda::block<float> starts, maps;
    std::uint64_t of = 0; ///< as on the host
    bool keeps = false;
    struct made { // by one call; see `run_together`
        std::vector<std::size_t> segments;
        cuda::block<char> memory;
        bool stale = false; ///< lent, and not written by the last forward
    };
    std::vector<made> kept;
};

namespace cuda {

/// Segments as kernels see them, (segments) each but for `offsets`, which ends with all rows: where their rows begin,
/// which tokens of their sequences these are, and how many.
struct recurrence_segments {
    std::span<index_t const> offsets, first, counts;
    index_t tokens = 0; ///< of all
};

/// What a recurrence of tensors on devices is given and makes on one rank, as in the host's `recurrence_tensors`. x: a
/// tuple of tensors in the order of `inputs()`, each of elements of its own; states are float.
template <class X, class O>
struct recurrence_tensors {
    using state = float;
    X x;
    O o;
    rows<float const> initial = {};
    rows<float> final = {};
    recurrence_saved<element_of<O>, memory>* saved = nullptr;
};
template <class X, class O> // these for clang++ before 17
recurrence_tensors(X, O, rows<float const> = {}, rows<float> = {}, void* = nullptr) -> recurrence_tensors<X, O>;

/// What goes into and comes out of its backward, as in `recurrence_gradients`. dx: a tuple as x.
template <class D, class X>
struct recurrence_gradients {
    D dout;
    X dx;
    rows<float const> dfinal = {};
    rows<float> dinitial = {};
};
template <class D, class X>
recurrence_gradients(D, X, rows<float const> = {}, rows<float> = {}) -> recurrence_gradients<D, X>;

/// A recurrence of tensors on devices: a model of `cpx::recurrence` but for its functions, which are about all heads
/// that the rank holds and as many segments as they are given, and enqueue their work in the stream of `by`.
///
/// States of segments and gradients of these are side by side, (segments, heads * keys * values); spans may be empty:
/// zeros, or nothing that is wanted. x, o, dout, dx: as they are given to `recur`; they have been checked, but for what
/// `check_rank` knows. State heads that read one head of x are on one rank; in a forward they may be on several, if
/// each of these holds no other head of x.
///
/// - `forward(segments, x, before, o, after, kept, by, here)`
/// - `fold(segments, x, maps, ends, by, here)`; maps: (segments, heads * map's elements)
/// - `backward(segments, x, before, dout, dafter, dx, dbefore, kept, by, here)`
/// - `backward_fold(segments, x, dout, dbefore, by, here)`
/// - `kept_bytes(x, o, segments, tokens)`, if it is there: what a forward of so many segments, and tokens in them, may
///   keep for the backward of the same ones; `kept` is as large, or empty
/// - `step(x, o, slots, states, by, here)`, if it is there: a token of each row's sequence, from state to state in place,
///   where no sequence has more, all go on from states and leave them, and no backward comes; slots: which of the states
///   a row has, below 0 none, which leaves its o alone; empty: row i has state i
/// - `check_rank(where, plan, backward, here)`, if it is there, throws if it cannot run the heads, tokens and segments
///   of a rank
template <class R, class X, class O>
concept recurrence_model =
    requires(R const r, recurrence_segments const s, X const x, O const o, std::span<float const> in,
             std::span<float> out, std::span<char> kept, state_exchange& by, caller here) {
        { r.name } -> std::convertible_to<char const*>;
        { r.states() } -> std::same_as<state_shape>;
        { r.inputs() } -> std::same_as<std::array<recurrence_input, std::tuple_size_v<X>>>;
        r.forward(s, x, in, o, out, kept, by, here);
        r.fold(s, x, out, out, by, here);
    };

/// One that has a backward, of gradients `dout` of D and `dx` of G.
template <class R, class X, class O, class D, class G>
concept differentiable_recurrence_model =
    recurrence_model<R, X, O> &&
    requires(R const r, recurrence_segments const s, X const x, D const dout, G const dx, std::span<float const> in,
             std::span<float> out, std::span<char> kept, state_exchange& by, caller here) {
        r.backward(s, x, in, dout, in, dx, out, kept, by, here);
        r.backward_fold(s, x, dout, out, by, here);
    };

} // namespace cuda

namespace detail {

/// Runs segments on a device, by a `cuda::recurrence_model`.
class device_states {
protected:
    template <carry_kind How, any_sharding S, class R>
    device_states(carry_plan<How, S> const& plan, R const& r, cuda::state_exchange& memory, caller here)
        : segments_(plan.segments), width_(held_states(plan, r).state_width()), rows_(rows_of_segments(plan)),
          memory_(memory), here_(here) {}

    /// Calls `f(segments, before, after)` with the visits' states beside each other, brought there and back.
    template <class F>
    void each(std::vector<visit<float>> const& visits, bool keep, F&& f) const {
        if (visits.empty()) return;
        auto const before = side_by_side(std::ranges::any_of(visits, [](auto const& v) { return v.before; }), visits);
        auto const after =
            side_by_side(std::ranges::any_of(visits, [](auto const& v) { return v.state || v.taken; }), visits);
        std::vector<copied<float>> gathered, given;
        for (std::size_t i = 0; i < visits.size(); ++i) {
            visit<float> const& v = visits[i];
            index_t const place = static_cast<index_t>(i) * width_;
            if (before.size() > 0) gathered.push_back({v.before, place_in(before, place), width_});
            if (keep && v.start) gathered.push_back({v.before, v.start, width_});
            for (float* const to : {v.state, v.taken})
                if (to) given.push_back({place_in(after, place), to, width_});
        }
        memory_.copy(gathered);
        with_segments(visits, [&](cuda::recurrence_segments const& s) { f(s, all(before), all(after)); });
        memory_.copy(given);
    }
    template <class F>
    void with_segments(std::vector<visit<float>> const& visits, F&& f) const {
        std::vector<index_t> numbers;
        index_t tokens = 0;
        for (visit<float> const& v : visits) tokens += segments_[v.segment].count;
        for (auto const member : {&segment::row, &segment::token, &segment::count}) {
            for (visit<float> const& v : visits) numbers.push_back(segments_[v.segment].*member);
            if (member == &segment::row) numbers.push_back(rows_);
        }
        auto const list = memory_.numbers(numbers, here_);
        std::span<index_t const> const there = all(list);
        std::size_t const n = visits.size();
        f(cuda::recurrence_segments{there.first(n + 1), there.subspan(n + 1, n), there.last(n), tokens});
    }
    static std::vector<std::size_t> segments_of(std::vector<visit<float>> const& visits) {
        std::vector<std::size_t> list;
        for (visit<float> const& v : visits) list.push_back(v.segment);
        return list;
    }
    cuda::block<float> side_by_side(bool wanted, std::vector<visit<float>> const& visits) const {
        return wanted ? memory_.memory().room<float>(std::ssize(visits) * width_) : cuda::block<float>();
    }
    /// Calls `f(segments, ends, maps)` for folded segments, and brings what it has written to the visits' states.
    template <class F>
    void each_folded(std::vector<visit<float>> const& visits, index_t map_width, F&& f) const {
        if (visits.empty()) return;
        auto const ends = side_by_side(true, visits);
        auto const maps = memory_.memory().room<float>(std::ssize(visits) * map_width);
        with_segments(visits, [&](cuda::recurrence_segments const& s) { f(s, all(ends), all(maps)); });
        std::vector<copied<float>> given;
        for (std::size_t i = 0; i < visits.size(); ++i) {
            auto const n = static_cast<index_t>(i);
            given.push_back({place_in(ends, n * width_), visits[i].state, width_});
            if (map_width > 0) given.push_back({place_in(maps, n * map_width), visits[i].map, map_width});
        }
        memory_.copy(given);
    }
    template <class T>
    static std::span<T> all(cuda::block<T> const& b) {
        return {const_cast<T*>(b.data()), static_cast<std::size_t>(b.size())};
    }
    static float* place_in(cuda::block<float> const& b, index_t place) { return all(b).data() + place; }

    std::vector<segment> const& segments_;
    index_t width_, rows_;
    cuda::state_exchange& memory_;
    caller here_;
};

template <class R, class Tensors>
class device_forward : device_states {
public:
    template <carry_kind How, any_sharding S>
    device_forward(char const*, carry_plan<How, S> const& plan, R const& r, Tensors const& t,
                   cuda::state_exchange& memory, caller here)
        : device_states(plan, r, memory, here), r_(r), t_(t), map_width_(held_states(plan, r).map_width()) {
        if (!t.saved) return;
        std::erase_if(t.saved->kept, [](auto const& made) { return !made.memory.lent(); });
        for (auto& made : t.saved->kept) made.stale = true;
    }
    void over(std::vector<visit<float>> const& visits) const {
        if (visits.empty()) return;
        this->each(visits, true,
                   [&](cuda::recurrence_segments const& s, std::span<float const> before, std::span<float> after) {
                       r_.forward(s, t_.x, before, t_.o, after, this->keeping(visits, s.tokens), memory_, here_);
                   });
    }
    void fold(std::vector<visit<float>> const& visits) const {
        this->each_folded(visits, map_width_,
                          [&](cuda::recurrence_segments const& s, std::span<float> ends, std::span<float> maps) {
                              r_.fold(s, t_.x, maps, ends, memory_, here_);
                          });
    }

private:
    /// Returns where a call keeps what it makes; nothing if it does not.
    std::span<char> keeping(std::vector<visit<float>> const& visits, index_t tokens) const {
        if (!t_.saved || !t_.saved->keeps) return {};
        index_t bytes = 0;
        if constexpr (requires { r_.kept_bytes(t_.x, t_.o, tokens, tokens); })
            bytes = r_.kept_bytes(t_.x, t_.o, std::ssize(visits), tokens);
        auto segments = this->segments_of(visits);
        for (auto& made : t_.saved->kept) {
            if (made.segments != segments) continue;
            if (made.memory.size() != bytes) made.memory = memory_.memory().template room<char>(bytes);
            made.stale = false;
            return all(made.memory);
        }
        t_.saved->kept.push_back({std::move(segments), memory_.memory().template room<char>(bytes)});
        return all(t_.saved->kept.back().memory);
    }

    R const& r_;
    Tensors const& t_;
    index_t map_width_;
};

template <class R, class Tensors, class Gradients>
class device_backward : device_states {
public:
    template <carry_kind How, any_sharding S>
    device_backward(char const*, carry_plan<How, S> const& plan, R const& r, Tensors const& t, Gradients const& to,
                    cuda::state_exchange& memory, caller here)
        : device_states(plan, r, memory, here), r_(r), t_(t), to_(to) {}
    void over(std::vector<visit<float>> visits) const {
        if (visits.empty()) return;
        std::span<char> const kept = this->in_order_of_forward(visits);
        auto const starts = this->brought_together(visits);
        std::span<float const> const before(starts.size() > 0 ? starts.data() : visits.front().start,
                                            visits.size() * static_cast<std::size_t>(width_));
        this->each(visits, false,
                   [&](cuda::recurrence_segments const& s, std::span<float const> dafter, std::span<float> to) {
                       r_.backward(s, t_.x, before, to_.dout, dafter, to_.dx, to, kept, memory_, here_);
                   });
    }
    void fold(std::vector<visit<float>> const& visits) const {
        this->each_folded(visits, 0, [&](cuda::recurrence_segments const& s, std::span<float> ends, std::span<float>) {
            r_.backward_fold(s, t_.x, to_.dout, ends, memory_, here_);
        });
    }
    void finish(char const*, caller) const {} // gradients of heads that several others read are whole

private:
    /// Returns copies of the states before segments, one behind the other; nothing where they lie so themselves.
    cuda::block<float> brought_together(std::vector<visit<float>> const& visits) const {
        bool together = true;
        for (std::size_t i = 1; i < visits.size(); ++i)
            together = together && visits[i].start == visits[i - 1].start + width_;
        auto starts = this->side_by_side(!together, visits);
        std::vector<copied<float>> gathered;
        for (std::size_t i = 0; !together && i < visits.size(); ++i)
            gathered.push_back({visits[i].start, place_in(starts, static_cast<index_t>(i) * width_), width_});
        memory_.copy(gathered);
        return starts;
    }
    /// Returns what a call of the forward kept of these segments, and puts them in its order; nothing if none ran them.
    std::span<char> in_order_of_forward(std::vector<visit<float>>& visits) const {
        if (t_.saved->kept.empty()) return {};
        auto const wanted = this->segments_of(visits);
        for (auto const& made : t_.saved->kept) {
            if (made.stale || !std::ranges::is_permutation(made.segments, wanted)) continue;
            auto const place = [&](visit<float> const& v) { return std::ranges::find(made.segments, v.segment); };
            std::ranges::sort(visits, {}, place);
            return all(made.memory);
        }
        return {};
    }

    R const& r_;
    Tensors const& t_;
    Gradients const& to_;
};

/// What carries states on devices: a `cuda::state_exchange`, made once, or a communicator, which makes one for a call.
template <class By>
concept carries_states = std::derived_from<By, cuda::state_exchange> || std::derived_from<By, cuda::communicator>;

/// Calls `f(state_exchange)`; the communicator keeps one that it has made until the stream has come here.
template <carries_states By, class F>
void with_state_exchange(By& by, caller here, F&& f) {
    if constexpr (std::derived_from<By, cuda::state_exchange>)
        f(by);
    else {
        auto made = std::make_unique<cuda::state_exchange>(by);
        f(*made);
        by.keep(std::move(made), here);
    }
}

/// Runs a recurrence of tensors on devices of which all fits, and its backward.
template <carry_kind How, any_sharding S, class R, class Tensors>
void recur_on_device(carry_plan<How, S> const& plan, R const& r, Tensors const& t, cuda::state_exchange& by,
                     caller here) {
    if constexpr (requires(std::span<float> states) { r.step(t.x, t.o, {}, states, by, here); })
        if (decodes(plan, t)) return step_on_device(plan, r, t, by, here);
    run_recurrence<device_forward<R, Tensors>>(plan, r, t, by, here);
}
template <carry_kind How, any_sharding S, class R, class Tensors, class Gradients>
void recur_backward_on_device(carry_plan<How, S> const& plan, R const& r, Tensors const& t, Gradients const& to,
                              cuda::state_exchange& by, caller here) {
    run_recurrence_backward<device_backward<R, Tensors, Gradients>>(plan, r, t, to, by, here);
}

/// Whether all tensors of a tuple are sharded by S.
template <class S, class X>
inline constexpr bool all_sharded_as = false;
template <class S, class... X>
inline constexpr bool all_sharded_as<S, std::tuple<X...>> = sharded_as<S, X...>;

} // namespace detail

/// Runs a recurrence of one's own, or of the library, of tensors on devices in the communicator's stream, as `recur` of
/// tensors on the host.
///
/// `by`: a `cuda::state_exchange`, made once; or a communicator, which prepares itself for this one call.
template <carry_kind How, any_sharding S, class R, class X, class O, detail::carries_states By>
void recur(carry_plan<How, S> const& plan, R const& r, cuda::recurrence_tensors<X, O> const& t, By& by,
           caller here = caller::here()) {
    constexpr bool fits = detail::all_sharded_as<S, X> && detail::sharded_as<S, O>,
                   models = cuda::recurrence_model<R, X, O>;
    static_assert(fits, "cpx: recur of tensors that are not sharded as the plan; make the plan with "
                        "carry(x.sharding(), ...)");
    static_assert(!fits || models, "cpx: recur of what is no cuda::recurrence_model of these tensors, or has another "
                                   "number of inputs");
    if constexpr (fits && models) {
        detail::check_on_device(plan, r, t, by.memory(), here);
        detail::with_state_exchange(
            by, here, [&](cuda::state_exchange& states) { detail::recur_on_device(plan, r, t, states, here); });
    }
}

/// Computes the gradients of `recur` of tensors on devices, in the communicator's stream.
///
/// Arguments, costs and errors as in the forward, which has filled `t.saved`, and for tensors on the host.
template <carry_kind How, any_sharding S, class R, class X, class O, class D, class G, detail::carries_states By>
void recur_backward(carry_plan<How, S> const& plan, R const& r, cuda::recurrence_tensors<X, O> const& t,
                    cuda::recurrence_gradients<D, G> const& to, By& by, caller here = caller::here()) {
    constexpr bool fits = detail::all_sharded_as<S, X> && detail::sharded_as<S, D> && detail::all_sharded_as<S, G>,
                   models = cuda::recurrence_model<R, X, O>;
    constexpr bool counts = std::tuple_size_v<G> == std::tuple_size_v<X>;
    constexpr bool turns_back = [] {
        if constexpr (fits && models && counts) return cuda::differentiable_recurrence_model<R, X, O, D, G>;
        return true;
    }();
    static_assert(fits, "cpx: recur_backward of tensors or gradients that are not sharded as the plan; make the plan "
                        "with carry(x.sharding(), ...) and the gradients of the same sharding");
    static_assert(!fits || models, "cpx: recur_backward of what is no cuda::recurrence_model of these tensors, or has "
                                   "another number of inputs");
    static_assert(!fits || !models || counts, "cpx: recur_backward of another number of gradients than inputs; "
                                              "recurrence_gradients wants a tuple dx as x");
    static_assert(turns_back, "cpx: recur_backward of a cuda::recurrence_model that has no backward and backward_fold "
                              "of these tensors and gradients");
    if constexpr (fits && models && counts && turns_back) {
        detail::check_backward_on_device(plan, r, t, to, by.memory(), here);
        detail::with_state_exchange(by, here, [&](cuda::state_exchange& states) {
            detail::recur_backward_on_device(plan, r, t, to, states, here);
        });
    }
}

} // namespace cpx
