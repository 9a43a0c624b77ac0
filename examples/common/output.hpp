// SPDX-License-Identifier: Apache-2.0
// What a program writes: all of it, or an error.
#pragma once

#include <cpx/core/error.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <string>
#include <system_error>
#include <utility>

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

namespace examples {

/// Returns ": " and the system's reason for the last failure, or nothing if it gave none.
inline std::string reason() { return errno ? ": " + std::generic_category().message(errno) : ""; }

/// Whether `flush_output` has thrown; then the end of the program does not say it once more.
inline bool output_failed = false;

/// Throws `cpx::error` unless all that was printed so far is written.
inline void flush_output() {
    if (std::cout && !std::ferror(stdout)) errno = 0; // else it is the reason why a part was not written
    output_failed = !(std::cout.flush() && !std::ferror(stdout) && std::fflush(stdout) == 0);
    if (output_failed) throw cpx::error("stdout", "cannot be written" + reason());
}

/// The file that `remove_unfinished` removes, or an empty path.
inline std::array<char, 4096> unfinished{};

/// Removes a file that is not in its place yet, then lets `signal` end the program, as it would have.
inline void remove_unfinished(int signal) {
    ::unlink(unfinished.data());
    static_cast<void>(::raise(signal)); // its own action is the default one again
}

/// Has signals that would end the program remove the file `path` first: that of a reader who has gone, too.
inline void remove_at_signals(std::string const& path) {
    if (path.size() >= unfinished.size()) return;
    std::ranges::copy(path, unfinished.begin());
    unfinished[path.size()] = '\0';
    for (int const one : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGQUIT, SIGXCPU}) {
        struct ::sigaction now {};
        if (::sigaction(one, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) continue;
        now.sa_handler = remove_unfinished;
        now.sa_flags = static_cast<int>(SA_RESETHAND);
        static_cast<void>(::sigaction(one, &now, nullptr));
    }
}

/// A file that appears whole or not at all: it is written beside its place, where `commit` puts it. There is one at a
/// time.
///
/// What is no regular file, such as a pipe or a terminal, is written at once, and so is /dev/stdout.
class output_file {
public:
    /// Throws `cpx::error` that names `option` if the file cannot be written.
    output_file(char const* option, std::string path, std::string const& content)
        : option_(option), named_(std::move(path)), place_(named_) {
        namespace fs = std::filesystem;
        std::error_code none;
        if (fs::equivalent(place_, "/dev/stdout", none)) { // perhaps a file, which holds more than this
            std::cout << content;
            flush_output();
            return;
        }
        auto const old = fs::status(place_, none);
        if (fs::exists(old) && ::access(place_.c_str(), W_OK) != 0) fail();
        if (fs::exists(old) && !fs::is_regular_file(old)) {
            write(std::fopen(place_.c_str(), "w"), content);
            return;
        }
        if (fs::exists(old)) place_ = fs::canonical(place_);                                  // a link stays one
        std::string beside = (place_.parent_path() / ".cpx.").string() + std::string(6, 'X'); // mkstemp chooses these
        int const file = place_.has_filename() ? ::mkstemp(beside.data()) : -1;
        if (file < 0) fail();
        beside_ = beside;
        remove_at_signals(beside);
        ::mode_t const mask = ::umask(0);
        ::umask(mask);
        ::mode_t const mode = fs::exists(old) ? static_cast<::mode_t>(old.permissions()) & 0777 : 0666 & ~mask;
        static_cast<void>(::fchmod(file, mode));
        write(::fdopen(file, "w"), content);
    }
    output_file(output_file const&) = delete;
    output_file& operator=(output_file const&) = delete;
    ~output_file() { remove(); }

    /// Throws `cpx::error` if the file cannot be put into its place.
    void commit() {
        if (!beside_.empty() && ::rename(beside_.c_str(), place_.c_str()) != 0) fail();
        beside_.clear();
        unfinished[0] = '\0';
    }

private:
    [[noreturn]] void fail() {
        auto const why = reason();
        remove();
        throw cpx::error(option_, "file", "a path that can be written", cpx::quote(named_) + why);
    }
    void remove() {
        if (!beside_.empty()) ::unlink(beside_.c_str());
        beside_.clear();
        unfinished[0] = '\0';
    }
    void write(std::FILE* file, std::string const& content) {
        if (!file) fail();
        bool const written = std::fwrite(content.data(), 1, content.size(), file) == content.size();
        if (!(std::fclose(file) == 0 && written)) fail();
    }

    char const* option_;
    std::string named_;
    std::filesystem::path place_, beside_;
};

} // namespace examples
