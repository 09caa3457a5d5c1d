#include "stitch/dist_optim/distributed_optimizer.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <optional>
#include <tuple>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/dist_optim/step_plan.h"
#include "stitch/dist_optim/stored_values.h"

namespace stitch::optim {

// Not without a name: g++ warns of the classes below then.
inline namespace parts_on_owners {

struct Part {
  WorkerInfo owner;
  RRef<LocalOptimizer> optimizer;
  RRef<OwnedParameters> owned;
};
using Parts = std::vector<Part>;  // one for each owner

// A life of an owner: one that comes back has none of the parameters that it had.
using Life = std::pair<WorkerId, std::uint64_t>;
Life life_of(const WorkerInfo& owner) { return {owner.id, owner.epoch}; }

// Where a parameter is stepped.
struct Place {
  std::uint64_t group = 0;
  Life owner;
};
// Throws Error(invalid_argument) for a name that there is not.
template <class Names>
auto& place_in(Names& names, const std::string& name) {
  const auto found = names.find(name);
  if (found == names.end())
    throw Error(ErrorCode::invalid_argument, "optimizer has no parameter named \"" + name + '"');
  return found->second;
}

// All groups, with the parameters of one owner.
struct OwnersGroups {
  OwnersGroups(WorkerInfo its_owner, const std::vector<NamedValues>& options)
      : owner(std::move(its_owner)) {
    for (const auto& each : options) groups.push_back({{}, each});
  }
  WorkerInfo owner;
  std::vector<OwnersGroup> groups;
};

template <auto Method, class... Arguments>
auto on_all(const Parts& parts, const Arguments&... arguments) {
  using Result = decltype(parts.front().optimizer.rpc_async<Method>(arguments...));
  std::vector<Result> results;
  for (const auto& part : parts) results.push_back(part.optimizer.rpc_async<Method>(arguments...));
  return results;
}
// The first error counts.
template <auto Method, class... Arguments>
void undo(const Parts& parts, const Arguments&... arguments) {
  for (auto& undone : on_all<Method>(parts, arguments...))
    static_cast<void>(base::failure_of([&] { undone.get(); }));
}

}  // namespace parts_on_owners

struct AnyOptimizer::State {
  State(const Kind& its_kind, StalePolicy stale_policy) : kind(its_kind), policy(stale_policy) {}
  [[nodiscard]] std::shared_ptr<const Parts> all_parts() {
    base::MutexLock lock(mutex);
    return parts;
  }
  // Copies of the options, the names and the parts.
  [[nodiscard]] std::tuple<std::vector<NamedValues>, std::map<std::string, Place>, Parts>
  members() {
    base::MutexLock lock(mutex);
    return {options, names, *parts};
  }
  // The number of a step of that context that has failed, or a new one.
  [[nodiscard]] std::shared_ptr<StepNumber> number_for(const dist_autograd::ContextId& context) {
    base::MutexLock lock(mutex);
    const auto found = std::find_if(unfinished.begin(), unfinished.end(),
                                    [&](const auto& each) { return each.first == context; });
    if (found == unfinished.end()) return std::make_shared<StepNumber>(counters, schedule);
    auto number = std::move(found->second);
    unfinished.erase(found);
    return number;
  }
  void keep(const dist_autograd::ContextId& context, const std::shared_ptr<StepNumber>& number) {
    if (!number->taken()) return;
    base::MutexLock lock(mutex);
    unfinished.emplace_back(context, number);
    if (unfinished.size() > kUnfinished) unfinished.pop_front();
  }
  // Parts of owners that have none yet.
  [[nodiscard]] Parts made_parts(const std::map<Life, OwnersGroups>& groups) const {
    Parts made;
    std::vector<Future<RRef<OwnedParameters>>> owned;
    for (const auto& [life, its] : groups) {
      made.push_back({its.owner, kind.make_part(its.owner, its.groups, policy), {}});
      owned.push_back(made.back().optimizer.rpc_async<&LocalOptimizer::owned>());
    }
    auto all = when_all(std::move(owned)).get();
    for (std::size_t i = 0; i < made.size(); ++i) made[i].owned = std::move(all[i]);
    return made;
  }

