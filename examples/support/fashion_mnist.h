#pragma once

#include <torch/torch.h>

#include <filesystem>

// Pictures of clothes and what they show, as the file set "Fashion-MNIST" has them.
struct FashionMnist {
  torch::Tensor images;  // [count, 784] float, 0 (background) to 1
  torch::Tensor labels;  // [count] int64, 0 to 9

  [[nodiscard]] std::int64_t count() const { return labels.size(0); }
};

enum class FashionMnistSplit { train, test };

// Reads the gzipped files of one split (60,000 images to train, 10,000 to test) from `folder`.
// Throws std::runtime_error that names the file, what was expected and what was found: missing,
// damaged or truncated, not of this kind, or images and labels that do not belong together.
[[nodiscard]] FashionMnist read_fashion_mnist(const std::filesystem::path& folder,
                                              FashionMnistSplit split);
