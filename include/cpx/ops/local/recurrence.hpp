// SPDX-License-Identifier: Apache-2.0
// What a recurrence of one's own has to say of one head and one segment.
#pragma once

#include <cpx/core/rows.hpp>
#include <cpx/ops/local/shape.hpp>

#include <array>
#include <concepts>
#include <tuple>
#include <utility>

namespace cpx {

/// What the map M of a step is for a head whose state is (keys, values).
enum class map_kind {
    matrix, ///< (keys, keys): M S
    vector, ///< (keys, 1): a factor for each row of S
    number  ///< (1, 1): one factor of S
};

/// How large the states of a recurrence are and what its maps are, for all heads or for those that a rank holds.
struct state_shape {
    index_t heads = 1, keys = 1, values = 1;
    map_kind map = map_kind::matrix;

    constexpr index_t map_rows() const { return map == map_kind::number ? 1 : keys; }
    constexpr index_t map_columns() const { return map == map_kind::matrix ? keys : 1; }
    constexpr index_t state_width() const { return heads * keys * values; }
    constexpr index_t map_width() const { return heads * map_rows() * map_columns(); }
};

/// What a recurrence has on all ranks alike beside its sizes, for ranks to compare.
struct recurrence_settings {
    index_t chunk = 0;       ///< tokens computed at once, on which bits depend
    double scale = 0;        ///< of the outputs
    bool normalises = false; ///< whether it divides q and k by their norms
};

/// An input of a recurrence, (rows, heads * width) over all ranks. Each of its heads is read by as many neighbouring
/// heads of the state; the gradient of one that several read is the sum of theirs.
struct recurrence_input {
    char const* name = ""; ///< in errors
    index_t heads = 1, width = 1;
};

/// Heads of a recurrence that reads keys and values, over all ranks. `value_heads` is a multiple of `key_heads`: value
/// head h, which has a state, reads q and k of head h / (value_heads / key_heads).
struct recurrence_heads {
    index_t key_heads = 1, value_heads = 1;
    index_t key_dim = 1, value_dim = 1;

    /// Throws `cpx::error` unless each is at least 1.
    void check(char const* where, caller here) const {
        detail::require_sizes(
            where,
            {{"key heads", key_heads}, {"value heads", value_heads}, {"key_dim", key_dim}, {"value_dim", value_dim}},
            here);
    }
};

template <class R>
inline constexpr std::size_t recurrence_inputs = std::tuple_size_v<decltype(std::declval<R const&>().inputs())>;

/// The columns of every input for one head and one segment.
template <class R, class T>
using head_inputs = std::array<rows<T>, recurrence_inputs<R>>;

/// A recurrence S_t = M_t S_{t-1} + E_t with an output (tokens, values) that is linear in the state of its token.
///
/// `states()` and `inputs()` say what it has, over all ranks; `name` is for errors. `check(where, here)`, if it is
/// there, throws if its parameters are none; `settings()`, if it is there, returns its `recurrence_settings`, in which
/// ranks must not differ. The rest is about one head and one segment, whose row 0 is token `first`
/// of its sequence, x its columns of the inputs; views have the shapes that were said, and do not overlap:
///
/// - `forward(x, first, state, o)` makes of the state before the segment the one after it, and writes the outputs.
/// - `fold(x, first, end, map)`: the same for a state of zero, which makes E, without outputs; writes M.
/// - `backward(x, first, state, dout, dstate, dx)` makes of the gradient of the state after the segment that of the one
///   before it, which is M^T dstate and what the outputs give, and writes the gradients of the inputs. `state` is the
///   one before the segment.
/// - `backward_fold(x, first, dout, dstate)`: dstate as there, without gradients of inputs.
///
/// If segments may be cut at multiples of some number of tokens without a change of bits, so may sequences, see
/// `is_exact`.
template <class R, class T>
concept recurrence =
    requires(R const r) { r.inputs(); } && requires(R const r, index_t first, rows<T const> in, rows<T> out,
                                                    head_inputs<R, T const> const x, head_inputs<R, T> const dx) {
        { r.name } -> std::convertible_to<char const*>;
        { r.states() } -> std::same_as<state_shape>;
        { r.inputs() } -> std::same_as<std::array<recurrence_input, recurrence_inputs<R>>>;
        r.forward(x, first, out, out);
        r.fold(x, first, out, out);
        r.backward(x, first, in, in, out, dx);
        r.backward_fold(x, first, in, out);
    };

} // namespace cpx
