// Layouts, their sizes, and views of what is gone.
#include <cpx/cpx.hpp>

#include <vector>

// Sizes known at compile time. What is wanted instead is said.
// expect: a static size must be at least 1
// expect: a static size must be at least 1
// expect: a static size must be at least 1
// expect: striped needs at least 1 stripe a rank
#ifdef CPX_GOOD
cpx::extent<1> size;
cpx::zigzag<1> folded;
cpx::aligned<1> cut;
cpx::striped<4, 1> dealt;
#else
cpx::extent<0> size;
cpx::zigzag<-3> folded;
cpx::aligned<-2> cut;
cpx::striped<4, 0> dealt;
#endif

// A layout whose ranks are in its type takes no other number.
// expect 30: (no matching function for call to .cpx::zigzag|no matching constructor for)
#ifdef CPX_GOOD
cpx::zigzag<> const layout(4);
#else
cpx::zigzag<2> const layout(4);
#endif

// What is wanted is named: a layout, or a rule that chooses layouts.
// expect 30: no matching function for call to .shard
struct by_hand {
    int ranks() const { return 2; }
    int chunks() const { return 2; }
#ifdef CPX_GOOD
    int owner(int chunk) const { return chunk; }
#endif
};
void make(cpx::thd const& batch) { cpx::shard(batch, by_hand{}); }

// Routes are known at compile time, so their layouts must be.
// expect: routes between layouts over different numbers of ranks
// expect: routes between layouts that are known at run time only
#ifdef CPX_GOOD
constexpr auto moved = cpx::routes<cpx::zigzag<4>, cpx::sequential<4>>();
constexpr auto found = moved;
#else
constexpr auto moved = cpx::routes<cpx::zigzag<4>, cpx::sequential<2>>();
constexpr auto found = cpx::routes<cpx::zigzag<>, cpx::sequential<4>>();
#endif

// Memory that ends with the expression is not viewed.
// expect: deleted
// expect: deleted
// expect: deleted
// expect: deleted
std::vector<float> const values(4);
auto const sharding = cpx::shard(cpx::thd({0, 4}), cpx::zigzag<1>{});
auto tensor = cpx::make_tensor<float>(sharding, 0, 1);
#ifdef CPX_GOOD
cpx::rows<float const> const rows(values, 2);
cpx::rows const deduced(values, 2);
auto const view = tensor.view();
auto const data = tensor.data();
#else
cpx::rows<float const> const rows(std::vector<float>(4), 2);
cpx::rows const deduced(std::vector<float>(4), 2);
auto const view = cpx::make_tensor<float>(sharding, 0, 1).view();
auto const data = cpx::make_tensor<float>(sharding, 0, 1).data();
#endif
