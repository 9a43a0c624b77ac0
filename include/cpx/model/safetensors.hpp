// SPDX-License-Identifier: Apache-2.0
// A checked reader of safetensors files: every number in the header is verified before it is used.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/element.hpp>
#include <cpx/model/file.hpp>
#include <cpx/model/json.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpx {

static_assert(std::endian::native == std::endian::little, "cpx: safetensors are read on little-endian machines");

/// The tensors of one safetensors file, which stays open and is read tensor by tensor; copies share it.
///
/// The header is checked when the file is opened. Threads may read at a time.
///
/// The file is 8 bytes of little-endian header length, a JSON header that gives each tensor its dtype, shape and byte
/// range, then the data, which the tensors fill without gap or overlap.
/// Format: https://github.com/huggingface/safetensors
class safetensors {
public:
    enum class dtype { f64, f32, f16, bf16, i64, i32, i16, i8, u64, u32, u16, u8, boolean };

    /// What the header says of a tensor, whose elements are row-major and little-endian.
    struct tensor_info {
        std::string name;
        safetensors::dtype dtype = dtype::f32;
        std::vector<index_t> shape;
        range bytes; ///< in the file, from its beginning

        index_t elements() const { return bytes.size() / static_cast<index_t>(size_of(dtype)); }
    };

    /// Opens a file and reads its header. Throws `cpx::error` that names the file and the first fault in it.
    explicit safetensors(std::filesystem::path const& path, caller here = caller::here())
        : safetensors(std::make_shared<detail::byte_source const>(path, here), here) {}

    /// Takes the bytes of a file; `where` names them in errors. Throws as the constructor does.
    static safetensors parse(std::string bytes, std::string where, caller here = caller::here()) {
        return safetensors(std::make_shared<detail::byte_source const>(std::move(bytes), std::move(where)), here);
    }

    /// Returns the bytes of one element.
    static constexpr std::size_t size_of(dtype type) {
        constexpr std::array<std::size_t, 13> sizes = {8, 4, 2, 2, 8, 4, 2, 1, 8, 4, 2, 1, 1};
        return sizes[static_cast<std::size_t>(type)];
    }

    /// Returns how files call a dtype, such as BF16.
    static constexpr std::string_view name_of(dtype type) { return dtype_names[static_cast<std::size_t>(type)]; }
    /// Returns the dtype that files call so, if there is one.
    static std::optional<dtype> dtype_of(std::string_view name) {
        auto const known = std::ranges::find(dtype_names, name);
        if (known == dtype_names.end()) return {};
        return static_cast<dtype>(known - dtype_names.begin());
    }
    /// Returns the bytes of a tensor; none if a size is negative, or if they are 2^63 or more, were sizes of 0 left
    /// out.
    static std::optional<index_t> bytes_of(dtype type, std::span<index_t const> shape) {
        auto needed = static_cast<index_t>(size_of(type));
        for (index_t const n : shape) {
            if (n < 0 || (n > 0 && needed > std::numeric_limits<index_t>::max() / n)) return {};
            needed *= std::max<index_t>(n, 1);
        }
        return std::ranges::find(shape, 0) == shape.end() ? needed : 0;
    }

    /// Returns the name of the file, as errors give it.
    std::string const& where() const { return file_->name(); }

    /// Returns the names of the tensors, sorted.
    std::vector<std::string> names() const {
        std::vector<std::string> all;
        for (auto const& [name, info] : tensors_) all.push_back(name);
        return all;
    }

    bool contains(std::string_view name) const { return tensors_.find(name) != tensors_.end(); }

    /// Returns the free-form texts that the writer left in the header.
    std::map<std::string, std::string, std::less<>> const& metadata() const { return metadata_; }

    /// Returns one of those texts. Throws `cpx::error` if there is none under `key`.
    std::string const& metadata(std::string_view key, caller here = caller::here()) const {
        return lookup(metadata_, "metadata ", key, here);
    }

