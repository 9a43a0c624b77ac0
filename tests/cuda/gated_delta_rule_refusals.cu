// SPDX-License-Identifier: Apache-2.0
#include <cpx/cuda/delta_rule_fold.hpp>

#include "delta_rule_call.hpp"

#include <support/rejects.hpp>

#include <algorithm>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

namespace {

using namespace packed_delta_rule;

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("no room is named for sizes that no call takes") { // without a GPU, too
        auto const refused = [](std::initializer_list<std::string> words, gpu::gated_delta_rule_shape const& shape,
                                index_t tokens, index_t sequences) {
            auto const rejects = [&](char const* name, auto&& f) {
                std::vector<std::string> all(words);
                all.insert(all.end(), {"gated_delta_rule_refusals.cu", name});
                support::rejects(all, f);
            };
            rejects("gated_delta_rule_workspace",
                    [&] { static_cast<void>(gpu::gated_delta_rule_workspace<float>(shape, tokens, sequences)); });
            rejects("gated_delta_rule_backward_workspace", [&] {
                static_cast<void>(gpu::gated_delta_rule_backward_workspace<float>(shape, tokens, sequences));
            });
            rejects("gated_delta_rule_saved",
                    [&] { static_cast<void>(gpu::gated_delta_rule_saved<float>(shape, tokens, sequences)); });
            rejects("gated_delta_rule_fold_workspace",
                    [&] { static_cast<void>(gpu::gated_delta_rule_fold_workspace<float>(shape, tokens, sequences)); });
        };
        refused({"tokens: expected at least 0, got -1"}, {}, -1, 1);
        refused({"tokens: expected less than 2^31 - 128, got 2147483520"}, {}, 2147483520, 1);
        refused({"sequences: expected from 0 to 65535, got -5"}, {}, 10, -5);
        refused({"sequences", "got 65536"}, {}, 10, 65536);
        refused({"key heads: expected at least 1, got 0"}, {.key_heads = 0}, 10, 1);
        refused({"value heads: expected at least 1, got 0"}, {.value_heads = 0}, 10, 1);
        refused({"value heads: expected a multiple of the key heads, 2, got 3"}, {2, 3}, 10, 1);
        refused({"value heads: expected at most 65535, got 1099511627776"}, {1, index_t{1} << 40}, 10, 1);
        refused({"key_dim: expected from 1 to 256, got 257"}, {.key_dim = 257}, 10, 1);
        refused({"value_dim: expected from 1 to 65536, got 0"}, {.value_dim = 0}, 10, 1);
        refused({"stretch"}, {.stretch = -1}, 10, 1);
        refused({"elements of chunks' states or values: expected at most 2^57, got 33685499 times 1099494850560"},
                {1, 65535, 256, 65536}, 2147483519, 65535);
        refused({"elements of chunks' states or values: expected at most 2^57, got 33554431 times 274873712640"},
                {1, 65535, 1, 65536}, 2147483519, 1);
        CHECK(gpu::gated_delta_rule_workspace<float>({}, 0, 0) > 0);
    }

