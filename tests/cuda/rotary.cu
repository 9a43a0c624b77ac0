// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/cuda/rotary.hpp>

#include <cpx/layout/sequential.hpp>
#include <cpx/layout/striped.hpp>
#include <cpx/layout/zigzag.hpp>
#include <cpx/ops/local/rotary.hpp>

#include <doctest/doctest.h>

#include "../../harness/graph.hpp"
#include "gpus.hpp"

#include <support/random.hpp>
#include <support/rejects.hpp>

#include <cstring>
#include <deque>

namespace {

using cpx::rows;
using cpx::cuda::buffer;
using support::splitmix;
namespace cuda = cpx::cuda;

template <class T>
std::span<T const> view(std::vector<T> const& values) {
    return values;
}

/// Returns how far a result in T may be from the exact one: its rounding and 2e-6 of what was added.
template <class T>
double tolerance(double exact, double added) {
    double const half_ulp = std::same_as<T, float>    ? 0x1p-24 * std::abs(exact)
                            : std::same_as<T, __half> ? std::max(0x1p-11 * std::abs(exact), 0x1p-25)
                                                      : 0x1p-8 * std::abs(exact);
    return 1.0001 * half_ulp + 2e-6 * added;
}

template <class T>
double rounded(double value) {
    return static_cast<float>(static_cast<T>(static_cast<float>(value)));
}

/// Whether a cosine or sine rounds to one T with the errors that float has: of an angle of half a turn, 2^-25 of that.
template <class T>
bool rounds_surely(double value) {
    double const error = 1e-7 + 3e-7 * std::abs(value);
    return rounded<T>(value - error) == rounded<T>(value + error);
}

/// One tensor of a call: on the host before and after, on the device, with margins that hold NaN.
template <class T>
struct tensor {
    cpx::index_t count, width, x_stride, y_stride, shift;
    bool in_place;
    std::vector<T> x, y;
    buffer<T> x_device, y_device;

    tensor(splitmix& numbers, cpx::index_t row_count, cpx::index_t row_width, bool aligned)
        : count(row_count), width(row_width), x_stride(width + numbers.between(0, 2) * 8),
          y_stride(width + numbers.between(0, 2) * 8), shift(aligned ? 0 : numbers.between(0, 3)),
          in_place(numbers.between(0, 1)) {
        if (!aligned) x_stride += numbers.between(0, 3), y_stride += numbers.between(0, 3);
        if (in_place) y_stride = x_stride;
        x.resize(static_cast<std::size_t>(shift + count * x_stride + 5));
        y.resize(static_cast<std::size_t>(shift + count * y_stride + 5), static_cast<T>(std::nanf("")));
        for (T& value : x) value = static_cast<T>(static_cast<float>(numbers.between(-30000, 30000)) / 8000.0f);
        if (in_place) y = x;
        x_device = buffer<T>(view(x)), y_device = buffer<T>(view(y));
    }
    cuda::rotated<T> arguments() const {
        T* const to = (in_place ? x_device : y_device).data() + shift;
        return {rows<T const>(x_device.data() + shift, count, width, x_stride), rows<T>(to, count, width, y_stride)};
    }

