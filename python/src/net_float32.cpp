// SPDX-License-Identifier: Apache-2.0
#include "net.hpp"

template void binding::run_net<float>(binding::net_call const&);
