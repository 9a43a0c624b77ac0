// SPDX-License-Identifier: Apache-2.0
// The program that shows layouts, where it does not come to its end.
#include <examples/program.hpp>

#include <csignal>
#include <cstdlib>
#include <string>

#include <signal.h>

using namespace program;

TEST_CASE("a signal that ends the program leaves nothing of a picture") {
    folder const home;
    auto const path = fs::path(std::getenv("CPX_PROGRAM")).string(), svg = (home / "picture.svg").string();
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    ::close(ends[0]); // before the fork: no reader is left that the program could outrun
    auto const child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) { // writes to a pipe that nobody reads
        ::dup2(ends[1], STDOUT_FILENO);
        static_cast<void>(std::signal(SIGPIPE, SIG_DFL));
        ::execl(path.c_str(), "inspect", "--cu", "0,8,20", "--ranks", "2", "--svg", svg.c_str(), nullptr);
        ::_exit(127);
    }
    ::close(ends[1]);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGPIPE);
    CHECK(fs::is_empty(home.path()));
}
