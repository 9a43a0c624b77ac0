// SPDX-License-Identifier: Apache-2.0
// Rules that every source file of cpx obeys: who may include whom, and how long a file and a line may be.
#include <doctest/doctest.h>

#include <support/files.hpp>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;

fs::path const root = support::source_dir;

/// Height of each floor: a header includes its own floor and lower ones. Floors of one height do not see each other.
std::map<std::string, int> const floors = {{"core", 0}, {"layout", 1}, {"mesh", 1},      {"ops/local", 1},
                                           {"plan", 2}, {"model", 2},  {"transport", 3}, {"testing", 4},
                                           {"cuda", 4}, {"ops", 5}};

/// Third-party headers, and the only headers of cpx that may include them.
struct third_party {
    std::regex header;
    std::regex includer;
};
std::vector<third_party> const allowed = {
    {std::regex("Eigen/.*"), std::regex("cpx/ops/eigen\\.hpp")},
    {std::regex("nlohmann/.*"), std::regex("cpx/model/.*")},
    {std::regex("mpi\\.h"), std::regex("cpx/transport/mpi[a-z_]*\\.hpp")},
    {std::regex("nccl\\.h"), std::regex("cpx/transport/nccl[a-z_]*\\.hpp")},
    {std::regex("nccl_device\\.h"), std::regex("cpx/cuda/window\\.hpp")},
    {std::regex("(fcntl|unistd|sys/mman)\\.h"), std::regex("cpx/transport/roll_call\\.hpp")},
    {std::regex("(signal|sys/types)\\.h"), std::regex("cpx/core/process\\.hpp")},
    {std::regex("sys/mman\\.h"), std::regex("cpx/testing/board\\.hpp")},
    {std::regex("(fcntl|unistd|sys/stat)\\.h"), std::regex("cpx/model/(new_)?file\\.hpp")},
    {std::regex("cudnn_frontend\\.h|dlfcn\\.h"), std::regex("cpx/cuda/cudnn_attention\\.hpp")},
    {std::regex("(cuda|cuda_runtime(_api)?|cuda_bf16|cuda_fp16|cublasLt|nvtx3/.*)\\.h(pp)?"),
     std::regex("cpx/cuda/.*")},
};

std::vector<std::string> lines(fs::path const& file) {
    std::ifstream in(file);
    std::vector<std::string> result;
    for (std::string line; std::getline(in, line);) result.push_back(line);
    return result;
}

/// Returns the source files below `folder`, which may be missing.
std::vector<fs::path> sources(char const* folder) {
    std::vector<fs::path> result;
    if (!fs::exists(root / folder)) return result;
    std::regex const source(".*\\.(hpp|cpp|cuh|cu|py)");
    for (auto const& entry : fs::recursive_directory_iterator(root / folder))
        if (std::regex_match(entry.path().string(), source)) result.push_back(entry.path());
    return result;
}

struct include {
    std::string from; ///< such as "cpx/FLOOR/NAME.hpp"
    std::string to;   ///< what stands between the brackets
};

/// Returns every #include of the headers of cpx; quotes are kept, so that they match nothing.
std::vector<include> includes() {
    std::vector<include> result;
    std::regex const directive("\\s*#\\s*include\\s*(<([^>]+)>|\".*\").*");
    for (fs::path const& header : sources("include"))
        for (std::string const& line : lines(header))
            if (std::smatch match; std::regex_match(line, match, directive))
                result.push_back({fs::relative(header, root / "include").generic_string(),
                                  match[2].matched ? match[2].str() : match[1].str()});
    return result;
}

/// Returns FLOOR of "cpx/FLOOR/NAME.hpp" and of "cpx/FLOOR.hpp", or nothing if there is none. What one rank computes of
/// its own rows is a floor below all that knows of ranks.
std::string floor_of(std::string const& header) {
    std::smatch match;
    return std::regex_match(header, match, std::regex("cpx/(ops/local|[^/.]+)[/.].+")) ? match[1].str() : std::string();
}

/// Returns the number of characters of UTF-8 text.
auto columns(std::string const& line) {
    return std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

} // namespace

