// Checks the simulation of the agreed order: it must detect each deliberate error.

#include <gtest/gtest.h>

#include <string>

#include "tests/gpu/order_mutations.h"
#include "tests/gpu/order_simulation.h"
#include "tests/support/mutations.h"

namespace stitch::transport::gpu {
namespace {

OrderMutation turned_on = OrderMutation::none;

}  // namespace

bool broken(OrderMutation mutation) { return mutation == turned_on; }

namespace test {
namespace {

std::string history(int number) {
  OrderSimulation simulation(7'000'000 + static_cast<std::uint64_t>(number),
                             {.queues = 1 + static_cast<std::size_t>(number) % 2,
                              .sync_chance = 0.05,
                              .break_chance = number % 4 == 3 ? 0.1 : 0,
                              .deaths = static_cast<std::size_t>(number) % 3});
  return simulation.run();
}

TEST(OrderMutations, TheSimulationFindsEachDeliberateMistake) {
  stitch::testing::expect_all_found(turned_on, "tests/gpu/order_mutations.h", 500, 2000, history);
}

}  // namespace
}  // namespace test
}  // namespace stitch::transport::gpu
