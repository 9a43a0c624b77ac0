// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/cuda/mrope.hpp>
#include <cpx/ops/cuda/vision.hpp>

#include <cpx/cuda/rotary.hpp>
#include <cpx/layout/striped.hpp>
#include <cpx/layout/table.hpp>
#include <cpx/layout/zigzag.hpp>
#include <cpx/ops/vision.hpp>
#include <cpx/transport/threads.hpp>

#include <doctest/doctest.h>

#include "../../harness/graph.hpp"
#include "gpus.hpp"
#include "threads_on_gpu.hpp"

#include <support/media.hpp>
#include <support/rejects.hpp>

#include <memory>
#include <optional>

namespace {

using namespace support;
using cpx::index_t, cpx::media_kind, cpx::mrope_rule;
using cpx::cuda::buffer;
namespace cuda = cpx::cuda;

constexpr media_kind kinds[] = {media_kind::image, media_kind::video};

/// Returns the grids of a batch in patches, three numbers each, as trainers have them.
std::vector<index_t> grids_of(cpx::media const& m, media_kind kind) {
    std::vector<index_t> list;
    index_t const merge = m.options().merge;
    index_t last = -1;
    for (cpx::media_item const& item : m.items(kind)) {
        if (item.number == last) { // another frame of a video
            ++list[list.size() - 3];
            continue;
        }
        last = item.number;
        for (index_t const size : {item.frames, item.height * merge, item.width * merge}) list.push_back(size);
    }
    return list;
}

template <class T>
std::span<T const> view(buffer<T> const& b) {
    return {b.data(), static_cast<std::size_t>(b.size())};
}
template <class T>
buffer<T> on_device(std::vector<T> const& list) {
    return buffer<T>(std::span<T const>(list));
}

/// The grids of a batch on the device, with some rows of zeros, which stand for none, behind them and between.
struct grids_on_device {
    buffer<index_t> images, videos;
    buffer<double> seconds;

