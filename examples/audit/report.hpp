// SPDX-License-Identifier: Apache-2.0
// What an audit found, as text and as JSON.
#pragma once

#include "input.hpp"

#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/audit.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace shards {

/// Returns the chunk of a pipeline rank that has a weight, if its name tells.
inline std::optional<int> chunk_of(cpx::naming const& names, std::string_view name) {
    try {
        auto const owner = names.owner(name);
        return owner.stage ? std::optional(owner.stage->chunk) : std::nullopt;
    } catch (cpx::error const&) { // a problem that the report tells
        return {};
    }
}

inline nlohmann::json json_of(cpx::shard_cell const& cell, std::optional<int> vp) {
    nlohmann::json owner{{"pp", cell.pp}, {"ep", cell.ep}, {"tp", cell.tp}, {"etp", cell.etp}};
    if (vp) owner["vp"] = *vp;
    return owner;
}

inline nlohmann::json json_of(input const& in, cpx::audit_report const& report) {
    auto const list = [](auto const& of, auto const& make) {
        auto all = nlohmann::json::array();
        for (auto const& item : of) all.push_back(make(item));
        return all;
    };
    auto const& m = in.sizes.mesh;
    cpx::naming const names(cpx::mesh(m), cpx::pipeline(in.sizes.pipeline), in.sizes.experts);
    auto tensors = nlohmann::json::array();
    for (auto const& s : in.shards)
        for (auto const& t : s.records)
            tensors.push_back({{"name", t.name},
                               {"dtype", cpx::safetensors::name_of(t.dtype)},
                               {"shape", t.shape},
                               {"checksum", cpx::hex_of(t.checksum)},
                               {"owner", json_of(s.cell, chunk_of(names, t.name))}});
    return {{"good", report.good()},
            {"mesh",
             {{"world", m.world},
              {"tp", m.tp},
              {"pp", m.pp},
              {"ep", m.ep},
              {"etp", m.etp},
              {"vpp", in.sizes.pipeline.chunks}}},
            {"shards", in.shards.size()},
            {"config", in.config.empty() ? nlohmann::json() : nlohmann::json(in.config)},
            {"record", in.record.empty() ? nlohmann::json() : nlohmann::json(in.record)},
            {"problems",
             list(report.problems,
                  [](auto const& p) {
                      return nlohmann::json{{"fault", name_of(p.fault)}, {"name", p.name}, {"detail", p.detail}};
                  })},
            {"layers", list(report.layers,
                            [](auto const& l) {
                                return nlohmann::json{{"name", l.name},
                                                      {"weights", l.weights},
                                                      {"elements", l.elements},
                                                      {"bytes", l.bytes},
                                                      {"checksum", cpx::hex_of(l.checksum)}};
                            })},
            {"replicas", list(report.replicas,
                              [&](auto const& r) {
                                  nlohmann::json item{{"name", r.name}, {"share", r.share}, {"equal", r.equal}};
                                  if (!r.copy_of.empty()) item["copy_of"] = r.copy_of;
                                  item["copies"] = list(r.copies, [](auto const& c) {
                                      return nlohmann::json{{"owner", json_of(c.first.cell, c.first.vp)},
                                                            {"checksum", cpx::hex_of(c.second)}};
                                  });
                                  return item;
                              })},
            {"tensors", std::move(tensors)}};
}

/// Returns a name with * in place of the numbers of its decoder layer and its expert.
inline std::string pattern_of(std::string const& name) {
    auto const known = cpx::parse_parameter_name(name);
    std::string text = name;
    if (known.expert) text.replace(known.expert->begin, known.expert->end - known.expert->begin, "*");
    if (known.layer) text.replace(known.layer->begin, known.layer->end - known.layer->begin, "*");
    return text;
}

/// Returns what is complete where nothing is wrong: of which weights somebody else than the shards tells.
inline char const* text_of_whole(input const& in) {
    if (in.config.empty()) return "every weight of the shards' own list";
    if (!in.record.empty()) return "every weight of the checkpoint";
    return "every weight of the language model, and what shards list of others, such as a tower's,";
}

inline void print(input const& in, cpx::audit_report const& report) {
    auto const& m = in.sizes.mesh;
    std::printf("%zu shards of %d ranks: tp %d, pp %d, vpp %d, ep %d, etp %d; %lld layers, %lld experts\n",
                in.shards.size(), m.world, m.tp, m.pp, in.sizes.pipeline.chunks, m.ep, m.etp,
                static_cast<long long>(in.sizes.pipeline.layers), static_cast<long long>(in.sizes.experts));
    std::string const known = in.config.empty()   ? "the shards' own list, for there is no config.json"
                              : in.record.empty() ? in.config + "; of a tower those of the shards' own list"
                                                  : in.config + " and " + in.record;
    std::printf("weights that the model has: those of %s\n\n", known.c_str());
    std::printf("%-24s %8s %14s %15s  %s\n", "layer", "weights", "elements", "bytes", "checksum");
    for (auto const& l : report.layers)
        std::printf("%-24s %8lld %14lld %15lld  %s\n", l.name.c_str(), static_cast<long long>(l.weights),
                    static_cast<long long>(l.elements), static_cast<long long>(l.bytes),
                    cpx::hex_of(l.checksum).c_str());

    using key = std::tuple<std::string, std::size_t, bool>; // of what is alike in layers and experts
    std::map<key, std::pair<cpx::index_t, cpx::audit_owner>> alike;
    for (auto const& r : report.replicas) {
        auto const name = pattern_of(r.name) + (r.copy_of.empty() ? "" : " = " + r.copy_of);
        alike.try_emplace({name, r.copies.size(), r.equal}, 0, r.copies.front().first).first->second.first += 1;
    }
    std::printf("\ncopies: of shares that several ranks own; the first owner of the first, dp and cp aside\n");
    for (auto const& [of, found] : alike) {
        auto const& [name, copies, equal] = of;
        std::printf("%6lld x %zu %-9s %s, %s\n", static_cast<long long>(found.first), copies,
                    equal ? "equal" : "different", cpx::printable(name).c_str(), text_of(found.second).c_str());
    }
    if (alike.empty()) std::printf("  none\n");
    std::printf("\n");
    constexpr int listed = 64; // of a fault; JSON has all
    std::map<cpx::audit_fault, int> times;
    for (auto const& p : report.problems)
        if (++times[p.fault] <= listed)
            std::printf("%s: %s%s%s\n", std::string(name_of(p.fault)).c_str(), cpx::printable(p.name).c_str(),
                        p.name.empty() ? "" : ": ", cpx::printable(p.detail).c_str());
    for (auto const& [fault, count] : times)
        if (count > listed) std::printf("%s: and %d more\n", std::string(name_of(fault)).c_str(), count - listed);
    if (report.good())
        std::printf("complete: %s is at its owners and nowhere else, and copies are equal\n", text_of_whole(in));
    else
        std::printf("problems: %zu\n", report.problems.size());
}

} // namespace shards
