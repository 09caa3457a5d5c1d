// The simulation of membership must find each deliberate mistake.

#include <gtest/gtest.h>

#include <iterator>
#include <string>

#include "tests/rpc/membership_kinds.h"
#include "tests/rpc/membership_mutations.h"
#include "tests/support/mutations.h"

namespace stitch::rpc {
namespace {
Mutation turned_on = Mutation::none;
}  // namespace

bool broken(Mutation mutation) { return mutation == turned_on; }

namespace testing {
namespace {

std::string history(int number) {
  constexpr int kKinds = std::size(kMembershipKinds);
  MembershipSimulation::Options options = kMembershipKinds[number % kKinds];
  options.workers = 2 + number / kKinds % 5;
  MembershipSimulation simulation(500'000'000 + static_cast<std::uint64_t>(number), options);
  simulation.run();
  return simulation.failure();
}

TEST(MembershipMutations, TheSimulationFindsEachDeliberateMistake) {
  stitch::testing::expect_all_found(turned_on, "tests/rpc/membership_mutations.h", 600, 20'000,
                                    history);
}

}  // namespace
}  // namespace testing
}  // namespace stitch::rpc
