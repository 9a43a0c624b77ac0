// SPDX-License-Identifier: Apache-2.0
// The main function of every test.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <support/files.hpp>
#include <support/skipped.hpp>

char const* const support::source_dir = CPX_SOURCE_DIR;
char const* const support::golden_dir = CPX_SOURCE_DIR "/tests/golden";

int main(int argc, char** argv) {
    int const failed = doctest::Context(argc, argv).run();
    return failed == 0 && support::skipped ? support::skipped_code : failed;
}
