#include <gtest/gtest.h>
#include <torch/torch.h>

#include "stitch/dist_autograd/context.h"
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
  const auto worker = current_agent()->self().id.value();
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

void expect_oracle_gradients(Cluster& cluster, const RandomProgram& program,
                             const dist_autograd::Options& options) {
  SCOPED_TRACE("seed " + std::to_string(program.seed) + ", " + std::to_string(program.workers) +
               " workers");
  parameters().clear();
  for (int worker = 0; worker < program.workers; ++worker)
    parameters().push_back(program_parameters(program, worker));
  const OracleResult expected = run_oracle(program, parameters());

  dist_autograd::Context context;
  const at::Tensor loss = run_program(remote_host(), program);
  ASSERT_DOUBLE_EQ(loss.item<double>(), expected.loss);
  context.backward({loss}, options);
  for (int worker = 0; worker < program.workers; ++worker) {
    for (int i = 0; i < kProgramParameters; ++i) {
      const at::Tensor& parameter =
          parameters()[static_cast<std::size_t>(worker)][static_cast<std::size_t>(i)];
      const at::Tensor gradient = gradient_on(cluster[worker], context.id(), parameter);
      EXPECT_TRUE(equal_gradients(
          gradient,
          expected.gradients[static_cast<std::size_t>(worker)][static_cast<std::size_t>(i)]))
          << "parameter " << i << " of worker " << worker;
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
}

TEST_P(RandomPrograms, HaveTheGradientsOfOneProcessInFastMode) {
  Cluster cluster(GetParam());
  for (std::uint64_t seed = 1000; seed < 1070 && !HasFatalFailure(); ++seed) {
    expect_oracle_gradients(cluster, {.seed = seed, .workers = GetParam(), .uses_everything = true},
                            {.mode = dist_autograd::Mode::fast});
  }
}

TEST(RandomProgramsThemselves, AreNotTrivial) {
  Cluster cluster(3);
  for (std::uint64_t seed = 0; seed < 70; ++seed)
    expect_oracle_gradients(cluster, {.seed = seed, .workers = 3}, {});
  for (int worker = 0; worker < 3; ++worker)
    EXPECT_GT(cluster[worker].debug_info().at("dist_autograd.gradient_links_sent"), 200);
}

INSTANTIATE_TEST_SUITE_P(Over, RandomPrograms, ::testing::Values(2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Workers"; });

}  // namespace
}  // namespace stitch::testing
