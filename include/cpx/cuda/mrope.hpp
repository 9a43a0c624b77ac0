// SPDX-License-Identifier: Apache-2.0
// Positions of text, images and videos on a GPU: of a rank's rows, from the placeholders of all ranks' segments.
#pragma once

#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/launch.hpp>
#include <cpx/cuda/nvtx.hpp>
#include <cpx/cuda/row_gather.hpp>
#include <cpx/cuda/write_numbers.hpp>
#include <cpx/plan/mrope.hpp>
#include <cpx/transport/nccl_host_page.hpp>

#include <cpx/mrope.cuh>

#include <memory>
#include <utility>

namespace cpx::cuda {

/// The largest batch that positions are made for; the same on all ranks.
struct mrope_capacity {
    index_t rows = 0;               ///< of a rank
    index_t segments = 0;           ///< of a rank; where a device finds them, every chunk of every sequence is one
    index_t sequences = 0;          ///< of the batch
    index_t images = 0, videos = 0; ///< grids; 0 of both: text, of which ranks send nothing
};

/// Images and videos of a batch in the device's memory, as trainers have them. Where there are fewer than of the batch
/// with which a graph was captured, rows of zeros stand for none.
struct device_grids {
    std::span<index_t const> images = {}, videos = {}; ///< (count, 3): image_grid_thw, video_grid_thw
    std::span<double const> seconds = {};              ///< a video, of Qwen2.5-VL: second_per_grid_t; none: 1
};

/// One rank's positions without the exchange: `count`, then what gathers the counts of all ranks, then `place`. Made
/// once, for every batch that fits; all else is in stream order, without allocation or a wait, and can be captured.
///
/// Belongs to the device that is current when it is made. What kernels find wrong in a batch, `check` throws.
class rank_positions {
public:
    /// Throws `cpx::error` if there are seconds in `of`, which come with the grids, or if sizes are none.
    rank_positions(mrope_capacity most, int rank, int ranks, media_options const& of = {}, caller here = caller::here())
        : most_(most), rank_(rank), ranks_(ranks) {
        cpx::detail::require_rank(where, rank, ranks, here);
        index_t const limit = std::numeric_limits<int>::max() / 4;
        auto const sizes = {most.rows, most.segments, most.sequences, most.images, most.videos};
        require(std::min(sizes) >= 0 && std::max(sizes) < limit / ranks, where, "capacity",
                detail::in_words("0 to ", limit / ranks - 1), std::min(sizes) < 0 ? std::min(sizes) : std::max(sizes),
                here);
        require(of.merge > 0, where, "merge", "at least 1", of.merge, here);
        require(of.tokens_per_second >= 0 && of.tokens_per_second < 1 << 20, where, "tokens_per_second",
                "0 to 2^20 - 1", of.tokens_per_second, here);
        require(of.seconds.empty(), where, "seconds", "none here, for they come with the grids", of.seconds.size(),
                here);
        index_t const all = ranks * most.segments, tiles = tiles_of(most.rows);
        slots_ = buffer<index_t>(slot_numbers() + all + most.sequences + 1, here);
        counts_ = buffer<std::int32_t>(2 * most.segments, here);
        sums_ = buffer<kernels::media_sums>(tiles + all + 2, here);
        placed_ = buffer<kernels::placed_slot>(most.segments, here);
        grids_ = buffer<kernels::placed_grid>(most.images + most.videos + 2, here);
        numbers_ = buffer<index_t>(2 * most.sequences + 1, here);
        rows_ = buffer<std::int32_t>(5 * most.rows, here);
        found_ = cpx::detail::host_page<kernels::media_faults>();
        require(found_ != nullptr, where, "cudaHostAlloc", "success", "a failure", here);

        work_.slots = reinterpret_cast<kernels::media_slot*>(slots_.data());
        work_.order = slots_.data() + slot_numbers(), work_.first = work_.order + all;
        work_.counts = reinterpret_cast<media_count*>(counts_.data());
        work_.tiles = sums_.data(), work_.before = sums_.data() + tiles + 1;
        work_.placed = placed_.data(), work_.found = found_.get();
        work_.deltas = numbers_.data(), work_.origins = numbers_.data() + most.sequences;
        work_.grids[0] = grids_.data(), work_.grids[1] = grids_.data() + most.images + 1;
        work_.axes = rows_.data(), work_.stride = most.rows;
        work_.held[0] = rows_.data() + 3 * most.rows, work_.held[1] = rows_.data() + 4 * most.rows;
        work_.merge = of.merge, work_.tokens_per_second = of.tokens_per_second, work_.rule = of.rule;
        work_.slot_count = static_cast<int>(most.segments), work_.places = static_cast<int>(all);
        work_.sequences = static_cast<int>(most.sequences);
    }

