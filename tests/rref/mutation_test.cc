// Checks the simulation of the lifetime protocol: it must detect each deliberate error.

#include "tests/rref/mutations.h"

#include <gtest/gtest.h>

#include <exception>
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

// The first failure of the scenarios and of up to `walks` random walks; empty if there is none.
std::string found_within(int walks) {
  for (const Scenario scenario : sweep_scenarios()) {
    if (auto failure = scenario(); !failure.empty()) return failure;
  }
  for (int i = 0; i < walks; ++i) {
    const auto seed = 6'000'000 + static_cast<std::uint64_t>(i);
    const std::size_t few = 1 + static_cast<std::size_t>(i % 3);
    LifetimeSimulation simulation(seed, {.workers = 1 + few + static_cast<std::size_t>(i % 2),
                                         .objects = few,
                                         .steps = 300 + 100 * (i % 3),
                                         .deaths = static_cast<std::size_t>(i % 4),
                                         .restarts = static_cast<std::size_t>(i % 2),
                                         .chains = static_cast<std::size_t>(i % 5),
                                         .cuts = static_cast<std::size_t>(i % 8 == 7)});
    try {
      simulation.run();
    } catch (const std::exception& error) {
      return error.what();
    }
    if (!simulation.failure().empty()) return simulation.failure();
  }
  return {};
}

TEST(LifetimeMutations, TheSimulationFindsEachDeliberateMistake) {
  stitch::testing::expect_all_found(turned_on, "tests/rref/mutations.h", 2000, 5000, found_within);
}

}  // namespace
}  // namespace test
}  // namespace stitch::rref
