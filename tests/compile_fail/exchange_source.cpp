// expect: exchange of a tensor that is not sharded as the plan's source
// A tensor in another sharding than the plan's source does not compile.
#include <cpx/cpx.hpp>

using sequential = cpx::sharding<cpx::sequential<4>>;
using zigzag = cpx::sharding<cpx::zigzag<4>>;
#ifdef CPX_GOOD
using given = zigzag;
#else
using given = sequential;
#endif

void move(cpx::relayout_plan<zigzag, sequential> const& plan, cpx::sharded<float, given> from,
          cpx::sharded<float, sequential> to, cpx::threads& comm) {
    cpx::exchange(plan, from, to, comm);
}
