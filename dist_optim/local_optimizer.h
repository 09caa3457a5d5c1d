#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/dist_autograd/graph/ids.h"
#include "stitch/dist_optim/optimizer_type.h"
#include "stitch/dist_optim/parameter_lock.h"
#include "stitch/dist_optim/steps.h"
#include "stitch/rref/rref.h"

namespace stitch::rref {
class OwnerPart;
}

namespace stitch::optim {

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
