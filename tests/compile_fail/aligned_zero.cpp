// expect: a static size must be at least 1
#include <cpx/layout/cut.hpp>

#ifdef CPX_GOOD
cpx::aligned<1> cut;
#else
cpx::aligned<0> cut;
#endif
