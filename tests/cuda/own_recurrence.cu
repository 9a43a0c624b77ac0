// SPDX-License-Identifier: Apache-2.0
// A recurrence of one's own on devices, running totals, on any sharding, with its gradients.
#include <cpx/ops/cuda/recurrence.hpp>

#include <cpx/cuda/elements.hpp>

#include <doctest/doctest.h>

#include "group.hpp"

#include <ops/on_ranks.hpp>
#include <support/rejects.hpp>

namespace {

using cpx::index_t, cpx::rows;
using on_ranks::by_tokens;
using support::lengths, support::rejects;
using floats = std::vector<float>;
namespace cuda = cpx::cuda;

/// Adds up one column of a segment, from its first row or from its last one.
struct add_up {
    cuda::recurrence_segments segments;
    rows<float const> x;
    rows<float> o;
    std::span<float const> before;
    std::span<float> after;
    bool back;
    __device__ void operator()(index_t segment, index_t column) const {
        auto const i = static_cast<std::size_t>(segment), place = static_cast<std::size_t>(i * x.width() + column);
        index_t const first = segments.offsets[i], count = segments.counts[i];
        float sum = before.empty() ? 0 : before[place];
        for (index_t t = 0; t < count; ++t) {
            index_t const row = back ? first + count - 1 - t : first + t;
            sum += x(row, column);
            if (o.data()) o(row, column) = sum;
        }
        if (!after.empty()) after[place] = sum;
    }
};
struct write_ones {
    float* list;
    __device__ void operator()(index_t i, index_t) const { list[i] = 1; }
};

/// S_t = S_{t-1} + x_t, o_t = S_t: the map of every segment is 1.
struct running_total {
    index_t width;
    char const* name = "running_total";

