// SPDX-License-Identifier: Apache-2.0
// Files of any bytes: their tensors are read in every way, and what they say of a shard. The first byte says in which
// ways the rest becomes a file: as it is, or as a header behind its right length, with data of so many bytes.
#include <cpx/model/safetensors.hpp>
#include <cpx/model/shard.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

void expect(bool holds) {
    if (!holds) std::abort();
}

/// Returns whether `call` throws no `cpx::error`; other exceptions end the program.
template <class F>
bool succeeds(F const& call) {
    try {
        call();
        return true;
    } catch (cpx::error const&) {
        return false;
    }
}

template <class T>
void read(cpx::safetensors const& file, std::string const& name) {
    auto const& info = file.tensor(name);
    succeeds([&] { expect(std::ssize(file.read<T>(name)) == info.elements()); });
    succeeds([&] { expect(std::ssize(file.read<T>(name, info.shape)) == info.elements()); });
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    if (size == 0) return 0;
    std::string bytes(reinterpret_cast<char const*>(data) + 1, size - 1);
    std::uint64_t const header = bytes.size();
    if (data[0] & 1) {
        std::string prefix(sizeof header, '\0');
        std::memcpy(prefix.data(), &header, sizeof header);
        bytes = prefix + bytes + std::string(data[0] >> 1, '\x3c');
    }
    auto const total = static_cast<cpx::index_t>(bytes.size());
    succeeds([&] {
        auto const file = cpx::safetensors::parse(std::move(bytes), "file");
        cpx::index_t covered = 0;
        for (auto const& name : file.names()) {
            auto const& info = file.tensor(name);
            covered += info.bytes.size();
            expect(0 <= info.bytes.first && info.bytes.first <= info.bytes.last && info.bytes.last <= total);
            expect(cpx::safetensors::bytes_of(info.dtype, info.shape) == info.bytes.size());
            expect(std::ssize(file.read_bytes(name)) == info.bytes.size());
            std::vector<std::byte> more(static_cast<std::size_t>(info.bytes.size() + 1));
            expect(!succeeds([&] { file.read_bytes(name, 0, more); }));
            read<float>(file, name);
            read<double>(file, name);
            read<cpx::index_t>(file, name);
        }
        expect(covered < total); // and the header is the rest
        succeeds([&] {
            auto const said = cpx::read_shard_header(file);
            if (said.sizes.mesh.world <= 64) // else it takes long
                succeeds([&] { expect(!cpx::shard_cells(said.sizes).empty()); });
        });
    });
    return 0;
}
