#pragma once

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tests/support/sanitizers.h"

namespace stitch::testing {

// Whether tests of random histories run all of them: ALL_HISTORIES=1, as in the tier sweep.
[[nodiscard]] inline bool all_histories() {
  const char* const all = std::getenv("ALL_HISTORIES");
  return all != nullptr && std::string_view(all) == "1";
}

// How many of `count` histories a test runs: all with ALL_HISTORIES=1, else a tenth, as
// always in the sanitizers' builds, which are slow.
[[nodiscard]] inline std::uint64_t share_of(std::uint64_t count) {
  return all_histories() && !kAddressSanitizer && !kThreadSanitizer ? count : (count + 9) / 10;
}

}  // namespace stitch::testing