    /// Returns where the device's y is not x rotated by the host in double, or its margins have changed, or "".
    std::string difference(cpx::index_t head_dim, rows<double> cos, rows<double> sin, bool backward,
                           cpx::rounding how) const {
        std::vector<T> const found = (in_place ? x_device : y_device).read();
        std::vector<double> from(static_cast<std::size_t>(count * width)), to(from.size());
        rows<double> const a(from.data(), count, width), b(to.data(), count, width);
        for (cpx::index_t row = 0; row < count; ++row)
            for (cpx::index_t c = 0; c < width; ++c)
                a(row, c) = static_cast<float>(x[static_cast<std::size_t>(shift + row * x_stride + c)]);
        if (backward)
            cpx::rotary_backward<double>(a, head_dim, cos, sin, b);
        else
            cpx::rotary<double>(a, head_dim, cos, sin, b);
        cpx::index_t const half = cos.width();
        for (std::size_t i = 0; i < found.size(); ++i) {
            cpx::index_t const place = static_cast<cpx::index_t>(i) - shift;
            cpx::index_t const row = place < 0 ? count : place / std::max<cpx::index_t>(1, y_stride);
            cpx::index_t const c = place - row * y_stride, channel = c % head_dim;
            bool right = std::memcmp(&found[i], &y[i], sizeof(T)) == 0; // a margin
            double exact = static_cast<float>(y[i]);
            if (row < count && c < width) {
                exact = b(row, c);
                double const value = static_cast<float>(found[i]);
                if (channel >= 2 * half)
                    right = value == exact;
                else {
                    double const other = a(row, channel < half ? c + half : c - half);
                    double const cosine = cos(row, channel % half), sine = sin(row, channel % half);
                    if (sizeof(T) == 4 || how == cpx::rounding::fp32_inside)
                        right = std::abs(value - exact) <= tolerance<T>(exact, std::abs(a(row, c)) + std::abs(other));
                    else if (!rounds_surely<T>(cosine) || !rounds_surely<T>(sine))
                        right = true;
                    else {
                        double const sign = (channel < half) == backward ? 1 : -1;
                        exact = rounded<T>(rounded<T>(a(row, c) * rounded<T>(cosine)) +
                                           sign * rounded<T>(other * rounded<T>(sine)));
                        right = value == exact;
                    }
                }
            }
            if (!right)
                return "row " + std::to_string(row) + ", column " + std::to_string(c) + " of (" +
                       std::to_string(count) + ", " + std::to_string(width) + "): expected " + std::to_string(exact) +
                       ", got " + std::to_string(static_cast<float>(found[i])) + "; strides " +
                       std::to_string(x_stride) + ", " + std::to_string(y_stride) + ", shift " + std::to_string(shift) +
                       (in_place ? ", in place" : "");
        }
        return "";
    }
};

/// Returns rows of a zigzag batch of random lengths on one of its ranks.
std::vector<cpx::segment> some_segments(splitmix& numbers) {
    std::vector<cpx::index_t> lengths;
    for (cpx::index_t s = numbers.between(0, 6); s > 0; --s)
        lengths.push_back(numbers.between(0, 3) * numbers.between(0, 50));
    int const ranks = static_cast<int>(numbers.between(1, 5));
    cpx::sharding<cpx::zigzag<>> const sharding(cpx::thd::from_lengths(lengths), cpx::zigzag<>(ranks));
    return cpx::segments(sharding, static_cast<int>(numbers.between(0, ranks - 1)));
}

/// One call with everything chosen by `seed`, checked against the host.
template <class T>
void one_call(std::uint64_t seed) {
    splitmix numbers(seed);
    cuda::stream const stream;
    static constexpr cpx::index_t counts[] = {0, 1, 2, 3, 7, 33, 64, 257};
    static constexpr cpx::index_t shapes[][2] = {{2, 1},     {2, 0},   {5, 2},  {6, 1},     {16, 8},
                                                 {10, 5},    {64, 32}, {96, 0}, {256, 32},  {128, 64},
                                                 {256, 128}, {80, 12}, {48, 4}, {1032, 516}};
    auto const& shape = shapes[numbers.between(0, 13)];
    cpx::index_t const head_dim = shape[0], half = shape[1];
    int const kind = static_cast<int>(numbers.between(0, 4)); // 64 bits, 32 bits, segments; 3 of 64, 3 of 32 bits
    bool const axes = kind > 2 || numbers.between(0, 2) == 0, backward = numbers.between(0, 1);
    bool const aligned = numbers.between(0, 2) > 0;

    auto const segments = some_segments(numbers);
    cuda::segment_table const table(segments, numbers.between(0, 10));
    cpx::index_t const count = kind == 2 ? table.rows() : counts[numbers.between(0, 7)];
    std::vector<cpx::index_t> wide(static_cast<std::size_t>(count * (kind > 2 ? 3 : 1)));
    for (cpx::index_t& p : wide)
        p = numbers.between(0, 1) ? numbers.between(0, 200) : numbers.between(-1000000, 1000000);
    if (kind == 2) wide = cpx::positions(segments);
    std::vector<std::int32_t> const narrow(wide.begin(), wide.end());
    buffer<std::int64_t> const wide_device{view(wide)};
    buffer<std::int32_t> const narrow_device{view(narrow)};
    cuda::rotary_positions const positions =
        kind == 0   ? cuda::rotary_positions(std::span<std::int64_t const>(wide_device.data(), wide.size()))
        : kind == 1 ? cuda::rotary_positions(std::span<std::int32_t const>(narrow_device.data(), wide.size()))
        : kind == 2 ? cuda::rotary_positions(table)
        : kind == 3 ? cuda::rotary_positions(rows<std::int64_t const>(wide_device.data(), 3, count))
                    : cuda::rotary_positions(rows<std::int32_t const>(narrow_device.data(), 3, count));

    auto const frequencies =
        cpx::rotary_frequencies<double>({.theta = numbers.between(0, 1) ? 1e4 : 1e7, .rotary_dim = 2 * half});
    std::vector<int> axis(static_cast<std::size_t>(axes ? half : 0));
    for (int& a : axis) a = static_cast<int>(numbers.between(0, 2));
    auto const how = numbers.between(0, 1) ? cpx::rounding::round_each_op : cpx::rounding::fp32_inside;
    cuda::rotary_pairs const pairs(frequencies, axis, how);
    std::vector<double> c(static_cast<std::size_t>(count * half)), s(c.size());
    rows<double> const cos(c.data(), count, half), sin(s.data(), count, half);
    for (cpx::index_t row = 0; row < count; ++row)
        for (cpx::index_t i = 0; i < half; ++i) {
            cpx::index_t const a = kind > 2 ? axis[static_cast<std::size_t>(i)] : 0;
            double const angle = static_cast<double>(wide[static_cast<std::size_t>(a * count + row)]) *
                                 frequencies[static_cast<std::size_t>(i)];
            cos(row, i) = std::cos(angle), sin(row, i) = std::sin(angle);
        }

    static constexpr cpx::index_t head_counts[] = {0, 1, 2, 3, 5, 16};
    std::deque<tensor<T>> tensors;
    std::vector<cuda::rotated<T>> arguments;
    for (cpx::index_t n = numbers.between(1, 4); n > 0; --n)
        arguments.push_back(
            tensors.emplace_back(numbers, count, head_counts[numbers.between(0, 5)] * head_dim, aligned).arguments());
    if (backward)
        cuda::rotary_backward(view(arguments), head_dim, pairs, positions, stream);
    else
        cuda::rotary(view(arguments), head_dim, pairs, positions, stream);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        std::string const difference = tensors[i].difference(head_dim, cos, sin, backward, how);
        REQUIRE_MESSAGE(difference == "", "seed ", seed, ", ", sizeof(T), " bytes, tensor ", i, " of ", tensors.size(),
                        ", head_dim ", head_dim, ", half ", half, ", kind ", kind, axes ? ", axes" : "",
                        backward ? ", backward: " : ": ", difference);
    }
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("pairs have the axes of transformers") {
        using order = cpx::axis_order;
        auto const text = [](std::array<cpx::index_t, 3> section, order o) {
            std::string result;
            for (int const axis : cpx::rotary_axes(section, o)) result += "thw"[axis];
            return result;
        };
        auto const thw = [](int count) {
            std::string result;
            for (int i = 0; i < count; ++i) result += "thw";
            return result;
        };
        CHECK(text({24, 20, 20}, order::interleaved) == thw(20) + "tttt");
        CHECK(text({11, 11, 10}, order::interleaved) == thw(10) + "th");
        CHECK(text({2, 1, 1}, order::interleaved) == "thwt");
        CHECK(text({2, 1, 1}, order::sectioned) == "tthw");
        CHECK(text({16, 24, 24}, order::sectioned) ==
              std::string(16, 't') + std::string(24, 'h') + std::string(24, 'w'));
        CHECK(text({0, 0, 0}, order::sectioned).empty());
        support::rejects({"rotary.cu", "rotary_axes: section: expected not negative, got -1"}, [&] {
            cpx::rotary_axes({3, -1, 2}, order::sectioned);
        });
    }

