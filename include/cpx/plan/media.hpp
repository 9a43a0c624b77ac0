// SPDX-License-Identifier: Apache-2.0
// The images and videos of a batch, which every rank knows: their sizes, and how positions go on behind them.
#pragma once

#include <cpx/core/thd.hpp>
#include <cpx/layout/piecewise.hpp>
#include <cpx/plan/media_position.hpp>

#include <cmath>
#include <limits>

namespace cpx {

/// Size of an image or a video in patches, as image_grid_thw and video_grid_thw have it.
struct media_grid {
    index_t time = 1, height = 0, width = 0;
    friend constexpr bool operator==(media_grid, media_grid) = default;
};

/// What else the positions of a model depend on.
struct media_options {
    mrope_rule rule = mrope_rule::qwen3_vl;
    index_t merge = 2;                ///< patches along each side that become one row of features: spatial_merge_size
    index_t tokens_per_second = 2;    ///< of Qwen2.5-VL
    std::vector<double> seconds = {}; ///< a video, of Qwen2.5-VL: second_per_grid_t; none: 1
};

/// An image, a video or a frame: the placeholders that stand side by side. Sizes in rows of features.
struct media_item {
    index_t frames = 1, height = 0, width = 0;
    index_t advance = 0; ///< by how much positions go on behind it
    index_t number = 0;  ///< of the grid
    index_t rows() const { return frames * height * width; }
};

/// All images and videos of a batch, in the order of the batch. Every rank has the same.
class media {
public:
    media() : media({}, {}) {}

    /// Throws `cpx::error` that names the first grid that is empty or not divisible by the merge size, an image of
    /// several frames, seconds that are not one a video, more than 2^31 - 1 rows of a kind, or a rule that is none.
    media(std::vector<media_grid> const& images, std::vector<media_grid> const& videos, media_options options = {},
          caller here = caller::here())
        : options_(std::move(options)) {
        require(options_.rule >= mrope_rule::qwen3_vl && options_.rule <= mrope_rule::qwen2_5_vl_spatial_advance,
                "media", "rule", "one of mrope_rule", static_cast<int>(options_.rule), here);
        require(options_.merge > 0, "media", "merge", "at least 1", options_.merge, here);
        require(options_.seconds.empty() || options_.seconds.size() == videos.size(), "media", "number of seconds",
                videos.size(), options_.seconds.size(), here);
        require(options_.tokens_per_second >= 0 && options_.tokens_per_second < 1 << 20, "media", "tokens_per_second",
                "0 to 2^20 - 1", options_.tokens_per_second, here);
        for (double const s : options_.seconds)
            require(s >= 0 && s < 1 << 20, "media", "seconds", "0 to 2^20", s, here);
        images_ = list("image", images, false, here);
        videos_ = list("video", videos, options_.rule == mrope_rule::qwen3_vl, here);
    }
    template <class X = detail::any>
        requires(!std::same_as<X, media>)
    explicit media(X const& = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: media(images, videos, options) wants two vectors of media_grid, in "
                                        "patches: media({{1, 4, 6}}, {})");
    }

    media_options const& options() const { return options_; }
    bool empty() const { return rows(media_kind::image) + rows(media_kind::video) == 0; }
    std::vector<media_item> const& items(media_kind kind) const { return of(kind).items; }
    /// Returns all frames of a kind and one behind the last.
    std::vector<media_frame> const& frames(media_kind kind) const { return of(kind).frames; }
    /// Returns how many rows of features a kind has, which is how many placeholders.
    index_t rows(media_kind kind) const { return of(kind).frames.back().row; }
    /// Returns the rows of a kind's features as a batch: every frame is a sequence.
    thd const& batch(media_kind kind) const { return of(kind).batch; }
    /// Returns whether an item may have greater positions than the text behind it begins with.
    bool overruns() const { return overruns_; }

    /// Returns the position of an item's frame on the first axis, counted from the beginning of the item.
    index_t time(media_item const& item, index_t frame) const {
        bool const known = !options_.seconds.empty() && item.frames > 1;
        return frame_time(options_.rule, frame, known ? options_.seconds[static_cast<std::size_t>(item.number)] : 1,
                          options_.tokens_per_second);
    }

private:
    struct of_kind {
        std::vector<media_item> items;
        std::vector<media_frame> frames;
        thd batch;
    };
    of_kind const& of(media_kind kind) const { return kind == media_kind::image ? images_ : videos_; }

