// SPDX-License-Identifier: Apache-2.0
// Collects the messages of one rank, in the order on which both ends agree.
#pragma once

#include <cpx/plan/plan.hpp>

namespace cpx::detail {

/// The rows of a message, added in ascending global order.
///
/// Rows that follow one another in the batch become one run, and only those: that rule looks at global rows alone, so
/// both ends of a message make the same runs.
struct joined_rows {
    std::vector<run> runs;
    index_t end = 0; ///< one past the last global row

    /// Adds the global rows `rows`, which begin at local row `first`.
    void add(index_t first, range rows) {
        if (end == rows.first && !runs.empty())
            runs.back().count += rows.size();
        else
            runs.push_back({first, rows.size()});
        end = rows.last;
    }
};

/// The sends, or the receives, of one rank while its plan is made.
class message_list {
public:
    /// `runs`: for how many of a message memory is taken at once.
    explicit message_list(int ranks, std::size_t runs = 0) : entries_(static_cast<std::size_t>(ranks)), runs_(runs) {}

    /// Adds rows to the message to or from `peer`.
    void add(int peer, index_t first, range rows) {
        joined_rows& to = entries_[static_cast<std::size_t>(peer)];
        if (to.runs.empty()) to.runs.reserve(runs_);
        to.add(first, rows);
    }

    /// Returns one past the last global row added for `peer`.
    index_t end(int peer) const { return entries_[static_cast<std::size_t>(peer)].end; }

    /// Returns the messages that are not empty, of whole rows.
    std::vector<message> finish() {
        std::vector<message> messages;
        for (std::size_t peer = 0; peer < entries_.size(); ++peer)
            if (!entries_[peer].runs.empty())
                messages.push_back({static_cast<int>(peer), std::move(entries_[peer].runs), {}});
        return messages;
    }

private:
    std::vector<joined_rows> entries_;
    std::size_t runs_;
};

} // namespace cpx::detail
