#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stitch/dist_optim/optimizer_traits.h"

namespace stitch::optim {

// A type of optimizer for code that is no template: the functions of optimizer_traits.h, which see
// for results and errors. A constant.
struct OptimizerType {
  using Options = std::unique_ptr<torch::optim::OptimizerOptions>;
  using State = std::unique_ptr<torch::optim::OptimizerParamState>;
  std::string (*name)();
  // An optimizer of one parameter.
  std::unique_ptr<torch::optim::Optimizer> (*make)(const at::Tensor& parameter,
                                                   const NamedValues& options);
  Options (*options_from_values)(const NamedValues& values);
  // These options with another learning rate; `lr` left out: the one that they have.
  NamedValues (*with_rate)(const NamedValues& options, std::optional<double> lr);
  NamedValues (*state_to_values)(const torch::optim::OptimizerParamState& state);
  State (*state_from_values)(const NamedValues& values);
  void (*check_state_sizes)(const NamedValues& values, const at::Tensor& parameter);
  void (*move_state)(torch::optim::OptimizerParamState& state, c10::Device device);
  // Throws for a gradient that cannot be stepped by rows. Null where the optimizer steps all.
  void (*check_rows)(const at::Tensor& parameter, const at::Tensor& gradient);
  bool bumps_version;  // a step counts up the version of its parameter
};

namespace detail {
template <class Optimizer>
constexpr OptimizerType type_of() {
  OptimizerType type{
      .name = &optimizer_name<Optimizer>,
      .make = [](const at::Tensor& parameter,
                 const NamedValues& options) -> std::unique_ptr<torch::optim::Optimizer> {
        return std::make_unique<Optimizer>(std::vector<at::Tensor>{parameter},
                                           options_from_values<Optimizer>(options));
      },
      .options_from_values = [](const NamedValues& values) -> OptimizerType::Options {
        return std::make_unique<OptionsOf<Optimizer>>(options_from_values<Optimizer>(values));
      },
      .with_rate =
          [](const NamedValues& values, std::optional<double> lr) {
            auto options = options_from_values<Optimizer>(values);
            set_rate<Optimizer>(options, lr ? *lr : rate_of<Optimizer>(options));
            return options_to_values<Optimizer>(options);
          },
      .state_to_values = &state_to_values<Optimizer>,
      .state_from_values = &state_from_values<Optimizer>,
      .check_state_sizes = &check_state_sizes<Optimizer>,
      .move_state = &move_state<Optimizer>,
      .check_rows = nullptr,
      .bumps_version = true};
  if constexpr (requires { &Optimizer::check_rows; }) type.check_rows = &Optimizer::check_rows;
  if constexpr (requires { OptimizerTraits<Optimizer>::kBumpsVersion; })
    type.bumps_version = OptimizerTraits<Optimizer>::kBumpsVersion;
  return type;
}
}  // namespace detail

// That of an optimizer.
template <class Optimizer>
inline constexpr OptimizerType kOptimizerType = detail::type_of<Optimizer>();

}  // namespace stitch::optim
