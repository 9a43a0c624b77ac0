// SPDX-License-Identifier: Apache-2.0
// Version, and the one marker that lets the same arithmetic run on host and device.
#pragma once

#define CPX_VERSION 100 // major * 10000 + minor * 100 + patch, read by CMakeLists.txt

#if defined(__CUDACC__)
#define CPX_HOST_DEVICE __host__ __device__
#else
#define CPX_HOST_DEVICE
#endif
