// SPDX-License-Identifier: Apache-2.0
// Images and videos: positions, and rows of features at their placeholders.
#include "positions.hpp"
#include "comm.hpp"
#include "module.hpp"
#include "numbers.hpp"

#include <cpx/ops/vision.hpp>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>

using namespace nanobind::literals;

namespace binding {

namespace {

class positions_on_host final : public positions_of_rank {
public:
    explicit positions_on_host(placed_rows rows) : rows_(std::move(rows)) {}

    placed_rows const& rows() const override { return rows_; }
    std::vector<index_t> deltas(communicator& comm) const override {
        char const* const where = "mrope_positions";
        call const now(where, comm);
        auto transport = comm.host(where);
        return rows_.visit([&](auto const& at) { return at.deltas(transport); });
    }
    void run(feature_step step, char const* where, cpx::media_kind kind, nb::handle x_,
             nb::handle features_) const override {
        bool const back = goes_back(step);
        auto const given = nb::borrow(x_), other = nb::borrow(features_);
        array const x =
            step == feature_step::add_backward ? read(where, "dx", given) : written(where, back ? "dx" : "x", given);
        array const features = back ? written(where, "dfeatures", other) : read(where, "features", other);
        with_number(x, [&]<class T>(of_type<T>) {
            auto const rows = rows_to<T>(x), of_features = rows_to<T>(features);
            nb::gil_scoped_release const free;
            rows_.visit([&](auto const& at) { run_step(step, at, kind, rows, of_features, cpx::host_memory()); });
        });
    }

private:
    placed_rows rows_;
};

/// Positions, and the communicator of ranks on devices that made them.
class positions_value {
public:
    positions_value(cpx::media const& m, any_layout const& sharding, nb::object ids_,
                    std::shared_ptr<communicator> comm, cpx::media_tokens const& tokens) {
        if (auto* const there = comm->on_device()) {
            made_ = there->place(m, sharding, ids_, tokens);
            comm_ = std::move(comm);
            return;
        }
        char const* const where = "mrope_positions";
        array const ids = read(where, "ids", ids_);
        with_type<std::int64_t, std::int32_t>(ids, [&]<class T>(of_type<T>) {
            auto const list = rows_of<T>(ids);
            call const now(where, *comm);
            auto transport = comm->host(where);
            made_ = std::make_unique<positions_on_host>(place(m, sharding, list, tokens, transport));
        });
    }

