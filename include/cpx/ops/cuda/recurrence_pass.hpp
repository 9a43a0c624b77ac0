// SPDX-License-Identifier: Apache-2.0
// One rank's way through its segments on a device: which are run by one call, and in which order.
#pragma once

#include <cpx/ops/cuda/state_exchange.hpp>
#include <cpx/ops/recurrence.hpp>

#include <algorithm>
#include <concepts>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace cpx::cuda {

/// Segments as kernels see them, (segments) each but for `offsets`, which ends with all rows: where their rows begin,
/// which tokens of their sequences these are, and how many.
struct recurrence_segments {
    std::span<index_t const> offsets, first, counts;
    index_t tokens = 0;   ///< of all
    bool by_scan = false; ///< whether their states may be joined of steps, too, as the carry says
};

/// What is known of the states before segments when a forward in parts begins: they are given; or they come later, and
/// others wait for the steps that segments make; or they come later, and nobody waits.
enum class states_before { given, by_steps, later };

} // namespace cpx::cuda

namespace cpx::detail {

/// Runs segments on a device, by a `cuda::recurrence_model`.
class device_states {
protected:
    using visits_list = std::vector<visit<float>>;

    template <carry_kind How, any_sharding S, class R>
    device_states(carry_plan<How, S> const& plan, R const& r, cuda::state_exchange& memory, caller here)
        : segments_(plan.segments), width_(held_states(plan, r).state_width()), rows_(rows_of_segments(plan)),
          exchanges_(plan.steps), by_scan_(std::same_as<How, scan>), memory_(memory), here_(here) {}

    /// Segments in device memory.
    struct described {
        cuda::block<index_t> numbers;
        cuda::recurrence_segments segments;
    };
    described describe(visits_list const& visits) const {
        std::vector<index_t> numbers;
        index_t tokens = 0;
        for (visit<float> const& v : visits) tokens += segments_[v.segment].count;
        for (auto const member : {&segment::row, &segment::token, &segment::count}) {
            for (visit<float> const& v : visits) numbers.push_back(segments_[v.segment].*member);
            if (member == &segment::row) numbers.push_back(rows_);
        }
        described made{memory_.numbers(numbers, here_), {}};
        std::span<index_t const> const there = all(made.numbers);
        std::size_t const n = visits.size();
        made.segments = {there.first(n + 1), there.subspan(n + 1, n), there.last(n), tokens, by_scan_};
        return made;
    }

    /// Visits' states beside each other, as kernels want them.
    struct beside_each_other {
        cuda::block<float> before, after;
    };
    /// Brings together the states before segments and, if these are to be kept, writes them to `start`, too.
    beside_each_other bring(visits_list const& visits, bool keep) const {
        beside_each_other made{
            side_by_side(std::ranges::any_of(visits, [](auto const& v) { return v.before; }), visits),
            side_by_side(std::ranges::any_of(visits, [](auto const& v) { return v.state || v.taken; }), visits)};
        std::vector<copied<float>> list;
        for (std::size_t i = 0; i < visits.size(); ++i) {
            visit<float> const& v = visits[i];
            if (made.before.size() > 0) list.push_back({v.before, row(made.before, i), width_});
            if (keep && v.start) list.push_back({v.before, v.start, width_});
        }
        memory_.copy(list);
        return made;
    }
    void give(visits_list const& visits, cuda::block<float> const& after) const {
        std::vector<copied<float>> list;
        for (std::size_t i = 0; i < visits.size(); ++i)
            for (float* const to : {visits[i].state, visits[i].taken})
                if (to) list.push_back({row(after, i), to, width_});
        memory_.copy(list);
    }
    /// Calls `f(segments, before, after)` with the visits' states beside each other, brought there and back.
    template <class F>
    void each(visits_list const& visits, bool keep, F&& f) const {
        if (visits.empty()) return;
        auto const states = bring(visits, keep);
        auto const of = describe(visits);
        f(of.segments, all(states.before), all(states.after));
        give(visits, states.after);
    }
    /// Returns the visits whose states others wait for, and leaves the rest, whose states nobody wants here.
    visits_list take_handed_on(visits_list const& visits) {
        visits_list handed_on;
        for (visit<float> const& v : visits) (v.handed_on ? handed_on : rest_).push_back(v);
        for (visit<float>& v : rest_) v.state = nullptr;
        return handed_on;
    }
    static std::vector<std::size_t> segments_of(visits_list const& visits) {
        std::vector<std::size_t> list;
        for (visit<float> const& v : visits) list.push_back(v.segment);
        return list;
    }
    cuda::block<float> side_by_side(bool wanted, visits_list const& visits) const {
        return wanted ? memory_.memory().room<float>(std::ssize(visits) * width_) : cuda::block<float>();
    }
    /// Calls `f(maps, ends)` with places for the steps of folded segments, and brings these to the visits.
    template <class F>
    void each_folded(visits_list const& visits, index_t map_width, F&& f) const {
        auto const ends = side_by_side(true, visits);
        auto const maps = memory_.memory().room<float>(std::ssize(visits) * map_width);
        f(all(maps), all(ends));
        std::vector<copied<float>> given;
        for (std::size_t i = 0; i < visits.size(); ++i) {
            if (!visits[i].state) continue;
            given.push_back({row(ends, i), visits[i].state, width_});
            if (map_width > 0)
                given.push_back({all(maps).data() + static_cast<index_t>(i) * map_width, visits[i].map, map_width});
        }
        memory_.copy(given);
    }
    /// Returns the visits whose steps are wanted.
    static visits_list wanted(visits_list visits) {
        std::erase_if(visits, [](visit<float> const& v) { return !v.state; });
        return visits;
    }
    template <class T>
    static std::span<T> all(cuda::block<T> const& b) {
        return {const_cast<T*>(b.data()), static_cast<std::size_t>(b.size())};
    }
    float* row(cuda::block<float> const& b, std::size_t i) const {
        return all(b).data() + static_cast<index_t>(i) * width_;
    }

