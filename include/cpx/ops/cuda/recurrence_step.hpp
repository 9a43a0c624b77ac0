// SPDX-License-Identifier: Apache-2.0
// Decoding with a recurrence of tensors on devices: a token each of sequences that go on from states and leave them.
#pragma once

#include <cpx/ops/cuda/state_exchange.hpp>
#include <cpx/ops/recurrence.hpp>

#include <tuple>
#include <vector>

namespace cpx::detail {

/// Whether a call decodes: every sequence of the batch has a token at most, goes on from a state and leaves one, and no
/// backward comes. So do all ranks then, and one rank with all tokens: results have the same bits on every sharding.
template <carry_kind How, any_sharding S, class Tensors>
bool decodes(carry_plan<How, S> const& plan, Tensors const& t) {
    auto const there = [](auto const& states) { return states.data() && states.stride() == states.width(); };
    if (t.saved || plan.steps > 0 || !there(t.initial) || !there(t.final)) return false;
    thd const& batch = plan.sharding.batch();
    for (index_t s = 0; s < batch.sequences(); ++s)
        if (batch.length(s) > 1) return false;
    return true;
}

/// Runs a call that decodes: states step where the final ones lie, where the initial ones go first if they are others.
template <carry_kind How, any_sharding S, class R, class Tensors>
void step_on_device(carry_plan<How, S> const& plan, R const& r, Tensors const& t, cuda::state_exchange& by,
                    caller here) {
    by.prepare(plan, held_states(plan, r), recurrence_arguments(r, true), here);
    index_t const width = t.final.width(), sequences = t.final.count(), count = std::get<0>(t.x).data().count();
    std::vector<copied<float>> initial;
    auto const begin = [&](index_t sequence) {
        if (t.initial.data() != t.final.data())
            initial.push_back({t.initial.row(sequence), t.final.row(sequence), width});
    };
    std::vector<index_t> slots(static_cast<std::size_t>(count), -1); // a row of no sequence has no state
    bool in_order = count == sequences && std::ssize(plan.segments) == count;
    for (segment const& s : plan.segments) {
        slots[static_cast<std::size_t>(s.row)] = s.sequence;
        in_order = in_order && s.row == s.sequence;
        begin(s.sequence);
    }
    for (index_t s = 0; s < sequences; ++s)
        if (plan.batch.length(s) == 0 && (plan.every_row || plan.rank == 0)) begin(s);
    by.copy(initial);
    if (plan.segments.empty()) return;
    auto const list = in_order ? cuda::block<index_t>() : by.numbers(slots, here);
    r.step(t.x, t.o, {list.data(), static_cast<std::size_t>(list.size())},
           {t.final.data(), static_cast<std::size_t>(sequences * width)}, by, here);
}

} // namespace cpx::detail
