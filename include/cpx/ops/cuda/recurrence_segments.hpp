// SPDX-License-Identifier: Apache-2.0
// Segments of a rank as calls on a device see them: where they lie, and their states beside each other.
#pragma once

#include <cpx/ops/cuda/state_exchange.hpp>
#include <cpx/ops/recurrence.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace cpx::cuda {

/// Segments as kernels see them, (segments) each but for `offsets`, which ends with all rows: where their rows begin,
/// which tokens of their sequences these are, and how many.
struct recurrence_segments {
    std::span<index_t const> offsets, first, counts;
    index_t tokens = 0;   ///< of all
    bool by_scan = false; ///< whether their states may be made of steps, too, as the carry says
    bool to_ends = true;  ///< whether states after them may be wanted of a forward that begins in parts
};

/// What is known of the states before segments when a forward in parts begins: they are given, and others wait for
/// those after; or they come later, and others wait for those after, which are carried on by serial, or for the steps
/// that segments make, or nobody waits. Of a backward: of the gradients of the states after segments, likewise.
enum class states_before { given, carried, by_steps, later };

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

    /// Returns the first of visits' places of `width` elements if they lie one behind the other, as aligned as memory
    /// of their own; else null.
    template <class F>
    static auto first_beside_each_other(visits_list const& visits, F&& place, index_t width) {
        auto const first = place(visits.front());
        bool together = first && width > 0 && reinterpret_cast<std::uintptr_t>(first) % 256 == 0;
        for (std::size_t i = 1; together && i < visits.size(); ++i)
            together = place(visits[i]) == first + static_cast<index_t>(i) * width;
        return together ? first : nullptr;
    }

    /// Visits' states beside each other, as kernels want them; empty: zeros, or not wanted. Where they lie so they are
    /// taken as they are, but for states before segments that are to be written while they may still be read: by this
    /// call or, of those that the caller gave, by a later one.
    struct beside_each_other {
        std::span<float const> before;
        std::span<float> after;
        cuda::block<float> brought, made; ///< those that do not lie so
    };
    /// Brings together the states before segments and, if these are to be kept, writes them to `start`, too.
    beside_each_other bring(visits_list const& visits, bool keep) const {
        std::size_t const elements = visits.size() * static_cast<std::size_t>(width_);
        auto const wanted = [&](auto const& of) { return std::ranges::any_of(visits, of); };
        auto const before = [](visit<float> const& v) { return v.before; };
        auto const after = [](visit<float> const& v) {
            return v.state && v.taken ? nullptr : v.state ? v.state : v.taken;
        };
        beside_each_other both;
        if (wanted(before)) {
            bool const stay = std::ranges::all_of(visits, &visit<float>::stays);
            float const* from = stay ? first_beside_each_other(visits, before, width_) : nullptr;
            for (visit<float> const& v : visits)
                for (float const* const to : {v.state, v.taken})
                    if (from && to && to < from + elements && from < to + width_) from = nullptr;
            if (!from) from = all(both.brought = memory_.memory().room<float>(std::ssize(visits) * width_)).data();
            both.before = {from, elements};
        }
        if (wanted([](visit<float> const& v) { return v.state || v.taken; })) {
            float* to = first_beside_each_other(visits, after, width_);
            if (!to) to = all(both.made = memory_.memory().room<float>(std::ssize(visits) * width_)).data();
            both.after = {to, elements};
        }
        std::vector<copied<float>> list;
        for (std::size_t i = 0; i < visits.size(); ++i) {
            visit<float> const& v = visits[i];
            if (both.brought.size() > 0) list.push_back({v.before, row(both.brought, i), width_});
            if (keep && v.start) list.push_back({v.before, v.start, width_});
        }
        memory_.copy(list);
        return both;
    }
    void give(visits_list const& visits, beside_each_other const& states) const {
        std::vector<copied<float>> list;
        for (std::size_t i = 0; states.made.size() > 0 && i < visits.size(); ++i)
            for (float* const to : {visits[i].state, visits[i].taken})
                if (to) list.push_back({row(states.made, i), to, width_});
        memory_.copy(list);
    }
    /// Calls `f(segments, before, after)` with the visits' states beside each other, brought there and back.
    template <class F>
    void each(visits_list const& visits, bool keep, F&& f) const {
        if (visits.empty()) return;
        auto const states = bring(visits, keep);
        auto const of = describe(visits);
        f(of.segments, states.before, states.after);
        give(visits, states);
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
        std::vector<copied<float>> given;
        auto const places = [&](float* visit<float>::*of, index_t width, cuda::block<float>& room) {
            index_t const elements = std::ssize(visits) * width;
            float* first = first_beside_each_other(
                visits, [&](visit<float> const& v) { return v.*of; }, width);
            if (!first) {
                first = all(room = memory_.memory().room<float>(elements)).data();
                for (std::size_t i = 0; width > 0 && i < visits.size(); ++i)
                    given.push_back({first + static_cast<index_t>(i) * width, visits[i].*of, width});
            }
            return std::span(first, static_cast<std::size_t>(elements));
        };
        cuda::block<float> own_maps, own_ends;
        auto const maps = places(&visit<float>::map, map_width, own_maps);
        f(maps, places(&visit<float>::state, width_, own_ends));
        memory_.copy(given);
    }
    static visits_list only(visits_list visits, bool handed_on) {
        std::erase_if(visits, [&](visit<float> const& v) { return v.handed_on != handed_on; });
        return visits;
    }
    /// Calls `f(visits, begun)` for all that has begun with the visits that it is of, and takes these from the list. By
    /// steps, and where no segment comes after, nobody wants the states that leave them.
    template <class Begun, class F>
    static void each_expected(std::vector<Begun>& expected, visits_list& visits, F&& f) {
        for (Begun& b : std::exchange(expected, {})) {
            auto own = only(visits, b.handed_on);
            visits = only(std::move(visits), !b.handed_on);
            if (b.known == cuda::states_before::by_steps || !b.handed_on)
                for (visit<float>& v : own) v.state = nullptr;
            f(std::move(own), std::move(b));
        }
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

} // namespace cpx::detail
