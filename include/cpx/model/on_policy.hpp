// SPDX-License-Identifier: Apache-2.0
// What two profiles want of a trainer whose log-probabilities must be its rollout engine's, bit for bit: as data.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/run_configuration.hpp>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cpx {

/// What a row of a profile wants of an argument or a variable.
enum class row_wants {
    value,    ///< one of its values; the first is what a plan sets
    zero,     ///< a number that is 0
    absent,   ///< not to be there
    no_other, ///< not to be there, or one of its values
    not_false ///< not to be turned off
};

/// When a row applies.
enum class row_when { always, ulysses, tp_and_ep, tp_and_ep_and_sp, tp_with_whole_experts };

/// One argument of Megatron, or one variable of the environment.
struct on_policy_row {
    std::string_view name;
    row_wants wants = row_wants::value;
    std::string_view values = "true"; ///< separated by blanks
    bool set = true;                  ///< a plan sets it; else it is the job's own
    row_when when = row_when::always;
};

/// A profile: a contract's name, the models that it knows and what it wants. Its meshes are in `check_contract`.
struct on_policy_profile {
    std::string_view name;
    std::span<std::string_view const> models;
    std::span<on_policy_row const> arguments, environment;
    bool experts = false;           ///< of a mixture: ep, and an etp of its own
    bool sequence_parallel = false; ///< may be on; if it may not, a plan turns it off
};

namespace detail {

using enum row_wants;

inline constexpr auto dense_models =
    std::to_array<std::string_view>({"Qwen3-0.6B", "Qwen3-4B", "Qwen3-4B-Base", "Qwen3-4B-Instruct-2507"});
inline constexpr auto moe_models = std::to_array<std::string_view>({"Qwen3-30B-A3B"});

/// Values that Megatron-LM's deterministic mode takes. NCCL_ALGO is a list of them, separated by commas.
inline constexpr auto dense_environment =
    std::to_array<on_policy_row>({{"NCCL_ALGO", value, "Ring CollnetDirect CollnetChain ^NVLS"},
                                  {"NVTE_ALLOW_NONDETERMINISTIC_ALGO", value, "0"},
                                  {"CUBLAS_WORKSPACE_CONFIG", value, ":4096:8 :16:8"}});
inline constexpr auto moe_environment = std::to_array<on_policy_row>(
    {dense_environment[0], dense_environment[1], dense_environment[2], {"NCCL_NVLS_ENABLE", value, "0"}});

/// The first six are what a plan sets; the others Megatron-LM asserts in its deterministic and batch-invariant modes.
inline constexpr auto dense_arguments =
    std::to_array<on_policy_row>({{"true-on-policy-contract", value, "qwen3_dense_true_on_policy_v1"},
                                  {"transformer-impl", value, "local"},
                                  {"use-cpu-initialization"},
                                  {"batch-invariant-mode"},
                                  {"no-bias-swiglu-fusion"},
                                  {"no-rope-fusion"},
                                  {"bf16", value, "true", false},
                                  {"attention-dropout", zero, "0", false},
                                  {"hidden-dropout", zero, "0", false},
                                  {"cross-entropy-loss-fusion", absent},
                                  {"tp-comm-overlap", absent},
                                  {"fp8-format", absent},
                                  {"fp8", absent},
                                  {"fp16", absent},
                                  {"deterministic-mode", not_false},
                                  {"cp-comm-type", no_other, "a2a", false, row_when::ulysses}});
inline constexpr auto moe_arguments = [] {
    std::array<on_policy_row, dense_arguments.size() + 7> rows{};
    std::ranges::copy(dense_arguments, rows.begin());
    rows[0].values = "qwen3_moe_true_on_policy_v1";
    auto next = rows.begin() + dense_arguments.size();
    *next++ = {"moe-token-dispatcher-type", value, "alltoall"};
    *next++ = {"moe-permute-fusion", absent};
    *next++ = {"moe-expert-capacity-factor", absent};
    *next++ = {"moe-pad-expert-input-to-capacity", absent};
    *next++ = {"make-vocab-size-divisible-by", value, "1", true, row_when::tp_and_ep};
    *next++ = {"no-gradient-accumulation-fusion", value, "true", true, row_when::tp_and_ep_and_sp};
    *next++ = {"expert-tensor-parallel-size", value, "1", true, row_when::tp_with_whole_experts};
    return rows;
}();

} // namespace detail

/// The profiles, of miles: the dense one as its main branch has it, that of mixtures as its pull request 1088 does.
inline constexpr auto on_policy_profiles = std::to_array<on_policy_profile>(
    {{"qwen3_dense_true_on_policy_v1", detail::dense_models, detail::dense_arguments, detail::dense_environment},
     {"qwen3_moe_true_on_policy_v1", detail::moe_models, detail::moe_arguments, detail::moe_environment, true, true}});

