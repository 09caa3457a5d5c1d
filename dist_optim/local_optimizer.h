#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/dist_autograd/graph/ids.h"
#include "stitch/dist_optim/optimizer_traits.h"
#include "stitch/dist_optim/steps.h"
#include "stitch/rref/rref.h"

namespace stitch::rref {
class OwnerPart;
}

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

// A group of parameters that are stepped with the same options, as one owner gets it: with those
// that it owns.
struct OwnersGroup {
  std::vector<NamedParameter> parameters;
  NamedValues options;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(parameters, options);
  }
};

// How one owner is to step.
struct StepOrder {
  std::uint64_t number = 0;  // of the order
  double scale = 1;          // of the gradients
  double rate = 1;           // of each group's learning rate
  template <class Archive>
  void serialize(Archive& archive) {
    archive(number, scale, rate);
  }
};

// The part of a DistributedOptimizer that lives on one owner of parameters: a torch::optim
// optimizer for each parameter, with the options of its group. Made and owned through an RRef. Its
// methods are called by other workers with named, typed values, which are checked before anything
// changes. Thread contract: any thread; a step holds one parameter's lock at a time.
class LocalOptimizer {
 public:
  // As add_groups(). `type` must outlive this.
  LocalOptimizer(const OptimizerType& type, std::vector<OwnersGroup> groups, StalePolicy policy);
  LocalOptimizer(LocalOptimizer&& other) noexcept;
  ~LocalOptimizer();

  // Groups that follow the `number` there are. A tensor that a group has twice counts once, by its
  // first name. REQUIRES: this worker owns all of their parameters. Throws Error(invalid_argument),
  // having added nothing, naming one that is not a leaf, or a tensor that two groups have, which
  // would be stepped twice.
  void add_groups(std::uint64_t number, std::vector<OwnersGroup> groups);
  // Forgets the groups from `number` on, which another owner has refused.
  void drop_groups(std::uint64_t number);
  // These parameters, of all groups there are, take the place of those with these names.
  void replace(const std::vector<std::string>& names, const std::vector<OwnersGroup>& groups);
  // For what looks at the gradients of several optimizers.
  RRef<OwnedParameters> owned() const;

  // Steps every parameter that has a gradient in the context and returns their number. Throws the
  // error of the context when it has ended or failed, and Error(invalid_argument), before any step,
  // for a gradient of another shape than its parameter. An order that is repeated has the outcome
  // that it had, unless that was an error before any parameter was changed.
  std::int64_t step(const dist_autograd::ContextId& context, const StepOrder& order);

  // All of the options of the groups from `first` on, from the next step on.
  void set_options(std::uint64_t first, const std::vector<NamedValues>& values);
  // Of each group.
  std::vector<NamedValues> options() const;

  // A copy of the state of one of them, on the CPU; empty when it was never stepped.
  std::optional<NamedValues> state(std::uint64_t position) const;
  // The same by name; empty when there is none.
  NamedValues state_of(const std::string& name) const;
  // The state of the parameters there are, and the options, for a checkpoint.
  rref::OwnerPart stored() const;

 private:
  struct Body;
  class Stored;
  std::shared_ptr<Body> body_;
};

// On an owner: its part of a DistributedOptimizer<Optimizer>.
template <class Optimizer>
LocalOptimizer make_local(std::vector<OwnersGroup> groups, StalePolicy policy) {
  return {kOptimizerType<Optimizer>, std::move(groups), policy};
}

}  // namespace stitch::optim
