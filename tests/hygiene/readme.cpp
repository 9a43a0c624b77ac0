// SPDX-License-Identifier: Apache-2.0
// Every C++ block of README.md is a passage of a file that is compiled and run.
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

} // namespace

TEST_SUITE("hygiene") {
    TEST_CASE("every cpp block of README.md stands in an example or a test") {
        std::vector<text> sources;
        for (char const* folder : {"examples", "tests"})
            for (auto const& entry : fs::recursive_directory_iterator(root / folder))
                if (auto const kind = entry.path().extension(); kind == ".cpp" || kind == ".cu")
                    sources.push_back(lines(entry.path()));

        for (text const& block : blocks(lines(root / "README.md"))) {
            REQUIRE(!block.empty());
            CAPTURE(block.front());
            CHECK(std::any_of(sources.begin(), sources.end(), [&](text const& s) { return quotes(block, s); }));
        }
    }
}
