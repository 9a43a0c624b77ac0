// SPDX-License-Identifier: Apache-2.0
// Messages that ranks pack where their peers unpack them, in memory that all of them reach.
#pragma once

#include <cpx/cuda/exchange_tables.hpp>
#include <cpx/cuda/launch.hpp>
#include <cpx/cuda/peer_memory.hpp>

#include <cpx/push_messages.cuh>

#include <algorithm>

namespace cpx::cuda::detail {

/// This rank's place for the messages of an exchange that come, in memory that all ranks reach.
class message_window {
public:
    message_window(peer_resource& in, index_t bytes, caller here)
        : in_(in), landing_(bytes, in, nullptr, here), place_(bytes > 0 ? in.place(landing_.data(), here).first : 0) {
        load(kernels::push_messages<>, here);
        load(kernels::copy_rectangles<>, here);
    }

    char* data() { return landing_.data(); }
    index_t bytes() const { return landing_.size(); }

    /// Packs what leaves where the others unpack it, and ends when what comes is here.
    void push(kernels::message_push p, cudaStream_t stream, caller here) const {
        peer_memory const near = in_.peers(here);
        std::copy_n(near.base, kernels::most_ranks, p.base);
        p.landing = place_;
        launch_early(kernels::push_messages<>, dims(near.blocks), 512, 0, stream, "push_messages", here, p,
                     near.meeting);
        in_.begin_call(here); // counted once it is enqueued: what was refused was no call
    }

private:
    peer_resource& in_;
    block<char> landing_;
    index_t place_; ///< of the landing, bytes from the beginning of this rank's memory
};

} // namespace cpx::cuda::detail
