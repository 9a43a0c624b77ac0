// Arguments of MPI's ranks in another order, or of a launcher's.
#include <cpx/transport/mpi.hpp>

#include <chrono>

auto const program = [](cpx::mpi&) {};
constexpr std::chrono::seconds soon(5);

void fits() {
    cpx::mpi::run(program);
    cpx::mpi::run([](cpx::mpi&) {}, soon);
    cpx::mpi::run(program, soon, MPI_COMM_WORLD);
    auto mutable_program = [calls = 0](cpx::mpi&) mutable { ++calls; };
    cpx::mpi::run(mutable_program, soon, MPI_COMM_WORLD, cpx::caller::here());
    cpx::mpi const some = cpx::mpi::split(0), none = cpx::mpi::split(1, MPI_COMM_WORLD);
    cpx::mpi const others = cpx::mpi::split(some.rank() % 2, MPI_COMM_WORLD, soon);
    static_cast<void>(others.rank() + none.rank());
}

#ifndef CPX_GOOD
// expect: mpi::run.program, deadline, group. wants a program that takes its rank
// expect: mpi::run.program, deadline, group. wants a program that takes its rank
// expect: mpi::run.program, deadline, group. wants a program that takes its rank
// expect: mpi::run.program, deadline, group. wants a program that takes its rank
void runs() {
    cpx::mpi::run();
    cpx::mpi::run([](cpx::mpi&) {}, MPI_COMM_WORLD, soon);
    cpx::mpi::run(3, program);
    cpx::mpi::run([](int) {});
}
// expect: mpi::split.color, group, deadline. wants a number
// expect: mpi::split.color, group, deadline. wants a number
// expect: mpi::split.color, group, deadline. wants a number
void splits() {
    cpx::mpi const none = cpx::mpi::split();
    cpx::mpi const late = cpx::mpi::split(0, soon);
    cpx::mpi const first = cpx::mpi::split(MPI_COMM_WORLD, 0);
    static_cast<void>(late.rank() + first.rank() + none.rank());
}
#endif
