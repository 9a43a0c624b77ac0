// SPDX-License-Identifier: Apache-2.0
// Turns the events of nlohmann's parser into a document, refusing what the library lets pass.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/printable.hpp>

#if !__has_include(<nlohmann/json.hpp>)
#error "cpx: model needs nlohmann_json 3.11 or newer; link cpx::model (find_package(cpx COMPONENTS model))"
#include "end of compilation"
#endif
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace cpx::detail {

/// Builds a document from the events of nlohmann's parser.
///
/// The library's own builders keep the last of two equal keys in silence, and the one with a callback takes time
/// quadratic in the members of an object.
class json_builder {
public:
    /// `where` names the text in errors; both references must outlive the builder.
    json_builder(nlohmann::json& root, std::string const& where, int depth, caller here)
        : root_(root), where_(where), depth_(depth), here_(here) {}

    bool null() { return put(nullptr); }
    bool boolean(bool value) { return put(value); }
    bool number_integer(std::int64_t value) { return put(value); }
    bool number_unsigned(std::uint64_t value) { return put(value); }
    bool number_float(double value, std::string const&) { return put(value); }
    bool string(std::string& value) { return put(std::move(value)); }
    bool binary(nlohmann::json::binary_t&) { return false; }
    bool start_object(std::size_t) { return open(nlohmann::json::object()); }
    bool start_array(std::size_t) { return open(nlohmann::json::array()); }
    bool end_object() { return close(); }
    bool end_array() { return close(); }
    bool key(std::string& name) {
        auto const [member, fresh] = open_.back()->get_ref<nlohmann::json::object_t&>().emplace(name, nullptr);
        if (!fresh) throw error(where_, "duplicate key", "every key of an object once", quote(name) + " twice", here_);
        member_ = &member->second;
        return true;
    }
    bool parse_error(std::size_t, std::string const&, nlohmann::json::exception const& problem) {
        // "[id] reason; last read: 'the whole token'": the token can be as long as the text, so the reason must do.
        std::string reason = problem.what();
        reason = reason.substr(0, reason.find("; last read"));
        if (auto const id = reason.find("] "); id != std::string::npos) reason.erase(0, id + 2);
        throw error(where_, "not JSON", "one JSON value", reason.substr(0, 160), here_);
    }

private:
    bool put(nlohmann::json value) { return place(std::move(value)) != nullptr; }
    bool open(nlohmann::json value) {
        if (open_.size() == static_cast<std::size_t>(depth_))
            throw error(where_, "nested too deeply", "at most " + std::to_string(depth_) + " levels", "more", here_);
        open_.push_back(place(std::move(value)));
        return true;
    }
    bool close() {
        open_.pop_back();
        return true;
    }
    nlohmann::json* place(nlohmann::json value) {
        if (open_.empty()) return &(root_ = std::move(value));
        if (open_.back()->is_object()) return &(*member_ = std::move(value));
        open_.back()->push_back(std::move(value));
        return &open_.back()->back();
    }

    nlohmann::json& root_;
    std::string const& where_;
    int depth_;
    caller here_;
    std::vector<nlohmann::json*> open_;
    nlohmann::json* member_ = nullptr;
};

} // namespace cpx::detail
