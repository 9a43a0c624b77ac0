// SPDX-License-Identifier: Apache-2.0
// One rank on the host: its memory and transport, and the operations of which the model is made.
#pragma once

#include "run.hpp"

#include <cpx/cpx.hpp>
#include <cpx/ops.hpp>

namespace qwen {

/// What blocks of the model ask of a rank; `gpu_rank` has the same. Gradients of weights are added to what is there.
template <class T>
class host_rank {
public:
    using element = T;
    using memory_type = cpx::host_memory;
    using rows = cpx::rows<T>;
    using const_rows = cpx::rows<T const>;

    /// The group of neighbouring ranks that shares the experts.
    using neighbours = cpx::subgroup<cpx::counted<cpx::transport_ref>>;
    using experts_type = cpx::expert_exchange<neighbours>;

    host_rank(checkpoint<T> const& of, cpx::transport_ref& ranks, cpx::index_t of_delta_rule, int experts_over)
        : model(of), comm(ranks), chunk(of_delta_rule), neighbours_(cpx::neighbours(comm, experts_over)) {}
    host_rank(host_rank const&) = delete; // which `neighbours_` would not follow
    host_rank& operator=(host_rank const&) = delete;

    checkpoint<T> const& model;
    cpx::counted<cpx::transport_ref> comm;
    cpx::index_t chunk; ///< tokens of the delta rule

    int rank() const { return comm.rank(); }
    cpx::host_memory memory() const { return {}; }
    const_rows weight(std::string const& name) const { return model.weight(name); }
    /// Returns by what the delta rule carries its states.
    auto& carrier() { return comm; }
    /// Ends an exchange, or the operator that has made it, and counts it; the transport here has done that itself.
    void ended(cpx::plan const& = {}, cpx::index_t = 0) const {}
    void ended_states(auto const&...) const {}
    cpx::tally rows_sent() const {
        cpx::tally all = comm.sent("relayout");
        return all += comm.sent("halo");
    }
    cpx::tally states_sent() const {
        cpx::tally all = comm.sent("carry");
        return all += comm.sent("carry, scan");
    }

    /// Calls `f(row, column)` for all of them.
    template <class F>
    void each(cpx::index_t count, cpx::index_t width, F const& f) const {
        for (cpx::index_t row = 0; row < count; ++row)
            for (cpx::index_t j = 0; j < width; ++j) f(row, j);
    }
    void linear(const_rows x, const_rows weight, rows y) const { cpx::linear<T>(x, weight, y); }
    /// dx += dy W.
    void linear_backward_input(const_rows dy, const_rows weight, rows dx) const {
        std::vector<T> own(static_cast<std::size_t>(dx.count() * dx.width()));
        cpx::linear_backward_input<T>(dy, weight, rows(own, dx.width()));
        cpx::as_matrix(dx) += cpx::as_matrix(const_rows(own, dx.width()));
    }
    void linear_backward_weight(const_rows dy, const_rows x, rows dweight) const {
        cpx::linear_backward_weight<T>(dy, x, dweight);
    }

    /// Returns where the rows go of which `chosen` tells the experts.
    template <class Chosen>
    experts_type experts(Chosen const& chosen) {
        auto const places = global_rows(chosen.sharding(), rank());
        return {chosen.data(), model.config.num_experts, places, neighbours_};
    }
    void expert_linear(experts_type const& at, const_rows x, const_rows weight, rows y) const {
        cpx::expert_linear<T>(at.begins(), x, weight, y);
    }
    void expert_linear_backward_input(experts_type const& at, const_rows dy, const_rows weight, rows dx) const {
        cpx::expert_linear_backward_input<T>(at.begins(), dy, weight, dx);
    }
    /// dweight: of all experts.
    void expert_linear_backward_weight(auto const& sums, auto const&, experts_type const& at, const_rows x,
                                       const_rows dy, rows dweight) {
        sums.experts(at, x, dy, dweight, comm);
    }

    /// Norms of heads as wide as the weight; with z the gated one.
    void norm(const_rows x, const_rows z, const_rows weight, rows y) const {
        if (z.data())
            cpx::gated_rms_norm<T>(x, z, gain(weight), eps(), y);
        else
            cpx::rms_norm<T>(x, gain(weight), eps(), centre(), y);
    }
    /// dx may be dy; terms: those of the weight, a row for each.
    void norm_backward(const_rows x, const_rows z, const_rows weight, const_rows dy, rows dx, rows dz,
                       rows terms) const {
        for (cpx::index_t row = 0; row < x.count(); ++row) {
            auto const of = [&](auto const& all) { return all.data() ? all.sub(row, 1) : all; };
            std::span<T> const dgain(terms.row(row), static_cast<std::size_t>(terms.width()));
            if (z.data())
                cpx::gated_rms_norm_backward<T>(of(x), of(z), gain(weight), eps(), of(dy), of(dx), of(dz), dgain);
            else
                cpx::rms_norm_backward<T>(of(x), gain(weight), eps(), centre(), of(dy), of(dx), dgain);
        }
    }

    void rotary(auto const& where, auto const& x, bool back) const {
        auto const& c = model.config;
        cpx::rotary_pairs<T> pairs{cpx::rotary_frequencies<T>({c.rope_theta, c.rotary_dim()}), rotary_axes(c)};
        if (back)
            cpx::rotary_backward(where, x, c.head_dim, pairs, x);
        else
            cpx::rotary(where, x, c.head_dim, pairs, x);
    }

    /// `sums`: in which order rows are added up.
    void conv_backward(auto const& before, auto const& after, auto const& x, const_rows weight, auto const& dy,
                       auto const& dx, rows dweight, auto const& sums) {
        cpx::causal_conv1d_gradients to{dx, dweight};
        to.order = sums.order();
        cpx::causal_conv1d_backward(before, after, x, weight, {}, cpx::activation::silu, dy, to, comm);
    }

private:
    static std::span<T const> gain(const_rows weight) {
        return {weight.data(), static_cast<std::size_t>(weight.width())};
    }
    T eps() const { return static_cast<T>(model.config.rms_norm_eps); }
    T centre() const { return static_cast<T>(model.config.zero_centred_norms); }

    neighbours neighbours_;
};

template <class T>
outcome run(checkpoint<T> const& model, input const& in, strategy const& how, group const& on, cpx::index_t chunk,
            bool backward) {
    auto const make = [&](cpx::transport_ref& comm) { return host_rank<T>(model, comm, chunk, on.experts_over); };
    return run_ranks<host_rank<T>>(model.config, in, how, on, chunk, backward, true, by_layout, make);
}

} // namespace qwen
