// expect: relayout between shardings over different numbers of ranks
#include <cpx/cpx.hpp>

#ifdef CPX_GOOD
using other = cpx::sequential<4>;
#else
using other = cpx::sequential<8>;
#endif

auto make(cpx::thd const& batch) {
    return cpx::relayout(cpx::shard(batch, cpx::zigzag<4>{}), cpx::shard(batch, other{}), 0);
}
