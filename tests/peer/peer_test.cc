// The gradients of stitch against those of PyTorch's distributed autograd, which scenarios.py runs.
// PEER_PYTHON names the interpreter that has torch (default: python3).
#include <cstdlib>
#include <sstream>

#include "tests/peer/scenario.h"
#include "tests/support/equal_gradients.h"
#include "tests/support/running_command.h"
#include "tests/support/world_test.h"

namespace stitch::testing::peer_test {
namespace {

constexpr int kWorkers = 4;
const std::filesystem::path kFolder = PEER_FOLDER;

// Scenario, worker, leaf -> its gradient in PyTorch, flattened; undefined where it has none.
using Gradients = std::map<std::tuple<std::string, int, std::string>, at::Tensor>;

Gradients read_gradients(const std::string& text) {
  Gradients all;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string scenario, leaf;
    int worker = -1;
    words >> scenario >> worker >> leaf;
    std::vector<double> numbers;
    for (double number = 0; words >> number;) numbers.push_back(number);
    all[{scenario, worker, leaf}] =
        numbers.empty() ? at::Tensor() : at::tensor(numbers, at::kDouble);
  }
  return all;
}

at::Tensor gradient_on(Worker& worker, const dist_autograd::ContextId& context,
                       const at::Tensor& leaf) {
  const WorkerScope scope(worker);
  const auto found = dist_autograd::find_usable_context(context);
  at::Tensor gradient = found ? found->gradient(leaf) : at::Tensor();
  if (!gradient.defined()) return gradient;
  return (gradient.is_sparse() ? gradient.to_dense() : gradient).flatten();
}

TEST(Peer, HasTheSameGradientsInEveryScenario) {
  const char* const named = std::getenv("PEER_PYTHON");
  RunningCommand peer({"/usr/bin/env", named != nullptr ? named : "python3",
                       kFolder / "scenarios.py", kFolder / "scenarios.txt"},
                      std::chrono::seconds(100));
  const int status = peer.wait();
  if (status == 77 || status == 127) GTEST_SKIP() << peer.err();
  ASSERT_EQ(status, 0) << peer.err();
  const Gradients expected = read_gradients(peer.out());
  const auto scenarios = read_scenarios(kFolder / "scenarios.txt");
  ASSERT_GE(scenarios.size(), 30u);
  ASSERT_EQ(expected.size(), scenarios.size() * (2 * kWorkers + 2));

  Cluster cluster(kWorkers);
  for (const Scenario& scenario : scenarios) {
    dist_autograd::Context context;
    const auto loss = evaluate(scenario.expression, {}).at(0);
    for (int pass = 0; pass < scenario.passes; ++pass)
      context.backward({loss}, {.retain_graph = true});
    for (int worker = 0; worker < kWorkers; ++worker) {
      for (const auto& [name, leaf] : leaves_of(static_cast<std::uint32_t>(worker))) {
        SCOPED_TRACE(scenario.name + ", " + name + " of worker " + std::to_string(worker));
        // PyTorch sends zeros where a gradient is undefined.
        EXPECT_TRUE(equal_gradients(gradient_on(cluster[worker], context.id(), leaf),
                                    expected.at({scenario.name, worker, name})));
      }
    }
  }
}

// Without the peer: each scenario runs here, and differentiates something.
TEST(Peer, ScenariosRunHere) {
  Cluster cluster(kWorkers);
  for (const Scenario& scenario : read_scenarios(kFolder / "scenarios.txt")) {
    SCOPED_TRACE(scenario.name);
    dist_autograd::Context context;
    context.backward({evaluate(scenario.expression, {}).at(0)});
    std::size_t gradients = 0;
    for (int worker = 0; worker < kWorkers; ++worker) {
      const WorkerScope scope(cluster[worker]);
      if (const auto found = dist_autograd::find_usable_context(context.id()))
        gradients += found->gradients().size();
    }
    EXPECT_GT(gradients, 0u);
  }
}

}  // namespace
}  // namespace stitch::testing::peer_test
