// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/audit.hpp>

#include "model/faults.hpp"
#include "model/shards_of.hpp"

#include <cpx/model/safetensors_writer.hpp>

#include <doctest/doctest.h>

#include <support/random.hpp>
#include <support/rejects.hpp>

#include <algorithm>
#include <cstddef>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

using namespace cpx;
using shards_of::make;
using shards_of::sizes;

namespace {

using fault = audit_fault;

audit_report audited(shards_of::model const& m) { return audit(m.sizes, m.weights, m.shards); }

/// Returns the faults of a report, each once.
std::set<fault> faults_of(audit_report const& r) {
    std::set<fault> all;
    for (auto const& p : r.problems) all.insert(p.fault);
    return all;
}
bool only(audit_report const& r, fault f) { return faults_of(r) == std::set{f}; }
std::vector<std::string> told(audit_report const& r) {
    std::vector<std::string> all;
    for (auto const& p : r.problems) all.push_back(p.name + ": " + p.detail);
    return all;
}

audit_record* record(audit_shard& shard, std::string const& name) {
    auto const at = std::ranges::find(shard.records, name, &audit_record::name);
    return at == shard.records.end() ? nullptr : &*at;
}

void require_that(bool holds, int line = __builtin_LINE()) { REQUIRE_MESSAGE(holds, "line " << line); }

/// Checks that what a single change does is found, and that there is nothing else to find.
void check_changes(shards_of::model const& good, std::size_t s, std::size_t t) {
    {
        auto m = good;
        auto const dropped = m.shards[s].records[t];
        m.shards[s].records.erase(m.shards[s].records.begin() + static_cast<index_t>(t));
        auto const r = audited(m);
        require_that(r.problems.size() == 1);
        require_that(r.problems[0].fault == fault::missing);
        require_that(r.problems[0].name == dropped.name);
        require_that(r.problems[0].detail == "at " + text_of(m.shards[s].cell));

        // from one shard to another that does not own it: missing there, and a second one here
        auto const other = std::ranges::find_if(m.shards, [&](auto& o) {
            return !record(o, dropped.name) && (o.cell.pp != m.shards[s].cell.pp || o.cell.ep != m.shards[s].cell.ep);
        });
        if (other != m.shards.end()) {
            bool const copy = dropped.name == "embedding.word_embeddings.weight"; // may be where losses are
            other->records.push_back(dropped);
            auto const moved = audited(m);
            require_that(faults_of(moved).contains(fault::missing));
            if (!copy) require_that(faults_of(moved).contains(fault::misplaced));
            m.shards[s].records.push_back(dropped);
            auto const twice = audited(m);
            if (!copy) {
                require_that(twice.problems.size() == 1);
                require_that(twice.problems[0].fault == fault::misplaced);
                require_that(twice.problems[0].name == dropped.name);
            }
        }
    }
    {
        auto m = good;
        m.shards[s].records.push_back(m.shards[s].records[t]);
        require_that(only(audited(m), fault::tensor_twice));
    }
    {
        auto m = good;
        auto& changed = m.shards[s].records[t];
        bool copies = false; // of this share, or of its tied other
        for (auto const& r : audited(good).replicas)
            for (auto const& [owner, sum] : r.copies)
                copies =
                    copies || ((r.name == changed.name || r.copy_of == changed.name) && owner.cell == m.shards[s].cell);
        changed.checksum ^= 1;
        auto const r = audited(m);
        require_that(faults_of(r) == (copies ? std::set{fault::different} : std::set<fault>{}));
        for (auto const& p : r.problems) require_that(p.detail.find(hex_of(changed.checksum)) != std::string::npos);
    }
    {
        auto m = good;
        m.shards[s].records[t].shape.push_back(1);
        require_that(only(audited(m), fault::other_shape));
        m = good;
        m.shards[s].records[t].dtype = safetensors::dtype::i16;
        require_that(only(audited(m), fault::other_shape));
        m = good;
        m.weights.erase(m.shards[s].records[t].name);
        require_that(faults_of(audited(m)).contains(fault::unexpected));
    }
}

/// Checks that a cell that is missing, or there twice, is found alone.
void check_cell(shards_of::model const& good, std::size_t s) {
    auto m = good;
    m.shards.erase(m.shards.begin() + static_cast<index_t>(s));
    auto const r = audited(m);
    require_that(r.problems.size() == 1);
    require_that(r.problems[0] == audit_problem{fault::no_shard, "", "none of " + text_of(good.shards[s].cell)});
    m = good;
    m.shards.push_back(m.shards[s]);
    m.shards.back().where = "again";
    auto const again = audited(m);
    require_that(again.problems.size() == 1);
    require_that(again.problems[0].fault == fault::cell_twice);
    require_that(again.problems[0].detail == text_of(good.shards[s].cell) + ": " + good.shards[s].where + " and again");
}

/// Calls `f` with the sizes of every mesh of at most so many ranks.
template <class F>
void for_each_mesh(int most, F const& f) {
    for (int world = 1; world <= most; ++world)
        for (int pp = 1; pp <= world; ++pp)
            for (int tp = 1; tp * pp <= world; ++tp) {
                if (world % (tp * pp) != 0) continue;
                for (int etp = 1; etp * pp <= world; ++etp)
                    for (int ep = 1; ep * etp * pp <= world; ++ep)
                        if (world % (etp * ep * pp) == 0) f(world, tp, pp, ep, etp);
            }
}

} // namespace

