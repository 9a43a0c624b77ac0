// SPDX-License-Identifier: Apache-2.0
// What launchers and NCCL say to each other by environment variables.
#pragma once

#include <cpx/core/error.hpp>

#include <cstdlib>
#include <optional>
#include <string>

namespace cpx::detail {

/// Sets NCCL_COMM_ID for a while, or takes it out: NCCL makes it the id of every communicator.
class comm_id_for_now {
public:
    explicit comm_id_for_now(char const* value = nullptr) {
        if (char const* const found = std::getenv("NCCL_COMM_ID")) before_ = found;
        changes_ = value || before_;
        if (changes_) set(value);
    }
    comm_id_for_now(comm_id_for_now const&) = delete;
    comm_id_for_now& operator=(comm_id_for_now const&) = delete;
    ~comm_id_for_now() {
        if (changes_) set(before_ ? before_->c_str() : nullptr);
    }

private:
    static void set(char const* value) {
        static_cast<void>(value ? ::setenv("NCCL_COMM_ID", value, 1) : ::unsetenv("NCCL_COMM_ID"));
    }
    std::optional<std::string> before_;
    bool changes_;
};

/// Returns the number of an environment variable. Throws `cpx::error` unless it is one from `lowest` to `highest`.
inline int variable(char const* name, int lowest, int highest, caller here) {
    char const* const text = std::getenv(name);
    char* end = nullptr;
    long const value = text ? std::strtol(text, &end, 10) : lowest - 1;
    require(text && *text && !*end && value >= lowest && value <= highest, "nccl", name,
            in_words(lowest, " to ", highest), text ? text : "nothing", here);
    return static_cast<int>(value);
}

/// Returns where torchrun's ranks meet: NCCL_COMM_ID if that is set, else the port after MASTER_PORT of MASTER_ADDR.
/// Throws `cpx::error` if these say nothing.
inline std::string meeting_place(caller here) {
    if (char const* const found = std::getenv("NCCL_COMM_ID")) return found;
    char const* const found = std::getenv("MASTER_ADDR");
    require(found != nullptr, "nccl", "MASTER_ADDR", "the address of rank 0", "nothing", here);
    std::string address = found;
    if (address.find(':') != address.npos && address[0] != '[') address = '[' + address + ']'; // IPv6
    return address + ':' + std::to_string(variable("MASTER_PORT", 1, 65534, here) + 1);
}

} // namespace cpx::detail
