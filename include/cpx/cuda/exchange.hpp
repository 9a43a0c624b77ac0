// SPDX-License-Identifier: Apache-2.0
// Runs a plan between GPUs by send and receive: packed, one message a peer, unpacked.
#pragma once

#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/launch.hpp>
#include <cpx/cuda/nvtx.hpp>
#include <cpx/cuda/write_numbers.hpp>
#include <cpx/plan/capacity.hpp>
#include <cpx/transport/exchange.hpp>
#include <cpx/transport/nccl.hpp>

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace cpx::cuda {

namespace detail {

/// Lets all ranks compare what they are about to run, every time: NCCL's messages do not tell of which plan they are.
inline void agree(nccl& comm, identity const& mine, plan const& p, caller here) {
    cpx::detail::compare(
        "cuda::exchange", mine, p.batch, comm.ranks(),
        [&](void const* own, void* all, std::size_t bytes) { comm.gather(own, all, bytes, here); }, here,
        p.source_settings, p.target_settings);
}

} // namespace detail

/// What an exchange is made for beside its first plans.
struct exchange_options {
    index_t from_stride = 0, to_stride = 0; ///< elements from row to row, 0 for dense
    range others = {};                      ///< ranks whose rows go from and to this one in another way
    std::optional<movement_room> room = {}; ///< what plans that come later take; none: none come
};

/// Plans made ready for device buffers of elements T: tables and staging memory, made once, used by every call.
///
/// Each call packs what leaves, sends one message a peer and unpacks, on the caller's stream, without host
/// synchronisation or allocation. Rows that stay are copied once. A message that is one run of whole rows is sent from,
/// or received into, its place. A plan that sums adds in rank order. Made by all ranks of the communicator, on its
/// device; calls are collective and in the same order on all ranks, in one stream or ordered by events. Can be
/// captured; before this object is destroyed the graph has ended for good.
template <class T>
class exchange {
public:
    /// `width`: elements a row of plans that move whole rows, else ignored. Collective: ranks compare what they are
    /// about to run, those that plans connect, and all with room for others.
    ///
    /// Throws `cpx::error` if plans and communicator do not fit, or if the ranks' plans differ.
    exchange(std::span<plan const> plans, index_t width, nccl& comm, exchange_options const& of = {},
             caller here = caller::here())
        : comm_(comm), width_(width), of_(of) {
        require(width >= 0, where, "width", "not negative", width, here);
        require_device(here);
        auto made = make(plans, false, here);
        if (!plans.empty() && !plans[0].local)
            detail::agree(comm, plans[0].id.template for_elements<T>(width), plans[0], here);
        auto most =
            of.room ? cpx::detail::most_tables(*of.room, comm.ranks(), sizeof(T), here) : cpx::detail::table_sizes{};
        most.rectangles = std::max(most.rectangles, std::ssize(made.list));
        most.staged = std::max(most.staged, made.staged);
        list_ = buffer<char>(head() + most.rectangles * static_cast<index_t>(sizeof(kernels::rectangle)), here);
        staged_out_ = buffer<char>(most.staged, here);
        staged_in_ = buffer<char>(most.staged, here);
        load_write_numbers(here);
        static_cast<void>(comm.others(here)); // allocated now, not in a capture
        cuda::stream const stream;
        connect(made.plans, stream, here);
        put(std::move(made), word_of(plans), !of.room, stream, here);
        settle(stream, here);
    }
    /// The same of one plan.
    exchange(plan const& p, index_t width, nccl& comm, exchange_options const& of = {}, caller here = caller::here())
        : exchange(std::span<plan const>(&p, 1), width, comm, of, here) {}
    template <class X = void>
    explicit exchange(cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {})
        : exchange(std::span<plan const>(), 0, cpx::detail::lacking<nccl&>()) {
        static_assert(cpx::detail::never<X>, "cpx: cuda::exchange<T>(plan, width, comm) wants plans and a cpx::nccl");
    }

    /// Replaces the plans from the next call on, in the order of the stream: uploads their tables, and neither
    /// allocates device memory nor waits for the device or for another rank. All ranks do so between the same calls.
    ///
    /// Whether they have the same plans is compared by what the next calls send; ranks that have not are told at the
    /// next wait of the communicator. Where plans differ in what is sent, that is when the deadline has passed, and the
    /// communicator has been aborted. Throws `cpx::error` if this exchange was made with less room than plans want.
    void set(std::span<plan const> plans, cudaStream_t stream, caller here = caller::here()) {
        put(make(plans, true, here), word_of(plans), false, stream, here);
    }
    /// The same, by what `to` launches for all that are set for `batch`, if a launch brings these tables.
    void set(std::span<plan const> plans, thd const& batch, detail::batch_tables& to, caller here = caller::here()) {
        auto made = make(plans, true, here);
        std::uint64_t const word = word_of(plans);
        cpx::detail::lane_work work{.numbers = {words_job(word)}};
        work.put(list(), std::span<kernels::rectangle const>(made.list));
        if (to.add(batch, std::move(work), here)) return commit(std::move(made), false);
        to.write(here); // of the batch before, perhaps
        put(std::move(made), word, false, to.stream(), here);
    }
    /// The same by lanes, of which a kernel of `to` makes the tables: the host counts the rows of messages alone.
    /// `id_of(i)`: of the plan that lanes i stand for, of this batch. Returns false if they do not tell what moves of
    /// it, or there is no room for tables with a place for every lane and sequence; then nothing has changed.
    template <class F>
    bool set(std::span<lane_plan const> plans, F&& id_of, thd const& batch, detail::batch_tables& to,
             caller here = caller::here()) {
        if (!of_.room) return false;
        cpx::detail::lane_tables all(batch, list());
        tables made;
        for (lane_plan const& p : plans) {
            end source = end_of(0, p.source.width, of_.from_stride, p.kind != flow::selects),
                target = end_of(0, p.target.width, of_.to_stride, true);
            auto const first = static_cast<std::size_t>(all.rectangles());
            if (!all.next(p, shape_of(source, target))) return false;
            source.rows = all.rows(true), target.rows = all.rows(false);
            made.add({source, target, p.kind == flow::sums, first, cpx::detail::tables_of(all, of_.others)});
        }
        if (all.rectangles() > room() || made.staged > staged_out_.size()) return false;
        all.work().numbers.push_back(words_job(word_of(plans.size(), id_of)));
        if (!to.add(batch, std::move(all.work()), here)) return false;
        commit(std::move(made), false);
        return true;
    }

    /// Moves this rank's rows of `from` to where they belong in everybody's `to`, by plan `number`; they must not
    /// overlap. `back`: the other way, by a plan that does not add; where it copies, one copy goes back.
    ///
    /// from, to: (rows, width) of the plan's source and target, rows as far apart as the constructor was told,
    /// beginning at multiples of 16 bytes in memory of the communicator's device. Throws `cpx::error` before anything
    /// is enqueued if a buffer does not fit or is not memory of this device, or if the communicator is broken.
    void operator()(rows<T const> from, rows<T> to, cudaStream_t stream, index_t number = 0, bool back = false,
                    caller here = caller::here()) {
        require_device(here);
        ready const& p = plan_of(number, here);
        require(!p.sums || (addable && !back), where, "elements of a plan that sums", "a type with +, and not back",
                std::string(cpx::detail::type_name<T>()), here);
        auto const& [source, target] = back ? std::tie(p.target, p.source) : std::tie(p.source, p.target);
        cpx::detail::check_buffers(where, from, {source.rows, source.width}, to, {target.rows, target.width}, here);
        require_there("source", from, source, here);
        require_there("target", to, target, here);
        comm_.begin_call(here);
        auto const range = named_range<"cpx exchange, send and receive">();
        auto *const x = reinterpret_cast<char*>(const_cast<T*>(from.data())), *const y =
                                                                                  reinterpret_cast<char*>(to.data());
        kernels::rectangle_buffers const buffers{{back ? y : x, back ? x : y, staged_out_.data(), staged_in_.data()}};
        if ((p.sums || !target.covered) && to.count() > 0 && to.width() > 0)
            check(cudaMemset2DAsync(to.data(), bytes(target.stride), 0, bytes(to.width()),
                                    static_cast<std::size_t>(to.count()), stream),
                  "cudaMemset2DAsync", here);
        cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
        check(cudaStreamIsCapturing(stream, &capturing), "cudaStreamIsCapturing", here);
        bool early = !fresh_; // the first kernel may be the next after those that have written the list
        cpx::detail::message_tables const& t = p.tables;
        auto const* const pack = list() + p.first;
        auto const* const unpack = pack + t.pack.rectangles;
        auto const listed = [&](kernels::rectangle const* first, launch_size size) {
            return kernels::rectangle_list{first, size.rectangles, size.slices, back, std::exchange(early, true)};
        };
        auto const copy = [&](kernels::rectangle const* first, launch_size size, kernels::word_check const& words) {
            if (size.slices > 0 || words.own)
                launch_early(kernels::copy_rectangles<>, grid(size), 512, 0, stream, "copy_rectangles", here,
                             listed(first, size), buffers, words);
        };
        back ? copy(unpack, t.unpack, {}) : copy(pack, t.pack, {});
        bool const compares = send_and_receive(
            back ? t.receives : t.sends, back ? t.sends : t.receives,
            [&](wire const& w) { return std::pair(buffers.base[w.buffer] + w.offset, w.bytes); }, stream, here);
        auto const words = compares ? kernels::word_check{word(), word() + 1, comm_.ranks(), comm_.others(here)}
                                    : kernels::word_check{};
        back ? copy(pack, t.pack, words) : copy(unpack, t.unpack, words);
        if constexpr (addable) {
            auto const* next = unpack + t.unpack.rectangles;
            for (launch_size const size : t.add) {
                if (size.slices > 0)
                    launch_early(kernels::add_rectangles<T>, grid(size), 256, 0, stream, "add_rectangles", here,
                                 listed(next, size), buffers);
                next += size.rectangles;
            }
        }
        if (capturing != cudaStreamCaptureStatusNone) return;
        fresh_ = fresh_ && !early;
        done_.record(stream, here);
    }

    /// Returns how many rows plan `number` takes, and how many it brings.
    std::pair<index_t, index_t> rows_of(index_t number, caller here = caller::here()) const {
        ready const& p = plan_of(number, here);
        return {p.source.rows, p.target.rows};
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
    static constexpr char const* where = "cuda::exchange";
    static constexpr bool addable = requires(T a, T b) { static_cast<T>(a + b); };
    /// One end of a plan, as the caller's buffer is to be, and whether messages fill it.
    struct end {
        index_t rows, width, stride;
        bool covered;
    };
    using wire = cpx::detail::wire;
    using launch_size = cpx::detail::launch_size;
    /// A plan whose tables are on the device.
    struct ready {
        end source, target;
        bool sums;
        std::size_t first; ///< of its rectangles
        cpx::detail::message_tables tables;
    };
    struct tables {
        std::vector<ready> plans;
        std::vector<kernels::rectangle> list;
        index_t staged = 0; ///< bytes that leave, or come, by one plan
        void add(ready p) {
            staged = std::max({staged, p.tables.packed, p.tables.unpacked});
            plans.push_back(std::move(p));
        }
    };
    static cpx::detail::row_shapes shape_of(end const& source, end const& target) {
        return {source.width, target.width, source.stride, target.stride, static_cast<index_t>(sizeof(T))};
    }
    ready const& plan_of(index_t number, caller here) const {
        require(number >= 0 && number < std::ssize(plans_), where, "number of the plan",
                detail::in_words("less than ", plans_.size()), number, here);
        return plans_[static_cast<std::size_t>(number)];
    }
    static std::size_t bytes(index_t elements) { return static_cast<std::size_t>(elements) * sizeof(T); }
    static unsigned grid(launch_size size) { return static_cast<unsigned>(std::clamp(size.slices, 1, 1056)); }
    void require_device(caller here) const {
        require(current_device() == comm_.device(), where, "current device", comm_.device(), current_device(), here);
    }
    /// Returns an end of a plan; `own_width`: elements of its rows, 0: as many as those that move whole.
    end end_of(index_t rows, index_t own_width, index_t stride, bool covered) const {
        index_t const width = own_width ? own_width : width_;
        return {rows, width, stride ? stride : width, covered};
    }
    /// Returns the tables of plans. Throws if they do not fit or, `later`, if there is no room for them.
    tables make(std::span<plan const> plans, bool later, caller here) const {
        require(!later || of_.room, where, "exchange", "one made with room for other plans", "one without", here);
        tables made;
        for (plan const& p : plans) {
            cpx::detail::require_own(where, "rank of the plan", p.rank, p.ranks(), comm_.rank(), comm_.ranks(), here);
            bool const sums = p.kind == flow::sums;
            end const source = end_of(p.source_rows, p.source_width, of_.from_stride, p.covers_source()),
                      target = end_of(p.target_rows, p.target_width, of_.to_stride, p.covers_target());
            require(of_.others.empty() || (target.covered && !sums), where,
                    "plan of which some rows move in another way", "one that fills the target and does not add",
                    "another", here);
            require(source.stride >= source.width && target.stride >= target.width, where, "strides",
                    "at least the widths", std::min(source.stride, target.stride), here);
            cpx::detail::listed_rectangles all(p, shape_of(source, target), made.list);
            made.add({source, target, sums, made.list.size(), cpx::detail::tables_of(all, of_.others)});
        }
        if (!later) return made;
        index_t const count = std::ssize(made.list), bytes = staged_out_.size();
        require(count <= room(), where, "rectangles of the plans", detail::in_words("at most ", room()), count, here);
        require(made.staged <= bytes, where, "bytes that leave or come", detail::in_words("at most ", bytes),
                made.staged, here);
        return made;
    }
    /// Gives tables and their word to the device, in the order of the stream. `compared`: no rank has others.
    void put(tables made, std::uint64_t word, bool compared, cudaStream_t stream, caller here) {
        std::size_t const before = static_cast<std::size_t>(head()) / sizeof word,
                          bytes = made.list.size() * sizeof(kernels::rectangle);
        std::vector<index_t> numbers(before + bytes / sizeof word, static_cast<index_t>(word));
        if (bytes > 0) std::memcpy(numbers.data() + before, made.list.data(), bytes);
        write_numbers(numbers, reinterpret_cast<index_t*>(list_.data()), stream, here);
        commit(std::move(made), compared);
    }
    /// Returns the word by which ranks compare plans, and says which they are; an `id_of(i)` that stays is hashed once.
    template <class F>
    std::uint64_t word_of(std::size_t count, F&& id_of) {
        std::uint64_t word = 0, hash = 0;
        identity const* last = nullptr;
        for (std::size_t i = 0; i < count; ++i) {
            identity const& given = id_of(i);
            if (&given != last) {
                identity const id = given.template for_elements<T>(width_);
                if (!last) comm_.runs(id);
                hash = id.fingerprint();
                last = &given;
            }
            word = cpx::detail::mix(word, hash);
        }
        return word;
    }
    std::uint64_t word_of(std::span<plan const> plans) {
        return word_of(plans.size(), [&](std::size_t i) -> identity const& { return plans[i].id; });
    }
    /// Returns what writes a word before the rectangles, for this rank and all.
    cpx::detail::number_job words_job(std::uint64_t word) const {
        return {reinterpret_cast<index_t*>(this->word()), static_cast<index_t>(word), 1 + comm_.ranks(), 0};
    }
    void commit(tables made, bool compared) {
        plans_ = std::move(made.plans);
        fresh_ = !compared;
        told_.assign(static_cast<std::size_t>(comm_.ranks()), compared);
        heard_ = told_;
    }
    /// Returns how many rectangles there is room for.
    index_t room() const { return (list_.size() - head()) / static_cast<index_t>(sizeof(kernels::rectangle)); }
    /// Bytes before the rectangles: this rank's word, and that of every rank.
    index_t head() const { return (comm_.ranks() + 8) / 8 * 64; }
    std::uint64_t* word() const { return reinterpret_cast<std::uint64_t*>(list_.data()); }
    kernels::rectangle* list() const { return reinterpret_cast<kernels::rectangle*>(list_.data() + head()); }

    static void require_there(char const* which, auto const& b, end const& like, caller here) {
        if (b.stride() != like.stride && like.rows > 1)
            throw error(where, std::string("stride of ") + which, std::to_string(like.stride),
                        std::to_string(b.stride()), here);
        require(b.count() == 0 || detail::address(b.data()) % 16 == 0, where, "alignment of the buffer", "16 bytes",
                detail::address(b.data()) % 16, here);
        detail::require_memory(where, {{which, b}}, here);
    }
    /// Gives all messages to the stream; `place`: returns where one is and its bytes. With the first to a rank, after
    /// plans were set, goes the word. Returns whether words come.
    template <class Place>
    bool send_and_receive(std::vector<wire> const& sends, std::vector<wire> const& receives, Place&& place,
                          cudaStream_t stream, caller here) {
        if (sends.empty() && receives.empty()) return false;
        bool compares = false;
        auto const each = [&](auto operation, std::vector<wire> const& messages, std::vector<char>& known,
                              auto&& word_of) {
            auto const give = [&](void* data, index_t size, int peer) { // the group's end reports failures
                static_cast<void>(operation(data, static_cast<std::size_t>(size), ncclInt8, peer, comm_.get(), stream));
            };
            for (wire const& w : messages) {
                if (!std::exchange(known[static_cast<std::size_t>(w.peer)], 1)) {
                    give(word_of(w.peer), sizeof(std::uint64_t), w.peer);
                    compares = true;
                }
                auto const [data, size] = place(w);
                give(data, size, w.peer);
            }
        };
        comm_.call(
            "ncclSend and ncclRecv",
            [&] {
                static_cast<void>(ncclGroupStart());
                each(ncclSend, sends, told_, [&](int) { return word(); });
                each(ncclRecv, receives, heard_, [&](int peer) { return word() + 1 + peer; });
                return ncclGroupEnd();
            },
            here);
        return compares;
    }
    /// Sends a byte for every message: NCCL connects two ranks when they first meet, which waits for both on the host.
    void connect(std::vector<ready> const& plans, cudaStream_t stream, caller here) {
        std::vector<wire> sends, receives;
        for (int peer = 0; of_.room && peer < comm_.ranks(); ++peer)
            if (peer != comm_.rank()) sends.push_back({peer, 0, 0, 1});
        if (of_.room) receives = sends;
        for (std::size_t i = 0; !of_.room && i < plans.size(); ++i) {
            auto const& t = plans[i].tables;
            sends.insert(sends.end(), t.sends.begin(), t.sends.end());
            receives.insert(receives.end(), t.receives.begin(), t.receives.end());
        }
        comm_.begin_call(here);
        told_.assign(static_cast<std::size_t>(comm_.ranks()), true);
        heard_ = told_;
        buffer<char> const bytes(std::ssize(sends) + std::ssize(receives), here);
        char* next = bytes.data();
        send_and_receive(
            sends, receives, [&](wire const&) { return std::pair(next++, index_t{1}); }, stream, here);
        settle(stream, here);
    }
    /// Waits for a stream of this object's own. What has been found of other ranks is left for the caller's wait.
    void settle(cudaStream_t stream, caller here) {
        event end;
        end.record(stream, here);
        comm_.wait(end, here);
    }

    nccl& comm_;
    event done_; ///< the end of the last call
    index_t width_;
    exchange_options of_;
    std::vector<ready> plans_;
    std::vector<char> told_, heard_; ///< of every rank: whether its word has gone there, or come, since plans were set
    buffer<char> list_;              ///< words, then rectangles
    buffer<char> staged_out_, staged_in_;
    bool fresh_ = false; ///< whether the list has just been written
};

} // namespace cpx::cuda
