// SPDX-License-Identifier: Apache-2.0
// Times the causal convolution of three sequences on one GPU against what copying the same bytes would take; exit code
// 1 if a result is wrong.
#include "../../harness/graph.hpp"
#include "timing.hpp"

#include <cpx/cuda/causal_conv1d.hpp>
#include <cpx/layout/sequential.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>

namespace {

using cpx::index_t, cpx::rows;
namespace cuda = cpx::cuda;

constexpr index_t channels = 8192, taps = 4, head_dim = 128;
constexpr float epsilon = 1e-6f;

/// Returns number `i` of a sequence of numbers in [-1, 1), the same on host and device.
__host__ __device__ float random_number(std::uint64_t seed, index_t i) {
    std::uint64_t z = seed * 0x9e3779b97f4a7c15ull + static_cast<std::uint64_t>(i) * 0xd1342543de82ef95ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return static_cast<float>(static_cast<std::int32_t>((z ^ (z >> 31)) >> 40)) * 0x1p-23f - 1.0f;
}

template <class T>
__global__ void fill(T* to, index_t count, std::uint64_t seed) {
    for (index_t i = static_cast<index_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += index_t{gridDim.x} * blockDim.x)
        to[i] = static_cast<T>(random_number(seed, i));
}

template <class T>
double rounded(double value) {
    return static_cast<double>(static_cast<float>(static_cast<T>(static_cast<float>(value))));
}
template <class T>
double rounded(std::uint64_t seed, index_t i) {
    return rounded<T>(static_cast<double>(random_number(seed, i)));
}

/// Returns the milliseconds of one of 20 replays of what `f` enqueues, the median of 7 rounds.
double time_of(cuda::stream const& stream, std::function<void()> const& f) {
    harness::graph const graph(stream, f);
    return static_cast<double>(timing::median_ms(
        stream, [&] { graph.launch(stream); }, [] {}, 20, 7));
}

struct check {
    double difference = 0, norm = 0;
    void add(double got, double expected) {
        difference += (got - expected) * (got - expected);
        norm += expected * expected;
    }
    double error() const { return difference == 0 ? 0 : std::sqrt(difference / norm); }
};

double larger_error(check const& a, check const& b) {
    return std::isnan(a.error()) || std::isnan(b.error()) ? NAN : std::max(a.error(), b.error());
}

/// What a convolution writes: one tensor, or q, k and v, of which q and k are divided by the norms of their heads.
enum class result_is { whole, parts };

template <class T>
class benchmark {
public:
    benchmark(char const* type, index_t count, result_is what, double rate, cuda::stream const& in)
        : type_(type), count_(count), in_parts_(what == result_is::parts), rate_(rate), stream_(in),
          batch_({0, count / 2 + 13, count - count / 8 - 5, count}),
          sharding_(cpx::shard(batch_, cpx::sequential<1>{})),
          plan_(halo(sharding_, 0, taps - 1), halo(sharding_, 0, taps - 1, cpx::side::after)), x_(count * channels),
          dy_(count * channels), y_(count * channels), dx_(count * channels), weight_(channels * taps), bias_(channels),
          dweight_(channels * taps), dbias_(channels), workspace_(cuda::causal_conv1d_workspace(plan_, channels)) {
        random(x_, 1);
        random(dy_, 2);
        random(weight_, 3);
        random(bias_, 4);
    }

    /// What was found; shares are of a copy's speed.
    struct result {
        double forward, backward;
        bool right;
    };
    result run() {
        auto const of = [&](cuda::buffer<T> const& b) { return rows<T>(b.data(), count_, channels); };
        rows<T const> const x = of(x_), dy = of(dy_);
        rows<T const> const weight(weight_.data(), channels, taps);
        std::span<T const> const bias(bias_.data(), static_cast<std::size_t>(channels));
        cuda::causal_conv1d_gradients<T> const to{
            of(dx_), rows<float>(dweight_.data(), channels, taps),
            std::span(dbias_.data(), static_cast<std::size_t>(channels)),
            std::span(workspace_.data(), static_cast<std::size_t>(workspace_.size()))};
        auto const silu = cuda::activation::silu;
        auto const forward = [&] {
            if (in_parts_)
                cuda::causal_conv1d(plan_, x, {}, weight, bias, silu, parts(y_.data()), stream_);
            else
                cuda::causal_conv1d(plan_, x, {}, weight, bias, silu, of(y_), stream_);
        };
        auto const backward = [&] {
            if (in_parts_)
                cuda::causal_conv1d_backward(plan_, x, {}, weight, bias, silu, parts<T const>(dy_.data()), {}, {}, to,
                                             stream_);
            else
                cuda::causal_conv1d_backward(plan_, x, {}, weight, bias, silu, dy, {}, {}, to, stream_);
        };
        poison(y_);
        poison(dx_);
        double const forward_ms = time_of(stream_, forward), backward_ms = time_of(stream_, backward);
        zero(dweight_);
        zero(dbias_);
        backward();
        double const errors[] = {check_rows(y_, in_parts_, [&](index_t row, head h) { return y_of(row, h); }),
                                 check_rows(dx_, false, [&](index_t row, head h) { return dx_of(row, h); }),
                                 check_sums()};
        print("forward", forward_ms, 2, errors[0]);
        print("backward", backward_ms, 3, right(errors[1]) ? errors[2] : errors[1]);
        return {share(forward_ms, 2), share(backward_ms, 3), std::ranges::all_of(errors, right)};
    }

private:
    template <class B>
    void random(B const& b, std::uint64_t seed) {
        fill<<<1024, 256, 0, stream_>>>(b.data(), b.size(), seed);
        cuda::check(cudaGetLastError(), "fill");
    }
    template <class U>
    void set(cuda::buffer<U> const& b, int byte) {
        cuda::check(cudaMemsetAsync(b.data(), byte, static_cast<std::size_t>(b.size()) * sizeof(U), stream_),
                    "cudaMemsetAsync");
    }
    template <class U>
    void poison(cuda::buffer<U> const& b) {
        set(b, 0xff);
    }
    template <class U>
    void zero(cuda::buffer<U> const& b) {
        set(b, 0);
    }

