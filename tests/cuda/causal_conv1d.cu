// SPDX-License-Identifier: Apache-2.0
#include "../../harness/graph.hpp"
#include "conv_on_ranks.hpp"
#include "gpus.hpp"

#include <support/rejects.hpp>

#include <array>
#include <functional>

namespace {

using namespace convolution;
using cpx::index_t, cpx::rows;
using cpx::cuda::activation, cpx::cuda::conv_plan;
using support::lengths;

std::vector<index_t> const packings[] = {
    {}, {0, 0}, {1}, {2, 1, 1}, {5, 1, 0, 12, 3}, {37, 8, 21}, {100, 3, 257}, std::vector<index_t>(50, 1)};
index_t const tap_counts[] = {4, 1, 2, 3, 5, 8};

/// Rows in device memory that may be gigabytes apart: what lies between them is left alone, and has no copy.
template <class T>
class spread_rows {
public:
    spread_rows(index_t count, index_t width, index_t stride)
        : memory_((count - 1) * stride + width), view_(memory_.data(), count, width, stride) {}
    rows<T> view() const { return view_; }
    void write(std::vector<T> const& values) const { copy(view_, rows<T const>(values, view_.width())); }
    std::vector<T> read() const {
        std::vector<T> values(static_cast<std::size_t>(view_.count() * view_.width()));
        copy(rows<T>(values, view_.width()), view_);
        return values;
    }

private:
    static void copy(rows<T> to, rows<T const> from) {
        auto const bytes = [](index_t elements) { return static_cast<std::size_t>(elements) * sizeof(T); };
        cpx::cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); // streams do not wait for the default one
        cpx::cuda::check(cudaMemcpy2D(to.data(), bytes(to.stride()), from.data(), bytes(from.stride()),
                                      bytes(to.width()), static_cast<std::size_t>(to.count()), cudaMemcpyDefault),
                         "cudaMemcpy2D");
        cpx::cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); // what was staged may not be there yet
    }

    cpx::cuda::buffer<T> memory_;
    rows<T> view_;
};

