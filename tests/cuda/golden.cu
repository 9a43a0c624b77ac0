// SPDX-License-Identifier: Apache-2.0
// Golden files on one GPU: every tensor moves as between host threads, bit for bit, and rotary embedding agrees with
// transformers.
#include <cpx/cuda/relayout.hpp>
#include <cpx/cuda/rotary.hpp>

#include <cpx/model/json.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/ops/local/rotary.hpp>

#include <doctest/doctest.h>

#include <support/files.hpp>

#include <ops/on_ranks.hpp>

#include "gpus.hpp"
#include "one_gpu.hpp"

#include <cmath>
#include <cstring>
#include <filesystem>

namespace {

namespace cuda = cpx::cuda;
using cpx::index_t;
using on_ranks::take;

/// Returns the paths of all golden files, sorted.
std::vector<std::filesystem::path> golden_files() {
    std::vector<std::filesystem::path> list;
    for (auto const& entry : std::filesystem::directory_iterator(support::golden_dir))
        if (entry.path().extension() == ".safetensors") list.push_back(entry.path());
    std::ranges::sort(list);
    return list;
}

/// A tensor of a golden file with a row for every token. float and double hold its values exactly.
struct golden_tensor {
    std::string name;
    std::vector<cpx::section> sections;
    std::vector<double> values;
};

/// Returns (rows, columns) of values as (columns, rows).
template <class T>
std::vector<T> turned(std::vector<T> const& values, index_t rows) {
    std::vector<T> result;
    index_t const columns = rows > 0 ? std::ssize(values) / rows : 0;
    for (index_t c = 0; c < columns; ++c)
        for (index_t r = 0; r < rows; ++r) result.push_back(values[static_cast<std::size_t>(r * columns + c)]);
    return result;
}

/// Lists the tensors of a file whose first axis is tokens, or whose second is, turned, and q, k and v in one; in
/// (T, D), channels are heads.
std::vector<golden_tensor> tensors_of(cpx::safetensors const& file, index_t tokens) {
    std::vector<golden_tensor> list;
    for (std::string const& name : file.names()) {
        auto const& shape = file.tensor(name).shape;
        bool const of_weights = name.starts_with("weight.") || name.starts_with("grad."); // may have as many rows
        if (shape.empty() || of_weights) continue;
        if (shape[0] == tokens) {
            index_t const heads = shape.size() > 1 ? shape[1] : 1;
            list.push_back({name, {{heads, shape.size() > 2 ? shape[2] : 1}}, file.read<double>(name)});
        } else if (shape.size() == 2 && shape[1] == tokens) {
            list.push_back({name, {{shape[0], 1}}, turned(file.read<double>(name), shape[0])});
        }
    }
    golden_tensor side_by_side{"q, k and v side by side", {}, {}};
    for (index_t row = 0; row < tokens; ++row)
        for (auto const& x : list) {
            if (x.name != "q" && x.name != "k" && x.name != "v") continue;
            if (row == 0) side_by_side.sections.push_back(x.sections[0]);
            auto const values = on_ranks::slice(x.values, on_ranks::width(x.sections), row, row + 1);
            side_by_side.values.insert(side_by_side.values.end(), values.begin(), values.end());
        }
    if (!side_by_side.sections.empty()) list.push_back(std::move(side_by_side));
    return list;
}

template <class T>
T as(double value) {
    return static_cast<T>(static_cast<std::conditional_t<sizeof(T) == 8, double, float>>(value));
}

template <class T>
bool is_nan(T value) {
    return std::isnan(static_cast<std::conditional_t<sizeof(T) == 8, double, float>>(value));
}

template <class T, class S>
void poison(cpx::tensor<T, S>& local) {
    std::memset(static_cast<void*>(local.data().data()), 0xff,
                static_cast<std::size_t>(local.data().count() * local.width()) * sizeof(T));
}

/// Bytes that a rank's memory should hold: what nobody writes stays poison.
template <class T, class S>
void put(cpx::tensor<T, S> const& local, index_t offset, std::vector<char>& bytes) {
    std::size_t const size = static_cast<std::size_t>(local.data().count() * local.width()) * sizeof(T);
    bytes.resize(std::max(bytes.size(), static_cast<std::size_t>(offset) + size), '\xff');
    if (size > 0) std::memcpy(bytes.data() + offset, local.data().data(), size);
}

/// Where the ranks of one GPU meet, and the batch there.
struct place {
    one_gpu::ranks const& gpu;
    std::span<index_t const> batch;
};

/// Moves all ranks' rows, `source(rank)`, to `offset` of their memory, in one launch.
template <class T, class From, class To, class F>
void move(From const& from, To const& to, index_t width, place const& at, index_t offset, F&& source) {
    std::vector<cuda::relayout<T, From, To>> moves;
    std::vector<cpx::kernels::relayout_rows> arguments;
    for (int r = 0; r < from.ranks(); ++r) {
        moves.emplace_back(cpx::relayout(from, to, r), width);
        arguments.push_back(
            moves.back().arguments(source(r), at.gpu.peers[static_cast<std::size_t>(r)], offset, at.batch));
    }
    one_gpu::run(moves, arguments, at.gpu);
}

/// Moves a tensor there and back, between threads and on the GPU, into poison. Returns what is wrong, or "".
template <class T, class From, class To>
std::string round_trip(golden_tensor const& x, From const& from, To const& to, place const& at) {
    int const ranks = from.ranks();
    index_t const width = on_ranks::width(x.sections);
    std::vector<T> whole;
    for (double const value : x.values) whole.push_back(as<T>(value));
    std::vector<cpx::tensor<T, From>> source, back;
    std::vector<cpx::tensor<T, To>> there;
    std::vector<cuda::buffer<T>> device;
    index_t bytes = 0;
    for (int r = 0; r < ranks; ++r) {
        source.push_back(take(whole, x.sections, from, r));
        there.emplace_back(to, r, std::ssize(on_ranks::columns(to, r, x.sections)));
        back.emplace_back(from, r, source.back().width());
        auto const data = source.back().data();
        device.emplace_back(std::span<T const>(data.data(), static_cast<std::size_t>(data.count() * data.width())));
        bytes = std::max(bytes, there.back().data().count() * there.back().width() * index_t{sizeof(T)});
        poison(there.back());
        poison(back.back());
    }
    cpx::threads::run(ranks, [&](cpx::threads& comm) {
        auto const r = static_cast<std::size_t>(comm.rank());
        cpx::exchange(cpx::relayout(from, to, comm.rank()), source[r].view(), there[r].view(), comm);
        cpx::exchange(cpx::relayout(to, from, comm.rank()), there[r].view(), back[r].view(), comm);
    });

    index_t const home = (bytes + 255) / 256 * 256; // where the rows come back to
    std::vector<std::vector<char>> expected(static_cast<std::size_t>(ranks));
    for (std::size_t r = 0; r < expected.size(); ++r) {
        put(there[r], 0, expected[r]);
        put(back[r], home, expected[r]);
        expected[r].resize(std::min(expected[r].size() + 64, static_cast<std::size_t>(at.gpu.memory[r].size())),
                           '\xff');
        cuda::check(cudaMemset(at.gpu.memory[r].data(), 0xff, expected[r].size()), "cudaMemset");
    }
    move<T>(from, to, width, at, 0, [&](int r) {
        auto const rows = source[static_cast<std::size_t>(r)].data();
        return cpx::rows<T const>(device[static_cast<std::size_t>(r)].data(), rows.count(), rows.width());
    });
    move<T>(to, from, width, at, home, [&](int r) {
        auto const rows = there[static_cast<std::size_t>(r)].data();
        char const* const memory = at.gpu.memory[static_cast<std::size_t>(r)].data();
        return cpx::rows<T const>(reinterpret_cast<T const*>(memory), rows.count(), rows.width());
    });
    if (!at.gpu.faults().empty()) return "a rank is at fault";
    for (std::size_t r = 0; r < expected.size(); ++r) {
        std::vector<char> got(expected[r].size());
        cuda::check(cudaMemcpy(got.data(), at.gpu.memory[r].data(), got.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
        std::string const rank = " on rank " + std::to_string(r);
        if (got != expected[r]) return "other bytes than the threads'" + rank;
        auto const places = [&](auto const& local, index_t offset) { // the GPU's, as elements
            std::vector<T> values(static_cast<std::size_t>(local.data().count() * local.width()));
            if (!values.empty())
                std::memcpy(static_cast<void*>(values.data()), got.data() + offset, values.size() * sizeof(T));
            return values;
        };
        if (std::ranges::any_of(places(there[r], 0), is_nan<T>)) return "NaN is left" + rank;
        auto const returned = places(back[r], home);
        if (!returned.empty() &&
            std::memcmp(returned.data(), source[r].data().data(), returned.size() * sizeof(T)) != 0)
            return "other bytes than before the round trip" + rank;
    }
    return "";
}

/// Calls `f(name, from, to)` with pairs of shardings in which each kind is a source and a target.
template <class F>
void for_each_pair(cpx::thd const& batch, int ranks, std::vector<cpx::section> const& sections, F&& f) {
    using cpx::scope, cpx::shard;
    auto const zigzag = shard(batch, cpx::zigzag<>(ranks));
    auto const sequential = shard<scope::batch>(batch, cpx::sequential<>(ranks));
    auto const striped = shard(batch, cpx::striped<>(ranks));
    auto const aligned = shard<scope::batch>(batch, cpx::zigzag<>(ranks), cpx::aligned<16>{});
    cpx::replicated<> const replicated(ranks, batch);
    cpx::head_sharded<> const heads(ranks, batch, sections);
    f("zigzag, sequential over batch", zigzag, sequential);
    f("sequential over batch, striped", sequential, striped);
    f("striped, zigzag over batch aligned", striped, aligned);
    f("zigzag over batch aligned, replicated", aligned, replicated);
    f("zigzag, heads", zigzag, heads);
    f("heads, sequential over batch", heads, sequential);
}

/// Moves every tensor of a file over every number of ranks.
void check_moves(cpx::safetensors const& file) {
    auto const offsets = file.read<index_t>("cu_seqlens");
    cpx::thd const batch(offsets);
    one_gpu::offsets const on_device(batch);
    auto const tensors = tensors_of(file, batch.tokens());
    REQUIRE(tensors.size() >= 4);
    index_t widest = 0;
    for (auto const& x : tensors) {
        REQUIRE(std::ranges::none_of(x.values, is_nan<double>));
        widest = std::max(widest, on_ranks::width(x.sections));
    }
    int turn = 0; // elements take turns: each tensor meets each pair with each of them on some W
    for (int const ranks : on_ranks::rank_counts) {
        one_gpu::ranks const gpu(ranks, 2 * (batch.tokens() * widest * 8 + 256), 4);
        for (auto const& x : tensors)
            for_each_pair(batch, ranks, x.sections, [&](std::string const& name, auto const& from, auto const& to) {
                ++turn;
                place const at{gpu, on_device.list()};
                std::string const problem = turn % 3 == 0   ? round_trip<float>(x, from, to, at)
                                            : turn % 3 == 1 ? round_trip<double>(x, from, to, at)
                                                            : round_trip<__nv_bfloat16>(x, from, to, at);
                CAPTURE(x.name);
                CAPTURE(ranks);
                CAPTURE(name);
                REQUIRE(problem == "");
            });
        ++turn;
    }
}

/// What turns the pairs of a file's heads. Its frequencies are those of transformers, in float.
cuda::rotary_pairs pairs_of(cpx::safetensors const& file, index_t head_dim) {
    auto const rope = cpx::json_value::parse(file.metadata("rope"), "rope");
    std::array<index_t, 3> section{24, 20, 20}; // of Qwen3-VL, whose settings here do not say
    if (rope.has("mrope_section")) std::ranges::copy(rope.get<std::vector<index_t>>("mrope_section"), section.begin());
    auto const frequencies =
        cpx::rotary_frequencies<float>({.theta = rope.get<double>("rope_theta"), .rotary_dim = head_dim});
    auto const order =
        file.metadata("layout") == "interleaved" ? cpx::axis_order::interleaved : cpx::axis_order::sectioned;
    return cuda::rotary_pairs(std::vector<double>(frequencies.begin(), frequencies.end()),
                              cpx::rotary_axes(section, order));
}

/// Returns `values`, rows of heads at `positions`, (3, rows), rotated on the GPU, or back, into poison.
std::vector<float> rotated(std::vector<float> const& values, std::vector<index_t> const& positions, index_t head_dim,
                           cuda::rotary_pairs const& pairs, bool back) {
    index_t const count = std::ssize(positions) / 3, width = count ? std::ssize(values) / count : head_dim;
    cuda::buffer<std::int64_t> const device_positions{std::span<index_t const>(positions)};
    cuda::buffer<float> const x{std::span<float const>(values)}, y(x.size());
    if (y.size() > 0) cuda::check(cudaMemset(y.data(), 0xff, values.size() * sizeof(float)), "cudaMemset");
    cuda::rotated<float> const tensor{{x.data(), count, width}, {y.data(), count, width}};
    cpx::rows<std::int64_t const> const axes(device_positions.data(), 3, count);
    std::span<cuda::rotated<float> const> const one(&tensor, 1);
    if (back)
        cuda::rotary_backward<float>(one, head_dim, pairs, axes, nullptr);
    else
        cuda::rotary<float>(one, head_dim, pairs, axes, nullptr);
    return y.read();
}

template <class T, class S>
std::vector<T> values_of(cpx::tensor<T, S> const& local) {
    auto const rows = local.data();
    return {rows.data(), rows.data() + rows.count() * rows.width()};
}

/// Rotates tensor `x` of a file, or rotates it back, and compares it with tensor `y`.
void check_rotary(cpx::safetensors const& file, std::string const& x, std::string const& y, bool back) {
    CAPTURE(x);
    cpx::thd const batch(file.read<index_t>("cu_seqlens"));
    index_t const head_dim = file.tensor(x).shape[2], half = head_dim / 2, width = file.tensor(x).shape[1] * head_dim;
    auto const pairs = pairs_of(file, head_dim);
    auto const positions = file.read<index_t>("position_ids", {3, batch.tokens()});
    auto const from = file.read<float>(x), expected = file.read<float>(y);
    auto const got = rotated(from, positions, head_dim, pairs, back);
    CHECK(on_ranks::relative_error(got, expected) <= 1e-6);
    CHECK(on_ranks::relative_error(rotated(got, positions, head_dim, pairs, !back), from) <= 1e-6);
    // transformers rounds angles of up to 63 to float: 2e-6, as much for their frequency, and the kernel's own 2e-6
    bool close = true;
    for (index_t i = 0; i < std::ssize(got); ++i) {
        auto const a = static_cast<std::size_t>(i);
        auto const b = static_cast<std::size_t>(i % head_dim < half ? i + half : i - half);
        close = close && std::abs(got[a] - expected[a]) <= 1e-5f * (std::abs(from[a]) + std::abs(from[b]));
    }
    CHECK(close);

    auto const sharding = cpx::shard(batch, cpx::zigzag<>(5));
    for (int r = 0; r < sharding.ranks(); ++r) {
        auto const own = values_of(take(from, {{1, width}}, sharding, r));
        auto const own_positions = values_of(take(turned(positions, 3), {{1, 3}}, sharding, r));
        auto const alone = rotated(own, turned(own_positions, sharding.rows(r)), head_dim, pairs, back);
        CHECK(on_ranks::same_bits(alone, values_of(take(got, {{1, width}}, sharding, r))));
    }
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("every golden tensor goes there and back as between threads, and no poison is left") {
        if (!has_gpus()) return;
        auto const files = golden_files();
        REQUIRE(files.size() >= 10);
        for (auto const& path : files) {
            CAPTURE(path.string());
            check_moves(cpx::safetensors(path));
        }
    }

    TEST_CASE("rotary embedding by multimodal positions agrees with transformers, on every sharding") {
        if (!has_gpus()) return;
        for (std::string const name : {"mrope_qwen2_5_vl", "mrope_qwen3_vl"}) {
            CAPTURE(name);
            cpx::safetensors const file(std::filesystem::path(support::golden_dir) / (name + ".safetensors"));
            check_rotary(file, "q", "q_rot", false);
            check_rotary(file, "k", "k_rot", false);
            check_rotary(file, "dq_rot", "dq", true);
            check_rotary(file, "dk_rot", "dk", true);
        }
    }
}