  const Kind kind;
  const StalePolicy policy;
  const std::shared_ptr<StepCounters> counters = std::make_shared<StepCounters>();
  base::Mutex mutex;  // taken alone
  std::shared_ptr<const Parts> parts STITCH_GUARDED_BY(mutex) = std::make_shared<const Parts>();
  std::vector<NamedValues> options STITCH_GUARDED_BY(mutex);  // of each group
  std::map<std::string, Place> names STITCH_GUARDED_BY(mutex);
  Schedule schedule STITCH_GUARDED_BY(mutex);
  static constexpr std::size_t kUnfinished = 256;
  std::deque<std::pair<dist_autograd::ContextId, std::shared_ptr<StepNumber>>> unfinished
      STITCH_GUARDED_BY(mutex);
};

AnyOptimizer::AnyOptimizer(const Kind& kind, StalePolicy policy)
    : state_(std::make_shared<State>(kind, policy)) {}

std::int64_t AnyOptimizer::step(const dist_autograd::ContextHandle& context) {
  return step(context, {}).stepped;
}
StepResult AnyOptimizer::step(const dist_autograd::ContextHandle& context,
                              const StepOptions& options) {
  check_options(options);
  return wait_for_step(start_step(plan(context), options));
}
Future<std::int64_t> AnyOptimizer::step_async(const dist_autograd::ContextHandle& context) {
  return start_step(plan(context), {}).then([](const StepOutcome& outcome) {
    return outcome.get().stepped;
  });
}
Future<StepResult> AnyOptimizer::step_async(const dist_autograd::ContextHandle& context,
                                            const StepOptions& options) {
  check_options(options);
  return start_step(plan(context), options).then([](const StepOutcome& outcome) {
    return outcome.get();
  });
}

StepPlan AnyOptimizer::plan(const dist_autograd::ContextHandle& context) const {
  context.throw_if_unusable();
  StepPlan plan{.context = context.id()};
  add_to(plan);
  return plan;
}

void AnyOptimizer::add_to(StepPlan& plan) const {
  const auto number = state_->number_for(plan.context);
  plan.numbers.push_back(number);
  struct Lent {
    ~Lent() { end(false); }
    void end(bool done) {
      if (!ended.exchange(true) && !done) state->keep(context, number);
    }
    const std::shared_ptr<State> state;
    const dist_autograd::ContextId context;
    const std::shared_ptr<StepNumber> number;
    std::atomic<bool> ended{false};
  };
  const std::shared_ptr<Lent> lent(new Lent{state_, plan.context, number});
  plan.ended.emplace_back([lent](bool done) { lent->end(done); });
  for (const auto& part : *state_->all_parts()) {
    plan.owned.push_back(part.owned);
    plan.parts.push_back({part.owner.name, [optimizer = part.optimizer, context = plan.context,
                                            number](double scale, StepPlan::Timeout timeout) {
                            return (timeout ? optimizer.with_timeout(*timeout) : optimizer)
                                .rpc_async<&LocalOptimizer::step>(context, number->take(scale));
                          }});
  }
}

Owned AnyOptimizer::owned() const {
  Owned all;
  for (const auto& part : *state_->all_parts()) all.push_back(part.owned);
  return all;
}

void AnyOptimizer::set_lr(double lr) {
  auto options = all_options();
  for (auto& each : options) each = state_->kind.type.with_rate(each, lr);
  set_all_options(0, options);
}
void AnyOptimizer::set_lr(std::size_t group, double lr) {
  set_all_options(checked(group), {state_->kind.type.with_rate(all_options().at(group), lr)});
}

void AnyOptimizer::set_schedule(Schedule schedule) {
  for (const auto& each : all_options())
    static_cast<void>(state_->kind.type.with_rate(each, std::nullopt));
  base::MutexLock lock(state_->mutex);
  state_->schedule.swap(schedule);
}

std::int64_t AnyOptimizer::next_step() const { return state_->counters->next_step; }

NamedValues AnyOptimizer::state(const std::string& name) const {
  Life owner;
  std::shared_ptr<const Parts> parts;
  {
    base::MutexLock lock(state_->mutex);
    owner = place_in(state_->names, name).owner;
    parts = state_->parts;
  }
  const auto part = std::find_if(parts->begin(), parts->end(),
                                 [&](const Part& each) { return life_of(each.owner) == owner; });
  return part->optimizer.rpc_sync<&LocalOptimizer::state_of>(name);
}

std::vector<NamedValues> AnyOptimizer::all_options() const {
  base::MutexLock lock(state_->mutex);
  return state_->options;
}

void AnyOptimizer::set_all_options(std::uint64_t first, const std::vector<NamedValues>& options) {
  when_all(on_all<&LocalOptimizer::set_options>(*state_->all_parts(), first, options)).get();
  base::MutexLock lock(state_->mutex);
  std::copy(options.begin(), options.end(),
            state_->options.begin() + static_cast<std::ptrdiff_t>(first));
}

std::size_t AnyOptimizer::group_count() const { return all_options().size(); }

std::size_t AnyOptimizer::checked(std::size_t group) const {
  if (const auto count = group_count(); group >= count) {
    throw Error(ErrorCode::out_of_range, "group " + std::to_string(group) +
                                             " does not exist: this optimizer has " +
                                             std::to_string(count));
  }
  return group;
}

void AnyOptimizer::add_groups(const std::vector<GroupValues>& groups) {
  std::vector<NamedValues> options;
  std::map<std::string, Place> names;
  Parts parts;
  std::tie(options, names, parts) = state_->members();
  const std::uint64_t number = options.size();
  for (const auto& group : groups) options.push_back(group.second);
  // Each owner gets all groups, with their options, so that numbers are the same everywhere.
  std::map<Life, OwnersGroups> by_owner;
  for (const auto& part : parts) by_owner.try_emplace(life_of(part.owner), part.owner, options);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (const auto& [given_name, parameter] : groups[i].first.named()) {
      const std::string name = given_name.empty() ? std::to_string(names.size()) : given_name;
      const Life life = life_of(parameter.owner());
      if (!names.try_emplace(name, Place{number + i, life}).second) {
        throw Error(ErrorCode::invalid_argument,
                    "optimizer was given two parameters named \"" + name + '"');
      }
      by_owner.try_emplace(life, parameter.owner(), options)
          .first->second.groups[number + i]
          .parameters.emplace_back(name, parameter);
    }
  }
  if (names.empty())
    throw Error(ErrorCode::invalid_argument, "optimizer has no parameters to step");
  std::vector<Future<void>> added;
  const Parts before = parts;
  try {
    for (const auto& part : before) {
      auto its = std::move(by_owner.extract(life_of(part.owner)).mapped().groups);
      its.erase(its.begin(), its.begin() + static_cast<std::ptrdiff_t>(number));
      added.push_back(part.optimizer.rpc_async<&LocalOptimizer::add_groups>(number, its));
    }
    for (auto& made : state_->made_parts(by_owner)) parts.push_back(std::move(made));
    when_all(added).get();
  } catch (...) {
    // What is still being added is dropped, too.
    for (const auto& each : added) static_cast<void>(base::failure_of([&] { each.get(); }));
    undo<&LocalOptimizer::drop_groups>(before, number);
    throw;
  }
  base::MutexLock lock(state_->mutex);
  state_->parts = std::make_shared<const Parts>(std::move(parts));
  state_->options = std::move(options);
  state_->names = std::move(names);
}

