// SPDX-License-Identifier: Apache-2.0
// Runs a plan between GPUs by send and receive: packed, one message a peer, unpacked.
#pragma once

#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/launch.hpp>
#include <cpx/cuda/nvtx.hpp>
#include <cpx/layout/sharded.hpp>
#include <cpx/plan/relayout.hpp>
#include <cpx/transport/agree.hpp>
#include <cpx/transport/nccl.hpp>

#include <cpx/rectangles.cuh>

#include <algorithm>
#include <type_traits>
#include <utility>

namespace cpx::cuda {

namespace detail {

/// Lets all ranks compare what they are about to run, every time: NCCL's messages do not tell of which plan they are.
inline void agree(nccl& comm, identity const& mine, thd const& batch, caller here) {
    cpx::detail::compare(
        "cuda::exchange", mine, batch, comm.ranks(),
        [&](void const* my_part, void* all, std::size_t bytes) { comm.gather(my_part, all, bytes, here); }, here);
}

/// Rows and columns of one end of a message, as places in a buffer of `pitch` bytes a row.
struct rectangle_end {
    std::vector<run> rows, columns; ///< columns in bytes
    index_t pitch = 0;
    int buffer = 0;
    index_t base = 0; ///< bytes from the buffer's beginning
};

/// Lists the rectangles that take `from` to `to`, which name equally many rows and columns, cut to `most` bytes.
inline void list_rectangles(rectangle_end const& from, rectangle_end const& to, std::vector<kernels::rectangle>& list,
                            index_t most = index_t{1} << 15) {
    auto const zip = [](std::vector<run> const& a, std::vector<run> const& b, auto&& each) {
        std::size_t i = 0, j = 0;
        for (index_t used_a = 0, used_b = 0; i < a.size() && j < b.size();) {
            index_t const count = std::min(a[i].count - used_a, b[j].count - used_b);
            if (count > 0) each(a[i].first + used_a, b[j].first + used_b, count);
            used_a += count, used_b += count;
            if (used_a == a[i].count) ++i, used_a = 0;
            if (used_b == b[j].count) ++j, used_b = 0;
        }
    };
    zip(from.rows, to.rows, [&](index_t from_row, index_t to_row, index_t rows) {
        zip(from.columns, to.columns, [&](index_t from_byte, index_t to_byte, index_t bytes) {
            index_t const wide = std::min(bytes, index_t{1} << 30), step = std::max<index_t>(1, most / wide);
            for (index_t column = 0; column < bytes; column += wide)
                for (index_t row = 0; row < rows; row += step) {
                    index_t const count = std::min(step, rows - row), width = std::min(wide, bytes - column);
                    kernels::rectangle r{};
                    r.source = from.base + (from_row + row) * from.pitch + from_byte + column;
                    r.target = to.base + (to_row + row) * to.pitch + to_byte + column;
                    r.source_pitch = from.pitch;
                    r.target_pitch = to.pitch;
                    r.rows = static_cast<std::int32_t>(count);
                    r.bytes = static_cast<std::int32_t>(width);
                    r.source_buffer = static_cast<std::int16_t>(from.buffer);
                    r.target_buffer = static_cast<std::int16_t>(to.buffer);
                    r.vector = static_cast<std::int16_t>(
                        vector_bytes({r.source, r.target, r.source_pitch, r.target_pitch, r.bytes}));
                    list.push_back(r);
                }
        });
    });
}

} // namespace detail

/// A plan made ready for device buffers of elements T: tables and staging memory, made once, used by every call.
///
/// Each call packs what leaves, sends one message a peer and unpacks, on the caller's stream, without host
/// synchronisation or allocation. Rows that stay are copied once. A message that is one run of whole rows is sent from,
/// or received into, its place. A plan that sums adds in rank order.
/// Made by all ranks of the communicator, on its device; calls are collective and in the same order on all ranks. Can
/// be captured; before this object is destroyed the graph has ended, and it is not launched again.
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
        : plan_(p), comm_(comm), others_(others), source_width_(p.source_width ? p.source_width : width),
          target_width_(p.target_width ? p.target_width : width),
          from_stride_(from_stride ? from_stride : source_width_), to_stride_(to_stride ? to_stride : target_width_),
          zeros_first_(p.kind == flow::sums || !p.covers_target()) {
        require(p.ranks() == comm.ranks() && p.rank == comm.rank(), "cuda::exchange", "rank of the plan",
                std::to_string(comm.rank()) + " of " + std::to_string(comm.ranks()),
                std::to_string(p.rank) + " of " + std::to_string(p.ranks()), here);
        require(width >= 0 && from_stride_ >= source_width_ && to_stride_ >= target_width_, "cuda::exchange", "strides",
                "at least the widths", std::min(from_stride_, to_stride_), here);
        require(current_device() == comm.device(), "cuda::exchange", "current device", comm.device(), current_device(),
                here);
        require(others.empty() || !zeros_first_, "cuda::exchange", "plan of which some rows move in another way",
                "one that fills the target and does not add", "another", here);
        require(addable || p.kind != flow::sums, "cuda::exchange", "elements of a plan that sums", "a type with +",
                std::string(cpx::detail::type_name<T>()), here);
        if (!p.local) detail::agree(comm, p.id.for_elements<T>(width), p.batch, here);
        make_tables();
        connect(here);
    }

