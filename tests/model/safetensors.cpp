// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/safetensors.hpp>

#include "model/faults.hpp"

#include <doctest/doctest.h>

#include <support/files.hpp>
#include <support/rejects.hpp>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

using cpx::safetensors;
using faults::contains;
using faults::message;

namespace {

/// Returns the bytes of a file with this header and data.
std::string file(std::string const& header, std::string const& data = {}) {
    std::uint64_t const length = header.size();
    std::string prefix(sizeof length, '\0');
    std::memcpy(prefix.data(), &length, sizeof length);
    return prefix + header + data;
}

/// Returns the bytes of a file that claims a header of `length` bytes.
std::string claim(std::uint64_t length, std::string const& rest) {
    std::string bytes(sizeof length, '\0');
    std::memcpy(bytes.data(), &length, sizeof length);
    return bytes + rest;
}

template <class T>
std::string bytes_of(std::vector<T> const& values) {
    std::string bytes(values.size() * sizeof(T), '\0');
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
}

/// Returns a file with one tensor, "x", of these values.
template <class T>
safetensors one(std::string const& dtype, std::vector<T> const& values) {
    auto const data = bytes_of(values);
    return safetensors::parse(file(R"({"x":{"dtype":")" + dtype + R"(","shape":[)" + std::to_string(values.size()) +
                                       R"(],"data_offsets":[0,)" + std::to_string(data.size()) + "]}}",
                                   data),
                              "one");
}

/// Returns the header of one tensor, "x", with this dtype, shape and offsets as written.
std::string entry(std::string const& dtype, std::string const& shape, std::string const& offsets) {
    return R"({"x":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

std::string parse_message(std::string const& bytes) {
    return message([&] { safetensors::parse(bytes, "x.safetensors"); });
}

std::string const two = R"({"__metadata__":{"format":"pt","scale":"16**-0.5"},)"
                        R"("b.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[8,32]},)"
                        R"("a":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
                        R"("empty":{"dtype":"BF16","shape":[4,0],"data_offsets":[8,8]}}   )";
std::string const two_data = bytes_of<std::int64_t>({-5}) + bytes_of<float>({1, 2, 3, 4, 5, 6});

} // namespace

