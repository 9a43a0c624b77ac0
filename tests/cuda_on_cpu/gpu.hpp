// SPDX-License-Identifier: Apache-2.0
// A GPU's block of threads, run on the CPU: as fibers of one thread, which change where threads meet.
//
// Kernels are compiled by the host's compiler, from copies that copies.cmake makes. What threads do between two
// meetings happens at once, warp by warp, in an order that a test chooses: a missing barrier shows in one of them.
#pragma once

#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace gpu {

/// Which warps run first, and when bytes arrive that a thread copies to shared memory without waiting.
enum class order { ascending, descending, random };
enum class copies { at_once, at_the_wait };

struct dim3_of_host {
    unsigned x = 0, y = 0, z = 1;
};

class machine;
/// Returns the machine that runs this thread's kernels.
machine& now();

/// The block that runs; there is one at a time. Shared memory begins full of NaNs.
class machine {
public:
    static constexpr int warp_size = 32;
    static constexpr std::size_t shared_bytes = 227 * 1024; // of Hopper
    using meeting = void (*)(void* const* of_lanes);

    order warps_run = order::ascending;
    copies arrive = copies::at_the_wait;
    dim3_of_host block, grid, size; ///< size: of a block

    /// Runs `kernel()` as every thread of every block of a grid; threads: whole warps. Throws if threads wait for each
    /// other for ever, or those of a warp meet in different operations.
    void launch(dim3_of_host blocks, dim3_of_host threads, std::function<void()> kernel) {
        grid = blocks, size = threads;
        row_of_threads_ = static_cast<int>(threads.x);
        kernel_ = std::move(kernel);
        for (block.z = 0; block.z < grid.z; ++block.z)
            for (block.y = 0; block.y < grid.y; ++block.y)
                for (block.x = 0; block.x < grid.x; ++block.x) run_block(threads.x * threads.y);
    }

    dim3_of_host thread() const {
        return {static_cast<unsigned>(now_ % row_of_threads_), static_cast<unsigned>(now_ / row_of_threads_)};
    }
    int lane() const { return now_ % warp_size; }
    char* shared() { return shared_; }
    std::uint32_t shared_offset(void const* place) const {
        return static_cast<std::uint32_t>(static_cast<char const*>(place) - shared_);
    }
    /// Returns 16 bytes of shared memory. Throws if these are not there, or not aligned.
    char* sixteen_bytes(std::uint32_t at) {
        if (at % 16 != 0 || at + 16 > shared_bytes) fail("16 bytes of shared memory at " + std::to_string(at));
        return shared_ + at;
    }

    void trap() { fail("trap"); }

    /// All lanes of a warp call it; the last one calls `f` with what each gave.
    void meet_in_warp(meeting f, void* mine) {
        auto& w = warps_[static_cast<std::size_t>(now_ / warp_size)];
        if (w.arrived == 0) w.operation = f;
        if (w.operation != f) fail("lanes of a warp in different operations");
        w.of_lane[now_ % warp_size] = mine;
        if (++w.arrived < warp_size) return leave(state::in_warp);
        w.arrived = 0;
        f(w.of_lane);
        int const first = now_ / warp_size * warp_size;
        for (int i = 0; i < warp_size; ++i) threads_[static_cast<std::size_t>(first + i)].is = state::ready;
    }
    /// All threads of the block call it. Returns whether any said yes.
    bool meet(bool mine = false) {
        any_ |= mine;
        if (++waiting_ < static_cast<int>(threads_.size())) {
            leave(state::in_block);
            return answer_;
        }
        waiting_ = 0;
        answer_ = std::exchange(any_, false);
        for (auto& t : threads_) t.is = state::ready;
        return answer_;
    }

    /// Copies 16 bytes to shared memory, or zeros if there are none, now or when this thread waits.
    void copy_later(std::uint32_t to, void const* from, bool there) {
        if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) fail("a copy from an address that is not aligned");
        threads_[static_cast<std::size_t>(now_)].copies.push_back({sixteen_bytes(to), there ? from : nullptr});
        if (arrive == copies::at_once) wait_for_copies();
    }
    /// Ends a group of this thread's copies.
    void end_of_copies() {
        auto& t = threads_[static_cast<std::size_t>(now_)];
        t.groups.push_back(t.copies.size());
    }
    /// Copies what is in all groups of this thread but the last ones.
    void wait_for_copies(std::size_t but_groups) {
        auto& t = threads_[static_cast<std::size_t>(now_)];
        if (t.groups.size() <= but_groups) return;
        auto const waited = t.groups.end() - static_cast<std::ptrdiff_t>(but_groups);
        std::size_t const count = waited[-1];
        copy_first(t, count);
        t.groups.erase(t.groups.begin(), waited);
        for (std::size_t& end : t.groups) end -= count;
    }
    void wait_for_copies() {
        auto& t = threads_[static_cast<std::size_t>(now_)];
        copy_first(t, t.copies.size());
        for (std::size_t& end : t.groups) end = 0;
    }

