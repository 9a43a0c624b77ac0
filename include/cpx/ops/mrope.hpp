// SPDX-License-Identifier: Apache-2.0
// Positions of text, images and videos on any sharding: ranks exchange the numbers of their placeholders.
#pragma once

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/tensor.hpp>
#include <cpx/ops/local/shape.hpp>
#include <cpx/plan/mrope.hpp>
#include <cpx/plan/relayout.hpp>
#include <cpx/transport/exchange.hpp>
#include <cpx/transport/gather.hpp>

namespace cpx {

namespace detail {

struct positions_maker;

/// Returns the numbers of all ranks, of rank r from `begins[r]` to `begins[r + 1]`. Between devices they go through
/// their memory, for which the host waits. Collective. `id`: what ranks compare, of `sharding`.
template <class T, any_sharding S, any_transport Comm>
std::vector<T> gather_numbers(identity const& id, S const& sharding, std::vector<T> const& mine,
                              std::vector<index_t> begins, Comm& comm, caller here) {
    char const* const where = "mrope_positions";
    auto all = zeros<T>(where, {begins.back()}, here);
    if constexpr (transport<Comm>) {
        for (index_t& begin : begins) begin *= static_cast<index_t>(sizeof(T));
        gather(comm, id, mine.data(), all.data(), begins, here);
    } else {
        std::vector<owned_piece> pieces;
        for (int r = 0; r < comm.ranks(); ++r) {
            auto const begin = begins.begin() + r;
            pieces.push_back({{begin[0], begin[1]}, r});
        }
        thd const numbers({0, begins.back()});
        plan p = relayout(piecewise<>(comm.ranks(), numbers, pieces, here), replicated<>(comm.ranks(), numbers, here),
                          comm.rank(), here);
        p.id = id, p.batch = sharding.batch();
        auto const memory = comm.memory();
        auto own = memory.template zeros<T>(where, {std::ssize(mine)}, here),
             gathered = memory.template zeros<T>(where, {begins.back()}, here);
        memory.write(own.data(), std::span<T const>(mine), here);
        exchange_rows(p, rows<T const>(own.data(), std::ssize(mine), 1), rows<T>(gathered.data(), begins.back(), 1),
                      comm, here, where);
        comm.wait(here); // with its deadline, which `read` has not
        all = memory.read(std::span<T const>(gathered.data(), all.size()), here);
    }
    return all;
}

} // namespace detail

/// Positions of one rank's rows, and which of them hold placeholders. Made once a batch, for all layers and stages.
template <any_sharding S>
class sharded_positions {
public:
    /// How rows of features are sharded that replace placeholders: all to every rank where every rank has every row.
    using features_sharding = std::conditional_t<S::every_row, replicated<>, piecewise<by_placeholder>>;

    S const& sharding() const { return sharding_; }
    int rank() const { return rank_; }
    /// Returns (3, rows): the axes time, height and width.
    rows<index_t const> axes() const { return {axes_.data(), 3, std::ssize(axes_) / 3}; }
    /// Returns the rank's rows that hold placeholders of a kind, ascending, as its rows of features.
    std::vector<index_t> const& placeholders(media_kind kind) const { return of(kind).rows; }
    /// Returns which ranks want which rows of a kind's features, in the order of the batch.
    features_sharding const& features(media_kind kind) const { return of(kind).features; }

    /// Returns for every sequence by how much the position of a token that is decoded behind it differs from the
    /// token's number in the sequence. Collective; sends nothing unless positions may overrun those behind them, which
    /// only those of `qwen2_5_vl_spatial_advance` do.
    template <any_transport Comm>
    std::vector<index_t> deltas(Comm& comm, caller here = caller::here()) const {
        if (!overruns_ || S::every_row) return deltas_;
        index_t const count = std::ssize(deltas_);
        std::vector<index_t> begins;
        for (int r = 0; r <= comm.ranks(); ++r) begins.push_back(r * count);
        auto const all = detail::gather_numbers(detail::identify("mrope deltas", sharding_, sharding_), sharding_,
                                                deltas_, std::move(begins), comm, here);
        std::vector<index_t> most = deltas_;
        for (index_t i = 0; i < std::ssize(all); ++i) {
            index_t& delta = most[static_cast<std::size_t>(i % count)];
            delta = std::max(delta, all[static_cast<std::size_t>(i)]);
        }
        return most;
    }

private:
    struct of_kind {
        std::vector<index_t> rows;
        features_sharding features;
    };
    of_kind const& of(media_kind kind) const { return kind == media_kind::image ? images_ : videos_; }

