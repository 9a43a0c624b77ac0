// SPDX-License-Identifier: Apache-2.0
// Checkpoints go to shards and come back as they were, to the last byte of their files; what is wrong is refused.
#include <cpx/model/hf_config.hpp>
#include <cpx/model/hf_names.hpp>
#include <cpx/model/hf_sizes.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/model/safetensors_writer.hpp>
#include <cpx/model/shard.hpp>
#include <cpx/model/weight_share.hpp>

#include <support/files.hpp>
#include <support/random.hpp>

#include <examples/program.hpp>

#include <signal.h>
#include <stdio.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <set>

namespace {

using namespace program;
using arguments = std::vector<std::string>;
using dtype = cpx::safetensors::dtype;
using cpx::index_t;

fs::path const models = fs::path(support::source_dir) / "examples/data";
arguments const files{"config.json", "model.safetensors"};

arguments words(std::string const& text) {
    std::istringstream in(text);
    arguments all;
    for (std::string word; in >> word;) all.push_back(word);
    return all;
}

void succeeds(arguments const& options) {
    auto const result = run(options);
    CHECK(result.err == "");
    CHECK(result.out == "");
    REQUIRE(result.code == 0);
}

/// Converts a checkpoint to shards and back, and compares files.
void check_round_trip(fs::path const& from, folder const& home, std::string const& options, arguments const& compared) {
    CAPTURE(from.string());
    CAPTURE(options);
    fs::path const shards = home / "shards", back = home / "back";
    fs::remove_all(shards);
    fs::remove_all(back);
    succeeds(arguments{from.string(), shards.string()} + words(options));
    succeeds({"--to", "hf", shards.string(), back.string()});
    for (auto const& name : compared) {
        CAPTURE(name);
        CHECK(read(back / name) == read(from / name));
    }
    std::size_t all = 0;
    for (auto const& entry : fs::directory_iterator(back)) all += entry.exists();
    CHECK(all == compared.size());
    CHECK(fs::status(shards).permissions() == fs::status(home / ".").permissions());
}

/// Writes a config.json and the weights of its model, with random bits, bfloat16 and one float32.
///
/// Norms of linear attention are about 1, as they are; their last number wants more bits when it is less 1.
class made_checkpoint {
public:
    made_checkpoint(fs::path const& place, json const& config, cpx::weight_style style, int file_count, bool mtp)
        : place_(place) {
        fs::create_directories(place);
        write(place / "config.json", config.dump(2));
        auto sizes = cpx::sizes_of(cpx::hf_config::read(place / "config.json"));
        if (mtp) sizes.mtp = {{.moe = sizes.num_experts > 0}};
        cpx::hf_names const names(sizes, style);
        for (auto const& w : names.weights())
            for (std::size_t i = 0; i < w.rule->sources(); ++i)
                shapes[names.hf(w, i)] = cpx::shape_of(w.rule->from[i], sizes);
        std::vector<std::vector<cpx::safetensors_writer::tensor_info>> declared(static_cast<std::size_t>(file_count));
        json map = json::object();
        std::size_t next = 0;
        for (auto const& [name, shape] : shapes) {
            declared[next % declared.size()].push_back(
                {name, name.ends_with("dt_bias") ? dtype::f32 : dtype::bf16, shape});
            map[name] = name_of(next++ % declared.size(), declared.size());
        }
        for (std::size_t f = 0; f < declared.size(); ++f) {
            cpx::safetensors_writer file(place / name_of(f, declared.size()), declared[f],
                                         {{"format", "pt"}, {"file", std::to_string(f)}});
            for (auto const& t : declared[f]) file.write(t.name, bytes(t));
            file.finish();
            written.push_back(name_of(f, declared.size()));
        }
        written.push_back("config.json");
        if (file_count == 1) return;
        written.push_back("model.safetensors.index.json");
        write(place / written.back(), json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump(2));
    }

