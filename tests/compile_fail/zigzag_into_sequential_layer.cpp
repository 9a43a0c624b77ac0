// expect: gated_delta_net on tensors that are not sharded as the layer
#include <cpx/ops/gated_delta_net.hpp>

#include <cpx/layout/sequential.hpp>
#include <cpx/layout/zigzag.hpp>
#include <cpx/transport/threads.hpp>

using sequential = cpx::sharding<cpx::sequential<4>>;
#ifdef CPX_GOOD
using held = sequential;
#else
using held = cpx::sharding<cpx::zigzag<4>>; // relayout it first
#endif

void run(cpx::gated_delta_net<cpx::scan, sequential> const& layer, cpx::gated_delta_net_weights<float> const& weights,
         cpx::sharded<float, held> const& x, cpx::threads& comm) {
    layer(weights, x, x, comm);
}
