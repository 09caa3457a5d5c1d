#include "stitch/dist_optim/distributed_optimizer.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <unordered_set>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/dist_optim/checkpoint.h"

namespace stitch::optim {

namespace {

struct Part {
  WorkerInfo owner;
  RRef<LocalOptimizer> optimizer;
  RRef<OwnedParameters> owned;
};
using Parts = std::vector<Part>;  // one for each owner

// Where a parameter is stepped.
struct Place {
  const Part* part;
  std::uint64_t position;
  std::vector<std::int64_t> sizes;
  bool found = false;
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

}  // namespace

struct AnyOptimizer::State {
  State(const Kind& its_kind, StalePolicy stale_policy) : kind(its_kind), policy(stale_policy) {}
  [[nodiscard]] std::shared_ptr<const Parts> all_parts() {
    base::MutexLock lock(mutex);
    return parts;
  }

  const Kind kind;
  const StalePolicy policy;
  base::Mutex mutex;  // taken alone
  std::shared_ptr<const Parts> parts STITCH_GUARDED_BY(mutex) = std::make_shared<const Parts>();
  std::size_t groups STITCH_GUARDED_BY(mutex) = 0;
  std::unordered_set<std::string> names STITCH_GUARDED_BY(mutex);
  Schedule schedule STITCH_GUARDED_BY(mutex);
  std::atomic<std::int64_t> next_step{0};
};

AnyOptimizer::AnyOptimizer(const Kind& kind, StalePolicy policy)
    : state_(std::make_shared<State>(kind, policy)) {}

std::int64_t AnyOptimizer::step(const dist_autograd::ContextHandle& context) {
  return sum_of(get_when_stepped(start_steps(plan(context).plain())));
}
StepResult AnyOptimizer::step(const dist_autograd::ContextHandle& context,
                              const StepOptions& options) {
  return get_when_stepped(start_step(plan(context), options));
}
Future<std::int64_t> AnyOptimizer::step_async(const dist_autograd::ContextHandle& context) {
  return start_steps(plan(context).plain()).then(&sum_of);
}
Future<StepResult> AnyOptimizer::step_async(const dist_autograd::ContextHandle& context,
                                            const StepOptions& options) {
  return start_step(plan(context), options);
}

StepPlan AnyOptimizer::plan(const dist_autograd::ContextHandle& context) const {
  context.throw_if_unusable();
  StepPlan plan{.context = context.id()};
  add_to(plan);
  return plan;
}

void AnyOptimizer::add_to(StepPlan& plan) const {
  Schedule schedule;
  {
    base::MutexLock lock(state_->mutex);
    schedule = state_->schedule;
  }
  const auto number = std::make_shared<StepNumber>(
      std::shared_ptr<std::atomic<std::int64_t>>(state_, &state_->next_step), std::move(schedule));
  if (!plan.number) plan.number = number;
  for (const auto& part : *state_->all_parts()) {
    plan.owned.push_back(part.owned);
    plan.owners.emplace_back([optimizer = part.optimizer, context = plan.context, number](
                                 double scale, StepPlan::Timeout timeout) {
      return (timeout ? optimizer.with_timeout(*timeout) : optimizer)
          .rpc_async<&LocalOptimizer::step>(context,
                                            StepOrder{.scale = scale, .rate = number->take()});
    });
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

std::int64_t AnyOptimizer::next_step() const { return state_->next_step; }

std::vector<NamedValues> AnyOptimizer::all_options() const {
  return state_->all_parts()->front().optimizer.rpc_sync<&LocalOptimizer::options>();
}

void AnyOptimizer::set_all_options(std::uint64_t first, const std::vector<NamedValues>& options) {
  when_all(on_all<&LocalOptimizer::set_options>(*state_->all_parts(), first, options)).get();
}

std::size_t AnyOptimizer::group_count() const {
  base::MutexLock lock(state_->mutex);
  return state_->groups;
}

std::size_t AnyOptimizer::checked(std::size_t group) const {
  if (const auto count = group_count(); group >= count) {
    throw Error(ErrorCode::out_of_range, "group " + std::to_string(group) +
                                             " does not exist: this optimizer has " +
                                             std::to_string(count));
  }
  return group;
}

void AnyOptimizer::add_groups(const std::vector<GroupValues>& groups) {
  std::unordered_set<std::string> names;
  std::uint64_t number = 0;
  {
    base::MutexLock lock(state_->mutex);
    names = state_->names;
    number = state_->groups;
  }
  // Each owner gets all groups, with their options, so that numbers are the same everywhere.
  const Parts before = *state_->all_parts();
  std::vector<OwnersGroup> none;
  for (const auto& [parameters, options] : groups) none.push_back({{}, options});
  std::map<WorkerId, std::pair<WorkerInfo, std::vector<OwnersGroup>>> by_owner;
  for (const auto& part : before) by_owner[part.owner.id] = {part.owner, none};
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (const auto& [given_name, parameter] : groups[i].first.named()) {
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
    for (auto& each : all_options()) earlier.push_back({{}, std::move(each)});
  }
  std::vector<Future<void>> added;
  std::vector<Future<RRef<OwnedParameters>>> made;
  try {
    for (const auto& part : before) {
      added.push_back(part.optimizer.rpc_async<&LocalOptimizer::add_groups>(
          number, by_owner.extract(part.owner.id).mapped().second));
    }
    for (auto& [id, owned] : by_owner) {
      auto& [owner, its] = owned;
      its.insert(its.begin(), earlier.begin(), earlier.end());
      after.push_back({owner, state_->kind.make_part(owner, its, state_->policy), {}});
      made.push_back(after.back().optimizer.rpc_async<&LocalOptimizer::owned>());
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
    undo<&LocalOptimizer::drop_groups>(before, number);
    throw;
  }
  base::MutexLock lock(state_->mutex);
  state_->parts = std::make_shared<const Parts>(std::move(after));
  state_->groups += groups.size();
  state_->names = std::move(names);
}

void AnyOptimizer::save(const std::filesystem::path& folder) const {
  ShardHeader header;
  header.optimizer = state_->kind.type.name();
  header.save_id = new_save_id();
  const auto parts_kept = state_->all_parts();
  const Parts& parts = *parts_kept;
  header.options = join_groups(parts.front().optimizer.rpc_sync<&LocalOptimizer::options>());
  header.options.emplace(kStepName, std::int64_t{state_->next_step});
  for (const auto& part : parts) header.owners.push_back(part.owner.name);
  const auto parameters = when_all(on_all<&LocalOptimizer::parameters>(parts)).get();
  expect_folder_for(folder, header.optimizer, parameters);
  std::vector<std::unique_ptr<ShardWriter>> writers;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    header.owner = parts[i].owner.name;
    auto& writer =
        *writers.emplace_back(std::make_unique<ShardWriter>(folder, header, parameters[i].size()));
    // The state of one parameter at a time, the next one on its way while one is written.
    const auto fetch = [&](std::size_t position) {
      return parts[i].optimizer.rpc_async<&LocalOptimizer::state>(position);
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

void AnyOptimizer::load(const std::filesystem::path& folder) {
  const std::string load_id = new_save_id();
  const auto parts_kept = state_->all_parts();
  const Parts& parts = *parts_kept;
  std::map<std::string, Place> places;
  const auto parameters = when_all(on_all<&LocalOptimizer::parameters>(parts)).get();
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
    check_optimizer(file, read_shard_header(file, first), state_->kind.type.name());
    const ShardHeader header = read_shard(file, [&](const SavedParameter& saved) {
      if (saved.state) (void)state_->kind.type.state_from_values(*saved.state);
      place_of(file, saved)->second.found = true;
    });
    NamedValues options = header.options;
    next_step = take_step(options);
    saved_options = split_groups(options);
    // Options of a program's own optimizer may have no fields.
    if (saved_options.empty()) saved_options.resize(group_count());
    check_groups(file, saved_options.size(), group_count());
    for (const auto& each : saved_options) (void)state_->kind.type.options_from_values(each);
  }
  for (const auto& [name, place] : places) {
    if (!place.found) throw missing_parameter(folder, name);
  }
  try {
    for (const auto& file : files) {
      std::optional<Future<void>> last;
      read_shard(file, [&](const SavedParameter& saved) {
        const Place& place = place_of(file, saved)->second;
        auto staged = place.part->optimizer.rpc_async<&LocalOptimizer::stage>(
            load_id, place.position, saved.state);
        if (last) last->get();
        last = std::move(staged);
      });
      if (last) last->get();
    }
  } catch (...) {
    undo<&LocalOptimizer::discard>(parts, load_id);
    throw;
  }
  when_all(on_all<&LocalOptimizer::commit>(parts, load_id, saved_options)).get();
  state_->next_step = next_step;
}

}  // namespace stitch::optim
