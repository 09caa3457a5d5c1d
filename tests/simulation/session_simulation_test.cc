// Sessions in simulated histories: nothing is lost, nothing comes twice.
#include "tests/simulation/session_simulation.h"
#include "stitch/rpc/peers/received_numbers.h"
#include "tests/support/plain_test.h"

namespace stitch::rpc::session_simulation_test {
namespace {

TEST(SessionSimulations, EverythingArrivesOnceInEveryHistory) {
  const auto all = simulation::run_histories(0, 20'000, session_simulation::run);
  all.expect_over("delivered", 400'000);
  all.expect_over("reconnects", 20'000);
  all.expect_over("resent", 20'000);
  all.expect_over("duplicates", 1'000);
}

TEST(ReceivedNumbers, TooManyGapsAreRefused) {
  ReceivedNumbers received;
  std::uint64_t number = 3;
  for (std::size_t i = 0; i < ReceivedNumbers::kMaxGaps; ++i, number += 2)
    ASSERT_EQ(received.take(number), ReceivedNumbers::Taken::fresh);
  EXPECT_EQ(received.take(number), ReceivedNumbers::Taken::too_scattered);
  EXPECT_EQ(received.take(2), ReceivedNumbers::Taken::fresh) << "it closes a gap";
}

}  // namespace
}  // namespace stitch::rpc::session_simulation_test
