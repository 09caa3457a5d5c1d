// The simulation of connections must find each deliberate mistake.
#include "tests/rpc/peer_mutations.h"

#include <gtest/gtest.h>

#include <cstdint>
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

std::string history(int number) {
  return PeerSimulation(1'000'000 + static_cast<std::uint64_t>(number), number % 2 == 0).run();
}

TEST(PeerMutations, TheSimulationFindsEachDeliberateMistake) {
  stitch::testing::expect_all_found(turned_on, "tests/rpc/peer_mutations.h", 1000, 4000, history);
}

}  // namespace
}  // namespace test
}  // namespace stitch::rpc
