#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/dist_autograd/context.h"
#include "stitch/dist_optim/checkpoint.h"
#include "stitch/dist_optim/local_optimizer.h"
#include "stitch/dist_optim/schedules.h"
#include "stitch/dist_optim/steps.h"
#include "stitch/rref/rref.h"

namespace stitch::optim {

// Steps parameters on the workers that own them: each owner has a LocalOptimizer<Optimizer> for its
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
      : state_(std::make_shared<State>(policy)) {
    if constexpr (requires { OptimizerTraits<Optimizer>::kRefused; }) {
      throw Error(ErrorCode::invalid_argument, std::string("optimizer cannot be distributed: ") +
                                                   OptimizerTraits<Optimizer>::kRefused);
    } else {
      add_groups(std::move(groups));
    }
  }
  // One group.
  DistributedOptimizer(ParameterList parameters, const Options& options,
                       StalePolicy policy = StalePolicy::detect)
      : DistributedOptimizer(std::vector<Group>{Group{std::move(parameters), options}}, policy) {}

  // Another group, behind the others, from the next step on. Waits; throws as the constructor, and
  // then nothing has changed.
  void add_group(Group group) { add_groups({std::move(group)}); }

  // Steps with the gradients of `context` and waits for all owners. Returns how many parameters had
  // a gradient and were stepped. Throws the first owner's error, counting the others. On devices of
  // this worker the steps come between what this thread's current streams have and what they are
  // given afterwards.
  std::int64_t step(const dist_autograd::ContextHandle& context) {
    return sum_of(get_when_stepped(start_steps(plan(context).plain())));
  }
  // The same, clipped or within a time.
  StepResult step(const dist_autograd::ContextHandle& context, const StepOptions& options) {
    return get_when_stepped(start_step(plan(context), options));
  }
  // The same without waiting. The context must not end before the future is ready: owners that
  // know of its end refuse to step. Once it is ready, the default streams come after the steps.
  [[nodiscard]] Future<std::int64_t> step_async(const dist_autograd::ContextHandle& context) {
    return start_steps(plan(context).plain()).then(&sum_of);
  }
  // The same, clipped or within a time.
  [[nodiscard]] Future<StepResult> step_async(const dist_autograd::ContextHandle& context,
                                              const StepOptions& options) {
    return start_step(plan(context), options);
  }
  // For these and backward_and_step(): what step() has each owner do, behind what `plan` has.
  void add_to(StepPlan& plan) const {
    const auto number = std::make_shared<StepNumber>(
        std::shared_ptr<std::atomic<std::int64_t>>(state_, &state_->next_step), schedule());
    if (!plan.number) plan.number = number;
    for (const auto& part : *parts()) {
      plan.owned.push_back(part.owned);
      plan.owners.emplace_back([optimizer = part.optimizer, context = plan.context, number](
                                   double scale, StepPlan::Timeout timeout) {
        return (timeout ? optimizer.with_timeout(*timeout) : optimizer)
            .template rpc_async<&Local::step>(context,
                                              StepOrder{.scale = scale, .rate = number->take()});
      });
    }
  }
  // For clip_grad_norm() and its like.
  [[nodiscard]] Owned owned() const override {
    Owned all;
    for (const auto& part : *parts()) all.push_back(part.owned);
    return all;
  }

