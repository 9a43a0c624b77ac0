// SPDX-License-Identifier: Apache-2.0
// A packed batch of text, images and videos from the command line: "t5,i4x6,t3;v2x4x4;t7".
#pragma once

#include "common/sharding_options.hpp"

#include <cpx/plan/mrope.hpp>

namespace inspect {

using cpx::index_t;
using cpx::media_kind;
using cpx::range;

inline constexpr index_t most_media_tokens = 1'000'000;

/// The placeholders of an image, or of one frame of a video: consecutive rows of the batch. The row before them is the
/// item's start, the one behind them its end.
struct medium {
    media_kind kind = media_kind::image;
    index_t number = 0, frame = 0; ///< of the images, or of the videos; and of the video
    index_t height = 0, width = 0; ///< in rows of features
    range rows;
};

/// A batch with its images and videos, and the positions of all its tokens.
struct media_batch {
    cpx::thd batch;
    cpx::media items;
    std::vector<medium> media; ///< ascending
    cpx::batch_positions positions;
};

/// Returns "image 0", or "video 1, frame 2".
inline std::string name_of(medium const& m) {
    if (m.kind == media_kind::image) return "image " + std::to_string(m.number);
    return "video " + std::to_string(m.number) + ", frame " + std::to_string(m.frame);
}

/// Reads the text of a `media_batch`, entry by entry.
class media_parser {
public:
    media_batch parse(std::string_view text) {
        for_each_part(text, ';', [&](std::string_view sequence, index_t s) {
            for_each_part(sequence, ',', [&](std::string_view entry, index_t e) {
                entry_ = entry;
                place_ =
                    " of entry " + std::to_string(e) + ", " + cpx::quote(entry) + ", of sequence " + std::to_string(s);
                add(numbers());
            });
            offsets_.push_back(std::ssize(types_));
        });
        cpx::media items(images_, videos_, {.merge = merge});
        cpx::thd batch(std::move(offsets_));
        auto positions = cpx::mrope_positions(items, batch, types_, cpx::token_types);
        return {std::move(batch), std::move(items), std::move(media_), std::move(positions)};
    }

private:
    static constexpr index_t merge = 2, text_before_frame = 3;

    template <class F>
    static void for_each_part(std::string_view text, char separator, F&& f) {
        index_t number = 0;
        for (std::size_t first = 0; first <= text.size();) {
            std::size_t const last = std::min(text.find(separator, first), text.size());
            f(text.substr(first, last - first), number++);
            first = last + 1;
        }
    }

    /// Returns the numbers of an entry, named in the order of its kind.
    std::vector<index_t> numbers() const {
        static constexpr std::string_view kinds = "tiv";
        static constexpr char const* names[][3] = {{"tokens"}, {"height", "width"}, {"frames", "height", "width"}};
        std::size_t const kind = entry_.empty() ? kinds.npos : kinds.find(entry_.front());
        std::vector<index_t> values;
        std::size_t parts = 0;
        if (kind != kinds.npos) for_each_part(entry_.substr(1), 'x', [&](std::string_view, index_t) { ++parts; });
        if (kind == kinds.npos || parts != kind + 1)
            throw cpx::error("--media", "form" + place_, "tTOKENS, iHEIGHTxWIDTH or vFRAMESxHEIGHTxWIDTH",
                             cpx::quote(entry_));
        for_each_part(entry_.substr(1), 'x', [&](std::string_view part, index_t i) {
            std::string const what = names[kind][i] + place_;
            values.push_back(examples::parse_number(part, kind == 0 ? 0 : 1, most_media_tokens, "--media", what));
            bool const side = kind > 0 && i + 2 >= static_cast<index_t>(parts);
            cpx::require(!side || values.back() % merge == 0, "--media", what.c_str(),
                         "a multiple of the merge size " + std::to_string(merge), values.back());
        });
        return values;
    }

    void add(std::vector<index_t> const& sizes) {
        bool const video = sizes.size() == 3;
        index_t const frames = video ? sizes[0] : 1;
        index_t const height = sizes.size() > 1 ? sizes[sizes.size() - 2] / merge : 0, width = sizes.back() / merge;
        index_t const tokens =
            sizes.size() == 1 ? sizes[0] : height * width + 2 + (video ? text_before_frame : 0); // of one frame
        cpx::require(tokens <= (most_media_tokens - std::ssize(types_)) / frames, "--media",
                     ("tokens up to the end" + place_).c_str(), "at most " + std::to_string(most_media_tokens), "more");
        if (sizes.size() == 1) return text(tokens);
        media_kind const kind = video ? media_kind::video : media_kind::image;
        auto& grids = video ? videos_ : images_;
        for (index_t frame = 0; frame < frames; ++frame) {
            text(video ? text_before_frame + 1 : 1);
            index_t const first = std::ssize(types_), rows = height * width;
            media_.push_back({kind, std::ssize(grids), frame, height, width, {first, first + rows}});
            types_.insert(types_.end(), static_cast<std::size_t>(rows), static_cast<index_t>(kind));
            text(1);
        }
        grids.push_back({frames, height * merge, width * merge});
    }

    void text(index_t tokens) { types_.insert(types_.end(), static_cast<std::size_t>(tokens), 0); }

    std::string_view entry_;
    std::string place_; ///< of the entry, for errors
    std::vector<index_t> types_, offsets_{0};
    std::vector<cpx::media_grid> images_, videos_;
    std::vector<medium> media_;
};

} // namespace inspect
