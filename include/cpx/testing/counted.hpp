// SPDX-License-Identifier: Apache-2.0
// A transport that counts what its rank really sends.
#pragma once

#include <cpx/transport/concept.hpp>

#include <map>
#include <string>

namespace cpx {

/// What one rank has sent to other ranks.
struct tally {
    index_t messages = 0;
    index_t rows = 0;
    index_t bytes = 0;

    tally& operator+=(tally const& other) {
        messages += other.messages;
        rows += other.rows;
        bytes += other.bytes;
        return *this;
    }
};

/// Passes every exchange on to another transport and counts it under its plan's operation: "relayout", "halo", "carry",
/// "carry, scan" and "agreement", for the comparison that precedes a new plan.
template <transport Comm>
class counted {
public:
    explicit counted(Comm& comm) : comm_(comm) {}

    int rank() const { return comm_.rank(); }
    int ranks() const { return comm_.ranks(); }
    std::unordered_set<std::uint64_t>& agreed() { return comm_.agreed(); }

    void transfer(identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives) {
        std::string name = id.numbers[identity::agreement] ? "agreement" : id.operation.data();
        if (auto const by = name.find(": "); by != name.npos) name.erase(0, by + 2); // whose halo
        tally& sent = sent_[name];
        for (outgoing const& parcel : sends) {
            index_t rows = 0;
            for (run const r : parcel.rows) rows += r.count;
            sent += {1, rows, parcel.bytes()};
        }
        comm_.transfer(id, sends, receives);
    }

    /// Returns what has been sent for `operation`.
    tally sent(std::string const& operation) const {
        auto const found = sent_.find(operation);
        return found == sent_.end() ? tally{} : found->second;
    }

private:
    Comm& comm_;
    std::map<std::string, tally> sent_;
};

} // namespace cpx
