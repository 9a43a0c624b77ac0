// SPDX-License-Identifier: Apache-2.0
// Every C++ block of README.md is a passage of a file that is compiled and run, and what texts name is there.
#include <doctest/doctest.h>

#include <support/files.hpp>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;
using text = std::vector<std::string>;

fs::path const root = support::source_dir;

text lines(fs::path const& file) {
    std::ifstream in(file);
    text result;
    for (std::string line; std::getline(in, line);) result.push_back(line);
    return result;
}

/// Returns the blocks between ```cpp and ```, without blank lines at their ends.
std::vector<text> blocks(text const& readme) {
    std::vector<text> result;
    bool inside = false;
    for (std::string const& line : readme) {
        if (inside && line == "```") {
            inside = false;
            while (!result.back().empty() && result.back().back().empty()) result.back().pop_back();
        } else if (inside) {
            if (!line.empty() || !result.back().empty()) result.back().push_back(line);
        } else if (line == "```cpp") {
            inside = true;
            result.emplace_back();
        }
    }
    return result;
}

/// Returns whether `block` is a passage of `source`, all its lines indented alike.
bool quotes(text const& block, text const& source) {
    for (std::size_t at = 0; at + block.size() <= source.size(); ++at) {
        std::string const& first = source[at];
        if (!first.ends_with(block.front())) continue;
        std::string const indent = first.substr(0, first.size() - block.front().size());
        if (indent.find_first_not_of(' ') != std::string::npos) continue;
        auto const same = [&](std::string const& quoted, std::string const& line) {
            return line == (quoted.empty() ? quoted : indent + quoted);
        };
        if (std::equal(block.begin(), block.end(), source.begin() + std::ptrdiff_t(at), same)) return true;
    }
    return false;
}

/// Returns the words of a text, without the marks around them.
std::vector<std::string> words(text const& lines) {
    std::vector<std::string> result;
    for (std::string const& line : lines)
        for (std::size_t at = 0; at < line.size();) {
            std::size_t const first = line.find_first_not_of(" `|()[]\"'*,;", at);
            if (first == std::string::npos) break;
            at = std::min(line.find_first_of(" `|()[]\"'*,;", first), line.size());
            std::string word = line.substr(first, at - first);
            while (word.ends_with('.') || word.ends_with(':')) word.pop_back();
            if (word.starts_with("./")) word.erase(0, 2);
            result.push_back(word);
        }
    return result;
}

bool is_source(fs::path const& stem) {
    return fs::exists(root / (stem.string() + ".cpp")) || fs::exists(root / (stem.string() + ".cu"));
}

/// Returns whether a word names no target, or one that CMake makes of a source.
bool is_made(std::string const& word) {
    std::string const file = word.substr(word.rfind('/') + 1);
    if (file.find_first_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ<*") != std::string::npos) return true; // stands for any
    if (word.starts_with("build/") && word.find("/bin/") != std::string::npos)
        return is_source("examples/" + file) || is_source("examples/" + file + "/main");
    std::string path = file;
    std::ranges::replace(path, '.', '/');
    auto const stands_in = [&](char const* folder) { // of a preset's build, if the word says where
        fs::path const place = fs::path(word).parent_path();
        return place.empty() || place == fs::path("build") / place.parent_path().filename() / folder;
    };
    if (file.starts_with("bench.")) return is_source(path) && stands_in("bench");
    if (file.starts_with("test.") && std::ranges::count(file, '.') == 2)
        return is_source("tests/" + path.substr(5)) && stands_in("tests");
    if (file.starts_with("tests.")) return fs::is_directory(root / path);
    return true;
}

} // namespace

TEST_SUITE("hygiene") {
    TEST_CASE("every cpp block of README.md stands in an example or a test") {
        std::vector<text> sources;
        for (char const* folder : {"examples", "tests"})
            for (auto const& entry : fs::recursive_directory_iterator(root / folder))
                if (auto const kind = entry.path().extension(); kind == ".cpp" || kind == ".hpp" || kind == ".cu")
                    sources.push_back(lines(entry.path()));

        for (text const& block : blocks(lines(root / "README.md"))) {
            REQUIRE(!block.empty());
            CAPTURE(block.front());
            CHECK(std::any_of(sources.begin(), sources.end(), [&](text const& s) { return quotes(block, s); }));
        }
    }

    TEST_CASE("every script, preset, program and test that README, CONTRIBUTING, RESULTS and TRIALS name is there") {
        auto const presets = words(lines(root / "CMakePresets.json"));
        for (std::string const file : {"README.md", "CONTRIBUTING.md", "bench/RESULTS.md", "bench/TRIALS.md"}) {
            CAPTURE(file);
            std::string before;
            for (std::string const& word : words(lines(root / file))) {
                CAPTURE(word);
                if (before == "--preset") CHECK(std::ranges::find(presets, word) != presets.end());
                if (word.starts_with("scripts/") || word.starts_with("bench/peers/")) CHECK(fs::exists(root / word));
                CHECK(is_made(word));
                before = word;
            }
        }
    }
}
