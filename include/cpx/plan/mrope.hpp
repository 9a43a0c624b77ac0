// SPDX-License-Identifier: Apache-2.0
// Positions of text, images and videos: of a whole batch, token by token, and of a rank's rows from counts.
#pragma once

#include <cpx/core/rows.hpp>
#include <cpx/layout/piecewise.hpp>
#include <cpx/plan/media.hpp>
#include <cpx/plan/segments.hpp>

namespace cpx {

namespace detail {

constexpr char const* name_of(media_kind kind) { return kind == media_kind::image ? "image" : "video"; }

/// Throws `cpx::error` unless there are as many placeholders of a kind as rows of features.
inline void require_rows(char const* where, media_kind kind, index_t rows, index_t placeholders, caller here) {
    if (placeholders != rows)
        throw error(where, std::string(name_of(kind)) + " placeholders in the batch",
                    std::to_string(rows) + ", the rows of features that the grids have", std::to_string(placeholders),
                    here);
}

/// The error of tokens that interrupt an item: text in an image, or an image that ends with its sequence.
inline error interrupted(media_kind kind, index_t sequence, index_t token, caller here) {
    return {"mrope_positions", "sequence " + std::to_string(sequence) + ", token " + std::to_string(token),
            std::string("one more placeholder of ") + (kind == media_kind::image ? "an image" : "a video") +
                " that has begun before it",
            "something else", here};
}

/// Finds the frame of a row, near that of the row before.
class frame_finder {
public:
    explicit frame_finder(std::vector<media_frame> const& frames) : frames_(frames) {}
    media_frame const& operator()(index_t row) {
        at_ = frame_at(frames_.data(), static_cast<int>(frames_.size()) - 1, row, at_);
        return frames_[static_cast<std::size_t>(at_)];
    }

private:
    std::vector<media_frame> const& frames_;
    int at_ = 0;
};

} // namespace detail

/// Positions of a whole batch: (3, tokens), the axes time, height and width; and by how much the position of a token
/// that is decoded behind a sequence differs from the token's number in it.
struct batch_positions {
    std::vector<index_t> axes, deltas;
};

/// Computes the positions of all tokens one after the other, from 0 in every sequence: the definition.
///
/// Text is at the next position on all axes; an item's frames, rows and columns count from the next position; behind it
/// go on as its rule says. Tokens behind a sequence's valid length are text. ids: all token ids of the batch, or of
/// `token_types` the kinds.
///
/// Throws `cpx::error` if ids are not one a token, if there are not as many placeholders of images, or of videos, as
/// rows of features, or if those of an item do not stand side by side.
batch_positions mrope_positions(media const& m, thd const& batch, integers auto const& ids, media_tokens tokens,
                                caller here = caller::here()) {
    index_t const n = batch.tokens();
    require(std::ssize(ids) == n, "mrope_positions", "number of ids", n, std::ssize(ids), here);
    auto const kind_at = [&](index_t s, index_t t) {
        if (t >= batch.valid(s)) return media_kind::text;
        return tokens.kind(static_cast<index_t>(std::data(ids)[batch.offset(s) + t]));
    };
    index_t placeholders[3] = {};
    for (index_t s = 0; s < batch.sequences(); ++s)
        for (index_t t = 0; t < batch.valid(s); ++t) ++placeholders[static_cast<std::size_t>(kind_at(s, t))];
    for (media_kind const kind : {media_kind::image, media_kind::video})
        detail::require_rows("mrope_positions", kind, m.rows(kind), placeholders[static_cast<std::size_t>(kind)], here);

    batch_positions p{detail::zeros<index_t>("mrope_positions", {3, n}, here), {}};
    std::size_t next_item[3] = {};
    for (index_t s = 0; s < batch.sequences(); ++s) {
        index_t next = 0, most = -1;
        auto const emit = [&](index_t t, mrope_position at) {
            auto const place = p.axes.begin() + batch.offset(s) + t;
            place[0] = at.time, place[n] = at.height, place[2 * n] = at.width;
            if (t < batch.valid(s)) most = std::max({most, at.time, at.height, at.width});
        };
        for (index_t t = 0; t < batch.length(s);) {
            media_kind const kind = kind_at(s, t);
            if (kind == media_kind::text) {
                emit(t++, {next, next, next});
                ++next;
                continue;
            }
            media_item const& item = m.items(kind)[next_item[static_cast<std::size_t>(kind)]++];
            for (index_t frame = 0; frame < item.frames; ++frame)
                for (index_t y = 0; y < item.height; ++y)
                    for (index_t x = 0; x < item.width; ++x, ++t) {
                        if (t >= batch.length(s) || kind_at(s, t) != kind) throw detail::interrupted(kind, s, t, here);
                        emit(t, {next + m.time(item, frame), next + y, next + x});
                    }
            next += item.advance;
        }
        p.deltas.push_back(1 + most - batch.valid(s));
    }
    return p;
}

/// Counts the placeholders of a rank's segments, whose ids are `ids(row)`.
///
/// Throws `cpx::error` that names the first placeholder of a kind of which there are no grids.
template <class Ids>
std::vector<media_count> count_media(media const& m, thd const& batch, std::vector<segment> const& segments, Ids&& ids,
                                     media_tokens tokens, caller here = caller::here()) {
    std::vector<media_count> counts;
    for (segment const& s : segments) {
        index_t image = 0, video = 0;
        index_t const valid = std::min(s.count, batch.valid(s.sequence) - s.token);
        for (index_t i = 0; i < valid; ++i) {
            media_kind const kind = tokens.kind(static_cast<index_t>(ids(s.row + i)));
            if (kind == media_kind::text) continue;
            ++(kind == media_kind::image ? image : video);
            if (m.rows(kind) == 0)
                throw error("mrope_positions",
                            "sequence " + std::to_string(s.sequence) + ", token " + std::to_string(s.token + i),
                            std::string("text, for there are no grids of ") + detail::name_of(kind) + 's',
                            std::string(detail::name_of(kind)) + " placeholder", here);
        }
        index_t const most = std::numeric_limits<std::int32_t>::max(); // more than there are features
        counts.push_back(
            {static_cast<std::int32_t>(std::min(image, most)), static_cast<std::int32_t>(std::min(video, most))});
    }
    return counts;
}

/// Where the media of a batch lie on its ranks, from the placeholders of every segment: what positions and vision rows
/// need to know. The same on every rank but for `own`.
struct media_places {
    std::vector<media_segment> own;          ///< the rank's segments
    std::vector<index_t> deltas;             ///< a sequence, as of `batch_positions`, unless `media::overruns`
    std::vector<owned_piece> images, videos; ///< rows of features, by the rank of their placeholders
};

/// Makes those of a rank. counts: a segment of rank 0, 1, and so on, the segments in their order; where every rank
/// holds every row, of this rank only. Pure. Cost: O(segments of all ranks, and of media).
///
/// Throws `cpx::error` if placeholders and rows of features differ in number, or if one sequence ends and another
/// begins within an item: the same error on every rank.
template <any_sharding S>
media_places locate_media(media const& m, S const& sharding, int rank, std::vector<media_count> const& counts,
                          caller here = caller::here()) {
    struct counted_segment {
        segment where;
        int rank;
        media_count count;
    };
    std::vector<counted_segment> all;
    for (int r = S::every_row ? rank : 0; r < (S::every_row ? rank + 1 : sharding.ranks()); ++r)
        for (segment const& s : segments(sharding, r, here)) all.push_back({s, r, {}});
    require(all.size() == counts.size(), "locate_media", "counts, one a segment", all.size(), counts.size(), here);
    index_t images = 0, videos = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
        all[i].count = counts[i];
        images += counts[i].image, videos += counts[i].video;
    }
    detail::require_rows("mrope_positions", media_kind::image, m.rows(media_kind::image), images, here);
    detail::require_rows("mrope_positions", media_kind::video, m.rows(media_kind::video), videos, here);
    std::ranges::stable_sort(all, {},
                             [](counted_segment const& s) { return std::pair(s.where.sequence, s.where.token); });

