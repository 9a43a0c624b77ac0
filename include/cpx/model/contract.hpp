// SPDX-License-Identifier: Apache-2.0
// Which bits a job promises: its configuration is held against a contract before anything is launched.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/mesh/mesh.hpp>
#include <cpx/model/on_policy.hpp>
#include <cpx/model/run_configuration.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cpx {

/// The contract of cpx itself: on any number of ranks of cp the results of one, log-probabilities, loss and gradients,
/// bit for bit. It promises nothing about tp, dp, pp and ep, nor about sums that NCCL makes (NCCL_ALGO).
inline constexpr std::string_view derived_contract = "derived";

/// Why a job does not hold a contract.
struct contract_reason {
    std::string field; ///< of `run_configuration`, such as `rollout.ep` or `environment.NCCL_ALGO`
    std::string found, wanted;
    std::string profile; ///< whose row it is
    friend bool operator==(contract_reason const&, contract_reason const&) = default;
};

/// Whether a job holds a contract: if not, all reasons.
struct contract_verdict {
    std::string contract;
    std::vector<contract_reason> reasons{};

    bool holds() const { return reasons.empty(); }
    /// Returns one line without its end: "derived: holds", or "derived: carry: expected serial, got scan; cut: ...".
    std::string text() const {
        std::string line = contract + ": ";
        if (holds()) return line + "holds";
        for (auto const& r : reasons)
            line += (&r == reasons.data() ? "" : "; ") + r.field + ": expected " + r.wanted + ", got " + r.found;
        return line;
    }
};

struct contract_options {
    /// Also wants the profile of mixtures to have ep groups within those of dp, W >= tp pp cp ep. Miles' pull request
    /// 1088 does; Megatron's meshes do not need it: their ep goes over tp, cp and dp.
    bool ep_within_dp = false;
};

namespace detail {

/// Collects reasons of one profile.
class contract_check {
public:
    contract_check(std::string_view profile, run_configuration const& job)
        : job_(job), verdict_{std::string(profile)} {}

    /// What is bitwise the same on any number of ranks. Rows, from the top: a product's row is that of one rank's;
    /// attention by gathered keys or by heads sees whole sequences, as one rank does; by heads a recurrence does, too;
    /// in segments it does the operations of one rank in their order if the state itself is handed on between chunks;
    /// gradients of weights are added in the order of the batch.
    contract_verdict derived() && {
        possible(job_.mesh);
        constexpr std::string_view words = "none replicated head_sharded sequential zigzag striped table";
        want(job_.linear.find(' ') == std::string::npos && one_of(words, job_.linear), "linear", quote(job_.linear),
             "one of " + std::string(words));
        want(job_.fixed_products, "fixed_products", "false", "true");
        if (job_.mesh.cp > 1) {
            want(job_.attention != run_attention::ring, "attention", "ring", "gather or head_sharded");
            bool const whole = job_.linear == "none" || job_.linear == "head_sharded" || job_.linear == "replicated";
            want(whole || job_.carry == run_carry::serial, "carry", std::string(name_of(job_.carry)), "serial");
            want(whole || (job_.cut > 0 && job_.cut % job_.chunk == 0), "cut",
                 job_.cut > 0 ? "multiples of " + std::to_string(job_.cut) : "anywhere",
                 "multiples of the chunk, " + std::to_string(job_.chunk));
            want(job_.sums != run_sums::by_rank, "sums", "by_rank", "by_row");
        }
        return std::move(verdict_);
    }

    contract_verdict on_policy(on_policy_profile const& profile, contract_options const& options) && {
        mesh_rows(profile);
        if (profile.experts)
            expert_rows(options, etp_of(job_.mesh, true));
        else
            dense_rows();
        if (job_.trainer == run_trainer::megatron) {
            for (auto const& row : profile.arguments)
                if (applies(row.when, job_)) hold(row, "arguments.", argument(row.name), false);
            contradictions(profile);
        } else
            for (auto const& given : job_.arguments)
                want(false, "arguments." + argument_name(given.first), quote(given.second),
                     "nothing: a trainer of fsdp has no arguments of Megatron's");
        for (auto const& row : profile.environment) {
            auto const at = job_.environment.find(row.name);
            hold(row, "environment.", at == job_.environment.end() ? nullptr : &at->second, row.name == "NCCL_ALGO");
        }
        return std::move(verdict_);
    }

private:
    void want(bool holds, std::string field, std::string found, std::string wanted) {
        if (!holds)
            verdict_.reasons.push_back({std::move(field), std::move(found), std::move(wanted), verdict_.contract});
    }

