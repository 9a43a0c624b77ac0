// SPDX-License-Identifier: Apache-2.0
// A folder that appears whole or not at all.
#pragma once

#include "../common/output.hpp"

#include <cpx/core/error.hpp>
#include <cpx/core/printable.hpp>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>

#include <stdlib.h>
#include <sys/stat.h>

namespace convert {

namespace fs = std::filesystem;

/// Files are written beside the folder's place, where `commit` puts them all.
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

    /// Throws `cpx::error` if the folder cannot be put into its place.
    void commit() {
        errno = 0;
        if (std::rename(beside_.c_str(), place_.c_str()) != 0) fail();
        beside_.clear();
    }

private:
    [[noreturn]] void fail() const {
        throw cpx::error("OUT", "folder", "a path that can be written",
                         cpx::quote(place_.string()) + examples::reason());
    }

    fs::path place_, beside_;
};

} // namespace convert
