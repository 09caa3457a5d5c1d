#include "training_server.h"

#include "support/fashion_mnist.h"

namespace autograd = stitch::dist_autograd;
namespace optim = stitch::optim;

// [tutorial: optimizer]
template <class Optimizer>
void TrainingServer::make_optimizer(const stitch::RemoteModule<Mlp>& model, double usual_rate) {
  std::vector<std::pair<std::string, stitch::RRef<torch::Tensor>>> weights, biases;
  for (const auto& [name, parameter] : model.named_parameters()) {
    (name.ends_with("bias") ? biases : weights).emplace_back(name, parameter);
    parameters_.push_back(parameter.local_value());
  }
  optim::OptionsOf<Optimizer> options(plan_.learning_rate > 0 ? plan_.learning_rate : usual_rate);
  optim::DistributedOptimizer<Optimizer> optimizer{
      {{.parameters = weights, .options = options.weight_decay(1e-4)},
       {.parameters = biases, .options = options.weight_decay(0)}}};
  const std::int64_t warm_up = plan_.steps / 20;
  optimizer.set_schedule(optim::cosine({.warm_up = warm_up, .steps = plan_.steps - warm_up}));
  checkpoint_.add("model", model);
  checkpoint_.add("optimizer", optimizer);
  step_ = [=](const auto& context) mutable { return optimizer.step(context, {.max_norm = 1.0}); };
  next_step_ = [=] { return optimizer.next_step(); };
}
// [tutorial: end]

TrainingServer::TrainingServer(stitch::RemoteModule<Mlp> model, TrainingPlan plan)
    : plan_(std::move(plan)), checkpoint_(plan_.checkpoint) {
  if (plan_.optimizer == "sgd") make_optimizer<torch::optim::SGD>(model, 0.1);
  if (plan_.optimizer == "adam") make_optimizer<torch::optim::Adam>(model, 3e-3);
  if (plan_.optimizer == "adamw") make_optimizer<torch::optim::AdamW>(model, 3e-3);
  if (plan_.optimizer == "adagrad") make_optimizer<torch::optim::Adagrad>(model, 1e-2);
  if (plan_.optimizer == "rmsprop") make_optimizer<torch::optim::RMSprop>(model, 1e-3);
  if (!step_) throw std::invalid_argument("optimizer \"" + plan_.optimizer + "\" is unknown");
}

// [tutorial: fetch]
std::vector<torch::Tensor> TrainingServer::fetch() {
  std::vector<torch::Tensor> copies;
  for (const auto& parameter : parameters_) copies.push_back(parameter.clone());
  return copies;
}

void TrainingServer::step(int trainer, double loss) {
  const std::int64_t done = step_(autograd::current_context()).step + 1;
  reports_.emplace_back(trainer, loss);
  if (!plan_.checkpoint.empty() && (done % 100 == 0 || done == plan_.steps)) checkpoint_.save();
}
// [tutorial: end]

std::int64_t TrainingServer::resume() {
  checkpoint_.load();
  return next_step_();
}

// [tutorial: train]
void train_on(const ServerRef& server, const TrainingPlan& plan, int trainer,
              const torch::Tensor& images, const torch::Tensor& labels) {
  const auto first = plan.done / plan.trainers * plan.batch;
  for (std::int64_t at = first; at < images.size(0); at += plan.batch) {
    const auto end = std::min(at + plan.batch, images.size(0));
    autograd::Context context;
    const auto parameters = server.rpc_sync<&TrainingServer::fetch>();
    const auto loss = torch::nn::functional::cross_entropy(
        mlp_scores(parameters, images.slice(0, at, end)), labels.slice(0, at, end));
    context.backward({loss});
    server.rpc_sync<&TrainingServer::step>(trainer, loss.item<double>());
  }
}
// [tutorial: end]

void train(ServerRef server, TrainingPlan plan, int trainer) {
  const auto data = read_fashion_mnist(plan.data, FashionMnistSplit::train);
  // The same order on all trainers, of which each takes every n-th image.
  torch::manual_seed(plan.seed);
  std::vector<torch::Tensor> order;
  for (int epoch = 0; epoch < plan.epochs; ++epoch)
    order.push_back(
        torch::randperm(data.count(), torch::kLong).slice(0, trainer, data.count(), plan.trainers));
  const auto mine = torch::cat(order);
  const torch::Device device(plan.device);
  train_on(server, plan, trainer, data.images.index_select(0, mine).to(device),
           data.labels.index_select(0, mine).to(device));
}
