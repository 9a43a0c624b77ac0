// SPDX-License-Identifier: Apache-2.0
// Rows with their sharding, and the memory that they are in, in the type.
#pragma once

#include <cpx/core/field.hpp>
#include <cpx/core/memory.hpp>
#include <cpx/layout/sequential.hpp>
#include <cpx/layout/sharding.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>

namespace cpx {

/// A view of the rows that `rank` holds of a tensor that is sharded as `S` says.
///
/// The type is what keeps a zigzag shard out of an operator that wants another sharding. Where two shardings have the
/// same type and differ in value (layouts known at run time), plans and operators compare the values and throw.
/// Likewise for M, the memory: rows of a device do not reach an operator of the host, nor the other way round.
/// Owns no rows. Their number is checked where the view is used.
template <class T, class S, class M = host_memory>
class sharded {
public:
    /// Throws `cpx::error` if there is no such rank.
    sharded(rows<T> data, S sharding, int rank, M memory, caller here = caller::here())
        : data_(data), sharding_(std::move(sharding)), rank_(rank), memory_(memory) {
        detail::require_rank("sharded", rank, sharding_.ranks(), here);
    }
    sharded(rows<T> data, S sharding, int rank, caller here = caller::here())
        requires std::default_initializable<M>
        : sharded(data, std::move(sharding), rank, M(), here) {}
    template <class X>
        requires(!std::convertible_to<X, rows<T>>)
    sharded(X const&, S sharding, int rank, detail::any = {}) : sharding_(std::move(sharding)), rank_(rank) {
        static_assert(detail::never<X>, "cpx: sharded wants rows of its elements, a sharding and a rank: "
                                        "sharded(rows(list, width), sharding, rank)");
    }
    template <class X = detail::any>
        requires(!std::is_convertible_v<X&, sharded> && (std::same_as<X, rows<T>> || !std::convertible_to<X, rows<T>>))
    explicit sharded(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) : sharded(unfit<X>()) {}

    operator sharded<T const, S, M>() const { return {data_, sharding_, rank_, memory_}; }

    rows<T> const& data() const { return data_; }
    S const& sharding() const { return sharding_; }
    int rank() const { return rank_; }
    M const& memory() const { return memory_; }
    sharded view() const { return *this; }

    /// Returns columns `[first, first + width)` of every row, such as q inside a fused qkv projection. Throws
    /// `cpx::error` if there are no such columns.
    sharded columns(index_t first, index_t width, caller here = caller::here()) const {
        index_t const all = data_.width();
        if (first < 0 || first > all || width < 0 || width > all - first)
            throw error("columns", "columns of the view", "some of 0 to " + std::to_string(all),
                        std::to_string(width) + " from " + std::to_string(first), here);
        return {data_.columns(first, width, here), sharding_, rank_, memory_};
    }

private:
    template <class X>
    static sharded const& unfit() {
        static_assert(std::is_base_of_v<detail::refused, X>,
                      "cpx: sharded(rows, sharding, rank) wants all three, in this order; of a "
                      "tensor write x.view()");
        throw;
    }

