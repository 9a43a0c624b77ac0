// Exchanges of what a plan does not move.
#include <cpx/cpx.hpp>
#include <cpx/testing/transport.hpp>

using zigzag = cpx::sharding<cpx::zigzag<4>>;
using aligned = cpx::sharding<cpx::zigzag<4>, cpx::scope::sequence, cpx::aligned<64>>;
using sequential = cpx::sharding<cpx::sequential<4>>;
using over_batch = cpx::sharding<cpx::sequential<4>, cpx::scope::batch>;
using by_heads = cpx::head_sharded<4>;

template <class From, class To>
using plan = cpx::relayout_plan<From, To> const&;
template <class S>
using view = cpx::sharded<float, S> const&;

#ifdef CPX_GOOD
using given = zigzag;
using uncut = aligned;
using of_sequences = over_batch;
using other = cpx::sequential<4>;
using element = float;
using moves = cpx::relayout_plan<zigzag, zigzag>;
using memory = cpx::rows<float> const;
using group = cpx::threads;
#else
using given = sequential;
using uncut = zigzag;            // the cut is part of the type, too
using of_sequences = sequential; // fed to flash-linear-attention, which cuts the batch
using other = cpx::sequential<8>;
using element = double; // does not become float on its way
using moves = cpx::halo_plan<zigzag>;
using memory = std::vector<float>;
struct group {
    int rank() const { return 0; }
    int ranks() const { return 4; }
};
#endif

// expect: exchange of a tensor that is not sharded as the plan's source
void views(plan<zigzag, sequential> p, view<given> x, view<sequential> y, cpx::threads& comm) {
    cpx::exchange(p, x, y, comm);
}

// expect: exchange of a tensor that is not sharded as the plan's source
void cuts(plan<aligned, by_heads> p, view<uncut> x, view<by_heads> y, cpx::threads& comm) {
    cpx::exchange(p, x, y, comm);
}

// expect: exchange into a tensor that is not sharded as the plan's target
void targets(plan<zigzag, over_batch> p, view<zigzag> x, view<of_sequences> y, cpx::threads& comm) {
    cpx::exchange(p, x, y, comm);
}

// As README says: the exchange's own result, given to the same plan once more.
// expect: exchange of a tensor that is not sharded as the plan's source
void readme(plan<zigzag, over_batch> p, cpx::tensor<float, zigzag> const& x) {
    cpx::threads::run(4, [&](cpx::threads& comm) {
        auto const y = cpx::exchange(p, x, comm);
#ifdef CPX_GOOD
        auto const z = cpx::exchange(p.transposed(), y, comm);
#else
        auto const z = cpx::exchange(p, y, comm);
#endif
        static_cast<void>(z.data());
    });
}

// expect: exchange into a tensor that is const or ends with the call
// expect: exchange into a tensor that is const or ends with the call
void results(plan<zigzag, sequential> p, view<zigzag> x, cpx::threads& comm) {
#ifdef CPX_GOOD
    cpx::tensor<float, sequential> y(p.to, 0, 1);
    cpx::exchange(p, x, y, comm);
#else
    cpx::tensor<float, sequential> const y(p.to, 0, 1);
    cpx::exchange(p, x, y, comm);
    cpx::exchange(p, x, cpx::make_tensor<float>(p.to, 0, 1), comm);
#endif
}

// expect: exchange between elements of two types
void elements(cpx::plan const& p, cpx::rows<element const> x, cpx::rows<float> y, cpx::threads& comm) {
    cpx::exchange(p, x, y, comm);
}

// expect: exchange.plan, x, comm. wants a relayout_plan, a tensor and a cpx::transport
void halos(moves const& p, view<zigzag> x, cpx::threads& comm) {
    auto const y = cpx::exchange(p, x, comm);
    static_cast<void>(y.data());
}

// expect: exchange.plan, x, comm. wants a relayout_plan, a tensor and a cpx::transport
void lone(plan<zigzag, sequential> p, view<zigzag> x, group& comm) { cpx::exchange(p, x, comm); }

