// The protocol of a pass on random graphs, with random orders of events.
#include "tests/simulation/pass_simulation.h"

#include <gtest/gtest.h>

namespace stitch::dist_autograd::pass_simulation_test {
namespace {

using pass_simulation::Options;

// Runs passes over 2 to 5 workers; `large`: 6 to 9, on larger graphs.
simulation::Totals run(std::uint64_t first, std::uint64_t passes, Options options,
                       bool large = false) {
  return simulation::run_histories(first, passes, [&](std::uint64_t number) {
    options.workers = (large ? 6 : 2) + (number - first) % 4;
    options.nodes = (large ? 60 : 6) + (number - first) % 7 * 5;
    return pass_simulation::run(number, options);
  });
}
void expect_success(const simulation::Totals& totals) {
  EXPECT_EQ(totals["succeeded"], totals.histories);
}
void expect_failure(const simulation::Totals& totals) { EXPECT_EQ(totals["succeeded"], 0u); }
// Some succeed, and others do not.
void expect_both(const simulation::Totals& totals, std::uint64_t each) {
  totals.expect_over("succeeded", each);
  totals.expect_under("succeeded", totals.of - each);
}

TEST(PassSimulation, SucceedsWhateverTheLossUses) {
  const auto totals = run(1'000'000, 4000, {});
  expect_success(totals);
  totals.expect_over("gradients sent", 4000);
  totals.expect_over("marked", 400);
  totals.expect_under("marked", 3600);
}

TEST(PassSimulation, SendsNoMarkWhenEveryResultIsUsed) {
  const auto totals = run(1'200'000, 4000, {.all_used = true});
  expect_success(totals);
  EXPECT_EQ(totals["marked"], 0u);
  totals.expect_over("gradients sent", 4000);
}

TEST(PassSimulation, ManyWorkersAndNodesMakeNoDifference) {
  expect_success(run(1'600'000, 1000, {}, true));
  EXPECT_EQ(run(1'700'000, 1000, {.all_used = true, .self_links = 0.1}, true)["marked"], 0u);
  run(1'800'000, 1000, {.deaths = 2}, true);
  run(1'900'000, 1000, {.cuts = 2, .root_aborts = true}, true);
}

TEST(PassSimulation, CallsOfAWorkerToItselfTakePart) {
  expect_success(run(4'000'000, 2000, {.self_links = 0.3}));
}

TEST(PassSimulation, DeathsEndThePassOnAllWorkersOrItSucceeds) {
  const auto one = run(5'000'000, 4000, {.deaths = 1});
  expect_both(one, 100);
  run(5'300'000, 3000, {.deaths = 2});
  run(5'400'000, 3000, {.all_used = true, .deaths = 1});
  run(5'550'000, 2000, {.deaths = 1, .self_links = 0.3});
}

TEST(PassSimulation, ABrokenConnectionEndsThePassOnBothSidesOrItSucceeds) {
  const auto one = run(9'000'000, 4000, {.cuts = 1});
  expect_both(one, 100);
  run(9'300'000, 3000, {.cuts = 3});
  run(9'400'000, 3000, {.deaths = 1, .cuts = 1});
  run(9'700'000, 3000, {.cuts = 1, .node_throws = true});
  run(9'800'000, 3000, {.cuts = 1, .root_aborts = true});
}

TEST(PassSimulation, NamingOneThatTakesNoPartFailsThePassAndDoesNotHoldIt) {
  expect_both(run(9'850'000, 3000, {.liar = true}), 0);
}

TEST(PassSimulation, AnErrorOfANodeReachesAllParticipants) {
  expect_failure(run(6'000'000, 3000, {.node_throws = true}));
}

TEST(PassSimulation, ACancelledOrTimedOutPassEndsOnAllParticipants) {
  const auto totals = run(7'000'000, 3000, {.root_aborts = true});
  expect_both(totals, 0);
}

}  // namespace
}  // namespace stitch::dist_autograd::pass_simulation_test
