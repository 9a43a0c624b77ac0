// expect: (could not convert|no viable conversion)
#include <cpx/ops/gated_delta_rule.hpp>

#include <cpx/layout/sequential.hpp>
#include <cpx/layout/zigzag.hpp>

using sequential = cpx::sharding<cpx::sequential<4>>;
#ifdef CPX_GOOD
using of_keys = sequential;
#else
using of_keys = cpx::sharding<cpx::zigzag<4>>;
#endif

cpx::delta_rule_tensors<float, sequential> tensors(cpx::sharded<float, sequential> const& x,
                                                   cpx::sharded<float, of_keys> const& k) {
    return {x, k, x, x, x, x};
}
