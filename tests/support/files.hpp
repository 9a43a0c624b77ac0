// SPDX-License-Identifier: Apache-2.0
// Where the files lie that tests read. One object file knows, so that compilers' caches serve every checkout.
#pragma once

namespace support {

extern char const* const source_dir; ///< the root of the repository
extern char const* const golden_dir; ///< tests/golden

} // namespace support
