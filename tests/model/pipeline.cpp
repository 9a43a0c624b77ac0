// SPDX-License-Identifier: Apache-2.0
#include <cpx/model/pipeline.hpp>

#include "model/faults.hpp"

#include <doctest/doctest.h>

#include <support/rejects.hpp>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <random>
#include <string>
#include <vector>

using cpx::index_t;
using cpx::pipeline;
using cpx::pipeline_sizes;
using support::rejects;

namespace {

using table = std::vector<std::vector<index_t>>; ///< by rank, by chunk

table offsets(pipeline const& p) {
    table found;
    for (int rank = 0; rank < p.ranks(); ++rank) {
        found.emplace_back();
        for (int chunk = 0; chunk < p.chunks(); ++chunk) found.back().push_back(p.offset(rank, chunk));
    }
    return found;
}

pipeline laid_out(std::string text, int ranks, index_t layers, std::optional<index_t> mtp = {}) {
    return pipeline({.layers = layers, .ranks = ranks, .mtp = mtp, .layout = text});
}

/// What Megatron adds to the number of a layer, as its formulas say it, for splits without layout.
index_t megatron_offset(pipeline_sizes const& s, int rank, int chunk) {
    if (s.ranks == 1) return 0;
    if (s.first || s.last) {
        index_t const f = s.first.value_or(0), z = s.last.value_or(0), m = s.layers - f - z;
        index_t const middles = s.ranks - s.first.has_value() - s.last.has_value();
        index_t const middle_rank = rank - s.first.has_value();
        if (s.chunks == 1) return rank == 0 ? 0 : f + (middles > 0 ? middle_rank * (m / middles) : 0);
        index_t const v = s.chunks, total = f / v + m / v + z / v;
        if (rank == 0) return chunk * total;
        return chunk * total + f / v + (middles > 0 ? middle_rank * (m / v / middles) : 0);
    }
    index_t const all = s.layers + s.account_for_embedding + s.account_for_loss;
    index_t const plain = chunk * (all / s.chunks) + rank * (all / s.ranks / s.chunks);
    return plain - (s.account_for_embedding && (rank > 0 || chunk > 0));
}

/// Calls `f(pipeline, sizes)` for every split of so many layers that is admissible.
template <class F>
int for_each_split(index_t layers, F&& f) {
    int count = 0;
    auto const with = [&](pipeline_sizes const& sizes) {
        try {
            pipeline const p(sizes);
            ++count;
            f(p, sizes);
        } catch (cpx::error const&) { // does not divide
        }
    };
    for (int ranks = 1; ranks <= 8; ++ranks)
        for (int chunks = 1; chunks <= 4; ++chunks) {
            for (int accounts = 0; accounts < 4; ++accounts)
                with({.layers = layers,
                      .ranks = ranks,
                      .chunks = chunks,
                      .account_for_embedding = accounts % 2 == 1,
                      .account_for_loss = accounts / 2 == 1});
            for (index_t first = 0; first <= layers; ++first)
                for (index_t last = 0; last <= layers; ++last) {
                    pipeline_sizes sizes{.layers = layers, .ranks = ranks, .chunks = chunks};
                    if (first > 0) sizes.first = first;
                    if (last > 0) sizes.last = last;
                    if (first + last > 0 && first + last <= layers) with(sizes);
                }
        }
    return count;
}

/// Returns what is wrong with a pipeline, or "".
std::string problem_of(pipeline const& p, index_t layers) {
    std::vector<int> times(static_cast<std::size_t>(layers));
    index_t mtp = 0, next = 0;
    int embeddings = 0, losses = 0;
    for (std::size_t i = 0; i < p.stages().size(); ++i) {
        auto const& stage = p.stages()[i];
        int const rank = static_cast<int>(i) % p.ranks(), chunk = static_cast<int>(i) / p.ranks();
        if (&p.stage(rank, chunk) != &stage) return "another order of stages";
        if (stage.layers.first != next || stage.layers.size() < 0) return "layers that do not follow one another";
        next = stage.layers.last;
        for (index_t layer = stage.layers.first; layer < stage.layers.last; ++layer) {
            ++times[static_cast<std::size_t>(layer)];
            if (p.find(layer) != cpx::pipeline_place{rank, chunk, layer - stage.layers.first}) return "another inverse";
        }
        mtp += stage.mtp, embeddings += stage.embedding, losses += stage.loss;
    }
    if (p.layers() != layers || next != layers) return "another number of layers";
    if (std::ranges::count(times, 1) != layers) return "layers that are not in one stage";
    if (embeddings != 1 || !p.stages().front().embedding) return "no embedding at the beginning";
    if (losses != 1 || !p.stages().back().loss) return "no loss at the end";
    return "";
}

} // namespace

