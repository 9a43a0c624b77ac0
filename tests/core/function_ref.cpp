// SPDX-License-Identifier: Apache-2.0
#include <cpx/core/function_ref.hpp>

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <type_traits>

namespace {

using cpx::detail::function_ref;

int called(function_ref<int(int)> f) { return f(20); }
int half(int x) { return x / 2; }

TEST_SUITE("core") {
    TEST_CASE("a reference to a function calls what it refers to, and no copy of it") {
        int calls = 0;
        auto count = [own = 0, &calls](int by) mutable {
            calls = ++own;
            return own + by;
        };
        CHECK(called(count) == 21);
        CHECK(called(count) == 22);
        CHECK(calls == 2);
        auto const unchanging = [](int x) { return 2 * x; };
        CHECK(called(unchanging) == 40);
        CHECK(called([](int x) { return x + 1; }) == 21);
        CHECK(called(half) == 10);
        function_ref<void(int)> const ignores(count); // what it returns
        ignores(0);
        CHECK(calls == 3);
        function_ref<int(int)> const first(unchanging), second(first);
        CHECK(second(3) == 6);
    }

    TEST_CASE("a reference to a function hands on references and what can only be moved") {
        std::string text = "a";
        auto const longer = [](std::string& s, std::unique_ptr<char> c) -> std::string& { return s += *c; };
        function_ref<std::string&(std::string&, std::unique_ptr<char>)> const f(longer);
        CHECK(&f(text, std::make_unique<char>('b')) == &text);
        CHECK(text == "ab");
    }

    TEST_CASE("a reference to a function is of what can be called so, and nothing else") {
        struct other {};
        CHECK(std::is_constructible_v<function_ref<int(int)>, int (&)(long)>);
        CHECK(!std::is_constructible_v<function_ref<int(int)>, int (&)(other)>);
        CHECK(!std::is_constructible_v<function_ref<int(int)>, other (&)(int)>);
        CHECK(!std::is_constructible_v<function_ref<int(int)>, int>);
    }
}

} // namespace
