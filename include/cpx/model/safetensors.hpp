// SPDX-License-Identifier: Apache-2.0
// A checked reader of safetensors files: every number in the header is verified before it is used.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/model/element.hpp>
#include <cpx/model/file.hpp>
#include <cpx/model/json.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpx {

static_assert(std::endian::native == std::endian::little, "cpx: safetensors are read on little-endian machines");

/// The tensors of one safetensors file, held in memory; copies share it.
///
/// The file is 8 bytes of little-endian header length, a JSON header that gives each tensor its dtype, shape and byte
/// range, then the data, which the tensors fill without gap or overlap.
/// Format: https://github.com/huggingface/safetensors
class safetensors {
public:
    enum class dtype { f64, f32, f16, bf16, i64, i32, i16, i8, u64, u32, u16, u8, boolean };

    /// A tensor as stored: row-major, little-endian and perhaps not aligned. `bytes` live as long as their file object.
    struct tensor_view {
        std::string name;
        safetensors::dtype dtype = dtype::f32;
        std::vector<index_t> shape;
        std::span<std::byte const> bytes;

        index_t elements() const { return static_cast<index_t>(bytes.size() / size_of(dtype)); }
    };

    /// Reads the whole file. Throws `cpx::error` that names the file and the first fault in it.
    explicit safetensors(std::filesystem::path const& path)
        : safetensors(detail::read_file(path, std::numeric_limits<std::uintmax_t>::max()), path.string()) {}

    /// Takes the bytes of a file; `where` names them in errors. Throws as the constructor does.
    static safetensors parse(std::string bytes, std::string where) { return {std::move(bytes), std::move(where)}; }

    /// Returns the bytes of one element.
    static constexpr std::size_t size_of(dtype type) {
        constexpr std::array<std::size_t, 13> sizes = {8, 4, 2, 2, 8, 4, 2, 1, 8, 4, 2, 1, 1};
        return sizes[static_cast<std::size_t>(type)];
    }

    /// Returns the name of the file, as errors give it.
    std::string const& where() const { return where_; }

    /// Returns the names of the tensors, sorted.
    std::vector<std::string> names() const {
        std::vector<std::string> all;
        for (auto const& [name, view] : tensors_) all.push_back(name);
        return all;
    }

    bool contains(std::string_view name) const { return tensors_.find(name) != tensors_.end(); }

    /// Returns the free-form texts that the writer left in the header.
    std::map<std::string, std::string, std::less<>> const& metadata() const { return metadata_; }

    /// Returns one of those texts. Throws `cpx::error` if there is none under `key`.
    std::string const& metadata(std::string_view key) const { return lookup(metadata_, "metadata ", key); }

    /// Returns a tensor without copying it. Throws `cpx::error` that lists the names most like `name` if it is missing.
    tensor_view const& tensor(std::string_view name) const { return lookup(tensors_, "tensor ", name); }

    /// Returns the elements of a tensor, row-major, as float, double or index_t.
    ///
    /// Floating-point numbers become double exactly and are rounded to nearest to become float. Integers keep their
    /// value, BOOL becomes 0 or 1. Throws `cpx::error` where an integer cannot or a finite number overflows float, if a
    /// floating-point tensor is read as index_t, and if the tensor is missing.
    template <class T>
        requires std::same_as<T, float> || std::same_as<T, double> || std::same_as<T, index_t>
    std::vector<T> read(std::string_view name) const {
        auto const& view = tensor(name);
        std::vector<T> values(static_cast<std::size_t>(view.elements()));
        switch (view.dtype) {
        case dtype::f64: convert<double>(view, values); break;
        case dtype::f32: convert<float>(view, values); break;
        case dtype::f16: convert<std::uint16_t>(view, values, detail::from_half); break;
        case dtype::bf16: convert<std::uint16_t>(view, values, detail::from_bfloat); break;
        case dtype::i64: convert<std::int64_t>(view, values); break;
        case dtype::i32: convert<std::int32_t>(view, values); break;
        case dtype::i16: convert<std::int16_t>(view, values); break;
        case dtype::i8: convert<std::int8_t>(view, values); break;
        case dtype::u64: convert<std::uint64_t>(view, values); break;
        case dtype::u32: convert<std::uint32_t>(view, values); break;
        case dtype::u16: convert<std::uint16_t>(view, values); break;
        case dtype::u8: convert<std::uint8_t>(view, values); break;
        case dtype::boolean: convert<std::uint8_t>(view, values, [](auto byte) { return byte != 0; }); break;
        }
        return values;
    }

