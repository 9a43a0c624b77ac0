// expect: routes between layouts over different numbers of ranks
#include <cpx/cpx.hpp>

#ifdef CPX_GOOD
constexpr auto moved = cpx::routes<cpx::zigzag<4>, cpx::sequential<4>>();
#else
constexpr auto moved = cpx::routes<cpx::zigzag<4>, cpx::sequential<2>>();
#endif
