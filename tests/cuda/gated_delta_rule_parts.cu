// SPDX-License-Identifier: Apache-2.0
#include <cpx/cuda/delta_rule_fold.hpp>

#include "../../harness/graph.hpp"
#include "delta_rule_call.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using namespace packed_delta_rule;
using order = gpu::detail::delta_order;

/// How a backward in parts begins: with gradients of states after sequences, or before these are known, alone, or with
/// what outputs alone make of those before.
enum class beginning { with_gradients, alone, folding };

using core_call = gpu::detail::delta_call<true, __nv_bfloat16>;

/// The steps that a problem's sequences make of states, as segments, and those back.
template <class T>
class folding {
public:
    explicit folding(problem const& p) : p_(p) {
        poison(nullptr);
        gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }

    /// Makes NaN of results and workspace.
    void poison(cudaStream_t stream) { packed_heads::poison(stream, maps_, ends_, back_, space_); }

    delta_rule_path run(cudaStream_t stream) {
        auto in = there_.erasing();
        in.state = {};
        auto const path = gpu::gated_delta_rule_fold<T>(p_.shape, in, all(maps_), all(ends_), all(space_), stream);
        CHECK(gpu::gated_delta_rule_backward_fold<T>(p_.shape, in, there_.gradients(), all(back_), all(space_),
                                                     stream) == path);
        return path;
    }
    /// As many segments, elsewhere in the rows.
    void set(std::vector<index_t> const& offsets) { there_.offsets.write(offsets); }
    /// Returns the maps and the ends of the steps, and what outputs alone make the gradients before them.
    std::array<numbers, 3> read() const { return {widen(maps_.read()), widen(ends_.read()), widen(back_.read())}; }

private:
    index_t elements(index_t of_head) const { return p_.sequences() * p_.shape.value_heads * of_head; }

    problem p_;
    device_problem<T> there_{p_};
    buffer<float> maps_{elements(p_.shape.key_dim * p_.shape.key_dim)},
        ends_{elements(p_.shape.key_dim * p_.shape.value_dim)}, back_{elements(p_.shape.key_dim * p_.shape.value_dim)};
    buffer<char> space_{gpu::gated_delta_rule_fold_workspace<T>(p_.shape, p_.rows(), p_.sequences())};
};

/// Returns whether tensor cores run a problem, by which it has parts: where there are kernels for them.
bool has_parts(problem const& p) {
    auto const space = gpu::detail::delta_backward_space<true, __nv_bfloat16>(p.shape, p.rows(), p.sequences(), false);
    CHECK(space.hopper == (core_path() == delta_rule_path::tensor_cores));
    return space.hopper;
}

/// A forward in parts. By steps first, states before come only after these. `beside`: whether some outputs have to be
/// made beside states. `to_ends`: whether states after sequences are made.
results forward_in_parts(problem const& p, order how, std::optional<bool> beside = {}, bool to_ends = true) {
    using T = __nv_bfloat16;
    gpu::stream const stream;
    device_problem<T> const there{p};
    auto in = there.erasing();
    auto const o = poisoned<T>(p.v.size());
    auto const last = poisoned<float>(p.state.size()), given = poisoned<float>(p.state.size());
    rows<T> const values(o.data(), p.rows(), p.values());
    auto const space = gpu::detail::delta_forward_space<true, T>(p.shape, p.rows(), p.sequences(), false, how);
    buffer<char> const workspace(space.bytes);
    core_call const call{p.shape, in, space, workspace.data(), stream, cpx::caller::here()};
    if (beside) CHECK((gpu::detail::delta_share_beside(call, how) > 0) == *beside);
    bool const known = how == order::states_first;
    gpu::check(cudaMemcpyAsync(given.data(), in.state.data(), in.state.size_bytes(), cudaMemcpyDeviceToDevice, stream),
               "cudaMemcpyAsync");
    if (!known) in.state = {};
    gpu::detail::launch_delta_hopper_begin(call, how, known, to_ends);
    if (!known) in.state = all(given);
    gpu::detail::launch_delta_hopper_states(call, how, to_ends ? all(last) : std::span<float>(), values);
    gpu::detail::launch_delta_hopper_outputs(call, how, values);
    return {.o = widen(o.read()), .last = widen(last.read())};
}