  // New options of all groups, or of one, from the next step on. Waits. Throws Error(out_of_range)
  // for a group that there is not.
  void set_options(const Options& options) {
    set_all_options(0, std::vector(group_count(), options));
  }
  // Of one group.
  void set_options(std::size_t group, const Options& options) {
    set_all_options(checked(group), {options});
  }
  // A new learning rate of all groups, or of one; their other options stay. Waits. Throws
  // Error(invalid_argument) for options without get_lr() and set_lr().
  void set_lr(double lr) {
    auto options = all_options();
    for (auto& each : options) set_rate<Optimizer>(each, lr);
    set_all_options(0, options);
  }
  // Of one group.
  void set_lr(std::size_t group, double lr) {
    auto changed = options(group);
    set_rate<Optimizer>(changed, lr);
    set_options(group, changed);
  }
  // From the next step on the learning rates of all groups are multiplied by what `schedule`
  // returns for the number of the step; the rates of options() stay. It runs when a step begins,
  // must not call the optimizer, and ends the step by an exception. null: none. Waits. Throws as
  // set_lr().
  void set_schedule(Schedule schedule) {
    for (auto& each : all_options()) set_rate<Optimizer>(each, rate_of<Optimizer>(each));
    base::MutexLock lock(state_->mutex);
    state_->schedule.swap(schedule);
  }
  // The number of the next step: of those that were made, by way of load(), too.
  [[nodiscard]] std::int64_t next_step() const { return state_->next_step; }

  // The options that the parameters of a group are stepped with. Waits.
  [[nodiscard]] Options options(std::size_t group = 0) const {
    return all_options().at(checked(group));
  }

  // Writes the options and the state of all parameters (not the parameters) into `folder` on this
  // worker's file system, one file per owner (docs/checkpoints.md). An existing checkpoint stays
  // until the new one is complete and on the disk. Steps that run meanwhile are included for some
  // parameters only. Throws Error(invalid_argument) for a folder that cannot be written or is
  // another optimizer's.
  void save(const std::filesystem::path& folder) const;
  // Reads options and state back by the parameters' names, from whichever owners: all or nothing.
  // Steps must not run meanwhile. Throws Error(invalid_argument) naming the file and the parameter
  // when something is damaged, missing, or of another shape or another type of optimizer.
  void load(const std::filesystem::path& folder);

 private:
  using Local = LocalOptimizer<Optimizer>;
  [[nodiscard]] StepPlan plan(const dist_autograd::ContextHandle& context) const {
    context.throw_if_unusable();
    StepPlan plan{.context = context.id()};
    add_to(plan);
    return plan;
  }
  struct Part {
    WorkerInfo owner;
    RRef<Local> optimizer;
    RRef<OwnedParameters> owned;
  };
  using Parts = std::vector<Part>;  // one for each owner
  struct State {
    explicit State(StalePolicy stale_policy) : policy(stale_policy) {}
    const StalePolicy policy;
    mutable base::Mutex mutex;  // taken alone
    std::shared_ptr<const Parts> parts STITCH_GUARDED_BY(mutex) = std::make_shared<const Parts>();
    std::size_t groups STITCH_GUARDED_BY(mutex) = 0;
    std::unordered_set<std::string> names STITCH_GUARDED_BY(mutex);
    Schedule schedule STITCH_GUARDED_BY(mutex);
    std::atomic<std::int64_t> next_step{0};
  };
  // Where a parameter is stepped.
  struct Place {
    const Part* part;
    std::uint64_t position;
    std::vector<std::int64_t> sizes;
    bool found = false;
  };

  [[nodiscard]] std::shared_ptr<const Parts> parts() const {
    base::MutexLock lock(state_->mutex);
    return state_->parts;
  }
  [[nodiscard]] Schedule schedule() const {
    base::MutexLock lock(state_->mutex);
    return state_->schedule;
  }
  [[nodiscard]] std::size_t group_count() const {
    base::MutexLock lock(state_->mutex);
    return state_->groups;
  }
  [[nodiscard]] std::size_t checked(std::size_t group) const {
    if (const auto count = group_count(); group >= count) {
      throw Error(ErrorCode::out_of_range, "group " + std::to_string(group) +
                                               " does not exist: this optimizer has " +
                                               std::to_string(count));
    }
    return group;
  }
  void add_groups(std::vector<Group> groups);
  [[nodiscard]] std::vector<Options> all_options() const {
    std::vector<Options> all;
    for (const auto& each : parts()->front().optimizer.template rpc_sync<&Local::options>())
      all.push_back(options_from_values<Optimizer>(each));
    return all;
  }
  void set_all_options(std::uint64_t first, const std::vector<Options>& options) {
    std::vector<NamedValues> values;
    for (const auto& each : options) values.push_back(options_to_values<Optimizer>(each));
    when_all(on_all<&Local::set_options>(*parts(), first, values)).get();
  }
  template <auto Method, class... Arguments>
  static auto on_all(const Parts& parts, const Arguments&... arguments) {
    using Result = decltype(parts.front().optimizer.template rpc_async<Method>(arguments...));
    std::vector<Result> results;
    for (const auto& part : parts)
      results.push_back(part.optimizer.template rpc_async<Method>(arguments...));
    return results;
  }
  // The first error counts.
  template <auto Method, class... Arguments>
  static void undo(const Parts& parts, const Arguments&... arguments) {
    for (auto& undone : on_all<Method>(parts, arguments...))
      static_cast<void>(base::failure_of([&] { undone.get(); }));
  }

