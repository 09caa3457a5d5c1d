#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stitch/dist_autograd/context.h"
#include "stitch/dist_optim/grad_scaler.h"  // IWYU pragma: export
#include "stitch/dist_optim/local_optimizer.h"
#include "stitch/dist_optim/schedules.h"
#include "stitch/dist_optim/steps.h"
#include "stitch/rref/checkpoint.h"
#include "stitch/rref/rref.h"

namespace stitch::optim {

// A DistributedOptimizer, which see, of whatever type. Thread contract: any thread; groups are
// added by one at a time.
class AnyOptimizer {
 public:
  // Steps with the gradients of `context` and waits for all owners. Returns how many parameters had
  // a gradient and were stepped. Throws the first owner's error, counting the others and naming the
  // owners that had stepped, that failed and that have not answered. On devices of this worker the
  // steps come between what this thread's current streams have and what they are given afterwards.
  //
  // A step that failed may be asked for again with the same context: it is the same step, which
  // each owner takes once, and goes on with those that had not taken it. After a success, a step
  // with the context is a new one. A trainer that is restarted begins with the number that load()
  // restores.
  std::int64_t step(const dist_autograd::ContextHandle& context);
  // The same with options.
  StepResult step(const dist_autograd::ContextHandle& context, const StepOptions& options);
  // The same without waiting. The context must not end before the future is ready: owners that
  // know of its end refuse to step. Once it is ready, the default streams come after the steps.
  [[nodiscard]] Future<std::int64_t> step_async(const dist_autograd::ContextHandle& context);
  // The same with options.
  [[nodiscard]] Future<StepResult> step_async(const dist_autograd::ContextHandle& context,
                                              const StepOptions& options);
  // For these and backward_and_step(): what step() has each owner do, behind what `plan` has.
  void add_to(StepPlan& plan) const;
  // For clip_grad_norm() and its like.
  [[nodiscard]] Owned owned() const;

  // A new learning rate of all groups, or of one; their other options stay. Waits. Throws
  // Error(invalid_argument) for options without get_lr() and set_lr().
  void set_lr(double lr);
  // Of one group.
  void set_lr(std::size_t group, double lr);
  // From the next step on the learning rates of all groups are multiplied by what `schedule`
  // returns for the number of the step; the rates of options() stay. It runs when a step begins,
  // must not call the optimizer, and ends the step by an exception. null: none. Waits. Throws as
  // set_lr().
  void set_schedule(Schedule schedule);
  // The number of the next step: of those that were made, by way of load(), too.
  [[nodiscard]] std::int64_t next_step() const;
  // A copy of the state of a parameter, for looking; empty before its first step. Waits. Throws
  // Error(invalid_argument) for a name that there is not.
  [[nodiscard]] NamedValues state(const std::string& name) const;
  // These parameters, for example on other owners after the death of one, take the place of those
  // with their names (without: with their positions). Their state begins anew, and load() brings it
  // back; all else stays. Waits. Throws as add_group(); then it is to be called again.
  void replace(const ParameterList& parameters);

  // Writes options and state of all parameters (not the parameters) into `folder`, a checkpoint of
  // one part (Checkpoint::save()). Throws for the name of another optimizer's checkpoint.
  void save(const std::filesystem::path& folder, const std::string& name = "optimizer") const;
  // Reads them back by the parameters' names, all or none, as Checkpoint::load(), and the number of
  // the next step.
  void load(const std::filesystem::path& folder, const std::string& name = "optimizer");
  // For Checkpoint::add(). Waits.
  [[nodiscard]] rref::CheckpointPart checkpoint_part() const;

 protected:
  using GroupValues = std::pair<ParameterList, NamedValues>;  // a group and its options
  // The type of an optimizer.
  struct Kind {
    const OptimizerType& type;  // its functions
    // Makes a part on an owner.
    RRef<LocalOptimizer> (*make_part)(const WorkerInfo& owner,
                                      const std::vector<OwnersGroup>& groups, StalePolicy policy);
  };
  // Without groups.
  AnyOptimizer(const Kind& kind, StalePolicy policy);
  AnyOptimizer(const AnyOptimizer&) = default;
  AnyOptimizer& operator=(const AnyOptimizer&) = default;
  ~AnyOptimizer() = default;

