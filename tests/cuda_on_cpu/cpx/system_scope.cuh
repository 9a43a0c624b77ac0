// SPDX-License-Identifier: Apache-2.0
// In place of the kernels' header of that name: ranks are threads of the host.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

namespace cpx::kernels::detail {

inline std::uint64_t nanoseconds() {
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                                      std::chrono::nanoseconds(1));
}
inline void store_release(std::uint64_t* to, std::uint64_t value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
inline void store_relaxed(std::uint64_t* to, std::uint64_t value) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }
template <class T>
T load_relaxed(T const* from) {
    return __atomic_load_n(from, __ATOMIC_RELAXED);
}
inline std::uint64_t load_acquire(std::uint64_t const* from) {
    std::this_thread::yield();
    return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}

} // namespace cpx::kernels::detail
