// Checks the simulation of sessions: it must detect each deliberate error.

#include "tests/rpc/session_mutations.h"

#include <gtest/gtest.h>

#include <exception>
#include <string>

#include "tests/rpc/session_simulation.h"

namespace stitch::rpc {
namespace {

Mutation turned_on = Mutation::none;

}  // namespace

bool broken(Mutation mutation) { return mutation == turned_on; }

namespace test {
namespace {

// The first failure of up to `histories`; empty if there is none.
std::string found_within(std::uint64_t histories) {
  for (std::uint64_t seed = 0; seed < histories; ++seed) {
    SessionSimulation simulation(1'000'000 + seed);
    try {
      if (auto failure = simulation.run(); !failure.empty()) return failure;
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  return {};
}

TEST(SessionMutations, TheSimulationFindsNothingWrongInTheSessionItself) {
  turned_on = Mutation::none;
  EXPECT_EQ(found_within(1000), "");
}

TEST(SessionMutations, TheSimulationFindsEachDeliberateMistake) {
  for (int number = 1; number <= static_cast<int>(Mutation::last); ++number) {
    turned_on = static_cast<Mutation>(number);
    EXPECT_NE(found_within(2000), "")
        << "mutation " << number << " of tests/rpc/session_mutations.h";
  }
  turned_on = Mutation::none;
}

}  // namespace
}  // namespace test
}  // namespace stitch::rpc
