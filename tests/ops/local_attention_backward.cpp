// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/local/attention_backward.hpp>

#include <doctest/doctest.h>

#include <ops/gradients.hpp>

#include <numeric>

using bits::rows, bits::scattered, bits::size;

namespace {

std::vector<size> tokens(size count) {
    std::vector<size> result(static_cast<std::size_t>(count));
    std::iota(result.begin(), result.end(), size{0});
    return result;
}

/// Some tokens of a sequence, as a rank may hold them.
using token_list = std::vector<size>;

/// One head over one sequence of n tokens, and the gradient of its output.
template <class T>
struct head {
    scattered<T> q, k, v, dout, o;
    std::vector<T> lse, delta;
    T scale;

    head(size n, size dk, size dv, double spread = 1, T factor = T(0.5))
        : q(bits::uniform<T>(n, dk, 1, spread)), k(bits::uniform<T>(n, dk, 2, spread)), v(bits::uniform<T>(n, dv, 3)),
          dout(bits::uniform<T>(n, dv, 4)), o(n, dv), lse(static_cast<std::size_t>(n)),
          delta(static_cast<std::size_t>(n)), scale(factor) {
        cpx::attend_head<T>(q, tokens(n), k, v, scale, o.view(), lse);
        cpx::attend_head_delta<T>(o, dout, delta);
    }
    size count() const { return q.view().count(); }

    static scattered<T> pick(scattered<T> const& x, token_list const& of, size gap, size shift) {
        scattered<T> result(static_cast<size>(of.size()), x.view().width(), gap, shift);
        for (std::size_t i = 0; i < of.size(); ++i)
            std::copy_n(x.view().row(of[i]), x.view().width(), result.view().row(static_cast<size>(i)));
        return result;
    }
    static std::vector<T> pick(std::vector<T> const& x, token_list const& of) {
        std::vector<T> result;
        for (size const token : of) result.push_back(x[static_cast<std::size_t>(token)]);
        return result;
    }

    /// Calls `f` with the queries at `of`, elsewhere in memory.
    template <class F>
    void with_queries(token_list const& of, size gap, size shift, F f) const {
        auto const some_q = pick(q, of, gap, shift), some_dout = pick(dout, of, shift, gap);
        auto const some_lse = pick(lse, of), some_delta = pick(delta, of);
        f(cpx::attended_queries<T>{some_q.view(), some_dout.view(), of, some_lse, some_delta});
    }
    scattered<T> dq(token_list const& of, size gap = 0, size shift = 0) const {
        scattered<T> result(static_cast<size>(of.size()), k.view().width(), gap, shift);
        scattered<T> const keys(k.view(), shift, gap), values(v.view(), gap, gap);
        with_queries(of, gap, shift, [&](auto const& queries) {
            cpx::attend_head_backward_query<T>(queries, keys, values, scale, result.view());
        });
        return result;
    }
};

template <class T>
struct key_gradients {
    scattered<T> dk, dv;
    bool operator==(key_gradients const& other) const {
        return bits::same<T>(dk, other.dk) && bits::same<T>(dv, other.dv);
    }
};

/// Adds the gradients of the keys at `of` to gradients that are not zero: one call for each list of queries, in turn.
template <class T>
key_gradients<T> backward_keys(head<T> const& h, token_list const& of, std::vector<token_list> const& queries,
                               double start, size gap = 0, size shift = 0) {
    auto const keys = head<T>::pick(h.k, of, gap, shift), values = head<T>::pick(h.v, of, shift, gap);
    key_gradients<T> result{
        head<T>::pick(bits::uniform<T>(h.count(), keys.view().width(), 7, start), of, gap, gap),
        head<T>::pick(bits::uniform<T>(h.count(), values.view().width(), 8, start), of, shift, shift)};
    for (token_list const& some : queries)
        h.with_queries(some, gap, shift, [&](auto const& from) {
            cpx::attend_head_backward_key<T>(from, keys, values, of, h.scale, result.dk.view(), result.dv.view());
        });
    return result;
}

template <class T>
key_gradients<T> rows_of(key_gradients<T> const& all, token_list const& of) {
    return {head<T>::pick(all.dk, of, 0, 0), head<T>::pick(all.dv, of, 0, 0)};
}

token_list range(size first, size last) {
    token_list result;
    for (size token = first; token < last; ++token) result.push_back(token);
    return result;
}

} // namespace