    TEST_CASE("a gated delta rule refuses what does not fit before anything is launched") {
        if (!has_gpus()) return;
        auto const p = make<float>({10}, 1, 1, 8, 8, kind::mild, 1);
        auto const changed = [&](auto&& change) {
            problem other = p;
            change(other);
            return other;
        };
        support::rejects({"gated_delta_rule", "value heads", "a multiple of the key heads, 2"},
                         [&] { on_gpu<float>(changed([](problem& o) { o.shape.key_heads = 2; }), false); });
        support::rejects({"key_dim", "from 1 to 256", "512"},
                         [&] { on_gpu<float>(changed([](problem& o) { o.shape.key_dim = 512; }), false); });
        support::rejects({"value heads", "at most 65535", "65536"}, [&] {
            gpu::gated_delta_rule_shape const many{.key_heads = 1, .value_heads = 65536, .key_dim = 8, .value_dim = 1};
            buffer<float> const key(8), values(65536), gate(65536);
            buffer<index_t> const ends{std::span<index_t const>(std::vector<index_t>{0, 1})};
            rows<float const> const keys(key.data(), 1, 8), value(values.data(), 1, 65536), g(gate.data(), 1, 65536);
            gpu::gated_delta_rule<float>(many, {keys, keys, value, g, g, all(ends)}, {values.data(), 1, 65536}, {}, {},
                                         nullptr);
        });
        support::rejects({"gated_delta_rule", "stretch", "from 0 to 2^24 chunks", "4294967296"}, [&] {
            static_cast<void>(gpu::gated_delta_rule_workspace<__nv_bfloat16>({.stretch = index_t{1} << 32}, 10, 1));
        });
        support::rejects({"stretch", "-1"},
                         [&] { on_gpu<float>(changed([](problem& o) { o.shape.stretch = -1; }), false); });
        support::rejects({"size of state"},
                         [&] { on_gpu<float>(changed([](problem& o) { o.state.pop_back(); }), false); });
        buffer<index_t> const offsets{std::span<index_t const>(std::vector<index_t>{0, 0})};
        support::rejects({"bytes of workspace", "at least"}, [&] {
            cpx::cuda::gated_delta_rule<float>(p.shape, {.offsets = all(offsets)}, rows<float>(), {}, {}, nullptr);
        });

        index_t const saved = cpx::cuda::gated_delta_rule_saved<__nv_bfloat16>({}, 10, 1); // 0 on other GPUs
        buffer<char> const room(std::max<index_t>(saved - 1, 0));
        if (saved > 0)
            support::rejects({"bytes of saved", "at least " + std::to_string(saved)}, [&] {
                buffer<__nv_bfloat16> const x(10 * 128), o(10 * 128);
                buffer<float> const gate(10);
                buffer<index_t> const ends{std::span<index_t const>(p.offsets)};
                rows<__nv_bfloat16 const> const in(x.data(), 10, 128);
                rows<float const> const gates(gate.data(), 10, 1);
                buffer<char> const all_space(cpx::cuda::gated_delta_rule_workspace<__nv_bfloat16>({}, 10, 1));
                cpx::cuda::gated_delta_rule<__nv_bfloat16>(
                    {},
                    {.q = in, .k = in, .v = in, .g = gates, .beta = gates, .offsets = all(ends), .saved = all(room)},
                    {o.data(), 10, 128}, {}, all(all_space), nullptr);
            });

        buffer<index_t> const ends{std::span<index_t const>(p.offsets)};
        buffer<float> const some(80), other(80), third(80), gates(10), more_gates(20);
        buffer<char> const space(cpx::cuda::gated_delta_rule_backward_workspace<float>(p.shape, 10, 1));
        auto const wide = [](buffer<float> const& b) { return rows<float>(b.data(), 10, 8); };
        rows<float> const gate(gates.data(), 10, 1), dg(more_gates.data(), 10, 1, 2),
            dbeta(more_gates.data() + 1, 10, 1, 2);
        cpx::cuda::gated_delta_rule_input<float> const in{wide(some), wide(some), wide(some), gate, gate, all(ends)};
        auto const backward = [&](rows<float> dout, rows<float> dk, rows<float> of_beta) {
            cpx::cuda::gated_delta_rule_backward<float>(p.shape, in, rows<float const>(dout), {},
                                                        {wide(other), dk, wide(third), dg, of_beta}, all(space),
                                                        nullptr);
        };
        support::rejects({"gated_delta_rule_refusals.cu", "cuda::gated_delta_rule: overlap of o and q: expected none"},
                         [&] { cpx::cuda::gated_delta_rule<float>(p.shape, in, wide(some), {}, all(space), nullptr); });
        support::rejects({"gated_delta_rule_backward: overlap of dq and dk"},
                         [&] { backward(wide(some), wide(other), dbeta); });
        support::rejects({"overlap of dv and dout"}, [&] { backward(wide(third), wide(buffer<float>(80)), dbeta); });
        support::rejects({"overlap of dg and dbeta"}, [&] { backward(wide(some), wide(buffer<float>(80)), dg); });
    }
    TEST_CASE("a gated delta rule refuses what is not where tensor cores or the sequences want it") {
        if (!has_gpus()) return;
        using T = __nv_bfloat16;
        using support::rejects;
        auto const p = make<T>({70, 30}, 1, 1, 64, 64, kind::mild, 2);
        device_problem<T> const there{p};
        index_t const n = p.rows(), saved_bytes = gpu::gated_delta_rule_saved<T>(p.shape, n, 2);
        buffer<char> const space(256 + std::max({gpu::gated_delta_rule_workspace<T>(p.shape, n, 2),
                                                 gpu::gated_delta_rule_backward_workspace<T>(p.shape, n, 2),
                                                 gpu::gated_delta_rule_fold_workspace<T>(p.shape, n, 2)})),
            saved(256 + saved_bytes);
        buffer<T> const x(80 * n), o(80 * n), dq(80 * n), dk(80 * n), dv(80 * n);
        buffer<float> const dg(n), dbeta(n), maps(2 * 64 * 64), ends(2 * 64 * 64);
        auto const wide = [&](buffer<T> const& b, index_t stride = 64) { return rows<T>(b.data(), n, 64, stride); };
        auto const in = there.erasing();
        auto const with = [&](auto&& change) {
            auto other = in;
            change(other);
            return other;
        };
        using input = gpu::gated_delta_rule_input<T>;
        struct {
            input in;
            std::vector<std::string> words;
        } const wrong[] = {
            {with([](input& i) { i.offsets = {}; }), {"size of offsets: expected from 1 to 65536, got 0"}},
            {with([](input& i) { i.first = i.offsets; }), {"size of first: expected 2, got 3"}},
            {with([](input& i) { i.counts = i.offsets; }), {"size of counts: expected 2, got 3"}},
            {with([](input& i) { i.state = i.state.subspan(1); }), {"size of state: expected 8192, got 8191"}},
            {with([&](input& i) { i.q = rows<T const>(i.q.data(), n - 1, 64); }), {"shape of q"}},
            {with([&](input& i) { i.beta = {}; }), {"shape of beta"}}};
        auto const forward = [&](input const& given, rows<T> to, std::span<char> room) {
            gpu::gated_delta_rule<T>(p.shape, given, to, {}, room, nullptr);
        };
        auto const backward = [&](input const& given, rows<T> of_q, std::span<char> room, std::span<float> dlast = {},
                                  std::span<float> dstate = {}) {
            gpu::gated_delta_rule_backward<T>(
                p.shape, given, there.gradients(), dlast,
                {of_q, wide(dk), wide(dv), {dg.data(), n, 1}, {dbeta.data(), n, 1}, dstate}, room, nullptr);
        };
        auto const fold = [&](input const& given, std::span<float> m, std::span<float> e, std::span<char> room) {
            gpu::gated_delta_rule_fold<T>(p.shape, given, m, e, room, nullptr);
        };
        auto const fold_back = [&](input const& given, std::span<float> d, std::span<char> room) {
            gpu::gated_delta_rule_backward_fold<T>(p.shape, given, there.gradients(), d, room, nullptr);
        };
        for (auto const& call : wrong) {
            auto const named = [&](std::string const& name) {
                auto words = call.words;
                words.push_back("cuda::gated_delta_rule" + name + ": ");
                return words;
            };
            rejects(named(""), [&] { forward(call.in, wide(o), all(space)); });
            rejects(named("_backward"), [&] { backward(call.in, wide(dq), all(space)); });
            rejects(named("_fold"), [&] { fold(call.in, all(maps), all(ends), all(space)); });
            rejects(named("_backward_fold"), [&] { fold_back(call.in, all(ends), all(space)); });
        }

        auto const off = all(space).subspan(16);
        rejects({"address of workspace: expected a multiple of 256"}, [&] { forward(in, wide(o), off); });
        rejects({"address of workspace: expected a multiple of 256"}, [&] { backward(in, wide(dq), off); });
        rejects({"address of workspace: expected a multiple of 256"}, [&] { fold(in, all(maps), all(ends), off); });
        rejects({"address of workspace: expected a multiple of 256"}, [&] { fold_back(in, all(ends), off); });
        rejects({"shape of o"}, [&] { forward(in, rows<T>(o.data(), n, 63), all(space)); });
        rejects({"shape of dq"}, [&] { backward(in, rows<T>(dq.data(), n, 63), all(space)); });
        rejects({"size of dlast: expected 8192, got 5"},
                [&] { backward(in, wide(dq), all(space), all(maps).subspan(0, 5)); });
        rejects({"size of dstate: expected 8192, got 5"},
                [&] { backward(in, wide(dq), all(space), {}, all(maps).subspan(0, 5)); });
        rejects({"size of maps: expected 8192, got 8191"},
                [&] { fold(in, all(maps).subspan(1), all(ends), all(space)); });
        rejects({"size of ends: expected 8192, got 8191"},
                [&] { fold(in, all(maps), all(ends).subspan(1), all(space)); });
        rejects({"overlap of maps and ends"}, [&] { fold(in, all(maps), all(maps), all(space)); });
        rejects({"dstates: expected one for each sequence, got none"}, [&] { fold_back(in, {}, all(space)); });
        rejects({"size of dstates"}, [&] { fold_back(in, all(ends).subspan(1), all(space)); });

        if (saved_bytes == 0) return; // the plain path takes any rows and saves nothing
        auto const saving = [&](std::span<char> room, index_t tokens = -1) {
            return with([&](input& i) { i.saved = room, i.saved_tokens = tokens; });
        };
        auto const room = all(saved).subspan(0, static_cast<std::size_t>(saved_bytes));
        rejects({"cuda::gated_delta_rule: address of saved: expected a multiple of 256"},
                [&] { forward(saving(all(saved).subspan(16)), wide(o), all(space)); });
        rejects({"cuda::gated_delta_rule_backward: address of saved: expected a multiple of 256"},
                [&] { backward(saving(all(saved).subspan(16)), wide(dq), all(space)); });
        rejects({"saved_tokens: expected some, where there is something saved, got 0"},
                [&] { forward(saving(room, 0), wide(o), all(space)); });
        rejects({"cuda::gated_delta_rule: rows: expected at multiples of 16 bytes, or nothing saved"},
                [&] { forward(saving(room), wide(o, 68), all(space)); });
        rejects({"cuda::gated_delta_rule_backward: rows: expected at multiples of 16 bytes, or shape.path = plain"},
                [&] { backward(in, wide(dq, 68), all(space)); });
        rejects({"cuda::gated_delta_rule_fold: saved: expected none"},
                [&] { fold(saving(room), all(maps), all(ends), all(space)); });
        rejects({"cuda::gated_delta_rule_backward_fold: saved: expected none"},
                [&] { fold_back(saving(room), all(ends), all(space)); });
        // rows that the copy engine cannot describe take the plain path
        auto const one = make<T>({1}, 1, 1, 64, 64, kind::mild, 3);
        device_problem<T> const there_too{one};
        auto far = there_too.erasing();
        far.v = rows<T const>(far.v.data(), 1, 64, index_t{1} << 39);
        gpu::stream const stream;
        CHECK(gpu::gated_delta_rule<T>(one.shape, far, rows<T>(o.data(), 1, 64), {}, all(space), stream) ==
              delta_rule_path::plain);
        stream.synchronize();
    }
}
