// SPDX-License-Identifier: Apache-2.0
// Which ranks of this host are alive and how far they have come.
#pragma once

#include <cpx/core/process.hpp>
#include <cpx/plan/difference.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace cpx {

namespace detail {

/// Returns the name of the page of the ranks that share `id`; `again` tells communicators of one id from each other.
inline std::string page_name(std::span<char const> id, int again = 0) {
    std::uint64_t hash = 14695981039346656037ull;
    for (char const c : id) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    return "cpx." + std::to_string(hash) + '.' + std::to_string(again);
}

} // namespace detail

/// A page that the ranks of one host share, in which each says that it has come and how many calls it has begun.
///
/// NCCL tells that an operation does not end, but not whose fault that is. Here every rank of the host writes its
/// process, how many calls it has begun and, when it leaves, whether it failed or gave up because others did. So the
/// others can name the ranks that are dead, have failed or have not come. Ranks of other hosts are not seen. Nothing
/// waits here, and no data moves.
class roll_call {
public:
    /// Opens the page `name` (letters, digits, dots), the same on every rank of the group. `numbers`: the numbers that
    /// errors give its ranks.
    roll_call(std::string const& name, int rank, std::vector<int> numbers)
        : name_('/' + name + '.' + std::to_string(::getuid())), rank_(rank), numbers_(std::move(numbers)) {
        int const file = ::shm_open(name_.c_str(), O_CREAT | O_RDWR, 0600);
        require(file >= 0, "roll_call", ("shm_open " + name_).c_str(), "success", std::strerror(errno));
        bool const sized = ::ftruncate(file, static_cast<off_t>(bytes())) == 0;
        void* const page = sized ? ::mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
        ::close(file);
        require(page != MAP_FAILED, "roll_call", ("mmap " + name_).c_str(), "success", std::strerror(errno));
        entries_ = static_cast<entry*>(page);
        for (int r = 0; r < ranks(); ++r)
            before_.push_back(alive(r) ? person{} : person{entries_[r].process.load(), entries_[r].began.load()});
        mine().calls.store(0);
        for (auto& [after, plan] : mine().plans) after.store(0);
        mine().fate.store(fate::well);
        mine().began.store(detail::look_at(::getpid()).began);
        mine().process.store(static_cast<std::int64_t>(::getpid()));
    }
    roll_call(roll_call const&) = delete;
    roll_call& operator=(roll_call const&) = delete;
    ~roll_call() {
        if (owned()) {
            mine().process.store(gone);
            if (here_.empty()) ::shm_unlink(name_.c_str()); // the next group of this name begins anew
        }
        ::munmap(entries_, bytes());
    }

    /// Says that every rank has come. A rank whose entry is empty by now, or that of an earlier group, is on another
    /// host. A later group of the same name gets a page of its own.
    void everyone_is_here() {
        ::shm_unlink(name_.c_str());
        for (int r = 0; r < ranks(); ++r) here_.push_back(!earlier(r)); // though it may be dead by now
    }
    /// Returns whether all ranks are on this host, once everyone has come.
    bool all_on_this_host() const { return std::ranges::find(here_, false) == here_.end(); }
    void begin_call() { mine().calls.fetch_add(1); }
    /// Says by which plan this rank moves rows from its next call on.
    void runs(identity const& id) {
        std::uint64_t const calls = mine().calls.load();
        if (std::exchange(set_after_, calls) != calls) last_ = (last_ + 1) % mine().plans.size();
        auto const words = std::bit_cast<plan_words>(id);
        auto& [after, plan] = mine().plans[last_];
        after.store(0);
        for (std::size_t i = 0; i < words.size(); ++i) plan[i].store(words[i], std::memory_order_relaxed);
        after.store(calls + 1);
    }
    /// Says that all calls so far have been waited for: `differences` leaves them out.
    void waited() { waited_ = mine().calls.load(); }
    /// Returns ": tokens 24 on rank 0, 30 on rank 1", the first field in which the plans of this host's ranks differ
    /// from this one's, in the first call of the last ones in which that is known; "" if there is none.
    std::string differences() const {
        std::uint64_t const now = mine().calls.load();
        for (auto calls = std::max(waited_, now - std::min<std::uint64_t>(now, 1000)); calls <= now; ++calls) {
            std::vector<identity> plans;
            for (int r = 0; r < ranks(); ++r) plans.push_back(plan_of(r, calls));
            identity const own = plans[static_cast<std::size_t>(rank_)], none{};
            auto const other = std::ranges::find_if(plans, [&](auto const& p) { return p != none && p != own; });
            if (own == none || other == plans.end()) continue;
            detail::difference const first(own, *other);
            std::string text = ": " + first.name();
            for (std::size_t r = 0; r < plans.size(); ++r)
                if (plans[r] != none)
                    text += ' ' + first.value(plans[r]) + " on rank " + std::to_string(numbers_[r]) + ',';
            text.pop_back();
            return text;
        }
        return "";
    }

