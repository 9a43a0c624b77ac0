// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding on the GPU: ordinary and multimodal positions, several tensors at once.
#pragma once

#include <cpx/core/rotary_axes.hpp>
#include <cpx/cuda/row_gather.hpp>
#include <cpx/plan/segments.hpp>

#include <cpx/rotary.cuh>

#include <cmath>
#include <limits>
#include <numbers>

namespace cpx::cuda {

/// What turns the pairs of every head, in memory of the device that is current when it is made; made once a model.
class rotary_pairs {
public:
    /// `frequencies`: radians from one position to the next, a pair each, as of `rotary_frequencies`; channel i of a
    /// head is paired with i + frequencies.size(). axes: of `rotary_axes`, none for ordinary positions.
    ///
    /// `rotary_frequencies<double>` gives the angles of the formula, `rotary_frequencies<float>` made double those of
    /// transformers, which differ by position * 1e-8. how: of elements of 16 bits; others are turned by float. Throws
    /// `cpx::error` if a frequency is negative or not finite, or if there is not an axis from 0 to 2 for every pair.
    explicit rotary_pairs(std::span<double const> frequencies, std::span<int const> axes = {},
                          rounding how = rounding::fp32_inside, caller here = caller::here())
        : how_(how) {
        std::vector<std::uint64_t> turns;
        for (double const f : frequencies) {
            require(f >= 0 && std::isfinite(f), "cuda::rotary_pairs", "frequency", "0 or more", f, here);
            turns.push_back(static_cast<std::uint64_t>(std::ldexp(std::fmod(f / (2 * std::numbers::pi), 1.0), 64)));
        }
        require(axes.empty() || axes.size() == turns.size(), "cuda::rotary_pairs", "number of axes", turns.size(),
                axes.size(), here);
        std::vector<std::uint8_t> bytes;
        for (int const axis : axes) {
            require(axis >= 0 && axis < 3, "cuda::rotary_pairs", "axis", "0 to 2", axis, here);
            bytes.push_back(static_cast<std::uint8_t>(axis));
        }
        turns_ = buffer<std::uint64_t>(std::span<std::uint64_t const>(turns), here);
        axes_ = buffer<std::uint8_t>(std::span<std::uint8_t const>(bytes), here);
    }
    template <class X = cpx::detail::any>
        requires(!std::same_as<X, rotary_pairs> && !std::convertible_to<X const&, std::span<double const>>)
    explicit rotary_pairs(X const& = {}, cpx::detail::any = {}, cpx::detail::any = {}) {
        static_assert(cpx::detail::never<X>, "cpx: cuda::rotary_pairs(frequencies, axes) wants frequencies of double, "
                                             "such as rotary_frequencies<double>(options), and axes of rotary_axes");
    }

    index_t size() const { return turns_.size(); }
    bool multimodal() const { return axes_.size() > 0; }
    rounding how() const { return how_; }
    std::uint64_t const* turns() const { return turns_.data(); }
    std::uint8_t const* axes() const { return axes_.data(); }

private:
    buffer<std::uint64_t> turns_;
    buffer<std::uint8_t> axes_;
    rounding how_;
};

/// A rank's segments in the device's memory, from which kernels compute the token of every row: of any sharding from a
/// list, of layouts that list a rank's chunks also from cu_seqlens on the device.
class segment_table {
public:
    /// Room for `capacity` segments, at least those given. Throws `cpx::error` if the segments' rows do not follow
    /// each other from 0.
    explicit segment_table(std::vector<segment> const& segments, index_t capacity = 0, caller here = caller::here())
        : begins_(std::max({capacity, std::ssize(segments), index_t{1}}), here) {
        write(segments, here);
    }

    /// Replaces the segments: a graph that was captured with this table computes their tokens from now on. It does so
    /// for as many rows as it was captured with; rows behind the last segment hold no token. Not to be called while the
    /// device reads the table. Throws `cpx::error` as above, or if there is no room.
    void write(std::vector<segment> const& segments, caller here = caller::here()) {
        require(std::ssize(segments) <= begins_.size(), "cuda::segment_table", "segments",
                detail::in_words("at most ", begins_.size()), segments.size(), here);
        std::vector<kernels::segment_begin> list;
        index_t row = 0;
        for (segment const& s : segments) {
            require(s.row == row && s.count >= 0, "cuda::segment_table", "first row of a segment", row, s.row, here);
            list.push_back({s.row, s.token});
            row += s.count;
        }
        list.resize(static_cast<std::size_t>(begins_.size()), {std::numeric_limits<index_t>::max(), 0});
        begins_.write(list, here);
        rows_ = row;
    }

