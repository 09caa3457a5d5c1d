#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <unordered_map>

namespace stitch::dist_autograd {

struct TensorHash {
  std::size_t operator()(const at::Tensor& tensor) const noexcept {
    return std::hash<const void*>{}(tensor.unsafeGetTensorImpl());
  }
};
struct TensorSame {
  bool operator()(const at::Tensor& a, const at::Tensor& b) const noexcept { return a.is_same(b); }
};
// Parameter -> its gradient. Keys are compared by identity, not by value.
using GradientMap = std::unordered_map<at::Tensor, at::Tensor, TensorHash, TensorSame>;

}  // namespace stitch::dist_autograd
