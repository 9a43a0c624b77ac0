// SPDX-License-Identifier: Apache-2.0
// Names of what a profiler sees.
#pragma once

#include <nvtx3/nvtx3.hpp>

namespace cpx::cuda {

/// The domain under which profilers list cpx.
struct nvtx_domain {
    static constexpr char const* name{"cpx"};
};

/// Names what is enqueued while it lives: `named_range const r(names::exchange());`. Costs some nanoseconds without a
/// profiler.
using named_range = nvtx3::scoped_range_in<nvtx_domain>;
using range_name = nvtx3::registered_string_in<nvtx_domain>;

/// Names are registered once, so that a range holds a handle and no text.
namespace names {

inline range_name const& exchange() {
    static range_name const name("cpx exchange, send and receive");
    return name;
}
inline range_name const& relayout() {
    static range_name const name("cpx relayout, one kernel");
    return name;
}

} // namespace names

} // namespace cpx::cuda