    sharded_positions(S sharding, int rank, std::vector<index_t> axes, of_kind images, of_kind videos)
        : sharding_(std::move(sharding)), rank_(rank), axes_(std::move(axes)), images_(std::move(images)),
          videos_(std::move(videos)) {}

    S sharding_;
    int rank_;
    std::vector<index_t> axes_, deltas_;
    of_kind images_, videos_;
    bool overruns_ = false;

    friend detail::positions_maker; // a class: clang++ 16 knows no function with constraints as a friend
};

namespace detail {

/// Hashes what all ranks must know of media.
inline std::uint64_t hash_of(media const& m) {
    std::uint64_t hash = mix(0, static_cast<std::uint64_t>(m.options().rule));
    for (media_kind const kind : {media_kind::image, media_kind::video})
        for (media_frame const& f : m.frames(kind)) hash = mix_all(hash, std::array{f.row, f.advance, f.time, f.width});
    return hash;
}

/// Returns the counts of all segments of all ranks. Ranks send theirs of the kinds of which there are grids.
template <any_sharding S, any_transport Comm>
std::vector<media_count> gather_counts(media const& m, S const& sharding, std::vector<media_count> const& own,
                                       Comm& comm, caller here) {
    std::vector<std::int32_t media_count::*> kinds;
    if (m.rows(media_kind::image) > 0) kinds.push_back(&media_count::image);
    if (m.rows(media_kind::video) > 0) kinds.push_back(&media_count::video);
    index_t const width = std::ssize(kinds);
    std::vector<index_t> begins{0};
    for (int r = 0; r < sharding.ranks(); ++r)
        begins.push_back(begins.back() + width * std::ssize(segments(sharding, r, here)));
    auto const count = begins.back() / width;
    auto sent = zeros<std::int32_t>("mrope_positions", {std::ssize(own), width}, here);
    auto next = sent.begin();
    for (media_count const& of : own)
        for (auto const kind : kinds) *next++ = of.*kind;
    identity id = identify("media counts", sharding, sharding);
    id[identity::parameter] = hash_of(m);
    auto const got = gather_numbers(id, sharding, sent, std::move(begins), comm, here);
    auto all = zeros<media_count>("mrope_positions", {count}, here);
    auto from = got.begin();
    for (media_count& of : all)
        for (auto const kind : kinds) of.*kind = *from++;
    return all;
}

/// Makes positions of what has been computed of the rank's rows, of images and then of videos.
struct positions_maker {
    template <any_sharding S>
    static sharded_positions<S> make(media const& m, S const& sharding, int rank, std::vector<index_t> axes,
                                     std::vector<index_t> (&held)[2], media_places& places, caller here) {
        auto const features = [&](media_kind kind, std::vector<owned_piece> const& pieces) {
            if constexpr (S::every_row)
                return replicated<>(sharding.ranks(), m.batch(kind), here);
            else
                return piecewise<by_placeholder>(sharding.ranks(), m.batch(kind), pieces, here);
        };
        sharded_positions<S> result(sharding, rank, std::move(axes),
                                    {std::move(held[0]), features(media_kind::image, places.images)},
                                    {std::move(held[1]), features(media_kind::video, places.videos)});
        result.deltas_ = std::move(places.deltas);
        result.overruns_ = m.overruns();
        return result;
    }
};

} // namespace detail

/// Computes the positions of this rank's rows: bitwise those of the whole batch, on any sharding.
///
/// ids: (rows, 1) of any sharding, token ids, or kinds with `token_types`, in the memory of the transport's ranks; from
/// a device's, one behind the other, the host reads them, and waits, as it does for the ranks: `cuda::mrope_positions`
/// does not, and knows no `features`. Tokens behind the valid length of a sequence count on as text, whatever their
/// ids.
/// Collective: every rank sends every other the numbers of placeholders of its segments, an int32 for each of the two
/// kinds that the batch has. A batch without media sends nothing, nor does one of which every rank holds every row.
/// Cost: O(rows of the rank, segments of all ranks, media), a search a row.
///
/// Throws `cpx::error` if ids have another shape or are another rank's; on all ranks the same one if placeholders and
/// rows of features differ in number; where they lie, that of tokens that interrupt an item or are placeholders without
/// a grid.
template <sharded_anywhere Ids, any_transport Comm>
    requires std::integral<element_of<Ids>> && std::same_as<memory_of<Ids>, rank_memory_of<Comm>>
sharded_positions<sharding_of<Ids>> mrope_positions(media const& m, Ids const& ids, media_tokens tokens, Comm& comm,
                                                    caller here = caller::here()) {
    using S = sharding_of<Ids>;
    auto const view = ids.view();
    S const& sharding = view.sharding();
    int const rank = comm.rank();
    detail::require_own("mrope_positions", "rank of the ids", view.rank(), sharding.ranks(), rank, comm.ranks(), here);
    detail::require_shape("mrope_positions", "ids", view.data(), sharding.rows(rank), 1, here);
    rows<element_of<Ids> const> list = view.data();
    std::vector<element_of<Ids>> read;
    if constexpr (!sharded_like<Ids>) {
        require(list.count() < 2 || list.stride() == 1, "mrope_positions", "stride of the ids", 1, list.stride(), here);
        comm.wait(here);
        read = view.memory().read(std::span(list.data(), static_cast<std::size_t>(list.count())), here);
        list = {read.data(), list.count(), 1};
    }
    auto const id = [&](index_t row) { return list(row, 0); };

    auto const own = segments(sharding, rank, here);
    auto counts = count_media(m, sharding.batch(), own, id, tokens, here);
    if (!S::every_row) {
        if (m.empty()) {
            index_t all = 0;
            for (int r = 0; r < sharding.ranks(); ++r) all += std::ssize(segments(sharding, r, here));
            counts.assign(static_cast<std::size_t>(all), {});
        } else
            counts = detail::gather_counts(m, sharding, counts, comm, here);
    }
    media_places places = locate_media(m, sharding, rank, counts, here);

    index_t const count = sharding.rows(rank);
    auto axes = detail::zeros<index_t>("mrope_positions", {3, count}, here);
    std::vector<index_t> held[2];
    place_rows(
        m, places, own, id, tokens, rows<index_t>(axes.data(), 3, count),
        [&](media_kind kind, index_t row, index_t) { held[kind == media_kind::video].push_back(row); },
        [&](std::size_t segment, index_t most) {
            auto const s = own[segment].sequence;
            index_t& delta = places.deltas[static_cast<std::size_t>(s)];
            if (most >= 0) delta = std::max(delta, 1 + most - sharding.batch().valid(s));
        },
        here);
    return detail::positions_maker::make(m, sharding, rank, std::move(axes), held, places, here);
}

template <class X, class Y>
detail::refused mrope_positions(X const&, Y const&, media_tokens, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: mrope_positions(media, ids, tokens, comm) wants cpx::media, a tensor of "
                                    "integers and a cpx::transport, and mrope_positions(media, batch, ids, tokens) a "
                                    "cpx::thd and all its ids; view a rank's list as sharded(rows(list, 1), sharding, "
                                    "rank)");
    return {};
}
template <class X = detail::any>
detail::refused mrope_positions(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: mrope_positions(media, ids, tokens, comm) wants, behind the ids, what tokens "
                                    "stand for media: cpx::media_tokens, or {.image = 151655}");
    return {};
}
template <class X, class Y, class Ids>
detail::refused mrope_positions(X const& first, Y const& second, Ids const&, media_tokens tokens, detail::any = {}) {
    return mrope_positions(first, second, tokens);
}
template <class X>
    requires(!integers<X>)
detail::refused mrope_positions(media const&, thd const&, X const&, media_tokens, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: mrope_positions of a whole batch from ids that are sharded, or no integers; "
                                    "give a rank's tensor of ids and a cpx::transport, and no batch");
    return {};
}

} // namespace cpx
