// Operators on tensors of shardings that do not belong together.
#include <cpx/cpx.hpp>
#include <cpx/ops.hpp>

using zigzag = cpx::sharding<cpx::zigzag<4>>;
using sequential = cpx::sharding<cpx::sequential<4>>;
using everywhere = cpx::replicated<4>;

template <class S>
using view = cpx::sharded<float, S> const&;
using numbers = cpx::sharded<cpx::index_t, zigzag> const&;
using rows = cpx::rows<float const>;
using list = std::vector<float> const&;

// Miles' pull request 957 and Megatron's 3282: W equal chunks of every sequence, read as W equal chunks of the batch.
using packed = cpx::sharding<cpx::sequential<4>, cpx::scope::batch>;

#ifdef CPX_GOOD
using other = zigzag;
using of_sequences = packed;
using keys = everywhere;
using more = cpx::sequential<4>;
using model = cpx::head_decay_attention;
using brings = cpx::halo_plan<zigzag>;
using carries = cpx::carry_plan<cpx::scan, zigzag>;
using held = cpx::tensor<float, zigzag>;
using written = held;
using group = cpx::threads;
using taps = std::vector<float>;
using labelled = cpx::tensor<cpx::index_t, zigzag>;
#else
using other = sequential;
using of_sequences = sequential;
using keys = zigzag; // every rank would see some tokens of a sequence and call them the whole
using more = cpx::sequential<8>;
using model = cpx::kimi_delta_attention; // has one input more
using brings = cpx::relayout_plan<zigzag, sequential>;
using carries = cpx::halo_plan<zigzag>;
using held = cpx::rows<float>;
using written = cpx::tensor<float, zigzag> const;
using taps = std::vector<double>;
using labelled = std::vector<cpx::index_t>;
struct group {
    int rank() const { return 0; }
    int ranks() const { return 4; }
};
#endif
using labels_of = std::vector<cpx::index_t> const&;
cpx::attention_heads const heads;
auto const silu = cpx::activation::silu;

// expect: causal_conv1d of tensors that are not sharded as the plan
void convolution(cpx::halo_plan<zigzag> const& plan, view<other> x, list w, cpx::threads& comm) {
    cpx::causal_conv1d(plan, x, w, w, silu, x, comm);
}

// expect: causal_conv1d of tensors that are not sharded as the plan
void packed_convolution(cpx::halo_plan<packed> const& plan, view<of_sequences> x, list w, cpx::threads& comm) {
    cpx::causal_conv1d(plan, x, w, {}, silu, x, comm);
}

// expect: causal_conv1d wants a halo_plan, a tensor x, weight and bias of its elements
void plan_convolution(brings const& plan, view<zigzag> x, list w, cpx::threads& comm) {
    cpx::causal_conv1d(plan, x, w, {}, silu, x, comm);
}

// expect: causal_conv1d wants a halo_plan, a tensor x, weight and bias of its elements
void rows_convolution(cpx::halo_plan<zigzag> const& plan, held& x, list w, cpx::threads& comm) {
    cpx::causal_conv1d(plan, x, w, w, silu, x, comm);
}

// expect: causal_conv1d wants a halo_plan, a tensor x, weight and bias of its elements
void lone_convolution(cpx::halo_plan<packed> const& plan, view<packed> x, list w, group& comm) {
    cpx::causal_conv1d(plan, x, w, {}, silu, x, comm);
}

// expect: causal_conv1d and its backward want an activation
// expect: causal_conv1d and its backward want an activation
// expect: normalise.memory, norm, y. wants a memory, a head_norm
using of_words = cpx::tensor<double, sequential>;
#ifdef CPX_GOOD
void by_name(cpx::halo_plan<sequential> const& plan, of_words& x, std::vector<double> const& w, of_words& y,
             cpx::threads& comm) {
    cpx::causal_conv1d(plan, x, w, w, silu, y, comm);
    cpx::causal_conv1d_backward(plan, plan, x, w, w, silu, y, cpx::causal_conv1d_gradients{y}, comm);
    cpx::normalise(cpx::host_memory(), cpx::head_norm<double>{x.data(), {}, x.data(), 0, 0}, y.data());
}
#else
void by_name(cpx::halo_plan<sequential> const& plan, of_words& x, std::vector<double> const& w,
             cpx::sharded<double, sequential> y, cpx::threads& comm) {
    cpx::causal_conv1d(plan, x, w, w, cpx::silu, y, comm);
    cpx::causal_conv1d_backward(plan, plan, y, w, w, cpx::silu, x, cpx::causal_conv1d_gradients{x}, comm);
    cpx::normalise(cpx::host_memory(), x, y);
}
#endif

// expect: causal_conv1d_backward of tensors that are not sharded as the plans
void convolution_backward(cpx::halo_plan<zigzag> const& plan, view<zigzag> x, view<other> dy, list w,
                          cpx::threads& comm) {
    cpx::causal_conv1d_backward(plan, plan, x, w, w, silu, dy, cpx::causal_conv1d_gradients<float, zigzag>{x}, comm);
}

// expect: a struct of tensors of one sharding is given one of another
auto gradients(cpx::tensor<float, other>& dx, std::vector<float>& dw) {
    return cpx::causal_conv1d_gradients<float, zigzag>{dx, dw};
}

// expect: a struct of tensors is given one of other elements or memory, or one to write that is const
auto gradients_of_constants(written& dx, std::vector<float>& dw) { return cpx::causal_conv1d_gradients{dx, dw, dw}; }

// expect: gated_delta_rule wants a carry_plan, delta_rule_tensors, heads, options and a cpx::transport
void plan_recurrence(carries const& plan, cpx::tensor<float, zigzag>& x, cpx::threads& comm) {
    cpx::gated_delta_rule(plan, cpx::delta_rule_tensors<float, zigzag>{x, x, x, x, x, x}, {}, {}, comm);
}

// expect: gated_delta_rule of tensors that are not sharded as the plan
void recurrence(cpx::carry_plan<cpx::serial, other> const& plan, cpx::delta_rule_tensors<float, zigzag> const& t,
                cpx::threads& comm) {
    cpx::gated_delta_rule(plan, t, {}, {}, comm);
}

// expect: gated_delta_rule_backward of tensors or gradients that are not sharded as the plan
void recurrence_backward(cpx::carry_plan<cpx::scan, zigzag> const& plan,
                         cpx::delta_rule_tensors<float, zigzag> const& t,
                         cpx::delta_rule_gradient_tensors<float, other> const& to, cpx::threads& comm) {
    cpx::gated_delta_rule_backward(plan, t, to, {}, {}, comm);
}

// expect: recur of what is no model of cpx::recurrence, or has another number of inputs
void another_recurrence(cpx::carry_plan<cpx::scan, zigzag> const& plan, model const& r,
                        cpx::recurrence_tensors<float, zigzag, 4> const& t, cpx::threads& comm) {
    cpx::recur(plan, r, t, comm);
}

using two = std::array<cpx::sharded<double, other>, 2>;
using one = cpx::sharded<double, zigzag> const&;

