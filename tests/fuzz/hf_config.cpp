// SPDX-License-Identifier: Apache-2.0
// Settings of any bytes: a config.json, and behind the first newline a training configuration, which are read and held
// against each other. The first byte says which side is a preset instead, and whether braces stand around the others.
#include <cpx/model/config_check.hpp>
#include <cpx/model/config_presets.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

namespace {

void expect(bool holds) {
    if (!holds) std::abort();
}

/// Returns what `call` returns; none if it throws `cpx::error`. Other exceptions end the program.
template <class F>
auto result_of(F const& call) -> std::optional<decltype(call())> {
    try {
        return call();
    } catch (cpx::error const& refused) {
        expect(!std::string_view(refused.what()).empty());
        return {};
    }
}

struct preset {
    cpx::hf_config hf;
    cpx::train_config train;
};

/// The presets, read once.
preset const& preset_of(unsigned i) {
    static auto const all = [] {
        std::array<preset, cpx::config_presets.size()> made;
        std::ranges::transform(cpx::config_presets, made.begin(), [](auto const& p) {
            return preset{p.hf_settings(), p.train_settings()};
        });
        return made;
    }();
    return all[i % all.size()];
}

void check(cpx::hf_config const& hf, cpx::train_config const& train) {
    if (hf.num_hidden_layers.value_or(0) > 1024 || train.pipeline_model_parallel_size.value_or(1) > 1024) return;
    auto const checked = result_of([&] { return cpx::check_config(hf, train); });
    if (!checked) return;
    auto const& report = *checked;
    expect(report.agrees() == report.mismatches.empty());
    expect(!cpx::to_text(report).empty());
    auto const json = cpx::to_json(report);
    expect(json.at("mismatches").size() == report.mismatches.size());
    for (auto const& m : json.at("mismatches"))
        for (auto const* role : {m.contains("hf") ? "hf" : "train", m.contains("hf_other")      ? "hf_other"
                                                                    : m.contains("train_other") ? "train_other"
                                                                                                : "train"})
            expect(m.at(role).at("field") != "" && m.at(role).at("source") != "");
    expect(!json.dump().empty());
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    if (size == 0) return 0;
    unsigned const way = data[0];
    std::string_view const rest(reinterpret_cast<char const*>(data) + 1, size - 1);
    auto const& known = preset_of(way >> 4);
    auto const text = [&](std::string_view part) {
        return (way & 1) != 0 ? '{' + std::string(part) + '}' : std::string(part);
    };
    auto const read_hf = [&](std::string_view part) {
        return result_of([&] { return cpx::hf_config::parse(cpx::json_value::parse(text(part), "hf")); });
    };
    auto const read_train = [&](std::string_view part) {
        return result_of([&] { return cpx::train_config::parse(cpx::json_value::parse(text(part), "train")); });
    };
    if ((way & 2) != 0) {
        if (auto const train = read_train(rest)) check(known.hf, *train);
    } else if ((way & 4) != 0) {
        if (auto const hf = read_hf(rest)) check(*hf, known.train);
    } else {
        auto const end = std::min(rest.find('\n'), rest.size());
        auto const hf = read_hf(rest.substr(0, end));
        auto const train = read_train(rest.substr(std::min(end + 1, rest.size())));
        if (hf && train) check(*hf, *train);
    }
    return 0;
}
