#pragma once

#include <torch/torch.h>

#include <vector>

// A perceptron with one hidden layer as a plain list of parameters: weights and biases of its two
// layers, leaves that require grad. [hidden, 784], [hidden], [10, hidden], [10], all float.
[[nodiscard]] std::vector<torch::Tensor> make_mlp(std::int64_t hidden, std::uint64_t seed,
                                                  torch::Device device = torch::kCPU);

// Its scores for a batch: images [batch, 784] -> [batch, 10]. `parameters` may be copies fetched
// from elsewhere.
[[nodiscard]] torch::Tensor mlp_scores(const std::vector<torch::Tensor>& parameters,
                                       const torch::Tensor& images);

// The share of `images` whose highest score is their label.
[[nodiscard]] double mlp_accuracy(const std::vector<torch::Tensor>& parameters,
                                  const torch::Tensor& images, const torch::Tensor& labels);
