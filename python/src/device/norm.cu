// SPDX-License-Identifier: Apache-2.0
// The gates of a gated delta net, and the norm of its output.
#include "group.hpp"

#include "../gates.hpp"

#include <cpx/cuda/elements.hpp>
#include <cpx/ops/cuda/norm.hpp>

namespace binding {

namespace {

/// Returns the order of the current stream; nothing is allocated there.
cuda::memory in_stream(framework& from, int device) {
    return cuda::memory(static_cast<cudaStream_t>(from.stream(device)));
}

} // namespace

void normalise_on(framework& from, int device, norm_call const& c, bool back) {
    on_device const here(device);
    auto const memory = in_stream(from, device);
    with_type<float, __nv_bfloat16, __half>(c.x, [&]<class T>(as<T>) {
        auto const gain = list_to<T>(c.weight);
        cpx::head_norm<T> const norm{
            rows_of<T>(c.x), rows_of<T>(c.z), {gain.data(), 1, std::ssize(gain)}, static_cast<float>(c.eps), 0};
        if (back)
            cuda::normalise_backward<T>(memory, norm, rows_of<T>(c.dy), rows_to<T>(c.dx), rows_to<T>(c.dz),
                                        rows_to<float>(c.terms));
        else
            cuda::normalise<T>(memory, norm, rows_to<T>(c.y));
    });
}

void open_gates_on(framework& from, int device, gates_call const& c, bool back) {
    on_device const here(device);
    char const* const where = c.a.where;
    auto const memory = in_stream(from, device);
    auto const list = [](tensor const& t) { return std::span<float const>(list_to<float>(t)); };
    auto const of = gates_of<float>(where, rows_of<float>(c.b), rows_of<float>(c.a), list(c.A_log), list(c.dt_bias));
    if (back)
        open_gates_backward(where, of, rows_of<float>(c.dg), rows_of<float>(c.dbeta), rows_to<float>(c.db),
                            rows_to<float>(c.da), rows_to<float>(c.terms), memory);
    else
        open_gates(where, of, rows_to<float>(c.g), rows_to<float>(c.beta), memory);
}

} // namespace binding
