#pragma once

#include <cstddef>

#include "stitch/dist_autograd/graph/compat.h"

namespace stitch::dist_autograd {

// The bytes of the elements of `tensors`, as they travel; undefined ones have none.
[[nodiscard]] inline std::size_t bytes_of(const variable_list& tensors) {
  std::size_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (tensor.is_sparse()) {
      bytes += tensor._indices().nbytes() + tensor._values().nbytes();
    } else {
      bytes += static_cast<std::size_t>(tensor.numel()) * tensor.itemsize();
    }
  }
  return bytes;
}

}  // namespace stitch::dist_autograd
