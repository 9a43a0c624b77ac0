// SPDX-License-Identifier: Apache-2.0
// What the gated delta rule and a decay a head in device memory are given, and how their workspace is divided.
#pragma once

#include <cpx/core/field.hpp>
#include <cpx/cuda/arguments.hpp>

#include <cpx/delta_rule_log_decays.cuh>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>

namespace cpx::cuda {

/// How a gated delta rule is run: token by token, which every GPU and size has, or chunk by chunk on tensor cores.
enum class delta_rule_path { plain, tensor_cores };

/// Whether a token erases what the state has of its key, as in the gated delta rule. Where none does, what is left is a
/// decay a head (Mamba-2, lightning attention), of the same kernels: the host's `cpx::head_decay_attention`.
enum class erases { no, yes };

/// The sizes of a gated delta rule or of a decay a head, and how it is run.
struct gated_delta_rule_shape {
    index_t key_heads = 1, value_heads = 1; ///< a multiple of the key heads: value head h reads key head h / group
    index_t key_dim = 128, value_dim = 128; ///< at most 256, and at most 65536
    std::optional<double> scale = {};       ///< factor of q; none: 1 / sqrt(key_dim)
    /// Chunks of 64 tokens that kernels run as one, a stretch of a sequence; 0: chosen, and no bit depends on it. With
    /// `scan` and in `gated_delta_rule_fold` 0 is 32, bits depend on it, and many heads are faster with longer ones:
    /// 128 of one sequence of 32768 tokens and 32 heads. A backward and its fold have no stretches.
    index_t stretch = 0;
    /// Tensor cores, forward: stretches are folded beside each other, and states made of their steps, as
    /// `gated_delta_rule_fold` always does. Faster where sequences and heads are few, and within rounding of the other
    /// way.
    bool scan = false;
    delta_rule_path path = delta_rule_path::tensor_cores; ///< these where they can be used, as calls return
};

/// What kernels make g of where they read it, if it is given in place of that: -exp(a_log) softplus(a + dt_bias), with
/// the bits of `rowwise::delta_gates` on a device. beta is given all the same. Of calls on one GPU: operators between
/// ranks take g, for they add the terms of the parameters' gradients in an order that no rank changes.
template <class T>
struct log_decay_parameters {
    rows<T const> a = {};                            ///< (tokens, value heads), such as columns of a projection
    std::span<float const> a_log = {}, dt_bias = {}; ///< (value heads)

    bool given() const { return !a_log.empty() || !dt_bias.empty() || a.data(); }
};

/// Their gradients, (tokens, value heads) and (value heads), none of which may be left out. Written is da of all rows
/// of sequences, and sums over these, in an order that their chunks decide.
template <class T>
struct log_decay_gradients {
    rows<T> da = {};
    std::span<float> da_log = {}, ddt_bias = {};
};

/// What the gated delta rule reads, in device memory. Rows: (tokens, heads * dim), q and k normalised, or (tokens,
/// value heads) for g (log decay, never positive) and beta. Any strides; tensor cores want q, k, v and o at multiples
/// of 16 bytes. Of a decay a head, `erases::no`: q and k of any norm, neither beta nor `saved`.
template <class T>
struct gated_delta_rule_input {
    rows<T const> q, k, v;
    rows<float const> g, beta = {};
    std::span<index_t const> offsets = {}; ///< (sequences + 1): where sequences begin, and all tokens; see `counts`
    std::span<float const> state = {};     ///< (sequences, value heads, Dk, Dv) before the sequences; empty: zeros
    std::span<index_t const> first{};      ///< (sequences): the token of its sequence that a first row is; empty: zeros
    std::span<index_t const> counts{}; ///< (sequences): how many rows they have; empty: up to the next one. Rows of no
                                       ///< sequence are neither read nor written
    /// `gated_delta_rule_saved` bytes at a multiple of 256, which a forward writes, of the chunks' inverses and gates,
    /// and the backward of the same inputs reads instead of making them again; empty: it makes them.
    std::span<char> saved{};
    /// The tokens that `saved` was sized for: those of the sequences, at least, not 0; negative: all rows.
    index_t saved_tokens = -1;
    /// In place of g, which is none then: what it is made of.
    log_decay_parameters<T> g_of = {};
};

/// The gradients of a gated delta rule, of the same shapes; all written. Of a decay a head without dbeta.
template <class T>
struct gated_delta_rule_gradients {
    field<rows<T>> dq, dk, dv;
    field<rows<float>> dg, dbeta = {};
    field<std::span<float>> dstate = {}; ///< of the states before the sequences; empty if it is not wanted
    log_decay_gradients<T> dg_of = {};   ///< in place of dg, which is none then, where `g_of` is given
};

namespace detail {

/// Where the arrays in a workspace begin, in bytes; -1: it has none.
struct delta_space {
    index_t sequences = 0, chunks = 0, stretches = 0; ///< at most
    kernels::delta_cut cut{};
    bool hopper = false, states_first = false; ///< states are computed before outputs
    index_t plan = 0, stretch_list = 0, totals = 0, flags = 0;
    index_t inverse = -1, gates = -1, snapshots = -1, maps = -1, ends = -1;
    index_t states = -1, dstates = -1, written = -1, dwritten = -1, dq = -1, dk = -1, dg = -1, terms = -1;
    index_t bytes = 0;

