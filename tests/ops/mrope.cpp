// SPDX-License-Identifier: Apache-2.0
// Positions that ranks compute together: what they exchange, and those of transformers.
#include <cpx/ops/mrope.hpp>

#include <cpx/ops/rotary.hpp>

#include <doctest/doctest.h>

#include <ops/golden.hpp>
#include <ops/on_ranks.hpp>
#include <support/far_ranks.hpp>
#include <support/media.hpp>
#include <support/rejects.hpp>

#include <atomic>

namespace {

using namespace support;
using cpx::index_t, cpx::media_kind, cpx::mrope_rule;
using on_ranks::for_each_sharding;

/// Returns what of the ranks' positions is not that of the whole batch, or "". Adds what ranks sent to `sent`.
template <class S>
std::string problem_of(media_batch const& b, cpx::media_tokens tokens, S const& sharding,
                       cpx::batch_positions const& whole, cpx::tally& sent) {
    std::vector<std::string> problems(static_cast<std::size_t>(sharding.ranks()));
    std::vector<cpx::tally> tallies(problems.size());
    cpx::threads::run(sharding.ranks(), [&](cpx::threads& threads) {
        auto const rank = static_cast<std::size_t>(threads.rank());
        cpx::counted comm(threads);
        auto const ids = on_ranks::take(b.ids, {{1, 1}}, sharding, threads.rank());
        auto const p = cpx::mrope_positions(b.items, ids, tokens, comm);
        for (char const* what : {"media counts", "mrope deltas", "agreement"}) tallies[rank] += comm.sent(what);
        for (index_t a = 0; a < 3; ++a) {
            auto const first = whole.axes.begin() + a * b.batch.tokens();
            auto const own = on_ranks::take(std::vector<index_t>(first, first + b.batch.tokens()), {{1, 1}}, sharding,
                                            threads.rank());
            for (index_t row = 0; row < own.data().count(); ++row)
                if (p.axes()(a, row) != own.data()(row, 0)) problems[rank] = "other positions";
        }
        if (p.deltas(comm) != whole.deltas) problems[rank] += "other deltas";
        if (!b.items.overruns() && comm.sent("mrope deltas").messages > 0) problems[rank] += "deltas sent";

        far_ranks far(threads);
        cpx::sharded const far_ids(ids.data(), sharding, far.rank(), far.memory());
        auto const q = cpx::mrope_positions(b.items, far_ids, tokens, far);
        for (auto const kind : {media_kind::image, media_kind::video})
            if (q.placeholders(kind) != p.placeholders(kind) || q.features(kind) != p.features(kind))
                problems[rank] += "other placeholders in another memory";
        for (index_t a = 0; a < 3; ++a)
            if (!std::equal(p.axes().row(a), p.axes().row(a) + p.axes().width(), q.axes().row(a)))
                problems[rank] += "other positions in another memory";
        if (q.deltas(far) != whole.deltas) problems[rank] += "other deltas in another memory";
        if (S::every_row && far.plans > 0) problems[rank] += "plans where every rank holds every row";
    });
    for (cpx::tally const& tally : tallies) sent += tally;
    for (std::string const& problem : problems)
        if (!problem.empty()) return problem;
    return "";
}

template <class S>
index_t all_segments(S const& sharding) {
    index_t count = 0;
    for (int r = 0; r < sharding.ranks(); ++r) count += std::ssize(cpx::segments(sharding, r));
    return count;
}

media_batch read_batch(cpx::safetensors const& file) {
    cpx::media_options options;
    if (file.metadata("model") == "qwen2_5_vl") {
        options.rule = mrope_rule::qwen2_5_vl_spatial_advance;
        options.tokens_per_second = std::stoi(file.metadata("tokens_per_second"));
        auto const videos = file.tensor("video_grid_thw").shape[0];
        options.seconds.assign(static_cast<std::size_t>(videos), std::stod(file.metadata("second_per_grid_t")));
    }
    return {golden::batch_of(file), file.read<index_t>("input_ids"),
            cpx::media(cpx::media_grids(file.read<index_t>("image_grid_thw")),
                       cpx::media_grids(file.read<index_t>("video_grid_thw")), options)};
}

} // namespace

