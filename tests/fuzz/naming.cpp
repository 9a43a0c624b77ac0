// SPDX-License-Identifier: Apache-2.0
// Names of parameters of any bytes: the first says which rank and chunk has it.
#include <cpx/model/naming.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace {

void expect(bool holds) {
    if (!holds) std::abort();
}

/// Of 8 ranks, pp 2 in 2 chunks, ep 2: 64 layers with 256 experts.
cpx::naming const& job() {
    static cpx::naming const names(cpx::mesh({.world = 8, .pp = 2, .ep = 2}),
                                   cpx::pipeline({.layers = 64, .ranks = 2, .chunks = 2}), 256);
    return names;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    if (size == 0) return 0;
    std::string const text(reinterpret_cast<char const*>(data) + 1, size - 1);
    int const rank = data[0] % 8, chunk = data[0] / 8 % 2;
    cpx::parameter_name const known = cpx::parse_parameter_name(text);
    expect(known.root <= text.size());
    for (auto const& number : {known.layer, known.expert})
        if (number) expect(number->begin < number->end && number->end <= text.size() && number->value >= 0);
    if (known.layer && known.expert) expect(known.layer->end < known.expert->begin);
    try {
        if (known.form == cpx::expert_form::buffer)
            for (auto const& view : job().split_experts(text, 256, 128, rank, chunk)) {
                expect(job().local(view.name, rank, chunk).has_value());
                expect(view.place(view.rows - 1, view.columns - 1) < 256 * 128);
            }
        std::string const global = job().global(text, rank, chunk);
        if (known.layer || known.expert)
            expect(job().local(global, rank, chunk) == text);
        else
            expect(global == text);
    } catch (cpx::error const&) {
    }
    return 0;
}
