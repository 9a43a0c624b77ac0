// SPDX-License-Identifier: Apache-2.0
#include "delta_rule_call.hpp"
#include "delta_rule_roundings.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using namespace packed_delta_rule;
using delta_rule_roundings::check_roundings, delta_rule_roundings::cuts;

/// A = (I + L)^-1 of chunk `number` of a batch, as a forward has saved it: of a lower triangle strips of 16 columns, of
/// rows of 32 bytes whose halves change places every 4 rows, without the blocks of 16 x 16 above the diagonal.
template <class T>
emulator::matrix saved_inverse(std::vector<char> const& saved, index_t number) {
    emulator::matrix a = emulator::matrix::Zero(64, 64);
    char const* at = saved.data() + number * 10 * 16 * 32;
    for (index_t strip = 0; strip < 64; strip += 16)
        for (index_t row = strip; row < 64; ++row, at += 32)
            for (index_t column = 0; column < 16; ++column) {
                index_t const half = column / 8 ^ (row / 4 & 1);
                T element;
                std::memcpy(&element, at + half * 16 + column % 8 * 2, 2);
                a(row, strip + column) = static_cast<double>(static_cast<float>(element));
            }
    return a;
}
/// The same with exact sums of what `p` has, and ones on the diagonal where there are no tokens.
emulator::matrix exact_inverse(problem const& p, index_t begin, index_t count, index_t head) {
    auto const& s = p.shape;
    using strides = Eigen::OuterStride<>;
    Eigen::Map<emulator::matrix const, 0, strides> const k(p.k.data() + begin * p.keys() +
                                                               head * s.key_heads / s.value_heads * s.key_dim,
                                                           count, s.key_dim, strides(p.keys()));
    Eigen::Map<emulator::vector const, 0, Eigen::InnerStride<>> const beta(p.beta.data() + begin * s.value_heads + head,
                                                                           count, Eigen::InnerStride<>(s.value_heads));
    emulator::matrix const l = emulator::strictly_lower(beta.asDiagonal() * (k * k.transpose()));
    emulator::matrix inverse = emulator::matrix::Identity(64, 64);
    for (index_t i = 0; i < count; ++i) inverse.row(i) -= l.row(i).head(i) * inverse.topRows(i);
    return inverse;
}

/// Returns where stretches begin, but first ones.
std::vector<std::vector<emulator::Index>> cut_at_multiples(problem const& p, index_t tokens) {
    std::vector<std::vector<emulator::Index>> cuts;
    for (index_t n = 0; n < p.sequences(); ++n) {
        auto& of = cuts.emplace_back();
        index_t const count = p.offsets[static_cast<std::size_t>(n + 1)] - p.offsets[static_cast<std::size_t>(n)];
        for (index_t at = tokens; at < count; at += tokens) of.push_back(at);
    }
    return cuts;
}

/// Writes whether this code has been compiled for sm_90a.
__global__ void find_sm_90a(int* found) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    *found = 1;
#else
    *found = 0;
