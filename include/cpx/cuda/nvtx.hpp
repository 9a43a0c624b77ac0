// SPDX-License-Identifier: Apache-2.0
// Names of what a profiler sees.
#pragma once

#include <cpx/cuda/nvcc.hpp>

#include <nvtx3/nvtx3.hpp>

#include <algorithm>
#include <cstddef>

namespace cpx::cuda {

/// The domain under which profilers list cpx.
struct nvtx_domain {
    static constexpr char const* name{"cpx"};
};

namespace detail {

/// Text as an argument of templates.
template <std::size_t N>
struct literal {
    consteval literal(char const (&from)[N]) { std::copy_n(from, N, text); }
    char text[N];
};

} // namespace detail

/// Names what is enqueued while the result lives: `auto const range = named_range<"cpx relayout">();`. A name is
/// registered once, and a range holds its handle and no text. Costs some nanoseconds without a profiler.
template <detail::literal Name>
[[nodiscard]] nvtx3::scoped_range_in<nvtx_domain> named_range() {
    static nvtx3::registered_string_in<nvtx_domain> const name(Name.text);
    return nvtx3::scoped_range_in<nvtx_domain>(name);
}

} // namespace cpx::cuda
