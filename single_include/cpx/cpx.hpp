// SPDX-License-Identifier: Apache-2.0
// The host side of cpx in one file, made from include/cpx by cmake/amalgamate.cmake: do not edit.
#ifndef CPX_SINGLE_INCLUDE
#define CPX_SINGLE_INCLUDE

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <compare>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

// cpx/core/config.hpp
// Version, and the one marker that lets the same arithmetic run on host and device.

#if __cplusplus < 202002L
#error "cpx: this is a library for C++20; compile with -std=c++20 or a newer one"
#include "end of compilation" // nothing that follows would tell more
#endif

#define CPX_VERSION 100 // major * 10000 + minor * 100 + patch, read by CMakeLists.txt

// CPX_CALLS_BACK stands before a template for host and device that calls a function which it is given; that function
// may be for the host only.
#if defined(__CUDACC__)
#define CPX_HOST_DEVICE __host__ __device__
#define CPX_CALLS_BACK _Pragma("nv_exec_check_disable")
#else
#define CPX_HOST_DEVICE
#define CPX_CALLS_BACK
#endif

// cpx/core/printable.hpp
// Bytes of unknown origin as text that is safe to print: errors show names and values from files and command lines.

namespace cpx {

namespace detail {

/// A character at the start of a text: how many bytes it has, and whether it may be shown as it is.
struct leading_character {
    std::size_t bytes = 1;
    bool shown = false;
};

/// Returns the first character of `text`, which is not empty. A byte that begins no character of UTF-8 counts as one.
///
/// Control characters are not shown, nor those of Unicode that are invisible or change the direction of text.
inline leading_character first_character(std::string_view text) {
    auto const byte = [&](std::size_t i) { return std::uint32_t{static_cast<unsigned char>(text[i])}; };
    std::size_t const n = byte(0) < 0x80   ? 1
                          : byte(0) < 0xc2 ? 0
                          : byte(0) < 0xe0 ? 2
                          : byte(0) < 0xf0 ? 3
                          : byte(0) < 0xf5 ? 4
                                           : 0;
    if (n == 0 || n > text.size()) return {};
    std::uint32_t code = n == 1 ? byte(0) : byte(0) & 0xffu >> (n + 1);
    for (std::size_t i = 1; i < n; ++i) {
        if ((byte(i) & 0xc0) != 0x80) return {};
        code = code << 6 | (byte(i) & 0x3f);
    }
    constexpr std::array<std::uint32_t, 5> least = {0, 0, 0x80, 0x800, 0x10000};
    auto const within = [&](std::uint32_t first, std::uint32_t last) { return first <= code && code <= last; };
    if (code < least[n] || code > 0x10ffff || within(0xd800, 0xdfff)) return {};
    return {n, !(within(0, 0x1f) || within(0x7f, 0x9f) || within(0x200b, 0x200f) || within(0x2028, 0x202e) ||
                 within(0x2060, 0x206f) || code == 0xfeff)};
}

} // namespace detail

/// Returns `text` with every byte that must not be printed as \xHH; line feeds stay if `lines`.
///
/// Printable text stays as it is, backslashes too, so that a second call changes nothing.
inline std::string printable(std::string_view text, bool lines = false) {
    constexpr char const* digits = "0123456789abcdef";
    std::string safe;
    safe.reserve(text.size());
    while (!text.empty()) {
        auto const [bytes, shown] = detail::first_character(text);
        if (shown || (lines && text[0] == '\n'))
            safe += text.substr(0, bytes);
        else
            for (char const c : text.substr(0, bytes))
                ((safe += "\\x") += digits[static_cast<unsigned char>(c) >> 4]) += digits[c & 15];
        text.remove_prefix(bytes);
    }
    return safe;
}

/// Returns `text` printable and in quotes, where quotes and backslashes have a backslash before them: at most its first
/// 64 bytes, so that it does not flood a message.
inline std::string quote(std::string_view text) {
    constexpr std::size_t most = 64;
    std::string shown;
    std::size_t end = 0;
    while (end < text.size()) {
        auto const next = text.substr(end, detail::first_character(text.substr(end)).bytes);
        if (end + next.size() > most) break;
        if (next == "\"" || next == "\\") shown += '\\';
        shown += printable(next);
        end += next.size();
    }
    return '"' + shown + (end < text.size() ? "\"..." : "\"");
}

} // namespace cpx

// cpx/core/error.hpp
// The one exception of cpx: what is wrong, where, what was expected and what was found.

namespace cpx {

/// The file and line of a call. As a default argument, `caller::here()` is the place of whoever leaves it out.
///
/// Stands for std::source_location, which clang 14 does not have.
struct caller {
    char const* file = "";
    int line = 0;
    CPX_HOST_DEVICE static constexpr caller here(char const* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

/// Everything cpx throws. `what()` reads "file:line: WHERE: WHAT: expected E, got G".
///
/// The fields can be read back one by one, so that a caller can act on them or print them in another form. Bytes that
/// must not be printed, which names and values from files may have, stand in all of them as \xHH.
class error : public std::runtime_error {
public:
    error(std::string where, std::string what, std::string expected = "", std::string got = "",
          caller from = caller::here())
        : std::runtime_error(place(from) + text(where, what, expected, got)), where_(printable(where)),
          problem_(printable(what, true)), expected_(printable(expected)), got_(printable(got)) {}

    /// Returns `what()` without file and line, for users of a program, whose mistake is not in its source.
    std::string message() const { return text(where_, problem_, expected_, got_); }

    /// Returns the function, file or object that rejects its input.
    std::string const& where() const noexcept { return where_; }
    /// Returns the thing that is wrong.
    std::string const& problem() const noexcept { return problem_; }
    std::string const& expected() const noexcept { return expected_; }
    std::string const& got() const noexcept { return got_; }

private:
    static std::string place(caller from) {
        std::string file = from.file;
        auto const slash = file.find_last_of('/');
        if (slash != std::string::npos) file.erase(0, slash + 1);
        return file + ':' + std::to_string(from.line) + ": ";
    }
    static std::string text(std::string const& where, std::string const& what, std::string const& expected,
                            std::string const& got) {
        std::string message = printable(where) + ": " + printable(what, true);
        if (!expected.empty()) message += ": expected " + printable(expected);
        if (!got.empty()) message += ", got " + printable(got);
        return message;
    }

    std::string where_, problem_, expected_, got_;
};

namespace detail {

inline std::string show(std::string text) { return text; }
inline std::string show(char const* text) { return text; }
inline std::string show(bool value) { return value ? "true" : "false"; }
template <class T>
    requires(std::integral<T> && !std::same_as<T, bool>) || std::floating_point<T>
std::string show(T value) {
    return std::to_string(value);
}
template <std::invocable F>
std::string show(F const& text) {
    return text();
}

/// Returns what makes a text of these texts and numbers when it is called: by `require`, on failure alone. Lives no
/// longer than they.
template <class... X>
auto in_words(X const&... words) {
    return [&words...] { return (show(words) + ...); };
}

} // namespace detail

/// Throws `cpx::error` unless `holds`. `expected` and `got` are numbers, texts or functions that return a text, which
/// are called, as numbers are turned into text, only on failure.
///
/// For checks made once a batch or once a call, never once a token. The location is the caller's.
template <class E, class G>
void require(bool holds, char const* where, char const* what, E const& expected, G const& got,
             caller from = caller::here()) {
    if (!holds) throw error(where, what, detail::show(expected), detail::show(got), from);
}

} // namespace cpx

// cpx/core/activation.hpp
// The names of activations, for operators of the host and of GPUs.

namespace cpx {

/// Which function follows a linear operator.
enum class activation { none, silu };

namespace detail {

inline void require_activation(char const* where, activation act, caller here) {
    require(act == activation::none || act == activation::silu, where, "activation", "none or silu",
            static_cast<int>(act), here);
}

} // namespace detail

} // namespace cpx

// cpx/core/refused.hpp
// How a call that fits no function is refused in one sentence.

// Beside what can be called stands an overload `template <class X = any> f(X const& = {}, any = {}, ...)` that any call
// fits, one without arguments, too, but no better than the function itself. It asserts `never<X>`: name, what is
// wanted, how to get it. A class has such a constructor, explicit, and such a deduction guide;
// a template of classes, for arguments of other kinds, a specialisation.
// clang++ takes names in braces, `{.theta = 1e6}`, for no `any`: where these are usual, a second overload has the
// options as an `O const&`, O by default their type and nothing else.
namespace cpx::detail {

/// A parameter that takes any argument, lists in braces too, where no other overload does.
struct any {
    any() = default;
    template <class... X>
    constexpr any(X const&...) {} // of several, too: g++ takes names in braces for these
    constexpr any(std::initializer_list<any>) {}
};

/// The first field of a struct whose others are given by name only: numbers in braces do not make one.
struct by_name {
    by_name() = default;
};

/// The result of a call that has been refused. What is done with it is no second mistake: loops over it, calls of it,
/// members of what the call would have returned, tensors, their rows, shardings and plans, elements and numbers of
/// these, and to pass it on as one of these.
struct refused {
    static refused const view, data, elements, row, columns, sub, count, width, stride, sharding, rank, ranks, memory,
        read, hold, rows, batch, runs, run, policy, size, empty, transposed, step, steps, level, plan, set, rows_of,
        make_tensor, sends, receives, sent_rows, source_rows, target_rows, segments, links, from,
        to; ///< never defined: what uses them does not compile
    template <class X>
        requires(!std::same_as<X, any>) // which takes it as it takes all else
    operator X() const;
    refused const* begin() const { return nullptr; }
    refused const* end() const { return nullptr; }
    template <class... X>
    refused operator()(X const&...) const {
        return {};
    }
    template <class X>
    refused const& operator[](X const&) const {
        return *this;
    }
    template <class X>
    refused const& operator=(X const&) const {
        return *this;
    }
};

/// What a sentence is said for that is said once, whatever X is given: `any`, or what has been refused.
template <class X>
using whatever = std::conditional_t<std::same_as<X, refused>, X, any>;

/// Arithmetic and comparisons, which a conversion to any number would leave ambiguous.
template <class... X>
concept some_refused = (std::same_as<X, refused> || ...);
template <class A, class B>
    requires some_refused<A, B>
refused operator+(A const&, B const&) {
    return {};
}
template <class A, class B>
    requires some_refused<A, B>
refused operator-(A const&, B const&) {
    return {};
}
template <class A, class B>
    requires some_refused<A, B>
refused operator*(A const&, B const&) {
    return {};
}
template <class A, class B>
    requires some_refused<A, B>
refused operator/(A const&, B const&) {
    return {};
}
template <class A, class B>
    requires some_refused<A, B>
refused operator%(A const&, B const&) {
    return {};
}
template <class A, class B>
    requires some_refused<std::remove_cvref_t<A>, B>
refused operator+=(A&&, B const&) {
    return {};
}
template <class A, class B>
    requires some_refused<std::remove_cvref_t<A>, B>
refused operator-=(A&&, B const&) {
    return {};
}
template <class A, class B>
    requires some_refused<A, B>
bool operator==(A const&, B const&) {
    return true;
}
template <class A, class B>
    requires some_refused<A, B>
std::strong_ordering operator<=>(A const&, B const&) {
    return std::strong_ordering::equal;
}

/// Whether a function of these parameters, and perhaps a `caller`, takes arguments X.
///
/// For functions of rows, which any argument would fit no worse than the function itself: rows of T become rows of
/// T const.
template <class F, class... X>
inline constexpr bool takes = false;
template <class... P, class... X>
inline constexpr bool takes<void(P...), X...> =
    std::is_invocable_v<void (*)(P...), X...> || std::is_invocable_v<void (*)(P..., caller), X...>;

/// Whether X has been refused, or is a struct of tensors that could deduce nothing: all has been said of it.
template <class X>
inline constexpr bool was_refused = std::same_as<X, refused>;
template <template <class, class...> class X, class... More>
inline constexpr bool was_refused<X<refused, More...>> = true;
template <template <class, class, auto> class X, class S, auto N>
inline constexpr bool was_refused<X<refused, S, N>> = true;

/// False, but only where the template that asserts it is used. Where one of X has been refused before, nothing more is
/// said. Of a function's own assertions, each stands behind those before it: one mistake is said at a time.
template <class... X>
inline constexpr bool never = (was_refused<std::remove_cvref_t<X>> || ...);

/// What a constructor that refuses its arguments is made of, to be what it says alone.
template <class Y>
Y lacking() {
    throw;
}

} // namespace cpx::detail

// cpx/core/element.hpp
// What tensors are made of.

namespace cpx {

/// An element of a tensor, which ranks send each other as bytes: a number, or a struct of numbers.
///
/// Not bool: a vector of them has no address to send from, and other bytes than 0 and 1 are none. CUDA's `__half2` has
/// copies of its own; its numbers, `__half`, are elements.
template <class T>
concept element = std::is_object_v<T> && !std::is_array_v<T> && std::same_as<T, std::remove_cv_t<T>> &&
                  !std::same_as<T, bool> && std::is_trivially_copyable_v<T> && std::is_default_constructible_v<T>;

namespace detail {

/// Stands for elements that are not told.
struct untold {
    untold() = delete;
};

/// Whether T is an element. Says what one is, unless it is.
template <class T>
struct checked_element {
    static constexpr bool value = element<T>, told = !std::same_as<T, untold>;
    static_assert(
        value || !told,
        "cpx: an element of a tensor is sent as bytes: a number or a struct of numbers, trivially copyable and "
        "default constructible, not const; instead of bool take unsigned char");
    static_assert(told, "cpx: a tensor cannot tell its elements; write make_tensor<float>(sharding, rank, width)");
};

/// The elements of what stands in place of a class that has refused T, so that nothing more is said of it.
template <class T>
struct stand_in {
    using type = std::conditional_t<std::same_as<std::remove_cv_t<T>, bool>, unsigned char, refused>;
};
template <class T>
    requires element<std::remove_cvref_t<T>>
struct stand_in<T> {
    using type = std::remove_cvref_t<T>;
};

} // namespace detail

} // namespace cpx

// cpx/core/element_name.hpp
// The name by which ranks agree on the type of what they exchange.

namespace cpx {

namespace detail {

/// Returns the name of a type without "cpx::", as the compiler spells it.
template <class T>
constexpr std::string_view type_name() {
    std::string_view name = __PRETTY_FUNCTION__;
    auto const first = name.find("T = ");
    if (first == std::string_view::npos) return name;
    name.remove_prefix(first + 4);
    name = name.substr(0, name.find_first_of(";]"));
    return name.substr(0, 5) == "cpx::" ? name.substr(5) : name;
}

template <class T>
constexpr std::string_view number_name() {
    using limits = std::numeric_limits<T>;
    if (std::same_as<T, bool>) return "bool";
    int bits = limits::digits; // of a floating-point number those of the fraction, with the hidden one
    if (std::floating_point<T>) {
        switch (bits) {
        case 8: return "bfloat16";
        case 11: return "float16";
        case 24: return "float32";
        case 53: return "float64";
        default: break;
        }
    } else {
        switch (bits += limits::is_signed) {
        case 8: return limits::is_signed ? "int8" : "uint8";
        case 16: return limits::is_signed ? "int16" : "uint16";
        case 32: return limits::is_signed ? "int32" : "uint32";
        case 64: return limits::is_signed ? "int64" : "uint64";
        default: break;
        }
    }
    return type_name<T>();
}

/// Returns `spelled`, or what stands for the same numbers in every library.
constexpr std::string_view known_element(std::string_view spelled) {
    for (std::string_view const half : {"__half", "_Float16", "Eigen::half"})
        if (spelled == half) return "float16";
    for (std::string_view const brain : {"__nv_bfloat16", "__bf16", "Eigen::bfloat16"})
        if (spelled == brain) return "bfloat16";
    return spelled;
}

template <class T>
constexpr std::string_view default_element_name() {
    if constexpr (std::integral<T> || std::floating_point<T>)
        return number_name<T>();
    else
        return known_element(type_name<T>());
}

} // namespace detail

/// "float32", "int64", "bool"; "float16" and "bfloat16", whatever library's; of another type the name that the compiler
/// spells. Ranks that exchange elements of T have one name for it. Specialise it for a type of your own whose name
/// compilers spell in different ways, or that has the numbers of another one:
///
///     template <>
///     inline constexpr std::string_view cpx::element_name<my::half> = "float16";
template <class T>
inline constexpr std::string_view element_name = detail::default_element_name<T>();

} // namespace cpx

// cpx/core/index.hpp
// The number type of cpx, where a token lives, and half-open ranges of rows, tokens, columns or heads.

namespace cpx {

/// Counts and offsets of tokens, rows, elements and bytes: 64 bits everywhere, because a shard of 2^19 tokens
/// by 4096 channels already has 2^31 elements.
using index_t = std::int64_t;

/// Where a token lives: the rank that holds it and its row in that rank's local buffer.
struct slot {
    int rank = 0;
    index_t row = 0;
    friend constexpr bool operator==(slot, slot) = default;
};

/// Numbers `first, first + 1, ..., last - 1`.
struct range {
    index_t first = 0;
    index_t last = 0;
    CPX_HOST_DEVICE constexpr index_t size() const { return last - first; }
    CPX_HOST_DEVICE constexpr bool empty() const { return last <= first; }
    friend constexpr bool operator==(range, range) = default;
};

/// Returns the numbers that lie in both ranges; empty if none does.
CPX_HOST_DEVICE constexpr range intersect(range a, range b) {
    index_t const first = a.first > b.first ? a.first : b.first;
    index_t const last = a.last < b.last ? a.last : b.last;
    return {first, last > first ? last : first};
}

} // namespace cpx

// cpx/core/size.hpp
// Sizes that a caller names: products that do not wrap, and memory that may not be there.

namespace cpx::detail {

/// What every count of tokens, elements and bytes is less than, so that the sum of two does not wrap.
inline constexpr index_t size_limit = index_t{1} << 62;

/// Throws the error of `product`; apart, because a constant expression builds no text.
[[noreturn]] inline void bad_product(char const* where, char const* what, std::initializer_list<index_t> factors,
                                     caller here) {
    std::string text;
    bool negative = false;
    for (index_t const factor : factors) {
        text += (text.empty() ? "" : " x ") + std::to_string(factor);
        negative = negative || factor < 0;
    }
    throw error(where, what, negative ? "not negative" : "less than 2^62", text, here);
}

/// Returns the product of counts. Throws `cpx::error` that shows them if one is negative, or it or the product is not
/// below `size_limit`. `what` names the product.
constexpr index_t product(char const* where, char const* what, std::initializer_list<index_t> factors,
                          caller here = caller::here()) {
    index_t result = 1;
    bool zero = false, fits = true;
    for (index_t const factor : factors) {
        fits = fits && factor >= 0 && factor < size_limit;
        zero = zero || factor == 0;
    }
    if (zero && fits) return 0;
    for (index_t const factor : factors) {
        fits = fits && result <= (size_limit - 1) / factor;
        if (!fits) bad_product(where, what, factors, here);
        result *= factor;
    }
    return result;
}

/// Returns as many zeros as the product of `counts`, such as rows and their width.
///
/// Throws `cpx::error` that shows them and the bytes if they are no size, or more than the system gives.
template <class T>
std::vector<T> zeros(char const* where, std::initializer_list<index_t> counts, caller here = caller::here()) {
    index_t const count = product(where, "elements", counts, here);
    index_t const bytes = product(where, "bytes", {count, static_cast<index_t>(sizeof(T))}, here);
    try {
        return std::vector<T>(static_cast<std::size_t>(count));
    } catch (std::bad_alloc const&) {
        throw error(where, "memory", std::to_string(bytes) + " bytes", "less than that", here);
    }
}

} // namespace cpx::detail

// cpx/core/memory.hpp
// Where the elements of a tensor live.

namespace cpx {

/// The host's own memory: where tensors live that say nothing else.
struct host_memory {
    /// What owns elements.
    template <class T>
    using block = std::vector<T>;
    /// What operators sum elements over rows in, such as gradients of weights.
    template <class T>
    using sum = T;

    /// Returns as many zeros as the product of `counts`. Throws `cpx::error` if they are no size, or too many.
    template <class T>
    block<T> zeros(char const* where, std::initializer_list<index_t> counts, caller here = caller::here()) const {
        return detail::zeros<T>(where, counts, here);
    }
    template <class T>
    void write(T* to, std::span<T const> from, caller = caller::here()) const {
        std::ranges::copy(from, to);
    }
    template <class T>
    std::vector<T> read(std::span<T const> from, caller = caller::here()) const {
        return {from.begin(), from.end()};
    }

    friend bool operator==(host_memory, host_memory) = default;
};

/// What can be the memory of a tensor: `host_memory`, or `cuda::memory`, which is a device's and works in the order of
/// a stream. Copies are the same memory. `write` copies from the host and `read` to the host; both return when that is
/// done.
template <class M>
concept any_memory = std::copyable<M> && std::equality_comparable<M> &&
                     requires(M const& m, float* to, std::span<float const> from, caller here) {
                         { m.template zeros<float>("", {1}, here) } -> std::same_as<typename M::template block<float>>;
                         m.write(to, from, here);
                         { m.read(from, here) } -> std::same_as<std::vector<float>>;
                     };

namespace detail {

/// Returns elements that will all be written before they are read: as they come, from a memory that has `room`.
template <class T, any_memory M>
typename M::template block<T> unwritten(M const& memory, char const* where, std::initializer_list<index_t> counts,
                                        caller here) {
    if constexpr (requires { memory.template room<T>(index_t{1}); }) {
        index_t const count = product(where, "elements", counts, here);
        product(where, "bytes", {count, static_cast<index_t>(sizeof(T))}, here);
        return memory.template room<T>(count);
    } else
        return memory.template zeros<T>(where, counts, here);
}

} // namespace detail

} // namespace cpx

// cpx/core/elements.hpp
// What is computed element by element or row by row, in any memory.

namespace cpx {

/// In what functions of elements of T compute: in T, or in float where T has 16 bits and is no type of the language.
template <class T>
using wide = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

template <class T>
CPX_HOST_DEVICE wide<T> widen(T x) {
    return static_cast<wide<T>>(x);
}

/// Calls `f(row, column)` for all of `count` rows of `width` columns; one column, where a call computes a whole row.
///
/// On the host one after the other. With `cuda/elements.hpp` a `cuda::memory` in place of the host's calls it on the
/// device, each in a thread of its own: what is marked for both, such as the functions in `rowwise`, is written once.
template <class F>
void for_each_element(host_memory, index_t count, index_t width, F const& f, caller = caller::here()) {
    for (index_t row = 0; row < count; ++row)
        for (index_t column = 0; column < width; ++column) f(row, column);
}

} // namespace cpx

// cpx/core/extent.hpp
// A size that is known at compile time or only at run time, under one name.

namespace cpx {

/// Stands for "known at run time only" where a size is a template argument.
inline constexpr int dynamic = -1;

/// A positive int: a type when `N` is given, one stored number when it is `dynamic`, 0 until it is told.
///
/// Meant as a private or public base class, so that a static size takes no room (`zigzag<4>` is an empty type).
template <int N>
struct extent {
    static_assert(N > 0,
                  "cpx: a static size must be at least 1; leave it out (or say cpx::dynamic) for a run-time size");
    constexpr extent() = default;
    template <class I>
    CPX_HOST_DEVICE constexpr explicit extent(I) {
        static_assert(detail::never<I>, "cpx: a size that the type tells takes no other; leave the number out, or "
                                        "leave it to run time: zigzag<>(4), aligned<cpx::dynamic>(32)");
    }
    CPX_HOST_DEVICE constexpr int get() const { return N; }
    friend constexpr bool operator==(extent, extent) = default;
};

template <>
struct extent<dynamic> {
    constexpr extent() = default;
    CPX_HOST_DEVICE constexpr explicit extent(int n) : value(n) {}
    CPX_HOST_DEVICE constexpr int get() const { return value; }
    friend constexpr bool operator==(extent, extent) = default;

    int value = 0; ///< not told: what is made of it says so
};

} // namespace cpx

// cpx/core/rows.hpp
// A view of a rank's local rows.

namespace cpx {

/// A view of (count, width) elements, row-major; row `i` begins at `data + i * stride`.
///
/// Owns nothing. `stride > width` views some columns of wider rows, such as q inside a fused qkv projection.
/// Throws `cpx::error`, on the host, of numbers that are negative or of 2^62 bytes and more.
template <class T>
class rows {
public:
    static_assert(!std::same_as<T, detail::any>,
                  "cpx: rows(list, width) wants a vector and the width of a row; rows<T> may be empty");
    constexpr rows() = default;
    CPX_HOST_DEVICE constexpr rows(T* data, index_t count, index_t width, caller here = caller::here())
        : rows(data, count, width, width, here) {}
    CPX_HOST_DEVICE constexpr rows(T* data, index_t count, index_t width, index_t stride,
                                   [[maybe_unused]] caller here = caller::here())
        : data_(data), count_(count), width_(width), stride_(stride) {
#ifndef __CUDA_ARCH__
        if (((count | width | stride) >> 28) != 0 || sizeof(T) > 64) // few of the views made for every head and segment
            for (index_t const row : {width, stride})
                detail::product("rows", "bytes", {count, row, static_cast<index_t>(sizeof(T))}, here);
#endif
    }

    /// Views a vector, array or span that holds whole rows of `width` elements. Throws `cpx::error` if it does not.
    template <std::ranges::sized_range R>
    rows(R&& list, index_t width, caller here = caller::here())
        : rows(elements<R>(list), width > 0 ? std::ssize(list) / width : 0, std::max<index_t>(width, 0), here) {
        constexpr bool stays = std::ranges::borrowed_range<R>;
        static_assert(stays, "cpx: rows of a vector that ends with the expression; give it a name");
        require(width >= 0 && count_ * width == std::ssize(list), "rows", "size of the list",
                "a multiple of the width " + std::to_string(width), std::ssize(list), here);
    }

    template <class X, class... More>
        requires((sizeof...(More) == 0 || sizeof...(More) > 2 ||
                  (std::is_class_v<X> && !std::is_convertible_v<X const&, void const*>)) &&
                 !(std::same_as<More, caller> || ...) && !std::is_convertible_v<X&, rows>)
    explicit rows(X const&, detail::any = {}, More const&...) {
        static_assert(detail::never<X>,
                      "cpx: rows(list, width) wants a vector and the width of a row, or rows(pointer, count, width); "
                      "of other lists write rows<T>(list, width), of a tensor its data()");
    }
    template <class X>
        requires(!std::is_convertible_v<X*, T*>)
    rows(X*, index_t, index_t, detail::any = {}) {
        static_assert(detail::never<X>,
                      "cpx: rows of a pointer to other elements, or to const; rows<T const> view what is const");
    }

    CPX_HOST_DEVICE constexpr operator rows<T const>() const { return {data_, count_, width_, stride_}; }

    CPX_HOST_DEVICE constexpr T* data() const { return data_; }
    CPX_HOST_DEVICE constexpr index_t count() const { return count_; }
    CPX_HOST_DEVICE constexpr index_t width() const { return width_; }
    /// Returns the elements from the beginning of one row to the beginning of the next.
    CPX_HOST_DEVICE constexpr index_t stride() const { return stride_; }
    CPX_HOST_DEVICE constexpr T* row(index_t i) const { return data_ + i * stride_; }
    CPX_HOST_DEVICE constexpr T& operator()(index_t i, index_t column) const { return data_[i * stride_ + column]; }

    /// Returns rows `[first, first + count)`.
    CPX_HOST_DEVICE constexpr rows sub(index_t first, index_t count, caller here = caller::here()) const {
        return {data_ + first * stride_, count, width_, stride_, here};
    }
    /// Returns columns `[first, first + width)` of every row.
    CPX_HOST_DEVICE constexpr rows columns(index_t first, index_t width, caller here = caller::here()) const {
        return {data_ + first, count_, width, stride_, here};
    }

private:
    template <class R>
    static T* elements(R& list) {
        constexpr bool fits = std::is_convertible_v<R&, std::span<T>>;
        static_assert(fits || !std::ranges::borrowed_range<R>,
                      "cpx: rows of a list of other elements, of one that is const, or of no vector, array or "
                      "span; rows<T const> view what is const");
        if constexpr (fits)
            return std::ranges::data(list);
        else
            return nullptr;
    }

    T* data_ = nullptr;
    index_t count_ = 0, width_ = 0, stride_ = 0;
};

/// What an operator takes that knows the width of the rows: rows, a tensor or row_buffer of them, or their elements in
/// a vector, array or span.
template <class T>
class rows_or_list {
public:
    rows_or_list() = default;
    rows_or_list(rows<T> r) : rows_(r) {}
    rows_or_list(rows<std::remove_const_t<T>> r)
        requires std::is_const_v<T>
        : rows_(r) {}
    template <class X>
        requires requires(X& x) { requires std::convertible_to<decltype(x.data()), rows<T>>; }
    rows_or_list(X& tensor) : rows_(tensor.data()) {}
    template <class X>
        requires(!requires(X& x) { x.data(); }) &&
                requires(X& x) { requires std::convertible_to<decltype(x.view()), rows<T>>; }
    rows_or_list(X& buffer) : rows_(buffer.view()) {}
    template <class R>
        requires std::is_convertible_v<R, std::span<T>>
    rows_or_list(R&& list) : list_(std::forward<R>(list)), is_list_(true) {}

    /// Returns rows of `width` elements; of a list that does not hold whole ones, rows of another width.
    rows<T> of_width(index_t width) const {
        index_t const size = std::ssize(list_);
        if (!is_list_) return rows_;
        return width > 0 && size % width == 0 ? rows<T>(list_.data(), size / width, width)
                                              : rows<T>(list_.data(), size, 1);
    }

private:
    rows<T> rows_;
    std::span<T> list_;
    bool is_list_ = false;
};

template <class T>
rows(std::vector<T>&, index_t) -> rows<T>;
template <class T>
rows(std::vector<T> const&, index_t) -> rows<T const>;
template <class X>
rows(X const&, detail::any = {}, ...) -> rows<detail::refused>;
template <class X = detail::any>
rows() -> rows<X>;

} // namespace cpx

// cpx/core/field.hpp
// Fields of structs of arguments, which say in one sentence what does not fit.

namespace cpx {

namespace detail {

/// Whether F is a field of a struct that could deduce nothing, of which all has been said.
template <class F>
inline constexpr bool of_refused = false;
template <template <class> class View, class T>
inline constexpr bool of_refused<View<T>> = std::same_as<std::remove_const_t<T>, refused>;
template <class T>
inline constexpr bool of_refused<std::span<T>> = std::same_as<std::remove_const_t<T>, refused>;
template <template <class, class> class Saved, class T, class M>
inline constexpr bool of_refused<Saved<T, M>*> = std::same_as<T, refused>;

/// Says why X is no field: once, in however many fields it is given.
template <class X, bool View, bool Address>
void refuse_field() {
    static_assert(never<X> || !View,
                  "cpx: a field is given other elements, to write what is const, or no view; view a vector as "
                  "rows(list, width), a tensor as its data() or elements()");
    static_assert(never<X> || !Address,
                  "cpx: a field wants the address of an object of the tensors' elements and memory: &saved");
    static_assert(never<X> || View || Address,
                  "cpx: a field wants one of the names of its type, such as sum_order::by_row");
}

/// Returns `x` as a field of type F, or says why it is none.
template <class F, class X>
constexpr F fit(X&& x) {
    constexpr bool fits = std::is_convertible_v<X, F>;
    if constexpr (fits && !of_refused<F>) return std::forward<X>(x);
    if constexpr (!fits && !of_refused<F>) refuse_field<X, std::is_class_v<F>, std::is_pointer_v<F>>();
    throw;
}

/// The last field of a struct of arguments.
struct no_more {
    no_more() = default;
    template <class X>
    no_more(X const&) {
        static_assert(never<X>, "cpx: a struct is given more fields than it has");
    }
};

} // namespace detail

/// An F in a struct of arguments, as `sharded_field` is a `sharded`: rows, a list, an address or a choice.
///
/// F itself leaves what does not fit to overload resolution.
template <class F>
struct field : F {
    field() = default;
    template <class X>
    constexpr field(X&& x) : F(detail::fit<F>(std::forward<X>(x))) {}
    // In braces: what F is made of. Not inherited: nvcc cannot compare inherited default arguments.
    template <class X>
        requires std::constructible_from<F, X, std::size_t> && (!std::constructible_from<F, X, index_t, caller>)
    constexpr field(X&& data, std::size_t size) : F(std::forward<X>(data), size) {}
    template <class X>
        requires std::constructible_from<F, X, index_t, caller>
    constexpr field(X&& list, index_t width, caller here = caller::here()) : F(std::forward<X>(list), width, here) {}
    template <class X>
        requires std::constructible_from<F, X, index_t, index_t, caller>
    constexpr field(X&& data, index_t count, index_t width, caller here = caller::here())
        : F(std::forward<X>(data), count, width, here) {}
    template <class X>
        requires std::constructible_from<F, X, index_t, index_t, index_t, caller>
    constexpr field(X&& data, index_t count, index_t width, index_t stride, caller here = caller::here())
        : F(std::forward<X>(data), count, width, stride, here) {}
    template <class X, class Y, class... More>
        requires(!std::constructible_from<F, X, Y, More..., caller> &&
                 !(sizeof...(More) == 0 && std::constructible_from<F, X, Y>))
    field(X&&, Y&&, More&&...) : F(detail::fit<F>(detail::any())) {}
};

template <class F>
    requires(!std::is_class_v<F>)
struct field<F> {
    constexpr field() = default;
    template <class X>
    constexpr field(X&& x) : value_(detail::fit<F>(std::forward<X>(x))) {}

    constexpr operator F() const { return value_; }
    constexpr F operator->() const
        requires std::is_pointer_v<F>
    {
        return value_;
    }

private:
    F value_{};
};

} // namespace cpx

// cpx/core/function_ref.hpp
// What a call of a function is given to call, behind one type: as std::function_ref of C++26.

namespace cpx::detail {

template <class Signature>
class function_ref;

/// Refers to what can be called with `Args` and outlives this, and owns nothing: for parameters. Of a temporary, it is
/// good until the end of the statement. A type costs the compiler one function, a `std::function` five.
template <class R, class... Args>
class function_ref<R(Args...)> {
public:
    template <class F>
        requires(!std::same_as<std::remove_cvref_t<F>, function_ref> &&
                 !std::is_member_pointer_v<std::remove_cvref_t<F>> && std::is_invocable_r_v<R, F&, Args...>)
    function_ref(F&& f)
        : object_((void*)std::addressof(f)), // also of a const object or a function
          call_([](void* object, Args... args) -> R {
              auto& called = *reinterpret_cast<std::remove_reference_t<F>*>(object);
              if constexpr (std::is_void_v<R>)
                  static_cast<void>(called(std::forward<Args>(args)...));
              else
                  return called(std::forward<Args>(args)...);
          }) {}

    R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

private:
    void* object_;
    R (*call_)(void*, Args...);
};

} // namespace cpx::detail

// cpx/core/hash.hpp
// A hash of numbers: the same on every machine, for ranks to compare.

namespace cpx::detail {

/// Mixes one number into a 64-bit hash. Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators",
/// OOPSLA 2014, the finaliser of SplitMix64.
constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
    std::uint64_t z = (hash ^ value) + 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

template <class Numbers>
std::uint64_t mix_all(std::uint64_t hash, Numbers const& numbers) {
    hash = mix(hash, static_cast<std::uint64_t>(std::size(numbers)));
    for (auto const number : numbers) hash = mix(hash, static_cast<std::uint64_t>(number));
    return hash;
}

/// The same of text, eight letters at a time.
inline std::uint64_t mix_all(std::uint64_t hash, std::string_view text) {
    hash = mix(hash, text.size());
    std::uint64_t letters = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
        letters |= std::uint64_t{static_cast<unsigned char>(text[i])} << (8 * (i % 8));
        if (i % 8 == 7 || i + 1 == text.size()) hash = mix(hash, std::exchange(letters, 0));
    }
    return hash;
}

} // namespace cpx::detail

// cpx/core/search.hpp
// Finds, among places that ascend, the last that is not beyond another.

namespace cpx {

namespace detail {

/// Returns the largest i in [low, high) with `begins(i) <= at`, or `low`.
CPX_CALLS_BACK
template <class Int, class At, class Begins>
CPX_HOST_DEVICE constexpr Int last_between(At at, Int low, Int high, Begins const& begins) {
    while (low + 1 < high) {
        Int const middle = low + (high - low) / 2;
        bool const before = begins(middle) <= at; // chosen by it, not branched on: half of the branches would be missed
        low = before ? middle : low;
        high = before ? high : middle;
    }
    return low;
}

} // namespace detail

/// Returns the largest i in [0, count) with `begins(i) <= at`, for `begins` ascending from at most `at`.
CPX_CALLS_BACK
template <class Int, class At, class Begins>
CPX_HOST_DEVICE constexpr Int last_at_or_before(At at, Int count, Begins const& begins) {
    return detail::last_between(at, Int{0}, count, begins);
}

/// The same; `guess` is where to look first. Cost: O(log d) if the guess is d off.
CPX_CALLS_BACK
template <class Int, class At, class Begins>
CPX_HOST_DEVICE constexpr Int last_at_or_before(At at, Int count, Int guess, Begins const& begins) {
    Int low = guess, high = guess, step = 1;
    if (begins(guess) <= at) {
        for (; low + step < count && begins(low + step) <= at; step *= 2) low += step;
        high = low + step < count ? low + step : count;
    } else {
        for (; step < high && begins(high - step) > at; step *= 2) high -= step;
        low = step < high ? high - step : 0;
    }
    return detail::last_between(at, low, high, begins);
}

} // namespace cpx

// cpx/core/thd.hpp
// The packed batch: sequences laid end to end in one row of tokens ("thd": tokens, heads, dim).

namespace cpx {

/// A vector, array or span of integers of any width.
template <class R>
concept integers = std::ranges::contiguous_range<R const> && std::integral<std::ranges::range_value_t<R const>> &&
                   !std::same_as<std::ranges::range_value_t<R const>, bool> &&
                   !std::same_as<std::ranges::range_value_t<R const>, char>;

namespace detail {

/// A number of tokens in braces, where one that is not whole is refused before it could be narrowed.
struct listed_tokens {
    listed_tokens(index_t n) : number(n) {}
    template <std::floating_point X>
    listed_tokens(X) {
        static_assert(never<X>, "cpx: thd wants whole numbers, the offsets of its sequences: thd({0, 7, 20}), or their "
                                "lengths: thd::from_lengths({7, 13})");
    }
    operator index_t() const { return number; }
    index_t number = 0;
};

} // namespace detail

/// A packed batch of N sequences, described by their N + 1 offsets (cu_seqlens).
///
/// Sequence `s` holds the global rows `offset(s) .. offset(s + 1)`. Lengths of 0 and 1, odd lengths and repeated
/// offsets at the end are ordinary. Immutable and cheap to copy: copies share the offsets.
///
/// Offsets are physical. When sequences are padded, `valid` gives the tokens that count, at the front of each
/// sequence; layouts, plans and operators see physical tokens, losses and masks see valid ones.
class thd {
public:
    /// An empty batch.
    thd() : data_(none()) {}

    /// Takes offsets and, if there is padding, the valid length of every sequence. Batches without padding are equal,
    /// with valid lengths or without.
    ///
    /// Throws `cpx::error` that names the first bad entry: offsets that are empty, do not start at 0, decrease or end
    /// at 2^62 or beyond, valid lengths that are not one a sequence or exceed its physical length.
    explicit thd(std::vector<index_t> offsets, std::vector<index_t> valid = {}, caller here = caller::here()) {
        require(!offsets.empty(), "thd", "number of offsets", "at least 1", 0, here);
        require(offsets.front() == 0, "thd", "offset 0", 0, offsets.front(), here);
        for (std::size_t s = 1; s < offsets.size(); ++s)
            if (offsets[s] <
                offsets[s - 1]) // the text is made only when it is needed: plans of 4096 sequences count microseconds
                throw error("thd", "offset " + std::to_string(s) + " decreases",
                            "at least " + std::to_string(offsets[s - 1]), std::to_string(offsets[s]), here);
        require(offsets.back() < detail::size_limit, "thd", "last offset", "less than 2^62", offsets.back(), here);
        require(valid.empty() || valid.size() + 1 == offsets.size(), "thd", "number of valid lengths",
                offsets.size() - 1, valid.size(), here);
        for (std::size_t s = 0; s < valid.size(); ++s)
            if (valid[s] < 0 || valid[s] > offsets[s + 1] - offsets[s])
                throw error("thd", "valid length of sequence " + std::to_string(s),
                            "0 to " + std::to_string(offsets[s + 1] - offsets[s]), std::to_string(valid[s]), here);
        bool padded = false;
        for (std::size_t s = 0; s < valid.size(); ++s) padded = padded || valid[s] < offsets[s + 1] - offsets[s];
        if (!padded) valid.clear();
        std::uint64_t const hash = detail::mix_all(detail::mix_all(0, offsets), valid);
        data_ = std::make_shared<lengths const>(lengths{std::move(offsets), std::move(valid), hash});
    }

    /// The same of other integers, in a vector, array or span.
    template <integers R, integers V = std::vector<index_t>>
    explicit thd(R const& offsets, V const& valid = {}, caller here = caller::here())
        : thd(numbers("thd", "offset ", offsets, here), numbers("thd", "valid length of sequence ", valid, here),
              here) {}

    /// Of offsets in braces, which might be arguments of other constructors, too.
    explicit thd(std::initializer_list<detail::listed_tokens> offsets, std::vector<index_t> valid = {},
                 caller here = caller::here())
        : thd(std::vector<index_t>(offsets.begin(), offsets.end()), std::move(valid), here) {}
    template <integers V>
    explicit thd(std::initializer_list<detail::listed_tokens> offsets, V const& valid, caller here = caller::here())
        : thd(offsets, numbers("thd", "valid length of sequence ", valid, here), here) {}

    template <class X>
        requires(!integers<X>)
    explicit thd(X const&, detail::any = {}, detail::any = {}) {
        not_integers<X>();
    }
    template <integers R, class X>
        requires(!integers<X> && !std::convertible_to<X const&, std::vector<index_t>>)
    explicit thd(R const&, X const&, detail::any = {}) {
        not_integers<X>();
    }
    template <class X>
        requires(!integers<X> && !std::convertible_to<X const&, std::vector<index_t>>)
    explicit thd(std::initializer_list<detail::listed_tokens>, X const&, detail::any = {}) {
        not_integers<X>();
    }

    /// Takes offsets as frameworks store them, for a buffer of `buffer_rows` rows (-1: not known).
    ///
    /// Throws `cpx::error` as above, and if the last offset exceeds the buffer.
    template <integers R, integers V = std::vector<index_t>>
    static thd from_offsets(R const& offsets, index_t buffer_rows = -1, V const& valid = {},
                            caller here = caller::here()) {
        thd batch(offsets, valid, here);
        require(buffer_rows < 0 || batch.tokens() <= buffer_rows, "thd", "last offset",
                "at most the rows of the buffer, " + std::to_string(buffer_rows), batch.tokens(), here);
        return batch;
    }
    template <class X = detail::any>
        requires(!integers<X>)
    static thd from_offsets(X const& = {}, detail::any = {}, detail::any = {}) {
        not_integers<X>();
        return {};
    }

    /// Returns `count` sequences of `length` tokens each, as unpacked (batch, time) tensors hold them.
    static thd uniform(index_t count, index_t length, caller here = caller::here()) {
        detail::product("thd::uniform", "tokens", {count, length}, here);
        auto offsets = detail::zeros<index_t>("thd::uniform", {count + 1}, here);
        for (index_t s = 0; s <= count; ++s) offsets[static_cast<std::size_t>(s)] = s * length;
        return thd(std::move(offsets), {}, here);
    }
    template <class X = void>
    static thd uniform(detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: thd::uniform(count, length) wants two numbers; of lengths that differ, "
                                        "thd::from_lengths");
        return {};
    }

    /// Returns the batch of sequences with these lengths. Throws `cpx::error` that names the first that is negative or
    /// with which there would be 2^62 tokens.
    static thd from_lengths(std::vector<index_t> const& lengths, caller here = caller::here()) {
        std::vector<index_t> offsets(1, 0);
        for (index_t const length : lengths) {
            index_t const most = detail::size_limit - 1 - offsets.back();
            if (length < 0 || length > most)
                throw error("thd::from_lengths", "length of sequence " + std::to_string(offsets.size() - 1),
                            "0 to " + std::to_string(most), std::to_string(length), here);
            offsets.push_back(offsets.back() + length);
        }
        return thd(std::move(offsets), {}, here);
    }
    template <integers R>
    static thd from_lengths(R const& lengths, caller here = caller::here()) {
        return from_lengths(numbers("thd::from_lengths", "length of sequence ", lengths, here), here);
    }
    static thd from_lengths(std::initializer_list<detail::listed_tokens> lengths, caller here = caller::here()) {
        return from_lengths(std::vector<index_t>(lengths.begin(), lengths.end()), here);
    }
    template <class X = detail::any>
        requires(!integers<X>)
    static thd from_lengths(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
        not_integers<X>();
        return {};
    }

    index_t sequences() const { return static_cast<index_t>(data_->offsets.size()) - 1; }
    /// Returns all tokens, padding included: the global rows of the batch.
    index_t tokens() const { return data_->offsets.back(); }
    index_t offset(index_t s) const { return data_->offsets[static_cast<std::size_t>(s)]; }
    index_t length(index_t s) const { return offset(s + 1) - offset(s); }
    /// Returns the tokens of sequence `s` that are not padding.
    index_t valid(index_t s) const {
        return data_->valid.empty() ? length(s) : data_->valid[static_cast<std::size_t>(s)];
    }
    std::span<index_t const> offsets() const { return data_->offsets; }
    /// Returns the valid length of every sequence, or none if there is no padding.
    std::span<index_t const> valid_lengths() const { return data_->valid; }

    /// Returns a hash of offsets and valid lengths, by which ranks compare batches.
    std::uint64_t hash() const { return data_->hash; }

    /// Returns the sequence that holds global row `row`. Cost: O(log N). Requires `0 <= row < tokens()`.
    index_t sequence(index_t row) const {
        return last_at_or_before(row, sequences(), [this](index_t s) { return offset(s); });
    }

    friend bool operator==(thd const& a, thd const& b) {
        return a.data_ == b.data_ ||
               (a.hash() == b.hash() && a.data_->offsets == b.data_->offsets && a.data_->valid == b.data_->valid);
    }

private:
    template <class X>
    static void not_integers() {
        static_assert(detail::never<X>, "cpx: thd wants a vector, array or span of integers, the offsets of its "
                                        "sequences: thd({0, 7, 20}), and of their valid lengths; of lengths, "
                                        "thd::from_lengths");
    }

    struct lengths {
        std::vector<index_t> offsets, valid;
        std::uint64_t hash;
    };
    /// Returns the data of empty batches, of which plans are made that get another: one for all.
    static std::shared_ptr<lengths const> const& none() {
        static auto const data = thd(std::vector<index_t>{0}).data_;
        return data;
    }
    static std::vector<index_t> numbers(char const* where, char const* what, integers auto const& list, caller here) {
        std::vector<index_t> result;
        for (auto const number : list) {
            result.push_back(static_cast<index_t>(number));
            if (number > 0 && result.back() < 0)
                throw error(where, what + std::to_string(result.size() - 1), "less than 2^62", std::to_string(number),
                            here);
        }
        return result;
    }
    std::shared_ptr<lengths const> data_;
};

namespace detail {

/// Where two batches differ first, and what each has there.
struct batch_difference {
    std::string place, expected, got;
};

/// Returns the first offset, or else valid length, in which two batches differ.
inline std::optional<batch_difference> first_difference(thd const& expected, thd const& got) {
    if (expected == got) return {};
    for (bool const valid : {false, true}) {
        auto const number = [&](thd const& batch, index_t i) {
            if (i >= batch.sequences() + !valid) return std::string("none");
            return std::to_string(valid ? batch.valid(i) : batch.offset(i));
        };
        for (index_t i = 0; i <= std::max(expected.sequences(), got.sequences()); ++i)
            if (auto const is = number(got, i), should = number(expected, i); is != should)
                return batch_difference{(valid ? "valid length " : "offset ") + std::to_string(i), should, is};
    }
    return {};
}

/// Throws `cpx::error` that names where a batch is not `expected`, that of `whose`.
inline void require_batch(char const* where, char const* what, char const* whose, thd const& expected, thd const& got,
                          caller here) {
    if (auto const d = first_difference(expected, got))
        throw error(where, what, whose + (", " + d->place) + ": " + d->expected, d->got, here);
}

} // namespace detail

} // namespace cpx

// cpx/core/given_rows.hpp
// The guess of trainers whether rows are already sharded, for rows whose type does not say it.

namespace cpx {

/// Whose rows somebody gives: the batch's, or one rank's share of every sequence.
enum class given_rows { whole, shard };

/// Guesses whose rows these are, from their number and the padded offsets of the batch, as Megatron-Bridge and miles
/// do: a rank's, zigzag over every sequence, if the batch has `ranks` times as many.
///
/// Where a program takes rows from elsewhere: within it, the types of tensors say how they are sharded. padded, valid:
/// cu_seqlens of padded sequences, and of their valid tokens where there is padding.
/// Throws `cpx::error`, where others go on with wrong rows: if a first offset is not 0, if there are no rows, if they
/// are neither the batch's nor one of W equal shares, if offsets are those of valid tokens, and if a sequence of shards
/// is not a multiple of 2 W.
template <integers P, integers V = std::vector<index_t>>
given_rows guess_rows(index_t rows, int ranks, P const& padded, V const& valid = {}, caller here = caller::here()) {
    char const* const where = "guess_rows";
    require(ranks > 0, where, "ranks", "at least 1", ranks, here);
    require(std::ssize(padded) > 0, where, "number of offsets", "at least 1", 0, here);
    require(*std::data(padded) == 0, where, "offset 0", 0, *std::data(padded), here);
    require(rows > 0, where, "rows", "at least 1, for none may be whole or a rank's", rows, here);
    thd const batch(padded, {}, here);
    require(std::ssize(valid) == 0 || std::size(valid) == std::size(padded), where, "number of valid offsets",
            std::size(padded), std::size(valid), here);
    if (std::ssize(valid) > 0) require(*std::data(valid) == 0, where, "valid offset 0", 0, *std::data(valid), here);
    for (std::size_t s = 0; s + 1 < std::size(valid); ++s) {
        index_t const length = batch.length(static_cast<index_t>(s)),
                      count = static_cast<index_t>(std::data(valid)[s + 1] - std::data(valid)[s]);
        if (count < 0 || count > length)
            throw error(where,
                        "valid tokens of sequence " + std::to_string(s) + ", whose offsets may have changed places",
                        "0 to its padded length " + std::to_string(length), std::to_string(count), here);
    }
    index_t const tokens = batch.tokens();
    if (tokens == rows) return given_rows::whole;
    if (tokens % ranks != 0 || tokens / ranks != rows)
        throw error(where, tokens / ranks < rows ? "last offset, which may be that of valid tokens" : "last offset",
                    "the rows " + std::to_string(rows) + ", or " + std::to_string(ranks) + " times as many",
                    std::to_string(tokens), here);
    for (index_t s = 0; s < batch.sequences(); ++s)
        if (batch.length(s) % (2 * index_t{ranks}) != 0)
            throw error(where, "length of sequence " + std::to_string(s) + ", of which every rank has a share",
                        "a multiple of " + std::to_string(2 * index_t{ranks}), std::to_string(batch.length(s)), here);
    return given_rows::shard;
}
template <class X = void>
given_rows guess_rows(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: guess_rows(rows, ranks, padded, valid) wants two numbers and vectors, arrays "
                                    "or spans of integers: the offsets of the padded batch, and perhaps of its tokens");
    return {};
}

} // namespace cpx

// cpx/core/overlap.hpp
// Whether two operands share memory, and the check of operators that would then write over what they are to read.

namespace cpx::detail {

/// Where an operand lies, in bytes, and the name that errors give it.
struct operand {
    char const* name = "";
    std::uintptr_t first = 0;
    index_t count = 0, width = 0, stride = 0;

    operand() = default;
    template <class T>
    operand(char const* called, rows<T> r)
        : name(called), first(reinterpret_cast<std::uintptr_t>(r.data())), count(r.data() ? r.count() : 0),
          width(r.width() * static_cast<index_t>(sizeof(T))), stride(r.stride() * static_cast<index_t>(sizeof(T))) {}
    template <class T>
    operand(char const* called, std::span<T> list) : operand(called, rows<T>(list.data(), 1, std::ssize(list))) {}

    bool empty() const { return count <= 0 || width <= 0; }
    bool holds(std::uintptr_t place) const {
        return place - first < static_cast<std::uintptr_t>((count - 1) * stride + width);
    }
    bool same_rows(operand const& other) const {
        return first == other.first && count == other.count && width == other.width &&
               (stride == other.stride || count < 2);
    }
};

/// Returns whether some byte belongs to both: then one of them must not be written while the other is read.
///
/// Disjoint columns of the same rows do not overlap, nor do disjoint rows. Where the two have different strides and
/// their ranges of addresses meet, they count as overlapping.
inline bool overlap(operand const& a, operand const& b) {
    if (a.first > b.first) return overlap(b, a);
    if (a.empty() || b.empty() || !a.holds(b.first)) return false;
    index_t const stride = a.count > 1 ? a.stride : b.stride;
    if (stride <= 0 || (b.count > 1 && b.stride != stride)) return true;
    index_t const column = static_cast<index_t>(b.first - a.first) % stride; // of a's rows, where those of b begin
    return column < a.width || column + b.width > stride;
}

/// Whether an operand that is written may be the same rows as one that is read.
enum class in_place { no, yes };

/// Throws `cpx::error` that names both if one of `written` overlaps another of them, or one of `read`; and if rows that
/// are written lie over each other. Call it before anything is written. Cost: some nanoseconds a pair.
inline void require_apart(char const* where, std::span<operand const> written, std::span<operand const> read,
                          caller here, in_place allowed = in_place::no) {
    auto const check = [&](operand const& a, operand const& b, bool same) {
        if (!overlap(a, b) || (same && a.same_rows(b))) return;
        throw error(where, std::string("overlap of ") + a.name + " and " + b.name,
                    same ? "none, or the same rows" : "none", "some", here);
    };
    for (std::size_t i = 0; i < written.size(); ++i) {
        operand const& to = written[i];
        for (operand const& other : written.subspan(i + 1)) check(to, other, false);
        for (operand const& other : read) check(to, other, allowed == in_place::yes);
        if (to.count > 1 && to.stride < to.width)
            throw error(where, std::string("stride of ") + to.name + ", bytes",
                        "at least the width " + std::to_string(to.width), std::to_string(to.stride), here);
    }
}
inline void require_apart(char const* where, std::initializer_list<operand> written,
                          std::initializer_list<operand> read, caller here, in_place allowed = in_place::no) {
    require_apart(where, std::span(written.begin(), written.size()), std::span(read.begin(), read.size()), here,
                  allowed);
}

/// Throws unless operands of known shapes lie where a memory can have them, and their rows apart; the host's do. On
/// devices: `ops/cuda/operands.hpp`.
inline void require_there(host_memory const&, char const*, std::span<operand const>, caller) {}

} // namespace cpx::detail

// cpx/core/packing.hpp
// Packed batches from what data loaders hold: position ids, padding masks, valid and padded cu_seqlens.

namespace cpx {

/// A vector, array or span of one of the types `E`.
template <class R, class... E>
concept list_of = std::ranges::contiguous_range<R const> && (std::same_as<std::ranges::range_value_t<R>, E> || ...);

/// What a token of position -1 is. Trainers use both, so there is no default.
enum class pad {
    joins_last_sequence, ///< one more row, not valid, of the sequence before it: tail padding
    own_sequence,        ///< a sequence of length 1 and valid length 0
};

/// On which side of its sequence the rows of a mask may have padding; `any`: on either or both.
enum class padding { left, right, any };

/// What else must hold of padded offsets: where they end (-1: not known), what divides every padded length.
struct padded_buffer {
    index_t rows = -1;
    index_t multiple = 1;
};

/// Where the rows of a batch without padding lie in a padded buffer: sequence `s` in rows `start(s)` and after.
///
/// The buffer may be a (rows, columns) tensor or another packed batch. `pack` and `unpack` move rows by it.
class packing {
public:
    /// Throws `cpx::error` that names the first sequence that overlaps the one before it or leaves the buffer.
    packing(thd batch, std::vector<index_t> starts, index_t buffer_rows, caller here = caller::here())
        : batch_(std::move(batch)), starts_(std::move(starts)), buffer_rows_(buffer_rows) {
        require(std::ssize(starts_) == batch_.sequences(), "packing", "number of starts", batch_.sequences(),
                starts_.size(), here);
        detail::product("packing", "rows of the buffer", {buffer_rows_}, here);
        index_t end = 0;
        for (index_t s = 0; s < batch_.sequences(); ++s) {
            index_t const last = buffer_rows_ - batch_.length(s);
            if (start(s) < end || start(s) > last)
                throw error("packing", "start of sequence " + std::to_string(s),
                            std::to_string(end) + " to " + std::to_string(last), std::to_string(start(s)), here);
            end = start(s) + batch_.length(s);
        }
    }
    template <class X = void>
    explicit packing(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>,
                      "cpx: packing(batch, starts, buffer_rows) wants a cpx::thd, a vector of index_t "
                      "and a number; packing_from_mask makes one of a mask");
    }

    thd const& batch() const { return batch_; }
    index_t start(index_t s) const { return starts_[static_cast<std::size_t>(s)]; }
    index_t buffer_rows() const { return buffer_rows_; }

    /// Returns the buffer's row of every row of the batch, ascending, as gathers by index want them.
    std::vector<index_t> rows(caller here = caller::here()) const {
        auto list = detail::zeros<index_t>("packing::rows", {batch_.tokens()}, here);
        for (index_t s = 0; s < batch_.sequences(); ++s)
            std::iota(list.begin() + batch_.offset(s), list.begin() + batch_.offset(s + 1), start(s));
        return list;
    }
    /// Returns for every row of the buffer 1 if it is a row of the batch, 0 if it is padding.
    std::vector<std::uint8_t> mask(caller here = caller::here()) const {
        auto valid = detail::zeros<std::uint8_t>("packing::mask", {buffer_rows_}, here);
        for (index_t s = 0; s < batch_.sequences(); ++s)
            std::fill_n(valid.begin() + start(s), batch_.length(s), std::uint8_t{1});
        return valid;
    }

    friend bool operator==(packing const&, packing const&) = default;

private:
    thd batch_;
    std::vector<index_t> starts_;
    index_t buffer_rows_ = 0;
};

namespace detail {

/// Makes a batch whose valid lengths are left out where there is no padding: equal batches then compare equal.
inline thd padded_thd(std::vector<index_t> const& lengths, std::vector<index_t> valid, caller here) {
    thd const batch = thd::from_lengths(lengths, here);
    if (valid == lengths) return batch;
    return thd(std::vector<index_t>(batch.offsets().begin(), batch.offsets().end()), std::move(valid), here);
}

inline void require_columns(char const* where, index_t count, index_t columns, caller here) {
    require(columns > 0 || (columns == 0 && count == 0), where, "columns", "at least 1", columns, here);
    require(columns == 0 || count % columns == 0, where, "size of the list",
            "a multiple of the columns, " + std::to_string(columns), count, here);
}

template <class T>
void copy_rows(rows<T const> from, rows<T> to) {
    if (from.stride() == from.width() && to.stride() == to.width())
        std::copy_n(from.data(), from.count() * from.width(), to.data());
    else
        for (index_t i = 0; i < from.count(); ++i) std::copy_n(from.row(i), from.width(), to.row(i));
}

template <class T>
void require_fits(char const* where, packing const& p, rows<T const> packed, rows<T const> buffer, caller here) {
    require(packed.count() == p.batch().tokens(), where, "packed rows", p.batch().tokens(), packed.count(), here);
    require(buffer.count() == p.buffer_rows(), where, "rows of the buffer", p.buffer_rows(), buffer.count(), here);
    require(packed.width() == buffer.width(), where, "width of the packed rows", buffer.width(), packed.width(), here);
}

} // namespace detail

/// Makes a batch of position ids: a sequence begins at every 0 and goes on 1, 2, ...; -1 is padding behind it.
///
/// `positions`: (B, columns), -1 columns: one row. Every row begins a sequence; the batch has B * columns tokens.
/// There are no sequences of length 0: positions cannot show them.
///
/// Throws `cpx::error` that names the first wrong row of the batch. A position must be 0, or -1, or go on in its
/// sequence. A row of `positions` must not begin within a sequence: the earlier tokens are not there, and operators
/// would count positions from 0. Padding that joins the sequence before it must come after one.
/// Source: twinkle's sequence parallelism, whose revisions differ in `pad`: the later one joins.
template <list_of<std::int32_t, std::int64_t> R>
thd thd_from_positions(R const& positions, pad pads, index_t columns = -1, caller here = caller::here()) {
    index_t const count = std::ssize(positions);
    if (columns == -1) columns = count;
    detail::require_columns("thd_from_positions", count, columns, here);
    require(pads == pad::joins_last_sequence || pads == pad::own_sequence, "thd_from_positions", "pad",
            "joins_last_sequence or own_sequence", static_cast<int>(pads), here);
    std::vector<index_t> lengths, valid;
    index_t previous = -1;
    for (index_t row = 0; row < count; ++row) {
        index_t const position = std::data(positions)[row];
        bool const first = row % columns == 0, joins = pads == pad::joins_last_sequence;
        if (first) previous = -1;
        if (position == 0 || (position == -1 && !joins)) {
            lengths.push_back(1);
            valid.push_back(position == 0);
        } else if (position == -1 ? !first : position == previous + 1) {
            ++lengths.back();
            valid.back() += position != -1;
        } else
            throw error("thd_from_positions", "position of row " + std::to_string(row),
                        first && joins   ? "0, where a sequence begins"
                        : previous == -1 ? "0 or -1"
                                         : "0, -1 or " + std::to_string(previous + 1),
                        std::to_string(position), here);
        previous = position;
    }
    return detail::padded_thd(lengths, std::move(valid), here);
}
template <class X = detail::any>
thd thd_from_positions(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: thd_from_positions(positions, pad) wants a vector, array or span of int32 or "
                                    "int64, and what padding is, pad::joins_last_sequence or pad::own_sequence");
    return {};
}

/// Makes a batch of a padding mask, 1 where a token counts: one sequence a row, without its padding, and where its
/// rows lie in the (rows * columns) rows of the padded tensor. A row that is padding only is a sequence of length 0.
///
/// Throws `cpx::error` that names row and column of the first element that is neither 0 nor 1, that begins a second run
/// of ones in its row, or that is padding on the other side.
template <list_of<std::int32_t, std::int64_t, std::uint8_t, bool> R>
packing packing_from_mask(R const& mask, index_t columns, padding side, caller here = caller::here()) {
    index_t const count = std::ssize(mask);
    detail::require_columns("packing_from_mask", count, columns, here);
    require(side == padding::left || side == padding::right || side == padding::any, "packing_from_mask", "padding",
            "left, right or any", static_cast<int>(side), here);
    std::vector<index_t> lengths, starts;
    for (index_t row = 0; row < count; row += columns) {
        index_t start = row, length = 0;
        for (index_t column = 0; column < columns; ++column) {
            index_t const value = static_cast<index_t>(std::data(mask)[row + column]);
            index_t const end = start - row + length;
            char const* expected = nullptr;
            if (value != 0 && value != 1)
                expected = "0 or 1";
            else if (value == 1 && length == 0 && column > 0 && side == padding::right)
                expected = "0, the padding being on the right";
            else if (value == 1 && length > 0 && end < column)
                expected = "0, the sequence having ended before";
            else if (value == 0 && length > 0 && side == padding::left)
                expected = "1, the padding being on the left";
            if (expected != nullptr)
                throw error("packing_from_mask",
                            "row " + std::to_string(row / columns) + ", column " + std::to_string(column), expected,
                            std::to_string(value), here);
            if (value == 1 && length++ == 0) start = row + column;
        }
        lengths.push_back(length);
        starts.push_back(start);
    }
    return packing(thd::from_lengths(lengths, here), std::move(starts), count, here);
}

/// Makes a batch of a padding mask, 1 where a token counts, and of position ids: a sequence begins at every 0 and goes
/// on 1, 2, ... in its row; padding stands before, between and behind sequences. What the positions of padding are does
/// not matter. The batch has no padding; the packing says where its sequences lie in the padded tensor.
///
/// mask, positions: (rows, columns). There are no sequences of length 0: positions cannot show them.
/// Throws `cpx::error` that names row and column of the first contradiction: a token without a position, a position
/// that neither begins a sequence nor follows the one before it, a sequence that goes on behind padding or in another
/// row.
template <list_of<std::int32_t, std::int64_t, std::uint8_t, bool> M, list_of<std::int32_t, std::int64_t> P>
packing packing_from_mask(M const& mask, P const& positions, index_t columns, caller here = caller::here()) {
    char const* const where = "packing_from_mask";
    index_t const count = std::ssize(mask);
    require(std::ssize(positions) == count, where, "number of positions", count, std::ssize(positions), here);
    detail::require_columns(where, count, columns, here);
    std::vector<index_t> lengths, starts;
    index_t next = -1; // the position with which the sequence before goes on; -1: a row begins, or padding was before
    for (index_t place = 0; place < count; ++place) {
        index_t const value = static_cast<index_t>(std::data(mask)[place]), position = std::data(positions)[place];
        bool const row_begins = place % columns == 0, is_token = value != 0;
        if (row_begins) next = -1;
        bool const follows = is_token && position > 0 && position == next;
        if ((value != 0 && value != 1) || (is_token && position != 0 && !follows)) {
            std::string const at =
                " in row " + std::to_string(place / columns) + ", column " + std::to_string(place % columns);
            if (value != 0 && value != 1) throw error(where, "mask" + at, "0 or 1", std::to_string(value), here);
            throw error(where, "position" + at,
                        position < 0 ? "0 or more, for the mask says that this is a token"
                        : row_begins ? "0, for a row begins with a sequence"
                        : next == -1 ? "0, for the mask says that padding was before"
                                     : "0 or " + std::to_string(next),
                        std::to_string(position), here);
        }
        if (is_token && !follows) {
            starts.push_back(place);
            lengths.push_back(0);
        }
        if (is_token) ++lengths.back();
        next = is_token ? position + 1 : -1;
    }
    return packing(thd::from_lengths(lengths, here), std::move(starts), count, here);
}
template <class X = detail::any>
packing packing_from_mask(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: packing_from_mask(mask, columns, padding), or (mask, positions, columns), "
                                    "wants a vector, array or span of bool, uint8, int32 or int64, positions of the "
                                    "latter two; std::vector<bool> is none: take std::vector<std::uint8_t>");
    throw;
}

/// Makes a batch of the offsets of valid tokens and those of padded sequences (cu_seqlens and cu_seqlens_padded of
/// TransformerEngine and Megatron-LM). The padding is at the end of each sequence.
///
/// Throws `cpx::error` if either list is not one of offsets, if they differ in number, if a sequence has more valid
/// tokens than rows, or if the padded offsets are not what `buffer` says. Rows before the first sequence, as in padded
/// offsets 2, 6, 12, are an error: make them a sequence of no valid tokens (0, 2, 6, 12), or a `packing`.
template <list_of<std::int32_t, std::int64_t> V, list_of<std::int32_t, std::int64_t> P>
thd thd_from_cu_seqlens(V const& valid, P const& padded, padded_buffer buffer = {}, caller here = caller::here()) {
    char const* const where = "thd_from_cu_seqlens";
    require(std::ssize(valid) == std::ssize(padded), where, "number of valid offsets", std::ssize(padded),
            std::ssize(valid), here);
    require(buffer.multiple >= 1, where, "multiple", "at least 1", buffer.multiple, here);
    require(std::size(padded) == 0 || *std::data(padded) <= 0, where, "rows before the first sequence",
            "none (make them a sequence without valid tokens)", std::size(padded) == 0 ? 0 : *std::data(padded), here);
    auto const read = [&](char const* list, auto const& offsets) {
        try {
            return thd(std::vector<index_t>(std::begin(offsets), std::end(offsets)));
        } catch (error const& e) {
            throw error(where, std::string(list) + " offsets: " + e.problem(), e.expected(), e.got(), here);
        }
    };
    thd const tokens = read("valid", valid), physical = read("padded", padded);
    require(buffer.rows < 0 || physical.tokens() == buffer.rows, where, "last padded offset",
            "the rows of the buffer, " + std::to_string(buffer.rows), physical.tokens(), here);
    std::vector<index_t> lengths, counts;
    for (index_t s = 0; s < physical.sequences(); ++s) {
        lengths.push_back(physical.length(s));
        counts.push_back(tokens.length(s));
        if (counts.back() > lengths.back())
            throw error(where, "valid length of sequence " + std::to_string(s),
                        "0 to " + std::to_string(lengths.back()), std::to_string(counts.back()), here);
        if (lengths.back() % buffer.multiple != 0)
            throw error(where, "padded length of sequence " + std::to_string(s),
                        "a multiple of " + std::to_string(buffer.multiple), std::to_string(lengths.back()), here);
    }
    return detail::padded_thd(lengths, std::move(counts), here);
}
template <class X = detail::any>
thd thd_from_cu_seqlens(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: thd_from_cu_seqlens(valid, padded) wants two vectors, arrays or spans of int32 "
                  "or int64; offsets without padding go to thd(offsets)");
    return {};
}

/// Returns the batch whose sequences have the valid lengths of `batch`, each padded at its end to a multiple of
/// `multiple` rows; padding that `batch` has is dropped, and 1 drops it all.
///
/// cpx needs no padding. Peers do: zigzag wants 2 W, with sequence parallelism over TP ranks lcm(2 W, W TP).
/// Throws `cpx::error` if `multiple` is below 1, or there would be 2^62 rows.
inline thd pad_to_multiple(thd const& batch, index_t multiple, caller here = caller::here()) {
    index_t const most = detail::size_limit - 1;
    require(multiple >= 1 && multiple <= most, "pad_to_multiple", "multiple", "1 to " + std::to_string(most), multiple,
            here);
    std::vector<index_t> lengths, valid;
    index_t rows = 0;
    for (index_t s = 0; s < batch.sequences(); ++s) {
        valid.push_back(batch.valid(s));
        lengths.push_back((valid.back() + multiple - 1) / multiple * multiple);
        if (lengths.back() > most - rows)
            throw error("pad_to_multiple", "length of sequence " + std::to_string(s),
                        "less than 2^62 with those before it, " + std::to_string(rows), std::to_string(lengths.back()),
                        here);
        rows += lengths.back();
    }
    return detail::padded_thd(lengths, std::move(valid), here);
}

template <class X = detail::any>
thd pad_to_multiple(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: pad_to_multiple(batch, multiple) wants a cpx::thd, such as thd({0, 7, 20}), "
                                    "and a number");
    return {};
}

/// Returns the valid rows of `padded` as a batch without padding, and where they lie in `padded`.
inline packing unpadded(thd const& padded, caller here = caller::here()) {
    std::vector<index_t> const offsets(padded.offsets().begin(), padded.offsets().end() - 1);
    return packing(pad_to_multiple(padded, 1, here), offsets, padded.tokens(), here);
}

template <class X = detail::any>
packing unpadded(X const& = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: unpadded(padded) wants a cpx::thd with valid lengths, such as "
                                    "thd_from_cu_seqlens returns");
    throw;
}

/// Copies the rows of the batch out of a padded buffer, without the padding, which is not read.
///
/// `buffer`: (p.buffer_rows(), width); `packed`: (p.batch().tokens(), width), elsewhere. Cost: one copy a sequence
/// where rows are contiguous. Throws `cpx::error` if the shapes do not fit, and on overlapping memory.
template <class T>
void pack(packing const& p, std::type_identity_t<rows<T const>> buffer, rows<T> packed, caller here = caller::here()) {
    detail::require_fits<T>("pack", p, packed, buffer, here);
    detail::require_apart("pack", {{"packed", packed}}, {{"buffer", buffer}}, here);
    for (index_t s = 0; s < p.batch().sequences(); ++s)
        detail::copy_rows<T>(buffer.sub(p.start(s), p.batch().length(s)),
                             packed.sub(p.batch().offset(s), p.batch().length(s)));
}
template <class T = void>
detail::refused pack(detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<T>, "cpx: pack(packing, buffer, packed) wants a packing and rows, those written not "
                                    "const; of a tensor data(), of a vector rows(list, width)");
    return {};
}

/// Copies the rows of the batch into a padded buffer and zeros into the padding: writes every row of `buffer`.
///
/// The inverse of `pack` on the rows of the batch, and its transpose: the gradient of one is the other.
/// Shapes, cost and errors as there.
template <class T>
void unpack(packing const& p, std::type_identity_t<rows<T const>> packed, rows<T> buffer,
            caller here = caller::here()) {
    detail::require_fits<T>("unpack", p, packed, buffer, here);
    detail::require_apart("unpack", {{"buffer", buffer}}, {{"packed", packed}}, here);
    index_t row = 0;
    auto const zero_until = [&](index_t end) {
        for (; row < end; ++row) std::fill_n(buffer.row(row), buffer.width(), T{});
    };
    for (index_t s = 0; s < p.batch().sequences(); ++s) {
        index_t const count = p.batch().length(s);
        zero_until(p.start(s));
        detail::copy_rows<T>(packed.sub(p.batch().offset(s), count), buffer.sub(row, count));
        row += count;
    }
    zero_until(p.buffer_rows());
}
template <class T = void>
detail::refused unpack(detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<T>, "cpx: unpack(packing, packed, buffer) wants a packing and rows, those written not "
                                    "const; of a tensor data(), of a vector rows(list, width)");
    return {};
}

} // namespace cpx

// cpx/core/rotary_axes.hpp
// What rotary embedding is on host and device: which pair of channels turns by which axis, and what is rounded.

namespace cpx {

/// How the pairs of a head are given to the axes of multimodal positions: time, height, width.
enum class axis_order {
    sectioned,   ///< the pairs of an axis stand side by side: Qwen2-VL, Qwen2.5-VL
    interleaved, ///< pair i belongs to axis i % 3 while i < 3 * section[i % 3], then to time: Qwen3-VL, Qwen3.5
};

/// What is rounded to the elements of a tensor that has fewer bits than float.
enum class rounding {
    fp32_inside,   ///< the result, once: Transformer Engine's fused kernel
    round_each_op, ///< cosine and sine, each product and their sum: transformers, Megatron-LM without fusion
};

/// Returns the axis of every pair, 0 to 2, for `mrope_section` of a model's settings.
///
/// pairs: half the rotary size, which the sections make together; -1: not known.
/// Throws `cpx::error` if a section is negative, or if there are more or fewer pairs. Source: Hugging Face
/// transformers, apply_multimodal_rotary_pos_emb of Qwen2-VL and apply_interleaved_mrope of Qwen3-VL, which do not ask.
inline std::vector<int> rotary_axes(std::array<index_t, 3> section, axis_order order, index_t pairs = -1,
                                    caller here = caller::here()) {
    index_t const least = std::min({section[0], section[1], section[2]}),
                  most = std::max({section[0], section[1], section[2]});
    require(order == axis_order::sectioned || order == axis_order::interleaved, "rotary_axes", "order",
            "sectioned or interleaved", static_cast<int>(order), here);
    require(least >= 0, "rotary_axes", "section", "not negative", least, here);
    require(most <= 1 << 20, "rotary_axes", "section", "at most 2^20", most, here);
    index_t const sum = section[0] + section[1] + section[2];
    require(pairs < 0 || sum == pairs, "rotary_axes", "sum of the sections",
            "half the rotary size, " + std::to_string(pairs), sum, here);
    std::vector<int> axes;
    for (index_t i = 0; i < sum; ++i)
        if (order == axis_order::sectioned)
            axes.push_back((i >= section[0]) + (i >= section[0] + section[1]));
        else
            axes.push_back(i < 3 * section[static_cast<std::size_t>(i % 3)] ? static_cast<int>(i % 3) : 0);
    return axes;
}
template <class X = detail::any>
std::vector<int> rotary_axes(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: rotary_axes(section, order, pairs) wants mrope_section, three index_t in "
                                    "braces or an array, and an axis_order");
    return {};
}

} // namespace cpx

// cpx/core/row_buffer.hpp
// Rows that belong to nobody's batch.

namespace cpx {

/// Owns a dense (count, width) matrix that begins with zeros, in the memory M.
template <class T, any_memory M = host_memory>
class row_buffer {
public:
    static_assert(!std::same_as<T, detail::untold>,
                  "cpx: a row_buffer cannot tell its elements; write row_buffer<T>(count, width)");
    row_buffer() = default;
    row_buffer(M const& memory, index_t count, index_t width, caller here = caller::here())
        : count_(count), width_(width), memory_(memory),
          values_(memory.template zeros<T>("row_buffer", {count, width}, here)) {}
    row_buffer(index_t count, index_t width, caller here = caller::here())
        requires std::same_as<M, host_memory>
        : row_buffer(M(), count, width, here) {}
    template <class X = void>
    explicit row_buffer(detail::any, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: row_buffer<T>(count, width) wants two numbers, and row_buffer<T, "
                                        "M>(memory, count, width) an M before them; write(values) copies a list");
    }

    rows<T> view() & { return {values_.data(), count_, width_}; }
    rows<T const> view() const& { return {values_.data(), count_, width_}; }
    template <class X = T>
    rows<T> view() const&& {
        ends<X>();
        throw;
    }
    std::span<T> elements() & { return {values_.data(), static_cast<std::size_t>(count_ * width_)}; }
    std::span<T const> elements() const& { return {values_.data(), static_cast<std::size_t>(count_ * width_)}; }
    template <class X = T>
    std::span<T> elements() const&& {
        ends<X>();
        throw;
    }
    operator std::span<T>() & { return elements(); }
    operator std::span<T const>() const& { return elements(); }
    operator std::span<T const>() const&& = delete;
    index_t count() const { return count_; }
    index_t width() const { return width_; }

    /// Copies all elements from the host, row after row. Throws `cpx::error` if there are more or fewer.
    void write(std::span<T const> values, caller here = caller::here()) {
        require(std::ssize(values) == count_ * width_, "row_buffer", "elements to write", count_ * width_,
                values.size(), here);
        if (memory_) memory_->write(values_.data(), values, here);
    }
    template <class X>
        requires(!std::convertible_to<X const&, std::span<T const>>)
    detail::refused write(X const&) {
        static_assert(detail::never<X>,
                      "cpx: row_buffer::write wants a vector, array or span of the buffer's elements");
        return {};
    }
    /// Returns all elements, row after row.
    std::vector<T> read(caller here = caller::here()) const {
        return memory_ ? memory_->read(elements(), here) : std::vector<T>();
    }

private:
    template <class X>
    static void ends() {
        static_assert(detail::never<X>, "cpx: a row_buffer is viewed that ends with the expression; give it a name");
    }

    index_t count_ = 0, width_ = 0;
    std::optional<M> memory_; ///< none where there are no rows
    typename M::template block<T> values_;
};

row_buffer(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) -> row_buffer<detail::untold>;

} // namespace cpx

// cpx/layout/concept.hpp
// What a layout is: how many ranks, how many chunks, and who owns each chunk.

namespace cpx {

/// Cuts a run of tokens into `chunks()` chunks and gives chunk `c` to rank `owner(c)`, `0 <= owner(c) < ranks()`.
///
/// Everything else (rows, segments, routes, halos, carries, pictures) is derived from these three functions.
/// A rank holds its chunks in ascending order. Chunks may be empty.
template <class L>
concept layout = std::copyable<L> && requires(L const l, int chunk) {
    { l.ranks() } -> std::same_as<int>;
    { l.chunks() } -> std::same_as<int>;
    { l.owner(chunk) } -> std::same_as<int>;
};

/// A layout that also lists the chunks of a rank: `chunk(rank, i)` is its i-th, ascending, `0 <= i < chunks(rank)`.
///
/// No layout needs it. With it, what follows from a layout is found among the chunks of one rank, which may be few
/// however many ranks there are; without it, among all chunks. Law: it lists the chunks that `owner` gives the rank.
template <class L>
concept listed_layout = layout<L> && requires(L const l, int number) {
    { l.chunks(number) } -> std::same_as<int>;
    { l.chunk(number, number) } -> std::same_as<int>;
};

/// Chooses a layout from the length of the run that it cuts: `at(n)` is the layout of a run of `n` tokens.
///
/// For rules such as "zigzag where 2W divides the length, else sequential"; see `either`.
template <class R>
concept length_rule = std::copy_constructible<R> && requires(R const r, index_t n) {
    { r.ranks() } -> std::same_as<int>;
    { r.at(n) } -> layout;
};

/// What a sharding can be made of.
template <class P>
concept layout_policy = layout<P> || length_rule<P>;

/// A layout that is wholly known at compile time, so that routes between two of them are, too.
template <class L>
concept static_layout = layout<L> && std::is_empty_v<L> && std::default_initializable<L> &&
                        requires { typename std::integral_constant<int, L{}.ranks()>; };

/// Returns the layout with which `policy` cuts a run of `n` tokens.
template <layout_policy P>
CPX_HOST_DEVICE constexpr auto layout_at(P const& policy, [[maybe_unused]] index_t n) {
    if constexpr (layout<P>)
        return policy;
    else
        return policy.at(n);
}

/// The number of ranks of a policy or sharding if its type tells, else `dynamic`.
template <class P>
inline constexpr int static_ranks = [] {
    if constexpr (requires { P::static_ranks; })
        return P::static_ranks;
    else if constexpr (requires { // in this order: classes that hold something are not made
                           requires std::is_empty_v<P>;
                           typename std::integral_constant<int, P{}.ranks()>;
                       })
        return P{}.ranks();
    else
        return dynamic;
}();

namespace detail {

inline constexpr int most_chunks = std::numeric_limits<int>::max();

/// Returns `ranks`. Throws `cpx::error`, on the host, if there are none, or if `chunks` chunks for each of them are too
/// many to count.
CPX_HOST_DEVICE constexpr int ranks_with(int chunks, int ranks, char const* layout, caller here) {
    if (int const most = most_chunks / chunks; ranks > most || ranks < 1) {
#ifndef __CUDA_ARCH__
        // Not by require: of a constant, compilers would tell how the text is made.
        throw error(layout, "ranks", ranks < 1 ? "at least 1" : "at most " + std::to_string(most),
                    std::to_string(ranks), here);
#endif
    }
    return ranks;
}

} // namespace detail

} // namespace cpx

// cpx/layout/cut.hpp
// Where chunks begin.

namespace cpx {

/// Says where chunk `c` of `C` begins in a run of `n` tokens, and moves that place to where a sequence may be cut.
///
/// `begin(c, C, n)` ascends in `c` from 0; `snap(t, n)` ascends in `t` from 0 to at most `n`, the length of the
/// sequence that holds token `t`. Two steps, because a run may be the whole batch: the first looks at the run only, the
/// second at the sequence that is cut.
///
/// A cut may also tell `fills(C, n)`: that each of the C chunks of a sequence of `n` tokens surely holds one. Plans for
/// long sequences then follow from the layout, without a look at every chunk. And `chunk(t, C, n)`: which chunk holds
/// token `t` of a sequence, which is searched for else.
template <class C>
concept cut = std::copyable<C> && std::default_initializable<C> && requires(C const k, int c, index_t n) {
    { k.begin(c, c, n) } -> std::same_as<index_t>;
    { k.snap(n, n) } -> std::same_as<index_t>;
};

/// floor(n c / C): equal chunks when C divides n, otherwise chunks that differ by one token.
struct balanced {
    CPX_HOST_DEVICE constexpr index_t begin(int c, int chunks, index_t n) const { return n * c / chunks; }
    CPX_HOST_DEVICE constexpr index_t snap(index_t t, index_t) const { return t; }
    constexpr bool fills(int chunks, index_t n) const { return n >= chunks; }
    CPX_HOST_DEVICE constexpr int chunk(index_t t, int chunks, index_t n) const {
        return static_cast<int>(((t + 1) * chunks - 1) / n);
    }
    friend constexpr bool operator==(balanced, balanced) = default;
};

/// Balanced, then rounded to the nearest multiple of `Unit` tokens of the sequence, or to its end.
///
/// Cuts at multiples of the delta rule's chunk (64) make `carry::serial` bitwise equal to one rank.
/// Holds over the batch, too: there the multiple is counted from the start of the sequence that is cut.
/// `aligned<cpx::dynamic>{unit}` takes the unit at run time.
template <int Unit = 64>
struct aligned : private extent<Unit> {
    constexpr aligned() = default;
    CPX_HOST_DEVICE constexpr explicit aligned(int unit) : extent<Unit>(unit) {}

    CPX_HOST_DEVICE constexpr int unit() const { return this->get(); }
    CPX_HOST_DEVICE constexpr index_t begin(int c, int chunks, index_t n) const {
        return balanced{}.begin(c, chunks, n);
    }
    CPX_HOST_DEVICE constexpr index_t snap(index_t t, index_t n) const {
        index_t const nearest = (t + unit() / 2) / unit() * unit();
        return nearest < n ? nearest : n;
    }
    constexpr bool fills(int chunks, index_t n) const { return n / unit() >= chunks; }
    CPX_HOST_DEVICE constexpr int chunk(index_t t, int chunks, index_t n) const {
        index_t const snap_beyond = (t / unit() + 1) * unit() - unit() / 2; // the first places that do
        return balanced{}.chunk((snap_beyond < n ? snap_beyond : n) - 1, chunks, n);
    }
    friend constexpr bool operator==(aligned const&, aligned const&) = default;
};

/// Returns where place `at` of a whole batch is cut: there where `cut` would cut the sequence that holds it. `batch`
/// tells its offsets as `thd` does, or as what stands for one on a device.
CPX_CALLS_BACK
template <cut C, class Batch>
CPX_HOST_DEVICE constexpr index_t snap_in_batch(C const& cut, Batch const& batch, index_t at) {
    if constexpr (std::same_as<C, balanced>) return at; // which no sequence moves
    if (at >= batch.tokens()) return batch.tokens();
    auto const s = batch.sequence(at);
    return batch.offset(s) + cut.snap(at - batch.offset(s), batch.length(s));
}

namespace detail {

/// Whether the chunks of every run are known to ascend from its first row; a user's cut is asked.
template <class C>
inline constexpr bool ascends = false;
template <>
inline constexpr bool ascends<balanced> = true;
template <int Unit>
inline constexpr bool ascends<aligned<Unit>> = true;

/// Says what `balanced::begin` says, for one number of chunks C and runs of many lengths n, with a division a run.
///
/// n c / C is (n / C) c + r c / C with r = n mod C; r c < C^2, so that a reciprocal of 48 bits gives it where C < 2^16.
class balanced_begins {
public:
    CPX_HOST_DEVICE constexpr explicit balanced_begins(int chunks) : chunks_(chunks) {
        if (chunks < 1 << 16) reciprocal_ = (std::uint64_t{1} << 48) / static_cast<std::uint64_t>(chunks) + 1;
    }

    /// Returns what says where chunk c of a run of `n` begins.
    CPX_HOST_DEVICE constexpr auto of(index_t n) const {
        return [*this, n, whole = n / chunks_, rest = n % chunks_](int c) {
            if (reciprocal_ == 0) return n * c / chunks_;
            return whole * c + static_cast<index_t>(static_cast<std::uint64_t>(rest * c) * reciprocal_ >> 48);
        };
    }

private:
    index_t chunks_;
    std::uint64_t reciprocal_ = 0;
};

} // namespace detail

} // namespace cpx

// cpx/layout/algorithm.hpp
// What follows from a layout and a cut, for one run of n tokens: chunk, slot, token, rows.

namespace cpx {

/// Returns the chunk that holds token `t` of a run of `n`, `0 <= t < n`.
template <layout_policy P, cut C = balanced>
CPX_HOST_DEVICE constexpr int chunk_of(P const& policy, index_t t, index_t n, C const& cut = {}) {
    int const chunks = layout_at(policy, n).chunks();
    if constexpr (requires { cut.chunk(t, chunks, n); })
        return cut.chunk(t, chunks, n);
    else
        return last_at_or_before(t, chunks, balanced{}.chunk(t, chunks, n),
                                 [&](int c) { return cut.snap(cut.begin(c, chunks, n), n); });
}

/// Returns the tokens of chunk `c` in a run of `n`.
template <layout_policy P, cut C = balanced>
CPX_HOST_DEVICE constexpr range tokens_of(P const& policy, int c, index_t n, C const& cut = {}) {
    int const chunks = layout_at(policy, n).chunks();
    auto const begin = [&](int chunk) { return chunk == chunks ? n : cut.snap(cut.begin(chunk, chunks, n), n); };
    return {begin(c), begin(c + 1)};
}

/// Calls `f(chunk)` for the chunks of `rank`, ascending. Cost: O(chunks), of a `listed_layout` O(chunks of the rank).
CPX_CALLS_BACK
template <layout L, class F>
CPX_HOST_DEVICE constexpr void for_each_chunk(L const& l, int rank, F&& f) {
    if constexpr (listed_layout<L>) {
        for (int i = 0, count = l.chunks(rank); i < count; ++i) f(l.chunk(rank, i));
    } else {
        for (int c = 0, count = l.chunks(); c < count; ++c)
            if (l.owner(c) == rank) f(c);
    }
}

/// Returns where token `t` of a run of `n` lives. Law: `token(p, locate(p, t, n), n) == t`. Cost: as `for_each_chunk`.
template <layout_policy P, cut C = balanced>
CPX_HOST_DEVICE constexpr slot locate(P const& policy, index_t t, index_t n, C const& cut = {}) {
    auto const l = layout_at(policy, n);
    int const chunk = chunk_of(policy, t, n, cut);
    slot place{l.owner(chunk), t - tokens_of(policy, chunk, n, cut).first};
    for_each_chunk(l, place.rank, [&](int c) {
        if (c < chunk) place.row += tokens_of(policy, c, n, cut).size();
    });
    return place;
}

/// Returns how many of `n` tokens `rank` holds. Cost: as `for_each_chunk`.
template <layout_policy P, cut C = balanced>
CPX_HOST_DEVICE constexpr index_t rows_of(P const& policy, int rank, index_t n, C const& cut = {}) {
    index_t rows = 0;
    for_each_chunk(layout_at(policy, n), rank, [&](int c) { rows += tokens_of(policy, c, n, cut).size(); });
    return rows;
}

/// Returns the token that lives at `place` in a run of `n`, or -1 if that rank has no such row. Cost: as
/// `for_each_chunk`.
template <layout_policy P, cut C = balanced>
CPX_HOST_DEVICE constexpr index_t token(P const& policy, slot place, index_t n, C const& cut = {}) {
    index_t found = -1;
    for_each_chunk(layout_at(policy, n), place.rank, [&](int c) {
        if (found >= 0) return;
        range const tokens = tokens_of(policy, c, n, cut);
        if (place.row < tokens.size()) found = tokens.first + place.row;
        place.row -= tokens.size();
    });
    return found;
}

/// Returns whether every token of a run of `n` has exactly one slot and every slot exactly one token.
///
/// A constant expression, so that a layout can prove it where it is defined:
/// `static_assert(cpx::is_partition(my_layout{}, 64));`. Cost: O(n) times `for_each_chunk`.
template <layout_policy P, cut C = balanced>
CPX_HOST_DEVICE constexpr bool is_partition(P const& policy, index_t n, C const& cut = {}) {
    index_t rows = 0;
    for (int rank = 0; rank < policy.ranks(); ++rank) rows += rows_of(policy, rank, n, cut);
    for (index_t t = 0; t < n; ++t) {
        slot const place = locate(policy, t, n, cut);
        if (place.rank < 0 || place.rank >= policy.ranks() || token(policy, place, n, cut) != t) return false;
    }
    return rows == n;
}

} // namespace cpx

// cpx/layout/either.hpp
// One of two layouts, chosen for each run by its length.

namespace cpx {

/// One of two layouts over the same ranks; which one is a value.
template <layout A, layout B>
struct either {
    A first;
    B second;
    bool use_first = true;

    CPX_HOST_DEVICE constexpr int ranks() const { return use_first ? first.ranks() : second.ranks(); }
    CPX_HOST_DEVICE constexpr int chunks() const { return use_first ? first.chunks() : second.chunks(); }
    CPX_HOST_DEVICE constexpr int owner(int chunk) const {
        return use_first ? first.owner(chunk) : second.owner(chunk);
    }
    CPX_HOST_DEVICE constexpr int chunks(int rank) const
        requires listed_layout<A> && listed_layout<B>
    {
        return use_first ? first.chunks(rank) : second.chunks(rank);
    }
    CPX_HOST_DEVICE constexpr int chunk(int rank, int i) const
        requires listed_layout<A> && listed_layout<B>
    {
        return use_first ? first.chunk(rank, i) : second.chunk(rank, i);
    }
};

namespace detail {

template <class A, class B, class Rule>
inline constexpr bool chooses = layout<A> && layout<B> && std::predicate<Rule, index_t>;

} // namespace detail

/// `A` for the runs whose length the rule accepts, `B` for the others.
///
/// miles' rule, "zigzag where 2W divides the length, else sequential":
///
///     cpx::by_length rule{cpx::zigzag<4>{}, cpx::sequential<4>{}, [](cpx::index_t n) { return n % 8 == 0; }};
///
/// `Rule` must be copyable and give the same answer on every rank.
template <class A, class B, class Rule>
struct by_length {
    A first;
    B second;
    Rule rule;

    CPX_HOST_DEVICE constexpr int ranks() const { return first.ranks(); }
    CPX_HOST_DEVICE constexpr auto at(index_t n) const { return either<A, B>{first, second, rule(n)}; }

    /// Rules of a type that holds nothing are one rule; of others, shardings compare what they choose.
    friend constexpr bool operator==(by_length const& a, by_length const& b)
        requires std::equality_comparable<A> && std::equality_comparable<B> && std::is_empty_v<Rule>
    {
        return a.first == b.first && a.second == b.second;
    }
};

/// Says what is wanted, and is a layout, so that nothing more is said.
template <class A, class B, class Rule>
    requires(!detail::chooses<A, B, Rule>)
struct by_length<A, B, Rule> {
    static_assert(detail::never<by_length>,
                  "cpx: by_length{a, b, rule} wants two layouts, and which lengths are cut by the first: "
                  "[](cpx::index_t n) { return n % 8 == 0; }");
    template <class... X>
    constexpr by_length(X const&...) {}

    constexpr int ranks() const { return 1; }
    constexpr int chunks() const { return 1; }
    constexpr int owner(int) const { return 0; }
};

template <class A = detail::any, class B = detail::any, class Rule = detail::any>
by_length(A = {}, B = {}, Rule = {}) -> by_length<A, B, Rule>;

} // namespace cpx

// cpx/layout/sharding.hpp
// A layout, a scope and a cut bound to a batch: which rank holds which rows.

namespace cpx {

/// What a layout cuts: each sequence of the batch, or the whole batch as one run, regardless of boundaries.
enum class scope { sequence, batch };

/// The most ranks of a sharding: plans list what every rank sends to every other.
inline constexpr int most_ranks = 1 << 20;

/// A group of `heads` equal heads of `width` elements in the feature axis, e.g. q = {16, 128}.
struct section {
    index_t heads = 1;
    index_t width = 1;
    friend constexpr bool operator==(section, section) = default;
};

namespace detail {

inline void require_ranks(char const* where, char const* what, int ranks, caller here) {
    require(ranks > 0 && ranks <= most_ranks, where, what, ranks > 0 ? "at most 2^20" : "at least 1", ranks, here);
}

inline void require_rank(char const* where, int rank, int ranks, caller here) {
    if (rank < 0 || rank >= ranks) // the text is made only when it is needed
        throw error(where, "rank", "0 to " + std::to_string(ranks - 1), std::to_string(rank), here);
}
/// Throws `cpx::error` unless `rank` of `ranks` is the caller's own place, `own` of `all`.
inline void require_own(char const* where, char const* what, int rank, int ranks, int own, int all, caller here) {
    auto const text = [](int r, int of) { return std::to_string(r) + " of " + std::to_string(of); };
    if (rank != own || ranks != all) throw error(where, what, text(own, all), text(rank, ranks), here);
}

/// Returns the columns of all sections. Throws `cpx::error` that names the first that has no heads or no width, or too
/// many to count.
inline index_t columns_of(char const* where, std::span<section const> sections, caller here) {
    index_t columns = 0;
    for (std::size_t i = 0; i < sections.size(); ++i) {
        auto const name = [&](char const* what) { return what + (" of section " + std::to_string(i)); };
        auto const [heads, width] = sections[i];
        index_t const most_heads = std::numeric_limits<int>::max(); // their square has a size
        if (heads < 1 || heads > most_heads)
            throw error(where, name("heads"), "1 to " + std::to_string(most_heads), std::to_string(heads), here);
        index_t const most = (size_limit - 1 - columns) / heads;
        if (width < 1 || width > most)
            throw error(where, name("width"), "1 to " + std::to_string(most), std::to_string(width), here);
        columns += heads * width;
    }
    return columns;
}

[[noreturn]] inline void no_owner(int chunk, int ranks, int owner, caller here) {
    throw error("sharding", "owner of chunk " + std::to_string(chunk), "a rank from 0 to " + std::to_string(ranks - 1),
                std::to_string(owner), here);
}
[[noreturn]] inline void not_listed(int place, int rank, int last, int chunk, caller here) {
    throw error("sharding", "chunk " + std::to_string(place) + " in the layout's list of rank " + std::to_string(rank),
                "one of the rank's after " + std::to_string(last), std::to_string(chunk), here);
}

/// What a sharding deduces where no layout is given.
struct no_layout {
    int ranks() const { return 1; }
    int chunks() const { return 1; }
    int owner(int) const { return 0; }
};

// Stand for what callers pass; nvcc does not accept lambdas in a concept.
struct takes_range {
    void operator()(range) const {}
};
struct takes_holder {
    void operator()(int, range) const {}
};

} // namespace detail

/// How a tensor is spread over the ranks. Plans and operators ask these questions and no others:
///
/// - `for_each_piece(rank, f)` calls `f(range)` with the global rows that a rank holds, ascending: its local order.
/// - `for_each_holder(rows, run, f)` calls `f(rank, range)` for all ranks that hold rows of a range. If rows have one
///   holder, the ranges ascend and tile `rows`; if every rank holds every row, each rank is given all of `rows`. `run`
///   is a hint, where to look first, and is left at the run of the last row; begin with 0.
/// - `sections()`, `heads(rank, h)`: which of the `h` heads of a section a rank holds; no sections: whole rows.
template <class S>
concept any_sharding = std::copy_constructible<S> && requires(S const s, int rank, index_t& run) {
    { s.ranks() } -> std::same_as<int>;
    { s.batch() } -> std::same_as<thd const&>;
    { s.rows(rank) } -> std::same_as<index_t>;
    { s.sections() } -> std::convertible_to<std::span<section const>>;
    { s.heads(rank, run) } -> std::same_as<range>;
    { S::every_row } -> std::convertible_to<bool>;
    s.for_each_piece(rank, detail::takes_range{});
    s.for_each_holder(range{}, run, detail::takes_holder{});
};

/// Rows sharded by tokens: every row lives on one rank, whole.
///
/// Immutable; copies share the batch. `sharding(batch, zigzag<4>{})`, or with all three choices spelled,
/// `sharding<zigzag<4>, scope::batch, aligned<64>>(batch)`; see also `shard`.
template <class P, scope Scope = scope::sequence, class Cut = balanced>
class sharding {
public:
    using layout_type = P;
    using cut_type = Cut;
    static constexpr scope cuts = Scope;
    static constexpr bool every_row = false;
    static constexpr int static_ranks = cpx::static_ranks<P>;
    static_assert(!std::same_as<P, detail::no_layout>,
                  "cpx: sharding(batch, layout) wants a cpx::thd and a layout: sharding(batch, zigzag<4>{})");

    /// Throws `cpx::error` if the layout has no ranks or gives a chunk to a rank that does not exist, or if the cut
    /// does not ascend. Cost: O(chunks), of length rules and cuts of the user's O(runs * chunks).
    explicit sharding(thd batch, P policy = {}, Cut cut = {}, caller here = caller::here())
        : batch_(std::move(batch)), policy_(policy), cut_(cut) {
        detail::require_ranks("sharding", "ranks of the layout", policy_.ranks(), here);
        if constexpr (requires { policy_.second.ranks(); }) // of by_length: also where no run of this batch takes it
            require(policy_.second.ranks() == ranks(), "sharding", "ranks of the second layout of by_length", ranks(),
                    policy_.second.ranks(), here);
        if constexpr (requires { cut_.unit(); })
            require(cut_.unit() > 0, "sharding", "unit of the cut", "at least 1", cut_.unit(), here);
        if constexpr (layout<P>) check(policy_, here);
        if constexpr (!layout<P> || !detail::ascends<Cut>)
            for (index_t i = 0; i < runs(); ++i) {
                auto const l = layout_at(policy_, run(i).size());
                if constexpr (!layout<P>) check(l, here);
                if constexpr (!detail::ascends<Cut>) check_cut(run(i), l.chunks(), here);
            }
    }

    template <class X = detail::any>
    explicit sharding(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) : sharding(unfit<X>()) {}

    int ranks() const { return policy_.ranks(); }
    thd const& batch() const { return batch_; }
    P const& policy() const { return policy_; }
    Cut const& cut() const { return cut_; }
    std::span<section const> sections() const { return {}; }
    range heads(int, index_t heads) const { return {0, heads}; }

    /// Returns the runs that are cut: the sequences, or 1.
    index_t runs() const { return Scope == scope::sequence ? batch_.sequences() : 1; }
    /// Returns the global rows of run `i`.
    range run(index_t i) const {
        if constexpr (Scope == scope::sequence)
            return {batch_.offset(i), batch_.offset(i + 1)};
        else
            return {0, batch_.tokens()};
    }

    /// Returns whether each chunk of sequence `s` surely holds rows: then its holders follow from the layout alone.
    bool fills(index_t s) const
        requires(Scope == scope::sequence && layout<P> && requires(Cut const c) { c.fills(1, index_t{1}); })
    {
        return cut_.fills(policy_.chunks(), batch_.length(s));
    }

    /// Returns whether each rank holds rows, if a sequence that fills all chunks tells; nothing if there is none.
    /// Cost: O(sequences + chunks).
    std::vector<bool> holders() const
        requires requires(sharding const s, index_t i) { s.fills(i); }
    {
        std::vector<bool> holds;
        for (index_t s = 0; s < runs() && holds.empty(); ++s)
            if (fills(s)) holds.resize(static_cast<std::size_t>(ranks()));
        if (!holds.empty())
            for (int c = 0; c < policy_.chunks(); ++c) holds[static_cast<std::size_t>(policy_.owner(c))] = true;
        return holds;
    }

    /// Returns how many rows `rank` holds. Throws `cpx::error` if there is no such rank. Cost: O(runs * chunks of the
    /// rank).
    index_t rows(int rank, caller here = caller::here()) const {
        detail::require_rank("sharding::rows", rank, ranks(), here);
        index_t count = 0;
        if constexpr (layout<P> && Scope == scope::sequence && std::same_as<Cut, balanced>) { // no piece is asked for
            std::vector<int> owned;
            list_chunks(policy_, rank, owned);
            detail::balanced_begins const begins(policy_.chunks());
            for (index_t i = 0; i < runs(); ++i) {
                auto const begin = begins.of(batch_.length(i));
                for (int const c : owned) count += begin(c + 1) - begin(c);
            }
        } else {
            for_each_piece(rank, [&](range piece) { count += piece.size(); });
        }
        return count;
    }

    template <class F>
    void for_each_piece(int rank, F&& f) const {
        std::vector<int> owned;
        auto const cut_run = [&](range rows, int chunks, auto const& begins) {
            for (int const c : owned) {
                range const piece{begin(rows, c, chunks, begins), begin(rows, c + 1, chunks, begins)};
                if (!piece.empty()) f(piece);
            }
        };
        int chunks = 0;
        detail::balanced_begins begins(1);
        for (index_t i = 0; i < runs(); ++i) {
            index_t const length = run(i).size();
            if (!layout<P> || i == 0) {
                auto const l = layout_at(policy_, length);
                list_chunks(l, rank, owned);
                if (std::exchange(chunks, l.chunks()) != l.chunks()) begins = detail::balanced_begins(l.chunks());
            }
            if constexpr (detail::ascends<Cut>) // a reciprocal serves all runs of so many chunks
                cut_run(run(i), chunks, begins.of(length));
            else
                cut_run(run(i), chunks, begins_of(run(i), chunks));
        }
    }

    template <class F>
    void for_each_holder(range rows, index_t& i, F&& f) const {
        while (!rows.empty()) {
            while (run(i).first > rows.first) --i;
            while (run(i).last <= rows.first) ++i;
            range const whole = run(i);
            range const common = intersect(rows, whole);
            auto const l = layout_at(policy_, whole.size());
            int const chunks = l.chunks();
            auto const begins = [&](int k) { return begin(whole, k, chunks); };
            int const guess = static_cast<int>(((common.first - whole.first + 1) * chunks - 1) / whole.size());
            int c = last_at_or_before(common.first, chunks, guess, begins);
            for (index_t first = common.first; first < common.last; ++c) {
                index_t last = begins(c + 1);
                if (last <= first) { // there may be more empty chunks than others
                    c = last_at_or_before(first, chunks, c + 1, begins);
                    last = begins(c + 1);
                }
                last = std::min(last, common.last);
                f(l.owner(c), range{first, last});
                first = last;
            }
            rows.first = common.last;
        }
    }

    friend bool operator==(sharding const& a, sharding const& b) {
        if constexpr (std::equality_comparable<P> && std::equality_comparable<Cut>)
            return a.policy_ == b.policy_ && a.cut_ == b.cut_ && a.batch_ == b.batch_;
        else // by what they do: rules and layouts of the user's need not be comparable
            return a.ranks() == b.ranks() && a.batch_ == b.batch_ && a.same_pieces(b);
    }

private:
    template <class X>
    static sharding const& unfit() {
        static_assert(detail::never<X> || std::same_as<P, detail::no_layout>,
                      "cpx: sharding(batch, layout) wants a cpx::thd and a layout: sharding(batch, zigzag<4>{})");
        throw;
    }
    /// Lists the chunks of a rank in memory that is there, as rules choose other ones for each run.
    static void list_chunks(layout auto const& l, int rank, std::vector<int>& owned) {
        owned.clear();
        for_each_chunk(l, rank, [&](int c) { owned.push_back(c); });
    }

    /// Returns whether every rank holds the same rows. Cost: O(runs * chunks).
    bool same_pieces(sharding const& other) const {
        for (int rank = 0; rank < ranks(); ++rank) {
            std::vector<range> mine, theirs;
            for_each_piece(rank, [&](range piece) { mine.push_back(piece); });
            other.for_each_piece(rank, [&](range piece) { theirs.push_back(piece); });
            if (mine != theirs) return false;
        }
        return true;
    }

    template <layout L>
    void check(L const& l, caller here) const {
        require(l.chunks() > 0, "sharding", "chunks of the layout", "at least 1", l.chunks(), here);
        detail::product("sharding", "tokens times chunks", {batch_.tokens(), l.chunks()}, here);
        for (int c = 0; c < l.chunks(); ++c)
            if (l.owner(c) < 0 || l.owner(c) >= ranks()) // not l.ranks(): that of a length rule's layout may be wrong
                detail::no_owner(c, ranks(), l.owner(c), here);
        if constexpr (listed_layout<L>) check_list(l, here);
    }

    /// Throws unless the chunks that the layout lists are those that it gives away.
    void check_list(listed_layout auto const& l, caller here) const {
        int listed = 0;
        for (int rank = 0; rank < ranks(); ++rank)
            for (int i = 0, last = -1, count = l.chunks(rank); i < count; ++i, ++listed) {
                int const c = l.chunk(rank, i);
                if (c <= last || c >= l.chunks() || l.owner(c) != rank) detail::not_listed(i, rank, last, c, here);
                last = c;
            }
        require(listed == l.chunks(), "sharding", "chunks in the layout's lists", l.chunks(), listed, here);
    }

    void check_cut(range rows, int chunks, caller here) const {
        for (int c = 0; c < chunks; ++c) {
            range const chunk{begin(rows, c, chunks), begin(rows, c + 1, chunks)};
            if (chunk.size() < 0 || (c == 0 && chunk.first != rows.first))
                throw error("sharding", "cut, at chunk " + std::to_string(c) + " of " + std::to_string(chunks),
                            "chunks that ascend from the first row, " + std::to_string(rows.first),
                            std::to_string(chunk.first) + " to " + std::to_string(chunk.last), here);
        }
    }

    /// Returns what says where the cut begins a chunk of a run.
    auto begins_of(range rows, int chunks) const {
        return [this, rows, chunks](int c) { return cut_.begin(c, chunks, rows.size()); };
    }
    index_t begin(range rows, int c, int chunks) const { return begin(rows, c, chunks, begins_of(rows, chunks)); }
    template <class Begins>
    index_t begin(range rows, int c, int chunks, Begins const& begins) const {
        if (c == chunks) return rows.last;
        index_t const at = begins(c);
        if constexpr (Scope == scope::sequence)
            return rows.first + cut_.snap(at, rows.size());
        else
            return snap_in_batch(cut_, batch_, at);
    }

    thd batch_;
    [[no_unique_address]] P policy_;
    [[no_unique_address]] Cut cut_;
};

template <class P, scope Scope, class Cut>
    requires(!layout_policy<P> || !cut<Cut>)
class sharding<P, Scope, Cut> {
public:
    static_assert(detail::never<P>,
                  "cpx: sharding<P> is of a layout, such as zigzag<4>, and perhaps a scope and a cut; "
                  "shard(batch, zigzag<4>{}) needs none");
    template <class... X>
    sharding(X const&...) {}
};

template <class X = detail::any>
sharding(X const& = {}, detail::any = {}, detail::any = {}) -> sharding<detail::no_layout>;

/// Returns the sharding of `batch` by a policy: `shard(batch, zigzag<4>{})`, `shard<scope::batch>(batch, ...)`.
template <scope Scope = scope::sequence, layout_policy P, cut Cut = balanced>
sharding<P, Scope, Cut> shard(thd batch, P policy, Cut cut = {}, caller here = caller::here()) {
    return sharding<P, Scope, Cut>(std::move(batch), std::move(policy), cut, here);
}
template <auto = 0, class = void, class = void, class X = detail::any> // whatever is spelled: a number, a layout
detail::refused shard(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: shard(batch, layout) wants a cpx::thd and a layout, whose ranks(), chunks() and owner(chunk) "
                  "return int, or a rule that chooses layouts; shard<scope::batch>(batch, layout, cut)");
    return {};
}
template <layout_policy P, class X>
detail::refused shard(X const&, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: shard takes the layout as an argument: shard(batch, zigzag<4>{})");
    return {};
}
template <scope = scope::sequence, class P>
detail::refused shard(std::initializer_list<index_t>, P const&, detail::any = {}) {
    static_assert(detail::never<P>, "cpx: shard wants a cpx::thd of these offsets: shard(thd({0, 7, 20}), layout)");
    return {};
}

} // namespace cpx

// cpx/layout/head_sharded.hpp
// Shardings in which every rank holds every token: a share of the heads, or everything.

namespace cpx {

namespace detail {

/// What `head_sharded` and `replicated` have in common: all rows, in sequence order, on every rank.
template <int W>
class every_row_sharding {
public:
    static constexpr bool every_row = true;
    static constexpr int static_ranks = W;

    every_row_sharding(char const* where, extent<W> ranks, thd batch, caller here)
        : ranks_(ranks), batch_(std::move(batch)) {
        require_ranks(where, "ranks", ranks_.get(), here);
        product(where, "tokens times ranks", {batch_.tokens(), ranks_.get()}, here);
    }
    template <class X>
    static every_row_sharding const& unfit() {
        static_assert(never<X>, "cpx: replicated<W> wants a cpx::thd, and head_sharded<W> its sections, too; before "
                                "them the number of ranks if the type does not tell it; shard() takes neither");
        throw;
    }
    int ranks() const { return ranks_.get(); }
    thd const& batch() const { return batch_; }
    /// Throws `cpx::error` if there is no such rank.
    index_t rows(int rank, caller here = caller::here()) const {
        require_rank("sharding::rows", rank, ranks(), here);
        return batch_.tokens();
    }

    template <class F>
    void for_each_piece(int, F&& f) const {
        if (batch_.tokens() > 0) f(range{0, batch_.tokens()});
    }
    template <class F>
    void for_each_holder(range rows, index_t&, F&& f) const {
        for (int rank = 0; rank < ranks(); ++rank) f(rank, rows);
    }
    friend bool operator==(every_row_sharding const& a, every_row_sharding const& b) {
        return a.ranks() == b.ranks() && a.batch_ == b.batch_;
    }

private:
    [[no_unique_address]] extent<W> ranks_;
    thd batch_;
};

} // namespace detail

/// Every rank holds every token in sequence order and its share of the heads of each section (Ulysses).
///
/// Let G be the largest number of heads of a section; the others must divide it, as grouped heads do (q = 16, k = 2).
/// Rank r holds heads [floor(G r / W), floor(G (r+1) / W)) of the largest sections, and of the others the heads that go
/// with these. Shares may be uneven. A head that several ranks need, because of its group or because W > G, stands on
/// each of them.
///
/// A local row is the rank's share of section 0, then of section 1, and so on.
template <int W = dynamic>
class head_sharded : public detail::every_row_sharding<W> {
public:
    /// Throws `cpx::error` on sections that are empty, have no heads, no width, or do not divide the largest.
    head_sharded(thd batch, std::vector<section> sections, caller here = caller::here())
        requires(W != dynamic)
        : head_sharded(extent<W>{}, std::move(batch), std::move(sections), here) {}
    head_sharded(int ranks, thd batch, std::vector<section> sections, caller here = caller::here())
        requires(W == dynamic)
        : head_sharded(extent<W>(ranks), std::move(batch), std::move(sections), here) {}

    template <class X = detail::any>
        requires(!std::derived_from<X, head_sharded>)
    explicit head_sharded(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {})
        : detail::every_row_sharding<W>(head_sharded::template unfit<detail::whatever<X>>()) {}
    template <class X>
    head_sharded(std::initializer_list<section>, X const&, detail::any = {})
        : detail::every_row_sharding<W>(head_sharded::template unfit<detail::whatever<X>>()) {}

    std::span<section const> sections() const { return *sections_; }

    /// Returns the heads that `rank` holds of a section of `heads` heads.
    range heads(int rank, index_t heads) const {
        index_t const first = groups_ * rank / this->ranks();
        index_t const last = std::max(first + 1, groups_ * (rank + 1) / this->ranks());
        return {first * heads / groups_, (last * heads + groups_ - 1) / groups_};
    }

    friend bool operator==(head_sharded const& a, head_sharded const& b) {
        using base = detail::every_row_sharding<W>;
        return static_cast<base const&>(a) == static_cast<base const&>(b) && *a.sections_ == *b.sections_;
    }

private:
    head_sharded(extent<W> ranks, thd batch, std::vector<section> sections, caller here)
        : detail::every_row_sharding<W>("head_sharded", ranks, std::move(batch), here) {
        char const* const where = "head_sharded";
        require(!sections.empty(), where, "number of sections", "at least 1", 0, here);
        index_t const columns = detail::columns_of(where, sections, here);
        detail::product(where, "tokens x columns", {this->batch().tokens(), columns}, here);
        for (section const& s : sections) groups_ = std::max(groups_, s.heads);
        for (std::size_t i = 0; i < sections.size(); ++i)
            if (groups_ % sections[i].heads != 0)
                throw error(where, "heads of section " + std::to_string(i), "a divisor of " + std::to_string(groups_),
                            std::to_string(sections[i].heads), here);
        sections_ = std::make_shared<std::vector<section> const>(std::move(sections));
    }

    index_t groups_ = 1;
    std::shared_ptr<std::vector<section> const> sections_;
};

/// Every rank holds everything, in sequence order. As a target: an all-gather. Its transpose sums in rank order.
template <int W = dynamic>
class replicated : public detail::every_row_sharding<W> {
public:
    explicit replicated(thd batch, caller here = caller::here())
        requires(W != dynamic)
        : detail::every_row_sharding<W>("replicated", extent<W>{}, std::move(batch), here) {}
    replicated(int ranks, thd batch, caller here = caller::here())
        requires(W == dynamic)
        : detail::every_row_sharding<W>("replicated", extent<W>(ranks), std::move(batch), here) {}

    template <class X = detail::any>
        requires(!std::derived_from<X, replicated>)
    explicit replicated(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {})
        : detail::every_row_sharding<W>(replicated::template unfit<detail::whatever<X>>()) {}

    std::span<section const> sections() const { return {}; }
    range heads(int, index_t heads) const { return {0, heads}; }
};

/// As if one were made of nothing: of one that has been, made for `shard` in its call, no more is said.
template <auto = 0, class B, class P>
    requires std::derived_from<P, detail::every_row_sharding<P::static_ranks>>
detail::refused shard(B const&, P const&, detail::any = {}) {
    P::template unfit<detail::any>();
    return {};
}

} // namespace cpx

// cpx/layout/piecewise.hpp
// Rows given to ranks piece by piece: what no layout says, because it depends on what the rows are.

namespace cpx {

/// Global rows, and the rank that holds them.
struct owned_piece {
    range rows;
    int rank = 0;
    friend constexpr bool operator==(owned_piece, owned_piece) = default;
};

/// Every row lives on one rank, as a list of pieces says. Copies share the list.
///
/// `Of` says what the list follows, so that two such shardings of the same rows have two types.
template <class Of = void>
class piecewise {
public:
    static constexpr bool every_row = false;
    static constexpr int static_ranks = dynamic;

    /// Takes the pieces in the order of the batch. Empty ones are left out, neighbours of one rank joined.
    ///
    /// Throws `cpx::error` that names the first piece that does not begin where the one before it ends or whose rank is
    /// none, or if they do not end where the batch does.
    piecewise(int ranks, thd batch, std::vector<owned_piece> const& pieces, caller here = caller::here())
        : batch_(std::move(batch)) {
        char const* const where = "piecewise";
        detail::require_ranks(where, "ranks", ranks, here);
        lists made{{}, std::vector<std::vector<range>>(static_cast<std::size_t>(ranks))};
        index_t next = 0;
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            auto const& [rows, rank] = pieces[i];
            auto const name = [&](char const* what) { return what + (" of piece " + std::to_string(i)); };
            if (rows.first != next || rows.last < next)
                throw error(where, name("rows"), "some from " + std::to_string(next),
                            std::to_string(rows.first) + " to " + std::to_string(rows.last), here);
            if (rank < 0 || rank >= ranks)
                throw error(where, name("rank"), "0 to " + std::to_string(ranks - 1), std::to_string(rank), here);
            next = rows.last;
            if (rows.empty()) continue;
            auto& own = made.of_rank[static_cast<std::size_t>(rank)];
            if (!made.all.empty() && made.all.back().rank == rank) {
                made.all.back().rows.last = own.back().last = next;
            } else {
                made.all.push_back({rows, rank});
                own.push_back(rows);
            }
        }
        require(next == batch_.tokens(), where, "end of the last piece", batch_.tokens(), next, here);
        lists_ = std::make_shared<lists const>(std::move(made));
    }

    template <class X = void>
    explicit piecewise(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: piecewise(ranks, batch, pieces) wants the number of ranks, a cpx::thd "
                                        "and its pieces with their ranks; or by_counts(batch, rows of every rank)");
    }

    /// Returns the sharding in which rank r holds the next `counts[r]` rows.
    static piecewise by_counts(thd batch, std::vector<index_t> const& counts, caller here = caller::here()) {
        std::vector<owned_piece> pieces;
        index_t next = 0;
        for (std::size_t rank = 0; rank < counts.size(); next += counts[rank++])
            pieces.push_back({{next, next + counts[rank]}, static_cast<int>(rank)});
        return piecewise(static_cast<int>(counts.size()), std::move(batch), pieces, here);
    }

    int ranks() const { return static_cast<int>(lists_->of_rank.size()); }
    thd const& batch() const { return batch_; }
    std::span<section const> sections() const { return {}; }
    range heads(int, index_t heads) const { return {0, heads}; }
    /// Returns all pieces, in the order of the batch.
    std::vector<owned_piece> const& pieces() const { return lists_->all; }

    /// Returns how many rows `rank` holds. Throws `cpx::error` if there is no such rank.
    index_t rows(int rank, caller here = caller::here()) const {
        detail::require_rank("piecewise::rows", rank, ranks(), here);
        index_t count = 0;
        for (range const piece : lists_->of_rank[static_cast<std::size_t>(rank)]) count += piece.size();
        return count;
    }

    template <class F>
    void for_each_piece(int rank, F&& f) const {
        for (range const piece : lists_->of_rank[static_cast<std::size_t>(rank)]) f(piece);
    }
    template <class F>
    void for_each_holder(range rows, index_t& i, F&& f) const {
        auto const& all = lists_->all;
        if (rows.empty()) return;
        auto const begins = [&](int piece) { return all[static_cast<std::size_t>(piece)].rows.first; };
        i = last_at_or_before(rows.first, static_cast<int>(all.size()), static_cast<int>(i), begins);
        for (;; ++i) {
            auto const& [piece, rank] = all[static_cast<std::size_t>(i)];
            range const common = intersect(rows, piece);
            f(rank, common);
            if (common.last == rows.last) return;
        }
    }

    friend bool operator==(piecewise const& a, piecewise const& b) {
        return a.ranks() == b.ranks() && a.batch_ == b.batch_ && (a.lists_ == b.lists_ || a.pieces() == b.pieces());
    }

private:
    struct lists {
        std::vector<owned_piece> all;
        std::vector<std::vector<range>> of_rank;
    };
    thd batch_;
    std::shared_ptr<lists const> lists_;
};

} // namespace cpx

// cpx/layout/sequence_parallel.hpp
// Tensor parallelism beside context parallelism: a rank's rows cut once more, for the ranks that share its heads.

namespace cpx {

/// What gives rows to ranks of CP x TP, see `sequence_parallel`.
template <any_sharding S>
struct sequence_parallel_of {};

/// Returns the sharding over TP ranks for each of the given one's: rank tp + TP cp holds the tp-th of TP shares of the
/// rows of rank cp, in their order. Shares are equal where TP divides the rows, else they differ by one row.
///
/// As any other, so that one relayout leads from the rows of TP x CP ranks to those of another sharding over as many.
/// Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, arXiv 2205.05198,
/// whose sequence parallelism Megatron-LM has within the rows of a CP rank.
/// Throws `cpx::error` if TP is below 1 or there are too many ranks. Cost: O(P log P) for P pieces.
template <any_sharding S>
piecewise<sequence_parallel_of<S>> sequence_parallel(S const& sharding, int tp, caller here = caller::here()) {
    constexpr bool fits = !S::every_row;
    static_assert(fits, "cpx: sequence_parallel of a sharding by which every rank holds every row; give one by tokens");
    require(tp > 0 && tp <= most_ranks / sharding.ranks(), "sequence_parallel", "tp",
            "1 to " + std::to_string(most_ranks / sharding.ranks()), tp, here);
    detail::product("sequence_parallel", "rows times tp", {sharding.batch().tokens(), tp}, here);
    std::vector<owned_piece> pieces;
    for (int cp = 0; cp < sharding.ranks(); ++cp) {
        index_t const count = sharding.rows(cp);
        index_t row = 0; // of rank cp
        int share = 0;
        sharding.for_each_piece(cp, [&](range piece) {
            while (!piece.empty()) {
                while (row >= count * (share + 1) / tp) ++share;
                index_t const taken = std::min(piece.size(), count * (share + 1) / tp - row);
                pieces.push_back({{piece.first, piece.first + taken}, share + tp * cp});
                piece.first += taken;
                row += taken;
            }
        });
    }
    std::ranges::sort(pieces, {}, [](owned_piece const& p) { return p.rows.first; });
    return piecewise<sequence_parallel_of<S>>(tp * sharding.ranks(), sharding.batch(), pieces, here);
}
template <class X = detail::any>
detail::refused sequence_parallel(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: sequence_parallel(sharding, tp) wants a sharding, such as shard(batch, zigzag<4>{}) returns");
    return {};
}

} // namespace cpx

// cpx/layout/sequential.hpp
// Rank r owns the r-th of W chunks.

namespace cpx {

/// W chunks; rank r owns chunk r. Wanted by recurrences. Over the batch: flash-linear-attention's context parallelism.
template <int W = dynamic>
struct sequential : private extent<W> {
    constexpr sequential() = default;
    CPX_HOST_DEVICE constexpr explicit sequential(int ranks, caller here = caller::here())
        : extent<W>(detail::ranks_with(1, ranks, "sequential", here)) {}
    template <class X = void>
    constexpr explicit sequential(detail::any, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: sequential wants the number of its ranks alone: sequential<>(4); "
                                        "shard(batch, sequential<4>{}) shards");
    }

    CPX_HOST_DEVICE constexpr int ranks() const { return this->get(); }
    CPX_HOST_DEVICE constexpr int chunks() const { return ranks(); }
    CPX_HOST_DEVICE constexpr int owner(int chunk) const { return chunk; }
    CPX_HOST_DEVICE constexpr int chunks(int) const { return 1; }
    CPX_HOST_DEVICE constexpr int chunk(int rank, int) const { return rank; }
    friend constexpr bool operator==(sequential const&, sequential const&) = default;
};

} // namespace cpx

// cpx/layout/sharded.hpp
// Rows with their sharding, and the memory that they are in, in the type.

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

// cpx/layout/striped.hpp
// Chunks dealt to the ranks in turn.

namespace cpx {

/// `W * Stripes` chunks; rank r owns chunks r, r + W, r + 2W, ... as cards are dealt.
///
/// Source: Brandon et al., "Striped Attention", 2023, arXiv 2311.09431, with stripes of many tokens instead of one.
template <int W = dynamic, int Stripes = 4>
struct striped : private extent<W> {
    static_assert(Stripes > 0, "cpx: striped needs at least 1 stripe a rank");
    constexpr striped() = default;
    CPX_HOST_DEVICE constexpr explicit striped(int ranks, caller here = caller::here())
        : extent<W>(detail::ranks_with(Stripes, ranks, "striped", here)) {}
    template <class X = void>
    constexpr explicit striped(detail::any, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: striped wants the number of its ranks alone: striped<>(4); shard(batch, "
                                        "striped<4>{}) shards");
    }

    CPX_HOST_DEVICE constexpr int ranks() const { return this->get(); }
    CPX_HOST_DEVICE constexpr int chunks() const { return Stripes * ranks(); }
    CPX_HOST_DEVICE constexpr int owner(int chunk) const { return chunk % ranks(); }
    CPX_HOST_DEVICE constexpr int chunks(int) const { return Stripes; }
    CPX_HOST_DEVICE constexpr int chunk(int rank, int i) const { return rank + i * ranks(); }
    friend constexpr bool operator==(striped const&, striped const&) = default;
};

} // namespace cpx

// cpx/layout/table.hpp
// Owners chosen at run time, one for each chunk.

namespace cpx {

/// As many chunks as the table has entries; rank `owners[c]` owns chunk c. Copies share the table.
///
/// For dispatchers that balance load at run time, such as MagiAttention's (there: over the batch).
class table {
public:
    /// Throws `cpx::error` that names the first chunk whose owner is not a rank.
    table(int ranks, std::vector<int> owners, caller here = caller::here()) : ranks_(ranks) {
        require(ranks > 0, "table", "ranks", "at least 1", ranks, here);
        require(!owners.empty(), "table", "number of chunks", "at least 1", 0, here);
        for (std::size_t c = 0; c < owners.size(); ++c)
            if (owners[c] < 0 || owners[c] >= ranks)
                throw error("table", "owner of chunk " + std::to_string(c), "0 to " + std::to_string(ranks - 1),
                            std::to_string(owners[c]), here);
        owners_ = std::make_shared<std::vector<int> const>(std::move(owners));
    }

    /// Takes the owners of any other layout: every layout can be written as a table.
    template <class L>
        requires(!std::same_as<L, table>) &&
                layout<L> // last, because for a table it would ask for this class, which is not complete
    explicit table(L const& l, caller here = caller::here()) : table(l.ranks(), owners_of(l), here) {}

    template <class X = detail::any>
        requires(!std::same_as<X, table>) && (!layout<X>)
    explicit table(X const& = {}, detail::any = {}, detail::any = {}) {
        unfit<X>();
    }
    template <class X = void>
    explicit table(std::initializer_list<int>) {
        unfit<X>();
    }

    int ranks() const { return ranks_; }
    int chunks() const { return static_cast<int>(owners_->size()); }
    int owner(int chunk) const { return (*owners_)[static_cast<std::size_t>(chunk)]; }
    friend bool operator==(table const& a, table const& b) { return a.ranks_ == b.ranks_ && *a.owners_ == *b.owners_; }

private:
    template <class X>
    static void unfit() {
        static_assert(detail::never<X>, "cpx: table wants the number of ranks and the rank of every chunk: "
                                        "table(2, {0, 1, 1, 0}); or another layout");
    }
    template <layout L>
    static std::vector<int> owners_of(L const& l) {
        std::vector<int> owners;
        for (int c = 0; c < l.chunks(); ++c) owners.push_back(l.owner(c));
        return owners;
    }

    int ranks_;
    std::shared_ptr<std::vector<int> const> owners_;
};

} // namespace cpx

// cpx/layout/tensor.hpp
// One rank's rows of a sharded tensor, with their memory.

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

// cpx/layout/zigzag.hpp
// Rank r owns the r-th chunk from the front and the r-th chunk from the back.

namespace cpx {

/// 2W chunks; rank r owns chunks r and 2W-1-r, so that causal attention costs every rank the same.
///
/// Over sequences: Transformer Engine's THD partition and miles; over the batch: Megatron's dense rows.
template <int W = dynamic>
struct zigzag : private extent<W> {
    constexpr zigzag() = default;
    CPX_HOST_DEVICE constexpr explicit zigzag(int ranks, caller here = caller::here())
        : extent<W>(detail::ranks_with(2, ranks, "zigzag", here)) {}
    template <class X = void>
    constexpr explicit zigzag(detail::any, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: zigzag wants the number of its ranks alone: zigzag<>(4); shard(batch, "
                                        "zigzag<4>{}) shards");
    }

    CPX_HOST_DEVICE constexpr int ranks() const { return this->get(); }
    CPX_HOST_DEVICE constexpr int chunks() const { return 2 * ranks(); }
    CPX_HOST_DEVICE constexpr int owner(int chunk) const { return chunk < ranks() ? chunk : 2 * ranks() - 1 - chunk; }
    CPX_HOST_DEVICE constexpr int chunks(int) const { return 2; }
    CPX_HOST_DEVICE constexpr int chunk(int rank, int i) const { return i == 0 ? rank : 2 * ranks() - 1 - rank; }
    friend constexpr bool operator==(zigzag const&, zigzag const&) = default;
};

} // namespace cpx

// cpx/mesh/mesh.hpp
// Where a world rank stands under every parallelism of a training job.

namespace cpx {

/// Axes of a mesh, and sets of them: `axis::dp | axis::cp`.
///
/// Dense layers have tensor, context, data and pipeline parallelism (tp, cp, dp, pp); layers of experts have etp, ep,
/// edp and the same pp. cp is made of ulysses, its inner axis, and ring.
enum class axis : unsigned { tp = 1, ulysses = 2, ring = 4, cp = 6, dp = 8, pp = 16, etp = 32, ep = 64, edp = 128 };

constexpr axis operator|(axis a, axis b) { return axis{static_cast<unsigned>(a) | static_cast<unsigned>(b)}; }

/// Sizes of a mesh. dp and edp are what remains.
struct mesh_sizes {
    detail::by_name names{}; ///< none: sizes have names, `{8, 2}` is no mesh_sizes
    int world = 1;
    int tp = 1, cp = 1, pp = 1;
    int ep = 1, etp = 0; ///< of experts; etp 0: not given, see `etp_of`
    int ulysses = 1;     ///< inner axis of cp: neighbours
    int chunks = 1;      ///< of layers that a pipeline rank has: more than 1 is a virtual pipeline
    /// Neighbours first, Megatron's by default. Experts have etp where tp stands, edp where dp does, and no cp.
    std::array<axis, 5> order{axis::tp, axis::cp, axis::ep, axis::dp, axis::pp};
};

/// Returns over how many ranks the weights of one expert are divided. This is the rule for all that has a mesh: etp
/// where it is given; where it is not, tp, as in Megatron, but 1 in a true-on-policy job of a mixture of experts.
///
/// Such jobs leave experts whole (miles, pull request 1088: tp 2, pp 2, ep 2 is `_tp2_pp2_ep2_etp1`): their plan tells
/// Megatron so, and gives it to their mesh: `plan_on_policy`, `with_plan`.
constexpr int etp_of(mesh_sizes const& sizes, bool true_on_policy = false) {
    return sizes.etp != 0 ? sizes.etp : true_on_policy ? 1 : sizes.tp;
}

/// The ranks of a training job, arranged once for dense layers and once for experts.
///
/// Pure arithmetic, a constant where its sizes are: `constexpr mesh all({.world = 8, .cp = 2, .ep = 8, .etp = 1})`.
/// World ranks count from 0 as torchrun's and MPI's do; `rank` elsewhere in cpx is a coordinate here, on cp.
/// Members throw `cpx::error` for a rank outside the world, and for axes of dense layers and of experts in one set.
class mesh {
public:
    /// Throws `cpx::error` if sizes do not divide the world's, or if dense layers and experts would have other pipeline
    /// groups, which an order that ends with pp does not let happen.
    explicit constexpr mesh(mesh_sizes const& sizes, caller here = caller::here())
        : world_(sizes.world), chunks_(sizes.chunks) {
        int const etp = etp_of(sizes);
        for (auto const& [name, size] : std::array<std::pair<char const*, int>, 8>{{{"world", sizes.world},
                                                                                    {"tp", sizes.tp},
                                                                                    {"cp", sizes.cp},
                                                                                    {"pp", sizes.pp},
                                                                                    {"ep", sizes.ep},
                                                                                    {"etp", etp},
                                                                                    {"ulysses", sizes.ulysses},
                                                                                    {"chunks", sizes.chunks}}})
            if (size < 1) throw error("mesh", name, "at least 1", std::to_string(size), here);
        if (sizes.cp % sizes.ulysses != 0)
            throw error("mesh", "cp", "a multiple of ulysses = " + std::to_string(sizes.ulysses),
                        std::to_string(sizes.cp), here);
        int const dp = remaining("tp, cp, pp", {sizes.tp, sizes.cp, sizes.pp}, here),
                  edp = remaining("etp, ep, pp", {etp, sizes.ep, sizes.pp}, here);
        for (axis const each : {axis::tp, axis::cp, axis::ep, axis::dp, axis::pp})
            if (auto const times = std::ranges::count(sizes.order, each); times != 1)
                throw error("mesh", "order", "tp, cp, ep, dp and pp, each once",
                            names_of(each) + ' ' + std::to_string(times) + " times", here);
        for (axis const a : sizes.order) {
            if (a == axis::tp) add(dense_, a, sizes.tp), add(experts_, axis::etp, etp);
            if (a == axis::cp)
                add(dense_, axis::ulysses, sizes.ulysses), add(dense_, axis::ring, sizes.cp / sizes.ulysses);
            if (a == axis::ep) add(experts_, a, sizes.ep);
            if (a == axis::dp) add(dense_, a, dp), add(experts_, axis::edp, edp);
            if (a == axis::pp) add(dense_, a, sizes.pp), add(experts_, a, sizes.pp);
        }
        if (sizes.pp > 1 && dense_.of(axis::pp).stride != experts_.of(axis::pp).stride)
            throw error("mesh", "order",
                        "one that gives dense layers and experts the same pipeline groups, as with pp last",
                        "groups of ranks " + std::to_string(dense_.of(axis::pp).stride) + " and " +
                            std::to_string(experts_.of(axis::pp).stride) + " apart",
                        here);
    }

    template <class... X>
    constexpr mesh(X const&...) { // also of numbers in braces, which no mesh_sizes takes
        static_assert(detail::never<X...>, "cpx: mesh wants its sizes by name: mesh({.world = 8, .cp = 2})");
    }

    template <class X>
        requires(!std::convertible_to<X const&, caller>)
    constexpr mesh(mesh_sizes const&, X const&, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: mesh wants its sizes by name, and nothing else: "
                                        "mesh({.world = 8, .cp = 2})");
    }

    constexpr int world() const { return world_; }
    /// Returns how many ranks a group of these axes has.
    constexpr int size(axis set, caller here = caller::here()) const { return members("mesh::size", set, here); }

    /// Returns where a rank stands in its group of these axes, from 0: on the first axis of the order fastest.
    constexpr int coordinate(axis set, int world_rank, caller here = caller::here()) const {
        return number("mesh::coordinate", set, true, world_rank, here);
    }
    /// Returns the number of its group: what the communicators' `split` take. From 0, without gaps.
    constexpr int color(axis set, int world_rank, caller here = caller::here()) const {
        return number("mesh::color", set, false, world_rank, here);
    }
    /// Returns the world rank that stands at `coordinate` in group `color` of these axes.
    constexpr int world_rank(axis set, int color, int coordinate, caller here = caller::here()) const {
        char const* const where = "mesh::world_rank";
        int const count = members(where, set, here);
        require_below(where, "coordinate", coordinate, count, here);
        require_below(where, "color", color, world_ / count, here);
        return member(set, color, coordinate, here);
    }
    /// Returns the world ranks of the group of a rank, by their coordinates.
    std::vector<int> group(axis set, int world_rank, caller here = caller::here()) const {
        char const* const where = "mesh::group";
        std::vector<int> ranks(static_cast<std::size_t>(members(where, set, here)));
        int const own = number(where, set, false, world_rank, here);
        for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i] = member(set, own, static_cast<int>(i), here);
        return ranks;
    }

    /// Returns a color of those of a group that share a node with a rank: the lowest world rank of them. Ranks of a
    /// node are neighbours.
    constexpr int color_in_node(axis set, int world_rank, int ranks_per_node, caller here = caller::here()) const {
        return lowest_in_node("mesh::color_in_node", set, world_rank, ranks_per_node, here);
    }
    /// Returns whether all groups of these axes stay within nodes.
    constexpr bool within_nodes(axis set, int ranks_per_node, caller here = caller::here()) const {
        char const* const where = "mesh::within_nodes";
        for (int r = 0; r < world_; ++r)
            if (lowest_in_node(where, set, r, ranks_per_node, here) !=
                member(set, number(where, set, false, r, here), 0, here))
                return false;
        return true;
    }

    /// Returns the layers of a rank, of so many in all: those of one chunk of a virtual pipeline, which goes through
    /// all pipeline ranks before the next chunk begins. Throws unless every chunk of every rank has as many.
    constexpr range layers(index_t all, int world_rank, int chunk = 0, caller here = caller::here()) const {
        char const* const where = "mesh::layers";
        require_below(where, "chunk of layers", chunk, chunks_, here);
        index_t const pp = members(where, axis::pp, here), at = number(where, axis::pp, true, world_rank, here);
        return share(where, "layers", all, pp * chunks_, chunk * pp + at, "pipeline stages", here);
    }
    /// Returns the experts of a rank, of so many a layer. Throws unless ep divides them.
    constexpr range experts(index_t all, int world_rank, caller here = caller::here()) const {
        return share("mesh::experts", "experts", all, axis::ep, "ep", world_rank, here);
    }
    /// Returns which sequences of a step a rank loads: tp, cp and pp do not multiply them, their ranks load the same.
    /// Throws unless dp divides them.
    constexpr range sequences(index_t step, int world_rank, caller here = caller::here()) const {
        return share("mesh::sequences", "sequences of a step", step, axis::dp, "dp", world_rank, here);
    }
    /// Returns in how many micro-batches a rank takes its sequences of a step. Throws unless all are whole.
    constexpr index_t accumulation_steps(index_t step, index_t micro_batch, caller here = caller::here()) const {
        char const* const where = "mesh::accumulation_steps";
        index_t const own = share(where, "sequences of a step", step, axis::dp, "dp", 0, here).size();
        if (micro_batch < 1 || own % micro_batch != 0)
            throw error(where, "sequences of a micro-batch", "a divisor of a rank's " + std::to_string(own),
                        std::to_string(micro_batch), here);
        return own / micro_batch;
    }

private:
    /// World ranks that differ by one on an axis are `stride` apart.
    struct digit {
        axis of{};
        int size = 1, stride = 1;
    };
    /// Axes from the innermost on; those that are not used have one rank.
    struct grid {
        std::array<digit, 5> digits{};
        std::size_t count = 0;
        int ranks = 1;
        constexpr digit const& of(axis a) const {
            std::size_t i = 0;
            while (digits[i].of != a) ++i;
            return digits[i];
        }
    };

    static constexpr void add(grid& to, axis a, int size) {
        to.digits[to.count++] = {a, size, to.ranks};
        to.ranks *= size;
    }
    static constexpr bool has(axis set, axis one) {
        return (static_cast<unsigned>(set) & static_cast<unsigned>(one)) != 0;
    }
    static std::string names_of(axis set) {
        std::string text;
        for (auto const& [one, name] : std::array<std::pair<axis, char const*>, 7>{{{axis::tp, "tp"},
                                                                                    {axis::cp, "cp"},
                                                                                    {axis::dp, "dp"},
                                                                                    {axis::pp, "pp"},
                                                                                    {axis::etp, "etp"},
                                                                                    {axis::ep, "ep"},
                                                                                    {axis::edp, "edp"}}})
            if (has(set, one)) text += (text.empty() ? "" : ", ") + std::string(name);
        return text;
    }
    constexpr int remaining(char const* names, std::array<int, 3> const& sizes, caller here) const {
        index_t product = 1;
        for (int const size : sizes) product = product > world_ ? product : product * size;
        if (world_ % product != 0)
            throw error("mesh", "ranks of the world",
                        "a multiple of " + std::string(names) + " = " + std::to_string(sizes[0]) + " x " +
                            std::to_string(sizes[1]) + " x " + std::to_string(sizes[2]),
                        std::to_string(world_), here);
        return static_cast<int>(world_ / product);
    }
    constexpr grid const& grid_of(char const* where, axis set, caller here) const {
        bool const dense = has(set, axis::tp | axis::cp | axis::dp),
                   experts = has(set, axis::etp | axis::ep | axis::edp);
        if (dense && experts)
            throw error(where, "axes", "those of dense layers or those of experts", names_of(set), here);
        if (auto const unknown = static_cast<unsigned>(set) >> 8; unknown != 0)
            throw error(where, "axes", "tp, cp, dp, pp, etp, ep or edp", "bit " + std::to_string(unknown << 8), here);
        return experts ? experts_ : dense_;
    }
    /// Returns how many ranks a group has.
    constexpr int members(char const* where, axis set, caller here) const {
        int product = 1;
        for (digit const& d : grid_of(where, set, here).digits)
            if (has(set, d.of)) product *= d.size;
        return product;
    }
    /// Returns the coordinate in a group, `inside`, or the number of the group.
    constexpr int number(char const* where, axis set, bool inside, int world_rank, caller here) const {
        require_below(where, "world rank", world_rank, world_, here);
        int result = 0, weight = 1;
        for (digit const& d : grid_of(where, set, here).digits) {
            if (has(set, d.of) != inside) continue;
            result += world_rank / d.stride % d.size * weight;
            weight *= d.size;
        }
        return result;
    }
    /// Returns the world rank at a coordinate of a group that are checked.
    constexpr int member(axis set, int color, int coordinate, caller here) const {
        int rank = 0;
        for (digit const& d : grid_of("mesh", set, here).digits) {
            int& rest = has(set, d.of) ? coordinate : color;
            rank += rest % d.size * d.stride;
            rest /= d.size;
        }
        return rank;
    }
    constexpr int lowest_in_node(char const* where, axis set, int world_rank, int ranks_per_node, caller here) const {
        if (ranks_per_node < 1)
            throw error(where, "ranks of a node", "at least 1", std::to_string(ranks_per_node), here);
        int const own = number(where, set, false, world_rank, here), node = world_rank / ranks_per_node;
        int lowest = world_rank;
        for (int i = 0; i < members(where, set, here); ++i)
            if (int const other = member(set, own, i, here); other / ranks_per_node == node && other < lowest)
                lowest = other;
        return lowest;
    }
    static constexpr void require_below(char const* where, char const* what, int number, int count, caller here) {
        if (number < 0 || number >= count)
            throw error(where, what, "0 to " + std::to_string(count - 1), std::to_string(number), here);
    }
    /// Returns the share of so many things that one of `ranks` has; of an axis that the rank which stands there has.
    static constexpr range share(char const* where, char const* what, index_t all, index_t ranks, index_t rank,
                                 char const* of, caller here) {
        if (all < 0 || all % ranks != 0)
            throw error(where, what,
                        std::string(all < 0 ? "not negative, " : "") + "a multiple of " + of + " = " +
                            std::to_string(ranks),
                        std::to_string(all), here);
        return {rank * (all / ranks), (rank + 1) * (all / ranks)};
    }
    constexpr range share(char const* where, char const* what, index_t all, axis over, char const* name, int world_rank,
                          caller here) const {
        return share(where, what, all, members(where, over, here), number(where, over, true, world_rank, here), name,
                     here);
    }

    int world_ = 1, chunks_ = 1;
    grid dense_, experts_;
};

} // namespace cpx

// cpx/plan/global_rows.hpp
// Which rows of a batch a rank holds, and where the rows of a batch are: for loaders, and for what comes after.

namespace cpx {

/// Returns the global rows that a rank holds, as pieces in its local order: to copy them needs one call a piece.
///
/// Where every rank holds every row (`head_sharded`, `replicated`), all rows: of heads, each rank takes its columns.
/// Throws `cpx::error` if there is no such rank. Cost: O(pieces).
template <any_sharding S>
std::vector<range> pieces(S const& sharding, int rank, caller here = caller::here()) {
    detail::require_rank("pieces", rank, sharding.ranks(), here);
    std::vector<range> list;
    list.reserve(static_cast<std::size_t>(sharding.batch().sequences()));
    sharding.for_each_piece(rank, [&](range piece) { list.push_back(piece); });
    return list;
}
template <class X = detail::any>
detail::refused pieces(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: pieces(sharding, rank) wants a sharding, such as shard(batch, zigzag<4>{}) returns");
    return {};
}

/// Returns the global row of every local row of a rank: its rows of a batch that the loader has whole, as gathers and
/// scatters by index want them. Local row i is row `global_rows(sharding, rank)[i]` of the batch.
///
/// Of a padded tensor, row i is row `packing.rows()[global_rows(sharding, rank)[i]]`.
/// Throws as `pieces` does, and if there is not the memory. Cost: O(rows).
template <any_sharding S>
std::vector<index_t> global_rows(S const& sharding, int rank, caller here = caller::here()) {
    detail::require_rank("global_rows", rank, sharding.ranks(), here);
    auto list = detail::zeros<index_t>("global_rows", {sharding.rows(rank)}, here);
    auto next = list.begin();
    sharding.for_each_piece(rank, [&](range piece) {
        for (index_t row = piece.first; row < piece.last; ++row) *next++ = row;
    });
    return list;
}
template <class X = detail::any>
std::vector<index_t> global_rows(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: global_rows(sharding, rank) wants a sharding, such as shard(batch, zigzag<4>{}) returns");
    return {};
}

/// Returns the way back: for every global row the rank that holds it and its local row there. Where every rank holds
/// every row, the slot is that of rank 0, and the local row the same on all.
///
/// Throws `cpx::error` if there is not the memory. Cost: O(tokens + W runs).
template <any_sharding S>
std::vector<slot> slots(S const& sharding, caller here = caller::here()) {
    auto list = detail::zeros<slot>("slots", {sharding.batch().tokens()}, here);
    for (int rank = 0; rank < (S::every_row ? 1 : sharding.ranks()); ++rank) {
        index_t local = 0;
        sharding.for_each_piece(rank, [&](range piece) {
            for (index_t row = piece.first; row < piece.last; ++row)
                list[static_cast<std::size_t>(row)] = {rank, local++};
        });
    }
    return list;
}
template <class X, class... Rest>
    requires(!any_sharding<X> || sizeof...(Rest) > 0)
std::vector<slot> slots(X const&, Rest const&...) {
    static_assert(detail::never<X>, "cpx: slots(sharding) wants a sharding, such as shard(batch, zigzag<4>{}) returns, "
                                    "and no rank: it tells of all");
    return {};
}

} // namespace cpx

// cpx/plan/segments.hpp
// The maximal runs of consecutive tokens of one sequence among a rank's rows.

namespace cpx {

/// Tokens `token .. token + count` of `sequence`, in local rows `row .. row + count`.
struct segment {
    index_t sequence = 0;
    index_t token = 0;
    index_t row = 0;
    index_t count = 0;
    friend constexpr bool operator==(segment, segment) = default;
};

/// From where in its sequence a segment needs something: from before it, as in a forward, or from after it, as in its
/// backward.
enum class side { before, after };

constexpr side opposite(side where) { return where == side::before ? side::after : side::before; }

/// Returns the segments of `rank`, ascending; every row lies in exactly one. Throws `cpx::error` if there is no such
/// rank. Cost: O(pieces + sequences touched).
template <any_sharding S>
std::vector<segment> segments(S const& s, int rank, caller here = caller::here()) {
    detail::require_rank("segments", rank, s.ranks(), here);
    std::vector<segment> list;
    thd const& batch = s.batch();
    list.reserve(static_cast<std::size_t>(batch.sequences()));
    index_t row = 0, sequence = 0;
    s.for_each_piece(rank, [&](range piece) {
        while (!piece.empty()) {
            while (batch.offset(sequence + 1) <= piece.first) ++sequence;
            range const common = intersect(piece, {batch.offset(sequence), batch.offset(sequence + 1)});
            index_t const token = common.first - batch.offset(sequence);
            if (!list.empty() && list.back().sequence == sequence && list.back().token + list.back().count == token)
                list.back().count += common.size();
            else
                list.push_back({sequence, token, row, common.size()});
            row += common.size();
            piece.first = common.last;
        }
    });
    return list;
}
template <class X = detail::any>
std::vector<segment> segments(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: segments(sharding, rank) wants a sharding, such as shard(batch, zigzag<4>{}) "
                                    "returns, and a rank");
    return {};
}

/// Returns the local cu_seqlens of a rank: where its segments begin, and its number of rows at the end.
inline std::vector<index_t> offsets(std::vector<segment> const& segments) {
    std::vector<index_t> list{0};
    list.reserve(segments.size() + 1);
    for (segment const& s : segments) list.push_back(s.row + s.count);
    return list;
}
template <class X = detail::any>
std::vector<index_t> offsets(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: offsets(segments) wants segments(sharding, rank)");
    return {};
}

/// Returns the token of every row: its position in its sequence, as rotary embeddings want it.
inline std::vector<index_t> positions(std::vector<segment> const& segments, caller here = caller::here()) {
    index_t count = 0;
    for (segment const& s : segments) count += s.count;
    auto list = detail::zeros<index_t>("positions", {count}, here);
    auto next = list.begin();
    for (segment const& s : segments)
        for (index_t i = 0; i < s.count; ++i) *next++ = s.token + i;
    return list;
}
template <class X = detail::any>
std::vector<index_t> positions(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: positions wants segments: positions(segments(sharding, rank))");
    return {};
}

} // namespace cpx

// cpx/plan/chains.hpp
// The chain of a sequence: its segments in token order, and the ranks that hold them.

namespace cpx {

/// The place of one segment in the chain of its sequence's segments.
struct carry_link {
    index_t level = 0;    ///< how many segments come before it
    index_t length = 1;   ///< of the chain
    index_t holders = 0;  ///< where `carry_plan::holders` begins to list the chain's ranks
    index_t map_row = -1; ///< its row among the rank's segments that lie between two others, -1: it does not

    /// Returns how many segments of the chain lie on one side of it.
    index_t beside(side where) const { return where == side::before ? level : length - 1 - level; }
    friend constexpr bool operator==(carry_link, carry_link) = default;
};

namespace detail {

/// A chain as one rank sees it: how long it is, where its ranks are listed, and the levels that are the rank's own.
struct chain {
    index_t length = 0, holders = 0;
    std::vector<index_t> own;
};

/// Finds the chains of a batch. Chains of sequences with rows in every chunk are the layout's, found once; others are
/// walked along.
template <any_sharding S>
class chain_finder {
public:
    /// Adds to `holders`, which lives longer.
    chain_finder(S const& sharding, int rank, std::vector<int>& holders)
        : sharding_(sharding), rank_(rank), holders_(holders) {
        if constexpr (follows)
            for (index_t s = 0; s < sharding.batch().sequences() && whole_.length == 0; ++s)
                if (sharding.fills(s)) {
                    auto const& layout = sharding.policy();
                    for (int c = 0; c < layout.chunks(); ++c) add(whole_, layout.owner(c));
                    note_crossings(whole_);
                }
    }

    /// Returns the chain of `sequence`, of which the rank has segments or not, until the next call; or null if the rank
    /// has none and the chain is not longer than others.
    chain const* find(index_t sequence, bool has_segments) {
        range const tokens{sharding_.batch().offset(sequence), sharding_.batch().offset(sequence + 1)};
        if constexpr (follows)
            if (whole_.length > 0) {
                if (sharding_.fills(sequence)) return &whole_;
                if (!tokens.empty()) all_known_ = false;
                if (!has_segments) return nullptr; // to leave out chunks makes no chain longer
            }
        index_t const before = std::ssize(holders_);
        walked_.length = 0;
        walked_.own.clear();
        if (S::every_row && !tokens.empty()) add(walked_, rank_);
        if (!S::every_row && !tokens.empty())
            sharding_.for_each_holder(tokens, hint_, [&](int holder, range) { add(walked_, holder); });
        note_crossings(walked_);
        if (!has_segments) holders_.resize(static_cast<std::size_t>(before));
        return &walked_;
    }

    /// Returns the k of which no segment, of the chains found so far, has one of another rank 2^k further on, a bit
    /// each; none where some rank, though not all, would have to walk along a chain for that.
    std::uint64_t within() const { return all_known_ ? ~crossing_ : 0; }

private:
    static constexpr bool follows = requires(S const& s, index_t i) { s.fills(i); };

    /// Adds a piece of `holder`.
    void add(chain& c, int holder) {
        if (c.length == 0)
            c.holders = std::ssize(holders_);
        else if (holders_.back() == holder)
            return;
        if (holder == rank_) c.own.push_back(c.length);
        holders_.push_back(holder);
        ++c.length;
    }

    void note_crossings(chain const& c) {
        auto const holder = holders_.begin() + c.holders;
        for (index_t k = 0; index_t{1} << k < c.length; ++k) {
            index_t const reach = index_t{1} << k;
            if (crossing_ >> k & 1) continue;
            if (!std::equal(holder + reach, holder + c.length, holder)) crossing_ |= std::uint64_t{1} << k;
        }
    }

    S const& sharding_;
    int rank_;
    std::vector<int>& holders_;
    chain whole_, walked_;
    index_t hint_ = 0;
    std::uint64_t crossing_ = 0;
    bool all_known_ = true; ///< whether every rank has found every chain
};

} // namespace detail

} // namespace cpx

// cpx/plan/identity.hpp
// What ranks must agree on before they run a plan together.

namespace cpx {

namespace detail {

/// Lists the values that ranks have, and the ranks that have them: "8 (ranks 0 1 3), 10 (rank 2)".
inline std::string who_has_what(std::vector<std::string> const& values) {
    std::string text;
    for (std::size_t r = 0; r < values.size(); ++r) {
        if (std::find(values.begin(), values.begin() + static_cast<index_t>(r), values[r]) !=
            values.begin() + static_cast<index_t>(r))
            continue; // told already
        std::string who;
        for (std::size_t other = r; other < values.size(); ++other)
            if (values[other] == values[r]) who += ' ' + std::to_string(other);
        bool const several = who.find(' ', 1) != std::string::npos;
        text += (text.empty() ? "" : ", ") + values[r] + (several ? " (ranks" : " (rank") + who + ')';
    }
    return text;
}

} // namespace detail

/// A summary of a plan that is the same on every rank if, and in practice only if, the plans fit each other.
///
/// A fixed number of bytes, so that ranks can show it to one another without knowing anything yet.
struct identity {
    enum number : std::size_t {
        ranks,
        sequences,
        tokens,
        first_offset, ///< the second of cu_seqlens, and those after it, 0 behind the last
        last_offset = first_offset + 7,
        cu_seqlens, ///< all of them, and valid lengths
        source_hash,
        target_hash,
        first_argument, ///< of the operator that runs the plan, see `arguments`
        last_argument = first_argument + 7,
        source_width,
        target_width,
        parameter,
        element_bytes, ///< set when the plan is run
        agreement,     ///< 1: the plan is not run, ranks compare it
        numbers_count
    };
    static constexpr std::array<char const*, numbers_count> number_names{
        "ranks",
        "sequences",
        "tokens",
        "offset 1 of cu_seqlens",
        "offset 2 of cu_seqlens",
        "offset 3 of cu_seqlens",
        "offset 4 of cu_seqlens",
        "offset 5 of cu_seqlens",
        "offset 6 of cu_seqlens",
        "offset 7 of cu_seqlens",
        "offset 8 of cu_seqlens",
        "an offset of cu_seqlens after the eighth, or a valid length",
        "source sharding",
        "target sharding",
        "argument 1",
        "argument 2",
        "argument 3",
        "argument 4",
        "argument 5",
        "argument 6",
        "argument 7",
        "argument 8",
        "source width",
        "target width",
        "reach",
        "bytes of an element",
        "agreement"};

    /// What an operator is given that moves nowhere, and all ranks must have alike: numbers, words, or the bits of real
    /// numbers, in an order of its own; 0 where there is none.
    using arguments = std::array<std::uint64_t, last_argument - first_argument + 1>;
    /// Returns a word of at most eight letters as such a number.
    static constexpr std::uint64_t word(std::string_view text) {
        std::uint64_t letters = 0;
        for (std::size_t i = 0; i < text.size(); ++i)
            letters |= std::uint64_t{static_cast<unsigned char>(text[i])} << (8 * i);
        return letters;
    }

    std::array<char, 64> operation{};
    std::array<char, 80> source{}, target{}, source_settings{}, target_settings{};
    std::array<char, 64> element{}; ///< type of what is moved; set when the plan is run
    std::array<std::uint64_t, numbers_count> numbers{};

    friend bool operator==(identity const&, identity const&) = default;

    std::uint64_t& operator[](number n) { return numbers[n]; }

    /// Says of which batch the plan is.
    void set_batch(thd const& batch) {
        numbers[sequences] = static_cast<std::uint64_t>(batch.sequences());
        numbers[tokens] = static_cast<std::uint64_t>(batch.tokens());
        for (index_t s = 0; s <= static_cast<index_t>(last_offset - first_offset); ++s)
            numbers[first_offset + static_cast<std::size_t>(s)] =
                static_cast<std::uint64_t>(s < batch.sequences() ? batch.offset(s + 1) : 0);
        numbers[cu_seqlens] = batch.hash();
    }
    /// Leaves out of which batch and shardings the plan is: its rows are not tokens.
    void forget_batch() {
        std::fill(numbers.begin() + tokens, numbers.begin() + cu_seqlens + 1, 0);
        numbers[source_hash] = numbers[target_hash] = 0;
        source_settings = target_settings = {};
    }

    /// Returns the identity of the plan that moves everything back. Unless this plan is `one_to_one`, its operation
    /// makes no such plan from the shardings swapped: then the operation is called transposed.
    identity transposed(bool one_to_one) const {
        static constexpr std::string_view mark = " transposed";
        identity back = *this;
        std::string_view const name = operation.data();
        bool const marked = name.ends_with(mark);
        if (!one_to_one) {
            back.operation = {};
            set(back.operation, marked ? std::string(name.substr(0, name.size() - mark.size()))
                                       : std::string(name) + std::string(mark));
        }
        back.source = target; // a swap of arrays goes byte by byte
        back.target = source;
        back.source_settings = target_settings;
        back.target_settings = source_settings;
        std::swap(back[source_hash], back[target_hash]);
        std::swap(back[source_width], back[target_width]);
        return back;
    }

    /// Returns a 64-bit hash of everything: the plan's fingerprint. Settings are in it as the hashes of them.
    std::uint64_t fingerprint() const {
        std::uint64_t hash = 0;
        for (char const* const text : {operation.data(), source.data(), target.data(), element.data()})
            hash = detail::mix_all(hash, std::string_view(text));
        return detail::mix_all(hash, numbers);
    }

    /// Returns what ranks compare before they run the plan for elements T in rows of `width`, if it moves any.
    template <class T>
    identity for_elements(index_t width) const {
        identity id = *this;
        set(id.element, element_name<T>);
        id[element_bytes] = sizeof(T);
        if (numbers[target_width] == 0) id[source_width] = static_cast<std::uint64_t>(width);
        return id;
    }

    /// Returns whether a rank with this identity and one with `other` are in one exchange; ranks that compare their
    /// plans are, whatever these are.
    bool same_exchange(identity const& other) const {
        return (numbers[agreement] && other.numbers[agreement]) || *this == other;
    }

    /// Returns the number of the first field that differs from `other`, or -1.
    int first_difference(identity const& other) const {
        for (int field = 0; field < fields; ++field)
            if (value(field) != other.value(field)) return field;
        return -1;
    }

    static constexpr int texts = 4, fields = texts + static_cast<int>(numbers_count);
    /// Returns whether a field sums up the batch; who has the batch can say more of it.
    static constexpr bool of_batch(int field) {
        return field >= texts + static_cast<int>(sequences) && field <= texts + static_cast<int>(cu_seqlens);
    }
    /// Returns whether the value of a field ends in a hash; who has the sharding can say more of it.
    static bool cut_short(std::string_view value) { return value.find("hash ") != value.npos; }
    std::string name(int field) const {
        static constexpr std::array<char const*, texts> names{"operation", "source layout", "target layout",
                                                              "element type"};
        if (field < texts) return names[static_cast<std::size_t>(field)];
        return name_of(static_cast<number>(field - texts));
    }
    std::string value(int field) const {
        if (field < texts)
            return std::array{operation.data(), source.data(), target.data(),
                              element.data()}[static_cast<std::size_t>(field)];
        auto const n = static_cast<std::size_t>(field - texts);
        if (n == source_hash) return source_settings.data();
        if (n == target_hash) return target_settings.data();
        meaning const* const m = meaning_of(static_cast<number>(n));
        return text_of(numbers[n], m ? m->as : shown::number);
    }

    /// Returns "relayout zigzag<4> over sequence -> sequential<4> over sequence", after "agreement on " if it is one.
    std::string text() const {
        return std::string(numbers[agreement] ? "agreement on " : "") + operation.data() + (source[0] ? " " : "") +
               source.data() + (target[0] ? std::string(" -> ") + target.data() : "");
    }

    /// Says for which operator a plan is run: the operation is then "shift_rows: halo after".
    void run_by(char const* name) { set(operation, name + std::string(": ") + operation.data()); }
    /// Says what that operator is given.
    void set_arguments(arguments const& given) { std::ranges::copy(given, numbers.begin() + first_argument); }

    /// A text that is too long is cut, and ends in a hash of all of it.
    template <std::size_t N>
        requires(N > 9)
    static void set(std::array<char, N>& field, std::string_view text) {
        field = {}; // the last byte stays 0
        std::ranges::copy(text.substr(0, N - 1), field.begin());
        if (text.size() < N) return;
        std::uint64_t hash = detail::mix_all(0, text);
        for (std::size_t i = N - 9; i < N - 1; ++i, hash >>= 4) field[i] = "0123456789abcdef"[hash & 15];
    }

private:
    enum class shown { number, word, real };
    /// Different numbers are different texts, by which ranks compare.
    static std::string text_of(std::uint64_t letters, shown as) {
        if (as == shown::number || letters == 0) return std::to_string(letters);
        std::array<char, 32> text{};
        if (as == shown::real) std::snprintf(text.data(), text.size(), "%.17g", std::bit_cast<double>(letters));
        for (std::size_t i = 0; as == shown::word && i < 8; ++i) text[i] = static_cast<char>(letters >> (8 * i) & 255);
        return text.data();
    }
    /// What a number of an operation is; the parameter of a halo is its reach.
    struct meaning {
        std::string_view operation;
        identity::number of;
        char const* name;
        shown as = shown::number;
    };
    meaning const* meaning_of(number n) const {
        static constexpr auto argument = [](std::size_t i) { return static_cast<number>(first_argument + i); };
        static constexpr std::array meanings{
            meaning{"carry", argument(0), "heads of the state"},
            meaning{"carry", argument(1), "key width of the state"},
            meaning{"carry", argument(2), "value width of the state"},
            meaning{"carry", argument(3), "kind of map", shown::word},
            meaning{"carry", argument(4), "chunk"},
            meaning{"carry", argument(5), "scale", shown::real},
            meaning{"carry", argument(6), "norm of q and k", shown::word},
            meaning{"carry", argument(7), "initial states (in the backward dfinal)", shown::word},
            meaning{"carry", parameter, "elements of a map"},
            meaning{"halo", argument(0), "activation", shown::word},
            meaning{"halo", argument(1), "bias", shown::word},
            meaning{"halo", argument(2), "fill (hash)"},
            meaning{"expert_balance", parameter, "over"},
            meaning{"sum_over_ranks", parameter, "number of values"},
            meaning{"cached_attention", argument(0), "scale", shown::real},
            meaning{"cached_attention", source_width, "query heads"},
            meaning{"cached_attention", target_width, "key heads"},
            meaning{"cached_attention", parameter, "width of heads or tokens kept (hash)"},
            meaning{"media counts", parameter, "grids (hash)"},
            meaning{"gather", parameter, "bytes"},
            meaning{"broadcast", parameter, "bytes"}};
        std::string_view run = operation.data();
        run.remove_prefix(run.find(": ") == run.npos ? 0 : run.find(": ") + 2); // for whom
        auto const found =
            std::ranges::find_if(meanings, [&](meaning const& m) { return n == m.of && run.starts_with(m.operation); });
        return found == meanings.end() ? nullptr : &*found;
    }
    char const* name_of(number n) const {
        meaning const* const m = meaning_of(n);
        return m ? m->name : number_names[n];
    }
};

} // namespace cpx

// cpx/plan/identify.hpp
// Makes the identities of plans: what they say of shardings, in short and setting by setting.

namespace cpx {

namespace detail {

template <any_sharding S>
std::string const& sharding_name() {
    static std::string const name = [] {
        if constexpr (requires { typename S::layout_type; })
            return std::string(type_name<typename S::layout_type>()) +
                   (S::cuts == scope::sequence ? " over sequence, " : " over batch, ") +
                   std::string(type_name<typename S::cut_type>());
        else
            return std::string(type_name<S>());
    }();
    return name;
}

/// Is given the settings of a sharding one after the other: lists them, and says of the setting at `named` what it is.
struct setting_list {
    std::vector<index_t> numbers = {};
    index_t named = -1;
    std::string name = {};

    /// `what` has a # where each of the numbers belongs: "owner of chunk #".
    void operator()(index_t number, char const* what, std::initializer_list<index_t> of = {}) {
        if (std::ssize(numbers) == named) {
            name.clear();
            for (auto next = of.begin(); *what; ++what)
                name += *what == '#' ? std::to_string(*next++) : std::string(1, *what);
        }
        numbers.push_back(number);
    }
};

/// Lets `read` read all that types do not tell: run-time sizes, owners, cuts, sections.
template <any_sharding S, class Read>
void read_settings(S const& s, Read&& read) {
    read(s.ranks(), "ranks");
    for (index_t i = 0; section const& group : s.sections()) {
        read(group.heads, "heads of section #", {i});
        read(group.width, "width of section #", {i});
        ++i;
    }
    if constexpr (!requires { typename S::layout_type; }) { // other shardings are known by their rows
        for (int rank = 0; rank < s.ranks(); ++rank) {
            read(s.rows(rank), "rows of rank #", {rank});
            if constexpr (!S::every_row)
                s.for_each_piece(rank, [&, i = index_t{0}](range piece) mutable {
                    read(piece.first, "first row of piece # of rank #", {i++, rank});
                });
        }
    } else {
        constexpr bool one_layout = layout<typename S::layout_type>; // a length rule is known by its answers
        for (index_t i = 0; i < (one_layout ? 1 : s.runs()); ++i) {
            auto const l = layout_at(s.policy(), s.runs() > 0 ? s.run(i).size() : 0);
            read(l.chunks(), one_layout ? "chunks" : "chunks of run #", {i});
            for (int c = 0; c < l.chunks(); ++c)
                read(l.owner(c), one_layout ? "owner of chunk #" : "owner of chunk # of run #", {c, i});
        }
        if constexpr (requires { s.cut().unit(); } && ascends<typename S::cut_type>)
            read(s.cut().unit(), "unit");
        else if constexpr (!ascends<typename S::cut_type>) // a user's cut is known by its answers
            for (index_t t = 1; t < index_t{1} << 32; t *= 2)
                read(s.cut().snap(s.cut().begin(1, 3, 3 * t), 3 * t), "begin of chunk 1 of 3 in # tokens", {3 * t});
    }
}

/// Whether the numbers above follow from the type alone.
template <class S>
inline constexpr bool settled = false;
template <static_layout L, scope Scope, cut Cut>
inline constexpr bool settled<sharding<L, Scope, Cut>> = std::is_empty_v<Cut>;

/// Hashes the numbers above; those of a type once.
template <any_sharding S>
std::uint64_t sharding_hash(S const& s) {
    auto const all = [&] {
        std::uint64_t hash = 0;
        read_settings(s, [&](index_t number, char const*, std::initializer_list<index_t> = {}) {
            hash = mix(hash, static_cast<std::uint64_t>(number));
        });
        return hash;
    };
    if constexpr (settled<S>) {
        static std::uint64_t const hash = all();
        return hash;
    } else {
        return all();
    }
}

/// Tells in at most 79 characters what `hash` sums up: `text`, if that is `whole`, or its beginning and the hash.
inline std::string cut_settings(std::string text, bool whole, std::uint64_t hash) {
    if (whole && text.size() < 80) return text;
    if (text.size() > 40) text = text.substr(0, text.rfind(' ', 40)) + " ...";
    return text + (text.empty() ? "" : ", ") + "hash " + std::to_string(hash);
}

inline std::string section_settings(std::span<section const> sections) {
    std::string text;
    for (section const& group : sections)
        text += (text.empty() ? "" : ", ") + std::to_string(group.heads) + " heads of " + std::to_string(group.width);
    return text;
}

/// Tells the settings of a sharding, whose hash is the one above.
template <any_sharding S>
std::string sharding_settings(S const& s, std::uint64_t hash) {
    std::string text = section_settings(s.sections());
    if constexpr (requires { typename S::layout_type; }) {
        using L = typename S::layout_type;
        if constexpr (requires { s.cut().unit(); } && ascends<typename S::cut_type>)
            text += (text.empty() ? "unit " : ", unit ") + std::to_string(s.cut().unit());
        if constexpr (layout<L> && !std::is_empty_v<L>) { // an empty type has its owners in its name
            text += text.empty() ? "owners" : ", owners";
            for (int c = 0; c < s.policy().chunks() && text.size() < 80; ++c)
                text += ' ' + std::to_string(s.policy().owner(c));
        }
        return cut_settings(text, layout<L> && ascends<typename S::cut_type>, hash);
    } else {
        return cut_settings(text, S::every_row, hash); // its sections are all of a sharding by heads
    }
}

/// Where settings that an identity cuts short can be read. A plan is the same with it and without.
struct settings {
    struct source {
        virtual ~source() = default;
        virtual void read(setting_list& list) const = 0;
    };
    std::shared_ptr<source const> from = {};
    friend bool operator==(settings const&, settings const&) { return true; }
};

/// What an identity says of one sharding; `all`: its settings, but none if the text is all of them.
struct identity_end {
    std::string const& name;
    std::uint64_t hash;
    std::string text;
    settings all = {};
};
template <any_sharding S>
identity_end end_of(S const& s) {
    struct source final : settings::source {
        explicit source(S const& of) : sharding(of) {}
        void read(setting_list& list) const override { read_settings(sharding, list); }
        S sharding;
    };
    std::uint64_t const hash = sharding_hash(s);
    identity_end end{sharding_name<S>(), hash, sharding_settings(s, hash)};
    if (identity::cut_short(end.text)) end.all.from.reset(static_cast<settings::source const*>(new source(s)));
    return end;
}

/// Returns the identity of a plan of a batch from one sharding to another.
inline identity identify(std::string_view operation, identity_end const& from, identity_end const& to, int ranks,
                         thd const& batch, index_t parameter = 0) {
    identity id;
    identity::set(id.operation, operation);
    identity::set(id.source, from.name);
    identity::set(id.target, to.name);
    identity::set(id.source_settings, from.text);
    identity::set(id.target_settings, to.text);
    id[identity::ranks] = static_cast<std::uint64_t>(ranks);
    id[identity::source_hash] = from.hash;
    id[identity::target_hash] = to.hash;
    id[identity::parameter] = static_cast<std::uint64_t>(parameter);
    id.set_batch(batch);
    return id;
}
template <any_sharding A, any_sharding B>
identity identify(std::string_view operation, A const& from, B const& to, index_t parameter = 0) {
    return identify(operation, end_of(from), end_of(to), from.ranks(), from.batch(), parameter);
}

} // namespace detail

} // namespace cpx

// cpx/plan/run_list.hpp
// Runs of rows or columns, listed at once or when somebody asks for them.

namespace cpx {

/// `count` consecutive rows or columns of one rank's buffer.
struct run {
    index_t first = 0;
    index_t count = 0;
    friend constexpr bool operator==(run, run) = default;
};

inline index_t total(std::vector<run> const& runs) {
    index_t count = 0;
    for (run const r : runs) count += r.count;
    return count;
}

namespace detail {

/// Numbered lists of runs, each made when it is first asked for, by one thread or by several.
class late_runs {
public:
    /// `list(number)` makes a list, 0 <= number < count.
    late_runs(int count, std::function<std::vector<run>(int)> list)
        : list_(std::move(list)), made_(static_cast<std::size_t>(count)) {}
    late_runs(late_runs const&) = delete;
    ~late_runs() {
        for (auto const& runs : made_) delete runs.load();
    }

    std::vector<run> const& operator[](int number) const {
        auto& place = made_[static_cast<std::size_t>(number)];
        auto const* runs = place.load(std::memory_order_acquire);
        if (runs) return *runs;
        auto made = std::make_unique<std::vector<run> const>(list_(number));
        if (place.compare_exchange_strong(runs, made.get(), std::memory_order_acq_rel)) return *made.release();
        return *runs; // another thread was first
    }

private:
    std::function<std::vector<run>(int)> list_;
    mutable std::vector<std::atomic<std::vector<run> const*>> made_;
};

} // namespace detail

/// The runs of a message. Those that follow from a sharding alone, as between tokens and heads, are listed when
/// somebody first reads them, and shared by all copies and messages that have the same: a plan does not pay for them.
class run_list {
public:
    run_list() = default;
    run_list(std::vector<run> runs) : own_(std::move(runs)) {}
    run_list(std::initializer_list<run> runs) : own_(runs) {}
    run_list(std::shared_ptr<detail::late_runs const> late, int number) : late_(std::move(late)), number_(number) {}

    std::vector<run> const& all() const { return late_ ? (*late_)[number_] : own_; }
    operator std::vector<run> const&() const { return all(); }
    /// Returns runs that are this list's alone, to be changed.
    std::vector<run>& own() {
        if (late_) own_ = (*late_)[number_];
        late_ = nullptr;
        return own_;
    }

    run const* data() const { return all().data(); }
    std::size_t size() const { return all().size(); }
    bool empty() const { return all().empty(); }
    run const& operator[](std::size_t i) const { return all()[i]; }
    run const* begin() const { return data(); }
    run const* end() const { return data() + size(); }
    run* begin() { return own().data(); }
    run* end() { return begin() + own_.size(); }

    friend bool operator==(run_list const& a, run_list const& b) { return a.all() == b.all(); }

private:
    std::vector<run> own_;
    std::shared_ptr<detail::late_runs const> late_;
    int number_ = 0;
};

} // namespace cpx

// cpx/plan/plan.hpp
// Who sends which rows and columns to whom, for one rank.

namespace cpx {

/// One message: the rectangle of some rows and some columns, in row-major order.
///
/// Both ends list the same number of runs with the same counts, each with its own places. No columns: whole rows.
struct message {
    int peer = 0;
    run_list rows;
    std::vector<run> columns;
    friend bool operator==(message const&, message const&) = default;
};

/// What a plan does: moves every place of the source to one of the target; copies them to one or more; adds those that
/// go to the same place; or selects, because several places of the source, or of the target, are replicas of each
/// other.
enum class flow { moves, copies, sums, selects };

/// All that one rank sends and receives in one exchange: at most one message a peer.
///
/// A message to itself stands for the rows that stay; they are copied once, never sent. Messages ascend by peer.
/// Widths are elements a row; 0 means that the plan moves whole rows of any width.
/// Made by `relayout`, `halo`, `carry`, or `transposed` from another plan.
struct plan {
    int rank = 0;
    index_t source_rows = 0, target_rows = 0;
    index_t source_width = 0, target_width = 0;
    std::vector<message> sends, receives;
    flow kind = flow::moves;
    identity id;
    bool local = false; ///< no rank sends anything, whatever the batch: ranks need not agree
    // What the identity sums up, so that ranks that disagree find the first number that differs.
    thd batch;
    detail::settings source_settings, target_settings;

    int ranks() const { return static_cast<int>(id.numbers[identity::ranks]); }
    /// Returns a 64-bit summary that is equal on all ranks whose plans fit each other.
    std::uint64_t fingerprint() const { return id.fingerprint(); }

    /// Returns the messages to other ranks.
    index_t messages() const {
        index_t count = 0;
        for (message const& m : sends) count += m.peer != rank;
        return count;
    }
    /// Returns the rows of which all or some columns leave this rank.
    index_t sent_rows() const {
        index_t count = 0;
        for (message const& m : sends) count += m.peer != rank ? total(m.rows) : 0;
        return count;
    }
    /// Returns the elements that leave this rank; `width` is the elements a row if the plan moves whole rows.
    index_t sent_elements(index_t width, caller here = caller::here()) const {
        index_t whole_rows = 0, elements = 0;
        for (message const& m : sends)
            if (m.peer != rank)
                (m.columns.empty() ? whole_rows : elements) += total(m.rows) * std::max<index_t>(1, total(m.columns));
        return elements + detail::product("sent_elements", "elements", {whole_rows, width}, here);
    }
    /// Returns whether every place of the target receives something; if not, an exchange fills it with zeros first.
    bool covers_target() const { return covers(receives, target_rows, target_width); }
    /// Returns whether every place of the source goes to one of a target, so that what comes back covers the source.
    bool covers_source() const { return kind != flow::copies && covers(sends, source_rows, source_width); }

    /// Returns the plan that moves everything back: the backward of this one.
    ///
    /// Where this plan copies a place of the source to several ranks, the transposed plan adds what they hold in rank
    /// order, so that the sum has the same bits whatever the timing.
    plan transposed() const {
        flow const back = kind == flow::copies ? flow::sums : kind == flow::sums ? flow::copies : kind;
        return {.rank = rank,
                .source_rows = target_rows,
                .target_rows = source_rows,
                .source_width = target_width,
                .target_width = source_width,
                .sends = receives,
                .receives = sends,
                .kind = back,
                .id = id.transposed(kind == flow::moves),
                .local = local,
                .batch = batch,
                .source_settings = target_settings,
                .target_settings = source_settings};
    }

    friend bool operator==(plan const&, plan const&) = default;

private:
    static bool covers(std::vector<message> const& messages, index_t rows, index_t width) {
        index_t const whole = width ? width : 1;
        index_t cells = 0;
        for (message const& m : messages) cells += total(m.rows) * (m.columns.empty() ? whole : total(m.columns));
        return cells == rows * whole;
    }
};

} // namespace cpx

// cpx/plan/carry.hpp
// The plans by which recurrent states are handed along the segments of a sequence.

namespace cpx {

/// How states reach the segments of a sequence that is cut; a type, so that it shows which results are exact.
///
/// `serial` hands the state itself from segment to segment: the operations of one rank in the order of one rank, one
/// exchange a level. With cuts at multiples of the operator's chunk its results are bitwise those of one rank.
struct serial {};

/// `scan` folds every segment into its step S -> M S + E and joins the steps of neighbours, of twice as many segments
/// with every exchange. Equal to one rank within rounding, in an order that sharding and heads decide.
struct scan {};

template <class How>
concept carry_kind = std::same_as<How, serial> || std::same_as<How, scan>;

/// Returns whether an operator that works in chunks of `chunk` tokens gives bitwise the results of one rank. It does on
/// one rank, where every rank holds every row, and with `serial` if sequences are cut at multiples of the chunk only.
/// With `scan` on several ranks it does not.
template <carry_kind How, any_sharding S>
constexpr bool is_exact(S const& sharding, index_t chunk) {
    if constexpr (S::every_row)
        return true;
    else if constexpr (std::same_as<How, serial> && requires { sharding.cut().unit(); })
        return sharding.ranks() == 1 || sharding.cut().unit() % chunk == 0;
    else
        return sharding.ranks() == 1;
}

namespace detail {

/// What one rank sends, or receives, in an exchange of states: rows of a buffer, added in the order of its segments, on
/// which both ends of a message agree.
class state_rows {
public:
    void add(int peer, index_t count) {
        if (count > 0) runs_.push_back({peer, {rows_, count}});
        rows_ += count;
    }
    void skip(index_t count) { rows_ += count; }
    index_t rows() const { return rows_; }

    std::vector<message> messages() {
        auto const peer_of = &std::pair<int, run>::first;
        if (!std::ranges::is_sorted(runs_, {}, peer_of)) std::ranges::stable_sort(runs_, {}, peer_of);
        std::vector<message> list;
        for (auto const& [peer, rows] : runs_) {
            if (list.empty() || list.back().peer != peer) list.push_back({peer, {}, {}});
            list.back().rows.own().push_back(rows);
        }
        return list;
    }

private:
    std::vector<std::pair<int, run>> runs_;
    index_t rows_ = 0;
};

} // namespace detail

/// What a recurrent operator needs to know of a sharding: a rank's segments, their places in their sequences' chains,
/// and how many exchanges there are.
struct carry_steps {
    int rank = 0;
    thd batch;
    bool every_row = false; ///< as the sharding says
    std::vector<segment> segments = {};
    std::vector<carry_link> links = {}; ///< one a segment
    std::vector<int> holders = {};      ///< the ranks of the chains, see `carry_link::holders`
    index_t steps = 0;                  ///< exchanges, the same on all ranks
    identity id = {};
    detail::settings settings = {}; ///< of the sharding

    /// Returns the rank that holds what lies `onward` levels after segment `i`.
    int holder(index_t i, index_t onward) const {
        carry_link const& l = links[static_cast<std::size_t>(i)];
        return holders[static_cast<std::size_t>(l.holders + l.level + onward)];
    }
    /// Returns the plan of one exchange; `from`: whether states come from the segments before or after.
    plan between(detail::state_rows& source, detail::state_rows& target, side from) const {
        return {.rank = rank,
                .source_rows = source.rows(),
                .target_rows = target.rows(),
                .sends = source.messages(),
                .receives = target.messages(),
                .kind = flow::copies,
                .id = from == side::before ? id : id.transposed(false),
                .local = every_row,
                .batch = batch,
                .source_settings = settings,
                .target_settings = settings};
    }
};

/// The exchanges by which states are handed along chains, see `serial` and `scan`.
template <carry_kind How>
struct carry_exchanges;

template <>
struct carry_exchanges<serial> : carry_steps {
    std::vector<index_t> by_level = {}, level_begin = {};

    /// Returns the segments of level `l`, 0 to `steps`, ascending.
    std::span<index_t const> level(index_t l) const {
        auto const begin = level_begin.begin() + l;
        return {by_level.begin() + begin[0], by_level.begin() + begin[1]};
    }

    /// Returns the plan of the exchange between levels `l` and `l + 1`: from the former to the latter, or back. Rows
    /// are states, one a segment of `level(l)` and of `level(l + 1)`.
    plan step(index_t l, side from) const {
        detail::state_rows lower, upper;
        for (index_t const i : level(l))
            if (links[static_cast<std::size_t>(i)].beside(side::after) > 0)
                lower.add(holder(i, 1), 1);
            else
                lower.skip(1);
        for (index_t const i : level(l + 1)) upper.add(holder(i, -1), 1);
        return from == side::before ? between(lower, upper, from) : between(upper, lower, from);
    }
};

template <>
struct carry_exchanges<scan> : carry_steps {
    /// The exchanges of which every rank knows that they move nothing between ranks, a bit each: two segments of a rank
    /// that lie around all others', say, as `zigzag<2>` has them.
    std::uint64_t within = 0;

    /// Returns the plan of exchange `k`: every segment that has one 2^k further on gives it the step that the last 2^k
    /// segments, itself included, make together.
    ///
    /// A step is E, then M, which is left out where no segment comes before those joined. Source: the steps that
    /// segments give; target: those that segments get, both in the order of the segments. Rows are of `row_width`.
    plan step(index_t k, side from, index_t state_width, index_t map_width) const {
        index_t const reach = index_t{1} << k, onward = from == side::before ? reach : -reach;
        index_t const width = row_width(state_width, map_width);
        detail::state_rows given, got;
        for (index_t i = 0; i < std::ssize(links); ++i) {
            carry_link const& l = links[static_cast<std::size_t>(i)];
            index_t const passed = l.beside(from);
            auto const rows = [&](bool has_map) { return (state_width + (has_map ? map_width : 0)) / width; };
            if (l.beside(opposite(from)) >= reach) given.add(holder(i, onward), rows(passed >= reach));
            if (passed >= reach) got.add(holder(i, -onward), rows(passed >= 2 * reach));
        }
        plan p = between(given, got, from);
        p.id[identity::target_width] = static_cast<std::uint64_t>(state_width);
        p.id[identity::parameter] = static_cast<std::uint64_t>(map_width);
        return p;
    }

    /// Returns the elements of a row that fit a state and a map, of `state_width` and `map_width` elements.
    static index_t row_width(index_t state_width, index_t map_width) {
        return std::max<index_t>(1, std::gcd(state_width, map_width));
    }
};

/// The exchanges for tensors that are sharded as `S` says.
template <class How, class S>
struct carry_plan : carry_exchanges<How> {
    S sharding;
};
template <class How, class S>
    requires(!carry_kind<How> || !any_sharding<S>)
struct carry_plan<How, S> {
    static_assert(detail::never<How>,
                  "cpx: a carry_plan is what carry<scan>(sharding, rank), or carry<serial>, returns");
    template <class... X>
    carry_plan(X const&...) {}
};
template <class X = detail::any>
carry_plan(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) -> carry_plan<detail::any, detail::any>;

/// Returns the plan by which `rank` hands recurrent states on: `carry<scan>(sharding, rank)`. Pure: no communication.
///
/// Works in place on any sharding: a rank may hold several segments of a sequence (zigzag: two). Cost: O(segments of
/// the rank) where sequences are cut one by one and fill all chunks of a layout, whatever the number of ranks; else
/// O(pieces of all ranks), because all must know how many exchanges there are.
///
/// Throws `cpx::error` if `rank` is not one of the sharding's.
template <carry_kind How, any_sharding S>
carry_plan<How, S> carry(S const& sharding, int rank, caller here = caller::here()) {
    detail::require_rank("carry", rank, sharding.ranks(), here);
    carry_plan<How, S> c{{}, sharding};
    c.rank = rank;
    c.batch = sharding.batch();
    c.every_row = S::every_row;
    c.segments = segments(sharding, rank, here);
    c.links.reserve(c.segments.size());
    detail::chain_finder<S> chains(sharding, rank, c.holders);
    index_t longest = 1, maps = 0;
    for (index_t s = 0; s < sharding.batch().sequences(); ++s) {
        bool const own = c.links.size() < c.segments.size() && c.segments[c.links.size()].sequence == s;
        detail::chain const* const chain = chains.find(s, own);
        if (!chain) continue;
        longest = std::max(longest, chain->length);
        for (index_t const level : chain->own) {
            bool const inner = level > 0 && level + 1 < chain->length;
            c.links.push_back({level, chain->length, chain->holders, inner ? maps++ : -1});
        }
    }
    require(c.links.size() == c.segments.size(), "carry", "segments of the rank, each token on one rank",
            c.segments.size(), c.links.size(), here);
    auto const end = detail::end_of(sharding);
    c.id = detail::identify(std::same_as<How, scan> ? "carry, scan" : "carry", end, end, sharding.ranks(),
                            sharding.batch());
    c.settings = end.all;
    if constexpr (std::same_as<How, scan>) {
        c.within = chains.within();
        c.steps = static_cast<index_t>(std::bit_width(static_cast<std::size_t>(longest - 1)));
    } else {
        c.steps = longest - 1;
        c.level_begin.resize(static_cast<std::size_t>(longest) + 1); // a counting sort
        auto const begin = c.level_begin.begin();
        for (carry_link const& l : c.links) ++begin[l.level + 1];
        std::partial_sum(begin, c.level_begin.end(), begin);
        auto next = c.level_begin;
        c.by_level.resize(c.links.size());
        for (index_t i = 0; i < std::ssize(c.links); ++i) {
            index_t& place = next[static_cast<std::size_t>(c.links[static_cast<std::size_t>(i)].level)];
            c.by_level[static_cast<std::size_t>(place++)] = i;
        }
    }
    return c;
}
template <class = void, class X>
detail::refused carry(X const&, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: carry<scan>(sharding, rank), or carry<serial>, wants a sharding, such as "
                                    "shard(batch, zigzag<4>{}) returns, and this rank");
    return {};
}

} // namespace cpx

// cpx/plan/message_list.hpp
// Collects the messages of one rank, in the order on which both ends agree.

namespace cpx::detail {

/// The rows of a message, added in ascending global order.
///
/// Rows that follow one another in the batch become one run, and only those: that rule looks at global rows alone, so
/// both ends of a message make the same runs.
struct joined_rows {
    std::vector<run> runs;
    index_t end = 0; ///< one past the last global row

    /// Adds the global rows `rows`, which begin at local row `first`.
    void add(index_t first, range rows) {
        if (end == rows.first && !runs.empty())
            runs.back().count += rows.size();
        else
            runs.push_back({first, rows.size()});
        end = rows.last;
    }
};

/// The sends, or the receives, of one rank while its plan is made.
class message_list {
public:
    /// `runs`: for how many of a message memory is taken at once.
    explicit message_list(int ranks, std::size_t runs = 0) : entries_(static_cast<std::size_t>(ranks)), runs_(runs) {}

    /// Adds rows to the message to or from `peer`.
    void add(int peer, index_t first, range rows) {
        joined_rows& to = entries_[static_cast<std::size_t>(peer)];
        if (to.runs.empty()) to.runs.reserve(runs_);
        to.add(first, rows);
    }

    /// Returns one past the last global row added for `peer`.
    index_t end(int peer) const { return entries_[static_cast<std::size_t>(peer)].end; }

    /// Returns the messages that are not empty, of whole rows.
    std::vector<message> finish() {
        std::vector<message> messages;
        for (std::size_t peer = 0; peer < entries_.size(); ++peer)
            if (!entries_[peer].runs.empty())
                messages.push_back({static_cast<int>(peer), std::move(entries_[peer].runs), {}});
        return messages;
    }

private:
    std::vector<joined_rows> entries_;
    std::size_t runs_;
};

} // namespace cpx::detail

// cpx/plan/halo.hpp
// The plan that brings every segment the rows before it.

namespace cpx {

/// Rows beside a segment: `count` rows from `first` on, of the halo rows or of the rank's own.
struct halo_run {
    bool halo = false;
    index_t first = 0;
    index_t count = 0;
    friend constexpr bool operator==(halo_run, halo_run) = default;
};

/// Brings the rows beside a rank's segments: source, its rows; target, the halo rows, each of them once.
///
/// The `reach` rows beside segment i are, in order, `runs[begin[i]] .. runs[begin[i + 1]]`; fewer only where
/// the sequence begins or ends. Rows that the rank holds itself are named, not copied. The transposed plan carries the
/// gradients of halo rows home and adds them in rank order.
template <class S>
struct halo_plan : plan {
    S sharding;
    index_t reach = 0;
    side where = side::before;
    std::vector<segment> segments;
    std::vector<halo_run> runs;
    std::vector<std::size_t> begin;
};
template <class S>
    requires(!any_sharding<S>)
struct halo_plan<S> {
    static_assert(detail::never<S>, "cpx: a halo_plan is what halo(sharding, rank, reach) returns");
    template <class... X>
    halo_plan(X const&...) {}
};
template <class X = detail::any>
halo_plan(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) -> halo_plan<detail::any>;

namespace detail {

/// Global rows, and the local row at which the first of them stands.
struct placed_range {
    range rows;
    index_t local = 0;
};

/// The rows of a rank's segments.
struct own_ranges {
    thd const& batch;
    std::vector<segment> const& segments;

    std::size_t size() const { return segments.size(); }
    placed_range operator[](std::size_t i) const {
        segment const& s = segments[i];
        index_t const first = batch.offset(s.sequence) + s.token;
        return {{first, first + s.count}, s.row};
    }
};

/// Returns the range that holds global row `row`, among ranges that ascend.
template <class Ranges>
placed_range find(Ranges const& ranges, index_t row) {
    auto const first = [&](std::size_t i) { return ranges[i].rows.first; };
    return ranges[last_at_or_before(row, ranges.size(), first)];
}

/// Returns the rows of the sequence within reach of `rows`, on one side of them.
template <any_sharding S>
range beside(halo_plan<S> const& p, range rows, index_t sequence, side which) {
    thd const& batch = p.batch;
    index_t const reach = p.reach;
    if (which == side::before) return {std::max(batch.offset(sequence), rows.first - reach), rows.first};
    return {rows.last, std::min(batch.offset(sequence + 1), rows.last + reach)};
}

/// Returns what the rank needs, and writes down where it will find it.
template <any_sharding S>
std::vector<message> take_beside(halo_plan<S>& p) {
    own_ranges const own{p.batch, p.segments};
    std::vector<placed_range> foreign; // windows ascend, so the last row of these tells what is on its way already
    index_t hint = 0;
    message_list receives(p.sharding.ranks(), p.segments.size());
    for (std::size_t i = 0; i < p.segments.size(); ++i) {
        range const window = beside(p, own[i].rows, p.segments[i].sequence, p.where);
        if (!window.empty() && !S::every_row) // where every rank holds every row, segments are whole sequences
            p.sharding.for_each_holder(window, hint, [&](int holder, range held) {
                if (holder != p.rank) {
                    index_t const covered =
                        foreign.empty() ? held.first : std::max(held.first, foreign.back().rows.last);
                    range const fresh{covered, std::max(covered, held.last)};
                    if (!fresh.empty()) {
                        receives.add(holder, p.target_rows, fresh);
                        foreign.push_back({fresh, p.target_rows});
                        p.target_rows += fresh.size();
                    }
                }
                while (!held.empty()) {
                    auto const place = holder == p.rank ? find(own, held.first) : find(foreign, held.first);
                    range const known = intersect(held, place.rows);
                    p.runs.push_back({holder != p.rank, place.local + known.first - place.rows.first, known.size()});
                    held.first = known.last;
                }
            });
        p.begin.push_back(p.runs.size());
    }
    return receives.finish();
}

/// Returns what others need of the rank: its rows beside a segment of theirs that lies within reach, on the other side.
template <any_sharding S>
std::vector<message> give_beside(halo_plan<S> const& p) {
    own_ranges const own{p.batch, p.segments};
    side const other = p.where == side::before ? side::after : side::before;
    index_t hint = 0;
    message_list sends(p.sharding.ranks(), p.segments.size());
    for (std::size_t i = 0; i < p.segments.size(); ++i) {
        range const mine = own[i].rows;
        index_t const sequence = p.segments[i].sequence;
        range const near = beside(p, mine, sequence, other);
        if (near.empty() || S::every_row) continue;
        int peer = p.rank;
        range theirs{near.first, near.first}; // the rows of one segment of theirs, as far as they lie in `near`
        auto const give = [&] {
            if (peer == p.rank || theirs.empty()) return;
            range const needed = intersect(mine, beside(p, theirs, sequence, p.where));
            index_t const from = std::max(needed.first, sends.end(peer));
            if (from < needed.last) sends.add(peer, p.segments[i].row + from - mine.first, {from, needed.last});
        };
        p.sharding.for_each_holder(near, hint, [&](int holder, range held) {
            if (holder == peer) {
                theirs.last = held.last;
                return;
            }
            give();
            peer = holder;
            theirs = held;
        });
        give();
    }
    return sends.finish();
}

} // namespace detail

/// Returns the plan by which `rank` gets the `reach` rows beside each of its segments, and gives its own to others.
///
/// A halo may come from several ranks, when segments are shorter than `reach`. Each halo row is received once, even if
/// several segments need it. Pure: no communication. Cost: O(pieces).
///
/// Throws `cpx::error` if `rank` is not one of the sharding's, or `reach` is negative or no size.
template <any_sharding S>
halo_plan<S> halo(S const& sharding, int rank, index_t reach, side where = side::before, caller here = caller::here()) {
    detail::require_rank("halo", rank, sharding.ranks(), here);
    detail::product("halo", "rows beside a segment", {reach}, here);
    require(where == side::before || where == side::after, "halo", "side", "before or after", static_cast<int>(where),
            here);
    thd const& batch = sharding.batch();
    halo_plan<S> p{{}, sharding, reach, where, segments(sharding, rank), {}, {0}};
    p.rank = rank;
    p.batch = batch;
    auto const end = detail::end_of(sharding);
    p.id = detail::identify(where == side::before ? "halo" : "halo after", end, end, sharding.ranks(), batch, reach);
    p.source_settings = p.target_settings = end.all;
    p.kind = flow::copies;
    p.local = S::every_row;

    p.begin.reserve(p.segments.size() + 1);
    p.runs.reserve(p.segments.size());
    if (!p.segments.empty()) p.source_rows = p.segments.back().row + p.segments.back().count;
    p.receives = detail::take_beside(p);
    p.sends = detail::give_beside(p);
    return p;
}
template <class X = detail::any>
detail::refused halo(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: halo(sharding, rank, reach) wants a sharding, such as shard(batch, zigzag<4>{}) returns, this "
                  "rank and a number of rows, and then perhaps side::after");
    return {};
}

} // namespace cpx

// cpx/plan/route.hpp
// Which cells of a run move between two layouts: what plans between them scale by the length of each sequence.

namespace cpx {

/// Cells `first` to `last` of a run, which rank `from` holds and rank `to` is to hold.
struct route {
    int from = 0, to = 0;
    int first = 0, last = 0;
    friend constexpr bool operator==(route, route) = default;
};

/// Returns into how many equal cells both layouts cut a run: the least common multiple of their chunks.
///
/// With balanced cuts every chunk of either layout is a whole number of cells, whatever the length of the run, because
/// floor(n (k c) / (k C)) = floor(n c / C).
template <layout From, layout To>
constexpr index_t cells(From const& from, To const& to) {
    return std::lcm(index_t{from.chunks()}, index_t{to.chunks()});
}

/// Calls `f(route)` for what chunk `chunk` of `from` has in common with each chunk of `to`, in token order.
/// Requires less than 2^31 cells.
template <layout From, layout To, class F>
constexpr void for_each_route(From const& from, To const& to, int chunk, F&& f) {
    int const all = static_cast<int>(cells(from, to)), own = all / from.chunks(), other = all / to.chunks();
    for (int first = chunk * own, end = first + own; first < end;) {
        int const target = first / other, last = (target + 1) * other < end ? (target + 1) * other : end;
        f(route{from.owner(chunk), to.owner(target), first, last});
        first = last;
    }
}

namespace detail {

/// Calls `f(route)` for what changes hands between layouts that are known at compile time, in token order.
template <static_layout From, static_layout To, class F>
consteval void for_each_moved(F&& f) {
    for (int chunk = 0; chunk < From{}.chunks(); ++chunk)
        for_each_route(From{}, To{}, chunk, [&](route r) {
            if (r.from != r.to) f(r);
        });
}

template <static_layout From, static_layout To>
consteval std::size_t count_routes() {
    std::size_t count = 0;
    for_each_moved<From, To>([&](route) { ++count; });
    return count;
}

} // namespace detail

/// Returns what changes hands between two layouts, in token order, as a constant; lengths only scale it.
///
///     static_assert(cpx::routes<cpx::zigzag<2>, cpx::sequential<2>>().size() == 2);
///
/// Both layouts cut the same runs (one scope) with the same cut. Then the plans of `relayout` are these, scaled by
/// every length, and what stays.
template <class From, class To>
consteval auto routes() {
    constexpr bool known = static_layout<From> && static_layout<To>;
    static_assert(known, "cpx: routes between layouts that are known at run time only; give sizes in types: zigzag<4>");
    if constexpr (known) {
        static_assert(From{}.ranks() == To{}.ranks(),
                      "cpx: routes between layouts over different numbers of ranks; give both the same ranks");
        std::array<route, detail::count_routes<From, To>()> moved{};
        std::size_t count = 0;
        detail::for_each_moved<From, To>([&](route r) { moved[count++] = r; });
        return moved;
    } else {
        return std::array<route, 0>{};
    }
}

template <class X = void>
consteval detail::refused routes() {
    static_assert(detail::never<X>, "cpx: routes wants two layouts: routes<zigzag<4>, sequential<4>>()");
    return {};
}

/// The same of two layouts that are given: `routes(zigzag<4>{}, sequential<4>{})`.
template <class From, class To>
constexpr auto routes(From const&, To const&) {
    constexpr bool known = static_layout<From> && static_layout<To>; // said here: a level less to read
    static_assert(known, "cpx: routes between layouts that are known at run time only; give sizes in types: zigzag<4>");
    if constexpr (known) {
        constexpr bool alike = From{}.ranks() == To{}.ranks();
        static_assert(alike, "cpx: routes between layouts over different numbers of ranks; give both the same ranks");
        if constexpr (alike)
            return routes<From, To>();
        else
            return std::array<route, 0>{};
    } else {
        return std::array<route, 0>{};
    }
}

/// Returns how many messages one exchange between the layouts takes in all: the pairs of ranks between which cells
/// move.
template <class From, class To>
consteval int route_messages() {
    constexpr auto moved = routes<From, To>();
    int count = 0;
    for (std::size_t i = 0; i < moved.size(); ++i) {
        bool first = true;
        for (std::size_t k = 0; k < i; ++k)
            if (moved[k].from == moved[i].from && moved[k].to == moved[i].to) first = false;
        count += first;
    }
    return count;
}

} // namespace cpx

// cpx/plan/lanes.hpp
// What moves of every sequence, whatever its length: plans and tables on devices scale it.

namespace cpx {

/// Rows of every sequence that go to `peer`, or come from it; -1: they stay. From `from` rows after cell `first` begins
/// to `to` rows after cell `last` begins; where negative, before.
struct lane {
    static constexpr int everyone = -2; ///< a peer: every rank that has columns of them, this one among them

    int peer = -1;
    int first = 0, last = 0;
    int from = 0, to = 0;
    int unused = 0;

    CPX_HOST_DEVICE constexpr bool is_of(int rank) const { return peer == rank || peer == everyone; }
};

/// What lanes are of: each sequence, a state of each that has tokens, or the whole batch as one run of rows.
enum class cut_runs : int { sequences, states, batch };

/// Into what lanes cut a sequence, or the batch.
struct lane_cells {
    int count = 1, unit = 1; ///< as balanced chunks, which begin at multiples of `unit` tokens
    cut_runs of = cut_runs::sequences;
    int least = 0; ///< tokens of a sequence that has any, with which the lanes tell what moves

    /// Returns what says where a cell of a sequence of `length` tokens begins.
    CPX_HOST_DEVICE constexpr auto begins(detail::balanced_begins const& all, index_t length) const {
        index_t const n = of == cut_runs::states && length > 0 ? 1 : length;
        return [at = all.of(n), n, cells = count, multiple = index_t{unit}](int cell) -> index_t {
            if (cell == cells) return n;
            index_t const place = at(cell);
            if (multiple == 1) return place;
            index_t const nearest = (place + multiple / 2) / multiple * multiple;
            return nearest < n ? nearest : n;
        };
    }
    /// Returns how many runs of rows are cut of a batch of so many sequences.
    CPX_HOST_DEVICE constexpr int runs(int sequences) const { return of == cut_runs::batch ? 1 : sequences; }
    /// Returns the rows of such a run, from cu_seqlens of as many sequences.
    CPX_HOST_DEVICE constexpr range run(index_t const* offsets, int sequences, int i) const {
        return of == cut_runs::batch ? range{offsets[0], offsets[sequences]} : range{offsets[i], offsets[i + 1]};
    }
};

/// Returns the rows of a lane, in a sequence that has tokens.
template <class Begins>
CPX_HOST_DEVICE constexpr range rows_in(lane const& l, Begins const& begins) {
    return {begins(l.first) + l.from, begins(l.last) + l.to};
}

/// What messages have of the rows at one end of an exchange.
struct lane_columns {
    index_t width = 0;                     ///< elements of a local row, or 0: rows of any width, which move whole
    std::vector<std::vector<run>> of = {}; ///< of every peer, those without any get nothing; empty: all columns
};

/// One exchange of one rank, of every batch: lanes tile its rows at either end, in their order, sequence by sequence.
struct lane_plan {
    int rank = 0;
    flow kind = flow::moves;
    lane_cells cells = {};
    std::vector<lane> sends = {}, receives = {};
    lane_columns source = {}, target = {};

    lane_plan transposed(flow back) const { return {rank, back, cells, receives, sends, target, source}; }
};

namespace detail {

/// Cells of which a reciprocal tells exactly where they begin, see `balanced_begins`.
inline constexpr int most_cells = (1 << 16) - 1;

/// Shardings that cut each sequence by a layout, and by a cut of cpx's, or the batch where no sequence moves the cut:
/// lanes tell what moves between them.
template <class S>
inline constexpr bool in_cells = false;
template <layout P, scope Scope, cut Cut>
inline constexpr bool in_cells<sharding<P, Scope, Cut>> =
    Scope == scope::sequence ? ascends<Cut> : std::same_as<Cut, balanced>;
/// Those of which lanes also tell what is beside segments: they cut each sequence.
template <class S>
inline constexpr bool in_lanes = false;
template <layout P, cut Cut>
inline constexpr bool in_lanes<sharding<P, scope::sequence, Cut>> = ascends<Cut>;

template <class S>
int unit_of(S const& s) {
    if constexpr (requires { s.cut().unit(); }) return s.cut().unit();
    return 1;
}
/// Calls `f(layout, unit)` if lanes tell what is beside the segments of a sharding; one that stands for another, whose
/// type does not say so, has a member of this name.
template <class S, class F>
void with_lanes(S const& s, F&& f) {
    if constexpr (in_lanes<S>)
        f(s.policy(), unit_of(s));
    else if constexpr (requires { s.with_lanes(f); })
        s.with_lanes(f);
}
/// Returns whether two shardings cut alike, or share alike, whatever their batches; of those that stand for others by a
/// member of this name.
template <class S>
bool cut_alike(S const& a, S const& b) {
    if constexpr (S::every_row) {
        if (a.ranks() != b.ranks() || !std::ranges::equal(a.sections(), b.sections())) return false;
        for (section const& s : a.sections())
            for (int r = 0; r < a.ranks(); ++r)
                if (!(a.heads(r, s.heads) == b.heads(r, s.heads))) return false;
        return true;
    } else if constexpr (in_cells<S>) {
        if constexpr (std::equality_comparable<typename S::layout_type>)
            return a.policy() == b.policy() && a.cut() == b.cut();
    } else if constexpr (requires { a.cut_alike(b); }) {
        return a.cut_alike(b);
    }
    return false;
}

/// The same of those of a plan, which also have one batch.
template <class... S>
bool cut_alike(std::tuple<S...> const& a, std::tuple<S...> const& b) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
        return ((cut_alike(std::get<I>(a), std::get<I>(b)) && std::get<I>(a).batch() == std::get<0>(a).batch()) && ...);
    }(std::index_sequence_for<S...>());
}

/// Returns what `rank` has of every sequence under `mine`, to or from where it is under `other`.
template <layout P, layout Q>
std::vector<lane> routed_lanes(P const& mine, int rank, Q const& other) {
    std::vector<lane> list;
    for_each_chunk(mine, rank, [&](int chunk) {
        for_each_route(mine, other, chunk, [&](route r) { list.push_back({r.to, r.first, r.last}); });
    });
    return list;
}

constexpr int bounded(index_t number) {
    return static_cast<int>(std::min<index_t>(number, std::numeric_limits<int>::max()));
}

/// Returns the lanes by which `reach` rows beside the segments of a rank come, where every chunk has so many.
template <layout P>
lane_plan halo_lanes(P const& layout, int unit, int rank, index_t reach, bool before) {
    lane_plan p{.rank = rank, .kind = flow::copies, .cells = {.count = layout.chunks(), .unit = unit}};
    p.cells.least = bounded((bounded(reach) + index_t{unit}) * layout.chunks());
    int const rows = bounded(reach);
    auto const owner = [&](int chunk) { return chunk < 0 || chunk == layout.chunks() ? rank : layout.owner(chunk); };
    for_each_chunk(layout, rank, [&](int c) {
        int const lower = owner(c - 1), upper = owner(c + 1);
        if (before && upper != rank) {
            p.sends.push_back({-1, c, c + 1, 0, -rows});
            p.sends.push_back({upper, c + 1, c + 1, -rows, 0});
        } else if (!before && lower != rank) {
            p.sends.push_back({lower, c, c, 0, rows});
            p.sends.push_back({-1, c, c + 1, rows, 0});
        } else {
            p.sends.push_back({-1, c, c + 1});
        }
        if (before && lower != rank) p.receives.push_back({lower, c, c, -rows, 0});
        if (!before && upper != rank) p.receives.push_back({upper, c + 1, c + 1, 0, rows});
    });
    return p;
}

/// Returns the lanes of the exchanges by which states are handed from each segment of a sequence to the next, where
/// every chunk has rows.
template <layout P>
std::vector<lane_plan> state_lanes(P const& layout, int unit, int rank, bool back) {
    std::vector<lane_plan> list;
    int const least = bounded((index_t{unit} + 1) * layout.chunks());
    for (int c = 1; c < layout.chunks(); ++c) {
        int const lower = layout.owner(c - 1), upper = layout.owner(c);
        if (lower == upper) continue;
        lane_plan p{.rank = rank, .kind = flow::copies, .cells = {.of = cut_runs::states, .least = least}};
        if (lower == rank) p.sends.push_back({upper, 0, 1});
        if (upper == rank) p.receives.push_back({lower, 0, 1});
        list.push_back(back ? p.transposed(p.kind) : p);
    }
    return list;
}

/// Returns the lanes of the exchanges of a scan, of which a state has `state_rows` rows and its map `map_rows`, where
/// every chunk has rows: `back`, from the segments after.
template <layout P>
std::vector<lane_plan> scan_lanes(P const& layout, int unit, int rank, int state_rows, int map_rows, bool back) {
    std::vector<int> holders; // of the segments of a sequence, the first on the states' way first
    for (int c = 0; c < layout.chunks(); ++c) {
        int const owner = layout.owner(back ? layout.chunks() - 1 - c : c);
        if (holders.empty() || holders.back() != owner) holders.push_back(owner);
    }
    int const length = static_cast<int>(holders.size()), least = bounded((index_t{unit} + 1) * layout.chunks());
    std::vector<lane_plan> list;
    for (int reach = 1; reach < length; reach *= 2) {
        lane_plan p{.rank = rank, .kind = flow::copies, .cells = {.of = cut_runs::states, .least = least}};
        auto const lane_of = [&](int other, bool has_map) {
            return lane{.peer = holders[static_cast<std::size_t>(other)], .to = state_rows + (has_map ? map_rows : 0)};
        };
        for (int i = 0; i < length; ++i) {
            int const level = back ? length - 1 - i : i; // a rank's segments are in token order
            if (holders[static_cast<std::size_t>(level)] != rank) continue;
            if (level + reach < length) p.sends.push_back(lane_of(level + reach, level >= reach));
            if (level >= reach) p.receives.push_back(lane_of(level - reach, level >= 2 * reach));
        }
        list.push_back(std::move(p));
    }
    return list;
}

/// Rows of a message, or of a lane, in a batch.
struct lane_rows {
    int peer = -1;
    index_t count = 0, first = 0, runs = 0; ///< how many, the first of them, and in how many runs they lie
    index_t end = 0;
};

/// How many rows the lanes of one end have in a batch.
struct lane_counts {
    index_t rows = 0;
    std::vector<lane_rows> messages; ///< ascending by peer
    std::vector<index_t> slices;     ///< of a lane, of `slice` rows at most
};

/// Counts the rows of lanes in a batch; nothing if they do not tell what moves of it.
inline std::optional<lane_counts> count_lanes(std::vector<lane> const& lanes, lane_cells const& cells, thd const& batch,
                                              index_t slice) {
    lane_counts c{0, {}, std::vector<index_t>(lanes.size())};
    for (lane const& l : lanes)
        if (l.peer != -1) c.messages.push_back({l.peer});
    std::ranges::sort(c.messages, {}, &lane_rows::peer);
    auto const same = [](lane_rows const& a, lane_rows const& b) { return a.peer == b.peer; };
    c.messages.erase(std::unique(c.messages.begin(), c.messages.end(), same), c.messages.end());
    std::vector<lane_rows*> to(lanes.size());
    for (std::size_t i = 0; i < lanes.size(); ++i)
        if (lanes[i].peer != -1) to[i] = &*std::ranges::find(c.messages, lanes[i].peer, &lane_rows::peer);

    balanced_begins const all(cells.count);
    auto const sequences = static_cast<int>(batch.sequences());
    for (int s = 0; s < cells.runs(sequences); ++s) {
        index_t const n = cells.run(batch.offsets().data(), sequences, s).size();
        if (n == 0) continue;
        if (n < cells.least) return {};
        auto const begins = cells.begins(all, n);
        for (std::size_t i = 0; i < lanes.size(); ++i) {
            index_t const count = rows_in(lanes[i], begins).size();
            if (lane_rows* const m = to[i]; m && count > 0) {
                if (m->runs == 0) m->first = c.rows;
                m->runs += m->runs == 0 || m->end != c.rows;
                m->count += count;
                m->end = c.rows + count;
                c.slices[i] += (count + slice - 1) / slice;
            }
            c.rows += count;
        }
    }
    std::erase_if(c.messages, [](lane_rows const& m) { return m.count == 0; });
    return c;
}

} // namespace detail

} // namespace cpx

// cpx/plan/relayout.hpp
// The plan from any sharding to any other.

namespace cpx {

/// A plan that knows from which sharding to which it leads, so that tensors of others do not compile.
template <class From, class To>
struct relayout_plan : plan {
    From from;
    To to;

    relayout_plan<To, From> transposed() const { return {plan::transposed(), to, from}; }
};
template <class From, class To>
    requires(!any_sharding<From> || !any_sharding<To>)
struct relayout_plan<From, To> {
    static_assert(detail::never<From>, "cpx: a relayout_plan is what relayout(from, to, rank) returns");
    template <class... X>
    relayout_plan(X const&...) {}
};
template <class X = detail::any>
relayout_plan(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {})
    -> relayout_plan<detail::any, detail::any>;

namespace detail {

/// Which heads of every section each rank holds.
class head_shares {
public:
    template <any_sharding S>
    head_shares(S const& s, std::span<section const> of) : every_row(S::every_row), ranks(s.ranks()), sections(of) {
        shares_.reserve(sections.size() * static_cast<std::size_t>(ranks));
        for (section const& each : sections)
            for (int rank = 0; rank < ranks; ++rank) shares_.push_back(s.heads(rank, each.heads));
    }
    range held(int rank, std::size_t section) const {
        return shares_[section * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(rank)];
    }

    bool const every_row; ///< as the sharding says
    int const ranks;
    std::span<section const> const sections;

private:
    std::vector<range> shares_;
};

/// Returns the heads of a section that rank `i` ships to rank `j`: those that `j` needs and `i` holds, unless `j` has
/// them already or another rank is to send them. Where several ranks hold a head, the lowest of them sends it (shares
/// ascend with ranks).
inline range shipped_heads(head_shares const& from, head_shares const& to, int i, int j, std::size_t section) {
    range const needed = intersect(from.held(i, section), to.held(j, section));
    if (i == j || !from.every_row) return needed;
    index_t const lower = i > 0 ? from.held(i - 1, section).last : 0;
    range const own = from.held(j, section);
    range shipped{std::max(needed.first, lower), needed.last};
    if (j < i)
        shipped.first = std::max(shipped.first, own.last);
    else
        shipped.last = std::min(shipped.last, own.first);
    return shipped;
}

/// Returns the columns that rank `i` ships to rank `j`, as places in a local row of `holder` on `rank`.
inline std::vector<run> shipped_columns(head_shares const& from, head_shares const& to, int i, int j,
                                        head_shares const& holder, int rank) {
    std::vector<run> columns;
    columns.reserve(holder.sections.size());
    index_t first = 0;
    for (std::size_t group = 0; group < holder.sections.size(); ++group) {
        section const& s = holder.sections[group];
        range const share = holder.held(rank, group), heads = shipped_heads(from, to, i, j, group);
        if (!heads.empty()) {
            run const shipped{first + (heads.first - share.first) * s.width, heads.size() * s.width};
            columns.push_back(shipped);
        }
        first += share.size() * s.width;
    }
    return columns;
}

/// Returns whether some rows or heads stand on several ranks.
inline bool has_replicas(head_shares const& shares) {
    for (std::size_t s = 0; s < shares.sections.size() && shares.every_row; ++s) {
        index_t everywhere = 0;
        for (int rank = 0; rank < shares.ranks; ++rank) everywhere += shares.held(rank, s).size();
        if (everywhere > shares.sections[s].heads) return true;
    }
    return false;
}

/// The columns of the messages that a rank sends, or receives.
struct message_columns {
    head_shares const &from, &to;
    int rank;
    bool sends;
    bool whole_rows; ///< messages have no columns

    std::vector<run> of(int peer) const {
        return sends ? shipped_columns(from, to, rank, peer, from, rank)
                     : shipped_columns(from, to, peer, rank, to, rank);
    }
    /// Gives messages their columns, `same`: to all peers one list, and drops those that have none.
    void give(std::vector<message>& messages, bool same) const {
        if (whole_rows) return;
        std::vector<run> const own = same ? of(rank) : std::vector<run>();
        for (message& m : messages) m.columns = same ? own : of(m.peer);
        std::erase_if(messages, [](message const& m) { return m.columns.empty(); });
    }
};

/// A sharding of which `holders` tells who has rows. Its pieces are known to give each row to one rank.
template <class S>
concept known_holders = requires(S const s) { s.holders(); };

/// Lists the runs of the rows that `rank` holds: as local rows, or as those of a rank that holds every row.
template <any_sharding S>
std::vector<run> held_runs(S const& sharding, int rank, bool local) {
    joined_rows rows;
    index_t row = 0;
    for (range const piece : pieces(sharding, rank)) {
        rows.add(local ? row : piece.first, piece);
        row += piece.size();
    }
    return std::move(rows.runs);
}

/// Lists the rows of `count` ranks, `first` and those after it, when they are first read.
template <any_sharding S>
std::shared_ptr<late_runs const> late_rows(S const& sharding, int first, int count, bool local) {
    std::function<std::vector<run>(int)> list = [sharding, first, local](int i) {
        return held_runs(sharding, first + i, local);
    };
    return std::make_shared<late_runs>(count, std::move(list));
}

/// The messages of a rank on one side of an exchange, and its rows there.
struct common_messages {
    index_t rows = 0;
    std::vector<message> messages;
    bool known = false; ///< whether each row is sure to be in one message a peer
};

/// Shardings between which lanes tell what moves: of each sequence or of the batch, by one cut.
template <class Mine, class Other>
inline constexpr bool routed = false;
template <any_sharding Mine, any_sharding Other>
    requires in_cells<Mine> && in_cells<Other>
inline constexpr bool routed<Mine, Other> =
    Mine::cuts == Other::cuts && std::same_as<typename Mine::cut_type, typename Other::cut_type>;

/// Returns what a sharding cuts into so many cells, unless these are too many.
template <any_sharding S>
    requires in_cells<S>
std::optional<lane_cells> cells_of(S const& s, index_t count) {
    if (count > most_cells) return {};
    return lane_cells{static_cast<int>(count), unit_of(s),
                      S::cuts == scope::batch ? cut_runs::batch : cut_runs::sequences};
}
/// The same of what two shardings cut.
template <any_sharding A, any_sharding B>
    requires routed<A, B>
std::optional<lane_cells> common_cells(A const& a, B const& b) {
    if (!(a.cut() == b.cut())) return {};
    return cells_of(a, cells(a.policy(), b.policy()));
}

/// Finds the messages of one end of an exchange by its lanes: each is scaled by the length of every sequence.
inline common_messages scale_lanes(std::vector<lane> const& lanes, lane_cells const& cells, thd const& batch) {
    std::vector<int> peers;
    for (lane const& l : lanes) peers.push_back(l.peer);
    std::ranges::sort(peers);
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    std::vector<joined_rows> rows(peers.size());
    std::vector<index_t> most(peers.size()); // runs of a message
    std::vector<std::size_t> message_of;
    auto const sequences = static_cast<int>(batch.sequences());
    for (lane const& l : lanes) {
        auto const m = static_cast<std::size_t>(std::ranges::lower_bound(peers, l.peer) - peers.begin());
        message_of.push_back(m);
        most[m] += cells.runs(sequences);
    }
    for (std::size_t i = 0; i < rows.size(); ++i)
        rows[i].runs.reserve(static_cast<std::size_t>(std::min(most[i], batch.tokens())));

    balanced_begins const all(cells.count);
    common_messages found;
    found.known = true;
    for (int s = 0; s < cells.runs(sequences); ++s) {
        range const cut = cells.run(batch.offsets().data(), sequences, s);
        auto const begins = cells.begins(all, cut.size());
        for (std::size_t i = 0; i < lanes.size(); ++i)
            if (range const common = rows_in(lanes[i], begins); !common.empty()) {
                rows[message_of[i]].add(found.rows, {cut.first + common.first, cut.first + common.last});
                found.rows += common.size();
            }
    }
    for (std::size_t i = 0; i < rows.size(); ++i)
        if (!rows[i].runs.empty()) found.messages.push_back({peers[i], std::move(rows[i].runs), {}});
    return found;
}

/// Finds the messages of a rank that has rows of `mine` with ranks that have them all: with each the same rows.
template <any_sharding Mine>
common_messages rows_for_all(Mine const& mine, message_columns const& columns) {
    common_messages found{mine.rows(columns.rank), {}, known_holders<Mine>};
    auto const late = late_rows(mine, columns.rank, 1, true);
    found.messages.reserve(static_cast<std::size_t>(mine.ranks()));
    for (int peer = 0; peer < mine.ranks() && found.rows > 0; ++peer) found.messages.push_back({peer, {late, 0}, {}});
    columns.give(found.messages, false);
    return found;
}

/// Finds the messages of a rank that has all `rows` with the ranks among which `other` divides them, `holders`.
/// `same_columns`: it has the same for all of them.
template <any_sharding Other>
common_messages rows_of_holders(index_t rows, Other const& other, std::vector<bool> const& holders,
                                message_columns const& columns, bool same_columns) {
    common_messages found{rows, {}, true};
    auto const late = late_rows(other, 0, other.ranks(), false);
    found.messages.reserve(static_cast<std::size_t>(std::ranges::count(holders, true)));
    for (int peer = 0; peer < other.ranks(); ++peer)
        if (holders[static_cast<std::size_t>(peer)]) found.messages.push_back({peer, {late, peer}, {}});
    columns.give(found.messages, same_columns);
    return found;
}

/// Finds which of `pieces`, a rank's rows in local order, lie where under `other`.
template <any_sharding Other>
common_messages list_common(std::vector<range> const& pieces, Other const& other, message_columns const& columns,
                            caller here) {
    message_list messages(other.ranks());
    index_t row = 0, hint = 0;
    for (range const piece : pieces) {
        index_t next = piece.first;
        other.for_each_holder(piece, hint, [&](int peer, range common) {
            if (!Other::every_row && common.first != next)
                throw error("relayout", "layout gives a token to no rank or to two", "row " + std::to_string(next),
                            "row " + std::to_string(common.first), here);
            messages.add(peer, row + common.first - piece.first, common);
            next = common.last;
        });
        row += piece.size();
    }
    common_messages found{row, messages.finish()};
    columns.give(found.messages, false);
    return found;
}

/// Finds the messages of a rank, whose rows are `mine`, with all ranks where their rows are `other`. `same_columns`: if
/// it holds every row, it has the same columns for all peers.
template <any_sharding Mine, any_sharding Other>
common_messages find_common(Mine const& mine, Other const& other, message_columns const& columns, bool same_columns,
                            caller here) {
    if constexpr (Other::every_row && !Mine::every_row) {
        return rows_for_all(mine, columns);
    } else {
        if constexpr (Mine::every_row && known_holders<Other>)
            if (auto const holders = other.holders(); !holders.empty())
                return rows_of_holders(mine.rows(columns.rank), other, holders, columns, same_columns);
        if constexpr (routed<Mine, Other>)
            if (auto const all = columns.whole_rows ? common_cells(mine, other) : std::nullopt)
                return scale_lanes(routed_lanes(mine.policy(), columns.rank, other.policy()), *all, mine.batch());
        return list_common(pieces(mine, columns.rank), other, columns, here);
    }
}

/// Returns the elements of a local row, or 0 if there are no sections: rows of any width.
template <any_sharding S>
index_t local_width(S const& s, int rank, std::span<section const> sections) {
    index_t width = 0;
    for (section const& group : sections) width += s.heads(rank, group.heads).size() * group.width;
    return width;
}

inline index_t brought(std::vector<message> const& messages) {
    index_t rows = 0;
    for (message const& m : messages) rows += total(m.rows);
    return rows;
}

/// Returns the rows of the message of `rank` to itself.
inline index_t kept(std::vector<message> const& messages, int rank) {
    for (message const& m : messages)
        if (m.peer == rank) return total(m.rows);
    return 0;
}

/// Throws unless both shardings are of one batch over as many ranks.
template <any_sharding From, any_sharding To>
void require_same_group(char const* where, From const& from, To const& to, caller here) {
    require(from.ranks() == to.ranks(), where, "ranks of the target", from.ranks(), to.ranks(), here);
    require_batch(where, "batch of the target", "the source's", from.batch(), to.batch(), here);
}

/// Returns the sections of what is moved, none: whole rows. Throws unless both shardings have the same or one has none.
inline std::span<section const> common_sections(std::span<section const> from, std::span<section const> to,
                                                caller here) {
    require(from.empty() || to.empty() || std::ranges::equal(from, to), "relayout", "sections of the target",
            "those of the source", "others", here);
    return from.empty() ? to : from;
}

/// Makes the plan of a relayout of what its two ends are. `sections`: of what is moved.
inline plan finish_relayout(int rank, thd const& batch, std::span<section const> sections, head_shares const& held,
                            head_shares const& needed, identity_end const& from, identity_end const& to,
                            common_messages out, common_messages in, caller here) {
    plan p{.rank = rank,
           .source_rows = out.rows,
           .target_rows = in.rows,
           .sends = std::move(out.messages),
           .receives = std::move(in.messages),
           .id = identify("relayout", from, to, held.ranks, batch),
           .batch = batch,
           .source_settings = from.all,
           .target_settings = to.all};
    for (std::size_t s = 0; s < sections.size(); ++s) {
        p.source_width += held.held(rank, s).size() * sections[s].width;
        p.target_width += needed.held(rank, s).size() * sections[s].width;
        p.id[identity::source_width] += static_cast<std::uint64_t>(sections[s].heads * sections[s].width);
    }
    p.id[identity::target_width] = p.id[identity::source_width];
    if (sections.empty())
        for (auto* messages : {&p.sends, &p.receives})
            for (message& m : *messages) m.columns.clear();
    if (has_replicas(held)) p.kind = flow::selects;
    if (has_replicas(needed)) p.kind = flow::copies;
    if (out.known && in.known) return p;
    require(p.covers_target(), "relayout", "rows of the target that messages bring, each place once", p.target_rows,
            brought(p.receives), here);
    // Rows that stay are found twice: among those that leave and among those that arrive.
    require(kept(p.sends, rank) == kept(p.receives, rank), "relayout", "rows that leave this rank for itself",
            kept(p.receives, rank), kept(p.sends, rank), here);
    return p;
}

} // namespace detail

/// Returns the plan by which `rank` and all others move a tensor from one sharding to another, in one exchange.
///
/// Any pair: tokens to tokens, tokens to heads and back, anything to replicated. Each rank sends exactly the rows and
/// columns that their new holder does not have, in at most one message a peer.
/// Pure: no communication; every rank makes its own. Cost: O(runs that meet), about 0.1 us each; between layouts that
/// cut each sequence with one cut, 10 ns each: `routes`, scaled by every length. Between tokens and heads, or all rows,
/// O(runs of the rank + ranks): there the rows of messages are listed when they are first read.
///
/// Throws `cpx::error` if the shardings differ in ranks or batch, if their sections differ, or if a layout does not
/// give every token to exactly one rank.
template <any_sharding From, any_sharding To>
relayout_plan<From, To> relayout(From const& from, To const& to, int rank, caller here = caller::here()) {
    constexpr int a = static_ranks<From>, b = static_ranks<To>;
    static_assert(a == dynamic || b == dynamic || a == b,
                  "cpx: relayout between shardings over different numbers of ranks; shard both over the same ranks");
    detail::require_same_group("relayout", from, to, here);
    detail::require_rank("relayout", rank, from.ranks(), here);
    auto const sections = detail::common_sections(from.sections(), to.sections(), here);
    constexpr section whole_row; // stands for the sections where rows move whole
    auto const groups = sections.empty() ? std::span(&whole_row, 1) : sections;
    bool const whole_rows = sections.empty() && !From::every_row;
    detail::head_shares const held(from, groups), needed(to, groups);
    bool const replicas = detail::has_replicas(held); // of a head: the lowest rank sends it
    auto out = detail::find_common(from, to, {held, needed, rank, true, whole_rows}, !replicas, here);
    auto in = detail::find_common(to, from, {held, needed, rank, false, whole_rows}, !From::every_row, here);
    return {detail::finish_relayout(rank, from.batch(), sections, held, needed, detail::end_of(from),
                                    detail::end_of(to), std::move(out), std::move(in), here),
            from, to};
}
template <class X = detail::any, class Y = detail::any>
detail::refused relayout(X const& = {}, Y const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(
        detail::never<X, Y>,
        "cpx: relayout(from, to, rank) wants two shardings, such as shard(batch, zigzag<4>{}) returns, and this rank");
    return {};
}

} // namespace cpx

// cpx/plan/relayout_lanes.hpp
// What a relayout moves of every batch: between tokens, and between tokens and what stands on every rank.

namespace cpx::detail {

/// The columns of a rank's messages of a relayout, of every batch; where rows move whole, one that stands for all.
class relayout_columns {
public:
    template <any_sharding From, any_sharding To>
    relayout_columns(From const& from, To const& to, int rank)
        : sections_(common_sections(from, to)), held_(from, sections_), needed_(to, sections_), rank_(rank) {}

    /// Returns those of the message to a peer, or from it.
    std::vector<run> of(int peer, bool out) const {
        return message_columns{held_, needed_, rank_, out, false}.of(peer);
    }
    /// Returns those of one end. `width`: of a local row, elements.
    lane_columns all(bool out, index_t width) const {
        lane_columns list{width};
        for (int peer = 0; peer < held_.ranks; ++peer) list.of.push_back(of(peer, out));
        return list;
    }

private:
    template <any_sharding From, any_sharding To>
    static std::span<section const> common_sections(From const& from, To const& to) {
        static constexpr section whole_row;
        auto const sections = from.sections().empty() ? to.sections() : from.sections();
        return sections.empty() ? std::span(&whole_row, 1) : sections;
    }
    std::span<section const> sections_;
    head_shares held_, needed_;
    int rank_;
};

/// Returns the lanes of a relayout, of every batch; none where they do not tell what moves. Between tokens and what
/// stands on every rank, a message has all rows of the rank that has the tokens.
template <any_sharding From, any_sharding To>
std::optional<lane_plan> relayout_lanes(From const& from, To const& to, plan const& p) {
    lane_plan made{.rank = p.rank, .kind = p.kind};
    if constexpr (routed<From, To>) {
        auto const all = common_cells(from, to);
        if (!all) return {};
        made.cells = *all;
        made.sends = routed_lanes(from.policy(), p.rank, to.policy());
        made.receives = routed_lanes(to.policy(), p.rank, from.policy());
        return made;
    } else if constexpr (From::every_row && in_cells<To>) {
        auto const back = relayout_lanes(to, from, p.transposed()); // but for columns: replicas are sent one way
        if (back) made = back->transposed(p.kind);
        if (!back) return {};
    } else if constexpr (in_cells<From> && To::every_row) {
        auto const& layout = from.policy();
        auto const all = cells_of(from, layout.chunks());
        if (!all) return {};
        made.cells = *all;
        for_each_chunk(layout, p.rank, [&](int c) { made.sends.push_back({lane::everyone, c, c + 1}); });
        for (int c = 0; c < layout.chunks(); ++c) made.receives.push_back({layout.owner(c), c, c + 1});
    } else {
        return {};
    }
    relayout_columns const columns(from, to, p.rank);
    made.source = columns.all(true, p.source_width);
    made.target = columns.all(false, p.target_width);
    return made;
}

} // namespace cpx::detail

// cpx/plan/capacity.hpp
// What all batches that fit a capacity have in common: the exchanges of one kind of plan, and what they take at most.

namespace cpx {

/// The largest batch that a movement is prepared for: rows of a rank, and sequences.
struct capacity {
    index_t rows = 0, sequences = 0;
};

/// Elements of a state that is handed on, and of the map that goes with it where the carry is a `scan`.
struct carry_widths {
    index_t state = 0, map = 0;
    friend bool operator==(carry_widths, carry_widths) = default;
};

/// What exchanges of any batch take at most.
struct movement_room {
    index_t runs = 0;     ///< of rows, of all exchanges in one direction
    index_t elements = 0; ///< that leave a rank, or come, in one exchange
    index_t columns = 1;  ///< into how many runs of columns messages cut a row
    index_t exchanges = 1;
};

namespace detail {

/// Returns into how many runs of rows, over all ranks, a sharding cuts a sequence, at most. `rows`: of a rank.
template <any_sharding S>
index_t most_pieces(S const& s, capacity const& most) {
    if constexpr (requires { s.policy().chunks(); }) return s.policy().chunks();
    return S::every_row ? 1 : most.rows;
}
/// The same of so many sequences.
template <any_sharding S>
index_t most_runs(S const& s, capacity const& most, caller here) {
    return product("movement", "runs", {most.sequences + 1, most_pieces(s, most)}, here);
}

/// Returns how many segments a rank has of so many sequences, at most: the same on all ranks.
template <any_sharding S>
index_t most_segments(S const& s, capacity const& most, caller here) {
    index_t pieces = 1; // of a sequence, on one rank
    if constexpr (requires { s.policy().owner(0); }) {
        std::vector<index_t> chunks(static_cast<std::size_t>(s.ranks()));
        for (int c = 0; c < s.policy().chunks(); ++c) ++chunks[static_cast<std::size_t>(s.policy().owner(c))];
        pieces = *std::ranges::max_element(chunks);
    } else if constexpr (!S::every_row) { // of layouts that a rule chooses: a segment has at least a row
        return most.rows;
    }
    return product("movement", "segments", {most.sequences + 1, pieces}, here);
}

/// Returns how many rows a rank has, or a few more if these do not exceed `most`: where chunks are about equal, that
/// takes no look at sequences.
template <any_sharding S>
index_t about_rows(S const& s, int rank, index_t most) {
    if constexpr (in_lanes<S>) {
        index_t chunks = 0;
        for_each_chunk(s.policy(), rank, [&](int) { ++chunks; });
        index_t const rows = chunks * (s.batch().tokens() / s.policy().chunks() + 1 + s.batch().sequences());
        if (unit_of(s) == 1 && rows <= most) return rows; // a chunk has one row more than its share, at most
    }
    return s.rows(rank);
}

/// Returns how many rows beside segments a rank sends, or gets, at most. A row may go to several ranks, where segments
/// are shorter than `reach`.
template <any_sharding S>
index_t most_beside(S const& s, index_t reach, capacity const& most, caller here) {
    return product("movement", "rows of the halo", {most_segments(s, most, here), reach, (reach + 1) / 2 + 1}, here);
}

/// What tables of a plan take: rectangles, and bytes that leave, or come, by one exchange.
struct table_sizes {
    index_t rectangles = 0, staged = 0;
};

/// Returns what tables of any plans take at most that have `room`: a rectangle for each run of rows and columns, of
/// elements of so many bytes.
inline table_sizes most_tables(movement_room const& room, int ranks, std::size_t element, caller here) {
    index_t const bytes = product("exchange", "bytes", {room.elements, static_cast<index_t>(element)}, here);
    return {2 * room.columns * (room.runs + 2 * ranks), bytes + 256 * ranks}; // messages begin at multiples of 256
}

/// Returns how many of at most `rows` rows of a batch a rank has, at most, of so many sequences.
template <any_sharding S>
index_t most_held(S const& s, int rank, index_t rows, index_t sequences) {
    if constexpr (in_cells<S>) {
        index_t const runs = S::cuts == scope::batch ? 1 : sequences, unit = unit_of(s), chunks = s.policy().chunks();
        index_t own = 0, share = rows;
        for_each_chunk(s.policy(), rank, [&](int) { ++own; });
        if (runs < rows / unit)
            share = rows / chunks + 1 + runs * unit; // a chunk is a unit longer than its share, at most
        if (own == 0 || share <= rows / own) return own * share;
    }
    return rows;
}

/// Returns what relayouts of any batch take at most that lead from one sharding to another. `width`: elements of a row
/// that moves whole.
template <any_sharding From, any_sharding To>
movement_room relayout_room(From const& from, To const& to, int rank, index_t width, capacity const& most,
                            caller here) {
    auto const runs = [&](auto const& s) { return std::min(most.rows, most_runs(s, most, here)); };
    auto const sections = from.sections().empty() ? to.sections() : from.sections();
    movement_room room{.runs = runs(from) + runs(to), .columns = std::max<index_t>(1, std::ssize(sections))};
    if constexpr (!From::every_row && !To::every_row) {
        room.elements = product("movement", "elements", {from.ranks() > 1 ? most.rows : 0, width}, here);
        return room;
    }
    relayout_columns const columns(from, to, rank);
    auto const elements = [&](auto const& mine, auto const& other, bool out) {
        index_t widest = 0, all = 0; // of messages
        for (int peer = 0; peer < mine.ranks(); ++peer) {
            index_t const own = peer == rank ? 0 : total(columns.of(peer, out)),
                          shipped = sections.empty() ? own * width : own;
            widest = std::max(widest, shipped), all += shipped;
        }
        if (!other.every_row) return product("movement", "elements", {most.rows, widest}, here); // a row has one holder
        return product("movement", "elements", {most_held(mine, rank, most.rows, most.sequences), all}, here);
    };
    room.elements = std::max(elements(from, to, true), elements(to, from, false));
    return room;
}

/// What a movement knows of a kind of plan: what tells a batch from others, the plan of another one, its exchanges in
/// one direction, by their numbers, and whether those back are the same messages the other way; lanes that tell them of
/// every batch, if there are such; what all of them take at most, and the elements of a row of theirs.
template <class Plan>
struct moved;

/// Of a plan that is one exchange.
template <class Plan>
struct moved_at_once {
    using width = index_t;
    template <class F>
    static auto exchanges(plan const& p, index_t, bool back, F&& f) {
        if (!back) return f(std::span<plan const>(&p, 1)); // named: nvcc spells a deduced one as newer g++ refuse it
        plan const other = p.transposed();
        return f(std::span<plan const>(&other, 1));
    }
    static index_t row_width(index_t width) { return width; }
};

template <any_sharding From, any_sharding To>
struct moved<relayout_plan<From, To>> : moved_at_once<relayout_plan<From, To>> {
    using plan_type = relayout_plan<From, To>;
    using batch = std::tuple<From, To>;
    static batch batch_of(plan_type const& p) { return {p.from, p.to}; }
    static plan_type next(plan_type const& p, batch const& of, caller here) {
        return relayout(std::get<0>(of), std::get<1>(of), p.rank, here);
    }
    static bool mirrors(plan_type const& p) { return p.kind == flow::moves || p.kind == flow::selects; }
    static std::vector<lane_plan> lanes(plan_type const& p, index_t, bool back) {
        auto made = relayout_lanes(p.from, p.to, p);
        if (!made) return {};
        return {back ? made->transposed(p.plan::transposed().kind) : std::move(*made)};
    }
    static movement_room room(plan_type const& p, index_t width, capacity const& most, caller here) {
        return relayout_room(p.from, p.to, p.rank, width, most, here);
    }
};

template <any_sharding S>
struct moved<halo_plan<S>> : moved_at_once<halo_plan<S>> {
    using plan_type = halo_plan<S>;
    using batch = std::tuple<S>;
    static batch batch_of(plan_type const& p) { return {p.sharding}; }
    static plan_type next(plan_type const& p, batch const& of, caller here) {
        return halo(std::get<0>(of), p.rank, p.reach, p.where, here);
    }
    static bool mirrors(plan_type const&) { return false; }
    static std::vector<lane_plan> lanes(plan_type const& p, index_t, bool back) {
        std::vector<lane_plan> list;
        with_lanes(p.sharding, [&](auto const& layout, int unit) {
            list.push_back(halo_lanes(layout, unit, p.rank, p.reach, p.where == side::before));
            if (back) list.back() = list.back().transposed(flow::sums);
        });
        return list;
    }
    static movement_room room(plan_type const& p, index_t width, capacity const& most, caller here) {
        index_t const rows = most_beside(p.sharding, p.reach, most, here);
        return {2 * rows, product("movement", "elements", {rows, width}, here)};
    }
};

template <carry_kind How, any_sharding S>
struct moved<carry_plan<How, S>> {
    using plan_type = carry_plan<How, S>;
    using width = carry_widths;
    using batch = std::tuple<S>;
    static constexpr bool scans = std::same_as<How, scan>;
    static batch batch_of(plan_type const& p) { return {p.sharding}; }
    static plan_type next(plan_type const& p, batch const& of, caller here) {
        return carry<How>(std::get<0>(of), p.rank, here);
    }
    static bool mirrors(plan_type const&) { return !scans; } // maps are not the same from both sides
    static std::vector<lane_plan> lanes(plan_type const& p, carry_widths width, bool back) {
        std::vector<lane_plan> list;
        with_lanes(p.sharding, [&](auto const& layout, int unit) {
            if constexpr (scans) {
                index_t const row = row_width(width);
                list = scan_lanes(layout, unit, p.rank, bounded(width.state / row), bounded(width.map / row), back);
            } else {
                list = state_lanes(layout, unit, p.rank, back);
            }
        });
        return list;
    }
    template <class F>
    static auto exchanges(plan_type const& p, carry_widths width, bool back, F&& f) {
        std::vector<plan> list;
        side const from = back ? side::after : side::before;
        for (index_t k = 0; k < p.steps; ++k)
            if constexpr (scans)
                list.push_back(p.step(k, from, width.state, width.map));
            else
                list.push_back(p.step(k, from));
        return f(std::span<plan const>(list));
    }
    static index_t row_width(carry_widths width) {
        if constexpr (scans) return plan_type::row_width(width.state, width.map);
        return width.state;
    }
    static movement_room room(plan_type const& p, carry_widths width, capacity const& most, caller here) {
        index_t const runs = most_segments(p.sharding, most, here); // in each exchange of a scan, in one of a series
        auto const pieces = static_cast<std::size_t>(most_runs(p.sharding, most, here));
        index_t const times = scans ? static_cast<index_t>(std::bit_width(pieces)) : 1;
        index_t const elements = width.state + (scans ? width.map : 0);
        return {.runs = 2 * runs * times,
                .elements = product("movement", "elements of states", {runs, elements}, here),
                .exchanges = scans ? times : most_pieces(p.sharding, most)};
    }
};

} // namespace detail

} // namespace cpx

// cpx/plan/edges.hpp
// Rows beside segments as numbers, and the rows that segments elsewhere need without the rest of their rank's.

namespace cpx {

/// Returns `number(row, in the halo)` of the rows beside each of a rank's segments, (segments, reach) in token order;
/// -1 where there is none.
template <any_sharding S, class F>
std::vector<index_t> rows_beside(halo_plan<S> const& p, F&& number) {
    std::vector<index_t> list(p.segments.size() * static_cast<std::size_t>(p.reach), -1);
    for (std::size_t i = 0; i < p.segments.size(); ++i) {
        index_t count = 0;
        for (std::size_t k = p.begin[i]; k < p.begin[i + 1]; ++k) count += p.runs[k].count;
        auto to = list.begin() + static_cast<index_t>(i) * p.reach + (p.where == side::before ? p.reach - count : 0);
        for (std::size_t k = p.begin[i]; k < p.begin[i + 1]; ++k)
            for (index_t row = p.runs[k].first; row < p.runs[k].first + p.runs[k].count; ++row)
                *to++ = number(row, p.runs[k].halo);
    }
    return list;
}

/// The rows of one rank that stand beside segments, side by side in a buffer of their own.
struct edge_rows {
    std::vector<index_t> rows;   ///< numbers among the rank's rows, ascending
    std::vector<index_t> beside; ///< of its segments: edge rows by their number, then those of the halo; see above
    plan exchange;               ///< brings them, its source, where the halo's plan brings rows
};

/// Returns the edge rows of a plan of rows after segments.
template <any_sharding S>
edge_rows edges_of(halo_plan<S> const& p) {
    edge_rows edges;
    // A row that another segment of this rank needs is among those that are sent, because the rank that holds the rows
    // between needs it, too.
    for (message const& m : p.sends)
        for (run const r : m.rows)
            for (index_t row = r.first; row < r.first + r.count; ++row) edges.rows.push_back(row);
    std::ranges::sort(edges.rows);
    edges.rows.erase(std::unique(edges.rows.begin(), edges.rows.end()), edges.rows.end());
    auto const place = [&](index_t row) -> index_t {
        return std::ranges::lower_bound(edges.rows, row) - edges.rows.begin();
    };
    edges.exchange = p;
    edges.exchange.source_rows = std::ssize(edges.rows);
    for (message& m : edges.exchange.sends)
        for (run& r : m.rows) r.first = place(r.first); // its rows follow one another among the edge rows, too
    edges.beside =
        rows_beside(p, [&](index_t row, bool halo) { return halo ? std::ssize(edges.rows) + row : place(row); });
    return edges;
}
template <class X = detail::any>
edge_rows edges_of(X const& = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: edges_of wants a plan of rows after segments: "
                                    "halo(sharding, rank, reach, side::after)");
    return {};
}

/// Returns the lanes of the edge rows' exchange, of every batch; none where those of rows after segments are none.
template <any_sharding S>
std::vector<lane_plan> edge_lanes(halo_plan<S> const& p) {
    auto list = detail::moved<halo_plan<S>>::lanes(p, 0, false);
    for (lane_plan& l : list) std::erase_if(l.sends, [](lane const& rows) { return rows.peer < 0; }); // no edge rows
    return list;
}

/// Returns the rows before each segment of a plan of such rows, (segments, reach): those of the halo are numbered after
/// the rank's own. -1: none; or, of sequences that go on, rows of their states, numbered after the halo's: the newest
/// reach + 1 rows of each, in token order.
template <any_sharding S>
std::vector<index_t> rows_before(halo_plan<S> const& p, bool go_on) {
    auto list = rows_beside(p, [&](index_t row, bool halo) { return row + (halo ? p.source_rows : 0); });
    index_t const states = p.source_rows + p.target_rows, window = p.reach + 1;
    for (std::size_t i = 0; go_on && i < p.segments.size(); ++i)
        for (index_t token = p.segments[i].token - p.reach; token < 0; ++token)
            list[static_cast<std::size_t>((static_cast<index_t>(i) + 1) * p.reach + token - p.segments[i].token)] =
                states + (p.segments[i].sequence + 1) * window + token;
    return list;
}

/// Returns the newest reach + 1 rows of sequences that end on this rank, oldest first, each as the row of the states
/// that it becomes and the row, numbered as above, that it is. A sequence without tokens ends on rank 0.
template <any_sharding S>
std::vector<index_t> newest_rows(halo_plan<S> const& p) {
    std::vector<index_t> list;
    auto const before = rows_before(p, true);
    index_t const states = p.source_rows + p.target_rows, window = p.reach + 1;
    thd const& batch = p.sharding.batch();
    auto const add = [&](index_t sequence, auto const& row_of) {
        for (index_t back = window; back > 0; --back)
            list.insert(list.end(), {(sequence + 1) * window - back, row_of(back)});
    };
    for (std::size_t i = 0; i < p.segments.size(); ++i) {
        segment const& s = p.segments[i];
        if (s.token + s.count == batch.length(s.sequence))
            add(s.sequence, [&](index_t back) { // a row before the segment is within reach, for it has one itself
                auto const place = static_cast<index_t>(i + 1) * p.reach + s.count - back;
                return back <= s.count ? s.row + s.count - back : before[static_cast<std::size_t>(place)];
            });
    }
    for (index_t s = 0; s < batch.sequences(); ++s)
        if (batch.length(s) == 0 && (S::every_row || p.rank == 0))
            add(s, [&](index_t back) { return states + (s + 1) * window - back; });
    return list;
}

/// What a causal convolution reads beside a rank's own rows.
struct conv_batch {
    index_t rows = 0, halo_rows = 0, segments = 0;
    std::vector<index_t> tables; ///< as `conv_batch_of` and `add_rows_after` say
    plan edge_exchange;          ///< brings edge rows to the ranks whose segments they follow
};

/// Returns the rows of a convolution, of at most `most_taps`. Tables: where segments begin, then rows before, see
/// `rows_before`. Throws `cpx::error` on other plans.
template <any_sharding S>
conv_batch conv_batch_of(char const* where, halo_plan<S> const& p, index_t most_taps, bool go_on,
                         caller here = caller::here()) {
    require(p.where == side::before, where, "side of the halo", "before", "after", here);
    require(
        p.reach < most_taps, where, "taps", [&] { return "at most " + std::to_string(most_taps); }, p.reach + 1, here);
    require(std::ssize(p.segments) < index_t{1} << 31, where, "segments", "less than 2^31", p.segments.size(), here);
    conv_batch made{p.source_rows, p.target_rows, std::ssize(p.segments), offsets(p.segments), {}};
    auto const before = rows_before(p, go_on);
    made.tables.insert(made.tables.end(), before.begin(), before.end());
    return made;
}

/// Adds what the backward of such a convolution reads, by the plan of rows after, of the sharding and rank of that of
/// the `reach` rows before. Tables: (segments, reach) rows after, those of the halo after the edge rows, and what edge
/// rows are computed from. Throws `cpx::error` on other plans.
template <any_sharding S>
void add_rows_after(char const* where, conv_batch& to, halo_plan<S> const& p, index_t reach,
                    caller here = caller::here()) {
    require(p.where == side::after && p.reach == reach, where, "rows after a segment in the plan", reach,
            p.where == side::after ? p.reach : 0, here);
    require(p.source_rows == to.rows && std::ssize(p.segments) == to.segments, where, "plan of rows after",
            "the sharding and the rank of that of rows before", "another", here);
    auto edges = edges_of(p);
    to.tables.insert(to.tables.end(), edges.beside.begin(), edges.beside.end());
    to.edge_exchange = std::move(edges.exchange);

    std::size_t s = 0; // (edge rows, taps): what each is computed from
    for (index_t const row : edges.rows) {
        while (p.segments[s].row + p.segments[s].count <= row) ++s;
        for (index_t from = row - reach; from <= row; ++from) {
            index_t const token = from - p.segments[s].row; // rows before stand behind where segments begin
            index_t const place = to.segments + 1 + (static_cast<index_t>(s) + 1) * reach + token;
            to.tables.push_back(token >= 0 ? from : to.tables[static_cast<std::size_t>(place)]);
        }
    }
}

} // namespace cpx

// cpx/plan/media_position.hpp
// The position of one token among images and videos: from counts alone, for host and device.

namespace cpx {

/// What a token is. The numbers are those of `mm_token_type_ids` in transformers.
enum class media_kind : std::uint8_t { text, image, video };

/// The token ids of placeholders; left out: of a kind that the model does not have. `token_types` stands for lists of
/// `media_kind` instead of ids.
struct media_tokens {
    static constexpr index_t none = std::numeric_limits<index_t>::min(); ///< which no list has, as it may -1
    index_t image = none, video = none;
    CPX_HOST_DEVICE constexpr media_kind kind(index_t id) const {
        return id == image ? media_kind::image : id == video ? media_kind::video : media_kind::text;
    }
};
inline constexpr media_tokens token_types{1, 2};

/// How a model counts positions at media: which placeholders are an item, the time of its frames, and by how much
/// positions go on behind it. Height and width count from the beginning of the item.
///
/// Source: Hugging Face transformers, get_rope_index of the models.
enum class mrope_rule {
    /// Every image and every frame of a video is an item; on by max(height, width).
    qwen3_vl, ///< and Qwen3.5
    /// A video is an item, frame a at time a; on behind the greatest position.
    qwen2_vl,
    /// Frame a at a * seconds * tokens_per_second, multiplied in float and cut to an integer; on behind the greatest
    /// position. As the model was published.
    qwen2_5_vl,
    /// The seconds are cut to an integer first. transformers from the middle of 2025 on.
    qwen2_5_vl_whole_seconds,
    /// So they are, and positions go on by max(height, width), so that text may have positions of the video before it.
    /// transformers 5.
    qwen2_5_vl_spatial_advance
};

/// Returns the position of a frame on the first axis, counted from the beginning of its item. seconds: of its video.
CPX_HOST_DEVICE constexpr index_t frame_time(mrope_rule rule, index_t frame, double seconds,
                                             index_t tokens_per_second) {
    switch (rule) {
    case mrope_rule::qwen3_vl: return 0;
    case mrope_rule::qwen2_vl: return frame;
    case mrope_rule::qwen2_5_vl: {
        float const at = static_cast<float>(frame) * static_cast<float>(seconds);
        return static_cast<index_t>(at * static_cast<float>(tokens_per_second));
    }
    default: return frame * (static_cast<index_t>(seconds) * tokens_per_second);
    }
}

/// Returns by how much positions go on behind an item. last: the time of its last frame; sizes in rows of features.
CPX_HOST_DEVICE constexpr index_t item_advance(mrope_rule rule, index_t last, index_t height, index_t width) {
    index_t const side = height > width ? height : width;
    return rule == mrope_rule::qwen2_5_vl_spatial_advance || last < side ? side : last + 1;
}

/// Position of a token on the three axes of multimodal rotary embedding.
struct mrope_position {
    index_t time = 0, height = 0, width = 0;
    friend constexpr bool operator==(mrope_position, mrope_position) = default;
};

/// An image, or one frame of a video, among all of its kind in the batch. A list of them ends with one more, behind the
/// last, which has no rows.
struct media_frame {
    index_t row = 0;     ///< rows of the kind's features before it
    index_t advance = 0; ///< what the items before it, and not this one's, add to the positions behind them
    index_t time = 0;    ///< its position on the first axis, counted from the beginning of its item
    index_t width = 1;   ///< rows of features side by side
    index_t number = 0;  ///< frames of its item before it
    friend constexpr bool operator==(media_frame, media_frame) = default;

    /// Returns whether no item is begun and not ended at row `at`, which lies in this frame.
    CPX_HOST_DEVICE constexpr bool begins_item(index_t at) const { return at == row && number == 0; }
};

/// A segment, as positions see it.
struct media_segment {
    index_t row = 0;                ///< where it begins among the rank's rows
    index_t count = 0;              ///< its rows
    index_t valid = 0;              ///< rows before the padding; those behind are text
    index_t images = 0, videos = 0; ///< rows of features before it, in the batch
    index_t origin = 0;             ///< what media before it leave of its first token's place in the sequence
    friend constexpr bool operator==(media_segment, media_segment) = default;
};

/// Placeholders of a segment: what ranks tell each other.
struct media_count {
    std::int32_t image = 0, video = 0;
    friend constexpr bool operator==(media_count, media_count) = default;
};

/// Returns which of `frames`, of which there are `count` and one behind the last, holds row `row` of the features.
/// `guess`: where to look first. Cost: O(log d) if the guess is d off.
CPX_HOST_DEVICE constexpr int frame_at(media_frame const* frames, int count, index_t row, int guess) {
    return last_at_or_before(row, count + 1, guess, [&](int i) { return frames[i].row; });
}

/// Returns the position of a token.
///
/// `text`: its segment's origin and the tokens of its segment before it that are text; `images`, `videos`: rows of
/// features of either kind before it in the batch; `image`, `video`: the frames that hold those rows.
CPX_HOST_DEVICE constexpr mrope_position position_of(media_kind kind, index_t text, index_t images, index_t videos,
                                                     media_frame const& image, media_frame const& video) {
    index_t const base = text + image.advance + video.advance;
    if (kind == media_kind::text) return {base, base, base};
    media_frame const& frame = kind == media_kind::image ? image : video;
    index_t const at = (kind == media_kind::image ? images : videos) - frame.row;
    return {base + frame.time, base + at / frame.width, base + at % frame.width};
}

} // namespace cpx

// cpx/plan/media.hpp
// The images and videos of a batch, which every rank knows: their sizes, and how positions go on behind them.

namespace cpx {

/// Size of an image or a video in patches, as image_grid_thw and video_grid_thw have it.
struct media_grid {
    index_t time = 1, height = 0, width = 0;
    friend constexpr bool operator==(media_grid, media_grid) = default;
};

/// What else the positions of a model depend on.
struct media_options {
    mrope_rule rule = mrope_rule::qwen3_vl;
    index_t merge = 2;                ///< patches along each side that become one row of features: spatial_merge_size
    index_t tokens_per_second = 2;    ///< of Qwen2.5-VL
    std::vector<double> seconds = {}; ///< a video, of Qwen2.5-VL: second_per_grid_t; none: 1
};

/// An image, a video or a frame: the placeholders that stand side by side. Sizes in rows of features.
struct media_item {
    index_t frames = 1, height = 0, width = 0;
    index_t advance = 0; ///< by how much positions go on behind it
    index_t number = 0;  ///< of the grid
    index_t rows() const { return frames * height * width; }
};

/// All images and videos of a batch, in the order of the batch. Every rank has the same.
class media {
public:
    media() : media({}, {}) {}

    /// Throws `cpx::error` that names the first grid that is empty or not divisible by the merge size, an image of
    /// several frames, seconds that are not one a video, more than 2^31 - 1 rows of a kind, or a rule that is none.
    media(std::vector<media_grid> const& images, std::vector<media_grid> const& videos, media_options options = {},
          caller here = caller::here())
        : options_(std::move(options)) {
        require(options_.rule >= mrope_rule::qwen3_vl && options_.rule <= mrope_rule::qwen2_5_vl_spatial_advance,
                "media", "rule", "one of mrope_rule", static_cast<int>(options_.rule), here);
        require(options_.merge > 0, "media", "merge", "at least 1", options_.merge, here);
        require(options_.seconds.empty() || options_.seconds.size() == videos.size(), "media", "number of seconds",
                videos.size(), options_.seconds.size(), here);
        require(options_.tokens_per_second >= 0 && options_.tokens_per_second < 1 << 20, "media", "tokens_per_second",
                "0 to 2^20 - 1", options_.tokens_per_second, here);
        for (double const s : options_.seconds)
            require(s >= 0 && s < 1 << 20, "media", "seconds", "0 to 2^20", s, here);
        images_ = list("image", images, false, here);
        videos_ = list("video", videos, options_.rule == mrope_rule::qwen3_vl, here);
    }
    template <class X = detail::any>
        requires(!std::same_as<X, media>)
    explicit media(X const& = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: media(images, videos, options) wants two vectors of media_grid, in "
                                        "patches: media({{1, 4, 6}}, {})");
    }

    media_options const& options() const { return options_; }
    bool empty() const { return rows(media_kind::image) + rows(media_kind::video) == 0; }
    std::vector<media_item> const& items(media_kind kind) const { return of(kind).items; }
    /// Returns all frames of a kind and one behind the last.
    std::vector<media_frame> const& frames(media_kind kind) const { return of(kind).frames; }
    /// Returns how many rows of features a kind has, which is how many placeholders.
    index_t rows(media_kind kind) const { return of(kind).frames.back().row; }
    /// Returns the rows of a kind's features as a batch: every frame is a sequence.
    thd const& batch(media_kind kind) const { return of(kind).batch; }
    /// Returns whether an item may have greater positions than the text behind it begins with.
    bool overruns() const { return overruns_; }

    /// Returns the position of an item's frame on the first axis, counted from the beginning of the item.
    index_t time(media_item const& item, index_t frame) const {
        bool const known = !options_.seconds.empty() && item.frames > 1;
        return frame_time(options_.rule, frame, known ? options_.seconds[static_cast<std::size_t>(item.number)] : 1,
                          options_.tokens_per_second);
    }

private:
    struct of_kind {
        std::vector<media_item> items;
        std::vector<media_frame> frames;
        thd batch;
    };
    of_kind const& of(media_kind kind) const { return kind == media_kind::image ? images_ : videos_; }

    of_kind list(std::string const& kind, std::vector<media_grid> const& grids, bool split, caller here) {
        of_kind all;
        media_frame next;
        index_t const most = std::numeric_limits<std::int32_t>::max();
        for (std::size_t i = 0; i < grids.size(); ++i) {
            auto const& [time, height, width] = grids[i];
            auto const check = [&](char const* what, bool holds, std::string const& expected, index_t got) {
                if (!holds)
                    throw error("media", what + (" of " + kind + ' ' + std::to_string(i)), expected,
                                std::to_string(got), here);
            };
            std::string const sides = "a multiple of the merge size " + std::to_string(options_.merge);
            check("frames", kind == "image" ? time == 1 : time > 0, kind == "image" ? "1" : "at least 1", time);
            check("height", height > 0 && height % options_.merge == 0, sides, height);
            check("width", width > 0 && width % options_.merge == 0, sides, width);
            index_t const h = height / options_.merge, w = width / options_.merge;
            if (h > most / w || time > most / (h * w) || next.row > most - time * h * w)
                throw error("media", "rows up to the end of " + kind + ' ' + std::to_string(i), "at most 2^31 - 1",
                            std::to_string(next.row) + " before it and " + std::to_string(time) + " times " +
                                std::to_string(h) + " times " + std::to_string(w),
                            here);
            media_item item{split ? 1 : time, h, w, 0, static_cast<index_t>(i)};
            double const step = static_cast<double>(options_.tokens_per_second) *
                                (options_.seconds.empty() || item.frames == 1 ? 1 : options_.seconds[i]);
            check("frames", static_cast<double>(time) * step <= static_cast<double>(most), "times below 2^31", time);
            index_t const last = this->time(item, item.frames - 1);
            item.advance = item_advance(options_.rule, last, h, w);
            overruns_ = overruns_ || last >= item.advance;
            for (index_t n = 0; n < (split ? time : 1); ++n) {
                all.items.push_back(item);
                next.width = w;
                for (next.number = 0; next.number < item.frames; ++next.number) {
                    next.time = this->time(item, next.number);
                    all.frames.push_back(next);
                    next.row += h * w;
                }
                next.advance += item.advance;
            }
        }
        all.frames.push_back({next.row, next.advance});
        std::vector<index_t> offsets;
        for (media_frame const& frame : all.frames) offsets.push_back(frame.row);
        all.batch = thd(std::move(offsets));
        return all;
    }

    media_options options_;
    of_kind images_, videos_;
    bool overruns_ = false;
};

/// Returns grids from rows of three numbers: image_grid_thw or video_grid_thw. Throws `cpx::error` if they are not rows
/// of three.
std::vector<media_grid> media_grids(integers auto const& list, caller here = caller::here()) {
    require(std::ssize(list) % 3 == 0, "media_grids", "size of the list", "a multiple of 3", std::ssize(list), here);
    std::vector<media_grid> grids;
    for (auto g = std::data(list); g != std::data(list) + std::ssize(list); g += 3)
        grids.push_back({static_cast<index_t>(g[0]), static_cast<index_t>(g[1]), static_cast<index_t>(g[2])});
    return grids;
}

/// What gives rows of features to ranks: each to the rank whose tower has made its image or frame; each to the rank
/// of its placeholder.
struct by_item {};
struct by_placeholder {};

/// Returns the sharding in which rank r has made the features of the next `frames[r]` images, or frames of videos.
///
/// Throws `cpx::error` if these are not all of them.
inline piecewise<by_item> features_by_item(media const& m, media_kind kind, std::vector<index_t> const& frames,
                                           caller here = caller::here()) {
    require(kind == media_kind::image || kind == media_kind::video, "features_by_item", "kind", "image or video",
            static_cast<int>(kind), here);
    auto const& all = m.frames(kind);
    index_t const count = std::ssize(all) - 1;
    index_t next = 0;
    std::vector<owned_piece> pieces;
    for (std::size_t rank = 0; rank < frames.size(); ++rank) {
        index_t const own = frames[rank];
        if (own < 0 || own > count - next)
            throw error("features_by_item", "frames of rank " + std::to_string(rank),
                        "0 to " + std::to_string(count - next), std::to_string(own), here);
        pieces.push_back({{all[static_cast<std::size_t>(next)].row, all[static_cast<std::size_t>(next + own)].row},
                          static_cast<int>(rank)});
        next += own;
    }
    require(next == count, "features_by_item", "frames of all ranks", count, next, here);
    return piecewise<by_item>(static_cast<int>(frames.size()), m.batch(kind), pieces, here);
}

/// Returns the sharding in which all ranks have made as many, the first ones one more. Source: NeMo Megatron-Bridge,
/// vision_dp_when_cp.
inline piecewise<by_item> features_by_item(media const& m, media_kind kind, int ranks, caller here = caller::here()) {
    detail::require_ranks("features_by_item", "ranks", ranks, here);
    index_t const count = std::ssize(m.frames(kind)) - 1;
    std::vector<index_t> frames;
    for (int rank = 0; rank < ranks; ++rank) frames.push_back(count / ranks + (rank < count % ranks));
    return features_by_item(m, kind, frames, here);
}
template <class X = detail::any>
detail::refused features_by_item(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: features_by_item(media, kind, ranks) wants a cpx::media, a media_kind and the "
                  "number of ranks, or how many frames each of them has");
    return {};
}

} // namespace cpx

// cpx/plan/mrope.hpp
// Positions of text, images and videos: of a whole batch, token by token, and of a rank's rows from counts.

namespace cpx {

namespace detail {

constexpr char const* name_of(media_kind kind) { return kind == media_kind::image ? "image" : "video"; }

/// Throws `cpx::error` unless there are as many placeholders of a kind as rows of features.
inline void require_rows(char const* where, media_kind kind, index_t rows, index_t placeholders, caller here) {
    if (placeholders != rows)
        throw error(where, std::string(name_of(kind)) + " placeholders in the batch",
                    std::to_string(rows) + ", the rows of features that the grids have", std::to_string(placeholders),
                    here);
}

/// The error of tokens that interrupt an item: text in an image, or an image that ends with its sequence.
inline error interrupted(media_kind kind, index_t sequence, index_t token, caller here) {
    return {"mrope_positions", "sequence " + std::to_string(sequence) + ", token " + std::to_string(token),
            std::string("one more placeholder of ") + (kind == media_kind::image ? "an image" : "a video") +
                " that has begun before it",
            "something else", here};
}

/// Finds the frame of a row, near that of the row before.
class frame_finder {
public:
    explicit frame_finder(std::vector<media_frame> const& frames) : frames_(frames) {}
    media_frame const& operator()(index_t row) {
        at_ = frame_at(frames_.data(), static_cast<int>(frames_.size()) - 1, row, at_);
        return frames_[static_cast<std::size_t>(at_)];
    }

private:
    std::vector<media_frame> const& frames_;
    int at_ = 0;
};

} // namespace detail

/// Positions of a whole batch: (3, tokens), the axes time, height and width; and by how much the position of a token
/// that is decoded behind a sequence differs from the token's number in it.
struct batch_positions {
    std::vector<index_t> axes, deltas;
};

/// Computes the positions of all tokens one after the other, from 0 in every sequence: the definition.
///
/// Text is at the next position on all axes; an item's frames, rows and columns count from the next position; behind it
/// go on as its rule says. Tokens behind a sequence's valid length are text. ids: all token ids of the batch, or of
/// `token_types` the kinds.
///
/// Throws `cpx::error` if ids are not one a token, if there are not as many placeholders of images, or of videos, as
/// rows of features, or if those of an item do not stand side by side.
batch_positions mrope_positions(media const& m, thd const& batch, integers auto const& ids, media_tokens tokens,
                                caller here = caller::here()) {
    index_t const n = batch.tokens();
    require(std::ssize(ids) == n, "mrope_positions", "number of ids", n, std::ssize(ids), here);
    auto const kind_at = [&](index_t s, index_t t) {
        if (t >= batch.valid(s)) return media_kind::text;
        return tokens.kind(static_cast<index_t>(std::data(ids)[batch.offset(s) + t]));
    };
    index_t placeholders[3] = {};
    for (index_t s = 0; s < batch.sequences(); ++s)
        for (index_t t = 0; t < batch.valid(s); ++t) ++placeholders[static_cast<std::size_t>(kind_at(s, t))];
    for (media_kind const kind : {media_kind::image, media_kind::video})
        detail::require_rows("mrope_positions", kind, m.rows(kind), placeholders[static_cast<std::size_t>(kind)], here);

    batch_positions p{detail::zeros<index_t>("mrope_positions", {3, n}, here), {}};
    std::size_t next_item[3] = {};
    for (index_t s = 0; s < batch.sequences(); ++s) {
        index_t next = 0, most = -1;
        auto const emit = [&](index_t t, mrope_position at) {
            auto const place = p.axes.begin() + batch.offset(s) + t;
            place[0] = at.time, place[n] = at.height, place[2 * n] = at.width;
            if (t < batch.valid(s)) most = std::max({most, at.time, at.height, at.width});
        };
        for (index_t t = 0; t < batch.length(s);) {
            media_kind const kind = kind_at(s, t);
            if (kind == media_kind::text) {
                emit(t++, {next, next, next});
                ++next;
                continue;
            }
            media_item const& item = m.items(kind)[next_item[static_cast<std::size_t>(kind)]++];
            for (index_t frame = 0; frame < item.frames; ++frame)
                for (index_t y = 0; y < item.height; ++y)
                    for (index_t x = 0; x < item.width; ++x, ++t) {
                        if (t >= batch.length(s) || kind_at(s, t) != kind) throw detail::interrupted(kind, s, t, here);
                        emit(t, {next + m.time(item, frame), next + y, next + x});
                    }
            next += item.advance;
        }
        p.deltas.push_back(1 + most - batch.valid(s));
    }
    return p;
}

/// Counts the placeholders of a rank's segments, whose ids are `ids(row)`.
///
/// Throws `cpx::error` that names the first placeholder of a kind of which there are no grids.
template <class Ids>
std::vector<media_count> count_media(media const& m, thd const& batch, std::vector<segment> const& segments, Ids&& ids,
                                     media_tokens tokens, caller here = caller::here()) {
    std::vector<media_count> counts;
    for (segment const& s : segments) {
        index_t image = 0, video = 0;
        index_t const valid = std::min(s.count, batch.valid(s.sequence) - s.token);
        for (index_t i = 0; i < valid; ++i) {
            media_kind const kind = tokens.kind(static_cast<index_t>(ids(s.row + i)));
            if (kind == media_kind::text) continue;
            ++(kind == media_kind::image ? image : video);
            if (m.rows(kind) == 0)
                throw error("mrope_positions",
                            "sequence " + std::to_string(s.sequence) + ", token " + std::to_string(s.token + i),
                            std::string("text, for there are no grids of ") + detail::name_of(kind) + 's',
                            std::string(detail::name_of(kind)) + " placeholder", here);
        }
        index_t const most = std::numeric_limits<std::int32_t>::max(); // more than there are features
        counts.push_back(
            {static_cast<std::int32_t>(std::min(image, most)), static_cast<std::int32_t>(std::min(video, most))});
    }
    return counts;
}

/// Where the media of a batch lie on its ranks, from the placeholders of every segment: what positions and vision rows
/// need to know. The same on every rank but for `own`.
struct media_places {
    std::vector<media_segment> own;          ///< the rank's segments
    std::vector<index_t> deltas;             ///< a sequence, as of `batch_positions`, unless `media::overruns`
    std::vector<owned_piece> images, videos; ///< rows of features, by the rank of their placeholders
};

/// Makes those of a rank. counts: a segment of rank 0, 1, and so on, the segments in their order; where every rank
/// holds every row, of this rank only. Pure. Cost: O(segments of all ranks, and of media).
///
/// Throws `cpx::error` if placeholders and rows of features differ in number, or if one sequence ends and another
/// begins within an item: the same error on every rank.
template <any_sharding S>
media_places locate_media(media const& m, S const& sharding, int rank, std::vector<media_count> const& counts,
                          caller here = caller::here()) {
    struct counted_segment {
        segment where;
        int rank;
        media_count count;
    };
    std::vector<counted_segment> all;
    for (int r = S::every_row ? rank : 0; r < (S::every_row ? rank + 1 : sharding.ranks()); ++r)
        for (segment const& s : segments(sharding, r, here)) all.push_back({s, r, {}});
    require(all.size() == counts.size(), "locate_media", "counts, one a segment", all.size(), counts.size(), here);
    index_t images = 0, videos = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
        all[i].count = counts[i];
        images += counts[i].image, videos += counts[i].video;
    }
    detail::require_rows("mrope_positions", media_kind::image, m.rows(media_kind::image), images, here);
    detail::require_rows("mrope_positions", media_kind::video, m.rows(media_kind::video), videos, here);
    std::ranges::stable_sort(all, {},
                             [](counted_segment const& s) { return std::pair(s.where.sequence, s.where.token); });

    thd const& batch = sharding.batch();
    media_places places;
    index_t image = 0, video = 0, origin = 0; // rows so far; and what they and the batch's advances leave of a token
    detail::frame_finder in_images(m.frames(media_kind::image)), in_videos(m.frames(media_kind::video));
    std::size_t i = 0;
    for (index_t s = 0; s < batch.sequences(); ++s) {
        for (; i < all.size() && all[i].where.sequence == s; ++i) {
            auto const& [where, holder, count] = all[i];
            index_t const valid = std::clamp<index_t>(batch.valid(s) - where.token, 0, where.count);
            if (holder == rank)
                places.own.push_back(
                    {where.row, where.count, valid, image, video, where.token + origin - image - video});
            places.images.push_back({{image, image + count.image}, holder});
            places.videos.push_back({{video, video + count.video}, holder});
            image += count.image, video += count.video;
        }
        media_frame const &next_image = in_images(image), &next_video = in_videos(video);
        bool const whole = next_image.begins_item(image);
        if (!whole || !next_video.begins_item(video))
            throw detail::interrupted(whole ? media_kind::video : media_kind::image, s, batch.valid(s), here);
        index_t const after = image + video - next_image.advance - next_video.advance;
        places.deltas.push_back(origin - after);
        origin = after;
    }
    return places;
}

/// Computes the positions of a rank's rows, whose ids are `ids(row)`: writes (3, rows) to `axes`, calls
/// `placeholder(kind, row, feature)` for every placeholder, `feature` its row of features in the batch, and
/// `largest(segment, position)` for the segments' rows that are not padding. Cost: O(rows), a search a row.
///
/// Throws `cpx::error` that names the first token of the rank that interrupts an item.
template <class Ids, class Placeholder, class Largest>
void place_rows(media const& m, media_places const& places, std::vector<segment> const& segments, Ids&& ids,
                media_tokens tokens, rows<index_t> axes, Placeholder&& placeholder, Largest&& largest,
                caller here = caller::here()) {
    detail::frame_finder in_images(m.frames(media_kind::image)), in_videos(m.frames(media_kind::video));
    for (std::size_t k = 0; k < places.own.size(); ++k) {
        media_segment const& s = places.own[k];
        index_t image = s.images, video = s.videos, text = s.origin, most = -1;
        for (index_t i = 0; i < s.count; ++i) {
            media_kind const kind = i < s.valid ? tokens.kind(static_cast<index_t>(ids(s.row + i))) : media_kind::text;
            media_frame const &of_image = in_images(image), &of_video = in_videos(video);
            bool const whole = kind == media_kind::image || of_image.begins_item(image);
            if (!whole || (kind != media_kind::video && !of_video.begins_item(video)))
                throw detail::interrupted(whole ? media_kind::video : media_kind::image, segments[k].sequence,
                                          segments[k].token + i, here);
            mrope_position const at = position_of(kind, text, image, video, of_image, of_video);
            axes(0, s.row + i) = at.time, axes(1, s.row + i) = at.height, axes(2, s.row + i) = at.width;
            if (i < s.valid) most = std::max({most, at.time, at.height, at.width});
            if (kind == media_kind::text)
                ++text;
            else
                placeholder(kind, s.row + i, kind == media_kind::image ? image++ : video++);
        }
        largest(k, most);
    }
}

} // namespace cpx

// cpx/plan/parcel.hpp
// A plan's messages as bytes of a buffer: what a transport takes from one rank's memory and leaves in another's.

namespace cpx {

/// One end of a message: the bytes of some rows and columns of a buffer, in row-major order.
///
/// Row i begins at `base + i * stride` bytes, column k of it `k * unit` bytes later. Both ends of a message list runs
/// of the same counts with the same unit, each at its own places. `columns` is never empty; `base` may be null where
/// there are no bytes.
template <class Byte>
struct parcel {
    int peer = 0;
    Byte* base = nullptr;
    index_t stride = 0;
    index_t unit = 0;
    std::span<run const> rows, columns;

    index_t bytes() const {
        index_t row_count = 0, column_count = 0;
        for (run const r : rows) row_count += r.count;
        for (run const c : columns) column_count += c.count;
        return row_count * column_count * unit;
    }
};

using outgoing = parcel<std::byte const>;
using incoming = parcel<std::byte>;

namespace detail {

inline constexpr run one{0, 1};

} // namespace detail

/// Returns one end of a message of `bytes` consecutive bytes.
template <class Byte>
parcel<Byte> consecutive(int peer, Byte* data, index_t bytes) {
    return {peer, data, bytes, bytes, {&detail::one, 1}, {&detail::one, 1}};
}

/// Calls `f(bytes, count)` for the runs of consecutive bytes of a parcel, in the order in which both ends have them.
template <class Byte, class F>
void for_each_run(parcel<Byte> const& p, F&& f) {
    if (p.unit == 0) return;
    bool const dense = p.columns.size() == 1 && p.columns[0].count * p.unit == p.stride;
    for (run const r : p.rows) {
        Byte* row = p.base + r.first * p.stride;
        if (dense)
            f(row, static_cast<std::size_t>(r.count * p.stride));
        else
            for (index_t i = 0; i < r.count; ++i, row += p.stride)
                for (run const c : p.columns) f(row + c.first * p.unit, static_cast<std::size_t>(c.count * p.unit));
    }
}

/// Copies the bytes of a parcel to `to`, side by side.
inline void pack(outgoing const& from, std::byte* to) {
    for_each_run(from, [&](std::byte const* bytes, std::size_t count) {
        std::memcpy(to, bytes, count);
        to += count;
    });
}

/// Copies what `pack` has left at `from` to the places of a parcel.
inline void unpack(std::byte const* from, incoming const& to) {
    for_each_run(to, [&](std::byte* bytes, std::size_t count) {
        std::memcpy(bytes, from, count);
        from += count;
    });
}

/// Copies one end of a message to the other, without a buffer between them.
inline void copy(outgoing const& from, incoming const& to) {
    if (from.unit == 0) return;
    bool const dense = from.columns.size() == 1 && from.columns[0].count * from.unit == from.stride &&
                       from.stride == to.stride; // whole rows, side by side at both ends
    for (std::size_t i = 0; i < from.rows.size(); ++i) {
        std::byte const* source = from.base + from.rows[i].first * from.stride;
        std::byte* target = to.base + to.rows[i].first * to.stride;
        if (dense) {
            std::memcpy(target, source, static_cast<std::size_t>(from.rows[i].count * from.stride));
            continue;
        }
        for (index_t row = 0; row < from.rows[i].count; ++row, source += from.stride, target += to.stride)
            for (std::size_t k = 0; k < from.columns.size(); ++k)
                std::memcpy(target + to.columns[k].first * to.unit, source + from.columns[k].first * from.unit,
                            static_cast<std::size_t>(from.columns[k].count * from.unit));
    }
}

namespace detail {

/// Returns one end of messages, in a buffer of that rank's rows.
template <class Byte, class T>
std::vector<parcel<Byte>> parcels(std::span<message const> messages, rows<T> const& buffer) {
    std::vector<parcel<Byte>> list;
    list.reserve(messages.size());
    index_t const element = static_cast<index_t>(sizeof(T));
    for (message const& m : messages) {
        bool const whole = m.columns.empty();
        list.push_back({m.peer, reinterpret_cast<Byte*>(buffer.data()), buffer.stride() * element,
                        whole ? buffer.width() * element : element, m.rows,
                        whole ? std::span(&one, 1) : std::span(m.columns)});
    }
    return list;
}

/// Moves out of `list` the message to `rank` itself, if there is one.
template <class Byte>
parcel<Byte> take_own(std::vector<parcel<Byte>>& list, int rank) {
    auto const own = std::ranges::find(list, rank, &parcel<Byte>::peer);
    if (own == list.end()) return {};
    parcel<Byte> const taken = *own;
    list.erase(own);
    return taken;
}

/// Returns runs of the same counts, side by side from 0 on.
inline std::vector<run> side_by_side(std::vector<run> runs) {
    index_t first = 0;
    for (run& r : runs) {
        r.first = first;
        first += r.count;
    }
    return runs;
}

} // namespace detail

} // namespace cpx

// cpx/plan/traffic.hpp
// How much moves between two shardings, over all ranks.

namespace cpx {

/// Rows that each rank holds and each rank needs: `rows[i * W + j]`; on the diagonal, rows that stay.
///
/// Counts rows of which at least one column goes from i to j. Cost: O(runs of the batch).
template <any_sharding From, any_sharding To>
std::vector<index_t> traffic(From const& from, To const& to, caller here = caller::here()) {
    std::size_t const ranks = static_cast<std::size_t>(from.ranks());
    detail::require_same_group("traffic", from, to, here);
    auto rows = detail::zeros<index_t>("traffic", {from.ranks(), from.ranks()}, here);
    for (int i = 0; i < from.ranks(); ++i) {
        plan const p = relayout(from, to, i, here);
        for (message const& m : p.sends)
            rows[static_cast<std::size_t>(i) * ranks + static_cast<std::size_t>(m.peer)] += total(m.rows);
    }
    return rows;
}
template <class X = detail::any>
std::vector<index_t> traffic(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: traffic(from, to) wants two shardings, such as shard(batch, zigzag<4>{}) "
                                    "returns");
    return {};
}

/// Rows of which all or some columns move, and what moves of them in elements.
struct volume {
    index_t rows = 0;
    index_t elements = 0;
    friend constexpr bool operator==(volume, volume) = default;
};

/// Counts what no exchange between the shardings can do without, from ownership alone, not from plans.
///
/// For every rank j: the rows that it needs and does not have whole, counted once for every rank that must supply some
/// of their columns: the holder of the row or, where every rank holds every row, the lowest holder of each head that j
/// lacks.
/// `width`: elements of a row if there are no sections. Cost: O(runs of the batch + sections * W^2).
template <any_sharding From, any_sharding To>
volume lower_bound(From const& from, To const& to, index_t width = 1, caller here = caller::here()) {
    char const* const where = "lower_bound";
    detail::require_same_group(where, from, to, here);
    detail::product(where, "elements", {from.ranks(), from.batch().tokens(), width}, here);
    section const whole{1, width};
    std::span<section const> sections = from.sections().empty() ? to.sections() : from.sections();
    if (sections.empty()) sections = std::span(&whole, 1);
    volume bound;
    for (int j = 0; j < to.ranks(); ++j) {
        index_t needed_rows = to.rows(j);
        if constexpr (From::every_row) {
            std::vector<index_t> supplied(static_cast<std::size_t>(from.ranks())); // elements of a row, by supplier
            for (section const& s : sections) {
                range const needed = to.heads(j, s.heads), own = from.heads(j, s.heads);
                index_t next = 0; // the first head that no lower rank holds: shares ascend with ranks
                for (int i = 0; i < from.ranks(); ++i) {
                    range const held = from.heads(i, s.heads);
                    range const lacking = intersect({std::max(next, held.first), held.last}, needed);
                    next = std::max(next, held.last);
                    supplied[static_cast<std::size_t>(i)] +=
                        (lacking.size() - intersect(lacking, own).size()) * s.width;
                }
            }
            for (index_t const elements : supplied) {
                bound.rows += elements > 0 ? needed_rows : 0;
                bound.elements += elements * needed_rows;
            }
        } else {
            index_t hint = 0;
            from.for_each_piece(j, [&](range own) { // what j has already
                to.for_each_holder(own, hint,
                                   [&](int holder, range common) { needed_rows -= holder == j ? common.size() : 0; });
            });
            bound.rows += needed_rows;
            bound.elements += needed_rows * detail::local_width(to, j, sections);
        }
    }
    return bound;
}
template <class X = detail::any>
volume lower_bound(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: lower_bound(from, to, width) wants two shardings and perhaps the elements of "
                                    "a row");
    return {};
}

/// Counts the rows that no halo of `reach` rows can do without: those beside a segment of a rank that are not its own,
/// each once. Cost: O(W tokens); for reports and tests.
template <any_sharding S>
index_t halo_lower_bound(S const& sharding, index_t reach, side where = side::before, caller here = caller::here()) {
    detail::product("halo_lower_bound", "rows beside a segment", {reach}, here);
    index_t bound = 0;
    for (int rank = 0; rank < sharding.ranks(); ++rank) {
        auto needed = detail::zeros<bool>("halo_lower_bound", {sharding.batch().tokens()}, here);
        for (segment const& s : segments(sharding, rank)) {
            index_t const first = sharding.batch().offset(s.sequence), start = first + s.token, end = start + s.count;
            index_t row = where == side::before ? std::max(first, start - reach) : end;
            index_t const last =
                where == side::before ? start : std::min(first + sharding.batch().length(s.sequence), end + reach);
            for (; row < last; ++row) needed[static_cast<std::size_t>(row)] = true;
        }
        sharding.for_each_piece(rank, [&](range own) {
            for (index_t row = own.first; row < own.last; ++row) needed[static_cast<std::size_t>(row)] = false;
        });
        bound += std::ranges::count(needed, true);
    }
    return bound;
}
template <class X = detail::any>
index_t halo_lower_bound(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: halo_lower_bound(sharding, reach, side) wants a sharding and a number of rows");
    return 0;
}

} // namespace cpx

// cpx/plan/difference.hpp
// In what two plans differ, as errors say it: of batches the first offset, though an identity has but a hash of them.

namespace cpx::detail {

/// The batches of the plans that this process has compared or run last, some hundred of them. Any thread may call.
class known_batches {
public:
    /// Called before every exchange: a plan that was compared long ago is known while it runs.
    static void note(thd const& batch) {
        static thread_local std::uint64_t last = 0;
        if (last == batch.hash()) return; // layers run plans of one batch
        known_batches& all = here();
        std::scoped_lock const lock(all.guard_);
        last = batch.hash();
        entry* place = all.place_of(last);
        if (!place) place = &*std::ranges::min_element(all.entries_, {}, &entry::used);
        if (place->hash != last || !place->batch) *place = {last, 0, batch};
        place->used = ++all.notes_;
    }
    static std::optional<thd> find(std::uint64_t hash) {
        known_batches& all = here();
        std::scoped_lock const lock(all.guard_);
        entry const* const place = all.place_of(hash);
        return place ? place->batch : std::nullopt;
    }

private:
    struct entry {
        std::uint64_t hash = 0, used = 0; ///< the number of the note that was the last of this batch
        std::optional<thd> batch = {};
    };

    static known_batches& here() {
        static known_batches all;
        return all;
    }
    entry* place_of(std::uint64_t hash) {
        auto const found = std::ranges::find_if(entries_, [&](entry const& e) { return e.hash == hash && e.batch; });
        return found == entries_.end() ? nullptr : &*found;
    }

    std::mutex guard_;
    std::array<entry, 128> entries_;
    std::uint64_t notes_ = 0;
};

/// The first field in which two identities differ; where that tells of batches which this process knows, the first
/// offset, or else valid length.
class difference {
public:
    difference(identity const& mine, identity const& theirs)
        : field_(mine.first_difference(theirs)), batch_(mine.numbers[identity::cu_seqlens]),
          of_batches_(needs_batch(field_) && batch_ != 0 && theirs.numbers[identity::cu_seqlens] != 0) {
        if (field_ < 0) return;
        name_ = mine.name(field_);
        if (!of_batches_) return;
        auto const a = batch_of(mine), b = batch_of(theirs);
        if (!a || !b) return;
        for (bool const valid : {false, true})
            for (index_t i = 0; !number_ && i < std::max(a->sequences(), b->sequences()) + !valid; ++i)
                if (value(*a, i, valid) != value(*b, i, valid)) number_ = i, valid_ = valid;
        if (number_)
            name_ = (valid_ ? "the valid length of sequence " : "offset ") + std::to_string(*number_) +
                    (valid_ ? "" : " of cu_seqlens");
    }

    /// Returns whether there is none.
    bool empty() const { return field_ < 0; }
    /// Returns whether it is as said above; not, where batches differ of which this process does not know both.
    bool exact() const { return !of_batches_ || number_; }
    std::string const& name() const { return name_; }
    /// Returns what a plan has there.
    std::string value(identity const& of) const {
        if (!number_ && field_ == of_hash) return of.numbers[identity::cu_seqlens] == batch_ ? "one batch" : "another";
        if (!number_) return of.value(field_);
        auto const batch = batch_of(of);
        return batch ? value(*batch, *number_, valid_) : "another";
    }

private:
    static constexpr int of_hash = identity::texts + static_cast<int>(identity::cu_seqlens);
    /// Returns whether a field sums up the batch, and is none of its first offsets.
    static bool needs_batch(int field) {
        int const offset = field - identity::texts - static_cast<int>(identity::first_offset);
        int const last = static_cast<int>(identity::last_offset) - static_cast<int>(identity::first_offset);
        return identity::of_batch(field) && (offset < 0 || offset > last);
    }
    static std::optional<thd> batch_of(identity const& id) {
        return known_batches::find(id.numbers[identity::cu_seqlens]);
    }
    static std::string value(thd const& batch, index_t i, bool valid) {
        if (i >= batch.sequences() + !valid) return "none";
        return std::to_string(valid ? batch.valid(i) : batch.offset(i));
    }

    int field_;
    std::uint64_t batch_; ///< its hash, 0 of no batch
    bool of_batches_;
    std::string name_ = {};
    std::optional<index_t> number_ = {}; ///< of the offset, or valid length
    bool valid_ = false;
};

} // namespace cpx::detail

// cpx/transport/concept.hpp
// What a transport is: it knows its rank and moves rectangles of bytes between ranks.

namespace cpx {

/// One rank's end of a group of ranks 0 .. ranks() - 1, by which `exchange` moves messages between them.
///
/// `transfer(id, sends, receives)` moves one rank's messages of one exchange. Its caller keeps to this:
///
/// - It has at most one message to and one from each peer, in ascending order of peers, and none to itself. Either list
///   may be empty, or both. A message may have no bytes; both ends know that.
/// - A call is no barrier: a rank may be any number of calls ahead of one that it has no messages with. Two ranks make
///   the calls in which they have messages for each other in the same order.
/// - The id, the lists and what they point to live until the call returns, and no longer. One thread calls at a time.
///
/// A transport owes it this:
///
/// - The call returns when its sends have been taken, so that their memory may be written, and its receives have
///   arrived (on a device: when that is enqueued). Messages from one rank to another arrive in the order of the calls;
///   any size arrives, in both directions at once. Nothing beside the places of the receives is written.
/// - No wait is without end: the call throws `cpx::error` when a rank that it waits for has failed, has left the group,
///   or does not come within a deadline. A rank whose program fails therefore tells the others, or is seen to be gone.
///   After an error targets hold anything, and the transport may stay broken: then every later call throws.
/// - `agreed()`, in which cpx keeps the fingerprints of plans that all ranks have compared, is each rank's own. It is
///   empty in every new group, lives as long as that, and keeps between calls what is put there.
///
/// These are courtesies: to name the rank at fault in the error, at once, and to check the id. The ranks of one call
/// have the same id, or all compare their plans (see `identity::agreement`). A transport that sends the id along and
/// gives it to `require_same_exchange` finds ranks in different exchanges; another one mixes their rows.
///
/// `testing::check_transport` tests all of this.
template <class T>
concept transport =
    requires(T& t, identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives) {
        { t.rank() } -> std::same_as<int>;
        { t.ranks() } -> std::same_as<int>;
        { t.agreed() } -> std::same_as<std::unordered_set<std::uint64_t>&>;
        t.transfer(id, sends, receives);
    };

/// A transport whose ranks have memory of their own kind, such as devices. What is asked of it is enqueued in a stream,
/// that of `memory()`; it runs plans itself, after the checks that all transports share, and agrees on them as they do.
///
/// `rows` that it is given are in that memory. Any elements that a plan can move, not float alone. All ranks make each
/// call, which is no barrier either. `wait` returns when the stream has come to what was asked last; it throws
/// `cpx::error` for what was found meanwhile, such as ranks that move rows of another batch, and when a rank has
/// failed, has left the group or does not come within a deadline. `T::prepared<T, Plan>` is what a `movement` prepares.
///
/// `testing::check_transport` tests this, too.
template <class T>
concept device_transport =
    requires(T& t, plan const& p, rows<float const> const& from, rows<float> const& to, caller here) {
        { t.rank() } -> std::same_as<int>;
        { t.ranks() } -> std::same_as<int>;
        requires any_memory<typename T::memory_type>;
        { t.memory() } -> std::convertible_to<typename T::memory_type>;
        t.exchange(p, from, to, here);
        t.wait(here);
    };

template <class T>
concept any_transport = transport<T> || device_transport<T>;

/// Returns the memory that the ranks of a transport have.
template <any_transport Comm>
auto rank_memory(Comm const& comm) {
    if constexpr (device_transport<Comm>)
        return typename Comm::memory_type(comm.memory());
    else
        return host_memory();
}
template <any_transport Comm>
using rank_memory_of = decltype(rank_memory(std::declval<Comm const&>()));

namespace detail {

/// What a class on a transport deduces where none fits; its constructor says so.
struct no_transport {
    int rank() const;
    int ranks() const;
    std::unordered_set<std::uint64_t>& agreed();
    void transfer(identity const&, std::span<outgoing const>, std::span<incoming const>);
};

/// Returns this rank. Throws `cpx::error` if the sharding is not of as many ranks as the transport.
template <any_sharding S, any_transport Comm>
int rank_in(char const* where, S const& sharding, Comm const& comm, caller here) {
    require(sharding.ranks() == comm.ranks(), where, "ranks of the sharding", comm.ranks(), sharding.ranks(), here);
    return comm.rank();
}

} // namespace detail

/// Returns a tensor of zeros for this rank of a transport, in its memory: `make_tensor<float>(sharding, comm, width)`.
template <class T, any_sharding S, any_transport Comm>
tensor<T, S, rank_memory_of<Comm>> make_tensor(S const& sharding, Comm const& comm, index_t width,
                                               caller here = caller::here()) {
    return {sharding, detail::rank_in("make_tensor", sharding, comm, here), width, rank_memory(comm), here};
}

/// Returns rows of zeros for this rank that are no batch's, such as a weight: `make_rows<float>(comm, channels, taps)`.
template <class T, any_transport Comm>
row_buffer<T, rank_memory_of<Comm>> make_rows(Comm const& comm, index_t count, index_t width,
                                              caller here = caller::here()) {
    return {rank_memory(comm), count, width, here};
}
template <class T = void, class X = detail::any>
detail::refused make_rows(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: make_rows<T>(comm, count, width) wants a cpx::transport and how many rows of which width");
    return {};
}

namespace detail {

inline std::string names(std::vector<int> const& ranks) {
    std::string text = ranks.size() == 1 ? "rank" : "ranks";
    for (int const rank : ranks) text += ' ' + std::to_string(rank);
    return text;
}

/// Returns what a transport tells other ranks of its own error, whose line would be one of the library.
inline std::string reason(std::exception const& e) {
    auto const* const own = dynamic_cast<error const*>(&e);
    return own ? own->message() : e.what();
}

/// Returns `deadline`, or a year if it is longer. Throws `cpx::error` if it is not positive.
inline std::chrono::milliseconds checked_deadline(char const* where, std::chrono::milliseconds deadline, caller here) {
    require(deadline.count() > 0, where, "deadline, ms", "more than 0", deadline.count(), here);
    return std::min<std::chrono::milliseconds>(deadline, std::chrono::hours(24 * 365));
}

/// The error of `rank`, which waits in an exchange for a rank that has left the group. `last`: the last exchange of
/// that one, or null. Where ranks have no rows for each other, nothing before this shows that their batches differ.
inline error gone(char const* where, int rank, identity id, int peer, identity const* last) {
    std::string const me = "rank " + std::to_string(rank), who = "rank " + std::to_string(peer);
    std::string const problem = me + " waits in " + id.text() + " for " + who;
    std::string got = "its return";
    if (last) {
        got += " after " + last->text();
        identity other = *last;
        id[identity::agreement] = other[identity::agreement] = 0;
        difference const first(other, id);
        if (!first.exact())
            got += ", of another batch";
        else if (!first.empty())
            got += " (" + first.name() + ": " + first.value(other) + " on " + who + ", " + first.value(id) + " on " +
                   me + ')';
    }
    return {where, problem, who + " to take part", got};
}

/// The error of ranks that wait for each other in exchanges of which two are `mine` and `theirs`. `in`: the exchange of
/// every rank, null for those that are in none or wait for others.
inline error apart(char const* where, identity const& mine, identity const& theirs,
                   std::vector<identity const*> const& in) {
    difference const first(mine, theirs);
    std::vector<std::string> values;
    for (identity const* id : in) values.push_back(id ? first.value(*id) + " in " + id->text() : "none");
    return {where, "ranks are in different exchanges: " + first.name(), "one on all ranks", who_has_what(values)};
}

/// The ranks that one waits for in an exchange: for their messages, and for them to take its own.
struct waits {
    std::vector<int> silent, deaf;

    bool none() const { return silent.empty() && deaf.empty(); }
    template <class F>
    void each(F&& f) const {
        for (auto const* peers : {&silent, &deaf})
            for (int const peer : *peers) f(peer);
    }
};

/// Returns the ranks that keep `rank` waiting, itself or by others, and do not wait themselves, as far as is known.
/// `waits_of(rank)`: the waits of a rank, or null.
template <class F>
std::vector<int> missing(int rank, F&& waits_of) {
    std::vector<int> seen{rank}, found;
    for (std::size_t i = 0; i < seen.size(); ++i) {
        waits const* const of = waits_of(seen[i]);
        if (!of) found.push_back(seen[i]);
        if (!of) continue;
        of->each([&](int peer) {
            if (std::ranges::find(seen, peer) == seen.end()) seen.push_back(peer);
        });
    }
    std::ranges::sort(found);
    return found;
}

/// The error of `rank`, which has waited in an exchange. `missing`: see above.
inline error late(char const* where, int rank, identity const& id, waits const& of, std::vector<int> const& missing,
                  std::chrono::milliseconds deadline) {
    auto const& [silent, deaf] = of;
    return {where,
            "rank " + std::to_string(rank) + " waited in " + id.text() +
                (silent.empty() ? "" : " for messages of " + names(silent)) +
                (silent.empty() || deaf.empty() ? "" : " and") +
                (deaf.empty() ? "" : " for " + names(deaf) + " to take theirs"),
            "an end within " + std::to_string(deadline.count()) + " ms",
            missing.empty() ? "ranks that wait for each other" : "nothing from " + names(missing)};
}

} // namespace detail

/// Throws `cpx::error`, which names both ranks and the first field in which their plans differ, unless the exchange
/// `mine`, which `rank` is in, is that of a message from `peer`. `where` is the transport's name. Of batches it names
/// the first offset, or valid length, if this process has exchanged rows of both.
inline void require_same_exchange(char const* where, identity const& mine, int rank, identity const& theirs, int peer) {
    if (mine.same_exchange(theirs)) return;
    detail::difference const first(mine, theirs);
    auto const place = [&](identity const& id, char const* on, int r) {
        return first.value(id) + on + std::to_string(r) + " (" + id.text() + ")";
    };
    throw error(where, "ranks are in different exchanges: " + first.name(), place(mine, " as on rank ", rank),
                place(theirs, " on rank ", peer));
}

} // namespace cpx

// cpx/transport/gather.hpp
// Records of every rank, over any transport: for set-up and agreement, not for rows.

namespace cpx {

namespace detail {

/// Moves messages; an error of the transport is thrown with the line of the caller, the rank's place in its program.
template <transport Comm>
void transfer(Comm& comm, identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives,
              caller here) {
    try {
        comm.transfer(id, sends, receives);
    } catch (error const& e) {
        throw error(e.where(), e.problem(), e.expected(), e.got(), here);
    }
}

inline identity named(std::string_view operation, std::size_t bytes) {
    identity id;
    identity::set(id.operation, operation);
    id[identity::parameter] = bytes;
    return id;
}

/// Gathers of every rank its own number of bytes: those of rank r to `all + begins[r]`, up to `begins[r + 1]`.
template <transport Comm>
void gather(Comm& comm, identity const& id, void const* mine, void* all, std::vector<index_t> const& begins,
            caller here) {
    std::vector<outgoing> sends;
    std::vector<incoming> receives;
    auto* const places = static_cast<std::byte*>(all);
    auto const begin = [&](int rank) { return begins[static_cast<std::size_t>(rank)]; };
    auto const size = [&](int rank) { return begin(rank + 1) - begin(rank); };
    for (int peer = 0; peer < comm.ranks(); ++peer) {
        if (peer == comm.rank()) continue;
        sends.push_back(consecutive(peer, static_cast<std::byte const*>(mine), size(comm.rank())));
        receives.push_back(consecutive(peer, places + begin(peer), size(peer)));
    }
    if (size(comm.rank()) > 0)
        std::memmove(places + begin(comm.rank()), mine, static_cast<std::size_t>(size(comm.rank())));
    transfer(comm, id, sends, receives, here);
}

template <transport Comm>
void gather(Comm& comm, identity const& id, void const* mine, void* all, std::size_t bytes, caller here) {
    std::vector<index_t> begins;
    for (int rank = 0; rank <= comm.ranks(); ++rank) begins.push_back(rank * static_cast<index_t>(bytes));
    gather(comm, id, mine, all, begins, here);
}

/// Throws unless there is memory for the bytes of all ranks, which may hold a rank's own only where they will be.
inline void check_gather(void const* mine, void* all, std::size_t bytes, int rank, int ranks, caller here) {
    char const* const where = "gather";
    require(bytes < (std::size_t{1} << 62) / static_cast<std::size_t>(ranks), where, "bytes",
            "of all ranks together less than 2^62", bytes, here);
    require(bytes == 0 || (mine != nullptr && all != nullptr), where, "memory of mine and of all", "some", "none",
            here);
    auto const count = static_cast<index_t>(bytes);
    rows<std::byte const> const own(static_cast<std::byte const*>(mine), 1, count);
    rows<std::byte const> const whole(static_cast<std::byte const*>(all), 1, count * ranks);
    if (bytes > 0 && own.data() != whole.data() + rank * count)
        require_apart(where, {{"all", whole}}, {{"mine", own}}, here);
}

} // namespace detail

/// Gathers `bytes` of every rank into `all`, in rank order. Collective; equally many on all ranks. `mine` lies apart
/// from `all`, or in its own place there.
///
/// Cost: a message between each two ranks. Throws `cpx::error` on unfit memory, and what the transport throws.
template <transport Comm>
void gather(Comm& comm, void const* mine, void* all, std::size_t bytes, caller here = caller::here()) {
    detail::check_gather(mine, all, bytes, comm.rank(), comm.ranks(), here);
    detail::gather(comm, detail::named("gather", bytes), mine, all, bytes, here);
}
template <class X = detail::any>
detail::refused gather(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: gather(comm, mine, all, bytes) gathers bytes; rows of a tensor come by "
                                    "exchange(x, replicated<>(ranks, batch), comm)");
    return {};
}

/// Replaces `bytes` by those of rank 0. Collective; equally many on all ranks. Throws what the transport throws.
template <transport Comm>
void broadcast(Comm& comm, std::span<std::byte> bytes, caller here = caller::here()) {
    std::vector<outgoing> sends;
    std::vector<incoming> receives;
    if (comm.rank() > 0) receives.push_back(consecutive(0, bytes.data(), std::ssize(bytes)));
    for (int peer = 1; comm.rank() == 0 && peer < comm.ranks(); ++peer)
        sends.push_back(consecutive<std::byte const>(peer, bytes.data(), std::ssize(bytes)));
    detail::transfer(comm, detail::named("broadcast", bytes.size()), sends, receives, here);
}
template <class X = detail::any>
detail::refused broadcast(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: broadcast(comm, bytes) wants std::as_writable_bytes(std::span(values))");
    return {};
}

} // namespace cpx

// cpx/transport/agree.hpp
// Ranks compare what they are about to run, and say who has what where they differ.

namespace cpx {

namespace detail {

/// Finds the first of `count` numbers, none of which is negative, in which ranks differ, and throws what names it.
/// `gather` as below; each call of it brings some hundred numbers of every rank, until all have seen where they differ.
template <class Number, class Name, class Gather>
void compare_numbers(char const* where, index_t count, Number&& number, Name&& name, int ranks, Gather&& gather,
                     caller here) {
    static constexpr index_t none = -1;
    std::array<index_t, 256> mine;
    std::vector<decltype(mine)> all(static_cast<std::size_t>(ranks));
    for (std::size_t first = 0;; first += mine.size()) {
        for (std::size_t i = 0; i < mine.size(); ++i) {
            auto const n = static_cast<index_t>(first + i);
            mine[i] = n < count ? number(n) : none;
        }
        gather(mine.data(), all.data(), sizeof mine);
        for (std::size_t i = 0; i < mine.size(); ++i) {
            if (std::ranges::all_of(all, [&](auto const& theirs) { return theirs[i] == all[0][i]; })) continue;
            std::vector<std::string> values;
            for (auto const& theirs : all) values.push_back(theirs[i] == none ? "none" : std::to_string(theirs[i]));
            throw error(where, "ranks disagree on " + name(static_cast<index_t>(first + i)), "one value on all ranks",
                        who_has_what(values), here);
        }
        if (mine.back() == none) return; // on all ranks, for they are equal so far
    }
}

template <class Gather>
void compare_batches(char const* where, thd const& batch, int ranks, Gather&& gather, caller here) {
    compare_numbers(
        where, batch.sequences() + 1, [&](index_t i) { return batch.offset(i); },
        [](index_t i) { return "offset " + std::to_string(i) + " of cu_seqlens"; }, ranks, gather, here);
    compare_numbers(
        where, batch.sequences(), [&](index_t s) { return batch.valid(s); },
        [](index_t s) { return "the valid length of sequence " + std::to_string(s); }, ranks, gather, here);
}

template <class Gather>
void compare_settings(char const* where, char const* whose, settings const& of, int ranks, Gather&& gather,
                      caller here) {
    auto const read = [&](setting_list list) {
        if (of.from) of.from->read(list);
        return list;
    };
    auto const numbers = read({}).numbers;
    compare_numbers(
        where, std::ssize(numbers), [&](index_t i) { return numbers[static_cast<std::size_t>(i)]; },
        [&](index_t i) {
            return read({{}, i, "more settings than these"}).name + " of the " + whose + " sharding";
        },
        ranks, gather, here);
}

/// Throws unless all ranks have one identity. What it sums up, `batch` and the shardings' settings, they have at hand.
///
/// Collective: `gather(mine, all, bytes)` brings all ranks' records in rank order, so that all see, and do, the same.
template <class Gather>
void compare(char const* where, identity const& mine, thd const& batch, int ranks, Gather&& gather, caller here,
             settings const& source = {}, settings const& target = {}) {
    std::vector<identity> all(static_cast<std::size_t>(ranks));
    gather(&mine, all.data(), sizeof mine);
    if (std::ranges::count(all, mine) == ranks) return;
    for (int field = 0; field < identity::fields; ++field) {
        std::vector<std::string> values;
        for (identity const& theirs : all) values.push_back(theirs.value(field));
        if (std::ranges::count(values, values[0]) == ranks) continue;
        if (identity::of_batch(field)) compare_batches(where, batch, ranks, gather, here);
        if (std::ranges::any_of(values, identity::cut_short)) {
            bool const from = field == identity::texts + static_cast<int>(identity::source_hash);
            compare_settings(where, from ? "source" : "target", from ? source : target, ranks, gather, here);
        }
        throw error(where, "ranks disagree on " + mine.name(field), "one value on all ranks", who_has_what(values),
                    here);
    }
}

} // namespace detail

/// Lets all ranks compare what they are about to run, once for each fingerprint: `mine`, made from `of`. After
/// 1024 fingerprints all ranks forget them, and compare again what comes again.
///
/// Collective. Throws `cpx::error` on every rank, before anything moves, naming the first field in which the ranks
/// differ, of batches the first offset, of long tables the first owner, and who has which value. Cost, the first time:
/// one message of `sizeof(identity)` bytes between each two ranks. Errors begin with `by`.
template <transport Comm>
void agree(Comm& comm, identity const& mine, plan const& of, caller here = caller::here(),
           char const* by = "exchange") {
    detail::known_batches::note(of.batch);
    if (comm.agreed().contains(mine.fingerprint())) return;
    identity id = mine;
    id[identity::agreement] = 1;
    std::string where = by; // ranks are counted as `comm` counts them
    if constexpr (requires { comm.name(); }) where += " of " + comm.name();
    detail::compare(
        where.c_str(), mine, of.batch, comm.ranks(),
        [&](void const* own, void* all, std::size_t bytes) { detail::gather(comm, id, own, all, bytes, here); }, here,
        of.source_settings, of.target_settings);
    if (comm.agreed().size() >= 1024) comm.agreed().clear(); // on all ranks: they have agreed on the same
    comm.agreed().insert(mine.fingerprint());
}
template <class X = detail::any>
detail::refused agree(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: agree(comm, mine, of) wants a cpx::transport, the identity of a plan, plan.id, and the plan");
    return {};
}

} // namespace cpx

// cpx/transport/exchange.hpp
// Runs a plan over a transport.

namespace cpx {

namespace detail {

/// Whether all of `X` are in the memory of the ranks of a transport.
template <class Comm, class... X>
inline constexpr bool in_memory_of = (std::same_as<memory_of<X>, rank_memory_of<Comm>> && ...);

/// Returns whether what is done in two memories is in one order: on devices in one stream, whoever allocates.
template <any_memory M>
bool in_one_order(M const& a, M const& b) {
    if constexpr (requires { a.stream(); })
        return a.stream() == b.stream();
    else
        return a == b;
}

/// Rows at one end of an exchange, and the elements of each; 0: any.
struct end_shape {
    index_t rows, width;
};

template <class T>
void check_buffer(char const* by, char const* which, rows<T> const& buffer, end_shape const& end, caller here) {
    bool const no_rows = end.rows == 0 && buffer.count() == 0;
    bool const fits = no_rows || end.width == 0 || buffer.width() == end.width,
               apart = no_rows || buffer.stride() >= buffer.width();
    if (buffer.count() == end.rows && fits && apart && (buffer.data() || end.rows * buffer.width() == 0)) return;
    std::string const where = std::string(by) + ", " + which; // made where it is needed: this runs at every call
    require(buffer.count() == end.rows, where.c_str(), "rows of the buffer", end.rows, buffer.count(), here);
    require(fits, where.c_str(), "width of the buffer", end.width, buffer.width(), here);
    require(apart, where.c_str(), "stride of the buffer", in_words("at least its width ", buffer.width()),
            buffer.stride(), here);
    throw error(where.c_str(), "buffer", "memory", "null", here);
}

/// Throws `cpx::error` unless the buffers of an exchange, on host or device, are what it wants and do not overlap.
template <class A, class B>
void check_buffers(char const* by, rows<A> const& from, end_shape const& source, rows<B> const& to,
                   end_shape const& target, caller here) {
    check_buffer(by, "source", from, source, here);
    check_buffer(by, "target", to, target, here);
    require_apart(by, {{"target", to}}, {{"source", from}}, here);
}

/// Copies what stays and lets the transport move the rest into `receives`.
template <class A, class Comm>
void exchange_messages(plan const& p, identity const& id, rows<A> const& from, std::vector<incoming> receives,
                       Comm& comm, caller here, char const* by) {
    auto sends = parcels<std::byte const>(p.sends, from);
    auto const own = take_own(sends, p.rank);
    auto const kept = take_own(receives, p.rank);
    require(own.rows.size() == kept.rows.size() && own.bytes() == kept.bytes(), by, "bytes that stay", own.bytes(),
            kept.bytes(), here);
    copy(own, kept);
    transfer(comm, id, sends, receives, here);
}

/// Receives every contribution into a buffer of its own, then adds them in rank order, whatever the order of arrival.
template <class A, class B, class Comm>
void exchange_sum(plan const& p, identity const& id, rows<A> const& from, rows<B> const& to, Comm& comm, caller here,
                  char const* by) {
    std::vector<message> compact;
    std::vector<std::vector<B>> staged;
    std::vector<incoming> receives;
    compact.reserve(p.receives.size()); // parcels point into it
    for (message const& m : p.receives) {
        index_t const width = m.columns.empty() ? to.width() : total(m.columns);
        compact.push_back({m.peer, side_by_side(m.rows), side_by_side(m.columns)});
        staged.push_back(zeros<B>(by, {total(m.rows), width}, here));
        rows<B> const buffer(staged.back(), width);
        receives.push_back(parcels<std::byte>(std::span(&compact.back(), 1), buffer).front());
    }
    exchange_messages(p, id, from, std::move(receives), comm, here, by);
    for (std::size_t i = 0; i < p.receives.size(); ++i) {
        B const* value = staged[i].data();
        run const whole{0, to.width()};
        auto const& columns = p.receives[i].columns;
        for (run const r : p.receives[i].rows)
            for (index_t row = r.first; row < r.first + r.count; ++row)
                for (run const c : columns.empty() ? std::span(&whole, 1) : std::span(columns))
                    for (index_t column = c.first; column < c.first + c.count; ++column) to(row, column) += *value++;
    }
}

/// The function whose exchange it is, which errors name, and other ranks, too; and what that is given beside tensors.
struct run_for {
    char const* by;
    identity::arguments given = {};
    run_for(char const* function = "exchange", identity::arguments const& alike = {}) : by(function), given(alike) {}
};

/// Returns what ranks compare before a function runs a plan for elements T in rows of `width`.
template <class T>
identity identity_of(plan const& p, index_t width, run_for const& of) {
    identity id = p.id.for_elements<T>(width);
    std::string_view const function = of.by, operation = id.operation.data();
    if (function != "exchange" && !operation.starts_with(function.substr(0, function.find("::")))) id.run_by(of.by);
    if (of.given != identity::arguments{}) id.set_arguments(of.given);
    return id;
}

template <class A, class B, transport Comm>
void run_plan(plan const& p, rows<A> from, rows<B> to, Comm& comm, caller here, run_for const& of) {
    char const* const by = of.by;
    identity const id = identity_of<B>(p, from.width(), of);
    if (!p.local) agree(comm, id, p, here, by);

    if (p.kind == flow::sums || !p.covers_target())
        for (index_t i = 0; i < to.count(); ++i) std::fill_n(to.row(i), to.width(), B{});
    if constexpr (requires(B sum, B const term) { sum += term; }) {
        if (p.kind == flow::sums) return exchange_sum(p, id, from, to, comm, here, by);
    }
    exchange_messages(p, id, from, parcels<std::byte>(p.receives, to), comm, here, by);
}
template <class A, class B, device_transport Comm>
void run_plan(plan const& p, rows<A> from, rows<B> to, Comm& comm, caller here, run_for const&) {
    comm.exchange(p, rows<B const>(from), to, here);
}

template <class A, class B, class Comm>
void exchange_rows(plan const& p, rows<A> from, rows<B> to, Comm& comm, caller here, run_for const& of = {}) {
    if constexpr (checked_element<B>::value) {
        char const* const by = of.by;
        require_own(by, "rank of the plan", p.rank, p.ranks(), comm.rank(), comm.ranks(), here);
        check_buffers(by, from, {p.source_rows, p.source_width}, to, {p.target_rows, p.target_width}, here);
        require(p.target_width != 0 || to.width() == from.width(), by, "width of the target", from.width(), to.width(),
                here);
        constexpr bool addable = requires(B sum, B const term) { sum += term; };
        require(addable || p.kind != flow::sums, by, "elements of a plan that sums",
                "a type with +=", std::string(type_name<B>()), here);
        run_plan(p, from, to, comm, here, of);
    }
}

} // namespace detail

/// Runs a plan: moves this rank's rows of `from` to where they belong in everybody's `to`.
///
/// `from` is (plan.source_rows, width), `to` is (plan.target_rows, width); they must not overlap. Every place of `to`
/// is written: with what the plan brings, or with 0 where it brings nothing. Bits are preserved, NaN payloads included;
/// a plan that sums adds in rank order.
/// Collective: every rank calls it with its own side of the same plan. Rows that stay are copied once.
///
/// Throws `cpx::error` before anything moves if a buffer does not fit, or if the ranks' plans differ (see `agree`);
/// later if a rank fails or misses the transport's deadline.
template <std::derived_from<plan> Plan, class A, class B, any_transport Comm>
void exchange(Plan const& p, rows<A> from, rows<B> to, Comm& comm, caller here = caller::here()) {
    constexpr bool fits = elements_of<A, B>;
    static_assert(fits, "cpx: exchange between elements of two types, or into elements that are const; give the target "
                        "the elements of the source");
    if constexpr (fits)
        if constexpr (detail::checked_element<B>::value) detail::exchange_rows(p, from, to, comm, here);
}

/// Runs a relayout between tensors whose types say how they are sharded, and in which memory; otherwise as above.
///
/// A tensor of another sharding than the plan's, or of another memory than the transport's ranks have, does not
/// compile; a sharding of the same type and another value throws, and so does another stream.
template <any_sharding From, any_sharding To, sharded_anywhere X, sharded_anywhere Y, any_transport Comm>
void exchange(relayout_plan<From, To> const& p, X const& from, Y&& to, Comm& comm, caller here = caller::here()) {
    constexpr bool source = detail::sharded_as<From, X>, target = detail::sharded_as<To, Y>;
    constexpr bool writes = detail::writes<Y>, there = detail::in_memory_of<Comm, X, Y>;
    static_assert(source || detail::never<element_of<X>>,
                  "cpx: exchange of a tensor that is not sharded as the plan's source; make the plan with "
                  "relayout(tensor.sharding(), ...)");
    static_assert(!source || target,
                  "cpx: exchange into a tensor that is not sharded as the plan's target; make the plan with "
                  "relayout(..., tensor.sharding(), ...)");
    static_assert(!source || !target || writes,
                  "cpx: exchange into a tensor that is const or ends with the call; give it a name");
    static_assert(!writes || there,
                  "cpx: exchange of tensors in another memory than that of the transport's ranks; make them "
                  "with make_tensor<T>(sharding, comm, width)");
    if constexpr (source && target && writes && there && detail::checked_element<element_of<X>>::value) {
        auto const x = from.view();
        auto const y = to.view();
        detail::require_place("exchange", "the source", x, p.from, p.rank, "the plan's", here);
        detail::require_place("exchange", "the target", y, p.to, p.rank, "the plan's", here);
        auto const& memory = rank_memory(comm);
        bool const there_too = detail::in_one_order(x.memory(), memory) && detail::in_one_order(y.memory(), memory);
        require(there_too, "exchange", "memory of the tensors", "the transport's, in its stream", "another", here);
        exchange(static_cast<plan const&>(p), x.data(), y.data(), comm, here);
    }
}

/// Runs a relayout into a tensor of its own, in the memory of `from`.
template <any_sharding From, any_sharding To, sharded_anywhere X, any_transport Comm>
tensor<element_of<X>, To, memory_of<X>> exchange(relayout_plan<From, To> const& p, X const& from, Comm& comm,
                                                 caller here = caller::here()) {
    index_t const width = p.target_width ? p.target_width : from.view().data().width();
    tensor<element_of<X>, To, memory_of<X>> to(p.to, p.rank, width, from.view().memory(), here);
    if constexpr (element<element_of<X>>) exchange(p, from, to, comm, here);
    return to;
}

/// Moves this rank's rows of `from` to another sharding: a relayout that is made for this one call. Collective.
template <sharded_anywhere X, any_sharding To, any_transport Comm>
tensor<element_of<X>, To, memory_of<X>> exchange(X const& from, To const& to, Comm& comm,
                                                 caller here = caller::here()) {
    auto const x = from.view();
    detail::require_own("exchange", "rank of the tensor", x.rank(), x.sharding().ranks(), comm.rank(), comm.ranks(),
                        here);
    return exchange(relayout(x.sharding(), to, x.rank(), here), x, comm, here);
}

template <class Plan, class X, class Y, class Comm>
detail::refused exchange(Plan const&, X const&, Y&&, Comm&, caller = caller::here()) {
    static_assert(detail::never<Plan, X, std::remove_cvref_t<Y>>,
                  "cpx: exchange(plan, from, to, comm) wants a relayout_plan and two tensors, or any plan and two "
                  "cpx::rows, and a cpx::transport; view memory as sharded, or as rows");
    return {};
}
template <class Plan, class X>
detail::refused exchange(Plan const&, X const&, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<Plan, X>,
                  "cpx: exchange(plan, x, comm) wants a relayout_plan, a tensor and a cpx::transport, and exchange(x, "
                  "sharding, comm) a tensor, a sharding and a cpx::transport; give other plans rows and a target");
    return {};
}
template <class Spelled = detail::any, class Plan = Spelled>
detail::refused exchange(Plan const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                         detail::any = {}) { // alone, with a list in braces or too many, of elements spelled out
    static_assert(detail::never<Plan>,
                  "cpx: exchange(plan, x, comm) wants a relayout_plan, a tensor and a cpx::transport, and exchange(x, "
                  "sharding, comm) a tensor, a sharding and a cpx::transport; give other plans rows and a target");
    return {};
}

} // namespace cpx

// cpx/transport/movement.hpp
// Relayouts, halos and carries that are prepared once, for every batch that comes.

namespace cpx {

namespace detail {

/// What ranks prepare to run a plan, and others later. On the host that is nothing.
template <class T, class Plan, class Comm>
class prepared {
    using kind = moved<Plan>;

public:
    prepared(Plan const&, typename kind::width width, capacity const&, Comm& comm, caller)
        : comm_(comm), width_(width) {}
    /// `plan_of()`: returns the plan of the batch, which need not be made before.
    template <class F>
    void set(typename kind::batch const&, F&& plan_of, caller) {
        plan_of();
    }
    template <class F>
    void operator()(F&& plan_of, bool back, index_t number, rows<T const> from, rows<T> to, caller here) {
        kind::exchanges(plan_of(), width_, back, [&](std::span<plan const> plans) {
            exchange_rows(plans[static_cast<std::size_t>(number)], from, to, comm_, here, "movement");
        });
    }
    /// `rows_of(plan_of, number, here)`: returns how many rows an exchange takes, and how many it brings.
    template <class F>
    std::pair<index_t, index_t> rows_of(F&& plan_of, index_t number, caller) const {
        return kind::exchanges(plan_of(), width_, false, [&](std::span<plan const> plans) {
            plan const& p = plans[static_cast<std::size_t>(number)];
            return std::pair(p.source_rows, p.target_rows);
        });
    }
    host_memory memory() const { return {}; }

private:
    Comm& comm_;
    typename kind::width width_;
};

template <class T, class Plan, class Comm>
struct prepared_by {
    using type = prepared<T, Plan, Comm>;
};
/// On devices it is what their transport makes.
template <class T, class Plan, device_transport Comm>
struct prepared_by<T, Plan, Comm> {
    using type = typename Comm::template prepared<T, Plan>;
};

template <class Plan>
inline constexpr bool is_relayout = requires(Plan const& p) { p.to; };

} // namespace detail

/// Moves rows of T by `relayout_plan`s, `halo_plan`s or `carry_plan`s, whichever batch they are of.
///
/// Made once, by all ranks: on devices it connects them and reserves memory for `most`. The plan of another batch is
/// made by `set`, or by a call with tensors of that batch: on the host, without device memory or a wait. On threads and
/// over MPI all ranks compare a new plan in its first call (see `agree`), for ranks that have no rows for each other
/// would not hear that theirs differ. Belongs to one thread; the transport outlives it.
template <class T, class Plan, any_transport Comm>
class movement {
    using kind = detail::moved<Plan>;

public:
    /// `first`: the plan of a first batch, at most as large as `most`; `width`: elements of a row, unless a sharding
    /// has sections, or those of states and maps; the same for all batches. Collective. Throws `cpx::error` as
    /// `exchange` does.
    movement(Plan first, typename kind::width width, capacity most, Comm& comm, caller here = caller::here())
        : plan_(std::move(first)), now_(kind::batch_of(plan_)), width_(width), most_(checked(most, here)),
          memory_(rank_memory(comm)), prepared_(plan_, width, most, comm, here) {}

    /// Makes ready for another batch, unless it is the last one. Every rank does so, none waits. Throws `cpx::error` if
    /// it has other ranks or sections than this movement was prepared for, or more rows or sequences; then all is as
    /// before. If ranks have different batches, the next call says so, on devices the wait after it.
    ///
    /// On devices the host counts rows of messages, where lanes tell what moves, or lists runs of rows: of a halo or a
    /// carry over the batch or beside sequences shorter than chunks times (reach + unit of the cut); of a relayout over
    /// the batch with a cut that is not `balanced`, or between scopes; of `by_length`. With 64 sequences over 2 ranks a
    /// list takes 2 to 15 us of host time, not 1 to 5, and up to four times that with cold caches; none waits.
    template <class... S>
    void set(std::tuple<S...> const& shardings, caller here = caller::here()) {
        constexpr bool fits = std::same_as<std::tuple<S...>, typename kind::batch>;
        static_assert(fits,
                      "cpx: movement::set of another kind of sharding than it was made for; give a relayout's two, "
                      "the source first, and of another plan its one");
        if constexpr (fits) {
            if (shardings == now_) return;
            require_alike(shardings, now_, std::make_index_sequence<std::tuple_size_v<typename kind::batch>>(), here);
            require_room(shardings, most_, here);
            std::optional<Plan> made;
            auto const plan_of = [&]() -> Plan const& {
                if (!made) made.emplace(kind::next(plan_, shardings, here));
                return *made;
            };
            prepared_.set(shardings, plan_of, here);
            listed_ = made.has_value();
            if (listed_) plan_ = std::move(*made);
            now_ = shardings;
        }
    }
    template <class S>
    void set(S const& sharding, caller here = caller::here()) {
        set(std::tuple<S>(sharding), here);
    }
    template <class From, class To>
    void set(From const& from, To const& to, caller here = caller::here()) {
        set(std::tuple<From, To>(from, to), here);
    }
    /// Returns the plan of the last batch. Where nothing has asked for it yet, makes it.
    Plan const& plan(caller here = caller::here()) {
        if (!listed_) plan_ = kind::next(plan_, now_, here);
        listed_ = true;
        return plan_;
    }

    /// Moves this rank's rows of `from` to where they belong in everybody's `to`; they must not overlap. Collective.
    ///
    /// Throws `cpx::error` before anything moves if tensors and batches do not fit each other, or not what this
    /// movement was prepared for, or on the host if ranks have different batches; on devices the next wait tells that.
    template <sharded_anywhere X, sharded_anywhere Y>
        requires detail::is_relayout<Plan>
    void operator()(X const& from, Y&& to, caller here = caller::here()) {
        move<false, decltype(plan_.from), decltype(plan_.to)>(from, std::forward<Y>(to), here);
    }
    /// Moves rows back: the backward of the above, which adds what was copied.
    template <sharded_anywhere X, sharded_anywhere Y>
        requires detail::is_relayout<Plan>
    void transposed(X const& from, Y&& to, caller here = caller::here()) {
        move<true, decltype(plan_.to), decltype(plan_.from)>(from, std::forward<Y>(to), here);
    }

    /// Returns how many rows exchange `k` of the last batch takes, and brings. Lists no plan where none is wanted.
    std::pair<index_t, index_t> rows_of(index_t k = 0, caller here = caller::here())
        requires(!detail::is_relayout<Plan>)
    {
        require_exchange(k, here);
        return prepared_.rows_of([&]() -> Plan const& { return plan(here); }, k, here);
    }

    /// Brings the rows beside this rank's segments, as many as `rows_of` says: `set` comes first. Collective.
    template <sharded_anywhere X>
        requires(!detail::is_relayout<Plan>)
    void operator()(X const& from, rows<T> halo, caller here = caller::here()) {
        constexpr bool source = detail::sharded_as<decltype(plan_.sharding), X>;
        static_assert(source, "cpx: movement of a tensor that is not sharded as its plan; make it from the tensor's "
                              "kind of sharding");
        if constexpr (is_there<source, X>()) run(false, 0, data_of("the source", from.view(), here), halo, here);
    }
    /// Carries the gradients of such rows home, where they are added: `to` is written. Collective.
    template <sharded_anywhere Y>
        requires(!detail::is_relayout<Plan>)
    void transposed(rows<T const> halo, Y&& to, caller here = caller::here()) {
        constexpr bool target = detail::sharded_as<decltype(plan_.sharding), Y> && detail::writes<Y>;
        static_assert(target, "cpx: movement into a tensor that is not sharded as its plan, is const or ends with the "
                              "call; make it from the tensor's kind of sharding");
        if constexpr (is_there<target, Y>()) run(true, 0, halo, data_of("the target", to.view(), here), here);
    }
    /// Runs exchange `k` of a carry, from the segments before or after. Collective.
    void operator()(index_t k, side from, rows<T const> given, rows<T> got, caller here = caller::here()) {
        require_exchange(k, here);
        run(from == side::after, k, given, got, here);
    }

    template <class X = detail::any>
    explicit movement(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {})
        : movement(detail::lacking<Plan>(), typename kind::width(), capacity(), detail::lacking<Comm&>()) {
        static_assert(detail::never<X>, "cpx: movement(plan, width, capacity, comm) wants a plan of its type, the "
                                        "width of a row, a capacity and a cpx::transport");
    }

    template <class X, class Most = capacity>
        requires std::same_as<Most, capacity>
    explicit movement(X const& plan, detail::any, Most const&, detail::any = {}, detail::any = {}) : movement(plan) {}

    // Not of `detail::any`, which takes rows in braces as well as what wants them.
    template <class X, class... Rest>
        requires(!std::convertible_to<X, index_t> || sizeof...(Rest) != 3)
    detail::refused operator()(X const&, Rest&&...) {
        return unfit<X>();
    }
    template <class X = void>
    detail::refused transposed() {
        return unfit<X>();
    }
    template <class X, class... Rest>
        requires(detail::is_relayout<Plan> || !std::convertible_to<X, rows<T const>> || sizeof...(Rest) != 1)
    detail::refused transposed(X const&, Rest&&...) {
        return unfit<X>();
    }
    template <class X>
        requires(!any_sharding<X>)
    detail::refused make_tensor(X const&) const {
        return unfit<X>();
    }

    /// Returns a tensor for every batch that fits, of this one at first; see `tensor::hold`. It is where this movement
    /// can write: in memory that peers reach, if that is how it moves. Collective.
    template <any_sharding S>
    auto make_tensor(S const& sharding, caller here = caller::here()) const {
        auto const sections = plan_.from.sections().empty() ? plan_.to.sections() : plan_.from.sections();
        auto const width = [&](int rank) {
            return sections.empty() ? width_ : detail::local_width(sharding, rank, sections);
        };
        index_t widest = 0; // of all ranks, so that the next one is at the same place, too
        for (int rank = 0; rank < sharding.ranks(); ++rank) widest = std::max(widest, width(rank));
        index_t const most = detail::product("movement", "elements of a tensor", {widest, most_.rows}, here);
        return tensor<T, S, decltype(prepared_.memory())>(sharding, plan_.rank, width(plan_.rank), prepared_.memory(),
                                                          most, here);
    }

private:
    template <class X>
    static detail::refused unfit() {
        static_assert(
            detail::never<X>,
            "cpx: a movement takes, of a relayout, tensors x and y; of a halo, a tensor and rows, transposed "
            "rows and a tensor; of a carry, a number, a side and two rows; view memory as sharded, or as rows; "
            "make_tensor takes a sharding");
        return {};
    }
    /// Throws unless capacity and widths are sizes, and the first batch fits: before anything is prepared.
    capacity const& checked(capacity const& most, caller here) const {
        static_cast<void>(
            detail::product("movement", "elements of a tensor", {kind::row_width(width_), most.rows}, here));
        static_cast<void>(kind::room(plan_, width_, most, here));
        require_room(now_, most, here);
        return most;
    }
    void require_room(typename kind::batch const& shardings, capacity const& most, caller here) const {
        index_t const sequences = std::get<0>(shardings).batch().sequences();
        auto const largest = [&](auto const& rows) {
            return std::apply([&](auto const&... s) { return std::max({index_t{0}, rows(s)...}); }, shardings);
        };
        index_t const rows = largest([&](auto const& s) { return detail::about_rows(s, plan_.rank, most.rows); });
        auto const exactly = [&] { return std::to_string(largest([&](auto const& s) { return s.rows(plan_.rank); })); };
        require(rows <= most.rows && sequences <= most.sequences, "movement", "rows and sequences of the batch",
                detail::in_words("at most ", most.rows, ", ", most.sequences),
                detail::in_words(exactly, ", ", sequences), here);
    }
    void require_exchange(index_t k, caller here) const {
        index_t count = 1;
        if constexpr (requires { plan_.steps; }) count = plan_.steps;
        require(k >= 0 && (!listed_ || k < count), "movement", "exchange", // else what is prepared knows how many
                detail::in_words("less than ", count), k, here);
    }
    /// Throws unless shardings have the ranks and sections of others.
    template <std::size_t... I>
    static void require_alike(typename kind::batch const& shardings, typename kind::batch const& like,
                              std::index_sequence<I...>, caller here) {
        auto const alike = [&](auto const& a, auto const& b) {
            require(a.ranks() == b.ranks(), "movement", "ranks of the sharding", b.ranks(), a.ranks(), here);
            require(std::ranges::equal(a.sections(), b.sections()), "movement", "sections of the sharding",
                    "those it was made for", "others", here);
        };
        (alike(std::get<I>(shardings), std::get<I>(like)), ...);
    }
    template <class... X>
    void require_memory(caller here, X const&... x) const {
        require((detail::in_one_order(x.memory(), memory_) && ...), "movement", "memory of the tensors",
                "the transport's, in its stream", "another", here);
    }
    /// Returns whether a tensor that fits is in the transport's memory, or says that it is not.
    template <bool Fits, class X>
    static constexpr bool is_there() {
        constexpr bool there = detail::in_memory_of<Comm, X>;
        static_assert(!Fits || there, "cpx: movement of a tensor in another memory than that of the transport's ranks");
        return Fits && there;
    }
    /// Returns the rows of a tensor of the plan's sharding. Throws if it is of another rank, batch or memory.
    template <class X>
    auto data_of(char const* what, X const& x, caller here) const {
        detail::require_place("movement", what, x, std::get<0>(now_), plan_.rank, "the plan's", here);
        require_memory(here, x);
        return x.data();
    }
    void run(bool back, index_t number, rows<T const> from, rows<T> to, caller here) {
        if constexpr (std::same_as<typename kind::width, index_t>) // of a carry, the exchange checks
            if (std::apply([](auto const&... s) { return (s.sections().empty() && ...); }, now_))
                require(from.width() == width_ && to.width() == width_, "movement", "width of the rows", width_,
                        from.width() == width_ ? to.width() : from.width(), here);
        prepared_([&]() -> Plan const& { return plan(here); }, back, number, from, to, here);
    }
    template <bool Back, any_sharding From, any_sharding To, sharded_anywhere X, sharded_anywhere Y>
    void move(X const& from, Y&& to, caller here) {
        constexpr bool source = detail::sharded_as<From, X>, target = detail::sharded_as<To, Y>;
        constexpr bool writes = detail::writes<Y, X> && std::same_as<element_of<X>, T>;
        constexpr bool there = detail::in_memory_of<Comm, X, Y>;
        static_assert(source, "cpx: movement of a tensor that is not sharded as its source; make it from the tensor's "
                              "kind of sharding");
        static_assert(!source || target,
                      "cpx: movement into a tensor that is not sharded as its target; make it for the tensor's "
                      "kind of sharding");
        static_assert(!source || !target || writes,
                      "cpx: movement wants tensors of its elements, and a target that is not const and has a name");
        static_assert(!writes || there,
                      "cpx: movement of tensors in another memory than that of the transport's ranks; make them "
                      "with make_tensor<T>(sharding, comm, width)");
        if constexpr (source && target && writes && there) {
            auto const x = from.view();
            auto const y = to.view();
            if constexpr (Back)
                set(y.sharding(), x.sharding(), here);
            else
                set(x.sharding(), y.sharding(), here);
            detail::require_place("movement", "the source", x, x.sharding(), plan_.rank, "the plan's", here);
            detail::require_place("movement", "the target", y, y.sharding(), plan_.rank, "the plan's", here);
            require_memory(here, x, y);
            run(Back, 0, x.data(), y.data(), here);
        }
    }

    Plan plan_; ///< of the last batch, if it is listed
    typename kind::batch now_;
    bool listed_ = true;
    typename kind::width width_;
    capacity most_;
    rank_memory_of<Comm> memory_;
    typename detail::prepared_by<T, Plan, Comm>::type prepared_;
};

/// Says what elements are, and moves others in their place.
template <class T, class Plan, any_transport Comm>
    requires(!element<T>)
class movement<T, Plan, Comm> : public movement<typename detail::stand_in<T>::type, Plan, Comm> {
public:
    static_assert(detail::checked_element<T>::value || true);
    using movement<typename detail::stand_in<T>::type, Plan, Comm>::movement;
};
/// What a movement is deduced to be, which cannot tell its elements.
template <class Untold>
class movement<Untold, Untold, detail::no_transport> : public detail::refused {
public:
    movement(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
             detail::any = {}) {}
    static_assert(detail::never<Untold>,
                  "cpx: a movement cannot tell its elements; write make_movement<float>(from, to, "
                  "width, capacity, comm), or of a plan make_movement<float>(plan, width, ...)");
};
template <class X = detail::any>
movement(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {})
    -> movement<detail::untold, detail::untold, detail::no_transport>;

/// Calls `f()`, which sets movements of `comm`. On devices the tables of those of one batch are made at once, when it
/// has returned or one of them is called: where a pair of layers wants several, that saves the host a launch for each.
template <class Comm, class F>
void set_together(Comm&& comm, F&& f, caller here = caller::here()) {
    constexpr bool fits = any_transport<std::remove_cvref_t<Comm>> && std::invocable<F&>;
    static_assert(fits, "cpx: set_together(comm, f) wants a cpx::transport and what sets movements: "
                        "[&] { there.set(from, to); halo.set(to); }");
    if constexpr (fits && requires { comm.tables().together(f, here); })
        comm.tables().together(f, here);
    else if constexpr (fits)
        f();
}

/// Returns a movement: `make_movement<float>(plan, width, capacity, comm)`.
template <class T, class Plan, any_transport Comm>
movement<T, Plan, Comm> make_movement(Plan const& first, typename detail::moved<Plan>::width width, capacity most,
                                      Comm& comm, caller here = caller::here()) {
    return {first, width, most, comm, here};
}
/// The same of the relayout between two shardings: `make_movement<float>(from, to, width, capacity, comm)`.
template <class T, any_sharding From, any_sharding To, any_transport Comm>
movement<T, relayout_plan<From, To>, Comm> make_movement(From const& from, To const& to, index_t width, capacity most,
                                                         Comm& comm, caller here = caller::here()) {
    return {relayout(from, to, comm.rank(), here), width, most, comm, here};
}
template <class T = void, class X = detail::any>
detail::refused make_movement(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                              detail::any = {}) {
    static_assert(detail::never<X>, "cpx: make_movement<T>(from, to, width, capacity, comm) wants two shardings, or "
                                    "make_movement<T>(plan, width, capacity, comm) a plan, and a cpx::transport");
    return {};
}
template <class T, class X, class Most = capacity>
    requires std::same_as<Most, capacity>
detail::refused make_movement(X const& from, detail::any, detail::any, Most const&, detail::any = {}) {
    return make_movement<T>(from);
}
template <class T, class X, class Most = capacity>
    requires std::same_as<Most, capacity>
detail::refused make_movement(X const& plan, detail::any, Most const&, detail::any = {}, detail::any = {}) {
    return make_movement<T>(plan);
}

} // namespace cpx

// cpx/transport/subgroup.hpp
// Some of a transport's ranks as a transport of their own.

namespace cpx {

/// Some ranks of a group as a group: the i-th of `members` is rank i. Its messages are those of the whole group, so
/// that making one moves nothing and waits for nobody: a mesh's groups, or ranks that share experts, on any transport.
///
/// Lives no longer than the transport that it uses. Errors of waits name ranks of the whole group; errors of plans that
/// differ ranks of this one, whose members they list. Ranks in several subgroups call them in one order.
template <transport Comm>
class subgroup {
public:
    /// Throws `cpx::error` unless members are ranks of `all`, ascending, and this one is among them.
    subgroup(Comm& all, std::vector<int> members, caller here = caller::here())
        : all_(&all), members_(std::move(members)) {
        for (std::size_t i = 0; i < members_.size(); ++i)
            if (members_[i] < (i == 0 ? 0 : members_[i - 1] + 1) || members_[i] >= all.ranks())
                throw error("subgroup", "member " + std::to_string(i),
                            "ascending ranks of 0 to " + std::to_string(all.ranks() - 1), std::to_string(members_[i]),
                            here);
        auto const own = std::ranges::find(members_, all.rank());
        require(own != members_.end(), "subgroup", "members", detail::in_words("rank ", all.rank()), "others", here);
        rank_ = static_cast<int>(own - members_.begin());
    }

    template <class X = detail::any>
    explicit subgroup(X const& = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: subgroup(comm, members) wants a cpx::transport and the ranks that are "
                                        "its members; the group of n neighbouring ranks is neighbours(comm, n)");
    }

    int rank() const { return rank_; }
    int ranks() const { return static_cast<int>(members_.size()); }
    std::unordered_set<std::uint64_t>& agreed() { return agreed_; }
    /// Returns how errors name the group whose ranks they count.
    std::string name() const {
        std::string text = "the subgroup";
        for (int const member : members_) text += ' ' + std::to_string(member);
        return text;
    }
    void transfer(identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives) {
        auto const renumbered = [&](auto list) {
            for (auto& parcel : list) parcel.peer = members_[static_cast<std::size_t>(parcel.peer)];
            return list;
        };
        all_->transfer(id, renumbered(std::vector(sends.begin(), sends.end())),
                       renumbered(std::vector(receives.begin(), receives.end())));
    }

private:
    Comm* all_ = nullptr;
    std::vector<int> members_;
    int rank_ = 0;
    std::unordered_set<std::uint64_t> agreed_;
};
template <class X = detail::any>
subgroup(X const& = {}, detail::any = {}, detail::any = {}) -> subgroup<detail::no_transport>;

/// Returns the group of `size` neighbouring ranks that this one is in: ranks 0 .. size - 1 are the first.
///
/// Throws `cpx::error` unless the size divides that of the whole group.
template <transport Comm>
subgroup<Comm> neighbours(Comm& all, int size, caller here = caller::here()) {
    require(size > 0 && all.ranks() % size == 0, "neighbours", "size",
            detail::in_words("a divisor of the ranks, ", all.ranks()), size, here);
    std::vector<int> members;
    for (int i = 0; i < size; ++i) members.push_back(all.rank() / size * size + i);
    return {all, std::move(members), here};
}
template <class X = detail::any>
detail::refused neighbours(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: neighbours(comm, size) wants a cpx::transport and how many of its ranks");
    return {};
}

} // namespace cpx

// cpx/transport/sum.hpp
// Sums that every rank gets with the same bits.

namespace cpx {

/// Replaces `values` on every rank by the sums over all ranks, added in rank order, such as gradients of weights.
///
/// values: a vector, array or span, in the memory of the transport's ranks. Collective; all ranks have equally many.
/// Each adds up its share and hands it to the others: 2 (W - 1) / W times the values. Throws what `exchange` throws.
template <std::ranges::contiguous_range V, any_transport Comm>
    requires std::ranges::borrowed_range<V> && std::ranges::output_range<V, std::ranges::range_value_t<V>>
void sum_over_ranks(V&& values, Comm& comm, caller here = caller::here()) {
    index_t const count = std::ssize(values);
    thd const batch({0, count}); // every value is a row
    replicated<> const whole(comm.ranks(), batch);
    auto plan = relayout(shard(batch, sequential<>(comm.ranks())), whole, comm.rank(), here);
    identity::set(plan.id.operation, "sum_over_ranks");
    plan.id.forget_batch();
    plan.id[identity::parameter] = static_cast<std::uint64_t>(count);
    using T = std::ranges::range_value_t<V>;
    auto const memory = rank_memory(comm);
    rows<T> const all(std::ranges::data(values), count, 1);
    tensor<T, sharding<sequential<>>, rank_memory_of<Comm>> share(plan.from, comm.rank(), 1, memory, here);
    detail::exchange_rows(plan.transposed(), all, share.data(), comm, here, "sum_over_ranks");
    detail::exchange_rows(plan, share.data(), all, comm, here, "sum_over_ranks");
}
template <class X = detail::any>
detail::refused sum_over_ranks(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: sum_over_ranks(values, comm) wants a vector, array or span that stays, not "
                                    "const, and a cpx::transport; of a tensor give its elements()");
    return {};
}

} // namespace cpx

// cpx/transport/threads.hpp
// W ranks as threads of one process: the whole of cpx without a GPU or a launcher.

namespace cpx {

class threads;

namespace detail {

template <class X>
threads&& unstarted_threads() {
    static_assert(never<X>, "cpx: threads of one process are started together, threads::run(ranks, program) "
                            "with [&](cpx::threads& comm) { ... }, or are ranks of a threads::group");
    throw;
}

} // namespace detail

/// One rank of a group of threads. Messages are copied once, from the sender's rows to the receiver's.
///
///     cpx::threads::run(4, [&](cpx::threads& comm) { ... every rank's program ... });
///
/// A rank that throws ends the others: their next or present exchange throws an error that names it. So do one that
/// returns and one that runs another plan. No wait outlasts the deadline; then who keeps the others waiting is named.
class threads {
public:
    /// The most ranks of a group: each two of them take 24 bytes.
    static constexpr int most_ranks = 1 << 13;

    /// Calls `program(comm)` on `ranks` threads and waits for them all. `deadline` is the longest that a rank waits for
    /// the others in one exchange; at most a year.
    ///
    /// If ranks throw, throws a `cpx::error` that names the first of them, with its exception nested in it. Where the
    /// system starts fewer threads, throws one that says how many.
    template <
        class F> // no concept: of a mistake within the program, clang++ would tell at length how it satisfies that
    static auto run(int ranks, F&& program, std::chrono::milliseconds deadline = std::chrono::minutes(10),
                    caller here = caller::here()) -> decltype(static_cast<void>(program(std::declval<threads&>()))) {
        run_all(ranks, program, deadline, here);
    }
    template <class X = detail::any>
    static detail::refused run(X const& = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: threads::run(ranks, program) wants a program that takes its rank: "
                                        "[&](cpx::threads& comm) { ... }");
        return {};
    }

    class group;

    threads(threads&&) = default;
    threads(threads const&) = delete; // a copy would not know what its rank has agreed on afterwards
    threads& operator=(threads const&) = delete;
    template <class X = detail::any>
    explicit threads(X const& = {}, detail::any = {}, detail::any = {})
        : threads(detail::unstarted_threads<detail::whatever<X>>()) {}

    int rank() const { return rank_; }
    int ranks() const { return static_cast<int>(world_.members.size()); }
    std::unordered_set<std::uint64_t>& agreed() { return agreed_; }

    /// See `transport`. Also throws if a rank that this one waits for runs another plan, or if all wait for each other.
    void transfer(identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives) {
        turn mine(world_);
        member& me = world_.member_at(rank_);
        auto const end = std::chrono::steady_clock::now() + world_.deadline;
        try {
            world_.require_none_failed();
            me.in = &id;
            for (outgoing const& parcel : sends) world_.at(rank_, parcel.peer).from = &parcel;
            for (incoming const& parcel : receives) world_.at(parcel.peer, rank_).to = &parcel;
            for (;;) {
                bool copied = false;
                for (outgoing const& parcel : sends) copied |= deliver(mine, rank_, parcel.peer);
                for (incoming const& parcel : receives) copied |= deliver(mine, parcel.peer, rank_);
                if (copied) continue; // meanwhile others may have come
                me.waits.silent.clear(), me.waits.deaf.clear();
                for (incoming const& parcel : receives)
                    if (world_.at(parcel.peer, rank_).to) me.waits.silent.push_back(parcel.peer);
                for (outgoing const& parcel : sends)
                    if (world_.at(rank_, parcel.peer).from) me.waits.deaf.push_back(parcel.peer);
                if (me.waits.none()) break;
                wait(mine, end, id);
            }
        } catch (std::exception const& e) {
            me.asleep = false;
            me.waits = {};
            for (outgoing const& parcel : sends) still(mine, world_.at(rank_, parcel.peer)).from = nullptr;
            for (incoming const& parcel : receives) still(mine, world_.at(parcel.peer, rank_)).to = nullptr;
            me.in = nullptr;
            world_.fail(mine, rank_, detail::reason(e));
            throw;
        }
        me.last = id;
        me.in = nullptr;
    }

private:
    struct world;
    class turn;

    /// As `run`, compiled once for all programs.
    static void run_all(int ranks, detail::function_ref<void(threads&)> program, std::chrono::milliseconds deadline,
                        caller here) {
        require_ranks("threads::run", ranks, here);
        world shared(ranks, detail::checked_deadline("threads::run", deadline, here), here);
        std::vector<std::thread> members;
        std::string refusal;
        try {
            for (int rank = 0; rank < ranks; ++rank)
                members.emplace_back([&shared, &program, rank] { run_rank(shared, program, rank); });
        } catch (std::exception const& e) { // the system has no more threads: end those that run
            refusal = e.what();
            shared.end(static_cast<int>(members.size()), refusal);
        }
        for (auto& member : members) member.join();
        require(refusal.empty(), "threads::run", "threads that the system starts (its limits: ulimit -u, ulimit -v)",
                std::to_string(ranks) + ", one a rank", std::to_string(members.size()) + ", then: " + refusal, here);
        shared.rethrow(here);
    }

    static void require_ranks(char const* where, int ranks, caller here) {
        detail::require_ranks(where, "ranks", std::min(ranks, most_ranks), here);
        require(ranks <= most_ranks, where, "ranks", detail::in_words("at most ", most_ranks, ", one thread each"),
                ranks, here);
    }

    static void run_rank(world& shared, detail::function_ref<void(threads&)> program, int rank) {
        try {
            threads comm(shared, rank);
            program(comm);
            shared.leave(rank);
        } catch (std::exception const& e) {
            shared.end(rank, e.what());
        } catch (...) {
            shared.end(rank, "an exception that is not a std::exception");
        }
    }

    /// A message from one rank to another. Who comes last copies it, so that nobody is woken to do that.
    struct post {
        outgoing const* from = nullptr; ///< what the sender has, until it has been taken
        incoming const* to = nullptr;   ///< the place that the receiver has for it, until it has arrived
        bool copying = false;
    };

    struct member {
        std::condition_variable wake;
        bool asleep = false;          ///< it waits, and nobody has told it anything since
        bool left = false;            ///< its program has returned
        identity const* in = nullptr; ///< its present exchange
        std::optional<identity> last; ///< its last one
        detail::waits waits;
    };

    struct world {
        world(int ranks, std::chrono::milliseconds longest_wait, caller here)
            : deadline(longest_wait), members(static_cast<std::size_t>(ranks)),
              posts(detail::zeros<post>("threads::run", {ranks, ranks}, here)) {}

        post& at(int from, int to) {
            return posts[static_cast<std::size_t>(from) * members.size() + static_cast<std::size_t>(to)];
        }
        member& member_at(int rank) { return members[static_cast<std::size_t>(rank)]; }

        void require_none_failed() const {
            if (failed >= 0) throw error("threads", "rank " + std::to_string(failed) + " failed: " + reason);
        }
        void leave(int rank) {
            turn now(*this);
            member_at(rank).left = true;
            now.tell_all();
        }
        /// Tells all ranks that this one fails, unless another has before.
        void fail(turn& now, int rank, std::string why) {
            if (failed >= 0 && failed != rank) return;
            failed = rank;
            reason = std::move(why);
            now.tell_all();
        }
        /// Keeps the exception that ends a program: the first, or that of the rank that failed first.
        void end(int rank, std::string why) {
            turn now(*this);
            fail(now, rank, why);
            if (exception && rank != failed) return;
            exception = std::current_exception();
            ended = "rank " + std::to_string(rank) + " failed: " + why;
        }
        void rethrow(caller here) {
            if (!exception) return;
            try {
                std::rethrow_exception(exception);
            } catch (...) {
                std::throw_with_nested(error("threads::run", ended, "", "", here));
            }
        }

        std::chrono::milliseconds deadline;
        std::mutex mutex;
        std::vector<member> members;
        std::vector<post> posts;
        int failed = -1;
        std::string reason, ended;
        std::exception_ptr exception;
    };

    /// The mutex of a world. Whoever is told something is woken when it has been released, not to wait for it.
    class turn {
    public:
        explicit turn(world& shared) : world_(shared), lock_(shared.mutex) {}
        turn(turn const&) = delete;
        turn& operator=(turn const&) = delete;
        ~turn() { unlock(); }

        void lock() { lock_.lock(); }
        void unlock() {
            lock_.unlock();
            while (count_ > 0) told_[--count_]->wake.notify_one();
        }
        void tell(int rank) {
            member& m = world_.member_at(rank);
            m.asleep = false;
            if (count_ < told_.size())
                told_[count_++] = &m;
            else // a list of any length could need memory that there is none of, and then nobody would wake it
                m.wake.notify_one();
        }
        void tell_all() {
            for (int rank = 0; rank < static_cast<int>(world_.members.size()); ++rank) tell(rank);
        }
        /// Wakes whoever was told something, and returns the lock, to wait with.
        std::unique_lock<std::mutex>& pass() {
            unlock();
            lock();
            return lock_;
        }

    private:
        world& world_;
        std::unique_lock<std::mutex> lock_;
        std::array<member*, 16> told_;
        std::size_t count_ = 0;
    };

    threads(world& shared, int rank) : world_(shared), rank_(rank) {}

    /// Copies a message if both its ends are there. Returns whether it has, and so has released the mutex.
    bool deliver(turn& mine, int from, int to) {
        post& message = world_.at(from, to);
        if (!message.from || !message.to || message.copying) return false;
        int const peer = from == rank_ ? to : from;
        identity const& id = *world_.member_at(rank_).in;
        auto const sent = message.from->bytes(), due = message.to->bytes();
        if (to == rank_) {
            check_exchange(id, peer);
            require(sent == due, "threads", "bytes of a message", due, sent);
        } else if (sent != due || !id.same_exchange(*world_.member_at(to).in)) { // it is the receiver's error
            mine.tell(to);
            return false;
        }
        message.copying = true;
        mine.unlock();
        copy(*message.from, *message.to);
        mine.lock();
        message = {};
        detail::waits& theirs = world_.member_at(peer).waits;
        std::erase(from == rank_ ? theirs.silent : theirs.deaf, rank_);
        if (theirs.none()) mine.tell(peer);
        return true;
    }

    /// Waits until a rank tells this one something. Throws if none can, or none does in time.
    void wait(turn& mine, std::chrono::steady_clock::time_point end, identity const& id) {
        world_.require_none_failed();
        member& me = world_.member_at(rank_);
        me.waits.each([&](int peer) {
            check_exchange(id, peer);
            member const& other = world_.member_at(peer);
            if (other.left) throw detail::gone("threads", rank_, id, peer, other.last ? &*other.last : nullptr);
        });
        auto const late = [&](std::vector<int> const& missing) {
            return detail::late("threads", rank_, id, me.waits, missing, world_.deadline);
        };
        me.asleep = true;
        if (std::ranges::all_of(world_.members, [](member const& m) { return m.left || m.asleep; })) {
            check_exchanges(id); // nobody is left to wake another
            throw late({});
        }
        if (me.wake.wait_until(mine.pass(), end, [&] { return !me.asleep; })) return;
        throw late(detail::missing(rank_, [&](int rank) {
            member const& m = world_.member_at(rank);
            return rank == rank_ || m.asleep ? &m.waits : nullptr;
        }));
    }

    /// Throws if `peer`, with whom a message is due, sends one of another exchange: it will not come to this one.
    void check_exchange(identity const& id, int peer) const {
        post const& from = world_.at(peer, rank_);
        if (from.from) require_same_exchange("threads", id, rank_, *world_.member_at(peer).in, peer);
    }

    /// Throws what lists who is in which exchange, if ranks that all wait are in different ones.
    void check_exchanges(identity const& id) const {
        std::vector<identity const*> in;
        for (member const& m : world_.members) in.push_back(m.in);
        for (identity const* other : in)
            if (other && !id.same_exchange(*other)) throw detail::apart("threads", id, *other, in);
    }

    /// Waits until nobody copies a message, and returns it, for its caller to take its own end back.
    post& still(turn& mine, post& message) {
        if (message.copying) world_.member_at(rank_).wake.wait(mine.pass(), [&] { return !message.copying; });
        return message;
    }

    world& world_;
    int rank_;
    std::unordered_set<std::uint64_t> agreed_;
};

static_assert(transport<threads>);

/// As if nobody had started them: of threads that a call makes for itself no more is said.
template <class Plan, class X>
detail::refused exchange(Plan const&, X const&, threads&&) {
    detail::unstarted_threads<detail::any>();
    return {};
}
template <class Plan, class X, class Y>
detail::refused exchange(Plan const&, X const&, Y const&, threads&&) {
    detail::unstarted_threads<detail::any>();
    return {};
}

/// The same ranks on threads that the caller starts: those of another language, or of a pool.
///
///     cpx::threads::group ranks(4);
///     ... on the thread of rank r: program(ranks.at(r)); ranks.leave(r);
///
/// Outlives the calls of its ranks. Whose program throws calls `fail`, so that the others end at once, and not when the
/// deadline has passed. A group of which one rank has failed stays broken.
class threads::group {
public:
    /// `deadline` as of `run`. Throws `cpx::error` if there are no ranks, or too many.
    explicit group(int ranks, std::chrono::milliseconds deadline = std::chrono::minutes(10),
                   caller here = caller::here())
        : world_((require_ranks("threads::group", ranks, here), ranks),
                 detail::checked_deadline("threads::group", deadline, here), here) {
        for (int rank = 0; rank < ranks; ++rank) members_.push_back(threads(world_, rank));
    }
    template <class X = void>
    explicit group(detail::any = {}, detail::any = {}, detail::any = {}) : group(1) {
        static_assert(detail::never<X>, "cpx: threads::group(ranks, deadline) wants a number of ranks");
    }
    group(group const&) = delete;
    group& operator=(group const&) = delete;

    int ranks() const { return static_cast<int>(members_.size()); }
    /// Returns the communicator of a rank, which one thread at a time calls. Throws `cpx::error` if there is none.
    threads& at(int rank, caller here = caller::here()) {
        detail::require_rank("threads::group::at", rank, ranks(), here);
        return members_[static_cast<std::size_t>(rank)];
    }
    /// Says that a rank calls no more: who waits for it throws. Throws `cpx::error` if there is no such rank.
    void leave(int rank, caller here = caller::here()) {
        detail::require_rank("threads::group::leave", rank, ranks(), here);
        world_.leave(rank);
    }
    /// Says that the program of a rank has thrown, and why: the next or present exchange of the others throws an error
    /// that names it. Throws `cpx::error` if there is no such rank.
    void fail(int rank, std::string why, caller here = caller::here()) {
        detail::require_rank("threads::group::fail", rank, ranks(), here);
        turn now(world_);
        world_.fail(now, rank, std::move(why));
    }

private:
    world world_;
    std::vector<threads> members_;
};

} // namespace cpx

// cpx/transport/transport_ref.hpp
// Any host transport behind one type.

namespace cpx {

/// Refers to a transport of whatever type: what is compiled for a `transport_ref` is compiled once, and runs on ranks
/// that are threads as on those that a launcher has started. Copies refer to the same, which outlives them.
class transport_ref {
public:
    template <transport Comm>
        requires(!std::same_as<Comm, transport_ref>)
    transport_ref(Comm& comm)
        : comm_(std::addressof(comm)), rank_(comm.rank()), ranks_(comm.ranks()), agreed_(&comm.agreed()),
          transfer_([](void* to, identity const& id, std::span<outgoing const> sends,
                       std::span<incoming const> receives) { static_cast<Comm*>(to)->transfer(id, sends, receives); }) {
    }
    template <class X = detail::any>
    explicit transport_ref(X const& = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: transport_ref(comm) wants a cpx::transport that is not const and stays");
    }

    int rank() const { return rank_; }
    int ranks() const { return ranks_; }
    std::unordered_set<std::uint64_t>& agreed() { return *agreed_; }
    void transfer(identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives) {
        transfer_(comm_, id, sends, receives);
    }

private:
    void* comm_ = nullptr;
    int rank_ = 0, ranks_ = 1;
    std::unordered_set<std::uint64_t>* agreed_ = nullptr;
    void (*transfer_)(void*, identity const&, std::span<outgoing const>, std::span<incoming const>) = nullptr;
};

static_assert(transport<transport_ref>);

} // namespace cpx

// cpx/cpx.hpp
// cpx: context-parallel exchange. Everything on the host that needs no third-party library.

#endif
