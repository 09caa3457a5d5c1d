#pragma once

#include <unistd.h>

#include <cstddef>
#include <fstream>

namespace stitch::testing {

// What this process has in memory now.
[[nodiscard]] inline std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<std::size_t>(::getpagesize());
}

}  // namespace stitch::testing
