// SPDX-License-Identifier: Apache-2.0
// Where chunks begin.
#pragma once

#include <cpx/core/config.hpp>
#include <cpx/core/extent.hpp>
#include <cpx/core/index.hpp>

#include <concepts>
#include <cstdint>

namespace cpx {

/// Says where chunk `c` of `C` begins in a run of `n` tokens, and moves that place to where a sequence may be cut.
///
/// `begin(c, C, n)` ascends in `c` from 0; `snap(t, n)` ascends in `t` from 0 to at most `n`, the length of the
/// sequence that holds token `t`. Two steps, because a run may be the whole batch: the first looks at the run only, the
/// second at the sequence that is cut.
///
/// A cut may also tell `fills(C, n)`: that each of the C chunks of a sequence of `n` tokens surely holds one. Plans for
/// long sequences then follow from the layout, without a look at every chunk. And `chunk(t, C, n)`: which chunk holds
/// token `t` of a sequence, which is searched for else.
template <class C>
concept cut = std::copyable<C> && std::default_initializable<C> && requires(C const k, int c, index_t n) {
    { k.begin(c, c, n) } -> std::same_as<index_t>;
    { k.snap(n, n) } -> std::same_as<index_t>;
};

/// floor(n c / C): equal chunks when C divides n, otherwise chunks that differ by one token.
struct balanced {
    CPX_HOST_DEVICE constexpr index_t begin(int c, int chunks, index_t n) const { return n * c / chunks; }
    CPX_HOST_DEVICE constexpr index_t snap(index_t t, index_t) const { return t; }
    constexpr bool fills(int chunks, index_t n) const { return n >= chunks; }
    CPX_HOST_DEVICE constexpr int chunk(index_t t, int chunks, index_t n) const {
        return static_cast<int>(((t + 1) * chunks - 1) / n);
    }
    friend constexpr bool operator==(balanced, balanced) = default;
};

/// Balanced, then rounded to the nearest multiple of `Unit` tokens of the sequence, or to its end.
///
/// Cuts at multiples of the delta rule's chunk (64) make `carry::serial` bitwise equal to one rank.
/// Holds over the batch, too: there the multiple is counted from the start of the sequence that is cut.
/// `aligned<cpx::dynamic>{unit}` takes the unit at run time.
template <int Unit = 64>
struct aligned : private extent<Unit> {
    constexpr aligned() = default;
    CPX_HOST_DEVICE constexpr explicit aligned(int unit) : extent<Unit>(unit) {}

    CPX_HOST_DEVICE constexpr int unit() const { return this->get(); }
    CPX_HOST_DEVICE constexpr index_t begin(int c, int chunks, index_t n) const {
        return balanced{}.begin(c, chunks, n);
    }
    CPX_HOST_DEVICE constexpr index_t snap(index_t t, index_t n) const {
        index_t const nearest = (t + unit() / 2) / unit() * unit();
        return nearest < n ? nearest : n;
    }
    constexpr bool fills(int chunks, index_t n) const { return n / unit() >= chunks; }
    CPX_HOST_DEVICE constexpr int chunk(index_t t, int chunks, index_t n) const {
        index_t const snap_beyond = (t / unit() + 1) * unit() - unit() / 2; // the first places that do
        return balanced{}.chunk((snap_beyond < n ? snap_beyond : n) - 1, chunks, n);
    }
    friend constexpr bool operator==(aligned const&, aligned const&) = default;
};

/// Returns where place `at` of a whole batch is cut: there where `cut` would cut the sequence that holds it. `batch`
/// tells its offsets as `thd` does, or as what stands for one on a device.
CPX_CALLS_BACK
template <cut C, class Batch>
CPX_HOST_DEVICE constexpr index_t snap_in_batch(C const& cut, Batch const& batch, index_t at) {
    if constexpr (std::same_as<C, balanced>) return at; // which no sequence moves
    if (at >= batch.tokens()) return batch.tokens();
    auto const s = batch.sequence(at);
    return batch.offset(s) + cut.snap(at - batch.offset(s), batch.length(s));
}

namespace detail {

/// Whether the chunks of every run are known to ascend from its first row; a user's cut is asked.
template <class C>
inline constexpr bool ascends = false;
template <>
inline constexpr bool ascends<balanced> = true;
template <int Unit>
inline constexpr bool ascends<aligned<Unit>> = true;

/// Says what `balanced::begin` says, for one number of chunks C and runs of many lengths n, with a division a run.
///
/// n c / C is (n / C) c + r c / C with r = n mod C; r c < C^2, so that a reciprocal of 48 bits gives it where C < 2^16.
class balanced_begins {
public:
    CPX_HOST_DEVICE constexpr explicit balanced_begins(int chunks) : chunks_(chunks) {
        if (chunks < 1 << 16) reciprocal_ = (std::uint64_t{1} << 48) / static_cast<std::uint64_t>(chunks) + 1;
    }

    /// Returns what says where chunk c of a run of `n` begins.
    CPX_HOST_DEVICE constexpr auto of(index_t n) const {
        return [*this, n, whole = n / chunks_, rest = n % chunks_](int c) {
            if (reciprocal_ == 0) return n * c / chunks_;
            return whole * c + static_cast<index_t>(static_cast<std::uint64_t>(rest * c) * reciprocal_ >> 48);
        };
    }

private:
    index_t chunks_;
    std::uint64_t reciprocal_ = 0;
};

} // namespace detail

} // namespace cpx
