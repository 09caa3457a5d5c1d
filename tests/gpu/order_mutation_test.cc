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

// The first failure of up to `runs` random schedules; empty if there is none.
std::string found_within(int runs) {
  for (int i = 0; i < runs; ++i) {
    OrderSimulation simulation(7'000'000 + static_cast<std::uint64_t>(i),
                               {.queues = 1 + static_cast<std::size_t>(i) % 2,
                                .sync_chance = 0.05,
                                .break_chance = i % 4 == 3 ? 0.1 : 0,
                                .deaths = static_cast<std::size_t>(i) % 3});
    const std::string failure = simulation.run();
    if (!failure.empty()) return "run " + std::to_string(i) + ": " + failure;
  }
  return {};
}

TEST(OrderMutations, TheSimulationFindsEachDeliberateMistake) {
  stitch::testing::expect_all_found(turned_on, "tests/gpu/order_mutations.h", 500, 2000,
                                    found_within);
}

}  // namespace
}  // namespace test
}  // namespace stitch::transport::gpu