    of_kind list(std::string const& kind, std::vector<media_grid> const& grids, bool split, caller here) {
        of_kind all;
        media_frame next;
        index_t const most = std::numeric_limits<std::int32_t>::max();
        for (std::size_t i = 0; i < grids.size(); ++i) {
            auto const& [time, height, width] = grids[i];
            auto const check = [&](char const* what, bool holds, std::string const& expected, index_t got) {
                if (!holds)
                    throw error("media", what + (" of " + kind + ' ' + std::to_string(i)), expected,
                                std::to_string(got), here);
            };
            std::string const sides = "a multiple of the merge size " + std::to_string(options_.merge);
            check("frames", kind == "image" ? time == 1 : time > 0, kind == "image" ? "1" : "at least 1", time);
            check("height", height > 0 && height % options_.merge == 0, sides, height);
            check("width", width > 0 && width % options_.merge == 0, sides, width);
            index_t const h = height / options_.merge, w = width / options_.merge;
            if (h > most / w || time > most / (h * w) || next.row > most - time * h * w)
                throw error("media", "rows up to the end of " + kind + ' ' + std::to_string(i), "at most 2^31 - 1",
                            std::to_string(next.row) + " before it and " + std::to_string(time) + " times " +
                                std::to_string(h) + " times " + std::to_string(w),
                            here);
            media_item item{split ? 1 : time, h, w, 0, static_cast<index_t>(i)};
            double const step = static_cast<double>(options_.tokens_per_second) *
                                (options_.seconds.empty() || item.frames == 1 ? 1 : options_.seconds[i]);
            check("frames", static_cast<double>(time) * step <= static_cast<double>(most), "times below 2^31", time);
            index_t const last = this->time(item, item.frames - 1);
            item.advance = item_advance(options_.rule, last, h, w);
            overruns_ = overruns_ || last >= item.advance;
            for (index_t n = 0; n < (split ? time : 1); ++n) {
                all.items.push_back(item);
                next.width = w;
                for (next.number = 0; next.number < item.frames; ++next.number) {
                    next.time = this->time(item, next.number);
                    all.frames.push_back(next);
                    next.row += h * w;
                }
                next.advance += item.advance;
            }
        }
        all.frames.push_back({next.row, next.advance});
        std::vector<index_t> offsets;
        for (media_frame const& frame : all.frames) offsets.push_back(frame.row);
        all.batch = thd(std::move(offsets));
        return all;
    }

    media_options options_;
    of_kind images_, videos_;
    bool overruns_ = false;
};

/// Returns grids from rows of three numbers: image_grid_thw or video_grid_thw. Throws `cpx::error` if they are not rows
/// of three.
std::vector<media_grid> media_grids(integers auto const& list, caller here = caller::here()) {
    require(std::ssize(list) % 3 == 0, "media_grids", "size of the list", "a multiple of 3", std::ssize(list), here);
    std::vector<media_grid> grids;
    for (auto g = std::data(list); g != std::data(list) + std::ssize(list); g += 3)
        grids.push_back({static_cast<index_t>(g[0]), static_cast<index_t>(g[1]), static_cast<index_t>(g[2])});
    return grids;
}

/// What gives rows of features to ranks: each to the rank whose tower has made its image or frame; each to the rank
/// of its placeholder.
struct by_item {};
struct by_placeholder {};

/// Returns the sharding in which rank r has made the features of the next `frames[r]` images, or frames of videos.
///
/// Throws `cpx::error` if these are not all of them.
inline piecewise<by_item> features_by_item(media const& m, media_kind kind, std::vector<index_t> const& frames,
                                           caller here = caller::here()) {
    require(kind == media_kind::image || kind == media_kind::video, "features_by_item", "kind", "image or video",
            static_cast<int>(kind), here);
    auto const& all = m.frames(kind);
    index_t const count = std::ssize(all) - 1;
    index_t next = 0;
    std::vector<owned_piece> pieces;
    for (std::size_t rank = 0; rank < frames.size(); ++rank) {
        index_t const own = frames[rank];
        if (own < 0 || own > count - next)
            throw error("features_by_item", "frames of rank " + std::to_string(rank),
                        "0 to " + std::to_string(count - next), std::to_string(own), here);
        pieces.push_back({{all[static_cast<std::size_t>(next)].row, all[static_cast<std::size_t>(next + own)].row},
                          static_cast<int>(rank)});
        next += own;
    }
    require(next == count, "features_by_item", "frames of all ranks", count, next, here);
    return piecewise<by_item>(static_cast<int>(frames.size()), m.batch(kind), pieces, here);
}

/// Returns the sharding in which all ranks have made as many, the first ones one more. Source: NeMo Megatron-Bridge,
/// vision_dp_when_cp.
inline piecewise<by_item> features_by_item(media const& m, media_kind kind, int ranks, caller here = caller::here()) {
    detail::require_ranks("features_by_item", "ranks", ranks, here);
    index_t const count = std::ssize(m.frames(kind)) - 1;
    std::vector<index_t> frames;
    for (int rank = 0; rank < ranks; ++rank) frames.push_back(count / ranks + (rank < count % ranks));
    return features_by_item(m, kind, frames, here);
}
template <class X = detail::any>
detail::refused features_by_item(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: features_by_item(media, kind, ranks) wants a cpx::media, a media_kind and the "
                  "number of ranks, or how many frames each of them has");
    return {};
}

} // namespace cpx
