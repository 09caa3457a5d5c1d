// Each simulation must find each deliberate mistake that is built into its protocol.
#include <gtest/gtest.h>

#include <iterator>
#include <ostream>
#include <string>
#include <string_view>

#include "tests/simulation/lifetime_simulation.h"
#include "tests/simulation/membership_simulation.h"
#include "tests/simulation/mistake.h"
#include "tests/simulation/order_simulation.h"
#include "tests/simulation/pass_simulation.h"
#include "tests/simulation/peer_simulation.h"
#include "tests/simulation/session_simulation.h"
#include "tests/simulation/shutdown_simulation.h"
#include "tests/simulation/sweep_scenarios.h"

namespace stitch {
namespace {

std::string_view turned_on;

}  // namespace

bool mistake(std::string_view name) noexcept { return name == turned_on; }

namespace simulation::mutation_test {
namespace {

struct Mistake {
  std::string_view protocol;
  std::string_view name;
};
constexpr Mistake kMistakes[] = {
#include "mutated/mistakes.inc"
};

std::string membership(std::uint64_t number) {
  using rpc::membership_simulation::kKinds;
  auto options = kKinds[number % std::size(kKinds)];
  options.workers = 2 + static_cast<int>(number / std::size(kKinds) % 5);
  return rpc::membership_simulation::run(500'000'000 + number, options).failure;
}

std::string session(std::uint64_t number) {
  return rpc::session_simulation::run(1'000'000 + number).failure;
}

std::string shutdown(std::uint64_t number) {
  return rpc::shutdown_simulation::run(1'000'000 + number).failure;
}

std::string peer(std::uint64_t number) {
  return rpc::peer_simulation::run(1'000'000 + number, number % 2 == 0).failure;
}

// The scenarios, and then random walks.
std::string lifetime(std::uint64_t number) {
  const auto& scenarios = rref::sweep_scenarios::all();
  if (number < scenarios.size()) return scenarios[number]();
  const std::uint64_t walk = number - scenarios.size();
  return rref::lifetime_simulation::run(6'000'000 + walk,
                                        {.workers = 2 + walk % 3 + walk % 2,
                                         .objects = 1 + walk % 3,
                                         .steps = 300 + 100 * static_cast<int>(walk % 3),
                                         .deaths = walk % 4,
                                         .restarts = walk % 2,
                                         .chains = walk % 5,
                                         .cuts = walk % 8 == 7 ? 1U : 0U})
      .failure;
}

std::string pass(std::uint64_t number) {
  const dist_autograd::pass_simulation::Options kinds[] = {
      {},
      {.all_used = true},
      {.deaths = 1},
      {.deaths = 2},
      {.all_used = true, .deaths = 1},
      {.node_throws = true},
      {.cuts = 1},
      {.root_aborts = true},
  };
  auto options = kinds[number % std::size(kinds)];
  options.workers = 2 + number / std::size(kinds) % 4;
  options.nodes = 6 + number % 7 * 5;
  return dist_autograd::pass_simulation::run(8'000'000 + number, options).failure;
}

std::string order(std::uint64_t number) {
  return transport::gpu::order_simulation::run(7'000'000 + number,
                                               {.queues = 1 + number % 2,
                                                .sync_chance = 0.05,
                                                .break_chance = number % 4 == 3 ? 0.1 : 0,
                                                .deaths = number % 3})
      .failure;
}

struct Protocol {
  std::string_view name;
  std::uint64_t clean;  // so many histories find nothing without a mistake
  std::uint64_t each;   // one of so many finds something with each mistake
  std::string (*failure_of)(std::uint64_t number);
};
std::ostream& operator<<(std::ostream& out, const Protocol& protocol) {
  return out << protocol.name;
}

constexpr Protocol kProtocols[] = {
    {"membership", 600, 20'000, membership},
    {"session", 1000, 2000, session},
    {"shutdown", 3000, 40'000, shutdown},
    {"peer", 1000, 4000, peer},
    {"lifetime", 2010, 20'010, lifetime},
    {"pass", 2000, 100'000, pass},
    {"order", 500, 2000, order},
};

class Mutations : public ::testing::TestWithParam<Protocol> {
 protected:
  ~Mutations() override { turned_on = {}; }
};

// Only all histories try all mistakes: searching takes long where a mistake shows itself seldom.
TEST_P(Mutations, TheSimulationFindsEachDeliberateMistake) {
  const Protocol& protocol = GetParam();
  const std::uint64_t clean = share_of(protocol.clean);
  for (std::uint64_t number = 0; number < clean; ++number)
    ASSERT_EQ(protocol.failure_of(number), "") << "history " << number << " without a mistake";
  int seen = 0;
  for (const Mistake& mistake : kMistakes) {
    if (mistake.protocol != protocol.name || (seen++ % 10 != 0 && !all_histories())) continue;
    turned_on = mistake.name;
    std::uint64_t found = 0;
    while (found < protocol.each && protocol.failure_of(found).empty()) ++found;
    turned_on = {};
    if (found == protocol.each) {
      ADD_FAILURE() << mistake.name << " is not found";
    } else if (found >= clean) {
      EXPECT_EQ(protocol.failure_of(found), "") << "history " << found << " without a mistake";
    }
  }
  EXPECT_GT(seen, 0);
}

INSTANTIATE_TEST_SUITE_P(Simulations, Mutations, ::testing::ValuesIn(kProtocols),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace simulation::mutation_test
}  // namespace stitch
