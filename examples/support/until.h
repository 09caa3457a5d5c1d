#pragma once

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

// Waits until `condition()` holds. Throws std::runtime_error after half a minute.
template <class Condition>
void until(const std::string& what, Condition condition) {
  for (int i = 0; i < 3000; ++i) {
    if (condition()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  throw std::runtime_error("waited in vain until " + what);
}
