// SPDX-License-Identifier: Apache-2.0
#include <cpx/core/rows.hpp>

#include <cpx/core/overlap.hpp>
#include <cpx/core/row_buffer.hpp>
#include <cpx/core/row_list.hpp>

#include <doctest/doctest.h>

#include <support/rejects.hpp>

#include <cstddef>
#include <limits>
#include <numeric>

namespace {

using cpx::index_t;
using cpx::rows;
using support::rejects;

static_assert(std::is_trivially_copyable_v<rows<float>>);
static_assert(std::is_convertible_v<rows<float>, rows<float const>>);
static_assert(!std::is_convertible_v<rows<float const>, rows<float>>);
static_assert(std::is_constructible_v<rows<float const>, std::vector<float> const&, cpx::index_t>);

std::vector<int> counted(int count) {
    std::vector<int> values(static_cast<std::size_t>(count));
    std::iota(values.begin(), values.end(), 0);
    return values;
}

TEST_SUITE("core") {
    TEST_CASE("rows are row-major, and a vector holds whole rows") {
        std::vector<int> values = counted(12);
        rows<int> const view(values, 4);
        CHECK(view.count() == 3);
        CHECK(view.width() == 4);
        CHECK(view.stride() == 4);
        CHECK(view.data() == values.data());
        CHECK(view(2, 1) == 9);
        CHECK(view.row(1) == values.data() + 4);
        view(0, 3) = 100;
        CHECK(values[3] == 100);
    }

    TEST_CASE("a stride greater than the width views some columns of wider rows") {
        std::vector<int> values = counted(12);
        rows<int> const middle = rows<int>(values, 4).columns(1, 2);
        CHECK(middle.count() == 3);
        CHECK(middle.width() == 2);
        CHECK(middle.stride() == 4);
        CHECK(middle(0, 0) == 1);
        CHECK(middle(2, 1) == 10);
        CHECK(middle.columns(1, 1)(1, 0) == 6);
        rows<int> const same(values.data() + 1, 3, 2, 4);
        CHECK(same(2, 1) == 10);
    }

    TEST_CASE("rows of rows are a view of the same elements") {
        std::vector<int> values = counted(12);
        rows<int> const some = rows<int>(values, 3).sub(1, 2);
        CHECK(some.count() == 2);
        CHECK(some.data() == values.data() + 3);
        CHECK(some(1, 2) == 8);
        CHECK(some.sub(2, 0).count() == 0);
        CHECK(some.columns(2, 1).sub(1, 1)(0, 0) == 8);
    }

    TEST_CASE("rows become rows of constants") {
        std::vector<int> values = counted(6);
        rows<int const> const view = rows<int>(values, 2).columns(1, 1);
        CHECK(view.stride() == 2);
        CHECK(view(2, 0) == 5);
        std::vector<int> const fixed = counted(6);
        CHECK(rows<int const>(fixed, 3)(1, 1) == 4);
        CHECK(rows<int const>(values, 3)(1, 1) == 4);
    }

    TEST_CASE("no rows are ordinary") {
        std::vector<int> none;
        CHECK(rows<int>(none, 5).count() == 0);
        CHECK(rows<int>(none, 5).width() == 5);
        CHECK(rows<int>(none, 0).count() == 0);
        CHECK(rows<int>().count() == 0);
        CHECK(rows<int>().data() == nullptr);
    }

    TEST_CASE("a vector that does not hold whole rows is rejected") {
        std::vector<int> values = counted(12);
        support::rejects({"rows: size of the list", "a multiple of the width 5", "got 12"},
                         [&] { rows<int>(values, 5); });
        support::rejects({"rows", "a multiple of the width 0", "got 12"}, [&] { rows<int>(values, 0); });
        support::rejects({"rows", "a multiple of the width -3"}, [&] { rows<int>(values, -3); });
    }

    TEST_CASE("rows overlap where they have an element in common, which disjoint columns and rows have not") {
        struct place {
            cpx::index_t first, count, width, stride;
            rows<int> in(std::vector<int>& memory) const { return {memory.data() + first, count, width, stride}; }
        };
        auto const overlap = [](auto a, auto b) { return cpx::detail::overlap({"", a}, {"", b}); };
        std::vector<int> memory(64);
        auto const shared = [&](rows<int> a, rows<int> b) { // by the definition of rows
            for (cpx::index_t i = 0; i < a.count() * a.width(); ++i)
                for (cpx::index_t j = 0; j < b.count() * b.width(); ++j)
                    if (&a(i / a.width(), i % a.width()) == &b(j / b.width(), j % b.width())) return true;
            return false;
        };
        std::vector<place> places;
        for (cpx::index_t const first : {0, 1, 3, 8, 10, 16, 23})
            for (cpx::index_t const count : {0, 1, 2, 4})
                for (cpx::index_t const width : {0, 1, 4, 8}) places.push_back({first, count, width, 8});
        for (place const& a : places)
            for (place const& b : places) {
                CAPTURE(a.first);
                CAPTURE(b.first);
                CHECK(overlap(a.in(memory), b.in(memory)) == shared(a.in(memory), b.in(memory)));
            }
        rows<int> const whole(memory, 8);
        CHECK(overlap(whole, rows<char>(reinterpret_cast<char*>(&memory[3]), 1, 1)));
        CHECK(overlap(whole.columns(0, 4), rows<int>(&memory[4], 2, 2, 9))); // of other strides: to be safe
        CHECK_FALSE(overlap(whole.sub(0, 2), rows<int>(&memory[16], 2, 9, 9)));
        CHECK_FALSE(overlap(rows<int>(), rows<int>()));
    }

    TEST_CASE("an operator that is given overlapping operands throws an error that names both") {
        std::vector<int> memory(12);
        rows<int> const whole(memory, 4);
        auto const here = cpx::caller::here();
        auto const apart = [&](rows<int> y, rows<int const> x, cpx::detail::in_place allowed) {
            cpx::detail::require_apart("op", {{"y", y}}, {{"x", x}, {"bias", std::span<int const>()}}, here, allowed);
        };
        using enum cpx::detail::in_place;
        apart(whole.columns(0, 2), whole.columns(2, 2), no);
        apart(whole, whole, yes);
        support::rejects({"rows.cpp:" + std::to_string(here.line), "op: overlap of y and x: expected none, got some"},
                         [&] { apart(whole, whole, no); });
        support::rejects({"overlap of y and x: expected none, or the same rows"},
                         [&] { apart(whole.sub(1, 2), whole.sub(0, 2), yes); });
        support::rejects({"overlap of dx and dw: expected none, got some"}, [&] {
            cpx::detail::require_apart("op", {{"dx", whole}, {"dw", whole.sub(2, 1)}}, {}, here, yes);
        });
        rows<int> const within(memory.data(), 3, 4, 2);
        support::rejects({"op: stride of y, bytes: expected at least the width 16, got 8"},
                         [&] { apart(within, {}, no); });
        apart({}, within, no); // what is only read may repeat
    }

    TEST_CASE("rows that are no size are rejected where they are named") {
        index_t const many = index_t{1} << 40, huge = std::numeric_limits<index_t>::max();
        rejects({"rows.cpp", "rows: bytes: expected not negative, got -1 x 4 x 4"},
                [] { rows<float>(nullptr, -1, 4); });
        rejects({"rows.cpp", "got 4 x -1 x 4"}, [] { rows<float>(nullptr, 4, -1); });
        rejects({"rows.cpp", "got 4 x -6 x 4"}, [] { rows<float>(nullptr, 4, 2, -6); });
        rejects({"rows: bytes: expected less than 2^62, got 1099511627776 x 16777216 x 1"},
                [=] { rows<char>(nullptr, many, index_t{1} << 24); });
        rejects({"rows: bytes", "less than 2^62"}, [=] { rows<int>(nullptr, 1, huge); });
        rejects({"rows: bytes", "less than 2^62"}, [=] { rows<int>(nullptr, huge, 0); });
        std::vector<int> values = counted(12);
        rejects({"rows.cpp", "rows: bytes"}, [&] { rows<int>(values, 4).sub(0, -1); });
        rejects({"rows.cpp", "rows: bytes"}, [&] { rows<int>(values, 4).columns(1, -3); });
        rejects({"rows.cpp", "size of the list"}, [&] { rows<int>(values, 5); });
        std::vector<int> none;
        rejects({"rows.cpp", "a multiple of the width -3"}, [&] { rows<int>(none, -3); });
        CHECK(rows<char>(nullptr, many, 1).count() == many);
    }

    TEST_CASE("a product of counts is one that does not wrap") {
        using cpx::detail::product;
        static_assert(product("f", "x", {}) == 1 && product("f", "x", {3, 5, 7}) == 105);
        static_assert(product("f", "x", {index_t{1} << 40, 0, index_t{1} << 40}) == 0);
        static_assert(product("f", "x", {index_t{1} << 31, (index_t{1} << 31) - 1}) ==
                      (index_t{1} << 62) - (1ll << 31));
        rejects({"rows.cpp", "f: x: expected less than 2^62, got 2147483648 x 2147483648"}, [] {
            product("f", "x", {index_t{1} << 31, index_t{1} << 31});
        });
        rejects({"expected not negative, got 0 x -1"}, [] { product("f", "x", {0, -1}); });
        rejects({"expected less than 2^62"}, [] { product("f", "x", {index_t{1} << 62}); });
        rejects({"expected less than 2^62"}, [] { product("f", "x", {0, index_t{1} << 62}); });
        rejects({"expected not negative"}, [] { product("f", "x", {std::numeric_limits<index_t>::min(), -1}); });
    }

    TEST_CASE("memory that is not there is an error that says how much it is") {
        using cpx::detail::zeros;
        CHECK(zeros<int>("f", {2, 3}) == std::vector<int>(6));
        rejects({"f: bytes: expected less than 2^62, got 4611686018427387903 x 8"},
                [] { zeros<double>("f", {(index_t{1} << 62) - 1}); });
        if (support::memory_ends)
            rejects({"rows.cpp", "f: memory: expected 9007199254740992 bytes, got less than that"}, [] {
                zeros<double>("f", {1 << 25, 1 << 25});
            });
    }

    TEST_CASE("rows that own their elements are written and read whole, and only whole") {
        cpx::row_buffer<int> buffer(2, 3), none;
        CHECK(buffer.read() == std::vector<int>(6));
        buffer.write(counted(6));
        CHECK(buffer.view()(1, 0) == 3);
        buffer.elements()[3] = 7;
        CHECK(buffer.read() == std::vector{0, 1, 2, 7, 4, 5});
        rejects({"rows.cpp", "row_buffer: elements to write: expected 6, got 5"}, [&] { buffer.write(counted(5)); });
        rejects({"row_buffer: elements to write: expected 0, got 1"}, [&] { none.write(counted(1)); });
        none.write({});
        CHECK((none.read().empty() && none.elements().empty()));
    }

    TEST_CASE("rows that are listed are gathered and scattered, and lists and rows that do not fit refused") {
        using list = std::vector<index_t>;
        auto numbers = counted(10);
        std::vector<int> some(6, -1);
        rows<int> const from(numbers.data(), 5, 2), to(some.data(), 3, 2);
        cpx::gather_rows<int>(cpx::host_memory(), from, list{4, 0, 4}, to);
        CHECK(some == std::vector{8, 9, 0, 1, 8, 9});
        cpx::scatter_rows<int>(cpx::host_memory(), to, list{1, 3, 0}, from);
        CHECK(numbers == std::vector{8, 9, 8, 9, 4, 5, 0, 1, 8, 9});
        auto const before = numbers;
        auto const refused = [&](std::string const& text, rows<int> x, list const& rows_of_it, rows<int> y) {
            rejects({"rows.cpp", "gather_rows: " + text},
                    [&] { cpx::gather_rows<int>(cpx::host_memory(), x, rows_of_it, y); });
        };
        refused("overlap of to and from: expected none", from.sub(0, 3), {0, 1, 2}, from.sub(1, 3));
        refused("width of to: expected 2, got 1", from, {0, 1, 2}, to.columns(0, 1));
        refused("numbers in the list: expected 3, got 2", from, {0, 1}, to);
        refused("row: expected from 0 to 4, got 5", from, {0, 5, 1}, to);
        refused("row: expected from 0 to 4, got -1", from, {0, -1, 1}, to);
        rejects({"rows.cpp", "scatter_rows: row: expected from 0 to 4, got 5"}, [&] {
            cpx::scatter_rows<int>(cpx::host_memory(), to, list{0, 5, 1}, from);
        });
        rejects({"scatter_rows: overlap of to and from"}, [&] {
            cpx::scatter_rows<int>(cpx::host_memory(), from.sub(0, 3), list{1, 2, 3}, from);
        });
        CHECK(numbers == before);
    }

    TEST_CASE("rows beyond 2^31 elements have 64-bit addresses") {
        rows<char> const view(nullptr, cpx::index_t{1} << 20, 1, cpx::index_t{1} << 13);
        CHECK(view.row(cpx::index_t{1} << 19) - view.row(0) == cpx::index_t{1} << 32);
    }
}

} // namespace
