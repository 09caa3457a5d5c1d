// The simulation of connections must find each deliberate mistake.
#include "tests/rpc/peer_mutations.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <exception>
#include <string>

#include "tests/rpc/peer_simulation.h"
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
    PeerSimulation simulation(1'000'000 + static_cast<std::uint64_t>(i), i % 2 == 0);
    try {
      if (auto failure = simulation.run(); !failure.empty()) return failure;
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  return {};
}

TEST(PeerMutations, TheSimulationFindsEachDeliberateMistake) {
  stitch::testing::expect_all_found(turned_on, "tests/rpc/peer_mutations.h", 1000, 4000,
                                    found_within);
}

}  // namespace
}  // namespace test
}  // namespace stitch::rpc
