// SPDX-License-Identifier: Apache-2.0
// The main job of cpx: a checkpoint of Hugging Face transformers, its packed batch of text, images and videos sharded
// over ranks, must give the log-probabilities that transformers gives, whatever the strategy.

#include "outcome.hpp"

#include "../common/command_line.hpp"
#include "../common/figures.hpp"
#include "../common/tokens.hpp"

#include <cpx/model/contract.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct options {
    std::string model, reference, ranks = "4", device = "cpu", dtype, attention, linear, carry, cut, chunk = "64",
                                  features = "by_item", products = "cublas", rule, experts_over = "1";
    bool json = false, backward = false, all = false;

    bool on_gpus() const { return device == "cuda"; }
};

std::vector<std::string> const attentions{"gather", "head_sharded"}, carries{"scan", "serial"};

/// Throws `cpx::error` on what cannot be run; fills in what the device decides.
void complete(examples::command_line const& app, options& o) {
    using examples::require_one_of;
    require_one_of(o.device, {"cpu", "cuda"}, "--device", "device");
    require_one_of(o.dtype, {"float64", "float32", "bfloat16"}, "--dtype", "type");
    require_one_of(o.features, {"by_item", "replicated"}, "--features", "ranks of features");
    require_one_of(o.products, {"cublas", "fixed"}, "--products", "products");
    require_one_of(o.rule, {"bfloat16", "half"}, "--rule", "elements");
    require_one_of(o.attention, attentions, "--attention", "value");
    require_one_of(o.carry, carries, "--carry", "value");
    if (o.dtype.empty()) o.dtype = o.on_gpus() ? "float32" : "float64";
    for (char const* const option : {"--carry", "--cut"}) // by heads there is none
        app.require_effect(option, o.linear != "head_sharded", "linear attention by tokens", "--linear head_sharded");
    bool const chosen = !o.attention.empty() || !o.linear.empty() || !o.carry.empty() || !o.cut.empty();
    app.require_effect("--all", !chosen && !o.json, "a table that no option restricts",
                       o.json ? "--json" : "one that does");
    app.require_effect("--products", o.on_gpus(), "--device cuda", "cpu");
    app.require_effect("--ranks", !qwen::is_launched(), "no launcher of MPI, which says how many", "one");
    bool const has = o.dtype == "float32" || o.dtype == (o.on_gpus() ? "bfloat16" : "float64");
    cpx::require(has, "--dtype", ("type with --device " + o.device).c_str(),
                 o.on_gpus() ? "float32 or bfloat16" : "float64 or float32", cpx::quote(o.dtype));
    app.require_effect("--rule", o.dtype == "bfloat16", "--dtype bfloat16", o.dtype);
    if (!o.on_gpus()) return;
    app.require_effect("--chunk", false, "--device cpu", "cuda, whose chunks are 64 tokens");
}

struct report {
    std::string attention, linear, carry, cut;
    qwen::outcome outcome;
    double max_delta = 0, mean_delta = 0, max_delta_to_one_rank = 0, loss_delta = 0;
    std::map<std::string, double> gradient_errors = {}; ///< by weight or features
    cpx::contract_verdict verdict = {};                 ///< before the run, of its configuration alone
    bool gradients_equal_one_rank = true;
    bool positions = false; ///< the reference has some to compare with

    /// Returns the largest of the gradients' errors, and their median, the lower of two in the middle; 0 of none.
    std::pair<double, double> largest_and_median() const {
        std::vector<double> list;
        for (auto const& item : gradient_errors) list.push_back(item.second);
        if (list.empty()) return {};
        std::ranges::sort(list);
        return {list.back(), list[(list.size() - 1) / 2]};
    }
};