    rows<T> data_;
    S sharding_;
    int rank_;
    [[no_unique_address]] M memory_;
};

template <class T, class S, class M>
    requires(!any_sharding<S> || !any_memory<M>)
class sharded<T, S, M> {
public:
    static_assert(detail::never<T, S>, "cpx: sharded<T, S> is of elements and a sharding, such as sharding<zigzag<4>>; "
                                       "sharded(rows, sharding, rank) needs neither");
    template <class... X>
    sharded(X const&...) {}
};

/// `A` is `T` or `T const`: what an input of an operator on `T` may hold.
template <class A, class T>
concept elements_of = std::same_as<std::remove_const_t<A>, T>;

template <class T, class S>
sharded(rows<T>, S, int) -> sharded<T, S>;
template <class T, class S, class M>
sharded(rows<T>, S, int, M) -> sharded<T, S, M>;
template <class X, any_sharding S>
sharded(X const&, S, int) -> sharded<detail::refused, S>;
template <class X = detail::any>
sharded(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {})
    -> sharded<detail::refused, sharding<sequential<1>>>;

namespace detail {

template <class View>
struct of_view;
template <class T, any_sharding S, any_memory M>
struct of_view<sharded<T, S, M>> {
    using element = T;
    using sharding = S;
    using memory = M;
};
template <class X>
using view_of = decltype(std::declval<X&>().view());

} // namespace detail

/// Sharded rows in any memory: a view of them, or what has a `view()` that is one, such as a tensor.
template <class X>
concept sharded_anywhere = requires { typename detail::of_view<detail::view_of<X>>::sharding; };

template <sharded_anywhere X>
using sharding_of = typename detail::of_view<detail::view_of<X>>::sharding;
template <sharded_anywhere X>
using memory_of = typename detail::of_view<detail::view_of<X>>::memory;

/// The same in memory M: what operators take. Without M, those of the host.
template <class X, class M = host_memory>
concept sharded_like = sharded_anywhere<X> && std::same_as<memory_of<X>, M>;

/// The elements of `X`, without const.
template <sharded_anywhere X>
using element_of = std::remove_const_t<typename detail::of_view<detail::view_of<X>>::element>;
/// What `X`'s memory sums its elements in: the elements of what operators keep for their backwards, such as `lse`.
template <sharded_anywhere X>
using sum_of = typename memory_of<X>::template sum<element_of<X>>;

namespace detail {

/// What stands in place of a tensor. `Of`: what the sentence is said for, once.
template <class Of>
struct no_tensor : refused {
    template <class View>
    operator View const&() const {
        throw;
    }
};
/// The sharding of a struct that can deduce none, and of one whose first tensors, `S`, are of two.
using no_sharding = cpx::sharding<sequential<1>>;
template <class... S>
struct two_shardings : no_sharding {};
template <class S>
inline constexpr bool is_two_shardings = false;
template <class... S>
inline constexpr bool is_two_shardings<two_shardings<S...>> = true;

/// A struct says it once for all its fields of a type, const or not; one that can deduce nothing, for all.
template <class T, class S, class M>
using said_of =
    std::conditional_t<!std::same_as<std::remove_const_t<T>, refused>, sharded<std::remove_const_t<T>, S, M>,
                       std::conditional_t<is_two_shardings<S>, S, refused*>>;
template <class Of>
no_tensor<Of> no_field() {
    constexpr bool told = !std::same_as<Of, refused*>, differ = is_two_shardings<Of>;
    static_assert(never<Of> || told,
                  "cpx: a struct of tensors cannot tell its type: it lacks one, its first is none, those in braces "
                  "differ, or names tell clang++ nothing; write it, as in delta_rule_tensors<float, "
                  "sharding<zigzag<4>>>{.q = q}, and view other memory as sharded(rows, sharding, rank)");
    static_assert(never<Of> || !differ,
                  "cpx: a struct of tensors of one sharding is given one of another; relayout that first");
    static_assert(never<Of> || !told || differ,
                  "cpx: a struct of tensors lacks one, or is given what is none; view other memory as "
                  "sharded(rows, sharding, rank)");
    return {};
}

/// Returns the view of a tensor, or says why a struct of views `View` does not take it.
template <class View, class X>
View view_field(X&& x) {
    constexpr bool views = sharded_anywhere<X>;
    if constexpr (std::same_as<element_of<View>, refused>)
        no_field<said_of<refused, sharding_of<View>, memory_of<View>>>();
    else if constexpr (!views)
        static_assert(views, "cpx: a struct of tensors lacks one, or is given what is none; view other memory as "
                             "sharded(rows, sharding, rank)");
    else {
        constexpr bool fits = std::same_as<sharding_of<X>, sharding_of<View>>, holds = std::is_convertible_v<X, View>;
        static_assert(fits, "cpx: a struct of tensors of one sharding is given one of another; relayout that first");
        static_assert(
            !fits || holds,
            "cpx: a struct of tensors is given one of other elements or memory, or one to write that is const, or "
            "one that ends with the expression; give it a name");
        if constexpr (fits && holds) return std::forward<X>(x);
    }
    throw;
}

/// What a struct of tensors deduces from its first ones. If these are of two shardings, or the first is no tensor, its
/// fields say so, once, and calls of the struct nothing. For names in braces clang++, until it deduces aggregates, fits
/// nothing but a guide from `...`.
template <class X, class... More>
struct first_fields {
    using element = refused;
    using sharding = no_sharding;
    using memory = host_memory;
};
template <class X, class S>
inline constexpr bool sharded_otherwise = false;
template <sharded_anywhere X, class S>
inline constexpr bool sharded_otherwise<X, S> = !std::same_as<sharding_of<X>, S>;
template <sharded_anywhere X, class... More>
struct first_fields<X, More...> {
    static constexpr bool differ = (sharded_otherwise<More, sharding_of<X>> || ...);
    using element = std::conditional_t<differ, refused, element_of<X>>;
    using sharding = std::conditional_t<differ, two_shardings<X, More...>, sharding_of<X>>;
    using memory = memory_of<X>;
};

} // namespace detail

/// A `sharded` in a struct of tensors. It takes any tensor, and says what is wrong with one that does not fit.
///
/// `sharded` itself leaves that to overload resolution, where a conversion that only fails would look possible.
template <class T, any_sharding S, any_memory M = host_memory>
struct sharded_field : sharded<T, S, M> {
    // Not inherited: nvcc cannot compare inherited default arguments.
    sharded_field(rows<T> data, S sharding, int rank, M memory, caller here = caller::here())
        : sharded<T, S, M>(data, std::move(sharding), rank, memory, here) {}
    sharded_field(rows<T> data, S sharding, int rank, caller here = caller::here())
        requires std::default_initializable<M>
        : sharded<T, S, M>(data, std::move(sharding), rank, here) {}
    sharded_field() : seen(detail::no_field<detail::said_of<T, S, M>>()) {}
    template <class X>
    sharded_field(X&& x) : seen(detail::view_field<seen>(std::forward<X>(x))) {}
    template <class X, class Y, class... More>
        requires(!std::convertible_to<X, rows<T>>)
    sharded_field(X const&, Y const&, More const&...) : seen(detail::no_field<detail::said_of<T, S, M>>()) {}

private:
    using seen = sharded<T, S, M>;
};

/// N of them: an array of tensors, or tensors in braces.
template <class T, any_sharding S, std::size_t N>
struct sharded_fields : std::array<sharded<T, S>, N> {
    static constexpr bool untold = std::same_as<std::remove_const_t<T>, detail::refused>;
    template <sharded_like... X>
        requires(sizeof...(X) == N)
    sharded_fields(X&&... x) : fields{detail::view_field<sharded<T, S>>(std::forward<X>(x))...} {}
    template <sharded_like X>
        requires(!untold)
    sharded_fields(std::array<X, N> const& list) : sharded_fields(list, std::make_index_sequence<N>{}) {}
    template <sharded_like X>
        requires(!untold)
    sharded_fields(std::array<X, N> const&& list) : sharded_fields(std::move(list), std::make_index_sequence<N>{}) {}
    template <class X>
        requires(N != 1 || !sharded_like<X>)
    sharded_fields(X const&) : fields(detail::no_field<detail::said_of<T, S, host_memory>>()) {}
    template <class... X>
        requires(sizeof...(X) != 1 && !(sizeof...(X) == N && (sharded_like<X> && ...)))
    sharded_fields(X&&...) : fields(detail::no_field<detail::said_of<T, S, host_memory>>()) {}

private:
    using fields = std::array<sharded<T, S>, N>;
    template <class Array, std::size_t... I>
    sharded_fields(Array&& list, std::index_sequence<I...>)
        : fields{detail::view_field<sharded<T, S>>(std::get<I>(std::forward<Array>(list)))...} {}
};

namespace detail {

/// Throws that a tensor is sharded in another way, or is of another batch, and where that differs.
[[noreturn]] inline void other_sharding(char const* where, char const* what, thd const& expected, thd const& got,
                                        char const* whose, caller here) {
    auto const d = first_difference(expected, got);
    throw error(where, std::string("sharding of ") + what, whose,
                d ? "another: " + d->place + " of the batch is " + d->got + ", not " + d->expected : "another", here);
}

/// Throws `cpx::error` unless `x` is what `rank` holds under `sharding`, which are those of `whose`.
template <class T, any_sharding S, any_memory M>
void require_place(char const* where, char const* what, sharded<T, S, M> const& x, S const& sharding, int rank,
                   char const* whose, caller here) {
    if (!(x.sharding() == sharding)) other_sharding(where, what, sharding.batch(), x.sharding().batch(), whose, here);
    if (x.rank() != rank)
        throw error(where, std::string("rank of ") + what, whose + (", " + std::to_string(rank)),
                    std::to_string(x.rank()), here);
}

/// Throws `cpx::error` unless `x` lies as `other` does, which is `whose`.
template <class T, class A, any_sharding S, any_memory M>
void require_place(char const* where, char const* what, sharded<T, S, M> const& x, sharded<A, S, M> const& other,
                   char const* whose, caller here) {
    require_place(where, what, x, other.sharding(), other.rank(), whose, here);
}

/// Throws `cpx::error` unless `x` is in `memory`, that of `whose`, and in its stream.
template <class T, any_sharding S, any_memory M>
void require_in_memory(char const* where, char const* what, sharded<T, S, M> const& x, M const& memory,
                       char const* whose, caller here) {
    if (!(x.memory() == memory))
        throw error(where, std::string("memory of ") + what, std::string(whose) + ", in its stream", "another", here);
}

// What operators assert of types. They compile nothing else if it does not hold, so that no other message follows.

template <class S, class... X>
inline constexpr bool sharded_as = (std::same_as<sharding_of<X>, S> && ...);

/// Whether results can be written to `Y`, deduced for `Y&&`, which is there after the call, and have the elements of
/// all of `X`.
template <class Y, class... X>
inline constexpr bool writes = !std::is_const_v<typename of_view<view_of<Y>>::element> &&
                               (std::is_lvalue_reference_v<Y> || std::same_as<view_of<Y>, std::remove_cv_t<Y>>)&&(
                                   std::same_as<element_of<X>, element_of<Y>> && ...);

} // namespace detail

} // namespace cpx