    std::map<std::string, std::vector<index_t>> shapes;
    arguments written;

private:
    static std::string name_of(std::size_t file, std::size_t count) {
        return count == 1 ? "model.safetensors" : "model-" + std::to_string(file) + ".safetensors";
    }
    std::vector<std::byte> bytes(cpx::safetensors_writer::tensor_info const& t) {
        std::vector<std::byte> all(static_cast<std::size_t>(*cpx::safetensors::bytes_of(t.dtype, t.shape)));
        for (auto& b : all) b = static_cast<std::byte>(numbers_.next() & 255);
        if (t.name.ends_with("linear_attn.norm.weight"))
            for (std::size_t i = 0; i + 1 < all.size(); i += 2) {
                bool const last = i + 2 == all.size(); // 171 / 512
                all[i] = last ? std::byte{0xab} : std::byte{0x80};
                all[i + 1] = last ? std::byte{0x3e} : std::byte{0x3f};
            }
        if (t.name.ends_with("A_log") || t.name.ends_with("correction_bias"))
            for (std::size_t i = 1; i < all.size(); i += 2) all[i] &= std::byte{0xbf}; // no NaN
        return all;
    }

    fs::path place_;
    support::splitmix numbers_{7};
};

json const next_config{{"model_type", "qwen3_next"},
                       {"num_hidden_layers", 3},
                       {"hidden_size", 8},
                       {"vocab_size", 10},
                       {"num_attention_heads", 4},
                       {"num_key_value_heads", 2},
                       {"head_dim", 4},
                       {"tie_word_embeddings", false},
                       {"num_experts", 4},
                       {"num_experts_per_tok", 2},
                       {"moe_intermediate_size", 6},
                       {"shared_expert_intermediate_size", 2},
                       {"full_attention_interval", 2},
                       {"linear_num_key_heads", 2},
                       {"linear_num_value_heads", 4},
                       {"linear_key_head_dim", 3},
                       {"linear_value_head_dim", 5},
                       {"linear_conv_kernel_dim", 4}};

} // namespace

TEST_CASE("every checkpoint comes back from shards of any mesh as it was, byte for byte") {
    folder const home;
    for (char const* const options :
         {"--mesh tp=1", "--mesh tp=2", "--mesh pp=2 --first 3", "--mesh tp=2,pp=4 --linear-attention hf",
          "--mesh tp=2,pp=2,vpp=2 --make-vocab-size-divisible-by 100", "--mesh pp=2 --pipeline-layout Et*3|tL"})
        check_round_trip(models / "tiny_qwen3_5", home, options, files);
    for (char const* const options :
         {"--mesh dp=8,ep=8", "--mesh tp=2,dp=4,ep=4,pp=2 --last 1", "--mesh tp=2,dp=2,ep=4,etp=1",
          "--mesh dp=8,ep=2,etp=4,pp=2", "--mesh tp=2,cp=3,dp=4,ep=2,etp=4"})
        check_round_trip(models / "tiny_qwen3_5_moe", home, options, files);
    check_round_trip(models / "tiny_qwen3_vl", home, "--mesh tp=2,pp=2", files); // tied, with a tower
    check_round_trip(models / "tiny_qwen3_5_vl", home, "--mesh pp=4", files);
}

