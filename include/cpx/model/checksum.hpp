// SPDX-License-Identifier: Apache-2.0
// A checksum of bytes that anybody can compute again: FNV-1a of 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace cpx {

/// FNV-1a, 64 bits: tells faults from each other, not forgeries. Bytes may come some at a time.
///
/// Source: Fowler, Noll, Vo, Eastlake, "The FNV Non-Cryptographic Hash Algorithm", RFC 9923.
class checksum64 {
public:
    void add(std::span<std::byte const> bytes) {
        std::byte const* const end = bytes.data() + bytes.size(); // a pointer costs nothing where nothing is inlined
        for (std::byte const* b = bytes.data(); b != end; ++b)
            value_ = (value_ ^ static_cast<std::uint64_t>(*b)) * 0x100000001b3ull;
    }
    void add(std::string_view text) { add(std::as_bytes(std::span(text))); }
    /// Adds a number, its lowest byte first.
    void add(std::uint64_t number) {
        for (int i = 0; i < 8; ++i) value_ = (value_ ^ (number >> 8 * i & 255)) * 0x100000001b3ull;
    }
    std::uint64_t value() const { return value_; }

private:
    std::uint64_t value_ = 0xcbf29ce484222325ull;
};

/// Returns a checksum as reports have it: 16 digits.
inline std::string hex_of(std::uint64_t checksum) {
    std::string text;
    for (int shift = 60; shift >= 0; shift -= 4) text += "0123456789abcdef"[checksum >> shift & 15];
    return text;
}

} // namespace cpx
