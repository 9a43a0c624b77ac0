// SPDX-License-Identifier: Apache-2.0
// A setting of a document: its value, if there is one, and where it stands.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/model/config_problems.hpp>
#include <cpx/model/json.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpx {

/// The least that a number of a document may be.
enum class at_least { none, zero, one };

/// A value that a document states, or does not: null is as good as nothing there. There are no defaults.
template <class T>
class setting {
public:
    /// A setting of no document, which nobody has stated.
    setting() = default;
    /// A setting of no document.
    setting(T value) : value_(std::move(value)) {}

    bool has_value() const { return value_.has_value(); }
    /// Returns the value. Throws `cpx::error` that names document and key if it is not stated.
    T const& value(caller here = caller::here()) const {
        if (!value_) throw error(file_, place_.empty() ? "a setting" : place_, "a value", "none", here);
        return *value_;
    }
    /// Returns the value, which is known to be there. Throws as `value` does.
    T const& operator*() const { return value(); }
    T const* operator->() const { return &value(); }
    T value_or(T other) const { return value_.value_or(std::move(other)); }
    std::optional<T> const& optional() const { return value_; }
    /// Returns whether the value is there, and is `other`.
    friend bool operator==(setting const& a, T const& other) { return a.value_ == other; }

    /// Returns whether the document has null here; then there is no value.
    bool null() const { return null_; }
    /// Returns whether the document states something here that was refused; then there is no value.
    bool refused() const { return refused_; }
    /// Returns the JSON pointer to the setting, or to where it would stand.
    std::string const& place() const { return place_; }
    /// Returns the name of the document.
    std::string const& file() const { return file_; }
    /// Returns the keys that lead to the setting: `text_config.rope_parameters.rope_theta`.
    std::string source() const {
        std::string keys = place_.empty() ? place_ : place_.substr(1);
        std::ranges::replace(keys, '/', '.');
        return keys;
    }
    /// Returns the last of these keys.
    std::string key() const { return place_.substr(place_.find_last_of('/') + 1); }

    /// Reads what `object` states under `key`, if it does. Notes a value of another type and one below `least`; not
    /// that `object` is none, which whoever found it has noted.
    ///
    /// Integers are those that an int can hold, other numbers those that a float holds with all its digits, because
    /// models run in float, too.
    void read(json_value const& object, std::string_view key, detail::config_problems& problems,
              at_least least = at_least::none) {
        file_ = object.where();
        place_ = object.pointer() + '/' + std::string(key);
        value_.reset();
        null_ = object.has_null(key);
        refused_ = !object.is_object();
        if (!object.has(key)) return;
        auto const before = problems.count();
        auto const stated = object.at(key);
        T value = convert(stated, problems);
        if constexpr (std::integral<T> && !std::same_as<T, bool>) {
            if (problems.count() == before && least != at_least::none && value < (least == at_least::one ? 1 : 0))
                problems.add(place_, least == at_least::one ? "more than 0" : "0 or more", stated.got());
        } else if constexpr (std::floating_point<T>) {
            if (problems.count() == before && !(value > 0)) problems.add(place_, "more than 0", stated.got());
            if (problems.count() == before && value < std::numeric_limits<float>::min())
                problems.add(place_, "at least 1.2e-38", stated.got());
        }
        refused_ = problems.count() != before;
        if (!refused_) value_ = std::move(value);
    }
    /// Refuses the value that was read, which `problems` are told of.
    void refuse(detail::config_problems& problems, std::string expected, std::string got) {
        problems.add(place_, std::move(expected), std::move(got));
        value_.reset();
        refused_ = true;
    }

private:
    static T convert(json_value const& stated, detail::config_problems& problems) {
        if constexpr (std::same_as<T, index_t>) {
            return problems.as<std::int32_t>(stated);
        } else if constexpr (std::floating_point<T>) {
            auto const before = problems.count();
            static_cast<void>(problems.as<float>(stated));
            return problems.count() == before ? problems.as<T>(stated) : T{};
        } else if constexpr (std::same_as<T, std::vector<index_t>>) {
            auto const narrow = problems.as<std::vector<std::int32_t>>(stated);
            return {narrow.begin(), narrow.end()};
        } else if constexpr (requires(T& value) { convert_setting(stated, value, problems); }) {
            T value;
            convert_setting(stated, value, problems);
            return value;
        } else {
            return problems.as<T>(stated);
        }
    }

    std::optional<T> value_;
    std::string file_, place_;
    bool null_ = false, refused_ = false;
};

} // namespace cpx