TEST_CASE("so do several files, multi-token prediction, stacked experts, narrow dtypes and other tensors") {
    folder const home;
    auto moe = next_config;
    moe["model_type"] = "qwen3_moe";
    moe["mlp_only_layers"] = {1};
    moe["intermediate_size"] = 6;
    moe["attention_bias"] = true;
    auto tied = moe;
    tied["model_type"] = "qwen3";
    tied["tie_word_embeddings"] = true;
    auto nested = next_config;
    nested["model_type"] = "qwen3_5_moe_text";
    nested = {{"model_type", "qwen3_5_moe"}, {"tie_word_embeddings", false}, {"text_config", nested}};
    made_checkpoint const next(home / "next", next_config, {.expert_bias = true}, 3, true);
    check_round_trip(home / "next", home, "--mesh tp=2,dp=2,ep=2,pp=3", next.written);
    check_round_trip(home / "next", home, "--mesh tp=2,dp=2,ep=2,pp=3 --linear-attention hf", next.written);
    check_round_trip(home / "next", home, "--mesh dp=4,ep=4,pp=2 --pipeline-layout Ett|tmL", next.written);
    made_checkpoint const deep(home / "deep", nested, {.inside = true, .stacked_experts = true}, 1, true);
    check_round_trip(home / "deep", home, "--mesh tp=2,dp=4,ep=4,pp=1", deep.written);
    check_round_trip(home / "deep", home, "--mesh dp=4,ep=2,etp=2,pp=3", deep.written);
    made_checkpoint const biased(home / "moe", moe, {}, 2, false);
    check_round_trip(home / "moe", home, "--mesh tp=2,dp=4,ep=4", biased.written);
    made_checkpoint const dense(home / "dense", tied, {}, 1, false);
    {
        archive all(home / "dense/model.safetensors"); // a copy of a tied embedding, and what no model has
        all.tensors["lm_head.weight"] = all.tensors["model.embed_tokens.weight"];
        all.tensors["steps"] = {"I64", json::array(), std::string(8, 'x')};
        all.tensors["none"] = {"F32", {0, 3}, ""};
        all.save(home / "dense/model.safetensors");
        // in the order of Hugging Face's library, which is the program's
        cpx::safetensors const file(home / "dense/model.safetensors");
        std::vector<cpx::safetensors_writer::tensor_info> declared;
        for (auto const& name : file.names())
            declared.push_back({name, file.tensor(name).dtype, file.tensor(name).shape});
        cpx::safetensors_writer sorted(home / "dense/sorted.safetensors", declared, file.metadata());
        for (auto const& name : file.names()) sorted.write(name, file.read_bytes(name));
        sorted.finish();
        fs::rename(home / "dense/sorted.safetensors", home / "dense/model.safetensors");
    }
    for (char const* const options : {"--mesh tp=2", "--mesh pp=3"})
        check_round_trip(home / "dense", home, options, dense.written);
}

