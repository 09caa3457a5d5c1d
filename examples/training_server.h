#pragma once

#include <stitch/stitch.h>

#include <mutex>
#include <vector>

// [tutorial: server]
// What the parameter-server process owns: the parameters that all trainers share, and what they
// have reported. Thread contract: any thread.
class TrainingServer {
 public:
  TrainingServer(std::int64_t hidden, std::uint64_t seed, std::string device);

  // Copies of the parameters as they are now, each consistent in itself. Differentiable: gradients
  // of the copies arrive at the parameters.
  std::vector<torch::Tensor> fetch();
  // References to the parameters, for an optimizer.
  std::vector<stitch::RRef<torch::Tensor>> parameters();
  // [tutorial: end]

  // A trainer has done a step on `images` images.
  void report(int trainer, std::int64_t images, double loss);
  struct Report {
    int trainer = 0;
    double loss = 0;
  };
  // What has been reported since the last call, and the images of all reports so far.
  std::pair<std::vector<Report>, std::int64_t> take_reports();

 private:
  const std::vector<torch::Tensor> parameters_;
  std::mutex mutex_;
  std::vector<Report> reports_;
  std::int64_t images_ = 0;
};

// [tutorial: plan]
// What a trainer needs to know.
struct TrainingPlan {
  std::string data;            // folder of the data files
  std::string device = "cpu";  // of the trainer, or "cuda", "cuda:1"
  std::string optimizer;       // one of optimizer_names()
  double learning_rate = 0;    // 0: the optimizer's usual one
  std::int64_t batch = 64;
  int epochs = 1;
  int trainer = 0;  // which of the trainers this is; they share every epoch between them
  int trainers = 1;
  std::uint64_t seed = 1;
};
// [tutorial: end]

[[nodiscard]] const std::vector<std::string>& optimizer_names();

// Trains on one share of the images, step by step: fetch the parameters, compute the loss here, run
// backward to the server, step there. Runs on a trainer, called by the server.
void train(stitch::RRef<TrainingServer> server, TrainingPlan plan);

// The same for images in memory, in the order given; used by train().
void train_on(const stitch::RRef<TrainingServer>& server, const TrainingPlan& plan,
              const torch::Tensor& images, const torch::Tensor& labels);
