// SPDX-License-Identifier: Apache-2.0
// Rows of tokens to the ranks that own the experts which they chose, and back.
#include "comm.hpp"
#include "module.hpp"
#include "numbers.hpp"

#include <cpx/core/packing.hpp>
#include <cpx/ops/expert_exchange.hpp>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>

using namespace nanobind::literals;

namespace binding {

namespace {

constexpr char const* where = "expert_exchange";

class experts_on_host final : public experts_of_batch {
public:
    experts_on_host(nb::object chosen_, index_t experts, nb::object places_, communicator& comm)
        : comm_(comm), transport_(comm.host(where)) {
        array const chosen = read(where, "chosen", chosen_);
        auto const list = rows_of<index_t>(chosen);
        auto const places = integers(where, "places", places_);
        call const now(where, comm_);
        made_ = std::make_unique<cpx::expert_exchange<cpx::transport_ref>>(list, experts, places, transport_);
        lists_ = lists_of(*made_);
    }

    expert_lists const& lists() const override { return lists_; }
    void to_experts(nb::handle x_, nb::handle out_) override {
        char const* const name = "ExpertExchange.to_experts";
        array const x = read(name, "x", nb::borrow(x_)), out = written(name, "out", nb::borrow(out_));
        with_number(x, [&]<class T>(of_type<T>) {
            auto const from = rows_of<T>(x);
            auto const to = rows_to<T>(out);
            auto const here = cpx::caller::here();
            cpx::detail::require_shape(name, "out", to, lists_.begins.back(), to.width(), here);
            call const now(name, comm_);
            auto const rows = made_->to_experts<T>(from, to.width());
            cpx::detail::copy_rows<T>(rows.view(), to);
        });
    }
    void to_tokens(nb::handle x_, nb::handle out_) override {
        char const* const name = "ExpertExchange.to_tokens";
        array const x = read(name, "x", nb::borrow(x_)), out = written(name, "out", nb::borrow(out_));
        with_number(x, [&]<class T>(of_type<T>) {
            auto const from = rows_of<T>(x);
            auto const to = rows_to<T>(out);
            call const now(name, comm_);
            made_->to_tokens<T>(from, to);
        });
    }

private:
    communicator& comm_;
    cpx::transport_ref transport_;
    std::unique_ptr<cpx::expert_exchange<cpx::transport_ref>> made_;
    expert_lists lists_;
};

/// The exchange of a batch's choices, and the communicator that it moves rows by.
class experts_value {
public:
    experts_value(nb::object chosen, index_t experts, nb::object places, std::shared_ptr<communicator> comm)
        : comm_(std::move(comm)) {
        if (auto* const there = comm_->on_device())
            made_ = there->share(chosen, experts, places);
        else
            made_ = std::make_unique<experts_on_host>(chosen, experts, places, *comm_);
    }

    expert_lists const& of() const { return made_->lists(); }
    void to_experts(nb::object x, nb::object out) const { made_->to_experts(x, out); }
    void to_tokens(nb::object x, nb::object out) const { made_->to_tokens(x, out); }

private:
    std::shared_ptr<communicator> comm_;
    std::unique_ptr<experts_of_batch> made_;
};

} // namespace

void bind_experts(nb::module_& m) {
    nb::class_<experts_value>(m, "ExpertExchange",
                              R"(The rows of tokens, one for each expert that a token chose, between
the ranks that have the tokens and those that own the experts. Rank r of W owns the experts from r * experts / W on.)")
        .def(nb::init<nb::object, index_t, nb::object, std::shared_ptr<communicator>>(), "chosen"_a, "experts"_a,
             "places"_a, "comm"_a,
             R"(chosen: (tokens, choices) int64 of this rank, experts from 0, each once a token; places: where the
tokens stand in the batch, sharding.global_rows(rank). comm: the ranks that share the experts; on devices chosen is
there, too, and the host waits for it. Collective.)")
        .def_prop_ro(
            "experts", [](experts_value const& e) { return e.of().experts; }, "All experts of the layer.")
        .def_prop_ro(
            "own", [](experts_value const& e) { return std::pair(e.of().own.first, e.of().own.last); },
            "The experts of this rank: (first, behind the last).")
        .def_prop_ro(
            "begins", [](experts_value const& e) { return to_numpy(e.of().begins); },
            "Where the rows of each own expert begin, and behind the last one's: (own + 1,) int64.",
            nb::rv_policy::move)
        .def_prop_ro(
            "count", [](experts_value const& e) { return e.of().begins.back(); }, "The rows of the own experts.")
        .def_prop_ro(
            "tokens", [](experts_value const& e) { return e.of().tokens; }, "This rank's tokens.")
        .def_prop_ro(
            "choices", [](experts_value const& e) { return e.of().choices; }, "How many experts a token chose.")
        .def_prop_ro(
            "places", [](experts_value const& e) { return to_numpy(e.of().places); },
            "The place in the batch of every row's token: (count,) int64.", nb::rv_policy::move)
        .def("_to_experts", &experts_value::to_experts, "x"_a, "out"_a)
        .def("_to_tokens", &experts_value::to_tokens, "x"_a, "out"_a);
}

} // namespace binding
