// SPDX-License-Identifier: Apache-2.0
// Positions of text, images and videos: placeholders counted, placed in the batch, and turned into positions.
#pragma once

#include <cpx/layout/algorithm.hpp>
#include <cpx/plan/media_position.hpp>

#include <cpx/previous_kernel.cuh>

#include <limits>

namespace cpx::kernels {

/// Grids of images or of videos; a row of zeros stands for none.
struct media_grids {
    index_t const* sizes;  ///< (count, 3): time, height, width in patches
    double const* seconds; ///< a grid; null: 1
    int count;
};

/// A grid among all of its kind. The list ends with one more that has no rows.
struct placed_grid {
    index_t row, advance;      ///< of what is before it, as of `media_frame`
    int frames, height, width; ///< in rows of features; none: 0
};

/// A segment of a rank, which may be empty. Behind the last, `row` is behind the last row and `sequence` -1.
struct media_slot {
    index_t row, token, sequence;
    index_t valid; ///< tokens of its sequence before the padding
    index_t place; ///< among the segments of all ranks, in the order of the batch
};

/// Two sums that are made at once: of images and videos, or of rows and advances.
struct media_sums {
    index_t a = 0, b = 0;
    friend CPX_HOST_DEVICE media_sums operator+(media_sums x, media_sums y) { return {x.a + y.a, x.b + y.b}; }
    friend CPX_HOST_DEVICE media_sums operator-(media_sums x, media_sums y) { return {x.a - y.a, x.b - y.b}; }
};

/// What is before a segment: placeholders in the batch and on the rank, and its first token's place without media.
struct placed_slot {
    media_sums media, own;
    index_t origin;
};

/// What kernels find wrong, in host memory: of each kind any one, 0: nothing.
struct media_faults {
    std::uint64_t grid, sequence,
        row;               ///< 1 + 2 * number + kind: of a grid, of a sequence that ends in an item, of a row
    std::uint64_t rows[2]; ///< of a kind: wanted * 2^32 + placeholders
};

/// What the kernels of one batch share.
struct mrope_work {
    media_slot* slots;   ///< (slot_count + 1)
    index_t* order;      ///< (places): which of all ranks' counts is the next in the order of the batch; negative: none
    index_t* first;      ///< (sequences + 1): the place of a sequence's first segment
    media_count* counts; ///< (slot_count): of this rank
    media_count const* gathered; ///< (gathered_count), of all ranks' from `gathered_first` on; others are 0
    media_sums* tiles;           ///< (tiles + 1): placeholders of a tile of rows; then, those before it
    media_sums* before;          ///< (places + 1): placeholders before a place
    placed_slot* placed;         ///< (slot_count)
    index_t* origins;            ///< (sequences + 1)
    placed_grid* grids[2];
    media_grids given[2];
    std::int32_t* axes;    ///< (3, rows), from axis to axis `stride`
    std::int32_t* held[2]; ///< the rows that hold placeholders, then -1
    index_t* deltas;       ///< (sequences)
    media_faults* found;
    index_t stride, gathered_first, gathered_count;
    index_t merge, tokens_per_second;
    mrope_rule rule;
    int rows, slot_count, places, sequences, tile_count;
};

inline constexpr int media_threads = 512; ///< of every block here, and rows of a tile

/// One store, which the host sees as a whole.
__device__ inline void report(std::uint64_t& fault, std::uint64_t what) {
    *const_cast<std::uint64_t volatile*>(&fault) = what;
}
__device__ inline void report(std::uint64_t& fault, int kind, index_t number) {
    report(fault, 1 + 2 * static_cast<std::uint64_t>(number) + static_cast<unsigned>(kind));
}

/// Returns the sum of `own` of the threads of the block before this one; `all`: of all threads.
__device__ inline media_sums sum_before(media_sums own, media_sums& all) {
    constexpr int warps = media_threads / 32;
    __shared__ media_sums of_warps[std::size_t{warps}];
    int const lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    auto const up_to_lane = [&](media_sums sum, int lanes) {
        for (int step = 1; step < lanes; step *= 2) {
            media_sums const left{__shfl_up_sync(~0u, sum.a, step), __shfl_up_sync(~0u, sum.b, step)};
            if (lane >= step) sum = sum + left;
        }
        return sum;
    };
    media_sums const sum = up_to_lane(own, 32);
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    media_sums const ends = up_to_lane(lane < warps ? of_warps[lane] : media_sums{}, warps);
    auto const from = [&](int other) {
        return media_sums{__shfl_sync(~0u, ends.a, other), __shfl_sync(~0u, ends.b, other)};
    };
    media_sums const before = from(warp > 0 ? warp - 1 : 0);
    all = from(warps - 1);
    __syncthreads(); // the next call writes what others may still read
    return warp > 0 ? before + sum - own : sum - own;
}

/// Calls `put(i, sum of get(0), ..., get(i - 1))` for i from 0 to `count`, by one block.
template <class Get, class Put>
__device__ void scan(int count, Get const& get, Put const& put) {
    media_sums carry;
    for (int first = 0; first <= count; first += media_threads) {
        int const i = first + static_cast<int>(threadIdx.x);
        media_sums all;
        media_sums const before = sum_before(i < count ? get(i) : media_sums{}, all);
        if (i <= count) put(i, carry + before);
        carry = carry + all;
    }
}

/// Lists the grids of a kind with what is before them.
__device__ inline void place_grids(mrope_work const& w, int kind) {
    media_grids const& given = w.given[kind];
    index_t const most = std::numeric_limits<std::int32_t>::max();
    bool const split = kind == 1 && w.rule == mrope_rule::qwen3_vl;
    auto const grid_at = [&](int i) {
        placed_grid g{};
        index_t const time = given.sizes[3 * i], height = given.sizes[3 * i + 1], width = given.sizes[3 * i + 2];
        if (time == 0 && height == 0 && width == 0) return g;
        index_t const h = height / w.merge, x = width / w.merge;
        double const seconds = given.seconds ? given.seconds[i] : 1;
        bool const fits =
            time > 0 && height > 0 && width > 0 && h * w.merge == height && x * w.merge == width &&
            (kind == 1 || time == 1) && h <= most / x && time <= most / (h * x) && seconds >= 0 && seconds < 1 << 20 &&
            static_cast<double>(time) * static_cast<double>(w.tokens_per_second) * seconds <= static_cast<double>(most);
        if (!fits) {
            report(w.found->grid, kind, i);
            return g;
        }
        g.frames = static_cast<int>(time), g.height = static_cast<int>(h), g.width = static_cast<int>(x);
        return g;
    };
    auto const sums_of = [&](int i) {
        placed_grid const g = grid_at(i);
        if (g.frames == 0) return media_sums{};
        index_t const last =
            split ? 0 : frame_time(w.rule, g.frames - 1, given.seconds ? given.seconds[i] : 1, w.tokens_per_second);
        return media_sums{index_t{g.frames} * g.height * g.width,
                          (split ? g.frames : 1) * item_advance(w.rule, last, g.height, g.width)};
    };
    scan(given.count, sums_of, [&](int i, media_sums before) {
        placed_grid g = i < given.count ? grid_at(i) : placed_grid{};
        g.row = before.a, g.advance = before.b;
        w.grids[kind][i] = g;
    });
}

/// Returns the frame that holds a row of a kind's features.
__device__ inline media_frame frame_of(mrope_work const& w, int kind, index_t row) {
    placed_grid const* const grids = w.grids[kind];
    int const i = last_at_or_before(row, w.given[kind].count + 1, [&](int k) { return grids[k].row; });
    placed_grid const g = grids[i];
    if (g.frames == 0) return {g.row, g.advance};
    int const size = g.height * g.width, number = static_cast<int>(row - g.row) / size;
    index_t const begin = g.row + index_t{number} * size;
    if (kind == 1 && w.rule == mrope_rule::qwen3_vl)
        return {begin, g.advance + index_t{number} * max(g.height, g.width), 0, g.width};
    double const seconds = w.given[kind].seconds ? w.given[kind].seconds[i] : 1;
    return {begin, g.advance, frame_time(w.rule, number, seconds, w.tokens_per_second), g.width, number};
}

/// Returns the kind of a row, and finds its slot: of one behind the last row, or of an id that is text by itself, it
/// need not be the right one unless `always`.
template <class I>
__device__ media_kind kind_of(mrope_work const& w, I const* ids, media_tokens tokens, int row, bool always, int& slot) {
    media_kind const kind = row < w.rows ? tokens.kind(static_cast<index_t>(ids[row])) : media_kind::text;
    if (!always && kind == media_kind::text) return kind;
    slot = last_at_or_before(static_cast<index_t>(row), w.slot_count + 1, [&](int k) { return w.slots[k].row; });
    media_slot const& s = w.slots[slot];
    return s.sequence >= 0 && s.token + row - s.row < s.valid ? kind : media_kind::text;
}

/// Lists the grids, in two blocks, and counts the placeholders of every tile and segment, whose counts are 0 before.
template <class I>
__global__ void __launch_bounds__(media_threads)
    count_media(__grid_constant__ mrope_work const w, I const* ids, media_tokens tokens) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    if (blockIdx.x < 2) return place_grids(w, static_cast<int>(blockIdx.x));
    int const tile = static_cast<int>(blockIdx.x) - 2, row = tile * media_threads + static_cast<int>(threadIdx.x);
    int slot = -1;
    media_kind const kind = kind_of(w, ids, tokens, row, false, slot);
    int const images = __syncthreads_count(kind == media_kind::image),
              videos = __syncthreads_count(kind == media_kind::video);
    if (threadIdx.x == 0) w.tiles[tile] = {images, videos};
    if (images + videos == 0) return;
    unsigned const same = __match_any_sync(~0u, kind == media_kind::text ? -1 : slot);
    unsigned const of_images = __ballot_sync(~0u, kind == media_kind::image) & same,
                   of_videos = __ballot_sync(~0u, kind == media_kind::video) & same;
    if (kind == media_kind::text || static_cast<int>(threadIdx.x % 32) != __ffs(static_cast<int>(same)) - 1) return;
    if (of_images) atomicAdd(&w.counts[slot].image, __popc(of_images));
    if (of_videos) atomicAdd(&w.counts[slot].video, __popc(of_videos));
}

