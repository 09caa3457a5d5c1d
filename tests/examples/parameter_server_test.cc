#include <gtest/gtest.h>
#include <torch/torch.h>

#include "mlp.h"
#include "tests/support/cluster.h"
#include "training_server.h"

namespace parameter_server_test {
namespace {

// 100 steps of training in one process, on the same images in the same order.
std::vector<torch::Tensor> train_alone(const TrainingPlan& plan, std::int64_t hidden,
                                       const torch::Tensor& images, const torch::Tensor& labels) {
  auto parameters = make_mlp(hidden, plan.seed);
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(plan.learning_rate));
  for (std::int64_t at = 0; at < images.size(0); at += plan.batch) {
    optimizer.zero_grad();
    const auto end = at + plan.batch;
    torch::nn::functional::cross_entropy(mlp_scores(parameters, images.slice(0, at, end)),
                                         labels.slice(0, at, end))
        .backward();
    optimizer.step();
  }
  return parameters;
}

TEST(ParameterServer, OneTrainerFollowsTrainingInOneProcess) {
  stitch::testing::Cluster cluster(2);
  TrainingPlan plan;
  plan.optimizer = "sgd";
  plan.learning_rate = 0.1;
  plan.batch = 16;
  torch::manual_seed(3);
  const auto images = torch::rand({100 * plan.batch, 784});
  const auto labels = torch::randint(10, {images.size(0)}, torch::kLong);
  const auto alone = train_alone(plan, 32, images, labels);

  const auto server = stitch::remote<TrainingServer>("worker1", 32, plan.seed, std::string("cpu"));
  train_on(server, plan, images, labels);
  const auto together = server.rpc_sync<&TrainingServer::fetch>();
  ASSERT_EQ(together.size(), alone.size());
  for (std::size_t i = 0; i < alone.size(); ++i)
    EXPECT_TRUE(torch::allclose(together[i], alone[i], 1e-5, 1e-5)) << i;
}

}  // namespace
}  // namespace parameter_server_test
