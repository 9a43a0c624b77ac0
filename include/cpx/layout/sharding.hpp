// SPDX-License-Identifier: Apache-2.0
// A layout, a scope and a cut bound to a batch: which rank holds which rows.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/refused.hpp>
#include <cpx/core/thd.hpp>
#include <cpx/layout/algorithm.hpp>

#include <limits>
#include <span>
#include <utility>
#include <vector>

namespace cpx {

/// What a layout cuts: each sequence of the batch, or the whole batch as one run, regardless of boundaries.
enum class scope { sequence, batch };

/// The most ranks of a sharding: plans list what every rank sends to every other.
inline constexpr int most_ranks = 1 << 20;

/// A group of `heads` equal heads of `width` elements in the feature axis, e.g. q = {16, 128}.
struct section {
    index_t heads = 1;
    index_t width = 1;
    friend constexpr bool operator==(section, section) = default;
};

namespace detail {

inline void require_ranks(char const* where, char const* what, int ranks, caller here) {
    require(ranks > 0 && ranks <= most_ranks, where, what, ranks > 0 ? "at most 2^20" : "at least 1", ranks, here);
}

inline void require_rank(char const* where, int rank, int ranks, caller here) {
    if (rank < 0 || rank >= ranks) // the text is made only when it is needed
        throw error(where, "rank", "0 to " + std::to_string(ranks - 1), std::to_string(rank), here);
}
/// Throws `cpx::error` unless `rank` of `ranks` is the caller's own place, `own` of `all`.
inline void require_own(char const* where, char const* what, int rank, int ranks, int own, int all, caller here) {
    auto const text = [](int r, int of) { return std::to_string(r) + " of " + std::to_string(of); };
    if (rank != own || ranks != all) throw error(where, what, text(own, all), text(rank, ranks), here);
}

/// Returns the columns of all sections. Throws `cpx::error` that names the first that has no heads or no width, or too
/// many to count.
inline index_t columns_of(char const* where, std::span<section const> sections, caller here) {
    index_t columns = 0;
    for (std::size_t i = 0; i < sections.size(); ++i) {
        auto const name = [&](char const* what) { return what + (" of section " + std::to_string(i)); };
        auto const [heads, width] = sections[i];
        index_t const most_heads = std::numeric_limits<int>::max(); // their square has a size
        if (heads < 1 || heads > most_heads)
            throw error(where, name("heads"), "1 to " + std::to_string(most_heads), std::to_string(heads), here);
        index_t const most = (size_limit - 1 - columns) / heads;
        if (width < 1 || width > most)
            throw error(where, name("width"), "1 to " + std::to_string(most), std::to_string(width), here);
        columns += heads * width;
    }
    return columns;
}

[[noreturn]] inline void no_owner(int chunk, int ranks, int owner, caller here) {
    throw error("sharding", "owner of chunk " + std::to_string(chunk), "a rank from 0 to " + std::to_string(ranks - 1),
                std::to_string(owner), here);
}
[[noreturn]] inline void not_listed(int place, int rank, int last, int chunk, caller here) {
    throw error("sharding", "chunk " + std::to_string(place) + " in the layout's list of rank " + std::to_string(rank),
                "one of the rank's after " + std::to_string(last), std::to_string(chunk), here);
}

/// What a sharding deduces where no layout is given.
struct no_layout {
    int ranks() const { return 1; }
    int chunks() const { return 1; }
    int owner(int) const { return 0; }
};

// Stand for what callers pass; nvcc does not accept lambdas in a concept.
struct takes_range {
    void operator()(range) const {}
};
struct takes_holder {
    void operator()(int, range) const {}
};

} // namespace detail

/// How a tensor is spread over the ranks. Plans and operators ask these questions and no others:
///
/// - `for_each_piece(rank, f)` calls `f(range)` with the global rows that a rank holds, ascending: its local order.
/// - `for_each_holder(rows, run, f)` calls `f(rank, range)` for all ranks that hold rows of a range. If rows have one
///   holder, the ranges ascend and tile `rows`; if every rank holds every row, each rank is given all of `rows`. `run`
///   is a hint, where to look first, and is left at the run of the last row; begin with 0.
/// - `sections()`, `heads(rank, h)`: which of the `h` heads of a section a rank holds; no sections: whole rows.
template <class S>
concept any_sharding = std::copy_constructible<S> && requires(S const s, int rank, index_t& run) {
    { s.ranks() } -> std::same_as<int>;
    { s.batch() } -> std::same_as<thd const&>;
    { s.rows(rank) } -> std::same_as<index_t>;
    { s.sections() } -> std::convertible_to<std::span<section const>>;
    { s.heads(rank, run) } -> std::same_as<range>;
    { S::every_row } -> std::convertible_to<bool>;
    s.for_each_piece(rank, detail::takes_range{});
    s.for_each_holder(range{}, run, detail::takes_holder{});
};

/// Rows sharded by tokens: every row lives on one rank, whole.
///
/// Immutable; copies share the batch. `sharding(batch, zigzag<4>{})`, or with all three choices spelled,
/// `sharding<zigzag<4>, scope::batch, aligned<64>>(batch)`; see also `shard`.
template <class P, scope Scope = scope::sequence, class Cut = balanced>
class sharding {
public:
    using layout_type = P;
    using cut_type = Cut;
    static constexpr scope cuts = Scope;
    static constexpr bool every_row = false;
    static constexpr int static_ranks = cpx::static_ranks<P>;
    static_assert(!std::same_as<P, detail::no_layout>,
                  "cpx: sharding(batch, layout) wants a cpx::thd and a layout: sharding(batch, zigzag<4>{})");

