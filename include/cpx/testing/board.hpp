// SPDX-License-Identifier: Apache-2.0
// Where ranks leave what a test has found, also ranks that are processes of their own.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/plan/identity.hpp>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>

namespace cpx::testing::detail {

/// What a rank has to say: what is wrong, as a duty and as a courtesy.
struct verdict {
    std::string duty, courtesy;
};

/// Where ranks leave their verdicts for the process that has started them: memory that it shares with its children.
class board {
public:
    static constexpr int most_ranks = 1024;
    enum state { absent, begun, ended, not_asked };

    board()
        : notes_(static_cast<note*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
        require(notes_ != MAP_FAILED, "testing", "mmap", "memory", "none");
    }
    board(board const&) = delete;
    board& operator=(board const&) = delete;
    ~board() { ::munmap(notes_, size); }

    void clear() { std::memset(static_cast<void*>(notes_), 0, size); }
    void begin(int rank) {
        require(rank >= 0 && rank < most_ranks, "testing", "rank", "0 to 1023", rank);
        notes_[rank].progress = begun;
    }
    void end(int rank, verdict const& v) {
        identity::set(notes_[rank].duty, v.duty);
        identity::set(notes_[rank].courtesy, v.courtesy);
        notes_[rank].progress = ended;
    }
    void leave_out(int rank) { notes_[rank].progress = not_asked; }
    /// Returns whether ranks have been asked nothing.
    bool left_out() const {
        return std::any_of(notes_, notes_ + most_ranks, [](note const& n) { return n.progress == not_asked; });
    }
    /// Returns what ranks have said, each after its name. `thrown`: why none has run, if so.
    verdict read(std::string const& thrown) const {
        verdict all;
        bool any = false;
        auto const add = [](std::string& text, int rank, std::string_view what) {
            if (what.empty()) return;
            text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": ";
            text += what;
        };
        for (int rank = 0; rank < most_ranks; ++rank) {
            any = any || notes_[rank].progress != absent;
            if (notes_[rank].progress == begun)
                for (auto* text : {&all.duty, &all.courtesy}) add(*text, rank, "it did not come to its end");
            add(all.duty, rank, notes_[rank].duty.data());
            add(all.courtesy, rank, notes_[rank].courtesy.data());
        }
        if (!any) all.duty = all.courtesy = "no rank has run" + (thrown.empty() ? "" : ": " + thrown);
        return all;
    }

private:
    struct note {
        state progress;
        std::array<char, 500> duty, courtesy;
    };
    static constexpr std::size_t size = sizeof(note) * most_ranks;
    note* notes_;
};

} // namespace cpx::testing::detail
