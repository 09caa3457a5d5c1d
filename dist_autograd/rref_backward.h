#pragma once

#include <concepts>

#include "stitch/dist_autograd/context.h"
#include "stitch/rref/rref.h"

namespace stitch {

namespace dist_autograd {

// Runs backward from the tensor that `root` refers to, on its owner. The future completes as that
// of ContextHandle::backward_async(); cancelling it ends the pass. Throws as
// ContextHandle::throw_if_unusable(), and Error(invalid_argument) when options.inputs is not empty.
// REQUIRES: `context` is one of the current worker. Any thread.
[[nodiscard]] Future<void> backward_async(const RRef<at::Tensor>& root,
                                          const ContextHandle& context,
                                          const Options& options = {});

}  // namespace dist_autograd

template <class T>
void RRef<T>::backward(dist_autograd::Context& context) const requires std::same_as<T, at::Tensor> {
  dist_autograd::backward_async(*this, context).get();
}

}  // namespace stitch
