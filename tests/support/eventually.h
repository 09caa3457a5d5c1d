#pragma once

#include <chrono>
#include <thread>

namespace stitch::testing {

// Polls `condition` until it holds. False when it does not within `limit`.
template <class Condition>
[[nodiscard]] bool eventually(
    Condition&& condition, std::chrono::steady_clock::duration limit = std::chrono::seconds(20)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

}  // namespace stitch::testing