    /// Returns the elements of a tensor of shape `expected`, in which -1 stands for any size.
    ///
    /// Throws as the other `read` does, and if the shape is another.
    template <class T>
    std::vector<T> read(std::string_view name, std::vector<index_t> const& expected) const {
        auto const& view = tensor(name);
        auto const same = [](index_t want, index_t have) { return want == -1 || want == have; };
        if (!std::ranges::equal(expected, view.shape, same))
            throw error(where_, "shape of tensor " + detail::quote(name), show(expected), show(view.shape));
        return read<T>(name);
    }

private:
    safetensors(std::string bytes, std::string where)
        : file_(std::make_shared<std::string const>(std::move(bytes))), where_(std::move(where)) {
        constexpr std::uint64_t prefix = sizeof(std::uint64_t), longest_header = 100'000'000;
        std::uint64_t const size = file_->size();
        if (size < prefix) throw error(where_, "length of the file", "at least 8 bytes", std::to_string(size));
        std::uint64_t header = 0;
        std::memcpy(&header, file_->data(), prefix);
        auto const most = std::min(longest_header, size - prefix);
        if (header > most)
            throw error(where_, "length of the header", "at most " + std::to_string(most) + " bytes",
                        std::to_string(header));
        std::string_view const text(file_->data() + prefix, header);
        if (!text.starts_with('{')) throw error(where_, "header", "a JSON object", detail::quote(text.substr(0, 8)));
        data_ = std::as_bytes(std::span(*file_)).subspan(prefix + header);

        auto const root = json_value::parse(text, where_, {.bytes = longest_header});
        std::vector<std::pair<range, std::string const*>> ranges;
        for (auto const& name : root.keys()) {
            if (name == "__metadata__") {
                auto const texts = root.at(name);
                for (auto const& key : texts.keys()) metadata_.emplace(key, texts.get<std::string>(key));
            } else {
                auto const [place, bytes_of] = add(name, root.at(name));
                ranges.emplace_back(bytes_of, place);
            }
        }
        check_cover(std::move(ranges));
    }

    /// Adds one tensor; returns its name and the bytes it takes of the data.
    std::pair<std::string const*, range> add(std::string const& name, json_value const& entry) {
        auto const wrong = [&](char const* what, std::string expected, std::string got) {
            return error(where_, std::string(what) + " of tensor " + detail::quote(name), std::move(expected),
                         std::move(got));
        };
        auto const code = entry.get<std::string>("dtype");
        auto const known = std::ranges::find(dtype_names, code);
        if (known == dtype_names.end())
            throw wrong("dtype", "F64, F32, F16, BF16, I64, I32, I16, I8, U64, U32, U16, U8 or BOOL",
                        detail::quote(code));
        auto const type = static_cast<dtype>(known - dtype_names.begin());

        auto shape = entry.get<std::vector<index_t>>("shape");
        index_t needed = static_cast<index_t>(size_of(type));
        for (index_t const n : shape) {
            if (n < 0) throw wrong("shape", "sizes of at least 0", show(shape));
            if (n > 0 && needed > std::numeric_limits<index_t>::max() / n)
                throw wrong("shape", "fewer than 2^63 bytes", show(shape));
            needed *= n;
        }
        auto const offsets = entry.get<std::vector<index_t>>("data_offsets");
        if (offsets.size() != 2) throw wrong("data_offsets", "2 numbers", std::to_string(offsets.size()));
        range const taken = {offsets[0], offsets[1]};
        auto const have = static_cast<index_t>(data_.size());
        if (taken.first < 0 || taken.last < taken.first || taken.last > have)
            throw wrong("data_offsets", "0 <= begin <= end <= " + std::to_string(have), show(offsets));
        if (taken.size() != needed)
            throw wrong("size", std::to_string(needed) + " bytes for " + code + " " + show(shape),
                        std::to_string(taken.size()));

        auto const bytes = data_.subspan(static_cast<std::size_t>(taken.first), static_cast<std::size_t>(needed));
        auto const place = tensors_.emplace(name, tensor_view{name, type, std::move(shape), bytes}).first;
        return {&place->first, taken};
    }

