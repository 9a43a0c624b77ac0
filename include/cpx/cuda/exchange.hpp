// SPDX-License-Identifier: Apache-2.0
// Runs a plan between GPUs: packed, one message a peer, unpacked.
#pragma once

#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/exchange_tables.hpp>
#include <cpx/cuda/launch.hpp>
#include <cpx/cuda/message_window.hpp>
#include <cpx/cuda/message_wires.hpp>
#include <cpx/cuda/nvtx.hpp>
#include <cpx/cuda/write_numbers.hpp>
#include <cpx/plan/capacity.hpp>
#include <cpx/transport/exchange.hpp>
#include <cpx/transport/nccl.hpp>

#include <algorithm>
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
    peer_resource* through = nullptr; ///< memory that all ranks reach, where messages are stored; null: they are sent
};

/// Which of an exchange's plans a call runs, and whether the other way.
struct exchange_call {
    index_t number = 0;
    bool back = false;
};

/// Plans made ready for device buffers of elements T: tables and staging memory, made once, used by every call.
///
/// Each call packs what leaves, sends one message a peer and unpacks, on the caller's stream, without host
/// synchronisation or allocation. Rows that stay are copied once. A message that is one run of whole rows is sent from,
/// or received into, its place. A plan that sums adds in rank order. Made by all ranks of the communicator, on its
/// device; calls are collective and in the same order on all ranks, in one stream or ordered by events. Can be
/// captured; before this object is destroyed the graph has ended for good.
///
/// Through memory that all ranks reach, every rank packs its messages where its peers unpack them, and all ranks meet
/// in each call. A call that was captured runs, when it is replayed, the plan of its number that was set last: its
/// buffers have room for every plan, their rows are as far apart as they were.
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
        if (of.through) slots_ = std::max(std::ssize(plans), of.room ? of.room->exchanges : 0);
        list_ = buffer<char>(head() + most.rectangles * static_cast<index_t>(sizeof(kernels::rectangle)), here);
        load_write_numbers(here);
        static_cast<void>(comm.others(here)); // allocated now, not in a capture
        if (of.through) {
            window_.emplace(*of.through, most.staged, here);
            if constexpr (addable) detail::load(kernels::add_rectangles<T>, here);
        } else {
            wires_.emplace(comm, most.staged, here);
            wires_->connect(made.plans, of.room.has_value(), here);
        }
        cuda::stream const stream;
        put(std::move(made), word_of(plans), !of.room, stream, here);
        detail::message_wires::settle(comm, stream, here);
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
        if (to.add(batch, work_of(made, word), here)) return commit(std::move(made), false);
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
            made.add({source, target, p.kind == flow::sums, first, cpx::detail::tables_of(all, of_.others, stores())});
        }
        if (all.rectangles() > room() || made.staged > staged() || !has_slots(made)) return false;
        put_slots(made, all.work());
        all.work().numbers.push_back(words_job(word_of(plans.size(), id_of)));
        if (!to.add(batch, std::move(all.work()), here)) return false;
        commit(std::move(made), false);
        return true;
    }

    /// Moves this rank's rows of `from` to where they belong in everybody's `to`; they must not overlap. Back goes a
    /// plan that does not add; where it copies, one copy does.
    ///
    /// from, to: (rows, width) of the plan's source and target, rows as far apart as the constructor was told,
    /// beginning at multiples of 16 bytes in memory of the communicator's device. Throws `cpx::error` before anything
    /// is enqueued if a buffer does not fit or is not memory of this device, or if the communicator is broken.
    void operator()(rows<T const> from, rows<T> to, cudaStream_t stream, exchange_call of = {},
                    caller here = caller::here()) {
        auto const [number, back] = of;
        require_device(here);
        ready const& p = plan_of(number, here);
        require(!p.sums || (addable && !back), where, "elements of a plan that sums", "a type with +, and not back",
                std::string(cpx::detail::type_name<T>()), here);
        auto const& [source, target] = back ? std::tie(p.target, p.source) : std::tie(p.source, p.target);
        cpx::detail::check_buffers(where, from, {source.rows, source.width}, to, {target.rows, target.width}, here);
        require_there("source", from, source, here);
        require_there("target", to, target, here);
        bool const captured = captures(stream, here);
        auto *const x = reinterpret_cast<char*>(const_cast<T*>(from.data())), *const y =
                                                                                  reinterpret_cast<char*>(to.data());
        window_ ? store(number, back, x, y, captured, stream, here) : send(p, back, x, y, captured, stream, here);
        if (!captured) done_.record(stream, here);
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
    using wire = cpx::detail::wire;
    using launch_size = cpx::detail::launch_size;
    using end = detail::exchange_end;
    using ready = detail::ready_plan;
    using tables = detail::exchange_tables;
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
            std::size_t const first = made.list.size();
            made.add({source, target, sums, first, cpx::detail::tables_of(all, of_.others, stores())});
        }
        if (!later) return made;
        index_t const count = std::ssize(made.list), bytes = staged();
        require(has_slots(made), where, "plans", detail::in_words("at most ", slots_), made.plans.size(), here);
        require(count <= room(), where, "rectangles of the plans", detail::in_words("at most ", room()), count, here);
        require(made.staged <= bytes, where, "bytes that leave or come", detail::in_words("at most ", bytes),
                made.staged, here);
        return made;
    }
    /// Returns what writes tables and their word.
    cpx::detail::lane_work work_of(tables const& made, std::uint64_t word) const {
        cpx::detail::lane_work work{.numbers = {words_job(word)}};
        work.put(list(), std::span<kernels::rectangle const>(made.list));
        put_slots(made, work);
        return work;
    }
    /// Writes all that in the order of the stream. `compared`: no rank has others.
    void put(tables made, std::uint64_t word, bool compared, cudaStream_t stream, caller here) {
        index_t const bytes = head() + std::ssize(made.list) * static_cast<index_t>(sizeof(kernels::rectangle));
        auto* const begin = reinterpret_cast<index_t*>(list_.data());
        auto const numbers = work_of(made, word).written(begin, bytes / static_cast<index_t>(sizeof *begin));
        write_numbers(numbers, begin, stream, here);
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
    /// Lists what kernels know of plans, where there is a place for them.
    void put_slots(tables const& made, cpx::detail::lane_work& work) const {
        if (slots_ == 0) return;
        auto const known = made.known_to_kernels();
        index_t const each = sizeof known[0] / sizeof(index_t), count = std::ssize(known);
        work.put(slots(), std::span<kernels::message_plan const>(known));
        work.numbers.push_back({reinterpret_cast<index_t*>(slots() + count), 0, (slots_ - count) * each, 0});
    }
    /// Returns what writes a word before the rectangles, for this rank and all.
    cpx::detail::number_job words_job(std::uint64_t word) const {
        return {reinterpret_cast<index_t*>(this->word()), static_cast<index_t>(word), 1 + comm_.ranks(), 0};
    }
    void commit(tables made, bool compared) {
        plans_ = std::move(made.plans);
        fresh_ = !compared;
        if (wires_) wires_->begin(compared);
    }
    /// Returns how many rectangles there is room for.
    index_t room() const { return (list_.size() - head()) / static_cast<index_t>(sizeof(kernels::rectangle)); }
    /// Bytes before the rectangles: this rank's word, and that of every rank; then plans as kernels know them.
    index_t head() const { return words() + slots_ * static_cast<index_t>(sizeof(kernels::message_plan)); }
    index_t words() const { return (comm_.ranks() + 8) / 8 * 64; }
    kernels::message_plan* slots() const { return reinterpret_cast<kernels::message_plan*>(list_.data() + words()); }
    bool has_slots(tables const& made) const { return !stores() || std::ssize(made.plans) <= slots_; }
    bool stores() const { return of_.through != nullptr; }
    index_t staged() const { return window_ ? window_->bytes() : wires_->bytes(); }
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
    /// Packs, sends, receives and unpacks: from `x` to `y`.
    void send(ready const& p, bool back, char* x, char* y, bool captured, cudaStream_t stream, caller here) {
        end const& target = back ? p.source : p.target;
        comm_.begin_call(here);
        auto const range = named_range<"cpx exchange, send and receive">();
        kernels::rectangle_buffers const buffers{{back ? y : x, back ? x : y, wires_->out(), wires_->in()}};
        if (index_t const rows = p.zeros(target); rows > 0 && target.width > 0)
            check(cudaMemset2DAsync(y, bytes(target.stride), 0, bytes(target.width), static_cast<std::size_t>(rows),
                                    stream),
                  "cudaMemset2DAsync", here);
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
        bool const compares = (*wires_)(
            back ? t.receives : t.sends, back ? t.sends : t.receives, word(),
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
        if (!captured) fresh_ = fresh_ && !early;
    }
    /// Stores where the others unpack, meets them and unpacks. What is captured launches as much for any plan.
    void store(index_t number, bool back, char* x, char* y, bool captured, cudaStream_t stream, caller here) {
        auto const range = named_range<"cpx exchange, window">();
        ready const& p = plans_[static_cast<std::size_t>(number)];
        end const& target = back ? p.source : p.target;
        kernels::message_plan const* const slot = slots() + number;
        auto const pitch = static_cast<index_t>(bytes(target.stride)), row = static_cast<index_t>(bytes(target.width));
        kernels::message_push leaves{};
        leaves.plan = slot, leaves.list = list(), leaves.word = word(), leaves.source = x, leaves.target = y;
        leaves.target_pitch = pitch, leaves.target_bytes = static_cast<int>(row), leaves.back = back;
        leaves.target_vector = detail::vector_bytes({pitch, row}), leaves.others = comm_.others(here);
        window_->push(leaves, stream, here);
        kernels::rectangle_buffers const buffers{{back ? y : x, back ? x : y, window_->data(), window_->data()}};
        auto const move = [&](auto kernel, unsigned block, launch_size size, kernels::list_part const& part,
                              kernels::list_part const* next, auto const&... more) {
            kernels::rectangle_list const moved{
                .list = list(), .back = back, .early = true, .part = &part, .next = next};
            if (captured || size.slices > 0)
                launch_early(kernel, captured ? 256U : grid(size), block, 0, stream, "unpacks", here, moved, buffers,
                             more...);
        };
        cpx::detail::message_tables const& t = p.tables;
        launch_size const both{.slices = t.keep.slices + (back ? t.pack : t.unpack).slices};
        if (!p.sums)
            return move(kernels::copy_rectangles<>, 512, both, back ? slot->pack : slot->keep,
                        back ? &slot->keep : &slot->unpack, kernels::word_check{});
        if constexpr (addable)
            for (int rank = 0; rank < comm_.ranks(); ++rank) {
                auto const added = std::ranges::find(t.add, rank, &launch_size::peer);
                move(kernels::add_rectangles<T>, 256, added == t.add.end() ? launch_size{} : *added, slot->add[rank],
                     nullptr);
            }
    }

    nccl& comm_;
    event done_; ///< the end of the last call
    index_t width_;
    exchange_options of_;
    std::vector<ready> plans_;
    index_t slots_ = 0; ///< plans that kernels know, where messages are stored
    buffer<char> list_; ///< words, those plans, then rectangles
    std::optional<detail::message_wires> wires_;
    std::optional<detail::message_window> window_; ///< instead of these
    bool fresh_ = false;                           ///< whether the list has just been written
};

} // namespace cpx::cuda
