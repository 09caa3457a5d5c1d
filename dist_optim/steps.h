#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/dist_autograd/context.h"
#include "stitch/dist_optim/schedules.h"
#include "stitch/rref/rref.h"

namespace stitch::optim {

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

// The parameters that an optimizer has on one owner, for what looks at those of several optimizers
// at once. Lives there. Copies are the same. Thread contract: any thread.
class OwnedParameters {
 public:
  // Replaces them.
  void set(std::vector<at::Tensor> parameters) {
    base::MutexLock lock(shared_->mutex);
    shared_->parameters.swap(parameters);
  }
  // A copy of the list.
  [[nodiscard]] std::vector<at::Tensor> get() const {
    base::MutexLock lock(shared_->mutex);
    return shared_->parameters;
  }

 private:
  struct Shared {
    base::Mutex mutex;  // taken alone
    std::vector<at::Tensor> parameters STITCH_GUARDED_BY(mutex);
  };
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

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

// For the steps: the norm that clip_grad_norm() returns.
[[nodiscard]] Future<double> gradient_norm(const dist_autograd::ContextId& context,
                                           const Owned& owned,
                                           std::optional<std::chrono::nanoseconds> timeout);
// What they are multiplied by.
[[nodiscard]] double clip_factor(double norm, double max_norm);
// Throws Error(invalid_argument) for one below 0.
void check_limit(const char* what, double limit);

// What a step does beside stepping.
struct StepOptions {
  // Steps with gradients that are scaled as by clip_grad_norm(), those in the context stay: a wave
  // of messages more. A norm that is infinite or NaN steps nothing.
  std::optional<double> max_norm{};
  // For all of it; none: Options::rpc_timeout for each wave of messages.
  std::optional<std::chrono::nanoseconds> timeout{};
};
// What it has done.
struct StepResult {
  std::int64_t stepped = 0;  // parameters that had a gradient, on all owners
  bool skipped = false;      // nothing was stepped, because of the norm
  double norm = 0;           // of the gradients, before they were scaled; 0 without max_norm
  std::int64_t step = 0;     // its number: the first one that was not skipped is 0
};

// Has one owner step its parameters with the gradients of one context: the number of them.
using OwnersStep = std::function<Future<std::int64_t>()>;

// Starts all of them. Their results, or the first error, counting the others; when one cannot be
// started, neither are those after it, and its error, when those before it have ended, says how
// many parameters they stepped.
[[nodiscard]] Future<std::vector<std::int64_t>> start_steps(const std::vector<OwnersStep>& steps);
namespace detail {
inline std::atomic<bool> said_no_gradient{false};  // in this process
}
// How many parameters all owners together have stepped. For none it says so on stderr, once.
[[nodiscard]] std::int64_t sum_of(const std::vector<std::int64_t>& stepped);

// The number of one step of an optimizer: the next one when the first owner begins. Thread
// contract: one thread at a time.
class StepNumber {
 public:
  // That of the step that takes it from `next`.
  StepNumber(std::shared_ptr<std::atomic<std::int64_t>> next, Schedule schedule)
      : next_(std::move(next)), schedule_(std::move(schedule)) {}
  // What the schedule says of it. Throws Error(invalid_argument) for a rate that no step can have;
  // the number is not taken then.
  double take() {
    for (std::int64_t number = next_->load(); !taken_;) {
      if (schedule_) rate_ = checked_rate(schedule_(number), number);
      if (next_->compare_exchange_weak(number, number + 1)) taken_ = number;
    }
    return rate_;
  }
  // Itself, or the one that would be taken.
  [[nodiscard]] std::int64_t get() const { return taken_ ? *taken_ : next_->load(); }

 private:
  const std::shared_ptr<std::atomic<std::int64_t>> next_;
  const Schedule schedule_;
  std::optional<std::int64_t> taken_;
  double rate_ = 1;
};

// One step of one or several optimizers with the gradients of one context.
struct StepPlan {
  using Timeout = std::optional<std::chrono::nanoseconds>;  // of a call
  dist_autograd::ContextId context;                         // whose gradients
  std::shared_ptr<StepNumber> number{};                     // of the first optimizer
  Owned owned{};                                            // by all of them
  // One for each owner, with what its gradients are scaled by.
  std::vector<std::function<Future<std::int64_t>(double scale, Timeout timeout)>> owners{};

  // Each with its gradients as they are.
  [[nodiscard]] std::vector<OwnersStep> plain() const { return scaled(1, std::nullopt); }
  // Each with its gradients scaled.
  [[nodiscard]] std::vector<OwnersStep> scaled(double scale, Timeout timeout) const;
  // All of it, as one. It is written to `result` before the future is ready.
  [[nodiscard]] OwnersStep together(const StepOptions& options,
                                    std::shared_ptr<StepResult> result) const;
};
// Throws Error(invalid_argument) for options out of their range.
[[nodiscard]] Future<StepResult> start_step(const StepPlan& plan, const StepOptions& options);
// Wait. This thread's current streams then run after the steps of its own worker.
[[nodiscard]] std::vector<std::int64_t> get_when_stepped(
    const Future<std::vector<std::int64_t>>& stepped);
[[nodiscard]] StepResult get_when_stepped(const Future<StepResult>& stepped);

// What backward_and_step() of backward_and_step.h does.
std::vector<std::int64_t> backward_and_steps(const dist_autograd::ContextHandle& context,
                                             std::vector<at::Tensor> losses,
                                             const dist_autograd::Options& options,
                                             std::vector<OwnersStep> steps);
// What backward_and_step_async() does.
[[nodiscard]] Future<std::vector<std::int64_t>> backward_and_steps_async(
    const dist_autograd::ContextHandle& context, std::vector<at::Tensor> losses,
    const dist_autograd::Options& options, std::vector<OwnersStep> steps);

}  // namespace stitch::optim
