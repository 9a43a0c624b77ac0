// SPDX-License-Identifier: Apache-2.0
// A recurrence of one's own: a linear recurrent unit, S_t = a_t S_{t-1} + x_t and o_t = S_t in every channel.
#include "common/command_line.hpp"
#include "common/whole.hpp"

#include <cpx/ops/recurrence.hpp>

struct linear_unit { // what it does to one channel of one segment
    using in = cpx::rows<double const>;
    using out = cpx::rows<double>;
    static constexpr char const* name = "linear_unit";
    cpx::state_shape states() const { return {6, 1, 1, cpx::map_kind::number}; } // 6 channels with a number each
    std::array<cpx::recurrence_input, 2> inputs() const { return {{{"x", 6, 1}, {"a", 6, 1}}}; }

    void forward(std::array<in, 2> const& x, cpx::index_t, out s, out o) const {
        for (cpx::index_t t = 0; t < o.count(); ++t) o(t, 0) = s(0, 0) = x[1](t, 0) * s(0, 0) + x[0](t, 0);
    }
    void fold(std::array<in, 2> const& x, cpx::index_t, out s, out map) const { // S -> map S + s
        map(0, 0) = 1;
        for (cpx::index_t t = 0; t < x[0].count(); ++t) {
            map(0, 0) *= x[1](t, 0);
            s(0, 0) = x[1](t, 0) * s(0, 0) + x[0](t, 0);
        }
    }
    void backward(std::array<in, 2> const& x, cpx::index_t, in start, in dout, out ds,
                  std::array<out, 2> const& dx) const {
        std::vector<double> s{start(0, 0)};
        for (cpx::index_t t = 0; t < dout.count(); ++t) s.push_back(x[1](t, 0) * s.back() + x[0](t, 0));
        for (cpx::index_t t = dout.count(); t-- > 0; ds(0, 0) *= x[1](t, 0)) {
            dx[0](t, 0) = ds(0, 0) += dout(t, 0);
            dx[1](t, 0) = ds(0, 0) * s[static_cast<std::size_t>(t)];
        }
    }
    void backward_fold(std::array<in, 2> const& x, cpx::index_t, in dout, out ds) const {
        for (cpx::index_t t = dout.count(); t-- > 0;) ds(0, 0) = (ds(0, 0) + dout(t, 0)) * x[1](t, 0);
    }
};

int main(int argc, char** argv) {
    examples::command_line app("Defines a recurrence and runs it on every sharding, forward and backward.",
                               "new_operator");
    return app.run(argc, argv, [] {
        cpx::thd const batch({0, 8, 9, 9, 30, 133}); // sequences of 8, 1, 0, 21 and 103 tokens
        auto const run = [](auto how, auto const& sharding, cpx::threads& comm) {
            auto const numbers = [&](double f) { return examples::numbers(sharding, comm.rank(), 6, f); };
            auto const x = numbers(0.7), a = numbers(0.2), dout = numbers(0.3);
            auto o = x, dx = x, da = x; // to be written
            cpx::recurrence_saved<double> saved;
            auto const plan = cpx::carry<decltype(how)>(sharding, comm.rank());
            cpx::recurrence_tensors const t{std::array{x.view(), a.view()}, o.view(), {}, {}, &saved};
            recur(plan, linear_unit(), t, comm);
            recur_backward(plan, linear_unit(), t,
                           cpx::recurrence_gradients{dout.view(), std::array{dx.view(), da.view()}}, comm);
            return examples::gather(comm, o, dx, da);
        };
        examples::compare_everywhere("new_operator", batch, {6, 1}, 1e-12, run);
    });
}
