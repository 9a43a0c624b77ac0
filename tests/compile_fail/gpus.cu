// Exchanges and operators between GPUs: what is refused on the host is refused there, and each memory by the other's.
#include <cpx/cpx.hpp>
#include <cpx/ops/cuda/causal_conv1d.hpp>
#include <cpx/ops/cuda/gated_delta_rule.hpp>
#include <cpx/ops/cuda/head_decay_attention.hpp>
#include <cpx/ops/cuda/mrope.hpp>
#include <cpx/ops/cuda/rotary.hpp>
#include <cpx/ops/cuda/vision.hpp>

using zigzag = cpx::sharding<cpx::zigzag<4>>;
using sequential = cpx::sharding<cpx::sequential<4>>;
using device = cpx::cuda::memory;

template <class From, class To>
using plan = cpx::relayout_plan<From, To> const&;
template <class S, class M>
using view = cpx::sharded<float, S, M> const&;

#ifdef CPX_GOOD
using given = zigzag;
using taken = sequential;
using place = device;
using host_place = cpx::host_memory;
#else
using given = sequential;
using taken = zigzag;
using place = cpx::host_memory;
using host_place = device;
#endif

// expect: exchange of a tensor that is not sharded as the plan's source
void views(plan<zigzag, sequential> p, view<given, device> x, view<sequential, device> y,
           cpx::cuda::communicator& comm) {
    cpx::exchange(p, x, y, comm);
}

// expect: exchange into a tensor that is not sharded as the plan's target
void targets(plan<zigzag, sequential> p, view<zigzag, device> x, view<taken, device> y, cpx::cuda::communicator& comm) {
    cpx::exchange(p, x, y, comm);
}

// expect: exchange of tensors in another memory than that of the transport's ranks
void on_host(plan<zigzag, sequential> p, view<zigzag, place> x, view<sequential, place> y,
             cpx::cuda::communicator& comm) {
    cpx::exchange(p, x, y, comm);
}

// expect: exchange of tensors in another memory than that of the transport's ranks
void on_device(plan<zigzag, sequential> p, view<zigzag, host_place> x, view<sequential, host_place> y,
               cpx::threads& comm) {
    cpx::exchange(p, x, y, comm);
}

// expect: causal_conv1d of tensors that are not sharded as the plan
void convolves(cpx::halo_plan<zigzag> const& p, view<given, device> x, view<zigzag, device> y, cpx::rows<float const> w,
               cpx::cuda::communicator& comm) {
    cpx::causal_conv1d(p, x, w, {}, cpx::activation::none, y, comm);
}

// expect: causal_conv1d wants a halo_plan, a tensor x, weight and bias of its elements
void convolves_on_host(cpx::halo_plan<zigzag> const& p, view<zigzag, place> x, view<zigzag, place> y,
                       cpx::rows<float const> w, cpx::cuda::communicator& comm) {
    cpx::causal_conv1d(p, x, w, {}, cpx::activation::none, y, comm);
}

// expect: cuda::causal_conv1d of tensors that are not sharded as the conv_exchange
void prepared(cpx::cuda::conv_exchange<float, zigzag>& by, view<given, device> x, view<given, device> y,
              cpx::rows<float const> w) {
    cpx::cuda::causal_conv1d(by, x, w, {}, cpx::activation::none, y);
}
#ifndef CPX_GOOD
// expect: cuda::causal_conv1d.by, x, weight, bias, activation, y. wants a conv_exchange, tensors of cuda::memory
void prepared(cpx::cuda::conv_exchange<float, zigzag>& by, view<zigzag, device> x, cpx::rows<float const> w,
              cpx::cuda::communicator& comm) {
    cpx::cuda::causal_conv1d(by, x, w, {}, cpx::activation::none, x, comm);
}

// expect: cuda::causal_conv1d.by, x, weight, bias, activation, y. wants a conv_exchange
void unprepared(cpx::halo_plan<zigzag> const& p, view<zigzag, device> x, cpx::rows<float const> w) {
    auto const y = cpx::cuda::causal_conv1d(p, x, w, {}, cpx::activation::none, x);
}

// expect: cuda::rotary.x, head_dim, pairs, positions, y. wants tensors of cuda::memory
void turns(std::vector<float>& x, cpx::cuda::rotary_pairs const& pairs, cpx::cuda::rotary_positions const& positions) {
    auto const y = cpx::cuda::rotary(x, 8, pairs, positions, x); // which returns nothing, but that is not the mistake
}

