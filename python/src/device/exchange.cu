// SPDX-License-Identifier: Apache-2.0
// Rows moved between devices, shifted, and summed.
#include "window_move.hpp"

#include <cpx/cuda/elements.hpp>
#include <cpx/ops/shift_rows.hpp>

#include <array>
#include <bit>
#include <tuple>
#include <type_traits>

namespace binding {

namespace {

/// What may leave or come, at most, by plans between two layouts, of rows of `width` elements.
cpx::movement_room room_for(relayout_value const& plan, cpx::index_t width, cpx::capacity const& most) {
    return plan.from.visit([&](auto const& from) {
        return plan.to.visit([&](auto const& to) {
            auto const room = [&](auto const& a, auto const& b) {
                return cpx::detail::relayout_room(a, b, plan.plan.rank, width, most, cpx::caller::here());
            };
            return plan.back ? room(to, from) : room(from, to);
        });
    });
}

/// Whether kernels can compute where rows of a plan go, whatever the batch; not of rows that are added, nor of those
/// that come back to one of several replicas. The same on all ranks.
bool computed(relayout_value const& plan) {
    cpx::flow const kind = plan.plan.kind;
    if (kind == cpx::flow::sums || (kind == cpx::flow::selects && plan.back)) return false;
    if (plan.from.every_row() && plan.to.every_row()) return false;
    auto const known = [](auto const& s) { return computed(s); };
    return plan.from.visit(known) && plan.to.visit(known);
}

/// Whether a plan and that the other way are prepared together: rows move whole and none is copied. The same on all
/// ranks.
bool both_ways(relayout_value const& plan) {
    return plan.plan.kind == cpx::flow::moves && !plan.from.every_row() && !plan.to.every_row();
}

/// The bytes of the largest target of any rank, both ways if these are prepared together. The same on all ranks.
cpx::index_t target_bytes(relayout_value const& plan, cpx::index_t width, cpx::index_t element) {
    if (both_ways(plan)) {
        cpx::index_t rows = 0;
        for (int r = 0; r < plan.from.ranks(); ++r)
            for (any_layout const* const s : {&plan.from, &plan.to})
                rows = std::max(rows, s->visit([r](auto const& of) { return of.rows(r); }));
        return rows * width * element;
    }
    auto const first = plan.from.visit([](auto const& s) { return s.sections(); });
    auto const sections = first.empty() ? plan.to.visit([](auto const& s) { return s.sections(); }) : first;
    return plan.to.visit([&](auto const& to) {
        cpx::index_t bytes = 0;
        for (int r = 0; r < to.ranks(); ++r) {
            cpx::index_t const own = sections.empty() ? width : cpx::detail::local_width(to, r, sections);
            bytes = std::max(bytes, to.rows(r) * own * element);
        }
        return bytes;
    });
}

/// Whether kernels have tables for the offsets of a batch. The same on all ranks.
bool has_tables(relayout_value const& plan, cpx::index_t sequences) {
    constexpr cpx::index_t tables = 128 << 10; // bytes of shared memory, of every GPU that has windows
    return (plan.from.ranks() + 2) * (sequences + 1) * 4 <= tables;
}

/// What has the size of a T: what is stored is not looked at.
template <class T>
using bits_of = std::tuple_element_t<std::countr_zero(sizeof(T)),
                                     std::tuple<std::int8_t, std::int16_t, std::int32_t, std::int64_t>>;

template <class T>
auto bits_in(cpx::rows<T> rows) {
    using bits = std::conditional_t<std::is_const_v<T>, bits_of<std::remove_const_t<T>> const, bits_of<T>>;
    return cpx::rows<bits>(reinterpret_cast<bits*>(rows.data()), rows.count(), rows.width(), rows.stride());
}

/// What moves rows of a kind into the window, and batches that do not fit there by messages.
template <class T>
struct window_or_messages {
    std::unique_ptr<window_move<bits_of<T>>> stored;
    std::unique_ptr<cuda::exchange<T>> sent;
    cpx::capacity most; ///< of what comes
    bool by_window = false;
};

/// Returns the rows of a tensor. Throws `cpx::error` unless they are one behind the other.
template <class T>
cpx::rows<T const> dense_rows(tensor const& t) {
    auto const rows = rows_of<T>(t);
    if (rows.count() > 1 && rows.stride() != rows.width())
        throw cpx::error(t.where, std::string("memory of ") + t.name, "rows one behind the other, on devices",
                         "other strides; copy it first");
    return rows;
}
template <class T>
cpx::rows<T> dense_rows_to(tensor const& t) {
    auto const rows = dense_rows<T>(t);
    return {const_cast<T*>(rows.data()), rows.count(), rows.width(), rows.stride()};
}

/// Runs a plan. `stores`: whether a kernel may store rows into the peers' window, which pays for rows of some bytes.
/// `room_of(width, most)`: see `room_for`.
template <class T, class F>
void run(char const* where, device_group& g, relayout_value const& plan, cpx::rows<T const> from, cpx::rows<T> to,
         bool stores, F&& room_of) {
    auto const& comm = g.comm();
    // What was moved goes back by the tables with which it came, what was copied by others, which add.
    cpx::plan const& p = plan.plan;
    bool const mirrored = plan.back && (p.kind == cpx::flow::moves || p.kind == cpx::flow::selects);
    cpx::index_t const width = mirrored ? to.width() : from.width();
    auto const need = [&] {
        return plan.from.visit(
            [&](auto const& a) { return plan.to.visit([&](auto const& b) { return capacity_for(a, b); }); });
    };
    auto const room = [&](cpx::capacity const& most) {
        return most.rows > 0 ? std::optional(room_of(width, most)) : std::nullopt;
    };
    // Where no rows move, ranks do not meet.
    cpx::index_t const row = from.width();
    auto const most = [&] { return target_bytes(plan, row, sizeof(T)); };
    if (stores && !p.local && computed(plan) && g.shares(most)) {
        using prepared = window_or_messages<T>;
        bool const both = both_ways(plan);
        std::uint64_t first = number_of(plan.from.text()), second = number_of(plan.to.text());
        bool const way = both && first > second; // the other than that by which both are known
        if (way) std::swap(first, second);
        auto const known = way ? p.id.transposed(true) : p.id;
        auto const prepare = [&](prepared& made) {
            auto const id = known.template for_elements<T>(row);
            made.by_window = has_tables(plan, made.most.sequences) && g.has_room(most());
            if (made.by_window) {
                if (!made.stored) {
                    cuda::detail::agree(g.nccl(), p.id.template for_elements<T>(row), p, cpx::caller::here());
                    made.stored =
                        std::make_unique<window_move<bits_of<T>>>(plan, row, g, made.most.sequences, way, both);
                }
                auto const print = cpx::detail::mix(0, id.fingerprint());
                made.stored->set(plan, static_cast<std::uint32_t>(print ^ print >> 32), way, comm.stream());
                return;
            }
            cpx::plan const next = way ? plan.whole().transposed() : plan.whole();
            if (made.sent) return made.sent->set({&next, 1}, comm.stream());
            cuda::exchange_options const of{.room = room(made.most)};
            made.sent = std::make_unique<cuda::exchange<T>>(next, row, g.nccl(), of);
        };
        auto& by = g.find<prepared>(
            where, {first, second, std::uint64_t{3} + (plan.back && !both), static_cast<std::uint64_t>(row)},
            known.fingerprint(), need,
            [&](cpx::capacity const& most) {
                auto made = std::make_unique<prepared>();
                made->most = {most.rows, std::max(most.sequences, plan.from.batch().sequences())};
                prepare(*made);
                return made;
            },
            prepare);
        if (!by.by_window) return (*by.sent)(from, to, comm.stream(), {0, way});
        cpx::detail::check_buffers("cuda::exchange", from, {p.source_rows, p.source_width ? p.source_width : row}, to,
                                   {p.target_rows, p.target_width ? p.target_width : row}, cpx::caller::here());
        if (to.width() > 0) (*by.stored)(bits_in(from), bits_in(to), way, comm.stream());
        return;
    }
    using prepared = cuda::exchange<T>;
    auto const listed = [&] { return mirrored ? plan.whole().transposed() : plan.whole(); };
    auto& by = g.find<prepared>(
        where,
        {number_of(plan.from.text()), number_of(plan.to.text()), static_cast<std::uint64_t>(mirrored ? 2 : plan.back),
         static_cast<std::uint64_t>(width)},
        (mirrored ? p.id.transposed(p.kind == cpx::flow::moves) : p.id).fingerprint(), need,
        [&](cpx::capacity const& most) {
            cuda::exchange_options const of{.room = room(most)};
            return std::make_unique<prepared>(listed(), width, g.nccl(), of);
        },
        [&](prepared& made) {
            cpx::plan const next = listed();
            made.set({&next, 1}, comm.stream());
        });
    by(from, to, comm.stream(), {0, mirrored});
}

/// Writes the rows that a shift brings, see `cpx::detail::shifted_rows`.
template <class T>
struct shifted {
    cpx::rows<T const> x, halo;
    index_t const* list;
    T fill;
    cpx::rows<T> y;
    __device__ void operator()(index_t row, index_t column) const {
        index_t const from = list[row];
        y(row, column) = from >= 0 ? x(from, column) : from == cpx::detail::filled_row ? fill : halo(-2 - from, column);
    }
};

/// What shifts of a kind prepare: the exchange of the halo, where any moves, and where each row comes from.
template <class T>
struct shift_of_batch {
    std::unique_ptr<cuda::exchange<T>> halo;
    cuda::buffer<index_t> list;
};

template <class T, class S>
void shift(char const* where, device_group& g, halo_value const& value, cpx::halo_plan<S> const& plan,
           cpx::rows<T const> x, cpx::rows<T> y, T fill) {
    auto const here = cpx::caller::here();
    auto const& comm = g.comm();
    index_t const count = plan.sharding.rows(plan.rank), width = x.width();
    cpx::detail::require_own(where, "rank of the plan", plan.rank, plan.ranks(), comm.rank(), comm.ranks(), here);
    cpx::detail::require_shape(where, "x", x, count, width, here);
    cpx::detail::require_shape(where, "out", y, count, width, here);
    cpx::detail::require_apart(where, {{"out", y}}, {{"x", x}}, here);
    auto const hash = cpx::detail::hash_of(fill);
    cpx::plan moved = plan;
    moved.id.run_by(where);
    moved.id.set_arguments({0, 0, hash});
    using prepared = shift_of_batch<T>;
    auto const place = [&](prepared& made) {
        cuda::write_numbers(cpx::detail::shifted_rows(plan), made.list.data(), comm.stream(), here);
    };
    auto& by = g.find<prepared>(
        where,
        {number_of(value.sharding.text()), static_cast<std::uint64_t>(plan.reach),
         static_cast<std::uint64_t>(plan.where), static_cast<std::uint64_t>(width), hash},
        plan.id.fingerprint(), [&] { return capacity_for(plan.sharding); },
        [&](cpx::capacity const& most) {
            auto made = std::make_unique<prepared>();
            cuda::exchange_options of;
            if (most.rows > 0) {
                index_t const beside = cpx::detail::most_beside(plan.sharding, plan.reach, most, here);
                of.room = {2 * beside, cpx::detail::product(where, "elements of the halo", {beside, width}, here)};
            }
            if (!moved.local) made->halo = std::make_unique<cuda::exchange<T>>(moved, width, g.nccl(), of);
            made->list = cuda::buffer<index_t>(std::max(count, most.rows), here);
            cuda::load_write_numbers(here);
            place(*made);
            return made;
        },
        [&](prepared& made) {
            if (made.halo) made.halo->set({&moved, 1}, comm.stream());
            place(made);
        });
    auto received = comm.memory().template room<T>(plan.target_rows * width);
    cpx::rows<T> const halo(received.data(), plan.target_rows, width);
    if (by.halo) (*by.halo)(x, halo, comm.stream());
    // By words of 8 bytes, if rows are some of them.
    using word = std::int64_t;
    constexpr index_t in_word = sizeof(word) / sizeof(T);
    auto const begins = [](auto const* at) { return cuda::detail::address(at) % sizeof(word) == 0; };
    if (width % in_word == 0 && begins(x.data()) && begins(y.data())) {
        auto const words = [&]<class A>(cpx::rows<A> const& of) {
            using as = std::conditional_t<std::is_const_v<A>, word const, word>;
            return cpx::rows<as>(reinterpret_cast<as*>(of.data()), of.count(), of.width() / in_word);
        };
        std::array<T, in_word> several;
        several.fill(fill);
        cuda::for_each_element(comm.memory(), count, width / in_word,
                               shifted<word>{words(x), words(cpx::rows<T const>(halo)), by.list.data(),
                                             std::bit_cast<word>(several), words(y)},
                               here);
    } else {
        cuda::for_each_element(comm.memory(), count, width, shifted<T>{x, halo, by.list.data(), fill, y}, here);
    }
}

} // namespace

void exchange_on(device_group& g, relayout_value const& plan, tensor const& x, tensor const& y) {
    on_device const here(g.nccl().device());
    tensor from = x, to = y;
    for (tensor* const t : {&from, &to}) // integers are moved and added by their bits, whatever their sign
        if (t->kind == static_cast<int>(number_kind::natural) ||
            (t->kind == static_cast<int>(number_kind::boolean) && plan.plan.kind != cpx::flow::sums))
            t->kind = static_cast<int>(number_kind::integer);
    if (x.kind != y.kind || x.bits != y.bits)
        throw cpx::error(y.where, std::string("dtype of ") + y.name, number_name(x.kind, x.bits),
                         number_name(y.kind, y.bits));
    with_type<float, double, __nv_bfloat16, __half, std::int64_t, std::int32_t, std::int16_t, std::int8_t>(
        from, [&]<class T>(as<T>) {
            auto const source = dense_rows<T>(from);
            auto const target = dense_rows_to<T>(to);
            run<T>(x.where, g, plan, source, target, true,
                   [&](index_t width, cpx::capacity const& most) { return room_for(plan, width, most); });
        });
}

void shift_on(device_group& g, halo_value const& plan, tensor const& x, tensor const& y, fill_value const& fill) {
    on_device const here(g.nccl().device());
    with_type<float, double, __nv_bfloat16, __half, std::int64_t, std::int32_t>(x, [&]<class T>(as<T>) {
        auto const from = dense_rows<T>(x);
        auto const to = dense_rows_to<T>(y);
        auto const value = std::bit_cast<bits_of<T>>(element_of<T>(x.where, fill));
        visit_plan(plan, [&](auto const& of, auto const&) {
            shift<bits_of<T>>(x.where, g, plan, of, bits_in(from), bits_in(to), value);
        });
    });
}

void sum_on(device_group& g, tensor const& values) {
    on_device const here(g.nccl().device());
    with_type<float, double, __nv_bfloat16, __half>(values, [&]<class T>(as<T>) {
        auto const list = list_to<T>(values);
        index_t const count = std::ssize(list);
        int const ranks = g.nccl().ranks();
        cpx::thd const batch({0, count}); // every value is a row
        any_tokens const shares(cpx::shard(batch, cpx::sequential<>(ranks)), "shares of values");
        any_rows const whole(cpx::replicated<>(ranks, batch), "all values");
        cpx::plan plan = cpx::relayout(shares, whole, g.nccl().rank());
        cpx::identity::set(plan.id.operation, values.where);
        plan.id.forget_batch();
        plan.id[cpx::identity::parameter] = static_cast<std::uint64_t>(count);
        auto own = g.comm().memory().template room<T>(plan.source_rows);
        cpx::rows<T> const all(list.data(), count, 1), share(own.data(), plan.source_rows, 1);
        auto const room = [&](index_t, cpx::capacity const& most) { // of every rank the same share, one run
            return cpx::movement_room{.runs = 4 * ranks, .elements = (most.rows / ranks + 1) * ranks};
        };
        run<T>(values.where, g, {plan.transposed(), {whole}, {shares}, true}, cpx::rows<T const>(all), share, false,
               room);
        run<T>(values.where, g, {plan, {shares}, {whole}}, cpx::rows<T const>(share), all, false, room);
    });
}

} // namespace binding