    /// Computes the segments of `rank` on the device, in the order of the stream: nothing is uploaded, nobody waits.
    ///
    /// offsets: cu_seqlens of the sharding's batch in the device's memory. Can be captured, and replayed with other
    /// offsets there, for as many rows. Wants room for every chunk of the rank in every sequence, empty or not. Throws
    /// `cpx::error`, before anything is launched, if there is none, or the offsets are too few or elsewhere.
    template <layout_policy P, cut Cut, row_number I>
    void write(sharding<P, scope::sequence, Cut> const& of, int rank, std::span<I const> offsets, cudaStream_t stream,
               caller here = caller::here()) {
        constexpr bool computed =
            listed_layout<P> && std::is_trivially_copyable_v<P> && std::is_trivially_copyable_v<Cut>;
        static_assert(computed,
                      "cpx: cuda::segment_table computes segments on the device from layouts that list a rank's chunks "
                      "and have no memory of their own (zigzag, sequential, striped); write cpx::segments(sharding, "
                      "rank)");
        if constexpr (computed) {
            char const* const where = "cuda::segment_table";
            cpx::detail::require_rank(where, rank, of.ranks(), here);
            index_t const sequences = of.batch().sequences(), segments = sequences * of.policy().chunks(rank);
            require(std::ssize(offsets) == sequences + 1, where, "offsets", sequences + 1, offsets.size(), here);
            require(segments <= begins_.size(), where, "segments, empty ones too",
                    detail::in_words("at most ", begins_.size()), segments, here);
            detail::require_memory(where, {{"offsets", offsets}}, here);
            launch_early(kernels::find_segments<P, Cut, I>, 1, 32, 0, stream, where, here, of.policy(), of.cut(), rank,
                         offsets.data(), static_cast<int>(sequences), begins_.data(), static_cast<int>(begins_.size()));
            rows_ = of.rows(rank, here);
        }
    }

    index_t rows() const { return rows_; }
    kernels::segment_begin const* data() const { return begins_.data(); }
    index_t capacity() const { return begins_.size(); }

private:
    buffer<kernels::segment_begin> begins_;
    index_t rows_ = 0;
};

/// Positions of rows on the device: one a row, three a row as (3, rows), or the tokens of a table of segments.
///
/// Owns nothing. Three a row for pairs that have axes; one a row counts for all axes.
class rotary_positions {
public:
    template <row_number I>
    rotary_positions(std::span<I const> list) : rotary_positions(rows<I const>(list.data(), 1, std::ssize(list))) {}
    template <row_number I>
    rotary_positions(rows<I const> axes) : rotary_positions(axes.count(), axes.width()) {
        if constexpr (sizeof(I) == 8)
            view_.wide = axes.data();
        else
            view_.narrow = axes.data();
        view_.axis_stride = axes.count() > 1 ? axes.stride() : 0;
    }
    rotary_positions(segment_table const& table) : rotary_positions(1, table.rows()) {
        view_.segments = table.data();
        view_.segment_count = static_cast<int>(table.capacity());
    }

    index_t axes() const { return axes_; }
    index_t count() const { return count_; }
    kernels::row_positions const& view() const { return view_; }
    detail::operand list() const {
        if (view_.wide) return {"positions", cpx::rows(view_.wide, axes_, count_, view_.axis_stride)};
        return {"positions", cpx::rows(view_.narrow, axes_, count_, view_.axis_stride)};
    }
    /// Returns where on the device they are.
    void const* memory() const {
        if (view_.segments) return view_.segments;
        return view_.wide ? static_cast<void const*>(view_.wide) : view_.narrow;
    }

private:
    rotary_positions(index_t axes, index_t count) : axes_(axes), count_(count) {}

