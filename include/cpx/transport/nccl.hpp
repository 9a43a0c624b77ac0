// SPDX-License-Identifier: Apache-2.0
// One rank of an NCCL communicator, with deadlines and errors that say who is missing.
#pragma once

#include <cpx/transport/gather.hpp>
#include <cpx/transport/nccl_environment.hpp>
#include <cpx/transport/nccl_host_page.hpp>
#include <cpx/transport/nccl_watchdog.hpp>
#include <cpx/transport/roll_call.hpp>

#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace cpx {

/// A rank's communicator: joined with a deadline, watched, aborted when it fails.
///
/// Belongs to one thread and to the device that was current when it was made; outlives what is made with it. After an
/// error it has been aborted, so that nothing on the device waits for other ranks any more and memory can be freed, and
/// every later call throws at once. A peer that dies or never comes is an error on the others once a call, or a wait,
/// has lasted for the deadline; it names the ranks of this host that are missing.
///
/// Calls of NCCL block in this thread, as symmetric windows want; another one watches the deadline and aborts.
class nccl {
public:
    using clock = std::chrono::steady_clock;
    static constexpr std::chrono::milliseconds default_deadline = std::chrono::minutes(10);

    /// Joins the communicator of `id` as `rank` of `ranks`. Collective.
    ///
    /// Throws `cpx::error` if a rank has not come by the deadline or NCCL fails.
    nccl(ncclUniqueId const& id, int rank, int ranks, std::chrono::milliseconds deadline = default_deadline,
         caller here = caller::here())
        : nccl(rank, count_to(ranks, here), deadline, id, here) {
        join(here);
    }

    /// Returns all ranks of a communicator in this process, rank i on `devices[i]`, for one thread each.
    ///
    /// In one process, allocating or freeing memory of a device waits for all of that device's work: no thread does so
    /// while the rank of another thread waits for its rank. The communicators may be destroyed by any thread, in any
    /// order: NCCL ends all of them with the last one.
    static std::vector<std::unique_ptr<nccl>> all(std::span<int const> devices,
                                                  std::chrono::milliseconds deadline = default_deadline,
                                                  caller here = caller::here()) {
        detail::comm_id_for_now const own; // which NCCL makes
        auto const id = new_id(here);
        int const ranks = static_cast<int>(devices.size());
        auto const together = std::make_shared<detail::ended_together>(devices.size());
        struct back { // goes back to the caller's device, also when an error is thrown
            int device = 0;
            ~back() { static_cast<void>(cudaSetDevice(device)); }
        } before;
        require(done(cudaGetDevice(&before.device)), "nccl", "cudaGetDevice", "success", "a failure", here);
        std::vector<std::unique_ptr<nccl>> group;
        for (int rank = 0; rank < ranks; ++rank) {
            int const device = devices[static_cast<std::size_t>(rank)];
            detail::use_device(device, here);
            group.emplace_back(new nccl(rank, count_to(ranks, here), deadline, id, here)); // begins to join
        }
        for (auto& comm : group) comm->join(here, together);
        return group;
    }

    /// Joins the ranks of another transport, such as `mpi`, each on its current device. Collective over both.
    template <transport Other>
    static std::unique_ptr<nccl> over(Other& other, std::chrono::milliseconds deadline = default_deadline,
                                      caller here = caller::here()) {
        detail::comm_id_for_now const own; // which NCCL makes
        ncclUniqueId id{};
        if (other.rank() == 0) id = new_id(here);
        broadcast(other, std::as_writable_bytes(std::span(&id, 1)), here);
        return std::make_unique<nccl>(id, other.rank(), other.ranks(), deadline, here);
    }

