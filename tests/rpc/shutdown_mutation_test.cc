// Checks the simulation of graceful shutdown: it must find each deliberate mistake.

#include "tests/rpc/shutdown_mutations.h"

#include <gtest/gtest.h>

#include <exception>
#include <string>

#include "tests/rpc/shutdown_simulation.h"
#include "tests/support/mutations.h"

namespace stitch::rpc {
namespace {

Mutation turned_on = Mutation::none;

}  // namespace

bool broken(Mutation mutation) { return mutation == turned_on; }

namespace test {
namespace {

// The first failure of up to `histories`; empty if there is none.
std::string found_within(int histories) {
  for (int i = 0; i < histories; ++i) {
    ShutdownSimulation simulation(1'000'000 + static_cast<std::uint64_t>(i));
    try {
      if (auto failure = simulation.run(); !failure.empty()) return failure;
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  return {};
}

TEST(ShutdownMutations, TheSimulationFindsEachDeliberateMistake) {
  stitch::testing::expect_all_found(turned_on, "tests/rpc/shutdown_mutations.h", 3000, 40'000,
                                    found_within);
}

}  // namespace
}  // namespace test
}  // namespace stitch::rpc
