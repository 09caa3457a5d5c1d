// Clipped gradients, beside torch::nn::utils in one process.
#include <cmath>

#include "tests/dist_optim/spread_model.h"

namespace clipping_test {
namespace {

using namespace spread_model;
using namespace std::chrono_literals;
using stitch::ErrorCode;
using stitch::optim::StepOptions;
using stitch::optim::StepResult;
using stitch::testing::Cluster;
using stitch::testing::error_of;
using torch::nn::utils::clip_grad_norm_;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

void expect_near(double there, double here, at::ScalarType dtype) {
  EXPECT_NEAR(there, here, here * (dtype == at::kDouble ? 1e-12 : 1e-6));
}

TEST(Clipping, OfAStepEqualsThatOfOneProcess) {
  double there = 0;
  int clipped = 0;
  const auto max_norm = [](int i) { return i % 3 == 0 ? 1e3 : 0.5; };
  expect_same_training_of_each(
      [&](auto& optimizer, const autograd::Context& context, int i) {
        const StepResult result = optimizer.step(context, {.max_norm = max_norm(i)});
        EXPECT_EQ(result.stepped, static_cast<std::int64_t>(kParameters));
        EXPECT_FALSE(result.skipped);
        EXPECT_EQ(result.step, i);
        there = result.norm;
      },
      [&](auto& optimizer, const std::vector<at::Tensor>& parameters, int i) {
        const double here = clip_grad_norm_(parameters, max_norm(i));
        expect_near(there, here, parameters[0].scalar_type());
        if (here > max_norm(i)) ++clipped;
        optimizer.step();
      });
  EXPECT_GT(clipped, 50);
}

// Parameter 0 is stepped by both of them, and counted once.
TEST(Clipping, IsOverAllParametersOfSeveralOptimizersEachOnce) {
  Cluster cluster(4);
  const SpreadModel model(3);
  const auto& all = model.references;
  DistributedOptimizer<SGD> sgd({all[0], all[1], model.holders[0].rpc_sync<&Holder::parameter>()},
                                SGDOptions(0.05));
  DistributedOptimizer<Adam> adam(
      {model.holders[0].rpc_sync<&Holder::parameter>(), all[2], all[3], all[4]}, AdamOptions(0.05));
  SGD local_sgd(SpreadModel::first(model.here), SGDOptions(0.05));
  Adam local_adam({model.here[0], model.here[2], model.here[3], model.here[4]}, AdamOptions(0.05));
  for (int i = 0; i < 6; ++i) {
    autograd::Context context;
    context.backward({model.loss_there(i)});
    model.backward_here(i);
    const double there = stitch::optim::clip_grad_norm(context, {&sgd, &adam}, 0.5);
    expect_near(there, clip_grad_norm_(model.here, 0.5), at::kDouble);
    EXPECT_GT(there, 0.5);
    // What is left has that norm; torch adds 1e-6 to it.
    EXPECT_NEAR(stitch::optim::clip_grad_norm(context, {&adam, &sgd}, 1e3), 0.5, 1e-6);
    sgd.step(context);
    adam.step(context);
    local_sgd.step();
    local_adam.step();
  }
  model.expect_equal(1e-12);
}

TEST(Clipping, LimitsEachElement) {
  expect_same_training<SGD>(
      SGDOptions(0.05), SGDOptions(0.1),
      [](auto& optimizer, const autograd::Context& context, int) {
        stitch::optim::clip_grad_value(context, {&optimizer}, 0.7);
        optimizer.step(context);
      },
      [](SGD& optimizer, const std::vector<at::Tensor>& parameters, int) {
        torch::nn::utils::clip_grad_value_(parameters, 0.7);
        optimizer.step();
      });
}

// Rows are named more than once: what counts is their sum.
TEST(Clipping, CombinesTheRowsOfSparseGradients) {
  Cluster cluster(3);
  const auto table = torch::linspace(0.5, 2, 12, torch::kDouble).reshape({6, 2});
  const std::vector<RRef<Holder>> holders{stitch::remote<Holder>("worker1", table),
                                          stitch::remote<Holder>("worker2", table + 1)};
  const std::vector<at::Tensor> here{table.clone().set_requires_grad(true),
                                     (table + 1).set_requires_grad(true)};
  DistributedOptimizer<SGD> optimizer(
      {holders[0].rpc_sync<&Holder::parameter>(), holders[1].rpc_sync<&Holder::parameter>()},
      SGDOptions(0.1));
  SGD local(here, SGDOptions(0.1));
  const auto ids = torch::tensor({0, 2, 2, 5, 2});
  for (int way = 0; way < 3; ++way) {
    autograd::Context context;
    context.backward(
        {(holders[0].rpc_sync<&Holder::rows>(ids) * holders[1].rpc_sync<&Holder::rows>(ids))
             .sum()});
    local.zero_grad();
    (here[0].index_select(0, ids) * here[1].index_select(0, ids)).sum().backward();
    if (way == 0) {
      const auto result = optimizer.step(context, {.max_norm = 2});
      expect_near(result.norm, clip_grad_norm_(here, 2), at::kDouble);
      EXPECT_GT(result.norm, 2);
    } else if (way == 1) {
      expect_near(stitch::optim::clip_grad_norm(context, {&optimizer}, 1), clip_grad_norm_(here, 1),
                  at::kDouble);
      optimizer.step(context);
    } else {
      stitch::optim::clip_grad_value(context, {&optimizer}, 2.5);
      torch::nn::utils::clip_grad_value_(here, 2.5);
      optimizer.step(context);
    }
    local.step();
    for (std::size_t i = 0; i < 2; ++i) {
      const auto now = holders[i].rpc_sync<&Holder::now>();
      EXPECT_TRUE(torch::allclose(now, here[i], 1e-12, 0)) << way << now << here[i];
    }
  }
}

TEST(Clipping, SkipsTheStepEverywhereWhenTheNormIsNotFinite) {
  Cluster cluster(3);
  const SpreadModel model(2);
  const auto own = torch::ones({2}, torch::kDouble).set_requires_grad(true);
  auto parameters = model.references;
  parameters.push_back(stitch::make_rref(own));
  DistributedOptimizer<SGD> optimizer(parameters, SGDOptions(0.1));
  for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    autograd::Context context;
    context.backward({model.loss_there(0)});
    context.set_gradient(own, torch::tensor({1.0, bad}, torch::kDouble));
    const auto result = optimizer.step(context, {.max_norm = 1});
    EXPECT_TRUE(result.skipped);
    EXPECT_EQ(result.stepped, 0);
    EXPECT_FALSE(std::isfinite(result.norm));
    EXPECT_EQ(result.step, 0);
    EXPECT_FALSE(std::isfinite(stitch::optim::clip_grad_norm(context, {&optimizer}, 1)));
    EXPECT_EQ(context.gradient(own)[0].item<double>(), 1.0);
  }
  model.expect_equal(0);
  autograd::Context context;
  context.backward({model.loss_there(0)});
  const auto result = optimizer.step(context, {.max_norm = 1});
  EXPECT_FALSE(result.skipped);
  EXPECT_EQ(result.stepped, 5);
  EXPECT_EQ(result.step, 0);
  EXPECT_EQ(optimizer.step(context, {}).step, 1);
}

TEST(Clipping, OfAStepLeavesTheContextAndTakesAWaveOfMessagesMore) {
  Cluster cluster(3);
  const SpreadModel model(2);
  const auto own = torch::full({2}, 3.0, torch::kDouble).set_requires_grad(true);
  auto parameters = model.references;
  parameters.push_back(stitch::make_rref(own));
  DistributedOptimizer<SGD> optimizer(parameters, SGDOptions(0.1));
  autograd::Context context;
  context.backward({model.loss_there(0) + own.square().sum()});
  std::atomic<int> requests{0};
  const auto count = [&](const StepOptions& options) {
    requests = 0;
    const stitch::testing::LoopbackFaults counted(
        [&](std::uint32_t, std::uint32_t, std::uint64_t, const auto& message) {
          if (stitch::testing::kind_of(message) == stitch::rpc::wire::kRequest) ++requests;
          return stitch::transport::Fate{};
        });
    EXPECT_EQ(optimizer.step(context, options).stepped, 6);
    return requests.load();
  };
  EXPECT_EQ(count({}), 3);  // owners
  EXPECT_EQ(count({.max_norm = 0.1}), 6);
  EXPECT_TRUE(torch::equal(context.gradient(own), torch::full({2}, 6.0, torch::kDouble)));
  const double norm = stitch::optim::clip_grad_norm(context, {&optimizer}, 0.1);
  EXPECT_TRUE(torch::allclose(context.gradient(own),
                              torch::full({2}, 6 * 0.1 / (norm + 1e-6), torch::kDouble), 1e-12, 0));
}

TEST(Clipping, IsPartOfBackwardAndStep) {
  Cluster cluster(4);
  const SpreadModel together(3), apart(3);
  const auto sgd_of = [](const SpreadModel& model) {
    return DistributedOptimizer<SGD>(SpreadModel::first(model.references), SGDOptions(0.05));
  };
  const auto adam_of = [](const SpreadModel& model) {
    return DistributedOptimizer<Adam>(SpreadModel::rest(model.references), AdamOptions(0.05));
  };
  auto sgd = sgd_of(together), other_sgd = sgd_of(apart);
  auto adam = adam_of(together), other_adam = adam_of(apart);
  for (int i = 0; i < 6; ++i) {
    {
      autograd::Context context;
      context.backward({apart.loss_there(i)});
      const double norm = stitch::optim::clip_grad_norm(context, {&other_sgd, &other_adam}, 0.5);
      other_sgd.step(context);
      other_adam.step(context);
      autograd::Context second;
      const auto result = stitch::optim::backward_and_step(second, {together.loss_there(i)}, {},
                                                           {.max_norm = 0.5}, sgd, adam);
      expect_near(result.norm, norm, at::kDouble);
      EXPECT_EQ(result.stepped, 5);
      EXPECT_EQ(result.step, i);
    }
    for (std::size_t p = 0; p < kParameters; ++p) {
      EXPECT_TRUE(torch::allclose(together.holders[p].rpc_sync<&Holder::now>(),
                                  apart.holders[p].rpc_sync<&Holder::now>(), 1e-12, 0));
    }
  }
}

TEST(Clipping, RefusesLimitsOutOfRangeAndContextsThatHaveFailed) {
  Cluster cluster(2);
  const SpreadModel model(1);
  DistributedOptimizer<SGD> optimizer(model.references, SGDOptions(0.1));
  autograd::Context context;
  const auto loss = model.loss_there(0);
  for (const auto& refused : std::vector<std::function<void()>>{
           [&] { optimizer.step(context, {.max_norm = -1}); },
           [&] { stitch::optim::clip_grad_norm(context, {&optimizer}, -1); },
           [&] {
             stitch::optim::backward_and_step(context, {loss}, {}, {.max_norm = -1}, optimizer);
           }}) {
    const auto error = error_of(refused);
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_STREQ(error.what(), "max_norm of -1.000000 is refused: it must be 0 or more");
  }
  EXPECT_THROW(stitch::optim::clip_grad_value(context, {&optimizer}, std::nan("")), stitch::Error);
  context.backward({loss});
  context.fail(stitch::Error(ErrorCode::internal, "given up"));
  for (const auto& fails : std::vector<std::function<void()>>{
           [&] { optimizer.step(context, {.max_norm = 1}); },
           [&] { stitch::optim::clip_grad_norm(context, {&optimizer}, 1); },
           [&] { stitch::optim::clip_grad_value(context, {&optimizer}, 1); }})
    EXPECT_STREQ(error_of(fails).what(), "given up");
  model.expect_equal(0);
}

TEST(StepTimeout, EndsEitherWave) {
  Cluster cluster(3);
  const SpreadModel model(2);
  DistributedOptimizer<SGD> optimizer(model.references, SGDOptions(0.1));
  for (const int late : {1, 2}) {  // the request of the norm, or that of the step
    autograd::Context context;
    context.backward({model.loss_there(0)});
    std::atomic<int> requests{0};
    const stitch::testing::LoopbackFaults delayed(
        [&](std::uint32_t, std::uint32_t to, std::uint64_t, const auto& message) {
          const bool request = stitch::testing::kind_of(message) == stitch::rpc::wire::kRequest;
          const bool this_one = request && to == 2 && ++requests == late;
          return stitch::transport::Fate{.delay = this_one ? 3s : 0s};
        });
    const auto began = std::chrono::steady_clock::now();
    const auto error =
        error_of([&] { optimizer.step(context, {.max_norm = 0.5, .timeout = 300ms}); });
    EXPECT_EQ(error.code(), ErrorCode::timeout) << error.what();
    EXPECT_LT(std::chrono::steady_clock::now() - began, 2500ms);
  }
}

}  // namespace
}  // namespace clipping_test
