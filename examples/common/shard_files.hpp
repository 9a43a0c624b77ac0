// SPDX-License-Identifier: Apache-2.0
// The files of a model's shards, which options name one by one or as the folder that they are in.
#pragma once

#include <cpx/core/error.hpp>

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

namespace examples {

/// Returns files as they are named, and for each folder its files *.safetensors, sorted. Throws `cpx::error` that names
/// a folder that cannot be read or has none.
inline std::vector<std::filesystem::path> shard_files(std::vector<std::string> const& named) {
    namespace fs = std::filesystem;
    std::vector<fs::path> files;
    for (auto const& name : named) {
        std::error_code failure;
        if (!fs::is_directory(name, failure)) {
            files.emplace_back(name); // whoever opens it says what is wrong
            continue;
        }
        std::vector<fs::path> found;
        for (auto const& entry : fs::directory_iterator(name, failure))
            if (entry.path().extension() == ".safetensors") found.push_back(entry.path());
        cpx::require(!failure, name.c_str(), "cannot be read", "a folder of shards", [&] { return failure.message(); });
        cpx::require(!found.empty(), name.c_str(), "shards", "files *.safetensors", "none");
        std::ranges::sort(found);
        files.insert(files.end(), found.begin(), found.end());
    }
    return files;
}

} // namespace examples
