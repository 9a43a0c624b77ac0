// SPDX-License-Identifier: Apache-2.0
// Version, index type and the one marker that lets the same arithmetic run on host and device.
#pragma once

#include <cstdint>

#define CPX_VERSION 100 // major * 10000 + minor * 100 + patch, read by CMakeLists.txt

#if defined(__CUDACC__)
#define CPX_HOST_DEVICE __host__ __device__
#else
#define CPX_HOST_DEVICE
#endif

namespace cpx {

/// Counts and offsets of tokens, rows, elements and bytes: 64 bits everywhere, because a shard of 2^19 tokens
/// by 4096 channels already has 2^31 elements.
using index = std::int64_t;

} // namespace cpx
