// SPDX-License-Identifier: Apache-2.0
// Batches of text, images and videos, written down or at random.
#pragma once

#include <cpx/plan/mrope.hpp>

#include <support/random.hpp>

#include <string>

namespace support {

/// A batch with its token ids and its media.
struct media_batch {
    cpx::thd batch;
    std::vector<cpx::index_t> ids;
    cpx::media items;
};

inline constexpr cpx::media_tokens placeholders{100, 200};

/// Collects the tokens of sequences.
class media_writer {
public:
    explicit media_writer(cpx::media_options options = {}) : options_(std::move(options)) {}

    media_writer& text(cpx::index_t count) {
        while (count-- > 0) ids_.push_back(7);
        return *this;
    }
    media_writer& image(cpx::index_t height, cpx::index_t width) {
        images_.push_back({1, height, width});
        return put(placeholders.image, height * width);
    }
    /// A video whose frames have `between` tokens of text between them.
    media_writer& video(cpx::media_grid grid, cpx::index_t between = 0, double seconds = 1) {
        videos_.push_back(grid);
        options_.seconds.push_back(seconds);
        for (cpx::index_t frame = 0; frame < grid.time; ++frame)
            text(frame > 0 ? between : 0).put(placeholders.video, grid.height * grid.width);
        return *this;
    }
    /// Ends a sequence, with `padding` ids behind what is valid.
    media_writer& end(std::vector<cpx::index_t> const& padding = {}) {
        valid_.push_back(std::ssize(ids_) - offsets_.back());
        ids_.insert(ids_.end(), padding.begin(), padding.end());
        offsets_.push_back(std::ssize(ids_));
        return *this;
    }
    media_batch done() const { return {cpx::thd(offsets_, valid_), ids_, cpx::media(images_, videos_, options_)}; }

private:
    media_writer& put(cpx::index_t id, cpx::index_t patches) {
        ids_.insert(ids_.end(), static_cast<std::size_t>(patches / options_.merge / options_.merge), id);
        return *this;
    }

    cpx::media_options options_;
    std::vector<cpx::index_t> ids_, offsets_{0}, valid_;
    std::vector<cpx::media_grid> images_, videos_;
};

/// Returns a batch of up to `most_sequences` sequences of anything: text, images and videos, side by side or apart, and
/// padding whose ids may be those of placeholders.
inline media_batch random_media(splitmix& numbers, cpx::mrope_rule rule, cpx::index_t most_sequences) {
    cpx::index_t const merge = numbers.between(1, 3);
    media_writer writer({.rule = rule, .merge = merge, .tokens_per_second = numbers.between(0, 5)});
    auto const side = [&] { return merge * numbers.between(1, 5); };
    bool const images = numbers.between(0, 3) > 0, videos = numbers.between(0, 3) > 0;
    for (cpx::index_t s = numbers.between(0, most_sequences); s > 0; --s) {
        for (cpx::index_t entries = numbers.between(0, 6); entries > 0; --entries) {
            cpx::index_t const what = numbers.between(0, 3);
            if (what == 0 && images)
                writer.image(side(), side());
            else if (what == 1 && videos)
                writer.video({numbers.between(1, 4), side(), side()},
                             rule == cpx::mrope_rule::qwen3_vl ? numbers.between(0, 3) : 0,
                             static_cast<double>(numbers.between(0, 60)) / 20);
            else
                writer.text(numbers.between(0, 12));
        }
        std::vector<cpx::index_t> padding;
        if (numbers.between(0, 2) == 0)
            for (cpx::index_t n = numbers.between(0, 5); n > 0; --n) padding.push_back(100 * numbers.between(0, 2));
        writer.end(padding);
    }
    return writer.done();
}

inline constexpr cpx::mrope_rule mrope_rules[] = {
    cpx::mrope_rule::qwen3_vl, cpx::mrope_rule::qwen2_vl, cpx::mrope_rule::qwen2_5_vl,
    cpx::mrope_rule::qwen2_5_vl_whole_seconds, cpx::mrope_rule::qwen2_5_vl_spatial_advance};

} // namespace support