/// Returns how many kernels, copies and the like `f()` gives to `in`, without running them.
template <class F>
std::size_t enqueued(cudaStream_t in, F&& f) {
    cudaGraph_t captured = nullptr;
    std::size_t count = 0;
    cpx::cuda::check(cudaStreamBeginCapture(in, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    f();
    cpx::cuda::check(cudaStreamEndCapture(in, &captured), "cudaStreamEndCapture");
    cpx::cuda::check(cudaGraphGetNodes(captured, nullptr, &count), "cudaGraphGetNodes");
    cpx::cuda::check(cudaGraphDestroy(captured), "cudaGraphDestroy");
    return count;
}

/// The elements of x and of the weight.
template <class T, class W>
struct kind {
    using element = T;
    using weight = W;
};

} // namespace

TEST_SUITE("cuda") {
    using cpx::index_t;

    TEST_CASE_TEMPLATE("the convolution and its gradients are the host's, whatever the shape and the strides", K,
                       kind<float, float>, kind<__nv_bfloat16, __nv_bfloat16>, kind<__nv_bfloat16, float>,
                       kind<__half, __half>, kind<__half, float>) {
        if (!has_gpus()) return;
        using T = typename K::element;
        std::uint64_t seed = 0;
        for (index_t const taps : tap_counts)
            for (auto const& packing : packings)
                for (index_t const channels : {1, 3, 8, 40, 264, 1032}) {
                    ++seed;
                    if (channels > 40 && seed % 4) continue;
                    problem<T, typename K::weight> const p(lengths(packing), channels, taps, seed % 3 != 0,
                                                           seed % 2 ? activation::silu : activation::none, seed);
                    CAPTURE(p.text());
                    auto const alone = run(p, on_ranks::one_rank(p.batch));
                    check_close<T>(alone, on_host(p));
                    // by 16 bytes, by elements, and by 16 bytes with rows apart
                    placement const others[] = {{1, 0}, {0, 1}, {8, 8}, {5, 3}};
                    placement const at = others[seed % 4];
                    CAPTURE(at.gap);
                    CAPTURE(at.shift);
                    auto const placed = run(p, on_ranks::one_rank(p.batch), at);
                    check_same("y", placed.y, alone.y);
                    check_same("dx", placed.dx, alone.dx);
                    check_close<T>(placed, alone);
                }
    }

    TEST_CASE_TEMPLATE("long rows and many strips", K, kind<float, float>, kind<__nv_bfloat16, __nv_bfloat16>,
                       kind<__half, float>) {
        if (!has_gpus()) return;
        using T = typename K::element;
        for (index_t const taps : {4, 3}) {
            problem<T, typename K::weight> const p(lengths({20011, 2, 13000, 0, 7001}), 72, taps, true,
                                                   activation::silu, 99);
            CAPTURE(p.text());
            auto const alone = run(p, on_ranks::one_rank(p.batch));
            check_close<T>(alone, on_host(p));
            auto const again = run(p, on_ranks::one_rank(p.batch));
            check_same("dweight", again.dweight, alone.dweight);
            check_same("dbias", again.dbias, alone.dbias);
        }
    }

    TEST_CASE_TEMPLATE("results and gradients of rows have the same bits on every sharding", K, kind<float, float>,
                       kind<__nv_bfloat16, float>) {
        if (!has_gpus()) return;
        using T = typename K::element;
        std::uint64_t seed = 1000;
        for (index_t const taps : {4, 8, 3, 1})
            for (auto const& packing : packings) {
                ++seed;
                problem<T, typename K::weight> const p(lengths(packing), seed % 2 ? 8 : 5, taps, seed % 3 != 0,
                                                       activation::silu, seed);
                CAPTURE(p.text());
                auto const alone = run(p, on_ranks::one_rank(p.batch));
                auto const expected = on_host(p);
                int const ranks = std::array{2, 3, 5}[seed / 3 % 3];
                on_ranks::for_each_sharding(p.batch, ranks, {1}, [&](std::string const& name, auto const& s) {
                    CAPTURE(name);
                    auto const r = run(p, s);
                    check_same("y", r.y, alone.y);
                    check_same("dx", r.dx, alone.dx);
                    check_close<T>(r, expected);
                });
            }
    }

    TEST_CASE("a NaN stays in its sequence, and in the tokens that it reaches") {
        if (!has_gpus()) return;
        for (index_t const channels : {8, 3})
            for (index_t const taps : {4, 8}) {
                problem<float, float> const p(lengths({9, 40, 1, 14}), channels, taps, true, activation::silu, 5);
                CAPTURE(p.text());
                for (index_t const row : {0, 8, 9, 20, 48, 49, 50}) {
                    CAPTURE(row);
                    auto other = p;
                    index_t const d = row % channels;
                    other.x[static_cast<std::size_t>(row * channels + d)] = NAN;
                    auto const r = run(other, cpx::shard(p.batch, cpx::zigzag<2>{}));
                    index_t const s = p.batch.sequence(row), end = std::min(row + taps, p.batch.offset(s + 1));
                    for (index_t t = 0; t < p.batch.tokens(); ++t)
                        for (index_t c = 0; c < channels; ++c) {
                            auto const i = static_cast<std::size_t>(t * channels + c);
                            CHECK(std::isnan(r.y[i]) == (c == d && t >= row && t < end));
                            CHECK(std::isnan(r.dx[i]) ==
                                  (c == d && t >= std::max(row - taps + 1, p.batch.offset(s)) && t < end));
                        }
                }
            }
    }

    TEST_CASE("sums are added to what is there, each may be left out, and a graph does all of it again") {
        if (!has_gpus()) return;
        problem<float, float> const p(lengths({30, 11}), 12, 4, true, activation::silu, 17);
        auto const sharding = on_ranks::one_rank(p.batch);
        auto const expected = run(p, sharding);
        conv_plan const plan(cpx::halo(sharding, 0, 3), cpx::halo(sharding, 0, 3, cpx::side::after));
        device_rows<float> const x(p.x, 12, {}), dy(p.dy, 12, {}), y(41, 12, {}), dx(41, 12, {});
        device_rows<float> const weight(p.weight, 4, {});
        cpx::cuda::buffer<float> const bias{std::span<float const>(p.bias)};
        std::span<float const> const bias_view(bias.data(), p.bias.size());
        std::vector<float> const halves(48, 0.5f);
        index_t const needed = cpx::cuda::causal_conv1d_workspace(plan, 12);
        cpx::cuda::buffer<float> const workspace(needed);
        std::span<float> const space(workspace.data(), static_cast<std::size_t>(needed));
        cpx::cuda::stream const stream;
        for (int const which : {0, 1, 2, 3}) {
            CAPTURE(which);
            device_rows<float> const dweight(halves, 4, {}), dbias(std::vector<float>(12, 0.5f), 12, {});
            cpx::cuda::causal_conv1d_gradients<float> to{dx};
            if (which & 1) to.dweight = dweight;
            if (which & 2) to.dbias = std::span(dbias.view().data(), 12);
            if (which) to.workspace = space;
            auto const all = [&] {
                cpx::cuda::causal_conv1d(plan, x.view(), {}, weight.view(), bias_view, p.act, y, stream);
                cpx::cuda::causal_conv1d_backward(plan, x.view(), {}, weight.view(), bias_view, p.act, dy, {}, {}, to,
                                                  stream);
            };
            harness::graph const graph(stream, all);
            auto const check_sums = [&](std::vector<float> const& got, std::vector<double> const& of, double times) {
                for (std::size_t i = 0; i < got.size(); ++i)
                    CHECK(std::abs(got[i] - (0.5 + times * of[i])) <= 1e-5 * (1 + times * std::abs(of[i])));
            };
            for (int const times : {1, 2, 3}) {
                graph.launch(stream);
                stream.synchronize();
                check_same("y", on_ranks::cast<double>(y.read()), expected.y);
                check_same("dx", on_ranks::cast<double>(dx.read()), expected.dx);
                check_sums(dweight.read(), expected.dweight, which & 1 ? times : 0);
                check_sums(dbias.read(), expected.dbias, which & 2 ? times : 0);
            }
        }
    }

    TEST_CASE("no channels need no workspace and no kernel") {
        if (!has_gpus()) return;
        auto const s = cpx::shard(lengths({7, 6}), cpx::zigzag<2>{});
        conv_plan const plan(cpx::halo(s, 0, 3), cpx::halo(s, 0, 3, cpx::side::after));
        REQUIRE(plan.halo_rows() > 0);
        REQUIRE(plan.edge_rows() > 0);
        cpx::cuda::buffer<float> const memory(1000 + cpx::cuda::causal_conv1d_workspace(plan, 1));
        cpx::cuda::stream const stream;
        auto const count_kernels = [&](float* data, index_t channels) {
            index_t const needed = cpx::cuda::causal_conv1d_workspace(plan, channels);
            CHECK((needed == 0) == (channels == 0));
            index_t used = 0;
            auto const numbers = [&](index_t n) {
                std::span<float> const next(data ? data + used : data, static_cast<std::size_t>(n));
                used += (n + 3) / 4 * 4;
                return next;
            };
            auto const of = [&](index_t n, index_t width) { return rows<float>(numbers(n * width).data(), n, width); };
            rows<float> const x = of(plan.rows(), channels), y = of(plan.rows(), channels),
                              halo_x = of(plan.halo_rows(), channels), weight = of(channels, 4),
                              edge = of(plan.edge_rows(), channels), dx = of(plan.rows(), channels),
                              dz_halo = of(plan.dz_halo_rows(), channels), dweight = of(channels, 4);
            auto const bias = numbers(channels), dbias = numbers(channels), workspace = numbers(needed);
            return enqueued(stream, [&] {
                cpx::cuda::causal_conv1d(plan, x, halo_x, weight, bias, activation::silu, y, stream);
                cpx::cuda::causal_conv1d_backward_edge(plan, x, halo_x, weight, bias, activation::silu, y, edge,
                                                       stream);
                cpx::cuda::causal_conv1d_backward(plan, x, halo_x, weight, bias, activation::silu, y, edge, dz_halo,
                                                  {dx, dweight, dbias, workspace}, stream);
            });
        };
        CHECK(count_kernels(memory.data(), 1) == 4); // captured, never run
        CHECK(count_kernels(memory.data(), 0) == 0);
        CHECK(count_kernels(nullptr, 0) == 0);
    }

    TEST_CASE("rows lie where 32 bits do not reach") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        index_t const count = 11, channels = 8, stride = (index_t{1} << 28) + 8; // rows 8 to 10: beyond 2^32 bytes
        if (!has_free_memory(4 * count * stride * static_cast<index_t>(sizeof(T)))) return;
        auto const sharding = cpx::shard(lengths({18, 15}), cpx::sequential<3>{});
        support::splitmix numbers(32);
        auto const uniform = [&](index_t n) { return on_ranks::uniform<float>(numbers, n); };
        auto const x = convert<T>(uniform(count * channels)), dy = convert<T>(uniform(count * channels));
        std::vector<T> const nothing(x.size(), static_cast<T>(NAN));
        cpx::cuda::buffer<T> const bias{std::span<T const>(convert<T>(uniform(channels)))};
        std::span<T const> const bias_view(bias.data(), static_cast<std::size_t>(channels));
        cpx::cuda::stream const stream;
        using tensors = std::array<spread_rows<T>, 4>;
        auto const apart = [&](index_t by) -> tensors {
            return {{{count, channels, by}, {count, channels, by}, {count, channels, by}, {count, channels, by}}};
        };
        tensors const near = apart(channels), far = apart(stride);
        for (index_t const taps : {4, 3}) { // by 16 bytes, by elements
            CAPTURE(taps);
            conv_plan const plan(cpx::halo(sharding, 1, taps - 1), cpx::halo(sharding, 1, taps - 1, cpx::side::after));
            REQUIRE(plan.rows() == count); // of sequences of 6 and 5, with rows of other ranks on both sides
            REQUIRE(plan.halo_rows() == 2 * (taps - 1));
            REQUIRE(plan.edge_rows() == 2 * (taps - 1));
            REQUIRE(plan.dz_halo_rows() == 2 * (taps - 1));
            device_rows<T> const halo_x(convert<T>(uniform(plan.halo_rows() * channels)), channels, {}),
                weight(convert<T>(uniform(channels * taps)), taps, {});
            device_rows<float> const dz(uniform(plan.dz_halo_rows() * channels), channels, {});
            index_t const needed = cpx::cuda::causal_conv1d_workspace(plan, channels);
            cpx::cuda::buffer<float> const workspace(needed);
            auto const run_on = [&](tensors const& on) {
                auto const& [in_x, in_dy, y, dx] = on;
                in_x.write(x), in_dy.write(dy), y.write(nothing), dx.write(nothing);
                device_rows<float> const edge(plan.edge_rows(), channels, {}),
                    dweight(std::vector<float>(static_cast<std::size_t>(channels * taps)), taps, {}),
                    dbias(std::vector<float>(static_cast<std::size_t>(channels)), channels, {});
                cpx::cuda::causal_conv1d(plan, in_x.view(), halo_x, weight.view(), bias_view, activation::silu,
                                         y.view(), stream);
                cpx::cuda::causal_conv1d_backward_edge(plan, in_x.view(), halo_x, weight.view(), bias_view,
                                                       activation::silu, in_dy.view(), edge.view(), stream);
                cpx::cuda::causal_conv1d_backward(
                    plan, in_x.view(), halo_x, weight.view(), bias_view, activation::silu, in_dy.view(), edge, dz,
                    {dx.view(), dweight, std::span(dbias.view().data(), static_cast<std::size_t>(channels)),
                     std::span(workspace.data(), static_cast<std::size_t>(needed))},
                    stream);
                return std::array{convert<double>(y.read()), convert<double>(dx.read()), convert<double>(edge.read()),
                                  convert<double>(dweight.read()), convert<double>(dbias.read())};
            };
            auto const expected = run_on(near), found = run_on(far);
            char const* const names[] = {"y", "dx", "edge", "dweight", "dbias"};
            for (std::size_t i = 0; i < found.size(); ++i) {
                check_same(names[i], found[i], expected[i]);
                CHECK(std::ranges::none_of(expected[i], [](double value) { return std::isnan(value); }));
            }
        }
    }

    TEST_CASE("what does not fit is refused, by name") {
        auto const s = cpx::shard(lengths({7, 6}), cpx::zigzag<2>{});
        auto const after = [&](index_t reach, int rank = 0) { return cpx::halo(s, rank, reach, cpx::side::after); };
        support::rejects({"conv_plan", "side of the halo: expected before, got after"}, [&] { conv_plan(after(3)); });
        support::rejects({"conv_plan", "taps: expected at most 8, got 9"}, [&] { conv_plan(cpx::halo(s, 0, 8)); });
        if (!has_gpus()) return;
        support::rejects({"rows after a segment in the plan: expected 3, got 2"},
                         [&] { conv_plan(cpx::halo(s, 0, 3), after(2)); });
        support::rejects({"rows after a segment in the plan: expected 3, got 0"},
                         [&] { conv_plan(cpx::halo(s, 0, 3), cpx::halo(s, 0, 3)); });
        support::rejects({"plan of rows after", "the sharding and the rank"},
                         [&] { conv_plan(cpx::halo(s, 0, 3), after(3, 1)); });

        conv_plan const forward(cpx::halo(s, 0, 3)), plan(cpx::halo(s, 0, 3), after(3));
        index_t const count = plan.rows(), needed = cpx::cuda::causal_conv1d_workspace(plan, 5);
        CHECK(forward.rows() == 6);
        CHECK(forward.halo_rows() > 0);
        CHECK(forward.taps() == 4);
        CHECK_FALSE(forward.has_backward());
        REQUIRE(plan.edge_rows() > 0);
        REQUIRE(plan.dz_halo_rows() > 0);
        cpx::cuda::stream const stream;
        cpx::cuda::buffer<float> const memory(1004 + needed);
        auto const of = [&](index_t n, index_t width, index_t at = 0) {
            return rows<float>(memory.data() + at, n, width);
        };
        auto const numbers = [&](index_t n, index_t at = 0) {
            return std::span<float>(memory.data() + at, static_cast<std::size_t>(n));
        };

        struct call { // all fits, but for what a test changes
            rows<float> x, halo, weight, y, dy, edge, dz_halo;
            std::span<float> bias;
            cpx::cuda::causal_conv1d_gradients<float> to;
        };
        auto const fitting = [&] {
            return call{of(count, 5),
                        of(plan.halo_rows(), 5),
                        of(5, 4),
                        of(count, 5),
                        of(count, 5),
                        of(plan.edge_rows(), 5),
                        of(plan.dz_halo_rows(), 5),
                        numbers(5),
                        {of(count, 5, 400), of(5, 4, 600), numbers(5, 800), numbers(needed, 1000)}};
        };
        using change = std::function<void(call&)>;
        auto const refused = [&](std::string const& passage, change const& f, conv_plan const& by, bool whole = true) {
            call c = fitting();
            f(c);
            if (whole)
                support::rejects({"causal_conv1d.cu", "cuda::causal_conv1d", passage}, [&] {
                    cpx::cuda::causal_conv1d(by, c.x, c.halo, c.weight, c.bias, activation::none, c.y, stream);
                });
            support::rejects({"causal_conv1d.cu", "cuda::causal_conv1d_backward_edge", passage}, [&] {
                cpx::cuda::causal_conv1d_backward_edge(by, c.x, c.halo, c.weight, c.bias, activation::none, c.dy,
                                                       c.edge, stream);
            });
            support::rejects({"causal_conv1d.cu", "cuda::causal_conv1d_backward", passage}, [&] {
                cpx::cuda::causal_conv1d_backward(by, c.x, c.halo, c.weight, c.bias, activation::none, c.dy, c.edge,
                                                  c.dz_halo, c.to, stream);
            });
        };
        refused(
            "width of weight: expected 4, got 3", [&](call& c) { c.weight = of(5, 3); }, plan);
        refused(
            "size of bias: expected 5, got 4", [&](call& c) { c.bias = numbers(4); }, plan);
        refused(
            "shape of x: expected (6, 5), got (5, 5)", [&](call& c) { c.x = of(5, 5); }, plan);
        refused(
            "shape of x: expected (6, 6), got (6, 5)", [&](call& c) { c.weight = of(6, 4), c.bias = {}; }, plan);
        refused(
            "stride of x: expected at least the width, 5, got 4",
            [&](call& c) {
                c.x = {memory.data(), count, 5, 4};
            },
            plan);
        refused(
            "x: expected memory of the current device, got null",
            [&](call& c) {
                c.x = {nullptr, count, 5};
            },
            plan);
        std::vector<float> on_host(static_cast<std::size_t>(1000 + needed)); // would be an illegal address
        auto const host = [&](rows<float>& r) { r = {on_host.data(), r.count(), r.width()}; };
        auto const host_numbers = [&](std::span<float>& list) { list = {on_host.data(), list.size()}; };
        auto const of_host = [](char const* name) {
            return std::string(name) + ": expected memory of the current device, 0, got memory of the host";
        };
        refused(
            of_host("x"), [&](call& c) { host(c.x); }, plan);
        refused(
            of_host("halo"), [&](call& c) { host(c.halo); }, plan);
        refused(
            of_host("weight"), [&](call& c) { host(c.weight); }, plan);
        refused(
            of_host("bias"), [&](call& c) { host_numbers(c.bias); }, plan);
        refused(
            "shape of halo", [&](call& c) { c.halo = {}; }, plan);
        refused(
            "plan of rows after the segments: expected one, got none", [](call&) {}, forward, false);
        call c = fitting();
        support::rejects({"shape of y: expected (6, 5), got (6, 4)"}, [&] {
            cpx::cuda::causal_conv1d(plan, c.x, c.halo, c.weight, c.bias, activation::none, of(count, 4), stream);
        });
        support::rejects({"shape of edge"}, [&] {
            cpx::cuda::causal_conv1d_backward_edge(plan, c.x, c.halo, c.weight, c.bias, activation::none, c.dy,
                                                   of(plan.edge_rows() + 1, 5), stream);
        });
        auto const refused_backward = [&](std::string const& passage, change const& f) {
            call wrong = fitting();
            f(wrong);
            support::rejects({"cuda::causal_conv1d_backward", passage}, [&] {
                cpx::cuda::causal_conv1d_backward(plan, wrong.x, wrong.halo, wrong.weight, wrong.bias, activation::none,
                                                  wrong.dy, wrong.edge, wrong.dz_halo, wrong.to, stream);
            });
        };
        host(c.edge), host(c.y);
        support::rejects({of_host("edge")}, [&] {
            cpx::cuda::causal_conv1d_backward_edge(plan, c.x, c.halo, c.weight, c.bias, activation::none, c.dy, c.edge,
                                                   stream);
        });
        support::rejects({of_host("y")}, [&] {
            cpx::cuda::causal_conv1d(plan, c.x, c.halo, c.weight, c.bias, activation::none, c.y, stream);
        });
        refused_backward(of_host("dy"), [&](call& w) { host(w.dy); });
        refused_backward(of_host("dx"), [&](call& w) { host(w.to.dx); });
        refused_backward(of_host("edge"), [&](call& w) { host(w.edge); });
        refused_backward(of_host("dz_halo"), [&](call& w) { host(w.dz_halo); });
        refused_backward(of_host("dweight"), [&](call& w) { host(w.to.dweight); });
        refused_backward(of_host("dbias"), [&](call& w) { host_numbers(w.to.dbias); });
        refused_backward(of_host("workspace"), [&](call& w) { host_numbers(w.to.workspace); });
        support::rejects({"causal_conv1d.cu", "cuda::causal_conv1d: overlap of y and x: expected none, got some"}, [&] {
            call const same = fitting();
            cpx::cuda::causal_conv1d(plan, same.x, same.halo, same.weight, same.bias, activation::none, same.y, stream);
        });
        refused_backward("overlap of dx and dweight: expected none, got some",
                         [&](call& w) { w.to.dweight = of(5, 4, 400); });
        refused_backward("shape of dy", [&](call& w) { w.dy = of(count, 6); });
        refused_backward("shape of dx", [&](call& w) { w.to.dx = of(count + 1, 5); });
        refused_backward("shape of edge", [&](call& w) { w.edge = {}; });
        refused_backward("shape of dz_halo", [&](call& w) { w.dz_halo = {}; });
        refused_backward("shape of dweight", [&](call& w) { w.to.dweight = of(4, 5); });
        refused_backward("size of dbias: expected 5, got 3", [&](call& w) { w.to.dbias = numbers(3); });
        refused_backward("size of the workspace: expected " + std::to_string(needed) + ", got 0",
                         [&](call& w) { w.to.workspace = {}; });
        refused_backward("address of the workspace", [&](call& w) { w.to.workspace = numbers(needed, 1001); });
    }
}
