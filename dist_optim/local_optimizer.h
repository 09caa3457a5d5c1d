#pragma once

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/dist_autograd/context.h"
#include "stitch/dist_optim/checkpoint.h"
#include "stitch/dist_optim/optimizer_traits.h"
#include "stitch/dist_optim/shadow_parameter.h"
#include "stitch/dist_optim/steps.h"
#include "stitch/rpc/calls.h"
#include "stitch/rref/rref.h"

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
  double scale = 1;  // of the gradients
  double rate = 1;   // of each group's learning rate
  template <class Archive>
  void serialize(Archive& archive) {
    archive(scale, rate);
  }
};

// The part of a DistributedOptimizer that lives on one owner of parameters: a torch::optim
// optimizer for each parameter, with the options of its group. Made and owned through an RRef. Its
// methods are called by other workers with named, typed values, which are checked before anything
// changes. Thread contract: any thread; a step holds one parameter's lock at a time.
template <class Optimizer>
class LocalOptimizer {
 public:
  // As add_groups().
  LocalOptimizer(std::vector<OwnersGroup> groups, StalePolicy policy) : policy_(policy) {
    add_groups(0, std::move(groups));
  }

  // Groups that follow the `number` there are. A tensor that a group has twice counts once, by its
  // first name. REQUIRES: this worker owns all of their parameters. Throws Error(invalid_argument),
  // having added nothing, naming one that is not a leaf, or a tensor that two groups have, which
  // would be stepped twice.
  void add_groups(std::uint64_t number, std::vector<OwnersGroup> groups) {
    base::MutexLock one_at_a_time(growing_);
    Entries all = *entries();
    std::unordered_map<const void*, const Entry*> seen;
    for (const auto& entry : all)
      seen.emplace(entry->shadow.parameter().unsafeGetTensorImpl(), entry.get());
    std::vector<Options> added;
    for (auto& group : groups) {
      const std::uint64_t place = number + added.size();
      added.push_back(options_from_values<Optimizer>(group.options));
      for (auto& [name, reference] : group.parameters) {
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
        auto entry =
            std::make_shared<Entry>(std::move(name), place, std::move(reference), tensor, policy_);
        entry->optimizer = std::make_unique<Optimizer>(
            std::vector<at::Tensor>{entry->shadow.shadow()}, added.back());
        seen.emplace(tensor.unsafeGetTensorImpl(), entry.get());
        all.push_back(std::move(entry));
      }
    }
    base::MutexLock lock(mutex_);
    if (options_.size() != number) {
      throw Error(ErrorCode::invalid_argument, "group " + std::to_string(number) +
                                                   " cannot be added: there are " +
                                                   std::to_string(options_.size()));
    }
    options_.insert(options_.end(), added.begin(), added.end());
    set_entries(std::move(all));
  }
  // Forgets the groups from `number` on, which another owner has refused.
  void drop_groups(std::uint64_t number) {
    base::MutexLock one_at_a_time(growing_);
    Entries left = *entries();
    std::erase_if(left, [&](const auto& entry) { return entry->group >= number; });
    base::MutexLock lock(mutex_);
    if (options_.size() > number) options_.erase(options_.begin() + number, options_.end());
    set_entries(std::move(left));
  }
  // For what looks at the gradients of several optimizers.
  RRef<OwnedParameters> owned() const { return make_rref(owned_); }

