// SPDX-License-Identifier: Apache-2.0
// Layouts, and shardings of batches by them.
#include "module.hpp"
#include "numbers.hpp"
#include "sharding.hpp"

#include <cpx/layout/either.hpp>
#include <cpx/layout/piecewise.hpp>
#include <cpx/layout/sequential.hpp>
#include <cpx/layout/striped.hpp>
#include <cpx/layout/table.hpp>
#include <cpx/layout/zigzag.hpp>
#include <cpx/plan/global_rows.hpp>
#include <cpx/plan/relayout.hpp>
#include <cpx/plan/segments.hpp>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

using namespace nanobind::literals;

namespace binding {

/// A function of cpx, and what it is given: so things are pickled.
struct recipe {
    char const* function;
    std::function<nb::tuple()> arguments;

    nb::tuple reduced() const { return nb::make_tuple(nb::module_::import_("cpx").attr(function), arguments()); }
};

namespace {

/// Whether a number of tokens is a multiple of another: the rule of miles.
struct divides {
    index_t multiple = 1;
    bool operator()(index_t n) const { return n % multiple == 0; }
    friend bool operator==(divides, divides) = default;
};
using by_multiple = cpx::by_length<cpx::table, cpx::table, divides>;

struct layout_value {
    std::variant<cpx::sequential<>, cpx::zigzag<>, cpx::striped<>, cpx::table, by_multiple> real;
    std::string text;
    std::vector<layout_value> parts{}; ///< those that are chosen from
    int ranks() const {
        return std::visit([](auto const& l) { return l.ranks(); }, real);
    }
};

struct cut_value {
    int unit = 1;
};

template <class L>
layout_value layout_of(char const* name, int ranks) {
    cpx::detail::require_ranks(name, "ranks", ranks, cpx::caller::here());
    return {L(ranks), std::string(name) + '(' + std::to_string(ranks) + ')'};
}

int small(char const* where, char const* name, index_t number) {
    cpx::require(number >= 0 && number <= cpx::most_ranks, where, name, "0 to 2^20", number);
    return static_cast<int>(number);
}

layout_value table_of(int ranks, nb::object owners) {
    std::vector<int> list;
    for (index_t const owner : integers("table", "owners", owners)) list.push_back(small("table", "owner", owner));
    cpx::detail::require_ranks("table", "ranks", ranks, cpx::caller::here());
    std::string text = "table(" + std::to_string(ranks) + ", [";
    for (std::size_t c = 0; c < std::min<std::size_t>(list.size(), 16); ++c)
        text += (c > 0 ? ", " : "") + std::to_string(list[c]);
    if (list.size() <= 16) return {cpx::table(ranks, list), text + "])"};
    std::uint64_t all = list.size(); // layouts are told from each other by their text
    for (int const owner : list) all = cpx::detail::mix(all, static_cast<std::uint64_t>(owner));
    return {cpx::table(ranks, list),
            text + ", ... of " + std::to_string(list.size()) + ", hash " + std::to_string(all) + "])"};
}

layout_value choice_of(layout_value const& first, layout_value const& second, index_t multiple) {
    auto const as_table = [](layout_value const& of) {
        return std::visit(
            []<class L>(L const& l) -> cpx::table {
                if constexpr (cpx::layout<L>)
                    return cpx::table(l);
                else
                    throw cpx::error("by_length", "layouts to choose from", "layouts", "a rule");
            },
            of.real);
    };
    cpx::require(multiple >= 1, "by_length", "multiple", "at least 1", multiple);
    cpx::require(first.ranks() == second.ranks(), "by_length", "ranks of the second layout", first.ranks(),
                 second.ranks());
    return {by_multiple{as_table(first), as_table(second), divides{multiple}},
            "by_length(" + first.text + ", " + second.text + ", " + std::to_string(multiple) + ')',
            {first, second}};
}

recipe recipe_of(layout_value const& of) {
    return std::visit(
        [&]<class L>(L const& l) -> recipe {
            if constexpr (std::same_as<L, by_multiple>) {
                return {"by_length", [&of, &l] { return nb::make_tuple(of.parts[0], of.parts[1], l.rule.multiple); }};
            } else if constexpr (std::same_as<L, cpx::table>) {
                return {"table", [&l] {
                            nb::list owners;
                            for (int c = 0; c < l.chunks(); ++c) owners.append(l.owner(c));
                            return nb::make_tuple(l.ranks(), owners);
                        }};
            } else {
                return {std::same_as<L, cpx::zigzag<>>    ? "zigzag"
                        : std::same_as<L, cpx::striped<>> ? "striped"
                                                          : "sequential",
                        [&l] { return nb::make_tuple(l.ranks()); }};
            }
        },
        of.real);
}

std::shared_ptr<recipe const> remember(char const* function, std::function<nb::tuple()> arguments) {
    return std::make_shared<recipe const>(recipe{function, std::move(arguments)});
}

any_layout shard(cpx::thd const& batch, layout_value const& layout, std::string_view scope_name, cut_value cut) {
    auto const scope = word<cpx::scope>("shard", "scope", scope_name,
                                        {{"sequence", cpx::scope::sequence}, {"batch", cpx::scope::batch}});
    std::string const text = layout.text + " over " + std::string(scope_name) +
                             (cut.unit == 1 ? "" : ", aligned(" + std::to_string(cut.unit) + ')');
    auto made =
        remember("shard", [=, word = std::string(scope_name)] { return nb::make_tuple(batch, layout, word, cut); });
    return std::visit(
        [&]<class L>(L const& l) -> any_layout {
            using cut_type = cpx::aligned<cpx::dynamic>;
            if (scope == cpx::scope::batch)
                return {any_tokens(cpx::sharding<L, cpx::scope::batch, cut_type>(batch, l, cut_type(cut.unit)), text),
                        std::move(made)};
            return {any_tokens(cpx::sharding<L, cpx::scope::sequence, cut_type>(batch, l, cut_type(cut.unit)), text),
                    std::move(made)};
        },
        layout.real);
}

using section_list = std::vector<std::pair<index_t, index_t>>;

any_layout by_heads(int ranks, cpx::thd const& batch, section_list const& sections) {
    std::vector<cpx::section> list;
    std::string text = "head_sharded(" + std::to_string(ranks) + ", [";
    for (auto const& [heads, width] : sections) {
        text += (list.empty() ? "(" : ", (") + std::to_string(heads) + ", " + std::to_string(width) + ')';
        list.push_back({heads, width});
    }
    return {any_rows(cpx::head_sharded<>(ranks, batch, std::move(list)), text + "])"),
            remember("head_sharded", [=] { return nb::make_tuple(ranks, batch, sections); })};
}

using piece_list = std::vector<std::tuple<index_t, index_t, int>>;

any_layout by_pieces(int ranks, cpx::thd const& batch, piece_list const& pieces) {
    std::vector<cpx::owned_piece> list;
    for (auto const& [first, last, rank] : pieces) list.push_back({{first, last}, rank});
    return {any_tokens(cpx::piecewise<>(ranks, batch, list), "piecewise(" + std::to_string(ranks) + ", ...)"),
            remember("piecewise", [=] { return nb::make_tuple(ranks, batch, pieces); })};
}

} // namespace

void bind_layout(nb::module_& m) {
    nb::class_<layout_value>(m, "Layout", R"(Cuts a run of tokens into chunks and says which rank owns each.

Made by sequential, zigzag, striped, table and by_length.)")
        .def_prop_ro(
            "ranks", [](layout_value const& l) { return l.ranks(); }, "How many ranks share the chunks.")
        .def(
            "__eq__",
            [](layout_value const& a, nb::object b) {
                return nb::isinstance<layout_value>(b) && a.text == nb::cast<layout_value const&>(b).text;
            },
            nb::arg().none())
        .def("__hash__", [](layout_value const& l) { return nb::hash(nb::str(l.text.c_str())); })
        .def(unchanging())
        .def("__reduce__", [](layout_value const& l) { return recipe_of(l).reduced(); })
        .def("__repr__", [](layout_value const& l) { return "cpx." + l.text; });
    m.def(
        "sequential", [](int ranks) { return layout_of<cpx::sequential<>>("sequential", ranks); }, "ranks"_a,
        "W chunks; rank r owns chunk r.");
    m.def(
        "zigzag", [](int ranks) { return layout_of<cpx::zigzag<>>("zigzag", ranks); }, "ranks"_a,
        "2 W chunks; rank r owns the r-th from the front and the r-th from the back: attention costs all the same.");
    m.def(
        "striped", [](int ranks) { return layout_of<cpx::striped<>>("striped", ranks); }, "ranks"_a,
        "4 W chunks, dealt to the ranks in turn.");
    m.def("table", table_of, "ranks"_a, "owners"_a, "As many chunks as owners; rank owners[c] owns chunk c.");
    m.def("by_length", choice_of, "first"_a, "second"_a, "multiple"_a,
          "The first layout for sequences whose length is a multiple, the second for the others. "
          "miles: by_length(zigzag(W), sequential(W), 2 * W).");

    nb::class_<cut_value>(m, "Cut", "Where chunks begin: balanced, or aligned to multiples of some tokens.")
        .def_ro("unit", &cut_value::unit, "Tokens of which chunks begin at multiples; 1 if they are balanced.")
        .def(
            "__eq__",
            [](cut_value a, nb::object b) {
                return nb::isinstance<cut_value>(b) && a.unit == nb::cast<cut_value const&>(b).unit;
            },
            nb::arg().none())
        .def("__hash__", [](cut_value c) { return c.unit; })
        .def(unchanging())
        .def("__reduce__",
             [](cut_value c) {
                 return recipe{"aligned", [=] { return nb::make_tuple(c.unit); }}.reduced();
             })
        .def("__repr__", [](cut_value c) {
            return c.unit == 1 ? std::string("cpx.balanced") : "cpx.aligned(" + std::to_string(c.unit) + ')';
        });
    m.attr("balanced") = cut_value{1};
    m.def(
        "aligned",
        [](int unit) {
            cpx::require(unit >= 1, "aligned", "unit", "at least 1", unit);
            return cut_value{unit};
        },
        "unit"_a = 64,
        "Balanced, then rounded to the nearest multiple of `unit` tokens of the sequence. Cuts at multiples of the "
        "delta "
        "rule's chunk make carry \"serial\" bitwise equal to one rank.");

    nb::class_<any_layout>(m, "Sharding", R"(A layout, a scope and a cut bound to a batch: which rank holds which rows.

Made by shard, head_sharded, replicated and piecewise. Immutable; equal if layout, cut and batch are.)")
        .def_prop_ro(
            "ranks", [](any_layout const& s) { return s.ranks(); }, "How many ranks share the rows.")
        .def_prop_ro(
            "batch", [](any_layout const& s) { return s.batch(); }, "The batch whose rows are shared.")
        .def_prop_ro(
            "every_row", [](any_layout const& s) { return s.every_row(); },
            "Whether every rank holds every row: by heads, or replicated.")
        .def_prop_ro(
            "sections",
            [](any_layout const& s) {
                section_list list;
                s.visit([&](auto const& of) {
                    for (cpx::section const part : of.sections()) list.emplace_back(part.heads, part.width);
                });
                return list;
            },
            "The (heads, width) of each section, by heads; else none.")
        .def(
            "rows",
            [](any_layout const& s, int rank) { return s.visit([&](auto const& of) { return of.rows(rank); }); },
            "rank"_a, "Returns how many rows a rank holds.")
        .def(
            "heads",
            [](any_layout const& s, int rank, index_t heads) {
                cpx::detail::require_rank("heads", rank, s.ranks(), cpx::caller::here());
                cpx::require(heads >= 0, "heads", "heads", "at least 0", heads);
                auto const held = s.visit([&](auto const& of) { return of.heads(rank, heads); });
                return std::pair(held.first, held.last);
            },
            "rank"_a, "heads"_a, "Returns which heads of a section a rank holds: (first, behind the last).")
        .def(
            "width",
            [](any_layout const& s, int rank) {
                cpx::detail::require_rank("width", rank, s.ranks(), cpx::caller::here());
                return s.visit([&](auto const& of) { return cpx::detail::local_width(of, rank, of.sections()); });
            },
            "rank"_a, "Returns the elements of a local row by heads; 0 where rows of any width are whole.")
        .def(
            "pieces",
            [](any_layout const& s, int rank) {
                std::vector<index_t> list;
                s.visit([&](auto const& of) {
                    for (auto const piece : cpx::pieces(of, rank))
                        list.push_back(piece.first), list.push_back(piece.last);
                });
                std::size_t const count = list.size() / 2;
                return to_numpy(std::move(list), {count, 2});
            },
            "rank"_a, "Returns the global rows of a rank as (pieces, 2) int64: first, and behind the last.")
        .def(
            "global_rows",
            [](any_layout const& s, int rank) {
                return to_numpy(s.visit([&](auto const& of) { return cpx::global_rows(of, rank); }));
            },
            "rank"_a, "Returns the global row of every local row: (rows,) int64. x[s.global_rows(r)] is its shard.")
        .def(
            "slots",
            [](any_layout const& s) {
                std::vector<index_t> list;
                s.visit([&](auto const& of) {
                    for (auto const slot : cpx::slots(of)) list.push_back(slot.rank), list.push_back(slot.row);
                });
                std::size_t const count = list.size() / 2;
                return to_numpy(std::move(list), {count, 2});
            },
            "Returns for every global row its rank and its local row there: (tokens, 2) int64.")
        .def(
            "segments",
            [](any_layout const& s, int rank) {
                std::vector<index_t> list;
                s.visit([&](auto const& of) {
                    for (auto const part : cpx::segments(of, rank))
                        list.insert(list.end(), {part.sequence, part.token, part.row, part.count});
                });
                std::size_t const count = list.size() / 4;
                return to_numpy(std::move(list), {count, 4});
            },
            "rank"_a, "Returns a rank's segments, (segments, 4) int64: sequence, first token, first local row, tokens.")
        .def(
            "positions",
            [](any_layout const& s, int rank) {
                return to_numpy(s.visit([&](auto const& of) { return cpx::positions(cpx::segments(of, rank)); }));
            },
            "rank"_a, "Returns the position of every local row in its sequence: (rows,) int64.")
        .def(
            "is_exact",
            [](any_layout const& s, std::string_view carry, index_t chunk) {
                bool const serial = word<bool>("is_exact", "carry", carry, {{"serial", true}, {"scan", false}});
                cpx::require(chunk >= 1, "is_exact", "chunk", "at least 1", chunk);
                return s.visit([&](auto const& of) { return of.is_exact(serial, chunk); });
            },
            "carry"_a, "chunk"_a = 64,
            "Returns whether an operator that works in chunks of tokens has bitwise the results of one rank.")
        .def(
            "__eq__",
            [](any_layout const& a, nb::object b) {
                return nb::isinstance<any_layout>(b) && a == nb::cast<any_layout const&>(b);
            },
            nb::arg().none())
        .def(unchanging())
        .def("__hash__",
             [](any_layout const& s) { // differs between shardings of one batch, which dictionaries need not compare
                 auto const own = s.visit([](auto const& of) { return of.end().hash; });
                 return static_cast<std::int64_t>(cpx::detail::mix(s.batch().hash(), own) >> 2);
             })
        .def("__reduce__",
             [](any_layout const& s) {
                 if (!s.made) throw nb::type_error("cpx: shardings of features are not pickled; make them again");
                 return s.made->reduced();
             })
        .def("__repr__", [](any_layout const& s) {
            return "cpx.Sharding(" + s.text() + ", " + std::to_string(s.batch().sequences()) + " sequences, " +
                   std::to_string(s.batch().tokens()) + " tokens)";
        });

    m.def("shard", shard, "batch"_a, "layout"_a, "scope"_a = "sequence", "cut"_a = cut_value{1},
          R"(Returns the sharding of a batch by a layout.

scope: "sequence", each sequence is cut, or "batch", the whole batch as one run, regardless of boundaries.)");
    m.def("head_sharded", by_heads, "ranks"_a, "batch"_a, "sections"_a,
          R"(Every rank holds every token in sequence order and its share of the heads of each section (Ulysses).

sections: [(heads, width), ...]; a local row is the rank's share of section 0, then of section 1, and so on. Shares may
be uneven; a head that several ranks need stands on each of them.)");
    m.def(
        "replicated",
        [](int ranks, cpx::thd const& batch) {
            return any_layout{any_rows(cpx::replicated<>(ranks, batch), "replicated(" + std::to_string(ranks) + ')'),
                              remember("replicated", [=] { return nb::make_tuple(ranks, batch); })};
        },
        "ranks"_a, "batch"_a,
        "Every rank holds everything: as a target an all-gather. Its transpose sums in rank order.");
    m.def("piecewise", by_pieces, "ranks"_a, "batch"_a, "pieces"_a,
          "Every row on one rank, as a list of (first row, behind the last, rank) in the order of the batch says.");
}

} // namespace binding
