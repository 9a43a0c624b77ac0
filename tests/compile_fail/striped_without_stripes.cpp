// expect: striped needs at least 1 stripe a rank
#include <cpx/layout/striped.hpp>

#ifdef CPX_GOOD
cpx::striped<4, 1> layout;
#else
cpx::striped<4, 0> layout;
#endif