// expect: a struct of tensors of one sharding is given one of another
auto inputs(two const& x, one o) { return cpx::recurrence_tensors{x, o}; }

// expect: a struct of tensors of one sharding is given one of another
auto input_gradients(one dout, two const& dx) { return cpx::recurrence_gradients{dout, dx}; }

// expect: a struct of tensors is given one of other elements or memory, .* or one that ends with the expression
// expect: a struct of tensors is given one of other elements or memory, .* or one that ends with the expression
using owned = std::array<cpx::tensor<double, zigzag>, 2>;
#ifdef CPX_GOOD
auto inputs_of_owners(owned const& x, one o) { return cpx::recurrence_tensors{x, o}; }
auto gradients_of_owners(one dout, cpx::sharded<double, zigzag> dx) {
    return cpx::recurrence_gradients{dout, std::array{dx, dx}};
}
#else
auto inputs_of_owners(owned& x, one o) { return cpx::recurrence_tensors{std::array(std::move(x)), o}; }
auto gradients_of_owners(one dout, owned& dx) { return cpx::recurrence_gradients{dout, owned(dx)}; }
#endif

// expect: a struct of tensors of one sharding is given one of another
cpx::delta_rule_tensors<float, zigzag> tensors(view<zigzag> x, view<other> k) { return {x, k, x, x, x, x}; }

// The odd one first, or the only other: it is said once, and by the call nothing.
// expect: a struct of tensors of one sharding is given one of another
void odd_tensors(cpx::carry_plan<cpx::scan, zigzag> const& plan, view<other> q, cpx::tensor<float, zigzag>& x,
                 cpx::threads& comm) {
    cpx::gated_delta_rule(plan, cpx::delta_rule_tensors{q, x, x, x, x, x}, {}, {}, comm);
}
// expect: a struct of tensors of one sharding is given one of another
void odd_gradients(cpx::carry_plan<cpx::scan, zigzag> const& plan, cpx::delta_rule_tensors<double, zigzag> const& t,
                   cpx::tensor<double, other> const& dout, cpx::tensor<double, zigzag>& dx, cpx::threads& comm) {
    cpx::gated_delta_rule_backward(plan, t, cpx::delta_rule_gradient_tensors{dout, dx, dx, dx, dx, dx}, {}, {}, comm);
}
// expect: a struct of tensors of one sharding is given one of another
// expect: a struct of tensors of one sharding is given one of another
void odd_queries(view<other> q, cpx::tensor<float, zigzag> const& dout, view<everywhere> k, view<everywhere> dk,
                 view<zigzag> dq, cpx::threads& comm) {
    cpx::attention_backward_queries(cpx::attention_queries{q, dout, dq, dq}, k, k, heads, 1, dq);
    cpx::attention_backward_keys(cpx::attention_queries{dout, q, dq, dq}, k, k, heads, 1, dk, dk, comm);
}
// expect: a struct of tensors of one sharding is given one of another
// expect: a struct of tensors of one sharding is given one of another
void odd_inputs(cpx::carry_plan<cpx::scan, zigzag> const& plan, cpx::head_decay_attention const& r,
                std::array<cpx::sharded<float, other>, 4> const& x, cpx::tensor<float, zigzag>& o,
                cpx::tensor<float, other> const& dout, cpx::threads& comm) {
    cpx::recur(plan, r, cpx::recurrence_tensors{x, o}, comm);
    cpx::recurrence_tensors<float, zigzag, 4> const t{{o, o, o, o}, o};
    cpx::recur_backward(plan, r, t, cpx::recurrence_gradients{dout, {o, o, o, o}}, comm);
}

using layer = cpx::gated_delta_net<cpx::scan, zigzag>;
using weights = cpx::gated_delta_net_weights<float>;

// expect: gated_delta_net on tensors that are not sharded as the layer
void net(layer const& l, weights const& w, view<other> x, cpx::threads& comm) { l(w, x, x, comm); }

#ifdef CPX_GOOD
using rule = float;
#else
using rule = double;
#endif
// expect: gated_delta_net whose rule has other elements than its weights
void net_of_rule(cpx::gated_delta_net<cpx::scan, zigzag, zigzag, rule> const& l, weights const& w,
                 cpx::tensor<float, zigzag>& x, cpx::threads& comm) {
    l(w, x, x, comm);
}
// expect: gated_delta_net_backward whose rule has other elements than its weights
void net_backward_of_rule(cpx::gated_delta_net<cpx::scan, zigzag, zigzag, rule> const& l, weights const& w,
                          view<zigzag> x,
                          cpx::gated_delta_net_saved<float, zigzag, zigzag, cpx::host_memory, rule>& saved,
                          cpx::gated_delta_net_gradients<float, zigzag> const& to, cpx::threads& comm) {
    cpx::gated_delta_net_backward(l, w, x, saved, x, to, comm);
}

// expect: gated_delta_net_backward of tensors or gradients that are not sharded as the layer
void net_backward(layer const& l, weights const& w, view<other> x, layer::saved_of<float>& saved,
                  cpx::gated_delta_net_gradients<float, zigzag> const& to, cpx::threads& comm) {
    cpx::gated_delta_net_backward(l, w, x, saved, x, to, comm);
}

// expect: gated_delta_net_relayout between shardings over different numbers of ranks
void decoding(zigzag const& from, cpx::sharding<more> const& to, cpx::gated_delta_net_config const& config) {
    cpx::gated_delta_net_relayout(cpx::carry<cpx::scan>(from, 0), cpx::carry<cpx::scan>(to, 0), config);
}

// expect: attention wants keys and values on every rank
void attention(view<zigzag> q, view<keys> k) { cpx::attention(q, k, k, heads, 1, q); }

// expect: attention of q and o, or of k and v, on two shardings
void attention_result(view<zigzag> q, view<everywhere> k, view<other> o) { cpx::attention(q, k, k, heads, 1, o); }

// expect: attention_cache of keys and values on two shardings, or of other elements
void append(cpx::attention_cache<float>& cache, view<zigzag> k, view<other> v) { cache.append(k, v); }

// expect: cached_attention wants q and o of the sharding that it was made of
void cached(cpx::attention_cache<float> const& cache, cpx::cached_attention<zigzag> const& attend, view<zigzag> q,
            view<other> o, cpx::threads& comm) {
    attend(cache, q, 1, o, comm);
}

using queries = cpx::attention_queries<float, zigzag>;

// expect: a struct of tensors of one sharding is given one of another
queries of_queries(view<zigzag> q, cpx::tensor<float, other> const& dout) { return {q, dout, q, q}; }

// expect: attention_delta of tensors on two shardings
void attention_delta(view<zigzag> o, view<other> dout) { cpx::attention_delta(o, dout, 1, o); }

// expect: the gradient of queries wants keys and values on every rank
void queries_keys(queries const& q, view<keys> k, view<zigzag> dq) {
    cpx::attention_backward_queries(q, k, k, heads, 1, dq);
}

