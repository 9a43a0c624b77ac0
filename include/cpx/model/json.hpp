// SPDX-License-Identifier: Apache-2.0
// Checked JSON: text becomes values within limits, and values are read by type with errors that say where they stand.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/element.hpp>
#include <cpx/model/file.hpp>
#include <cpx/model/json_builder.hpp>

#include <nlohmann/json.hpp>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cpx {

/// What a JSON text may cost before it is refused.
struct json_limits {
    std::size_t bytes = 16'000'000;
    int depth = 64; // arrays and objects inside one another
};

/// A value in a JSON document, which knows its document's name and the JSON pointer (RFC 6901) that leads to it.
///
/// Immutable and cheap to copy: values share their document.
class json_value {
public:
    /// Parses `text`; `where` names it in errors.
    ///
    /// Throws `cpx::error` for a text that is longer or deeper than `limits`, is not JSON in UTF-8, or repeats a key.
    static json_value parse(std::string_view text, std::string where, json_limits limits = {},
                            caller here = caller::here()) {
        check_length(text.size(), where, limits, here);
        // nlohmann takes a NUL for the end of the text, so that what follows it would be accepted unread.
        if (auto const nul = text.find('\0'); nul != text.npos)
            throw error(where, "not JSON", "text without NUL", "NUL at byte " + std::to_string(nul), here);
        auto root = std::make_shared<nlohmann::json>();
        auto name = std::make_shared<std::string const>(std::move(where));
        detail::json_builder builder(*root, *name, limits.depth, here);
        nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
        auto const* const value = root.get();
        return {std::shared_ptr<nlohmann::json const>(std::move(root), value), std::move(name), {}};
    }

    /// Parses a file. Throws as `parse` does, and if the file cannot be read.
    static json_value read(std::filesystem::path const& path, json_limits limits = {}, caller here = caller::here()) {
        detail::byte_source const file(path, here);
        check_length(file.size(), file.name(), limits, here);
        return parse(file.read(0, file.size(), here), file.name(), limits, here);
    }

    /// Returns the name of the document.
    std::string const& where() const { return *where_; }
    /// Returns the JSON pointer of this value; empty for the whole document.
    std::string pointer() const {
        std::string text;
        for (auto at = place_.get(); at; at = at->outer.get()) text = '/' + escape(at->key) + text;
        return text;
    }

    bool is_null() const { return value_->is_null(); }
    bool is_object() const { return value_->is_object(); }
    bool is_array() const { return value_->is_array(); }
    bool is_string() const { return value_->is_string(); }

    /// Returns whether this is the same value as another, wherever they stand.
    bool same(json_value const& other) const { return *value_ == *other.value_; }

    /// Returns whether this is an object that has something other than null under `key`.
    bool has(std::string_view key) const {
        if (!is_object()) return false;
        auto const member = value_->find(std::string(key));
        return member != value_->end() && !member->is_null();
    }

    /// Returns whether this is an object that has null under `key`.
    bool has_null(std::string_view key) const {
        if (!is_object()) return false;
        auto const member = value_->find(std::string(key));
        return member != value_->end() && member->is_null();
    }

    /// Returns the keys of this object, sorted. Throws `cpx::error` if it is not an object.
    std::vector<std::string> keys(caller here = caller::here()) const {
        if (!is_object()) fail("an object", here);
        std::vector<std::string> names;
        names.reserve(value_->size());
        for (auto const& member : value_->items()) names.push_back(member.key());
        return names;
    }

    /// Returns the value under `key`. Throws `cpx::error` if this is not an object or has no such key.
    json_value at(std::string_view key, caller here = caller::here()) const {
        if (!is_object()) fail("an object", here);
        auto const member = value_->find(std::string(key));
        if (member == value_->end()) throw error(where(), show(pointer() + '/' + escape(key)), "a value", "none", here);
        return inner(*member, std::string(key));
    }

    /// Returns the elements of this array. Throws `cpx::error` if it is none.
    std::vector<json_value> items(caller here = caller::here()) const {
        if (!value_->is_array()) fail("an array", here);
        std::vector<json_value> all;
        for (auto const& element : *value_) all.push_back(inner(element, std::to_string(all.size())));
        return all;
    }