/// A backward in parts: gradients of states, which are there before the others, but for a share of these.
results backward_in_parts(problem const& p, beginning how = beginning::with_gradients, int share = 0) {
    using T = __nv_bfloat16;
    gpu::stream const stream;
    device_problem<T> const there{p};
    auto const in = there.erasing();
    auto const dq = poisoned<T>(p.q.size()), dk = poisoned<T>(p.k.size()), dv = poisoned<T>(p.v.size());
    auto const dg = poisoned<float>(p.g.size()), dbeta = poisoned<float>(p.beta.size()),
               dstate = poisoned<float>(p.state.size()), copy = poisoned<float>(p.state.size());
    gpu::gated_delta_rule_gradients<T> const to{rows<T>(dq.data(), p.rows(), p.keys()),
                                                rows<T>(dk.data(), p.rows(), p.keys()),
                                                rows<T>(dv.data(), p.rows(), p.values()),
                                                rows<float>(dg.data(), p.rows(), p.shape.value_heads),
                                                rows<float>(dbeta.data(), p.rows(), p.shape.value_heads),
                                                all(dstate)};
    auto const space = gpu::detail::delta_backward_space<true, T>(p.shape, p.rows(), p.sequences(), false);
    buffer<char> const workspace(space.bytes);
    core_call const call{p.shape, in, space, workspace.data(), stream, cpx::caller::here()};
    gpu::detail::delta_begun const begun{how != beginning::with_gradients, share};
    if (begun.along) {
        auto const folded = poisoned<float>(p.state.size()), expected = poisoned<float>(p.state.size());
        std::span<float> const wanted = how == beginning::folding ? all(folded) : std::span<float>();
        gpu::detail::launch_delta_hopper_backward_begin(call, there.gradients(), to, wanted);
        if (!wanted.empty()) {
            buffer<char> const room(gpu::gated_delta_rule_fold_workspace<T>(p.shape, p.rows(), p.sequences()));
            gpu::gated_delta_rule_backward_fold<T>(p.shape, in, there.gradients(), all(expected), all(room), stream);
            CHECK(folded.read() == expected.read());
        }
    }
    gpu::detail::launch_delta_hopper_walks(call, there.gradients(), all(there.dlast), to, begun);
    gpu::check(
        cudaMemcpyAsync(copy.data(), dstate.data(), p.state.size() * sizeof(float), cudaMemcpyDeviceToDevice, stream),
        "cudaMemcpyAsync");
    gpu::detail::launch_delta_hopper_gradients(call, there.gradients(), to, begun);
    results r{.dq = widen(dq.read()), .dk = widen(dk.read()), .dv = widen(dv.read())};
    r.dg = widen(dg.read()), r.dbeta = widen(dbeta.read()), r.dstate = widen(copy.read());
    return r;
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE_TEMPLATE("what segments make of states and of their gradients, one after the other, is the host's", T,
                       float, __nv_bfloat16) {
        if (!has_gpus()) return;
        for (head_dims const dim : core_dims) {
            index_t const key = dim.key, value = dim.value;
            CAPTURE(key);
            CAPTURE(value);
            constexpr index_t heads = 2;
            std::vector<index_t> many; // fill the GPU, which then takes another kernel
            for (index_t row = 0; row < 500; row += 14 + row % 5) many.push_back(row);
            many.push_back(500);
            results expected;
            // One of the first ones is empty; the second time, some have two stretches, whose steps are joined; the
            // last ones go round all that is loaded ahead.
            for (auto const& [cuts, stretch] : {std::pair(std::vector<index_t>{0, 100, 100, 320, 500}, 0),
                                                std::pair(std::vector<index_t>{0, 30, 30, 330, 500}, 2),
                                                std::pair(many, 0), std::pair(std::vector<index_t>{0, 700, 1500}, 0)}) {
                index_t const tokens = cuts.back();
                auto p = make<T>({tokens}, 1, heads, key, value, kind::mild, 19);
                if (expected.o.size() != p.v.size()) expected = on_host(p, true); // once for a length
                p.offsets = cuts;
                p.shape.stretch = stretch;
                p.first.assign(cuts.begin(), cuts.end() - 1);
                index_t const steps = std::ssize(p.first) * heads;
                gpu::stream const stream;
                folding<T> of(p);
                auto const path = of.run(stream);
                if (std::is_same_v<T, __nv_bfloat16>) CHECK(path == core_path());
                auto const [m, e, d] = of.read();
                numbers state = p.state, dstate = p.dlast;
                auto const pass = [&, &m = m](numbers& s, numbers const& end, index_t step,
                                              bool turned) { // s = end + M s
                    auto const at = [](numbers const& x, index_t place) { return x[static_cast<std::size_t>(place)]; };
                    numbers const before = s;
                    for (index_t r = 0; r < key; ++r)
                        for (index_t c = 0; c < value; ++c) {
                            double sum = at(end, (step * key + r) * value + c);
                            for (index_t j = 0; j < key; ++j)
                                sum += at(m, step * key * key + (turned ? j * key + r : r * key + j)) *
                                       at(before, (step % heads * key + j) * value + c);
                            s[static_cast<std::size_t>((step % heads * key + r) * value + c)] = sum;
                        }
                };
                for (index_t step = 0; step < steps; ++step) {
                    pass(state, e, step, false);
                    pass(dstate, d, steps - 1 - step, true);
                }
                check_close("last", state, expected.last, 4.7e-3);
                check_close("dstate", dstate, expected.dstate, 4.7e-3);
            }
        }
    }

    TEST_CASE("what segments make of states and of their gradients has the same bits at every run, and alone") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        for (index_t const heads : {4, 32, 80}) { // back by a block a half of a head, and of 80 a head
            CAPTURE(heads);
            auto p = make<T>({575, 1250}, 2, heads / 2, 128, 128, kind::no_decay, 37);
            p.first = {1250, 600};
            p.shape.stretch = heads == 32 ? 4 : 0; // several, and one
            gpu::stream const stream;
            auto const of_run = [&](folding<T>& of) {
                of.poison(stream);
                CHECK(of.run(stream) == core_path());
                stream.synchronize();
                return of.read();
            };
            folding<T> both(p);
            auto const first = of_run(both);
            for (numbers const& written : first)
                CHECK(std::ranges::all_of(written, [](double x) { return std::isfinite(x); }));
            int others = 0;
            for (int i = 1; i < 40; ++i) {
                auto const next = of_run(both);
                for (std::size_t j = 0; j < first.size(); ++j) others += !on_ranks::same_bits(next[j], first[j]);
            }
            CHECK(others == 0);
            // and those of the second sequence alone
            p.offsets = {575, 1825}, p.first = {600};
            p.state.resize(p.state.size() / 2);
            folding<T> second(p);
            auto const alone = of_run(second);
            for (std::size_t j = 0; j < first.size(); ++j)
                CHECK(on_ranks::same_bits(alone[j], slice(first[j], std::ssize(alone[j]), 1, 2)));
        }
    }

    TEST_CASE("captured steps of segments are replayed with others, and one that holds NaN changes no bit of these") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        for (head_dims const dim : core_dims)
            for (index_t const stretch : {0, 2}) {
                CAPTURE(dim.key);
                CAPTURE(dim.value);
                CAPTURE(stretch);
                auto p = make<T>({300, 0, 450, 130}, 1, 2, dim.key, dim.value, kind::mild, 39);
                p.shape.stretch = stretch;
                folding<T> replayed(p);
                gpu::stream const stream;
                harness::graph const graph(stream, [&] { replayed.run(stream); });
                std::vector<index_t> const elsewhere{0, 64, 65, 880, 880},
                    packings[] = {p.offsets, elsewhere, p.offsets};
                for (std::vector<index_t> const& offsets : packings) {
                    auto other = p;
                    other.offsets = offsets;
                    replayed.set(offsets);
                    replayed.poison(stream);
                    graph.launch(stream);
                    folding<T> direct(other);
                    CHECK(direct.run(stream) == core_path());
                    auto const got = replayed.read(), expected = direct.read();
                    for (std::size_t i = 0; i < got.size(); ++i) CHECK(on_ranks::same_bits(got[i], expected[i]));
                }
                auto const expected = replayed.read();
                auto beside = p;
                make_nan(beside, 2);
                folding<T> with_nan(beside);
                with_nan.run(stream);
                auto const got = with_nan.read();
                CHECK(std::ranges::any_of(got[0], [](double e) { return std::isnan(e); }));
                for (index_t const n : {0, 1, 3})
                    for (std::size_t i = 0; i < got.size(); ++i)
                        CHECK(on_ranks::same_rows(got[i], expected[i], std::ssize(got[i]) / 4, n, n + 1));
            }
    }

    TEST_CASE("states that are made before outputs, and those after sequences, have the bits of one call") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        // As ranks have segments: of several stretches and of one, with parts of chunks at either end
        struct {
            std::vector<index_t> lengths, first;
            index_t group;
            bool beside; ///< whether some outputs are made beside states
        } const batches[] = {{{2000, 1000, 0, 40, 20, 920, 460}, {0, 3000, 5, 0, 60, 24, 1380}, 4, false},
                             {{20000, 0, 3000}, {0, 5, 60}, 4, true},
                             {{9000}, {7}, 16, true}};
        for (auto const& batch : batches)
            for (head_dims const dim : core_dims) {
                CAPTURE(dim.value);
                CAPTURE(batch.lengths.size());
                auto p = make<T>(batch.lengths, 2, batch.group, dim.key, dim.value, kind::no_decay, 35);
                p.first = batch.first;
                if (!has_parts(p)) continue;
                auto const got = forward_in_parts(p, order::states_first, batch.beside);
                auto const together = on_gpu<T>(p, false);
                CHECK(on_ranks::same_bits(got.o, together.o));
                CHECK(on_ranks::same_bits(got.last, together.last));
            }
    }

    TEST_CASE("states that steps make of those before, and outputs after these, are near those of one call") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        for (head_dims const dim : core_dims)
            for (auto const how : {order::steps_first, order::states_first}) {
                CAPTURE(dim.value);
                bool const known = how == order::states_first;
                CAPTURE(known);
                auto p = make<T>({2000, 5000, 0, 40}, 2, 16, dim.key, dim.value, kind::no_decay, 38);
                p.first = {5, 3000, 5, 60};
                if (!has_parts(p)) continue;
                auto by_steps = p;
                by_steps.shape.scan = true;
                auto const got = forward_in_parts(by_steps, how, false);
                auto const together = on_gpu<T>(p, false);
                check_close("o", got.o, together.o, 6e-3);
                check_close("last", got.last, together.last, 6e-3);
                auto const open = forward_in_parts(by_steps, how, false, false);
                CHECK(on_ranks::same_bits(open.o, got.o));
                CHECK(std::ranges::all_of(open.last, [](double x) { return std::isnan(x); })); // never touched
            }
    }

    TEST_CASE("stretches of steps are long where heads are many, and no longer than they have to be") { // on the host
        using gpu::detail::delta_scan_stretch, gpu::detail::delta_stretch_of_steps;
        CHECK(delta_stretch_of_steps(32768, 1, 32) == 129); // four, whose 128 outputs and 256 steps go together
        CHECK(delta_stretch_of_steps(2 * 16384, 2, 32) == 129);
        CHECK(delta_stretch_of_steps(16384, 1, 32) == 65);
        CHECK(delta_stretch_of_steps(32768, 1, 8) == 33);
        for (index_t const tokens : {index_t{0}, index_t{1}, index_t{4096}, index_t{100000}, (index_t{1} << 31) - 200})
            for (index_t const sequences : {0, 1, 2, 7, 65535})
                for (index_t const heads : {1, 5, 32, 48, 128, 65535}) {
                    CAPTURE(tokens);
                    CAPTURE(sequences);
                    CAPTURE(heads);
                    index_t const stretch = delta_stretch_of_steps(tokens, sequences, heads);
                    CHECK(stretch >= delta_scan_stretch);
                    CHECK(stretch <= cpx::kernels::delta_uncut);
                    if (sequences > 0) CHECK(stretch <= std::max(delta_scan_stretch, tokens / 64 / sequences + 1));
                }
    }

    TEST_CASE("gradients of states that are made before the others, and these, have the bits of one call") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        for (index_t const group : {1, 4, 8, 12}) { // by a block a half of a head, and a head, of both ways and of one
            CAPTURE(group);
            auto p = make<T>({700, 1000, 0, 40, 20, 320, 460}, 2, group, 128, 128, kind::no_decay, 36);
            p.first = {0, 3000, 5, 0, 60, 24, 1380};
            if (!has_parts(p)) continue;
            auto const alone = on_gpu<T>(p, true);
            CHECK(same_gradients(backward_in_parts(p), alone));
            for (beginning const how : {beginning::alone, beginning::folding})
                for (int const share : {0, 1, 100, 255}) {
                    CAPTURE(static_cast<int>(how));
                    CAPTURE(share);
                    CHECK(same_gradients(backward_in_parts(p, how, share), alone));
                }
        }
    }

    TEST_CASE("other gradients are made beside walks back where these are long, and leave multiprocessors") {
        if (!has_gpus()) return;
        auto const share = [](index_t key_heads, index_t value_heads, index_t sequences, index_t tokens) {
            return gpu::detail::delta_share_beside_back<true>({.key_heads = key_heads, .value_heads = value_heads},
                                                              sequences, tokens);
        };
        bool const there = core_path() == delta_rule_path::tensor_cores && gpu::detail::multiprocessors() > 100;
        CHECK((share(16, 32, 1, 32768) > 0) == there);
        for (index_t const sequences : {0, 1, 3, 8, 100})
            for (index_t const heads : {1, 16, 66, 128, 1000})
                for (index_t const tokens : {0, 1000, 20000, 1000000}) {
                    int const of = share(1, heads, sequences, tokens);
                    CHECK((of == 0 || (of >= 16 && of * sequences <= 128)));
                    CHECK((of == 0 || tokens >= 2560 * heads * sequences));
                }
        CHECK(gpu::detail::delta_share_beside_back<false>({.key_heads = 16, .value_heads = 32}, 1, 32768) == 0);
    }

    TEST_CASE("a segment that holds NaN changes no bit of others, in parts, forward and backward") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        for (head_dims const dim : core_dims)
            for (int const way : {0, 1, 2}) {
                order const how = way < 2 ? order::states_first : order::steps_first;
                bool const scan = way > 0;
                CAPTURE(dim.key);
                CAPTURE(dim.value);
                CAPTURE(way);
                auto p = make<T>({1100, 0, 300, 77}, 2, 2, dim.key, dim.value, kind::mild, 40);
                p.first = {5, 0, 64, 1300};
                p.shape.scan = scan;
                if (!has_parts(p)) continue;
                auto beside = p;
                make_nan(beside, 2);
                check_others(p, 2, forward_in_parts(beside, how), forward_in_parts(p, how));
                if (how != order::states_first) continue;
                for (beginning const begins : {beginning::with_gradients, beginning::alone})
                    check_others(p, 2, backward_in_parts(beside, begins), backward_in_parts(p, begins));
            }
    }
}
