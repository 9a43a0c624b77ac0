// SPDX-License-Identifier: Apache-2.0
// Numbers from the command line, and who is blamed for what is wrong there.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace examples {

/// Returns the number that `text` spells, from `least` to `most`. `where` and `what` name it in the error.
inline cpx::index_t parse_number(std::string_view text, cpx::index_t least, cpx::index_t most, char const* where,
                                 std::string const& what) {
    cpx::index_t number = 0;
    auto const [end, failure] = std::from_chars(text.data(), text.data() + text.size(), number);
    bool const whole = failure == std::errc{} && end == text.data() + text.size();
    cpx::require(whole && least <= number && number <= most, where, what.c_str(),
                 "a whole number from " + std::to_string(least) + " to " + std::to_string(most), cpx::quote(text));
    return number;
}

/// Returns the numbers of "0,8,20".
inline std::vector<cpx::index_t> parse_numbers(std::string_view text, cpx::index_t least, cpx::index_t most,
                                               char const* where, char const* what) {
    std::vector<cpx::index_t> numbers;
    for (std::size_t first = 0; first <= text.size();) {
        std::size_t const comma = std::min(text.find(',', first), text.size());
        std::string const name = what + (' ' + std::to_string(numbers.size()));
        numbers.push_back(parse_number(text.substr(first, comma - first), least, most, where, name));
        first = comma + 1;
    }
    return numbers;
}

/// Returns `f()`. What cpx finds wrong there is an error of `where`, an option or a file.
template <class F>
auto blame(std::string const& where, F&& f) {
    try {
        return f();
    } catch (cpx::error const& e) {
        throw cpx::error(where, e.problem(), e.expected(), e.got());
    }
}

} // namespace examples