void AnyOptimizer::replace(const ParameterList& parameters) {
  std::vector<NamedValues> options;
  std::map<std::string, Place> names;
  Parts parts;
  std::tie(options, names, parts) = state_->members();
  std::map<Life, OwnersGroups> by_owner;
  std::vector<std::string> replaced;
  const auto& given = parameters.named();
  if (given.size() != names.size() &&
      std::any_of(given.begin(), given.end(), [](const auto& each) { return each.first.empty(); }))
    throw Error(ErrorCode::invalid_argument,
                "parameters without names can only be replaced all together: the optimizer has " +
                    std::to_string(names.size()) + ", given are " + std::to_string(given.size()));
  for (const auto& [given_name, parameter] : given) {
    const std::string name = given_name.empty() ? std::to_string(replaced.size()) : given_name;
    Place& place = place_in(names, name);
    if (std::find(replaced.begin(), replaced.end(), name) != replaced.end())
      throw Error(ErrorCode::invalid_argument, "parameter \"" + name + "\" is given twice");
    place.owner = life_of(parameter.owner());
    by_owner.try_emplace(place.owner, parameter.owner(), options)
        .first->second.groups[place.group]
        .parameters.emplace_back(name, parameter);
    replaced.push_back(name);
  }
  // Owners that have nothing any more, dead ones among them, are not asked.
  std::erase_if(parts, [&](const Part& part) {
    return std::none_of(names.begin(), names.end(),
                        [&](const auto& each) { return each.second.owner == life_of(part.owner); });
  });
  std::vector<Future<void>> changed;
  for (const auto& part : parts) {
    by_owner.try_emplace(life_of(part.owner), part.owner, options);
    auto its = std::move(by_owner.extract(life_of(part.owner)).mapped().groups);
    changed.push_back(part.optimizer.rpc_async<&LocalOptimizer::replace>(replaced, its));
  }
  for (auto& made : state_->made_parts(by_owner)) parts.push_back(std::move(made));
  when_all(changed).get();
  base::MutexLock lock(state_->mutex);
  state_->parts = std::make_shared<const Parts>(std::move(parts));
  state_->names = std::move(names);
}

