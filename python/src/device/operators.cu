// SPDX-License-Identifier: Apache-2.0
// The operators whose elements are compiled in files of their own, and the rotary embedding.
#include "group.hpp"

#include <cpx/cuda/rotary.hpp>

#include <mutex>
#include <tuple>

namespace binding {

template <class T>
void convolve(device_group&, halo_value const&, convolution_call const&);
template <class T>
void convolve_backward(device_group&, halo_value const&, halo_value const&, convolution_call const&);
template <class T>
void attend(device_group&, attention_call const&);
template <class T>
void attend_backward(device_group&, attention_call const&);
template <class T>
void delta_rule(device_group&, carry_value const&, state_call const&);
template <class T>
void delta_rule_backward(device_group&, carry_value const&, state_call const&);
template <class T>
void head_decay(device_group&, carry_value const&, state_call const&);
template <class T>
void head_decay_backward(device_group&, carry_value const&, state_call const&);

extern template void convolve<float>(device_group&, halo_value const&, convolution_call const&);
extern template void convolve<__nv_bfloat16>(device_group&, halo_value const&, convolution_call const&);
extern template void convolve<__half>(device_group&, halo_value const&, convolution_call const&);
extern template void convolve_backward<float>(device_group&, halo_value const&, halo_value const&,
                                              convolution_call const&);
extern template void convolve_backward<__nv_bfloat16>(device_group&, halo_value const&, halo_value const&,
                                                      convolution_call const&);
extern template void convolve_backward<__half>(device_group&, halo_value const&, halo_value const&,
                                               convolution_call const&);
extern template void attend<float>(device_group&, attention_call const&);
extern template void attend<__nv_bfloat16>(device_group&, attention_call const&);
extern template void attend<__half>(device_group&, attention_call const&);
extern template void attend_backward<float>(device_group&, attention_call const&);
extern template void attend_backward<__nv_bfloat16>(device_group&, attention_call const&);
extern template void attend_backward<__half>(device_group&, attention_call const&);
extern template void delta_rule<float>(device_group&, carry_value const&, state_call const&);
extern template void delta_rule<__nv_bfloat16>(device_group&, carry_value const&, state_call const&);
extern template void delta_rule<__half>(device_group&, carry_value const&, state_call const&);
extern template void delta_rule_backward<float>(device_group&, carry_value const&, state_call const&);
extern template void delta_rule_backward<__nv_bfloat16>(device_group&, carry_value const&, state_call const&);
extern template void delta_rule_backward<__half>(device_group&, carry_value const&, state_call const&);
template <class T>
index_t kept_of_chunk(device_group&);
extern template index_t kept_of_chunk<__nv_bfloat16>(device_group&);
extern template void head_decay<float>(device_group&, carry_value const&, state_call const&);
extern template void head_decay<__nv_bfloat16>(device_group&, carry_value const&, state_call const&);
extern template void head_decay<__half>(device_group&, carry_value const&, state_call const&);
extern template void head_decay_backward<float>(device_group&, carry_value const&, state_call const&);
extern template void head_decay_backward<__nv_bfloat16>(device_group&, carry_value const&, state_call const&);
extern template void head_decay_backward<__half>(device_group&, carry_value const&, state_call const&);

namespace {

template <class F>
void with_float(tensor const& t, F&& f) {
    with_type<float, __nv_bfloat16, __half>(t, std::forward<F>(f));
}

/// Returns what turns pairs on a device, kept for the process: models have few. Throws `cpx::error` if it is to be made
/// in a capture.
cuda::rotary_pairs const& pairs_of(int device, rotary_call const& c, cudaStream_t stream) {
    using key = std::tuple<int, std::vector<double>, std::vector<int>, cpx::rounding>;
    static std::mutex guard;
    static auto& known = *new std::map<key, cuda::rotary_pairs>; // CUDA may end before this library does
    std::lock_guard const lock(guard);
    key const of(device, c.frequencies, c.axes, c.how);
    auto found = known.find(of);
    if (found == known.end()) {
        cpx::require(!is_capturing(stream), c.x.where, "first call with such frequencies",
                     "before the capture of a graph", "in it");
        found = known.try_emplace(of, std::span<double const>(c.frequencies), c.axes, c.how).first;
    }
    return found->second;
}

} // namespace

void convolve_on(device_group& g, halo_value const& before, convolution_call const& c) {
    on_device const here(g.nccl().device());
    with_float(c.x, [&]<class T>(as<T>) { convolve<T>(g, before, c); });
}

void convolve_backward_on(device_group& g, halo_value const& before, halo_value const& after,
                          convolution_call const& c) {
    on_device const here(g.nccl().device());
    with_float(c.x, [&]<class T>(as<T>) { convolve_backward<T>(g, before, after, c); });
}

void attend_on(device_group& g, attention_call const& c, bool back) {
    on_device const here(g.nccl().device());
    with_float(c.q, [&]<class T>(as<T>) { back ? attend_backward<T>(g, c) : attend<T>(g, c); });
}

void recur_on(device_group& g, carry_value const& plan, state_call const& c, bool back) {
    on_device const here(g.nccl().device());
    with_float(c.x[0], [&]<class T>(as<T>) {
        if (c.x.size() == 4)
            back ? head_decay_backward<T>(g, plan, c) : head_decay<T>(g, plan, c);
        else
            back ? delta_rule_backward<T>(g, plan, c) : delta_rule<T>(g, plan, c);
    });
}

index_t kept_on(device_group& g) { return kept_of_chunk<__nv_bfloat16>(g); } // of half as many

void rotate_on(framework& from, int device, rotary_call const& c) {
    on_device const here(device);
    auto const stream = static_cast<cudaStream_t>(from.stream(device));
    auto const list = list_to<std::int64_t>(c.positions);
    static_assert(sizeof(index_t) == sizeof(std::int64_t));
    index_t const count = c.positions.dimensions() > 1 ? c.positions.size(0) : 1;
    cpx::rows<index_t const> const at(reinterpret_cast<index_t const*>(list.data()), count,
                                      count > 0 ? std::ssize(list) / count : 0);
    with_float(c.x, [&]<class T>(as<T>) {
        cuda::rotated<T> const pair{rows_of<T>(c.x), rows_to<T>(c.y)};
        auto const& pairs = pairs_of(device, c, stream);
        if (c.back)
            cuda::rotary_backward<T>(std::span(&pair, 1), c.head_dim, pairs, cuda::rotary_positions(at), stream);
        else
            cuda::rotary<T>(std::span(&pair, 1), c.head_dim, pairs, cuda::rotary_positions(at), stream);
    });
}

} // namespace binding
