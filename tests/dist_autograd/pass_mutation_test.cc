// The simulation of the protocol of a pass must find each deliberate mistake.

#include <gtest/gtest.h>

#include <iterator>
#include <string>

#include "tests/dist_autograd/mutations.h"
#include "tests/dist_autograd/pass_simulation.h"
#include "tests/support/mutations.h"

namespace stitch::dist_autograd {
namespace {

Mutation turned_on = Mutation::none;

}  // namespace

bool broken(Mutation mutation) { return mutation == turned_on; }

namespace testing {
namespace {

std::string history(int index) {
  const PassSimulation::Options kinds[] = {
      {},
      {.mode = PassMode::fast, .all_used = true},
      {.mode = PassMode::fast},
      {.deaths = 1},
      {.node_throws = true},
      {.mode = PassMode::fast, .all_used = true, .deaths = 1},
      {.root_aborts = true},
      {.deaths = 2},
      {.cuts = 1},
      {.mode = PassMode::fast, .cuts = 1},
      {.mode = PassMode::eager},
      {.all_used = true},
      {.mode = PassMode::eager, .deaths = 1},
      {.mode = PassMode::eager, .cuts = 1},
  };
  const auto number = static_cast<std::size_t>(index);
  PassSimulation::Options options = kinds[number % std::size(kinds)];
  options.workers = 2 + number / std::size(kinds) % 4;
  options.nodes = 6 + number % 7 * 5;
  PassSimulation simulation(8'000'000 + static_cast<std::uint64_t>(index), options);
  simulation.run();
  return simulation.failure();
}

TEST(PassMutations, TheSimulationFindsEachDeliberateMistake) {
  stitch::testing::expect_all_found(turned_on, "tests/dist_autograd/mutations.h", 2000, 20'000,
                                    history);
}

}  // namespace
}  // namespace testing
}  // namespace stitch::dist_autograd