/// Compares the gradients with those of the reference file, `grad.NAME`, and with one rank's.
void compare_gradients(cpx::safetensors const& file, qwen::outcome const& one_rank, report& r) {
    for (auto const& [name, of] : r.outcome.gradients) {
        auto const& [columns, values] = of;
        auto shape = file.tensor("grad." + name).shape;
        auto const reference = file.read<double>("grad." + name);
        std::erase(shape, 1); // as torch writes a convolution's weight; columns are the last axis that is left
        cpx::require(values.size() == reference.size() && (shape.empty() || columns == 1 || shape.back() == columns),
                     file.where().c_str(), ("shape of grad." + name).c_str(),
                     std::to_string(values.size()) + " elements in rows of " + std::to_string(columns),
                     std::to_string(reference.size()) + " in rows of " +
                         std::to_string(shape.empty() ? 1 : shape.back()));
        r.gradient_errors[name] = examples::number(examples::relative_error(values, reference), file.where(),
                                                   "relative error of grad." + name);
        auto const& one = one_rank.gradients.at(name).values;
        r.gradients_equal_one_rank &= std::memcmp(values.data(), one.data(), values.size() * sizeof(double)) == 0;
    }
}

/// Reads the grids and features of images and videos, and their positions, and checks them against the model.
void read_media(cpx::safetensors const& file, cpx::hf_config const& config, qwen::input& in) {
    auto const grids = [&](std::string const& kind) {
        std::string const name = kind + "_grid_thw";
        if (!file.contains(name)) return std::vector<cpx::media_grid>{};
        cpx::require(config.multimodal(), file.where().c_str(), name.c_str(), "a model with vision_config",
                     "one without");
        return cpx::media_grids(file.read<cpx::index_t>(name, {-1, 3}));
    };
    auto const images = grids("image"), videos = grids("video");
    if (!config.multimodal()) return;
    auto const types = config.layers();
    examples::blame(file.where(), [&] {
        in.media = cpx::media(images, videos, {.merge = *config.spatial_merge_size});
        // what is wrong is told before anything runs
        return mrope_positions(in.media, in.batch, in.ids, {*config.image_token_id, *config.video_token_id});
    });
    auto const add = [&](std::string const& name, cpx::media_kind kind, cpx::index_t layer) {
        in.of_media.push_back({name, kind, layer, file.read<double>(name, {in.media.rows(kind), *config.hidden_size})});
    };
    for (auto const& [name, kind] : {std::pair{"image", cpx::media_kind::image}, {"video", cpx::media_kind::video}}) {
        if (in.media.rows(kind) == 0) continue;
        add(name + std::string("_features"), kind, qwen::features::embedding);
        for (cpx::index_t k = 0; k < config.deepstack_layers(); ++k) {
            cpx::require(types[static_cast<std::size_t>(k)] == cpx::layer_type::full_attention, "deepstack",
                         "layer that features are added behind", "one of full attention", k);
            add(std::string("deepstack_") + name + '.' + std::to_string(k), kind, k);
        }
    }
    if (file.contains("position_ids"))
        in.position_ids = file.read<cpx::index_t>("position_ids", {3, in.batch.tokens()});
}

/// Returns the packed batch of a reference file and checks it against the model.
qwen::input read_input(cpx::safetensors const& file, cpx::hf_config const& config, options const& o) {
    auto const [batch, ids] = examples::read_tokens(file, config);
    qwen::input in{batch, ids, {}, {}, o.features == "by_item" ? qwen::tower::by_item : qwen::tower::replicated, {}};
    read_media(file, config, in);
    return in;
}

/// Returns whether a strategy is of the five that a table shows: one a way to run linear attention.
bool shown(qwen::strategy const& s) {
    if (s.by_heads()) return s.attention == qwen::attention_by::heads;
    bool const a_way = s.linear.name == "sequential" || s.linear.name == "zigzag";
    return s.attention == qwen::attention_by::gather && a_way && s.linear.scope == cpx::scope::sequence &&
           s.serial == (s.cut.unit > 0);
}

