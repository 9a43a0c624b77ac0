// SPDX-License-Identifier: Apache-2.0
// The main function of every example: parse the command line, run, report failure in one line.
#pragma once

#include <CLI/CLI.hpp>

#include <cstddef>
#include <exception>
#include <iostream>
#include <string>

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

/// Parses the command line with `app`, then calls `body()`. Returns the exit code: 0, or 1 after any failure.
///
/// A failure is told in one line on stderr, "NAME: MESSAGE", where NAME is the app's.
template <class F>
int run_example(int argc, char** argv, CLI::App& app, F&& body) {
    try {
        app.parse(argc, argv);
        body();
        if (std::cout << std::flush) return 0;
        std::cerr << app.get_name() << ": stdout: cannot be written\n";
    } catch (CLI::ParseError const& e) { // also thrown by --help, with exit code 0
        if (e.get_exit_code() == 0) return app.exit(e);
        std::cerr << app.get_name() << ": " << one_line(e.what()) << " (see --help)\n";
    } catch (std::exception const& e) {
        std::cerr << app.get_name() << ": " << one_line(e.what()) << '\n';
    }
    return 1;
}

} // namespace examples
