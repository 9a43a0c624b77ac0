// SPDX-License-Identifier: Apache-2.0
// Launches of the backward of the delta rule's kernels for sm_90a, and of a decay a head's, at once or in parts.
// Without CUTLASS's headers there are none.
#pragma once

#include <cpx/cuda/delta_rule_hopper.hpp>

namespace cpx::cuda::detail {

/// How a backward in parts goes on: whether it has walked along before gradients of states were known, and which share
/// of the other gradients, in 256ths, is computed beside walks back.
struct delta_begun {
    bool along = false;
    int share = 0;
};

} // namespace cpx::cuda::detail

#if __has_include(<cute/arch/mma_sm90_gmma.hpp>)

#include <cpx/delta_rule_dstate.cuh>
#include <cpx/delta_rule_grad.cuh>

#include <algorithm>

namespace cpx::cuda::detail {

/// Calls `f` with how many halves of a chain a block takes, as an std::integral_constant: both where blocks are enough,
/// for then what these share counts. Those of a decay share little.
template <bool Erases, class F>
void with_halves(bool enough, F&& f) {
    if constexpr (Erases)
        if (enough) return f(std::integral_constant<int, 2>());
    f(std::integral_constant<int, 1>());
}

/// Returns how much shared memory blocks of walks have, of so many halves.
template <std::size_t Halves, bool Erases>
constexpr std::size_t delta_walks_bytes() {
    constexpr std::size_t along = sizeof(kernels::delta::state_memory<Halves, Erases, Erases>);
    return Erases ? std::max(along, sizeof(kernels::delta::dstate_memory<Halves>)) : along;
}

template <bool Erases, class T>
void launch_delta_hopper_backward_fold(delta_call<Erases, T> const& of, rows<T const> dout, std::span<float> dstates) {
    auto walk = delta_walk_of(of);
    walk.initial = nullptr;
    launch_delta_prepared(of, walk);
    if constexpr (!Erases) {
        auto const steps = delta_steps_of(of, false, true);
        launch_delta_steps<false, true, T>(of, walk, steps, of.in.q, dout);
        launch_delta_join(of, walk, steps, {nullptr, dstates.data()});
    } else {
        auto const q = panels_of(of.in.q, of.shape.key_dim, of.here), k = panels_of(of.in.k, of.shape.key_dim, of.here),
                   d = panels_of(dout, of.shape.value_dim, of.here);
        index_t const chains = of.space.sequences * of.shape.value_heads;
        walk.last = dstates.data();
        with_halves<true>(fills_multiprocessors(2 * chains), [&](auto halves) {
            index_t const backs = chains * 2 / halves;
            launch_hopper(of, "delta_rule_walks", kernels::delta_rule_walks<T, halves, true, true>, backs,
                          kernels::delta_walks_threads<true>, delta_walks_bytes<halves, true>(), q, k, d, d, d, walk,
                          walk, kernels::delta_dvalues<T>{}, static_cast<int>(backs));
        });
    }
}

/// Returns by how many blocks the backward walks along so many chains, both halves each, while as many walk back: where
/// these leave no room, by few, one chain after the other, so that gradients can follow while what was read is in L2.
inline index_t delta_walks_along(gated_delta_rule_shape const& shape, index_t chains) {
    index_t const room = multiprocessors() - chains, heads = shape.value_heads;
    return chains <= room ? chains : std::min(chains, std::max({heads, multiprocessors() / 4 / heads * heads, room}));
}

/// Which ways a backward walks in one launch. Along alone, while the gradients of states after sequences are not known,
/// and then back alone; `along_and_fold`: along, and back to what outputs alone make the gradients of states before.
enum class delta_ways { both, along, back, along_and_fold };

/// Whether blocks of walks have both halves of a chain: where as many blocks of both ways are enough, and of one way
/// where twice as many would not come together.
template <bool Erases>
bool delta_has_both_halves(delta_ways ways, index_t chains) {
    bool const one_way = ways == delta_ways::along || ways == delta_ways::back;
    return Erases && (one_way ? 2 * chains > multiprocessors() : fills_multiprocessors(2 * chains));
}

/// Returns how many multiprocessors walks back alone leave.
template <bool Erases>
index_t delta_room_beside_back(index_t chains) {
    index_t const walking = !Erases || delta_has_both_halves<Erases>(delta_ways::back, chains) ? chains : 2 * chains;
    return std::max<index_t>(multiprocessors() - walking, 0);
}

/// Returns the share of the gradients that are not of states which is computed beside walks back alone, of as many
/// sequences with so many tokens. Rather too little, for others wait for what walks make: none of few chunks, after
/// which a key head's gradients would end late, and less of many sequences, which come one after the other there.
template <bool Erases>
int delta_share_beside_back(gated_delta_rule_shape const& shape, index_t sequences, index_t tokens) {
    constexpr index_t steps = 10; // of a walk, by trial, which a chunk and head's gradients take on a multiprocessor
    constexpr index_t all = kernels::delta_share::all, least = 16;
    index_t const chains = sequences * shape.value_heads, group = shape.value_heads / shape.key_heads;
    if (!Erases || chains == 0 || tokens / kernels::delta_chunk < 4 * steps * group * sequences) return 0;
    index_t const share =
        std::min(all * delta_room_beside_back<Erases>(chains) / (steps * chains), all / 2 / sequences);
    return share < least ? 0 : static_cast<int>(share);
}

/// A backward in parts: walks, which make gradients of the states before sequences and, where something is erased, of
/// values; then `rest`, whose kernel comes early and reads before it waits: what comes between waits for the walks.
template <bool Erases, class T>
class delta_backward {
public:
    delta_backward(delta_call<Erases, T> const& of, rows<T const> dout, gated_delta_rule_gradients<T> const& to)
        : of_(of), to_(to), chains_(of.space.sequences * of.shape.value_heads),
          along_(delta_walks_along(of.shape, chains_)), forth_(delta_walk_of(of)), q_(panels(of.in.q, keys())),
          k_(panels(of.in.k, keys())), v_(panels(of.in.v, values())), dout_(panels(dout, values())),
          dv_(panels(to.dv, values())) {
        forth_.states = of.workspace + of.space.states;
    }
    void prepare() const { launch_delta_prepared(of_, forth_, !of_.in.saved.empty()); }
    /// `dlast`: the gradients of states after sequences, `dfirst`: of those before; along alone neither counts.
    void walk(delta_ways ways, std::span<float const> dlast, std::span<float> dfirst) const {
        bool const goes_along = ways != delta_ways::back, goes_back = ways != delta_ways::along,
                   folds = ways == delta_ways::along_and_fold;
        auto back = forth_;
        back.states = folds ? nullptr : dstates();
        back.initial = dlast.data();
        back.last = dfirst.data();
        with_halves<Erases>(delta_has_both_halves<Erases>(ways, chains_), [&](auto halves) {
            index_t const backs = goes_back ? chains_ * 2 / halves : 0, most = 2 * chains_ / halves;
            index_t const alongs = !goes_along                 ? 0
                                   : halves == 1               ? most
                                   : ways == delta_ways::along ? std::min<index_t>(most, multiprocessors())
                                                               : along_;
            auto const launch = [&](auto kernel) {
                launch_hopper(of_, "delta_rule_walks", Erases && halves == 1 ? 2 : 1, kernel, backs + alongs,
                              kernels::delta_walks_threads<Erases>, delta_walks_bytes<halves, Erases>(), q_, k_, v_,
                              dout_, dv_, forth_, back, kernels::delta_dvalues<T>{delta_view(to_.dv, values())},
                              static_cast<int>(backs));
            };
            if constexpr (Erases)
                if (folds) return launch(kernels::delta_rule_walks<T, halves, true, true>);
            launch(kernels::delta_rule_walks<T, halves, Erases>);
        });
    }
    /// Launches a share of the other gradients; `ways`: of the walk that they follow.
    void rest(delta_ways ways, kernels::delta_share share = {}) const {
        if (share.first == share.last) return;
        bool const beside = share.last < kernels::delta_share::all;
        index_t const blocks =
            beside ? std::max<index_t>(delta_room_beside_back<Erases>(chains_), 1) : multiprocessors();
        bool const along_last = ways == delta_ways::both && delta_has_both_halves<Erases>(ways, chains_);
        launch_hopper(
            of_, "delta_rule_grad", kernels::delta_rule_grad<T, Erases>,
            std::min<index_t>(of_.space.chunks * of_.shape.key_heads, blocks), 512, sizeof(kernels::delta::grad_memory),
            q_, k_, v_, dout_, dv_, panels(to_.dq, keys()), panels(to_.dk, keys()),
            kernels::delta_gradients<T>{forth_.plan, forth_.prepared, forth_.states, dstates(),
                                        delta_view(to_.dq, keys()), delta_view(to_.dk, keys()), delta_view(to_.dg),
                                        delta_view(to_.dbeta), forth_.key_heads, forth_.group, forth_.scale,
                                        delta_view(to_.dv, values()), along_last && along_ < chains_, share});
    }

private:
    index_t keys() const { return of_.shape.key_dim; }
    index_t values() const { return of_.shape.value_dim; }
    char* dstates() const { return of_.workspace + of_.space.dstates; }
    template <class A>
    CUtensorMap panels(rows<A> r, index_t dim) const {
        return panels_of(r, dim, of_.here);
    }

