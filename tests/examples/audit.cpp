// SPDX-License-Identifier: Apache-2.0
// Shards of a small model through the program that says whether they are complete.
#include <examples/program.hpp>
#include <model/shards_of.hpp>

#include <cpx/model/safetensors.hpp>
#include <cpx/model/safetensors_writer.hpp>

#include <support/files.hpp>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace program;
using arguments = std::vector<std::string>;

/// Writes a shard; a tensor's bytes are its checksum there again and again, so that equal ones are equal here.
void save(fs::path const& file, shards_of::model const& m, cpx::audit_shard const& shard) {
    std::vector<cpx::safetensors_writer::tensor_info> tensors;
    for (auto const& r : shard.records) tensors.push_back({r.name, r.dtype, r.shape});
    cpx::safetensors_writer out(file, tensors, cpx::shard_metadata(m.sizes, shard.cell, m.weights));
    for (auto const& r : shard.records) {
        std::vector<std::byte> bytes(static_cast<std::size_t>(cpx::safetensors::bytes_of(r.dtype, r.shape).value()));
        for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte(r.checksum >> i % 8 * 8 & 255);
        out.write(r.name, bytes);
    }
    out.finish();
}

/// The shards' files.
arguments save(folder const& home, shards_of::model const& m) {
    arguments files;
    for (std::size_t i = 0; i < m.shards.size(); ++i) {
        files.push_back((home / ("shard" + std::to_string(i))).string());
        save(files.back(), m, m.shards[i]);
    }
    return files;
}

/// Returns the report of files in which something is wrong.
json wrong(arguments const& files) {
    auto const result = run(files + arguments{"--json"});
    CHECK(result.code == 2);
    CHECK(result.err == "");
    auto report = json::parse(result.out, nullptr, false);
    REQUIRE_FALSE(report.is_discarded());
    CHECK(report.at("good") == false);
    return report;
}
std::string told(json const& report) {
    std::string all;
    for (auto const& p : report.at("problems"))
        all += p.at("fault").get<std::string>() + ' ' + p.at("name").get<std::string>() + ' ' +
               p.at("detail").get<std::string>() + '\n';
    return all;
}

} // namespace