    /// Returns what the file says of a tensor. Throws `cpx::error` with the names most like `name` if it is missing.
    tensor_info const& tensor(std::string_view name, caller here = caller::here()) const {
        return lookup(tensors_, "tensor ", name, here);
    }

    /// Returns the elements of a tensor, row-major, as float, double or index_t.
    ///
    /// Floating-point numbers become double exactly and are rounded to nearest to become float. Integers keep their
    /// value, BOOL becomes 0 or 1. Throws `cpx::error` where an integer cannot or a finite number overflows float, if a
    /// floating-point tensor is read as index_t, if the tensor is missing or larger than the memory that the system
    /// gives, and if the file cannot be read.
    template <class T>
        requires std::same_as<T, float> || std::same_as<T, double> || std::same_as<T, index_t>
    std::vector<T> read(std::string_view name, caller here = caller::here()) const {
        auto const& info = tensor(name, here);
        auto values = allocate<T>(info, info.elements(), here);
        switch (info.dtype) {
        case dtype::f64: convert<double>(info, values, here); break;
        case dtype::f32: convert<float>(info, values, here); break;
        case dtype::f16: convert<std::uint16_t>(info, values, here, detail::from_half); break;
        case dtype::bf16: convert<std::uint16_t>(info, values, here, detail::from_bfloat); break;
        case dtype::i64: convert<std::int64_t>(info, values, here); break;
        case dtype::i32: convert<std::int32_t>(info, values, here); break;
        case dtype::i16: convert<std::int16_t>(info, values, here); break;
        case dtype::i8: convert<std::int8_t>(info, values, here); break;
        case dtype::u64: convert<std::uint64_t>(info, values, here); break;
        case dtype::u32: convert<std::uint32_t>(info, values, here); break;
        case dtype::u16: convert<std::uint16_t>(info, values, here); break;
        case dtype::u8: convert<std::uint8_t>(info, values, here); break;
        case dtype::boolean: convert<std::uint8_t>(info, values, here, [](auto byte) { return byte != 0; }); break;
        }
        return values;
    }

    /// Returns the elements of a tensor of shape `expected`, in which -1 stands for any size.
    ///
    /// Throws as the other `read` does, and if the shape is another.
    template <class T>
    std::vector<T> read(std::string_view name, std::vector<index_t> const& expected,
                        caller here = caller::here()) const {
        auto const& info = tensor(name, here);
        auto const same = [](index_t want, index_t have) { return want == -1 || want == have; };
        if (!std::ranges::equal(expected, info.shape, same))
            throw error(where(), "shape of tensor " + quote(name), show(expected), show(info.shape), here);
        return read<T>(name, here);
    }
    /// The same of a list, also of none, which a `caller` is made from, too.
    template <class T>
    std::vector<T> read(std::string_view name, std::initializer_list<index_t> expected,
                        caller here = caller::here()) const {
        return read<T>(name, std::vector(expected), here);
    }

    /// Fills `to` with the bytes of a tensor from its byte `first` on, as they are stored.
    ///
    /// Throws `cpx::error` if the tensor is missing or ends before, and if the file cannot be read.
    void read_bytes(std::string_view name, index_t first, std::span<std::byte> to, caller here = caller::here()) const {
        auto const& info = tensor(name, here);
        auto const count = static_cast<index_t>(to.size());
        if (first < 0 || first > info.bytes.size() || count > info.bytes.size() - first)
            throw error(where(), "bytes of tensor " + quote(name), "some of its " + std::to_string(info.bytes.size()),
                        std::to_string(count) + " from " + std::to_string(first), here);
        file_->read(static_cast<std::uint64_t>(info.bytes.first + first), to, here);
    }
    /// Returns all of them. Throws as the other one, and if no memory holds them.
    std::vector<std::byte> read_bytes(std::string_view name, caller here = caller::here()) const {
        auto const& info = tensor(name, here);
        auto bytes = allocate<std::byte>(info, info.bytes.size(), here);
        read_bytes(name, 0, bytes, here);
        return bytes;
    }

