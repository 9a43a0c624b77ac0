// SPDX-License-Identifier: Apache-2.0
#include "head_decay.cuh"

template void binding::head_decay<float>(device_group&, carry_value const&, state_call const&);
template void binding::head_decay_backward<float>(device_group&, carry_value const&, state_call const&);
