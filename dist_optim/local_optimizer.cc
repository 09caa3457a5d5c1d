#include "stitch/dist_optim/local_optimizer.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/dist_autograd/context.h"
#include "stitch/dist_optim/shadow_parameter.h"
#include "stitch/dist_optim/step_plan.h"
#include "stitch/dist_optim/stored_values.h"
#include "stitch/rpc/calls.h"

namespace stitch::optim {

// Not without a name: g++ warns of the class below then.
inline namespace entries_of_owners {

using OptimizerOptions = torch::optim::OptimizerOptions;

struct Entry {
  Entry(std::string entry_name, std::uint64_t of_group, RRef<at::Tensor> held,
        const at::Tensor& tensor, StalePolicy policy, bool steps_rows)
      : name(std::move(entry_name)),
        group(of_group),
        reference(std::move(held)),
        shadow(tensor, policy, steps_rows) {}
  void set_options(const OptimizerOptions& options) {
    for (auto& each : optimizer->param_groups()) each.set_options(options.clone());
    rate = 1;
  }
  void multiply_rate(double by) {
    if (by == rate) return;
    for (auto& each : optimizer->param_groups()) {
      if (rate == 1) base_lr = each.options().get_lr();
      each.options().set_lr(base_lr * by);
    }
    rate = by;
  }
  // Null when there is none yet.
  [[nodiscard]] const torch::optim::OptimizerParamState* state() const {
    const auto& states = optimizer->state();
    return states.empty() ? nullptr : states.begin()->second.get();
  }
  // null removes it.
  void set_state(OptimizerType::State state) {
    auto& states = optimizer->state();
    states.clear();
    if (state) states[state_key(*optimizer, shadow.shadow())] = std::move(state);
  }
  const std::string name;
  const std::uint64_t group;
  const RRef<at::Tensor> reference;  // keeps the parameter
  ShadowParameter shadow;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  // Guarded by the lock of the shadow: what the group's rate is multiplied by, and what it was
  // before that.
  double rate = 1, base_lr = 0;
};
using Entries = std::vector<std::shared_ptr<Entry>>;

constexpr std::uint64_t kOutcomesKept = 256;

}  // namespace entries_of_owners

struct LocalOptimizer::Body {
  Body(const OptimizerType& of_type, StalePolicy stale_policy)
      : type(of_type), policy(stale_policy) {}

  [[nodiscard]] std::shared_ptr<const Entries> all_entries() {
    base::MutexLock lock(mutex);
    return entries;
  }
  void set_entries(Entries all) STITCH_REQUIRES(mutex) {
    std::vector<at::Tensor> parameters;
    for (const auto& entry : all) parameters.push_back(entry->shadow.parameter());
    owned.set(std::move(parameters));
    entries = std::make_shared<const Entries>(std::move(all));
  }
  // Adds those of groups that follow the `number` there are to `all`.
  void add(std::uint64_t number, Entries all, const std::vector<OwnersGroup>& groups)
      STITCH_REQUIRES(mutex) {
    std::unordered_map<const void*, const Entry*> seen;
    for (const auto& entry : all)
      seen.emplace(entry->shadow.parameter().unsafeGetTensorImpl(), entry.get());
    for (const auto& group : groups) {
      const std::uint64_t place = number++;
      static_cast<void>(type.options_from_values(group.options));
      for (const auto& [name, reference] : group.parameters) {
        const at::Tensor& tensor = reference.local_value();
        if (!tensor.defined() || !tensor.is_leaf()) {
          throw Error(ErrorCode::invalid_argument,
                      reference.describe() + " (\"" + name +
                          "\") is not a parameter: it must be a leaf tensor");
        }
        if (const auto other = seen.find(tensor.unsafeGetTensorImpl()); other != seen.end()) {
          if (other->second->group == place) continue;
          throw Error(ErrorCode::invalid_argument,
                      "optimizer was given one tensor as parameter \"" + other->second->name +
                          "\" of group " + std::to_string(other->second->group) + " and \"" + name +
                          "\" of group " + std::to_string(place) +
                          ": every step would change it twice");
        }
        auto entry = std::make_shared<Entry>(name, place, reference, tensor, policy,
                                             type.check_rows != nullptr);
        entry->optimizer = type.make(entry->shadow.shadow(), group.options);
        seen.emplace(tensor.unsafeGetTensorImpl(), entry.get());
        all.push_back(std::move(entry));
      }
    }
    set_entries(std::move(all));
  }
  [[nodiscard]] std::shared_ptr<Entry> entry_at(std::uint64_t position) {
    const auto all = all_entries();
    if (position < all->size()) return (*all)[position];
    throw Error(ErrorCode::out_of_range, "parameter " + std::to_string(position) +
                                             " does not exist: this owner has " +
                                             std::to_string(all->size()));
  }
  // `changed`: parameters may have been.
  std::int64_t step(const dist_autograd::ContextId& context, const StepOrder& order,
                    bool& changed) {
    // None on a worker that the context never reached.
    const auto gradients = dist_autograd::find_usable_context(context);
    const auto all = all_entries();
    std::vector<std::pair<Entry*, at::Tensor>> due;
    for (const auto& entry : *all) {
      at::Tensor gradient =
          gradients ? gradients->stored_gradient(entry->shadow.parameter()) : at::Tensor();
      if (!gradient.defined()) continue;
      entry->shadow.check(gradient, entry->name);
      if (type.check_rows) type.check_rows(entry->shadow.parameter(), gradient);
      due.emplace_back(entry.get(), std::move(gradient));
    }
    fault_step();
    for (auto& [entry, gradient] : due) {
      base::MutexLock lock(entry->shadow.lock());
      // The trainer may have died meanwhile, and its next life may have loaded the parameter.
      gradients->throw_if_unusable();
      entry->multiply_rate(order.rate);
      entry->shadow.begin_step(std::move(gradient), order.scale, entry->name);
      changed = true;
      std::exception_ptr failure;
      try {
        entry->optimizer->step();
      } catch (...) {
        failure = std::current_exception();
      }
      entry->shadow.end_step(!type.bumps_version);
      if (failure) std::rethrow_exception(failure);
    }
    return static_cast<std::int64_t>(due.size());
  }
  // Checks values of options.
  [[nodiscard]] std::vector<std::unique_ptr<OptimizerOptions>> decoded(
      const std::vector<NamedValues>& values) const {
    std::vector<std::unique_ptr<OptimizerOptions>> all;
    for (const auto& each : values) all.push_back(type.options_from_values(each));
    return all;
  }
  void apply_options(std::uint64_t first, const std::vector<NamedValues>& values) {
    const auto given = decoded(values);
    std::shared_ptr<const Entries> all;
    {
      base::MutexLock lock(mutex);
      if (first > options.size() || values.size() > options.size() - first) {
        throw Error(ErrorCode::out_of_range, "group " + std::to_string(first + values.size() - 1) +
                                                 " does not exist: this optimizer has " +
                                                 std::to_string(options.size()));
      }
      std::copy(values.begin(), values.end(), options.begin() + static_cast<std::ptrdiff_t>(first));
      all = entries;
    }
    for (const auto& entry : *all) {
      if (entry->group < first || entry->group - first >= given.size()) continue;
      base::MutexLock lock(entry->shadow.lock());
      entry->set_options(*given[entry->group - first]);
    }
  }

