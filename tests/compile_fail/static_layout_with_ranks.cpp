// expect: (no matching function|no matching constructor|constraints not satisfied)
// A layout whose ranks are in its type takes no other number.
#include <cpx/layout/zigzag.hpp>

#ifdef CPX_GOOD
cpx::zigzag<> const layout(4);
#else
cpx::zigzag<2> const layout(4);
#endif