    /// Throws `cpx::error` if the layout has no ranks or gives a chunk to a rank that does not exist, or if the cut
    /// does not ascend. Cost: O(chunks), of length rules and cuts of the user's O(runs * chunks).
    explicit sharding(thd batch, P policy = {}, Cut cut = {}, caller here = caller::here())
        : batch_(std::move(batch)), policy_(policy), cut_(cut) {
        detail::require_ranks("sharding", "ranks of the layout", policy_.ranks(), here);
        if constexpr (requires { policy_.second.ranks(); }) // of by_length: also where no run of this batch takes it
            require(policy_.second.ranks() == ranks(), "sharding", "ranks of the second layout of by_length", ranks(),
                    policy_.second.ranks(), here);
        if constexpr (requires { cut_.unit(); })
            require(cut_.unit() > 0, "sharding", "unit of the cut", "at least 1", cut_.unit(), here);
        if constexpr (layout<P>) check(policy_, here);
        if constexpr (!layout<P> || !detail::ascends<Cut>)
            for (index_t i = 0; i < runs(); ++i) {
                auto const l = layout_at(policy_, run(i).size());
                if constexpr (!layout<P>) check(l, here);
                if constexpr (!detail::ascends<Cut>) check_cut(run(i), l.chunks(), here);
            }
    }

    template <class X = detail::any>
    explicit sharding(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) : sharding(unfit<X>()) {}

    int ranks() const { return policy_.ranks(); }
    thd const& batch() const { return batch_; }
    P const& policy() const { return policy_; }
    Cut const& cut() const { return cut_; }
    std::span<section const> sections() const { return {}; }
    range heads(int, index_t heads) const { return {0, heads}; }

    /// Returns the runs that are cut: the sequences, or 1.
    index_t runs() const { return Scope == scope::sequence ? batch_.sequences() : 1; }
    /// Returns the global rows of run `i`.
    range run(index_t i) const {
        if constexpr (Scope == scope::sequence)
            return {batch_.offset(i), batch_.offset(i + 1)};
        else
            return {0, batch_.tokens()};
    }

    /// Returns whether each chunk of sequence `s` surely holds rows: then its holders follow from the layout alone.
    bool fills(index_t s) const
        requires(Scope == scope::sequence && layout<P> && requires(Cut const c) { c.fills(1, index_t{1}); })
    {
        return cut_.fills(policy_.chunks(), batch_.length(s));
    }

    /// Returns whether each rank holds rows, if a sequence that fills all chunks tells; nothing if there is none.
    /// Cost: O(sequences + chunks).
    std::vector<bool> holders() const
        requires requires(sharding const s, index_t i) { s.fills(i); }
    {
        std::vector<bool> holds;
        for (index_t s = 0; s < runs() && holds.empty(); ++s)
            if (fills(s)) holds.resize(static_cast<std::size_t>(ranks()));
        if (!holds.empty())
            for (int c = 0; c < policy_.chunks(); ++c) holds[static_cast<std::size_t>(policy_.owner(c))] = true;
        return holds;
    }

