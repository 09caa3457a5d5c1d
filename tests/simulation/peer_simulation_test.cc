// The connections of pairs of workers in simulated histories.
#include "tests/simulation/peer_simulation.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace stitch::rpc::peer_simulation_test {
namespace {

constexpr std::uint64_t kHistories = 5'000;

simulation::Totals run(std::uint64_t first, bool mild) {
  return simulation::run_histories(
      first, kHistories, [mild](auto number) { return peer_simulation::run(number, mild); });
}

TEST(PeerSimulations, MessagesArriveOnceOrFailWhateverHappens) {
  const auto all = run(0, false);
  all.expect_over("delivered", 10 * kHistories);
  all.expect_over("failed", 3 * kHistories);
  all.expect_over("attempts", 8 * kHistories);
  all.expect_over("reconnects", kHistories);
  all.expect_over("resent", kHistories / 10);
  all.expect_over("lost", kHistories);
  all.expect_over("lives", 5 * kHistories / 2);
  all.expect_over("strangers", kHistories / 5);
}

TEST(PeerSimulations, NoPeerIsLostByAnOutageWithinItsGrace) {
  const auto all = run(500'000, true);
  all.expect_over("delivered", 20 * kHistories);
  all.expect_over("reconnects", 2 * kHistories);
  EXPECT_EQ(all["lost"], 0u);
}

}  // namespace
}  // namespace stitch::rpc::peer_simulation_test