    /// Throws unless the ranges, laid in order, fill the data exactly.
    void check_cover(std::vector<std::pair<range, std::string const*>> ranges) const {
        std::ranges::sort(ranges, {}, [](auto const& item) { return std::pair(item.first.first, item.first.last); });
        index_t covered = 0;
        for (auto const& [taken, name] : ranges) {
            if (taken.first != covered)
                throw error(where_,
                            (taken.first < covered ? "overlap before tensor " : "gap before tensor ") +
                                detail::quote(*name),
                            "a begin of " + std::to_string(covered), std::to_string(taken.first));
            covered = taken.last;
        }
        if (covered != static_cast<index_t>(data_.size()))
            throw error(where_, "bytes that belong to no tensor", std::to_string(covered) + " bytes of data",
                        std::to_string(data_.size()));
    }

    template <class Map>
    typename Map::mapped_type const& lookup(Map const& map, char const* kind, std::string_view name) const {
        if (auto const found = map.find(name); found != map.end()) return found->second;
        // Most like: the longest common beginning and end together, which suits dotted names.
        std::vector<std::pair<index_t, std::string_view>> near;
        for (auto const& [other, value] : map) {
            auto const head = std::mismatch(name.begin(), name.end(), other.begin(), other.end()).first - name.begin();
            auto const tail = std::mismatch(name.rbegin(), name.rend(), other.rbegin(), other.rend()).first;
            near.emplace_back(-std::min<index_t>(head + (tail - name.rbegin()), std::ssize(other)), other);
        }
        auto const shown = near.begin() + std::min<index_t>(3, std::ssize(near));
        std::ranges::partial_sort(near, shown);
        std::string names;
        for (auto item = near.begin(); item != shown; ++item)
            names += (names.empty() ? ", such as " : ", ") + detail::quote(item->second);
        throw error(where_, kind + detail::quote(name),
                    "one of the " + std::to_string(map.size()) + " in the file" + names, "none of that name");
    }

    static std::string show(std::vector<index_t> const& numbers) {
        std::string text;
        for (std::size_t i = 0; i < numbers.size() && i < 9; ++i)
            text += (i ? ", " : "") + (i == 8 ? "..." : std::to_string(numbers[i]));
        return "[" + text + "]";
    }

    /// Fills `values` from elements stored as `Stored`, each passed through `decode` first.
    template <class Stored, class T, class Decode = std::identity>
    void convert(tensor_view const& view, std::vector<T>& values, Decode decode = {}) const {
        using decoded = std::remove_cvref_t<std::invoke_result_t<Decode, Stored&>>;
        if constexpr (std::floating_point<decoded> && std::integral<T>) {
            throw error(where_, "dtype of tensor " + detail::quote(view.name), "an integer dtype or BOOL",
                        std::string(dtype_names[static_cast<std::size_t>(view.dtype)]));
        } else {
            for (std::size_t i = 0; i < values.size(); ++i) {
                Stored stored;
                std::memcpy(&stored, view.bytes.data() + i * sizeof(Stored), sizeof(Stored));
                decoded const value = decode(stored);
                if (!detail::holds<T>(value))
                    throw error(where_, "element " + std::to_string(i) + " of tensor " + detail::quote(view.name),
                                std::same_as<T, index_t> ? "an int64"
                                : std::same_as<T, float> ? "a float"
                                                         : "a double",
                                nlohmann::json(value).dump());
                values[i] = static_cast<T>(value);
            }
        }
    }

    static constexpr std::array<std::string_view, 13> dtype_names = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16",
                                                                     "I8",  "U64", "U32", "U16",  "U8",  "BOOL"};

    std::shared_ptr<std::string const> file_;
    std::string where_;
    std::span<std::byte const> data_;
    std::map<std::string, tensor_view, std::less<>> tensors_;
    std::map<std::string, std::string, std::less<>> metadata_;
};

} // namespace cpx
