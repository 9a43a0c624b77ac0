// expect: attention wants keys and values on every rank
#include <cpx/ops/attention.hpp>

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/zigzag.hpp>

using queries = cpx::sharding<cpx::zigzag<4>>;
#ifdef CPX_GOOD
using keys = cpx::replicated<4>;
#else
using keys = queries; // every rank would take its own keys for all keys of the sequence
#endif

void run(cpx::sharded<float, queries> const& q, cpx::sharded<float, keys> const& k) {
    cpx::attention(0, q, k, k, cpx::attention_heads{}, 1., q);
}