TEST_SUITE("model") {
    TEST_CASE("the checksum is FNV-1a of 64 bits, whatever the parts that bytes come in") {
        auto const of = [](std::string const& text) {
            checksum64 sum;
            sum.add(text);
            return hex_of(sum.value());
        };
        CHECK(of("") == "cbf29ce484222325"); // RFC 9923
        CHECK(of("a") == "af63dc4c8601ec8c");
        CHECK(of("foobar") == "85944171f73967e8");
        checksum64 parts, number, bytes;
        parts.add("foo");
        parts.add("bar");
        CHECK(hex_of(parts.value()) == of("foobar"));
        number.add(std::uint64_t{0x8000000000000001});
        bytes.add(std::string("\x01\0\0\0\0\0\0\x80", 8));
        CHECK(number.value() == bytes.value());
    }

    TEST_CASE("on every mesh of at most 64 ranks the shards are complete, and a change to any is found") {
        int meshes = 0;
        support::splitmix numbers(7);
        for_each_mesh(64, [&](int world, int tp, int pp, int ep, int etp) {
            CAPTURE(world);
            CAPTURE(tp);
            CAPTURE(pp);
            CAPTURE(ep);
            CAPTURE(etp);
            bool const small = world <= 4;
            if (!small && numbers.between(0, 15) != 0 && world > 12) { // of larger ones that they are complete
                if (tp * pp * ep * etp > 100) return;
                auto const m = make(sizes(world, tp, pp, ep, etp));
                REQUIRE(audited(m).good());
                ++meshes;
                return;
            }
            for (bool const tied : {false, true}) {
                if (!small && tied != (world % 2 == 0)) continue;
                auto const m = make(sizes(world, tp, pp, ep, etp, pp > 1 && world % 3 == 0 ? 2 : 1, tied));
                auto const r = audited(m);
                REQUIRE(told(r).empty());
                for (auto const& copy : r.replicas) REQUIRE(copy.equal);
                if (small) {
                    for (std::size_t s = 0; s < m.shards.size(); ++s) {
                        check_cell(m, s);
                        for (std::size_t t = 0; t < m.shards[s].records.size(); ++t) check_changes(m, s, t);
                    }
                } else {
                    auto const any = [&](auto const& of) {
                        return static_cast<std::size_t>(numbers.between(0, std::ssize(of) - 1));
                    };
                    auto const s = any(m.shards);
                    check_cell(m, any(m.shards));
                    check_changes(m, s, any(m.shards[s].records));
                }
                ++meshes;
            }
        });
        CHECK(meshes > 1000);
    }

    TEST_CASE("layers are summed the same however the model is divided, and copies count once") {
        auto const one = audited(make(sizes(1, 1, 1, 1, 1)));
        std::vector<std::string> names;
        for (auto const& l : one.layers) names.push_back(l.name);
        CHECK(names == std::vector<std::string>{"embedding", "decoder.layers.0", "final_layernorm", "output_layer"});
        CHECK(one.layers[1].weights == 5);
        CHECK(one.layers[1].elements == 5 * 6);
        CHECK(one.layers[1].bytes == 5 * 6 * 2);
        CHECK(one.layers[2].bytes == 12);
        CHECK(one.replicas.empty());

        auto const many = audited(make(sizes(8, 2, 2, 4, 1, 2)));
        REQUIRE(many.layers.size() == 3 + 4);
        // of every layer: norm and router once, attention and the shared expert in halves, 4 experts
        for (std::size_t l = 1; l <= 4; ++l) {
            CHECK(many.layers[l].name == "decoder.layers." + std::to_string(l - 1));
            CHECK(many.layers[l].weights == 4 + 4);
            CHECK(many.layers[l].elements == (2 + 2 * 2 + 4) * 6);
        }
        auto again = make(sizes(8, 2, 2, 4, 1, 2));
        std::ranges::reverse(again.shards);
        auto const same = audited(again);
        for (std::size_t l = 0; l < same.layers.size(); ++l) CHECK(same.layers[l].checksum == many.layers[l].checksum);
        again.shards[0].records[0].checksum ^= 4;
        auto const changed = audited(again);
        int other = 0;
        for (std::size_t l = 0; l < same.layers.size(); ++l)
            other += changed.layers[l].checksum != many.layers[l].checksum;
        CHECK(other <= 1);
    }

    TEST_CASE("copies are listed with their owners, and one that differs with both checksums") {
        // 8 ranks, tp 2, pp 2, ep 2, etp 1: cells (pp, ep, tp) are those with ep = tp
        auto m = make(sizes(8, 2, 2, 2, 1));
        auto const r = audited(m);
        std::set<std::string> names;
        for (auto const& copy : r.replicas) {
            names.insert(copy.name);
            CHECK(copy.copies.size() == 2);
            CHECK(copy.copies[0].first.cell.pp == copy.copies[1].first.cell.pp);
            CHECK(copy.share == 0);
        }
        CHECK(names ==
              std::set<std::string>{"decoder.final_layernorm.weight", "decoder.layers.0.input_layernorm.weight",
                                    "decoder.layers.0.mlp.router.weight", "decoder.layers.1.input_layernorm.weight",
                                    "decoder.layers.1.mlp.router.weight"});
        auto& router = *record(m.shards[1], "decoder.layers.0.mlp.router.weight");
        auto const before = router.checksum;
        router.checksum = 1;
        CHECK(told(audited(m)) ==
              std::vector{"decoder.layers.0.mlp.router.weight: " + hex_of(before) +
                          " at pp 0, ep 0, tp 0, etp 0, vp 0, 0000000000000001 at pp 0, ep 1, tp 1, etp 0, vp 0"});
    }

    TEST_CASE("a tied output layer is compared with the embedding, share by share") {
        auto m = make(sizes(8, 2, 4, 1, 2, 1, true));
        auto const r = audited(m);
        CHECK(r.good());
        std::vector<audit_replica> tied;
        for (auto const& copy : r.replicas)
            if (!copy.copy_of.empty()) tied.push_back(copy);
        REQUIRE(tied.size() == 2);
        CHECK(tied[1].name == "output_layer.weight");
        CHECK(tied[1].copy_of == "embedding.word_embeddings.weight");
        CHECK(tied[1].share == 1);
        CHECK(tied[1].copies.at(0).first.cell.pp == 0);
        CHECK(tied[1].copies.at(1).first.cell.pp == 3);
        for (auto& shard : m.shards)
            if (auto* const output = record(shard, "output_layer.weight"); output && shard.cell.tp == 1)
                output->checksum = 2;
        auto const problems = told(audited(m));
        REQUIRE(problems.size() == 1);
        CHECK(problems[0].starts_with("output_layer.weight: "));
        CHECK(problems[0].find(" at pp 0, ep 0, tp 1, etp 1, vp 0 as embedding.word_embeddings.weight, "
                               "0000000000000002 at pp 3, ep 0, tp 1, etp 1, vp 0") != std::string::npos);
        m.sizes.tied = false;
        CHECK(audited(m).good());
    }

    TEST_CASE("the owner of a weight of a virtual pipeline is told with its chunk") {
        auto const r = audited(make(sizes(8, 1, 2, 2, 1, 2)));
        bool found = false;
        for (auto const& copy : r.replicas)
            if (copy.name == "decoder.layers.3.mlp.router.weight") {
                found = true;
                CHECK(copy.copies[0].first.vp == 1);
                CHECK(copy.copies[0].first.cell.pp == 1);
            }
        CHECK(found);
    }

    TEST_CASE("copies of an embedding may be where the loss is, on all ranks there, and are compared") {
        auto m = make(sizes(4, 2, 2, 1, 2));
        auto const words = [&](int tp) {
            for (auto& s : m.shards)
                if (s.cell.pp == 0 && s.cell.tp == tp) return *record(s, "embedding.word_embeddings.weight");
            return audit_record{};
        };
        for (auto& s : m.shards)
            if (s.cell.pp == 1 && s.cell.tp == 0) s.records.push_back(words(0));
        CHECK(told(audited(m)) ==
              std::vector<std::string>{"embedding.word_embeddings.weight: at pp 1, ep 0, tp 1, etp 1"});
        for (auto& s : m.shards)
            if (s.cell.pp == 1 && s.cell.tp == 1) s.records.push_back(words(1));
        CHECK(audited(m).good());
        for (auto& s : m.shards)
            if (s.cell.pp == 1) record(s, "embedding.word_embeddings.weight")->checksum = 3;
        CHECK(only(audited(m), fault::different));
    }

    TEST_CASE("weights of layers and experts that the model lacks are found in the names alone") {
        auto const drop = [](std::string const& part) {
            auto m = make(sizes(4, 1, 2, 2, 1));
            std::erase_if(m.weights, [&](auto const& w) { return w.first.find(part) != std::string::npos; });
            for (auto& s : m.shards)
                std::erase_if(s.records, [&](auto const& r) { return r.name.find(part) != std::string::npos; });
            return audited(m);
        };
        CHECK(told(drop("layers.1.")) == std::vector<std::string>{"decoder.layers.1: no weight"});
        CHECK(told(drop("layers.0.mlp.experts.linear_fc1.weight1")) ==
              std::vector<std::string>{"decoder.layers.0.mlp.experts.linear_fc1.weight#: no expert 1"});
        CHECK(only(drop("layers.1."), fault::no_weight));
        auto many = make(sizes(4, 1, 2, 2, 1));
        many.sizes.experts = 1'000'000;
        auto const counted = told(audited(many));
        CHECK(counted.size() < 100);
        CHECK(std::ranges::count(counted, "decoder.layers.1.mlp.experts.linear_fc1.weight#: no expert 2 to 999999") ==
              1);

        auto m = make(sizes(4, 1, 2, 2, 1));
        m.weights["decoder.layers.2.input_layernorm.weight"] = {};
        m.weights["decoder.layers.0.mlp.experts.linear_fc1.weight2"] = {};
        m.weights["decoder.layers.0.mlp.experts.weight1"] = {};
        m.weights["quantizer.amax"] = {};
        auto const r = audited(m);
        CHECK(faults_of(r) == std::set{fault::unknown_name, fault::missing});
        CHECK(r.problems.size() == 4);
        CHECK(told(r).back() == "quantizer.amax: on every rank");
        m.shards[0].cell.tp = 9;
        CHECK(faults_of(audited(m)).contains(fault::no_cell));
        CHECK(faults_of(audited(m)).contains(fault::no_shard));
    }

    TEST_CASE("a weight of which nothing is known is wanted of all ranks of a stage that has it") {
        auto m = make(sizes(4, 2, 2, 1, 2));
        m.weights["extra.scale"] = {safetensors::dtype::f32, {1}, false};
        for (auto& s : m.shards)
            if (s.cell.pp == 1) s.records.push_back({"extra.scale", safetensors::dtype::f32, {1}, 5});
        CHECK(audited(m).good());
        CHECK(audited(m).layers.back().name == "other");
        std::erase_if(m.shards.back().records, [](auto const& r) { return r.name == "extra.scale"; });
        CHECK(only(audited(m), fault::missing));
    }

    TEST_CASE("records are read from a shard's file, and sizes that make no mesh are refused") {
        faults::directory const place;
        auto const path = place.path() / "x";
        std::string const large(3'000'000, 'x');
        safetensors_writer out(path, {{"a", safetensors::dtype::u8, {3}},
                                      {"b", safetensors::dtype::f32, {0}},
                                      {"c", safetensors::dtype::u8, {3'000'000}}});
        out.write("a", std::as_bytes(std::span("foo", 3)));
        out.write("c", std::as_bytes(std::span(large)));
        out.finish();
        auto const records = audit_records(safetensors(path));
        REQUIRE(records.size() == 3);
        CHECK(records[0].name == "a");
        CHECK(hex_of(records[0].checksum) == "dcb27518fed9d577");
        CHECK(hex_of(records[1].checksum) == "cbf29ce484222325");
        checksum64 sum;
        sum.add(large);
        CHECK(records[2].checksum == sum.value());
        CHECK(records[2].shape == std::vector<index_t>{3'000'000});

        auto wrong = sizes(8, 3, 1, 1, 1);
        support::rejects({"audit.cpp:", "multiple of tp, cp, pp"}, [&] { audit(wrong, {}, {}); });
        wrong = sizes(8, 1, 1, 2, 1);
        wrong.experts = 3;
        support::rejects({"audit.cpp:", "experts"}, [&] { audit(wrong, {}, {}); });
    }
}
