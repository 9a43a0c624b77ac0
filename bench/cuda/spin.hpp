// SPDX-License-Identifier: Apache-2.0
// A kernel that takes a while.
#pragma once

namespace timing {

/// Keeps a stream busy for so many nanoseconds, in which the host can give it more to do.
static __global__ void spin(long long nanoseconds) {
    long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < nanoseconds);
}

} // namespace timing
