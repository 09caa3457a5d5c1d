// The connections of pairs of workers in simulated histories. A failing history is named by its
// seed: PeerSimulation(seed, mild).run() repeats it.
#include "tests/rpc/peer_simulation.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "tests/support/sanitizers.h"

namespace stitch::rpc::test::peer_simulation_test {
namespace {

constexpr bool kSlow = stitch::testing::kAddressSanitizer || stitch::testing::kThreadSanitizer;
constexpr std::uint64_t kHistories = kSlow ? 500 : 5'000;

PeerSimulation::Counts run(std::uint64_t first_seed, std::uint64_t histories, bool mild) {
  PeerSimulation::Counts all;
  for (std::uint64_t seed = first_seed; seed < first_seed + histories; ++seed) {
    PeerSimulation simulation(seed, mild);
    const std::string failure = simulation.run();
    EXPECT_EQ(failure, "") << "seed " << seed;
    if (!failure.empty()) return all;
    const auto& counts = simulation.counts();
    all.attempts += counts.attempts;
    all.delivered += counts.delivered;
    all.failed += counts.failed;
    all.reconnects += counts.reconnects;
    all.resent += counts.resent;
    all.lost += counts.lost;
    all.lives += counts.lives;
    all.strangers += counts.strangers;
  }
  return all;
}

TEST(PeerSimulations, MessagesArriveOnceOrFailWhateverHappens) {
  const auto all = run(0, kHistories, false);
  EXPECT_GT(all.delivered, 10 * kHistories);
  EXPECT_GT(all.failed, 3 * kHistories);
  EXPECT_GT(all.attempts, 8 * kHistories);
  EXPECT_GT(all.reconnects, kHistories);
  EXPECT_GT(all.resent, kHistories / 10);
  EXPECT_GT(all.lost, kHistories);
  EXPECT_GT(all.lives, 5 * kHistories / 2);
  EXPECT_GT(all.strangers, kHistories / 5);
}

TEST(PeerSimulations, NoPeerIsLostByAnOutageWithinItsGrace) {
  const auto all = run(500'000, kHistories, true);
  EXPECT_GT(all.delivered, 20 * kHistories);
  EXPECT_GT(all.reconnects, 2 * kHistories);
  EXPECT_EQ(all.lost, 0u);
}

}  // namespace
}  // namespace stitch::rpc::test::peer_simulation_test
