#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "stitch/dist_autograd/context.h"

namespace stitch::optim {

// What one context has for the parameters of the current worker. A worker that the context never
// reached has none.
class ContextGradients {
 public:
  // Throws Error(cancelled) when the context has ended, and its error when a pass of it has failed:
  // then its gradients are not to be used.
  explicit ContextGradients(const dist_autograd::ContextId& context);
  // The gradient of `parameter`, or an undefined tensor.
  [[nodiscard]] at::Tensor find(const at::Tensor& parameter) const;

 private:
  std::optional<dist_autograd::ContextHandle> context_;
};

}  // namespace stitch::optim
