#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "stitch/rpc/worker.h"
#include "tests/gpu/double_torch_device.h"
#include "tests/support/eventually.h"

namespace stitch::testing {

// For tests over the double of CUDA and NCCL: what nothing puts in order fails them.
class DirectFixture : public ::testing::Test {
 protected:
  void TearDown() override {
    double_device::workers_are_processes(false);
    EXPECT_EQ(double_device::take_violations(), "");
  }
};

// A number of debug_info(); 0 where there is none of that name.
[[nodiscard]] inline std::int64_t count(Worker& worker, const std::string& key) {
  const auto numbers = worker.debug_info();
  const auto found = numbers.find(key);
  return found == numbers.end() ? 0 : found->second;
}
// Waits until what this worker sends has ended, and so is counted: an answer may be here before.
[[nodiscard]] inline bool all_is_counted(Worker& worker) {
  return eventually([&] { return count(worker, "gpu.transfers_sending") == 0; });
}

}  // namespace stitch::testing