// expect: attention_backward_queries of q and dq, or of k and v, on two shardings
void queries_result(queries const& q, view<everywhere> k, view<other> dq) {
    cpx::attention_backward_queries(q, k, k, heads, 1, dq);
}

// expect: the gradients of keys want every query
void keys_queries(cpx::attention_queries<float, keys> const& q, view<zigzag> k, cpx::threads& comm) {
    cpx::attention_backward_keys(q, k, k, heads, 1, k, k, comm);
}

// expect: attention_backward_keys of k, v, dk and dv on two shardings
void keys_result(cpx::attention_queries<float, everywhere> const& q, view<zigzag> k, view<other> dk,
                 cpx::threads& comm) {
    cpx::attention_backward_keys(q, k, k, heads, 1, dk, k, comm);
}

// expect: rotary of x and y on two shardings
void rotary(view<zigzag> x, view<other> y) { cpx::rotary(x, 8, {}, y); }

// expect: rotary_backward of dy and dx on two shardings
void rotary_backward(view<zigzag> dy, view<other> dx) { cpx::rotary_backward(dy, 8, {}, dx); }

// expect: next_token_labels of tensors that are not sharded as the plan
void labels(cpx::halo_plan<other> const& plan, numbers ids, cpx::threads& comm) {
    cpx::next_token_labels(plan, ids, ids, comm);
}

// expect: causal_conv1d_backward wants two halo_plans
void of_another_plan(brings const& plan, view<zigzag> x, list w, cpx::threads& comm) {
    cpx::causal_conv1d_backward(plan, plan, x, w, w, silu, x, cpx::causal_conv1d_gradients<float, zigzag>{x}, comm);
}

// expect: causal_conv1d wants a halo_plan, a tensor x, weight and bias of its elements
void of_other_weights(cpx::halo_plan<everywhere> const& plan, view<everywhere> x, taps& w, cpx::threads& comm) {
    cpx::causal_conv1d(plan, x, w, {}, silu, x, comm);
}

// expect: a struct of tensors lacks one
void no_gradients(cpx::carry_plan<cpx::scan, zigzag> const& plan, cpx::delta_rule_tensors<float, zigzag> const& t,
                  cpx::delta_rule_gradient_tensors<float, zigzag> const& to, cpx::threads& comm) {
#ifdef CPX_GOOD
    cpx::gated_delta_rule_backward(plan, t, to, {}, {}, comm);
#else
    cpx::gated_delta_rule_backward(plan, t, {}, {}, {}, comm);
#endif
}

// expect: gated_delta_rule_backward wants a carry_plan
void of_a_halo(carries const& plan, cpx::delta_rule_tensors<float, zigzag> const& t,
               cpx::delta_rule_gradient_tensors<float, zigzag> const& to, cpx::threads& comm) {
    cpx::gated_delta_rule_backward(plan, t, to, {}, {}, comm);
}

// expect: recur wants a carry_plan
// expect: recur_backward wants a carry_plan
void recurrence_of_a_halo(carries const& plan, cpx::head_decay_attention const& r,
                          cpx::recurrence_tensors<float, zigzag, 4> const& t,
                          cpx::recurrence_gradients<float, zigzag, 4> const& to, cpx::threads& comm) {
    cpx::recur(plan, r, t, comm);
    cpx::recur_backward(plan, r, t, to, comm);
}

// expect: shift_rows wants a halo_plan
void of_rows(cpx::halo_plan<zigzag> const& plan, held& x, view<zigzag> y, cpx::threads& comm) {
    cpx::shift_rows(plan, x, y, comm);
}

// expect: next_token_labels wants a halo_plan
void of_lists(cpx::halo_plan<zigzag> const& plan, labelled& ids, cpx::threads& comm) {
    cpx::next_token_labels(plan, ids, ids, comm);
}

// expect: shift_rows of tensors that are not sharded as the plan
void shifted(cpx::halo_plan<other> const& plan, view<zigzag> x, view<zigzag> y, cpx::threads& comm) {
    cpx::shift_rows(plan, x, y, comm);
}

// expect: mean_token_loss of logp and labels on two shardings
void loss(view<other> logp, numbers of, cpx::threads& comm) { cpx::mean_token_loss(logp, of, comm); }

// expect: mean_token_loss_backward of labels and dlogp on two shardings
void loss_backward(numbers of, view<other> dlogp) { cpx::mean_token_loss_backward({}, of, 1, dlogp); }

// expect: weight_sums of a tensor that is not sharded as these sums
void sums(cpx::weight_sums<zigzag, cpx::threads> const& of, view<other> x) { of.whole(x); }

// expect: cpx: rotary wants x of y's elements, and a y that is not const and has a name
void results(cpx::tensor<float, zigzag> const& x, cpx::tensor<float, zigzag>& y) {
#ifdef CPX_GOOD
    cpx::rotary(x, 8, {}, y);
#else
    static_cast<void>(y);
    cpx::rotary(x, 8, {}, x);
#endif
}