TEST_SUITE("ops") {
    TEST_CASE("positions are those of transformers on every sharding") {
        for (char const* name : {"mrope_qwen3_vl", "mrope_qwen2_5_vl"}) {
            CAPTURE(name);
            auto const file = golden::open(name);
            auto const b = read_batch(file);
            cpx::media_tokens const tokens{std::stoi(file.metadata("image_token_id")),
                                           std::stoi(file.metadata("video_token_id"))};
            auto const whole = cpx::mrope_positions(b.items, b.batch, b.ids, tokens);
            CHECK(whole.axes == file.read<index_t>("position_ids"));
            std::vector<index_t> deltas;
            std::string const segments = file.metadata("segments"), key = "\"delta\": ";
            for (auto at = segments.find(key); at != std::string::npos; at = segments.find(key, at + 1))
                deltas.push_back(std::stoi(segments.substr(at + key.size())));
            CHECK(whole.deltas == deltas);
            cpx::tally sent;
            for (int const ranks : on_ranks::rank_counts)
                for_each_sharding(b.batch, ranks, {1, 16}, [&](std::string const& what, auto const& sharding) {
                    CHECK_MESSAGE(problem_of(b, tokens, sharding, whole, sent) == "", what);
                });
        }
    }

    TEST_CASE_TEMPLATE("rotary embedding by three axes is that of transformers on every sharding", T, float, double) {
        for (char const* name : {"mrope_qwen3_vl", "mrope_qwen2_5_vl"}) {
            CAPTURE(name);
            auto const file = golden::open(name);
            auto const b = read_batch(file);
            cpx::media_tokens const tokens{std::stoi(file.metadata("image_token_id")),
                                           std::stoi(file.metadata("video_token_id"))};
            auto const rope = cpx::json_value::parse(file.metadata("rope"), "rope");
            std::array<index_t, 3> section{24, 20, 20}; // of Qwen3-VL, whose settings here do not say
            if (rope.has("mrope_section"))
                std::ranges::copy(rope.get<std::vector<index_t>>("mrope_section"), section.begin());
            auto const order =
                file.metadata("layout") == "interleaved" ? cpx::axis_order::interleaved : cpx::axis_order::sectioned;
            index_t const head_dim = std::stoi(file.metadata("head_dim"));
            auto const frequencies =
                cpx::rotary_frequencies<float>({.theta = rope.get<double>("rope_theta"), .rotary_dim = head_dim});
            cpx::rotary_pairs<T> const pairs{std::vector<T>(frequencies.begin(), frequencies.end()),
                                             cpx::rotary_axes(section, order, head_dim / 2)};
            for (auto const& [given_from, to] : std::vector<std::pair<std::string, std::string>>{
                     {"q", "q_rot"}, {"k", "k_rot"}, {"dq_rot", "dq"}, {"dk_rot", "dk"}}) {
                auto const& from = given_from;
                CAPTURE(from);
                index_t const width = file.tensor(from).shape[1] * head_dim;
                auto const x = file.read<T>(from);
                auto const expected = file.read<double>(to);
                std::vector<T> one;
                for (int const ranks : {1, 3, 4}) {
                    on_ranks::by_tokens const sharding = cpx::shard(b.batch, cpx::zigzag<>(ranks));
                    auto const all = on_ranks::assemble<T>(sharding, {{1, width}}, [&](cpx::threads& comm) {
                        auto const ids = on_ranks::take(b.ids, {{1, 1}}, sharding, comm.rank());
                        auto const positions = cpx::mrope_positions(b.items, ids, tokens, comm);
                        auto const own = on_ranks::take(x, {{1, width}}, sharding, comm.rank());
                        auto y = on_ranks::poisoned<T>(sharding, comm.rank(), width);
                        if (from[0] == 'd')
                            cpx::rotary_backward(positions, own, head_dim, pairs, y);
                        else
                            cpx::rotary(positions, own, head_dim, pairs, y);
                        return y;
                    });
                    if (ranks == 1) one = all;
                    CHECK(on_ranks::relative_error(all, expected) <= 2e-6);
                    CHECK(on_ranks::same_bits(all, one));
                }
            }
        }
    }

    TEST_CASE("ranks send the numbers of their placeholders and nothing else, and of text nothing") {
        splitmix numbers(4);
        index_t with_both = 0, texts = 0;
        for (int turn = 0; turn < 40; ++turn) {
            auto const b = random_media(numbers, mrope_rules[turn % 5], 4);
            int const ranks = on_ranks::rank_counts[turn % 6];
            auto const whole = cpx::mrope_positions(b.items, b.batch, b.ids, placeholders);
            index_t const kinds = (b.items.rows(media_kind::image) > 0) + (b.items.rows(media_kind::video) > 0);
            with_both += kinds == 2;
            texts += kinds == 0;
            for_each_sharding(b.batch, ranks, {1 + turn % 7}, [&](std::string const& name, auto const& sharding) {
                cpx::tally sent;
                REQUIRE_MESSAGE(problem_of(b, placeholders, sharding, whole, sent) == "", name);
                CHECK(sent.bytes == 4 * kinds * all_segments(sharding) * (ranks - 1));
                CHECK(sent.messages == (kinds > 0 ? ranks * (ranks - 1) : 0));
            });
            cpx::tally sent;
            REQUIRE(problem_of(b, placeholders, cpx::replicated<>(ranks, b.batch), whole, sent) == "");
            CHECK(sent.messages == 0);
        }
        CHECK(with_both > 5);
        CHECK(texts > 2);
    }

    TEST_CASE("positions may be greater than those of the text behind them, and deltas know it") {
        auto const b = media_writer({.rule = mrope_rule::qwen2_5_vl_spatial_advance})
                           .text(3)
                           .video({4, 2, 2}, 0, 3)
                           .text(9)
                           .end()
                           .text(4)
                           .end()
                           .text(1)
                           .video({2, 2, 2}, 0, 1)
                           .end()
                           .done();
        auto const whole = cpx::mrope_positions(b.items, b.batch, b.ids, placeholders);
        CHECK(b.items.overruns());
        CHECK(whole.deltas == std::vector<index_t>{3 + 3 * 6 + 1 - 16, 0, 1 + 2 + 1 - 3});
        for (int const ranks : {1, 2, 5}) {
            cpx::tally sent;
            CHECK(problem_of(b, placeholders, on_ranks::by_tokens(cpx::shard(b.batch, cpx::zigzag<>(ranks))), whole,
                             sent) == "");
        }
    }

    TEST_CASE("a rank whose placeholders are too many or in other places throws, and so do the others") {
        auto const b = media_writer().text(9).image(4, 4).text(8).end().done();
        auto const run = [&](std::vector<index_t> const& changed) {
            on_ranks::by_tokens const sharding = cpx::shard(b.batch, cpx::sequential<>(3));
            auto wrong = b.ids;
            for (index_t const row : changed)
                wrong[static_cast<std::size_t>(row)] = 107 - wrong[static_cast<std::size_t>(row)];
            std::atomic<int> failed = 0;
            std::string text = message([&] {
                cpx::threads::run(3, [&](cpx::threads& comm) {
                    auto const ids = on_ranks::take(wrong, {{1, 1}}, sharding, comm.rank());
                    try {
                        cpx::mrope_positions(b.items, ids, placeholders, comm);
                    } catch (cpx::error const&) {
                        ++failed;
                        throw;
                    }
                });
            });
            return std::pair(text, failed.load());
        };
        auto const [number, all] = run({0});
        CHECK(number.find("image placeholders in the batch: expected 4, the rows of features that the grids have, got "
                          "5") != std::string::npos);
        CHECK(all == 3);
        auto const [place, some] = run({10, 14});
        CHECK(place.find("mrope_positions: sequence 0, token 10: expected one more placeholder of an image") !=
              std::string::npos);
        CHECK(some >= 1);
        CHECK(run({}).first == "");
    }

    TEST_CASE("ranks that know different grids, or give another's ids, are rejected") {
        on_ranks::by_tokens const sharding = cpx::shard(lengths({10}), cpx::zigzag<>(2));
        auto const run = [&](bool grids) {
            return message([&] {
                cpx::threads::run(2, [&](cpx::threads& comm) {
                    cpx::media const own({{1, 4, grids ? 4 + 2 * comm.rank() : 4}}, {});
                    auto const ids = cpx::make_tensor<index_t>(sharding, grids ? comm.rank() : 1 - comm.rank(), 1);
                    cpx::mrope_positions(own, ids, placeholders, comm);
                });
            });
        };
        CHECK(run(true).find("ranks are in different exchanges: grids (hash)") != std::string::npos);
        CHECK(run(false).find("mrope_positions: rank of the ids: expected ") != std::string::npos);
    }

    TEST_CASE("ids of another shape or of other ranks are rejected") {
        auto const b = media_writer().text(9).end().done();
        cpx::threads::run(1, [&](cpx::threads& comm) {
            on_ranks::by_tokens const sharding = cpx::shard(b.batch, cpx::sequential<>(1));
            auto const wide = cpx::make_tensor<index_t>(sharding, 0, 2);
            rejects({"mrope.cpp", "mrope_positions: shape of ids: expected (9, 1), got (9, 2)"},
                    [&] { cpx::mrope_positions(b.items, wide, placeholders, comm); });
            auto const of_two =
                cpx::make_tensor<index_t>(on_ranks::by_tokens(cpx::shard(b.batch, cpx::sequential<>(2))), 0, 1);
            rejects({"mrope_positions: rank of the ids: expected 0 of 1, got 0 of 2"},
                    [&] { cpx::mrope_positions(b.items, of_two, placeholders, comm); });
        });
    }
}