    TEST_CASE("frequencies, axes and tables that make no sense are refused") {
        std::vector<double> const two{1, 0.5}, negative{1, -0.5}, none{1, std::nan("")};
        std::vector<int> const one_axis{0}, axis_3{0, 3};
        using support::rejects;
        rejects({"rotary.cu", "cuda::rotary_pairs: frequency: expected 0 or more, got -0.5"},
                [&] { cuda::rotary_pairs const p(negative); });
        rejects({"cuda::rotary_pairs: frequency", "nan"}, [&] { cuda::rotary_pairs const p(none); });
        rejects({"cuda::rotary_pairs: number of axes: expected 2, got 1"},
                [&] { cuda::rotary_pairs const p(two, one_axis); });
        rejects({"cuda::rotary_pairs: axis: expected 0 to 2, got 3"}, [&] { cuda::rotary_pairs const p(two, axis_3); });
        if (!has_gpus()) return;
        cuda::segment_table table({{0, 0, 0, 3}});
        rejects({"rotary.cu", "cuda::segment_table: segments: expected at most 1, got 2"}, [&] {
            table.write({{0, 0, 0, 3}, {1, 0, 3, 1}});
        });
        rejects({"cuda::segment_table: first row of a segment: expected 3, got 4"}, [&] {
            cuda::segment_table const t({{0, 0, 0, 3}, {1, 0, 4, 1}});
        });
        buffer<std::int64_t> const offsets(2);
        std::span<std::int64_t const> const one(offsets.data(), 2);
        auto const folded = cpx::shard(cpx::thd({0, 3}), cpx::zigzag<2>{});
        rejects({"rotary.cu", "cuda::segment_table: segments, empty ones too: expected at most 1, got 2"},
                [&] { table.write(folded, 0, one, nullptr); });
        rejects({"cuda::segment_table: offsets: expected 2, got 1"},
                [&] { table.write(folded, 0, one.first(1), nullptr); });
    }