    /// Returns how many rows `rank` holds. Throws `cpx::error` if there is no such rank. Cost: O(runs * chunks of the
    /// rank).
    index_t rows(int rank, caller here = caller::here()) const {
        detail::require_rank("sharding::rows", rank, ranks(), here);
        index_t count = 0;
        if constexpr (layout<P> && Scope == scope::sequence && std::same_as<Cut, balanced>) { // no piece is asked for
            std::vector<int> owned;
            list_chunks(policy_, rank, owned);
            detail::balanced_begins const begins(policy_.chunks());
            for (index_t i = 0; i < runs(); ++i) {
                auto const begin = begins.of(batch_.length(i));
                for (int const c : owned) count += begin(c + 1) - begin(c);
            }
        } else {
            for_each_piece(rank, [&](range piece) { count += piece.size(); });
        }
        return count;
    }

    template <class F>
    void for_each_piece(int rank, F&& f) const {
        std::vector<int> owned;
        auto const cut_run = [&](range rows, int chunks, auto const& begins) {
            for (int const c : owned) {
                range const piece{begin(rows, c, chunks, begins), begin(rows, c + 1, chunks, begins)};
                if (!piece.empty()) f(piece);
            }
        };
        int chunks = 0;
        detail::balanced_begins begins(1);
        for (index_t i = 0; i < runs(); ++i) {
            index_t const length = run(i).size();
            if (!layout<P> || i == 0) {
                auto const l = layout_at(policy_, length);
                list_chunks(l, rank, owned);
                if (std::exchange(chunks, l.chunks()) != l.chunks()) begins = detail::balanced_begins(l.chunks());
            }
            if constexpr (detail::ascends<Cut>) // a reciprocal serves all runs of so many chunks
                cut_run(run(i), chunks, begins.of(length));
            else
                cut_run(run(i), chunks, begins_of(run(i), chunks));
        }
    }

    template <class F>
    void for_each_holder(range rows, index_t& i, F&& f) const {
        while (!rows.empty()) {
            while (run(i).first > rows.first) --i;
            while (run(i).last <= rows.first) ++i;
            range const whole = run(i);
            range const common = intersect(rows, whole);
            auto const l = layout_at(policy_, whole.size());
            int const chunks = l.chunks();
            auto const begins = [&](int k) { return begin(whole, k, chunks); };
            int const guess = static_cast<int>(((common.first - whole.first + 1) * chunks - 1) / whole.size());
            int c = last_at_or_before(common.first, chunks, guess, begins);
            for (index_t first = common.first; first < common.last; ++c) {
                index_t last = begins(c + 1);
                if (last <= first) { // there may be more empty chunks than others
                    c = last_at_or_before(first, chunks, c + 1, begins);
                    last = begins(c + 1);
                }
                last = std::min(last, common.last);
                f(l.owner(c), range{first, last});
                first = last;
            }
            rows.first = common.last;
        }
    }

    friend bool operator==(sharding const& a, sharding const& b) {
        if constexpr (std::equality_comparable<P> && std::equality_comparable<Cut>)
            return a.policy_ == b.policy_ && a.cut_ == b.cut_ && a.batch_ == b.batch_;
        else // by what they do: rules and layouts of the user's need not be comparable
            return a.ranks() == b.ranks() && a.batch_ == b.batch_ && a.same_pieces(b);
    }

private:
    template <class X>
    static sharding const& unfit() {
        static_assert(detail::never<X> || std::same_as<P, detail::no_layout>,
                      "cpx: sharding(batch, layout) wants a cpx::thd and a layout: sharding(batch, zigzag<4>{})");
        throw;
    }
    /// Lists the chunks of a rank in memory that is there, as rules choose other ones for each run.
    static void list_chunks(layout auto const& l, int rank, std::vector<int>& owned) {
        owned.clear();
        for_each_chunk(l, rank, [&](int c) { owned.push_back(c); });
    }

    /// Returns whether every rank holds the same rows. Cost: O(runs * chunks).
    bool same_pieces(sharding const& other) const {
        for (int rank = 0; rank < ranks(); ++rank) {
            std::vector<range> mine, theirs;
            for_each_piece(rank, [&](range piece) { mine.push_back(piece); });
            other.for_each_piece(rank, [&](range piece) { theirs.push_back(piece); });
            if (mine != theirs) return false;
        }
        return true;
    }

