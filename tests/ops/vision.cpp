// SPDX-License-Identifier: Apache-2.0
// Features of images and videos: from the ranks that have made them to their placeholders, and their gradients home.
#include <cpx/ops/vision.hpp>

#include <cpx/ops/rotary.hpp>
#include <cpx/plan/traffic.hpp>

#include <doctest/doctest.h>

#include <ops/on_ranks.hpp>
#include <support/media.hpp>
#include <support/rejects.hpp>

namespace {

using namespace support;
using cpx::index_t, cpx::media_kind;
using on_ranks::same_bits, on_ranks::take;
using numbers = std::vector<float>;

constexpr index_t width = 3;
constexpr media_kind kinds[] = {media_kind::image, media_kind::video};

/// What one step of a model does with features, on the whole batch: x with features at their placeholders and deepstack
/// features added; and the gradients of all of them, from dx.
struct step {
    numbers x, dx, features[2], deepstack[2], dfeatures[2], ddeepstack[2];

    step(media_batch const& b, splitmix& random) {
        x = on_ranks::uniform<float>(random, b.batch.tokens() * width);
        dx = on_ranks::uniform<float>(random, b.batch.tokens() * width);
        for (int k = 0; k < 2; ++k)
            for (auto* f : {&features[k], &deepstack[k]})
                *f = on_ranks::uniform<float>(random, b.items.rows(kinds[k]) * width);
    }

    /// Returns x of the whole batch afterwards, row by row. Its gradient is left in dx.
    numbers run(media_batch const& b) {
        numbers y = x;
        index_t next[2] = {};
        for (index_t s = 0; s < b.batch.sequences(); ++s)
            for (index_t row = b.batch.offset(s); row < b.batch.offset(s) + b.batch.valid(s); ++row) {
                media_kind const kind = placeholders.kind(b.ids[static_cast<std::size_t>(row)]);
                if (kind == media_kind::text) continue;
                int const k = kind == media_kind::video;
                for (index_t c = 0; c < width; ++c) {
                    auto const to = static_cast<std::size_t>(row * width + c),
                               from = static_cast<std::size_t>(next[k] * width + c);
                    y[to] = features[k][from] + deepstack[k][from];
                    dfeatures[k].push_back(dx[to]);
                    ddeepstack[k].push_back(dx[to]);
                    dx[to] = 0;
                }
                ++next[k];
            }
        return y;
    }
};

/// Where ranks differ from the whole batch, and what was sent.
struct outcome {
    std::string problem;
    index_t rows = 0, agreements = 0;
};

/// Runs a step on all ranks: features of kind k are sharded as `sources[k]`.
template <class Source, class S>
outcome run_on_ranks(media_batch const& b, step const& before, step const& after, numbers const& y,
                     std::vector<Source> const& sources, S const& sharding) {
    std::vector<outcome> ranks(static_cast<std::size_t>(sharding.ranks()));
    cpx::threads::run(sharding.ranks(), [&](cpx::threads& threads) {
        int const rank = threads.rank();
        auto& mine = ranks[static_cast<std::size_t>(rank)];
        cpx::counted comm(threads);
        auto const expect = [&](char const* what, auto const& got, numbers const& whole) {
            auto const want = take(whole, {{1, width}}, got.sharding(), rank);
            bool same = got.data().count() == want.data().count();
            for (index_t row = 0; same && row < want.data().count(); ++row)
                for (index_t c = 0; c < width; ++c) same = same && same_bits(got.data()(row, c), want.data()(row, c));
            if (!same) mine.problem += std::string(what) + " of rank " + std::to_string(rank) + ' ';
        };
        auto const p = cpx::mrope_positions(b.items, take(b.ids, {{1, 1}}, sharding, rank), placeholders, comm);
        auto x = take(before.x, {{1, width}}, sharding, rank), dx = take(before.dx, {{1, width}}, sharding, rank);
        for (int k = 0; k < 2; ++k) {
            media_kind const kind = kinds[k];
            auto const& source = sources[static_cast<std::size_t>(k)];
            auto const plan = relayout(source, p.features(kind), rank);
            auto const features = exchange(plan, take(before.features[k], {{1, width}}, source, rank), comm);
            index_t const agreements = comm.sent("agreement").messages;
            auto const deepstack = exchange(plan, take(before.deepstack[k], {{1, width}}, source, rank), comm);
            mine.agreements += comm.sent("agreement").messages - agreements;
            cpx::put_features(p, kind, features, x);
            cpx::add_features(p, kind, deepstack, x);
            mine.rows = comm.sent("relayout").rows;

            auto const back = plan.transposed();
            auto d = cpx::make_tensor<float>(p.features(kind), rank, width);
            cpx::add_features_backward(p, kind, dx, d);
            auto const ddeepstack = exchange(back, d, comm);
            cpx::put_features_backward(p, kind, dx, d);
            auto const dfeatures = exchange(back, d, comm);
            if constexpr (!Source::every_row) { // a replicated tower has the gradients of its own placeholders only
                expect("gradients of features", dfeatures, after.dfeatures[k]);
                expect("gradients of deepstack", ddeepstack, after.ddeepstack[k]);
            }
        }
        expect("x", x, y);
        expect("gradients of x", dx, after.dx);
        mine.rows = 0;
        for (char const* what : {"relayout", "relayout transposed"}) mine.rows += comm.sent(what).rows;
    });
    outcome all;
    for (outcome const& mine : ranks) {
        all.problem += mine.problem;
        all.rows += mine.rows;
        all.agreements += mine.agreements;
    }
    return all;
}

} // namespace

