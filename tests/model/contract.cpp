// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/contract.hpp>

#include <cpx/layout/sequential.hpp>
#include <cpx/layout/sharding.hpp>
#include <cpx/model/checkpoint_path.hpp>
#include <cpx/plan/carry.hpp>

#include <doctest/doctest.h>

#include <support/rejects.hpp>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using namespace cpx;
using support::rejects;

namespace {

std::string const dense = "qwen3_dense_true_on_policy_v1", moe = "qwen3_moe_true_on_policy_v1";

/// Returns a run of 8 ranks that does all that Megatron asserts by itself; `plan_on_policy` knows the rest.
run_configuration run_of(std::string const& model, int tp, int ep, int cp, int engine, int rollout_ep, int pp = 1) {
    run_configuration run;
    run.mesh = {.world = 8, .tp = tp, .cp = cp, .pp = pp, .ep = ep, .etp = ep > 1 ? 1 : 0, .ulysses = cp};
    run.attention = cp > 1 ? run_attention::head_sharded : run_attention::gather;
    run.model = model;
    run.rollout = {engine, rollout_ep, 1};
    run.arguments = {{"bf16", "true"}, {"attention-dropout", "0.0"}, {"--hidden_dropout", "0"}};
    return run;
}
run_configuration dense_run(int tp = 1, int cp = 1, int engine = 1) { return run_of("Qwen3-4B", tp, 1, cp, engine, 1); }
run_configuration planned(std::string const& contract, run_configuration const& run) {
    return with_plan(run, plan_on_policy(contract, run));
}
/// Returns the verdict on a run with what its plan sets.
std::string verdict(std::string const& contract, run_configuration const& run, contract_options options = {}) {
    return check_contract(contract, planned(contract, run), options).text();
}
bool contains(std::string const& text, std::string const& passage) { return text.find(passage) != text.npos; }

std::vector<std::string> fields(contract_verdict const& v) {
    std::vector<std::string> names;
    for (auto const& r : v.reasons) names.push_back(r.field);
    return names;
}

} // namespace

