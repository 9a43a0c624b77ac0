// expect: (no matching function|constraints not satisfied)
// Doubles do not become floats on their way.
#include <cpx/cpx.hpp>

#ifdef CPX_GOOD
using element = float;
#else
using element = double;
#endif

void move(cpx::plan const& plan, cpx::rows<element const> from, cpx::rows<float> to, cpx::threads& comm) {
    cpx::exchange(plan, from, to, comm);
}
