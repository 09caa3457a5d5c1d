#pragma once

#include <ATen/core/Tensor.h>
#include <memory>
#include "stitch/base/mutex.h"

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/dist_autograd/context.h"
#include "stitch/rref/rref.h"

namespace stitch::optim {

// What a step does about a forward pass that saved the old parameter and has not run backward yet.
enum class StalePolicy : unsigned char {
  detect,  // that backward throws ("modified by an inplace operation"). A step waits for nodes that
           // have read the parameter and still compute with it
  allow,   // that backward uses the new values: asynchronous training on shared parameters
};

// A parameter with the name of its state in checkpoints.
using NamedParameter = std::pair<std::string, RRef<at::Tensor>>;

// References to parameters, perhaps with the names of their state in checkpoints, as
// RemoteModule::named_parameters() has them: so it survives another order and other owners.
// Without, their names are their positions in the optimizer. Implicit, as a braced list, too.
class ParameterList {
 public:
  // None.
  ParameterList() = default;
  // By position.
  ParameterList(const std::vector<RRef<at::Tensor>>& parameters) {  // NOLINT: a list
    for (const auto& parameter : parameters) parameters_.emplace_back("", parameter);
  }
  // The same.
  ParameterList(std::initializer_list<RRef<at::Tensor>> parameters)
      : ParameterList(std::vector<RRef<at::Tensor>>(parameters)) {}
  // By name.
  ParameterList(std::vector<NamedParameter> parameters)  // NOLINT: a list
      : parameters_(std::move(parameters)) {}
  // The same.
  ParameterList(std::initializer_list<NamedParameter> parameters) : parameters_(parameters) {}
  // Those without a name have an empty one.
  [[nodiscard]] const std::vector<NamedParameter>& named() const { return parameters_; }

 private:
  std::vector<NamedParameter> parameters_;
};

class OwnedParameters;  // step_plan.h
// What optimizers have on their owners.
using Owned = std::vector<RRef<OwnedParameters>>;

class AnyOptimizer;  // distributed_optimizer.h
// `{&adam, &sgd}`.
using Optimizers = std::vector<const AnyOptimizer*>;

// As torch::nn::utils::clip_grad_norm_ over the parameters of these optimizers on all workers, each
// counted once: scales their gradients in the context so that their 2-norm is at most `max_norm`,
// and returns the norm they had. A sparse gradient counts with its rows combined. A norm that is
// infinite or NaN is returned, and nothing is scaled. Waits. Throws as
// ContextHandle::scale_gradients(), and Error(invalid_argument) for a `max_norm` below 0. Thread
// contract: any thread; no pass and no step of the context may run.
double clip_grad_norm(const dist_autograd::ContextHandle& context, const Optimizers& optimizers,
                      double max_norm);
// As torch::nn::utils::clip_grad_value_: limits each element to -limit .. limit. A sparse gradient
// has its rows combined first. Otherwise as clip_grad_norm().
void clip_grad_value(const dist_autograd::ContextHandle& context, const Optimizers& optimizers,
                     double limit);

class GradScaler;  // grad_scaler.h
struct StepPlan;   // step_plan.h

// What a step does beside stepping: a wave of messages more, unless there is only a timeout.
struct StepOptions {
  // Steps with gradients that are scaled as by clip_grad_norm(), those in the context stay. A norm
  // that is infinite or NaN steps nothing.
  std::optional<double> max_norm{};
  // Divides gradients by its factor, before they are clipped. Where they have inf or NaN on any
  // owner, nothing is stepped. Must live until the step begins.
  const GradScaler* scaler = nullptr;
  // Steps nothing where a parameter has been stepped more often than that since the context first
  // reached its owner. For StalePolicy::allow; at most 255.
  std::optional<std::int64_t> max_staleness{};
  // For all of it; none: Options::rpc_timeout for each wave of messages.
  std::optional<std::chrono::nanoseconds> timeout{};
};
// What it has done.
struct StepResult {
  std::int64_t stepped = 0;    // parameters that had a gradient, on all owners
  bool skipped = false;        // nothing was stepped, because of the norm or the staleness
  double norm = 0;             // of the gradients, unscaled; 0 without max_norm and scaler
  std::int64_t step = 0;       // its number: the first one that was not skipped is 0
  std::int64_t staleness = 0;  // steps of a parameter meanwhile, at most; 0 without max_staleness
};

// rref::parameter_lock().
[[nodiscard]] std::shared_ptr<base::Mutex> parameter_lock(const at::Tensor& parameter);

}  // namespace stitch::optim
