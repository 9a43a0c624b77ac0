// SPDX-License-Identifier: Apache-2.0
// One rank's way through its segments on a device: which are run by one call, and in which order.
#pragma once

#include <cpx/ops/cuda/recurrence_segments.hpp>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace cpx::detail {

/// Whether the forward of a model has parts, and its backward.
template <class R>
inline constexpr bool has_parts = requires { typename R::parts; };
template <class R>
inline constexpr bool has_backward_parts = requires { typename R::backward_parts; };
template <class R>
struct parts_of {
    struct type {};
};
template <class R>
    requires has_parts<R>
struct parts_of<R> {
    using type = typename R::parts;
};
template <class R>
struct backward_parts_of {
    struct type {};
};
template <class R>
    requires has_backward_parts<R>
struct backward_parts_of<R> {
    using type = typename R::backward_parts;
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
    void over(visits_list visits) {
        this->each_expected(expected_, visits, [&](visits_list const& own, begun b) {
            b.states = this->bring(own, true);
            states(own, std::move(b));
        });
        auto const first = this->take_handed_on(visits);
        if (!in_parts(first) || !states_first(first)) return run(first);
        begun b{this->describe(first), known::given, true, this->bring(first, true)};
        begin(b, first);
        states(first, std::move(b));
    }
    void expect(visits_list const& visits) {
        bool const handed_on = std::ranges::any_of(visits, &visit<float>::handed_on); // then the others come later
        auto const next = this->only(visits, handed_on);
        if (!in_parts(next)) return;
        begun b{this->describe(next), handed_on && states_first(next) ? known::carried : known::later, handed_on};
        b.of.segments.to_ends = handed_on || t_.final.data();
        begin(b, next);
        expected_.push_back(std::move(b));
    }
    void fold(visits_list const& visits) {
        auto const inner = this->wanted(visits);
        if (!in_parts(visits)) {
            if (inner.empty()) return;
            auto const of = this->describe(inner);
            this->each_folded(inner, map_width_, [&](std::span<float> maps, std::span<float> ends) {
                r_.fold(of.segments, t_.x, maps, ends, memory_, here_);
            });
            return;
        }
        auto last = visits;
        std::erase_if(last, [](visit<float> const& v) { return v.state; });
        if (!inner.empty()) {
            begun b{this->describe(inner), known::by_steps, true};
            begin(b, inner);
            if constexpr (has_parts<R>)
                this->each_folded(inner, map_width_, [&](std::span<float> maps, std::span<float> ends) {
                    r_.totals(b.parts, maps, ends, memory_, here_);
                });
            expected_.push_back(std::move(b));
        }
        expect(last);
    }
    void rest() {
        if constexpr (has_parts<R>)
            for (begun& b : begun_) r_.outputs(b.parts, memory_, here_);
        begun_.clear();
        run(std::exchange(rest_, {}));
    }

private:
    using known = cuda::states_before;

    /// Returns where a call keeps what it makes; nothing if it does not.
    std::span<char> keeping(visits_list const& visits, index_t tokens) const {
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
    void run(visits_list const& visits) {
        this->each(visits, true,
                   [&](cuda::recurrence_segments const& s, std::span<float const> before, std::span<float> after) {
                       r_.forward(s, t_.x, before, t_.o, after, keeping(visits, s.tokens), memory_, here_);
                   });
    }

    /// Segments of which states come before outputs, and what is read until these are made.
    struct begun {
        typename device_states::described of;
        cuda::states_before known;
        bool handed_on; ///< whether other segments come after these
        typename device_states::beside_each_other states = {};
        typename parts_of<R>::type parts = {};
    };
    bool in_parts(visits_list const& visits) const {
        if (visits.empty()) return false;
        if constexpr (has_parts<R>) return r_.has_parts(t_.x, t_.o);
        return false;
    }
    bool states_first(visits_list const& visits) const {
        if constexpr (has_parts<R>) return r_.states_first(t_.x, std::ssize(visits), exchanges_, by_scan_);
        return false;
    }
    void begin(begun& b, visits_list const& visits) {
        if constexpr (has_parts<R>)
            b.parts = r_.begin(b.of.segments, t_.x, b.states.before, t_.o, b.known,
                               keeping(visits, b.of.segments.tokens), memory_, here_);
    }
    void states(visits_list const& visits, begun b) {
        if constexpr (has_parts<R>) r_.states(b.parts, b.states.before, b.states.after, memory_, here_);
        this->give(visits, b.states);
        begun_.push_back(std::move(b));
    }

    R const& r_;
    Tensors const& t_;
    index_t map_width_;
    std::vector<begun> expected_; ///< that `over` is given next
    std::vector<begun> begun_;    ///< whose outputs are to be made
};

template <class R, class Tensors, class Gradients>
class device_backward : device_states {
public:
    template <carry_kind How, any_sharding S>
    device_backward(char const*, carry_plan<How, S> const& plan, R const& r, Tensors const& t, Gradients const& to,
                    cuda::state_exchange& memory, caller here)
        : device_states(plan, r, memory, here), r_(r), t_(t), to_(to) {}
    void over(visits_list visits) {
        this->each_expected(expected_, visits,
                            [&](visits_list own, begun b) { dstates(std::move(own), std::move(b)); });
        auto first = this->take_handed_on(visits);
        if (by_steps_ || !in_parts(first)) return run(std::move(first));
        auto b = begin(first, known::given);
        dstates(std::move(first), std::move(b));
    }
    /// Begins segments while their gradients of states are awaited; not while others of the rank are left to be gone
    /// over, beside which these would take as much memory again.
    void expect(visits_list const& visits) {
        bool const handed_on = std::ranges::any_of(visits, &visit<float>::handed_on); // then the others come later
        auto next = this->only(visits, handed_on);
        if (rest_.empty() && begun_.empty() && in_parts(next))
            expected_.push_back(begin(next, handed_on ? known::carried : known::later));
    }
    void rest() {
        if constexpr (has_backward_parts<R>)
            for (begun& b : begun_) r_.gradients(*b.parts, memory_, here_);
        begun_.clear();
        run(std::exchange(rest_, {}));
    }
    void fold(visits_list const& visits) {
        by_steps_ = true;
        auto inner = this->wanted(visits);
        if (inner.empty()) return expect(visits);
        if (in_parts(inner)) {
            this->in_order_of_forward(inner);
            this->each_folded(inner, 0, [&](std::span<float>, std::span<float> ends) {
                expected_.push_back(begin(inner, known::by_steps, ends));
            });
        } else {
            auto const of = this->describe(inner);
            this->each_folded(inner, 0, [&](std::span<float>, std::span<float> ends) {
                r_.backward_fold(of.segments, t_.x, to_.dout, ends, memory_, here_);
            });
        }
    }
    void finish(char const*, caller) const {} // gradients of heads that several others read are whole

private:
    using known = cuda::states_before;