TEST_SUITE("model") {
    TEST_CASE("a file gives its names, metadata, shapes and values") {
        faults::directory const place;
        safetensors const f(place.write("two.safetensors", file(two, two_data)));
        CHECK(f.where() == (place.path() / "two.safetensors").string());
        CHECK(f.names() == std::vector<std::string>{"a", "b.weight", "empty"});
        CHECK(f.contains("a"));
        CHECK(!f.contains("__metadata__"));
        CHECK(f.metadata("format") == "pt");
        CHECK(f.metadata().size() == 2);
        auto const& b = f.tensor("b.weight");
        CHECK(b.name == "b.weight");
        CHECK(b.dtype == safetensors::dtype::f32);
        CHECK(b.shape == std::vector<cpx::index_t>{2, 3});
        CHECK(b.elements() == 6);
        CHECK(b.bytes.size() == 24);
        CHECK(b.bytes.last == std::ssize(file(two, two_data)));
        CHECK(f.read<float>("b.weight", {2, -1}) == std::vector<float>{1, 2, 3, 4, 5, 6});
        CHECK(f.read<cpx::index_t>("a", {}) == std::vector<cpx::index_t>{-5});
        CHECK(f.read<double>("empty", {4, 0}).empty());
    }

    TEST_CASE("a file without tensors is one") {
        CHECK(safetensors::parse(file("{}"), "x").names().empty());
        CHECK(safetensors::parse(file("{\"__metadata__\":{}}"), "x").names().empty());
    }

    TEST_CASE("a copy keeps the data when the original is gone") {
        auto const copy = [] {
            auto const original = safetensors::parse(file(two, two_data), "x");
            return safetensors(original);
        }();
        CHECK(copy.read<float>("b.weight").back() == 6);
    }

    TEST_CASE("data that is not aligned is read") {
        for (std::size_t shift = 0; shift < 8; ++shift) {
            auto const s = std::to_string(shift), end = std::to_string(shift + 16);
            auto const header = R"({"pad":{"dtype":"U8","shape":[)" + s + R"(],"data_offsets":[0,)" + s +
                                R"(]},"x":{"dtype":"F64","shape":[2],"data_offsets":[)" + s + "," + end + "]}}";
            auto const f =
                safetensors::parse(file(header, std::string(shift, 'p') + bytes_of<double>({0.1, -2.5})), "x");
            CHECK(f.read<double>("x") == std::vector{0.1, -2.5});
        }
    }

    TEST_CASE("every dtype becomes float and double, and every integer one becomes int64") {
        using ints = std::vector<cpx::index_t>;
        auto const check = [](safetensors const& f, ints const& expected, bool integral = true) {
            CHECK(f.read<double>("x") == std::vector<double>(expected.begin(), expected.end()));
            CHECK(f.read<float>("x") == std::vector<float>(expected.begin(), expected.end()));
            if (integral)
                CHECK(f.read<cpx::index_t>("x") == expected);
            else
                CHECK(contains(message([&] { f.read<cpx::index_t>("x"); }),
                               R"(one: dtype of tensor "x": expected an integer dtype or BOOL, got )"));
        };
        check(one<double>("F64", {1, -2}), {1, -2}, false);
        check(one<float>("F32", {1, -2}), {1, -2}, false);
        check(one<std::uint16_t>("F16", {0x3c00, 0xc000}), {1, -2}, false);
        check(one<std::uint16_t>("BF16", {0x3f80, 0xc000}), {1, -2}, false);
        check(one<std::int64_t>("I64", {1, -2}), {1, -2});
        check(one<std::int32_t>("I32", {1, -2}), {1, -2});
        check(one<std::int16_t>("I16", {1, -32768}), {1, -32768});
        check(one<std::int8_t>("I8", {1, -128}), {1, -128});
        check(one<std::uint64_t>("U64", {1, 2}), {1, 2});
        check(one<std::uint32_t>("U32", {1, 2147483648u}), {1, 2147483648});
        check(one<std::uint16_t>("U16", {1, 65535}), {1, 65535});
        check(one<std::uint8_t>("U8", {1, 255}), {1, 255});
        check(one<std::uint8_t>("BOOL", {1, 0}), {1, 0});
    }

    TEST_CASE("every half is read exactly") {
        std::vector<std::uint16_t> all(65536);
        for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
        auto const half = one("F16", all).read<double>("x");
        auto const brain = one("BF16", all).read<float>("x");
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < all.size(); ++i) {
            int const exponent = i >> 10 & 31;
            auto const fraction = static_cast<double>(i & 1023);
            double expected = exponent ? (1 + fraction / 1024) * std::exp2(exponent - 15) : fraction * std::exp2(-24);
            if (exponent == 31) expected = fraction > 0 ? std::nan("") : std::numeric_limits<double>::infinity();
            if (i & 0x8000) expected = -expected;
            wrong += std::isnan(expected) ? !std::isnan(half[i]) : half[i] != expected;
            wrong += std::signbit(half[i]) != ((i & 0x8000) != 0);
            wrong += std::bit_cast<std::uint32_t>(brain[i]) != i << 16;
        }
        CHECK(wrong == 0);
    }

    TEST_CASE("a double is rounded to nearest when read as float, and refused if it overflows") {
        auto const infinity = std::numeric_limits<double>::infinity();
        auto const rounded = one<double>("F64", {0.1, 1 + 0x1p-25, 1e-60, infinity}).read<float>("x");
        CHECK(rounded == std::vector<float>{0.1f, 1, 0, std::numeric_limits<float>::infinity()});
        CHECK(std::isnan(one<double>("F64", {std::nan("")}).read<float>("x")[0]));
        CHECK(contains(message([] {
                           one<double>("F64", {1, 1e39}).read<float>("x");
                       }),
                       R"(one: element 1 of tensor "x": expected a float, got 1e+39)"));
    }

    TEST_CASE("an integer keeps its value or is refused") {
        cpx::index_t const exact = cpx::index_t{1} << 53;
        CHECK(one<cpx::index_t>("I64", {0, -exact, exact + 2}).read<double>("x") ==
              std::vector{0.0, -0x1p53, 0x1p53 + 2});
        CHECK(one<cpx::index_t>("I64", {std::numeric_limits<cpx::index_t>::min()}).read<float>("x")[0] == -0x1p63f);
        CHECK(contains(message([&] {
                           one<cpx::index_t>("I64", {0, exact + 1}).read<double>("x");
                       }),
                       R"(element 1 of tensor "x": expected a double, got 9007199254740993)"));
        CHECK(contains(message([&] { one<cpx::index_t>("I64", {-exact - 1}).read<double>("x"); }),
                       "got -9007199254740993"));
        CHECK(contains(message([&] { one<std::int32_t>("I32", {16777217}).read<float>("x"); }), "got 16777217"));
        CHECK(contains(message([&] { one<std::uint64_t>("U64", {~0ull}).read<cpx::index_t>("x"); }),
                       "expected an int64, got 18446744073709551615"));
    }

    TEST_CASE("a shape that is not the expected one is refused") {
        auto const f = safetensors::parse(file(two, two_data), "two");
        auto const said = [&](std::vector<cpx::index_t> const& shape) {
            return message([&] { f.read<float>("b.weight", shape); });
        };
        CHECK(said({2, 3}) == "nothing thrown");
        CHECK(said({-1, -1}) == "nothing thrown");
        CHECK(contains(said({3, 2}), R"(two: shape of tensor "b.weight": expected [3, 2], got [2, 3])"));
        CHECK(contains(said({6}), "expected [6], got [2, 3]"));
        CHECK(contains(said({-1}), "expected [-1], got [2, 3]"));
        CHECK(contains(said({}), "expected [], got [2, 3]"));
    }

    TEST_CASE("a missing tensor is reported with the names most like it") {
        std::string header = "{";
        for (int layer = 0; layer < 12; ++layer)
            for (std::string const projection : {"q_proj", "k_proj", "o_proj"})
                header += (header.size() > 1 ? ",\"" : "\"") + std::string("model.layers.") + std::to_string(layer) +
                          ".self_attn." + projection + R"(.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
        auto const f = safetensors::parse(file(header + "}"), "m.safetensors");
        auto const said = message([&] { f.tensor("model.layers.7.self_attn.v_proj.weight"); });
        CHECK(contains(said, "m.safetensors: tensor \"model.layers.7.self_attn.v_proj.weight\": "));
        CHECK(contains(said, "expected one of the 36 in the file"));
        CHECK(contains(said, R"(such as "model.layers.7.self_attn.)"));
        CHECK(contains(said, "got none of that name"));
        CHECK(contains(message([&] { f.read<float>("model.layers.7.self_attn.v_proj.weight"); }), "such as"));
        CHECK(contains(message([&] { f.metadata("scale"); }), R"(metadata "scale": expected one of the 0)"));
    }

    TEST_CASE("a file that is not there or not a file is refused") {
        faults::directory const place;
        CHECK(contains(message([&] { safetensors(place.path() / "none"); }), "none: cannot open: expected a file"));
        CHECK(contains(message([&] { safetensors(place.path()); }), "expected a regular file"));
        CHECK(contains(message([&] { safetensors(place.write("e", "")); }), "e: length of the file: expected"));
    }

    TEST_CASE("an error points at the line that reads") {
        faults::directory const place;
        auto const f = safetensors::parse(file(two, two_data), "two");
        std::string const missing = place.path() / "none", short_file = place.write("e", "");
        std::string const shape = "{\"x\":{\"dtype\":\"F32\"}}", text = "{\"x\":{\"dtype\":\"F32\",";
        safetensors const cut(place.write("cut", file(two, two_data)));
        std::filesystem::resize_file(place.path() / "cut", 40);
        auto const at = [](int line) { return "safetensors.cpp:" + std::to_string(line) + ": "; };
        int const line = __LINE__ + 1;
        CHECK(message([&] { safetensors{missing}; }).starts_with(at(line + 0)));
        CHECK(message([&] { safetensors{short_file}; }).starts_with(at(line + 1)));
        CHECK(message([&] { safetensors::parse(file(shape), "x"); }).starts_with(at(line + 2)));
        CHECK(message([&] { safetensors::parse(file(text), "x"); }).starts_with(at(line + 3)));
        CHECK(message([&] { safetensors::parse(file(two, "1"), "x"); }).starts_with(at(line + 4)));
        CHECK(message([&] { f.metadata("c"); }).starts_with(at(line + 5)));
        CHECK(message([&] { f.tensor("c"); }).starts_with(at(line + 6)));
        CHECK(message([&] { f.read<float>("c"); }).starts_with(at(line + 7)));
        CHECK(message([&] { f.read<float>("b.weight", {0}); }).starts_with(at(line + 8)));
        CHECK(message([&] { f.read<float>("b.weight", std::vector<cpx::index_t>{6}); }).starts_with(at(line + 9)));
        CHECK(message([&] { f.read<cpx::index_t>("b.weight"); }).starts_with(at(line + 10)));
        CHECK(message([&] { cut.read<float>("b.weight"); }).starts_with(at(line + 11)));
    }

    TEST_CASE("a hostile header is refused with what is wrong") {
        std::string const ok = entry("\"F32\"", "[2]", "[0,8]"), data(8, '\0');
        REQUIRE(parse_message(file(ok, data)) == "nothing thrown");
        std::string deep = "{\"x\":";
        for (int i = 0; i < 100'000; ++i) deep += "[";
        auto const pair = [](std::string const& a, std::string const& b) {
            return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
                   R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}";
        };
        std::vector<std::pair<std::string, std::string>> const hostile = {
            {"", "length of the file: expected at least 8 bytes, got 0"},
            {"1234567", "length of the file: expected at least 8 bytes, got 7"},
            {claim(0, ""), "header: expected a JSON object"},
            {claim(1, ""), "length of the header: expected at most 0 bytes, got 1"},
            {claim(ok.size() + 9, ok + data), "length of the header: expected at most"},
            {claim(1ull << 63, ok + data), "got 9223372036854775808"},
            {claim(~0ull, ok + data), "got 18446744073709551615"},
            {claim(~0ull - 7, ok + data), "got 18446744073709551608"},
            {file("[]"), "header: expected a JSON object"},
            {file("null"), "header: expected a JSON object"},
            {file(" " + ok, data), "header: expected a JSON object"},
            {file("\xef\xbb\xbf" + ok, data), R"(header: expected a JSON object, got "\xef\xbb\xbf{)"},
            {file("{"), "not JSON"},
            {file(ok + "x", data), "not JSON"},
            {file(ok + std::string("\0", 1), data), "NUL"},
            {file("{\"\xff\":1}"), "ill-formed UTF-8"},
            {file(R"({"\ud800":1})"), "not JSON"},
            {file(deep), "nested too deeply: expected at most 64 levels"},
            {file(R"({"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{"dtype":"U8","shape":[0],)"
                  R"("data_offsets":[0,0]}})"),
             R"(duplicate key: expected every key of an object once, got "x" twice)"},
            {file(R"({"x":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})"), R"(got "dtype" twice)"},
            {file(R"({"__metadata__":{"k":"1","k":"2"}})"), R"(got "k" twice)"},
            {file(R"({"__metadata__":{"k":1}})"), "/__metadata__/k: expected a string, got 1"},
            {file(R"({"__metadata__":["k"]})"), "/__metadata__: expected an object, got an array of 1"},
            {file(R"({"__metadata__":null})"), "/__metadata__: expected an object, got null"},
            {file(R"({"x":1})"), "/x: expected an object, got 1"},
            {file(R"({"x":{"shape":[0],"data_offsets":[0,0]}})"), "/x/dtype: expected a value, got none"},
            {file(R"({"x":{"dtype":"F32","data_offsets":[0,0]}})"), "/x/shape: expected a value, got none"},
            {file(R"({"x":{"dtype":"F32","shape":[0]}})"), "/x/data_offsets: expected a value, got none"},
            {file(entry("32", "[2]", "[0,8]"), data), "/x/dtype: expected a string, got 32"},
            {file(entry("\"F8\"", "[2]", "[0,8]"), data), R"(dtype of tensor "x": expected F64,)"},
            {file(entry("\"f32\"", "[2]", "[0,8]"), data), R"(or BOOL, got "f32")"},
            {file(entry("\"F32\"", "2", "[0,8]"), data), "/x/shape: expected an array, got 2"},
            {file(entry("\"F32\"", "[\"2\"]", "[0,8]"), data), R"(/x/shape/0: expected an integer from)"},
            {file(entry("\"F32\"", "[2.0]", "[0,8]"), data), "/x/shape/0: expected an integer"},
            {file(entry("\"F32\"", "[-2]", "[0,8]"), data), R"(shape of tensor "x": expected sizes of at least 0)"},
            {file(entry("\"F32\"", "[-1,-2]", "[0,8]"), data), "got [-1, -2]"},
            {file(entry("\"F32\"", "[9223372036854775808]", "[0,8]"), data), "/x/shape/0: expected an integer"},
            {file(entry("\"F32\"", "[1e30]", "[0,8]"), data), "/x/shape/0: expected an integer"},
            {file(entry("\"F32\"", "[4294967296,4294967296]", "[0,0]")), "expected fewer than 2^63 bytes"},
            {file(entry("\"F32\"", "[2305843009213693952]", "[0,0]")), "expected fewer than 2^63 bytes"},
            {file(entry("\"F64\"", "[9223372036854775807,0]", "[0,0]")), "expected fewer than 2^63 bytes"},
            {file(entry("\"F64\"", "[0,9223372036854775807]", "[0,0]")),
             "fewer than 2^63 bytes, were sizes of 0 left out"},
            {file(entry("\"U8\"", "[0,1,1099511627776]", "[0,8]"), data),
             "0 bytes for U8 [0, 1, 1099511627776], got 8"},
            {file(entry("\"F32\"", "[3]", "[0,8]"), data), R"(tensor "x": expected 12 bytes for F32 [3], got 8)"},
            {file(entry("\"F32\"", "[1]", "[0,8]"), data), "expected 4 bytes for F32 [1], got 8"},
            {file(entry("\"F32\"", "[1000000000000]", "[0,8]"), data), "expected 4000000000000 bytes"},
            {file(entry("\"F32\"", "[2]", "[8,0]"), data), "expected 0 <= begin <= end <= 8, got [8, 0]"},
            {file(entry("\"F32\"", "[2]", "[8,16]"), data), "expected 0 <= begin <= end <= 8, got [8, 16]"},
            {file(entry("\"F32\"", "[2]", "[-8,0]"), data), "expected 0 <= begin <= end <= 8, got [-8, 0]"},
            {file(entry("\"F32\"", "[2]", "[0,9223372036854775807]"), data), "expected 0 <= begin <= end <= 8"},
            {file(entry("\"F32\"", "[2]", "[0,18446744073709551616]"), data), "/x/data_offsets/1: expected an integer"},
            {file(entry("\"F32\"", "[2]", "[0,8.5]"), data), "/x/data_offsets/1: expected an integer"},
            {file(entry("\"F32\"", "[2]", "[8]"), data), R"(data_offsets of tensor "x": expected 2 numbers, got 1)"},
            {file(entry("\"F32\"", "[2]", "[0,4,8]"), data), "expected 2 numbers, got 3"},
            {file(entry("\"F32\"", "[2]", "{}"), data), "/x/data_offsets: expected an array"},
            {file(pair("[0,4]", "[2,6]"), data), R"(overlap before tensor "b": expected a begin of 4, got 2)"},
            {file(pair("[0,4]", "[0,4]"), data), "overlap before tensor"},
            {file(pair("[4,8]", "[1,5]"), data), R"(gap before tensor "b": expected a begin of 0, got 1)"},
            {file(pair("[0,4]", "[5,9]"), data + "."), R"(gap before tensor "b": expected a begin of 4, got 5)"},
            {file(pair("[0,4]", "[4,8]"), data + "."), "that belong to no tensor: expected 8 bytes of data, got 9"},
            {file("{}", "."), "bytes that belong to no tensor: expected 0 bytes of data, got 1"},
        };
        CHECK(hostile.size() >= 25);
        for (auto const& item : hostile) {
            auto const said = parse_message(item.first);
            auto const& passage = item.second;
            CAPTURE(said);
            CAPTURE(passage);
            CHECK(contains(said, "x.safetensors: "));
            CHECK(contains(said, passage));
            CHECK(said.size() < 400);
        }
    }

    TEST_CASE("a header of more than 100 MB is refused although the file holds it") {
        CHECK(contains(parse_message(claim(100'000'001, std::string(100'000'001, ' '))),
                       "length of the header: expected at most 100000000 bytes, got 100000001"));
    }

    TEST_CASE("a tensor without elements may have any other sizes whose product is a number") {
        auto const f = safetensors::parse(file(entry("\"F32\"", "[0,1,1099511627776]", "[0,0]")), "x");
        CHECK(f.read<float>("x", {0, 1, -1}).empty());
    }

    TEST_CASE("of a file of 10 TB the header is read, and a tensor that no memory holds is refused") {
        faults::directory const place;
        std::uint64_t const elements = 10'000'000'000'000;
        auto const end = std::to_string(elements);
        auto const header = R"({"small":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"x":{"dtype":"U8","shape":[)" +
                            std::to_string(elements - 2) + R"(],"data_offsets":[2,)" + end + "]}}";
        auto const path = place.write("large.safetensors", file(header, "ab"));
        std::error_code refused; // by file systems without holes
        std::filesystem::resize_file(path, 8 + header.size() + elements, refused);
        if (refused) return;
        safetensors const f(path);
        CHECK(f.read<cpx::index_t>("small") == std::vector<cpx::index_t>{'a', 'b'});
        if (support::memory_ends)
            CHECK(contains(message([&] { f.read<float>("x"); }),
                           R"(memory for tensor "x": expected 9999999999998 elements of 4 bytes, got std::bad_alloc)"));
        CHECK(contains(message([&] { f.read<float>("x", {2}); }), "expected [2], got [9999999999998]"));
        std::filesystem::resize_file(path, 8 + header.size());
        CHECK(contains(message([&] { f.read<float>("small"); }), "cannot read: expected 2 bytes from"));
    }

    TEST_CASE("a long name costs time once, not for every size of a shape") {
        std::string shape = "[0";
        for (int i = 0; i < 100'000; ++i) shape += ",1";
        auto const name = std::string(1'000'000, 'n');
        auto const header = "{\"" + name + R"(":{"dtype":"F32","shape":)" + shape + R"(],"data_offsets":[0,0]}})";
        CHECK(safetensors::parse(file(header), "x").tensor(name).shape.size() == 100'001);
    }

    TEST_CASE("a damaged file is read or refused with cpx::error") {
        std::mt19937_64 random(2);
        auto const original = file(two, two_data);
        int refused = 0;
        for (int i = 0; i < 20'000; ++i) {
            auto const bytes = faults::damaged(original, random);
            bool other = false;
            try {
                auto const f = safetensors::parse(bytes, "x");
                for (auto const& name : f.names()) message([&] { f.read<float>(name); });
                for (auto const& name : f.names()) message([&] { f.read<cpx::index_t>(name); });
            } catch (cpx::error const&) {
                ++refused;
            } catch (...) {
                other = true;
            }
            CAPTURE(bytes);
            REQUIRE(!other);
        }
        CHECK(refused > 10'000);
        CHECK(refused < 20'000);
    }

    TEST_CASE("a file that another program wrote is read") {
        safetensors const f(std::string(support::golden_dir) + "/gdr_small.safetensors");
        CHECK(f.names().size() == 14);
        CHECK(f.metadata("kind") == "gated_delta_rule");
        CHECK(f.metadata("scale") == "16**-0.5");
        CHECK(f.read<cpx::index_t>("cu_seqlens", {5}) == std::vector<cpx::index_t>{0, 5, 21, 24, 64});
        CHECK(f.tensor("final_state").shape == std::vector<cpx::index_t>{4, 4, 16, 16});
        auto const q = f.read<double>("q", {64, 2, 16});
        auto const narrow = f.read<float>("q", {64, -1, 16});
        REQUIRE(q.size() == 2048);
        for (std::size_t i = 0; i < q.size(); ++i) {
            CHECK(std::isfinite(q[i]));
            CHECK(static_cast<float>(q[i]) == narrow[i]);
        }
        CHECK(contains(message([&] { f.tensor("final_stat"); }), "\"final_state\""));
    }
}
