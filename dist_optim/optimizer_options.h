#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <string>

namespace stitch::optim {

// The options type of an optimizer: OptionsOf<torch::optim::Adam> is torch::optim::AdamOptions.
// Specialize it for an optimizer of your own that derives from torch::optim::Optimizer and is
// constructed from (parameters, options).
template <class Optimizer>
struct OptimizerTraits;
template <>
struct OptimizerTraits<torch::optim::SGD> {
  using Options = torch::optim::SGDOptions;
  // C++ SGD writes past the version counter; the others do not.
  static constexpr bool kBumpsVersion = false;
};
template <>
struct OptimizerTraits<torch::optim::Adam> {
  using Options = torch::optim::AdamOptions;
};
template <>
struct OptimizerTraits<torch::optim::AdamW> {
  using Options = torch::optim::AdamWOptions;
};
template <>
struct OptimizerTraits<torch::optim::Adagrad> {
  using Options = torch::optim::AdagradOptions;
};
template <>
struct OptimizerTraits<torch::optim::RMSprop> {
  using Options = torch::optim::RMSpropOptions;
};
template <>
struct OptimizerTraits<torch::optim::LBFGS> {
  using Options = torch::optim::LBFGSOptions;
  static constexpr const char* kRefused =
      "LBFGS re-evaluates the loss while it steps, which workers that hold only parameters cannot "
      "do";
};
template <class Optimizer>
using OptionsOf = typename OptimizerTraits<Optimizer>::Options;

// Options as bytes for another worker, by libtorch's own serialization of them; and back.
[[nodiscard]] std::string encode_options(const torch::optim::OptimizerOptions& options);
void decode_options(const std::string& bytes, torch::optim::OptimizerOptions& options);

}  // namespace stitch::optim