/// What a profile makes of a job: what both sides are told.
struct on_policy_plan {
    std::string target{};      ///< of the rollout engine: fsdp, or fsdp_tp where a row-parallel product is divided
    std::string attention{};   ///< the kernel of a trainer that takes its name; Megatron's `local` has its own
    bool tp_invariant = false; ///< row-parallel products and their sums in an order that tp does not change
    bool ep_invariant = false; ///< tokens go to experts and back in an order that ep does not change
    std::string tie_break{};   ///< between experts of one score
    std::optional<bool> sequence_parallel{};             ///< unless the job's own remains
    std::optional<int> etp{};                            ///< of a mixture's mesh, as `etp_of` has it
    run_configuration::texts arguments{}, environment{}; ///< to be set
};

namespace detail {

/// Returns the profile of a contract and a model. Throws if there is none.
inline on_policy_profile const& profile_of(std::string_view contract, std::string_view model, caller here) {
    auto const known = std::ranges::find(on_policy_profiles, contract, &on_policy_profile::name);
    std::string list = "derived";
    for (auto const& p : on_policy_profiles) list += ", " + std::string(p.name);
    if (known == on_policy_profiles.end())
        throw error("contract", "Unsupported true-on-policy contract", list, quote(contract), here);
    list.clear();
    for (auto const m : known->models) list += (list.empty() ? "" : ", ") + std::string(m);
    if (std::ranges::find(known->models, model) == known->models.end())
        throw error(std::string(contract), "model " + quote(model) + " does not have a model profile", list, "", here);
    return *known;
}

inline bool applies(row_when when, run_configuration const& job) {
    bool const both = job.mesh.tp > 1 && job.mesh.ep > 1;
    switch (when) {
    case row_when::always: return true;
    case row_when::ulysses: return job.mesh.cp > 1;
    case row_when::tp_and_ep: return both;
    case row_when::tp_and_ep_and_sp: return both && job.sequence_parallel;
    case row_when::tp_with_whole_experts: return job.mesh.tp > 1 && etp_of(job.mesh, true) == 1;
    }
    return false;
}

/// Returns an argument's name as rows have it: `--rope_theta` is `rope-theta`.
inline std::string argument_name(std::string_view given) {
    if (given.starts_with("--")) given.remove_prefix(2);
    std::string name(given);
    std::ranges::replace(name, '_', '-');
    return name;
}
inline std::string first_of(std::string_view values) { return std::string(values.substr(0, values.find(' '))); }

} // namespace detail

/// Returns what a contract makes of a job, whether or not the job can hold it, which `check_contract` says. Without a
/// contract, "", nothing.
///
/// Throws `cpx::error` for a contract that is none of `on_policy_profiles` ("Unsupported true-on-policy contract"), and
/// for a model of which the contract has no profile ("does not have a model profile").
inline on_policy_plan plan_on_policy(std::string_view contract, run_configuration const& job,
                                     caller here = caller::here()) {
    on_policy_plan plan;
    if (contract.empty()) return plan;
    auto const& profile = detail::profile_of(contract, job.model, here);
    if (profile.experts) plan.etp = etp_of(job.mesh, true);
    plan.tp_invariant = job.mesh.tp > 1 || job.rollout.gpus > 1 || plan.etp.value_or(1) > 1;
    plan.ep_invariant = profile.experts && (job.mesh.ep > 1 || job.rollout.ep > 1);
    plan.target = plan.tp_invariant ? "fsdp_tp" : "fsdp";
    if (profile.experts) plan.tie_break = "stable_sort";
    if (job.trainer == run_trainer::fsdp) plan.attention = "flash_attention_3";
    if (!profile.sequence_parallel) plan.sequence_parallel = false;
    auto const add = [&](std::span<on_policy_row const> rows, run_configuration::texts& to) {
        for (auto const& row : rows)
            if (row.set && row.wants == row_wants::value && detail::applies(row.when, job))
                to.emplace(row.name, detail::first_of(row.values));
    };
    if (job.trainer == run_trainer::megatron) add(profile.arguments, plan.arguments);
    add(profile.environment, plan.environment);
    return plan;
}

/// Returns the job with what a plan sets. What the job had of it is replaced, however it was spelled.
inline run_configuration with_plan(run_configuration job, on_policy_plan const& plan) {
    std::erase_if(job.arguments, [&](auto const& given) {
        auto const name = detail::argument_name(given.first);
        return plan.arguments.contains(name) || (plan.sequence_parallel && name == "sequence-parallel");
    });
    for (auto const& [name, value] : plan.arguments) job.arguments.insert_or_assign(name, value);
    for (auto const& [name, value] : plan.environment) job.environment.insert_or_assign(name, value);
    job.sequence_parallel = plan.sequence_parallel.value_or(job.sequence_parallel);
    job.mesh.etp = plan.etp.value_or(job.mesh.etp);
    return job;
}

} // namespace cpx
