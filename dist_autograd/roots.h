#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "stitch/dist_autograd/context.h"

namespace stitch::dist_autograd {

// Checks the roots of a backward and returns one gradient for each: that of `options`, or 1 for a
// root of one element. Throws Error(invalid_argument) naming the root and what is wrong with it.
[[nodiscard]] std::vector<at::Tensor> check_roots(const std::vector<at::Tensor>& roots,
                                                  const Options& options);

}  // namespace stitch::dist_autograd