TEST_SUITE("examples") {
    TEST_CASE("complete shards are told layer by layer, with their copies and owners") {
        folder const home;
        auto const m = shards_of::make(shards_of::sizes(8, 2, 2, 4, 1, 2, true));
        auto const files = save(home, m);
        auto const report = run_json(files);
        CHECK(report.at("good") == true);
        CHECK(report.at("problems").empty());
        CHECK(report.at("shards") == m.shards.size());
        CHECK(report.at("mesh") == json{{"world", 8}, {"tp", 2}, {"pp", 2}, {"ep", 4}, {"etp", 1}, {"vpp", 2}});
        auto const expected = cpx::audit(m.sizes, m.weights, m.shards);
        REQUIRE(report.at("layers").size() == expected.layers.size());
        for (std::size_t i = 0; i < expected.layers.size(); ++i) {
            auto const& layer = report.at("layers")[i];
            CHECK(layer.at("name") == expected.layers[i].name);
            CHECK(layer.at("weights") == expected.layers[i].weights);
            CHECK(layer.at("elements") == expected.layers[i].elements);
            CHECK(layer.at("bytes") == expected.layers[i].bytes);
            CHECK(layer.at("checksum").get<std::string>().size() == 16);
        }
        CHECK(report.at("replicas").size() == expected.replicas.size());
        std::set<std::string> copied;
        for (auto const& r : report.at("replicas")) {
            copied.insert(r.at("name").get<std::string>());
            CHECK(r.at("equal") == true);
            CHECK(r.at("copies").size() > 1);
            if (r.contains("copy_of")) CHECK(r.at("copy_of") == "embedding.word_embeddings.weight");
        }
        CHECK(copied.contains("output_layer.weight"));
        CHECK(copied.contains("decoder.layers.3.mlp.router.weight"));
        std::size_t tensors = 0;
        for (auto const& s : m.shards) tensors += s.records.size();
        CHECK(report.at("tensors").size() == tensors);
        for (auto const& t : report.at("tensors"))
            if (t.at("name") == "decoder.layers.3.mlp.router.weight") {
                CHECK(t.at("dtype") == "BF16");
                CHECK(t.at("shape") == json{2, 3});
                CHECK(t.at("owner").at("pp") == 1);
                CHECK(t.at("owner").at("vp") == 1);
            }

        auto const text = run(files);
        CHECK(text.code == 0);
        for (char const* passage :
             {"8 shards of 8 ranks: tp 2, pp 2, vpp 2, ep 4, etp 1; 4 layers, 4 experts", "\ndecoder.layers.3 ",
              "decoder.layers.*.mlp.router.weight", "output_layer.weight = embedding.word_embeddings.weight",
              "\ncomplete: every weight of the shards' own list is at its owners and nowhere else, and copies are "
              "equal\n"})
            CHECK_MESSAGE(text.out.find(passage) != std::string::npos, passage);
    }

    TEST_CASE("what is missing, twice or different is told, and the exit code is 2") {
        folder const home;
        auto const good = shards_of::make(shards_of::sizes(4, 2, 1, 2, 1));
        auto const files = save(home, good);
        auto const with = [&](auto const& change) {
            auto m = good;
            change(m);
            return told(wrong(save(home, m)));
        };
        std::string const router = "decoder.layers.0.mlp.router.weight";
        auto const of = [&](shards_of::model& m, std::size_t s) -> cpx::audit_record& {
            return *std::ranges::find(m.shards[s].records, router, &cpx::audit_record::name);
        };
        CHECK(with([&](auto& m) { m.shards[1].records.erase(m.shards[1].records.begin()); }) ==
              "missing " + good.shards[1].records[0].name + " at " + text_of(good.shards[1].cell) + '\n');
        CHECK(with([&](auto& m) { of(m, 1).checksum ^= 255; }).starts_with("different " + router + ' '));
        CHECK(with([&](auto& m) {
                  of(m, 0).shape = {3, 2};
              }) == "other_shape " + router + " at pp 0, ep 0, tp 0, etp 0: expected BF16 2x3, got BF16 3x2\n");
        CHECK(with([&](auto& m) { of(m, 0).name = "router"; }) ==
              "unexpected router in " + files[0] + '\n' + "missing " + router + " at pp 0, ep 0, tp 0, etp 0\n");
        CHECK(with([&](auto& m) { m.shards.pop_back(); }) ==
              "no_shard  none of " + text_of(good.shards.back().cell) + '\n');
        CHECK(with([&](auto& m) { m.shards[1].cell = m.shards[0].cell; }).find("cell_twice ") == 0);
        CHECK(with([&](auto& m) { m.shards[1].cell.pp = 7; }).find("no_cell ") == 0);

        save(home, good);
        CHECK(told(wrong(files + arguments{files[0]})).starts_with("cell_twice "));
        auto other = good;
        other.sizes.tied = true;
        save(files[1], other, other.shards[1]);
        CHECK(told(wrong(files)) == "disagree  " + files[1] + " and " + files[0] + " tell of other sizes\n");
        other = good;
        other.weights[router].divided = true;
        save(files[1], other, other.shards[1]);
        CHECK(told(wrong(files)) == "disagree  " + files[1] + " and " + files[0] + " tell of other weights\n");
        auto const text = run(files);
        CHECK(text.code == 2);
        CHECK(text.err == "");
        CHECK(text.out.ends_with("tell of other weights\nproblems: 1\n"));
    }

    TEST_CASE("what convert writes is complete, as a folder and as files, and converts back from both") {
        folder const home;
        auto const from = (fs::path(support::source_dir) / "examples/data/tiny_qwen3_5_moe").string();
        auto const out = (home / "out").string();
        REQUIRE(run({from, out, "--mesh", "tp=2,dp=4,ep=4,pp=2"}, "", "convert").code == 0);
        auto const report = run_json({out});
        CHECK(report.at("good") == true);
        CHECK(report.at("shards") == 16);
        arguments files;
        for (auto const& entry : fs::directory_iterator(out))
            if (entry.path().extension() == ".safetensors") files.push_back(entry.path().string());
        std::ranges::sort(files);
        CHECK(run_json(files) == report);
        auto const back = home / "back", again = home / "again";
        CHECK(run({"--to", "hf", out, back.string()}, "", "convert").code == 0);
        CHECK(run(arguments{"--to", "hf"} + files + arguments{again.string()}, "", "convert").code == 0);
        auto const weights = read(fs::path(from) / "model.safetensors");
        CHECK(read(back / "model.safetensors") == weights);
        CHECK(read(again / "model.safetensors") == weights);
        fs::remove(files[3]);
        auto const less = run({out});
        CHECK(less.code == 2);
        CHECK(less.out.find("no_shard: none of pp ") != std::string::npos);
    }

    TEST_CASE("a weight of which no shard tells is missed by the model's config.json") {
        folder const home;
        auto const from = fs::path(support::source_dir) / "examples/data/tiny_qwen3_5_moe";
        auto const out = home / "out";
        REQUIRE(run({from.string(), out.string(), "--mesh", "tp=2,pp=2"}, "", "convert").code == 0);
        auto const forget = [&](std::string const& passage) {
            for (auto const& entry : fs::directory_iterator(out)) {
                if (entry.path().extension() != ".safetensors") continue;
                archive shard(entry.path());
                json weights = json::parse(shard.metadata.at("cpx.weights").get<std::string>());
                arguments names;
                for (auto const& [name, w] : weights.items())
                    if (name.find(passage) != std::string::npos) names.push_back(name);
                for (auto const& name : names) weights.erase(name), shard.tensors.erase(name);
                shard.metadata["cpx.weights"] = weights.dump();
                shard.save(entry.path());
            }
        };
        CHECK(run_json({out.string()}).at("config") == (out / "config.json").string());
        std::pair<char const*, char const*> const lost[] = {
            {"decoder.final_layernorm.weight", "no_weight model.norm.weight"},
            {"word_embeddings", "no_weight model.embed_tokens.weight"},
            {"layers.3.self_attention.q_layernorm", "no_weight model.layers.3.self_attn.q_norm.weight"},
            {"mlp.experts.linear_fc2", "no_weight model.layers.0.mlp.experts.0.down_proj.weight"}};
        for (auto const& [weight, problem] : lost) {
            forget(weight);
            CHECK(told(wrong({out.string()})).find(problem) != std::string::npos);
        }
        fs::rename(out / "config.json", home / "config.json");
        auto const alone = run({out.string()});
        CHECK(alone.code == 0); // by the shards' own list
        CHECK(alone.out.find("the shards' own list, for there is no config.json") != std::string::npos);
        CHECK(run({out.string(), "--config", (home / "config.json").string()}).code == 2);
    }

    // Of shards that agree with each other, and not with their model.
    TEST_CASE("what all shards tell alike and config.json does not is told, and does not become a checkpoint") {
        folder const home;
        auto const data = fs::path(support::source_dir) / "examples/data";
        fs::path const shards = home / "shards", good = home / "good";
        auto const made = [&](fs::path const& name, char const* sizes) {
            fs::remove_all(good);
            REQUIRE(run({(data / name).string(), good.string(), "--mesh", sizes}, "", "convert").code == 0);
            CHECK(run_json({good.string()}).at("good") == true);
        };
        using change = std::function<void(archive&, json&, json&)>; // of tensors, cpx.weights, cpx.shard
        auto const damaged = [&](change const& f, std::string const& problem) {
            fs::remove_all(shards);
            fs::copy(good, shards);
            for (auto const& entry : fs::directory_iterator(shards)) {
                if (entry.path().extension() != ".safetensors") continue;
                archive a(entry.path());
                auto weights = json::parse(a.metadata["cpx.weights"].get<std::string>());
                auto sizes = json::parse(a.metadata["cpx.shard"].get<std::string>());
                f(a, weights, sizes);
                a.metadata["cpx.weights"] = weights.dump();
                a.metadata["cpx.shard"] = sizes.dump();
                a.save(entry.path());
            }
            auto const report = told(wrong({shards.string()}));
            CHECK_MESSAGE(report.find(problem) != std::string::npos, problem << " in " << report);
            auto const back = run({"--to", "hf", shards.string(), (home / "back").string()}, "", "convert");
            CHECK(back.code == 2);
            CHECK(back.out == run({shards.string()}).out);
            CHECK(!fs::exists(home / "back"));
        };
        auto const half_rows = [](std::string const& name) {
            return [=](archive& a, json& weights, json&) {
                int const rows = weights[name][1][0].get<int>() / 2;
                weights[name][1][0] = rows;
                if (!a.tensors.contains(name)) return;
                auto& t = a.tensors[name];
                t.shape[0] = rows;
                t.bytes.resize(t.bytes.size() / 2);
            };
        };
        auto const retyped = [](std::string const& name, std::string const& dtype, std::size_t bytes) {
            return [=](archive& a, json& weights, json&) {
                weights[name][0] = dtype;
                if (!a.tensors.contains(name)) return;
                auto& t = a.tensors[name];
                t.dtype = dtype;
                t.bytes.resize(t.bytes.size() / 4 * bytes);
            };
        };
        made("tiny_qwen3_5_moe", "tp=2,dp=2,ep=2,pp=2");
        std::string const layer = "decoder.layers.0.", words = "embedding.word_embeddings.weight";
        damaged(half_rows(words), "other_shape " + words + " expected [");
        damaged(half_rows(layer + "mlp.experts.linear_fc1.weight0"),
                "other_shape " + layer + "mlp.experts.linear_fc1.weight0 expected [");
        std::string const in_proj = layer + "self_attention.in_proj.weight";
        damaged([&](archive&, json& weights, json&) { weights[in_proj][2] = false; },
                "other_shape " + in_proj + " expected [");
        std::string const a_log = layer + "self_attention.A_log";
        damaged(retyped(a_log, "I32", 4), "other_shape " + a_log + " expected F32, which it must keep, got I32\n");
        damaged(retyped(a_log, "BF16", 2), "other_shape " + a_log + " expected F32, which it must keep, got BF16\n");
        damaged(retyped(words, "I32", 4), "other_shape " + words + " expected F64, F32, F16 or BF16, got I32\n");
        damaged([](archive&, json&, json& sizes) { sizes["experts"] = 1'000'000; },
                "disagree num_experts 8 in config.json, 1000000 as shards tell\n");
        auto const text = run({shards.string()}).out;
        CHECK(text.find("#: no expert 8 to 999999\n") != std::string::npos);
        CHECK(std::ranges::count(text, '\n') < 200);

        made("tiny_qwen3_vl", "tp=2,pp=2"); // tied
        damaged([](archive&, json&, json& sizes) { sizes["tied"] = false; },
                "disagree tie_word_embeddings true in config.json, false as shards tell\n");
        damaged(
            [](archive& a, json& weights, json&) {
                a.tensors.erase("output_layer.weight");
                weights.erase("output_layer.weight");
            },
            "no_weight output_layer.weight the last stage's copy of the tied embedding, which no shard tells of\n");
        damaged(
            [](archive& a, json&, json& sizes) {
                sizes["tied"] = false;
                if (a.tensors.contains("output_layer.weight")) a.tensors["output_layer.weight"].bytes[0] ^= 1;
            },
            "different output_layer.weight ");

        // What no rule divides.
        std::string const tower = "vision_model.blocks.0.attn.qkv.weight";
        damaged(
            [&](archive& a, json& weights, json& sizes) {
                half_rows(tower)(a, weights, sizes);
                weights[tower][2] = true;
            },
            "other_shape " + tower + " expected on all ranks, as no rule divides it, got divided\n");

        // A weight under two names, and one that nobody knows.
        auto const again = [](std::string const& name, std::string const& other) {
            return [=](archive& a, json& weights, json&) {
                weights[other] = weights[name];
                if (a.tensors.contains(name)) a.tensors[other] = a.tensors[name];
            };
        };
        std::string const norm = layer + "self_attention.linear_qkv.layer_norm_weight";
        std::pair<std::string, std::string> const twice[] = {{norm, "module." + norm}, // as they are, and again
                                                             {norm, layer + "input_layernorm.weight"},
                                                             {words, "language_model." + words},
                                                             {"output_layer.weight", "module.output_layer.weight"},
                                                             {tower, "module." + tower}};
        for (auto const& [name, other] : twice)
            damaged(again(name, other),
                    "tensor_twice " + std::max(name, other) + " listed as " + std::min(name, other) + ", too\n");
        damaged(again(norm, "foo.bar"), "unexpected foo.bar the checkpoint that shards were made of has no foo.bar\n");
        damaged(again(norm, "language_model.bar"),
                "unexpected language_model.bar the model of config.json has no such weight\n");

        // A tower of which no shard tells, or not of all: who knows its weights?
        auto const forget = [](std::string const& passage) {
            return [=](archive& a, json& weights, json&) {
                arguments names;
                for (auto const& [name, w] : weights.items())
                    if (name.find(passage) != std::string::npos) names.push_back(name);
                for (auto const& name : names) weights.erase(name), a.tensors.erase(name);
            };
        };
        damaged(forget(tower), "no_weight model.visual.blocks.0.attn.qkv.weight of the checkpoint ");
        CHECK(run({good.string()}).out.find("\ncomplete: every weight of the checkpoint is at") != std::string::npos);
        fs::remove(good / "hf_files.json");
        CHECK(run({good.string()}).out.find("\ncomplete: every weight of the language model, and what shards list") !=
              std::string::npos);
        damaged(forget("vision_model."), "no_weight vision_model config.json has vision_config, and no shard tells ");
        damaged(again(norm, "foo.bar"), "unexpected foo.bar the model of config.json has no such weight\n");

        // So of multi-token prediction.
        fs::path const predicts = home / "predicts";
        fs::copy(data / "tiny_qwen3_5_moe", predicts);
        auto config = json::parse(read(predicts / "config.json"));
        config["mtp_num_hidden_layers"] = 1;
        write(predicts / "config.json", config.dump());
        made(predicts, "tp=2"); // of a checkpoint that has none
        fs::remove(good / "hf_files.json");
        damaged([](archive&, json&, json&) {},
                "no_weight mtp mtp_num_hidden_layers of config.json is 1, and no shard tells of its weights\n");
        CHECK(run({good.string()}).code == 2);

        // A model without pictures has no tower.
        made(data / "tiny_qwen3_5_moe", "tp=2");
        fs::remove(good / "hf_files.json");
        damaged(again("decoder.final_layernorm.weight", tower),
                "unexpected " + tower + " the model of config.json has no such weight\n");
    }

    // Hugging Face's tensor of all experts of a layer has one dtype.
    TEST_CASE("experts of several dtypes do not become one tensor") {
        folder const home;
        fs::path const from = home / "from", shards = home / "shards", out = home / "out";
        fs::copy(fs::path(support::source_dir) / "examples/data/tiny_qwen3_5_moe", from);
        archive stacked(from / "model.safetensors");
        for (std::string layer = "0"; layer < "4"; ++layer[0]) {
            std::string const experts = "model.layers." + layer + ".mlp.experts.";
            auto gate_up = stacked.tensors.at(experts + "0.gate_proj.weight");
            auto down = stacked.tensors.at(experts + "0.down_proj.weight");
            auto const shape = [](auto const& t, int rows) {
                return json{8, rows * t.shape[0].template get<int>(), t.shape[1]};
            };
            gate_up.shape = shape(gate_up, 2);
            down.shape = shape(down, 1);
            gate_up.bytes.clear();
            down.bytes.clear();
            for (std::string e = "0"; e < "8"; ++e[0]) {
                for (auto const* part : {"gate", "up", "down"}) {
                    auto const name = experts + e + '.' + part + "_proj.weight";
                    (part == std::string("down") ? down : gate_up).bytes += stacked.tensors.at(name).bytes;
                    stacked.tensors.erase(name);
                }
            }
            stacked.tensors[experts + "gate_up_proj"] = gate_up;
            stacked.tensors[experts + "down_proj"] = down;
        }
        stacked.save(from / "model.safetensors");
        REQUIRE(run({from.string(), shards.string(), "--mesh", "tp=2,dp=2,ep=2"}, "", "convert").code == 0);
        REQUIRE(run({"--to", "hf", shards.string(), out.string()}, "", "convert").code == 0);
        cpx::safetensors const back(out / "model.safetensors");
        for (auto const& [name, t] : stacked.tensors) {
            auto const bytes = back.read_bytes(name);
            CHECK(std::ranges::equal(bytes, std::as_bytes(std::span(t.bytes))));
        }
        fs::remove_all(out);
        std::string const layer = "decoder.layers.1.mlp.experts.linear_fc1.weight";
        for (auto const& entry : fs::directory_iterator(shards)) {
            if (entry.path().extension() != ".safetensors") continue;
            archive a(entry.path());
            auto weights = json::parse(a.metadata["cpx.weights"].get<std::string>());
            weights[layer + '0'][0] = "BF16";
            a.metadata["cpx.weights"] = weights.dump();
            if (a.tensors.contains(layer + '0')) {
                auto& t = a.tensors[layer + '0'];
                t.dtype = "BF16";
                t.bytes.resize(t.bytes.size() / 2);
            }
            a.save(entry.path());
        }
        auto const report = told(wrong({shards.string()}));
        CHECK(report.find("other_shape " + layer + "1 expected BF16, as of " + layer +
                          "0, for both are of model.layers.1.mlp.experts.gate_up_proj, got F32\n") !=
              std::string::npos);
        CHECK(run({"--to", "hf", shards.string(), out.string()}, "", "convert").code == 2);
        CHECK(!fs::exists(out));
        fs::remove(shards / "hf_files.json"); // then each expert has a tensor of its own
        CHECK(run({shards.string()}).code == 0);
    }

    TEST_CASE("of very many problems the first of a kind are listed, and how many more there are") {
        folder const home;
        auto const m = shards_of::make(shards_of::sizes(128, 1, 1, 128, 1));
        auto const files = save(home, m);
        auto const text = run({files[0]});
        CHECK(text.code == 2);
        CHECK(text.out.find("\nno_shard: and 63 more\nproblems: 127\n") != std::string::npos);
        CHECK(wrong({files[0]}).at("problems").size() == 127);
    }

    TEST_CASE("files that cannot be read are refused in one line") {
        folder const home;
        auto m = shards_of::make(shards_of::sizes(2, 1, 1, 1, 1));
        auto const files = save(home, m);
        check_refusal({}, {"SHARDS", "required"});
        check_refusal({(home / "none").string()}, {"audit: ", "none: cannot open"});
        fs::create_directories(home / "empty");
        check_refusal(files + arguments{(home / "empty").string()}, {"empty: shards: expected files *.safetensors"});
        check_refusal(files + arguments{"--colour"}, {"--colour"});
        write(home / "text", "no safetensors");
        check_refusal({(home / "text").string()}, {"text: length of the header"});
        cpx::safetensors_writer(home / "plain", {}).finish();
        check_refusal(files + arguments{(home / "plain").string()},
                      {R"(plain: metadata "cpx.shard": expected one of)"});
        m.sizes.experts = 5;
        m.sizes.mesh.ep = 2;
        save(home / "odd", m, m.shards[0]);
        check_refusal({(home / "odd").string()}, {"odd: cpx.shard: experts: expected a multiple of"});
        auto const bytes = read(files[0]);
        for (auto const length : truncations(bytes)) {
            if (length >= bytes.size()) continue;
            write(home / "cut", bytes.substr(0, length));
            CHECK(problem_of_refusal(run({(home / "cut").string()})) == "");
        }
    }
}