    grids_on_device(cpx::media const& m, index_t zeros) {
        auto const with = [&](std::vector<index_t> list) {
            for (index_t i = 0; i < zeros; ++i)
                list.insert(i % 2 ? list.end() : list.begin() + std::ssize(list) / 6 * 3, 3, 0);
            return list;
        };
        auto list = with(grids_of(m, media_kind::video));
        std::vector<double> of = m.options().seconds;
        std::vector<double> given;
        for (std::size_t i = 0, next = 0; i < list.size(); i += 3)
            given.push_back(list[i] > 0 && next < of.size() ? of[next++] : 1.0);
        images = on_device(with(grids_of(m, media_kind::image)));
        videos = on_device(list);
        seconds = on_device(given);
    }
    cuda::device_grids list() const { return {view(images), view(videos), view(seconds)}; }
};

/// Returns what of a rank's results is not as in the whole batch, or "".
template <class Positions, class S>
std::string problem_of(Positions const& p, media_batch const& b, S const& sharding, int rank,
                       cpx::batch_positions const& whole, bool all_deltas = true) {
    std::vector<index_t> rows; // in the batch
    std::vector<index_t> held[2];
    std::vector<char> valid(b.ids.size());
    for (index_t s = 0; s < b.batch.sequences(); ++s)
        std::fill_n(valid.begin() + b.batch.offset(s), b.batch.valid(s), 1);
    sharding.for_each_piece(rank, [&](cpx::range piece) {
        for (index_t row = piece.first; row < piece.last; ++row) {
            auto const id = b.ids[static_cast<std::size_t>(row)];
            if (valid[static_cast<std::size_t>(row)] && placeholders.kind(id) != media_kind::text)
                held[placeholders.kind(id) == media_kind::video].push_back(std::ssize(rows));
            rows.push_back(row);
        }
    });
    index_t const n = b.batch.tokens(), count = std::ssize(rows);
    if (p.axes().width() != count) return "other rows";
    auto const read = [](auto const* from, index_t size) {
        std::vector<std::remove_cvref_t<decltype(*from)>> list(static_cast<std::size_t>(size));
        cuda::check(cudaMemcpy(list.data(), from, list.size() * sizeof list[0], cudaMemcpyDeviceToHost), "cudaMemcpy");
        return list;
    };
    for (index_t a = 0; a < 3; ++a) {
        auto const got = read(p.axes().row(a), count);
        for (std::size_t i = 0; i < got.size(); ++i)
            if (got[i] != whole.axes[static_cast<std::size_t>(a * n + rows[i])])
                return "axis " + std::to_string(a) + ", row " + std::to_string(i) + ": " + std::to_string(got[i]) +
                       ", not " + std::to_string(whole.axes[static_cast<std::size_t>(a * n + rows[i])]);
    }
    for (int k = 0; k < 2; ++k) {
        auto const list = p.placeholders(kinds[k]);
        auto const got = read(list.data(), std::ssize(list));
        for (std::size_t i = 0; i < got.size(); ++i)
            if (got[i] != (i < held[k].size() ? held[k][i] : -1)) return "other placeholders";
    }
    auto const deltas = read(p.deltas().data(), b.batch.sequences());
    if (all_deltas && deltas != whole.deltas) return "other deltas";
    return "";
}

/// Fills a rank's results with what they are not.
template <class Positions>
void poison(Positions const& p, index_t rows) {
    auto const fill = [](auto const* list, index_t bytes) {
        if (bytes > 0)
            cuda::check(
                cudaMemset(const_cast<void*>(static_cast<void const*>(list)), 0x7f, static_cast<std::size_t>(bytes)),
                "cudaMemset");
    };
    fill(p.axes().data(), 12 * rows);
    for (auto const kind : kinds) fill(p.placeholders(kind).data(), 4 * rows);
    fill(p.deltas().data(), static_cast<index_t>(p.deltas().size_bytes()));
    cuda::check(cudaDeviceSynchronize(), "cudaMemset");
}

constexpr cuda::mrope_capacity most{4000, 60, 6, 100, 100};

/// Random packings of one rule on one rank, one after the other, by an object made once for each merge size.
template <class Comm>
std::string random_packings(Comm& comm, mrope_rule rule, std::uint64_t seed, int turns, index_t& rows) {
    splitmix numbers(seed);
    int const rank = comm.rank(), ranks = comm.ranks();
    std::string problem;
    for (int turn = 0; turn < turns; ++turn) {
        auto const b = random_media(numbers, rule, 5);
        auto of = b.items.options();
        of.seconds.clear();
        cuda::mrope_positions<Comm> p(comm, most, of);
        grids_on_device const grids(b.items, turn % 4);
        auto const whole = cpx::mrope_positions(b.items, b.batch, b.ids, placeholders);
        std::vector<index_t> const offsets(b.batch.offsets().begin(), b.batch.offsets().end());
        std::vector<index_t> valid{0};
        for (index_t s = 0; s < b.batch.sequences(); ++s) valid.push_back(valid.back() + b.batch.valid(s));
        auto const offsets_there = on_device(offsets), valid_there = on_device(valid);
        auto const check = [&](char const* what, auto const& sharding, auto by_device) {
            auto const own = sharding.rows(rank);
            std::vector<std::int32_t> ids;
            sharding.for_each_piece(rank, [&](cpx::range piece) {
                for (index_t row = piece.first; row < piece.last; ++row)
                    ids.push_back(static_cast<std::int32_t>(b.ids[static_cast<std::size_t>(row)]));
            });
            auto const ids_there = on_device(ids);
            poison(p, most.rows > own ? own : most.rows);
            if constexpr (by_device())
                p.set(sharding, view(offsets_there), view(valid_there));
            else
                p.set(sharding);
            p(view(ids_there), placeholders, grids.list());
            cuda::check(cudaStreamSynchronize(comm.memory().stream()), "mrope");
            p.check();
            auto const found = problem_of(p, b, sharding, rank, whole);
            if (problem.empty() && !found.empty())
                problem = std::string(what) + ", turn " + std::to_string(turn) + ": " + found;
            rows += own;
        };
        check("zigzag by the device", cpx::shard(b.batch, cpx::zigzag<>(ranks)), std::true_type());
        check(
            "sequential by the device",
            cpx::sharding<cpx::sequential<>, cpx::scope::sequence, cpx::aligned<16>>(b.batch, cpx::sequential<>(ranks)),
            std::true_type());
        check("zigzag", cpx::shard(b.batch, cpx::zigzag<>(ranks)), std::false_type());
        check("zigzag over the batch", cpx::shard<cpx::scope::batch>(b.batch, cpx::zigzag<>(ranks)), std::false_type());
        std::vector<int> owners;
        for (int c = 0; c < 3 * ranks; ++c) owners.push_back((c * c + turn) % ranks);
        check("table", cpx::shard(b.batch, cpx::table(ranks, owners)), std::false_type());
        check("replicated", cpx::replicated<>(ranks, b.batch), std::false_type());
    }
    return problem;
}

/// A packing of as many tokens as any other, in 8 sequences whose lengths 16 divides, with padding in some.
media_batch full_packing(splitmix& numbers, index_t tokens) {
    media_writer writer;
    index_t left = tokens / 16, images = 0;
    for (int s = 0; s < 8; ++s) {
        index_t const some = s == 7 ? left : numbers.between(0, std::min<index_t>(left, tokens / 48));
        index_t const padding = some > 0 ? numbers.between(0, 1) * numbers.between(0, 9) : 0;
        left -= some;
        for (index_t rest = 16 * some - padding; rest > 0;) {
            index_t const h = numbers.between(1, 7), w = numbers.between(1, 7), t = numbers.between(1, 3);
            index_t const what = images > 50 ? 2 : numbers.between(0, 3);
            if (what == 0 && h * w <= rest)
                writer.image(2 * h, 2 * w), rest -= h * w, ++images;
            else if (what == 1 && t * h * w <= rest)
                writer.video({t, 2 * h, 2 * w}), rest -= t * h * w, ++images;
            else {
                index_t const n = std::min(rest, numbers.between(1, 60));
                writer.text(n), rest -= n;
            }
        }
        writer.end(std::vector<index_t>(static_cast<std::size_t>(padding), placeholders.image));
    }
    return writer.done();
}

/// Writes a list over another one, the rest of which becomes `rest`.
template <class T>
void write_over(buffer<T>& to, std::vector<T> list, T rest) {
    list.resize(static_cast<std::size_t>(to.size()), rest);
    to.write(list);
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("positions, placeholders and deltas on a device are those of the host, of every rule and sharding") {
        if (!has_gpus()) return;
        index_t all = 0;
        int seed = 0;
        for (mrope_rule const rule : mrope_rules)
            for (int const ranks : {1, 2, 3, 5, 8}) {
                std::vector<std::string> problems(static_cast<std::size_t>(ranks));
                std::vector<index_t> rows(problems.size());
                int const turns = 3;
                ++seed;
                cpx::threads::run(ranks, [&](cpx::threads& threads) {
                    auto const rank = static_cast<std::size_t>(threads.rank());
                    cuda::stream const stream;
                    threads_on_gpu comm(threads, stream);
                    problems[rank] = random_packings(comm, rule, static_cast<std::uint64_t>(seed), turns, rows[rank]);
                });
                for (std::size_t r = 0; r < problems.size(); ++r) {
                    REQUIRE_MESSAGE(problems[r] == "", "rule ", static_cast<int>(rule), ", rank ", r, " of ", ranks);
                    all += rows[r];
                }
            }
        CHECK(all > 10000);
    }

    TEST_CASE("positions that a graph computes are those of the packing that is there when it is launched") {
        if (!has_gpus()) return;
        constexpr int ranks = 4;
        constexpr index_t tokens = 4096, segments = 2 * 8;
        cuda::stream const stream;
        splitmix numbers(5);
        auto const first = full_packing(numbers, tokens);
        std::vector<cuda::rank_positions> own;
        std::vector<buffer<std::int32_t>> ids;
        for (int r = 0; r < ranks; ++r) {
            own.emplace_back(cuda::mrope_capacity{tokens / ranks, segments, 8, 60, 60}, r, ranks);
            ids.emplace_back(tokens / ranks);
        }
        buffer<std::int32_t> offsets(9), valid(9), all(ranks * segments * 2);
        buffer<index_t> images(3 * 60), videos(3 * 60);
        cpx::rows<std::int32_t const> const gathered(all.data(), ranks * segments, 2);
        cuda::device_grids const grids{view(images), view(videos), {}};
        auto const sharding_of = [&](media_batch const& b) { return cpx::shard(b.batch, cpx::zigzag<>(ranks)); };
        auto const write = [&](media_batch const& b) {
            std::vector<std::int32_t> padded(b.batch.offsets().begin(), b.batch.offsets().end()), without{0};
            for (index_t s = 0; s < 8; ++s)
                without.push_back(without.back() + static_cast<std::int32_t>(b.batch.valid(s)));
            write_over(offsets, padded, 0);
            write_over(valid, without, 0);
            write_over(images, grids_of(b.items, media_kind::image), index_t{0});
            write_over(videos, grids_of(b.items, media_kind::video), index_t{0});
            for (int r = 0; r < ranks; ++r) {
                std::vector<std::int32_t> list;
                sharding_of(b).for_each_piece(r, [&](cpx::range piece) {
                    list.insert(list.end(), b.ids.begin() + piece.first, b.ids.begin() + piece.last);
                });
                write_over(ids[static_cast<std::size_t>(r)], list, 0);
            }
        };
        auto const run = [&] {
            for (std::size_t r = 0; r < own.size(); ++r) {
                own[r].set(sharding_of(first), view(offsets), view(valid), stream);
                own[r].count(view(ids[r]), placeholders, grids, stream);
                cuda::check(cudaMemcpyAsync(all.data() + static_cast<index_t>(r) * segments * 2, own[r].counts().data(),
                                            segments * 8, cudaMemcpyDeviceToDevice, stream),
                            "cudaMemcpyAsync");
            }
            for (std::size_t r = 0; r < own.size(); ++r) own[r].place(view(ids[r]), placeholders, gathered, stream);
        };
        write(first);
        run(); // loads the kernels
        stream.synchronize();
        harness::graph const graph(stream, run);
        for (int packing = 0; packing < 6; ++packing) {
            CAPTURE(packing);
            auto const b = packing == 0 ? first : full_packing(numbers, tokens);
            write(b);
            for (auto& p : own) poison(p, tokens / ranks);
            graph.launch(stream);
            stream.synchronize();
            auto const whole = cpx::mrope_positions(b.items, b.batch, b.ids, placeholders);
            for (int r = 0; r < ranks; ++r) {
                auto& p = own[static_cast<std::size_t>(r)];
                p.check();
                CHECK(problem_of(p, b, sharding_of(b), r, whole) == "");
            }
        }
        CHECK(cuda::rotary_positions(own[0].axes()).count() == tokens / ranks);
    }

    TEST_CASE("a device says what is wrong with a batch, and computes the next one") {
        if (!has_gpus()) return;
        cuda::stream const stream;
        cuda::rank_positions p({40, 4, 2, 2, 2}, 0, 1);
        auto const b = media_writer().text(3).image(4, 4).text(2).end().text(4).video({2, 2, 4}, 3).end().done();
        auto const sharding = cpx::shard(b.batch, cpx::sequential<>(1));
        auto const images = grids_of(b.items, media_kind::image), videos = grids_of(b.items, media_kind::video);
        auto const run = [&](std::vector<index_t> const& ids, std::vector<index_t> const& of_images) {
            buffer<index_t> const ids_there = on_device(ids), images_there = on_device(of_images),
                                  videos_there = on_device(videos);
            p.set(sharding, stream);
            p.count(view(ids_there), placeholders, {view(images_there), view(videos_there), {}}, stream);
            p.place(view(ids_there), placeholders, p.counts(), stream);
            stream.synchronize();
            p.check();
        };
        auto const changed = [&](std::initializer_list<std::pair<std::size_t, index_t>> list) {
            auto ids = b.ids;
            for (auto const& [row, id] : list) ids[row] = id;
            return ids;
        };
        rejects({"mrope.cu", "image placeholders in the batch: expected 4, the rows of features that the grids have, "
                             "got 5"},
                [&] {
                    run(changed({{0, 100}}), images);
                });
        rejects({"cuda::mrope_positions: row 6 of this rank: expected one more placeholder of the image"}, [&] {
            run(changed({{6, 7}, {8, 100}}), images);
        });
        rejects({"cuda::mrope_positions: end of sequence 0: expected one more placeholder of the image"}, [&] {
            run(changed({{3, 7}, {4, 7}, {9, 100}, {10, 100}}), images);
        });
        rejects({"cuda::mrope_positions: image grid 0"}, [&] { run(b.ids, {1, 4, 3}); });
        rejects({"number of ids: expected 20"}, [&] { run({7}, images); });
        run(b.ids, images);
        auto const whole = cpx::mrope_positions(b.items, b.batch, b.ids, placeholders);
        CHECK(problem_of(p, b, sharding, 0, whole) == "");
        rejects({"images: expected at most 2, got 3"}, [&] { run(b.ids, {1, 4, 4, 0, 0, 0, 0, 0, 0}); });
        cuda::rank_positions small({40, 1, 2, 2, 2}, 0, 1);
        rejects({"segments of a rank: expected at most 1"}, [&] { small.set(sharding, stream); });
    }

    TEST_CASE("features on a device reach their placeholders, and gradients their rank, as on the host") {
        if (!has_gpus()) return;
        constexpr index_t width = 12;
        splitmix seeds(11);
        index_t moved = 0;
        for (int const ranks : {1, 2, 5})
            for (int turn = 0; turn < 3; ++turn) {
                auto const b = random_media(seeds, mrope_rule::qwen3_vl, 5);
                auto const sharding = cpx::shard(b.batch, cpx::zigzag<>(ranks));
                std::vector<std::string> problems(static_cast<std::size_t>(ranks));
                cpx::threads::run(ranks, [&](cpx::threads& threads) {
                    int const rank = threads.rank();
                    cuda::stream const stream;
                    threads_on_gpu comm(threads, stream);
                    splitmix numbers(static_cast<std::uint64_t>(rank + 1));
                    auto const random = [&](auto const& of) { // on the host, and on the device
                        auto here = cpx::make_tensor<float>(of, rank, width);
                        auto there = cpx::make_tensor<float>(of, comm, width);
                        for (float& value : here.elements())
                            value = static_cast<float>(numbers.between(-9999, 9999)) / 1000;
                        there.write(std::vector<float>(here.elements().begin(), here.elements().end()));
                        return std::pair(std::move(here), std::move(there));
                    };
                    auto ids = cpx::make_tensor<index_t>(sharding, rank, 1);
                    auto next = ids.elements().begin();
                    sharding.for_each_piece(rank, [&](cpx::range piece) {
                        next = std::copy(b.ids.begin() + piece.first, b.ids.begin() + piece.last, next);
                    });
                    auto ids_there = cpx::make_tensor<index_t>(sharding, comm, 1);
                    ids_there.write(ids.read());
                    auto const p = cpx::mrope_positions(b.items, ids, placeholders, threads),
                               p_there = cpx::mrope_positions(b.items, ids_there, placeholders, comm);
                    cuda::placeholder_rows const at(p_there, comm.memory());
                    auto [x, x_there] = random(sharding);
                    auto [dx, dx_there] = random(sharding);
                    auto const same = [&](char const* what, auto const& host, auto const& device) {
                        if (device.read() != host.read()) problems[static_cast<std::size_t>(rank)] = what;
                    };
                    for (index_t a = 0; a < 3; ++a)
                        if (!std::equal(p.axes().row(a), p.axes().row(a) + p.axes().width(), p_there.axes().row(a)))
                            problems[static_cast<std::size_t>(rank)] = "positions";
                    for (auto const kind : kinds) {
                        auto const tower = features_by_item(b.items, kind, ranks);
                        auto const plan = cpx::relayout(tower, p.features(kind), rank);
                        auto const [f, f_there] = random(tower);
                        auto const [deep, deep_there] = random(tower);
                        auto placed = exchange(plan, f, threads);
                        auto placed_there = exchange(plan, f_there, comm);
                        cpx::put_features(p, kind, placed, x);
                        cuda::put_features(at, kind, placed_there, x_there);
                        placed = exchange(plan, deep, threads);
                        placed_there = exchange(plan, deep_there, comm); // by the same plan
                        cpx::add_features(p, kind, placed, x);
                        cuda::add_features(at, kind, placed_there, x_there);
                        same("x", x, x_there);
                        cpx::add_features_backward(p, kind, dx, placed);
                        cuda::add_features_backward(at, kind, dx_there, placed_there);
                        same("gradients of deepstack", exchange(plan.transposed(), placed, threads),
                             exchange(plan.transposed(), placed_there, comm));
                        cpx::put_features_backward(p, kind, dx, placed);
                        cuda::put_features_backward(at, kind, dx_there, placed_there);
                        same("gradients of features", exchange(plan.transposed(), placed, threads),
                             exchange(plan.transposed(), placed_there, comm));
                        same("gradients of x", dx, dx_there);
                        if (rank == 0) moved += b.items.rows(kind);
                    }
                });
                for (std::string const& problem : problems) REQUIRE(problem == "");
            }
        CHECK(moved > 100);
    }

    TEST_CASE("rows and features that are too few are refused before any is put") {
        if (!has_gpus()) return;
        cpx::threads::run(1, [&](cpx::threads& threads) {
            cuda::stream const stream;
            threads_on_gpu comm(threads, stream);
            auto const b = media_writer().text(3).image(4, 4).text(2).end().done();
            auto ids = cpx::make_tensor<index_t>(cpx::shard(b.batch, cpx::sequential<>(1)), comm, 1);
            ids.write(b.ids);
            auto const p = cpx::mrope_positions(b.items, ids, placeholders, comm);
            cuda::placeholder_rows const at(p, comm.memory());
            auto const kind = media_kind::image;
            auto x = cpx::make_tensor<float>(p.sharding(), comm, 4);
            auto f = cpx::make_tensor<float>(p.features(kind), comm, 4);
            auto const first = [](auto& of, index_t rows) {
                return cpx::sharded(cpx::rows<float>(of.data().data(), rows, 4), of.sharding(), 0, of.memory());
            };
            auto few = first(x, 8);
            auto one = first(f, 1);
            rejects({"cuda::put_features: shape of x: expected (9, 4), got (8, 4)"},
                    [&] { cuda::put_features(at, kind, f, few); });
            rejects({"cuda::add_features: shape of features: expected (4, 4), got (1, 4)"},
                    [&] { cuda::add_features(at, kind, one, x); });
            rejects({"cuda::put_features_backward: shape of features"},
                    [&] { cuda::put_features_backward(at, kind, x, one); });
            rejects({"cuda::add_features_backward: shape of x"},
                    [&] { cuda::add_features_backward(at, kind, few, f); });
        });
    }
}
