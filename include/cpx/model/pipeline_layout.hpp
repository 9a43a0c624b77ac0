// SPDX-License-Identifier: Apache-2.0
// Layout strings of pipelines, such as "Et*3|(tt|)*29,m|L": what stands in which stage, sign by sign.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

namespace cpx {

namespace detail {

/// Reads one layout string. Commas are nothing, wherever they stand.
class pipeline_layout_reader {
public:
    static constexpr index_t most = 16384;

    pipeline_layout_reader(std::string_view text, caller here) : text_(text), here_(here) {}

    std::string read() {
        std::size_t opened = 0, body = 0; // where the open parenthesis stands, and what it begins in signs_
        bool open = false;
        while (more()) {
            std::size_t const at = at_;
            char const c = text_[at_++];
            if (c == '(') {
                if (open) fail(at, "no parentheses within others, which Megatron does not unroll");
                open = true, opened = at, body = signs_.size();
            } else if (c == ')') {
                if (!open) fail(at, "an open parenthesis before it");
                if (at == first_after(opened)) fail(at, "signs in the parentheses");
                if (!multiplied()) fail(first_after(at), "a multiplication of the parentheses, such as *2");
                repeat(body, at);
                open = false;
            } else if (c == 'E' || c == 't' || c == 'm' || c == 'L' || c == '|') {
                std::size_t const sign = signs_.size();
                append(c, at);
                if (multiplied()) repeat(sign, at);
            } else {
                fail(at, "E, t, m, L, |, a comma, or parentheses");
            }
        }
        if (open) fail(opened, "a closing parenthesis after it");
        return signs_;
    }

private:
    /// Skips commas; returns whether anything is left.
    bool more() {
        while (at_ < text_.size() && text_[at_] == ',') ++at_;
        return at_ < text_.size();
    }
    bool multiplied() const {
        std::size_t const next = first_after(at_ - 1);
        return next < text_.size() && text_[next] == '*';
    }
    /// Returns the place of the first byte behind `at` that is no comma.
    std::size_t first_after(std::size_t at) const {
        do ++at;
        while (at < text_.size() && text_[at] == ',');
        return at;
    }
    /// Reads "*n" and has what begins at `first` of the signs n times. What is taken away counts, too, so that no text
    /// makes more than `most` signs.
    void repeat(std::size_t first, std::size_t at) {
        more();
        ++at_; // the *
        index_t times = 0;
        bool any = false;
        while (more() && text_[at_] >= '0' && text_[at_] <= '9') {
            times = std::min(times * 10 + (text_[at_++] - '0'), most + 1);
            any = true;
        }
        if (!any) fail(at_, "a number after *");
        if (more() && text_[at_] == '*') fail(at_, "one multiplication, not a second");
        std::string const body = signs_.substr(first);
        if (times == 0) signs_.resize(first);
        if (body.empty()) return; // of parentheses whose signs were multiplied by 0
        for (index_t i = 1; i < times; ++i) append(body, at);
    }
    template <class T>
    void append(T const& what, std::size_t at) {
        std::size_t const before = signs_.size();
        signs_ += what;
        made_ += static_cast<index_t>(signs_.size() - before);
        if (made_ > most) fail(at, "at most " + std::to_string(most) + " signs in all");
    }
    [[noreturn]] void fail(std::size_t at, std::string const& expected) const {
        std::string_view const rest = text_.substr(at < text_.size() ? at : text_.size());
        throw error("pipeline", "character " + std::to_string(at) + " of layout " + quote(text_), expected,
                    rest.empty() ? "the end" : quote(rest.substr(0, first_character(rest).bytes)), here_);
    }

    std::string_view text_;
    caller here_;
    std::string signs_;
    std::size_t at_ = 0;
    index_t made_ = 0;
};

} // namespace detail

/// Returns a layout string with everything multiplied out: of "Et|(t|)*2,L" this is "Et|t|t|L".
///
/// E is the embedding, t a decoder layer, m a layer of multi-token prediction, L the loss, | the end of a stage. `x*n`
/// is n times the sign x, `(...)*n` n times what is between. Commas are nothing. Time and memory are bounded by the
/// text's length and 16384 signs; every text is read or refused by `cpx::error`, which names the character. Texts that
/// Megatron takes by accident, such as "t*2*3", are refused.
///
/// Source: Megatron-LM, parse_str_to_list of megatron/core/transformer/pipeline_parallel_layer_layout.py.
inline std::string unroll_pipeline_layout(std::string_view text, caller here = caller::here()) {
    return detail::pipeline_layout_reader(text, here).read();
}

} // namespace cpx
