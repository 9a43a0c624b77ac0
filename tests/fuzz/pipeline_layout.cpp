// SPDX-License-Identifier: Apache-2.0
// Layout strings of any bytes: the first says how many pipeline ranks there are.
#include <cpx/model/pipeline.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace {

void expect(bool holds) {
    if (!holds) std::abort();
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    if (size == 0) return 0;
    std::string const text(reinterpret_cast<char const*>(data) + 1, size - 1);
    try {
        std::string const signs = cpx::unroll_pipeline_layout(text);
        expect(signs.size() <= 16384 && signs.find_first_not_of("EtmL|") == std::string::npos);
        expect(cpx::unroll_pipeline_layout(signs) == signs);
        auto const layers = std::ranges::count(signs, 't');
        cpx::pipeline const p({.layers = layers, .ranks = 1 + data[0] % 8, .layout = text});
        expect(p.layers() == layers);
        for (auto const& stage : p.stages())
            for (auto layer = stage.layers.first; layer < stage.layers.last; ++layer) {
                auto const at = p.find(layer);
                expect(&p.stage(at.rank, at.chunk) == &stage && p.offset(at.rank, at.chunk) + at.layer == layer);
            }
    } catch (cpx::error const&) {
    }
    return 0;
}
