// Steps by themselves, and what the functions of backward_and_step.h do.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/base/name_list.h"
#include "stitch/dist_autograd/at_settled.h"
#include "stitch/dist_optim/backward_and_step.h"
#include "stitch/dist_optim/grad_scaler.h"
#include "stitch/dist_optim/shadow_parameter.h"
#include "stitch/dist_optim/step_plan.h"
#include "stitch/rpc/default_streams.h"

namespace stitch::optim {

using namespace std::chrono_literals;

namespace {

using Started = std::vector<Future<std::int64_t>>;

// "ps0 and ps1", each once, before what is said of them.
void say(std::string& text, std::vector<std::string> names, const char* of_one,
         const char* of_all) {
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  if (names.empty()) return;
  const std::string last = names.back();
  names.pop_back();
  text += text.empty() ? "" : "; ";
  text += names.empty() ? last + of_one : base::join_names(names) + " and " + last + of_all;
}

bool is_unanswered(const Error& error) {
  return error.code() == ErrorCode::timeout || error.code() == ErrorCode::disconnected ||
         (error.code() == ErrorCode::cancelled && !error.remote());
}

// Of steps that have all ended; `failure`: why the parts behind them were not started.
StepOutcome outcome_of(const StepPlan& plan, const Started& started,
                       const std::optional<Error>& failure, StepResult result) {
  std::vector<std::string> stepped, silent, failed;
  for (std::size_t i = 0; i < started.size(); ++i) {
    if (!started[i].has_error()) result.stepped += started[i].get();
    auto& names = !started[i].has_error()             ? stepped
                  : is_unanswered(started[i].error()) ? silent
                                                      : failed;
    names.push_back(plan.parts[i].owner);
  }
  if (!plan.numbers.empty()) result.step = plan.numbers.front()->get();
  StepOutcome outcome{.result = result, .failure = failure, .owners = {}};
  say(outcome.owners, stepped, " had stepped", " had stepped");
  if (plan.parts.size() > 1) {  // else the error is about that owner
    say(outcome.owners, silent, " has not answered", " have not answered");
    say(outcome.owners, failed, " failed", " failed");
  }
  plan.end(!failure);
  if (!failure && result.stepped == 0 && !detail::said_no_gradient.exchange(true)) {
    std::fputs(
        "stitch: a step found no gradient for any of its parameters: does the loss depend on them, "
        "and was its forward pass made under the context that the step was given?\n",
        stderr);
  }
  return outcome;
}

// Starts all parts. No thread waits.
Future<StepOutcome> start_parts(const StepPlan& plan, double scale, StepPlan::Timeout timeout,
                                const StepResult& result) {
  rpc::default_streams_wait_for_current();
  Started started;
  started.reserve(plan.parts.size());  // what has been started is not forgotten
  std::optional<Error> not_started;
  try {
    for (const auto& part : plan.parts) started.push_back(part.begin(scale, timeout));
  } catch (...) {
    not_started = to_error(std::current_exception());
  }
  const auto states = stitch::detail::states_of(started);
  const auto all = when_all(std::move(started));
  const Promise<StepOutcome> promise;
  promise.on_cancel([all] { all.cancel(); });
  // On the thread that has the last answer: a step that is waited for needs no other.
  all.on_ready([plan, states, all, not_started, result, promise] {
    Started ended;
    for (const auto& state : *states) ended.emplace_back(state);
    auto failure = not_started;
    if (!failure && all.has_error()) failure = all.error();
    promise.set_value(outcome_of(plan, ended, failure, result));
  });
  return promise.future();
}

// Starts a step as soon as a pass is settled: the requests leave with the messages that end the
// pass. Shared by the pass and by the code that waits for both. Thread contract: as AtSettled; the
// rest by one thread, once the pass has ended; it does not wait.
class SettledSteps final : public dist_autograd::AtSettled,
                           public std::enable_shared_from_this<SettledSteps> {
 public:
  // The step begins under the execution context that is current here.
  SettledSteps(const StepPlan& plan, const StepOptions& options)
      : plan_(plan), options_(options), surroundings_(rpc::ExecutionContext::captured()) {}

  void announce() noexcept override { announced_.store(true, std::memory_order_release); }
  void run(bool running) noexcept override;
  // Whether the pass is settled, and the step may have been started.
  [[nodiscard]] bool announced() const noexcept {
    return announced_.load(std::memory_order_acquire);
  }

  // That of the step, once it has ended; starts it if the pass, which has not failed, could not.
  [[nodiscard]] Future<StepOutcome> outcome(bool failed);

 private:
  const StepPlan plan_;
  const StepOptions options_;
  const rpc::ExecutionContext surroundings_;
  std::atomic<bool> announced_{false};
  // Written by run(), read after `begun_`.
  std::optional<Future<StepOutcome>> started_;
  Promise<void> begun_;
};

void SettledSteps::run(bool running) noexcept {
  if (running) {
    try {
      const rpc::ExecutionContextScope scope(surroundings_);
      started_ = start_step(plan_, options_);
    } catch (...) {
      started_ = make_failed<StepOutcome>(to_error(std::current_exception()));
    }
  }
  begun_.set_value();
}

Future<StepOutcome> SettledSteps::outcome(bool failed) {
  if (!announced()) return failed ? make_ready(StepOutcome{}) : start_step(plan_, options_);
  const auto step = [self = shared_from_this()] {
    return self->started_ ? *self->started_ : make_ready(StepOutcome{});
  };
  const Future<void> begun = begun_.future();
  if (begun.ready()) return step();
  return begun.then(step);  // run() is still starting it, on another thread
}

}  // namespace

StepResult StepOutcome::get(const std::optional<Error>& pass) const {
  if (!pass && !failure) return result;
  const Error& error = pass ? *pass : *failure;
  if (owners.empty()) throw error;
  throw Error(error.code(), std::string(error.what()) + "; " + owners)
      .with_worker(error.worker())
      .with_function(error.function())
      .with_remote(error.remote());
}

StepResult wait_for_step(const Future<StepOutcome>& step, const std::optional<Error>& pass) {
  StepOutcome outcome;
  if (const auto lost = base::failure_of([&] { outcome = step.get(); })) outcome.failure = lost;
  rpc::current_streams_wait_for_default();
  return outcome.get(pass);
}

void check_options(const StepOptions& options) {
  if (options.max_norm) check_limit("max_norm", *options.max_norm);
  if (options.max_staleness && (*options.max_staleness < 0 || *options.max_staleness >= kStepsKept))
    throw Error(ErrorCode::invalid_argument,
                "max_staleness of " + std::to_string(*options.max_staleness) +
                    " is refused: it must be from 0 to " + std::to_string(kStepsKept - 1));
}

Future<StepOutcome> start_step(const StepPlan& plan, const StepOptions& options) {
  const bool norm = options.max_norm || options.scaler != nullptr;
  if (!norm && !options.max_staleness) return start_parts(plan, 1, options.timeout, {});
  rpc::default_streams_wait_for_current();
  const auto deadline = base::deadline_or_none(options.timeout.value_or(0ns));
  // No std::optional, of which g++ 12 warns.
  const auto scaler = options.scaler ? std::make_shared<GradScaler>(*options.scaler) : nullptr;
  return look_at_gradients(plan.context, plan.owned, options.timeout)
      .then([plan, options, deadline, scaler, norm](const Future<Findings>& looked) {
        StepResult result;
        if (!plan.numbers.empty()) result.step = plan.numbers.front()->get();
        if (looked.has_error()) {
          plan.end(false);
          return make_ready(StepOutcome{.result = result, .failure = looked.error(), .owners = {}});
        }
        const double factor = scaler ? scaler->factor_of(plan.context) : 1;
        if (norm) result.norm = looked.get().norm / factor;
        if (options.max_staleness) result.staleness = looked.get().staleness;
        const bool finite = std::isfinite(result.norm);
        // Owners that have stepped before are not asked to undo it: the others follow.
        const bool again = std::any_of(plan.numbers.begin(), plan.numbers.end(),
                                       [](const auto& number) { return number->taken(); });
        result.skipped =
            !again && (!finite || result.staleness > options.max_staleness.value_or(kStepsKept));
        if (result.skipped) {
          plan.end(true);
          if (scaler && !finite) scaler->update(false);
          return make_ready(StepOutcome{.result = result, .failure = {}, .owners = {}});
        }
        StepPlan::Timeout left = options.timeout;
        if (deadline != std::chrono::steady_clock::time_point::max())
          left =
              std::max<std::chrono::nanoseconds>(deadline - std::chrono::steady_clock::now(), 1ns);
        const double clip = options.max_norm ? clip_factor(result.norm, *options.max_norm) : 1;
        return start_parts(plan, clip / factor, left, result).then([scaler](StepOutcome outcome) {
          if (scaler && !outcome.failure) scaler->update(true);
          return outcome;
        });
      });
}

StepResult backward_and_step(const dist_autograd::ContextHandle& context,
                             std::vector<at::Tensor> losses, const dist_autograd::Options& options,
                             const StepPlan& plan, const StepOptions& step_options) {
  check_options(step_options);
  rpc::default_streams_wait_for_current();
  const auto settled = std::make_shared<SettledSteps>(plan, step_options);
  std::optional<Error> failure;
  try {
    context.backward(std::move(losses), options, settled);
  } catch (...) {
    if (!settled->announced()) throw;
    failure = to_error(std::current_exception());
  }
  return wait_for_step(settled->outcome(failure.has_value()), failure);
}

Future<StepResult> backward_and_step_async(const dist_autograd::ContextHandle& context,
                                           std::vector<at::Tensor> losses,
                                           const dist_autograd::Options& options,
                                           const StepPlan& plan, const StepOptions& step_options) {
  check_options(step_options);
  rpc::default_streams_wait_for_current();
  const auto settled = std::make_shared<SettledSteps>(plan, step_options);
  return context.backward_async(std::move(losses), options, settled)
      .then([settled](const Future<void>& pass) {
        const auto failure = pass.has_error() ? std::optional(pass.error()) : std::nullopt;
        return settled->outcome(failure.has_value()).then([failure](const StepOutcome& outcome) {
          return outcome.get(failure);
        });
      });
}

namespace detail {

namespace {
StepPlan plan_of(const dist_autograd::ContextHandle& context, const Optimizers& optimizers) {
  StepPlan plan{.context = context.id()};
  for (const auto* optimizer : optimizers) optimizer->add_to(plan);
  return plan;
}
}  // namespace

StepResult backward_and_step(const dist_autograd::ContextHandle& context,
                             std::vector<at::Tensor> losses, const dist_autograd::Options& options,
                             const StepOptions& step_options, const Optimizers& optimizers) {
  return optim::backward_and_step(context, std::move(losses), options, plan_of(context, optimizers),
                                  step_options);
}

Future<StepResult> backward_and_step_async(const dist_autograd::ContextHandle& context,
                                           std::vector<at::Tensor> losses,
                                           const dist_autograd::Options& options,
                                           const StepOptions& step_options,
                                           const Optimizers& optimizers) {
  return optim::backward_and_step_async(context, std::move(losses), options,
                                        plan_of(context, optimizers), step_options);
}

}  // namespace detail

}  // namespace stitch::optim