/// Finds what is before every segment, from the counts of all, and the deltas of sequences. One block.
template <class = void>
__global__ void __launch_bounds__(media_threads) locate_media(__grid_constant__ mrope_work const w) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    auto const each = [](int count, auto const& f) {
        for (int i = static_cast<int>(threadIdx.x); i < count; i += media_threads) f(i);
    };
    auto const sums_of = [](media_count c) { return media_sums{c.image, c.video}; };
    auto const gathered = [&](int i) {
        index_t const at = w.order[i] - w.gathered_first;
        return w.order[i] >= 0 && at >= 0 && at < w.gathered_count ? sums_of(w.gathered[at]) : media_sums{};
    };
    scan(w.places, gathered, [&](int i, media_sums sum) { w.before[i] = sum; });
    scan(
        w.slot_count, [&](int i) { return sums_of(w.counts[i]); },
        [&](int i, media_sums sum) {
            if (i < w.slot_count) w.placed[i].own = sum;
        });
    scan(
        w.tile_count, [&](int i) { return w.tiles[i]; }, [&](int i, media_sums sum) { w.tiles[i] = sum; });
    __syncthreads();
    each(2, [&](int kind) {
        index_t const rows = w.grids[kind][w.given[kind].count].row;
        media_sums const all = w.before[w.places];
        index_t const got = kind == 0 ? all.a : all.b;
        if (got != rows)
            report(w.found->rows[kind], static_cast<std::uint64_t>(rows) << 32 | static_cast<std::uint64_t>(got));
    });
    each(w.sequences + 1, [&](int s) {
        media_sums const at = w.before[w.first[s]];
        media_frame const image = frame_of(w, 0, at.a), video = frame_of(w, 1, at.b);
        bool const whole = image.begins_item(at.a);
        if (!whole || !video.begins_item(at.b)) report(w.found->sequence, whole, s - 1);
        w.origins[s] = at.a + at.b - image.advance - video.advance;
    });
    __syncthreads();
    each(w.sequences, [&](int s) { w.deltas[s] = w.origins[s] - w.origins[s + 1]; });
    each(w.slot_count, [&](int k) {
        media_slot const slot = w.slots[k];
        if (slot.sequence < 0) return;
        media_sums const at = w.before[slot.place];
        w.placed[k].media = at;
        w.placed[k].origin = slot.token + w.origins[slot.sequence] - at.a - at.b;
    });
}