    TEST_CASE("shapes that do not fit are refused before anything is launched") {
        cuda::rotary_pairs const pairs(std::span<double const>{}); // needs no memory of a device
        std::vector<float> memory(4 * 65537);
        std::vector<std::int64_t> const list(9);
        std::span<std::int64_t const> const four(list.data(), 4);
        auto const shape = [&](cpx::index_t count, cpx::index_t width, cpx::index_t stride) {
            return rows<float>(memory.data(), count, width, stride);
        };
        auto const call = [&](std::vector<cuda::rotated<float>> tensors, cpx::index_t head_dim, auto positions) {
            return [&pairs, tensors, head_dim, positions] {
                cuda::rotary<float>(tensors, head_dim, pairs, positions, nullptr);
            };
        };
        auto const fits = cuda::rotated<float>{shape(4, 6, 6), shape(4, 6, 6)};
        using support::rejects;
        rejects({"rotary.cu", "cuda::rotary: tensors: expected 1 to 4, got 0"}, call({}, 3, four));
        rejects({"cuda::rotary: tensors: expected 1 to 4, got 5"}, call({fits, fits, fits, fits, fits}, 3, four));
        rejects({"cuda::rotary: head_dim: expected 1 to 2^20, got 0"}, call({fits}, 0, four));
        rejects({"cuda::rotary: heads: expected at most 2^16, got 65537"},
                call({{shape(4, 65537, 65537), shape(4, 65537, 65537)}}, 1, four));
        rejects({"cuda::rotary: rows of x: expected as many as positions, 3, got 4"},
                call({fits}, 3, std::span<std::int64_t const>(list.data(), 3)));
        rejects({"cuda::rotary: width of x: expected a multiple of head_dim, 4, got 6"}, call({fits}, 4, four));
        rejects({"cuda::rotary: rows and width of y: expected 4, 6, got 4, 3"},
                call({fits, {shape(4, 6, 6), shape(4, 3, 3)}}, 3, four));
        rejects({"rotary.cu", "cuda::rotary: overlap of y and x: expected none, or the same rows"},
                call({{shape(4, 6, 6), shape(4, 6, 8)}}, 3, four));
        rejects({"cuda::rotary: overlap of y and another y: expected none"}, call({fits, fits}, 3, four));
        rejects({"cuda::rotary: stride of x: expected at least the width, 6, got 5"},
                call({{shape(4, 6, 5), shape(4, 6, 6)}}, 3, four));
        rejects({"cuda::rotary_backward: head_dim: expected 1 to 2^20, got -1"},
                [&] { cuda::rotary_backward<float>(std::vector{fits}, -1, pairs, four, nullptr); });
        if (!has_gpus()) return;
        std::vector<double> const two{1, 0.5};
        rows<std::int64_t const> const three(list.data(), 3, 3), two_axes(list.data(), 2, 4);
        std::vector<int> const axes{0, 1};
        cuda::rotary_pairs const plain(two), multimodal(two, axes);
        auto const square = cuda::rotated<float>{shape(3, 6, 6), shape(3, 6, 6)};
        rejects({"cuda::rotary: positions a row: expected 1, for pairs have no axes, got 3"},
                [&] { cuda::rotary<float>(std::vector{square}, 6, plain, three, nullptr); });
        rejects({"cuda::rotary: positions a row: expected 1 or 3, got 2"},
                [&] { cuda::rotary<float>(std::vector{fits}, 6, multimodal, two_axes, nullptr); });
        rejects({"cuda::rotary: pairs: expected at most head_dim / 2, got 2"},
                [&] { cuda::rotary<float>(std::vector{fits}, 3, cuda::rotary_pairs(two), four, nullptr); });
    }

