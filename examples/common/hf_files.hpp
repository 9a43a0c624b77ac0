// SPDX-License-Identifier: Apache-2.0
// Which files and tensors a checkpoint of Hugging Face's had, as shards that were made of it keep it beside them.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/json.hpp>
#include <cpx/model/safetensors.hpp>

#include <nlohmann/json.hpp>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace examples {

inline constexpr char const* record_name = "hf_files.json";
inline constexpr cpx::json_limits large{.bytes = 100'000'000};

/// Throws `cpx::error` unless `name` is that of a file in the same folder.
inline void require_plain(std::string const& name, std::string const& where) {
    bool const plain = name.find_first_of("/\\") == std::string::npos && name.ends_with(".safetensors") &&
                       !name.starts_with('.') && name.find('\0') == std::string::npos;
    cpx::require(plain, where.c_str(), "name of a file", "NAME.safetensors, in the same folder",
                 [&] { return cpx::quote(name); });
}

/// What is in one file: the texts of its header, and the dtypes of its tensors.
struct hf_file {
    std::map<std::string, std::string, std::less<>> metadata;
    std::map<std::string, cpx::safetensors::dtype, std::less<>> tensors;
};
/// The files of a checkpoint by their names. Shards of it keep this, so that the way back ends where it began.
using hf_files = std::map<std::string, hf_file>;

inline std::string to_json(hf_files const& files) {
    auto all = nlohmann::json::object();
    for (auto const& [name, file] : files) {
        auto tensors = nlohmann::json::object();
        for (auto const& [tensor, type] : file.tensors) tensors[tensor] = cpx::safetensors::name_of(type);
        all[name] = {{"metadata", file.metadata}, {"tensors", std::move(tensors)}};
    }
    return all.dump();
}

/// Throws `cpx::error` that names the file if it is not such a record.
inline hf_files read_files(std::filesystem::path const& path) {
    auto const document = cpx::json_value::read(path, large);
    hf_files files;
    for (auto const& name : document.keys()) {
        require_plain(name, document.where());
        auto const from = document.at(name), texts = from.at("metadata"), tensors = from.at("tensors");
        for (auto const& key : texts.keys()) files[name].metadata[key] = texts.get<std::string>(key);
        for (auto const& tensor : tensors.keys()) {
            auto const type = cpx::safetensors::dtype_of(tensors.get<std::string>(tensor));
            if (!type) tensors.at(tensor).fail("a dtype of safetensors");
            files[name].tensors[tensor] = *type;
        }
    }
    return files;
}

/// Returns the names of all tensors of all files.
inline std::vector<std::string> tensors_of(hf_files const& files) {
    std::vector<std::string> all;
    for (auto const& [file, held] : files)
        for (auto const& [name, type] : held.tensors) all.push_back(name);
    return all;
}

} // namespace examples