#ifdef CPX_GOOD
void weights_of_a_tensor(cpx::halo_plan<zigzag> const& plan, view<zigzag> x, cpx::tensor<float, everywhere> const& w,
                         cpx::threads& comm) {
    cpx::causal_conv1d(plan, x, w, w.elements(), silu, x, comm);
}
void weights_of_buffers(cpx::halo_plan<zigzag> const& plan, cpx::tensor<float, zigzag>& x,
                        cpx::row_buffer<float> const& w, cpx::row_buffer<float>& sums, cpx::threads& comm) {
    cpx::causal_conv1d(plan, x, w, w, silu, x, comm);
    cpx::causal_conv1d(plan, x, sums, sums, silu, x, comm);
    cpx::causal_conv1d_backward(plan, plan, x, w, w, silu, x, cpx::causal_conv1d_gradients{x, sums, sums}, comm);
}
void pairs(cpx::rows<float> x, std::vector<float> const& f, std::vector<int> const& axes, labels_of at) {
    cpx::rotary_pairs const of_each{f}, of_three(f, axes), by_rounding{f, {}, cpx::rounding::fp32_inside};
    cpx::rotary_pairs<double> const of_floats{{f.begin(), f.end()}, axes};
    cpx::rotary_pairs<float> const none, alike(none);
    cpx::rotary<float>(x, 8, cpx::rows(at, 4), {{1, 0.5f}}, x);
    cpx::rotary<float>(x, 8, {at.data(), 1, 4}, of_each, x);
    cpx::rotary_backward<float>(x, 8, at, {.rotary_dim = 8}, x);
    cpx::rotary<float>(x, 8, {f.data(), 1, 4}, {f.data(), 1, 4}, x);
    cpx::rotary<float>(x, 8, at, {}, x);
}
void made(cpx::attention_cache<float> const& cache, layer const& net, cpx::carry_plan<cpx::scan, zigzag> const& carry,
          cpx::gated_delta_net_config& config) {
    cpx::attention_cache const held(cache);
    cpx::gated_delta_net const copied(net), made(carry, config), by_name(carry, {.hidden = 8});
    cpx::mesh const of_eight({.world = 8}), alike(of_eight);
    static_cast<void>(held.length(0) + made.rank() + copied.rank() + by_name.rank() + alike.world());
}
void fields_left_out(held& x, cpx::delta_rule_saved<float>& saved, std::vector<float>& dbias, cpx::rows<float> state) {
    cpx::delta_rule_tensors{x, x, x, x, x, x, {}, {}, &saved};
    cpx::delta_rule_gradient_tensors{x, x, x, x, x, x, {}, state};
    cpx::causal_conv1d_gradients{x, {}, dbias};
    cpx::recurrence_gradients{x, {x, x}, {}, state};
    cpx::recurrence_tensors{{x, x}, x};
}
void rows_to_write(cpx::moe_weights<float> const& w, cpx::rows<float> x, cpx::rows<cpx::index_t> chosen) {
    cpx::moe_backward(w, cpx::moe(w, x, 2, x), x, x);
    cpx::moe(w, x, cpx::replay_experts<float>(x, x, chosen), cpx::expert_rows(chosen, 8), x);
}
void local(cpx::rows<float> x, cpx::rows<cpx::index_t> chosen, std::vector<float>& list, cpx::attended_queries<float> q,
           std::vector<cpx::index_t> const& tokens) {
    cpx::weigh_experts<float>(x, chosen, x);
    cpx::attend_head_delta<float>(x, x, list);
    cpx::attend_head_backward_query<float>(q, x, x, 1, x);
    cpx::attend_head_backward_key<float>(q, x, x, tokens, 1, x, x);
    cpx::convolve_segment_backward_sums<float>(x, x, x, nullptr, silu, x, x);
    cpx::convolve_segment_backward_input<float>(x, x, x, x);
    cpx::convolve_segment_backward_weight<float>(x, x, x, x, list.data());
}
void of_experts(cpx::rows<float> x, std::vector<cpx::index_t> const& list, std::vector<float> const& numbers,
                cpx::expert_rows const& at, cpx::expert_exchange<cpx::threads> const& over_ranks) {
    at.to_experts(cpx::rows<float const>(x), 4), over_ranks.to_experts<float>(x, 4);
    at.to_tokens(cpx::rows<float const>(x), x), over_ranks.to_tokens<float>(x, {x.data(), 1, 4});
    cpx::gather_rows(cpx::host_memory(), x, list, x),
        cpx::scatter_rows<float>(cpx::host_memory(), x, list, {x.data(), 1, 4});
    cpx::add_readers<float>(cpx::host_memory(), x, 2, 4, {x.data(), 1, 4});
    cpx::gated_delta_net_weights<float> const of_vectors{.A_log = {numbers, 1}};
}
#else
// What writes into its last argument returns nothing, refused or not; what is done with that is no second mistake.
// expect: linear<T>.x, weight, y. wants rows of T
// expect: weigh_experts<T>.logits, chosen, weights. wants rows of T
// expect: attend_head_delta<T>.o, dout, delta. wants rows of T
// expect: attend_head_backward_query<T>.from, k, v, scale, dq. wants attended_queries
// expect: attend_head_backward_key<T>.from, k, v, tokens, scale, dk, dv. wants attended_queries
// expect: convolve_segment_backward_sums<T>.history, x, weight, bias, activation, dy, dz. wants rows
// expect: convolve_segment_backward_input<T>.dz, future, weight, dx. wants rows
// expect: convolve_segment_backward_weight<T>.history, x, dz, dweight, dbias. wants rows
// expect: make_tensor<T>.sharding, rank, width. wants a sharding
void local(cpx::rows<float> x, std::vector<float>& dbias) {
    auto const y = cpx::linear<float>(x, x);
    cpx::weigh_experts<float>(x, x, x);
    cpx::attend_head_delta<float>(x, x);
    cpx::attend_head_backward_query<float>(x, x, x, 1, x);
    cpx::attend_head_backward_key<float>(x, x, x, 1, x, x);
    cpx::convolve_segment_backward_sums<float>(x, x, x, silu, x, x);
    cpx::convolve_segment_backward_input<float>(x, x, x);
    cpx::convolve_segment_backward_weight(x, x, x, x, dbias);
    cpx::rms_norm(cpx::make_tensor<float>(4u, 4), dbias, 1, x); // whose argument is refused, and no more said
}

using held_twice = cpx::tensor<float, zigzag>&;

// expect: rotary.x, head_dim, options, y. wants tensors x and y
// expect: rotary.x, head_dim, options, y. wants tensors x and y
// expect: rotary.x, head_dim, options, y. wants tensors x and y
void turns(held_twice x, labels_of positions) {
    cpx::rotary(x.data(), 8, {}, x.data());
    cpx::rotary(positions, x, 8, {}, x);
    cpx::rotary(x, 8, {});
}

// expect: attention.q, k, v, heads, scale, o. wants tensors
void attends(held_twice q, view<everywhere> k) { cpx::attention(q.data(), k, k, heads, 1, q); }

// expect: append.k, v. wants two tensors
// expect: append.k, v. wants two tensors
// expect: attend.cache, q, scale, o, comm. of a cached_attention wants an attention_cache
void over_caches(cpx::attention_cache<float>& cache, cpx::cached_attention<zigzag> const& attend, held_twice q) {
    cache.append(q.data(), q);
    cache.append(q, q, q, q);
    attend(cache, q, 1, q);
}

// expect: cached_attention.queries, comm. wants on what queries are sharded
// expect: attention_cache<T>.heads, sharding, comm. wants attention_heads
// expect: an attention_cache cannot tell its elements
// expect: a gated_delta_net_cache cannot tell its elements
// expect: attention_cache<T>.heads, sharding, comm. wants attention_heads
void caches(held_twice q, cpx::threads& comm) {
    cpx::cached_attention of_a_tensor(q, comm);
    cpx::attention_cache<float> cache(heads, q.sharding(), 0);
    cpx::attention_cache of_no_type(heads, q.sharding(), comm);
    cpx::gated_delta_net_cache states_of_no_type(cpx::gated_delta_net_config(), cpx::carry<cpx::scan>(q.sharding(), 0));
    cpx::attention_cache<double> of_nothing;
}

// expect: causal_conv1d wants a halo_plan, a tensor x, weight and bias of its elements
// expect: causal_conv1d wants a halo_plan, a tensor x, weight and bias of its elements
void convolves(cpx::halo_plan<sequential> const& plan, cpx::tensor<float, sequential>& x,
               std::vector<std::vector<float>> const& rows_of_taps, cpx::threads& comm) {
    cpx::causal_conv1d(plan, x, rows_of_taps, {}, silu, x, comm);
    cpx::causal_conv1d();
}

// expect: attention_delta.o, dout, dim, delta. wants tensors
void deltas(held_twice o) { cpx::attention_delta(o.data(), o, 1, o); }

// expect: attention_backward_queries.queries, k, v, heads, scale, dq. wants attention_queries
void turned_queries(view<zigzag> q, view<everywhere> k) { cpx::attention_backward_queries(q, k, k, heads, 1, q); }

