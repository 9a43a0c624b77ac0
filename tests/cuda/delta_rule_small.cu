// SPDX-License-Identifier: Apache-2.0
// Every kernel of the gated delta rule and of a decay a head on few tokens, so that compute-sanitizer is soon through:
// tensor cores against the plain path. Workspaces are not written before.
#include <cpx/cuda/delta_rule_fold.hpp>
#include <cpx/cuda/delta_rule_step.hpp>
#include <cpx/cuda/gated_delta_rule.hpp>

#include "gpus.hpp"
#include "packed_heads.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace {

using namespace packed_heads;
namespace gpu = cpx::cuda;

/// A problem on a device, its results there, and the calls of one member of the family.
template <class T, bool Erases>
class small {
public:
    explicit small(problem const& p) : p_(p) {}

    results forward(gated_delta_rule_shape const& shape) {
        index_t const tokens = p_.tokens(), sequences = p_.sequences();
        auto const o = poisoned<T>(p_.v.size());
        auto const last = poisoned<float>(p_.state.size());
        rows<T> const to(o.data(), tokens, p_.values());
        results r;
        if constexpr (Erases) {
            saved_ = buffer<char>(gpu::gated_delta_rule_saved<T>(shape, tokens, sequences));
            buffer<char> const space(gpu::gated_delta_rule_workspace<T>(shape, tokens, sequences, saves()));
            r.path = gpu::gated_delta_rule<T>(shape, input(true), to, all(last), all(space), stream_);
            stream_.synchronize();
        } else {
            buffer<char> const space(gpu::gated_delta_rule_workspace<T, gpu::erases::no>(shape, tokens, sequences));
            r.path = gpu::gated_delta_rule<T, gpu::erases::no>(shape, input(), to, all(last), all(space), stream_);
            stream_.synchronize();
        }
        r.o = widen(o.read()), r.last = widen(last.read());
        return r;
    }

    /// In one call, or begun before gradients of states after sequences are known, with what outputs alone make of
    /// those before or without.
    enum class manner { at_once, begun, folded };

    /// `saves`: from what the forward before has saved, where something is erased.
    void backward(gated_delta_rule_shape const& shape, bool saves, manner how, results& r) const {
        index_t const tokens = p_.tokens(), sequences = p_.sequences();
        auto const dq = poisoned<T>(p_.q.size()), dk = poisoned<T>(p_.q.size()), dv = poisoned<T>(p_.v.size());
        auto const dg = poisoned<float>(p_.g.size()), dbeta = poisoned<float>(p_.g.size()),
                   dstate = poisoned<float>(p_.state.size());
        rows<T> const of_q(dq.data(), tokens, p_.keys()), of_k(dk.data(), tokens, p_.keys()),
            of_v(dv.data(), tokens, p_.values());
        rows<float> const of_g(dg.data(), tokens, heads()), of_beta(dbeta.data(), tokens, heads());
        rows<T const> const of_o(dout_.data(), tokens, p_.values());
        if constexpr (Erases) {
            saves = saves && this->saves();
            buffer<char> const space(gpu::gated_delta_rule_backward_workspace<T>(shape, tokens, sequences, saves));
            run_backward(shape, input(saves), of_o, {of_q, of_k, of_v, of_g, of_beta, all(dstate)}, space, how);
            r.dbeta = widen(dbeta.read());
        } else {
            buffer<char> const space(
                gpu::gated_delta_rule_backward_workspace<T, gpu::erases::no>(shape, tokens, sequences));
            run_backward(shape, input(), of_o, {of_q, of_k, of_v, of_g, {}, all(dstate)}, space, how);
        }
        r.dq = widen(dq.read()), r.dk = widen(dk.read()), r.dv = widen(dv.read());
        r.dg = widen(dg.read()), r.dstate = widen(dstate.read());
    }

