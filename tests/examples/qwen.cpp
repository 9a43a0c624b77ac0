// SPDX-License-Identifier: Apache-2.0
// The acceptance of the whole library: a model of transformers, under every strategy, against transformers.
#include <cpx/model/safetensors.hpp>

#include <support/files.hpp>

#include <examples/program.hpp>

#include <set>
#include <tuple>

namespace {

using namespace program;
using arguments = std::vector<std::string>;

fs::path const models = fs::path(support::source_dir) / "examples/data";
fs::path const data = models / "tiny_qwen3_5", experts = models / "tiny_qwen3_5_moe";
fs::path const deepstack = models / "tiny_qwen3_vl", hybrid = models / "tiny_qwen3_5_vl"; // with images and videos
fs::path const reference = data / "reference.safetensors";

arguments on(fs::path const& model, fs::path const& expected, std::string const& ranks) {
    return {"--model", model.string(), "--reference", expected.string(), "--ranks", ranks};
}

arguments const tiny = on(data, reference, "3");

/// How copies of the files are run.
arguments const one_strategy{"--ranks", "2", "--linear", "zigzag"};

/// Checks the gradients of one strategy: all weights and features of the reference, each within the limit.
void check_gradients(json const& s, bool wide, std::set<std::string> const& weights) {
    double largest = 0;
    std::set<std::string> got;
    for (auto const& [given_name, error] : s.at("grads").items()) {
        auto const& name = given_name;
        CAPTURE(name);
        got.insert(name);
        largest = std::max(largest, error.get<double>());
        // in float32 transformers itself is off by 1e-3
        CHECK(error.get<double>() <= (wide ? 1e-6 : 5e-3));
        CHECK(error.get<double>() > 0);
    }
    CHECK(got == weights);
    CHECK(s.at("max_grad_error") == largest);
    if (s.at("exact").get<bool>()) CHECK(s.at("grads_equal_one_rank") == true);
}

/// Checks every figure of every strategy against the limits; `weights` have gradients, none if there was no backward.
void check_figures(json const& report, int ranks, bool wide, double loss, std::set<std::string> const& weights = {}) {
    for (json const& s : report.at("strategies")) {
        CAPTURE(s.dump());
        for (char const* key : {"attention", "linear", "carry", "cut"}) CHECK(s.at(key).is_string());
        CHECK(!s.contains("kernels")); // of GPUs
        CHECK(s.at("ranks") == ranks);
        auto const& contract = s.at("contract"); // of the configuration alone; `exact` is what the types tell
        CHECK(contract.at("name") == "derived");
        CHECK(contract.at("holds") == s.at("exact"));
        CHECK(contract.at("reasons").empty() == s.at("exact").get<bool>());
        for (auto const& reason : contract.at("reasons")) {
            bool const carry = reason.at("field") == "carry", cut = reason.at("field") == "cut";
            CHECK((carry || cut));
            CHECK((carry ? s.at("carry") == "scan" : s.at("cut") != "aligned:64"));
        }
        CHECK(s.at("loss_delta").get<double>() <= (wide ? 1e-10 : 5e-5));
        CHECK(s.at("max_abs_delta").get<double>() <= (wide ? 1e-9 : 1e-3));
        CHECK(s.at("mean_abs_delta").get<double>() <= (wide ? 1e-9 : 5e-5));
        CHECK(s.at("mean_abs_delta").get<double>() > 0); // the reference is another program's
        CHECK(std::abs(s.at("loss").get<double>() - loss) <= (wide ? 1e-10 : 5e-5));
        for (char const* key : {"max_grad_error", "grads", "grads_equal_one_rank"})
            CHECK(s.contains(key) == !weights.empty());
        if (!weights.empty()) check_gradients(s, wide, weights);
        if (s.at("exact").get<bool>()) CHECK(s.at("max_abs_delta_to_one_rank").get<double>() == 0);
        CHECK(s.at("max_abs_delta_to_one_rank").get<double>() <= (wide ? 1e-9 : 1e-3));
        CHECK(s.at("imbalance").get<double>() >= 1);
        CHECK(s.at("imbalance").get<double>() <= ranks);
        CHECK(s.at("rows_sent") == s.at("rows_lower_bound"));
        CHECK(s.at("bytes_sent") == s.at("bytes_lower_bound"));
        CHECK(s.at("rows_sent").get<long>() <= s.at("rows_all_gather").get<long>());
        CHECK(s.at("bytes_sent").get<long>() <= s.at("bytes_all_gather").get<long>());
        if (ranks == 1)
            CHECK(s.at("messages") == 0);
        else
            CHECK(s.at("rows_sent").get<long>() > 0);
        if (s.at("linear") == "head_sharded" || s.at("linear") == "none") {
            CHECK(s.at("carry") == "none");
            CHECK(s.at("cut") == "none");
            CHECK(s.at("exact") == true);
            CHECK(s.at("state_bytes_sent") == 0);
        }
    }
}

std::set<std::string> names(json const& report) {
    std::set<std::string> all;
    for (json const& s : report.at("strategies"))
        all.insert(s.at("attention").get<std::string>() + ' ' + s.at("linear").get<std::string>() + ' ' +
                   s.at("carry").get<std::string>() + ' ' + s.at("cut").get<std::string>());
    return all;
}

/// Runs a training step under every way of linear attention, and under both of full attention: `pairs` of them, or one
/// of the second. Neither knows of the other: between them hidden states are where they entered.
json train(arguments options, bool pairs) {
    options.push_back("--backward");
    if (pairs) return run_json(options);
    json report = run_json(options + arguments{"--attention", "gather"});
    auto const other = run_json(options + arguments{"--attention", "head_sharded", "--linear", "zigzag", "--carry",
                                                    "serial", "--cut", "aligned:64"});
    for (json const& s : other.at("strategies")) report.at("strategies").push_back(s);
    return report;
}

/// Returns what has a gradient in the reference of a model.
std::set<std::string> with_gradients(fs::path const& model) {
    std::set<std::string> weights;
    for (auto const& name : cpx::safetensors(model / "reference.safetensors").names())
        if (name.starts_with("grad.")) weights.insert(name.substr(5));
    return weights;
}

double loss_of(fs::path const& model) {
    return cpx::safetensors(model / "reference.safetensors").read<double>("loss").at(0);
}

} // namespace

