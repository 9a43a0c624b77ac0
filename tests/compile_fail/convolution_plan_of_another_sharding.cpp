// expect: causal_conv1d of tensors that are not sharded as the plan
#include <cpx/ops/causal_conv1d.hpp>

#include <cpx/layout/sequential.hpp>
#include <cpx/layout/zigzag.hpp>
#include <cpx/transport/threads.hpp>

using zigzag = cpx::sharding<cpx::zigzag<4>>;
#ifdef CPX_GOOD
using planned = zigzag;
#else
using planned = cpx::sharding<cpx::zigzag<4>, cpx::scope::batch>; // the same layout, cut over the batch
#endif

void run(cpx::halo_plan<planned> const& plan, cpx::sharded<float, zigzag> const& x, cpx::rows<float const> weight,
         cpx::threads& comm) {
    cpx::causal_conv1d(plan, x, weight, {}, cpx::activation::silu, x, comm);
}
