// Checks the simulation of sessions: it must detect each deliberate error.

#include "tests/rpc/session_mutations.h"

#include <gtest/gtest.h>

#include <exception>
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

// The first failure of up to `histories`; empty if there is none.
std::string found_within(int histories) {
  for (int i = 0; i < histories; ++i) {
    SessionSimulation simulation(1'000'000 + static_cast<std::uint64_t>(i));
    try {
      if (auto failure = simulation.run(); !failure.empty()) return failure;
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  return {};
}

TEST(SessionMutations, TheSimulationFindsEachDeliberateMistake) {
  stitch::testing::expect_all_found(turned_on, "tests/rpc/session_mutations.h", 1000, 2000,
                                    found_within);
}

}  // namespace
}  // namespace test
}  // namespace stitch::rpc
