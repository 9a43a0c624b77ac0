// SPDX-License-Identifier: Apache-2.0
// A checkpoint as Hugging Face's library keeps it: config.json, one or several files of tensors, perhaps their index.
#pragma once

#include "../common/hf_files.hpp"

#include <cpx/core/error.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/json.hpp>
#include <cpx/model/safetensors.hpp>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace convert {

namespace fs = std::filesystem;
using dtype = cpx::safetensors::dtype;
using examples::hf_files;

inline constexpr char const* config_name = "config.json";
inline constexpr char const* weights_name = "model.safetensors";
inline constexpr char const* index_name = "model.safetensors.index.json";

/// The tensors of a checkpoint, in whichever file they are.
class hf_folder {
public:
    /// Throws `cpx::error` that names the file that is missing or wrong, or a tensor of which index and files disagree.
    explicit hf_folder(fs::path const& folder) : path_(folder) {
        auto const index = folder / index_name;
        std::map<std::string, std::string, std::less<>> wanted; // by tensor
        if (fs::exists(index)) {
            auto const document = cpx::json_value::read(index, examples::large);
            auto const map = document.at("weight_map");
            for (auto const& tensor : map.keys()) wanted[tensor] = map.get<std::string>(tensor);
            for (auto const& [tensor, file] : wanted) {
                examples::require_plain(file, document.where());
                if (!files_.contains(file)) files_.emplace(file, cpx::safetensors(folder / file));
            }
        } else {
            files_.emplace(weights_name, cpx::safetensors(folder / weights_name));
        }
        for (auto const& [name, file] : files_)
            for (auto const& tensor : file.names()) {
                place_.emplace(tensor, &file);
                if (wanted.empty()) continue;
                auto const found = wanted.find(tensor);
                cpx::require(
                    found != wanted.end() && found->second == name, file.where().c_str(),
                    ("file of tensor " + cpx::quote(tensor)).c_str(),
                    [&] { return found == wanted.end() ? "one that the index names" : found->second; }, name);
            }
        for (auto const& [tensor, file] : wanted) static_cast<void>(files_.at(file).tensor(tensor));
    }

    fs::path const& path() const { return path_; }
    bool contains(std::string_view tensor) const { return place_.find(tensor) != place_.end(); }
    /// Returns the names of all tensors, sorted.
    std::vector<std::string> names() const {
        std::vector<std::string> all;
        for (auto const& [name, file] : place_) all.push_back(name);
        return all;
    }
    /// Returns the file of a tensor. Throws `cpx::error` if there is none of that name.
    cpx::safetensors const& file(std::string_view tensor) const {
        auto const found = place_.find(tensor);
        cpx::require(
            found != place_.end(), path_.string().c_str(), "tensors",
            [&] { return cpx::quote(tensor) + ", which the model of config.json has"; }, "none of that name");
        return *found->second;
    }
    cpx::safetensors::tensor_info const& tensor(std::string_view name) const { return file(name).tensor(name); }

    hf_files record() const {
        hf_files all;
        for (auto const& [name, file] : files_) {
            all[name].metadata = file.metadata();
            for (auto const& tensor : file.names()) all[name].tensors[tensor] = file.tensor(tensor).dtype;
        }
        return all;
    }

private:
    fs::path path_;
    std::map<std::string, cpx::safetensors> files_;
    std::map<std::string, cpx::safetensors const*, std::less<>> place_;
};

} // namespace convert
