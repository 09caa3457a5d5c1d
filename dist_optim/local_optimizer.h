#pragma once

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
#include "stitch/rpc/calls.h"
#include "stitch/rref/rref.h"

namespace stitch::optim {

// A parameter with the name of its state in checkpoints.
using NamedParameter = std::pair<std::string, RRef<at::Tensor>>;

// The part of a DistributedOptimizer that lives on one owner of parameters: a torch::optim
// optimizer for each parameter. Made and owned through an RRef. Its methods are called by other
// workers with named, typed values, which are checked before anything changes. Thread contract:
// any thread; a step holds one parameter's lock at a time.
template <class Optimizer>
class LocalOptimizer {
 public:
  // REQUIRES: this worker owns all of `parameters`. Throws Error(invalid_argument) naming the one
  // that is not a leaf, or two that are the same tensor, which would be stepped twice.
  LocalOptimizer(std::vector<NamedParameter> parameters, NamedValues options, StalePolicy policy)
      : options_(options_from_values<Optimizer>(options)) {
    std::unordered_map<const void*, const Entry*> seen;
    for (auto& [name, reference] : parameters) {
      const at::Tensor& tensor = reference.local_value();
      if (!tensor.defined() || !tensor.is_leaf()) {
        throw Error(ErrorCode::invalid_argument,
                    reference.describe() + " (\"" + name +
                        "\") is not a parameter: it must be a leaf tensor");
      }
      auto entry = std::make_unique<Entry>(std::move(name), std::move(reference), tensor, policy);
      entry->optimizer =
          std::make_unique<Optimizer>(std::vector<at::Tensor>{entry->shadow.shadow()}, options_);
      const auto [other, is_new] = seen.emplace(tensor.unsafeGetTensorImpl(), entry.get());
      if (!is_new) {
        throw Error(ErrorCode::invalid_argument,
                    "optimizer was given one tensor as two parameters, \"" + other->second->name +
                        "\" and \"" + entry->name + "\": every step would change it twice");
      }
      entries_.push_back(std::move(entry));
    }
  }

  // Steps every parameter that has a gradient in the context and returns their number. Throws the
  // error of the context when it has ended or failed, and Error(invalid_argument), before any step,
  // for a gradient of another shape than its parameter.
  std::int64_t step(const dist_autograd::ContextId& context) {
    // None on a worker that the context never reached.
    const auto gradients = dist_autograd::find_usable_context(context);
    std::vector<std::pair<Entry*, at::Tensor>> due;
    for (const auto& entry : entries_) {
      at::Tensor gradient =
          gradients ? gradients->stored_gradient(entry->shadow.parameter()) : at::Tensor();
      if (!gradient.defined()) continue;
      entry->shadow.check(gradient, entry->name);
      if constexpr (requires { Optimizer::check_rows(gradient, gradient); })
        Optimizer::check_rows(entry->shadow.parameter(), gradient);
      due.emplace_back(entry.get(), std::move(gradient));
    }
    fault_step();
    for (auto& [entry, gradient] : due) {
      base::MutexLock lock(entry->shadow.lock());
      entry->shadow.begin_step(gradient, entry->name);
      struct End {
        ShadowParameter& shadow;
        ~End() { shadow.end_step(!bumps_version()); }
      } const end{entry->shadow};
      entry->optimizer->step();
    }
    return static_cast<std::int64_t>(due.size());
  }

  // All of the options, for all parameters, from the next step on.
  void set_options(const NamedValues& values) {
    apply_options(options_from_values<Optimizer>(values));
  }
  NamedValues options() const {
    base::MutexLock lock(mutex_);
    return options_to_values<Optimizer>(options_);
  }

