// SPDX-License-Identifier: Apache-2.0
// Rows moved between devices.
#include "group.hpp"

#include <cpx/cuda/channels.hpp>

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
    // Where no rows move, ranks do not meet. Rows that are added come as messages, in the order of ranks.
    auto* const channels = p.local ? nullptr : g.channels();
    if (channels && p.kind != cpx::flow::sums) {
        using prepared = cuda::channel_exchange<T>;
        auto& by = g.find<prepared>(
            where, kind, batch, need,
            [&](cpx::capacity const& most) {
                return std::make_unique<prepared>(listed(), width, *channels, room(most));
            },
            [&](prepared& made) { made.set(listed(), comm.stream()); });
        return by(from, to, comm.stream(), mirrored);
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
