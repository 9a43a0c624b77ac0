// SPDX-License-Identifier: Apache-2.0
// The order in which ranks on devices run segments, and where states lie meanwhile, in the host's memory
// (cpx/ops/cuda/state_exchange.hpp beside this file): results of one rank on any sharding, by either carry, at once and
// in parts, also where final states take the place of initial ones.
#include <cpx/ops/cuda/recurrence_pass.hpp>

#include <cpx/ops/local/kimi_delta.hpp>
#include <cpx/ops/local/linear_attention.hpp>
#include <cpx/ops/recurrence.hpp>

#include <doctest/doctest.h>

#include <ops/on_ranks.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using cpx::index_t, cpx::rows, cpx::section;
using device = cpx::cuda::state_exchange;
using segments = cpx::cuda::recurrence_segments;
using floats = std::vector<float>;

/// Whether forwards and backwards are in parts, and final states and their gradients' in the place of others. `odd`:
/// backwards of an odd number of segments alone.
struct manner {
    bool parts = false, backward_parts = false, in_place = false, odd = false;
};

std::array<std::atomic<int>, 4> begun;  // backwards, by what was known of gradients of states
std::atomic<int> kept_found, none_kept; // backwards of what a forward had kept, and of what no call had run alone

/// A recurrence of the host's as one on devices. Every state head has heads of its own of all inputs.
template <class Base>
class on_device {
public:
    static constexpr std::size_t N = cpx::recurrence_inputs<Base>;
    using inputs_of = std::array<rows<float const>, N>;
    using gradients_of = std::array<rows<float>, N>;
    using given = std::span<float const>;
    using made = std::span<float>;
    using kept = std::span<char>;

    struct parts {
        segments of;
        given before;
        inputs_of x;
        rows<float> o;
    };
    struct backward_parts {
        segments of;
        given before;
        inputs_of x;
        rows<float const> dout;
        gradients_of dx;
        given dafter = {};
    };

    char const* name = "on_device";

    on_device(Base const& base, manner how) : base_(base), how_(how), shape_(base.states()) {}
    cpx::state_shape states() const { return shape_; }
    auto inputs() const { return base_.inputs(); }
    bool has_parts(inputs_of const&, rows<float>) const { return how_.parts; }
    bool has_backward_parts(inputs_of const&, rows<float const>, gradients_of const&, index_t count) const {
        return how_.backward_parts && (count % 2 == 1 || !how_.odd);
    }
    /// What a forward keeps says where the segments begin that it ran, in their order.
    index_t kept_bytes(inputs_of const&, rows<float>, index_t count, index_t) const {
        return count * static_cast<index_t>(sizeof(index_t));
    }
    bool states_first(inputs_of const&, index_t, index_t exchanges, bool by_scan) const {
        return by_scan || exchanges > 1;
    }

    void forward(segments const& s, inputs_of const& x, given before, rows<float> o, made after, kept to, device&,
                 cpx::caller) const {
        require_apart(before, after);
        keep(s, to);
        each(s, [&](std::size_t i, index_t h) {
            floats state = start(before, i, h), out(static_cast<std::size_t>(s.counts[i] * shape_.values));
            rows<float> const unseen(out.data(), s.counts[i], shape_.values);
            base_.forward(of_head(x, s, i, h), s.first[i], rows(state.data(), shape_.keys, shape_.values),
                          o.data() ? output(o, s, i, h) : unseen);
            if (!after.empty()) std::ranges::copy(state, after.data() + place(i, h));
        });
    }
    void fold(segments const& s, inputs_of const& x, made maps, made ends, device&, cpx::caller) const {
        require_apart(maps, ends);
        std::ranges::fill(maps, 0.0f), std::ranges::fill(ends, 0.0f);
        index_t const map_rows = shape_.map_rows(), map_columns = shape_.map_columns();
        each(s, [&](std::size_t i, index_t h) {
            float* const map = maps.data() + (static_cast<index_t>(i) * shape_.heads + h) * map_rows * map_columns;
            base_.fold(of_head(x, s, i, h), s.first[i], state_of(ends, i, h), rows(map, map_rows, map_columns));
        });
    }
    void backward(segments const& s, inputs_of const& x, given before, rows<float const> dout, given dafter,
                  gradients_of const& dx, made dbefore, kept from, device&, cpx::caller) const {
        require_kept(s, from);
        go_back(s, x, before, dout, dafter, dx, dbefore);
    }
    void backward_fold(segments const& s, inputs_of const& x, rows<float const> dout, made dbefore, device&,
                       cpx::caller) const {
        std::ranges::fill(dbefore, 0.0f);
        each(s, [&](std::size_t i, index_t h) {
            base_.backward_fold(of_head(x, s, i, h), s.first[i], output(dout, s, i, h), state_of(dbefore, i, h));
        });
    }

