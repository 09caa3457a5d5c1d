// Graceful shutdown in simulated histories: no worker closes while anything is on its way.
#include "tests/rpc/shutdown_simulation.h"

#include <gtest/gtest.h>

#include <string>

namespace stitch::rpc::test::shutdown_simulation_test {
namespace {

using Wrong = ShutdownSimulation::Wrong;

TEST(ShutdownSimulations, NoWorkerClosesWhileAnythingIsOnItsWayInAnyHistory) {
  ShutdownSimulation::Counts all;
  for (std::uint64_t seed = 0; seed < 30'000; ++seed) {
    ShutdownSimulation simulation(seed);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed;
    const auto counts = simulation.counts();
    all.messages += counts.messages;
    all.graceful += counts.graceful;
    all.timeouts += counts.timeouts;
    all.deaths += counts.deaths;
    all.returns += counts.returns;
    all.lowest_returns += counts.lowest_returns;
    all.cuts += counts.cuts;
    all.rounds += counts.rounds;
    all.crossings += counts.crossings;
  }
  EXPECT_GT(all.messages, 1'000'000u);
  EXPECT_GT(all.graceful, 50'000u);
  EXPECT_GT(all.timeouts, 15'000u);
  EXPECT_GT(all.deaths, 7'000u);
  EXPECT_GT(all.returns, 1'500u);
  EXPECT_GT(all.lowest_returns, 500u);
  EXPECT_GT(all.cuts, 5'000u);
  EXPECT_GT(all.rounds, 150'000u);
  EXPECT_GT(all.crossings, 0u);
}

// So A2 is needed, and what Agent does to keep it.
TEST(ShutdownSimulations, WorkersThatCountMessagesAsReceivedTooEarlyAreFoundOut) {
  std::string failure;
  std::uint64_t seed = 2'000'000;
  for (; seed < 2'005'000; ++seed) {
    failure = ShutdownSimulation(seed, Wrong::counts_received_first).run();
    if (!failure.empty()) break;
  }
  EXPECT_NE(failure.find("said GO while"), std::string::npos) << failure;
  EXPECT_EQ(ShutdownSimulation(seed).run(), "") << "seed " << seed << ", counting as it should";
}

}  // namespace
}  // namespace stitch::rpc::test::shutdown_simulation_test