    cpx::state_shape states() const { return {1, 1, width, cpx::map_kind::number}; }
    std::array<cpx::recurrence_input, 1> inputs() const { return {{{"x", 1, width}}}; }
    template <class X, class O>
    void forward(cuda::recurrence_segments const& s, X const& x, std::span<float const> before, O const& o,
                 std::span<float> after, std::span<char>, cuda::state_exchange& by, cpx::caller) const {
        run(by, {s, std::get<0>(x).data(), o.data(), before, after, false});
    }
    template <class X>
    void fold(cuda::recurrence_segments const& s, X const& x, std::span<float> maps, std::span<float> ends,
              cuda::state_exchange& by, cpx::caller) const {
        run(by, {s, std::get<0>(x).data(), {}, {}, ends, false});
        for_each_element(by.memory(), std::ssize(maps), 1, write_ones{maps.data()});
    }
    template <class X, class D, class G>
    void backward(cuda::recurrence_segments const& s, X const&, std::span<float const>, D const& dout,
                  std::span<float const> dafter, G const& dx, std::span<float> dbefore, std::span<char>,
                  cuda::state_exchange& by, cpx::caller) const {
        run(by, {s, dout.data(), std::get<0>(dx).data(), dafter, dbefore, true});
    }
    template <class X, class D>
    void backward_fold(cuda::recurrence_segments const& s, X const&, D const& dout, std::span<float> dbefore,
                       cuda::state_exchange& by, cpx::caller) const {
        run(by, {s, dout.data(), {}, {}, dbefore, true});
    }

private:
    static void run(cuda::state_exchange& by, add_up const& all) {
        for_each_element(by.memory(), std::ssize(all.segments.counts), all.x.width(), all);
    }
};

/// Two state heads that read one head of x.
struct shared_total : running_total {
    cpx::state_shape states() const { return {2, 1, width, cpx::map_kind::number}; }
};

/// Returns what each sequence's states before it and rows add up to, row after row, and leaves the sums in `states`.
floats totals(cpx::thd const& batch, floats const& x, index_t width, floats& states, bool back) {
    floats o(x.size());
    for (index_t s = 0; s < batch.sequences(); ++s)
        for (index_t t = 0; t < batch.length(s); ++t)
            for (index_t c = 0; c < width; ++c) {
                index_t const row = batch.offset(s) + (back ? batch.length(s) - 1 - t : t);
                float& sum = states[static_cast<std::size_t>(s * width + c)];
                o[static_cast<std::size_t>(row * width + c)] = sum += x[static_cast<std::size_t>(row * width + c)];
            }
    return o;
}
floats whole_numbers(index_t count, std::uint64_t seed) {
    support::splitmix numbers(seed);
    floats list(static_cast<std::size_t>(count));
    for (float& x : list) x = static_cast<float>(numbers.between(0, 9));
    return list;
}

/// Runs it forward and backward, of a `state_exchange` or of the communicator alone, and compares with one rank.
template <cpx::carry_kind How>
void check(group& gpus, by_tokens const& sharding, bool prepared) {
    constexpr index_t width = 5;
    cpx::thd const& batch = sharding.batch();
    index_t const states = batch.sequences() * width;
    floats const x = whole_numbers(batch.tokens() * width, 1), dout = whole_numbers(batch.tokens() * width, 2),
                 initial = whole_numbers(states, 3), dfinal = whole_numbers(states, 4);
    floats last = initial, dfirst = dfinal;
    floats const o = totals(batch, x, width, last, false), dx = totals(batch, dout, width, dfirst, true);
    gpus.run([&](cpx::nccl& joined, auto const& meet) {
        cuda::stream const stream;
        {
            cuda::communicator comm(joined, stream);
            cuda::state_exchange by(comm);
            int const rank = comm.rank();
            auto const local = [&](floats const& whole) {
                auto const own = on_ranks::take(whole, {{1, width}}, sharding, rank);
                return floats(own.elements().begin(), own.elements().end());
            };
            auto const tensor = [&](floats const& whole) {
                auto made = cpx::make_tensor<float>(sharding, comm, width);
                made.write(local(whole));
                return made;
            };
            auto const list = [&](floats const& values) {
                auto made = cpx::make_rows<float>(comm, batch.sequences(), width);
                made.write(values);
                return made;
            };
            auto const here = tensor(x), of_o = tensor(dout);
            auto out = tensor(floats(x.size())), to = tensor(floats(x.size()));
            auto const before = list(initial), of_last = list(dfinal);
            auto after = list(floats(initial.size())), of_first = list(floats(initial.size()));
            comm.wait();
            meet();

            running_total const model{width};
            auto const plan = cpx::carry<How>(sharding, rank);
            cpx::recurrence_saved<float, cuda::memory> saved;
            cuda::recurrence_tensors const t{std::tuple(here.view()), out.view(), before.view(), after.view(), &saved};
            cuda::recurrence_gradients const gradients{of_o.view(), std::tuple(to.view()), of_last.view(),
                                                       of_first.view()};
            if (prepared) {
                cpx::recur(plan, model, t, by);
                cpx::recur_backward(plan, model, t, gradients, by);
            } else {
                cpx::recur(plan, model, t, comm);
                comm.wait();
                meet();
                cpx::recur_backward(plan, model, t, gradients, comm);
            }
            cpx::require(out.read() == local(o), "test", "totals", "those of one rank", "others");
            cpx::require(to.read() == local(dx), "test", "their gradients", "those of one rank", "others");
            comm.wait();
            meet();
            cpx::sum_over_ranks(after.elements(), comm); // a rank has those of sequences that end, or begin, there
            cpx::sum_over_ranks(of_first.elements(), comm);
            floats const all_after = after.read(), all_first = of_first.read();
            cpx::require(all_after == last, "test", "final states", "those of one rank", "others");
            cpx::require(all_first == dfirst, "test", "gradients of initial states", "those of one rank", "others");
        }
        meet();
    });
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("a recurrence of one's own runs on devices, on any sharding, with its gradients") {
        if (!has_gpus(2)) return;
        auto const batch = lengths({37, 0, 1, 130, 2, 71});
        group one(1), gpus(2);
        for (bool const prepared : {true, false}) {
            check<cpx::serial>(one, on_ranks::one_rank(batch), prepared);
            for (by_tokens const& sharding :
                 {by_tokens(cpx::shard(batch, cpx::zigzag<>(2))), by_tokens(cpx::shard(batch, cpx::striped<>(2)))}) {
                check<cpx::serial>(gpus, sharding, prepared);
                check<cpx::scan>(gpus, sharding, prepared);
            }
        }
    }

    TEST_CASE("a recurrence of one's own on devices refuses what does not fit, by its name") {
        if (!has_gpus(1)) return;
        group one(1);
        one.run([](cpx::nccl& joined, auto const&) {
            cuda::stream const stream;
            cuda::communicator comm(joined, stream);
            auto const sharding = on_ranks::one_rank(lengths({5}));
            auto x = cpx::make_tensor<float>(sharding, comm, 3), narrow = cpx::make_tensor<float>(sharding, comm, 2);
            floats there(15);
            cpx::sharded const on_the_host(rows(there.data(), 5, 3), sharding, 0, comm.memory());
            auto const refused = [&](std::string const& text, auto const& from, auto const& to) {
                rejects({"own_recurrence.cu", "running_total: " + text}, [&] {
                    cpx::recur(cpx::carry<cpx::serial>(sharding, 0), running_total{3},
                               cuda::recurrence_tensors{std::tuple(from), to}, comm);
                });
            };
            refused("shape of x: expected (5, 3), got (5, 2)", narrow.view(), x.view());
            refused("overlap of o and x", x.view(), x.view());
            refused("o: expected memory of the current device", x.view(), on_the_host);
            auto o = cpx::make_tensor<float>(sharding, comm, 3);
            cpx::recurrence_saved<float, cuda::memory> lent;
            auto const refuses = [&](std::string const& text) {
                rejects({"own_recurrence.cu", "running_total: " + text + ": expected memory of the current device"},
                        [&] {
                            cpx::recur(cpx::carry<cpx::serial>(sharding, 0), running_total{3},
                                       cuda::recurrence_tensors{std::tuple(x.view()), o.view(), {}, {}, &lent}, comm);
                        });
            };
            floats starts(3);
            lent.starts = {starts.data(), 3};
            refuses("saved states");
            std::vector<char> kept(256);
            lent.starts = {};
            lent.kept.push_back({{0}, {kept.data(), 256}});
            refuses("what is kept");
            comm.wait();
        });
    }

    TEST_CASE("a recurrence of one's own on devices refuses heads of which gradients would be shares") {
        if (!has_gpus(2)) return;
        group two(2);
        two.run([](cpx::nccl& joined, auto const&) {
            cuda::stream const stream;
            cuda::communicator comm(joined, stream);
            cpx::head_sharded<> const sharding(2, lengths({5}), {{2, 3}});
            auto x = cpx::make_tensor<float>(sharding, comm, 3), o = cpx::make_tensor<float>(sharding, comm, 3),
                 dout = cpx::make_tensor<float>(sharding, comm, 3), dx = cpx::make_tensor<float>(sharding, comm, 3);
            auto const plan = cpx::carry<cpx::serial>(sharding, comm.rank());
            shared_total const model{{3}};
            cpx::recurrence_saved<float, cuda::memory> saved;
            cuda::recurrence_tensors const t{std::tuple(x.view()), o.view(), {}, {}, &saved};
            cpx::recur(plan, model, t, comm);
            rejects({"own_recurrence.cu",
                     "running_total_backward: state heads that read one head of x: expected on one rank, of tensors "
                     "on devices, got on several"},
                    [&] {
                        cpx::recur_backward(plan, model, t,
                                            cuda::recurrence_gradients{dout.view(), std::tuple(dx.view())}, comm);
                    });
            comm.wait();
        });
    }
}
