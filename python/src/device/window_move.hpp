// SPDX-License-Identifier: Apache-2.0
// Relayouts by one kernel into memory that ranks write to each other, between layouts that are values.
#pragma once

#include "group.hpp"

#include <cpx/cuda/exchange.hpp>
#include <cpx/cuda/relayout.hpp>
#include <cpx/cuda/shared_memory.hpp>
#include <cpx/cuda/write_numbers.hpp>

#include <optional>
#include <string_view>
#include <variant>

namespace binding {

/// A layout in so few numbers that a thread has them in registers.
struct few_chunks {
    static constexpr int most = 32, most_ranks = 16;
    std::uint64_t first = 0, second = 0; ///< owners, 4 bits each
    int count = 0, of = 1;

    CPX_HOST_DEVICE int ranks() const { return of; }
    CPX_HOST_DEVICE int chunks() const { return count; }
    CPX_HOST_DEVICE int owner(int c) const {
        return static_cast<int>((c < 16 ? first : second) >> c % 16 * 4) & (most_ranks - 1);
    }
};

/// One of two, the first for runs whose length is a multiple: of 1, for all.
struct few_by_length {
    few_chunks first, second;
    std::int32_t multiple = 1;

    CPX_HOST_DEVICE int ranks() const { return first.ranks(); }
    CPX_HOST_DEVICE few_chunks at(index_t n) const {
        return static_cast<std::int32_t>(n) % multiple == 0 ? first : second;
    }
};

/// Whether kernels compute where rows of a sharding are; known from its layout, scope and cut, for every batch alike.
inline bool computed(any_rows const& s) { return std::ssize(s.sections()) <= cpx::kernels::most_sections; }
inline bool computed(any_tokens const& s) {
    chunk_list const& of = s.policy();
    return of.first > 0 && std::max(of.first, of.chunks() - of.first) <= few_chunks::most &&
           s.ranks() <= cpx::kernels::most_ranks && of.multiple < index_t{1} << 31 && !(of.of_batch && of.unit > 1);
}

inline auto device_side(any_tokens const& s) {
    chunk_list const& of = s.policy();
    few_by_length policy;
    auto const list = [&](int begin, int end) {
        few_chunks l{0, 0, end - begin, s.ranks()};
        for (int c = begin; c < end; ++c) {
            int const i = c - begin;
            (i < 16 ? l.first : l.second) |= static_cast<std::uint64_t>(of.owner(c)) << i % 16 * 4;
        }
        return l;
    };
    policy.first = list(0, of.first);
    policy.second = of.chunks() > of.first ? list(of.first, of.chunks()) : policy.first;
    policy.multiple = static_cast<std::int32_t>(of.multiple);
    using cut = cpx::aligned<cpx::dynamic>;
    return cpx::kernels::any_token_side<few_by_length, cut>{policy, cut(of.unit), of.of_batch};
}

/// A relayout of elements of T into the group's window, for batches of as many sequences; perhaps both ways, which have
/// the same offsets. The group outlives it.
template <class T>
class window_move {
public:
    /// `width`: elements of a row, unless there are sections. `way`: 0, or 1 of a plan the other way; `both`: whether
    /// plans of both will be set. Throws `cpx::error` if kernels cannot run the plan.
    window_move(relayout_value const& plan, index_t width, device_group& g, index_t sequences, bool way, bool both)
        : group_(g) {
        plan.from.visit([&](auto const& from) {
            plan.to.visit([&](auto const& to) {
                made_[way].emplace(make(plan.plan, from, to, width));
                if (both) made_[!way].emplace(make(plan.plan.transposed(), to, from, width));
            });
        });
        offsets_ = cuda::buffer<index_t>(std::max<index_t>(sequences, 1) + 1);
        cuda::load_write_numbers(cpx::caller::here());
    }
    /// Moves tensors of a plan between other batches of the same layouts from now on; `print` stands for it one way,
    /// and its complement the other.
    void set(relayout_value const& plan, std::uint32_t print, bool way, cudaStream_t stream) {
        for (bool const back : {false, true}) {
            if (!made_[back]) continue;
            any_layout const &source = back == way ? plan.from : plan.to, &target = back == way ? plan.to : plan.from;
            std::visit(
                [&]<class From, class To>(cuda::relayout<T, From, To>& move) {
                    auto const word = [](any_layout const& of) {
                        return static_cast<std::uint32_t>(cpx::detail::mix_all(0, std::string_view(of.text())));
                    };
                    move.set(std::get<From>(source.real), std::get<To>(target.real),
                             {back ? ~print : print, word(source), word(target)});
                },
                *made_[back]);
        }
        auto const given = plan.from.batch().offsets();
        std::vector<index_t> offsets(given.begin(), given.end());
        offsets.resize(static_cast<std::size_t>(offsets_.size()), offsets.back()); // empty sequences behind them
        cuda::write_numbers(offsets, offsets_.data(), stream, cpx::caller::here());
    }
    /// Stores this rank's rows into all ranks' targets. One that is not in the window is copied there when rows have
    /// come: no other rank needs to know.
    void operator()(cpx::rows<T const> from, cpx::rows<T> to, bool way, cudaStream_t stream) {
        auto& window = *group_.shared();
        group_.nccl().begin_call(cpx::caller::here());
        auto const bytes = to.count() * to.width() * static_cast<index_t>(sizeof(T));
        bool const there = bytes > 0 && window.holds(to.data()) && cuda::detail::address(to.data()) % 16 == 0;
        auto const begin = (there ? reinterpret_cast<char*>(to.data()) : group_.landing().data()) - window.data();
        auto peers = window.peers();
        peers.bytes = begin + (bytes + 15) / 16 * 16;
        std::span<index_t const> const batch(offsets_.data(), static_cast<std::size_t>(offsets_.size()));
        std::visit(
            [&](auto const& move) {
                move.check_call(from, peers, begin, batch);
                move(from, peers, begin, batch, stream);
            },
            *made_[way]);
        window.begin_call(); // counted once it is enqueued: what was refused was no call
        if (!there && bytes > 0)
            cuda::check(cudaMemcpyAsync(to.data(), window.data() + begin, static_cast<std::size_t>(bytes),
                                        cudaMemcpyDeviceToDevice, stream),
                        "cudaMemcpyAsync");
        if (!is_capturing(stream)) done_.record(stream);
    }

    window_move(window_move const&) = delete;
    window_move& operator=(window_move const&) = delete;
    ~window_move() {
        try {
            group_.nccl().wait(done_);
        } catch (cpx::error const&) { // kernels end by themselves
        }
    }

private:
    using moves = std::variant<cuda::relayout<T, any_tokens, any_tokens>, cuda::relayout<T, any_tokens, any_rows>,
                               cuda::relayout<T, any_rows, any_tokens>>;
    template <class From, class To>
    static moves make(cpx::plan const& p, From const& from, To const& to, index_t width) {
        if constexpr (From::every_row && To::every_row)
            throw cpx::error("exchange", "sharding", "one by tokens, there or here", "none");
        else
            return cuda::relayout<T, From, To>(cpx::relayout_plan<From, To>{p, from, to}, width);
    }

    device_group& group_;
    std::optional<moves> made_[2];  ///< one way, and the other
    cuda::buffer<index_t> offsets_; ///< of the batch, in device memory
    cuda::event done_;              ///< the end of the last call
};

} // namespace binding
