#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/dist_autograd/context.h"
#include "stitch/dist_optim/local_optimizer.h"
#include "stitch/dist_optim/schedules.h"
#include "stitch/dist_optim/steps.h"

namespace stitch::optim {

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

// How many steps an optimizer has made.
struct StepCounters {
  std::atomic<std::int64_t> next_step{0};  // restored by load()
  std::atomic<std::uint64_t> orders{0};    // never the same twice
};

// One step of one optimizer: what its owners are ordered to do, the same when the step is asked for
// again. Thread contract: one thread at a time.
class StepNumber {
 public:
  // The next one of `counters`.
  StepNumber(std::shared_ptr<StepCounters> counters, Schedule schedule)
      : counters_(std::move(counters)), schedule_(std::move(schedule)) {}
  // The order; the first call decides it. Throws Error(invalid_argument) for a rate that no step
  // can have, having decided nothing.
  const StepOrder& take(double scale) {
    for (std::int64_t number = get(); !order_;) {
      const double rate = schedule_ ? checked_rate(schedule_(number), number) : 1;
      if (number == INT64_MAX) throw Error(ErrorCode::out_of_range, "steps have no more numbers");
      if (!counters_->next_step.compare_exchange_weak(number, number + 1)) continue;
      step_ = number;
      order_ = {.number = counters_->orders++, .scale = scale, .rate = rate};
    }
    return *order_;
  }
  [[nodiscard]] bool taken() const { return order_.has_value(); }
  // Itself, or the one that would be taken.
  [[nodiscard]] std::int64_t get() const { return order_ ? step_ : counters_->next_step.load(); }

 private:
  const std::shared_ptr<StepCounters> counters_;
  const Schedule schedule_;
  std::optional<StepOrder> order_;
  std::int64_t step_ = 0;
};

// One step of one or several optimizers with the gradients of one context.
struct StepPlan {
  using Timeout = std::optional<std::chrono::nanoseconds>;  // of a call
  // One owner's part of one optimizer.
  struct Part {
    std::string owner;
    // Has it step with gradients that are multiplied by `scale`, or as it was ordered before.
    std::function<Future<std::int64_t>(double scale, Timeout timeout)> begin;
  };
  dist_autograd::ContextId context;  // whose gradients
  Owned owned{};                     // by all of them
  std::vector<Part> parts{};
  std::vector<std::shared_ptr<StepNumber>> numbers{};  // one for each optimizer
  // Called when the step has ended: a number that is not `done` is kept for the next attempt, as it
  // is when the plan goes without a call.
  std::vector<std::function<void(bool done)>> ended{};

  void end(bool done) const {
    for (const auto& each : ended) each(done);
  }
};

// How a step has ended.
struct StepOutcome {
  StepResult result;
  std::optional<Error> failure;  // the first one, counting the others
  std::string owners;            // "ps0 and ps1 had stepped; ps2 has not answered"

  // The result. Throws `pass`, the failure of the backward pass before it, or its own, saying what
  // the owners have done.
  [[nodiscard]] StepResult get(const std::optional<Error>& pass = std::nullopt) const;
};

// Throws Error(invalid_argument) for options out of their range.
void check_options(const StepOptions& options);
// Steps. Of parts that cannot be started, those behind are not, either. REQUIRES: checked options.
[[nodiscard]] Future<StepOutcome> start_step(const StepPlan& plan, const StepOptions& options);
// Waits. This thread's current streams then run after the steps of its own worker.
StepResult wait_for_step(const Future<StepOutcome>& step,
                         const std::optional<Error>& pass = std::nullopt);

// What backward_and_step() of backward_and_step.h does.
StepResult backward_and_step(const dist_autograd::ContextHandle& context,
                             std::vector<at::Tensor> losses, const dist_autograd::Options& options,
                             const StepPlan& plan, const StepOptions& step_options);
// What backward_and_step_async() does.
[[nodiscard]] Future<StepResult> backward_and_step_async(
    const dist_autograd::ContextHandle& context, std::vector<at::Tensor> losses,
    const dist_autograd::Options& options, const StepPlan& plan, const StepOptions& step_options);

namespace detail {
inline std::atomic<bool> said_no_gradient{false};  // in this process
}

// What the owners find in the gradients of a context before they are stepped.
struct Findings {
  double norm = 0;             // of all of them
  std::int64_t staleness = 0;  // the largest
};
[[nodiscard]] Future<Findings> look_at_gradients(const dist_autograd::ContextId& context,
                                                 const Owned& owned, StepPlan::Timeout timeout);
// What they are multiplied by.
[[nodiscard]] double clip_factor(double norm, double max_norm);
// Throws Error(invalid_argument) for one below 0.
void check_limit(const char* what, double limit);

}  // namespace stitch::optim
