// SPDX-License-Identifier: Apache-2.0
// Every mutation of mutations.txt can be put in its place; that its tests fail then is shown by scripts/mutate.
#include <doctest/doctest.h>

#include <support/files.hpp>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

fs::path const root = support::source_dir;

struct mutation {
    std::map<std::string, std::string> words; ///< what follows "mutation", "imitates", "header" and "tests"
    std::string now, then;                    ///< the passage and what stands instead, a newline after each line
};

/// Returns the mutations as scripts/mutate reads them, and puts lines that are none of theirs into `strays`.
std::vector<mutation> mutations(std::vector<std::string>& strays) {
    std::ifstream in(root / "tests/mutations.txt");
    std::vector<mutation> result;
    std::regex const word("(mutation|imitates|header|tests) (\\S.*)");
    for (std::string line; std::getline(in, line);) {
        std::smatch match;
        if (line.empty() || line[0] == '#') continue;
        if (line.rfind("mutation ", 0) == 0) result.emplace_back();
        if (result.empty()) {
            strays.push_back(line);
            continue;
        }
        mutation& m = result.back();
        if (line[0] == '-' || line[0] == ' ') m.now += line.substr(1) + '\n';
        if (line[0] == '+' || line[0] == ' ') m.then += line.substr(1) + '\n';
        if (std::regex_match(line, match, word))
            m.words[match[1]] = match[2];
        else if (line.find_first_of("-+ ") != 0)
            strays.push_back(line);
    }
    return result;
}

/// Returns how often `passage`, without its last newline, stands in the file.
int count(fs::path const& file, std::string passage) {
    std::ifstream in(file);
    std::string const text{std::istreambuf_iterator<char>(in), {}};
    passage.pop_back();
    int times = 0;
    for (auto at = text.find(passage); at != std::string::npos; at = text.find(passage, at + 1)) ++times;
    return times;
}

} // namespace

TEST_SUITE("hygiene") {
    TEST_CASE("every mutation changes a passage that its header has once, and names tests that there are") {
        std::vector<std::string> strays;
        auto const all = mutations(strays);
        CHECK(strays == std::vector<std::string>());
        REQUIRE(!all.empty());
        std::set<std::string> names;
        for (mutation const& m : all) {
            REQUIRE(m.words.size() == 4);
            CAPTURE(m.words.at("mutation"));
            CHECK_MESSAGE(names.insert(m.words.at("mutation")).second, "this name is taken");
            REQUIRE(m.now.size() > 1);
            CHECK(m.now != m.then);
            CHECK(count(root / m.words.at("header"), m.now) == 1);
            std::istringstream tests(m.words.at("tests"));
            for (std::string test; tests >> test;) {
                CAPTURE(test);
                std::smatch match;
                REQUIRE(std::regex_match(test, match, std::regex("test\\.([a-z]+)\\.(\\w+)")));
                CHECK(fs::exists(root / "tests" / match[1].str() / (match[2].str() + ".cpp")));
            }
        }
    }
}
