#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/dist_autograd/context.h"
#include "stitch/rref/rref.h"

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

// A DistributedOptimizer of whatever type: where its parameters are.
class AnyOptimizer {
 public:
  using Owned = std::vector<RRef<OwnedParameters>>;  // one for each owner
  // For the functions below.
  [[nodiscard]] virtual Owned owned() const = 0;

 protected:
  AnyOptimizer() = default;
  AnyOptimizer(const AnyOptimizer&) = default;
  AnyOptimizer& operator=(const AnyOptimizer&) = default;
  ~AnyOptimizer() = default;
};
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

// For the steps: the norm that clip_grad_norm() returns, and what it scales by then.
[[nodiscard]] Future<double> gradient_norm(const dist_autograd::ContextId& context,
                                           const AnyOptimizer::Owned& owned,
                                           std::optional<std::chrono::nanoseconds> timeout);
[[nodiscard]] double clip_factor(double norm, double max_norm);
// Throws Error(invalid_argument) for one below 0.
void check_limit(const char* what, double limit);

}  // namespace stitch::optim