    /// Segments of which gradients of states come before others, and what is kept until these are made.
    struct begun {
        cuda::states_before known;
        bool handed_on; ///< whether other segments come after these, on the way back
        cuda::block<float> starts;
        typename device_states::described of;
        typename device_states::beside_each_other states = {};
        std::optional<typename backward_parts_of<R>::type> parts = {};
    };
    bool in_parts(visits_list const& visits) const {
        if (visits.empty()) return false;
        if constexpr (has_backward_parts<R>) return r_.has_backward_parts(t_.x, to_.dout, to_.dx, std::ssize(visits));
        return false;
    }
    /// `folded`: by steps, what outputs alone make the gradients of states before these segments.
    begun begin(visits_list& visits, known what, std::span<float> folded = {}) {
        std::span<char> const kept = this->in_order_of_forward(visits);
        begun b{what, what != known::later, this->brought_together(visits), this->describe(visits)};
        if constexpr (has_backward_parts<R>)
            b.parts.emplace(r_.begin_backward(b.of.segments, t_.x, before(b.starts, visits), to_.dout, to_.dx, what,
                                              folded, kept, memory_, here_));
        return b;
    }
    void dstates(visits_list visits, begun b) {
        this->in_order_of_forward(visits);
        b.states = this->bring(visits, false);
        bool const all_at_once = b.known == known::by_steps || b.known == known::later; // nobody waits
        if constexpr (has_backward_parts<R>) {
            r_.dstates(*b.parts, b.states.before, b.states.after, memory_, here_);
            if (all_at_once) r_.gradients(*b.parts, memory_, here_);
        }
        this->give(visits, b.states);
        if (!all_at_once) begun_.push_back(std::move(b));
    }
    void run(visits_list visits) {
        if (visits.empty()) return;
        std::span<char> const kept = this->in_order_of_forward(visits);
        auto const starts = this->brought_together(visits);
        this->each(visits, false,
                   [&](cuda::recurrence_segments const& s, std::span<float const> dafter, std::span<float> to) {
                       r_.backward(s, t_.x, before(starts, visits), to_.dout, dafter, to_.dx, to, kept, memory_, here_);
                   });
    }
    /// Returns the states before segments, which `brought_together` has copied or which lie so.
    std::span<float const> before(cuda::block<float> const& starts, visits_list const& visits) const {
        return {starts.size() > 0 ? starts.data() : visits.front().start,
                visits.size() * static_cast<std::size_t>(width_)};
    }
    /// Returns copies of the states before segments, one behind the other; nothing where they lie so themselves.
    cuda::block<float> brought_together(visits_list const& visits) const {
        bool together = true;
        for (std::size_t i = 1; i < visits.size(); ++i)
            together = together && visits[i].start == visits[i - 1].start + width_;
        auto starts = this->side_by_side(!together, visits);
        std::vector<copied<float>> gathered;
        for (std::size_t i = 0; !together && i < visits.size(); ++i)
            gathered.push_back({visits[i].start, this->row(starts, i), width_});
        memory_.copy(gathered);
        return starts;
    }
    /// Returns what a call of the forward kept of these segments, and puts them in its order; nothing if none ran them.
    std::span<char> in_order_of_forward(visits_list& visits) const {
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
    bool by_steps_ = false;       ///< whether what others wait for is made of steps
    std::vector<begun> expected_; ///< that `over` is given next
    std::vector<begun> begun_;    ///< whose other gradients are to be made
};

} // namespace cpx::detail
