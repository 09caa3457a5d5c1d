#include "examples/training_server.h"

#include <gtest/gtest.h>

#include "tests/support/cluster.h"

namespace parameter_server_test {
namespace {

// Training in one process, on the same images in the same order. Returns how many steps were
// clipped.
int train_alone(Mlp& model, const TrainingPlan& plan, const torch::Tensor& images,
                const torch::Tensor& labels) {
  const auto options = [&](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(plan.learning_rate).weight_decay(decay));
  };
  const auto all = model.parameters();
  torch::optim::AdamW optimizer(
      std::vector<torch::optim::OptimizerParamGroup>{{{all[0], all[2]}, options(1e-4)},
                                                     {{all[1], all[3]}, options(0)}},
      torch::optim::AdamWOptions(plan.learning_rate));
  const auto schedule =
      stitch::optim::cosine({.warm_up = plan.steps / 20, .steps = plan.steps - plan.steps / 20});
  int clipped = 0;
  for (std::int64_t step = 0; step < plan.steps; ++step) {
    for (auto& group : optimizer.param_groups())
      group.options().set_lr(plan.learning_rate * schedule(step));
    optimizer.zero_grad();
    const auto at = step * plan.batch, end = at + plan.batch;
    torch::nn::functional::cross_entropy(mlp_scores(all, images.slice(0, at, end)),
                                         labels.slice(0, at, end))
        .backward();
    clipped += torch::nn::utils::clip_grad_norm_(all, 1.0) > 1.0;
    optimizer.step();
  }
  return clipped;
}

TEST(ParameterServer, OneTrainerFollowsTrainingInOneProcess) {
  stitch::testing::Cluster cluster(2);
  TrainingPlan plan{.optimizer = "adamw", .learning_rate = 0.01, .batch = 16, .steps = 100};
  torch::manual_seed(3);
  const auto images = torch::rand({plan.steps * plan.batch, 784}) * 2;
  const auto labels = torch::randint(10, {images.size(0)}, torch::kLong);
  Mlp alone(32, plan.seed);
  const int clipped = train_alone(alone, plan, images, labels);
  EXPECT_GT(clipped, 0);
  EXPECT_LT(clipped, plan.steps);

  const stitch::RemoteModule<Mlp> model("worker1", 32, plan.seed);
  const ServerRef server =
      stitch::remote<stitch::Serialized<TrainingServer>>("worker1", model, plan);
  train_on(server, plan, 0, images, labels);
  const auto together = server.rpc_sync<&TrainingServer::fetch>();
  ASSERT_EQ(together.size(), 4);
  for (std::size_t i = 0; i < 4; ++i)
    EXPECT_TRUE(torch::allclose(together[i], alone.parameters()[i], 1e-5, 1e-5)) << i;
}

}  // namespace
}  // namespace parameter_server_test