    /// Joins as torchrun's variables say: RANK, WORLD_SIZE, LOCAL_RANK (which selects the device), MASTER_ADDR and
    /// MASTER_PORT. NCCL's own bootstrap listens on the port after MASTER_PORT, which torchrun itself holds, unless
    /// NCCL_COMM_ID already names an address.
    static std::unique_ptr<nccl> from_environment(std::chrono::milliseconds deadline = default_deadline,
                                                  caller here = caller::here()) {
        int const ranks = detail::variable("WORLD_SIZE", 1, 1 << 20, here),
                  rank = detail::variable("RANK", 0, ranks - 1, here);
        int devices = 0;
        require(done(cudaGetDeviceCount(&devices)) && devices > 0, "nccl", "GPUs", "at least 1", devices, here);
        int const local = detail::variable("LOCAL_RANK", 0, devices - 1, here);
        detail::use_device(local, here);
        detail::comm_id_for_now const id(detail::meeting_place(here).c_str());
        static std::atomic<int> before = 0; // communicators of this address, which is the id of all of them
        auto joined =
            std::unique_ptr<nccl>(new nccl(rank, count_to(ranks, here), deadline, new_id(here), here, ++before));
        joined->join(here);
        return joined;
    }

    /// Takes a communicator that is there, such as a framework's, with its rank, ranks and device, which is current.
    /// Collective: its ranks of one host find each other. It may be one that does not block.
    ///
    /// It stays its owner's, who destroys it after this object, and uses it only between calls here, in the same order
    /// on all ranks. What differs: the watch begins here; who has died before is not known. After an error a
    /// communicator that `is_left` is as it was: every later call here throws, but what the device was given may wait
    /// for other ranks until its owner aborts it, and so do memory that is freed and a call of NCCL's that blocks (as
    /// the first messages between two ranks do): none of them has a deadline. One that `is_aborted` is gone after an
    /// error, as NCCL's abort leaves it: then `get()` is null, and its owner does not touch it any more.
    static std::unique_ptr<nccl> adopt(ncclComm_t comm, adopted then = adopted::is_left,
                                       std::chrono::milliseconds deadline = default_deadline,
                                       caller here = caller::here()) {
        int rank = 0, ranks = 0, device = 0;
        check(ncclCommUserRank(comm, &rank), "ncclCommUserRank", here);
        check(ncclCommCount(comm, &ranks), "ncclCommCount", here);
        check(ncclCommCuDevice(comm, &device), "ncclCommCuDevice", here);
        std::array<char, 16> mine; // a name for the page of all ranks, which is that of rank 0
        std::random_device random;
        for (char& byte : mine) byte = static_cast<char>(random());
        std::unique_ptr<nccl> made(new nccl(rank, count_to(ranks, here), deadline, detail::page_name(mine), here));
        require(made->device_ == device, "nccl::adopt", "current device", device, made->device_, here);
        made->comm_ = std::make_unique<detail::watched_comm>(comm, device, made->deadline_, nullptr, then);
        made->present_->everyone_is_here(); // this rank alone
        std::vector<std::array<char, 16>> all(static_cast<std::size_t>(ranks));
        made->gather(mine.data(), all.data(), sizeof mine, here);
        made->present_ = std::make_shared<roll_call>(detail::page_name(all[0]), rank, made->numbers_);
        made->gather(mine.data(), all.data(), sizeof mine, here);
        made->present_->everyone_is_here();
        return made;
    }

    /// Returns the id of a new communicator, for one rank to make and give to the others.
    static ncclUniqueId new_id(caller here = caller::here()) {
        ncclUniqueId id;
        check(ncclGetUniqueId(&id), "ncclGetUniqueId", here);
        return id;
    }

    /// Throws `cpx::error` unless `result` is success. For calls that wait for no rank; `call` makes those that may.
    static void check(ncclResult_t result, char const* name, caller here = caller::here()) {
        require(result == ncclSuccess, "nccl", name, "success", ncclGetErrorString(result), here);
    }

    /// Joins the ranks of this communicator that give the same `color`, such as a context-parallel group. They are
    /// numbered from 0, in the order that they have here; errors give them the numbers that this communicator's errors
    /// do. Collective over this one. Throws `cpx::error` as the constructor does.
    std::unique_ptr<nccl> split(int color, caller here = caller::here()) {
        require(color >= 0, "nccl::split", "color", "not negative", color, here);
        std::vector<int> colors(static_cast<std::size_t>(ranks_)), members, numbers;
        gather(&color, colors.data(), sizeof color, here);
        for (int r = 0; r < ranks_; ++r)
            if (colors[static_cast<std::size_t>(r)] == color) members.push_back(r), numbers.push_back(number(r));
        int const place = static_cast<int>(std::ranges::find(members, rank_) - members.begin());
        detail::comm_id_for_now const own; // else all groups would have that id
        ncclUniqueId mine{};
        if (place == 0) mine = new_id(here);
        // no vector: nvcc 13.0 ends with an internal error at one of this struct
        auto const all = std::make_unique<ncclUniqueId[]>(static_cast<std::size_t>(ranks_));
        gather(&mine, all.get(), sizeof mine, here);
        ncclUniqueId const& id = all[static_cast<std::size_t>(members.front())];
        std::unique_ptr<nccl> joined(new nccl(place, std::move(numbers), deadline_, id, here));
        joined->above_ = above_;
        joined->above_.push_back(present_);
        joined->join(here);
        return joined;
    }