  // Steps every parameter that has a gradient in the context and returns their number. Throws the
  // error of the context when it has ended or failed, and Error(invalid_argument), before any step,
  // for a gradient of another shape than its parameter.
  std::int64_t step(const dist_autograd::ContextId& context, const StepOrder& order) {
    // None on a worker that the context never reached.
    const auto gradients = dist_autograd::find_usable_context(context);
    const auto entries = this->entries();
    std::vector<std::pair<Entry*, at::Tensor>> due;
    for (const auto& entry : *entries) {
      at::Tensor gradient =
          gradients ? gradients->stored_gradient(entry->shadow.parameter()) : at::Tensor();
      if (!gradient.defined()) continue;
      entry->shadow.check(gradient, entry->name);
      if constexpr (requires { Optimizer::check_rows(gradient, gradient); })
        Optimizer::check_rows(entry->shadow.parameter(), gradient);
      if (order.scale != 1) {
        const at::NoGradGuard no_grad;
        gradient = gradient * order.scale;
      }
      due.emplace_back(entry.get(), std::move(gradient));
    }
    fault_step();
    for (auto& [entry, gradient] : due) {
      base::MutexLock lock(entry->shadow.lock());
      entry->shadow.begin_step(gradient, entry->name);
      entry->multiply_rate(order.rate);
      struct End {
        ShadowParameter& shadow;
        ~End() { shadow.end_step(!bumps_version()); }
      } const end{entry->shadow};
      entry->optimizer->step();
    }
    return static_cast<std::int64_t>(due.size());
  }

  // All of the options of the groups from `first` on, from the next step on.
  void set_options(std::uint64_t first, const std::vector<NamedValues>& values) {
    apply_options(first, decode_options(values));
  }
  // Of each group.
  std::vector<NamedValues> options() const {
    base::MutexLock lock(mutex_);
    std::vector<NamedValues> all;
    for (const auto& each : options_) all.push_back(options_to_values<Optimizer>(each));
    return all;
  }

  // The names and shapes of the parameters, in order and without state.
  std::vector<SavedParameter> parameters() const {
    std::vector<SavedParameter> all;
    for (const auto& entry : *entries())
      all.push_back({entry->name, entry->shadow.parameter().sizes().vec(), std::nullopt});
    return all;
  }
  // A copy of the state of one of them, on the CPU.
  std::optional<NamedValues> state(std::uint64_t position) const {
    const auto entry = entry_at(position);
    base::MutexLock lock(entry->shadow.lock());
    const auto* const kept = parameter_state(*entry->optimizer);
    if (kept == nullptr) return std::nullopt;
    return state_to_values<Optimizer>(*kept);
  }

  // Loading, so that all owners change or none: stage() stores the new state of a parameter on its
  // device, commit() makes all of it current, discard() drops it. `load` is the load's id: what
  // another load staged is dropped.
  void stage(const std::string& load, std::uint64_t position,
             const std::optional<NamedValues>& values) {
    const auto entry = entry_at(position);
    if (values) check_state_sizes<Optimizer>(*values, entry->shadow.parameter());
    auto state = values ? state_from_values<Optimizer>(*values) : nullptr;
    if (state) move_state<Optimizer>(*state, device_of(*entry));
    base::MutexLock lock(mutex_);
    if (staged_.load != load) staged_ = {load, {}};
    staged_.states.insert_or_assign(position, std::move(state));
  }
  // `options`: of each group. Throws Error(cancelled), having changed nothing, when not every
  // parameter has been staged.
  void commit(const std::string& load, const std::vector<NamedValues>& options) {
    const auto decoded = decode_options(options);
    const auto entries = this->entries();
    Staged staged;
    {
      base::MutexLock lock(mutex_);
      if (staged_.load != load || staged_.states.size() != entries->size()) {
        throw Error(ErrorCode::cancelled,
                    "loading the optimizer's state ended: another load began meanwhile");
      }
      staged = std::exchange(staged_, {});
    }
    for (auto& [position, state] : staged.states) {  // nothing, unless a parameter has moved
      if (state) move_state<Optimizer>(*state, device_of(*entries->at(position)));
    }
    for (auto& [position, state] : staged.states) {
      Entry& entry = *entries->at(position);
      base::MutexLock lock(entry.shadow.lock());
      set_parameter_state(*entry.optimizer, entry.shadow.shadow(), std::move(state));
    }
    apply_options(0, decoded);
  }
  void discard(const std::string& load) {
    Staged forgotten;
    base::MutexLock lock(mutex_);
    if (staged_.load == load) forgotten = std::exchange(staged_, {});
  }