    /// The most bytes that a header may have.
    static constexpr index_t longest_header = 100'000'000;

private:
    safetensors(std::shared_ptr<detail::byte_source const> file, caller here) : file_(std::move(file)) {
        constexpr std::uint64_t prefix = sizeof(std::uint64_t);
        std::uint64_t const size = file_->size();
        if (size < prefix) throw error(where(), "length of the file", "at least 8 bytes", std::to_string(size), here);
        std::uint64_t header = 0;
        file_->read(0, std::as_writable_bytes(std::span(&header, 1)), here);
        auto const most = std::min<std::uint64_t>(longest_header, size - prefix);
        if (header > most)
            throw error(where(), "length of the header", "at most " + std::to_string(most) + " bytes",
                        std::to_string(header), here);
        auto const text = file_->read(prefix, header, here);
        if (!text.starts_with('{'))
            throw error(where(), "header", "a JSON object", quote(std::string_view(text).substr(0, 8)), here);
        range const data{static_cast<index_t>(prefix + header), static_cast<index_t>(size)};

        auto const root = json_value::parse(text, where(), {.bytes = longest_header}, here);
        for (auto const& name : root.keys(here)) {
            if (name == "__metadata__") {
                auto const texts = root.at(name);
                for (auto const& key : texts.keys(here)) metadata_.emplace(key, texts.get<std::string>(key, here));
            } else {
                add(name, root.at(name), data, here);
            }
        }
        check_cover(data, here);
    }

    /// Adds one tensor, whose bytes lie in `data`.
    void add(std::string const& name, json_value const& entry, range data, caller here) {
        auto const wrong = [&](char const* what, std::string expected, std::string got) {
            return error(where(), std::string(what) + " of tensor " + quote(name), std::move(expected), std::move(got),
                         here);
        };
        auto const code = entry.get<std::string>("dtype", here);
        auto const known = dtype_of(code);
        if (!known)
            throw wrong("dtype", "F64, F32, F16, BF16, I64, I32, I16, I8, U64, U32, U16, U8 or BOOL", quote(code));
        dtype const type = *known;

        auto shape = entry.get<std::vector<index_t>>("shape", here);
        auto const counted = bytes_of(type, shape);
        if (!counted) throw wrong("shape", wanted_of(shape), show(shape));
        index_t const needed = *counted;
        auto const offsets = entry.get<std::vector<index_t>>("data_offsets", here);
        if (offsets.size() != 2) throw wrong("data_offsets", "2 numbers", std::to_string(offsets.size()));
        range const taken = {offsets[0], offsets[1]};
        if (taken.first < 0 || taken.last < taken.first || taken.last > data.size())
            throw wrong("data_offsets", "0 <= begin <= end <= " + std::to_string(data.size()), show(offsets));
        if (taken.size() != needed)
            throw wrong("size", std::to_string(needed) + " bytes for " + code + " " + show(shape),
                        std::to_string(taken.size()));
        range const bytes{data.first + taken.first, data.first + taken.last};
        tensors_.emplace(name, tensor_info{name, type, std::move(shape), bytes});
    }

    /// Throws unless the tensors, laid in order, fill the data exactly.
    void check_cover(range data, caller here) const {
        std::vector<tensor_info const*> ordered;
        for (auto const& [name, info] : tensors_) ordered.push_back(&info);
        std::ranges::sort(ordered, {}, [](auto* info) { return std::pair(info->bytes.first, info->bytes.last); });
        index_t covered = data.first;
        for (auto const* info : ordered) {
            if (info->bytes.first != covered)
                throw error(where(),
                            (info->bytes.first < covered ? "overlap before tensor " : "gap before tensor ") +
                                quote(info->name),
                            "a begin of " + std::to_string(covered - data.first),
                            std::to_string(info->bytes.first - data.first), here);
            covered = info->bytes.last;
        }
        if (covered != data.last)
            throw error(where(), "bytes that belong to no tensor",
                        std::to_string(covered - data.first) + " bytes of data", std::to_string(data.size()), here);
    }

