#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>

#include "stitch/base/mutex.h"

namespace stitch::optim {

// The mutex that every optimizer of this process takes while it steps `parameter`. There is one per
// parameter, shared by all optimizers and contexts: steps of one parameter are serialized, those of
// different parameters are not. It lives as long as its last owner. Thread contract: any thread.
[[nodiscard]] std::shared_ptr<base::Mutex> parameter_lock(const at::Tensor& parameter);

// What a step does about a forward pass that saved the old parameter and has not run backward yet.
enum class StalePolicy : unsigned char {
  detect,  // that backward throws ("modified by an inplace operation"). A step that comes while
           // that backward has read the parameter and still computes with it is not seen
  allow,   // that backward uses the new values: asynchronous training on shared parameters
};

// A parameter as a torch::optim optimizer sees it: a leaf of its own (the shadow) that shares the
// parameter's memory and carries the gradient of one context for one step. So the
// parameter's `.grad` is never touched. Thread contract: REQUIRES lock() held, except for lock()
// itself.
class ShadowParameter {
 public:
  ShadowParameter(at::Tensor parameter, StalePolicy policy);

  [[nodiscard]] base::Mutex& lock() const noexcept { return *lock_; }
  [[nodiscard]] const at::Tensor& parameter() const noexcept { return parameter_; }
  [[nodiscard]] const at::Tensor& shadow() const noexcept { return shadow_; }
  // Throws Error(invalid_argument) naming the parameter when the gradient's shape is not its own.
  // Needs no lock.
  void check(const at::Tensor& gradient, std::string_view name) const;
  // Checks `gradient` and puts it on the shadow.
  void begin_step(const at::Tensor& gradient, std::string_view name);
  // Takes the gradient off again. `bump_version`: the optimizer did not tell libtorch that the
  // parameter changed.
  void end_step(bool bump_version);

 private:
  const at::Tensor parameter_;
  const StalePolicy policy_;
  const std::shared_ptr<base::Mutex> lock_;
  at::Tensor shadow_;
};

}  // namespace stitch::optim
