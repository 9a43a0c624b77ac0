// SPDX-License-Identifier: Apache-2.0
// Rectangles that follow from lanes and cu_seqlens, wherever they are computed: the host counts the rows of messages.
#pragma once

#include <cpx/plan/lanes.hpp>
#include <cpx/plan/rectangles.hpp>

#include <cstring>
#include <span>
#include <utility>
#include <vector>

namespace cpx::detail {

/// One end of a lane's rectangles: rows of a buffer that the lanes `first` to `last` of a list tile, all of them or, of
/// `peer`'s message where it is packed, only those.
struct lane_end {
    std::int64_t base, pitch; ///< bytes before the first row, and from row to row
    std::int32_t buffer, first, last, own, peer, unused;
};

/// The rectangles of one lane: one for every sequence, which may be empty.
struct lane_job {
    lane_end source, target;
    rectangle* to;              ///< of the first sequence
    std::int32_t bytes, slices; ///< of a row; of the launch before these
    std::int32_t unused, from;  ///< from which exchange: its cells are `cells[from]`
};

/// Numbers beside rectangles: `count` times one or, where `offsets`, those of the batch and then the last again.
struct number_job {
    index_t* to;
    index_t number, count, offsets;
};

/// Begins a list of numbers: offsets, lanes, cells and jobs follow.
struct lane_list {
    std::int32_t sequences, lanes, cells, jobs, numbers, unused;

    CPX_HOST_DEVICE index_t const* offsets() const { return reinterpret_cast<index_t const*>(this + 1); }
    CPX_HOST_DEVICE lane const* all_lanes() const { return reinterpret_cast<lane const*>(offsets() + sequences + 1); }
    CPX_HOST_DEVICE lane_cells const* all_cells() const {
        return reinterpret_cast<lane_cells const*>(all_lanes() + lanes);
    }
    CPX_HOST_DEVICE lane_job const* all_jobs() const { return reinterpret_cast<lane_job const*>(all_cells() + cells); }
    CPX_HOST_DEVICE number_job const* all_numbers() const {
        return reinterpret_cast<number_job const*>(all_jobs() + jobs);
    }
};

/// Writes the rectangles of one job: `thread` of `threads` those of its sequences. `sum(n, total)` returns the sum of n
/// over the threads before this one, and adds that of all to `total`.
template <class Sum>
CPX_HOST_DEVICE void list_lane(lane_list const& all, lane_job const& job, int thread, int threads, Sum&& sum) {
    lane_cells const cells = all.all_cells()[job.from];
    balanced_begins const balanced(cells.count);
    index_t source_rows = 0, target_rows = 0, slices = job.slices;
    rectangle r{};
    r.source_pitch = job.source.pitch, r.target_pitch = job.target.pitch;
    r.source_buffer = static_cast<std::int16_t>(job.source.buffer);
    r.target_buffer = static_cast<std::int16_t>(job.target.buffer);
    r.bytes = job.bytes;
    for (int begin = 0; begin < all.sequences; begin += threads) {
        int const s = begin + thread;
        index_t const n = s < all.sequences ? all.offsets()[s + 1] - all.offsets()[s] : 0;
        auto const begins = cells.begins(balanced, n);
        // Returns the row at which the own lane begins.
        auto const place = [&](lane_end const& end, index_t& rows) {
            index_t before = 0, whole = 0;
            for (int i = end.first; i < end.last && n > 0; ++i) {
                lane const l = all.all_lanes()[i];
                if (end.peer >= 0 && l.peer != end.peer) continue;
                if (i == end.own) before = whole;
                whole += rows_in(l, begins).size();
            }
            index_t const earlier = rows;
            return earlier + sum(whole, rows) + before;
        };
        index_t const source = place(job.source, source_rows), target = place(job.target, target_rows);
        r.rows = n > 0 ? static_cast<std::int32_t>(rows_in(all.all_lanes()[job.source.own], begins).size()) : 0;
        r.source = job.source.base + source * r.source_pitch;
        r.target = job.target.base + target * r.target_pitch;
        r.set_vector();
        index_t const earlier = slices;
        r.first = static_cast<std::int32_t>(earlier + sum(index_t{r.slices()}, slices));
        if (s < all.sequences) job.to[s] = r;
    }
}

/// What one kernel makes of a batch.
struct lane_work {
    std::vector<lane> lanes = {};
    std::vector<lane_cells> cells = {};
    std::vector<lane_job> jobs = {};
    std::vector<number_job> numbers = {};