    /// Lists the segments of any sharding, by the host; a graph that was captured works on them from then on, if the
    /// rank has as many rows. Throws `cpx::error` if they do not fit.
    template <any_sharding S>
    void set(S const& of, cudaStream_t stream, caller here = caller::here()) {
        cpx::detail::require_own(where, "ranks of the sharding", rank_, of.ranks(), rank_, ranks_, here);
        thd const& batch = of.batch();
        require_room("sequences", batch.sequences(), most_.sequences, here);
        std::vector<index_t> list(static_cast<std::size_t>(slots_.size()), -1);
        auto const slot = [&](index_t k) { return list.begin() + k * slot_size; };
        struct place {
            index_t sequence, token, number;
            auto operator<=>(place const&) const = default;
        };
        std::vector<place> all; // those of a rank stand where its counts are gathered
        index_t own = 0, end = 0;
        for (int r = S::every_row ? rank_ : 0; r < (S::every_row ? rank_ + 1 : of.ranks()); ++r) {
            auto const some = segments(of, r, here);
            require_room("segments of a rank", std::ssize(some), most_.segments, here);
            for (std::size_t k = 0; k < some.size(); ++k)
                all.push_back({some[k].sequence, some[k].token,
                               (S::every_row ? 0 : r) * most_.segments + static_cast<index_t>(k)});
            if (r != rank_) continue;
            for (segment const& s : some) {
                index_t const numbers[] = {s.row, s.token, s.sequence, batch.valid(s.sequence)};
                std::ranges::copy(numbers, slot(own++));
                end = s.row + s.count;
            }
        }
        require_room("rows", end, most_.rows, here);
        for (index_t k = own; k <= most_.segments; ++k) *slot(k) = end;
        std::ranges::sort(all);
        auto const order = list.begin() + slot_numbers(), first = list.end() - most_.sequences - 1;
        index_t const before = (S::every_row ? 0 : rank_) * most_.segments;
        index_t s = 0;
        for (std::size_t i = 0; i < all.size(); ++i) {
            auto const at = static_cast<index_t>(i);
            order[at] = all[i].number;
            for (; s <= all[i].sequence; ++s) first[s] = at;
            index_t const k = all[i].number - before;
            if (k >= 0 && k < own) slot(k)[slot_size - 1] = at;
        }
        std::fill(first + s, list.end(), std::ssize(all));
        write_numbers(list, slots_.data(), stream, here);
        alone_ = S::every_row;
        set_rows(end);
    }

