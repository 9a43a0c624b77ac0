// SPDX-License-Identifier: Apache-2.0
// One rank's rows of a sharded tensor, with their memory.
#pragma once

#include <cpx/core/element.hpp>
#include <cpx/layout/sharded.hpp>

#include <span>
#include <utility>
#include <vector>

namespace cpx {

namespace detail {

template <any_sharding S>
index_t rows_of_rank(char const* where, S const& sharding, int rank, caller here) {
    require_rank(where, rank, sharding.ranks(), here); // a sharding of the user's may not ask
    return sharding.rows(rank);
}

} // namespace detail

/// Owns what `sharded` views: the rows that `rank` holds of a tensor sharded as `S` says, `width` elements each, in
/// memory M.
///
/// Goes wherever a view of it goes. A view of a temporary does not compile: its memory would be gone.
/// Begins with zeros. Cost: O(runs) to count the rows, then their memory.
template <class T, class S, class M = host_memory>
class tensor {
public:
    /// Throws `cpx::error` if there is no such rank, or not the memory.
    tensor(S const& sharding, int rank, index_t width, M const& memory, caller here = caller::here())
        : sharding_(sharding), rank_(rank), width_(width), count_(detail::rows_of_rank("tensor", sharding, rank, here)),
          memory_(memory), values_(memory.template zeros<T>("tensor", {count_, width}, here)) {}
    /// With memory for `most` elements, to hold other batches later.
    tensor(S const& sharding, int rank, index_t width, M const& memory, index_t most, caller here = caller::here())
        : sharding_(sharding), rank_(rank), width_(width), memory_(memory),
          values_(memory.template zeros<T>("tensor", {most}, here)) {
        hold(sharding, here);
    }
    tensor(S const& sharding, int rank, index_t width, caller here = caller::here())
        requires std::default_initializable<M>
        : tensor(sharding, rank, width, M(), here) {}

    /// Returns one whose elements are not said, for who writes them all.
    static tensor unwritten(S const& sharding, int rank, index_t width, M const& memory, caller here = caller::here()) {
        index_t const count = detail::rows_of_rank("tensor", sharding, rank, here);
        return {detail::unwritten<T>(memory, "tensor", {count, width}, here), sharding, rank, width, memory, count};
    }

    template <class X = detail::any>
    explicit tensor(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                    detail::any = {})
        : tensor(unfit<X>()) {}
    template <class U, any_sharding R, any_memory N>
    tensor(tensor<U, R, N> const&) : tensor(unfit<U>()) {}
    template <class X = detail::any>
    tensor& operator=(X const&) {
        return unfit<X>();
    }

    /// Holds rows of this sharding from now on; what they are is not said. Throws `cpx::error` if they are too many.
    void hold(S const& sharding, caller here = caller::here()) {
        index_t const count = detail::rows_of_rank("tensor", sharding, rank_, here);
        auto const most = static_cast<index_t>(values_.size());
        index_t const elements = detail::product("tensor", "elements of the sharding", {count, width_}, here);
        require(
            elements <= most, "tensor", "elements of the sharding", [&] { return "at most " + std::to_string(most); },
            elements, here);
        sharding_ = sharding;
        count_ = count;
    }
    template <class... X>
        requires(!detail::takes<void(S const&), X...>)
    void hold(X&&...) {
        unfit<X...>();
    }

    rows<T> data() & { return {values_.data(), count_, width_}; }
    rows<T const> data() const& { return {values_.data(), count_, width_}; }
    template <class X = T>
    rows<T> data() const&& {
        ends<X>();
        throw;
    }
    /// Returns all elements, row after row, in the tensor's memory.
    std::span<T> elements() & { return {values_.data(), static_cast<std::size_t>(count_ * width_)}; }
    std::span<T const> elements() const& { return {values_.data(), static_cast<std::size_t>(count_ * width_)}; }
    template <class X = T>
    std::span<T> elements() const&& {
        ends<X>();
        throw;
    }
    sharded<T, S, M> view() & { return {data(), sharding_, rank_, memory_}; }
    sharded<T const, S, M> view() const& { return {data(), sharding_, rank_, memory_}; }
    template <class X = T>
    sharded<T, S, M> view() const&& {
        ends<X>();
        throw;
    }
    /// Returns a view of columns `[first, first + width)`, see `sharded`.
    sharded<T, S, M> columns(index_t first, index_t width, caller here = caller::here()) & {
        return view().columns(first, width, here);
    }
    sharded<T const, S, M> columns(index_t first, index_t width, caller here = caller::here()) const& {
        return view().columns(first, width, here);
    }
    template <class X = T>
    sharded<T, S, M> columns(index_t, index_t) const&& {
        ends<X>();
        throw;
    }
    template <class... X>
        requires(!detail::takes<void(index_t, index_t), X...>)
    detail::refused columns(X&&...) const {
        static_assert(detail::never<X...>, "cpx: columns(first, width) wants two numbers: columns of the tensor");
        return {};
    }
    template <class X, class... More>
    detail::refused view(X const&, More const&...) const {
        return of_all<X>();
    }
    template <class X, class... More>
    detail::refused data(X const&, More const&...) const {
        return of_all<X>();
    }
    template <class X, class... More>
    detail::refused elements(X const&, More const&...) const {
        return of_all<X>();
    }
    operator sharded<T, S, M>() & { return view(); }
    operator sharded<T const, S, M>() const& { return view(); }
    operator sharded<T const, S, M>() const&& = delete;
    S const& sharding() const { return sharding_; }
    int rank() const { return rank_; }
    index_t width() const { return width_; }
    M const& memory() const { return memory_; }

