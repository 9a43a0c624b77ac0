// SPDX-License-Identifier: Apache-2.0
// What the tests of file readers share: files that last as long as a test, damaged texts, and the text of an error.
#pragma once

#include <cpx/core/error.hpp>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>

namespace faults {

/// A directory of its own under the system's temporary one, removed with all it holds at the end of its life.
class directory {
public:
    directory() {
        auto pattern = (std::filesystem::temp_directory_path() / ("cpx-test-" + std::string(6, 'X'))).string();
        if (!::mkdtemp(pattern.data())) throw std::runtime_error("cannot make " + pattern);
        path_ = pattern;
    }
    directory(directory const&) = delete;
    directory& operator=(directory const&) = delete;
    ~directory() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }

    std::filesystem::path const& path() const { return path_; }

    /// Writes a file and returns its path.
    std::filesystem::path write(std::string const& name, std::string const& bytes) const {
        std::ofstream(path_ / name, std::ios::binary) << bytes;
        return path_ / name;
    }

private:
    std::filesystem::path path_;
};

/// Returns what the `cpx::error` that `call` throws says, or "nothing thrown". Lets every other exception pass.
template <class Call>
std::string message(Call call) {
    try {
        call();
    } catch (cpx::error const& error) {
        return error.what();
    }
    return "nothing thrown";
}

inline bool contains(std::string const& text, std::string const& passage) { return text.find(passage) != text.npos; }

/// Returns `bytes` with one to four of its bytes changed, removed, repeated or swapped for one of JSON's own.
inline std::string damaged(std::string bytes, std::mt19937_64& random) {
    static std::string const own = "{}[]\":,0123456789-.eE\\u \x00\xff\x80tfn";
    for (auto count = 1 + random() % 4; count > 0 && !bytes.empty(); --count) {
        auto const at = random() % bytes.size();
        switch (random() % 6) {
        case 0: bytes[at] = static_cast<char>(random()); break;
        case 1: bytes[at] = static_cast<char>(bytes[at] ^ 1 << random() % 8); break;
        case 2: bytes[at] = own[random() % own.size()]; break;
        case 3: bytes.erase(at, 1 + random() % 8); break;
        case 4: bytes.insert(at, bytes.substr(at, 1 + random() % 40)); break;
        default: bytes.resize(at); break;
        }
    }
    return bytes;
}

} // namespace faults
