// SPDX-License-Identifier: Apache-2.0
// Times the gated delta rule and a decay a head on one GPU, forward and backward, against what they have to move and to
// multiply.
#include "../../harness/graph.hpp"
#include "random.hpp"
#include "timing.hpp"

#include <cpx/cuda/delta_rule_step.hpp>
#include <cpx/cuda/gated_delta_rule.hpp>

#include <cstdio>

namespace {

using cpx::index_t, cpx::rows;
using timing::random;
namespace gpu = cpx::cuda;

/// What gates are: all 1, of some decay, or made of parameters by the kernels that read them.
enum class gates { none, decay, made };

/// What is timed: a decay a head erases nothing.
struct work {
    bool erases = true;
    index_t key_heads = 16, value_heads = 32, sequences = 1, length = 0;
    double forward = 0, backward = 0; ///< ms at most; 0: no limit
    bool scan = false;                ///< of the forward alone
    index_t dim = 128;                ///< channels of keys and of values
    gpu::delta_rule_path path = gpu::delta_rule_path::tensor_cores;
    bool half = false; ///< else bfloat16
};

/// Returns the milliseconds that the design of the gated delta rule has for it. Of a backward: what it moves, as fast
/// as a copy, and no less than 2500 clocks a chunk of a walk back. Of a forward: first what inverses and gates move, as
/// fast as a copy; then clocks of multiprocessors, at the device's highest rate, 3140 for a chunk's outputs of a value
/// head and twice 881 for its state, of which there are two halves. Where sequences and heads are enough each is one
/// multiprocessor's, and no states come first. Else all multiprocessors share the work, and it takes no less than a
/// walk with the state along a sequence. Heads of fewer channels have the clocks of 128, which they fill up.
double designed_ms(bool back, work const& w, double rate) {
    auto const attribute = [](cudaDeviceAttr which) {
        int value = 0;
        gpu::check(cudaDeviceGetAttribute(&value, which, gpu::current_device()), "cudaDeviceGetAttribute");
        return static_cast<double>(value);
    };
    double const all = attribute(cudaDevAttrMultiProcessorCount), kilohertz = attribute(cudaDevAttrClockRate);
    double const heads = static_cast<double>(w.sequences * w.value_heads), chunks = static_cast<double>(w.length) / 64;
    double const values = 64 * 2 * static_cast<double>(w.dim);
    double const keys = values * static_cast<double>(w.key_heads) / static_cast<double>(w.value_heads);
    if (back) { // k, v, A to S; q, k, dout, A to dS and dv; all of these to dq and dk
        double const bytes = 7 * keys + 6 * values + 3 * 5120 + 4 * 2 * static_cast<double>(w.dim * w.dim) + 4 * 512;
        return std::max(1e3 * heads * chunks * bytes / rate, chunks * 2500 / kilohertz);
    }
    double const bytes = keys + 5120 + (2 + 2) * 64 * 4; // of a chunk and value head: keys, A, gates of g and beta
    double const clocks = heads >= 0.9 * all ? std::ceil(heads / all) * chunks * 3140
                                             : std::max(chunks * 881, heads * chunks * (3140 + 2 * 881) / all);
    return 1e3 * heads * chunks * bytes / rate + clocks / kilohertz;
}

/// Returns the milliseconds of a forward, or of a backward with what its forward has saved, by replays of a graph, and
/// prints them.
template <class element>
double time(bool back, work const& w, gates of, double rate, gpu::stream const& stream) {
    bool const erases = w.erases, scan = w.scan;
    index_t const key_heads = w.key_heads, value_heads = w.value_heads, sequences = w.sequences, length = w.length;
    index_t const tokens = sequences * length, dim = w.dim;
    float const most = std::sqrt(3.0f / static_cast<float>(dim));
    auto const q = random<element>(tokens * key_heads * dim, 1, -most, most);
    auto const k = random<element>(tokens * key_heads * dim, 2, -most, most);
    auto const v = random<element>(tokens * value_heads * dim, 3, -1, 1);
    auto const g = random<float>(tokens * value_heads, 4, of == gates::none ? 0.0f : -0.1f, 0);
    auto const beta = random<float>(tokens * value_heads, 5, 0, 1);
    bool const made = of == gates::made;
    auto const a = random<element>(made ? tokens * value_heads : 0, 8, -3, 3), da = random<element>(a.size(), 8, 0, 1);
    auto const a_log = random<float>(made ? value_heads : 0, 9, -4, -3),
               dt_bias = random<float>(a_log.size(), 10, 0, 1), da_log = random<float>(a_log.size(), 9, 0, 1),
               ddt_bias = random<float>(a_log.size(), 9, 0, 1);
    std::vector<index_t> list;
    for (index_t s = 0; s <= sequences; ++s) list.push_back(s * length);
    gpu::buffer<index_t> const offsets{std::span<index_t const>(list)};
    auto const dout = random<element>(tokens * value_heads * dim, 6, -1, 1);
    gpu::buffer<element> const o(tokens * value_heads * dim), dq(tokens * key_heads * dim),
        dk(tokens * key_heads * dim);
    auto const last = random<float>(sequences * value_heads * dim * dim, 7, -1, 1);
    gpu::buffer<float> const dg(tokens * value_heads), dbeta(tokens * value_heads);
    gpu::gated_delta_rule_shape const shape{.key_heads = key_heads,
                                            .value_heads = value_heads,
                                            .key_dim = dim,
                                            .value_dim = dim,
                                            .scan = scan,
                                            .path = w.path};
    gpu::buffer<char> const saved(back && erases ? gpu::gated_delta_rule_saved<element>(shape, tokens, sequences) : 0);
    bool const saves = saved.size() > 0;
    gpu::buffer<char> const space(std::max(
        {gpu::gated_delta_rule_workspace<element>(shape, tokens, sequences, saves),
         gpu::gated_delta_rule_workspace<element, gpu::erases::no>(shape, tokens, sequences),
         back ? gpu::gated_delta_rule_backward_workspace<element>(shape, tokens, sequences, saves) : 0,
         back ? gpu::gated_delta_rule_backward_workspace<element, gpu::erases::no>(shape, tokens, sequences) : 0}));
    auto const all = [](auto const& b) { return std::span(b.data(), static_cast<std::size_t>(b.size())); };
    auto path = gpu::delta_rule_path::plain;
    rows<float const> const g_rows(g.data(), tokens, value_heads);
    rows<element const> const a_rows =
        made ? rows<element const>(a.data(), tokens, value_heads) : rows<element const>();
    auto const run = [&](bool back) {
        gpu::gated_delta_rule_input<element> const in{{q.data(), tokens, key_heads * dim},
                                                      {k.data(), tokens, key_heads * dim},
                                                      {v.data(), tokens, value_heads * dim},
                                                      made ? rows<float const>() : g_rows,
                                                      {beta.data(), tokens, value_heads},
                                                      all(offsets),
                                                      {},
                                                      {},
                                                      {},
                                                      all(saved),
                                                      -1,
                                                      {a_rows, all(a_log), all(dt_bias)}};
        rows<element> const values(o.data(), tokens, value_heads * dim);
        rows<element const> const of_o(dout.data(), tokens, value_heads * dim);
        rows<element> const of_q(dq.data(), tokens, key_heads * dim), of_k(dk.data(), tokens, key_heads * dim);
        rows<float> const of_g = made ? rows<float>() : rows<float>(dg.data(), tokens, value_heads);
        rows<float> const of_beta(dbeta.data(), tokens, value_heads);
        rows<element> const of_a = made ? rows<element>(da.data(), tokens, value_heads) : rows<element>();
        if (!erases) {
            gpu::gated_delta_rule_input<element> const decaying{in.q, in.k, in.v, in.g, {}, in.offsets};
            path = !back ? gpu::gated_delta_rule<element, gpu::erases::no>(shape, decaying, values, all(last),
                                                                           all(space), stream)
                         : gpu::gated_delta_rule_backward<element, gpu::erases::no>(
                               shape, decaying, of_o, all(last), {of_q, of_k, values, of_g}, all(space), stream);
            return;
        }
        path = !back ? gpu::gated_delta_rule<element>(shape, in, values, all(last), all(space), stream)
                     : gpu::gated_delta_rule_backward<element>(
                           shape, in, of_o, all(last),
                           {of_q, of_k, values, of_g, of_beta, {}, {of_a, all(da_log), all(ddt_bias)}}, all(space),
                           stream);
    };
    if (back) run(false); // leaves what the backward reads
    harness::graph const graph(stream, [&] { run(back); });
    auto const call = [&] { graph.launch(stream); };
    bool const plain = w.path == gpu::delta_rule_path::plain;
    int const calls = plain ? 1 : length > 100000 ? 2 : 5; // some 0.1 s
    timing::rest(stream);
    double const ms = static_cast<double>(timing::median_ms(
        stream, call, [] {}, calls, 9));
    double const sustained = plain ? 0 : static_cast<double>(timing::sustained_ms(stream, call, ms, calls, 9));
    // forward: q, k, v, o and gates; back: q, k, v, dout, gates, and the gradients of all but dout
    double const key_rows = (back ? 8.0 : 4.0) * static_cast<double>(key_heads);
    double const value_rows = (back ? 6.0 : 4.0) * static_cast<double>(value_heads);
    double const of_gates = (back ? 2.0 : 1.0) *
                            (made     ? 6
                             : erases ? 8
                                      : 4) *
                            static_cast<double>(value_heads); // bytes
    double const bytes = static_cast<double>(tokens) * (static_cast<double>(dim) * (key_rows + value_rows) + of_gates);
    double const flop = static_cast<double>(tokens * value_heads) / 64 *
                        (erases ? back ? 31.5e6 : 10.49e6
                         : back ? 15.7e6
                                : 6.29e6);
    auto const number = [](index_t n) { return static_cast<std::ptrdiff_t>(n); };
    std::printf("%-5s %-8s %-4s %-8s %2td x %-7td %2td/%-3td %3td %-6s %-13s %9.4f %8.1f%%", erases ? "delta" : "decay",
                back ? "backward" : "forward", scan ? "scan" : "", w.half ? "half" : "bfloat16", number(sequences),
                number(length), number(key_heads), number(value_heads), number(dim),
                of == gates::none ? "none"
                : made            ? "made"
                                  : "decay",
                path == gpu::delta_rule_path::plain ? "plain" : "tensor cores", ms, 100 * bytes / (ms * 1e-3) / rate);
    bool const designed = erases && !scan && path == gpu::delta_rule_path::tensor_cores;
    auto const column = [](bool wanted, int digits, double figure, char const* unit) {
        wanted ? std::printf(" %*.*f%s", 9 - static_cast<int>(std::string(unit).size()), digits, figure, unit)
               : std::printf(" %9s", "");
    };
    column(dim == 128, 0, flop / (ms * 1e-3) * 1e-12, "");
    column(designed, 1, 100 * designed_ms(back, w, rate) / ms, "%");
    column(!plain, 4, sustained, "");
    std::printf("\n");
    std::fflush(stdout);
    return ms;
}

/// Returns the milliseconds of a step of decoding of many sequences, 16 key heads and 32 value heads, and prints them;
/// of copy: states there and back.
double time_step(index_t sequences, double rate, gpu::stream const& stream) {
    using element = __nv_bfloat16;
    constexpr index_t key_heads = 16, value_heads = 32, dim = 128;
    auto const rows_of = [&](auto const& b) { return rows(b.data(), sequences, b.size() / sequences); };
    auto const q = random<element>(sequences * key_heads * dim, 1, -0.1f, 0.1f),
               k = random<element>(sequences * key_heads * dim, 2, -0.1f, 0.1f),
               v = random<element>(sequences * value_heads * dim, 3, -1, 1);
    gpu::buffer<element> const o(sequences * value_heads * dim);
    auto const g = random<float>(sequences * value_heads, 4, -0.1f, 0), beta = random<float>(g.size(), 5, 0, 1),
               states = random<float>(sequences * value_heads * dim * dim, 7, -1, 1);
    harness::graph const graph(stream, [&] {
        gpu::gated_delta_rule_step<element>({.key_heads = key_heads, .value_heads = value_heads},
                                            {rows_of(q), rows_of(k), rows_of(v), rows_of(g), rows_of(beta)}, rows_of(o),
                                            {states.data(), static_cast<std::size_t>(states.size())}, stream);
    });
    timing::rest(stream);
    double const ms = static_cast<double>(timing::median_ms(
        stream, [&] { graph.launch(stream); }, [] {}, 5, 9));
    std::printf("step of decoding, %3td sequences, 16/32 heads: %8.4f ms, %5.1f%% of copy\n",
                static_cast<std::ptrdiff_t>(sequences), ms,
                100 * 8.0 * static_cast<double>(states.size()) / (ms * 1e-3) / rate);
    std::fflush(stdout);
    return ms;
}

} // namespace