    delta_call<Erases, T> const& of_;
    gated_delta_rule_gradients<T> const& to_;
    index_t chains_; ///< of sequences and heads
    index_t along_;  ///< blocks of both halves that walk along beside those that walk back
    kernels::delta_walk forth_;
    CUtensorMap q_, k_, v_, dout_, dv_;
};

// Launches of a backward in parts. What comes before gradients of states after sequences are known: walks along and,
// where something is erased, what outputs alone make the gradients of those before, if `folded` are wanted; walks back
// or, unless those along have begun, all walks, and a share of the other gradients beside them; the others.
template <bool Erases, class T>
void launch_delta_hopper_backward_begin(delta_call<Erases, T> const& of, rows<T const> dout,
                                        gated_delta_rule_gradients<T> const& to, std::span<float> folded) {
    delta_backward<Erases, T> const parts(of, dout, to);
    parts.prepare();
    parts.walk(folded.empty() || !Erases ? delta_ways::along : delta_ways::along_and_fold, {}, folded);
}
template <bool Erases, class T>
void launch_delta_hopper_walks(delta_call<Erases, T> const& of, rows<T const> dout, std::span<float const> dlast,
                               gated_delta_rule_gradients<T> const& to, delta_begun begun) {
    delta_backward<Erases, T> const parts(of, dout, to);
    if (!begun.along) parts.prepare();
    delta_ways const ways = begun.along ? delta_ways::back : delta_ways::both;
    parts.walk(ways, dlast, to.dstate);
    parts.rest(ways, {0, begun.share});
}
template <bool Erases, class T>
void launch_delta_hopper_gradients(delta_call<Erases, T> const& of, rows<T const> dout,
                                   gated_delta_rule_gradients<T> const& to, delta_begun begun) {
    delta_backward<Erases, T>(of, dout, to)
        .rest(begun.along ? delta_ways::back : delta_ways::both, {begun.share, kernels::delta_share::all});
}
template <bool Erases, class T>
void launch_delta_hopper_backward(delta_call<Erases, T> const& of, rows<T const> dout, std::span<float const> dlast,
                                  gated_delta_rule_gradients<T> const& to) {
    delta_backward<Erases, T> const parts(of, dout, to);
    parts.prepare();
    parts.walk(delta_ways::both, dlast, to.dstate);
    parts.rest(delta_ways::both);
}

} // namespace cpx::cuda::detail

#else

namespace cpx::cuda::detail {

template <class... A>
void launch_delta_hopper_backward_fold(A const&...) {}
template <class... A>
void launch_delta_hopper_backward_begin(A const&...) {}
template <bool Erases, class... A>
int delta_share_beside_back(A const&...) {
    return 0;
}
template <class... A>
void launch_delta_hopper_walks(A const&...) {}
template <class... A>
void launch_delta_hopper_gradients(A const&...) {}
template <class... A>
void launch_delta_hopper_backward(A const&...) {}

} // namespace cpx::cuda::detail

#endif