  std::shared_ptr<State> state_;
};

template <class Optimizer>
void DistributedOptimizer<Optimizer>::add_groups(std::vector<Group> groups) {
  std::unordered_set<std::string> names;
  std::uint64_t number = 0;
  {
    base::MutexLock lock(state_->mutex);
    names = state_->names;
    number = state_->groups;
  }
  // Each owner gets all groups, with their options, so that numbers are the same everywhere.
  const Parts before = *parts();
  std::vector<OwnersGroup> none;
  for (const auto& group : groups)
    none.push_back({{}, options_to_values<Optimizer>(group.options)});
  std::map<WorkerId, std::pair<WorkerInfo, std::vector<OwnersGroup>>> by_owner;
  for (const auto& part : before) by_owner[part.owner.id] = {part.owner, none};
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (auto& [given_name, parameter] : groups[i].parameters.parameters_) {
      const std::string name = given_name.empty() ? std::to_string(names.size()) : given_name;
      if (!names.insert(name).second) {
        throw Error(ErrorCode::invalid_argument,
                    "optimizer was given two parameters named \"" + name + '"');
      }
      auto& [owner, owned] =
          by_owner.try_emplace(parameter.owner().id, parameter.owner(), none).first->second;
      owned[i].parameters.emplace_back(name, parameter);
    }
  }
  if (names.empty())
    throw Error(ErrorCode::invalid_argument, "optimizer has no parameters to step");
  Parts after = before;
  std::vector<OwnersGroup> earlier;  // for owners that have none yet
  if (!before.empty() && by_owner.size() > before.size()) {
    for (const auto& each : all_options())
      earlier.push_back({{}, options_to_values<Optimizer>(each)});
  }
  std::vector<Future<void>> added;
  std::vector<Future<RRef<OwnedParameters>>> made;
  try {
    for (const auto& part : before) {
      added.push_back(part.optimizer.template rpc_async<&Local::add_groups>(
          number, by_owner.extract(part.owner.id).mapped().second));
    }
    for (auto& [id, owned] : by_owner) {
      auto& [owner, its] = owned;
      its.insert(its.begin(), earlier.begin(), earlier.end());
      after.push_back({owner, remote<Local>(owner, its, state_->policy), {}});
      made.push_back(after.back().optimizer.template rpc_async<&Local::owned>());
    }
    const auto owned = when_all(std::move(made)).get();
    std::transform(owned.begin(), owned.end(), after.begin() + before.size(),
                   after.begin() + before.size(), [](const auto& its, Part part) {
                     part.owned = its;
                     return part;
                   });
    when_all(added).get();
  } catch (...) {
    // What is still being added is dropped, too.
    for (const auto& each : added) static_cast<void>(base::failure_of([&] { each.get(); }));
    undo<&Local::drop_groups>(before, number);
    throw;
  }
  base::MutexLock lock(state_->mutex);
  state_->parts = std::make_shared<const Parts>(std::move(after));
  state_->groups += groups.size();
  state_->names = std::move(names);
}

