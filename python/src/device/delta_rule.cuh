// SPDX-License-Identifier: Apache-2.0
// The gated delta rule on elements of one type, on a device.
#pragma once

#include "recurrence.cuh"

#include <cpx/ops/cuda/gated_delta_rule.hpp>

namespace binding {

/// Rows of a tensor, or a copy of them in the stream where the copy engine, which tensor cores want, cannot read them.
template <class T>
class read_by_engine {
public:
    read_by_engine(tensor const& t, bool wanted, cuda::memory const& memory) : rows_(rows_of<T>(t)) {
        if (!wanted || cuda::detail::row_vector(rows_) == 16) return;
        copy_ = memory.room<T>(rows_.count() * rows_.width());
        auto const bytes = [](index_t n) { return static_cast<std::size_t>(n) * sizeof(T); };
        cuda::check(cudaMemcpy2DAsync(copy_.data(), bytes(rows_.width()), rows_.data(), bytes(rows_.stride()),
                                      bytes(rows_.width()), static_cast<std::size_t>(rows_.count()),
                                      cudaMemcpyDeviceToDevice, memory.stream()),
                    "cudaMemcpy2DAsync");
        rows_ = {copy_.data(), rows_.count(), rows_.width()};
    }
    cpx::rows<T const> rows() const { return rows_; }

private:
    cpx::rows<T const> rows_;
    cuda::block<T> copy_;
};

/// Calls `f(plan, state_exchange, on, read, tensors)` for a call; read: makes `read_by_engine`; o: its result, or the
/// gradient of it, which stands in its place in a backward.
template <class T, class F>
void with_delta_rule(device_group& g, carry_value const& carry, state_call const& c, tensor const& o, F&& f) {
    with_states(g, carry, c, [&]<class P>(P const& plan, cuda::state_exchange& by, auto const& on) {
        using S = std::remove_cvref_t<decltype(plan.sharding)>;
        index_t const heads = plan.sharding.heads(plan.rank, c.value_heads).size();
        auto const kept = [&](index_t segments, index_t tokens) {
            return cuda::detail::delta_saved_space<T>({1, heads, c.key_dim, c.value_dim}, tokens, segments).bytes;
        };
        cpx::recurrence_saved<T, cuda::memory> saved;
        if (c.starts)
            saved = saved_in<T>(c, plan, heads * c.key_dim * c.value_dim, heads * c.key_dim * c.key_dim, kept);
        bool const on_tensor_cores = kept(1, 1) > 0;
        auto const read = [&](tensor const& t) { return read_by_engine<T>(t, on_tensor_cores, by.memory()); };
        std::array const x{read(c.x[0]), read(c.x[1]), read(c.x[2])};
        f(plan, by, on, read,
          cpx::delta_rule_tensors<T, S, cuda::memory>{
              on(x[0].rows()), on(x[1].rows()), on(x[2].rows()), on(rows_of<float>(c.x[3])), on(rows_of<float>(c.x[4])),
              on(rows_to<T>(o)), cpx::rows<float const>(states_in<float>(c.initial)), states_in<float>(c.final),
              c.starts ? &saved : nullptr});
    });
}

inline std::pair<cpx::delta_rule_heads, cpx::delta_rule_options> parameters_of(state_call const& c) {
    cpx::delta_rule_options options;
    options.chunk = c.chunk, options.scale = c.scale, options.qk_l2norm = c.qk_l2norm;
    return {{c.key_heads, c.value_heads, c.key_dim, c.value_dim}, options};
}

template <class T>
void delta_rule(device_group& g, carry_value const& carry, state_call const& c) {
    auto const parameters = parameters_of(c);
    with_delta_rule<T>(g, carry, c, c.o, [&](auto const& plan, auto& by, auto const&, auto const&, auto const& t) {
        cpx::gated_delta_rule(plan, t, parameters.first, parameters.second, by);
    });
}

template <class T>
void delta_rule_backward(device_group& g, carry_value const& carry, state_call const& c) {
    auto const parameters = parameters_of(c);
    with_delta_rule<T>(g, carry, c, c.dout,
                       [&](auto const& plan, auto& by, auto const& on, auto const& read, auto const& t) {
                           using S = std::remove_cvref_t<decltype(plan.sharding)>;
                           auto const dout = read(c.dout);
                           cpx::delta_rule_gradient_tensors<T, S, cuda::memory> const to{
                               on(dout.rows()),
                               on(rows_to<T>(c.dx[0])),
                               on(rows_to<T>(c.dx[1])),
                               on(rows_to<T>(c.dx[2])),
                               on(rows_to<float>(c.dx[3])),
                               on(rows_to<float>(c.dx[4])),
                               cpx::rows<float const>(states_in<float>(c.dfinal)),
                               states_in<float>(c.dinitial)};
                           cpx::gated_delta_rule_backward(plan, t, to, parameters.first, parameters.second, by);
                       });
}

/// Returns the bytes that a forward on tensor cores keeps of a chunk and value head; 0: none, on this device.
template <class T>
index_t kept_of_chunk(device_group& g) {
    on_device const here(g.nccl().device());
    constexpr index_t chunks = 256; // of which nothing is rounded up
    cuda::gated_delta_rule_shape const one{1, 1};
    return cuda::gated_delta_rule_saved<T>(one, 64 * chunks, 0) / chunks;
}

} // namespace binding