    parts begin(segments const& s, inputs_of const& x, given before, rows<float> o, cpx::cuda::states_before, kept to,
                device&, cpx::caller) const {
        keep(s, to);
        return {s, before, x, o};
    }
    void totals(parts& p, made maps, made ends, device& by, cpx::caller here) const {
        fold(p.of, p.x, maps, ends, by, here);
    }
    void states(parts& p, given before, made after, device& by, cpx::caller here) const {
        p.before = before;
        forward(p.of, p.x, before, {}, after, {}, by, here);
    }
    /// Reads the states again that were given then.
    void outputs(parts& p, device& by, cpx::caller here) const { forward(p.of, p.x, p.before, p.o, {}, {}, by, here); }
    backward_parts begin_backward(segments const& s, inputs_of const& x, given before, rows<float const> dout,
                                  gradients_of const& dx, cpx::cuda::states_before known, made folded, kept from,
                                  device& by, cpx::caller here) const {
        require_kept(s, from);
        ++begun[static_cast<std::size_t>(known)];
        bool const by_steps = known == cpx::cuda::states_before::by_steps;
        cpx::require(by_steps != folded.empty(), "test", "folded", "some by steps alone", folded.size());
        if (by_steps) backward_fold(s, x, dout, folded, by, here);
        return {s, before, x, dout, dx};
    }
    void dstates(backward_parts& p, given dafter, made dbefore, device&, cpx::caller) const {
        p.dafter = dafter;
        go_back(p.of, p.x, p.before, p.dout, dafter, p.dx, dbefore);
    }
    void gradients(backward_parts& p, device&, cpx::caller) const {
        go_back(p.of, p.x, p.before, p.dout, p.dafter, p.dx, {});
    }

private:
    void go_back(segments const& s, inputs_of const& x, given before, rows<float const> dout, given dafter,
                 gradients_of const& dx, made dbefore) const {
        require_apart(before, dbefore), require_apart(dafter, dbefore);
        each(s, [&](std::size_t i, index_t h) {
            floats state = start(dafter, i, h);
            base_.backward(of_head(x, s, i, h), s.first[i], state_of(before, i, h), output(dout, s, i, h),
                           rows(state.data(), shape_.keys, shape_.values), of_head(dx, s, i, h));
            if (!dbefore.empty()) std::ranges::copy(state, dbefore.data() + place(i, h));
        });
    }
    static std::span<char const> starts_of(segments const& s) {
        auto const bytes = std::as_bytes(s.offsets.first(s.first.size()));
        return {reinterpret_cast<char const*>(bytes.data()), bytes.size()};
    }
    static void keep(segments const& s, kept to) {
        if (!to.empty()) std::ranges::copy(starts_of(s), to.begin());
    }
    static void require_kept(segments const& s, kept from) {
        ++(from.empty() ? none_kept : kept_found);
        cpx::require(from.empty() || std::ranges::equal(starts_of(s), from), "test", "kept", "of these segments",
                     "of others");
    }
    static void require_apart(given a, given b) {
        bool const overlap = a.data() < b.data() + b.size() && b.data() < a.data() + a.size();
        cpx::require(a.empty() || b.empty() || !overlap, "test", "overlap of states", "none", "some");
    }
    template <class F>
    void each(segments const& s, F&& f) const {
        for (std::size_t i = 0; i < s.first.size(); ++i)
            for (index_t h = 0; h < shape_.heads; ++h) f(i, h);
    }
    index_t place(std::size_t segment, index_t head) const {
        return (static_cast<index_t>(segment) * shape_.heads + head) * shape_.keys * shape_.values;
    }
    template <class A>
    rows<A> state_of(std::span<A> all, std::size_t segment, index_t head) const {
        return {all.data() + place(segment, head), shape_.keys, shape_.values};
    }
    floats start(given states, std::size_t segment, index_t head) const {
        floats state(static_cast<std::size_t>(shape_.keys * shape_.values));
        if (!states.empty()) std::copy_n(states.data() + place(segment, head), std::ssize(state), state.data());
        return state;
    }
    template <class A>
    auto of_head(std::array<rows<A>, N> x, segments const& s, std::size_t segment, index_t head) const {
        auto const names = base_.inputs();
        for (std::size_t i = 0; i < N; ++i)
            x[i] = x[i].sub(s.offsets[segment], s.counts[segment]).columns(head * names[i].width, names[i].width);
        return x;
    }
    template <class A>
    rows<A> output(rows<A> o, segments const& s, std::size_t segment, index_t head) const {
        return o.sub(s.offsets[segment], s.counts[segment]).columns(head * shape_.values, shape_.values);
    }

