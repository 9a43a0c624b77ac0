// SPDX-License-Identifier: Apache-2.0
// Two settings that cannot both be right, as reports show them.
#pragma once

#include <cpx/model/setting.hpp>

#include <nlohmann/json.hpp>

#include <string>
#include <utility>

namespace cpx {

/// One side of a conflict.
struct config_side {
    std::string file;     ///< where the setting is, or would be
    std::string field;    ///< what it is called there
    nlohmann::json value; ///< null if the file does not state it
    std::string source; ///< the keys that lead to it, or to what else says this: text_config.rope_parameters.rope_theta
};

/// Two settings that are at odds.
struct config_conflict {
    config_side one, other;
    std::string expected; ///< of the first side, in words
    std::string got;      ///< what is there
    std::string place;    ///< the JSON pointer to the first side
};

/// Returns a side with the value of a setting, shown as `value`.
template <class T>
config_side side_of(setting<T> const& of, nlohmann::json value) {
    return {of.file(), of.key(), std::move(value), of.source()};
}
template <class T>
config_side side_of(setting<T> const& of) {
    return side_of(of, of.has_value() ? nlohmann::json(*of) : nlohmann::json());
}

} // namespace cpx