    /// Returns the maps and the ends of the sequences' steps, and what outputs alone make the gradients before them.
    std::vector<numbers> fold(gated_delta_rule_shape const& shape) const {
        index_t const tokens = p_.tokens(), sequences = p_.sequences();
        index_t const key = p_.shape.key_dim;
        auto const maps = poisoned<float>(static_cast<std::size_t>(sequences * heads() * (Erases ? key * key : 1)));
        auto const ends = poisoned<float>(p_.state.size()), back = poisoned<float>(p_.state.size());
        rows<T const> const of_o(dout_.data(), tokens, p_.values());
        auto in = input();
        in.state = {};
        constexpr auto of = Erases ? gpu::erases::yes : gpu::erases::no;
        buffer<char> const space(gpu::gated_delta_rule_fold_workspace<T, of>(shape, tokens, sequences));
        gpu::gated_delta_rule_fold<T, of>(shape, in, all(maps), all(ends), all(space), stream_);
        gpu::gated_delta_rule_backward_fold<T, of>(shape, in, of_o, all(back), all(space), stream_);
        stream_.synchronize();
        return {widen(maps.read()), widen(ends.read()), widen(back.read())};
    }

private:
    void run_backward(gated_delta_rule_shape const& shape, gpu::gated_delta_rule_input<T> const& in, rows<T const> dout,
                      gpu::gated_delta_rule_gradients<T> const& to, buffer<char> const& space, manner how) const {
        using namespace gpu::detail;
        auto const folded = poisoned<float>(how == manner::folded ? p_.state.size() : 0);
        if (how == manner::at_once) {
            gpu::gated_delta_rule_backward<T, Erases ? gpu::erases::yes : gpu::erases::no>(shape, in, dout, all(dlast_),
                                                                                           to, all(space), stream_);
        } else {
            delta_begun const begun{true, 100};
            auto const places = delta_backward_space<Erases, T>(shape, p_.tokens(), p_.sequences(), !in.saved.empty());
            delta_call<Erases, T> const call{shape, in, places, space.data(), stream_, cpx::caller::here()};
            launch_delta_hopper_backward_begin(call, dout, to, all(folded));
            launch_delta_hopper_walks(call, dout, all(dlast_), to, begun);
            launch_delta_hopper_gradients(call, dout, to, begun);
        }
        stream_.synchronize();
    }
    index_t heads() const { return p_.shape.value_heads; }
    bool saves() const { return saved_.size() > 0; }
    auto input(bool saves = false) const {
        index_t const tokens = p_.tokens();
        rows<T const> const q(q_.data(), tokens, p_.keys()), k(k_.data(), tokens, p_.keys()),
            v(v_.data(), tokens, p_.values());
        rows<float const> const g(g_.data(), tokens, heads()), beta(beta_.data(), tokens, heads());
        if constexpr (Erases)
            return gpu::gated_delta_rule_input<T>{
                q, k, v, g, beta, all(offsets_), all(state_), {}, {}, saves ? all(saved_) : std::span<char>()};
        else
            return gpu::gated_delta_rule_input<T>{q, k, v, g, {}, all(offsets_), all(state_)};
    }

    problem const& p_;
    gpu::stream stream_;
    buffer<T> q_ = upload<T>(p_.q), k_ = upload<T>(p_.k), v_ = upload<T>(p_.v), dout_ = upload<T>(p_.dout);
    buffer<float> g_ = upload<float>(p_.g), beta_ = upload<float>(p_.beta), state_ = upload<float>(p_.state),
                  dlast_ = upload<float>(p_.dlast);
    buffer<index_t> offsets_{std::span<index_t const>(p_.offsets)};
    buffer<char> saved_;
};

/// Checks the two paths of a member against each other.
template <class T, bool Erases>
void check_paths(problem const& p) {
    small<T, Erases> of(p);
    auto plain = p.shape;
    plain.path = delta_rule_path::plain;
    auto expected = of.forward(plain);
    using manner = typename small<T, Erases>::manner;
    of.backward(plain, false, manner::at_once, expected);
    auto const folded = of.fold(plain);
    for (index_t const stretch : {index_t{0}, index_t{2}})
        for (bool const scan : {false, true}) {
            CAPTURE(stretch);
            CAPTURE(scan);
            auto shape = p.shape;
            shape.stretch = stretch, shape.scan = scan;
            auto got = of.forward(shape);
            CHECK(got.path == core_path<T>());
            for (manner const how : {manner::at_once, scan ? manner::folded : manner::begun}) {
                if (how != manner::at_once && got.path == delta_rule_path::plain) continue; // that has no parts
                of.backward(shape, stretch > 0, how, got);
                check_close(got, expected, finer<T>() * 6e-3, finer<T>() * 6e-3, finer<T>() * 8e-3);
            }
        }
    char const* const names[] = {"maps", "ends", "dstates"};
    for (index_t const stretch : {0, 2}) { // whose steps are joined
        CAPTURE(stretch);
        auto shape = p.shape;
        shape.stretch = stretch;
        auto const got = of.fold(shape);
        for (std::size_t i = 0; i < got.size(); ++i) check_close(names[i], got[i], folded[i], finer<T>() * 6e-3);
    }
}

