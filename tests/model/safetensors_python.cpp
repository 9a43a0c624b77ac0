// SPDX-License-Identifier: Apache-2.0
// Hugging Face's own library, where python3 has it, reads what is written here, and writes the same bytes.
#include <cpx/model/safetensors_writer.hpp>

#include "model/faults.hpp"
#include "model/random_tensors.hpp"

#include <doctest/doctest.h>

#include <support/random.hpp>
#include <support/skipped.hpp>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace {

/// Prints what the library finds in a file, a line a tensor, and writes it again; without numpy or torch.
constexpr char const* program = R"(
import sys, ctypes, json, safetensors
own = {"U64": "uint64", "I64": "int64", "F64": "float64", "F32": "float32", "U32": "uint32", "I32": "int32",
       "BF16": "bfloat16", "F16": "float16", "U16": "uint16", "I16": "int16", "I8": "int8", "U8": "uint8",
       "BOOL": "bool"}
for name in sys.argv[1:]:
    data = open(name, "rb").read()
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__")
    tensors, kept = {}, []
    with open(name + ".seen", "w") as out:
        for tensor, t in sorted(safetensors.deserialize(data)):
            content = bytes(t["data"])
            print(tensor.encode().hex(), t["dtype"], *t["shape"], ".", content.hex(), file=out)
            if hasattr(safetensors, "TensorSpec"):
                kept.append(ctypes.create_string_buffer(content, len(content)))
                tensors[tensor] = safetensors.TensorSpec(dtype=own[t["dtype"]], shape=list(t["shape"]),
                                                         data_ptr=ctypes.addressof(kept[-1]), data_len=len(content))
            else:
                tensors[tensor] = {"dtype": own[t["dtype"]], "shape": list(t["shape"]), "data": content}
    with open(name + ".again", "wb") as out:
        out.write(safetensors.serialize(tensors, metadata))
)";

std::string hex(std::string const& bytes) {
    std::string text;
    for (char const c : bytes)
        for (int const half : {c >> 4 & 15, c & 15}) text += "0123456789abcdef"[half];
    return text;
}

std::string bytes_of(std::string const& file) {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

} // namespace

TEST_SUITE("model") {
    TEST_CASE("Hugging Face's library reads the tensors that were written and writes the same bytes") {
        bool const found = std::system("python3 -c 'import safetensors' 2>/dev/null") == 0;
        if (!support::enough(1, found, "safetensors of python3")) return;
        faults::directory const place;
        std::string command = "python3 '" + place.write("program.py", program).string() + '\'';
        std::vector<std::string> files, expected;
        for (std::uint64_t seed = 1000; seed < 1040; ++seed) {
            support::splitmix numbers(seed);
            auto const tensors = random_tensors::make(numbers);
            auto const path = (place.path() / std::to_string(seed)).string();
            random_tensors::write(path, tensors, random_tensors::texts(numbers, 1)); // whose order it does not keep
            cpx::safetensors const f(path);
            std::ostringstream lines;
            for (auto const& name : f.names()) {
                auto const& t = f.tensor(name);
                lines << hex(name) << ' ' << cpx::safetensors::name_of(t.dtype);
                for (auto const n : t.shape) lines << ' ' << n;
                auto const content = f.read_bytes(name);
                lines << " . " << hex({reinterpret_cast<char const*>(content.data()), content.size()}) << '\n';
            }
            files.push_back(path);
            expected.push_back(lines.str());
            command += " '" + path + '\'';
        }
        REQUIRE(std::system(command.c_str()) == 0);
        for (std::size_t i = 0; i < files.size(); ++i) {
            CAPTURE(files[i]);
            CHECK(bytes_of(files[i] + ".seen") == expected[i]);
            if (!expected[i].empty()) // of no tensors, 0.4 writes another header
                CHECK(bytes_of(files[i] + ".again") == bytes_of(files[i]));
        }
    }
}
