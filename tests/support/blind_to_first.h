#pragma once

#include <torch/csrc/autograd/custom_function.h>

namespace stitch::testing {

// a + b, with an undefined gradient for a.
struct BlindToFirst : torch::autograd::Function<BlindToFirst> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor a, at::Tensor b) {
    return a + b;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    return {at::Tensor(), grads[0]};
  }
};

}  // namespace stitch::testing
