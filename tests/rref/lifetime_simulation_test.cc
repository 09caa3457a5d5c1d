// Random walks over the lifetime protocol. A failure prints its seed, which reproduces it.

#include "tests/rref/lifetime_simulation.h"

#include <gtest/gtest.h>

#include "tests/rref/sweep_scenarios.h"

namespace stitch::rref::test::lifetime_simulation_test {
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

// What the dead held is reclaimed, and nothing else is.
void walk_with(std::uint64_t first_seed, std::uint64_t walks, std::size_t deaths,
               std::size_t restarts, std::size_t chains, std::size_t cuts = 0,
               bool late_news = false) {
  for (std::uint64_t i = 0; i < walks; ++i) {
    walk(first_seed + i, 1,
         {.workers = 2 + i % 4,
          .objects = 1 + i % 5,
          .steps = 200 + static_cast<int>(i % 400),
          .deaths = deaths,
          .restarts = restarts,
          .chains = chains,
          .cuts = cuts,
          .late_news = late_news});
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(LifetimeSimulation, WhatADeadWorkerHeldIsReclaimedAndNothingElse) {
  walk_with(5'000'000, 20'000, 1, 0, 0);
}

TEST(LifetimeSimulation, SeveralWorkersMayDieAtOnce) { walk_with(6'000'000, 20'000, 2, 0, 2); }

TEST(LifetimeSimulation, ALifeThatReturnsIsAnotherHolder) { walk_with(7'000'000, 40'000, 2, 4, 4); }

TEST(SweepScenarios, SweepsThatRunAtTheSameTimeEndTogether) {
  EXPECT_EQ(two_workers_of_a_chain_die(), "");
}

TEST(SweepScenarios, AWorkerThatLosesTheOwnerKeepsWhatItLentOnAlive) {
  EXPECT_EQ(a_lender_loses_the_owner(), "");
}

TEST(SweepScenarios, ADeathBeforeTheCreationIsMadeUpFor) {
  EXPECT_EQ(a_borrower_dies_before_the_creation(), "");
}

TEST(SweepScenarios, WhatADeadWorkerSentProtectsNothingAfterItsSweep) {
  EXPECT_EQ(a_message_of_the_dead_arrives_late(), "");
}

TEST(SweepScenarios, ABorrowerThatTheOwnerDidNotKnowIsToldThatTheObjectIsGone) {
  EXPECT_EQ(a_borrower_is_unknown_to_the_owner(), "");
  EXPECT_EQ(a_borrower_of_one_unknown_to_the_owner(), "");
}

TEST(SweepScenarios, APeersWordEndsNoLifeThatMayYetJoin) {
  EXPECT_EQ(a_life_is_said_to_be_over_before_it_joins(), "");
  EXPECT_EQ(a_life_that_never_joins_is_asked_about(), "");
}

TEST(SweepScenarios, ALaterLifeKeepsWhatItHolds) { EXPECT_EQ(an_earlier_life_is_swept(), ""); }

// Nothing is left, and no honest worker is refused.
TEST(LifetimeSimulation, SomeMayHearLateOfALifeThatReturns) {
  walk_with(10'000'000, 20'000, 2, 3, 4, 0, true);
  walk_with(11'000'000, 10'000, 3, 2, 3, 1, true);
}

TEST(LifetimeSimulation, LivingWorkersThatLoseEachOtherHarmNoThird) {
  walk_with(8'000'000, 10'000, 0, 0, 0, 2);
  walk_with(9'000'000, 10'000, 1, 2, 1, 2);
}

}  // namespace
}  // namespace stitch::rref::test::lifetime_simulation_test
