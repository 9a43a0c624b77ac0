// expect: a static size must be at least 1
#include <cpx/layout/zigzag.hpp>

#ifdef CPX_GOOD
cpx::zigzag<1> layout;
#else
cpx::zigzag<0> layout;
#endif