    index_t axes_, count_;
    kernels::row_positions view_{};
};

/// A tensor to rotate: rows of heads side by side, and where the result goes; y may be x.
template <class T>
struct rotated {
    rows<T const> x;
    rows<T> y;
};

namespace detail {

/// Throws `cpx::error` unless a tensor fits head_dim and positions, and lies apart from them and those `before` it.
template <gpu_number T>
void require_rotated(char const* where, rotated<T> const& tensor, std::span<rotated<T> const> before, index_t head_dim,
                     rotary_positions const& positions, caller here) {
    auto const& [x, y] = tensor;
    require_sizes(where, {"x", x}, here);
    require_sizes(where, {"y", y}, here);
    require(x.count() == positions.count(), where, "rows of x", in_words("as many as positions, ", positions.count()),
            x.count(), here);
    require(x.width() % head_dim == 0, where, "width of x", in_words("a multiple of head_dim, ", head_dim), x.width(),
            here);
    require(y.count() == x.count() && y.width() == x.width(), where, "rows and width of y",
            in_words(x.count(), ", ", x.width()), in_words(y.count(), ", ", y.width()), here);
    require_apart(where, {{"y", y}}, {{"x", x}}, here, in_place::yes);
    require_apart(where, {{"y", y}}, {positions.list()}, here);
    for (auto const& other : before) {
        require_apart(where, {{"y", y}, {"another y", other.y}}, {}, here);
        require_apart(where, {{"y", y}}, {{"another x", other.x}}, here);
        require_apart(where, {{"another y", other.y}}, {{"x", x}}, here);
    }
}

/// Returns the tensors of a call, if they fit, and how many rows and heads they have.
template <gpu_number T>
kernels::rotary_call check_rotated(char const* where, std::span<rotated<T> const> tensors, index_t head_dim,
                                   rotary_pairs const& pairs, rotary_positions const& positions, caller here) {
    index_t const half = pairs.size(), element = static_cast<index_t>(sizeof(T)), most = kernels::most_rotated;
    require(!tensors.empty() && std::ssize(tensors) <= most, where, "tensors", in_words("1 to ", most), tensors.size(),
            here);
    require(head_dim > 0 && head_dim <= (1 << 20), where, "head_dim", "1 to 2^20", head_dim, here);
    require(2 * half <= head_dim, where, "pairs", "at most head_dim / 2", half, here);
    require(positions.axes() == 1 || (positions.axes() == 3 && (pairs.multimodal() || half == 0)), where,
            "positions a row", pairs.multimodal() ? "1 or 3" : "1, for pairs have no axes", positions.axes(), here);
    kernels::rotary_call call{};
    index_t heads = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(most); ++i) {
        auto& to = call.tensor[i];
        to.first_head = static_cast<int>(heads);
        if (i >= tensors.size()) continue;
        auto const& [x, y] = tensors[i];
        require_rotated(where, tensors[i], tensors.first(i), head_dim, positions, here);
        heads += x.width() / head_dim;
        require(heads <= (1 << 16), where, "heads", "at most 2^16", heads, here);
        to = {reinterpret_cast<char const*>(x.data()), reinterpret_cast<char*>(y.data()), x.stride() * element,
              y.stride() * element, to.first_head};
    }
    for (auto const& [x, y] : tensors) require_memory(where, {{"x", x}, {"y", y}}, here);
    if (heads > 0 && positions.count() > 0 && half > 0) {
        require_memory(where, "pairs", pairs.turns(), here);
        require_memory(where, "positions", positions.memory(), here);
    }
    call.heads = static_cast<int>(heads);
    call.rows = positions.count();
    return call;
}

template <gpu_number T>
void rotary(char const* where, std::span<rotated<T> const> tensors, index_t head_dim, rotary_pairs const& pairs,
            rotary_positions const& positions, float direction, cudaStream_t stream, caller here) {
    auto call = check_rotated(where, tensors, head_dim, pairs, positions, here);
    if (call.heads == 0 || call.rows == 0) return;
    index_t const half = pairs.size(), element = static_cast<index_t>(sizeof(T)), heads = call.heads;
    index_t bytes = head_dim * element | half * element;
    for (auto const& [x, y] : tensors)
        if (x.width() > 0) bytes |= address(x.data()) | address(y.data()) | row_bytes(x) | row_bytes(y);
    bool const moves = std::ranges::any_of(tensors, [](auto const& t) { return t.x.data() != t.y.data(); });
    call.positions = positions.view(), call.turns = pairs.turns(), call.axes = pairs.axes();
    call.head_bytes = static_cast<int>(head_dim * element);
    call.half = static_cast<int>(half), call.rotated = static_cast<int>(2 * half);
    call.others = moves ? static_cast<int>(head_dim - 2 * half) : 0;
    call.direction = direction, call.round_each = pairs.how() == rounding::round_each_op;

    kernels::with_bytes<sizeof(T)>(vector_bytes({bytes}), [&](auto size) {
        constexpr int at_once = size / static_cast<int>(sizeof(T)), threads = kernels::rotary_threads;
        auto const shares = [](index_t count, index_t of) { return (count + of - 1) / of; };
        auto const launch = [&](auto* kernel, dim3 grid, dim3 block) {
            launch_early(kernel, grid, block, 0, stream, where, here, call);
        };
        // Without pairs there are only channels to copy.
        index_t const lanes = std::clamp<index_t>(half / at_once, 1, std::min(threads, kernels::most_angles / at_once));
        index_t const all_groups = shares(heads, kernels::rotary_heads), cuts = shares(all_groups, threads / lanes);
        index_t const groups = shares(all_groups, cuts), across = lanes * groups;
        index_t const rows = std::min<index_t>(threads / across, kernels::most_angles / (lanes * at_once));
        call.lanes = static_cast<int>(lanes);
        dim3 const grid = dims(shares(call.rows, rows), cuts, std::max<index_t>(1, shares(half, lanes * at_once)));
        if constexpr (size == 16) {
            if (!moves && 2 * half * element == 128 && head_dim * element > 128) {
                index_t const warps = shares(heads, kernels::line_heads);
                index_t const y = std::min<index_t>(warps, kernels::line_warps), z = kernels::line_warps / y;
                return launch(kernels::rotary_lines<T>, dims(shares(call.rows, z), shares(warps, y), 1),
                              dims(32, y, z));
            }
            if (moves || (2 * half * element) % 128 == 0)
                return launch(kernels::rotary<T, at_once, true>, grid, dims(across, rows, 1));
        }
        launch(kernels::rotary<T, at_once, false>, grid, dims(across, rows, 1));
    });
}

} // namespace detail

