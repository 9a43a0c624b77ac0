// SPDX-License-Identifier: Apache-2.0
// Rows that belong to nobody's batch.
#pragma once

#include <cpx/core/element.hpp>
#include <cpx/core/memory.hpp>
#include <cpx/core/rows.hpp>

#include <concepts>
#include <optional>

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
