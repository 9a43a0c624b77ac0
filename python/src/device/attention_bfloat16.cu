// SPDX-License-Identifier: Apache-2.0
#include "attention.cuh"

template void binding::attend<__nv_bfloat16>(device_group&, attention_call const&);
template void binding::attend_backward<__nv_bfloat16>(device_group&, attention_call const&);
