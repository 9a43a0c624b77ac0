// SPDX-License-Identifier: Apache-2.0
// The main function of every example: parse the command line, run, report failure in one line.
#pragma once

#include "output.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

namespace examples {

/// Returns `message` on one line: a list of faults is separated by "; " there.
inline std::string one_line(std::string const& message) {
    std::string line;
    for (std::size_t i = 0; i < message.size(); ++i) {
        if (message[i] != '\n') {
            line += message[i];
            continue;
        }
        line += "; ";
        while (i + 1 < message.size() && message[i + 1] == ' ') ++i;
    }
    return line;
}

/// Returns what went wrong, without the lines of cpx's sources that `what()` of its errors begins with: whoever runs a
/// program looks for an option or a file.
inline std::string told(std::exception const& e) {
    auto const* const known = dynamic_cast<cpx::error const*>(&e);
    std::string text = known ? known->message() : e.what();
    try {
        std::rethrow_if_nested(e);
    } catch (std::exception const& inner) { // what failed on a rank, with which the error of its group ends
        std::string const end = inner.what();
        if (text.ends_with(end)) text.replace(text.size() - end.size(), end.size(), told(inner));
    } catch (...) {
    }
    return text;
}

/// Throws `cpx::error` if `option` is given although it has no effect: it needs what is `expected`, and there is `got`.
inline void require_effect(CLI::App const& app, char const* option, bool has_effect, std::string const& expected,
                           std::string const& got) {
    if (app.count(option)) cpx::require(has_effect, option, "no effect", expected, got);
}

/// Throws `cpx::error` unless the value of `option` is one of `names`, or empty: then it was left out.
inline void require_one_of(std::string const& value, std::vector<std::string> const& names, char const* option,
                           char const* what) {
    if (value.empty()) return;
    std::string list;
    for (auto const& name : names) list += (list.empty() ? "" : " or ") + name;
    cpx::require(std::ranges::find(names, value) != names.end(), option, what, list, cpx::quote(value));
}

/// Parses the command line with `app`, then calls `body()`. Returns the exit code: 0, or 1 after any failure.
///
/// A failure is told in one line on stderr, "NAME: MESSAGE", where NAME is the app's.
template <class F>
int run_example(int argc, char** argv, CLI::App& app, F&& body) {
    auto const fail = [&](std::string const& message) {
        std::cerr << app.get_name() << ": " << one_line(cpx::printable(message, true)) << std::endl;
        return 1;
    };
    try {
        app.parse(argc, argv);
        for (CLI::Option const* const option : app.get_options())
            for (std::string const& value : option->results())
                cpx::require(!value.empty(), option->get_name().c_str(), "value", "some text", "none");
        body();
        return 0;
    } catch (CLI::ParseError const& e) { // also thrown by --help, with exit code 0
        return e.get_exit_code() == 0 ? app.exit(e) : fail(e.what() + std::string(" (see --help)"));
    } catch (std::exception const& e) {
        return fail(told(e));
    }
}

} // namespace examples