    nccl(nccl const&) = delete;
    nccl& operator=(nccl const&) = delete;

    int rank() const { return rank_; }
    int ranks() const { return ranks_; }
    int device() const { return device_; }
    /// Returns the number by which errors call `rank`.
    int number(int rank) const { return numbers_[static_cast<std::size_t>(rank)]; }
    bool on_this_host(int rank) const { return present_->alive(rank); }
    /// Returns " 1 3", the ranks of this host that are dead, have failed or have left; "" if none is.
    std::string dead() const { return present_->dead(); }
    std::chrono::milliseconds deadline() const { return deadline_; }
    /// Returns NCCL's handle, or null after an abort.
    ncclComm_t get() const { return comm_ ? comm_->get() : nullptr; }

    /// Says that this rank begins a call that all ranks make. Throws if the communicator is broken.
    void begin_call(caller here = caller::here()) {
        require(broken_.empty(), "nccl", "communicator", "one that has not failed", broken_, here);
        poll(here);
        present_->begin_call();
    }

    /// Says by which plan this rank moves rows from its next call on: where ranks wait for each other, it tells who has
    /// another, and in what they differ.
    void runs(identity const& id) { present_->runs(id); }
    /// Returns a number for every rank, for kernels to write: not 0 if it moves rows by another plan, as the next wait
    /// reports.
    std::uint32_t* others(caller here = caller::here()) {
        if (!others_) others_ = detail::host_page<std::uint32_t>(ranks_);
        require(others_ != nullptr, "nccl", "cudaHostAlloc", "success", "a failure", here);
        return others_.get();
    }

    /// Runs `f()`, a call of NCCL's that may wait for other ranks, and returns its result. Throws `cpx::error` if the
    /// deadline passes; then the communicator has been aborted.
    template <class F>
    ncclResult_t outcome(char const* call, F&& f, caller here = caller::here()) {
        require(broken_.empty(), "nccl", "communicator", "one that has not failed", broken_, here);
        auto const result = comm_->in_time(std::forward<F>(f));
        if (!result) fail_late(call, deadline_, here);
        return *result;
    }
    /// The same; throws `cpx::error` unless the result is success.
    template <class F>
    void call(char const* name, F&& f, caller here = caller::here()) {
        ncclResult_t const result = outcome(name, std::forward<F>(f), here);
        if (result != ncclSuccess) fail(name, result, here);
    }

    /// Waits until the device has done all it was given; after the deadline the watchdog aborts what waits for others.
    void synchronize_device(caller here = caller::here()) {
        call(
            "cudaDeviceSynchronize",
            [] { return cudaDeviceSynchronize() == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }, here);
    }

    /// Waits until `stream` has done all it was given, watching for errors of NCCL and the deadline. Throws, too, if
    /// ranks have been found that move rows by another plan; then the communicator is whole.
    void wait(cudaStream_t stream, caller here = caller::here()) { wait(stream, deadline_, here); }
    /// The same with a deadline of its own; returns sooner if `over()`.
    void wait(cudaStream_t stream, std::chrono::milliseconds deadline, caller here = caller::here(),
              std::function<bool()> const& over = {}) {
        wait_until([&] { return over && over() ? cudaSuccess : cudaStreamQuery(stream); }, deadline, here);
        std::string names;
        for (int r = 0; others_ && r < ranks_; ++r) // the device has done what was to find them
            if (std::exchange(others_.get()[r], 0u)) names += ' ' + std::to_string(number(r));
        if (!names.empty()) names += present_->differences();
        present_->waited();
        if (!names.empty())
            throw error("nccl", "plan by which rows move", "that of this rank", "another on ranks" + names, here);
    }
    /// Waits until `event` has been reached, or at once if it was never recorded; leaves what was found to the above.
    void wait(cudaEvent_t event, caller here = caller::here()) {
        wait_until([=] { return cudaEventQuery(event); }, deadline_, here);
    }

