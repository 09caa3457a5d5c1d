// Random walks over the lifetime protocol.

#include "tests/simulation/lifetime_simulation.h"

#include <gtest/gtest.h>

#include "tests/simulation/sweep_scenarios.h"

namespace stitch::rref::lifetime_simulation_test {
namespace {

using lifetime_simulation::Options;

void walk(std::uint64_t first, std::uint64_t walks, const Options& options) {
  simulation::run_histories(first, walks,
                            [&](auto number) { return lifetime_simulation::run(number, options); });
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

// What the dead held is reclaimed, and nothing else is.
void walk_with(std::uint64_t first, std::uint64_t walks, Options options) {
  simulation::run_histories(first, walks, [&](std::uint64_t number) {
    options.workers = 2 + number % 4;
    options.objects = 1 + number % 5;
    options.steps = 200 + static_cast<int>(number % 400);
    return lifetime_simulation::run(number, options);
  });
}

TEST(LifetimeSimulation, WhatADeadWorkerHeldIsReclaimedAndNothingElse) {
  walk_with(5'000'000, 20'000, {.deaths = 1});
}

TEST(LifetimeSimulation, SeveralWorkersMayDieAtOnce) {
  walk_with(6'000'000, 20'000, {.deaths = 2, .chains = 2});
}

TEST(LifetimeSimulation, ALifeThatReturnsIsAnotherHolder) {
  walk_with(7'000'000, 40'000, {.deaths = 2, .restarts = 4, .chains = 4});
}

// Their names are beside them; the mutations of the protocol need them.
TEST(SweepScenarios, EndAsTheyMust) {
  const auto& all = sweep_scenarios::all();
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i](), "") << "scenario " << i;
}

// Nothing is left, and no honest worker is refused.
TEST(LifetimeSimulation, SomeMayHearLateOfALifeThatReturns) {
  walk_with(10'000'000, 20'000, {.deaths = 2, .restarts = 3, .chains = 4, .late_news = true});
  walk_with(11'000'000, 10'000,
            {.deaths = 3, .restarts = 2, .chains = 3, .cuts = 1, .late_news = true});
}

TEST(LifetimeSimulation, LivingWorkersThatLoseEachOtherHarmNoThird) {
  walk_with(8'000'000, 10'000, {.cuts = 2});
  walk_with(9'000'000, 10'000, {.deaths = 1, .restarts = 2, .chains = 1, .cuts = 2});
}

}  // namespace
}  // namespace stitch::rref::lifetime_simulation_test
