#include "mlp.h"

#include <cmath>

std::vector<torch::Tensor> make_mlp(std::int64_t hidden, std::uint64_t seed, torch::Device device) {
  torch::manual_seed(seed);
  const auto uniform = [device](at::IntArrayRef shape, std::int64_t fan_in) {
    const double bound = 1.0 / std::sqrt(static_cast<double>(fan_in));
    return torch::empty(shape).uniform_(-bound, bound).to(device).set_requires_grad(true);
  };
  return {uniform({hidden, 784}, 784), uniform({hidden}, 784), uniform({10, hidden}, hidden),
          uniform({10}, hidden)};
}

torch::Tensor mlp_scores(const std::vector<torch::Tensor>& parameters,
                         const torch::Tensor& images) {
  const auto hidden = torch::relu(torch::addmm(parameters[1], images, parameters[0].t()));
  return torch::addmm(parameters[3], hidden, parameters[2].t());
}

double mlp_accuracy(const std::vector<torch::Tensor>& parameters, const torch::Tensor& images,
                    const torch::Tensor& labels) {
  const torch::NoGradGuard no_grad;
  return mlp_scores(parameters, images)
      .argmax(1)
      .eq(labels)
      .to(torch::kDouble)
      .mean()
      .item<double>();
}
