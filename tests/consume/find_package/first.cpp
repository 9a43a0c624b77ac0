// SPDX-License-Identifier: Apache-2.0
#include "rows.hpp"

cpx::index_t optimised();

int main() { return moved_rows() == optimised() ? 0 : 1; }
