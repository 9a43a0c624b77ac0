// SPDX-License-Identifier: Apache-2.0
// Ranks on one GPU, which store into each other's buffers: as streams, or as blocks of one launch.
#pragma once

#include <cpx/cuda/relayout.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace one_gpu {

using cpx::index_t;

/// cu_seqlens in device memory.
class offsets {
public:
    explicit offsets(cpx::thd const& batch)
        : device_(std::vector<index_t>(batch.offsets().begin(), batch.offsets().end())) {}
    std::span<index_t const> list() const { return {device_.data(), static_cast<std::size_t>(device_.size())}; }

private:
    cpx::cuda::buffer<index_t> device_;
};

/// Each rank has a stream and memory that the others reach; it begins with bytes of 0x7f.
struct ranks {
    ranks(int how_many, index_t bytes, int blocks, std::uint64_t patience = 20'000'000'000) : count(how_many) {
        auto const words = static_cast<std::size_t>(cpx::kernels::meeting::count(blocks, count));
        for (int r = 0; r < count; ++r) {
            streams.emplace_back();
            memory.emplace_back(std::span<char const>(std::vector<char>(static_cast<std::size_t>(bytes), '\x7f')));
            flags.emplace_back(std::span<std::uint64_t const>(std::vector<std::uint64_t>(words)));
            epochs.emplace_back(
                std::span<std::uint32_t const>(std::vector<std::uint32_t>(static_cast<std::size_t>(blocks + 1))));
        }
        cpx::cuda::check(cudaHostAlloc(reinterpret_cast<void**>(&found), sizeof *found, cudaHostAllocPortable),
                         "cudaHostAlloc");
        *found = {};
        for (int r = 0; r < count; ++r) {
            cpx::cuda::peer_memory p;
            p.device = cpx::cuda::current_device();
            p.bytes = bytes;
            p.blocks = blocks;
            for (int peer = 0; peer < count; ++peer) {
                p.base[peer] = memory[static_cast<std::size_t>(peer)].data();
                p.meeting.flags[peer] = flags[static_cast<std::size_t>(peer)].data();
            }
            p.meeting.epochs = epochs[static_cast<std::size_t>(r)].data();
            p.meeting.found = found;
            p.meeting.patience = patience;
            p.meeting.rank = r;
            p.meeting.ranks = count;
            peers.push_back(p);
        }
    }
    ~ranks() { static_cast<void>(cudaFreeHost(found)); }

    /// Returns what kernels have found, as "missing 1 cu_seqlens 0 2"; nothing if all is well.
    std::string faults() const {
        std::string text;
        auto const add = [&](char const* name, std::uint8_t const* fault, int what = 1) {
            bool first = true;
            for (int r = 0; r < count; ++r)
                if (fault[r] == what)
                    text += (std::exchange(first, false) ? std::string(text.empty() ? "" : " ") + name : "") + ' ' +
                            std::to_string(r);
        };
        add("missing", found->missing);
        int field = 0;
        for (char const* const name : {"cu_seqlens", "source", "target", "other"}) add(name, found->differs, ++field);
        add("refused", found->refused);
        return text;
    }

    int count;
    std::vector<cpx::cuda::stream> streams;
    std::vector<cpx::cuda::buffer<char>> memory;
    std::vector<cpx::cuda::buffer<std::uint64_t>> flags;
    std::vector<cpx::cuda::buffer<std::uint32_t>> epochs;
    cpx::kernels::faults* found = nullptr;
    std::vector<cpx::cuda::peer_memory> peers;
};

/// All ranks in one launch: they need no streams that run beside each other, which checkers do not give.
template <class From, class To>
__global__ void __launch_bounds__(512, 1)
    all_ranks(From from, To to, cpx::kernels::relayout_rows const* rows, cpx::kernels::meeting const* meetings) {
    cpx::kernels::store_rows(from, to, rows[blockIdx.y], meetings[blockIdx.y]);
}

/// Runs the relayouts of all ranks in one launch, `times` times, and waits for them. `arguments`: of each rank's call.
template <class T, class From, class To>
void run(std::vector<cpx::cuda::relayout<T, From, To>> const& moves,
         std::vector<cpx::kernels::relayout_rows> const& arguments, ranks const& gpu, int times = 1) {
    std::vector<cpx::kernels::meeting> meetings;
    for (auto const& p : gpu.peers) meetings.push_back(p.meeting);
    cpx::cuda::buffer<cpx::kernels::relayout_rows> const rows{std::span<cpx::kernels::relayout_rows const>(arguments)};
    cpx::cuda::buffer<cpx::kernels::meeting> const places{std::span<cpx::kernels::meeting const>(meetings)};
    using A = std::remove_cvref_t<decltype(moves[0].source())>;
    using B = std::remove_cvref_t<decltype(moves[0].target())>;
    auto const shared = cpx::kernels::relayout_memory<A, B>(arguments[0].sequences, gpu.count);
    dim3 const grid(static_cast<unsigned>(gpu.peers[0].blocks), static_cast<unsigned>(gpu.count));
    for (int i = 0; i < times; ++i)
        all_ranks<<<grid, 512, shared>>>(moves[0].source(), moves[0].target(), rows.data(), places.data());
    cpx::cuda::check(cudaDeviceSynchronize(), "all_ranks");
}

} // namespace one_gpu