    template <layout L>
    void check(L const& l, caller here) const {
        require(l.chunks() > 0, "sharding", "chunks of the layout", "at least 1", l.chunks(), here);
        detail::product("sharding", "tokens times chunks", {batch_.tokens(), l.chunks()}, here);
        for (int c = 0; c < l.chunks(); ++c)
            if (l.owner(c) < 0 || l.owner(c) >= ranks()) // not l.ranks(): that of a length rule's layout may be wrong
                detail::no_owner(c, ranks(), l.owner(c), here);
        if constexpr (listed_layout<L>) check_list(l, here);
    }

    /// Throws unless the chunks that the layout lists are those that it gives away.
    void check_list(listed_layout auto const& l, caller here) const {
        int listed = 0;
        for (int rank = 0; rank < ranks(); ++rank)
            for (int i = 0, last = -1, count = l.chunks(rank); i < count; ++i, ++listed) {
                int const c = l.chunk(rank, i);
                if (c <= last || c >= l.chunks() || l.owner(c) != rank) detail::not_listed(i, rank, last, c, here);
                last = c;
            }
        require(listed == l.chunks(), "sharding", "chunks in the layout's lists", l.chunks(), listed, here);
    }

    void check_cut(range rows, int chunks, caller here) const {
        for (int c = 0; c < chunks; ++c) {
            range const chunk{begin(rows, c, chunks), begin(rows, c + 1, chunks)};
            if (chunk.size() < 0 || (c == 0 && chunk.first != rows.first))
                throw error("sharding", "cut, at chunk " + std::to_string(c) + " of " + std::to_string(chunks),
                            "chunks that ascend from the first row, " + std::to_string(rows.first),
                            std::to_string(chunk.first) + " to " + std::to_string(chunk.last), here);
        }
    }

    /// Returns what says where the cut begins a chunk of a run.
    auto begins_of(range rows, int chunks) const {
        return [this, rows, chunks](int c) { return cut_.begin(c, chunks, rows.size()); };
    }
    index_t begin(range rows, int c, int chunks) const { return begin(rows, c, chunks, begins_of(rows, chunks)); }
    template <class Begins>
    index_t begin(range rows, int c, int chunks, Begins const& begins) const {
        if (c == chunks) return rows.last;
        index_t const at = begins(c);
        if constexpr (Scope == scope::sequence)
            return rows.first + cut_.snap(at, rows.size());
        else
            return snap_in_batch(cut_, batch_, at);
    }

    thd batch_;
    [[no_unique_address]] P policy_;
    [[no_unique_address]] Cut cut_;
};

template <class P, scope Scope, class Cut>
    requires(!layout_policy<P> || !cut<Cut>)
class sharding<P, Scope, Cut> {
public:
    static_assert(detail::never<P>,
                  "cpx: sharding<P> is of a layout, such as zigzag<4>, and perhaps a scope and a cut; "
                  "shard(batch, zigzag<4>{}) needs none");
    template <class... X>
    sharding(X const&...) {}
};

template <class X = detail::any>
sharding(X const& = {}, detail::any = {}, detail::any = {}) -> sharding<detail::no_layout>;

/// Returns the sharding of `batch` by a policy: `shard(batch, zigzag<4>{})`, `shard<scope::batch>(batch, ...)`.
template <scope Scope = scope::sequence, layout_policy P, cut Cut = balanced>
sharding<P, Scope, Cut> shard(thd batch, P policy, Cut cut = {}, caller here = caller::here()) {
    return sharding<P, Scope, Cut>(std::move(batch), std::move(policy), cut, here);
}
template <auto = 0, class = void, class = void, class X = detail::any> // whatever is spelled: a number, a layout
detail::refused shard(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: shard(batch, layout) wants a cpx::thd and a layout, whose ranks(), chunks() and owner(chunk) "
                  "return int, or a rule that chooses layouts; shard<scope::batch>(batch, layout, cut)");
    return {};
}
template <layout_policy P, class X>
detail::refused shard(X const&, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: shard takes the layout as an argument: shard(batch, zigzag<4>{})");
    return {};
}
template <scope = scope::sequence, class P>
detail::refused shard(std::initializer_list<index_t>, P const&, detail::any = {}) {
    static_assert(detail::never<P>, "cpx: shard wants a cpx::thd of these offsets: shard(thd({0, 7, 20}), layout)");
    return {};
}

} // namespace cpx
