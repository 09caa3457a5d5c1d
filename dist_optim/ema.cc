#include "stitch/dist_optim/ema.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <map>
#include <string>
#include <unordered_set>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/dist_optim/named_values.h"
#include "stitch/dist_optim/shadow_parameter.h"
#include "stitch/rpc/calls.h"

namespace stitch::optim {

namespace detail {

// The averages of one owner. Thread contract: any thread.
class OwnersAverages {
 public:
  explicit OwnersAverages(const std::vector<NamedParameter>& parameters) {
    const at::NoGradGuard no_grad;
    std::unordered_set<const void*> seen;
    for (const auto& [name, reference] : parameters) {
      const at::Tensor& parameter = reference.local_value();
      if (!parameter.defined() || !parameter.is_floating_point()) {
        throw Error(ErrorCode::invalid_argument,
                    reference.describe() + " (\"" + name +
                        "\") cannot be averaged: it is no tensor of a floating-point type");
      }
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      const auto lock = parameter_lock(parameter);
      base::MutexLock locked(*lock);
      averaged_.push_back({name,
                           reference,
                           parameter.detach().to(state_type(parameter), false, /*copy=*/true),
                           {}});
    }
  }

  void update(double decay) {
    const at::NoGradGuard no_grad;
    base::MutexLock lock(mutex_);
    if (swapped_) {
      throw Error(ErrorCode::invalid_argument,
                  "averages cannot be updated: the parameters have their values until swap()");
    }
    for (auto& each : averaged_) {
      const at::Tensor& parameter = each.parameter.local_value();
      const auto of_parameter = parameter_lock(parameter);
      base::MutexLock locked(*of_parameter);
      each.average.lerp_(parameter.detach().to(each.average.scalar_type()), 1 - decay);
    }
  }
  // The values of parameters become those of their averages, or their own.
  void swap(bool to_averages) {
    const at::NoGradGuard no_grad;
    base::MutexLock lock(mutex_);
    if (swapped_ == to_averages) return;
    for (auto& each : averaged_) {
      const at::Tensor values = each.parameter.local_value().data();  // its version stays
      const auto of_parameter = parameter_lock(each.parameter.local_value());
      base::MutexLock locked(*of_parameter);
      if (to_averages && !each.own.defined()) each.own = values.clone();
      values.copy_(to_averages ? each.average : each.own);
    }
    if (!to_averages)
      for (auto& each : averaged_) each.own = at::Tensor();
    swapped_ = to_averages;
  }
  std::vector<NamedParameter> averages() const {
    std::vector<NamedParameter> all;
    for (const auto& each : averaged_) all.emplace_back(each.name, make_rref(each.average));
    return all;
  }

 private:
  struct Averaged {
    std::string name;
    RRef<at::Tensor> parameter;  // keeps it
    at::Tensor average;
    at::Tensor own;  // the parameter's values while it has others
  };
  base::Mutex mutex_;  // before those of parameters
  std::vector<Averaged> averaged_;
  bool swapped_ STITCH_GUARDED_BY(mutex_) = false;
};

}  // namespace detail

struct Ema::State {
  double decay;
  std::vector<RRef<detail::OwnersAverages>> owners{};
  bool swapped = false;
};

namespace {
template <auto Method, class... Arguments>
auto on_all(const std::vector<RRef<detail::OwnersAverages>>& owners,
            const Arguments&... arguments) {
  std::vector<decltype(owners.front().template rpc_async<Method>(arguments...))> results;
  for (const auto& owner : owners)
    results.push_back(owner.template rpc_async<Method>(arguments...));
  return when_all(std::move(results));
}
}  // namespace

Ema::Ema(const std::vector<NamedParameter>& parameters, double decay)
    : state_(std::make_shared<State>(State{decay})) {
  if (!(decay >= 0 && decay <= 1)) {
    throw Error(ErrorCode::invalid_argument,
                "decay of " + std::to_string(decay) + " is refused: it must be between 0 and 1");
  }
  std::map<WorkerId, std::vector<NamedParameter>> by_owner;
  for (const auto& each : parameters) by_owner[each.second.owner().id].push_back(each);
  for (const auto& [owner, owned] : by_owner)
    state_->owners.push_back(remote<detail::OwnersAverages>(owner, owned));
  static_cast<void>(averages());
}

void Ema::update() { on_all<&detail::OwnersAverages::update>(state_->owners, state_->decay).get(); }

void Ema::swap() {
  state_->swapped = !state_->swapped;
  on_all<&detail::OwnersAverages::swap>(state_->owners, state_->swapped).get();
}

std::vector<NamedParameter> Ema::averages() const {
  std::vector<NamedParameter> all;
  for (auto& owned : on_all<&detail::OwnersAverages::averages>(state_->owners).get())
    all.insert(all.end(), owned.begin(), owned.end());
  return all;
}

}  // namespace stitch::optim
