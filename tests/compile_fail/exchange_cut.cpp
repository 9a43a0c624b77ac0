// expect: exchange of a tensor that is not sharded as the plan's source
// The cut is part of the type, too.
#include <cpx/cpx.hpp>

using aligned = cpx::sharding<cpx::zigzag<4>, cpx::scope::sequence, cpx::aligned<64>>;
#ifdef CPX_GOOD
using given = aligned;
#else
using given = cpx::sharding<cpx::zigzag<4>>;
#endif

void move(cpx::relayout_plan<aligned, cpx::head_sharded<4>> const& plan, cpx::sharded<float, given> from,
          cpx::sharded<float, cpx::head_sharded<4>> to, cpx::threads& comm) {
    cpx::exchange(plan, from, to, comm);
}
