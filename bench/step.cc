// A training step of a perceptron whose hidden layers are on the other worker, and the same step in
// one process.
#include <torch/torch.h>

#include <cmath>
#include <stdexcept>
#include <vector>

#include "measure.h"
#include "stitch/dist_autograd/context.h"
#include "stitch/dist_optim/backward_and_step.h"
#include "stitch/dist_optim/distributed_optimizer.h"
#include "stitch/rref/remote_module.h"
#include "timing.h"
#include "world.h"

namespace stitch_bench {

namespace step_measure {
namespace {

// The layers that both variants share: each seeds its own parameters.
struct HiddenLayers : torch::nn::Module {
  HiddenLayers() {
    torch::manual_seed(1);
    first = register_module("first", torch::nn::Linear(784, 512));
    second = register_module("second", torch::nn::Linear(512, 512));
  }
  at::Tensor forward(at::Tensor x) { return torch::relu(second(torch::relu(first(x)))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
torch::nn::Linear make_output_layer() {
  torch::manual_seed(2);
  return torch::nn::Linear(512, 10);
}

double us(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::micro>(to - from).count();
}

struct Batch {
  Batch() {
    torch::manual_seed(0);
    images = torch::randn({64, 784});
    labels = torch::randint(0, 10, {64}, torch::kLong);
  }
  at::Tensor images, labels;
};

// Both models have step(), which returns the loss before it.
template <class Optimizer, class Options>
class LocalModel {
 public:
  LocalModel(const Batch& batch, const Options& options)
      : batch_(batch), optimizer_(parameters(), options) {}
  double step() {
    optimizer_.zero_grad();
    const auto loss = torch::nn::functional::cross_entropy(output_(hidden_->forward(batch_.images)),
                                                           batch_.labels);
    loss.backward();
    optimizer_.step();
    return loss.template item<double>();
  }

 private:
  std::vector<at::Tensor> parameters() {
    auto all = hidden_->parameters();
    for (const auto& parameter : output_->parameters()) all.push_back(parameter);
    return all;
  }
  const Batch& batch_;
  std::shared_ptr<HiddenLayers> hidden_ = std::make_shared<HiddenLayers>();
  torch::nn::Linear output_ = make_output_layer();
  Optimizer optimizer_;
};

template <class Optimizer, class Options>
class DistributedModel {
 public:
  DistributedModel(stitch::WorkerId server, const Batch& batch, const Options& options)
      : batch_(batch), hidden_(server), optimizer_(parameters(), options) {}
  double step(bool clipped = false) {
    const auto start = Clock::now();
    stitch::dist_autograd::Context context;
    const auto loss = forward();
    const auto forward_done = Clock::now();
    context.backward({loss});
    const auto backward_done = Clock::now();
    if (clipped) {
      optimizer_.step(context, {.max_norm = 1.0});
    } else {
      optimizer_.step(context);
    }
    if (clipped) return loss.template item<double>();
    forward_us.push_back(us(start, forward_done));
    backward_us.push_back(us(forward_done, backward_done));
    optimizer_us.push_back(us(backward_done, Clock::now()));
    return loss.template item<double>();
  }

  // The same with the steps in the messages that end the backward pass.
  double step_at_once(bool clipped = false) {
    stitch::dist_autograd::Context context;
    const auto loss = forward();
    if (clipped) {
      stitch::optim::backward_and_step(context, {loss}, {}, {.max_norm = 1.0}, optimizer_);
    } else {
      stitch::optim::backward_and_step(context, {loss}, optimizer_);
    }
    return loss.template item<double>();
  }

  std::vector<double> forward_us, backward_us, optimizer_us;

 private:
  at::Tensor forward() {
    return torch::nn::functional::cross_entropy(output_(hidden_.forward(batch_.images)),
                                                batch_.labels);
  }
  std::vector<stitch::RRef<at::Tensor>> parameters() {
    auto all = hidden_.parameters();
    for (const auto& parameter : output_->parameters()) all.push_back(stitch::make_rref(parameter));
    return all;
  }
  const Batch& batch_;
  stitch::RemoteModule<HiddenLayers> hidden_;
  torch::nn::Linear output_ = make_output_layer();
  stitch::optim::DistributedOptimizer<Optimizer> optimizer_;
};

template <class Step>
double steps_per_second(const Side& side, Step step) {
  return 1e6 / median(time_each_us(side.settings().seconds, 5, [&] { static_cast<void>(step()); }));
}

template <class Optimizer, class Options>
void measure_optimizer(const Side& side, const std::string& name, const Batch& batch,
                       const Options& options) {
  LocalModel<Optimizer, Options> local(batch, options);
  DistributedModel<Optimizer, Options> distributed(other(side), batch, options);
  for (int i = 0; i < 20; ++i) {
    const double expected = local.step();
    const double found = i % 2 == 0 ? distributed.step() : distributed.step_at_once();
    if (std::fabs(found - expected) > 1e-3 * std::max(1.0, std::fabs(expected))) {
      throw std::runtime_error("the losses of the local and the distributed model differ");
    }
  }
  const std::string key = "step." + side.path() + '.' + name;
  side.result(key + ".local", steps_per_second(side, [&] { return local.step(); }), "steps/s");
  distributed.forward_us.clear();
  distributed.backward_us.clear();
  distributed.optimizer_us.clear();
  // In turns: a busy host slows all of them alike.
  std::vector<double> plain, clipped, at_once, at_once_clipped;
  const auto take = [](std::vector<double>& times, const auto& step) {
    const auto start = Clock::now();
    static_cast<void>(step());
    times.push_back(us(start, Clock::now()));
  };
  static_cast<void>(time_each_us(4 * side.settings().seconds, 5, [&] {
    take(plain, [&] { return distributed.step(); });
    take(clipped, [&] { return distributed.step(true); });
    take(at_once, [&] { return distributed.step_at_once(); });
    take(at_once_clipped, [&] { return distributed.step_at_once(true); });
  }));
  const auto report = [&](const char* name, const std::vector<double>& times, const char* floor) {
    side.result(key + name, 1e6 / median(times), "steps/s", key + floor);
  };
  report(".distributed", plain, ".local");
  side.result(key + ".forward", median(distributed.forward_us), "us");
  side.result(key + ".backward", median(distributed.backward_us), "us");
  side.result(key + ".optimizer", median(distributed.optimizer_us), "us");
  report(".clipped", clipped, ".distributed");
  report(".at_once", at_once, ".local");
  report(".at_once.clipped", at_once_clipped, ".at_once");
}

void first(Side& side) {
  const stitch::Worker self = join_world(side);
  {
    const Batch batch;
    measure_optimizer<torch::optim::SGD>(side, "sgd", batch, torch::optim::SGDOptions(0.05));
    measure_optimizer<torch::optim::Adam>(side, "adam", batch, torch::optim::AdamOptions(1e-3));
  }
  finish(side);
}

}  // namespace
}  // namespace step_measure

Measure step() {
  using namespace step_measure;
  return {.name = "step",
          .about =
              "training steps of a 784-512-512-10 perceptron, hidden layers on the other worker, "
              "and all in one process",
          .paths = {"same_host", "tcp"},
          .first = &first,
          .second = &serve};
}

}  // namespace stitch_bench
