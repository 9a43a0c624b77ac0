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

// A layout whose ranks are in its type takes no other number, nor does a cut with its unit there.
// expect: cpx: a size that the type tells takes no other
// expect: cpx: a size that the type tells takes no other
// expect: cpx: zigzag wants the number of its ranks alone
// expect: cpx: zigzag wants the number of its ranks alone
// expect: cpx: sequential wants the number of its ranks alone
// expect: cpx: striped wants the number of its ranks alone
#ifdef CPX_GOOD
cpx::zigzag<> const layout(4);
cpx::aligned<cpx::dynamic> const unit(32);
#else
cpx::zigzag<2> const layout(4);
cpx::aligned<64> const unit(64);
cpx::zigzag<> const of_two(2, 3);
cpx::zigzag<4> const of_type_and_two(2, 3);
auto const of_rows = cpx::sequential<>(2, "rows");
cpx::striped<> const stripes(2, 8L, 4);
#endif

// What is wanted is named: a layout, or a rule that chooses layouts.
// expect: shard.batch, layout. wants a cpx::thd and a layout
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
constexpr auto of_values = cpx::routes(cpx::zigzag<4>{}, cpx::sequential<4>{});
static_assert(of_values == cpx::routes<cpx::zigzag<4>, cpx::sequential<4>>());

// Memory that ends with the expression is not viewed.
// expect: rows of a vector that ends with the expression
// expect: rows of a vector that ends with the expression
// expect: a view of a tensor that ends with the expression
// expect: a view of a tensor that ends with the expression
// expect: a row_buffer is viewed that ends with the expression
// expect: a row_buffer is viewed that ends with the expression
std::vector<float> const values(4);
std::vector<int> const numbers(4);
auto const sharding = cpx::shard(cpx::thd({0, 4}), cpx::zigzag<1>{});
auto tensor = cpx::make_tensor<float>(sharding, 0, 1);
#ifdef CPX_GOOD
cpx::rows<float const> const rows(values, 2);
cpx::rows const deduced(numbers, 2);
auto const view = tensor.view();
auto const data = tensor.data();
cpx::row_buffer<float> buffer(3, 4);
auto const of_buffer = buffer.view();
auto const elements_of_buffer = buffer.elements();
#else
cpx::rows<float const> const rows(std::vector<float>(4), 2);
cpx::rows const deduced(std::vector<int>(4), 2);
auto const view = cpx::make_tensor<float>(sharding, 0, 1).view();
auto const data = cpx::make_tensor<int>(sharding, 0, 1).data();
auto const of_buffer = cpx::row_buffer<float>(3, 4).view();
auto const elements_of_buffer = cpx::row_buffer<int>(3, 4).elements();
#endif

