// SPDX-License-Identifier: Apache-2.0
// Runs one step, the same function template, on ranks that are threads, processes of MPI or GPUs.
#include "ranks.hpp"
#include "step.hpp"

#include "../common/command_line.hpp"
#include "../common/sharding_options.hpp"

#include <cstdio>
#include <string>

namespace {

one_step::outcome on_threads(int ranks) {
    one_step::outcome result;
    cpx::threads::run(ranks, [&](cpx::threads& comm) {
        double const checksum = one_step::step(comm);
        if (comm.rank() == 0) result = {0, ranks, checksum};
    });
    return result;
}

} // namespace

int main(int argc, char** argv) {
    examples::command_line app(
        "One step: a relayout, a convolution and their backward, on small whole numbers; the checksum of its "
        "gradients is the same on any ranks.",
        "one_step");
    std::string on = "threads", ranks = "4";
    bool json = false;
    app.option("--on", on, "threads, mpi (started by mpirun) or gpus (started by torchrun)");
    app.option("--ranks", ranks, "threads; elsewhere as many as the launcher has launched");
    app.flag("--json", json, "print one line of JSON");
    return app.run(argc, argv, [&] {
        bool const known = on == "threads" || on == "mpi" || on == "gpus";
        cpx::require(known, "--on", "ranks", "threads, mpi or gpus", cpx::quote(on));
        int const wanted = examples::parse_ranks(ranks, examples::most_threads);
        auto const result = on == "mpi" ? one_step::on_mpi() : on == "gpus" ? one_step::on_gpus() : on_threads(wanted);
        cpx::require(!app.has("--ranks") || result.ranks == wanted, "--ranks", "ranks",
                     "those that were launched, " + std::to_string(result.ranks), wanted);
        if (result.rank != 0) return;
        char const* const text =
            json ? "{\"on\":\"%s\",\"ranks\":%d,\"checksum\":%.0f}\n" : "one step on %s, %d ranks: checksum %.0f\n";
        std::printf(text, on.c_str(), result.ranks, result.checksum);
    });
}
