// SPDX-License-Identifier: Apache-2.0
// Which layers are of a kind, as Megatron's moe_layer_freq and linear_attention_freq say it.
#pragma once

#include <cpx/core/index.hpp>
#include <cpx/model/config_problems.hpp>
#include <cpx/model/json.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cpx {

/// Which layers are of a kind: every n-th, or as a list says that has 1 for those that are.
struct layer_choice {
    index_t every = 0;         ///< 0 where there is a list
    std::vector<index_t> list; ///< of 0 and 1
};

namespace detail {

/// Reads what Megatron takes on its command line, a number or a list of Python's: "4", "[1, 1, 0]",
/// "([0]*1+[1]*47)". Time and memory are bounded: by 65536 bytes, 32 parentheses within others, 2^20 elements made.
class layer_choice_reader {
public:
    /// A number, or a list of numbers.
    struct value {
        index_t number = 0;
        std::optional<std::vector<index_t>> list;
    };

    explicit layer_choice_reader(std::string_view text) : text_(text) {}

    /// Returns what the text says; nothing for a text that is neither.
    std::optional<value> read() {
        if (text_.size() > 65536) return {};
        auto all = sum();
        return peek() == '\0' && at_ == text_.size() ? all : std::nullopt;
    }

private:
    static constexpr index_t most = std::numeric_limits<std::int32_t>::max();

    /// Returns the next character that is no space; NUL at the end.
    char peek() {
        while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t')) ++at_;
        return at_ < text_.size() ? text_[at_] : '\0';
    }
    bool take(char c) {
        if (peek() != c || at_ == text_.size()) return false;
        ++at_;
        return true;
    }
    /// Returns whether so many more elements may be made.
    bool make(std::size_t count) {
        made_ += count;
        return made_ <= std::size_t{1} << 20;
    }

    std::optional<value> sum() {
        auto left = product();
        while (left && take('+')) {
            auto const right = product();
            if (!right || left->list.has_value() != right->list.has_value()) return {};
            if (!left->list) {
                left->number += right->number;
                if (left->number > most) return {};
                continue;
            }
            if (!make(right->list->size())) return {};
            left->list->insert(left->list->end(), right->list->begin(), right->list->end());
        }
        return left;
    }
    std::optional<value> product() {
        auto left = factor();
        while (left && take('*')) {
            auto right = factor();
            if (!right || (left->list && right->list)) return {};
            if (right->list) std::swap(left, right);
            if (!left->list) {
                left->number *= right->number; // of two that an int holds
                if (left->number > most) return {};
                continue;
            }
            auto const once = std::exchange(*left->list, {});
            for (index_t i = 0; i < right->number && !once.empty(); ++i) {
                if (!make(once.size())) return {};
                left->list->insert(left->list->end(), once.begin(), once.end());
            }
        }
        return left;
    }
    std::optional<value> factor() {
        if (take('(')) {
            if (++depth_ > 32) return {};
            auto inner = sum();
            --depth_;
            return take(')') ? inner : std::nullopt;
        }
        if (take('[')) return list();
        value found;
        auto const first = (static_cast<void>(peek()), at_);
        for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
            found.number = found.number * 10 + (text_[at_] - '0');
            if (found.number > most) return {};
        }
        return at_ > first ? std::optional(std::move(found)) : std::nullopt;
    }
    /// Reads what comes behind "[".
    std::optional<value> list() {
        if (++depth_ > 32) return {};
        value found{.number = 0, .list = std::vector<index_t>{}};
        while (!take(']')) {
            auto const element = sum();
            if (!element || element->list || !make(1)) return {};
            found.list->push_back(element->number);
            if (!take(',') && peek() != ']') return {};
        }
        --depth_;
        return found;
    }

    std::string_view text_;
    std::size_t at_ = 0, made_ = 0;
    int depth_ = 0;
};

} // namespace detail

/// Reads a number, a list, or a text that is one of these, as it stands on a command line: "([0]*1+[1]*47)".
inline void convert_setting(json_value const& stated, layer_choice& choice, detail::config_problems& problems) {
    auto const before = problems.count();
    std::vector<index_t> list;
    bool of_list = stated.is_array();
    if (stated.is_string()) {
        auto const text = stated.as<std::string>();
        auto read = detail::layer_choice_reader(text).read();
        if (!read)
            return problems.add(stated.pointer(), "a number, or a list such as [1, 1, 0] or [0]*1+[1]*47",
                                stated.got());
        choice.every = read->number;
        of_list = read->list.has_value();
        if (of_list) list = std::move(*read->list);
    } else if (of_list) {
        auto const numbers = problems.as<std::vector<std::int32_t>>(stated);
        list.assign(numbers.begin(), numbers.end());
    } else {
        choice.every = problems.as<std::int32_t>(stated);
    }
    for (std::size_t i = 0; i < list.size(); ++i)
        if (list[i] != 0 && list[i] != 1)
            problems.add(stated.pointer() + '/' + std::to_string(i), "0 or 1", std::to_string(list[i]));
    if (problems.count() != before) return;
    if (of_list) choice = {0, std::move(list)};
    if (!of_list && choice.every < 1) problems.add(stated.pointer(), "more than 0", stated.got());
}

} // namespace cpx
