// SPDX-License-Identifier: Apache-2.0
// Runs a plan between GPUs by send and receive: packed, one message a peer, unpacked.
#pragma once

#include <cpx/cuda/launch.hpp>
#include <cpx/cuda/message_tables.hpp>
#include <cpx/cuda/nvtx.hpp>
#include <cpx/cuda/upload_ring.hpp>
#include <cpx/plan/plan.hpp>
#include <cpx/transport/agree.hpp>
#include <cpx/transport/nccl.hpp>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <utility>

namespace cpx::cuda {

namespace detail {

/// Lets all ranks compare what they are about to run, every time: NCCL's messages do not tell of which plan they are.
inline void agree(nccl& comm, identity const& mine, plan const& p, caller here) {
    cpx::detail::compare(
        "cuda::exchange", mine, p.batch, comm.ranks(),
        [&](void const* my_part, void* all, std::size_t bytes) { comm.gather(my_part, all, bytes, here); }, here,
        p.source_settings, p.target_settings);
}

} // namespace detail

/// What an exchange keeps for plans that it is given later.
struct exchange_room {
    index_t rectangles = 0; ///< that rows are copied by: one for each run of rows and columns
    index_t bytes = 0;      ///< of the rows that leave, and of those that come
};

/// A plan made ready for device buffers of elements T: tables and staging memory, made once, used by every call.
///
/// Each call packs what leaves, sends one message a peer and unpacks, on the caller's stream, without host
/// synchronisation or allocation. Rows that stay are copied once. A message that is one run of whole rows is sent from,
/// or received into, its place. A plan that sums adds in rank order.
/// Made by all ranks of the communicator, on its device; calls are collective and in the same order on all ranks, in
/// one stream or ordered by events. Can be captured; before this object is destroyed the graph has ended, and it is not
/// launched again.
template <class T>
class exchange {
public:
    /// `width`: elements a row if the plan moves whole rows, else ignored; strides: elements from row to row, 0 for
    /// dense; `others`: ranks whose rows go from and to this one in another way. Collective: ranks compare what they
    /// are about to run.
    ///
    /// Throws `cpx::error` if plan and communicator do not fit, or if the ranks' plans differ.
    exchange(plan const& p, index_t width, nccl& comm, index_t from_stride = 0, index_t to_stride = 0,
             range others = {}, caller here = caller::here())
        : exchange(p, width, comm, {from_stride, to_stride}, others, here) {
        auto t = detail::tables_of(p, shape_, others);
        list_ = buffer<kernels::rectangle>(std::ssize(t.list), here);
        list_.write(t.list, here);
        staged_out_ = buffer<char>(t.packed, here);
        staged_in_ = buffer<char>(t.unpacked, here);
        take(p, std::move(t));
        connect(tables_.sends, tables_.receives, here);
    }

    /// Also for plans that come later, see `set`, of the same widths. Connects all ranks.
    exchange(plan const& p, index_t width, nccl& comm, exchange_room room, caller here = caller::here())
        : exchange(p, width, comm, strides{}, range{}, here) {
        auto const t = detail::tables_of(p, shape_, {});
        room.rectangles = std::max(room.rectangles, std::ssize(t.list));
        list_ = buffer<kernels::rectangle>(room.rectangles + 1, here);
        staged_out_ = buffer<char>(std::max(room.bytes, t.packed), here);
        staged_in_ = buffer<char>(std::max(room.bytes, t.unpacked), here);
        words_ = buffer<std::int64_t>(comm.ranks(), here);
        ring_.emplace(list_.size() * static_cast<index_t>(sizeof(kernels::rectangle)), here);
        std::vector<detail::wire> all;
        for (int peer = 0; peer < comm.ranks(); ++peer)
            if (peer != comm.rank()) all.push_back({peer, 0, 0, 1});
        connect(all, all, here);
        cuda::stream const stream;
        set(p, stream, here);
        settle(stream, here);
    }

    /// Replaces the plan from the next call on, in the order of the stream: uploads its tables, and neither allocates
    /// device memory nor waits for the device or for another rank. All ranks do so between the same calls.
    ///
    /// Whether they have the same plan is compared by what the next call sends; ranks that have not are told at the
    /// next wait of the communicator. Where plans differ in what is sent, that is when the deadline has passed, and the
    /// communicator has been aborted. Throws `cpx::error` if this exchange was made without room, or the plan has other
    /// widths or wants more room.
    void set(plan const& p, cudaStream_t stream, caller here = caller::here()) {
        char const* const where = "cuda::exchange";
        require(ring_.has_value(), where, "exchange", "one made with room for other plans", "one without", here);
        require_plan(p, here);
        bool const same = (p.source_width ? p.source_width : width_) == shape_.source_width &&
                          (p.target_width ? p.target_width : width_) == shape_.target_width &&
                          (p.kind == flow::sums) == sums_;
        require(same, where, "widths and kind of the plan", "those of the first", "others", here);
        auto t = detail::tables_of(p, shape_, {});
        require(std::ssize(t.list) < list_.size(), where, "rectangles of the plan",
                "at most " + std::to_string(list_.size() - 1), t.list.size(), here);
        require(t.packed <= staged_out_.size() && t.unpacked <= staged_in_.size(), where, "bytes that leave or come",
                "at most " + std::to_string(std::min(staged_out_.size(), staged_in_.size())),
                std::max(t.packed, t.unpacked), here);
        auto const fingerprint = p.id.template for_elements<T>(width_).fingerprint();
        kernels::rectangle first{}; // tells this plan from others
        first.source = static_cast<std::int64_t>(fingerprint);
        std::span<std::byte const> const parts[] = {std::as_bytes(std::span(&first, 1)),
                                                    std::as_bytes(std::span(t.list))};
        ring_->upload(parts, list_.data(), stream, here);
        comm_.runs(fingerprint);
        take(p, std::move(t));
        compares_ = !p.local;
    }

