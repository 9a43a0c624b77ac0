// SPDX-License-Identifier: Apache-2.0
// The transport of tensors on devices: an NCCL communicator in a stream.
#pragma once

#include <cpx/cuda/exchange.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/transport/movement.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace cpx::cuda {

template <class T, class Plan>
class prepared_plans;

/// One rank of an NCCL communicator, whose tensors are in device memory and whose work is in one stream: a
/// `device_transport`, which `cpx::exchange` and operators take as they take the host's transports.
///
/// Belongs to the communicator's device and to one thread; the communicator, the stream and the memory outlive it.
/// Calls with a plan prepare it first: ranks compare what they are about to run, tables are uploaded. What is called
/// again and again prepares once, see `cpx::movement`.
class communicator {
public:
    using memory_type = cuda::memory;
    template <class T, class Plan>
    using prepared = prepared_plans<T, Plan>;

    explicit communicator(nccl& comm, cudaStream_t in, memory_resource& from = default_resource())
        : communicator(comm, in, from, nullptr) {}

    int rank() const { return comm_.rank(); }
    int ranks() const { return comm_.ranks(); }
    cuda::memory const& memory() const { return memory_; }
    cudaStream_t stream() const { return memory_.stream(); }
    /// Works in another stream from now on, which the caller orders behind this one.
    void work_in(cudaStream_t other) {
        memory_ = cuda::memory(other, *from_);
        tables_ = detail::batch_tables(other);
    }
    nccl& nccl_communicator() const { return comm_; }
    /// Returns the memory that kernels of all ranks reach, if halos and carries go there, or null.
    peer_resource* through() const { return through_; }
    /// Returns what makes the tables of movements; see `set_together`.
    detail::batch_tables& tables() { return tables_; }

    /// Runs a plan in the stream; `cpx::exchange` calls it. Rows may have any alignment; those that begin at no
    /// multiple of 16 bytes, such as columns of others, cost a copy. Collective.
    template <class T>
    void exchange(plan const& p, rows<T const> const& from, rows<T> const& to, caller here = caller::here()) {
        auto const dense = [&](rows<T const> r) -> cuda::block<T> {
            bool const fits = r.count() == 0 || r.width() == 0 || detail::address(r.data()) % 16 == 0;
            if (fits) return {};
            detail::require_memory("cuda::exchange", {{"rows", r}}, here);
            auto made = memory_.template room<T>(r.count() * r.width());
            copy<T>({made.data(), r.count(), r.width()}, r, here);
            return made;
        };
        auto const source = dense(from);
        auto target = dense(to);
        rows<T> const in_place = target.size() ? rows<T>(target.data(), to.count(), to.width()) : to;
        exchange_aligned(p, source.size() ? rows<T const>(source.data(), from.count(), from.width()) : from, in_place,
                         here);
        if (target.size()) copy<T>(to, in_place, here);
    }

    /// Keeps what the stream needs until it has come here. Frees what it no longer needs.
    template <class Kept>
    void keep(std::unique_ptr<Kept> kept, caller here = caller::here()) {
        while (!kept_.empty() && cudaEventQuery(kept_.front().first) == cudaSuccess) kept_.pop_front();
        static_cast<void>(cudaGetLastError()); // not ready is no error
        event end;
        end.record(stream(), here);
        kept_.emplace_back(std::move(end), std::shared_ptr<Kept>(std::move(kept)));
    }

    /// Waits until the stream has done all it was given. Throws `cpx::error` that names the ranks that did not come
    /// within the deadline or moved rows of another batch, or another error of NCCL's or the device's.
    void wait(caller here = caller::here()) const { comm_.wait(stream(), here); }

protected:
    communicator(nccl& comm, cudaStream_t in, memory_resource& from, peer_resource* through)
        : comm_(comm), from_(&from), through_(through), memory_(in, from), tables_(in) {}

private:
    template <class T>
    void exchange_aligned(plan const& p, rows<T const> const& from, rows<T> const& to, caller here) {
        auto const stride = [](auto const& r) { return r.count() > 1 ? r.stride() : 0; };
        exchange_options const of{stride(from), stride(to)};
        auto made = std::make_unique<cuda::exchange<T>>(p, from.width(), comm_, of, here);
        (*made)(from, to, stream(), {}, here);
        keep(std::move(made), here);
    }
    template <class T>
    void copy(rows<T> const& to, rows<T const> const& from, caller here) const {
        auto const bytes = [](index_t n) { return static_cast<std::size_t>(n) * sizeof(T); };
        auto const pitch = [&](auto const& r) { return bytes(std::max(r.stride(), r.width())); }; // of one row any
        check(cudaMemcpy2DAsync(to.data(), pitch(to), from.data(), pitch(from), bytes(to.width()),
                                static_cast<std::size_t>(to.count()), cudaMemcpyDeviceToDevice, stream()),
              "cudaMemcpy2DAsync", here);
    }

    nccl& comm_;
    memory_resource* from_;
    peer_resource* through_;
    cuda::memory memory_;
    detail::batch_tables tables_;
    std::deque<std::pair<event, std::shared_ptr<void>>> kept_;
};

