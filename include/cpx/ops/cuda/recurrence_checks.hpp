// SPDX-License-Identifier: Apache-2.0
// What a recurrence of tensors on devices asks of its model, its plan and its memory, before anything moves.
#pragma once

#include <cpx/ops/cuda/operands.hpp>
#include <cpx/ops/recurrence.hpp>

#include <array>
#include <string>
#include <tuple>
#include <vector>

namespace cpx::detail {

/// Throws unless all of these tensors are of `memory`, and they and `more` of its device.
template <class X, std::size_t N>
void require_there(char const* where, cuda::memory const& memory, X const& tensors,
                   std::array<std::string, N> const& names, std::vector<operand> more, caller here) {
    each_input(tensors, [&](std::size_t i, auto const& x) {
        require_in_memory(where, names[i].c_str(), x, memory, "the communicator's", here);
        more.emplace_back(names[i].c_str(), x.data());
    });
    require_there(memory, where, more, here);
}

/// Throws unless what is saved, some of it lent, is where kernels can have it.
template <class Saved>
void require_saved_there(char const* where, cuda::memory const& memory, Saved const& saved, caller here) {
    require_there(memory, where, saved_operands(saved), here);
    for (auto const& made : saved.kept) {
        index_t const place = cuda::detail::address(made.memory.data());
        require(place % 256 == 0, where, "address of what is kept", "a multiple of 256", place, here);
    }
}

/// Throws unless kernels can run the heads of every rank: they see those of one rank alone, and write gradients of
/// heads of x that are whole. And unless they can run this rank's tokens and segments, of which others know nothing.
template <carry_kind How, any_sharding S, class R>
void check_rank_on_device(char const* where, carry_plan<How, S> const& plan, R const& r, bool backward, caller here) {
    S const& sharding = plan.sharding;
    index_t const states = r.states().heads;
    for (recurrence_input const& x : r.inputs())
        for (int rank = 0; x.heads > 0 && rank < (S::every_row ? sharding.ranks() : 1); ++rank) {
            range const readers = sharding.heads(rank, states), read = sharding.heads(rank, x.heads);
            index_t const group = states / x.heads;
            bool const whole = readers.first == read.first * group && readers.last == read.last * group;
            if (whole || (!backward && read.size() == 1)) continue;
            throw error(where, std::string("state heads that read one head of ") + x.name,
                        "on one rank, of tensors on devices", "on several", here);
        }
    if constexpr (requires { r.check_rank(where, plan, backward, here); }) r.check_rank(where, plan, backward, here);
}

/// Throws unless a recurrence of tensors on devices fits the plan, and `memory` is where they are. Then all that comes
/// after takes them as they are.
template <carry_kind How, any_sharding S, class R, class Tensors>
void check_on_device(carry_plan<How, S> const& plan, R const& r, Tensors const& t, cuda::memory const& memory,
                     caller here) {
    check_recurrence(plan, r, t, here);
    char const* const where = r.name;
    check_rank_on_device(where, plan, r, false, here);
    if (t.saved) require_saved_there(where, memory, *t.saved, here);
    require_there(where, memory, t.x, input_names(r, ""), {}, here);
    require_there(where, memory, std::tuple(t.o), std::array<std::string, 1>{"o"},
                  {{"initial", t.initial}, {"final", t.final}}, here);
}
template <carry_kind How, any_sharding S, class R, class Tensors, class Gradients>
void check_backward_on_device(carry_plan<How, S> const& plan, R const& r, Tensors const& t, Gradients const& to,
                              cuda::memory const& memory, caller here) {
    check_recurrence_backward(plan, r, t, to, here);
    std::string const name = backward_name(r);
    char const* const where = name.c_str();
    check_rank_on_device(where, plan, r, true, here);
    require_saved_there(where, memory, *t.saved, here);
    require_there(where, memory, t.x, input_names(r, ""), {}, here);
    require_there(where, memory, to.dx, input_names(r, "d"), {}, here);
    require_there(where, memory, std::tuple(to.dout), std::array<std::string, 1>{"dout"},
                  {{"dfinal", to.dfinal}, {"dinitial", to.dinitial}}, here);
}

} // namespace cpx::detail
