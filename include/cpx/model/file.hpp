// SPDX-License-Identifier: Apache-2.0
// Bytes that are read where they are asked for, from a file of any size or from memory.
#pragma once

#include <cpx/core/error.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace cpx::detail {

/// The bytes of a regular file, which stays open and is not loaded, or those of a string.
class byte_source {
public:
    /// Takes bytes; `name` is theirs in errors.
    byte_source(std::string bytes, std::string name)
        : bytes_(std::move(bytes)), name_(std::move(name)), size_(bytes_.size()) {}

    /// Opens a file. Throws `cpx::error` that gives the system's reason, or says that it is not a regular file.
    byte_source(std::filesystem::path const& path, caller here) : name_(path.string()) {
        file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a FIFO without a writer does not block
        struct ::stat status {};
        if (file_ < 0 || ::fstat(file_, &status) != 0) {
            auto const reason = refusal();
            close();
            throw error(name_, "cannot open", "a file that can be read", reason, here);
        }
        if (!S_ISREG(status.st_mode)) {
            close();
            throw error(name_, "cannot open", "a regular file", S_ISDIR(status.st_mode) ? "a directory" : "another",
                        here);
        }
        size_ = static_cast<std::uint64_t>(status.st_size);
    }
    byte_source(byte_source const&) = delete;
    byte_source& operator=(byte_source const&) = delete;
    ~byte_source() { close(); }

    std::string const& name() const { return name_; }
    /// Returns the number of bytes; of a file, when it was opened.
    std::uint64_t size() const { return size_; }

    /// Fills `to` with the bytes from `first` on, which must not end beyond `size()`. Threads may read at a time.
    ///
    /// Throws `cpx::error` if a file cannot be read, or has become shorter since it was opened.
    void read(std::uint64_t first, std::span<std::byte> to, caller here) const {
        if (file_ < 0) {
            if (!to.empty()) std::memcpy(to.data(), bytes_.data() + first, to.size());
            return;
        }
        while (!to.empty()) {
            auto const got = ::pread(file_, to.data(), to.size(), static_cast<::off_t>(first));
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0)
                throw error(name_, "cannot read", std::to_string(to.size()) + " bytes from " + std::to_string(first),
                            got < 0 ? refusal() : "the end of the file", here);
            first += static_cast<std::uint64_t>(got);
            to = to.subspan(static_cast<std::size_t>(got));
        }
    }
    /// Returns the `count` bytes from `first` on. Throws as the other one.
    std::string read(std::uint64_t first, std::uint64_t count, caller here) const {
        std::string bytes(count, '\0');
        read(first, std::as_writable_bytes(std::span(bytes)), here);
        return bytes;
    }

private:
    /// Returns why the system refused the last call.
    static std::string refusal() { return std::generic_category().message(errno); }
    void close() {
        if (file_ >= 0) ::close(file_);
    }

    std::string bytes_, name_;
    std::uint64_t size_ = 0;
    int file_ = -1;
};

} // namespace cpx::detail
