// SPDX-License-Identifier: Apache-2.0
// Attention of single queries over kept keys and values of 16 bits, on tensor cores: each warp copies tiles of keys and
// of values to rows of its own, while those before are multiplied.
#pragma once

#include <cpx/attention_cache.cuh>
#include <cpx/attention_core_tiles.cuh>

namespace cpx::kernels {

namespace attention {

inline constexpr int cache_warps = 4, cache_threads = 32 * cache_warps;
inline constexpr int cache_heads = 8, cache_keys = 16; ///< query heads of a block; keys of a tile

/// Returns how many tiles of D columns a warp has room for: those under way keep the memory busy, some 100 KB a
/// multiprocessor with the blocks that fit.
__host__ __device__ constexpr int cache_slots(int D) { return D > 128 ? 3 : 4; }
/// Returns the bytes of the tiles of a block.
__host__ __device__ constexpr int cache_tile_bytes(int D) {
    return cache_warps * cache_slots(D) * core_bytes(cache_keys, D);
}

/// Of every warp's heads, behind the tiles as `core_notes` are.
struct cache_notes {
    array<float, cache_warps, cache_heads> highest, total;
};
/// Returns the bytes of shared memory of a block.
constexpr int cache_memory(int D) { return cache_tile_bytes(D) + int{sizeof(cache_notes)}; }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

/// Tiles of a warp: its keys and values in turns, which are copied ahead of their use.
template <class T, int D>
class cache_tiles {
public:
    static constexpr int slots = cache_slots(D), bytes = core_bytes(cache_keys, D);

    /// memory: shared, `cache_tile_bytes(D)`. Begins with the keys from `first` on.
    __device__ cache_tiles(cached_tensors<T> const& t, block_stretch<cache_heads> const& at, char* memory,
                           std::int64_t first)
        : own_(shared_address(memory) + static_cast<std::uint32_t>(core_warp() * slots * bytes)), left_(at.end - first),
          there_(8 * column() < t.dim) {
        std::int64_t const row = at.first_row + first + core_lane() / (D / 8),
                           column_of_all = at.key_column + (there_ ? 8 * column() : 0);
        rows<T const> const* const tensors[2] = {&t.k, &t.v};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            stride_[i] = tensors[i]->stride();
            next_[i] = tensors[i]->data() + row * stride_[i] + column_of_all;
        }
        for (int i = 0; i < slots - 1; ++i) copy();
    }
    /// Returns where the next tile is. The one before it, which all lanes have read, gives way to a later one.
    __device__ __forceinline__ std::uint32_t next() {
        wait_for_copies_but<slots - 2>();
        __syncwarp();
        copy();
        std::uint32_t const tile = own_ + static_cast<std::uint32_t>(read_ * bytes);
        read_ = read_ + 1 == slots ? 0 : read_ + 1;
        return tile;
    }

private:
    static constexpr int at_once = 256 / D; ///< rows that a warp copies by one instruction

    __device__ static int column() { return core_lane() % (D / 8); }

    /// Copies a tile of keys, then one of values.
    __device__ __forceinline__ void copy() {
        std::uint32_t const to =
            in_tile<D>(own_ + static_cast<std::uint32_t>(written_ * bytes), core_lane() / (D / 8), column());
        auto const copy_rows = [&](auto whole, int rows) {
            int const own = core_lane() / (D / 8);
            T const *from = next_[0], *const first = from - own * stride_[0];
#pragma unroll
            for (int i = 0; i < cache_keys / at_once; ++i) {
                int const row = i * at_once;
                bool const there = there_ && (whole || row + own < rows);
                std::uint32_t const other = row % 8 * 16; // rows' columns lie in other places, see `in_tile`
                copy_later((to ^ other) + 2 * D * row, there ? from : first, there);
                from += at_once * stride_[0];
            }
        };
        if (left_ >= cache_keys)
            copy_rows(std::true_type(), cache_keys);
        else if (left_ > 0)
            copy_rows(std::false_type(), static_cast<int>(left_));
        end_of_copies();
        next_[0] += cache_warps * cache_keys * stride_[0];
        swap(next_);
        swap(stride_);
        if (values_) left_ -= cache_warps * cache_keys;
        values_ = !values_;
        written_ = written_ + 1 == slots ? 0 : written_ + 1;
    }
    template <class A>
    __device__ static void swap(A (&of)[2]) {
        A const first = of[0];
        of[0] = of[1];
        of[1] = first;
    }

    std::uint32_t const own_;
    std::int64_t left_; ///< keys from the next tile's first on
    bool const there_;  ///< whether this lane's columns are the head's
    T const* next_[2];  ///< what this lane copies first of the next tile, and of the one after it
    std::int64_t stride_[2];
    int read_ = 0, written_ = 0;
    bool values_ = false;
};

/// Sums of a warp over the keys it has read, of heads that read one key head. Of the sums lane l has columns l / 4 and
/// l / 4 + 8 of every 16, of heads 2 (l % 4) and the next; weights are of keys in place of columns.
template <class T, int D>
struct core_cache_sums {
    array<std::uint32_t, D / 16, 2> q;
    array<float, D / 16, 4> sum = {};
    float highest[2] = {-INFINITY, -INFINITY}, total[2] = {};

