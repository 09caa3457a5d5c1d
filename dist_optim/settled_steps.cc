// What the functions of backward_and_step.h do.
#include <atomic>
#include <numeric>
#include <string>
#include <utility>

#include "stitch/dist_autograd/at_settled.h"
#include "stitch/dist_optim/distributed_optimizer.h"

namespace stitch::optim {

namespace {

// The error of a pass that failed when owners had been told to step.
Error with_stepped(const Error& failure, std::int64_t stepped) {
  if (stepped == 0) return failure;
  return Error(failure.code(), std::string(failure.what()) + "; " + std::to_string(stepped) +
                                   (stepped == 1 ? " parameter was" : " parameters were") +
                                   " stepped nevertheless")
      .with_worker(failure.worker())
      .with_function(failure.function())
      .with_remote(failure.remote());
}

// Starts steps as soon as a pass is settled: the requests leave with the messages that end the
// pass. Shared by the pass and by the code that waits for both. Thread contract: as AtSettled; the
// rest by the thread that waits, once the pass has ended.
class SettledSteps final : public dist_autograd::AtSettled {
 public:
  // The steps begin under the execution context that is current here.
  explicit SettledSteps(std::vector<OwnersStep> steps);

  void announce() noexcept override { announced_.store(true, std::memory_order_release); }
  void run(bool running) noexcept override;

  // The steps' outcome, for a pass that has ended with `failure` or without one; called once.
  // Starts them if the pass could not. The error is that of the pass, saying how many parameters
  // have been stepped nevertheless (for which it waits); else that of start_steps().
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

}  // namespace

std::int64_t sum_of(const std::vector<std::int64_t>& stepped) {
  return std::accumulate(stepped.begin(), stepped.end(), std::int64_t{0});
}

Future<std::vector<std::int64_t>> start_steps(const std::vector<OwnersStep>& steps) {
  std::vector<Future<std::int64_t>> started;
  started.reserve(steps.size());
  for (const OwnersStep& step : steps) started.push_back(step());
  return when_all(std::move(started));
}

SettledSteps::SettledSteps(std::vector<OwnersStep> steps)
    : steps_(std::move(steps)), surroundings_(rpc::ExecutionContext::captured()) {
  started_.reserve(steps_.size());  // what has been started is not forgotten
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
  if (!announced_.load(std::memory_order_acquire))
    return failure ? make_failed<std::vector<std::int64_t>>(*failure) : start_steps(steps_);
  begun_.future().get();
  if (!failure) {
    if (not_started_) return make_failed<std::vector<std::int64_t>>(*not_started_);
    return when_all(std::move(started_));
  }
  std::int64_t stepped = 0;
  for (const auto& each : started_) {
    try {
      stepped += each.get();
    } catch (const Error&) {  // the error of the pass counts
    }
  }
  return make_failed<std::vector<std::int64_t>>(with_stepped(*failure, stepped));
}

std::int64_t backward_and_steps(const dist_autograd::ContextHandle& context,
                                std::vector<at::Tensor> losses,
                                const dist_autograd::Options& options,
                                std::vector<OwnersStep> steps) {
  const auto settled = std::make_shared<SettledSteps>(std::move(steps));
  std::optional<Error> failure;
  try {
    context.backward(std::move(losses), options, settled);
  } catch (const Error& error) {
    failure = error;
  }
  return sum_of(settled->outcome(failure).get());
}

Future<std::int64_t> backward_and_steps_async(const dist_autograd::ContextHandle& context,
                                              std::vector<at::Tensor> losses,
                                              const dist_autograd::Options& options,
                                              std::vector<OwnersStep> steps) {
  const auto settled = std::make_shared<SettledSteps>(std::move(steps));
  return context.backward_async(std::move(losses), options, settled)
      .then([settled](const Future<void>& pass) {
        return settled->outcome(pass.has_error() ? std::optional(pass.error()) : std::nullopt);
      })
      .then(&sum_of);
}

}  // namespace stitch::optim
