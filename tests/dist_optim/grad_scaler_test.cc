// Scaled losses, beside the same steps in one process.
#include <cmath>

#include "tests/dist_optim/spread_model.h"

namespace grad_scaler_test {
namespace {

using namespace spread_model;
using namespace stitch::testing;
using stitch::ErrorCode;
using stitch::optim::GradScaler;
using torch::nn::utils::clip_grad_norm_;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

TEST(GradScaler, StepsAsWithoutScaling) {
  const GradScaler scaler({.scale = 1024, .interval = 100});
  expect_same_training_of_each(
      [&](auto& optimizer, const autograd::Context& context, int) {
        context.scale_gradients(scaler.scale_factor());  // as if the loss had been
        const auto result = optimizer.step(context, {.scaler = &scaler});
        EXPECT_EQ(result.stepped, static_cast<std::int64_t>(kParameters));
      },
      [&](auto& optimizer, const auto&, int) { optimizer.step(); });
  EXPECT_GT(scaler.scale_factor(), 1024);
}

TEST(GradScaler, ClipsWhatIsNoLongerScaled) {
  const GradScaler scaler;
  double there = 0;
  expect_same_training<Adam>(
      AdamOptions(0.05), AdamOptions(0.01),
      [&](auto& optimizer, const autograd::Context& context, int) {
        context.scale_gradients(scaler.scale_factor());
        there = optimizer.step(context, {.max_norm = 0.5, .scaler = &scaler}).norm;
      },
      [&](Adam& optimizer, const std::vector<at::Tensor>& parameters, int) {
        const double here = clip_grad_norm_(parameters, 0.5);
        EXPECT_NEAR(there, here,
                    here * (parameters[0].scalar_type() == at::kDouble ? 1e-12 : 1e-6));
        optimizer.step();
      });
}

// As torch.amp.GradScaler: an inf anywhere halves the factor, good steps double it.
TEST(GradScaler, InfinityOnOneOwnerStepsNowhere) {
  Cluster cluster(4);
  const SpreadModel model(3);
  const auto own = torch::ones({2}, torch::kDouble).set_requires_grad(true);
  auto parameters = model.references;
  parameters.push_back(stitch::make_rref(own));
  DistributedOptimizer<SGD> optimizer(parameters, SGDOptions(0.05));
  SGD here(model.here, SGDOptions(0.05));
  const GradScaler scaler({.scale = 64, .interval = 3});
  std::vector<double> factors;
  std::int64_t steps = 0;
  const double inf = std::numeric_limits<double>::infinity();
  for (const double bad : {0.0, inf, 0.0, 0.0, 0.0, -inf, std::nan(""), 0.0}) {
    autograd::Context context;
    context.backward({scaler.scale(model.loss_there(0))});
    context.set_gradient(own, torch::tensor({1.0, bad}, torch::kDouble));
    const auto result = optimizer.step(context, {.scaler = &scaler});
    EXPECT_EQ(result.skipped, bad != 0);
    EXPECT_EQ(result.step, steps);
    factors.push_back(scaler.scale_factor());
    if (result.skipped) continue;
    ++steps;
    model.backward_here(0);
    here.step();
  }
  EXPECT_EQ(factors, (std::vector<double>{64, 32, 32, 32, 64, 32, 16, 16}));
  EXPECT_EQ(optimizer.next_step(), steps);
  model.expect_equal(1e-12);
}

TEST(GradScaler, IsSharedByOptimizersOfOneStep) {
  Cluster cluster(3);
  const SpreadModel model(2);
  DistributedOptimizer<SGD> sgd(SpreadModel::first(model.references), SGDOptions(0.05));
  DistributedOptimizer<Adam> adam(SpreadModel::rest(model.references), AdamOptions(0.05));
  SGD local_sgd(SpreadModel::first(model.here), SGDOptions(0.05));
  Adam local_adam(SpreadModel::rest(model.here), AdamOptions(0.05));
  const GradScaler scaler({.scale = 8, .interval = 4});
  for (int i = 0; i < 6; ++i) {
    autograd::Context context;
    const auto loss = scaler.scale(model.loss_there(i));
    const auto result = i % 2 == 0 ? stitch::optim::backward_and_step(
                                         context, {loss}, {}, {.scaler = &scaler}, sgd, adam)
                                   : stitch::optim::backward_and_step_async(
                                         context, {loss}, {}, {.scaler = &scaler}, sgd, adam)
                                         .get();
    EXPECT_EQ(result.stepped, 5);
    model.backward_here(i);
    local_sgd.step();
    local_adam.step();
  }
  EXPECT_EQ(scaler.state().scale, 16);
  EXPECT_EQ(scaler.state().good_steps, 2);
  model.expect_equal(1e-12);
}

// Between the loss and the step of one context, a step of another changes the factor.
TEST(GradScaler, AContextIsDividedByTheFactorItWasGiven) {
  Cluster cluster(2);
  const SpreadModel model(1);
  DistributedOptimizer<SGD> optimizer(model.references, SGDOptions(0.05));
  SGD here(model.here, SGDOptions(0.05));
  const GradScaler scaler({.scale = 8, .interval = 1});
  autograd::Context first;
  first.backward({scaler.scale(model.loss_there(0))});
  {
    const autograd::Context second;
    optimizer.step(second, {.scaler = &scaler});
  }
  EXPECT_EQ(scaler.scale_factor(), 16);
  optimizer.step(first, {.scaler = &scaler});
  model.backward_here(0);
  here.step();
  model.expect_equal(1e-12);
}

TEST(GradScaler, ForgetsTheOldestOfManyContexts) {
  Cluster cluster(2);
  const GradScaler scaler({.scale = 8});
  const auto loss = torch::ones({});
  for (int i = 0; i < 1024; ++i) {
    const stitch::WorkerScope scope(cluster[1]);
    const autograd::Context context;
    static_cast<void>(scaler.scale(loss));
  }
  const autograd::Context newest;  // its id is the smallest
  static_cast<void>(scaler.scale(loss));
  scaler.update(false);
  EXPECT_EQ(scaler.factor_of(newest.id()), 8);
}

TEST(GradScaler, IsSavedAsTwoNumbersAndRefusesOthers) {
  const GradScaler scaler;
  EXPECT_EQ(scaler.scale_factor(), 65536);
  for (int i = 0; i < 7; ++i) scaler.update(true);
  scaler.update(false);
  scaler.update(true);
  const GradScaler other;
  other.set_state(scaler.state());
  EXPECT_EQ(other.state().scale, 32768);
  EXPECT_EQ(other.state().good_steps, 1);
  EXPECT_EQ(error_of([&] { other.set_state({.scale = 0}); }).code(), ErrorCode::invalid_argument);
  EXPECT_STREQ(error_of([] { const GradScaler bad({.backoff = 2}); }).what(),
               "GradScaler: backoff of 2.000000 is out of its range");
}

}  // namespace
}  // namespace grad_scaler_test