    Base base_;
    manner how_;
    cpx::state_shape shape_;
};

/// As the library's tensors on devices, which want CUDA.
struct saved_states {
    struct what_is_kept {
        std::vector<std::size_t> segments;
        cpx::cuda::block<char> memory;
        bool stale = false;
    };
    cpx::cuda::block<float> starts, maps;
    std::uint64_t of = 0;
    bool keeps = false;
    std::vector<what_is_kept> kept;
};
template <class R>
struct tensors {
    using state = float;
    typename R::inputs_of x;
    rows<float> o;
    rows<float const> initial;
    rows<float> final;
    saved_states* saved;
};
template <class R>
struct gradients {
    rows<float const> dout;
    typename R::gradients_of dx;
    rows<float const> dfinal;
    rows<float> dinitial;
};

template <class Base>
struct problem {
    cpx::thd batch;
    Base base;
    floats x = {}, dout = {}, initial = {}, dfinal = {}; ///< the last two empty: none

    std::vector<section> inputs() const {
        std::vector<section> list;
        for (auto const& input : base.inputs()) list.push_back({input.heads, input.width});
        return list;
    }
    std::vector<section> outputs() const { return {{base.states().heads, base.states().values}}; }
};
struct results {
    floats of_rows, final, dinitial; ///< of_rows: o, then dx
};

/// The columns of each input, `first` columns on.
template <std::size_t N, class A>
std::array<rows<A>, N> parted(rows<A> all, std::vector<section> const& sections, index_t first = 0) {
    std::array<rows<A>, N> parts;
    for (std::size_t i = 0; i < N; ++i) {
        index_t const width = sections[i].heads * sections[i].width;
        parts[i] = all.columns(std::exchange(first, first + width), width);
    }
    return parts;
}

/// Runs a problem forward and back on a sharding.
template <class How, class Base, class S>
results run(problem<Base> const& p, S const& sharding, manner how) {
    using model = on_device<Base>;
    auto const inputs = p.inputs(), outputs = p.outputs();
    auto both = outputs;
    both.insert(both.end(), inputs.begin(), inputs.end());
    index_t const sequences = p.batch.sequences(), width = p.base.states().state_width();
    results found{{}, floats(static_cast<std::size_t>(sequences * width), NAN), {}};
    found.dinitial = found.final;
    std::mutex guard;
    found.of_rows = on_ranks::assemble<float>(sharding, both, [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const x = on_ranks::take(p.x, inputs, sharding, rank),
                   dout = on_ranks::take(p.dout, outputs, sharding, rank);
        auto to = on_ranks::poisoned<float>(sharding, rank, dout.width() + x.width());
        auto const states = [&](floats const& from) {
            cpx::cuda::block<float> made(sequences * width);
            std::ranges::copy(from, made.data());
            return made;
        };
        auto const view = [&](auto& block) { return rows(block.data(), sequences, width); };
        auto initial = states(p.initial), dfinal = states(p.dfinal), last = states({}), first = states({});
        rows<float const> const none;
        rows<float> const final = how.in_place ? view(initial) : view(last),
                          dinitial = how.in_place ? view(dfinal) : view(first);
        saved_states saved;
        saved.keeps = true;
        model const m(p.base, how);
        tensors<model> const t{parted<model::N>(x.view().data(), inputs), to.view().data().columns(0, dout.width()),
                               p.initial.empty() ? none : view(initial), final, &saved};
        gradients<model> const back{dout.view().data(), parted<model::N>(to.view().data(), inputs, dout.width()),
                                    p.dfinal.empty() ? none : view(dfinal), dinitial};
        auto const plan = cpx::carry<How>(sharding, rank);
        device by(comm);
        using namespace cpx::detail;
        run_recurrence<device_forward<model, tensors<model>>>(plan, m, t, by, cpx::caller::here());
        run_recurrence_backward<device_backward<model, tensors<model>, gradients<model>>>(plan, m, t, back, by,
                                                                                          cpx::caller::here());
        std::lock_guard const lock(guard);
        for (index_t s = 0; s < sequences; ++s) { // of the rank that writes
            auto const writes = [&](cpx::side end) {
                bool own = p.batch.length(s) == 0 && rank == 0;
                for (std::size_t i = 0; i < plan.links.size(); ++i)
                    own = own || (plan.segments[i].sequence == s && plan.links[i].beside(end) == 0);
                return own;
            };
            if (writes(cpx::side::after)) std::copy_n(final.row(s), width, found.final.data() + s * width);
            if (writes(cpx::side::before)) std::copy_n(dinitial.row(s), width, found.dinitial.data() + s * width);
        }
        return to;
    });
    return found;
}