    /// The same by the device, from cu_seqlens in its memory, as `segment_table` does: offsets of the physical rows,
    /// and of those without padding if there is some, (N, N + 1). Can be captured, and replayed with other offsets
    /// there, for as many rows.
    template <layout_policy P, cut Cut, row_number I>
    void set(sharding<P, scope::sequence, Cut> const& of, std::span<I const> offsets, std::span<I const> valid,
             cudaStream_t stream, caller here = caller::here()) {
        constexpr bool computed =
            listed_layout<P> && std::is_trivially_copyable_v<P> && std::is_trivially_copyable_v<Cut>;
        static_assert(computed, "cpx: cuda::mrope_positions finds segments on the device for layouts that list a "
                                "rank's chunks and have no memory of their own (zigzag, sequential, striped); set the "
                                "sharding alone");
        if constexpr (computed) {
            cpx::detail::require_own(where, "ranks of the sharding", rank_, of.ranks(), rank_, ranks_, here);
            index_t const sequences = of.batch().sequences();
            require(std::ssize(offsets) == sequences + 1, where, "offsets", sequences + 1, offsets.size(), here);
            require(valid.empty() || valid.size() == offsets.size(), where, "valid offsets", offsets.size(),
                    valid.size(), here);
            require_room("sequences", sequences, most_.sequences, here);
            for (int r = 0; r < of.ranks(); ++r)
                require_room("segments of a rank, empty ones too", sequences * of.policy().chunks(r), most_.segments,
                             here);
            index_t const rows = of.rows(rank_, here);
            require_room("rows", rows, most_.rows, here);
            detail::require_memory(where, {{"offsets", offsets}, {"valid offsets", valid}}, here);
            launch_early(kernels::find_media_slots<P, Cut, I>, 1, kernels::media_threads, 0, stream, where, here, work_,
                         of.policy(), of.cut(), rank_, offsets.data(), valid.empty() ? nullptr : valid.data(),
                         static_cast<int>(sequences));
            alone_ = false;
            set_rows(rows);
        }
    }

    /// Counts the placeholders of the rank's segments. ids: of its rows, in the device's memory; they and the grids
    /// stay until `place` has run. Throws `cpx::error` of what an earlier batch was found to lack, or if sizes do not
    /// fit, before anything is launched.
    template <row_number I>
    void count(std::span<I const> ids, media_tokens tokens, device_grids const& grids, cudaStream_t stream,
               caller here = caller::here()) {
        check(here);
        require(std::ssize(ids) == work_.rows, where, "number of ids", work_.rows, ids.size(), here);
        set_grids(grids, here);
        detail::require_memory(where, {{"ids", ids}}, here);
        if (counts_.size() > 0)
            check_call(cudaMemsetAsync(counts_.data(), 0, static_cast<std::size_t>(counts_.size()) * 4, stream), here);
        launch_early(kernels::count_media<I>, static_cast<unsigned>(work_.tile_count + 2), kernels::media_threads, 0,
                     stream, where, here, work_, ids.data(), tokens);
    }
    /// Returns what ranks are to tell each other: (segments, 2), images and videos of each.
    rows<std::int32_t const> counts() const { return {counts_.data(), most_.segments, 2}; }
    /// Returns whether they need not, for every rank has every row.
    bool alone() const { return alone_; }

    /// Computes the positions, from the counts of rank 0, 1, and so on, one below the other; from those of this rank
    /// if the others have no placeholders or need not be known. ids and tokens as before.
    template <row_number I>
    void place(std::span<I const> ids, media_tokens tokens, rows<std::int32_t const> gathered, cudaStream_t stream,
               caller here = caller::here()) {
        kernels::mrope_work work = work_;
        bool const own = alone_ || gathered.data() == counts_.data();
        if (own) gathered = counts();
        work.gathered_first = own && !alone_ ? rank_ * most_.segments : 0;
        work.gathered_count = own ? most_.segments : work.places;
        detail::require_rows(where, {{"counts", gathered, work.gathered_count, 2}}, here);
        require(gathered.stride() == 2, where, "stride of the counts", 2, gathered.stride(), here);
        work.gathered = reinterpret_cast<media_count const*>(gathered.data());
        launch_early(kernels::locate_media<>, 1, kernels::media_threads, 0, stream, where, here, work);
        if (work.tile_count > 0)
            launch_early(kernels::place_media<I>, static_cast<unsigned>(work.tile_count), kernels::media_threads, 0,
                         stream, where, here, work, ids.data(), tokens);
    }

    /// Returns (3, rows), as `rotary_positions` takes it: the axes time, height and width.
    rows<std::int32_t const> axes() const { return {rows_.data(), 3, work_.rows, most_.rows}; }
    /// Returns a number a row: those that hold placeholders of a kind, ascending, as the rank's features, then -1.
    std::span<std::int32_t const> placeholders(media_kind kind) const {
        return {work_.held[kind == media_kind::video], static_cast<std::size_t>(work_.rows)};
    }
    /// Returns by how much positions of tokens that are decoded behind a sequence differ from their numbers in it; of
    /// `qwen2_5_vl_spatial_advance` as far as this rank's rows know.
    std::span<index_t> deltas() const { return {work_.deltas, static_cast<std::size_t>(most_.sequences)}; }

