// SPDX-License-Identifier: Apache-2.0
// Rectangles that follow from lanes and cu_seqlens, wherever they are computed: the host counts the rows of messages.
#pragma once

#include <cpx/plan/lanes.hpp>
#include <cpx/plan/rectangles.hpp>

#include <algorithm>
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

/// The rectangles of some columns of one lane: one for every run of rows that is cut, which may be empty.
struct lane_job {
    lane_end source, target;
    rectangle* to;              ///< of the first run
    std::int32_t bytes, slices; ///< of a row; of the launch before these
    std::int32_t unused, from;  ///< from which exchange: its cells are `cells[from]`
};

/// Numbers beside rectangles: `count` times one or, where `offsets`, those of the batch and then the last again.
struct number_job {
    index_t* to;
    index_t number, count, offsets;
};

/// Where some numbers belong that the host has listed, such as those of rectangles.
struct listed_job {
    index_t* to;
    index_t count;
};

/// Begins a list of numbers: offsets, lanes, cells, jobs of all kinds and those that are listed follow.
struct lane_list {
    std::int32_t sequences, lanes, cells, jobs, numbers, listed;

    CPX_HOST_DEVICE index_t const* offsets() const { return reinterpret_cast<index_t const*>(this + 1); }
    CPX_HOST_DEVICE lane const* all_lanes() const { return reinterpret_cast<lane const*>(offsets() + sequences + 1); }
    CPX_HOST_DEVICE lane_cells const* all_cells() const {
        return reinterpret_cast<lane_cells const*>(all_lanes() + lanes);
    }
    CPX_HOST_DEVICE lane_job const* all_jobs() const { return reinterpret_cast<lane_job const*>(all_cells() + cells); }
    CPX_HOST_DEVICE number_job const* all_numbers() const {
        return reinterpret_cast<number_job const*>(all_jobs() + jobs);
    }
    CPX_HOST_DEVICE listed_job const* all_listed() const {
        return reinterpret_cast<listed_job const*>(all_numbers() + numbers);
    }
    /// Puts listed numbers where they belong: `thread` of `threads` its share.
    CPX_HOST_DEVICE void put_listed(int thread, int threads) const {
        auto const* next = reinterpret_cast<index_t const*>(all_listed() + listed);
        for (int job = 0; job < listed; ++job) {
            auto const [to, count] = all_listed()[job];
            for (index_t i = thread; i < count; i += threads) std::memcpy(to + i, next + i, sizeof *to);
            next += count;
        }
    }
};

/// Writes the rectangles of one job: `thread` of `threads` those of its runs. `sum(n, total)` returns the sum of n
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
    int const runs = cells.runs(all.sequences);
    for (int begin = 0; begin < runs; begin += threads) {
        int const s = begin + thread;
        index_t const n = s < runs ? cells.run(all.offsets(), all.sequences, s).size() : 0;
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
        if (s < runs) job.to[s] = r;
    }
}

/// What one kernel makes of a batch.
struct lane_work {
    std::vector<lane> lanes = {};
    std::vector<lane_cells> cells = {};
    std::vector<lane_job> jobs = {};
    std::vector<number_job> numbers = {};
    std::vector<listed_job> listed = {};
    std::vector<index_t> of_listed = {}; ///< their numbers

