// SPDX-License-Identifier: Apache-2.0
// States "on devices" in the host's memory, between ranks that are threads: what has not been written, and what has
// been freed, is NaN.
#pragma once

#include <cpx/ops/carried_states.hpp>
#include <cpx/transport/threads.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace cpx::cuda {

template <class T>
class block {
public:
    block() = default;
    explicit block(index_t count)
        : count_(count), data_(static_cast<T*>(std::aligned_alloc(256, bytes())), poisons{bytes()}) {
        std::memset(static_cast<void*>(data_.get()), 0xff, bytes());
    }
    T* data() { return data_.get(); }
    T const* data() const { return data_.get(); }
    index_t size() const { return count_; }
    bool lent() const { return false; }

private:
    struct poisons {
        std::size_t bytes = 0;
        void operator()(T* data) const {
            std::memset(static_cast<void*>(data), 0xff, bytes);
            std::free(data);
        }
    };
    std::size_t bytes() const { return (static_cast<std::size_t>(count_) * sizeof(T) / 256 + 1) * 256; }

    index_t count_ = 0;
    std::unique_ptr<T[], poisons> data_;
};

struct memory {
    template <class T>
    block<T> room(index_t count) const {
        return block<T>(count);
    }
};

class state_exchange {
    template <class T>
    using list = std::vector<T>;

public:
    template <class T>
    using buffer = block<T>;

    explicit state_exchange(threads& comm) : host_{comm} {}

    cuda::memory memory() const { return {}; }
    template <class Plan>
    void prepare(Plan const& p, state_shape const& shape, identity::arguments const& alike, caller here) {
        host_.prepare(p, shape, alike, here);
    }
    template <class T>
    block<T> room(char const* where, std::initializer_list<index_t> counts, caller here) const {
        return block<T>(cpx::detail::product(where, "elements", counts, here));
    }
    template <class T>
    block<T> zeros(char const* where, std::initializer_list<index_t> counts, caller here) const {
        auto made = room<T>(where, counts, here);
        std::fill_n(made.data(), made.size(), T{});
        return made;
    }
    template <class T>
    void renew(block<T>& to, char const* where, std::initializer_list<index_t> counts, caller here) const {
        to = room<T>(where, counts, here);
    }
    block<index_t> numbers(std::span<index_t const> from, caller) const {
        block<index_t> made(std::ssize(from));
        std::ranges::copy(from, made.data());
        return made;
    }
    void copy(list<cpx::detail::copied<float>> const& all) const { host_.copy(all); }
    void transpose(state_shape const& shape, list<cpx::detail::copied<float>> const& all) const {
        host_.transpose(shape, all);
    }
    void join(state_shape const& shape, index_t count, index_t width,
              list<cpx::detail::joined<float>> const& all) const {
        host_.join(shape, count, width, all);
    }
    /// The threads run every exchange together: one that is passed over moves what nobody reads.
    bool passes_over(plan const& p, bool within, caller here) {
        auto const own = [&](message const& m) { return m.peer == p.rank; };
        bool const passed = std::ranges::all_of(p.sends, own) && std::ranges::all_of(p.receives, own);
        require(passed || !within, where_, "messages of an exchange within ranks", "none to others", "some", here);
        if (!passed) return false;
        block<float> from(p.source_rows * width_), to(p.target_rows * width_);
        host_.exchange(where_, p, 0, rows<float const>(from.data(), p.source_rows, width_),
                       rows<float>(to.data(), p.target_rows, width_), here);
        return true;
    }
    void exchange(char const* where, plan const& p, index_t number, rows<float const> from, rows<float> to,
                  caller here) {
        where_ = where, width_ = from.width();
        host_.exchange(where, p, number, from, to, here);
    }

private:
    char const* where_ = nullptr; ///< of the last exchange
    index_t width_ = 0;
    cpx::detail::states_on_host<threads> host_;
};

} // namespace cpx::cuda