/// Returns the strategies that the options leave open: one if `--linear` is given, else all, or those to be shown.
std::vector<qwen::strategy> choose(options const& o) {
    bool const table = o.linear.empty();
    auto const open = [&](std::string const& given, std::vector<std::string> const& all) { // what an option leaves
        return !given.empty() ? std::vector{given} : table ? all : std::vector{all.front()};
    };
    std::vector<qwen::strategy> list;
    for (auto const& attention : open(o.attention, attentions))
        for (auto const& linear :
             open(o.linear, {"sequential", "sequential:batch", "zigzag", "striped", "head_sharded"}))
            for (auto const& carry : open(o.carry, carries))
                for (auto const& cut : open(o.cut, {"balanced", "aligned:" + o.chunk})) {
                    qwen::strategy const s{attention == "gather" ? qwen::attention_by::gather
                                                                 : qwen::attention_by::heads,
                                           examples::parse_sharding(linear, "--linear"), carry == "serial",
                                           examples::parse_cut(cut), o.rule == "half"};
                    cpx::require(s.linear.name != "replicated" && s.linear.name != "table", "--linear", "sharding",
                                 "sequential, zigzag, striped or head_sharded", cpx::quote(linear));
                    bool const again =
                        s.by_heads() && !list.empty() && list.back().by_heads() && list.back().attention == s.attention;
                    if (!again) list.push_back(s); // by heads there is no carry and no cut to choose
                }
    bool const chosen = !o.attention.empty() || !table || !o.carry.empty() || !o.cut.empty();
    if (!chosen && !o.json && !o.all) std::erase_if(list, [](qwen::strategy const& s) { return !shown(s); });
    return list;
}

/// Leaves of the strategies those that differ: where no layer has linear attention, there are no ways to run it.
std::vector<qwen::strategy> without_linear(std::vector<qwen::strategy> const& all) {
    std::vector<qwen::strategy> list;
    for (auto const& s : all)
        if (list.empty() || list.back().attention != s.attention)
            list.push_back({.attention = s.attention, .linear = {.name = "none"}});
    return list;
}

/// Returns what of a run decides its bits.
cpx::run_configuration configuration(qwen::strategy const& how, options const& o, int ranks, cpx::index_t chunk) {
    cpx::run_configuration run;
    run.mesh = {.world = ranks, .cp = ranks};
    run.attention =
        how.attention == qwen::attention_by::gather ? cpx::run_attention::gather : cpx::run_attention::head_sharded;
    run.linear = how.linear.name;
    if (how.hands_on()) run.carry = how.serial ? cpx::run_carry::serial : cpx::run_carry::scan;
    run.cut = how.cut.unit;
    run.chunk = chunk;
    run.fixed_products = !o.on_gpus() || o.products == "fixed";
    if (o.backward) run.sums = cpx::run_sums::by_row; // wherever the rest lets them be those of one rank
    return run;
}

/// Throws `cpx::error` unless there are as many GPUs as ranks of this process.
void require_gpus(int ranks) {
    int const found = qwen::gpus();
    cpx::require(found > 0, "--device", "GPUs", "at least 1", found);
    cpx::require(ranks <= found, "--ranks", "number of ranks", "at most the GPUs found, " + std::to_string(found),
                 ranks);
}

/// Returns how many neighbouring ranks share the experts.
int divide_experts(cpx::hf_config const& config, int ranks, options const& o) {
    char const* const where = "--experts-over";
    int const over = examples::parse_ranks(o.experts_over, examples::most_threads, where);
    if (over == 1) return over;
    cpx::require(config.moe(), where, "model", "one with experts", "one without");
    cpx::require(ranks % over == 0, where, "number of ranks", "a divisor of the ranks, " + std::to_string(ranks), over);
    cpx::require(*config.num_experts % over == 0, where, "number of ranks",
                 "a divisor of the experts, " + std::to_string(*config.num_experts), over);
    return over;
}

