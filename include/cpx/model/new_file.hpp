// SPDX-License-Identifier: Apache-2.0
// A file that appears whole or not at all.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace cpx::detail {

/// A file that is written beside its place, where `commit` puts it; without that it leaves nothing.
///
/// A link stays one, and an old file's rights are the new one's.
class new_file {
public:
    new_file() = default;
    /// Takes the room of `size` bytes on the disk, where the file system can. Throws `cpx::error` that gives the
    /// system's reason, or says what is in the file's place.
    new_file(std::filesystem::path const& path, index_t size, caller here) : place_(path), name_(path.string()) {
        namespace fs = std::filesystem;
        std::error_code none;
        require(!path.empty(), "new_file", "path", "one of a file", "an empty one", here);
        auto const old = fs::status(place_, none);
        if (!place_.has_filename() || (fs::exists(old) && !fs::is_regular_file(old)))
            throw error(name_, "cannot write", "a path of a regular file",
                        fs::is_directory(old) || !place_.has_filename() ? "a directory" : "another", here);
        if (fs::exists(old)) place_ = fs::canonical(place_);
        static std::atomic<unsigned> made = 0;
        for (errno = EEXIST; file_ < 0 && errno == EEXIST;) {
            beside_ = place_.parent_path() / (".cpx." + std::to_string(::getpid()) + '.' + std::to_string(made++));
            file_ = ::open(beside_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        }
        if (file_ < 0) {
            auto const why = errno;
            beside_.clear();
            fail("cannot write", "a file that can be written", why, here);
        }
        if (fs::exists(old)) static_cast<void>(::fchmod(file_, static_cast<::mode_t>(old.permissions()) & 0777));
        int why = 0;
        while (size > 0 && (why = ::fallocate(file_, 0, 0, size) == 0 ? 0 : errno) == EINTR) {
        }
        if (why != 0 && why != EOPNOTSUPP && why != ENOSYS)
            fail("room for the file", std::to_string(size) + " bytes", why, here);
    }
    new_file(new_file&& other) noexcept { *this = std::move(other); }
    new_file& operator=(new_file&& other) noexcept {
        std::swap(place_, other.place_);
        std::swap(beside_, other.beside_);
        std::swap(name_, other.name_);
        std::swap(file_, other.file_);
        return *this;
    }
    ~new_file() { remove(); }

    /// Writes `bytes` from byte `first` of the file on. Throws `cpx::error` if the system refuses, or after `commit`.
    void write(std::uint64_t first, std::span<std::byte const> bytes, caller here) {
        if (file_ < 0) throw error(name_, "cannot write", "a file that is not in its place", "one that is", here);
        while (!bytes.empty()) {
            auto const done = ::pwrite(file_, bytes.data(), bytes.size(), static_cast<::off_t>(first));
            if (done < 0 && errno == EINTR) continue;
            if (done <= 0)
                fail("cannot write", std::to_string(bytes.size()) + " bytes from " + std::to_string(first),
                     done < 0 ? errno : ENOSPC, here);
            first += static_cast<std::uint64_t>(done);
            bytes = bytes.subspan(static_cast<std::size_t>(done));
        }
    }

    /// Puts the file into its place when the disk has all of it. Throws `cpx::error` if the system refuses, or after
    /// `commit`.
    void commit(caller here) {
        if (file_ < 0) throw error(name_, "cannot write", "a file that is not in its place", "one that is", here);
        int why = ::fsync(file_) == 0 || errno == EINVAL ? 0 : errno;
        if (::close(std::exchange(file_, -1)) != 0 && why == 0) why = errno; // where network file systems refuse
        if (why == 0 && ::rename(beside_.c_str(), place_.c_str()) != 0) why = errno;
        if (why != 0) fail("cannot write", "a file in its place", why, here);
        beside_.clear();
    }

private:
    /// Removes what is written, and throws.
    [[noreturn]] void fail(char const* what, std::string expected, int why, caller here) {
        remove();
        throw error(name_, what, std::move(expected), std::generic_category().message(why), here);
    }
    void remove() {
        if (file_ >= 0) ::close(file_);
        if (!beside_.empty()) ::unlink(beside_.c_str());
        file_ = -1;
        beside_.clear();
    }

    std::filesystem::path place_, beside_;
    std::string name_; ///< as it was given
    int file_ = -1;
};

} // namespace cpx::detail
