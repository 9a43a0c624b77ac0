// SPDX-License-Identifier: Apache-2.0
// Tensors of every dtype with any bytes, to be written and read back.
#pragma once

#include <cpx/model/safetensors_writer.hpp>

#include <support/random.hpp>

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

namespace random_tensors {

struct tensor {
    cpx::safetensors_writer::tensor_info info;
    std::vector<std::byte> bytes;
};

/// Returns a name of dots, digits, quotes and characters outside ASCII.
inline std::string name(support::splitmix& numbers) {
    static std::vector<std::string> const parts = {
        "layers", ".", "7", "weight", "\"", "\\", "\n", "\xc3\xa9", "\x7f", "\xf0\x9f\x99\x82", "\x01", "/", " "};
    std::string text;
    for (auto n = numbers.between(0, 6); n > 0; --n)
        text += parts[static_cast<std::size_t>(numbers.between(0, std::ssize(parts) - 1))];
    return text;
}

/// Returns up to 12 tensors with names of their own, each of which ends with its place in the list.
inline std::vector<tensor> make(support::splitmix& numbers) {
    std::vector<tensor> tensors;
    for (auto n = numbers.between(0, 12); n > 0; --n) {
        tensor t;
        t.info.name = name(numbers) + std::to_string(tensors.size());
        t.info.dtype = static_cast<cpx::safetensors::dtype>(numbers.between(0, 12));
        for (auto axes = numbers.between(0, 3); axes > 0; --axes) t.info.shape.push_back(numbers.between(0, 5));
        auto const size = cpx::safetensors::bytes_of(t.info.dtype, t.info.shape).value();
        for (cpx::index_t i = 0; i < size; ++i) t.bytes.push_back(static_cast<std::byte>(numbers.next() & 255));
        tensors.push_back(t);
    }
    return tensors;
}

inline cpx::safetensors_writer::texts texts(support::splitmix& numbers, cpx::index_t most = 4) {
    cpx::safetensors_writer::texts all;
    for (auto n = numbers.between(0, most); n > 0; --n) all[name(numbers)] = name(numbers);
    return all;
}

inline void write(std::filesystem::path const& path, std::vector<tensor> const& tensors,
                  cpx::safetensors_writer::texts const& texts) {
    std::vector<cpx::safetensors_writer::tensor_info> declared;
    for (auto const& t : tensors) declared.push_back(t.info);
    cpx::safetensors_writer out(path, declared, texts);
    for (auto const& t : tensors) out.write(t.info.name, t.bytes);
    out.finish();
}

} // namespace random_tensors