// expect: exchange.plan, from, to, comm. wants a relayout_plan and two tensors
void vectors(plan<zigzag, sequential> p, memory& x, memory& y, cpx::threads& comm) { cpx::exchange(p, x, y, comm); }

// expect: exchange.plan, from, to, comm. wants a relayout_plan and two tensors
void lone_rows(cpx::plan const& p, cpx::rows<float> x, group& comm) { cpx::exchange(p, x, x, comm); }

// expect: relayout between shardings over different numbers of ranks
void ranks(cpx::thd const& batch) { cpx::relayout(cpx::shard(batch, cpx::zigzag<4>{}), cpx::shard(batch, other{}), 0); }

using stepwise = cpx::movement<float, cpx::relayout_plan<zigzag, sequential>, cpx::threads>;
using bringing = cpx::movement<float, cpx::halo_plan<zigzag>, cpx::threads>;

// expect: movement of a tensor that is not sharded as its source
void swapped(stepwise& move, cpx::tensor<float, given>& x, cpx::tensor<float, sequential>& y) { move(x, y); }

// A movement is made for a capacity in braces.
void made(cpx::halo_plan<zigzag> const& brings, cpx::carry_plan<cpx::scan, zigzag> const& carries, zigzag const& from,
          sequential const& to, cpx::threads& comm) {
    bringing of_names(brings, 4, {.rows = 4}, comm), of_numbers(brings, 4, {4, 1}, comm);
    cpx::make_movement<float>(brings, 4, {.rows = 4}, comm);
    cpx::make_movement<float>(carries, {1, 2}, {.rows = 4}, comm);
    cpx::make_movement<float>(from, to, 4, {.rows = 4}, comm);
}

// Rows that are not const, views and plain numbers fit a movement.
void plainly(stepwise& move, bringing& bring,
             cpx::movement<float, cpx::carry_plan<cpx::scan, zigzag>, cpx::threads>& carry, view<zigzag> x,
             view<sequential> y, cpx::rows<float> some) {
    move(x, y);
    bring.transposed(some, x);
    carry(0, cpx::side::before, some, some);
}

#ifndef CPX_GOOD
// expect: exchange.plan, x, comm. wants a relayout_plan, a tensor and a cpx::transport
void alone(plan<sequential, zigzag> p, view<sequential> x) { cpx::exchange(p, x); }

// expect: exchange.plan, x, comm. wants a relayout_plan, a tensor and a cpx::transport
// expect: exchange.plan, x, comm. wants a relayout_plan, a tensor and a cpx::transport
// expect: exchange.plan, x, comm. wants a relayout_plan, a tensor and a cpx::transport
void to_nothing(view<sequential> x, plan<sequential, zigzag> p, cpx::threads& comm) {
    auto const named = cpx::exchange(x, "zigzag", comm);
    auto const listed = cpx::exchange(x, {}, comm);
    cpx::exchange(p, x, x, comm, 5, 6);
}

// What threads that nobody has started say stands at those of layouts.cpp, and is all.
void of_no_ranks(plan<zigzag, sequential> p, cpx::tensor<char, zigzag>& x, cpx::tensor<char, sequential>& y) {
    auto const z = cpx::exchange(p, x, cpx::threads());
    cpx::exchange(p, x, y, cpx::threads(0, 4));
}

// expect: exchange.plan, x, comm. wants a relayout_plan, a tensor and a cpx::transport
// expect: exchange.plan, x, comm. wants a relayout_plan, a tensor and a cpx::transport
// expect: exchange.plan, from, to, comm. wants a relayout_plan and two tensors
// expect: exchange.plan, from, to, comm. wants a relayout_plan and two tensors
void in_another_order(view<sequential> x, plan<sequential, zigzag> p, view<zigzag> y, cpx::threads& comm) {
    cpx::exchange(x, p, comm);
    cpx::exchange(comm, p, x);
    cpx::exchange(x, y, p, comm);
    auto moves = [](auto&&...) {}; // which is no transport
    cpx::exchange(p, x, y, moves);
}