// Tables: miles, its main branch for the dense profile, pull request 1088 for mixtures.
TEST_SUITE("model") {
    TEST_CASE("the target is fsdp, and fsdp_tp where training or an engine divides products") {
        auto const target = [](int tp, int engine) { return plan_on_policy(dense, dense_run(tp, 1, engine)).target; };
        CHECK(target(1, 1) == "fsdp");
        CHECK(target(2, 1) == "fsdp_tp");
        CHECK(target(1, 2) == "fsdp_tp");
        CHECK(target(4, 8) == "fsdp_tp");
    }

    TEST_CASE("tp 2, cp 4 and engines of 8 have these arguments, these three variables, and no sequence parallelism") {
        auto run = dense_run(2, 4, 8);
        run.sequence_parallel = true;
        auto const plan = plan_on_policy(dense, run);
        CHECK(plan.arguments == run_configuration::texts{{"true-on-policy-contract", dense},
                                                         {"transformer-impl", "local"},
                                                         {"use-cpu-initialization", "true"},
                                                         {"batch-invariant-mode", "true"},
                                                         {"no-bias-swiglu-fusion", "true"},
                                                         {"no-rope-fusion", "true"}});
        CHECK(plan.environment == run_configuration::texts{{"NCCL_ALGO", "Ring"},
                                                           {"NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"},
                                                           {"CUBLAS_WORKSPACE_CONFIG", ":4096:8"}});
        CHECK(plan.sequence_parallel == false);
        CHECK(plan.attention == "");
        CHECK(plan.target == "fsdp_tp");
        CHECK(fields(check_contract(dense, run)) ==
              std::vector<std::string>{
                  "sequence_parallel", "arguments.true-on-policy-contract", "arguments.transformer-impl",
                  "arguments.use-cpu-initialization", "arguments.batch-invariant-mode",
                  "arguments.no-bias-swiglu-fusion", "arguments.no-rope-fusion", "environment.NCCL_ALGO",
                  "environment.NVTE_ALLOW_NONDETERMINISTIC_ALGO", "environment.CUBLAS_WORKSPACE_CONFIG"});
        CHECK(verdict(dense, run) == dense + ": holds");
        run.mesh.cp = run.mesh.ulysses = 5;
        CHECK(contains(verdict(dense, run), "multiple of tp, cp, pp"));
    }

    TEST_CASE("another contract, and a model that it does not know, are errors") {
        auto const run = dense_run();
        for (auto const& call :
             std::vector<std::function<void()>>{[&] { plan_on_policy("qwen3_dense_true_on_policy_v2", run); },
                                                [&] { check_contract("qwen3_dense_true_on_policy_v2", run); },
                                                [&] { require_contract("qwen3_dense_true_on_policy_v2", run); }})
            rejects({"contract.cpp:", "contract: Unsupported true-on-policy contract: expected derived, " + dense +
                                          ", " + moe + ", got \"qwen3_dense_true_on_policy_v2\""},
                    call);
        rejects({"Unsupported true-on-policy contract"}, [&] { check_contract("", run); });
        for (auto const& [contract, model] : {std::pair{dense, "Qwen3-8B"},
                                              {dense, "Qwen3-30B-A3B"},
                                              {dense, ""},
                                              {moe, "Qwen3-4B"},
                                              {moe, "Qwen3-30B"}})
            rejects(
                {contract + ": model \"" + model + "\" does not have a model profile: expected Qwen3-"},
                [&, contract = contract, model = model] { check_contract(contract, run_of(model, 1, 1, 1, 1, 1)); });
        for (char const* model : {"Qwen3-0.6B", "Qwen3-4B", "Qwen3-4B-Base", "Qwen3-4B-Instruct-2507"})
            CHECK(verdict(dense, run_of(model, 1, 1, 1, 1, 1)) == dense + ": holds");
        CHECK(verdict(moe, run_of("Qwen3-30B-A3B", 1, 1, 1, 1, 1)) == moe + ": holds");
    }

    TEST_CASE("a trainer of fsdp has the attention of version 3 and none of Megatron's arguments") {
        auto run = dense_run();
        run.trainer = run_trainer::fsdp;
        run.arguments.clear();
        auto const plan = plan_on_policy(dense, run);
        CHECK(plan.attention == "flash_attention_3");
        CHECK(plan.arguments.empty());
        CHECK(verdict(dense, run) == dense + ": holds");
    }

    TEST_CASE("without a contract a plan is empty and changes nothing") {
        auto run = dense_run(2, 4, 8);
        run.sequence_parallel = true;
        run.model = "any";
        auto const plan = plan_on_policy("", run);
        CHECK(plan.target.empty());
        CHECK(plan.attention.empty());
        CHECK(plan.tie_break.empty());
        CHECK(!plan.tp_invariant);
        CHECK(!plan.ep_invariant);
        auto const same = with_plan(run, plan);
        CHECK(same.arguments == run.arguments);
        CHECK(same.environment == run.environment);
        CHECK(same.sequence_parallel);
    }

    TEST_CASE("mixtures run where an engine's experts are divided as the trainer's are") {
        auto const run = [](int tp, int ep, int cp, int engine, int rollout_ep, int pp = 1) {
            auto made = run_of("Qwen3-30B-A3B", tp, ep, cp, engine, rollout_ep, pp);
            made.mesh.etp = 1;
            return made;
        };
        contract_options const strict{.ep_within_dp = true};
        std::string const holds = moe + ": holds";
        for (auto const& options : {contract_options{}, strict}) {
            CHECK(verdict(moe, run(1, 4, 2, 4, 4), options) == holds); // (tp, ep, cp, engine)
            CHECK(verdict(moe, run(4, 1, 2, 1, 1), options) == holds);
            CHECK(verdict(moe, run(1, 4, 1, 4, 4, 2), options) == holds); // pp 2
            auto sp = run(2, 4, 1, 4, 4);
            CHECK(check_contract(moe, planned(moe, sp), options).reasons ==
                  std::vector<contract_reason>{
                      {"sequence_parallel", "false", "true: tp > 1 with ep > 1 requires sequence parallel", moe}});
            sp.sequence_parallel = true;
            CHECK(verdict(moe, sp, options) == holds);
            CHECK(plan_on_policy(moe, sp).arguments.at("make-vocab-size-divisible-by") == "1");
            CHECK(plan_on_policy(moe, sp).arguments.contains("no-gradient-accumulation-fusion"));
            auto engine = run(2, 2, 1, 4, 2, 2);
            engine.sequence_parallel = true;
            CHECK(check_contract(moe, planned(moe, engine), options).reasons ==
                  std::vector<contract_reason>{
                      {"rollout.gpus", "4 / (2 * 1)", "SGLang MoE TP to match Megatron's etp = 1", moe}});
        }
        // a rule of the pull request alone: Megatron's ep goes over cp, too
        CHECK(verdict(moe, run(1, 4, 4, 4, 4)) == holds);
        CHECK(verdict(moe, run(1, 4, 4, 4, 4), strict) ==
              moe + ": mesh.world: expected at least 16 train GPUs, tp * pp * cp * ep, got 8");
        auto uneven = run(1, 4, 1, 4, 4);
        uneven.mesh.world = 20;
        uneven.mesh.cp = uneven.mesh.ulysses = 1;
        CHECK(verdict(moe, uneven, strict) == holds);
    }

    // (tp, ep, cp, engine), as pull request 1088 has them: without etp.
    TEST_CASE("a mixture's experts are whole unless etp is given, and Megatron is told so") {
        for (auto const& [tp, ep, cp, engine, rollout_ep] :
             {std::array{1, 4, 2, 4, 4}, std::array{4, 1, 2, 1, 1}, std::array{2, 1, 2, 1, 1}}) {
            auto run = run_of("Qwen3-30B-A3B", tp, ep, cp, engine, rollout_ep);
            run.mesh.etp = 0;
            CHECK(verdict(moe, run) == moe + ": holds");
            CHECK(plan_on_policy(moe, run).arguments.contains("expert-tensor-parallel-size") == (tp > 1));
            if (tp == 1) continue;
            auto set = planned(moe, run);
            set.arguments.erase("expert-tensor-parallel-size");
            CHECK(fields(check_contract(moe, set)) ==
                  std::vector<std::string>{"arguments.expert-tensor-parallel-size"});
            run.mesh.etp = tp;
            CHECK(fields(check_contract(moe, planned(moe, run))) == std::vector<std::string>{"rollout.gpus"});
        }
    }

    // vision_and_names 3.6: a path of tp 2, pp 2, ep 2 without etp ends with etp1.
    TEST_CASE("an etp that is not given is one number for contract, plan, path, arguments and mesh of a run") {
        for (auto const& [given_tp, pp, ep] : {std::array{2, 2, 2}, std::array{2, 1, 4}, std::array{4, 1, 2}})
            for (int const given : {0, 1, 2}) {
                auto const& tp = given_tp;
                auto run = run_of("Qwen3-30B-A3B", tp, ep, 1, ep * std::max(given, 1), ep, pp);
                run.mesh.etp = given;
                run.sequence_parallel = true;
                CAPTURE(tp);
                CAPTURE(given);
                auto const set = planned(moe, run);
                CHECK(check_contract(moe, set).text() == moe + ": holds");
                int const etp = mesh(set.mesh).size(axis::etp);
                CHECK(etp == std::max(given, 1));
                auto const wanted = std::to_string(etp);
                CHECK(plan_on_policy(moe, run).etp == etp);
                for (auto const& sizes : {run.mesh, set.mesh}) {
                    CHECK(checkpoint_arguments(sizes, true).at("expert-tensor-parallel-size") == wanted);
                    CHECK(checkpoint_path("", "m", sizes, true).string().ends_with("_etp" + wanted));
                }
                auto const told = set.arguments.find("expert-tensor-parallel-size");
                CHECK((told == set.arguments.end()) == (etp != 1));
                if (told != set.arguments.end()) CHECK(told->second == wanted);
            }
        CHECK(mesh({.world = 8, .tp = 2, .ep = 4}).size(axis::etp) == 2); // of no such run: Megatron's default
        CHECK(planned(dense, dense_run(2)).mesh.etp == 0);
    }

    TEST_CASE("arguments that contradict the run or each other are refused, those that agree are not") {
        auto const good = planned(dense, dense_run(2, 4, 8));
        auto const with = [&](char const* name, char const* value) {
            auto run = good;
            run.arguments[name] = value;
            return fields(check_contract(dense, run));
        };
        using list = std::vector<std::string>;
        for (auto const& [given_name, same, other] :
             {std::array{"context-parallel-size", "4", "1"}, std::array{"tensor-model-parallel-size", "2", "4"},
              std::array{"pipeline-model-parallel-size", "1", "2"}, std::array{"expert-model-parallel-size", "1", "8"},
              std::array{"sequence-parallel", "false", "true"}, std::array{"fp16", "false", "true"},
              std::array{"fp8", "false", "e4m3"}, std::array{"sequence-parallel", "false", ""},
              std::array{"apply-rope-fusion", "false", "true"}, std::array{"rope-fusion", "false", ""},
              std::array{"bias-swiglu-fusion", "false", "true"}, std::array{"deterministic-mode", "true", "false"}}) {
            auto const& name = given_name;
            CAPTURE(name);
            CHECK(with(name, same).empty());
            CHECK(with(name, other) == list{std::string("arguments.") + name});
        }
        CHECK(with("--transformer_impl", "local").empty());
        CHECK(with("--transformer_impl", "transformer_engine").size() >= 1);
        CHECK(with("transformer_impl", "transformer_engine").size() >= 1);
        CHECK(with("--bf16", "").empty());
        CHECK(with("--bf16", "false").size() >= 1);
        auto mixture = planned(moe, run_of("Qwen3-30B-A3B", 1, 4, 2, 4, 4));
        mixture.arguments["expert_tensor_parallel_size"] = "2";
        CHECK(fields(check_contract(moe, mixture)) == list{"arguments.expert-tensor-parallel-size"});

        auto spelled = dense_run();
        spelled.sequence_parallel = true;
        spelled.arguments["--sequence_parallel"] = "true";
        CHECK(verdict(dense, spelled) == dense + ": holds");
        spelled.trainer = run_trainer::fsdp;
        spelled.arguments = {{"--bf16", ""}, {"tp", "1"}};
        CHECK(fields(check_contract(dense, planned(dense, spelled))) == list{"arguments.bf16", "arguments.tp"});
    }

    TEST_CASE("derived does not hold for meshes that cannot be, nor for layouts that nobody knows") {
        run_configuration run;
        for (auto const& [world, cp] : {std::array{7, 4}, std::array{1, 0}, std::array{1, -3}, std::array{0, 1}}) {
            run.mesh = {.world = world, .cp = cp};
            CHECK(contains(check_contract("derived", run).text(), "derived: mesh: "));
        }
        run.mesh = {};
        for (char const* word : {"bogus", "", "zigzag striped"}) {
            run.linear = word;
            CHECK(fields(check_contract("derived", run)) == std::vector<std::string>{"linear"});
        }
    }

    TEST_CASE("what is invariant follows from what is divided, on either side") {
        auto plan = [](int ep, int etp, int engine, int rollout_ep) {
            auto run = run_of("Qwen3-30B-A3B", 1, ep, 1, engine, rollout_ep);
            run.mesh.etp = etp;
            return plan_on_policy(moe, run);
        };
        auto const only_ep = plan(4, 1, 1, 1);
        CHECK(!only_ep.tp_invariant);
        CHECK(only_ep.ep_invariant);
        CHECK(only_ep.tie_break == "stable_sort");
        CHECK(only_ep.target == "fsdp");
        auto const both = plan(4, 2, 8, 4);
        CHECK(both.tp_invariant);
        CHECK(both.ep_invariant);
        CHECK(plan(1, 1, 4, 4).ep_invariant);
        CHECK(plan(1, 2, 2, 1).tp_invariant);
        CHECK(!plan(1, 1, 1, 1).ep_invariant);
        CHECK(plan(4, 1, 1, 1).environment.at("NCCL_NVLS_ENABLE") == "0");
        CHECK(plan(4, 1, 1, 1).environment.size() == 4);
        CHECK(!plan_on_policy(dense, dense_run()).ep_invariant);
        CHECK(plan_on_policy(dense, dense_run()).tie_break == "");
    }

    TEST_CASE("every row refuses alone, and all that is wrong is told at once") {
        auto const good = planned(moe, run_of("Qwen3-30B-A3B", 1, 4, 2, 4, 4));
        using change = std::function<void(run_configuration&)>;
        auto const argument = [](char const* name, char const* value) {
            return [=](run_configuration& r) { r.arguments[name] = value; };
        };
        auto const variable = [](char const* name, char const* value) {
            return [=](run_configuration& r) { r.environment[name] = value; };
        };
        std::vector<std::pair<std::string, change>> const wrong{
            {"mesh.ulysses", [](auto& r) { r.mesh.ulysses = 1; }},
            {"attention", [](auto& r) { r.attention = run_attention::gather; }},
            {"rollout.gpus", [](auto& r) { r.rollout.gpus = 8; }},
            {"arguments.true-on-policy-contract", argument("true-on-policy-contract", dense.c_str())},
            {"arguments.transformer-impl", argument("transformer-impl", "transformer_engine")},
            {"arguments.use-cpu-initialization", argument("use-cpu-initialization", "false")},
            {"arguments.batch-invariant-mode", [](auto& r) { r.arguments.erase("batch-invariant-mode"); }},
            {"arguments.no-bias-swiglu-fusion", argument("no-bias-swiglu-fusion", "false")},
            {"arguments.no-rope-fusion", argument("no-rope-fusion", "no")},
            {"arguments.bf16", argument("bf16", "false")},
            {"arguments.attention-dropout", argument("attention-dropout", "0.1")},
            {"arguments.hidden-dropout", argument("--hidden_dropout", "nil")},
            {"arguments.cross-entropy-loss-fusion", argument("cross-entropy-loss-fusion", "")},
            {"arguments.tp-comm-overlap", argument("--tp_comm_overlap", "true")},
            {"arguments.fp8-format", argument("fp8-format", "hybrid")},
            {"arguments.deterministic-mode", argument("deterministic-mode", "false")},
            {"arguments.cp-comm-type", argument("cp-comm-type", "p2p")},
            {"arguments.moe-token-dispatcher-type", argument("moe-token-dispatcher-type", "allgather")},
            {"arguments.moe-permute-fusion", argument("moe-permute-fusion", "true")},
            {"arguments.moe-expert-capacity-factor", argument("moe-expert-capacity-factor", "1.0")},
            {"arguments.moe-pad-expert-input-to-capacity", argument("moe-pad-expert-input-to-capacity", "true")},
            {"environment.NCCL_ALGO", variable("NCCL_ALGO", "Ring,Tree")},
            {"environment.NVTE_ALLOW_NONDETERMINISTIC_ALGO", variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")},
            {"environment.CUBLAS_WORKSPACE_CONFIG", [](auto& r) { r.environment.erase("CUBLAS_WORKSPACE_CONFIG"); }},
            {"environment.NCCL_NVLS_ENABLE", variable("NCCL_NVLS_ENABLE", "1")}};
        REQUIRE(check_contract(moe, good).holds());
        auto all = good;
        std::vector<std::string> names;
        for (auto const& [given_field, damage] : wrong) {
            auto const& field = given_field;
            auto run = good;
            damage(run);
            CAPTURE(field);
            auto const v = check_contract(moe, run);
            CHECK(fields(v) == std::vector{field});
            for (auto const& r : v.reasons) CHECK(r.profile == moe);
            damage(all);
            names.push_back(field);
        }
        CHECK(fields(check_contract(moe, all)) == names);
        std::vector<std::string> passages{"contract.cpp:", "contract " + moe + ": this job does not hold it:"};
        for (auto const& n : names) passages.push_back("\n  " + n + ": expected ");
        rejects(passages, [&] { require_contract(moe, all); });
        require_contract(moe, good);

        auto const with = [&](change const& damage) {
            auto run = good;
            damage(run);
            return check_contract(moe, run).text();
        };
        for (char const* algo : {"Ring", "CollnetDirect", "CollnetChain", "^NVLS", "Ring,CollnetChain"})
            CHECK(with(variable("NCCL_ALGO", algo)) == moe + ": holds");
        for (char const* algo : {"Tree", "", "ring", "Ring,", "Ring CollnetDirect"})
            CHECK(contains(with(variable("NCCL_ALGO", algo)), "environment.NCCL_ALGO"));
        CHECK(with(variable("CUBLAS_WORKSPACE_CONFIG", ":16:8")) == moe + ": holds");
        CHECK(contains(with(variable("CUBLAS_WORKSPACE_CONFIG", ":4096:2")), "expected :4096:8 or :16:8, got"));
        CHECK(with(argument("--cp_comm_type", "a2a")) == moe + ": holds");
        for (auto damage : std::vector<change>{[](auto& r) { r.rollout.gpus = 0; }, [](auto& r) { r.rollout.ep = -1; },
                                               [](auto& r) { r.rollout.moe_dp = 0; }})
            CHECK(contains(with(damage), "expected at least 1"));
    }

    TEST_CASE("the dense profile wants a dense mesh, by its own layouts") {
        auto run = dense_run();
        run.mesh.ep = 2;
        run.rollout = {2, 2, 2};
        run.sequence_parallel = true;
        auto const v = check_contract(dense, run);
        for (char const* field : {"mesh.ep", "rollout.ep", "rollout.moe_dp", "sequence_parallel"})
            CHECK_MESSAGE(contains(v.text(), std::string(field) + ": expected "), field);
        for (auto const& r : v.reasons) CHECK(r.profile == dense);
    }

    TEST_CASE("a plan replaces what a run had, however it was spelled") {
        auto run = dense_run();
        run.arguments["--transformer_impl"] = "transformer_engine";
        run.environment["NCCL_ALGO"] = "Tree";
        auto const set = planned(dense, run);
        CHECK(!set.arguments.contains("--transformer_impl"));
        CHECK(set.arguments.at("transformer-impl") == "local");
        CHECK(check_contract(dense, set).holds());
    }

    TEST_CASE("what is derived is what carries call exact, whatever the ranks, the carry, the cut and the chunk") {
        int exact = 0, all = 0;
        thd const batch({0, 7, 100});
        for (int ranks : {1, 2, 5})
            for (index_t chunk : {1, 16, 24, 64})
                for (int unit : {0, 1, 16, 32, 48, 64, 128})
                    for (auto carry : {run_carry::serial, run_carry::scan}) {
                        run_configuration run;
                        run.mesh = {.world = ranks, .cp = ranks};
                        run.linear = "sequential";
                        run.carry = carry;
                        run.cut = unit;
                        run.chunk = chunk;
                        run.sums = run_sums::by_row;
                        auto const known = [&](auto const& sharding) {
                            return carry == run_carry::serial ? is_exact<serial>(sharding, chunk)
                                                              : is_exact<scan>(sharding, chunk);
                        };
                        bool const wanted = unit ? known(shard(batch, sequential<>(ranks), aligned<dynamic>(unit)))
                                                 : known(shard(batch, sequential<>(ranks)));
                        CHECK(check_contract("derived", run).holds() == wanted);
                        exact += wanted;
                        ++all;
                        for (char const* whole : {"none", "head_sharded", "replicated"}) {
                            run.linear = whole;
                            CHECK(check_contract("derived", run).holds());
                        }
                        run.sums = run_sums::by_rank;
                        CHECK(check_contract("derived", run).holds() == (ranks == 1));
                    }
        CHECK(exact > 20);
        CHECK(exact < all / 2 + 20);
    }

    TEST_CASE("what is not derived is told with what would be") {
        run_configuration run;
        run.mesh = {.world = 4, .cp = 4};
        run.linear = "zigzag";
        run.carry = run_carry::scan;
        run.cut = 48;
        run.fixed_products = false;
        run.attention = run_attention::ring;
        run.sums = run_sums::by_rank;
        CHECK(
            check_contract(derived_contract, run).text() ==
            "derived: fixed_products: expected true, got false; attention: expected gather or head_sharded, got ring; "
            "carry: expected serial, got scan; cut: expected multiples of the chunk, 64, got multiples of 48; "
            "sums: expected by_row, got by_rank");
        run.cut = 0;
        CHECK(contains(check_contract(derived_contract, run).text(), "got anywhere"));
        run.chunk = 0;
        rejects({"contract.cpp:", "contract: chunk: expected at least 1, got 0"},
                [&] { check_contract(derived_contract, run); });
    }

    // A review of pull request 1088 found that its branch looked at tp and pp only: ranks of ep ran ahead.
    TEST_CASE(
        "ranks meet to log where a model is divided in any way, by a rule of the mesh, and never outside the mode") {
        static_assert(ranks_meet_to_log(mesh({.world = 8, .ep = 4}), true));
        static_assert(ranks_meet_to_log(mesh({.world = 8, .cp = 2}), true));
        static_assert(!ranks_meet_to_log(mesh({.world = 8}), true));
        static_assert(!ranks_meet_to_log(mesh({.world = 8, .tp = 2, .cp = 2, .pp = 2, .ep = 2}), false));
        int meshes = 0;
        for (int world = 1; world <= 64; ++world)
            for (int tp = 1; tp <= world; ++tp)
                for (int cp = 1; tp * cp <= world; ++cp)
                    for (int pp = 1; tp * cp * pp <= world; ++pp) {
                        if (world % (tp * cp * pp) != 0) continue;
                        for (int etp = 1; etp * pp <= world; ++etp)
                            for (int ep = 1; ep * etp * pp <= world; ++ep) {
                                if (world % (etp * ep * pp) != 0) continue;
                                mesh const all({.world = world, .tp = tp, .cp = cp, .pp = pp, .ep = ep, .etp = etp});
                                bool const meet = ranks_meet_to_log(all, true);
                                REQUIRE(meet == (tp * pp * ep * cp > 1));
                                REQUIRE(!ranks_meet_to_log(all, false));
                                // as any rank finds from its own groups
                                int const rank = (tp * 31 + cp * 17 + pp * 7 + ep) % world;
                                bool alone = true;
                                for (axis a : {axis::tp, axis::cp, axis::pp, axis::ep})
                                    alone = alone && all.group(a, rank).size() == 1;
                                REQUIRE(meet == !alone);
                                ++meshes;
                            }
                    }
        CHECK(meshes > 5000);
    }
}
