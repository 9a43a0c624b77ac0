// SPDX-License-Identifier: Apache-2.0
#include "command_line.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <iostream>

namespace examples {
namespace {

/// Returns `message` on one line: a list of faults is separated by "; " there.
std::string one_line(std::string const& message) {
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
std::string told(std::exception const& e) {
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

} // namespace

command_line::command_line(std::string const& description, std::string const& name)
    : app_(std::make_unique<CLI::App>(description, name)) {}

command_line::~command_line() = default;

command_line& command_line::option(std::string const& name, std::string& value, std::string const& help) {
    auto* const added = app_->add_option(name, value, help);
    if (!value.empty()) added->capture_default_str();
    return *this;
}

command_line& command_line::required(std::string const& name, std::string& value, std::string const& help) {
    app_->add_option(name, value, help)->required();
    return *this;
}

command_line& command_line::required(std::string const& name, std::vector<std::string>& values,
                                     std::string const& help) {
    app_->add_option(name, values, help)->required();
    return *this;
}

command_line& command_line::flag(std::string const& name, bool& value, std::string const& help) {
    app_->add_flag(name, value, help);
    return *this;
}

bool command_line::has(std::string const& option) const { return app_->count(option) > 0; }

void command_line::require_effect(char const* option, bool has_effect, std::string const& expected,
                                  std::string const& got) const {
    if (has(option)) cpx::require(has_effect, option, "no effect", expected, got);
}

void command_line::missing(std::string const& operand) { throw CLI::RequiredError(operand); }

int command_line::run(int argc, char** argv, std::function<void()> const& body) {
    auto const fail = [&](std::string const& message) {
        std::cerr << app_->get_name() << ": " << one_line(cpx::printable(message, true)) << std::endl;
        return 1;
    };
    try {
        app_->parse(argc, argv);
        for (CLI::Option const* const option : app_->get_options())
            for (std::string const& value : option->results())
                cpx::require(!value.empty(), option->get_name().c_str(), "value", "some text", "none");
        body();
        return 0;
    } catch (CLI::ParseError const& e) { // also thrown by --help, with exit code 0
        return e.get_exit_code() == 0 ? app_->exit(e) : fail(e.what() + std::string(" (see --help)"));
    } catch (std::exception const& e) {
        return fail(told(e));
    }
}

void require_one_of(std::string const& value, std::vector<std::string> const& names, char const* option,
                    char const* what) {
    if (value.empty()) return;
    std::string list;
    for (auto const& name : names) list += (list.empty() ? "" : " or ") + name;
    cpx::require(std::ranges::find(names, value) != names.end(), option, what, list, cpx::quote(value));
}

} // namespace examples
