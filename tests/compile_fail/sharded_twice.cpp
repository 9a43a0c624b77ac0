// Rows that are sharded already, given where whole ones, or others, are wanted: trainers shard them a second time.
#include <cpx/cpx.hpp>
#include <cpx/ops.hpp>

using whole = cpx::replicated<4>;
using zigzag = cpx::sharding<cpx::zigzag<4>>;
using made = cpx::piecewise<cpx::by_item>;
using wanted = cpx::piecewise<cpx::by_placeholder>;

template <class T, class S>
using view = cpx::sharded<T, S> const&;

#ifdef CPX_GOOD
using given = whole;
using positioned = zigzag;
using from_tower = made;
using selected = wanted;
using ids = std::vector<int>;
#else
using given = zigzag;
using positioned = whole;
using from_tower = wanted; // rows that are at their placeholders already
using selected = made;
using ids = cpx::sharded<int const, zigzag>;
#endif

// A shard of a shard.
// expect: exchange of a tensor that is not sharded as the plan's source
void rows(cpx::relayout_plan<whole, zigzag> const& shard, view<float, given> x, cpx::threads& comm) {
    cpx::exchange(shard, x, comm);
}

// Positions of the whole row for rows of a rank: Megatron's rotary module would slice them, or slice them again.
// expect: rotary by positions of another sharding than that of x and y
void rotary(cpx::sharded_positions<positioned> const& positions, view<float, zigzag> x) {
    cpx::rotary(positions, x, 8, {}, x);
}

// Features that were selected once.
// expect: exchange of a tensor that is not sharded as the plan's source
void features(cpx::relayout_plan<made, wanted> const& select, view<float, from_tower> x, cpx::threads& comm) {
    cpx::exchange(select, x, comm);
}

// Features as the tower has made them: "tokens 2174, features 6175".
// expect: put_features of rows that are not at their placeholders
// expect: add_features of rows that are not at their placeholders
void placeholders(cpx::sharded_positions<zigzag> const& positions, view<float, selected> features,
                  view<float, zigzag> x) {
    cpx::put_features(positions, cpx::media_kind::image, features, x);
    cpx::add_features(positions, cpx::media_kind::image, features, x);
}

// expect: put_features_backward of rows that are not at their placeholders
// expect: add_features_backward of rows that are not at their placeholders
void gradients(cpx::sharded_positions<zigzag> const& positions, view<float, selected> features, view<float, zigzag> x) {
    cpx::put_features_backward(positions, cpx::media_kind::image, x, features);
    cpx::add_features_backward(positions, cpx::media_kind::image, x, features);
}

// Positions of a whole batch for the ids of a rank.
// expect: mrope_positions of a whole batch from ids that are sharded
void positions(cpx::media const& m, cpx::thd const& batch, ids const& some) {
    cpx::mrope_positions(m, batch, some, cpx::media_tokens{});
}