    /// Moves this rank's rows of `from` to where they belong in everybody's `to`; they must not overlap.
    ///
    /// from, to: (rows, width) of the plan's source and target, rows as far apart as the constructor was told,
    /// beginning at multiples of 16 bytes in memory of the communicator's device. Throws `cpx::error` before anything
    /// is enqueued if a buffer does not fit or is not memory of this device, or if the communicator is broken.
    void operator()(rows<T const> from, rows<T> to, cudaStream_t stream, caller here = caller::here()) {
        require(current_device() == comm_.device(), "cuda::exchange", "current device", comm_.device(),
                current_device(), here);
        check_buffer("source", from, source_rows_, shape_.source_width, shape_.source_stride, here);
        check_buffer("target", to, target_rows_, shape_.target_width, shape_.target_stride, here);
        detail::require_apart("cuda::exchange", {{"target", to}}, {{"source", from}}, here);
        comm_.begin_call(here);
        cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
        check(cudaStreamIsCapturing(stream, &capturing), "cudaStreamIsCapturing", here);
        auto const range = named_range<"cpx exchange, send and receive">();
        kernels::rectangle_buffers const buffers{{reinterpret_cast<char*>(const_cast<T*>(from.data())),
                                                  reinterpret_cast<char*>(to.data()), staged_out_.data(),
                                                  staged_in_.data()}};
        if (zeros_first_ && to.count() > 0 && to.width() > 0)
            check(cudaMemset2DAsync(to.data(), bytes(shape_.target_stride), 0, bytes(to.width()),
                                    static_cast<std::size_t>(to.count()), stream),
                  "cudaMemset2DAsync", here);
        std::int64_t* const word = compares_ ? &list_.data()->source : nullptr; // of a plan that was set
        if (word)
            launch_early(kernels::fill_words<>, 1, 256, 0, stream, "fill_words", here, word, words_.data(),
                         comm_.ranks());
        kernels::rectangle const* next = list_.data() + (ring_ ? 1 : 0);
        copy(next, tables_.pack, buffers, stream, here);
        next += tables_.pack.rectangles;
        send_and_receive(
            tables_.sends, tables_.receives,
            [&](detail::wire const& w) { return std::pair(buffers.base[w.buffer] + w.offset, w.bytes); }, word, stream,
            here);
        copy(next, tables_.unpack, buffers, stream, here);
        next += tables_.unpack.rectangles;
        if constexpr (addable)
            for (detail::launch_size const size : tables_.add) {
                if (size.slices > 0)
                    launch_early(kernels::add_rectangles<T>, grid(size), 256, 0, stream, "add_rectangles", here,
                                 list_of(next, size), buffers);
                next += size.rectangles;
            }
        if (word)
            launch_early(kernels::compare_words<>, 1, 256, 0, stream, "compare_words", here, word, words_.data(),
                         comm_.ranks(), comm_.others(here));
        compares_ = false;
        if (capturing == cudaStreamCaptureStatusNone) done_.record(stream, here);
    }

    exchange(exchange const&) = delete;
    exchange& operator=(exchange const&) = delete;
    /// Waits for what is in flight, with the communicator's deadline: memory is not freed under a rank that is gone.
    ~exchange() {
        try {
            comm_.wait(done_);
        } catch (error const&) { // the communicator has been aborted
        }
    }

private:
    static constexpr bool addable = requires(T a, T b) { static_cast<T>(a + b); };
    struct strides {
        index_t source = 0, target = 0;
    };
    static std::size_t bytes(index_t elements) { return static_cast<std::size_t>(elements) * sizeof(T); }
    static unsigned grid(detail::launch_size size) { return static_cast<unsigned>(std::min(size.slices, 1056)); }

    exchange(plan const& p, index_t width, nccl& comm, strides between, range others, caller here)
        : comm_(comm), width_(width), sums_(p.kind == flow::sums),
          shape_{p.source_width ? p.source_width : width, p.target_width ? p.target_width : width, between.source,
                 between.target, static_cast<index_t>(sizeof(T))} {
        if (shape_.source_stride == 0) shape_.source_stride = shape_.source_width;
        if (shape_.target_stride == 0) shape_.target_stride = shape_.target_width;
        require_plan(p, here);
        bool const apart = shape_.source_stride >= shape_.source_width && shape_.target_stride >= shape_.target_width;
        require(width >= 0 && apart, "cuda::exchange", "strides", "at least the widths",
                std::min(shape_.source_stride, shape_.target_stride), here);
        require(current_device() == comm.device(), "cuda::exchange", "current device", comm.device(), current_device(),
                here);
        require(others.empty() || (p.covers_target() && !sums_), "cuda::exchange",
                "plan of which some rows move in another way", "one that fills the target and does not add", "another",
                here);
        require(addable || !sums_, "cuda::exchange", "elements of a plan that sums", "a type with +",
                std::string(cpx::detail::type_name<T>()), here);
        if (!p.local) detail::agree(comm, p.id.for_elements<T>(width), p, here);
    }

