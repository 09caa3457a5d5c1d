// Steps by themselves, and what the functions of backward_and_step.h do.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/dist_autograd/at_settled.h"
#include "stitch/dist_optim/steps.h"
#include "stitch/rpc/default_streams.h"

namespace stitch::optim {

using namespace std::chrono_literals;

namespace {

// The error of what failed when owners had been told to step.
Error with_stepped(const Error& failure, std::int64_t stepped) {
  if (stepped == 0) return failure;
  return Error(failure.code(), std::string(failure.what()) + "; " + std::to_string(stepped) +
                                   (stepped == 1 ? " parameter was" : " parameters were") +
                                   " stepped nevertheless")
      .with_worker(failure.worker())
      .with_function(failure.function())
      .with_remote(failure.remote());
}

// The results of steps that have been started, once all have ended. With `failure`, be it that of
// another step that could not be started: that error, saying how many parameters these have stepped
// nevertheless. No thread waits.
Future<std::vector<std::int64_t>> results_of(std::vector<Future<std::int64_t>> started,
                                             const std::optional<Error>& failure) {
  if (!failure) return when_all(std::move(started));
  return when_all(started).then(
      // Not the futures: the steps are stopped with the outcome only if nothing else holds them.
      [states = stitch::detail::states_of(started),
       failure](const Future<std::vector<std::int64_t>>&) -> std::vector<std::int64_t> {
        std::int64_t stepped = 0;
        for (const auto& state : *states) {
          const Future<std::int64_t> each(state);
          if (!each.has_error()) stepped += each.get();  // all have ended
        }
        throw with_stepped(*failure, stepped);
      });
}

// Starts steps as soon as a pass is settled: the requests leave with the messages that end the
// pass. Shared by the pass and by the code that waits for both. Thread contract: as AtSettled; the
// rest by one thread, once the pass has ended; it does not wait.
class SettledSteps final : public dist_autograd::AtSettled,
                           public std::enable_shared_from_this<SettledSteps> {
 public:
  // The steps begin under the execution context that is current here.
  explicit SettledSteps(std::vector<OwnersStep> steps);

  void announce() noexcept override { announced_.store(true, std::memory_order_release); }
  void run(bool running) noexcept override;
  // Whether the pass is settled, and steps may have been started.
  [[nodiscard]] bool announced() const noexcept {
    return announced_.load(std::memory_order_acquire);
  }

  // The outcome of the steps, once all that were started have ended; starts them if the pass could
  // not. Called once. The error is that of the pass, saying how many parameters have been stepped
  // nevertheless; else that of start_steps().
  [[nodiscard]] Future<std::vector<std::int64_t>> outcome(const std::optional<Error>& failure);

 private:
  const std::vector<OwnersStep> steps_;
  const rpc::ExecutionContext surroundings_;
  std::atomic<bool> announced_{false};
  // Written by run(), read after `begun_`.
  std::vector<Future<std::int64_t>> started_;
  std::optional<Error> not_started_;
  Promise<void> begun_;
};

template <class T>
T wait_for(const Future<T>& stepped) {
  T result{};
  try {
    result = stepped.get();
  } catch (...) {
    rpc::current_streams_wait_for_default();
    throw;
  }
  rpc::current_streams_wait_for_default();
  return result;
}

}  // namespace

std::vector<std::int64_t> get_when_stepped(const Future<std::vector<std::int64_t>>& stepped) {
  return wait_for(stepped);
}
StepResult get_when_stepped(const Future<StepResult>& stepped) { return wait_for(stepped); }

std::int64_t sum_of(const std::vector<std::int64_t>& stepped) {
  const auto sum = std::accumulate(stepped.begin(), stepped.end(), std::int64_t{0});
  if (sum == 0 && !detail::said_no_gradient.exchange(true)) {
    std::fputs(
        "stitch: a step found no gradient for any of its parameters: does the loss depend on them, "
        "and was its forward pass made under the context that the step was given?\n",
        stderr);
  }
  return sum;
}

Future<std::vector<std::int64_t>> start_steps(const std::vector<OwnersStep>& steps) {
  rpc::default_streams_wait_for_current();
  std::vector<Future<std::int64_t>> started;
  started.reserve(steps.size());  // what has been started is not forgotten
  std::optional<Error> not_started;
  try {
    for (const OwnersStep& step : steps) started.push_back(step());
  } catch (...) {
    not_started = to_error(std::current_exception());
  }
  return results_of(std::move(started), not_started);
}

std::vector<OwnersStep> StepPlan::scaled(double scale, Timeout timeout) const {
  std::vector<OwnersStep> steps;
  for (const auto& owner : owners)
    steps.emplace_back([owner, scale, timeout] { return owner(scale, timeout); });
  return steps;
}

OwnersStep StepPlan::together(const StepOptions& options,
                              std::shared_ptr<StepResult> result) const {
  if (options.max_norm) check_limit("max_norm", *options.max_norm);
  return [plan = *this, options, result = std::move(result)] {
    return start_step(plan, options).then([result](const StepResult& done) {
      *result = done;
      return done.stepped;
    });
  };
}

Future<StepResult> start_step(const StepPlan& plan, const StepOptions& options) {
  const auto begin = [plan](double scale, StepPlan::Timeout timeout, double norm) {
    return start_steps(plan.scaled(scale, timeout))
        .then([number = plan.number, norm](const std::vector<std::int64_t>& stepped) {
          return StepResult{.stepped = sum_of(stepped), .norm = norm, .step = number->get()};
        });
  };
  if (!options.max_norm) return begin(1, options.timeout, 0);
  check_limit("max_norm", *options.max_norm);
  rpc::default_streams_wait_for_current();
  const auto deadline = base::deadline_or_none(options.timeout.value_or(0ns));
  return gradient_norm(plan.context, plan.owned, options.timeout)
      .then([plan, options, deadline, begin](double norm) {
        if (!std::isfinite(norm)) {
          return make_ready(StepResult{.skipped = true, .norm = norm, .step = plan.number->get()});
        }
        StepPlan::Timeout left = options.timeout;
        if (deadline != std::chrono::steady_clock::time_point::max())
          left =
              std::max<std::chrono::nanoseconds>(deadline - std::chrono::steady_clock::now(), 1ns);
        return begin(clip_factor(norm, *options.max_norm), left, norm);
      });
}

SettledSteps::SettledSteps(std::vector<OwnersStep> steps)
    : steps_(std::move(steps)), surroundings_(rpc::ExecutionContext::captured()) {
  started_.reserve(steps_.size());
}

void SettledSteps::run(bool running) noexcept {
  if (running) {
    try {
      const rpc::ExecutionContextScope scope(surroundings_);
      for (const OwnersStep& step : steps_) started_.push_back(step());
    } catch (...) {
      not_started_ = to_error(std::current_exception());
    }
  }
  begun_.set_value();
}

Future<std::vector<std::int64_t>> SettledSteps::outcome(const std::optional<Error>& failure) {
  if (!announced())
    return failure ? make_failed<std::vector<std::int64_t>>(*failure) : start_steps(steps_);
  const auto results = [self = shared_from_this(), failure] {
    return results_of(std::move(self->started_), failure ? failure : self->not_started_);
  };
  const Future<void> begun = begun_.future();
  if (begun.ready()) return results();
  return begun.then(results);  // run() is still starting them, on another thread
}

std::vector<std::int64_t> backward_and_steps(const dist_autograd::ContextHandle& context,
                                             std::vector<at::Tensor> losses,
                                             const dist_autograd::Options& options,
                                             std::vector<OwnersStep> steps) {
  rpc::default_streams_wait_for_current();
  const auto settled = std::make_shared<SettledSteps>(std::move(steps));
  std::optional<Error> failure;
  try {
    context.backward(std::move(losses), options, settled);
  } catch (...) {
    if (!settled->announced()) throw;
    failure = to_error(std::current_exception());
  }
  return get_when_stepped(settled->outcome(failure));
}

Future<std::vector<std::int64_t>> backward_and_steps_async(
    const dist_autograd::ContextHandle& context, std::vector<at::Tensor> losses,
    const dist_autograd::Options& options, std::vector<OwnersStep> steps) {
  rpc::default_streams_wait_for_current();
  const auto settled = std::make_shared<SettledSteps>(std::move(steps));
  return context.backward_async(std::move(losses), options, settled)
      .then([settled](const Future<void>& pass) {
        return settled->outcome(pass.has_error() ? std::optional(pass.error()) : std::nullopt);
      });
}

}  // namespace stitch::optim
