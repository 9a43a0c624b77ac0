// SPDX-License-Identifier: Apache-2.0
// Whole files as bytes, and bytes of unknown origin as text that is safe to print.
#pragma once

#include <cpx/core/error.hpp>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>

namespace cpx::detail {

/// Returns `text` in quotes: at most its first 64 bytes, control characters and all beyond ASCII as \xHH.
///
/// Errors show names and values that come from files; this keeps such a text from flooding or disguising a message.
inline std::string quote(std::string_view text) {
    constexpr std::size_t most = 64;
    constexpr char const* digits = "0123456789abcdef";
    std::string shown = "\"";
    for (char const c : text.substr(0, most)) {
        auto const byte = static_cast<unsigned char>(c);
        if (c == '"' || c == '\\')
            (shown += '\\') += c;
        else if (byte < 0x20 || byte > 0x7e)
            ((shown += "\\x") += digits[byte >> 4]) += digits[byte & 15];
        else
            shown += c;
    }
    return shown + (text.size() > most ? "\"..." : "\"");
}

/// Returns the bytes of a regular file. Throws `cpx::error` that names it if it cannot be read or has more than `most`.
inline std::string read_file(std::filesystem::path const& path, std::uintmax_t most) {
    std::error_code failure;
    auto const status = std::filesystem::status(path, failure);
    if (!std::filesystem::exists(status)) throw error(path.string(), "cannot open", "a file", "no such file");
    if (!std::filesystem::is_regular_file(status))
        throw error(path.string(), "cannot open", "a regular file", "something else");
    auto const size = std::filesystem::file_size(path, failure);
    std::ifstream file(path, std::ios::binary);
    if (failure || !file) throw error(path.string(), "cannot open", "a file that may be read", "a refusal");
    if (size > most)
        throw error(path.string(), "too long", "at most " + std::to_string(most) + " bytes", std::to_string(size));
    std::string bytes(size, '\0');
    file.read(bytes.data(), static_cast<std::streamsize>(size));
    if (static_cast<std::uintmax_t>(file.gcount()) != size)
        throw error(path.string(), "cannot read", std::to_string(size) + " bytes", std::to_string(file.gcount()));
    return bytes;
}

} // namespace cpx::detail