TEST_SUITE("examples") {
    TEST_CASE("every strategy gives the log-probabilities of transformers and sends no row in vain") {
        double const loss = loss_of(data);
        for (int const ranks : {1, 2, 3, 4, 5, 8})
            for (char const* dtype : {"float64", "float32"}) {
                CAPTURE(ranks);
                CAPTURE(dtype);
                bool const wide = dtype == std::string("float64");
                if (!wide && ranks % 3 != 2) continue; // the same code: 2, 5 and 8 are enough
                auto const options = on(data, reference, std::to_string(ranks)) + arguments{"--dtype", dtype};
                auto const aligned = run_json(options + arguments{"--chunk", "16", "--cut", "aligned:16"});
                check_figures(aligned, ranks, wide, loss);
                CHECK(names(aligned).size() == 18);
                for (json const& s : aligned.at("strategies"))
                    if (ranks == 1 || (s.at("carry") == "serial" && s.at("cut") != "balanced"))
                        CHECK(s.at("exact") == true);
                    else if (s.at("carry") == "scan")
                        CHECK(s.at("exact") == false);
            }
    }

    TEST_CASE("a training step of both models has the gradients of transformers under every strategy") {
        for (fs::path const& model : {data, experts}) {
            double const loss = loss_of(model);
            auto const weights = with_gradients(model);
            // the experts' other numbers of ranks are those of the next test
            for (int const ranks : model == data ? std::vector{1, 2, 3, 4, 5, 8} : std::vector{3, 5})
                for (char const* dtype : {"float64", "float32"}) {
                    CAPTURE(model.string());
                    CAPTURE(ranks);
                    CAPTURE(dtype);
                    bool const wide = dtype == std::string("float64");
                    if (!wide && ranks % 3 != 0) continue; // the same code: once is enough
                    bool const pairs = ranks == 3;         // of a forward pass there are all, see above
                    auto const report = train(on(model, model / "reference.safetensors", std::to_string(ranks)) +
                                                  arguments{"--dtype", dtype},
                                              pairs);
                    check_figures(report, ranks, wide, loss, weights);
                    CHECK(report.at("strategies").size() == (pairs ? 34 : 18));
                    CHECK(names(report).size() == (pairs ? 34 : 18));
                }
        }
    }

    TEST_CASE("experts that neighbouring ranks share have the bits of one rank that has them all, gradients too") {
        double const loss = loss_of(experts);
        auto const weights = with_gradients(experts);
        for (auto const& [given_ranks, given_over] :
             std::vector<std::pair<int, int>>{{2, 2}, {4, 2}, {4, 4}, {8, 2}, {8, 4}, {8, 8}}) {
            auto const& ranks = given_ranks;
            auto const& over = given_over;
            CAPTURE(ranks);
            CAPTURE(over);
            auto const options = on(experts, experts / "reference.safetensors", std::to_string(ranks)) +
                                 arguments{"--experts-over", std::to_string(over)};
            bool const all = ranks == 4 && over == 2;
            auto const report = all ? train(options, false)
                                    : run_json(options + arguments{"--backward", "--linear", "zigzag", "--carry",
                                                                   "serial", "--cut", "aligned:64"});
            check_figures(report, ranks, true, loss, weights); // exact strategies are compared with one rank
            CHECK(names(report).size() == (all ? 18 : 1));
        }
        auto const shared = [](fs::path const& model, char const* over) {
            return on(model, model / "reference.safetensors", "6") + arguments{"--experts-over", over};
        };
        check_refusal(shared(experts, "3"), {"--experts-over", "a divisor of the experts, 8, got 3"});
        check_refusal(shared(experts, "4"), {"--experts-over", "a divisor of the ranks, 6, got 4"});
        check_refusal(shared(experts, "16"), {"--experts-over", "a divisor of the ranks, 6, got 16"});
        check_refusal(shared(data, "2"), {"--experts-over: model: expected one with experts"});
        check_refusal(shared(experts, "0"), {"--experts-over", "from 1 to 256", "\"0\""});
    }

    TEST_CASE("models with images and videos have the log-probabilities, positions and all gradients of transformers") {
        for (fs::path const& model : {deepstack, hybrid}) {
            bool const linear = model == hybrid;
            double const loss = loss_of(model);
            auto const weights = with_gradients(model);
            CHECK(weights.contains("image_features"));
            CHECK(weights.contains("deepstack_video.2") == !linear);
            for (int const ranks : linear ? std::vector{2, 3, 8} : std::vector{1, 2, 3, 4, 5, 8}) {
                CAPTURE(model.string());
                CAPTURE(ranks);
                bool const wide = ranks != 3;
                bool const pairs = ranks == 3 || !linear;
                auto const report = train(on(model, model / "reference.safetensors", std::to_string(ranks)) +
                                              arguments{"--dtype", wide ? "float64" : "float32", "--features",
                                                        ranks == 4 ? "replicated" : "by_item"},
                                          pairs);
                check_figures(report, ranks, wide, loss, weights);
                CHECK(names(report).size() == (!linear ? 2 : pairs ? 34 : 18));
                for (json const& s : report.at("strategies")) CHECK(s.at("position_ids_equal") == true);
                if (!linear)
                    CHECK(names(report) ==
                          std::set<std::string>{"gather none none none", "head_sharded none none none"});
            }
        }
    }

    TEST_CASE("images and videos that do not fit the text are refused, other positions are told") {
        copies const c(deepstack, one_strategy);
        archive const good(c.expected);
        auto const options = on(c.model, c.expected, "3");
        auto const refuse = [&](auto change, arguments const& passages) {
            auto damaged = good;
            change(damaged);
            damaged.save(c.expected);
            check_refusal(options, arguments{"qwen: ", "expected.safetensors"} + passages);
        };
        refuse([](archive& a) { a.set("image_grid_thw", 1, 6); },
               {"image placeholders", "expected 22, the rows of features that the grids have, got 19"});
        refuse([](archive& a) { a.set("image_grid_thw", 1, 5); }, {"height of image 0", "merge size 2, got 5"});
        refuse([](archive& a) { a.tensors.erase("video_grid_thw"); }, {"placeholder"});
        refuse([](archive& a) { a.tensors.erase("deepstack_image.1"); }, {"deepstack_image.1"});
        refuse(
            [](archive& a) {
                auto& t = a.tensors.at("video_features");
                t.shape[0] = 25;
                t.bytes.resize(25 * 64 * 4);
            },
            {"video_features", "26", "25"});
        check_refusal(on(data, deepstack / "reference.safetensors", "2"),
                      {"image_grid_thw", "expected a model with vision_config"});

        auto moved = good;
        moved.set("position_ids", 151, 7);
        moved.save(c.expected);
        auto const report = run_json(options);
        for (json const& s : report.at("strategies")) CHECK(s.at("position_ids_equal") == false);
        CHECK_FALSE(
            run_json(tiny + arguments{"--linear", "zigzag"}).at("strategies").at(0).contains("position_ids_equal"));
    }

    TEST_CASE("the options choose one strategy, which the report names") {
        for (std::string const attention : {"gather", "head_sharded"})
            for (std::string const linear : {"sequential", "sequential:batch", "zigzag", "striped", "head_sharded"})
                for (std::string const carry : {"scan", "serial"})
                    for (std::string const cut : {"balanced", "aligned:16"}) {
                        bool const by_heads = linear == "head_sharded";
                        if (by_heads && (carry != "scan" || cut != "balanced")) continue;
                        arguments options{"--attention", attention, "--linear", linear, "--chunk", "16"};
                        if (!by_heads) options = options + arguments{"--carry", carry, "--cut", cut};
                        auto const report = run_json(tiny + options);
                        CHECK(names(report) == std::set{attention + ' ' + linear + ' ' + (by_heads ? "none" : carry) +
                                                        ' ' + (by_heads ? "none" : cut)});
                        CHECK(report.at("strategies").size() == 1);
                    }
        CHECK(names(run_json(tiny + arguments{"--linear", "zigzag:batch"})) ==
              std::set<std::string>{"gather zigzag:batch scan balanced"});
    }

    TEST_CASE("the report as text has the figures, too") {
        auto const result = run(tiny + arguments{"--linear", "zigzag", "--carry", "serial", "--cut", "aligned:64"});
        CHECK(result.code == 0);
        CHECK(result.err == "");
        for (char const* passage : {"gather", "zigzag", "serial", "aligned:64", "0 exact"})
            CHECK_MESSAGE(result.out.find(passage) != std::string::npos, passage);
        CHECK(result.out.find("gradient") == std::string::npos);
        auto const step = run(tiny + arguments{"--linear", "head_sharded", "--backward"});
        for (char const* passage : {"gradient", "0 exact", " equal\n"})
            CHECK_MESSAGE(step.out.find(passage) != std::string::npos, passage);

        auto const lines = [](std::string const& out) { // of strategies, and of the legend, apart by an empty one
            auto const end = out.rfind("\n\n"), begin = out.find("attention    linear");
            REQUIRE(begin < end);
            return std::ranges::count(out.substr(begin, end - begin), '\n');
        };
        auto const few = run(tiny), all = run(tiny + arguments{"--all"}),
                   media = run(on(deepstack, deepstack / "reference.safetensors", "2"));
        CHECK(lines(few.out) == 5);
        CHECK(lines(all.out) == 34);
        CHECK(lines(media.out) == 2);
        for (char const* passage : {"ance", "imbalance    most rows of a rank", "carry        scan:"})
            CHECK_MESSAGE(few.out.find(passage) != std::string::npos, passage);
        CHECK(few.out.find("positions") == std::string::npos);
        CHECK(media.out.find("those of the reference\n") != std::string::npos);
    }

    TEST_CASE("options that mean nothing are refused") {
        for (auto const& [option, value, passages] : std::vector<std::tuple<std::string, std::string, arguments>>{
                 {"--ranks", "0", {"--ranks", "from 1 to 256", "\"0\""}},
                 {"--ranks", "-1", {"--ranks", "from 1 to 256", "\"-1\""}},
                 {"--ranks", "1000000000", {"--ranks", "from 1 to 256", "\"1000000000\""}},
                 {"--ranks", "99999999999999999999", {"--ranks", "from 1 to 256"}},
                 {"--ranks", "two", {"--ranks", "from 1 to 256", "\"two\""}},
                 {"--ranks", "2.5", {"--ranks", "from 1 to 256", "\"2.5\""}},
                 {"--ranks", "", {"--ranks", "some text"}},
                 {"--carry", "", {"--carry", "some text"}},
                 {"--dtype", "", {"--dtype", "some text"}},
                 {"--dtype", "bfloat16", {"--dtype", "float64 or float32", "\"bfloat16\""}},
                 {"--device", "tpu", {"--device", "cpu or cuda", "\"tpu\""}},
                 {"--attention", "ring", {"--attention", "gather or head_sharded", "\"ring\""}},
                 {"--linear", "diagonal", {"--linear", "sequential, zigzag", "\"diagonal\""}},
                 {"--linear", "zigzag:rows", {"--linear", "sequence or batch", "\"rows\""}},
                 {"--linear", "replicated", {"--linear", "\"replicated\""}},
                 {"--linear", "head_sharded:batch", {"--linear", "\"batch\""}},
                 {"--carry", "tree", {"--carry", "scan or serial", "\"tree\""}},
                 {"--cut", "aligned", {"--cut", "balanced or aligned:UNIT", "\"aligned\""}},
                 {"--cut", "aligned:0", {"--cut", "unit of aligned", "\"0\""}},
                 {"--cut", "aligned:-16", {"--cut", "unit of aligned", "\"-16\""}},
                 {"--cut", "ragged", {"--cut", "balanced or aligned:UNIT", "\"ragged\""}},
                 {"--chunk", "0", {"--chunk", "\"0\""}},
                 {"--chunk", "-3", {"--chunk", "\"-3\""}},
                 {"--features", "somewhere", {"--features", "by_item or replicated", "\"somewhere\""}},
                 {"--frobnicate", "1", {"--frobnicate"}}}) {
            auto options = on(data, reference, "2");
            if (option == "--ranks")
                options.back() = value;
            else
                options = options + arguments{option, value};
            check_refusal(options, arguments{"qwen: "} + passages);
            check_refusal(options + arguments{"--json"}, passages);
        }
        check_refusal({"--model", data.string()}, {"--reference"});
        check_refusal({}, {"required"});
        for (arguments const& choice : {arguments{"--carry", "scan"}, arguments{"--cut", "balanced"}})
            check_refusal(tiny + arguments{"--linear", "head_sharded"} + choice, {choice[0] + ": no effect: expected"});
        check_refusal(tiny + arguments{"--products", "fixed"}, {"--products: no effect: expected --device cuda"});
        check_refusal(tiny + arguments{"--rule", "half"},
                      {"--rule: no effect: expected --dtype bfloat16, got float64"});
    }

    TEST_CASE("what GPUs cannot do is refused before they are looked for, and so are more ranks than there are GPUs") {
        arguments const cuda{"--device", "cuda"};
        for (auto const& [options, passages] : std::vector<std::pair<arguments, arguments>>{
                 {{"--dtype", "float64"}, {"--dtype", "with --device cuda", "float32 or bfloat16", "\"float64\""}},
                 {{"--linear", "head_sharded", "--carry", "scan"}, {"--carry: no effect", "head_sharded"}},
                 {{"--chunk", "64"}, {"--chunk: no effect", "cuda"}},
                 {{"--products", "exact"}, {"--products", "cublas or fixed", "\"exact\""}},
                 {{"--rule", "float"}, {"--rule", "bfloat16 or half", "\"float\""}},
                 {{"--rule", "half"}, {"--rule: no effect", "--dtype bfloat16", "float32"}}})
            check_refusal(tiny + cuda + options, arguments{"qwen: "} + passages);
        // "at least 1, got 0" without a GPU, "at most the GPUs found" with some, "built for GPUs" without nvcc
        check_refusal(on(data, reference, "256") + cuda, {"qwen: ", "--", "GPUs", "expected", "got"});
        CHECK(run_json(tiny + arguments{"--device", "cpu", "--linear", "zigzag"}).at("strategies").at(0).at("device") ==
              "cpu");
    }

    TEST_CASE("files that are missing, cut short or not what they claim are refused") {
        copies const c(data, one_strategy);
        auto const refuse = [&](arguments const& passages) {
            check_refusal(c.options(), arguments{"qwen: "} + passages);
        };
        check_refusal(on(c.home / "nowhere", c.expected, "2"), {"nowhere/config.json"});
        check_refusal(on(c.model, c.home / "nothing.safetensors", "2"), {"nothing.safetensors"});
        check_refusal(on(c.model, c.model, "2"), {"model"}); // a folder
        check_refusal(on(c.model, c.model / "config.json", "2"), {"config.json"});

        for (auto const& [good, file] :
             {std::pair{data / "model.safetensors", c.model / "model.safetensors"}, std::pair{reference, c.expected}}) {
            std::string const bytes = read(good);
            for (std::size_t const length : truncations(bytes)) {
                CAPTURE(length);
                write(file, bytes.substr(0, length));
                refuse({file.filename().string(), "expected", "got"});
            }
            std::uint64_t header = 0;
            std::memcpy(&header, bytes.data(), 8);
            for (std::size_t at = 0; at < 8 + header; at += at < 16 ? 1 : (8 + header) / 40) {
                CAPTURE(at); // a header with one other byte is refused, or means the same
                std::string damaged = bytes;
                damaged[at] = static_cast<char>(damaged[at] ^ 0x15);
                write(file, damaged);
                auto const result = run(c.options());
                if (result.code != 0) CHECK(problem_of_refusal(result) == "");
            }
            write(file, bytes + "x");
            refuse({file.filename().string(), "expected", "got"});
            write(file, bytes);
        }
        CHECK(run(c.options()).code == 0);
        fs::remove(c.model / "model.safetensors");
        refuse({"model.safetensors"});
    }

    TEST_CASE("a weight that head and embedding share has the bits of one rank, too") {
        copies const c(data, one_strategy);
        c.config("tie_word_embeddings", true);
        for (arguments const& linear :
             {arguments{"head_sharded"}, arguments{"zigzag", "--carry", "serial", "--cut", "aligned:64"}}) {
            auto const report = run_json(on(c.model, c.expected, "3") + arguments{"--backward", "--linear"} + linear);
            REQUIRE(report.at("strategies").size() == 1);
            json const& s = report.at("strategies").at(0);
            CAPTURE(s.dump());
            CHECK(s.at("exact") == true);
            CHECK(s.at("grads_equal_one_rank") == true);
            CHECK(s.at("grads").contains("model.embed_tokens.weight"));
            CHECK_FALSE(s.at("grads").contains("lm_head.weight"));
        }
    }

    TEST_CASE("a NaN in the model or in the reference is no agreement") {
        copies const c(data, one_strategy);
        archive model(data / "model.safetensors"), expected(reference);
        expected.poison("grad.lm_head.weight");
        expected.save(c.expected);
        CHECK(run(c.options()).code == 0); // gradients are not asked for
        check_refusal(c.options() + arguments{"--backward"}, {"grad.lm_head.weight", "a number", "nan"});
        fs::copy_file(reference, c.expected, fs::copy_options::overwrite_existing);
        model.poison("model.norm.weight");
        model.save(c.model / "model.safetensors");
        check_refusal(c.options(), {"log-probability 0", "a number", "nan"});
    }

    TEST_CASE("a config of another model, or none at all, is refused") {
        copies const c(data, one_strategy);
        auto const refuse = [&](arguments const& passages) {
            check_refusal(c.options(), arguments{"config.json"} + passages);
            fs::copy_file(data / "config.json", c.model / "config.json", fs::copy_options::overwrite_existing);
        };
        c.config("model_type", "qwen3_5_moe_text"); // which has other settings
        refuse({"4 settings are wrong", "num_experts"});
        c.config("model_type", "llama");
        refuse({"model_type", "llama"});
        c.config("num_hidden_layers", 5);
        refuse({"layer", "expected", "got"});
        c.config("layer_types", {"linear_attention", "linear_attention", "linear_attention", "sliding"});
        refuse({"layer_types", "sliding"});
        c.config("hidden_size", -64);
        refuse({"hidden_size", "expected", "-64"});
        c.config("hidden_size", "64");
        refuse({"hidden_size", "expected"});
        c.config("linear_num_value_heads", 6); // 4 key heads
        refuse({"linear_num_value_heads", "expected", "6"});
        for (char const* text : {"", "{", "[]", "null", "{\"model_type\": \"qwen3_5_text\"}"}) {
            CAPTURE(text);
            write(c.model / "config.json", text);
            refuse({});
        }
    }

    TEST_CASE("a weight that is missing or misshapen is refused by name") {
        copies const c(data, one_strategy);
        fs::path const file = c.model / "model.safetensors";
        archive const good(data / "model.safetensors");
        good.save(file);
        CHECK(run(c.options()).code == 0); // so that what follows is refused for what it changes
        for (char const* weight : {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.linear_attn.A_log",
                                   "model.layers.2.linear_attn.conv1d.weight", "model.layers.3.self_attn.k_norm.weight",
                                   "model.layers.1.mlp.down_proj.weight"}) {
            CAPTURE(weight);
            auto damaged = good;
            damaged.tensors.erase(weight);
            damaged.save(file);
            check_refusal(c.options(), {"model.safetensors", weight});

            damaged = good;
            auto& t = damaged.tensors.at(weight);
            std::size_t const rows = t.shape[0];
            t.shape[0] = rows - 1;
            t.bytes.resize(t.bytes.size() / rows * (rows - 1));
            damaged.save(file);
            check_refusal(c.options(), {"model.safetensors", weight, "shape", "expected", "got"});
        }
        auto swapped = good; // as many elements, the axes exchanged
        auto& shape = swapped.tensors.at("model.layers.0.mlp.up_proj.weight").shape;
        std::swap(shape[0], shape[1]);
        swapped.save(file);
        check_refusal(c.options(), {"model.layers.0.mlp.up_proj.weight", "expected 128 x 64", "got 64 x 128"});
        auto integers = good;
        integers.tensors.at("model.layers.3.self_attn.q_norm.weight").dtype = "I32";
        integers.save(file);
        check_refusal(c.options(), {"model.layers.3.self_attn.q_norm.weight", "expected F64, F32"});
    }

    TEST_CASE("a batch that is none is refused") {
        copies const c(data, one_strategy);
        archive const good(reference);
        auto const refuse = [&](auto change, arguments const& passages) {
            auto damaged = good;
            change(damaged);
            damaged.save(c.expected);
            check_refusal(c.options(), passages);
        };
        auto const cu = [](std::size_t i, std::int64_t value) {
            return [=](archive& a) { a.set("cu_seqlens", i, value); };
        };
        std::size_t const last = good.tensors.at("cu_seqlens").shape[0].get<std::size_t>() - 1;
        refuse([](archive& a) { a.set("input_ids", 17, 256); }, {"token id 17", "expected 0 to 255", "got 256"});
        refuse([](archive& a) { a.set("input_ids", 3, -1); }, {"token id 3", "expected 0 to 255", "got -1"});
        refuse(cu(2, 1), {"offset 2 decreases", "expected at least", "got 1"});
        refuse(cu(0, 1), {"offset 0", "expected 0", "got 1"});
        refuse(cu(0, -1), {"offset 0", "expected 0", "got -1"});
        refuse(cu(last, 129), {"last offset", "128", "got 129"});
        refuse(cu(last, std::int64_t{1} << 62), {"last offset", "got 4611686018427387904"});
        refuse(cu(last, 127), {"last offset", "128", "got 127"});
        refuse([](archive& a) { a.tensors.erase("cu_seqlens"); }, {"cu_seqlens"});
        auto without = good;
        without.tensors.erase("grad.lm_head.weight");
        without.save(c.expected);
        CHECK(run(c.options()).code == 0); // not asked for
        check_refusal(c.options() + arguments{"--backward"}, {"expected.safetensors", "grad.lm_head.weight"});
        refuse([](archive& a) { a.tensors.erase("input_ids"); }, {"input_ids"});
        refuse([](archive& a) { a.tensors.erase("logprobs"); }, {"logprobs"});
        refuse([](archive& a) { a.tensors.at("cu_seqlens") = {"I64", {0}, ""}; }, {"offsets"});
        refuse(
            [](archive& a) {
                auto& t = a.tensors.at("logprobs");
                t.shape = {127};
                t.bytes.resize(127 * 8);
            },
            {"logprobs", "128", "127"});
        good.save(c.expected);
        CHECK(run(c.options()).code == 0);
    }
}
