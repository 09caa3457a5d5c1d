#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "stitch/rpc/agent/gather_exchange.h"

namespace stitch::rpc {

// The exchange of worker b, in a world of a, b and c.
class GatherExchanges : public ::testing::Test {
 protected:
  using Clock = GatherExchange::Clock;
  static constexpr auto kNever = Clock::time_point::max();
  static inline const WorkerInfo kA{"a", WorkerId(0), 1};
  static inline const WorkerInfo kB{"b", WorkerId(1), 1};
  static inline const WorkerInfo kC{"c", WorkerId(2), 1};

  static OwnedObject value() { return OwnedObject::of(std::make_shared<int>(7)); }
  static void expect_failed(const Future<OwnedObject>& future, ErrorCode code,
                            const std::string& text) {
    ASSERT_TRUE(future.ready() && future.has_error());
    EXPECT_EQ(future.error().code(), code);
    EXPECT_EQ(future.error().what(), text);
  }
  [[nodiscard]] std::string post(const std::vector<WorkerInfo>& lives,
                                 const std::vector<WorkerInfo>& others,
                                 Clock::time_point over = kNever) {
    return exchange.post(lives, value(), others, over);
  }
  GatherExchange exchange;
};

}  // namespace stitch::rpc
