// Sessions in simulated histories: nothing is lost, nothing comes twice.
#include "tests/rpc/session_simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "stitch/rpc/agent/received_numbers.h"

namespace stitch::rpc::test::session_simulation_test {
namespace {

TEST(SessionSimulations, EverythingArrivesOnceInEveryHistory) {
  SessionSimulation::Counts all;
  for (std::uint64_t seed = 0; seed < 20'000; ++seed) {
    SessionSimulation simulation(seed);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed;
    const auto counts = simulation.counts();
    all.delivered += counts.delivered;
    all.reconnects += counts.reconnects;
    all.resent += counts.resent;
    all.duplicates += counts.duplicates;
  }
  EXPECT_GT(all.delivered, 400'000u);
  EXPECT_GT(all.reconnects, 20'000u);
  EXPECT_GT(all.resent, 20'000u);
  EXPECT_GT(all.duplicates, 1'000u);
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
}  // namespace stitch::rpc::test::session_simulation_test
