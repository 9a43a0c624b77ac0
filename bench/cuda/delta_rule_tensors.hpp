// SPDX-License-Identifier: Apache-2.0
// One rank's random tensors of the gated delta rule, and the operator's calls on them.
#pragma once

#include <cpx/cpx.hpp>
#include <cpx/ops/cuda/gated_delta_rule.hpp>

#include "random.hpp"

#include <cmath>
#include <type_traits>

namespace timing {

/// bfloat16; g from `least` to 0. All on the communicator's device, whose stream the calls are in.
template <cpx::carry_kind How, cpx::any_sharding S>
class delta_rule {
public:
    using element = __nv_bfloat16;
    using memory = cpx::cuda::memory;
    using saved = cpx::delta_rule_saved<element, memory>;

    delta_rule(S const& sharding, cpx::delta_rule_heads const& heads, bool normalise, cpx::cuda::communicator& comm,
               float least = -1)
        : plan_(cpx::carry<How>(sharding, comm.rank())), heads_(heads), by_(comm, {}, comm.through()),
          tokens_(sharding.rows(comm.rank())), least_(least) {
        options_.qk_l2norm = normalise;
    }

    /// Keeps in `kept` what it says; null: nothing.
    void forward(saved* kept) { gated_delta_rule(plan_, tensors(kept), heads_, options_, by_); }
    void backward(saved& kept) {
        gated_delta_rule_backward(plan_, tensors(&kept),
                                  cpx::delta_rule_gradient_tensors<element, S, memory>{
                                      on(dout_), on(dq_), on(dk_), on(dv_), on(dg_), on(dbeta_), {}, {}},
                                  heads_, options_, by_);
    }

private:
    template <class T>
    using buffer = cpx::cuda::buffer<T>;

    template <class B>
    auto on(B const& b) const {
        using T = std::remove_reference_t<decltype(*b.data())>;
        return cpx::sharded(cpx::rows<T>(b.data(), tokens_, tokens_ ? b.size() / tokens_ : 0), plan_.sharding,
                            plan_.rank, by_.memory());
    }
    cpx::delta_rule_tensors<element, S, memory> tensors(saved* kept) const {
        return {on(q_), on(k_), on(v_), on(g_), on(beta_), on(o_), {}, {}, kept};
    }

    cpx::carry_plan<How, S> plan_;
    cpx::delta_rule_heads heads_;
    cpx::delta_rule_options options_;
    cpx::cuda::state_exchange by_;
    cpx::index_t tokens_, keys_ = tokens_ * heads_.key_heads * heads_.key_dim,
                          values_ = tokens_ * heads_.value_heads * heads_.value_dim,
                          gates_ = tokens_ * heads_.value_heads;
    float const least_;
    float const most_ = std::sqrt(3.0f / static_cast<float>(heads_.key_dim)); // of vectors that are one long
    buffer<element> const q_ = random<element>(keys_, 1, -most_, most_), k_ = random<element>(keys_, 2, -most_, most_),
                          v_ = random<element>(values_, 3, -1, 1), dout_ = random<element>(values_, 6, -1, 1),
                          o_{values_}, dq_{keys_}, dk_{keys_}, dv_{values_};
    buffer<float> const g_ = random<float>(gates_, 4, least_, 0), beta_ = random<float>(gates_, 5, 0, 1), dg_{gates_},
                        dbeta_{gates_};
};

} // namespace timing
