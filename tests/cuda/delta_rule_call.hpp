// SPDX-License-Identifier: Apache-2.0
// Calls of the gated delta rule of a packed batch, on the host and in device memory.
#pragma once

#include <cpx/cuda/gated_delta_rule.hpp>
#include <cpx/ops/local/delta_rule_backward.hpp>

#include "gpus.hpp"
#include "packed_heads.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

namespace packed_delta_rule {

using namespace packed_heads;
namespace gpu = cpx::cuda;

inline results on_host(problem const& p, bool backward) {
    cpx::delta_rule_options const options{.qk_l2norm = false, .scale = p.shape.scale};
    return on_host_by_heads(p, backward, [&](head_of const& of, results& r) {
        cpx::delta_rule_forward<double>(of.key(p.q), of.key(p.k), of.value(p.v), of.gate(p.g), of.gate(p.beta), 0,
                                        options, of.state(r.last), of.value(r.o));
        if (backward)
            cpx::delta_rule_backward<double>(
                of.key(p.q), of.key(p.k), of.value(p.v), of.gate(p.g), of.gate(p.beta), 0, options, of.state(p.state),
                of.value(p.dout), of.state(r.dstate),
                {of.key(r.dq), of.key(r.dk), of.value(r.dv), of.gate(r.dg), of.gate(r.dbeta)});
    });
}

/// Returns rows of q, k and v side by side, and NaN behind them, `width` elements a row; none if that is 0.
inline numbers side_by_side(problem const& p, index_t width) {
    numbers all(static_cast<std::size_t>(p.rows() * width), NAN);
    if (width == 0) return all;
    index_t first = 0;
    for (auto const& [x, own] : {std::pair(&p.q, p.keys()), {&p.k, p.keys()}, {&p.v, p.values()}}) {
        for (index_t row = 0; row < p.rows(); ++row)
            std::copy_n(x->begin() + row * own, own, all.begin() + row * width + first);
        first += own;
    }
    return all;
}

/// A forward, and perhaps its backward, of a problem on a device: what they read, and what they write, poisoned.
template <class T>
class gpu_call {
public:
    /// `saves`: the backward reads what the forward has saved. `together`: q, k and v are columns of one tensor, and so
    /// are their gradients.
    gpu_call(problem const& p, bool backward, bool saves = false, bool together = false)
        : p_(p), backward_(backward), width_(together ? 2 * p.keys() + p.values() + behind : 0),
          saved_(saves ? gpu::gated_delta_rule_saved<T>(p.shape, p.rows(), count()) : 0),
          space_(gpu::gated_delta_rule_workspace<T>(p.shape, p.rows(), count(), saves)),
          more_(backward ? gpu::gated_delta_rule_backward_workspace<T>(p.shape, p.rows(), count(), saves) : 0) {
        poison(nullptr);
        gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }

    /// Makes NaN of results, workspaces and what is saved, so that nothing of a run before can be taken for this one's.
    void poison(cudaStream_t stream) {
        packed_heads::poison(stream, o_, dq_, dk_, dv_, of_together_, last_, dg_, dbeta_, dstate_, saved_, space_,
                             more_);
    }

    void run(cudaStream_t stream) {
        index_t const n = p_.rows(), keys = p_.keys(), values = p_.values(), heads = p_.shape.value_heads;
        auto in = there_.erasing(all(saved_));
        rows<T> dq(dq_.data(), n, keys), dk(dk_.data(), n, keys), dv(dv_.data(), n, values);
        if (width_ > 0) {
            T *const x = together_.data(), *const dx = of_together_.data();
            in.q = rows<T const>(x, n, keys, width_), in.k = rows<T const>(x + keys, n, keys, width_);
            in.v = rows<T const>(x + 2 * keys, n, values, width_);
            dq = {dx, n, keys, width_}, dk = {dx + keys, n, keys, width_}, dv = {dx + 2 * keys, n, values, width_};
        }
        path_ = gpu::gated_delta_rule<T>(p_.shape, in, {o_.data(), n, values}, all(last_), all(space_), stream);
        if (!backward_) return;
        auto const path = gpu::gated_delta_rule_backward<T>(
            p_.shape, in, there_.gradients(), all(there_.dlast),
            {dq, dk, dv, {dg_.data(), n, heads}, {dbeta_.data(), n, heads}, all(dstate_)}, all(more_), stream);
        CHECK(path == path_);
    }

    /// As many sequences, elsewhere in the rows.
    void set(std::vector<index_t> const& offsets) { there_.offsets.write(offsets); }
    std::vector<char> saved() const { return saved_.read(); }
    results read() const {
        results r{.o = widen(o_.read()), .last = widen(last_.read())};
        r.path = path_;
        if (!backward_) return r;
        r.dq = widen(dq_.read()), r.dk = widen(dk_.read()), r.dv = widen(dv_.read());
        r.dg = widen(dg_.read()), r.dbeta = widen(dbeta_.read()), r.dstate = widen(dstate_.read());
        if (width_ == 0) return r;
        numbers const together = widen(of_together_.read());
        for (index_t row = 0; row < p_.rows(); ++row) {
            auto from = together.begin() + row * width_;
            for (auto const& [x, own] : {std::pair(&r.dq, p_.keys()), {&r.dk, p_.keys()}, {&r.dv, p_.values()}}) {
                std::copy_n(from, own, x->begin() + row * own);
                from += own;
            }
            CHECK(std::all_of(from, from + behind, [](double e) { return std::isnan(e); }));
        }
        return r;
    }

private:
    static constexpr index_t behind = 8; ///< elements of a row, together, that nothing reads or writes
    index_t count() const { return p_.sequences(); }

    problem const& p_;
    bool backward_;
    index_t width_; ///< of the tensors of which q, k and v, and their gradients, are columns; 0: there are none
    delta_rule_path path_ = delta_rule_path::plain;
    device_problem<T> there_{p_};
    buffer<T> o_{std::ssize(p_.v)}, dq_{std::ssize(p_.q)}, dk_{std::ssize(p_.q)}, dv_{std::ssize(p_.v)};
    buffer<T> together_ = upload<T>(side_by_side(p_, width_)), of_together_{p_.rows() * width_};
    buffer<float> last_{std::ssize(p_.state)}, dg_{std::ssize(p_.g)}, dbeta_{std::ssize(p_.g)},
        dstate_{std::ssize(p_.state)};
    buffer<char> saved_, space_, more_;
};

template <class T>
results on_gpu(problem const& p, bool backward, bool saves = false, bool together = false) {
    gpu::stream const stream;
    gpu_call<T> call(p, backward, saves, together);
    call.run(stream);
    return call.read();
}

} // namespace packed_delta_rule
