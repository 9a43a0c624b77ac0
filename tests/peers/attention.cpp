// SPDX-License-Identifier: Apache-2.0
// Attention that other projects test on ranks: results and gradients against one rank, gathered and by heads, with
// padding between sequences and without.
#include <cpx/ops/attention_backward.hpp>

#include <cpx/core/packing.hpp>

#include <peers/cases.hpp>

#include <ops/backward.hpp>

namespace {

using cpx::index_t;
using on_ranks::same_bits;
using peers::list, peers::ratio;
using reference::attention, reference::gathered;

struct attention_case {
    char const *id, *source;
    int ranks;
    cpx::attention_heads heads;
    list valid, padded; ///< offsets
    double tolerance = 5e-3;
};

/// TransformerEngine has 2 rows of 4096 tokens and heads of 128; divided by 16 and by 8 here. Its tolerances are 2.5e-2
/// in bfloat16 and 5e-3 in float16.
std::vector<attention_case> const cases = {
    {"T6a", "TransformerEngine test_fused_attn_with_cp, 2 ranks, bshd", 2, {4, 4, 16}, {0, 256, 512}, {0, 256, 512}},
    {"T6b", "TransformerEngine, 4 ranks (a2a+p2p there), grouped heads", 4, {4, 2, 16}, {0, 256, 512}, {0, 256, 512}},
    {"T6c", "TransformerEngine, thd, no pad between sequences", 2, {4, 2, 16}, {0, 68, 256, 300}, {0, 68, 256, 300}},
    {"T6d", "TransformerEngine, thd, pad_between_seqs", 2, {4, 2, 16}, {0, 67, 251, 300}, {0, 68, 256, 308}},
    {"T6e", "TransformerEngine, thd, pad_between_seqs", 4, {4, 2, 16}, {0, 67, 251, 251}, {0, 72, 264, 280}},
};

/// A row is a weighted mean of up to 256 others, and so are its gradients, in float32.
constexpr double reached = 2e-6;

/// Returns the valid rows of a padded tensor.
std::vector<float> valid_rows(cpx::packing const& rows, std::vector<float> const& padded, index_t width) {
    std::vector<float> packed(static_cast<std::size_t>(rows.batch().tokens() * width));
    cpx::pack(rows, cpx::rows<float const>(padded, width), cpx::rows<float>(packed, width));
    return packed;
}

attention<float> valid_rows(cpx::packing const& rows, attention<float> p) {
    index_t const keys = p.heads.key_heads * p.heads.dim;
    p.batch = rows.batch();
    p.q = valid_rows(rows, p.q, p.width());
    p.k = valid_rows(rows, p.k, keys);
    p.v = valid_rows(rows, p.v, keys);
    return p;
}

} // namespace

TEST_SUITE("peers") {
    using cpx::index_t;

    TEST_CASE("attention of peers has its results and gradients, and valid rows do not know of padding") {
        peers::each(cases, [](attention_case const& c) {
            auto const batch = cpx::thd_from_cu_seqlens(c.valid, c.padded);
            auto const rows = cpx::unpadded(batch);
            auto const p = reference::random_attention<float>(batch, c.heads, 5);
            auto const without = valid_rows(rows, p);
            support::splitmix numbers(6);
            auto const dout = on_ranks::uniform<float>(numbers, rows.batch().tokens() * p.width());
            std::vector<float> padded_dout(p.q.size()); // what is padding counts for no loss
            cpx::unpack(rows, cpx::rows<float const>(dout, p.width()), cpx::rows<float>(padded_dout, p.width()));
            auto const alone = on_ranks::one_rank(rows.batch());
            auto const one = run_gathered(without, alone);
            auto const one_gradient = gradient_gathered(without, dout, alone, gathered::queries);
            CHECK(reached < c.tolerance);
            CHECK(ratio(one, run(without)) <= reached);
            auto const check = [&](std::vector<float> const& o, attention<float> const& d) {
                auto const got = valid_rows(rows, d);
                CHECK(same_bits(valid_rows(rows, o, p.width()), one));
                CHECK(same_bits(got.q, one_gradient.q));
                CHECK(ratio(got.k, one_gradient.k) <= reached);
                CHECK(ratio(got.v, one_gradient.v) <= reached);
            };
            for (auto const what : {gathered::queries, gathered::keys})
                peers::shardings(batch, c.ranks, 64, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    check(run_gathered(p, sharding), gradient_gathered(p, padded_dout, sharding, what));
                });
            check(run_by_heads(p, c.ranks), gradient_by_heads(p, padded_dout, c.ranks));
        });
    }
}
