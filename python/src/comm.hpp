// SPDX-License-Identifier: Apache-2.0
// One rank's end of a group, of whatever transport, as Python has it.
#pragma once

#include <cpx/transport/threads.hpp>
#include <cpx/transport/transport_ref.hpp>

#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <string>

namespace binding {

namespace nb = nanobind;

/// What every collective of this package takes, whatever connects the ranks. `host` is the transport of ranks that have
/// their arrays on the host; a communicator of ranks that do not throws there, before anything moves.
class communicator {
public:
    communicator() = default;
    communicator(communicator const&) = delete;
    communicator& operator=(communicator const&) = delete;
    virtual ~communicator() = default;

    virtual int rank() const = 0;
    virtual int ranks() const = 0;
    /// Returns where its ranks have their arrays: "cpu".
    virtual std::string device() const = 0;
    virtual cpx::transport_ref host(char const* where) = 0;
    /// Says that this rank calls no more, or that its program has failed.
    virtual void leave() = 0;
    virtual void fail(std::string const& why) = 0;

private:
    friend class call;
    std::atomic<bool> busy_ = false;
};

/// A call of a communicator, for which the GIL is released. Throws `cpx::error` if another thread is in one.
class call {
public:
    call(char const* where, communicator& comm) : comm_(comm) {
        cpx::require(!comm.busy_.exchange(true), where, "communicator", "one thread at a time", "another in a call");
    }
    ~call() { comm_.busy_ = false; }
    call(call const&) = delete;
    call& operator=(call const&) = delete;

private:
    communicator& comm_;
    nb::gil_scoped_release free_;
};

} // namespace binding
