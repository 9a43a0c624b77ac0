// SPDX-License-Identifier: Apache-2.0
// One rank on a GPU: its memory and transport, and the operations of which the model is made.
#pragma once

#include "blas.hpp"
#include "convolution.cuh"
#include "norm.cuh"

#include "../run.hpp"

#include <cpx/ops/cuda/attention.hpp>
#include <cpx/ops/cuda/causal_conv1d.hpp>
#include <cpx/ops/cuda/expert_exchange.hpp>
#include <cpx/ops/cuda/gated_delta_rule.hpp>
#include <cpx/ops/cuda/rotary.hpp>
#include <cpx/ops/local/rotary.hpp>

#include <barrier>
#include <memory>
#include <optional>

namespace qwen {

/// The transport of ranks some of which are threads of one process, of which none may allocate memory while another
/// one's exchange waits for it: all end an exchange before one goes on.
class ending_communicator : public cpx::cuda::communicator {
public:
    ending_communicator(cpx::nccl& comm, cudaStream_t in, std::barrier<>& everyone)
        : communicator(comm, in), everyone_(everyone) {}
    template <class T>
    void exchange(cpx::plan const& p, cpx::rows<T const> const& from, cpx::rows<T> const& to,
                  cpx::caller here = cpx::caller::here()) {
        communicator::exchange(p, from, to, here);
        end();
    }
    void end() {
        wait();
        everyone_.arrive_and_wait();
    }

private:
    std::barrier<>& everyone_; ///< of this process
};

/// A `host_rank` on a GPU, of the same operations. The device of `comm` must be current.
class gpu_rank {
public:
    using element = float;
    using memory_type = cpx::cuda::memory;
    using rows = cpx::rows<float>;
    using const_rows = cpx::rows<float const>;
    using index_t = cpx::index_t;

    /// `everyone`: where all ranks of this process meet; those that fail leave.
    gpu_rank(checkpoint<float> const& of, cpx::nccl& ranks, int experts_over, std::barrier<>& everyone, bool fixed)
        : model(of), everyone_(everyone), product_(stream_, fixed), comm(ranks, stream_, everyone), states_(comm) {
        if (experts_over < ranks.ranks()) some_ = ranks.split(ranks.rank() / experts_over);
        neighbours_.emplace(some_ ? *some_ : ranks, stream_, everyone);
        model.each([&](std::string const& name, const_rows w) {
            weights_.emplace(name, cpx::cuda::buffer<float>(std::span<float const>(
                                       w.data(), static_cast<std::size_t>(w.count() * w.width()))));
        });
    }
    ~gpu_rank() { everyone_.arrive_and_drop(); }
    gpu_rank(gpu_rank const&) = delete;
    gpu_rank& operator=(gpu_rank const&) = delete;

    checkpoint<float> const& model;

private:
    cpx::cuda::stream stream_; // outlives what is in its order
    std::barrier<>& everyone_;
    gpu::product product_;

public:
    static constexpr index_t chunk = 64;
    ending_communicator comm;

    int rank() const { return comm.rank(); }
    cpx::cuda::memory memory() const { return comm.memory(); }
    const_rows weight(std::string const& name) const {
        auto const shape = model.weight(name);
        auto const found = weights_.find(name); // a tied head is the embedding
        auto const& w = found == weights_.end() ? weights_.at("model.embed_tokens.weight") : found->second;
        return {w.data(), shape.count(), shape.width()};
    }
    cpx::cuda::state_exchange& carrier() { return states_; }
    void ended(cpx::plan const& of = {}, index_t width = 0) {
        comm.end();
        rows_sent_ += tally(of, width);
    }
    template <class Plan>
    void ended_states(Plan const& plan, cpx::state_shape const& shape) {
        ended();
        index_t const state = shape.state_width(), map = shape.map_width();
        for (index_t k = 0; k < plan.steps; ++k)
            if constexpr (requires { plan.step(k, cpx::side::before, state, map); })
                states_sent_ += tally(plan.step(k, cpx::side::before, state, map), plan.row_width(state, map));
            else
                states_sent_ += tally(plan.step(k, cpx::side::before), state);
    }
    cpx::tally rows_sent() const { return rows_sent_; }
    cpx::tally states_sent() const { return states_sent_; }

    template <class F>
    void each(index_t count, index_t width, F const& f) const {
        gpu::each(count, width, f, stream_);
    }
    void linear(const_rows x, const_rows weight, rows y) const {
        product_(gpu::plain(x), gpu::plain(weight), x.width(), 0, y);
    }
    void linear_backward_input(const_rows dy, const_rows weight, rows dx) const {
        product_(gpu::plain(dy), gpu::transposed(weight), dy.width(), 1, dx);
    }
    void linear_backward_weight(const_rows dy, const_rows x, rows dweight) const {
        product_(gpu::transposed(dy), gpu::transposed(x), x.count(), 1, dweight);
    }