    bool empty() const { return jobs.empty() && numbers.empty() && listed.empty(); }
    /// Lists what is to be at `to`, some numbers each.
    template <class T>
    void put(T* to, std::span<T const> values) {
        static_assert(sizeof(T) % sizeof(index_t) == 0);
        auto const before = of_listed.size(), count = values.size_bytes() / sizeof(index_t);
        listed.push_back({reinterpret_cast<index_t*>(to), static_cast<index_t>(count)});
        of_listed.resize(before + count);
        if (count > 0) std::memcpy(of_listed.data() + before, values.data(), values.size_bytes());
    }
    /// Returns what the kernel writes, without lanes and offsets, of `count` numbers from `begin` on; elsewhere zeros.
    std::vector<index_t> written(index_t const* begin, index_t count) const {
        std::vector<index_t> all(static_cast<std::size_t>(count));
        for (number_job const& job : numbers) std::fill_n(all.begin() + (job.to - begin), job.count, job.number);
        auto next = of_listed.begin();
        for (listed_job const& job : listed) {
            std::copy_n(next, job.count, all.begin() + (job.to - begin));
            next += job.count;
        }
        return all;
    }
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
        listed.insert(listed.end(), more.listed.begin(), more.listed.end());
        of_listed.insert(of_listed.end(), more.of_listed.begin(), more.of_listed.end());
    }
    /// Returns how many numbers the kernel reads.
    index_t size(thd const& batch) const {
        auto const words = [](auto const& of) { return of.size() * sizeof(of[0]) / sizeof(index_t); };
        return static_cast<index_t>(sizeof(lane_list) / sizeof(index_t) + words(batch.offsets()) + words(lanes) +
                                    words(cells) + words(jobs) + words(numbers) + words(listed) + of_listed.size());
    }
    /// Returns them: a `lane_list`.
    std::vector<index_t> list(thd const& batch) const {
        auto const count = [](auto const& of) { return static_cast<std::int32_t>(std::ssize(of)); };
        lane_list const head{static_cast<std::int32_t>(batch.sequences()),
                             count(lanes),
                             count(cells),
                             count(jobs),
                             count(numbers),
                             count(listed)};
        std::vector<index_t> list(static_cast<std::size_t>(this->size(batch)));
        auto* next = list.data();
        auto const add = [&](auto const& of) {
            std::size_t const bytes = std::size(of) * sizeof(of[0]);
            if (bytes > 0) std::memcpy(next, std::data(of), bytes);
            next += bytes / sizeof(index_t);
        };
        add(std::span<lane_list const>(&head, 1));
        add(batch.offsets());
        add(lanes);
        add(cells);
        add(jobs);
        add(numbers);
        add(listed);
        add(of_listed);
        return list;
    }
};

/// The rectangles of lanes, from `to` on: a job for some columns of each lane that is copied, of a rectangle for each
/// run that is cut; one rectangle for a message that is one run.
class lane_tables {
public:
    lane_tables(thd const& batch, rectangle* to) : batch_(batch), to_(to) {}

    /// Goes on to the next plan. Returns false if its lanes do not tell what moves.
    bool next(lane_plan const& p, row_shapes const& shape) {
        index_t const most = index_t{1} << 30; // rows, and bytes of them, as a kernel counts them
        plan_ = &p, shape_ = shape;
        if (std::max(bytes(true), bytes(false)) >= most || batch_.tokens() >= most) return false;
        for (bool const out : {true, false}) {
            auto counts = count_lanes(lanes(out), p.cells, batch_, slice(bytes(out)));
            if (!counts) return false;
            counts_[out] = std::move(*counts);
            slices_of_[out] = {{slice(bytes(out)), std::move(counts_[out].slices)}};
            first_[out] = static_cast<int>(std::ssize(work_.lanes));
            work_.lanes.insert(work_.lanes.end(), lanes(out).begin(), lanes(out).end());
        }
        work_.cells.push_back(p.cells);
        return true;
    }
    index_t rows(bool out) const { return counts_[out].rows; }
    index_t rectangles() const { return rectangles_; }
    lane_work& work() { return work_; }

