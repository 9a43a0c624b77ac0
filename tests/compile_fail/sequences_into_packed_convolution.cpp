// expect: causal_conv1d of tensors that are not sharded as the plan
#include <cpx/ops/causal_conv1d.hpp>

#include <cpx/layout/sequential.hpp>
#include <cpx/transport/threads.hpp>

// Miles' pull request 957 and Megatron's 3282: W equal chunks of every sequence, read as W equal chunks of the batch.
using packed = cpx::sharding<cpx::sequential<2>, cpx::scope::batch>;
#ifdef CPX_GOOD
using held = packed;
#else
using held = cpx::sharding<cpx::sequential<2>, cpx::scope::sequence>;
#endif

void run(cpx::halo_plan<packed> const& plan, cpx::sharded<float, held> const& x, cpx::rows<float const> weight,
         cpx::threads& comm) {
    cpx::causal_conv1d(plan, x, weight, {}, cpx::activation::silu, x, comm);
}
