// SPDX-License-Identifier: Apache-2.0
// What a call that must fail says.
#pragma once

#include <cpx/core/error.hpp>

#include <doctest/doctest.h>

#include <fstream>
#include <string>
#include <vector>

namespace support {

/// Returns the message of the `cpx::error` that `call` throws, or "" if it returns.
template <class F>
std::string message(F&& call) {
    try {
        call();
    } catch (cpx::error const& e) {
        return e.what();
    }
    return "";
}

/// Whether memory that the system does not have is an exception. Under a sanitizer, and where the system promises any
/// amount (vm.overcommit_memory 1), it ends the program instead.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline bool const memory_ends = false;
#else
inline bool const memory_ends = std::ifstream("/proc/sys/vm/overcommit_memory").get() != '1';
#endif

inline void holds(std::vector<std::string> const& passages, std::string const& text, cpx::caller from) {
    for (std::string const& passage : passages)
        CHECK_MESSAGE(text.find(passage) != std::string::npos,
                      "line " << from.line << ": \"" << passage << "\" is not in \"" << text << "\"");
}

/// Checks that `call` throws a `cpx::error` whose message holds all `passages`.
template <class F>
void rejects(std::vector<std::string> const& passages, F&& call, cpx::caller from = cpx::caller::here()) {
    holds(passages, message(call), from);
}

} // namespace support
