#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "stitch/dist_autograd/context.h"
#include "stitch/dist_optim/distributed_optimizer.h"

namespace stitch::optim {

namespace detail {
// The functions below, without templates.
StepResult backward_and_step(const dist_autograd::ContextHandle& context,
                             std::vector<at::Tensor> losses, const dist_autograd::Options& options,
                             const StepOptions& step_options, const Optimizers& optimizers);
[[nodiscard]] Future<StepResult> backward_and_step_async(
    const dist_autograd::ContextHandle& context, std::vector<at::Tensor> losses,
    const dist_autograd::Options& options, const StepOptions& step_options,
    const Optimizers& optimizers);
}  // namespace detail

// context.backward(losses, options) and then optimizer.step(context) with each of the optimizers,
// in one wave of messages instead of two: each owner steps its parameters as soon as the pass has
// computed every gradient on all workers, while the pass is still being ended. Parameters are the
// same afterwards as with the two calls, to the last bit. Where the loss leaves results unused that
// is known only at the end of the pass, and the steps follow it as in the two calls.
//
// Waits for the pass and for all steps; returns how many parameters were stepped. Throws what
// backward() throws, and then nothing was stepped, unless a worker was lost or the pass ended early
// while its last messages were under way: then the error names the owners. Throws what step()
// throws when an owner failed to step. Parameters that two optimizers share are stepped by both. On
// devices of this worker the order is that of step(). Thread contract: any thread.
template <class... Optimizers>
std::int64_t backward_and_step(const dist_autograd::ContextHandle& context,
                               std::vector<at::Tensor> losses,
                               const dist_autograd::Options& options,
                               DistributedOptimizer<Optimizers>&... optimizers) {
  return detail::backward_and_step(context, std::move(losses), options, {}, {&optimizers...})
      .stepped;
}
// The same with default options.
template <class... Optimizers>
std::int64_t backward_and_step(const dist_autograd::ContextHandle& context,
                               std::vector<at::Tensor> losses,
                               DistributedOptimizer<Optimizers>&... optimizers) {
  return backward_and_step(context, std::move(losses), dist_autograd::Options(), optimizers...);
}

// The same with options: clipped over the parameters of all these optimizers together, scaled by
// one scaler, which takes it as one step, with a timeout that begins with the steps.
// StepResult::step is that of the first optimizer.
template <class... Optimizers>
StepResult backward_and_step(const dist_autograd::ContextHandle& context,
                             std::vector<at::Tensor> losses, const dist_autograd::Options& options,
                             const StepOptions& step_options,
                             DistributedOptimizer<Optimizers>&... optimizers) {
  return detail::backward_and_step(context, std::move(losses), options, step_options,
                                   {&optimizers...});
}

// Without waiting. The context must not end before the future is ready; the optimizers may. With
// StalePolicy::allow, calls of the next step's forward may be made meanwhile: each sees a parameter
// from before its step, from after it, or in the middle of it.
template <class... Optimizers>
[[nodiscard]] Future<std::int64_t> backward_and_step_async(
    const dist_autograd::ContextHandle& context, std::vector<at::Tensor> losses,
    const dist_autograd::Options& options, DistributedOptimizer<Optimizers>&... optimizers) {
  return detail::backward_and_step_async(context, std::move(losses), options, {}, {&optimizers...})
      .then([](const StepResult& result) { return result.stepped; });
}
// The same with default options.
template <class... Optimizers>
[[nodiscard]] Future<std::int64_t> backward_and_step_async(
    const dist_autograd::ContextHandle& context, std::vector<at::Tensor> losses,
    DistributedOptimizer<Optimizers>&... optimizers) {
  return backward_and_step_async(context, std::move(losses), dist_autograd::Options(),
                                 optimizers...);
}
// The same with options of the steps.
template <class... Optimizers>
[[nodiscard]] Future<StepResult> backward_and_step_async(
    const dist_autograd::ContextHandle& context, std::vector<at::Tensor> losses,
    const dist_autograd::Options& options, const StepOptions& step_options,
    DistributedOptimizer<Optimizers>&... optimizers) {
  return detail::backward_and_step_async(context, std::move(losses), options, step_options,
                                         {&optimizers...});
}

}  // namespace stitch::optim
