// SPDX-License-Identifier: Apache-2.0
// Runs one step, the same function template, on ranks that are threads, processes of MPI or GPUs.
#include "ranks.hpp"
#include "step.hpp"

#include "../common/run.hpp"

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
    CLI::App app("One step: a relayout, a convolution and their backward, on small whole numbers; the checksum of its "
                 "gradients is the same on any ranks.",
                 "one_step");
    std::string on = "threads";
    int ranks = 4;
    bool json = false;
    app.add_option("--on", on, "threads, mpi (started by mpirun) or gpus (started by torchrun)")->capture_default_str();
    app.add_option("--ranks", ranks, "threads; elsewhere the launcher says how many ranks there are")
        ->capture_default_str();
    app.add_flag("--json", json, "print one line of JSON");
    return examples::run_example(argc, argv, app, [&] {
        bool const known = on == "threads" || on == "mpi" || on == "gpus";
        cpx::require(known, "--on", "ranks", "threads, mpi or gpus", cpx::quote(on));
        examples::require_effect(app, "--ranks", on == "threads", "--on threads", on + ", whose launcher says it");
        cpx::require(ranks >= 1 && ranks <= 256, "--ranks", "number of threads", "1 to 256", ranks);
        auto const result = on == "mpi" ? one_step::on_mpi() : on == "gpus" ? one_step::on_gpus() : on_threads(ranks);
        if (result.rank != 0) return;
        char const* const text =
            json ? "{\"on\":\"%s\",\"ranks\":%d,\"checksum\":%.0f}\n" : "one step on %s, %d ranks: checksum %.0f\n";
        std::printf(text, on.c_str(), result.ranks, result.checksum);
    });
}
