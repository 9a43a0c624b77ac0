// SPDX-License-Identifier: Apache-2.0
// Small tables that go to a device in stream order, while the host goes on.
#pragma once

#include <cpx/cuda/launch.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/plan/lane_rectangles.hpp>

#include <cpx/lane_rectangles.cuh>
#include <cpx/launch_list.cuh>

#include <algorithm>
#include <exception>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpx::cuda {

namespace detail {

/// Calls `launch(some, count)` for as many of a list as a launch takes, until there are no more.
template <class List, class T, class F>
void in_launches(std::span<T const> list, F&& launch) {
    constexpr auto most = static_cast<std::size_t>(List::most);
    List some; // what a launch does not read may be anything
    for (std::size_t first = 0; first < list.size(); first += most) {
        std::size_t const count = std::min(most, list.size() - first);
        std::copy_n(list.begin() + static_cast<std::ptrdiff_t>(first), count, some.items);
        launch(some, static_cast<unsigned>(count));
    }
}
/// Calls `f` with how many numbers a launch is to bring, of `count`: what is launched is copied, needed or not.
template <class F>
void with_room(std::size_t count, F&& f) {
    with_least<256, 640, 1600, 4000>(static_cast<index_t>(count), f);
}

/// Tables of batches, which a kernel makes: all of one batch by one launch, where they are asked for together.
class batch_tables {
public:
    explicit batch_tables(cudaStream_t in) : stream_(in) {}
    cudaStream_t stream() const { return stream_; }

    /// Returns whether tables of such exchanges may be brought by one launch.
    static bool may_bring(std::vector<lane_plan> const& plans) {
        index_t jobs = 0; // about one for each lane to or from a rank
        for (lane_plan const& p : plans)
            for (auto const* const lanes : {&p.sends, &p.receives})
                jobs += std::ranges::count_if(*lanes, [](lane const& l) { return l.peer >= 0; });
        return jobs * static_cast<index_t>(sizeof(cpx::detail::lane_job) / sizeof(index_t)) <= most;
    }

    /// Makes tables of `batch` in the order of the stream, or lets `write` make them. Returns false if they are more
    /// than a launch brings, and leaves them to the caller.
    bool add(thd const& batch, cpx::detail::lane_work&& more, caller here) {
        if (more.size(batch) > most) return false;
        if (batch != batch_ || all_.size(batch) + more.size(batch) > most) write(here);
        batch_ = batch;
        if (all_.empty()) // nothing has been asked for
            all_ = std::move(more);
        else
            all_.add(more);
        if (!held_) write(here);
        return true;
    }
    /// Makes all tables that have been asked for.
    void write(caller here) {
        if (all_.empty()) return;
        auto const numbers = std::exchange(all_, {}).list(batch_);
        auto const& list = *reinterpret_cast<cpx::detail::lane_list const*>(numbers.data());
        with_room(numbers.size(), [&](auto room) {
            using items = kernels::launch_list<std::int64_t, room>;
            in_launches<items>(std::span<index_t const>(numbers), [&](items const& some, unsigned) {
                launch(kernels::list_lanes<room>, dims(list.jobs / 8 + 1), 256, 0, stream_, "list_lanes", here, some);
            });
        });
    }
    /// Makes what `f()` asks for when it has returned.
    template <class F>
    void together(F&& f, caller here) {
        bool const outer = std::exchange(held_, true);
        std::exception_ptr failed;
        try {
            f();
        } catch (...) {
            failed = std::current_exception();
        }
        held_ = outer;
        if (!held_) write(here);
        if (failed) std::rethrow_exception(failed);
    }

private:
    static constexpr index_t most = 4000; ///< numbers of a launch

    cudaStream_t stream_;
    thd batch_;
    cpx::detail::lane_work all_;
    bool held_ = false;
};

} // namespace detail

/// Loads what `write_numbers` and `list_lanes` launch.
inline void load_write_numbers(caller here = caller::here()) {
    for (std::size_t const count : {std::size_t{256}, std::size_t{640}, std::size_t{1600}, std::size_t{4000}})
        detail::with_room(count, [&](auto most) {
            detail::load(kernels::write_numbers<most>, here);
            detail::load(kernels::list_lanes<most>, here);
        });
}

/// Writes numbers of the host in stream order, with launches of up to 32 KB: nobody waits, and it can be captured.
inline void write_numbers(std::span<index_t const> numbers, index_t* to, cudaStream_t stream,
                          caller here = caller::here()) {
    detail::with_room(numbers.size(), [&](auto most) {
        using items = kernels::launch_list<std::int64_t, most>;
        detail::in_launches<items>(numbers, [&](items const& some, unsigned count) {
            launch(kernels::write_numbers<most>, 1, 256, 0, stream, "write_numbers", here, some, to,
                   static_cast<int>(count));
            to += count;
        });
    });
}

/// Returns such numbers in memory of their own.
inline block<index_t> numbers_on_device(memory const& in, std::span<index_t const> numbers,
                                        caller here = caller::here()) {
    auto made = in.room<index_t>(std::ssize(numbers));
    write_numbers(numbers, made.data(), in.stream(), here);
    return made;
}

} // namespace cpx::cuda
