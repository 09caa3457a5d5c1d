// Random schedules over the agreed order of launches and over the orders that one would choose
// first. A failure prints its seed, which reproduces it.

#include "tests/gpu/order_simulation.h"

#include <gtest/gtest.h>

namespace stitch::transport::gpu::test::order_simulation_test {
namespace {

using Policy = OrderSimulation::Policy;

constexpr std::size_t kQueues[] = {1, 2, 8};
constexpr double kSyncChances[] = {0, 0.05};

void expect_no_deadlock(std::uint64_t first_seed, int seeds,
                        const OrderSimulation::Options& options) {
  for (int i = 0; i < seeds; ++i) {
    const std::uint64_t seed = first_seed + static_cast<std::uint64_t>(i);
    OrderSimulation simulation(seed, options);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed << ", " << options.queues
                                    << " queues, chance of a device sync " << options.sync_chance;
  }
}

int deadlocks(Policy policy, std::size_t queues, double sync_chance) {
  int count = 0;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    OrderSimulation simulation(seed,
                               {.policy = policy, .queues = queues, .sync_chance = sync_chance});
    if (!simulation.run().empty()) ++count;
  }
  return count;
}

TEST(OrderSimulation, TheAgreedOrderNeverDeadlocks) {
  for (const std::size_t queues : kQueues) {
    for (const double sync_chance : kSyncChances) {
      expect_no_deadlock(1'000'000, 3000, {.queues = queues, .sync_chance = sync_chance});
      if (HasFatalFailure()) return;
    }
  }
}

TEST(OrderSimulation, TheAgreedOrderSurvivesLaunchesThatWaitForTheOtherEnd) {
  for (const std::size_t queues : kQueues) {
    expect_no_deadlock(2'000'000, 1000,
                       {.queues = queues, .sync_chance = 0.05, .connect_chance = 0.3});
    if (HasFatalFailure()) return;
  }
}

TEST(OrderSimulation, TheAgreedOrderSurvivesLimitsOfLaunches) {
  for (const std::size_t queues : kQueues) {
    expect_no_deadlock(
        3'000'000, 1000,
        {.queues = queues, .sync_chance = 0.05, .limits = {.launched = 2, .launched_by_pair = 1}});
    if (HasFatalFailure()) return;
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
    if (HasFatalFailure()) return;
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
    if (HasFatalFailure()) return;
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
}  // namespace stitch::transport::gpu::test::order_simulation_test