    /// Takes `count` elements of `size` bytes off the end.
    index_t take(index_t count, std::size_t size) {
        index_t const at = bytes;
        bytes += (count * static_cast<index_t>(size) + 255) / 256 * 256;
        return at;
    }
};

/// Returns for how many tokens there is room in what is saved.
template <class T>
index_t delta_saved_tokens(gated_delta_rule_input<T> const& in) {
    return in.saved_tokens < 0 ? in.k.count() : in.saved_tokens;
}

/// Returns how many chunks there are at most.
inline index_t delta_chunks(index_t tokens, index_t sequences) { return tokens / kernels::delta_chunk + 2 * sequences; }

inline void require_stretch(gated_delta_rule_shape const& shape, char const* where = "cuda::gated_delta_rule",
                            caller here = caller::here()) {
    require(shape.stretch >= 0 && shape.stretch <= kernels::delta_uncut, where, "stretch", "from 0 to 2^24 chunks",
            shape.stretch, here);
}

inline delta_space delta_plan_space(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences,
                                    kernels::delta_cut const& cut = {kernels::delta_uncut}) {
    delta_space space;
    space.sequences = sequences;
    space.chunks = delta_chunks(tokens, sequences);
    space.cut = cut;
    require_stretch(shape);
    space.stretches = space.chunks / cut.chunks + sequences * (1 + cut.shorts);
    space.plan = space.take(sequences, sizeof(kernels::delta_sequence));
    space.stretch_list = space.take(space.stretches, sizeof(kernels::delta_stretch));
    space.totals = space.take(4, sizeof(int));
    space.flags = space.take(space.stretches * shape.value_heads * 4, sizeof(int));
    return space;
}

/// Takes room for the gradients of log decays that are made of parameters, and chunks' terms of these.
inline void take_delta_parameters(gated_delta_rule_shape const& shape, index_t tokens, delta_space& space) {
    space.dg = space.take(tokens * shape.value_heads, sizeof(float));
    space.terms = space.take(space.chunks * 2 * shape.value_heads, sizeof(float));
}

inline delta_space delta_plain_backward_space(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences) {
    auto space = delta_plan_space(shape, tokens, sequences);
    index_t const state = shape.value_heads * shape.key_dim * shape.value_dim;
    space.states = space.take(space.chunks * state, sizeof(float));
    space.dstates = space.take(space.chunks * state, sizeof(float));
    space.written = space.take(tokens * shape.value_heads * shape.value_dim, sizeof(float));
    space.dwritten = space.take(tokens * shape.value_heads * shape.value_dim, sizeof(float));
    space.dq = space.take(tokens * shape.key_heads * shape.key_dim, sizeof(float));
    space.dk = space.take(tokens * shape.key_heads * shape.key_dim, sizeof(float));
    return space;
}

template <class T>
kernels::delta_rows<T> delta_view(rows<T> r) {
    return {r.data(), r.stride()};
}

/// Returns the log decays that a call reads.
template <class T>
kernels::delta_log_decays<T> delta_log_decays_of(rows<float const> g, log_decay_parameters<T> const& of) {
    return {delta_view(g), delta_view(of.a), of.a_log.data(), of.dt_bias.data()};
}

inline float delta_scale_of(gated_delta_rule_shape const& shape) {
    return static_cast<float>(shape.scale ? *shape.scale : 1 / std::sqrt(static_cast<double>(shape.key_dim)));
}

/// Throws `cpx::error` unless `states` is empty or one for each sequence and value head.
template <class T, class F>
void require_states(char const* where, char const* what, gated_delta_rule_shape const& shape,
                    gated_delta_rule_input<T> const& in, std::span<F> states, caller here) {
    index_t const wanted = (std::ssize(in.offsets) - 1) * shape.value_heads * shape.key_dim * shape.value_dim;
    require(states.empty() || std::ssize(states) == wanted, where, (std::string("size of ") + what).c_str(), wanted,
            states.size(), here);
    require_memory(where, {{what, states}}, here);
}

/// How many sequences a call may have: as many as there are rows of blocks.
inline constexpr std::size_t delta_most_sequences = 65535;

inline void require_delta_tokens(char const* where, index_t tokens, caller here) {
    require(tokens < (index_t{1} << 31) - 128, where, "tokens", "less than 2^31 - 128", tokens, here);
}

/// Throws `cpx::error` unless sizes make sense.
inline void require_delta_shape(char const* where, gated_delta_rule_shape const& shape, caller here) {
    require(shape.key_heads >= 1, where, "key heads", "at least 1", shape.key_heads, here);
    require(shape.value_heads >= 1, where, "value heads", "at least 1", shape.value_heads, here);
    require(shape.value_heads <= 65535, where, "value heads", "at most 65535", shape.value_heads, here);
    require(shape.value_heads % shape.key_heads == 0, where, "value heads",
            in_words("a multiple of the key heads, ", shape.key_heads), shape.value_heads, here);
    require(shape.key_dim >= 1 && shape.key_dim <= 256, where, "key_dim", "from 1 to 256", shape.key_dim, here);
    require(shape.value_dim >= 1 && shape.value_dim <= 65536, where, "value_dim", "from 1 to 65536", shape.value_dim,
            here);
}

/// The same of a call whose room is asked for.
inline void require_delta_sizes(char const* where, gated_delta_rule_shape const& shape, index_t tokens,
                                index_t sequences, caller here) {
    require_delta_shape(where, shape, here);
    require_stretch(shape, where, here);
    require(tokens >= 0, where, "tokens", "at least 0", tokens, here);
    require_delta_tokens(where, tokens, here);
    require(sequences >= 0 && sequences <= static_cast<index_t>(delta_most_sequences), where, "sequences",
            "from 0 to 65535", sequences, here);
    // of one less than 2^40; and of chunks there are fewer than 2^26
    index_t const of_chunk =
        shape.value_heads * shape.value_dim * std::max<index_t>(shape.key_dim, kernels::delta_chunk);
    require(delta_chunks(tokens, sequences) <= (index_t{1} << 57) / of_chunk, where,
            "elements of chunks' states or values", "at most 2^57",
            in_words(delta_chunks(tokens, sequences), " times ", of_chunk), here);
}

/// Throws `cpx::error` unless there is a number for each value head.
template <class F>
void require_heads(char const* where, char const* what, gated_delta_rule_shape const& shape, std::span<F> numbers,
                   caller here) {
    require(std::ssize(numbers) == shape.value_heads, where, (std::string("size of ") + what).c_str(),
            shape.value_heads, numbers.size(), here);
    require_memory(where, {{what, numbers}}, here);
}

/// Throws `cpx::error` unless sizes make sense and the rows that are read fit them, among them beta if `Erases`.
template <bool Erases, class In>
void require_delta_rows(char const* where, gated_delta_rule_shape const& shape, In const& in, caller here) {
    index_t const tokens = in.k.count();
    require_delta_shape(where, shape, here);
    require_delta_tokens(where, tokens, here);
    index_t const keys = shape.key_heads * shape.key_dim, values = shape.value_heads * shape.value_dim;
    require_rows(where, {{"q", in.q, tokens, keys}, {"k", in.k, tokens, keys}, {"v", in.v, tokens, values}}, here);
    if (in.g_of.given()) {
        require(!in.g.data(), where, "g", "none, for it is made of parameters", "some", here);
        require_rows(where, {{"a", in.g_of.a, tokens, shape.value_heads}}, here);
        require_heads(where, "a_log", shape, in.g_of.a_log, here);
        require_heads(where, "dt_bias", shape, in.g_of.dt_bias, here);
    } else {
        require_rows(where, {{"g", in.g, tokens, shape.value_heads}}, here);
    }
    if constexpr (Erases)
        require_rows(where, {{"beta", in.beta, tokens, shape.value_heads}}, here);
    else
        require(!in.beta.data(), where, "beta", "none, for nothing is erased", "some", here);
}

/// The same of sequences.
template <bool Erases, class T>
void require_delta_input(char const* where, gated_delta_rule_shape const& shape, gated_delta_rule_input<T> const& in,
                         caller here) {
    require_delta_rows<Erases>(where, shape, in, here);
    require_stretch(shape, where, here);
    require(Erases || in.saved.empty(), where, "saved", "none, for there are no inverses where nothing is erased",
            in.saved.size(), here);
    require(!in.offsets.empty() && in.offsets.size() <= delta_most_sequences + 1, where, "size of offsets",
            "from 1 to 65536", in.offsets.size(), here);
    require(in.first.empty() || in.first.size() + 1 == in.offsets.size(), where, "size of first", in.offsets.size() - 1,
            in.first.size(), here);
    require(in.counts.empty() || in.counts.size() + 1 == in.offsets.size(), where, "size of counts",
            in.offsets.size() - 1, in.counts.size(), here);
    require_memory(where, {{"offsets", in.offsets}, {"first", in.first}, {"counts", in.counts}}, here);
    require_states(where, "state", shape, in, in.state, here);
}

/// Throws `cpx::error` if what a call writes overlaps what it reads or something else that it writes.
template <class T>
void require_delta_apart(char const* where, gated_delta_rule_input<T> const& in, std::initializer_list<operand> written,
                         std::initializer_list<operand> more, caller here) {
    std::span const all(written.begin(), written.size());
    require_apart(where, all,
                  std::array{operand("q", in.q), operand("k", in.k), operand("v", in.v), operand("g", in.g),
                             operand("beta", in.beta), operand("offsets", in.offsets), operand("state", in.state),
                             operand("first", in.first), operand("counts", in.counts), operand("a", in.g_of.a),
                             operand("a_log", in.g_of.a_log), operand("dt_bias", in.g_of.dt_bias)},
                  here);
    require_apart(where, all, std::span(more.begin(), more.size()), here);
}

inline void require_bytes(char const* where, std::string const& what, index_t bytes, std::span<char> memory,
                          caller here) {
    require(std::ssize(memory) >= bytes, where, ("bytes of " + what).c_str(), in_words("at least ", bytes),
            memory.size(), here);
    require(address(memory.data()) % 256 == 0, where, ("address of " + what).c_str(), "a multiple of 256",
            address(memory.data()), here);
    require_memory(where, {{what.c_str(), memory}}, here);
}

} // namespace detail

} // namespace cpx::cuda