    positions_of_rank const& of() const { return *made_; }
    template <class F>
    decltype(auto) visit(F&& f) const {
        return made_->rows().visit(std::forward<F>(f));
    }

private:
    std::shared_ptr<communicator> comm_;
    std::unique_ptr<positions_of_rank> made_;
};

cpx::media_kind kind_of(char const* where, std::string_view name) {
    return word<cpx::media_kind>(where, "kind", name,
                                 {{"image", cpx::media_kind::image}, {"video", cpx::media_kind::video}});
}

std::vector<cpx::media_grid> grids(char const* name, nb::object object) {
    if (object.is_none()) return {};
    if (nb::hasattr(object, "__dlpack__")) return cpx::media_grids(integers("media", name, object, 2));
    nb::object const items = items_of("media", name, "a list or an array of (time, height, width)", object);
    std::vector<index_t> all;
    for (nb::handle const item : items) {
        auto const grid = integers("media", name, item);
        if (grid.size() != 3)
            throw cpx::error("media", name, "three numbers of every item: time, height, width",
                             std::to_string(grid.size()));
        all.insert(all.end(), grid.begin(), grid.end());
    }
    return cpx::media_grids(all);
}

cpx::media make_media(nb::object images, nb::object videos, std::string_view rule, index_t merge,
                      index_t tokens_per_second, std::vector<double> seconds) {
    using r = cpx::mrope_rule;
    auto const meaning = word<r>("media", "rule", rule,
                                 {{"qwen3_vl", r::qwen3_vl},
                                  {"qwen2_vl", r::qwen2_vl},
                                  {"qwen2_5_vl", r::qwen2_5_vl},
                                  {"qwen2_5_vl_whole_seconds", r::qwen2_5_vl_whole_seconds},
                                  {"qwen2_5_vl_spatial_advance", r::qwen2_5_vl_spatial_advance}});
    return cpx::media(grids("images", images), grids("videos", videos),
                      {meaning, merge, tokens_per_second, std::move(seconds)});
}

cpx::media_tokens tokens_of(std::optional<index_t> image, std::optional<index_t> video) {
    return {image.value_or(cpx::media_tokens::none), video.value_or(cpx::media_tokens::none)};
}

auto positions_of_batch(cpx::media const& m, cpx::thd const& batch, nb::object ids, std::optional<index_t> image,
                        std::optional<index_t> video) {
    auto p = cpx::mrope_positions(m, batch, integers("mrope_positions", "ids", ids, 2), tokens_of(image, video));
    auto const count = static_cast<std::size_t>(batch.tokens());
    return std::pair(to_numpy(std::move(p.axes), {3, count}), to_numpy(std::move(p.deltas)));
}

any_layout features(positions_value const& p, std::string_view name) {
    auto const kind = kind_of("features", name);
    return p.visit([&]<class S>(cpx::sharded_positions<S> const& at) -> any_layout {
        std::string const text = "features of " + std::string(name) + "s by placeholder";
        if constexpr (S::every_row)
            return {any_rows(at.features(kind), text)};
        else
            return {any_tokens(at.features(kind), text)};
    });
}

any_layout by_item(cpx::media const& m, std::string_view name, nb::object ranks) {
    char const* const where = "features_by_item";
    auto const kind = kind_of(where, name);
    std::string const text = "features of " + std::string(name) + "s by item";
    if (nb::isinstance<nb::int_>(ranks))
        return {any_tokens(cpx::features_by_item(m, kind, nb::cast<int>(ranks)), text)};
    return {any_tokens(cpx::features_by_item(m, kind, integers(where, "frames", ranks)), text)};
}

} // namespace

void bind_positions(nb::module_& m) {
    nb::class_<cpx::media>(m, "media", R"(All images and videos of a batch, in its order; every rank has the same.

images, videos: their grids (time, height, width) in patches, as image_grid_thw and video_grid_thw: (n, 3).)")
        .def(
            "__init__",
            [](cpx::media* self, nb::object images, nb::object videos, std::string_view rule, index_t merge,
               index_t tokens_per_second, std::vector<double> seconds) {
                new (self) cpx::media(make_media(images, videos, rule, merge, tokens_per_second, std::move(seconds)));
            },
            "images"_a.none() = nb::none(), "videos"_a.none() = nb::none(), "rule"_a = "qwen3_vl", "merge"_a = 2,
            "tokens_per_second"_a = 2, "seconds"_a = std::vector<double>(),
            "rule: how positions go on behind media, of \"qwen3_vl\" (and Qwen3.5), \"qwen2_vl\", \"qwen2_5_vl\", "
            "\"qwen2_5_vl_whole_seconds\" and \"qwen2_5_vl_spatial_advance\". merge: patches a side of one row of "
            "features. seconds: a video, of Qwen2.5-VL.")
        .def(
            "rows", [](cpx::media const& of, std::string_view kind) { return of.rows(kind_of("media", kind)); },
            "kind"_a, "Returns how many rows of features a kind has: how many placeholders.")
        .def(
            "batch", [](cpx::media const& of, std::string_view kind) { return of.batch(kind_of("media", kind)); },
            "kind"_a, "Returns the rows of a kind's features as a batch: every frame is a sequence.")
        .def_prop_ro("empty", &cpx::media::empty, "Whether there is neither an image nor a video.");

    nb::class_<positions_value>(m, "Positions", "Positions of one rank's rows, and which of them hold placeholders.")
        .def_prop_ro(
            "axes",
            [](positions_value const& p) {
                return p.visit([](auto const& at) {
                    auto const axes = at.axes();
                    auto const count = static_cast<std::size_t>(axes.width());
                    return to_numpy({axes.data(), axes.data() + 3 * axes.width()}, {3, count});
                });
            },
            "(3, rows) int64: the axes time, height and width.", nb::rv_policy::move)
        .def(
            "placeholders",
            [](positions_value const& p, std::string_view kind) {
                return to_numpy(
                    p.visit([&](auto const& at) { return at.placeholders(kind_of("placeholders", kind)); }));
            },
            "kind"_a, "Returns the rank's rows that hold placeholders of a kind, ascending.")
        .def("features", features, "kind"_a,
             "Returns the sharding of a kind's features by placeholder: where `relayout` brings them.")
        .def(
            "deltas",
            [](positions_value const& p, nb::handle comm) {
                if (!nb::isinstance<communicator>(comm))
                    throw cpx::error("mrope_positions", "comm", "what cpx.run hands to a rank",
                                     nb::cast<std::string>(comm.type().attr("__name__")));
                return to_numpy(p.of().deltas(nb::cast<communicator&>(comm)));
            },
            nb::sig("def deltas(self, comm: Communicator) -> numpy.typing.NDArray[numpy.int64]"), "comm"_a.none(),
            "Returns for every sequence by how much the position of a token decoded behind it differs from its number "
            "in the sequence. Collective.");

    m.def(
        "mrope_positions",
        [](cpx::media const& of, any_layout const& sharding, nb::object ids, std::shared_ptr<communicator> comm,
           std::optional<index_t> image, std::optional<index_t> video) {
            return positions_value(of, sharding, ids, std::move(comm), tokens_of(image, video));
        },
        "media"_a, "sharding"_a, "ids"_a, "comm"_a, "image"_a.none() = nb::none(), "video"_a.none() = nb::none(),
        R"(Returns the positions of this rank's rows: bitwise those of the whole batch, on any sharding. Collective.

ids: (rows,) int64 or int32, token ids of the rank's rows, where ranks have their arrays: from devices the host reads
them; image, video: the ids of placeholders. Ranks exchange counts of placeholders, no ids.)");
    m.def("batch_mrope_positions", positions_of_batch, "media"_a, "batch"_a, "ids"_a, "image"_a.none() = nb::none(),
          "video"_a.none() = nb::none(),
          "Returns (axes, deltas) of a whole batch, token by token: (3, tokens) and (sequences,) int64.");
    m.def("features_by_item", by_item, "media"_a, "kind"_a, "ranks"_a,
          "Returns the sharding in which rank r has made the features of the next frames: of as many on all ranks, or, "
          "of a list in place of their number, of ranks[r].");
    auto const bind = [&](char const* name, feature_step step, char const* first, char const* second,
                          char const* text) {
        bool const back = goes_back(step);
        m.def(
            name,
            [=](positions_value const& p, std::string_view kind, nb::object a, nb::object b) {
                p.of().run(step, name, kind_of(name, kind), back ? a : b, back ? b : a);
            },
            "positions"_a, "kind"_a, nb::arg(first), nb::arg(second), text);
    };
    bind("put_features", feature_step::put, "features", "x",
         "Replaces the rows of x at the placeholders of a kind by features, which are sharded as "
         "positions.features(kind).");
    bind("put_features_backward", feature_step::put_backward, "dx", "dfeatures",
         "Moves the gradients of features out of dx, whose rows become 0, to dfeatures.");
    bind("add_features", feature_step::add, "features", "x", "Adds features to the rows of x at their placeholders.");
    bind("add_features_backward", feature_step::add_backward, "dx", "dfeatures",
         "Copies the gradients of features that were added from dx, which stays, to dfeatures.");
}

} // namespace binding
