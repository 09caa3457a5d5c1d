// Gatherings whose workers find no memory.
#include <gtest/gtest.h>

#include <cstdint>
#include <new>
#include <string>

#include "tests/rpc/gather_exchange_fixture.h"
#include "tests/support/failing_memory.h"

namespace stitch::rpc {
namespace {

using stitch::testing::FailingMemory;
class GatherExchangesWithoutMemory : public GatherExchanges {};

constexpr std::int64_t kAll = std::int64_t{1} << 40;

TEST_F(GatherExchangesWithoutMemory, WaitsEndWithoutMemory) {
  const std::string key = "a/1 b/1 c/1 #0";
  const auto stopped = exchange.fetch(key, kA);
  const auto lost = exchange.fetch(key, kC);
  FailingMemory::begin(1, kAll);
  exchange.stop_waiting(key, stopped.wait);
  exchange.on_lost(kC);
  FailingMemory::end();
  expect_failed(stopped.value, ErrorCode::cancelled, "its caller waits no more");
  expect_failed(lost.value, ErrorCode::cancelled, "its caller waits no more");
  EXPECT_EQ(exchange.size(), 0U);
}

TEST_F(GatherExchangesWithoutMemory, AFetchThatFindsNoMemoryLeavesNothing) {
  const std::string key = "a/1 b/1 c/1 #0";
  int thrown = 0;
  for (std::int64_t allocation = 1;; ++allocation) {
    FailingMemory::begin(allocation);
    try {
      static_cast<void>(exchange.fetch(key, kA));
      FailingMemory::end();
      break;
    } catch (const std::bad_alloc&) {
      FailingMemory::end();
    }
    ++thrown;
    EXPECT_EQ(exchange.size(), 0U) << allocation;
  }
  EXPECT_GT(thrown, 1);
}

}  // namespace
}  // namespace stitch::rpc
