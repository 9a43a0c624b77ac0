// SPDX-License-Identifier: Apache-2.0
#include <cpx/cpx.hpp>
