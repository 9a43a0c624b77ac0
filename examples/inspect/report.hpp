// SPDX-License-Identifier: Apache-2.0
// What inspect found out about a sharding and a plan, as plain numbers that text, JSON and picture show alike.
#pragma once

#include "common/sharding_options.hpp"

#include <optional>

namespace inspect {

using cpx::index_t;
using cpx::range;

/// Stands for a source rank where a row is put together from the heads of several ranks.
inline constexpr int several = -1;

/// Global rows, and the rank that holds them before the exchange.
struct run {
    range rows;
    int source = 0;
};

/// What one rank holds, in local order. Runs are maximal: neighbours differ in source or leave a gap.
struct lane {
    std::vector<run> runs;
    std::vector<index_t> cu_seqlens; ///< where the segments begin in local rows, and the number of rows

    index_t rows() const { return cu_seqlens.back(); }
    void add(run next) {
        bool const extends =
            !runs.empty() && runs.back().rows.last == next.rows.first && runs.back().source == next.source;
        if (extends)
            runs.back().rows.last = next.rows.last;
        else
            runs.push_back(next);
    }
};

/// Who sends how many rows to whom.
struct movement {
    std::vector<lane> after;                    ///< one a rank
    std::vector<std::vector<index_t>> rows;     ///< rows[i][j]: held by rank i, needed by rank j
    index_t needed = 0, sent = 0, messages = 0; ///< needed: all of `rows`; sent: without the rows that stay
    index_t bound = 0;                          ///< the rows that no exchange can do without
};

struct report {
    cpx::thd batch;
    int ranks = 1;
    std::string from, to;     ///< the shardings in words
    std::vector<lane> before; ///< one a rank
    std::optional<movement> plan;
};

template <cpx::any_sharding From>
std::vector<lane> lanes_before(From const& from) {
    std::vector<lane> lanes;
    for (int rank = 0; rank < from.ranks(); ++rank) {
        lane held{{}, cpx::offsets(cpx::segments(from, rank))};
        from.for_each_piece(rank, [&](range rows) { held.add({rows, rank}); });
        lanes.push_back(std::move(held));
    }
    return lanes;
}

template <cpx::any_sharding From, cpx::any_sharding To>
std::vector<lane> lanes_after(From const& from, To const& to) {
    bool const joins_heads = !from.sections().empty() && to.sections().empty();
    std::vector<lane> lanes;
    for (int rank = 0; rank < to.ranks(); ++rank) {
        lane held{{}, cpx::offsets(cpx::segments(to, rank))};
        index_t hint = 0;
        to.for_each_piece(rank, [&](range rows) {
            if constexpr (From::every_row)
                held.add({rows, joins_heads ? several : rank});
            else
                from.for_each_holder(rows, hint, [&](int holder, range common) { held.add({common, holder}); });
        });
        lanes.push_back(std::move(held));
    }
    return lanes;
}

template <cpx::any_sharding From, cpx::any_sharding To>
movement make_movement(From const& from, To const& to) {
    movement m{lanes_after(from, to), {}, 0, 0, 0, cpx::lower_bound(from, to).rows};
    std::vector<index_t> const counts = cpx::traffic(from, to);
    for (auto row = counts.begin(); row != counts.end(); row += from.ranks())
        m.rows.emplace_back(row, row + from.ranks());
    for (std::size_t i = 0; i < m.rows.size(); ++i)
        for (std::size_t j = 0; j < m.rows.size(); ++j) {
            m.needed += m.rows[i][j];
            m.messages += i != j && m.rows[i][j] > 0;
            m.sent += i != j ? m.rows[i][j] : 0;
        }
    return m;
}

/// Makes the report on `from`, and on the plan from there to `to` if there is one. Pure arithmetic: nothing moves.
inline report make_report(cpx::thd const& batch, int ranks, examples::cut_spec cut, examples::sharding_spec const& from,
                          std::optional<examples::sharding_spec> const& to) {
    report r{batch, ranks, examples::describe(from), to ? examples::describe(*to) : "", {}, {}};
    examples::with_sharding(batch, from, cut, ranks, [&](auto const& source) {
        r.before = lanes_before(source);
        if (!to) return;
        examples::with_sharding(batch, *to, cut, ranks,
                                [&](auto const& target) { r.plan = make_movement(source, target); });
    });
    return r;
}

/// Returns "3 rows", "1 row".
inline std::string count(index_t n, std::string const& noun) {
    return std::to_string(n) + ' ' + noun + (n == 1 ? "" : "s");
}

/// Returns "zigzag over sequence ARROW sequential over batch".
inline std::string title(report const& r, std::string const& arrow) {
    return r.from + (r.plan ? ' ' + arrow + ' ' + r.to : "");
}

/// Returns "2 ranks, 20 rows in 2 sequences; sent 10 of 20 rows in 2 messages, lower bound 10".
inline std::string summary(report const& r) {
    std::string text = count(r.ranks, "rank") + ", " + count(r.batch.tokens(), "row") + " in " +
                       count(r.batch.sequences(), "sequence");
    if (!r.plan) return text;
    return text + "; sent " + std::to_string(r.plan->sent) + " of " + count(r.plan->needed, "row") + " in " +
           count(r.plan->messages, "message") + ", lower bound " + std::to_string(r.plan->bound);
}

} // namespace inspect
