// expect: a static size must be at least 1
#include <cpx/core/extent.hpp>

#ifdef CPX_GOOD
cpx::extent<1> size;
#else
cpx::extent<0> size;
#endif