/// Exchanges of a `communicator` by messages, of one batch after the other: of plans of one kind, perhaps both ways.
template <class T>
class batch_exchange {
public:
    /// As `exchange`. `there`, `back`: lanes of the plans there and of those back, where there are any. Collective.
    batch_exchange(std::span<plan const> plans, std::vector<lane_plan> there, std::vector<lane_plan> const& back,
                   index_t width, communicator& comm, exchange_options const& of, caller here)
        : comm_(comm), there_(there.size()), lanes_(std::move(there)),
          by_(plans, width, comm.nccl_communicator(), of, here) {
        lanes_.insert(lanes_.end(), back.begin(), back.end());
        if (plans.empty() || !detail::batch_tables::may_bring(lanes_))
            lanes_.clear(); // without plans there are no ids, either
        else
            ids_ = {plans.front().id, plans.back().id};
    }

    /// Makes ready for another batch, in stream order: where its shardings are cut `alike`, by lanes, if they tell what
    /// moves; else by the plans that `list(use)` gives to `use`. Else as `exchange::set`.
    template <class F>
    void set(thd const& batch, bool alike, F&& list, caller here) {
        for (identity& id : ids_) id.set_batch(batch);
        auto const id_of = [&](std::size_t i) -> identity const& { return ids_[i >= there_]; };
        if (alike && !lanes_.empty() && by_.set(lanes_, id_of, batch, comm_.tables(), here)) return;
        list([&](std::span<plan const> plans) { by_.set(plans, batch, comm_.tables(), here); });
    }
    /// As `exchange`.
    void operator()(rows<T const> from, rows<T> to, exchange_call of, caller here) {
        comm_.tables().write(here);
        by_(from, to, comm_.stream(), of, here);
    }
    std::pair<index_t, index_t> rows_of(index_t number, caller here) const { return by_.rows_of(number, here); }

private:
    communicator& comm_;
    std::size_t there_; ///< plans there
    std::vector<lane_plan> lanes_;
    std::array<identity, 2> ids_ = {};
    exchange<T> by_;
};

/// What a `cpx::movement` prepares on devices: to send and receive rows, but those of the ranks `others`. Those of
/// halos and carries, which are few, go through memory that all ranks reach, if there is such.
///
/// Through memory, a call that is captured moves, when it is replayed, rows of the batch that was set last before the
/// replay; its rows have room for every batch that fits.
template <class T, class Plan>
class prepared_plans {
    using kind = cpx::detail::moved<Plan>;

public:
    prepared_plans(Plan const& p, typename kind::width width, capacity const& most, communicator& comm, caller here,
                   range others = {})
        : comm_(comm), width_(width), first_(kind::batch_of(p)), now_(first_) {
        if (!kind::mirrors(p)) back_ = ready(p, true, most, others, here);
        there_ = ready(p, false, most, others, here); // last, for that is what the first call runs
    }
    template <class F>
    void set(typename kind::batch const& of, F&& plan_of, caller here) {
        if (comes_back_) require_no_capture(here); // first: what is refused changes nothing
        set(*there_, of, plan_of, false, here);
        now_ = of;
        back_is_set_ = false;
        if (comes_back_) set_back(plan_of, here);
    }
    template <class F>
    void operator()(F&& plan_of, bool back, index_t number, rows<T const> const& from, rows<T> const& to, caller here) {
        bool const mirrored = back && !back_;
        if (back && !mirrored) set_back(plan_of, here);
        (*(back && !mirrored ? back_ : there_))(from, to, {number, mirrored}, here);
    }
    template <class F>
    std::pair<index_t, index_t> rows_of(F&&, index_t number, caller here) const {
        return there_->rows_of(number, here);
    }
    cuda::memory memory() const { return comm_.memory(); }

private:
    using one_way = std::unique_ptr<batch_exchange<T>>;
    /// Makes ready for calls back, unless they are. Where these may be captured, batches that come later do so at once.
    template <class F>
    void set_back(F&& plan_of, caller here) {
        comes_back_ = through() != nullptr;
        if (back_is_set_) return;
        if (comes_back_) require_no_capture(here);
        set(*back_, now_, plan_of, true, here);
        back_is_set_ = true;
    }
    void require_no_capture(caller here) const {
        require(!captures(comm_.stream(), here), "movement", "stream of the first call back of a batch",
                "one that does not capture", "a capture", here);
    }
    peer_resource* through() const {
        constexpr bool moves_little =
            !cpx::detail::is_relayout<Plan> && !std::tuple_element_t<0, typename kind::batch>::every_row;
        return moves_little ? comm_.through() : nullptr;
    }
    template <class F>
    void set(batch_exchange<T>& to, typename kind::batch const& of, F&& plan_of, bool back, caller here) {
        auto const list = [&](auto&& use) { kind::exchanges(plan_of(), width_, back, use); };
        to.set(std::get<0>(of).batch(), cpx::detail::cut_alike(of, first_), list, here);
    }
    one_way ready(Plan const& p, bool back, capacity const& most, range others, caller here) const {
        exchange_options const of{.others = others, .room = kind::room(p, width_, most, here), .through = through()};
        return kind::exchanges(p, width_, back, [&](std::span<plan const> plans) {
            return std::make_unique<batch_exchange<T>>(plans, kind::lanes(p, width_, back), std::vector<lane_plan>(),
                                                       kind::row_width(width_), comm_, of, here);
        });
    }

    communicator& comm_;
    typename kind::width width_;
    typename kind::batch first_, now_; ///< for which it was made, and has been set
    one_way there_, back_;             ///< those back, unless they are the same the other way
    bool back_is_set_ = true, comes_back_ = false;
};

} // namespace cpx::cuda
