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

// What one of up to `histories` random histories finds wrong; empty when nothing.
std::string found_within(int histories) {
  for (int i = 0; i < histories; ++i) {
    const auto number = static_cast<std::size_t>(i);
    MembershipSimulation::Options options = kMembershipKinds[number % std::size(kMembershipKinds)];
    options.workers = 2 + i / static_cast<int>(std::size(kMembershipKinds)) % 5;
    MembershipSimulation simulation(500'000'000 + number, options);
    simulation.run();
    if (!simulation.failure().empty()) return simulation.failure();
  }
  return {};
}

TEST(MembershipMutations, TheSimulationFindsEachDeliberateMistake) {
  stitch::testing::expect_all_found(turned_on, "tests/rpc/membership_mutations.h", 600, 20'000,
                                    found_within);
}

}  // namespace
}  // namespace testing
}  // namespace stitch::rpc
