// SPDX-License-Identifier: Apache-2.0
// The main function of every test.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <support/skipped.hpp>

int main(int argc, char** argv) {
    int const failed = doctest::Context(argc, argv).run();
    return failed == 0 && support::skipped ? support::skipped_code : failed;
}
