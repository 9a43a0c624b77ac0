// SPDX-License-Identifier: Apache-2.0
// What launchers and NCCL say to each other by environment variables.
#pragma once

#include <cpx/core/error.hpp>

#include <cstdlib>
#include <optional>
#include <string>

namespace cpx::detail {

/// Takes NCCL_COMM_ID out of the environment for a while: NCCL makes it the id of every communicator.
struct without_comm_id {
    std::optional<std::string> name; ///< what it was
    without_comm_id() {
        if (char const* const found = std::getenv("NCCL_COMM_ID")) name = found;
        if (name) ::unsetenv("NCCL_COMM_ID");
    }
    without_comm_id(without_comm_id const&) = delete;
    without_comm_id& operator=(without_comm_id const&) = delete;
    ~without_comm_id() { name ? ::setenv("NCCL_COMM_ID", name->c_str(), 1) : ::unsetenv("NCCL_COMM_ID"); }
};

/// Returns the number that an environment variable holds. Throws `cpx::error` unless it is one from `lowest` to
/// `highest`.
inline int variable(char const* name, int lowest, int highest, caller here) {
    char const* const text = std::getenv(name);
    char* end = nullptr;
    long const value = text ? std::strtol(text, &end, 10) : lowest - 1;
    require(text && *text && !*end && value >= lowest && value <= highest, "nccl", name,
            std::to_string(lowest) + " to " + std::to_string(highest), text ? text : "nothing", here);
    return static_cast<int>(value);
}

} // namespace cpx::detail
