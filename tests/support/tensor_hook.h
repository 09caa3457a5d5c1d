#pragma once

#include <ATen/ATen.h>

#include <utility>

namespace stitch::testing {

// As tensor.register_hook(hook), for one that may be given an undefined gradient: what wraps hooks
// there asserts, in debug builds with libtorch 1.13, that it is defined.
template <class Hook>
void add_tensor_hook(const at::Tensor& tensor, Hook hook) {
  const at::TensorBase& base = tensor;
  base.register_hook([hook = std::move(hook)](const at::TensorBase& gradient) -> at::TensorBase {
    return hook(at::Tensor(gradient));
  });
}

}  // namespace stitch::testing