TEST_CASE("a shard has what its cell owns, of the shapes and dtypes that Megatron has") {
    folder const home;
    made_checkpoint const next(home / "next", next_config, {}, 1, true);
    succeeds({(home / "next").string(), (home / "shards").string(), "--mesh", "tp=2,ep=2,pp=3,etp=1"});
    std::set<std::string> names;
    for (auto const& entry : fs::directory_iterator(home / "shards")) names.insert(entry.path().filename().string());
    CHECK(names == std::set<std::string>{"config.json", "hf_files.json", "mp_rank_00_000_000_00.safetensors",
                                         "mp_rank_00_001_000_00.safetensors", "mp_rank_00_002_000_00.safetensors",
                                         "mp_rank_01_000_001_00.safetensors", "mp_rank_01_001_001_00.safetensors",
                                         "mp_rank_01_002_001_00.safetensors"});
    using sides = std::vector<index_t>;
    cpx::safetensors const first(home / "shards/mp_rank_01_000_001_00.safetensors");
    auto const is = [&](cpx::safetensors const& file, std::string const& name, dtype type, sides const& shape) {
        CAPTURE(name);
        CHECK(file.tensor(name).dtype == type);
        CHECK(file.tensor(name).shape == shape);
    };
    std::string const layer = "decoder.layers.0.";
    is(first, "embedding.word_embeddings.weight", dtype::bf16, {5, 8});
    is(first, layer + "self_attention.A_log", dtype::f32, {2});
    is(first, layer + "self_attention.dt_bias", dtype::f32, {2});
    is(first, layer + "self_attention.out_norm.weight", dtype::f32, {5});
    CHECK(first.read<double>(layer + "self_attention.out_norm.weight") ==
          std::vector<double>{0, 0, 0, 0, 171.0 / 512 - 1});
    is(first, layer + "self_attention.in_proj.weight", dtype::bf16, {(3 + 3 + 10 + 10 + 2 + 2), 8});
    is(first, layer + "self_attention.conv1d.weight", dtype::bf16, {3 + 3 + 10, 1, 4});
    is(first, layer + "mlp.experts.linear_fc1.weight2", dtype::bf16, {12, 8});
    is(first, layer + "mlp.shared_experts.linear_fc1.weight", dtype::bf16, {2, 8});
    CHECK(!first.contains(layer + "mlp.experts.linear_fc1.weight1"));
    CHECK(!first.contains("decoder.layers.1.mlp.router.weight"));
    cpx::safetensors const last(home / "shards/mp_rank_00_002_000_00.safetensors");
    is(last, "decoder.layers.2.mlp.experts.linear_fc2.weight0", dtype::bf16, {8, 6});
    is(last, "mtp.layers.0.eh_proj.weight", dtype::bf16, {4, 16});
    is(last, "output_layer.weight", dtype::bf16, {5, 8});
    is(last, "decoder.final_layernorm.weight", dtype::bf16, {8});
    auto const header = cpx::read_shard_header(last);
    CHECK(header.cell == cpx::shard_cell{2, 0, 0, 0});
    CHECK(header.weights.at(layer + "self_attention.A_log").divided);
    CHECK(!header.weights.at(layer + "self_attention.out_norm.weight").divided);
}

TEST_CASE("shards from elsewhere, without a record of Hugging Face's files, become one file") {
    folder const home;
    made_checkpoint const next(home / "next", next_config, {.expert_bias = true}, 2, true);
    succeeds({(home / "next").string(), (home / "shards").string(), "--mesh", "tp=2,dp=2,ep=2"});
    fs::remove(home / "shards/hf_files.json");
    fs::remove(home / "shards/model.safetensors.index.json");
    succeeds({"--to", "hf", (home / "shards").string(), (home / "back").string()});
    cpx::safetensors const back(home / "back/model.safetensors");
    CHECK(back.names().size() == next.shapes.size());
    for (auto const& file : next.written) {
        if (!file.ends_with(".safetensors")) continue;
        cpx::safetensors const from(home / "next" / file);
        for (auto const& name : from.names()) {
            CAPTURE(name);
            CHECK(back.tensor(name).shape == from.tensor(name).shape);
            bool const wider = name.ends_with("A_log") || name.ends_with("correction_bias") ||
                               name.ends_with("linear_attn.norm.weight");
            CHECK(back.tensor(name).dtype == (wider ? dtype::f32 : from.tensor(name).dtype));
            if (wider)
                CHECK(back.read<double>(name) == from.read<double>(name));
            else
                CHECK(back.read_bytes(name) == from.read_bytes(name));
        }
    }
}

