// SPDX-License-Identifier: Apache-2.0
// The one exception of cpx: what is wrong, where, what was expected and what was found.
#pragma once

#include <cpx/core/config.hpp>
#include <cpx/core/printable.hpp>

#include <concepts>
#include <stdexcept>
#include <string>
#include <utility>

namespace cpx {

/// The file and line of a call. As a default argument, `caller::here()` is the place of whoever leaves it out.
///
/// Stands for std::source_location, which clang 14 does not have.
struct caller {
    char const* file = "";
    int line = 0;
    CPX_HOST_DEVICE static constexpr caller here(char const* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

/// Everything cpx throws. `what()` reads "file:line: WHERE: WHAT: expected E, got G".
///
/// The fields can be read back one by one, so that a caller can act on them or print them in another form. Bytes that
/// must not be printed, which names and values from files may have, stand in all of them as \xHH.
class error : public std::runtime_error {
public:
    error(std::string where, std::string what, std::string expected = "", std::string got = "",
          caller from = caller::here())
        : std::runtime_error(place(from) + text(where, what, expected, got)), where_(printable(where)),
          problem_(printable(what, true)), expected_(printable(expected)), got_(printable(got)) {}

    /// Returns `what()` without file and line, for users of a program, whose mistake is not in its source.
    std::string message() const { return text(where_, problem_, expected_, got_); }

    /// Returns the function, file or object that rejects its input.
    std::string const& where() const noexcept { return where_; }
    /// Returns the thing that is wrong.
    std::string const& problem() const noexcept { return problem_; }
    std::string const& expected() const noexcept { return expected_; }
    std::string const& got() const noexcept { return got_; }

private:
    static std::string place(caller from) {
        std::string file = from.file;
        auto const slash = file.find_last_of('/');
        if (slash != std::string::npos) file.erase(0, slash + 1);
        return file + ':' + std::to_string(from.line) + ": ";
    }
    static std::string text(std::string const& where, std::string const& what, std::string const& expected,
                            std::string const& got) {
        std::string message = printable(where) + ": " + printable(what, true);
        if (!expected.empty()) message += ": expected " + printable(expected);
        if (!got.empty()) message += ", got " + printable(got);
        return message;
    }

    std::string where_, problem_, expected_, got_;
};

namespace detail {

inline std::string show(std::string text) { return text; }
inline std::string show(char const* text) { return text; }
inline std::string show(bool value) { return value ? "true" : "false"; }
template <class T>
    requires(std::integral<T> && !std::same_as<T, bool>) || std::floating_point<T>
std::string show(T value) {
    return std::to_string(value);
}
template <std::invocable F>
std::string show(F const& text) {
    return text();
}

/// Returns what makes a text of these texts and numbers when it is called: by `require`, on failure alone. Lives no
/// longer than they.
template <class... X>
auto in_words(X const&... words) {
    return [&words...] { return (show(words) + ...); };
}

} // namespace detail

/// Throws `cpx::error` unless `holds`. `expected` and `got` are numbers, texts or functions that return a text, which
/// are called, as numbers are turned into text, only on failure.
///
/// For checks made once a batch or once a call, never once a token. The location is the caller's.
template <class E, class G>
void require(bool holds, char const* where, char const* what, E const& expected, G const& got,
             caller from = caller::here()) {
    if (!holds) throw error(where, what, detail::show(expected), detail::show(got), from);
}

} // namespace cpx
