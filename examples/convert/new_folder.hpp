// SPDX-License-Identifier: Apache-2.0
// A folder that appears whole or not at all.
#pragma once

#include "../common/output.hpp"

#include <cpx/core/error.hpp>
#include <cpx/core/printable.hpp>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>

#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>

namespace convert {

namespace fs = std::filesystem;

/// SIGINT, SIGTERM and SIGHUP, unless they are ignored, wait until this ends: then they end the program.
class held_signals {
public:
    held_signals() {
        ::sigemptyset(&held_);
        for (int const one : all) {
            struct ::sigaction now {};
            if (::sigaction(one, nullptr, &now) == 0 && now.sa_handler != SIG_IGN) ::sigaddset(&held_, one);
        }
        ::pthread_sigmask(SIG_BLOCK, &held_, &before_);
    }
    held_signals(held_signals const&) = delete;
    held_signals& operator=(held_signals const&) = delete;
    ~held_signals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

    /// Returns whether one waits.
    bool any() const {
        ::sigset_t now{};
        if (::sigpending(&now) != 0) return false;
        for (int const one : all)
            if (::sigismember(&held_, one) == 1 && ::sigismember(&now, one) == 1) return true;
        return false;
    }

private:
    static constexpr int all[]{SIGINT, SIGTERM, SIGHUP};

    ::sigset_t held_{}, before_{};
};

/// Files are written beside the folder's place, where `commit` puts them all.
///
/// Signals that end a program do so when nothing is left of them beside it: whoever writes calls `go_on` now and then.
class new_folder {
public:
    /// Throws `cpx::error` if there is something else than an empty folder at `place`, or nothing can be written there.
    explicit new_folder(std::string const& place) : place_(place) {
        std::error_code none;
        if (place_.has_relative_path() && !place_.has_filename()) place_ = place_.parent_path(); // "out/"
        if (fs::exists(fs::symlink_status(place_, none)) &&
            !(fs::is_directory(place_, none) && fs::is_empty(place_, none)))
            throw cpx::error("OUT", "folder", "a new one, or an empty one",
                             cpx::quote(place) + ", which has something");
        std::string beside = (place_.parent_path() / ".cpx.").string() + std::string(6, 'X'); // mkdtemp chooses these
        errno = 0;
        if (!::mkdtemp(beside.data())) fail();
        beside_ = beside;
        ::mode_t const mask = ::umask(0);
        ::umask(mask);
        static_cast<void>(::chmod(beside_.c_str(), 0777 & ~mask));
    }
    new_folder(new_folder const&) = delete;
    new_folder& operator=(new_folder const&) = delete;
    ~new_folder() {
        std::error_code none;
        if (!beside_.empty()) fs::remove_all(beside_, none);
    }

    /// Returns where to write the file of this name.
    fs::path operator/(std::string const& name) const { return beside_ / name; }

    /// Throws `cpx::error` if a signal wants the program to end.
    void go_on() const {
        if (signals_.any()) throw cpx::error("OUT", "not written, for a signal ends the program");
    }
    /// Throws `cpx::error` if the folder cannot be put into its place, and as `go_on` does.
    void commit() {
        go_on();
        errno = 0;
        if (std::rename(beside_.c_str(), place_.c_str()) != 0) fail();
        beside_.clear();
    }

private:
    [[noreturn]] void fail() const {
        throw cpx::error("OUT", "folder", "a path that can be written",
                         cpx::quote(place_.string()) + examples::reason());
    }

    held_signals signals_;
    fs::path place_, beside_;
};

} // namespace convert