    template <class Entries>
    typename Entries::mapped_type const& lookup(Entries const& entries, char const* kind, std::string_view name,
                                                caller here) const {
        if (auto const found = entries.find(name); found != entries.end()) return found->second;
        // Most like: the longest common beginning and end together, which suits dotted names.
        std::vector<std::pair<index_t, std::string_view>> near;
        for (auto const& [other, value] : entries) {
            auto const head = std::mismatch(name.begin(), name.end(), other.begin(), other.end()).first - name.begin();
            auto const tail = std::mismatch(name.rbegin(), name.rend(), other.rbegin(), other.rend()).first;
            near.emplace_back(-std::min<index_t>(head + (tail - name.rbegin()), std::ssize(other)), other);
        }
        auto const shown = near.begin() + std::min<index_t>(3, std::ssize(near));
        std::ranges::partial_sort(near, shown);
        std::string names;
        for (auto item = near.begin(); item != shown; ++item)
            names += (names.empty() ? ", such as " : ", ") + quote(item->second);
        throw error(where(), kind + quote(name),
                    "one of the " + std::to_string(entries.size()) + " in the file" + names, "none of that name", here);
    }

    /// Returns what a shape must be that `bytes_of` does not count.
    static char const* wanted_of(std::span<index_t const> shape) {
        return std::ranges::any_of(shape, [](index_t n) { return n < 0; })
                   ? "sizes of at least 0"
                   : "fewer than 2^63 bytes, were sizes of 0 left out";
    }
    friend class safetensors_writer;

    static std::string show(std::vector<index_t> const& numbers) {
        std::string text;
        for (std::size_t i = 0; i < numbers.size() && i < 9; ++i)
            text += (i ? ", " : "") + (i == 8 ? "..." : std::to_string(numbers[i]));
        return "[" + text + "]";
    }

    template <class T>
    std::vector<T> allocate(tensor_info const& info, index_t count, caller here) const {
        std::string reason;
        try {
            return std::vector<T>(static_cast<std::size_t>(count));
        } catch (std::bad_alloc const& refused) {
            reason = refused.what();
        } catch (std::length_error const& refused) {
            reason = refused.what();
        }
        throw error(where(), "memory for tensor " + quote(info.name),
                    std::to_string(count) + " elements of " + std::to_string(sizeof(T)) + " bytes", reason, here);
    }

    /// Fills `values` from elements stored as `Stored`, each passed through `decode` first.
    template <class Stored, class T, class Decode = std::identity>
    void convert(tensor_info const& info, std::vector<T>& values, caller here, Decode decode = {}) const {
        using decoded = std::remove_cvref_t<std::invoke_result_t<Decode, Stored&>>;
        if constexpr (std::floating_point<decoded> && std::integral<T>) {
            throw error(where(), "dtype of tensor " + quote(info.name), "an integer dtype or BOOL",
                        std::string(name_of(info.dtype)), here);
        } else {
            std::array<Stored, 4096> stored;
            for (std::size_t first = 0; first < values.size(); first += stored.size()) {
                auto const block = std::span(stored).first(std::min(stored.size(), values.size() - first));
                file_->read(static_cast<std::uint64_t>(info.bytes.first) + first * sizeof(Stored),
                            std::as_writable_bytes(block), here);
                for (std::size_t i = 0; i < block.size(); ++i) {
                    decoded const value = decode(block[i]);
                    if (!detail::holds<T>(value))
                        throw error(where(), "element " + std::to_string(first + i) + " of tensor " + quote(info.name),
                                    std::same_as<T, index_t> ? "an int64"
                                    : std::same_as<T, float> ? "a float"
                                                             : "a double",
                                    nlohmann::json(value).dump(), here);
                    values[first + i] = static_cast<T>(value);
                }
            }
        }
    }

    static constexpr std::array<std::string_view, 13> dtype_names = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16",
                                                                     "I8",  "U64", "U32", "U16",  "U8",  "BOOL"};

    std::shared_ptr<detail::byte_source const> file_;
    std::map<std::string, tensor_info, std::less<>> tensors_;
    std::map<std::string, std::string, std::less<>> metadata_;
};

} // namespace cpx
