#pragma once

#include <chrono>
#include <new>
#include <thread>
#include <utility>

#include "stitch/base/freed_memory.h"

namespace stitch::base {

// The result of `step`, which changes nothing when it has no memory: a short lack of that is waited
// for, less than 0.1 s. For what has come and is not sent again. Throws what `step` throws, and
// std::bad_alloc in the end. Any thread.
template <class Step>
auto patiently(Step&& step) {
  constexpr int kTries = 6;
  for (int i = 1; i < kTries; ++i) {
    try {
      return step();
    } catch (const std::bad_alloc&) {
      return_freed_memory();
      std::this_thread::sleep_for(std::chrono::milliseconds(1 << i));
    }
  }
  return step();
}

}  // namespace stitch::base
