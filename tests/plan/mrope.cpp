// SPDX-License-Identifier: Apache-2.0
// Positions of text, images and videos: examples of peers, and those of ranks against those of the whole batch.
#include <cpx/plan/mrope.hpp>

#include <cpx/core/given_rows.hpp>
#include <cpx/core/packing.hpp>
#include <cpx/layout/sequence_parallel.hpp>
#include <cpx/plan/global_rows.hpp>

#include <doctest/doctest.h>

#include <support/media.hpp>
#include <support/rejects.hpp>
#include <support/spec.hpp>

namespace {

using namespace support;
using cpx::index_t, cpx::media_kind, cpx::mrope_rule;
using list = std::vector<index_t>;

/// Positions as text, an axis a line: "0 1 2".
std::string axis(list const& axes, index_t a) {
    index_t const n = std::ssize(axes) / 3;
    std::string result;
    for (index_t i = a * n; i < (a + 1) * n; ++i)
        result += (i > a * n ? " " : "") + std::to_string(axes[static_cast<std::size_t>(i)]);
    return result;
}

cpx::batch_positions positions_of(media_batch const& b) {
    return cpx::mrope_positions(b.items, b.batch, b.ids, placeholders);
}

/// What every rank computes, from what all count.
struct on_rank {
    std::vector<cpx::segment> segments;
    cpx::media_places places;
    list axes, images, videos; ///< features of the rank's placeholders
};

template <class S>
std::vector<on_rank> positions_on_ranks(media_batch const& b, S const& sharding) {
    std::vector<on_rank> ranks(static_cast<std::size_t>(sharding.ranks()));
    std::vector<cpx::media_count> counts;
    auto const id = [&](std::vector<cpx::segment> const& segments) {
        return [&b, global = [&] {
            list rows;
            for (cpx::segment const& s : segments)
                for (index_t i = 0; i < s.count; ++i) rows.push_back(b.batch.offset(s.sequence) + s.token + i);
            return rows;
        }()](index_t row) { return b.ids[static_cast<std::size_t>(global[static_cast<std::size_t>(row)])]; };
    };
    for (int r = 0; r < sharding.ranks(); ++r) {
        auto& own = ranks[static_cast<std::size_t>(r)];
        own.segments = cpx::segments(sharding, r);
        for (auto const& count : cpx::count_media(b.items, b.batch, own.segments, id(own.segments), placeholders))
            counts.push_back(count);
    }
    for (int r = 0; r < sharding.ranks(); ++r) {
        auto& own = ranks[static_cast<std::size_t>(r)];
        own.places = cpx::locate_media(b.items, sharding, r, counts);
        index_t const rows = sharding.rows(r);
        own.axes.assign(static_cast<std::size_t>(3 * rows), -1);
        cpx::place_rows(
            b.items, own.places, own.segments, id(own.segments), placeholders,
            cpx::rows<index_t>(own.axes.data(), 3, rows),
            [&](media_kind kind, index_t, index_t feature) {
                (kind == media_kind::image ? own.images : own.videos).push_back(feature);
            },
            [](std::size_t, index_t) {});
    }
    return ranks;
}

/// Returns the features of a rank by their pieces.
list held(std::vector<cpx::owned_piece> const& pieces, int rank) {
    list rows;
    for (auto const& [piece, owner] : pieces)
        for (index_t row = piece.first; owner == rank && row < piece.last; ++row) rows.push_back(row);
    return rows;
}

/// Returns what is wrong with the positions and the features of all ranks, or "".
template <class S>
std::string problem_of(media_batch const& b, S const& sharding) {
    auto const whole = positions_of(b);
    index_t const n = b.batch.tokens();
    list images(b.ids.size()), videos(images); // of every placeholder its row of features
    index_t image = 0, video = 0;
    for (index_t s = 0; s < b.batch.sequences(); ++s)
        for (index_t row = b.batch.offset(s); row < b.batch.offset(s) + b.batch.valid(s); ++row) {
            auto const i = static_cast<std::size_t>(row);
            images[i] = b.ids[i] == placeholders.image ? image++ : -1;
            videos[i] = b.ids[i] == placeholders.video ? video++ : -1;
        }
    auto const ranks = positions_on_ranks(b, sharding);
    for (int r = 0; r < sharding.ranks(); ++r) {
        on_rank const& own = ranks[static_cast<std::size_t>(r)];
        list axes, own_images, own_videos;
        auto const rows = cpx::global_rows(sharding, r);
        for (index_t a = 0; a < 3; ++a)
            for (index_t const row : rows) axes.push_back(whole.axes[static_cast<std::size_t>(a * n + row)]);
        for (index_t const row : rows) {
            index_t const s = b.batch.sequence(row);
            if (row - b.batch.offset(s) >= b.batch.valid(s)) continue;
            if (images[static_cast<std::size_t>(row)] >= 0) own_images.push_back(images[static_cast<std::size_t>(row)]);
            if (videos[static_cast<std::size_t>(row)] >= 0) own_videos.push_back(videos[static_cast<std::size_t>(row)]);
        }
        std::string const at = "rank " + std::to_string(r) + ": ";
        if (own.axes != axes) return at + "other positions";
        if (own.images != own_images || own.videos != own_videos) return at + "other features";
        if (S::every_row) continue;
        if (held(own.places.images, r) != own_images || held(own.places.videos, r) != own_videos)
            return at + "other pieces";
        if (!b.items.overruns() && own.places.deltas != whole.deltas) return at + "other deltas";
    }
    return "";
}

struct example {
    char const* name;
    media_batch batch;
    char const *time, *height, *width;
    list deltas;
};

media_batch video_of_three(mrope_rule rule, double seconds) {
    return media_writer({.rule = rule}).text(2).video({3, 4, 4}, 0, seconds).text(2).end().done();
}

} // namespace