// What is no sharding is told how to become one, and what is no list of integers.
#ifndef CPX_GOOD
// Classes of something else, or of nothing.
// expect: tensor<T, S> is of elements and a sharding
// expect: tensor<T, S> is of elements and a sharding
// expect: sharded<T, S> is of elements and a sharding
// expect: sharding<P> is of a layout
// expect: a relayout_plan is what relayout.from, to, rank. returns
// expect: a halo_plan is what halo.sharding, rank, reach. returns
// expect: a carry_plan is what carry<scan>.sharding, rank., or carry<serial>, returns
// expect: a carry_plan is what carry<scan>.sharding, rank., or carry<serial>, returns
// expect: by_length{a, b, rule} wants two layouts
// expect: rows.list, width. wants a vector and the width of a row
// expect: rows of a vector that ends with the expression
cpx::tensor<float, cpx::zigzag<4>> const of_a_layout(sharding, 0, 4);
cpx::tensor<cpx::sharding<cpx::zigzag<4>>, float> const types_swapped(sharding, 0, 4);
cpx::sharded<double, cpx::zigzag<4>> const view_of_a_layout(tensor.data(), sharding, 0);
cpx::sharding<int> const by_integers(numbers);
cpx::relayout_plan const plan_by_hand(sharding, sharding, 0);
cpx::halo_plan const halo_by_hand(sharding, 0, 3);
cpx::carry_plan const carry_by_hand(sharding, 0);
cpx::carry_plan<cpx::sharding<cpx::zigzag<4>>, cpx::scan> kinds_swapped;
cpx::by_length no_rule;
cpx::rows no_rows;
cpx::rows<double> const others_that_end(std::vector<float>(4), 4);
// expect: shard.batch, layout. wants a cpx::thd and a layout
auto const no_batch = cpx::shard(std::vector<int>{0, 4}, cpx::zigzag<4>{});
// expect: make_tensor<T>.sharding, rank, width. wants a sharding
auto const no_sharding = cpx::make_tensor<float>(cpx::thd(), 0, 1);
// expect: a tensor is made of a sharding of its type
// expect: a tensor is made of a sharding of its type
void assigned(cpx::tensor<float, cpx::sharding<cpx::zigzag<4>>>& x,
              cpx::tensor<float, cpx::sharding<cpx::sequential<4>>> const& y) {
    x = y;
    x = {};
}
// expect: relayout.from, to, rank. wants two shardings
auto const plan = cpx::relayout(cpx::thd(), cpx::thd(), 0);
// expect: halo.sharding, rank, reach. wants a sharding
auto const halo = cpx::halo(cpx::thd(), 0, 3);
// expect: carry<scan>.sharding, rank., or carry<serial>, wants a sharding
auto const carry = cpx::carry(sharding, 0);
// expect: global_rows.sharding, rank. wants a sharding
// expect: global_rows.sharding, rank. wants a sharding
std::vector<cpx::index_t> const global_rows = cpx::global_rows(cpx::thd(), 0);
auto const rows_swapped = cpx::global_rows(0, sharding);
// expect: slots.sharding. wants a sharding
// expect: slots.sharding. wants a sharding
auto const slots = cpx::slots(cpx::thd());
auto const slots_of_rank = cpx::slots(sharding, 0);
// expect: shard takes the layout as an argument
auto const of_type = cpx::shard<cpx::zigzag<4>>(cpx::thd());
// expect: thd_from_positions.positions, pad. wants a vector, array or span of int32 or int64
auto const unpadded = cpx::thd_from_positions(numbers);
// expect: packing_from_mask.mask, columns, padding., or .mask, positions, columns., wants
auto const masked = cpx::packing_from_mask(std::vector<bool>(4), 4, cpx::padding::right);
// expect: thd wants a vector, array or span of integers
cpx::thd const offsets(std::vector<float>{0, 7});
// expect: thd wants a vector, array or span of integers
// expect: thd wants a vector, array or span of integers
cpx::thd const of_valid_halves(numbers, std::vector<double>{5});
cpx::thd const of_braces_and_halves({0, 7}, std::span<double>());
// expect: rows of a list of other elements
cpx::rows<double> const others(tensor.elements(), 1);
// expect: make_tensor<T>.sharding, rank, width. wants a sharding
auto const of_no_type = cpx::make_tensor(sharding, 0, 1);
// expect: replicated<W> wants a cpx::thd
cpx::replicated<4> const everywhere(4, cpx::thd());
// expect: replicated<W> wants a cpx::thd, and head_sharded<W> its sections
// expect: replicated<W> wants a cpx::thd, and head_sharded<W> its sections
cpx::replicated<2> of_nothing;
cpx::head_sharded<> heads_of_nothing;
// expect: replicated<W> wants a cpx::thd, and head_sharded<W> its sections
auto const of_no_heads = cpx::shard(cpx::thd({0, 4}), cpx::head_sharded<3>{}); // the first sentence stands above
cpx::sharded const rows_of_no_heads(tensor.data(), of_no_heads, 0);
// expect: shard.batch, layout. wants a cpx::thd and a layout
// expect: shard.batch, layout. wants a cpx::thd and a layout
// expect: shard.batch, layout. wants a cpx::thd and a layout
auto const of_a_number_of_ranks = cpx::shard<4>(cpx::thd(), cpx::zigzag<4>{});
auto const by_number = cpx::shard<cpx::scope::batch, cpx::zigzag<4>>(cpx::thd(), 4);
auto const shard_of_nothing = cpx::shard();
// expect: sharding.batch, layout. wants a cpx::thd and a layout: sharding.batch, zigzag<4>
// expect: sharding.batch, layout. wants a cpx::thd and a layout: sharding.batch, zigzag<4>
// expect: sharding.batch, layout. wants a cpx::thd and a layout: sharding.batch, zigzag<4>
cpx::sharding const swapped(cpx::zigzag<4>{}, cpx::thd());
cpx::sharding<cpx::zigzag<4>> const of_offsets(numbers);
cpx::sharding<cpx::zigzag<2>> unbound;
// expect: zigzag wants the number of its ranks alone.*shard.batch, zigzag<4>
// expect: striped wants the number of its ranks alone
cpx::zigzag<8> const of_a_batch(cpx::thd{});
cpx::striped<8> const of_offsets_alone(numbers);
// expect: make_tensor<T>.sharding, rank, width. wants a sharding
auto const tensor_of_nothing = cpx::make_tensor<float>();
// expect: a tensor is made of a sharding of its type
cpx::tensor<short, cpx::sharding<cpx::zigzag<4>>> empty;
// expect: sharded wants rows of its elements
cpx::sharded const of_list(values, sharding, 0);
// expect: sharded.rows, sharding, rank. wants all three
cpx::sharded const of_no_rank(tensor.data(), sharding);
// expect: sharded.rows, sharding, rank. wants all three.*of a tensor write x.view
// expect: sharded.rows, sharding, rank. wants all three
// expect: sharded.rows, sharding, rank. wants all three
cpx::sharded const of_a_tensor(tensor);
cpx::sharded<float, cpx::sharding<cpx::zigzag<1>>> const view_swapped(sharding, tensor.data(), 0);
cpx::sharded<short, cpx::sharding<cpx::zigzag<1>>> no_view;
// expect: rows.list, width. wants a vector and the width of a row
cpx::rows const of_no_width(values);
// expect: rows.list, width. wants a vector and the width of a row
cpx::rows<float const> const of_type_without_width(values);
// expect: rows.list, width. wants a vector and the width of a row
// expect: rows.list, width. wants a vector and the width of a row
cpx::rows<float> const of_a_pointer(tensor.elements().data(), 4);
cpx::rows<float> const of_the_tensor(tensor);
// expect: rows.list, width. wants a vector and the width of a row
// expect: rows.list, width. wants a vector and the width of a row
// expect: rows.list, width. wants a vector and the width of a row
cpx::rows const of_a_list_and_count(values, 4, 2);
cpx::rows<float const> const of_three(values, 4, 2);
cpx::rows const of_a_tensor_and_count(tensor, 4, 1);
// expect: sharded.rows, sharding, rank. wants all three
cpx::sharded const of_four(numbers, 2, sharding, 0);
// expect: rows.list, width. wants a vector and the width of a row
cpx::rows<int> const of_five_numbers(0, 1, 2, 3, 4);
// expect: rows of a pointer to other elements, or to const
// expect: rows of a pointer to other elements, or to const
cpx::rows<double> const of_other_elements(tensor.elements().data(), 1, 1);
cpx::rows<float> const of_constants(values.data(), 2, 2, 2);
// expect: thd wants a vector, array or span of integers
cpx::thd const of_a_number(20);
// expect: thd::uniform.count, length. wants two numbers
auto const uniform = cpx::thd::uniform(4);
// expect: pad_to_multiple.batch, multiple. wants a cpx::thd
auto const padded = cpx::pad_to_multiple(8, cpx::thd());
// expect: unpadded.padded. wants a cpx::thd with valid lengths
auto const without = cpx::unpadded(numbers);
// expect: pack.packing, buffer, packed. wants a packing and rows
void packs(cpx::packing const& p) { cpx::pack(p, tensor, tensor); }
// expect: guess_rows.rows, ranks, padded, valid. wants two numbers
auto const guessed = cpx::guess_rows(numbers, 4, 16);
// expect: mesh wants its sizes by name
// expect: mesh wants its sizes by name
cpx::mesh const of_sizes(8, 2), of_a_list({8, 2}); // once
cpx::mesh const of_one_size({8});
// expect: mesh wants its sizes by name
cpx::mesh const of_ranks_and_more({.world = 8}, 3);
// expect: packing.batch, starts, buffer_rows. wants a cpx::thd
cpx::packing const of_no_starts(cpx::thd({0, 4}));
// expect: routes wants two layouts
auto const from_alone = cpx::routes<cpx::zigzag<4>>();
// expect: a tensor is made of a sharding of its type
cpx::tensor<float, cpx::sharding<cpx::zigzag<4>>> const moved_elsewhere = cpx::make_tensor<float>(sharding, 0, 1);
// expect: table wants the number of ranks and the rank of every chunk
cpx::table const owners(std::vector<int>{0, 1});
// expect: table wants the number of ranks and the rank of every chunk
// expect: table wants the number of ranks and the rank of every chunk
cpx::table of_nobody;
cpx::table const of_owners_alone({0, 1, 1, 0});
// expect: piecewise.ranks, batch, pieces. wants the number of ranks
cpx::piecewise<int> const of_no_pieces{cpx::thd()};
// expect: segments.sharding, rank. wants a sharding
auto const segments = cpx::segments(cpx::thd(), 0);
// expect: positions wants segments
auto const positions = cpx::positions(sharding, 0);
// expect: traffic.from, to. wants two shardings
auto const traffic = cpx::traffic(sharding);
// expect: edges_of wants a plan of rows after segments
auto const edges = cpx::edges_of(sharding);
// expect: replicated<W> wants a cpx::thd, and head_sharded<W> its sections
cpx::head_sharded<6> const of_sections_first({{2, 4}}, cpx::thd());
// expect: by_length{a, b, rule} wants two layouts
cpx::by_length const rule_first{[](cpx::index_t) { return true; }, cpx::zigzag<4>{}, cpx::sequential<4>{}};
// expect: by_length{a, b, rule} wants two layouts
auto const cut_by_number = cpx::shard(cpx::thd({0, 4}), cpx::by_length(4));
// expect: media.images, videos, options. wants two vectors of media_grid
cpx::media const of_text("i4x4");
// expect: rotary_axes.section, order, pairs. wants mrope_section
auto const axes = cpx::rotary_axes(3, cpx::axis_order::interleaved);
// expect: a view of a tensor that ends with the expression
auto const columns = cpx::make_tensor<short>(sharding, 0, 1).columns(0, 1);
// expect: threads of one process are started together
cpx::threads alone(0, 4);
cpx::threads nobody; // said above, once a unit
// expect: routes between layouts that are known at run time only
auto const of_run_time = cpx::routes(cpx::striped<>(4), cpx::sequential<>(4));
// expect: a constant expression
constexpr cpx::zigzag<> of_none(0);
// expect: (use of deleted function|call to deleted constructor of) .cpx::threads
void copies() {
    cpx::threads::run(2, [](auto& comm) { auto const copy = comm; });
}
// expect: threads::run.ranks, program. wants a program that takes its rank
// expect: threads::run.ranks, program. wants a program that takes its rank
// expect: threads::run.ranks, program. wants a program that takes its rank
void run() {
    cpx::threads::run(4, [](int) {});
    cpx::threads::run(4L, [](cpx::threads) {}); // a copy, that would not know what its rank has agreed on
    cpx::threads::run();
}
// expect: lower_bound.from, to, width. wants two shardings
auto const no_bound = cpx::lower_bound(sharding, 4, sharding);
// expect: halo_lower_bound.sharding, reach, side. wants a sharding
auto const no_halo_bound = cpx::halo_lower_bound(3, sharding);
// expect: offsets.segments. wants segments
auto const no_offsets = cpx::offsets(sharding, 0);
// expect: features_by_item.media, kind, ranks. wants a cpx::media
auto const no_features = cpx::features_by_item(4, sharding);
// expect: thd wants whole numbers
cpx::thd const of_halves({0, 7.5, 20});
// expect: thd wants whole numbers
// expect: thd wants a vector, array or span of integers
auto const of_half_lengths = cpx::thd::from_lengths({7, 13.5f});
auto const of_lengths_alone = cpx::thd::from_lengths(7ll, 13, 20);
// expect: replicated<W> wants a cpx::thd, and head_sharded<W> its sections
// expect: replicated<W> wants a cpx::thd, and head_sharded<W> its sections
auto const of_everything = cpx::shard(cpx::thd({0, 4}), cpx::replicated<5>());
auto const of_sections = cpx::shard(cpx::thd({0, 4}), cpx::head_sharded<8>(std::vector<cpx::section>{{2, 4}}));
// expect: row_buffer<T>.count, width. wants two numbers
// expect: row_buffer<T>.count, width. wants two numbers
// expect: row_buffer<T>.count, width. wants two numbers
// expect: row_buffer<T>.count, width. wants two numbers
cpx::row_buffer<short> const buffer_of_text(2, "4");
cpx::row_buffer<int> const buffer_of_values(std::vector<int>{1, 2});
cpx::row_buffer<float> const buffer_of_no_width(4);
cpx::row_buffer<double> const buffer_of_two_widths(2, 4, 4, 4);
// expect: a row_buffer cannot tell its elements
cpx::row_buffer const buffer_of_no_type(3, 4);
// expect: columns.first, width. wants two numbers
// expect: columns.first, width. wants two numbers
// expect: view.., data.. and elements.. are of the whole tensor
// expect: view.., data.. and elements.. are of the whole tensor
// expect: view.., data.. and elements.. are of the whole tensor
// expect: a tensor is made of a sharding of its type
void members(cpx::tensor<unsigned, cpx::sharding<cpx::zigzag<4>>>& x) {
    auto const of_a_name = x.columns("q", 3);
    auto const of_a_width = x.columns(3);
    auto const of_a_shape = x.view(4, 2);
    x.data(4u).row(0)[0] = x.elements(4.0)[0];
    x.hold();
}
// expect: row_buffer::write wants a vector, array or span
void writes(cpx::row_buffer<float>& to, std::vector<double> const& values) { to.write(values); }
#endif
