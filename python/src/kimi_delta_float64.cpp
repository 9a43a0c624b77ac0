// SPDX-License-Identifier: Apache-2.0
#include "recurrence.hpp"

template void binding::run_recurrence<cpx::kimi_delta_attention, double>(binding::recurrence_call const&);