    void require_plan(plan const& p, caller here) const {
        require(p.ranks() == comm_.ranks() && p.rank == comm_.rank(), "cuda::exchange", "rank of the plan",
                std::to_string(comm_.rank()) + " of " + std::to_string(comm_.ranks()),
                std::to_string(p.rank) + " of " + std::to_string(p.ranks()), here);
    }
    void take(plan const& p, detail::message_tables t) {
        source_rows_ = p.source_rows;
        target_rows_ = p.target_rows;
        zeros_first_ = sums_ || !p.covers_target();
        tables_ = std::move(t);
        tables_.list.clear(); // it is on the device
    }

    void check_buffer(char const* which, auto const& b, index_t count, index_t width, index_t stride,
                      caller here) const {
        std::string const where = std::string("cuda::exchange, ") + which;
        require(b.count() == count && b.width() == width && (b.stride() == stride || count < 2), where.c_str(),
                "rows, width and stride",
                std::to_string(count) + ", " + std::to_string(width) + ", " + std::to_string(stride),
                std::to_string(b.count()) + ", " + std::to_string(b.width()) + ", " + std::to_string(b.stride()), here);
        detail::require_memory("cuda::exchange", which, b, here);
        require(b.count() * b.width() == 0 || detail::address(b.data()) % 16 == 0, where.c_str(),
                "alignment of the buffer", "16 bytes", detail::address(b.data()) % 16, here);
    }
    /// Gives all messages to the stream; `place`: returns where one is and its bytes. With each goes `word`, if there
    /// is one.
    template <class Place>
    void send_and_receive(std::vector<detail::wire> const& sends, std::vector<detail::wire> const& receives,
                          Place&& place, std::int64_t* word, cudaStream_t stream, caller here) {
        if (sends.empty() && receives.empty()) return;
        auto const give = [&](auto operation, void* data, index_t size, int peer) { // the group's end reports failures
            static_cast<void>(operation(data, static_cast<std::size_t>(size), ncclInt8, peer, comm_.get(), stream));
        };
        auto const each = [&](auto operation, std::vector<detail::wire> const& messages, auto&& word_of) {
            for (detail::wire const& w : messages) {
                if (word) give(operation, word_of(w.peer), sizeof *word, w.peer);
                auto const [data, size] = place(w);
                give(operation, data, size, w.peer);
            }
        };
        comm_.call(
            "ncclSend and ncclRecv",
            [&] {
                static_cast<void>(ncclGroupStart());
                each(ncclSend, sends, [&](int) { return word; });
                each(ncclRecv, receives, [&](int peer) { return words_.data() + peer; });
                return ncclGroupEnd();
            },
            here);
    }
    /// Sends a byte for every message: NCCL connects two ranks when they first meet, which waits for both on the host.
    void connect(std::vector<detail::wire> const& sends, std::vector<detail::wire> const& receives, caller here) {
        comm_.begin_call(here);
        cuda::stream const stream;
        buffer<char> const room(std::ssize(sends) + std::ssize(receives), here);
        char* next = room.data();
        send_and_receive(
            sends, receives, [&](detail::wire const&) { return std::pair(next++, index_t{1}); }, nullptr, stream, here);
        settle(stream, here);
    }
    /// Waits for a stream of this object's own. What has been found of other ranks is left for the caller's wait.
    void settle(cudaStream_t stream, caller here) {
        event end;
        end.record(stream, here);
        comm_.wait(end, here);
    }
    static kernels::rectangle_list list_of(kernels::rectangle const* list, detail::launch_size size) {
        return {list, size.rectangles, size.slices};
    }
    static void copy(kernels::rectangle const* list, detail::launch_size size,
                     kernels::rectangle_buffers const& buffers, cudaStream_t stream, caller here) {
        if (size.slices == 0) return;
        launch_early(kernels::copy_rectangles<>, grid(size), 512, 0, stream, "copy_rectangles", here,
                     list_of(list, size), buffers);
    }

    nccl& comm_;
    event done_; ///< the end of the last call
    index_t width_, source_rows_ = 0, target_rows_ = 0;
    bool sums_, zeros_first_ = false, compares_ = false;
    detail::row_shapes shape_;
    detail::message_tables tables_;
    buffer<kernels::rectangle> list_; ///< of an exchange with room, behind the plan's fingerprint
    buffer<char> staged_out_, staged_in_;
    buffer<std::int64_t> words_; ///< the fingerprints of other ranks
    std::optional<upload_ring> ring_;
};

} // namespace cpx::cuda