    /// Gathers `bytes` of every rank into `all`, in rank order, both in host memory; for records at set-up. Collective.
    void gather(void const* mine, void* all, std::size_t bytes, caller here = caller::here()) {
        begin_call(here);
        detail::scratch on_device{*comm_};
        auto const cuda = [&](cudaError_t result, char const* call) {
            if (result != cudaSuccess) fail(call, result, here);
        };
        std::size_t const total = bytes * static_cast<std::size_t>(ranks_);
        cuda(cudaMalloc(reinterpret_cast<void**>(&on_device.memory), total + bytes), "cudaMalloc");
        cuda(cudaStreamCreateWithFlags(&on_device.stream, cudaStreamNonBlocking), "cudaStreamCreate");
        char* const memory = on_device.memory;
        cudaStream_t const stream = on_device.stream;
        cuda(cudaMemcpyAsync(memory + total, mine, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
        call(
            "ncclAllGather", [&] { return ncclAllGather(memory + total, memory, bytes, ncclInt8, get(), stream); },
            here);
        auto const over = [&] { return cudaStreamQuery(stream); };
        wait_until(over, deadline_, here);
        cuda(cudaMemcpyAsync(all, memory, total, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
        wait_until(over, deadline_, here);
    }

    /// Aborts the communicator and throws.
    [[noreturn]] void fail(char const* what, std::string const& expected, std::string const& actual, caller here) {
        give_up(what);
        throw error("nccl", what, expected, actual, here);
    }
    /// The same because of a result of CUDA's; also names ranks that are dead or have failed.
    [[noreturn]] void fail(char const* what, cudaError_t result, caller here) {
        static_cast<void>(cudaGetLastError()); // it is not reported again by the next call
        auto const names = present_->dead();
        if (names.empty()) leave(&roll_call::fail);
        fail(what, "success", cudaGetErrorString(result) + missed(names), here);
    }
    /// The same because of a result of NCCL's; also names ranks that may have been its cause.
    [[noreturn]] void fail(char const* what, ncclResult_t result, caller here) {
        bool const of_others = result == ncclRemoteError || result == ncclSystemError;
        // a rank that has not come yet cannot be the cause of another kind of error
        auto const names = of_others ? present_->missing() : comm_ ? present_->dead() : std::string();
        if (names.empty() && (!of_others || (comm_ && present_->all_on_this_host()))) leave(&roll_call::fail);
        fail(what, "success",
             std::string(ncclGetErrorString(result)) + " (" + ncclGetLastError(get()) + ')' +
                 (names.empty() ? present_->differences() : missed(names)),
             here);
    }
    /// The same because the deadline has passed; names the ranks that were not there, and `where` they were looked for.
    [[noreturn]] void fail_late(char const* what, std::chrono::milliseconds deadline, caller here,
                                char const* where = "") {
        auto const names = present_->missing(), differences = present_->differences();
        fail(what, "an end within " + std::to_string(deadline.count()) + " ms",
             !names.empty()        ? "nothing from ranks" + names + where
             : differences.empty() ? "no end, with all ranks of this host present"
                                   : "no end, and other plans" + differences,
             here);
    }

    /// Aborts the communicator because `what` has failed, perhaps on another communicator.
    void give_up(char const* what) {
        if (broken_.empty()) broken_ = std::string(what) + " failed before";
        leave(&roll_call::give_up);
        if (comm_) comm_->abort();
    }

    /// Makes an abort call `stop()` first, perhaps in another thread: it ends kernels that reach other ranks' memory,
    /// which the abort takes away. Holds until `forget(who)`.
    void before_abort(void const* who, std::function<void()> stop) { comm_->before_abort(who, std::move(stop)); }
    void forget(void const* who) { comm_->forget(who); }

private:
    /// Returns whether a call of CUDA's has succeeded. If not, the next call does not report the error again.
    static bool done(cudaError_t result) {
        if (result != cudaSuccess) static_cast<void>(cudaGetLastError());
        return result == cudaSuccess;
    }
    template <class Query>
    void wait_until(Query&& query, std::chrono::milliseconds deadline, caller here) {
        require(broken_.empty(), "nccl", "communicator", "one that has not failed", broken_, here);
        auto const end = clock::now() + detail::checked_deadline("nccl", deadline, here);
        for (std::int64_t round = 0;; ++round) {
            cudaError_t const state = query();
            if (round % 64 == 0 || state == cudaSuccess) poll(here);
            if (state == cudaSuccess) return;
            if (state == cudaErrorStreamCaptureUnsupported) { // nothing is broken by that
                static_cast<void>(cudaGetLastError());
                throw error("nccl", "stream", "one that does not capture", "a capture", here);
            }
            if (state != cudaErrorNotReady) fail("stream", state, here);
            if (clock::now() > end) fail_late("stream", deadline, here);
            if (round > 1000) std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }
    static std::string missed(std::string const& names) { return names.empty() ? "" : ", nothing from ranks" + names; }
    /// Returns the numbers from 0 to `ranks` - 1.
    static std::vector<int> count_to(int ranks, caller here) {
        require(ranks > 0, "nccl", "ranks", "at least 1", ranks, here);
        std::vector<int> numbers(static_cast<std::size_t>(ranks));
        std::iota(numbers.begin(), numbers.end(), 0);
        return numbers;
    }
    /// `numbers`: by which errors call the ranks; `page`: of the ranks of a host.
    nccl(int rank, std::vector<int> numbers, std::chrono::milliseconds deadline, std::string const& page, caller here)
        : rank_(rank), ranks_(static_cast<int>(numbers.size())), numbers_(std::move(numbers)),
          deadline_(detail::checked_deadline("nccl", deadline, here)) {
        require(rank >= 0 && rank < ranks_, "nccl", "rank", detail::in_words("0 to ", ranks_ - 1), rank, here);
        require(done(cudaGetDevice(&device_)), "nccl", "cudaGetDevice", "a device", "none", here);
        present_ = std::make_shared<roll_call>(page, rank, numbers_);
    }
    /// Begins to join.
    nccl(int rank, std::vector<int> numbers, std::chrono::milliseconds deadline, ncclUniqueId const& id, caller here,
         int again = 0)
        : nccl(rank, std::move(numbers), deadline, detail::page_name(id.internal, again), here) {
        joining_.emplace(id, rank, ranks_, device_);
    }

    void join(caller here, std::shared_ptr<detail::ended_together> together = nullptr) {
        auto const result = joining_->wait(deadline_);
        if (!result) fail_late("ncclCommInitRankConfig", deadline_, here, " on this host");
        if (*result != ncclSuccess) fail("ncclCommInitRankConfig", *result, here);
        comm_ = std::make_unique<detail::watched_comm>(joining_->take(), device_, deadline_, std::move(together));
        present_->everyone_is_here();
    }

    /// Throws, after an abort, if NCCL has found an error meanwhile.
    void poll(caller here) {
        ncclResult_t result = ncclSuccess;
        if (ncclCommGetAsyncError(get(), &result) == ncclSuccess && result != ncclSuccess && result != ncclInProgress)
            fail("communicator", result, here);
    }

    /// Says why this rank leaves, in this communicator's page and in those of the communicators that it was split from.
    void leave(void (roll_call::*why)()) {
        ((*present_).*why)();
        for (auto const& page : above_) ((*page).*why)();
    }

    int rank_, ranks_, device_ = 0;
    std::vector<int> numbers_;
    std::chrono::milliseconds deadline_;
    std::shared_ptr<roll_call> present_;
    std::vector<std::shared_ptr<roll_call>> above_; ///< of the communicators that this one was split from
    std::string broken_;
    std::shared_ptr<std::uint32_t> others_; ///< of every rank, see `others`, once asked for
    std::optional<detail::joining_comm> joining_;
    std::unique_ptr<detail::watched_comm> comm_; ///< once it has joined
};

} // namespace cpx
