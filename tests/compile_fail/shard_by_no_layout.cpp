// expect: (layout_policy|constraints not satisfied for class template 'sharding')
// What is wanted is named: a layout, or a rule that chooses layouts.
#include <cpx/cpx.hpp>

struct by_hand {
    int ranks() const { return 2; }
    int chunks() const { return 2; }
#ifdef CPX_GOOD
    int owner(int chunk) const { return chunk; }
#endif
};

auto make(cpx::thd const& batch) { return cpx::shard(batch, by_hand{}); }
