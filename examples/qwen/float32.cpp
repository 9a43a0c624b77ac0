// SPDX-License-Identifier: Apache-2.0
// The model on the host, in float32.
#include "host.hpp"

namespace qwen {

template outcome run(checkpoint<float> const&, input const&, strategy const&, group const&, cpx::index_t, bool);

} // namespace qwen