// expect: attention_backward_keys.queries, k, v, heads, scale, dk, dv, comm. wants attention_queries
void without_ranks(cpx::attention_queries<float, everywhere> const& q, view<zigzag> k) {
    cpx::attention_backward_keys(q, k, k, heads, 1, k, k);
}

// expect: put_features.positions, kind, features, x. wants sharded_positions
// expect: add_features_backward.positions, kind, dx, dfeatures. wants sharded_positions
void features(cpx::sharded_positions<zigzag> const& positions, held_twice x) {
    cpx::put_features(positions, cpx::media_kind::image, x.data(), x);
    cpx::add_features_backward(positions, x, x);
}

// expect: mean_token_loss.logp, labels, comm. wants tensors of one sharding
// expect: mean_token_loss_backward.loss, labels, upstream, dlogp. wants what the forward returned
// expect: mean_token_loss_backward.loss, labels, upstream, dlogp. wants what the forward returned
// expect: mean_token_loss_backward.loss, labels, upstream, dlogp. wants what the forward returned
// expect: balance_loss_backward.loss, of, sharding, dloss, dlogits. wants the expert_choices
// expect: balance_loss_backward.loss, of, sharding, dloss, dlogits. wants the expert_choices
void losses(held_twice logp, labels_of labels, cpx::threads& comm) {
    auto const loss = cpx::mean_token_loss(logp, labels, comm);
    cpx::mean_token_loss_backward(loss, labels, 1, logp);
    cpx::mean_token_loss_backward({}, logp, logp);
    cpx::mean_token_loss_backward(labels, {}, 1, logp);
    cpx::balance_loss_backward(cpx::expert_choices<float>(), cpx::balance_loss<float>(), logp.sharding(), 1, logp);
    cpx::balance_loss_backward({}, {}, logp.sharding(), 1, logp);
}

// expect: mrope_positions.media, ids, tokens, comm. wants cpx::media
// expect: mrope_positions.media, ids, tokens, comm. wants cpx::media
// expect: mrope_positions.media, ids, tokens, comm. wants, behind the ids, what tokens
// expect: mrope_positions.media, ids, tokens, comm. wants cpx::media
void places(cpx::media const& m, std::vector<int> const& ids, held_twice x, cpx::threads& comm) {
    cpx::mrope_positions(m, ids, {.image = 100}, comm);
    cpx::mrope_positions(m, x, cpx::media_tokens{}, comm);
    cpx::mrope_positions(m, x, comm);
    cpx::mrope_positions(x.sharding().batch(), m, ids, {.image = 100});
}

// expect: weight_sums take tensors
// expect: weight_sums take tensors
void shares(cpx::weight_sums<zigzag, cpx::threads> const& of, held_twice x, cpx::threads& comm) {
    of.whole(x.data());
    of.whole(x, comm);
}

// expect: a gated_delta_net takes its weights, tensors x and y and a cpx::transport
void layers(layer const& l, weights const& w, held_twice x, cpx::threads& comm) { l(w, x.data(), x, comm); }

// expect: gated_delta_net wants carry<How>.sharding, rank. and a config
// expect: gated_delta_net wants carry<How>.sharding, rank. and a config
// expect: gated_delta_net wants carry<How>.sharding, rank. and a config
layer of_nothing;
layer const of_a_batch(cpx::thd(), 0);
cpx::gated_delta_net const of_no_carry(zigzag(cpx::thd(), cpx::zigzag<4>{}), 0, cpx::gated_delta_net_config{});

// expect: weight_sums.sharding, order, comm. wants the rows' sharding
// expect: weight_sums::experts.at, x, dy, dweight, all. wants expert_rows or an expert_exchange
void adds(held_twice x, cpx::expert_rows const& at, cpx::rows<float> dw, cpx::threads& comm) {
    cpx::weight_sums of(x.sharding(), 0, cpx::sum_order::by_row);
    cpx::weight_sums(x.sharding(), cpx::sum_order::by_row, comm).experts(at, x, x, dw, comm);
}

// expect: expert_exchange.chosen, experts, places, comm. wants rows of index_t
// expect: expert_rows.chosen, experts. wants rows of index_t
void own_experts(cpx::expert_choices<float> const& of, labels_of places, cpx::threads& comm) {
    cpx::expert_exchange over_ranks(of.chosen, 8, places, comm);
    cpx::expert_rows here(of.chosen, 8);
}

// expect: moe.weights, x, choices, y., or moe.weights, x, expert_choices, experts, y., wants moe_weights
// expect: moe_backward.weights, saved, dy, dx, dlogits. wants moe_weights, what moe returned
// expect: choose_experts<T>.gate, x, choices. wants rows of T
// expect: replay_experts<T>.gate, x, chosen. wants rows of T
void mixes(cpx::moe_weights<float> const& w, cpx::moe_saved<float> const& saved, held_twice x) {
    cpx::moe(w, x, 2, x);
    cpx::moe_backward(w, saved, x, x);
    cpx::choose_experts(w.gate, x, 2);
    cpx::replay_experts<float>(w.gate, x.data(), x);
}

// expect: expert_rows::to_experts.x, width. wants rows of T const
// expect: expert_rows::to_tokens<T>.x, y. wants rows of T
// expect: expert_exchange::to_experts.x, width. wants rows of T const
// expect: expert_exchange::to_tokens<T>.x, y. wants rows of T
// expect: expert_exchange::of_rows.at, comm. wants expert_rows
// expect: weight_sums::experts.at, x, dy, dweight, all. wants expert_rows or an expert_exchange
// expect: add_terms.sums, terms, to. wants weight_sums, a tensor that is sharded as these
// expect: gather_rows.memory, from, list, to. wants rows
// expect: scatter_rows.memory, from, list, to. wants rows
// expect: add_readers.memory, terms, group, width, sum. wants rows
void of_no_experts(held_twice x, cpx::row_buffer<float>& buffer, cpx::rows<float> w, labels_of numbers,
                   cpx::rows<cpx::index_t const> chosen, cpx::expert_rows const& at,
                   cpx::expert_exchange<cpx::threads> const& over_ranks, cpx::moe_weights<float> const& of,
                   cpx::weight_sums<sequential, cpx::threads> const& sums, cpx::threads& comm) {
    auto const input = at.to_experts<float>(x, 4);
    at.to_tokens<float>(buffer, buffer);
    over_ranks.to_experts(buffer, 4);
    over_ranks.to_tokens(w, x);
    cpx::expert_exchange<cpx::threads>::of_rows(chosen, comm);
    sums.experts(chosen, w, w, w, comm);
    cpx::add_terms(sums, x, w);
    cpx::moe(of, w, cpx::expert_choices<float>(), chosen, w); // its sentence is said once, of `mixes`
    cpx::gather_rows(cpx::host_memory(), x, numbers, buffer);
    cpx::scatter_rows(cpx::host_memory(), w, numbers, x);
    cpx::add_readers(cpx::host_memory(), buffer, 2, 4, x);
}

