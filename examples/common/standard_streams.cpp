// SPDX-License-Identifier: Apache-2.0
// Part of every example: a program whose output is closed does not begin, and one whose output cannot be written fails.
#include "output.hpp"

#include <cstdlib>

#include <fcntl.h>
#include <signal.h>

namespace {

[[noreturn]] void fail(cpx::error const& why) {
    std::cerr << ::program_invocation_short_name << ": " << why.message() << std::endl;
    std::_Exit(1);
}

/// Lives before and after everything else.
struct standard_streams {
    standard_streams() {
        ::signal(SIGXFSZ, SIG_IGN); // a file that may not grow is an error as a full disk is
        auto const closed = [](int stream) { return ::fcntl(stream, F_GETFD) < 0; };
        bool const output = !closed(STDOUT_FILENO);
        for (int const stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) // else a file would take its number
            if (closed(stream)) // a program that reads what was closed fails, too
                static_cast<void>(::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDWR));
        if (!output) fail(cpx::error("stdout", "closed"));
    }
    ~standard_streams() {
        if (examples::output_failed) return;
        try {
            examples::flush_output();
        } catch (cpx::error const& why) {
            fail(why);
        }
    }
} const all_of_them;

} // namespace
