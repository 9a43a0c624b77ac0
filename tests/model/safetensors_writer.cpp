// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/safetensors_writer.hpp>

#include "model/faults.hpp"
#include "model/random_tensors.hpp"

#include <doctest/doctest.h>

#include <support/files.hpp>
#include <support/random.hpp>

#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

using cpx::safetensors;
using cpx::safetensors_writer;
using faults::contains;
using faults::message;

namespace {

namespace fs = std::filesystem;
using info = safetensors_writer::tensor_info;
using type = safetensors::dtype;

std::string bytes_of(fs::path const& file) {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<std::string> files_in(fs::path const& place) {
    std::vector<std::string> names;
    for (auto const& entry : fs::directory_iterator(place)) names.push_back(entry.path().filename().string());
    return names;
}

std::span<std::byte const> bytes(std::string const& text) { return std::as_bytes(std::span(text)); }

std::string refusal(std::vector<info> const& tensors, safetensors_writer::texts const& metadata = {}) {
    faults::directory const place;
    auto const said = message([&] { safetensors_writer(place.path() / "x.safetensors", tensors, metadata).finish(); });
    CHECK(files_in(place.path()).empty() == (said != "nothing thrown"));
    return said;
}

} // namespace

TEST_SUITE("model") {
    TEST_CASE("the reader reads what was written, and tensors that come in another order give the same bytes") {
        faults::directory const place;
        for (std::uint64_t seed = 0; seed < 60; ++seed) {
            CAPTURE(seed);
            support::splitmix numbers(seed);
            auto tensors = random_tensors::make(numbers);
            auto const texts = random_tensors::texts(numbers);
            auto const first = place.path() / "first", second = place.path() / "second";
            random_tensors::write(first, tensors, texts);

            safetensors const f(first);
            CHECK(f.metadata().size() == texts.size());
            for (auto const& [key, text] : texts) CHECK(f.metadata(key) == text);
            CHECK(f.names().size() == tensors.size());
            for (auto const& [t, content] : tensors) {
                auto const& read = f.tensor(t.name);
                CHECK(read.dtype == t.dtype);
                CHECK(read.shape == t.shape);
                CHECK(read.bytes.first % static_cast<cpx::index_t>(safetensors::size_of(t.dtype)) == 0);
                CHECK(f.read_bytes(t.name) == content);
            }

            for (std::size_t i = tensors.size(); i > 1; --i)
                std::swap(tensors[i - 1],
                          tensors[static_cast<std::size_t>(numbers.between(0, static_cast<cpx::index_t>(i) - 1))]);
            std::vector<info> declared;
            for (auto const& t : tensors) declared.insert(declared.begin(), t.info);
            safetensors_writer out(second, declared, texts);
            for (bool last : {false, true}) // halves, those of all tensors between each other
                for (auto const& t : tensors) {
                    auto const half = t.bytes.size() / 2;
                    auto const all = std::span(t.bytes);
                    out.write(t.info.name, last ? all.subspan(half) : all.first(half));
                }
            out.finish();
            CHECK(bytes_of(first) == bytes_of(second));
            CHECK(bytes_of(first).size() % 8 == static_cast<std::size_t>(f.names().empty() ? 0 : [&] {
                      cpx::index_t data = 0;
                      for (auto const& t : tensors) data += std::ssize(t.bytes);
                      return data % 8;
                  }()));
        }
    }

    TEST_CASE("a tensor's bytes are read in parts, and none beyond them") {
        faults::directory const place;
        safetensors_writer out(place.path() / "x", {{"a", type::u8, {5}}, {"b", type::u8, {3}}});
        out.write("a", bytes("hello"));
        out.write("b", bytes("bye"));
        out.finish();
        safetensors const f(place.path() / "x");
        std::string got(3, ' ');
        f.read_bytes("a", 1, std::as_writable_bytes(std::span(got)));
        CHECK(got == "ell");
        f.read_bytes("b", 3, {});
        CHECK(contains(message([&] { f.read_bytes("a", 3, std::as_writable_bytes(std::span(got))); }),
                       R"(x: bytes of tensor "a": expected some of its 5, got 3 from 3)"));
        CHECK(contains(message([&] { f.read_bytes("a", -1, {}); }), "got 0 from -1"));
        CHECK(contains(message([&] { f.read_bytes("a", 6, {}); }), "got 0 from 6"));
        CHECK(contains(message([&] { f.read_bytes("c"); }), R"(tensor "c": expected one of the 2 in the file)"));
    }

    TEST_CASE("a header has the form that the format wants") {
        faults::directory const place;
        safetensors_writer out(place.path() / "x",
                               {{"z", type::boolean, {1}}, {"y", type::f32, {}}, {"a\"\x01\xc3\xa9", type::f32, {0}}},
                               {{"k", "v"}});
        out.write("z", bytes("\1"));
        out.write("y", bytes("abcd"));
        out.finish();
        auto const file = bytes_of(place.path() / "x");
        std::uint64_t length = 0;
        std::memcpy(&length, file.data(), sizeof length);
        CHECK(length % 8 == 0);
        auto header = file.substr(8, length);
        header.resize(header.find_last_not_of(' ') + 1);
        CHECK(header == R"({"__metadata__":{"k":"v"},)"
                        R"("a\"\u0001)"
                        "\xc3\xa9"
                        R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)"
                        R"("y":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                        R"("z":{"dtype":"BOOL","shape":[1],"data_offsets":[4,5]}})");
        CHECK(file.substr(8 + length) == "abcd\1");
    }

