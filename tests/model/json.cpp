// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/json.hpp>

#include "model/faults.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <unistd.h>

using cpx::json_value;
using faults::contains;
using faults::message;

namespace {

std::string parse_message(std::string const& text) {
    return message([&] { json_value::parse(text, "x.json"); });
}

char const* const every_kind =
    R"({"a": [1, -2, 3.5e-2, true, false, null], "b/~": {"c": "d\u00e9\n", "e": [[], {}]}, "": "é"})";

} // namespace

TEST_SUITE("model") {
    TEST_CASE("a value is read as the type it has") {
        auto const root = json_value::parse(R"({"n": -3, "u": 18446744073709551615, "x": 0.5, "t": true, "s": "a",
                                                "list": [1, 2, 3], "nested": [["p"], []], "none": null})",
                                            "x.json");
        CHECK(root.get<int>("n") == -3);
        CHECK(root.get<std::uint64_t>("u") == 18446744073709551615u);
        CHECK(root.get<double>("x") == 0.5);
        CHECK(root.get<double>("n") == -3.0);
        CHECK(root.get<bool>("t"));
        CHECK(root.get<std::string>("s") == "a");
        CHECK(root.get<std::vector<int>>("list") == std::vector{1, 2, 3});
        CHECK(root.get<std::vector<std::vector<std::string>>>("nested") ==
              std::vector<std::vector<std::string>>{{"p"}, {}});
        CHECK(root.at("none").is_null());
        CHECK(root.has("n"));
        CHECK(!root.has("none"));
        CHECK(!root.has("absent"));
        CHECK(root.keys() == std::vector<std::string>{"list", "n", "nested", "none", "s", "t", "u", "x"});
    }

    TEST_CASE("a value outlives the document it was taken from") {
        auto const inner = json_value::parse(R"({"a": {"b": 7}})", "x.json").at("a");
        CHECK(inner.get<int>("b") == 7);
        CHECK(inner.pointer() == "/a");
        CHECK(inner.where() == "x.json");
    }

    TEST_CASE("an error names the document, the pointer, what was expected and what is there") {
        auto const root = json_value::parse(
            R"({"a": {"b/~c": [1, "two"]}, "n": 4.0, "big": 2147483648, "huge": 18446744073709551616, "neg": -1,
                "u\u001b\u009b": 1, "obj": {}, "wide": 1e300})",
            "x.json");
        auto const read = [&]<class T>(char const* key, T) { return message([&] { root.get<T>(key); }); };
        CHECK(contains(message([&] { root.at("a").get<std::vector<int>>("b/~c"); }),
                       R"(x.json: /a/b~1~0c/1: expected an integer from -2147483648 to 2147483647, got "two")"));
        CHECK(contains(message([&] { root.at("a").at("d"); }), "x.json: /a/d: expected a value, got none"));
        CHECK(contains(read("n", 0), "got 4.0"));
        CHECK(contains(read("big", 0), "got 2147483648"));
        CHECK(contains(read("huge", std::uint64_t{}), "expected an integer from 0 to 18446744073709551615, got 1.8"));
        CHECK(contains(read("wide", 1.0f), "/wide: expected a number of at most 3.4028234663852886e+38, got 1e+300"));
        CHECK(read("huge", 1.0f) == "nothing thrown");
        CHECK(contains(read("neg", 0u), "expected an integer from 0 to 4294967295, got -1"));
        CHECK(contains(read("neg", true), "expected true or false, got -1"));
        CHECK(contains(read("neg", std::string()), "expected a string, got -1"));
        CHECK(contains(read("neg", std::vector<int>()), "expected an array, got -1"));
        CHECK(contains(read("a", 1.0), "expected a number, got an object of 1"));
        CHECK(contains(message([&] { root.at("neg").at("x"); }), "/neg: expected an object, got -1"));
        CHECK(contains(message([&] { root.at("neg").keys(); }), "/neg: expected an object, got -1"));
        CHECK(contains(message([&] { root.get<bool>("u\x1b\xc2\x9b"); }), R"("/u\x1b\xc2\x9b": expected true)"));
        CHECK(contains(message([&] { root.as<int>(); }), "x.json: the document: expected an integer"));
    }

    TEST_CASE("text that is not JSON is refused") {
        for (std::string const text : {"",
                                       " ",
                                       "{",
                                       "}",
                                       "[1,]",
                                       "{\"a\":}",
                                       "{\"a\" 1}",
                                       "{1:2}",
                                       "nul",
                                       "NaN",
                                       "[Infinity]",
                                       "[-]",
                                       "[01]",
                                       "[1.]",
                                       "{} {}",
                                       "[1] x",
                                       "'a'",
                                       "// c\n1",
                                       "\"\\x\"",
                                       "\"\\ud800\"",
                                       "\"a\nb\"",
                                       "[1e999]",
                                       "\"open",
                                       "\"\xff\"",
                                       "\"\xc0\xaf\"",
                                       "\"\xed\xa0\x80\"",
                                       "\"\xf4\x90\x80\x80\"",
                                       "\"\xc3\""}) {
            CAPTURE(text);
            CHECK(contains(parse_message(text), "x.json: not JSON: expected one JSON value, got "));
        }
        CHECK(contains(parse_message("\"\xff\""), "ill-formed UTF-8"));
        CHECK(contains(parse_message("[1e999]"), "number overflow"));
    }

    TEST_CASE("what follows a NUL is not skipped") {
        CHECK(contains(parse_message(std::string("{}\0garbage", 10)), "expected text without NUL, got NUL at byte 2"));
        CHECK(contains(parse_message(std::string("\0", 1)), "NUL at byte 0"));
    }

    TEST_CASE("a repeated key is refused at every level") {
        CHECK(contains(parse_message(R"({"a": 1, "b": 2, "a": 1})"), "duplicate key: expected every key of an object"));
        CHECK(contains(parse_message(R"([{"b": {"a": 1, "\u0061": 1}}])"), R"(got "a" twice)"));
        CHECK(parse_message(R"([{"a": 1}, {"a": {"a": 1}}])") == "nothing thrown");
    }

    TEST_CASE("nesting is limited to 64 levels and to fewer when asked") {
        auto const nested = [](std::size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
        CHECK(parse_message(nested(64)) == "nothing thrown");
        CHECK(contains(parse_message(nested(65)), "nested too deeply: expected at most 64 levels"));
        CHECK(contains(parse_message(std::string(1'000'000, '[')), "nested too deeply"));
        std::string objects;
        for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
        CHECK(contains(parse_message(objects), "nested too deeply"));
        CHECK(contains(message([] { json_value::parse("[[1]]", "x", {.bytes = 9, .depth = 1}); }), "at most 1 levels"));
        CHECK(message([] { json_value::parse("[1]", "x", {.bytes = 9, .depth = 1}); }) == "nothing thrown");
        CHECK(message([] { json_value::parse("1", "x", {.bytes = 9, .depth = 0}); }) == "nothing thrown");
    }

    TEST_CASE("length is limited before anything is parsed") {
        CHECK(contains(message([] { json_value::parse("[1, 2]", "x", {.bytes = 5}); }),
                       "x: too long: expected at most 5 bytes, got 6"));
    }

    TEST_CASE("a message stays short and printable whatever the text holds") {
        auto const long_name = std::string(100'000, 'n');
        std::vector<std::string> const texts = {"{\"" + long_name + "\": 1, \"" + long_name + "\": 2}",
                                                "[" + long_name + "]",
                                                "[\"" + long_name + "\xff\"]",
                                                "[1" + std::string(100'000, '0') + "]",
                                                "[\"\x1b[31m\"]",
                                                "\"" + long_name + "\""};
        for (auto const& text : texts) {
            auto const said = message([&] { json_value::parse(text, "x.json").as<int>(); });
            CHECK(said.size() < 400);
            for (char const c : said) CHECK((c >= 0x20 && c < 0x7f));
        }
    }

    TEST_CASE("an array under a long key is read in time proportional to its length") {
        std::string text = "{\"" + std::string(1'000'000, '/') + "\": [0";
        for (int i = 0; i < 200'000; ++i) text += ",0";
        auto const root = json_value::parse(text + "]}", "x.json");
        CHECK(root.get<std::vector<int>>(root.keys().front()).size() == 200'001);
    }

    TEST_CASE("an object of many members is parsed in time proportional to its length") {
        std::string text = "{";
        for (int i = 0; i < 200'000; ++i) text += (i ? ",\"" : "\"") + std::to_string(i) + "\":{}";
        CHECK(json_value::parse(text + "}", "x.json").keys().size() == 200'000);
    }

    TEST_CASE("a file is read whole, and one that cannot be is named") {
        faults::directory const place;
        auto const path = place.write("a.json", R"({"a": 1})");
        CHECK(json_value::read(path).get<int>("a") == 1);
        CHECK(json_value::read(path).where() == path.string());
        CHECK(contains(message([&] { json_value::read(place.path() / "b.json"); }),
                       (place.path() / "b.json").string() +
                           ": cannot open: expected a file that can be read, got No such file or directory"));
        CHECK(contains(message([&] { json_value::read(place.path()); }), "expected a regular file, got a directory"));
        CHECK(contains(message([&] { json_value::read("/dev/zero"); }), "expected a regular file"));
        CHECK(contains(message([&] { json_value::read(path, {.bytes = 3}); }), "too long: expected at most 3 bytes"));
    }

    TEST_CASE("a file that cannot be opened is refused for the system's reason, and its name printed safely") {
        faults::directory const place;
        auto const said = [&](std::string const& name) {
            return message([&] { json_value::read(place.path() / name); });
        };
        std::filesystem::create_symlink("loop", place.path() / "loop");
        CHECK(contains(said("loop"), "got Too many levels of symbolic links"));
        CHECK(contains(said(place.write("a.json", "1").filename().string() + "/b"), "got Not a directory"));
        CHECK(contains(said("\x1b[31m\xff\n"), R"(/\x1b[31m\xff\x0a: cannot open)"));
        std::filesystem::permissions(place.write("locked", "1"), std::filesystem::perms::none);
        bool const root = ::geteuid() == 0, lowered = !root || ::seteuid(65534) == 0;
        if (lowered) CHECK(contains(said("locked"), "got Permission denied"));
        if (root && lowered) REQUIRE(::seteuid(0) == 0);
    }

    TEST_CASE("an error points at the line that reads") {
        auto const v = json_value::parse(R"({"a":[1,true],"b":1e300})", "x");
        auto const at = [](int line) { return "json.cpp:" + std::to_string(line) + ": "; };
        int const line = __LINE__ + 1;
        CHECK(message([&] { json_value::read("/none"); }).starts_with(at(line + 0)));
        CHECK(message([&] { json_value::parse(std::string(1, '\0'), "x"); }).starts_with(at(line + 1)));
        CHECK(message([&] { json_value::parse("[[]]", "x", {.depth = 1}); }).starts_with(at(line + 2)));
        CHECK(message([&] { json_value::parse("[[]]", "x", {.bytes = 1}); }).starts_with(at(line + 3)));
        CHECK(message([&] { v.at("c"); }).starts_with(at(line + 4)));
        CHECK(message([&] { v.at("b").at("c"); }).starts_with(at(line + 5)));
        CHECK(message([&] { v.at("b").keys(); }).starts_with(at(line + 6)));
        CHECK(message([&] { v.get<float>("b"); }).starts_with(at(line + 7)));
        CHECK(message([&] { v.get<std::vector<int>>("a"); }).starts_with(at(line + 8)));
        CHECK(message([&] { v.as<std::string>(); }).starts_with(at(line + 9)));
        CHECK(message([&] { v.fail("more"); }).starts_with(at(line + 10)));
    }

    TEST_CASE("damaged text is parsed or refused with cpx::error") {
        std::mt19937_64 random(1);
        int refused = 0;
        for (int i = 0; i < 20'000; ++i) {
            auto const text = faults::damaged(every_kind, random);
            CAPTURE(text);
            bool other = false;
            try {
                refused += contains(parse_message(text), "x.json: ") ? 1 : 0;
            } catch (...) {
                other = true;
            }
            REQUIRE(!other);
        }
        CHECK(refused > 10'000);
        CHECK(refused < 20'000);
    }
}