#endif
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE_TEMPLATE(
        "heads of 16 bits are on tensor cores where code for sm_90a runs and CUTLASS's headers were there", T,
        __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        buffer<int> const found(1);
        gpu::launch(find_sm_90a, dim3(1), dim3(1), 0, nullptr, "find_sm_90a", cpx::caller::here(), found.data());
        bool wanted = found.read().front() == 1;
#if !__has_include(<cute/arch/mma_sm90_gmma.hpp>)
        wanted = false;
#endif
        CHECK((core_path<T>() == delta_rule_path::tensor_cores) == wanted);
        auto const p = make<T>({70}, 1, 1, 128, 128, kind::mild, 1);
        CHECK((on_gpu<T>(p, true).path == delta_rule_path::tensor_cores) == wanted);
        CHECK(on_gpu<float>(p, true).path == delta_rule_path::plain);
    }

    TEST_CASE_TEMPLATE("the gated delta rule and its gradients are the host's, token by token, of every size", T, float,
                       __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        double const rounding = std::is_same_v<T, float> ? 6e-6 : std::is_same_v<T, __half> ? 4e-4 : 2.5e-3;
        struct size {
            index_t key_heads, group, key_dim, value_dim;
        };
        std::uint64_t seed = 0;
        for (size const s : {size{2, 2, 40, 24}, size{1, 3, 128, 128}, size{1, 1, 200, 33}, size{3, 1, 1, 1}})
            for (kind const what : {kind::mild, kind::same_keys, kind::strong, kind::never, kind::beta_0, kind::beta_1,
                                    kind::beta_2, kind::beta_0_or_1}) {
                if (what == kind::beta_1 && s.key_dim == 1) continue; // nothing is kept: dg is 0, but for roundings
                CAPTURE(s.key_dim);
                CAPTURE(static_cast<int>(what));
                auto p = make<T>({70, 0, 1, 130, 64}, s.key_heads, s.group, s.key_dim, s.value_dim, what, ++seed);
                p.shape.path = delta_rule_path::plain;
                check_close(on_gpu<T>(p, true), on_host(p, true), rounding, 6e-6, 6e-6);
            }
    }

    TEST_CASE_TEMPLATE("the gated delta rule of heads of 16 bits and its gradients are the host's, whatever the gates",
                       T, __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        for (head_dims const dim : core_dims) {
            index_t const key = dim.key, value = dim.value;
            CAPTURE(key);
            CAPTURE(value);
            double squares = 0; // of how many times dg's errors are its roundings'
            int count = 0;
            for (kind const what :
                 {kind::mild, kind::no_decay, kind::equal_keys, kind::same_keys, kind::beta_0, kind::beta_1,
                  kind::beta_2, kind::strong, kind::spikes, kind::never, kind::beta_0_or_1})
                for (bool const few : {true, false}) {
                    CAPTURE(static_cast<int>(what));
                    auto p = few ? make<T>({0, 63, 65, 128, 1, 0}, 2, 3, key, value, what, 8)
                                 : make<T>({200, 311, 0, 64, 513}, 1, 2, key, value, what, 7);
                    if (few) p.first = {0, 100, 1, 63, 64, 5};
                    auto const got = on_gpu<T>(p, true), exact = on_host(p, true);
                    CHECK(got.path == core_path<T>());
                    check_close(got, exact, most_of<T>(what, key));
                    if (got.path == delta_rule_path::plain) continue;
                    double const times = check_roundings<T>(p, got, exact);
                    squares += times * times, ++count;
                }
            CHECK(std::sqrt(squares) <= 1.1 * std::sqrt(count));
        }
    }

    TEST_CASE("small gradients of half have no more than their roundings' errors, among them what its range costs") {
        if (!has_gpus()) return;
        using T = __half;
        for (double const size : {1e-1, 1e-3, 1e-4}) {
            CAPTURE(size);
            auto p = make<T>({200, 311, 0, 64, 513}, 1, 2, 128, 128, kind::mild, 43);
            for (numbers* const x : {&p.dout, &p.dlast})
                for (double& e : *x) e *= size;
            p.dout = widen(convert<T>(p.dout)), p.dlast = widen(convert<float>(p.dlast));
            auto const got = on_gpu<T>(p, true), exact = on_host(p, true);
            CHECK(got.path == core_path<T>());
            check_close("o", got.o, exact.o, finer<T>() * 4.5e-3);
            if (got.path == delta_rule_path::tensor_cores) check_roundings<T>(p, got, exact);
            p.shape.path = delta_rule_path::plain; // has them in float
            check_close("dbeta", on_gpu<T>(p, true).dbeta, exact.dbeta, 6e-6);
        }
    }

    TEST_CASE_TEMPLATE("inverses that a forward saves are within 2e-3 of exact ones, whatever keys and betas", T,
                       __nv_bfloat16, __half) {
        if (!has_gpus() || core_path<T>() == delta_rule_path::plain) return; // the plain path makes none
        for (kind const what : {kind::mild, kind::equal_keys, kind::same_keys, kind::beta_0, kind::beta_1, kind::beta_2,
                                kind::beta_0_or_1, kind::never}) {
            CAPTURE(static_cast<int>(what));
            auto const p = make<T>({200, 0, 37, 64, 1}, 2, 3, 128, 128, what, 51);
            gpu::stream const stream;
            gpu_call<T> call(p, false, true);
            call.run(stream);
            auto const saved = call.saved();
            index_t chunks = 0;
            for (index_t n = 0; n < p.sequences(); ++n)
                for (index_t i = p.offsets[static_cast<std::size_t>(n)],
                             end = p.offsets[static_cast<std::size_t>(n + 1)];
                     i < end; i += 64, ++chunks)
                    for (index_t h = 0; h < p.shape.value_heads; ++h) {
                        auto const got = saved_inverse<T>(saved, chunks * p.shape.value_heads + h);
                        auto const exact = exact_inverse(p, i, std::min<index_t>(64, end - i), h);
                        CHECK((got - exact).norm() <= (std::is_same_v<T, __half> ? 1.2e-3 : 2e-3) * exact.norm());
                        CHECK(got.diagonal() == exact.diagonal());
                    }
            CHECK(chunks == 7);
        }
    }

    TEST_CASE_TEMPLATE("131072 tokens that hardly forget have no more than their roundings' errors", T, __nv_bfloat16,
                       __half) {
        if (!has_gpus()) return;
        auto const p = make<T>({131072}, 1, 1, 128, 128, kind::slow, 41);
        auto const exact = on_host(p, true);
        for (bool const scan : {false, true}) {
            CAPTURE(scan);
            auto by = p;
            by.shape.scan = scan;
            auto const got = on_gpu<T>(by, true);
            CHECK(got.path == core_path<T>());
            check_close(got, exact, {finer<T>() * 4.5e-3, finer<T>() * 5.5e-3, finer<T>() * 6e-3});
            if (got.path == delta_rule_path::plain) continue;
            check_roundings<T>(p, got, exact, scan ? cuts{cut_at_multiples(p, 32 * 64), cuts::stretches} : cuts{});
        }
    }

    TEST_CASE_TEMPLATE("a scale that is given, none or negative, is the factor of queries", T, __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        for (head_dims const dim : core_dims)
            for (double const scale : {0.0, -0.5, 3.0})
                for (auto const path : {delta_rule_path::tensor_cores, delta_rule_path::plain}) {
                    CAPTURE(dim.key);
                    CAPTURE(dim.value);
                    CAPTURE(scale);
                    auto p = make<T>({200, 0, 77}, 1, 2, dim.key, dim.value, kind::mild, 42);
                    p.shape.scale = scale, p.shape.path = path;
                    auto const got = on_gpu<T>(p, true);
                    CHECK(got.path == (path == delta_rule_path::plain ? path : core_path<T>()));
                    check_close(got, on_host(p, true), most_of<T>(kind::mild, dim.key));
                    auto const none = [](numbers const& x) {
                        return std::ranges::all_of(x, [](double e) { return e == 0; });
                    };
                    CHECK((none(got.o) && none(got.dq)) == (scale == 0));
                }
    }

    TEST_CASE("heads of other channels than tensor cores take run on the plain path") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        for (head_dims const dim : {head_dims{44, 64}, {64, 44}, {136, 64}, {64, 136}, {8, 8}}) {
            index_t const key = dim.key, value = dim.value;
            CAPTURE(key);
            CAPTURE(value);
            auto const p = make<T>({70, 130}, 2, 2, key, value, kind::mild, 9);
            auto const got = on_gpu<T>(p, true);
            CHECK(got.path == (key == 8 ? core_path() : delta_rule_path::plain));
            check_close(got, on_host(p, true), most_of<T>(kind::mild, key));
        }
    }

    TEST_CASE("a rank with one row takes the path of those with more") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        auto const p = make<T>({1}, 1, 1, 128, 128, kind::mild, 9);
        device_problem<T> const there{p};
        auto const o = poisoned<T>(p.v.size());
        buffer<char> const space(gpu::gated_delta_rule_workspace<T>(p.shape, 1, 1));
        gpu::stream const stream;
        auto in = there.erasing({});
        T const* const v = in.v.data();
        for (index_t const stride : {389, 392}) {
            in.v = rows<T const>(v, 1, 128, stride);
            CHECK(gpu::gated_delta_rule<T>(p.shape, in, {o.data(), 1, 128}, {}, all(space), stream) ==
                  (stride == 392 ? core_path() : delta_rule_path::plain));
            stream.synchronize();
        }
    }

    TEST_CASE_TEMPLATE("sequences of every length up to 130", T, __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        std::vector<index_t> lengths;
        for (index_t i = 0; i <= 130; ++i) lengths.push_back(i);
        for (head_dims const dim : core_dims) {
            index_t const key = dim.key, value = dim.value;
            CAPTURE(key);
            CAPTURE(value);
            auto const p = make<T>(lengths, 1, 1, key, value, kind::mild, 3);
            double const most = finer<T>() * 4.5e-3;
            check_close(on_gpu<T>(p, true), on_host(p, true), most, most, most);
        }
    }

    TEST_CASE_TEMPLATE("gradients of few tokens are the host's where given states count most", T, __nv_bfloat16,
                       __half) {
        if (!has_gpus()) return;
        for (index_t tokens = 1; tokens <= 7; ++tokens) {
            CAPTURE(tokens);
            auto p = make<T>({tokens, tokens, tokens}, 2, 4, 128, 128, kind::mild, static_cast<std::uint64_t>(tokens));
            for (double& x : p.state) x *= 4; // exact, and dg is a small sum of large products
            check_close(on_gpu<T>(p, true), on_host(p, true), finer<T>() * 4.7e-3, finer<T>() * 4.7e-3,
                        finer<T>() * 4.7e-3);
        }
    }

    TEST_CASE_TEMPLATE("lengths about chunks, keys that are zero, sequences without tokens, and rows of no sequence", T,
                       __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        std::vector<index_t> lengths{1023, 1025};
        for (index_t i = 131; i <= 200; ++i) lengths.push_back(i);
        for (int i = 0; i < 11; ++i) lengths.push_back(33);
        auto p = make<T>(lengths, 1, 1, 128, 128, kind::mild, 23);
        for (index_t i = 0; i < p.tokens(); i += 3) std::ranges::fill(std::span(p.k).subspan(i * 128, 128), 0.0);
        check_close(on_gpu<T>(p, true), on_host(p, true), finer<T>() * 4.5e-3, finer<T>() * 4.5e-3,
                    finer<T>() * 4.5e-3);
        for (double& g : p.g) g = -20; // nothing is left of the token before
        auto of_one = on_gpu<T>(p, true);
        auto const exact_of_one = on_host(p, true);
        double of_gates = 6e-3;          // dg by its roundings: 4.0e-3
        if (std::is_same_v<T, __half>) { // nor of dg and dstate: e^-20 is less than its least number
            auto const near = [](numbers const& a, numbers const& b) {
                return std::ranges::equal(a, b, [](double x, double y) { return std::abs(x - y) <= 2e-7; });
            };
            CHECK((near(of_one.dg, exact_of_one.dg) && near(of_one.dstate, exact_of_one.dstate)));
            of_one.dg = exact_of_one.dg, of_one.dstate = exact_of_one.dstate;
            of_gates = finer<T>() * 4.5e-3;
        }
        check_close(of_one, exact_of_one, finer<T>() * 4.5e-3, finer<T>() * 4.5e-3, of_gates);

        auto const none = make<T>({0, 0, 0}, 1, 2, 128, 128, kind::mild, 24);
        auto const got = on_gpu<T>(none, true);
        CHECK(got.last == none.state);
        CHECK(got.dstate == none.dlast);
        CHECK(gpu::gated_delta_rule_workspace<T>({.key_heads = 1, .value_heads = 2, .key_dim = 128, .value_dim = 128},
                                                 index_t{1} << 24, 0) > 0); // many rows of no sequence

        for (head_dims const dim : core_dims) {
            index_t const key = dim.key, value = dim.value;
            CAPTURE(key);
            CAPTURE(value);
            auto most = make<T>({70, 130, 64}, 1, 2, key, value, kind::mild, 25);
            most.offsets.pop_back(), most.first.clear();
            for (numbers* const states : {&most.state, &most.dlast}) states->resize(states->size() / 3 * 2);
            auto const part = on_gpu<T>(most, true);
            auto const own = [](numbers const& x, index_t width) { return slice(x, width, 0, 200); };
            auto const exact = on_host(most, true);
            index_t const values = most.values();
            check_close("o", own(part.o, values), own(exact.o, values), finer<T>() * 4.5e-3);
            check_close("dk", own(part.dk, key), own(exact.dk, key), finer<T>() * 4.5e-3);
            check_close("dg", own(part.dg, 2), own(exact.dg, 2), finer<T>() * 6e-3); // its roundings alone: 5.7e-3
            auto const untouched = [](numbers const& x, index_t width) {
                return std::ranges::all_of(slice(x, width, 200, 264), [](double e) { return std::isnan(e); });
            };
            CHECK((untouched(part.o, values) && untouched(part.dq, key) && untouched(part.dk, key)));
            CHECK((untouched(part.dv, values) && untouched(part.dg, 2) && untouched(part.dbeta, 2)));
        }
    }

    TEST_CASE_TEMPLATE(
        "stretches that are folded beside each other, and joined, make the host's outputs, whatever the gates", T,
        __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        for (head_dims const dim : core_dims) {
            index_t const key = dim.key, value = dim.value;
            CAPTURE(key);
            CAPTURE(value);
            for (kind const what : {kind::mild, kind::no_decay, kind::equal_keys, kind::same_keys, kind::beta_1,
                                    kind::beta_2, kind::strong, kind::never}) {
                CAPTURE(static_cast<int>(what));
                auto p = make<T>({1100, 0, 77, 513}, 2, 2, key, value, what, 17);
                p.shape.scan = true;
                p.shape.stretch = 3;
                auto const got = on_gpu<T>(p, false), exact = on_host(p, false);
                check_close(got, exact, most_of<T>(what, key));
                if (got.path == delta_rule_path::tensor_cores)
                    check_roundings<T>(p, got, exact, {cut_at_multiples(p, 3 * 64), cuts::stretches});
                CHECK(on_ranks::same_bits(got.o, on_gpu<T>(p, false).o));
            }
        }
    }
}
