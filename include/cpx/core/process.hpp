// SPDX-License-Identifier: Apache-2.0
// What the system knows of a process.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <cerrno>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace cpx::detail {

struct process {
    bool dead = true;        ///< or dying, which takes seconds where much of a device's memory is given back
    std::uint64_t began = 0; ///< when it was started; a later process of the same number began later
};

/// Returns what is known of the process of a number; numbers that are not positive are of none. Linux.
inline process look_at(std::int64_t number) {
    if (number <= 0 || (::kill(static_cast<pid_t>(number), 0) != 0 && errno != EPERM)) return {};
    std::ifstream status("/proc/" + std::to_string(number) + "/stat"); // "17 (name) S ...", the name may hold any
    std::string const text{std::istreambuf_iterator<char>(status), {}};
    auto const name_end = text.rfind(')');
    if (name_end == std::string::npos) return {};
    std::istringstream fields(text.substr(name_end + 1)); // from the third on, the state
    process found;
    char state = 'Z'; // a zombie: dead, and its parent has not asked for it yet
    std::string passed;
    std::uint64_t flags = 0;
    fields >> state;
    for (int field = 4; field < 9; ++field) fields >> passed;
    fields >> flags; // 4: exits, 1024: a signal has ended it; as in Linux's sched.h, where they never changed
    for (int field = 10; field < 22; ++field) fields >> passed;
    fields >> found.began;
    found.dead = state == 'Z' || (flags & (4 | 1024)) != 0;
    return found;
}

} // namespace cpx::detail
