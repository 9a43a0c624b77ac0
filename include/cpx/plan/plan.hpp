// SPDX-License-Identifier: Apache-2.0
// Who sends which rows and columns to whom, for one rank.
#pragma once

#include <cpx/core/size.hpp>
#include <cpx/plan/identify.hpp>
#include <cpx/plan/run_list.hpp>

#include <algorithm>
#include <vector>

namespace cpx {

/// One message: the rectangle of some rows and some columns, in row-major order.
///
/// Both ends list the same number of runs with the same counts, each with its own places. No columns: whole rows.
struct message {
    int peer = 0;
    run_list rows;
    std::vector<run> columns;
    friend bool operator==(message const&, message const&) = default;
};

/// What a plan does: moves every place of the source to one of the target; copies them to one or more; adds those that
/// go to the same place; or selects, because several places of the source, or of the target, are replicas of each
/// other.
enum class flow { moves, copies, sums, selects };

/// All that one rank sends and receives in one exchange: at most one message a peer.
///
/// A message to itself stands for the rows that stay; they are copied once, never sent. Messages ascend by peer.
/// Widths are elements a row; 0 means that the plan moves whole rows of any width.
/// Made by `relayout`, `halo`, `carry`, or `transposed` from another plan.
struct plan {
    int rank = 0;
    index_t source_rows = 0, target_rows = 0;
    index_t source_width = 0, target_width = 0;
    std::vector<message> sends, receives;
    flow kind = flow::moves;
    identity id;
    bool local = false; ///< no rank sends anything, whatever the batch: ranks need not agree
    // What the identity sums up, so that ranks that disagree find the first number that differs.
    thd batch;
    detail::settings source_settings, target_settings;

    int ranks() const { return static_cast<int>(id.numbers[identity::ranks]); }
    /// Returns a 64-bit summary that is equal on all ranks whose plans fit each other.
    std::uint64_t fingerprint() const { return id.fingerprint(); }

    /// Returns the messages to other ranks.
    index_t messages() const {
        index_t count = 0;
        for (message const& m : sends) count += m.peer != rank;
        return count;
    }
    /// Returns the rows of which all or some columns leave this rank.
    index_t sent_rows() const {
        index_t count = 0;
        for (message const& m : sends) count += m.peer != rank ? total(m.rows) : 0;
        return count;
    }
    /// Returns the elements that leave this rank; `width` is the elements a row if the plan moves whole rows.
    index_t sent_elements(index_t width, caller here = caller::here()) const {
        index_t whole_rows = 0, elements = 0;
        for (message const& m : sends)
            if (m.peer != rank)
                (m.columns.empty() ? whole_rows : elements) += total(m.rows) * std::max<index_t>(1, total(m.columns));
        return elements + detail::product("sent_elements", "elements", {whole_rows, width}, here);
    }
    /// Returns whether every place of the target receives something; if not, an exchange fills it with zeros first.
    bool covers_target() const { return covers(receives, target_rows, target_width); }
    /// Returns whether every place of the source goes to one of a target, so that what comes back covers the source.
    bool covers_source() const { return kind != flow::copies && covers(sends, source_rows, source_width); }

    /// Returns the plan that moves everything back: the backward of this one.
    ///
    /// Where this plan copies a place of the source to several ranks, the transposed plan adds what they hold in rank
    /// order, so that the sum has the same bits whatever the timing.
    plan transposed() const {
        flow const back = kind == flow::copies ? flow::sums : kind == flow::sums ? flow::copies : kind;
        return {.rank = rank,
                .source_rows = target_rows,
                .target_rows = source_rows,
                .source_width = target_width,
                .target_width = source_width,
                .sends = receives,
                .receives = sends,
                .kind = back,
                .id = id.transposed(kind == flow::moves),
                .local = local,
                .batch = batch,
                .source_settings = target_settings,
                .target_settings = source_settings};
    }

    friend bool operator==(plan const&, plan const&) = default;

private:
    static bool covers(std::vector<message> const& messages, index_t rows, index_t width) {
        index_t const whole = width ? width : 1;
        index_t cells = 0;
        for (message const& m : messages) cells += total(m.rows) * (m.columns.empty() ? whole : total(m.columns));
        return cells == rows * whole;
    }
};

} // namespace cpx
