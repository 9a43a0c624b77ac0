// expect: (constraints not satisfied|static_layout)
// Routes are known at compile time, so their layouts must be.
#include <cpx/cpx.hpp>

#ifdef CPX_GOOD
constexpr auto moved = cpx::routes<cpx::zigzag<4>, cpx::sequential<4>>();
#else
constexpr auto moved = cpx::routes<cpx::zigzag<>, cpx::sequential<4>>();
#endif
