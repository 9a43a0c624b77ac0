// SPDX-License-Identifier: Apache-2.0
#include <cpx/core/packing.hpp>

#include <cpx/layout/sharding.hpp>
#include <cpx/layout/zigzag.hpp>

#include <doctest/doctest.h>

#include <support/packings.hpp>
#include <support/random.hpp>
#include <support/rejects.hpp>

#include <array>
#include <cstring>
#include <limits>
#include <map>

namespace {

using cpx::index_t;
using cpx::pad;
using cpx::padding;
using cpx::thd;
using support::rejects;

using list = std::vector<index_t>;
list copy(std::span<index_t const> values) { return {values.begin(), values.end()}; }

/// Calls `f(thd)` with every batch of `tokens` tokens in `sequences` of length 0 and more with every valid length.
template <class F>
void for_each_padded(index_t tokens, F&& f) {
    support::for_each_packing(tokens, [&](thd const& batch) {
        list valid(static_cast<std::size_t>(batch.sequences()), 0);
        for (;;) {
            f(thd(copy(batch.offsets()), valid));
            std::size_t s = 0;
            while (s < valid.size() && valid[s] == batch.length(static_cast<index_t>(s))) valid[s++] = 0;
            if (s == valid.size()) return;
            ++valid[s];
        }
    });
}

/// A few large batches with padding: lengths 0, 1, 2, odd and long.
std::vector<thd> large_batches() {
    support::splitmix numbers(7);
    std::vector<thd> batches;
    for (int i = 0; i < 60; ++i) {
        list offsets{0}, valid;
        for (index_t s = numbers.between(0, 9); s > 0; --s) {
            index_t const length = numbers.between(0, s % 2 ? 3 : 700);
            offsets.push_back(offsets.back() + length);
            valid.push_back(numbers.between(0, length));
        }
        batches.emplace_back(offsets, valid);
    }
    return batches;
}

/// The same as `batch`, with valid lengths only where there is padding.
thd without_needless_lengths(thd const& batch) {
    for (index_t s = 0; s < batch.sequences(); ++s)
        if (batch.valid(s) != batch.length(s)) return batch;
    return thd(copy(batch.offsets()));
}

/// What the definition says of every row: whether it is valid.
std::vector<std::uint8_t> validity(thd const& batch) {
    std::vector<std::uint8_t> mask;
    for (index_t row = 0; row < batch.tokens(); ++row) {
        index_t const s = batch.sequence(row);
        mask.push_back(row - batch.offset(s) < batch.valid(s));
    }
    return mask;
}

list ones(std::vector<std::uint8_t> const& mask) {
    list rows;
    for (std::size_t i = 0; i < mask.size(); ++i)
        if (mask[i]) rows.push_back(static_cast<index_t>(i));
    return rows;
}

/// The valid rows of `b` in order, between poison, and back. Returns the first law that is broken.
std::string round_trip(thd const& b) {
    cpx::packing const p = cpx::unpadded(b);
    if (p.mask() != validity(b)) return "mask";
    if (p.rows() != ones(validity(b))) return "rows";
    if (p.buffer_rows() != b.tokens() || p.batch().sequences() != b.sequences()) return "shape";
    for (index_t s = 0; s < b.sequences(); ++s)
        if (p.batch().length(s) != b.valid(s) || p.batch().valid(s) != b.valid(s)) return "lengths";

    index_t const width = 3, stride = 5;
    list packed(static_cast<std::size_t>(p.batch().tokens() * width)), again(packed.size(), -7);
    std::iota(packed.begin(), packed.end(), 1);
    for (bool const wide : {false, true}) { // rows of their own, and columns of wider rows that must not change
        index_t const pitch = wide ? stride : width, first = wide ? 1 : 0;
        list buffer(static_cast<std::size_t>(b.tokens() * pitch), -1);
        cpx::rows<index_t> const view(buffer.data() + first, b.tokens(), width, pitch);
        cpx::unpack(p, cpx::rows<index_t>(packed, width), view);
        auto const rows = p.rows();
        std::size_t next = 0;
        for (index_t row = 0; row < b.tokens(); ++row) {
            bool const valid = next < rows.size() && rows[next] == row;
            for (index_t c = 0; c < width; ++c)
                if (view(row, c) != (valid ? static_cast<index_t>(next) * width + c + 1 : 0)) return "unpack";
            next += valid;
            for (index_t c = 0; wide && c < stride; ++c)
                if ((c < first || c >= first + width) && buffer[static_cast<std::size_t>(row * stride + c)] != -1)
                    return "unpack writes outside its columns";
            if (!valid) std::fill_n(view.row(row), width, -1);
        }
        std::ranges::fill(again, -7);
        cpx::pack(p, view, cpx::rows<index_t>(again, width));
        if (again != packed) return "pack";
    }
    return "";
}

/// Padding to a multiple keeps what is valid and adds as little as can be; the two offsets give the batch again.
std::string padded_again(thd const& b, index_t multiple) {
    thd const p = cpx::pad_to_multiple(b, multiple);
    if (p.sequences() != b.sequences()) return "sequences";
    for (index_t s = 0; s < b.sequences(); ++s)
        if (p.valid(s) != b.valid(s) || p.length(s) % multiple != 0 || p.length(s) < b.valid(s) ||
            p.length(s) - b.valid(s) >= multiple)
            return "length of sequence " + std::to_string(s);
    if (cpx::pad_to_multiple(p, 1) != cpx::unpadded(b).batch()) return "padding dropped again";
    if (cpx::pad_to_multiple(p, multiple) != p) return "padding twice";
    thd const valid = cpx::unpadded(p).batch();
    std::vector<std::int32_t> narrow;
    for (index_t const offset : p.offsets()) narrow.push_back(static_cast<std::int32_t>(offset));
    if (cpx::thd_from_cu_seqlens(valid.offsets(), p.offsets()) != p) return "two offsets";
    if (cpx::thd_from_cu_seqlens(valid.offsets(), narrow, {p.tokens(), multiple}) != p) return "two offsets, in int32";
    return round_trip(p);
}

/// Returns the position ids of a batch, -1 in the padding.
list positions(thd const& batch) {
    list ids;
    for (index_t row = 0; row < batch.tokens(); ++row) {
        index_t const s = batch.sequence(row), token = row - batch.offset(s);
        ids.push_back(token < batch.valid(s) ? token : -1);
    }
    return ids;
}

/// Whether position ids can mean this batch of rows of `columns` tokens.
bool expressible(thd const& b, pad pads, index_t columns) {
    for (index_t s = 0; s < b.sequences(); ++s) {
        bool const is_pad = pads == pad::own_sequence && b.length(s) == 1 && b.valid(s) == 0;
        bool const is_whole = b.valid(s) == b.length(s) || pads == pad::joins_last_sequence;
        if (b.length(s) == 0 || !(is_pad || (is_whole && b.valid(s) > 0))) return false;
        if (b.offset(s) / columns != (b.offset(s + 1) - 1) / columns) return false;
    }
    return true;
}

TEST_SUITE("core") {
    TEST_CASE("what is packed without padding comes back, all batches of few tokens and large ones") {
        for (index_t tokens = 0; tokens <= 6; ++tokens)
            for_each_padded(tokens, [](thd const& b) {
                std::string const problem = round_trip(b);
                REQUIRE_MESSAGE(problem.empty(), problem << ": " << support::text(b));
            });
        for (thd const& b : large_batches()) REQUIRE(round_trip(b) == "");
    }

    TEST_CASE("padding to a multiple keeps valid lengths, all batches of few tokens and large ones") {
        for (index_t const multiple : {1, 2, 3, 4, 7, 128}) {
            CAPTURE(multiple);
            for (index_t tokens = 0; tokens <= 5; ++tokens)
                for_each_padded(tokens, [&](thd const& b) {
                    std::string const problem = padded_again(b, multiple);
                    REQUIRE_MESSAGE(problem.empty(), problem << ": " << support::text(b));
                });
            for (thd const& b : large_batches()) REQUIRE(padded_again(b, multiple) == "");
        }
    }

    TEST_CASE("position ids mean the batch that has them, and only those of a batch are taken") {
        for (pad const pads : {pad::joins_last_sequence, pad::own_sequence})
            for (index_t tokens = 1; tokens <= 5; ++tokens)
                for (index_t columns = 1; columns <= tokens; ++columns) {
                    if (tokens % columns != 0) continue;
                    std::map<list, thd> meanings;
                    for_each_padded(tokens, [&](thd const& b) {
                        if (!expressible(b, pads, columns)) return;
                        bool const is_new = meanings.emplace(positions(b), without_needless_lengths(b)).second;
                        REQUIRE(is_new); // one meaning, whichever is asked for
                    });
                    list ids(static_cast<std::size_t>(tokens), -2);
                    for (std::size_t i = 0; i < ids.size();) { // all lists of -2 to tokens
                        auto const meaning = meanings.find(ids);
                        CAPTURE(doctest::toString(ids));
                        if (meaning == meanings.end())
                            rejects({"thd_from_positions: position of row "},
                                    [&] { cpx::thd_from_positions(ids, pads, columns); });
                        else
                            REQUIRE(cpx::thd_from_positions(ids, pads, columns) == meaning->second);
                        for (i = 0; i < ids.size() && ids[i] == tokens; ++i) ids[i] = -2;
                        if (i < ids.size()) ++ids[i];
                    }
                }
    }

    TEST_CASE("both meanings of position -1 agree where there is none") {
        for (thd const& padded : large_batches()) {
            list lengths;
            for (index_t s = 0; s < padded.sequences(); ++s)
                if (padded.valid(s) > 0) lengths.push_back(padded.valid(s));
            thd const b = thd::from_lengths(lengths);
            list const ids = positions(b);
            std::vector<std::int32_t> const narrow(ids.begin(), ids.end());
            CHECK(cpx::thd_from_positions(ids, pad::joins_last_sequence) == b);
            CHECK(cpx::thd_from_positions(ids, pad::own_sequence) == b);
            CHECK(cpx::thd_from_positions(narrow, pad::own_sequence) == b);
        }
    }

    TEST_CASE("padding behind position ids joins the last sequence, or every token of it is a sequence") {
        std::array<std::int32_t, 8> const ids = {0, 1, 2, 0, 1, -1, -1, -1};
        CHECK(cpx::thd_from_positions(ids, pad::joins_last_sequence) == thd(list{0, 3, 8}, list{3, 2}));
        CHECK(cpx::thd_from_positions(ids, pad::own_sequence) == thd(list{0, 3, 5, 6, 7, 8}, list{3, 2, 0, 0, 0}));
        CHECK(cpx::thd_from_positions(ids, pad::joins_last_sequence, 8) == thd(list{0, 3, 8}, list{3, 2}));
        list const two_rows = {0, 1, -1, 0, 0, 1};
        CHECK(cpx::thd_from_positions(two_rows, pad::joins_last_sequence, 3) == thd(list{0, 3, 4, 6}, list{2, 1, 2}));
        CHECK(cpx::thd_from_positions(list{}, pad::own_sequence) == thd());
        CHECK(cpx::thd_from_positions(list{}, pad::joins_last_sequence, 4) == thd());
    }

    TEST_CASE("position ids that no batch has are rejected, naming the row and what may stand there") {
        auto const rejected = [](list const& ids, pad pads, index_t columns, std::string const& message) {
            rejects({"packing.cpp", "thd_from_positions: " + message},
                    [&] { cpx::thd_from_positions(ids, pads, columns); });
        };
        pad const joins = pad::joins_last_sequence, own = pad::own_sequence;
        rejected({3, 4, 0}, joins, -1, "position of row 0: expected 0, where a sequence begins, got 3");
        rejected({3, 4, 0}, own, -1, "position of row 0: expected 0 or -1, got 3");
        rejected({-1, 0, 1}, joins, -1, "position of row 0: expected 0, where a sequence begins, got -1");
        rejected({0, 1, -1, 0}, joins, 2, "position of row 2: expected 0, where a sequence begins, got -1");
        rejected({0, 1, 2, 3}, joins, 2, "position of row 2: expected 0, where a sequence begins, got 2");
        rejected({0, 1, 3}, joins, -1, "position of row 2: expected 0, -1 or 2, got 3");
        rejected({0, 1, 1}, own, -1, "position of row 2: expected 0, -1 or 2, got 1");
        rejected({0, 1, -1, 2}, joins, -1, "position of row 3: expected 0 or -1, got 2");
        rejected({0, 1, -2}, own, -1, "position of row 2: expected 0, -1 or 2, got -2");
        rejected({0, index_t{1} << 32}, own, -1, "position of row 1: expected 0, -1 or 1, got 4294967296");
        rejected({0, 1, 2}, joins, 2, "size of the list: expected a multiple of the columns, 2, got 3");
        rejected({0, 1, 2}, joins, 0, "columns: expected at least 1, got 0");
        rejected({0, 1, 2}, joins, -3, "columns: expected at least 1, got -3");
    }

    TEST_CASE("masks of one run of ones a row are taken if the padding is on their side, and no others") {
        for (index_t columns = 1; columns <= 5; ++columns)
            for (unsigned bits = 0; bits < 1u << (2 * columns); ++bits) {
                std::vector<std::uint8_t> mask;
                for (index_t i = 0; i < 2 * columns; ++i) mask.push_back(bits >> i & 1u);
                list lengths;
                bool runs = true, left = true, right = true; // whether the rows' ones are one run, at either end
                for (auto row = mask.begin(); row != mask.end(); row += columns) {
                    lengths.push_back(std::count(row, row + columns, 1));
                    auto const first = std::find(row, row + columns, 1);
                    if (lengths.back() == 0) continue;
                    runs = runs && std::count(first, first + lengths.back(), 1) == lengths.back();
                    right = right && first == row;
                    left = left && first + lengths.back() == row + columns;
                }
                for (padding const side : {padding::left, padding::right, padding::any}) {
                    CAPTURE(bits);
                    if (runs && (side == padding::any || (side == padding::left ? left : right))) {
                        cpx::packing const p = cpx::packing_from_mask(mask, columns, side);
                        REQUIRE(p.batch() == thd::from_lengths(lengths));
                        REQUIRE(p.rows() == ones(mask));
                        REQUIRE(p.mask() == mask);
                        REQUIRE(p.buffer_rows() == 2 * columns);
                        if (side == padding::right) { // the padded rows are a batch, too: the same by another way
                            auto const uniform = thd::uniform(2, columns);
                            thd const b = cpx::thd_from_cu_seqlens(p.batch().offsets(), uniform.offsets());
                            REQUIRE(cpx::unpadded(b) == p);
                        }
                    } else
                        rejects({"packing_from_mask: row "}, [&] { cpx::packing_from_mask(mask, columns, side); });
                }
            }
    }

    TEST_CASE("a mask comes in any type, padded on the left as for generation") {
        std::array<bool, 16> const flags = {0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1};
        std::vector<std::int32_t> const narrow(flags.begin(), flags.end());
        std::vector<std::int64_t> const wide(flags.begin(), flags.end());
        cpx::packing const p = cpx::packing_from_mask(flags, 8, padding::left);
        CHECK(p.batch() == thd(list{0, 3, 8}));
        CHECK(p.rows() == list{5, 6, 7, 11, 12, 13, 14, 15});
        CHECK(cpx::packing_from_mask(std::span<bool const>(flags), 8, padding::any) == p);
        CHECK(cpx::packing_from_mask(narrow, 8, padding::left) == p);
        CHECK(cpx::packing_from_mask(wide, 8, padding::left) == p);
        CHECK(cpx::packing_from_mask(p.mask(), 8, padding::left) == p);

        CHECK(cpx::packing_from_mask(list{}, 4, padding::left).batch() == thd());
        CHECK(cpx::packing_from_mask(list{}, 0, padding::any).buffer_rows() == 0);
        cpx::packing const nothing = cpx::packing_from_mask(list(6, 0), 3, padding::left);
        CHECK(nothing.batch() == thd(list{0, 0, 0}));
        CHECK(nothing.buffer_rows() == 6);
    }

    TEST_CASE("a mask and positions mean the batch on which both agree, and are rejected where they do not") {
        for (index_t columns = 1; columns <= 3; ++columns) {
            index_t const count = columns == 3 ? 3 : 2 * columns; // two rows, or one
            for (unsigned bits = 0; bits < 1u << count; ++bits) {
                std::vector<std::uint8_t> mask;
                for (index_t i = 0; i < count; ++i) mask.push_back(bits >> i & 1u);
                list ids(static_cast<std::size_t>(count), -1);
                for (std::size_t i = 0; i < ids.size();) { // all lists of -1 to 2
                    bool agree = true;
                    list lengths, tokens;
                    for (std::size_t k = 0; k < ids.size(); ++k) {
                        if (!mask[k]) continue;
                        bool const goes_on = static_cast<index_t>(k) % columns != 0 && mask[k - 1] && ids[k] > 0 &&
                                             ids[k] == ids[k - 1] + 1;
                        agree = agree && (ids[k] == 0 || goes_on);
                        if (!agree) break;
                        if (ids[k] == 0) lengths.push_back(0);
                        ++lengths.back();
                        tokens.push_back(static_cast<index_t>(k));
                    }
                    CAPTURE(bits);
                    CAPTURE(doctest::toString(ids));
                    if (agree) {
                        cpx::packing const p = cpx::packing_from_mask(mask, ids, columns);
                        REQUIRE(p.batch() == thd::from_lengths(lengths));
                        REQUIRE(p.rows() == tokens);
                        REQUIRE(p.mask() == mask);
                        REQUIRE(p.buffer_rows() == count);
                    } else
                        rejects({"packing.cpp", "packing_from_mask: position in row "},
                                [&] { cpx::packing_from_mask(mask, ids, columns); });
                    for (i = 0; i < ids.size() && ids[i] == 2; ++i) ids[i] = -1;
                    if (i < ids.size()) ++ids[i];
                }
            }
        }
    }

    TEST_CASE("a contradiction of mask and positions is named by row, column and reason") {
        auto const rejected = [](list const& mask, list const& ids, index_t columns, std::string const& message) {
            rejects({"packing.cpp", "packing_from_mask: " + message},
                    [&] { cpx::packing_from_mask(mask, ids, columns); });
        };
        list const mask = {0, 1, 1, 1, 1, 0, 1, 1};
        CHECK(cpx::packing_from_mask(mask, list{1, 0, 1, 0, 0, 7, 0, 1}, 4).rows() == list{1, 2, 3, 4, 6, 7});
        rejected(mask, {1, 0, -1, 0, 0, 7, 0, 1}, 4,
                 "position in row 0, column 2: expected 0 or more, for the mask says that this is a token, got -1");
        rejected(mask, {1, 0, 1, 2, 3, 7, 0, 1}, 4,
                 "position in row 1, column 0: expected 0, for a row begins with a sequence, got 3");
        rejected(mask, {1, 0, 1, 2, 0, 1, 2, 3}, 4,
                 "position in row 1, column 2: expected 0, for the mask says that padding was before, got 2");
        rejected(mask, {1, 0, 1, 3, 0, 1, 0, 1}, 4, "position in row 0, column 3: expected 0 or 2, got 3");
        rejected({0, 2}, {0, 0}, 2, "mask in row 0, column 1: expected 0 or 1, got 2");
        rejected(mask, {0, 1}, 4, "number of positions: expected 8, got 2");
        rejected(mask, mask, 3, "size of the list: expected a multiple of the columns, 3, got 8");
        CHECK(cpx::packing_from_mask(list{}, list{}, 4).batch() == thd());
    }

    TEST_CASE("a bad mask is rejected, naming row and column") {
        auto const rejected = [](list const& mask, padding side, std::string const& message) {
            rejects({"packing.cpp", "packing_from_mask: " + message}, [&] { cpx::packing_from_mask(mask, 4, side); });
        };
        rejected({1, 1, 0, 0, 1, 0, 1, 0}, padding::right,
                 "row 1, column 2: expected 0, the sequence having ended before, got 1");
        rejected({1, 0, 0, 1}, padding::any, "row 0, column 3: expected 0, the sequence having ended before, got 1");
        rejected({1, 1, 1, 1, 0, 1, 1, 1}, padding::right,
                 "row 1, column 1: expected 0, the padding being on the right, got 1");
        rejected({0, 1, 1, 1, 0, 1, 1, 0}, padding::left,
                 "row 1, column 3: expected 1, the padding being on the left, got 0");
        rejected({1, 1, 2, 0}, padding::any, "row 0, column 2: expected 0 or 1, got 2");
        rejected({-1, 1, 1, 1}, padding::any, "row 0, column 0: expected 0 or 1, got -1");
        rejected({index_t{1} << 32, 1, 1, 1}, padding::any, "row 0, column 0: expected 0 or 1, got 4294967296");
        rejected({1, 1, 1}, padding::any, "size of the list: expected a multiple of the columns, 4, got 3");
        rejects({"columns: expected at least 1, got -4"}, [] { cpx::packing_from_mask(list(4, 1), -4, padding::any); });
        rejects({"padding: expected left, right or any, got 7"},
                [] { cpx::packing_from_mask(list(4, 1), 4, static_cast<padding>(7)); });
        rejects({"pad: expected joins_last_sequence or own_sequence, got 7"}, [] {
            cpx::thd_from_positions(list{0, 1}, static_cast<cpx::pad>(7));
        });
    }

    TEST_CASE("padded offsets are those of TransformerEngine") {
        auto const padded = [](list const& offsets, index_t multiple) {
            return copy(cpx::pad_to_multiple(thd(offsets), multiple).offsets());
        };
        CHECK(padded({0, 3, 5, 9}, 8) == list{0, 8, 16, 24});
        CHECK(padded({0, 2, 9, 13, 23}, 6) == list{0, 6, 18, 24, 36});
        CHECK(padded({0, 7, 18, 23}, 4) == list{0, 8, 20, 28});

        // pad, then slice for rank 0 of 2
        thd const b = cpx::pad_to_multiple(thd(list{0, 2, 5}), 4);
        std::vector<int> const tokens = {1, 1, 2, 2, 2};
        std::vector<int> buffer(8, -1), slice;
        cpx::unpack(cpx::unpadded(b), cpx::rows(tokens, 1), cpx::rows(buffer, 1));
        CHECK(buffer == std::vector<int>{1, 1, 0, 0, 2, 2, 2, 0});
        cpx::shard(b, cpx::zigzag<2>{}).for_each_piece(0, [&](cpx::range piece) {
            for (index_t row = piece.first; row < piece.last; ++row)
                slice.push_back(buffer[static_cast<std::size_t>(row)]);
        });
        CHECK(slice == std::vector<int>{1, 0, 2, 0});
    }

    TEST_CASE("padded offsets that begin late are a packing, or a batch whose first sequence is padding") {
        list const rows = {2, 3, 4, 6, 7, 8, 9};
        cpx::packing const p(thd(list{0, 3, 7}), {2, 6}, 12);
        CHECK(p.rows() == rows);
        thd const b = cpx::thd_from_cu_seqlens(list{0, 0, 3, 7}, list{0, 2, 6, 12});
        CHECK(b == thd(list{0, 2, 6, 12}, list{0, 3, 4}));
        CHECK(cpx::unpadded(b).rows() == rows);
        CHECK(cpx::unpadded(b).mask() == p.mask());
        rejects({"packing.cpp", "thd_from_cu_seqlens: rows before the first sequence: expected none",
                 "a sequence without valid tokens), got 2"},
                [] {
                    cpx::thd_from_cu_seqlens(list{0, 3, 7}, list{2, 6, 12});
                });
    }

    TEST_CASE("valid and padded offsets give valid and physical lengths") {
        std::vector<std::int32_t> const valid = {0, 30, 60, 90, 120}, padded = {0, 32, 64, 96, 128};
        thd const b = cpx::thd_from_cu_seqlens(valid, padded, {.rows = 128, .multiple = 4});
        CHECK(b == thd(list{0, 32, 64, 96, 128}, list{30, 30, 30, 30}));
        CHECK(cpx::thd_from_cu_seqlens(padded, padded) == thd(list{0, 32, 64, 96, 128}));
        CHECK(cpx::thd_from_cu_seqlens(list{0}, list{0}, {.rows = 0}) == thd());
        CHECK(cpx::thd_from_cu_seqlens(list{0, 3, 3, 3}, list{0, 4, 4, 8}) == thd(list{0, 4, 4, 8}, list{3, 0, 0}));
    }

    TEST_CASE("valid and padded offsets that do not fit are rejected, naming what does not") {
        auto const rejected = [](list const& valid, list const& padded, cpx::padded_buffer buffer,
                                 std::string const& message) {
            rejects({message}, [&] { cpx::thd_from_cu_seqlens(valid, padded, buffer); });
        };
        std::string const where = "thd_from_cu_seqlens: ";
        rejected({0, 60, 120}, {0, 64, 126}, {.rows = 128},
                 where + "last padded offset: expected the rows of the buffer, 128, got 126");
        rejected({0, 504, 1000}, {0, 504, 1004}, {.rows = 1008},
                 where + "last padded offset: expected the rows of the buffer, 1008, got 1004");
        rejected({0, 64, 129}, {0, 64, 128}, {.rows = 128},
                 where + "valid length of sequence 1: expected 0 to 64, got 65");
        rejected({0, 64, 129}, {0, 64, 129}, {.rows = 128}, where + "last padded offset: expected the rows");
        rejected({0, 505, 1008}, {0, 505, 1008}, {.rows = 1008, .multiple = 4},
                 where + "padded length of sequence 0: expected a multiple of 4, got 505");
        rejected({0, 4}, {0, 4, 8}, {}, where + "number of valid offsets: expected 3, got 2");
        rejected({}, {}, {}, where + "valid offsets: number of offsets: expected at least 1, got 0");
        rejected({1, 4}, {0, 4}, {}, where + "valid offsets: offset 0: expected 0, got 1");
        rejected({0, 3, 2}, {0, 4, 8}, {}, where + "valid offsets: offset 2 decreases: expected at least 3, got 2");
        rejected({0, 3, 4}, {0, 4, 3}, {}, where + "padded offsets: offset 2 decreases: expected at least 4, got 3");
        rejected({0, 3}, {-1, 4}, {}, where + "padded offsets: offset 0: expected 0, got -1");
        rejected({0, 3}, {0, 4}, {.multiple = 0}, where + "multiple: expected at least 1, got 0");
        rejects({"packing.cpp"}, [] { cpx::thd_from_cu_seqlens(list{0, 5}, list{0, 4}); });
    }

    TEST_CASE("a multiple below 1 or beyond all rows is rejected") {
        thd const b(list{0, 3, 5});
        rejects({"packing.cpp", "pad_to_multiple: multiple: expected 1 to ", "got 0"},
                [&] { cpx::pad_to_multiple(b, 0); });
        rejects({"multiple: expected 1 to", "got -4"}, [] { cpx::pad_to_multiple(thd(), -4); });
        rejects({"multiple: expected 1 to"}, [&] { cpx::pad_to_multiple(b, std::numeric_limits<index_t>::max()); });
        CHECK(cpx::pad_to_multiple(b, index_t{1} << 40).tokens() == index_t{2} << 40);
        thd const most(list{0, (index_t{1} << 62) - 1});
        CHECK(cpx::unpadded(most).batch() == most);
        rejects({"packing.cpp", "pad_to_multiple: length of sequence 0"}, [&] { cpx::pad_to_multiple(most, 2); });
        rejects({"packing.cpp", "pad_to_multiple: length of sequence 1"},
                [&] { cpx::pad_to_multiple(b, index_t{1} << 61); });
        CHECK(cpx::pad_to_multiple(thd(list{0, 0, 1}), 6) == thd(list{0, 0, 6}, list{0, 1}));
    }

    TEST_CASE("a buffer of rows beyond memory is an error") {
        index_t const many = index_t{1} << 50;
        rejects({"packing.cpp", "rows of the buffer: expected less than 2^62"},
                [] { cpx::packing(thd(), {}, std::numeric_limits<index_t>::max()); });
        if (!support::memory_ends) return;
        rejects({"packing.cpp", "packing::rows: memory"}, [=] { cpx::packing(thd(list{0, many}), {0}, many).rows(); });
        rejects({"packing.cpp", "packing::mask: memory"}, [=] { cpx::packing(thd(), {}, many).mask(); });
    }

    TEST_CASE("a packing lies in its buffer, in order") {
        thd const b(list{0, 3, 3, 5});
        CHECK(cpx::packing(b, {0, 3, 3}, 5).rows() == list{0, 1, 2, 3, 4});
        CHECK(cpx::packing(b, {1, 9, 10}, 12).rows() == list{1, 2, 3, 10, 11});
        rejects({"packing.cpp", "packing: number of starts: expected 3, got 2"}, [&] { cpx::packing(b, {0, 3}, 5); });
        rejects({"packing: start of sequence 0: expected 0 to 9, got -1"}, [&] { cpx::packing(b, {-1, 3, 3}, 12); });
        rejects({"packing: start of sequence 1: expected 3 to 12, got 2"}, [&] { cpx::packing(b, {0, 2, 3}, 12); });
        rejects({"packing: start of sequence 2: expected 4 to 10, got 11"}, [&] { cpx::packing(b, {0, 4, 11}, 12); });
        rejects({"packing: start of sequence 2: expected 4 to 10, got 3"}, [&] { cpx::packing(b, {0, 4, 3}, 12); });
        rejects({"packing: rows of the buffer: expected not negative, got -1"}, [] { cpx::packing(thd(), {}, -1); });
    }

    TEST_CASE("packing keeps every bit and does not read the padding") {
        std::vector<std::uint32_t> const bits = {0x7fc12345u, 0xff800001u, 0x80000000u, 0x00000001u};
        std::vector<float> packed(4), buffer(9, 1.f), again(4);
        std::memcpy(packed.data(), bits.data(), sizeof(float) * bits.size());
        cpx::packing const p(thd(list{0, 1, 4}), {3, 5}, 9);
        cpx::unpack(p, cpx::rows(packed, 1), cpx::rows(buffer, 1));
        for (std::size_t i : {0u, 1u, 2u, 4u, 8u}) CHECK(buffer[i] == 0.f);
        cpx::pack(p, cpx::rows(buffer, 1), cpx::rows(again, 1));
        CHECK(std::memcmp(again.data(), bits.data(), sizeof(float) * bits.size()) == 0);
    }

    TEST_CASE("rows that do not fit a packing are rejected, and nothing is written") {
        cpx::packing const p(thd(list{0, 1, 4}), {3, 5}, 9);
        std::vector<float> packed(8, 5.f), buffer(18, 6.f);
        cpx::rows<float> const few(packed.data(), 3, 2), narrow(packed.data(), 4, 1), fits(packed.data(), 4, 2);
        cpx::rows<float> const low(buffer.data(), 8, 2), all(buffer.data(), 9, 2);
        rejects({"packing.cpp", "pack: packed rows: expected 4, got 3"}, [&] { cpx::pack(p, all, few); });
        rejects({"packing.cpp", "unpack: packed rows: expected 4, got 3"}, [&] { cpx::unpack(p, few, all); });
        rejects({"pack: rows of the buffer: expected 9, got 8"}, [&] { cpx::pack(p, low, fits); });
        rejects({"unpack: rows of the buffer: expected 9, got 8"}, [&] { cpx::unpack(p, fits, low); });
        rejects({"pack: width of the packed rows: expected 2, got 1"}, [&] { cpx::pack(p, all, narrow); });
        rejects({"unpack: width of the packed rows: expected 2, got 1"}, [&] { cpx::unpack(p, narrow, all); });
        cpx::rows<float> const within(buffer.data() + 10, 4, 2);
        rejects({"packing.cpp", "pack: overlap of packed and buffer: expected none"},
                [&] { cpx::pack(p, all, within); });
        rejects({"packing.cpp", "unpack: overlap of buffer and packed: expected none"},
                [&] { cpx::unpack(p, within, all); });
        CHECK(packed == std::vector<float>(8, 5.f));
        CHECK(buffer == std::vector<float>(18, 6.f));
    }
}

} // namespace