/// A member of the family and its elements.
template <class T, bool Erases>
struct member {
    using element = T;
    static constexpr bool erases = Erases;
};
using erasing = member<__nv_bfloat16, true>;
using decaying = member<__nv_bfloat16, false>;
using erasing_half = member<__half, true>;
using decaying_half = member<__half, false>;

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE_TEMPLATE("every kernel on few tokens: tensor cores and the plain path are within rounding", Of, erasing,
                       decaying, erasing_half, decaying_half) {
        if (!has_gpus()) return;
        using T = Of::element;
        // So many that the backward walks along both halves of a head in one block, of some heads one after the other;
        // and sequences of more chunks than a walk passes before it says so.
        std::vector<index_t> crowd(80);
        std::fill(crowd.begin() + 50, crowd.end(), 70);
        crowd[3] = 600, crowd[40] = 64, crowd[63] = 1;
        for (head_dims const dim : core_dims) {
            CAPTURE(dim.key);
            CAPTURE(dim.value);
            check_paths<T, Of::erases>(make<T>({65, 0, 200, 64, 600}, 1, 2, dim.key, dim.value, kind::mild, 31));
            check_paths<T, Of::erases>(make<T>(crowd, 1, 1, dim.key, dim.value, kind::mild, 32));
        }
    }

    TEST_CASE("gradients of parameters of log decays on few tokens: the paths are within rounding") {
        if (!has_gpus()) return;
        using element = __nv_bfloat16;
        auto const p = make<element>({65, 0, 130}, 1, 2, 128, 128, kind::mild, 34);
        device_problem<element> const there{p};
        index_t const tokens = p.tokens();
        buffer<element> const a = upload<element>(slice(p.v, 1, 0, 2 * tokens));
        buffer<float> const a_log = upload<float>({-2, 0.5}), dt_bias = upload<float>({0.5, -1});
        auto in = there.erasing();
        in.g = {}, in.g_of = {{a.data(), tokens, 2}, all(a_log), all(dt_bias)};
        gpu::stream const stream;
        auto const gradients = [&](delta_rule_path path) {
            auto shape = p.shape;
            shape.path = path;
            auto const dq = poisoned<element>(p.q.size()), dk = poisoned<element>(p.q.size()),
                       dv = poisoned<element>(p.v.size()), da = poisoned<element>(p.g.size());
            auto const dbeta = poisoned<float>(p.g.size()), sums = poisoned<float>(4);
            buffer<char> const space(gpu::gated_delta_rule_backward_workspace<element>(shape, tokens, 3));
            gpu::gated_delta_rule_backward<element>(
                shape, in, there.gradients(), all(there.dlast),
                {.dq = {dq.data(), tokens, p.keys()},
                 .dk = {dk.data(), tokens, p.keys()},
                 .dv = {dv.data(), tokens, p.values()},
                 .dg = rows<float>(),
                 .dbeta = {dbeta.data(), tokens, 2},
                 .dg_of = {{da.data(), tokens, 2}, all(sums).first(2), all(sums).last(2)}},
                all(space), stream);
            stream.synchronize();
            return std::pair(widen(da.read()), widen(sums.read()));
        };
        auto const got = gradients(core_path()), expected = gradients(delta_rule_path::plain);
        check_close("da", got.first, expected.first, 8e-3);
        check_close("da_log and ddt_bias", got.second, expected.second, 8e-3);
    }

    TEST_CASE("a step of decoding of few sequences is the plain path's of one token each") {
        if (!has_gpus()) return;
        using element = __nv_bfloat16;
        auto const p = make<element>({1, 1, 1}, 1, 2, 128, 128, kind::mild, 33);
        auto plain = p.shape;
        plain.path = delta_rule_path::plain;
        auto const expected = small<element, true>(p).forward(plain);
        gpu::stream const stream;
        buffer<element> const q = upload<element>(p.q), k = upload<element>(p.k), v = upload<element>(p.v),
                              o = poisoned<element>(p.v.size());
        buffer<float> const g = upload<float>(p.g), beta = upload<float>(p.beta), states = upload<float>(p.state);
        gpu::gated_delta_rule_step<element>(p.shape,
                                            {{q.data(), 3, p.keys()},
                                             {k.data(), 3, p.keys()},
                                             {v.data(), 3, p.values()},
                                             {g.data(), 3, 2},
                                             {beta.data(), 3, 2}},
                                            rows<element>(o.data(), 3, p.values()), all(states), stream);
        stream.synchronize();
        check_close("o", widen(o.read()), expected.o, 3e-3);
        check_close("states", widen(states.read()), expected.last, 1e-5);
    }
}