// expect: a gated_delta_net_relayout takes the gated_delta_net_states of a layer
// expect: threads::group.ranks, deadline. wants a number of ranks
void hands_over(cpx::gated_delta_net_relayout<zigzag, everywhere> const& r, held_twice x, cpx::threads& comm) {
    r(x, x, comm);
    cpx::threads::group of_a_sharding(x.sharding());
}

// Fields that are no tensors.
// expect: a field is given other elements, to write what is const, or no view
// expect: a field is given other elements, to write what is const, or no view
// expect: a field wants one of the names of its type, such as sum_order::by_row
// expect: a struct is given more fields than it has
void lists(held_twice x, std::vector<double>& doubles, std::vector<float>& w, std::vector<float> const& written_never) {
    auto const of_doubles = cpx::causal_conv1d_gradients{x, doubles, w};
    auto const of_constants = cpx::causal_conv1d_gradients{x, w, written_never};
    auto const of_numbers = cpx::causal_conv1d_gradients{x, w, w, 1};
    auto const of_more = cpx::causal_conv1d_gradients{x, w, w, cpx::sum_order::by_row, w};
}

// expect: a field is given other elements, to write what is const, or no view
// expect: a field is given other elements, to write what is const, or no view
// expect: a field wants the address of an object of the tensors' elements and memory: &saved
// expect: a struct is given more fields than it has
void states(held_twice x, std::vector<float>& list, cpx::rows<float const> read, cpx::delta_rule_saved<float>& saved) {
    auto const of_a_list = cpx::delta_rule_tensors{x, x, x, x, x, x, list};
    auto const of_constants = cpx::recurrence_tensors{{x, x}, x, {}, read};
    auto const of_a_value = cpx::recurrence_tensors{{x, x}, x, {}, {}, saved};
    auto const of_more = cpx::delta_rule_gradient_tensors{x, x, x, x, x, x, {}, {}, saved};
}

// What could deduce nothing is refused once a unit, with the calls that it goes to.
// expect: a struct of tensors cannot tell its type
void nothing(cpx::halo_plan<zigzag> const& plan, held_twice x, list w, cpx::threads& comm) {
    cpx::causal_conv1d_backward(plan, plan, x, w, w, silu, x, cpx::causal_conv1d_gradients{}, comm);
}
void of_lists_alone(std::vector<float>& x, cpx::rows<float> state, cpx::delta_rule_saved<float>& saved) {
    cpx::causal_conv1d_gradients of_rows{x, x, x};
    cpx::delta_rule_tensors of_states{x, x, x, x, x, x, state, state, &saved};
}
void by_name(held_twice x, cpx::tensor<float, sequential>& other) {
    cpx::recurrence_gradients of_two{x, {x, other}};
    cpx::delta_rule_tensors of_names{.q = x, .k = x, .v = x, .g = x, .beta = x, .o = x}; // good, not to clang++
    cpx::recurrence_tensors of_inputs{.x = {x, x}, .o = x};
    cpx::causal_conv1d_gradients of_one{.dx = x};
}

void swapped(cpx::carry_plan<cpx::scan, zigzag> const& plan, cpx::head_decay_attention const& r, held_twice x,
             cpx::recurrence_tensors<float, zigzag, 4> const& t, cpx::threads& comm) {
    cpx::recur_backward(plan, r, t, cpx::recurrence_gradients{{x, x, x, x}, x}, comm);
    cpx::recur(plan, r, cpx::recurrence_tensors{x, {x, x, x, x}}, comm);
    cpx::gated_delta_rule(plan, cpx::delta_rule_tensors{x.data(), x, x, x, x, x}, {}, {}, comm);
}

// Of two mistakes in a call the first is said.
// expect: causal_conv1d of tensors that are not sharded as the plan
// expect: causal_conv1d_backward of tensors that are not sharded as the plans
// expect: shift_rows of tensors that are not sharded as the plan
// expect: next_token_labels of tensors that are not sharded as the plan
// expect: mean_token_loss of logp and labels on two shardings
// expect: mean_token_loss_backward of labels and dlogp on two shardings
// expect: rotary of x and y on two shardings
// expect: attention wants keys and values on every rank
// expect: attention_delta of tensors on two shardings
// expect: gated_delta_net on tensors that are not sharded as the layer
// expect: recur of tensors that are not sharded as the plan
// expect: gated_delta_rule_backward of tensors or gradients that are not sharded as the plan
// expect: a field is given other elements, to write what is const, or no view
void two_mistakes(cpx::halo_plan<zigzag> const& halo, cpx::carry_plan<cpx::scan, zigzag> const& carry, held_twice x,
                  cpx::tensor<double, sequential>& s, cpx::tensor<double, sequential> const& written_never,
                  layer const& net, weights const& of, list w, cpx::threads& comm) {
    cpx::causal_conv1d(halo, s, w, {}, silu, cpx::make_tensor<float>(s.sharding(), 0, 1), comm);
    cpx::causal_conv1d_backward(halo, halo, x, w, w, silu, s, cpx::causal_conv1d_gradients<float, zigzag>{x}, comm);
    cpx::shift_rows(halo, x, s, comm);
    cpx::next_token_labels(halo, x, s, comm);
    cpx::mean_token_loss(x, s, comm);
    cpx::mean_token_loss_backward({}, s, 1, x);
    cpx::rotary(x, 8, {}, s);
    cpx::attention(x, s, s, heads, 1, written_never);
    cpx::attention_delta(x, s, 1, written_never);
    net(of, s, written_never, comm);
    cpx::recur(carry, cpx::kimi_delta_attention(), cpx::recurrence_tensors<double, sequential, 4>{{s, s, s, s}, s},
               comm);
    cpx::gated_delta_rule_backward(carry, cpx::delta_rule_tensors<float, zigzag>{x, x, x, x, x, x},
                                   cpx::delta_rule_gradient_tensors{s, s, s, s, s, s}, {}, {}, comm);
    std::vector<short> const numbers;
    cpx::causal_conv1d(halo, x, w, {}, silu, x, comm, {numbers, numbers});
}

// Functions of one rank's rows.
// expect: linear<T>.x, weight, y. wants rows of T, not const where they are written
// expect: linear<T>.x, weight, y. wants rows of T, not const where they are written
// expect: rms_norm<T>.x, weight, eps, gain_offset, y. wants rows and spans of T
// expect: log_probabilities<T>.logits, labels, out. wants rows of T, labels of index_t
void of_one_rank(held_twice x, std::vector<int> const& labels, std::vector<float>& out) {
    cpx::linear<float>(x, x.data(), x.data());
    cpx::linear(x.data(), x.data(), x.data());
    cpx::rms_norm<float>(x.data(), x.data(), 1e-6f, 1, x.data());
    cpx::log_probabilities<float>(x.data(), labels, out);
}

