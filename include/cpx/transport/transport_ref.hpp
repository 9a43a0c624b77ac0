// SPDX-License-Identifier: Apache-2.0
// Any host transport behind one type.
#pragma once

#include <cpx/transport/concept.hpp>

#include <memory>

namespace cpx {

/// Refers to a transport of whatever type: what is compiled for a `transport_ref` is compiled once, and runs on ranks
/// that are threads as on those that a launcher has started. Copies refer to the same, which outlives them.
class transport_ref {
public:
    template <transport Comm>
        requires(!std::same_as<Comm, transport_ref>)
    transport_ref(Comm& comm)
        : comm_(std::addressof(comm)), rank_(comm.rank()), ranks_(comm.ranks()), agreed_(&comm.agreed()),
          transfer_([](void* to, identity const& id, std::span<outgoing const> sends,
                       std::span<incoming const> receives) { static_cast<Comm*>(to)->transfer(id, sends, receives); }) {
    }
    template <class X = detail::any>
    explicit transport_ref(X const& = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: transport_ref(comm) wants a cpx::transport that is not const and stays");
    }

    int rank() const { return rank_; }
    int ranks() const { return ranks_; }
    std::unordered_set<std::uint64_t>& agreed() { return *agreed_; }
    void transfer(identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives) {
        transfer_(comm_, id, sends, receives);
    }

private:
    void* comm_ = nullptr;
    int rank_ = 0, ranks_ = 1;
    std::unordered_set<std::uint64_t>* agreed_ = nullptr;
    void (*transfer_)(void*, identity const&, std::span<outgoing const>, std::span<incoming const>) = nullptr;
};

static_assert(transport<transport_ref>);

} // namespace cpx
