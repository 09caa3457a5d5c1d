// The protocol of a pass on random graphs, with random orders of events. A failure prints its seed:
// PassSimulation(seed, options).run() repeats it.

#include <gtest/gtest.h>

#include "tests/dist_autograd/pass_simulation.h"

namespace stitch::dist_autograd::testing::pass_simulation_test {
namespace {

struct Totals {
  int succeeded = 0;
  int marked = 0;
  std::uint64_t gradients_sent = 0;
};

// Runs `count` passes over 2 to 5 workers; `large`: 6 to 9, on larger graphs.
Totals run(std::uint64_t first_seed, int count, PassSimulation::Options options,
           bool large = false) {
  Totals totals;
  for (int i = 0; i < count; ++i) {
    const std::uint64_t seed = first_seed + static_cast<std::uint64_t>(i);
    options.workers = (large ? 6 : 2) + static_cast<std::size_t>(i % 4);
    options.nodes = (large ? 60 : 6) + static_cast<std::size_t>(i % 7) * 5;
    PassSimulation simulation(seed, options);
    simulation.run();
    EXPECT_EQ(simulation.failure(), "") << "seed " << seed;
    if (!simulation.failure().empty()) break;
    totals.succeeded += simulation.succeeded() ? 1 : 0;
    totals.marked += simulation.marked() ? 1 : 0;
    totals.gradients_sent += simulation.gradients_sent();
  }
  return totals;
}

TEST(PassSimulation, ExactPassesSucceedWhateverTheLossUses) {
  const Totals totals = run(1'000'000, 4000, {});
  EXPECT_EQ(totals.succeeded, 4000);
  EXPECT_GT(totals.gradients_sent, 4000u);
  EXPECT_GT(totals.marked, 400);
  EXPECT_LT(totals.marked, 3600);
}

TEST(PassSimulation, ExactPassesSendNoMarkWhenEveryResultIsUsed) {
  const Totals totals = run(1'200'000, 4000, {.all_used = true});
  EXPECT_EQ(totals.succeeded, 4000);
  EXPECT_EQ(totals.marked, 0);
  EXPECT_GT(totals.gradients_sent, 4000u);
}

TEST(PassSimulation, EagerPassesSucceedWhateverTheLossUses) {
  const Totals totals = run(1'400'000, 4000, {.mode = PassMode::eager});
  EXPECT_EQ(totals.succeeded, 4000);
  EXPECT_GT(totals.marked, 1000);
}

TEST(PassSimulation, FastPassesSucceedWhenEveryResultIsUsed) {
  const Totals totals = run(2'000'000, 4000, {.mode = PassMode::fast, .all_used = true});
  EXPECT_EQ(totals.succeeded, 4000);
  EXPECT_GT(totals.gradients_sent, 4000u);
}

TEST(PassSimulation, FastPassesEndAndReportUnusedResultsOfParticipants) {
  const Totals totals = run(3'000'000, 4000, {.mode = PassMode::fast});
  EXPECT_GT(totals.succeeded, 100);
  EXPECT_LT(totals.succeeded, 3900);
}

TEST(PassSimulation, ManyWorkersAndNodesMakeNoDifference) {
  for (const PassMode mode : {PassMode::exact, PassMode::eager})
    EXPECT_EQ(run(1'600'000, 1000, {.mode = mode}, true).succeeded, 1000);
  EXPECT_EQ(run(1'700'000, 1000, {.all_used = true, .self_links = 0.1}, true).marked, 0);
  run(1'800'000, 1000, {.deaths = 2}, true);
  run(1'900'000, 1000, {.cuts = 2, .root_aborts = true}, true);
}

TEST(PassSimulation, CallsOfAWorkerToItselfTakePart) {
  EXPECT_EQ(run(4'000'000, 2000, {.self_links = 0.3}).succeeded, 2000);
  EXPECT_EQ(run(4'200'000, 1000, {.mode = PassMode::eager, .self_links = 0.3}).succeeded, 1000);
  EXPECT_EQ(
      run(4'500'000, 1000, {.mode = PassMode::fast, .all_used = true, .self_links = 0.3}).succeeded,
      1000);
}

TEST(PassSimulation, DeathsEndThePassOnAllWorkersOrItSucceeds) {
  const Totals one = run(5'000'000, 4000, {.deaths = 1});
  EXPECT_GT(one.succeeded, 100);
  EXPECT_LT(one.succeeded, 3900);
  run(5'300'000, 3000, {.deaths = 2});
  run(5'400'000, 3000, {.all_used = true, .deaths = 1});
  run(5'500'000, 3000, {.mode = PassMode::eager, .deaths = 1});
  run(5'550'000, 2000, {.deaths = 1, .self_links = 0.3});
  run(5'600'000, 3000, {.mode = PassMode::fast, .all_used = true, .deaths = 1});
  run(5'900'000, 2000, {.mode = PassMode::fast, .deaths = 2});
}

TEST(PassSimulation, ABrokenConnectionEndsThePassOnBothSidesOrItSucceeds) {
  const Totals one = run(9'000'000, 4000, {.cuts = 1});
  EXPECT_GT(one.succeeded, 100);
  EXPECT_LT(one.succeeded, 3900);
  run(9'200'000, 3000, {.mode = PassMode::eager, .cuts = 1});
  run(9'300'000, 3000, {.cuts = 3});
  run(9'400'000, 3000, {.deaths = 1, .cuts = 1});
  run(9'500'000, 3000, {.mode = PassMode::fast, .all_used = true, .cuts = 1});
  run(9'600'000, 3000, {.mode = PassMode::fast, .cuts = 2});
  run(9'700'000, 3000, {.cuts = 1, .node_throws = true});
  run(9'800'000, 3000, {.cuts = 1, .root_aborts = true});
}

TEST(PassSimulation, NamingOneThatTakesNoPartFailsThePassAndDoesNotHoldIt) {
  for (const PassMode mode : {PassMode::exact, PassMode::eager, PassMode::fast}) {
    const Totals totals = run(9'850'000, 3000, {.mode = mode, .liar = true});
    EXPECT_GT(totals.succeeded, 0);
    EXPECT_LT(totals.succeeded, 3000);
  }
}

TEST(PassSimulation, AnErrorOfANodeReachesAllParticipants) {
  EXPECT_EQ(run(6'000'000, 3000, {.node_throws = true}).succeeded, 0);
  EXPECT_EQ(run(6'300'000, 3000, {.mode = PassMode::eager, .node_throws = true}).succeeded, 0);
  EXPECT_EQ(run(6'500'000, 3000, {.mode = PassMode::fast, .all_used = true, .node_throws = true})
                .succeeded,
            0);
}

TEST(PassSimulation, ACancelledOrTimedOutPassEndsOnAllParticipants) {
  const Totals totals = run(7'000'000, 3000, {.root_aborts = true});
  EXPECT_GT(totals.succeeded, 0);
  EXPECT_LT(totals.succeeded, 3000);
  run(7'300'000, 3000, {.mode = PassMode::eager, .root_aborts = true});
  run(7'500'000, 3000,
      {.mode = PassMode::fast, .all_used = true, .deaths = 1, .root_aborts = true});
}

}  // namespace
}  // namespace stitch::dist_autograd::testing::pass_simulation_test
