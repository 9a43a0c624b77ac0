// SPDX-License-Identifier: Apache-2.0
#include <cpx/core/error.hpp>

#include <doctest/doctest.h>

namespace {

static_assert(std::is_base_of_v<std::runtime_error, cpx::error>);

/// A function that blames its caller, as those of cpx do.
void check_width(int width, cpx::caller here = cpx::caller::here()) {
    cpx::require(width > 0, "check_width", "width", "at least 1", width, here);
}

TEST_SUITE("core") {
    TEST_CASE("an error reads file, line, where, what, expected and got") {
        cpx::error const e("thd", "offset 3", "at least 8", "7", {"some/dir/trainer.cpp", 12});
        CHECK(std::string(e.what()) == "trainer.cpp:12: thd: offset 3: expected at least 8, got 7");
        CHECK(e.where() == "thd");
        CHECK(e.problem() == "offset 3");
        CHECK(e.expected() == "at least 8");
        CHECK(e.got() == "7");
    }

    TEST_CASE("parts that are empty leave no trace") {
        CHECK(std::string(cpx::error("here", "broken", "", "", {"f.cpp", 1}).what()) == "f.cpp:1: here: broken");
        CHECK(std::string(cpx::error("here", "broken", "", "3", {"f.cpp", 1}).what()) ==
              "f.cpp:1: here: broken, got 3");
        CHECK(std::string(cpx::error("here", "broken", "4", "", {"f.cpp", 1}).what()) ==
              "f.cpp:1: here: broken: expected 4");
    }

    TEST_CASE("require throws only if the condition does not hold, and shows numbers, texts and truth values") {
        CHECK_NOTHROW(cpx::require(true, "f", "x", 1, 2));
        auto const got = [](auto const& value) -> std::string {
            try {
                cpx::require(false, "f", "x", 1, value);
            } catch (cpx::error const& e) {
                return e.got();
            }
            return "nothing thrown";
        };
        CHECK(got(7) == "7");
        CHECK(got(std::int64_t{1} << 40) == "1099511627776");
        CHECK(got(std::uint8_t{200}) == "200");
        CHECK(got(true) == "true");
        CHECK(got(false) == "false");
        CHECK(got("text") == "text");
        CHECK(got(std::string("text")) == "text");
        CHECK(got(0.5) == "0.500000");
    }

    TEST_CASE("an error points at the caller") {
        int const line = __LINE__ + 2;
        try {
            check_width(0);
            FAIL("nothing thrown");
        } catch (cpx::error const& e) {
            CHECK(std::string(e.what()) ==
                  "error.cpp:" + std::to_string(line) + ": check_width: width: expected at least 1, got 0");
        }
    }
}

} // namespace
