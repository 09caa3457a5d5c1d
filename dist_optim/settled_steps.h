#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/dist_autograd/at_settled.h"
#include "stitch/dist_autograd/context.h"

namespace stitch::optim {

// Has one owner step its parameters with the gradients of one context: the number of them.
using OwnersStep = std::function<Future<std::int64_t>()>;

// Starts all of them. Their results, or the first error, counting the others.
[[nodiscard]] Future<std::vector<std::int64_t>> start_steps(const std::vector<OwnersStep>& steps);
[[nodiscard]] std::int64_t sum_of(const std::vector<std::int64_t>& stepped);

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

// What the functions of backward_and_step.h do.
std::int64_t backward_and_steps(const dist_autograd::ContextHandle& context,
                                std::vector<at::Tensor> losses,
                                const dist_autograd::Options& options,
                                std::vector<OwnersStep> steps);
[[nodiscard]] Future<std::int64_t> backward_and_steps_async(
    const dist_autograd::ContextHandle& context, std::vector<at::Tensor> losses,
    const dist_autograd::Options& options, std::vector<OwnersStep> steps);

}  // namespace stitch::optim