    TEST_CASE("memory of the host is refused, and tensors of another sharding") {
        if (!has_gpus()) return;
        std::vector<double> const two{1, 0.5};
        cuda::rotary_pairs const pairs(two);
        using list = std::vector<cpx::index_t>;
        auto const sharding = cpx::shard(cpx::thd::from_lengths(list{4}), cpx::zigzag<>(1)),
                   other = cpx::shard(cpx::thd::from_lengths(list{3, 1}), cpx::zigzag<>(1));
        cuda::segment_table const table(cpx::segments(sharding, 0));
        std::vector<float> memory(24);
        std::vector<std::int64_t> const numbers(4);
        buffer<float> const device(24);
        rows<float> const host(memory.data(), 4, 6), here(device.data(), 4, 6), none(nullptr, 4, 6);
        auto const call = [&](rows<float> x, rows<float> y, cuda::rotary_positions const& positions) {
            return [=, &pairs] {
                cuda::rotary<float>(std::vector{cuda::rotated<float>{x, y}}, 6, pairs, positions, nullptr);
            };
        };
        auto const of_host = [](char const* what) {
            return std::string(what) + ": expected memory of the current device, 0, got memory of the host";
        };
        using support::rejects;
        rejects({"rotary.cu", of_host("cuda::rotary: x")}, call(host, here, table));
        rejects({of_host("cuda::rotary: y")}, call(here, host, table));
        rejects({"cuda::rotary: y: expected memory of the current device, got null"}, call(here, none, table));
        rejects({of_host("cuda::rotary: positions")}, call(here, here, std::span<std::int64_t const>(numbers)));
        cpx::sharded const x(here, sharding, 0, cuda::memory(nullptr)),
            elsewhere(here, other, 0, cuda::memory(nullptr));
        rejects({"rotary.cu", "cuda::rotary: sharding of y: expected that of x, got another"},
                [&] { cuda::rotary(x, 6, pairs, table, elsewhere); });
        rejects({"rotary.cu", "cuda::rotary_backward: sharding of dx: expected that of dy, got another"},
                [&] { cuda::rotary_backward(x, 6, pairs, table, elsewhere); });
    }

    TEST_CASE("rotation has the digits of Qwen3-VL's and Qwen2.5-VL's") {
        if (!has_gpus()) return;
        std::vector<double> const frequencies{1, 0.1, 0.01, 0.001};
        std::vector<std::int64_t> const thw{3, 5, 7};
        std::vector<float> const x{1, 2, 3, 4, 5, 6, 7, 8};
        buffer<std::int64_t> const positions{view(thw)};
        cuda::stream const stream;
        std::pair<cpx::axis_order, std::vector<float>> const known[] = {
            {cpx::axis_order::interleaved,
             {-1.695593f, -1.121388f, 2.503053f, 3.975982f, -4.808842f, 6.224346f, 7.192686f, 8.011964f}},
            {cpx::axis_order::sectioned,
             {-1.695593f, 0.137552f, 2.646397f, 3.943902f, -4.808842f, 6.323059f, 7.141189f, 8.027804f}}};
        for (auto const& [order, expected] : known) {
            cuda::rotary_pairs const pairs(frequencies, cpx::rotary_axes({2, 1, 1}, order));
            buffer<float> const values{view(x)};
            rows<float> const row(values.data(), 1, 8);
            std::vector<cuda::rotated<float>> const tensors{{row, row}};
            cuda::rotary(view(tensors), 8, pairs, rows<std::int64_t const>(positions.data(), 3, 1), stream);
            std::vector<float> const found = values.read();
            for (std::size_t i = 0; i < 8; ++i) CHECK(found[i] == doctest::Approx(expected[i]).epsilon(1e-6));
        }
    }

    TEST_CASE("rotation is the host's: any heads, strides, alignment, positions and axes, forward and backward") {
        if (!has_gpus()) return;
        for (std::uint64_t seed = 1; seed <= 250; ++seed) {
            one_call<float>(seed);
            one_call<__nv_bfloat16>(1000 + seed);
            one_call<__half>(2000 + seed);
        }
    }

