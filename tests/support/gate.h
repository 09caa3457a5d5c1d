#pragma once

#include <gtest/gtest.h>

#include <atomic>

#include "tests/support/eventually.h"

namespace stitch::testing {

// Where functions of a test block until the test opens it. Closed at first; usable for several
// rounds. Thread contract: any thread.
class Gate {
 public:
  // Blocks while the gate is closed. Fails the test, and returns, when it is not opened in time.
  void pass() {
    ++arrivals_;
    EXPECT_TRUE(eventually([this] { return open_.load(); })) << "the gate was not opened in time";
  }
  // Waits until pass() has been called since the gate was last closed.
  [[nodiscard]] bool wait_for_arrival() {
    return eventually([this] { return arrivals_ > 0; });
  }
  void open() { open_ = true; }
  void close() {
    open_ = false;
    arrivals_ = 0;
  }

 private:
  std::atomic<bool> open_{false};
  std::atomic<int> arrivals_{0};
};

}  // namespace stitch::testing