TEST_CASE("what does not fit is refused in a line, and leaves nothing") {
    folder const home;
    fs::path const from = home / "from", shards = home / "shards", out = home / "out";
    auto const copy = [](fs::path const& a, fs::path const& b) {
        fs::remove_all(b);
        fs::copy(a, b);
    };
    auto const left = [&] {
        std::set<std::string> names;
        for (auto const& entry : fs::directory_iterator(home / ".")) names.insert(entry.path().filename().string());
        return names;
    };
    auto const refuses = [&](std::string const& options, arguments const& passages) {
        auto const before = left();
        check_refusal(arguments{from.string(), out.string()} + words(options), passages);
        CHECK(left() == before);
    };
    auto const damaged = [&](std::function<void(archive&)> const& damage, arguments const& passages) {
        copy(models / "tiny_qwen3_5_moe", from);
        archive all(from / "model.safetensors");
        damage(all);
        all.save(from / "model.safetensors");
        refuses("--mesh tp=1", passages);
    };
    copy(models / "tiny_qwen3_5_moe", from);
    refuses("", {"convert: --mesh: sizes: expected some, for --to shards, got none"});
    refuses("--mesh tp=4", {"weight_share: num_key_value_heads: expected a multiple of the 4 ranks"});
    refuses("--mesh dp=3,ep=3", {"experts over --mesh: experts: expected a multiple of ep = 3, got 8"});
    std::string const narrow = "--mesh: ranks of the world: expected a multiple of etp, ep, pp = 2 x 4 x 1, got 2";
    refuses("--mesh tp=2,ep=4", {narrow});
    auto const same = run({"--mesh", "tp=2,ep=4", "--rank", "0", "--layers", "4", "--experts", "8"}, "", "names");
    CHECK(same.code == 1); // a mesh is the same for all programs
    CHECK(same.err == "names: " + narrow + '\n');
    std::string const layers_m = "--pipeline-layout: layers of mtp (m) of the layout: expected ";
    refuses("--mesh pp=2 --pipeline-layout Ett|ttmL", {layers_m + "0, got 1"}); // as check_config says it
    refuses("--mesh pp=3", {"layers over --mesh: layers: expected a multiple of ranks = 3, got 4"});
    refuses("--mesh tp=1 --to sideways", {"--to: direction: expected shards or hf"});
    refuses("--mesh tp=1 --linear-attention none", {"--linear-attention: linear attention: expected native or hf"});
    refuses("--mesh tp=1 --to hf", {"--mesh: no effect: expected --to shards, got hf"});
    refuses("--to hf", {"from/model.safetensors: metadata \"cpx.shard\""});
    std::string const norm = "model.layers.1.linear_attn.norm.weight", router = "model.layers.2.mlp.gate.weight";
    damaged([&](archive& a) { a.tensors.erase(router); },
            {"expected \"" + router + "\", which the model of config.json has"});
    damaged(
        [&](archive& a) {
            a.tensors[router].shape = {64, 8};
        },
        {"shape of tensor", "expected [8, 64], as config.json has it, got [64, 8]"});
    damaged([&](archive& a) { a.tensors["model.layers.4.mlp.gate.weight"] = a.tensors[router]; },
            {"tensor \"model.layers.4.mlp.gate.weight\": expected one of the model"});
    damaged([&](archive& a) { a.tensors["output_layer.weight"] = a.tensors[router]; },
            {"tensor \"output_layer.weight\": expected one of the model"});
    damaged([&](archive& a) { a.tensors["mtp.fc.weight"] = a.tensors[router]; },
            {"which the model of config.json has"});
    damaged([&](archive& a) { a.tensors[norm].bytes.replace(0, 4, std::string("\0\0\0\x80", 4)); },
            {"self_attention.out_norm.weight: expected numbers that come back bit for bit"});
    damaged([&](archive& a) { a.tensors["model.layers.3.self_attn.k_proj.weight"].dtype = "I32"; },
            {"dtype of tensor \"model.layers.3.self_attn.k_proj.weight\": expected F32, as of "
             "model.layers.3.self_attn.q_proj.weight, got I32"});

    damaged([&](archive& a) { a.tensors[router].dtype = "I32"; },
            {"dtype of tensor \"" + router + "\": expected F64, F32, F16 or BF16, got I32"});

    copy(models / "tiny_qwen3_vl", from);
    archive tied(from / "model.safetensors");
    tied.tensors["lm_head.weight"] = tied.tensors["model.language_model.embed_tokens.weight"];
    tied.tensors["lm_head.weight"].bytes[5] ^= 1;
    tied.save(from / "model.safetensors");
    refuses("--mesh tp=1", {"tensor \"lm_head.weight\": expected the embedding, to which config.json ties it"});

    made_checkpoint const predicting(home / "predicting", next_config, {}, 1, true);
    copy(home / "predicting", from);
    refuses("--mesh pp=2 --pipeline-layout Ett|tL", {layers_m + "1, got 0"});
    refuses("--mesh pp=2 --pipeline-layout Ett|tmmL", {layers_m + "1, got 2"});
    auto predicts = next_config; // and has no weights of it: check_config, which sees none, counts alike
    predicts["mtp_num_hidden_layers"] = 1;
    made_checkpoint const stated(home / "stated", predicts, {}, 1, false);
    copy(home / "stated", from);
    refuses("--mesh pp=2 --pipeline-layout Ett|tL", {layers_m + "1, got 0"});

    made_checkpoint const next(home / "next", next_config, {}, 2, false);
    auto const index = json::parse(read(home / "next/model.safetensors.index.json"));
    auto const indexed = [&](std::function<void(json&)> const& damage, arguments const& passages) {
        copy(home / "next", from);
        json all = index;
        damage(all["weight_map"]);
        write(from / "model.safetensors.index.json", all.dump());
        refuses("--mesh tp=1", passages);
    };
    indexed([](json& map) { map["lm_head.weight"] = "../model-0.safetensors"; },
            {"name of a file: expected NAME.safetensors, in the same folder"});
    indexed([](json& map) { map["lm_head.weight"] = "absent.safetensors"; }, {"absent.safetensors: cannot open"});
    indexed([](json& map) { map["more"] = "model-0.safetensors"; }, {"tensor \"more\""});
    indexed([](json& map) { map.erase("lm_head.weight"); },
            {"file of tensor \"lm_head.weight\": expected one that the index names"});
    indexed(
        [](json& map) {
            map["lm_head.weight"] =
                map["lm_head.weight"] == "model-0.safetensors" ? "model-1.safetensors" : "model-0.safetensors";
        },
        {"tensor \"lm_head.weight\""});

    // the way back
    copy(models / "tiny_qwen3_vl", from);
    succeeds({from.string(), shards.string(), "--mesh", "tp=2,pp=2"});
    auto const back = [&](std::function<void()> const& damage, arguments const& passages) {
        copy(shards, from);
        damage();
        refuses("--to hf", passages);
    };
    std::string const first = "mp_rank_00_000_000.safetensors", second = "mp_rank_01_000_000.safetensors";
    auto const changed = [&](std::string const& file, std::function<void(archive&)> const& damage) {
        return [&, file, damage] {
            archive all(from / file);
            damage(all);
            all.save(from / file);
        };
    };
    std::string const q_norm = "decoder.layers.0.self_attention.q_layernorm.weight";
    back(changed(second, [](archive& a) { a.metadata.erase("cpx.shard"); }), {second + ": metadata \"cpx.shard\""});
    back(changed(first,
                 [](archive& a) {
                     auto sizes = json::parse(a.metadata["cpx.shard"].get<std::string>());
                     sizes["tp"] = 3;
                     a.metadata["cpx.shard"] = sizes.dump();
                 }),
         {first + ": cpx.shard: ranks of the world: expected a multiple"});
    // What can be read and is not as it should be is audit's report.
    auto const differs = [&](std::function<void()> const& damage, arguments const& passages) {
        copy(shards, from);
        damage();
        auto const before = left();
        auto const result = run({"--to", "hf", from.string(), out.string()});
        CHECK(result.code == 2);
        CHECK(result.err == "");
        for (auto const& passage : passages)
            CHECK_MESSAGE(result.out.find(passage) != std::string::npos, passage << " in " << result.out);
        CHECK(run({from.string()}, "", "audit").out == result.out);
        CHECK(left() == before);
    };
    differs([&] { fs::remove(from / second); }, {"no_shard: none of pp 0, ep 0, tp 1, etp 1", "\nproblems: "});
    differs([&] { fs::copy_file(from / second, from / "again.safetensors"); },
            {"cell_twice: pp 0, ep 0, tp 1, etp 1: "});
    differs(changed(second, [&](archive& a) { a.tensors[q_norm].bytes[3] ^= 1; }),
            {"different: " + q_norm, "tp 1", "\nproblems: 1\n"});
    differs(
        changed("mp_rank_01_001_000.safetensors", [](archive& a) { a.tensors["output_layer.weight"].bytes[3] ^= 1; }),
        {"different: output_layer.weight: ", "as embedding.word_embeddings.weight"});
    differs(changed(second, [&](archive& a) { a.tensors.erase(q_norm); }),
            {"missing: " + q_norm + ": at pp 0, ep 0, tp 1"});
    differs(changed(second, [&](archive& a) { a.tensors["more"] = a.tensors[q_norm]; }), {"unexpected: more: in "});
    differs(changed(second,
                    [&](archive& a) {
                        a.tensors[q_norm].shape = {4, 8};
                    }),
            {"other_shape: " + q_norm, "expected F32 32, got F32 4x8"});
    differs(changed(second, [](archive& a) { a.metadata["cpx.weights"] = "{}"; }),
            {"disagree: ", " tell of other weights\n"});
    differs(
        [&] {
            auto config = json::parse(read(from / "config.json"));
            config["text_config"]["intermediate_size"] = 64;
            write(from / "config.json", config.dump());
        },
        {"other_shape: decoder.layers.0.mlp.linear_fc1.weight: expected [64, 64], divided, as config.json has it, got "
         "[128, 64], divided"});
    differs(
        [&] {
            auto config = json::parse(read(from / "config.json"));
            config["text_config"]["num_hidden_layers"] = 3;
            write(from / "config.json", config.dump());
        },
        {"disagree: num_hidden_layers: 3 in config.json, 4 as shards tell", "unexpected: decoder.layers.3."});
    back([&] { fs::remove(from / "config.json"); }, {"config.json: cannot open"});
    differs(
        [&] {
            auto record = json::parse(read(from / "hf_files.json"));
            record["model.safetensors"]["tensors"].erase("model.language_model.norm.weight");
            write(from / "hf_files.json", record.dump());
        },
        {"unexpected: decoder.final_layernorm.weight: the checkpoint that shards were made of has no "
         "model.language_model.norm.weight"});

    copy(shards, from);
    fs::create_directories(out);
    write(out / "kept", "x");
    refuses("--to hf", {"OUT: folder: expected a new one, or an empty one"});
    CHECK(read(out / "kept") == "x");
    check_refusal({"--to", "hf", from.string(), (home / "no/such/out").string()},
                  {"OUT: folder: expected a path that can be written", "No such file"});
    fs::remove(out / "kept");
    succeeds({"--to", "hf", from.string(), out.string()});
    CHECK(read(out / "model.safetensors") == read(models / "tiny_qwen3_vl/model.safetensors"));
}

TEST_CASE("a signal that ends the program leaves nothing of the folder") {
    folder const home;
    auto const program = fs::path(std::getenv("CPX_PROGRAM")).string();
    auto const from = (models / "tiny_qwen3_5").string(), out = (home / "out").string();
    auto const child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) { // the signal waits from the program's start on
        ::sigset_t waiting;
        ::sigemptyset(&waiting);
        ::sigaddset(&waiting, SIGTERM);
        ::sigprocmask(SIG_BLOCK, &waiting, nullptr);
        ::raise(SIGTERM);
        if (::freopen((home / "told").c_str(), "w", stderr))
            ::execl(program.c_str(), "convert", from.c_str(), out.c_str(), "--mesh", "tp=2", nullptr);
        ::_exit(127);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 1);
    CHECK(read(home / "told") == "convert: OUT: not written, for a signal ends the program\n");
    fs::remove(home / "told");
    CHECK(fs::is_empty(home.path()));
}
