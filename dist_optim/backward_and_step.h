#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "stitch/dist_autograd/context.h"
#include "stitch/dist_optim/distributed_optimizer.h"

namespace stitch::optim {

namespace detail {
template <class... Optimizers>
StepPlan plan_of(const dist_autograd::ContextHandle& context,
                 DistributedOptimizer<Optimizers>&... optimizers) {
  StepPlan plan{.context = context.id()};
  (optimizers.add_to(plan), ...);
  return plan;
}
}  // namespace detail

// context.backward(losses, options) and then optimizer.step(context) with each of the optimizers,
// in one wave of messages instead of two: each owner steps its parameters as soon as the pass has
// computed every gradient on all workers, while the pass is still being ended. Parameters are the
// same afterwards as with the two calls, to the last bit. Where the loss leaves results unused that
// is known only at the end of the pass, and the steps follow it as in the two calls.
//
// Waits for the pass and for all steps; returns how many parameters were stepped. Throws what
// backward() throws, and then nothing was stepped, unless a worker was lost or the pass ended early
// while its last messages were under way: then the error says how many. Throws what step() throws
// when an owner failed to step. Parameters that two optimizers share are stepped by both. On
// devices of this worker the order is that of step(). Thread contract: any thread.
template <class... Optimizers>
std::int64_t backward_and_step(const dist_autograd::ContextHandle& context,
                               std::vector<at::Tensor> losses,
                               const dist_autograd::Options& options,
                               DistributedOptimizer<Optimizers>&... optimizers) {
  return sum_of(backward_and_steps(context, std::move(losses), options,
                                   detail::plan_of(context, optimizers...).plain()));
}
// The same with default options.
template <class... Optimizers>
std::int64_t backward_and_step(const dist_autograd::ContextHandle& context,
                               std::vector<at::Tensor> losses,
                               DistributedOptimizer<Optimizers>&... optimizers) {
  return backward_and_step(context, std::move(losses), dist_autograd::Options(), optimizers...);
}

// The same with steps that are clipped, over the parameters of all these optimizers together, or
// have a timeout, which begins with them. StepResult::step is that of the first optimizer. An error
// does not say how many parameters were stepped.
template <class... Optimizers>
StepResult backward_and_step(const dist_autograd::ContextHandle& context,
                             std::vector<at::Tensor> losses, const dist_autograd::Options& options,
                             const StepOptions& step_options,
                             DistributedOptimizer<Optimizers>&... optimizers) {
  const auto result = std::make_shared<StepResult>();
  backward_and_steps(context, std::move(losses), options,
                     {detail::plan_of(context, optimizers...).together(step_options, result)});
  return *result;
}

// Without waiting. The context must not end before the future is ready; the optimizers may. With
// StalePolicy::allow, calls of the next step's forward may be made meanwhile: each sees a parameter
// from before its step, from after it, or in the middle of it.
template <class... Optimizers>
[[nodiscard]] Future<std::int64_t> backward_and_step_async(
    const dist_autograd::ContextHandle& context, std::vector<at::Tensor> losses,
    const dist_autograd::Options& options, DistributedOptimizer<Optimizers>&... optimizers) {
  return backward_and_steps_async(context, std::move(losses), options,
                                  detail::plan_of(context, optimizers...).plain())
      .then(&sum_of);
}
// The same with default options.
template <class... Optimizers>
[[nodiscard]] Future<std::int64_t> backward_and_step_async(
    const dist_autograd::ContextHandle& context, std::vector<at::Tensor> losses,
    DistributedOptimizer<Optimizers>&... optimizers) {
  return backward_and_step_async(context, std::move(losses), dist_autograd::Options(),
                                 optimizers...);
}

}  // namespace stitch::optim
