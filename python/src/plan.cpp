// SPDX-License-Identifier: Apache-2.0
// Who sends what to whom: plans and their matrices.
#include "plan.hpp"

#include "module.hpp"
#include "numbers.hpp"

#include <cpx/layout/zigzag.hpp>
#include <cpx/plan/traffic.hpp>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

using namespace nanobind::literals;

namespace binding {

namespace {

template <class L>
using of_sequences = cpx::sharding<L, cpx::scope::sequence, cpx::aligned<cpx::dynamic>>;

/// Gives the identity of a plan the names that users know, in place of those of types.
void name_ends(cpx::identity& id, any_tokens const& from, any_tokens const& to) {
    cpx::identity::set(id.source, from.text());
    cpx::identity::set(id.target, to.text());
}

/// Returns the plan between rows by tokens; of layouts that scale with every length as these do.
cpx::plan by_tokens(any_tokens const& from, any_tokens const& to, int rank) {
    std::optional<cpx::plan> made;
    auto const between = [&]<class A, class B>(of_type<A>, of_type<B>) {
        auto const* const a = from.get<of_sequences<A>>();
        auto const* const b = to.get<of_sequences<B>>();
        if (!made && a && b) made = cpx::relayout(*a, *b, rank);
    };
    between(of_type<cpx::zigzag<>>(), of_type<cpx::sequential<>>());
    between(of_type<cpx::sequential<>>(), of_type<cpx::zigzag<>>());
    if (!made) return cpx::relayout(from, to, rank);
    name_ends(made->id, from, to);
    return std::move(*made);
}
/// Returns what is known of it without a look at who has which rows. Throws `cpx::error` as that does.
cpx::plan without_messages(any_tokens const& from, any_tokens const& to, int rank) {
    auto const here = cpx::caller::here();
    cpx::detail::require_same_group("relayout", from, to, here);
    cpx::detail::require_rank("relayout", rank, from.ranks(), here);
    return {.rank = rank,
            .source_rows = from.rows(rank),
            .target_rows = to.rows(rank),
            .sends = {},
            .receives = {},
            .id = cpx::detail::identify("relayout", from.end(), to.end(), from.ranks(), from.batch()),
            .batch = from.batch(),
            .source_settings = from.end().all,
            .target_settings = to.end().all};
}

/// Calls `f` with the sharding behind one by tokens if it is of a kind that most use, whose plans cost half of those of
/// any: else with this itself.
template <class F>
auto with_real(any_tokens const& s, F&& f) {
    if (auto const* const real = s.get<of_sequences<cpx::zigzag<>>>()) return f(*real);
    if (auto const* const real = s.get<of_sequences<cpx::sequential<>>>()) return f(*real);
    return f(s);
}

/// Returns how many segments have others before and behind.
index_t inner_segments(carry_value const& c) {
    return visit_plan(c, [](auto const& p, auto&) {
        return std::ranges::count_if(p.links, [](auto const& l) { return l.map_row >= 0; });
    });
}

index_t columns_in(cpx::message const& m, index_t width) { return m.columns.empty() ? width : cpx::total(m.columns); }

/// Returns (W, W): what each rank holds and each rank needs, `of(message)` of every message.
template <class F>
nb::ndarray<nb::numpy, std::int64_t> matrix(relayout_value const& r, F&& of) {
    auto const ranks = static_cast<std::size_t>(r.from.ranks());
    auto sums = cpx::detail::zeros<index_t>("relayout", {r.from.ranks(), r.from.ranks()}, cpx::caller::here());
    for (int rank = 0; rank < r.from.ranks(); ++rank)
        for (auto const of_rank = r.back ? relayout_between(r.to, r.from, rank) : relayout_between(r.from, r.to, rank);
             cpx::message const& m : r.back ? of_rank.whole().receives : of_rank.whole().sends)
            sums[static_cast<std::size_t>(rank) * ranks + static_cast<std::size_t>(m.peer)] += of(m);
    return to_numpy(std::move(sums), {ranks, ranks});
}

/// What Python asks of any plan; `whole_of`: returns it with its messages.
template <class V, class F, class G>
void bind_messages(nb::class_<V>& c, F plan_of, G whole_of) {
    c.def_prop_ro(
         "rank", [=](V const& v) { return plan_of(v).rank; }, "The rank whose plan it is.")
        .def_prop_ro(
            "ranks", [=](V const& v) { return plan_of(v).ranks(); }, "How many ranks run it together.")
        .def_prop_ro(
            "source_rows", [=](V const& v) { return plan_of(v).source_rows; }, "Rows that this rank gives.")
        .def_prop_ro(
            "target_rows", [=](V const& v) { return plan_of(v).target_rows; }, "Rows that it gets.")
        .def_prop_ro(
            "source_width", [=](V const& v) { return plan_of(v).source_width; },
            "Elements of a row; 0: rows of any width move whole.")
        .def_prop_ro(
            "target_width", [=](V const& v) { return plan_of(v).target_width; },
            "Elements of a row; 0: as the source's.")
        .def_prop_ro(
            "messages", [=](V const& v) { return whole_of(v).messages(); }, "Messages to other ranks.")
        .def_prop_ro(
            "sent_rows", [=](V const& v) { return whole_of(v).sent_rows(); },
            "Rows of which all or some columns leave this rank.")
        .def(
            "sent_elements", [=](V const& v, index_t width) { return whole_of(v).sent_elements(width); }, "width"_a = 1,
            "Returns the elements that leave this rank, of rows of `width` where they move whole.")
        .def_prop_ro(
            "fingerprint", [=](V const& v) { return plan_of(v).fingerprint(); },
            "64 bits that are equal on all ranks whose plans fit each other.");
}

} // namespace

relayout_value relayout_between(any_layout const& from, any_layout const& to, int rank) {
    return std::visit(
        [&]<class A, class B>(A const& a, B const& b) -> relayout_value {
            if constexpr (std::same_as<A, any_tokens> && std::same_as<B, any_tokens>)
                return {without_messages(a, b, rank), from, to, false, std::make_shared<late_plan const>(by_tokens)};
            else
                return {cpx::relayout(a, b, rank), from, to};
        },
        from.real, to.real);
}

halo_value halo_of(any_layout const& sharding, int rank, index_t reach, cpx::side where) {
    if (sharding.every_row()) return {cpx::halo(std::get<any_rows>(sharding.real), rank, reach, where), sharding};
    auto const& tokens = std::get<any_tokens>(sharding.real);
    return with_real(tokens, [&](auto const& real) -> halo_value {
        auto p = cpx::halo(real, rank, reach, where);
        name_ends(p.id, tokens, tokens);
        return {cpx::halo_plan<any_tokens>{static_cast<cpx::plan&&>(p), tokens, p.reach, p.where, std::move(p.segments),
                                           std::move(p.runs), std::move(p.begin)},
                sharding};
    });
}

carry_value carry_of(any_layout const& sharding, int rank, bool serial) {
    if (sharding.every_row())
        return {cpx::carry<cpx::serial>(std::get<any_rows>(sharding.real), rank), sharding, serial};
    auto const& tokens = std::get<any_tokens>(sharding.real);
    auto const by = [&]<cpx::carry_kind How>(of_type<How>) {
        return with_real(tokens, [&](auto const& real) -> carry_value {
            auto c = cpx::carry<How>(real, rank);
            name_ends(c.id, tokens, tokens);
            return {cpx::carry_plan<How, any_tokens>{static_cast<cpx::carry_exchanges<How>&&>(c), tokens}, sharding,
                    serial};
        });
    };
    return serial ? by(of_type<cpx::serial>()) : by(of_type<cpx::scan>());
}

void bind_plan(nb::module_& m) {
    nb::class_<relayout_value> relayout(m, "Relayout", R"(All that one rank sends and receives between two shardings.

At most one message a peer; rows that stay are copied once.)");
    bind_messages(
        relayout, [](relayout_value const& r) -> cpx::plan const& { return r.plan; },
        [](relayout_value const& r) -> cpx::plan const& { return r.whole(); });
    relayout.def(unchanging())
        .def_prop_ro(
            "source", [](relayout_value const& r) { return r.from; }, "The sharding from which it leads.")
        .def_prop_ro(
            "target", [](relayout_value const& r) { return r.to; }, "The sharding to which it leads.")
        .def(
            "_sizes",
            [](relayout_value const& r) {
                cpx::plan const& p = r.plan;
                return std::tuple(p.rank, p.ranks(), p.source_rows, p.target_rows, p.source_width, p.target_width);
            },
            "Returns rank, ranks, source_rows, target_rows, source_width and target_width, in one call.")
        .def(
            "transposed",
            [](relayout_value const& r) {
                relayout_value back{r.plan.transposed(), r.to, r.from, !r.back};
                if (r.late) // or a plan there, back, there again would have all before it
                    back.late =
                        r.late->back() ? r.late->back() : std::make_shared<late_plan const>(r.late->list(), r.late);
                return back;
            },
            "Returns the plan that moves everything back: the backward of this one.")
        .def(
            "rows_matrix",
            [](relayout_value const& r) { return matrix(r, [](auto const& m) { return cpx::total(m.rows); }); },
            "Returns (W, W) int64: [i, j] rows, all or some columns of them, go from rank i to j; i = j: they stay.")
        .def(
            "bytes_matrix",
            [](relayout_value const& r, index_t width, index_t itemsize) {
                cpx::detail::product("bytes_matrix", "bytes of a row", {width, itemsize}, cpx::caller::here());
                return matrix(r, [&](auto const& m) { return cpx::total(m.rows) * columns_in(m, width) * itemsize; });
            },
            "width"_a = 1, "itemsize"_a = 1,
            "Returns (W, W) int64 of bytes. width: elements of a row, where rows move whole; itemsize: bytes of one.")
        .def(
            "lower_bound",
            [](relayout_value const& r, index_t width) {
                return std::visit(
                    [&](auto const& a, auto const& b) {
                        auto const bound = cpx::lower_bound(a, b, width);
                        return std::pair(bound.rows, bound.elements);
                    },
                    r.from.real, r.to.real);
            },
            "width"_a = 1, "Returns the rows and elements, of all ranks, that no exchange can do without.")
        .def("__repr__", [](relayout_value const& r) {
            return "cpx.Relayout(" + r.from.text() + " -> " + r.to.text() + ", rank " + std::to_string(r.plan.rank) +
                   " of " + std::to_string(r.plan.ranks()) + ')';
        });
    m.def(
        "relayout", relayout_between, "source"_a, "target"_a, "rank"_a,
        R"(Returns the plan by which `rank` and all others move a tensor from one sharding to another, in one exchange.

Any pair of shardings of one batch. Pure: no communication; every rank makes its own.)");

    nb::class_<halo_value> halo(m, "Halo", "The rows beside a rank's segments: what a convolution needs of others.");
    auto const plan_of_halo = [](halo_value const& h) -> cpx::plan const& { return h.plan(); };
    bind_messages(halo, plan_of_halo, plan_of_halo);
    halo.def(unchanging())
        .def_prop_ro(
            "sharding", [](halo_value const& h) { return h.sharding; }, "The sharding of the rows.")
        .def_prop_ro(
            "reach", [](halo_value const& h) { return visit_plan(h, [](auto const& p, auto&) { return p.reach; }); },
            "How many rows beside a segment.")
        .def_prop_ro(
            "side",
            [](halo_value const& h) {
                return visit_plan(
                    h, [](auto const& p, auto&) { return p.where == cpx::side::before ? "before" : "after"; });
            },
            "\"before\" or \"after\" the segment.")
        .def(
            "_sizes",
            [](halo_value const& h) {
                return visit_plan(h, [](auto const& p, auto&) {
                    return std::tuple(p.rank, p.ranks(), p.reach, p.where == cpx::side::before ? "before" : "after");
                });
            },
            "Returns rank, ranks, reach and side, in one call.");
    m.def(
        "halo",
        [](any_layout const& s, int rank, index_t reach, std::string_view side) {
            return halo_of(
                s, rank, reach,
                word<cpx::side>("halo", "side", side, {{"before", cpx::side::before}, {"after", cpx::side::after}}));
        },
        "sharding"_a, "rank"_a, "reach"_a, "side"_a = "before",
        "Returns the plan by which a rank gets the `reach` rows beside each of its segments, and gives its own.");

    nb::class_<carry_value>(m, "Carry", "How recurrent states are handed along the segments of a sequence.")
        .def(unchanging())
        .def_prop_ro(
            "sharding", [](carry_value const& c) { return c.sharding; }, "The sharding of the rows.")
        .def_prop_ro(
            "rank", [](carry_value const& c) { return visit_plan(c, [](auto const& p, auto&) { return p.rank; }); },
            "The rank whose plan it is.")
        .def_prop_ro(
            "how", [](carry_value const& c) { return c.serial ? "serial" : "scan"; }, "\"scan\" or \"serial\".")
        .def_prop_ro(
            "steps", [](carry_value const& c) { return visit_plan(c, [](auto const& p, auto&) { return p.steps; }); },
            "How many exchanges there are, the same on all ranks.")
        .def_prop_ro(
            "segments",
            [](carry_value const& c) {
                return visit_plan(c, [](auto const& p, auto&) { return std::ssize(p.segments); });
            },
            "How many segments the rank has: rows of saved states.")
        .def_prop_ro("maps", inner_segments,
                     "How many of them have others before and behind: rows of saved maps, of a scan.")
        .def(
            "_sizes",
            [](carry_value const& c) {
                return visit_plan(c, [&](auto const& p, auto const& s) {
                    bool const scans = !c.serial && !s.every_row;
                    return std::tuple(p.rank, std::ssize(p.segments), p.batch.sequences(), s.rows(p.rank),
                                      scans ? inner_segments(c) : 0, !s.sections().empty());
                });
            },
            "Returns of the rank: its number, segments, sequences of the batch, rows, saved maps, and whether it holds "
            "its share of sections.");
    m.def(
        "carry",
        [](any_layout const& s, int rank, std::string_view how) {
            return carry_of(s, rank, word<bool>("carry", "how", how, {{"scan", false}, {"serial", true}}));
        },
        "sharding"_a, "rank"_a, "how"_a = "scan",
        R"(Returns the plan by which a rank hands recurrent states on.

how: "scan", all segments at once, within rounding of one rank; "serial", one after the other, bitwise equal to one rank
where cuts are aligned to the operator's chunk.)");
}

} // namespace binding
