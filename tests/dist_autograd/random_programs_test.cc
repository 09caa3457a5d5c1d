#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "stitch/dist_autograd/context.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/worker.h"
#include "tests/support/cluster.h"
#include "tests/support/oracle.h"
#include "tests/support/random_program.h"

namespace stitch::testing {
namespace {

// The parameters of the program that runs, by worker. Written only between programs.
std::vector<Tensors>& parameters() {
  static std::vector<Tensors> all;
  return all;
}

ProgramHost remote_host();

Tensors run_remote_block(const ProgramBlock& block, Tensors arguments) {
  return run_block(remote_host(), block, arguments);
}

ProgramHost remote_host() {
  ProgramHost host;
  const auto worker = rpc::current_agent()->self().id.value();
  host.parameter = [worker](int index) {
    return parameters()[worker][static_cast<std::size_t>(index)];
  };
  host.call = [](int callee, const ProgramBlock& block, const Tensors& arguments) {
    auto future =
        rpc_async<run_remote_block>(WorkerId(static_cast<std::uint32_t>(callee)), block, arguments);
    return [future] { return future.get(); };
  };
  return host;
}

// Undefined also where that worker took no part in the context.
at::Tensor gradient_on(Worker& worker, const dist_autograd::ContextId& context,
                       const at::Tensor& parameter) {
  const WorkerScope scope(worker);
  try {
    return dist_autograd::find_context(context).gradient(parameter);
  } catch (const Error&) {
    return {};
  }
}

// How the gradients of one program are asked for.
struct Asking {
  bool two_roots = false;  // the loss and its double
  int passes = 1;
};

void expect_oracle_gradients(Cluster& cluster, const RandomProgram& program,
                             dist_autograd::Options options, const Asking& asking = {}) {
  SCOPED_TRACE("seed " + std::to_string(program.seed) + ", " + std::to_string(program.workers) +
               " workers");
  parameters().clear();
  for (int worker = 0; worker < program.workers; ++worker)
    parameters().push_back(program_parameters(program, worker));
  const OracleResult expected = run_oracle(program, parameters());

  dist_autograd::Context context;
  const at::Tensor loss = run_program(remote_host(), program);
  const double tolerance = program.single_precision ? 1e-4 : 1e-11;
  ASSERT_NEAR(loss.item<double>(), expected.loss,
              tolerance * std::max(1.0, std::abs(expected.loss)));
  std::vector<at::Tensor> roots{loss};
  if (asking.two_roots) roots.push_back(2 * loss);
  for (int pass = 1; pass <= asking.passes; ++pass) {
    options.retain_graph = pass < asking.passes;
    context.backward(roots, options);
  }
  const double factor = (asking.two_roots ? 3.0 : 1.0) * asking.passes;
  for (int worker = 0; worker < program.workers; ++worker) {
    for (int i = 0; i < kProgramParameters; ++i) {
      const at::Tensor& parameter =
          parameters()[static_cast<std::size_t>(worker)][static_cast<std::size_t>(i)];
      const at::Tensor gradient = gradient_on(cluster[worker], context.id(), parameter);
      const at::Tensor& oracle =
          expected.gradients[static_cast<std::size_t>(worker)][static_cast<std::size_t>(i)];
      SCOPED_TRACE("parameter " + std::to_string(i) + " of worker " + std::to_string(worker));
      if (!oracle.defined()) {
        // What is behind one tensor of a message runs when another one is used: with an undefined
        // gradient, of which a custom function makes zeros.
        EXPECT_TRUE(!gradient.defined() || gradient.count_nonzero().item<std::int64_t>() == 0);
        continue;
      }
      ASSERT_TRUE(gradient.defined());
      EXPECT_EQ(gradient.scalar_type(), program.dtype());
      EXPECT_TRUE(equal_gradients(gradient, factor * oracle, tolerance));
      EXPECT_FALSE(parameter.grad().defined());
    }
  }
}

class RandomPrograms : public ::testing::TestWithParam<int> {};

TEST_P(RandomPrograms, HaveTheGradientsOfOneProcessInExactMode) {
  Cluster cluster(GetParam());
  for (std::uint64_t seed = 0; seed < 70 && !HasFatalFailure(); ++seed) {
    expect_oracle_gradients(cluster, {.seed = seed, .workers = GetParam()}, {});
  }
  for (int worker = 0; worker < GetParam(); ++worker)
    EXPECT_GT(cluster[worker].debug_info().at("dist_autograd.gradient_links_sent"), 100);
}

TEST_P(RandomPrograms, HaveTheGradientsOfOneProcessInFastMode) {
  Cluster cluster(GetParam());
  for (std::uint64_t seed = 1000; seed < 1070 && !HasFatalFailure(); ++seed) {
    expect_oracle_gradients(cluster, {.seed = seed, .workers = GetParam(), .uses_everything = true},
                            {.mode = dist_autograd::Mode::fast});
  }
}

TEST_P(RandomPrograms, HaveTheGradientsOfOneProcessInSinglePrecision) {
  Cluster cluster(GetParam());
  for (std::uint64_t seed = 2000; seed < 2030 && !HasFatalFailure(); ++seed) {
    expect_oracle_gradients(cluster,
                            {.seed = seed, .workers = GetParam(), .single_precision = true}, {});
  }
}

TEST_P(RandomPrograms, HaveTheGradientsOfOneProcessFromSeveralRootsAndPasses) {
  Cluster cluster(GetParam());
  for (std::uint64_t seed = 3000; seed < 3030 && !HasFatalFailure(); ++seed) {
    const bool fast = seed % 2 == 0;
    expect_oracle_gradients(cluster, {.seed = seed, .workers = GetParam(), .uses_everything = fast},
                            {.mode = fast ? dist_autograd::Mode::fast : dist_autograd::Mode::exact},
                            {.two_roots = seed % 3 != 0, .passes = seed % 3 == 1 ? 1 : 3});
  }
}

INSTANTIATE_TEST_SUITE_P(Over, RandomPrograms, ::testing::Values(2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Workers"; });

}  // namespace
}  // namespace stitch::testing