    std::vector<segment> const& segments_;
    index_t width_, rows_, exchanges_;
    bool by_scan_;
    cuda::state_exchange& memory_;
    caller here_;
    visits_list rest_; ///< gone over when states are on their way
};

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
    void over(visits_list const& visits) {
        if (visits.empty()) return;
        auto folded = std::exchange(folded_, {});
        for (begun& b : folded) {
            visits_list own;
            for (visit<float> v : visits)
                if (v.handed_on == b.by_steps) {
                    v.state = nullptr; // what leaves it has been made of steps
                    own.push_back(v);
                }
            b.states = this->bring(own, true);
            states(own, std::move(b));
        }
        if (!folded.empty()) return;
        auto const first = this->take_handed_on(visits);
        if (!in_parts(first) || !states_first(first)) return run(first);
        begun b{this->describe(first), this->bring(first, true)};
        begin(b, first, cuda::states_before::given);
        states(first, std::move(b));
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
            begun b{this->describe(inner)};
            b.by_steps = true;
            begin(b, inner, cuda::states_before::by_steps);
            if constexpr (has_parts<R>)
                this->each_folded(inner, map_width_, [&](std::span<float> maps, std::span<float> ends) {
                    r_.totals(b.parts, maps, ends, memory_, here_);
                });
            folded_.push_back(std::move(b));
        }
        if (last.empty()) return;
        begun b{this->describe(last)};
        begin(b, last, cuda::states_before::later);
        folded_.push_back(std::move(b));
    }
    void rest() {
        if constexpr (has_parts<R>)
            for (begun& b : begun_) r_.outputs(b.parts, memory_, here_);
        begun_.clear();
        run(std::exchange(rest_, {}));
    }

private:
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
        typename device_states::beside_each_other states = {};
        typename parts_of<R>::type parts = {};
        bool by_steps = false; ///< of segments that others come after
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
    void begin(begun& b, visits_list const& visits, cuda::states_before known) {
        if constexpr (has_parts<R>)
            b.parts = r_.begin(b.of.segments, t_.x, all(b.states.before), t_.o, known,
                               keeping(visits, b.of.segments.tokens), memory_, here_);
    }
    void states(visits_list const& visits, begun b) {
        if constexpr (has_parts<R>) r_.states(b.parts, all(b.states.before), all(b.states.after), memory_, here_);
        this->give(visits, b.states.after);
        begun_.push_back(std::move(b));
    }

    R const& r_;
    Tensors const& t_;
    index_t map_width_;
    std::vector<begun> folded_; ///< what `fold` has begun, and `over` is given next
    std::vector<begun> begun_;  ///< whose outputs are to be made
};

template <class R, class Tensors, class Gradients>
class device_backward : device_states {
public:
    template <carry_kind How, any_sharding S>
    device_backward(char const*, carry_plan<How, S> const& plan, R const& r, Tensors const& t, Gradients const& to,
                    cuda::state_exchange& memory, caller here)
        : device_states(plan, r, memory, here), r_(r), t_(t), to_(to) {}
    void over(visits_list const& visits) {
        auto first = this->take_handed_on(visits);
        in_parts(first) ? begin(std::move(first)) : run(std::move(first));
    }
    void rest() {
        if constexpr (has_backward_parts<R>)
            for (begun& b : begun_) r_.gradients(*b.parts, memory_, here_);
        begun_.clear();
        run(std::exchange(rest_, {}));
    }
    void fold(visits_list const& visits) {
        folded_ = true;
        auto const list = this->wanted(visits);
        if (list.empty()) return;
        auto const of = this->describe(list);
        this->each_folded(list, 0, [&](std::span<float>, std::span<float> ends) {
            r_.backward_fold(of.segments, t_.x, to_.dout, ends, memory_, here_);
        });
    }
    void finish(char const*, caller) const {} // gradients of heads that several others read are whole

private:
    /// Segments of which gradients of states come before others, and what is kept until these are made.
    struct begun {
        cuda::block<float> starts = {};
        typename device_states::described of = {};
        typename device_states::beside_each_other states = {};
        std::optional<typename backward_parts_of<R>::type> parts = {};
    };
    bool in_parts(visits_list const& visits) const {
        if (visits.empty() || folded_) return false;
        if constexpr (has_backward_parts<R>) return r_.has_backward_parts(t_.x, to_.dout, to_.dx, std::ssize(visits));
        return false;
    }
    void begin(visits_list visits) {
        if constexpr (has_backward_parts<R>) {
            std::span<char> const kept = this->in_order_of_forward(visits);
            begun b{this->brought_together(visits), this->describe(visits), this->bring(visits, false)};
            b.parts.emplace(r_.begin_backward(b.of.segments, t_.x, before(b.starts, visits), to_.dout,
                                              all(b.states.before), to_.dx, all(b.states.after), kept, memory_, here_));
            this->give(visits, b.states.after);
            begun_.push_back(std::move(b));
        }
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
    bool folded_ = false;      ///< what others wait for is made of steps
    std::vector<begun> begun_; ///< whose other gradients are to be made
};

} // namespace cpx::detail
