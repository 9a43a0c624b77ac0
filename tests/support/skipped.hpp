// SPDX-License-Identifier: Apache-2.0
// Tests of what this machine lacks say so. A program in which one did so, and none failed, counts as skipped.
#pragma once

#include <cstdio>

namespace support {

/// The exit code that ctest takes for a skipped test, see tests/CMakeLists.txt.
inline constexpr int skipped_code = 77;

/// Whether a test found less than it wanted; tests/main.cpp then returns `skipped_code`, unless a test failed.
inline bool skipped = false;

/// Returns whether as many `things` were found as are wanted; if not, says so and notes it.
///
/// Not for ranks of MPI, whose launchers hide a failure behind other exit codes: see tests/mpi/CMakeLists.txt.
inline bool enough(int wanted, int found, char const* things) {
    if (found >= wanted) return true;
    skipped = true;
    std::printf("cpx: skipped, %s: %d wanted, %d found\n", things, wanted, found);
    return false;
}

} // namespace support