  // The names and shapes of the parameters, in order and without state.
  std::vector<SavedParameter> parameters() const {
    std::vector<SavedParameter> all;
    for (const auto& entry : entries_)
      all.push_back({entry->name, entry->shadow.parameter().sizes().vec(), std::nullopt});
    return all;
  }
  // A copy of the state of one of them, on the CPU.
  std::optional<NamedValues> state(std::uint64_t position) const {
    const Entry& entry = entry_at(position);
    base::MutexLock lock(entry.shadow.lock());
    const auto* const kept = parameter_state(*entry.optimizer);
    if (kept == nullptr) return std::nullopt;
    return state_to_values<Optimizer>(*kept);
  }

  // Loading, so that all owners change or none: stage() stores the new state of a parameter on its
  // device, commit() makes all of it current, discard() drops it. `load` is the load's id: what
  // another load staged is dropped.
  void stage(const std::string& load, std::uint64_t position,
             const std::optional<NamedValues>& values) {
    const Entry& entry = entry_at(position);
    if (values) check_state_sizes<Optimizer>(*values, entry.shadow.parameter());
    auto state = values ? state_from_values<Optimizer>(*values) : nullptr;
    if (state) move_state<Optimizer>(*state, device_at(position));
    base::MutexLock lock(mutex_);
    if (staged_.load != load) staged_ = {load, {}};
    staged_.states.insert_or_assign(position, std::move(state));
  }
  // Throws Error(cancelled), having changed nothing, when not every parameter has been staged.
  void commit(const std::string& load, const NamedValues& options) {
    const OptionsOf<Optimizer> decoded = options_from_values<Optimizer>(options);
    Staged staged;
    {
      base::MutexLock lock(mutex_);
      if (staged_.load != load || staged_.states.size() != entries_.size()) {
        throw Error(ErrorCode::cancelled,
                    "loading the optimizer's state ended: another load began meanwhile");
      }
      staged = std::exchange(staged_, {});
    }
    for (auto& [position, state] : staged.states) {  // nothing, unless a parameter has moved
      if (state) move_state<Optimizer>(*state, device_at(position));
    }
    for (auto& [position, state] : staged.states) {
      Entry& entry = *entries_[position];
      base::MutexLock lock(entry.shadow.lock());
      set_parameter_state(*entry.optimizer, entry.shadow.shadow(), std::move(state));
    }
    apply_options(decoded);
  }
  void discard(const std::string& load) {
    Staged forgotten;
    base::MutexLock lock(mutex_);
    if (staged_.load == load) forgotten = std::exchange(staged_, {});
  }

 private:
  using State = std::unique_ptr<torch::optim::OptimizerParamState>;
  struct Entry {
    Entry(std::string entry_name, RRef<at::Tensor> held, const at::Tensor& tensor,
          StalePolicy policy)
        : name(std::move(entry_name)), reference(std::move(held)), shadow(tensor, policy) {}
    const std::string name;
    const RRef<at::Tensor> reference;  // keeps the parameter
    ShadowParameter shadow;
    std::unique_ptr<Optimizer> optimizer;
  };
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
  const Entry& entry_at(std::uint64_t position) const {
    if (position >= entries_.size()) {
      throw Error(ErrorCode::out_of_range, "parameter " + std::to_string(position) +
                                               " does not exist: this owner has " +
                                               std::to_string(entries_.size()));
    }
    return *entries_[position];
  }
  c10::Device device_at(std::uint64_t position) {
    Entry& entry = *entries_[position];
    base::MutexLock lock(entry.shadow.lock());
    return entry.shadow.shadow().device();
  }
  void apply_options(const OptionsOf<Optimizer>& options) {
    {
      base::MutexLock lock(mutex_);
      options_ = options;
    }
    for (const auto& entry : entries_) {
      base::MutexLock lock(entry->shadow.lock());
      for (auto& group : entry->optimizer->param_groups())
        group.set_options(std::make_unique<OptionsOf<Optimizer>>(options));
    }
  }

  std::vector<std::unique_ptr<Entry>> entries_;  // constant after construction
  mutable base::Mutex mutex_;                    // taken alone
  OptionsOf<Optimizer> options_ STITCH_GUARDED_BY(mutex_);
  Staged staged_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::optim
