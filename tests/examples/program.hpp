// SPDX-License-Identifier: Apache-2.0
// Runs the program under test and damages copies of its input files.
#pragma once

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace program {

namespace fs = std::filesystem;
using nlohmann::json;

inline std::string read(fs::path const& file) {
    std::ifstream in(file, std::ios::binary);
    REQUIRE_MESSAGE(in, file.string());
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
}

inline void write(fs::path const& file, std::string const& bytes) {
    std::ofstream out(file, std::ios::binary);
    out << bytes;
    REQUIRE_MESSAGE(out.flush(), file.string());
}

/// An empty folder that is removed at the end.
class folder {
public:
    folder() : path_(fs::temp_directory_path() / ("cpx." + std::to_string(::getpid()))) {
        fs::remove_all(path_);
        fs::create_directories(path_);
    }
    folder(folder const&) = delete;
    folder& operator=(folder const&) = delete;
    ~folder() { fs::remove_all(path_); }
    fs::path const& path() const { return path_; }
    fs::path operator/(std::string const& name) const { return path_ / name; }

private:
    fs::path path_;
};

/// What a program left behind; `code` is its exit code, or 1000 + the signal that ended it.
struct outcome {
    int code = 0;
    std::string out, err;
};

/// Runs the program under test, or the other one of that name beside it, with `input` on its standard input.
inline outcome run(std::vector<std::string> const& arguments, std::string const& input = "",
                   std::string const& other = "") {
    fs::path const in = fs::temp_directory_path() / ("cpx.stdin." + std::to_string(::getpid()));
    write(in, input);
    fs::path const err = fs::temp_directory_path() / ("cpx.stderr." + std::to_string(::getpid()));
    char const* const own = std::getenv("CPX_PROGRAM");
    REQUIRE_MESSAGE(own != nullptr, "CPX_PROGRAM is to be the program's path, as ctest sets it");
    fs::path const path = other.empty() ? fs::path(own) : fs::path(own).parent_path() / other;
    std::string command = '\'' + path.string() + '\'';
    for (auto const& argument : arguments) command += " '" + argument + '\'';
    std::FILE* const pipe =
        ::popen(("exec " + command + " <'" + in.string() + "' 2>'" + err.string() + '\'').c_str(), "r");
    REQUIRE(pipe != nullptr);
    outcome result;
    char buffer[4096];
    for (std::size_t n = 0; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) result.out.append(buffer, n);
    int const status = ::pclose(pipe);
    result.code = WIFSIGNALED(status) ? 1000 + WTERMSIG(status) : WEXITSTATUS(status);
    result.err = read(err);
    fs::remove(err);
    fs::remove(in);
    return result;
}

inline std::vector<std::string> operator+(std::vector<std::string> a, std::vector<std::string> const& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

/// Runs the program, which must succeed in silence on stderr, and returns the JSON that it prints.
inline json run_json(std::vector<std::string> const& arguments) {
    std::string shown;
    for (auto const& argument : arguments) shown += argument + ' ';
    CAPTURE(shown);
    auto const result = run(arguments + std::vector<std::string>{"--json"});
    CHECK(result.err == "");
    REQUIRE(result.code == 0);
    json const parsed = json::parse(result.out, nullptr, false);
    REQUIRE_FALSE(parsed.is_discarded());
    return parsed;
}

/// Returns "" if a program ended as bad input must: exit code 1, one line on stderr, nothing on stdout.
inline std::string problem_of_refusal(outcome const& result) {
    if (result.code != 1) return "exit code " + std::to_string(result.code);
    if (!result.out.empty()) return "something on stdout: " + result.out;
    if (result.err.find(".hpp:") != std::string::npos) return "a line of cpx's sources: " + result.err;
    if (result.err.empty() || result.err.find('\n') != result.err.size() - 1) return "not one line: " + result.err;
    return "";
}

/// Checks that the program refuses its input, in a line that holds all `passages`.
inline void check_refusal(std::vector<std::string> const& arguments, std::vector<std::string> const& passages) {
    std::string shown;
    for (auto const& argument : arguments) shown += argument + ' ';
    CAPTURE(shown);
    auto const result = run(arguments);
    CHECK(problem_of_refusal(result) == "");
    CAPTURE(result.err);
    for (auto const& passage : passages) CHECK_MESSAGE(result.err.find(passage) != std::string::npos, passage);
}

/// The contents of a safetensors file, taken apart without cpx's reader so that any of it can be changed.
struct archive {
    struct tensor {
        std::string dtype;
        json shape;
        std::string bytes;
    };
    std::map<std::string, tensor> tensors;
    json metadata;

    explicit archive(fs::path const& file) {
        std::string const all = read(file);
        std::uint64_t length = 0;
        std::memcpy(&length, all.data(), 8);
        json const header = json::parse(all.substr(8, length));
        for (auto const& [name, entry] : header.items()) {
            if (name == "__metadata__") {
                metadata = entry;
                continue;
            }
            std::size_t const first = entry["data_offsets"][0], last = entry["data_offsets"][1];
            tensors[name] = {entry["dtype"], entry["shape"], all.substr(8 + length + first, last - first)};
        }
    }

    void save(fs::path const& file) const {
        json header;
        std::string data;
        for (auto const& [name, t] : tensors) {
            header[name] = {
                {"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {data.size(), data.size() + t.bytes.size()}}};
            data += t.bytes;
        }
        if (!metadata.is_null()) header["__metadata__"] = metadata;
        std::string const text = header.dump();
        std::uint64_t const length = text.size();
        write(file, std::string(reinterpret_cast<char const*>(&length), 8) + text + data);
    }

    /// Sets element `i` of an int64 tensor.
    void set(std::string const& name, std::size_t i, std::int64_t value) {
        tensor& t = tensors.at(name);
        REQUIRE(t.dtype == "I64");
        std::memcpy(t.bytes.data() + 8 * i, &value, 8);
    }

    /// Makes the first element of a float32 or float64 tensor a NaN.
    void poison(std::string const& name) {
        tensor& t = tensors.at(name);
        auto const put = [&](auto nan) { std::memcpy(t.bytes.data(), &nan, sizeof nan); };
        REQUIRE((t.dtype == "F32" || t.dtype == "F64"));
        if (t.dtype == "F32")
            put(std::numeric_limits<float>::quiet_NaN());
        else
            put(std::numeric_limits<double>::quiet_NaN());
    }
};

/// Copies of the files of a model and of its reference, to be damaged.
struct copies {
    /// `more` are the program's arguments besides the files.
    explicit copies(fs::path const& of, std::vector<std::string> const& more = {}) : from(of), others(more) {
        fs::create_directories(model);
        for (char const* name : {"config.json", "model.safetensors"}) fs::copy_file(from / name, model / name);
        fs::copy_file(from / "reference.safetensors", expected);
    }
    /// Changes one setting of what was copied.
    void config(std::string const& key, json const& value) const {
        json all = json::parse(read(from / "config.json"));
        all[key] = value;
        write(model / "config.json", all.dump());
    }
    std::vector<std::string> options() const {
        return std::vector<std::string>{"--model", model.string(), "--reference", expected.string()} + others;
    }

    fs::path from;
    std::vector<std::string> others;
    folder home;
    fs::path model = home / "model", expected = home / "expected.safetensors";
};

/// Returns the lengths at which a truncated safetensors file of `bytes` is most likely to be misread.
inline std::vector<std::size_t> truncations(std::string const& bytes) {
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), 8);
    std::size_t const data = 8 + header;
    return {0, 1, 7, 8, 9, data / 2, data - 1, data, data + 1, (data + bytes.size()) / 2, bytes.size() - 1};
}

} // namespace program
