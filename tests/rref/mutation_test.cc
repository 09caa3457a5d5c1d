// Checks the simulation of the lifetime protocol: it must detect each deliberate error.

#include "tests/rref/mutations.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "tests/rref/lifetime_simulation.h"
#include "tests/rref/sweep_scenarios.h"
#include "tests/support/mutations.h"

namespace stitch::rref {
namespace {

Mutation turned_on = Mutation::none;

}  // namespace

bool broken(Mutation mutation) { return mutation == turned_on; }

namespace test {
namespace {

std::string walk(int number) {
  const auto seed = 6'000'000 + static_cast<std::uint64_t>(number);
  const std::size_t few = 1 + static_cast<std::size_t>(number % 3);
  LifetimeSimulation simulation(seed, {.workers = 1 + few + static_cast<std::size_t>(number % 2),
                                       .objects = few,
                                       .steps = 300 + 100 * (number % 3),
                                       .deaths = static_cast<std::size_t>(number % 4),
                                       .restarts = static_cast<std::size_t>(number % 2),
                                       .chains = static_cast<std::size_t>(number % 5),
                                       .cuts = static_cast<std::size_t>(number % 8 == 7)});
  simulation.run();
  return simulation.failure();
}

// The scenarios, and then random walks.
const int kScenarios = static_cast<int>(sweep_scenarios().size());
std::string history(int number) {
  return number < kScenarios ? sweep_scenarios()[static_cast<std::size_t>(number)]()
                             : walk(number - kScenarios);
}

TEST(LifetimeMutations, TheSimulationFindsEachDeliberateMistake) {
  stitch::testing::expect_all_found(turned_on, "tests/rref/mutations.h", kScenarios + 2000,
                                    kScenarios + 5000, history);
}

}  // namespace
}  // namespace test
}  // namespace stitch::rref
