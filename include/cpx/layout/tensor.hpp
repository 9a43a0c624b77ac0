// SPDX-License-Identifier: Apache-2.0
// One rank's rows of a sharded tensor, with their memory.
#pragma once

#include <cpx/layout/sharded.hpp>

#include <vector>

namespace cpx {

namespace detail {

template <any_sharding S>
index_t rows_of_rank(char const* where, S const& sharding, int rank, caller here) {
    require_rank(where, rank, sharding.ranks(), here); // a sharding of the user's may not ask
    return sharding.rows(rank);
}

} // namespace detail

/// Owns what `sharded` views: the rows that `rank` holds of a tensor sharded as `S` says, `width` elements each.
///
/// Goes wherever a view of it goes. A view of a temporary does not compile: its memory would be gone.
/// Begins with zeros. Cost: O(runs) to count the rows, then their memory.
template <class T, any_sharding S>
class tensor {
public:
    /// Throws `cpx::error` if there is no such rank, or not the memory.
    tensor(S const& sharding, int rank, index_t width, caller here = caller::here())
        : sharding_(sharding), rank_(rank), width_(width), count_(detail::rows_of_rank("tensor", sharding, rank, here)),
          values_(detail::zeros<T>("tensor", {count_, width}, here)) {}

    rows<T> data() & { return {values_.data(), count_, width_}; }
    rows<T const> data() const& { return {values_.data(), count_, width_}; }
    rows<T const> data() const&& = delete;
    sharded<T, S> view() & { return {data(), sharding_, rank_}; }
    sharded<T const, S> view() const& { return {data(), sharding_, rank_}; }
    sharded<T const, S> view() const&& = delete;
    operator sharded<T, S>() & { return view(); }
    operator sharded<T const, S>() const& { return view(); }
    operator sharded<T const, S>() const&& = delete;
    S const& sharding() const { return sharding_; }
    int rank() const { return rank_; }
    index_t width() const { return width_; }

private:
    S sharding_;
    int rank_;
    index_t width_, count_;
    std::vector<T> values_;
};

/// Returns a tensor of zeros of any sharding: `make_tensor<float>(sharding, rank, width)`.
template <class T, any_sharding S>
tensor<T, S> make_tensor(S const& sharding, int rank, index_t width, caller here = caller::here()) {
    return {sharding, rank, width, here};
}

} // namespace cpx