    __device__ explicit core_cache_sums(block_stretch<cache_heads> const& at, cached_tensors<T> const& t) {
        int const head = core_lane() / 4;
        T const* const row = t.q.row(at.query) + (at.head + head) * t.dim;
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
#pragma unroll
            for (int further = 0; further < 2; ++further) {
                int const column = 16 * k + 8 * further + core_lane() % 4 * 2;
                q[k][further] =
                    at.has(head) && column < t.dim ? *reinterpret_cast<std::uint32_t const*>(row + column) : 0;
            }
    }
    /// Makes weights of the scores of a tile's keys, of which there are `count`; fades the sums before.
    __device__ __forceinline__ void weigh(std::uint32_t k, int count, float scale, float (&weight)[4]) {
        int const lane = core_lane();
        std::uint32_t const from = in_tile<D>(k, lane % 16, lane / 16);
        float odd[4] = {};
#pragma unroll
        for (int e = 0; e < 4; ++e) weight[e] = 0.0f;
#pragma unroll
        for (int c = 0; c < D / 16; c += 2) { // two sums, for one waits for itself
            std::uint32_t x[4];
            load_matrices(x, from ^ 32 * c);
            multiply<T>(weight, x, q[c][0], q[c][1]);
            load_matrices(x, from ^ 32 * (c + 1));
            multiply<T>(odd, x, q[c + 1][0], q[c + 1][1]);
        }
        float fade[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            bool const sees[2] = {lane / 4 < count, lane / 4 + 8 < count};
            float top = highest[e];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float& of = weight[2 * r + e];
                of = sees[r] ? (of + odd[2 * r + e]) * scale : -INFINITY;
                top = fmaxf(top, of);
            }
#pragma unroll
            for (int apart = 4; apart < 32; apart *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, apart));
            fade[e] = highest[e] == top ? 1.0f : power_of_two(highest[e] - top);
            highest[e] = top;
            total[e] *= fade[e];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float& of = weight[2 * r + e];
                of = sees[r] ? power_of_two(of - top) : 0.0f;
                total[e] += of;
            }
        }
        if (__ballot_sync(~0u, fade[0] != 1.0f || fade[1] != 1.0f) == 0) return;
#pragma unroll
        for (int m = 0; m < D / 16; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[m][e] *= fade[e % 2];
    }
    /// Adds a tile's values by their weights, each of which is a sum of two elements, to some 16 bits and more.
    __device__ __forceinline__ void add(std::uint32_t v, float const (&weight)[4]) {
        int const lane = core_lane();
        std::uint32_t const from = in_tile<D>(v, lane % 8 + lane / 16 * 8, lane / 8 % 2);
        std::uint32_t high[2], low[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float const first = weight[2 * r], second = weight[2 * r + 1];
            T const of_first = static_cast<T>(first), of_second = static_cast<T>(second);
            high[r] = transpose(two_elements<T>(first, second));
            low[r] = transpose(two_elements<T>(first - widen(of_first), second - widen(of_second)));
        }
#pragma unroll
        for (int m = 0; m < D / 16; ++m) {
            std::uint32_t x[4];
            load_transposed(x, from ^ 32 * m);
            multiply<T>(sum[m], x, high[0], high[1]);
            multiply<T>(sum[m], x, low[0], low[1]);
        }
    }
};

#endif

} // namespace attention

/// As `attend_over_stretch`, of 8 query heads at a time and up to D columns, a multiple of 8; rows begin at multiples
/// of 16 bytes.
template <class T, int D>
__global__ void __launch_bounds__(attention::cache_threads)
    attend_over_stretch_on_cores(__grid_constant__ cached_tensors<T> const t, stretch_partials const partials) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    using namespace attention;
    constexpr int apart = D + 4; // of the sums of heads: what lanes write at once lies in all banks
    extern __shared__ __align__(1024) char tile_memory[];
    auto& [highest, total] = *reinterpret_cast<cache_notes*>(tile_memory + cache_tile_bytes(D));
    wait_for_previous_kernel();
    block_stretch<cache_heads> const at(t);
    if (at.from >= at.to) return;
    int const warp = core_warp(), lane = core_lane();
    std::int64_t const begin = at.begin + warp * cache_keys;
    cache_tiles<T, D> tiles(t, at, tile_memory, begin);
    core_cache_sums<T, D> sums(at, t);
    for (std::int64_t place = begin; place < at.end; place += cache_warps * cache_keys) {
        float weight[4];
        sums.weigh(tiles.next(), static_cast<int>(min(at.end - place, std::int64_t{cache_keys})), t.scale * log2_e,
                   weight);
        sums.add(tiles.next(), weight);
    }
    let_next_kernel_come();
    wait_for_copies();

#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int far = 4; far < 32; far *= 2) sums.total[e] += __shfl_xor_sync(~0u, sums.total[e], far);
        if (lane < 4) {
            highest[warp][2 * lane + e] = sums.highest[e];
            total[warp][2 * lane + e] = sums.total[e];
        }
    }
    float* const of_warps = reinterpret_cast<float*>(tile_memory); // (warps, heads, apart)
    __syncthreads();                                               // tiles have been read
#pragma unroll
    for (int m = 0; m < D / 16; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            of_warps[(warp * cache_heads + lane % 4 * 2 + e % 2) * apart + 16 * m + lane / 4 + e / 2 * 8] =
                sums.sum[m][e];
    __syncthreads();
    for (int g = at.from; g < at.to; ++g) {
        float top = highest[0][g], all = 0.0f;
        array<float, cache_warps> share;
#pragma unroll
        for (int w = 1; w < cache_warps; ++w) top = fmaxf(top, highest[w][g]);
#pragma unroll
        for (int w = 0; w < cache_warps; ++w) { // those behind the end have read nothing
            share[w] = at.begin + w * cache_keys < at.end ? power_of_two(highest[w][g] - top) : 0.0f;
            all = fmaf(share[w], total[w][g], all);
        }
        at.write(cache_threads, t, partials, g, top * ln_2, all, [&](int d) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < cache_warps; ++w)
                sum = fmaf(share[w], of_warps[(w * cache_heads + g) * apart + d], sum);
            return sum;
        });
    }
#endif
}

} // namespace cpx::kernels