/// Whether all is there and within rounding.
bool close(floats const& got, floats const& expected) {
    float largest = 1e-3f, difference = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        if (!std::isfinite(got[i])) return false;
        largest = std::max(largest, std::abs(expected[i]));
        difference = std::max(difference, std::abs(got[i] - expected[i]));
    }
    return got.size() == expected.size() && difference <= 2e-4f * largest;
}

template <class Base>
void check(Base const& base, std::uint64_t seed) {
    CAPTURE(seed);
    support::splitmix random(seed);
    problem<Base> p{on_ranks::random_batch(random, 4), base};
    auto const some = [&](index_t count) { return on_ranks::uniform<float>(random, count); };
    for (index_t row = 0; row < p.batch.tokens(); ++row)
        for (auto const& input : base.inputs())
            for (float const x : some(input.heads * input.width)) // log decays are not positive, beta not negative
                p.x.push_back(input.name[0] == 'g' ? -std::abs(x) / 5 : input.name[0] == 'b' ? std::abs(x) : x);
    p.dout = some(p.batch.tokens() * base.states().heads * base.states().values);
    bool const given = seed % 3 != 0;
    if (given)
        p.initial = some(p.batch.sequences() * base.states().state_width()), p.dfinal = some(std::ssize(p.initial));
    auto const expected = run<cpx::serial>(p, on_ranks::one_rank(p.batch), {});
    for (int const ranks : {2, 3, 5})
        on_ranks::for_each_sharding(p.batch, ranks, {1, 16}, [&](std::string const& name, auto const& sharding) {
            CAPTURE(name);
            for (manner const how : {manner{},
                                     {true, false, given},
                                     {false, true, given},
                                     {true, true, false},
                                     {true, true, given, true}}) {
                CAPTURE(how.parts);
                CAPTURE(how.in_place);
                for (bool const scan : {false, true}) {
                    CAPTURE(scan);
                    auto const got = scan ? run<cpx::scan>(p, sharding, how) : run<cpx::serial>(p, sharding, how);
                    CHECK(close(got.of_rows, expected.of_rows));
                    CHECK(close(got.final, expected.final));
                    CHECK(close(got.dinitial, expected.dinitial));
                }
            }
        });
}

} // namespace

TEST_SUITE("cuda_on_cpu") {
    TEST_CASE("segments on devices make what one rank makes, and read no state that is not there any more") {
        for (std::uint64_t const seed : {1u, 2u, 3u}) {
            check(cpx::kimi_delta_attention{{1, 1, 8, 8}, {.chunk = 16}}, seed); // whose states lie at multiples of 256
            check(cpx::kimi_delta_attention{{2, 2, 3, 5}, {.chunk = 16}}, seed + 10);
            check(cpx::head_decay_attention{{8, 8, 8, 8}, {.chunk = 16}}, seed + 20);
        }
        for (auto const known : {cpx::cuda::states_before::given, cpx::cuda::states_before::carried,
                                 cpx::cuda::states_before::by_steps, cpx::cuda::states_before::later})
            CHECK(begun[static_cast<std::size_t>(known)] > 0);
        CHECK(kept_found > 10 * none_kept);
    }
}