    /// Throws `cpx::error` of what kernels have found wrong, as of now, and forgets it: the stream has been waited for.
    /// Positions of such a batch mean nothing.
    void check(caller here = caller::here()) const {
        kernels::media_faults const f = std::exchange(*found_, {});
        auto const kind_of = [](std::uint64_t fault) {
            return cpx::detail::name_of((fault - 1) % 2 == 0 ? media_kind::image : media_kind::video);
        };
        auto const number_of = [](std::uint64_t fault) { return std::to_string((fault - 1) / 2); };
        if (f.grid)
            throw error(where, std::string(kind_of(f.grid)) + " grid " + number_of(f.grid),
                        "positive sizes that the merge size divides, less than 2^31 rows", "others", here);
        for (media_kind const kind : {media_kind::image, media_kind::video})
            if (std::uint64_t const rows = f.rows[kind == media_kind::video])
                cpx::detail::require_rows(where, kind, static_cast<index_t>(rows >> 32),
                                          static_cast<index_t>(rows & 0xffffffff), here);
        if (f.sequence)
            throw error(where, "end of sequence " + number_of(f.sequence),
                        std::string("one more placeholder of the ") + kind_of(f.sequence) + " that has begun before it",
                        "none", here);
        if (f.row)
            throw error(where, "row " + number_of(f.row) + " of this rank",
                        std::string("one more placeholder of the ") + kind_of(f.row) + " that has begun before it",
                        "something else", here);
    }

private:
    static constexpr char const* where = "cuda::mrope_positions";
    static constexpr index_t slot_size = sizeof(kernels::media_slot) / sizeof(index_t);
    index_t slot_numbers() const { return slot_size * (most_.segments + 1); }
    static index_t tiles_of(index_t rows) { return (rows + kernels::media_threads - 1) / kernels::media_threads; }
    static void check_call(cudaError_t result, caller here) { cuda::check(result, where, here); }
    static void require_room(char const* what, index_t count, index_t most, caller here) {
        require(count <= most, where, what, detail::in_words("at most ", most), count, here);
    }
    void set_rows(index_t rows) {
        work_.rows = static_cast<int>(rows);
        work_.tile_count = static_cast<int>(tiles_of(rows));
    }
    void set_grids(device_grids const& grids, caller here) {
        std::span<index_t const> const lists[] = {grids.images, grids.videos};
        index_t const most[] = {most_.images, most_.videos};
        for (int kind = 0; kind < 2; ++kind) {
            index_t const count = std::ssize(lists[kind]) / 3;
            require(std::ssize(lists[kind]) == 3 * count, where, "numbers of the grids", "three a grid",
                    lists[kind].size(), here);
            require_room(kind == 0 ? "images" : "videos", count, most[kind], here);
            detail::require_memory(where, {{"grids", lists[kind]}}, here);
            work_.given[kind] = {lists[kind].data(), nullptr, static_cast<int>(count)};
        }
        if (grids.seconds.empty()) return;
        require(3 * grids.seconds.size() == grids.videos.size(), where, "number of seconds", grids.videos.size() / 3,
                grids.seconds.size(), here);
        detail::require_memory(where, {{"seconds", grids.seconds}}, here);
        work_.given[1].seconds = grids.seconds.data();
    }

    mrope_capacity most_;
    int rank_, ranks_;
    bool alone_ = false;
    buffer<index_t> slots_, numbers_;
    buffer<std::int32_t> counts_, rows_;
    buffer<kernels::media_sums> sums_;
    buffer<kernels::placed_slot> placed_;
    buffer<kernels::placed_grid> grids_;
    std::shared_ptr<kernels::media_faults> found_;
    kernels::mrope_work work_{};
};

} // namespace cpx::cuda