template <class T>
std::vector<report> run(options const& o, int ranks, cpx::transport_ref* launched) {
    cpx::index_t const chunk = examples::parse_number(o.chunk, 1, 1 << 20, "--chunk", "tokens");
    auto strategies = choose(o);
    cpx::qwen_checkpoint<T> const model(o.model);
    cpx::safetensors const file(o.reference);
    auto const in = read_input(file, model.config, o);
    if (!model.config.linear()) strategies = without_linear(strategies);
    if (o.on_gpus()) require_gpus(launched ? 1 : ranks);
    qwen::group const all{ranks, launched, divide_experts(model.config, ranks, o)};
    auto const reference = file.read<double>("logprobs", {in.batch.tokens()});

    auto const products = o.products == "fixed" ? qwen::products::fixed : qwen::products::cublas;
    auto const element = o.dtype == "bfloat16" ? qwen::gpu_element::bfloat16 : qwen::gpu_element::float32;
    auto const pass = [&](qwen::strategy const& how, qwen::group const& on) {
        if constexpr (std::same_as<T, float>)
            if (o.on_gpus()) return qwen::run_on_gpus(model, in, how, on, o.backward, products, element);
        return qwen::run(model, in, how, on, chunk, o.backward);
    };
    std::vector<cpx::contract_verdict> verdicts; // of configurations alone, before any of them runs
    for (auto const& how : strategies)
        verdicts.push_back(check_contract(cpx::derived_contract, configuration(how, o, ranks, chunk)));
    std::vector<report> reports;
    std::map<qwen::attention_by, qwen::outcome> on_one_rank; // the same however linear attention is sharded
    auto verdict = verdicts.begin();
    for (auto const& how : strategies) {
        std::string const cut = how.cut.unit ? "aligned:" + std::to_string(how.cut.unit) : "balanced";
        report r{attentions[how.attention == qwen::attention_by::heads],
                 how.linear.name + (how.linear.scope == cpx::scope::batch ? ":batch" : ""),
                 how.hands_on() ? carries[how.serial] : "none", how.hands_on() ? cut : "none", pass(how, all)};
        r.verdict = std::move(*verdict++);
        if (launched && launched->rank() > 0) continue; // rank 0 compares
        if (!on_one_rank.contains(how.attention)) on_one_rank.emplace(how.attention, pass(how, {}));
        auto const& one_rank = on_one_rank.at(how.attention);
        double sum = 0;
        for (std::size_t i = 0; i < reference.size(); ++i) {
            std::string const what = "log-probability " + std::to_string(i);
            double const p = r.outcome.log_probabilities[i];
            double const delta = examples::number(std::abs(p - reference[i]), file.where(), what);
            double const to_one = examples::number(std::abs(p - one_rank.log_probabilities[i]), "one rank", what);
            r.max_delta = std::max(r.max_delta, delta);
            r.max_delta_to_one_rank = std::max(r.max_delta_to_one_rank, to_one);
            sum += delta;
        }
        r.mean_delta = reference.empty() ? 0 : sum / static_cast<double>(reference.size());
        if (file.contains("loss"))
            r.loss_delta = examples::number(std::abs(r.outcome.loss.mean - file.read<double>("loss", {1}).front()),
                                            file.where(), "loss");
        compare_gradients(file, one_rank, r);
        r.positions = !in.position_ids.empty();
        reports.push_back(std::move(r));
    }
    return reports;
}

nlohmann::json json_of(cpx::contract_verdict const& verdict) {
    auto reasons = nlohmann::json::array();
    for (auto const& r : verdict.reasons)
        reasons.push_back({{"field", r.field}, {"found", r.found}, {"wanted", r.wanted}, {"profile", r.profile}});
    return {{"name", verdict.contract}, {"holds", verdict.holds()}, {"reasons", std::move(reasons)}};
}

void print_json(std::vector<report> const& reports, int ranks, options const& o, cpx::index_t element) {
    auto list = nlohmann::json::array();
    for (auto const& r : reports) {
        auto const& [least, all_gather, imbalance] = r.outcome.counted;
        nlohmann::json item{{"device", o.device},
                            {"attention", r.attention},
                            {"linear", r.linear},
                            {"carry", r.carry},
                            {"cut", r.cut},
                            {"ranks", ranks},
                            {"exact", r.outcome.exact},
                            {"contract", json_of(r.verdict)},
                            {"max_abs_delta", r.max_delta},
                            {"mean_abs_delta", r.mean_delta},
                            {"max_abs_delta_to_one_rank", r.max_delta_to_one_rank},
                            {"loss", r.outcome.loss.mean},
                            {"loss_delta", r.loss_delta},
                            {"imbalance", imbalance},
                            {"rows_sent", r.outcome.rows.rows},
                            {"rows_lower_bound", least.rows},
                            {"rows_all_gather", all_gather.rows},
                            {"bytes_sent", r.outcome.rows.bytes},
                            {"bytes_lower_bound", least.elements * element},
                            {"bytes_all_gather", all_gather.elements * element},
                            {"state_bytes_sent", r.outcome.states.bytes},
                            {"messages", r.outcome.rows.messages + r.outcome.states.messages}};
        if (o.backward) {
            auto const [largest, median] = r.largest_and_median();
            item["max_grad_error"] = largest;
            item["median_grad_error"] = median;
            item["grads"] = r.gradient_errors;
            item["grads_equal_one_rank"] = r.gradients_equal_one_rank;
        }
        if (o.on_gpus())
            item["kernels"] = {{"full_attention", r.outcome.kernels.attention()},
                               {"linear_attention", r.outcome.kernels.delta_rule()}};
        if (!o.rule.empty()) item["rule"] = o.rule;
        if (r.positions) item["position_ids_equal"] = r.outcome.positions_equal;
        list.push_back(std::move(item));
    }
    std::printf("%s\n", nlohmann::json{{"strategies", list}}.dump(2).c_str());
}

