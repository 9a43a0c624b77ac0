// SPDX-License-Identifier: Apache-2.0
// One rank's end of a group, of whatever transport, as Python has it.
#pragma once

#include "expert_lists.hpp"
#include "features.hpp"
#include "fill.hpp"

#include <cpx/core/activation.hpp>
#include <cpx/transport/threads.hpp>
#include <cpx/transport/transport_ref.hpp>

#include <nanobind/nanobind.h>

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cpx {
class media;
}

namespace binding {

namespace nb = nanobind;

class communicator;
struct any_layout;
struct relayout_value;
struct halo_value;
struct carry_value;
struct placed_rows;

/// What Python hands to a convolution, or to its backward.
struct convolution_objects {
    nb::handle x, weight, bias, y = nb::none(), initial = nb::none(), final = nb::none();
    nb::handle dy = nb::none(), dx = nb::none(), dweight = nb::none(), dbias = nb::none();
};

/// What Python hands to a recurrence; of a backward, gradients stand in the places of o, initial and final.
struct recurrence_objects {
    std::vector<nb::object> const &x, &dx;
    std::array<cpx::index_t, 4> heads; ///< of keys, of values, and their widths
    cpx::index_t chunk;
    bool qk_l2norm;
    std::optional<double> scale;
    nb::handle o, initial, final, starts, maps;
};

/// What Python hands to attention, or to its backward; of keys every rank holds every row.
struct attention_objects {
    any_layout const &queries, &keys;
    std::array<cpx::index_t, 3> heads; ///< of queries, of keys, and their width
    double scale;
    nb::handle q, k, v, o, lse;
    nb::handle dout = nb::none(), dq = nb::none(), dk = nb::none(), dv = nb::none();
};

/// The exchange of a batch's choices between the ranks of its tokens and those of its experts. Calls are collective.
class experts_of_batch {
public:
    virtual ~experts_of_batch() = default;
    virtual expert_lists const& lists() const = 0;
    virtual void to_experts(nb::handle x, nb::handle out) = 0;
    virtual void to_tokens(nb::handle x, nb::handle out) = 0;
};

/// Positions of one rank's rows, and what is done with features at those that hold placeholders.
class positions_of_rank {
public:
    virtual ~positions_of_rank() = default;
    virtual placed_rows const& rows() const = 0;
    /// Collective.
    virtual std::vector<cpx::index_t> deltas(communicator& comm) const = 0;
    virtual void run(feature_step step, char const* where, cpx::media_kind kind, nb::handle x,
                     nb::handle features) const = 0;
};

/// The operators of ranks whose arrays are on devices. Each works in the current stream of the arrays' framework, and
/// throws `cpx::error` before anything moves if an array does not fit or is elsewhere.
class device_operators {
public:
    virtual void exchange(relayout_value const& plan, nb::handle x, nb::handle y) = 0;
    virtual void shift(halo_value const& plan, nb::handle x, nb::handle y, fill_value const& fill) = 0;
    virtual void sum(nb::handle values) = 0;
    virtual void convolve(halo_value const& before, convolution_objects const& o, cpx::activation act) = 0;
    virtual void convolve_backward(halo_value const& before, halo_value const& after, convolution_objects const& o,
                                   cpx::activation act) = 0;
    virtual void recur(std::string_view name, bool back, carry_value const& plan, recurrence_objects const& o) = 0;
    virtual void attend(attention_objects const& o, bool back) = 0;
    /// See `cpx::expert_exchange`. What it returns ends before its communicator.
    virtual std::unique_ptr<experts_of_batch> share(nb::handle chosen, cpx::index_t experts, nb::handle places) = 0;
    /// See `cpx::mrope_positions`. What it returns ends before its communicator.
    virtual std::unique_ptr<positions_of_rank> place(cpx::media const& m, any_layout const& sharding, nb::handle ids,
                                                     cpx::media_tokens const& tokens) = 0;

protected:
    ~device_operators() = default;
};

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
    /// Returns where its ranks have their arrays: "cpu", "cuda:0".
    virtual std::string device() const = 0;
    virtual cpx::transport_ref host(char const* where) = 0;
    /// Returns null if its ranks have their arrays on the host.
    virtual device_operators* on_device() { return nullptr; }
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