// expect: cuda::put_features.at, kind, features, x. wants placeholder_rows, a media_kind, and tensors of cuda::memory
// expect: cuda::put_features_backward.at, kind, dx, dfeatures. wants placeholder_rows
// expect: cuda::add_features.at, kind, features, x. wants placeholder_rows
// expect: cuda::add_features_backward.at, kind, dx, dfeatures. wants placeholder_rows
// expect: cuda::placeholder_rows.positions, memory. wants sharded_positions and a cuda::memory
// expect: cuda::placeholder_rows.positions, memory. wants sharded_positions and a cuda::memory
void features(cpx::sharded_positions<zigzag> const& positions, cpx::cuda::placeholder_rows<zigzag> const& at,
              cpx::tensor<float, zigzag>& on_host, cpx::tensor<float, zigzag, device>& x,
              cpx::cuda::communicator& comm) {
    auto const image = cpx::media_kind::image;
    cpx::cuda::put_features(at, image, on_host, on_host);
    cpx::cuda::put_features_backward(positions, image, x, x);
    cpx::cuda::add_features(at, image, x.data(), x);
    cpx::cuda::add_features_backward(at, x, x);
    cpx::cuda::placeholder_rows const listed(positions, comm);
    cpx::cuda::placeholder_rows<zigzag> const of_a_tensor(x, comm);
}

// expect: cuda::conv_exchange<T, S>.before, after, channels, comm., .* wants halo_plans
// expect: cuda::conv_exchange<T, S>.before, after, channels, comm., .* wants halo_plans
// expect: cuda::conv_exchange<T, S>.before, after, channels, comm., .* T and S always written
// expect: cuda::conv_exchange<T, S>.before, after, channels, comm., .* T and S always written
// expect: cuda::exchange<T>.plan, width, comm. wants
// expect: cuda::state_exchange.comm, most. wants a cuda::communicator
// expect: cuda::mrope_positions.comm, most, of. wants a cpx::device_transport
void made(cpx::halo_plan<sequential> const& other, cpx::halo_plan<zigzag> const& halo, plan<zigzag, sequential> moves,
          cpx::threads& threads, cpx::cuda::communicator& comm) {
    cpx::cuda::conv_exchange<float, zigzag> of_another(other, 4, comm);
    cpx::cuda::conv_exchange<float, zigzag> on_host(halo, 4, threads);
    cpx::cuda::conv_exchange of_a_relayout(moves, 4, comm);
    cpx::cuda::conv_exchange of_no_type(halo, 4, comm);
    cpx::cuda::exchange<float> rows(moves, 4, comm);
    cpx::cuda::state_exchange states(threads);
    cpx::cuda::mrope_positions<cpx::cuda::communicator> positions(threads, {});
}

// expect: a struct of tensors cannot tell its type
void carries_decay(cpx::carry_plan<cpx::scan, zigzag> const& p, cpx::tensor<float, zigzag, device>& t,
                   cpx::cuda::communicator& comm) {
    cpx::recur(p, cpx::head_decay_attention{}, cpx::recurrence_tensors{{t, t, t, t}, t}, comm);
}

// Of two mistakes in a call the first is said.
// expect: cuda::causal_conv1d of tensors that are not sharded as the conv_exchange
// expect: cuda::rotary of x and y on two shardings
void two_mistakes(cpx::cuda::conv_exchange<float, zigzag>& by, view<sequential, device> x, cpx::rows<float const> w,
                  cpx::tensor<float, zigzag, device> const& written_never, cpx::cuda::rotary_pairs const& pairs,
                  cpx::cuda::rotary_positions const& positions) {
    cpx::cuda::causal_conv1d(by, x, w, {}, cpx::activation::none, written_never);
    cpx::cuda::rotary(x, 8, pairs, positions, written_never);
}

// expect: cuda::rotary_pairs.frequencies, axes. wants frequencies of double
cpx::cuda::rotary_pairs const of_floats(std::vector<float>(4));

// expect: a field is given other elements, to write what is const, or no view
auto gradients(view<zigzag, device> dx, std::vector<float> const& dweight) {
    return cpx::cuda::causal_conv1d_gradients<float, zigzag>{dx, dweight};
}
#endif

