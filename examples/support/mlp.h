#pragma once

#include <torch/torch.h>

#include <vector>

// A perceptron with one hidden layer for images of 784 pixels in 10 classes. Its parameters are
// hidden.weight [hidden, 784], hidden.bias [hidden], scores.weight [10, hidden], scores.bias [10].
struct Mlp : torch::nn::Module {
  Mlp(std::int64_t hidden, std::uint64_t seed);
  torch::Tensor forward(const torch::Tensor& images);  // mlp_scores() of its parameters
};

// The scores of an Mlp for a batch: images [batch, 784] -> [batch, 10]. `parameters` are the four
// above, or copies of them.
[[nodiscard]] torch::Tensor mlp_scores(const std::vector<torch::Tensor>& parameters,
                                       const torch::Tensor& images);

// The share of `images` whose highest score is their label.
[[nodiscard]] double mlp_accuracy(const std::vector<torch::Tensor>& parameters,
                                  const torch::Tensor& images, const torch::Tensor& labels);
