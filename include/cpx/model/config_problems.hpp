// SPDX-License-Identifier: Apache-2.0
// What is wrong with a document of settings: collected while it is read, and told at once.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/model/json.hpp>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace cpx::detail {

/// Collects what is wrong with a document, to report it at once: how much, and the first of it.
class config_problems {
public:
    config_problems(std::string where, caller here) : where_(std::move(where)), here_(here) {}

    void add(error problem) {
        if (++count_ <= shown) found_.push_back(std::move(problem));
    }
    void add(std::string what, std::string expected, std::string got) {
        if (++count_ <= shown) found_.emplace_back(where_, std::move(what), std::move(expected), std::move(got), here_);
    }

    /// Returns `value` as `T`, or `T{}` and notes the problem if it is none.
    template <class T>
    T as(json_value const& value) {
        try {
            return value.as<T>(here_);
        } catch (error const& problem) {
            add(problem);
            return T{};
        }
    }

    std::size_t count() const { return count_; }
    caller here() const { return here_; }

    /// Throws if anything was noted: the problem itself, or how many there are and the first of them in one text.
    void report() const {
        if (count_ == 0) return;
        if (count_ == 1) throw found_.front();
        std::string all;
        for (auto const& p : found_) all += "\n  " + p.problem() + ": expected " + p.expected() + ", got " + p.got();
        if (count_ > shown) all += "\n  and " + std::to_string(count_ - shown) + " more";
        throw error(where_, std::to_string(count_) + " settings are wrong" + all, "", "", here_);
    }

private:
    static constexpr std::size_t shown = 8;

    std::string where_;
    caller here_;
    std::size_t count_ = 0;
    std::vector<error> found_; // the first `shown`
};

} // namespace cpx::detail
