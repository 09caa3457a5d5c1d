// Sessions in simulated histories: nothing is lost, nothing comes twice.
#include "tests/simulation/session_simulation.h"
#include "stitch/rpc/agent/received_numbers.h"
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

TEST(ReceivedNumbers, AreASetWhateverTheOrder) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<std::uint64_t> numbers;
    for (std::uint64_t number = 1; number <= 60; ++number) {
      for (std::uint64_t copies = 0; copies <= random() % 2; ++copies) numbers.push_back(number);
    }
    // Mostly in order, as connections deliver them.
    for (std::size_t i = 0; i + 1 < numbers.size(); ++i) {
      const std::size_t other = std::min(i + random() % (1 + seed % 20), numbers.size() - 1);
      std::swap(numbers[i], numbers[other]);
    }
    ReceivedNumbers received;
    std::set<std::uint64_t> model;
    for (const std::uint64_t number : numbers) {
      const bool fresh = received.take(number) == ReceivedNumbers::Taken::fresh;
      ASSERT_EQ(fresh, model.insert(number).second) << "seed " << seed;
      std::uint64_t cumulative = 0;
      while (model.contains(cumulative + 1)) ++cumulative;
      ASSERT_EQ(received.cumulative(), cumulative) << "seed " << seed;
    }
    EXPECT_EQ(received.gaps(), 0u);
  }
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
