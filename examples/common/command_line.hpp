// SPDX-License-Identifier: Apache-2.0
// The command line and the main function of every example: parse, run, report failure in one line.
#pragma once

#include "output.hpp"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App; // only command_line.cpp includes CLI11: every program would compile it anew
}

namespace examples {

/// The options and operands of a program, which go into variables of its own.
///
///     examples::command_line options("Does something.", "name");
///     options.required("--ranks", ranks, "number of ranks").option("--cut", cut, "balanced or aligned:UNIT");
///     return options.run(argc, argv, [&] { ... });
///
/// Names that begin with "--" are options, others are operands, in their order. Nothing may be given as "".
class command_line {
public:
    command_line(std::string const& description, std::string const& name);
    ~command_line();

    /// If it is left out, `value` stays; help tells that value unless it is empty.
    command_line& option(std::string const& name, std::string& value, std::string const& help);
    command_line& required(std::string const& name, std::string& value, std::string const& help);
    command_line& required(std::string const& name, std::vector<std::string>& values, std::string const& help);
    command_line& flag(std::string const& name, bool& value, std::string const& help);

    /// Returns whether `option` is given.
    bool has(std::string const& option) const;
    /// Throws `cpx::error` if `option` is given although it has no effect: it needs what is `expected`, and there is
    /// `got`.
    void require_effect(char const* option, bool has_effect, std::string const& expected, std::string const& got) const;
    /// Throws what a required operand throws that is left out.
    [[noreturn]] static void missing(std::string const& operand);

    /// Parses, then calls `body()`. Returns the exit code: 0, or 1 after any failure, which is told in one line on
    /// stderr, "NAME: MESSAGE", where NAME is the program's.
    int run(int argc, char** argv, std::function<void()> const& body);

private:
    std::unique_ptr<CLI::App> app_;
};

/// Throws `cpx::error` unless the value of `option` is one of `names`, or empty: then it was left out.
void require_one_of(std::string const& value, std::vector<std::string> const& names, char const* option,
                    char const* what);

} // namespace examples
