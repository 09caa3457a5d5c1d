// Checks the simulation of sessions: it must detect each deliberate error.

#include "tests/rpc/session_mutations.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "tests/rpc/session_simulation.h"
#include "tests/support/mutations.h"

namespace stitch::rpc {
namespace {

Mutation turned_on = Mutation::none;

}  // namespace

bool broken(Mutation mutation) { return mutation == turned_on; }

namespace test {
namespace {

std::string history(int number) {
  return SessionSimulation(1'000'000 + static_cast<std::uint64_t>(number)).run();
}

TEST(SessionMutations, TheSimulationFindsEachDeliberateMistake) {
  stitch::testing::expect_all_found(turned_on, "tests/rpc/session_mutations.h", 1000, 2000,
                                    history);
}

}  // namespace
}  // namespace test
}  // namespace stitch::rpc