TEST_SUITE("model") {
    // Source: Megatron-LM, the table of tests/unit_tests/transformer/test_transformer_layer.py and the formulas of
    // get_transformer_layer_offset in megatron/core/transformer/transformer_layer.py.
    TEST_CASE("layers begin in every stage where Megatron's tables have them") {
        CHECK(offsets(pipeline({.layers = 48, .ranks = 4})) == table{{0}, {12}, {24}, {36}});
        CHECK(offsets(pipeline({.layers = 48, .ranks = 4, .chunks = 2})) ==
              table{{0, 24}, {6, 30}, {12, 36}, {18, 42}});
        CHECK(offsets(pipeline({.layers = 40, .ranks = 4, .chunks = 2})) ==
              table{{0, 20}, {5, 25}, {10, 30}, {15, 35}});
        CHECK(offsets(pipeline({.layers = 48, .ranks = 2, .chunks = 4})) == table{{0, 12, 24, 36}, {6, 18, 30, 42}});
        CHECK(offsets(pipeline({.layers = 30, .ranks = 4, .chunks = 2, .first = 8, .last = 10})) ==
              table{{0, 15}, {4, 19}, {7, 22}, {10, 25}});
        CHECK(offsets(pipeline({.layers = 26, .ranks = 4, .chunks = 2, .first = 8})) ==
              table{{0, 13}, {4, 17}, {7, 20}, {10, 23}});
        CHECK(offsets(pipeline({.layers = 26, .ranks = 4, .chunks = 2, .last = 8})) ==
              table{{0, 13}, {3, 16}, {6, 19}, {9, 22}});
        CHECK(offsets(pipeline({.layers = 24, .ranks = 4, .chunks = 2})) == table{{0, 12}, {3, 15}, {6, 18}, {9, 21}});
        CHECK(offsets(pipeline(
                  {.layers = 62, .ranks = 4, .chunks = 2, .account_for_embedding = true, .account_for_loss = true})) ==
              table{{0, 31}, {7, 39}, {15, 47}, {23, 55}});
        CHECK(offsets(pipeline({.layers = 63, .ranks = 4, .account_for_embedding = true})) ==
              table{{0}, {15}, {31}, {47}});
        CHECK(offsets(pipeline({.layers = 48, .ranks = 1})) == table{{0}});
        CHECK(offsets(pipeline({.layers = 48, .ranks = 1, .chunks = 2})) == table{{0, 0}}); // not divided
        CHECK(pipeline({.layers = 48, .ranks = 1, .chunks = 2}).stage(0, 1).layers == cpx::range{0, 48});
    }

    // Source: Megatron-LM, tests/unit_tests/pipeline_parallel/test_pipeline_layout.py.
    TEST_CASE("a layout string says what every stage has") {
        auto const p = laid_out("E|t|t*2|t||(t|)*2,t*2,L", 4, 8);
        CHECK(p.chunks() == 2);
        std::vector<cpx::range> const layers = {{0, 0}, {0, 1}, {1, 3}, {3, 4}, {4, 4}, {4, 5}, {5, 6}, {6, 8}};
        for (std::size_t i = 0; i < layers.size(); ++i) CHECK(p.stages()[i].layers == layers[i]);
        CHECK(offsets(p) == table{{0, 4}, {0, 4}, {1, 5}, {3, 6}});
        CHECK(p.stage(0).embedding);
        CHECK(p.stage(3, 1).loss);

        auto const two = laid_out("Et|t*4|t|tL", 2, 7);
        CHECK(two.stages() == std::vector<cpx::pipeline_stage>{
                                  {{0, 1}, 0, true, false}, {{1, 5}, 0}, {{5, 6}, 0}, {{6, 7}, 0, false, true}});
        CHECK(laid_out("Et*3|(tt|)*29,m|L", 16, 61, 1).stage(14, 1).mtp == 1);
        CHECK(laid_out("EttL", 1, 2).stage(0).layers == cpx::range{0, 2});
    }

    // Source: Megatron-LM, parse_str_to_list of megatron/core/transformer/pipeline_parallel_layer_layout.py and the
    // examples of its comments, with signs in place of letters.
    TEST_CASE("multiplications of a layout string are multiplied out as Megatron does, and commas are nothing") {
        auto const unrolled = [](char const* text) { return cpx::unroll_pipeline_layout(text); };
        CHECK(unrolled("Em(tt|m|L)*2,tE") == "Emtt|m|Ltt|m|LtE");
        CHECK(unrolled("(tm)*3") == "tmtmtm");
        CHECK(unrolled("tm,(E|)*2") == "tmE|E|");
        CHECK(unrolled("(|tm)*2,L") == "|tm|tmL");
        CHECK(unrolled("(t*2|)*3") == "tt|tt|tt|");
        CHECK(unrolled("|*3") == "|||");
        CHECK(unrolled("t*0E(t|)*0") == "E");
        CHECK(unrolled("t*1,2") == "tttttttttttt");
        CHECK(unrolled(",t,*,2,,(,t,),*,2") == "tttt");
        CHECK(unrolled("t*02") == "tt");
        CHECK(unrolled("") == "");
        CHECK(unrolled("t*16384").size() == 16384);
    }

    TEST_CASE("in every split of a few numbers of layers every layer is in one stage, where Megatron's formulas say") {
        int count = 0;
        for (index_t const layers : {1, 7, 12, 24, 30, 46}) {
            std::string problem;
            count += for_each_split(layers, [&](pipeline const& p, pipeline_sizes const& sizes) {
                if (problem.empty()) problem = problem_of(p, layers);
                for (int rank = 0; rank < p.ranks(); ++rank)
                    for (int chunk = 0; chunk < p.chunks(); ++chunk)
                        if (problem.empty() && p.offset(rank, chunk) != megatron_offset(sizes, rank, chunk))
                            problem = "another offset than Megatron's, of rank " + std::to_string(rank);
            });
            CHECK_MESSAGE(problem.empty(), problem << ", of " << layers << " layers");
        }
        CHECK(count > 2'000);
    }

    TEST_CASE("every layout string of stages with 0 to 2 layers is a pipeline of all its layers") {
        int count = 0;
        for (int code = 0; code < 729; ++code) { // 6 stages
            std::string text = "E";
            index_t layers = 0;
            for (int i = 0, rest = code; i < 6; ++i, rest /= 3) {
                layers += rest % 3;
                text += (i > 0 ? "|" : "") + std::string(static_cast<std::size_t>(rest % 3), 't');
            }
            if (layers == 0) continue;
            for (int const ranks : {2, 3, 6}) {
                auto const p = laid_out(text + 'L', ranks, layers);
                if (auto const problem = problem_of(p, layers); !problem.empty()) FAIL_CHECK(problem << ": " << text);
                index_t before = 0; // layers of the stages before, counted from the text
                for (auto const& stage : p.stages()) {
                    if (stage.layers.first != before) FAIL_CHECK("another offset: " << text);
                    before += stage.layers.size();
                }
                ++count;
            }
        }
        CHECK(count == 3 * 728);
    }

    TEST_CASE("sizes that do not divide are errors that name what") {
        auto const refused = [](char const* what, pipeline_sizes const& sizes) {
            rejects({what}, [&] { pipeline{sizes}; });
        };
        refused("pipeline: ranks: expected at least 1, got 0", {.layers = 8, .ranks = 0});
        refused("pipeline: chunks: expected at least 1, got -1", {.layers = 8, .chunks = -1});
        refused("pipeline: layers: expected 1 to 1000000, got 0", {});
        refused("pipeline: layers: expected 1 to 1000000, got 9223372036854775807", {.layers = 9223372036854775807});
        refused("pipeline: mtp: expected 0 to 1000000, got -1", {.layers = 8, .mtp = -1});
        refused("pipeline: ranks times chunks: expected at most 65536, got 4611686014132420609",
                {.layers = 8, .ranks = 2147483647, .chunks = 2147483647});
        refused("pipeline: layers: expected a multiple of ranks = 4, got 26", {.layers = 26, .ranks = 4});
        refused("pipeline: layers, with what counts as one: expected a multiple of ranks = 4, got 49",
                {.layers = 48, .ranks = 4, .account_for_loss = true});
        refused("pipeline: layers of a rank: expected a multiple of chunks = 4, got 6",
                {.layers = 12, .ranks = 2, .chunks = 4});
        refused("pipeline: layers besides first and last: expected a multiple of ranks left = 2, got 11",
                {.layers = 26, .ranks = 4, .first = 8, .last = 7});
        refused("pipeline: first: expected a multiple of chunks = 2, got 7",
                {.layers = 25, .ranks = 4, .chunks = 2, .first = 7});
        refused("pipeline: last: expected a multiple of chunks = 2, got 7",
                {.layers = 25, .ranks = 4, .chunks = 2, .last = 7});
        refused("pipeline: layers of a rank between first and last: expected a multiple of chunks = 2, got 5",
                {.layers = 23, .ranks = 4, .chunks = 2, .first = 8});
        refused("pipeline: first: expected 1 to the 8 layers, got 0", {.layers = 8, .ranks = 2, .first = 0});
        refused("pipeline: last: expected 1 to the 8 layers, got 9", {.layers = 8, .ranks = 2, .last = 9});
        refused("pipeline: layers besides first and last: expected not negative, got -2",
                {.layers = 8, .ranks = 3, .first = 5, .last = 5});
        refused("pipeline: layers besides first and last: expected 0, for no rank is left, got 1",
                {.layers = 8, .ranks = 2, .first = 4, .last = 3});
        refused("pipeline: layers besides first and last: expected 0, for no rank is left, got 2",
                {.layers = 8, .ranks = 1, .first = 6});
        refused("pipeline: ranks: expected 2 for first and last, got 1", {.layers = 8, .first = 4, .last = 4});
        refused("pipeline: accounts for embedding and loss: expected none beside first or last, got one",
                {.layers = 8, .ranks = 2, .first = 4, .account_for_embedding = true});
        pipeline const p({.layers = 8, .ranks = 2, .chunks = 2});
        rejects({"pipeline: rank: expected 0 to 1, got 2"}, [&] { static_cast<void>(p.offset(2)); });
        rejects({"pipeline: chunk: expected 0 to 1, got -1"}, [&] { static_cast<void>(p.stage(0, -1)); });
        rejects({"pipeline: layer: expected 0 to 7, got 8"}, [&] { static_cast<void>(p.find(8)); });
        rejects({"pipeline: layer: expected 0 to 7, got -1"}, [&] { static_cast<void>(p.find(-1)); });
    }

    TEST_CASE(
        "a layout string that is none is an error that names the character, or what is not as Megatron wants it") {
        auto const refused = [](std::string const& what, char const* text, int ranks = 2, index_t layers = 2,
                                std::optional<index_t> mtp = {}) {
            rejects({"pipeline: " + what}, [&] { laid_out(text, ranks, layers, mtp); });
        };
        auto const refused_at = [&](int at, std::string const& text, std::string const& expected,
                                    std::string const& got) {
            refused("character " + std::to_string(at) + " of layout " + cpx::quote(text) + ": expected " + expected +
                        ", got " + (got.empty() ? "the end" : cpx::quote(got)),
                    text.c_str());
        };
        std::string const signs = "E, t, m, L, |, a comma, or parentheses";
        refused_at(1, "Ex|L", signs, "x");
        refused_at(1, "E\nL", signs, "\n");
        refused_at(1, "E\xc3\xa9L", signs, "\xc3\xa9");
        refused_at(1, "E\xffL", signs, "\xff");
        refused_at(0, "*2t", signs, "*");
        refused_at(3, "Et*", "a number after *", "");
        refused_at(3, "Et*-1", "a number after *", "-");
        refused_at(4, "Et*2*3", "one multiplication, not a second", "*");
        refused_at(1, "E(t|", "a closing parenthesis after it", "(");
        refused_at(2, "Et)*2", "an open parenthesis before it", ")");
        refused_at(2, "E()*2", "signs in the parentheses", ")");
        refused_at(3, "E(,)*2", "signs in the parentheses", ")");
        refused_at(4, "E(t)L", "a multiplication of the parentheses, such as *2", "L");
        refused_at(4, "E(t)", "a multiplication of the parentheses, such as *2", "");
        refused_at(2, "E((t|)*2|)*2", "no parentheses within others, which Megatron does not unroll", "(");
        refused_at(1, "Et*1000000000", "at most 16384 signs in all", "t");
        refused_at(10, "E,,(t*200|)*100", "at most 16384 signs in all", ")");
        refused_at(1, "Et*99999999999999999999999999999999999999", "at most 16384 signs in all", "t");
        refused("stages of the layout: expected a multiple of the ranks = 2, got 3", "Et|t|L");
        refused(
            "stages of the layout: expected 1 on one rank, where Megatron numbers the layers of every chunk from 0, "
            "got 2",
            "Et|tL", 1);
        refused("first sign of the layout: expected E, got nothing", "", 1);
        refused(R"(first sign of the layout: expected E, got "|")", "|EttL");
        refused(R"(last sign of the layout: expected L, got "t")", "Et|Lt");
        refused("embeddings (E) of the layout: expected 1, got 2", "Et|EtL");
        refused("losses (L) of the layout: expected 1, got 2", "EtL|tL");
        refused("layers (t) of the layout: expected 2, got 3", "Et|ttL");
        refused("layers of mtp (m) of the layout: expected 2, got 1", "Et|tmL", 2, 2, 2);
        refused("layers of mtp (m) of the layout: expected 0, got 1", "Et|tmL", 2, 2, 0);
        refused("layers of mtp (m) of the layout: expected behind every t, got one before", "Et|mtL");
        refused("layers of mtp (m) of the layout: expected all in one stage, got several", "Ettm|mL");
        refused("layers of mtp (m) of the layout: expected in the last chunk of a rank, got chunk 0", "Ett|m||L");
        rejects({"pipeline: chunks: expected as in the layout, 2, got 3"},
                [] { pipeline({.layers = 2, .ranks = 2, .chunks = 3, .layout = "Et|t||L"}); });
        rejects({"pipeline: layout: expected none beside first, last, or accounts for embedding and loss, got both"},
                [] { pipeline({.layers = 2, .ranks = 2, .first = 1, .layout = "Et|tL"}); });
    }

    TEST_CASE("a damaged layout string is a pipeline or a cpx::error") {
        std::mt19937_64 random(20260718);
        char const* const valid[] = {"E|t|t*2|t||(t|)*2,t*2,L", "Et|t*4|t|tL", "Ettt|(tt|)*29,m|L", "E,(t|)*9,tm*2L"};
        int read = 0;
        for (int i = 0; i < 100'000; ++i) {
            std::string text = faults::damaged(valid[random() % 4], random);
            try {
                std::string const signs = cpx::unroll_pipeline_layout(text);
                if (signs.size() > 16384 || signs.find_first_not_of("EtmL|") != signs.npos) FAIL(text);
                auto const layers = std::ranges::count(signs, 't');
                pipeline const p({.layers = layers, .ranks = 1 + int(random() % 4), .layout = text});
                if (auto const problem = problem_of(p, layers); !problem.empty()) FAIL(problem << ": " << text);
                ++read;
            } catch (cpx::error const&) {
            }
        }
        CHECK(read > 100);
    }
}
