// Histories of whole worlds over a simulated network and clock. A failure prints its seed and kind:
// MembershipSimulation(seed, options).run() repeats it.

#include <gtest/gtest.h>

#include <iterator>

#include "tests/rpc/membership_kinds.h"
#include "tests/support/sanitizers.h"

namespace stitch::rpc::testing {
namespace {

constexpr bool kSlow = stitch::testing::kAddressSanitizer || stitch::testing::kThreadSanitizer;
constexpr int kHistories = kSlow ? 20 : 1000;  // of each kind

TEST(MembershipSimulation, WorkersAgreeWhateverHappens) {
  MembershipSimulation::Counts all;
  for (std::size_t kind = 0; kind < std::size(kMembershipKinds); ++kind) {
    for (int i = 0; i < kHistories; ++i) {
      MembershipSimulation::Options options = kMembershipKinds[kind];
      options.workers = 2 + i % 5;
      const std::uint64_t seed = 1'000'000 * kind + static_cast<std::uint64_t>(i);
      MembershipSimulation simulation(seed, options);
      simulation.run();
      ASSERT_EQ(simulation.failure(), "")
          << "kind " << kind << ", seed " << seed << ", " << options.workers << " workers";
      all.verdicts += simulation.counts().verdicts;
      all.fenced += simulation.counts().fenced;
      all.welcomed += simulation.counts().welcomed;
      all.left += simulation.counts().left;
      all.refused += simulation.counts().refused;
    }
  }
  for (const int count : {all.verdicts, all.fenced, all.welcomed, all.left, all.refused})
    EXPECT_GT(count, kHistories / 4);
}

}  // namespace
}  // namespace stitch::rpc::testing
