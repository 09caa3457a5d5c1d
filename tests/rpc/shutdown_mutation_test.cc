// Checks the simulation of graceful shutdown: it must find each deliberate mistake.

#include "tests/rpc/shutdown_mutations.h"

#include <gtest/gtest.h>

#include <cstdint>
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

std::string history(int number) {
  return ShutdownSimulation(1'000'000 + static_cast<std::uint64_t>(number)).run();
}

TEST(ShutdownMutations, TheSimulationFindsEachDeliberateMistake) {
  stitch::testing::expect_all_found(turned_on, "tests/rpc/shutdown_mutations.h", 3000, 40'000,
                                    history);
}

}  // namespace
}  // namespace test
}  // namespace stitch::rpc
