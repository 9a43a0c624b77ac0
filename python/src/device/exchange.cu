// SPDX-License-Identifier: Apache-2.0
// Rows moved between devices.
#include "window_move.hpp"

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

/// The bytes of the largest target of any rank. The same on all ranks.
cpx::index_t target_bytes(relayout_value const& plan, cpx::index_t width, cpx::index_t element) {
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
    cpx::index_t sequences = 0;
    bool by_window = false;
};

template <class T>
void run(device_group& g, relayout_value const& plan, tensor const& x, tensor const& y) {
    char const* const where = "exchange";
    auto const from = rows_of<T>(x);
    auto const to = rows_to<T>(y);
    for (auto const& [t, rows] : {std::pair(&x, from), std::pair(&y, cpx::rows<T const>(to))})
        if (rows.count() > 1 && rows.stride() != rows.width())
            throw cpx::error(where, std::string("memory of ") + t->name, "rows one behind the other, on devices",
                             "other strides; copy it first");
    auto const& comm = g.comm();
    // What was moved goes back by the tables with which it came, what was copied by others, which add.
    cpx::plan const& p = plan.plan;
    bool const mirrored = plan.back && (p.kind == cpx::flow::moves || p.kind == cpx::flow::selects);
    auto const batch = (mirrored ? p.id.transposed(p.kind == cpx::flow::moves) : p.id).fingerprint();
    auto const listed = [&] { return mirrored ? p.transposed() : p; };
    cpx::index_t const width = mirrored ? to.width() : from.width();
    call_kind const kind{number_of(plan.from.text()), number_of(plan.to.text()),
                         static_cast<std::uint64_t>(mirrored ? 2 : plan.back), static_cast<std::uint64_t>(width)};
    auto const need = [&] {
        return plan.from.visit(
            [&](auto const& a) { return plan.to.visit([&](auto const& b) { return capacity_for(a, b); }); });
    };
    auto const room = [&](cpx::capacity const& most) {
        return most.rows > 0 ? std::optional(room_for(plan, width, most)) : std::nullopt;
    };
    // Where no rows move, ranks do not meet.
    cpx::index_t const row = from.width();
    auto const most = [&] { return target_bytes(plan, row, sizeof(T)); };
    if (!p.local && computed(plan) && g.shares(most)) {
        using prepared = window_or_messages<T>;
        auto const id = p.id.template for_elements<T>(row);
        std::optional<cpx::capacity> asked;
        auto const prepare = [&](prepared& made) {
            made.by_window = has_tables(plan, made.sequences) && g.has_room(most());
            if (made.by_window) {
                if (!made.stored) {
                    cuda::detail::agree(g.nccl(), id, p, cpx::caller::here());
                    made.stored = std::make_unique<window_move<bits_of<T>>>(plan, row, g, made.sequences);
                }
                auto const print = cpx::detail::mix(0, id.fingerprint());
                made.stored->set(plan, static_cast<std::uint32_t>(print ^ print >> 32), comm.stream());
            } else if (made.sent) {
                made.sent->set({&p, 1}, comm.stream());
            } else {
                cuda::exchange_options const of{.room = asked ? room(*asked) : std::nullopt};
                made.sent = std::make_unique<cuda::exchange<T>>(p, row, g.nccl(), of);
            }
        };
        auto& by = g.find<prepared>(
            where,
            {number_of(plan.from.text()), number_of(plan.to.text()), std::uint64_t{3} + plan.back,
             static_cast<std::uint64_t>(row)},
            p.id.fingerprint(), need,
            [&](cpx::capacity const& most) {
                asked = most;
                auto made = std::make_unique<prepared>();
                made->sequences = std::max(most.sequences, plan.from.batch().sequences());
                prepare(*made);
                return made;
            },
            prepare);
        if (!by.by_window) return (*by.sent)(from, to, comm.stream());
        cpx::detail::check_buffers("cuda::exchange", from, {p.source_rows, p.source_width ? p.source_width : row}, to,
                                   {p.target_rows, p.target_width ? p.target_width : row}, cpx::caller::here());
        if (to.width() > 0) (*by.stored)(bits_in(from), bits_in(to), comm.stream());
        return;
    }
    using prepared = cuda::exchange<T>;
    auto& by = g.find<prepared>(
        where, kind, batch, need,
        [&](cpx::capacity const& most) {
            cuda::exchange_options const of{.room = room(most)};
            return std::make_unique<prepared>(listed(), width, g.nccl(), of);
        },
        [&](prepared& made) {
            cpx::plan const next = listed();
            made.set({&next, 1}, comm.stream());
        });
    by(from, to, comm.stream(), 0, mirrored);
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
        from, [&]<class T>(as<T>) { run<T>(g, plan, from, to); });
}

} // namespace binding
