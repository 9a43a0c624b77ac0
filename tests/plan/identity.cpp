// SPDX-License-Identifier: Apache-2.0
// What the identity of a plan tells apart, so that ranks that disagree can say in what.
#include <cpx/plan/identity.hpp>

#include <cpx/cpx.hpp>

#include <doctest/doctest.h>

#include <support/packings.hpp>

#include <bit>
#include <cmath>

struct rgb {
    std::uint8_t r, g, b;
};
struct half { ///< of somebody's library
    std::uint16_t bits;
};
template <>
inline constexpr std::string_view cpx::element_name<half> = "float16";

namespace {

using namespace support;
using cpx::index_t;
using cpx::scope;

/// Returns the name of the first field in which two plans differ, or "" if their fingerprints are equal.
std::string difference(cpx::plan const& a, cpx::plan const& b) {
    int const field = a.id.first_difference(b.id);
    CHECK((a.fingerprint() == b.fingerprint()) == (field < 0));
    CHECK((a.id == b.id) == (field < 0));
    return field < 0 ? "" : a.id.name(field);
}

cpx::thd const batch = lengths({8, 12, 0, 7});

template <class A>
cpx::plan to_zigzag(A const& from, int rank = 0) {
    return cpx::relayout(from, cpx::shard(from.batch(), cpx::zigzag<>{from.ranks()}), rank);
}

TEST_SUITE("plan") {
    TEST_CASE("plans of all ranks have one fingerprint, made anew or copied") {
        auto const a = cpx::shard(batch, cpx::striped<>{4});
        for (int r = 0; r < 4; ++r) {
            CHECK(difference(to_zigzag(a), to_zigzag(a, r)) == "");
            CHECK(difference(to_zigzag(a), to_zigzag(cpx::shard(lengths({8, 12, 0, 7}), cpx::striped<>{4}), r)) == "");
        }
    }

    TEST_CASE("the first field that differs is named") {
        auto const reference = to_zigzag(cpx::shard(batch, cpx::sequential<>{4}));
        CHECK(difference(reference, to_zigzag(cpx::shard(batch, cpx::striped<>{4}))) == "source layout");
        CHECK(difference(reference, to_zigzag(cpx::shard<scope::batch>(batch, cpx::sequential<>{4}))) ==
              "source layout");
        CHECK(difference(reference, to_zigzag(cpx::shard(batch, cpx::sequential<>{4}, cpx::aligned<64>{}))) ==
              "source layout");
        CHECK(difference(reference, to_zigzag(cpx::shard(batch, cpx::sequential<>{3}))) == "ranks");
        CHECK(difference(reference, to_zigzag(cpx::shard(lengths({8, 12, 7}), cpx::sequential<>{4}))) == "sequences");
        CHECK(difference(reference, to_zigzag(cpx::shard(lengths({8, 12, 0, 8}), cpx::sequential<>{4}))) == "tokens");
        CHECK(difference(reference, to_zigzag(cpx::shard(lengths({8, 12, 7, 0}), cpx::sequential<>{4}))) ==
              "offset 3 of cu_seqlens");
        std::vector<cpx::index_t> many(12, 3), others(12, 3);
        others[9] = 2, others[10] = 4;
        char const* const hashed = "an offset of cu_seqlens after the eighth, or a valid length";
        CHECK(difference(to_zigzag(cpx::shard(lengths(many), cpx::sequential<>{4})),
                         to_zigzag(cpx::shard(lengths(others), cpx::sequential<>{4}))) == hashed);
        cpx::thd const padded({0, 8, 20, 20, 27}, {7, 12, 0, 7});
        CHECK(difference(reference, to_zigzag(cpx::shard(padded, cpx::sequential<>{4}))) == hashed);
        CHECK(difference(reference, reference.transposed()) == "source layout");
        CHECK(difference(reference, cpx::halo(cpx::shard(batch, cpx::sequential<>{4}), 0, 3)) == "operation");
        CHECK(difference(cpx::halo(cpx::shard(batch, cpx::sequential<>{4}), 0, 3),
                         cpx::halo(cpx::shard(batch, cpx::sequential<>{4}), 0, 4)) == "reach");
    }

    TEST_CASE("what an operator is given is named by the operator, and has a text of its own for every value") {
        auto const named = [](cpx::plan p, cpx::identity::arguments const& given) {
            p.id.set_arguments(given);
            return p;
        };
        auto const sharding = cpx::shard(batch, cpx::sequential<>{4});
        auto const halo = cpx::halo(sharding, 0, 3);
        auto const carry = cpx::carry<cpx::serial>(sharding, 0).step(0, cpx::side::before);
        auto const word = [](char const* text) { return cpx::identity::word(text); };
        auto const real = [](double x) { return std::bit_cast<std::uint64_t>(x); };
        CHECK(difference(named(halo, {word("silu")}), named(halo, {word("none")})) == "activation");
        CHECK(difference(named(halo, {0, word("given")}), named(halo, {0, word("none")})) == "bias");
        CHECK(difference(named(carry, {0, 0, 0, word("matrix")}), named(carry, {0, 0, 0, word("vector")})) ==
              "kind of map");
        CHECK(difference(named(carry, {0, 0, 0, 0, 0, 0, 0, word("given")}),
                         named(carry, {0, 0, 0, 0, 0, 0, 0, word("none")})) ==
              "initial states (in the backward dfinal)");
        CHECK(difference(named(carry, {0, 0, 0, 0, 0, real(0.1)}),
                         named(carry, {0, 0, 0, 0, 0, real(std::nextafter(0.1, 1))})) == "scale");
        CHECK(difference(named(carry, {0, 0, 0, 0, 0, real(0.0)}), named(carry, {0, 0, 0, 0, 0, real(-0.0)})) ==
              "scale");
        CHECK(difference(named(halo, {3}).transposed().transposed(), named(halo, {3})) == "");
    }

    TEST_CASE("a transposed plan that adds is told from a plan of its own") {
        cpx::replicated<> const all(4, batch);
        auto const a = cpx::shard(batch, cpx::sequential<>{4});
        cpx::plan const gather = cpx::relayout(a, all, 0), select = cpx::relayout(all, a, 0);
        CHECK(difference(gather.transposed(), select) == "operation");
        CHECK(difference(select.transposed(), gather) == "operation");
        CHECK(difference(gather.transposed().transposed(), gather) == "");
        auto const halo = cpx::halo(a, 0, 3);
        CHECK(difference(halo, halo.transposed()) == "operation");
    }

    TEST_CASE("what types do not tell is told in short, and by hashes") {
        auto const table = [](std::vector<int> owners) { return cpx::shard(batch, cpx::table(2, std::move(owners))); };
        CHECK(difference(to_zigzag(table({0, 1, 1})), to_zigzag(table({0, 1, 0}))) == "source sharding");
        auto const cut = [](int unit) {
            return cpx::shard(batch, cpx::sequential<>{2}, cpx::aligned<cpx::dynamic>{unit});
        };
        for (int const unit : {1, 2, 3, 63, 64, 128, 999, 1024, 4096})
            CHECK_MESSAGE(difference(to_zigzag(cut(unit)), to_zigzag(cut(unit + 1))) == "source sharding", unit);
        auto const source = [](cpx::plan const& p) {
            return p.id.value(cpx::identity::texts + cpx::identity::source_hash);
        };
        CHECK(source(to_zigzag(table({0, 1, 1}))) == "owners 0 1 1");
        CHECK(source(to_zigzag(cut(64))) == "unit 64, owners 0 1");
        std::vector<int> many(1000);
        auto const text = source(to_zigzag(table(many)));
        CHECK(text.starts_with("owners 0 0 0 0 "));
        CHECK(text.find("0 ..., hash ") != text.npos);
        many.back() = 1;
        CHECK(source(to_zigzag(table(many))) != text);
        using rule_type = bool (*)(index_t);
        auto const rule = [](rule_type accepts) {
            return cpx::shard(batch, cpx::by_length{cpx::zigzag<>{2}, cpx::sequential<>{2}, accepts});
        };
        rule_type const even = [](index_t n) { return n % 2 == 0; }, quarter = [](index_t n) { return n % 4 == 0; },
                        eight = [](index_t n) { return n == 8; };
        CHECK(difference(to_zigzag(rule(even)), to_zigzag(rule(eight))) == "source sharding"); // differs at 12
        CHECK(difference(to_zigzag(rule(even)), to_zigzag(rule(quarter))) == "");              // agrees on this batch
        auto const heads = [](std::vector<cpx::section> list) { return cpx::head_sharded<2>(batch, std::move(list)); };
        CHECK(difference(to_zigzag(heads({{4, 8}})), to_zigzag(heads({{8, 4}}))) == "source sharding");
        CHECK(source(to_zigzag(heads({{4, 8}}))) == "4 heads of 8");
        CHECK(source(to_zigzag(heads(std::vector<cpx::section>(9, {4, 8})))).find(" ..., hash ") != std::string::npos);
        CHECK(difference(to_zigzag(heads({{4, 8}, {2, 8}})), to_zigzag(heads({{4, 8}, {4, 4}}))) == "source sharding");
    }

    TEST_CASE("a static and a dynamic sharding have different names, so ranks must use the same types") {
        auto const fixed = to_zigzag(cpx::shard(batch, cpx::sequential<4>{}));
        auto const loose = to_zigzag(cpx::shard(batch, cpx::sequential<>{4}));
        CHECK(difference(fixed, loose) == "source layout");
        CHECK(fixed.sends == loose.sends);
    }

    TEST_CASE("an identity reads as text, and its transpose swaps source and target") {
        auto const p = cpx::relayout(cpx::shard(batch, cpx::zigzag<4>{}),
                                     cpx::shard<scope::batch>(batch, cpx::sequential<4>{}, cpx::aligned<64>{}), 0);
        CHECK(p.id.text() == "relayout zigzag<4> over sequence, balanced -> sequential<4> over batch, aligned<64>");
        CHECK(p.transposed().id.text() ==
              "relayout sequential<4> over batch, aligned<64> -> zigzag<4> over sequence, balanced");
        CHECK(p.transposed().transposed().id == p.id);
        CHECK(p.id.value(4) == "4");
        CHECK(cpx::identity().name(4) == "ranks");
    }

    TEST_CASE("a name that is too long is cut, not overrun, and its end is told by a hash") {
        auto const set = [](std::string const& text) {
            std::array<char, 16> field;
            field.fill('!'); // of another name
            cpx::identity::set(field, text);
            return std::string(field.data());
        };
        CHECK(set("short") == "short");
        CHECK(set("fifteen letters") == "fifteen letters");
        CHECK(set("sixteen letters.").size() == 15);
        CHECK(set("sixteen letters.").starts_with("sixteen"));
        CHECK(set("sixteen letters.") != set("sixteen letters!"));
    }

    TEST_CASE("elements are known by their type: numbers by what they hold, others by name and bytes") {
        CHECK(cpx::element_name<float> == "float32");
        CHECK(cpx::element_name<double> == "float64");
        CHECK(cpx::element_name<long long> == "int64");
        CHECK(cpx::element_name<unsigned char> == "uint8");
        CHECK(cpx::element_name<bool> == "bool");
        CHECK(cpx::element_name<long double> != cpx::element_name<double>);
        CHECK(cpx::element_name<rgb> == "rgb");
        CHECK(cpx::element_name<half> == "float16");
        CHECK(cpx::detail::known_element("__nv_bfloat16") == cpx::detail::known_element("Eigen::bfloat16"));
        CHECK(cpx::detail::known_element("__half") == "float16");
        auto const p = to_zigzag(cpx::shard(batch, cpx::sequential<>{4}));
        auto const differ = [&](auto a, auto b) {
            int const field = p.id.for_elements<decltype(a)>(2).first_difference(p.id.for_elements<decltype(b)>(2));
            return field < 0 ? "" : p.id.name(field);
        };
        CHECK(differ(half{}, std::uint16_t{}) == "element type");
        CHECK(differ(rgb{}, half{}) == "element type");
        CHECK(differ(1L, std::int64_t{1}) == "");
    }
}

} // namespace