// expect: sum_over_ranks.values, comm. wants a vector, array or span that stays
// expect: sum_over_ranks.values, comm. wants a vector, array or span that stays
void sums(cpx::tensor<float, zigzag>& x, std::vector<float> const& never_written, cpx::threads& comm) {
    cpx::sum_over_ranks(x, comm);
    cpx::sum_over_ranks(never_written, comm);
}

// expect: agree.comm, mine, of. wants a cpx::transport
void agrees(cpx::tensor<float, zigzag>& x, cpx::threads& comm) { cpx::agree(comm, x); }

// expect: gather.comm, mine, all, bytes. gathers bytes
// expect: gather.comm, mine, all, bytes. gathers bytes
void gathers(cpx::tensor<float, zigzag>& x, std::vector<float> const& list, cpx::threads& comm) {
    cpx::gather(x, comm);
    cpx::gather(comm, list);
}

// expect: a movement takes, of a relayout, tensors x and y
// expect: a movement takes, of a relayout, tensors x and y
// expect: a movement takes, of a relayout, tensors x and y
void of_rows(stepwise& move, cpx::rows<float> x, cpx::thd const& batch, plan<zigzag, sequential> p, view<zigzag> y) {
    auto const z = move(x, x);
    auto const t = move.make_tensor(batch);
    move(p, y, y);
}

// expect: movement.plan, width, capacity, comm. wants a plan of its type
// expect: movement.plan, width, capacity, comm. wants a plan of its type
void unmade(zigzag const& from, sequential const& to, cpx::threads& comm) {
    stepwise of_shardings(from, to, comm);
    bringing of_nothing;
}

// expect: a movement takes, of a relayout, tensors x and y
void into_list(bringing& move, cpx::tensor<float, zigzag>& x, std::vector<float>& halo) { move(x, halo); }

// expect: movement::set of another kind of sharding than it was made for
// expect: movement::set of another kind of sharding than it was made for
// expect: movement::set of another kind of sharding than it was made for
void other_batches(stepwise& move, bringing& bring, zigzag const& from, sequential const& to, cpx::thd const& batch) {
    move.set(to, from);
    move.set(from);
    bring.set(batch);
}

// expect: subgroup.comm, members. wants a cpx::transport
// expect: neighbours.comm, size. wants a cpx::transport
// expect: transport_ref.comm. wants a cpx::transport
void groups(group& lone, cpx::threads& comm) {
    cpx::subgroup some(comm, 4);
    cpx::transport_ref any(lone);
    cpx::neighbours(lone, 4);
}

// expect: make_movement<T>.from, to, width, capacity, comm. wants two shardings
void makes(zigzag const& from, sequential const& to) { cpx::make_movement<float>(from, to, 4, cpx::capacity{}); }

// A capacity in braces with names, which clang++ takes for no other argument.
// expect: make_movement<T>.from, to, width, capacity, comm. wants two shardings
// expect: make_movement<T>.from, to, width, capacity, comm. wants two shardings
// expect: make_movement<T>.from, to, width, capacity, comm. wants two shardings
// expect: movement.plan, width, capacity, comm. wants a plan of its type
void makes(cpx::halo_plan<zigzag> const& brings, cpx::halo_plan<sequential> const& others,
           cpx::carry_plan<cpx::scan, zigzag> const& carries, cpx::tensor<float, zigzag>& x, group& lone,
           cpx::threads& comm) {
    cpx::make_movement<float>(brings, 4, {.rows = 4}, lone);
    cpx::make_movement<float>(x, 4, {.rows = 4}, comm);
    cpx::make_movement<float>(carries, {1, 2}, {.rows = 4}, lone);
    bringing of_another(others, 4, {.rows = 4}, comm);
}

