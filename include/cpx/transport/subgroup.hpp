// SPDX-License-Identifier: Apache-2.0
// Some of a transport's ranks as a transport of their own.
#pragma once

#include <cpx/transport/concept.hpp>

#include <algorithm>
#include <unordered_set>
#include <vector>

namespace cpx {

/// Some ranks of a group as a group: the i-th of `members` is rank i. Its messages are those of the whole group, so
/// that making one moves nothing and waits for nobody: a mesh's groups, or ranks that share experts, on any transport.
///
/// Lives no longer than the transport that it uses. Errors of waits name ranks of the whole group; errors of plans that
/// differ ranks of this one, whose members they list. Ranks in several subgroups call them in one order.
template <transport Comm>
class subgroup {
public:
    /// Throws `cpx::error` unless members are ranks of `all`, ascending, and this one is among them.
    subgroup(Comm& all, std::vector<int> members, caller here = caller::here())
        : all_(&all), members_(std::move(members)) {
        for (std::size_t i = 0; i < members_.size(); ++i)
            if (members_[i] < (i == 0 ? 0 : members_[i - 1] + 1) || members_[i] >= all.ranks())
                throw error("subgroup", "member " + std::to_string(i),
                            "ascending ranks of 0 to " + std::to_string(all.ranks() - 1), std::to_string(members_[i]),
                            here);
        auto const own = std::ranges::find(members_, all.rank());
        require(own != members_.end(), "subgroup", "members", detail::in_words("rank ", all.rank()), "others", here);
        rank_ = static_cast<int>(own - members_.begin());
    }

    template <class X = detail::any>
    explicit subgroup(X const& = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: subgroup(comm, members) wants a cpx::transport and the ranks that are "
                                        "its members; the group of n neighbouring ranks is neighbours(comm, n)");
    }

    int rank() const { return rank_; }
    int ranks() const { return static_cast<int>(members_.size()); }
    std::unordered_set<std::uint64_t>& agreed() { return agreed_; }
    /// Returns how errors name the group whose ranks they count.
    std::string name() const {
        std::string text = "the subgroup";
        for (int const member : members_) text += ' ' + std::to_string(member);
        return text;
    }
    void transfer(identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives) {
        auto const renumbered = [&](auto list) {
            for (auto& parcel : list) parcel.peer = members_[static_cast<std::size_t>(parcel.peer)];
            return list;
        };
        all_->transfer(id, renumbered(std::vector(sends.begin(), sends.end())),
                       renumbered(std::vector(receives.begin(), receives.end())));
    }

private:
    Comm* all_ = nullptr;
    std::vector<int> members_;
    int rank_ = 0;
    std::unordered_set<std::uint64_t> agreed_;
};
template <class X = detail::any>
subgroup(X const& = {}, detail::any = {}, detail::any = {}) -> subgroup<detail::no_transport>;

/// Returns the group of `size` neighbouring ranks that this one is in: ranks 0 .. size - 1 are the first.
///
/// Throws `cpx::error` unless the size divides that of the whole group.
template <transport Comm>
subgroup<Comm> neighbours(Comm& all, int size, caller here = caller::here()) {
    require(size > 0 && all.ranks() % size == 0, "neighbours", "size",
            detail::in_words("a divisor of the ranks, ", all.ranks()), size, here);
    std::vector<int> members;
    for (int i = 0; i < size; ++i) members.push_back(all.rank() / size * size + i);
    return {all, std::move(members), here};
}
template <class X = detail::any>
detail::refused neighbours(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: neighbours(comm, size) wants a cpx::transport and how many of its ranks");
    return {};
}

} // namespace cpx
