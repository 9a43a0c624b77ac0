// SPDX-License-Identifier: Apache-2.0
// One rank on the host: its memory and transport, and the operations of which the model is made.
#pragma once

#include "run.hpp"

#include <cpx/cpx.hpp>
#include <cpx/ops.hpp>

#include <concepts>

namespace qwen {

/// What blocks of the model ask of a rank; `gpu_rank` has the same. The transport counts what operators have sent.
template <class T>
class host_rank : public cpx::host_products<T> {
public:
    using element = T;
    using finer_rule = void; ///< the elements that a delta rule may have in their place
    using memory_type = cpx::host_memory;

    /// The group of neighbouring ranks that shares the experts.
    using neighbours_type = cpx::subgroup<cpx::counted<cpx::transport_ref>>;

    host_rank(checkpoint<T> const& of, cpx::transport_ref& ranks, cpx::index_t of_delta_rule, int experts_over)
        : model(of), comm(ranks), chunk(of_delta_rule), neighbours_(cpx::neighbours(comm, experts_over)) {}
    host_rank(host_rank const&) = delete; // which `neighbours_` would not follow
    host_rank& operator=(host_rank const&) = delete;

    checkpoint<T> const& model;
    cpx::counted<cpx::transport_ref> comm;
    cpx::index_t chunk; ///< tokens of the delta rule

    int rank() const { return comm.rank(); }
    cpx::host_memory memory() const { return {}; }
    template <std::same_as<T> = T>
    cpx::rows<T const> weight(std::string const& name) const {
        return model.weight(name);
    }
    neighbours_type& neighbours() { return neighbours_; }
    cpx::cuda::attention_engine* attention_engine() const { return nullptr; }
    kernel_calls kernels() const { return {}; }
    /// Returns by what the delta rule carries its states.
    auto& carrier() { return comm; }
    cpx::tally rows_sent() const {
        cpx::tally all = comm.sent("relayout");
        return all += comm.sent("halo");
    }
    cpx::tally states_sent() const {
        cpx::tally all = comm.sent("carry");
        return all += comm.sent("carry, scan");
    }

    void rotary(auto const& where, auto const& x, bool back) const {
        auto const& c = model.config;
        cpx::rotary_pairs<T> pairs{cpx::rotary_frequencies<T>({*c.rope_theta, c.rotary_dim()}), c.rotary_axes()};
        if (back)
            cpx::rotary_backward(where, x, *c.head_dim, pairs, x);
        else
            cpx::rotary(where, x, *c.head_dim, pairs, x);
    }

private:
    neighbours_type neighbours_;
};

template <class T>
outcome run(checkpoint<T> const& model, input const& in, strategy const& how, group const& on, cpx::index_t chunk,
            bool backward) {
    auto const make = [&](cpx::transport_ref& comm) { return host_rank<T>(model, comm, chunk, on.experts_over); };
    return run_ranks<host_rank<T>>(model.config, in, how, on, chunk, backward, true, make);
}

} // namespace qwen
