// expect: the gradients of keys want every query
#include <cpx/ops/attention_backward.hpp>

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/zigzag.hpp>
#include <cpx/transport/threads.hpp>

using keys = cpx::sharding<cpx::zigzag<4>>;
#ifdef CPX_GOOD
using queries = cpx::replicated<4>;
#else
using queries = keys; // every rank would take its own queries for all that read its keys
#endif

void run(cpx::attention_queries<float, queries> const& q, cpx::sharded<float, keys> const& k, cpx::threads& comm) {
    cpx::attention_backward_keys(q, k, k, cpx::attention_heads{}, 1., k, k, comm);
}
