// SPDX-License-Identifier: Apache-2.0
// The golden files of transformers through the program that users run on them.
#include <examples/program.hpp>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include <support/files.hpp>

namespace {

using namespace program;
using arguments = std::vector<std::string>;

fs::path const golden = support::golden_dir;

struct golden_file {
    char const* name;
    char const* kind;
    std::vector<std::string> outputs;
};

std::vector<std::string> const layer_outputs = {
    "output",       "d_hidden_states",       "grad.in_proj_qkv.weight", "grad.in_proj_z.weight",
    "grad.A_log",   "grad.in_proj_b.weight", "grad.in_proj_a.weight",   "grad.conv1d.weight",
    "grad.dt_bias", "grad.norm.weight",      "grad.out_proj.weight"};

std::vector<std::string> const rotary_outputs = {"position_ids", "q_rot", "k_rot", "dq", "dk"};

std::vector<golden_file> const files = {
    {"conv_bias", "causal_conv1d", {"y", "dx", "dweight", "dbias"}},
    {"conv_linear", "causal_conv1d", {"y", "dx", "dweight"}},
    {"conv_silu", "causal_conv1d", {"y", "dx", "dweight"}},
    {"gdr_small", "gated_delta_rule", {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta"}},
    {"gdr_odd", "gated_delta_rule", {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta"}},
    {"gdr_fast_decay", "gated_delta_rule", {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta"}},
    {"gdn_layer_small", "gdn_layer", layer_outputs},
    {"gdn_layer_odd", "gdn_layer", layer_outputs},
    {"mrope_qwen3_vl", "mrope_index", rotary_outputs},
    {"mrope_qwen2_5_vl", "mrope_index", rotary_outputs},
};

std::string path(char const* name) { return (golden / name).string() + ".safetensors"; }

/// Checks that the program reports the outputs and gradients of its file, each within the limit.
void check_errors(golden_file const& file, std::string const& dtype, arguments const& options) {
    auto const report = run_json(arguments{path(file.name), "--dtype", dtype} + options);
    CHECK(report.at("kind") == file.kind);
    auto const errors = report.at("errors").get<std::map<std::string, double>>();
    for (auto const& name : file.outputs) CHECK_MESSAGE(errors.count(name) == 1, name);
    bool const rotary = file.kind == std::string("mrope_index");
    double const wide = file.kind == std::string("causal_conv1d") ? 1e-6 : rotary ? 2e-6 : 2e-7;
    for (auto const& [given_name, error] : errors) {
        auto const& name = given_name;
        CAPTURE(name);
        if (name == "position_ids") {
            CHECK(error == 0);
            continue;
        }
        CHECK(error <= (dtype == "float64" || rotary ? wide : 5e-6));
        CHECK(error > 0); // the file is another program's
    }
}

} // namespace

TEST_SUITE("examples") {
    TEST_CASE("every golden file agrees on every number of ranks and every layout") {
        std::vector<std::string> const layouts = {"sequential", "sequential:batch", "zigzag",         "zigzag:batch",
                                                  "striped",    "head_sharded",     "table=0,0:batch"};
        std::string const heads = "head_sharded";
        std::size_t turn = 0;
        for (golden_file const& file : files)
            for (char const* ranks : {"1", "2", "3", "4", "5", "8"})
                for (auto const& layout : layouts) {
                    ++turn;
                    bool const recurrence = file.kind[0] == 'g', by_heads = layout == heads;
                    arguments options{"--ranks", ranks, "--layout", layout};
                    if (recurrence && !by_heads) options = options + arguments{"--carry", turn % 2 ? "scan" : "serial"};
                    if (recurrence && turn % 3 == 0) options = options + arguments{"--chunk", "16"};
                    if (!by_heads && turn % 3 == 0) options = options + arguments{"--cut", "aligned:16"};
                    check_errors(file, turn % 5 < 3 ? "float64" : "float32", options);
                }
    }

    TEST_CASE("positions of Qwen2.5-VL go on as those of transformers 5 do, which whole seconds tell from others") {
        folder const home;
        fs::path const file = home / "seconds.safetensors"; // a video of 3 frames, of 4 rows each, and text behind it
        archive a(path("mrope_qwen2_5_vl"));
        auto const set = [&](char const* name, json const& shape, std::vector<std::int64_t> const& values) {
            a.tensors[name] = {"I64", shape, {reinterpret_cast<char const*>(values.data()), 8 * values.size()}};
        };
        std::vector<std::int64_t> ids(16, 7), positions;
        std::fill_n(ids.begin() + 2, 12, 151656);
        for (std::vector<std::int64_t> const& media :
             std::vector<std::vector<std::int64_t>>{{2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6},
                                                    {2, 2, 3, 3, 2, 2, 3, 3, 2, 2, 3, 3},
                                                    {2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3}}) {
            positions.insert(positions.end(), {0, 1});
            positions.insert(positions.end(), media.begin(), media.end());
            positions.insert(positions.end(), {4, 5}); // 7 and 8 in the versions before
        }
        set("cu_seqlens", {2}, {0, 16});
        set("input_ids", {16}, ids);
        set("image_grid_thw", {0, 3}, {});
        set("video_grid_thw", {1, 3}, {3, 4, 4});
        set("position_ids", {3, 16}, positions);
        for (char const* name : {"q", "q_rot", "k", "k_rot", "dq", "dq_rot", "dk", "dk_rot"}) {
            auto& t = a.tensors.at(name);
            std::size_t const heads = t.shape[1];
            t = {"F32", {16, heads, 128}, std::string(16 * heads * 128 * sizeof(float), '\0')};
        }
        a.metadata["tokens_per_second"] = "2";
        a.metadata["second_per_grid_t"] = "1.0";
        a.save(file);
        auto const position_error = [&] {
            return run_json({file.string(), "--ranks", "3"}).at("errors").at("position_ids").get<double>();
        };
        CHECK(position_error() == 0);
        a.metadata["model"] = "qwen2_vl";
        a.save(file);
        CHECK(position_error() > 0.1);
        set("video_grid_thw", {1, 3}, {3, 4, 5});
        a.save(file);
        check_refusal({file.string()},
                      {"seconds.safetensors: width of video 0: expected a multiple of the merge size 2"});
    }

    TEST_CASE("the report as text has the figures, too") {
        auto const result = run({path("gdr_small"), "--ranks", "3", "--layout", "zigzag:batch"});
        CHECK(result.code == 0);
        CHECK(result.err == "");
        for (char const* passage :
             {"gated_delta_rule on 3 ranks, zigzag over batch", "final_state", "o  ", "relative error"})
            CHECK_MESSAGE(result.out.find(passage) != std::string::npos, passage);
    }

    TEST_CASE("options that mean nothing are refused") {
        for (auto const& [option, value, passages] : std::vector<std::tuple<std::string, std::string, arguments>>{
                 {"--ranks", "0", {"--ranks", "from 1 to 256", "\"0\""}},
                 {"--ranks", "-1", {"--ranks", "from 1 to 256", "\"-1\""}},
                 {"--ranks", "1000000000", {"--ranks", "from 1 to 256", "\"1000000000\""}},
                 {"--ranks", "257", {"--ranks", "from 1 to 256", "\"257\""}},
                 {"--layout", "", {"--layout", "some text"}},
                 {"--layout", "diagonal", {"--layout", "sequential, zigzag", "\"diagonal\""}},
                 {"--layout", "zigzag:rows", {"--layout", "sequence or batch", "\"rows\""}},
                 {"--layout", "replicated", {"--layout", "\"replicated\""}},
                 {"--layout", "table=0,2", {"--layout", "owner of chunk 1", "0 to 1", "got 2"}},
                 {"--layout", "table=", {"--layout", "owner of chunk 0"}},
                 {"--dtype", "float16", {"--dtype", "float64 or float32", "\"float16\""}},
                 {"--carry", "tree", {"--carry", "scan or serial", "\"tree\""}},
                 {"--cut", "aligned:x", {"--cut", "unit of aligned", "\"x\""}},
                 {"--cut", "ragged\nline", {"--cut", "balanced or aligned:UNIT", "ragged"}},
                 {"--chunk", "0", {"--chunk", "\"0\""}},
                 {"--frobnicate", "1", {"--frobnicate"}}})
            check_refusal({path("gdr_small"), option, value}, arguments{"verify: "} + passages);
        check_refusal({}, {"FILE is required"});
    }

    TEST_CASE("options that have no effect are refused") {
        arguments const by_heads{"--layout", "head_sharded"};
        for (auto const& [file, options, option] : std::vector<std::tuple<char const*, arguments, std::string>>{
                 {"conv_silu", {"--carry", "scan"}, "--carry"},
                 {"conv_silu", {"--chunk", "64"}, "--chunk"},
                 {"mrope_qwen3_vl", {"--carry", "scan"}, "--carry"},
                 {"conv_silu", by_heads + arguments{"--cut", "balanced"}, "--cut"},
                 {"gdr_small", by_heads + arguments{"--cut", "aligned:16"}, "--cut"},
                 {"gdr_small", by_heads + arguments{"--carry", "serial"}, "--carry"},
                 {"gdn_layer_small", by_heads + arguments{"--carry", "serial"}, "--carry"}})
            check_refusal(arguments{path(file)} + options, {"verify: " + option + ": no effect: expected"});
        run_json(arguments{path("gdn_layer_small"), "--cut", "aligned:16"} + by_heads); // of what is not by heads
    }

    TEST_CASE("files that are missing, cut short or not what they claim are refused") {
        folder const home;
        fs::path const file = home / "damaged.safetensors";
        arguments const damaged{file.string(), "--ranks", "3"};
        check_refusal(damaged, {"verify: ", "damaged.safetensors"});
        check_refusal({golden.string()}, {"golden"}); // a folder
        check_refusal({(golden / "README.md").string()}, {"README.md", "expected", "got"});
        for (golden_file const& good : files) {
            CAPTURE(good.name);
            std::string const bytes = read(path(good.name));
            for (std::size_t const length : truncations(bytes)) {
                CAPTURE(length);
                write(file, bytes.substr(0, length));
                check_refusal(damaged, {"damaged.safetensors", "expected", "got"});
            }
            std::uint64_t header = 0;
            std::memcpy(&header, bytes.data(), 8);
            for (std::size_t at = 0; at < 8 + header; at += at < 16 ? 1 : (8 + header) / 25) {
                CAPTURE(at); // a header with one other byte is refused, or means the same
                std::string other = bytes;
                other[at] = static_cast<char>(other[at] ^ 0x15);
                write(file, other);
                auto const result = run(damaged);
                if (result.code != 0) CHECK(problem_of_refusal(result) == "");
            }
        }
    }

    TEST_CASE("a golden file whose tensors do not fit each other is refused") {
        folder const home;
        fs::path const file = home / "damaged.safetensors";
        auto const refuse = [&](char const* name, auto change, arguments const& passages) {
            archive damaged(path(name));
            damaged.save(file);
            CHECK(run({file.string()}).code == 0); // so that what follows is refused for what it changes
            change(damaged);
            damaged.save(file);
            check_refusal({file.string(), "--ranks", "2"}, passages);
        };
        auto const cu = [](std::size_t i, std::int64_t value) {
            return [=](archive& a) { a.set("cu_seqlens", i, value); };
        };
        auto const drop = [](char const* name) { return [=](archive& a) { a.tensors.erase(name); }; };
        auto const shorter = [](char const* name) {
            return [=](archive& a) {
                auto& t = a.tensors.at(name);
                std::size_t const rows = t.shape[0];
                t.shape[0] = rows - 1;
                t.bytes.resize(t.bytes.size() / rows * (rows - 1));
            };
        };
        for (char const* name : {"conv_bias", "gdr_small", "gdn_layer_small"}) {
            CAPTURE(name);
            refuse(name, cu(0, 1), {"offset 0", "expected 0", "got 1"});
            refuse(name, cu(2, 0), {"offset 2 decreases", "got 0"});
            refuse(name, cu(2, -7), {"offset 2 decreases", "got -7"});
            refuse(name, drop("cu_seqlens"), {"cu_seqlens"});
            refuse(name, [](archive& a) { a.metadata.erase("kind"); }, {"kind"});
            refuse(name, [](archive& a) { a.metadata["kind"] = "softmax"; }, {"kind", "softmax"});
        }
        refuse("conv_silu", [](archive& a) { a.metadata["activation"] = "ge\x1blu"; },
               {"activation in the metadata: expected silu or None, got \"ge\\x1blu\""});
        refuse("gdr_small", [](archive& a) { a.metadata["qk_l2norm"] = "yes"; },
               {"expected True or False, got \"yes\""});
        for (auto const& [text, part] : std::vector<std::pair<json, std::string>>{
                 {{{"hidden_act", "gelu"}}, "hidden_act: expected \"silu\", got \"gelu\""},
                 {{{"linear_key_head_dim", std::int64_t{1} << 40}}, "linear_key_head_dim: expected 1 to 65536"},
                 {{{"hidden_size", -1}}, "hidden_size: expected 1 to 65536, got -1"}})
            refuse("gdn_layer_small",
                   [&, text = text](archive& a) {
                       json config = json::parse(a.metadata["config"].get<std::string>());
                       config.update(text);
                       a.metadata["config"] = config.dump();
                   },
                   {part});
        refuse("conv_bias",
               [](archive& a) { std::swap(a.tensors.at("weight").shape[0], a.tensors.at("weight").shape[1]); },
               {"shape of tensor \"weight\": expected [16, -1], got [4, 16]"});
        for (auto const& [golden_name, tensor, shapes] : std::vector<std::tuple<char const*, std::string, std::string>>{
                 {"conv_silu", "y", "expected [64, 24], got [24, 64]"},
                 {"conv_silu", "dweight", "expected [24, 4], got [4, 24]"},
                 {"gdr_small", "o", "expected [64, 4, 16], got [4, 64, 16]"},
                 {"gdn_layer_small", "output", "expected [52, 48], got [48, 52]"},
                 {"gdn_layer_small", "weight.in_proj_qkv.weight", "expected [128, 48], got [48, 128]"},
                 {"gdn_layer_small", "grad.in_proj_qkv.weight", "expected [128, 48], got [48, 128]"},
                 {"mrope_qwen3_vl", "position_ids", "expected [3, 206], got [206, 3]"},
                 {"mrope_qwen3_vl", "q_rot", "expected [206, 2, 128], got [2, 206, 128]"}})
            refuse(golden_name,
                   [&, tensor = tensor](archive& a) {
                       std::swap(a.tensors.at(tensor).shape[0], a.tensors.at(tensor).shape[1]);
                   },
                   {"shape of tensor \"" + tensor + "\": " + shapes});
        refuse("conv_bias", cu(6, 45), {"x", "45", "44"});
        refuse("conv_bias", cu(6, std::int64_t{1} << 60), {"x", "44"});
        refuse("gdr_small", cu(4, std::int64_t{1} << 60), {"shape of tensor", "expected [1152921504606846976, ", "64"});
        refuse("gdr_small",
               [](archive& a) {
                   for (char const* name : {"q", "k", "v", "o"})
                       a.tensors.at(name) = {"F32", {0, 1, std::int64_t{1} << 40}, ""};
                   a.tensors.at("cu_seqlens") = {"I64", {1}, std::string(8, '\0')};
               },
               {"width of a key head: expected 1 to 65536, got 1099511627776"});
        refuse("gdr_small", cu(4, 65), {"65", "64"});
        refuse("gdr_small", cu(4, 63), {"63", "64"});
        refuse("gdn_layer_small", cu(3, 53), {"hidden_states", "53", "52"});
        for (char const* tensor : {"x", "weight", "y"}) refuse("conv_bias", drop(tensor), {tensor});
        for (char const* tensor : {"x", "weight", "bias", "y"})
            refuse("conv_bias", shorter(tensor), {"expected", "got"});
        for (char const* tensor : {"q", "k", "v", "g", "beta", "o", "final_state"}) {
            refuse("gdr_small", drop(tensor), {tensor});
            refuse("gdr_small", shorter(tensor), {"expected", "got"});
        }
        refuse("gdn_layer_small", shorter("d_output"), {"d_output", "expected", "got"});
        for (char const* tensor :
             {"hidden_states", "output", "d_hidden_states", "grad.conv1d.weight", "weight.A_log",
              "weight.conv1d.weight", "weight.dt_bias", "weight.in_proj_a.weight", "weight.in_proj_b.weight",
              "weight.in_proj_qkv.weight", "weight.in_proj_z.weight", "weight.norm.weight", "weight.out_proj.weight"}) {
            refuse("gdn_layer_small", drop(tensor), {tensor});
            refuse("gdn_layer_small", shorter(tensor), {"expected", "got"});
        }
        for (char const* tensor : {"q", "dk_rot", "k_rot", "input_ids", "video_grid_thw", "position_ids"})
            refuse("mrope_qwen3_vl", drop(tensor), {tensor});
        refuse("mrope_qwen3_vl", shorter("q"), {"expected [206, 2, 128], got [205, 2, 128]"});
        refuse("mrope_qwen3_vl", shorter("image_grid_thw"), {"image placeholders in the batch: expected", "got"});
        for (char const* key : {"model", "layout", "rope", "image_token_id", "spatial_merge_size"}) {
            refuse("mrope_qwen3_vl", [&](archive& a) { a.metadata.erase(key); }, {key});
            refuse("mrope_qwen3_vl", [&](archive& a) { a.metadata[key] = "?"; }, {key, "expected", "got"});
        }
        refuse("mrope_qwen2_5_vl",
               [](archive& a) { a.metadata["rope"] = R"({"rope_theta": 1e6, "mrope_section": [16, 24, 23]})"; },
               {"sum of the sections: expected half the rotary size, 64, got 63"});
        refuse("gdn_layer_small", [](archive& a) { a.metadata.erase("config"); }, {"config"});
        refuse("gdn_layer_small", [](archive& a) { a.metadata["config"] = "{"; }, {"config"});
        refuse("gdn_layer_small", [](archive& a) { a.metadata["config"] = "{}"; }, {"hidden_size"});
    }
}
