// SPDX-License-Identifier: Apache-2.0
// Version, and the one marker that lets the same arithmetic run on host and device.
#pragma once

#if __cplusplus < 202002L
#error "cpx: this is a library for C++20; compile with -std=c++20 or a newer one"
#include "end of compilation" // nothing that follows would tell more
#endif

#define CPX_VERSION 100 // major * 10000 + minor * 100 + patch, read by CMakeLists.txt

// CPX_CALLS_BACK stands before a template for host and device that calls a function which it is given; that function
// may be for the host only.
#if defined(__CUDACC__)
#define CPX_HOST_DEVICE __host__ __device__
#define CPX_CALLS_BACK _Pragma("nv_exec_check_disable")
#else
#define CPX_HOST_DEVICE
#define CPX_CALLS_BACK
#endif