    /// Returns where an element lies in parts that follow each other, each of dense rows.
    index_t in_parts(index_t row, index_t c) const {
        index_t const begin = c < channels / 4 ? 0 : c < channels / 2 ? channels / 4 : channels / 2;
        index_t const width = c < channels / 2 ? channels / 4 : channels / 2;
        return begin * count_ + row * width + c - begin;
    }
    template <class U>
    cuda::conv_parts<U> parts(U* data) const {
        auto const part = [&](index_t begin, index_t width) { return rows<U>(data + begin * count_, count_, width); };
        return {.part = {{{part(0, channels / 4), head_dim},
                          {part(channels / 4, channels / 4), head_dim},
                          {part(channels / 2, channels / 2)}}},
                .epsilon = epsilon};
    }

    /// Channels whose results are divided by their norm, or one whose result is not.
    struct head {
        index_t begin, end;
        std::size_t size() const { return static_cast<std::size_t>(end - begin); }
    };
    head head_of(index_t c) const {
        if (!in_parts_ || c >= channels / 2) return {c, c + 1};
        return {c / head_dim * head_dim, (c / head_dim + 1) * head_dim};
    }

    double z_at(index_t row, index_t c) const {
        index_t const begin = batch_.offset(batch_.sequence(row));
        double z = rounded<T>(4, c);
        for (index_t j = 0; j < taps; ++j)
            if (index_t const from = row - taps + 1 + j; from >= begin)
                z += rounded<T>(3, c * taps + j) * rounded<T>(1, from * channels + c);
        return z;
    }
    /// Returns y of a head, and what it was divided by, the last.
    std::vector<double> y_and_norm(index_t row, head h) const {
        std::vector<double> y;
        double squares = epsilon;
        for (index_t c = h.begin; c < h.end; ++c) {
            double const z = z_at(row, c), silu = z / (1 + std::exp(-z));
            y.push_back(h.size() > 1 ? rounded<T>(silu) : silu);
            squares += y.back() * y.back();
        }
        double const norm = h.size() > 1 ? std::sqrt(squares) : 1;
        for (double& value : y) value /= norm;
        y.push_back(norm);
        return y;
    }
    std::vector<double> y_of(index_t row, head h) const {
        auto y = y_and_norm(row, h);
        y.pop_back();
        return y;
    }
    std::vector<double> dz_of(index_t row, head h) const {
        auto const y = y_and_norm(row, h);
        std::vector<double> dz;
        double along = 0;
        for (index_t c = h.begin; c < h.end; ++c) {
            dz.push_back(rounded<T>(2, in_parts_ ? in_parts(row, c) : row * channels + c));
            along += y[dz.size() - 1] * dz.back();
        }
        for (std::size_t i = 0; i < dz.size(); ++i) {
            double const z = z_at(row, h.begin + static_cast<index_t>(i)), s = 1 / (1 + std::exp(-z));
            if (h.size() > 1) dz[i] = (dz[i] - y[i] * along) / y.back();
            dz[i] *= s * (1 + z * (1 - s));
        }
        return dz;
    }
    std::vector<double> dx_of(index_t row, head h) const {
        index_t const end = batch_.offset(batch_.sequence(row) + 1);
        std::vector<double> dx(h.size());
        for (index_t j = 0; j < taps; ++j)
            if (index_t const later = row + taps - 1 - j; later < end) {
                auto const dz = dz_of(later, h);
                for (std::size_t i = 0; i < dx.size(); ++i)
                    dx[i] += rounded<T>(3, (h.begin + static_cast<index_t>(i)) * taps + j) * dz[i];
            }
        return dx;
    }

