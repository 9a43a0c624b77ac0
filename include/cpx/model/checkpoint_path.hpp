// SPDX-License-Identifier: Apache-2.0
// Where a checkpoint in Megatron's torch_dist format lies: a directory of its own for the ranks that it was made for.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/mesh/mesh.hpp>

#include <array>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <utility>

namespace cpx {

/// Returns whether a checkpoint of a job is one of its mesh's own: true-on-policy with experts over ranks reads the
/// tensors of a rank as they lie; all else is laid out again when it is read.
constexpr bool checkpoint_is_of_mesh(mesh_sizes const& sizes, bool true_on_policy) {
    return true_on_policy && sizes.ep > 1;
}

/// Returns `{directory}/{model}_torch_dist`, of a mesh's own with `_tp{T}_pp{P}_ep{E}_etp{X}` behind it: what converts
/// it must have the same four sizes. An etp that is not given is 1, as `etp_of` has it. cp does not divide weights, and
/// is in no name.
///
/// Throws `cpx::error` for sizes below 1, and a model whose name is empty or has a slash. Source: miles, pull request
/// 1088.
inline std::filesystem::path checkpoint_path(std::filesystem::path const& directory, std::string const& model,
                                             mesh_sizes const& sizes, bool true_on_policy,
                                             caller here = caller::here()) {
    require(
        !model.empty() && model.find('/') == model.npos, "checkpoint_path", "model", "a name without slashes",
        [&] { return quote(model); }, here);
    int const etp = etp_of(sizes, true_on_policy);
    std::string name = model + "_torch_dist";
    for (auto const& [key, size] : std::array<std::pair<char const*, int>, 4>{
             {{"tp", sizes.tp}, {"pp", sizes.pp}, {"ep", sizes.ep}, {"etp", etp}}}) {
        require(size >= 1, "checkpoint_path", key, "at least 1", size, here);
        if (checkpoint_is_of_mesh(sizes, true_on_policy)) ((name += '_') += key) += std::to_string(size);
    }
    return directory / name;
}

/// Returns Megatron's arguments that make a mesh's own checkpoint, true on policy: all four sizes. A converter that is
/// not told a pipeline of 1 chooses one by itself, and Megatron takes tp where the etp of `etp_of`, 1, is not told.
inline std::map<std::string, std::string, std::less<>> checkpoint_arguments(mesh_sizes const& sizes,
                                                                            bool sequence_parallel) {
    std::map<std::string, std::string, std::less<>> all{
        {"tensor-model-parallel-size", std::to_string(sizes.tp)},
        {"pipeline-model-parallel-size", std::to_string(sizes.pp)},
        {"expert-model-parallel-size", std::to_string(sizes.ep)},
        {"expert-tensor-parallel-size", std::to_string(etp_of(sizes, true))}};
    bool const both = sizes.tp > 1 && sizes.ep > 1;
    if (both) all["make-vocab-size-divisible-by"] = "1";
    if (both && sequence_parallel) all["no-gradient-accumulation-fusion"] = "true";
    return all;
}

} // namespace cpx
