// SPDX-License-Identifier: Apache-2.0
// The model on the host, in float64.
#include "host.hpp"

namespace qwen {

template outcome run(checkpoint<double> const&, input const&, strategy const&, group const&, cpx::index_t, bool);

} // namespace qwen
