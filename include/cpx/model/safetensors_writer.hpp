// SPDX-License-Identifier: Apache-2.0
// A writer of safetensors files, tensor by tensor: the file is there whole, or not at all.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/new_file.hpp>
#include <cpx/model/safetensors.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace cpx {

/// Writes one safetensors file: all tensors are declared, then their bytes come, tensors in any order.
///
/// The file is written beside its place, and put there by `finish`, so that
/// whoever looks finds the old file or the new one. A writer that ends before leaves nothing. The same tensors and
/// metadata give the same bytes, in whatever order they are declared and written: metadata stand sorted, tensors by
/// dtype (U64, I64, F64, F32, U32, I32, BF16, F16, U16, I16, I8, U8, BOOL) and name, each aligned to its elements,
/// which are the bytes that Hugging Face's own library (0.5 to 0.8) writes for at most one text of metadata.
/// Not for several threads at a time.
class safetensors_writer {
public:
    /// A tensor to come.
    struct tensor_info {
        std::string name;
        safetensors::dtype dtype = safetensors::dtype::f32;
        std::vector<index_t> shape;
    };
    using texts = std::map<std::string, std::string, std::less<>>;

    /// Begins a file that will be `path`, takes its room on the disk and writes its header.
    ///
    /// Throws `cpx::error` that names the file for what `safetensors` would refuse: a name twice, `__metadata__`, names
    /// and texts that are not UTF-8, a shape that is none, a header of more than 100 MB; and if there is no room, the
    /// directory is missing or the file cannot be written.
    explicit safetensors_writer(std::filesystem::path const& path, std::vector<tensor_info> const& tensors,
                                texts const& metadata = {}, caller here = caller::here())
        : name_(path.string()) {
        auto const header = lay_out(tensors, metadata, here);
        file_ = detail::new_file(path, data_ + total_, here);
        std::uint64_t const length = header.size();
        file_.write(0, std::as_bytes(std::span(&length, 1)), here);
        file_.write(sizeof length, std::as_bytes(std::span(header)), here);
    }

    /// Returns the name of the file, as errors give it.
    std::string const& where() const { return name_; }

    /// Writes the next bytes of a tensor, row-major and little-endian: all of them, or some and then the next.
    ///
    /// Throws `cpx::error` if no such tensor was declared, if it has fewer bytes left, and if they cannot be written.
    void write(std::string_view name, std::span<std::byte const> bytes, caller here = caller::here()) {
        auto const at = tensors_.find(name);
        if (at == tensors_.end())
            throw error(where(), "tensor " + quote(name), "one of the " + std::to_string(tensors_.size()) + " declared",
                        "none of that name", here);
        auto& [first, size, written] = at->second;
        auto const count = static_cast<index_t>(bytes.size());
        if (count > size - written)
            throw error(where(), "bytes of tensor " + quote(name),
                        std::to_string(size) +
                            (written ? " in all, of which " + std::to_string(written) + " are written" : ""),
                        std::to_string(count) + (written ? " more" : ""), here);
        file_.write(static_cast<std::uint64_t>(first + written), bytes, here);
        written += count;
    }

    /// Puts the file into its place, instead of one that is there. Nothing can be written after it.
    ///
    /// Throws `cpx::error` that names the first tensor of which bytes are missing, or if the system refuses; then the
    /// file is not there.
    void finish(caller here = caller::here()) {
        for (auto const& [name, t] : tensors_)
            if (t.written != t.size)
                throw error(where(), "bytes of tensor " + quote(name), std::to_string(t.size),
                            std::to_string(t.written), here);
        file_.commit(here);
    }

private:
    /// Where the bytes of a tensor lie in the file, and how many of them are there.
    struct place {
        index_t first = 0, size = 0, written = 0;
    };

    /// Returns the header; fills in where the data begin, their size, and the place of each tensor.
    std::string lay_out(std::vector<tensor_info> const& tensors, texts const& metadata, caller here) {
        using type = safetensors::dtype;
        constexpr std::array order = {type::u64, type::i64, type::f64, type::f32, type::u32, type::i32,    type::bf16,
                                      type::f16, type::u16, type::i16, type::i8,  type::u8,  type::boolean};
        std::vector<std::tuple<std::size_t, std::string_view, tensor_info const*>> sorted;
        for (auto const& t : tensors) {
            auto const at = std::ranges::find(order, t.dtype);
            if (at == order.end())
                throw error(where(), "dtype of tensor " + quote(t.name), "one of safetensors::dtype",
                            std::to_string(static_cast<int>(t.dtype)), here);
            sorted.emplace_back(at - order.begin(), t.name, &t);
        }
        std::ranges::sort(sorted);

        std::string header = "{";
        if (!metadata.empty()) header += "\"__metadata__\":" + json_of(metadata, "metadata", here);
        for (auto const& item : sorted) {
            auto const& t = *std::get<2>(item);
            auto const wrong = [&](char const* what, std::string expected, std::string got) {
                return error(where(), what + (" of tensor " + quote(t.name)), std::move(expected), std::move(got),
                             here);
            };
            auto const size = safetensors::bytes_of(t.dtype, t.shape);
            if (!size) throw wrong("shape", safetensors::wanted_of(t.shape), safetensors::show(t.shape));
            if (*size > std::numeric_limits<index_t>::max() - safetensors::longest_header - 8 - total_)
                throw wrong("bytes up to the end", "fewer than 2^63", "more");
            if (t.name == "__metadata__") throw wrong("name", "another than that of metadata", "this");
            if (!tensors_.emplace(t.name, place{total_, *size, 0}).second)
                throw wrong("name", "every tensor once", "this twice");
            header += (header.size() > 1 ? "," : "") + json_of(t.name, "name of tensor " + quote(t.name), here) +
                      R"(:{"dtype":")" + std::string(safetensors::name_of(t.dtype)) + R"(","shape":)" +
                      nlohmann::json(t.shape).dump() + R"(,"data_offsets":[)" + std::to_string(total_) + ',' +
                      std::to_string(total_ + *size) + "]}";
            total_ += *size;
        }
        header += '}';
        constexpr std::size_t unit = 8; // of alignment, to which blanks fill up
        header.resize((header.size() + unit - 1) / unit * unit, ' ');
        if (std::ssize(header) > safetensors::longest_header)
            throw error(where(), "length of the header",
                        "at most " + std::to_string(safetensors::longest_header) + " bytes",
                        std::to_string(header.size()), here);
        data_ = static_cast<index_t>(sizeof(std::uint64_t) + header.size());
        for (auto& item : tensors_) item.second.first += data_;
        return header;
    }

    template <class Value>
    std::string json_of(Value const& value, std::string const& what, caller here) const {
        try {
            return nlohmann::json(value).dump();
        } catch (nlohmann::json::exception const&) {
            throw error(where(), what, "text in UTF-8", "other bytes", here);
        }
    }

    std::string name_;
    detail::new_file file_;
    std::map<std::string, place, std::less<>> tensors_;
    index_t data_ = 0, total_ = 0;
};

} // namespace cpx