    /// Compares rows around the ends of sequences and others; also looks for NaN in every row. Returns the error of
    /// channels of heads or that of the others, whichever is larger.
    template <class F>
    double check_rows(cuda::buffer<T> const& got, bool parts, F&& expected) const {
        check of_heads, of_others;
        std::vector<index_t> sample;
        for (index_t s = 0; s <= batch_.sequences(); ++s)
            for (index_t row = batch_.offset(s) - 4; row < batch_.offset(s) + 4; ++row) sample.push_back(row);
        for (index_t row = 60; row < count_; row += count_ / 24 + 1) sample.push_back(row);
        stream_.synchronize();
        auto const all = got.read();
        bool nan = false;
        for (T const value : all) nan |= std::isnan(static_cast<float>(value));
        for (index_t const row : sample)
            if (row >= 0 && row < count_)
                for (head h = head_of(0); h.begin < channels; h = head_of(h.end)) {
                    auto const values = expected(row, h);
                    check& sum = h.size() > 1 ? of_heads : of_others;
                    for (std::size_t i = 0; i < h.size(); ++i) {
                        index_t const c = h.begin + static_cast<index_t>(i);
                        index_t const at = parts ? in_parts(row, c) : row * channels + c;
                        sum.add(static_cast<double>(static_cast<float>(all[static_cast<std::size_t>(at)])), values[i]);
                    }
                }
        return nan ? NAN : larger_error(of_heads, of_others);
    }
    /// Compares dweight and dbias of some channels.
    double check_sums() const {
        stream_.synchronize();
        auto const dweight = dweight_.read(), dbias = dbias_.read();
        check of_heads, of_others;
        for (index_t c = 0; c < channels; c += 1021) {
            head const h = head_of(c);
            check& sum = h.size() > 1 ? of_heads : of_others;
            double expected[taps + 1] = {};
            for (index_t row = 0; row < count_; ++row) {
                double const dz = dz_of(row, h)[static_cast<std::size_t>(c - h.begin)];
                index_t const begin = batch_.offset(batch_.sequence(row));
                expected[taps] += dz;
                for (index_t j = 0; j < taps; ++j)
                    if (index_t const from = row - taps + 1 + j; from >= begin)
                        expected[j] += dz * rounded<T>(1, from * channels + c);
            }
            for (index_t j = 0; j < taps; ++j)
                sum.add(static_cast<double>(dweight[static_cast<std::size_t>(c * taps + j)]), expected[j]);
            sum.add(static_cast<double>(dbias[static_cast<std::size_t>(c)]), expected[taps]);
        }
        return larger_error(of_heads, of_others);
    }

    static bool right(double error) { return error <= (sizeof(T) == 2 ? 4e-3 : 1e-5); } // NaN is not
    /// Returns the speed, in percent of a copy's, of a kernel that reads and writes `tensors` tensors.
    double share(double ms, int tensors) const {
        return 100 * static_cast<double>(tensors * count_ * channels) * sizeof(T) / (ms * 1e-3) / rate_;
    }
    void print(char const* what, double ms, int tensors, double error) const {
        double const of_copy = share(ms, tensors);
        std::printf("%-9s %6td %-8s %-7s %9.4f %8.0f %8.1f%%   %.1e %s\n", type_, static_cast<std::ptrdiff_t>(count_),
                    what, in_parts_ ? "q, k, v" : "", ms, of_copy / 100 * rate_ * 1e-9, of_copy, error,
                    right(error) ? "ok" : "WRONG");
    }

    char const* type_;
    index_t count_;
    bool in_parts_;
    double rate_;
    cuda::stream const& stream_;
    cpx::thd batch_;
    decltype(cpx::shard(cpx::thd(), cpx::sequential<1>{})) sharding_;
    cuda::conv_plan plan_;
    cuda::buffer<T> x_, dy_, y_, dx_, weight_, bias_;
    cuda::buffer<float> dweight_, dbias_, workspace_;
};

} // namespace

int main(int argc, char** argv) {
    if (int const code = timing::refusal(argc, argv); code >= 0) return code;
    cuda::stream const stream;
    double const rate = timing::copy_bandwidth(stream);
    std::printf("%s, copy of 1 GiB: %.0f GB/s read and written\n", timing::device_name().c_str(), rate * 1e-9);
    std::printf("convolution of %d channels, %d taps, silu, bias, 3 sequences\n", int(channels), int(taps));
    std::printf("q, k, v: in tensors of their own, q and k divided by the norms of heads of %d\n", int(head_dim));
    std::printf("%-9s %6s %-16s %9s %8s %9s   error\n", "elements", "rows", "", "ms", "GB/s", "of copy");
    timing::limits limits;
    bool all_right = true;
    for (cpx::index_t const count : {32768, 8192, 2048}) {
        auto const a = benchmark<__nv_bfloat16>("bfloat16", count, result_is::whole, rate, stream).run();
        auto const b = benchmark<__half>("half", count, result_is::whole, rate, stream).run();
        auto const c = benchmark<float>("float", count, result_is::whole, rate, stream).run();
        auto const d = benchmark<__nv_bfloat16>("bfloat16", count, result_is::parts, rate, stream).run();
        all_right = all_right && a.right && b.right && c.right && d.right;
        if (count != 32768) continue;
        limits.at_least("convolution forward, 32768 x 8192 bf16, of copy", a.forward, 85, "%");
        limits.at_least("convolution backward, 32768 x 8192 bf16, of copy", a.backward, 75, "%");
    }
    limits.print();
    return all_right ? 0 : 1;
}
