// SPDX-License-Identifier: Apache-2.0
#include "attention.cuh"

template void binding::attend<float>(device_group&, attention_call const&);
template void binding::attend_backward<float>(device_group&, attention_call const&);