    TEST_CASE("a file is there whole or not at all, and nothing is beside it") {
        faults::directory const place;
        auto const path = place.write("x", "old");
        fs::permissions(path, fs::perms(0640));
        {
            safetensors_writer out(path, {{"a", type::u8, {2}}});
            out.write("a", bytes("z"));
            CHECK(bytes_of(path) == "old");
            CHECK(contains(message([&] { out.finish(); }), R"(x: bytes of tensor "a": expected 2, got 1)"));
        }
        CHECK(bytes_of(path) == "old");
        CHECK(files_in(place.path()) == std::vector<std::string>{"x"});
        fs::create_symlink("x", place.path() / "link");
        safetensors_writer out(place.path() / "link", {{"a", type::u8, {1}}});
        auto moved = std::move(out);
        moved.write("a", bytes("z"));
        moved.finish();
        CHECK(safetensors(path).contains("a"));
        CHECK(fs::is_symlink(place.path() / "link"));
        CHECK((fs::status(path).permissions() & fs::perms(0777)) == fs::perms(0640));
        CHECK(files_in(place.path()).size() == 2);
        CHECK(
            contains(message([&] { moved.finish(); }), "link: cannot write: expected a file that is not in its place"));
        CHECK(contains(message([&] { moved.write("a", {}); }), "cannot write"));

        auto const fresh = place.path() / "fresh";
        safetensors_writer(fresh, {}).finish();
        CHECK(fs::status(fresh).permissions() == fs::status(place.write("any", "")).permissions());
    }

    TEST_CASE("what the reader would refuse is refused before there is a file") {
        CHECK(refusal({}) == "nothing thrown");
        CHECK(contains(refusal({{"a", type::u8, {0}}, {"a", type::f32, {0}}}),
                       R"(x.safetensors: name of tensor "a": expected every tensor once, got this twice)"));
        CHECK(contains(refusal({{"a", type::u8, {0}}, {"b", type::u8, {0}}, {"a", type::u8, {0}}}), "this twice"));
        CHECK(contains(refusal({{"__metadata__", type::u8, {0}}}), "another than that of metadata"));
        CHECK(contains(refusal({{"a\xff", type::u8, {0}}}), R"(name of tensor "a\xff": expected text in UTF-8)"));
        CHECK(contains(refusal({}, {{"\xc3", "v"}}), "metadata: expected text in UTF-8"));
        CHECK(contains(refusal({}, {{"k", "\xed\xa0\x80"}}), "metadata: expected text in UTF-8"));
        CHECK(contains(refusal({{"a", type::f32, {2, -1}}}), "sizes of at least 0, got [2, -1]"));
        CHECK(contains(refusal({{"a", type::f32, {-1, 0}}}), "sizes of at least 0"));
        CHECK(contains(refusal({{"a", type::f32, {1l << 40, 1l << 40, 0}}}), "fewer than 2^63 bytes"));
        CHECK(contains(refusal({{"a", type::u8, {(1l << 62) + 1}}, {"b", type::u8, {1l << 62}}}),
                       R"(bytes up to the end of tensor "b": expected fewer than 2^63, got more)"));
        CHECK(contains(refusal({{"a", static_cast<type>(77), {0}}}), "dtype of tensor \"a\": expected one of"));
        std::string const a(50'000'001, 'a'), b(50'000'000, 'b');
        CHECK(contains(refusal({{a, type::u8, {0}}, {b, type::u8, {0}}}),
                       "length of the header: expected at most 100000000 bytes, got 100000"));
    }

