// What workers give to barriers and all_gathers: published, fetched and dropped, without a network.
#include <new>

#include "stitch/rpc/agent/gather_exchange.h"
#include "tests/rpc/gather_exchange_fixture.h"
#include "tests/support/world_test.h"

namespace stitch::rpc::gather_exchange_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::eventually;

TEST_F(GatherExchanges, StoppingOneWaitLeavesAnotherOfTheSameCaller) {
  const auto first = exchange.fetch("a/1 b/1 #0", kA);
  const auto second = exchange.fetch("a/1 b/1 #0", kA);
  exchange.stop_waiting("a/1 b/1 #0", first.wait);
  EXPECT_TRUE(first.value.has_error());
  EXPECT_FALSE(second.value.ready());
  EXPECT_EQ(post({kA, kB}, {kA}), "a/1 b/1 #0");
  EXPECT_TRUE(second.value.ready() && !second.value.has_error());
  EXPECT_EQ(exchange.size(), 0U);
}

TEST_F(GatherExchanges, OnlyThoseInTheGatheringMayFetch) {
  const std::string key = post({kA, kB}, {kA});
  for (const std::string& each :
       {key, std::string("ac/1 b/1 #0"), std::string("c/10 #0"), std::string("c/1 #"),
        std::string("c/1 #x"), std::string("c/1 "), std::string()}) {
    const auto fetched = exchange.fetch(each, kC);
    expect_failed(fetched.value, ErrorCode::invalid_argument,
                  "worker \"c\" (id 2) has no part in that gathering");
  }
  EXPECT_EQ(exchange.size(), 1U) << "only what a has not fetched";
}

TEST_F(GatherExchanges, NumbersGoOnWhenAWorkerIsLost) {
  EXPECT_EQ(post({kA, kB, kC}, {}), "a/1 b/1 c/1 #0");
  exchange.on_lost(kC);
  // a may not know yet, and has the same number.
  EXPECT_EQ(post({kA, kB, kC}, {kA}), "a/1 b/1 c/1 #1");
  const auto fetched = exchange.fetch("a/1 b/1 c/1 #1", kA);
  EXPECT_TRUE(fetched.value.ready() && !fetched.value.has_error());
  const WorkerInfo again{"c", WorkerId(2), 2};
  EXPECT_EQ(post({kA, kB, again}, {kA}), "a/1 b/1 c/2 #0");
}

TEST_F(GatherExchanges, WhatIsOverIsDroppedByATimerAndALateFetchSaysSo) {
  const auto loop = std::make_shared<base::EventLoop>("test-loop");
  const auto owner = std::make_shared<int>(0);
  exchange.start(loop, owner);
  const auto kept = std::make_shared<int>(7);
  const std::string key = exchange.post({kA, kB}, OwnedObject::of(kept), {kA}, Clock::now() + 1ms);
  EXPECT_TRUE(eventually([&] { return exchange.size() == 0; }));
  EXPECT_TRUE(eventually([&] { return kept.use_count() == 1; }));
  expect_failed(exchange.fetch(key, kA).value, ErrorCode::timeout,
                "that worker has left gathering 0 of these workers long ago: its next one is "
                "gathering 1");
  // The timer is set again.
  EXPECT_EQ(exchange.post({kA, kB}, value(), {kA}, Clock::now() + 1ms), "a/1 b/1 #1");
  EXPECT_TRUE(eventually([&] { return exchange.size() == 0; }));
  loop->close();
}

}  // namespace
}  // namespace stitch::rpc::gather_exchange_test