  const OptimizerType& type;
  const StalePolicy policy;
  OwnedParameters owned;
  base::Mutex mutex;  // before that of owned
  std::shared_ptr<const Entries> entries STITCH_GUARDED_BY(mutex) =
      std::make_shared<const Entries>();                      // of all groups
  std::vector<NamedValues> options STITCH_GUARDED_BY(mutex);  // of each group, checked
  // Of the last orders, by their numbers.
  std::map<std::uint64_t, Future<std::int64_t>> outcomes STITCH_GUARDED_BY(mutex);
};

LocalOptimizer::LocalOptimizer(const OptimizerType& type, std::vector<OwnersGroup> groups,
                               StalePolicy policy)
    : body_(std::make_shared<Body>(type, policy)) {
  add_groups(0, std::move(groups));
}
LocalOptimizer::LocalOptimizer(LocalOptimizer&&) noexcept = default;
LocalOptimizer::~LocalOptimizer() = default;

void LocalOptimizer::add_groups(std::uint64_t number, std::vector<OwnersGroup> groups) {
  base::MutexLock lock(body_->mutex);
  auto& options = body_->options;
  if (options.size() != number) {
    throw Error(ErrorCode::invalid_argument, "group " + std::to_string(number) +
                                                 " cannot be added: there are " +
                                                 std::to_string(options.size()));
  }
  body_->add(number, *body_->entries, groups);
  for (auto& group : groups) options.push_back(std::move(group.options));
}

void LocalOptimizer::drop_groups(std::uint64_t number) {
  base::MutexLock lock(body_->mutex);
  Entries left = *body_->entries;
  std::erase_if(left, [&](const auto& entry) { return entry->group >= number; });
  if (body_->options.size() > number) body_->options.resize(number);
  body_->set_entries(std::move(left));
}

void LocalOptimizer::replace(const std::vector<std::string>& names,
                             const std::vector<OwnersGroup>& groups) {
  base::MutexLock lock(body_->mutex);
  Entries left = *body_->entries;
  std::erase_if(left, [&](const auto& entry) {
    return std::find(names.begin(), names.end(), entry->name) != names.end();
  });
  body_->add(0, std::move(left), groups);
}

RRef<OwnedParameters> LocalOptimizer::owned() const { return make_rref(body_->owned); }

// A repeated order has the outcome of the first, without a look at the context, which may have
// ended.
std::int64_t LocalOptimizer::step(const dist_autograd::ContextId& context, const StepOrder& order) {
  const Promise<std::int64_t> promise;
  Future<std::int64_t> outcome;
  bool first = false;
  {
    base::MutexLock lock(body_->mutex);
    auto& outcomes = body_->outcomes;
    if (!outcomes.empty() && order.number < outcomes.rbegin()->first &&
        outcomes.rbegin()->first - order.number >= kOutcomesKept)
      throw Error(ErrorCode::out_of_range,
                  "a step is too old to be asked for again: its owner keeps the outcomes of the "
                  "last " +
                      std::to_string(kOutcomesKept));
    const auto [place, added] = outcomes.try_emplace(order.number, promise.future());
    outcome = place->second;
    first = added;
    while (outcomes.rbegin()->first - outcomes.begin()->first >= kOutcomesKept)
      outcomes.erase(outcomes.begin());
  }
  if (!first) return outcome.get();
  bool changed = false;
  try {
    promise.set_value(body_->step(context, order, changed));
  } catch (...) {
    if (!changed) {
      base::MutexLock lock(body_->mutex);
      body_->outcomes.erase(order.number);
    }
    promise.set_exception(std::current_exception());
  }
  return outcome.get();
}

void LocalOptimizer::set_options(std::uint64_t first, const std::vector<NamedValues>& values) {
  body_->apply_options(first, values);
}

std::vector<NamedValues> LocalOptimizer::options() const {
  base::MutexLock lock(body_->mutex);
  return body_->options;
}

std::optional<NamedValues> LocalOptimizer::state(std::uint64_t position) const {
  const auto entry = body_->entry_at(position);
  base::MutexLock lock(entry->shadow.lock());
  const auto* const kept = entry->state();
  NamedValues values = kept ? body_->type.state_to_values(*kept) : NamedValues();
  if (const at::Tensor master = entry->shadow.master(); master.defined())
    values.emplace(kMasterName, master);
  if (values.empty()) return std::nullopt;
  for (auto& [name, value] : values) {
    if (auto* const tensor = std::get_if<at::Tensor>(&value))
      *tensor = tensor->to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
  }
  return values;
}

NamedValues LocalOptimizer::state_of(const std::string& name) const {
  const auto all = body_->all_entries();
  const auto found = std::find_if(all->begin(), all->end(),
                                  [&](const auto& entry) { return entry->name == name; });
  if (found == all->end()) return {};
  return state(static_cast<std::uint64_t>(found - all->begin())).value_or(NamedValues());
}

class LocalOptimizer::Stored final : public rref::StoredObject {
 public:
  explicit Stored(std::shared_ptr<Body> body)
      : body_(std::move(body)), entries_(body_->all_entries()) {}
  std::vector<std::pair<std::string, at::Tensor>> parameters() const override {
    std::vector<std::pair<std::string, at::Tensor>> all;
    for (const auto& entry : *entries_) all.emplace_back(entry->name, entry->shadow.parameter());
    return all;
  }
  Fields stored(std::size_t parameter) const override {
    const Entry& entry = *(*entries_)[parameter];
    const auto* const state = entry.state();
    Fields fields = state ? to_fields(body_->type.state_to_values(*state)) : Fields();
    if (const at::Tensor master = entry.shadow.master(); master.defined())
      fields.emplace(kMasterName, master);
    return fields;
  }
  void check(std::size_t parameter, const std::vector<rref::StoredTensor>& tensors) const override {
    const at::Tensor& shadow = (*entries_)[parameter]->shadow.shadow();
    NamedValues values = blank_values(tensors, shadow);
    if (const auto master = values.extract(kMasterName))
      check_state_tensor(kMasterName, master.mapped(), shadow, shadow.sizes());
    if (values.empty()) return;
    const auto state = body_->type.state_from_values(values);
    body_->type.check_state_sizes(body_->type.state_to_values(*state), shadow);
  }
  void exchange(std::size_t parameter, Fields& fields) override {
    Entry& entry = *(*entries_)[parameter];
    Fields former = stored(parameter);
    const auto master = fields.extract(kMasterName);
    OptimizerType::State state;
    if (!fields.empty()) {
      state = body_->type.state_from_values(from_fields(fields, entry.shadow.parameter()));
      body_->type.move_state(*state, entry.shadow.shadow().device());
    }
    if (const auto kept = former.find(kMasterName); kept != former.end()) {
      kept->second = kept->second.clone();
      if (master) entry.shadow.set_master(master.mapped());
    }
    entry.set_state(std::move(state));
    fields = std::move(former);
  }
  void exchange_options(CheckpointValues& options) override {
    std::vector<NamedValues> former;
    {
      base::MutexLock lock(body_->mutex);
      former = body_->options;
    }
    body_->apply_options(0, split_groups(options, former.size()));
    options = join_groups(former);
  }

 private:
  const std::shared_ptr<Body> body_;
  const std::shared_ptr<const Entries> entries_;
};

rref::OwnerPart LocalOptimizer::stored() const {
  return rref::OwnerPart(std::make_shared<Stored>(body_));
}

}  // namespace stitch::optim
