// SPDX-License-Identifier: Apache-2.0
#include "delta_rule.cuh"

template void binding::delta_rule<__nv_bfloat16>(device_group&, carry_value const&, state_call const&);
template void binding::delta_rule_backward<__nv_bfloat16>(device_group&, carry_value const&, state_call const&);
template cpx::index_t binding::kept_of_chunk<__nv_bfloat16>(device_group&);