TEST_SUITE("plan") {
    // E1 to E6 of the project's notes on Hugging Face transformers (get_rope_index of Qwen2-VL, Qwen2.5-VL, Qwen3-VL),
    // and the geometry of the unit tests of NeMo Megatron-Bridge.
    TEST_CASE("positions are those of worked examples") {
        char const *h = "0 1 2 2 3 3 2 2 3 3 2 2 3 3 ", *w = "0 1 2 3 2 3 2 3 2 3 2 3 2 3 ";
        std::string const h78 = std::string(h) + "7 8", w78 = std::string(w) + "7 8", h45 = std::string(h) + "4 5",
                          w45 = std::string(w) + "4 5", h56 = std::string(h) + "5 6", w56 = std::string(w) + "5 6";
        auto const float_seconds = mrope_rule::qwen2_5_vl, whole = mrope_rule::qwen2_5_vl_whole_seconds,
                   spatial = mrope_rule::qwen2_5_vl_spatial_advance;
        for (example const& e :
             std::vector<example>{{"E1",
                                   media_writer().text(2).image(4, 6).text(3).end().done(),
                                   "0 1 2 2 2 2 2 2 5 6 7",
                                   "0 1 2 2 2 3 3 3 5 6 7",
                                   "0 1 2 3 4 2 3 4 5 6 7",
                                   {-3}},
                                  {"E2",
                                   media_writer().text(3).video({2, 4, 4}, 3).text(2).end().done(),
                                   "0 1 2 3 3 3 3 5 6 7 8 8 8 8 10 11",
                                   "0 1 2 3 3 4 4 5 6 7 8 8 9 9 10 11",
                                   "0 1 2 3 4 3 4 5 6 7 8 9 8 9 10 11",
                                   {-4}},
                                  {"E3, 1 second",
                                   video_of_three(float_seconds, 1),
                                   "0 1 2 2 2 2 4 4 4 4 6 6 6 6 7 8",
                                   h78.c_str(),
                                   w78.c_str(),
                                   {-7}},
                                  {"E3, 1 second, whole",
                                   video_of_three(whole, 1),
                                   "0 1 2 2 2 2 4 4 4 4 6 6 6 6 7 8",
                                   h78.c_str(),
                                   w78.c_str(),
                                   {-7}},
                                  {"E3, 1 second, transformers 5",
                                   video_of_three(spatial, 1),
                                   "0 1 2 2 2 2 4 4 4 4 6 6 6 6 4 5",
                                   h45.c_str(),
                                   w45.c_str(),
                                   {-9}},
                                  {"E3, half a second",
                                   video_of_three(float_seconds, 0.5),
                                   "0 1 2 2 2 2 3 3 3 3 4 4 4 4 5 6",
                                   h56.c_str(),
                                   w56.c_str(),
                                   {-9}},
                                  {"E3, half a second, whole",
                                   video_of_three(whole, 0.5),
                                   "0 1 2 2 2 2 2 2 2 2 2 2 2 2 4 5",
                                   h45.c_str(),
                                   w45.c_str(),
                                   {-10}},
                                  {"E3, half a second, transformers 5",
                                   video_of_three(spatial, 0.5),
                                   "0 1 2 2 2 2 2 2 2 2 2 2 2 2 4 5",
                                   h45.c_str(),
                                   w45.c_str(),
                                   {-10}},
                                  {"E3, Qwen2-VL",
                                   video_of_three(mrope_rule::qwen2_vl, 1),
                                   "0 1 2 2 2 2 3 3 3 3 4 4 4 4 5 6",
                                   h56.c_str(),
                                   w56.c_str(),
                                   {-9}},
                                  {"E4",
                                   media_writer().text(2).image(4, 4).text(3).video({1, 2, 4}).text(2).end().done(),
                                   "0 1 2 2 2 2 4 5 6 7 7 9 10",
                                   "0 1 2 2 3 3 4 5 6 7 7 9 10",
                                   "0 1 2 3 2 3 4 5 6 7 8 9 10",
                                   {-2}},
                                  {"E5",
                                   media_writer().text(2).image(4, 6).text(3).end({7}).text(3).end({7}).done(),
                                   "0 1 2 2 2 2 2 2 5 6 7 8 0 1 2 3",
                                   "0 1 2 2 2 3 3 3 5 6 7 8 0 1 2 3",
                                   "0 1 2 3 4 2 3 4 5 6 7 8 0 1 2 3",
                                   {-3, 0}},
                                  {"E6, an image, then Megatron-Bridge's packed positions",
                                   media_writer().text(2).image(4, 4).text(1).end({0}).text(3).end().done(),
                                   "0 1 2 2 2 2 4 5 0 1 2",
                                   "0 1 2 2 3 3 4 5 0 1 2",
                                   "0 1 2 3 2 3 4 5 0 1 2",
                                   {-2, 0}},
                                  {"E6, a video",
                                   media_writer().text(2).video({1, 4, 4}).text(1).end().done(),
                                   "0 1 2 2 2 2 4",
                                   "0 1 2 2 3 3 4",
                                   "0 1 2 3 2 3 4",
                                   {-2}}}) {
            CAPTURE(e.name);
            auto const p = positions_of(e.batch);
            CHECK(axis(p.axes, 0) == e.time);
            CHECK(axis(p.axes, 1) == e.height);
            CHECK(axis(p.axes, 2) == e.width);
            CHECK(p.deltas == e.deltas);
            for (int ranks = 1; ranks <= 4; ++ranks)
                for (spec const& s : all_specs(ranks, {0, 2}))
                    CHECK_MESSAGE(problem_of(e.batch, make(e.batch.batch, s)) == "", text(s));
        }
    }

    TEST_CASE("E5's rows on two ranks, zigzag, and their features, are those of miles") {
        auto const b = media_writer().text(2).image(4, 6).text(3).end({7}).text(3).end({7}).done();
        auto const ranks = positions_on_ranks(b, cpx::shard(b.batch, cpx::zigzag<2>{}));
        CHECK(axis(ranks[0].axes, 0) == "0 1 2 6 7 8 0 3");
        CHECK(axis(ranks[0].axes, 2) == "0 1 2 6 7 8 0 3");
        CHECK(axis(ranks[1].axes, 0) == "2 2 2 2 2 5 1 2");
        CHECK(axis(ranks[1].axes, 1) == "2 2 3 3 3 5 1 2");
        CHECK(axis(ranks[1].axes, 2) == "3 4 2 3 4 5 1 2");
        CHECK(ranks[0].images == list{0});
        CHECK(ranks[1].images == list{1, 2, 3, 4, 5});
    }

    // NeMo Megatron-Bridge, pull request 4917: which rows of the vision tower a rank's placeholders take.
    TEST_CASE("features of a rank's placeholders are those of Megatron-Bridge's unit tests") {
        using cpx::media_count;
        cpx::media const nine({{1, 2, 18}}, {}), two({{1, 2, 4}}, {}), four({{1, 2, 8}}, {});
        auto const zigzag = [](list offsets) { return cpx::shard(cpx::thd(std::move(offsets)), cpx::zigzag<2>{}); };
        // Masks 10 11, 00 10 of rank 0 and 11 00, 10 11 of rank 1 in the order of segments, which join in the middle.
        auto const masks = zigzag({0, 8, 16});
        cpx::media const nine_images(std::vector<cpx::media_grid>(9, {1, 2, 2}), {});
        auto const places = cpx::locate_media(nine_images, masks, 0, {{1}, {2}, {0}, {1}, {2}, {3}});
        CHECK(held(places.images, 0) == list{0, 3, 4, 8});
        CHECK(held(places.images, 1) == list{1, 2, 5, 6, 7});
        auto const one = cpx::locate_media(two, zigzag({0, 8}), 0, {{0}, {0}, {2}});
        CHECK(held(one.images, 0).empty());
        CHECK(held(one.images, 1) == list{0, 1});
        auto const ends = cpx::locate_media(four, zigzag({0, 8}), 1, {{1}, {1}, {2}});
        CHECK(held(ends.images, 0) == list{0, 3});
        CHECK(nine.rows(media_kind::image) == 9);
    }

    // miles, tests/fast/test_qwen3_vl_cp_mrope.py: sequences padded to 2 W, and the rank's row to 8 as one more.
    TEST_CASE("positions restart in the packed rows of miles' unit tests") {
        struct packed {
            int ranks;
            list lengths;
            index_t rows;
            list offsets;
        };
        for (packed const& p : std::vector<packed>{{2, {10, 7, 13, 0}, 24, {0, 12, 20, 36, 48}},
                                                   {2, {16, 16}, 16, {0, 16, 32}},
                                                   {4, {20, 9, 30, 5, 0}, 24, {0, 24, 40, 72, 80, 96}},
                                                   {2, {3, 0}, 8, {0, 4, 16}},
                                                   {4, {40, 17}, 16, {0, 40, 64}}}) {
            media_batch const b{cpx::thd(p.offsets, p.lengths), list(static_cast<std::size_t>(p.offsets.back())), {}};
            auto const zigzag = cpx::shard(b.batch, cpx::zigzag<>(p.ranks));
            for (int r = 0; r < p.ranks; ++r) CHECK(zigzag.rows(r) == p.rows);
            CHECK(problem_of(b, zigzag) == "");
            auto const whole = positions_of(b);
            for (index_t const first : p.offsets)
                if (first < b.batch.tokens()) CHECK(whole.axes[static_cast<std::size_t>(first)] == 0);
        }
        // Offsets 0, 6, which miles and `guess_rows` refuse, because 4 does not divide 6.
        auto const odd = media_writer().text(6).end().done();
        CHECK(problem_of(odd, cpx::shard(odd.batch, cpx::zigzag<2>{})) == "");
    }

    TEST_CASE("rows, masks and positions are those of NeMo Megatron-Bridge's unit tests") {
        auto const dense = cpx::shard<cpx::scope::batch>(lengths({16}), cpx::zigzag<2>{});
        CHECK(cpx::pieces(dense, 0) == std::vector<cpx::range>{{0, 4}, {12, 16}});
        CHECK(cpx::guess_rows(8, 2, list{0, 16}) == cpx::given_rows::shard); // which is not sharded again

        auto const mask = [](cpx::thd const& padded) {
            std::string text;
            for (auto const kept : cpx::unpadded(padded).mask()) text += kept ? '1' : '0';
            return text;
        };
        CHECK(mask(cpx::thd_from_cu_seqlens(list{0, 7, 10}, list{0, 8, 12})) == "111111101110");
        CHECK(mask(cpx::thd_from_cu_seqlens(list{0, 3, 5}, list{0, 4, 8})) == "11101100");
        rejects({"last padded offset: expected the rows of the buffer, 10, got 12"}, [] {
            cpx::thd_from_cu_seqlens(list{0, 7, 10}, list{0, 8, 12}, {.rows = 10});
        });

        // Two dense rows of 5, of which 3 and 2 are valid. What pads are, and whether deltas count them, differs.
        media_batch const rows{cpx::thd({0, 5, 10}, {3, 2}), list(10), {}};
        auto const p = positions_of(rows);
        CHECK(axis(p.axes, 0) == "0 1 2 3 4 0 1 2 3 4");
        CHECK(list{p.deltas[0] + 3 - 5, p.deltas[1] + 2 - 5} == list{-2, -3});

        cpx::thd const short_row = cpx::pad_to_multiple(lengths({8, 1}), 4);
        for (int r = 0; r < 2; ++r) CHECK(cpx::shard(short_row, cpx::zigzag<2>{}).rows(r) == 6);
    }

    TEST_CASE("positions of ranks are those of the whole batch on every layout, scope and cut") {
        splitmix numbers(15);
        index_t tokens = 0, rank_rows = 0, with_media = 0; // a rank's rows of a packing, and all tokens of them
        for (int turn = 0; rank_rows < 12000; ++turn) {
            auto const b = random_media(numbers, mrope_rules[turn % 5], 6);
            static constexpr int counts[] = {1, 2, 3, 4, 5, 8};
            int const ranks = counts[turn % 6];
            auto const specs = all_specs(ranks, {0, 2, 5, 64}, static_cast<std::uint64_t>(turn));
            for (int k = 0; k < 5; ++k) {
                spec const& s = specs[numbers.next() % specs.size()];
                std::string const problem = problem_of(b, make(b.batch, s));
                REQUIRE_MESSAGE(problem == "", "turn " << turn << ", " << text(s) << ": " << problem);
                if (k == 0) { // tensor parallelism beside it
                    auto const both = cpx::sequence_parallel(make(b.batch, s), 1 + turn % 3);
                    REQUIRE_MESSAGE(problem_of(b, both) == "", "turn " << turn << ", TP and " << text(s));
                }
                tokens += b.batch.tokens();
                rank_rows += ranks;
                with_media += !b.items.empty();
            }
        }
        CHECK(tokens > 100000);
        CHECK(with_media > 1000);
    }

    TEST_CASE("where every rank holds every row, each has the positions of the batch") {
        splitmix numbers(3);
        for (mrope_rule const rule : mrope_rules) {
            auto const b = random_media(numbers, rule, 5);
            auto const whole = positions_of(b);
            cpx::replicated<> const everywhere(3, b.batch);
            auto const own = cpx::segments(everywhere, 2);
            list global;
            for (cpx::segment const& s : own)
                for (index_t i = 0; i < s.count; ++i) global.push_back(b.batch.offset(s.sequence) + s.token + i);
            CHECK(global.size() == b.ids.size());
            auto const id = [&](index_t row) { return b.ids[static_cast<std::size_t>(row)]; };
            auto const counts = cpx::count_media(b.items, b.batch, own, id, placeholders);
            auto const places = cpx::locate_media(b.items, everywhere, 2, counts);
            list axes(whole.axes.size());
            cpx::place_rows(
                b.items, places, own, id, placeholders, cpx::rows<index_t>(axes.data(), 3, b.batch.tokens()),
                [](media_kind, index_t, index_t) {}, [](std::size_t, index_t) {});
            CHECK(axes == whole.axes);
        }
    }

    TEST_CASE("frames of a video are items of Qwen3-VL, as Megatron-Bridge expands grids") {
        cpx::media const m({}, cpx::media_grids(std::vector<int>{2, 4, 4, 1, 2, 2}));
        CHECK(m.items(media_kind::video).size() == 3);
        for (cpx::media_item const& item : m.items(media_kind::video)) CHECK(item.frames == 1);
        CHECK(m.rows(media_kind::video) == 9);
        CHECK(m.batch(media_kind::video) == lengths({4, 4, 1}));
        CHECK(m.empty() == false);
        CHECK(cpx::media().empty());
    }

    TEST_CASE("ids of -1 are text where a kind of media has no placeholder") {
        auto b = media_writer().text(2).image(4, 4).text(2).end().done();
        auto const expected = positions_of(b).axes;
        b.ids[0] = b.ids[7] = -1;
        CHECK(cpx::mrope_positions(b.items, b.batch, b.ids, {.image = 100}).axes == expected);
    }

    TEST_CASE("token types stand for ids") {
        auto const b = media_writer().text(2).image(4, 6).text(3).video({2, 2, 2}, 1).end().done();
        std::vector<std::int32_t> types;
        for (index_t const id : b.ids) types.push_back(static_cast<std::int32_t>(placeholders.kind(id)));
        CHECK(cpx::mrope_positions(b.items, b.batch, types, cpx::token_types).axes == positions_of(b).axes);
    }

    TEST_CASE("media that do not fit are rejected, and what is wrong is named") {
        using grids = std::vector<cpx::media_grid>;
        auto const make_media = [](grids const& images, grids const& videos, cpx::media_options const& options = {}) {
            return cpx::media(images, videos, options);
        };
        rejects({"mrope.cpp", "media: height of image 1: expected a multiple of the merge size 2, got 5"}, [&] {
            make_media({{1, 4, 4}, {1, 5, 4}}, {});
        });
        rejects({"media: width of video 0: expected a multiple of the merge size 3, got 4"}, [&] {
            make_media({}, {{2, 6, 4}}, {.merge = 3});
        });
        rejects({"media: frames of image 0: expected 1, got 2"}, [&] { make_media({{2, 4, 4}}, {}); });
        rejects({"media: frames of video 0: expected at least 1, got 0"}, [&] { make_media({}, {{0, 4, 4}}); });
        rejects(
            {"media: rows up to the end of video 1: expected at most 2^31 - 1, got 4 before it and 1048576 times 512 "
             "times 512"},
            [&] {
                make_media({}, {{1, 4, 4}, {1 << 20, 1 << 10, 1 << 10}});
            });
        rejects({"media: number of seconds: expected 1, got 2"}, [&] {
            make_media({}, {{1, 2, 2}}, {.seconds = {1, 1}});
        });
        rejects({"media: merge"}, [&] { make_media({}, {}, {.merge = 0}); });
        rejects({"media: rule: expected one of mrope_rule, got 5"},
                [&] { make_media({}, {}, {.rule = static_cast<mrope_rule>(5)}); });
        rejects({"mrope.cpp", "features_by_item: kind: expected image or video, got 0"},
                [&] { cpx::features_by_item(cpx::media(), media_kind::text, 2); });
        rejects({"media_grids: size of the list: expected a multiple of 3, got 4"}, [] {
            cpx::media_grids(list{1, 2, 2, 1});
        });
    }

    TEST_CASE("placeholders that do not fit their grids are rejected, by the whole batch and by every rank") {
        auto const b = media_writer().text(2).image(4, 4).text(1).end().image(4, 4).text(3).end().done();
        auto const everywhere = [&](media_batch const& wrong, std::vector<std::string> const& passages) {
            rejects(passages, [&] { positions_of(wrong); });
            for (int const ranks : {1, 3})
                rejects(passages, [&] { positions_on_ranks(wrong, cpx::shard(wrong.batch, cpx::zigzag<>(ranks))); });
        };
        auto const with = [&](std::vector<std::pair<std::size_t, index_t>> const& changes) {
            media_batch wrong = b;
            for (auto const& [row, id] : changes) wrong.ids[row] = id;
            return wrong;
        };
        everywhere(with({{4, 7}}),
                   {"mrope_positions: image placeholders in the batch: expected 8, the rows of features that "
                    "the grids have, got 7"});
        everywhere(with({{6, 100}}), {"image placeholders in the batch: expected 8", "got 9"});
        everywhere(with({{12, 200}}), {"mrope_positions: ", "video"});
        // As many as there should be, with text in the first image; then one that the first sequence lacks.
        everywhere(with({{4, 7}, {6, 100}}), {"mrope_positions: sequence 0, token 4: expected one more placeholder of "
                                              "an image that has begun before it"});
        everywhere(with({{5, 7}, {11, 100}}), {"mrope_positions: sequence 0, token", "of an image that has begun"});
        // Text between two frames of a video that are one item.
        auto const video = [](index_t first) {
            return media_writer({.rule = mrope_rule::qwen2_vl}).text(2).video({2, 4, 4}, first).text(3).end().done();
        };
        CHECK(problem_of(video(0), cpx::shard(video(0).batch, cpx::zigzag<2>{})) == "");
        everywhere(video(1), {"mrope_positions: sequence 0, token 6: expected one more placeholder of a video that has "
                              "begun before it"});
        rejects({"mrope_positions: sequence 1, token 5: expected text, for there are no grids of videos, got video "
                 "placeholder"},
                [&] {
                    auto const wrong = with({{12, 200}});
                    positions_on_ranks(wrong, cpx::shard(wrong.batch, cpx::zigzag<2>{}));
                });
        rejects({"mrope_positions: number of ids: expected 14, got 13"},
                [&] { cpx::mrope_positions(b.items, b.batch, list(13), placeholders); });
    }
}
