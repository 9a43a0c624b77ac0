// SPDX-License-Identifier: Apache-2.0
#include "rows.hpp"

cpx::index_t optimised();

cpx::index_t optimised() { return moved_rows(); }