    void add(lane_work const& more) {
        auto const before = static_cast<int>(std::ssize(lanes)), exchanges = static_cast<int>(std::ssize(cells));
        for (lane_job job : more.jobs) {
            for (lane_end* const end : {&job.source, &job.target})
                end->first += before, end->last += before, end->own += before;
            job.from += exchanges;
            jobs.push_back(job);
        }
        lanes.insert(lanes.end(), more.lanes.begin(), more.lanes.end());
        cells.insert(cells.end(), more.cells.begin(), more.cells.end());
        numbers.insert(numbers.end(), more.numbers.begin(), more.numbers.end());
    }
    /// Returns how many numbers the kernel reads.
    index_t size(thd const& batch) const {
        auto const words = [](auto const& of) { return of.size() * sizeof(of[0]) / sizeof(index_t); };
        return static_cast<index_t>(sizeof(lane_list) / sizeof(index_t) + words(batch.offsets()) + words(lanes) +
                                    words(cells) + words(jobs) + words(numbers));
    }
    /// Returns them: a `lane_list`.
    std::vector<index_t> list(thd const& batch) const {
        auto const count = [](auto const& of) { return static_cast<std::int32_t>(std::ssize(of)); };
        lane_list const head{
            static_cast<std::int32_t>(batch.sequences()), count(lanes), count(cells), count(jobs), count(numbers), 0};
        std::vector<index_t> list;
        list.reserve(static_cast<std::size_t>(this->size(batch)));
        auto const add = [&](auto const& of) {
            std::size_t const place = list.size(), bytes = std::size(of) * sizeof(of[0]);
            list.resize(place + bytes / sizeof(index_t));
            if (bytes > 0) std::memcpy(list.data() + place, std::data(of), bytes);
        };
        add(std::span<lane_list const>(&head, 1));
        add(batch.offsets());
        add(lanes);
        add(cells);
        add(jobs);
        add(numbers);
        return list;
    }
};

/// The rectangles of lanes, from `to` on: a job for each lane that is copied, of a rectangle for each sequence.
class lane_tables {
public:
    lane_tables(thd const& batch, row_shapes const& shape, rectangle* to) : batch_(batch), shape_(shape), to_(to) {}

    /// Goes on to the next plan. Returns false if its lanes do not tell what moves.
    bool next(lane_plan const& p) {
        index_t const most = index_t{1} << 30; // rows, and bytes of them, as a kernel counts them
        if (bytes() >= most || batch_.tokens() >= most) return false;
        rectangle row{};
        row.bytes = static_cast<std::int32_t>(bytes());
        plan_ = &p;
        for (bool const out : {true, false}) {
            auto counts = count_lanes(lanes(out), p.cells, batch_, row.slice());
            if (!counts) return false;
            counts_[out] = std::move(*counts);
            first_[out] = static_cast<int>(std::ssize(work_.lanes));
            work_.lanes.insert(work_.lanes.end(), lanes(out).begin(), lanes(out).end());
        }
        work_.cells.push_back(p.cells);
        return true;
    }
    index_t rows(bool out) const { return counts_[out].rows; }
    index_t rectangles() const { return std::ssize(work_.jobs) * batch_.sequences(); }
    lane_work const& work() const { return work_; }

    // As `listed_rectangles` has them.
    bool sums() const { return plan_->kind == flow::sums; }
    int rank() const { return plan_->rank; }
    template <class F>
    void each(bool out, F&& f) {
        for (auto const& m : counts_[out].messages)
            f(message_rows{m.peer, m.count, bytes(), pitch(out), m.runs == 1 ? m.first : -1}, [&](index_t base) {
                for_each_of(m.peer, out, [&](int i) {
                    lane_end const packed{base, bytes(), out ? 2 : 3, first_[out], last(out), i, m.peer, 0};
                    add(out ? end(i, true) : packed, out ? packed : end(i, false), i, out);
                });
            });
    }
    void keep() {
        int to = first_[0]; // both ends have the same ranges, in one order
        for_each_of(rank(), true, [&](int i) {
            while (work_.lanes[static_cast<std::size_t>(to)].peer != rank()) ++to;
            add(end(i, true), end(to++, false), i, true);
        });
    }
    launch_size launch() {
        index_t const jobs = std::ssize(work_.jobs) - std::exchange(launched_, std::ssize(work_.jobs));
        return {static_cast<int>(jobs * batch_.sequences()), std::exchange(slices_, 0)};
    }

private:
    index_t bytes() const { return shape_.source_width * shape_.element; }
    index_t pitch(bool out) const { return (out ? shape_.source_stride : shape_.target_stride) * shape_.element; }
    std::vector<lane> const& lanes(bool out) const { return out ? plan_->sends : plan_->receives; }
    int last(bool out) const { return first_[out] + static_cast<int>(lanes(out).size()); }
    template <class F>
    void for_each_of(int peer, bool out, F&& f) const {
        for (int i = first_[out]; i < last(out); ++i)
            if (work_.lanes[static_cast<std::size_t>(i)].peer == peer) f(i);
    }
    lane_end end(int i, bool out) const { return {0, pitch(out), !out, first_[out], last(out), i, -1, 0}; }
    void add(lane_end const& source, lane_end const& target, int i, bool out) {
        work_.jobs.push_back({source, target, to_ + rectangles(), static_cast<std::int32_t>(bytes()), slices_, 0,
                              static_cast<std::int32_t>(std::ssize(work_.cells)) - 1});
        slices_ += static_cast<int>(counts_[out].slices[static_cast<std::size_t>(i - first_[out])]);
    }

    thd const& batch_;
    lane_work work_;
    lane_plan const* plan_ = nullptr;
    row_shapes shape_;
    rectangle* to_;
    lane_counts counts_[2] = {}; ///< of what comes, and of what leaves
    int first_[2] = {}, slices_ = 0;
    index_t launched_ = 0;
};

} // namespace cpx::detail