int main(int argc, char** argv) {
    if (int const code = timing::refusal(argc, argv); code >= 0) return code;
    gpu::stream const stream;
    double const rate = timing::copy_bandwidth(stream);
    std::printf("%s, copy of 1 GiB: %.0f GB/s read and written\n", timing::device_name().c_str(), rate * 1e-9);
    std::printf("the gated delta rule and a decay a head; of copy: inputs and outputs once\n");
    std::printf("of design: the time of the design's clocks and bytes, of what is measured\n");
    std::printf(
        "ms: after a second of rest; sustained: after a second of these calls, at the limit of the GPU's power\n");
    std::printf("%-28s %-12s %-6s %3s %-6s %-13s %9s %9s %9s %9s %9s\n", "", "sequences", "heads", "of", "gates",
                "path", "ms", "of copy", "TFLOP/s", "of design", "sustained");
    timing::limits limits;
    for (bool const back : {false, true}) {
        std::vector<double> of_delta; // ms, of the gated delta rule's work in its order
        std::size_t next = 0;         // of a decay a head, which has the same
        for (work const& w :
             {work{true, 16, 32, 1, 32768, 0.55, 1.5}, work{true, 16, 32, 4, 8192, 0.36, 1.5},
              work{true, 16, 32, 1, 8192, 0.20, 0.45}, work{true, 16, 32, 1, 131072, 2.3, 6.0},
              work{true, 2, 8, 1, 32768}, work{true, 2, 8, 1, 32768, 0.24, 0, true}, work{false, 16, 32, 1, 32768},
              work{false, 16, 32, 4, 8192}, work{false, 16, 32, 1, 8192}, work{false, 16, 32, 1, 131072},
              work{false, 2, 8, 1, 32768}, work{false, 2, 8, 1, 32768, 0, 0, true},
              work{true, 16, 32, 1, 32768, 0.55, 1.5, false, 128, gpu::delta_rule_path::tensor_cores, true},
              work{true, 16, 32, 4, 8192, 0.36, 1.5, false, 128, gpu::delta_rule_path::tensor_cores, true},
              work{true, 16, 32, 1, 32768, 0, 0, false, 64}, work{true, 16, 32, 4, 8192, 0, 0, false, 64},
              work{true, 16, 32, 1, 32768, 0, 0, false, 64, gpu::delta_rule_path::plain},
              work{true, 16, 32, 4, 8192, 0, 0, false, 64, gpu::delta_rule_path::plain}}) {
            if (back && w.scan) continue;
            for (gates const of : {gates::decay, gates::none, gates::made}) {
                if (of == gates::none && w.path == gpu::delta_rule_path::plain) continue; // its time is the same
                if (of == gates::made && (w.forward == 0 || w.half)) continue;
                double const ms =
                    w.half ? time<__half>(back, w, of, rate, stream) : time<__nv_bfloat16>(back, w, of, rate, stream);
                if (w.erases && of != gates::made) of_delta.push_back(ms);
                double const limit = !w.erases ? of_delta[next++] : back ? w.backward : w.forward;
                if (limit == 0) continue;
                limits.at_most(std::string(w.erases ? "gated delta rule " : "decay a head, by the delta rule's, ") +
                                   (back ? "backward, " : "forward, ") + std::to_string(w.sequences) + " x " +
                                   std::to_string(w.length) + ", " + std::to_string(w.key_heads) + "/" +
                                   std::to_string(w.value_heads) + " heads" + (w.half ? ", half" : "") +
                                   (of == gates::decay  ? ""
                                    : of == gates::made ? ", g made"
                                                        : ", no decay") +
                                   ", us",
                               1000 * ms, 1000 * limit, "us");
            }
        }
    }
    for (index_t const sequences : {1, 16, 256}) {
        double const ms = time_step(sequences, rate, stream);
        if (sequences == 256) limits.at_most("step of decoding, 256 sequences, us", 1000 * ms, 350, "us");
    }
    limits.print();
    return 0;
}
