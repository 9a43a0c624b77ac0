// SPDX-License-Identifier: Apache-2.0
// What both directions of a conversion share.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/naming.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/model/safetensors_writer.hpp>
#include <cpx/model/shard.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace convert {

namespace fs = std::filesystem;

inline std::string show(std::vector<cpx::index_t> const& shape) {
    std::string text;
    for (auto const n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
    return '[' + text + ']';
}

/// Returns the name of a cell's file: mp_rank_TT_PPP_EEE, after Megatron's folders of tp, pp and ep ranks, and the rank
/// on etp behind them where there are not as many as on tp.
inline std::string shard_name(cpx::shard_sizes const& sizes, cpx::shard_cell const& cell) {
    std::vector<char> text(64);
    std::snprintf(text.data(), text.size(), "mp_rank_%02d_%03d_%03d", cell.tp, cell.pp, cell.ep);
    std::string name = text.data();
    if (cpx::etp_of(sizes.mesh) != sizes.mesh.tp) {
        std::snprintf(text.data(), text.size(), "_%02d", cell.etp);
        name += text.data();
    }
    return name + ".safetensors";
}

/// Returns whether a cell has a tensor. What belongs to no stage is in all of them.
inline bool owns(cpx::naming const& owners, std::string const& name, cpx::shard_cell const& cell) {
    auto const owner = owners.owner(name);
    return (!owner.stage || owner.stage->rank == cell.pp) && (!owner.ep || *owner.ep == cell.ep);
}

inline constexpr std::size_t block = 1 << 20;

/// Calls `f(first, bytes)` for all bytes of a tensor, some at a time.
template <class F>
void for_each_block(cpx::safetensors const& file, std::string_view name, F f) {
    auto const size = static_cast<std::size_t>(file.tensor(name).bytes.size());
    std::vector<std::byte> bytes(std::min(size, block));
    for (std::size_t first = 0; first < size; first += block) {
        auto const some = std::span(bytes).first(std::min(block, size - first));
        file.read_bytes(name, static_cast<cpx::index_t>(first), some);
        f(static_cast<cpx::index_t>(first), some);
    }
}
inline void copy_tensor(cpx::safetensors const& from, std::string_view name, cpx::safetensors_writer& to,
                        std::string_view new_name) {
    for_each_block(from, name, [&](cpx::index_t, std::span<std::byte> some) { to.write(new_name, some); });
}
/// Returns whether two tensors of as many bytes are equal.
inline bool equal_tensors(cpx::safetensors const& a, std::string_view in_a, cpx::safetensors const& b,
                          std::string_view in_b) {
    bool equal = true;
    std::vector<std::byte> other;
    for_each_block(a, in_a, [&](cpx::index_t first, std::span<std::byte> some) {
        other.resize(some.size());
        b.read_bytes(in_b, first, other);
        equal = equal && std::ranges::equal(some, other);
    });
    return equal;
}

inline void write_file(fs::path const& path, std::string const& text) {
    std::ofstream file(path, std::ios::binary);
    file << text;
    cpx::require(static_cast<bool>(file.flush()), path.string().c_str(), "cannot be written", "", "");
}
inline void copy_whole(fs::path const& from, fs::path const& to) {
    std::error_code failure;
    fs::copy_file(from, to, failure);
    cpx::require(!failure, from.string().c_str(), "cannot be copied", "", [&] { return failure.message(); });
}

} // namespace convert
