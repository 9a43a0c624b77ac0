// SPDX-License-Identifier: Apache-2.0
// Bytes of unknown origin as text that is safe to print: errors show names and values from files and command lines.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace cpx {

namespace detail {

/// A character at the start of a text: how many bytes it has, and whether it may be shown as it is.
struct leading_character {
    std::size_t bytes = 1;
    bool shown = false;
};

/// Returns the first character of `text`, which is not empty. A byte that begins no character of UTF-8 counts as one.
///
/// Control characters are not shown, nor those of Unicode that are invisible or change the direction of text.
inline leading_character first_character(std::string_view text) {
    auto const byte = [&](std::size_t i) { return std::uint32_t{static_cast<unsigned char>(text[i])}; };
    std::size_t const n = byte(0) < 0x80   ? 1
                          : byte(0) < 0xc2 ? 0
                          : byte(0) < 0xe0 ? 2
                          : byte(0) < 0xf0 ? 3
                          : byte(0) < 0xf5 ? 4
                                           : 0;
    if (n == 0 || n > text.size()) return {};
    std::uint32_t code = n == 1 ? byte(0) : byte(0) & 0xffu >> (n + 1);
    for (std::size_t i = 1; i < n; ++i) {
        if ((byte(i) & 0xc0) != 0x80) return {};
        code = code << 6 | (byte(i) & 0x3f);
    }
    constexpr std::array<std::uint32_t, 5> least = {0, 0, 0x80, 0x800, 0x10000};
    auto const within = [&](std::uint32_t first, std::uint32_t last) { return first <= code && code <= last; };
    if (code < least[n] || code > 0x10ffff || within(0xd800, 0xdfff)) return {};
    return {n, !(within(0, 0x1f) || within(0x7f, 0x9f) || within(0x200b, 0x200f) || within(0x2028, 0x202e) ||
                 within(0x2060, 0x206f) || code == 0xfeff)};
}

} // namespace detail

/// Returns `text` with every byte that must not be printed as \xHH; line feeds stay if `lines`.
///
/// Printable text stays as it is, backslashes too, so that a second call changes nothing.
inline std::string printable(std::string_view text, bool lines = false) {
    constexpr char const* digits = "0123456789abcdef";
    std::string safe;
    safe.reserve(text.size());
    while (!text.empty()) {
        auto const [bytes, shown] = detail::first_character(text);
        if (shown || (lines && text[0] == '\n'))
            safe += text.substr(0, bytes);
        else
            for (char const c : text.substr(0, bytes))
                ((safe += "\\x") += digits[static_cast<unsigned char>(c) >> 4]) += digits[c & 15];
        text.remove_prefix(bytes);
    }
    return safe;
}

/// Returns `text` printable and in quotes, where quotes and backslashes have a backslash before them: at most its first
/// 64 bytes, so that it does not flood a message.
inline std::string quote(std::string_view text) {
    constexpr std::size_t most = 64;
    std::string shown;
    std::size_t end = 0;
    while (end < text.size()) {
        auto const next = text.substr(end, detail::first_character(text.substr(end)).bytes);
        if (end + next.size() > most) break;
        if (next == "\"" || next == "\\") shown += '\\';
        shown += printable(next);
        end += next.size();
    }
    return '"' + shown + (end < text.size() ? "\"..." : "\"");
}

} // namespace cpx
