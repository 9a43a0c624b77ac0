// expect: exchange into a tensor that is not sharded as the plan's target
// A rank's rows of every sequence do not fit where its rows of the whole batch are wanted (per-sequence rows fed to
// flash-linear-attention, which cuts the batch).
#include <cpx/cpx.hpp>

using zigzag = cpx::sharding<cpx::zigzag<2>>;
using sequential = cpx::sharding<cpx::sequential<2>, cpx::scope::batch>;
#ifdef CPX_GOOD
using given = sequential;
#else
using given = cpx::sharding<cpx::sequential<2>, cpx::scope::sequence>;
#endif

void move(cpx::relayout_plan<zigzag, sequential> const& plan, cpx::sharded<float, zigzag> from,
          cpx::sharded<float, given> to, cpx::threads& comm) {
    cpx::exchange(plan, from, to, comm);
}
