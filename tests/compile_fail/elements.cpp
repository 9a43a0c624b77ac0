// Tensors of what is not sent as bytes: each type is refused once, wherever it comes first.
#include <cpx/cpx.hpp>

#include <complex>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

auto const zigzag = cpx::shard(cpx::thd({0, 8}), cpx::zigzag<2>{});
using sharding_type = cpx::sharding<cpx::zigzag<2>>;

// Numbers of any kind, and structs of them, are elements.
struct pair_of_numbers {
    double value[2];
    std::int8_t sign;
};
void numbers(cpx::threads& comm) {
    auto const x = cpx::exchange(cpx::make_tensor<std::complex<double>>(zigzag, comm, 2), zigzag, comm);
    auto const y = cpx::exchange(cpx::make_tensor<pair_of_numbers>(zigzag, comm, 2), zigzag, comm);
    cpx::tensor copy(y);
    copy = y;
}

struct no_default {
    explicit no_default(int);
#ifdef CPX_GOOD
    no_default() = default;
#endif
};
// expect: an element of a tensor is sent as bytes
auto const lacking = cpx::make_tensor<no_default>(zigzag, 0, 2);

// One that owns memory, in all that sends rows; each has a type of its own.
template <int>
struct owner {
#ifdef CPX_GOOD
    int text;
#else
    std::string text;
#endif
};
// expect: an element of a tensor is sent as bytes
void rows(cpx::plan const& p, cpx::rows<owner<0>> x, cpx::threads& comm) { cpx::exchange(p, x, x, comm); }
// expect: an element of a tensor is sent as bytes
void views(cpx::sharded<owner<1>, sharding_type> x, cpx::threads& comm) {
    auto const y = cpx::exchange(x, zigzag, comm);
    static_cast<void>(y.data());
}
// expect: an element of a tensor is sent as bytes
void by_plan(cpx::sharded<owner<2>, sharding_type> x, cpx::threads& comm) {
    cpx::exchange(cpx::relayout(zigzag, zigzag, comm.rank()), x, x, comm);
}
// expect: an element of a tensor is sent as bytes
void movements(cpx::threads& comm) {
    auto move = cpx::make_movement<owner<3>>(zigzag, zigzag, 2, cpx::capacity{}, comm);
    auto x = move.make_tensor(zigzag);
    move(x, x);
}

#ifndef CPX_GOOD
// expect: an element of a tensor is sent as bytes.*instead of bool take unsigned char
void flags(cpx::threads& comm) {
    auto x = cpx::make_tensor<bool>(zigzag, comm, 2);
    x.data()(0, 0) = true;
    auto const y = cpx::exchange(x, zigzag, comm);
}
// expect: an element of a tensor is sent as bytes
void strings(cpx::threads& comm) {
    auto x = cpx::make_tensor<std::string>(zigzag, comm, 2);
    x.data()(0, 0) = "a";
    auto const y = cpx::exchange(x, zigzag, comm);
}
// expect: an element of a tensor is sent as bytes
// expect: an element of a tensor is sent as bytes
// expect: an element of a tensor is sent as bytes
// expect: an element of a tensor is sent as bytes
// expect: an element of a tensor is sent as bytes
cpx::tensor<std::vector<float>, sharding_type> const of_lists(zigzag, 0, 2);
auto const never_written = cpx::make_tensor<float const>(zigzag, 0, 2);
auto const references = cpx::make_tensor<float&>(zigzag, 0, 2);
auto const nothing = cpx::make_tensor<void>(zigzag, 0, 2);
auto const pointers = cpx::make_tensor<std::unique_ptr<int>>(zigzag, 0, 2);
// expect: an element of a tensor is sent as bytes
void moves_references(cpx::threads& comm) {
    auto move = cpx::make_movement<double&>(zigzag, zigzag, 2, cpx::capacity{}, comm);
    auto x = move.make_tensor(zigzag);
    move(x, x);
}
// expect: a tensor cannot tell its elements
cpx::tensor const untold(zigzag, 0, 2);
// expect: a movement cannot tell its elements
void moves_untold(cpx::threads& comm) {
    cpx::movement move(zigzag, zigzag, comm);
    cpx::movement of_a_capacity_in_braces(zigzag, 4, {8, 8}, comm); // said above
    auto x = move(zigzag);
}
#endif
