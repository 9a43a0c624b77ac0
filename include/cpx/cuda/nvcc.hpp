// SPDX-License-Identifier: Apache-2.0
// What a header for GPUs says to another compiler than nvcc, before that stumbles over the first name it does not know.
#pragma once

#ifndef __CUDACC__
#error "cpx: this header is for sources that nvcc compiles; name the file .cu and link cpx::cuda or cpx::nccl"
#include "end of compilation" // nothing that follows would tell more
#endif