    /// Copies all elements from the host, row after row. Throws `cpx::error` if there are more or fewer.
    void write(std::span<T const> values, caller here = caller::here()) {
        require(std::ssize(values) == count_ * width_, "tensor", "elements to write", count_ * width_, values.size(),
                here);
        memory_.write(values_.data(), values, here);
    }
    template <class X>
        requires(!std::convertible_to<X const&, std::span<T const>>)
    detail::refused write(X const&) {
        static_assert(detail::never<X>, "cpx: tensor::write wants a vector, array or span of the tensor's elements");
        return {};
    }
    /// Returns all elements, row after row, once what was given to the memory's stream before is done.
    std::vector<T> read(caller here = caller::here()) const { return memory_.read(elements(), here); }

private:
    tensor(typename M::template block<T> values, S const& sharding, int rank, index_t width, M const& memory,
           index_t count)
        : sharding_(sharding), rank_(rank), width_(width), count_(count), memory_(memory), values_(std::move(values)) {}
    template <class... X>
    static tensor& unfit() {
        static_assert(detail::never<X...>,
                      "cpx: a tensor is made of a sharding of its type, a rank and a width; rows of "
                      "another sharding come by exchange(x, sharding, comm)");
        throw;
    }
    template <class X>
    static detail::refused of_all() {
        static_assert(detail::never<X>, "cpx: view(), data() and elements() are of the whole tensor and want nothing; "
                                        "columns(first, width) is of some columns, data().sub(first, count) of rows");
        return {};
    }
    template <class X>
    static void ends() {
        static_assert(detail::never<X>,
                      "cpx: a view of a tensor that ends with the expression; give the tensor a name");
    }

    S sharding_;
    int rank_;
    index_t width_, count_ = 0;
    [[no_unique_address]] M memory_;
    typename M::template block<T> values_;
};

/// Says what elements are, and holds others in their place.
template <class T, any_sharding S, any_memory M>
    requires(!element<T>)
class tensor<T, S, M> : public tensor<typename detail::stand_in<T>::type, S, M> {
public:
    static_assert(detail::checked_element<T>::value || true);
    template <class... X>
    tensor(X const&...) : tensor<typename detail::stand_in<T>::type, S, M>(detail::refused()) {}
};
template <class T, class S, class M>
    requires(!any_sharding<S> || !any_memory<M>)
class tensor<T, S, M> {
public:
    static_assert(detail::never<T>, "cpx: tensor<T, S> is of elements and a sharding, such as sharding<zigzag<4>>; "
                                    "auto x = make_tensor<T>(sharding, rank, width) needs neither");
    template <class... X>
    tensor(X const&...) {}
};
template <class X = detail::any>
tensor(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {})
    -> tensor<detail::untold, sharding<sequential<1>>>;

/// Returns a tensor of zeros of any sharding: `make_tensor<float>(sharding, rank, width)`; of another memory than the
/// host's if it is given one.
template <class T, any_sharding S>
tensor<T, S> make_tensor(S const& sharding, int rank, index_t width, caller here = caller::here()) {
    return {sharding, rank, width, here};
}
template <class T, any_sharding S, any_memory M>
tensor<T, S, M> make_tensor(S const& sharding, int rank, index_t width, M const& memory, caller here = caller::here()) {
    return {sharding, rank, width, memory, here};
}
template <class T = void, class X = detail::any>
detail::refused make_tensor(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: make_tensor<T>(sharding, rank, width) wants a sharding, such as shard(batch, zigzag<4>{}) "
                  "returns, and then perhaps a memory; or a cpx::transport in place of the rank");
    return {};
}

} // namespace cpx
