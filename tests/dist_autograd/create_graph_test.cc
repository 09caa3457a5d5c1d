// Second derivatives over several workers, against one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "stitch/dist_autograd/context.h"
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/equal_gradients.h"

namespace stitch::testing::create_graph_test {
namespace {

using dist_autograd::Context;
using torch::autograd::variable_list;

// Every worker but the first has a layer; a value goes through all of them.
at::Tensor layer(at::Tensor x) { return (x * own_parameter() * 0.1).tanh() + x.square() * 0.1; }

class SecondDerivatives : public ::testing::TestWithParam<int> {
 protected:
  [[nodiscard]] int workers() const { return GetParam(); }
  static std::string name(int worker) { return "worker" + std::to_string(worker); }

  at::Tensor over_workers(at::Tensor x) const {
    for (int worker = 1; worker < workers(); ++worker) x = rpc_sync<layer>(name(worker), x);
    return x;
  }
  at::Tensor in_one_process(at::Tensor x) {
    for (int worker = 1; worker < workers(); ++worker) {
      const WorkerScope scope(cluster_[worker]);
      x = layer(x);
    }
    return x;
  }
  variable_list parameters() {
    variable_list all;
    for (int worker = 1; worker < workers(); ++worker)
      all.push_back(parameter_of(cluster_[worker]));
    return all;
  }

  Cluster cluster_{GetParam()};
  const at::Tensor x_ = (at::arange(1, 4, at::kDouble) * 0.3).requires_grad_();
};

INSTANTIATE_TEST_SUITE_P(Over, SecondDerivatives, ::testing::Values(2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Workers"; });

// ( |d loss / d x| - 1 )^2, as the critic of a GAN is penalized.
at::Tensor penalty_of(const at::Tensor& gradient) { return (gradient.norm() - 1).square(); }

TEST_P(SecondDerivatives, GiveAGradientPenaltyItsGradients) {
  const auto inner = torch::autograd::grad({in_one_process(x_).square().sum()}, {x_}, {}, true,
                                           /*create_graph=*/true)[0];
  variable_list leaves = parameters();
  leaves.push_back(x_);
  const auto expected = torch::autograd::grad({penalty_of(inner)}, leaves);

  Context context;
  const auto loss = over_workers(x_).square().sum();
  context.backward({loss}, {.create_graph = true, .inputs = {x_}});
  const auto gradient = context.gradient(x_);
  EXPECT_TRUE(equal_gradients(gradient, inner));
  for (int worker = 1; worker < workers(); ++worker)
    EXPECT_FALSE(gradient_on(cluster_[worker], context.id()).defined());
  context.backward({penalty_of(gradient)});
  for (int worker = 1; worker < workers(); ++worker) {
    EXPECT_TRUE(equal_gradients(gradient_on(cluster_[worker], context.id()),
                                expected[static_cast<std::size_t>(worker - 1)]))
        << "worker " << worker;
  }
  EXPECT_TRUE(equal_gradients(context.gradient(x_).detach() - inner.detach(), expected.back()));
}

// The part of one worker of the product of all gradients with a vector.
at::Tensor gradient_times(at::Tensor direction) {
  return (dist_autograd::current_context().gradient(own_parameter()) * direction).sum();
}

TEST_P(SecondDerivatives, GiveAHessianVectorProductOverTheParametersOfAllWorkers) {
  const auto direction = at::tensor({0.5, -1.0, 2.0}, at::kDouble);
  const auto first = torch::autograd::grad({in_one_process(x_).square().sum()}, parameters(), {},
                                           true, /*create_graph=*/true);
  at::Tensor product = at::zeros({}, at::kDouble);
  for (const auto& each : first) product = product + (each * direction).sum();
  const auto expected = torch::autograd::grad({product}, parameters());

  Context context;
  context.backward({over_workers(x_).square().sum()}, {.create_graph = true});
  at::Tensor dot = at::zeros({}, at::kDouble);
  for (int worker = 1; worker < workers(); ++worker)
    dot = dot + rpc_sync<gradient_times>(name(worker), direction);
  context.backward({dot});
  for (int worker = 1; worker < workers(); ++worker) {
    const auto at = static_cast<std::size_t>(worker - 1);
    EXPECT_TRUE(equal_gradients(
        gradient_on(cluster_[worker], context.id()).detach() - first[at].detach(), expected[at]))
        << "worker " << worker;
  }
}

TEST_P(SecondDerivatives, MayBeDifferentiatedOnceMore) {
  const auto nth = [](at::Tensor value, const at::Tensor& x, int times) {
    for (int i = 0; i < times; ++i)
      value = torch::autograd::grad({value.sum()}, {x}, {}, true, true)[0];
    return value;
  };
  const auto expected = nth(in_one_process(x_), x_, 3);
  Context context;
  at::Tensor value = over_workers(x_), before = at::zeros({3}, at::kDouble);
  for (int i = 0; i < 3; ++i) {
    context.backward({value.sum()}, {.create_graph = true, .inputs = {x_}});
    const auto total = context.gradient(x_);
    value = total - before;
    before = total;
  }
  EXPECT_TRUE(equal_gradients(value, expected));
}

}  // namespace
}  // namespace stitch::testing::create_graph_test
