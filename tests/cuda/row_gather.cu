// SPDX-License-Identifier: Apache-2.0
#include <cpx/cuda/row_gather.hpp>

#include <doctest/doctest.h>

#include "../../harness/graph.hpp"
#include "gpus.hpp"

#include <support/random.hpp>
#include <support/rejects.hpp>

#include <cstring>

namespace {

using cpx::rows;
using cpx::cuda::buffer;
using support::splitmix;
namespace cuda = cpx::cuda;

struct twelve_bytes {
    std::uint32_t word[3];
};

template <class T>
std::span<T const> view(buffer<T> const& b) {
    return {b.data(), static_cast<std::size_t>(b.size())};
}

/// A buffer on the device and the same on the host: rows that begin `shift` elements into it, each with a margin.
template <class T>
struct twin {
    cpx::index_t count, width, stride, shift;
    std::vector<T> host;
    buffer<T> device;

    twin(splitmix& numbers, cpx::index_t row_count, cpx::index_t row_width)
        : count(row_count), width(row_width), stride(width + numbers.between(0, 1) * numbers.between(0, 17)),
          shift(numbers.between(0, 2) == 0 ? numbers.between(0, 15) : 0) {
        if (numbers.between(0, 1)) stride = (width + 15) / 16 * 16;
        host.resize(static_cast<std::size_t>(shift + count * stride + 9));
    }
    T& at(cpx::index_t row, cpx::index_t column) {
        return host[static_cast<std::size_t>(shift + row * stride + column)];
    }
    void upload() { device = buffer<T>(std::span<T const>(host)); }
    rows<T> on_device() const { return {device.data() + shift, count, width, stride}; }

