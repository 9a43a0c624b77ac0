// SPDX-License-Identifier: Apache-2.0
// Packed batches and packings.
#include "module.hpp"
#include "numbers.hpp"

#include <cpx/core/packing.hpp>

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

using namespace nanobind::literals;

namespace binding {

namespace {

std::vector<index_t> list(std::span<index_t const> numbers) { return {numbers.begin(), numbers.end()}; }

/// Returns the columns of an array of two dimensions, if they are not told.
index_t columns_of(array const& a, index_t columns) {
    return columns == -1 && a.dimensions() == 2 ? a.size(1) : columns;
}

cpx::thd from_positions(nb::handle positions, std::string_view pads, index_t columns) {
    char const* const where = "thd_from_positions";
    auto const how = word<cpx::pad>(
        where, "pad", pads,
        {{"joins_last_sequence", cpx::pad::joins_last_sequence}, {"own_sequence", cpx::pad::own_sequence}});
    array const a = read(where, "positions", positions);
    cpx::thd batch;
    with_type<std::int64_t, std::int32_t>(
        a, [&]<class T>(of_type<T>) { batch = cpx::thd_from_positions(list_of<T>(a), how, columns_of(a, columns)); });
    return batch;
}

cpx::packing from_mask(nb::handle mask, nb::handle positions, std::string_view side, index_t columns) {
    char const* const where = "packing_from_mask";
    auto const padding =
        word<cpx::padding>(where, "padding", side,
                           {{"any", cpx::padding::any}, {"left", cpx::padding::left}, {"right", cpx::padding::right}});
    array const m = read(where, "mask", mask), p = read_if(where, "positions", positions);
    columns = columns_of(m, columns);
    cpx::packing result({}, {}, 0);
    with_type<bool, std::int64_t, std::int32_t, std::uint8_t>(m, [&]<class M>(of_type<M>) {
        if (!p) {
            result = cpx::packing_from_mask(list_of<M>(m), columns, padding);
            return;
        }
        with_type<std::int64_t, std::int32_t>(
            p, [&]<class P>(of_type<P>) { result = cpx::packing_from_mask(list_of<M>(m), list_of<P>(p), columns); });
    });
    return result;
}

template <class F>
void with_rows(nb::handle from, nb::handle to, char const* where, char const* names[2], F&& f) {
    array const x = read(where, names[0], from), y = written(where, names[1], to);
    with_any(x, [&]<class T>(of_type<T>) { f(rows_of<T>(x), rows_to<T>(y)); });
}

} // namespace

void bind_batch(nb::module_& m) {
    using state = std::tuple<std::vector<index_t>, std::vector<index_t>>;
    nb::class_<cpx::thd>(m, "thd", R"(A packed batch of N sequences, described by their N + 1 offsets (cu_seqlens).

Sequence s holds the global rows offset(s) to offset(s + 1). Lengths of 0 and 1, odd lengths and repeated offsets are
ordinary. Immutable; copies share the offsets. Offsets are physical: where sequences are padded, `valid` gives the
tokens that count, at the front of each.)")
        .def(
            "__init__",
            [](cpx::thd* self, nb::object offsets, nb::object valid) {
                new (self) cpx::thd(integers("thd", "offsets", offsets), integers_if("thd", "valid lengths", valid));
            },
            "offsets"_a.none(), "valid"_a = nb::none(),
            "Takes offsets, a list or an array of int32 or int64, and, of padded sequences, their valid lengths. "
            "Raises cpx.Error that names the first bad one.")
        .def_static(
            "from_lengths",
            [](nb::object lengths) { return cpx::thd::from_lengths(integers("thd.from_lengths", "lengths", lengths)); },
            "lengths"_a.none(), "Returns the batch of sequences of these lengths.")
        .def_static(
            "uniform", [](index_t count, index_t length) { return cpx::thd::uniform(count, length); }, "count"_a,
            "length"_a, "Returns `count` sequences of `length` tokens each, as (batch, time) tensors hold them.")
        .def_prop_ro(
            "sequences", [](cpx::thd const& b) { return b.sequences(); }, "How many sequences there are.")
        .def_prop_ro(
            "tokens", [](cpx::thd const& b) { return b.tokens(); }, "All tokens, padding included.")
        .def_prop_ro(
            "offsets", [](cpx::thd const& b) { return to_numpy(list(b.offsets())); }, "(N + 1,) int64.",
            nb::rv_policy::move)
        .def_prop_ro(
            "valid_lengths",
            [](cpx::thd const& b) {
                std::vector<index_t> valid;
                for (index_t s = 0; s < b.sequences(); ++s) valid.push_back(b.valid(s));
                return to_numpy(std::move(valid));
            },
            "(N,) int64: of each sequence the tokens that are not padding.", nb::rv_policy::move)
        .def(
            "length",
            [](cpx::thd const& b, index_t s) { return b.length(index_in("thd", "sequence", s, b.sequences())); },
            "sequence"_a, "Returns how many tokens a sequence has, padding included.")
        .def(
            "offset",
            [](cpx::thd const& b, index_t s) { return b.offset(index_in("thd", "sequence", s, b.sequences() + 1)); },
            "sequence"_a,
            "Returns the global row of a sequence's first token; of number `sequences`, the row behind the last.")
        .def(
            "sequence",
            [](cpx::thd const& b, index_t row) { return b.sequence(index_in("thd", "row", row, b.tokens())); }, "row"_a,
            "Returns the sequence that holds a global row.")
        .def(
            "__eq__",
            [](cpx::thd const& a, nb::object b) {
                return nb::isinstance<cpx::thd>(b) && a == nb::cast<cpx::thd const&>(b);
            },
            nb::arg().none())
        .def("__hash__", [](cpx::thd const& b) { return static_cast<std::int64_t>(b.hash() >> 2); })
        .def("__repr__",
             [](cpx::thd const& b) {
                 std::string text = "cpx.thd([";
                 for (index_t s = 0; s <= std::min<index_t>(b.sequences(), 16); ++s)
                     text += (s > 0 ? ", " : "") + std::to_string(b.offset(s));
                 return text + (b.sequences() > 16 ? ", ..." : "") + "]" +
                        (b.valid_lengths().empty() ? "" : ", valid=...") + ")";
             })
        .def("__getstate__", [](cpx::thd const& b) { return state(list(b.offsets()), list(b.valid_lengths())); })
        .def("__setstate__", [](cpx::thd& b, state const& s) { new (&b) cpx::thd(std::get<0>(s), std::get<1>(s)); });

    nb::class_<cpx::packing>(m, "packing", R"(Where the rows of a batch without padding lie in a padded buffer.

Sequence s lies in rows start(s) and after. The buffer may be a (rows, columns) tensor or another packed batch.)")
        .def(
            "__init__",
            [](cpx::packing* self, cpx::thd const& batch, nb::object starts, index_t rows) {
                new (self) cpx::packing(batch, integers("packing", "starts", starts), rows);
            },
            "batch"_a, "starts"_a.none(), "buffer_rows"_a)
        .def_prop_ro(
            "batch", [](cpx::packing const& p) { return p.batch(); }, "The batch without padding.")
        .def_prop_ro(
            "buffer_rows", [](cpx::packing const& p) { return p.buffer_rows(); }, "How many rows the buffer has.")
        .def(
            "start",
            [](cpx::packing const& p, index_t s) {
                return p.start(index_in("packing", "sequence", s, p.batch().sequences()));
            },
            "sequence"_a, "Returns the buffer's row of a sequence's first token.")
        .def(
            "rows", [](cpx::packing const& p) { return to_numpy(p.rows()); },
            "Returns the buffer's row of every row of the batch: (tokens,) int64, ascending.")
        .def(
            "__eq__",
            [](cpx::packing const& a, nb::object b) {
                return nb::isinstance<cpx::packing>(b) && a == nb::cast<cpx::packing const&>(b);
            },
            nb::arg().none())
        .def("__hash__",
             [](cpx::packing const& p) {
                 return static_cast<std::int64_t>(cpx::detail::mix(p.batch().hash(), std::uint64_t(p.buffer_rows())) >>
                                                  2);
             })
        .def(unchanging());

    m.def("thd_from_positions", from_positions, "positions"_a, "pad"_a, "columns"_a = -1,
          R"(Returns the batch of position ids: a sequence begins at every 0 and goes on; -1 is padding behind it.

positions: (B, columns) or (tokens,) of int32 or int64. pad: "joins_last_sequence", one more row, not valid, of the
sequence before it, or "own_sequence", a sequence of length 1 and valid length 0.
Raises cpx.Error that names the first wrong row.)");
    m.def("packing_from_mask", from_mask, "mask"_a, "positions"_a = nb::none(), "padding"_a = "any", "columns"_a = -1,
          R"(Returns the batch of a padding mask, 1 where a token counts, and where its rows lie in the padded tensor.

mask: (rows, columns) of bool, uint8, int32 or int64; one sequence a row. With positions, of the same shape, sequences
begin where these are 0. padding: "left", "right" or "any". Raises cpx.Error that names row and column.)");
    m.def(
        "thd_from_cu_seqlens",
        [](nb::object valid, nb::object padded, index_t rows, index_t multiple) {
            char const* const where = "thd_from_cu_seqlens";
            return cpx::thd_from_cu_seqlens(integers(where, "valid offsets", valid),
                                            integers(where, "padded offsets", padded), {rows, multiple});
        },
        "valid"_a, "padded"_a, "rows"_a = -1, "multiple"_a = 1,
        "Returns the batch of cu_seqlens and cu_seqlens_padded (TransformerEngine, Megatron-LM). rows: where the "
        "padded "
        "offsets end, multiple: what divides every padded length.");
    m.def(
        "pad_to_multiple", [](cpx::thd const& b, index_t multiple) { return cpx::pad_to_multiple(b, multiple); },
        "batch"_a, "multiple"_a,
        "Returns the batch whose sequences have the valid lengths of this one, each padded at its end.");
    m.def(
        "unpadded", [](cpx::thd const& b) { return cpx::unpadded(b); }, "padded"_a,
        "Returns the packing of the valid rows of a padded batch: a batch without padding, and where its rows lie.");
    m.def(
        "pack",
        [](cpx::packing const& p, nb::object buffer, nb::object packed) {
            char const* names[] = {"buffer", "packed"};
            with_rows(buffer, packed, "pack", names, [&]<class T>(cpx::rows<T const> from, cpx::rows<T> to) {
                nb::gil_scoped_release const free;
                cpx::pack<T>(p, from, to);
            });
        },
        "packing"_a, "buffer"_a, "packed"_a);
    m.def(
        "unpack",
        [](cpx::packing const& p, nb::object packed, nb::object buffer) {
            char const* names[] = {"packed", "buffer"};
            with_rows(packed, buffer, "unpack", names, [&]<class T>(cpx::rows<T const> from, cpx::rows<T> to) {
                nb::gil_scoped_release const free;
                cpx::unpack<T>(p, from, to);
            });
        },
        "packing"_a, "packed"_a, "buffer"_a);
}

} // namespace binding
