// Random walks over the lifetime protocol. A failure prints its seed, which reproduces it.

#include "tests/rref/lifetime_simulation.h"

#include <gtest/gtest.h>

namespace stitch::rref::test {
namespace {

void walk(std::uint64_t first_seed, int walks, const LifetimeSimulation::Options& options) {
  for (int i = 0; i < walks; ++i) {
    const std::uint64_t seed = first_seed + static_cast<std::uint64_t>(i);
    LifetimeSimulation simulation(seed, options);
    simulation.run();
    ASSERT_EQ(simulation.failure(), "") << "seed " << seed;
  }
}

TEST(LifetimeSimulation, OneObjectLivesExactlyAsLongAsItIsUsed) {
  walk(1'000'000, 4000, {.workers = 4, .objects = 1, .steps = 300});
}

TEST(LifetimeSimulation, SeveralObjectsLiveExactlyAsLongAsTheyAreUsed) {
  walk(2'000'000, 3000, {.workers = 4, .objects = 5, .steps = 500});
}

TEST(LifetimeSimulation, TwoWorkersPassingObjectsBackAndForth) {
  walk(3'000'000, 3000, {.workers = 2, .objects = 2, .steps = 400});
}

TEST(LifetimeSimulation, LongWalksWithManyObjectsLeaveNothingBehind) {
  walk(4'000'000, 40, {.workers = 4, .objects = 30, .steps = 20000});
}

TEST(LifetimeSimulation, ADyingWorkerTakesNoObjectOfOthersWithIt) {
  for (std::uint64_t i = 0; i < 10'000; ++i) {
    walk(5'000'000 + i, 1,
         {.workers = 2 + i % 4,
          .objects = 1 + i % 5,
          .steps = 200 + static_cast<int>(i % 400),
          .kill_one = true});
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace stitch::rref::test