TEST_SUITE("hygiene") {
    TEST_CASE("a header includes its own floor and lower ones only") {
        for (auto const& [given_from, given_to] : includes()) {
            auto const& from = given_from;
            auto const& to = given_to;
            CAPTURE(from);
            CAPTURE(to);
            if (from == "cpx/cpx.hpp" || to.rfind("cpx/", 0) != 0) continue;
            if (to == "cpx/cuda/nvcc.hpp") continue; // looks at the compiler and includes nothing
            REQUIRE_MESSAGE(floors.count(floor_of(from)) == 1, "this floor is not known");
            if (to.ends_with(".cuh")) { // kernels/
                CHECK(floor_of(from) == "cuda");
                continue;
            }
            REQUIRE_MESSAGE(floors.count(floor_of(to)) == 1, "this floor is not known");
            CHECK((floor_of(from) == floor_of(to) || floors.at(floor_of(from)) > floors.at(floor_of(to))));
            CHECK((floor_of(from) != "model" || floor_of(to) != "layout")); // which stands on mesh, beside it
        }
    }

    TEST_CASE("the umbrella includes host floors of cpx and nothing else") {
        for (auto const& [from, given_to] : includes()) {
            auto const& to = given_to;
            if (from != "cpx/cpx.hpp") continue;
            CAPTURE(to);
            REQUIRE(floors.count(floor_of(to)) == 1);
            CHECK(floors.at(floor_of(to)) <= floors.at("transport"));
        }
    }

    TEST_CASE("a header includes cpx, the standard library, and third parties only where they are allowed") {
        for (auto const& [given_from, given_to] : includes()) {
            auto const& from = given_from;
            auto const& to = given_to;
            CAPTURE(from);
            CAPTURE(to);
            bool known =
                std::regex_match(to, std::regex("cpx/.*|[a-z0-9_]+|\"end of compilation\"")); // after an #error
            for (third_party const& party : allowed)
                known = known || (std::regex_match(to, party.header) && std::regex_match(from, party.includer));
            CHECK(known);
        }
    }

    TEST_CASE("a header has an SPDX line and a #pragma once") {
        for (fs::path const& header : sources("include")) {
            CAPTURE(header.string());
            auto const text = lines(header);
            REQUIRE(!text.empty());
            CHECK(text.front() == "// SPDX-License-Identifier: Apache-2.0");
            CHECK(std::count(text.begin(), text.end(), "#pragma once") == 1);
        }
    }

    TEST_CASE("no header has more than 400 lines") {
        for (char const* folder : {"include", "kernels"})
            for (fs::path const& header : sources(folder)) {
                CAPTURE(header.string());
                CHECK(lines(header).size() <= 400);
            }
    }

    TEST_CASE("a kernel whose array in shared memory begins at a multiple of 1024 bytes has no variable beside it") {
        int arrays = 0; // ptxas begins them where variables end, unless it optimises (-G, -Ofc max)
        auto const has = [](std::string const& line, char const* text) { return line.find(text) != line.npos; };
        for (fs::path const& header : sources("kernels")) {
            CAPTURE(header.string());
            bool array = false, variable = false; // of a kernel, and what follows it up to the next
            auto const end = [&] {
                CHECK(!(array && variable));
                arrays += std::exchange(array, false);
                variable = false;
            };
            for (std::string const& line : lines(header)) {
                if (has(line, "__global__")) end();
                array |= has(line, "extern __shared__ __align__(1024)") || has(line, "shared_memory<");
                variable |= has(line, " __shared__ ") && !has(line, "extern");
            }
            end();
        }
        CHECK(arrays > 4);
    }

    TEST_CASE("no line has more than 120 columns") {
        for (char const* folder : {"include", "kernels", "examples", "tests", "bench", "harness", "python/src",
                                   "python/cpx", "python/tests", "python/examples"})
            for (fs::path const& source : sources(folder)) {
                std::size_t number = 0;
                for (std::string const& line : lines(source)) {
                    std::string const place = source.string() + ":" + std::to_string(++number);
                    CHECK_MESSAGE(columns(line) <= 120, place);
                }
            }
    }
}
