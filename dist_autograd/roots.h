#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "stitch/dist_autograd/context.h"
#include "stitch/dist_autograd/graph/gradient_store.h"

namespace stitch::dist_autograd {

// Checks the roots of a backward and returns one gradient for each: that of `options`, or 1 for a
// root of one element. Throws Error(invalid_argument) naming the root and what is wrong with it.
[[nodiscard]] std::vector<at::Tensor> check_roots(const std::vector<at::Tensor>& roots,
                                                  const Options& options);

// Throws Error(invalid_argument) unless all are leaves that require grad.
void check_inputs(const std::vector<at::Tensor>& inputs);
[[nodiscard]] LeafSet leaf_set(const std::vector<at::Tensor>& leaves);

}  // namespace stitch::dist_autograd