 private:
  using Options = OptionsOf<Optimizer>;
  using State = std::unique_ptr<torch::optim::OptimizerParamState>;
  struct Entry {
    Entry(std::string entry_name, std::uint64_t of_group, RRef<at::Tensor> held,
          const at::Tensor& tensor, StalePolicy policy)
        : name(std::move(entry_name)),
          group(of_group),
          reference(std::move(held)),
          shadow(tensor, policy) {}
    void set_options(const Options& options) {
      for (auto& each : optimizer->param_groups())
        each.set_options(std::make_unique<Options>(options));
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

    const std::string name;
    const std::uint64_t group;
    const RRef<at::Tensor> reference;  // keeps the parameter
    ShadowParameter shadow;
    std::unique_ptr<Optimizer> optimizer;
    // Guarded by the lock of the shadow: what the group's rate is multiplied by, and what it was
    // before that.
    double rate = 1, base_lr = 0;
  };
  using Entries = std::vector<std::shared_ptr<Entry>>;
  struct Staged {
    std::string load;
    std::unordered_map<std::uint64_t, State> states;  // by position
  };

  static constexpr bool bumps_version() {
    if constexpr (requires { OptimizerTraits<Optimizer>::kBumpsVersion; }) {
      return OptimizerTraits<Optimizer>::kBumpsVersion;
    } else {
      return true;
    }
  }
  static std::vector<Options> decode_options(const std::vector<NamedValues>& values) {
    std::vector<Options> decoded;
    for (const auto& each : values) decoded.push_back(options_from_values<Optimizer>(each));
    return decoded;
  }
  static c10::Device device_of(const Entry& entry) {
    base::MutexLock lock(entry.shadow.lock());
    return entry.shadow.shadow().device();
  }
  std::shared_ptr<const Entries> entries() const {
    base::MutexLock lock(mutex_);
    return entries_;
  }
  void set_entries(Entries entries) STITCH_REQUIRES(mutex_) {
    std::vector<at::Tensor> parameters;
    for (const auto& entry : entries) parameters.push_back(entry->shadow.parameter());
    owned_.set(std::move(parameters));
    entries_ = std::make_shared<const Entries>(std::move(entries));
  }
  std::shared_ptr<const Entry> entry_at(std::uint64_t position) const {
    const auto all = entries();
    if (position < all->size()) return (*all)[position];
    throw Error(ErrorCode::out_of_range, "parameter " + std::to_string(position) +
                                             " does not exist: this owner has " +
                                             std::to_string(all->size()));
  }
  void apply_options(std::uint64_t first, const std::vector<Options>& options) {
    std::shared_ptr<const Entries> entries;
    {
      base::MutexLock lock(mutex_);
      if (first > options_.size() || options.size() > options_.size() - first) {
        throw Error(ErrorCode::out_of_range, "group " + std::to_string(first + options.size() - 1) +
                                                 " does not exist: this optimizer has " +
                                                 std::to_string(options_.size()));
      }
      std::copy(options.begin(), options.end(), options_.begin() + first);
      entries = entries_;
    }
    for (const auto& entry : *entries) {
      if (entry->group < first || entry->group - first >= options.size()) continue;
      base::MutexLock lock(entry->shadow.lock());
      entry->set_options(options[entry->group - first]);
    }
  }

  const StalePolicy policy_;
  OwnedParameters owned_;
  base::Mutex growing_;        // before mutex_
  mutable base::Mutex mutex_;  // before that of owned_
  std::shared_ptr<const Entries> entries_ STITCH_GUARDED_BY(mutex_) =
      std::make_shared<const Entries>();                    // of all groups
  std::vector<Options> options_ STITCH_GUARDED_BY(mutex_);  // of each group
  Staged staged_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::optim
