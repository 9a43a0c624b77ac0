// SPDX-License-Identifier: Apache-2.0
// Rows with their sharding in the type.
#pragma once

#include <cpx/core/rows.hpp>
#include <cpx/layout/sharding.hpp>

namespace cpx {

/// A view of one rank's rows of a tensor that is sharded as `S` says.
///
/// The type is what keeps a zigzag shard out of an operator that wants another sharding. Where two shardings have the
/// same type and differ in value (layouts known at run time), plans and operators compare the values and throw.
/// Owns no rows. The number of rows is checked where the view is used, against the plan of the rank that uses it.
template <class T, any_sharding S>
class sharded {
public:
    sharded(rows<T> data, S sharding) : data_(data), sharding_(std::move(sharding)) {}

    operator sharded<T const, S>() const { return {data_, sharding_}; }

    rows<T> const& data() const { return data_; }
    S const& sharding() const { return sharding_; }

    /// Returns columns `[first, first + width)` of every row, such as q inside a fused qkv projection.
    sharded columns(index_t first, index_t width) const { return {data_.columns(first, width), sharding_}; }

private:
    rows<T> data_;
    S sharding_;
};

/// `A` is `T` or `T const`: what an input of an operator on `T` may hold.
template <class A, class T>
concept elements_of = std::same_as<std::remove_const_t<A>, T>;

template <class T, class S>
sharded(rows<T>, S) -> sharded<T, S>;

} // namespace cpx
