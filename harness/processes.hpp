// SPDX-License-Identifier: Apache-2.0
// Ranks as processes, each with a GPU, as torchrun starts them.
#pragma once

#include "gpus.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace processes {

/// What `wait_for` returns of a process that ended by SIGKILL.
inline constexpr int was_killed = -1;

/// Waits for the end of a process and returns its exit code; 128 and the number of a signal that ended it, if that was
/// not SIGKILL; -2 if it never began.
inline int wait_for(pid_t process) {
    int status = 0;
    if (process < 0 || ::waitpid(process, &status, 0) != process) return -2;
    if (WIFEXITED(status)) return WEXITSTATUS(status);
    return WTERMSIG(status) == SIGKILL ? was_killed : 128 + WTERMSIG(status);
}

/// Returns how many ranks can have a GPU that runs this build's code, without touching them in this process: what CUDA
/// knows does not survive a fork. Throws `cpx::error` if they cannot be counted; stderr says why.
inline int gpus() {
    constexpr int most = 64, failed = most + 1;
    std::fflush(nullptr);
    pid_t const process = ::fork();
    if (process == 0) {
        int code = failed;
        try { // nothing may return from here: the process would run the tests once more
            code = usable_gpus(most, ranks_are::processes);
        } catch (std::exception const& e) {
            std::fprintf(stderr, "counting GPUs: %s\n", e.what());
        } catch (...) {
            std::fprintf(stderr, "counting GPUs: an exception that is not a std::exception\n");
        }
        ::_exit(code);
    }
    int const code = wait_for(process);
    cpx::require(code >= 0 && code <= most, "processes::gpus", "process that counts GPUs", "an exit with their number",
                 code < 0 ? "none" : "code " + std::to_string(code));
    return code;
}

/// Runs `f(rank)` in `ranks` processes with torchrun's variables and returns their exit codes; `f` returns its problem,
/// or "" if there is none, which becomes exit code 1 and a line on stderr.
inline std::vector<int> run(int ranks, std::function<std::string(int)> const& f) {
    // below 32768, where Linux takes ports for connections from, and far from those of a test that runs beside this one
    static int port = 10'000 + static_cast<int>(::getpid() % 220) * 100;
    port += 2;
    std::fflush(nullptr);
    std::vector<pid_t> started;
    for (int rank = 0; rank < ranks; ++rank) {
        pid_t const process = ::fork();
        if (process != 0) {
            started.push_back(process);
            continue;
        }
        ::setenv("RANK", std::to_string(rank).c_str(), 1);
        ::setenv("LOCAL_RANK", std::to_string(gpu_of(rank)).c_str(), 1);
        ::setenv("WORLD_SIZE", std::to_string(ranks).c_str(), 1);
        ::setenv("MASTER_ADDR", "127.0.0.1", 1);
        ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
        ::unsetenv("NCCL_COMM_ID");
        if (char const* const host = std::getenv("NCCL_HOSTID")) // see ranks_of_a_gpu
            ::setenv("NCCL_HOSTID", (host + std::to_string(rank)).c_str(), 1);
        std::string problem;
        try {
            problem = f(rank);
        } catch (std::exception const& e) {
            problem = e.what();
        }
        if (!problem.empty()) std::fprintf(stderr, "rank %d: %s\n", rank, problem.c_str());
        std::fflush(nullptr);
        ::_exit(problem.empty() ? 0 : 1); // no destructors of a runtime that was forked
    }
    std::vector<int> codes;
    for (pid_t const process : started) codes.push_back(wait_for(process));
    return codes;
}

} // namespace processes
