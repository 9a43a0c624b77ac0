// SPDX-License-Identifier: Apache-2.0
// Runs of rows or columns, listed at once or when somebody asks for them.
#pragma once

#include <cpx/core/index.hpp>

#include <atomic>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

namespace cpx {

/// `count` consecutive rows or columns of one rank's buffer.
struct run {
    index_t first = 0;
    index_t count = 0;
    friend constexpr bool operator==(run, run) = default;
};

inline index_t total(std::vector<run> const& runs) {
    index_t count = 0;
    for (run const r : runs) count += r.count;
    return count;
}

namespace detail {

/// Numbered lists of runs, each made when it is first asked for, by one thread or by several.
class late_runs {
public:
    /// `list(number)` makes a list, 0 <= number < count.
    late_runs(int count, std::function<std::vector<run>(int)> list)
        : list_(std::move(list)), made_(static_cast<std::size_t>(count)) {}
    late_runs(late_runs const&) = delete;
    ~late_runs() {
        for (auto const& runs : made_) delete runs.load();
    }

    std::vector<run> const& operator[](int number) const {
        auto& place = made_[static_cast<std::size_t>(number)];
        auto const* runs = place.load(std::memory_order_acquire);
        if (runs) return *runs;
        auto made = std::make_unique<std::vector<run> const>(list_(number));
        if (place.compare_exchange_strong(runs, made.get(), std::memory_order_acq_rel)) return *made.release();
        return *runs; // another thread was first
    }

private:
    std::function<std::vector<run>(int)> list_;
    mutable std::vector<std::atomic<std::vector<run> const*>> made_;
};

} // namespace detail

/// The runs of a message. Those that follow from a sharding alone, as between tokens and heads, are listed when
/// somebody first reads them, and shared by all copies and messages that have the same: a plan does not pay for them.
class run_list {
public:
    run_list() = default;
    run_list(std::vector<run> runs) : own_(std::move(runs)) {}
    run_list(std::initializer_list<run> runs) : own_(runs) {}
    run_list(std::shared_ptr<detail::late_runs const> late, int number) : late_(std::move(late)), number_(number) {}

    std::vector<run> const& all() const { return late_ ? (*late_)[number_] : own_; }
    operator std::vector<run> const&() const { return all(); }
    /// Returns runs that are this list's alone, to be changed.
    std::vector<run>& own() {
        if (late_) own_ = (*late_)[number_];
        late_ = nullptr;
        return own_;
    }

    run const* data() const { return all().data(); }
    std::size_t size() const { return all().size(); }
    bool empty() const { return all().empty(); }
    run const& operator[](std::size_t i) const { return all()[i]; }
    run const* begin() const { return data(); }
    run const* end() const { return data() + size(); }
    run* begin() { return own().data(); }
    run* end() { return begin() + own_.size(); }

    friend bool operator==(run_list const& a, run_list const& b) { return a.all() == b.all(); }

private:
    std::vector<run> own_;
    std::shared_ptr<detail::late_runs const> late_;
    int number_ = 0;
};

} // namespace cpx
