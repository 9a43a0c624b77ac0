// SPDX-License-Identifier: Apache-2.0
// MPI from its beginning to its end.
#pragma once

#include <cpx/core/error.hpp>

#if !__has_include(<mpi.h>)
#error "cpx: this header needs MPI; link cpx::mpi (find_package(cpx COMPONENTS mpi)), or compile with mpicxx"
#include "end of compilation"
#endif
#include <mpi.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <string>
#include <thread>

namespace cpx {

namespace detail {

/// Whether a transport of this process has failed, so that MPI_Finalize might wait for ranks that never come.
inline std::atomic<bool> mpi_failed = false;

/// Throws `cpx::error` unless `result` is success.
inline void mpi_check(int result, char const* call, caller here = caller::here()) {
    if (result == MPI_SUCCESS) return;
    std::string text(MPI_MAX_ERROR_STRING, '\0');
    int length = 0;
    MPI_Error_string(result, text.data(), &length);
    throw error("mpi", call, "success", text.substr(0, static_cast<std::size_t>(length)), here);
}

/// What a rank does between two looks for news, of which `round` were in vain.
inline void mpi_pause(int round) {
    if (round < 1000)
        std::this_thread::yield();
    else
        std::this_thread::sleep_for(std::chrono::microseconds(50));
}

/// Waits for a collective of all ranks. Throws `cpx::error` if they do not come within `deadline`.
inline void mpi_wait_for_all(char const* where, MPI_Request request, std::chrono::milliseconds deadline, caller here) {
    auto const end = std::chrono::steady_clock::now() + deadline;
    for (int round = 0, come = 0;; mpi_pause(round++)) {
        mpi_check(MPI_Test(&request, &come, MPI_STATUS_IGNORE), "MPI_Test", here);
        if (come) return;
        if (std::chrono::steady_clock::now() <= end) continue;
        mpi_failed = true;
        throw error(where, "ranks of the communicator",
                    "all of them within " + std::to_string(deadline.count()) + " ms", "fewer", here);
    }
}

} // namespace detail

/// MPI from its beginning to its end, for `main`. If MPI runs already, whoever began it ends it.
///
/// Does not end MPI when an exception passes or a transport has failed: MPI_Finalize would wait for ranks that never
/// come. Then `main` returns something other than 0 (or lets the exception go), and the launcher ends the other ranks.
/// Ranks that have all recovered may call MPI_Finalize themselves.
class mpi_environment {
public:
    /// Throws `cpx::error` if MPI does not give `level`, one of MPI_THREAD_SINGLE to MPI_THREAD_MULTIPLE.
    explicit mpi_environment(int level = MPI_THREAD_FUNNELED, caller here = caller::here()) {
        int running = 0, got = level, result = MPI_Initialized(&running);
        began_ = !running;
        if (result == MPI_SUCCESS) // until there is a communicator, errors end the process
            result = began_ ? MPI_Init_thread(nullptr, nullptr, level, &got) : MPI_Query_thread(&got);
        require(result == MPI_SUCCESS, "mpi_environment", "MPI_Init_thread", MPI_SUCCESS, result, here);
        require(got >= level, "mpi_environment", "level of threads", level, got, here);
    }
    mpi_environment(mpi_environment const&) = delete;
    mpi_environment& operator=(mpi_environment const&) = delete;
    ~mpi_environment() {
        int ended = 0;
        MPI_Finalized(&ended);
        if (began_ && !ended && !detail::mpi_failed && std::uncaught_exceptions() == 0) MPI_Finalize();
    }

private:
    bool began_ = false;
};

} // namespace cpx