TEST_SUITE("ops") {
    TEST_CASE("features reach their placeholders, and gradients their rank, in one exchange of the fewest rows") {
        splitmix random(9);
        index_t moved = 0;
        for (int turn = 0; turn < 15; ++turn) {
            auto const b = random_media(random, mrope_rules[turn % 5], 5);
            step const before(b, random);
            step after = before;
            auto const y = after.run(b);
            int const ranks = on_ranks::rank_counts[turn % 6];
            on_ranks::for_each_sharding(b.batch, ranks, {1 + turn % 3}, [&](std::string const& name, auto const& s) {
                std::vector<cpx::piecewise<cpx::by_item>> sources;
                index_t least = 0;
                for (media_kind const kind : kinds) { // even, all on one rank, or as it comes
                    index_t rest = std::ssize(b.items.frames(kind)) - 1;
                    std::vector<index_t> frames(static_cast<std::size_t>(ranks));
                    if (turn % 3 == 2)
                        for (index_t& own : frames) rest -= own = random.between(0, rest);
                    frames[random.next() % frames.size()] += rest;
                    sources.push_back(turn % 3 == 0 ? features_by_item(b.items, kind, ranks)
                                                    : features_by_item(b.items, kind, frames));
                    cpx::threads::run(ranks, [&](cpx::threads& comm) {
                        auto const ids = take(b.ids, {{1, 1}}, s, comm.rank());
                        auto const p = cpx::mrope_positions(b.items, ids, placeholders, comm);
                        if (comm.rank() == 0) least += 4 * lower_bound(sources.back(), p.features(kind)).rows;
                    });
                }
                auto const got = run_on_ranks(b, before, after, y, sources, s);
                REQUIRE_MESSAGE(got.problem == "", name);
                CHECK(got.rows == least); // features and deepstack, and both gradients
                CHECK(got.agreements == 0);
                moved += got.rows;

                std::vector<cpx::replicated<>> towers;
                for (media_kind const kind : kinds) towers.emplace_back(ranks, b.items.batch(kind));
                auto const local = run_on_ranks(b, before, after, y, towers, s);
                REQUIRE_MESSAGE(local.problem == "", name);
                CHECK(local.rows == 0);
            });
        }
        CHECK(moved > 1000);
    }

    TEST_CASE("the gradient of a replicated tower is that of its own placeholders, and 0 elsewhere") {
        auto const b = media_writer().text(1).image(4, 4).text(3).image(2, 2).end().done();
        on_ranks::by_tokens const s = cpx::shard(b.batch, cpx::zigzag<>(2));
        numbers sums(5 * width);
        std::mutex guard;
        cpx::threads::run(2, [&](cpx::threads& comm) {
            auto const p = cpx::mrope_positions(b.items, take(b.ids, {{1, 1}}, s, comm.rank()), placeholders, comm);
            cpx::replicated<> const tower(2, b.items.batch(media_kind::image));
            auto const plan = relayout(tower, p.features(media_kind::image), comm.rank());
            auto d = cpx::make_tensor<float>(plan.to, comm.rank(), width);
            for (index_t row = 0; row < d.data().count(); ++row)
                for (index_t c = 0; c < width; ++c) d.data()(row, c) = 1;
            auto const home = exchange(plan.transposed(), d, comm);
            std::lock_guard const lock(guard);
            for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += home.data().data()[i];
        });
        CHECK(sums == numbers(sums.size(), 1.0f));
    }

    TEST_CASE("where every rank holds every row of text, every rank gets all features") {
        auto const b = media_writer().text(2).image(4, 4).text(3).image(2, 2).end({100}).done();
        auto const source = features_by_item(b.items, media_kind::image, 3);
        numbers made(5 * width);
        for (std::size_t i = 0; i < made.size(); ++i) made[i] = static_cast<float>(i + 1);
        cpx::threads::run(3, [&](cpx::threads& comm) {
            cpx::replicated<> const everywhere(3, b.batch);
            auto const p =
                cpx::mrope_positions(b.items, take(b.ids, {{1, 1}}, everywhere, comm.rank()), placeholders, comm);
            CHECK(p.placeholders(media_kind::image) == std::vector<index_t>{2, 3, 4, 5, 9});
            auto const plan = relayout(source, p.features(media_kind::image), comm.rank());
            auto const features = exchange(plan, take(made, {{1, width}}, source, comm.rank()), comm);
            auto x = cpx::make_tensor<float>(everywhere, comm.rank(), width);
            cpx::put_features(p, media_kind::image, features, x);
            float const* next = made.data();
            for (index_t row = 0; row < x.data().count(); ++row)
                for (index_t c = 0; c < width; ++c)
                    CHECK(x.data()(row, c) == (b.ids[static_cast<std::size_t>(row)] == 100 && row < 10 ? *next++ : 0));
        });
    }

    // NeMo Megatron-Bridge's unit tests of AllGatherVisionEmbeddings, whose gradients pull request 4784 mends: every
    // rank gets all rows, and the sum of all ranks' gradients goes home.
    TEST_CASE("gradients of gathered features are Megatron-Bridge's") {
        auto const home = [](std::vector<index_t> const& counts, auto&& gradient) {
            index_t const all = counts[0] + counts[1];
            auto const source = cpx::piecewise<cpx::by_item>::by_counts(cpx::thd({0, all}), counts);
            std::vector<numbers> got(2);
            cpx::threads::run(2, [&](cpx::threads& comm) {
                cpx::replicated<> const everywhere(2, source.batch());
                auto d = cpx::make_tensor<float>(everywhere, comm.rank(), 1);
                for (index_t row = 0; row < all; ++row) d.data()(row, 0) = gradient(comm.rank(), row);
                auto const mine = exchange(relayout(source, everywhere, comm.rank()).transposed(), d, comm);
                auto& list = got[static_cast<std::size_t>(comm.rank())];
                list.assign(mine.data().data(), mine.data().data() + mine.data().count());
            });
            return got;
        };
        auto const weighted = [](int rank, index_t row) { return static_cast<float>((rank + 1) * (row + 1)); };
        CHECK(home({3, 3}, weighted) == std::vector<numbers>{{3, 6, 9}, {12, 15, 18}});
        auto const of_rank = [](int rank, index_t) { return static_cast<float>(rank + 1); };
        CHECK(home({4, 0}, of_rank) == std::vector<numbers>{{3, 3, 3, 3}, {}});
        std::vector<index_t> const counts{2, 3};
        auto const peer = [&](int rank, index_t row) {
            return (row < counts[0]) == (rank == 0) ? 1.0f : static_cast<float>(row);
        };
        CHECK(home(counts, peer) == std::vector<numbers>{{1, 2}, {3, 4, 5}});
    }

    // As README shows it.
    TEST_CASE("a step of a model with images: positions, rotary embedding, features and their gradients") {
        cpx::threads::run(3, [](cpx::threads& comm) {
            auto const image = cpx::media_kind::image;
            cpx::thd const batch({0, 12, 20});                                  // a sequence has an image, one not
            cpx::media const pictures({{1, 4, 6}}, {});                         // image_grid_thw and video_grid_thw
            auto const zigzag = cpx::shard(batch, cpx::zigzag<>(comm.ranks())); // of the rows of text
            auto const tower = features_by_item(pictures, image, comm.ranks()); // of the features: each on one rank
            auto ids = cpx::make_tensor<int>(zigzag, comm.rank(), 1);           // of tokens: 100 is a placeholder
            auto const global = cpx::global_rows(zigzag, comm.rank());
            for (std::size_t row = 0; row < global.size(); ++row)
                ids.data()(static_cast<index_t>(row), 0) = global[row] >= 3 && global[row] < 9 ? 100 : 7;
            auto q = cpx::make_tensor<float>(zigzag, comm.rank(), 16), hidden = q, dhidden = q;
            auto features = cpx::make_tensor<float>(tower, comm.rank(), 16);
            for (index_t row = 0; row < features.data().count(); ++row) features.data()(row, 0) = 1;
            for (index_t row = 0; row < dhidden.data().count(); ++row) dhidden.data()(row, 0) = 2;

            auto const positions = cpx::mrope_positions(pictures, ids, {.image = 100}, comm); // ranks send counts
            auto const axes = cpx::rotary_axes({2, 1, 1}, cpx::axis_order::interleaved, 4);
            cpx::rotary(positions, q, 8, {cpx::rotary_frequencies<float>({.rotary_dim = 8}), axes}, q);

            auto const plan = cpx::relayout(tower, positions.features(image), comm.rank());
            auto at_home = cpx::exchange(plan, features, comm);   // each row to the rank of its placeholder
            cpx::put_features(positions, image, at_home, hidden); // and add_features, of deepstack
            cpx::put_features_backward(positions, image, dhidden, at_home);
            auto const dfeatures = cpx::exchange(plan.transposed(), at_home, comm);

            float sum = 0;
            for (index_t row = 0; row < hidden.data().count(); ++row)
                sum += hidden.data()(row, 0) - (ids.data()(row, 0) == 100 ? 1.0f : 0.0f) + q.data()(row, 0);
            CHECK(sum == 0);
            for (index_t row = 0; row < dfeatures.data().count(); ++row) CHECK(dfeatures.data()(row, 0) == 2);
            CHECK(dfeatures.data().count() == (comm.rank() == 0 ? 6 : 0));
        });
    }

    TEST_CASE("features in the shape or of the shares of others are rejected") {
        auto const b = media_writer().text(1).image(4, 4).text(3).image(2, 2).end().done();
        rejects({"vision.cpp", "features_by_item: frames of rank 1: expected 0 to 1, got 2"}, [&] {
            features_by_item(b.items, media_kind::image, {1, 2});
        });
        rejects({"features_by_item: frames of all ranks: expected 2, got 1"}, [&] {
            features_by_item(b.items, media_kind::image, {1, 0});
        });
        cpx::threads::run(1, [&](cpx::threads& comm) {
            on_ranks::by_tokens const s = cpx::shard(b.batch, cpx::zigzag<>(1));
            auto const p = cpx::mrope_positions(b.items, take(b.ids, {{1, 1}}, s, 0), placeholders, comm);
            auto x = cpx::make_tensor<float>(s, 0, width), narrow = cpx::make_tensor<float>(s, 0, width - 1);
            auto const features = cpx::make_tensor<float>(p.features(media_kind::image), 0, width);
            rejects({"vision.cpp", "put_features: shape of features: expected (5, 2), got (5, 3)"},
                    [&] { cpx::put_features(p, media_kind::image, features, narrow); });
            rejects({"put_features: sharding of the features: expected that of the placeholders, got another"},
                    [&] { cpx::put_features(p, media_kind::video, features, x); });
            auto other =
                cpx::make_tensor<float>(on_ranks::by_tokens(cpx::shard(lengths({10}), cpx::zigzag<>(1))), 0, width);
            rejects({"add_features: sharding of x"}, [&] { cpx::add_features(p, media_kind::image, features, other); });
            rejects({"put_features: kind: expected image or video, got 0"},
                    [&] { cpx::put_features(p, media_kind::text, features, x); });
        });
        cpx::threads::run(2, [&](cpx::threads& comm) { // x of the other rank
            on_ranks::by_tokens const s = cpx::shard(b.batch, cpx::zigzag<>(2));
            int const rank = comm.rank();
            auto const p = cpx::mrope_positions(b.items, take(b.ids, {{1, 1}}, s, rank), placeholders, comm);
            auto x = cpx::make_tensor<float>(s, 1 - rank, 8);
            auto const features = cpx::make_tensor<float>(p.features(media_kind::image), rank, 8);
            rejects({"vision.cpp", "put_features: rank of x: expected that of the positions, ", ", got "},
                    [&] { cpx::put_features(p, media_kind::image, features, x); });
            cpx::rotary_pairs<float> const pairs{cpx::rotary_frequencies<float>({.rotary_dim = 8})};
            rejects({"vision.cpp", "rotary_backward: rank of the positions"},
                    [&] { cpx::rotary_backward(p, x, 8, pairs, x); });
        });
    }
}
