// SPDX-License-Identifier: Apache-2.0
#include <cpx/core/error.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <type_traits>

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

    TEST_CASE("a message is what is said without file and line") {
        CHECK(cpx::error("--ranks", "number", "1", "0", {"f.cpp", 1}).message() ==
              "--ranks: number: expected 1, got 0");
    }

    TEST_CASE("what must not be printed is shown by its bytes, and text of any language as it is") {
        auto const shown = [](std::string const& text) { return cpx::error("f", "x", text, text).got(); };
        for (std::string const text : {"", "a\\ ~", "\xc3\xa9\xe6\xbc\xa2\xf0\x9f\x98\x80"}) CHECK(shown(text) == text);
        CHECK(shown(std::string("a\0\n\x1b[31m\x7f", 9)) == R"(a\x00\x0a\x1b[31m\x7f)");
        CHECK(shown("\xff \xc3") == R"(\xff \xc3)");
        CHECK(shown("\xc0\xaf \xed\xa0\x80") == R"(\xc0\xaf \xed\xa0\x80)"); // too long for "/", half of a pair
        CHECK(shown("\xf4\x90\x80\x80 \xf9\x80\x80\x80") == R"(\xf4\x90\x80\x80 \xf9\x80\x80\x80)");
        CHECK(shown("\xc2\x9b \xe2\x80\xae") == R"(\xc2\x9b \xe2\x80\xae)"); // begins a control sequence, turns text
        cpx::error const e("a\nb", "two\nlines\r", "\x1b", "", {"f.cpp", 1});
        CHECK(e.what() == std::string("f.cpp:1: ") + R"(a\x0ab: two)" + '\n' + R"(lines\x0d: expected \x1b)");
        CHECK(e.message() == cpx::error(e.where(), e.problem(), e.expected()).message());
    }

    TEST_CASE("a quoted text is short, and no character of it is cut") {
        CHECK(cpx::quote("a \"b\" \\") == R"("a \"b\" \\")");
        CHECK(cpx::quote(std::string(64, 'n')) == '"' + std::string(64, 'n') + '"');
        CHECK(cpx::quote(std::string(63, 'n') + "\xc3\xa9") == '"' + std::string(63, 'n') + "\"...");
        CHECK(cpx::quote("\x1b") == R"("\x1b")");
    }

    TEST_CASE("fields that are empty leave no trace") {
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
        CHECK(got(cpx::detail::in_words("at most ", 3, ", or ", std::string("none"))) == "at most 3, or none");
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