    thd const& batch = sharding.batch();
    media_places places;
    index_t image = 0, video = 0, origin = 0; // rows so far; and what they and the batch's advances leave of a token
    detail::frame_finder in_images(m.frames(media_kind::image)), in_videos(m.frames(media_kind::video));
    std::size_t i = 0;
    for (index_t s = 0; s < batch.sequences(); ++s) {
        for (; i < all.size() && all[i].where.sequence == s; ++i) {
            auto const& [where, holder, count] = all[i];
            index_t const valid = std::clamp<index_t>(batch.valid(s) - where.token, 0, where.count);
            if (holder == rank)
                places.own.push_back(
                    {where.row, where.count, valid, image, video, where.token + origin - image - video});
            places.images.push_back({{image, image + count.image}, holder});
            places.videos.push_back({{video, video + count.video}, holder});
            image += count.image, video += count.video;
        }
        media_frame const &next_image = in_images(image), &next_video = in_videos(video);
        bool const whole = next_image.begins_item(image);
        if (!whole || !next_video.begins_item(video))
            throw detail::interrupted(whole ? media_kind::video : media_kind::image, s, batch.valid(s), here);
        index_t const after = image + video - next_image.advance - next_video.advance;
        places.deltas.push_back(origin - after);
        origin = after;
    }
    return places;
}

/// Computes the positions of a rank's rows, whose ids are `ids(row)`: writes (3, rows) to `axes`, calls
/// `placeholder(kind, row, feature)` for every placeholder, `feature` its row of features in the batch, and
/// `largest(segment, position)` for the segments' rows that are not padding. Cost: O(rows), a search a row.
///
/// Throws `cpx::error` that names the first token of the rank that interrupts an item.
template <class Ids, class Placeholder, class Largest>
void place_rows(media const& m, media_places const& places, std::vector<segment> const& segments, Ids&& ids,
                media_tokens tokens, rows<index_t> axes, Placeholder&& placeholder, Largest&& largest,
                caller here = caller::here()) {
    detail::frame_finder in_images(m.frames(media_kind::image)), in_videos(m.frames(media_kind::video));
    for (std::size_t k = 0; k < places.own.size(); ++k) {
        media_segment const& s = places.own[k];
        index_t image = s.images, video = s.videos, text = s.origin, most = -1;
        for (index_t i = 0; i < s.count; ++i) {
            media_kind const kind = i < s.valid ? tokens.kind(static_cast<index_t>(ids(s.row + i))) : media_kind::text;
            media_frame const &of_image = in_images(image), &of_video = in_videos(video);
            bool const whole = kind == media_kind::image || of_image.begins_item(image);
            if (!whole || (kind != media_kind::video && !of_video.begins_item(video)))
                throw detail::interrupted(whole ? media_kind::video : media_kind::image, segments[k].sequence,
                                          segments[k].token + i, here);
            mrope_position const at = position_of(kind, text, image, video, of_image, of_video);
            axes(0, s.row + i) = at.time, axes(1, s.row + i) = at.height, axes(2, s.row + i) = at.width;
            if (i < s.valid) most = std::max({most, at.time, at.height, at.width});
            if (kind == media_kind::text)
                ++text;
            else
                placeholder(kind, s.row + i, kind == media_kind::image ? image++ : video++);
        }
        largest(k, most);
    }
}

} // namespace cpx