/// Writes the positions of all rows, 0 behind the last, and lists those that hold placeholders.
template <class I>
__global__ void __launch_bounds__(media_threads)
    place_media(__grid_constant__ mrope_work const w, I const* ids, media_tokens tokens) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    int const tile = static_cast<int>(blockIdx.x), row = tile * media_threads + static_cast<int>(threadIdx.x);
    int k = 0;
    media_kind const kind = kind_of(w, ids, tokens, row, true, k);
    media_sums all;
    media_sums const flags{kind == media_kind::image, kind == media_kind::video};
    media_sums const held = w.tiles[tile] + sum_before(flags, all), total = w.tiles[w.tile_count];
    if (row >= w.rows) return;
    if (row >= total.a) w.held[0][row] = -1;
    if (row >= total.b) w.held[1][row] = -1;
    if (kind == media_kind::image) w.held[0][held.a] = row;
    if (kind == media_kind::video) w.held[1][held.b] = row;

    media_slot const s = w.slots[k];
    mrope_position at;
    if (s.sequence >= 0) {
        placed_slot const& p = w.placed[k];
        media_sums const here = held - p.own, media = p.media + here;
        media_frame const image = frame_of(w, 0, media.a), video = frame_of(w, 1, media.b);
        bool const whole = kind == media_kind::image || image.begins_item(media.a);
        if (!whole || (kind != media_kind::video && !video.begins_item(media.b))) report(w.found->row, whole, row);
        at = position_of(kind, p.origin + row - s.row - here.a - here.b, media.a, media.b, image, video);
        index_t const most = max(max(at.time, at.height), at.width);
        if (kind == media_kind::video && w.rule == mrope_rule::qwen2_5_vl_spatial_advance)
            atomicMax(reinterpret_cast<long long*>(w.deltas + s.sequence), static_cast<long long>(1 + most - s.valid));
    }
    w.axes[row] = static_cast<std::int32_t>(at.time);
    w.axes[w.stride + row] = static_cast<std::int32_t>(at.height);
    w.axes[2 * w.stride + row] = static_cast<std::int32_t>(at.width);
}

