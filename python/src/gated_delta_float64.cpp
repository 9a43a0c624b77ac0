// SPDX-License-Identifier: Apache-2.0
#include "recurrence.hpp"

template void binding::run_recurrence<binding::delta_rule, double>(binding::recurrence_call const&);