    void possible(mesh_sizes const& sizes) {
        try {
            static_cast<void>(mesh(sizes));
        } catch (error const& e) {
            want(false, "mesh: " + e.problem(), e.got(), e.expected());
        }
    }
    void mesh_rows(on_policy_profile const& profile) {
        auto m = job_.mesh;
        m.etp = etp_of(job_.mesh, profile.experts);
        possible(m);
        want(m.ulysses == m.cp, "mesh.ulysses", std::to_string(m.ulysses),
             std::to_string(m.cp) + ", all of cp: a ring joins softmaxes in another order than the rollout");
        want(m.cp <= 1 || job_.attention == run_attention::head_sharded, "attention",
             std::string(name_of(job_.attention)),
             "head_sharded with cp > 1: the rollout's kernel over whole sequences");
        positive("rollout.gpus", job_.rollout.gpus);
        positive("rollout.ep", job_.rollout.ep);
        positive("rollout.moe_dp", job_.rollout.moe_dp);
    }
    void positive(char const* field, int size) { want(size >= 1, field, std::to_string(size), "at least 1"); }

    void dense_rows() {
        want(job_.mesh.ep <= 1, "mesh.ep", std::to_string(job_.mesh.ep), "1: it trains over dp, tp, pp and ulysses");
        want(job_.rollout.ep <= 1, "rollout.ep", std::to_string(job_.rollout.ep), "1: it generates over dp and tp");
        want(job_.rollout.moe_dp <= 1, "rollout.moe_dp", std::to_string(job_.rollout.moe_dp),
             "1: it generates over dp and tp");
        want(!job_.sequence_parallel, "sequence_parallel", "true", "false");
    }
    void expert_rows(contract_options const& options, int etp) {
        auto const& m = job_.mesh;
        auto const& r = job_.rollout;
        want(m.tp <= 1 || m.ep <= 1 || job_.sequence_parallel, "sequence_parallel", "false",
             "true: tp > 1 with ep > 1 requires sequence parallel");
        if (r.gpus >= 1 && r.ep >= 1 && r.moe_dp >= 1) {
            index_t const shares = index_t{r.ep} * r.moe_dp;
            want(r.gpus == shares * etp, "rollout.gpus",
                 std::to_string(r.gpus) + " / (" + std::to_string(r.ep) + " * " + std::to_string(r.moe_dp) + ")",
                 "SGLang MoE TP to match Megatron's etp = " + std::to_string(etp));
        }
        if (!options.ep_within_dp || m.tp < 1 || m.pp < 1 || m.cp < 1 || m.ep < 1) return;
        index_t const dense = index_t{m.tp} * m.pp * m.cp, needed = dense * m.ep;
        want(m.world % needed == 0, "mesh.world", std::to_string(m.world),
             (m.world < needed ? "at least " : "a multiple of ") + std::to_string(needed) +
                 " train GPUs, tp * pp * cp * ep");
    }

    /// Arguments that are not those of the job itself, or of each other.
    void contradictions(on_policy_profile const& profile) {
        auto const flag = [](std::string const& value) { return value.empty() ? std::string("true") : value; };
        std::map<std::string, std::string> values;
        for (auto const& [given, value] : job_.arguments) {
            auto const at = values.emplace(argument_name(given), flag(value)).first;
            want(at->second == flag(value), "arguments." + at->first, quote(at->second) + " and " + quote(value),
                 "one value, however often it is given");
        }
        auto const is = [&](char const* name, std::string const& wanted) {
            auto const at = values.find(name);
            if (at != values.end())
                want(at->second == wanted, std::string("arguments.") + name, quote(at->second),
                     wanted + ", as the job has it");
        };
        auto const& m = job_.mesh;
        is("sequence-parallel", profile.sequence_parallel && job_.sequence_parallel ? "true" : "false");
        is("tensor-model-parallel-size", std::to_string(m.tp));
        is("context-parallel-size", std::to_string(m.cp));
        is("pipeline-model-parallel-size", std::to_string(m.pp));
        is("expert-model-parallel-size", std::to_string(m.ep));
        bool const by_row = profile.experts && applies(row_when::tp_with_whole_experts, job_);
        if ((m.etp != 0 || profile.experts) && !by_row)
            is("expert-tensor-parallel-size", std::to_string(etp_of(m, profile.experts)));
        // Megatron's --no-rope-fusion is another name of apply_rope_fusion, turned off.
        for (auto const& [name, value] : values)
            for (std::string const before : {"", "apply-"})
                if (name.starts_with("no-"))
                    if (auto const at = values.find(before + name.substr(3)); at != values.end())
                        want((at->second == "false") != (value == "false"), "arguments." + at->first, quote(at->second),
                             std::string(value == "false" ? "true" : "false or nothing") + ", beside " + name);
    }

