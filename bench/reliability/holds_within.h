#pragma once

#include <chrono>
#include <thread>

namespace stitch_reliability {

// Polls `condition`, about memory, sockets or counters of other processes: no event tells of these.
// False when it does not hold within `limit`.
template <class Condition>
[[nodiscard]] bool holds_within(std::chrono::steady_clock::duration limit, Condition condition) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  return true;
}

}  // namespace stitch_reliability
