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

std::string found_within(int histories) {
  return stitch::testing::first_failure(
      histories, [](std::uint64_t seed) { return SessionSimulation(seed).run(); });
}

TEST(SessionMutations, TheSimulationFindsEachDeliberateMistake) {
  stitch::testing::expect_all_found(turned_on, "tests/rpc/session_mutations.h", 1000, 2000,
                                    found_within);
}

}  // namespace
}  // namespace test
}  // namespace stitch::rpc