    // As `listed_rectangles` has them.
    bool sums() const { return plan_->kind == flow::sums; }
    int rank() const { return plan_->rank; }
    template <class F>
    void each(bool out, F&& f) {
        auto const peers = static_cast<int>(std::ssize(columns(out).of));
        for (auto const& m : counts_[out].messages)
            for (int peer = m.peer < 0 ? 0 : m.peer, end = m.peer < 0 ? peers : m.peer + 1; peer < end; ++peer) {
                auto const shipped = columns_of(peer, out);
                index_t const width = total(shipped), first = m.runs == 1 ? m.first : -1;
                f(message_rows{peer, m.count, width, pitch(out), first}, [&](index_t base) {
                    index_t column = 0; // of the packed row, bytes
                    for (run const c : shipped) {
                        lane_end const packed{base + std::exchange(column, column + c.count),
                                              width,
                                              out ? 2 : 3,
                                              first_[out],
                                              last(out),
                                              -1,
                                              m.peer,
                                              0};
                        if (first >= 0)
                            add_run(first, m.count, c, packed, out);
                        else
                            for_each_of(peer, out, [&](int i) {
                                auto at = packed;
                                at.own = i;
                                add(out ? end_of(i, c.first, true) : at, out ? at : end_of(i, c.first, false), i, out,
                                    c.count);
                            });
                    }
                });
            }
    }
    void keep() {
        int to = first_[0]; // both ends have the same ranges, in one order
        for_each_of(rank(), true, [&](int i) {
            while (!work_.lanes[static_cast<std::size_t>(to)].is_of(rank())) ++to;
            for_each_common_run(columns_of(rank(), true), columns_of(rank(), false), most_in_rectangle,
                                [&](index_t from, index_t at, index_t count) {
                                    add(end_of(i, from, true), end_of(to, at, false), i, true, count);
                                });
            ++to;
        });
    }
    launch_size launch() {
        index_t const before = std::exchange(launched_, rectangles_);
        return {static_cast<int>(rectangles_ - before), std::exchange(slices_, 0)};
    }

private:
    static rectangle row_of(index_t bytes) {
        rectangle row{};
        row.bytes = static_cast<std::int32_t>(bytes);
        return row;
    }
    static index_t slice(index_t bytes) { return row_of(bytes).slice(); }
    index_t bytes(bool out) const { return (out ? shape_.source_width : shape_.target_width) * shape_.element; }
    index_t pitch(bool out) const { return (out ? shape_.source_stride : shape_.target_stride) * shape_.element; }
    std::vector<lane> const& lanes(bool out) const { return out ? plan_->sends : plan_->receives; }
    lane_columns const& columns(bool out) const { return out ? plan_->source : plan_->target; }
    /// Returns the columns that a message has of a row here, in bytes.
    std::vector<run> columns_of(int peer, bool out) const {
        lane_columns const& all = columns(out);
        if (all.of.empty()) return {{0, bytes(out)}};
        auto const& own = all.of[static_cast<std::size_t>(peer)];
        if (own.empty()) return {};
        return columns_in_bytes(all.width > 0 ? own : std::vector<run>(), bytes(out) / shape_.element, shape_.element);
    }
    int last(bool out) const { return first_[out] + static_cast<int>(lanes(out).size()); }
    template <class F>
    void for_each_of(int peer, bool out, F&& f) const {
        for (int i = first_[out]; i < last(out); ++i)
            if (work_.lanes[static_cast<std::size_t>(i)].is_of(peer)) f(i);
    }
    lane_end end_of(int i, index_t column, bool out) const {
        return {column, pitch(out), !out, first_[out], last(out), i, -1, 0};
    }
    void add(lane_end const& source, lane_end const& target, int i, bool out, index_t bytes) {
        work_.jobs.push_back({source, target, to_ + rectangles_, static_cast<std::int32_t>(bytes), slices_, 0,
                              static_cast<std::int32_t>(std::ssize(work_.cells)) - 1});
        rectangles_ += plan_->cells.runs(static_cast<int>(batch_.sequences()));
        auto const of_rows = static_cast<int>(slices_of(out, bytes)[static_cast<std::size_t>(i - first_[out])]);
        slices_ += of_rows * row_of(bytes).pieces();
    }
    /// Adds columns of the rows from `first` on, of one end, to or from where they are packed.
    void add_run(index_t first, index_t count, run column, lane_end const& packed, bool out) {
        rectangle r{};
        (out ? r.source : r.target) = first * pitch(out) + column.first;
        (out ? r.target : r.source) = packed.base;
        (out ? r.source_pitch : r.target_pitch) = pitch(out);
        (out ? r.target_pitch : r.source_pitch) = packed.pitch;
        r.rows = static_cast<std::int32_t>(count), r.bytes = static_cast<std::int32_t>(column.count);
        r.source_buffer = static_cast<std::int16_t>(out ? 0 : packed.buffer);
        r.target_buffer = static_cast<std::int16_t>(out ? packed.buffer : 1);
        r.set_vector();
        r.first = slices_;
        slices_ += r.slices();
        work_.put(to_ + rectangles_++, std::span<rectangle const>(&r, 1));
    }
    /// Returns the slices of each lane of an end, of so many bytes a row.
    std::vector<index_t> const& slices_of(bool out, index_t bytes) {
        auto& known = slices_of_[out];
        auto found = std::ranges::find(known, slice(bytes), &std::pair<index_t, std::vector<index_t>>::first);
        if (found == known.end()) {
            auto counts = count_lanes(lanes(out), plan_->cells, batch_, slice(bytes));
            found = known.insert(found, {slice(bytes), std::move(counts->slices)});
        }
        return found->second;
    }

    thd const& batch_;
    lane_work work_;
    lane_plan const* plan_ = nullptr;
    row_shapes shape_ = {};
    rectangle* to_;
    lane_counts counts_[2] = {};                                         ///< of what comes, and of what leaves
    std::vector<std::pair<index_t, std::vector<index_t>>> slices_of_[2]; ///< of lanes, by the rows of a slice
    int first_[2] = {}, slices_ = 0;
    index_t rectangles_ = 0, launched_ = 0;
};

} // namespace cpx::detail
