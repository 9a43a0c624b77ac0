// SPDX-License-Identifier: Apache-2.0
// What a check of one configuration against another has found.
#pragma once

#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/config_conflict.hpp>

#include <nlohmann/json.hpp>

#include <string>
#include <utility>
#include <vector>

namespace cpx {

/// A setting that one of two files states and the other does not, so that nothing was compared.
struct config_gap {
    std::string file, field;    ///< the file that does not state it, and what it is called there
    std::string stated, source; ///< the file that does, and the keys that lead to it there
    std::string reason = {};    ///< why it is not compared where both may state it
};

/// All that does not agree, and what could not be compared.
struct config_report {
    std::string hf, train; ///< the names of the files
    index_t compared = 0;  ///< how many settings and rules were
    std::vector<config_conflict> mismatches;
    std::vector<config_gap> gaps;

    bool agrees() const { return mismatches.empty(); }
    /// Notes a mismatch unless `holds`.
    void expect(bool holds, config_side a, config_side b, std::string expected) {
        ++compared;
        if (!holds) mismatches.push_back({std::move(a), std::move(b), std::move(expected), {}, {}});
    }
};

/// Returns a value as JSON text in one line: of lists and long texts the beginning.
inline std::string show_value(nlohmann::json const& value) {
    if (value.is_null()) return "none";
    if (value.is_string()) return quote(value.get_ref<std::string const&>());
    if (!value.is_array() || value.size() <= 8) return value.dump();
    std::string list;
    for (std::size_t i = 0; i < 8; ++i) list += (i ? "," : "[") + value[i].dump();
    return list + ",... " + std::to_string(value.size()) + " in all]";
}

/// Returns a report as lines of text: a verdict, a line a mismatch, and what was not compared. Line feeds in names of
/// files and keys are \x0a there.
inline std::string to_text(config_report const& report) {
    auto const side = [](config_side const& s) {
        return printable(s.field + " = " + show_value(s.value) + " (" + s.file + ": " +
                         (s.source.empty() ? s.field : s.source) + ')');
    };
    auto const count = std::ssize(report.mismatches);
    auto text = printable(report.train + (count == 0 ? " agrees with " : " does not agree with ") + report.hf + ": ");
    text += count == 0 ? std::to_string(report.compared) + " settings and rules hold\n"
                       : std::to_string(count) + (count == 1 ? " mismatch\n" : " mismatches\n");
    for (auto const& m : report.mismatches)
        text += "  " + side(m.one) + " against " + side(m.other) + ": expected " + printable(m.expected) + '\n';
    if (report.gaps.empty()) return text;
    text += "not compared:\n";
    for (auto const& gap : report.gaps)
        text += "  " +
                printable(gap.source + " (" + gap.stated +
                          "): " + (gap.reason.empty() ? gap.file + " does not state " + gap.field : gap.reason)) +
                '\n';
    return text;
}

/// Returns a report as JSON: {"agrees", "hf", "train", "compared", "mismatches": [{"expected", "hf": {"field", "value",
/// "source"}, "train": {the same}}], "not_compared": [{"field", "file", "stated_in", "source", "reason"}]}.
///
/// A mismatch of two settings of the config.json has "hf" and "hf_other" in place of "hf" and "train", one of two of
/// the training configuration "train" and "train_other". `value` is null where the file does not state it; `source` are
/// the keys that lead to it, or to what says it instead; `reason` is "" where the file alone leaves the setting out.
inline nlohmann::ordered_json to_json(config_report const& report) {
    auto const side = [](config_side const& s) {
        return nlohmann::ordered_json{
            {"field", s.field}, {"value", s.value}, {"source", s.source.empty() ? s.field : s.source}};
    };
    auto mismatches = nlohmann::ordered_json::array(), gaps = mismatches;
    for (auto const& m : report.mismatches) {
        bool const one = m.one.file == report.train, other = m.other.file == report.train;
        nlohmann::ordered_json shown{{"expected", m.expected}};
        if (report.hf == report.train || one != other) {
            shown["hf"] = side(one && !other ? m.other : m.one);
            shown["train"] = side(one && !other ? m.one : m.other);
        } else {
            std::string const role = one ? "train" : "hf";
            shown[role] = side(m.one);
            shown[role + "_other"] = side(m.other);
        }
        mismatches.push_back(std::move(shown));
    }
    for (auto const& gap : report.gaps)
        gaps.push_back({{"field", gap.field},
                        {"file", gap.file},
                        {"stated_in", gap.stated},
                        {"source", gap.source},
                        {"reason", gap.reason}});
    return {{"agrees", report.agrees()},   {"hf", report.hf},          {"train", report.train},
            {"compared", report.compared}, {"mismatches", mismatches}, {"not_compared", gaps}};
}

} // namespace cpx