    /// Returns where the device's buffer differs from the host's, its margins included, or "".
    std::string difference() const {
        std::vector<T> const found = device.read();
        for (std::size_t i = 0; i < found.size(); ++i)
            if (std::memcmp(&found[i], &host[i], sizeof(T)) != 0) {
                auto const place = static_cast<cpx::index_t>(i) - shift;
                return "element " + std::to_string(place) + " = row " +
                       std::to_string(place / std::max<cpx::index_t>(1, stride)) + ", of (" + std::to_string(count) +
                       ", " + std::to_string(width) + "), stride " + std::to_string(stride) + ", shift " +
                       std::to_string(shift) + ", of " + std::to_string(sizeof(T)) + " bytes";
            }
        return "";
    }
};

/// Fills a buffer with any bytes, or where numbers are added with numbers.
template <class T>
void fill(splitmix& numbers, std::vector<T>& values) {
    for (T& value : values) {
        std::uint64_t const bits[2] = {numbers.next(), numbers.next()};
        std::memcpy(&value, bits, sizeof(T));
    }
}
template <class T>
void fill_numbers(splitmix& numbers, std::vector<T>& values) {
    for (T& value : values) value = static_cast<T>(static_cast<float>(numbers.between(-9999, 9999)) / 1000.0f);
}

cpx::index_t const counts[] = {0, 1, 2, 3, 7, 33, 300};
cpx::index_t const widths[] = {0, 1, 2, 3, 5, 8, 31, 64, 100, 129, 256, 1000, 2048, 5001};

/// Returns `count` numbers below `limit`, different if there are so many, some of them -1.
template <class I>
std::vector<I> some_rows(splitmix& numbers, cpx::index_t count, cpx::index_t limit) {
    std::vector<I> all(static_cast<std::size_t>(std::max(count, limit)), I{-1});
    std::iota(all.begin(), all.begin() + limit, I{0});
    for (std::size_t i = all.size(); i > 1; --i)
        std::swap(all[i - 1], all[static_cast<std::size_t>(numbers.between(0, static_cast<cpx::index_t>(i) - 1))]);
    all.resize(static_cast<std::size_t>(count));
    for (I& row : all)
        if (numbers.between(0, 5) == 0) row = -static_cast<I>(numbers.between(1, 3));
    return all;
}

template <class T, class I>
void moves(std::uint64_t seed) {
    splitmix numbers(seed);
    cuda::stream const stream;
    for (cpx::index_t const count : counts)
        for (cpx::index_t const width : widths) {
            cpx::index_t const others = counts[numbers.between(0, 6)];
            bool const zeros = numbers.between(0, 1);
            CAPTURE(seed);
            CAPTURE(count);
            CAPTURE(width);
            CAPTURE(others);

            // Rows are gathered more than once, too.
            twin<T> from(numbers, others, width), to(numbers, count, width);
            fill(numbers, from.host), fill(numbers, to.host);
            from.upload(), to.upload();
            std::vector<I> list(static_cast<std::size_t>(count));
            for (I& row : list) row = static_cast<I>(numbers.between(-1, others - 1));
            buffer<I> const device_list{std::span<I const>(list)};
            cuda::gather_rows(from.on_device(), view(device_list), to.on_device(), stream);
            for (cpx::index_t i = 0; i < count; ++i)
                for (cpx::index_t c = 0; c < width; ++c) {
                    I const row = list[static_cast<std::size_t>(i)];
                    to.at(i, c) = row < 0 ? T{} : from.at(row, c);
                }
            REQUIRE_MESSAGE(to.difference() == "", "gather: ", to.difference());

            twin<T> source(numbers, count, width), target(numbers, others, width);
            fill(numbers, source.host), fill(numbers, target.host);
            source.upload(), target.upload();
            auto const places = some_rows<I>(numbers, count, others);
            buffer<I> const device_places{std::span<I const>(places)};
            cuda::scatter_rows(source.on_device(), view(device_places), target.on_device(),
                               zeros ? cuda::other_rows::zeros : cuda::other_rows::stay, stream);
            if (zeros)
                for (cpx::index_t row = 0; row < others; ++row)
                    for (cpx::index_t c = 0; c < width; ++c) target.at(row, c) = T{};
            for (cpx::index_t i = 0; i < count; ++i)
                if (I const row = places[static_cast<std::size_t>(i)]; row >= 0)
                    for (cpx::index_t c = 0; c < width; ++c) target.at(row, c) = source.at(i, c);
            REQUIRE_MESSAGE(target.difference() == "", "scatter: ", target.difference());
        }
}

/// `repeats`: a list that is grouped on the host; else a list without equal numbers, in no order.
template <class T, class I>
void adds(std::uint64_t seed, bool repeats) {
    splitmix numbers(seed);
    cuda::stream const stream;
    for (cpx::index_t const count : counts)
        for (cpx::index_t const width : widths) {
            cpx::index_t const others = counts[numbers.between(0, 6)];
            CAPTURE(seed);
            CAPTURE(repeats);
            CAPTURE(count);
            CAPTURE(width);
            CAPTURE(others);
            twin<T> from(numbers, count, width), to(numbers, others, width);
            fill_numbers(numbers, from.host), fill_numbers(numbers, to.host);
            from.upload(), to.upload();
            auto list = some_rows<I>(numbers, count, others);
            if (repeats)
                for (I& row : list) row = static_cast<I>(numbers.between(-2, others - 1) / 2);
            if (others == 0) std::ranges::fill(list, I{-1});
            auto const sorted = cpx::grouped(std::span<I const>(list));
            CHECK(std::ranges::is_sorted(sorted.list));
            buffer<I> const device_list{std::span<I const>(repeats ? sorted.list : list)};
            buffer<I> const device_order{std::span<I const>(sorted.order)};
            cuda::scatter_add_rows(from.on_device(), view(device_list),
                                   repeats ? view(device_order) : std::span<I const>(), to.on_device(), stream);
            // The same order and the same roundings: the same bits.
            for (cpx::index_t row = 0; row < others; ++row) {
                std::vector<cpx::index_t> sources;
                for (cpx::index_t i = 0; i < count; ++i)
                    if (list[static_cast<std::size_t>(i)] == row) sources.push_back(i);
                if (sources.empty()) continue;
                for (cpx::index_t c = 0; c < width; ++c) {
                    float sum = static_cast<float>(to.at(row, c));
                    for (cpx::index_t const i : sources) sum += static_cast<float>(from.at(i, c));
                    to.at(row, c) = static_cast<T>(sum);
                }
            }
            REQUIRE_MESSAGE(to.difference() == "", "add: ", to.difference());
        }
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("rows and lists that do not fit are refused before anything is launched") {
        std::vector<float> memory(100);
        std::vector<std::int32_t> const list(4);
        auto const shape = [&](cpx::index_t count, cpx::index_t width, cpx::index_t stride) {
            return rows<float>(memory.data(), count, width, stride);
        };
        auto const numbers = [&](std::size_t count) { return std::span<std::int32_t const>(list.data(), count); };
        auto const stay = cuda::other_rows::stay;
        auto const none = numbers(0);
        using support::rejects;
        rejects({"row_gather.cu", "cuda::gather_rows: width of to: expected 3, got 4"},
                [&] { cuda::gather_rows(shape(5, 3, 3), numbers(2), shape(2, 4, 4), nullptr); });
        rejects({"cuda::gather_rows: numbers in the list: expected the rows of to, 2, got 3"},
                [&] { cuda::gather_rows(shape(5, 3, 3), numbers(3), shape(2, 3, 3), nullptr); });
        rejects({"cuda::gather_rows: stride of from: expected at least the width, 3, got 2"},
                [&] { cuda::gather_rows(shape(5, 3, 2), numbers(2), shape(2, 3, 3), nullptr); });
        rejects({"cuda::scatter_rows: numbers in the list: expected the rows of from, 2, got 3"},
                [&] { cuda::scatter_rows(shape(2, 3, 3), numbers(3), shape(3, 3, 3), stay, nullptr); });
        rejects({"cuda::scatter_rows: stride of to: expected at least the width, 3, got 1"},
                [&] { cuda::scatter_rows(shape(2, 3, 3), numbers(2), shape(3, 3, 1), stay, nullptr); });
        rejects({"rows: bytes: expected not negative, got -2 x 3 x 4"},
                [&] { cuda::scatter_rows(shape(-2, 3, 3), numbers(2), shape(3, 3, 3), stay, nullptr); });
        rejects({"cuda::scatter_add_rows: numbers in the list: expected the rows of from, 2, got 1"},
                [&] { cuda::scatter_add_rows(shape(2, 3, 3), numbers(1), none, shape(3, 3, 3), nullptr); });
        rejects({"cuda::scatter_add_rows: numbers in the order: expected 2, got 1"},
                [&] { cuda::scatter_add_rows(shape(2, 3, 3), numbers(2), numbers(1), shape(3, 3, 3), nullptr); });
    }

    TEST_CASE("memory of the host is refused before anything is launched") {
        if (!has_gpus()) return;
        std::vector<float> memory(100);
        std::vector<std::int32_t> const numbers(2);
        buffer<float> const device(100);
        buffer<std::int32_t> const device_numbers(2);
        rows<float> const host(memory.data(), 2, 3), rows_here(device.data(), 2, 3), none(nullptr, 2, 3);
        std::span<std::int32_t const> const list(device_numbers.data(), 2), host_list(numbers), no_order;
        auto const stay = cuda::other_rows::stay;
        auto const of_host = [](char const* what) {
            return std::string(what) + ": expected memory of the current device, 0, got memory of the host";
        };
        using support::rejects;
        rejects({"row_gather.cu", of_host("cuda::gather_rows: from")},
                [&] { cuda::gather_rows(host, list, rows_here, nullptr); });
        rejects({of_host("cuda::gather_rows: to")}, [&] { cuda::gather_rows(rows_here, list, host, nullptr); });
        rejects({of_host("cuda::gather_rows: list")},
                [&] { cuda::gather_rows(rows_here, host_list, rows_here, nullptr); });
        rejects({"cuda::scatter_rows: to: expected memory of the current device, got null"},
                [&] { cuda::scatter_rows(rows_here, list, none, stay, nullptr); });
        rejects({of_host("cuda::scatter_rows: list")},
                [&] { cuda::scatter_rows(rows_here, host_list, rows_here, stay, nullptr); });
        rejects({of_host("cuda::scatter_add_rows: from")},
                [&] { cuda::scatter_add_rows(host, list, no_order, rows_here, nullptr); });
        rejects({of_host("cuda::scatter_add_rows: order")},
                [&] { cuda::scatter_add_rows(rows_here, list, host_list, rows_here, nullptr); });
        rejects({"row_gather.cu", "cuda::gather_rows: overlap of to and from: expected none, got some"},
                [&] { cuda::gather_rows(rows_here, list, rows<float>(device.data() + 3, 2, 3), nullptr); });
    }

    TEST_CASE("a grouped list has equal numbers side by side, each with where it stood, ascending") {
        std::vector<std::int64_t> const list{3, -1, 0, 3, 0, 7, 3};
        auto const sorted = cpx::grouped(std::span<std::int64_t const>(list));
        CHECK(sorted.list == std::vector<std::int64_t>{-1, 0, 0, 3, 3, 3, 7});
        CHECK(sorted.order == std::vector<std::int64_t>{1, 2, 4, 0, 3, 6, 5});
        CHECK(cpx::grouped(std::span<std::int32_t const>()).list.empty());
    }

    TEST_CASE("gathered and scattered rows are the host's, to the byte, and no other byte changes") {
        if (!has_gpus()) return;
        for (std::uint64_t seed = 1; seed <= 3; ++seed) {
            moves<std::uint8_t, std::int32_t>(seed);
            moves<__nv_bfloat16, std::int64_t>(seed);
            moves<float, std::int32_t>(seed);
            moves<double, std::int64_t>(seed);
            moves<twelve_bytes, std::int32_t>(seed);
        }
    }

    TEST_CASE("added rows have the bits of additions one after the other") {
        if (!has_gpus()) return;
        for (std::uint64_t seed = 1; seed <= 2; ++seed)
            for (bool const repeats : {false, true}) {
                adds<float, std::int32_t>(seed, repeats);
                adds<__nv_bfloat16, std::int64_t>(seed, repeats);
                adds<__half, std::int32_t>(seed, repeats);
            }
    }

    TEST_CASE("a captured gather and scatter follow the list that is there when they run") {
        if (!has_gpus()) return;
        splitmix numbers(7);
        std::vector<float> values(40 * 24), zeros(40 * 24);
        fill_numbers(numbers, values);
        buffer<float> const from{std::span<float const>(values)}, to{std::span<float const>(zeros)};
        buffer<float> const back{std::span<float const>(zeros)};
        buffer<std::int32_t> list(40);
        cuda::stream const stream;
        rows<float> const a(from.data(), 40, 24), b(to.data(), 40, 24), c(back.data(), 40, 24);
        harness::graph const graph(stream, [&] {
            cuda::gather_rows(a, view(list), b, stream);
            cuda::scatter_rows(b, view(list), c, cuda::other_rows::zeros, stream);
        });
        for (int turn = 0; turn < 3; ++turn) {
            auto const order = some_rows<std::int32_t>(numbers, 40, 40);
            list.write(order);
            graph.launch(stream);
            std::vector<float> expected(values.size());
            for (std::int32_t const row : order)
                if (row >= 0) std::copy_n(values.begin() + row * 24, 24, expected.begin() + row * 24);
            CHECK(back.read() == expected);
        }
    }

    TEST_CASE("rows lie where 32 bits do not reach") {
        if (!has_gpus()) return;
        cpx::index_t const stride = (cpx::index_t{3} << 30) + 16, size = 2 * stride + 4096;
        if (!has_free_memory(size)) return;
        buffer<std::uint8_t> const far(size);
        std::vector<std::uint8_t> values(3 * 4096), found(values.size());
        splitmix numbers(8);
        fill(numbers, values);
        buffer<std::uint8_t> const near{std::span<std::uint8_t const>(values)}, back(3 * 4096);
        buffer<std::int32_t> const list{std::span<std::int32_t const>(std::vector<std::int32_t>{2, 0, 1})};
        cuda::stream const stream;
        rows<std::uint8_t> const wide(far.data(), 3, 4096, stride);
        cuda::scatter_rows(rows<std::uint8_t>(near.data(), 3, 4096), view(list), wide, cuda::other_rows::zeros, stream);
        cuda::gather_rows(wide, view(list), rows<std::uint8_t>(back.data(), 3, 4096), stream);
        CHECK(back.read() == values);
        CHECK(cudaMemcpy(found.data(), far.data() + 2 * stride, 4096, cudaMemcpyDeviceToHost) == cudaSuccess);
        CHECK(std::equal(values.begin(), values.begin() + 4096, found.begin()));
    }
}
