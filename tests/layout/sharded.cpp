// SPDX-License-Identifier: Apache-2.0
#include <cpx/layout/tensor.hpp>

#include <cpx/cpx.hpp>

#include <doctest/doctest.h>

#include <support/packings.hpp>
#include <support/rejects.hpp>

namespace {

using support::lengths;
using support::rejects;
using zigzag = cpx::sharding<cpx::zigzag<2>>;
using sequential = cpx::sharding<cpx::sequential<2>>;

// The sharding is part of the type, so tensors of different shardings are different types.
static_assert(!std::is_convertible_v<cpx::sharded<float, zigzag>, cpx::sharded<float, sequential>>);
static_assert(std::is_convertible_v<cpx::sharded<float, zigzag>, cpx::sharded<float const, zigzag>>);
static_assert(!std::is_convertible_v<cpx::sharded<float const, zigzag>, cpx::sharded<float, zigzag>>);
static_assert(
    std::is_same_v<decltype(cpx::sharded(cpx::rows<float>(), std::declval<zigzag>(), 0)), cpx::sharded<float, zigzag>>);

// Operators take tensors as they take views: of constants where they only read.
using tensor = cpx::tensor<float, zigzag>;
static_assert(std::is_convertible_v<tensor&, cpx::sharded<float, zigzag>>);
static_assert(std::is_convertible_v<tensor&, cpx::sharded<float const, zigzag>>);
static_assert(std::is_convertible_v<tensor const&, cpx::sharded<float const, zigzag>>);
static_assert(!std::is_convertible_v<tensor const&, cpx::sharded<float, zigzag>>);
static_assert(!std::is_convertible_v<tensor&, cpx::sharded<float, sequential>>);
static_assert(cpx::sharded_like<tensor> && cpx::sharded_like<tensor const&> &&
              cpx::sharded_like<cpx::sharded<float const, zigzag>>);
static_assert(!cpx::sharded_like<float> && !cpx::sharded_like<cpx::rows<float>>);
static_assert(std::is_same_v<cpx::sharding_of<tensor const>, zigzag>);
static_assert(std::is_same_v<cpx::element_of<tensor const>, float>);

// A view of what is gone with the expression is none.
static_assert(!std::is_convertible_v<tensor, cpx::sharded<float const, zigzag>>);

TEST_SUITE("layout") {
    TEST_CASE("a sharded view knows its rows and its sharding, and views columns of them") {
        auto const sharding = cpx::shard(lengths({8}), cpx::zigzag<2>{});
        std::vector<int> values(4 * 6);
        values[7] = 5;
        cpx::sharded const view(cpx::rows<int>(values, 6), sharding, 1);
        CHECK(view.rank() == 1);
        CHECK(view.data().count() == 4);
        CHECK(view.sharding() == sharding);
        CHECK(view.columns(1, 2).data()(1, 0) == 5);
        CHECK(view.columns(1, 2).data().stride() == 6);
        CHECK(view.columns(1, 2).sharding() == sharding);
        CHECK(view.columns(1, 2).rank() == 1);
        cpx::sharded<int const, zigzag> const constant = view;
        CHECK(constant.data()(1, 1) == 5);
    }

    TEST_CASE("a tensor has the rows of its rank and begins with zeros") {
        auto const sharding = cpx::shard(lengths({7, 2}), cpx::zigzag<2>{});
        for (int r = 0; r < 2; ++r) {
            auto t = cpx::make_tensor<float>(sharding, r, 3);
            CHECK(t.data().count() == sharding.rows(r));
            CHECK(t.width() == 3);
            CHECK(t.sharding() == sharding);
            CHECK(t.view().rank() == r);
            for (cpx::index_t i = 0; i < t.data().count(); ++i) CHECK(t.data()(i, 2) == 0.0f);
            t.data()(0, 1) = 4.0f;
            CHECK(std::as_const(t).data()(0, 1) == 4.0f);
            CHECK(t.view().data().data() == t.data().data());
        }
        auto const none = cpx::make_tensor<char>(cpx::shard(cpx::thd(), cpx::zigzag<2>{}), 0, 3);
        CHECK(none.data().count() == 0);
        auto const narrow = cpx::make_tensor<char>(cpx::shard(lengths({7}), cpx::zigzag<2>{}), 0, 0);
        CHECK(narrow.data().count() == 3);
    }

    TEST_CASE("a tensor of no rank, of no size or beyond memory is rejected where it is made") {
        auto const sharding = cpx::shard(lengths({cpx::index_t{1} << 40}), cpx::zigzag<2>{});
        auto const make = [&](int rank, cpx::index_t width) { return cpx::make_tensor<float>(sharding, rank, width); };
        rejects({"sharded.cpp", "tensor: rank: expected 0 to 1, got -1"}, [&] { make(-1, 4); });
        rejects({"sharded.cpp", "tensor: rank: expected 0 to 1, got 2"}, [&] { make(2, 4); });
        rejects({"sharded.cpp", "tensor: elements: expected not negative, got 549755813888 x -1"},
                [&] { make(0, -1); });
        rejects({"sharded.cpp", "tensor: elements: expected less than 2^62, got 549755813888 x 16777216"},
                [&] { make(0, cpx::index_t{1} << 24); });
        rejects({"tensor: bytes: expected less than 2^62"}, [&] { make(0, cpx::index_t{1} << 22); });
        if (support::memory_ends)
            rejects({"sharded.cpp", "tensor: memory: expected 2251799813685248 bytes"}, [&] { make(0, 1 << 10); });
        rejects({"sharded.cpp", "tensor: rank"}, [&] { cpx::make_tensor<int>(cpx::replicated<2>(cpx::thd()), 2, 1); });
    }

    TEST_CASE("a view of no rank is rejected where it is made") {
        auto const sharding = cpx::shard(lengths({8}), cpx::zigzag<2>{});
        std::vector<float> values(4);
        for (int const rank : {-3, 2})
            rejects({"sharded.cpp", "sharded: rank: expected 0 to 1, got " + std::to_string(rank)},
                    [&] { cpx::sharded(cpx::rows<float>(values, 1), sharding, rank); });
    }

    TEST_CASE("columns that a view does not have are rejected") {
        auto const sharding = cpx::shard(lengths({8}), cpx::zigzag<2>{});
        auto x = cpx::make_tensor<int>(sharding, 0, 6);
        for (auto const& [first, width] : std::vector<std::pair<cpx::index_t, cpx::index_t>>{
                 {4, 3}, {-1, 2}, {2, -1}, {7, 0}, {1, std::numeric_limits<cpx::index_t>::max()}})
            rejects({"sharded.cpp", "columns: columns of the view: expected some of 0 to 6"},
                    [&, first = first, width = width] { x.view().columns(first, width); });
        CHECK(x.view().columns(6, 0).data().width() == 0);
    }
}

} // namespace