// expect: rotary_frequencies<T>.options. wants the type of the numbers
// expect: rotary_frequencies<T>.options. wants the type of the numbers
// expect: rotary_table<T>.positions, axes, frequencies, cos, sin. wants rows or a span
// expect: attend_head<T>.q, positions, k, v, scale, o. wants rows of T
// expect: convolve_segment<T>.history, x, weight, bias, activation, y. wants rows of T
// expect: delta_rule_forward<T>.q, k, v, g, beta, first, options, state, o. wants rows of T
// expect: delta_rule_backward<T>.q, k, v, g, beta, first, options, state, dout, dstate, gradients. wants rows of T
void of_one_head(held_twice x, labels_of positions, std::vector<float>& out) {
    cpx::rotary_frequencies(64);
    cpx::rotary_frequencies({.rotary_dim = 8});
    cpx::rotary_table(out, 4);
    cpx::attend_head(x, positions, x, x, 1, x);
    cpx::convolve_segment(x.data(), x.data(), out, out, silu, x.data());
    cpx::delta_rule_options const options;
    cpx::delta_rule_forward<float>(x, x, x, x, x, 0, options, x, x);
    cpx::delta_rule_backward<float>(x, x, x, x, x, 0, options, x, x);
}

// expect: sigmoid, silu and softplus, and their backwards, are of one float or double
// expect: sigmoid, silu and softplus, and their backwards, are of one float or double
// expect: rotary_pairs<T>{frequencies, axes, how} wants a vector of T
// expect: rotary_pairs<T>{frequencies, axes, how} wants a vector of T
// expect: rotary<T>.x, head_dim, cos, sin, y., .... positions, pairs, y. and
// expect: rotary_backward<T>.dy, head_dim, cos, sin, dx., .... positions, pairs, dx. and
void of_lists(cpx::rows<float> x, std::vector<float>& gate, std::vector<double> const& frequencies) {
    auto const opened = cpx::silu(gate);
    cpx::softplus_backward(x, x);
    cpx::rotary_pairs const of_numbers(1, 2, 3);
    cpx::rotary_pairs<float> const of_doubles{frequencies};
    cpx::rotary<float>(x, 8, {0, 1}, {}, x);
    cpx::rotary_backward<float>(x, 8, {0, 1}, {}, gate);
}

// Options whose names are in braces.
// expect: rotary.x, head_dim, options, y. wants tensors x and y
// expect: rotary_backward.dy, head_dim, options, dx. wants tensors dy and dx
// expect: rotary_backward<T>.dy, head_dim, cos, sin, dx.
// expect: attention.q, k, v, heads, scale, o. wants tensors
// expect: attention_backward_queries.queries, k, v, heads, scale, dq. wants attention_queries
// expect: attention_backward_keys.queries, k, v, heads, scale, dk, dv, comm. wants attention_queries
// expect: gated_delta_rule wants a carry_plan, delta_rule_tensors, heads, options and a cpx::transport
// expect: gated_delta_rule_backward wants a carry_plan
// expect: attention_cache<T>.heads, sharding, comm. wants attention_heads
// expect: gated_delta_net wants carry<How>.sharding, rank. and a config
// expect: make_movement<T>.from, to, width, capacity, comm. wants two shardings
void names(cpx::tensor<double, zigzag>& x, std::vector<double>& list,
           cpx::attention_queries<double, everywhere> const& queries, cpx::delta_rule_tensors<double, zigzag> const& t,
           cpx::carry_plan<cpx::scan, zigzag> const& carry, cpx::threads& comm) {
    cpx::rotary(list, 8, {.theta = 1e6}, x);
    cpx::rotary_backward(list, 8, {.rotary_dim = 8}, x);
    cpx::rotary_backward<double>(x.data(), 8, list, {.rotary_dim = 8}, list);
    cpx::attention(x, list, x, {.query_heads = 4}, 1, x);
    cpx::attention_backward_queries(queries, list, x, {.query_heads = 4}, 1, x);
    cpx::attention_backward_keys(queries, x, x, {.query_heads = 4}, 1, x, x);
    cpx::gated_delta_rule(carry, t, {.key_heads = 4}, {.qk_l2norm = true});
    cpx::gated_delta_rule_backward(carry, t, t, {.key_heads = 4}, {.qk_l2norm = true}, comm);
    cpx::attention_cache<cpx::index_t> const cache({.query_heads = 4}, x.sharding(), 0);
    cpx::gated_delta_net const net(x, 0, {.hidden = 8});
    cpx::make_movement<double>(list, list, 8, {.rows = 8}, comm);
}

// Names that are misspelt: to g++ alone a list for `any`.
// expect: attention.q, k, v, heads, scale, o. wants tensors
void misspelt(cpx::tensor<short, zigzag>& x, cpx::tensor<short, everywhere>& k) {
#ifdef __clang__
    cpx::attention(x, k, k, {}, 1);
#else
    cpx::attention(x, k, k, {.query_heads = 4, .kv_heads = 2}, 1, x);
#endif
}

// expect: local_rows.sharding, rank, sections, weight. wants a sharding
// expect: add_local_rows.sharding, rank, sections, local, weight. wants a sharding
// expect: sum_readers<T>.sharding, shared, readers, width, terms, sums, comm. wants rows
// expect: sequence_ends wants a sharding by tokens
// expect: gated_delta_net_relayout.from, to, config. wants two carry_plans
void of_heads(zigzag const& sharding, held_twice x, cpx::threads& comm) {
    cpx::local_rows(sharding, 0, sharding.sections(), x);
    cpx::add_local_rows(sharding, 0, sharding.sections(), x.data());
    cpx::sum_readers<float>(sharding, 1, 1, 4, x.data(), comm);
    cpx::sequence_ends(sharding.batch(), 4);
    cpx::gated_delta_net_relayout of_a_batch(cpx::thd(), sharding, cpx::gated_delta_net_config());
}

// expect: gated_delta_net_cache<T>.config, plan. wants a gated_delta_net_config
cpx::gated_delta_net_cache<float> const cache(zigzag(cpx::thd(), cpx::zigzag<4>{}), 0);

// expect: a struct of tensors of one sharding is given one of another
void structs(cpx::tensor<double, zigzag>& x, cpx::tensor<double, sequential>& k) {
    auto const mixed = cpx::delta_rule_tensors{x, k, x, x, x, x};
}

// expect: a struct of tensors lacks one, or is given what is none
auto lacks(view<zigzag> x) { return cpx::delta_rule_tensors<float, zigzag>{x, x.data(), x, x, x, x}; }

// Operators write to what they are given, and return nothing.
// expect: rotary.x, head_dim, options, y. wants tensors x and y
// expect: next_token_labels wants a halo_plan
void returns(cpx::halo_plan<packed> const& plan, cpx::tensor<double, packed>& x, numbers ids, cpx::threads& comm) {
    auto const turned = cpx::rotary(x, 8, {});
    cpx::rotary(turned, 8, {}, turned);
    auto const labels = cpx::next_token_labels(plan, ids, comm);
    cpx::mean_token_loss(labels, labels, comm);
}

// expect: a struct of tensors lacks one, or is given what is none
void incomplete(cpx::tensor<float, sequential>& x, cpx::tensor<double, sequential>& other) {
    auto const without_o = cpx::delta_rule_tensors{x, x, x, x, x};
    auto const of_two_types = cpx::recurrence_tensors{{x, other}, x}; // said above
}
#endif