    TEST_CASE_TEMPLATE("rotation in place has the bits of rotation elsewhere, and of rows that are not aligned", T,
                       float, __nv_bfloat16, __half) {
        if (!has_gpus()) return;
        splitmix numbers(3);
        cuda::stream const stream;
        cpx::index_t const half = 64 / static_cast<cpx::index_t>(sizeof(T)), head_dim = 3 * half, rows_of_x = 37;
        std::vector<double> frequencies;
        for (cpx::index_t i = 0; i < half; ++i) frequencies.push_back(std::pow(1e4, -static_cast<double>(i) / 32));
        cuda::rotary_pairs const pairs(frequencies);
        std::vector<cpx::index_t> list;
        for (cpx::index_t i = 0; i < rows_of_x; ++i) list.push_back(numbers.between(0, 100000));
        buffer<std::int64_t> const positions{view(list)};
        for (cpx::index_t const heads : {1, 5, 18, 41}) { // beside a tensor of 2
            cpx::index_t const widths[] = {2 * head_dim, heads * head_dim};
            std::vector<buffer<T>> x, y, shifted;
            std::vector<cuda::rotated<T>> in_place, elsewhere, unaligned;
            for (cpx::index_t const width : widths) {
                std::vector<T> values(static_cast<std::size_t>(rows_of_x * width));
                for (T& value : values) value = static_cast<T>(static_cast<float>(numbers.between(-900, 900)) / 300.0f);
                std::vector<T> one_further(1);
                one_further.insert(one_further.end(), values.begin(), values.end());
                x.emplace_back(view(values)), y.emplace_back(rows_of_x * width),
                    shifted.emplace_back(view(one_further));
                auto const at = [&](T* data) { return rows<T>(data, rows_of_x, width); };
                elsewhere.push_back({at(x.back().data()), at(y.back().data())});
                in_place.push_back({at(x.back().data()), at(x.back().data())});
                unaligned.push_back({at(shifted.back().data() + 1), at(shifted.back().data() + 1)});
            }
            for (auto const* tensors : {&elsewhere, &in_place, &unaligned})
                cuda::rotary(view(*tensors), head_dim, pairs, std::span<std::int64_t const>(positions.data(), 37),
                             stream);
            for (std::size_t t = 0; t < 2; ++t) {
                auto const first = x[t].read(), second = y[t].read(), third = shifted[t].read();
                CHECK(std::memcmp(first.data(), second.data(), first.size() * sizeof(T)) == 0);
                CHECK(std::memcmp(first.data(), third.data() + 1, first.size() * sizeof(T)) == 0);
            }
        }
    }

    TEST_CASE("a captured rotation follows the segments that are there when it runs, and backward undoes it") {
        if (!has_gpus()) return;
        std::vector<double> const frequencies{1, 0.1};
        cuda::rotary_pairs const pairs(frequencies);
        cuda::segment_table table({{0, 5, 0, 9}}, 3);
        std::vector<float> const x(9 * 4, 1);
        buffer<float> values{view(x)};
        rows<float> const row(values.data(), 9, 4);
        std::vector<cuda::rotated<float>> const tensors{{row, row}};
        cuda::stream const stream;
        harness::graph const there(stream, [&] { cuda::rotary(view(tensors), 4, pairs, table, stream); });
        harness::graph const back(stream, [&] { cuda::rotary_backward(view(tensors), 4, pairs, table, stream); });
        for (std::vector<cpx::segment> const& list : {std::vector<cpx::segment>{{0, 5, 0, 9}},
                                                      {{0, 0, 0, 2}, {1, 3, 2, 4}, {2, 1000000, 6, 3}},
                                                      {{3, 1, 0, 9}}}) {
            table.write(list);
            auto const tokens = cpx::positions(list);
            there.launch(stream);
            std::vector<float> const found = values.read();
            for (std::size_t i = 0; i < 9; ++i)
                for (std::size_t pair = 0; pair < 2; ++pair) {
                    double const angle = static_cast<double>(tokens[i]) * frequencies[pair];
                    CHECK(std::abs(found[i * 4 + pair] - (std::cos(angle) - std::sin(angle))) < 2e-6);
                    CHECK(std::abs(found[i * 4 + pair + 2] - (std::cos(angle) + std::sin(angle))) < 2e-6);
                }
            back.launch(stream);
            for (float const value : values.read()) CHECK(std::abs(value - 1) < 2e-6);
            values.write(x);
        }
    }

