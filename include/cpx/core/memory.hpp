// SPDX-License-Identifier: Apache-2.0
// Where the elements of a tensor live.
#pragma once

#include <cpx/core/size.hpp>

#include <algorithm>
#include <concepts>
#include <span>

namespace cpx {

/// The host's own memory: where tensors live that say nothing else.
struct host_memory {
    /// What owns elements.
    template <class T>
    using block = std::vector<T>;
    /// What operators sum elements over rows in, such as gradients of weights.
    template <class T>
    using sum = T;

    /// Returns as many zeros as the product of `counts`. Throws `cpx::error` if they are no size, or too many.
    template <class T>
    block<T> zeros(char const* where, std::initializer_list<index_t> counts, caller here = caller::here()) const {
        return detail::zeros<T>(where, counts, here);
    }
    template <class T>
    void write(T* to, std::span<T const> from, caller = caller::here()) const {
        std::ranges::copy(from, to);
    }
    template <class T>
    std::vector<T> read(std::span<T const> from, caller = caller::here()) const {
        return {from.begin(), from.end()};
    }

    friend bool operator==(host_memory, host_memory) = default;
};

/// What can be the memory of a tensor: `host_memory`, or `cuda::memory`, which is a device's and works in the order of
/// a stream. Copies are the same memory. `write` copies from the host and `read` to the host; both return when that is
/// done.
template <class M>
concept any_memory = std::copyable<M> && std::equality_comparable<M> &&
                     requires(M const& m, float* to, std::span<float const> from, caller here) {
                         { m.template zeros<float>("", {1}, here) } -> std::same_as<typename M::template block<float>>;
                         m.write(to, from, here);
                         { m.read(from, here) } -> std::same_as<std::vector<float>>;
                     };

namespace detail {

/// Returns elements that will all be written before they are read: as they come, from a memory that has `room`.
template <class T, any_memory M>
typename M::template block<T> unwritten(M const& memory, char const* where, std::initializer_list<index_t> counts,
                                        caller here) {
    if constexpr (requires { memory.template room<T>(index_t{1}); }) {
        index_t const count = product(where, "elements", counts, here);
        product(where, "bytes", {count, static_cast<index_t>(sizeof(T))}, here);
        return memory.template room<T>(count);
    } else
        return memory.template zeros<T>(where, counts, here);
}

} // namespace detail

} // namespace cpx