template <class Optimizer>
void DistributedOptimizer<Optimizer>::save(const std::filesystem::path& folder) const {
  ShardHeader header;
  header.optimizer = optimizer_name<Optimizer>();
  header.save_id = new_save_id();
  const auto parts_kept = parts();
  const Parts& parts = *parts_kept;
  header.options = join_groups(parts.front().optimizer.template rpc_sync<&Local::options>());
  header.options.emplace(kStepName, std::int64_t{state_->next_step});
  for (const auto& part : parts) header.owners.push_back(part.owner.name);
  const auto parameters = when_all(on_all<&Local::parameters>(parts)).get();
  expect_folder_for(folder, header.optimizer, parameters);
  std::vector<std::unique_ptr<ShardWriter>> writers;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    header.owner = parts[i].owner.name;
    auto& writer =
        *writers.emplace_back(std::make_unique<ShardWriter>(folder, header, parameters[i].size()));
    // The state of one parameter at a time, the next one on its way while one is written.
    const auto fetch = [&](std::size_t position) {
      return parts[i].optimizer.template rpc_async<&Local::state>(position);
    };
    auto next = fetch(0);
    for (std::size_t position = 0; position < parameters[i].size(); ++position) {
      SavedParameter saved = parameters[i][position];
      saved.state = next.get();
      if (position + 1 < parameters[i].size()) next = fetch(position + 1);
      writer.add(saved);
    }
    writer.finish();
  }
  publish(folder, header.owners);
}

template <class Optimizer>
void DistributedOptimizer<Optimizer>::load(const std::filesystem::path& folder) {
  const std::string load_id = new_save_id();
  const auto parts_kept = parts();
  const Parts& parts = *parts_kept;
  std::map<std::string, Place> places;
  const auto parameters = when_all(on_all<&Local::parameters>(parts)).get();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (std::size_t position = 0; position < parameters[i].size(); ++position)
      places[parameters[i][position].name] = {&parts[i], position, parameters[i][position].sizes};
  }
  const auto place_of = [&](const std::filesystem::path& file, const SavedParameter& saved) {
    const auto place = places.find(saved.name);
    check_saved(file, saved, place == places.end() ? nullptr : &place->second.sizes);
    return place;
  };
  // Once to check everything, once to send it.
  const auto files = find_shards(folder);
  std::vector<NamedValues> saved_options;
  std::int64_t next_step = 0;
  for (const auto& file : files) {
    SavedParameter first;
    check_optimizer(file, read_shard_header(file, first), optimizer_name<Optimizer>());
    const ShardHeader header = read_shard(file, [&](const SavedParameter& saved) {
      if (saved.state) (void)state_from_values<Optimizer>(*saved.state);
      place_of(file, saved)->second.found = true;
    });
    NamedValues options = header.options;
    next_step = take_step(options);
    saved_options = split_groups(options);
    // Options of a program's own optimizer may have no fields.
    if (saved_options.empty()) saved_options.resize(group_count());
    check_groups(file, saved_options.size(), group_count());
    for (const auto& each : saved_options) (void)options_from_values<Optimizer>(each);
  }
  for (const auto& [name, place] : places) {
    if (!place.found) throw missing_parameter(folder, name);
  }
  try {
    for (const auto& file : files) {
      std::optional<Future<void>> last;
      read_shard(file, [&](const SavedParameter& saved) {
        const Place& place = place_of(file, saved)->second;
        auto staged = place.part->optimizer.template rpc_async<&Local::stage>(
            load_id, place.position, saved.state);
        if (last) last->get();
        last = std::move(staged);
      });
      if (last) last->get();
    }
  } catch (...) {
    undo<&Local::discard>(parts, load_id);
    throw;
  }
  when_all(on_all<&Local::commit>(parts, load_id, saved_options)).get();
  state_->next_step = next_step;
}

}  // namespace stitch::optim
