#include "training_server.h"

#include "fashion_mnist.h"
#include "mlp.h"

namespace autograd = stitch::dist_autograd;
namespace optim = stitch::optim;

TrainingServer::TrainingServer(std::int64_t hidden, std::uint64_t seed, std::string device)
    : parameters_(make_mlp(hidden, seed, torch::Device(device))) {}

// [tutorial: fetch]
std::vector<torch::Tensor> TrainingServer::fetch() {
  std::vector<torch::Tensor> copies;
  for (const auto& parameter : parameters_) {
    const auto lock = optim::parameter_lock(parameter);  // optimizers hold it while they step
    const std::lock_guard held(*lock);
    copies.push_back(parameter.clone());
  }
  return copies;
}

std::vector<stitch::RRef<torch::Tensor>> TrainingServer::parameters() {
  std::vector<stitch::RRef<torch::Tensor>> references;
  for (const auto& parameter : parameters_) references.push_back(stitch::make_rref(parameter));
  return references;
}
// [tutorial: end]

void TrainingServer::report(int trainer, std::int64_t images, double loss) {
  const std::lock_guard lock(mutex_);
  reports_.push_back({trainer, loss});
  images_ += images;
}

std::pair<std::vector<TrainingServer::Report>, std::int64_t> TrainingServer::take_reports() {
  const std::lock_guard lock(mutex_);
  return {std::exchange(reports_, {}), images_};
}

namespace {

// [tutorial: train]
template <class Optimizer>
void train_with(const optim::OptionsOf<Optimizer>& options,
                const stitch::RRef<TrainingServer>& server, const TrainingPlan& plan,
                const torch::Tensor& images, const torch::Tensor& labels) {
  optim::DistributedOptimizer<Optimizer> optimizer(server.rpc_sync<&TrainingServer::parameters>(),
                                                   options);
  stitch::Future<void> reported = stitch::make_ready();
  for (std::int64_t at = 0; at < images.size(0); at += plan.batch) {
    const auto end = std::min(at + plan.batch, images.size(0));
    autograd::Context context;
    const auto parameters = server.rpc_async<&TrainingServer::fetch>();
    const auto loss = torch::nn::functional::cross_entropy(
        mlp_scores(parameters.get(), images.slice(0, at, end)), labels.slice(0, at, end));
    optim::backward_and_step(context, {loss}, optimizer);
    reported.get();  // of the step before: reporting costs no time
    reported =
        server.rpc_async<&TrainingServer::report>(plan.trainer, end - at, loss.item<double>());
  }
  reported.get();
}
// [tutorial: end]

}  // namespace

const std::vector<std::string>& optimizer_names() {
  static const std::vector<std::string> names{"sgd", "adam", "adamw", "adagrad", "rmsprop"};
  return names;
}

void train_on(const stitch::RRef<TrainingServer>& server, const TrainingPlan& plan,
              const torch::Tensor& images, const torch::Tensor& labels) {
  const auto rate = [&](double usual) {
    return plan.learning_rate > 0 ? plan.learning_rate : usual;
  };
  if (plan.optimizer == "sgd") {
    train_with<torch::optim::SGD>(torch::optim::SGDOptions(rate(0.1)), server, plan, images,
                                  labels);
  } else if (plan.optimizer == "adam") {
    train_with<torch::optim::Adam>(torch::optim::AdamOptions(rate(1e-3)), server, plan, images,
                                   labels);
  } else if (plan.optimizer == "adamw") {
    train_with<torch::optim::AdamW>(torch::optim::AdamWOptions(rate(1e-3)), server, plan, images,
                                    labels);
  } else if (plan.optimizer == "adagrad") {
    train_with<torch::optim::Adagrad>(torch::optim::AdagradOptions(rate(1e-2)), server, plan,
                                      images, labels);
  } else if (plan.optimizer == "rmsprop") {
    train_with<torch::optim::RMSprop>(torch::optim::RMSpropOptions(rate(1e-3)), server, plan,
                                      images, labels);
  } else {
    throw std::invalid_argument("optimizer \"" + plan.optimizer + "\" is unknown");
  }
}

void train(stitch::RRef<TrainingServer> server, TrainingPlan plan) {
  const auto data = read_fashion_mnist(plan.data, FashionMnistSplit::train);
  // The same order on all trainers, of which each takes every n-th image.
  torch::manual_seed(plan.seed);
  std::vector<torch::Tensor> order;
  for (int epoch = 0; epoch < plan.epochs; ++epoch)
    order.push_back(torch::randperm(data.count(), torch::kLong)
                        .slice(0, plan.trainer, data.count(), plan.trainers));
  const auto mine = torch::cat(order);
  const torch::Device device(plan.device);
  train_on(server, plan, data.images.index_select(0, mine).to(device),
           data.labels.index_select(0, mine).to(device));
}