    /// Returns the value of an argument, however it is spelled; null if it is not there.
    std::string const* argument(std::string_view name) const {
        for (auto const& [given, value] : job_.arguments)
            if (argument_name(given) == name) return &value;
        return nullptr;
    }
    void hold(on_policy_row const& row, char const* group, std::string const* found, bool list) {
        bool const is_there = found && *found != "false";
        bool const among = found && (list ? every_in(row.values, *found) : one_of(row.values, *found));
        std::string wanted;
        for (char const c : row.values) wanted += c == ' ' ? std::string(" or ") : std::string(1, c);
        bool holds = true;
        switch (row.wants) {
        case row_wants::value: holds = among; break;
        case row_wants::zero: holds = found && is_zero(*found); break;
        case row_wants::absent:
            holds = !is_there;
            wanted = "nothing";
            break;
        case row_wants::no_other:
            holds = !is_there || among;
            wanted = "nothing or " + wanted;
            break;
        case row_wants::not_false:
            holds = !found || among;
            wanted = "nothing or " + wanted;
            break;
        }
        want(holds, group + std::string(row.name), found ? quote(*found) : "nothing", wanted);
    }

    static bool one_of(std::string_view values, std::string_view value) {
        if (value.empty()) return values == "true"; // a flag
        for (std::size_t first = 0; first <= values.size();) {
            auto const end = std::min(values.find(' ', first), values.size());
            if (values.substr(first, end - first) == value) return true;
            first = end + 1;
        }
        return false;
    }
    static bool every_in(std::string_view values, std::string_view list) {
        for (std::size_t first = 0; first <= list.size();) {
            auto const end = std::min(list.find(',', first), list.size());
            if (end == first || !one_of(values, list.substr(first, end - first))) return false;
            first = end + 1;
        }
        return true;
    }
    static bool is_zero(std::string const& text) {
        char* end = nullptr;
        double const number = std::strtod(text.c_str(), &end);
        return !text.empty() && end == text.c_str() + text.size() && number == 0;
    }

    run_configuration const& job_;
    contract_verdict verdict_;
};

} // namespace detail

/// Holds a job against a contract: `derived`, or the name of one of `on_policy_profiles`. Where the mesh says no etp, a
/// profile of mixtures takes 1, not tp (`etp_of`), and wants Megatron told so.
///
/// Throws `cpx::error` for another contract or a model that it does not know, as `plan_on_policy` does, and for a chunk
/// of no tokens.
inline contract_verdict check_contract(std::string_view contract, run_configuration const& job,
                                       contract_options const& options = {}, caller here = caller::here()) {
    require(job.chunk >= 1, "contract", "chunk", "at least 1", job.chunk, here);
    if (contract == derived_contract) return detail::contract_check(contract, job).derived();
    auto const& profile = detail::profile_of(contract, job.model, here);
    return detail::contract_check(contract, job).on_policy(profile, options);
}

/// Throws the `cpx::error` that gives all reasons, unless a job holds a contract. To be called before launch.
inline void require_contract(std::string_view contract, run_configuration const& job,
                             contract_options const& options = {}, caller here = caller::here()) {
    auto const verdict = check_contract(contract, job, options, here);
    if (verdict.holds()) return;
    std::string list = "this job does not hold it:";
    for (auto const& r : verdict.reasons)
        list += "\n  " + r.field + ": expected " + r.wanted + ", got " + r.found + " (" + r.profile + ")";
    throw error("contract " + verdict.contract, list, "", "", here);
}

/// Returns whether all ranks must meet before and after some of them log: where the mode is on, ranks that share a
/// model, by tp, pp, cp or ep, do not run ahead of each other. Known from the mesh alone, and so the same on all ranks,
/// or they would wait for each other for ever.
constexpr bool ranks_meet_to_log(mesh const& ranks, bool true_on_policy) {
    return true_on_policy && (ranks.size(axis::tp | axis::cp | axis::pp) > 1 || ranks.size(axis::ep) > 1);
}

} // namespace cpx
