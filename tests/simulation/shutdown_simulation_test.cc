// Graceful shutdown in simulated histories: no worker closes while anything is on its way.
#include "tests/simulation/shutdown_simulation.h"

#include <gtest/gtest.h>

#include <string>

namespace stitch::rpc::shutdown_simulation_test {
namespace {

using shutdown_simulation::run;
using shutdown_simulation::Wrong;

TEST(ShutdownSimulations, NoWorkerClosesWhileAnythingIsOnItsWayInAnyHistory) {
  const auto all = simulation::run_histories(0, 30'000, [](auto number) { return run(number); });
  all.expect_over("messages", 1'000'000);
  all.expect_over("graceful", 50'000);
  all.expect_over("timeouts", 15'000);
  all.expect_over("deaths", 7'000);
  all.expect_over("returns", 1'500);
  all.expect_over("lowest_returns", 500);
  all.expect_over("cuts", 5'000);
  all.expect_over("rounds", 150'000);
  all.expect_over("crossings", 0);
}

// So A2 is needed, and what Agent does to keep it.
TEST(ShutdownSimulations, WorkersThatCountMessagesAsReceivedTooEarlyAreFoundOut) {
  std::string failure;
  std::uint64_t number = 2'000'000;
  for (; number < 2'005'000; ++number) {
    failure = run(number, Wrong::counts_received_first).failure;
    if (!failure.empty()) break;
  }
  EXPECT_NE(failure.find("said GO while"), std::string::npos) << failure;
  EXPECT_EQ(run(number).failure, "") << "history " << number << ", counting as it should";
}

}  // namespace
}  // namespace stitch::rpc::shutdown_simulation_test