    using experts_type = cpx::expert_exchange<ending_communicator>;
    template <class Chosen>
    experts_type experts(Chosen const& chosen) {
        auto const places = global_rows(chosen.sharding(), rank());
        return {chosen.data(), model.config.num_experts, places, *neighbours_};
    }
    void expert_linear(experts_type const& at, const_rows x, const_rows weight, rows y) const {
        index_t const out = y.width();
        each_expert(at, [&](index_t expert, index_t row, index_t count) {
            linear(x.sub(row, count), weight.sub(expert * out, out), y.sub(row, count));
        });
    }
    /// Adds to dx.
    void expert_linear_backward_input(experts_type const& at, const_rows dy, const_rows weight, rows dx) const {
        index_t const out = dy.width();
        each_expert(at, [&](index_t expert, index_t row, index_t count) {
            linear_backward_input(dy.sub(row, count), weight.sub(expert * out, out), dx.sub(row, count));
        });
    }
    /// dweight: of all experts.
    void expert_linear_backward_weight(auto const& sums, auto const&, experts_type const& at, const_rows x,
                                       const_rows dy, rows dweight) {
        sums.template experts<float>(at, x, dy, comm, [&](experts_type const& of, const_rows of_x, const_rows of_y) {
            index_t const out = of_y.width();
            each_expert(of, [&](index_t expert, index_t row, index_t count) {
                auto const own = dweight.sub((of.own().first + expert) * out, out);
                linear_backward_weight(of_y.sub(row, count), of_x.sub(row, count), own);
            });
        });
    }

    void norm(const_rows x, const_rows z, const_rows weight, rows y) const {
        gpu::rms_norm(norm_of(x, z, weight), y, stream_);
    }
    void norm_backward(const_rows x, const_rows z, const_rows weight, const_rows dy, rows dx, rows dz,
                       rows terms) const {
        gpu::rms_norm_backward(norm_of(x, z, weight), dy, dx, dz, terms, stream_);
    }

    void rotary(auto const& where, auto const& x, bool back) {
        if (!positions_) { // of a batch, for all layers
            auto const& c = model.config;
            auto const list = cpx::rotary_frequencies<float>({c.rope_theta, c.rotary_dim()}); // as in transformers
            pairs_.emplace(std::vector<double>(list.begin(), list.end()), rotary_axes(c));
            auto const axes = where.axes();
            positions_ = upload(std::span(axes.data(), static_cast<std::size_t>(3 * axes.width())));
        }
        index_t const axes = pairs_->multimodal() ? 3 : 1; // of text all three are the same
        cpx::cuda::rotary_positions const at(
            cpx::rows<index_t const>(positions_->data(), axes, positions_->size() / 3));
        if (back)
            cpx::cuda::rotary_backward(x, model.config.head_dim, *pairs_, at, x);
        else
            cpx::cuda::rotary(x, model.config.head_dim, *pairs_, at, x);
    }

    void conv_backward(auto const& before, auto const& after, auto const& x, const_rows weight, auto const& dy,
                       auto const& dx, rows dweight, auto const& sums) {
        bool const by_row = sums.order() == cpx::sum_order::by_row;
        cpx::causal_conv1d_gradients to{dx, by_row ? rows() : dweight};
        cpx::causal_conv1d_backward(before, after, x, weight, {}, cpx::activation::silu, dy, to, comm);
        ended();
        if (!by_row) return;
        auto const all_x = sums.share(x, weight.count(), comm);
        ended();
        auto const all_dy = sums.share(dy, weight.count(), comm);
        ended();
        auto const offsets = upload(sums.sharding().batch().offsets());
        auto const own = all_x.share;
        each(own.size(), weight.width(),
             gpu::conv_weight_backward{all_x.data, all_dy.data, weight.sub(own.first, own.size()), offsets.data(),
                                       sums.sharding().batch().sequences(), dweight.sub(own.first, own.size())});
    }

private:
    /// Calls `f(expert, row, count)` for every expert of this rank that has rows: its number, the first, how many.
    template <class F>
    static void each_expert(experts_type const& at, F const& f) {
        auto const begins = at.begins();
        for (std::size_t e = 0; e + 1 < begins.size(); ++e)
            if (begins[e] < begins[e + 1]) f(static_cast<index_t>(e), begins[e], begins[e + 1] - begins[e]);
    }
    static cpx::tally tally(cpx::plan const& p, index_t width) {
        return {p.messages(), p.sent_rows(), p.sent_elements(width) * static_cast<index_t>(sizeof(float))};
    }
    gpu::norm_tensors norm_of(const_rows x, const_rows z, const_rows weight) const {
        auto const& c = model.config;
        return {
            x, z, weight.data(), weight.width(), static_cast<float>(c.rms_norm_eps), c.zero_centred_norms ? 1.f : 0};
    }
    template <class T>
    cpx::cuda::block<T> upload(std::span<T const> values) const {
        auto made = memory().room<T>(std::ssize(values));
        memory().write(made.data(), values);
        return made;
    }

    std::unique_ptr<cpx::nccl> some_;               ///< the neighbours, if they are not all ranks
    std::optional<ending_communicator> neighbours_; ///< that share the experts
    cpx::cuda::state_exchange states_;
    cpx::tally rows_sent_, states_sent_;
    std::map<std::string, cpx::cuda::buffer<float>> weights_;
    std::optional<cpx::cuda::rotary_pairs> pairs_;
    std::optional<cpx::cuda::block<index_t>> positions_; ///< (3, rows)
};

} // namespace qwen