    TEST_CASE("segments that the device computes from cu_seqlens are those of the sharding, in a replayed graph, too") {
        if (!has_gpus()) return;
        cuda::stream const stream;
        auto const each = [&](auto const& layout, auto const& cut) {
            std::vector<std::vector<cpx::index_t>> const packings{{7, 130, 0, 64}, {1, 0, 0, 200}, {50, 50, 1, 100}};
            for (int rank = 0; rank < layout.ranks(); ++rank) {
                buffer<std::int64_t> offsets(5);
                cuda::segment_table table({}, 4 * layout.chunks(rank) + rank);
                auto const write = [&](auto const& lengths) {
                    table.write(cpx::shard(cpx::thd::from_lengths(lengths), layout, cut), rank,
                                std::span<std::int64_t const>(offsets.data(), 5), stream);
                };
                harness::graph const again(stream, [&] { write(packings[0]); });
                for (auto const& lengths : packings) {
                    auto const batch = cpx::thd::from_lengths(lengths);
                    offsets.write({batch.offsets().begin(), batch.offsets().end()});
                    again.launch(stream);
                    stream.synchronize();
                    std::vector<cpx::kernels::segment_begin> found(static_cast<std::size_t>(table.capacity()));
                    REQUIRE(cudaMemcpy(found.data(), table.data(), found.size() * sizeof found[0],
                                       cudaMemcpyDeviceToHost) == cudaSuccess);
                    std::vector<cpx::index_t> tokens;
                    auto const want = cpx::positions(cpx::segments(cpx::shard(batch, layout, cut), rank));
                    for (cpx::index_t row = 0; row < std::ssize(want); ++row) {
                        auto const& s = found[cpx::last_at_or_before(row, found.size(),
                                                                     [&](std::size_t i) { return found[i].row; })];
                        tokens.push_back(s.token + row - s.row);
                    }
                    CHECK(tokens == want);
                }
                write(packings[1]);
                auto const sharding = cpx::shard(cpx::thd::from_lengths(packings[1]), layout, cut);
                CHECK(table.rows() == sharding.rows(rank));
            }
        };
        each(cpx::zigzag<>(3), cpx::balanced{});
        each(cpx::zigzag<2>{}, cpx::aligned<64>{});
        each(cpx::sequential<>(5), cpx::aligned<cpx::dynamic>(4));
        each(cpx::striped<>(2), cpx::balanced{});
    }

    TEST_CASE("heads lie where 32 bits do not reach") {
        if (!has_gpus()) return;
        cpx::index_t const stride = (cpx::index_t{5} << 28) + 8, width = 512;
        cpx::index_t const size = 2 * stride + width;
        if (!has_free_memory(size * static_cast<cpx::index_t>(sizeof(float)))) return;
        buffer<float> far(size);
        std::vector<float> const ones(static_cast<std::size_t>(width), 1);
        std::vector<std::int64_t> const list{1, 2, 3};
        buffer<std::int64_t> const positions{view(list)};
        for (cpx::index_t row = 0; row < 3; ++row)
            REQUIRE(cudaMemcpy(far.data() + row * stride, ones.data(), ones.size() * 4, cudaMemcpyHostToDevice) ==
                    cudaSuccess);
        rows<float> const x(far.data(), 3, width, stride);
        std::vector<cuda::rotated<float>> const tensors{{x, x}};
        cuda::stream const stream;
        std::vector<double> const frequencies(64, 1.0);
        cuda::rotary(view(tensors), 128, cuda::rotary_pairs(frequencies),
                     std::span<std::int64_t const>(positions.data(), 3), stream);
        stream.synchronize();
        for (cpx::index_t row = 0; row < 3; ++row) {
            std::vector<float> found(ones.size());
            REQUIRE(cudaMemcpy(found.data(), far.data() + row * stride, found.size() * 4, cudaMemcpyDeviceToHost) ==
                    cudaSuccess);
            double const angle = static_cast<double>(row + 1);
            for (std::size_t c = 0; c < found.size(); ++c) {
                double const sign = c % 128 < 64 ? -1 : 1;
                REQUIRE(std::abs(found[c] - (std::cos(angle) + sign * std::sin(angle))) < 2e-6);
            }
        }
    }
}
