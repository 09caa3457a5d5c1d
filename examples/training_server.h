#pragma once

#include <stitch/stitch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "support/mlp.h"

// [tutorial: plan]
// What is trained, and how. Sent to every trainer.
struct TrainingPlan {
  std::string data;                // folder of the images
  std::string device = "cpu";      // of parameters and images, or "cuda", "cuda:1"
  std::string optimizer = "adam";  // or sgd, adamw, adagrad, rmsprop
  double learning_rate = 0;        // the highest; 0: the optimizer's usual one
  std::int64_t batch = 64;         // images a step
  int epochs = 3;                  // passes over the images, which the trainers share
  std::int64_t steps = 0;          // of all trainers together
  std::int64_t done = 0;           // of these, before this run
  int trainers = 1;
  std::uint64_t seed = 1;
  std::string checkpoint;  // folder; none: nothing is saved
};
// [tutorial: end]

// [tutorial: server]
// What the server owns: a model, its one optimizer, and what trainers have reported. Made as a
// stitch::Serialized<TrainingServer>, so its methods run one at a time.
class TrainingServer {
 public:
  // The model lives on this worker, too.
  TrainingServer(stitch::RemoteModule<Mlp> model, TrainingPlan plan);

  // Copies of the parameters as they are now. Differentiable: gradients of the copies arrive at
  // the parameters.
  std::vector<torch::Tensor> fetch();
  // Steps the parameters with the gradients in the caller's autograd context.
  void step(int trainer, double loss);
  // Goes on from the checkpoint: the number of steps that were done.
  std::int64_t resume();
  // The trainers and losses of the steps since the last call.
  std::vector<std::pair<int, double>> take_reports() { return std::exchange(reports_, {}); }
  // [tutorial: end]

 private:
  template <class Optimizer>
  void make_optimizer(const stitch::RemoteModule<Mlp>& model, double usual_rate);

  const TrainingPlan plan_;
  stitch::Checkpoint checkpoint_;
  std::vector<torch::Tensor> parameters_;
  std::function<stitch::optim::StepResult(const stitch::dist_autograd::ContextHandle&)> step_;
  std::function<std::int64_t()> next_step_;
  std::vector<std::pair<int, double>> reports_;
};

using ServerRef = stitch::RRef<stitch::Serialized<TrainingServer>>;

// Runs on a trainer, called by the server: trains on its share of the images, until the plan's
// steps are done.
void train(ServerRef server, TrainingPlan plan, int trainer);
// The same for images in memory, in the order given.
void train_on(const ServerRef& server, const TrainingPlan& plan, int trainer,
              const torch::Tensor& images, const torch::Tensor& labels);
