// SPDX-License-Identifier: Apache-2.0
// Arguments of operators on devices, as nvcc's sources and those of the binding both know them.
#pragma once

#include "../expert_lists.hpp"
#include "../features.hpp"
#include "../fill.hpp"
#include "../strided.hpp"

#include <cpx/core/activation.hpp>
#include <cpx/core/rotary_axes.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace cpx {
class media;
}

namespace binding {

struct any_layout;
struct relayout_value;
struct halo_value;
struct carry_value;
struct placed_rows;

/// A tensor in a device's memory, or none, as its framework describes it for the time of a call.
struct tensor {
    char const* where = ""; ///< the function, in errors
    char const* name = "";  ///< the argument
    bool given = false;
    void* data = nullptr;
    int kind = 0, bits = 0; ///< of its numbers
    index_t count = 0;      ///< of dimensions
    std::array<index_t, 8> sizes = {}, strides = {};

    explicit operator bool() const { return given; }
    index_t dimensions() const { return count; }
    index_t size(index_t i) const { return sizes[static_cast<std::size_t>(i)]; }
    index_t stride(index_t i) const { return strides[static_cast<std::size_t>(i)]; }
    index_t elements() const {
        index_t all = 1;
        for (index_t i = 0; i < count; ++i) all *= size(i);
        return all;
    }
};

/// What tensors come from: its memory and its streams. Any thread may call.
class framework {
public:
    virtual ~framework() = default;
    /// Returns memory of a device that the current stream may use from now on. Throws `cpx::error` if there is none.
    virtual void* allocate(int device, std::size_t bytes) = 0;
    virtual void release(void* memory) noexcept = 0;
    /// Returns the current stream of this thread, a cudaStream_t.
    virtual void* stream(int device) = 0;
};

/// What a convolution is given; of a backward dy, dx, dweight and dbias.
struct convolution_call {
    tensor x, weight, bias, y, dy, dx, dweight, dbias;
    cpx::activation act = cpx::activation::none;
};

/// What a recurrence is given; of a backward dout, dx, dfinal and dinitial. A decay a head takes no beta.
struct state_call {
    char const* where = "";
    index_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, chunk = 64;
    bool qk_l2norm = true;
    std::optional<double> scale = {};
    std::vector<tensor> x, dx; ///< q, k, v, g and perhaps beta
    tensor o, initial, final, dout, dfinal, dinitial;
    tensor starts, maps; ///< what a forward saves; where maps are not given, all of it is in `starts`
};

/// What attention is given; of a backward o, lse and dout, and dq, dk and dv to fill.
struct attention_call {
    any_layout const *queries = nullptr, *keys = nullptr; ///< of keys every rank holds every row
    index_t query_heads = 0, key_heads = 0, dim = 0;
    double scale = 0;
    tensor q, k, v, o, lse, dout, dq, dk, dv;
};

/// What a rotary embedding is given.
struct rotary_call {
    tensor x, positions, y;
    std::vector<double> frequencies;
    std::vector<int> axes;
    index_t head_dim = 0;
    cpx::rounding how = cpx::rounding::fp32_inside;
    bool back = false;
};

/// What a gated norm is given; of a backward dy, dx, dz, and terms: what each row adds to the weight's gradient.
struct norm_call {
    tensor x, z, weight, y, dy, dx, dz, terms;
    double eps = 0;
};

/// What the gates of a gated delta net are given; of a backward dg, dbeta, db, da and terms: what each row adds to the
/// gradients of A_log and dt_bias.
struct gates_call {
    tensor b, a, A_log, dt_bias, g, beta, dg, dbeta, db, da, terms;
};

/// The exchange of a batch's choices, in the stream in which it was made.
class device_experts {
public:
    virtual ~device_experts() = default;
    virtual expert_lists const& lists() const = 0;
    virtual void to_experts(tensor const& x, tensor const& out) = 0;
    virtual void to_tokens(tensor const& x, tensor const& out) = 0;
};

/// Positions of a rank's rows; steps are in the current stream.
class device_positions {
public:
    virtual ~device_positions() = default;
    virtual placed_rows const& rows() const = 0;
    virtual std::vector<index_t> deltas() const = 0;
    virtual void run(feature_step step, cpx::media_kind kind, tensor const& x, tensor const& features) const = 0;
};

/// One rank of an NCCL communicator, whose tensors are on its device: what it has prepared, and its stream.
class device_group;

using group_pointer = std::unique_ptr<device_group, void (*)(device_group*)>;

/// How exchanges that do not add move rows between ranks: by one kernel into memory that they write to each other, or
/// by messages of NCCL's. The same on all ranks, which decide at the first exchange.
enum class exchange_path { undecided, window, messages };

/// How a group waits, and exchanges. `window`: bytes of memory that ranks write to each other, 0 for messages alone;
/// `blocks` of a kernel in which they meet, 0: as many as pay.
struct group_options {
    std::chrono::milliseconds deadline;
    index_t window; ///< bytes, or `grown`: what results need, more when larger ones come
    int blocks;
    static constexpr index_t grown = -1;
};

/// Takes a communicator of a framework, an ncclComm_t. Collective. See `cpx::nccl::adopt`.
group_pointer adopt_group(void* comm, int device, group_options const& of, framework& from);
/// Joins the communicator of an id, which `new_group_id` has made on one rank. Collective.
group_pointer make_group(std::string const& id, int rank, int ranks, int device, group_options const& of,
                         framework& from);
std::string new_group_id();

int rank_of(device_group const& g);
int ranks_of(device_group const& g);
exchange_path path_of(device_group const& g);
/// Returns the bytes of the window that a framework's allocator may take at once for results; 0: there is no window.
index_t room_of(device_group const& g);
/// Says whether `cpx_window_allocate` is to take memory of the group's window, in this thread, from now on.
void lend(device_group& g, bool on);
/// Returns whether memory is in the group's window.
bool holds(device_group& g, void const* memory);
/// Throws `cpx::error` if the owner of a communicator has ended it, as far as NCCL can tell.
void require_there(device_group const& g);
/// Waits until the device has done all that it was given in the current stream; see `cpx::nccl::wait`.
void wait_for(device_group& g);
/// Ends its part: every later call throws. `fail` says so to ranks of this host, for that reason.
void leave(device_group& g);
void fail(device_group& g, char const* why);

// Each throws `cpx::error` before anything moves if tensors do not fit.
void exchange_on(device_group& g, relayout_value const& plan, tensor const& x, tensor const& y);
void shift_on(device_group& g, halo_value const& plan, tensor const& x, tensor const& y, fill_value const& fill);
/// Replaces values by their sums over all ranks.
void sum_on(device_group& g, tensor const& values);
void convolve_on(device_group& g, halo_value const& before, convolution_call const& c);
void convolve_backward_on(device_group& g, halo_value const& before, halo_value const& after,
                          convolution_call const& c);
void attend_on(device_group& g, attention_call const& c, bool back);
/// The gated delta rule of five inputs, a decay a head of four.
void recur_on(device_group& g, carry_value const& plan, state_call const& c, bool back);
/// Returns the bytes that the gated delta rule of 16 bits keeps for its backward of 64 tokens, or fewer, and a value
/// head, where it runs on tensor cores; 0: none on this device.
index_t kept_on(device_group& g);
/// chosen: (tokens, choices) int64; places: one a token, on the host. Waits for the device. It ends before `g`.
std::unique_ptr<device_experts> share_on(device_group& g, tensor const& chosen, index_t experts,
                                         std::vector<index_t> const& places);
/// ids: (rows) int64 or int32. Waits for the device. It ends before `g`.
std::unique_ptr<device_positions> place_on(device_group& g, cpx::media const& m, any_layout const& sharding,
                                           tensor const& ids, cpx::media_tokens const& tokens);
void rotate_on(framework& from, int device, rotary_call const& c);
void normalise_on(framework& from, int device, norm_call const& c, bool back);
/// Of float32.
void open_gates_on(framework& from, int device, gates_call const& c, bool back);

} // namespace binding
