// SPDX-License-Identifier: Apache-2.0
// The model in float64, on the host.
#include "host.hpp"

namespace qwen {

template outcome run(checkpoint<double> const&, input const&, strategy const&, int, cpx::index_t, bool, int);

} // namespace qwen
