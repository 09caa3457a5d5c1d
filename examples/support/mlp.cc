#include "support/mlp.h"

Mlp::Mlp(std::int64_t hidden, std::uint64_t seed) {
  torch::manual_seed(seed);
  register_module("hidden", torch::nn::Linear(784, hidden));
  register_module("scores", torch::nn::Linear(hidden, 10));
}

torch::Tensor Mlp::forward(const torch::Tensor& images) { return mlp_scores(parameters(), images); }

torch::Tensor mlp_scores(const std::vector<torch::Tensor>& parameters,
                         const torch::Tensor& images) {
  const auto hidden = torch::relu(torch::addmm(parameters[1], images, parameters[0].t()));
  return torch::addmm(parameters[3], hidden, parameters[2].t());
}

double mlp_accuracy(const std::vector<torch::Tensor>& parameters, const torch::Tensor& images,
                    const torch::Tensor& labels) {
  const torch::NoGradGuard no_grad;
  const auto best = mlp_scores(parameters, images).argmax(1);
  return best.eq(labels).to(torch::kDouble).mean().item<double>();
}