private:
    enum class state { ready, in_warp, in_block, done };
    struct copy {
        char* to;
        void const* from;
    };
    struct fiber {
        ucontext_t context;
        std::vector<char> stack = std::vector<char>(128 * 1024);
        state is = state::ready;
        std::vector<copy> copies;
        std::vector<std::size_t> groups; // copies before the end of each
    };
    struct warp {
        int arrived = 0;
        meeting operation = nullptr;
        void* of_lane[warp_size] = {};
    };

    static void copy_first(fiber& t, std::size_t count) {
        for (std::size_t i = 0; i < count; ++i)
            if (copy const& c = t.copies[i]; c.from)
                std::memcpy(c.to, c.from, 16);
            else
                std::memset(c.to, 0, 16);
        t.copies.erase(t.copies.begin(), t.copies.begin() + static_cast<std::ptrdiff_t>(count));
    }
    void run_block(unsigned threads) {
        std::memset(shared_, 0xff, sizeof shared_);
        threads_.resize(threads);
        warps_.assign(threads_.size() / warp_size, {});
        waiting_ = 0;
        any_ = false;
        for (auto& t : threads_) {
            t.is = state::ready;
            t.copies.clear();
            t.groups.clear();
            getcontext(&t.context);
            t.context.uc_stack.ss_sp = t.stack.data();
            t.context.uc_stack.ss_size = t.stack.size();
            t.context.uc_link = &scheduler_;
            makecontext(
                &t.context, [] { now().run_thread(); }, 0);
        }
        std::vector<int> turns(warps_.size());
        std::iota(turns.begin(), turns.end(), 0);
        if (warps_run == order::descending) std::ranges::reverse(turns);
        for (bool ran = true; ran;) {
            ran = false;
            if (warps_run == order::random) std::ranges::shuffle(turns, random_);
            for (int const w : turns) {
                while (run_warp(w)) ran = true; // as far as it can
                if (warps_run == order::random && ran) break;
            }
            if (!problem_.empty()) throw std::logic_error(std::exchange(problem_, {}));
        }
        if (!std::ranges::all_of(threads_, [](fiber const& t) { return t.is == state::done; }))
            throw std::logic_error("threads of a block wait for each other");
    }
    bool run_warp(int w) {
        bool ran = false;
        for (int i = w * warp_size; i < (w + 1) * warp_size && problem_.empty(); ++i) {
            auto& t = threads_[static_cast<std::size_t>(i)];
            if (t.is != state::ready) continue;
            now_ = i;
            swapcontext(&scheduler_, &t.context);
            ran = true;
        }
        return ran;
    }
    void run_thread() {
        kernel_();
        threads_[static_cast<std::size_t>(now_)].is = state::done;
    }
    void leave(state why) {
        auto& t = threads_[static_cast<std::size_t>(now_)];
        t.is = why;
        swapcontext(&t.context, &scheduler_);
    }
    /// No exception leaves a fiber: the block ends, and the launch throws.
    void fail(std::string const& what) {
        problem_ = "thread " + std::to_string(now_) + ": " + what;
        leave(state::done);
    }

    alignas(1024) char shared_[shared_bytes];
    std::vector<fiber> threads_;
    std::vector<warp> warps_;
    std::function<void()> kernel_;
    ucontext_t scheduler_{};
    std::mt19937 random_{1};
    std::string problem_;
    int now_ = 0, waiting_ = 0, row_of_threads_ = 1;
    bool any_ = false, answer_ = false;
};

inline machine& now() {
    static thread_local machine only;
    return only;
}

/// Returns what lane `from` of the warp gave.
template <class T>
T from_lane(T mine, int from) {
    struct given {
        T x;
        int from;
    } of{mine, from};
    now().meet_in_warp(
        [](void* const* lanes) {
            auto const lane = [&](int l) -> given& { return *static_cast<given*>(lanes[l]); };
            T got[machine::warp_size];
            for (int l = 0; l < machine::warp_size; ++l) got[l] = lane(lane(l).from).x;
            for (int l = 0; l < machine::warp_size; ++l) lane(l).x = got[l];
        },
        &of);
    return of.x;
}

/// Returns a bit a lane, of those who said yes.
inline unsigned lanes_that_say(bool mine) {
    struct given {
        bool yes;
        unsigned all;
    } of{mine, 0};
    now().meet_in_warp(
        [](void* const* lanes) {
            unsigned all = 0;
            for (int l = 0; l < machine::warp_size; ++l)
                if (static_cast<given*>(lanes[l])->yes) all |= 1u << l;
            for (int l = 0; l < machine::warp_size; ++l) static_cast<given*>(lanes[l])->all = all;
        },
        &of);
    return of.all;
}

} // namespace gpu