    /// Returns whether `rank` is alive on this host, once everyone has come.
    bool alive(int rank) const {
        auto const found = detail::look_at(entries_[rank].process.load());
        return !found.dead && found.began == entries_[rank].began.load();
    }
    /// Says that this rank leaves because other ranks failed. Of `give_up` and `fail`, the first call counts.
    void give_up() { settle(fate::gave_up); }
    /// Says that this rank leaves because it failed or, if others have left before and may be the cause, gave up.
    void fail() {
        auto const has_left = [&](int r) { return r != rank_ && !earlier(r) && entries_[r].fate.load() != fate::well; };
        settle(list(has_left).empty() ? fate::failed : fate::gave_up);
    }
    /// Returns " 1 3", the ranks of this host that have failed, have left or are dead; if there are none, those that
    /// gave up.
    std::string dead() const {
        std::string const first = list([&](int r) { return at_fault(r); });
        return first.empty() ? list([&](int r) { return !alive(r); }) : first;
    }

    /// Returns " 1 3", the ranks of this host (of all hosts, until everyone is here) that have failed, have not come,
    /// have left or are dead; if there are none, those that have begun fewer calls than this one. Ranks that gave up
    /// are named only if there are none of either kind.
    std::string missing() const {
        std::uint64_t const calls = mine().calls.load();
        auto const behind = [&](int r) { return entries_[r].calls.load() < calls; };
        auto const has_done_all = [&](int r) { return entries_[r].process.load() == gone && !behind(r); };
        auto const gave_up = [&](int r) { return entries_[r].fate.load() == fate::gave_up; };
        std::string names = list([&](int r) { return at_fault(r) && !has_done_all(r); });
        if (names.empty()) names = list([&](int r) { return !gave_up(r) && behind(r); });
        if (names.empty() && differences().empty()) // else ranks gave up because plans differ
            names = list([&](int r) { return r != rank_ && (!alive(r) || behind(r) || gave_up(r)); });
        return names;
    }

private:
    static constexpr std::int64_t gone = -1;
    using plan_words = std::array<std::uint64_t, sizeof(identity) / sizeof(std::uint64_t)>;
    enum class fate : std::int64_t { well, gave_up, failed };
    struct plan_since {
        std::atomic<std::uint64_t> after; ///< one more than the calls before, 0 of none
        std::array<std::atomic<std::uint64_t>, plan_words().size()> words; ///< as `identity`
    };
    struct entry {
        std::atomic<std::int64_t> process;
        std::atomic<std::uint64_t> began, calls;
        std::atomic<roll_call::fate> fate;
        std::array<plan_since, 8> plans; ///< the last of this rank, one after each number of calls
    };
    static_assert(std::atomic<std::int64_t>::is_always_lock_free && std::atomic<fate>::is_always_lock_free);

    struct person {
        std::int64_t process = -2; ///< of none
        std::uint64_t began = 0;
        bool operator==(person const&) const = default;
    };

    /// Returns whether this rank's entry is still its own, not that of a later group of this name.
    bool owned() const { return mine().process.load() == static_cast<std::int64_t>(::getpid()); }
    void settle(fate because) {
        fate before = fate::well;
        if (owned()) mine().fate.compare_exchange_strong(before, because);
    }
    /// Returns whether a rank's entry is empty or that of an earlier group, whose process was dead when this rank came.
    bool earlier(int rank) const {
        return person{entries_[rank].process.load(), entries_[rank].began.load()} ==
               before_[static_cast<std::size_t>(rank)];
    }
    bool at_fault(int rank) const {
        if (earlier(rank)) return true; // has not come
        bool const lives = alive(rank); // looked at first, because a rank says why before it leaves
        fate const said = entries_[rank].fate.load();
        return lives ? said == fate::failed : said != fate::gave_up;
    }

    /// Returns by which plan a rank moves rows after so many calls; none, if that is not known, or it is yet to say so.
    identity plan_of(int rank, std::uint64_t calls) const {
        plan_words found{};
        std::uint64_t latest = 0;
        bool const has_said = entries_[rank].calls.load() >= std::min(mine().calls.load(), calls + 1);
        for (auto const& [after, words] : entries_[rank].plans) {
            std::uint64_t const since = after.load();
            if (!has_said || since <= latest || since > calls + 1) continue;
            latest = since;
            std::ranges::transform(words, found.begin(), [](auto const& w) { return w.load(); });
        }
        return std::bit_cast<identity>(found);
    }
    int ranks() const { return static_cast<int>(numbers_.size()); }
    std::size_t bytes() const { return numbers_.size() * sizeof(entry); }
    template <class F>
    std::string list(F&& wanted) const {
        std::string ranks;
        for (int r = 0; r < this->ranks(); ++r) {
            if (!here_.empty() && !here_[static_cast<std::size_t>(r)]) continue; // on another host
            if (wanted(r)) ranks += ' ' + std::to_string(numbers_[static_cast<std::size_t>(r)]);
        }
        return ranks;
    }
    entry& mine() { return entries_[rank_]; }
    entry const& mine() const { return entries_[rank_]; }

    std::string name_;
    int rank_;
    std::vector<int> numbers_;
    std::vector<person> before_;               ///< who was in the page, and dead, when this rank came
    std::vector<bool> here_;                   ///< which ranks are on this host, once everyone has come
    std::uint64_t set_after_ = 0, waited_ = 0; ///< calls before the last plan, and before the last wait
    std::size_t last_ = 0;                     ///< of the plans in this rank's entry
    entry* entries_ = nullptr;
};

} // namespace cpx
