// Random schedules over the agreed order of launches and over the orders that would come to mind
// first.
#include "tests/simulation/order_simulation.h"

#include <gtest/gtest.h>

namespace stitch::transport::gpu::order_simulation_test {
namespace {

using order_simulation::Options;
using order_simulation::Policy;

constexpr std::size_t kQueues[] = {1, 2, 8};
constexpr double kSyncChances[] = {0, 0.05};

void expect_no_deadlock(std::uint64_t first, std::uint64_t histories, const Options& options) {
  simulation::run_histories(first, histories,
                            [&](auto number) { return order_simulation::run(number, options); });
}

int deadlocks(Policy policy, std::size_t queues, double sync_chance) {
  int count = 0;
  for (std::uint64_t number = 1; number <= 300; ++number) {
    const Options options{.policy = policy, .queues = queues, .sync_chance = sync_chance};
    count += order_simulation::run(number, options).failure.empty() ? 0 : 1;
  }
  return count;
}

TEST(OrderSimulation, TheAgreedOrderNeverDeadlocks) {
  for (const std::size_t queues : kQueues) {
    for (const double sync_chance : kSyncChances) {
      expect_no_deadlock(1'000'000, 3000, {.queues = queues, .sync_chance = sync_chance});
    }
  }
}

TEST(OrderSimulation, TheAgreedOrderSurvivesLaunchesThatWaitForTheOtherEnd) {
  for (const std::size_t queues : kQueues) {
    expect_no_deadlock(2'000'000, 1000,
                       {.queues = queues, .sync_chance = 0.05, .connect_chance = 0.3});
  }
}

TEST(OrderSimulation, TheAgreedOrderSurvivesLimitsOfLaunches) {
  for (const std::size_t queues : kQueues) {
    expect_no_deadlock(
        3'000'000, 1000,
        {.queues = queues, .sync_chance = 0.05, .limits = {.launched = 2, .launched_by_pair = 1}});
  }
}

TEST(OrderSimulation, ManyTransfersBetweenTwoDevicesInBothDirections) {
  expect_no_deadlock(4'000'000, 1000, {.devices = 2, .transfers = 100, .sync_chance = 0.05});
}

TEST(OrderSimulation, NothingStaysTentativeWhenPeersDie) {
  for (const std::size_t queues : kQueues) {
    expect_no_deadlock(
        5'000'000, 1000,
        {.queues = queues, .sync_chance = 0.05, .connect_chance = 0.1, .deaths = 1 + queues % 3});
  }
}

TEST(OrderSimulation, NothingStaysTentativeWhenPairsBreak) {
  for (const std::size_t queues : kQueues) {
    expect_no_deadlock(6'000'000, 1000,
                       {.queues = queues,
                        .sync_chance = 0.05,
                        .connect_chance = 0.1,
                        .break_chance = 0.1,
                        .deaths = queues % 2,
                        .limits = {.launched = 4, .launched_by_pair = 2}});
  }
}

// Without an order the same schedules end in deadlocks: the simulation can see one. The bounds are
// far below what 300 schedules show.
TEST(OrderSimulation, LaunchingWhenATransferIsReadyDeadlocks) {
  EXPECT_GT(deadlocks(Policy::eager, 1, 0), 200);
  EXPECT_GT(deadlocks(Policy::eager, 2, 0.05), 50);
  EXPECT_GT(deadlocks(Policy::eager, 8, 0.05), 10);
}

TEST(OrderSimulation, ARendezvousWithoutAnOrderDeadlocks) {
  EXPECT_GT(deadlocks(Policy::rendezvous, 1, 0), 200);
  EXPECT_GT(deadlocks(Policy::rendezvous, 2, 0.05), 50);
  EXPECT_GT(deadlocks(Policy::rendezvous, 8, 0.05), 10);
}

}  // namespace
}  // namespace stitch::transport::gpu::order_simulation_test