    TEST_CASE("bytes of no tensor, and more than a tensor has, are refused and change nothing") {
        faults::directory const place;
        safetensors_writer out(place.path() / "x", {{"a", type::u8, {2}}, {"b", type::u8, {2}}});
        CHECK(
            contains(message([&] { out.write("c", {}); }), R"(tensor "c": expected one of the 2 declared, got none)"));
        CHECK(contains(message([&] { out.write("a", bytes("123")); }), R"(bytes of tensor "a": expected 2, got 3)"));
        out.write("a", bytes("1"));
        CHECK(contains(message([&] { out.write("a", bytes("23")); }),
                       R"(bytes of tensor "a": expected 2 in all, of which 1 are written, got 2 more)"));
        out.write("a", bytes("2"));
        out.write("b", bytes("34"));
        CHECK(contains(message([&] { out.write("b", bytes("5")); }), "of which 2 are written, got 1 more"));
        out.finish();
        CHECK(bytes_of(place.path() / "x").ends_with("1234"));
    }

    TEST_CASE("a directory that is missing, something else in the place and a full disk are named") {
        faults::directory const place;
        auto const said = [](fs::path const& path, cpx::index_t size = 1) {
            return message([&] { safetensors_writer(path, {{"a", type::u8, {size}}}); });
        };
        CHECK(contains(said(place.path() / "none" / "x"), "none/x: cannot write: expected a file that can be written, "
                                                          "got No such file or directory"));
        CHECK(contains(said(place.path()), "expected a path of a regular file, got a directory"));
        CHECK(contains(said(place.path() / ""), "got a directory"));
        CHECK(contains(said("/dev/null"), "/dev/null: cannot write: expected a path of a regular file, got another"));
        CHECK(contains(said(place.path() / "x", 1l << 60), "room for the file: expected 11529215046068470"));
        auto const file = place.write("f", "");
        CHECK(contains(said(file / "x"), "got Not a directory"));

        struct ::rlimit old {};
        REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
        auto const before = std::signal(SIGXFSZ, SIG_IGN);
        struct ::rlimit few = old;
        few.rlim_cur = 100'000;
        REQUIRE(::setrlimit(RLIMIT_FSIZE, &few) == 0);
        auto const full = said(place.path() / "x", 200'000);
        ::setrlimit(RLIMIT_FSIZE, &old);
        std::signal(SIGXFSZ, before);
        CHECK(contains(full, "x: room for the file: expected 2000"));
        CHECK(contains(full, "got File too large"));
        CHECK(files_in(place.path()) == std::vector<std::string>{"f"});
    }

    TEST_CASE("what the repository's checkpoints hold is written again with the same tensors") {
        faults::directory const place;
        for (char const* model : {"tiny_qwen3_5_moe", "tiny_qwen3_vl"}) {
            safetensors const from(fs::path(support::source_dir) / "examples/data" / model / "model.safetensors");
            std::vector<info> tensors;
            for (auto const& name : from.names())
                tensors.push_back({name, from.tensor(name).dtype, from.tensor(name).shape});
            safetensors_writer out(place.path() / model, tensors, from.metadata());
            for (auto const& name : from.names()) out.write(name, from.read_bytes(name));
            out.finish();
            CHECK(bytes_of(place.path() / model) == bytes_of(from.where())); // of Hugging Face's library
        }
    }
}