void print_table(std::vector<report> const& reports, int ranks, options const& o, cpx::index_t element) {
    std::printf("%d %s in %s%s: |delta log-probability| to the reference and to one rank, and what moved\n\n", ranks,
                o.on_gpus() ? "GPUs" : "ranks", o.dtype.c_str(), o.rule == "half" ? ", the delta rule in half" : "");
    char const* const header = "%-12s %-16s %-6s %-10s %8s %8s %9s %8s %6s %6s %6s %6s %7s %7s %7s";
    std::printf(header, "", "", "", "", "max", "max to", "", "loss", "imbal-", "rows", "lower", "all-", "KiB", "all-",
                "state");
    std::printf(o.backward ? " %8s %8s\n" : "\n", "gradient", "to one");
    std::printf(header, "attention", "linear", "carry", "cut", "delta", "one rank", "loss", "delta", "ance", "sent",
                "bound", "gather", "sent", "gather", "KiB");
    std::printf(o.backward ? " %8s %8s\n" : "\n", "error", "rank");
    auto const kib = [](cpx::index_t bytes) { return static_cast<double>(bytes) / 1024; };
    for (auto const& r : reports) {
        auto const& [least, all_gather, imbalance] = r.outcome.counted;
        char to_one[16];
        std::snprintf(to_one, sizeof to_one, r.outcome.exact && r.max_delta_to_one_rank == 0 ? "0 exact" : "%.1e",
                      r.max_delta_to_one_rank);
        std::printf("%-12s %-16s %-6s %-10s %8.1e %8s %9.6f %8.1e %6.2f %6lld %6lld %6lld %7.1f %7.1f %7.1f",
                    r.attention.c_str(), r.linear.c_str(), r.carry.c_str(), r.cut.c_str(), r.max_delta, to_one,
                    r.outcome.loss.mean, r.loss_delta, imbalance, static_cast<long long>(r.outcome.rows.rows),
                    static_cast<long long>(least.rows), static_cast<long long>(all_gather.rows),
                    kib(r.outcome.rows.bytes), kib(all_gather.elements * element), kib(r.outcome.states.bytes));
        if (o.backward)
            std::printf(" %8.1e %8s", r.largest_and_median().first, r.gradients_equal_one_rank ? "equal" : "rounding");
        std::printf("\n");
    }
    std::printf(
        "\nattention    gather: keys and values on every rank; head_sharded: queries, keys and values by heads\n"
        "linear       how rows are sharded where linear attention runs; head_sharded: its recurrence by heads\n"
        "carry        scan: segments' maps of the state are joined; serial: the state is handed on\n"
        "cut          sequences are cut evenly, or at multiples of so many tokens\n"
        "delta        |log-probability - reference|; to one rank: 0 exact where it is so by construction\n"
        "imbalance    most rows of a rank by the mean, where linear attention runs if any does; 1: all equal\n"
        "rows, KiB    sent by all ranks; lower bound: rows whose owner changes; all-gather: had every tensor "
        "been gathered\n");
    if (o.experts_over != "1") std::printf("             without the rows that experts are sent\n");
    if (o.backward)
        std::printf("gradient     largest relative error (2-norm) of a gradient of the loss; to one rank: all of them "
                    "bitwise equal, or within rounding\n");
    if (std::ranges::any_of(reports, &report::positions))
        std::printf("positions    on three axes, of text, images and videos: %s\n",
                    std::ranges::all_of(reports, [](report const& r) { return r.outcome.positions_equal; })
                        ? "those of the reference"
                        : "others than those of the reference");
    auto const print_each = [&](char const* label, auto const& text_of) { // how many strategies have each
        std::map<std::string, int> counts;
        for (auto const& r : reports) ++counts[text_of(r)];
        for (auto const& [text, count] : counts) {
            std::printf("%-12s %d of %zu: %s\n", label, count, reports.size(), text.c_str());
            label = "";
        }
    };
    print_each("contract", [](report const& r) { return r.verdict.text(); });
    if (!o.on_gpus()) return;
    print_each("kernels", [](report const& r) {
        auto const& kernels = r.outcome.kernels;
        return "full attention, forward: " + kernels.attention() + "; linear attention: " + kernels.delta_rule();
    });
}

} // namespace