// Rows that are sharded already, given where whole ones, or others, are wanted: trainers shard them a second time.
namespace sharded_twice {

using whole = cpx::replicated<4>;
using zigzag = cpx::sharding<cpx::zigzag<4>>;
using made = cpx::piecewise<cpx::by_item>;
using wanted = cpx::piecewise<cpx::by_placeholder>;

template <class T, class S>
using view = cpx::sharded<T, S> const&;

#ifdef CPX_GOOD
using given = whole;
using positioned = zigzag;
using from_tower = made;
using selected = wanted;
using ids = std::vector<int>;
#else
using given = zigzag;
using positioned = whole;
using from_tower = wanted; // rows that are at their placeholders already
using selected = made;
using ids = cpx::sharded<int const, zigzag>;

// An argument that has been refused is no second mistake, in whatever place a tensor stands.
// expect: make_tensor<T>.sharding, rank, width. wants a sharding
// expect: make_tensor<T>.sharding, rank, width. wants a sharding
// expect: make_tensor<T>.sharding, rank, width. wants a sharding
// expect: make_tensor<T>.sharding, rank, width. wants a sharding
// expect: make_tensor<T>.sharding, rank, width. wants a sharding
// expect: exchange.plan, x, comm. wants a relayout_plan, a tensor and a cpx::transport
void of_refused_tensors(held_twice x, cpx::halo_plan<zigzag> const& plan, list w, cpx::tensor<char, everywhere>& keys,
                        cpx::threads& comm) {
    cpx::rotary(x, 8, {}, cpx::make_tensor<float>(8ll, 4));
    cpx::attention(x, x, cpx::make_tensor<float>(8ul, 4), heads, 1, x);
    cpx::shift_rows(plan, x, cpx::make_tensor<float>(8l, 4), comm);
    cpx::causal_conv1d(plan, x, w, {}, silu, cpx::make_tensor<float>(8.0, 4), comm);
    auto taps_of_a_number = cpx::make_tensor<float>(8.0f, 4);
    cpx::causal_conv1d(plan, x, taps_of_a_number, taps_of_a_number, silu, x, comm);
    cpx::attention(cpx::exchange(keys, x, comm), x, x, heads, 1, x);
    cpx::tensor<char, zigzag> const brought = cpx::exchange(keys, x, comm); // said above
}

// expect: rotary<T>.x, head_dim, cos, sin, y.
// expect: rotary_backward<T>.dy, head_dim, cos, sin, dx.
void turns_rows(cpx::rows<float> x, cpx::rows<double> table) {
    cpx::rotary<float>(x, 8, x, x);
    cpx::rotary_backward<float>(x, 8, table, table, x);
}
#endif

// A shard of a shard.
// expect: exchange of a tensor that is not sharded as the plan's source
void rows(cpx::relayout_plan<whole, zigzag> const& shard, view<float, given> x, cpx::threads& comm) {
    cpx::exchange(shard, x, comm);
}

// Positions of the whole row for rows of a rank: Megatron's rotary module would slice them, or slice them again.
// expect: rotary by positions of another sharding than that of x and y
void rotary(cpx::sharded_positions<positioned> const& positions, view<float, zigzag> x) {
    cpx::rotary(positions, x, 8, {}, x);
}

// Features that were selected once.
// expect: exchange of a tensor that is not sharded as the plan's source
void features(cpx::relayout_plan<made, wanted> const& select, view<float, from_tower> x, cpx::threads& comm) {
    cpx::exchange(select, x, comm);
}

// Features as the tower has made them: "tokens 2174, features 6175".
// expect: put_features of rows that are not at their placeholders
// expect: add_features of rows that are not at their placeholders
void placeholders(cpx::sharded_positions<zigzag> const& positions, view<float, selected> features,
                  view<float, zigzag> x) {
    cpx::put_features(positions, cpx::media_kind::image, features, x);
    cpx::add_features(positions, cpx::media_kind::image, features, x);
}

// expect: put_features_backward of rows that are not at their placeholders
// expect: add_features_backward of rows that are not at their placeholders
void gradients(cpx::sharded_positions<zigzag> const& positions, view<float, selected> features, view<float, zigzag> x) {
    cpx::put_features_backward(positions, cpx::media_kind::image, x, features);
    cpx::add_features_backward(positions, cpx::media_kind::image, x, features);
}

// Positions of a whole batch for the ids of a rank.
// expect: mrope_positions of a whole batch from ids that are sharded
void positions(cpx::media const& m, cpx::thd const& batch, ids const& some) {
    cpx::mrope_positions(m, batch, some, cpx::media_tokens{});
}

} // namespace sharded_twice

// Numbers that are to be rounded are no whole ones.
namespace whole {

#ifdef CPX_GOOD
using number = float;
using output = zigzag;
#else
using number = cpx::index_t;
using output = sequential;
#endif

template <class S>
using view = cpx::sharded<number, S> const&;

// expect: rotary of whole numbers
// expect: rotary_backward of whole numbers
// expect: rotary of whole numbers
void turned(view<zigzag> x, cpx::sharded_positions<zigzag> const& positions, cpx::rotary_pairs<number> const& pairs) {
    cpx::rotary(x, 8, cpx::rotary_options{}, x);
    cpx::rotary_backward(x, 8, cpx::rotary_options{}, x);
    cpx::rotary(positions, x, 8, pairs, x);
}

// expect: attention.q, k, v, heads, scale, o. wants tensors .* of floating-point elements
// expect: attention_cache of whole numbers
void attended(view<zigzag> x, view<everywhere> k, cpx::threads& comm) {
    cpx::attention(x, k, k, heads, 1, x);
    cpx::attention_cache<number> const cache(heads, k.sharding(), comm);
}

// expect: causal_conv1d of whole numbers
void convolved(cpx::halo_plan<zigzag> const& plan, view<zigzag> x, cpx::rows<number const> w, cpx::threads& comm) {
    cpx::causal_conv1d(plan, x, w, {}, silu, x, comm);
}

// expect: gated_delta_rule of elements that it does not have
void ruled(cpx::carry_plan<cpx::scan, zigzag> const& plan, cpx::delta_rule_tensors<number, zigzag> const& t,
           cpx::threads& comm) {
    cpx::gated_delta_rule(plan, t, {}, {}, comm);
}

// expect: a struct of tensors of one sharding is given one of another
// expect: a struct of tensors of one sharding is given one of another
void carried(cpx::carry_plan<cpx::scan, zigzag> const& plan, cpx::head_decay_attention const& r,
             cpx::sharded<float, zigzag> x, cpx::sharded<float, output> y,
             cpx::recurrence_tensors<float, zigzag, 4> const& t, cpx::threads& comm) {
    cpx::recur(plan, r, cpx::recurrence_tensors{{x, x, x, x}, y}, comm);
    cpx::recur_backward(plan, r, t, cpx::recurrence_gradients{y, {x, x, x, x}}, comm);
}

} // namespace whole
