// Steps of others between a forward pass, its backward pass and its step.
#include "tests/dist_optim/spread_model.h"

namespace staleness_test {
namespace {

using namespace spread_model;
using namespace std::chrono_literals;
using namespace stitch::testing;
using stitch::ErrorCode;
using stitch::optim::StalePolicy;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

// Each with a context of its own.
template <class Optimizer>
void step_meanwhile(const RRef<Holder>& holder, DistributedOptimizer<Optimizer>& other, int times) {
  for (int i = 0; i < times; ++i) {
    autograd::Context context;
    context.backward({holder.rpc_sync<&Holder::times>(torch::ones({6}, torch::kDouble)).sum()});
    EXPECT_EQ(other.step(context), 1);
  }
}

TEST(MaxStaleness, CountsTheStepsOfOthersSinceTheForwardPass) {
  Cluster cluster(3);
  const SpreadModel model(2);
  DistributedOptimizer<SGD> optimizer(model.references, SGDOptions(0.1), StalePolicy::allow);
  DistributedOptimizer<Adam> other({model.holders[1].rpc_sync<&Holder::parameter>()},
                                   AdamOptions(0.1), StalePolicy::allow);
  for (const int meanwhile : {0, 1, 3}) {
    autograd::Context context;
    const auto loss = model.loss_there(0);
    step_meanwhile(model.holders[1], other, meanwhile);
    context.backward({loss});
    const auto before = model.holders[0].rpc_sync<&Holder::now>();
    if (meanwhile > 0) {
      const auto refused = optimizer.step(context, {.max_staleness = meanwhile - 1});
      EXPECT_TRUE(refused.skipped);
      EXPECT_EQ(refused.staleness, meanwhile);
      EXPECT_EQ(refused.stepped, 0);
      EXPECT_TRUE(torch::equal(model.holders[0].rpc_sync<&Holder::now>(), before))
          << "an owner of which nothing is stale has not stepped, either";
    }
    const auto result = optimizer.step(context, {.max_norm = 1, .max_staleness = meanwhile});
    EXPECT_FALSE(result.skipped);
    EXPECT_EQ(result.staleness, meanwhile);
    EXPECT_GT(result.norm, 0);
    EXPECT_EQ(result.stepped, static_cast<std::int64_t>(kParameters));
  }
  EXPECT_EQ(optimizer.next_step(), 3) << "a step that is skipped has no number";
}

TEST(MaxStaleness, RefusesWhatItCannotCount) {
  Cluster cluster(2);
  const SpreadModel model(1);
  DistributedOptimizer<SGD> optimizer(model.references, SGDOptions(0.1));
  const autograd::Context context;
  for (const int bad : {-1, 256}) {
    const auto error = error_of([&] { optimizer.step(context, {.max_staleness = bad}); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(std::string(error.what()),
              "max_staleness of " + std::to_string(bad) + " is refused: it must be from 0 to 255");
  }
}

// A node that takes its time, as a large product does.
Gate gate;
struct Slow : torch::autograd::Function<Slow> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& w) {
    context->save_for_backward({w});
    return x * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto w = context->get_saved_variables()[0];  // libtorch looks at its version here
    gate.pass();
    return {gradients[0] * w, gradients[0]};
  }
};
at::Tensor slow_product(RRef<at::Tensor> w, const at::Tensor& x, bool of_a_view) {
  const at::Tensor& parameter = w.local_value();
  return Slow::apply(x, of_a_view ? parameter.reshape({2, 3}) : parameter);
}

// The backward pass of `first` is held between reading the weight and multiplying by it.
at::Tensor gradient_with_a_step_meanwhile(StalePolicy policy, bool of_a_view) {
  const SpreadModel model(1);
  DistributedOptimizer<SGD> optimizer({model.references[0]}, SGDOptions(0.1), policy);
  autograd::Context first;
  auto x = torch::ones({6}, torch::kDouble);
  if (of_a_view) x = x.reshape({2, 3});
  x.requires_grad_();
  const auto loss = stitch::rpc_sync<slow_product>("worker1", model.references[0], x, of_a_view);
  gate.close();
  auto pass = first.backward_async({loss.sum()});
  EXPECT_TRUE(gate.wait_for_arrival());
  autograd::Context second;
  second.backward(
      {model.holders[0].rpc_sync<&Holder::times>(torch::ones({6}, torch::kDouble)).sum()});
  auto step = optimizer.step_async(second);
  const bool waits = !step.wait_for(policy == StalePolicy::detect ? 200ms : 5s);
  EXPECT_EQ(waits, policy == StalePolicy::detect);
  gate.open();
  pass.get();
  EXPECT_EQ(step.get(), 1);
  EXPECT_FALSE(torch::equal(model.holders[0].rpc_sync<&Holder::now>(), initial(0, at::kDouble)));
  return first.gradient(x).flatten();
}

TEST(StalePolicy, AStepWaitsForANodeThatHasReadTheParameterUnlessAllowed) {
  Cluster cluster(2);
  const auto old_weight = initial(0, at::kDouble);
  for (const bool of_a_view : {false, true}) {
    EXPECT_TRUE(
        torch::equal(gradient_with_a_step_meanwhile(StalePolicy::detect, of_a_view), old_weight));
    EXPECT_FALSE(
        torch::equal(gradient_with_a_step_meanwhile(StalePolicy::allow, of_a_view), old_weight))
        << "nothing is held back";
  }
}

}  // namespace
}  // namespace staleness_test