    /// Returns this value as `T`: bool, an integer, a floating-point number, std::string, or a std::vector of those.
    ///
    /// Throws `cpx::error` for a value of another type and for a number that `T` cannot hold. 4.0 is not an integer; to
    /// become a floating-point number, one may be rounded, but not to infinity.
    template <class T>
    T as(caller here = caller::here()) const {
        if constexpr (std::same_as<T, bool>) {
            if (value_->is_boolean()) return value_->get<bool>();
            fail("true or false", here);
        } else if constexpr (std::integral<T>) {
            if (value_->is_number_unsigned()) {
                if (auto const n = value_->get<std::uint64_t>(); std::in_range<T>(n)) return static_cast<T>(n);
            } else if (value_->is_number_integer()) {
                if (auto const n = value_->get<std::int64_t>(); std::in_range<T>(n)) return static_cast<T>(n);
            }
            fail("an integer from " + std::to_string(std::numeric_limits<T>::min()) + " to " +
                     std::to_string(std::numeric_limits<T>::max()),
                 here);
        } else if constexpr (std::floating_point<T>) {
            if (!value_->is_number()) fail("a number", here);
            if (detail::holds<T>(value_->get<double>())) return value_->get<T>();
            fail("a number of at most " + nlohmann::json(std::numeric_limits<T>::max()).dump(), here);
        } else if constexpr (std::same_as<T, std::string>) {
            if (value_->is_string()) return value_->get<std::string>();
            fail("a string", here);
        } else {
            static_assert(std::same_as<T, std::vector<typename T::value_type>>, "cpx: no JSON value is of this type");
            if (!value_->is_array()) fail("an array", here);
            T values;
            values.reserve(value_->size());
            for (auto const& element : *value_)
                values.push_back(
                    inner(element, std::to_string(values.size())).template as<typename T::value_type>(here));
            return values;
        }
    }

    /// Returns `at(key).as<T>()`.
    template <class T>
    T get(std::string_view key, caller here = caller::here()) const {
        return at(key, here).template as<T>(here);
    }

    /// Throws the `cpx::error` that says this value is not what was `expected`.
    [[noreturn]] void fail(std::string expected, caller here = caller::here()) const {
        throw error(where(), show(pointer()), std::move(expected), got(), here);
    }

    /// Returns the value as an error shows it: short texts and numbers in full, arrays and objects by their size.
    std::string got() const {
        if (value_->is_string()) return quote(value_->get_ref<std::string const&>());
        if (value_->is_array()) return "an array of " + std::to_string(value_->size());
        if (value_->is_object()) return "an object of " + std::to_string(value_->size());
        return value_->dump();
    }

private:
    /// How a value is reached from the one around it. Pointers are put together where they are asked for: a key can be
    /// as long as the text, and is that of all values inside.
    struct step {
        std::shared_ptr<step const> outer;
        std::string key;
    };

    json_value(std::shared_ptr<nlohmann::json const> value, std::shared_ptr<std::string const> where,
               std::shared_ptr<step const> place)
        : value_(std::move(value)), where_(std::move(where)), place_(std::move(place)) {}

    json_value inner(nlohmann::json const& value, std::string key) const {
        return {std::shared_ptr<nlohmann::json const>(value_, &value), where_,
                std::make_shared<step const>(step{place_, std::move(key)})};
    }
    static void check_length(std::uint64_t bytes, std::string const& where, json_limits limits, caller here) {
        if (bytes > limits.bytes)
            throw error(where, "too long", "at most " + std::to_string(limits.bytes) + " bytes", std::to_string(bytes),
                        here);
    }

    static std::string escape(std::string_view key) {
        std::string escaped;
        for (char const c : key) c == '~' ? escaped += "~0" : c == '/' ? escaped += "~1" : escaped += c;
        return escaped;
    }
    /// A pointer is made of keys of the file, so that it is shown as carefully as any value.
    static std::string show(std::string const& pointer) {
        auto const quoted = quote(pointer);
        return pointer.empty() ? "the document" : quoted == '"' + pointer + '"' ? pointer : quoted;
    }

    std::shared_ptr<nlohmann::json const> value_;
    std::shared_ptr<std::string const> where_;
    std::shared_ptr<step const> place_;
};

} // namespace cpx