#ifndef CPX_GOOD // its kernels take long to compile
// expect: gated_delta_rule of tensors that are not sharded as the plan
void carries(cpx::carry_plan<cpx::serial, zigzag> const& p, cpx::delta_rule_tensors<float, sequential, device> const& t,
             cpx::cuda::communicator& comm) {
    cpx::gated_delta_rule(p, t, {}, {}, comm);
}

// expect: gated_delta_rule_backward of tensors or gradients that are not sharded as the plan
void carries_back(cpx::carry_plan<cpx::scan, zigzag> const& p, cpx::delta_rule_tensors<float, zigzag, device> const& t,
                  cpx::delta_rule_gradient_tensors<float, sequential, device> const& to,
                  cpx::cuda::communicator& comm) {
    cpx::gated_delta_rule_backward(p, t, to, {}, {}, comm);
}

// expect: recur of tensors that are not sharded as the plan
void own_recurrence(cpx::carry_plan<cpx::serial, zigzag> const& p, view<sequential, device> x, view<zigzag, device> o,
                    cpx::cuda::communicator& comm) {
    cpx::recur(p, 0, cpx::cuda::recurrence_tensors{std::tuple(x), o}, comm);
}

// expect: recur of what is no cuda::recurrence_model of these tensors
void no_recurrence(cpx::carry_plan<cpx::serial, zigzag> const& p, view<zigzag, device> x, view<zigzag, device> o,
                   cpx::cuda::communicator& comm) {
    cpx::recur(p, 0, cpx::cuda::recurrence_tensors{std::tuple(x), o}, comm);
}

/// A model without a backward.
struct forward_alone {
    char const* name = "forward_alone";
    cpx::state_shape states() const { return {}; }
    std::array<cpx::recurrence_input, 1> inputs() const { return {}; }
    template <class... A>
    void forward(A const&...) const {}
    template <class... A>
    void fold(A const&...) const {}
};
struct there_and_back : forward_alone {
    template <class... A>
    void backward(A const&...) const {}
    template <class... A>
    void backward_fold(A const&...) const {}
};

// expect: recur_backward of a cuda::recurrence_model that has no backward
void no_backward(cpx::carry_plan<cpx::serial, zigzag> const& p, view<zigzag, device> x, cpx::cuda::communicator& comm) {
    cpx::recur_backward(p, forward_alone(), cpx::cuda::recurrence_tensors{std::tuple(x), x},
                        cpx::cuda::recurrence_gradients{x, std::tuple(x)}, comm);
}

// expect: recur_backward of another number of gradients than inputs
void more_gradients(cpx::carry_plan<cpx::serial, zigzag> const& p, view<zigzag, device> x,
                    cpx::cuda::communicator& comm) {
    cpx::recur_backward(p, there_and_back(), cpx::cuda::recurrence_tensors{std::tuple(x), x},
                        cpx::cuda::recurrence_gradients{x, std::tuple(x, x)}, comm);
}

// expect: gated_delta_rule wants a carry_plan, delta_rule_tensors, heads, options and a cpx::transport
void carries_on_host(cpx::carry_plan<cpx::serial, zigzag> const& p, cpx::delta_rule_tensors<float, zigzag> const& t,
                     cpx::cuda::communicator& comm) {
    cpx::gated_delta_rule(p, t, {}, {}, comm);
}
#endif

// expect: movement of a tensor that is not sharded as its source
void moves(cpx::movement<float, cpx::relayout_plan<zigzag, sequential>, cpx::cuda::communicator>& move,
           view<given, device> x, view<sequential, device> y) {
    move(x, y);
}

// expect: movement into a tensor that is not sharded as its target
void moves_back(cpx::movement<float, cpx::relayout_plan<zigzag, sequential>, cpx::cuda::communicator>& move,
                view<sequential, device> y, view<given, device> x) {
    move.transposed(y, x);
}

// expect: movement of a tensor that is not sharded as its source
void moves_what_it_targets(cpx::movement<float, cpx::relayout_plan<zigzag, sequential>, cpx::cuda::communicator>& move,
                           view<taken, device> y, view<zigzag, device> x) {
    move.transposed(y, x);
}

// expect: movement of a tensor that is not sharded as its plan
void brings(cpx::movement<float, cpx::halo_plan<zigzag>, cpx::cuda::communicator>& move, view<given, device> x,
            cpx::rows<float> halo) {
    move(x, halo);
}