/// Replaces deltas by the greatest of `ranks` lists of them.
template <class = void>
__global__ void __launch_bounds__(media_threads)
    greatest_deltas(index_t const* lists, int ranks, int count, index_t* deltas) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    int const s = static_cast<int>(blockIdx.x) * media_threads + static_cast<int>(threadIdx.x);
    if (s >= count) return;
    index_t most = deltas[s];
    for (int r = 0; r < ranks; ++r) most = max(most, lists[static_cast<index_t>(r) * count + s]);
    deltas[s] = most;
}

/// Lists the segments of `rank`, one a chunk and sequence, from cu_seqlens of `count` sequences; `valid`: of those
/// without padding, null: there is none. One block. Offsets that descend make sequences without tokens.
template <listed_layout P, cut Cut, class I>
__global__ void __launch_bounds__(media_threads)
    find_media_slots(__grid_constant__ mrope_work const w, P const policy, Cut const cut, int rank, I const* offsets,
                     I const* valid, int count) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    int const chunks = policy.chunks(rank), all = policy.chunks(), ranks = policy.ranks();
    auto const length = [&](I const* of, int s) {
        index_t const n = static_cast<index_t>(of[s + 1]) - static_cast<index_t>(of[s]);
        return n > 0 ? n : 0;
    };
    auto const each = [](int end, auto const& f) {
        for (int i = static_cast<int>(threadIdx.x); i < end; i += media_threads) f(i);
    };
    scan(
        count,
        [&](int s) {
            return media_sums{rows_of(policy, rank, length(offsets, s), cut), 0};
        },
        [&](int s, media_sums before) {
            index_t row = before.a;
            if (s == count) {
                for (int k = count * chunks; k <= w.slot_count; ++k) w.slots[k] = {row, 0, -1, 0, 0};
                return;
            }
            index_t const n = length(offsets, s);
            for (int i = 0; i < chunks; ++i) {
                int const c = policy.chunk(rank, i);
                range const tokens = tokens_of(policy, c, n, cut);
                w.slots[s * chunks + i] = {row, tokens.first, s, valid ? length(valid, s) : n, s * all + c};
                row += tokens.size();
            }
        });
    each(w.sequences + 1, [&](int s) { w.first[s] = min(s, count) * all; });
    each(count * ranks, [&](int i) {
        int const s = i / ranks, r = i % ranks, of_rank = policy.chunks(r);
        for (int k = 0; k < of_rank; ++k)
            w.order[s * all + policy.chunk(r, k)] = static_cast<index_t>(r) * w.slot_count + s * of_rank + k;
    });
    each(w.places - count * all, [&](int i) { w.order[count * all + i] = -1; });
}

} // namespace cpx::kernels
