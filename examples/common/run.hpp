// SPDX-License-Identifier: Apache-2.0
// The main function of every example: parse the command line, run, report failure in one line.
#pragma once

#include <CLI/CLI.hpp>

#include <exception>
#include <iostream>

namespace examples {

/// Parses the command line with `app`, then calls `body()`. Returns the exit code: 0, or 1 after any failure.
///
/// A failure is told on stderr as "NAME: MESSAGE", where NAME is the app's.
template <class F>
int run_example(int argc, char** argv, CLI::App& app, F&& body) {
    try {
        app.parse(argc, argv);
        body();
        if (std::cout << std::flush) return 0;
        std::cerr << app.get_name() << ": stdout: cannot be written\n";
    } catch (CLI::ParseError const& e) { // also thrown by --help, with exit code 0
        if (e.get_exit_code() == 0) return app.exit(e);
        std::cerr << app.get_name() << ": " << e.what() << " (see --help)\n";
    } catch (std::exception const& e) {
        std::cerr << app.get_name() << ": " << e.what() << '\n';
    }
    return 1;
}

} // namespace examples
