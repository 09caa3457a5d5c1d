#pragma once

#include <cstdint>

namespace stitch::testing {

// Allocations that fail, in a program that links stitch_test_failing_memory: it has an operator new
// of its own, and nothing is recycled in it. Thread contract: one thread; the allocations are those
// of all threads, but for what is marked by UnfailingMemory and what libtorch's deleteNode() takes.
class FailingMemory {
 public:
  // Of the allocations from now on, counted from 1, those from `first` on fail: `count` of them.
  static void begin(std::int64_t first, std::int64_t count = 1) noexcept;
  // None fails any more. The number of those that have failed.
  static std::int64_t end() noexcept;
  // Writes to stderr where the last one has failed, as addresses.
  static void print_where() noexcept;
};

// A block in which this thread's allocations are not counted and do not fail. Blocks nest.
class UnfailingMemory {
 public:
  UnfailingMemory() noexcept { ++depth_; }
  ~UnfailingMemory() { --depth_; }
  UnfailingMemory(const UnfailingMemory&) = delete;
  UnfailingMemory& operator=(const UnfailingMemory&) = delete;
  [[nodiscard]] static bool on_this_thread() noexcept { return depth_ > 0; }

 private:
  static inline constinit thread_local int depth_ = 0;
};

}  // namespace stitch::testing