TEST_SUITE("ops") {
    TEST_CASE("the gradients of attention are its differences") {
        for (size const n : {1, 2, 9}) {
            CAPTURE(n);
            head<double> h(n, 5, 3, 2);
            auto const loss = [&] {
                scattered<double> o(n, 3);
                cpx::attend_head<double>(h.q, tokens(n), h.k, h.v, h.scale, o.view());
                return gradients::loss(o, h.dout);
            };
            auto const of_keys = backward_keys(h, tokens(n), {tokens(n)}, 0);
            gradients::check(h.q.view(), h.dq(tokens(n)), loss);
            gradients::check(h.k.view(), of_keys.dk, loss);
            gradients::check(h.v.view(), of_keys.dv, loss);
        }
    }

    TEST_CASE("the gradients of attention in float are those in double") {
        size const n = 70;
        head<float> const h(n, 24, 17, 1);
        head<double> exact(n, 24, 17, 1);
        auto const cast = [](scattered<float> const& from, scattered<double>& to) {
            for (size i = 0; i < from.view().count(); ++i)
                for (size j = 0; j < from.view().width(); ++j) to.view()(i, j) = static_cast<double>(from.view()(i, j));
        };
        cast(h.q, exact.q);
        cast(h.k, exact.k);
        cast(h.v, exact.v);
        cast(h.dout, exact.dout);
        cpx::attend_head<double>(exact.q, tokens(n), exact.k, exact.v, exact.scale, exact.o.view(), exact.lse);
        cpx::attend_head_delta<double>(exact.o, exact.dout, exact.delta);
        auto const got = backward_keys(h, tokens(n), {tokens(n)}, 0);
        auto const expected = backward_keys(exact, tokens(n), {tokens(n)}, 0);
        CHECK(bits::relative_error<float, double>(h.dq(tokens(n)), exact.dq(tokens(n)).view()) <= 2e-6);
        CHECK(bits::relative_error<float, double>(got.dk, expected.dk.view()) <= 2e-6);
        CHECK(bits::relative_error<float, double>(got.dv, expected.dv.view()) <= 2e-6);
    }

    TEST_CASE_TEMPLATE("lse is the logarithm of the sum of exponentials and changes no bit of the output", T, float,
                       double) {
        size const n = 23;
        head<T> const h(n, 6, 4);
        scattered<T> without(n, 4);
        cpx::attend_head<T>(h.q, tokens(n), h.k, h.v, h.scale, without.view());
        CHECK(bits::same<T>(without, h.o));
        for (size i = 0; i < n; ++i) {
            double total = 0;
            for (size j = 0; j <= i; ++j) {
                double score = 0;
                for (size d = 0; d < 6; ++d)
                    score += static_cast<double>(h.q.view()(i, d)) * static_cast<double>(h.k.view()(j, d));
                total += std::exp(0.5 * score);
            }
            CHECK(std::abs(static_cast<double>(h.lse[static_cast<std::size_t>(i)]) - std::log(total)) <=
                  20 * static_cast<double>(std::numeric_limits<T>::epsilon()));
        }
    }

    TEST_CASE_TEMPLATE("gradients of attention stay finite where scores are huge", T, float, double) {
        head<T> const h(6, 8, 8, 1e4, T(1));
        auto const of_keys = backward_keys(h, tokens(6), {tokens(6)}, 0);
        auto const dq = h.dq(tokens(6));
        for (size i = 0; i < 6; ++i)
            for (size d = 0; d < 8; ++d)
                for (scattered<T> const* x : {&dq, &of_keys.dk, &of_keys.dv}) CHECK(std::isfinite(x->view()(i, d)));
    }

    TEST_CASE_TEMPLATE("a query's gradient does not depend on the queries beside it and on later keys, bit for bit", T,
                       float, double) {
        size const n = 23;
        head<T> h(n, 13, 21);
        auto const all = h.dq(tokens(n));
        for (size first = 0; first < n; ++first)
            for (size last = first; last <= n; last += 3)
                CHECK(
                    bits::same<T>(h.dq(range(first, last), first % 4, last % 5), all.view().sub(first, last - first)));
        token_list backwards = tokens(n);
        std::reverse(backwards.begin(), backwards.end());
        CHECK(bits::same<T>(head<T>::pick(h.dq(backwards), backwards, 0, 0), all));
        for (size d = 0; d < 13; ++d) h.k.view()(20, d) = h.v.view()(20, d) = std::numeric_limits<T>::quiet_NaN();
        CHECK(bits::same<T>(h.dq(range(0, 20)), all.view().sub(0, 20)));
    }

    TEST_CASE_TEMPLATE("a key's gradients do not depend on the keys beside it and on earlier queries, bit for bit", T,
                       float, double) {
        size const n = 23;
        head<T> h(n, 13, 21);
        auto const all = backward_keys(h, tokens(n), {tokens(n)}, 1);
        for (size first = 0; first < n; ++first) {
            for (size last = first; last <= n; last += 3) {
                token_list const some = range(first, last);
                CHECK(backward_keys(h, some, {tokens(n)}, 1, first % 4, last % 5) == rows_of(all, some));
            }
            CHECK(backward_keys(h, range(first, n), {range(first, n)}, 1) == rows_of(all, range(first, n)));
        }
        token_list const zigzag = {20, 21, 22, 0, 1, 2, 9, 8};
        CHECK(backward_keys(h, zigzag, {tokens(n)}, 1) == rows_of(all, zigzag));
        for (size d = 0; d < 13; ++d) h.q.view()(3, d) = h.dout.view()(3, d) = std::numeric_limits<T>::quiet_NaN();
        CHECK(backward_keys(h, range(4, n), {tokens(n)}, 1) == rows_of(all, range(4, n)));
    }

    TEST_CASE_TEMPLATE("queries may be split between calls, in order, without changing a bit of a key's gradients", T,
                       float, double) {
        size const n = 23;
        head<T> const h(n, 13, 21);
        auto const all = backward_keys(h, tokens(n), {tokens(n)}, 1);
        for (size a = 0; a <= n; ++a)
            for (size b = a; b <= n; b += 4)
                CHECK(backward_keys(h, tokens(n), {range(0, a), range(a, b), range(b, n)}, 1) == all);
        std::vector<token_list> one_by_one;
        for (size token = 0; token < n; ++token) one_by_one.push_back({token});
        CHECK(backward_keys(h, tokens(n), one_by_one, 1) == all);
    }

    TEST_CASE("no queries and no keys are ordinary, queries out of order and positions outside are errors") {
        head<float> const h(4, 3, 3);
        CHECK(h.dq({}).view().count() == 0);
        CHECK(backward_keys(h, {}, {tokens(4)}, 1).dk.view().count() == 0);
        CHECK(backward_keys(h, tokens(4), {{}}, 1) == backward_keys(h, tokens(4), {}, 1));
        CHECK_THROWS_WITH_AS(backward_keys(h, tokens(4), {{1, 0}}, 0),
                             doctest::Contains("positions: expected tokens in ascending order"), cpx::error);
        std::vector<size> const outside = {4};
        std::vector<float> const one(1);
        scattered<float> dq(1, 3);
        cpx::attended_queries<float> const from{h.q.view().sub(0, 1), h.dout.view().sub(0, 1), outside, one, one};
        CHECK_THROWS_WITH_AS(cpx::attend_head_backward_query<float>(from, h.k, h.v, 1.0f, dq.view()),
                             doctest::Contains("position: expected 0 to 3, got 4"), cpx::error);
    }
}
