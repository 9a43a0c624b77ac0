// SPDX-License-Identifier: Apache-2.0
// What of a job decides its bits: the mesh, how operators run on its ranks, and what it is started with.
#pragma once

#include <cpx/core/index.hpp>
#include <cpx/mesh/mesh.hpp>

#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace cpx {

/// How attention finds its keys and values: gathered on every rank, by heads (Ulysses), or around a ring of ranks that
/// join partial softmaxes, which cpx does not.
enum class run_attention { gather, head_sharded, ring };

/// How states reach the segments of a sequence, `none` where there is none to hand on.
enum class run_carry { none, serial, scan };

/// In which order rows' contributions to the gradient of a weight are added; `none` where no gradient is computed.
enum class run_sums { none, by_row, by_rank };

/// Who trains.
enum class run_trainer { megatron, fsdp };

/// GPUs of one engine that generates. Those that experts' tensors are divided over are gpus / (ep * moe_dp).
struct rollout_sizes {
    int gpus = 1, ep = 1, moe_dp = 1;
};

/// The configuration of a job that a contract is held against. A contract looks at its own fields only.
struct run_configuration {
    using texts = std::map<std::string, std::string, std::less<>>;

    mesh_sizes mesh{}; ///< of training; cp is cpx's ranks, of which ulysses are by heads

    // how operators run
    run_attention attention = run_attention::gather;
    std::string linear = "none";       ///< the layout of linear attention's recurrence: sequential, zigzag, striped,
                                       ///< table, head_sharded or replicated; none if no layer has one
    run_carry carry = run_carry::none; ///< there
    index_t cut = 0;                   ///< sequences are cut at multiples of so many tokens there; 0: anywhere
    index_t chunk = 64;                ///< tokens of a chunk of the recurrence
    bool fixed_products = true;        ///< a row of a matrix product has the same bits beside any other rows
    run_sums sums = run_sums::none;

    // what a trainer that generates its own samples is started with
    std::string model{}; ///< as Hugging Face calls it, without its owner
    run_trainer trainer = run_trainer::megatron;
    bool sequence_parallel = false;
    rollout_sizes rollout{};
    texts arguments{};   ///< Megatron's, with or without --, as `transformer-impl`; flags have "true"
    texts environment{}; ///< variables of every rank
};

/// Returns the names that texts use.
constexpr std::string_view name_of(run_attention a) {
    return a == run_attention::gather ? "gather" : a == run_attention::head_sharded ? "head_sharded" : "ring";
}
constexpr std::string_view name_of(run_carry c) {
    return c == run_carry::none ? "none" : c == run_carry::serial ? "serial" : "scan";
}
constexpr std::string_view name_of(run_sums s) {
    return s == run_sums::none ? "none" : s == run_sums::by_row ? "by_row" : "by_rank";
}

} // namespace cpx
