// SPDX-License-Identifier: Apache-2.0
#include "attention.cuh"

template void binding::attend<__half>(device_group&, attention_call const&);
template void binding::attend_backward<__half>(device_group&, attention_call const&);