rref::CheckpointPart AnyOptimizer::checkpoint_part() const {
  rref::CheckpointPart part;
  part.type = state_->kind.type.name();
  part.options = join_groups(all_options());
  part.options.insert_or_assign(kStepName, next_step());
  for (const auto& each : *state_->all_parts())
    part.owners.push_back(each.optimizer.remote<&LocalOptimizer::stored>());
  part.check = [state = state_, groups = group_count()](const CheckpointValues& options) {
    static_cast<void>(next_step_in(options));
    for (const auto& each : split_groups(options, groups))
      static_cast<void>(state->kind.type.options_from_values(each));
  };
  part.loaded = [state = state_](const CheckpointValues& options) {
    state->counters->next_step = next_step_in(options);
    base::MutexLock lock(state->mutex);
    state->options = split_groups(options, state->options.size());
    state->unfinished.clear();
  };
  return part;
}

namespace {

// A checkpoint of one part.
struct OnlyPart {
  [[nodiscard]] rref::CheckpointPart checkpoint_part() const {
    return optimizer->checkpoint_part();
  }
  const AnyOptimizer* optimizer;
};
Checkpoint checkpoint_of(const AnyOptimizer& optimizer, const std::filesystem::path& folder,
                         const std::string& name) {
  Checkpoint one(folder, {.name = name});
  one.add("optimizer", OnlyPart{&optimizer});
  return one;
}

}  // namespace

void AnyOptimizer::save(const std::filesystem::path& folder, const std::string& name) const {
  checkpoint_of(*this, folder, name).save();
}
void AnyOptimizer::load(const std::filesystem::path& folder, const std::string& name) {
  checkpoint_of(*this, folder, name).load();
}

}  // namespace stitch::optim
