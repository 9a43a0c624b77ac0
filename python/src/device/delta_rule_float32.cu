// SPDX-License-Identifier: Apache-2.0
#include "delta_rule.cuh"

template void binding::delta_rule<float>(device_group&, carry_value const&, delta_rule_call const&);
