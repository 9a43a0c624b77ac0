// SPDX-License-Identifier: Apache-2.0
// Which ranks of this host are alive and how far they have come.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace cpx {

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
        mine().plan.store(0);
        mine().fate.store(fate::well);
        mine().began.store(look_at(::getpid()).began);
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
    /// Says by which plan this rank moves rows from now on.
    void runs(std::uint64_t fingerprint) { mine().plan.store(fingerprint); }
    /// Returns " 1 3", the ranks of this host that move rows by other plans.
    std::string others() const {
        return list([&](int r) { return entries_[r].plan.load() != mine().plan.load(); });
    }

    /// Returns whether `rank` is alive on this host, once everyone has come.
    bool alive(int rank) const {
        std::int64_t const process = entries_[rank].process.load();
        if (process <= 0 || (::kill(static_cast<pid_t>(process), 0) != 0 && errno != EPERM)) return false;
        auto const found = look_at(process);
        return !found.dead && found.began == entries_[rank].began.load();
    }
    /// Says that this rank leaves because other ranks failed. Of `give_up` and `fail`, the first call counts.
    void give_up() { settle(fate::gave_up); }
    /// Says that this rank leaves because it failed. If other ranks have left before, they may be the cause: then it
    /// gave up.
    void fail() {
        auto const has_left = [&](int r) { return r != rank_ && !earlier(r) && entries_[r].fate.load() != fate::well; };
        settle(list(has_left).empty() ? fate::failed : fate::gave_up);
    }
    /// Returns " 1 3", the ranks of this host that have failed, have left or are dead. Ranks that gave up are named
    /// only if there are no such ranks.
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
        if (names.empty()) names = list([&](int r) { return r != rank_ && (!alive(r) || behind(r) || gave_up(r)); });
        return names;
    }

private:
    static constexpr std::int64_t gone = -1;
    enum class fate : std::int64_t { well, gave_up, failed };
    struct entry {
        std::atomic<std::int64_t> process;
        std::atomic<std::uint64_t> began, calls, plan;
        std::atomic<roll_call::fate> fate;
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

    /// What the system knows of a process.
    struct appearance {
        bool dead = true;        ///< or dying, which takes seconds where much of a device's memory is given back
        std::uint64_t began = 0; ///< when it was started; a later process of the same number began later
    };
    static appearance look_at(std::int64_t process) {
        std::ifstream status("/proc/" + std::to_string(process) + "/stat"); // "17 (name) S ...", the name may hold any
        std::string const text{std::istreambuf_iterator<char>(status), {}};
        auto const name_end = text.rfind(')');
        if (name_end == std::string::npos) return {};
        std::istringstream fields(text.substr(name_end + 1)); // from the third on, the state
        appearance a;
        char state = 'Z'; // a zombie: dead, and its parent has not asked for it yet
        std::string passed;
        std::uint64_t flags = 0;
        fields >> state;
        for (int field = 4; field < 9; ++field) fields >> passed;
        fields >> flags; // 4: exits, 1024: a signal has ended it; as in Linux's sched.h, where they never changed
        for (int field = 10; field < 22; ++field) fields >> passed;
        fields >> a.began;
        a.dead = state == 'Z' || (flags & (4 | 1024)) != 0;
        return a;
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
    std::vector<person> before_; ///< who was in the page, and dead, when this rank came
    std::vector<bool> here_;     ///< which ranks are on this host, once everyone has come
    entry* entries_ = nullptr;
};

} // namespace cpx
