#pragma once

#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <string>

namespace stitch::testing {

// What this process has in memory now.
[[nodiscard]] inline std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<std::size_t>(::getpagesize());
}

// By how much it had more at most while `task` ran, pages of mapped files included.
template <class Task>
[[nodiscard]] std::size_t growth_by(const Task& task) {
  std::ofstream("/proc/self/clear_refs") << 5;  // forgets the former peak
  const std::size_t before = resident_bytes();
  task();
  std::ifstream file("/proc/self/status");
  std::string word;
  while (file >> word && word != "VmHWM:") continue;
  std::size_t kib = 0;
  file >> kib;
  return kib * 1024 - before;
}

}  // namespace stitch::testing
