// SPDX-License-Identifier: Apache-2.0
// One rank on a GPU: its memory and transport, and the operations of which the model is made.
#pragma once

#include "blas.hpp"

#include "../../../harness/cudnn_attention.hpp"
#include "../run.hpp"

#include <cpx/ops/cuda/attention.hpp>
#include <cpx/ops/cuda/causal_conv1d.hpp>
#include <cpx/ops/cuda/expert_exchange.hpp>
#include <cpx/ops/cuda/gated_delta_rule.hpp>
#include <cpx/ops/cuda/norm.hpp>
#include <cpx/ops/cuda/rotary.hpp>
#include <cpx/ops/local/rotary.hpp>

#include <barrier>
#include <chrono>
#include <concepts>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>

namespace qwen {

/// Returns what computes attention by cuDNN on the current device, with its graphs of all runs; null if there is none.
inline cpx::cuda::attention_engine* cudnn_of_device() {
    static std::mutex guard;
    static std::map<int, std::unique_ptr<cpx::cuda::attention_engine>> of_device;
    std::lock_guard const lock(guard);
    auto const [at, fresh] = of_device.try_emplace(cpx::cuda::current_device());
    if (fresh) at->second = cudnn_attention();
    return at->second.get();
}

/// Asks another engine, and counts what it did.
class counting_engine final : public cpx::cuda::attention_engine {
public:
    explicit counting_engine(cpx::cuda::attention_engine& asked) : asked_(asked) {}
    bool attend(cpx::cuda::attention_task<__nv_bfloat16> const& task, cpx::caller here) override {
        return counted(asked_.attend(task, here));
    }
    bool attend(cpx::cuda::attention_task<__half> const& task, cpx::caller here) override {
        return counted(asked_.attend(task, here));
    }

    cpx::index_t served = 0, refused = 0;

private:
    bool counted(bool serves) {
        ++(serves ? served : refused);
        return serves;
    }
    cpx::cuda::attention_engine& asked_;
};

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
        sent += tally<T>(p, from.width());
    }
    void end() {
        wait();
        everyone_.arrive_and_wait();
    }
    template <class T>
    static cpx::tally tally(cpx::plan const& p, cpx::index_t width) {
        return {p.messages(), p.sent_rows(), p.sent_elements(width) * static_cast<cpx::index_t>(sizeof(T))};
    }

    cpx::tally sent; ///< by exchanges; operators that have their own add theirs

private:
    std::barrier<>& everyone_; ///< of this process
};

/// A `host_rank` on a GPU, of the same operations, in float or bfloat16. The device of `comm` must be current.
template <class T>
class gpu_rank {
public:
    using element = T;
    using finer_rule = std::conditional_t<std::same_as<T, __nv_bfloat16>, __half, void>;
    using memory_type = cpx::cuda::memory;
    using neighbours_type = ending_communicator;
    using rows = cpx::rows<T>;
    using const_rows = cpx::rows<T const>;
    using index_t = cpx::index_t;

    /// `everyone`: where all ranks of this process meet; those that fail leave.
    gpu_rank(checkpoint<float> const& of, cpx::nccl& ranks, int experts_over, std::barrier<>& everyone, bool fixed)
        : model(of), everyone_(everyone), product_(stream_, fixed), comm(ranks, stream_, everyone), states_(comm) {
        if (std::same_as<T, __nv_bfloat16> && !fixed)
            if (auto* const cudnn = cudnn_of_device()) engine_.emplace(*cudnn);
        if (experts_over < ranks.ranks()) some_ = ranks.split(ranks.rank() / experts_over);
        neighbours_.emplace(some_ ? *some_ : ranks, stream_, everyone);
        model.each([&](std::string const& name, cpx::rows<float const> w) {
            std::span const exact(w.data(), static_cast<std::size_t>(w.count() * w.width()));
            if (!std::same_as<T, float> && (name.ends_with(".A_log") || name.ends_with(".dt_bias"))) {
                of_gates_.emplace(name, exact);
                return;
            }
            std::vector<T> const rounded(exact.begin(), exact.end());
            weights_.emplace(name, std::span<T const>(rounded));
        });
    }
    ~gpu_rank() { everyone_.arrive_and_drop(); }
    gpu_rank(gpu_rank const&) = delete;
    gpu_rank& operator=(gpu_rank const&) = delete;

    checkpoint<float> const& model;

private:
    cpx::cuda::stream stream_; // outlives what is in its order
    std::barrier<>& everyone_;
    gpu::product<T> product_;

public:
    static constexpr index_t chunk = 64;
    ending_communicator comm;