// expect: check_transport.run. wants what runs a program
auto checks(cpx::threads& comm) { return cpx::testing::check_transport(comm); }

// expect: make_rows<T>.comm, count, width. wants a cpx::transport
auto rows_without_ranks = cpx::make_rows<float>(2, 3, 4);

// A call of what has been refused says nothing more.
// expect: relayout.from, to, rank. wants two shardings
// expect: shard.batch, layout. wants a cpx::thd and a layout
// expect: make_tensor<T>.sharding, rank, width. wants a sharding
// expect: sharded.rows, sharding, rank. wants all three
// expect: shard.batch, layout. wants a cpx::thd and a layout
void of_refused(plan<zigzag, sequential> p, cpx::tensor<float, zigzag>& x, cpx::rows<short> some, zigzag const& from,
                cpx::threads& comm) {
    auto const by_plan = cpx::exchange(x, cpx::relayout(from, from), comm);
    auto const by_plan_of = cpx::exchange(x, cpx::shard(from, cpx::zigzag<4>{}), comm);
    cpx::exchange(p, x, cpx::make_tensor<short>(cpx::thd(), comm, 4), comm);
    auto const of_no_rank = cpx::exchange(p, cpx::sharded(some, from), comm);
    auto const moves = cpx::relayout(from, cpx::shard(x, 4), 0);
}

// expect: set_together.comm, f. wants a cpx::transport and what sets movements
void sets(cpx::threads& comm) { cpx::set_together(comm, 4); }
// What is done with the result of a call that has been refused is no second mistake, and is not told first.
// expect: make_tensor<T>.sharding, rank, width. wants a sharding
// expect: shard.batch, layout. wants a cpx::thd and a layout
// expect: relayout.from, to, rank. wants two shardings
// expect: exchange.plan, x, comm. wants a relayout_plan
// expect: make_movement<T>.from, to, width, capacity, comm. wants two shardings
void uses(cpx::threads& comm, cpx::thd const& batch) {
    auto const seen = cpx::make_tensor<float>(4, 4).view();
    float* const memory = cpx::make_tensor<float>(4, 2).data();
    auto const cut = cpx::shard(4);
    cpx::index_t const rows = cut.rows(0);
    auto x = cpx::make_tensor<float>(cut, 0, 4);
    auto const plan = cpx::relayout(batch, 3);
    for (cpx::message const& m : plan.sends) static_cast<void>(m);
    auto const back = plan.transposed();
    auto const segments = cpx::halo(batch, 2).segments.size();
    auto y = cpx::exchange(batch, 3, comm);
    cpx::exchange(y, cpx::shard(batch, cpx::zigzag<2>{}), comm);
    auto move = cpx::make_movement<float>(batch, 3);
    move.set(batch, batch);
    move(x.view(), y.view());
}

// Elements, rows and numbers of what has been refused, and calls of it.
// expect: make_tensor<T>.sharding, rank, width. wants a sharding
// expect: sharded wants rows of its elements
// expect: relayout.from, to, rank. wants two shardings
// expect: exchange.plan, x, comm. wants a relayout_plan
void computes(zigzag const& from, cpx::threads& comm, std::vector<float>& list) {
    auto x = cpx::make_tensor(from, comm, 4);
    x.data().row(0)[0] = 1;
    auto const seen = cpx::sharded(list, from, 0);
    static_cast<void>(seen.data()(0, 0) + 1);
    auto const plan = cpx::relayout(from, 3);
    if (plan.sent_rows() > 3) return;
    auto y = cpx::exchange(3, comm);
    for (cpx::index_t row = 0; row < y.data().count(); ++row) y.data()(row, 0) += 1;
    if (y.rank() == 0) return;
    list[0] += y.data()(0, 0) * float(y.ranks() % 2);
    cpx::make_movement<float>(y, from);
    x = cpx::exchange(x, 3, comm);
    cpx::tensor<float, zigzag> const z = cpx::exchange(cpx::exchange(y, 3, comm), from, comm);
}
#endif