  // As DistributedOptimizer::add_group(), for several.
  void add_groups(const std::vector<GroupValues>& groups);
  // Of each group.
  [[nodiscard]] std::vector<NamedValues> all_options() const;
  // Of all groups from `first` on.
  void set_all_options(std::uint64_t first, const std::vector<NamedValues>& options);
  // The number of groups.
  [[nodiscard]] std::size_t group_count() const;
  // Throws Error(out_of_range) for a group that there is not.
  [[nodiscard]] std::size_t checked(std::size_t group) const;

 private:
  struct State;
  [[nodiscard]] StepPlan plan(const dist_autograd::ContextHandle& context) const;

  std::shared_ptr<State> state_;
};

// Steps parameters on the workers that own them: each owner has a LocalOptimizer for its
// share, and step() has all of them step with one context's gradients, in parallel. The
// math and the state are torch::optim's; `.grad` is never touched. A parameter without a gradient
// in the context (for example a frozen one) is not changed. Steps of different contexts,
// from any workers, are serialized per parameter only. A step is not one transaction: when an
// owner fails, others have stepped. Belongs to the worker that made it; copies are the same
// optimizer, and the end of the last one frees the parts on the owners. Thread contract: any
// thread; groups are added by one at a time.
template <class Optimizer>
class DistributedOptimizer final : public AnyOptimizer {
 public:
  using Options = OptionsOf<Optimizer>;  // torch::optim::AdamOptions, say
  // Parameters that are stepped with the same options.
  struct Group {
    ParameterList parameters;  // of any owners
    Options options;           // theirs
  };

  // Makes the parts on the owners and waits for them. Throws Error(invalid_argument) for no
  // parameters, two of one name, or an optimizer that cannot work this way, and remote_exception
  // for what an owner refuses: a tensor that is no leaf, or one that two groups have. One that a
  // group has twice (tied weights) is stepped once, its state by the first name.
  explicit DistributedOptimizer(std::vector<Group> groups, StalePolicy policy = StalePolicy::detect)
      : AnyOptimizer(kind(), policy) {
    if constexpr (kAccepted) {
      std::vector<GroupValues> values;
      for (auto& each : groups)
        values.emplace_back(std::move(each.parameters), options_to_values<Optimizer>(each.options));
      add_groups(values);
    }
  }
  // One group.
  DistributedOptimizer(ParameterList parameters, const Options& options,
                       StalePolicy policy = StalePolicy::detect)
      : DistributedOptimizer(std::vector<Group>{Group{std::move(parameters), options}}, policy) {}

  // Another group, behind the others, from the next step on. Waits; throws as the constructor, and
  // then nothing has changed.
  void add_group(Group group) {
    add_groups({{std::move(group.parameters), options_to_values<Optimizer>(group.options)}});
  }

  // New options of all groups, or of one, from the next step on. Waits. Throws Error(out_of_range)
  // for a group that there is not.
  void set_options(const Options& options) {
    set_all_options(0, std::vector(group_count(), options_to_values<Optimizer>(options)));
  }
  // Of one group.
  void set_options(std::size_t group, const Options& options) {
    set_all_options(checked(group), {options_to_values<Optimizer>(options)});
  }
  // The options that the parameters of a group are stepped with. Waits.
  [[nodiscard]] Options options(std::size_t group = 0) const {
    return options_from_values<Optimizer>(all_options().at(checked(group)));
  }

 private:
  static constexpr bool kAccepted = !requires { OptimizerTraits<Optimizer>::kRefused; };
  static Kind kind() {
    if constexpr (kAccepted) {
      return {kOptimizerType<Optimizer>,
              [](const WorkerInfo& owner, const auto& groups, StalePolicy policy) {
                return remote<make_local<Optimizer>>(owner, groups, policy);
              }};
    } else {
      throw Error(ErrorCode::invalid_argument, std::string("optimizer cannot be distributed: ") +
                                                   OptimizerTraits<Optimizer>::kRefused);
    }
  }
};

}  // namespace stitch::optim