    int rank() const { return comm.rank(); }
    cpx::cuda::memory memory() const { return comm.memory(); }
    /// Returns a weight of elements A: T, or float what gates are made of.
    template <class A = T>
    cpx::rows<A const> weight(std::string const& name) const {
        auto const shape = model.weight(name);
        if constexpr (!std::same_as<A, T>)
            return {of_gates_.at(name).data(), shape.count(), shape.width()};
        else {
            auto const found = weights_.find(name); // a tied head is the embedding
            auto const& w = found == weights_.end() ? weights_.at("model.embed_tokens.weight") : found->second;
            return {w.data(), shape.count(), shape.width()};
        }
    }
    neighbours_type& neighbours() { return *neighbours_; }
    /// Returns null where cpx's own kernels compute attention, as they do where bits are fixed.
    cpx::cuda::attention_engine* attention_engine() { return engine_ ? &*engine_ : nullptr; }
    kernel_calls kernels() const {
        return {engine_ ? engine_->served : 0, engine_ ? engine_->refused : 0, states_.calls.on_tensor_cores,
                states_.calls.plain};
    }
    cpx::cuda::state_exchange& carrier() { return states_; }
    void ended(cpx::plan const& of = {}, index_t width = 0) {
        comm.end();
        comm.sent += comm.template tally<T>(of, width);
    }
    template <class Plan>
    void ended_states(Plan const& plan, cpx::state_shape const& shape) {
        comm.end();
        index_t const state = shape.state_width(), map = shape.map_width();
        for (index_t k = 0; k < plan.steps; ++k)
            if constexpr (requires { plan.step(k, cpx::side::before, state, map); })
                add_states(plan.step(k, cpx::side::before, state, map), plan.row_width(state, map));
            else
                add_states(plan.step(k, cpx::side::before), state);
    }
    cpx::tally rows_sent() const { return comm.sent; }
    cpx::tally states_sent() const { return states_sent_; }

    void linear(const_rows x, const_rows weight, rows y) const {
        product_(gpu::plain(x), gpu::plain(weight), x.width(), 0, y);
    }
    void linear_backward_input(const_rows dy, const_rows weight, rows dx, bool adds) const {
        product_(gpu::plain(dy), gpu::transposed(weight), dy.width(), adds, dx);
    }
    void linear_backward_weight(const_rows dy, const_rows x, cpx::rows<float> dweight) const {
        product_(gpu::transposed(dy), gpu::transposed(x), x.count(), 1, dweight);
    }

    void rotary(auto const& where, auto const& x, bool back) {
        if (!positions_) { // of a batch, for all layers
            auto const& c = model.config;
            auto const list = cpx::rotary_frequencies<float>({*c.rope_theta, c.rotary_dim()}); // as in transformers
            pairs_.emplace(std::vector<double>(list.begin(), list.end()), c.rotary_axes());
            auto const axes = where.axes();
            positions_ = memory().template room<index_t>(3 * axes.width());
            memory().write(positions_->data(),
                           std::span<index_t const>(axes.data(), static_cast<std::size_t>(3 * axes.width())));
        }
        index_t const axes = pairs_->multimodal() ? 3 : 1; // of text all three are the same
        cpx::cuda::rotary_positions const at(
            cpx::rows<index_t const>(positions_->data(), axes, positions_->size() / 3));
        if (back)
            cpx::cuda::rotary_backward(x, *model.config.head_dim, *pairs_, at, x);
        else
            cpx::cuda::rotary(x, *model.config.head_dim, *pairs_, at, x);
    }

private:
    void add_states(cpx::plan const& step, index_t width) { states_sent_ += comm.template tally<float>(step, width); }
    std::unique_ptr<cpx::nccl> some_;               ///< the neighbours, if they are not all ranks
    std::optional<ending_communicator> neighbours_; ///< that share the experts
    std::optional<counting_engine> engine_;
    cpx::cuda::state_exchange states_;
    cpx::tally states_sent_;
    std::map<std::string, cpx::cuda::buffer<T>> weights_;
    std::map<std::string, cpx::cuda::buffer<float>> of_gates_; ///< A_log and dt_bias, where T is not float
    std::optional<cpx::cuda::rotary_pairs> pairs_;
    std::optional<cpx::cuda::block<index_t>> positions_; ///< (3, rows)
};

/// `run_on_gpus` in T.
template <class T>
outcome run_on(checkpoint<float> const& model, input const& in, strategy const& how, group const& on, bool backward,
               bool fixed) {
    std::chrono::minutes const deadline(1); // for which others wait if one fails alone
    std::vector<std::unique_ptr<cpx::nccl>> of_threads;
    std::unique_ptr<cpx::nccl> of_process;
    if (on.launched) {
        cpx::cuda::use_device(on.launched->rank() % gpus());
        of_process = cpx::nccl::over(*on.launched, deadline);
    } else {
        std::vector<int> devices(static_cast<std::size_t>(on.ranks));
        std::iota(devices.begin(), devices.end(), 0);
        of_threads = cpx::nccl::all(devices, deadline);
    }
    std::barrier everyone(on.launched ? 1 : on.ranks);
    using rank = gpu_rank<T>;
    return run_ranks<rank>(model.config, in, how, on, rank::chunk, backward, fixed, [&](cpx::transport_ref& ranks) {
        auto& comm = on.launched ? *of_process : *of_threads[static_cast<std::size_t>(ranks.rank())];
        cpx::cuda::use_device(comm.device());
        return rank(model, comm, on.experts_over, everyone, fixed);
    });
}

} // namespace qwen