/// Rotates channel i of every head with channel i + D by its row's angle of pair i, D = pairs.size():
///
///     y_i = x_i cos_i - x_{i+D} sin_i,    y_{i+D} = x_{i+D} cos_i + x_i sin_i
///
/// x, y: (positions.count(), heads * head_dim), up to four tensors, with heads of their own number; y may be x. Other
/// channels pass through; in place they are not touched. All arithmetic is float, with angles exact to 2^-32 of a turn;
/// rounded once, or as `rounding` of the pairs says.
/// 16 bytes at once where beginnings, strides, head_dim and D are multiples of 16 bytes, else a smaller power of two.
/// Throws `cpx::error` if shapes do not fit, or if memory is not the current device's or overlaps in another way,
/// before anything is launched. Can be captured. Source: as of the host's `rotary`.
template <gpu_number T>
void rotary(std::span<rotated<T> const> tensors, index_t head_dim, rotary_pairs const& pairs,
            rotary_positions const& positions, cudaStream_t stream, caller here = caller::here()) {
    auto const range = named_range<"cpx rotary">();
    detail::rotary<T>("cuda::rotary", tensors, head_dim, pairs, positions, 1, stream, here);
}

/// Computes dx, the y of `rotated`, from dy, its x: rotates by the angles negated. Arguments and errors as in `rotary`.
template <gpu_number T>
void rotary_backward(std::span<rotated<T> const> tensors, index_t head_dim, rotary_pairs const& pairs,
                     rotary_positions const& positions, cudaStream_t stream, caller here = caller::here()) {
    auto const range = named_range<"cpx rotary_backward">();
    detail::rotary<T>("cuda::rotary_backward", tensors, head_dim, pairs, positions, -1, stream, here);
}

} // namespace cpx::cuda
