// SPDX-License-Identifier: Apache-2.0
// What a rank does alone: rotary embedding, projections, norms, gates, log-probabilities, and choices of experts.
#include "gates.hpp"
#include "module.hpp"
#include "numbers.hpp"

#include <cpx/ops/local/linear.hpp>
#include <cpx/ops/local/log_probability.hpp>
#include <cpx/ops/local/norm.hpp>
#include <cpx/ops/local/rotary.hpp>
#include <cpx/ops/local/router.hpp>

#include <nanobind/stl/array.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

using namespace nanobind::literals;

namespace binding {

namespace {

using nb::object;

void rotary(object x_, object positions_, index_t head_dim, object frequencies_, std::vector<int> axes,
            std::string_view how_, bool back, object y_) {
    char const* const where = back ? "rotary_backward" : "rotary";
    auto const how = word<cpx::rounding>(
        where, "rounding", how_,
        {{"fp32_inside", cpx::rounding::fp32_inside}, {"round_each_op", cpx::rounding::round_each_op}});
    array const x = read(where, back ? "dy" : "x", x_), y = written(where, back ? "dx" : "out", y_),
                positions = read(where, "positions", positions_),
                frequencies = read(where, "frequencies", frequencies_);
    with_number(x, [&]<class T>(of_type<T>) {
        using number = cpx::detail::rotary_number<T>;
        auto const from = rows_of<T>(x);
        auto const to = rows_to<T>(y);
        auto const list = list_of<std::int64_t>(positions);
        auto const of = list_of<number>(frequencies);
        index_t const count = positions.dimensions() > 1 ? positions.size(0) : 1;
        static_assert(sizeof(index_t) == sizeof(std::int64_t));
        cpx::rows<index_t const> const at(reinterpret_cast<index_t const*>(list.data()), count,
                                          count > 0 ? std::ssize(list) / count : 0);
        cpx::rotary_pairs<number> const pairs{{of.begin(), of.end()}, axes, how};
        nb::gil_scoped_release const free;
        if (back)
            cpx::rotary_backward<T>(from, head_dim, at, pairs, to);
        else
            cpx::rotary<T>(from, head_dim, at, pairs, to);
    });
}

void frequencies(double theta, index_t rotary_dim, object out_) {
    char const* const where = "rotary_frequencies";
    array const out = written(where, "out", out_);
    with_float(out, [&]<class T>(of_type<T>) {
        auto const list = cpx::rotary_frequencies<T>({theta, rotary_dim});
        std::ranges::copy(list, list_to<T>(out, std::ssize(list)).begin());
    });
}

void linear(object x_, object weight_, object y_) {
    array const x = read("linear", "x", x_), weight = read("linear", "weight", weight_),
                y = written("linear", "out", y_);
    with_float(x, [&]<class T>(of_type<T>) {
        auto const a = rows_of<T>(x), w = rows_of<T>(weight);
        auto const to = rows_to<T>(y);
        nb::gil_scoped_release const free;
        cpx::linear<T>(a, w, to);
    });
}

void linear_backward(object x_, object weight_, object dy_, object dx_, object dweight_) {
    char const* const where = "linear_backward";
    array const x = read(where, "x", x_), weight = read(where, "weight", weight_), dy = read(where, "dy", dy_),
                dx = written_if(where, "dx", dx_), dweight = written_if(where, "dweight", dweight_);
    with_float(x, [&]<class T>(of_type<T>) {
        auto const a = rows_of<T>(x), w = rows_of<T>(weight), d = rows_of<T>(dy);
        auto const to = rows_to<T>(dx), to_weight = rows_to<T>(dweight);
        nb::gil_scoped_release const free;
        if (dx) cpx::linear_backward_input<T>(d, w, to);
        if (dweight) cpx::linear_backward_weight<T>(d, a, to_weight);
    });
}

void rms_norm(object x_, object z_, object weight_, double eps, double offset, object y_) {
    char const* const where = z_.is_none() ? "rms_norm" : "gated_rms_norm";
    array const x = read(where, "x", x_), z = read_if(where, "z", z_), weight = read(where, "weight", weight_),
                y = written(where, "out", y_);
    with_float(x, [&]<class T>(of_type<T>) {
        auto const a = rows_of<T>(x), gate = rows_of<T>(z);
        auto const w = list_of<T>(weight);
        auto const to = rows_to<T>(y);
        nb::gil_scoped_release const free;
        if (z)
            cpx::gated_rms_norm<T>(a, gate, w, static_cast<T>(eps), to);
        else
            cpx::rms_norm<T>(a, w, static_cast<T>(eps), static_cast<T>(offset), to);
    });
}

void rms_norm_backward(object x_, object z_, object weight_, object dy_, double eps, double offset, object dx_,
                       object dz_, object dweight_) {
    char const* const where = z_.is_none() ? "rms_norm_backward" : "gated_rms_norm_backward";
    array const x = read(where, "x", x_), z = read_if(where, "z", z_), weight = read(where, "weight", weight_),
                dy = read(where, "dy", dy_), dx = written(where, "dx", dx_), dz = written_if(where, "dz", dz_),
                dweight = written(where, "dweight", dweight_);
    with_float(x, [&]<class T>(of_type<T>) {
        auto const a = rows_of<T>(x), gate = rows_of<T>(z), d = rows_of<T>(dy);
        auto const w = list_of<T>(weight);
        auto const to = rows_to<T>(dx), to_z = rows_to<T>(dz);
        auto const to_weight = list_to<T>(dweight);
        nb::gil_scoped_release const free;
        if (z)
            cpx::gated_rms_norm_backward<T>(a, gate, w, static_cast<T>(eps), d, to, to_z, to_weight);
        else
            cpx::rms_norm_backward<T>(a, w, static_cast<T>(eps), static_cast<T>(offset), d, to, to_weight);
    });
}

void delta_gates(object b_, object a_, object A_log_, object dt_bias_, object g_, object beta_) {
    char const* const where = "delta_gates";
    array const b = read(where, "b", b_), a = read(where, "a", a_), A_log = read(where, "A_log", A_log_),
                dt_bias = read(where, "dt_bias", dt_bias_), g = written(where, "g", g_),
                beta = written(where, "beta", beta_);
    with_float(a, [&]<class T>(of_type<T>) {
        auto const of = gates_of<T>(where, rows_of<T>(b), rows_of<T>(a), list_of<T>(A_log), list_of<T>(dt_bias));
        auto const to_g = rows_to<T>(g), to_beta = rows_to<T>(beta);
        nb::gil_scoped_release const free;
        open_gates(where, of, to_g, to_beta, cpx::host_memory());
    });
}

void delta_gates_backward(object b_, object a_, object A_log_, object dt_bias_, object dg_, object dbeta_, object db_,
                          object da_, object terms_) {
    char const* const where = "delta_gates_backward";
    array const b = read(where, "b", b_), a = read(where, "a", a_), A_log = read(where, "A_log", A_log_),
                dt_bias = read(where, "dt_bias", dt_bias_), dg = read(where, "dg", dg_),
                dbeta = read(where, "dbeta", dbeta_), db = written(where, "db", db_), da = written(where, "da", da_),
                terms = written(where, "terms", terms_);
    with_float(a, [&]<class T>(of_type<T>) {
        auto const of = gates_of<T>(where, rows_of<T>(b), rows_of<T>(a), list_of<T>(A_log), list_of<T>(dt_bias));
        auto const of_g = rows_of<T>(dg), of_beta = rows_of<T>(dbeta);
        auto const to_b = rows_to<T>(db), to_a = rows_to<T>(da), to_terms = rows_to<T>(terms);
        nb::gil_scoped_release const free;
        open_gates_backward(where, of, of_g, of_beta, to_b, to_a, to_terms, cpx::host_memory());
    });
}

template <class T>
std::span<index_t const> labels_of(array const& a) {
    auto const list = list_of<std::int64_t>(a);
    return {reinterpret_cast<index_t const*>(list.data()), list.size()};
}

void log_probabilities(object logits_, object labels_, object out_) {
    char const* const where = "log_probabilities";
    array const logits = read(where, "logits", logits_), labels = read(where, "labels", labels_),
                out = written(where, "out", out_);
    with_float(logits, [&]<class T>(of_type<T>) {
        auto const a = rows_of<T>(logits);
        auto const to = list_to<T>(out);
        auto const at = labels_of<T>(labels);
        nb::gil_scoped_release const free;
        cpx::log_probabilities<T>(a, at, to);
    });
}

void log_probabilities_backward(object logits_, object labels_, object dlogp_, object dlogits_) {
    char const* const where = "log_probabilities_backward";
    array const logits = read(where, "logits", logits_), labels = read(where, "labels", labels_),
                dlogp = read(where, "dlogp", dlogp_), dlogits = written(where, "dlogits", dlogits_);
    with_float(logits, [&]<class T>(of_type<T>) {
        auto const a = rows_of<T>(logits);
        auto const d = list_of<T>(dlogp);
        auto const to = rows_to<T>(dlogits);
        auto const at = labels_of<T>(labels);
        nb::gil_scoped_release const free;
        cpx::log_probabilities_backward<T>(a, at, d, to);
    });
}

cpx::rows<index_t> numbers_to(array const& a) {
    auto const r = rows_to<std::int64_t>(a);
    return {reinterpret_cast<index_t*>(r.data()), r.count(), r.width(), r.stride()};
}

void choose_experts(object logits_, object chosen_, object weights_, bool given) {
    char const* const where = given ? "weigh_experts" : "choose_experts";
    array const logits = read(where, "logits", logits_),
                chosen = given ? read(where, "chosen", chosen_) : written(where, "chosen", chosen_),
                weights = written(where, "weights", weights_);
    with_float(logits, [&]<class T>(of_type<T>) {
        auto const a = rows_of<T>(logits);
        auto const own = numbers_to(chosen);
        auto const to = rows_to<T>(weights);
        nb::gil_scoped_release const free;
        if (given)
            cpx::weigh_experts<T>(a, own, to);
        else
            cpx::choose_experts<T>(a, own, to);
    });
}

void choose_experts_backward(object chosen_, object weights_, object dweights_, object dlogits_) {
    char const* const where = "choose_experts_backward";
    array const chosen = read(where, "chosen", chosen_), weights = read(where, "weights", weights_),
                dweights = read(where, "dweights", dweights_), dlogits = written(where, "dlogits", dlogits_);
    with_float(weights, [&]<class T>(of_type<T>) {
        auto const own = numbers_to(chosen);
        auto const w = rows_of<T>(weights), d = rows_of<T>(dweights);
        auto const to = rows_to<T>(dlogits);
        auto const here = cpx::caller::here();
        cpx::detail::require_shape(where, "weights", w, own.count(), own.width(), here);
        cpx::detail::require_shape(where, "dweights", d, own.count(), own.width(), here);
        cpx::detail::require_shape(where, "dlogits", to, own.count(), to.width(), here);
        cpx::detail::require_apart(where, {{"dlogits", to}}, {{"weights", w}, {"dweights", d}}, here);
        for (index_t row = 0; row < own.count(); ++row)
            for (index_t s = 0; s < own.width(); ++s) cpx::detail::require_expert(where, own(row, s), to.width(), here);
        nb::gil_scoped_release const free;
        for (index_t row = 0; row < to.count(); ++row) std::fill_n(to.row(row), to.width(), T(0));
        cpx::for_each_element(cpx::host_memory(), own.count(), 1,
                              cpx::rowwise::choose_experts_backward<T>{own, w, d, to});
    });
}

void expert_linear(std::vector<index_t> begins, object x_, object weight_, object y_) {
    char const* const where = "expert_linear";
    array const x = read(where, "x", x_), weight = read(where, "weight", weight_), y = written(where, "out", y_);
    with_float(x, [&]<class T>(of_type<T>) {
        auto const a = rows_of<T>(x), w = rows_of<T>(weight);
        auto const to = rows_to<T>(y);
        nb::gil_scoped_release const free;
        cpx::expert_linear<T>(begins, a, w, to);
    });
}

void expert_linear_backward(std::vector<index_t> begins, object x_, object weight_, object dy_, object dx_,
                            object dweight_) {
    char const* const where = "expert_linear_backward";
    array const x = read(where, "x", x_), weight = read(where, "weight", weight_), dy = read(where, "dy", dy_),
                dx = written(where, "dx", dx_), dweight = written(where, "dweight", dweight_);
    with_float(x, [&]<class T>(of_type<T>) {
        auto const a = rows_of<T>(x), w = rows_of<T>(weight), d = rows_of<T>(dy);
        auto const to = rows_to<T>(dx), to_weight = rows_to<T>(dweight);
        nb::gil_scoped_release const free;
        cpx::expert_linear_backward_input<T>(begins, d, w, to);
        cpx::expert_linear_backward_weight<T>(begins, d, a, to_weight);
    });
}

} // namespace

void bind_local(nb::module_& m) {
    m.def("rotary", rotary, "x"_a, "positions"_a, "head_dim"_a, "frequencies"_a, "axes"_a, "rounding"_a, "back"_a,
          "out"_a);
    m.def("rotary_frequencies", frequencies, "theta"_a, "rotary_dim"_a, "out"_a);
    m.def(
        "rotary_axes",
        [](std::array<index_t, 3> section, std::string_view order) {
            auto const how = word<cpx::axis_order>(
                "rotary_axes", "order", order,
                {{"interleaved", cpx::axis_order::interleaved}, {"sectioned", cpx::axis_order::sectioned}});
            return cpx::rotary_axes(section, how);
        },
        "section"_a, "order"_a = "interleaved",
        R"(Returns the axis of every pair of channels: time 0, height 1, width 2, for a model's `mrope_section`.

order: "interleaved" (Qwen3-VL, Qwen3.5) or "sectioned" (Qwen2-VL, Qwen2.5-VL).)");
    m.def("linear", linear, "x"_a, "weight"_a, "out"_a);
    m.def("linear_backward", linear_backward, "x"_a, "weight"_a, "dy"_a, "dx"_a.none(), "dweight"_a.none());
    m.def("delta_gates", delta_gates, "b"_a, "a"_a, "A_log"_a, "dt_bias"_a, "g"_a, "beta"_a);
    m.def("delta_gates_backward", delta_gates_backward, "b"_a, "a"_a, "A_log"_a, "dt_bias"_a, "dg"_a, "dbeta"_a, "db"_a,
          "da"_a, "terms"_a);
    m.def("rms_norm", rms_norm, "x"_a, "z"_a.none(), "weight"_a, "eps"_a, "gain_offset"_a, "out"_a);
    m.def("rms_norm_backward", rms_norm_backward, "x"_a, "z"_a.none(), "weight"_a, "dy"_a, "eps"_a, "gain_offset"_a,
          "dx"_a, "dz"_a.none(), "dweight"_a);
    m.def("log_probabilities", log_probabilities, "logits"_a, "labels"_a, "out"_a);
    m.def("log_probabilities_backward", log_probabilities_backward, "logits"_a, "labels"_a, "dlogp"_a, "dlogits"_a);
    m.def("choose_experts", choose_experts, "logits"_a, "chosen"_a, "weights"_a, "given"_a);
    m.def("choose_experts_backward", choose_experts_backward, "chosen"_a, "weights"_a, "dweights"_a, "dlogits"_a);
    m.def("expert_linear", expert_linear, "begins"_a, "x"_a, "weight"_a, "out"_a);
    m.def("expert_linear_backward", expert_linear_backward, "begins"_a, "x"_a, "weight"_a, "dy"_a, "dx"_a, "dweight"_a);
    m.attr("ignored") = cpx::ignored;
}

} // namespace binding