bool qwen::is_launched() { return std::getenv("OMPI_COMM_WORLD_SIZE") || std::getenv("PMI_SIZE"); }

int main(int argc, char** argv) {
    examples::command_line app(
        "Runs a checkpoint of Qwen3.5 or Qwen3-VL under context parallelism and compares it with a reference.", "qwen");
    options o;
    app.required("--model", o.model, "directory with config.json and model.safetensors");
    app.required("--reference", o.reference,
                 "safetensors file with input_ids, cu_seqlens and logprobs; with images or videos their grids and "
                 "features, too");
    app.option("--ranks", o.ranks,
               "ranks, as threads of this process, at most 256; on GPUs one each; under mpirun as many as that starts");
    app.option("--device", o.device, "cpu, or cuda: float32 or bfloat16");
    app.option("--dtype", o.dtype,
               "float64 or float32, on GPUs float32 or bfloat16; left out: float64, on GPUs float32");
    app.option("--products", o.products,
               "on GPUs: cublas, with attention in bfloat16 by cuDNN where the program has it and it serves; or fixed, "
               "by plain kernels that make exact strategies bitwise those of one GPU");
    app.option("--rule", o.rule,
               "elements of the gated delta rule with --dtype bfloat16: bfloat16, or half, which has three bits more");
    app.option("--attention", o.attention, "gather (keys and values) or head_sharded");
    app.option("--linear", o.linear,
               "sequential, sequential:batch, zigzag, striped or head_sharded; left out: all of them; a model "
               "without layers of linear attention has none");
    app.option("--carry", o.carry, "scan or serial");
    app.option("--cut", o.cut, "balanced or aligned:UNIT, for the sharding of linear attention");
    app.option("--chunk", o.chunk, "tokens a chunk of the gated delta rule");
    app.option("--features", o.features,
               "who has the features of images and videos: by_item, of each image or frame one rank, or replicated");
    app.option("--experts-over", o.experts_over,
               "how many neighbouring ranks share the experts of a mixture; a divisor of the ranks and of the experts");
    app.flag("--backward", o.backward, "compare the gradients of the loss, too, with grad.* of the reference");
    app.flag("--all", o.all, "a table of all strategies, not of one a way to run linear attention");
    app.flag("--json", o.json, "print JSON, of all strategies");
    auto const run_all = [&](cpx::transport_ref* launched) {
        bool const wide = o.dtype == "float64";
        int const ranks = launched ? launched->ranks() : examples::parse_ranks(o.ranks, examples::most_threads);
        auto const reports = wide ? run<double>(o, ranks, launched) : run<float>(o, ranks, launched);
        cpx::index_t const element = wide ? 8 : o.dtype == "float32" ? 4 : 2;
        if (launched && launched->rank() > 0) return;
        if (o.json)
            print_json(reports, ranks, o, element);
        else
            print_table(reports, ranks, o, element);
    };
    return app.run(argc, argv, [&] {
        complete(app, o);
        qwen::with_launched(run_all);
    });
}
