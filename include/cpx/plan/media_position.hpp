// SPDX-License-Identifier: Apache-2.0
// The position of one token among images and videos: from counts alone, for host and device.
#pragma once

#include <cpx/layout/algorithm.hpp>

#include <cstdint>
#include <limits>

namespace cpx {

/// What a token is. The numbers are those of `mm_token_type_ids` in transformers.
enum class media_kind : std::uint8_t { text, image, video };

/// The token ids of placeholders; left out: of a kind that the model does not have. `token_types` stands for lists of
/// `media_kind` instead of ids.
struct media_tokens {
    static constexpr index_t none = std::numeric_limits<index_t>::min(); ///< which no list has, as it may -1
    index_t image = none, video = none;
    CPX_HOST_DEVICE constexpr media_kind kind(index_t id) const {
        return id == image ? media_kind::image : id == video ? media_kind::video : media_kind::text;
    }
};
inline constexpr media_tokens token_types{1, 2};

/// How a model counts positions at media: which placeholders are an item, the time of its frames, and by how much
/// positions go on behind it. Height and width count from the beginning of the item.
///
/// Source: Hugging Face transformers, get_rope_index of the models.
enum class mrope_rule {
    /// Every image and every frame of a video is an item; on by max(height, width).
    qwen3_vl, ///< and Qwen3.5
    /// A video is an item, frame a at time a; on behind the greatest position.
    qwen2_vl,
    /// Frame a at a * seconds * tokens_per_second, multiplied in float and cut to an integer; on behind the greatest
    /// position. As the model was published.
    qwen2_5_vl,
    /// The seconds are cut to an integer first. transformers from the middle of 2025 on.
    qwen2_5_vl_whole_seconds,
    /// So they are, and positions go on by max(height, width), so that text may have positions of the video before it.
    /// transformers 5.
    qwen2_5_vl_spatial_advance
};

/// Returns the position of a frame on the first axis, counted from the beginning of its item. seconds: of its video.
CPX_HOST_DEVICE constexpr index_t frame_time(mrope_rule rule, index_t frame, double seconds,
                                             index_t tokens_per_second) {
    switch (rule) {
    case mrope_rule::qwen3_vl: return 0;
    case mrope_rule::qwen2_vl: return frame;
    case mrope_rule::qwen2_5_vl: {
        float const at = static_cast<float>(frame) * static_cast<float>(seconds);
        return static_cast<index_t>(at * static_cast<float>(tokens_per_second));
    }
    default: return frame * (static_cast<index_t>(seconds) * tokens_per_second);
    }
}

/// Returns by how much positions go on behind an item. last: the time of its last frame; sizes in rows of features.
CPX_HOST_DEVICE constexpr index_t item_advance(mrope_rule rule, index_t last, index_t height, index_t width) {
    index_t const side = height > width ? height : width;
    return rule == mrope_rule::qwen2_5_vl_spatial_advance || last < side ? side : last + 1;
}

/// Position of a token on the three axes of multimodal rotary embedding.
struct mrope_position {
    index_t time = 0, height = 0, width = 0;
    friend constexpr bool operator==(mrope_position, mrope_position) = default;
};

/// An image, or one frame of a video, among all of its kind in the batch. A list of them ends with one more, behind the
/// last, which has no rows.
struct media_frame {
    index_t row = 0;     ///< rows of the kind's features before it
    index_t advance = 0; ///< what the items before it, and not this one's, add to the positions behind them
    index_t time = 0;    ///< its position on the first axis, counted from the beginning of its item
    index_t width = 1;   ///< rows of features side by side
    index_t number = 0;  ///< frames of its item before it
    friend constexpr bool operator==(media_frame, media_frame) = default;

    /// Returns whether no item is begun and not ended at row `at`, which lies in this frame.
    CPX_HOST_DEVICE constexpr bool begins_item(index_t at) const { return at == row && number == 0; }
};

/// A segment, as positions see it.
struct media_segment {
    index_t row = 0;                ///< where it begins among the rank's rows
    index_t count = 0;              ///< its rows
    index_t valid = 0;              ///< rows before the padding; those behind are text
    index_t images = 0, videos = 0; ///< rows of features before it, in the batch
    index_t origin = 0;             ///< what media before it leave of its first token's place in the sequence
    friend constexpr bool operator==(media_segment, media_segment) = default;
};

/// Placeholders of a segment: what ranks tell each other.
struct media_count {
    std::int32_t image = 0, video = 0;
    friend constexpr bool operator==(media_count, media_count) = default;
};

/// Returns which of `frames`, of which there are `count` and one behind the last, holds row `row` of the features.
/// `guess`: where to look first. Cost: O(log d) if the guess is d off.
CPX_HOST_DEVICE constexpr int frame_at(media_frame const* frames, int count, index_t row, int guess) {
    return last_at_or_before(row, count + 1, guess, [&](int i) { return frames[i].row; });
}

/// Returns the position of a token.
///
/// `text`: its segment's origin and the tokens of its segment before it that are text; `images`, `videos`: rows of
/// features of either kind before it in the batch; `image`, `video`: the frames that hold those rows.
CPX_HOST_DEVICE constexpr mrope_position position_of(media_kind kind, index_t text, index_t images, index_t videos,
                                                     media_frame const& image, media_frame const& video) {
    index_t const base = text + image.advance + video.advance;
    if (kind == media_kind::text) return {base, base, base};
    media_frame const& frame = kind == media_kind::image ? image : video;
    index_t const at = (kind == media_kind::image ? images : videos) - frame.row;
    return {base + frame.time, base + at / frame.width, base + at % frame.width};
}

} // namespace cpx