    /// Moves this rank's rows of `from` to where they belong in everybody's `to`; they must not overlap.
    ///
    /// from, to: (rows, width) of the plan's source and target, rows as far apart as the constructor was told,
    /// beginning at multiples of 16 bytes in memory of the communicator's device. Throws `cpx::error` before anything
    /// is enqueued if a buffer does not fit or is not memory of this device, or if the communicator is broken.
    void operator()(rows<T const> from, rows<T> to, cudaStream_t stream, caller here = caller::here()) {
        require(current_device() == comm_.device(), "cuda::exchange", "current device", comm_.device(),
                current_device(), here);
        check_buffer("source", from, plan_.source_rows, source_width_, from_stride_, here);
        check_buffer("target", to, plan_.target_rows, target_width_, to_stride_, here);
        detail::require_apart("cuda::exchange", {{"target", to}}, {{"source", from}}, here);
        comm_.begin_call(here);
        cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
        check(cudaStreamIsCapturing(stream, &capturing), "cudaStreamIsCapturing", here);
        auto const range = named_range<"cpx exchange, send and receive">();
        kernels::rectangle_buffers const buffers{{reinterpret_cast<char*>(const_cast<T*>(from.data())),
                                                  reinterpret_cast<char*>(to.data()), staged_out_.data(),
                                                  staged_in_.data()}};
        if (zeros_first_ && to.count() > 0 && to.width() > 0)
            check(cudaMemset2DAsync(to.data(), bytes(to_stride_), 0, bytes(to.width()),
                                    static_cast<std::size_t>(to.count()), stream),
                  "cudaMemset2DAsync", here);
        copy(pack_, buffers, stream, here);
        send_and_receive([&](wire const& w) { return std::pair(buffers.base[w.buffer] + w.offset, w.bytes); }, stream,
                         here);
        copy(unpack_, buffers, stream, here);
        if constexpr (addable)
            for (table const& t : add_)
                if (t.count > 0) {
                    launch_early(kernels::add_rectangles<T>, grid(t.count), 256, 0, stream, "add_rectangles", here,
                                 t.list.data(), t.count, buffers);
                }
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
    struct wire {
        int peer, buffer;
        index_t offset, bytes;
    };
    struct table {
        buffer<kernels::rectangle> list;
        int count = 0;
    };
    static std::size_t bytes(index_t elements) { return static_cast<std::size_t>(elements) * sizeof(T); }
    static unsigned grid(int count) { return static_cast<unsigned>(std::min(count, 1056)); }

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
    /// Gives all messages to the stream; `place`: returns where one is and its bytes.
    template <class Place>
    void send_and_receive(Place&& place, cudaStream_t stream, caller here) {
        if (sends_.empty() && receives_.empty()) return;
        auto const give = [&](auto operation, std::vector<wire> const& messages) {
            for (wire const& w : messages) {
                auto const [data, bytes] = place(w);
                static_cast<void>(operation(data, static_cast<std::size_t>(bytes), ncclInt8, w.peer, comm_.get(),
                                            stream)); // the group's end reports what fails
            }
        };
        comm_.call(
            "ncclSend and ncclRecv",
            [&] {
                static_cast<void>(ncclGroupStart());
                give(ncclSend, sends_);
                give(ncclRecv, receives_);
                return ncclGroupEnd();
            },
            here);
    }
    /// Sends a byte for every message: NCCL connects two ranks when they first meet, which waits for both on the host.
    void connect(caller here) {
        comm_.begin_call(here);
        cuda::stream const stream;
        buffer<char> const bytes(std::ssize(sends_) + std::ssize(receives_), here);
        char* next = bytes.data();
        send_and_receive([&](wire const&) { return std::pair(next++, index_t{1}); }, stream, here);
        comm_.wait(stream, here);
    }
    void copy(table const& t, kernels::rectangle_buffers const& buffers, cudaStream_t stream, caller here) const {
        if (t.count == 0) return;
        launch_early(kernels::copy_rectangles<>, grid(t.count), 512, 0, stream, "copy_rectangles", here, t.list.data(),
                     t.count, buffers);
    }
    static table upload(std::vector<kernels::rectangle> const& list) {
        return {buffer<kernels::rectangle>(std::span(list)), static_cast<int>(list.size())};
    }

    /// Returns a message's end in one of the caller's buffers.
    detail::rectangle_end place(message const& m, bool out) const {
        index_t const element = static_cast<index_t>(sizeof(T)), width = out ? source_width_ : target_width_;
        detail::rectangle_end end{m.rows, m.columns, (out ? from_stride_ : to_stride_) * element, out ? 0 : 1, 0};
        if (end.columns.empty()) end.columns.push_back({0, width});
        for (run& c : end.columns) c = {c.first * element, c.count * element};
        return end;
    }
    /// Returns the same bytes side by side from `base` on in a staging buffer.
    static detail::rectangle_end packed(detail::rectangle_end const& end, int buffer, index_t base) {
        index_t const width = total(end.columns);
        return {{{0, total(end.rows)}}, {{0, width}}, width, buffer, base};
    }

    bool elsewhere(int peer) const { return peer >= others_.first && peer < others_.last; }

    void make_tables() {
        std::vector<kernels::rectangle> pack, unpack;
        index_t out = 0, in = 0;
        auto const walk = [&](std::vector<message> const& messages, bool outgoing, auto&& staged) {
            for (message const& m : messages) {
                if (m.peer == plan_.rank || elsewhere(m.peer)) continue;
                auto const end = place(m, outgoing);
                index_t const size = total(end.rows) * total(end.columns);
                if (size == 0) continue;
                bool const dense = end.rows.size() == 1 && total(end.columns) == end.pitch;
                if (dense && (outgoing || plan_.kind != flow::sums))
                    (outgoing ? sends_ : receives_)
                        .push_back({m.peer, end.buffer, end.rows[0].first * end.pitch, size});
                else
                    staged(m, end, size);
            }
        };
        auto const padded = [](index_t size) { return (size + 255) / 256 * 256; };
        walk(plan_.sends, true, [&](message const& m, detail::rectangle_end const& end, index_t size) {
            detail::list_rectangles(end, packed(end, 2, out), pack);
            sends_.push_back({m.peer, 2, out, size});
            out += padded(size);
        });
        std::vector<std::pair<int, std::vector<kernels::rectangle>>> sums;
        walk(plan_.receives, false, [&](message const& m, detail::rectangle_end const& end, index_t size) {
            if (plan_.kind == flow::sums)
                detail::list_rectangles(packed(end, 3, in), end,
                                        sums.emplace_back(m.peer, std::vector<kernels::rectangle>()).second);
            else
                detail::list_rectangles(packed(end, 3, in), end, unpack);
            receives_.push_back({m.peer, 3, in, size});
            in += padded(size);
        });
        auto const own = [&](std::vector<message> const& list) {
            return std::ranges::find(list, plan_.rank, &message::peer);
        };
        if (auto const kept = own(plan_.sends); kept != plan_.sends.end() && !elsewhere(plan_.rank)) {
            auto const from = place(*kept, true), to = place(*own(plan_.receives), false);
            auto& list = plan_.kind == flow::sums
                             ? sums.emplace_back(plan_.rank, std::vector<kernels::rectangle>()).second
                             : pack;
            detail::list_rectangles(from, to, list);
        }
        std::ranges::sort(sums, {}, [](auto const& s) { return s.first; });
        pack_ = upload(pack);
        unpack_ = upload(unpack);
        for (auto const& s : sums) add_.push_back(upload(s.second));
        staged_out_ = buffer<char>(out);
        staged_in_ = buffer<char>(in);
    }

    plan plan_;
    nccl& comm_;
    event done_; ///< the end of the last call
    range others_;
    index_t source_width_, target_width_, from_stride_, to_stride_;
    bool zeros_first_;
    std::vector<wire> sends_, receives_;
    table pack_, unpack_;
    std::vector<table> add_;
    buffer<char> staged_out_, staged_in_;
};

} // namespace cpx::cuda
